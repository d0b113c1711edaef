"""What both GPU run-times need of a plan: its bytes in chunks of their buffers, and which thread block waits for which.

A thread block performs its steps one after the other. So of all that an instruction comes after, only what happens in
other blocks has to be waited for, only the last step of each such block, and only if no earlier step of the same block
has waited for that or a later one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from optcc.collective import check_dtype
from optcc.errors import InputError, PlanError
from optcc.plan import Plan

_NAME = re.compile(r"[A-Za-z0-9_.:+-]+")

Place = tuple[str, int]
"""A buffer and a chunk of it."""
Step = tuple[int, int]
"""A thread block and a position in it."""


WRITTEN = ("allreduce", "reducescatter", "allgather", "broadcast", "reduce", "alltoall")
"""The collectives that both formats have a name for and that their run-times share."""
_PARTS = {"reducescatter": 1, "allgather": 1, "alltoall": 2}
"""Those whose call has one count for all ranks: into which power of the number of ranks the message is cut."""


def check_written(plan: Plan, target: str, reductions: Sequence[str]) -> None:
    """Raises InputError or PlanError for what neither run-time's file can say."""
    collective = plan.collective
    if collective.name not in WRITTEN:
        why = "has no counts of its own for each pair of ranks" if collective.cells else "is read without it"
        known = ", ".join(WRITTEN)
        raise InputError(f"{target}: collective {collective.name}: must be one of {known}: the format {why}")
    if collective.reduces and plan.transfers.reduction not in reductions:
        raise InputError(f"{target}: reduction {plan.transfers.reduction}: must be one of {', '.join(reductions)}")
    if not _NAME.fullmatch(plan.name):
        raise InputError(f"{target}: schedule {plan.name!r}: must be named with letters, digits and . _ : + - alone")
    idle = sorted(set(range(plan.n_ranks)) - set(plan.lane_rank.tolist()))
    if idle:
        raise PlanError(f"{target}: rank {idle[0]} has no instructions: every rank must take part")
    t = plan.transfers
    for verb, channel, owner in (
        ("sent", plan.out_channel, plan.send_transfer),
        ("received", plan.in_channel, plan.recv_transfer),
    ):
        counts = np.bincount(owner[channel >= 0], minlength=len(t))
        wrong = np.flatnonzero((counts != 1) & (t.src != t.dst))
        if len(wrong):
            raise PlanError(f"{target}: transfer {t.describe(int(wrong[0]))}: must be {verb} once")


