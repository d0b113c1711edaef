"""Race freedom: two accesses to the same bytes of a rank, one of them a write, are ordered by happens-before.

Happens-before is that of the least conservative run-time: lanes order only the *issue* of instructions, so accesses
are ordered by dependencies, messages and freed slots, but not by lane order. An access lasts from its instruction's
issue to its done; A is before B if A's done happens before B's issue.

An instruction has up to four events, each after those listed:

    issue   the issue of the one before it in its lane, the done of each of its `after`
    taken   of a receive: its issue, and the arrival of its message; this frees the slot
    come    of a send, the arrival: its issue (a fused one's taken), and the slot that its message lands in is free
    done    a send's: the arrival of its message, though the sender may learn of it later; a plain receive's is its
            taken; a local operation's: its issue

The relation is not stored. Whether A is before B is decided on demand by a backward search from B.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from optcc.arrays import Column
from optcc.compiled import compiled
from optcc.plan import Instruction, Plan
from optcc.verdict import Counterexample
from optcc.verify.plan.byte_partition import accesses
from optcc.verify.plan.plan_graph import PlanGraph

HOW = (
    "reads what it writes at another place",
    "reads what the other writes",
    "overwrites what the other reads",
    "writes what the other writes",
)
ITSELF, READ, OVERWRITE, WRITE = range(len(HOW))

Span = tuple[Column, Column]
"""For each instruction the first cell and the cell after the last; a cell is an atom of a rank."""


class Causes(NamedTuple):
    """The predecessors of events, one entry per instruction, -1 for none; the names are those of `PlanGraph`.

    `place` is the position of an instruction in an order in which they can be done.
    """

    after_first: Column
    after: Column
    lane_before: Column
    sent_by: Column
    met: Column
    freed_by: Column
    place: Column


def check_races(plan: Plan, graph: PlanGraph, order: Column) -> Counterexample | None:
    """None if all conflicting accesses are ordered, else two that are not; `order` is topological."""
    place = np.empty(len(plan), dtype=np.int64)
    done = order[order & 1 == 1] >> 1
    place[done] = np.arange(len(plan))
    reads, writes = accesses(plan)
    shift = plan.instruction_rank * reads.n_atoms
    found = find_race(
        done,
        (reads.low + shift, reads.high + shift),
        (writes.low + shift, writes.high + shift),
        plan.n_ranks * reads.n_atoms,
        Causes(graph.after_first, graph.after, graph.lane_before, graph.sent_by, graph.met, graph.freed_by, place),
    )
    return None if found is None else _race(plan, *found[:2], HOW[found[2]])


def find_race(sequence: Column, reads: Span, writes: Span, n_cells: int, causes: Causes) -> tuple[int, int, int] | None:
    """Two instructions whose accesses to a common cell are not ordered, and which of `HOW`; None if all are.

    `sequence` lists the instructions in an order in which they can be done. Each access is checked against the last
    writer and the readers since; by transitivity that is enough.
    """
    n = len(sequence)
    found = np.zeros(3, dtype=np.int64)
    if _kernels().first_race(
        sequence,
        *reads,
        *writes,
        np.full(n_cells, -1, dtype=np.int64),
        np.full(n_cells, -1, dtype=np.int64),
        np.empty((int((reads[1] - reads[0]).sum()), 2), dtype=np.int64),
        np.full(n, -1, dtype=np.int64),
        tuple(causes),
        np.full(4 * n, -1, dtype=np.int64),
        np.empty(4 * n, dtype=np.int64),
        found,
    ):
        first, second, how = found.tolist()
        return first, second, how
    return None


@cache
def _kernels() -> Any:
    return compiled((_push, _is_before, _first_race), globals())


def _push(
    cause: int, before: int, horizon: int, query: int, place: Column, seen: Column, stack: Column, depth: int
) -> int:
    """Pushes `cause` unless it was seen or cannot be after `before`; -1 if it is the done of `before`."""
    if cause == 4 * before + 3:
        return -1
    if seen[cause] != query and place[cause >> 2] >= horizon:
        seen[cause] = query
        stack[depth] = cause
        depth += 1
    return depth


def _is_before(before: int, behind: int, causes: Any, seen: Column, stack: Column) -> bool:
    """True if instruction `before` is done before instruction `behind` is issued, in every run.

    Events of instruction i: 4 * i its issue, then + 1 taken (of a fused receive; a plain one's is its done), + 2 come,
    + 3 done. `seen` holds the number of the last query that visited an event: each pair is queried once.
    """
    after_first, after, lane_before, sent_by, met, freed_by, place = causes
    for at in range(after_first[behind], after_first[behind + 1]):
        if after[at] == before:
            return True
    horizon = place[before]
    query = before * len(place) + behind
    seen[4 * behind] = query
    stack[0] = 4 * behind
    depth = 1
    while depth:
        depth -= 1
        event = stack[depth]
        i = event >> 2
        what = event & 3
        if what == 0:
            if lane_before[i] >= 0:
                depth = _push(4 * lane_before[i], before, horizon, query, place, seen, stack, depth)
            for at in range(after_first[i], after_first[i + 1]):
                if depth >= 0:
                    depth = _push(4 * after[at] + 3, before, horizon, query, place, seen, stack, depth)
        elif what == 2:
            fused = sent_by[i] >= 0
            depth = _push(4 * i + (1 if fused else 0), before, horizon, query, place, seen, stack, depth)
            if depth >= 0 and freed_by[i] >= 0:
                freeing = freed_by[i]
                taken = 4 * freeing + (1 if met[freeing] >= 0 else 3)
                depth = _push(taken, before, horizon, query, place, seen, stack, depth)
        elif what == 3 and met[i] >= 0:
            depth = _push(4 * i + 2, before, horizon, query, place, seen, stack, depth)
        else:
            depth = _push(4 * i, before, horizon, query, place, seen, stack, depth)
            if depth >= 0 and sent_by[i] >= 0:
                depth = _push(4 * sent_by[i] + 2, before, horizon, query, place, seen, stack, depth)
        if depth < 0:
            return True
    return False


def _first_race(
    sequence: Column,
    read_low: Column,
    read_high: Column,
    write_low: Column,
    write_high: Column,
    writer: Column,
    readers: Column,
    reader: Column,
    known: Column,
    causes: Any,
    seen: Column,
    stack: Column,
    found: Column,
) -> bool:
    """True if two accesses race; `found` says which and how.

    `writer[cell]` is the last writer; `readers[cell]` is the head of a linked list of the reads since, in rows (reader,
    next); `known[j]` is the last instruction that j was proved to be before.
    """
    used = 0
    for i in sequence:
        low, high = read_low[i], read_high[i]
        if (low != write_low[i] or high != write_high[i]) and max(low, write_low[i]) < min(high, write_high[i]):
            found[0], found[1], found[2] = i, i, ITSELF
            return True
        for cell in range(low, high):
            last = writer[cell]
            if last >= 0 and known[last] != i:
                if not _is_before(last, i, causes, seen, stack):
                    found[0], found[1], found[2] = last, i, READ
                    return True
                known[last] = i
        for cell in range(write_low[i], write_high[i]):
            last = writer[cell]
            if readers[cell] < 0 and last >= 0 and known[last] != i:
                if not _is_before(last, i, causes, seen, stack):
                    found[0], found[1], found[2] = last, i, WRITE
                    return True
                known[last] = i
            at = readers[cell]
            while at >= 0:
                last = reader[at, 0]
                if known[last] != i:
                    if not _is_before(last, i, causes, seen, stack):
                        found[0], found[1], found[2] = last, i, OVERWRITE
                        return True
                    known[last] = i
                at = reader[at, 1]
        for cell in range(low, high):
            reader[used, 0], reader[used, 1] = i, readers[cell]
            readers[cell] = used
            used += 1
        for cell in range(write_low[i], write_high[i]):
            writer[cell] = i
            readers[cell] = -1
    return False


def _touched(row: Instruction) -> list[tuple[int, int, bool]]:
    """(first byte, byte after the last, whether it is written) of each access of an instruction."""
    ends = ((row.src_offset, False), (row.dst_offset, True))
    return [(offset, offset + row.bytes, writes) for offset, writes in ends if offset >= 0]


def _race(plan: Plan, first: int, second: int, how: str) -> Counterexample:
    a, b = plan[first], plan[second]
    low, high = next(
        (max(low, begin), min(stop, end) - 1)
        for low, stop, one_writes in _touched(a)
        for begin, end, other_writes in _touched(b)
        if max(low, begin) < min(stop, end) and (one_writes != other_writes or (one_writes and first != second))
    )
    return Counterexample(
        "races",
        f"rank {a.rank} bytes {low}..{high}: nothing orders two accesses; the second {how}",
        a.rank,
        low,
        high,
        tuple(f"{each}: {plan.transfers.describe(max(each.recv_transfer, each.send_transfer))}" for each in (a, b)),
    )
