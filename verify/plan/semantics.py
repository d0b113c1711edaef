"""Result and agreement: symbolic execution of the plan, with trees of reductions as values.

The memory of a rank is partitioned into atoms, byte ranges that no instruction splits. The value of an atom is a
number: of a leaf (the input of a rank at an atom of the message), or of a reduction of two values. Trees are
hash-consed: equal reductions get equal numbers, operands in either order. So two ranks reduced an atom by the same tree
if they hold the same number, and each tree is expanded into its leaves once: these must be every rank of the
postcondition exactly once, from the same atom. The plan must be free of deadlocks and races, so that all interleavings
give the same result.

A counterexample is explained by a second run with sets of contributions, on the atoms in question (`_Retelling`).
"""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from optcc.arrays import Column
from optcc.collective import DTYPE_BYTES
from optcc.compiled import compiled
from optcc.plan import LOCALS, RECEIVES, REDUCES, SENDS, Plan
from optcc.verdict import Counterexample
from optcc.verify.plan.byte_partition import CutsUnknown, carried_cuts, ranges
from optcc.verify.plan.plan_graph import PlanGraph

CELLS_MAX = 2**28
"""Limit of ranks times atoms; above it the verdict is unknown. A cell takes 8 bytes, a reduction up to 56."""
MIXED = -1
_RIGHT, _WRONG = range(2)
_NOBODY = -2


def check_result(plan: Plan, graph: PlanGraph, order: Column) -> tuple[Counterexample | None, Counterexample | None]:
    """Counterexamples for result and for agreement, None where the property holds; `order` is that of `check_deadlock`.

    Raises CutsUnknown where the partition into atoms does not converge or is too large.
    """
    cuts = carried_cuts(plan)
    n_atoms = len(cuts) - 1
    if plan.n_ranks * n_atoms > CELLS_MAX:
        raise CutsUnknown(f"{plan.n_ranks} ranks with {n_atoms} pieces of the message each")
    unread = _execute(plan, graph, order, cuts)
    if isinstance(unread, int):
        written = plan.dst_offset[unread], plan.dst_offset[unread] + plan.bytes[unread]
        atoms = range(*np.searchsorted(cuts, written).tolist())
        wrong, _ = _Retelling(plan, cuts, atoms, order).tell()
        assert wrong is not None, "the second run reads uninitialised bytes too"
        return wrong, None
    memory, trees = unread
    wanted, sets = _wanted(plan, cuts)
    found = np.full(3, -1, dtype=np.int64)
    belongs = _members(sets, plan.n_ranks)
    judged = _kernels().judge(memory.reshape(plan.n_ranks, n_atoms), wanted, belongs, *trees, found)
    if judged == _RIGHT and found[2] < 0:
        return None, None
    wrong, disagreement = _Retelling(plan, cuts, range(int(found[1]), int(found[1]) + 1), order).tell()
    assert (wrong is None) == (found[2] >= 0) and (wrong or disagreement), "the second run finds the same"
    return wrong, disagreement


def _initial(plan: Plan, cuts: Column) -> Column:
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


def _wanted(plan: Plan, cuts: Column) -> tuple[Column, list[int]]:
    """Per rank and atom, whose inputs it must hold at the end: the number of a set of ranks, or `_NOBODY`; the sets."""
    wanted = np.full((plan.n_ranks, len(cuts) - 1), _NOBODY, dtype=np.int64)
    itemsize = DTYPE_BYTES[plan.transfers.dtype]
    number: dict[int, int] = {}
    for rank in range(plan.n_ranks):
        for first, stop, ranks in plan.collective.after(rank, _count(plan)):
            low, high = np.searchsorted(cuts, (first * itemsize, stop * itemsize))
            wanted[rank, low:high] = number.setdefault(ranks, len(number))
    return wanted, list(number)


def _members(sets: list[int], n_ranks: int) -> Column:
    """Per set and rank, 1 if the rank is in it; in the last column, how many are. Two more rows are those of nobody."""
    belongs = np.zeros((len(sets) - _NOBODY, n_ranks + 1), dtype=np.int64)
    for row, ranks in zip(belongs, sets, strict=False):
        row[:n_ranks] = [ranks >> rank & 1 for rank in range(n_ranks)]
        row[n_ranks] = ranks.bit_count()
    return belongs


def _execute(plan: Plan, graph: PlanGraph, order: Column, cuts: Column) -> int | tuple[Column, tuple[Column, Column]]:
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
    memory = _initial(plan, cuts)
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


class Value(NamedTuple):
    """The value of an atom: `transfer` wrote it last, `tree` is its reduction, `origin` its offset in the message."""

    ranks: int
    twice: int
    origin: int
    tree: int
    transfer: int


class MessageWritten(NamedTuple):
    """One write of the second run: transfer, place, the value that arrived, and the one it met (None: none)."""

    transfer: int
    rank: int
    atom: int
    came: Value
    stood: Value | None
    reduced: bool


