"""Wrong plans by the hundred thousand: a right plan of the library, small, with one or two mistakes put in by chance.

A mutant is drawn from a seed alone, so that a number is all there is to say about one. A mistake is made at one of
three levels, where three kinds of people make them:

dsl        the author: rows of the schedule, before any byte is known
transfers  the compiler before lowering: bytes, operations and dependencies of transfers
plan       the compiler after lowering, or whoever edits a plan: instructions, lanes, channels, slots

`judge` asks the verifier and the naive verifier, which share no code, what is wrong with a mutant.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from optcc.arrays import Lists, column
from optcc.compiler import compile_schedule
from optcc.dsl import Definition, Program, schedule
from optcc.errors import OptccError
from optcc.passes.bind import bind
from optcc.passes.depend import depend
from optcc.passes.fuse import fuse
from optcc.passes.lower import lower
from optcc.passes.timetable import Order, timetable
from optcc.plan import KINDS, Channel, Plan
from optcc.schedule import REDUCE, Schedule
from optcc.schedules.registry import SCHEDULES
from optcc.timing import MODELS, Model
from optcc.topology import Topology
from optcc.transfers import Transfers
from optcc.verdict import PROVED, REFUTED, UNKNOWN, Counterexample
from optcc.verify.plan import verify_plan
from tests.differential.naive_verifier import (
    ITEM_BYTES,
    Naive,
    TooManyStates,
    Way,
    naive_verify,
    rows_of,
)
from tests.negative.edits import Draft, Row, edit_transfers, transfer_rows
from tests.property.strategies import Trees

LEVELS = ("dsl", "transfers", "plan")
BASE_STATES_MAX = 40_000
"""A right plan with more states than this is no base; its mutants may have some times more."""
INSTRUCTIONS_MAX = 28
SMALL = 8
"""Of bases with fewer instructions than this most are passed over."""
TREES, TWO_SUMS = "trees", "two sums"
"""Bases that are no schedules of the library: AllReduce over random trees, some through scratch space; and one in
which two ranks add all inputs, by the same tree until a mistake makes them differ."""
SCHEDULE_COLUMNS = ("src", "dst", "op", "segment", "section", "src_slot", "dst_slot", "stage", "line")
CE_LINES_MAX = 20
FUSED = {"receive": "receive-copy-send", "receive-reduce": "receive-reduce-send"}


class Unfit(Exception):
    """The plan has nothing that this mistake could be made with."""


@dataclass(frozen=True)
class Base:
    """A right plan to start from: a schedule, its ranks and segments, and how it is compiled.

    `elements` of `dtype` may be fewer than there are chunks: those without an element fall away, which keeps schedules
    of four ranks small. `ports` "written" keeps the author's order. `seed` matters to random trees alone.
    """

    name: str
    ranks: int
    segments: int
    elements: int
    dtype: str
    slots: int
    fused: bool
    ports: str
    root: int = 0
    seed: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the message."""
        return self.elements * ITEM_BYTES[self.dtype]

    @property
    def topology(self) -> Topology | None:
        """The machine for which the ports are ordered: the last rank at half rate."""
        return None if self.ports == "written" else Topology.parse(f"{self.ranks}@50MB/s,{self.ranks - 1}=25MB/s")

    def schedule(self) -> Schedule:
        """The schedule."""
        if self.name == TREES:
            rng = random.Random(self.seed)
            sections, scratch, mixed = rng.choice((1, 2, 3)), rng.random() < 0.5, rng.random() < 0.5
            return Trees(self.seed, self.ranks, sections, self.segments, scratch, mixed).build()
        if self.name == TWO_SUMS:
            return two_sums(self.ranks, self.segments)
        definition: Definition = SCHEDULES[self.name]
        parameters = definition.configure(Topology.parse(f"{self.ranks}@50MB/s,{self.ranks - 1}=25MB/s"))
        return definition(self.ranks, self.segments, root=self.root, **parameters)

    def compile(self, written: Schedule) -> Plan:
        """The plan of `written` under these choices."""
        ports: Model = next((each for each in MODELS if each == self.ports), "exclusive")
        return compile_schedule(
            written,
            size_bytes=self.size_bytes,
            dtype=self.dtype,
            topology=self.topology,
            slots=self.slots,
            fused=self.fused,
            ports=ports,
        )

    def lower(self, transfers: Transfers) -> Plan:
        """The plan of transfers that have their dependencies, under these choices."""
        if self.topology is None:
            order = Order.as_written(transfers)
        else:
            ports: Model = "fifo" if self.ports == "fifo" else "exclusive"
            transfers, order = timetable(transfers, self.topology, self.slots, ports)
        plan = lower("mutant", transfers, order.sends, self.slots, order.receives)
        return fuse(plan, order.sends) if self.fused and not order.overtakes(transfers) else plan


