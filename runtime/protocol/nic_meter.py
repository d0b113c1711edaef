"""How fast the NICs of a rank send, estimated from the traffic that flows anyway. No I/O, no clock.

A `NicMeter` judges one NIC from windows of samples: whether the NIC was backlogged at each sample, and what the kernel
says that it carried in which time. The kernel counts the time in which bytes were on their way, so a window may be of
any length, however seldom the process looks. A window of a NIC that was backlogged, with open receive windows, bounds
its rate from above; any traffic bounds it from below. Neither is a rate by itself: a NIC may wait for a host that is
busy elsewhere, or for a path that has failed. So a NIC counts as slower than declared only if several full windows say
so, and only relative to the other NICs of its host, which wait for the same host: windows count in which another NIC
was idle meanwhile.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from optcc.runtime.protocol.settings import RATE_MIN

LOOKS_MIN = 3
"""A window has so many looks at least, and takes so long at least."""
WINDOW_S = 0.06
LOADED_BYTES = 1 << 15
"""So much must be on its way for a NIC to count as loaded."""
_LOADED_SHARE, _ALONE_SHARE = 0.75, 0.25
_BUSY_SHARE, _OPEN_SHARE = 0.5, 0.9
"""Of a full window, so much is busy at least, and so much of that with open receive windows."""
_AT_LEAST_BYTES, _AT_LEAST_S = 1 << 21, 0.06
_SAMPLES = 4
_SLOW, _FAST = 0.7, 0.75
"""Below the first share of what it should send a NIC is slow, above the second no longer."""
_SHOWN = 1.2
"""What was measured is too little if a NIC shows so many times that; traffic alone, of short runs over a queue that was
empty, is off by a sixth."""
CHANGE = 1.6
"""Once it is known to be slow, only a difference by such a factor is news."""


class Carried(NamedTuple):
    """What went over a NIC in a window: all bytes; those that nothing beyond the NIC is known to hold up, for how long
    some of them were on their way, and for how much of that the receivers had room, summed over the connections; and
    the longest of these times of one connection."""

    n_bytes: int = 0
    own_bytes: int = 0
    busy_s: float = 0.0
    open_s: float = 0.0
    longest_s: float = 0.0


class NicMeter:
    """What one NIC sends, bytes/s.

    >>> meter = NicMeter()
    >>> for _ in range(5):
    ...     for _ in range(3):
    ...         meter.look(True)
    ...     meter.close(Carried(500_000, 500_000, 0.0625, 0.0625, 0.0625), 0.0625)
    >>> meter.at_most, meter.at_least
    (8000000.0, 8000000.0)
    """

    __slots__ = ("_alone", "_busy_s", "_full", "_least", "_loaded", "_looks", "_own_bytes")

    def __init__(self) -> None:
        self._full: deque[float] = deque(maxlen=_SAMPLES)
        self._least: deque[float] = deque(maxlen=_SAMPLES)
        self._own_bytes, self._busy_s = 0, 0.0
        self._looks = self._loaded = self._alone = 0

    def look(self, is_loaded: bool, is_alone: bool = True) -> None:
        """Was something on its way over the NIC that nothing beyond it is known to hold up, and nothing over another
        one of the host?"""
        self._looks += 1
        self._loaded += is_loaded
        self._alone += is_alone

    @property
    def n_looks(self) -> int:
        """How often it was looked at in this window."""
        return self._looks

    def drop(self) -> None:
        """This window says nothing: a connection may have failed."""
        self._looks = self._loaded = self._alone = 0

    def close(self, carried: Carried, took_s: float) -> None:
        """The end of a window that took so long."""
        is_full = self._looks >= LOOKS_MIN and self._loaded >= _LOADED_SHARE * self._looks
        is_full &= self._alone >= _ALONE_SHARE * self._looks
        is_full &= carried.longest_s >= _BUSY_SHARE * took_s and carried.open_s >= _OPEN_SHARE * carried.busy_s
        self.drop()
        if not carried.n_bytes:
            return
        if is_full:
            # Not shorter than the NIC was busy: that other connections were busy at other times makes it faster.
            self._full.append(carried.n_bytes / min(took_s, carried.longest_s))
        self._own_bytes += carried.own_bytes
        self._busy_s += min(carried.busy_s, took_s)
        if self._own_bytes >= _AT_LEAST_BYTES and self._busy_s >= _AT_LEAST_S:
            self._least.append(self._own_bytes / self._busy_s)
            self._own_bytes, self._busy_s = 0, 0.0
            if self._full and self.lately > CHANGE * max(self._full):
                # It was slow, and is no longer.
                self._full.clear()

    @property
    def at_most(self) -> float | None:
        """What it sent at most in the last full windows; None before there are enough of them."""
        return max(self._full) if len(self._full) == _SAMPLES else None

    @property
    def at_least(self) -> float | None:
        """What it has shown that it can send; None before it has."""
        return statistics.median(self._least) if self._least else None

    @property
    def lately(self) -> float:
        """What it has shown twice in a row just now; 0 before it has."""
        return min(list(self._least)[-2:]) if len(self._least) > 1 else 0.0


def weigh(
    meters: Sequence[NicMeter], declared: Sequence[int], known: Sequence[float], measured: Sequence[bool] = ()
) -> list[float]:
    """For each NIC of a host the share of its declared rate that it has; `known` is what was found before.

    The measure is the NIC that comes closest to what is declared; what differs little from `known` stays as it is. A
    NIC of which `known` was `measured` is as fast only as it has shown: the others may have little to send.

    >>> def meter_of(n_bytes: int) -> NicMeter:
    ...     meter = NicMeter()
    ...     for _ in range(16):
    ...         for _ in range(3):
    ...             meter.look(True)
    ...         meter.close(Carried(n_bytes, n_bytes, 0.0625, 0.0625, 0.0625), 0.0625)
    ...     return meter
    >>> weigh([meter_of(10**6), meter_of(10**6 // 4)], [1, 1], [1.0, 1.0])
    [1.0, 0.25]
    >>> weigh([meter_of(10**6), meter_of(10**6 // 4)], [4, 1], [1.0, 1.0])
    [1.0, 1.0]
    >>> idle, half = meter_of(4 * 10**5), meter_of(5 * 10**5)
    >>> full = [16 * 10**6] * 2
    >>> weigh([idle, half], full, [1.0, 0.5]), weigh([idle, half], full, [1.0, 0.5], [True, True])
    ([1.0, 1.0], [1.0, 0.5])
    >>> weigh([idle, half], full, [0.86, 1.0]), weigh([idle, half], full, [0.86, 1.0], [True, True])
    ([1.0, 1.0], [0.86, 1.0])
    """
    able = [meter.at_least or 0.0 for meter in meters]
    best = max(each / rate for each, rate in zip(able, declared, strict=True))
    if min(declared) >= RATE_MIN:
        # A queue that was empty lets more through for a moment than a NIC can send.
        best = min(1.0, best)
    if not best:
        return list(known)
    given = zip(meters, declared, known, measured or [False] * len(meters), strict=True)
    return [_share(*each, best) for each in given]


def _share(meter: NicMeter, declared: int, known: float, is_measured: bool, best: float) -> float:
    at_most, share = meter.at_most, known
    proof = 1.0 if is_measured else best
    if at_most is not None and at_most / declared < _SLOW * best:
        share = at_most / declared / best
    elif known < 1:
        share = max(known, meter.lately / declared / proof)
    if share >= _FAST:
        # A rate that was measured is known better than from the traffic, unless that shows much more.
        return known if is_measured and share < _SHOWN * known else 1.0
    return known if known / CHANGE < share < known * CHANGE else share
