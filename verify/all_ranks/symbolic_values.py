"""The values of the symbolic interpreter: ranges, arrays, pipelines, chunks.

Whole numbers are `Term`s of `optcc.verify.all_ranks.symbolic_terms`; these classes are all other values of the subset.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optcc.schedule import DATA
from optcc.verify.all_ranks.names import Names
from optcc.verify.all_ranks.symbolic_terms import Formula, Mod, Term, Var, quotient


@dataclass(frozen=True, slots=True)
class Span:
    """The numbers of a `range`, or of a list or tuple of them."""

    low: Term
    high: Term
    kind: str = "range"


@dataclass(frozen=True, slots=True)
class AnyOrder:
    """Every rank once in an order that is not known, or nothing: what a schedule's `order` is."""

    kind: str = ""


@dataclass(frozen=True, slots=True)
class RanksInOrder:
    """A tuple of every rank once, in an order that is not known."""

    count: Term


@dataclass(frozen=True, slots=True)
class Relabelled:
    """The rank at a place of `RanksInOrder`."""

    place: Term


@dataclass(frozen=True, slots=True)
class Skipping:
    """The numbers from 0 to `count` without `gap`."""

    count: Term
    gap: Term


@dataclass(frozen=True, slots=True, eq=False)
class Lazy:
    """A comprehension, with the variables that it sees."""

    node: ast.ListComp | ast.GeneratorExp
    scope: dict[str, Any]
    home: Names


@dataclass(frozen=True, slots=True)
class Product:
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Enumerated:
    over: Any


@dataclass(frozen=True, slots=True)
class Reversed:
    over: Any


@dataclass(frozen=True, slots=True)
class Zipped:
    """Pipelines iterated in parallel, possibly with an endless generator."""

    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Lanes:
    """An array with one entry per lane."""

    lane: str
    count: Term
    value: Term


@dataclass(frozen=True, slots=True)
class Set:
    values: tuple[Any, ...] | Span


@dataclass(frozen=True, slots=True)
class Pipelines:
    """A family of pipelines; one pipeline if `many` is false."""

    family: int
    many: bool


@dataclass(frozen=True, slots=True)
class SymbolicSegment:
    family: int
    pipeline: Term


@dataclass(frozen=True, slots=True)
class Slices:
    """The segments of equal number of a family of pipelines."""

    family: int


@dataclass(frozen=True, slots=True)
class Cells:
    """The chunks of the cells of an exchange, of one segment, None for a cell without a share; `walked` if these are
    one segment's, else the segments of them all."""

    family: int
    walked: bool = False


@dataclass(frozen=True, slots=True)
class SymbolicRounds:
    """`ExchangeRounds`: each section is exchanged by its owner and the last rank, and later copied to every rank."""


@dataclass(frozen=True, slots=True)
class SymbolicOwner:
    """The owner of a round's exchange, or None; `owner` where there is one."""

    owner: Term


@dataclass(frozen=True, slots=True)
class SymbolicCopies:
    """The copies of a round."""


@dataclass(frozen=True, slots=True)
class SegmentList:
    """All segments of a pipeline."""

    family: int


@dataclass(frozen=True, slots=True)
class SymbolicEdges:
    """`TreeEdges`, with the number of its trees; `number` tells apart those that are made in different places."""

    n_trees: int
    number: int

    @property
    def depth(self) -> Term:
        """The highest level, at least one."""
        return Term.var(f"depth_{self.number}")


@dataclass(frozen=True, slots=True)
class Groups:
    """The segments of the groups' pipelines, each with its group: one group stands for all."""

    family: int


@dataclass(frozen=True, slots=True)
class TreeTurns:
    """Turns of pipelines, each segment with two trees of one root: one segment stands for all."""

    family: int
    root: str


@dataclass(frozen=True, slots=True)
class TurnPart:
    """The segments of a turn that are reduced, or those that are broadcast."""

    turns: TreeTurns
    broadcasting: bool


@dataclass(frozen=True, slots=True)
class TreeSegments:
    """Segments with a tree each, whose root is `root`: one segment stands for all."""

    family: int
    root: Term | str


@dataclass(frozen=True, slots=True)
class RingTurns:
    """Turns of a segment for every ring, each of all ranks."""

    family: int


@dataclass(frozen=True, slots=True)
class RingTurn:
    """The segments of a turn, each with its ring: one of them stands for all."""

    family: int


@dataclass(frozen=True, slots=True)
class SymbolicRing:
    """A ring: every rank once, in an order that is not known, and ranks to go through."""

    ranks: Term


@dataclass(frozen=True, slots=True)
class EveryPair:
    """Every pair of different ranks whose cell has a share, once, in an order that is not known."""


@dataclass(frozen=True, slots=True)
class SymbolicChunk:
    family: int
    pipeline: Term
    section: Term
    slot: int = DATA


@dataclass(frozen=True, slots=True)
class SymbolicTree:
    root: Term | str


@dataclass(frozen=True, slots=True)
class FirstOf:
    """A list with only its first entry known."""

    first: Any


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value that is not read: equal to what has the same text and comes from the same evaluation, its `number`."""

    text: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class TruthOnly:
    """What `and` or `or` makes of other values than True and False: one of them, of which only the truth is known."""

    truth: Formula


@dataclass(frozen=True, slots=True)
class Method:
    """The bound method `of.name`."""

    of: Any
    name: str


@dataclass(frozen=True, slots=True)
class Endless:
    """An endless generator and the value that it yields."""

    value: Any


class Thing:
    """The program, or its collective, as the author's function sees it."""

    def __init__(self, name: str) -> None:
        self.name = name


def is_once(value: Any) -> bool:
    """True for an iterator, which Python can traverse only once."""
    return isinstance(value, Product | Enumerated | Reversed | Zipped) or (
        isinstance(value, Lazy) and isinstance(value.node, ast.GeneratorExp)
    )


def root_key(root: Any) -> Term | str:
    return root if isinstance(root, Term) else f"{root}"


def shown(value: Any) -> str:
    return str(value) if isinstance(value, Term) else type(value).__name__.lower()


def in_range(value: Term, count: Term, ranges: Mapping[str, tuple[Term, Term]]) -> bool:
    """True if 0 <= value < count follows from the ranges."""
    match value.atom:
        case Var(name):
            return ranges.get(name) == (Term(()), count)
        case Mod(_, by):
            return by == count
    return False


def digits(value: Term, inner: Term, ranges: Mapping[str, tuple[Term, Term]]) -> tuple[Term | None, Term]:
    """(a, b) with value = a * inner + b and 0 <= b < inner for a positive `inner`, if that follows from the ranges,
    else a is None."""
    high, low = Term(()), Term(())
    for monomial, factor in value.parts:
        part = Term(((monomial, factor),))
        over = quotient(part, inner)
        high, low = (high + over, low) if over is not None else (high, low + part)
    return (high, low) if low.constant == 0 or in_range(low, inner, ranges) else (None, low)
