"""What Z3 is told of powers of two, remainders and exclusive ors is so, and is enough for what the proofs ask."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from optcc.verify.all_ranks.encoding import Encoder
from optcc.verify.all_ranks.induction import ask
from optcc.verify.all_ranks.symbolic_terms import (
    Formula,
    Pow,
    Term,
    both,
    eq,
    holds,
    le,
    least,
    lt,
    mod,
    no,
    power,
    xor,
)
from optcc.verify.smt import Limit, Query, Sat

A, B, C, E, F = (Term.var(name) for name in "abcef")
TWO_E, TWO_F = power(E), power(F)
TERMS = (
    *(A, B, C, TWO_E, TWO_F, power(E + 1), TWO_E * 2, Term.of(4), A + B, A - TWO_E),
    *(
        xor(A, B),
        xor(A, TWO_E),
        xor(A, B, C),
        xor(A - TWO_F, C),
        xor(A, C, TWO_F),
        xor(B, Term.of(5)),
        xor(A, B, TWO_E),
    ),
    *(mod(A, TWO_E), mod(A, TWO_F), mod(B, TWO_E * 2), mod(xor(A, B), TWO_F), mod(A + TWO_E, TWO_E), mod(C, TWO_E + 1)),
    *(least(A, B), least(TWO_E, C - TWO_F)),
)


def model(formula: Formula, values: dict[str, int]) -> Any:
    """Z3's answer to: may the formula hold for these values of the variables?"""
    query = Query("a formula, and numbers")
    encoder = Encoder(query)
    query.require("values", *(query.integer(name) == value for name, value in values.items()))
    query.require("formula", encoder.truth(formula))
    encoder.require_facts()
    return query.ask(Limit(20.0))


@pytest.mark.slow
def test_facts_are_true_of_numbers() -> None:
    """With all atoms at once, and numbers for the variables, what holds is possible: no fact is false."""
    seed = 11
    print("seed", seed)
    rng = np.random.default_rng(seed)
    for _ in range(60):
        values = {name: int(rng.integers(-9, 70)) for name in "abc"}
        values |= {name: int(rng.integers(0, 7)) for name in "ef"}
        chosen = [TERMS[int(at)] for at in rng.choice(len(TERMS), 9, replace=False)]
        equations = both(*(eq(term, int(term.at(values))) for term in chosen))
        assert holds(equations, values)
        assert isinstance(model(equations, values), Sat), (values, [str(term) for term in chosen])


@pytest.mark.slow
def test_every_two_atoms_are_true_of_small_numbers() -> None:
    """The facts about two atoms, for all pairs, at numbers around powers of two."""
    numbers = (-1, 0, 1, 3, 4, 7, 8)
    seed = 12
    print("seed", seed)
    rng = np.random.default_rng(seed)
    for one, other in product(TERMS, TERMS):
        values = {name: int(rng.choice(numbers)) for name in "abc"} | {"e": int(rng.integers(4)), "f": 2}
        equations = both(eq(one, int(one.at(values))), eq(other, int(other.at(values))))
        assert isinstance(model(equations, values), Sat), (values, str(one), str(other))


SMALL = [le(0, A), le(0, B), le(0, C), le(0, E), le(0, F)]


@pytest.mark.parametrize(
    ("facts", "goal"),
    [
        ([*SMALL, lt(E, F)], le(TWO_E * 2, TWO_F)),
        (SMALL, eq(power(E + 1), TWO_E * 2)),
        (SMALL, eq(xor(xor(A, TWO_E), TWO_E), A)),
        ([*SMALL, lt(A, TWO_F), lt(E, F)], lt(xor(A, TWO_E), TWO_F)),
        (SMALL, eq(mod(xor(A, TWO_E), TWO_E), mod(A, TWO_E))),
        ([*SMALL, lt(A, TWO_F), lt(B, TWO_F)], lt(xor(A, B), TWO_F)),
        ([*SMALL, eq(A, xor(B, C))], eq(xor(A, C), B)),
        ([*SMALL, eq(xor(A, C), xor(B, C))], eq(A, B)),
        ([*SMALL, eq(mod(A, power(E + 1)), mod(B, power(E + 1)))], eq(mod(A, TWO_E), mod(B, TWO_E))),
        ([*SMALL, eq(xor(A, B), 0)], eq(A, B)),
    ],
)
def test_what_proofs_ask_is_claimed(facts: list[Formula], goal: Formula) -> None:
    assert ask("goal", str(goal), facts, goal).proved


@pytest.mark.parametrize(
    ("facts", "goal"),
    [
        (SMALL, le(TWO_E * 2, TWO_F)),
        ([*SMALL, le(E, F)], lt(TWO_E, TWO_F)),
        ([*SMALL, lt(A, TWO_F)], lt(xor(A, TWO_E), TWO_F)),
        ([*SMALL, lt(A, TWO_F)], lt(xor(A, B), TWO_F)),
        ([*SMALL, eq(mod(A, TWO_E), mod(B, TWO_E))], eq(mod(A, power(E + 1)), mod(B, power(E + 1)))),
        (SMALL, eq(xor(A, B), A + B)),
        ([eq(power(E - 1) * 2, TWO_E)], le(0, E)),
        ([*SMALL, lt(A, TWO_F)], eq(xor(A, TWO_F), A - TWO_F)),
        ([*SMALL, lt(E, F)], eq(TWO_E * 2, TWO_F)),
        (SMALL, no(eq(A, A))),
    ],
)
def test_what_is_not_so_is_not_claimed(facts: list[Formula], goal: Formula) -> None:
    assert not ask("goal", str(goal), facts, goal).proved


def test_terms_with_exclusive_ors_have_one_normal_form() -> None:
    assert xor(A, B) == xor(B, A) and xor(A, xor(B, A)) == B and xor(A, A) == Term(())
    assert xor(A, Term.of(5), Term.of(5)) == A and xor(Term.of(6), Term.of(3)) == Term.of(5)
    assert power(Term.of(5)) == Term.of(32) and Term.of(Pow(E)) == TWO_E
    assert least(A, A + 1) == A and least(A + 2, A) == A
    assert xor(A, B).put({"b": A}) == Term(())


def test_numbers_and_code_agree() -> None:
    seed = 13
    print("seed", seed)
    rng = np.random.default_rng(seed)
    for _ in range(100):
        values = {name: int(rng.integers(-20, 99)) for name in "abc"} | {name: int(rng.integers(0, 8)) for name in "ef"}
        for term in TERMS:
            assert eval(str(term), dict(values)) == int(term.at(values)), str(term)
