"""`Schedule`: who sends which chunk to whom, machine-free; made by a function of the DSL (`optcc.dsl`).

The message is cut into segments by exact shares, a segment into sections; a chunk is (segment, section). How many
bytes that is, is decided by `Layout` once the size is known. Transfers stand in the order in which the author wrote
them, and executing them one by one in that order is the meaning of the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import lcm

import numpy as np

from optcc.arrays import Column
from optcc.collective import Collective, check_count, check_dtype, split
from optcc.errors import ScheduleError
from optcc.show import Card, Shown

REDUCE, COPY = 0, 1
OPS = ("reduce", "copy")
DATA = -1
"""The slot number of the message itself; scratch slots are 0, 1, ..."""


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """A segment's share of the message and the number of its sections."""

    share: Fraction
    sections: int


def in_parts(shares: Sequence[Fraction]) -> tuple[list[int], int]:
    """`shares` in equal parts of the whole, and how many these are: thousands of fractions are slow to add or to sort.

    >>> in_parts([Fraction(1, 2), Fraction(1, 3)])
    ([3, 2], 6)
    """
    whole = lcm(*{share.denominator for share in shares})
    return [share.numerator * (whole // share.denominator) for share in shares], whole


@dataclass(frozen=True, slots=True)
class ChunkTransfer:
    """One row of a schedule, for reading."""

    index: int
    src: int
    dst: int
    op: str
    segment: int
    section: int
    stage: str
    line: int

    def __str__(self) -> str:
        return f"{self.src}->{self.dst} s{self.segment} c{self.section} {self.op} [{self.stage}]"


@dataclass(frozen=True, slots=True, eq=False)
class Schedule(Shown):
    """Transfers of chunks in columns of equal length, with the layout they refer to.

    `src`, `dst` ranks; `op` REDUCE or COPY; `segment`, `section` the chunk; `src_slot`, `dst_slot` DATA or a scratch
    slot; `stage` an index into `stages`; `line` the author's line in `source`. With `lane_per_peer` it is written for
    ports that many transfers share fairly: there, what goes to one rank does not wait for what goes to another. With
    `keeps_order` a rank adds what it receives in the author's order, and never in that of arrival.

    Raises ScheduleError if the columns do not fit the layout.
    """

    name: str
    collective: Collective
    segments: tuple[SegmentShape, ...]
    stages: tuple[str, ...]
    scratch_slots: int
    source: str
    src: Column
    dst: Column
    op: Column
    segment: Column
    section: Column
    src_slot: Column
    dst_slot: Column
    stage: Column
    line: Column
    lane_per_peer: bool = False
    keeps_order: bool = False

    def __post_init__(self) -> None:
        columns = (self.src, self.dst, self.op, self.segment, self.section, self.src_slot, self.dst_slot, self.stage)
        if len({len(each) for each in (*columns, self.line)}) != 1:
            raise ScheduleError(f"schedule {self.name}: columns must have one length")
        shares, whole = in_parts([shape.share for shape in self.segments])
        if self.segments and sum(shares) != whole:
            total = Fraction(sum(shares), whole)
            raise ScheduleError(f"schedule {self.name}: shares of the segments add up to {total}: must be 1")
        if len(self.src) == 0:
            return
        for label, values, count in (
            ("src", self.src, self.collective.n_ranks),
            ("dst", self.dst, self.collective.n_ranks),
            ("op", self.op, len(OPS)),
            ("segment", self.segment, len(self.segments)),
            ("stage", self.stage, len(self.stages)),
        ):
            if values.min() < 0 or values.max() >= count:
                raise ScheduleError(f"schedule {self.name}: {label} must be from 0 to {count - 1}")
        sections = np.array([shape.sections for shape in self.segments])
        if self.section.min() < 0 or (self.section >= sections[self.segment]).any():
            raise ScheduleError(f"schedule {self.name}: section out of its segment")
        slots = np.concatenate((self.src_slot, self.dst_slot))
        if slots.min() < DATA or slots.max() >= self.scratch_slots:
            raise ScheduleError(f"schedule {self.name}: scratch slot must be below {self.scratch_slots}")

    @property
    def n_ranks(self) -> int:
        """Ranks that take part."""
        return self.collective.n_ranks

    def __len__(self) -> int:
        return len(self.src)

    def __getitem__(self, index: int) -> ChunkTransfer:
        if not 0 <= index < len(self):
            raise IndexError(f"transfer {index}: must be below {len(self)}")
        return ChunkTransfer(
            index,
            int(self.src[index]),
            int(self.dst[index]),
            OPS[self.op[index]],
            int(self.segment[index]),
            int(self.section[index]),
            self.stages[self.stage[index]],
            int(self.line[index]),
        )

    def __iter__(self) -> Iterator[ChunkTransfer]:
        return (self[index] for index in range(len(self)))

    def card(self) -> Card:
        rows = tuple(
            (
                self.stages[stage],
                str(int((self.stage == stage).sum())),
                ", ".join(sorted({OPS[op] for op in set(self.op[self.stage == stage].tolist())})),
            )
            for stage in range(len(self.stages))
        )
        title = f"{self.name}: {self.n_ranks} ranks, {len(self.segments)} segments, {len(self)} transfers"
        return Card(title, ("stage", "transfers", "op"), rows)

    def __repr__(self) -> str:
        return f"Schedule({self.name!r}, ranks={self.n_ranks}, segments={len(self.segments)}, transfers={len(self)})"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each chunk of a schedule lies in a buffer of `count` elements; ragged sizes come out exact.

    `first[segment][section]` is the element at which a chunk starts, `stop[segment][section]` the one after its last.
    """

    count: int
    itemsize: int
    first: tuple[tuple[int, ...], ...]
    stop: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, segments: Sequence[SegmentShape], size_bytes: int, dtype: str) -> Layout:
        """The layout of `segments` for a message of `size_bytes` of `dtype`.

        Raises InputError if the size is no whole number of elements.
        """
        count, itemsize = check_count(size_bytes, dtype), check_dtype(dtype)
        first, stop = [], []
        shares, whole = in_parts([shape.share for shape in segments])
        for shape, share, end in zip(segments, shares, accumulate(shares), strict=True):
            start = count * (end - share) // whole
            length = count * end // whole - start
            parts = list(split(length, shape.sections))
            first.append(tuple(start + begin for begin, _ in parts))
            stop.append(tuple(start + end for _, end in parts))
        return cls(count, itemsize, tuple(first), tuple(stop))
