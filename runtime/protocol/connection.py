"""The two ends of an established connection: bytes in, frames out, and what waits to be sent. No I/O.

The driver asks for `views()` to write and says how many bytes were `written`; it asks a `RecvConnection` for
`buffers()` to read into and says how many bytes were `received`, and gives a `SendConnection` what it has read. The
bytes of a chunk go from the posted view to the wire and from the wire into the posted view without a copy in between.
Nothing here knows the failover table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from optcc.runtime.protocol.frames import (
    BYE_FRAME,
    CHANGE_FRAME,
    CHECKED,
    CONTROL_FRAMES,
    DATA_FRAME,
    DATA_STATE_BYTES,
    DATA_STATE_FRAME,
    EAGER_BYTES,
    FAILED,
    HEADER_BYTES,
    PAD_FRAME,
    STATE_FRAME,
    Checksum,
    Header,
    State,
    WireError,
    bye_header,
    change_header,
    control_header,
    data_header,
    data_state_header,
    decode,
    decode_data_state,
    pad_header,
    state_header,
)
from optcc.runtime.protocol.liveness import Connection
from optcc.runtime.protocol.settings import RailCount

_VIEWS_AT_ONCE, _BYTES_AT_ONCE = 8, 1 << 19
_CHECKED_SEND_BYTES = 1 << 20
_CHECKED_READ_BYTES = 1 << 18
"""With checksums, bytes are written and read in parts that fit the processor's cache."""
_LOW_WATER_BYTES = 1 << 20
"""In the middle of a chunk the driver need not wake for less than this."""
_STAGE_BYTES = EAGER_BYTES + 4 * HEADER_BYTES

_sink = memoryview(bytearray(1 << 18))
"""Destination of bytes that are discarded; its content means nothing."""

_PAD_BYTES = 1 << 16
_NO_CHUNK = (0, -1, 0)
_pad = memoryview(bytes(_PAD_BYTES))

View = bytes | bytearray | memoryview


class Broken(Exception):
    """The connection is closed or reset (`is_ended`), silent, or what came over it is damaged (`is_damage`)."""

    def __init__(self, why: str, *, is_damage: bool = False, is_ended: bool = False) -> None:
        super().__init__(why)
        self.is_damage, self.is_ended = is_damage, is_ended


def padding(session: int, n_bytes: int) -> bytes:
    """So many bytes that mean nothing, in frames."""
    n_whole, n_rest = divmod(n_bytes, _PAD_BYTES)
    return (pad_header(session, _PAD_BYTES) + _pad) * n_whole + pad_header(session, n_rest) + _pad[:n_rest]


# --- the sending end --------------------------------------------------------------------------------------------------


class Owner(Protocol):
    """The sending end of a channel, as far as a connection must know it."""

    k: int

    def is_stale(self, number: int, epoch: int) -> bool:
        """True if chunk `number` need not be sent any more: it is acknowledged, or its epoch is over."""
        ...


