"""The page of a rank: shared memory that it writes without a lock, and that any process of its user reads.

    offset 0    magic, and the length of the identity
    64          the identity of the rank, JSON, written once
    4 KiB       words of 8 bytes, each written by one store: numbers of the last moment
    8 KiB       the status, JSON, rewritten every 0.1 s or so under a sequence lock
    128 KiB     the ring: records of the flight recorder, 64 bytes each

A run that begins while no other is open takes one record for its beginning and its end; the reader makes two of it.
Most are `PLAIN`: short, of all ranks, and alone until they end. When such a run begins it is written where the next
record will be, and it is counted when it has ended. It is open if its number is above that of the collectives done,
which is the number of the last one. Any other is in the words until it ends. Where ranks wait for each other, caches
hold little of this from run to run: what counts is how little is called and touched. A record is one line of a cache.

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
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from optcc.errors import CodecError, InputError
from optcc.runtime.observe.shared_file import new_shared_file

EVENTS, EVENTS_MIN = 4096, 2
"""Records of a ring, unless told otherwise, and at least: one of them may be under way."""
_MAGIC = b"optccpg3"
_HEAD = struct.Struct("<8sII")
_IDENTITY_AT, _WORDS_AT, _STATUS_AT, RING_AT = 64, 1 << 12, 1 << 13, 1 << 17
STATUS_BYTES_MAX = RING_AT - _STATUS_AT
_IDENTITY_BYTES_MAX = _WORDS_AT - _IDENTITY_AT
_PAGE_BYTES_MAX = 1 << 28
RECORD = struct.Struct("@qdiiiii4xqq8x")
RECORD_BYTES = RECORD.size
"""A record: number from 1 on, seconds, kind, four small numbers, two long ones; see `recorder`."""
RUN_RECORD = struct.Struct("@qdiid8xqd8x")
"""The record of a whole run: number, end, `RUN`, plan, beginning, run, seconds waited or `UNKNOWN_S`."""
assert RUN_RECORD.size == RECORD_BYTES == 64
_PLAIN_KIND, _PLAIN_BEGIN = struct.Struct("@ii"), struct.Struct("@24xd")
"""That of a plain one: run, end, `PLAIN` and the plan, beginning."""
RECORD_LONGS, END_LONG, MARK_LONG, BEGIN_LONG = RECORD_BYTES // 8, 1, 2, 3
"""The length of a record and what a plain one has at which place, in steps of 8 bytes."""
UNKNOWN_S, UNKNOWN_NS = -1.0, -1
BEGIN, END, RUN, PLAIN = 1, 2, 8, 9
RECORDS, IS_DRIVEN, DONE, OPEN, PLAN, SINCE, BEGUN, LOCK, LENGTH = range(9)
"""The words: records written, whether the rank is inside the run-time, collectives done, the run that is open and not
plain, with its plan and its beginning (seconds), collectives begun, the status's sequence number and length. Of plain
runs, the first is stored alone: so many more are done and begun."""
_WORDS = struct.Struct("@qqqqqdqqq")
LONGS_AT, RING_LONG = _WORDS_AT, (RING_AT - _WORDS_AT) // 8
"""Where `PageWriter.longs` begins, with the words, and where in it the ring does."""
_READS_MAX = 100


def plain_mark(plan: int) -> int:
    """What the record of a plain run has for its kind and its plan."""
    (mark,) = struct.unpack("@q", _PLAIN_KIND.pack(PLAIN, plan))
    return int(mark)


def plan_of_mark(mark: int) -> int:
    """The plan of `plain_mark`."""
    return int(_PLAIN_KIND.unpack(struct.pack("@q", mark))[1])


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

    `longs` and `seconds` are the words and all behind them, as integers and as floats. Raises OSError if there is no
    room for the file, or it cannot be made.
    """

    def __init__(self, path: Path | None, identity: bytes, n_events: int = EVENTS) -> None:
        if n_events < EVENTS_MIN:
            raise InputError(f"ring of {n_events} events: must have at least {EVENTS_MIN}")
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
        self.longs, self.seconds = self._view[LONGS_AT:].cast("q"), self._view[LONGS_AT:].cast("d")
        memory[_IDENTITY_AT : _IDENTITY_AT + len(identity)] = identity
        _HEAD.pack_into(memory, 0, _MAGIC, len(identity), self.n_events)

    def publish(self, status: bytes) -> None:
        """Replaces the status, which is at most `STATUS_BYTES_MAX` long."""
        assert len(status) <= STATUS_BYTES_MAX, f"status of {len(status)} B"
        words = self.longs
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
    """What is in the memory of a page; of the words, `OPEN` is 0 if that run is over, `DONE` and `BEGUN` are exact.

    Raises CodecError if it is none.
    """
    magic, identity_bytes, n_events = _HEAD.unpack_from(memory)
    if magic != _MAGIC or identity_bytes > _IDENTITY_BYTES_MAX:
        raise CodecError(f"page: begins with {magic!r}: must be a rank's page")
    if len(memory) < RING_AT + n_events * RECORD.size:
        raise CodecError(f"page: {len(memory)} B: must hold {n_events} events")
    identity = memory[_IDENTITY_AT : _IDENTITY_AT + identity_bytes]
    # What is open now may end before the ring is read, and is in it then.
    words = list(_read_words(memory))
    before = words[RECORDS]
    ring = memory[RING_AT : RING_AT + n_events * RECORD.size]
    (after,) = struct.unpack_from("<q", memory, _WORDS_AT)
    # One more than are counted may be under way.
    oldest = max(after + 1 - n_events, 0)
    records: list[EventRecord] = []
    begun: list[EventRecord] = []
    for count in range(oldest, before):
        words[DONE] = max(words[DONE], _read_record(ring, count % n_events * RECORD_BYTES, count + 1, begun, records))
    _read_open(ring, words, n_events, begun, records)
    words[BEGUN] = max(words[BEGUN], words[DONE], words[OPEN])
    merged = tuple(heapq.merge(begun, records, key=lambda each: each.at_s)) if begun else tuple(records)
    return PageContents(identity, _read_status(memory), tuple(words), merged)


