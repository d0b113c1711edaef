"""The execution plan of MSCCL++ (JSON): what its executor runs on the GPUs of one NVLink domain.

A lane is a thread block, and a channel of the plan a memory channel of its own between its two GPUs, used both ways. A
message is put into a slot: scratch space of the receiver, behind the plan's own. A lane uses its slots in turn, as the
plan does. The operations of an instruction:

    before    sem_acquire   once for each lane of the rank that it newly waits for
              wait          a receive: for its message; a send: for its slot, if that was used before
              nop           if there was one of the two: a barrier of the block's threads, as only some of them wait
    itself    send                  put
              receive               copy          out of the slot
              receive-reduce        re            what is there and the slot, to where it is
              receive-reduce-send   res           the same, and to the receiver's slot
              receive-copy-send     copy, put     both out of the slot
              copy, reduce          copy, re
    after     nop           all threads are done
              signal        a send: to the receiver; a receive: to the sender of the message that gets the slot next
              sem_release   for each lane that waits for this

In an AllToAll one more thread block of each rank copies its block for itself; where the message is on a GPU is said in
`optcc.export.blocks.Chunks`.

At its end a lane waits until the slots of those of its messages that are first in theirs are empty: for them the last
receive of a slot signals. So the next call can begin, whoever is still in this one, and all signals and semaphores are
back where they were.

Left out, because the executor's own handling of them is not to be relied on at the time of writing: port channels,
that is RDMA to other servers (its `flush` counts outputs that a flush does not have, and its put with signal and flush
passes an address as an offset), and reductions but the sum (the reader does not look at `reduce_op`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from optcc.errors import InputError, PlanError
from optcc.export.blocks import Chunks, Place, Step, check_written, find_waits
from optcc.plan import RECV_COPY_SEND, RECV_REDUCE_SEND, REDUCES, SEND, Plan

TARGET = "mscclpp-json"
DTYPES = ("float32", "int32", "float16", "bfloat16")
"""Those of ours that its kernels know."""
ALIGNMENT = 16
LIMITS = {
    "operations of a thread block": 64,
    "channels of a thread block": 16,
    "semaphores of an operation": 16,
    "bytes of the message": 2**31 - 1,
    "bytes of scratch space": 2**32 - 1,
}
"""What the reader of the file has room for; `optcc.verify.plan.limits` says where in its sources each stands."""
MEMORY = "memory"
CHANNELS_PER_OPERATION = 8

_Operation = dict[str, Any]


@dataclass(slots=True)
class _Gpu:
    """What belongs to a rank as a whole: by its number, the peer of each channel, the owner of each remote buffer."""

    scratch: int
    peers: list[int] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)
    semaphores: int = 0
    lanes: list[_Lane] = field(default_factory=list)


@dataclass(slots=True)
class _Lane:
    """A thread block in the making. It has numbers of its own for the channels and remote buffers that it uses."""

    gpu: _Gpu
    channels: list[int] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)
    operations: list[_Operation] = field(default_factory=list)

    def add(self, name: str, **fields: Any) -> None:
        """One more operation."""
        self.operations.append({"name": name, **fields})

    def on(self, channels: Sequence[int]) -> dict[str, Any]:
        """The fields of an operation that name these channels of the GPU."""
        return {"channel_ids": [_place(self.channels, each) for each in channels], "channel_type": MEMORY}

    def remote(self, peer: int, chunk: int, count: int) -> _Operation:
        """An operand in the scratch space of `peer`."""
        number = _place(self.buffers, _place(self.gpu.buffers, peer))
        return {"buffer_id": number, "index": chunk, "size": count}


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a message lands, as a chunk of the receiver's scratch space; which channel hears when it is taken out; and
    whether another message was there before."""

    chunk: int
    heard_by: int
    is_reused: bool


def write_mscclpp_json(plan: Plan) -> bytes:
    """`plan` as an execution plan of MSCCL++, protocol Simple.

    Raises InputError for a collective that the format lacks, a reduction but the sum, a type to reduce that the kernels
    lack or a name that the file cannot hold; PlanError if the parts of the ranks differ, if lengths and offsets are no
    multiples of 16 B, or if a thread block has more of something than the reader takes (`LIMITS`).
    """
    check_written(plan, TARGET, ("sum",))
    if plan.collective.reduces and plan.transfers.dtype not in DTYPES:
        raise InputError(f"{TARGET}: dtype {plan.transfers.dtype}: must be one of {', '.join(DTYPES)}")
    chunks = Chunks.of(plan, TARGET)
    if chunks.bytes % ALIGNMENT:
        hint = "take a size that the schedule cuts evenly"
        raise PlanError(f"{TARGET}: chunks of {chunks.bytes} B: must be multiples of {ALIGNMENT} B: {hint}")
    gpus = _gpus(plan, chunks)
    _check_limits(chunks, gpus)
    file = {
        "name": plan.name,
        "collective": plan.collective.name,
        "protocol": "Simple",
        "inplace": chunks.is_in_place,
        "reuse_resources": False,
        "use_double_scratch_buffer": False,
        "num_threads_per_block": 1024,
        "buffer_alignment": ALIGNMENT,
        "min_message_size": chunks.loop * chunks.bytes,
        "max_message_size": chunks.loop * chunks.bytes,
    }
    fields = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in file.items())
    body = ",\n".join(_gpu_text(rank, gpu, chunks) for rank, gpu in enumerate(gpus))
    return f'{{\n{fields}"gpus": [\n{body}\n]\n}}\n'.encode()


