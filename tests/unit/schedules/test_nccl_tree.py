"""Double binary trees and R2CCL on servers whose NICs belong to GPUs: proved, and as slow as their formulas say."""

from __future__ import annotations

from fractions import Fraction

import pytest

from optcc.compiler import compile_schedule
from optcc.dsl import Definition
from optcc.errors import TopologyError
from optcc.planner import ON_NICS, build, find_schedule
from optcc.schedules.nccl_ring import nccl_ring
from optcc.schedules.nccl_tree import nccl_tree
from optcc.schedules.optcc_nics import optcc_nics
from optcc.schedules.r2ccl_nics import r2ccl_nics, r2ccl_rails, reranked_channels
from optcc.simulate import simulate
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.plan import verify_plan

NIC = Fraction(50 * 10**9)
SIZE = 2**24
APART = "4x4@50GB/s+450GB/s/rails,1=0..1/4,3=2..3/4"
"""Servers 1 and 3 share no rail, so they must not be neighbours."""


def busiest_s(definition: Definition, text: str, segments: int = 4) -> float:
    """What the busiest port takes, in units of n / NIC; the plan is proved under all ports."""
    topology = Topology.parse(text)
    schedule = definition.build(topology, segments)
    plan = compile_schedule(schedule, size_bytes=SIZE, topology=topology, ports="fair")
    assert verify_plan(plan).verdict == PROVED
    timing = simulate(plan, topology, model="fair")
    assert timing.seconds >= max(timing.port_busy_s) * (1 - 1e-9)
    return float(max(timing.port_busy_s) * NIC / SIZE)


@pytest.mark.parametrize(
    ("text", "n_channels", "most"),
    [
        ("4x2@50GB/s+450GB/s", 2, 1),
        ("4x4@50GB/s+450GB/s", 4, 1),
        ("4x4@50GB/s+450GB/s,1=2..3/4", 4, 2),
        ("4x4@50GB/s+450GB/s/rails,1=1..3/4", 3, 1),
    ],
)
def test_two_trees_for_each_nic(text: str, n_channels: int, most: int) -> None:
    """An inner server of one tree carries its half three times each way, and as a leaf of the other once."""
    assert len(nccl_tree.build(Topology.parse(text), 1).segments) == 2 * n_channels
    assert busiest_s(nccl_tree, text) == pytest.approx(2 * most / n_channels, rel=0.01)


def test_a_ring_in_an_order_in_which_neighbours_share_rails() -> None:
    """Where `nccl-ring` has no rail left; each hop has two rails, so two channels are on each NIC of a bad pair."""
    topology = Topology.parse(APART)
    with pytest.raises(TopologyError, match="no rail is left at all servers"):
        nccl_ring.build(topology)
    rings = reranked_channels(topology)["rings"]
    assert [rank // 4 for rank in rings[0].ranks[::4]] == [0, 1, 2, 3]
    assert busiest_s(r2ccl_rails, APART) == pytest.approx(2 * 15 / 16 / 2, rel=0.01)
    swapped = "4x4@50GB/s+450GB/s/rails,0=0..1/4,1=2..3/4"
    order = [rank // 4 for rank in reranked_channels(Topology.parse(swapped))["rings"][0].ranks[::4]]
    assert abs(order.index(0) - order.index(1)) == 2
    assert busiest_s(r2ccl_rails, swapped) == pytest.approx(2 * 15 / 16 / 2, rel=0.01)


def test_reranked_rings_are_those_of_nccl_where_a_core_joins_all() -> None:
    text = "3x4@50GB/s+450GB/s,1=2..3/4"
    assert reranked_channels(Topology.parse(text)) == nccl_ring.configure(Topology.parse(text))
    with pytest.raises(TopologyError, match="all neighbours share a surviving rail"):
        reranked_channels(Topology.parse("2x2@50GB/s+450GB/s/rails,0=0..0/2,1=1..1/2"))


@pytest.mark.parametrize("kept", [1, 2])
def test_rings_of_the_healthy_beside_rings_of_all(kept: int) -> None:
    """2(p - 1)/p + Y/(1 - Y) in units of n/B where the channels divide by the NICs that are left; B is of four NICs."""
    text, lost = f"3x4@50GB/s+450GB/s,2={kept}/4", 1 - Fraction(kept, 4)
    formula = (Fraction(2 * 11, 12) + lost / (1 - lost)) / 4
    assert busiest_s(r2ccl_nics, text, 8) == pytest.approx(float(formula), rel=0.02)
    balance = Fraction(2 * 11, 12) / kept
    assert float(formula) < busiest_s(nccl_ring, text) == pytest.approx(float(balance), rel=0.01)


@pytest.mark.parametrize(
    ("text", "formula"),
    [
        ("4x4@50GB/s+450GB/s", Fraction(2 * 2 + 1, 3 * 4)),
        ("4x4@50GB/s+450GB/s,3=2/4", Fraction(1, 2)),
        ("5x4@50GB/s+450GB/s,1=3/4,3=2..3/4", Fraction(1, 2)),
        ("4x2@50GB/s+450GB/s/rails", Fraction(2 * 2 + 1, 3 * 2)),
    ],
)
def test_optcc_with_the_shards_of_lost_nics_at_other_gpus(text: str, formula: Fraction) -> None:
    """max(l, (2(q - 1) + m)/q) n/B, B that of all NICs of a server."""
    assert busiest_s(optcc_nics, text, 12) == pytest.approx(float(formula), rel=0.02)


def test_the_commands_take_them_by_the_names_of_the_field() -> None:
    topology = Topology.parse("3x2@50GB/s+450GB/s,2=1/2")
    for name, definition in ON_NICS.items():
        assert find_schedule(definition.name) is definition
        assert build(name, topology, 2**16, segments=1).plan.name == definition.name
    pooled = build("ring", Topology.parse("2x2@50GB/s"), 2**16, segments=1).plan
    assert (pooled.name, verify_plan(pooled).verdict) == ("ring", PROVED)


def test_what_is_refused() -> None:
    for text, rule in (
        ("4@50GB/s", "NICs must belong to GPUs"),
        ("3x4@50GB/s+450GB/s", "one of them slower"),
        ("2x4@50GB/s+450GB/s,1=2/4", "three servers or more"),
        ("3x4@50GB/s+450GB/s/rails,1=0..1/4", "on one core"),
    ):
        with pytest.raises(TopologyError, match=rule):
            r2ccl_nics.build(Topology.parse(text))
    with pytest.raises(TopologyError, match="no NIC may be lost"):
        optcc_nics.build(Topology.parse("3x4@50GB/s+450GB/s/rails,1=0..1/4"))
