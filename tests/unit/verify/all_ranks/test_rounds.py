"""Rounds whose distance doubles or halves: proved for every number of ranks, and with a fault never."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from optcc.dsl import Definition
from optcc.schedules import logarithmic
from optcc.schedules.registry import SCHEDULES
from optcc.verdict import PROVED
from optcc.verify.all_ranks import encoding, round_invariants
from optcc.verify.all_ranks.cases import cases_of
from optcc.verify.all_ranks.chunk_program import ProofStops, chunk_of
from optcc.verify.all_ranks.induction import InductionLemma, prove_moves
from optcc.verify.all_ranks.proof import prove_all_ranks
from optcc.verify.all_ranks.rounds import RoundInvariant, RoundProof
from optcc.verify.all_ranks.symbolic import OutsideSubset
from optcc.verify.all_ranks.symbolic_interpreter import read
from optcc.verify.all_ranks.symbolic_terms import FALSE, TRUE, Formula, Term, either, eq, no, put
from tests.sample import sampled
from tests.unit.verify.all_ranks.test_all_ranks import planted
from tests.unit.verify.all_ranks.test_attacks import is_never_proved, made

HEAD = "from fractions import Fraction\nfrom optcc.dsl import any_flat, schedule\n"
NAMES = {"recursive-doubling": "recursive_doubling", "rabenseifner": "rabenseifner", "bruck": "bruck"}


@pytest.mark.parametrize("name", NAMES)
def test_rounds_are_proved_for_every_number_of_ranks(name: str) -> None:
    judged = prove_all_ranks(SCHEDULES[name], p_checked=9)
    assert (judged.verdict, judged.reached, judged.assumptions) == (PROVED, "", ())
    assert judged.cases == ("p >= 2",)


# A fault from the start: the proof itself must fail, where nothing is run first --------------------------------------

FAULTS = (
    [
        ("recursive_doubling", change)
        for change in (
            ("rounds = p.bit_length() - 1", "rounds = p.bit_length() - 2 + (p < 4)"),
            ("for distance in (2**i for i in range(rounds))", "for distance in (2**i for i in range(rounds - 1))"),
            ("for distance in (2**i for i in range(rounds))", "for distance in (2**i for i in range(1, rounds))"),
            ("dst=rank ^ distance, into=segment.scratch(0)", "dst=rank ^ 1, into=segment.scratch(0)"),
            ("dst=rank ^ distance, into=segment.scratch(0)", "dst=rank ^ (q - 1), into=segment.scratch(0)"),
            ("dst=rank ^ distance, into=segment.scratch(0)", "dst=(rank + distance) % q, into=segment.scratch(0)"),
            (
                "for rank in range(q):\n                    segment[0].copy",
                "for rank in range(q - 1):\n                    segment[0].copy",
            ),
            (
                "for rank in range(q):\n                    segment.scratch",
                "for rank in range(1, q):\n                    segment.scratch",
            ),
            (
                "segment[0].copy(src=rank, dst=rank ^ distance, into=segment.scratch(0))",
                "segment[0].reduce(src=rank, dst=rank ^ distance)",
            ),
            ("segment[0].reduce(src=rank, dst=rank - q)", "segment[0].reduce(src=rank, dst=0)"),
            (
                "for rank in range(q):\n                    segment.scratch",
                "for rank in range(p):\n                    segment.scratch",
            ),
            ("segment[0].reduce(src=rank, dst=rank - q)", "segment[0].copy(src=rank, dst=rank - q)"),
            (
                "for rank in range(q, p):\n                segment[0].reduce",
                "for rank in range(q + 1, p):\n                segment[0].reduce",
            ),
            (
                "for rank in range(q, p):\n                segment[0].copy",
                "for rank in range(q, p - 1):\n                segment[0].copy",
            ),
            ("segment[0].copy(src=rank - q, dst=rank)", "segment[0].copy(src=rank - 1, dst=rank)"),
        )
    ]
    + [
        ("rabenseifner", change)
        for change in (
            ("(2**i for i in reversed(range(rounds)))", "(2**i for i in range(rounds))"),
            ("(2**i for i in reversed(range(rounds)))", "(2**i for i in reversed(range(1, rounds)))"),
            ("reversed(range(distance, 2 * distance))", "reversed(range(distance, 2 * distance - 1))"),
            ("reversed(range(distance, 2 * distance))", "reversed(range(distance + 1, 2 * distance))"),
            ("reversed(range(distance, 2 * distance))", "reversed(range(0, 2 * distance))"),
            (
                "segment[rank ^ x].reduce(src=rank, dst=rank ^ distance)",
                "segment[rank ^ x].reduce(src=rank, dst=rank ^ x)",
            ),
            (
                "segment[rank ^ x].reduce(src=rank, dst=rank ^ distance)",
                "segment[rank].reduce(src=rank, dst=rank ^ distance)",
            ),
            (
                "segment[rank ^ x].copy(src=rank ^ distance, dst=rank)",
                "segment[rank ^ x].copy(src=rank, dst=rank ^ distance)",
            ),
            (
                "segment[rank ^ x].copy(src=rank ^ distance, dst=rank)",
                "segment[rank ^ x ^ 1].copy(src=rank ^ distance, dst=rank)",
            ),
            ("for x in range(distance, 2 * distance)", "for x in range(distance, 2 * distance - 1)"),
            (
                "for distance in (2**i for i in range(rounds)):\n                for x",
                "for distance in (2**i for i in range(rounds - 1)):\n                for x",
            ),
            ("for x in reversed(range(q))", "for x in reversed(range(1, q))"),
            (
                "segment[(rank - q) ^ x].copy(src=rank - q, dst=rank)",
                "segment[(rank - q) ^ x].copy(src=rank, dst=rank - q)",
            ),
            (
                "for x in range(q):\n                for rank in range(q, p)",
                "for x in range(q - 1):\n                for rank in range(q, p)",
            ),
        )
    ]
    + [
        ("bruck", change)
        for change in (
            ("range((p - 1).bit_length())", "range(p.bit_length() - 1)"),
            ("range((p - 1).bit_length())", "range((p - 1).bit_length() - 1)"),
            ("range(min(distance, p - distance))", "range(min(distance, p - distance - 1))"),
            ("range(min(distance, p - distance))", "range(min(distance - 1, p - distance))"),
            ("slices[(rank + ahead) % p][0]", "slices[(rank + ahead + 1) % p][0]"),
            ("dst=(rank - distance) % p", "dst=(rank + distance) % p"),
            ("for ahead in range(min(distance, p - distance))", "for ahead in range(min(distance + 1, p - distance))"),
            ("dst=(rank - distance) % p", "dst=(rank - distance + 1) % p"),
            ("(2**i for i in range((p - 1)", "(2**i for i in range(1, (p - 1)"),
        )
    ]
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "change"), FAULTS)
def test_the_lemmas_fail_for_a_planted_fault(tmp_path: Path, name: str, change: tuple[str, str]) -> None:
    definition = planted(tmp_path, logarithmic, name, change)
    with pytest.raises((OutsideSubset, ProofStops)):
        lemmas_of(definition)


def lemmas_of(definition: Definition) -> list[InductionLemma]:
    """The lemmas of the proof alone: nothing is run to see whether it is right."""
    reading = read(definition, cases_of(definition)[0].case)
    lemmas = prove_moves(reading)
    for walk in reading.walks:
        chunk = chunk_of(reading, walk.families[0], walk.bodies[0])
        lemmas += round_invariants.prove_rounds(chunk, definition.collective, "")
    return lemmas


@pytest.mark.slow
def test_the_lemmas_hold_where_nothing_is_planted() -> None:
    for name in NAMES:
        lemmas = lemmas_of(SCHEDULES[name])
        assert len(lemmas) > 5 and all(lemma.proved for lemma in lemmas)


# A fault from some number of ranks on ---------------------------------------------------------------------------------

DOUBLING = """
@schedule
def made(program):
    p = program.n_ranks
    rounds = p.bit_length() - 1
    q = 2**rounds
    for segment in program.pipeline(sections=1, scratch=1):
        for rank in range(q, {folded}):
            segment[0].reduce(src=rank, dst=rank - q)
        for distance in ({distance} for i in range({rounds})):
            for rank in range({lanes}):
                segment[0].copy(src=rank, dst={partner}, into=segment.scratch(0))
            for rank in range(q):
                segment.scratch(0).reduce(src=rank, dst=rank, into=segment[0])
        for rank in range(q, p):
            segment[0].copy(src={out}, dst=rank)
