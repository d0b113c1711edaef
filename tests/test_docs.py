"""The documentation holds together: links lead somewhere, terms are said once, modules say what they are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WINGS = ("schedules", "verify", "runtime", "experiments", "paper_figures")
LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
FENCE = re.compile(r"^(```+|~~~+).*?^\1\s*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)
TERM = re.compile(r"^([^\s:`#(\[][^\n]*)\n: ", re.MULTILINE)
SAID = re.compile(r"\{term\}`(?:[^`<]*<)?([^`<>]+)>?`")


def markdown() -> list[Path]:
    """Every Markdown file of ours."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    files += [path for wing in ("optcc", "tests", *WINGS) for path in (ROOT / wing).rglob("*.md")]
    return sorted({path for path in files if "_build" not in path.parts})


def anchors(text: str) -> set[str]:
    """What `#anchor` may name in a Markdown text."""
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(FENCE.sub("", text)))
    return {heading.strip().replace(" ", "-") for heading in kept} | set(re.findall(r"^\(([\w-]+)\)=$", text, re.M))


def broken_links(path: Path) -> Iterator[str]:
    """Relative links of a Markdown file that lead nowhere."""
    text = path.read_text(encoding="utf-8")
    for target in LINK.findall(CODE.sub("", FENCE.sub("", text))):
        if re.match(r"[a-z][a-z+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        other = path.parent / name if name else path
        known = other.exists()
        if known and anchor and other.suffix == ".md":
            known = anchor in anchors(other.read_text(encoding="utf-8"))
        if not known:
            yield target


def test_broken_links_are_recognised(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One: `two`\n[a](gone.md) [b](#one-two) [c](#three) [d](page.md#one-two) [e](https://example.org)\n"
        "`[f](code.md)`\n\n```\n[g](fence.md)\n```\n![h](gone.png)\n",
        encoding="utf-8",
    )
    assert list(broken_links(page)) == ["gone.md", "#three", "gone.png"]


@pytest.mark.parametrize("path", markdown(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    assert list(broken_links(path)) == []


def test_glossary() -> None:
    """Terms stand in alphabetical order, each once; what the pages say with `{term}` is defined."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = [term.removeprefix("\\") for term in TERM.findall(text)]
    assert len(terms) >= 15
    assert terms == sorted(terms, key=str.casefold)
    assert len({term.casefold() for term in terms}) == len(terms)
    for path in markdown():
        said = set(SAID.findall(path.read_text(encoding="utf-8")))
        assert said <= set(terms), f"{path.name}: not in the glossary: {sorted(said - set(terms))}"


def public_modules() -> list[Path]:
    """Modules without a leading underscore, by their real paths."""
    folders = [ROOT / "optcc", *(ROOT / wing for wing in WINGS)]
    files = {path.resolve() for folder in folders for path in folder.rglob("*.py")}
    return sorted(path for path in files if not path.name.startswith("_") or path.name == "__init__.py")


@pytest.mark.parametrize("path", public_modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_module_says_what_it_is(path: Path) -> None:
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert said
    assert said.splitlines()[0].strip()
