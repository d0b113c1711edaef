"""What both GPU run-times need of a plan: its bytes in chunks, and which thread block waits for which.

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

from optcc.errors import InputError, PlanError
from optcc.plan import Plan

_NAME = re.compile(r"[A-Za-z0-9_.:+-]+")

Place = tuple[str, int]
"""A buffer and a chunk of it."""
Step = tuple[int, int]
"""A thread block and a position in it."""


def check_allreduce(plan: Plan, target: str, reductions: Sequence[str]) -> None:
    """Raises InputError or PlanError for what neither run-time's file can say."""
    if plan.collective.name != "allreduce":
        raise InputError(
            f"{target}: collective {plan.collective.name}: must be allreduce, the only one that is written"
        )
    if plan.transfers.reduction not in reductions:
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
    """The buffer in chunks of `bytes`: `message` of them, and `scratch` of them behind."""

    bytes: int
    message: int
    scratch: int

    @classmethod
    def of(cls, plan: Plan, target: str) -> Chunks:
        """The longest chunks of which all offsets and lengths are multiples, the message's and the scratch's included.

        Raises PlanError if a transfer reaches from the message into the scratch space, which are two buffers there.
        """
        t = plan.transfers
        columns = (t.bytes, t.src_offset, t.dst_offset)
        chunk = gcd(t.size_bytes, t.scratch_bytes, *(int(np.gcd.reduce(each)) for each in columns))
        for offset in (t.src_offset, t.dst_offset):
            wrong = np.flatnonzero((offset < t.size_bytes) & (offset + t.bytes > t.size_bytes))
            if len(wrong):
                rule = "must not reach from the message into the scratch space"
                raise PlanError(f"{target}: transfer {t.describe(int(wrong[0]))}: {rule}")
        return cls(chunk, t.size_bytes // chunk, t.scratch_bytes // chunk)

    def place(self, offset: int) -> Place:
        """The buffer (`i`, the message in place, or `s`, scratch) and the chunk at `offset`."""
        chunk = offset // self.bytes
        return ("i", chunk) if chunk < self.message else ("s", chunk - self.message)


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
