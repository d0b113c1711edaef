"""Result and agreement: symbolic execution of the plan, with trees of reductions as values.

The memory of a rank is partitioned into atoms, byte ranges that no instruction splits. The value of an atom is a
number: of a leaf (the input of a rank at an atom of the message), or of a reduction of two values. Trees are
hash-consed: equal reductions get equal numbers, operands in either order. So two ranks reduced an atom by the same tree
if they hold the same number, and each tree is expanded into its leaves once: these must be every rank of the
postcondition exactly once, from the same atom. The plan must be free of deadlocks and races, so that all interleavings
give the same result.

Where and by which property the plan fails is all that is found here; `optcc.verify.plan.explanation` says why.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from optcc.arrays import Column
from optcc.collective import DTYPE_BYTES
from optcc.compiled import compiled
from optcc.plan import RECEIVES, REDUCES, SENDS, Plan
from optcc.verdict import Counterexample
from optcc.verify.plan.byte_partition import CutsUnknown, carried_cuts, ranges
from optcc.verify.plan.plan_graph import PlanGraph

CELLS_MAX = 2**28
"""Limit of ranks times atoms; above it the verdict is unknown. A cell takes 8 bytes, a reduction up to 56."""
_RIGHT, _WRONG = range(2)
NOBODY = -2


class WrongResult(NamedTuple):
    """Where a plan breaks `property`, result or agreement: at a rank, in some of the atoms between `cuts`."""

    property: str
    rank: int
    atoms: range
    cuts: Column

    def plain(self) -> Counterexample:
        """What is known without an explanation."""
        low, high = int(self.cuts[self.atoms.start]), int(self.cuts[self.atoms.stop]) - 1
        return Counterexample(self.property, f"rank {self.rank} bytes {low}..{high}", self.rank, low, high)


def check_result(plan: Plan, graph: PlanGraph, order: Column) -> WrongResult | None:
    """The first place where result fails, else where agreement does, else None; `order` is that of `check_deadlock`.

    Raises CutsUnknown where the partition into atoms does not converge or is too large.
    """
    cuts = carried_cuts(plan)
    n_atoms = len(cuts) - 1
    if plan.n_ranks * n_atoms > CELLS_MAX:
        raise CutsUnknown(f"{plan.n_ranks} ranks with {n_atoms} pieces of the message each")
    unread = execute(plan, graph, order, cuts)
    if isinstance(unread, int):
        written = plan.dst_offset[unread], plan.dst_offset[unread] + plan.bytes[unread]
        atoms = range(*np.searchsorted(cuts, written).tolist())
        return WrongResult("result", int(plan.instruction_rank[unread]), atoms, cuts)
    memory, trees = unread
    wanted, sets = wanted_inputs(plan, cuts)
    found = np.full(3, -1, dtype=np.int64)
    belongs = _members(sets, plan.n_ranks)
    judged = _kernels().judge(memory.reshape(plan.n_ranks, n_atoms), wanted, belongs, *trees, found)
    if judged == _RIGHT and found[2] < 0:
        return None
    atoms = range(int(found[1]), int(found[1]) + 1)
    return WrongResult("agreement" if judged == _RIGHT else "result", int(found[0]), atoms, cuts)


def initial_leaves(plan: Plan, cuts: Column) -> Column:
    """Per rank and atom: the leaf of the rank's input there, else -1."""
    n_atoms = len(cuts) - 1
    memory = np.full((plan.n_ranks, n_atoms), -1, dtype=np.int64)
    itemsize = DTYPE_BYTES[plan.transfers.dtype]
    leaves = np.arange(plan.n_ranks * n_atoms).reshape(memory.shape)
    for rank in range(plan.n_ranks):
        for first, stop, ranks in plan.collective.before(rank, _count(plan)):
            assert ranks == 1 << rank, "what a rank has at the start is its own"
            low, high = np.searchsorted(cuts, (first * itemsize, stop * itemsize))
            memory[rank, low:high] = leaves[rank, low:high]
    return memory.reshape(-1)


def wanted_inputs(plan: Plan, cuts: Column) -> tuple[Column, list[int]]:
    """Per rank and atom, whose inputs it must hold at the end: the number of a set of ranks, or `NOBODY`; the sets."""
    wanted = np.full((plan.n_ranks, len(cuts) - 1), NOBODY, dtype=np.int64)
    itemsize = DTYPE_BYTES[plan.transfers.dtype]
    number: dict[int, int] = {}
    for rank in range(plan.n_ranks):
        for first, stop, ranks in plan.collective.after(rank, _count(plan)):
            low, high = np.searchsorted(cuts, (first * itemsize, stop * itemsize))
            wanted[rank, low:high] = number.setdefault(ranks, len(number))
    return wanted, list(number)


def _members(sets: list[int], n_ranks: int) -> Column:
    """Per set and rank, 1 if the rank is in it; in the last column, how many are. Two more rows are those of nobody."""
    belongs = np.zeros((len(sets) - NOBODY, n_ranks + 1), dtype=np.int64)
    for row, ranks in zip(belongs, sets, strict=False):
        row[:n_ranks] = [ranks >> rank & 1 for rank in range(n_ranks)]
        row[n_ranks] = ranks.bit_count()
    return belongs


