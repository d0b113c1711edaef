"""The double binary tree as NCCL runs it on servers of several GPUs: two trees over the servers for each NIC.

A channel has a GPU with a NIC in every server, its head there. Two binary trees join the heads, half of the channel's
part along each, and the inner servers of one are leaves of the other. Inside a server a chain leads through all GPUs to
the head. Each channel has other heads, so together they use all NICs; rail-only, those of a channel are on one rail.

Where NICs are lost the channels are divided among those that are left, as for the rings (`optcc.schedules.nccl_ring`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optcc.dsl import Program, schedule
from optcc.schedules.double_tree import two_trees
from optcc.schedules.equal_trees import pairs_of
from optcc.schedules.nccl_ring import heads_of_channels
from optcc.schedules.packed import TreePair
from optcc.schedules.tree_turns import along_pairs
from optcc.topology import Topology
from optcc.trees import Tree


def trees_of_channels(topology: Topology) -> Mapping[str, Any]:
    """Two trees over the ranks for each channel, one after the other, with equal shares."""
    members, channels = heads_of_channels(topology)
    pair = two_trees(len(members))
    return pairs_of([_over_gpus(tree, members, heads) for heads in channels for tree in pair])


def _over_gpus(tree: Tree, members: Sequence[range], heads: Sequence[int]) -> Tree:
    """The tree over the ranks for one over the servers: from each head a chain through the others of its server."""
    parents: dict[int, int] = {}
    for server, above in zip(tree.order.tolist(), tree.parent.tolist(), strict=True):
        head, gpus = heads[server], members[server]
        if above >= 0:
            parents[head] = heads[above]
        chain = [*range(head, gpus.stop), *range(gpus.start, head)]
        parents |= dict(zip(chain[1:], chain, strict=False))
    return Tree.of(parents, heads[tree.root])


@schedule(
    name="nccl-tree",
    accepts="servers whose NICs belong to GPUs; rail-only: of which some rail is left at all",
    paper="NCCL: double binary trees across servers, chains inside; Sanders, Speck, Träff 2009",
    configure=trees_of_channels,
)
def nccl_tree(program: Program, pairs: Sequence[TreePair]) -> None:
    """Each tree has an equal part of the message, reduced up it and broadcast down.

    With c channels, m of them on the busiest NIC of rate b, it takes 2 m/c * n / b for many segments: an inner server
    of one tree sends and receives its half three times, and as a leaf of the other one once. A GPU carries twice the
    message on the fabric, but for the ends of chains.

    >>> pairs = pairs_of([Tree.chain([0, 1]), Tree.chain([1, 0])])["pairs"]
    >>> print(*nccl_tree(n_ranks=2, pairs=pairs))
    1->0 s0 c0 reduce [reduce along tree 0] 0->1 s0 c0 copy [broadcast along tree 0] \
0->1 s1 c0 reduce [reduce along tree 1] 1->0 s1 c0 copy [broadcast along tree 1]
    """
    along_pairs(program, pairs)
