"""The table of claims: the same cells in Markdown, LaTeX and HTML, made by `optcc figures` from its records."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from optcc.experiments.claims import HEADS, kinds_of, package_table
from optcc.experiments.paper_claims import CLAIMS
from optcc.paper_figures import build, claims_table
from optcc.paper_figures.numbers import escaped

TABLE = package_table(CLAIMS)
FILES = {name: content.decode() for name, content in claims_table.files(TABLE).items()}
CELLS = [cell for card in TABLE.cards() for row in (card.columns, *card.rows) for cell in row]


class Cells(HTMLParser):
    """The text of all cells, and the tags that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.cells[-1] += data


def test_html_has_every_cell_and_nothing_from_elsewhere() -> None:
    page = Cells()
    page.feed(FILES["claims.html"])
    assert page.open == []
    assert page.cells == [cell.replace("`", "") for cell in CELLS]
    assert not re.search(r"(?:src|href)=", FILES["claims.html"])


def test_markdown_has_every_cell() -> None:
    lines = [line for line in FILES["claims.md"].splitlines() if line.startswith("|") and "---" not in line]
    assert [cell for line in lines for cell in line.removeprefix("| ").removesuffix(" |").split(" | ")] == CELLS


def test_tex_has_every_cell_between_the_rules_of_booktabs() -> None:
    text = FILES["claims.tex"]
    assert text.count(r"\begin{longtable}") == text.count(r"\bottomrule") == len(TABLE.cards())
    assert text.count(r"\toprule") == text.count(r"\midrule") == 2 * len(TABLE.cards())
    rows = [line for line in text.splitlines() if line.endswith(r" \\") and "rule" not in line]
    assert len(rows) == len(CLAIMS)
    for line, row in zip(rows, (row for card in TABLE.cards() for row in card.rows), strict=True):
        cells = re.split(r"(?<!\\) & ", line.removesuffix(r" \\"))
        assert len(cells) == len(HEADS)
        assert [re.sub(r"\\texttt\{([^}]*)\}", r"\1", cell) for cell in cells] == [
            escaped(cell.replace("`", "")) for cell in row
        ]
    body = re.sub(r"\\[{}%&#$_]", "", text)
    assert body.count("{") == body.count("}")
    assert not re.search(r"(?<!\\)[#$_]", "".join(rows))


@pytest.mark.slow
def test_figures_write_it_twice_with_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install 'optcc[viz]'")
    paths = [kind.own_path for kind in kinds_of(CLAIMS)]
    for folder in ("first", "second"):
        build.build(paths, tmp_path / folder, quick=True)
    for name, content in FILES.items():
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes() == content.encode()
    manifest = json.loads((tmp_path / "first" / "manifest.json").read_bytes())["figures"]["claims"]
    assert manifest["files"] == ["claims.md", "claims.tex", "claims.html"]
    assert {each["file"] for each in manifest["records"]} == {path.name for path in paths}
    numbers = json.loads((tmp_path / "first" / "numbers.json").read_bytes())["claims"]
    row = next(row for row in TABLE.rows if row.claim.key == "R20")
    assert numbers["R20/measured"] == row.found["measured"].most
    assert numbers["R20/verdict"] == str(row.outcome)
    assert r"\csname optcc/claims/R20/measured\endcsname" in (tmp_path / "first" / "numbers.tex").read_text("utf-8")


def test_it_is_not_made_where_a_record_lacks(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install 'optcc[viz]'")
    build.build([kinds_of(CLAIMS)[0].own_path], tmp_path, quick=True)
    assert not list(tmp_path.glob("claims.*"))
