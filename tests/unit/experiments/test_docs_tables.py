"""The tables of the docs are those of the records; marks that are missing or doubled are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from optcc.errors import InputError
from optcc.experiments import docs_tables as module
from optcc.experiments.docs_tables import DOCS, DocsTable, command, docs_tables, with_table, written

TABLES = sorted(docs_tables(), key=lambda table: table.mark)


def test_every_marked_table_is_of_a_record() -> None:
    marks = {
        line.removeprefix("<!-- end of ").removesuffix(" -->")
        for page in DOCS.glob("*.md")
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("<!-- end of ")
    }
    assert marks == {table.mark for table in TABLES}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.mark)
def test_the_docs_show_the_record(table: DocsTable) -> None:
    """If not: python -m optcc.experiments.docs_tables."""
    page, text = written(table)
    assert page.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.mark)
def test_no_cell_is_minus_zero(table: DocsTable) -> None:
    assert re.findall(r"\| *[-−]0(?:\.0+)?(?![.\d])", table.markdown()) == []


@pytest.mark.parametrize(
    "page", ["", "<!-- end of a --><!-- a -->", "<!-- a -->", "<!-- a --><!-- a --><!-- end of a -->"]
)
def test_marks_must_be_there_once(page: str) -> None:
    with pytest.raises(InputError, match="must be there once"):
        with_table(page, "a", "| 1 |")


def test_the_command_rewrites_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = TABLES[0]
    _, text = written(table)
    page = tmp_path / table.page
    page.write_text(with_table(text, table.mark, "| old |"), encoding="utf-8")
    monkeypatch.setattr(module, "docs_tables", lambda: [table])
    monkeypatch.setattr(module, "DOCS", tmp_path)
    assert CliRunner().invoke(command).output == f"{page.name}: {table.mark}\n"
    assert page.read_text(encoding="utf-8") == text
    assert CliRunner().invoke(command).output == ""
