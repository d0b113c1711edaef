"""ReduceScatter, AllGather, Broadcast and Reduce: proved for every root and size, as fast as their formulas."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from optcc.collective import split
from optcc.compiler import compile_schedule
from optcc.dsl import Definition
from optcc.errors import InputError, ScheduleError, TopologyError
from optcc.schedule import Layout, Schedule
from optcc.schedules.other_collectives import (
    binary_tree_broadcast,
    binary_tree_reduce,
    chain_broadcast,
    chain_reduce,
    ring_all_gather,
    ring_reduce_scatter,
)
from optcc.simulate import simulate
from optcc.topology import Topology, endpoint_text
from optcc.verdict import PROVED
from optcc.verify.bounds.closed_forms import collective_bound
from optcc.verify.plan import verify_plan

RINGS = (ring_reduce_scatter, ring_all_gather)
CHAINS = (chain_broadcast, chain_reduce)
TREES = (binary_tree_broadcast, binary_tree_reduce)
COUNTS = (0, 1, 7, 31, 96, 101)
"""Elements: none, fewer than ranks, primes, and a number that divides well."""
RATE = 1_000_000


def by_name(definition: Definition) -> str:
    return definition.name


def seconds(schedule: Schedule, topology: Topology, size_bytes: int, *, ordered: bool = True) -> float:
    """The simulated time; the ports are `ordered` for the topology, or keep the author's order."""
    plan = compile_schedule(schedule, size_bytes=size_bytes, topology=topology if ordered else None)
    return simulate(plan, topology).seconds