@schedule
def two_sums(program: Program) -> None:
    """Rank 0 adds all inputs for everyone but the last rank, which adds them in scratch space, by the same tree."""
    n = program.n_ranks
    last = n - 1
    for segment in program.pipeline(sections=1, scratch=last):
        for src in range(last):
            segment[0].copy(src=src, dst=last, into=segment.scratch(0, src))
        for src in range(1, n):
            segment[0].reduce(src=src, dst=0)
        for dst in range(1, last):
            segment[0].copy(src=0, dst=dst)
        for slot in range(1, last):
            segment.scratch(0, slot).reduce(src=last, dst=last, into=segment.scratch(0))
        segment.scratch(0).reduce(src=last, dst=last, into=segment[0])


@cache
def base_plan(base: Base) -> Plan | None:
    """The plan of `base`; None if it has nothing to spoil or too many states."""
    try:
        plan = base.compile(base.schedule())
        if not len(plan) or len(plan) > INSTRUCTIONS_MAX:
            return None
        found = naive_verify(plan, windows=(None,), limit=BASE_STATES_MAX, contents_max=0, runs=1)
    except (OptccError, TooManyStates):
        return None
    assert not found.problems, (base, found)
    return plan


def draw_base(rng: random.Random) -> tuple[Base, Plan]:
    """A base: every schedule as often as any other, two to four ranks."""
    name = rng.choice((*SCHEDULES, TREES, TWO_SUMS))
    while True:
        ranks, segments = rng.choice((2, 3, 3, 4)), rng.choice((1, 1, 2, 3))
        base = Base(
            name,
            ranks,
            segments,
            rng.randrange(1, 2 * ranks * segments + 2),
            rng.choice(("float32", "float32", "int64")),
            rng.choice((1, 1, 2, 3)),
            rng.random() < 0.6,
            rng.choice((*MODELS, "written")),
            rng.randrange(ranks),
            rng.randrange(64) if name == TREES else 0,
        )
        plan = base_plan(base)
        if plan is not None and (len(plan) >= SMALL or rng.random() < 0.2):
            return base, plan


@dataclass(frozen=True)
class Mutant:
    """A plan with mistakes, or None and the name of the error that refuses it."""

    seed: int
    base: Base
    level: str
    operators: tuple[str, ...]
    plan: Plan | None
    refused: str = ""

    def __str__(self) -> str:
        return f"mutant {self.seed}: {self.level}: {' + '.join(self.operators)}, in {self.base}"


# --- the author's mistakes ---

Rows = list[dict[str, int]]


def _other(rng: random.Random, value: int, count: int) -> int:
    """Another number below `count`."""
    if count < 2:
        raise Unfit
    return rng.choice([each for each in range(count) if each != value])


def _pick(rng: random.Random, choices: Sequence[Any]) -> Any:
    if not choices:
        raise Unfit
    return rng.choice(choices)


def _delete_row(rng: random.Random, rows: Rows) -> None:
    rows.remove(_pick(rng, rows))


def _duplicate_row(rng: random.Random, rows: Rows) -> None:
    rows.insert(rng.randrange(len(rows) + 1), dict(_pick(rng, rows)))


def _swap_rows(rng: random.Random, rows: Rows) -> None:
    if len(rows) < 2:
        raise Unfit
    i, j = rng.sample(range(len(rows)), 2)
    rows[i], rows[j] = rows[j], rows[i]


def _move_row(rng: random.Random, rows: Rows) -> None:
    row = _pick(rng, rows)
    rows.remove(row)
    rows.insert(rng.randrange(len(rows) + 1), row)


def _other_order(rng: random.Random, rows: Rows) -> None:
    """Two rows that reduce into the same bytes of a rank, one behind the other, change places."""
    if not rows:
        raise Unfit
    names = [name for name in ("dst", "op", "segment", "section", "dst_slot", "dst_offset", "bytes") if name in rows[0]]
    last: dict[tuple[int, ...], int] = {}
    pairs = []
    for i, row in enumerate(rows):
        key = tuple(row[name] for name in names)
        if row["op"] == REDUCE and key in last:
            pairs.append((last[key], i))
        last[key] = i
    i, j = _pick(rng, pairs)
    rows[i], rows[j] = rows[j], rows[i]


