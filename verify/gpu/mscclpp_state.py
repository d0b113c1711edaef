"""The state of MSCCL++'s executor: what threads know, where thread blocks are, who has touched a cell."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from optcc.arrays import Column
from optcc.verify.gpu.mscclpp_file import MscclppOp, MscclppOperand


@dataclass(slots=True)
class Known:
    """What a thread knows: `all` of it, and of that what it knows because calls have begun.

    `reads` are those (op and cell) that it knows to be over because it has a packet that was made of them.
    """

    all: Column
    begun: Column
    reads: frozenset[tuple[int, int]] = frozenset()

    def copy(self) -> Known:
        return Known(self.all.copy(), self.begun.copy(), self.reads)

    def learn(self, other: Known) -> None:
        np.maximum(self.all, other.all, out=self.all)
        np.maximum(self.begun, other.begun, out=self.begun)
        self.reads |= other.reads

    def relaxed(self) -> Known:
        return Known(self.begun.copy(), self.begun.copy(), self.reads)


@dataclass(slots=True)
class BlockThread:
    """One of the first threads of a block, which serve channels, or the last one, which stands for all others."""

    known: Known
    at: int = 0


@dataclass(slots=True)
class RunningBlock:
    """A thread block in a call; `done` counts its operations over all calls.

    `base` is what all of its threads know, `packets` what some have learned by reading packets.
    """

    gpu: int
    number: int
    ops: list[MscclppOp]
    threads: list[BlockThread]
    base: Known
    packets: Known
    call: int = 0
    done: int = 0


@dataclass(slots=True)
class CellUse:
    """Who has written a cell last, and read it since: block, its operation counted over all calls, and op.

    A packet has the `call` in which it was written, carries what its writer knew to have begun, and the reads (op and
    cell) from which it was made.
    """

    writer: tuple[int, int, int] = (-1, 0, -1)
    readers: list[tuple[int, int, int]] = field(default_factory=list)
    call: int = -1
    carries: Column | None = None
    made_of: frozenset[tuple[int, int]] = frozenset()


def shown(operand: MscclppOperand) -> str:
    """A place as it is called in messages."""
    if operand.switch_channel_id is not None:
        buffer = f"switch {operand.switch_channel_id} "
    else:
        buffer = operand.type or f"remote {operand.buffer_id} "
    last = operand.index + operand.size
    return f"{buffer}[{operand.index}]" if operand.size == 1 else f"{buffer}[{operand.index}:{last}]"
