"""Translation validation: a compiled plan has the transfers of the author's schedule, in an equivalent order.

The reference semantics of a schedule is sequential: its transfers one by one, as written. A plan is equivalent if:

**The transfers.** Each written transfer with a nonempty chunk occurs in the plan exactly once: with its ranks, its
operation, its bytes at both ends, its segment, its stage and its line; and the plan has no other. The bytes follow from
the layout of the segments: of a message of n elements, a segment begins at the sum of the shares before it, times n,
rounded down, and ends where the next one begins; section c of q in a segment of m elements takes those from m*c/q to
m*(c + 1)/q, rounded down; scratch slot j of a section lies where the section lies, j + 1 messages further on. So chunks
of different segments, sections or slots never share a byte.

**The order.** Two transfers conflict if they access the same chunk of a rank and one writes it. If the author wrote one
before the other, then its access is done before the other's instruction is issued, in every run: in happens-before of
the least conservative run-time, as in `optcc.verify.plan.races`. Transfers that do not conflict may be reordered.

**The one exception: siblings.** Consecutive reductions into the same chunk of a rank, with no read of and no copy into
the chunk between them in the author's order, may be reordered, as addition commutes. They must remain sequential, after
all conflicting transfers before them and before all behind them. (The fifo timetable adds siblings in order of
arrival.) Later reads see the same set of summands. Rounding may differ from the author's order; that all ranks still
get the same bits is the property `agreement`.

So by induction over the author's order every read sees the value of the sequential execution, up to the order of
summands: the plan computes what the schedule does. Whether that is the collective is the property `result`.

The check builds on `matching` (each instruction does what its transfer says) and `deadlock` (happens-before is an
order), and uses no code of `optcc.passes`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column
from optcc.collective import check_count, check_dtype
from optcc.compiled import compiled
from optcc.errors import PlanError
from optcc.plan import LOCALS, Plan
from optcc.schedule import DATA, REDUCE, Schedule
from optcc.transfers import Transfers
from optcc.verdict import Counterexample
from optcc.verify.plan.topological_order import pack_edges, topological_order

_COLUMNS = ("src", "dst", "op", "src_offset", "dst_offset", "bytes", "segment", "stage", "line")
_READ, _REDUCE, _COPY = range(3)
_NAMED_MAX = 4


def check_translation(schedule: Schedule, plan: Plan) -> Counterexample | None:
    """None if `plan` is a translation of `schedule` for the plan's size and type, else the first difference.

    >>> from optcc.compiler import compile_schedule
    >>> from optcc.schedules.ring import ring
    >>> plan = compile_schedule(ring(n_ranks=3), size_bytes=100)
    >>> print(check_translation(ring(n_ranks=3), plan))
    None
    >>> print(check_translation(ring(n_ranks=3, segments=2), plan).summary)
    the plan lacks 0->1 s0 c0 reduce [reduce-scatter] (line 43), bytes 0..15

    Raises PlanError for a plan that fails `matching` or `deadlock`: its order is then undefined.
    """
    unlike = _check_shape(schedule, plan)
    if unlike:
        return Counterexample("translation", unlike)
    instructions = _Instructions.of(plan)
    written = _Written.of(schedule, plan)
    found = np.stack([getattr(plan.transfers, name) for name in _COLUMNS])
    if np.array_equal(written.columns, found):
        transfer = np.arange(len(plan.transfers))
    else:
        wrong = _unlike_transfers(schedule, written, plan.transfers, found)
        if wrong is not None:
            return wrong
        transfer = _same_transfers(written.columns, found, _Events.of(plan, instructions).place, instructions)
    return _check_order(schedule, plan, written, transfer, instructions)


def _check_shape(schedule: Schedule, plan: Plan) -> str:
    """Empty if plan and schedule have the same collective, stages and scratch space."""
    rows = (
        ("collective", plan.collective, schedule.collective),
        ("stages", plan.transfers.stages, schedule.stages),
        ("scratch bytes", plan.transfers.scratch_bytes, schedule.scratch_slots * plan.size_bytes),
    )
    for label, has, wanted in rows:
        if has != wanted:
            return f"the plan has {label} {has!r}: the schedule's are {wanted!r}"
    return ""


# The transfers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    """The transfers of a schedule with a nonempty chunk: `index` in the schedule, a row of `columns` for each of
    `_COLUMNS`, and numbers for the chunks they read and write: equal where rank, segment, section and slot are."""

    index: Column
    columns: npt.NDArray[np.int64]
    reads: Column
    writes: Column

    @classmethod
    def of(cls, schedule: Schedule, plan: Plan) -> _Written:
        s, itemsize = schedule, check_dtype(plan.transfers.dtype)
        first, stop = _sections(schedule, check_count(plan.size_bytes, plan.transfers.dtype))
        index = np.flatnonzero(stop > first)
        first, length = first[index] * itemsize, (stop - first)[index] * itemsize
        src_slot, dst_slot = s.src_slot[index] - DATA, s.dst_slot[index] - DATA
        rows = {
            "src_offset": first + src_slot * plan.size_bytes,
            "dst_offset": first + dst_slot * plan.size_bytes,
            "bytes": length,
        }
        columns = np.stack([rows[name] if name in rows else getattr(s, name)[index] for name in _COLUMNS])
        sections = np.array([shape.sections for shape in s.segments], dtype=np.int64)
        place = (np.cumsum(sections) - sections)[s.segment[index]] + s.section[index]
        slots, places = s.scratch_slots + 1, int(sections.sum())
        reads = (s.src[index] * places + place) * slots + src_slot
        return cls(index, columns, reads, (s.dst[index] * places + place) * slots + dst_slot)


def _sections(schedule: Schedule, count: int) -> tuple[Column, Column]:
    """For each transfer the first element of its section, and the one after its last."""
    unit = lcm(*(shape.share.denominator for shape in schedule.segments))
    ends = accumulate(shape.share.numerator * (unit // shape.share.denominator) for shape in schedule.segments)
    borders = np.array([0, *(count * end // unit for end in ends)], dtype=np.int64)
    sections = np.array([shape.sections for shape in schedule.segments], dtype=np.int64)
    begin, length, parts = (each[schedule.segment] for each in (borders[:-1], np.diff(borders), sections))
    whole, rest = length // parts, length % parts
    c = schedule.section
    first = begin + whole * c + rest * c // parts
    stop = begin + whole * (c + 1) + rest * (c + 1) // parts
    return first, stop


def _unlike_transfers(
    schedule: Schedule, written: _Written, transfers: Transfers, found: npt.NDArray[np.int64]
) -> Counterexample | None:
    """The first written transfer that the plan lacks, or the first of the plan that is not written; None if neither."""
    wanted_rows, found_rows = (list(zip(*each.tolist(), strict=True)) for each in (written.columns, found))
    wanted, has = Counter(wanted_rows), Counter(found_rows)
    if wanted == has:
        return None
    lacks, invented = wanted - has, has - wanted
    if lacks:
        at = next(at for at, row in enumerate(wanted_rows) if row in lacks)
        row = dict(zip(_COLUMNS, wanted_rows[at], strict=True))
        first, last = row["dst_offset"], row["dst_offset"] + row["bytes"] - 1
        times = f" {wanted[wanted_rows[at]]} times" if has[wanted_rows[at]] else ""
        summary = f"the plan lacks {_describe(schedule, int(written.index[at]))}{times}, bytes {first}..{last}"
        near = [t for t, other in enumerate(found_rows) if other in invented and other[:2] == wanted_rows[at][:2]]
        named = near[:_NAMED_MAX] if invented else []
        trace = tuple(f"never written: {transfers.describe(t)} of s{transfers.segment[t]}" for t in named)
        return Counterexample("translation", summary, row["dst"], first, last, trace)
    at = next(at for at, row in enumerate(found_rows) if row in invented)
    first = int(transfers.dst_offset[at])
    last = first + int(transfers.bytes[at]) - 1
    often = wanted[found_rows[at]]
    what = f"done {has[found_rows[at]]} times, written {often} times" if often else "never written"
    summary = f"{what}: {transfers.describe(at)} of s{transfers.segment[at]}"
    return Counterexample("translation", summary, int(transfers.dst[at]), first, last)


def _same_transfers(
    wanted: npt.NDArray[np.int64], found: npt.NDArray[np.int64], place: Column, instructions: _Instructions
) -> Column:
    """The number in the plan of each written transfer; equal ones are matched in the order of the plan."""
    result = np.empty(wanted.shape[1], dtype=np.int64)
    done_at = place[2 * instructions.receiver + 1]
    result[np.lexsort(wanted[::-1])] = np.lexsort((done_at, *found[::-1]))
    return result


def _describe(schedule: Schedule, index: int) -> str:
    """A written transfer in words."""
    line = f" (line {schedule.line[index]})" if schedule.line[index] > 0 else ""
    return f"{schedule[index]}{line}"


# The order ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Instructions:
    """For each transfer, the instruction that reads its bytes (`sender`) and the one that writes them (`receiver`): the
    same one for a local operation."""

    sender: Column
    receiver: Column

    @classmethod
    def of(cls, plan: Plan) -> _Instructions:
        n = len(plan.transfers)
        ends = []
        local = np.isin(plan.kind, list(LOCALS))
        for verb, owner, which in (
            ("sent", np.where(local, plan.recv_transfer, plan.send_transfer), local | (plan.send_transfer >= 0)),
            ("received", plan.recv_transfer, plan.recv_transfer >= 0),
        ):
            used = np.flatnonzero(which)
            counts = np.bincount(owner[used], minlength=n)
            wrong = np.flatnonzero(counts != 1)
            if len(wrong):
                t = int(wrong[0])
                raise PlanError(f"{plan.transfers.describe(t)}: {verb} {counts[t]} times: must be once")
            end = np.empty(n, dtype=np.int64)
            end[owner[used]] = used
            ends.append(end)
        return cls(*ends)


@dataclass(frozen=True, slots=True, eq=False)
class _Events:
    """Event 2i: instruction i is issued; 2i + 1: it is done. `causes[first[e]:first[e + 1]]` happen before event e, in
    every run; `place` numbers the events in an order in which they can happen."""

    first: Column
    causes: Column
    place: Column

    @classmethod
    def of(cls, plan: Plan, instructions: _Instructions) -> _Events:
        n = len(plan)
        each = np.arange(n)
        behind = np.flatnonzero(plan.instruction_lane[1:] == plan.instruction_lane[:-1]) + 1
        remote = np.flatnonzero(instructions.sender != instructions.receiver)
        sender, receiver = instructions.sender[remote], instructions.receiver[remote]
        later, freed = _freed_slots(plan)
        free_event = 2 * freed + (plan.out_channel[freed] < 0)  # a fused one frees its slot before it is done
        events = np.concatenate(
            (
                2 * each + 1,
                2 * np.repeat(each, np.diff(plan.after.starts)),
                2 * behind,
                2 * receiver + 1,
                2 * instructions.sender[plan.recv_transfer[later]] + 1,
            )
        )
        causes = np.concatenate((2 * each, 2 * plan.after.values + 1, 2 * behind - 2, 2 * sender + 1, free_event))
        first, causes_of = pack_edges(2 * n, events, causes)
        order = topological_order(*pack_edges(2 * n, causes, events))
        place = np.full(2 * n, -1, dtype=np.int64)
        place[order] = np.arange(len(order))
        if len(order) < 2 * n:
            stuck = int(np.flatnonzero(place < 0)[0]) // 2
            raise PlanError(f"{plan[stuck]}: instructions wait for each other in a circle")
        return cls(first, causes_of, place)


def _freed_slots(plan: Plan) -> tuple[Column, Column]:
    """Receives, and for each the receive of the same lane that frees its slot."""
    receives = np.flatnonzero(plan.in_channel >= 0)
    slots = np.array([channel.slots for channel in plan.channels], dtype=np.int64)[plan.in_channel[receives]]
    at = np.arange(len(receives)) - slots
    lane = plan.instruction_lane[receives]
    reuses = np.flatnonzero((at >= 0) & (lane[np.maximum(at, 0)] == lane))
    return receives[reuses], receives[at[reuses]]


@dataclass(frozen=True, slots=True, eq=False)
class _Accesses:
    """Accesses to chunks, sorted by chunk and then in the author's order: `written` is the transfer, as an index of
    `_Written`, `kind` one of _READ, _REDUCE, _COPY, and `run` numbers the runs of reductions that may be reordered."""

    chunk: Column
    written: Column
    kind: Column
    run: Column

    @classmethod
    def of(cls, written: _Written) -> _Accesses:
        n = len(written.index)
        op = written.columns[_COLUMNS.index("op")]
        chunk = np.concatenate((written.reads, written.writes))
        kind = np.concatenate((np.full(n, _READ), np.where(op == REDUCE, _REDUCE, _COPY)))
        order = np.lexsort((np.tile(np.arange(n), 2), chunk))
        chunk, kind = chunk[order], kind[order]
        begins = np.ones(2 * n, dtype=np.bool_)
        begins[1:] = (chunk[1:] != chunk[:-1]) | (kind[1:] != kind[:-1]) | (kind[1:] != _REDUCE)
        return cls(chunk, order % max(n, 1), kind, np.cumsum(begins))

    @property
    def has_siblings(self) -> bool:
        """True if some run is longer than one access."""
        return len(self.run) > 0 and int(self.run[-1]) < len(self.run)

    def seated(self, done_at: Column) -> _Accesses:
        """With siblings sorted in the order in which the plan adds them; `done_at` is per written transfer."""
        order = np.lexsort((done_at[self.written], self.run))
        return _Accesses(self.chunk[order], self.written[order], self.kind[order], self.run)

    def pairs(self) -> tuple[Column, Column]:
        """Pairs of accesses that must be ordered; all other conflicts follow by transitivity.

        A read follows the last write before it; a write follows the reads since the last write, or that write if there
        are none.
        """
        at, writes = np.arange(len(self.kind)), self.kind != _READ
        last = np.maximum.accumulate(np.where(writes, at, -1))
        following = np.minimum.accumulate(np.where(writes, at, len(at))[::-1])[::-1]
        before, behind = [], []
        reads = np.flatnonzero(~writes)
        for one, other in (
            (last[reads], reads),
            (reads, following[reads]),
            (at[:-1][writes[:-1] & writes[1:]], at[1:][writes[:-1] & writes[1:]]),
        ):
            there = (one >= 0) & (other < len(at))
            one, other = one[there], other[there]
            same = self.chunk[one] == self.chunk[other]
            before.append(one[same])
            behind.append(other[same])
        return np.concatenate(before), np.concatenate(behind)


def _check_order(
    schedule: Schedule, plan: Plan, written: _Written, transfer: Column, instructions: _Instructions
) -> Counterexample | None:
    """None if all conflicts are in the author's order; `transfer` maps written transfers to those of the plan."""
    accesses = _Accesses.of(written)
    events = None
    if accesses.has_siblings:
        events = _Events.of(plan, instructions)
        accesses = accesses.seated(events.place[2 * instructions.receiver[transfer] + 1])
    before, behind = accesses.pairs()
    done_by = np.where(
        accesses.kind == _READ,
        instructions.sender[transfer[accesses.written]],
        instructions.receiver[transfer[accesses.written]],
    )
    first, second = done_by[before], done_by[behind]
    # An instruction waits for its `after`; a fused one sends after it has written.
    waits = np.repeat(np.arange(len(plan)), np.diff(plan.after.starts)) * len(plan) + plan.after.values
    ordered = np.isin(second * len(plan) + first, waits)
    ordered |= (first == second) & (accesses.kind[before] != _READ) & (accesses.kind[behind] == _READ)
    left = np.flatnonzero(~ordered & (accesses.written[before] != accesses.written[behind]))
    if len(left) == 0:
        return None
    events = events or _Events.of(plan, instructions)
    open_ = left[~_ordered(events, first[left], second[left])]
    if len(open_) == 0:
        return None
    one, other = (int(each[open_[0]]) for each in (before, behind))
    turned = bool(_ordered(events, second[open_[:1]], first[open_[:1]])[0]) or first[open_[0]] == second[open_[0]]
    siblings = accesses.run[one] == accesses.run[other]
    return _disorder(schedule, plan, written, accesses, transfer, (one, other), turned=turned, siblings=bool(siblings))