def _flip_row(rng: random.Random, rows: Rows) -> None:
    _pick(rng, rows)["op"] ^= 1


def _reverse_row(rng: random.Random, rows: Rows) -> None:
    row = _pick(rng, rows)
    row["src"], row["dst"] = row["dst"], row["src"]


def _retarget_row(name: str) -> Callable[[random.Random, Rows, int], None]:
    def retarget(rng: random.Random, rows: Rows, n_ranks: int) -> None:
        row = _pick(rng, rows)
        row[name] = _other(rng, row[name], n_ranks)

    return retarget


def _change_section(rng: random.Random, rows: Rows, written: Schedule) -> None:
    row = _pick(rng, rows)
    row["section"] = _other(rng, row["section"], written.segments[row["segment"]].sections)


def _change_segment(rng: random.Random, rows: Rows, written: Schedule) -> None:
    row = _pick(rng, rows)
    row["segment"] = _other(rng, row["segment"], len(written.segments))


def _change_slot(rng: random.Random, rows: Rows, written: Schedule) -> None:
    row, name = _pick(rng, rows), rng.choice(("src_slot", "dst_slot"))
    row[name] = _other(rng, row[name] + 1, written.scratch_slots + 1) - 1


DSL_OPERATORS: dict[str, Callable[[random.Random, Rows, Schedule], None]] = {
    "delete": lambda rng, rows, written: _delete_row(rng, rows),
    "duplicate": lambda rng, rows, written: _duplicate_row(rng, rows),
    "swap": lambda rng, rows, written: _swap_rows(rng, rows),
    "move": lambda rng, rows, written: _move_row(rng, rows),
    "other order": lambda rng, rows, written: _other_order(rng, rows),
    "flip the operation": lambda rng, rows, written: _flip_row(rng, rows),
    "reverse": lambda rng, rows, written: _reverse_row(rng, rows),
    "another src": lambda rng, rows, written: _retarget_row("src")(rng, rows, written.n_ranks),
    "another dst": lambda rng, rows, written: _retarget_row("dst")(rng, rows, written.n_ranks),
    "another section": _change_section,
    "another segment": _change_segment,
    "another slot": _change_slot,
}


def spoil_schedule(rng: random.Random, base: Base, count: int) -> tuple[list[str], Callable[[], Plan]]:
    """`count` mistakes in the rows of the schedule; how they are called, and what compiles it."""
    right = base.schedule()
    values = {name: getattr(right, name).tolist() for name in SCHEDULE_COLUMNS}
    rows: Rows = [{name: int(values[name][i]) for name in SCHEDULE_COLUMNS} for i in range(len(right))]
    names = _apply(rng, DSL_OPERATORS, count, lambda edit: edit(rng, rows, right))
    columns: dict[str, Any] = {name: column(row[name] for row in rows) for name in SCHEDULE_COLUMNS}
    return names, lambda: base.compile(replace(right, **columns))


def _apply(
    rng: random.Random, operators: dict[str, Any], count: int, make: Callable[[Any], object], tries: int = 20
) -> list[str]:
    """Makes `count` mistakes, drawn from `operators`, that the plan is fit for; their names."""
    names: list[str] = []
    for _ in range(tries):
        name = rng.choice(list(operators))
        try:
            make(operators[name])
        except Unfit:
            continue
        names.append(name)
        if len(names) == count:
            break
    return names


# --- the compiler's mistakes before lowering ---


def _flip_transfer(rng: random.Random, rows: Rows, transfers: Transfers) -> None:
    _flip_row(rng, rows)


def _other_chunk(rng: random.Random, rows: Rows, transfers: Transfers) -> None:
    row, other = _pick(rng, rows), _pick(rng, rows)
    for name in ("src_offset", "dst_offset", "bytes"):
        row[name] = other[name]


def _shift_transfer(names: tuple[str, ...]) -> Callable[[random.Random, Rows, Transfers], None]:
    def shift(rng: random.Random, rows: Rows, transfers: Transfers) -> None:
        row, item = _pick(rng, rows), ITEM_BYTES[transfers.dtype]
        by = rng.choice((-2 * item, -item, item, 2 * item))
        buffer = transfers.size_bytes + transfers.scratch_bytes
        for name in names:
            row[name] = min(max(0, row[name] + by), buffer - row["bytes"])

    return shift


def _change_length(rng: random.Random, rows: Rows, transfers: Transfers) -> None:
    row, item = _pick(rng, rows), ITEM_BYTES[transfers.dtype]
    row["bytes"] += rng.choice((-item, item))


