"""Symbolic programs: the loops of a schedule function over its transfers, for every number of ranks.

`optcc.verify.all_ranks.symbolic_interpreter` derives one from the author's source. `for step in range(p - 1)` becomes
one `Loop` with a symbolic variable, and `segment.reduce(...)` a `Move` whose ranks and section are `Term`s:

    Term     polynomials over integer variables, `a mod n`, and the i-th number other than a gap
    Formula  comparisons of terms: `Le` and `Eq` against zero, `All`, `AnyOf`, `Not`, `IfThenElse`
    Node     Loop, Guard, Move, Along (a tree), Require (an index within its list)

As a check on the interpreter, `transfers_of` expands a symbolic program for concrete numbers, and
`optcc.verify.all_ranks.proof` compares the result with the transfers that the schedule function itself writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np

SEGMENT_TURN = "segment_turn"
"""The variable that numbers the segments of one residue class."""

# Terms ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Var:
    """An integer variable."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Mod:
    """`value` mod `by`, from 0 to by - 1."""

    value: Term
    by: Term

    def __str__(self) -> str:
        return f"(({self.value}) % ({self.by}))"


@dataclass(frozen=True, slots=True)
class Skip:
    """The `value`-th nonnegative integer other than `gap`, from 0."""

    value: Term
    gap: Term

    def __str__(self) -> str:
        return f"({self.value} + ({self.value} >= {self.gap}))"


@dataclass(frozen=True, slots=True)
class Unskip:
    """The inverse of `Skip`: how many nonnegative integers other than `gap` are below `value`."""

    value: Term
    gap: Term

    def __str__(self) -> str:
        return f"({self.value} - ({self.value} > {self.gap}))"


Atom = Var | Mod | Skip | Unskip
Monomial = tuple[Atom, ...]


@dataclass(frozen=True, slots=True)
class Term:
    """A polynomial with integer coefficients in normal form: equal polynomials over equal atoms compare equal.

    >>> p = Term.var("p")
    >>> (p + 1) * 2 - p - 2 == p, str(p - 1)
    (True, 'p - 1')
    """

    parts: tuple[tuple[Monomial, int], ...]

    @classmethod
    def of(cls, value: int | Atom | Term) -> Term:
        """A number, an atom or a term as a term."""
        if isinstance(value, Term):
            return value
        return cls._normal({(): int(value)} if isinstance(value, int | np.integer) else {(value,): 1})

    @classmethod
    def var(cls, name: str) -> Term:
        """The variable `name`."""
        return cls.of(Var(name))

    @classmethod
    def _normal(cls, parts: Mapping[Monomial, int]) -> Term:
        kept = [(monomial, factor) for monomial, factor in parts.items() if factor]
        return cls(tuple(sorted(kept, key=lambda part: (-len(part[0]), str(part[0])))))

    def __add__(self, other: int | Term) -> Term:
        parts = dict(self.parts)
        for monomial, factor in Term.of(other).parts:
            parts[monomial] = parts.get(monomial, 0) + factor
        return Term._normal(parts)

    def __mul__(self, other: int | Term) -> Term:
        parts: dict[Monomial, int] = {}
        for left, a in self.parts:
            for right, b in Term.of(other).parts:
                monomial = tuple(sorted((*left, *right), key=str))
                parts[monomial] = parts.get(monomial, 0) + a * b
        return Term._normal(parts)

    def __neg__(self) -> Term:
        return self * -1

    def __sub__(self, other: int | Term) -> Term:
        return self + -Term.of(other)

    @property
    def constant(self) -> int | None:
        """The value of a constant term, else None."""
        if not self.parts:
            return 0
        return self.parts[0][1] if self.parts[0][0] == () else None

    @property
    def atom(self) -> Atom | None:
        """The atom of a term that is a single atom, else None."""
        if len(self.parts) == 1 and self.parts[0][1] == 1 and len(self.parts[0][0]) == 1:
            return self.parts[0][0][0]
        return None

    def atoms(self) -> Iterator[Atom]:
        """Every atom, nested ones included."""
        for monomial, _ in self.parts:
            for atom in monomial:
                yield atom
                if not isinstance(atom, Var):
                    yield from atom.value.atoms()
                    yield from (atom.by if isinstance(atom, Mod) else atom.gap).atoms()

    def names(self) -> set[str]:
        """The names of its variables."""
        return {atom.name for atom in self.atoms() if isinstance(atom, Var)}

    def put(self, values: Mapping[str, Term]) -> Term:
        """Substitutes terms for variables."""
        total = Term(())
        for monomial, factor in self.parts:
            product = Term.of(factor)
            for atom in monomial:
                product = product * _put_atom(atom, values)
            total = total + product
        return total

    def at(self, values: Mapping[str, Any]) -> Any:
        """The value for these numbers, or arrays, by name of variable."""
        total: Any = 0
        for monomial, factor in self.parts:
            product: Any = factor
            for atom in monomial:
                product = product * _atom_at(atom, values)
            total = total + product
        return total

    def __str__(self) -> str:
        text = ""
        for monomial, factor in self.parts:
            size = "*".join([*([str(abs(factor))] if abs(factor) != 1 or not monomial else []), *map(str, monomial)])
            text += (" - " if factor < 0 else " + ") + size if text else ("-" if factor < 0 else "") + size
        return text or "0"