def _ordered(events: _Events, before: Column, behind: Column) -> npt.NDArray[np.bool_]:
    """For each pair of instructions: is the first one done before the second one is issued, in every run?"""
    seen = np.full(len(events.place), -1, dtype=np.int64)
    stack = np.empty(len(events.place), dtype=np.int64)
    found = np.zeros(len(before), dtype=np.bool_)
    _kernels().walk_back(events.first, events.causes, events.place, before, behind, seen, stack, found)
    return found


def _disorder(
    schedule: Schedule,
    plan: Plan,
    written: _Written,
    accesses: _Accesses,
    transfer: Column,
    pair: tuple[int, int],
    *,
    turned: bool,
    siblings: bool,
) -> Counterexample:
    one, other = (int(accesses.written[at]) for at in pair)
    reads = accesses.kind[pair[0]] == _READ
    column = _COLUMNS.index
    rank, first, length = (
        int(written.columns[column(name)][one])
        for name in (("src", "src_offset", "bytes") if reads else ("dst", "dst_offset", "bytes"))
    )
    verbs = ("reads", "reduces into", "overwrites")
    how = f"the first {verbs[accesses.kind[pair[0]]]} what the second {verbs[accesses.kind[pair[1]]]}"
    what = "the plan does the second one first" if turned else "nothing in the plan orders them"
    if siblings:
        how, what = "both reduce into the same bytes", "nothing in the plan orders them"
    trace = tuple(
        f"{_describe(schedule, int(written.index[w]))}: {plan.transfers.describe(int(transfer[w]))}"
        for w in (one, other)
    )
    last = first + length - 1
    return Counterexample("translation", f"rank {rank} bytes {first}..{last}: {how}: {what}", rank, first, last, trace)


@cache
def _kernels() -> Any:
    return compiled((_walk_back,), globals())


def _walk_back(
    first: Column,
    causes: Column,
    place: Column,
    before: Column,
    behind: Column,
    seen: Column,
    stack: Column,
    found: npt.NDArray[np.bool_],
) -> None:
    """For each pair, searches backward from the issue of `behind` for the done of `before`."""
    for pair in range(len(before)):
        target = 2 * before[pair] + 1
        stack[0] = 2 * behind[pair]
        depth = 1
        while depth > 0 and not found[pair]:
            depth -= 1
            event = stack[depth]
            for at in range(first[event], first[event + 1]):
                cause = causes[at]
                if cause == target:
                    found[pair] = True
                elif seen[cause] != pair and place[cause] > place[target]:
                    seen[cause] = pair
                    stack[depth] = cause
                    depth += 1