"""
RIGHT = {
    "folded": "p",
    "distance": "2**i",
    "rounds": "rounds",
    "lanes": "q",
    "partner": "rank ^ distance",
    "out": "rank - q",
}
LATE = {
    "what is behind 70 is folded in": {"folded": "min(p, 70)"},
    "the distance stops at 32": {"distance": "min(2**i, 32)", "folded": "min(p, 70)"},
    "at most six rounds, and 71 folds": {"rounds": "min(rounds, 6)", "folded": "min(p, 70)"},
    "ranks from 70 on are left out": {"lanes": "min(q, 70)", "folded": "min(p, 70)"},
    "folded out from where nothing is": {"out": "rank - min(q, 64)", "folded": "min(p, 70)"},
    "a partner for few": {"partner": "rank ^ min(distance, 32)", "folded": "min(p, 70)"},
}


def doubling(folder: Path, **changes: str) -> Definition:
    return made(folder, HEAD + DOUBLING.format(**{**RIGHT, **changes}))


def test_doubling_without_a_fault_is_proved(tmp_path: Path) -> None:
    judged = prove_all_ranks(doubling(tmp_path), p_checked=5)
    assert judged.verdict == PROVED, judged.reached


@pytest.mark.parametrize("name", LATE)
def test_rounds_that_are_wrong_for_many_ranks_are_never_proved(tmp_path: Path, name: str) -> None:
    is_never_proved(doubling(tmp_path, **LATE[name]))


HALVING = """
@schedule
def made(program):
    p = program.n_ranks
    rounds = p.bit_length() - 1
    q = 2**rounds
    for segment in program.pipeline(sections=q):
        for x in range({fold}):
            for rank in range(q, p):
                segment[(rank - q) ^ x].reduce(src=rank, dst=rank - q)
        for distance in (2**i for i in reversed(range(rounds))):
            for x in range(distance, {end}):
                for rank in range(q):
                    segment[rank ^ x].reduce(src=rank, dst=rank ^ distance)
        for distance in (2**i for i in range(rounds)):
            for x in range({begin}, 2 * distance):
                for rank in range(q):
                    segment[rank ^ x].copy(src=rank ^ distance, dst=rank)
        for x in range(q):
            for rank in range(q, {last}):
                segment[(rank - q) ^ x].copy(src=rank - q, dst=rank)
