"""Symbolic programs: the loops of a schedule function over its transfers, for every number of ranks.

`optcc.verify.all_ranks.symbolic_interpreter` derives one from the author's source. `for step in range(p - 1)` becomes
one `Loop` with a symbolic variable, and `segment.reduce(...)` a `Move` whose ranks and section are terms
(`symbolic_terms`). A node is a Loop, Guard, Move, Along (a tree) or Require (an index within its list), among others.

As a check on the interpreter, `transfers_of` expands a symbolic program for concrete numbers, and
`optcc.verify.all_ranks.proof` compares the result with the transfers that the schedule function itself writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from optcc.schedule import DATA
from optcc.verify.all_ranks.symbolic_terms import (
    All,
    AnyOf,
    Atom,
    Eq,
    Formula,
    IfThenElse,
    Le,
    Not,
    Term,
    le,
    lt,
    power,
    quotient,
)

SPREAD = 2
"""The operation of a `Move` that stands for copies of a section from two ranks, `src` and `dst`, to all others."""
OWNER = "the rank to which this part of the message belongs"
"""The root of a tree over all ranks for a segment of a ReduceScatter or AllGather."""
SEGMENT_TURN = "segment_turn"
"""The variable that numbers the segments of one residue class."""


@dataclass(frozen=True, slots=True)
class Loop:
    """`body` for `var` = low, ..., high - 1, in sequence."""

    var: str
    low: Term
    high: Term
    body: tuple[Node, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Guard:
    """`body` where `test` holds."""

    test: Formula
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer of section `section` of this segment of pipeline number `pipeline` of a family."""

    op: int
    src: Term
    dst: Term
    family: int
    pipeline: Term
    section: Term
    line: int
    src_slot: int = DATA
    dst_slot: int = DATA


@dataclass(frozen=True, slots=True)
class Along:
    """A reduction or a broadcast along a tree, of which only the root is known: as a term, or as text that is the
    same for the same root."""

    op: int
    root: Term | str
    family: int
    pipeline: Term
    section: Term
    line: int


@dataclass(frozen=True, slots=True)
class Require:
    """`test` must hold here, or the interpretation is wrong: in Python a negative index counts from the end."""

    test: Formula
    line: int


@dataclass(frozen=True, slots=True)
class Touch:
    """The chunk is named here: it must exist. Only while a block is read; then a `Move`, an `Along` or a `Require`."""

    family: int
    pipeline: Term
    section: Term
    line: int


@dataclass(frozen=True, slots=True)
class EachEdge:
    """`body` for every edge of some trees, of which `number` says which, in an order that is not known. Only while a
    loop over beats is read; then an `Along`."""

    number: int
    tree: Term
    child: Term
    parent: Term
    level: Term
    body: tuple[Node, ...]
    line: int


Node = Loop | Guard | Move | Along | Require | Touch | EachEdge


@dataclass(frozen=True, slots=True)
class Family:
    """`count` pipelines of equal shape, each over `share` of the message (a number, or 1 / term).

    With `cells` they are the cells of an exchange, which may have any shares. Where `count` is a product, `inner` is
    the factor by which a pipeline's number is two digits.
    """

    count: Term
    sections: Term
    share: Fraction | Term
    line: int
    scratch: int = 0
    cells: bool = False
    inner: Term | None = None


