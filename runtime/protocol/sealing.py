"""Frames of a connection under a message authentication code: what comes is read only after its tag was right. No I/O.

The parties are the two ends of a connection whose handshake (`hello`) is over and who were both told to authenticate
it. Each direction is a sequence of records, and the frames of `frames` are their content, cut anywhere:

    length u32, crc of length and number u32, content, tag (16 bytes)

all little-endian. The tag is BLAKE2b under the key of this direction over the number of the record, its first eight
bytes and its content. Invariants, and what they refuse:

    the key comes of the secret and of both nonces     a record of another connection, or of another job
    each direction has a key of its own                a record that is reflected to who sent it
    records are numbered from 0, and the number is
    not sent but counted at both ends                  one that is repeated, left out, or in another place
    bytes go to the parser only after the tag          delivering any part of what was changed or cut

The first record that is not the next one breaks the connection as damage (`Broken.is_damage`): the failover table sends
again what was out on it, over another rail or a new connection with new keys. The end of a direction is a frame (`bye`)
and as such authenticated; a connection that is closed without it counts as broken. The crc finds an accidental error in
a length before it makes the receiver wait for bytes that do not come; who changes it on purpose delays a record, as who
holds back its bytes does, and no tag prevents that.

Content is hashed from a copy: the view of a chunk may change while a second copy of it is under way.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator, Sequence

from optcc.runtime.protocol.connection import Broken, Reader, RecvConnection, SendConnection, View
from optcc.runtime.protocol.frames import Checksum, crc32
from optcc.runtime.protocol.hello import Keys
from optcc.runtime.protocol.settings import RailCount

TAG_BYTES = 16
CONTENT_BYTES_MAX = 1 << 16
"""Content of a record at most: it stays in the processor's cache between the hash, the copy and the socket."""
_LENGTH = struct.Struct("<I")
_START = struct.Struct("<II")
_NUMBER = struct.Struct("<Q")
START_BYTES = _START.size
SEAL_BYTES = START_BYTES + TAG_BYTES
"""What a record adds to its content."""
RECORD_BYTES_MAX = CONTENT_BYTES_MAX + SEAL_BYTES


def _crc(length: int, number: int) -> int:
    return crc32(_LENGTH.pack(length) + _NUMBER.pack(number), 0)


class _Tags:
    """The tags of one direction, in order."""

    __slots__ = ("_keyed", "number")

    def __init__(self, key: bytes) -> None:
        self._keyed, self.number = hashlib.blake2b(key=key, digest_size=TAG_BYTES), 0

    def take(self, start: bytes | memoryview, content: bytes | memoryview) -> bytes:
        """The tag of the next record."""
        keyed = self._keyed.copy()
        keyed.update(_NUMBER.pack(self.number) + start)
        keyed.update(content)
        self.number += 1
        return keyed.digest()


class Sealer:
    """Makes the records of one direction.

    >>> opener, sealer = Opener(bytes(32)), Sealer(bytes(32))
    >>> opener.give(sealer.seal(b"some ") + sealer.seal(b"bytes"))
    [b'some ', b'bytes']
    """

    __slots__ = ("_tags",)

    def __init__(self, key: bytes) -> None:
        self._tags = _Tags(key)

    def seal(self, content: bytes) -> bytes:
        """The next record."""
        assert 0 < len(content) <= CONTENT_BYTES_MAX
        start = _START.pack(len(content), _crc(len(content), self._tags.number))
        return b"".join((start, content, self._tags.take(start, content)))

    def seal_all(self, content: bytes) -> bytes:
        """The next records, as many as it takes."""
        parts = range(0, len(content), CONTENT_BYTES_MAX)
        return b"".join(self.seal(content[at : at + CONTENT_BYTES_MAX]) for at in parts)


class Opener:
    """Reads the records of one direction: the driver fills `room`, and `filled` yields the content of those that are
    whole and right. `missing` bytes at least must come before there is another one."""

    __slots__ = ("_here", "_tags", "_view", "missing")

    def __init__(self, key: bytes) -> None:
        self._tags, self._here, self.missing = _Tags(key), 0, START_BYTES + 1
        self._view = memoryview(bytearray(RECORD_BYTES_MAX))

    @property
    def room(self) -> memoryview:
        """Where the next bytes go; never empty."""
        return self._view[self._here :]

    def filled(self, n_bytes: int) -> Iterator[memoryview]:
        """The contents that are whole once so many bytes of `room` were filled; each is valid until the next.

        Raises Broken.
        """
        view, at = self._view, 0
        end = self._here + n_bytes
        while True:
            if end - at < START_BYTES:
                self.missing = START_BYTES - (end - at)
                break
            length, crc = _START.unpack_from(view, at)
            if crc != _crc(length, self._tags.number) or not 0 < length <= CONTENT_BYTES_MAX:
                raise Broken("record: damaged, or not the next one", is_damage=True)
            size = length + SEAL_BYTES
            if end - at < size:
                self.missing = size - (end - at)
                break
            content = view[at + START_BYTES : at + START_BYTES + length]
            tag = self._tags.take(view[at : at + START_BYTES], content)
            if not hmac.compare_digest(tag, view[at + START_BYTES + length : at + size]):
                raise Broken("record: wrong authentication tag", is_damage=True)
            at += size
            yield content
        if at:
            view[: end - at] = bytes(view[at:end])
        self._here = end - at

    def give(self, data: bytes) -> list[bytes]:
        """The contents that are whole once these bytes have come. Raises Broken."""
        contents, rest = [], memoryview(data)
        while rest:
            n_bytes = min(len(rest), len(self.room))
            self.room[:n_bytes] = rest[:n_bytes]
            contents += [bytes(content) for content in self.filled(n_bytes)]
            rest = rest[n_bytes:]
        return contents


