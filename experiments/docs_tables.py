"""The tables of the docs that show records: written from them, and from nothing else.

    python -m optcc.experiments.docs_tables        rewrites them in docs/

A table of the record `tool-speed.json` is between the comments `tool-speed` and `end of tool-speed` of its page.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from optcc.cli import main
from optcc.errors import InputError
from optcc.experiments.record import record_kinds
from optcc.experiments.recorder import Measured
from optcc.files import replace_file

DOCS = Path(__file__).resolve().parents[1] / "docs"


def shown_kinds() -> Iterator[type[Measured]]:
    """The kinds of records that a page shows."""
    for kind in record_kinds().values():
        if issubclass(kind, Measured) and kind.docs_page:
            yield kind


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


def written(kind: type[Measured]) -> tuple[Path, str]:
    """The page that shows records of this kind, and its text with the table of the record of the package."""
    path = DOCS / kind.docs_page
    return path, with_table(path.read_text(encoding="utf-8"), kind.own_path.stem, kind.read().markdown())


@click.command()
def command() -> None:
    """Rewrite the tables of the docs from the records."""
    for kind in shown_kinds():
        path, text = written(kind)
        if text != path.read_text(encoding="utf-8"):
            replace_file(path, text.encode())
            click.echo(f"{path.name}: {kind.own_path.stem}")


if __name__ == "__main__":
    main(command=command)
