"""Runs that take longer than usual: how many, since when, and after how long one that goes on is."""

from __future__ import annotations

import math

from optcc.runtime.protocol.epochs import SLOW_RUNS
from optcc.runtime.run_times import LONG_S, MUCH_SLOWER, USUAL_RUNS, RunTimes


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
