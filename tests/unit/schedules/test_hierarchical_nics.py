"""The hierarchical AllReduce where GPUs have lost their NICs: proved, every NIC that is left used alike."""

from __future__ import annotations

import pytest

from optcc.compiler import compile_schedule
from optcc.errors import TopologyError
from optcc.planner import build
from optcc.schedules.hierarchical_nics import hierarchical_nics, homes_of_shards
from optcc.simulate import simulate
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.plan import verify_plan

SIZE = 2**24
NIC = 50e9


@pytest.mark.parametrize(
    ("text", "least"),
    [
        ("3x2@50GB/s+450GB/s", 2 / 3),
        ("3x2@50GB/s+450GB/s,1=1/2", 4 / 3),
        ("3x4@50GB/s+450GB/s,1=3/4", 4 / 9),
        ("3x4@50GB/s+450GB/s/rails,0=0..2/4,2=1..3/4", 2 / 3),
    ],
)
def test_plans_are_proved_and_the_busiest_nic_carries_what_the_formula_says(text: str, least: float) -> None:
    """In units of n / NIC: 2(N - 1)/N over the NICs of the worst server, or over the rails that all servers have."""
    topology = Topology.parse(text)
    plan = compile_schedule(hierarchical_nics.build(topology, 12), size_bytes=SIZE, topology=topology, ports="fifo")
    assert verify_plan(plan).verdict == PROVED
    timing = simulate(plan, topology)
    assert max(timing.port_busy_s) * NIC / SIZE == pytest.approx(least, rel=0.01)
    assert timing.seconds * NIC / SIZE < 1.5 * least


def test_a_shard_moves_among_the_gpus_that_kept_their_nics() -> None:
    homes = homes_of_shards(Topology.parse("2x3@50GB/s+450GB/s,1=2/3"))["homes"]
    assert homes == (((0,), (1,), (2,)), ((3,), (4,), (3, 4)))


def test_it_stands_for_hierarchical_where_nics_belong_to_gpus() -> None:
    lost = Topology.parse("3x2@50GB/s+450GB/s,1=1/2")
    assert build("hierarchical", lost, SIZE, segments=2).definition is hierarchical_nics
    assert build("hierarchical", Topology.parse("3x2@50GB/s"), SIZE, segments=2).definition.name == "hierarchical"
    with pytest.raises(TopologyError, match="NICs must belong to GPUs"):
        hierarchical_nics.build(Topology.parse("3x2@50GB/s"))
    with pytest.raises(TopologyError, match="no rail is left at all servers"):
        hierarchical_nics.build(Topology.parse("2x2@50GB/s+450GB/s/rails,0=0..0/2,1=1..1/2"))