def _half_element(rng: random.Random, rows: Rows, transfers: Transfers) -> None:
    _pick(rng, rows)[rng.choice(("src_offset", "dst_offset", "bytes"))] += 2


TRANSFER_OPERATORS: dict[str, Callable[[random.Random, Rows, Transfers], None]] = {
    "delete": lambda rng, rows, transfers: _delete_row(rng, rows),
    "duplicate": lambda rng, rows, transfers: _duplicate_row(rng, rows),
    "swap": lambda rng, rows, transfers: _swap_rows(rng, rows),
    "move": lambda rng, rows, transfers: _move_row(rng, rows),
    "other order": lambda rng, rows, transfers: _other_order(rng, rows),
    "flip the operation": _flip_transfer,
    "reverse": lambda rng, rows, transfers: _reverse_row(rng, rows),
    "another src": lambda rng, rows, transfers: _retarget_row("src")(rng, rows, transfers.n_ranks),
    "another dst": lambda rng, rows, transfers: _retarget_row("dst")(rng, rows, transfers.n_ranks),
    "another chunk": _other_chunk,
    "shift what is read": _shift_transfer(("src_offset",)),
    "shift what is written": _shift_transfer(("dst_offset",)),
    "shift both": _shift_transfer(("src_offset", "dst_offset")),
    "another length": _change_length,
    "half an element": _half_element,
}
DROP, ADD = "drop a dependency", "add a dependency"


def spoil_transfers(rng: random.Random, base: Base, count: int) -> tuple[list[str], Callable[[], Plan]]:
    """`count` mistakes in the transfers, or one time in four in what the right ones wait for."""
    transfers = bind(base.schedule(), base.size_bytes, base.dtype, "sum")
    if rng.random() < 0.25:
        right = depend(transfers)
        after = [list(each) for each in right.after]
        names = []
        for _ in range(count):
            waiting = [t for t, each in enumerate(after) if each]
            if waiting and rng.random() < 0.8:
                each = after[rng.choice(waiting)]
                each.pop(rng.randrange(len(each)))
                names.append(DROP)
            elif len(after) > 1:
                earlier, later = sorted(rng.sample(range(len(after)), 2))
                after[later] = sorted({*after[later], earlier})
                names.append(ADD)
        return names, lambda: base.lower(replace(right, after=Lists.of(after)))
    rows = transfer_rows(transfers)
    names = _apply(rng, TRANSFER_OPERATORS, count, lambda edit: edit(rng, rows, transfers))
    return names, lambda: base.lower(depend(edit_transfers(transfers, rows)))


# --- mistakes in a plan ---


def _drop_dependency(rng: random.Random, draft: Draft) -> None:
    row = _pick(rng, [row for row in draft.rows if row.after])
    row.after.pop(rng.randrange(len(row.after)))


def _drop_dependencies(rng: random.Random, draft: Draft) -> None:
    _pick(rng, [row for row in draft.rows if row.after]).after.clear()


def _add_dependency(rng: random.Random, draft: Draft) -> None:
    rank = _pick(rng, draft.lane_rank)
    own = [row for at, lane in zip(draft.lane_rank, draft.lanes, strict=True) if at == rank for row in lane]
    if len(own) < 2:
        raise Unfit
    row, other = rng.sample(own, 2)
    row.after.append(other)


def _move_dependency(rng: random.Random, draft: Draft) -> None:
    """An instruction waits for the neighbour of what it should wait for."""
    row = _pick(rng, [row for row in draft.rows if row.after])
    place = rng.randrange(len(row.after))
    lane = draft.lane_of(row.after[place])
    row.after[place] = _pick(rng, [each for each in lane if each is not row.after[place] and each is not row])


def _receiver_of(draft: Draft, send: Row) -> Row:
    return next(row for row in draft.rows if row.recv_transfer == send.send_transfer)


def _plain_send(rng: random.Random, draft: Draft) -> tuple[Row, Row]:
    """A plain send of which the receive is known, and that receive."""
    received = {row.recv_transfer for row in draft.rows}
    send: Row = _pick(rng, [row for row in draft.rows if row.name == "send" and row.send_transfer in received])
    return send, _receiver_of(draft, send)


def _delete_pair(rng: random.Random, draft: Draft) -> None:
    """A send and its receive are taken out; of a fused receive the send stays."""
    send, receive = _plain_send(rng, draft)
    draft.remove(send)
    if receive.send_transfer >= 0:
        receive.become("send")
        receive.src_offset, receive.dst_offset = receive.dst_offset, -1
        receive.in_channel = receive.recv_transfer = -1
    else:
        draft.remove(receive)


