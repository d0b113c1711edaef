"""Bounds on exchanges against a program over all simple paths, against all cuts, and against the closed forms."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations
from math import lcm

import pytest
from scipy.optimize import linprog

from optcc.collective import PERSONALISED, Collective
from optcc.topology import Nic, Pod, Server, Topology
from optcc.verify.bounds.certified import is_closed_for_blocks, least_seconds
from optcc.verify.bounds.closed_forms import collective_bound
from optcc.verify.bounds.exchange_bound import exchange_bound
from optcc.verify.bounds.exchange_replay import replay_exchange
from optcc.verify.bounds.network import FlowNetwork, endpoint_gpus
from optcc.verify.bounds.solvers import SOLVERS

SIZE = 10**6
Demands = dict[tuple[int, int], Fraction]


def drawn_network(rng: random.Random) -> FlowNetwork:
    """3 or 4 endpoints and 0 to 2 switches, on a ring so that all reach each other, with other links of any rates."""
    endpoints, switches = "abcd"[: rng.randint(3, 4)], "st"[: rng.randint(0, 2)]
    nodes = [*endpoints, *switches]
    rng.shuffle(nodes)
    ring = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    more = [(a, b) for a in nodes for b in nodes if a != b and (a, b) not in ring and rng.random() < 0.3]
    return FlowNetwork.from_links(endpoints, [(a, b, rng.randint(1, 6)) for a, b in ring + more], switches)


def drawn_topology(rng: random.Random) -> Topology:
    """2 or 3 servers of 1 or 2 GPUs: out and in apart, fabrics, rails that differ, a pod."""
    rails, servers = rng.randint(1, 2), []
    for index in range(rng.randint(2, 3)):
        nics = tuple(
            Nic(rail, Fraction(rng.randint(1, 8)), Fraction(rng.randint(1, 8)), failed=rail > 0 and rng.random() < 0.3)
            for rail in range(rails)
        )
        fabric = Fraction(rng.randint(1, 9)) if rng.random() < 0.5 else None
        servers.append(Server(f"h{index}", rng.randint(1, 2), nics, fabric))
    pods: tuple[Pod, ...] = ()
    if len(servers) > 2 and rng.random() < 0.5:
        pods = (Pod("pod", (0, 1), Fraction(rng.randint(1, 9)), Fraction(rng.randint(1, 9))),)
    return Topology(tuple(servers), rail_only=rng.random() < 0.5, pods=pods)


def drawn_collective(rng: random.Random, p: int) -> Collective:
    """An exchange of any kind over p ranks; an AllToAll-v with blocks of none."""
    counts = [[rng.randrange(4) for _ in range(p)] for _ in range(p)]
    counts[0][p - 1] += 1
    name = rng.choice((*PERSONALISED, "alltoallv"))
    if name == "alltoallv":
        return Collective.all_to_all_v(counts)
    return Collective(name, p, 0 if name == "alltoall" else rng.randrange(p))


def demanded(collective: Collective, gpus: list[int]) -> Demands:
    """The share that goes from endpoint to endpoint, read region by region from the collective's conditions."""
    at = [endpoint for endpoint, count in enumerate(gpus) for _ in range(count)]
    count = lcm(*(share.denominator for share in collective.shares))
    found: Demands = {}
    for rank in range(collective.n_ranks):
        for start, stop, contributors in collective.after(rank, count):
            pair = at[contributors.bit_length() - 1], at[rank]
            if pair[0] != pair[1]:
                found[pair] = found.get(pair, Fraction(0)) + Fraction(stop - start, count)
    return found


def simple_paths(network: FlowNetwork, node: int, to: int, been: tuple[int, ...]) -> Iterator[list[int]]:
    """The links of every path from `node` to `to` that visits no node twice."""
    if node == to:
        yield []
        return
    for number, link in enumerate(network.links):
        if link.tail == node and link.head not in been:
            for rest in simple_paths(network, link.head, to, (*been, link.head)):
                yield [number, *rest]


