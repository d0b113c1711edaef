"""The plan that an algorithm in MSCCL's XML amounts to, to be timed and drawn; it is judged as the file that it is.

A thread block is a lane, a connection a channel with the slots that its protocol has, a transmission an instruction
that waits for the one before it in its block and for the flags that it waits for. A message is one transfer, however
many the run-time makes of it; a local operation takes no time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from optcc.arrays import Column, Lists, column
from optcc.collective import Collective
from optcc.errors import InputError, PlanError
from optcc.plan import (
    LOCAL_COPY,
    LOCAL_REDUCE,
    RECV,
    RECV_COPY_SEND,
    RECV_REDUCE,
    RECV_REDUCE_SEND,
    SEND,
    Channel,
    Plan,
)
from optcc.schedule import COPY, REDUCE
from optcc.transfers import Transfers
from optcc.verify.gpu.collective_result import GpuBuffers, calls_of_message
from optcc.verify.gpu.msccl_file import ChunkPlace, MscclFile
from optcc.verify.gpu.msccl_interpreter import LoadedBlock, Transmission, load_file
from optcc.verify.gpu.msccl_progress import SLOTS, Progress, Step, match, run

DTYPE, ITEM = "float32", 4
STAGES = ("messages", "local operations")
_KINDS = {
    "s": SEND,
    "r": RECV,
    "rrc": RECV_REDUCE,
    "rcs": RECV_COPY_SEND,
    "rrcs": RECV_REDUCE_SEND,
    "rrs": RECV_REDUCE_SEND,
    "cpy": LOCAL_COPY,
    "re": LOCAL_REDUCE,
}
Row = tuple[int, ...]


def plan_of_msccl(data: bytes, size_bytes: int, *, root: int = 0) -> Plan:
    """The plan of the file with these bytes for a message of `size_bytes`, which `nchunksperloop` chunks share.

    Raises CodecError for what is not such an algorithm; InputError for a size that the chunks do not divide, and for a
    `custom` algorithm, of which nobody knows what it computes; PlanError where messages do not meet or steps wait for
    each other.
    """
    file = MscclFile.parse(data)
    if file.collective == "custom":
        raise InputError("coll custom: must be a known collective: nothing says what this one computes")
    chunks = file.n_chunks * calls_of_message(file.collective, file.n_gpus)
    unit = size_bytes // chunks
    if unit == 0 or size_bytes % (ITEM * chunks):
        rule = f"must be a multiple of {ITEM * chunks}: the file has {file.n_chunks} chunks"
        raise InputError(f"size of {size_bytes} B: {rule}")
    loaded = load_file(file)
    wrong, progress = match("the file", loaded)
    wrong = wrong or run("the file", loaded, SLOTS[file.protocol], max(1, file.n_chunks), progress)
    if wrong is not None:
        raise PlanError(wrong.summary)
    return _Writer(file, loaded, progress, unit).plan(root)


@dataclass(eq=False)
class _Writer:
    """Writes transfers and instructions, block after block."""

    file: MscclFile
    loaded: list[LoadedBlock]
    progress: Progress
    unit: int
    transfers: list[Row] = field(default_factory=list)
    instructions: list[Row] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    last_of: dict[Step, int] = field(default_factory=dict)
    sent: dict[Step, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.buffers = GpuBuffers(
            self.file.collective, [self.file.capacity(gpu) for gpu in self.file.gpus], self.file.places[0]
        )
        self.channels = sorted({self._connection(sender) for sender in self.progress.sender.values()})
        self.number = {connection: at for at, connection in enumerate(self.channels)}

    def _connection(self, sender: Step) -> tuple[int, int, int]:
        block = self.loaded[sender[0]].block
        return block.gpu, block.send, block.channel

    def _at(self, gpu: int, place: ChunkPlace) -> int:
        return (self.buffers.cell(gpu, *place) - self.buffers.first(gpu)) * self.unit

    def plan(self, root: int) -> Plan:
        for receiver, sender in self.progress.sender.items():
            self.sent[sender] = self._message(sender, receiver)
        starts = [0]
        for at, loaded in enumerate(self.loaded):
            for number, one in enumerate(loaded.transmissions):
                self._instruct(at, number, one)
            starts.append(len(self.instructions))
        for at, loaded in enumerate(self.loaded):
            first = starts[at]
            for number, one in enumerate(loaded.transmissions):
                mine = self.last_of[at, number]
                begin = mine + 1 - (len(one.sources) if one.step.kind == "re" else 1)
                self.after[begin] += [self.last_of[each] for each in self.progress.awaited[at, number]]
                for each in range(begin, mine + 1):
                    self.after[each] += [each - 1] if each > first else []
        cells = max(
            (max(row[3] + row[5], row[4] + row[5]) for row in self.transfers), default=self.file.n_chunks * self.unit
        )
        size = self.file.n_chunks * self.unit * calls_of_message(self.file.collective, self.file.n_gpus)
        src, dst, op, src_offset, dst_offset, length, segment, stage, line = _columns(self.transfers, 9)
        transfers = Transfers(
            *(
                Collective(self.file.collective, self.file.n_gpus, root),
                "sum",
                DTYPE,
                size,
                max(0, cells - size),
                STAGES,
            ),
            *(src, dst, op, src_offset, dst_offset, length, segment, stage, line),
            after=Lists.empty(len(src)),
            order=Lists.empty(len(src)),
        )
        kind, into, out, read, write, length, received, sent = _columns(self.instructions, 8)
        return Plan(
            self.file.attributes["name"],
            transfers,
            tuple(Channel(src, dst, SLOTS[self.file.protocol]) for src, dst, _ in self.channels),
            column([loaded.block.gpu for loaded in self.loaded]),
            Lists(column(starts), column(np.arange(len(kind)))),
            *(kind, into, out, read, write, length, received, sent),
            after=Lists.of([sorted(set(each)) for each in self.after]),
        )

    def _message(self, sender: Step, receiver: Step) -> int:
        """The transfer from a step that sends to the one that receives."""
        out, into = self.loaded[sender[0]], self.loaded[receiver[0]]
        one, other = out.transmissions[sender[1]], into.transmissions[receiver[1]]
        src, dst = out.block.gpu, into.block.gpu
        read = one.step.dst if one.step.kind in ("rcs", "rrcs") else one.step.src
        op = COPY if other.step.kind in ("r", "rcs") else REDUCE
        return self._transfer(src, dst, op, self._at(src, read), self._at(dst, _written(other)), one, stage=0)

    def _transfer(self, src: int, dst: int, op: int, read: int, write: int, one: Transmission, stage: int) -> int:
        self.transfers.append((src, dst, op, read, write, one.count * self.unit, 0, stage, one.step.line))
        return len(self.transfers) - 1

    def _instruct(self, at: int, number: int, one: Transmission) -> None:
        """The instruction of a transmission; of a chain of reductions one for each."""
        gpu, length, kind = self.loaded[at].block.gpu, one.count * self.unit, _KINDS[one.step.kind]
        if not (one.receives or one.sends):
            for source in one.sources:
                read, write = self._at(gpu, source), self._at(gpu, one.step.dst)
                op = COPY if kind == LOCAL_COPY else REDUCE
                transfer = self._transfer(gpu, gpu, op, read, write, one, stage=1)
                self._add((kind, -1, -1, read, write, length, transfer, -1))
        else:
            block, step = self.loaded[at].block, (at, number)
            into = self.number[block.recv, gpu, block.channel] if one.receives else -1
            out = self.number[gpu, block.send, block.channel] if one.sends else -1
            read = self._at(gpu, one.step.src) if kind == SEND else -1
            write = self._at(gpu, _written(one)) if one.receives else -1
            received = self.taken(step) if one.receives else -1
            self._add((kind, into, out, read, write, length, received, self.sent[step] if one.sends else -1))
        self.last_of[at, number] = len(self.instructions) - 1

    def taken(self, receiver: Step) -> int:
        """The transfer that a step receives."""
        return self.sent[self.progress.sender[receiver]]

    def _add(self, row: Row) -> None:
        self.instructions.append(row)
        self.after.append([])


def _columns(rows: list[Row], width: int) -> list[Column]:
    return [column(each) for each in zip(*rows, strict=True)] if rows else [column([])] * width


def _written(one: Transmission) -> ChunkPlace:
    """Where a receiving transmission puts what it has; one that stores nothing adds to its operand."""
    return one.step.src if one.step.kind == "rrs" else one.step.dst