def _delete_one(rng: random.Random, draft: Draft) -> None:
    draft.remove(_pick(rng, draft.rows))


def _place(draft: Draft, row: Row) -> tuple[list[Row], int]:
    """The lane of `row` and where it stands there."""
    lane = draft.lane_of(row)
    return lane, next(i for i, each in enumerate(lane) if each is row)


def _insert_before(draft: Draft, behind: Row, row: Row) -> None:
    lane, at = _place(draft, behind)
    lane.insert(at, row)


def _duplicate_pair(rng: random.Random, draft: Draft) -> None:
    for row in _plain_send(rng, draft):
        _insert_before(draft, row, replace(row, after=list(row.after)))


def _duplicate_one(rng: random.Random, draft: Draft) -> None:
    row = _pick(rng, draft.rows)
    _insert_before(draft, row, replace(row, after=list(row.after)))


def _long_lane(rng: random.Random, draft: Draft) -> list[Row]:
    lane: list[Row] = _pick(rng, [lane for lane in draft.lanes if len(lane) > 1])
    return lane


def _swap_in_lane(rng: random.Random, draft: Draft) -> None:
    lane = _long_lane(rng, draft)
    i = rng.randrange(len(lane) - 1)
    j = rng.randrange(i + 1, len(lane)) if rng.random() < 0.3 else i + 1
    lane[i], lane[j] = lane[j], lane[i]


def _swap_messages(rng: random.Random, draft: Draft) -> None:
    """Two messages of a channel change places, at both ends: matched, in another order."""
    ends = [
        ([row for row in draft.rows if row.out_channel == i], [row for row in draft.rows if row.in_channel == i])
        for i in range(len(draft.channels))
    ]
    sends, receives = _pick(rng, [(out, into) for out, into in ends if len(out) > 1 and len(out) == len(into)])
    i = rng.randrange(len(sends) - 1)
    for one, two in (sends[i : i + 2], receives[i : i + 2]):
        (lane, at), (other, there) = _place(draft, one), _place(draft, two)
        lane[at], other[there] = two, one


def _move_in_lane(rng: random.Random, draft: Draft) -> None:
    lane = _long_lane(rng, draft)
    row = lane.pop(rng.randrange(len(lane)))
    lane.insert(rng.randrange(len(lane) + 1), row)


def _move_to_lane(rng: random.Random, draft: Draft) -> None:
    """An instruction moves into another lane of its rank."""
    pairs = [
        (a, b)
        for a in range(len(draft.lanes))
        for b in range(len(draft.lanes))
        if a != b and draft.lane_rank[a] == draft.lane_rank[b] and draft.lanes[a]
    ]
    a, b = _pick(rng, pairs)
    row = draft.lanes[a].pop(rng.randrange(len(draft.lanes[a])))
    draft.lanes[b].insert(rng.randrange(len(draft.lanes[b]) + 1), row)


def _retarget(rng: random.Random, draft: Draft) -> None:
    row = _pick(rng, [row for row in draft.rows if row.out_channel >= 0 or row.in_channel >= 0])
    name = "out_channel" if row.out_channel >= 0 else "in_channel"
    setattr(row, name, _other(rng, getattr(row, name), len(draft.channels)))


def _cross_wire(rng: random.Random, draft: Draft) -> None:
    """Two messages of one sender change channels, at the sender alone or at both ends."""
    pairs = [
        (a, b)
        for a in draft.rows
        for b in draft.rows
        if 0 <= a.out_channel < b.out_channel and draft.channels[a.out_channel].src == draft.channels[b.out_channel].src
    ]
    a, b = _pick(rng, pairs)
    a.out_channel, b.out_channel = b.out_channel, a.out_channel
    if rng.random() < 0.5:
        a.send_transfer, b.send_transfer = b.send_transfer, a.send_transfer
        a.src_offset, b.src_offset = b.src_offset, a.src_offset


def _swap_channels(rng: random.Random, draft: Draft) -> None:
    """Two channels change their ends."""
    if len(draft.channels) < 2:
        raise Unfit
    i, j = rng.sample(range(len(draft.channels)), 2)
    draft.channels[i], draft.channels[j] = draft.channels[j], draft.channels[i]


