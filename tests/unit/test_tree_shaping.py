"""Shallow trees: the same edges for every NIC, fabrics within their room, and fewer hops."""

from __future__ import annotations

from fractions import Fraction

import pytest

from optcc.collective import Collective
from optcc.topology import Topology
from optcc.tree_packing import LEFT_OUT, find_pairs
from optcc.tree_shaping import WeightedTree, link_loads, make_shallow
from optcc.trees import Tree
from optcc.verify.bounds.certified import least_seconds

ONE = Fraction(1)
CHAIN = Tree.chain([0, 1, 2, 3, 4, 5, 6, 7])


def shaped(topology: Topology, trees: list[WeightedTree], fabric: Fraction) -> list[Tree]:
    """With room for `fabric` messages at each port of a fabric, and for any number elsewhere."""
    graph = topology.wired
    assert graph is not None
    inside = [any("fabric" in graph.nodes[end] for end in (link.tail, link.head)) for link in graph.links]
    return make_shallow(trees, graph, topology.rank_server, [fabric if each else Fraction(99) for each in inside])


def nic_loads(topology: Topology, trees: list[WeightedTree]) -> list[Fraction]:
    graph = topology.wired
    assert graph is not None
    loads = link_loads(trees, graph)
    return [load for link, load in zip(graph.links, loads, strict=True) if "fabric" not in graph.name_of(link)]


@pytest.mark.parametrize("up", [True, False])
def test_a_chain_becomes_two_stars(up: bool) -> None:
    """GPU 3 sends to the other server at once, so it comes first; data enter there at GPU 4."""
    topology = Topology.parse("2x4@50GB/s+450GB/s")
    chain = WeightedTree(ONE, CHAIN, up)
    (tree,) = shaped(topology, [chain], Fraction(9))
    assert repr(tree) == "Tree(0 <- 3, 0 <- 1, 0 <- 2, 3 <- 4, 4 <- 5, 4 <- 6, 4 <- 7)"
    assert nic_loads(topology, [chain]) == nic_loads(topology, [WeightedTree(ONE, tree, up)])


def test_a_fabric_with_less_room_gets_helpers_and_one_without_keeps_the_chain() -> None:
    topology = Topology.parse("2x4@50GB/s+450GB/s")
    (tree,) = shaped(topology, [WeightedTree(ONE, CHAIN, up=False)], Fraction(2))
    assert 3 < tree.depth < CHAIN.depth
    graph = topology.wired
    assert graph is not None
    assert max(link_loads([WeightedTree(ONE, tree, up=False)], graph)) == 2
    assert repr(shaped(topology, [WeightedTree(ONE, CHAIN, up=False)], ONE)) == repr([CHAIN])


def test_rails_are_kept() -> None:
    """An edge between servers stays on its rail: GPU 1 of a server reaches GPU 1 of another one only."""
    topology = Topology.parse("2x2@50GB/s+450GB/s/rails")
    chain = WeightedTree(ONE, Tree.chain([0, 1, 3, 2]), up=True)
    (tree,) = shaped(topology, [chain], Fraction(9))
    assert repr(tree) == "Tree(0 <- 1, 1 <- 3, 3 <- 2)"


def test_cables_between_gpus_are_left_as_they_are() -> None:
    topology = Topology.parse("torus:3x3@50GB/s")
    assert all(sorted(pair.up.order.tolist()) == list(range(9)) for pair in find_pairs(topology))


@pytest.mark.parametrize(
    ("text", "depth"), [("4xdgx-h100,3=4/8", 8), ("3x4@50GB/s+450GB/s/rails,0=0..1/4,2=2..3/4", 6)]
)
def test_the_trees_of_a_packing_are_shallow_and_load_no_link_for_longer_than_the_bound(text: str, depth: int) -> None:
    topology = Topology.parse(text)
    graph = topology.wired
    assert graph is not None
    pairs = find_pairs(topology)
    trees = [WeightedTree(pair.share, tree, tree is pair.up) for pair in pairs for tree in (pair.up, pair.down)]
    assert max(each.tree.depth for each in trees) <= depth
    least = least_seconds(topology, 1, Collective("allreduce", topology.n_ranks)) / (1 - LEFT_OUT)
    assert all(load <= link.rate * least for link, load in zip(graph.links, link_loads(trees, graph), strict=True))