def _put_atom(atom: Atom, values: Mapping[str, Term]) -> Term:
    match atom:
        case Var(name):
            return values.get(name, Term.of(atom))
        case Mod(value, by):
            return mod(value.put(values), by.put(values))
        case Skip(value, gap):
            return Term.of(Skip(value.put(values), gap.put(values)))
        case Unskip(value, gap):
            return Term.of(Unskip(value.put(values), gap.put(values)))


def _atom_at(atom: Atom, values: Mapping[str, Any]) -> Any:
    match atom:
        case Var(name):
            return values[name]
        case Mod(value, by):
            return value.at(values) % by.at(values)
        case Skip(value, gap):
            number = value.at(values)
            return number + (number >= gap.at(values))
        case Unskip(value, gap):
            number = value.at(values)
            return number - (number > gap.at(values))


def mod(value: Term, by: Term) -> Term:
    """`value` mod `by` for a positive `by`; constant if both are."""
    if value.constant is not None and by.constant is not None:
        return Term.of(value.constant % by.constant)
    if by.constant == 1 or value.constant == 0:
        return Term(())
    inner = value.atom
    return value if isinstance(inner, Mod) and inner.by == by else Term.of(Mod(value, by))


def quotient(value: Term, by: Term) -> Term | None:
    """`value` / `by` if `by` is a monomial that divides every part, else None."""
    if len(by.parts) != 1:
        return None
    (divisor, factor), parts = by.parts[0], {}
    for monomial, each in value.parts:
        left = list(monomial)
        for atom in divisor:
            if atom not in left:
                return None
            left.remove(atom)
        if each % factor:
            return None
        parts[tuple(left)] = each // factor
    return Term._normal(parts)


# Formulas -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Le:
    """`term` <= 0."""

    term: Term

    def __str__(self) -> str:
        low = Term(tuple((m, -f) for m, f in self.term.parts if f < 0))
        return f"{self.term + low} <= {low}"


@dataclass(frozen=True, slots=True)
class Eq:
    """`term` = 0."""

    term: Term

    def __str__(self) -> str:
        low = Term(tuple((m, -f) for m, f in self.term.parts if f < 0))
        return f"{self.term + low} = {low}"


