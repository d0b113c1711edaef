"""What rank 0 makes of rates: when plans are to be for others, and how often it asks the traffic."""

from __future__ import annotations

from itertools import pairwise

import pytest

from optcc.runtime.protocol.agreement import Share, Shares
from optcc.runtime.protocol.epochs import CHECK_S, CHECK_S_MAX, PAUSE_S, QUICK_S, SETTLE_S, SLOW_RUNS
from optcc.runtime.protocol.frames import RateWord
from optcc.runtime.protocol.patience import PATIENCE_S
from tests.unit.runtime.protocol.network import Network

RATE, TICK_S = 20_000_000, 0.01
WHOLE, HALF = (1.0, 1.0), (0.5, 0.5)


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

    def until_proposed(self, limit_s: float) -> float:
        """How long that takes."""
        began_s = self.network.now_s
        while not self.proposed and self.network.now_s < began_s + limit_s:
            self.network.run(TICK_S)
        return self.network.now_s - began_s


@pytest.mark.parametrize("said", [(1.0, 0.5), (0.6, 1.0), WHOLE])
def test_a_nic_that_carries_all_it_should_one_way_is_soon_believed_to_do_so_both_ways(said: Share) -> None:
    told = Told(HALF)
    told.say(said)
    # It looks every tenth of a second, as nothing is under way.
    assert SETTLE_S + PATIENCE_S <= told.until_proposed(5.0) < SETTLE_S + PATIENCE_S + 0.2
    assert told.proposed == [((WHOLE, WHOLE), (WHOLE, WHOLE))]


def test_a_word_from_before_the_nic_was_measured_is_not_believed() -> None:
    """It is followed by another one, which says what was measured."""
    told = Told(HALF)
    told.say(WHOLE)
    told.network.run(SETTLE_S / 2)
    told.say(HALF)
    assert told.until_proposed(3.0) >= 3.0 and not told.proposed


@pytest.mark.parametrize(("planned", "said"), [(HALF, (0.8, 0.8)), (HALF, (1.0, 0.4)), ((0.5, 1.0), (0.8, 1.0))])
def test_another_rate_counts_once_the_pause_is_over(planned: Share, said: Share) -> None:
    told = Told(planned)
    told.say(said)
    assert told.until_proposed(PAUSE_S - 0.1) >= PAUSE_S - 0.1
    assert told.until_proposed(QUICK_S + PATIENCE_S + 0.5) < QUICK_S + PATIENCE_S + 0.5


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
