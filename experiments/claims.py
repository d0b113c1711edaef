"""Claims of papers beside ours: what is stated, what our records say, and a verdict that the numbers decide.

A claim is data: what a paper states and where. What is ours is computed from a record whenever the table is made, and
never written down, so a record that is measured again can change a verdict. `optcc.experiments.paper_claims` has the
claims; `optcc figures` writes the table as Markdown, LaTeX and HTML, `optcc.experiments.docs_tables` into the manual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Literal, TypeVar

from optcc.errors import InputError
from optcc.experiments.record import Recorded
from optcc.show import Card

Kind = TypeVar("Kind", bound=Recorded)
Column = Literal["simulated", "measured", "bound"]
Sense = Literal["less", "more", "same"]
COLUMNS: tuple[Column, ...] = ("simulated", "measured", "bound")
NOTHING = "-"
"""What a cell says that no record fills."""


class ClaimOutcome(StrEnum):
    """What a verdict begins with."""

    REPRODUCED = "reproduced"
    EXCEEDED = "exceeded"
    DIFFERS = "differs"
    UNTESTED = "cannot be tested here"


@dataclass(frozen=True, slots=True)
class Paper:
    """Where claims are from."""

    name: str
    arxiv: str


@dataclass(frozen=True, slots=True)
class Stated:
    """A number that a source states, as text and as a range; an end is None where nothing is said of it.

    `source` is the place in the paper, or which other text says so.
    """

    text: str
    source: str
    least: float | None = None
    most: float | None = None

    def __post_init__(self) -> None:
        assert self.text and self.source
        assert self.least is None or self.most is None or self.least <= self.most, self.text


@dataclass(frozen=True, slots=True)
class ClaimValue:
    """What a record says: the range of the values, in the unit of what is stated, and how a table writes it."""

    least: float
    most: float
    text: str


@dataclass(frozen=True, slots=True)
class FromRecord(Generic[Kind]):
    """A value as a function of the record of a kind."""

    kind: type[Kind]
    compute: Callable[[Kind], ClaimValue]


@dataclass(frozen=True, slots=True)
class ByNumber:
    """The value in the column `of` decides.

    `less`: it must be at most what is stated, below the range it exceeds it; `more` likewise; `same`: the ranges must
    overlap. `tolerance` widens the stated range by that share of its ends. `because` is said where it differs.
    """

    of: Column
    sense: Sense
    tolerance: float
    because: str


@dataclass(frozen=True, slots=True)
class ByReason:
    """No number of ours can decide, for a reason."""

    outcome: Literal[ClaimOutcome.UNTESTED]
    because: str


@dataclass(frozen=True, slots=True)
class PaperClaim:
    """A statement of a paper, and how ours is computed and judged."""

    key: str
    paper: Paper
    says: str
    stated: Stated
    judged: ByNumber | ByReason
    simulated: FromRecord[Any] | None = None
    measured: FromRecord[Any] | None = None
    bound: FromRecord[Any] | None = None

    def __post_init__(self) -> None:
        assert self.judged.because, self.key
        if isinstance(self.judged, ByNumber):
            assert getattr(self, self.judged.of) is not None, self.key
            assert 0 <= self.judged.tolerance < 1, self.key
            ends = {"less": (self.stated.most,), "more": (self.stated.least,)}
            assert None not in ends.get(self.judged.sense, (self.stated.least, self.stated.most)), self.key

    def value(self, column: Column) -> FromRecord[Any] | None:
        """How the value of a column is computed."""
        found: FromRecord[Any] | None = getattr(self, column)
        return found


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """A claim beside what the records say: `found` by column, `records` their names with their formats."""

    claim: PaperClaim
    found: dict[Column, ClaimValue]
    records: tuple[str, ...]
    outcome: ClaimOutcome

    @property
    def verdict(self) -> str:
        """As a table writes it: by which number, with which tolerance, or why."""
        judged = self.claim.judged
        if self.outcome in (ClaimOutcome.REPRODUCED, ClaimOutcome.EXCEEDED):
            assert isinstance(judged, ByNumber)
            return f"{self.outcome} ({judged.of}, tolerance {100 * judged.tolerance:g} %)"
        return f"{self.outcome} because {judged.because}"

    def cells(self) -> tuple[str, ...]:
        """The cells of `HEADS`."""
        values = (self.found[each].text if each in self.found else NOTHING for each in COLUMNS)
        stated = f"{self.claim.stated.text} ({self.claim.stated.source})"
        return (self.claim.key, self.claim.says, stated, *values, self.verdict, ", ".join(self.records) or NOTHING)


HEADS = ("", "claim", "stated", *COLUMNS, "verdict", "records")


@dataclass(frozen=True, slots=True)
class ClaimsTable:
    """All rows, in the order of the claims."""

    rows: tuple[ClaimRow, ...]

    def cards(self) -> tuple[Card, ...]:
        """A table for each paper."""
        cells: dict[Paper, list[tuple[str, ...]]] = {}
        for row in self.rows:
            cells.setdefault(row.claim.paper, []).append(row.cells())
        return tuple(Card(f"{paper.name}, {paper.arxiv}", HEADS, tuple(rows)) for paper, rows in cells.items())

    def counts(self) -> str:
        """How many claims have which outcome, a sentence."""
        said = [f"{sum(row.outcome == each for row in self.rows)} {each}" for each in ClaimOutcome]
        return f"{len(self.rows)} claims: {', '.join(said)}."

    def markdown(self) -> str:
        """The counts, and a section for each paper."""
        parts = [f"## {card.title}\n\n{card.markdown()}" for card in self.cards()]
        return f"{self.counts()}\n\n" + "\n".join(parts)


def decide(stated: Stated, found: ClaimValue, by: ByNumber) -> ClaimOutcome:
    """What a number decides.

    >>> stated = Stated("2 to 6 %", "abstract", 2.0, 6.0)
    >>> by = ByNumber("simulated", "less", 0.05, "...")
    >>> [str(decide(stated, ClaimValue(value, value, ""), by)) for value in (1.0, 4.0, 6.2, 7.0)]
    ['exceeded', 'reproduced', 'reproduced', 'differs']
    """
    least = None if stated.least is None else stated.least - by.tolerance * abs(stated.least)
    most = None if stated.most is None else stated.most + by.tolerance * abs(stated.most)
    if by.sense == "less":
        assert most is not None
        if found.most > most:
            return ClaimOutcome.DIFFERS
        return ClaimOutcome.EXCEEDED if least is not None and found.most < least else ClaimOutcome.REPRODUCED
    assert least is not None
    if by.sense == "more":
        if found.least < least:
            return ClaimOutcome.DIFFERS
        return ClaimOutcome.EXCEEDED if most is not None and found.least > most else ClaimOutcome.REPRODUCED
    assert most is not None
    return ClaimOutcome.REPRODUCED if found.least <= most and found.most >= least else ClaimOutcome.DIFFERS


def kinds_of(claims: Iterable[PaperClaim]) -> tuple[type[Recorded], ...]:
    """The kinds of records that claims are computed from, in the order in which they occur."""
    values = (value for claim in claims for column in COLUMNS if (value := claim.value(column)) is not None)
    return tuple(dict.fromkeys(value.kind for value in values))


def table_of(claims: Sequence[PaperClaim], records: Sequence[tuple[str, Recorded]]) -> ClaimsTable:
    """The table, from records with the names of their files.

    Raises InputError if a kind is not there just once, or a record lacks a case that a claim is about, as one of a
    quick study does.
    """
    by_kind: dict[type[Recorded], tuple[str, Recorded]] = {}
    for kind in kinds_of(claims):
        own = [each for each in records if isinstance(each[1], kind)]
        if len(own) != 1:
            raise InputError(f"claims: {len(own)} records of {kind.format}: must be one")
        by_kind[kind] = own[0]

    def row(claim: PaperClaim) -> ClaimRow:
        found: dict[Column, ClaimValue] = {}
        names: dict[str, None] = {}
        for column in COLUMNS:
            value = claim.value(column)
            if value is not None:
                name, record = by_kind[value.kind]
                try:
                    found[column] = value.compute(record)
                except (StopIteration, LookupError, ValueError, ArithmeticError):
                    raise InputError(
                        f"record {name!r}: lacks a case of claim {claim.key}, {column}: must be of a whole study"
                    ) from None
                names[f"{name.removesuffix('.json')} ({record.format})"] = None
        judged = claim.judged
        outcome = decide(claim.stated, found[judged.of], judged) if isinstance(judged, ByNumber) else judged.outcome
        return ClaimRow(claim, found, tuple(names), outcome)

    return ClaimsTable(tuple(row(claim) for claim in claims))


def package_table(claims: Sequence[PaperClaim]) -> ClaimsTable:
    """The table from the records that come with the package."""
    return table_of(claims, [(kind.own_path.name, kind.read()) for kind in kinds_of(claims)])
