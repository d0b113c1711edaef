"""`verify_transfers` against the interpreter of the neutral form, which shares no code with it."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from optcc.codec import read_transfers, write_transfers
from optcc.compiler import compile_schedule, plan_transfers
from optcc.errors import CodecError
from optcc.schedules.registry import SCHEDULES
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.plan.verify_transfers import verify_transfers
from tests.differential.test_transfers import Row, chain, halves, header, text, transfer
from tests.differential.transfers_interpreter import check

BASES = ("ring", "optcc", "optimal", "double-binary-tree", "recursive-doubling", "stragglar", "r2ccl-allreduce")


def judged(head: Row, rows: list[Row]) -> str:
    """The property that is refuted, or `proved`."""
    verdict = verify_transfers(read_transfers(text(head, rows).encode()))
    return verdict.counterexample.property if verdict.counterexample else verdict.verdict


def test_correct_files_are_proved() -> None:
    """Two written by hand, one rank, no element."""
    assert judged(header(2, 4), halves()) == PROVED
    assert judged(header(5, 3), chain(5)) == PROVED
    assert judged(header(1, 4), []) == PROVED
    assert judged(header(3, 0), []) == PROVED


def test_order_does_not_stand_in_for_after() -> None:
    """A race that `order` would hide; a cycle that only both together have."""
    rows = halves()
    rows[2]["after"], rows[2]["order"] = [], [0]
    verdict = verify_transfers(read_transfers(text(header(2, 4), rows).encode()))
    assert verdict.counterexample is not None
    assert verdict.counterexample.summary == (
        "rank 1 bytes 0..7: `after` leaves two transfers unordered; the second reads what the other writes"
    )
    rows = halves()
    rows[0]["order"] = [2]
    assert judged(header(2, 4), rows) == "deadlock"


def test_dependencies_on_other_ranks_count() -> None:
    """0->1, then 2->3 after it, then 1->0 after that: nothing on rank 1 says that it waits, and yet it does."""
    rows = [
        transfer(0, 0, 1, "reduce", (0, 2)),
        transfer(1, 2, 3, "reduce", (0, 2), 0),
        transfer(2, 3, 1, "reduce", (0, 2), 1),
        transfer(3, 1, 0, "copy", (0, 2), 2),
        transfer(4, 0, 2, "copy", (0, 2), 3),
        transfer(5, 0, 3, "copy", (0, 2), 4),
    ]
    assert check(text(header(4, 2), rows)) == []
    assert judged(header(4, 2), rows) == PROVED


def spoiled(rng: random.Random) -> tuple[Row, list[Row]]:
    """A file that the compiler wrote, with one or two mistakes."""
    ranks, segments = rng.choice([2, 3, 4]), rng.choice([1, 2])
    topology = Topology.parse(f"{ranks}@50GB/s,1=25GB/s")
    schedule = SCHEDULES[rng.choice(BASES)].build(topology, segments)
    plan = compile_schedule(schedule, size_bytes=4 * rng.choice([ranks, 7, 12]), topology=topology)
    head, *rows = map(json.loads, write_transfers(plan_transfers(plan)).decode().splitlines())
    for _ in range(rng.choice([0, 1, 1, 2])):
        row = rng.choice(rows)
        what = rng.choice(("after", "after", "flip", "src", "dst", "shift", "order", "add"))
        if what == "after" and row["after"]:
            row["after"].remove(rng.choice(row["after"]))
        elif what == "flip":
            row["op"] = "copy" if row["op"] == "reduce" else "reduce"
        elif what in ("src", "dst"):
            row[what] = rng.randrange(ranks)
        elif what == "shift":
            key = rng.choice(["src_offset", "dst_offset"])
            row[key] = max(0, row[key] + rng.choice([-4, 4]))
        elif what == "order":
            row["order"] = []
        else:
            row[rng.choice(["after", "order"])].append(rng.randrange(len(rows)))
            row["after"], row["order"] = sorted({*row["after"]}), sorted({*row["order"]})
    return head, rows


def agree(seeds: range) -> Counter[str]:
    """Compares the two on the files of `seeds`; counts the verdicts."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        head, rows = spoiled(random.Random(seed))
        problems = check(text(head, rows))
        try:
            ours = judged(head, rows)
        except CodecError:
            assert problems, f"seed {seed}: refused, the interpreter finds nothing"
            counts["refused"] += 1
            continue
        own_bytes = any(row["src"] == row["dst"] and row["src_offset"] == row["dst_offset"] for row in rows)
        if ours == PROVED and own_bytes:  # an element for itself: the interpreter takes any overlap for a race
            problems = [each for each in problems if not each.startswith("race")]
        wrong = ours not in (PROVED, "agreement")
        assert wrong == bool(problems), f"seed {seed}: {ours}, the interpreter: {problems[:3]}"
        counts[ours] += 1
    return counts


def test_both_say_the_same_of_spoiled_files() -> None:
    """Seeds 0 to 399; every verdict occurs."""
    counts = agree(range(400))
    assert {"deadlock", "races", "result", PROVED} <= set(counts), counts


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [range(1_000, 3_000), pytest.param(range(3_000, 11_000), marks=pytest.mark.search)],
    ids=lambda each: f"{each[0]}",
)
def test_both_say_the_same_of_many_spoiled_files(seeds: range) -> None:
    """Ten thousand more."""
    agree(seeds)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_what_the_compiler_writes_is_proved(name: str) -> None:
    """Every schedule of the library, through the file."""
    topology = Topology.parse("3x2@50GB/s,1=1/2" if name == "hierarchical" else "6@50GB/s,1=25GB/s")
    plan = compile_schedule(SCHEDULES[name].build(topology, 2), size_bytes=4 * 53, topology=topology)
    assert verify_transfers(read_transfers(write_transfers(plan_transfers(plan)))).verdict == PROVED