def _gpus(plan: Plan, chunks: Chunks) -> list[_Gpu]:
    """The ranks with all their operations."""
    gpus = [_Gpu(chunks.scratch(rank)) for rank in range(plan.n_ranks)]
    ends: list[tuple[int, int]] = []  # for each channel its numbers at its source and at its destination
    for channel in plan.channels:
        ends.append((len(gpus[channel.src].peers), len(gpus[channel.dst].peers)))
        gpus[channel.src].peers.append(channel.dst)
        gpus[channel.dst].peers.append(channel.src)
    slots, owed = _slots(plan, chunks, gpus)
    position = (np.arange(len(plan)) - plan.lanes.starts[plan.instruction_lane]).tolist()
    steps = list(zip(plan.instruction_lane.tolist(), position, strict=True))
    waits = find_waits(plan, TARGET, steps, steps)
    acquires, releases = _semaphores(plan, gpus, steps, waits)
    for rank, own in zip(plan.lane_rank.tolist(), plan.lanes, strict=True):
        lane = _Lane(gpus[rank])
        gpus[rank].lanes.append(lane)
        for index in own:
            _add_instruction(plan, chunks, lane, index, ends, slots, acquires[index], releases[index])
        left = {
            ends[channel][0]: owed[channel] for channel in dict.fromkeys(plan.out_channel[own].tolist()) if channel >= 0
        }
        while left := {channel: count for channel, count in left.items() if count}:
            for begin in range(0, len(left), CHANNELS_PER_OPERATION):
                lane.add("wait", **lane.on(list(left)[begin : begin + CHANNELS_PER_OPERATION]))
            left = {channel: count - 1 for channel, count in left.items()}
    for rank, gpu in enumerate(gpus):
        block = chunks.own_block(rank)
        if block is not None:
            first, count = block
            lane = _Lane(gpu)
            gpu.lanes.append(lane)
            lane.add("copy", src_buff=[_operand(("i", first), count)], dst_buff=[_operand(("o", first), count)])
    return gpus


def _slots(plan: Plan, chunks: Chunks, gpus: Sequence[_Gpu]) -> tuple[dict[int, _Slot], list[int]]:
    """For each transfer that is a message its slot; for each channel how many of its messages are first in theirs."""
    found: dict[int, _Slot] = {}
    owed = [0] * len(plan.channels)
    for rank, own in zip(plan.lane_rank.tolist(), plan.lanes, strict=True):
        receives = [index for index in own if plan.in_channel[index] >= 0]
        if not receives:
            continue
        channels = plan.in_channel[receives].tolist()
        used = min(plan.channels[channels[0]].slots, len(receives))
        longest = int(plan.bytes[receives].max()) // chunks.bytes
        for at, index in enumerate(receives):
            # Behind the last message in a slot comes the first one there of the next call.
            heard_by = channels[at + used if at + used < len(receives) else at % used]
            owed[channels[at]] += at < used
            chunk = gpus[rank].scratch + at % used * longest
            found[int(plan.recv_transfer[index])] = _Slot(chunk, heard_by, at >= used)
        gpus[rank].scratch += used * longest
    return found, owed


def _semaphores(
    plan: Plan, gpus: Sequence[_Gpu], steps: Sequence[Step], waits: Sequence[Sequence[Step]]
) -> tuple[list[list[int]], list[list[int]]]:
    """For each instruction the semaphores that it acquires and those that it releases.

    There is one for each lane and lane that it waits for. What a lane waits for in another one comes later each time,
    so the releases that matter are acquired in their order, each once.
    """
    number: dict[tuple[int, int], int] = {}
    acquires: list[list[int]] = [[] for _ in range(len(plan))]
    releases: list[list[int]] = [[] for _ in range(len(plan))]
    starts = plan.lanes.starts.tolist()
    for index, wanted in enumerate(waits):
        lane = steps[index][0]
        gpu = gpus[int(plan.lane_rank[lane])]
        for other, at in wanted:
            if (lane, other) not in number:
                number[lane, other] = gpu.semaphores
                gpu.semaphores += 1
            acquires[index].append(number[lane, other])
            releases[starts[other] + at].append(number[lane, other])
    return acquires, releases


