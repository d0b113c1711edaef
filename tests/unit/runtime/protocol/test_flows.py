"""Slow NICs as the traffic of all ranks names them: any job, any NIC, flows that are busy now and then."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optcc.runtime.protocol.flows import (
    MARK_S,
    MARKS,
    FlowEnds,
    FlowMarks,
    FlowTally,
    NicFlow,
    NicWay,
    slow_ways,
)

RATE, TIME_S = 50e6, 0.25


def make_flows(rng: random.Random, n_ranks: int, n_nics: int, slow: dict[NicWay, float]) -> dict[FlowEnds, NicFlow]:
    """Flows that carry equal parts: each over a slow NIC fills that for nearly all the time, the others for a part."""
    each = min(slow.values(), default=RATE) * TIME_S / (n_ranks - 1)
    flows: dict[FlowEnds, NicFlow] = {}
    for src, dst in permutations(range(n_ranks), 2):
        for nic in range(n_nics):
            is_slow = (src, nic, True) in slow or (dst, nic, False) in slow
            busy = rng.uniform(0.88, 1.0) if is_slow or not slow else rng.uniform(0.05, 0.5)
            flows[src, nic, dst, nic] = NicFlow(each, busy * TIME_S)
    return flows


def known_of(n_ranks: int, n_nics: int) -> dict[NicWay, float]:
    return {(rank, nic, is_out): RATE for rank in range(n_ranks) for nic in range(n_nics) for is_out in (True, False)}


jobs = st.tuples(st.integers(3, 8), st.integers(2, 4), st.floats(0.1, 0.8), st.randoms(use_true_random=False))


@given(jobs, st.sampled_from([(True, False), (True,), (False,)]))
def test_the_slow_nic_is_named_with_its_rate(job: tuple[int, int, float, random.Random], ways: tuple[bool]) -> None:
    n_ranks, n_nics, share, rng = job
    slow = {(n_ranks - 1, n_nics - 1, is_out): share * RATE for is_out in ways}
    found = slow_ways(make_flows(rng, n_ranks, n_nics, slow), TIME_S, known_of(n_ranks, n_nics))
    assert found is not None and found.keys() == slow.keys()
    for way, each in found.items():
        assert each.rate == pytest.approx(slow[way], rel=0.13)


@given(jobs)
def test_two_nics_of_different_hosts_are_both_named(job: tuple[int, int, float, random.Random]) -> None:
    n_ranks, n_nics, share, rng = job
    slow = {(rank, nic, is_out): share * RATE for rank, nic in ((0, 0), (1, 1)) for is_out in (True, False)}
    found = slow_ways(make_flows(rng, n_ranks, n_nics, slow), TIME_S, known_of(n_ranks, n_nics))
    assert found is not None and found.keys() == slow.keys()


@given(jobs)
def test_nothing_is_said_of_nics_that_are_all_busy(job: tuple[int, int, float, random.Random]) -> None:
    n_ranks, n_nics, _, rng = job
    assert slow_ways(make_flows(rng, n_ranks, n_nics, {}), TIME_S, known_of(n_ranks, n_nics)) is None


def test_nothing_is_said_where_the_two_ends_cannot_be_told_apart_or_the_nic_was_idle() -> None:
    rng, slow = random.Random(1), {(2, 1, True): RATE / 2, (2, 1, False): RATE / 2}
    flows = make_flows(rng, 4, 2, slow)
    ring = {ends: flow for ends, flow in flows.items() if ends[2] == (ends[0] + 1) % 4}
    known = known_of(4, 2)
    assert slow_ways(flows, TIME_S, known) is not None and slow_ways(ring, TIME_S, known) is None
    assert slow_ways(flows, 1.5 * TIME_S, known) is None and slow_ways({}, TIME_S, known) is None
    # Known before: no news.
    assert slow_ways(flows, TIME_S, {**known, (2, 1, True): RATE / 2, (2, 1, False): RATE / 2}) is None


def shifted_flows() -> dict[FlowEnds, NicFlow]:
    """Flows of four ranks, in NIC 1 of rank 1 at half both ways, whose rank has begun to send more over its other NIC:
    as they were seen on emulated hosts."""
    return seen_flows("""
        0010 2.1 .100, 0111 2.1 .248, 0020 2.1 .084, 0121 2.1 .052, 0030 2.1 .064, 0131 2.1 .056,
        1000 2.6 .144, 1101 1.6 .204, 1020 2.6 .128, 1121 1.6 .148, 1030 2.6 .108, 1131 1.6 .200,
        2000 2.1 .100, 2101 2.1 .052, 2010 2.1 .124, 2111 2.1 .204, 2030 2.1 .160, 2131 2.1 .084,
        3000 2.1 .076, 3101 2.1 .068, 3010 2.1 .108, 3111 2.1 .264, 3020 2.1 .108, 3121 2.1 .056
    """)


def seen_flows(seen: str) -> dict[FlowEnds, NicFlow]:
    """Of sender, its NIC, receiver, its NIC; MB, and busy seconds."""
    flows: dict[FlowEnds, NicFlow] = {}
    for each in seen.split(","):
        ends, megabytes, busy_s = each.split()
        src, mine, dst, theirs = map(int, ends)
        flows[src, mine, dst, theirs] = NicFlow(float(megabytes) * 1e6, float(busy_s))
    return flows


def test_a_nic_over_which_its_rank_sends_less_already_is_named_by_what_comes_in() -> None:
    flows, seconds = shifted_flows(), 0.249
    found = slow_ways(flows, seconds, known_of(4, 2))
    assert found is not None and found.keys() == {(1, 1, False)}
    assert found[1, 1, False].rate == pytest.approx(RATE / 2, rel=0.03)
    # Not if a flow of other NICs is as busy, nor if some flow of the NIC is not.
    assert slow_ways({**flows, (2, 0, 3, 0): NicFlow(2.1e6, 0.2)}, seconds, known_of(4, 2)) is None
    assert slow_ways({**flows, (2, 1, 1, 1): NicFlow(2.1e6, 0.18)}, seconds, known_of(4, 2)) is None


NEARLY_AS_BUSY = {
    "the other NIC of its host": (
        0.254,
        """
        0010 2.1 .140, 0111 2.1 .216, 0020 2.1 .116, 0121 2.1 .104, 0030 2.1 .140, 0131 2.1 .136,
        1000 2.1 .184, 1101 2.1 .248, 1020 2.1 .196, 1121 2.1 .252, 1030 2.1 .204, 1131 2.1 .256,
        2000 2.1 .100, 2101 2.1 .084, 2010 2.1 .124, 2111 2.1 .256, 2030 2.1 .120, 2131 2.1 .116,
        3000 2.1 .100, 3101 2.1 .084, 3010 2.1 .120, 3111 2.1 .256, 3020 2.1 .108, 3121 2.1 .104
        """,
    ),
    "a NIC that its flows end at": (
        0.128,
        """
        0010 1.03 .036, 0111 1.03 .120, 0020 1.03 .028, 0121 1.03 .016, 0030 1.03 .036, 0131 1.03 .092,
        1000 1.03 .004, 1101 1.03 .120, 1020 1.03 .024, 1121 1.03 .120, 1030 1.03 .028, 1131 1.03 .120,
        2000 1.03 .052, 2101 1.03 .044, 2010 1.03 .048, 2111 1.03 .112, 2030 1.03 .056, 2131 1.03 .112,
        3000 1.03 .000, 3101 1.03 .052, 3010 1.03 .016, 3111 1.03 .120, 3020 1.03 .028, 3121 1.03 .064
        """,
    ),
    "all that one NIC of another host sends": (
        0.249,
        """
        0010 2.07 .024, 0111 2.07 .216, 0020 2.07 .060, 0121 2.07 .152, 0030 2.07 .068, 0131 2.07 .184,
        1000 2.07 .020, 1101 2.07 .240, 1020 2.07 .044, 1121 2.07 .240, 1030 2.07 .036, 1131 2.07 .244,
        2000 2.07 .052, 2101 2.07 .084, 2010 2.07 .044, 2111 2.07 .224, 2030 2.07 .036, 2131 2.07 .160,
        3000 2.07 .044, 3101 2.07 .204, 3010 2.07 .064, 3111 2.07 .216, 3020 2.07 .096, 3121 2.07 .208
        """,
    ),
}
"""Flows of four ranks as they were seen on emulated hosts in so many seconds, NIC 1 of rank 1 at half both ways: what
is nearly as busy as that one's."""