@dataclass(frozen=True, slots=True)
class All:
    """Conjunction."""

    parts: tuple[Formula, ...]

    def __str__(self) -> str:
        return "(" + " and ".join(map(str, self.parts)) + ")" if self.parts else "true"


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Disjunction."""

    parts: tuple[Formula, ...]

    def __str__(self) -> str:
        return "(" + " or ".join(map(str, self.parts)) + ")" if self.parts else "false"


@dataclass(frozen=True, slots=True)
class Not:
    """Negation."""

    part: Formula

    def __str__(self) -> str:
        return f"not {self.part}"


@dataclass(frozen=True, slots=True)
class IfThenElse:
    """`then` where `test` holds, else `otherwise`."""

    test: Formula
    then: Formula
    otherwise: Formula

    def __str__(self) -> str:
        return f"({self.then} if {self.test} else {self.otherwise})"


Formula = Le | Eq | All | AnyOf | Not | IfThenElse
TRUE, FALSE = All(()), AnyOf(())


def le(left: Term | int, right: Term | int) -> Formula:
    """`left` <= `right`."""
    term = Term.of(left) - right
    return Le(term) if term.constant is None else TRUE if term.constant <= 0 else FALSE


def lt(left: Term | int, right: Term | int) -> Formula:
    """`left` < `right`."""
    return le(Term.of(left) + 1, right)


def eq(left: Term | int, right: Term | int) -> Formula:
    """`left` = `right`."""
    term = Term.of(left) - right
    return Eq(term) if term.constant is None else TRUE if term.constant == 0 else FALSE


def both(*parts: Formula) -> Formula:
    """Simplified conjunction."""
    kept = [each for part in parts for each in (part.parts if isinstance(part, All) else (part,))]
    if FALSE in kept:
        return FALSE
    return kept[0] if len(kept) == 1 else All(tuple(dict.fromkeys(kept)))


def either(*parts: Formula) -> Formula:
    """Simplified disjunction."""
    kept = [each for part in parts for each in (part.parts if isinstance(part, AnyOf) else (part,))]
    if TRUE in kept:
        return TRUE
    return kept[0] if len(kept) == 1 else AnyOf(tuple(dict.fromkeys(kept)))


def no(part: Formula) -> Formula:
    """Simplified negation."""
    if part in (TRUE, FALSE):
        return FALSE if part == TRUE else TRUE
    if isinstance(part, Le):
        return le(1, part.term)
    return part.part if isinstance(part, Not) else Not(part)


def choose(test: Formula, then: Formula, otherwise: Formula) -> Formula:
    """`then` where `test` holds, else `otherwise`."""
    if test in (TRUE, FALSE) or then == otherwise:
        return otherwise if test == FALSE else then
    if TRUE in (then, otherwise):
        return either(test, otherwise) if then == TRUE else either(no(test), then)
    if FALSE in (then, otherwise):
        return both(no(test), otherwise) if then == FALSE else both(test, then)
    return IfThenElse(test, then, otherwise)


def put(formula: Formula, values: Mapping[str, Term]) -> Formula:
    """Substitutes terms for variables."""
    match formula:
        case Le(term):
            return le(term.put(values), 0)
        case Eq(term):
            return eq(term.put(values), 0)
        case All(parts):
            return both(*(put(part, values) for part in parts))
        case AnyOf(parts):
            return either(*(put(part, values) for part in parts))
        case Not(part):
            return no(put(part, values))
        case IfThenElse(test, then, otherwise):
            return choose(put(test, values), put(then, values), put(otherwise, values))


def holds(formula: Formula, values: Mapping[str, Any]) -> Any:
    """The truth value for these numbers, or arrays, by name of variable."""
    match formula:
        case Le(term):
            return np.asarray(term.at(values)) <= 0
        case Eq(term):
            return np.asarray(term.at(values)) == 0
        case All(parts):
            return reduce(np.logical_and, (holds(part, values) for part in parts), np.True_)
        case AnyOf(parts):
            return reduce(np.logical_or, (holds(part, values) for part in parts), np.False_)
        case Not(part):
            return np.logical_not(holds(part, values))
        case IfThenElse(test, then, otherwise):
            return np.where(holds(test, values), holds(then, values), holds(otherwise, values))


# Programs -------------------------------------------------------------------------------------------------------------


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


Node = Loop | Guard | Move | Along | Require | Touch


@dataclass(frozen=True, slots=True)
class Family:
    """`count` pipelines of equal shape, each over `share` of the message (a number, or 1 / term)."""

    count: Term
    sections: Term
    share: Fraction | Term
    line: int


@dataclass(frozen=True, slots=True)
class Walk:
    """One `for` over the segments of pipelines: `bodies[j % len(bodies)]` for the j-th segment of each."""

    families: tuple[int, ...]
    bodies: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class ParameterCase:
    """A schedule's parameters as terms over `sizes`: variables with a least value and no upper bound.

    `ranks` is the number of ranks. Where it is a product, `inner` is the factor that counts ranks of one server.
    `straggler` is the variable of the one straggler among `servers`.
    """

    name: str
    sizes: tuple[tuple[str, int], ...]
    ranks: Term
    values: tuple[tuple[str, Any], ...] = ()
    inner: Term | None = None
    straggler: str | None = None

    @property
    def servers(self) -> Term:
        """The number of servers."""
        if self.inner is None:
            return self.ranks
        servers = quotient(self.ranks, self.inner)
        assert servers is not None, "ranks fill the servers"
        return servers

    def facts(self) -> list[Formula]:
        """The assumptions about the variables."""
        found = [le(low, Term.var(name)) for name, low in self.sizes]
        if self.straggler is not None:
            found += [le(0, Term.var(self.straggler)), lt(Term.var(self.straggler), self.servers)]
        return found


@dataclass(frozen=True, slots=True)
class Reading:
    """The symbolic program of a schedule function in one case; `assumed` is what the reading rests on, in words.

    If `relabelled`, ranks are places in a list that has every rank once.
    """

    case: ParameterCase
    families: tuple[Family, ...]
    walks: tuple[Walk, ...]
    assumed: tuple[str, ...] = ()
    relabelled: bool = False

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
    """The transfers for these sizes in order: (src, dst, op, segment, section), as the DSL numbers segments."""
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
            lines += _code(body, first, "            ")
    lines.append("    return rows")
    scope: dict[str, Any] = {}
    exec("\n".join(lines), scope)
    rows: list[tuple[int, ...]] = scope["write"]([], segments, **sizes)
    return rows


def _code(nodes: Sequence[Node], first: Sequence[Term], indent: str) -> list[str]:
    lines = []
    for node in nodes:
        match node:
            case Loop(var, low, high, body):
                lines.append(f"{indent}for {var} in range({low}, {high}):")
                lines += _code(body, first, indent + "    ") or [f"{indent}    pass"]
            case Guard(test, body):
                lines.append(f"{indent}if {code_of(test)}:")
                lines += _code(body, first, indent + "    ") or [f"{indent}    pass"]
            case Move(op, src, dst, family, pipeline, section):
                segment = f"{first[family]} + ({pipeline}) * k + j"
                lines.append(f"{indent}rows.append(({src}, {dst}, {op}, {segment}, {section}))")
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
