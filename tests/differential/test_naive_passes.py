"""The passes against the naive ones: the same dependencies, the same plans, with compiled inner loops and without."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optcc.arrays import Column, Lists, column
from optcc.dsl import Program, schedule
from optcc.passes import depend as depend_module
from optcc.passes import fuse as fuse_module
from optcc.passes import lower as lower_module
from optcc.passes.bind import bind
from optcc.passes.depend import depend
from optcc.passes.fuse import fuse
from optcc.passes.lower import lower
from optcc.plan import Plan
from optcc.schedule import Schedule
from optcc.schedules.ring import ring
from optcc.transfers import Transfers
from optcc.trees import Tree
from tests.differential.naive_passes import naive_after, naive_fuse, naive_lower
from tests.property.strategies import Trees, random_tree
from tests.sample import sampled


@pytest.fixture(params=["compiled", "plain"], autouse=True)
def inner_loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test runs twice: with the inner loops that numba compiles, and as on a machine without numba."""
    modules = (depend_module, lower_module, fuse_module)
    if request.param == "compiled":
        pytest.importorskip("numba")
    else:
        monkeypatch.setitem(sys.modules, "numba", None)
    for module in modules:
        module._kernels.cache_clear()
    yield
    for module in modules:
        module._kernels.cache_clear()


def scattered_transfers(rng: random.Random) -> Transfers:
    """Transfers of ranges that overlap as they like; some are local."""
    ranks, elements, n = rng.randint(2, 5), rng.choice((4, 8, 30)), rng.randint(1, 40)
    rows = []
    for _ in range(n):
        size = rng.randint(1, elements)
        ends = rng.sample(range(ranks), 2) if rng.random() < 0.85 else [rng.randrange(ranks)] * 2
        offsets = [4 * rng.randrange(elements - size + 1) for _ in range(2)]
        rows.append((*ends, rng.randrange(2), *offsets, 4 * size))
    names = ("src", "dst", "op", "src_offset", "dst_offset", "bytes")
    columns: dict[str, Any] = {name: column(row[i] for row in rows) for i, name in enumerate(names)}
    zeros: dict[str, Any] = {name: column([0] * n) for name in ("segment", "stage", "line")}
    base = bind(ring(n_ranks=ranks), 4 * elements, "float32", "sum")
    return replace(base, **columns, **zeros, after=Lists.empty(n), order=Lists.empty(n))


