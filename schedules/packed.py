"""The packing of trees that proves the bound, as a schedule.

The linear program of `optcc.verify.bounds` finds, for any graph of GPUs and switches, how much of the message to reduce
along which in-tree and to broadcast along which out-tree, so that no link carries more than it can in the time of the
bound. Each pair of such trees with a common root becomes a pipeline for its share of the message; together they take
the time of the bound, and what fills and drains the deepest of them. Roots have unequal shares: an optimal
ReduceScatter followed by an optimal AllGather, which give every rank an equal part, takes up to half as much again
where a server has lost NICs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from optcc.dsl import Program, schedule
from optcc.errors import TopologyError
from optcc.schedules.tree_turns import along_pairs, in_trees
from optcc.topology import Topology
from optcc.trees import Tree


class TreePair(NamedTuple):
    """A share of the message, the tree along which it is reduced, and the one along which the sum is broadcast."""

    share: Fraction
    up: Tree
    down: Tree


def unplanned(topology: Topology) -> Mapping[str, Any]:
    """Refuses: the pairs come from the linear program (`optcc.tree_packing`)."""
    raise TopologyError(f"{topology!r}: its packing must be found first: use the planner")


@schedule(
    accepts="any servers and any graph",
    paper="optcc, docs/bounds.md: the packing of trees that proves the bound",
    configure=unplanned,
)
def packed(program: Program, pairs: Sequence[TreePair]) -> None:
    """Each pair of trees has its share of the message; the segments of all pairs take turns, in proportion to it.

    With k segments a pair has k on average: the bound, and a fill of about depth / k of it over the number of pairs.
    Each tree is a stage of its own, so that a chunk that waits for its data in one tree holds up no other one.

    >>> up, down = Tree.chain([0, 1, 2]), Tree.of({1: 0, 2: 0}, root=0)
    >>> whole = packed(n_ranks=3, segments=4, pairs=[TreePair(Fraction(1), up, down)])
    >>> whole.stages, len(whole)
    (('reduce along tree 0', 'broadcast along tree 0'), 16)
    """
    along_pairs(program, pairs)


class RootedTree(NamedTuple):
    """A share of the message and the tree along which it is reduced, or broadcast."""

    share: Fraction
    tree: Tree


FindTrees = Callable[[int], Sequence[RootedTree]]
"""The trees for a root of the collective, those with the lowest root first; without a root (ReduceScatter, AllGather)
each rank is the root of an equal part."""
_OF_TREES: Mapping[str, Any] = {
    "accepts": "any servers and any graph",
    "paper": "optcc, docs/bounds.md: the packing of trees that proves the bound",
    "configure": unplanned,
}


@schedule(name="packed-all-gather", collective="allgather", **_OF_TREES)
def packed_all_gather(program: Program, find: FindTrees) -> None:
    """`packed` for AllGather: each rank's slice goes down the trees at this rank, each tree with its share.

    >>> trees = [RootedTree(Fraction(1, 2), Tree.chain(ranks)) for ranks in ([0, 1], [1, 0])]
    >>> print(*packed_all_gather(n_ranks=2, find=lambda root: trees))
    0->1 s0 c0 copy [broadcast along tree 0] 1->0 s1 c0 copy [broadcast along tree 1]
    """
    for number, segment, tree in in_trees(program, find):
        with program.stage(f"broadcast along tree {number}"):
            segment[0].broadcast_along(tree)


@schedule(name="packed-broadcast", collective="broadcast", **_OF_TREES)
def packed_broadcast(program: Program, find: FindTrees) -> None:
    """`packed` for Broadcast: several trees at the root, each with its share of the message.

    >>> print(*packed_broadcast(n_ranks=3, root=2, find=lambda root: [RootedTree(Fraction(1), Tree.chain([2, 1, 0]))]))
    2->1 s0 c0 copy [broadcast along tree 0] 1->0 s0 c0 copy [broadcast along tree 0]
    """
    for number, segment, tree in in_trees(program, find):
        with program.stage(f"broadcast along tree {number}"):
            segment[0].broadcast_along(tree)


@schedule(name="packed-reduce-scatter", collective="reducescatter", **_OF_TREES)
def packed_reduce_scatter(program: Program, find: FindTrees) -> None:
    """`packed` for ReduceScatter: each rank's slice is reduced along the trees at this rank, each tree with its share.

    >>> trees = [RootedTree(Fraction(1, 2), Tree.chain(ranks)) for ranks in ([0, 1], [1, 0])]
    >>> print(*packed_reduce_scatter(n_ranks=2, find=lambda root: trees))
    1->0 s0 c0 reduce [reduce along tree 0] 0->1 s1 c0 reduce [reduce along tree 1]
    """
    for number, segment, tree in in_trees(program, find):
        with program.stage(f"reduce along tree {number}"):
            segment[0].reduce_along(tree)


@schedule(name="packed-reduce", collective="reduce", **_OF_TREES)
def packed_reduce(program: Program, find: FindTrees) -> None:
    """`packed` for Reduce: several trees at the root, each with its share of the message.

    >>> print(*packed_reduce(n_ranks=3, root=2, find=lambda root: [RootedTree(Fraction(1), Tree.chain([2, 1, 0]))]))
    0->1 s0 c0 reduce [reduce along tree 0] 1->2 s0 c0 reduce [reduce along tree 0]
    """
    for number, segment, tree in in_trees(program, find):
        with program.stage(f"reduce along tree {number}"):
            segment[0].reduce_along(tree)
