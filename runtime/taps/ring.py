"""The memory between a rank and the drain of its records; the layout is in `optcc.runtime.taps`.

`RingWriter` is the rank's, `RingReader` the drain's. Where stores are not seen in the order in which they were made, as
they are on x86, a block may be read torn; see `optcc.runtime.observe.page`.
"""

from __future__ import annotations

import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from optcc.errors import CodecError, InputError
from optcc.runtime.observe.shared_file import new_shared_file
from optcc.runtime.taps.layout import BLOCK_HEAD_BYTES

_MAGIC = b"optccrg1"
_HEAD = struct.Struct("<8sQQ")
_IDENTITY_AT, _WORDS_AT, _RING_AT = 64, 1 << 12, 1 << 13
_IDENTITY_BYTES_MAX = _WORDS_AT - _IDENTITY_AT
RING_BYTES_MIN, RING_BYTES_MAX = 1 << 12, 1 << 36
_GRAIN = 64
BLOCK = struct.Struct("<QQQQQQqd")
"""A block's head: state, records, length, layout, plan, run, number of the run in the status, seconds."""
TIME = struct.Struct("<d")
OPEN, DONE, PADDING = 1, 2, 3
_NUMBER = 6
HEAD, TAIL, STATE, RUNS, RECORDS, BYTES = range(6)
FULL_RUNS, FULL_RECORDS, FULL_BYTES, BUDGET_RUNS, BUDGET_RECORDS, BUDGET_BYTES = range(6, 12)
TIME_RUNS, TIME_RECORDS, TIME_BYTES, UNSEEN_RUNS, SPENT_NS, BLOCKED_NS, DRAIN_PID, DRAIN_TICKS = range(12, 20)
"""The words. The rank's: head, state, what was taken, what was dropped for want of room, by the budget of bytes and by
that of time, runs on devices, nanoseconds spent on taking and on waiting for room. The drain's: tail and its process,
with its beginning in milliseconds after the boot."""
COUNTERS = {
    "runs": RUNS,
    "records": RECORDS,
    "bytes": BYTES,
    "full_runs": FULL_RUNS,
    "full_records": FULL_RECORDS,
    "full_bytes": FULL_BYTES,
    "budget_runs": BUDGET_RUNS,
    "budget_records": BUDGET_RECORDS,
    "budget_bytes": BUDGET_BYTES,
    "time_runs": TIME_RUNS,
    "time_records": TIME_RECORDS,
    "time_bytes": TIME_BYTES,
    "unseen_runs": UNSEEN_RUNS,
    "spent_ns": SPENT_NS,
    "blocked_ns": BLOCKED_NS,
}
RUNNING, CLOSED = 0, 1


