"""Small trees that pass a server through a GPU with a NIC: proved, balanced, and near the bound."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from optcc.collective import Collective
from optcc.compiler import compile_schedule
from optcc.errors import TopologyError
from optcc.planner import build, find_schedule
from optcc.schedule import Schedule
from optcc.schedules.nic_trees import nic_trees
from optcc.simulate import MODELS, simulate
from optcc.timing import Model
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.bounds.certified import least_seconds
from optcc.verify.plan import verify_plan

TEXTS = (
    "2x2@50GB/s+450GB/s",
    "3x4@50GB/s+450GB/s,1=2..3/4",
    "3x4@50GB/s+450GB/s/rails,0=0..2/4,2=1..3/4",
    "4x2@50GB/s:25GB/s+450GB/s/2:2,3=1/2",
)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("text", TEXTS)
def test_plans_are_proved_and_no_faster_than_the_bound(text: str, model: Model) -> None:
    topology = Topology.parse(text)
    plan = compile_schedule(nic_trees.build(topology, 16), size_bytes=2**20, topology=topology, ports=model)
    assert verify_plan(plan).verdict == PROVED
    assert simulate(plan, topology, model=model).seconds >= float(least_seconds(topology, 2**20, plan.collective))


def sent(schedule: Schedule, topology: Topology, *, inside: bool) -> Counter[int]:
    """How many chunks each GPU sends inside its server, or to others."""
    at = topology.rank_server
    return Counter(each.src for each in schedule if (at[each.src] == at[each.dst]) == inside)


def test_gpus_share_what_their_server_carries() -> None:
    """NICs by their rates, and fabrics equally; a GPU without a NIC sends nothing out of its server."""
    topology = Topology.parse("3x4@50GB/s+450GB/s,1=2..3/4,2=25GB/s")
    schedule = nic_trees.build(topology, 240)
    out = sent(schedule, topology, inside=False)
    assert (out[4], out[5]) == (0, 0)
    for gpus in ((0, 1, 2, 3), (6, 7), (8, 9, 10, 11)):
        mean = sum(out[gpu] for gpu in gpus) / len(gpus)
        assert all(abs(out[gpu] - mean) <= 0.05 * mean + 4 for gpu in gpus)
    inside = sent(schedule, topology, inside=True)
    assert max(inside.values()) <= 1.1 * min(inside.values())


def test_rail_only_a_tree_stays_on_one_rail() -> None:
    topology = Topology.parse("3x4@50GB/s+450GB/s/rails,0=0..2/4,2=1..3/4")
    schedule = nic_trees.build(topology, 6)
    rails = {
        (each.segment, rank % 4) for each in schedule if each.src // 4 != each.dst // 4 for rank in (each.src, each.dst)
    }
    assert sorted(rails) == [(segment, 1 + segment % 2) for segment in range(6)]  # those that no server has lost


@pytest.mark.parametrize(
    ("text", "most"), [("4xdgx-h100", 1.04), ("4xdgx-h100,3=4/8", 1.08), ("4xdgx-h100,0=7/8,1=6/8,2=6/8,3=4/8", 1.08)]
)
def test_near_the_bound_under_fifo_ports(text: str, most: float) -> None:
    topology = Topology.parse(text)
    plan = compile_schedule(nic_trees.build(topology, 1024), size_bytes=2**30, topology=topology, ports="fifo")
    least = float(least_seconds(topology, 2**30, Collective("allreduce", 32)))
    assert 1 <= simulate(plan, topology).seconds / least < most


def test_what_it_does_not_accept() -> None:
    assert find_schedule("nic-trees") is nic_trees
    for text, part in (
        ("4x2@50GB/s", "NICs must belong to GPUs"),
        ("torus:3x3@50GB/s", "NICs must belong to GPUs"),
        ("2x2@50GB/s+450GB/s/rails,0=0..0/2,1=1..1/2", "no rail is left at all servers"),
    ):
        with pytest.raises(TopologyError, match=part):
            nic_trees.build(Topology.parse(text), 4)


def test_auto_takes_it_where_all_nics_decide() -> None:
    topology = Topology.parse("3x4@50GB/s+450GB/s,0=3/4,1=2..3/4")
    made = build("auto", topology, 2**28, ports="fifo")
    assert made.compared is not None
    times = {row[0]: row[2] for row in made.compared.rows}
    assert set(times) == {"equal-trees", "packed", "nic-trees", "hierarchical"}
    assert made.seconds is not None
    least = least_seconds(topology, 2**28, Collective("allreduce", 12))
    assert 1 <= Fraction(made.seconds) / least < Fraction(6, 5)
