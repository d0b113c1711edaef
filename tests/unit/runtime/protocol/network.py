"""Endpoints of the protocol without sockets: a network in memory under a clock that only the test moves.

`Network` is a driver of `Endpoint`, as `optcc.runtime.transports.tcp` is, over wires that lose nothing and take no
time. `TwoRails` is the receiving end of one direction, fed by hand with bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from optcc.errors import RuntimeFault
from optcc.plan import Channel
from optcc.runtime.protocol.connection import RecvConnection, SendConnection
from optcc.runtime.protocol.endpoint import Endpoint
from optcc.runtime.protocol.exchange import Exchange
from optcc.runtime.protocol.frames import data_header
from optcc.runtime.protocol.handshake import Accepting, Dialing
from optcc.runtime.protocol.inbound import Inbound
from optcc.runtime.protocol.leg import Leg
from optcc.runtime.protocol.liveness import Connection, KernelReport
from optcc.runtime.protocol.local import Established
from optcc.runtime.protocol.outbound import Outbound
from optcc.runtime.protocol.settings import NicEntry, Settings
from optcc.runtime.sim.host import _SYN_SENT

Array = npt.NDArray[Any]
SECRET, JOB, SESSION = bytes(range(32)), bytes(16), 7


def settings_of(**changes: Any) -> Settings:
    """Those of `TcpTransport`, but that rates are as declared unless a test says otherwise."""
    given: dict[str, Any] = {"chunk_bytes": 1 << 20, "window": 32, "crc": False, "replan": False, "learn_rates": False}
    return Settings(**{**given, "silent_s": 0.1, "stall_s": 5.0, "hello_s": 5.0, **changes})


def book_of(
    n_ranks: int, n_rails: int, rates: Sequence[int] = (), other: Mapping[tuple[int, int], int] | None = None
) -> list[list[NicEntry]]:
    """The NICs of all ranks; NIC i of rank r is at 127.0.(i+1).(r+1), of `rates[i]` or the `other[r, i]`."""
    given = {(rank, i): rates[i] if rates else 1 for rank in range(n_ranks) for i in range(n_rails)} | dict(other or {})
    return [
        [(f"r{i}", f"127.0.{i + 1}.{rank + 1}", 9, given[rank, i], given[rank, i]) for i in range(n_rails)]
        for rank in range(n_ranks)
    ]


def endpoint_of(
    rank: int,
    n_ranks: int,
    n_rails: int = 2,
    rates: Sequence[int] = (),
    *,
    other: Mapping[tuple[int, int], int] | None = None,
    secret: bytes = SECRET,
    ranks_per_host: int = 1,
    **changes: Any,
) -> Endpoint:
    """One end, at time 0. Ranks of a host share its NICs, and are joined inside it."""
    settings = settings_of(**changes)
    checksum = zlib.crc32 if settings.crc else None
    counter = iter(range(1, 1 << 30))
    insides = [(f"host {each // ranks_per_host}", "127.0.0.1", 9, 1, 1) for each in range(n_ranks)]
    return Endpoint(
        *(settings, rank, book_of(n_ranks, n_rails, rates, other)),
        insides=insides if ranks_per_host > 1 else (),
        job=JOB,
        secret=secret,
        draw=lambda n_bytes: (rank << 64 | next(counter)).to_bytes(n_bytes, "big"),
        checksum=checksum,
    )


def fill(endpoint: Endpoint, connection: RecvConnection | Leg, data: bytes) -> int:
    """Gives a connection bytes as a driver that reads them does; how many it took before it was given up."""
    at = 0
    while at < len(data) and not connection.is_closed:
        n_bytes = 0
        for buffer in connection.buffers():
            part = data[at + n_bytes : at + n_bytes + len(buffer)]
            buffer[: len(part)] = part
            n_bytes += len(part)
        endpoint.filled(connection, n_bytes)
        at += n_bytes
    return at


class TwoRails:
    """The receiving end of a direction, rank 0 to rank 1, over two connections that a test feeds, and one slot."""

    def __init__(self, *, crc: bool = False) -> None:
        self._crc = crc
        self.endpoint = endpoint_of(1, 2, chunk_bytes=1 << 16, window=8, crc=crc)
        self.inbound = self.endpoint.inbound(0)
        self.connections = [
            RecvConnection(0, rail, SESSION, count, self.endpoint.checksum, self.inbound)
            for rail, count in enumerate(self.endpoint.rail_counts)
        ]
        for connection in self.connections:
            self.inbound.joined(connection)
        self.slot = np.zeros(100, np.uint8)
        self.channel = self.inbound.channel(0)
        self.inbound.post(self.channel, self.slot.data)

    def send(self, rail: int, data: bytes) -> None:
        fill(self.endpoint, self.connections[rail], data)

    def frame(self, data: bytes, number: int = 0) -> bytes:
        """A chunk with its header."""
        crc = zlib.crc32(data) if self._crc else None
        return data_header(SESSION, 0, 0, number, len(data), crc) + data

    def written(self) -> bytes:
        """What is to be written, on both rails."""
        return b"".join(write_all(self.endpoint).values())


def write_all(
    endpoint: Endpoint, take: Callable[[Established | Leg, int], int] = lambda _, n: n
) -> dict[Established | Leg, bytes]:
    """Writes what waits; the bytes of each connection. `take`: how many of so many bytes the socket takes."""
    written: dict[Established | Leg, bytes] = {}
    while (connection := endpoint.next_to_write()) is not None:
        while views := connection.views():
            data = b"".join(views)
            n_bytes = take(connection, len(data))
            written[connection] = written.get(connection, b"") + data[:n_bytes]
            if not connection.written(n_bytes):
                break
    return written


class End:
    """One end of a wire: what has come and was not read, what was sent, and what of it the other kernel has."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.connection: Connection | None = None
        self.other: End | None = None
        self.inbox, self.on_its_way = bytearray(), bytearray()
        self.sent_bytes = self.acked_bytes = self.n_writes = 0
        self.is_closed = self.is_frozen = False
        self.nic = -1

    def put(self, data: bytes) -> None:
        """The kernel of the other end has it at once, and acknowledges it, unless the wire is frozen."""
        self.n_writes += 1
        self.sent_bytes += len(data)
        self.on_its_way += data
        if not self.is_frozen:
            self.arrive()

    def arrive(self) -> None:
        """What is on its way is at the other end."""
        assert self.other is not None
        self.other.inbox += self.on_its_way
        self.on_its_way.clear()
        self.acked_bytes = self.sent_bytes

    def report(self) -> KernelReport:
        return KernelReport(0, self.sent_bytes - self.acked_bytes, 0, 1000, 1 << 20, self.acked_bytes, 0.0)


