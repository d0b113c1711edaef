"""What the executor of MSCCL++ does with the operations of a plan, call after call, and what orders what.

A thread block has many threads, and each goes through all operations. Of a data operation each thread does a part, in
no fixed way another part from operation to operation; the j-th thread alone serves the j-th channel or semaphore of an
operation. Only `nop` and `barrier` wait for all threads of the block. So:

- What a block has done is known to others when one of its threads has signalled behind a `nop` behind it.
- What a thread has learned by waiting, the others know behind the next `nop`.
- A signal carries all that its thread knows; a relaxed one, and a packet, carries only which GPUs have begun which
  call, and so that they have ended the calls before.
- A packet is read when it has been written in the same call: its flag is that call's. What was read to make it, of the
  same position, was read before: an operation that has the packet, and what comes behind it, may write there.
- What a port channel moves, a proxy moves later: it reads the source and writes the destination at any time between the
  operation and the next flush of the channel (`pwsf`), which the sender waits for. What the channel moved before comes
  before, and a signal of the channel comes behind it and tells the receiver. In 0.8 `flush` flushes as many channels as
  it has destinations: none in what its language writes. Nothing is flushed at the end of a call.
- A call begins on a GPU when all of its blocks have ended the one before; then its caller may write the input and use
  the output.

The state is a vector clock for each thread that waits: how far each block is known to be, counted in operations over
all calls. Of a channel or semaphore that several threads use a wait learns what it is sure to have had
(`optcc.verify.gpu.mscclpp_words`), so every order ends in the same place, and one is looked at.
"""

from __future__ import annotations

from collections import deque
from itertools import count

import numpy as np

from optcc.arrays import Column
from optcc.errors import CodecError
from optcc.verify.gpu.collective_result import GpuBuffers
from optcc.verify.gpu.contents import NOTHING, GpuContents, SumNodes
from optcc.verify.gpu.mscclpp_channels import SYNC, ChannelEnd, ThreadName, channels_of, match, pair_channels, users_of
from optcc.verify.gpu.mscclpp_file import Buffer, MscclppFile, MscclppOp, MscclppOperand, is_paired, is_push
from optcc.verify.gpu.mscclpp_pipeline import TurnOp
from optcc.verify.gpu.mscclpp_state import BlockThread, CellUse, Known, RunningBlock, shown
from optcc.verify.gpu.mscclpp_words import SharedWords
from optcc.verify.gpu.operations import GpuOp, StepCounterexample, StepPlace, counter

_BY_THREAD = frozenset(("signal", "wait", "rlxsignal", "rlxwait", "sem_acquire", "sem_release", "flush"))
_PACKET_SOURCES = {"rppkt": 0, "respkt": 1, "repkt": 1, "recpkt": 1, "recspkt": 1, "upkt": 0, "gstorepkt": 0}
"""Operations whose sources are packets from this one on."""
_PACKET_DESTINATIONS = {"ppkt": 0, "rppkt": 0, "respkt": 1, "recpkt": 1, "recspkt": 1, "cpkt": 0, "gstorepkt": 0}
PACKETS = frozenset((*_PACKET_SOURCES, *_PACKET_DESTINATIONS))