def _second_channel(rng: random.Random, draft: Draft) -> None:
    """A send goes out on a second channel to the same rank, its receive with it or not, each in a lane of its own."""
    send, receive = _plain_send(rng, draft)
    if receive.out_channel >= 0:
        raise Unfit
    old = draft.channels[send.out_channel]
    draft.channels.append(Channel(old.src, old.dst, old.slots))
    for row, name, rank in ((send, "out_channel", old.src), (receive, "in_channel", old.dst)):
        if name == "in_channel" and rng.random() < 0.2:
            continue
        lane = draft.lane_of(row)
        lane[:] = [each for each in lane if each is not row]
        setattr(row, name, len(draft.channels) - 1)
        at = draft.lane_rank.index(rank)
        draft.lanes.insert(at, [row])
        draft.lane_rank.insert(at, rank)


def _shift(rng: random.Random, draft: Draft) -> None:
    row, item = _pick(rng, draft.rows), ITEM_BYTES[draft.transfers.dtype]
    name = "src_offset" if row.src_offset >= 0 else "dst_offset"
    setattr(row, name, max(0, getattr(row, name) + rng.choice((-2 * item, -item, item, 2 * item))))


def _shift_with_transfer(rng: random.Random, draft: Draft) -> None:
    """A transfer, and its instructions with it, read or write the bytes beside their own."""
    rows, item = transfer_rows(draft.transfers), ITEM_BYTES[draft.transfers.dtype]
    t = rng.randrange(len(rows))
    buffer = draft.transfers.size_bytes + draft.transfers.scratch_bytes
    name = rng.choice(("src_offset", "dst_offset"))
    moved = rows[t][name] + rng.choice((-2 * item, -item, item, 2 * item))
    moved = rows[t][name] = min(max(0, moved), buffer - rows[t]["bytes"])
    draft.transfers = edit_transfers(draft.transfers, rows)
    for row in draft.rows:
        if name == "src_offset" and row.send_transfer == t and row.src_offset >= 0:
            row.src_offset = moved
        if name == "dst_offset" and row.recv_transfer == t:
            row.dst_offset = moved


def _cut_with_transfer(rng: random.Random, draft: Draft) -> None:
    """A transfer and its instructions leave out its last element."""
    rows, item = transfer_rows(draft.transfers), ITEM_BYTES[draft.transfers.dtype]
    t = _pick(rng, [t for t, row in enumerate(rows) if row["bytes"] > item])
    rows[t]["bytes"] -= item
    draft.transfers = edit_transfers(draft.transfers, rows)
    for row in draft.rows:
        if t in (row.send_transfer, row.recv_transfer):
            row.bytes = rows[t]["bytes"]


def _change_bytes(rng: random.Random, draft: Draft) -> None:
    _pick(rng, draft.rows).bytes += rng.choice((-1, 1)) * ITEM_BYTES[draft.transfers.dtype]


def _flip(rng: random.Random, draft: Draft) -> None:
    """A reduction becomes a copy, or a copy a reduction; the transfer agrees or not."""
    row = _pick(rng, [row for row in draft.rows if row.name != "send"])
    pairs = [("receive", "receive-reduce"), ("receive-copy-send", "receive-reduce-send"), ("copy", "reduce")]
    row.become({a: b for one, two in pairs for a, b in ((one, two), (two, one))}[row.name])
    if rng.random() < 0.7:
        rows = transfer_rows(draft.transfers)
        rows[row.recv_transfer]["op"] ^= 1
        draft.transfers = edit_transfers(draft.transfers, rows)


def _cut_slots(rng: random.Random, draft: Draft) -> None:
    """All channels into a rank, or all there are, have one slot less."""
    rank = rng.choice((None, *range(draft.transfers.n_ranks)))
    low = [c for c in draft.channels if c.slots > 1 and rank in (None, c.dst)]
    if not low:
        raise Unfit
    draft.channels = [
        replace(c, slots=c.slots - 1) if c.slots > 1 and rank in (None, c.dst) else c for c in draft.channels
    ]


def _add_slots(rng: random.Random, draft: Draft) -> None:
    draft.channels = [replace(channel, slots=channel.slots + 1) for channel in draft.channels]


def _split_lane(rng: random.Random, draft: Draft) -> None:
    """A lane falls into two: one channel's receives, or the sends and the rest, or anything."""
    at = rng.randrange(len(draft.lanes))
    lane = draft.lanes[at]
    if not lane:
        raise Unfit
    channel, how = rng.choice(lane).in_channel, rng.choice(("channel", "sends", "any"))
    chosen = [
        row.in_channel == channel if how == "channel" else row.in_channel < 0 if how == "sends" else rng.random() < 0.5
        for row in lane
    ]
    parts = (
        [row for row, yes in zip(lane, chosen, strict=True) if yes],
        [row for row, yes in zip(lane, chosen, strict=True) if not yes],
    )
    if not all(parts):
        raise Unfit
    draft.lanes[at : at + 1] = list(parts)
    draft.lane_rank[at : at + 1] = [draft.lane_rank[at]] * 2


