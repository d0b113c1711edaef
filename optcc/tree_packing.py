"""From the certificate of a bound to a schedule: the packing of trees that the linear program finds, for a topology.

PACKED.build(topology, segments)        `optcc.schedules.packed`, with the trees of `find_pairs`
PACKED_OF["allgather"]                  those of the other collectives, with the trees of `find_trees`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, TypeVar

from optcc.collective import Collective
from optcc.dsl import Definition
from optcc.errors import SolverUnknown, TopologyError
from optcc.schedules.loads import with_gpus
from optcc.schedules.packed import (
    RootedTree,
    TreePair,
    packed,
    packed_all_gather,
    packed_broadcast,
    packed_reduce,
    packed_reduce_scatter,
)
from optcc.topology import Topology
from optcc.tree_shaping import WeightedTree, make_shallow
from optcc.trees import Tree
from optcc.verify.bounds.certificate import Certificate, PackedTree
from optcc.verify.bounds.lp import lp_bound
from optcc.verify.bounds.network import BROADCAST, REDUCE, FlowNetwork, endpoint_gpus
from optcc.verify.bounds.packing import pack

LEFT_OUT = Fraction(1, 200)
"""The smallest pairs are left out as long as all of them together are no larger a share of the message: each is a
pipeline of its own, and the others grow by less than a percent."""
_SIZE_BYTES = 2**30
AnyTree = TypeVar("AnyTree", TreePair, RootedTree)


@lru_cache(maxsize=16)
def find_pairs(topology: Topology) -> tuple[TreePair, ...]:
    """Pairs of trees over the ranks that attain the bound of an AllReduce, but for `LEFT_OUT`.

    >>> pairs = find_pairs(Topology.parse("2x2@50GB/s+450GB/s"))
    >>> sum(pair.share for pair in pairs)
    Fraction(1, 1)

    Raises TopologyError if some ranks cannot reach others, SolverError and SolverUnknown if no packing is found.
    """
    gpus = endpoint_gpus(topology, fabric=True)
    certificate = _packed_certificate(topology, Collective("allreduce", topology.n_ranks))
    pairs = _few(_pairs(certificate))
    if topology.wired is not None:
        shaped = _shallow(
            [(pair.share, tree, up) for pair in pairs for tree, up in ((pair.up, True), (pair.down, False))],
            topology,
            certificate,
        )
        return tuple(TreePair(pair.share, *shaped[2 * at : 2 * at + 2]) for at, pair in enumerate(pairs))
    if max(gpus) == 1:
        return pairs
    return tuple(
        TreePair(pair.share, with_gpus(pair.up, gpus, turn), with_gpus(pair.down, gpus, turn))
        for turn, pair in enumerate(pairs)
    )


@lru_cache(maxsize=64)
def find_trees(topology: Topology, name: str, root: int) -> tuple[RootedTree, ...]:
    """Trees over the ranks that attain the bound of a ReduceScatter, AllGather, Broadcast or Reduce, but for `LEFT_OUT`
    of what each root has; those with the lowest root first.

    >>> trees = find_trees(Topology.parse("2x2@50GB/s+450GB/s"), "broadcast", 3)
    >>> [each.tree.root for each in trees], sum(each.share for each in trees)
    ([3, 3], Fraction(1, 1))

    Ranks must be endpoints of their own: one GPU a server, or NICs of GPUs. Raises TopologyError if some cannot reach
    others, SolverError and SolverUnknown if no packing is found.
    """
    certificate = _packed_certificate(topology, Collective(name, topology.n_ranks, root))
    assert certificate.achieved is not None
    by_root: dict[int, list[RootedTree]] = {}
    for packed_tree in certificate.achieved.trees or ():
        tree = Tree.of(_parents(certificate, packed_tree), packed_tree.root)
        by_root.setdefault(packed_tree.root, []).append(RootedTree(packed_tree.weight, tree))
    trees = [each for root in sorted(by_root) for each in _few(by_root[root])]
    if topology.wired is None:
        return tuple(trees)
    up = REDUCE in certificate.demand.kinds
    shaped = _shallow([(each.share, each.tree, up) for each in trees], topology, certificate)
    return tuple(RootedTree(each.share, tree) for each, tree in zip(trees, shaped, strict=True))


def _packed_certificate(topology: Topology, collective: Collective) -> Certificate:
    """The certificate of the bound with the trees of its packing: where routes are fewer than what the bound is for, of
    the bound on these."""
    network: Topology | FlowNetwork = topology
    if topology.widest is not topology.wired:
        network = FlowNetwork.from_topology(topology, fabric=True, as_routed=True)
    certificate = lp_bound(network, collective, _SIZE_BYTES, fabric=True).certificate
    if certificate.achieved is None:
        raise SolverUnknown(f"{topology!r}: the linear program has found a bound and no packing that reaches it")
    return pack(certificate)


def _pairs(certificate: Certificate) -> list[TreePair]:
    """Trees that reduce and trees that broadcast, joined where they have a root in common, as shares allow."""
    assert certificate.achieved is not None
    assert certificate.achieved.trees is not None
    waiting: dict[tuple[str, int], list[tuple[Fraction, Tree]]] = {}
    for packed_tree in certificate.achieved.trees:
        tree = Tree.of(_parents(certificate, packed_tree), packed_tree.root)
        waiting.setdefault((packed_tree.kind, packed_tree.root), []).append((packed_tree.weight, tree))
    found: list[TreePair] = []
    for root in sorted({root for _, root in waiting}):
        ups, downs = waiting[REDUCE, root], waiting[BROADCAST, root]
        while ups:
            (up_share, up), (down_share, down) = ups.pop(), downs.pop()
            share = min(up_share, down_share)
            found.append(TreePair(share, up, down))
            ups += [(up_share - share, up)] if up_share > share else []
            downs += [(down_share - share, down)] if down_share > share else []
        assert not downs, "both kinds have the same roots"
    return found


def _parents(certificate: Certificate, tree: PackedTree) -> dict[int, int]:
    """The parent of each endpoint: a path leads from it to its parent in a tree that reduces, and to it otherwise."""
    links = certificate.network.links
    ends = [(links[path[0]].tail, links[path[-1]].head) for path in tree.paths]
    return dict(ends if tree.kind == REDUCE else [(head, tail) for tail, head in ends])


def _few(trees: Iterable[AnyTree]) -> tuple[AnyTree, ...]:
    """The trees, or pairs, without the smallest ones, scaled to the whole of their shares, the largest first."""
    largest_first = sorted(trees, key=lambda each: -each.share)
    whole = sum((each.share for each in largest_first), Fraction(0))
    left_out = Fraction(0)
    while left_out + largest_first[-1].share <= LEFT_OUT * whole:
        left_out += largest_first.pop().share
    return tuple(each._replace(share=each.share * whole / (whole - left_out)) for each in largest_first)


def _shallow(trees: Sequence[tuple[Fraction, Tree, bool]], topology: Topology, certificate: Certificate) -> list[Tree]:
    """Shallower trees for these (share, tree, whether it reduces), which load no link for longer than the certificate's
    time, but for `LEFT_OUT`."""
    graph, achieved = topology.wired, certificate.achieved
    assert graph is not None
    assert achieved is not None
    unit_s = achieved.seconds / certificate.size_bytes / (1 - LEFT_OUT)
    room = [link.rate * unit_s for link in graph.links]
    return make_shallow([WeightedTree(*each) for each in trees], graph, topology.rank_server, room)


def _configure(topology: Topology) -> Mapping[str, Any]:
    return {"pairs": find_pairs(topology)}


def _configure_for(name: str) -> Callable[[Topology], Mapping[str, Any]]:
    """Finds the trees of a collective when its root is known; refuses a topology for which there are none."""

    def configure(topology: Topology) -> Mapping[str, Any]:
        if max(endpoint_gpus(topology, fabric=True)) > 1:
            raise TopologyError(f"{topology!r}: servers pool their NICs: must have one GPU each, or NICs of GPUs")
        return {"find": partial(find_trees, topology, name)}

    return configure


PACKED = replace(packed, configure=_configure)
PACKED_OF: Mapping[str, Definition] = {
    each.collective: replace(each, configure=_configure_for(each.collective))
    for each in (packed_reduce_scatter, packed_all_gather, packed_broadcast, packed_reduce)
}
"""By collective, the schedule of its packing."""
