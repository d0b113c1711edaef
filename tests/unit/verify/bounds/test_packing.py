"""Trees from loads: counted, spanning, rooted as claimed; and what cannot be packed is said."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

from optcc.errors import SolverError, SolverUnknown
from optcc.topology import Topology
from optcc.verify.bounds.lp import CertifiedBound, lp_bound
from optcc.verify.bounds.network import BROADCAST, REDUCE, FlowNetwork
from optcc.verify.bounds.packing import pack, peel


@pytest.mark.parametrize("seed", range(60))
def test_peeling_random_capacities(seed: int) -> None:
    """A random mixture of random trees always comes apart into trees with the same roots, within the capacities."""
    rng = random.Random(seed)
    p = rng.randint(2, 7)
    capacity: dict[tuple[int, int], Fraction] = {}
    roots = [Fraction(0)] * p
    shares = [rng.randint(1, 9) for _ in range(rng.randint(1, 6))]
    for share in shares:
        order = rng.sample(range(p), p)
        weight = Fraction(share, sum(shares))
        roots[order[0]] += weight
        for position in range(1, p):
            arc = (order[rng.randrange(position)], order[position])
            capacity[arc] = capacity.get(arc, Fraction(0)) + weight
    arcs = sorted(capacity)
    used = dict.fromkeys(arcs, Fraction(0))
    rooted = [Fraction(0)] * p
    for weight, root, tree in peel(arcs, [capacity[arc] for arc in arcs], roots):
        assert weight > 0
        rooted[root] += weight
        assert sorted(arcs[each][1] for each in tree) == [v for v in range(p) if v != root]
        reached = {root}
        for each in tree:
            assert arcs[each][0] in reached
            reached.add(arcs[each][1])
            used[arcs[each]] += weight
    assert rooted == roots
    assert all(used[arc] <= capacity[arc] for arc in arcs)


def test_peeling_too_little() -> None:
    """One endpoint gets half of the message."""
    with pytest.raises(SolverError, match="whole message"):
        peel([(0, 1), (1, 2)], [Fraction(1), Fraction(1, 2)], [Fraction(1), Fraction(0), Fraction(0)])


@pytest.mark.parametrize("collective", ["allreduce", "allgather", "reducescatter", "broadcast", "reduce"])
def test_every_collective(collective: str) -> None:
    """Trees of the kinds that it needs, in shares that add up."""
    bound = lp_bound(Topology.parse("5@12B/s,1=5B/s,3=7B/s:9B/s"), collective, 60)
    packed = pack(bound.certificate)
    assert packed.achieved is not None and packed.achieved.trees is not None
    assert packed.achieved.seconds == bound.seconds
    for kind in (REDUCE, BROADCAST):
        total = sum((tree.weight for tree in packed.achieved.trees if tree.kind == kind), Fraction(0))
        assert total == (1 if kind in packed.demand.kinds else 0)


def test_sixteen_servers_of_eight_rails() -> None:
    """Two servers that lost different rails; the text form loses the last ones, so the file form is built by hand."""
    topology = Topology.parse("16x8@8B/s,2=3/8,5=7/8")
    topology = replace(
        topology,
        rail_only=True,
        servers=tuple(
            replace(server, nics=tuple(replace(nic, rail=7 - nic.rail) for nic in server.nics)) if i == 5 else server
            for i, server in enumerate(topology.servers)
        ),
    )
    packed = pack(lp_bound(topology, "allreduce", 100).certificate)
    assert packed.gap == 0
    assert packed.achieved is not None and packed.achieved.trees


def test_links_of_a_graph_are_used_directly() -> None:
    """A one-way triangle: each tree is a path around it."""
    network = FlowNetwork.from_links("abc", [("a", "b", 3), ("b", "c", 3), ("c", "a", 3)])
    packed = pack(lp_bound(network, "allreduce", 9).certificate)
    assert packed.seconds == 4
    assert packed.gap == 0


def in_a_row(switches: str) -> CertifiedBound:
    """Of two endpoints with these switches between them."""
    nodes = f"a{switches}b"
    line = [(tail, head, 1) for pair in pairwise(nodes) for tail, head in (pair, pair[::-1])]
    bound = lp_bound(FlowNetwork.from_links("ab", line, switches), "allreduce", 6)
    assert bound.seconds == 6
    assert bound.gap == 0
    return bound


def test_trees_pass_several_switches_in_a_row() -> None:
    for switches in ("s", "st", "stuv"):
        achieved = pack(in_a_row(switches).certificate).achieved
        assert achieved is not None
        assert achieved.trees is not None
        assert [len(tree.paths[0]) for tree in achieved.trees] == [len(switches) + 1] * 2


def test_what_cannot_be_packed() -> None:
    """Nothing achieved; or five switches in a row, where the loads are certified and the trees are not found."""
    topology = Topology.parse("3@1B/s")
    with pytest.raises(SolverError, match="achieved"):
        pack(lp_bound(topology, "allreduce", 1, primal=False).certificate)
    bound = in_a_row("stuvw")
    with pytest.raises(SolverUnknown, match="no split"):
        pack(bound.certificate)
    with pytest.raises(SolverUnknown, match="no split"):
        pack(lp_bound(topology, "allreduce", 1).certificate, time_limit_s=0)