def _read_record(ring: bytes, at: int, number: int, begun: list[EventRecord], records: list[EventRecord]) -> int:
    """Adds the record at a place of the ring, unless another one is there by now; how many collectives are done by
    then, if it is of a plain run."""
    record = EventRecord(*RECORD.unpack_from(ring, at))
    if record.kind == PLAIN:
        run, (begin_s,) = record.number, _PLAIN_BEGIN.unpack_from(ring, at)
        begun.append(EventRecord(number, begin_s, BEGIN, record.a, 0, 0, 0, run, 0))
        records.append(EventRecord(number, record.at_s, END, record.a, 0, 0, 0, run, UNKNOWN_NS))
        return run
    if record.number != number:
        return 0
    if record.kind == RUN:
        _, end_s, _, plan, begin_s, run, waited_s = RUN_RECORD.unpack_from(ring, at)
        begun.append(EventRecord(number, begin_s, BEGIN, plan, 0, 0, 0, run, 0))
        waited_ns = int(waited_s * 1e9) if waited_s >= 0 else UNKNOWN_NS
        records.append(EventRecord(number, end_s, END, plan, 0, 0, 0, run, waited_ns))
    else:
        records.append(record)
    return 0


def _read_open(
    ring: bytes, words: list[Any], n_events: int, begun: list[EventRecord], records: list[EventRecord]
) -> None:
    """Adds the beginning of the run that is open, if any, which is `OPEN` from then on."""
    number = words[RECORDS]
    at = number % n_events * RECORD_BYTES
    record, (begin_s,) = EventRecord(*RECORD.unpack_from(ring, at)), _PLAIN_BEGIN.unpack_from(ring, at)
    run, plan = record.number, record.a
    if words[OPEN]:
        run, plan, begin_s = words[OPEN], words[PLAN], words[SINCE]
        # Its rank was killed between the stores of its end.
        is_open = all(each.x != run for each in begun)
    else:
        is_open = record.kind == PLAIN and run > words[DONE]
        # That of another one, if the rank was killed between the stores of its beginning.
        begin_s = max([begin_s, *(each.at_s for each in records[-1:])])
    words[OPEN] = run if is_open else 0
    if is_open:
        begun.append(EventRecord(number + 1, begin_s, BEGIN, plan, 0, 0, 0, run, 0))


def _read_words(memory: mmap.mmap) -> tuple[Any, ...]:
    """The words, with a run that is open as a whole: those of a rank that was killed between two stores if it never
    is."""
    words: tuple[Any, ...] = ()
    for _ in range(_READS_MAX):
        before, words = words, _WORDS.unpack_from(memory, _WORDS_AT)
        if before and before[: BEGUN + 1] == words[: BEGUN + 1]:
            break
    return words


def _read_status(memory: mmap.mmap) -> bytes:
    """The status, once it is whole; what is there after many tries is of a rank that was killed while it wrote."""
    data = b""
    for _ in range(_READS_MAX):
        *_, lock, length = _WORDS.unpack_from(memory, _WORDS_AT)
        data = memory[_STATUS_AT : _STATUS_AT + min(max(length, 0), STATUS_BYTES_MAX)]
        again = _WORDS.unpack_from(memory, _WORDS_AT)[LOCK]
        if lock == again and not lock & 1:
            return data
    return b""
