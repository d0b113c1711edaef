"""The page of a rank: shared memory that it writes without a lock, and that any process of its user reads.

    offset 0    magic, and the length of the identity
    64          the identity of the rank, JSON, written once
    4 KiB       words of 8 bytes, each written by one store: numbers of the last moment
    8 KiB       the status, JSON, rewritten every 0.1 s or so under a sequence lock
    128 KiB     the ring: records of the flight recorder, 56 bytes each

A run that begins while no other is open is not written to the ring: it is in the words until it ends, and then one
record has its beginning and its end. The reader makes two of it. Where ranks wait for each other the processor has
forgotten all of this from run to run, so what counts is how little is called and touched.

The page of a rank that has been killed stays: what it wrote last can still be read. Nobody waits for anybody. A status
is whole if its sequence number is even, and the same before and after the read. A record is whole if the count of
records, which is stored after it, says so before the read, and if it has not been overwritten by the end of the read.
That holds where stores are seen in the order in which they were made, as on x86; elsewhere a record may be read torn.
"""

from __future__ import annotations

import heapq
import mmap
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from optcc.errors import CodecError, InputError
from optcc.runtime.observe.shared_file import new_shared_file

EVENTS = 4096
"""Records of a ring, unless told otherwise."""
_MAGIC = b"optccpg2"
_HEAD = struct.Struct("<8sII")
_IDENTITY_AT, _WORDS_AT, _STATUS_AT, RING_AT = 64, 1 << 12, 1 << 13, 1 << 17
STATUS_BYTES_MAX = RING_AT - _STATUS_AT
_IDENTITY_BYTES_MAX = _WORDS_AT - _IDENTITY_AT
_PAGE_BYTES_MAX = 1 << 28
RECORD = struct.Struct("@qdiiiii4xqq")
RECORD_BYTES = RECORD.size
"""A record: number from 1 on, seconds, kind, four small numbers, two long ones; see `recorder`."""
RUN_RECORD = struct.Struct("@qdiid8xqd")
"""The record of a whole run: number, end, `RUN`, plan, beginning, run, seconds waited."""
assert RUN_RECORD.size == RECORD_BYTES
BEGIN, END, RUN = 1, 2, 8
RECORDS, DONE, OPEN, PLAN, SINCE, BEGUN, LOCK, LENGTH, IS_DRIVEN = range(9)
"""The words: records written, collectives done, the run that is open, if any, with its plan and its beginning
(seconds), collectives begun, the status's sequence number and length, and whether the rank is inside the run-time."""
_WORDS = struct.Struct("@qqqqdqqqq")
RUN_BEGINS, RUN_ENDS = struct.Struct("@qqdq"), struct.Struct("@qqq")
"""What is stored at once, from `OPEN` and from `RECORDS` on."""
RECORDS_AT, OPEN_AT = _WORDS_AT + 8 * RECORDS, _WORDS_AT + 8 * OPEN
_READS_MAX = 100


class EventRecord(NamedTuple):
    """One record of the ring; what a to d, x and y are, `kind` says (`optcc.runtime.observe.recorder`)."""

    number: int
    at_s: float
    kind: int
    a: int
    b: int
    c: int
    d: int
    x: int
    y: int


class PageContents(NamedTuple):
    """What was read of a page: `records` oldest first."""

    identity: bytes
    status: bytes
    words: tuple[Any, ...]
    records: tuple[EventRecord, ...]


class PageWriter:
    """A rank's page with a ring of `n_events` records; in a file at `path`, or in memory of this process alone.

    `words` is written by index. Raises OSError if there is no room for the file, or it cannot be made.
    """

    def __init__(self, path: Path | None, identity: bytes, n_events: int = EVENTS) -> None:
        if n_events < 1:
            raise InputError(f"ring of {n_events} events: must have at least one")
        if len(identity) > _IDENTITY_BYTES_MAX:
            raise InputError(f"identity of {len(identity)} B: must be at most {_IDENTITY_BYTES_MAX} B")
        self.path, self.n_events = path, n_events
        n_bytes = RING_AT + n_events * RECORD.size
        if path is None:
            self._take(mmap.mmap(-1, n_bytes), identity)
        else:
            with new_shared_file(path, n_bytes) as memory:
                self._take(memory, identity)

    def _take(self, memory: mmap.mmap, identity: bytes) -> None:
        """The page is in this memory, which a reader may see from now on."""
        self.memory = memory
        self._view = memoryview(memory)
        self.words = self._view[_WORDS_AT:_STATUS_AT].cast("q")
        memory[_IDENTITY_AT : _IDENTITY_AT + len(identity)] = identity
        _HEAD.pack_into(memory, 0, _MAGIC, len(identity), self.n_events)

    def recorder(self) -> Callable[[float, int, int, int, int, int, int, int], None]:
        """What writes a record: (seconds, kind, a, b, c, d, x, y). It has no attributes to look up."""
        pack_into, memory, words, limit = RECORD.pack_into, self.memory, self.words, self.n_events

        def write(at_s: float, kind: int, a: int, b: int, c: int, d: int, x: int, y: int) -> None:
            count = words[0]
            pack_into(memory, RING_AT + count % limit * RECORD_BYTES, count + 1, at_s, kind, a, b, c, d, x, y)
            words[0] = count + 1

        return write

    def publish(self, status: bytes) -> None:
        """Replaces the status, which is at most `STATUS_BYTES_MAX` long."""
        assert len(status) <= STATUS_BYTES_MAX, f"status of {len(status)} B"
        words = self.words
        words[LOCK] += 1
        self.memory[_STATUS_AT : _STATUS_AT + len(status)] = status
        words[LENGTH] = len(status)
        words[LOCK] += 1

    def contents(self) -> PageContents:
        """What a reader would see now."""
        return read_memory(self.memory)

    def close(self, *, keep: bool) -> None:
        """Gives the memory back; a file stays if it is to be kept."""
        if self.path is not None and not keep:
            with suppress(OSError):
                self.path.unlink()
        self.path = None


