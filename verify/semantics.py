"""Result and agreement: what every byte of every rank holds at the end, by running the plan on sets of contributions.

A value is the set of ranks whose input it reduces (a bit a rank), the set of those that came in more than once, the
place in the message from which they came, and the tree by which they were combined. Values are kept for atoms: byte
ranges that no instruction cuts. The plan must be free of deadlocks and races: then every interleaving gives the same.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from optcc.collective import DTYPE_BYTES
from optcc.plan import LOCALS, RECEIVES, REDUCES, SENDS, Plan
from optcc.verdict import Counterexample

ROUNDS_MAX = 64
MIXED = -1


class Value(NamedTuple):
    """What an atom holds; `transfer` wrote it last, `tree` tells how it was combined, `origin` where it came from."""

    ranks: int
    twice: int
    origin: int
    tree: int
    transfer: int


class CutsUnknown(Exception):
    """Copies that shift bytes cut the message into more and more pieces; the verifier gave up."""


def check_result(plan: Plan, order: list[int]) -> tuple[Counterexample | None, Counterexample | None]:
    """Why the result is wrong, and why ranks disagree on the tree; None where they do not. `order` as from deadlock.

    Raises CutsUnknown where the bytes cannot be cut into atoms.
    """
    run = _Run(plan)
    wrong = run.execute(order)
    if wrong is not None:
        return wrong, None
    return run.check()


class _Run:
    """One execution of a plan on symbolic values."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.itemsize = DTYPE_BYTES[plan.transfers.dtype]
        self.cuts = _cuts(plan)
        self.place = {cut: position for position, cut in enumerate(self.cuts)}
        self.trees: dict[tuple[int, int], int] = {}
        self.doubled: list[tuple[int, int, int, int, int]] = []  # rank, atom, ranks, left and right transfer
        self.complete: dict[int, tuple[int, int]] = {}  # atom: the first rank that had it all, and by which transfer
        self.memory = [self._initial(rank) for rank in range(plan.n_ranks)]

    def _initial(self, rank: int) -> list[Value | None]:
        memory: list[Value | None] = [None] * (len(self.cuts) - 1)
        for first, stop, ranks in self.plan.collective.before(rank, _count(self.plan)):
            for atom in self._atoms(first * self.itemsize, (stop - first) * self.itemsize):
                memory[atom] = Value(ranks, 0, self.cuts[atom], rank, -1)
        return memory

    def _atoms(self, offset: int, size: int) -> range:
        return range(self.place[offset], self.place[offset + size]) if size else range(0)

    def execute(self, order: list[int]) -> Counterexample | None:
        """Runs every event in `order`; returns an uninitialised read if there is one."""
        plan = self.plan
        kind, rank = plan.kind.tolist(), plan.instruction_rank.tolist()
        src, dst, size = plan.src_offset.tolist(), plan.dst_offset.tolist(), plan.bytes.tolist()
        in_channel, out_channel = plan.in_channel.tolist(), plan.out_channel.tolist()
        recv_transfer = plan.recv_transfer.tolist()
        in_flight: list[deque[list[Value | None]]] = [deque() for _ in plan.channels]
        for event in order:
            i, done = divmod(event, 2)
            memory = self.memory[rank[i]]
            if not done:
                if kind[i] in RECEIVES:
                    incoming = in_flight[in_channel[i]].popleft()
                elif kind[i] in LOCALS:
                    incoming = [memory[atom] for atom in self._atoms(src[i], size[i])]
                else:
                    continue
                atoms = self._atoms(dst[i], size[i])
                assert len(incoming) == len(atoms), "cuts are closed under what instructions do"
                for atom, value in zip(atoms, incoming, strict=True):
                    before = memory[atom]
                    if value is None or (kind[i] in REDUCES and before is None):
                        return self._uninitialised(i, atom, value is None)
                    if kind[i] in REDUCES:
                        assert before is not None
                        memory[atom] = self._reduce(rank[i], atom, before, value, recv_transfer[i])
                    else:
                        memory[atom] = value._replace(transfer=recv_transfer[i])
            elif kind[i] in SENDS:
                offset = src[i] if src[i] >= 0 else dst[i]
                in_flight[out_channel[i]].append([memory[atom] for atom in self._atoms(offset, size[i])])
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

    def check(self) -> tuple[Counterexample | None, Counterexample | None]:
        """Compares the memory with the collective's postcondition, then the trees of all ranks with each other."""
        tree_of: dict[int, tuple[int, int]] = {}
        disagreement: Counterexample | None = None
        for rank in range(self.plan.n_ranks):
            for first, stop, wanted in self.plan.collective.after(rank, _count(self.plan)):
                for atom in self._atoms(first * self.itemsize, (stop - first) * self.itemsize):
                    value = self.memory[rank][atom]
                    if value is None or value.ranks != wanted or value.twice or value.origin != self.cuts[atom]:
                        return self._wrong(rank, atom, wanted, value), None
                    other, tree = tree_of.setdefault(atom, (rank, value.tree))
                    if tree != value.tree and disagreement is None:
                        disagreement = self._disagree(other, rank, atom, value)
        return None, disagreement

    def _span(self, atom: int) -> tuple[int, int]:
        return self.cuts[atom], self.cuts[atom + 1] - 1

    def _history(self, rank: int, atom: int) -> list[str]:
        """The transfers that wrote these bytes of the rank, in the author's order."""
        transfers = self.plan.transfers
        low, high = self._span(atom)
        hits = (transfers.dst == rank) & (transfers.dst_offset <= low) & (transfers.dst_offset + transfers.bytes > high)
        return [f"  {transfers.describe(int(t))}" for t in hits.nonzero()[0]]

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
                    own = f"rank {at}'s own input" if left < 0 else self.plan.transfers.describe(left)
                    trace += [f"  {own}", f"  {self.plan.transfers.describe(right)}"]
                    break
            summary = f"{where}: contribution of {names} counted twice"
            return Counterexample("result", summary, rank, low, high, tuple(trace))
        if value.origin != low:
            summary = f"{where}: holds bytes from another place of the message"
        elif value.ranks & ~wanted:
            summary = f"{where}: holds contributions of {_names(value.ranks & ~wanted)}, which do not belong there"
        else:
            summary = f"{where}: contribution of {_names(wanted & ~value.ranks)} missing"
        history = self._history(rank, atom)
        trace = ["no transfer writes these bytes there"] if not history else ["written by:", *_shorten(history)]
        if atom in self.complete:
            holder, transfer = self.complete[atom]
            trace += [f"rank {holder} had all contributions after:", f"  {self.plan.transfers.describe(transfer)}"]
        return Counterexample("result", summary, rank, low, high, tuple(trace))

    def _disagree(self, one: int, other: int, atom: int, value: Value) -> Counterexample:
        low, high = self._span(atom)
        trace = [f"rank {other} got it by:", f"  {self.plan.transfers.describe(value.transfer)}"]
        there = self.memory[one][atom]
        if there is not None and there.transfer >= 0:
            trace += [f"rank {one} got it by:", f"  {self.plan.transfers.describe(there.transfer)}"]
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


