"""What ranks make of their traffic together: slow NICs, of which some are slow at times only."""

from __future__ import annotations

import math
import random
import threading
from typing import Any, cast

import pytest

from optcc.runtime.guesses import Guess, Guesses
from optcc.runtime.protocol.flows import MARK_S, NicFlow, Traffic
from optcc.runtime.slow_nics import RemeasuredTransport, slow_nics
from tests.unit.runtime.protocol.test_flows import RATE, TIME_S, make_flows

N_RANKS, N_NICS = 3, 2
SLOW = (2, 1)
WHOLE = (((1.0, 1.0),) * N_NICS,) * N_RANKS
Found = tuple[dict[tuple[int, int], float] | None, bool]


class Wire:
    """What a rank of a job has sent and received: at all ranks, a NIC carries such a share on the average, both ways or
    out alone; in, flows are busy for such a part of the time then. Out, it carried less by a factor."""

    def __init__(self, share: float | None, busy_in: float | None = None, less_out: float = 1.0) -> None:
        ways = (True, False) if busy_in is None else (True,)
        slow = {} if share is None else {(*SLOW, is_out): share * RATE for is_out in ways}
        self.flows = make_flows(random.Random(3), N_RANKS, N_NICS, slow)
        if busy_in is not None:
            into = [ends for ends in self.flows if ends[2:] == SLOW]
            self.flows |= {ends: self.flows[ends]._replace(busy_s=busy_in * TIME_S) for ends in into}
        out_of = [ends for ends in self.flows if ends[:2] == SLOW]
        self.flows |= {ends: self.flows[ends]._replace(n_bytes=less_out * self.flows[ends].n_bytes) for ends in out_of}
        self.told: list[bytes] = [b""] * N_RANKS
        self.barrier = threading.Barrier(N_RANKS, timeout=10.0)
        self.asked: list[tuple[float, bool]] = []
        self.spans: set[tuple[int, int | None]] = set()


class Rank:
    """The part of a transport that is asked."""

    n_ranks = N_RANKS

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank = wire, rank
        self.nics = (tuple((f"eth{nic}", "", 0, RATE, RATE) for nic in range(N_NICS)),) * N_RANKS

    def pairs(self, src: int, dst: int) -> list[tuple[int, int]]:
        return [(nic, nic) for nic in range(N_NICS)]

    def allgather(self, own: bytes) -> list[bytes]:
        self.wire.told[self.rank] = own
        self.wire.barrier.wait()
        told = list(self.wire.told)
        self.wire.barrier.wait()
        return told

    def first_mark(self, after_s: float, *, may_be_new: bool = False) -> int | None:
        if not self.rank:
            self.wire.asked.append((after_s, may_be_new))
        return None if math.isinf(after_s) else round(10 * after_s)

    def traffic_since(self, number: int, until: int | None = None) -> Traffic:
        self.wire.spans.add((number, until))
        flows = {
            (mine, dst, theirs): NicFlow(*flow)
            for (src, mine, dst, theirs), flow in self.wire.flows.items()
            if src == self.rank
        }
        return Traffic(TIME_S, flows)


