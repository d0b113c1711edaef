"""`Tree`: a spanning tree of the ranks, along which a chunk is reduced to the root or broadcast from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from optcc.arrays import Column, column
from optcc.compiled import compiled
from optcc.errors import ScheduleError

_NONE, _NAMES, _ROOT, _BEHIND = range(4)
"""Faults of a tree."""


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """`order` lists the ranks, each after its parent and so the root first; `parent[i]` is the parent of `order[i]`,
    -1 for the root.

    >>> Tree.of({1: 0, 2: 0, 3: 1}, root=0)
    Tree(0 <- 1, 0 <- 2, 1 <- 3)

    Raises ScheduleError unless it is a spanning tree of ranks 0..p-1.
    """

    order: Column
    parent: Column

    def __post_init__(self) -> None:
        p = len(self.order)
        fault = _NAMES if p == 0 or len(self.parent) != p else _kernels().fault(self.order, self.parent)
        if fault == _NAMES:
            raise ScheduleError(f"tree over {self.order.tolist()}: must name every rank from 0 to {p - 1} once")
        if fault == _ROOT:
            raise ScheduleError(f"tree with parents {self.parent.tolist()}: only the root, the first, must have none")
        if fault == _BEHIND:
            raise ScheduleError(f"tree over {self.order.tolist()}: every rank must stand behind its parent")

    @classmethod
    def of(cls, parents: dict[int, int], root: int) -> Tree:
        """The tree with this parent of each rank; children keep the order of `parents`.

        Raises ScheduleError unless it is a spanning tree.
        """
        children: dict[int, list[int]] = {}
        for child, parent in parents.items():
            children.setdefault(parent, []).append(child)
        order = [root]
        for rank in order:
            order += children.get(rank, [])
            if len(order) > len(parents) + 1:
                break
        if len(order) != len(parents) + 1:
            raise ScheduleError(f"tree with parents {parents}: must have no circle, and one root, {root}")
        return cls(column(order), column([-1, *(parents[rank] for rank in order[1:])]))

    @classmethod
    def chain(cls, ranks: Sequence[int]) -> Tree:
        """The path through `ranks`, which starts at the root."""
        return cls(column(ranks), column([-1, *ranks[:-1]]))

    @property
    def root(self) -> int:
        """The rank at which a reduction ends and a broadcast starts."""
        return int(self.order[0])

    @property
    def depth(self) -> int:
        """Edges from the root to the farthest rank."""
        level = dict.fromkeys(self.order.tolist(), 0)
        for rank, parent in zip(self.order.tolist()[1:], self.parent.tolist()[1:], strict=True):
            level[rank] = level[parent] + 1
        return max(level.values())

    def __len__(self) -> int:
        return len(self.order)

    def __repr__(self) -> str:
        edges = zip(self.order.tolist()[1:], self.parent.tolist()[1:], strict=True)
        return f"Tree({', '.join(f'{parent} <- {rank}' for rank, parent in edges)})"


class Edge(NamedTuple):
    """The edge from `child` to `parent` in tree `tree` of several; the child is at `level`, the root at level 0."""

    tree: int
    child: int
    parent: int
    level: int


@dataclass(frozen=True, slots=True)
class TreeEdges:
    """Every edge of some trees, once, in some order.

    Raises ScheduleError for other edges, or other levels.
    """

    trees: tuple[Tree, ...]
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        wanted = {edge for number, tree in enumerate(self.trees) for edge in edges_of(number, tree)}
        if len(self.edges) != len(wanted) or set(self.edges) != wanted:
            wrong = sorted(wanted ^ set(self.edges))[:1]
            raise ScheduleError(f"edges of {len(self.trees)} trees: must be every edge once, with its level: {wrong}")

    @property
    def depth(self) -> int:
        """The highest level."""
        return max(tree.depth for tree in self.trees)

    def __iter__(self) -> Iterator[Edge]:
        return iter(self.edges)


def edges_of(number: int, tree: Tree) -> Iterator[Edge]:
    """The edges of a tree in its order, as those of tree `number`."""
    level = {-1: -1}
    for child, parent in zip(tree.order.tolist(), tree.parent.tolist(), strict=True):
        level[child] = level[parent] + 1
        if parent >= 0:
            yield Edge(number, child, parent, level[child])


@cache
def _kernels() -> Any:
    return compiled((_fault,), globals())


def _fault(order: Column, parent: Column) -> int:
    """The first fault. Compiled, as a schedule has a tree or two per segment."""
    p = len(order)
    place = np.full(p, -1, dtype=np.int64)
    for at in range(p):
        if not 0 <= order[at] < p or place[order[at]] >= 0:
            return _NAMES
        place[order[at]] = at
    if parent[0] != -1:
        return _ROOT
    for at in range(1, p):
        if not 0 <= parent[at] < p:
            return _ROOT
    for at in range(1, p):
        if place[parent[at]] >= at:
            return _BEHIND
    return _NONE