def _add_instruction(
    plan: Plan,
    chunks: Chunks,
    lane: _Lane,
    index: int,
    ends: Sequence[tuple[int, int]],
    slots: dict[int, _Slot],
    acquires: Sequence[int],
    releases: Sequence[int],
) -> None:
    """The operations of one instruction."""
    kind, count = int(plan.kind[index]), int(plan.bytes[index]) // chunks.bytes
    into, out = int(plan.in_channel[index]), int(plan.out_channel[index])
    received, sent = int(plan.recv_transfer[index]), int(plan.send_transfer[index])
    waits = [ends[into][1]] if into >= 0 else []
    waits += [ends[out][0]] if out >= 0 and slots[sent].is_reused else []
    if acquires:
        lane.add("sem_acquire", semaphore_ids=list(acquires))
    if waits:
        lane.add("wait", **lane.on(waits))
    if acquires or waits:
        lane.add("nop")

    t = plan.transfers
    signals = []
    target: list[_Operation] = []
    if out >= 0:
        target = [lane.remote(plan.channels[out].dst, slots[sent].chunk, count)]
        signals.append(ends[out][0])
    if kind == SEND:
        source = _operand(chunks.place(int(t.src[sent]), int(t.src_offset[sent])), count)
        lane.add("put", src_buff=[source], dst_buff=target, channel_type=MEMORY)
    else:
        here = _operand(chunks.place(int(t.dst[received]), int(t.dst_offset[received])), count)
        if into >= 0:
            there = _operand(("s", slots[received].chunk), count)
            signals.append(ends[slots[received].heard_by][1])
        else:
            there = _operand(chunks.place(int(t.src[received]), int(t.src_offset[received])), count)
        if kind == RECV_REDUCE_SEND:
            lane.add("res", src_buff=[here, there], dst_buff=[here, *target], channel_type=MEMORY, reduce_op="sum")
        elif kind in REDUCES:
            lane.add("re", src_buff=[here, there], dst_buff=[here], reduce_op="sum")
        else:
            lane.add("copy", src_buff=[there], dst_buff=[here])
        if kind == RECV_COPY_SEND:
            lane.add("put", src_buff=[there], dst_buff=target, channel_type=MEMORY)
    lane.add("nop")
    if signals:
        lane.add("signal", **lane.on(signals))
    if releases:
        lane.add("sem_release", semaphore_ids=list(releases))


def _operand(place: Place, count: int) -> _Operation:
    """An operand of the rank's own."""
    return {"type": place[0], "index": place[1], "size": count}


def _place(numbers: list[int], wanted: int) -> int:
    """The place of `wanted` in `numbers`, at whose end it is put if it is not there."""
    if wanted not in numbers:
        numbers.append(wanted)
    return numbers.index(wanted)


def _check_limits(chunks: Chunks, gpus: Sequence[_Gpu]) -> None:
    """Raises PlanError for what the reader of the file has no room for."""

    def check(what: str, amount: int, where: str) -> None:
        if amount > LIMITS[what]:
            raise PlanError(f"{TARGET}: {what}: {amount}: must be at most {LIMITS[what]}{where}")

    check("bytes of the message", chunks.loop * chunks.bytes, "")
    for rank, gpu in enumerate(gpus):
        check("bytes of scratch space", gpu.scratch * chunks.bytes, f"; rank {rank}")
        for number, lane in enumerate(gpu.lanes):
            where = f"; rank {rank} thread block {number}"
            check("operations of a thread block", len(lane.operations), where)
            check("channels of a thread block", len(lane.channels), where)
            most = max(len(each.get("semaphore_ids", ())) for each in lane.operations)
            check("semaphores of an operation", most, where)


def _gpu_text(number: int, gpu: _Gpu, chunks: Chunks) -> str:
    """A rank, an operation a line."""
    head = {
        "id": number,
        "input_chunks": chunks.inputs,
        "output_chunks": chunks.outputs,
        "scratch_chunks": gpu.scratch,
        "channels": [{"channel_type": MEMORY, "connected_to": gpu.peers}] if gpu.peers else [],
        "remote_buffers": [{"rank": peer, "type": "s", "access_channel_types": [MEMORY]} for peer in gpu.buffers],
        "semaphores": [{"init_value": 0}] * gpu.semaphores,
    }
    fields = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    blocks = []
    for block, lane in enumerate(gpu.lanes):
        refs = [{"access_channel_type": MEMORY, "remote_buffer_ids": lane.buffers}] if lane.buffers else []
        channels = [{"channel_type": MEMORY, "channel_ids": lane.channels}] if lane.channels else []
        operations = ",\n".join(map(json.dumps, lane.operations))
        blocks.append(
            f'{{"id": {block},\n"channels": {json.dumps(channels)},\n"remote_buffer_refs": {json.dumps(refs)},\n'
            f'"ops": [\n{operations}\n]}}'
        )
    body = ",\n".join(blocks)
    return f'{{{fields}"threadblocks": [\n{body}\n]}}'
