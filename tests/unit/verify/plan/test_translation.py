"""Is the plan the author's schedule? Right ones, planted faults of every kind, and a naive judge that must agree."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from optcc.arrays import Lists, column
from optcc.collective import DTYPE_BYTES
from optcc.compiler import compile_schedule
from optcc.dsl import Program, schedule
from optcc.errors import PlanError, TopologyError
from optcc.passes.bind import bind
from optcc.passes.depend import depend
from optcc.passes.lower import lower
from optcc.passes.timetable import families
from optcc.plan import RECV_COPY_SEND, Channel, Plan
from optcc.schedule import COPY, REDUCE, Schedule, SegmentShape
from optcc.schedules.direct import direct
from optcc.schedules.registry import SCHEDULES
from optcc.schedules.ring import ring
from optcc.timing import MODELS
from optcc.topology import Topology
from optcc.transfers import Transfers
from optcc.verdict import Counterexample
from optcc.verify.plan.matching import check_matching
from optcc.verify.plan.translation import _COLUMNS, _Written, check_translation
from tests.negative.edits import Draft, edit_transfers, transfer_rows
from tests.property.strategies import Trees, interpret

SIZE = 4 * 23
"""Divided by nothing: chunks differ."""


def plan_of(transfers: Transfers, slots: int = 2) -> Plan:
    """The plan of edited transfers: consistent in itself, whatever was done to them."""
    return lower("edited", depend(transfers), column(range(len(transfers))), slots)


def random_trees(rng: random.Random) -> Schedule:
    return Trees(
        seed=rng.getrandbits(32),
        n_ranks=rng.randint(1, 5),
        sections=rng.randint(1, 3),
        segments=rng.randint(1, 3),
        scratch=rng.random() < 0.7,
        mixed=rng.random() < 0.5,
        two_pipelines=rng.random() < 0.3,
    ).build()


def compiled(rng: random.Random, written: Schedule, size_bytes: int) -> Plan:
    """With whatever the compiler can do to it."""
    n = written.n_ranks
    rates = ",".join(f"{rank}={rng.randint(1, 9)}MB/s" for rank in range(n))
    return compile_schedule(
        written,
        size_bytes=size_bytes,
        topology=rng.choice((None, Topology.parse(f"{n}@1MB/s,{rates}"))),
        slots=rng.randint(1, 4),
        fused=rng.random() < 0.5,
        ports=rng.choice(MODELS),
    )


def reordered(written: Schedule, order: list[int]) -> Schedule:
    """The same transfers written in another order; each keeps its line."""
    names = ("src", "dst", "op", "segment", "section", "src_slot", "dst_slot", "stage", "line")
    columns: dict[str, Any] = {name: column(getattr(written, name)[order]) for name in names}
    return replace(written, **columns)


def refuted(written: Schedule, plan: Plan) -> Counterexample:
    wrong = check_translation(written, plan)
    assert wrong is not None
    assert wrong.property == "translation"
    assert len(str(wrong).splitlines()) <= 20
    return wrong


# Right plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_compiler_translates_the_library(name: str) -> None:
    checked = 0
    for text in ("4@50MB/s", "8@50GB/s,7=20GB/s", "7@3GB/s,1=1GB/s", "2x4@50GB/s,1=3/4"):
        topology = Topology.parse(text)
        try:
            written = SCHEDULES[name].build(topology, 3)
        except TopologyError:
            continue
        for ports in MODELS:
            plan = compile_schedule(written, size_bytes=4 * 1009, topology=topology, ports=ports)
            assert check_translation(written, plan) is None
            checked += 1
    assert checked


def test_the_compiler_translates_random_schedules_of_any_size() -> None:
    rng = random.Random(21)
    for case in range(300):
        written = random_trees(rng)
        plan = compiled(rng, written, 4 * rng.choice((0, 1, 2, 3, 5, 8, 23, 64)))
        assert check_translation(written, plan) is None, case


def test_the_layout_is_that_of_the_compiler() -> None:
    rng = random.Random(22)
    for case in range(200):
        written = random_trees(rng)
        if case % 2:
            shares = [Fraction(rng.randint(0, 9), 9) for _ in written.segments]
            total = sum(shares) or Fraction(1)
            shapes = tuple(
                SegmentShape(share / total if sum(shares) else Fraction(1, len(shares)), each.sections)
                for share, each in zip(shares, written.segments, strict=True)
            )
            written = replace(written, segments=shapes)
        dtype = rng.choice(sorted(DTYPE_BYTES))
        size = DTYPE_BYTES[dtype] * rng.choice((0, 1, 7, 64, 10**6 + 3, 2**40 + 1))
        bound = bind(written, size, dtype, "sum")
        plan = plan_of(bound)
        columns = _Written.of(written, plan).columns
        for name, found in zip(_COLUMNS, columns, strict=True):
            assert np.array_equal(found, getattr(bound, name)), (case, name)


def test_another_numbering_of_the_same_transfers_is_the_same_schedule() -> None:
    """Also of equal ones: 0 adds to 1 twice, and what lies between tells them apart."""

    @schedule
    def twice(program: Program) -> None:
        for segment in program.pipeline(sections=2):
            for src, dst in ((0, 1), (1, 0), (0, 1)) * 3:
                segment[0].reduce(src=src, dst=dst)
            segment[1].reduce(src=2, dst=1)

    written = twice(3)
    written = replace(written, line=column([7] * len(written)))
    plan = compile_schedule(written, size_bytes=SIZE, fused=False)
    n = len(plan.transfers)
    order = random.Random(23).sample(range(n), n)
    number = np.argsort(order)
    draft = Draft.of(plan)
    rows = transfer_rows(plan.transfers)
    draft.transfers = edit_transfers(plan.transfers, [rows[t] for t in order])
    for row in draft.rows:
        row.recv_transfer, row.send_transfer = (
            int(number[t]) if t >= 0 else -1 for t in (row.recv_transfer, row.send_transfer)
        )
    assert check_translation(written, draft.build()) is None
    assert check_translation(reordered(written, [*range(1, n), 0]), draft.build()) is not None


def test_a_ring_of_256_is_checked_whole() -> None:
    written = ring(n_ranks=256)
    plan = compile_schedule(written, size_bytes=4 * 70000)
    assert len(plan.transfers) == 2 * 255 * 256
    assert check_translation(written, plan) is None
    assert check_translation(reordered(written, [*range(1, len(written)), 0]), plan) is not None


# Transfers ------------------------------------------------------------------------------------------------------------

Edit = Callable[[list[dict[str, int]]], None]


def change(index: int, **values: int) -> Edit:
    return lambda rows: rows[index].update(values)


def remove(rows: list[dict[str, int]]) -> None:
    del rows[4]


def repeat(rows: list[dict[str, int]]) -> None:
    rows.insert(5, rows[4])


def invent(rows: list[dict[str, int]]) -> None:
    rows.append(rows[4] | {"line": 99})


def shorten(rows: list[dict[str, int]]) -> None:
    """The element that does not divide is left out everywhere: a ragged tail unsent."""
    last = max(row["dst_offset"] + row["bytes"] for row in rows)
    for row in rows:
        if row["dst_offset"] + row["bytes"] == last:
            row["bytes"] -= 4


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (remove, "the plan lacks 1->2 s0 c0 reduce [reduce-scatter] (line 43), bytes 0..27"),
        (repeat, "done 2 times, written 1 times: #4 1->2 reduce bytes 0..27 [reduce-scatter] (line 43) of s0"),
        (invent, "never written: #12 1->2 reduce bytes 0..27 [reduce-scatter] (line 99) of s0"),
        (shorten, "the plan lacks 2->0 s0 c2 reduce [reduce-scatter] (line 43), bytes 60..91"),
        (change(4, src=0), "the plan lacks 1->2 s0 c0 reduce"),
        (change(4, dst=0), "the plan lacks 1->2 s0 c0 reduce"),
        (change(4, op=COPY), "the plan lacks 1->2 s0 c0 reduce"),
        (change(4, src_offset=32), "the plan lacks 1->2 s0 c0 reduce"),
        (change(4, dst_offset=32), "the plan lacks 1->2 s0 c0 reduce"),
        (change(4, bytes=24), "the plan lacks 1->2 s0 c0 reduce"),
        (change(4, segment=1), "the plan lacks 1->2 s0 c0 reduce"),
        (change(4, stage=1), "the plan lacks 1->2 s0 c0 reduce"),
        (change(4, line=30), "the plan lacks 1->2 s0 c0 reduce"),
    ],
)
def test_a_transfer_that_is_not_the_author_s_is_named(edit: Edit, says: str) -> None:
    written = ring(n_ranks=3)
    transfers = bind(written, SIZE, "float32", "sum")
    rows = transfer_rows(transfers)
    plan_before = [dict(row) for row in rows]
    edit(rows)
    assert rows != plan_before
    wrong = refuted(written, plan_of(edit_transfers(transfers, rows)))
    assert wrong.summary.startswith(says), wrong.summary


def test_what_is_written_twice_must_be_done_twice() -> None:
    written = ring(n_ranks=2)
    doubled = reordered(written, [0, 0, *range(1, len(written))])
    plan = compile_schedule(written, size_bytes=SIZE)
    says = "the plan lacks 0->1 s0 c0 reduce [reduce-scatter] (line 43) 2 times, bytes 0..43"
    assert refuted(doubled, plan).summary == says
    assert check_translation(doubled, compile_schedule(doubled, size_bytes=SIZE)) is None


def test_a_wrong_layout_shows_what_was_done_instead() -> None:
    """A compiler that rounds shares the other way."""
    written = ring(n_ranks=3)
    transfers = bind(written, SIZE, "float32", "sum")
    rows = transfer_rows(transfers)
    shifted = {0: (0, 32), 28: (32, 32), 60: (64, 28)}
    for row in rows:
        row["src_offset"], row["bytes"] = shifted[row["src_offset"]]
        row["dst_offset"] = row["src_offset"]
    wrong = refuted(written, plan_of(edit_transfers(transfers, rows)))
    assert wrong.summary == "the plan lacks 0->1 s0 c0 reduce [reduce-scatter] (line 43), bytes 0..27"
    assert (wrong.rank, wrong.first_byte, wrong.last_byte) == (1, 0, 27)
    assert wrong.trace[0].startswith("never written: #0 0->1 reduce bytes 0..31 [reduce-scatter] (line 43)")


def test_a_scratch_slot_has_its_own_bytes() -> None:
    @schedule
    def through_scratch(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=2):
            segment[0].copy(src=0, dst=1, into=segment.scratch(0, 1))
            segment.scratch(0, 1).reduce(src=1, dst=1, into=segment[0])

    written = through_scratch(2)
    transfers = bind(written, SIZE, "float32", "sum")
    assert check_translation(written, plan_of(transfers)) is None
    rows = transfer_rows(transfers)
    rows[0]["dst_offset"] = rows[1]["src_offset"] = SIZE
    assert "lacks 0->1 s0 c0 copy" in refuted(written, plan_of(edit_transfers(transfers, rows))).summary
    wrong = refuted(written, plan_of(replace(transfers, scratch_bytes=3 * SIZE)))
    assert wrong.summary == f"the plan has scratch bytes {3 * SIZE}: the schedule's are {2 * SIZE}"


def test_another_collective_or_other_stages_are_refused() -> None:
    plan = compile_schedule(ring(n_ranks=3), size_bytes=SIZE)
    assert "collective" in refuted(ring(n_ranks=4), plan).summary
    assert "stages" in refuted(replace(ring(n_ranks=3), stages=("one", "two")), plan).summary


def test_a_vacuous_plan_is_not_the_schedule() -> None:
    transfers = bind(ring(n_ranks=2), SIZE, "float32", "sum")
    wrong = refuted(ring(n_ranks=2), plan_of(edit_transfers(transfers, [])))
    assert wrong.summary.startswith("the plan lacks 0->1 s0 c0 reduce")


# Order ----------------------------------------------------------------------------------------------------------------


@schedule
def update_between(program: Program) -> None:
    """Rank 1 receives, updates, forwards: the classic that fusing may get wrong."""
    for segment in program.pipeline(sections=1):
        with program.stage("only"):
            segment[0].copy(src=0, dst=1)
            segment[0].reduce(src=2, dst=1)
            segment[0].copy(src=1, dst=3)


def test_forwarding_before_the_update_is_refuted_whatever_the_lanes_say() -> None:
    written = update_between(4)
    assert check_translation(written, compile_schedule(written, size_bytes=SIZE)) is None
    wrong = refuted(written, compile_schedule(reordered(written, [0, 2, 1]), size_bytes=SIZE))
    line = int(written.line[1])
    assert wrong.summary == (
        "rank 1 bytes 0..91: the first reduces into what the second reads: the plan does the second one first"
    )
    assert wrong.rank == 1
    assert wrong.trace == (
        f"2->1 s0 c0 reduce [only] (line {line}): #2 2->1 reduce bytes 0..91 [only] (line {line})",
        f"1->3 s0 c0 copy [only] (line {line + 1}): #1 1->3 copy bytes 0..91 [only] (line {line + 1})",
    )


def test_a_copy_is_no_sibling() -> None:
    written = update_between(4)
    wrong = refuted(written, compile_schedule(reordered(written, [1, 0, 2]), size_bytes=SIZE))
    assert "the first overwrites what the second reduces into: the plan does the second one first" in wrong.summary


def test_a_missing_dependency_leaves_an_order_open() -> None:
    written = update_between(4)
    draft = Draft.of(compile_schedule(written, size_bytes=SIZE, fused=False))
    forward = draft.find(1, "send")
    assert len(forward.after) == 1
    forward.after = []
    wrong = refuted(written, draft.build())
    assert wrong.summary.endswith("the first reduces into what the second reads: nothing in the plan orders them")


@schedule
def star(program: Program) -> None:
    """1, 2, 3 add to 0, with or without a look at the sum in between."""
    for segment in program.pipeline(sections=1):
        for src in (1, 2, 3):
            segment[0].reduce(src=src, dst=0)
        segment[0].copy(src=0, dst=1)


@schedule
def star_with_a_look(program: Program) -> None:
    for segment in program.pipeline(sections=1):
        segment[0].reduce(src=1, dst=0)
        segment[0].copy(src=0, dst=4)
        for src in (2, 3):
            segment[0].reduce(src=src, dst=0)


def test_siblings_may_come_in_any_order() -> None:
    for order in ([0, 1, 2, 3], [2, 0, 1, 3], [2, 1, 0, 3]):
        assert check_translation(star(4), compile_schedule(reordered(star(4), order), size_bytes=SIZE)) is None


def test_siblings_must_come_before_who_reads_the_sum() -> None:
    wrong = refuted(star(4), compile_schedule(reordered(star(4), [0, 1, 3, 2]), size_bytes=SIZE))
    assert "3->0 s0 c0 reduce" in wrong.trace[0]
    assert "the first reduces into what the second reads: the plan does the second one first" in wrong.summary


def test_who_looks_at_the_sum_ends_a_family() -> None:
    written = star_with_a_look(5)
    assert check_translation(written, compile_schedule(reordered(written, [0, 1, 3, 2]), size_bytes=SIZE)) is None
    for order in ([2, 1, 0, 3], [2, 0, 1, 3], [0, 2, 1, 3]):
        wrong = refuted(written, compile_schedule(reordered(written, order), size_bytes=SIZE))
        assert "the plan does the second one first" in wrong.summary


def test_siblings_must_still_come_one_after_the_other() -> None:
    draft = Draft.of(compile_schedule(star(4), size_bytes=SIZE, fused=False))
    second = draft.find(0, "receive-reduce", 1)
    second.after = []
    wrong = refuted(star(4), draft.build())
    assert wrong.summary.endswith("both reduce into the same bytes: nothing in the plan orders them")


def test_the_fifo_timetable_does_swap_siblings() -> None:
    """Else the exception would be for nothing: here it is needed."""
    topology = Topology.parse("8@50MB/s,2=10MB/s")
    written = direct(8, 4)
    swapped = compile_schedule(written, size_bytes=4 * 1009, topology=topology, ports="fifo")
    transfers = bind(written, 4 * 1009, "float32", "sum")
    family = families(depend(transfers))
    assert len(set(family.tolist())) < len(family)
    place = {int(t): i for i, t in enumerate(swapped.recv_transfer) if t >= 0}
    siblings = [np.flatnonzero(family == each) for each in set(family.tolist())]
    assert any(place[int(one)] > place[int(other)] for each in siblings for one, other in pairwise(each))
    assert check_translation(written, swapped) is None


def test_copies_into_the_same_bytes_are_no_siblings() -> None:
    @schedule
    def twice(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            segment[0].copy(src=0, dst=1)
            segment[0].copy(src=2, dst=1)

    wrong = refuted(twice(3), compile_schedule(reordered(twice(3), [1, 0]), size_bytes=SIZE))
    assert "the first overwrites what the second overwrites: the plan does the second one first" in wrong.summary


def test_a_fused_instruction_sends_what_it_has_received_and_not_what_was_there() -> None:
    @schedule
    def shift(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            segment[0].copy(src=1, dst=2)
            segment[0].copy(src=0, dst=1)

    plan = compile_schedule(reordered(shift(3), [1, 0]), size_bytes=SIZE)
    assert RECV_COPY_SEND in plan.kind
    wrong = refuted(shift(3), plan)
    assert "the first reads what the second overwrites: the plan does the second one first" in wrong.summary
    assert not naive(shift(3), plan)


@schedule
def overwrite(program: Program) -> None:
    """0 sends X and Y to 1, and X once more."""
    for segment in program.pipeline(sections=2):
        segment[0].copy(src=0, dst=1)
        segment[1].copy(src=0, dst=1)
        segment[0].copy(src=0, dst=1)


def test_a_slot_that_was_freed_orders_what_uses_it_next() -> None:
    """With one slot, Y comes only after the first X has been taken; the second X waits for Y."""
    for slots, ordered in ((1, True), (2, False)):
        draft = Draft.of(compile_schedule(overwrite(2), size_bytes=SIZE, slots=slots, fused=False))
        second, third = draft.find(1, "receive", 1), draft.find(1, "receive", 2)
        third.after = [second]
        plan = draft.build()
        assert naive(overwrite(2), plan) is ordered
        assert (check_translation(overwrite(2), plan) is None) is ordered


def test_a_fused_receive_frees_its_slot_before_it_has_sent() -> None:
    """So what waits for the slot may not overwrite what is still being sent."""

    @schedule
    def passed_on(program: Program) -> None:
        for segment in program.pipeline(sections=2):
            segment[0].copy(src=0, dst=1)
            segment[0].copy(src=1, dst=2)
            segment[1].copy(src=0, dst=1)
            segment[0].copy(src=0, dst=1)

    written = passed_on(3)
    plan = compile_schedule(written, size_bytes=SIZE, slots=1)
    assert RECV_COPY_SEND in plan.kind
    assert check_translation(written, plan) is None
    draft = Draft.of(plan)
    other, again = draft.find(1, "receive", 0), draft.find(1, "receive", 1)
    assert [row.name for row in again.after] == ["receive-copy-send"]
    again.after = [other]
    assert not naive(written, draft.build())
    assert "the first reads what the second overwrites" in refuted(written, draft.build()).summary


# A naive judge --------------------------------------------------------------------------------------------------------


def naive(written: Schedule, plan: Plan) -> bool:
    """The definition, pair by pair, on small plans without equal transfers; None of the checked code but `bind`."""
    bound = transfer_rows(bind(written, plan.size_bytes, plan.transfers.dtype, "sum"))
    has = transfer_rows(plan.transfers)
    keys = [tuple(row.values()) for row in bound]
    if Counter(keys) != Counter(tuple(row.values()) for row in has):
        return False
    number = {tuple(row.values()): t for t, row in enumerate(has)}
    assert len(number) == len(has), "equal transfers"
    before = happened_before(plan)
    reader, writer = {}, {}
    for i, kind in enumerate(plan.kind.tolist()):
        if plan.send_transfer[i] >= 0:
            reader[int(plan.send_transfer[i])] = i
        if plan.recv_transfer[i] >= 0:
            writer[int(plan.recv_transfer[i])] = i
            if kind >= 5:
                reader[int(plan.recv_transfer[i])] = i
    accesses = []  # (written, rank, bytes, instruction, "read" | "reduce" | "copy")
    for w, row in enumerate(bound):
        t, size = number[keys[w]], row["bytes"]
        accesses.append((w, row["src"], range(row["src_offset"], row["src_offset"] + size), reader[t], "read"))
        op = "reduce" if row["op"] == REDUCE else "copy"
        accesses.append((w, row["dst"], range(row["dst_offset"], row["dst_offset"] + size), writer[t], op))

    def ordered(one: int, other: int, first_writes: bool, second_reads: bool) -> bool:
        return (first_writes and second_reads) if one == other else bool(before[2 * other] >> (2 * one + 1) & 1)

    def meet(one: range, other: range) -> bool:
        return max(one.start, other.start) < min(one.stop, other.stop)

    for a, (w, rank, span, i, what) in enumerate(accesses):
        for b in range(a + 1, len(accesses)):
            v, other_rank, other_span, j, other_what = accesses[b]
            if v == w or rank != other_rank or not meet(span, other_span) or what == other_what == "read":
                continue
            right = ordered(i, j, what != "read", other_what == "read")
            if not right and what == other_what == "reduce":
                between = accesses[a + 1 : b]
                free = not any(r == rank and meet(s, span) and k != "reduce" for _, r, s, _, k in between)
                right = free and ordered(j, i, True, False)
            if not right:
                return False
    return True


def happened_before(plan: Plan) -> list[int]:
    """For each event (2i: issue, 2i + 1: done) the set of events that happen before it, as bits."""
    causes: list[set[int]] = [set() for _ in range(2 * len(plan))]
    for i, after in enumerate(plan.after):
        causes[2 * i + 1].add(2 * i)
        causes[2 * i] |= {2 * j + 1 for j in after}
    for lane in plan.lanes:
        for one, other in pairwise(lane):
            causes[2 * other].add(2 * one)
    sender = {}
    for channel, shape in enumerate(plan.channels):
        sends, receives = (np.flatnonzero(each == channel).tolist() for each in (plan.out_channel, plan.in_channel))
        for send, receive in zip(sends, receives, strict=True):
            causes[2 * receive + 1].add(2 * send + 1)
            sender[receive] = (send, shape.slots)
    for lane in plan.lanes:
        receives = [i for i in lane if plan.in_channel[i] >= 0]
        for place, later in enumerate(receives):
            send, slots = sender[later]
            if place >= slots:
                freed = receives[place - slots]
                causes[2 * send + 1].add(2 * freed + int(plan.out_channel[freed] < 0))
    before = [0] * len(causes)
    changed = True
    while changed:
        changed = False
        for event, own in enumerate(causes):
            total = before[event]
            for cause in own:
                total |= before[cause] | 1 << cause
            changed |= total != before[event]
            before[event] = total
    return before


def test_the_naive_judge_agrees_on_schedules_written_in_another_order() -> None:
    """And where the plan is accepted, it computes the same numbers."""
    rng = random.Random(24)
    accepted = rejected = 0
    for case in range(250):
        written = random_trees(rng)
        order = list(range(len(written)))
        for _ in range(rng.randint(1, 4) if order[1:] else 0):
            at = rng.randrange(len(order) - 1)
            order[at], order[at + 1] = order[at + 1], order[at]
        other = reordered(written, order)
        size = 8 * rng.choice((2, 5, 9))
        plan = compiled(rng, other, size)
        rows = [tuple(row.values()) for row in transfer_rows(plan.transfers)]
        if len(set(rows)) < len(rows):
            continue
        verdict = check_translation(written, plan) is None
        assert verdict == naive(written, plan), case
        if verdict:
            results = [interpret(each, size // 8, seed=case)[1] for each in (written, other)]
            for one, same in zip(*results, strict=True):
                assert np.array_equal(one, same), case
        accepted += verdict
        rejected += not verdict
    assert accepted > 40
    assert rejected > 40


def test_the_naive_judge_agrees_where_dependencies_are_gone() -> None:
    """Some of them are there twice, by way of others: then the plan is still the schedule."""
    rng = random.Random(25)
    accepted = rejected = 0
    for case in range(250):
        written = random_trees(rng)
        draft = Draft.of(compiled(rng, written, 4 * rng.choice((3, 8, 23))))
        waiting = [row for row in draft.rows if row.after]
        for row in rng.sample(waiting, min(len(waiting), rng.randint(1, 2))):
            row.after.remove(rng.choice(row.after))
        plan = draft.build()
        assert check_matching(plan) is None
        rows = [tuple(row.values()) for row in transfer_rows(plan.transfers)]
        if len(set(rows)) < len(rows):
            continue
        verdict = check_translation(written, plan) is None
        assert verdict == naive(written, plan), case
        accepted += verdict
        rejected += not verdict
    assert accepted > 20
    assert rejected > 100


def test_an_order_that_only_messages_make_counts() -> None:
    """0 sends to 1, which answers; 0 overwrites what it sent once the answer is there."""

    @schedule
    def answer(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=1):
            segment[0].copy(src=0, dst=1)
            segment[0].copy(src=1, dst=0, into=segment.scratch(0))
            segment.scratch(0).copy(src=0, dst=0, into=segment[0])

    written = answer(2)
    draft = Draft.of(compile_schedule(written, size_bytes=SIZE, fused=False))
    overwrite, send = draft.find(0, "copy"), draft.find(0, "send")
    assert send in overwrite.after
    overwrite.after.remove(send)
    assert naive(written, draft.build())
    assert check_translation(written, draft.build()) is None
    overwrite.after = []
    assert not naive(written, draft.build())
    assert "nothing in the plan orders them" in refuted(written, draft.build()).summary


def test_a_receive_that_may_be_issued_early_is_not_after_the_send() -> None:
    """0 sends to 1, which sends the same bytes back: only a dependency keeps the receive behind the send."""

    @schedule
    def back_and_forth(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            segment[0].copy(src=0, dst=1)
            segment[0].copy(src=1, dst=0)

    written = back_and_forth(2)
    draft = Draft.of(compile_schedule(written, size_bytes=SIZE, fused=False))
    back = draft.find(0, "receive")
    assert len(back.after) == 1
    back.after = []
    assert not naive(written, draft.build())
    assert "nothing in the plan orders them" in refuted(written, draft.build()).summary


# Refusals -------------------------------------------------------------------------------------------------------------


def test_plans_without_matching_or_with_a_deadlock_are_refused() -> None:
    written = star(4)
    draft = Draft.of(compile_schedule(written, size_bytes=SIZE, fused=False))
    draft.remove(draft.find(2, "send"))
    with pytest.raises(PlanError, match="sent 0 times: must be once"):
        check_translation(written, draft.build())
    draft = Draft.of(compile_schedule(written, size_bytes=SIZE, fused=False))
    first, second = draft.find(0, "receive-reduce", 0), draft.find(0, "receive-reduce", 1)
    first.after = [second]
    with pytest.raises(PlanError, match="wait for each other"):
        check_translation(written, draft.build())


def test_plans_with_nothing_in_them() -> None:
    for written, size in ((ring(n_ranks=1), SIZE), (ring(n_ranks=3), 0)):
        assert check_translation(written, compile_schedule(written, size_bytes=size)) is None


def test_several_channels_of_a_pair_are_no_obstacle() -> None:
    draft = Draft.of(compile_schedule(star(4), size_bytes=SIZE, fused=False))
    draft.channels.append(Channel(1, 0, 2))
    row = draft.find(1, "send")
    row.out_channel = draft.find(0, "receive-reduce").in_channel = len(draft.channels) - 1
    assert check_translation(star(4), draft.build()) is None


def test_what_matching_ignores_translation_ignores_too() -> None:
    """`after` and `order` of the transfers are notes: the instructions decide."""
    plan = compile_schedule(star(4), size_bytes=SIZE)
    empty = Lists.empty(len(plan.transfers))
    assert (
        check_translation(star(4), replace(plan, transfers=replace(plan.transfers, after=empty, order=empty))) is None
    )