def _cuts(plan: Plan) -> list[int]:
    """Places at which some instruction, on any rank, starts or ends, carried along by transfers that shift bytes."""
    transfers = plan.transfers
    itemsize = DTYPE_BYTES[plan.transfers.dtype]
    cuts = {0, plan.size_bytes, plan.buffer_bytes}
    for rank in range(plan.n_ranks):
        for first, stop, _ in (
            *plan.collective.before(rank, _count(plan)),
            *plan.collective.after(rank, _count(plan)),
        ):
            cuts |= {first * itemsize, stop * itemsize}
    shifts: set[tuple[int, int, int]] = set()
    rows = zip(transfers.src_offset.tolist(), transfers.dst_offset.tolist(), transfers.bytes.tolist(), strict=True)
    for src, dst, size in rows:
        cuts |= {src, src + size, dst, dst + size}
        if src != dst:
            shifts.add((src, dst, size))
    for _ in range(ROUNDS_MAX):
        carried = {
            cut + move
            for start, size, move in (
                *((src, size, dst - src) for src, dst, size in shifts),
                *((dst, size, src - dst) for src, dst, size in shifts),
            )
            for cut in cuts
            if start < cut < start + size
        }
        if carried <= cuts:
            return sorted(cuts)
        cuts |= carried
    raise CutsUnknown(f"shifting copies cut the message into more than {len(cuts)} pieces")


def _names(ranks: int) -> str:
    """A set of ranks in words, shortened."""
    members = [rank for rank in range(ranks.bit_length()) if ranks >> rank & 1]
    shown = ", ".join(map(str, members[:8])) + (", ..." if len(members) > 8 else "")
    return f"rank {shown}" if len(members) == 1 else f"ranks {shown}"


def _shorten(lines: list[str]) -> list[str]:
    return lines if len(lines) <= 12 else [*lines[:6], f"... {len(lines) - 12} more", *lines[-6:]]
