"""What a plan would need of a run-time that it is exported to, against what that run-time has.

No exporter is written yet. The ones to come must call `check_limits` before they write, and must map a plan as assumed
here; one that maps it otherwise has to change the counting here with it. Only resources are counted. An exported file
orders steps in its own way, so it has to be proved again as it is: where it gives a message more slots than the plan
does, freed slots no longer order what they ordered in the plan.

`msccl-xml`, `msccl-xml-ll`: the XML of MSCCL, for the Simple protocol and for LL or LL128. Limits from the sources of
its interpreter: the constants of `msccl.h` (MAXCHANNELS 32, MSCCL_MAX_NUM_STEPS 256, MSCCL_MAX_NUM_THREAD_BLOCKS 216,
MSCCL_MAX_NUM_THREAD_BLOCKS_PER_CHANNEL 32, MSCCL_MAX_COUNT 72, names of 64 bytes with the last one zero), the widths of
its fields (a transfer's chunk offsets are int16, the thread block that a step waits for is int8), and the FIFO of a
connection: 8 steps, of which a Simple message takes 4 and one of LL or LL128 takes 1. Assumed:

- A thread block has at most one peer that it sends to and one that it receives from, on one channel. A lane that
  receives on m of the plan's channels and sends on n of them becomes max(m, n) thread blocks: the first one takes the
  first of each, and so on, in the order in which the lane uses them. The k-th channel of a pair of ranks is channel k.
- An instruction is one step; a fused one whose two channels fall to different thread blocks is two, the second waiting
  for the first. A local operation belongs to the lane's first thread block.
- A step waits for one thread block; for each further one that it must wait for, a nop stands before it. Steps of its
  own thread block it need not wait for.
- A chunk is as long as the greatest common divisor of all offsets and lengths, so that the count of a step is its
  length in such chunks: sizes that do not divide make it large.

`mscclpp-json`: an execution plan of MSCCL++. Limits from the constants of its `execution_common.hpp` (MAX_CHANNEL 16,
MAX_OPERATION 64, MAX_DEVICE_SEMAPHORES 16, PREDFINED_SCRATCH_SIZE 64 MiB, offsets and sizes of 32 bits) and the default
alignment of its plans, 16 B. Assumed:

- A lane is a thread block, and each of its channels one of the plan's.
- A send is put and signal, and before them a wait for the slot if it has been used before. A receive is a wait, and a
  copy or reduce out of the slot; then a signal that the slot is free, if it is used again. A fused instruction is both,
  with a nop between them. A local operation is one operation.
- An instruction that waits for other lanes takes one operation more (acquire, one semaphore for each of these lanes),
  one that others wait for takes one (release, the same), and one that waits for its own lane takes a nop.
- Slots lie in scratch space, behind the plan's own, in a buffer that is kept from call to call (`reuse_resources`).

`optcc`: our run-time, over any transport. Ranks as many as a topology may have (`optcc.topology.RANKS_MAX`); offsets
and lengths in whole elements; and the bytes of a rank, its buffer and its staging slots of whole 64 B each, within an
address space of 47 bits. (The number of slots is bounded by the plan itself, `optcc.plan.SLOTS_MAX`.)

`mpi`: the same over MPI. Counts are C ints, so a message has at most 2^31 - 1 B; the k-th channel of a pair of ranks is
tag k, and the standard promises tags up to 32767 (MPI_TAG_UB).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd
from types import MappingProxyType

import numpy as np

from optcc.arrays import Column
from optcc.collective import check_dtype
from optcc.errors import InputError
from optcc.plan import LOCALS, RECEIVES, SENDS, Plan
from optcc.topology import RANKS_MAX
from optcc.verdict import Counterexample

_SLOT_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Limit:
    """`what` may be `at_most` that, because of `source`."""

    what: str
    at_most: int
    source: str


@dataclass(frozen=True, slots=True)
class Need:
    """What a plan needs of `what` at its worst place, `where` in words; `instruction` is one there (-1: none)."""

    what: str
    amount: int
    where: str = ""
    rank: int | None = None
    instruction: int = -1


@dataclass(frozen=True, slots=True)
class Target:
    """A run-time with its limits; `needs` counts, for each of them, what a plan needs at its worst place."""

    name: str
    limits: tuple[Limit, ...]
    needs: Callable[[Plan], Iterator[Need]]


def check_limits(plan: Plan, target: str) -> Counterexample | None:
    """None if `plan` fits the limits of the target of that name, else the first limit it breaks, at the worst place.

    >>> from optcc.compiler import compile_schedule
    >>> from optcc.schedules.ring import ring
    >>> plan = compile_schedule(ring(n_ranks=48), size_bytes=48 * 64)
    >>> print(check_limits(plan, "msccl-xml"))
    None
    >>> check_limits(plan, "mscclpp-json").summary
    'mscclpp-json: operations of a thread block: 700, must be at most 64 (MAX_OPERATION); rank 0 lane 0'

    Raises InputError for a target that is not in `TARGETS`.
    """
    if target not in TARGETS:
        raise InputError(f"target {target!r}: must be one of {', '.join(TARGETS)}")
    chosen = TARGETS[target]
    needs = {need.what: need for need in chosen.needs(plan)}
    assert set(needs) <= {limit.what for limit in chosen.limits}, "a need without a limit"
    for limit in chosen.limits:
        need = needs.get(limit.what)
        if need is not None and need.amount > limit.at_most:
            return _exceeded(plan, target, limit, need)
    return None


def _exceeded(plan: Plan, target: str, limit: Limit, need: Need) -> Counterexample:
    where = f"; {need.where}" if need.where else ""
    summary = f"{target}: {limit.what}: {need.amount}, must be at most {limit.at_most} ({limit.source}){where}"
    if need.instruction < 0:
        return Counterexample("limits", summary, need.rank)
    row = plan[need.instruction]
    first = row.dst_offset if row.dst_offset >= 0 else row.src_offset
    trace = (f"{row}: {plan.transfers.describe(max(row.recv_transfer, row.send_transfer))}",)
    return Counterexample("limits", summary, row.rank, first, first + row.bytes - 1, trace)


def _worst(what: str, amounts: Column, where: Callable[[int], str], instruction: Column) -> Iterator[Need]:
    """The largest of `amounts`, nothing if there are none; `instruction` is for each of them one that is there."""
    if len(amounts):
        at = int(amounts.argmax())
        yield Need(what, int(amounts[at]), where(at), instruction=int(instruction[at]))


def _at_rank(ranks: Column) -> Callable[[int], str]:
    return lambda at: f"rank {ranks[at]}"


def _at_lane(plan: Plan, lanes: Column) -> Callable[[int], str]:
    return lambda at: f"rank {plan.lane_rank[lanes[at]]} lane {lanes[at]}"


def _nowhere(_: int) -> str:
    return ""


def _channel_numbers(plan: Plan) -> Column:
    """For each channel which one of its pair of ranks it is: 0, 1, ..."""
    seen: dict[tuple[int, int], int] = {}
    numbers = []
    for channel in plan.channels:
        number = seen.get((channel.src, channel.dst), 0)
        seen[channel.src, channel.dst] = number + 1
        numbers.append(number)
    return np.array(numbers, dtype=np.int64)


def _slots(plan: Plan) -> tuple[Column, Column, Column]:
    """For each lane that receives: the lane, how many of its slots it uses, and the bytes of its longest message."""
    receives = np.flatnonzero(plan.in_channel >= 0)
    lanes, counts = np.unique(plan.instruction_lane[receives], return_counts=True)
    slots, longest = (np.zeros(len(plan.lanes), dtype=np.int64) for _ in range(2))
    offered = np.array([channel.slots for channel in plan.channels], dtype=np.int64)[plan.in_channel[receives]]
    slots[plan.instruction_lane[receives]] = offered
    np.maximum.at(longest, plan.instruction_lane[receives], plan.bytes[receives])
    return lanes, np.minimum(slots[lanes], counts), longest[lanes]


def _is(plan: Plan, kinds: frozenset[int]) -> Column:
    """The instructions of these kinds."""
    return np.flatnonzero(np.isin(plan.kind, list(kinds)))


# MSCCL ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """Thread blocks: `lane` and `rank` of each; `receives_in` and `sends_in` are for each instruction the thread block
    of its step that receives (or works locally) and of its step that sends, -1 where there is none."""

    lane: Column
    rank: Column
    receives_in: Column
    sends_in: Column

    @classmethod
    def of(cls, plan: Plan) -> _Blocks:
        numbers = _channel_numbers(plan)
        first_use: list[tuple[int, int, int]] = []  # instruction, side, channel
        for side, channels in enumerate((plan.in_channel, plan.out_channel)):
            used = np.flatnonzero(channels >= 0)
            seen, at = np.unique(channels[used], return_index=True)
            first_use += [(int(i), side, int(c)) for i, c in zip(used[at], seen, strict=True)]
        number: dict[tuple[int, int, int], int] = {}  # by lane, channel number, and how many were there before
        taken: dict[tuple[int, int, int], int] = {}
        block_of = np.full((2, len(plan.channels)), -1, dtype=np.int64)
        lanes = plan.instruction_lane
        for i, side, channel in sorted(first_use):
            lane, k = int(lanes[i]), int(numbers[channel])
            place = taken.get((lane, k, side), 0)
            taken[lane, k, side] = place + 1
            block_of[side, channel] = number.setdefault((lane, k, place), len(number))
        lane_of = [lane for lane, _, _ in number]
        first_block = np.full(len(plan.lanes), -1, dtype=np.int64)
        for block in range(len(lane_of) - 1, -1, -1):
            first_block[lane_of[block]] = block
        local = _is(plan, LOCALS)
        for lane in np.unique(lanes[local]).tolist():
            if first_block[lane] < 0:
                first_block[lane] = len(lane_of)
                lane_of.append(lane)
        receives_in = np.where(plan.in_channel >= 0, block_of[0][plan.in_channel], -1) if plan.channels else _none(plan)
        sends_in = np.where(plan.out_channel >= 0, block_of[1][plan.out_channel], -1) if plan.channels else _none(plan)
        receives_in[local] = first_block[lanes[local]]
        lane_column = np.array(lane_of, dtype=np.int64)
        return cls(lane_column, plan.lane_rank[lane_column], receives_in, sends_in)

    def steps(self, plan: Plan) -> tuple[Column, Column]:
        """For each thread block how many steps it has, nops included; and for each, whether others wait for it."""
        n = len(plan)
        each = np.arange(n)
        split = (self.receives_in >= 0) & (self.sends_in >= 0) & (self.receives_in != self.sends_in)
        first = np.where(self.receives_in >= 0, self.receives_in, self.sends_in)
        last = np.where(self.sends_in >= 0, self.sends_in, self.receives_in)
        counts = np.bincount(first, minlength=len(self.lane)) + np.bincount(last[split], minlength=len(self.lane))
        waiting, earlier = np.repeat(each, np.diff(plan.after.starts)), plan.after.values
        elsewhere = last[earlier] != first[waiting]
        pairs = np.unique(waiting[elsewhere] * len(self.lane) + last[earlier[elsewhere]])
        waits = np.bincount(pairs // max(len(self.lane), 1), minlength=n)
        np.add.at(counts, first, np.maximum(waits - 1, 0))
        is_waited_for = np.zeros(len(self.lane), dtype=np.int64)
        is_waited_for[pairs % max(len(self.lane), 1)] = 1
        is_waited_for[first[split]] = 1
        return counts, is_waited_for

    def an_instruction(self) -> Column:
        """For each thread block the first instruction that has a step in it."""
        found = np.full(len(self.lane), len(self.sends_in), dtype=np.int64)
        for blocks in (self.receives_in, self.sends_in):
            there = np.flatnonzero(blocks >= 0)
            np.minimum.at(found, blocks[there], there)
        return found


def _none(plan: Plan) -> Column:
    return np.full(len(plan), -1, dtype=np.int64)


def _msccl_needs(plan: Plan) -> Iterator[Need]:
    yield Need("bytes of the name", len(plan.name.encode()))
    numbers = _channel_numbers(plan)
    sends, receives = _is(plan, SENDS), _is(plan, RECEIVES)
    ends = ((sends, plan.out_channel, "sending"), (receives, plan.in_channel, "receiving"))
    for which, channels, side in ends:
        used, at = np.unique(channels[which], return_index=True)
        if side == "sending":
            yield from _worst("channels", numbers[used] + 1, _nowhere, which[at])
        here = plan.instruction_rank[which[at]] * (len(plan.channels) + 1) + numbers[used]
        groups, first, counts = np.unique(here, return_index=True, return_counts=True)
        yield from _worst(
            f"{side} thread blocks of a GPU's channel",
            counts,
            _at_rank(groups // (len(plan.channels) + 1)),
            which[at][first],
        )
    blocks = _Blocks.of(plan)
    steps, is_waited_for = blocks.steps(plan)
    example = blocks.an_instruction()
    for what, counted in (
        ("thread blocks of a GPU", np.arange(len(blocks.lane))),
        ("thread blocks of a GPU that others wait for", np.flatnonzero(is_waited_for)),
    ):
        ranks, first, counts = np.unique(blocks.rank[counted], return_index=True, return_counts=True)
        yield from _worst(what, counts, _at_rank(ranks), example[counted][first])
    yield from _worst("steps of a thread block", steps, _at_lane(plan, blocks.lane), example)
    lanes, slots, _ = _slots(plan)
    yield from _worst(
        "messages on their way to a receive lane",
        slots,
        _at_lane(plan, lanes),
        plan.lanes.starts[lanes],
    )
    if len(plan) == 0:
        return
    chunk, each = _chunk_bytes(plan), np.arange(len(plan))
    offset = np.maximum(plan.src_offset, plan.dst_offset)
    in_buffer = np.where(offset >= plan.size_bytes, offset - plan.size_bytes, offset)
    yield from _worst("chunks of a step", plan.bytes // chunk, lambda _: f"chunks of {chunk} B", each)
    yield from _worst("highest chunk offset", in_buffer // chunk, lambda _: f"chunks of {chunk} B", each)


def _chunk_bytes(plan: Plan) -> int:
    """The greatest common divisor of all offsets and lengths, the message's included."""
    columns = (plan.bytes, np.maximum(plan.src_offset, 0), np.maximum(plan.dst_offset, 0))
    return gcd(plan.size_bytes, *(int(np.gcd.reduce(each)) for each in columns))


