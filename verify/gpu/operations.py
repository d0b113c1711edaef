"""`GpuOp`: what one step of a thread block reads, writes, sends and waits for; and where in its file it stands.

Memory is one range of cells for all GPUs, a cell a chunk of a buffer. An op computes the sum of its operands, cell by
cell, and puts it into each of its destinations. The ops of a process (a thread block) run one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optcc.verdict import Counterexample

Region = tuple[int, int]
"""The first cell, and the one behind the last."""
MESSAGE: Region = (-1, -1)
"""Stands among the operands for the message that the op receives."""


@dataclass(frozen=True, slots=True)
class StepPlace:
    """Where a step is: line of the file, GPU, thread block and number in it (-1: none), and what it does, in words."""

    line: int
    gpu: int = -1
    block: int = -1
    step: int = -1
    what: str = ""

    def __str__(self) -> str:
        parts = [f"line {self.line}"]
        parts += [f"GPU {self.gpu}"] if self.gpu >= 0 else []
        parts += [f"thread block {self.block}"] if self.block >= 0 else []
        parts += [f"step {self.step}"] if self.step >= 0 else []
        return ", ".join(parts) + (f": {self.what}" if self.what else "")


@dataclass(frozen=True, slots=True)
class GpuOp:
    """An op of process `process`.

    `after` are ops that end before this one starts; `received` is the op that sends the message that this one takes,
    -1 if it takes none. What the op reads, it reads after that message has come, unless `reads_early`: protocols LL and
    LL128 load the local operand while they wait for the message. `is_chain`: more than two operands are added up in an
    order that depends on the size.
    """

    process: int
    place: StepPlace
    operands: tuple[Region, ...]
    writes: tuple[Region, ...]
    after: tuple[int, ...] = ()
    received: int = -1
    sends: bool = False
    reads_early: bool = False

    @property
    def length(self) -> int:
        """Cells of the message, or of each place."""
        known = [region for region in (*self.operands, *self.writes) if region != MESSAGE]
        return known[0][1] - known[0][0]


@dataclass(frozen=True, slots=True)
class StepCounterexample(Counterexample):
    """A counterexample in a file: its name, and the line, GPU, thread block and step where it shows (-1: none)."""

    file: str = ""
    line: int = -1
    gpu: int = -1
    thread_block: int = -1
    step: int = -1


def counter(
    file: str, property_: str, summary: str, place: StepPlace, trace: Sequence[StepPlace | str] = ()
) -> StepCounterexample:
    """The counterexample that says `summary` of `place` in `file`."""
    return StepCounterexample(
        property_,
        f"{file}: {place}: {summary}",
        place.gpu if place.gpu >= 0 else None,
        trace=tuple(str(each) for each in trace),
        file=file,
        line=place.line,
        gpu=place.gpu,
        thread_block=place.block,
        step=place.step,
    )