def written_transfers(rng: random.Random) -> Transfers:
    """Those of a schedule: trees as authors may write them, a ring, or trees as the DSL walks them."""
    ranks, segments = rng.randint(1, 6), rng.randint(1, 4)

    @schedule
    def along_trees(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            edges = random_tree(rng, ranks)
            tree = Tree.of(dict(reversed(edges)), edges[-1][1] if edges else 0)
            segment[0].reduce_along(tree)
            segment[0].broadcast_along(tree)

    def trees(shuffled: bool) -> Schedule:
        return Trees(rng.randrange(2**32), ranks, rng.randint(1, 4), segments, not shuffled, shuffled).build()

    made = rng.choice(
        (
            lambda: trees(shuffled=True),
            lambda: trees(shuffled=False),
            lambda: ring(n_ranks=ranks, segments=segments),
            lambda: along_trees(n_ranks=ranks, segments=segments),
        )
    )()
    return bind(made, 4 * rng.choice((0, 1, 7, 31, 60, 97)), "float32", "sum")


def random_order(transfers: Transfers, rng: random.Random) -> Column:
    """The transfers in an order that respects their dependencies; now and then the author's."""
    n = len(transfers)
    if rng.random() < 0.3:
        return column(np.arange(n))
    waiting = [set(each) for each in transfers.after]
    done: list[int] = []
    while len(done) < n:
        ready = [t for t in range(n) if t not in done and waiting[t] <= set(done)]
        done.append(rng.choice(ready))
    return column(done)


def all_before(transfers: Transfers) -> Transfers:
    """With everything in `after` that follows from it: more than is needed, and as good."""
    before: list[set[int]] = []
    for each in transfers.after:
        before.append(set(each).union(*(before[t] for t in each)))
    return replace(transfers, after=Lists.of([sorted(each) for each in before]))


def assert_same(plan: Plan, naive: Plan) -> None:
    """Column by column, so that a failure says where, then the digest."""
    assert (list(plan.lanes), plan.lane_rank.tolist()) == (list(naive.lanes), naive.lane_rank.tolist())
    for name in ("kind", "in_channel", "out_channel", "src_offset", "dst_offset", "bytes"):
        assert getattr(plan, name).tolist() == getattr(naive, name).tolist(), name
    for name in ("recv_transfer", "send_transfer"):
        assert getattr(plan, name).tolist() == getattr(naive, name).tolist(), name
    assert list(plan.after) == list(naive.after)
    assert plan.channels == naive.channels
    assert plan.digest == naive.digest


@pytest.mark.parametrize("seed", range(8))
def test_dependencies_are_the_naive_ones(seed: int) -> None:
    """Chunks of a schedule and ranges that overlap as they like."""
    rng = random.Random(seed)
    for _ in range(20):
        for transfers in (scattered_transfers(rng), written_transfers(rng)):
            assert list(depend(transfers).after) == naive_after(transfers)


def test_dependencies_among_many_readers_and_few_touched_bytes() -> None:
    """A chunk that 99 ranks read before it is overwritten; far more cuts and ranks than transfers."""

    @schedule
    def fan(program: Program) -> None:
        for segment in program.pipeline(500, sections=1):
            if segment.index == 250:
                for rank in program.ranks[1:]:
                    segment[0].copy(src=0, dst=rank)
                segment[0].reduce(src=1, dst=0)
            elif segment.index % 50 == 0:
                segment[0].copy(src=segment.index % 7, dst=99)

    transfers = bind(fan(n_ranks=100), 4 * 1003, "float32", "sum")
    assert list(depend(transfers).after) == naive_after(transfers)
    assert max(len(each) for each in depend(transfers).after) == 99


@pytest.mark.parametrize("seed", sampled(range(8), every=3))
def test_plans_are_the_naive_ones(seed: int) -> None:
    """Lowered and fused in any order that respects the dependencies, with one slot or more."""
    rng = random.Random(seed)
    fused = 0
    for _ in range(20):
        for made in (scattered_transfers, written_transfers):
            transfers = depend(made(rng))
            if rng.random() < 0.3:
                transfers = all_before(transfers)
            order, slots = random_order(transfers, rng), rng.randint(1, 3)
            plan, naive = lower("x", transfers, order, slots), naive_lower(transfers, order, slots)
            assert_same(plan, naive)
            assert_same(fuse(plan, order), naive_fuse(naive, order))
            fused += len(plan) - len(fuse(plan, order))
    assert fused, "no case fused anything"


def test_a_plan_with_nothing_to_fuse_is_left_alone() -> None:
    """Ranks that receive from several peers, and a tree whose leaves pass nothing on: the very same plan."""

    @schedule
    def exchange(program: Program) -> None:
        for segment in program.pipeline(sections=3):
            for c in range(3):
                for src in program.ranks:
                    if src != c:
                        segment[c].reduce(src=src, dst=c)
                for dst in program.ranks:
                    if dst != c:
                        segment[c].copy(src=c, dst=dst)

    @schedule
    def star(program: Program) -> None:
        tree = Tree.of({1: 0, 2: 0}, root=0)
        for segment in program.pipeline(sections=1):
            segment[0].reduce_along(tree)
            segment[0].broadcast_along(tree)

    for definition in (exchange, star):
        transfers = depend(bind(definition(n_ranks=3, segments=2), 240, "float32", "sum"))
        order = column(np.arange(len(transfers)))
        plan = lower("x", transfers, order, 2)
        assert fuse(plan, order) is plan
