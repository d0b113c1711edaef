"""From the certificate of a bound to a schedule: the packing of trees that the linear program finds, for a topology.

PACKED.build(topology, segments)        `optcc.schedules.packed`, with the trees of `find_pairs`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from optcc.errors import SolverUnknown
from optcc.schedules.loads import with_gpus
from optcc.schedules.packed import TreePair, packed
from optcc.topology import Topology
from optcc.tree_shaping import WeightedTree, make_shallow
from optcc.trees import Tree
from optcc.verify.bounds.certificate import Certificate, PackedTree
from optcc.verify.bounds.lp import lp_bound
from optcc.verify.bounds.network import BROADCAST, REDUCE, endpoint_gpus
from optcc.verify.bounds.packing import pack

LEFT_OUT = Fraction(1, 200)
"""The smallest pairs are left out as long as all of them together are no larger a share of the message: each is a
pipeline of its own, and the others grow by less than a percent."""
_SIZE_BYTES = 2**30


@lru_cache(maxsize=16)
def find_pairs(topology: Topology) -> tuple[TreePair, ...]:
    """Pairs of trees over the ranks that attain the bound of an AllReduce, but for `LEFT_OUT`.

    >>> pairs = find_pairs(Topology.parse("2x2@50GB/s+450GB/s"))
    >>> sum(pair.share for pair in pairs)
    Fraction(1, 1)

    Raises TopologyError if some ranks cannot reach others, SolverError and SolverUnknown if no packing is found.
    """
    gpus = endpoint_gpus(topology, fabric=True)
    bound = lp_bound(topology, "allreduce", _SIZE_BYTES, fabric=True)
    certificate = bound.certificate
    if certificate.achieved is None:
        raise SolverUnknown(f"{topology!r}: the linear program has found a bound and no packing that reaches it")
    certificate = pack(certificate)
    pairs = _few(_pairs(certificate))
    if topology.wired is not None:
        return _shallow(pairs, topology, bound.seconds / _SIZE_BYTES / (1 - LEFT_OUT))
    if max(gpus) == 1:
        return pairs
    return tuple(
        TreePair(pair.share, with_gpus(pair.up, gpus, turn), with_gpus(pair.down, gpus, turn))
        for turn, pair in enumerate(pairs)
    )


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


def _few(pairs: Iterable[TreePair]) -> tuple[TreePair, ...]:
    """The pairs without the smallest ones, scaled to the whole message, the largest first."""
    largest_first = sorted(pairs, key=lambda pair: -pair.share)
    left_out = Fraction(0)
    while left_out + largest_first[-1].share <= LEFT_OUT:
        left_out += largest_first.pop().share
    return tuple(pair._replace(share=pair.share / (1 - left_out)) for pair in largest_first)


def _shallow(pairs: tuple[TreePair, ...], topology: Topology, unit_s: Fraction) -> tuple[TreePair, ...]:
    """The pairs with shallower trees, which load each link of the topology for at most `unit_s` for each byte of the
    message."""
    graph = topology.wired
    assert graph is not None
    trees = [WeightedTree(pair.share, tree, up) for pair in pairs for tree, up in ((pair.up, True), (pair.down, False))]
    shaped = make_shallow(trees, graph, topology.rank_server, [link.rate * unit_s for link in graph.links])
    return tuple(TreePair(pair.share, *shaped[2 * at : 2 * at + 2]) for at, pair in enumerate(pairs))


def _configure(topology: Topology) -> Mapping[str, Any]:
    return {"pairs": find_pairs(topology)}


PACKED = replace(packed, configure=_configure)
