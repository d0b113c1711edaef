"""A second verifier of plans, deliberately naive: it tries every interleaving that `optcc.plan` allows.

It shares no code with `optcc.verify` and reads nothing but the columns of the plan. An instruction is up to four
events: it is issued; a receive takes its message; a message arrives in its slot; the instruction is done.

    issue    when the one before it in the lane is issued (with a window of w: and the w-th before it is done), and
             everything in its `after` is done
    take     a receive: issued, and its message has arrived; a plain receive is done with it
    arrive   a send: issued, its bytes taken if it is fused, and the slot of its message is free: the receive `slots`
             places before its own in the receiving lane has taken its message
    done     after all of these, at any later time (a sender may learn late that its message has arrived)

A state is the set of events that have happened. All of them are visited, level by level. An instruction accesses its
bytes from its issue to its done; a race is a state in which two instructions access the same bytes of a rank, one of
them writing. Contents are trees of reductions over (rank, element), carried through every state when there are few of
them, and through random interleavings when there are many.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from optcc.plan import KINDS, Plan

ISSUE, TAKE, ARRIVE, DONE = range(4)
ITEM_BYTES = {"float32": 4, "float64": 8, "int32": 4, "int64": 8}
ORDER = ("matching", "deadlock", "races", "result", "agreement")

Value = Any
"""None: never written; (rank, element): an input; ("+", left, right): a reduction, its sides sorted."""
Memory = tuple[tuple[Value, ...], ...]
Messages = tuple[tuple[int, tuple[Value, ...]], ...]


class TooManyStates(Exception):
    """The plan has more states than the caller wants to visit."""


@dataclass
class Naive:
    """What is wrong with a plan, by property; `states` says how many states were visited."""

    problems: dict[str, str] = field(default_factory=dict)
    states: int = 0
    all_contents: bool = True

    @property
    def first(self) -> str:
        """The first property that fails, in the verifier's order; "" if none does."""
        return next((name for name in ORDER if name in self.problems), "")


@dataclass(frozen=True)
class Row:
    """One instruction, as plain values."""

    index: int
    rank: int
    kind: str
    into: int
    out: int
    src: int
    dst: int
    size: int
    after: tuple[int, ...]

    @property
    def receives(self) -> bool:
        return self.kind.startswith("receive")

    @property
    def sends(self) -> bool:
        return self.kind.endswith("send")

    @property
    def reduces(self) -> bool:
        return "reduce" in self.kind

    def accesses(self) -> list[tuple[int, int, bool]]:
        """(first byte, byte after the last, whether it writes) of everything the instruction touches."""
        touched = []
        if not self.receives:
            touched.append((self.src, self.src + self.size, False))
        if self.kind != "send":
            touched.append((self.dst, self.dst + self.size, True))
        return touched


def rows_of(plan: Plan) -> list[Row]:
    """The instructions of `plan`, read from its columns."""
    lane_of = {int(i): number for number, lane in enumerate(plan.lanes) for i in lane}
    return [
        Row(
            i,
            int(plan.lane_rank[lane_of[i]]),
            KINDS[int(plan.kind[i])],
            int(plan.in_channel[i]),
            int(plan.out_channel[i]),
            int(plan.src_offset[i]),
            int(plan.dst_offset[i]),
            int(plan.bytes[i]),
            tuple(int(each) for each in plan.after[i]),
        )
        for i in range(len(plan.kind))
    ]


def naive_verify(plan: Plan, *, windows: tuple[int | None, ...] = (1, None), limit: int = 200_000) -> Naive:
    """Everything that is wrong with `plan` in some interleaving, with a run-time of each of the `windows`.

    Raises TooManyStates where that takes more than `limit` states.
    """
    found = Naive()
    rows = rows_of(plan)
    lanes = [[int(i) for i in lane] for lane in plan.lanes]
    found.problems |= _provenance(plan, rows)
    pairs = _pairs(plan, rows, lanes)
    if isinstance(pairs, str):
        found.problems["matching"] = pairs
        return found
    item = ITEM_BYTES[plan.transfers.dtype]
    for row in rows:
        if any(first % item or stop % item for first, stop, _ in row.accesses()):
            found.problems["matching"] = f"{row}: cuts an element in two"
            return found
    for window in windows:
        system = _System(plan, rows, lanes, pairs, window)
        few = system.explore(found, limit)
        if "deadlock" not in found.problems and "races" not in found.problems:
            system.run(found, few)
    return found


