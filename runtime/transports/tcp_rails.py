"""The sockets of the TCP transport: connections that read and write frames, and notice when nobody answers.

Nothing here waits, and nothing here knows the failover table. The bytes of a chunk go from the view that was posted to
the socket and from the socket into the view that was posted, without a copy in between.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from optcc.runtime.transports.tcp_wire import (
    ANSWER_BYTES,
    BYE_FRAME,
    CHANGE_FRAME,
    CHECKED,
    DATA_FRAME,
    EAGER_BYTES,
    FAILED,
    HEADER_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    STATE_FRAME,
    WORDS,
    Caller,
    Checksum,
    Doorman,
    Header,
    Hello,
    WireError,
    bye_header,
    change_header,
    data_header,
    decode,
    state_header,
    word_header,
)

WATCH_S = 0.02
CLOSE_WATCH_S = 0.01
"""So often a connection is looked at while bytes on it are not acknowledged; and while none of them is."""
_READ_BYTES_MAX = 8 << 20
"""Read from one connection before the others have their turn."""
_VIEWS_AT_ONCE, _BYTES_AT_ONCE = 8, 1 << 19
_CHECKED_SEND_BYTES = 1 << 20
_CHECKED_READ_BYTES = 1 << 18
"""What is checked goes to the socket, and comes from there, in parts that are still in the processor's cache."""
_LOW_WATER_BYTES = 1 << 20
"""In the middle of a chunk, so much must have come before anybody is woken."""
_CONTROL_BYTES = 1 << 14
_STAGE_BYTES = EAGER_BYTES + 4 * HEADER_BYTES
_INFO_BYTES = 256
# Of struct tcp_info (linux/tcp.h): timeouts since the last acknowledgement, segment size, segments not acknowledged;
# round trip and its variation (us); bytes acknowledged; bytes that were never sent; for how long (us) bytes were on
# their way, and for how much of that the other end had no room; the window that it gives. The last since Linux 5.4.
_INFO = struct.Struct("=2xB13xI4xI40xII44xQ16xI20xQQ44xI")
_INFO_OLD = struct.Struct("=2xB13xI4xI40xII44xQ")
_KEEPALIVE_S = 1
_KEEPALIVE_PROBES = 3
_GAPS = 1.5
"""A connection is silent only after so many times its longest recent gap between acknowledgements."""
_GAP_MEMORY_S = 10.0
_ROUND_TRIPS = 2
"""A queue may double in a round trip."""
_FIRST_S = 0.01
# linux/tcp.h; -1 is as much as the system lets wait.
_TCP_NOTSENT_LOWAT, _UNSENT_BYTES, _ANY_UNSENT = 25, 1 << 17, -1

_sink = memoryview(bytearray(1 << 18))
"""Where bytes go that nobody wants; its content means nothing."""


class Broken(Exception):
    """The connection is closed, reset, silent, or what came over it is damaged (`is_damage`)."""

    def __init__(self, why: str, *, is_damage: bool = False) -> None:
        super().__init__(why)
        self.is_damage = is_damage


@dataclass(slots=True)
class RailCount:
    """What has gone over one NIC of this rank: bytes with headers, failures of connections, and how fast it is.

    `out_share` is the share of its declared rate that it has turned out to send, 1 unless it is slower.
    """

    name: str
    sent_bytes: int = 0
    received_bytes: int = 0
    failures: int = 0
    out_share: float = 1.0