class _Retelling:
    """A second run, with sets of contributions, of the instructions that access a few atoms."""

    def __init__(self, plan: Plan, cuts: Column, atoms: range, order: Column) -> None:
        self.plan = plan
        self.cuts = cuts.tolist()
        own = np.ones(len(plan), dtype=np.bool_)
        self.reads = ranges(plan, cuts, np.where(plan.src_offset >= 0, plan.src_offset, plan.dst_offset), own)
        self.writes = ranges(plan, cuts, plan.dst_offset, plan.dst_offset >= 0)
        self.atoms = self._linked(atoms)
        touched = np.zeros(len(cuts), dtype=np.int64)
        touched[[atom + 1 for atom in self.atoms]] = 1
        before = np.cumsum(touched)
        takes_part = (before[self.reads.high] > before[self.reads.low]) | (
            before[self.writes.high] > before[self.writes.low]
        )
        self.order = order[takes_part[order >> 1]].tolist()
        self.trees: dict[tuple[int, int], int] = {}
        self.doubled: list[tuple[int, int, int, int, int]] = []  # rank, atom, ranks, left and right transfer
        self.complete: dict[int, tuple[int, int]] = {}  # atom: the first complete rank, and its transfer
        self.log: list[MessageWritten] = []
        leaves = _initial(plan, cuts).reshape(plan.n_ranks, -1)
        self.memory: dict[tuple[int, int], Value] = {
            (rank, atom): Value(1 << rank, 0, self.cuts[atom], rank, -1)
            for atom in self.atoms
            for rank in np.flatnonzero(leaves[:, atom] >= 0).tolist()
        }

    def _linked(self, atoms: range) -> list[int]:
        """`atoms` and all that transfers between different offsets connect them with, sorted."""
        t = self.plan.transfers
        shifted = np.flatnonzero(t.src_offset != t.dst_offset)
        cuts = np.array(self.cuts)
        low, high = (np.searchsorted(cuts, each[shifted]) for each in (t.src_offset, t.src_offset + t.bytes))
        other = np.searchsorted(cuts, t.dst_offset[shifted])
        linked, queue = set(atoms), deque(atoms)
        while queue:
            atom = queue.popleft()
            there = (low <= atom) & (atom < high)
            back = (other <= atom) & (atom < other + high - low)
            found = {*(atom + (other - low)[there]).tolist(), *(atom - (other - low)[back]).tolist()} - linked
            linked |= found
            queue.extend(found)
        return sorted(linked)

    def tell(self) -> tuple[Counterexample | None, Counterexample | None]:
        """Counterexamples for result and agreement on these atoms."""
        return (wrong, None) if (wrong := self._execute()) is not None else self._check()

    def _execute(self) -> Counterexample | None:
        """Runs every event; returns an uninitialised read if there is one."""
        plan, known = self.plan, set(self.atoms)
        in_flight: list[deque[list[Value | None]]] = [deque() for _ in plan.channels]
        for event in self.order:
            i, done = divmod(event, 2)
            kind, rank = int(plan.kind[i]), int(plan.instruction_rank[i])
            source = range(int(self.reads.low[i]), int(self.reads.high[i]))
            if done:
                if kind in SENDS:
                    in_flight[plan.out_channel[i]].append([self.memory.get((rank, atom)) for atom in source])
                continue
            if kind in RECEIVES:
                incoming = in_flight[plan.in_channel[i]].popleft()
            elif kind in LOCALS:
                incoming = [self.memory.get((rank, atom)) for atom in source]
            else:
                continue
            transfer, reduces = int(plan.recv_transfer[i]), kind in REDUCES
            for atom, value in enumerate(incoming, start=int(self.writes.low[i])):
                if atom not in known:
                    continue
                before = self.memory.get((rank, atom))
                if value is None or (reduces and before is None):
                    return self._uninitialised(i, atom, value is None)
                self.log.append(MessageWritten(transfer, rank, atom, value, before, reduces))
                if reduces:
                    assert before is not None
                    self.memory[rank, atom] = self._reduce(rank, atom, before, value, transfer)
                else:
                    self.memory[rank, atom] = value._replace(transfer=transfer)
        return None

    def _reduce(self, rank: int, atom: int, left: Value, right: Value, transfer: int) -> Value:
        both = left.ranks & right.ranks
        if both:
            self.doubled.append((rank, atom, both, left.transfer, transfer))
        pair = (left.tree, right.tree) if left.tree <= right.tree else (right.tree, left.tree)
        tree = self.trees.setdefault(pair, self.plan.n_ranks + len(self.trees))
        origin = left.origin if left.origin == right.origin else MIXED
        if left.ranks | right.ranks == self.plan.collective.everyone and atom not in self.complete:
            self.complete[atom] = (rank, transfer)
        return Value(left.ranks | right.ranks, left.twice | right.twice | both, origin, tree, transfer)

    def _check(self) -> tuple[Counterexample | None, Counterexample | None]:
        """Compares the memory with the collective's postcondition, then the trees of all ranks with each other."""
        tree_of: dict[tuple[int, int], tuple[int, int]] = {}
        disagreement: Counterexample | None = None
        wanted_of, sets = _wanted(self.plan, np.array(self.cuts))
        for rank in range(self.plan.n_ranks):
            for atom in self.atoms:
                code = int(wanted_of[rank, atom])
                if code == _NOBODY:
                    continue
                wanted = sets[code]
                value = self.memory.get((rank, atom))
                if value is None or value.ranks != wanted or value.twice or value.origin != self.cuts[atom]:
                    return self._wrong(rank, atom, wanted, value), None
                other, tree = tree_of.setdefault((atom, code), (rank, value.tree))
                if tree != value.tree and disagreement is None:
                    disagreement = self._disagree(other, rank, atom, value)
        return None, disagreement

    def _span(self, atom: int) -> tuple[int, int]:
        return self.cuts[atom], self.cuts[atom + 1] - 1

    def _describe(self, transfer: int) -> str:
        return f"  {self.plan.transfers.describe(transfer)}"

    def _wrong(self, rank: int, atom: int, wanted: int, value: Value | None) -> Counterexample:
        low, high = self._span(atom)
        where = f"rank {rank} bytes {low}..{high}"
        if value is None:
            return Counterexample("result", f"{where}: never written", rank, low, high)
        if value.twice:
            names = _names(value.twice)
            trace = [f"{names} came in twice; first where these two met:"]
            for at, doubled_atom, both, left, right in self.doubled:
                if doubled_atom == atom and both & value.twice:
                    trace += [f"  rank {at}'s own input" if left < 0 else self._describe(left), self._describe(right)]
                    break
            summary = f"{where}: contribution of {names} counted twice"
            return Counterexample("result", summary, rank, low, high, tuple(trace))
        trace = []
        if value.origin != low:
            summary = f"{where}: holds bytes from another place of the message"
        elif value.ranks & ~wanted:
            summary = f"{where}: holds contributions of {_names(value.ranks & ~wanted)}, which do not belong there"
        else:
            missing = wanted & ~value.ranks
            summary = f"{where}: contribution of {_names(missing)} missing"
            trace += self._fate(missing, atom)
        history = [self._describe(each.transfer) for each in self.log if (each.rank, each.atom) == (rank, atom)]
        trace += (
            [f"written at rank {rank} by:", *_shorten(history, 6)]
            if history
            else [f"no transfer writes these bytes at rank {rank}"]
        )
        if atom in self.complete:
            holder, transfer = self.complete[atom]
            trace += [f"rank {holder} had all contributions after:", self._describe(transfer)]
        return Counterexample("result", summary, rank, low, high, tuple(trace))

    def _fate(self, missing: int, atom: int) -> list[str]:
        """The path of the first missing contribution: the transfers that carried it, and the one that overwrote it."""
        source = (missing & -missing).bit_length() - 1
        origin = self.cuts[atom]
        mine = [each for each in self.log if each.came.ranks >> source & 1 and each.came.origin in (origin, MIXED)]
        lost = [
            each
            for each in self.log
            if not each.reduced
            and each.stood is not None
            and each.stood.ranks >> source & 1
            and each.stood.origin in (origin, MIXED)
            and not each.came.ranks >> source & 1
        ]
        lines = [f"rank {source}'s contribution went by:", *_shorten([self._describe(e.transfer) for e in mine], 4)]
        if not mine:
            lines = [f"rank {source}'s contribution never left it"]
        if lost:
            lines += [f"and was overwritten at rank {lost[-1].rank} by:", self._describe(lost[-1].transfer)]
        return lines

    def _disagree(self, one: int, other: int, atom: int, value: Value) -> Counterexample:
        low, high = self._span(atom)
        trace = [f"rank {other} got it by:", self._describe(value.transfer)]
        there = self.memory.get((one, atom))
        if there is not None and there.transfer >= 0:
            trace += [f"rank {one} got it by:", self._describe(there.transfer)]
        summary = f"ranks {one} and {other} bytes {low}..{high}: reduced in different orders, so the bits may differ"
        return Counterexample("agreement", summary, other, low, high, tuple(trace))

    def _uninitialised(self, instruction: int, atom: int, incoming: bool) -> Counterexample:
        row = self.plan[instruction]
        low, high = self._span(atom)
        whose = "what arrives" if incoming else "what it reduces into"
        transfer = self.plan.transfers.describe(row.recv_transfer)
        summary = f"rank {row.rank} bytes {low}..{high}: {row.kind} uses bytes never written ({whose})"
        return Counterexample("result", summary, row.rank, low, high, (transfer,))


def _count(plan: Plan) -> int:
    return plan.size_bytes // DTYPE_BYTES[plan.transfers.dtype]


def _names(ranks: int) -> str:
    """A set of ranks in words, shortened."""
    members = [rank for rank in range(ranks.bit_length()) if ranks >> rank & 1]
    shown = ", ".join(map(str, members[:8])) + (", ..." if len(members) > 8 else "")
    return f"rank {shown}" if len(members) == 1 else f"ranks {shown}"


def _shorten(lines: list[str], most: int) -> list[str]:
    """At most `most` lines and one that counts those left out."""
    half = most // 2
    return lines if len(lines) <= most else [*lines[:half], f"  ... {len(lines) - most} more", *lines[half - most :]]
