"""Why result or agreement fails, in words: a second run of the instructions that access the atoms in question.

It holds sets of contributions where `optcc.verify.plan.semantics` holds trees. The verdict is that module's: whatever
is said here, the plan is refuted, by the property and at the place that were found there.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from optcc.arrays import Column
from optcc.plan import LOCALS, RECEIVES, REDUCES, SENDS, Plan
from optcc.verdict import Counterexample
from optcc.verify.plan.byte_partition import ranges
from optcc.verify.plan.semantics import NOBODY, WrongResult, initial_leaves, wanted_inputs

MIXED = -1


def explain(plan: Plan, order: Column, finding: WrongResult) -> Counterexample:
    """The counterexample for what `check_result` has found, with the same `order`."""
    wrong, disagreement = _SecondRun(plan, finding.cuts, finding.atoms, order).tell()
    told = wrong or disagreement
    return finding.plain() if told is None or told.property != finding.property else told


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


class _SecondRun:
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
        leaves = initial_leaves(plan, cuts).reshape(plan.n_ranks, -1)
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
        wanted_of, sets = wanted_inputs(self.plan, np.array(self.cuts))
        for rank in range(self.plan.n_ranks):
            for atom in self.atoms:
                code = int(wanted_of[rank, atom])
                if code == NOBODY:
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


def _names(ranks: int) -> str:
    """A set of ranks in words, shortened."""
    members = [rank for rank in range(ranks.bit_length()) if ranks >> rank & 1]
    shown = ", ".join(map(str, members[:8])) + (", ..." if len(members) > 8 else "")
    return f"rank {shown}" if len(members) == 1 else f"ranks {shown}"


def _shorten(lines: list[str], most: int) -> list[str]:
    """At most `most` lines and one that counts those left out."""
    half = most // 2
    return lines if len(lines) <= most else [*lines[:half], f"  ... {len(lines) - most} more", *lines[half - most :]]
