"""`JobDrain`: takes the records of a job's ranks on this host out of their rings, and gives them to sinks.

It runs in a process of its own, whatever becomes of it: see `optcc.runtime.taps`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from optcc.errors import CodecError, InputError
from optcc.runtime.observe.dump import ALIVE, GONE
from optcc.runtime.observe.jobs import own_start_s, process_state
from optcc.runtime.taps.control import RingIdentity, layouts_path, process_of_ring
from optcc.runtime.taps.layout import LayoutLine
from optcc.runtime.taps.records import ChunkRecord, read_layout, records_of
from optcc.runtime.taps.ring import DRAIN_PID, DRAIN_TICKS, RingReader
from optcc.runtime.taps.sinks import Sink

POLL_S = 0.01
DRAIN_NICENESS = 10
"""What a drain of ours adds to its niceness: where processors are short, the job comes first."""
_BATCH_BYTES = 16 << 20
_MS = 1000


class RankDrain:
    """The ring of one rank, which is this drain's until it is closed.

    Raises InputError if another drain that lives has it, CodecError if it is no ring, OSError if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = RingReader.open(path)
        try:
            self.identity = msgspec.json.decode(self.reader.identity, type=RingIdentity)
        except msgspec.DecodeError as error:
            raise CodecError(f"ring {path}: {error}") from None
        words = self.reader.words
        former = words[DRAIN_PID], words[DRAIN_TICKS] / _MS
        if former[0] not in (0, os.getpid()) and process_state(*former) != GONE:
            raise InputError(f"job {self.identity.job}, rank {self.identity.rank}: process {former[0]} drains it")
        words[DRAIN_TICKS] = int(own_start_s() * _MS)
        words[DRAIN_PID] = os.getpid()
        self._layouts: dict[int, LayoutLine] = {}
        self._read_to = 0

    @property
    def is_over(self) -> bool:
        """Whether its rank will add nothing more."""
        return self.reader.is_closed or process_of_ring(self.identity) != ALIVE

    def take(self, sinks: Sequence[Sink]) -> int:
        """Gives the sinks what is there, some 16 MiB at a time; how many records that were."""
        is_over = self.is_over
        taken = 0
        while True:
            batch: list[ChunkRecord] = []
            tail, n_bytes = None, 0
            while n_bytes < _BATCH_BYTES and (found := self.reader.peek(rank_is_gone=is_over, tail=tail)) is not None:
                block, tail = found
                batch += records_of(block, self._layout(block.layout), self.identity.job)
                n_bytes += len(block.data)
            if tail is None:
                return taken
            for sink in sinks:
                sink.put(batch)
            self.reader.take(tail)
            taken += len(batch)

    def _layout(self, number: int) -> LayoutLine:
        if number not in self._layouts:
            with layouts_path(self.path).open("rb") as file:
                file.seek(self._read_to)
                for line in file:
                    if line.endswith(b"\n"):
                        self._read_to += len(line)
                        layout = read_layout(line)
                        self._layouts[layout.layout] = layout
        if number not in self._layouts:
            raise CodecError(f"ring {self.path}: layout {number}: must be in the file of layouts")
        return self._layouts[number]

    def close(self) -> None:
        """Lets another drain have the ring; the files go if the rank has ended and nothing is left."""
        if self.is_over and self.reader.is_empty:
            for path in (self.path, layouts_path(self.path)):
                with suppress(OSError):
                    path.unlink()
        self.reader.words[DRAIN_PID] = 0


class JobDrain:
    """The rings of all ranks of `job` in `folder`, also of those that come later."""

    def __init__(self, folder: Path, job: str, sinks: Sequence[Sink]) -> None:
        self._folder, self._job, self._sinks = folder, job, sinks
        self.ranks: dict[Path, RankDrain] = {}
        self.n_records = 0

    def take(self) -> int:
        """Gives the sinks what is there; how many records that were. Raises what a sink raises."""
        for path in sorted(self._folder.glob(f"{self._job}.*.ring")):
            if path not in self.ranks:
                with suppress(FileNotFoundError):
                    self.ranks[path] = RankDrain(path)
        taken = sum(rank.take(self._sinks) for rank in self.ranks.values())
        self.n_records += taken
        return taken

    def run(self, *, poll_s: float = POLL_S, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Takes until every rank has ended, or `goes_on` says no; then closes the sinks."""
        try:
            while goes_on():
                is_over = bool(self.ranks) and all(rank.is_over for rank in self.ranks.values())
                if not self.take():
                    if is_over:
                        break
                    time.sleep(poll_s)
        finally:
            self.close()

    def close(self) -> None:
        """Closes the sinks, and lets other drains have the rings. Once the last ring has gone, so do the plans."""
        for sink in self._sinks:
            sink.close()
        for rank in self.ranks.values():
            rank.close()
        if self.ranks and not list(self._folder.glob(f"{self._job}.*.ring")):
            for path in (*self._folder.glob(f"{self._job}.*.plan"), self._folder / f"{self._job}.taps"):
                with suppress(OSError):
                    path.unlink()
        self.ranks.clear()