def _merge_lanes(rng: random.Random, draft: Draft) -> None:
    """Two lanes of a rank become one, their instructions shuffled together."""
    pairs = [
        (a, b)
        for a in range(len(draft.lanes))
        for b in range(a + 1, len(draft.lanes))
        if draft.lane_rank[a] == draft.lane_rank[b]
    ]
    a, b = _pick(rng, pairs)
    one, two = list(draft.lanes[a]), list(draft.lanes[b])
    both: list[Row] = []
    while one or two:
        both.append((one if not two or (one and rng.random() < 0.5) else two).pop(0))
    draft.lanes[a] = both
    del draft.lanes[b], draft.lane_rank[b]


def _cross_transfers(rng: random.Random, draft: Draft) -> None:
    """A fused receive passes on what another instruction should send, and the other way round."""
    row = _pick(rng, [row for row in draft.rows if row.in_channel >= 0 and row.out_channel >= 0])
    other = _pick(rng, [each for each in draft.rows if each.send_transfer >= 0 and each is not row])
    row.send_transfer, other.send_transfer = other.send_transfer, row.send_transfer


def _unfuse(rng: random.Random, draft: Draft) -> None:
    """A fused receive falls into a receive and a send behind it in the lane, which waits for it or not."""
    row = _pick(rng, [row for row in draft.rows if row.in_channel >= 0 and row.out_channel >= 0])
    send = replace(
        row, kind=KINDS.index("send"), in_channel=-1, recv_transfer=-1, src_offset=row.dst_offset, dst_offset=-1
    )
    send.after = [row] if rng.random() < 0.7 else list(row.after)
    lane, at = _place(draft, row)
    lane.insert(at + 1, send)
    row.become(next(plain for plain, fused in FUSED.items() if fused == row.name))
    row.out_channel = row.send_transfer = -1
    if rng.random() < 0.8:
        for each in draft.rows:
            if each is not send and any(one is row for one in each.after):
                each.after.append(send)


def _fuse_two(rng: random.Random, draft: Draft) -> None:
    """A receive and a send of its rank become one instruction, whether or not the send passes on what came."""
    rank_of = {id(row): at for at, lane in zip(draft.lane_rank, draft.lanes, strict=True) for row in lane}
    pairs = [
        (receive, send)
        for receive in draft.rows
        for send in draft.rows
        if receive.name in ("receive", "receive-reduce")
        and send.name == "send"
        and rank_of[id(receive)] == rank_of[id(send)]
        and (rng.random() < 0.1 or (receive.dst_offset, receive.bytes) == (send.src_offset, send.bytes))
    ]
    receive, send = _pick(rng, pairs)
    lane_of_receive, at = _place(draft, receive)
    del lane_of_receive[at]
    lane, at = _place(draft, send)
    lane[at] = receive
    receive.become(FUSED[receive.name])
    receive.out_channel, receive.send_transfer = send.out_channel, send.send_transfer
    receive.after = [each for each in (*receive.after, *send.after) if each is not receive and each is not send]
    for each in draft.rows:
        each.after = [receive if one is send else one for one in each.after]
        each.after = [one for one in each.after if one is not each]


PLAN_OPERATORS: dict[str, Callable[[random.Random, Draft], None]] = {
    "drop a dependency": _drop_dependency,
    "drop all dependencies": _drop_dependencies,
    "add a dependency": _add_dependency,
    "move a dependency": _move_dependency,
    "delete a message": _delete_pair,
    "delete": _delete_one,
    "duplicate a message": _duplicate_pair,
    "duplicate": _duplicate_one,
    "swap in the lane": _swap_in_lane,
    "swap messages": _swap_messages,
    "move in the lane": _move_in_lane,
    "move to another lane": _move_to_lane,
    "retarget": _retarget,
    "cross-wire": _cross_wire,
    "swap channels": _swap_channels,
    "second channel": _second_channel,
    "shift": _shift,
    "shift with its transfer": _shift_with_transfer,
    "cut with its transfer": _cut_with_transfer,
    "another length": _change_bytes,
    "flip the operation": _flip,
    "a slot less": _cut_slots,
    "a slot more": _add_slots,
    "split a lane": _split_lane,
    "merge lanes": _merge_lanes,
    "cross transfers": _cross_transfers,
    "unfuse": _unfuse,
    "fuse": _fuse_two,
}


