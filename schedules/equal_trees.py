"""A few trees of one share each, for servers whose NICs belong to GPUs: what fair ports keep in step by themselves.

A port that is shared fairly gives each message on its way the same rate. So trees of one share need one lane each
between two GPUs, where those of a packing (`packed`) need as many lanes as their shares ask for, fifty and more
messages at a port at once: the longer they take, the longer the pipeline takes to fill. `optcc.schedules.server_trees`
says how many trees to try, and what they look like between servers; here each of them becomes a tree over GPUs, and
the number is chosen that takes least with what its depth costs to fill.

Inside a server the GPU by which data enter is the parent of all others, as long as its fabric has room for them, and
then another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from optcc.dsl import Program, schedule
from optcc.errors import TopologyError
from optcc.schedules.packed import TreePair
from optcc.schedules.server_trees import (
    HOPS_MIN,
    Room,
    ServerNetwork,
    ServerTree,
    filled,
    numbers_of_trees,
    server_trees,
)
from optcc.schedules.tree_turns import along_pairs
from optcc.topology import Topology
from optcc.trees import Tree


@lru_cache(maxsize=16)
def equal_trees_of(topology: Topology) -> tuple[Tree, ...]:
    """Trees over the ranks for an equal part of the message each, reduced up and broadcast down the same edges.

    >>> [tree.depth for tree in equal_trees_of(Topology.parse("3x2@50GB/s+450GB/s"))]
    [3, 3, 3]

    Raises TopologyError where NICs do not belong to GPUs, and where no such trees are found.
    """
    if topology.graph is not None or topology.wired is None:
        raise TopologyError(f"{topology!r}: NICs must belong to GPUs")
    if len(topology.servers) == 1:
        raise TopologyError(f"{topology!r}: must have several servers")
    if topology.rail_only and topology.pods:
        raise TopologyError(f"{topology!r}: rail-only: must have no pods")
    network = ServerNetwork.of(topology)
    best: tuple[Fraction, tuple[Tree, ...]] | None = None
    for count, seconds in numbers_of_trees(network):
        if best is not None and best[0] <= filled(seconds, count, HOPS_MIN):
            break
        room = Room.of(network, count, seconds)
        found = server_trees(network, room)
        if found is not None:
            inside = _Inside(network, room)
            trees = tuple(inside.over_gpus(tree) for tree in found)
            taken = filled(seconds, count, max(tree.depth for tree in trees))
            best = min(best, (taken, trees), key=lambda each: each[0]) if best is not None else (taken, trees)
    if best is None:
        raise TopologyError(f"{topology!r}: no few trees of one share each use its NICs well")
    return best[1]


def pairs_of(trees: Sequence[Tree]) -> Mapping[str, Any]:
    """The parameter of `packed` for trees of one share, up and down the same edges."""
    return {"pairs": tuple(TreePair(Fraction(1, len(trees)), tree, tree) for tree in trees)}


def _configure(topology: Topology) -> Mapping[str, Any]:
    return pairs_of(equal_trees_of(topology))


@schedule(
    name="equal-trees",
    accepts="servers whose NICs belong to GPUs",
    paper="optcc, docs/schedules.md",
    configure=_configure,
)
def equal_trees(program: Program, pairs: Sequence[TreePair]) -> None:
    """Each tree has an equal part of the message, of which k segments go up it and down.

    With M trees: T = max over the ports of (edges at it / M) n / rate, and a fill of about depth / k of it. Every tree
    is a stage of its own, so that a chunk that waits for its data in one tree holds up no other one.

    >>> pairs = pairs_of([Tree.chain([0, 1, 2]), Tree.of({1: 2, 0: 2}, root=2)])["pairs"]
    >>> whole = equal_trees(n_ranks=3, segments=4, pairs=pairs)
    >>> whole.stages[:2], len(whole)
    (('reduce along tree 0', 'broadcast along tree 0'), 32)
    """
    along_pairs(program, pairs)


class _Inside:
    """Trees inside servers; `more[s][g]` is how many edges GPU g of server s may have beyond one in each tree."""

    def __init__(self, network: ServerNetwork, room: Room) -> None:
        self.gpus = network.gpus
        self.first = [sum(network.gpus[:server]) for server in range(len(network.gpus))]
        ample = 2 * room.trees * max(network.gpus)
        self.more = [
            [ample if each is None else each - room.trees] * gpus
            for each, gpus in zip(room.fabric, network.gpus, strict=True)
        ]

    def over_gpus(self, tree: ServerTree) -> Tree:
        """The tree over the GPUs for a tree over the servers."""
        exits: dict[int, list[int]] = {}
        for edge in tree.edges:
            exits.setdefault(edge.parent, []).append(edge.parent_gpu)
        root_gpu = max(exits[tree.root], key=lambda gpu: (self.more[tree.root][gpu], -gpu))
        parents: dict[int, int] = {}
        self._fill(tree.root, root_gpu, exits[tree.root], parents)
        for edge in tree.edges:
            parents[self.first[edge.child] + edge.child_gpu] = self.first[edge.parent] + edge.parent_gpu
            self._fill(edge.child, edge.child_gpu, exits.get(edge.child, ()), parents)
        return Tree.of(parents, self.first[tree.root] + root_gpu)

    def _fill(self, server: int, entry: int, exits: Sequence[int], parents: dict[int, int]) -> None:
        """Adds the parents of all GPUs of a server but its entry; those that data leave by are nearest to it."""
        more, first = self.more[server], self.first[server]
        others = [gpu for gpu in range(self.gpus[server]) if gpu != entry]
        line = sorted(others, key=lambda gpu: (more[entry] > 0 and gpu not in exits, -more[gpu]))
        level = {entry: 0}
        for gpu in line:
            parent = entry
            if len(level) > 1:  # the first edge of a GPU is one that it has in each tree
                parent = min((one for one in level if more[one] > 0), key=lambda one: (level[one], -more[one]))
                more[parent] -= 1
            level[gpu] = level[parent] + 1
            parents[first + gpu] = first + parent
