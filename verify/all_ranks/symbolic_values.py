"""The values of the symbolic interpreter: ranges, arrays, pipelines, chunks.

Whole numbers are `Term`s of `optcc.verify.all_ranks.symbolic`; these classes are everything else in the subset.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optcc.verify.all_ranks.symbolic import Mod, Term, Var, quotient


@dataclass(frozen=True, slots=True)
class Span:
    """A `range`."""

    low: Term
    high: Term


@dataclass(frozen=True, slots=True)
class Skipping:
    """The numbers from 0 to `count` without `gap`."""

    count: Term
    gap: Term


@dataclass(frozen=True, slots=True, eq=False)
class Lazy:
    """A comprehension, with the variables that it sees."""

    node: ast.ListComp | ast.GeneratorExp | ast.SetComp
    scope: dict[str, Any]
    globals: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Product:
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Enumerated:
    over: Any


@dataclass(frozen=True, slots=True)
class Zipped:
    """Pipelines walked side by side, perhaps with what an endless generator yields."""

    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Lanes:
    """An array, one entry a lane."""

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
class SymbolicChunk:
    family: int
    pipeline: Term
    section: Term


@dataclass(frozen=True, slots=True)
class SymbolicTree:
    root: Term | str


@dataclass(frozen=True, slots=True)
class FirstOf:
    """A list of which only the first entry is known."""

    first: Any


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value that only its text is known of: equal texts are equal values."""

    text: str


@dataclass(frozen=True, slots=True)
class Method:
    """`of.name`, to be called."""

    of: Any
    name: str


@dataclass(frozen=True, slots=True)
class Endless:
    """What a generator yields each time, in an endless loop."""

    value: Any


class Thing:
    """The program, or its collective, as the author's function sees it."""

    def __init__(self, name: str) -> None:
        self.name = name


def is_once(value: Any) -> bool:
    """Whether Python could iterate over it once only."""
    return isinstance(value, Product | Enumerated | Zipped) or (
        isinstance(value, Lazy) and isinstance(value.node, ast.GeneratorExp)
    )


def root_key(root: Any) -> Term | str:
    return root if isinstance(root, Term) else f"{root}"


def shown(value: Any) -> str:
    return str(value) if isinstance(value, Term) else type(value).__name__.lower()


def in_range(value: Term, count: Term, ranges: Mapping[str, tuple[Term, Term]]) -> bool:
    """Whether it is plain to see that 0 <= value < count."""
    match value.atom:
        case Var(name):
            return ranges.get(name) == (Term(()), count)
        case Mod(_, by):
            return by == count
    return False


def digits(value: Term, inner: Term, ranges: Mapping[str, tuple[Term, Term]]) -> tuple[Term | None, Term]:
    """(a, b) with value = a * inner + b and 0 <= b < inner for a positive `inner`, where that is plain to see; a is
    None where not."""
    high, low = Term(()), Term(())
    for monomial, factor in value.parts:
        part = Term(((monomial, factor),))
        over = quotient(part, inner)
        high, low = (high + over, low) if over is not None else (high, low + part)
    return (high, low) if low.constant == 0 or in_range(low, inner, ranges) else (None, low)
