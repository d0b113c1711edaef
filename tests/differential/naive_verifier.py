"""A second verifier of plans, deliberately naive: it tries every interleaving that `optcc.plan` allows.

It shares no code with `optcc.verify` and reads nothing but the columns of the plan. An instruction is up to four
events: it is issued; a receive takes its message; a message arrives in its slot; the instruction is done.

    issue    when the one before it in the lane is issued (with a window of w: and the w-th before it is done), and
             everything in its `after` is done
    take     a receive: issued, and its message has arrived; a plain receive is done with it
    arrive   a send: issued, its bytes taken if it is fused, and the slot of its message is free: the receive `slots`
             places before its own in the receiving lane has taken its message
    done     after all of these, at any later time (a sender may learn late that its message has arrived)

A state is the set of events that have happened. An instruction accesses its bytes from its issue to its done; a race is
a state in which two instructions access the same bytes of a rank, one of them writing. Contents are trees of reductions
over (rank, element), carried through every state when there are few of them, and through random interleavings when
there are many.

There are three ways of visiting states, and the tests hold them to each other:

"levels"   plainly: all states with n events, then all with n + 1, until none is left
"once"     every state too, but each by one path only: the one in which its events come in the order of their numbers.
           Numbers follow some run, so what an event needs has smaller numbers. A state that can be reached holds what
           its events need, so adding them by number is a path of this walk; and a path tells its state. No state is
           left out and none is visited twice, so nothing has to be remembered, and that makes it fast.
"least"    only the least state in which two conflicting instructions are both issued, for each such pair. An event that
           can happen can still happen after any other (needs are only ever met), so states are closed under union, and
           whatever is in the least such state is in every such state: if one of the two is done there, it is done in
           all of them, and if neither is, that state is a race. For the same reason every run gets stuck with the same
           events left, and one run decides about deadlock. It takes no time, but it is one argument further from the
           plain truth: campaigns use it beside "once", and alone only where that takes too long.

That states are closed under union also means that a plan without races has one result: of two conflicting accesses one
is done before the other is issued, in the least state that has issued both and so in all. Random interleavings are
then more than is needed.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from optcc.collective import Collective
from optcc.compiled import compiled
from optcc.plan import KINDS, Plan

ISSUE, TAKE, ARRIVE, DONE = range(4)
ITEM_BYTES = {"float32": 4, "float64": 8, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}
ORDER = ("matching", "deadlock", "races", "result", "agreement")

Value = Any
"""None: never written; (rank, element): an input; ("+", left, right): a reduction, its sides sorted."""
Memory = tuple[tuple[Value, ...], ...]
Messages = tuple[tuple[int, tuple[Value, ...]], ...]
Way = Literal["levels", "once", "least"]
WORD_BITS = 63
"""Events in a word of a state: all of an int64 but its sign."""


class TooManyStates(Exception):
    """The plan has more states than the caller wants to visit."""


@dataclass
class Naive:
    """What is wrong with a plan, by property, and where exactly; `states` says how many states were visited."""

    problems: dict[str, str] = field(default_factory=dict)
    states: int = 0
    all_contents: bool = True
    stuck: set[int] = field(default_factory=set)
    """Instructions that are not done where nothing can happen any more."""
    racing: set[tuple[int, int]] = field(default_factory=set)
    """Pairs of instructions, the smaller first, that touch the same bytes at once; an instruction with itself."""
    wrong: set[tuple[int, int]] = field(default_factory=set)
    """(rank, element) that end wrong, or that an instruction could not write for want of something to read."""
    differing: set[int] = field(default_factory=set)
    """Elements that ranks combine by different trees."""

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
    lane_of = {i: number for number, lane in enumerate(plan.lanes) for i in lane}
    lane_rank = plan.lane_rank.tolist()
    columns = (plan.kind, plan.in_channel, plan.out_channel, plan.src_offset, plan.dst_offset, plan.bytes)
    return [
        Row(i, lane_rank[lane_of[i]], KINDS[kind], into, out, src, dst, size, tuple(plan.after[i].tolist()))
        for i, (kind, into, out, src, dst, size) in enumerate(zip(*(each.tolist() for each in columns), strict=True))
    ]


def naive_verify(
    plan: Plan,
    *,
    windows: tuple[int | None, ...] = (1, None),
    limit: int = 200_000,
    way: Way = "once",
    contents_max: int = 1500,
    runs: int = 6,
) -> Naive:
    """Everything that is wrong with `plan` in some interleaving, with a run-time of each of the `windows`.

    Contents are carried through every state if all are visited and there are at most `contents_max`, else through
    `runs` interleavings.
    Where instructions do not do what their transfers say, nothing else is asked.

    Raises TooManyStates where that takes more than `limit` states.
    """
    found = Naive()
    rows = rows_of(plan)
    lanes = list(plan.lanes)
    found.problems |= _provenance(plan, rows)
    pairs = _pairs(plan, rows, lanes)
    if isinstance(pairs, str):
        found.problems["matching"] = pairs
    item = ITEM_BYTES[plan.transfers.dtype]
    for row in rows:
        if any(first % item or stop % item for first, stop, _ in row.accesses()):
            found.problems["matching"] = f"{row}: cuts an element in two"
    if found.problems or isinstance(pairs, str):
        return found
    for window in windows:
        system = _System(plan, rows, lanes, pairs, window)
        visited = system.visit(found, way, limit)
        if "deadlock" not in found.problems and "races" not in found.problems:
            system.run(found, way != "least" and visited <= contents_max, runs)
    return found


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
    outs, intos = plan.send_transfer.tolist(), plan.recv_transfer.tolist()
    src, dst, op, size = t.src.tolist(), t.dst.tolist(), t.op.tolist(), t.bytes.tolist()
    src_offset, dst_offset = t.src_offset.tolist(), t.dst_offset.tolist()
    sent, received = Counter[int](), Counter[int]()
    for row in rows:
        out, into = outs[row.index], intos[row.index]
        if row.sends:
            sent[out] += 1
            read = row.dst if row.receives else row.src
            if (src[out], src_offset[out], size[out]) != (row.rank, read, row.size):
                return {"provenance": f"{row} is not what transfer {out} sends"}
        if row.kind != "send":
            received[into] += 1
            if (dst[into], dst_offset[into], size[into]) != (row.rank, row.dst, row.size):
                return {"provenance": f"{row} is not what transfer {into} writes"}
            if (op[into] == 0) != row.reduces:
                return {"provenance": f"{row} is not the operation of transfer {into}"}
            if not row.receives and (src[into], src_offset[into]) != (row.rank, row.src):
                return {"provenance": f"{row} is not what transfer {into} reads"}
    for each in range(len(src)):
        if sent[each] != int(src[each] != dst[each]) or received[each] != 1:
            return {"provenance": f"transfer {each} is sent {sent[each]} times, received {received[each]} times"}
    for channel in range(len(plan.channels)):
        out_ = [outs[row.index] for row in rows if row.sends and row.out == channel]
        in_ = [intos[row.index] for row in rows if row.receives and row.into == channel]
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
                    self._need(self.from_[i], ARRIVE, earlier.index, TAKE)
        for row in rows:
            if row.receives:
                self._need(row.index, TAKE, row.index, ISSUE)
                self._need(row.index, TAKE, self.from_[row.index], ARRIVE)
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

    def visit(self, found: Naive, way: Way, limit: int) -> int:
        """Looks for deadlocks and races in the way that is asked for; returns how many states were visited."""
        for row in self.rows:
            if not row.receives and not row.sends:
                (x, y, _), (u, v, _) = row.accesses()
                if x != u and max(x, u) < min(y, v):
                    found.problems["races"] = f"{row} reads beside what it writes"
                    found.racing.add((row.index, row.index))
        visit = {"levels": self._visit_levels, "once": self._visit_once, "least": self._visit_least}[way]
        visited = visit(found, limit)
        found.states += visited
        return visited

    def _note_race(self, found: Naive, a: int, b: int) -> None:
        found.problems.setdefault("races", f"{self.rows[a]} and {self.rows[b]} at once")
        found.racing.add((a, b))

    def _note_deadlock(self, found: Naive, happened: set[int]) -> None:
        waiting = [self.event[e] for e in range(self.count) if e not in happened]
        found.stuck |= {row.index for row in self.rows if self.number[row.index, DONE] not in happened}
        found.problems.setdefault("deadlock", f"stuck with {len(waiting)} events to come: {waiting[:4]}")

    def _visit_levels(self, found: Naive, limit: int) -> int:
        """Every state, level by level."""
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
                    self._note_race(found, a, b)
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
                self._note_deadlock(found, {e for e in range(self.count) if (stuck & bits[e]).any()})
            if not following:
                break
            states = _unique(np.concatenate(following))
        return visited

    def _some_run(self) -> list[int]:
        """The events of one run, as far as it comes."""
        happened, run, last = 0, list[int](), -1
        while len(run) > last:
            last = len(run)
            for e in range(self.count):
                if not happened >> e & 1 and happened & self.needs[e] == self.needs[e]:
                    happened |= 1 << e
                    run.append(e)
        return run

    def _visit_once(self, found: Naive, limit: int) -> int:
        """Every state, each by the one path in which its events come by number."""
        run = self._some_run()
        numbered = [*run, *(set(range(self.count)) - set(run))]
        place = {e: position for position, e in enumerate(numbered)}
        words = self.count // WORD_BITS + 1
        needs = np.zeros((self.count, words), dtype=np.int64)
        for e in range(self.count):
            rest = self.needs[e]
            while rest:
                at = place[(rest & -rest).bit_length() - 1]
                needs[place[e], at // WORD_BITS] |= 1 << at % WORD_BITS
                rest &= rest - 1
        pairs = self._conflicts()
        suspects = np.array(
            [[place[self.number[i, what]] for what in (ISSUE, DONE) for i in pair] for pair in pairs], dtype=np.int64
        ).reshape(len(pairs), 4)
        racing = np.zeros(len(pairs), dtype=np.int64)
        stuck = np.full(1 + self.count, -1, dtype=np.int64)
        visited = int(_kernels().walk(needs, suspects, limit, racing, stuck))
        if visited > limit:
            raise TooManyStates(f"more than {limit} states")
        for pair in np.flatnonzero(racing).tolist():
            self._note_race(found, *pairs[pair])
        if stuck[0] >= 0:
            self._note_deadlock(found, {numbered[each] for each in stuck[1 : 1 + stuck[0]].tolist()})
        return visited

    def _visit_least(self, found: Naive, limit: int) -> int:
        """For each conflicting pair the least state that has issued both, and the last state of one run."""
        run = self._some_run()
        if len(run) < self.count:
            self._note_deadlock(found, set(run))
        before: dict[int, int] = {}
        for e in run:
            before[e], rest = 1 << e, self.needs[e]
            while rest:
                before[e] |= before[(rest & -rest).bit_length() - 1]
                rest &= rest - 1
        visited = 1
        for a, b in self._conflicts():
            one, other = self.number[a, ISSUE], self.number[b, ISSUE]
            if one in before and other in before:
                visited += 1
                state = before[one] | before[other]
                if not state >> self.number[a, DONE] & 1 and not state >> self.number[b, DONE] & 1:
                    self._note_race(found, a, b)
        return visited

    def run(self, found: Naive, everything: bool, runs: int) -> None:
        """Carries the contents through every state, or through some interleavings, and judges the ends."""
        start: tuple[Memory, Messages] = (self._initial(), ())
        if not everything:
            found.all_contents = False
            ends = {self._random_run(seed, start, found) for seed in range(runs)}
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
            for element in range(count):
                if rank in _conditions(plan.transfers.collective, element, count)[0]:
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
                found.wrong.add((row.rank, element))
                held[element] = None
            elif row.reduces:
                held[element] = ("+", *sorted((held[element], value), key=repr))
            else:
                held[element] = value
        return (*memory[: row.rank], tuple(held), *memory[row.rank + 1 :]), messages

    def _judge(self, memory: Memory, found: Naive) -> None:
        collective = self.plan.transfers.collective
        count = self.plan.transfers.size_bytes // ITEM_BYTES[self.plan.transfers.dtype]
        for element in range(count):
            trees: dict[tuple[int, ...], set[Value]] = {}
            for rank, contributors in _conditions(collective, element, count)[1].items():
                wanted = Counter((each, element) for each in contributors)
                value = memory[rank][element]
                leaves = Counter(_leaves(value))
                if leaves != wanted:
                    found.problems.setdefault("result", f"rank {rank} element {element}: {dict(leaves)}")
                    found.wrong.add((rank, element))
                trees.setdefault(contributors, set()).add(value)
            differ = [len(each) for each in trees.values() if len(each) > 1]
            if differ:
                found.problems.setdefault("agreement", f"element {element}: {max(differ)} trees")
                found.differing.add(element)


def _conditions(collective: Collective, element: int, count: int) -> tuple[set[int], dict[int, tuple[int, ...]]]:
    """Which ranks have an input for an element, and whose inputs each rank must have in the end that must have any."""
    p, root = collective.n_ranks, collective.root
    everyone = tuple(range(p))
    if collective.cells:
        begin = Fraction(0)
        for cell in collective.cells:
            end = begin + cell.share
            if int(begin * count) <= element < int(end * count):
                return set(cell.before), dict(cell.after)
            begin = end
    part = next(each for each in everyone if element < count * (each + 1) // p)
    src, dst = divmod(next(each for each in range(p * p) if element < count * (each + 1) // (p * p)), p)
    conditions: dict[str, tuple[set[int], dict[int, tuple[int, ...]]]] = {
        "allreduce": (set(everyone), dict.fromkeys(everyone, everyone)),
        "reducescatter": (set(everyone), {part: everyone}),
        "reduce": (set(everyone), {root: everyone}),
        "allgather": ({part}, dict.fromkeys(everyone, (part,))),
        "gather": ({part}, {root: (part,)}),
        "broadcast": ({root}, dict.fromkeys(everyone, (root,))),
        "scatter": ({root}, {part: (root,)}),
        "alltoall": ({src}, {dst: (src,)}),
    }
    return conditions[collective.name]


@cache
def _kernels() -> Any:
    return compiled((_can_happen, _walk), globals())


def _can_happen(state: npt.NDArray[np.int64], needs: npt.NDArray[np.int64], e: int) -> bool:
    """True if event `e` can happen in `state`: it has not yet, and what it needs has."""
    if state[e // WORD_BITS] >> (e % WORD_BITS) & 1:
        return False
    missing = 0
    for word in range(len(state)):
        missing |= needs[e, word] & ~state[word]
    return missing == 0


def _walk(
    needs: npt.NDArray[np.int64],
    suspects: npt.NDArray[np.int64],
    limit: int,
    racing: npt.NDArray[np.int64],
    stuck: npt.NDArray[np.int64],
) -> int:
    """Visits every state once and returns how many there are, at most `limit` + 1. Needs have smaller numbers.

    `racing[i]` becomes 1 if the pair `suspects[i]` (issue, issue, done, done) is at work at once. If nothing can happen
    in some state though events are left, `stuck` becomes the number of events that have, followed by these events.
    """
    n, words = needs.shape
    state = np.zeros(words, dtype=np.int64)
    path = np.empty(n + 1, dtype=np.int64)
    depth = 0
    e = 0
    visited = 1
    arrived = True
    while True:
        if arrived:
            for pair in range(len(suspects)):
                one, other = suspects[pair, 0], suspects[pair, 1]
                one_done, other_done = suspects[pair, 2], suspects[pair, 3]
                if (
                    state[one // WORD_BITS] >> (one % WORD_BITS) & 1
                    and state[other // WORD_BITS] >> (other % WORD_BITS) & 1
                    and not state[one_done // WORD_BITS] >> (one_done % WORD_BITS) & 1
                    and not state[other_done // WORD_BITS] >> (other_done % WORD_BITS) & 1
                ):
                    racing[pair] = 1
            each = 0
            while each < n and not _can_happen(state, needs, each):
                each += 1
            if each == n and depth < n:
                stuck[0] = depth
                stuck[1 : depth + 1] = path[:depth]
        while e < n and not _can_happen(state, needs, e):
            e += 1
        arrived = e < n
        if arrived:
            state[e // WORD_BITS] |= 1 << (e % WORD_BITS)
            path[depth] = e
            depth += 1
            visited += 1
            if visited > limit:
                return visited
            e += 1
        elif depth == 0:
            return visited
        else:
            depth -= 1
            e = path[depth]
            state[e // WORD_BITS] &= ~(1 << (e % WORD_BITS))
            e += 1


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