class RingWriter:
    """A rank's ring of `capacity` bytes, in a file at `path`, or in memory of this process alone.

    Raises OSError if the file cannot be made or there is no room for it, InputError for a capacity that cannot be.
    """

    def __init__(self, path: Path | None, identity: bytes, capacity: int) -> None:
        if not RING_BYTES_MIN <= capacity <= RING_BYTES_MAX:
            raise InputError(f"ring of {capacity} B: must be from {RING_BYTES_MIN} to {RING_BYTES_MAX} B")
        if len(identity) > _IDENTITY_BYTES_MAX:
            raise InputError(f"identity of {len(identity)} B: must be at most {_IDENTITY_BYTES_MAX} B")
        self.path, self.capacity = path, capacity // _GRAIN * _GRAIN
        n_bytes = _RING_AT + self.capacity
        if path is None:
            self._take(mmap.mmap(-1, n_bytes), identity)
        else:
            with new_shared_file(path, n_bytes) as memory:
                self._take(memory, identity)

    def _take(self, memory: mmap.mmap, identity: bytes) -> None:
        """The ring is in this memory, which a reader may see from now on."""
        self.memory = memory
        self._view = memoryview(memory)
        self.words = self._view[_WORDS_AT:_RING_AT].cast("q")
        self.bytes = np.frombuffer(memory, dtype=np.uint8)
        # What a reader may look at meanwhile is written by one store: `pack_into` begins by writing zeros.
        self._longs = self._view.cast("q")
        self._head = 0
        memory[_IDENTITY_AT : _IDENTITY_AT + len(identity)] = identity
        _HEAD.pack_into(memory, 0, _MAGIC, len(identity), self.capacity)

    def reserve(self, n_bytes: int, n_records: int, layout: int, plan: int, run: int, at_s: float) -> int | None:
        """Where in `bytes` a block of `n_bytes`, a multiple of 64, begins that is the rank's until it is done; None if
        there is no room for it now."""
        head, capacity = self._head, self.capacity
        at = head % capacity
        padding = capacity - at if at + n_bytes > capacity else 0
        tail = self.words[TAIL]
        is_too_much = head + padding + n_bytes - tail > capacity
        if is_too_much and not (padding and tail == head and n_bytes <= capacity):
            return None
        if padding:
            BLOCK.pack_into(self.memory, _RING_AT + at, PADDING, 0, padding, 0, 0, 0, 0, 0.0)
            at = 0
        if is_too_much:
            # Nothing is in the way but the end of the memory: there is room once the drain has gone past it.
            self.words[HEAD] = self._head = head + padding
            return None
        begin = _RING_AT + at
        table = begin + BLOCK_HEAD_BYTES
        self.bytes[table : table + 8 * n_records] = 0
        BLOCK.pack_into(self.memory, begin, OPEN, n_records, n_bytes, layout, plan, run, 0, at_s)
        self.words[HEAD] = self._head = head + padding + n_bytes
        return begin

    def finish(self, begin: int, number: int) -> None:
        """The block at `begin` is done, of the run that the status calls `number`."""
        self._longs[begin // 8 + _NUMBER] = number
        self._longs[begin // 8] = DONE

    def close(self) -> None:
        """No block follows; the file is left to the drain, or goes if there is nothing in it."""
        self.words[STATE] = CLOSED
        if self.path is not None and self.words[TAIL] == self._head and not self.words[DRAIN_PID]:
            for path in (self.path, self.path.with_suffix(".layouts")):
                with suppress(OSError):
                    path.unlink()


class TakenBlock(NamedTuple):
    """A block as it was read: `data` is all of it. `is_done` is false if its rank ended before its run."""

    is_done: bool
    n_records: int
    layout: int
    plan: int
    run: int
    number: int
    at_s: float
    data: bytes


class RingReader:
    """The blocks of a ring, oldest first; raises CodecError if the memory is none."""

    def __init__(self, memory: mmap.mmap) -> None:
        magic, identity_bytes, self.capacity = _HEAD.unpack_from(memory)
        if magic != _MAGIC or identity_bytes > _IDENTITY_BYTES_MAX or self.capacity % _GRAIN:
            raise CodecError(f"ring: begins with {magic!r}: must be a rank's ring")
        if len(memory) < _RING_AT + self.capacity or not self.capacity:
            raise CodecError(f"ring: {len(memory)} B: must hold {self.capacity} B")
        self._memory = memory
        self.identity = memory[_IDENTITY_AT : _IDENTITY_AT + identity_bytes]
        self.words = memoryview(memory)[_WORDS_AT:_RING_AT].cast("q")

    @classmethod
    def open(cls, path: Path) -> RingReader:
        """The ring in a file of this user; raises CodecError if it is none, OSError if it is not there."""
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            if status.st_uid != os.geteuid() or not _RING_AT < status.st_size <= _RING_AT + RING_BYTES_MAX:
                raise CodecError(f"ring {path}: must be a rank's ring of this user")
            return cls(mmap.mmap(file, status.st_size))
        finally:
            os.close(file)

    @property
    def is_closed(self) -> bool:
        """Whether its rank has closed it."""
        return self.words[STATE] == CLOSED

    @property
    def is_empty(self) -> bool:
        """Whether everything in it has been taken."""
        return self.words[TAIL] == self.words[HEAD]

    def peek(self, *, rank_is_gone: bool, tail: int | None = None) -> tuple[TakenBlock, int] | None:
        """The oldest block, or that at `tail`, and the tail behind it, if it is done or never will be; else None.

        Raises CodecError for a block that cannot be.
        """
        head, oldest = self.words[HEAD], self.words[TAIL]
        tail = oldest if tail is None else tail
        while tail < head:
            at = _RING_AT + tail % self.capacity
            state, n_records, n_bytes, layout, plan, run, number, at_s = BLOCK.unpack_from(self._memory, at)
            room = min(head - tail, _RING_AT + self.capacity - at)
            if state not in (OPEN, DONE, PADDING) or n_bytes % _GRAIN or not _GRAIN <= n_bytes <= room:
                raise CodecError(f"ring: block at {tail}: state {state}, {n_bytes} B: must fit the ring")
            if state == PADDING:
                if tail == oldest:
                    oldest = tail + n_bytes
                    self.take(oldest)
                tail += n_bytes
                continue
            if BLOCK_HEAD_BYTES + 8 * n_records > n_bytes:
                raise CodecError(f"ring: block at {tail}: {n_records} records: must fit {n_bytes} B")
            if state == OPEN and not rank_is_gone:
                return None
            data = self._memory[at : at + n_bytes]
            return TakenBlock(state == DONE, n_records, layout, plan, run, number, at_s, data), tail + n_bytes
        return None

    def take(self, tail: int) -> None:
        """What is before `tail` has been accepted: its room is the rank's again."""
        self.words[TAIL] = tail

    @property
    def counters(self) -> dict[str, int]:
        """What was taken and dropped, by `COUNTERS`."""
        return {name: self.words[word] for name, word in COUNTERS.items()}