def races_by_issue(plan: Plan, *, limit: int = 200_000) -> str:
    """A race under a weaker rule than the plan's, or "": a message can be taken once its send is issued, even before
    its slot is free, and a fused receive may free its slot once it is issued.

    This is all that `optcc.verify.races` uses of messages and slots, so it is exactly what it refuses.
    """
    rows = rows_of(plan)
    lanes = [[int(i) for i in lane] for lane in plan.lanes]
    pairs = _pairs(plan, rows, lanes)
    assert isinstance(pairs, dict), pairs
    found = Naive()
    _System(plan, rows, lanes, pairs, None, by_issue=True).explore(found, limit)
    return found.problems.get("races", "")


def _pairs(plan: Plan, rows: list[Row], lanes: list[list[int]]) -> dict[int, int] | str:
    """For each sending instruction the one that receives its message; or why some message is not received."""
    met: dict[int, int] = {}
    for channel in range(len(plan.channels)):
        sends = [i for lane in lanes for i in lane if rows[i].sends and rows[i].out == channel]
        receives = [i for lane in lanes for i in lane if rows[i].receives and rows[i].into == channel]
        if len(sends) != len(receives):
            return f"channel {channel}: {len(sends)} sends, {len(receives)} receives"
        for send, receive in zip(sends, receives, strict=True):
            if rows[send].size != rows[receive].size:
                return f"channel {channel}: {rows[send].size} B meet {rows[receive].size} B"
            met[send] = receive
    return met


def _provenance(plan: Plan, rows: list[Row]) -> dict[str, str]:
    """Whether instructions do what the transfers they point back to say; not a matter of interleavings."""
    t = plan.transfers
    sent, received = Counter[int](), Counter[int]()
    for row in rows:
        out, into = int(plan.send_transfer[row.index]), int(plan.recv_transfer[row.index])
        if row.sends:
            sent[out] += 1
            read = row.dst if row.receives else row.src
            if (int(t.src[out]), int(t.src_offset[out]), int(t.bytes[out])) != (row.rank, read, row.size):
                return {"provenance": f"{row} is not what transfer {out} sends"}
        if row.kind != "send":
            received[into] += 1
            if (int(t.dst[into]), int(t.dst_offset[into]), int(t.bytes[into])) != (row.rank, row.dst, row.size):
                return {"provenance": f"{row} is not what transfer {into} writes"}
            if (int(t.op[into]) == 0) != row.reduces:
                return {"provenance": f"{row} is not the operation of transfer {into}"}
            if not row.receives and (int(t.src[into]), int(t.src_offset[into])) != (row.rank, row.src):
                return {"provenance": f"{row} is not what transfer {into} reads"}
    for each in range(len(t.src)):
        remote = int(t.src[each]) != int(t.dst[each])
        if sent[each] != int(remote) or received[each] != 1:
            return {"provenance": f"transfer {each} is sent {sent[each]} times, received {received[each]} times"}
    for channel in range(len(plan.channels)):
        out_ = [int(plan.send_transfer[row.index]) for row in rows if row.sends and row.out == channel]
        in_ = [int(plan.recv_transfer[row.index]) for row in rows if row.receives and row.into == channel]
        if out_ != in_:
            return {"provenance": f"channel {channel} carries transfers {out_} and gives {in_}"}
    return {}