def ways_named(flows: dict[FlowEnds, NicFlow], seconds: float) -> set[NicWay]:
    return set(slow_ways(flows, seconds, known_of(4, 2)) or ())


@pytest.mark.parametrize(("seconds", "seen"), NEARLY_AS_BUSY.values(), ids=NEARLY_AS_BUSY)
def test_a_nic_that_is_slow_both_ways_is_named_though_others_are_nearly_as_busy(seconds: float, seen: str) -> None:
    flows = seen_flows(seen)
    assert ways_named(flows, seconds) == {(1, 1, True), (1, 1, False)}
    # Not if two flows that others have are just as busy.
    flows |= {(0, 0, 2, 0): NicFlow(2.07e6, 0.97 * seconds), (2, 0, 3, 0): NicFlow(2.07e6, 0.97 * seconds)}
    assert not ways_named(flows, seconds)


def test_a_nic_that_is_slow_both_ways_is_named_though_all_that_goes_to_another_one_is_as_busy() -> None:
    seconds, seen = NEARLY_AS_BUSY["a NIC that its flows end at"]
    flows = seen_flows(seen)
    for busy_s in (0.092, 0.128):
        flows[0, 1, 3, 1] = flows[2, 1, 3, 1] = NicFlow(1.03e6, busy_s)
        assert ways_named(flows, seconds) == {(1, 1, True), (1, 1, False)}


