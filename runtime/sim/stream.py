"""A connection as two kernels keep it, in simulated time.

A `Stream` is two `Flow`s, one each way. A flow has a send buffer, segments on their way, and a receive buffer. Segments
are lost while the path is down; what is not acknowledged is sent again from the start (go-back-N) when the
retransmission timer fires, whose time doubles each time, as Linux does (RFC 6298). Acknowledgements are cumulative and
may be lost as well. The receive window is what the receiver's buffer has room for; a window that is closed is probed at
the same growing intervals. Data for a socket that was closed, and any segment for one that is gone, is answered with a
reset: nothing comes after that, and what had come can still be read.

What the model leaves out: congestion control, selective acknowledgements, and segments that arrive out of order. None
of them can change what an endpoint sees: bytes in order, late or never, and the counters of `KernelReport`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from optcc.runtime.protocol.liveness import KernelReport
from optcc.runtime.sim.clock import SimulatedClock, Timer
from optcc.runtime.sim.nic import SimulatedNic

RTO_S_MIN = 0.2
"""Linux's least retransmission timeout."""
RTO_S_MAX = 120.0
SYN_RTO_S = 1.0


def nothing() -> None:
    """Nobody is to be called."""


class Carrier(Protocol):
    """What carries segments and answers (`SimulatedNetwork`)."""

    clock: SimulatedClock
    segment_bytes: int

    def draw_buffer(self) -> int:
        """The size of a send or receive buffer."""
        ...

    def carry(self, flow: Flow, start: int, data: bytes, *, is_fin: bool = False) -> None:
        """A segment leaves, and arrives unless something befalls it."""
        ...

    def acknowledge(self, flow: Flow) -> None:
        """The receiver's kernel says what it has."""
        ...

    def round_trip_s(self, src: SimulatedNic, dst: SimulatedNic) -> float:
        """What a segment that takes no time to send, and its answer, take from one NIC to another."""
        ...

    def reset(self, flow: Flow) -> None:
        """The receiver of a flow finds its connection reset."""
        ...