class MscclppExecutor:
    """Runs a plan for some calls. `found` is what went wrong, if anything did.

    Cells are those of `buffers`, and behind them those of packets: one for each cell of scratch space.
    """

    def __init__(self, name: str, file: MscclppFile, buffers: GpuBuffers, calls: int) -> None:
        self.name, self.file, self.buffers, self.calls = name, file, buffers, calls
        self.nodes = SumNodes()
        self.ops: list[GpuOp] = []
        self.found: StepCounterexample | None = None
        plan = file.plan
        self.peer = pair_channels(plan)
        users = users_of(plan, self.peer)
        # In a clock, behind the blocks, for each thread that has a port channel move something: what has been moved,
        # and what the channel was told to move. Behind these, what is known of the words that several threads use.
        entries = count(sum(len(gpu.threadblocks) for gpu in plan.gpus))
        self.moved = {end: {each: next(entries) for each in who} for end, who in users.pushers.items()}
        self.told = {end: {each: next(entries) for each in who} for end, who in users.pushers.items()}
        self.pushed = {(end, each): 0 for end, who in users.pushers.items() for each in who}
        self.shared = {
            key: SharedWords({each: next(entries) for each in who}, next(entries), users.first(plan, key))
            for key, who in users.shared.items()
        }
        self.may_take = False
        """Whether a wait for words of several threads may end: it has those that come first if all others wait."""
        self.packets_had: dict[tuple[int, int, int], set[int]] = {}
        self.packets_moved: dict[int, tuple[int, int, frozenset[int]]] = {}
        """For an op that has moved packets over a port: its entry in clocks, its moment, and the cells it wrote."""
        self.total = next(entries)
        self.blocks: list[RunningBlock] = []
        for gpu in plan.gpus:
            for block in gpu.threadblocks:
                width = 1 + max([0, *(max(len(op.channel_ids), len(op.semaphore_ids)) for op in block.ops)])
                threads = [BlockThread(self._nothing()) for _ in range(width)]
                self.blocks.append(RunningBlock(gpu.id, block.id, block.ops, threads, self._nothing(), self._nothing()))
        self.of_gpu = [[k for k, each in enumerate(self.blocks) if each.gpu == gpu.id] for gpu in plan.gpus]
        self.call = [0] * len(plan.gpus)
        halves = 2 if plan.use_double_scratch_buffer else 1
        self.packet_cells = buffers.n_cells
        n_cells = buffers.n_cells * (1 + halves)
        self.cells = [CellUse() for _ in range(n_cells)]
        self.values = [NOTHING] * n_cells
        self.captured = GpuContents(self.nodes, self.values[: buffers.n_cells], [-1] * buffers.n_cells)
        self.signals: dict[tuple[int, int], deque[Known]] = {}
        self.semaphores = {
            (gpu.id, number): deque(self._nothing() for _ in range(each.init_value))
            for gpu in plan.gpus
            for number, each in enumerate(gpu.semaphores)
        }

    def _nothing(self) -> Known:
        return Known(np.zeros(self.total, dtype=np.int64), np.zeros(self.total, dtype=np.int64))

    def _channels(self, block: RunningBlock, op: MscclppOp) -> list[int]:
        gpu = self.file.plan.gpus[block.gpu]
        return channels_of(gpu, gpu.threadblocks[block.number], op)

    def _place(self, at: int, k: int) -> StepPlace:
        block = self.blocks[at]
        op = block.ops[k]
        words = [op.word]
        if op.src_buff:
            words.append(" + ".join(shown(each) for each in op.src_buff[:4]))
        if op.dst_buff:
            words.append("into " + ", ".join(shown(each) for each in op.dst_buff[:4]))
        if op.channel_ids:
            channels = self._channels(block, op)
            peers = [str(self.peer[block.gpu, each][0]) for each in channels]
            words.append(f"with GPU {', '.join(peers)}")
        words += [f"in turn {op.turn} of its pipeline"] if isinstance(op, TurnOp) else []
        step = self.file.step(block.gpu, block.number, k)
        return StepPlace(self.file.op_lines[block.gpu][block.number][k], block.gpu, block.number, step, " ".join(words))

    # Running ----------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until all calls have ended, something is wrong, or all threads wait."""
        for gpu in range(len(self.of_gpu)):
            self._begin(gpu)
        moved = True
        while moved:
            moved = False
            for at in range(len(self.blocks)):
                while self._advance(at):
                    moved = True
            for gpu, own in enumerate(self.of_gpu):
                ended = all(each.at == len(self.blocks[k].ops) for k in own for each in self.blocks[k].threads)
                if ended and self.call[gpu] < self.calls:
                    self._end(gpu)
                    moved = True
            moved = moved or self._take_one()
        self._check_end()

    def _take_one(self) -> bool:
        """Ends a wait for words of several threads, of the earliest call in which there is one; whether there was."""
        self.may_take = bool(self.shared)
        blocks = sorted(range(len(self.blocks)), key=lambda at: self.call[self.blocks[at].gpu])
        moved = self.may_take and any(self._advance(at) for at in blocks)
        self.may_take = False
        return moved

    def _begin(self, gpu: int) -> None:
        """The caller writes the input and has read the output; all threads know what those of the call before knew."""
        own = self.of_gpu[gpu]
        known = self._nothing()
        for k in own:
            block = self.blocks[k]
            known.learn(block.packets)
            for thread in block.threads:
                known.learn(thread.known)
        for k in own:  # the beginning of a call is an operation of each block
            self.blocks[k].done += 1
            known.all[k] = self.blocks[k].done
        known.begun = known.all.copy()
        index = self._add(StepPlace(self.file.lines[gpu], gpu, what=f"the caller, before call {self.call[gpu] + 1}"))
        inputs = {self.buffers.cell(gpu, "i", chunk): chunk for chunk in range(self.buffers.chunks(gpu, "i"))}
        outputs = [self.buffers.cell(gpu, "o", chunk) for chunk in range(self.buffers.chunks(gpu, "o"))]
        is_last = self.call[gpu] == self.calls - 1
        for cell in dict.fromkeys((*inputs, *outputs)):
            if own:
                self._write(own[0], self.blocks[own[0]].done, known.all, cell, index, known.reads)
            leaf = (gpu if is_last else -1 - gpu, inputs.get(cell, 0))
            self.values[cell] = self.nodes.leaf(leaf) if cell in inputs else NOTHING
        for k in own:
            block = self.blocks[k]
            block.base, block.packets, block.call = known.copy(), self._nothing(), self.call[gpu]
            for thread in block.threads:
                thread.known, thread.at = known.copy(), 0

    def _end(self, gpu: int) -> None:
        """The caller reads the output, and the next call begins, if there is one."""
        known = np.zeros(self.total, dtype=np.int64)
        for k in self.of_gpu[gpu]:
            for thread in self.blocks[k].threads:
                np.maximum(known, thread.known.all, out=known)
        for k in self.of_gpu[gpu]:
            known[k] = self.blocks[k].done
        index = self._add(StepPlace(self.file.lines[gpu], gpu, what=f"the caller, after call {self.call[gpu] + 1}"))
        for chunk in range(self.buffers.chunks(gpu, "o")):
            cell = self.buffers.cell(gpu, "o", chunk)
            process, moment, op = self.cells[cell].writer
            if process >= 0 and moment > known[process]:
                self._race(op, index, cell, "reads it", "writes")
        for cell in range(self.buffers.n_cells):
            if self.buffers.owner(cell) == gpu:
                self.captured.cells[cell] = self.values[cell]
                self.captured.writer[cell] = self.cells[cell].writer[2]
        self.call[gpu] += 1
        if self.call[gpu] < self.calls:
            self._begin(gpu)

    def _add(self, place: StepPlace) -> int:
        self.ops.append(GpuOp(0, place, (), ()))
        return len(self.ops) - 1

    def _advance(self, at: int) -> bool:
        """Moves each thread of the block on by an operation, if it can; whether one has moved."""
        block = self.blocks[at]
        if self.call[block.gpu] >= self.calls:
            return False
        moved = False
        for number, thread in enumerate(block.threads):
            if thread.at == len(block.ops):
                continue
            op = block.ops[thread.at]
            if op.name in SYNC:
                continue
            if op.name in _BY_THREAD:
                if not self._serve(block, op, number, thread):
                    continue
            elif is_push(op):
                if not self._push(at, block, op, number, thread):
                    continue
            elif number == len(block.threads) - 1 and not self._move(at, block, thread):
                continue
            elif number < len(block.threads) - 1 and block.threads[-1].at <= thread.at:
                continue  # the last thread stands for all that do the data
            thread.at += 1
            moved = True
        group = self._meeting(block)
        if group:
            self._meet(group)
        return moved or bool(group)

    def _serve(self, block: RunningBlock, op: MscclppOp, number: int, thread: BlockThread) -> bool:
        """What thread `number` does of an operation on channels or semaphores; false if it must wait."""
        is_semaphore = op.name.startswith("sem")
        ids = op.semaphore_ids if is_semaphore else self._channels(block, op)
        if number >= len(ids):
            return True
        end = (block.gpu, ids[number])
        name = (block.gpu, block.number, number)
        if op.name == "flush":
            if number < self.file.flushed(op):
                self._flush(end, thread)
        elif op.name == "sem_release":
            self._put((True, *end), self.semaphores[end], thread.known.copy(), thread, name)
        elif op.name.endswith("signal"):
            self._signal(end, thread, name, op.name == "rlxsignal" and not op.by_port)
        else:
            queue = self.semaphores[end] if is_semaphore else self.signals.get(end)
            word = self._take((is_semaphore, *end), queue, thread, name)
            if word is None:
                return False
            thread.known.learn(word.relaxed() if op.name == "rlxwait" and not op.by_port else word)
        return True

    def _put(self, key: ChannelEnd, queue: deque[Known], word: Known, thread: BlockThread, name: ThreadName) -> None:
        """Sends a word to those who wait at a channel's end, or for a semaphore."""
        if key not in self.shared:
            queue.append(word)
        elif not self.shared[key].put(word, thread.known, name):
            self._refuse(name, thread, "which of its signals a wait has had is not decided")

    def _take(self, key: ChannelEnd, queue: deque[Known] | None, thread: BlockThread, name: ThreadName) -> Known | None:
        """What a wait learns; None if it must go on waiting."""
        if key not in self.shared:
            return queue.popleft() if queue else None
        words = self.shared[key]
        if not self.may_take or not words.has_more():
            return None
        self.may_take = False
        if not words.is_next(thread.known):
            self._refuse(name, thread, "nothing orders its waits")
        return words.take(thread.known)

    def _refuse(self, name: ThreadName, thread: BlockThread, why: str) -> None:
        at = next(k for k, each in enumerate(self.blocks) if (each.gpu, each.number) == name[:2])
        raise CodecError(f"{self._place(at, thread.at)}: used by several threads, and {why}: is not judged")

    def _flush(self, end: tuple[int, int], thread: BlockThread) -> None:
        """Waits until the channel has moved what it was told to, as far as the thread knows."""
        for each, moved in self.moved.get(end, {}).items():
            thread.known.all[moved] = thread.known.all[self.told[end][each]]

    def _signal(self, end: tuple[int, int], thread: BlockThread, name: ThreadName, is_relaxed: bool = False) -> None:
        """Sends what the thread knows, and behind it what it has told the channel to move."""
        word = thread.known.relaxed() if is_relaxed else thread.known.copy()
        for each, moved in self.moved.get(end, {}).items():
            word.all[moved] = max(word.all[moved], word.all[self.told[end][each]])
        peer = self.peer[end]
        self._put((False, *peer), self.signals.setdefault(peer, deque()), word, thread, name)

    def _push(self, at: int, block: RunningBlock, op: MscclppOp, number: int, thread: BlockThread) -> bool:
        """What thread `number` has a proxy move; false if its packets have not come."""
        ids = self._channels(block, op)
        if number >= len(ids):
            return True
        sources, targets = self._places(block, op)
        source, target = sources[min(number, len(sources) - 1)], targets[number]
        if op.name == "rppkt" and any(self.cells[cell].call != block.call for each in sources for cell in each):
            return False
        end, name = (block.gpu, ids[number]), (block.gpu, block.number, number)
        moved, told = self.moved[end][name], self.told[end][name]
        self.pushed[end, name] += 1
        moment = self.pushed[end, name]
        index = self._add(self._place(at, thread.at))
        clock = thread.known.all.copy()
        for each, before in self.moved[end].items():
            clock[before] = clock[self.told[end][each]]
        for cell in source:
            self._read(moved, moment, clock, cell, index, op.name == "rppkt")
        values = [self.values[cell] for cell in source]
        for position, cell in enumerate(target):
            taken = self.cells[source[position]]
            made_of = taken.made_of | {(index, source[position])} if op.name in PACKETS else frozenset()
            self._write(moved, moment, clock, cell, index, made_of | thread.known.reads)
            self.values[cell] = values[position]
            if op.name in PACKETS:
                begun = thread.known.begun
                held = self.cells[cell]
                held.call, held.made_of = taken.call, made_of
                held.carries = begun if taken.carries is None else np.maximum(begun, taken.carries)
        if op.name in PACKETS:
            self.packets_moved[index] = (moved, moment, frozenset(target))
        thread.known.all[told] = moment
        if op.name in ("pws", "pwsf"):
            self._signal(end, thread, name)
        if op.name == "pwsf":
            self._flush(end, thread)
        return True

    def _meeting(self, block: RunningBlock) -> list[RunningBlock]:
        """The blocks whose threads have all come to the nop or barrier that `block` is at; none if some are missing."""
        k = block.threads[0].at
        if k == len(block.ops) or any(thread.at != k for thread in block.threads) or block.ops[k].name not in SYNC:
            return []
        op = block.ops[k]
        if op.name == "nop":
            return [block]
        group = [each for each in self.blocks if each.gpu == block.gpu and self._at_barrier(each, op)]
        return [] if len(group) < (op.num_threadblocks or 0) else group

    def _meet(self, group: list[RunningBlock]) -> None:
        """Lets all threads of these blocks pass the nop or barrier that they have come to."""
        known = group[0].base.copy()
        for each in group:
            for thread in each.threads:
                known.learn(thread.known)
            each.done += 1
        for number, each in enumerate(self.blocks):
            if any(each is other for other in group):
                known.all[number] = each.done
        for each in group:
            each.base = known.copy()
            each.base.learn(each.packets)
            for thread in each.threads:
                thread.known = each.base.copy()
                thread.at += 1

    def _at_barrier(self, block: RunningBlock, op: MscclppOp) -> bool:
        k = block.threads[0].at
        if k == len(block.ops) or any(thread.at != k for thread in block.threads):
            return False
        return block.ops[k].name == "barrier" and block.ops[k].barrier_id == op.barrier_id

    # Data -------------------------------------------------------------------------------------------------------------

    def _move(self, at: int, block: RunningBlock, thread: BlockThread) -> bool:
        """Does a data operation; false if a packet has not come."""
        op = block.ops[thread.at]
        sources, targets = self._places(block, op)
        packet_from = _PACKET_SOURCES.get(op.name, 99)
        packets = [cells for number, cells in enumerate(sources) if number >= packet_from]
        if any(self.cells[cell].call != block.call for cells in packets for cell in cells):
            return False
        index = self._add(self._place(at, thread.at))
        block.done += 1
        clock = block.base.all
        for number, cells in enumerate(sources):
            for cell in cells:
                is_packet = number >= packet_from
                self._read(at, block.done, clock, cell, index, is_packet)
        columns = [[self.values[cell] for cell in cells] for cells in sources]
        to_packet = _PACKET_DESTINATIONS.get(op.name, 99)
        plain = [cells for number, cells in enumerate(sources) if number < packet_from]
        self._check_overlap(op, plain, targets, index)
        by_pair = is_paired(op)
        results = self._results(op, columns, len(targets), index)
        for number, cells in enumerate(targets):
            made = [number] if by_pair else range(len(sources))
            for position, cell in enumerate(cells):
                used = [sources[each][position] for each in made]
                taken = [self.cells[sources[each][position]] for each in made if each >= packet_from]
                made_of = frozenset((index, each) for each in used).union(*(each.made_of for each in taken))
                words = [each.carries for each in taken if each.carries is not None]
                carries = np.maximum.reduce([block.base.begun, *words])
                known = np.maximum(clock, carries)
                self._write(at, block.done, known, cell, index, made_of | block.base.reads)
                self.values[cell] = results[number][position]
                if number >= to_packet:
                    held = self.cells[cell]
                    held.call, held.carries, held.made_of = block.call, carries, made_of
        heard: set[tuple[int, int]] = set()
        for cells in packets:
            for cell in cells:
                word = self.cells[cell].carries
                heard |= self.cells[cell].made_of
                if word is not None:
                    block.packets.learn(Known(word, word))
        block.packets.reads |= heard
        self._learn_moved(block, {cell for cells in packets for cell in cells})
        return True

    def _learn_moved(self, block: RunningBlock, taken: set[int]) -> None:
        """A block that has had all packets of a move knows that it is over, and what its channel moved before."""
        for index in {self.cells[cell].writer[2] for cell in taken}.intersection(self.packets_moved):
            moved, moment, cells = self.packets_moved[index]
            had = self.packets_had.setdefault((block.gpu, block.number, index), set())
            had |= cells & taken
            if had == cells:
                block.packets.all[moved] = max(block.packets.all[moved], moment)

    def _check_overlap(self, op: MscclppOp, plain: list[list[int]], targets: list[list[int]], index: int) -> None:
        """Finds a cell that the op reads and writes at two positions: which thread does what first is not fixed."""
        by_pair = is_paired(op)
        read = {cell: (by_pair * k, at) for k, cells in enumerate(plain) for at, cell in enumerate(cells)}
        for k, cells in enumerate(targets):
            for at, cell in enumerate(cells):
                if read.get(cell, (by_pair * k, at)) != (by_pair * k, at):
                    self._race(index, index, cell, "reads it at another offset", "writes")

    def _results(self, op: MscclppOp, columns: list[list[int]], n_targets: int, index: int) -> list[list[int]]:
        """What each destination gets; sums are from left to right, packets before the local operand."""
        if is_paired(op):
            return columns
        if op.name == "glres":
            summed = [self.nodes.add(each, index) for each in zip(*columns, strict=True)]
            return [summed] * n_targets
        first = _PACKET_SOURCES.get(op.name, 0)
        summed, *rest = [*columns[first:], *columns[:first]]
        for column in rest:
            summed = [self.nodes.add(pair, index) for pair in zip(summed, column, strict=True)]
        return [summed] * n_targets

    def _places(self, block: RunningBlock, op: MscclppOp) -> tuple[list[list[int]], list[list[int]]]:
        """The cells of each source and destination; those of a switch channel are one for each GPU."""
        sources, targets = self._operands(op)
        found: list[list[list[int]]] = [[], []]
        for side, operands, packets in (
            (0, sources, 0 if op.by_port and op.name == "ppkt" else _PACKET_SOURCES.get(op.name, 99)),
            (1, targets, _PACKET_DESTINATIONS.get(op.name, 99)),
        ):
            for number, operand in enumerate(operands):
                for gpu, buffer in self._owners(block, op, operand):
                    found[side].append(self._cells(block, op, gpu, buffer, operand, number >= packets))
        return found[0], found[1]

    def _operands(self, op: MscclppOp) -> tuple[list[MscclppOperand], list[MscclppOperand]]:
        """The operands as the executor takes them."""
        sources, targets = op.src_buff, op.dst_buff
        if op.name == "get":  # the offsets of the one side are taken for the other
            indices = [(src.index, dst.index) for src, dst in zip(sources, targets, strict=True)]
            sources = [_at(each, dst) for each, (_, dst) in zip(sources, indices, strict=True)]
            targets = [_at(each, src) for each, (src, _) in zip(targets, indices, strict=True)]
        if op.name in ("put", "ppkt") and not op.by_port:  # and the buffer of the first source for all
            sources = [_at(each, each.index, sources[0].type) for each in sources]
        return sources, targets

    def _owners(self, block: RunningBlock, op: MscclppOp, operand: MscclppOperand) -> list[tuple[int, str]]:
        gpu = self.file.plan.gpus[block.gpu]
        own = gpu.threadblocks[block.number]
        if operand.switch_channel_id is not None:
            number = own.channel("switch", operand.switch_channel_id)
            assert number is not None
            buffer, ranks = gpu.groups()[number]
            return [(rank, buffer) for rank in ranks]
        if operand.buffer_id is not None:
            number = own.buffer(operand.buffer_id, op.reach)
            assert number is not None
            remote = gpu.remote_buffers[number]
            return [(remote.rank, remote.type)]
        assert operand.type is not None
        return [(block.gpu, operand.type)]

    def _cells(
        self, block: RunningBlock, op: MscclppOp, gpu: int, buffer: str, operand: MscclppOperand, is_packet: bool
    ) -> list[int]:
        parts = self.file.parts
        first, last = operand.index * parts, (operand.index + operand.size) * parts
        if op.tbg_info is not None:
            length = (last - first) // op.tbg_info.tbg_size
            first, last = first + op.tbg_info.tb_id * length, first + (op.tbg_info.tb_id + 1) * length
        if isinstance(op, TurnOp):
            first, last = first + op.first, min(last, first + op.last)
        start = self.buffers.cell(gpu, buffer, 0)
        if is_packet:
            half = block.call % 2 if self.file.plan.use_double_scratch_buffer else 0
            start += self.packet_cells * (1 + half)
        return list(range(start + first, start + last))

    def find_outside(self) -> StepCounterexample | None:
        """An operation that reaches beyond a buffer."""
        for at, block in enumerate(self.blocks):
            for k, op in enumerate(block.ops):
                for operand in (each for side in self._operands(op) for each in side):
                    for gpu, buffer in self._owners(block, op, operand):
                        chunks = self.buffers.chunks(gpu, buffer) // self.file.parts
                        if operand.index + operand.size > chunks:
                            what = f"{shown(operand)} is outside of {buffer}, which has {chunks} chunks at GPU {gpu}"
                            return counter(self.name, "limits", what, self._place(at, k))
                        if isinstance(op, TurnOp) and op.first > operand.size * self.file.parts:
                            what = f"{shown(operand)} has ended, its pipeline has not: a whole unit is moved behind it"
                            return counter(self.name, "limits", what, self._place(at, k))
        return None

    def _read(self, at: int, done: int, clock: Column, cell: int, index: int, is_packet: bool) -> None:
        process, moment, op = self.cells[cell].writer
        unordered = process >= 0 and (moment > clock[process] or (process == at and moment > clock[at]))
        if unordered and not is_packet:
            self._race(op, index, cell, "reads it", "writes")
        if process < 0 and not is_packet:
            self.captured.empty_reads.append((index, cell))
        self.cells[cell].readers.append((at, done, index))

    def _write(
        self,
        at: int,
        done: int,
        clock: Column,
        cell: int,
        index: int,
        made_of: frozenset[tuple[int, int]] = frozenset(),
    ) -> None:
        """Notes a write; the reads of `made_of` came before it."""
        held = self.cells[cell]
        process, moment, op = held.writer
        if process >= 0 and moment > clock[process]:
            self._race(op, index, cell, "writes it as well", "writes")
        for reader, moment, op in held.readers:
            if op != index and moment > clock[reader] and (op, cell) not in made_of:
                self._race(op, index, cell, "writes it", "reads")
        held.writer, held.readers = (at, done, index), []

    def _race(self, first: int, second: int, cell: int, does: str, did: str) -> None:
        """Notes a race between two ops, if it is the first."""
        if self.found is not None:
            return
        name = self.buffers.named(cell % self.packet_cells) + (" (packets)" if cell >= self.packet_cells else "")
        places = (self.ops[first].place, self.ops[second].place)
        place = places[1] if places[1].step >= 0 else places[0]
        what = f"a race of two operations that nothing orders: one {did} {name}, and the other {does}"
        self.found = counter(self.name, "races", what, place, places[: 1 + (first != second)])

    # The end ----------------------------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        """Finds a deadlock, which comes before all races."""
        stuck = [
            (at, thread.at)
            for at, block in enumerate(self.blocks)
            for thread in block.threads
            if self.call[block.gpu] < self.calls and thread.at < len(block.ops)
        ]
        if stuck:
            first = next(((at, k) for at, k in stuck if self.blocks[at].ops[k].name not in SYNC), stuck[0])
            trace = [str(self._place(at, k)) for at, k in dict.fromkeys(stuck)]
            what = f"waits for ever, as do {len(trace) - 1} more" if len(trace) > 1 else "waits for ever"
            self.found = counter(self.name, "deadlock", what, self._place(*first), trace)

    def match(self) -> StepCounterexample | None:
        """A channel that is not waited for as often as it is signalled, or a semaphore that a call leaves changed."""
        places = [[[self._place(at, k) for k in range(len(self.blocks[at].ops))] for at in own] for own in self.of_gpu]
        return match(self.name, self.file.plan, self.peer, places)


def _at(operand: MscclppOperand, index: int, kind: Buffer | None = None) -> MscclppOperand:
    """The operand at another index, or of another buffer."""
    return MscclppOperand(index, operand.size, kind or operand.type, operand.buffer_id, operand.switch_channel_id)
