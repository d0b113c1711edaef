"""Packed trees made shallow: the same loads on NICs, and no more on fabrics than they carry in the same time.

A linear program knows no depth. Its trees thread a chunk through chains of GPUs, and a pipeline takes as many steps to
fill as its trees are deep, up and down. Here the parts of a tree that lie inside one server, joined by its fabric, are
joined to each other anew, those with the most children nearest to the root; and inside a part as many GPUs as the
fabric has room for become children of the one by which data enter it.

    before  gpu 0 - gpu 1 - gpu 2 - gpu 3        after  gpu 0 - gpu 1, gpu 2, gpu 3

Every NIC keeps its number of edges in each tree. A tree that reduces is treated as one that broadcasts, backwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from optcc.graph import Graph
from optcc.trees import Tree

FABRIC_HOP = Fraction(1, 4)
"""Of the time of a hop between servers, when parts are joined."""


@dataclass(slots=True)
class Part:
    """GPUs of a tree that a fabric joins: data enter at `entry`; `exits` are those that send to other parts, each as
    often as it does."""

    entry: int
    members: list[int]
    exits: list[int] = field(default_factory=list)


@dataclass(slots=True)
class WeightedTree:
    """A tree in which to shape: its share of the message, the ranks' parents, and whether data flow to the root."""

    share: Fraction
    tree: Tree
    up: bool


def link_loads(trees: Iterable[WeightedTree], graph: Graph) -> list[Fraction]:
    """The share of the message that each link carries."""
    carried = [Fraction(0)] * len(graph.links)
    for each in trees:
        for node, parent in zip(each.tree.order.tolist()[1:], each.tree.parent.tolist()[1:], strict=True):
            for link in graph.routes[node][parent] if each.up else graph.routes[parent][node]:
                carried[link] += each.share
    return carried


def make_shallow(
    trees: Sequence[WeightedTree], graph: Graph, homes: Sequence[int], room: Sequence[Fraction]
) -> list[Tree]:
    """The trees in the same order, shallower; `homes[rank]` is its server, `room[link]` the most that a link may carry.

    All are left as they are where the new ones would overload a link.
    """
    parts = [_parts(each.tree, homes) for each in trees]
    fabric = _FabricRoom(trees, parts, graph, room)
    shaped: list[Tree] = [each.tree for each in trees]
    for at in sorted(range(len(trees)), key=lambda at: -trees[at].share):
        joined = _join(parts[at], trees[at], graph)
        if joined is None:
            joined = _as_before(parts[at], trees[at].tree)
        children = dict.fromkeys(range(len(homes)), 0)
        for part in parts[at]:
            fabric.fill(part, trees[at], joined.parents, joined.arrives, children)
        shaped[at] = _ordered(joined.parents, joined.arrives, trees[at].tree.root)
    new = link_loads([WeightedTree(each.share, tree, each.up) for each, tree in zip(trees, shaped, strict=True)], graph)
    if all(load <= limit or load <= old for load, limit, old in zip(new, room, link_loads(trees, graph), strict=True)):
        return shaped
    return [each.tree for each in trees]


def _parts(tree: Tree, homes: Sequence[int]) -> list[Part]:
    """The parts, that of the root first."""
    found: dict[int, Part] = {}
    for rank, parent in zip(tree.order.tolist(), tree.parent.tolist(), strict=True):
        if parent >= 0 and homes[rank] == homes[parent]:
            found[rank] = found[parent]
            found[rank].members.append(rank)
        else:
            found[rank] = Part(rank, [rank])
            if parent >= 0:
                found[parent].exits.append(parent)
    return list({part.entry: part for part in found.values()}.values())


@dataclass(slots=True)
class _Joined:
    """The parent of each part's entry, and when data are there, in hops between servers."""

    parents: dict[int, int]
    arrives: dict[int, Fraction]


def _join(parts: Sequence[Part], each: WeightedTree, graph: Graph) -> _Joined | None:
    """Each part joined to the earliest exit of another one that reaches its entry; None if none is left that does."""
    left = sorted(parts[1:], key=lambda part: -len(part.exits))
    joined = _Joined({}, {parts[0].entry: Fraction(0)})
    free = _exits(parts[0], Fraction(0))
    while left:
        free.sort()
        found = next(
            ((exit_, part) for exit_ in free for part in left if _route(graph, exit_[1], part.entry, each.up)), None
        )
        if found is None:
            return None
        (time, rank), part = found
        free.remove((time, rank))
        left.remove(part)
        joined.parents[part.entry], joined.arrives[part.entry] = rank, time + 1
        free += _exits(part, time + 1)
    return joined


