"""What a drain reads of a ring: `ChunkRecord`, one chunk at one point of one run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from optcc.errors import CodecError
from optcc.runtime.taps.attached import TapSet
from optcc.runtime.taps.condense import record_bytes, value_of
from optcc.runtime.taps.layout import BLOCK_HEAD_BYTES, LayoutLine
from optcc.runtime.taps.policy import WHATS
from optcc.runtime.taps.ring import TIME, RingReader, TakenBlock

_DECODER = msgspec.json.Decoder(LayoutLine)


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A record; `key` identifies the chunk, whatever the order in which records come.

    `rank` is that of the job, `src` and `dst` are those of the transfer; for the input and the output of a rank
    `transfer` is -1. `plan_number` counts the plans of these ranks, `run` the runs of the plan, `number` is what
    `optcc status` calls the run, 0 if the rank is not observed. The chunk is the bytes [start, stop) of the message, or
    of the rank's own array for its input and output. `at_s` is the engine's clock.
    """

    job: str
    rank: int
    n_ranks: int
    collective: str
    plan_name: str
    digest: str
    dtype: str
    reduction: str
    size_bytes: int
    stride: int
    plan_number: int
    run: int
    number: int
    stage: str
    segment: int
    point: str
    transfer: int
    src: int
    dst: int
    start: int
    stop: int
    what: str
    at_s: float
    data: bytes

    @property
    def key(self) -> tuple[int, int, str, int, int, str]:
        """Plan, run, point, transfer, rank and what was taken."""
        return self.plan_number, self.run, self.point, self.transfer, self.rank, self.what

    @property
    def value(self) -> Any:
        """What the record says; see `optcc.runtime.taps.condense.value_of`."""
        return value_of(self.what, self.data, self.dtype)


def read_layout(line: bytes) -> LayoutLine:
    """A line of the file of layouts; raises CodecError for one that is none."""
    try:
        layout = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"layout: {error}") from None
    for each in layout.records:
        if each.what not in WHATS or not 0 <= each.start <= each.stop:
            raise CodecError(f"layout {layout.layout}: {each}: must be a record")
        if each.size != record_bytes(each.what, each.stop - each.start, layout.dtype, layout.stride):
            raise CodecError(f"layout {layout.layout}: {each}: must have the length of what was taken")
    return layout


def records_of(block: TakenBlock, layout: LayoutLine, job: str) -> Iterator[ChunkRecord]:
    """The records of a block that were taken; raises CodecError if it is not of this layout."""
    if block.n_records != len(layout.records):
        raise CodecError(f"block of layout {layout.layout}: {block.n_records} records: must be {len(layout.records)}")
    head = (layout.collective, layout.plan_name, layout.digest, layout.dtype, layout.reduction, layout.size_bytes)
    for number, each in enumerate(layout.records):
        (at_s,) = TIME.unpack_from(block.data, BLOCK_HEAD_BYTES + 8 * number)
        if at_s == 0.0:
            continue
        if not BLOCK_HEAD_BYTES + 8 * block.n_records <= each.offset <= len(block.data) - each.size:
            raise CodecError(f"layout {layout.layout}: {each}: must lie in the block")
        yield ChunkRecord(
            *(job, layout.ranks[layout.rank], layout.n_ranks, *head, layout.stride),
            *(block.plan, block.run, block.number, each.stage, each.segment, each.point, each.transfer),
            *(layout.ranks[each.src], layout.ranks[each.dst], each.start, each.stop, each.what, at_s),
            block.data[each.offset : each.offset + each.size],
        )


def take_records(taps: TapSet, job: str = "") -> list[ChunkRecord]:
    """What is in a ring in memory of this process, which is taken out of it."""
    reader = RingReader(taps.ring.memory)
    layouts = {layout.layout: layout for layout in map(read_layout, taps.layouts)}
    found: list[ChunkRecord] = []
    while (taken := reader.peek(rank_is_gone=reader.is_closed)) is not None:
        block, tail = taken
        found += records_of(block, layouts[block.layout], job)
        reader.take(tail)
    return found
