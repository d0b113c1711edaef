"""When bytes that are queued now arrive, where the rails of a pair differ in latency. No I/O, no clock.

A striping divides a message in proportion to rates, which is right for rails of equal latency: the last bytes arrive
together. With rails of 1 ms and 50 ms a message of 64 KiB would wait for the slow one. So while the least round trips
of a pair's connections differ by more than twice `UNEVEN_S`, the sender gives each chunk to the rail over which it
arrives first, and the receiver reports over the nearest one.

What is known of a rail is its kernel's (`KernelReport`, read when a connection is opened and at ticks): half of the
least round trip is its latency; what the kernel holds unsent, or has on its way beyond what fills the path, is its
queue, as is what waits for the socket. In between, a queue grows by what is given to the rail and drains at its rate. A
connection that is in slow start, or whose window is small, takes more round trips than its rate says: it sends a window
in the first, twice as much in the next, and so on.

The cut of messages is not changed, since both ends must cut alike: a message arrives within the time of about one chunk
of the best split, which for rates r, latencies l and n bytes is x over the near rail with x / r0 + l0 =
(n - x) / r1 + l1, and everything over the near one if that asks for x > n.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from optcc.runtime.protocol.connection import SendConnection
from optcc.runtime.protocol.liveness import Connection, KernelReport

UNEVEN_S = 0.002
"""One-way latencies that differ by less count as equal."""


def one_way_s(connection: Connection) -> float | None:
    """The latency of a path, by the least round trip; None before that was measured."""
    report = connection.kernel
    return report.least_round_trip_s / 2 if report is not None and report.least_round_trip_s > 0 else None


def is_uneven(connections: Iterable[Connection]) -> bool:
    """True if the latencies of the connections that are measured differ by more than `UNEVEN_S`."""
    known = [each for each in map(one_way_s, connections) if each is not None]
    return len(known) > 1 and max(known) - min(known) > UNEVEN_S


class _RailQueue:
    """A rail: its latency, its rate in bytes/s, what its window holds (0: no limit), and when its queue is empty."""

    __slots__ = ("empty_s", "latency_s", "rate", "report", "sampled_s", "shown", "window_bytes")

    def __init__(self) -> None:
        self.latency_s, self.rate, self.empty_s = 0.0, math.inf, 0.0
        self.window_bytes = 0
        # The last sample that was taken, and when; what it carried between two samples with unsent bytes.
        self.report: KernelReport | None = None
        self.sampled_s = self.shown = 0.0

    def arrival_s(self, n_bytes: int, now_s: float) -> float:
        """When so many bytes would be there."""
        wait_s = max(0.0, self.empty_s - now_s)
        drain_s = wait_s + n_bytes / self.rate
        rounds = 0.0
        if self.window_bytes:
            queued = wait_s * self.rate if wait_s else 0.0
            rounds = max(0.0, math.log2(1 + (queued + n_bytes) / self.window_bytes) - 1)
        return now_s + self.latency_s + max(drain_s, rounds * 2 * self.latency_s)

    def add(self, n_bytes: int, now_s: float) -> None:
        """So many bytes are queued, or less than none: they are taken back."""
        self.empty_s = max(now_s, max(now_s, self.empty_s) + n_bytes / self.rate)

    def take(self, report: KernelReport, now_s: float) -> None:
        """A fresh sample."""
        before, self.report = self.report, report
        if before is not None and before.unsent_bytes and report.unsent_bytes and now_s > self.sampled_s:
            carried = report.acked_bytes - before.acked_bytes
            if carried > 0:
                self.shown = carried / (now_s - self.sampled_s)
        self.sampled_s = now_s
        self.latency_s = report.least_round_trip_s / 2
        windows = (report.window_bytes, report.congestion_bytes)
        self.window_bytes = min((each for each in windows if each), default=0)

    def count_queue(self, connection: SendConnection, now_s: float) -> None:
        """What waits by the last sample, in place of what was counted."""
        report = self.report
        assert report is not None
        if report.unsent_bytes:
            # A window holds it up: no more than what is on its way goes in a round trip.
            on_its_way = max(report.in_flight_bytes, report.segment_bytes)
            self.rate = max(1.0, min(self.rate, on_its_way / report.least_round_trip_s))
        in_queue = max(0.0, report.in_flight_bytes - self.rate * report.least_round_trip_s)
        waiting = connection.waiting() + report.unsent_bytes + in_queue
        self.empty_s = now_s + waiting / self.rate


class Arrivals:
    """When bytes arrive over each of `n_rails` rails of a pair, while these are uneven."""

    def __init__(self, n_rails: int) -> None:
        self._rails = [_RailQueue() for _ in range(n_rails)]

    def take(
        self, connections: Sequence[SendConnection | None], rates: Sequence[float], now_s: float, *, is_known: bool
    ) -> None:
        """The connections, by rail, with their last samples; the rates of the rails in bytes/s, or, unless that
        `is_known`, their proportions: then what a rail has carried while it had unsent bytes says how fast all are."""
        fresh: list[tuple[_RailQueue, SendConnection]] = []
        for rail, connection in zip(self._rails, connections, strict=False):
            report = None if connection is None else connection.kernel
            if (
                connection is not None
                and report is not None
                and report.least_round_trip_s
                and report is not rail.report
            ):
                rail.take(report, now_s)
                fresh.append((rail, connection))
        unit = 1.0
        if not is_known:
            unit = max(rail.shown / rate for rail, rate in zip(self._rails, rates, strict=False))
        for rail, rate in zip(self._rails, rates, strict=False):
            rail.rate = rate * unit if unit else math.inf
        for rail, connection in fresh:
            rail.count_queue(connection, now_s)

    def choose(self, rails: Sequence[int], n_bytes: int, now_s: float) -> int:
        """Over which of these rails so many bytes arrive first."""
        return min(rails, key=lambda rail: self._rails[rail].arrival_s(n_bytes, now_s))

    def add(self, rail: int, n_bytes: int, now_s: float) -> None:
        """So many bytes wait on a rail now, or, if less than 0, do so no longer."""
        if rail < len(self._rails):
            # Else it is the path through other ranks.
            self._rails[rail].add(n_bytes, now_s)