"""
HALVING_RIGHT = {"fold": "q", "end": "2 * distance", "begin": "distance", "last": "p"}
HALVING_LATE = {
    "sections from 64 on are not folded in": {"fold": "min(q, 64)", "last": "min(p, 70)"},
    "halving leaves out what is far": {"end": "min(2 * distance, 100)", "last": "min(p, 70)"},
    "doubling leaves out the first": {"begin": "distance + distance // 64", "last": "min(p, 70)"},
    "the last is not folded out": {"last": "min(p, 70)"},
}


def test_halving_without_a_fault_is_proved(tmp_path: Path) -> None:
    judged = prove_all_ranks(made(tmp_path, HEAD + HALVING.format(**HALVING_RIGHT)), p_checked=5)
    assert judged.verdict == PROVED, judged.reached


@pytest.mark.parametrize("name", sampled(HALVING_LATE, every=3))
def test_halving_that_is_wrong_from_71_ranks_on_is_never_proved(tmp_path: Path, name: str) -> None:
    is_never_proved(made(tmp_path, HEAD + HALVING.format(**{**HALVING_RIGHT, **HALVING_LATE[name]})))


# The proof itself is distrusted ---------------------------------------------------------------------------------------


def wrong(right: RoundInvariant, loop: str) -> list[RoundInvariant]:
    """Invariants that do not hold, or say too little."""
    slot, pair = -1, (-1, -1)
    later = {loop: Term.var(loop) + 1}
    live, has, alike = right.live[slot], right.has[slot], right.alike.get(pair, FALSE)
    changed: list[tuple[Formula, Formula, Formula]] = [
        (TRUE, has, alike),
        (FALSE, has, alike),
        (live, TRUE if has != TRUE else FALSE, alike),
        (live, no(has), alike),
        (put(live, later), has, alike),
        (either(live, eq(Term.var("r0"), 0)), either(has, eq(Term.var("y0"), 1)) if has != TRUE else FALSE, alike),
    ]
    changed = [each for each in changed if each != (live, has, alike)]
    return [RoundInvariant({slot: a}, {slot: b}, {pair: c}) for a, b, c in changed]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_invariant_makes_a_lemma_fail(name: str) -> None:
    definition = SCHEDULES[name]
    reading = read(definition, cases_of(definition)[0].case)
    chunk = chunk_of(reading, 0, reading.walks[0].bodies[0])
    sizes = [{"p": p} for p in range(2, 20)]
    right = round_invariants.guess(chunk, definition.collective, sizes)
    assert right
    for loop in right:
        for changed in wrong(right[loop], loop):
            judged = RoundProof(chunk, definition.collective, {**right, loop: changed}, "")
            with pytest.raises(ProofStops):
                judged.run()


def test_all_trees_are_one_only_if_they_are() -> None:
    """Both partners take the other's sum, but one of them reduces in another order: no agreement."""
    definition = SCHEDULES["recursive-doubling"]
    reading = read(definition, cases_of(definition)[0].case)
    chunk = chunk_of(reading, 0, reading.walks[0].bodies[0])
    right = round_invariants.guess(chunk, definition.collective, [{"p": p} for p in range(2, 20)])
    for loop, found in right.items():
        for claimed in (TRUE, no(found.alike[-1, -1])):
            changed = RoundInvariant(found.live, found.has, {(-1, -1): claimed})
            with pytest.raises(ProofStops, match="alike"):
                RoundProof(chunk, definition.collective, {**right, loop: changed}, "").run()


def test_a_false_fact_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the facts fails if one of them is false."""
    from tests.unit.verify.all_ranks import test_encoding

    def never_two(self: encoding.Encoder, value: Any, of: Any) -> Any:
        return self.query.any_of((value == 0, value == of, value == -of))

    monkeypatch.setattr(encoding.Encoder, "_is_multiple", never_two)
    with pytest.raises(AssertionError):
        test_encoding.test_facts_are_true_of_numbers()


@pytest.mark.slow
def test_a_proof_takes_a_few_seconds() -> None:
    started = time.monotonic()
    for name in NAMES:
        lemmas_of(SCHEDULES[name])
    assert time.monotonic() - started < 30
