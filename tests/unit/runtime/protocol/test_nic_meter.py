"""`optcc.runtime.protocol.nic_meter`: what NICs turn out to send, from looks and windows that are made up here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from optcc.runtime.protocol.nic_meter import LOOKS_MIN, WINDOW_S, Carried, NicMeter, weigh

RATE = 25_000_000


def feed(meter: NicMeter, rate: float, *, busy: float = 1.0, free: float = 1.0, own: float = 1.0, n: int = 1) -> None:
    """Windows in which the NIC sends at `rate` for a share of the time: `busy`, of which `free` with room beyond."""
    for _ in range(n):
        for look in range(LOOKS_MIN):
            meter.look(look < round(LOOKS_MIN * busy))
        n_bytes, busy_s = round(rate * busy * WINDOW_S), own * busy * WINDOW_S
        meter.close(Carried(n_bytes, round(own * n_bytes), busy_s, free * busy_s, free * busy_s), WINDOW_S)


def judge(meters: Sequence[NicMeter], known: Sequence[float] = (1.0, 1.0)) -> list[float]:
    return weigh(meters, [1] * len(meters), known)


def test_a_nic_that_turns_slow_in_a_full_job_is_found_out_in_four_windows_and_forgiven_soon() -> None:
    meters, known, found = [NicMeter(), NicMeter()], [1.0, 1.0], []
    for rate in [RATE] * 10 + [RATE // 4] * 8:
        feed(meters[1], rate)
        # The other one waits for it, and is idle in between.
        feed(meters[0], RATE, busy=1.0 if rate == RATE else 1 / 3)
        known = judge(meters, known)
        found.append(known[1])
        assert known[0] == 1
    assert found[:13] == [1.0] * 13, "four full windows must say so, not three"
    assert found[13:] == pytest.approx([0.25] * 5, rel=0.02)
    # It gets a fifth of the bytes, and carries them at full speed from now on.
    windows = 0
    while known[1] < 1:
        windows += 1
        assert windows < 50
        feed(meters[1], RATE, busy=1 / 3)
        feed(meters[0], RATE)
        known = judge(meters, known)


@pytest.mark.parametrize("seed", range(5))
def test_nics_that_are_healthy_stay_so(seed: int) -> None:
    """Neither an uneven host, nor receivers without room, nor a plan that leaves NICs idle makes a NIC slow."""
    rng = np.random.default_rng(seed)
    meters, known = [NicMeter(), NicMeter()], [1.0, 1.0]
    for _ in range(500):
        host = rng.uniform(0.4, 1.0)
        for meter in meters:
            case = rng.integers(4)
            rate = RATE * host * rng.uniform(0.85, 1.15)
            if case == 0:
                feed(meter, rate / 4, free=0.5)
            elif case == 1:
                feed(meter, rate, busy=1 / 3)
            else:
                feed(meter, rate)
        known = judge(meters, known)
        assert known == [1.0, 1.0], f"seed {seed}"


def test_silence_is_not_a_rate() -> None:
    meters = [NicMeter(), NicMeter()]
    for meter in meters:
        feed(meter, RATE, n=10)
    for _ in range(20):
        # The NIC has failed: nothing moves, or the rest of the window nobody trusts.
        feed(meters[1], 0.0)
        meters[1].look(True)
        meters[1].drop()
        feed(meters[0], RATE)
        assert judge(meters) == [1.0, 1.0]


def test_what_a_slower_nic_at_the_other_end_holds_up_says_nothing() -> None:
    """It is not looked at as load, and what went there counts only for what the NIC sends in all."""
    meters = [NicMeter(), NicMeter()]
    feed(meters[0], RATE, n=20)
    for _ in range(20):
        for _ in range(LOOKS_MIN):
            meters[1].look(False)
        meters[1].close(Carried(round(RATE / 3 * WINDOW_S)), WINDOW_S)
    assert meters[1].at_most is None and meters[1].at_least is None
    assert judge(meters) == [1.0, 1.0]


def test_declared_rates_are_the_measure() -> None:
    fast, slow = NicMeter(), NicMeter()
    feed(fast, RATE, n=20)
    feed(slow, RATE / 2, n=20)
    assert weigh([fast, slow], [2, 1], [1.0, 1.0]) == [1.0, 1.0]
    assert weigh([fast, slow], [1, 1], [1.0, 1.0]) == pytest.approx([1.0, 0.5], rel=0.02)
    # Declared to be faster than it is, so that it is the first one that comes closest.
    assert weigh([slow, fast], [1, 4], [1.0, 1.0]) == pytest.approx([1.0, 0.5], rel=0.02)


def test_before_anything_was_carried_nothing_is_known() -> None:
    assert judge([NicMeter(), NicMeter()]) == [1.0, 1.0]
    assert judge([NicMeter(), NicMeter()], [1.0, 0.3]) == [1.0, 0.3]


def test_a_small_difference_to_what_is_known_is_no_news() -> None:
    meters = [NicMeter(), NicMeter()]
    feed(meters[0], RATE, n=20)
    feed(meters[1], RATE * 0.3, n=20)
    assert judge(meters, [1.0, 0.25]) == [1.0, 0.25]
    assert judge(meters, [1.0, 0.1]) == pytest.approx([1.0, 0.3], rel=0.02)


def test_a_nic_that_is_loaded_no_longer_than_the_others_says_nothing() -> None:
    """All NICs of a host are loaded all the time where all its peers are slow: nobody waits for this one."""
    meter = NicMeter()
    for _ in range(20):
        for _ in range(4):
            meter.look(True, False)
        meter.close(Carried(RATE // 4, RATE // 4, *[WINDOW_S] * 3), WINDOW_S)
    assert meter.at_most is None
    for _ in range(4):
        for look in range(4):
            meter.look(True, look == 0)
        meter.close(Carried(round(RATE / 4 * WINDOW_S), round(RATE / 4 * WINDOW_S), *[WINDOW_S] * 3), WINDOW_S)
    assert meter.at_most == pytest.approx(RATE / 4, rel=0.02)


def test_more_than_a_nic_is_declared_to_send_is_a_queue_that_was_empty() -> None:
    """Two NICs at what they are declared to send: the bursts of one do not make the other slow."""
    steady, bursts = NicMeter(), NicMeter()
    feed(steady, RATE, n=20)
    feed(bursts, 3 * RATE, n=20)
    assert weigh([steady, bursts], [RATE, RATE], [1.0, 1.0]) == [1.0, 1.0]
    assert weigh([steady, bursts], [1, 1], [1.0, 1.0]) == pytest.approx([1 / 3, 1.0], rel=0.02), "proportions only"


def test_a_slow_nic_is_forgiven_for_two_quick_samples_in_a_row_and_not_for_one() -> None:
    meter = NicMeter()
    slow, quick = (Carried(n_bytes, n_bytes, *[0.0625] * 3) for n_bytes in (1 << 21, 1 << 23))
    for carried in [slow] * 4:
        for _ in range(LOOKS_MIN):
            meter.look(True)
        meter.close(carried, 0.0625)
    assert meter.at_most is not None
    meter.close(quick, 0.0625)
    meter.close(slow, 0.0625)
    assert meter.at_most is not None, "a queue that was empty takes more for a moment"
    meter.close(quick, 0.0625)
    meter.close(quick, 0.0625)
    assert meter.at_most is None


@pytest.mark.parametrize("took_s", [WINDOW_S, 0.2, 0.5])
@pytest.mark.parametrize("busy", [1.0, 0.6])
def test_a_process_that_looks_seldom_measures_as_well(took_s: float, busy: float) -> None:
    """The window is as long as it takes, and the kernel says for how much of it the NIC had something to send."""
    meter, n_bytes = NicMeter(), round(RATE / 2 * busy * took_s)
    for _ in range(4):
        for _ in range(LOOKS_MIN):
            meter.look(True)
        meter.close(Carried(n_bytes, n_bytes, *[busy * took_s] * 3), took_s)
    assert meter.at_most == pytest.approx(RATE / 2, rel=0.02)