@dataclass(frozen=True, slots=True)
class Walk:
    """One `for` over the segments of pipelines: `bodies[j % len(bodies)]` for the j-th segment of each."""

    families: tuple[int, ...]
    bodies: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class ParameterCase:
    """A schedule's parameters as terms over `sizes`: variables with a least value and no upper bound.

    `ranks` is the number of ranks. Where it is a product, `inner` is the factor that counts ranks of one server.
    `straggler` is the variable of the one straggler among `servers`. `bits` are further variables: the bit length of a
    positive term over the sizes. `members` is a variable from 1 to `ranks`: how many ranks a group has.
    """

    name: str
    sizes: tuple[tuple[str, int], ...]
    ranks: Term
    values: tuple[tuple[str, Any], ...] = ()
    inner: Term | None = None
    straggler: str | None = None
    bits: tuple[tuple[str, Term], ...] = ()
    members: str | None = None

    @property
    def servers(self) -> Term:
        """The number of servers."""
        if self.inner is None:
            return self.ranks
        servers = quotient(self.ranks, self.inner)
        assert servers is not None, "ranks fill the servers"
        return servers

    @property
    def variables(self) -> list[str]:
        """The variables that a concrete schedule gives a value."""
        others = [name for name in (self.straggler, self.members) if name is not None]
        return [*(name for name, _ in self.sizes), *others]

    def facts(self) -> list[Formula]:
        """The assumptions about the variables."""
        found = [le(low, Term.var(name)) for name, low in self.sizes]
        if self.straggler is not None:
            found += [le(0, Term.var(self.straggler)), lt(Term.var(self.straggler), self.servers)]
        if self.members is not None:
            found += [le(1, Term.var(self.members)), le(Term.var(self.members), self.ranks)]
        for name, term in self.bits:
            bits = Term.var(name)
            found += [le(1, bits), le(power(bits - 1), term), lt(term, power(bits))]
        return found

    def with_bits(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The sizes with the bit lengths that follow from them."""
        return {**sizes, **{name: int(term.at(sizes)).bit_length() for name, term in self.bits}}


@dataclass(frozen=True, slots=True)
class ReadingLemma:
    """What the reading rests on, to be proved: `facts` imply `goal`."""

    name: str
    statement: str
    facts: tuple[Formula, ...]
    goal: Formula


@dataclass(frozen=True, slots=True)
class Reading:
    """The symbolic program of a schedule function in one case; `assumed` is what the reading rests on, in words.

    If `relabelled`, ranks are places in a list that has every rank once; if `in_rings`, each segment has such a list,
    and a transfer may go through a third rank's scratch space. If `unordered`, transfers of different chunks may be in
    another order than in the program.
    """

    case: ParameterCase
    families: tuple[Family, ...]
    walks: tuple[Walk, ...]
    assumed: tuple[str, ...] = ()
    relabelled: bool = False
    unordered: bool = False
    lemmas: tuple[ReadingLemma, ...] = ()
    in_rings: bool = False

    @property
    def has_cells(self) -> bool:
        """True if its pipelines are cells of an exchange."""
        return any(family.cells for family in self.families)

    def atoms(self) -> Iterator[Atom]:
        """Every atom of its transfers and loops."""
        for node in self.nodes():
            match node:
                case Loop(_, low, high):
                    yield from (*low.atoms(), *high.atoms())
                case Move(_, src, dst):
                    yield from (*src.atoms(), *dst.atoms())

    @property
    def has_scratch(self) -> bool:
        """True if a transfer reads or writes scratch space."""
        moves = [node for node in self.nodes() if isinstance(node, Move)]
        return any(slot != DATA for move in moves for slot in (move.src_slot, move.dst_slot))

    def nodes(self) -> Iterator[Node]:
        """Every node, nested ones included."""
        stack: list[Node] = [node for walk in self.walks for body in walk.bodies for node in body]
        while stack:
            node = stack.pop()
            yield node
            if isinstance(node, Loop | Guard):
                stack += node.body


class OutsideSubset(Exception):
    """A construct outside the supported subset; `line` of the author's file, or of a helper's."""

    def __init__(self, construct: str, line: int) -> None:
        super().__init__(f"line {line}: {construct}")
        self.construct, self.line = construct, line


def transfers_of(reading: Reading, sizes: Mapping[str, int], segments: int) -> list[tuple[int, ...]]:
    """The transfers for these sizes in order: (src, dst, op, segment, section), as the DSL numbers segments; where a
    transfer reads or writes scratch space, also the slots that each reads and writes."""
    sizes = reading.case.with_bits(sizes)
    slots = reading.has_scratch
    lines = ["def write(rows, k, " + ", ".join(sizes) + "):"]
    offset = Term(())
    first: list[Term] = []
    for family in reading.families:
        first.append(offset * Term.var("k"))
        offset = offset + family.count
    for walk in reading.walks:
        lines.append("    for j in range(k):")
        for residue, body in enumerate(walk.bodies):
            lines.append(f"        if j % {len(walk.bodies)} == {residue}:")
            lines.append(f"            {SEGMENT_TURN} = j // {len(walk.bodies)}")
            lines += _code(body, first, "            ", slots)
    lines.append("    return rows")
    scope: dict[str, Any] = {}
    exec("\n".join(lines), scope)
    rows: list[tuple[int, ...]] = scope["write"]([], segments, **sizes)
    return rows


def _code(nodes: Sequence[Node], first: Sequence[Term], indent: str, slots: bool) -> list[str]:
    lines = []
    for node in nodes:
        match node:
            case Loop(var, low, high, body):
                lines.append(f"{indent}for {var} in range({low}, {high}):")
                lines += _code(body, first, indent + "    ", slots) or [f"{indent}    pass"]
            case Guard(test, body):
                lines.append(f"{indent}if {code_of(test)}:")
                lines += _code(body, first, indent + "    ", slots) or [f"{indent}    pass"]
            case Move(op, src, dst, family, pipeline, section):
                segment = f"{first[family]} + ({pipeline}) * k + j"
                through = f", {node.src_slot}, {node.dst_slot}" if slots else ""
                lines.append(f"{indent}rows.append(({src}, {dst}, {op}, {segment}, {section}{through}))")
            case Require(test):
                lines.append(f"{indent}if not {code_of(test)}: raise AssertionError('line {node.line}')")
            case Along():
                raise AssertionError("a tree is not known transfer by transfer")
    return lines


def code_of(formula: Formula) -> str:
    """The formula as Python code; `str` of a term is its code."""
    match formula:
        case Le(term):
            return f"({term} <= 0)"
        case Eq(term):
            return f"({term} == 0)"
        case All(parts):
            return "(" + (" and ".join(map(code_of, parts)) or "True") + ")"
        case AnyOf(parts):
            return "(" + (" or ".join(map(code_of, parts)) or "False") + ")"
        case Not(part):
            return f"(not {code_of(part)})"
        case IfThenElse(test, then, otherwise):
            return f"({code_of(then)} if {code_of(test)} else {code_of(otherwise)})"