def _content_of(views: Sequence[View]) -> bytes:
    """The first bytes of what is to be written, as many as a record takes."""
    parts: list[View] = []
    n_free = CONTENT_BYTES_MAX
    for view in views:
        parts.append(view if len(view) <= n_free else memoryview(view)[:n_free])
        n_free -= len(parts[-1])
        if not n_free:
            break
    return b"".join(parts)


class SealedSendConnection(SendConnection):
    """A `SendConnection` whose frames travel in records, both ways."""

    __slots__ = ("_opener", "_sealed", "_sealer")

    def __init__(
        self, peer: int, rail: int, session: int, count: RailCount, checksum: Checksum | None, keys: Keys
    ) -> None:
        super().__init__(peer, rail, session, count, checksum)
        self._sealer, self._opener = Sealer(keys.of_caller), Opener(keys.of_listener)
        # What of the records that are begun waits for the socket.
        self._sealed = memoryview(b"")

    def put_frame(self, frame: bytes) -> None:
        """See `SendConnection`: the handshake is not over for the other end, so there is no record around it."""
        assert not self._sealed, "it comes before all records"
        self._sealed = memoryview(frame)

    def is_idle(self) -> bool:
        """See `SendConnection`."""
        return not self._sealed and super().is_idle()

    def views(self) -> Sequence[View]:
        """See `SendConnection`."""
        if not self._sealed and (views := super().views()):
            content = _content_of(views)
            super().written(len(content))
            self._count.sent_bytes -= len(content)
            self._sealed = memoryview(self._sealer.seal(content))
            self.blocked = False
        return (self._sealed,) if self._sealed else ()

    def written(self, n_bytes: int) -> bool:
        """See `SendConnection`."""
        self._count.sent_bytes += n_bytes
        self.awaits = True
        self._sealed = self._sealed[n_bytes:]
        self.blocked = bool(self._sealed)
        return not self.blocked and bool(self._pending or self._queue or self._urgent)

    def received(self, data: bytes) -> list[tuple[int, int, int, int]]:
        """See `SendConnection`."""
        contents = self._opener.give(data)
        self._count.received_bytes += len(data) - sum(map(len, contents))
        return [state for content in contents for state in super(SealedSendConnection, self).received(content)]

    def bye(self, failed: bool, states: bytes = b"") -> bytes:
        """See `SendConnection`."""
        return b"" if self._sealed else self._sealer.seal_all(super().bye(failed, states))


class SealedRecvConnection(RecvConnection):
    """A `RecvConnection` whose frames travel in records, both ways."""

    __slots__ = ("_opener", "_sealed", "_sealer")

    def __init__(
        self,
        peer: int,
        rail: int,
        session: int,
        count: RailCount,
        checksum: Checksum | None,
        reader: Reader,
        keys: Keys,
    ) -> None:
        super().__init__(peer, rail, session, count, checksum, reader)
        self._sealer, self._opener = Sealer(keys.of_listener), Opener(keys.of_caller)
        self._sealed = memoryview(b"")

    def buffers(self) -> list[memoryview]:
        """See `RecvConnection`: the room for a record, of which nothing is read before it is whole."""
        room = self._opener.room
        self.offered_bytes = len(room)
        return [room]

    def received(self, n_bytes: int) -> None:
        """See `RecvConnection`."""
        self._count.received_bytes += n_bytes
        for content in self._opener.filled(n_bytes):
            self._take(content)
        self.low_water = self._opener.missing

    def views(self) -> Sequence[View]:
        """See `RecvConnection`."""
        if not self._sealed and (views := super().views()):
            content = _content_of(views)
            super().written(len(content))
            self._count.sent_bytes -= len(content)
            self._sealed = memoryview(self._sealer.seal(content))
            self.blocked = False
        return (self._sealed,) if self._sealed else ()

    def written(self, n_bytes: int) -> bool:
        """See `RecvConnection`."""
        self._count.sent_bytes += n_bytes
        self.awaits = True
        self._sealed = self._sealed[n_bytes:]
        self.blocked = bool(self._sealed)
        return not self.blocked and bool(self._out or self._urgent or self.states)

    def bye(self, failed: bool, states: bytes = b"") -> bytes:
        """See `RecvConnection`."""
        return b"" if self._sealed else self._sealer.seal_all(super().bye(failed, states))