class SendConnection(Connection):
    """The sender's end, at NIC `nic` of this rank: writes chunks, reads states.

    The queue holds views, not bytes; the failover table bounds it by the window of each channel. `blocked`: the socket
    was full. `words` are control frames that have come, `left` whether the peer said bye because of a failure.
    `holds_little`: the kernel should buffer little beyond what is in flight (the driver's to arrange).
    """

    __slots__ = (
        *("_checksum", "_controls", "_count", "_pending", "_queue", "_skip", "_urgent"),
        *("blocked", "holds_little", "left", "nic", "peer", "rail", "session", "words"),
    )

    def __init__(self, peer: int, rail: int, session: int, count: RailCount, checksum: Checksum | None) -> None:
        super().__init__()
        self.peer, self.rail, self.session, self.nic = peer, rail, session, -1
        self._count, self._checksum = count, checksum
        self._queue: deque[tuple[Owner, int, int, memoryview | None]] = deque()
        self._pending: deque[View] = deque()
        self._controls = bytearray()
        self._urgent = bytearray()
        # Bytes of padding that are still to come.
        self._skip = 0
        self.blocked = self.holds_little = False
        self.words: list[tuple[int, int]] = []
        self.left: bool | None = None

    def put(self, owner: Owner, number: int, epoch: int, view: memoryview | None) -> None:
        """Queues a chunk, or without a view the proposal of `epoch`."""
        self._queue.append((owner, number, epoch, view))

    def say(self, kind: int, number: int) -> None:
        """Queues a word, before all chunks that the socket does not have yet."""
        self._urgent += control_header(self.session, kind, number)

    def pad(self, n_bytes: int) -> None:
        """Queues padding, before all chunks that the socket does not have yet."""
        self._urgent += padding(self.session, n_bytes)

    def is_idle(self) -> bool:
        """True if nothing waits for the socket."""
        return not (self._queue or self._pending or self._urgent or self.blocked)

    def put_frame(self, frame: bytes) -> None:
        """Queues bytes that go before all chunks: the last message of the handshake."""
        self._pending.append(frame)

    def put_eager(self, channel: int, number: int, epoch: int, copy: bytes, state: State | None) -> None:
        """Queues an eager message with the reports that wait, on an idle connection; `state` goes in its header."""
        crc = None if self._checksum is None else self._checksum(copy, 0)
        frame: bytes | bytearray
        if state is None:
            frame = data_header(self.session, epoch, channel, number, len(copy), crc) + copy
        else:
            frame = data_state_header(self.session, epoch, channel, number, len(copy), crc, state) + copy
        if self._urgent:
            self._urgent += frame
            frame, self._urgent = self._urgent, bytearray()
        self._pending.append(frame)

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

    def waiting(self) -> int:
        """Bytes of chunks that wait here for the socket."""
        return sum(len(view) for *_, view in self._queue if view is not None) + sum(map(len, self._pending))

    def holds(self, owner: Owner) -> bool:
        """True if something of this channel waits here for the socket."""
        return any(each[0] is owner for each in self._queue)

    def views(self) -> Sequence[View]:
        """What to write next; empty if nothing waits."""
        if self._queue or self._urgent:
            self._refill()
        if not self._pending:
            self.blocked = False
        return self._pending

    def written(self, n_bytes: int) -> bool:
        """So many bytes of `views` were written; True if that was all of them and more waits."""
        pending = self._pending
        self._count.sent_bytes += n_bytes
        self.awaits = True
        if len(pending) == 1 and n_bytes == len(pending[0]):
            pending.clear()
            self.blocked = False
            return bool(self._queue or self._urgent)
        while pending:
            n_first = len(pending[0])
            if n_bytes < n_first:
                if n_bytes:
                    pending[0] = memoryview(pending[0])[n_bytes:]
                self.blocked = True
                return False
            n_bytes -= n_first
            pending.popleft()
        self.blocked = False
        return bool(self._queue or self._urgent)

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

    def received(self, data: bytes) -> list[tuple[int, int, int, int]]:
        """The states in what has come, as (channel, epoch, number, slots). A bye sets `left`; `words` are collected.

        Raises Broken.
        """
        self._count.received_bytes += len(data)
        controls = self._controls
        if self._skip:
            n_skipped = min(self._skip, len(data))
            self._skip -= n_skipped
            data = data[n_skipped:]
        controls += data
        states: list[tuple[int, int, int, int]] = []
        at = 0
        while len(controls) - at >= HEADER_BYTES:
            try:
                kind, flags, epoch, channel, number, slots, _ = decode(controls, self.session, at)
            except WireError as error:
                raise Broken(str(error), is_damage=True) from error
            at += HEADER_BYTES
            if kind == STATE_FRAME:
                states.append((channel, epoch, number, slots))
            elif kind == BYE_FRAME:
                self.left = bool(flags & FAILED)
            elif kind in CONTROL_FRAMES:
                self.words.append((kind, number))
            elif kind == PAD_FRAME:
                n_here = min(slots, len(controls) - at)
                at, self._skip = at + n_here, slots - n_here
                self.n_padded += slots
            else:
                raise Broken(f"frame of kind {kind} to a sender", is_damage=True)
        del controls[:at]
        return states

    def bye(self, failed: bool, states: bytes = b"") -> bytes:
        """The last frame, behind those of `states`; empty in the middle of a chunk, where it cannot be sent."""
        return b"" if self._pending else states + bye_header(self.session, failed)


# --- the receiving end ------------------------------------------------------------------------------------------------