def spoil_plan(rng: random.Random, plan: Plan, count: int) -> tuple[list[str], Callable[[], Plan]]:
    """`count` mistakes in the plan."""
    draft = Draft.of(plan)
    return _apply(rng, PLAN_OPERATORS, count, lambda edit: edit(rng, draft)), draft.build


def draw_mutant(seed: int) -> Mutant:
    """The mutant of that seed."""
    rng = random.Random(seed)
    base, plan = draw_base(rng)
    level, count = rng.choice(("dsl", "transfers", "plan", "plan")), rng.choice((1, 1, 2))
    if level == "dsl":
        names, make = spoil_schedule(rng, base, count)
    elif level == "transfers":
        names, make = spoil_transfers(rng, base, count)
    else:
        names, make = spoil_plan(rng, plan, count)
    try:
        return Mutant(seed, base, level, tuple(names), make())
    except OptccError as error:
        return Mutant(seed, base, level, tuple(names), None, type(error).__name__)


# --- judging ---

REFUSED, TOO_LARGE, STILL_RIGHT = "refused", "too large", "still right"


@dataclass(frozen=True)
class Judgement:
    """What came out of a mutant: a property that both refute, or how it could not be judged; and how the two differ."""

    outcome: str
    difference: str = ""


def judge(plan: Plan, limit: int, way: Way = "once", runs: int = 3) -> Judgement:
    """Compares the two verifiers on `plan`; `limit` bounds the states of the naive one.

    They must name the same property, and what the counterexample names must be wrong in the eyes of the naive one too.
    """
    verdict = verify_plan(plan)
    try:
        naive = naive_verify(plan, limit=limit, way=way, contents_max=60, runs=runs)
        theirs = "matching" if "provenance" in naive.problems else naive.first
        ours = verdict.counterexample.property if verdict.counterexample else ""
        if verdict.verdict == UNKNOWN:
            return Judgement(UNKNOWN)
        if verdict.counterexample is not None:
            difference = misleading(plan, verdict.counterexample, naive, limit, way)
            if difference:
                return Judgement(ours, difference)
        if ours == theirs and verdict.verdict == (REFUTED if theirs else PROVED):
            return Judgement(ours or STILL_RIGHT)
    except TooManyStates:
        return Judgement(TOO_LARGE)
    return Judgement(ours or verdict.verdict, f"verifier: {ours or verdict.verdict}; naive: {naive.problems or PROVED}")


def _shared_bytes(plan: Plan, one: int, other: int) -> set[tuple[int, int]]:
    """First and last byte of what two instructions both touch, one of them writing; or one reads and writes."""
    rows = rows_of(plan)
    return {
        (max(a[0], b[0]), min(a[1], b[1]) - 1)
        for a in rows[one].accesses()
        for b in rows[other].accesses()
        if a is not b and (a[2] or b[2]) and (one != other or a[2] != b[2]) and max(a[0], b[0]) < min(a[1], b[1])
    }


def misleading(plan: Plan, example: Counterexample, naive: Naive, limit: int, way: Way) -> str:
    """What is untrue in a counterexample, or "": it must be short, and name what the naive verifier found as well."""
    lines = str(example).splitlines()
    if len(lines) > CE_LINES_MAX:
        return f"{len(lines)} lines: {lines[0]}"
    named = [int(number) for line in example.trace for number in re.findall(r"^rank \d+ lane \d+ #(\d+)", line)]
    item = ITEM_BYTES[plan.transfers.dtype]
    if example.property == "deadlock" and naive.stuck:
        return "" if named and set(named) <= naive.stuck else f"these are not stuck: {lines}"
    if example.property == "races" and naive.first in ("races", "result", "agreement", ""):
        pair = (min(named), max(named))
        if pair not in naive.racing:
            return f"these do not race: {lines}"
        shared = _shared_bytes(plan, *pair)
        return "" if (example.first_byte, example.last_byte) in shared else f"they share {shared}: {lines}"
    if example.property == "result" and naive.wrong:
        assert example.rank is not None and example.first_byte is not None and example.last_byte is not None
        elements = range(example.first_byte // item, example.last_byte // item + 1)
        missed = [element for element in elements if (example.rank, element) not in naive.wrong]
        return f"these are not wrong: {missed}: {lines}" if missed else ""
    if example.property == "agreement" and naive.differing:
        assert example.first_byte is not None and example.last_byte is not None
        elements = range(example.first_byte // item, example.last_byte // item + 1)
        return "" if set(elements) <= naive.differing else f"these agree: {lines}"
    return ""