def test_nothing_is_said_where_all_flows_are_busy_and_all_are_slow() -> None:
    flows = {ends: NicFlow(flow.n_bytes, 0.25) for ends, flow in shifted_flows().items()}
    assert slow_ways(flows, 0.25, known_of(4, 2)) is None


def test_two_flows_that_are_as_busy_as_those_of_the_slow_nic_leave_it_open() -> None:
    flows = make_flows(random.Random(2), 4, 2, {(2, 1, True): RATE / 2, (2, 1, False): RATE / 2})
    for number, ends in enumerate([(0, 0, 1, 0), (3, 1, 0, 1)]):
        flows[ends] = flows[ends]._replace(busy_s=0.97 * TIME_S)
        assert (slow_ways(flows, TIME_S, known_of(4, 2)) is None) == (number > 0)


def test_marks_are_some_time_apart_and_the_first_ones_are_dropped() -> None:
    marks, rail, at_s = FlowMarks(), (0, 1, 0), 0.0
    for number in range(2 * MARKS):
        assert marks.is_due(at_s)
        marks.note(number, at_s, {rail: FlowTally(1, 1000 * number, at_s)})
        assert not marks.is_due(at_s + MARK_S / 2)
        at_s += 2 * MARK_S
    assert marks.first_between(0.0, at_s) == MARKS and marks.first_between(at_s - 3 * MARK_S, at_s) == 2 * MARKS - 1
    assert marks.first_between(0.0, MARK_S) is None
    now = {rail: FlowTally(1, 1000 * 2 * MARKS, at_s)}
    traffic = marks.since(2 * MARKS - 2, at_s, now)
    assert traffic is not None and traffic.flows[rail].n_bytes == 2000
    assert traffic.flows[rail].busy_s == pytest.approx(4 * MARK_S)
    assert marks.since(2 * MARKS, at_s, now) is None


def test_time_after_the_last_mark_counts_only_if_much_is_carried_in_it() -> None:
    rail = (0, 1, 0)
    for late_bytes, seconds in ((100, 1.0), (500, 1.5)):
        marks = FlowMarks()
        marks.note(0, 1.0, {rail: FlowTally(1, 0, 0.0)})
        marks.note(1, 2.0, {rail: FlowTally(1, 2000 - late_bytes, 1.0)})
        traffic = marks.since(0, 2.5, {rail: FlowTally(1, 2000, 1.2)})
        assert traffic is not None and traffic.seconds == seconds