class _System:
    """The events of a plan and what each of them needs; states are sets of events, bit by bit."""

    def __init__(
        self,
        plan: Plan,
        rows: list[Row],
        lanes: list[list[int]],
        met: dict[int, int],
        window: int | None,
        *,
        by_issue: bool = False,
    ) -> None:
        self.plan, self.rows, self.met = plan, rows, met
        self.from_ = {receive: send for send, receive in met.items()}
        self.number: dict[tuple[int, int], int] = {}
        for row in rows:
            plain = row.receives and not row.sends
            for what in (ISSUE, *((TAKE,) if row.receives else ()), *((ARRIVE,) if row.sends else ()), DONE):
                if what == DONE and plain:
                    self.number[row.index, DONE] = self.number[row.index, TAKE]
                else:
                    self.number[row.index, what] = len(set(self.number.values()))
        self.count = len(set(self.number.values()))
        self.needs: list[int] = [0] * self.count
        for lane in lanes:
            receives = [i for i in lane if rows[i].receives]
            for position, i in enumerate(lane):
                if position:
                    self._need(i, ISSUE, lane[position - 1], ISSUE)
                if window is not None and position >= window:
                    self._need(i, ISSUE, lane[position - window], DONE)
                for each in rows[i].after:
                    self._need(i, ISSUE, each, DONE)
            for position, i in enumerate(receives):
                slots = plan.channels[rows[i].into].slots
                if position >= slots:
                    earlier = rows[receives[position - slots]]
                    freed = ISSUE if by_issue and earlier.sends else TAKE
                    self._need(self.from_[i], ARRIVE, earlier.index, freed)
        for row in rows:
            if row.receives:
                self._need(row.index, TAKE, row.index, ISSUE)
                self._need(row.index, TAKE, self.from_[row.index], ISSUE if by_issue else ARRIVE)
            if row.sends:
                self._need(row.index, ARRIVE, row.index, TAKE if row.receives else ISSUE)
                self._need(row.index, DONE, row.index, ARRIVE)
            if not row.receives and not row.sends:
                self._need(row.index, DONE, row.index, ISSUE)
        self.event = {number: key for key, number in self.number.items() if key[1] != DONE}
        for key, number in self.number.items():
            self.event.setdefault(number, key)

    def _need(self, i: int, what: int, other: int, other_what: int) -> None:
        self.needs[self.number[i, what]] |= 1 << self.number[other, other_what]

    def _conflicts(self) -> list[tuple[int, int]]:
        """Instructions of one rank that touch the same bytes, one of them writing."""
        found = []
        for a in self.rows:
            for b in self.rows[a.index + 1 :]:
                if a.rank == b.rank and any(
                    max(x, u) < min(y, v) and (w or z) for x, y, w in a.accesses() for u, v, z in b.accesses()
                ):
                    found.append((a.index, b.index))
        return found

    def explore(self, found: Naive, limit: int) -> bool:
        """Visits every state; notes deadlocks and races. True if the states are few."""
        for row in self.rows:
            if not row.receives and not row.sends:
                (x, y, _), (u, v, _) = row.accesses()
                if x != u and max(x, u) < min(y, v):
                    found.problems["races"] = f"{row} reads beside what it writes"
        words = (self.count + 63) // 64 or 1
        needs = np.array([_words(mask, words) for mask in self.needs], dtype=np.uint64).reshape(self.count, words)
        bits = np.array([_words(1 << e, words) for e in range(self.count)], dtype=np.uint64).reshape(self.count, words)
        suspects = []
        for a, b in self._conflicts():
            issued = 1 << self.number[a, ISSUE] | 1 << self.number[b, ISSUE]
            done = 1 << self.number[a, DONE] | 1 << self.number[b, DONE]
            wanted, mask = _words(issued, words), _words(issued | done, words)
            suspects.append((a, b, np.array(wanted, dtype=np.uint64), np.array(mask, dtype=np.uint64)))
        states = np.zeros((1, words), dtype=np.uint64)
        visited = 0
        for level in range(self.count + 1):
            visited += len(states)
            if visited > limit:
                raise TooManyStates(f"more than {limit} states")
            for a, b, issued_only, both in suspects:
                if ((states & both) == issued_only).all(axis=1).any():
                    found.problems.setdefault("races", f"{self.rows[a]} and {self.rows[b]} at once")
            if level == self.count:
                break
            moved = np.zeros(len(states), dtype=bool)
            following = []
            for e in range(self.count):
                can = ((states & needs[e]) == needs[e]).all(axis=1) & ((states & bits[e]) == 0).all(axis=1)
                if can.any():
                    moved |= can
                    following.append(states[can] | bits[e])
            if not moved.all():
                stuck = states[np.flatnonzero(~moved)[0]]
                waiting = [self.event[e] for e in range(self.count) if not (stuck & bits[e]).any()]
                found.problems.setdefault("deadlock", f"stuck with {len(waiting)} events to come: {waiting[:4]}")
            if not following:
                break
            states = _unique(np.concatenate(following))
        found.states += visited
        return visited <= 1500

    def run(self, found: Naive, everything: bool) -> None:
        """Carries the contents through every state, or through some interleavings, and judges the ends."""
        start: tuple[Memory, Messages] = (self._initial(), ())
        if not everything:
            found.all_contents = False
            ends = {self._random_run(seed, start, found) for seed in range(6)}
        else:
            full = (1 << self.count) - 1
            layer: dict[int, set[tuple[Memory, Messages]]] = {0: {start}}
            for _ in range(self.count):
                later: dict[int, set[tuple[Memory, Messages]]] = {}
                for state, contents in layer.items():
                    for e in range(self.count):
                        if not state >> e & 1 and state & self.needs[e] == self.needs[e]:
                            into = later.setdefault(state | 1 << e, set())
                            into.update(self._step(e, content, found) for content in contents)
                layer = later
            ends = {memory for memory, _ in layer[full]}
        if len(ends) > 1:
            found.problems.setdefault("races", "the result depends on the interleaving")
        for memory in ends:
            self._judge(memory, found)

    def _random_run(self, seed: int, start: tuple[Memory, Messages], found: Naive) -> Memory:
        rng = random.Random(seed)
        state, content = 0, start
        for _ in range(self.count):
            can = [e for e in range(self.count) if not state >> e & 1 and state & self.needs[e] == self.needs[e]]
            e = rng.choice(can) if seed > 1 else can[-seed]
            state, content = state | 1 << e, self._step(e, content, found)
        return content[0]

    def _initial(self) -> Memory:
        plan = self.plan
        item = ITEM_BYTES[plan.transfers.dtype]
        count, ranks = plan.transfers.size_bytes // item, plan.transfers.collective.n_ranks
        buffer = count + plan.transfers.scratch_bytes // item
        memory = []
        for rank in range(ranks):
            held: list[Value] = [None] * buffer
            name, root = plan.transfers.collective.name, plan.transfers.collective.root
            for element in range(count):
                owner = name != "allgather" or count * rank // ranks <= element < count * (rank + 1) // ranks
                if owner and not (name == "broadcast" and rank != root):
                    held[element] = (rank, element)
            memory.append(tuple(held))
        return tuple(memory)

    def _step(self, e: int, content: tuple[Memory, Messages], found: Naive) -> tuple[Memory, Messages]:
        i, what = self.event[e]
        row = self.rows[i]
        memory, messages = content
        item = ITEM_BYTES[self.plan.transfers.dtype]
        if what == ARRIVE:
            offset = (row.dst if row.receives else row.src) // item
            bytes_ = memory[row.rank][offset : offset + row.size // item]
            return memory, tuple(sorted((*messages, (self.met[i], bytes_)), key=lambda each: each[0]))
        if what == TAKE:
            incoming = dict(messages)[i]
            messages = tuple(each for each in messages if each[0] != i)
        elif what == DONE and not row.sends and not row.receives:
            incoming = memory[row.rank][row.src // item : (row.src + row.size) // item]
        else:
            return content
        held = list(memory[row.rank])
        for element, value in enumerate(incoming, start=row.dst // item):
            if value is None or (row.reduces and held[element] is None):
                found.problems.setdefault("result", f"{row} uses what was never written")
                held[element] = None
            elif row.reduces:
                held[element] = ("+", *sorted((held[element], value), key=repr))
            else:
                held[element] = value
        return (*memory[: row.rank], tuple(held), *memory[row.rank + 1 :]), messages

    def _judge(self, memory: Memory, found: Naive) -> None:
        collective = self.plan.transfers.collective
        ranks = collective.n_ranks
        count = self.plan.transfers.size_bytes // ITEM_BYTES[self.plan.transfers.dtype]
        for element in range(count):
            part = next(r for r in range(ranks) if element < count * (r + 1) // ranks)
            trees = set()
            for rank in range(ranks):
                if (collective.name == "reduce" and rank != collective.root) or (
                    collective.name == "reducescatter" and rank != part
                ):
                    continue
                own = {"broadcast": collective.root, "allgather": part}.get(collective.name)
                wanted = Counter((each, element) for each in (range(ranks) if own is None else (own,)))
                value = memory[rank][element]
                leaves = Counter(_leaves(value))
                if leaves != wanted:
                    found.problems.setdefault("result", f"rank {rank} element {element}: {dict(leaves)}")
                trees.add(value)
            if len(trees) > 1:
                found.problems.setdefault("agreement", f"element {element}: {len(trees)} trees")


def _leaves(value: Value) -> list[tuple[int, int]]:
    if value is None:
        return []
    return [*_leaves(value[1]), *_leaves(value[2])] if value[0] == "+" else [value]


def _words(mask: int, words: int) -> list[int]:
    return [mask >> 64 * word & (2**64 - 1) for word in range(words)]


def _unique(states: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    if states.shape[1] == 1:
        return np.unique(states[:, 0])[:, None]
    order = np.lexsort(states.T)
    ordered = states[order]
    fresh = np.ones(len(ordered), dtype=bool)
    fresh[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return ordered[fresh]
