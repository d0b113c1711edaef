"""A NIC that was measured to be slow is tried by padding, out or in, before it is said to carry more again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import pytest

from optcc.runtime.protocol.faster_trials import (
    AT_ONCE_S,
    BUSY_S,
    ENOUGH,
    FIRST_S,
    GROWTH,
    LEAST_MISSING,
    PADDED,
    PAUSE_S,
    PAUSE_S_MAX,
    TRIAL_S,
    FasterTrials,
)
from optcc.runtime.protocol.local import Established, LocalRank
from tests.unit.runtime.protocol.network import Network

RATE, TICK_S, KNOWN = 50_000_000, 0.01, 0.5


class Padded:
    """A rank, and what is told of its padding in place of its NICs."""

    def __init__(self, local: LocalRank, have_padded: Callable[[Established, int], None]) -> None:
        self._local, self.have_padded = local, have_padded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)


class Tried:
    """NIC 1 of rank 1 of three, known to carry `known` shares and carrying `share` of its rate one way. The job sends
    what plans have it send, which is what is known; after a pause comes at once what an idle NIC lets through."""

    def __init__(self, known: tuple[float, float], share: float, job: float = 1.0) -> None:
        self.network = Network(3, rates=(RATE, RATE))
        self.network.open((0, 1), (1, 0), (1, 2), (2, 1))
        self.network.barrier()
        self.network.until(self.network.all_up)
        self.local = self.network.endpoints[1].epochs._local
        self.is_out = known[0] <= known[1]
        self.known, self.share, self.job = min(known), share, job
        self.slow, self.at_once_s = {1: known}, 0.9 * AT_ONCE_S
        self.waiting = self.carried = 0.0
        self.padded = 0
        self.faster: list[tuple[int, bool]] = []
        padded = cast("LocalRank", Padded(self.local, lambda _, n_bytes: self._pad(n_bytes)))
        self.trials = FasterTrials(padded, lambda: self.slow, lambda *which: self.faster.append(which))
        self.trials._carried = lambda nic, is_out: round(self.carried)  # type: ignore[method-assign]
        self.now_s = 0.0

    def _pad(self, n_bytes: int) -> None:
        self.padded += n_bytes
        self.waiting += n_bytes

    def tick(self) -> None:
        """The NIC carries what waits, as far as it can."""
        self.now_s += TICK_S
        self.waiting += self.job * self.known * RATE * TICK_S
        n_bytes = min(self.waiting, self.share * RATE * TICK_S)
        self.carried += n_bytes
        self.waiting -= n_bytes
        was_tried = self.is_tried
        self.trials.look(self.now_s)
        if self.is_tried and not was_tried:
            self.carried += self.at_once_s * self.known * RATE

    @property
    def is_tried(self) -> bool:
        return self.trials.is_tried(1)

    def run(self) -> float:
        """Until a trial is over; how long it took."""
        while not self.is_tried:
            self.tick()
            assert self.now_s < 100
        began_s, self.padded = self.now_s, 0
        while self.is_tried:
            self.tick()
        return self.now_s - began_s


@pytest.mark.parametrize("known", [(KNOWN, KNOWN), (KNOWN, 1.0), (1.0, KNOWN), (0.8, 1.0)])
def test_a_nic_that_carries_more_carries_the_padding_too(known: tuple[float, float]) -> None:
    tried = Tried(known, 1.0)
    assert tried.run() == pytest.approx(TRIAL_S, abs=1.5 * TICK_S)
    assert tried.faster == [(1, known[0] <= known[1])]


def test_what_comes_at_once_after_a_pause_does_not_count() -> None:
    tried = Tried((KNOWN, KNOWN), KNOWN + 0.9 * ENOUGH * PADDED)
    assert tried.run() > TRIAL_S / 2 and not tried.faster
    tried.at_once_s, tried.share = 0.0, KNOWN + 1.1 * ENOUGH * PADDED + KNOWN * AT_ONCE_S / TRIAL_S
    tried.run()
    assert tried.faster == [(1, True)]


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_connection_that_is_lost_ends_a_trial_and_a_doubtful_one_begins_none(is_closed: bool) -> None:
    tried = Tried((KNOWN, KNOWN), 1.0)
    connection = tried.network.outbound(1, 2, 1)
    if is_closed:
        while not tried.is_tried:
            tried.tick()
        while tried.now_s - tried.trials._trials[1].began_s < TRIAL_S - 2.5 * TICK_S:
            tried.tick()
        connection.is_closed = True
        tried.tick()
    else:
        connection.suspect = True
        while tried.now_s < 2 * PAUSE_S:
            tried.tick()
    assert not tried.is_tried and not tried.faster


def test_a_nic_is_tried_though_one_of_its_connections_is_new_and_has_carried_nothing() -> None:
    tried = Tried((KNOWN, KNOWN), KNOWN)
    tried.carried = 1e12
    tried.run()
    ended_s, tried.carried = tried.now_s, 0.0
    tried.run()
    assert tried.now_s - ended_s < GROWTH * PAUSE_S + BUSY_S + TRIAL_S + 4 * TICK_S


def test_a_nic_that_was_out_of_use_is_as_if_it_had_just_become_slow() -> None:
    tried = Tried((KNOWN, KNOWN), KNOWN)
    tried.run()
    slow = dict(tried.slow)
    tried.slow.clear()
    tried.tick()
    tried.slow |= slow
    tried.tick()
    assert tried.trials._trials[1].pause_s == PAUSE_S


def test_a_socket_that_is_full_gets_no_padding() -> None:
    tried = Tried((KNOWN, KNOWN), 1.0)
    tried.network.outbound(1, 2, 1).blocked = True
    while not tried.is_tried:
        tried.tick()
    assert tried.padded == pytest.approx(PADDED * RATE * TICK_S / 2, rel=0.01)


@pytest.mark.parametrize("known", [0.25, KNOWN, 0.8])
def test_a_nic_that_only_catches_up_after_pauses_does_not(known: float) -> None:
    tried = Tried((known, known), known)
    assert tried.run() <= TRIAL_S + 1.5 * TICK_S and not tried.faster
    assert tried.padded <= PADDED * RATE * (TRIAL_S + 3 * TICK_S)


def test_a_trial_in_vain_is_soon_over() -> None:
    tried = Tried((KNOWN, KNOWN), 0.98 * KNOWN)
    tried.waiting = 1e9
    assert tried.run() == pytest.approx(FIRST_S, abs=1.5 * TICK_S) and not tried.faster


def test_trials_in_vain_are_ever_rarer() -> None:
    tried, began_s = Tried((KNOWN, KNOWN), KNOWN), list[float]()
    while tried.now_s < 80.0:
        tried.run()
        began_s.append(tried.now_s)
    pauses = [later - sooner for sooner, later in pairwise([0.0, *began_s])]
    wanted = [min(PAUSE_S_MAX, PAUSE_S * GROWTH ** max(0, number - 1)) for number in range(len(pauses))]
    assert all(0 <= is_ - least < TRIAL_S + 4 * TICK_S for is_, least in zip(pauses, wanted, strict=True))
    assert wanted[-1] == PAUSE_S_MAX
    # Something else is known.
    tried.slow[1] = 0.4, 0.4
    tried.run()
    assert tried.now_s - began_s[-1] < PAUSE_S + TRIAL_S + 4 * TICK_S


def test_a_nic_is_tried_only_where_it_is_used_and_much_is_missing() -> None:
    idle = Tried((KNOWN, KNOWN), 1.0, job=0.5 * BUSY_S / 5.0)
    almost = Tried((1 - 0.9 * LEAST_MISSING,) * 2, 1.0)
    while idle.now_s < 5.0:
        for tried in (idle, almost):
            tried.tick()
            assert not tried.is_tried
    other = Tried((KNOWN, KNOWN), 1.0)
    other.slow.clear()
    while other.now_s < 1.0:
        other.tick()
    assert not other.is_tried


@pytest.mark.parametrize("known", [(KNOWN, 1.0), (1.0, KNOWN)])
def test_padding_goes_out_over_all_connections_or_is_asked_for_from_all_peers(known: tuple[float, float]) -> None:
    tried = Tried(known, 1.0)
    tried.trials._local = tried.local
    counts = tried.network.endpoints[1].rail_counts[1]
    before = counts.sent_bytes, counts.received_bytes
    while not tried.is_tried:
        tried.tick()
    tried.network.settle()
    due = PADDED * RATE * TICK_S
    out, in_ = (now - was for now, was in zip((counts.sent_bytes, counts.received_bytes), before, strict=True))
    assert (out if tried.is_out else in_) == pytest.approx(due, rel=0.02)
    assert (in_ if tried.is_out else out) < 2000


def test_a_peer_is_asked_for_no_more_than_a_part_at_once() -> None:
    tried = Tried((1.0, KNOWN), 1.0)
    connection = tried.network.inbound(2, 1, 1)
    counts = tried.network.endpoints[1].rail_counts[1]
    before = counts.received_bytes
    tried.local.have_padded(connection, 5 << 19)
    tried.network.settle()
    assert counts.received_bytes - before == pytest.approx(5 << 19, rel=0.01)