def execute(plan: Plan, graph: PlanGraph, order: Column, cuts: Column) -> int | tuple[Column, tuple[Column, Column]]:
    """The memory at the end and its trees; or an instruction that reads uninitialised bytes."""
    n_atoms = len(cuts) - 1
    own = plan.dst_offset >= 0
    reads = ranges(plan, cuts, np.where(plan.src_offset >= 0, plan.src_offset, plan.dst_offset), np.ones_like(own))
    writes = ranges(plan, cuts, plan.dst_offset, own)
    width = reads.high - reads.low
    assert (width[own] == (writes.high - writes.low)[own]).all(), "cuts are closed under what instructions do"
    shift = plan.instruction_rank * n_atoms
    sends, receives = np.isin(plan.kind, list(SENDS)), np.isin(plan.kind, list(RECEIVES))
    reduces = np.isin(plan.kind, list(REDUCES))
    leaving = np.cumsum(np.where(sends, width, 0)) - width  # offset of a send's message among all messages
    coming = np.where(receives, leaving[graph.sent_by], -1)
    memory = initial_leaves(plan, cuts)
    rooms = 1 + int(width[reduces].sum())
    left, right = np.empty(rooms, dtype=np.int64), np.empty(rooms, dtype=np.int64)
    table = np.full(1 << (2 * rooms - 1).bit_length(), -1, dtype=np.int64)
    unread = _kernels().execute_events(
        order,
        (own, receives, reduces, sends),
        (reads.low + shift, writes.low + shift, width, leaving, coming),
        memory,
        np.empty(int(width[sends].sum()), dtype=np.int64),
        left,
        right,
        table,
    )
    return (memory, (left, right)) if unread < 0 else int(unread)


@cache
def _kernels() -> Any:
    return compiled((_combine, _execute_events, _is_right, _judge), globals())


def _combine(one: Any, other: Any, leaves: int, left: Column, right: Column, table: Column) -> Any:
    """The number of the tree over the trees `one` and `other`; numbers below `leaves` are leaves."""
    if one > other:
        one, other = other, one
    mask = len(table) - 1
    at = (one * 0x9E3779B1 ^ other * 0x85EBCA77) & mask
    at = (at ^ (at >> 15)) & mask
    while table[at] >= 0:
        tree = table[at]
        if left[tree] == one and right[tree] == other:
            return leaves + tree
        at = (at + 1) & mask
    tree = left[-1]  # the last entry counts those in use
    left[-1] = tree + 1
    left[tree], right[tree] = one, other
    table[at] = tree
    return leaves + tree


def _execute_events(
    order: Column, what: Any, where: Any, memory: Column, messages: Column, left: Column, right: Column, table: Column
) -> Any:
    """Runs all events on `memory`; returns an instruction that reads uninitialised bytes, or -1."""
    writes, receives, reduces, sends = what
    read_at, write_at, width, leaving, coming = where
    leaves = len(memory)
    left[-1] = 0
    for event in order:
        i = event >> 1
        if event & 1 == 0:
            if not writes[i]:
                continue
            for k in range(width[i]):
                value = messages[coming[i] + k] if receives[i] else memory[read_at[i] + k]
                cell = write_at[i] + k
                if value < 0 or (reduces[i] and memory[cell] < 0):
                    return i
                memory[cell] = _combine(memory[cell], value, leaves, left, right, table) if reduces[i] else value
        elif sends[i]:
            source = write_at[i] if receives[i] else read_at[i]
            for k in range(width[i]):
                messages[leaving[i] + k] = memory[source + k]
    return -1


def _is_right(
    value: int,
    atom: int,
    wanted: int,
    n_ranks: int,
    n_atoms: int,
    belongs: Column,
    left: Column,
    right: Column,
    seen: Column,
    stack: Column,
) -> bool:
    """True if the leaves of tree `value` are the inputs at `atom` of the ranks of set `wanted`, each once."""
    if value < 0:
        return False
    seen[:] = 0
    stack[0] = value
    depth, count = 1, 0
    while depth:
        depth -= 1
        value = stack[depth]
        if value >= n_ranks * n_atoms:
            if depth + 2 > n_ranks:  # more subtrees left than there are ranks
                return False
            stack[depth] = right[value - n_ranks * n_atoms]
            stack[depth + 1] = left[value - n_ranks * n_atoms]
            depth += 2
            continue
        rank = value // n_atoms
        if value % n_atoms != atom or seen[rank] or not belongs[wanted, rank]:
            return False
        seen[rank] = 1
        count += 1
    return bool(count == belongs[wanted, n_ranks])


def _judge(memory: Column, wanted: Column, belongs: Column, left: Column, right: Column, found: Column) -> int:
    """`_WRONG` with the first wrong (rank, atom) in `found`; else the first (rank, atom, other rank) whose trees differ
    in `found` though both want the same, if any."""
    n_ranks, n_atoms = memory.shape
    seen, stack = np.zeros(n_ranks, dtype=np.int64), np.empty(n_ranks + 2, dtype=np.int64)
    judged = np.full(n_atoms, -1, dtype=np.int64)  # the first rank that must hold something of the atom
    for rank in range(n_ranks):
        for atom in range(n_atoms):
            if wanted[rank, atom] == -2:
                continue
            other = judged[atom]
            while other >= 0 and other < rank and wanted[rank, atom] != wanted[other, atom]:
                other += 1
            if other >= 0 and other < rank and memory[rank, atom] == memory[other, atom]:
                continue
            if not _is_right(
                memory[rank, atom], atom, wanted[rank, atom], n_ranks, n_atoms, belongs, left, right, seen, stack
            ):
                found[0], found[1], found[2] = rank, atom, -1
                return 1
            if judged[atom] < 0:
                judged[atom] = rank
            elif other < rank and found[2] < 0:
                found[0], found[1], found[2] = rank, atom, other
    return 0


def _count(plan: Plan) -> int:
    return plan.size_bytes // DTYPE_BYTES[plan.transfers.dtype]