def _route(graph: Graph, parent: int, child: int, up: bool) -> bool:
    return parent in graph.routes[child] if up else child in graph.routes[parent]


def _exits(part: Part, arrived: Fraction) -> list[tuple[Fraction, int]]:
    """When each exit of a part can send, one after the other."""
    times: dict[int, Fraction] = {}
    found = []
    for rank in part.exits:
        time = times.get(rank, arrived if rank == part.entry else arrived + FABRIC_HOP)
        found.append((time, rank))
        times[rank] = time + 1
    return found


def _as_before(parts: Sequence[Part], tree: Tree) -> _Joined:
    """Parts joined as they are."""
    parent = dict(zip(tree.order.tolist(), tree.parent.tolist(), strict=True))
    level = {-1: Fraction(-1)}
    for rank in tree.order.tolist():
        level[rank] = level[parent[rank]] + 1
    entries = [part.entry for part in parts]
    return _Joined({entry: parent[entry] for entry in entries[1:]}, {entry: level[entry] for entry in entries})


class _FabricRoom:
    """How much more each GPU may send to its children in its server (or receive from them, on the way up)."""

    def __init__(
        self, trees: Sequence[WeightedTree], parts: Sequence[list[Part]], graph: Graph, room: Sequence[Fraction]
    ) -> None:
        self.left: dict[tuple[int, bool], Fraction] = {}
        self.wanted: dict[tuple[int, bool], Fraction] = {}
        self.graph = graph
        for each, all_parts in zip(trees, parts, strict=True):
            for part in all_parts:
                others = [rank for rank in part.members if rank != part.entry]
                if not others or not self._linked(part.members):
                    continue
                for rank in part.members:
                    for up in (False, True):
                        other = others[0] if rank != others[0] else part.entry
                        route = graph.routes[other][rank] if up else graph.routes[rank][other]
                        self.left.setdefault((rank, up), room[route[-1] if up else route[0]])
                for rank in others:  # the edge to its own parent takes the same port as children on the other way
                    self.left[rank, not each.up] -= each.share
                key = part.entry, each.up
                self.wanted[key] = self.wanted.get(key, Fraction(0)) + each.share * len(others)

    def _linked(self, members: Sequence[int]) -> bool:
        """True if a switch joins all members."""
        return all(len(self.graph.routes[a].get(b, ())) == 2 for a in members for b in members if a != b)

    def _spare(self, rank: int, up: bool) -> Fraction:
        """What a GPU may send beyond what its own parts want."""
        return self.left[rank, up] - self.wanted.get((rank, up), Fraction(0))

    def fill(
        self,
        part: Part,
        each: WeightedTree,
        parents: dict[int, int],
        start_of: dict[int, Fraction],
        children: dict[int, int],
    ) -> None:
        """Adds the parents inside a part: of all at its entry, or of some at those that have more room."""
        if len(part.members) == 1:
            return
        if not self._linked(part.members):
            kept = dict(zip(each.tree.order.tolist(), each.tree.parent.tolist(), strict=True))
            for rank in part.members[1:]:
                parents[rank] = kept[rank]
                start_of[rank] = start_of[kept[rank]] + FABRIC_HOP
            return
        exits = set(part.exits)
        line = sorted(
            (rank for rank in part.members if rank != part.entry),
            key=lambda rank: (rank not in exits, -self._spare(rank, each.up)),
        )
        want, left = self.wanted[part.entry, each.up], self.left[part.entry, each.up]
        direct = len(line) if want <= left else max(1, int(len(line) * left / want))
        self.wanted[part.entry, each.up] = want - each.share * len(line)
        reached = [part.entry]
        for place, rank in enumerate(line):
            parent = part.entry
            if place >= direct:
                parent = max(reached, key=lambda one: self._spare(one, each.up))
            self.left[parent, each.up] -= each.share
            children[parent] += 1
            parents[rank] = parent
            start_of[rank] = start_of[parent] + FABRIC_HOP * Fraction(children[parent] + len(line), len(line))
            if place < direct:
                reached.append(rank)


def _ordered(parents: dict[int, int], start_of: dict[int, Fraction], root: int) -> Tree:
    """The tree in the order in which its ranks are reached."""
    line = sorted(parents, key=lambda rank: (start_of[rank], rank))
    return Tree.of({rank: parents[rank] for rank in line}, root)
