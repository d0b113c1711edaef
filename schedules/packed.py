"""The packing of trees that proves the bound, as a schedule.

The linear program of `optcc.verify.bounds` finds, for any graph of GPUs and switches, how much of the message to reduce
along which in-tree and to broadcast along which out-tree, so that no link carries more than it can in the time of the
bound. Each pair of such trees with a common root becomes a pipeline for its share of the message; together they take
the time of the bound, and what fills and drains the deepest of them. Roots have unequal shares: an optimal
ReduceScatter followed by an optimal AllGather, which give every rank an equal part, takes up to half as much again
where a server has lost NICs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from optcc.dsl import Program, schedule
from optcc.errors import TopologyError
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
    chunks = program.segments * len(pairs)
    counts = [max(1, round(chunks * pair.share)) for pair in pairs]
    pipelines = [program.pipeline(each, sections=1, share=pair.share) for each, pair in zip(counts, pairs, strict=True)]
    turns = sorted(
        (Fraction(2 * turn + 1, count), number) for number, count in enumerate(counts) for turn in range(count)
    )
    for _, number in turns:
        segment = next(pipelines[number])
        with program.stage(f"reduce along tree {number}"):
            segment[0].reduce_along(pairs[number].up)
        with program.stage(f"broadcast along tree {number}"):
            segment[0].broadcast_along(pairs[number].down)
