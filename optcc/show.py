"""How a noun shows itself: one card, drawn by rich on a terminal and as HTML in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

ROWS_MAX = 40


class Shown:
    """Mixin: a class with a `card` method gets its rich and its notebook form from it."""

    __slots__ = ()

    def card(self) -> Card:
        """What there is to show."""
        raise NotImplementedError

    def __rich__(self) -> Table:
        from rich.table import Table

        card = self.card()
        table = Table(title=card.title, title_justify="left", box=None, pad_edge=False)
        for column in card.columns:
            table.add_column(column)
        for row in card.shown_rows():
            table.add_row(*row)
        return table

    def _repr_html_(self) -> str:
        card = self.card()
        head = "".join(f"<th>{escape(column)}</th>" for column in card.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in card.shown_rows()
        )
        return f"<table><caption>{escape(card.title)}</caption><tr>{head}</tr>{body}</table>"


@dataclass(frozen=True, slots=True)
class Card(Shown):
    """A title, column names and rows of text; long cards say how many rows they leave out."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def card(self) -> Card:
        return self

    def shown_rows(self) -> tuple[tuple[str, ...], ...]:
        """The rows that fit, the last one saying what was left out."""
        if len(self.rows) <= ROWS_MAX:
            return self.rows
        left_out = f"... {len(self.rows) - ROWS_MAX} more"
        return (*self.rows[:ROWS_MAX], (left_out, *[""] * (len(self.columns) - 1)))

    def markdown(self) -> str:
        """All rows, as a table of the docs.

        >>> print(Card("two", ("case", "time"), (("a", "1 s"), ("b", "2 s"))).markdown(), end="")
        | case | time |
        | --- | --- |
        | a | 1 s |
        | b | 2 s |
        """
        lines = (self.columns, ("---",) * len(self.columns), *self.rows)
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


class WholeCard(Card):
    """A card of which every row is shown, such as those that the user asked for."""

    __slots__ = ()

    def shown_rows(self) -> tuple[tuple[str, ...], ...]:
        return self.rows
