"""The XML of MSCCL: an algorithm for the interpreter that Microsoft's forks of NCCL (and RCCL) run on GPUs.

A lane becomes thread blocks (`tb`) with at most one peer to send to and one to receive from each: one that receives on
m channels of the plan and sends on n of them becomes max(m, n) blocks, which take the channels in the order in which
the lane uses them. The k-th channel from a rank to a rank is channel k. An instruction is a step; a fused one whose two
channels fall to two blocks is two, of which the second waits for the first:

    send                   s     srcbuf, srcoff at the sender; dstbuf, dstoff where it goes at the receiver
    receive                r     the same two places
    receive-reduce         rrc   both places are the receiver's: it reads what it adds to at srcbuf, srcoff
    receive-reduce-send    rrcs  the same
    receive-copy-send      rcs   the sender's place and the receiver's
    copy, reduce           cpy, re
    (waits for k blocks)   nop   k - 1 of them before the step, which waits itself for the k-th

Places are in chunks, the greatest common divisor of all offsets and lengths: `cnt` is a step's length in them. Buffers
`i`, `o` and `s` are input, output and scratch space, in place but for an AllToAll (`optcc.export.blocks.Chunks`), in
which one more thread block of each rank copies its block for itself. A step that others wait for has `hasdep="1"`, and
so has every `re`, since the interpreter would otherwise merge consecutive ones.

The file has no size: it cuts a message of any size in `nchunksperloop`. It is offered to the run-time for the plan's
size alone (`minBytes`, `maxBytes`); for other sizes the order of its steps is right too, though perhaps no longer good.

A connection holds two messages (protocol Simple), and the interpreter may send each chunk of a step as one. A file
whose steps would then wait for each other for ever is refused: see `_check_progress`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from optcc.errors import PlanError
from optcc.export.blocks import Chunks, Place, Step, check_written, find_waits
from optcc.plan import LOCAL_REDUCE, RECV, RECV_COPY_SEND, RECV_REDUCE, RECV_REDUCE_SEND, SEND, Plan

TARGET = "msccl-xml"
REDUCTIONS = ("sum", "prod", "min", "max")
"""The caller names the operation; `avg` is left out because it divides, and no step does."""
SLOTS = 2
LIMITS = {
    "bytes of the name": 63,
    "channels": 32,
    "sending thread blocks of a GPU's channel": 32,
    "receiving thread blocks of a GPU's channel": 32,
    "thread blocks of a GPU": 216,
    "thread blocks of a GPU that others wait for": 128,
    "steps of a thread block": 256,
    "chunks of a step": 71,
    "highest chunk offset": 2**15 - 1,
    "XML nodes that a GPU reads": 4095,
}
"""What the reader of the file has room for; `optcc.verify.plan.limits` says where in its sources each stands."""
SPELLINGS = {("msccl", "reducescatter"): "reduce_scatter"}
"""By run-time and collective, where it is not the name that we and the other run-times have."""
_RECEIVING = frozenset(("r", "rrc", "rrcs", "rcs"))
_SENDING = frozenset(("s", "rrcs", "rcs"))
_NO_PLACE: Place = ("i", -1)


@dataclass(slots=True)
class _Step:
    """A step; `waits` are steps of other blocks by the block and the position, nops not counted."""

    kind: str
    src: Place
    dst: Place
    count: int
    instruction: int
    waits: list[Step]
    is_waited_for: bool = False


@dataclass(slots=True)
class _Block:
    """A thread block: its peers (-1: none), its steps, and how far `_check_progress` has come with it."""

    rank: int
    channel: int = 0
    send: int = -1
    recv: int = -1
    steps: list[_Step] = field(default_factory=list)
    done: int = 0
    messages: int = 0

    def starts(self) -> list[int]:
        """For each step the number of its first nop, or of itself; and the number of all of them."""
        return list(accumulate((max(1, len(step.waits)) for step in self.steps), initial=0))

    @property
    def is_waited_for(self) -> bool:
        """True if another block waits for one of the steps."""
        return any(step.is_waited_for for step in self.steps)


def write_msccl_xml(plan: Plan, runtime: str = "msccl") -> bytes:
    """`plan` as an MSCCL algorithm, protocol Simple, with the collective spelled as `runtime` does (`SPELLINGS`).

    >>> from optcc.compiler import compile_schedule
    >>> from optcc.schedules.ring import ring
    >>> file = write_msccl_xml(compile_schedule(ring(n_ranks=2), size_bytes=8)).decode()
    >>> [line.split()[2] for line in file.splitlines() if line.startswith("<step")]
    ['type="s"', 'type="rrcs"', 'type="r"', 'type="s"', 'type="rrcs"', 'type="r"']

    Raises InputError for a collective or a reduction that the format lacks, or a name that it cannot hold; PlanError if
    the parts of the ranks differ, if a step, a block or the file has more of something than the reader takes
    (`LIMITS`), or if two messages a connection are too few for it.
    """
    check_written(plan, TARGET, REDUCTIONS)
    chunks = Chunks.of(plan, TARGET)
    blocks, first, last = _blocks(plan)
    _fill(plan, chunks, blocks, first, last)
    _copy_own_blocks(plan, chunks, blocks)
    _check_limits(plan, chunks, blocks)
    _check_progress(plan, blocks)
    return _text(plan, chunks, blocks, SPELLINGS.get((runtime, plan.collective.name), plan.collective.name)).encode()


def _blocks(plan: Plan) -> tuple[list[_Block], list[Step], list[Step]]:
    """Thread blocks without their steps, and for each instruction its first and its last step."""
    numbers = _channel_numbers(plan)
    uses = [
        (int(used[at]), side, int(channel))
        for side, channels in enumerate((plan.in_channel, plan.out_channel))
        for used in (np.flatnonzero(channels >= 0),)
        for channel, at in zip(*np.unique(channels[used], return_index=True), strict=True)
    ]
    blocks: list[_Block] = []
    taken: dict[tuple[int, int, int], int] = {}  # by lane, channel and side, how many blocks are taken
    number: dict[tuple[int, int, int], int] = {}  # by lane, channel and place among the lane's blocks of that channel
    block_of = ([-1] * len(plan.channels), [-1] * len(plan.channels))
    lane_of = plan.instruction_lane.tolist()
    home: dict[int, int] = {}  # a lane's first block
    for index, side, channel in sorted(uses):
        lane, at = lane_of[index], numbers[channel]
        place = taken.get((lane, at, side), 0)
        taken[lane, at, side] = place + 1
        if (lane, at, place) not in number:
            number[lane, at, place] = len(blocks)
            home.setdefault(lane, len(blocks))
            blocks.append(_Block(int(plan.lane_rank[lane]), at))
        chosen = number[lane, at, place]
        block_of[side][channel] = chosen
        if side == 0:
            blocks[chosen].recv = plan.channels[channel].src
        else:
            blocks[chosen].send = plan.channels[channel].dst
    lengths: list[int] = [0] * len(blocks)
    first: list[Step] = []
    last: list[Step] = []
    for lane, into, out in zip(lane_of, plan.in_channel.tolist(), plan.out_channel.tolist(), strict=True):
        if lane not in home:
            home[lane] = len(blocks)
            blocks.append(_Block(int(plan.lane_rank[lane])))
            lengths.append(0)
        ends = [
            each for each in (block_of[0][into] if into >= 0 else -1, block_of[1][out] if out >= 0 else -1) if each >= 0
        ]
        steps = []
        for block in dict.fromkeys(ends or [home[lane]]):
            steps.append((block, lengths[block]))
            lengths[block] += 1
        first.append(steps[0])
        last.append(steps[-1])
    return blocks, first, last


def _channel_numbers(plan: Plan) -> list[int]:
    """For each channel which one of its pair of ranks it is: 0, 1, ..."""
    seen: dict[tuple[int, int], int] = {}
    numbers = []
    for channel in plan.channels:
        pair = (channel.src, channel.dst)
        numbers.append(seen.get(pair, 0))
        seen[pair] = numbers[-1] + 1
    return numbers


def _fill(plan: Plan, chunks: Chunks, blocks: list[_Block], first: Sequence[Step], last: Sequence[Step]) -> None:
    """Gives the blocks their steps."""
    waits = find_waits(plan, TARGET, first, last)
    t = plan.transfers
    src, dst = (
        list(map(chunks.place, ranks.tolist(), offsets.tolist()))
        for ranks, offsets in ((t.src, t.src_offset), (t.dst, t.dst_offset))
    )
    names = {RECV: "r", RECV_REDUCE: "rrc", RECV_REDUCE_SEND: "rrcs", RECV_COPY_SEND: "rcs", LOCAL_REDUCE: "re"}
    columns = (plan.kind, plan.bytes // chunks.bytes, plan.recv_transfer, plan.send_transfer)
    for index, (kind, count, into, out) in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
        block, _ = first[index]
        if kind == SEND:
            blocks[block].steps.append(_Step("s", src[out], dst[out], count, index, waits[index]))
            continue
        is_split = last[index] != first[index]
        name = names.get(kind, "cpy")
        if is_split:
            name = "rrc" if kind == RECV_REDUCE_SEND else "r"
        source = dst[into] if name.startswith("rr") else src[into]
        blocks[block].steps.append(_Step(name, source, dst[into], count, index, waits[index]))
        if is_split:
            blocks[last[index][0]].steps.append(_Step("s", dst[into], dst[out], count, index, [first[index]]))
    for each in blocks:
        for step in each.steps:
            for block, at in step.waits:
                blocks[block].steps[at].is_waited_for = True


def _copy_own_blocks(plan: Plan, chunks: Chunks, blocks: list[_Block]) -> None:
    """Adds a thread block to each rank of an AllToAll that copies what the rank has for itself."""
    for rank in range(plan.n_ranks):
        own = chunks.own_block(rank)
        if own is not None:
            first, count = own
            most = LIMITS["chunks of a step"]
            starts = range(first, first + count, most)
            lengths = [min(most, first + count - start) for start in starts]
            steps = [
                _Step("cpy", ("i", start), ("o", start), length, -1, [])
                for start, length in zip(starts, lengths, strict=True)
            ]
            blocks.append(_Block(rank, steps=steps))


def _check_limits(plan: Plan, chunks: Chunks, blocks: Sequence[_Block]) -> None:
    """Raises PlanError for what the reader of the file has no room for."""

    def check(what: str, amount: int, where: str) -> None:
        if amount > LIMITS[what]:
            raise PlanError(f"{TARGET}: {what}: {amount}: must be at most {LIMITS[what]}{where}")

    check("bytes of the name", len(plan.name), "")
    own, waited_for, steps = ([0] * plan.n_ranks for _ in range(3))
    sides = Counter(
        (f"{side} thread blocks of a GPU's channel", block.rank, block.channel)
        for block in blocks
        for side, peer in (("sending", block.send), ("receiving", block.recv))
        if peer >= 0
    )
    for (what, rank, channel), count in sides.items():
        check(what, count, f"; rank {rank} channel {channel}")
    for block in blocks:
        where = f"; rank {block.rank}"
        own[block.rank] += 1
        waited_for[block.rank] += block.is_waited_for
        steps[block.rank] += block.starts()[-1]
        check("channels", block.channel + 1, where)
        check("steps of a thread block", block.starts()[-1], where)
        for step in block.steps:
            hint = f"{where}; chunks are of {chunks.bytes} B here: take a size that the schedule cuts evenly"
            check("chunks of a step", step.count, hint)
            check("highest chunk offset", max(step.src[1], step.dst[1]), hint)
    for rank in range(plan.n_ranks):
        check("thread blocks of a GPU", own[rank], f"; rank {rank}")
        check("thread blocks of a GPU that others wait for", waited_for[rank], f"; rank {rank}")
        # Of other GPUs the parser keeps a node each.
        check("XML nodes that a GPU reads", 1 + plan.n_ranks + own[rank] + steps[rank], f"; rank {rank}")


def _check_progress(plan: Plan, blocks: Sequence[_Block]) -> None:
    """Raises PlanError if the steps can wait for each other for ever.

    A connection holds `SLOTS` messages, and each chunk of a step is taken to be one: where the interpreter sends
    several chunks as one, a message waits for less. What a block does next depends on nothing but its own steps, and
    nobody can take away what it waits for; so all orders end in the same place, and one of them is looked at.
    """
    sender = {(block.rank, block.send, block.channel): block for block in blocks if block.send >= 0}
    receiver = {(block.recv, block.rank, block.channel): block for block in blocks if block.recv >= 0}
    in_flight = dict.fromkeys(sender, 0)
    waiting: dict[int, list[_Block]] = {}  # by id of a block, those that wait for one of its steps
    ready = deque(blocks)
    while ready:
        block = ready.popleft()
        into, out = (block.recv, block.rank, block.channel), (block.rank, block.send, block.channel)
        before = (block.done, block.messages)
        while block.done < len(block.steps):
            step = block.steps[block.done]
            missing = next((other for other, at in step.waits if blocks[other].done <= at), -1)
            if missing >= 0:
                waiting.setdefault(id(blocks[missing]), []).append(block)
                break
            takes, gives = step.kind in _RECEIVING, step.kind in _SENDING
            if takes or gives:
                room = step.count - block.messages
                room = min(room, in_flight[into]) if takes else room
                room = min(room, SLOTS - in_flight[out]) if gives else room
                if takes:
                    in_flight[into] -= room
                if gives:
                    in_flight[out] += room
                block.messages += room
                if block.messages < step.count:
                    break
            block.done, block.messages = block.done + 1, 0
        if (block.done, block.messages) != before:
            ready += waiting.pop(id(block), [])
            ready += [each for each in (sender.get(into), receiver.get(out)) if each is not None]
    stuck = next((block for block in blocks if block.done < len(block.steps)), None)
    if stuck is not None:
        at = plan[stuck.steps[stuck.done].instruction]
        rule = f"must not need more than the {SLOTS} messages that a connection holds, each of one chunk"
        raise PlanError(f"{TARGET}: steps wait for each other, one of them for {at}: {rule}")


def _text(plan: Plan, chunks: Chunks, blocks: Sequence[_Block], coll: str) -> str:
    """The file; `coll` is the collective as it is spelled there.

    Its reader knows elements, attributes in double quotes, and nothing else of XML.
    """
    of_rank: list[list[int]] = [[] for _ in range(plan.n_ranks)]
    for number, block in enumerate(blocks):
        of_rank[block.rank].append(number)
    size_bytes = chunks.loop * chunks.bytes
    lines = [
        f'<algo name="{plan.name}" proto="Simple" nchannels="{max(block.channel for block in blocks) + 1}" '
        f'nchunksperloop="{chunks.loop}" ngpus="{plan.n_ranks}" coll="{coll}" inplace="{int(chunks.is_in_place)}" '
        f'outofplace="{int(not chunks.is_in_place)}" minBytes="{size_bytes}" maxBytes="{size_bytes}">'
    ]
    for rank, own in enumerate(of_rank):
        # Those that others wait for come first: the number of one is a byte.
        own.sort(key=lambda number: not blocks[number].is_waited_for)
        place = {number: at for at, number in enumerate(own)}
        lines.append(
            f'<gpu id="{rank}" i_chunks="{chunks.inputs}" o_chunks="{chunks.outputs}" '
            f's_chunks="{chunks.scratch(rank)}">'
        )
        for number in own:
            lines += _block_lines(blocks, blocks[number], place)
        lines.append("</gpu>")
    return "\n".join((*lines, "</algo>", ""))


def _block_lines(blocks: Sequence[_Block], block: _Block, place: dict[int, int]) -> list[str]:
    """A thread block and its steps; `place` is the number of each block of its rank."""
    own = next(at for number, at in place.items() if blocks[number] is block)
    lines = [f'<tb id="{own}" send="{block.send}" recv="{block.recv}" chan="{block.channel}">']
    for step in block.steps:
        waits = [(place[other], blocks[other].starts()[at + 1] - 1) for other, at in step.waits] or [(-1, -1)]
        for other, at in waits[:-1]:
            lines.append(_line(len(lines) - 1, "nop", _NO_PLACE, _NO_PLACE, 0, (other, at), False))
        is_marked = step.is_waited_for or step.kind == "re"
        lines.append(_line(len(lines) - 1, step.kind, step.src, step.dst, step.count, waits[-1], is_marked))
    return [*lines, "</tb>"]


def _line(number: int, kind: str, src: Place, dst: Place, count: int, wait: Step, is_waited_for: bool) -> str:
    return (
        f'<step s="{number}" type="{kind}" srcbuf="{src[0]}" srcoff="{src[1]}" dstbuf="{dst[0]}" dstoff="{dst[1]}" '
        f'cnt="{count}" depid="{wait[0]}" deps="{wait[1]}" hasdep="{int(is_waited_for)}"/>'
    )
