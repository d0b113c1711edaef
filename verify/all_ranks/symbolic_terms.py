"""Terms over integer variables, and formulas that compare them: what symbolic programs are made of.

Term     polynomials over integer variables, `a mod n`, and the i-th number other than a gap
Formula  comparisons of terms: `Le` and `Eq` against zero, `All`, `AnyOf`, `Not`, `IfThenElse`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import xor as bitwise_xor
from typing import Any

import numpy as np

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


@dataclass(frozen=True, slots=True)
class Pow:
    """Two to the power of `exponent`, which is not negative."""

    exponent: Term

    def __str__(self) -> str:
        return f"(2**({self.exponent}))"


@dataclass(frozen=True, slots=True)
class Xor:
    """The bitwise exclusive or of `parts`, at least two, all different: see `xor`."""

    parts: tuple[Term, ...]

    def __str__(self) -> str:
        return "(" + " ^ ".join(f"({each})" for each in self.parts) + ")"


@dataclass(frozen=True, slots=True)
class Least:
    """The lesser of two numbers."""

    one: Term
    other: Term

    def __str__(self) -> str:
        return f"min({self.one}, {self.other})"


Atom = Var | Mod | Skip | Unskip | Pow | Xor | Least
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
                for inner in _terms_of(atom):
                    yield from inner.atoms()

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


def _terms_of(atom: Atom) -> tuple[Term, ...]:
    match atom:
        case Var():
            return ()
        case Mod(value, by):
            return value, by
        case Skip(value, gap) | Unskip(value, gap):
            return value, gap
        case Pow(exponent):
            return (exponent,)
        case Xor(parts):
            return parts
        case Least(one, other):
            return one, other


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
        case Pow(exponent):
            return power(exponent.put(values))
        case Xor(parts):
            return xor(*(part.put(values) for part in parts))
        case Least(one, other):
            return least(one.put(values), other.put(values))


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
        case Pow(exponent):
            return 2 ** exponent.at(values)
        case Xor(parts):
            return reduce(bitwise_xor, (part.at(values) for part in parts))
        case Least(one, other):
            return np.minimum(one.at(values), other.at(values))


def mod(value: Term, by: Term) -> Term:
    """`value` mod `by` for a positive `by`; constant if both are."""
    if value.constant is not None and by.constant is not None:
        return Term.of(value.constant % by.constant)
    if by.constant == 1 or value.constant == 0:
        return Term(())
    value = _without_rest(value, by)
    inner = value.atom
    return value if isinstance(inner, Mod) and inner.by == by else Term.of(Mod(value, by))


def _without_rest(value: Term, by: Term) -> Term:
    """A term that is equal modulo `by`, without a remainder by it among several parts."""
    if len(value.parts) < 2:
        return value
    flat = Term(())
    for monomial, factor in value.parts:
        atom = Term(((monomial, 1),)).atom
        part = atom.value if isinstance(atom, Mod) and atom.by == by else Term(((monomial, 1),))
        flat = flat + part * factor
    return flat


def power(exponent: Term) -> Term:
    """Two to the power of `exponent`, which must not be negative; constant if it is."""
    return Term.of(Pow(exponent)) if exponent.constant is None else Term.of(2**exponent.constant)


def xor(*values: Term) -> Term:
    """The bitwise exclusive or: equal parts cancel, constants are one, and parts are in one order.

    >>> a, b = Term.var("a"), Term.var("b")
    >>> str(xor(a, xor(b, a))), xor(a, b) == xor(b, a)
    ('b', True)
    """
    constant, kept = 0, dict[Term, None]()
    for value in values:
        for part in value.atom.parts if isinstance(value.atom, Xor) else (value,):
            if part.constant is not None:
                constant ^= part.constant
            elif part in kept:
                del kept[part]
            else:
                kept[part] = None
    parts = sorted(kept, key=str) + ([Term.of(constant)] if constant else [])
    if len(parts) < 2:
        return parts[0] if parts else Term(())
    return Term.of(Xor(tuple(parts)))


def least(one: Term, other: Term) -> Term:
    """The lesser of two numbers, if their difference is constant one of the two terms."""
    apart = (one - other).constant
    if apart is not None:
        return one if apart <= 0 else other
    return Term.of(Least(one, other))


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