@pytest.mark.parametrize("definition", [*RINGS, *CHAINS, *TREES], ids=by_name)
@pytest.mark.parametrize("p", [*range(1, 10), 16, 21])
def test_every_root_and_every_size_is_proved(definition: Definition, p: int) -> None:
    """The right slices, whole or ragged, at the right ranks; the order in the chain or tree does not matter."""
    rooted = definition not in RINGS
    for root in sorted({0, p // 2, p - 1}) if rooted else [0]:
        for segments, count in enumerate(COUNTS, start=1):
            order = {"order": tuple(reversed(range(p)))} if rooted and segments % 2 else {}
            schedule = definition(p, segments % 4 or 1, root=root, **order)
            plan = compile_schedule(schedule, size_bytes=4 * count)
            verdict = verify_plan(plan)
            assert verdict.verdict == PROVED, verdict.counterexample
            assert plan.collective.name == definition.collective


@pytest.mark.parametrize("definition", [*RINGS, *CHAINS, *TREES], ids=by_name)
def test_a_single_rank_has_nothing_to_send(definition: Definition) -> None:
    assert len(definition.build(Topology.parse("1@50MB/s"), 3)) == 0


@pytest.mark.parametrize("definition", RINGS, ids=by_name)
@pytest.mark.parametrize("count", COUNTS)
def test_each_pipeline_of_a_ring_lies_on_the_slice_of_its_rank(definition: Definition, count: int) -> None:
    """Slice r is what the collective says that rank r owns, although it is cut into segments."""
    p, k = 5, 3
    layout = Layout.of(definition(p, k).segments, 4 * count, "float32")
    lies = [(layout.first[rank * k][0], layout.stop[rank * k + k - 1][0]) for rank in range(p)]
    assert lies == list(split(count, p))


@pytest.mark.parametrize("definition", RINGS, ids=by_name)
@pytest.mark.parametrize("p", [2, 3, 8])
def test_a_ring_moves_every_slice_over_all_links_but_one(definition: Definition, p: int) -> None:
    rows = list(definition(p, 2))
    assert len(rows) == 2 * p * (p - 1)
    assert all(row.dst == (row.src + 1) % p for row in rows)
    for owner in range(p):
        missing = owner if definition is ring_reduce_scatter else (owner - 1) % p
        sources = Counter(row.src for row in rows if row.segment // 2 == owner)
        assert sources == {rank: 2 for rank in range(p) if rank != missing}


@pytest.mark.parametrize("definition", [*CHAINS, *TREES], ids=by_name)
@pytest.mark.parametrize("p", [2, 3, 8, 11])
def test_broadcasts_and_reductions_use_each_edge_once_a_segment(definition: Definition, p: int) -> None:
    """p - 1 edges; along a chain everyone has one neighbour below, along a tree at most two."""
    schedule = definition(p, 3, root=1)
    assert len(schedule) == 3 * (p - 1)
    below = schedule.dst if definition.collective == "broadcast" else schedule.src
    above = schedule.src if definition.collective == "broadcast" else schedule.dst
    assert Counter(below.tolist()) == {rank: 3 for rank in range(p) if rank != 1}
    assert max(Counter(above.tolist()).values()) == 3 * (1 if definition in CHAINS else min(2, p - 1))


@pytest.mark.parametrize("definition", RINGS, ids=by_name)
@pytest.mark.parametrize("p", [2, 3, 5, 8])
@pytest.mark.parametrize("ordered", [False, True])
def test_rings_take_what_their_formula_and_the_bound_say(definition: Definition, p: int, ordered: bool) -> None:
    """(p - 1)/p * n / B in any number of segments; one slow rank slows all; p - 1 messages follow one another."""
    size, healthy, slow = 4 * p * 960, Topology.parse(f"{p}@1MB/s"), Topology.parse(f"{p}@1MB/s,1=250KB/s")
    formula = Fraction((p - 1) * size, p * RATE)
    assert formula == collective_bound(healthy, size, definition.collective).seconds
    for segments in (1, 4):
        schedule = definition.build(slow, segments)
        assert seconds(schedule, healthy, size, ordered=ordered) == pytest.approx(float(formula))
        assert seconds(schedule, slow, size, ordered=ordered) == pytest.approx(float(4 * formula))
    late = healthy.with_latency(Fraction(1, 1000))
    took = seconds(definition.build(late), late, size, ordered=ordered)
    assert took == pytest.approx(float(formula + Fraction(p - 1, 1000)))


@pytest.mark.parametrize("definition", CHAINS, ids=by_name)
@pytest.mark.parametrize("p", [2, 3, 5, 8])
@pytest.mark.parametrize("k", [1, 4, 16])
def test_chains_take_what_their_formula_says(definition: Definition, p: int, k: int) -> None:
    """(k + p - 2)/k * n / B + (p - 1) alpha."""
    size = 4 * 16 * 60
    alpha = Fraction(size, 4 * k * RATE)
    topology = Topology.parse(f"{p}@1MB/s").with_latency(alpha)
    formula = Fraction((k + p - 2) * size, k * RATE) + (p - 1) * alpha
    assert seconds(definition.build(topology, k), topology, size) == pytest.approx(float(formula))


@pytest.mark.parametrize("definition", TREES, ids=by_name)
@pytest.mark.parametrize("k", [1, 4, 16])
def test_trees_take_what_their_formula_says(definition: Definition, k: int) -> None:
    """2(k + depth - 1)/k * n / B + depth * alpha with a full last level, and no more with another one."""
    size = 4 * 16 * 60
    alpha = Fraction(size, 4 * k * RATE)
    for p in range(2, 16):
        topology = Topology.parse(f"{p}@1MB/s").with_latency(alpha)
        depth = p.bit_length() - 1
        formula = Fraction(2 * (k + depth - 1) * size, k * RATE) + depth * alpha
        took = seconds(definition.build(topology, k), topology, size, ordered=False)
        if p + 1 == 2 ** (depth + 1):
            assert took == pytest.approx(float(formula))
        else:
            assert took <= float(formula) * (1 + 1e-9)


@pytest.mark.parametrize("rates", [[9, 5, 7, 3, 8], [4, 4, 4, 1, 2], [2, 9, 9, 9, 3]])
def test_a_chain_of_unequal_ranks_is_as_fast_as_its_narrowest_link(rates: list[int]) -> None:
    """The hops one after the other for the first segment, the slowest of them for each of the others."""
    k, size, p = 6, 4 * 6 * 50, len(rates)
    fast = [Fraction(10)] * p
    for definition, out, in_ in (
        (chain_broadcast, [Fraction(rate) for rate in rates], fast),
        (chain_reduce, fast, [Fraction(rate) for rate in rates]),
    ):
        topology = Topology.parse(endpoint_text(out, in_))
        inner = [rates[0], *sorted(rates[1:], reverse=True)][: p - 1]
        hops = [Fraction(size, k * rate) for rate in inner]
        assert seconds(definition.build(topology, k), topology, size) == pytest.approx(float(sum(hops) + 5 * max(hops)))


@pytest.mark.parametrize(
    ("definition", "slow"),
    [
        (chain_broadcast, "100KB/s:1MB/s"),
        (chain_reduce, "1MB/s:100KB/s"),
        (binary_tree_broadcast, "100KB/s:1MB/s"),
        (binary_tree_reduce, "1MB/s:100KB/s"),
    ],
)
def test_a_slow_port_at_the_far_end_costs_nothing(definition: Definition, slow: str) -> None:
    """Who sends slowly is a leaf of a broadcast, who receives slowly one of a reduction: as fast as without it."""
    k, size = 4, 4 * 4 * 50
    healthy, degraded = Topology.parse("7@1MB/s"), Topology.parse(f"7@1MB/s,1={slow}")
    best = seconds(definition.build(healthy, k), healthy, size)
    assert seconds(definition.build(degraded, k), degraded, size) == pytest.approx(best)
    assert seconds(definition(7, k), degraded, size) > 2 * best


@pytest.mark.parametrize("definition", CHAINS, ids=by_name)
@pytest.mark.parametrize("text", ["6@1MB/s", "6@1MB/s,4=200KB/s", "6@1MB/s,0=200KB/s", "6@1MB/s,2=200KB/s:300KB/s"])
def test_with_many_segments_a_chain_comes_near_the_bound(definition: Definition, text: str) -> None:
    """One straggler, wherever it is: n over its rate."""
    topology, size = Topology.parse(text), 4 * 128 * 10
    bound = float(collective_bound(topology, size, definition.collective).seconds)
    assert bound <= seconds(definition.build(topology, 128), topology, size) <= 1.06 * bound


def test_the_root_stays_first_whatever_the_order() -> None:
    """A slow root is still where a chain begins."""
    schedule = chain_broadcast.build(Topology.parse("4@1MB/s,0=100KB/s,2=900KB/s"))
    assert [(row.src, row.dst) for row in schedule] == [(0, 1), (1, 3), (3, 2)]
    schedule = chain_reduce(4, root=2, order=(0, 1, 2, 3))
    assert [(row.src, row.dst) for row in schedule] == [(3, 1), (1, 0), (0, 2)]


@pytest.mark.parametrize("definition", [*CHAINS, *TREES], ids=by_name)
@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (0, 1, 3), (0, 1, 2, 3)])
def test_an_order_that_is_none_of_all_ranks_is_refused(definition: Definition, order: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match="must"):
        definition(3, order=order)


@pytest.mark.parametrize("definition", [*RINGS, *CHAINS, *TREES], ids=by_name)
def test_what_cannot_be_is_refused(definition: Definition) -> None:
    """Servers of several GPUs, a root that does not exist."""
    with pytest.raises(TopologyError, match=f"schedule {definition.name} accepts .* must have one GPU a server"):
        definition.build(Topology.parse("2x2@1MB/s"))
    with pytest.raises(InputError, match="root 3: must be a rank below 3"):
        definition(3, root=3)
