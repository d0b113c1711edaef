"""`verify_plan` against the naive verifier, which tries every interleaving: on the library, and on broken plans.

A broken plan is drawn from a seed: a right plan, small enough for every interleaving to be tried, with one or two
mistakes put in by hand. The two verifiers share no code. They must agree on what is wrong, except that `verify_plan`
may call a race what only a weaker rule shows (`races_by_issue`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest

from optcc.arrays import column
from optcc.compiler import compile_schedule
from optcc.dsl import Program, schedule
from optcc.errors import PlanError
from optcc.passes.bind import bind
from optcc.passes.depend import depend
from optcc.passes.fuse import fuse
from optcc.passes.lower import lower
from optcc.plan import Plan
from optcc.schedule import Schedule
from optcc.schedules.registry import SCHEDULES
from optcc.topology import Topology
from optcc.transfers import Transfers
from optcc.verdict import PROVED, REFUTED
from optcc.verify.plan import verify_plan
from tests.differential.naive_verifier import TooManyStates, naive_verify, races_by_issue
from tests.negative.edits import Draft, Row, edit_transfers, transfer_rows
from tests.property.strategies import Trees

LIBRARY = [
    (name, ranks, segments, slots, fused)
    for name, (ranks, segments), slots, fused in product(
        SCHEDULES, ((2, 1), (2, 2), (2, 3), (3, 1)), (1, 2), (False, True)
    )
    if (name, ranks, segments) not in {("direct", 3, 1), ("double-binary-tree", 2, 3)}  # too many interleavings
]


@dataclass(frozen=True)
class Mutant:
    """A plan with a mistake, or None where the constructor already refuses it."""

    what: str
    plan: Plan | None


def library_plan(name: str, ranks: int, segments: int, slots: int, fused: bool) -> Plan:
    """A plan of the library with one element a chunk, last rank degraded."""
    topology = Topology.parse(f"{ranks}@50MB/s,{ranks - 1}=25MB/s")
    built = SCHEDULES[name].build(topology, segments)
    return compile_schedule(built, size_bytes=4 * ranks * segments, topology=topology, slots=slots, fused=fused)


@pytest.mark.parametrize(("name", "ranks", "segments", "slots", "fused"), LIBRARY)
def test_the_library_survives_every_interleaving(name: str, ranks: int, segments: int, slots: int, fused: bool) -> None:
    """No interleaving of a library plan deadlocks, races or gives a wrong result."""
    plan = library_plan(name, ranks, segments, slots, fused)
    assert verify_plan(plan).verdict == PROVED
    naive = naive_verify(plan, limit=400_000)
    assert naive.problems == {}
    assert naive.states > len(plan)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "slots", "fused"), list(product(SCHEDULES, (3, 4), (1, 2), (False, True))))
def test_larger_plans_survive_the_most_patient_run_time(name: str, ranks: int, slots: int, fused: bool) -> None:
    """Two segments on three and four ranks, every interleaving of the run-time that waits the most."""
    plan = library_plan(name, ranks, 2 if ranks == 3 else 1, slots, fused)
    assert verify_plan(plan).verdict == PROVED
    assert naive_verify(plan, windows=(1,), limit=3_000_000).problems == {}


# --- broken plans ---------------------------------------------------------------------------------------------------


def drop_dependency(rng: random.Random, draft: Draft) -> None:
    """An instruction no longer waits for another."""
    row = rng.choice([row for row in draft.rows if row.after])
    row.after.pop(rng.randrange(len(row.after)))


def add_dependency(rng: random.Random, draft: Draft) -> None:
    """An instruction waits for another of its rank, perhaps for one behind it."""
    row, other = rng.sample(draft.rows, 2)
    row.after.append(other)


def delete_pair(rng: random.Random, draft: Draft) -> None:
    """A plain send and its plain receive are taken out."""
    send = rng.choice([row for row in draft.rows if row.name == "send"])
    receive = next(row for row in draft.rows if row.recv_transfer == send.send_transfer)
    draft.remove(send)
    if receive.send_transfer >= 0:
        receive.become("send")
        receive.in_channel, receive.recv_transfer, receive.src_offset, receive.dst_offset = (
            -1,
            -1,
            receive.dst_offset,
            -1,
        )
    else:
        draft.remove(receive)


def delete_one(rng: random.Random, draft: Draft) -> None:
    """An instruction is taken out."""
    draft.remove(rng.choice(draft.rows))


def duplicate_pair(rng: random.Random, draft: Draft) -> None:
    """A send and its receive happen twice."""
    send = rng.choice([row for row in draft.rows if row.name == "send"])
    receive = next(row for row in draft.rows if row.recv_transfer == send.send_transfer)
    for row in (send, receive):
        lane = draft.lane_of(row)
        lane.insert(next(i for i, each in enumerate(lane) if each is row), replace(row, after=list(row.after)))


def swap_in_lane(rng: random.Random, draft: Draft) -> None:
    """Two instructions of a lane change places."""
    lane = rng.choice([lane for lane in draft.lanes if len(lane) > 1])
    i = rng.randrange(len(lane) - 1)
    j = rng.randrange(i + 1, len(lane)) if rng.random() < 0.3 else i + 1
    lane[i], lane[j] = lane[j], lane[i]


def swap_messages(rng: random.Random, draft: Draft) -> None:
    """Two sends of a channel change places, and so do their receives: matched, in another order."""
    channel = rng.choice([i for i in range(len(draft.channels)) if sum(r.out_channel == i for r in draft.rows) > 1])
    sends = [row for row in draft.rows if row.out_channel == channel]
    i = rng.randrange(len(sends) - 1)
    for pair in (sends[i : i + 2], [row for row in draft.rows if row.in_channel == channel][i : i + 2]):
        lane = draft.lane_of(pair[0])
        places = [next(at for at, each in enumerate(lane) if each is row) for row in pair]
        lane[places[0]], lane[places[1]] = pair[1], pair[0]


def move_in_lane(rng: random.Random, draft: Draft) -> None:
    """An instruction moves to another place of its lane."""
    lane = rng.choice([lane for lane in draft.lanes if len(lane) > 1])
    row = lane.pop(rng.randrange(len(lane)))
    lane.insert(rng.randrange(len(lane) + 1), row)


def retarget(rng: random.Random, draft: Draft) -> None:
    """A send or a receive uses another channel."""
    row = rng.choice(draft.rows)
    name = "out_channel" if row.out_channel >= 0 else "in_channel"
    setattr(row, name, rng.randrange(len(draft.channels)))


def shift(rng: random.Random, draft: Draft) -> None:
    """An instruction touches the bytes beside its own."""
    row = rng.choice(draft.rows)
    name = "src_offset" if row.src_offset >= 0 else "dst_offset"
    setattr(row, name, max(0, getattr(row, name) + rng.choice((-8, -4, 4, 8))))


def shift_with_transfer(rng: random.Random, draft: Draft) -> None:
    """A transfer, and its instructions with it, read or write the bytes beside their own."""
    rows = transfer_rows(draft.transfers)
    t = rng.randrange(len(rows))
    by = rng.choice((-8, -4, 4, 8))
    buffer = draft.transfers.size_bytes + draft.transfers.scratch_bytes
    name = rng.choice(("src_offset", "dst_offset"))
    moved = min(max(0, rows[t][name] + by), buffer - rows[t]["bytes"])
    rows[t][name] = moved
    draft.transfers = edit_transfers(draft.transfers, rows)
    for row in draft.rows:
        if name == "src_offset" and row.send_transfer == t and row.src_offset >= 0:
            row.src_offset = moved
        if name == "dst_offset" and row.recv_transfer == t:
            row.dst_offset = moved


def flip(rng: random.Random, draft: Draft) -> None:
    """A reduction becomes a copy, or a copy a reduction; the transfer agrees or not."""
    row = rng.choice([row for row in draft.rows if row.name != "send"])
    pairs = [("receive", "receive-reduce"), ("receive-copy-send", "receive-reduce-send"), ("copy", "reduce")]
    other = {a: b for one, two in pairs for a, b in ((one, two), (two, one))}
    row.become(other[row.name])
    if rng.random() < 0.7:
        rows = transfer_rows(draft.transfers)
        rows[row.recv_transfer]["op"] ^= 1
        draft.transfers = edit_transfers(draft.transfers, rows)


def cut_slots(rng: random.Random, draft: Draft) -> None:
    """All channels have one slot."""
    del rng
    draft.channels = [replace(channel, slots=1) for channel in draft.channels]


def split_lane(rng: random.Random, draft: Draft) -> None:
    """A lane falls into two, channel by channel where it can."""
    at = rng.randrange(len(draft.lanes))
    lane = draft.lanes[at]
    channel = rng.choice(lane).in_channel
    parts = [row for row in lane if row.in_channel == channel], [row for row in lane if row.in_channel != channel]
    draft.lanes[at : at + 1] = [part for part in parts if part]
    draft.lane_rank[at : at + 1] = [draft.lane_rank[at]] * len([part for part in parts if part])


def merge_lanes(rng: random.Random, draft: Draft) -> None:
    """Two lanes of a rank become one, their instructions shuffled together."""
    pairs = [
        (a, b)
        for a in range(len(draft.lanes))
        for b in range(a + 1, len(draft.lanes))
        if draft.lane_rank[a] == draft.lane_rank[b]
    ]
    a, b = rng.choice(pairs)
    one, two = list(draft.lanes[a]), list(draft.lanes[b])
    both: list[Row] = []
    while one or two:
        both.append((one if not two or (one and rng.random() < 0.5) else two).pop(0))
    draft.lanes[a] = both
    del draft.lanes[b], draft.lane_rank[b]


def unfuse(rng: random.Random, draft: Draft) -> None:
    """A fused receive forwards other bytes: its receive and its send come from different transfers."""
    row = rng.choice([row for row in draft.rows if row.in_channel >= 0 and row.out_channel >= 0])
    other = rng.choice([each for each in draft.rows if each.send_transfer >= 0])
    row.send_transfer, other.send_transfer = other.send_transfer, row.send_transfer


PLAN_EDITS: tuple[Callable[[random.Random, Draft], None], ...] = (
    *(drop_dependency, drop_dependency, add_dependency, delete_pair, delete_one, duplicate_pair, swap_in_lane),
    *(
        swap_messages,
        move_in_lane,
        retarget,
        shift,
        shift_with_transfer,
        flip,
        cut_slots,
        split_lane,
        merge_lanes,
        unfuse,
    ),
)


def edit_rows(rng: random.Random, rows: list[dict[str, int]], n_ranks: int) -> str:
    """One mistake in a list of transfers."""
    i = rng.randrange(len(rows))
    what = rng.choice(("delete", "duplicate", "swap", "dst", "src", "flip", "chunk", "shift"))
    if what == "delete":
        del rows[i]
    elif what == "duplicate":
        rows.insert(rng.randrange(len(rows)), dict(rows[i]))
    elif what == "swap":
        j = rng.randrange(len(rows))
        rows[i], rows[j] = rows[j], rows[i]
    elif what in ("dst", "src"):
        rows[i][what] = rng.choice(
            [rank for rank in range(n_ranks) if rank != rows[i]["dst" if what == "src" else "src"]]
        )
    elif what == "flip":
        rows[i]["op"] ^= 1
    elif what == "chunk":
        other = rng.choice(rows)
        for name in ("src_offset", "dst_offset", "bytes"):
            rows[i][name] = other[name]
    else:
        name = rng.choice(("src_offset", "dst_offset"))
        rows[i][name] = max(0, rows[i][name] - 4)
    return f"transfers: {what} {i}"


def base(rng: random.Random) -> tuple[Schedule, Topology | None, int]:
    """A small schedule, its topology and its size."""
    if rng.random() < 0.5:
        ranks = rng.choice((2, 2, 3))
        topology = Topology.parse(f"{ranks}@50MB/s,{ranks - 1}=25MB/s")
        segments = rng.choice((1, 2)) if ranks == 2 else 1
        name = rng.choice(list(SCHEDULES))
        return SCHEDULES[name].build(topology, segments), topology, 4 * ranks * segments
    ranks = rng.choice((2, 3, 3))
    sections = rng.choice((1, 2)) if ranks == 3 else rng.choice((1, 2, 3))
    trees = Trees(rng.randrange(2**32), ranks, sections, 1, ranks == 2 and rng.random() < 0.5, rng.random() < 0.5)
    return trees.build(), None, 4 * sections


def compiled(transfers: Transfers, slots: int, fused: bool) -> Plan:
    """The plan of transfers in the order in which they stand."""
    order = column(np.arange(len(transfers)))
    plan = lower("mutant", depend(transfers), order, slots)
    return fuse(plan, order) if fused else plan


def mutant(seed: int) -> Mutant:
    """The broken plan of that seed."""
    rng = random.Random(seed)
    built, topology, size = base(rng)
    slots, fused = rng.choice((1, 1, 2)), rng.random() < 0.6
    if rng.random() < 0.25:
        transfers = bind(built, size, "float32", "sum")
        rows = transfer_rows(transfers)
        what = [edit_rows(rng, rows, built.n_ranks) for _ in range(rng.choice((1, 1, 2))) if rows]
        return Mutant(", ".join(what), compiled(edit_transfers(transfers, rows), slots, fused))
    draft = Draft.of(compile_schedule(built, size_bytes=size, topology=topology, slots=slots, fused=fused))
    names = []
    for _ in range(rng.choice((1, 1, 2))):
        edit = rng.choice(PLAN_EDITS)
        try:
            edit(rng, draft)
        except (IndexError, ValueError, StopIteration):  # the plan has nothing for this edit to do
            continue
        names.append(edit.__name__)
    what_ = " + ".join(names) or "nothing"
    try:
        return Mutant(what_, draft.build())
    except PlanError:
        return Mutant(what_, None)


def disagreement(plan: Plan, limit: int) -> str:
    """How the verifier differs from the naive one on `plan`; "" where they agree.

    The verifier may refuse as a race what no interleaving shows, but only where `races_by_issue` finds one.
    """
    verdict = verify_plan(plan)
    naive = naive_verify(plan, limit=limit)
    theirs = "matching" if "provenance" in naive.problems else naive.first
    ours = verdict.counterexample.property if verdict.counterexample else ""
    if ours == theirs and verdict.verdict == (REFUTED if theirs else PROVED):
        return ""
    if ours == "races" and theirs not in ("matching", "deadlock") and races_by_issue(plan, limit=limit):
        return ""
    return f"verifier: {ours or verdict.verdict}; naive: {naive.problems or PROVED}"


def judge_mutants(seeds: range, limit: int) -> Counter[str]:
    """Compares the verifiers on the mutants of `seeds`; counts what came out."""
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        broken = mutant(seed)
        if broken.plan is None:
            outcomes["refused"] += 1
            continue
        try:
            difference = disagreement(broken.plan, limit)
        except TooManyStates:
            outcomes["too large"] += 1
            continue
        assert not difference, f"mutant {seed} ({broken.what}): {difference}"
        verdict = verify_plan(broken.plan)
        outcomes[verdict.counterexample.property if verdict.counterexample else verdict.verdict] += 1
    return outcomes


@pytest.mark.parametrize("batch", range(6))
def test_broken_plans_get_the_naive_verdict(batch: int) -> None:
    """A hundred mutants a batch: the same verdict, and for the same reason, as trying every interleaving."""
    outcomes = judge_mutants(range(100 * batch, 100 * batch + 100), 12_000)
    assert outcomes["too large"] <= 25, outcomes
    assert set(outcomes) >= {"refused", "matching", "deadlock", "races", "result", PROVED}, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(20))
def test_many_broken_plans_get_the_naive_verdict(batch: int, seed: int) -> None:
    """Five hundred mutants a batch, new ones in each run."""
    start = seed * 20 + batch
    outcomes = judge_mutants(range(500 * start, 500 * start + 500), 100_000)
    assert outcomes["too large"] <= 100, outcomes


def test_a_refusal_of_a_plan_that_no_interleaving_breaks() -> None:
    """The verifier does not use that a message which was taken had a free slot: by that the third sum is ready here."""

    @schedule
    def there_and_back(program: Program) -> None:
        for segment in program.pipeline(sections=3):
            for section in (2, 0, 1):
                segment[section].reduce(src=1, dst=0)
            for section in (0, 1, 2):
                segment[section].copy(src=0, dst=1)

    draft = Draft.of(compile_schedule(there_and_back(n_ranks=2), size_bytes=12, slots=1, fused=False))
    draft.find(0, "send", 2).after.clear()
    plan = draft.build()
    assert naive_verify(plan).problems == {}
    assert races_by_issue(plan)
    assert verify_plan(plan).properties["races"] == REFUTED
