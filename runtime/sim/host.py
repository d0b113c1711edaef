"""The driver of one rank in simulated time: the `Endpoint` that TCP runs, on simulated connections.

It does what `optcc.runtime.transports.tcp` does around the same object, with `SimulatedNetwork` in place of the kernel.
A host that is *busy* computes: its kernel goes on, and its process does not look. A *stopped* one has been killed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

from optcc.runtime.protocol.connection import RecvConnection, SendConnection
from optcc.runtime.protocol.endpoint import Endpoint
from optcc.runtime.protocol.frames import Checksum
from optcc.runtime.protocol.handshake import Accepting, Dialing
from optcc.runtime.protocol.leg import Leg
from optcc.runtime.protocol.liveness import WATCH_S, Connection, KernelReport
from optcc.runtime.protocol.local import Established
from optcc.runtime.protocol.settings import NicEntry, Settings
from optcc.runtime.sim.clock import Timer
from optcc.runtime.sim.network import End, SimulatedNetwork

_CONTROL_BYTES = 1 << 14
_SYN_SENT = KernelReport(0, 1, 0, 1, 0, 0, 0.0)
"""What TCP_INFO says of a connection that is being opened: the SYN is in flight and counts as one segment."""


class SimulatedHost:
    """Rank `rank` of a network; `wakes` is called whenever it has looked and something may have happened, `ticked`
    after a tick of the endpoint if something was read or written since the last one, `stopped` when it is.

    It looks at its connections once in `turn_s` at most: so long does a turn of its loop take.
    """

    def __init__(
        self,
        network: SimulatedNetwork,
        settings: Settings,
        rank: int,
        book: Sequence[Sequence[NicEntry]],
        *,
        secret: bytes,
        job: bytes,
        rng: random.Random,
        checksum: Checksum | None = None,
        turn_s: float = 0.0,
        insides: Sequence[NicEntry] = (),
    ) -> None:
        self.network, self.rank, self._turn_s = network, rank, turn_s
        self.endpoint = Endpoint(
            *(settings, rank, book),
            job=job,
            secret=secret,
            draw=rng.randbytes,
            checksum=checksum,
            now_s=self.now_s,
            insides=insides,
        )
        self.wakes: Callable[[], None] = lambda: None
        self.ticked: Callable[[], None] = lambda: None
        self.stopped: Callable[[], None] = lambda: None
        self._has_acted = False
        self.is_stopped = self.is_killed = False
        self.busy_to_s = 0.0
        self._ready: dict[Connection, None] = {}
        self._reset: set[Connection] = set()
        self._dials: dict[Dialing, Callable[[], None]] = {}
        self._look: Timer | None = None
        self._alarm: Timer | None = None
        self._wake_s = self.turned_s = 0.0
        self._pending_nics: list[tuple[int, bool]] = []
        self._pending_moves: list[tuple[int, tuple[str, int]]] = []
        network.accept[rank] = self._accept
        network.told[rank] = self._hear_of_nic
        network.told_address[rank] = self._hear_of_address
        self.look_at(0.0)

    @property
    def now_s(self) -> float:
        """The simulated time."""
        return self.network.clock.now_s

    # --- the loop

    def look_at(self, at_s: float) -> None:
        """The process looks at its connections at this time, or as soon as it is not busy."""
        look = self._look
        if look is not None and look.at_s <= at_s:
            return
        clock = self.network.clock
        at_s = max(at_s, clock.now_s, self.busy_to_s, self.turned_s + self._turn_s)
        if look is not None:
            if at_s >= look.at_s:
                return
            look.cancel()
        self._look = clock.after(at_s - clock.now_s, self._turn)

    def _wake_at(self, at_s: float) -> None:
        """The process looks at this time, and not at the one that was asked for before.

        An event that is planned for an earlier time looks again at this one.
        """
        self._wake_s = at_s
        clock = self.network.clock
        if self._alarm is None or at_s < self._alarm.at_s:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = clock.after(max(0.0, at_s - clock.now_s), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        if self.is_stopped:
            return
        if self.network.clock.now_s < self._wake_s:
            self._wake_at(self._wake_s)
        else:
            self.look_at(self._wake_s)

    def compute(self, seconds: float) -> None:
        """The process does not look for some time."""
        self.busy_to_s = max(self.busy_to_s, self.now_s + seconds)
        if self._look is not None:
            self._look.cancel()
            self._look = None
        self.look_at(self.busy_to_s)

    def _turn(self) -> None:
        """Reads, writes, and does what the time asks for; then the program."""
        self._look = None
        now_s = self.network.clock.now_s
        if self.is_stopped:
            return
        if now_s < self.busy_to_s:
            self.look_at(self.busy_to_s)
            return
        self.turned_s = now_s
        endpoint = self.endpoint
        endpoint.now_s = now_s
        if self._ready:
            ready, self._ready = self._ready, {}
            self._has_acted = True
            for connection in ready:
                self._attend(connection)
        # What had come over a NIC is read before its connections are given up.
        if self._pending_nics:
            for nic, is_up in self._pending_nics:
                endpoint.nic_changed(nic, is_up)
            self._pending_nics.clear()
        if self._pending_moves:
            for nic, address in self._pending_moves:
                endpoint.nic_moved(nic, *address)
            self._pending_moves.clear()
        self.flush()
        if now_s >= endpoint.next_tick_s:
            for connection in endpoint.watched():
                end: End | None = connection.wire
                connection.kernel = end.outgoing.report() if end is not None else _SYN_SENT
            endpoint.tick()
            self.flush()
            endpoint.ticked(0.0)
            if self._has_acted:
                self._has_acted = False
                self.ticked()
        self.wakes()
        if not self.is_stopped:
            reports = endpoint.reports
            waits = bool(reports.deferred)
            reports.release_late(now_s)
            if waits:
                self.flush()
            tick_s, hold_s = endpoint.next_tick_s, reports.hold_to_s
            self._wake_at(tick_s if tick_s < hold_s else hold_s)

    def flush(self) -> None:
        """Writes what waits, and carries out what the protocol asks for."""
        endpoint = self.endpoint
        endpoint.now_s = self.network.clock.now_s
        if endpoint.to_send or endpoint.to_report:
            endpoint.look_within(WATCH_S)
            while (connection := endpoint.next_to_write()) is not None:
                self.write(connection)
        while endpoint.to_close or endpoint.to_dial or endpoint.to_resume:
            while endpoint.to_resume:
                self._mark(endpoint.to_resume.pop())
            while endpoint.to_close:
                self._close(endpoint.to_close.pop())
            while endpoint.to_dial:
                self._dial(endpoint.to_dial.pop())
        endpoint.to_limit.clear()

    def write(self, connection: Established | Leg) -> None:
        """Writes what the kernel takes."""
        self._has_acted = True
        end: End = connection.wire
        if connection in self._reset:
            # What had come before is read first, and then the connection is given up.
            if connection.views():
                connection.written(0)
            if connection.wants_read:
                self._mark(connection)
            return
        while views := connection.views():
            if not connection.written(end.outgoing.write(views)):
                break

    def _attend(self, connection: Connection) -> None:
        """A connection can be read or written, or is over."""
        if connection.is_closed or connection.wire is None:
            return
        end: End = connection.wire
        incoming = end.incoming
        if isinstance(connection, (RecvConnection, Leg)):
            while incoming.arrived > incoming.read and connection.wants_read and not connection.is_closed:
                buffers = connection.buffers()
                offered = connection.offered_bytes
                n_bytes = incoming.take(buffers)
                self.endpoint.filled(connection, n_bytes)
                if n_bytes < offered:
                    break
            incoming.low_water = connection.low_water
        elif isinstance(connection, SendConnection):
            if incoming.arrived > incoming.read:
                self.endpoint.received(connection, incoming.take_bytes(_CONTROL_BYTES))
        else:
            assert isinstance(connection, (Dialing, Accepting))
            if incoming.arrived > incoming.read:
                self._greet(connection, incoming.take_bytes(connection.wanted))
        if connection.is_closed or connection.wire is not end:
            return
        is_reset = connection in self._reset
        if incoming.arrived == incoming.read and (is_reset or incoming.fin_arrived):
            self.endpoint.broken(connection, "reset by the other end" if is_reset else "closed by the other end")
        elif connection.wants_read and (incoming.is_readable() or is_reset):
            self._mark(connection)
        elif isinstance(connection, (SendConnection, RecvConnection, Leg)) and _may_write(connection):
            self.endpoint.wake(connection)

    def _mark(self, connection: Connection) -> None:
        self._ready[connection] = None
        self.look_at(self.network.clock.now_s)

    # --- connections

    def _adopt(self, connection: Connection, end: End) -> None:
        connection.wire = end
        mark = partial(self._mark, connection)
        end.watch(mark, mark, partial(self._was_reset, connection))
        self._mark(connection)

    def _was_reset(self, connection: Connection) -> None:
        """As on Linux: what had come before can still be read."""
        if not self.is_stopped:
            self._reset.add(connection)
            self._mark(connection)

    def _dial(self, dialing: Dialing) -> None:
        network = self.network
        src = network.nics[self.rank, dialing.nic]
        dst = network.at(dialing.address)
        if dst is None:
            # Nobody answers.
            self._dials[dialing] = lambda: None
            return

        def connected(end: End) -> None:
            self._dials.pop(dialing, None)
            if dialing.is_closed or self.is_stopped:
                end.close()
                return
            self._adopt(dialing, end)
            end.outgoing.write([self.endpoint.connected(dialing)])

        def refused() -> None:
            self._dials.pop(dialing, None)
            if not (dialing.is_closed or self.is_stopped):
                self.endpoint.now_s = self.now_s
                self.endpoint.dial_failed(dialing, refused=True)
                self.look_at(self.now_s)

        name = f"{self.rank}.{src.number}-{dst.rank}.{dst.number}"
        self._dials[dialing] = network.connect(
            *(src, dst, name, connected, refused), to_rank=network.listeners.get(dialing.address)
        )

    def _accept(self, nic: int, end: End) -> None:
        self.endpoint.now_s = self.now_s
        self._adopt(self.endpoint.accepted(nic), end)

    def _greet(self, connection: Dialing | Accepting, data: bytes) -> None:
        end: End = connection.wire
        connection.kernel = end.outgoing.report()
        reply, successor = self.endpoint.received_hello(connection, data)
        if reply:
            end.outgoing.write([reply])
        if successor is not None:
            connection.wire = None
            if connection in self._reset:
                self._reset.remove(connection)
                self._reset.add(successor)
            self._adopt(successor, end)

    def _close(self, connection: Connection) -> None:
        self._ready.pop(connection, None)
        self._reset.discard(connection)
        if isinstance(connection, Dialing) and connection in self._dials:
            self._dials.pop(connection)()
        if connection.wire is not None:
            connection.wire.close()

    def _hear_of_nic(self, nic: int, is_up: bool) -> None:
        self._pending_nics.append((nic, is_up))
        self.look_at(self.now_s)

    def _hear_of_address(self, nic: int, address: tuple[str, int]) -> None:
        self._pending_moves.append((nic, address))
        self.look_at(self.now_s)

    # --- the end

    def renew(self, endpoint: Endpoint) -> None:
        """After `leave`: the process goes on under another protocol, on the same NICs."""
        self.endpoint = endpoint
        for number in range(len(endpoint.own_nics)):
            endpoint.nic_up[number] = self.network.nics[self.rank, number].is_up
        self._ready, self._reset, self._dials = {}, set(), {}
        self._pending_nics, self._look, self.is_stopped = [], None, False
        self.network.accept[self.rank] = self._accept
        self.network.told[self.rank] = self._hear_of_nic
        self.look_at(self.now_s)

    def leave(self) -> None:
        """Says bye and closes."""
        endpoint = self.endpoint
        endpoint.reports.release_all()
        self.flush()
        for connection in list(endpoint.up):
            frame = endpoint.bye(connection)
            if frame:
                connection.wire.outgoing.write([frame])
                # As the driver does: what can be read is discarded, so that closing is no reset.
                connection.wire.incoming.take([memoryview(bytearray(connection.wire.incoming.available()))])
        self._stop()
        for each in endpoint.connections():
            if each.wire is not None:
                each.wire.close()

    def crash(self) -> None:
        """The process is killed."""
        self.is_killed = True
        self._stop()
        for connection in self.endpoint.connections():
            if connection.wire is not None:
                connection.wire.abandon()

    def _stop(self) -> None:
        self.is_stopped = True
        self.network.accept.pop(self.rank, None)
        self.network.told.pop(self.rank, None)
        self.network.told_address.pop(self.rank, None)
        for give_up in self._dials.values():
            give_up()
        if self._look is not None:
            self._look.cancel()
        self.stopped()


def _may_write(connection: Established | Leg) -> bool:
    """True if something waits that the kernel has room for."""
    return connection.blocked and bool(connection.wire.outgoing.has_room())
