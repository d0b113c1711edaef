"""The documentation holds together: links lead somewhere, terms are said once, modules say what they are."""

from __future__ import annotations

import ast
import doctest
import inspect
import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import optcc
from optcc import cli

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


# --- the manual's parts, its tutorial and its commands ----------------------------------------------------------------

DOCS = ROOT / "docs"
TOCTREE = re.compile(r"^```\{toctree\}\n:caption: (\w[\w-]*)\n(?::[^\n]*\n)*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_page_is_in_one_of_four_parts() -> None:
    parts = TOCTREE.findall((DOCS / "index.md").read_text(encoding="utf-8"))
    assert [name for name, _ in parts] == ["Tutorials", "How-to", "Reference", "Explanation"]
    listed = [page for _, pages in parts for page in pages.split()]
    assert sorted(listed) == sorted(path.stem for path in DOCS.glob("*.md") if path.stem != "index")


def test_the_api_reference_has_every_public_name() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\.\. auto(?:class|function):: optcc\.(\w+)$", page, re.MULTILINE))
    assert named - {"simulate"} == set(optcc.__all__) - {"OptccError"}
    for target in re.findall(r"^\.\. auto\w+:: (optcc\.\S+)$", page, re.MULTILINE):
        if not target.startswith("optcc.torch"):
            found = pkgutil.resolve_name(target)
            assert inspect.getdoc(found), target


def steps_of(page: str) -> Iterator[tuple[str, str, str]]:
    """In reading order: ("file", name, text to append), and ("run", command, what is shown of its output)."""
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        if language == "python":
            first, _, rest = block.partition("\n")
            yield "file", first.removeprefix("# ").removesuffix(", continued"), rest
        elif language == "console":
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                yield "run", command, shown


def test_the_tutorial_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = 0
    for kind, what, text in steps_of((DOCS / "tutorial.md").read_text(encoding="utf-8")):
        if kind == "file":
            with (tmp_path / what).open("a", encoding="utf-8") as file:
                file.write(text)
            continue
        words = shlex.split(what)
        assert words[0] == "optcc"
        code = cli.run(words[1:])
        said = capsys.readouterr()
        assert code == 0, f"{what}\n{said.out}{said.err}"
        pattern = re.escape(text.strip()).replace(re.escape("..."), ".*")
        assert re.fullmatch(pattern, said.out.strip(), re.DOTALL), f"{what}\n{said.out}\n--- shown ---\n{text}"
        ran += 1
    assert ran >= 10


COMMAND = re.compile(r"(?:^|\s|`)optcc ([a-z]+)((?: +(?:-{1,2}[a-zA-Z_][\w-]*|[^\s`|;]+))*)")


@pytest.mark.parametrize("name", ["recipes.md", "bench.md", "pytorch.md", "fabric.md", "contract.md", "runtime.md"])
def test_commands_in_the_docs_have_the_options_that_they_show(name: str) -> None:
    """Each option after `optcc COMMAND` is one of that command's."""
    text = (DOCS / name).read_text(encoding="utf-8")
    for command, words in COMMAND.findall(text):
        if command not in cli.COMMANDS:
            continue
        found = cli.optcc.get_command(click.Context(cli.optcc), command)
        assert found is not None
        if isinstance(found, click.Group):
            continue
        known = {option for each in found.params for option in (*each.opts, *each.secondary_opts)} | {"--help", "-h"}
        for word in re.findall(r"(?<=\s)-{1,2}[a-zA-Z][\w-]*", words):
            assert word in known, f"{name}: optcc {command} {word}"


@pytest.mark.parametrize(
    "path", [path for path in markdown() if ">>> " in path.read_text()], ids=lambda each: each.name
)
def test_the_examples_of_a_page_print_what_it_shows(path: Path) -> None:
    failed, tried = doctest.testfile(str(path), module_relative=False)
    assert tried
    assert not failed
