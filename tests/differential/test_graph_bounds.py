"""Bounds of graphs, against what networkx's maximum flows say and against what others have published."""

from __future__ import annotations

import random
from fractions import Fraction

import networkx as nx
import pytest

from optcc.collective import Collective
from optcc.topology import Nic, Server, Topology
from optcc.verify.bounds.certified import least_seconds
from optcc.verify.bounds.lp import lp_bound
from tests.sample import sampled

GB = 10**9


def random_graph(seed: int) -> Topology:
    """Three to seven GPUs and up to two switches; GPUs are in a ring, so all reach each other."""
    rng = random.Random(f"graph {seed}")
    graph: nx.DiGraph[str] = nx.DiGraph()
    gpus = [f"g{index}" for index in range(rng.randint(3, 7))]
    for gpu, after in zip(gpus, (*gpus[1:], gpus[0]), strict=True):
        graph.add_edge(gpu, after, capacity=rng.randint(1, 5))
    for switch in range(rng.randint(0, 2)):
        graph.add_node(f"s{switch}", switch=True)
        members = rng.sample(gpus, rng.randint(2, len(gpus)))
        graph.add_edges_from((gpu, f"s{switch}", {"capacity": rng.randint(1, 6)}) for gpu in members)
        graph.add_edges_from((f"s{switch}", gpu, {"capacity": rng.randint(1, 6)}) for gpu in members)
    for _ in range(rng.randint(0, 6)):
        tail, head = rng.sample(gpus, 2)
        graph.add_edge(tail, head, capacity=rng.randint(1, 5))
    return Topology.from_networkx(graph)


@pytest.mark.parametrize("seed", sampled(range(80), every=2))
def test_a_broadcast_takes_what_the_least_maximum_flow_from_its_root_says(seed: int) -> None:
    """Edmonds: trees pack at the rate of the least cut between the root and another GPU; networkx finds the cuts."""
    topology = random_graph(seed)
    root = seed % topology.n_ranks
    wired, graph = topology.wired, topology.to_networkx()
    assert wired is not None
    flows = [nx.maximum_flow_value(graph, wired.gpus[root], gpu) for gpu in wired.gpus if gpu != wired.gpus[root]]
    bound = lp_bound(topology, Collective("broadcast", topology.n_ranks, root), 1000, primal=False).seconds
    # A message does not pass a switch to a GPU to which another route leads, so networkx may find more.
    assert bound >= Fraction(1000, min(flows))
    reduced = lp_bound(topology, Collective("reduce", topology.n_ranks, root), 1000, primal=False).seconds
    back = [nx.maximum_flow_value(graph, gpu, wired.gpus[root]) for gpu in wired.gpus if gpu != wired.gpus[root]]
    assert reduced >= Fraction(1000, min(back))
    if not wired.switches:
        assert bound == Fraction(1000, min(flows))
        assert reduced == Fraction(1000, min(back))


def test_some_of_these_graphs_have_no_switch() -> None:
    assert 10 < sum(not wired.switches for seed in range(80) if (wired := random_graph(seed).wired)) < 50


def a100(n_servers: int) -> Topology:
    """Servers whose even NICs are on one switch and odd ones on another."""
    rate = Fraction(25 * GB)
    nics = tuple(Nic(gpu % 2, rate, rate, gpu=gpu) for gpu in range(8))
    servers = (Server(f"h{index}", 8, nics, Fraction(300 * GB)) for index in range(n_servers))
    return Topology(tuple(servers), rail_only=True)


FORESTCOLL = [
    (a100(2), "346.67"),
    (a100(4), "266.67"),
    (Topology.parse("2xmi250"), "354.13"),
    (Topology.parse("2xdgx-h100"), "533.33"),
    (Topology.parse("4xdgx-h100"), "516.13"),
    (Topology.parse("8xdgx-h100"), "457.14"),
    (Topology.parse("16xdgx-h100"), "426.67"),
    (Topology.parse("4xdgx-h100,3=4/8"), "266.67"),
    (Topology.parse("8xdgx-h100,7=4/8"), "228.57"),
    (Topology.parse("8xdgx-h100/rails"), "457.14"),
    (Topology.parse("8xdgx-h100/rails,6=4..7/8,7=4..7/8"), "228.57"),
]
"""What ForestColl's public generator finds for an AllGather, GB/s of the result."""


@pytest.mark.parametrize(("topology", "throughput"), FORESTCOLL, ids=[str(each[1]) for each in FORESTCOLL])
def test_the_bound_of_an_allgather_is_forestcolls_throughput(topology: Topology, throughput: str) -> None:
    seconds = least_seconds(topology, GB, Collective("allgather", topology.n_ranks))
    assert round(1 / seconds, 2) == Fraction(throughput)


def test_an_allreduce_under_loss_need_not_take_two_allgathers() -> None:
    """A server with half of its NICs: an AllGather of equal shards twice takes 8.05 ms, an AllReduce 5.37 ms."""
    lost = Topology.parse("4xdgx-h100,3=4/8")
    assert float(least_seconds(lost, 2**30, Collective("allgather", 32))) == pytest.approx(4.0265e-3, rel=1e-4)
    assert float(least_seconds(lost, 2**30, Collective("allreduce", 32))) == pytest.approx(5.3687e-3, rel=1e-4)


def test_a_detour_over_another_gpus_nic_is_charged() -> None:
    """Slow fabrics: with NICs that belong to GPUs the bound is higher than with pooled ones."""
    own = Topology.parse("2x4@50GB/s+60GB/s,1=1/4")
    everyone = Collective("allreduce", 8)
    pooled = Topology(
        tuple(
            Server(
                server.name, 4, tuple(Nic(nic.rail, nic.out, nic.in_, nic.failed) for nic in server.nics), server.fabric
            )
            for server in own.servers
        )
    )
    assert least_seconds(own, 2**20, everyone) > least_seconds(pooled, 2**20, everyone)
