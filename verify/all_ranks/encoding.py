"""Formulas in Z3's integer arithmetic, and what Z3 is told about powers of two, remainders and exclusive ors.

A remainder, a power of two or an exclusive or is an integer variable. What relates these variables are *facts*: each is
true of the integers that the atoms stand for, whatever the values of the variables in them, and linear. Z3 may know too
little by them, and then finds no proof; it never knows anything that is not so. Let b, b' be powers of two, b <= b',
and v mod b the remainder from 0 to b - 1. The facts are instances of

    2^e >= e + 1; 2^e = 2^d if e = d, 2^e = 2 * 2^d if e = d + 1, 2^e >= 2 * 2^d if e > d      for d, e >= 0
    v - v mod b and w - w mod b differ by a multiple of b: not at all, by b, by 2b, or by 3b or more
    b' - (v - v mod b) is a multiple of b;  v mod b' - v mod b is a multiple of b from 0 to b' - b
    v ^ b = v + b if v mod 2b < b, else v - b
    x ^ y = z exactly if x = y ^ z;  x ^ y = 0 exactly if x = y
    of x, y and x ^ y, if two are from 0 to b - 1, then the third is
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from optcc.verify.all_ranks.symbolic_terms import (
    All,
    AnyOf,
    Atom,
    Eq,
    Formula,
    IfThenElse,
    Le,
    Least,
    Mod,
    Not,
    Pow,
    Skip,
    Term,
    Unskip,
    Var,
    Xor,
    mod,
    xor,
)
from optcc.verify.smt import Query

_TURNS = (-2, 2, -1, 1, 0)
"""Quotients by which the case split of a remainder goes."""
_EXPONENTS_KNOWN = 4
_XOR_PARTS_MAX = 4
"""Limit on the parts of an exclusive or that is formed only to relate two others."""


def encode(query: Query, formula: Formula) -> Any:
    """One formula, and the facts about its atoms, which are required of the query."""
    encoder = Encoder(query)
    truth = encoder.truth(formula)
    encoder.require_facts()
    return truth


@dataclass(eq=False)
class Encoder:
    """Formulas of one query, in which equal atoms are one variable. Call `require_facts` after the last formula."""

    query: Query
    relates: bool = False
    """Whether to relate the remainders by any divisor; if not, only those by powers of two."""
    _terms: dict[Atom, Any] = field(default_factory=dict)

    def term(self, term: Term) -> Any:
        """A term."""
        total = self.query.whole(0)
        for monomial, factor in term.parts:
            made = self.query.whole(factor)
            for atom in monomial:
                made = made * self._atom(atom)
            total = total + made
        return total

    def truth(self, formula: Formula) -> Any:
        """A formula."""
        query = self.query
        match formula:
            case Le(term):
                return self.term(term) <= 0
            case Eq(term):
                return self.term(term) == 0
            case All(parts):
                return query.all_of(map(self.truth, parts))
            case AnyOf(parts):
                return query.any_of(map(self.truth, parts))
            case Not(part):
                return query.no(self.truth(part))
            case IfThenElse(test, then, otherwise):
                return query.either(self.truth(test), self.truth(then), self.truth(otherwise))

    def require_facts(self) -> None:
        """Adds the facts about all atoms so far, and about those that these facts bring in."""
        done: list[Atom] = []
        while len(done) < len(self._terms):
            new = [atom for atom in self._terms if atom not in done]
            for atom in new:
                self.query.require("facts", *self._facts_of(atom))
                for other in done:
                    self.query.require("facts", *self._facts_of_two(other, atom))
                done.append(atom)

    def _atom(self, atom: Atom) -> Any:
        """The variable of an atom; a remainder is a case split over a few quotients, and beyond these a variable."""
        if atom in self._terms:
            return self._terms[atom]
        query = self.query
        match atom:
            case Var(name):
                made = query.integer(name)
            case Mod(value, by):
                a, n = self.term(value), self.term(by)
                made = query.integer("beyond", str(atom))
                query.require("mod", query.implies(n > 0, query.all_of((made >= 0, made < n))))
                for turns in _TURNS:
                    made = query.either(query.all_of((turns * n <= a, a < (turns + 1) * n)), a - turns * n, made)
            case Skip(value, gap):
                a = self.term(value)
                made = query.either(a >= self.term(gap), a + 1, a)
            case Unskip(value, gap):
                a = self.term(value)
                made = query.either(a > self.term(gap), a - 1, a)
            case Least(one, other):
                a, b = self.term(one), self.term(other)
                made = query.either(a <= b, a, b)
            case Pow() | Xor():
                made = query.integer("the value of", str(atom))
        self._terms[atom] = made
        return made

    # What is known of one atom, and of two ------------------------------------------------------------------------

    def _facts_of(self, atom: Atom) -> Iterator[Any]:
        query = self.query
        match atom:
            case Pow(exponent):
                e, value = self.term(exponent), self._atom(atom)
                yield query.implies(e >= 0, value >= e + 1)
                for small in range(_EXPONENTS_KNOWN):
                    yield query.implies(e == small, value == 2**small)
            case Mod(value, by) if _is_of_powers(by):
                a, n, rest = self.term(value), self.term(by), self._atom(atom)
                yield query.implies(query.all_of((n > 0, a >= 0)), rest <= a)
            case Xor(parts):
                made, values = self._atom(atom), [self.term(part) for part in parts]
                yield query.implies(query.all_of(each >= 0 for each in values), made >= 0)
                if len(parts) == 2:
                    one, other = values
                    yield query.all_of(((made == 0) == (one == other), (made == one) == (other == 0)))
                    yield (made == other) == (one == 0)
                bit = next((part for part in parts if _power(part) is not None), None)
                if bit is not None:
                    rest, b = xor(*(part for part in parts if part != bit)), self.term(bit)
                    a, low = self.term(rest), self.term(mod(rest, bit * 2))
                    yield query.implies(self._is_power(bit), made == query.either(low < b, a + b, a - b))

    def _facts_of_two(self, one: Atom, other: Atom) -> Iterator[Any]:
        match one, other:
            case Pow(), Pow():
                yield from self._two_powers(one, other)
            case Mod(), Mod() if self._is_related(one, other):
                yield from self._two_remainders(one, other)
            case (Mod() as rest, Pow() as power) | (Pow() as power, Mod() as rest) if _power(rest.by) is not None:
                b, base = self.term(rest.by), self.term(rest.value) - self._atom(rest)
                fits = self.query.all_of((self._is_power(rest.by), self._is_power(Term.of(power))))
                fits = self.query.all_of((fits, b <= self._atom(power)))
                yield self.query.implies(fits, self._is_multiple(self._atom(power) - base, b))
            case Xor(), Xor():
                yield from self._two_xors(one, other)
            case (Xor() as value, Pow() as power) | (Pow() as power, Xor() as value):
                yield from self._within_power(value, power)

    def _is_related(self, one: Mod, other: Mod) -> bool:
        powers = _is_of_powers(one.by) and _is_of_powers(other.by)
        return powers or (self.relates and one.by == other.by)

    def _two_powers(self, one: Pow, other: Pow) -> Iterator[Any]:
        query = self.query
        for low, high in ((one, other), (other, one)):
            d, e = self.term(low.exponent), self.term(high.exponent)
            small, large = self._atom(low), self._atom(high)
            yield query.implies(query.all_of((d >= 0, d == e)), small == large)
            yield query.implies(query.all_of((d >= 0, d + 1 == e)), small * 2 == large)
            yield query.implies(query.all_of((d >= 0, d < e)), small * 2 <= large)

    def _two_remainders(self, one: Mod, other: Mod) -> Iterator[Any]:
        query = self.query
        b, c = self.term(one.by), self.term(other.by)
        rest, more = self._atom(one), self._atom(other)
        apart = self.term(one.value) - rest - (self.term(other.value) - more)
        yield query.implies(query.all_of((b > 0, b == c)), self._is_multiple(apart, b))
        if one.value == other.value and _power(one.by) is not None and _power(other.by) is not None:
            both = query.all_of((self._is_power(one.by), self._is_power(other.by)))
            for low, high, by, least in ((rest, more, b, c), (more, rest, c, b)):
                within = query.all_of((high >= low, high - low <= least - by, self._is_multiple(high - low, by)))
                yield query.implies(query.all_of((both, by <= least)), within)

    def _within_power(self, value: Xor, power: Pow) -> Iterator[Any]:
        """Of numbers whose exclusive or is zero, if all but one are below a power of two, then that one is."""
        query, bound = self.query, self._atom(power)
        numbers = [self._atom(value), *(self.term(part) for part in value.parts)]
        small = [query.all_of((each >= 0, each < bound)) for each in numbers]
        for at, one in enumerate(small):
            others = [each for other, each in enumerate(small) if other != at]
            yield query.implies(query.all_of((self._is_power(Term.of(power)), *others)), one)

    def _two_xors(self, one: Xor, other: Xor) -> Iterator[Any]:
        x, y = self._atom(one), self._atom(other)
        left, right = set(one.parts), set(other.parts)
        apart = [each for each in (*one.parts, *other.parts) if (each in left) != (each in right)]
        if len(apart) <= _XOR_PARTS_MAX:
            first = next((each for each in apart if _power(each) is None), apart[0])
            rest = xor(*(each for each in apart if each != first))
            yield (x == y) == (self.term(first) == self.term(rest))
        for here in one.parts:
            for there in other.parts:
                if left - {here} == right - {there}:
                    yield (x == self.term(there)) == (y == self.term(here))

    def _is_multiple(self, value: Any, of: Any) -> Any:
        """What holds of a multiple of a positive number, in linear arithmetic."""
        near = [value == of * turns for turns in (0, 1, -1, 2, -2)]
        return self.query.any_of((*near, value >= of * 3, value <= of * -3))

    def _is_power(self, term: Term) -> Any:
        """That the exponent of a power of two is not negative."""
        power = _power(term)
        assert power is not None
        return self.query.true if power.exponent.constant is not None else self.term(power.exponent) >= 0


def _power(term: Term) -> Pow | None:
    """The power of two of a term that is one, or one times a constant power of two."""
    if term.constant is not None:
        is_one = term.constant > 0 and not term.constant & (term.constant - 1)
        return Pow(Term.of(term.constant.bit_length() - 1)) if is_one else None
    ((monomial, factor), *more) = term.parts
    if more or len(monomial) != 1 or factor < 1 or factor & (factor - 1):
        return None
    (atom,) = monomial
    return atom if isinstance(atom, Pow) else None


def _is_of_powers(term: Term) -> bool:
    return any(isinstance(atom, Pow) for atom in term.atoms())
