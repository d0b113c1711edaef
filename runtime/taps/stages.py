"""What every chunk must be at every point, and whose contributions it holds: an interpreter of plans.

It shares no code with the engine: instructions are done one at a time, each as soon as its lane, its dependencies and
its message allow, by NumPy's own functions. A proved plan has no races, so that every such order gives the same bits.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from optcc.collective import check_dtype
from optcc.errors import InputError, PlanError
from optcc.plan import LOCALS, RECEIVES, REDUCES, SENDS, Plan
from optcc.runtime.kernels import NumpyKernels
from optcc.runtime.taps.policy import ARRIVED, INPUT, OUTPUT, RESULT, SENT

Bytes = npt.NDArray[np.uint8]


class StageValue(NamedTuple):
    """The bytes [start, stop) of the message at `rank`, at a point of a transfer; -1 for an input or an output, whose
    bytes are those of the rank's own array."""

    rank: int
    point: str
    transfer: int
    start: int
    stop: int
    data: Bytes


class StageRanks(NamedTuple):
    """Whose contributions are in the bytes [start, stop) of the message at `rank` at a point of a transfer: ranges of
    bytes, each with a set of ranks as bits."""

    rank: int
    point: str
    transfer: int
    start: int
    stop: int
    contributors: tuple[tuple[int, int, int], ...]


def instruction_order(plan: Plan) -> list[int]:
    """The instructions, each behind all that it must wait for. Raises PlanError if some wait in a circle."""
    position = [0] * len(plan.lanes)
    is_done = bytearray(len(plan))
    # By channel, its instructions in the plan's order, as its messages are numbered.
    senders: dict[int, list[int]] = defaultdict(list)
    sender_of: dict[int, int] = {}
    n_received: dict[int, int] = defaultdict(int)
    kinds = plan.kind.tolist()
    for i, kind in enumerate(kinds):
        if kind in SENDS:
            senders[int(plan.out_channel[i])].append(i)
    for i, kind in enumerate(kinds):
        if kind in RECEIVES:
            channel = int(plan.in_channel[i])
            sender_of[i] = senders[channel][n_received[channel]]
            n_received[channel] += 1
    lanes = [plan.lanes[lane].tolist() for lane in range(len(plan.lanes))]
    waiting: dict[int, list[int]] = defaultdict(list)
    runnable = deque(range(len(lanes)))
    order: list[int] = []
    while runnable:
        lane = runnable.popleft()
        while position[lane] < len(lanes[lane]):
            i = lanes[lane][position[lane]]
            needed = [*plan.after[i].tolist(), *([sender_of[i]] if i in sender_of else [])]
            missing = next((each for each in needed if not is_done[each]), None)
            if missing is not None:
                waiting[missing].append(lane)
                break
            position[lane] += 1
            is_done[i] = 1
            order.append(i)
            runnable.extend(waiting.pop(i, ()))
    if len(order) < len(plan):
        raise PlanError(f"plan {plan.name}: {len(plan) - len(order)} instructions wait for each other in a circle")
    return order


def stage_values(plan: Plan, inputs: Mapping[int, Bytes]) -> Iterator[StageValue]:
    """Every chunk of a run on these inputs, by rank of the plan, each behind those that it is made of; inputs are the
    bytes of the ranks' arrays.

    Raises InputError if an input is missing or has another length.
    """
    t, itemsize = plan.transfers, check_dtype(plan.transfers.dtype)
    kernels = NumpyKernels(t.dtype, t.reduction, compiled=False)
    count = plan.size_bytes // itemsize
    buffers = [np.zeros(plan.buffer_bytes, dtype=np.uint8) for _ in range(plan.n_ranks)]
    for rank, buffer in enumerate(buffers):
        places = [(start * itemsize, stop * itemsize) for start, stop, _ in plan.collective.before(rank, count)]
        wanted = sum(stop - start for start, stop in places)
        given = inputs.get(rank, np.zeros(0, dtype=np.uint8))
        if given.nbytes != wanted:
            raise InputError(f"input of rank {rank}: {given.nbytes} B: must be {wanted} B")
        at = 0
        for start, stop in places:
            buffer[start:stop] = given[at : at + stop - start]
            at += stop - start
        if wanted:
            yield StageValue(rank, INPUT, -1, 0, wanted, given)

    def update(rank: int, at: int, incoming: Bytes, is_reduction: bool) -> None:
        target = buffers[rank][at : at + incoming.nbytes]
        if is_reduction:
            with np.errstate(all="ignore"):
                kernels.reduce(kernels.view(target), kernels.view(incoming))
        else:
            target[...] = incoming

    for step in _steps(plan):
        rank, point, transfer, start, stop, source, is_reduction = step
        if point == SENT:
            value = buffers[rank][start:stop].copy()
            source[transfer] = value
        elif point == ARRIVED:
            value = source[transfer]
        else:
            if isinstance(source, tuple):
                incoming = buffers[rank][source[0] : source[1]].copy()
            else:
                incoming = source.pop(transfer)
            update(rank, start, incoming, is_reduction)
            value = buffers[rank][start:stop].copy()
        yield StageValue(rank, point, transfer, start, stop, value)
    yield from _outputs(plan, kernels, buffers)