def read_page(path: Path) -> PageContents:
    """The page in a file, which its rank may be writing. Raises CodecError if it is none, OSError if it is not there.

    A file of another user is none either: only its owner is believed.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        if status.st_uid != os.geteuid():
            raise CodecError(f"page {path}: belongs to user {status.st_uid}: must be this user's")
        if not RING_AT < status.st_size <= _PAGE_BYTES_MAX:
            raise CodecError(f"page {path}: {status.st_size} B: must be a rank's page")
        with mmap.mmap(file, status.st_size, access=mmap.ACCESS_READ) as memory:
            return read_memory(memory)
    finally:
        os.close(file)


def read_memory(memory: mmap.mmap) -> PageContents:
    """What is in the memory of a page. Raises CodecError if it is none, or if its status never is whole."""
    magic, identity_bytes, n_events = _HEAD.unpack_from(memory)
    if magic != _MAGIC or identity_bytes > _IDENTITY_BYTES_MAX:
        raise CodecError(f"page: begins with {magic!r}: must be a rank's page")
    if len(memory) < RING_AT + n_events * RECORD.size:
        raise CodecError(f"page: {len(memory)} B: must hold {n_events} events")
    identity = memory[_IDENTITY_AT : _IDENTITY_AT + identity_bytes]
    # What is open now may end before the ring is read, and is in it then.
    words = _read_words(memory)
    before = words[RECORDS]
    ring = memory[RING_AT : RING_AT + n_events * RECORD.size]
    (after,) = struct.unpack_from("<q", memory, _WORDS_AT)
    # One more than are counted may be under way.
    oldest = max(after + 1 - n_events, 0)
    records: list[EventRecord] = []
    begun: list[EventRecord] = []
    for count in range(oldest, before):
        at = count % n_events * RECORD_BYTES
        record = EventRecord(*RECORD.unpack_from(ring, at))
        if record.number == count + 1 and record.kind == RUN:
            number, end_s, _, plan, begin_s, run, waited_s = RUN_RECORD.unpack_from(ring, at)
            begun.append(EventRecord(number, begin_s, BEGIN, plan, 0, 0, 0, run, 0))
            records.append(EventRecord(number, end_s, END, plan, 0, 0, 0, run, int(waited_s * 1e9)))
        elif record.number == count + 1:
            records.append(record)
    # Not if its rank was killed between the stores of its end.
    if words[OPEN] and all(each.x != words[OPEN] for each in begun):
        begun.append(EventRecord(before + 1, words[SINCE], BEGIN, words[PLAN], 0, 0, 0, words[OPEN], 0))
    merged = tuple(heapq.merge(begun, records, key=lambda each: each.at_s)) if begun else tuple(records)
    return PageContents(identity, _read_status(memory), words, merged)


def _read_words(memory: mmap.mmap) -> tuple[Any, ...]:
    """The words, with a run that is open as a whole: those of a rank that was killed between two stores if it never
    is."""
    words: tuple[Any, ...] = ()
    for _ in range(_READS_MAX):
        before, words = words, _WORDS.unpack_from(memory, _WORDS_AT)
        if before and before[DONE : BEGUN + 1] == words[DONE : BEGUN + 1]:
            break
    return words


def _read_status(memory: mmap.mmap) -> bytes:
    """The status, once it is whole; what is there after many tries is of a rank that was killed while it wrote."""
    data = b""
    for _ in range(_READS_MAX):
        *_, lock, length, _ = _WORDS.unpack_from(memory, _WORDS_AT)
        data = memory[_STATUS_AT : _STATUS_AT + min(max(length, 0), STATUS_BYTES_MAX)]
        again = _WORDS.unpack_from(memory, _WORDS_AT)[LOCK]
        if lock == again and not lock & 1:
            return data
    return b""
