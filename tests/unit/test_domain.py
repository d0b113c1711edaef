"""Numbers of ranks that a schedule is for: others are refused, and a proof is for these."""

from __future__ import annotations

import pytest

from optcc.domain import AtLeast, MultiplesOf, PowersOfTwo, at_least, multiples_of, powers_of_two
from optcc.dsl import Definition, Program, schedule
from optcc.errors import InputError, ScheduleError, TopologyError
from optcc.topology import Topology
from optcc.verdict import PROVED, UNKNOWN
from optcc.verify.all_ranks.proof import AllRanks, prove_all_ranks


def halve(program: Program) -> None:
    """The textbook's recursive halving and doubling, which knows no other numbers than powers of two."""
    p = program.n_ranks
    for segment in program.pipeline(sections=p):
        for i in range(p.bit_length() - 1):
            distance = p >> i + 1
            for x in range(distance, 2 * distance):
                for rank in program.ranks:
                    segment[rank ^ x].reduce(src=rank, dst=rank ^ distance)
        for i in range(p.bit_length() - 1):
            distance = 1 << i
            for x in range(distance, 2 * distance):
                for rank in program.ranks:
                    segment[rank ^ x].copy(src=rank ^ distance, dst=rank)


halving = schedule(domain=powers_of_two())(halve)


@schedule(domain=powers_of_two())
def exchanges(program: Program) -> None:
    """Everyone exchanges at distance p/2, p/4, ..., 1."""
    p = program.n_ranks
    for segment in program.pipeline(sections=1, scratch=1):
        for distance in (p // 2 ** (i + 1) for i in range(p.bit_length() - 1)):
            for rank in program.ranks:
                segment[0].copy(src=rank, dst=rank ^ distance, into=segment.scratch(0))
            for rank in program.ranks:
                segment.scratch(0).reduce(src=rank, dst=rank, into=segment[0])


@schedule(domain=powers_of_two())
def a_round_short(program: Program) -> None:
    """Right for two to 64 ranks: a seventh round is missing."""
    p = program.n_ranks
    for segment in program.pipeline(sections=1, scratch=1):
        for distance in (2**i for i in range(min(p.bit_length() - 1, 6))):
            for rank in program.ranks:
                segment[0].copy(src=rank, dst=rank ^ distance, into=segment.scratch(0))
            for rank in program.ranks:
                segment.scratch(0).reduce(src=rank, dst=rank, into=segment[0])


@schedule(domain=multiples_of(2))
def pairs(program: Program) -> None:
    """A ring, for even numbers of ranks."""
    p = program.n_ranks
    for segment in program.pipeline(sections=p):
        for step in range(p - 1):
            for rank in program.ranks:
                segment[(rank - step) % p].reduce(src=rank, dst=(rank + 1) % p)
        for step in range(p - 1):
            for rank in program.ranks:
                segment[(rank + 1 - step) % p].copy(src=rank, dst=(rank + 1) % p)


@schedule(domain=at_least(3))
def needs_three(program: Program) -> None:
    """A star by way of rank 2."""
    p = program.n_ranks
    for segment in program.pipeline(sections=1):
        for rank in range(p - 1):
            segment[0].reduce(src=rank, dst=p - 1)
        for rank in range(p - 1):
            segment[0].copy(src=p - 1, dst=rank)


def test_what_is_in_a_domain() -> None:
    assert [n for n in range(1, 20) if n in powers_of_two()] == [1, 2, 4, 8, 16]
    assert [n for n in range(1, 10) if n in multiples_of(3)] == [3, 6, 9]
    assert [n for n in range(6) if n in at_least(3)] == [3, 4, 5]
    assert 0 not in powers_of_two() and 0 not in multiples_of(3)
    assert (powers_of_two(), multiples_of(3), at_least(3)) == (PowersOfTwo(), MultiplesOf(3), AtLeast(3))


@pytest.mark.parametrize("wrong", [lambda: multiples_of(0), lambda: at_least(0), lambda: multiples_of(-2)])
def test_domains_that_cannot_be_are_refused(wrong: object) -> None:
    with pytest.raises(InputError, match="must be"):
        wrong()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("definition", "n_ranks", "wanted"),
    [(halving, 6, "a power of two"), (pairs, 5, "a multiple of 2"), (needs_three, 2, "at least 3")],
)
def test_a_schedule_outside_of_its_domain_is_refused(definition: Definition, n_ranks: int, wanted: str) -> None:
    said = f"schedule {definition.name}: {n_ranks} ranks: must be {wanted}$"
    with pytest.raises(ScheduleError, match=said):
        definition(n_ranks)
    with pytest.raises(TopologyError, match=said):
        definition.build(Topology.parse(f"{n_ranks}@1GB/s"))
    with pytest.raises(TopologyError, match=said):
        definition.stream(Topology.parse(f"{n_ranks}@1GB/s"), 1, lambda *_: None)
    assert len(definition(8)) > 0


@pytest.mark.parametrize(
    ("definition", "covers", "words"),
    [
        (halving, "p = 2^n, n >= 1", "every power of two"),
        (exchanges, "p = 2^n, n >= 1", "every power of two"),
        (pairs, "p = 2 m, m >= 1", "every multiple of 2"),
        (needs_three, "p >= 3", "every number of ranks from 3 on"),
    ],
)
def test_a_proof_is_for_the_domain_and_says_so(definition: Definition, covers: str, words: str) -> None:
    judged = prove_all_ranks(definition, p_checked=9)
    assert judged.verdict == PROVED, judged.reached
    assert judged.cases == (covers,)
    assert judged.card().title == f"{definition.name}, for {words}: proved"
    assert judged.as_json()["domain"] == words and f", of {words}" in judged.checked


def test_what_is_right_in_another_domain_only_is_not_proved() -> None:
    judged: AllRanks = prove_all_ranks(schedule(halve), p_checked=9)
    assert judged.verdict != PROVED


def test_a_round_too_few_from_128_ranks_on_is_not_proved() -> None:
    judged = prove_all_ranks(a_round_short, p_checked=64, budget_s=30)
    assert judged.verdict == UNKNOWN and "every power of two" in judged.checked
