"""A NIC that was taken out of use is tried by itself before it is used again."""

from __future__ import annotations

from itertools import pairwise

import pytest

from optcc.runtime.protocol.connection import RecvConnection, SendConnection
from optcc.runtime.protocol.epochs import HOPE_PAUSES, RATE_CALM_S
from optcc.runtime.protocol.epochs import PAUSE_S as EPOCH_PAUSE_S
from optcc.runtime.protocol.frames import BURST_FRAME, BurstWord, control_header
from optcc.runtime.protocol.patience import PATIENCE_S
from optcc.runtime.protocol.readmission import PART_BYTES_MAX, PART_BYTES_MIN, PARTS, PAUSE_S, PAUSE_S_MAX
from tests.unit.runtime.protocol.network import Network

RATE = 20_000_000
PART_BYTES = 100_000
"""What a twelfth of that carries in 60 ms."""


class Tried:
    """Rank 1 of two tries its NIC 1."""

    def __init__(self, rate: int = RATE) -> None:
        self.network = Network(2, rates=(rate, rate))
        self.network.open((0, 1), (1, 0))
        self.network.barrier()
        self.network.until(self.network.all_up)
        self.endpoint = self.network.endpoints[1]
        self.readmissions = self.endpoint.epochs.readmissions
        self.readmissions.await_trial(1)
        self.before = self.counts()

    def counts(self) -> tuple[int, int]:
        """Bytes out and in over that NIC."""
        count = self.endpoint.rail_counts[1]
        return count.sent_bytes, count.received_bytes

    def carried(self) -> list[int]:
        """Those since the trial began."""
        return [now - before for now, before in zip(self.counts(), self.before, strict=True)]

    def run(self, seconds: float, look_s: float = 0.01) -> bool:
        """Whether the trial is over within so much time."""
        until_s = self.network.now_s + seconds
        while self.network.now_s < until_s:
            if self.readmissions.is_over(1):
                return True
            self.network.run(look_s)
        return False


