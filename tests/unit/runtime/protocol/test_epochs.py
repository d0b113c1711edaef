"""What rank 0 makes of rates: when plans are to be for others, and how often it asks the traffic."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest

from optcc.runtime.protocol.agreement import Share, Shares
from optcc.runtime.protocol.epochs import (
    CHECK_S,
    CHECK_S_MAX,
    HOPE_PAUSES,
    PATIENCE_S_MAX,
    PAUSE_S,
    QUICK_S,
    RATE_PATIENCE_S_MAX,
    SETTLE_S,
    SLOW_RUNS,
    WORTH_S,
)
from optcc.runtime.protocol.frames import RateWord
from optcc.runtime.protocol.patience import PATIENCE_S
from optcc.runtime.protocol.rates import DOUBTED_SHARE
from tests.unit.runtime.protocol.network import Network

RATE, TICK_S = 20_000_000, 0.01
WHOLE, HALF, DOUBTED, LOST = (1.0, 1.0), (0.5, 0.5), (DOUBTED_SHARE, DOUBTED_SHARE), (0.0, 0.0)
UNEVEN = (0.287353515625, 0.467529296875)


class Told:
    """Rank 0 of two, whose plans are for NIC 1 of rank 1 at `planned`, as was measured just now."""

    def __init__(self, planned: Share) -> None:
        self.network = Network(2, rates=(RATE, RATE), learn_rates=True)
        self.network.open((0, 1), (1, 0))
        self.network.until(self.network.all_up)
        self.epochs = self.network.endpoints[0].epochs
        self.epochs.is_on = self.epochs.measures = True
        self.proposed: list[Shares] = []
        self.epochs._propose_now = lambda shares: self.proposed.append(shares)  # type: ignore[method-assign]
        # Long after a NIC was lost.
        self.network.run(5.0)
        self.say(planned)
        shares: Shares = (WHOLE, WHOLE), (WHOLE, planned)
        self.epochs.take_measured(shares, 0.1, is_told=True)
        self.turn = 1

    def say(self, share: Share) -> None:
        """Rank 1 says that of its NIC."""
        self.turn = getattr(self, "turn", 0) + 1
        self.epochs._rates.hear(1, RateWord(self.turn, 1, 1, *share).number)

    def count(self, busy: float = 1.0) -> None:
        """Rank 0 knows what plans cost; runs are under way for such a part of the time."""
        self.epochs.least_s, self.epochs.ran_s = least_s, lambda: busy * self.network.now_s

    def until_proposed(self, limit_s: float) -> float:
        """How long that takes."""
        began_s = self.network.now_s
        while not self.proposed and self.network.now_s < began_s + limit_s:
            self.network.run(TICK_S)
        return self.network.now_s - began_s


def least_s(shares: Shares) -> float:
    """A run takes as long as what the weakest host carries makes it: twice the time if one of two NICs is not used."""
    return 1 / min(sum(min(share) for share in nics if share != DOUBTED) for nics in shares)


@pytest.mark.parametrize("said", [(1.0, 0.5), (0.6, 1.0), WHOLE])
def test_a_nic_that_carries_all_it_should_one_way_is_soon_believed_to_do_so_both_ways(said: Share) -> None:
    told = Told(HALF)
    told.say(said)
    # It looks every tenth of a second, as nothing is under way.
    assert SETTLE_S + PATIENCE_S <= told.until_proposed(5.0) < SETTLE_S + PATIENCE_S + 0.2
    assert told.proposed == [((WHOLE, WHOLE), (WHOLE, WHOLE))]


def test_what_a_nic_carries_the_other_way_may_be_rounded_otherwise() -> None:
    """What ranks tell each other of rates is rounded more than what they agree on."""
    told = Told(UNEVEN)
    told.say((1.0, UNEVEN[1] - 2**-12))
    assert told.until_proposed(5.0) < SETTLE_S + PATIENCE_S + 0.2
    assert told.proposed == [((WHOLE, WHOLE), (WHOLE, (1.0, UNEVEN[1] - 2**-12)))]


def flapped(planned: Share, *, is_known: bool, busy: float = 1.0) -> Told:
    """NICs have failed again and again soon after they were back. What plans cost `is_known` or not, and runs are under
    way for a part of the time."""
    told = Told(planned)
    told.network.run(0.2)
    told.epochs._patience_lost.seconds, told.epochs._patience_slow.seconds = PATIENCE_S_MAX, RATE_PATIENCE_S_MAX
    if is_known:
        told.count(busy)
    return told


@pytest.mark.parametrize(("planned", "said"), [(LOST, WHOLE), (LOST, DOUBTED), (DOUBTED, WHOLE)])
def test_a_nic_that_was_lost_again_and_again_is_believed_once_that_is_worth_it(planned: Share, said: Share) -> None:
    """Half of each run is lost without it, or with one that has yet to be measured."""
    for is_known, patience_s in ((False, PATIENCE_S_MAX), (True, WORTH_S / 0.5)):
        told = flapped(planned, is_known=is_known)
        told.say(said)
        assert patience_s <= told.until_proposed(20.0) < patience_s + SETTLE_S + 0.3
        assert told.proposed == [((WHOLE, WHOLE), (WHOLE, said))]


def test_a_nic_that_was_slow_again_and_again_is_believed_sooner_the_more_that_saves() -> None:
    for planned in (HALF, (0.9, 0.8)):
        told = flapped(planned, is_known=True)
        told.say(WHOLE)
        worth_s = WORTH_S / (1 - (1 + min(planned)) / 2)
        assert worth_s <= told.until_proposed(20.0) < worth_s + SETTLE_S + 0.3


def test_what_plans_cost_counts_once_it_is_known() -> None:
    """No collective was over before, so the first one is not known."""
    told = flapped(LOST, is_known=False)
    told.say(WHOLE)
    assert told.until_proposed(1.0) >= 1.0
    told.count()
    assert told.until_proposed(20.0) < WORTH_S / 0.5 + SETTLE_S + 0.3


def test_plans_cost_nothing_while_no_run_is_under_way() -> None:
    told = flapped(LOST, is_known=True, busy=0.4)
    told.say(WHOLE)
    assert WORTH_S / 0.5 / 0.4 <= told.until_proposed(20.0) < WORTH_S / 0.5 / 0.4 + SETTLE_S + 0.3


def test_a_host_for_whose_nics_there_is_no_plan_is_believed_to_be_back_after_a_second() -> None:
    """All that it had was lost one after the other, in the middle of a collective. Nobody knows what that costs."""
    told = flapped(LOST, is_known=True)
    told.epochs.take_measured(((WHOLE, WHOLE), (LOST, LOST)), 0.1, is_told=False)
    told.say(WHOLE)
    assert WORTH_S <= told.until_proposed(20.0) < WORTH_S + SETTLE_S + 0.3


def test_a_nic_that_was_lost_says_nothing_of_those_that_are_slow() -> None:
    told = Told(WHOLE)
    for share in (DOUBTED, WHOLE, DOUBTED):
        told.epochs.take_measured(((WHOLE, WHOLE), (WHOLE, share)), 0.1, is_told=False)
    assert told.epochs._patience_slow.seconds == PATIENCE_S
    for share in (WHOLE, HALF, WHOLE, HALF):
        told.epochs.take_measured(((WHOLE, WHOLE), (WHOLE, share)), 0.1, is_told=False)
    assert told.epochs._patience_slow.seconds > PATIENCE_S


@pytest.mark.parametrize("in_vain", [0, 2])
def test_a_nic_that_rests_is_tried_once_that_is_worth_it(in_vain: int) -> None:
    """Its rank has found it to carry next to nothing, after trials that did not find that."""
    for is_known, worth_s in ((False, inf), (True, WORTH_S * max(1, in_vain) / 0.5)):
        told = Told(WHOLE)
        epochs = told.epochs
        if is_known:
            told.count()
        epochs._in_vain[1] = in_vain
        epochs.take_measured(((WHOLE, LOST), (WHOLE, WHOLE)), 0.1, is_told=False)
        epochs._is_silent[1], epochs._silent_ran_s[1] = True, epochs.ran_s()
        epochs.readmissions.await_trial(1, HOPE_PAUSES * PAUSE_S)
        began_s = told.network.now_s
        while epochs._is_silent[1] and told.network.now_s < began_s + HOPE_PAUSES * PAUSE_S - 0.5:
            told.network.run(TICK_S)
        waited_s = told.network.now_s - began_s
        assert worth_s <= waited_s < worth_s + 0.5 if is_known else epochs._is_silent[1]


def test_a_word_from_before_the_nic_was_measured_is_not_believed() -> None:
    """It is followed by another one, which says what was measured."""
    told = Told(HALF)
    told.say(WHOLE)
    told.network.run(SETTLE_S / 2)
    told.say(HALF)
    assert told.until_proposed(3.0) >= 3.0 and not told.proposed


@pytest.mark.parametrize(
    ("planned", "said"), [(HALF, (0.8, 0.8)), (HALF, (1.0, 0.4)), (HALF, (0.4, 1.0)), ((0.5, 1.0), (0.8, 1.0))]
)
def test_another_rate_counts_once_the_pause_is_over(planned: Share, said: Share) -> None:
    told = Told(planned)
    told.say(said)
    assert told.until_proposed(PAUSE_S - 0.1) >= PAUSE_S - 0.1
    assert told.until_proposed(QUICK_S + PATIENCE_S + 0.5) < QUICK_S + PATIENCE_S + 0.5


@pytest.mark.parametrize(("said", "counts"), [((0.4, 0.4), False), ((0.4, 0.5), False), ((0.4, 1.0), True)])
def test_a_nic_that_carries_less_counts_while_no_run_is_slow_only_if_it_carries_more_the_other_way(
    said: Share, *, counts: bool
) -> None:
    told = Told(HALF)
    told.epochs.note_slow_runs(0)
    told.say(said)
    assert (told.until_proposed(PAUSE_S + 1.0) < PAUSE_S + 1.0) == counts


def test_the_traffic_is_asked_ever_less_often_while_single_runs_are_slow() -> None:
    """Until none has been for as long as it would not be asked."""
    told = Told(WHOLE)
    epochs, shares = told.epochs, told.epochs._measured
    epochs._is_settled = lambda: True  # type: ignore[method-assign]
    asked: list[float] = []
    began_s = told.network.now_s
    while told.network.now_s < began_s + 12.0:
        for count in (SLOW_RUNS, 0):
            told.network.run(TICK_S)
            epochs.note_slow_runs(count)
        if told.proposed:
            asked.append(told.network.now_s)
            told.proposed.clear()
            epochs.take_measured(shares, 0.001, is_told=True)
    pauses = [later - sooner for sooner, later in pairwise(asked)]
    assert len(pauses) >= 5 and pauses[-1] >= CHECK_S_MAX
    assert all(later >= 1.5 * sooner for sooner, later in pairwise(pauses[:-1]))
    for seconds, is_reset in ((CHECK_S_MAX - 2 * TICK_S, False), (4 * TICK_S, True)):
        told.network.run(seconds)
        epochs.note_slow_runs(0)
        assert (epochs._check_s == CHECK_S) == is_reset
