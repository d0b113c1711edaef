"""The plan that an execution plan of MSCCL++ amounts to, to be timed and drawn; it is judged as the file that it is.

One call is performed by the executor that the verdict uses, and what it does is written down:

- Data that an operation moves to or from another GPU is a transfer, of packets their payload; an operation on data of
  its own GPU takes no time. An operation begins when all is done that its threads know: what was waited for or done
  before the `nop` or `barrier` before it, and its packets.
- A signal is a message of one element, sent when all is done that its thread knows: behind a put when the data has
  left. So is what a GPU asks for that reads at another (`get`, `rre`, `rres`).
- A thread block is a lane of data, the sends of a channel are another; a receive waits for nothing, and no message for
  room.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import pairwise

from optcc.arrays import Column, Lists, column
from optcc.collective import Collective
from optcc.errors import InputError, PlanError
from optcc.plan import LOCAL_COPY, LOCAL_REDUCE, RECV, RECV_REDUCE, SEND, SLOTS_MAX, Channel, Plan
from optcc.schedule import COPY, REDUCE
from optcc.transfers import Transfers
from optcc.verify.gpu.collective_result import GpuBuffers, calls_of_message
from optcc.verify.gpu.mscclpp import buffers_of, read_mscclpp
from optcc.verify.gpu.mscclpp_executor import MscclppExecutor
from optcc.verify.gpu.mscclpp_file import OVER_SWITCH, PAIRED, MscclppFile, MscclppOp
from optcc.verify.gpu.mscclpp_pipeline import has_pipelines, written_for
from optcc.verify.gpu.mscclpp_state import BlockThread, RunningBlock

DTYPE, ITEM = "float32", 4
STAGES = ("messages", "local operations", "signals")
_MESSAGES, _LOCAL, _SIGNALS = range(3)
Row = tuple[int, ...]
LaneKey = tuple[int, int, int, int]
"""GPU, what it is for, and two numbers that tell it from others."""
_DATA, _OUT, _IN = range(3)


def plan_of_mscclpp(data: bytes, size_bytes: int, *, root: int = 0) -> Plan:
    """The plan of the file with these bytes for a message of `size_bytes`, which the chunks share.

    Raises CodecError for what is not such a file, or not judged; InputError for a size that the chunks do not divide or
    that the file is not for, for operations of a switch, and for a collective of which nothing is known; PlanError
    where a signal is not waited for, an operation leaves its buffer, or threads wait for each other.
    """
    file = read_mscclpp(data)
    buffers = buffers_of(file)
    if buffers.collective == "custom":
        rule = "must be a known collective: nothing says what this one computes"
        raise InputError(f"collective {file.plan.collective}: {rule}")
    cells = max(buffers.chunks(gpu.id, side) for gpu in file.plan.gpus for side in "io")
    calls = calls_of_message(buffers.collective, len(file.plan.gpus))
    if cells == 0 or size_bytes < cells * ITEM * calls or size_bytes % (cells * ITEM * calls):
        rule = f"must be a multiple of {max(1, cells) * ITEM * calls}: the file has {cells} chunks, or parts of them"
        raise InputError(f"size of {size_bytes} B: {rule}")
    low, high = file.plan.min_message_size * calls, file.plan.max_message_size * calls
    if not low <= size_bytes <= high:
        raise InputError(f"size of {size_bytes} B: must be from {low} to {high}, as the file says")
    if has_pipelines(file):
        file = written_for(file, size_bytes // calls * file.parts // cells)
        buffers = buffers_of(file)
        cells = max(buffers.chunks(gpu.id, side) for gpu in file.plan.gpus for side in "io")
    for gpu, lines in zip(file.plan.gpus, file.op_lines, strict=True):
        for block in gpu.threadblocks:
            for op, line in zip(block.ops, lines[block.id], strict=True):
                if op.name in OVER_SWITCH:
                    raise InputError(f"line {line}: {op.word}: must be an operation without a switch, to be timed")
    writer = _PlanWriter(file, buffers, size_bytes // calls // cells)
    wrong = writer.find_outside() or writer.match()
    if wrong is not None:
        raise PlanError(wrong.summary)
    writer.run()
    if writer.found is not None and writer.found.property == "deadlock":
        raise PlanError(writer.found.summary)
    return writer.plan(size_bytes, root)


class _PlanWriter(MscclppExecutor):
    """Performs one call, and writes down its transfers and instructions; of these each thread knows some to be done.

    Instructions are numbered as they are written, and at the end by lane.
    """

    def __init__(self, file: MscclppFile, buffers: GpuBuffers, unit: int) -> None:
        super().__init__("the file", file, buffers, calls=1)
        self.unit = unit
        n_gpus = len(file.plan.gpus)
        starts = [*(buffers.first(gpu) for gpu in range(n_gpus)), buffers.n_cells]
        self.width = max(last - first for first, last in pairwise(starts))
        """Cells of the largest GPU; behind them lie those of packets, then an element for each signal."""
        self.transfers: list[Row] = []
        self.signals_sent = 0
        self.rows: list[Row] = []
        self.lane: list[LaneKey] = []
        self.after: list[set[int]] = []
        self.channels: dict[tuple[int, ...], int] = {}
        self.ends: list[tuple[int, int]] = []
        self.messages: list[int] = []
        self.learned = [[set[int]() for _ in block.threads] for block in self.blocks]
        self.had = [set[int]() for _ in self.blocks]
        self.new = [set[int]() for _ in self.blocks]
        self.packet_from: dict[int, int] = {}
        self.words: defaultdict[tuple[int, int], deque[tuple[int, set[int]]]] = defaultdict(deque)
        self.ported: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        """What each port channel was told to move; its signals come behind it."""
        self.tokens = {end: deque(set[int]() for _ in each) for end, each in self.semaphores.items()}
        self.index = {(block.gpu, block.number): at for at, block in enumerate(self.blocks)}

    # What the executor does -------------------------------------------------------------------------------------------

    def _serve(self, block: RunningBlock, op: MscclppOp, number: int, thread: BlockThread) -> bool:
        if not super()._serve(block, op, number, thread):
            return False
        ids = op.semaphore_ids if op.name.startswith("sem") else self._channels(block, op)
        if number >= len(ids):
            return True
        at, end = self.index[block.gpu, block.number], (block.gpu, ids[number])
        known = self.learned[at][number]
        line = self.file.op_lines[block.gpu][block.number][thread.at]
        if op.name == "flush":
            known |= self.ported[end] if number < self.file.flushed(op) else set()
        elif op.name == "sem_release":
            self.tokens[end].append(set(known))
        elif op.name == "sem_acquire":
            known |= self.tokens[end].popleft()
        elif op.name.endswith("signal"):
            self._tell(end, known | self.ported[end], line)
        else:
            sent, told = self.words[end].popleft()
            known |= told | {self._receive(sent, RECV, (_OUT, *self.peer[end]), set())}
        return True

    def _push(self, at: int, block: RunningBlock, op: MscclppOp, number: int, thread: BlockThread) -> bool:
        if not super()._push(at, block, op, number, thread):
            return False
        ids = self._channels(block, op)
        if number >= len(ids):
            return True
        end, known = (block.gpu, ids[number]), self.learned[at][number]
        line = self.file.op_lines[block.gpu][block.number][thread.at]
        sources, targets = self._places(block, op)
        source = sources[min(number, len(sources) - 1)]
        packets = {self.packet_from[cell] for cell in source if cell in self.packet_from}
        if source:
            self._copy(at, source, targets[number], known | packets, line, into=self.ported[end])
        if op.name in ("pws", "pwsf"):
            self._tell(end, known | self.ported[end], line)
        if op.name == "pwsf":
            known |= self.ported[end]
        return True

    def _meet(self, group: list[RunningBlock]) -> None:
        super()._meet(group)
        at = [self.index[block.gpu, block.number] for block in group]
        known: set[int] = set().union(*(self.new[each] | self.had[each] for each in at))
        known = known.union(*(each for k in at for each in self.learned[k]))
        known = known.difference(*(self.after[each] for each in known))
        for each in at:
            self.had[each], self.new[each] = set(known), set()
            self.learned[each] = [set(known) for _ in self.learned[each]]

    def _move(self, at: int, block: RunningBlock, thread: BlockThread) -> bool:
        if not super()._move(at, block, thread):
            return False
        op = block.ops[thread.at]
        line = self.file.op_lines[block.gpu][block.number][thread.at]
        sources, targets = self._places(block, op)
        if not targets[0]:  # a turn behind the end of its places
            return True
        known = self.had[at] | {
            self.packet_from[cell]
            for cells in sources
            for cell in cells
            if cell >= self.packet_cells and cell in self.packet_from
        }
        if op.name in PAIRED:
            for source, target in zip(sources, targets, strict=True):
                self._copy(at, source, target, known, line)
            return True
        if self._where(targets[0])[0] != block.gpu:  # packets handed on
            for number, target in enumerate(targets):
                self._copy(at, sources[min(number, len(sources) - 1)], target, known, line)
            return True
        terms = sorted(sources, key=lambda cells: cells[0] < self.packet_cells)
        total = targets[0]
        if total in terms:
            terms.remove(total)
        else:
            known = known | {self._copy(at, terms.pop(0), total, known, line)}
        for term in terms:
            known = known | {self._copy(at, term, total, known, line, REDUCE)}
        for target in targets[1:]:
            self._copy(at, total, target, known, line)
        return True

    # What is written down ---------------------------------------------------------------------------------------------

    def _where(self, cells: list[int]) -> tuple[int, int]:
        """GPU and offset in bytes of the first of some cells."""
        is_packet, cell = divmod(cells[0], self.packet_cells)
        gpu = self.buffers.owner(cell)
        return gpu, (cell - self.buffers.first(gpu) + self.width * bool(is_packet)) * self.unit

    def _copy(
        self,
        at: int,
        source: list[int],
        target: list[int],
        known: set[int],
        line: int,
        op: int = COPY,
        into: set[int] | None = None,
    ) -> int:
        """Writes that block `at` copies some cells, or adds them; the instruction that puts them at their place.

        The instructions are added to `into`, which without a proxy is what the block has done since the last nop.
        """
        into = self.new[at] if into is None else into
        (src, read), (dst, write) = self._where(source), self._where(target)
        own, length = self.blocks[at].gpu, len(source) * self.unit
        stage = _LOCAL if src == dst else _MESSAGES
        self.transfers.append((src, dst, op, read, write, length, 0, stage, line))
        moved = len(self.transfers) - 1
        if src == dst:
            kind = LOCAL_COPY if op == COPY else LOCAL_REDUCE
            done = self._add_row((own, _DATA, at, 0), (kind, -1, -1, read, write, length, moved, -1), known)
            into.add(done)
        elif src == own:
            key = (_DATA, at, src, dst)
            into.add(self._send(moved, (own, _DATA, at, 0), known, key))
            done = self._receive(moved, RECV, key, set())
            into.add(done)
        else:
            asked = self._word(own, src, line)
            self._send(asked, (own, _OUT, 1, at * len(self.of_gpu) + src), known, (_IN, at, src))
            come = self._receive(asked, RECV, (_IN, at, src), set())
            key = (_DATA, at, src, dst)
            into.add(self._send(moved, (src, _OUT, 2, at), {come}, key))
            done = self._receive(moved, RECV if op == COPY else RECV_REDUCE, key, known)
            into.add(done)
        self.packet_from.update((cell, done) for cell in target if cell >= self.packet_cells)
        return done

    def _tell(self, end: tuple[int, int], known: set[int], line: int) -> None:
        """Writes the message of a signal."""
        sent = self._word(end[0], self.peer[end][0], line)
        self._send(sent, (end[0], _OUT, 0, end[1]), known, (_OUT, *end))
        self.words[self.peer[end]].append((sent, set(known)))

    def _word(self, src: int, dst: int, line: int) -> int:
        """The transfer of an element that says or asks for something."""
        offset = 2 * self.width * self.unit + ITEM * self.signals_sent
        self.signals_sent += 1
        self.transfers.append((src, dst, COPY, offset, offset, ITEM, 0, _SIGNALS, line))
        return len(self.transfers) - 1

    def _channel(self, key: tuple[int, ...], src: int, dst: int) -> int:
        if key not in self.channels:
            self.channels[key] = len(self.ends)
            self.ends.append((src, dst))
            self.messages.append(0)
        return self.channels[key]

    def _send(self, moved: int, lane: LaneKey, known: set[int], key: tuple[int, ...]) -> int:
        src, dst, _, read, _, length, *_ = self.transfers[moved]
        channel = self._channel(key, src, dst)
        self.messages[channel] += 1
        return self._add_row(lane, (SEND, -1, channel, read, -1, length, -1, moved), known)

    def _receive(self, moved: int, kind: int, key: tuple[int, ...], known: set[int]) -> int:
        _, dst, _, _, write, length, *_ = self.transfers[moved]
        channel = self.channels[key]
        return self._add_row((dst, _IN, channel, 0), (kind, channel, -1, -1, write, length, moved, -1), known)

    def _add_row(self, lane: LaneKey, row: Row, known: Iterable[int]) -> int:
        self.rows.append(row)
        self.lane.append(lane)
        self.after.append({each for each in known if self.lane[each][0] == lane[0]})
        return len(self.rows) - 1

    def plan(self, size: int, root: int) -> Plan:
        """What was written, as a plan."""
        if max(self.messages, default=0) > SLOTS_MAX:
            raise InputError(f"{max(self.messages)} messages of a block to a GPU: must be at most {SLOTS_MAX}")
        order = sorted(range(len(self.rows)), key=lambda each: self.lane[each])
        place = {each: number for number, each in enumerate(order)}
        lanes = sorted(set(self.lane))
        count = dict.fromkeys(lanes, 0)
        for each in self.lane:
            count[each] += 1
        starts = [0]
        for each in lanes:
            starts.append(starts[-1] + count[each])
        cells = 2 * self.width * self.unit + ITEM * self.signals_sent
        src, dst, op, read, write, length, segment, stage, line = _columns(self.transfers, 9)
        plan = self.file.plan
        made = Collective(self.buffers.collective, len(plan.gpus), root)
        empty = Lists.empty(len(self.transfers))
        transfers = Transfers(
            *(made, "sum", DTYPE, size, max(0, cells - size), STAGES),
            *(src, dst, op, read, write, length, segment, stage, line),
            after=empty,
            order=empty,
        )
        kind, into, out, read, write, length, received, sent = _columns([self.rows[each] for each in order], 8)
        return Plan(
            plan.name,
            transfers,
            tuple(Channel(*ends, max(1, each)) for ends, each in zip(self.ends, self.messages, strict=True)),
            column([each[0] for each in lanes]),
            Lists(column(starts), column(range(len(order)))),
            *(kind, into, out, read, write, length, received, sent),
            after=Lists.of([sorted(place[one] for one in self.after[each]) for each in order]),
        )


def _columns(rows: list[Row], width: int) -> list[Column]:
    return [column(each) for each in zip(*rows, strict=True)] if rows else [column([])] * width