class Reader(Protocol):
    """The receiving ends of the channels of a connection."""

    def begin(
        self, connection: RecvConnection, epoch: int, channel: int, number: int, length: int
    ) -> memoryview | None:
        """Where the chunk goes whose header has come; None if its bytes are not wanted. Raises Broken."""
        ...

    def take_eager(self, connection: RecvConnection, epoch: int, channel: int, number: int, chunk: memoryview) -> bool:
        """Takes a short chunk that is here as a whole, if it is next and nothing stands in its way; else False, and
        nothing is changed. The chunk's memory is the caller's."""
        ...

    def wants(self, epoch: int, channel: int, number: int) -> bool:
        """True if the chunk has not come in any other way meanwhile."""
        ...

    def discard(self, connection: RecvConnection, channel: int, number: int) -> None:
        """The chunk is whole and damaged, and not wanted any more."""
        ...

    def complete(self, connection: RecvConnection, epoch: int, channel: int, number: int, chunk: memoryview) -> None:
        """The chunk is whole in the memory that `begin` gave."""
        ...

    def change(self, connection: RecvConnection, epoch: int, channel: int) -> None:
        """The proposal of an epoch has come."""
        ...

    def state_of(self, channel: int) -> State:
        """The state to tell the sender."""
        ...

    def report(self, channel: int, epoch: int, number: int, slots: int) -> None:
        """The state of a channel of the opposite direction has come. Raises Broken."""
        ...


