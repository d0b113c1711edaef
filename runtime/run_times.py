"""How long the runs of a plan take, and which of them are slow. No I/O, no clock."""

from __future__ import annotations

import math
from statistics import median

from optcc.runtime.protocol.epochs import SLOW_RUNS

USUAL_RUNS, SLOWER = 5, 1.15
MUCH_SLOWER, LONG_S = 1.4, 0.2
"""See `RunTimes.take`."""


class RunTimes:
    """How long the runs of a plan take, seconds.

    >>> times = RunTimes()
    >>> [times.take(each) for each in (0.2, 0.1, 0.11, 0.1, 0.1, 0.12, 0.1, 0.12, 0.12, 0.12, 0.2)]
    [0, 0, 0, 0, 0, 1, 0, 1, 2, 3, 4]
    >>> [times.take(each) for each in (0.1, 0.15, 0.15, 0.1, 0.3)]
    [0, 1, 3, 0, 3]
    """

    __slots__ = ("_first", "_n_slow", "_slow_s", "_usual_s", "n_in_a_row", "slow_since_s")

    def __init__(self) -> None:
        # When the first of the last slow ones was over; how many there were.
        self.slow_since_s, self.n_in_a_row = math.inf, 0
        self._first: list[float] = []
        self._usual_s, self._slow_s, self._n_slow = 0.0, 0.0, 0

    def take(self, seconds: float, now_s: float = 0.0) -> int:
        """Takes one more; how many of the last ones, without a break, took longer than `SLOWER` times the usual.

        Usual is the median of the first ones, without the very first, which find neither memory nor connections warm.
        Some without a break that take `MUCH_SLOWER` times that, and `LONG_S` together, count as `SLOW_RUNS` or more.
        """
        if len(self._first) < USUAL_RUNS:
            self._first.append(seconds)
            self._usual_s = median(self._first[1:] or [seconds])
        else:
            self._n_slow = self._n_slow + 1 if seconds > SLOWER * self._usual_s else 0
            self._slow_s = self._slow_s + seconds if seconds > MUCH_SLOWER * self._usual_s else 0.0
            if self._slow_s >= LONG_S:
                self._n_slow = max(self._n_slow, SLOW_RUNS)
        self.slow_since_s = min(self.slow_since_s, now_s) if self._n_slow else math.inf
        self.n_in_a_row = self.n_in_a_row + 1 if self._n_slow else 0
        return self._n_slow

    @property
    def overdue_s(self) -> float:
        """After so long one that is not over makes the last ones count as `SLOW_RUNS`, if the one before was slow."""
        return max(MUCH_SLOWER * self._usual_s, LONG_S - self._slow_s)
