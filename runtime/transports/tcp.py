"""TCP: one process a rank, and a connection for each rail and direction between every pair of ranks.

This module is the driver of `optcc.runtime.protocol`: it owns the sockets, the listeners, netlink, epoll and the clock,
and decides nothing. What travels, over which rail, what is sent again, suspected or given up is the protocol's.
`docs/transports.md` has the figures.

Progress is made inside `poll`, `allgather` and `barrier`, and each post writes what the sockets take: there is no
thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from select import EPOLLIN, EPOLLOUT, epoll
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from optcc.errors import EnvironmentMissing, InputError
from optcc.runtime.forks import call_in_child, take_no_part
from optcc.runtime.host_memory import HostPath, share_memory
from optcc.runtime.nic_log import NicLog
from optcc.runtime.nics import INSIDE_VARIABLE, HostNic, inside_of, interfaces
from optcc.runtime.partition import Partition, partition_s_of
from optcc.runtime.protocol.connection import RecvConnection, SendConnection
from optcc.runtime.protocol.endpoint import Endpoint
from optcc.runtime.protocol.frames import VERSION, crc32
from optcc.runtime.protocol.handshake import Accepting, Dialing
from optcc.runtime.protocol.leg import Leg
from optcc.runtime.protocol.liveness import WATCH_S, Connection, KernelReport
from optcc.runtime.protocol.local import Established
from optcc.runtime.protocol.settings import NicEntry, Settings
from optcc.runtime.rendezvous import Meet
from optcc.runtime.transport import RECEIVED, WOKEN, Clock, MonotonicClock
from optcc.runtime.transports.endpoint_transport import EndpointTransport
from optcc.runtime.transports.nic_watch import NicChange, NicWatch
from optcc.runtime.transports.tcp_sockets import limit_unsent, listen, open_socket, sample, send_last, tune, wake_from
from optcc.runtime.transports.tcp_terms import TcpTerms, read_book, read_insides

CHUNK_BYTES = 1 << 20
WINDOW = 32
BUFFER_BYTES = 0
SILENT_S = 0.1
STALL_S = 5.0
HELLO_S = 5.0
AUTHENTICATE_VARIABLE = "OPTCC_AUTHENTICATE"
_BACKLOG = 1024
_ACCEPTS_AT_ONCE = 16
_CONTROL_BYTES = 1 << 14
_READ_BYTES_MAX = 8 << 20
"""Read from one connection before the others have their turn."""


class _File(Protocol):
    """What epoll can watch."""

    def fileno(self) -> int:
        """Its number."""
        ...


class _Number(NamedTuple):
    """A file that the transport does not own."""

    number: int

    def fileno(self) -> int:
        return self.number


class Wire:
    """A socket, and what epoll and the kernel have been asked for."""

    __slots__ = ("low_water", "sock", "wants_write")

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.wants_write, self.low_water = sock, False, 1


class TcpTransport(EndpointTransport):
    """This process's end of a network of `Meeting.n_ranks` ranks; making one is collective.

    `meet` brings the ranks together once (`optcc.runtime.rendezvous`); `nics` are this rank's NICs, one of each plane:
    two ranks are joined over the NICs that have the same name, or in order if none have. Chunks are of about
    `chunk_bytes`, at most `window` are out at once on a channel, with `crc` each has a checksum: these must be the same
    at every rank. Ranks whose `inside` has the same name are on one host (`optcc.runtime.nics.inside_of`), and are
    joined over that instead of NICs. With `replan`, the sender changes to the next epoch after each failure that it
    learns of. With `learn_rates`, NICs that are measured to be slower than others of their host, relative to what is
    declared, get less. `buffer_bytes` sizes the sockets' buffers, 0 leaves them to the system. A connection on which
    nothing is acknowledged for `silent_s` is given up; a rank that no rail reaches for `stall_s` is AllRailsFailed;
    `hello_s` is the time that a handshake may take. With `authenticate`, at every rank or at none, each frame after the
    handshake is under an authentication tag (`optcc.runtime.protocol.sealing`). With `partition_s` above 0, the same at
    every rank, a host without a live rail is waited for so long instead of `stall_s` (`optcc.runtime.partition`). With
    `regroups`, at every rank or at none, ranks that are left may begin anew (`regroup`), and `release` gives everything
    back in the place of `close`.

    Raises InputError for numbers that cannot be, MismatchError if ranks differ, and what `meet` raises.
    """

    host_path: HostPath | None = None
    """See `optcc.runtime.host_memory.SharesMemory`."""

    def __init__(
        self,
        meet: Meet,
        nics: Sequence[HostNic],
        *,
        chunk_bytes: int = CHUNK_BYTES,
        window: int = WINDOW,
        crc: bool = False,
        replan: bool = False,
        learn_rates: bool = True,
        buffer_bytes: int = BUFFER_BYTES,
        silent_s: float = SILENT_S,
        stall_s: float = STALL_S,
        hello_s: float = HELLO_S,
        clock: Clock | None = None,
        inside: HostNic | None = None,
        authenticate: bool = False,
        partition_s: float = 0.0,
        regroups: bool = False,
    ) -> None:
        if not nics or len({nic.name for nic in nics}) < len(nics):
            raise InputError(f"NICs {', '.join(nic.name for nic in nics)}: must be at least one, of different names")
        if buffer_bytes < 0:
            raise InputError(f"buffers of {buffer_bytes} B: must not be negative")
        waits = silent_s, stall_s, hello_s
        settings = Settings(chunk_bytes, window, crc, replan, learn_rates, *waits, authenticate, partition_s)
        self._nics, self._buffer_bytes, self._regroups = tuple(nics), buffer_bytes, regroups
        self._clock = clock or MonotonicClock()
        self._epoll = epoll()
        # By file number: what is called with the subject and the events of epoll when the file is ready.
        self._handlers: dict[int, tuple[Callable[[Any, int], None], Any]] = {}
        self._listeners: list[socket.socket] = []
        self._watch: NicWatch | None = None
        self._nic_news: list[NicChange] = []
        self._wires: dict[Connection, Wire] = {}
        call_in_child(self, TcpTransport._leave_to_parent)
        try:
            own = [self._listen(nic) for nic in nics]
            within = None if inside is None else self._listen(inside)
            tags: Literal[True] | msgspec.UnsetType = True if authenticate else msgspec.UNSET
            waits_s = partition_s or msgspec.UNSET
            again: Literal[True] | msgspec.UnsetType = True if regroups else msgspec.UNSET
            terms = TcpTerms(VERSION, chunk_bytes, window, crc, tuple(own), within, tags, waits_s, again)
            self._meeting = meet(msgspec.json.encode(terms))
            everyone = read_book(self._meeting, terms)
            insides = read_insides(everyone)
            if insides:
                assert inside is not None
                self._nics += (inside,)
            elif inside is not None:
                self._listeners.pop().close()
            self._endpoint = Endpoint(
                *(settings, self._meeting.rank, [each.nics for each in everyone]),
                job=self._meeting.job,
                secret=self._meeting.secret,
                draw=os.urandom,
                checksum=crc32 if crc else None,
                now_s=self._clock.now_s(),
                insides=insides,
            )
            self._nic_log = NicLog(self._endpoint.rank, [nic.name for nic in nics])
            self._watch_nics()
            for number, listener in enumerate(self._listeners):
                self._register(listener, EPOLLIN, self._accept, number)
        except BaseException:
            self._give_back()
            raise

    def _listen(self, nic: HostNic) -> NicEntry:
        """Listens at a NIC; how others find it."""
        self._listeners.append(_listen_on(nic, self._buffer_bytes))
        return nic.name, nic.address, self._listeners[-1].getsockname()[1], nic.out_rate, nic.in_rate

    def wake_by(self, file: int) -> None:
        """`poll` returns an event of `WOKEN` when the eventfd `file` is set, which it sets back."""
        self._register(_Number(file), EPOLLIN, self._woken, file)

    def _woken(self, file: int, _: int) -> None:
        os.eventfd_read(file)
        self._endpoint.tell_news((RECEIVED, WOKEN))

    def _hang_up(self) -> None:
        """Says bye on every connection and gives everything back."""
        for connection in list(self._endpoint.up):
            send_last(connection.wire.sock, self._endpoint.bye(connection))
        if not self._regroups:
            self._give_back()
            return
        # The listeners stay: to a peer that has not heard yet, this process has not ended.
        for each in list(self._wires):
            self._close(each)

    def _renew(self, endpoint: Endpoint) -> None:
        self._endpoint, self.host_path = endpoint, None
        if self._watch is not None:
            endpoint.nic_up[: len(endpoint.own_nics)] = self._watch.is_up

    def _leave_to_parent(self) -> None:
        """In a process that is forked: the connections are the parent's, and this process must not keep them open."""
        take_no_part(self)
        self._give_back()

    def _give_back(self) -> None:
        self._is_closed = True
        for wire in self._wires.values():
            wire.sock.close()
        for listener in self._listeners:
            listener.close()
        if self._watch is not None:
            self._watch.close()
        self._epoll.close()

    def _register(self, file: _File, events: int, handler: Callable[[Any, int], None], subject: Any) -> None:
        """From now on `handler(subject, events)` is called when the file is ready."""
        number = file.fileno()
        if number in self._handlers:
            self._epoll.modify(number, events)
        else:
            self._epoll.register(number, events)
        self._handlers[number] = handler, subject

    def _unregister(self, file: _File) -> None:
        """Before the file is closed: its number will be another file's."""
        if self._handlers.pop(file.fileno(), None) is not None:
            self._epoll.unregister(file.fileno())

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _progress(self, holds: Callable[[], bool] | None, timeout_s: float) -> None:
        """See `EndpointTransport`."""
        endpoint, reports = self._endpoint, self._endpoint.reports
        now_s = endpoint.now_s = self._clock.now_s()
        deadline_s = now_s + timeout_s
        while not (endpoint.events if holds is None else holds()):
            until_s = endpoint.next_tick_s
            if deadline_s < until_s:
                until_s = deadline_s
            if reports.deferred:
                reports.release_late(now_s)
                until_s = min(until_s, reports.hold_to_s)
            if endpoint.to_send or endpoint.to_report:
                self._flush()
                until_s = min(until_s, endpoint.next_tick_s)
            self._turn(until_s - now_s if until_s > now_s else 0.0)
            # As of when the sockets were ready: to read the clock once more costs more than it is worth.
            now_s = endpoint.now_s
            if endpoint.failure is not None or now_s >= deadline_s:
                return

    def _turn(self, wait_s: float) -> None:
        """Waits for the sockets once, and does what they and the time ask for."""
        endpoint, handlers = self._endpoint, self._handlers
        ready = self._epoll.poll(wait_s)
        now_s = endpoint.now_s = self._clock.now_s()
        if len(ready) == 1:
            number, events = ready[0]
            handler, subject = handlers[number]
            handler(subject, events)
        elif ready:
            # Looked up before any is called: what one of them closes and opens may have the file number of another.
            for (handler, subject), events in [(handlers[number], events) for number, events in ready]:
                handler(subject, events)
        if self._nic_news:
            # What had come over a NIC, a bye perhaps, is read before its connections are given up.
            for change in self._nic_news:
                self._take_nic_news(change)
            self._nic_news.clear()
        if endpoint.to_send or endpoint.to_report:
            self._flush()
        if endpoint.to_close or endpoint.to_dial or endpoint.to_resume:
            self._carry_out()
        if now_s >= endpoint.next_tick_s:
            # Reading and writing are no part of the cost of a tick; and what is written after it may hasten the next.
            now_s = endpoint.now_s = self._clock.now_s()
            for connection in endpoint.watched():
                connection.kernel = self._report(connection)
            endpoint.tick()
            endpoint.ticked(self._clock.now_s() - now_s)
            self._flush()
            n_nics = len(endpoint.own_nics)
            shares = [count.out_share for count in endpoint.rail_counts[:n_nics]]
            between_hosts = tuple(each for each in endpoint.up if each.nic < n_nics)
            self._nic_log.look(now_s, endpoint.nic_up[:n_nics], between_hosts, shares)
            self._nic_log.note_detours({peer for peer, out in endpoint.outbounds.items() if out.is_detoured})
            if endpoint.settings.partition_s:
                self._nic_log.note_absent(now_s, endpoint.absent(), endpoint.settings.partition_s)

    def _report(self, connection: Connection) -> KernelReport | None:
        return sample(connection.wire.sock) if connection.wire is not None else None

    def _flush(self) -> None:
        """Writes what has been queued, also what a broken connection leaves to others, and carries out the rest."""
        endpoint = self._endpoint
        endpoint.now_s = self._clock.now_s()
        if endpoint.has_to_write():
            endpoint.look_within(WATCH_S)
        while (connection := endpoint.next_to_write()) is not None:
            self._write(connection)
        self._carry_out()

    def _write(self, connection: Established | Leg) -> None:
        """Writes what the socket takes."""
        wire: Wire = connection.wire
        sock = wire.sock
        try:
            while views := connection.views():
                if not connection.written(sock.send(views[0]) if len(views) == 1 else sock.sendmsg(views)):
                    break
        except BlockingIOError:
            connection.written(0)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                self._endpoint.broken(connection, error.strerror or str(error))
                return
            # What had come before a reset can still be read, such as the last words of a peer that has left. Then the
            # end is read, and the connection is given up.
            connection.written(0)
        if not connection.is_closed and connection.blocked != wire.wants_write:
            wire.wants_write = connection.blocked
            self._set_events(connection)

    def _set_events(self, connection: Established | Leg) -> None:
        wire: Wire = connection.wire
        events = EPOLLIN if connection.wants_read else 0
        self._epoll.modify(wire.sock, events | EPOLLOUT if wire.wants_write else events)

    def _carry_out(self) -> None:
        """Opens, closes and limits what the protocol asks for."""
        endpoint = self._endpoint
        while endpoint.to_close or endpoint.to_dial or endpoint.to_limit or endpoint.to_resume:
            while endpoint.to_resume:
                leg = endpoint.to_resume.pop()
                if not leg.is_closed:
                    self._set_events(leg)
            while endpoint.to_close:
                self._close(endpoint.to_close.pop())
            while endpoint.to_dial:
                self._dial(endpoint.to_dial.pop())
            while endpoint.to_limit:
                connection = endpoint.to_limit.pop()
                if not connection.is_closed:
                    limit_unsent(connection.wire.sock, connection.holds_little)

    # --- connections --------------------------------------------------------------------------------------------------

    def _close(self, connection: Connection) -> None:
        wire = self._wires.pop(connection, None)
        if wire is not None:
            self._unregister(wire.sock)
            wire.sock.close()

    def _adopt(self, connection: Connection, sock: socket.socket) -> None:
        connection.wire = self._wires[connection] = Wire(sock)

    def _dial(self, dialing: Dialing) -> None:
        if dialing.is_closed:
            return
        try:
            sock = open_socket(self._nics[dialing.nic].address, self._buffer_bytes)
        except OSError as error:
            self._endpoint.dial_failed(dialing, refused=False)
            if error.errno == errno.EADDRNOTAVAIL and self._watch is None:
                self._look_for_address(dialing.nic)
            return
        self._adopt(dialing, sock)
        code = sock.connect_ex(dialing.address)
        if code not in (0, errno.EINPROGRESS):
            self._endpoint.dial_failed(dialing, refused=code == errno.ECONNREFUSED)
            return
        self._register(sock, EPOLLOUT, self._connected, dialing)

    def _connected(self, dialing: Dialing, _: int) -> None:
        """The connection is there, or has failed."""
        if dialing.is_closed:
            return
        sock = dialing.wire.sock
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._endpoint.dial_failed(dialing, refused=code == errno.ECONNREFUSED)
            return
        self._register(sock, EPOLLIN, self._read_hello, dialing)
        self._endpoint.now_s = self._clock.now_s()
        self._send_hello(dialing, self._endpoint.connected(dialing))

    def _accept(self, nic: int, _: int) -> None:
        """Somebody has connected to a NIC of this rank."""
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, _address = self._listeners[nic].accept()
            except OSError:
                return
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                tune(sock, self._buffer_bytes)
            accepting = self._endpoint.accepted(nic)
            self._adopt(accepting, sock)
            self._register(sock, EPOLLIN, self._read_hello, accepting)
            self._carry_out()

    def _read_hello(self, connection: Dialing | Accepting, _: int) -> None:
        """Reads a part of a handshake; then the connection is one of the protocol's."""
        if connection.is_closed:
            return
        sock = connection.wire.sock
        try:
            data = sock.recv(connection.wanted)
        except BlockingIOError:
            return
        except OSError as error:
            self._hello_failed(connection, error)
            return
        if not data:
            self._endpoint.broken(connection, "closed during the handshake")
            return
        connection.kernel = sample(sock)
        reply, successor = self._endpoint.received_hello(connection, data)
        if reply:
            self._send_hello(connection, reply)
        if successor is not None:
            self._wires[successor] = self._wires.pop(connection)
            handler = self._send_ready if isinstance(successor, SendConnection) else self._recv_ready
            self._register(sock, EPOLLIN, handler, successor)

    def _send_hello(self, connection: Dialing | Accepting, data: bytes) -> None:
        """Sends a part of a handshake: it fits a fresh socket's buffer."""
        try:
            if connection.wire.sock.send(data) != len(data):
                self._endpoint.broken(connection, "no room for the handshake")
        except OSError as error:
            self._hello_failed(connection, error)

    def _hello_failed(self, connection: Dialing | Accepting, error: OSError) -> None:
        if isinstance(connection, Dialing) and not connection.is_closed:
            self._endpoint.dial_failed(connection, refused=error.errno == errno.ECONNREFUSED)
        else:
            self._endpoint.broken(connection, error.strerror or str(error))

    def _send_ready(self, connection: SendConnection, events: int) -> None:
        """A connection to a receiver can be read or written, or has an error, which both say."""
        if connection.is_closed:
            return
        if events != EPOLLIN:
            self._endpoint.wake(connection)
        if events == EPOLLOUT:
            return
        try:
            data = connection.wire.sock.recv(_CONTROL_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._endpoint.broken(connection, error.strerror or str(error))
            return
        if data:
            self._endpoint.received(connection, data)
        else:
            self._endpoint.broken(connection, "closed by the other end")

    def _recv_ready(self, connection: RecvConnection | Leg, events: int) -> None:
        """A connection from a sender can be read, up to a limit, or written, or has an error, which both say."""
        if connection.is_closed:
            return
        if events != EPOLLIN:
            self._endpoint.wake(connection)
        if events == EPOLLOUT:
            return
        wire: Wire = connection.wire
        if not connection.wants_read and not events & EPOLLIN:
            self._endpoint.broken(connection, "closed or reset, and not read")
            return
        sock, budget, endpoint = wire.sock, _READ_BYTES_MAX, self._endpoint
        while budget > 0 and connection.wants_read:
            buffers = connection.buffers()
            try:
                n_bytes = sock.recv_into(buffers[0]) if len(buffers) == 1 else sock.recvmsg_into(buffers)[0]
            except BlockingIOError:
                break
            except OSError as error:
                endpoint.broken(connection, error.strerror or str(error))
                return
            if not n_bytes:
                endpoint.broken(connection, "closed by the other end")
                return
            offered = connection.offered_bytes
            endpoint.filled(connection, n_bytes)
            if connection.is_closed:
                return
            if n_bytes < offered:
                break
            budget -= n_bytes
        if connection.low_water != wire.low_water:
            wire.low_water = connection.low_water
            wake_from(sock, wire.low_water)
        if not connection.wants_read:
            self._set_events(connection)

    # --- NICs ---------------------------------------------------------------------------------------------------------

    def _watch_nics(self) -> None:
        """Has the kernel report changes of this rank's NICs, where it can."""
        with contextlib.suppress(OSError):
            endpoint = self._endpoint
            self._watch = NicWatch([nic[1] for nic in endpoint.own_nics])
            endpoint.nic_up[: len(endpoint.own_nics)] = self._watch.is_up
            self._register(self._watch, EPOLLIN, self._nics_changed, self._watch)

    def _nics_changed(self, watch: NicWatch, _: int) -> None:
        self._nic_news += watch.read()

    def _take_nic_news(self, change: NicChange) -> None:
        """What the kernel says of a NIC."""
        endpoint = self._endpoint
        if change.address != self._nics[change.nic].address and not self._move(change.nic, change.address):
            return
        if change.is_up != endpoint.nic_up[change.nic]:
            endpoint.nic_changed(change.nic, change.is_up)

    def _look_for_address(self, nic: int) -> None:
        """Where no netlink says so: a NIC does not have its address any more, and may have another one."""
        others = {each.address for each in self._nics}
        for each in interfaces():
            if each.name == self._nics[nic].name and each.address not in others:
                self._move(nic, each.address)

    def _move(self, nic: int, address: str) -> bool:
        """A NIC has another address: this rank listens there, dials from there, and tells the others.

        False if it cannot listen there: the address has gone again, which the kernel says next.
        """
        moved = replace(self._nics[nic], address=address)
        try:
            listener = listen(address, _BACKLOG, self._buffer_bytes)
        except OSError:
            return False
        self._unregister(self._listeners[nic])
        self._listeners[nic].close()
        self._listeners[nic] = listener
        self._register(listener, EPOLLIN, self._accept, nic)
        self._nic_log.note_address(nic, self._nics[nic].address, address)
        self._nics = (*self._nics[:nic], moved, *self._nics[nic + 1 :])
        self._endpoint.nic_moved(nic, address, listener.getsockname()[1])
        return True


def authenticates(environ: Mapping[str, str]) -> bool:
    """Whether OPTCC_AUTHENTICATE asks for authenticated frames; raises InputError unless it is 0, 1, or not there.

    >>> authenticates({}), authenticates({"OPTCC_AUTHENTICATE": "1"})
    (False, True)
    """
    value = environ.get(AUTHENTICATE_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise InputError(f"{AUTHENTICATE_VARIABLE} {value!r}: must be 0 or 1")
    return value == "1"


def open_tcp(
    meet: Meet,
    nics: Sequence[HostNic],
    environ: Mapping[str, str],
    *,
    authenticate: bool | None = None,
    partition: Partition | None = None,
    partition_s: float | None = None,
    shared_memory: bool = True,
) -> TcpTransport:
    """The transport over `nics` that the variables of `environ` describe; an argument counts before its variable.

    Plans on it use memory that ranks of one host share (`optcc.runtime.host_memory`), unless some rank of the host is
    not to (`shared_memory`), or OPTCC_INSIDE_IFNAME says which interface they use.

    Raises InputError for a variable that cannot be, and what `TcpTransport` raises.
    """
    wait_s, regroups = partition_s_of(environ, partition, partition_s), partition == "without"
    transport = TcpTransport(
        meet,
        nics,
        inside=inside_of(nics, environ),
        authenticate=authenticates(environ) if authenticate is None else authenticate,
        partition_s=0.0 if regroups else wait_s,
        regroups=regroups,
    )
    names_inside = f"{INSIDE_VARIABLE} names the interface" if environ.get(INSIDE_VARIABLE) else ""
    refused = names_inside if shared_memory else "turned off"
    try:
        share_memory(transport, refused=refused)
    except BaseException:
        transport.release()
        raise
    return transport


def _listen_on(nic: HostNic, buffer_bytes: int) -> socket.socket:
    try:
        return listen(nic.address, _BACKLOG, buffer_bytes, may_be_down=not nic.is_up)
    except OSError as error:
        raise EnvironmentMissing(f"NIC {nic.name}: cannot listen at {nic.address}: {error.strerror}") from error