class RecvConnection(Connection):
    """The receiver's end, at NIC `nic` of this rank: reads chunks into their slots, writes states.

    `virtual` is a virtual rail of the failover table that stands for this one. `low_water`: how many bytes must
    have come before it is worth reading. `blocked`, `words`, `left`: as of a `SendConnection`.
    `states` are the channels whose state has changed: it goes out with the next `flush`, as it is then.
    """

    __slots__ = (
        *("_at", "_checksum", "_chunk", "_count", "_crc", "_header", "_left", "_out", "_reader", "_rest", "_slot"),
        *("_first", "_stage", "_sum", "_urgent", "states"),
        *("blocked", "left", "low_water", "nic", "offered_bytes", "peer", "rail", "session", "virtual", "words"),
    )

    def __init__(
        self, peer: int, rail: int, session: int, count: RailCount, checksum: Checksum | None, reader: Reader
    ) -> None:
        super().__init__()
        self.peer, self.rail, self.session, self.nic, self.virtual = peer, rail, session, -1, 0
        self._count, self._checksum, self._reader = count, checksum, reader
        self._header = memoryview(bytearray(DATA_STATE_BYTES))
        self._first = self._header[:HEADER_BYTES]
        self._stage = memoryview(bytearray(_STAGE_BYTES))
        # Bytes of the header that have come; bytes of the chunk that are missing.
        self._at = self._left = 0
        # What `buffers` has offered of the chunk, None for the stage; how many bytes in all.
        self._rest: memoryview | None = None
        self.offered_bytes = 0
        self._slot: memoryview | None = None
        self._chunk = (0, 0, 0)
        self._crc: int | None = None
        self._sum, self.low_water = 0, 1
        self.states: dict[int, None] = {}
        self._out, self._urgent = bytearray(), bytearray()
        self.blocked = False
        self.words: list[tuple[int, int]] = []
        self.left: bool | None = None

    def turn_away(self) -> None:
        """The chunk that is coming has come elsewhere: its other bytes go into the sink, and it is no event."""
        self._slot = None

    def buffers(self) -> list[memoryview]:
        """Where the next bytes go, `offered_bytes` in all: the slot of the chunk that is coming and room for the header
        behind it, or else a stage for headers and short messages."""
        if not self._left:
            self._rest, self.offered_bytes = None, _STAGE_BYTES
            return [self._stage]
        done = 0 if self._slot is None else len(self._slot) - self._left
        rest = _sink[: self._left] if self._slot is None else self._slot[done:]
        if self._crc is not None:
            rest = rest[:_CHECKED_READ_BYTES]
        self._rest, self.offered_bytes = rest, len(rest)
        if len(rest) < self._left:
            return [rest]
        self.offered_bytes += HEADER_BYTES
        return [rest, self._first]

    def received(self, n_bytes: int) -> None:
        """So many bytes of `buffers` were filled. Raises Broken."""
        self._count.received_bytes += n_bytes
        rest = self._rest
        if rest is None:
            stage = self._stage
            at = 0 if self._at else self._take_frames(stage, 0, n_bytes)
            if at < n_bytes:
                self._take(stage[at:n_bytes])
        else:
            into_chunk = min(n_bytes, len(rest))
            self._left -= into_chunk
            self._check(rest[:into_chunk])
            if n_bytes and not self._left:
                self._finish_chunk()
            self._note_part_of_header(n_bytes - into_chunk)
        self.low_water = min(self._left, _LOW_WATER_BYTES) if self._left else 1

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
                at += n_bytes
                continue
            after = at if self._at else self._take_frames(data, at, end)
            if after == at:
                # Its first byte says how long a header is.
                n_bytes = min((HEADER_BYTES if self._at < HEADER_BYTES else DATA_STATE_BYTES) - self._at, end - at)
                self._header[self._at : self._at + n_bytes] = data[at : at + n_bytes]
                self._note_part_of_header(n_bytes)
                after = at + n_bytes
            at = after

    def _note_part_of_header(self, n_bytes: int) -> None:
        """So many bytes more of a header have come; takes it if it is whole."""
        self._at += n_bytes
        is_long = self._at >= HEADER_BYTES and self._header[0] == DATA_STATE_FRAME
        if self._at < (DATA_STATE_BYTES if is_long else HEADER_BYTES):
            return
        self._at = 0
        try:
            if is_long:
                header, state = decode_data_state(self._header, self.session)
                self._reader.report(*state)
            else:
                header = decode(self._header, self.session)
        except WireError as error:
            raise Broken(str(error), is_damage=True) from error
        self._take_header(header)

    def _take_frames(self, data: memoryview, at: int, end: int) -> int:
        """Takes the frames from byte `at` of `data` to before `end`, as far as they are here as a whole and can be
        taken at once, then one header; where the next byte stands."""
        reader = self._reader
        while end - at >= HEADER_BYTES:
            try:
                if data[at] == DATA_STATE_FRAME:
                    if end - at < DATA_STATE_BYTES:
                        break
                    header, state = decode_data_state(data, self.session, at)
                    at += DATA_STATE_BYTES
                    reader.report(*state)
                else:
                    header = decode(data, self.session, at)
                    at += HEADER_BYTES
            except WireError as error:
                raise Broken(str(error), is_damage=True) from error
            kind, flags, epoch, channel, number, length, crc = header
            if kind == STATE_FRAME:
                reader.report(channel, epoch, number, length)
                continue
            if kind != DATA_FRAME or length > end - at:
                self._take_header(header)
                break
            chunk = data[at : at + length]
            is_right = not flags & CHECKED or self._checksum is None or self._checksum(chunk, 0) == crc
            if not is_right or not reader.take_eager(self, epoch, channel, number, chunk):
                self._take_header(header)
                break
            at += length
        return at

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
            self._reader.report(channel, epoch, number, length)
        elif kind == PAD_FRAME:
            self._slot, self._crc, self._chunk, self._left = None, None, _NO_CHUNK, length
            self.n_padded += length
        else:
            assert kind in CONTROL_FRAMES, f"kind {kind}: decode has let it pass"
            self.words.append((kind, number))

    def _finish_chunk(self) -> None:
        slot, self._slot = self._slot, None
        if slot is None:
            return
        if self._crc is not None and self._checksum is not None and self._sum != self._crc:
            # The sender's view may change under a second copy once the first has been delivered.
            if self._reader.wants(*self._chunk):
                raise Broken("chunk: wrong checksum", is_damage=True)
            self._reader.discard(self, *self._chunk[1:])
            return
        self._reader.complete(self, *self._chunk, slot)

    def say(self, kind: int, number: int) -> None:
        """Queues a word."""
        self._urgent += control_header(self.session, kind, number)

    def pad(self, n_bytes: int) -> None:
        """Queues padding."""
        self._urgent += padding(self.session, n_bytes)

    def views(self) -> Sequence[View]:
        """What to write next: the states and control frames that wait; empty if there are none."""
        if not self._out:
            self._out += self._urgent
            self._urgent.clear()
            for channel in self.states:
                k, epoch, number, slots = self._reader.state_of(channel)
                self._out += state_header(self.session, epoch, k, number, slots)
            self.states.clear()
        self.blocked = False
        return (self._out,) if self._out else ()

    def written(self, n_bytes: int) -> bool:
        """So many bytes of `views` were written; True if that was all of them and more waits."""
        self._count.sent_bytes += n_bytes
        self.awaits = True
        del self._out[:n_bytes]
        self.blocked = bool(self._out)
        return not self._out and bool(self._urgent or self.states)

    def bye(self, failed: bool, states: bytes = b"") -> bytes:
        """The last frame, behind those of `states`; empty where it cannot be sent."""
        return b"" if self._out else states + bye_header(self.session, failed)