class Network:
    """All ranks of a job. `asleep` are ranks that do not call their transport: their kernels take what comes.
    `unreachable` are (rank, NIC) that nobody reaches, `gone` ranks that refuse connections. A connect takes
    `connect_s`; `n_dials` were begun."""

    def __init__(self, n_ranks: int, n_rails: int = 2, rates: Sequence[int] = (), **changes: Any) -> None:
        self.now_s = 0.0
        self.endpoints = [endpoint_of(rank, n_ranks, n_rails, rates, **changes) for rank in range(n_ranks)]
        self.asleep: set[int] = set()
        self.gone: set[int] = set()
        self.unreachable: set[tuple[int, int]] = set()
        self.connect_s, self.n_dials = 0.0, 0
        # When the SYNs that are on their way arrive, and who has sent them.
        self._knocks: list[tuple[float, int, Dialing]] = []
        self._nics = {
            entry[1]: (rank, i) for rank, nics in enumerate(book_of(n_ranks, n_rails)) for i, entry in enumerate(nics)
        }
        self._ends: list[list[End]] = [[] for _ in range(n_ranks)]

    # --- the ranks

    def open(self, *channels: tuple[int, int], carried: Sequence[int] = ()) -> list[list[int]]:
        """The handles of one more channel for each of these pairs, by rank."""
        wanted = [Channel(src, dst, 1) for src, dst in channels]
        return [endpoint.open(wanted, 0, carried) for endpoint in self.endpoints]

    def post_send(self, rank: int, handle: int, array: Array) -> None:
        """As `TcpTransport.post_send`; the bytes go out with the next `settle`, or at once if they are eager."""
        endpoint = self.endpoints[rank]
        endpoint.now_s = self.now_s
        connection = endpoint.post_send(handle, array.data)
        if connection is not None:
            endpoint.wake(connection)
        self._write(rank)

    def post_recv(self, rank: int, handle: int, array: Array) -> None:
        """As `TcpTransport.post_recv`: an eager slot is told of when the rank waits."""
        if self.endpoints[rank].post_recv(handle, array.data):
            self._write(rank)

    def poll(self, rank: int) -> list[tuple[Any, int]]:
        """What has happened at a rank, after everything that can happen now."""
        self.settle()
        endpoint = self.endpoints[rank]
        if not endpoint.events and endpoint.failure is not None:
            raise endpoint.failure
        events = endpoint.poll_events()
        self._write(rank)
        return events

    def barrier(self) -> None:
        """All ranks wait for each other."""
        exchanges = [Exchange(endpoint, b"") for endpoint in self.endpoints]
        self.until(lambda: sum(exchange.step() for exchange in exchanges) == len(exchanges))

    def leave(self, rank: int, *, failed: bool = False, silently: bool = False) -> None:
        """A rank closes without waiting: it says bye, unless `silently`, and refuses connections from then on."""
        endpoint = self.endpoints[rank]
        if failed:
            endpoint.fail(RuntimeFault("a test"))
        if not silently:
            endpoint.reports.release_all()
            self._write(rank)
            for connection in list(endpoint.up):
                connection.wire.put(endpoint.bye(connection))
        self.gone.add(rank)
        for end in list(self._ends[rank]):
            self._shut(end)

    # --- time

    def settle(self) -> None:
        """Everything that can happen without time passing, but at ranks that are asleep."""
        while self._turn():
            pass

    def run(self, seconds: float) -> None:
        """So much time passes."""
        end_s = self.now_s + seconds
        self.settle()
        while self.now_s < end_s:
            awake = [endpoint for endpoint in self.endpoints if endpoint.rank not in self.asleep | self.gone]
            due = [max(each.next_tick_s, self.now_s) for each in awake] + [each.reports.hold_to_s for each in awake]
            self.now_s = min([end_s, *due, *(due_s for due_s, *_ in self._knocks)])
            for endpoint in awake:
                endpoint.now_s = self.now_s
                if self.now_s >= endpoint.next_tick_s:
                    for connection in endpoint.watched():
                        connection.kernel = connection.wire.report() if connection.wire is not None else _SYN_SENT
                    endpoint.tick()
                    endpoint.ticked(0.0)
            self.settle()

    def until(self, holds: Callable[[], bool], seconds: float = 10.0) -> None:
        """Until this holds, within so much time."""
        end_s = self.now_s + seconds
        self.settle()
        while not holds():
            assert self.now_s < end_s, "in vain"
            self.run(0.005)

    def move(self, rank: int, nic: int, address: str) -> None:
        """A NIC has another address: nothing arrives any more over what was connected to or from the one before."""
        self._nics = {text: which for text, which in self._nics.items() if which != (rank, nic)}
        self._nics[address] = rank, nic
        for connection in self.endpoints[rank].up_over(nic):
            self.freeze(connection)
        self.endpoints[rank].now_s = self.now_s
        self.endpoints[rank].nic_moved(nic, address, 9)

    # --- wires

    def n_writes(self, rank: int) -> int:
        """How often a rank has written to a wire that is there."""
        return sum(end.n_writes for end in self._ends[rank])

    def connections(self, rank: int, rail: int) -> list[Established]:
        """The connections of a rank that are up on a rail."""
        return [each for each in list(self.endpoints[rank].up) if each.rail == rail]

    def outbound(self, src: int, dst: int, rail: int) -> SendConnection:
        """The sender's end of a connection, which must be up."""
        connection = self.endpoints[src].outbounds[dst].rails[rail].connection
        assert connection is not None
        return connection

    def inbound(self, src: int, dst: int, rail: int) -> RecvConnection:
        """The receiver's end of a connection, which must be up."""
        connection = self.endpoints[dst].inbounds[src].connections[rail]
        assert connection is not None
        return connection

    def freeze(self, connection: Established) -> None:
        """From now on nothing that is sent on a connection, from either end, arrives."""
        for each in self._both(connection):
            each.is_frozen = True

    def thaw(self, connection: Established) -> None:
        """What was sent on a frozen connection arrives now."""
        for each in self._both(connection):
            each.is_frozen = False
            each.arrive()

    def _both(self, connection: Established) -> list[End]:
        end: End = connection.wire
        assert end.other is not None
        return [end, end.other]

    def cut(self, connection: Established) -> None:
        """A connection is reset."""
        for each in self._both(connection):
            self._shut(each)
            if each.connection is not None:
                self.endpoints[each.rank].broken(each.connection, "reset")

    def all_up(self) -> bool:
        """True if every rail that somebody has opened is up, at both ends."""
        for endpoint in self.endpoints:
            for outbound in endpoint.outbounds.values():
                if any(rail.connection is None for rail in outbound.direct):
                    return False
                if None in self.endpoints[outbound.peer].inbounds[endpoint.rank].connections[: len(outbound.direct)]:
                    return False
        return True

    def _shut(self, end: End) -> None:
        if not end.is_closed:
            end.is_closed = True
            self._ends[end.rank].remove(end)

    def _write(self, rank: int) -> None:
        endpoint = self.endpoints[rank]
        endpoint.now_s = self.now_s
        if endpoint.has_to_write():
            endpoint.look_within(0.02)
        for connection, data in write_all(endpoint).items():
            connection.wire.put(data)

    def _turn(self) -> bool:
        """One look at every rank that is awake; False if there was nothing to do."""
        is_busy = False
        for endpoint in self.endpoints:
            if endpoint.rank in self.asleep | self.gone:
                continue
            endpoint.now_s = self.now_s
            endpoint.reports.release_late(self.now_s)
            is_busy |= endpoint.has_to_write() or bool(endpoint.to_dial or endpoint.to_close)
            self._write(endpoint.rank)
            endpoint.to_limit.clear()
            endpoint.to_resume.clear()
            while endpoint.to_close:
                end = endpoint.to_close.pop().wire
                if end is not None:
                    self._shut(end)
            while endpoint.to_dial:
                self.n_dials += 1
                self._knocks.append((self.now_s + self.connect_s, endpoint.rank, endpoint.to_dial.pop()))
            for knock in [each for each in self._knocks if each[0] <= self.now_s and each[1] == endpoint.rank]:
                self._knocks.remove(knock)
                self._dial(*knock[1:])
            for end in list(self._ends[endpoint.rank]):
                is_busy |= self._read(end)
        return is_busy

    def _dial(self, rank: int, dialing: Dialing) -> None:
        endpoint, (peer, nic) = self.endpoints[rank], self._nics.get(dialing.address[0], (-1, -1))
        if peer < 0 or dialing.is_closed or (peer, nic) in self.unreachable or (rank, dialing.nic) in self.unreachable:
            return
        if peer in self.gone:
            endpoint.dial_failed(dialing, refused=True)
            return
        near, far = End(rank), End(peer)
        near.other, far.other = far, near
        near.connection = dialing
        dialing.wire = near
        self._ends[rank].append(near)
        # The kernel accepts; the rank hears of it when it looks.
        self._ends[peer].append(far)
        far.nic = nic
        near.put(endpoint.connected(dialing))

    def _read(self, end: End) -> bool:
        endpoint = self.endpoints[end.rank]
        if end.connection is None:
            accepting = endpoint.accepted(end.nic)
            accepting.wire, end.connection = end, accepting
        connection = end.connection
        if connection.is_closed:
            return False
        if not end.inbox:
            if end.other is not None and end.other.is_closed and not end.is_frozen:
                endpoint.broken(connection, "closed by the other end")
                return True
            return False
        if isinstance(connection, (Dialing, Accepting)):
            data = bytes(end.inbox[: connection.wanted])
            del end.inbox[: len(data)]
            reply, successor = endpoint.received_hello(connection, data)
            end.put(reply)
            if successor is not None:
                end.connection = successor
            return True
        data = bytes(end.inbox)
        end.inbox.clear()
        if isinstance(connection, SendConnection):
            endpoint.received(connection, data)
        else:
            assert isinstance(connection, (RecvConnection, Leg))
            fill(endpoint, connection, data)
        return True


def ends_of(network: Network, src: int, dst: int) -> tuple[Outbound, Inbound]:
    """Both ends of a direction."""
    return network.endpoints[src].outbounds[dst], network.endpoints[dst].inbounds[src]
