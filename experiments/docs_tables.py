"""The tables of the docs that show records: written from them, and from nothing else.

    python -m optcc.experiments.docs_tables        rewrites them in docs/

A table of the record `tool-speed.json` is between the comments `tool-speed` and `end of tool-speed` of its page. The
table of the papers' claims, which is made from many records, is on a page of its own in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from optcc.cli import main
from optcc.errors import InputError
from optcc.experiments.claims import package_table
from optcc.experiments.paper_claims import CLAIMS
from optcc.experiments.record import record_kinds
from optcc.experiments.recorder import Measured
from optcc.files import replace_file

DOCS = Path(__file__).resolve().parents[1] / "docs"


@dataclass(frozen=True, slots=True)
class DocsTable:
    """A table of the docs: its page, the name in the comments around it, and how it is made."""

    page: str
    mark: str
    markdown: Callable[[], str]


def _markdown_of(kind: type[Measured]) -> Callable[[], str]:
    return lambda: kind.read().markdown()


def docs_tables() -> Iterator[DocsTable]:
    """Every table: those of records by their kind, and that of the papers' claims."""
    for kind in record_kinds().values():
        if issubclass(kind, Measured) and kind.docs_page:
            yield DocsTable(kind.docs_page, kind.own_path.stem, _markdown_of(kind))
    yield DocsTable("claims.md", "claims", lambda: package_table(CLAIMS).markdown())


def with_table(page: str, mark: str, table: str) -> str:
    """`page` with `table` between the comments of that mark. Raises InputError if they are not there once each.

    >>> print(with_table("<!-- a -->old<!-- end of a -->", "a", "| new |"))
    <!-- a -->
    <BLANKLINE>
    | new |
    <BLANKLINE>
    <!-- end of a -->
    """
    begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed or begin in rest or end in after:
        raise InputError(f"docs: {begin} and {end}: must be there once, in this order")
    return f"{before}{begin}\n\n{table.rstrip()}\n\n{end}{after}"


def written(table: DocsTable) -> tuple[Path, str]:
    """The page with a table, and its text with the table as the records of the package have it."""
    path = DOCS / table.page
    return path, with_table(path.read_text(encoding="utf-8"), table.mark, table.markdown())


@click.command()
def command() -> None:
    """Rewrite the tables of the docs from the records."""
    for table in docs_tables():
        path, text = written(table)
        if text != path.read_text(encoding="utf-8"):
            replace_file(path, text.encode())
            click.echo(f"{path.name}: {table.mark}")


if __name__ == "__main__":
    main(command=command)
