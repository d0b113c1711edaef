"""Races between the ops of GPUs: two accesses to a cell, one of them a write, that nothing orders.

Ordered are the ops of a process, an op and those that it waits for (`after`), and a message: what came before it was
sent comes before all that its receiver does with it. That a connection is full orders nothing here: with longer
messages it would hold more. The order is kept as vector clocks; a cell remembers the op that wrote it last and those
that have read it since. Where each access is ordered behind those, all conflicting accesses are ordered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from optcc.arrays import Column
from optcc.verify.gpu.operations import MESSAGE, GpuOp, Region, StepCounterexample, counter

Named = Callable[[int], str]
"""What a cell is called in the file."""


def find_gpu_race(
    file: str, ops: Sequence[GpuOp], n_processes: int, n_cells: int, named: Named
) -> StepCounterexample | None:
    """The first race of `ops`, which are in an order in which they may end; None if there is none."""
    itself = _overlaps_itself(file, ops, named)
    if itself is not None:
        return itself
    ends = np.zeros((n_processes, n_processes), dtype=np.int32)  # the clock of each process behind its last op
    kept: dict[int, Column] = {}
    wanted = Counter(each for op in ops for each in (*op.after, op.received))
    writer = [-1] * n_cells
    readers: list[dict[int, int]] = [{} for _ in range(n_cells)]  # by process its last op that has read the cell
    count = [0] * n_processes
    moment = [0] * len(ops)
    for index, op in enumerate(ops):
        start = ends[op.process].copy()
        for each in op.after:
            np.maximum(start, kept[each], out=start)
        full = start if op.received < 0 else np.maximum(start, kept[op.received])
        for each in (*op.after, op.received):
            wanted[each] -= 1
            if not wanted[each]:
                kept.pop(each, None)
        for region in op.operands:
            if region == MESSAGE:
                continue
            clock = start if op.reads_early else full
            for cell in range(*region):
                other = writer[cell]
                if other >= 0 and moment[other] > clock[ops[other].process]:
                    return _race(file, ops[other], op, named(cell), "reads it", "writes")
                readers[cell][op.process] = index
        for region in op.writes:
            for cell in range(*region):
                other = writer[cell]
                if other >= 0 and moment[other] > full[ops[other].process]:
                    return _race(file, ops[other], op, named(cell), "writes it as well", "writes")
                for process, reader in readers[cell].items():
                    if reader != index and moment[reader] > full[process]:
                        return _race(file, ops[reader], op, named(cell), "writes it", "reads")
                writer[cell] = index
                readers[cell] = {}
        count[op.process] += 1
        moment[index] = count[op.process]
        ends[op.process] = full
        ends[op.process, op.process] = moment[index]
        if wanted[index]:
            kept[index] = ends[op.process].copy()
    return None


def _race(file: str, first: GpuOp, second: GpuOp, cell: str, does: str, did: str) -> StepCounterexample:
    what = f"{does} while a step that nothing orders with this one {did} {cell}"
    return counter(file, "races", what, second.place, (first.place, second.place))


def _overlaps_itself(file: str, ops: Sequence[GpuOp], named: Named) -> StepCounterexample | None:
    """An op that writes some of what it reads elsewhere: the result depends on how it is cut."""

    def clash(one: Region, other: Region) -> int | None:
        first = max(one[0], other[0])
        return first if one != other and first < min(one[1], other[1]) else None

    for op in ops:
        for at, write in enumerate(op.writes):
            for read in (*op.operands, *op.writes[:at]):
                cell = None if read == MESSAGE else clash(write, read)
                if cell is not None:
                    return counter(file, "races", f"reads {named(cell)} and writes it at another offset", op.place)
    return None