@pytest.mark.parametrize(("rate", "part_bytes"), [(12_500_000, PART_BYTES_MIN), (RATE, PART_BYTES), (1 << 33, 1 << 20)])
def test_a_nic_is_readmitted_once_all_parts_have_come_both_ways(rate: int, part_bytes: int) -> None:
    tried = Tried(rate)
    assert tried.run(0.5)
    assert all(PARTS * part_bytes <= each < 1.05 * PARTS * part_bytes + 2000 for each in tried.carried())


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_nic_over_which_too_little_comes_one_way_is_tried_again_later_and_later(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Tried()
    network = tried.network
    frozen = network.outbound(*((0, 1) if way == "in" else (1, 0)), 1)
    network.freeze(frozen)
    for end in network._both(frozen):
        # Nobody finds out that it is silent.
        monkeypatch.setattr(end, "report", lambda: None)
    began_s: list[float] = []
    until_s, trial = network.now_s + 5.0, tried.readmissions._trials[1]
    was_tried = False
    while network.now_s < until_s:
        assert not tried.readmissions.is_over(1)
        if trial.ends is not None and not was_tried:
            began_s.append(network.now_s)
        was_tried = trial.ends is not None
        network.run(0.01)
    pauses = [later - sooner for sooner, later in pairwise(began_s)]
    # To which comes the time after which a part is too late, and what a look is late.
    wanted = [min(PAUSE_S_MAX, PAUSE_S * 2**number) for number in range(len(pauses))]
    assert len(pauses) > 3 and all(0.06 <= is_ - least < 0.12 for is_, least in zip(pauses, wanted, strict=True))
    # One part a trial, or two.
    assert all(each < 1.1 * len(began_s) * PART_BYTES for each in tried.carried())


class Bucket:
    """One way of a NIC that sends `rate` bytes/s, and at once what it could have sent before, up to `most` bytes."""

    def __init__(self, rate: float, most: int = 1 << 17) -> None:
        self._rate, self._most, self._tokens = rate, most, float(most)
        self._waiting = self._carried = self._now_s = 0.0

    def add(self, n_bytes: int, now_s: float) -> None:
        """So many are to go from now on."""
        self.carried(now_s)
        self._waiting += n_bytes

    def carried(self, now_s: float) -> int:
        """The bytes that have gone so far."""
        if now_s == self._now_s:
            return round(self._carried)
        added = self._rate * (now_s - self._now_s)
        gone = min(self._waiting, self._tokens + added)
        self._tokens = min(self._most, self._tokens + added - gone)
        self._waiting, self._carried, self._now_s = self._waiting - gone, self._carried + gone, now_s
        return round(self._carried)


@pytest.mark.parametrize(("share", "is_carried"), [(0.01, False), (0.02, False), (0.5, True), (1.0, True)])
@pytest.mark.parametrize("look_s", [0.005, 0.02, 0.025])
def test_what_an_idle_nic_lets_through_at_once_has_none_readmitted(
    share: float, is_carried: bool, look_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = 50_000_000
    tried = Tried(rate)
    readmissions, network, local = tried.readmissions, tried.network, tried.readmissions._local
    ways = {kind: Bucket(share * rate) for kind in (SendConnection, RecvConnection)}
    monkeypatch.setattr(local, "have_padded", lambda each, n_bytes: ways[type(each)].add(n_bytes, network.now_s))
    monkeypatch.setattr(
        readmissions, "_carried", lambda nic, trial, ends: ways[type(ends[trial.n_left % 2])].carried(network.now_s)
    )
    assert tried.run(10.0, look_s) == is_carried


def test_a_peer_sends_no_more_than_a_part() -> None:
    tried = Tried()
    connection = tried.network.inbound(0, 1, 1)
    word = BurstWord(connection.session, (1 << 32) - 1)
    sender = tried.network.outbound(0, 1, 1)
    tried.network.endpoints[0].received(sender, control_header(sender.session, BURST_FRAME, word.number))
    tried.network.settle()
    assert PART_BYTES_MAX <= tried.carried()[1] < PART_BYTES_MAX + 2000
    unknown = BurstWord(connection.session + 1, 1 << 16)
    tried.network.endpoints[0].received(sender, control_header(sender.session, BURST_FRAME, unknown.number))
    tried.network.settle()
    assert tried.carried()[1] < PART_BYTES_MAX + 2000


def test_a_nic_waits_longer_for_its_trial_only_if_the_last_ones_found_too_much() -> None:
    """That it was silent, tried, and silent again before it was measured counts for nothing."""
    epochs = Network(2, rates=(RATE, RATE)).endpoints[1].epochs
    epochs.measures = True
    whole, next_to_nothing = (1.0, 1.0), (0.01, 0.01)
    found: list[float] = []
    for tries, share in ((0, next_to_nothing), (1, next_to_nothing), (3, next_to_nothing), (1, whole), (0, whole)):
        for _ in range(tries):
            epochs._is_back(1, is_joined=False)
        epochs.take_measured(((whole, whole), (whole, share)), 0.1, is_told=False)
        found.append(epochs._wait_s(1))
    first_s = HOPE_PAUSES * EPOCH_PAUSE_S
    assert found == [PAUSE_S, first_s, 2 * first_s, PAUSE_S, PAUSE_S]


def test_a_nic_that_others_wait_for_is_tried_at_once_unless_it_has_just_been() -> None:
    tried = Tried()
    tried.readmissions.await_trial(1, 30.0)
    assert not tried.run(0.5)
    tried.readmissions.hasten(1)
    assert tried.run(0.5)
    tried.readmissions.await_trial(1, PAUSE_S)
    tried.readmissions.hasten(1)
    assert not tried.run(PAUSE_S / 2) and tried.run(0.5)


def test_a_trial_counts_for_nothing_if_no_nic_of_the_rail_was_in_use() -> None:
    epochs = Network(3, rates=(RATE, RATE)).endpoints[1].epochs
    epochs.measures = True
    whole, lost = (1.0, 1.0), (0.0, 0.0)
    found: list[float] = []
    for other in (whole, whole, lost):
        epochs._is_back(1, is_joined=False)
        epochs.take_measured(((whole, lost), (whole, lost), (whole, other)), 0.1, is_told=False)
        found.append(epochs._wait_s(1))
    first_s = HOPE_PAUSES * EPOCH_PAUSE_S
    assert found == [first_s, 2 * first_s, PAUSE_S]


def test_a_nic_that_is_soon_slow_again_is_believed_later() -> None:
    network = Network(2, rates=(RATE, RATE))
    epochs = network.endpoints[0].epochs
    whole, half = (1.0, 1.0), (0.5, 0.5)
    found: list[float] = []
    for seconds, share in (
        *((1.0, half), (1.0, whole), (RATE_CALM_S - 0.1, half), (9.0, whole), (0.1, half)),
        *((9.0, whole), (RATE_CALM_S + 0.1, half)),
    ):
        network.run(seconds)
        epochs.take_measured(((whole, whole), (whole, share)), 0.1, is_told=True)
        found.append(epochs._patience_slow.seconds / PATIENCE_S)
    assert found == [1, 1, 4, 4, 16, 16, 1] and epochs._patience_lost.seconds == PATIENCE_S
