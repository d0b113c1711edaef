"""When a connection is suspected, and when it is given up as silent. No I/O, no clock.

The driver samples the kernel's counters of a connection (`KernelReport`: TCP_INFO on Linux, or what a simulated network
says) while bytes on it are not acknowledged. TCP acknowledgements come from the peer's kernel, so a peer that computes
is not silent, and neither is one whose receive window is full. Three thresholds on the time for which bytes were on
their way and none was acknowledged:

    half of `limit_s`, or longer where a queue may be in the way     the connection is *suspect*: new data avoids it
    `limit_s`, or longer where the queue or recent gaps are longer   it is *silent*: closed, its data sent elsewhere
    the kernel's retransmission timer has fired                      no allowance for queues and gaps
"""

from __future__ import annotations

from typing import Any, NamedTuple

WATCH_S = 0.02
CLOSE_WATCH_S = 0.01
"""Sampling interval while bytes are unacknowledged; and while none of them was acknowledged since the last sample."""
_GAPS = 1.5
"""A connection is silent only after so many times its longest recent gap between acknowledgements."""
_GAP_MEMORY_S = 10.0
_ROUND_TRIPS = 2
"""A queue may double in a round trip."""
_FIRST_S = 0.01


class KernelReport(NamedTuple):
    """The kernel's counters of a connection.

    `timeouts` retransmission timeouts since the last acknowledgement; `in_flight_bytes` sent and not acknowledged;
    `unsent_bytes` not sent yet; `segment_bytes`; `window_bytes` that the receiver takes; `acked_bytes` in all; the
    smoothed round trip with four times its variation; time with bytes in flight or to send in all, and the part of it
    in which neither the receiver's window nor the send buffer held them up (both 0 if the kernel does not say);
    `probes` of a closed window that were not answered; the least round trip that it has measured, without any queue on
    the path, and how many bytes its congestion window lets be on their way (0 if the kernel does not say).
    """

    timeouts: int
    in_flight_bytes: int
    unsent_bytes: int
    segment_bytes: int
    window_bytes: int
    acked_bytes: int
    round_trip_s: float
    busy_s: float = 0.0
    open_s: float = 0.0
    probes: int = 0
    least_round_trip_s: float = 0.0
    congestion_bytes: int = 0


class Connection:
    """A connection of this rank, as the protocol sees it: for how long the other kernel has been silent.

    `wire` belongs to the driver. `kernel` is the driver's last sample, None if there is none. `awaits`: bytes may be
    unacknowledged. At the last sample none of them was acknowledged if it `stalls`, some if it `answers`; it is
    `suspect` after half of the time after which it is silent, and no sooner than after `queue_s`, the drain time of a
    full queue on the path. `waiting_bytes` were unacknowledged or unsent then. It `fills_path` if more than one segment
    was in flight: a single one may be acknowledged 40 ms late, which says nothing of the path. `doubt` has a bit for
    each end that suspects the connection, and one for a NIC that is out of use; while it is `is_avoided`, no new data
    goes there. `is_closed`: it was given up. `n_padded` bytes of padding have come. The driver reads it while it
    `wants_read`.
    """

    __slots__ = (
        *("_acked_bytes", "_carried", "_gap_s", "_is_waiting", "_silent_s", "_taken", "answers", "awaits"),
        *("doubt", "doubts_heard", "doubts_said", "fills_path", "is_avoided", "is_closed", "kernel", "n_padded"),
        *("queue_s", "round_trip_s"),
        *("stalls", "suspect", "waiting_bytes", "wants_read", "wire"),
    )

    def __init__(self) -> None:
        self.wire: Any = None
        self.kernel: KernelReport | None = None
        self._acked_bytes = -1
        self._silent_s = self._gap_s = self.round_trip_s = self.queue_s = 0.0
        self.waiting_bytes = self.n_padded = 0
        # Bytes acknowledged, busy and open time: at the last sample, and when `take_carried` was last called.
        self._carried: tuple[int, float, float] = (0, 0.0, 0.0)
        self._taken = self._carried
        self.awaits, self.answers, self.stalls, self.suspect, self._is_waiting = True, False, False, False, False
        self.doubt = self.doubts_said = self.doubts_heard = 0
        self.is_avoided = self.is_closed = self.fills_path = False
        self.wants_read = True

    def is_silent(self, elapsed_s: float, limit_s: float, round_trip_s: float = 0.0) -> bool:
        """True if bytes have been on their way for too long and none of them was acknowledged.

        Judges `kernel`, `elapsed_s` after the one before. Too long is `limit_s`; more if this connection has lately had
        longer gaps between acknowledgements, or if a round trip takes long, here or over this NIC (`round_trip_s`); not
        more once the kernel's retransmission timer has fired. Unsent bytes for which there is a window count as on
        their way: over an interface that is down the kernel cannot send them. So does a probe of a closed window that
        was not answered: the kernel of a peer that computes answers it.
        """
        report = self.kernel
        if report is None:
            return False
        acked_bytes, window, unsent = report.acked_bytes, report.window_bytes, report.unsent_bytes
        in_flight, segment = report.in_flight_bytes, report.segment_bytes
        self._carried = (acked_bytes, report.busy_s, report.open_s)
        self.waiting_bytes = in_flight + unsent
        self.round_trip_s = report.round_trip_s
        self.fills_path = in_flight > segment
        if self._gap_s:
            self._gap_s *= max(0.0, 1 - elapsed_s / _GAP_MEMORY_S)
        self.awaits = bool(in_flight or unsent)
        was_waiting = self._is_waiting
        has_window = unsent <= window or segment <= window
        self._is_waiting = bool(in_flight or report.probes or (unsent and has_window))
        if not self._is_waiting or acked_bytes != self._acked_bytes:
            if self._silent_s and acked_bytes != self._acked_bytes:
                self._gap_s = max(self._gap_s, self._silent_s + elapsed_s)
            self.answers = acked_bytes != self._acked_bytes
            self._acked_bytes, self._silent_s, self.stalls, self.suspect = acked_bytes, 0.0, False, False
            return False
        # Bytes that were not on their way at the last sample have not been unanswered since then.
        self._silent_s += elapsed_s if was_waiting else min(elapsed_s, _FIRST_S)
        self.stalls, self.answers = True, False
        suspect_s = limit_s / 2
        if not report.timeouts:
            path_s = max(self.round_trip_s, round_trip_s)
            limit_s = max(limit_s, _GAPS * self._gap_s, _ROUND_TRIPS * path_s)
            # The first sample may count for `_FIRST_S` too much, and the next one comes so much later.
            suspect_s = max(suspect_s, self._gap_s, path_s, self.queue_s, report.least_round_trip_s + 2 * _FIRST_S)
        # Suspicion ends with an acknowledgement only, not when the measured round trip grows meanwhile.
        self.suspect |= self._silent_s >= suspect_s
        return self._silent_s >= limit_s

    def carried_in_all(self) -> tuple[int, float, float]:
        """By the last sample: bytes acknowledged, busy seconds, and those in which only the network limited it."""
        return self._carried

    def take_carried(self) -> tuple[int, float, float]:
        """Since the last call, by the last sample: bytes acknowledged, busy seconds, and those with an open window."""
        (n_bytes, busy_s, open_s), before = self._carried, self._taken
        self._taken = self._carried
        return n_bytes - before[0], busy_s - before[1], open_s - before[2]