def open_socket(address: str, buffer_bytes: int) -> socket.socket:
    """A non-blocking TCP socket bound to the NIC's address; `buffer_bytes` 0 leaves its buffers to the system."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        tune(sock, buffer_bytes)
        # The port is chosen when it connects, so that many connections may share one.
        if hasattr(socket, "IP_BIND_ADDRESS_NO_PORT"):
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_BIND_ADDRESS_NO_PORT, 1)
        sock.bind((address, 0))
    except BaseException:
        sock.close()
        raise
    return sock


def listen(address: str, backlog: int, buffer_bytes: int) -> socket.socket:
    """A non-blocking listener on a free port of the NIC's address."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if buffer_bytes:
            # The window of an accepted connection is scaled after this, before anybody accepts it.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        sock.bind((address, 0))
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def tune(sock: socket.socket, buffer_bytes: int) -> None:
    """No delay, sized buffers, and the kernel's own probes against a host that has vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_S),
        ("TCP_KEEPINTVL", _KEEPALIVE_S),
        ("TCP_KEEPCNT", _KEEPALIVE_PROBES),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class Line:
    """A socket, and for how long the other kernel has left unanswered what was sent on it.

    `awaits` says that something was sent which may not be acknowledged. When the kernel was last asked, nothing of it
    was if it `stands`, some if it `answers`; it is `suspect` if nothing was for half of the time after which it is
    silent, longer than lately, and longer than `queue_s`, which a queue on the way may take. `waiting_bytes` were not
    acknowledged then; `round_trip_s` is what the kernel allows for one. `doubt` says who has doubts about it: this end,
    the other one, or both, as bits; while `is_shunned`, it is used only for what is on it already.
    """

    __slots__ = (
        *("_acked_bytes", "_carried", "_gap_s", "_is_waiting", "_silent_s", "_taken", "answers", "awaits"),
        *("doubt", "doubts_heard", "doubts_said", "is_shunned", "queue_s", "round_trip_s", "sock", "stands"),
        *("suspect", "waiting_bytes", "words"),
    )

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._acked_bytes = -1
        self._silent_s = self._gap_s = self.round_trip_s = self.queue_s = 0.0
        self.waiting_bytes = 0
        # Bytes acknowledged, for how long (us) some were on their way, and for how much of that there was room: as the
        # kernel said last, and as it was when somebody asked last.
        self._carried = self._taken = (0, 0, 0)
        self.awaits, self.answers, self.stands, self.suspect, self._is_waiting = True, False, False, False, False
        self.doubt = self.doubts_said = self.doubts_heard = 0
        self.is_shunned = False
        self.words: list[tuple[int, int]] = []

    def is_silent(self, elapsed_s: float, limit_s: float, round_trip_s: float = 0.0) -> bool:
        """True if bytes have been on their way for too long and none of them was acknowledged.

        Too long is `limit_s` of watched time; more if this connection has lately had longer gaps between
        acknowledgements, or if a round trip takes long, here or over this NIC (`round_trip_s`): then there is a queue.
        Not more if the kernel's own timer has rung since the last acknowledgement.

        This asks the kernel (TCP_INFO), not the peer: a peer that is busy elsewhere is not silent, and neither is one
        whose window is full. Bytes for which there is a window and that the kernel cannot send, as over an interface
        that is down, are on their way too. `elapsed_s` is how long ago the last call was.
        """
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError:
            return False
        if len(info) >= _INFO.size:
            values = _INFO.unpack_from(info)
            timeouts, segment, unacked, rtt_us, variation_us, acked_bytes, unsent, busy_us, full_us, window = values
            self._carried, self.waiting_bytes = (acked_bytes, busy_us, busy_us - full_us), unacked * segment + unsent
        elif len(info) >= _INFO_OLD.size:
            timeouts, _, unacked, rtt_us, variation_us, acked_bytes = _INFO_OLD.unpack_from(info)
            segment = unsent = window = 0
        else:
            return False
        self.round_trip_s = (rtt_us + 4 * variation_us) / 1e6
        self._gap_s *= max(0.0, 1 - elapsed_s / _GAP_MEMORY_S)
        self.awaits = bool(unacked or unsent)
        was_waiting, is_waiting = self._is_waiting, unacked or (unsent and min(unsent, segment) <= window)
        self._is_waiting = bool(is_waiting)
        if not is_waiting or acked_bytes != self._acked_bytes:
            if self._silent_s and acked_bytes != self._acked_bytes:
                self._gap_s = max(self._gap_s, self._silent_s + elapsed_s)
            self.answers = acked_bytes != self._acked_bytes
            self._acked_bytes, self._silent_s, self.stands, self.suspect = acked_bytes, 0.0, False, False
            return False
        # What was not on its way when the kernel was last asked has not been there all this time.
        self._silent_s += elapsed_s if was_waiting else min(elapsed_s, _FIRST_S)
        self.stands, self.answers = True, False
        suspect_s = limit_s / 2
        if not timeouts:
            way_s = max(self.round_trip_s, round_trip_s)
            limit_s = max(limit_s, _GAPS * self._gap_s, _ROUND_TRIPS * way_s)
            suspect_s = max(suspect_s, self._gap_s, way_s, self.queue_s)
        # A round trip that is found to be longer meanwhile is no sign of life.
        self.suspect |= self._silent_s >= suspect_s
        return self._silent_s >= limit_s

    def take_carried(self) -> tuple[int, float, float]:
        """Since the last call, by what the kernel has said: bytes acknowledged, for how long some were on their way,
        and for how much of that the other end had room; seconds."""
        (n_bytes, busy_us, free_us), before = self._carried, self._taken
        self._taken = self._carried
        return n_bytes - before[0], (busy_us - before[1]) / 1e6, (free_us - before[2]) / 1e6

    def close(self) -> None:
        """Closes the socket; what the kernel has taken still goes out."""
        self.sock.close()


# --- before the hello is over -----------------------------------------------------------------------------------------


class Dialing(Line):
    """A connection that this rank opens: connecting, then saying hello."""

    __slots__ = ("_caller", "_got", "established")

    def __init__(self, sock: socket.socket, address: tuple[str, int], caller: Caller) -> None:
        super().__init__(sock)
        self._caller, self._got, self.established = caller, b"", False
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, "connect")

    def greet(self) -> None:
        """The connection is there, or has failed: says hello. Raises OSError as connecting failed."""
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, "connect")
        if self.sock.send(self._caller.opening) != HELLO_BYTES:
            raise OSError(errno.ENOBUFS, "hello")
        self.established = True

    def advance(self) -> int | None:
        """Reads the answer; the session if the hello is over. Raises OSError or WireError."""
        if not _read_more(self, ANSWER_BYTES):
            return None
        self.sock.send(self._caller.take(self._got))
        return self._caller.session


class Answering(Line):
    """A connection that somebody has opened to this rank, who has until `deadline_s` to say who it is.

    `nic` is the NIC of this rank to which it came.
    """

    __slots__ = ("_doorman", "_got", "_greeted", "deadline_s", "nic")

    def __init__(self, sock: socket.socket, nic: int, doorman: Doorman, deadline_s: float) -> None:
        super().__init__(sock)
        self._doorman, self._got, self._greeted = doorman, b"", False
        self.nic, self.deadline_s = nic, deadline_s

    @property
    def hello(self) -> Hello | None:
        """What the caller says; not proved before `advance` has returned a session."""
        return self._doorman.hello

    def advance(self, check: Callable[[Hello], None]) -> int | None:
        """Reads the hello, which `check` may reject unanswered, and the proof; the session once it is proved.

        Raises OSError or WireError.
        """
        if not self._greeted:
            if _read_more(self, HELLO_BYTES):
                answer = self._doorman.take_hello(self._got)
                assert self._doorman.hello is not None
                check(self._doorman.hello)
                self.sock.send(answer)
                self._got, self._greeted = b"", True
            return None
        if not _read_more(self, PROOF_BYTES):
            return None
        self._doorman.take_proof(self._got)
        return self._doorman.session


def _read_more(line: Dialing | Answering, n_bytes: int) -> bool:
    """Reads towards exactly `n_bytes`; True when they are there."""
    try:
        data = line.sock.recv(n_bytes - len(line._got))
    except BlockingIOError:
        return False
    if not data:
        raise ConnectionResetError(errno.ECONNRESET, "closed during the hello")
    line._got += data
    return len(line._got) == n_bytes


# --- the sending end --------------------------------------------------------------------------------------------------


class Owner(Protocol):
    """The sending end of a channel, as far as a connection must know it."""

    k: int

    def is_stale(self, number: int, epoch: int) -> bool:
        """True if chunk `number` need not be sent any more: it is acknowledged, or its epoch is over."""
        ...


class Outgoing(Line):
    """The sender's end of a connection whose hello is over: writes chunks, reads states.

    The queue holds views, not bytes; the failover table bounds it by the window of each channel.
    """

    __slots__ = (
        *("_checksum", "_controls", "_count", "_pending", "_queue", "_urgent"),
        *("blocked", "is_registered_for_writing", "left", "rail", "session"),
    )

    def __init__(
        self, sock: socket.socket, rail: int, session: int, count: RailCount, checksum: Checksum | None
    ) -> None:
        super().__init__(sock)
        self.rail, self.session = rail, session
        self._count, self._checksum = count, checksum
        self._queue: deque[tuple[Owner, int, int, memoryview | None]] = deque()
        self._pending: deque[bytes | memoryview] = deque()
        self._controls = bytearray()
        self._urgent = bytearray()
        self.blocked = self.is_registered_for_writing = False
        self.left: bool | None = None

    def put(self, owner: Owner, number: int, epoch: int, view: memoryview | None) -> None:
        """Queues a chunk, or without a view the proposal of `epoch`."""
        self._queue.append((owner, number, epoch, view))

    def say(self, kind: int, number: int) -> None:
        """Queues a word, before all chunks that the socket does not have yet."""
        self._urgent += word_header(self.session, kind, number)

    def is_idle(self) -> bool:
        """True if nothing waits for the socket."""
        return not (self._queue or self._pending or self._urgent or self.blocked)

    def send_at_once(self, channel: int, number: int, epoch: int, copy: bytes) -> None:
        """Writes the reports that are queued and a short chunk, where nothing else waits; what the socket does not take
        waits, as `blocked` tells. Raises Broken."""
        crc = None if self._checksum is None else self._checksum(copy, 0)
        frame = data_header(self.session, epoch, channel, number, len(copy), crc) + copy
        if self._urgent:
            frame = bytes(self._urgent) + frame
            self._urgent.clear()
        n_bytes = self._write([frame])
        if n_bytes < len(frame):
            self._pending.append(memoryview(frame)[n_bytes:])
            self.blocked = True

    def _write(self, views: Sequence[bytes | memoryview]) -> int:
        """Bytes that the socket takes in one call. Raises Broken."""
        try:
            n_bytes = self.sock.send(views[0]) if len(views) == 1 else self.sock.sendmsg(views)
        except BlockingIOError:
            n_bytes = 0
        except OSError as error:
            raise Broken(error.strerror or str(error)) from error
        self._count.sent_bytes += n_bytes
        self.awaits = True
        return n_bytes

    def can_carry_reports(self) -> bool:
        """True if short messages, and nothing else, go out with the next `flush`."""
        if self.blocked or not self._queue:
            return False
        return all(view is not None and len(view) <= EAGER_BYTES for *_, view in self._queue)

    def report(self, channel: int, epoch: int, number: int, slots: int) -> None:
        """Queues a state of the opposite direction, before all chunks."""
        self._urgent += state_header(self.session, epoch, channel, number, slots)

    def take_back(self) -> list[tuple[Owner, int, int, memoryview | None]]:
        """Gives back what waits here and is not begun, as `put` was given it: it may go out elsewhere."""
        waiting = list(self._queue)
        self._queue.clear()
        return waiting

    def hold_little(self, little: bool) -> None:
        """Has the kernel take little ahead of what the NIC carries, so that the rest can still go elsewhere; or again
        all that it has room for."""
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES if little else _ANY_UNSENT)

    def holds(self, owner: Owner) -> bool:
        """True if something of this channel waits here for the socket."""
        return any(each[0] is owner for each in self._queue)

    def flush(self) -> None:
        """Writes what the socket takes; `blocked` tells whether something is left. Raises Broken."""
        pending = self._pending
        while True:
            self._refill()
            if not pending:
                self.blocked = False
                return
            left = self._write(pending)
            while pending and left >= len(pending[0]):
                left -= len(pending.popleft())
            if pending:
                pending[0] = memoryview(pending[0])[left:]
                self.blocked = True
                return

    def _refill(self) -> None:
        """Takes chunks from the queue, as many as one call writes; those that are stale fall away."""
        pending, queue, checksum = self._pending, self._queue, self._checksum
        if self._urgent:
            pending.append(bytes(self._urgent))
            self._urgent.clear()
        n_checked = 0
        # What is taken from the queue can go nowhere else.
        n_bytes = sum(map(len, pending))
        while queue and len(pending) < _VIEWS_AT_ONCE and n_checked < _CHECKED_SEND_BYTES and n_bytes < _BYTES_AT_ONCE:
            owner, number, epoch, view = queue.popleft()
            if view is None:
                pending.append(change_header(self.session, epoch, owner.k))
                continue
            if owner.is_stale(number, epoch):
                continue
            crc = None
            if checksum is not None:
                crc, n_checked = checksum(view, 0), n_checked + len(view)
            header = data_header(self.session, epoch, owner.k, number, len(view), crc)
            n_bytes += len(view)
            if len(view) > EAGER_BYTES:
                pending.append(header)
                pending.append(view)
            elif pending and type(pending[-1]) is bytes and len(pending[-1]) <= EAGER_BYTES:
                pending[-1] += header + view
            else:
                pending.append(header + view)

    def read(self) -> list[tuple[int, int, int, int]]:
        """The states that have come, as (channel, epoch, number, slots). A bye sets `left`; `words` are collected.

        Raises Broken.
        """
        try:
            data = self.sock.recv(_CONTROL_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Broken(error.strerror or str(error)) from error
        if not data:
            raise Broken("closed by the other end")
        self._count.received_bytes += len(data)
        controls = self._controls
        controls += data
        states: list[tuple[int, int, int, int]] = []
        n_whole = len(controls) // HEADER_BYTES
        for i in range(n_whole):
            header = bytes(controls[i * HEADER_BYTES : (i + 1) * HEADER_BYTES])
            try:
                kind, flags, epoch, channel, number, slots, _ = decode(header, self.session)
            except WireError as error:
                raise Broken(str(error), is_damage=True) from error
            if kind == STATE_FRAME:
                states.append((channel, epoch, number, slots))
            elif kind == BYE_FRAME:
                self.left = bool(flags & FAILED)
            elif kind in WORDS:
                self.words.append((kind, number))
            else:
                raise Broken(f"frame of kind {kind} to a sender", is_damage=True)
        del controls[: n_whole * HEADER_BYTES]
        return states

    def say_bye(self, failed: bool) -> None:
        """The last frame, if the socket takes it now and is not in the middle of a chunk; then nothing may follow."""
        if not self._pending:
            _send_last(self.sock, bye_header(self.session, failed))


# --- the receiving end ------------------------------------------------------------------------------------------------


class Reader(Protocol):
    """The receiving ends of the channels of a connection."""

    def begin(self, line: Incoming, epoch: int, channel: int, number: int, length: int) -> memoryview | None:
        """Where the chunk goes whose header has come; None if its bytes are not wanted. Raises Broken."""
        ...

    def take_at_once(self, line: Incoming, epoch: int, channel: int, number: int, chunk: memoryview) -> bool:
        """Takes a short chunk that is here as a whole, if it is next and nothing stands in its way; else False, and
        nothing is changed. The chunk's memory is the caller's."""
        ...

    def wants(self, epoch: int, channel: int, number: int) -> bool:
        """True if the chunk has not come in any other way meanwhile."""
        ...

    def complete(self, line: Incoming, epoch: int, channel: int, number: int, chunk: memoryview) -> None:
        """The chunk is whole in the memory that `begin` gave."""
        ...

    def change(self, line: Incoming, epoch: int, channel: int) -> None:
        """The proposal of an epoch has come."""
        ...

    def state_of(self, channel: int) -> tuple[int, int, int]:
        """(epoch, number, slots) to tell the sender."""
        ...

    def report(self, epoch: int, channel: int, number: int, slots: int) -> None:
        """The state of a channel of the opposite direction has come. Raises Broken."""
        ...


class Incoming(Line):
    """The receiver's end of a connection whose hello is over: reads chunks into their slots, writes states."""

    __slots__ = (
        *(
            "_at",
            "_checksum",
            "_chunk",
            "_count",
            "_crc",
            "_header",
            "_left",
            "_low_water",
            "_out",
            "_reader",
            "_slot",
            "_stage",
            "_states",
            "_sum",
            "_urgent",
        ),
        *("blocked", "is_registered_for_writing", "left", "rail", "session"),
    )

    def __init__(
        self,
        sock: socket.socket,
        rail: int,
        session: int,
        count: RailCount,
        checksum: Checksum | None,
        reader: Reader,
    ) -> None:
        super().__init__(sock)
        self.rail, self.session = rail, session
        self._count, self._checksum, self._reader = count, checksum, reader
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._stage = memoryview(bytearray(_STAGE_BYTES))
        # Of the header that comes, or of the chunk: how many bytes are there; then how many of the chunk are missing.
        self._at = self._left = 0
        self._slot: memoryview | None = None
        self._chunk = (0, 0, 0)
        self._crc: int | None = None
        self._sum, self._low_water = 0, 1
        self._states: dict[int, None] = {}
        self._out, self._urgent = bytearray(), bytearray()
        self.blocked = self.is_registered_for_writing = False
        self.left: bool | None = None

    def turn_away(self) -> None:
        """The chunk that is coming has come elsewhere: its other bytes go into the sink, and it is no event."""
        self._slot = None

    def read(self) -> None:
        """Reads what is there, up to a limit. Raises Broken.

        A chunk is read into its slot. What comes first, or is short, is read with what is around it, and copied.
        """
        self._read_up_to(_READ_BYTES_MAX)
        low_water = min(self._left, _LOW_WATER_BYTES) if self._left else 1
        if low_water != self._low_water:
            self._low_water = low_water
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

    def _read_up_to(self, budget: int) -> None:
        while budget > 0:
            n_bytes, wanted = self._read_chunk() if self._left else self._read_stage()
            budget -= n_bytes
            if n_bytes < wanted:
                return

    def _read_stage(self) -> tuple[int, int]:
        """Reads what begins with a header, or with the rest of one: how many bytes have come, and for how many there
        was room."""
        stage = self._stage
        n_bytes = self._received(self.sock.recv_into, stage)
        at = 0 if self._at else self._take_frames(stage, 0, n_bytes)
        if at < n_bytes:
            self._take(stage[at:n_bytes])
        return n_bytes, _STAGE_BYTES

    def _read_chunk(self) -> tuple[int, int]:
        """Reads the rest of a chunk, or a part of it, as `_read_stage`."""
        done = 0 if self._slot is None else len(self._slot) - self._left
        rest = _sink[: self._left] if self._slot is None else self._slot[done:]
        if self._crc is not None:
            rest = rest[:_CHECKED_READ_BYTES]
        # The header behind the chunk comes with its rest, in one call.
        into = [rest, self._header] if len(rest) == self._left else [rest]
        n_bytes = self._received(lambda each: self.sock.recvmsg_into(each)[0], into)
        into_chunk = min(n_bytes, len(rest))
        self._left -= into_chunk
        self._check(rest[:into_chunk])
        if n_bytes and not self._left:
            self._finish_chunk()
        self._at = n_bytes - into_chunk
        if self._at == HEADER_BYTES:
            self._at = 0
            self._take_header(self._decode(self._header, 0))
        return n_bytes, sum(map(len, into))

    def _received(self, receive: Callable[[Any], int], into: Any) -> int:
        """How many bytes `receive` has read; 0 if there are none now. Raises Broken."""
        try:
            n_bytes = receive(into)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise Broken(error.strerror or str(error)) from error
        if not n_bytes:
            raise Broken("closed by the other end")
        self._count.received_bytes += n_bytes
        return n_bytes

    def _take(self, data: memoryview) -> None:
        """Headers and chunks, or their parts, as they came."""
        at, end = 0, len(data)
        while at < end:
            if self._left:
                n_bytes = min(self._left, end - at)
                part = data[at : at + n_bytes]
                if self._slot is not None:
                    done = len(self._slot) - self._left
                    self._slot[done : done + n_bytes] = part
                self._left -= n_bytes
                self._check(part)
                if not self._left:
                    self._finish_chunk()
            elif not self._at and end - at >= HEADER_BYTES:
                at = self._take_frames(data, at, end)
                continue
            else:
                n_bytes = min(HEADER_BYTES - self._at, end - at)
                self._header[self._at : self._at + n_bytes] = data[at : at + n_bytes]
                self._at += n_bytes
                if self._at == HEADER_BYTES:
                    self._at = 0
                    self._take_header(self._decode(self._header, 0))
            at += n_bytes

    def _take_frames(self, data: memoryview, at: int, end: int) -> int:
        """Takes the frames from byte `at` of `data` to before `end`, as far as they are here as a whole and can be
        taken at once, then one header; where the next byte stands."""
        reader = self._reader
        while end - at >= HEADER_BYTES:
            try:
                header = decode(data, self.session, at)
            except WireError as error:
                raise Broken(str(error), is_damage=True) from error
            at += HEADER_BYTES
            kind, flags, epoch, channel, number, length, crc = header
            if kind == STATE_FRAME:
                reader.report(epoch, channel, number, length)
                continue
            if kind != DATA_FRAME or length > end - at:
                self._take_header(header)
                break
            chunk = data[at : at + length]
            is_right = not flags & CHECKED or self._checksum is None or self._checksum(chunk, 0) == crc
            if not is_right or not reader.take_at_once(self, epoch, channel, number, chunk):
                self._take_header(header)
                break
            at += length
        return at

    def _decode(self, data: memoryview, at: int) -> Header:
        try:
            return decode(data, self.session, at)
        except WireError as error:
            raise Broken(str(error), is_damage=True) from error

    def _check(self, part: memoryview) -> None:
        """Takes what has just come of a chunk into its checksum."""
        if self._crc is not None and self._checksum is not None and self._slot is not None:
            self._sum = self._checksum(part, self._sum)

    def _take_header(self, header: Header) -> None:
        kind, flags, epoch, channel, number, length, crc = header
        if kind == DATA_FRAME:
            self._slot = self._reader.begin(self, epoch, channel, number, length)
            self._chunk, self._left = (epoch, channel, number), length
            self._crc, self._sum = crc if flags & CHECKED else None, 0
            if not length:
                self._finish_chunk()
        elif kind == CHANGE_FRAME:
            self._reader.change(self, epoch, channel)
        elif kind == BYE_FRAME:
            self.left = bool(flags & FAILED)
        elif kind == STATE_FRAME:
            self._reader.report(epoch, channel, number, length)
        else:
            assert kind in WORDS, f"kind {kind}: decode has let it pass"
            self.words.append((kind, number))

    def _finish_chunk(self) -> None:
        slot, self._slot = self._slot, None
        if slot is None:
            return
        if self._crc is not None and self._checksum is not None and self._sum != self._crc:
            # The sender's view may change under a second copy once the first has been delivered.
            if self._reader.wants(*self._chunk):
                raise Broken("chunk: wrong checksum", is_damage=True)
            return
        self._reader.complete(self, *self._chunk, slot)

    def tell(self, channel: int) -> None:
        """The state of a channel has changed: it goes out with the next `flush`, as it is then."""
        self._states[channel] = None

    def take_states(self) -> list[int]:
        """The channels whose states wait: somebody else tells them."""
        channels = list(self._states)
        self._states.clear()
        return channels

    def say(self, kind: int, number: int) -> None:
        """Queues a word."""
        self._urgent += word_header(self.session, kind, number)

    def flush(self) -> None:
        """Writes the states that wait; `blocked` tells whether something is left. Raises Broken."""
        if not self._out:
            self._out += self._urgent
            self._urgent.clear()
            for channel in self._states:
                epoch, number, slots = self._reader.state_of(channel)
                self._out += state_header(self.session, epoch, channel, number, slots)
            self._states.clear()
        if self._out:
            try:
                n_bytes = self.sock.send(self._out)
            except BlockingIOError:
                n_bytes = 0
            except OSError as error:
                raise Broken(error.strerror or str(error)) from error
            self._count.sent_bytes += n_bytes
            self.awaits = True
            del self._out[:n_bytes]
        self.blocked = bool(self._out or self._urgent or self._states)

    def say_bye(self, failed: bool) -> None:
        """The last frame, if the socket takes it now; then nothing may follow."""
        if not self._out:
            _send_last(self.sock, bye_header(self.session, failed))


def _send_last(sock: socket.socket, frame: bytes) -> None:
    """Sends a frame and reads away what is there: a close with unread bytes would be a reset, and cut the frame off."""
    try:
        sock.send(frame)
        for _ in range(_READ_BYTES_MAX // len(_sink)):
            if not sock.recv_into(_sink):
                return
    except OSError:
        return