def over_all_paths(network: FlowNetwork, demands: Demands) -> float:
    """The least seconds per byte: a share for every path of every pair, in floats."""
    ways = [(pair, path) for pair in demands for path in simple_paths(network, *pair, (pair[0],))]
    used = [
        [sum(port in network.links[link].ports for link in path) for _, path in ways]
        for port in range(len(network.ports))
    ]
    room = [[*row, -float(port.rate)] for row, port in zip(used, network.ports, strict=True)]
    whole = [[float(pair == each) for each, _ in ways] + [0.0] for pair in demands]
    solved = linprog(
        [0.0] * len(ways) + [1.0],
        A_ub=room,
        b_ub=[0.0] * len(room),
        A_eq=whole,
        b_eq=[float(share) for share in demands.values()],
    )
    assert solved.status == 0
    return float(solved.fun)


def over_all_cuts(network: FlowNetwork, demands: Demands) -> Fraction:
    """The largest time for what must leave a set of nodes; each link is a port of its own."""
    found = Fraction(0)
    for size in range(1, network.n_nodes):
        for inside in combinations(range(network.n_nodes), size):
            out = [link for link in network.links if link.tail in inside and link.head not in inside]
            needed = sum((share for (a, b), share in demands.items() if a in inside and b not in inside), Fraction(0))
            if needed:
                found = max(found, needed / sum(network.ports[link.ports[0]].rate for link in out))
    return found


@pytest.mark.parametrize("seed", range(30))
def test_the_bound_on_a_graph_is_the_optimum_over_all_paths_and_no_cut_says_more(seed: int) -> None:
    rng = random.Random(f"exchange on a graph {seed}")
    network = drawn_network(rng)
    p = len(network.endpoints)
    wanted = drawn_collective(rng, p)
    bound, _ = exchange_bound(network, wanted, SIZE)
    demands = demanded(wanted, [1] * p)
    assert bound.gap == 0
    assert float(bound.seconds) == pytest.approx(SIZE * over_all_paths(network, demands), rel=1e-7)
    cuts = SIZE * over_all_cuts(network, demands)
    assert cuts <= bound.seconds
    if wanted.name in ("gather", "scatter"):
        assert cuts == bound.seconds


def test_cuts_alone_would_not_do() -> None:
    """An AllToAll in which no cut proves what prices do, so that a test against cuts can tell the two apart."""
    beyond = 0
    for seed in range(30):
        network = drawn_network(random.Random(f"exchange on a graph {seed}"))
        wanted = Collective("alltoall", len(network.endpoints))
        demands = demanded(wanted, [1] * wanted.n_ranks)
        beyond += exchange_bound(network, wanted, SIZE)[0].seconds > SIZE * over_all_cuts(network, demands)
    assert beyond


@pytest.mark.parametrize("seed", range(30))
def test_the_bound_on_servers_is_the_optimum_over_all_paths(seed: int) -> None:
    """With fabrics, rails and pods; the closed form where there is one, and one bound for all commands."""
    rng = random.Random(f"exchange of servers {seed}")
    topology = drawn_topology(rng)
    wanted = drawn_collective(rng, topology.n_ranks)
    network, gpus = FlowNetwork.from_topology(topology, fabric=True), endpoint_gpus(topology, fabric=True)
    bound, _ = exchange_bound(topology, wanted, SIZE)
    replay_exchange(bound, topology)
    demands = demanded(wanted, gpus)
    assert bound.gap == 0
    if demands:
        assert float(bound.seconds) == pytest.approx(SIZE * over_all_paths(network, demands), rel=1e-7)
    assert least_seconds(topology, SIZE, wanted) == bound.seconds
    if is_closed_for_blocks(topology):
        assert collective_bound(topology, SIZE, wanted).seconds == bound.seconds


def test_all_kinds_are_drawn() -> None:
    drawn = [drawn_topology(random.Random(f"exchange of servers {seed}")) for seed in range(30)]
    assert 5 <= sum(map(is_closed_for_blocks, drawn)) <= 25
    assert sum(bool(each.pods) for each in drawn) > 3
    assert sum(each.rail_only and len(each.rails_kept) > 1 for each in drawn) > 3


@pytest.mark.parametrize("solver", SOLVERS)
def test_both_solvers_certify_the_same(solver: str) -> None:
    for seed in range(3):
        network = drawn_network(random.Random(f"exchange on a graph {seed}"))
        wanted = Collective("alltoall", len(network.endpoints))
        by, solved = exchange_bound(network, wanted, SIZE, solver=SOLVERS[solver])
        assert solved
        assert by.seconds == exchange_bound(network, wanted, SIZE)[0].seconds and by.gap == 0
