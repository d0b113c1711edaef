"""How long the runs of a plan take, and which of them are slow. No I/O, no clock."""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, median

from optcc.runtime.protocol.epochs import SLOW_RUNS

USUAL_RUNS, KNOWN_RUNS, SLOWER = 5, 15, 1.15
MUCH_SLOWER, LONG_S = 1.4, 0.2
ALLOWED, LOST_S = 1.1, 0.2
"""See `RunTimes.take`."""
RECENT_RUNS, SPAN_RUNS = 16, 5
"""So many runs are looked back on; for their traffic, of which not more is known."""


class RunTimes:
    """How long the runs of a plan take, seconds; about `expected_s` or less, by what others took.

    >>> times = RunTimes()
    >>> [times.take(each) for each in (0.2, 0.1, 0.11, 0.1, 0.1, 0.12, 0.1, 0.12, 0.12, 0.12, 0.2)]
    [0, 0, 0, 0, 0, 1, 0, 1, 2, 3, 4]
    >>> [times.take(each) for each in (0.1, 0.15, 0.15, 0.1, 0.3)]
    [0, 1, 3, 0, 3]
    """

    __slots__ = (
        *("_first", "_lost_s", "_n_slow", "_recent", "_slow_s", "_usual_s"),
        *("expected_s", "n_in_a_row", "slow_since_s"),
    )

    def __init__(self, expected_s: float = math.inf) -> None:
        self.expected_s = expected_s
        # How many of the last ones were slow; when the first of them was over.
        self.n_in_a_row, self.slow_since_s = 0, math.inf
        self._first: list[float] = []
        self._usual_s, self._slow_s, self._n_slow = 0.0, 0.0, 0
        # What runs took beyond `ALLOWED` times the usual, less what others took less.
        self._lost_s = 0.0
        # How long the last ones took, and when they were over.
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_RUNS)

    def take(self, seconds: float, now_s: float = 0.0) -> int:
        """Takes one more; how many of the last ones, without a break, took longer than `SLOWER` times the usual.

        Usual is the median of the first five, without the very first, which find neither memory nor connections warm;
        or of the next five, or of five more, or what is expected, if that is less. Some without a break that take
        `MUCH_SLOWER` times that, and `LONG_S` together, count as `SLOW_RUNS` or more. So do any that lose `LOST_S`
        against `ALLOWED` times the usual, and as much as that many at `MUCH_SLOWER` times the usual.
        """
        is_first = len(self._first) < USUAL_RUNS
        if self._first:
            self._recent.append((seconds, now_s))
        if not self.is_known:
            self._first.append(seconds)
            count = len(self._first)
            if is_first:
                self._usual_s = min(median(self._first[1:] or [seconds]), self.expected_s)
            elif count % USUAL_RUNS == 0:
                self._usual_s = min(median(self._first[-USUAL_RUNS:]), self._usual_s)
        if not is_first or (self.expected_s < math.inf and len(self._first) > 1):
            self._judge(seconds)
        self.n_in_a_row = self.n_in_a_row + 1 if self._n_slow else 0
        self.slow_since_s = min(self.slow_since_s, now_s) if self._n_slow else math.inf
        return max(self._n_slow, SLOW_RUNS if self.is_drifting else 0)

    def _judge(self, seconds: float) -> None:
        is_slow = seconds > SLOWER * self._usual_s
        self._n_slow = self._n_slow + 1 if is_slow else 0
        self._slow_s = self._slow_s + seconds if seconds > MUCH_SLOWER * self._usual_s else 0.0
        if self._slow_s >= LONG_S:
            self._n_slow = max(self._n_slow, SLOW_RUNS)
        # One that takes very long has waited for something else.
        self._lost_s = max(0.0, self._lost_s + min(seconds, MUCH_SLOWER * self._usual_s) - ALLOWED * self._usual_s)

    @property
    def is_drifting(self) -> bool:
        return self._lost_s >= max(LOST_S, SLOW_RUNS * (MUCH_SLOWER - ALLOWED) * self._usual_s)

    @property
    def slow_span_s(self) -> tuple[float, float]:
        """When the first of the last slow ones was over, and infinity; where slow ones are no exception, but others are
        quicker, the beginning and end of the slowest of the last ones."""
        if self.is_drifting and self.slowest_span_s[0] < math.inf:
            return self.slowest_span_s
        return self.slow_since_s, math.inf

    @property
    def slowest_span_s(self) -> tuple[float, float]:
        """The beginning and end of the slowest of the last ones; infinite if all were as quick, or as slow."""
        last = list(self._recent)[-SPAN_RUNS:]
        seconds, end_s = max(last, default=(0.0, 0.0))
        is_slow = seconds > SLOWER * max(min(last, default=(0.0, 0.0))[0], self._usual_s)
        return (end_s - seconds, end_s) if is_slow else (math.inf, math.inf)

    @property
    def is_known(self) -> bool:
        """Whether it is known what is usual."""
        return len(self._first) == KNOWN_RUNS

    @property
    def usual_s(self) -> float:
        """What runs usually take."""
        return self._usual_s

    @property
    def recent_s(self) -> float:
        """What the last ones took, the mean; 0 if there were none."""
        return fmean(seconds for seconds, _ in self._recent) if self._recent else 0.0

    @property
    def pace(self) -> float:
        """The usual time over that of the last ones that were slow; 1 if none were."""
        slow = [seconds for seconds, _ in self._recent if seconds > SLOWER * self._usual_s]
        return self._usual_s / fmean(slow) if slow else 1.0

    @property
    def overdue_s(self) -> float:
        """After so long one that is not over makes the last ones count as `SLOW_RUNS`, if the one before was slow."""
        return max(MUCH_SLOWER * self._usual_s, LONG_S - self._slow_s)
