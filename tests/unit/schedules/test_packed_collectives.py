"""Packings for ReduceScatter, AllGather, Broadcast and Reduce: proved, within their links, and near the bound."""

from __future__ import annotations

from fractions import Fraction

import pytest

from optcc.collective import Collective
from optcc.compiler import compile_schedule
from optcc.errors import TopologyError
from optcc.planner import build, find_schedule
from optcc.simulate import MODELS, simulate
from optcc.topology import Topology
from optcc.tree_packing import LEFT_OUT, PACKED_OF, find_trees
from optcc.tree_shaping import WeightedTree, link_loads
from optcc.verdict import PROVED
from optcc.verify.bounds.certified import least_seconds
from optcc.verify.plan import verify_plan

TEXTS = (
    "4@50GB/s,3=25GB/s",
    "3x2@50GB/s+90GB/s,1=1/2",
    "3x4@50GB/s+450GB/s/rails,0=0..2/4,2=1..3/4",
    "4x2@50GB/s+450GB/s/2:2,3=1/2",
    "torus:3x3@50GB/s:25GB/s",
)
ROOTED = ("broadcast", "reduce")


@pytest.mark.parametrize("name", PACKED_OF)
@pytest.mark.parametrize("text", TEXTS)
def test_plans_are_proved_and_no_faster_than_the_bound(text: str, name: str) -> None:
    topology = Topology.parse(text)
    root = 2 if name in ROOTED else 0
    schedule = PACKED_OF[name].build(topology, 5, root=root)
    for model in MODELS:
        plan = compile_schedule(schedule, size_bytes=2**20, topology=topology, ports=model)
        assert plan.collective == Collective(name, topology.n_ranks, root)
        assert verify_plan(plan).verdict == PROVED
        least = float(least_seconds(topology, 2**20, plan.collective))
        assert simulate(plan, topology, model=model).seconds >= least * (1 - 1e-9)


@pytest.mark.parametrize("name", PACKED_OF)
@pytest.mark.parametrize("text", [text for text in TEXTS if Topology.parse(text).wired is not None])
def test_every_root_has_its_part_and_no_link_more_than_the_bound_allows(text: str, name: str) -> None:
    topology = Topology.parse(text)
    graph, p = topology.wired, topology.n_ranks
    assert graph is not None
    root = 1 if name in ROOTED else 0
    trees = find_trees(topology, name, root)
    roots = [each.tree.root for each in trees]
    assert roots == sorted(roots)
    for rank in range(p):
        wanted = Fraction(int(rank == root)) if name in ROOTED else Fraction(1, p)
        assert sum((each.share for each in trees if each.tree.root == rank), Fraction(0)) == wanted
    least = least_seconds(topology, 1, Collective(name, p, root)) / (1 - LEFT_OUT)
    loads = link_loads([WeightedTree(each.share, each.tree, name.startswith("reduce")) for each in trees], graph)
    assert all(load <= link.rate * least for link, load in zip(graph.links, loads, strict=True))


@pytest.mark.parametrize(
    ("text", "throughput"), [("2x8@50GB/s+450GB/s", 533.33), ("2xdgx-a100", 346.67), ("4xdgx-h100,3=4/8", 266.67)]
)
def test_all_gather_reaches_the_throughput_of_forestcolls_generator(text: str, throughput: float) -> None:
    """Its values for these topologies, in GB/s, are those of its public generator; within 4 % in 96 chunks a tree."""
    topology = Topology.parse(text)
    least = float(least_seconds(topology, 2**30, Collective("allgather", topology.n_ranks)))
    assert 2**30 / least / 1e9 == pytest.approx(throughput, rel=1e-4)
    built = build("packed-all-gather", topology, 2**30, segments=96, ports="fair")
    seconds = simulate(built.plan, topology, model="fair").seconds
    assert 1 <= seconds / least < 1.04


def test_auto_takes_it_where_gpus_are_linked() -> None:
    topology = Topology.parse("torus:3x2@50GB/s")
    for name in PACKED_OF:
        root = 1 if name in ROOTED else 0
        chosen = build("auto", topology, 2**20, collective=Collective(name, 6, root), ports="fifo", segments=4)
        assert chosen.definition is PACKED_OF[name]
        assert chosen.plan.collective.root == root


def test_servers_that_pool_their_nics_are_refused() -> None:
    with pytest.raises(TopologyError, match="servers pool their NICs"):
        PACKED_OF["allgather"].build(Topology.parse("2x2@50GB/s"), 4)


def test_optimal_hands_over_where_its_model_ends() -> None:
    """Its trees are over servers: GPUs with NICs of their own, and rails that cannot be pooled, are the packing's."""
    for text in ("3x2@50GB/s+90GB/s,1=1/2", "torus:3x3@50GB/s", "3x4@50GB/s/rails,0=0..2/4,2=1..3/4"):
        built = build("optimal", Topology.parse(text), 2**20, segments=4)
        assert built.plan.name == "packed"
        assert verify_plan(built.plan).verdict == PROVED
    assert build("optimal", Topology.parse("3x2@50GB/s,1=1/2"), 2**20, segments=4).definition is find_schedule(
        "optimal"
    )
