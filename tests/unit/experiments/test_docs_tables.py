"""The tables of the docs are those of the records; marks that are missing or doubled are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from optcc.errors import InputError
from optcc.experiments import docs_tables
from optcc.experiments.docs_tables import DOCS, command, shown_kinds, with_table, written
from optcc.experiments.recorder import Measured

KINDS = sorted(shown_kinds(), key=lambda kind: kind.own_path.stem)


def test_every_marked_table_is_of_a_record() -> None:
    marks = {
        line.removeprefix("<!-- end of ").removesuffix(" -->")
        for page in DOCS.glob("*.md")
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("<!-- end of ")
    }
    assert marks == {kind.own_path.stem for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.own_path.stem)
def test_the_docs_show_the_record(kind: type[Measured]) -> None:
    """If not: python -m optcc.experiments.docs_tables."""
    page, text = written(kind)
    assert page.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    "page", ["", "<!-- end of a --><!-- a -->", "<!-- a -->", "<!-- a --><!-- a --><!-- end of a -->"]
)
def test_marks_must_be_there_once(page: str) -> None:
    with pytest.raises(InputError, match="must be there once"):
        with_table(page, "a", "| 1 |")


def test_the_command_rewrites_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS[0]
    _, text = written(kind)
    page = tmp_path / kind.docs_page
    page.write_text(with_table(text, kind.own_path.stem, "| old |"), encoding="utf-8")
    monkeypatch.setattr(docs_tables, "shown_kinds", lambda: [kind])
    monkeypatch.setattr(docs_tables, "DOCS", tmp_path)
    assert CliRunner().invoke(command).output == f"{page.name}: {kind.own_path.stem}\n"
    assert page.read_text(encoding="utf-8") == text
    assert CliRunner().invoke(command).output == ""