# MSCCL++ --------------------------------------------------------------------------------------------------------------


def _mscclpp_needs(plan: Plan) -> Iterator[Need]:
    lane, n, n_lanes = plan.instruction_lane, len(plan), len(plan.lanes)
    every_lane = np.arange(n_lanes)
    starts = plan.lanes.starts[:-1]
    operations, acquires, releases = _operations(plan)
    yield from _worst(
        "operations of a thread block",
        np.bincount(lane, operations, n_lanes).astype(np.int64),
        _at_lane(plan, every_lane),
        starts,
    )
    pairs = []
    for channel in (plan.in_channel, plan.out_channel):
        used = np.flatnonzero(channel >= 0)
        pairs.append(lane[used] * len(plan.channels) + channel[used])
    channels = np.unique(np.concatenate(pairs)) // max(len(plan.channels), 1)
    yield from _worst(
        "channels of a thread block", np.bincount(channels, minlength=n_lanes), _at_lane(plan, every_lane), starts
    )
    yield from _worst("semaphores of an operation", np.maximum(acquires, releases), _at_lane(plan, lane), np.arange(n))
    offset = np.maximum(plan.src_offset, plan.dst_offset)
    yield from _worst("highest offset or length in bytes", np.maximum(offset, plan.bytes), _nowhere, np.arange(n))
    rest = np.maximum.reduce([np.maximum(each, 0) % 16 for each in (plan.src_offset, plan.dst_offset, plan.bytes)])
    yield from _worst("bytes past a multiple of 16", rest, _nowhere, np.arange(n))
    lanes, slots, longest = _slots(plan)
    scratch = [plan.transfers.scratch_bytes] * plan.n_ranks
    for at, used, message in zip(lanes.tolist(), slots.tolist(), longest.tolist(), strict=True):
        scratch[plan.lane_rank[at]] += used * message
    rank = scratch.index(max(scratch))
    yield Need("bytes of scratch space", scratch[rank], f"rank {rank}", rank)


