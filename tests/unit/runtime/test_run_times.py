"""Runs that take longer than usual: how many, since when, and after how long one that goes on is."""

from __future__ import annotations

import math
from itertools import count

import pytest

from optcc.runtime.protocol.epochs import SLOW_RUNS
from optcc.runtime.run_times import (
    ALLOWED,
    KNOWN_RUNS,
    LONG_S,
    LOST_S,
    MUCH_SLOWER,
    SLOWER,
    SPAN_RUNS,
    USUAL_RUNS,
    RunTimes,
)


def usual(seconds: float) -> RunTimes:
    times = RunTimes()
    for number in range(USUAL_RUNS):
        times.take(seconds, number * seconds)
    return times


def test_slow_runs_began_when_the_first_of_them_was_over() -> None:
    times = usual(0.1)
    assert times.slow_since_s == math.inf
    assert [times.take(0.12, 1.0), times.take(0.12, 2.0)] == [1, 2]
    assert (times.slow_since_s, times.n_in_a_row) == (1.0, 2)
    assert times.take(0.3, 2.5) >= SLOW_RUNS and (times.slow_since_s, times.n_in_a_row) == (1.0, 3)
    assert times.take(0.1, 3.0) == 0 and (times.slow_since_s, times.n_in_a_row) == (math.inf, 0)


def test_a_run_after_a_slow_one_is_overdue_when_its_end_would_make_the_runs_count() -> None:
    for first, usual_s in ((0.12, 0.1), (0.15, 0.1), (0.3, 0.25)):
        for factor, counts in ((0.999, False), (1.001, True)):
            times = usual(usual_s)
            assert times.take(first, 1.0) == 1
            assert (times.take(factor * times.overdue_s, 2.0) >= SLOW_RUNS) == counts
    assert usual(0.01).overdue_s == LONG_S and usual(1.0).overdue_s == MUCH_SLOWER


def test_runs_that_are_slow_every_other_time_count_once_they_have_lost_enough() -> None:
    times, usual_s, slow_s = usual(0.1), 0.1, 0.13
    lost_s = slow_s + usual_s - 2 * ALLOWED * usual_s
    for number in count(1):
        assert times.take(slow_s, 2.0 * number) in (1, SLOW_RUNS)
        if times.take(usual_s, 2.0 * number + 1):
            break
        assert number < 100
    # What the last quick one gained is lost again by then.
    assert number * lost_s == pytest.approx(LOST_S, abs=0.02)
    assert times.slow_span_s == (2.0 * number - slow_s, 2.0 * number) and times.n_in_a_row == 0
    assert times.pace == pytest.approx(usual_s / slow_s)
    # They are all as slow now.
    assert all(times.take(slow_s, 1000.0 + each) for each in range(SPAN_RUNS))
    assert times.slow_span_s == (1000.0, math.inf) and times.slowest_span_s == (math.inf, math.inf)
    assert [times.take(usual_s, 2000.0) for _ in range(50)][-1] == 0
    assert times.slow_span_s == times.slowest_span_s == (math.inf, math.inf)
    assert times.take(slow_s, 3000.0) == 1 and times.slow_span_s == (3000.0, math.inf)
    assert times.slowest_span_s == pytest.approx((3000.0 - slow_s, 3000.0))


def test_runs_that_take_longer_than_expected_are_slow_from_the_second_on() -> None:
    times = RunTimes(expected_s=0.1)
    taken = [times.take(SLOWER * 0.1 + 0.001, float(number)) for number in range(1, 6)]
    assert taken == [0, 1, 2, 3, 4] and times.slow_since_s == 2.0
    as_usual = RunTimes()
    assert not any(as_usual.take(SLOWER * 0.1 + 0.001, float(number)) for number in range(1, 6))
    assert (times.usual_s, as_usual.usual_s) == (0.1, SLOWER * 0.1 + 0.001)
    assert times.recent_s == pytest.approx(as_usual.usual_s)


def test_the_first_runs_of_a_job_may_be_slower_than_usual() -> None:
    times = usual(0.16)
    for number in range(KNOWN_RUNS - USUAL_RUNS):
        assert not times.is_known and times.take(0.1 if number % 5 < 3 else 0.13, 1.0) < SLOW_RUNS
        assert times.usual_s == (0.16 if number < USUAL_RUNS - 1 else 0.1)
    assert times.is_known and not any(times.take(0.05, 2.0) for _ in range(20)) and times.usual_s == 0.1


def test_one_slow_run_among_quick_ones_says_nothing() -> None:
    times = usual(0.1)
    assert times.take(0.35, 2.0) and times.slow_span_s == (2.0, math.inf)
    assert not times.take(0.1, 2.1) and times.slow_span_s == (math.inf, math.inf)
