"""Rings of all ranks, found elsewhere: what is proved of them, and what the proof and the language refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from optcc.dsl import Program, Segment, schedule
from optcc.errors import ScheduleError
from optcc.planner import find_schedule
from optcc.schedules import nccl_ring
from optcc.schedules.nccl_ring import Ring, along_rings, around, copy_next, reduce_next
from optcc.topology import Topology
from optcc.verdict import PROVED, REFUTED, UNKNOWN
from optcc.verify.all_ranks.chunk_program import ProofStops
from optcc.verify.all_ranks.proof import AllRanks, _direct, prove_all_ranks


def rings_of(topology: Topology) -> Mapping[str, Any]:
    """A ring that goes through other ranks where there are enough, and one back."""
    p = topology.n_ranks
    through = [(place + 2) % p if p > 2 and place % 3 == 0 else -1 for place in range(p)]
    return {"rings": (Ring(tuple(range(p)), tuple(through)), Ring(tuple(reversed(range(p))), (-1,) * p))}


def judged(write: Callable[..., None], p_checked: int = 5) -> AllRanks:
    return prove_all_ranks(schedule(configure=rings_of)(write), p_checked=p_checked)


def right(program: Program, rings: Sequence[Ring]) -> None:
    for turn in around(program, rings):
        along_rings(program, turn)


def one_step_less(program: Program, rings: Sequence[Ring]) -> None:
    for turn in around(program, rings):
        for _, segment, ring in turn:
            for step in range(len(ring.ranks) - 1):
                for place in range(len(ring.ranks)):
                    reduce_next(segment, ring, place, (place - step) % len(ring.ranks))
            for step in range(len(ring.ranks) - 2):
                for place in range(len(ring.ranks)):
                    copy_next(segment, ring, place, (place + 1 - step) % len(ring.ranks))


def late(program: Program, rings: Sequence[Ring]) -> None:
    for turn in around(program, rings):
        for _, segment, ring in turn:
            for step in range(len(ring.ranks) - 1):
                for place in range(len(ring.ranks)):
                    reduce_next(segment, ring, place, (place - step) % len(ring.ranks))
            if len(ring.ranks) < 71:
                for step in range(len(ring.ranks) - 1):
                    for place in range(len(ring.ranks)):
                        copy_next(segment, ring, place, (place + 1 - step) % len(ring.ranks))


def by_its_number(program: Program, rings: Sequence[Ring]) -> None:
    for turn in around(program, rings):
        for number, segment, ring in turn:
            if number < 70:
                for step in range(len(ring.ranks) - 1):
                    for place in range(len(ring.ranks)):
                        reduce_next(segment, ring, place, (place - step) % len(ring.ranks))


def by_numbers_of_ranks(program: Program, rings: Sequence[Ring]) -> None:
    for turn in around(program, rings):
        along_rings(program, turn)
        for _, segment, _ring in turn:
            if program.n_ranks > 70:
                segment[0].copy(src=0, dst=1)


def past_the_end(program: Program, rings: Sequence[Ring]) -> None:
    for turn in around(program, rings):
        for _, segment, ring in turn:
            for step in range(len(ring.ranks) - 1):
                for place in range(len(ring.ranks)):
                    reduce_next(segment, ring, place - 1, (place - step - 1) % len(ring.ranks))


def inside_of_each_other(program: Program, rings: Sequence[Ring]) -> None:
    for turn in around(program, rings):
        for _, segment, _ring in turn:
            for _, _segment, ring in turn:
                reduce_next(segment, ring, 0, 0)


def through_scratch_space(program: Program, rings: Sequence[Ring]) -> None:
    for turn in around(program, rings):
        for _, segment, ring in turn:
            segment[0].copy(src=ring.ranks[0], dst=ring.ranks[1], into=segment.scratch(0))
        along_rings(program, turn)


def by_what_is_between(program: Program, rings: Sequence[Ring]) -> None:
    for turn in around(program, rings):
        for _, segment, ring in turn:
            if ring.through[0] < 0:
                reduce_next(segment, ring, 0, 0)


def twice(program: Program, rings: Sequence[Ring]) -> None:
    turns = around(program, rings)
    for turn in turns:
        along_rings(program, turn)
    for turn in turns:
        along_rings(program, turn)


def beside_a_pipeline(program: Program, rings: Sequence[Ring]) -> None:
    for segment in program.pipeline(sections=1, share=0):
        segment[0].copy(src=0, dst=1)
    for turn in around(program, rings):
        along_rings(program, turn)


@pytest.mark.parametrize("name", ["nccl-ring", "r2ccl-rails"])
def test_rings_are_proved_for_every_number_of_ranks(name: str) -> None:
    found = prove_all_ranks(find_schedule(name), p_checked=6)
    assert found.verdict == PROVED, found.reached
    assert found.checked.endswith("p = 4, 6")
    assert any("a ring has every rank once (else `around` refuses it)" in each for each in found.assumptions)


def test_rings_through_other_ranks_are_proved() -> None:
    found = judged(right)
    assert found.verdict == PROVED, found.reached


@pytest.mark.parametrize(
    "write",
    [
        one_step_less,
        pytest.param(late, marks=pytest.mark.slow),
        *(by_its_number, by_numbers_of_ranks, past_the_end, inside_of_each_other),
        *(through_scratch_space, by_what_is_between, twice, beside_a_pipeline),
    ],
)
def test_what_is_done_otherwise_around_rings_is_never_proved(write: Callable[..., None]) -> None:
    assert judged(write).verdict in (REFUTED, UNKNOWN)


def right_for_one_ring(program: Program, rings: Sequence[Ring]) -> None:
    for turn in around(program, rings):
        for _, segment, _ring in turn:
            for _, _segment, ring in turn:
                for step in range(len(ring.ranks) - 1):
                    for place in range(len(ring.ranks)):
                        reduce_next(segment, ring, place, (place - step) % len(ring.ranks))
                for step in range(len(ring.ranks) - 1):
                    for place in range(len(ring.ranks)):
                        copy_next(segment, ring, place, (place + 1 - step) % len(ring.ranks))


def test_that_there_is_one_ring_for_few_ranks_proves_nothing() -> None:
    def one(topology: Topology) -> Mapping[str, Any]:
        return {"rings": rings_of(topology)["rings"][:1]}

    found = prove_all_ranks(schedule(configure=one)(right_for_one_ring), p_checked=5)
    assert found.verdict == UNKNOWN and "inside of a loop over segments of a turn" in found.reached


def test_another_ring_that_is_right_is_not_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def back(segment: Segment, ring: Ring, place: int, section: int) -> tuple[Any, Any]:
        p = len(ring.ranks)
        return segment[-section % p], {"src": ring.ranks[-place % p], "dst": ring.ranks[(-place - 1) % p]}

    def reduce_back(*given: Any) -> None:
        chunk, ends = back(*given)
        chunk.reduce(**ends)

    def copy_back(*given: Any) -> None:
        chunk, ends = back(*given)
        chunk.copy(**ends)

    found = schedule(configure=rings_of)(right)
    monkeypatch.setattr(nccl_ring, "reduce_next", reduce_back)
    monkeypatch.setattr(nccl_ring, "copy_next", copy_back)
    judged = prove_all_ranks(found, p_checked=5)
    assert judged.verdict == UNKNOWN and "read wrongly for p = 3" in judged.reached


def _goes_elsewhere(segment: Segment, ring: Ring, place: int, section: int) -> tuple[Any, int, int]:
    """Through the next rank but one, which keeps what it got."""
    src, dst = ring.ranks[place], ring.ranks[(place + 1) % len(ring.ranks)]
    if ring.through[place] >= 0:
        segment[section].copy(src=src, dst=ring.through[place])
    return segment[section], src, dst


def test_what_goes_through_other_ranks_is_compared_with_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ring, "_through", _goes_elsewhere)
    assert judged(right).verdict in (REFUTED, UNKNOWN)


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1, 1, 0, -1, 0)],
        [(0, 1, 0, 0, -1, 0), (1, 2, 0, 0, 0, -1)],
        [(0, 1, 1, 0, -1, 0), (1, 2, 0, 1, 0, -1)],
        [(0, 1, 1, 0, -1, 0), (3, 2, 0, 0, 0, -1)],
        [(0, 1, 1, 0, -1, 0), (1, 2, 0, 0, -1, -1)],
        [(0, 1, 1, 0, -1, 0), (1, 2, 1, 0, 0, 0)],
        [(1, 2, 0, 0, 0, -1)],
    ],
)
def test_scratch_space_that_is_used_otherwise_is_no_transfer_through_a_rank(rows: list[tuple[int, ...]]) -> None:
    assert _direct([(0, 1, 1, 0, -1, 0), (1, 2, 0, 0, 0, -1)]) == [(0, 2, 0, 0)]
    with pytest.raises(ProofStops, match=r"scratch space|not what"):
        _direct(rows)


@pytest.mark.parametrize(
    ("ring", "rule"),
    [
        (Ring((0, 1), (-1, -1)), "must name every rank from 0 to 2 once"),
        (Ring((0, 1, 1), (-1, -1, -1)), "must name every rank from 0 to 2 once"),
        (Ring((0, 1, 2), (-1, -1)), "2 ranks to go through: must be 3"),
        (Ring((0, 1, 2), (3, -1, -1)), "must be"),
    ],
)
def test_the_language_refuses_other_rings(ring: Ring, rule: str) -> None:
    with pytest.raises(ScheduleError, match=rule):
        schedule(right)(3, rings=[ring])
