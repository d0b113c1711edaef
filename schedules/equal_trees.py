"""A few trees of one share each, for servers whose NICs belong to GPUs: what fair ports keep in step by themselves.

A port that is shared fairly gives each message on its way the same rate. So trees of one share need one lane each
between two GPUs, where those of a packing (`packed`) need as many lanes as their shares ask for, fifty and more
messages at a port at once: the longer they take, the longer the pipeline takes to fill. `optcc.schedules.server_trees`
says how many trees to try, and what they look like between servers; here each of them becomes a tree over GPUs, and
the number is chosen that takes least with what its depth costs to fill.

Inside a server the GPU by which data enter is the parent of all others, as long as its fabric has room for them, and
then another one. Where fabrics are what takes longest, as between two or three servers, some GPUs get data from another
server instead, over NICs that have room.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush, heapreplace
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
            trees, needed_s = _relieved(network, room, [inside.over_gpus(tree) for tree in found])
            taken = filled(needed_s, count, max(tree.depth for tree in trees))
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
        self.first = network.first
        ample = 2 * room.trees * max(network.gpus)
        self.more = [
            [ample if each is None else max(each, -(-2 * (gpus - 1) * room.trees // gpus)) - room.trees] * gpus
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
                # If none has room, the one that is nearest to having some.
                roomy = [one for one in level if more[one] > 0]
                parent = min(roomy or level, key=lambda one: (level[one] if roomy else 0, -more[one]))
                more[parent] -= 1
            level[gpu] = level[parent] + 1
            parents[first + gpu] = first + parent


def _relieved(network: ServerNetwork, room: Room, trees: Sequence[Tree]) -> tuple[tuple[Tree, ...], Fraction]:
    """The trees with edges changed from fabrics that have too many to NICs that have room, and the seconds for each
    byte that they take."""
    relief = _Relief(network, room, trees)
    while relief.move():
        pass
    late = (
        Fraction(limit + over, room.trees) / rate
        for limit, over, rate in zip(relief.limits, relief.over, relief.rates, strict=True)
        if rate is not None and limit is not None
    )
    return tuple(map(Tree.of, relief.parents, relief.roots)), max([room.seconds, *late])


class _Relief:
    """Edges change from a parent in the same server to one in another server, of the same pod and rail.

    By rank: `limits` edges are what its fabric port, of `rates`, has room for (None: any number), `over` how many it
    has beyond that, `left` how many more its NICs have room for, by rail. `parents` are by tree.
    """

    def __init__(self, network: ServerNetwork, room: Room, trees: Sequence[Tree]) -> None:
        self.server_of = [server for server, gpus in enumerate(network.gpus) for _ in range(gpus)]
        self.first = network.first
        self.pod_of = [network.pod_of[server] for server in self.server_of]
        self.rates = [network.fabric[server] for server in self.server_of]
        self.limits = [room.fabric[server] for server in self.server_of]
        self.over = [-(limit or 0) for limit in self.limits]
        self.left: list[dict[int, int]] = [{} for _ in self.server_of]
        for server, nics in enumerate(network.nics):
            for nic, edges in zip(nics, room.nics[server], strict=True):
                self.left[self.first[server] + nic.gpu][nic.rail] = edges
        self.roots = [tree.root for tree in trees]
        self.parents = [dict(zip(tree.order.tolist()[1:], tree.parent.tolist()[1:], strict=True)) for tree in trees]
        self.n_children = [[0] * len(self.server_of) for _ in trees]
        for parents, n_children in zip(self.parents, self.n_children, strict=True):
            for child, parent in parents.items():
                n_children[parent] += 1
                self._take(child, parent)
        self.stuck: set[int] = set()
        # By pod and rail: what NICs had left when it was looked up last, the most first, and the rank.
        self.roomy: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for rank, pod in enumerate(self.pod_of):
            for rail, left in self.left[rank].items():
                heappush(self.roomy.setdefault((pod, rail), []), (-left, rank))

    def _take(self, child: int, parent: int) -> None:
        if self.server_of[child] == self.server_of[parent]:
            for rank in (child, parent):
                self.over[rank] += self.limits[rank] is not None
        else:
            both = sorted(self.left[child].keys() & self.left[parent].keys())
            rail = max(both, key=lambda rail: min(self.left[child][rail], self.left[parent][rail]))
            for rank in (child, parent):
                self.left[rank][rail] -= 1

    def move(self) -> bool:
        """Changes an edge of a GPU whose fabric port has too many; False if none has, or no edge can be changed."""
        while line := [rank for rank, over in enumerate(self.over) if over > 0 and rank not in self.stuck]:
            rank = min(line, key=lambda rank: (-self.over[rank], sum(self.left[rank].values())))
            feeders: dict[int, int | None] = {}
            able: list[tuple[tuple[int, ...], int, int, int]] = []
            for number, child, parent in self._leaves_at(rank):
                if child not in feeders:
                    feeders[child] = self._feeder(child)
                feeder = feeders[child]
                if feeder is not None:
                    able.append((self._costs(number, child, parent, feeder), number, child, feeder))
            if able:
                self._change(*min(able)[1:])
                return True
            self.stuck.add(rank)  # what NICs have left only decreases
        return False

    def _leaves_at(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """The edges at a rank inside its server whose child has no children: tree, child and parent."""
        server = self.server_of[rank]
        for number, (parents, n_children) in enumerate(zip(self.parents, self.n_children, strict=True)):
            for child in range(self.first[server], self.first[server + 1]):
                parent = parents.get(child)  # None of the root
                if parent is None or rank not in (child, parent) or n_children[child]:
                    continue
                if self.server_of[parent] == server:
                    yield number, child, parent

    def _feeder(self, child: int) -> int | None:
        """The GPU of another server that has most left on a rail on which `child` has something left."""
        best: tuple[int, int] | None = None
        for rail in (rail for rail, left in self.left[child].items() if left > 0):
            line, own = self.roomy[self.pod_of[child], rail], list[tuple[int, int]]()
            while line:
                before, rank = line[0]
                left = self.left[rank][rail]
                if left == 0:
                    heappop(line)
                elif left != -before:
                    heapreplace(line, (-left, rank))
                elif self.server_of[rank] == self.server_of[child]:
                    own.append(heappop(line))
                else:
                    best = max(best or (0, 0), (left, -rank))
                    break
            for each in own:
                heappush(line, each)
        return None if best is None else -best[1]

    def _costs(self, number: int, child: int, parent: int, feeder: int) -> tuple[int, ...]:
        """Compares changes: those that relieve two GPUs, with most left at the NIC, and near the root."""
        n_relieved = (self.over[child] > 0) + (self.over[parent] > 0)
        level, at = 0, feeder
        while at != self.roots[number]:
            level, at = level + 1, self.parents[number][at]
        return -n_relieved, -sum(self.left[child].values()), level

    def _change(self, number: int, child: int, feeder: int) -> None:
        parent = self.parents[number][child]
        for rank in (child, parent):
            self.over[rank] -= self.limits[rank] is not None
        self.n_children[number][parent] -= 1
        self.n_children[number][feeder] += 1
        self.parents[number][child] = feeder
        self._take(child, feeder)