@dataclass(frozen=True, slots=True)
class Chunks:
    """The plan's buffer in chunks of `bytes`, and where those are in the three buffers that a file has on a GPU.

    `i` is the caller's input, `o` the output, `s` scratch space of `scratch` chunks on each rank. A call is in place,
    so that the plan's message is the whole of one of them: `o` for an AllGather, of which `i` is the rank's part, else
    `i`, of which a ReduceScatter's `o` is the rank's part. An AllToAll is out of place: of the p * p blocks that the
    plan counts, rank r has block (r, d) in `i` and block (s, r) in `o`; those that it passes on are in `s`, behind the
    plan's own scratch space.
    """

    collective: str
    n_ranks: int
    bytes: int
    message: int
    plan_scratch: int
    relayed: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, plan: Plan, target: str) -> Chunks:
        """The longest chunks of which all offsets and lengths are multiples, those of each rank's part included.

        Raises PlanError if a transfer reaches from one buffer into another one, if the ranks' parts differ in length,
        or if the block of a rank for itself is used.
        """
        t, name = plan.transfers, plan.collective.name
        parts = plan.n_ranks ** _PARTS.get(name, 0)
        if t.size_bytes % (parts * check_dtype(t.dtype)):
            rule = f"must be {parts} equal parts of whole elements: the call has one count for all ranks"
            raise PlanError(f"{target}: {name} of {t.size_bytes} B: {rule}")
        columns = (t.bytes, t.src_offset, t.dst_offset)
        part = t.size_bytes // parts
        chunk = gcd(part, t.scratch_bytes, *(int(np.gcd.reduce(each)) for each in columns))
        for offset in (t.src_offset, t.dst_offset):
            wrong = np.flatnonzero((offset < t.size_bytes) & (offset + t.bytes > t.size_bytes))
            if len(wrong):
                rule = "must not reach from the message into the scratch space"
                raise PlanError(f"{target}: transfer {t.describe(int(wrong[0]))}: {rule}")
        relayed = _find_relayed(plan, target, part) if name == "alltoall" else ()
        return cls(name, plan.n_ranks, chunk, t.size_bytes // chunk, t.scratch_bytes // chunk, relayed)

    @property
    def is_in_place(self) -> bool:
        """False if input and output are two buffers."""
        return self.collective != "alltoall"

    @property
    def loop(self) -> int:
        """The chunks of a call, as its size is counted: of all ranks' parts, and in an AllToAll of a rank's blocks."""
        return self.message if self.is_in_place else self.message // self.n_ranks

    @property
    def inputs(self) -> int:
        """The chunks of `i`."""
        return self.message // self.n_ranks if self.collective in ("allgather", "alltoall") else self.message

    @property
    def outputs(self) -> int:
        """The chunks of `o`."""
        return self.message // self.n_ranks if self.collective in ("reducescatter", "alltoall") else self.message

    @property
    def block(self) -> int:
        """The chunks of a block of an AllToAll."""
        return self.message // self.n_ranks**2

    def scratch(self, rank: int) -> int:
        """The chunks of `s`."""
        return self.plan_scratch + (len(self.relayed[rank]) * self.block if self.relayed else 0)

    def place(self, rank: int, offset: int) -> Place:
        """The buffer and the chunk of it in which `rank` has what the plan has at `offset`."""
        chunk = offset // self.bytes
        if chunk >= self.message:
            return "s", chunk - self.message
        if self.is_in_place:
            return ("o" if self.collective == "allgather" else "i"), chunk
        number, within = divmod(chunk, self.block)
        src, dst = divmod(number, self.n_ranks)
        if rank == src:
            return "i", dst * self.block + within
        if rank == dst:
            return "o", src * self.block + within
        return "s", self.plan_scratch + self.relayed[rank].index(number) * self.block + within

    def own_block(self, rank: int) -> tuple[int, int] | None:
        """The first chunk, in `i` and in `o`, of what a rank of an AllToAll has for itself, and the number of them:
        nothing that the plan moves, and a copy out of place."""
        return None if self.is_in_place else (rank * self.block, self.block)


def _find_relayed(plan: Plan, target: str, block_bytes: int) -> tuple[tuple[int, ...], ...]:
    """By rank the blocks of an AllToAll that it only passes on; raises as `Chunks.of` does."""
    t, p = plan.transfers, plan.n_ranks
    found: list[set[int]] = [set() for _ in range(p)]
    for ranks, offsets in ((t.src, t.src_offset), (t.dst, t.dst_offset)):
        moved = zip(ranks.tolist(), offsets.tolist(), t.bytes.tolist(), strict=True)
        for index, (rank, offset, length) in enumerate(moved):
            if offset >= t.size_bytes:
                continue
            number = offset // block_bytes
            if (offset + length - 1) // block_bytes != number:
                raise PlanError(f"{target}: transfer {t.describe(index)}: must not reach from one block into another")
            if number == rank * p + rank:
                raise PlanError(f"{target}: transfer {t.describe(index)}: must not use rank {rank}'s block for itself")
            if rank not in divmod(number, p):
                found[rank].add(number)
    return tuple(tuple(sorted(each)) for each in found)


def find_waits(plan: Plan, target: str, first: Sequence[Step], last: Sequence[Step]) -> list[list[Step]]:
    """For each instruction the steps that its first step waits for; `first[i]`, `last[i]` are its first and last step.

    Raises PlanError if an instruction waits for a later one of its own thread block, or does not itself wait for
    something that its transfers come after: where the instructions of a lane are in several thread blocks, to stand
    behind another one that waits is not enough.
    """
    waits: list[list[Step]] = [[] for _ in range(len(plan))]
    waited: dict[int, dict[int, int]] = {}  # for each block, up to which step of each other block it has waited
    after = list(plan.after)
    _check_direct(plan, target, after)
    for index, (block, position) in enumerate(first):
        wanted: dict[int, int] = {}
        for earlier in after[index]:
            other, at = last[earlier]
            if other == block and at >= position:
                raise PlanError(f"{target}: {plan[index]}: must not wait for a later one of its lane, {plan[earlier]}")
            if other != block:
                wanted[other] = max(wanted.get(other, -1), at)
        seen = waited.setdefault(block, {})
        for other, at in wanted.items():
            if seen.get(other, -1) < at:
                waits[index].append((other, at))
                seen[other] = at
    return waits


def _check_direct(plan: Plan, target: str, after: Sequence[Sequence[int]]) -> None:
    """Raises PlanError unless every instruction waits itself for what its transfers come after on its rank."""
    t = plan.transfers
    src, dst = t.src.tolist(), t.dst.tolist()
    recv, send = plan.recv_transfer.tolist(), plan.send_transfer.tolist()
    receiver, sender = [-1] * len(t), [-1] * len(t)
    for index, (into, out) in enumerate(zip(recv, send, strict=True)):
        if into >= 0:
            receiver[into] = index
        if out >= 0:
            sender[out] = index
    needed = list(t.after)
    for index, (into, out) in enumerate(zip(recv, send, strict=True)):
        wanted: set[int] = set()
        if out >= 0:  # it reads, so it comes after what was written there
            wanted.update(receiver[each] for each in needed[out] if dst[each] == src[out])
        if into >= 0:  # it writes, so it comes after what was read there as well
            wanted.update(receiver[each] for each in needed[into] if dst[each] == dst[into])
            wanted.update(sender[each] for each in needed[into] if src[each] == dst[into])
        missing = wanted - {index, -1} - set(after[index])
        if missing:
            raise PlanError(f"{target}: {plan[index]}: must wait itself for {plan[min(missing)]}")
