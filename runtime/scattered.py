"""Where a rank's bytes of the message are, if its input or its output is several parts of it.

In an AllToAll a rank gives one row of the blocks and gets one column. The whole message is p times what a rank gives,
so no buffer has all of it. The bytes that the rank must end with are in the user's output, those that it only gives are
read in the user's input, and the rest, if there is any, is in memory of the plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

OUTPUT, INPUT, WORK = range(3)
Place = tuple[int, int]
"""First byte and byte after the last, of the message."""


class MemoryPiece(NamedTuple):
    """Bytes of the message from `start` to `stop`, which lie in `home` from `at` on."""

    start: int
    stop: int
    home: int
    at: int


class MemoryLayout:
    """The homes of the bytes that a rank touches.

    `reads` and `writes` are what its instructions touch. An input that is written to, or that is read or written in one
    piece with other bytes, is copied to where the others are.
    """

    def __init__(
        self, inputs: Sequence[Place], outputs: Sequence[Place], reads: Iterable[Place], writes: Iterable[Place]
    ) -> None:
        self.input_bytes, self.output_bytes = (sum(stop - start for start, stop in each) for each in (inputs, outputs))
        writes = sorted(set(writes))
        touched = sorted({*reads, *writes})
        self._pieces = _pieces(inputs, outputs, touched, writes)
        self._starts = [piece.start for piece in self._pieces]
        if any(self.find(*place) is None for place in touched):
            self._pieces = _all_in_work(inputs, outputs, touched)
            self._starts = [piece.start for piece in self._pieces]
        self.work_bytes = sum(piece.stop - piece.start for piece in self._pieces if piece.home == WORK)
        # What is copied before a run, and after it: (home, first byte there, first byte in the user's array, length).
        self.before = list(self._copies(inputs, INPUT))
        self.after = list(self._copies(outputs, OUTPUT))

    def find(self, start: int, stop: int) -> tuple[int, int] | None:
        """The home of these bytes and where they start there; None if they lie in several."""
        piece = self._pieces[max(0, bisect_right(self._starts, start) - 1)]
        if not piece.start <= start <= stop <= piece.stop:
            return None
        return piece.home, piece.at + start - piece.start

    def _copies(self, places: Sequence[Place], user: int) -> Iterable[tuple[int, int, int, int]]:
        """Of the user's input or output, what is not where it is used."""
        done = 0
        for start, stop in places:
            for piece in self._pieces:
                low, high = max(start, piece.start), min(stop, piece.stop)
                if low < high and piece.home != user:
                    yield piece.home, piece.at + low - piece.start, done + low - start, high - low
            done += stop - start


def _pieces(
    inputs: Sequence[Place], outputs: Sequence[Place], touched: Sequence[Place], writes: Sequence[Place]
) -> list[MemoryPiece]:
    bounds = sorted({bound for place in (*inputs, *outputs, *touched) for bound in place})
    given, got, used, changed = (_Cover(each) for each in (inputs, outputs, touched, writes))
    found: list[tuple[int, int, int, int]] = []
    work = 0
    for start, stop in pairwise(bounds):
        into, from_ = got.offset(start), given.offset(start)
        if into is not None:
            found.append((start, stop, OUTPUT, into))
        elif from_ is not None and changed.offset(start) is None:
            found.append((start, stop, INPUT, from_))
        elif from_ is not None or used.offset(start) is not None:
            found.append((start, stop, WORK, work))
            work += stop - start
    return _merged(found)


def _all_in_work(inputs: Sequence[Place], outputs: Sequence[Place], touched: Sequence[Place]) -> list[MemoryPiece]:
    bounds = sorted({bound for place in (*inputs, *outputs, *touched) for bound in place})
    every = _Cover([*inputs, *outputs, *touched])
    found: list[tuple[int, int, int, int]] = []
    work = 0
    for start, stop in pairwise(bounds):
        if every.offset(start) is not None:
            found.append((start, stop, WORK, work))
            work += stop - start
    return _merged(found)


def _merged(pieces: Iterable[tuple[int, int, int, int]]) -> list[MemoryPiece]:
    """Neighbours that lie behind each other in one home as one piece."""
    found: list[MemoryPiece] = []
    for start, stop, home, at in pieces:
        last = found[-1] if found else None
        if last and last.stop == start and last.home == home and last.at + last.stop - last.start == at:
            found[-1] = last._replace(stop=stop)
        else:
            found.append(MemoryPiece(start, stop, home, at))
    return found


class _Cover:
    """Which bytes some places have, and how many bytes of the places before are in front of them."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._before: list[int] = []
        done = 0
        for start, stop in sorted(places):
            if self._stops and start < self._stops[-1]:
                self._stops[-1] = max(self._stops[-1], stop)
                continue
            self._starts.append(start)
            self._stops.append(stop)
            self._before.append(done)
            done += stop - start

    def offset(self, byte: int) -> int | None:
        """How many bytes of the places are before this one, which is in one of them; else None."""
        at = bisect_right(self._starts, byte) - 1
        if at < 0 or byte >= self._stops[at]:
            return None
        return self._before[at] + byte - self._starts[at]