def ask(wire: Wire, span_s: tuple[float, float], *, pace: float = 1.0, guess: Guess | None = None) -> Found:
    """What all ranks find; only rank 0 knows what there is to ask."""
    found: list[Found | None] = [None] * N_RANKS

    def run(rank: int) -> None:
        own: tuple[Any, ...] = (span_s, WHOLE, True, pace, guess) if not rank else ((math.inf, math.inf), WHOLE, False)
        found[rank] = slow_nics(cast("RemeasuredTransport", Rank(wire, rank)), *own)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(N_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is not None and found == [found[0]] * N_RANKS
    return found[0]


@pytest.mark.parametrize(("pace", "share"), [(1.0, 0.7), (0.5, 0.5), (0.8, 0.7)])
def test_a_nic_carries_no_more_than_slow_runs_say(pace: float, share: float) -> None:
    wire = Wire(0.7)
    found, may_measure = ask(wire, (2.0, math.inf), pace=pace, guess=Guess(0, 0, 0.3))
    assert may_measure and found is not None and found == {SLOW: pytest.approx(share, rel=0.1)}
    assert wire.spans == {(20, None)} and wire.asked == [(2.0, False)]


@pytest.mark.parametrize(("busy_in", "share"), [(0.5, None), (0.8, 0.62)])
def test_a_nic_carries_as_much_both_ways_unless_it_clearly_does_not(busy_in: float, share: float | None) -> None:
    found, _ = ask(Wire(0.6, busy_in), (2.0, math.inf))
    assert found == (None if share is None else {SLOW: pytest.approx(share, rel=0.01)})


def test_a_nic_that_is_slow_both_ways_carries_what_it_did_in_the_time_of_the_busier_one() -> None:
    """As seen on emulated hosts: in, flows end sooner."""
    wire = Wire(0.5)
    for ends in wire.flows:
        if SLOW in (ends[:2], ends[2:]):
            wire.flows[ends] = NicFlow(RATE / 4 * TIME_S, (0.99 if ends[:2] == SLOW else 0.83) * TIME_S)
    found, _ = ask(wire, (2.0, math.inf))
    assert found is not None and found == {SLOW: pytest.approx(0.5, rel=0.01)}


@pytest.mark.parametrize(("less_out", "share"), [(0.75, 0.6), (0.6, None)])
@pytest.mark.parametrize("busy_out", [None, 0.6])
def test_a_nic_carries_what_it_did_the_way_that_was_full(
    less_out: float, busy_out: float | None, share: float | None
) -> None:
    wire = Wire(0.6, less_out=less_out)
    if busy_out is not None:
        # One flow out is busy for as long as before, and says what the NIC sends at most.
        ends = next(each for each in wire.flows if each[:2] == SLOW)
        wire.flows[ends] = wire.flows[ends]._replace(busy_s=busy_out * TIME_S)
    found, _ = ask(wire, (2.0, math.inf))
    assert found == (None if share is None else {SLOW: pytest.approx(share, rel=0.05)})


def test_the_traffic_of_one_run_is_that_between_the_marks_of_its_ends() -> None:
    wire = Wire(0.6)
    assert ask(wire, (2.0, 2.5))[0] is not None
    assert wire.asked == [(2.0 - MARK_S / 2, True), (2.5 - MARK_S / 2, True)]
    assert wire.spans == {(round(20 - 5 * MARK_S), round(25 - 5 * MARK_S))}


@pytest.mark.parametrize("span_s", [(2.0, math.inf), (math.inf, math.inf)])
def test_a_guess_counts_where_the_traffic_says_nothing(span_s: tuple[float, float]) -> None:
    assert ask(Wire(None), span_s)[0] is None
    assert ask(Wire(None), span_s, guess=Guess(1, 0, 0.4))[0] == {(1, 0): 0.4}


def test_a_nic_that_was_found_slow_one_way_is_tried_at_that_both_ways() -> None:
    """And if that is no quicker, as before."""
    guesses, known = Guesses(), (*WHOLE[:2], ((1.0, 1.0), (1.0, 0.5)))
    guesses.take(WHOLE, known)
    assert guesses.next(known, 0.95, 1.2) is None
    assert guesses.next(known, 0.8, 1.2) == Guess(*SLOW, 0.5)
    tried = (*WHOLE[:2], ((1.0, 1.0), (0.5, 0.5)))
    assert guesses.next(tried, 0.8, 1.2) == Guess(*SLOW, 1.0)
    guesses.take(known, WHOLE)
    assert guesses.next(WHOLE, 0.8, 1.2) is None


def test_nothing_is_guessed_of_several_nics_or_of_what_would_be_next_to_nothing() -> None:
    guesses = Guesses()
    guesses.take(WHOLE, (((0.5, 0.5), (1.0, 1.0)), ((0.5, 0.5), (1.0, 1.0)), WHOLE[2]))
    assert guesses.next(WHOLE, 0.5, 2.0) is None
    slow = (*WHOLE[:2], ((1.0, 1.0), (0.1, 0.1)))
    guesses.take(WHOLE, slow)
    assert guesses.next(slow, 0.8, 1.2) is None and guesses.next(slow, 0.89, 1.2) == Guess(*SLOW, 0.089)
