"""`TapLayout`: the records that a tap takes of one run of a plan at one rank, and where each stands in its block."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from optcc.plan import Plan
from optcc.runtime.state import Compute, PostSend, RankProgram
from optcc.runtime.taps.condense import condenser, record_bytes
from optcc.runtime.taps.policy import ARRIVED, INPUT, OUTPUT, RESULT, SENT, Tap

BLOCK_HEAD_BYTES = 64
_ALIGNMENT = 64


class ChunkSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One record: `what` of the bytes [start, stop) of the message, at a point of transfer `transfer`, -1 for a whole
    input or output, whose bytes are those of the rank's array; `size` bytes from `offset` of the block on."""

    point: str
    transfer: int
    stage: str
    segment: int
    src: int
    dst: int
    start: int
    stop: int
    what: str
    offset: int
    size: int


Condenser = Callable[[npt.NDArray[np.uint8], npt.NDArray[np.uint8]], None]
Place = tuple[int, int, int, Condenser]
"""A record as it is taken: its number, first byte and byte after the last in the block, and what writes it."""


class TapLayout:
    """What `tap` takes of the `phase`-th of the runs that it takes, of `program`'s plan; see `optcc.runtime.taps`.

    `n_bytes` is the length of a block.
    """

    def __init__(self, tap: Tap, program: RankProgram, n_bytes_of: tuple[int, int], phase: int) -> None:
        self.tap, self.plan = tap, program.plan
        chunks = _chunks(tap, program, n_bytes_of)
        taken = [each for index, each in enumerate(chunks) if (index + phase) % tap.chunks == 0]
        self._wanted: list[tuple[_Chunk, str]] = [(chunk, what) for chunk in taken for what in tap.what]
        # As it was written to the file of layouts, once it was.
        self.number = 0
        self._thinned: dict[int, TapLayout] = {}
        self._place(self._wanted)

    def _place(self, wanted: list[tuple[_Chunk, str]]) -> None:
        tap, dtype = self.tap, self.plan.transfers.dtype
        # By point, instruction (-1 for input and output) to records.
        self.places: dict[str, dict[int, list[Place]]] = {point: {} for point in (INPUT, SENT, ARRIVED, RESULT, OUTPUT)}
        specs: list[ChunkSpec] = []
        table = BLOCK_HEAD_BYTES + 8 * len(wanted)
        at = -(-table // _ALIGNMENT) * _ALIGNMENT
        for number, (chunk, what) in enumerate(wanted):
            point, instruction, fields = chunk
            size = record_bytes(what, fields[-1] - fields[-2], dtype, tap.stride)
            specs.append(ChunkSpec(point, *fields, what, at, size))
            place = number, at, at + size, condenser(what, dtype, tap.stride)
            self.places[point].setdefault(instruction, []).append(place)
            at += -(-size // 8) * 8
        self.specs = tuple(specs)
        self.n_bytes = -(-at // _ALIGNMENT) * _ALIGNMENT
        self.record_bytes = sum(each.size for each in specs)

    def thinned(self, step: int) -> TapLayout:
        """The layout with every `step`-th record alone."""
        other = self._thinned.get(step)
        if other is None:
            other = self._thinned[step] = copy(self)
            other.number, other._thinned = 0, {}
            other._place(self._wanted[::step])
        return other

    def encode(self, number: int, rank: int, ranks: tuple[int, ...]) -> bytes:
        """The layout as a line of the file of layouts: `ranks` are the transport's, by rank of the plan."""
        plan = self.plan
        t = plan.transfers
        line = LayoutLine(
            *(number, plan.name, plan.digest, plan.collective.name, t.dtype, t.reduction, t.size_bytes),
            *(plan.n_ranks, rank, ranks, self.tap.stride, self.specs),
        )
        return msgspec.json.encode(line) + b"\n"


class LayoutLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the file of layouts: what the records of a block are."""

    layout: int
    plan_name: str
    digest: str
    collective: str
    dtype: str
    reduction: str
    size_bytes: int
    n_ranks: int
    rank: int
    ranks: tuple[int, ...]
    stride: int
    records: tuple[ChunkSpec, ...]


_Chunk = tuple[str, int, tuple[int, str, int, int, int, int, int]]
"""Point, instruction, and (transfer, stage, segment, src, dst, start, stop)."""


def _chunks(tap: Tap, program: RankProgram, n_bytes_of: tuple[int, int]) -> list[_Chunk]:
    """Every chunk of the rank that the tap looks at, in the order of the program; `n_bytes_of` input and output."""
    plan, rank = program.plan, program.rank
    found: list[_Chunk] = []

    def whole(point: str, n_bytes: int) -> None:
        if point in tap.points and n_bytes:
            found.append((point, -1, (-1, "", 0, rank, rank, 0, n_bytes)))

    whole(INPUT, n_bytes_of[0])
    for action in program.actions:
        if isinstance(action, PostSend) and SENT in tap.points:
            transfer = int(plan.send_transfer[action.instruction])
            _add(found, tap, plan, SENT, action.instruction, transfer, action.offset, action.bytes)
        if isinstance(action, Compute):
            transfer = int(plan.recv_transfer[action.instruction])
            if ARRIVED in tap.points and action.slot >= 0:
                _add(found, tap, plan, ARRIVED, action.instruction, transfer, action.dst_offset, action.bytes)
            if RESULT in tap.points:
                _add(found, tap, plan, RESULT, action.instruction, transfer, action.dst_offset, action.bytes)
    whole(OUTPUT, n_bytes_of[1])
    return found


def _add(
    found: list[_Chunk], tap: Tap, plan: Plan, point: str, instruction: int, transfer: int, at: int, size: int
) -> None:
    t = plan.transfers
    stage, segment = t.stages[int(t.stage[transfer])], int(t.segment[transfer])
    if tap.takes_of(stage, segment):
        fields: Any = (transfer, stage, segment, int(t.src[transfer]), int(t.dst[transfer]), at, at + size)
        found.append((point, instruction, fields))
