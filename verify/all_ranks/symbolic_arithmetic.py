"""Integer arithmetic and comparisons of the symbolic interpreter, evaluated as far as ranges allow."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from optcc.verify.all_ranks.symbolic import SEGMENT_TURN, OutsideSubset, ParameterCase
from optcc.verify.all_ranks.symbolic_terms import (
    FALSE,
    TRUE,
    Atom,
    Eq,
    Formula,
    Le,
    Least,
    Mod,
    Not,
    Pow,
    Term,
    Var,
    both,
    either,
    eq,
    le,
    lt,
    mod,
    no,
    power,
    quotient,
    xor,
)
from optcc.verify.all_ranks.symbolic_values import (
    AnyOrder,
    FirstOf,
    Lanes,
    Opaque,
    RanksInOrder,
    SegmentList,
    Set,
    Skipping,
    Span,
    TruthOnly,
    digits,
    in_range,
    shown,
)

_EXPONENT_MAX = 64
_ARRAY_FACTORS_MAX = 2**24
"""Limit on the factors of a number in an array: with two numbers of 2**16 that is 2**56."""


class NeedsModulus(Exception):
    def __init__(self, modulus: int) -> None:
        self.modulus = modulus


_COMPARE: dict[type[ast.cmpop], Callable[[Term, Term], Formula]] = {
    ast.Lt: lt,
    ast.LtE: le,
    ast.Gt: lambda a, b: lt(b, a),
    ast.GtE: lambda a, b: le(b, a),
    ast.Eq: eq,
    ast.NotEq: lambda a, b: no(eq(a, b)),
}


@dataclass(eq=False)
class Arithmetic:
    """Arithmetic in one case, evaluated by the least values and the ranges of variables."""

    case: ParameterCase
    ranges: dict[str, tuple[Term, Term]] = field(default_factory=dict, kw_only=True)
    line: int = field(default=0, kw_only=True)

    def _outside(self, construct: str) -> OutsideSubset:
        return OutsideSubset(construct, self.line)

    def _constant(self, value: Any) -> Any:
        if isinstance(value, bool):
            return TRUE if value else FALSE
        if isinstance(value, int | np.integer):
            return Term.of(int(value))
        if isinstance(value, tuple):
            return tuple(self._constant(each) for each in value)
        return value

    def _compare(self, op: ast.cmpop, left: Any, right: Any) -> Formula:
        if isinstance(op, ast.Is | ast.IsNot | ast.Eq | ast.NotEq) and (left is None or right is None):
            if any(isinstance(each, Opaque | TruthOnly | AnyOrder) for each in (left, right)):
                raise self._outside(f"whether {shown(right if left is None else left)} is None")
            same = left is None and right is None
            return TRUE if same == isinstance(op, ast.Is | ast.Eq) else FALSE
        if isinstance(left, Span) and isinstance(right, Span) and isinstance(op, ast.Eq | ast.NotEq) and left == right:
            return TRUE if isinstance(op, ast.Eq) else FALSE
        if isinstance(op, ast.In | ast.NotIn):
            if isinstance(right, Span):
                found = both(self._compare(ast.LtE(), right.low, left), self._compare(ast.Lt(), left, right.high))
            elif isinstance(right, list | tuple):
                found = either(*(self._compare(ast.Eq(), left, each) for each in right))
            else:
                raise self._outside(f"in {shown(right)}")
            return found if isinstance(op, ast.In) else no(found)
        if not isinstance(left, Term) or not isinstance(right, Term) or type(op) not in _COMPARE:
            raise self._outside(f"comparison of {shown(left)} and {shown(right)}")
        return self._decided(_COMPARE[type(op)](left, right))

    def _decided(self, test: Formula) -> Formula:
        """TRUE or FALSE where the least values of the variables decide it, else the formula."""
        match test:
            case Le(term):
                if self._low(-term) is not None and self._low(-term) >= 0:  # type: ignore[operator]
                    return TRUE
                if self._low(term) is not None and self._low(term) > 0:  # type: ignore[operator]
                    return FALSE
            case Eq(term):
                for each in (term, -term):
                    low = self._low(each)
                    if low is not None and low > 0:
                        return FALSE
            case Not(part):
                return no(self._decided(part))
        return test

    def _low(self, term: Term) -> int | None:
        """A lower bound of the term; None if none is known."""
        lowest = dict(self.case.sizes) | dict.fromkeys((name for name, _ in self.case.bits), 1)
        for name in reversed(self.ranges):  # what is subtracted is at most the last number of its range
            taken = dict(term.parts).get((Var(name),), 0)
            if taken < 0 and sum(name in Term(((monomial, 1),)).names() for monomial, _ in term.parts) == 1:
                term = term + (self.ranges[name][1] - 1 - Term.var(name)) * taken
        total = 0
        for monomial, factor in term.parts:
            product = factor
            for atom in monomial:
                if factor < 0:
                    return None
                low = self._low_of_atom(atom, lowest)
                if low is None or low < 0:
                    return None
                product *= low
            total += product
        return total

    def _low_of_atom(self, atom: Atom, lowest: Mapping[str, int]) -> int | None:
        match atom:
            case Var(name) if name in self.ranges:
                return self._low(self.ranges[name][0])
            case Var(name) if name == self.case.members:
                return 1
            case Var(name):
                return 0 if name == self.case.straggler else lowest.get(name)
            case Mod():
                return 0
            case Pow(exponent):
                least_exponent = self._low(exponent)
                return None if least_exponent is None or least_exponent < 0 else 2 ** min(least_exponent, 64)
            case Least(one, other):
                lows = [self._low(one), self._low(other)]
                return None if lows[0] is None or lows[1] is None else min(lows[0], lows[1])
        return None

    def _power(self, exponent: Term) -> Term:
        low = self._low(exponent)
        if low is None or low < 0 or low > _EXPONENT_MAX:
            raise self._outside(f"2 to the power of {exponent}: may be negative, or large")
        return power(exponent)

    def _divided_power(self, of: Pow, by: Term, *, is_shift: bool) -> Term:
        """A power of two divided by another, or shifted to the right, where that is whole."""
        if is_shift:
            shift: Term | None = by
        elif by.constant is not None and by.constant > 0 and not by.constant & (by.constant - 1):
            shift = Term.of(by.constant.bit_length() - 1)
        else:
            shift = by.atom.exponent if isinstance(by.atom, Pow) else None
        if shift is None:
            return self._floordiv(Term.of(of), by)
        low = self._low(shift)
        if low is None or low < 0:
            raise self._outside(f"{of} shifted by {shift}: may be negative")
        left = self._low(of.exponent - shift)
        if left is None or left < 0:
            raise self._outside(f"{of} / 2**({shift}): may be less than one")
        return power(of.exponent - shift)

    def _bit_length(self, term: Term) -> Term:
        """The bit length of a positive number: exact for a power of two, or one less, else a variable."""
        low = self._low(term)
        if low is None or low < 1 or not term.names() <= {name for name, _ in self.case.sizes}:
            raise self._outside(f"bit length of {term}: must be a positive number that follows from the ranks")
        for below in (0, 1):
            whole = (term + below).atom
            if isinstance(whole, Pow) and (self._low(whole.exponent) or 0) >= below:
                return whole.exponent + 1 - below
        for name, known in self.case.bits:
            if known == term:
                return Term.var(name)
        name = f"bits_{len(self.case.bits) + 1}"
        self.case = replace(self.case, bits=(*self.case.bits, (name, term)))
        return Term.var(name)

    def _arithmetic(self, op: ast.operator, left: Any, right: Any) -> Any:
        if isinstance(left, Lanes) or isinstance(right, Lanes):
            return self._lanes(op, left, right)
        if isinstance(left, Set) and isinstance(right, Set) and isinstance(op, ast.BitAnd):
            return self._common(left, right)
        if isinstance(left, list) and isinstance(right, list) and isinstance(op, ast.Add):
            return [*left, *right]
        if isinstance(left, list) and isinstance(op, ast.Mult) and isinstance(right, Term):
            if right.constant is not None:
                return left * right.constant
            if not left or (self._low(right) or 0) < 1:
                raise self._outside(f"a list {right} times, which may be empty")
            return FirstOf(left[0])
        if not isinstance(left, Term) or not isinstance(right, Term):
            raise self._outside(f"arithmetic with {shown(right if isinstance(left, Term) else left)}")
        match op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Mod():
                return self._mod(left, right)
            case ast.FloorDiv() | ast.RShift() if isinstance(left.atom, Pow):
                return self._divided_power(left.atom, right, is_shift=isinstance(op, ast.RShift))
            case ast.FloorDiv():
                return self._floordiv(left, right)
            case ast.Pow() if left.constant == 2 and right.constant is None:
                return self._power(right)
            case ast.LShift() if right.constant is None or 0 <= right.constant <= _EXPONENT_MAX:
                return left * self._power(right)
            case ast.BitXor():
                return xor(left, right)
            case ast.Pow() if left.constant is not None and right.constant is not None and right.constant >= 0:
                return Term.of(left.constant**right.constant)
        raise self._outside(f"operator {type(op).__name__} on numbers that are not known")

    def _lanes(self, op: ast.operator, left: Any, right: Any) -> Lanes:
        lanes = left if isinstance(left, Lanes) else right
        values = []
        for side in (left, right):
            if isinstance(side, Lanes):
                if side.count != lanes.count:
                    raise self._outside("arrays of different lengths")
                side = side.value.put({side.lane: Term.var(lanes.lane)})
            values.append(side)
        self.ranges[lanes.lane] = (Term(()), lanes.count)
        found = Lanes(lanes.lane, lanes.count, self._arithmetic(op, *values))
        del self.ranges[lanes.lane]
        for term in (*values, found.value):
            self._check_fits(term)
        return found

    def _check_fits(self, term: Term) -> None:
        """Arrays hold 64 bits, and wrap: each number is below 2**16, as ranks are, or a rest of one that is."""
        factors = sum(abs(factor) for _, factor in term.parts)
        if any(isinstance(atom, Pow) for atom in term.atoms()):
            raise self._outside("a power of two in an array, which may not fit into 64 bits")
        if factors > _ARRAY_FACTORS_MAX or any(len(monomial) > 2 for monomial, _ in term.parts):
            raise self._outside("an array whose numbers may not fit into 64 bits")

    def _common(self, left: Set, right: Set) -> Set:
        few, many = (left, right) if isinstance(left.values, tuple) else (right, left)
        if not isinstance(few.values, tuple) or not isinstance(many.values, Span):
            raise self._outside("an intersection of sets")
        kept = []
        for value in few.values:
            inside = self._compare(ast.In(), value, many.values)
            if value == Term.var(self.case.straggler or "") and many.values == Span(Term(()), self.case.servers):
                inside = TRUE  # assumed by the case
            if inside not in (TRUE, FALSE):
                raise self._outside(f"whether {value} is among {shown(many.values)}")
            kept += [value] if inside == TRUE else []
        return Set(tuple(kept))

    def _mod(self, value: Term, by: Term) -> Term:
        known = by.constant
        if known is not None and known > 0 and value.constant is None and value.names() == {SEGMENT_TURN}:
            rest = Term(tuple(part for part in value.parts if part[0] == ()))
            if all(factor % known == 0 for monomial, factor in value.parts if monomial):
                return mod(rest, by)
            raise NeedsModulus(known)
        low = self._low(by)
        if low is None or low < 1:
            raise self._outside(f"% {by}: may be zero or negative")
        if quotient(value, by) is not None:
            return Term(())
        inner = self.case.inner
        outer = None if inner is None else quotient(by, inner)
        if inner is not None and outer is not None:
            high, digit = digits(value, inner, self.ranges)
            if high is not None:
                return digit if by == inner else self._mod(high, outer) * inner + digit
        return value if in_range(value, by, self.ranges) else mod(value, by)

    def _floordiv(self, value: Term, by: Term) -> Term:
        if value.constant is not None and by.constant:
            return Term.of(value.constant // by.constant)
        low = self._low(by)
        if not by.constant and (low is None or low < 1):
            raise self._outside(f"{value} // {by}: may be divided by zero")
        exact = quotient(value, by)
        high = exact if exact is not None else digits(value, by, self.ranges)[0]
        if high is None:
            raise self._outside(f"{value} // {by}")
        return high

    def _fraction(self, top: Any, bottom: Any) -> Fraction | Term:
        if not isinstance(top, Term) or not isinstance(bottom, Term) or top.constant is None:
            raise self._outside("a share that is not known")
        if bottom.constant:
            return Fraction(top.constant, bottom.constant)
        low = self._low(bottom)
        if top.constant != 1 or low is None or low < 1:
            raise self._outside(f"a share of {top}/({bottom})")
        return bottom

    def _count(self, span: Span) -> Term:
        """How many numbers a range has: none if it ends before it begins, which must be known."""
        count = span.high - span.low
        if count.constant is not None:
            return Term.of(max(0, count.constant))
        low = self._low(count)
        if low is None or low < 0:
            raise self._outside(f"length of {shown(span)}, which may end before it begins")
        return count

    def _length(self, value: Any) -> Term:
        match value:
            case list() | tuple():
                return Term.of(len(value))
            case Span():
                return self._count(value)
            case Skipping(count) | RanksInOrder(count):
                return count
            case SegmentList():
                return Term.var("k")
            case Set(values) if isinstance(values, tuple):
                if len(values) <= 1:
                    return Term.of(len(values))
        raise self._outside(f"length of {shown(value)}")