class Flow:
    """One direction of a stream, from the NIC `src` to the NIC `dst`.

    `sent`, `arrived`, `acked` and `read` count bytes from the start: handed to the network, in the receiver's kernel,
    acknowledged to the sender's, taken by the receiver. `data` holds the bytes from `acked` on that were written.
    `fin`: the sender closes after what was written. `refuses`: the receiver has closed, and answers data with a reset;
    `is_gone`: its kernel has no such socket any more, and answers every segment with a reset, also a probe.
    `low_water`: how many bytes must have come before the receiver is called (SO_RCVLOWAT).
    `on_readable`, `on_reset` and `on_writable` are the drivers' (the receiver's, the receiver's, the sender's).
    `partner` is the other direction.
    """

    __slots__ = (
        *("_closed_s", "_closed_since_s", "_due_s", "_fin_sent", "_network", "_rto_s", "_timer", "_waits_for_window"),
        *("acked", "arrived", "busy_s", "busy_since_s"),
        *("data", "dst", "fin", "fin_arrived", "inbox", "is_dead", "is_gone", "low_water", "name", "on_readable"),
        "on_reset",
        "on_writable",
        *("partner", "probes", "read", "refuses", "room_bytes", "send_bytes", "sent", "src", "timeouts", "written"),
    )

    def __init__(
        self, network: Carrier, src: SimulatedNic, dst: SimulatedNic, name: str, send_bytes: int, room_bytes: int
    ) -> None:
        self._network, self.src, self.dst, self.name = network, src, dst, name
        self.send_bytes, self.room_bytes = send_bytes, room_bytes
        self.data: bytearray = bytearray()
        self.inbox: deque[bytes] = deque()
        self.written = self.sent = self.arrived = self.acked = self.read = self.timeouts = self.probes = 0
        self.fin = self._fin_sent = self.fin_arrived = self.is_dead = self.refuses = self.is_gone = (
            self._waits_for_window
        ) = False
        self.partner: Flow = self
        self.busy_s = self.busy_since_s = self._due_s = self._closed_s = 0.0
        self._closed_since_s = -1.0
        self._rto_s, self.low_water = RTO_S_MIN, 1
        self._timer: Timer | None = None
        self.on_readable: Callable[[], None] = nothing
        self.on_writable: Callable[[], None] = nothing
        self.on_reset: Callable[[], None] = nothing

    # --- the sender's kernel

    def write(self, views: Sequence[bytes | bytearray | memoryview]) -> int:
        """Takes what there is room for; how many bytes."""
        data = self.data
        n_before = len(data)
        for view in views:
            room = self.send_bytes - len(data)
            if room <= 0:
                break
            data += view if len(view) <= room else view[:room]
        n_bytes = len(data) - n_before
        if n_bytes and self.written == self.acked:
            self.busy_since_s = self._network.clock.now_s
        self.written += n_bytes
        self._push()
        return n_bytes

    def has_room(self) -> bool:
        """True if `write` would take something."""
        return self.written - self.acked < self.send_bytes

    def report(self) -> KernelReport:
        """The counters of the sender's kernel."""
        busy_s, now_s = self.busy_s, self._network.clock.now_s
        if self.written > self.acked:
            busy_s += now_s - self.busy_since_s
        open_s = busy_s - self._closed_s
        if self._closed_since_s >= 0:
            open_s -= now_s - self._closed_since_s
        round_trip_s = self._network.round_trip_s(self.src, self.dst)
        return KernelReport(
            timeouts=self.timeouts,
            in_flight_bytes=self.sent - self.acked,
            unsent_bytes=self.written - self.sent,
            segment_bytes=self._network.segment_bytes,
            window_bytes=max(0, self._window()),
            acked_bytes=self.acked,
            round_trip_s=round_trip_s,
            busy_s=busy_s,
            open_s=open_s,
            probes=self.probes,
            least_round_trip_s=round_trip_s,
        )

    def close(self) -> None:
        """No more is written; what was is still delivered, and then the end of the stream."""
        self.fin = True
        self._push()

    def kill(self) -> None:
        """Nothing of it is sent or delivered any more."""
        self.is_dead = True

    def _window(self) -> int:
        return self.room_bytes - (self.arrived - self.read)

    def _push(self) -> None:
        """Sends segments as far as the window goes."""
        if self.is_dead or self.partner.is_gone:
            return
        if self.sent < self.written:
            self._send()
        if self.fin and self.sent == self.written and not self._fin_sent:
            self._fin_sent = True
            self._network.carry(self, self.written, b"", is_fin=True)
        if not self._due_s and (self._waits_for_window or self._is_unanswered()):
            self._set_timer()

    def _send(self) -> None:
        """Sends segments of what was not sent yet."""
        network, written, acked, window_end = self._network, self.written, self.acked, self.read + self.room_bytes
        while (start := self.sent) < written:
            end = min(start + network.segment_bytes, written, window_end)
            if end <= start:
                self._waits_for_window = True
                if self._closed_since_s < 0 and 2 * (self.arrived - self.read) >= self.room_bytes:
                    # The reader holds it up, and not the bytes on their way, which the window has room for.
                    self._closed_since_s = network.clock.now_s
                break
            self.sent = end
            network.carry(self, start, bytes(memoryview(self.data)[start - acked : end - acked]))

    def _is_unanswered(self) -> bool:
        """True if something was sent, or is to be, that the receiver's kernel has not answered."""
        return self.written > self.acked or (self.fin and not self.fin_arrived)

    def _set_timer(self) -> None:
        """Sets the retransmission timer. An event that is planned for an earlier time looks again at this one."""
        self._due_s = self._network.clock.now_s + self._rto_s
        if self._timer is None:
            self._timer = self._network.clock.after(self._rto_s, self._timer_fires)

    def _timer_fires(self) -> None:
        """Nothing was acknowledged for the whole timeout: everything that is not acknowledged is sent again."""
        self._timer = None
        if self.is_dead or self.partner.is_gone or not self._due_s:
            return
        clock = self._network.clock
        if clock.now_s < self._due_s:
            self._timer = clock.after(self._due_s - clock.now_s, self._timer_fires)
            return
        self._due_s = 0.0
        if not self._is_unanswered():
            return
        if self.sent > self.acked:
            self.timeouts += 1
        self._rto_s = min(2 * self._rto_s, RTO_S_MAX)
        self.sent = self.acked
        self._fin_sent = self.fin_arrived
        self._set_timer()
        self._push()
        if self.sent == self.acked and self._waits_for_window:
            # A probe of the closed window: it carries nothing, and is acknowledged.
            self.probes += 1
            self._network.carry(self, self.sent, b"")

    def take_ack(self, acked: int) -> None:
        """An acknowledgement has come."""
        if self.is_dead:
            return
        if acked > self.acked:
            had_room = self.has_room()
            del self.data[: acked - self.acked]
            self.acked = acked
            if self.sent < acked:
                self.sent = acked
            self.timeouts, self._rto_s = 0, RTO_S_MIN
            self._due_s = 0.0
            if self.acked == self.written:
                self.busy_s += self._network.clock.now_s - self.busy_since_s
            if not had_room:
                self.on_writable()
        self._waits_for_window, self.probes = False, 0
        if self._closed_since_s >= 0:
            self._closed_s += self._network.clock.now_s - self._closed_since_s
            self._closed_since_s = -1.0
        # Nothing waits after most acknowledgements.
        if acked < self.written or self.fin:
            self._push()

    # --- the receiver's kernel

    def arrive(self, start: int, data: bytes, is_fin: bool) -> None:
        """A segment has come: taken if it is next, and acknowledged in any case."""
        if self.is_dead:
            return
        end = start + len(data)
        if self.is_gone or (self.refuses and end > self.arrived):
            # A reset that is lost comes again when the sender's kernel sends again.
            self.is_gone = True
            self._network.reset(self.partner)
            return
        if start <= self.arrived < end:
            fresh = data[self.arrived - start :] if start < self.arrived else data
            self.arrived = end
            self.inbox.append(fresh)
            self._network.acknowledge(self)
            if self.is_readable():
                self.on_readable()
        elif is_fin and start == self.arrived and not self.fin_arrived:
            self.fin_arrived = True
            self.on_readable()
        else:
            self._network.acknowledge(self)

    def available(self) -> int:
        """Bytes that can be read."""
        return self.arrived - self.read

    def is_readable(self) -> bool:
        """True if the receiver is to be called: enough has come, or there is no room for more, or no more will come."""
        n_bytes = self.arrived - self.read
        if not n_bytes:
            return False
        if n_bytes >= self.low_water or self.fin_arrived:
            return True
        return self.room_bytes - n_bytes < self._network.segment_bytes

    def take(self, into: Sequence[memoryview]) -> int:
        """Reads into some views; how many bytes."""
        inbox, n_bytes = self.inbox, 0
        for view in into:
            at, room = 0, len(view)
            while at < room and inbox:
                part = inbox[0]
                n_part = len(part)
                if n_part <= room - at:
                    view[at : at + n_part] = part
                    inbox.popleft()
                else:
                    n_part = room - at
                    view[at:] = part[:n_part]
                    inbox[0] = part[n_part:]
                at += n_part
            n_bytes += at
            if at < room:
                break
        self._note_read(n_bytes)
        return n_bytes

    def take_bytes(self, n_bytes_max: int) -> bytes:
        """Reads so many bytes at most."""
        n_bytes = self.arrived - self.read
        if n_bytes > n_bytes_max:
            data = bytearray(n_bytes_max)
            self.take([memoryview(data)])
            return bytes(data)
        received = b"".join(self.inbox)
        self.inbox.clear()
        self._note_read(n_bytes)
        return received

    def _note_read(self, n_bytes: int) -> None:
        """The reader has taken so many bytes."""
        was_full = self._window() < self._network.segment_bytes
        self.read += n_bytes
        if was_full and n_bytes:
            # The window is open again: the sender is told.
            self._network.acknowledge(self)


class Stream:
    """A connection between two hosts: `flows[0]` from the end that opened it, `flows[1]` back."""

    __slots__ = ("flows",)

    def __init__(self, network: Carrier, caller: SimulatedNic, listener: SimulatedNic, name: str) -> None:
        draw = network.draw_buffer
        self.flows = (
            Flow(network, caller, listener, f"{name}>", draw(), draw()),
            Flow(network, listener, caller, f"{name}<", draw(), draw()),
        )
        self.flows[0].partner, self.flows[1].partner = self.flows[1], self.flows[0]

    def kill(self) -> None:
        """Both directions are dead."""
        for flow in self.flows:
            flow.kill()