def _outputs(plan: Plan, kernels: NumpyKernels, buffers: list[Bytes]) -> Iterator[StageValue]:
    itemsize = check_dtype(plan.transfers.dtype)
    is_average = plan.collective.reduces and plan.transfers.reduction == "avg"
    for rank, buffer in enumerate(buffers):
        parts = []
        for start, stop, ranks in plan.collective.after(rank, plan.size_bytes // itemsize):
            part = buffer[start * itemsize : stop * itemsize]
            if is_average:
                kernels.finish(kernels.view(part), ranks.bit_count())
            parts.append(part)
        if parts:
            output = np.concatenate(parts)
            yield StageValue(rank, OUTPUT, -1, 0, output.nbytes, output)


def stage_ranks(plan: Plan) -> Iterator[StageRanks]:
    """Whose contributions every chunk holds, in the order of `stage_values`."""
    t, itemsize = plan.transfers, check_dtype(plan.transfers.dtype)
    size = plan.bytes
    offsets = [0, plan.size_bytes, plan.buffer_bytes]
    for column in (plan.src_offset, plan.dst_offset):
        used = column >= 0
        offsets += [*column[used].tolist(), *(column[used] + size[used]).tolist()]
    offsets += (t.src_offset.tolist()) + (t.src_offset + t.bytes).tolist()
    before = [plan.collective.before(rank, plan.size_bytes // itemsize) for rank in range(plan.n_ranks)]
    offsets += [each * itemsize for regions in before for start, stop, _ in regions for each in (start, stop)]
    bounds = sorted(set(offsets))
    atom_of = {at: index for index, at in enumerate(bounds)}
    held = [[0] * (len(bounds) - 1) for _ in range(plan.n_ranks)]
    for rank, regions in enumerate(before):
        for start, stop, ranks in regions:
            for atom in range(atom_of[start * itemsize], atom_of[stop * itemsize]):
                held[rank][atom] = ranks
    messages: dict[int, list[int]] = {}
    for rank, point, transfer, start, stop, source, is_reduction in _steps(plan):
        first, last = atom_of[start], atom_of[stop]
        if point == SENT:
            value = messages[transfer] = held[rank][first:last]
        elif point == ARRIVED:
            value = messages[transfer]
        else:
            if isinstance(source, tuple):
                incoming = held[rank][atom_of[source[0]] : atom_of[source[1]]]
            else:
                incoming = messages[transfer]
            incoming = _fitted(incoming, last - first)
            own = held[rank][first:last]
            value = [a | b for a, b in zip(own, incoming, strict=True)] if is_reduction else list(incoming)
            held[rank][first:last] = value
        value = _fitted(value, last - first)
        pieces = tuple((bounds[first + i], bounds[first + i + 1], ranks) for i, ranks in enumerate(value))
        yield StageRanks(rank, point, transfer, start, stop, pieces)


def _fitted(value: list[int], n_atoms: int) -> list[int]:
    """Contributors where the bytes come to lie: those of all of them where they were cut differently before."""
    if len(value) == n_atoms:
        return value
    everyone = 0
    for each in value:
        everyone |= each
    return [everyone] * n_atoms


_Step = tuple[int, str, int, int, int, Any, bool]
"""Rank, point, transfer, first byte, byte after the last, where the bytes come from (the messages by transfer, or a
range of the rank's own), and whether they are reduced."""


def _steps(plan: Plan) -> Iterator[_Step]:
    messages: dict[int, Any] = {}
    kinds, ranks = plan.kind.tolist(), plan.instruction_rank.tolist()
    for i in instruction_order(plan):
        kind, rank, size = kinds[i], ranks[i], int(plan.bytes[i])
        target = int(plan.dst_offset[i])
        came, goes = int(plan.recv_transfer[i]), int(plan.send_transfer[i])
        if kind in RECEIVES:
            yield rank, ARRIVED, came, target, target + size, messages, False
            yield rank, RESULT, came, target, target + size, messages, kind in REDUCES
        elif kind in LOCALS:
            at = int(plan.src_offset[i])
            yield rank, RESULT, came, target, target + size, (at, at + size), kind in REDUCES
        if kind in SENDS:
            at = target if kind in RECEIVES else int(plan.src_offset[i])
            yield rank, SENT, goes, at, at + size, messages, False