def _operations(plan: Plan) -> tuple[Column, Column, Column]:
    """For each instruction its operations; for how many other lanes it waits; and how many others wait for it."""
    n, lane = len(plan), plan.instruction_lane
    waiting, earlier = np.repeat(np.arange(n), np.diff(plan.after.starts)), plan.after.values
    elsewhere = lane[waiting] != lane[earlier]
    n_lanes = max(len(plan.lanes), 1)
    acquires = np.bincount(np.unique(waiting[elsewhere] * n_lanes + lane[earlier[elsewhere]]) // n_lanes, minlength=n)
    releases = np.bincount(np.unique(earlier[elsewhere] * n_lanes + lane[waiting[elsewhere]]) // n_lanes, minlength=n)
    own = np.zeros(n, dtype=np.int64)
    own[waiting[~elsewhere]] = 1
    sends, receives, local = (np.isin(plan.kind, list(kinds)) for kinds in (SENDS, RECEIVES, LOCALS))
    operations = 2 * sends + 2 * receives + (sends & receives) + local + (acquires > 0) + (releases > 0) + own
    received = np.flatnonzero(plan.in_channel >= 0)
    slots = np.array([channel.slots for channel in plan.channels], dtype=np.int64)[plan.in_channel[received]]
    at = np.arange(len(received)) - slots
    again = np.flatnonzero((at >= 0) & (lane[received[np.maximum(at, 0)]] == lane[received]))
    sender = np.zeros(len(plan.transfers), dtype=np.int64)
    sent = np.flatnonzero(plan.send_transfer >= 0)
    sender[plan.send_transfer[sent]] = sent
    operations[received[at[again]]] += 1
    operations[sender[plan.recv_transfer[received[again]]]] += 1
    return operations.astype(np.int64), acquires, releases


# Our run-time ---------------------------------------------------------------------------------------------------------


def _optcc_needs(plan: Plan) -> Iterator[Need]:
    yield Need("ranks", plan.n_ranks)
    itemsize = check_dtype(plan.transfers.dtype)
    columns = (plan.src_offset, plan.dst_offset, plan.bytes)
    rest = np.maximum.reduce([np.maximum(each, 0) % itemsize for each in columns])
    yield from _worst("bytes past a whole element", rest, _nowhere, np.arange(len(plan)))
    lanes, slots, longest = _slots(plan)
    size = [plan.buffer_bytes] * plan.n_ranks
    for lane, used, message in zip(lanes.tolist(), slots.tolist(), longest.tolist(), strict=True):
        size[plan.lane_rank[lane]] += used * -(-message // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
    rank = size.index(max(size))
    yield Need("bytes of a rank, slots included", size[rank], f"rank {rank}", rank)


def _mpi_needs(plan: Plan) -> Iterator[Need]:
    yield from _optcc_needs(plan)
    receives = _is(plan, RECEIVES)
    yield from _worst("bytes of a message", plan.bytes[receives], _nowhere, receives)
    numbers = _channel_numbers(plan)
    channels = plan.in_channel[receives]
    yield from _worst("channels of a pair of ranks", numbers[channels] + 1, _nowhere, receives)


_MSCCL = (
    Limit("bytes of the name", 63, "the attribute `name` is copied into 64 bytes"),
    Limit("channels", 32, "MAXCHANNELS"),
    Limit("sending thread blocks of a GPU's channel", 32, "MSCCL_MAX_NUM_THREAD_BLOCKS_PER_CHANNEL"),
    Limit("receiving thread blocks of a GPU's channel", 32, "MSCCL_MAX_NUM_THREAD_BLOCKS_PER_CHANNEL"),
    Limit("thread blocks of a GPU", 216, "MSCCL_MAX_NUM_THREAD_BLOCKS"),
    Limit("thread blocks of a GPU that others wait for", 128, "their numbers are int8"),
    Limit("steps of a thread block", 256, "MSCCL_MAX_NUM_STEPS"),
    Limit("messages on their way to a receive lane", 2, "a Simple message takes 4 of the 8 steps of its FIFO"),
    Limit("chunks of a step", 71, "below MSCCL_MAX_COUNT"),
    Limit("highest chunk offset", 2**15 - 1, "offsets are int16"),
)
_MSCCL_LL = tuple(
    replace(each, at_most=8, source="a message of LL takes 1 of the 8 steps of its FIFO")
    if each.what.startswith("messages")
    else each
    for each in _MSCCL
)
_MSCCLPP = (
    Limit("operations of a thread block", 64, "MAX_OPERATION"),
    Limit("channels of a thread block", 16, "MAX_CHANNEL"),
    Limit("semaphores of an operation", 16, "MAX_DEVICE_SEMAPHORES"),
    Limit("highest offset or length in bytes", 2**32 - 1, "offsets and sizes are uint32"),
    Limit("bytes past a multiple of 16", 0, "buffer_alignment"),
    Limit("bytes of scratch space", 2**26, "PREDFINED_SCRATCH_SIZE"),
)
_OPTCC = (
    Limit("ranks", RANKS_MAX, "optcc.topology.RANKS_MAX"),
    Limit("bytes past a whole element", 0, "the executor's views are of whole elements"),
    Limit("bytes of a rank, slots included", 2**47, "address space"),
)
_MPI = (
    *_OPTCC,
    Limit("bytes of a message", 2**31 - 1, "counts are C ints"),
    Limit("channels of a pair of ranks", 2**15, "the standard promises the tags 0..32767"),
)
TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        target.name: target
        for target in (
            Target("msccl-xml", _MSCCL, _msccl_needs),
            Target("msccl-xml-ll", _MSCCL_LL, _msccl_needs),
            Target("mscclpp-json", _MSCCLPP, _mscclpp_needs),
            Target("optcc", _OPTCC, _optcc_needs),
            Target("mpi", _MPI, _mpi_needs),
        )
    }
)
"""The targets by name."""
