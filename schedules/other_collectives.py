"""The other collectives, which are the halves of AllReduce: ReduceScatter and Reduce, AllGather and Broadcast.

Around a ring every rank owns a slice of the message; along a chain or a binary tree one root owns all of it. A half
that reduces is the mirror image of the half that distributes: the same edges, backwards. With p equal ranks, k
segments, and the latency alpha as often as messages must follow one another:

    collective       schedule               n/B                     alpha
    ReduceScatter    ring-reduce-scatter    (p - 1)/p               p - 1
    AllGather        ring-all-gather        (p - 1)/p               p - 1
    Broadcast        chain-broadcast        (k + p - 2)/k           p - 1
    Reduce           chain-reduce           (k + p - 2)/k           p - 1
    Broadcast        tree-broadcast         2(k + depth - 1)/k      depth
    Reduce           tree-reduce            2(k + depth - 1)/k      depth
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from optcc.arrays import column
from optcc.dsl import Program, Segment, any_flat, schedule
from optcc.topology import Topology
from optcc.trees import Tree


def fastest_senders_first(topology: Topology) -> Mapping[str, Any]:
    """For a broadcast: the ranks sorted by out rate, as the last one sends nothing."""
    any_flat(topology)
    return {"order": _fastest_first(topology.out)}


def fastest_receivers_first(topology: Topology) -> Mapping[str, Any]:
    """For a reduction: the ranks sorted by in rate, as the one farthest from the root receives nothing."""
    any_flat(topology)
    return {"order": _fastest_first(topology.in_)}


def _fastest_first(rates: Sequence[Fraction]) -> tuple[int, ...]:
    return tuple(sorted(range(len(rates)), key=lambda rank: -rates[rank]))


@schedule(
    name="ring-reduce-scatter",
    collective="reducescatter",
    paper="Patarasuk and Yuan, 'Bandwidth optimal all-reduce algorithms', JPDC 69(2), 2009",
)
def ring_reduce_scatter(program: Program) -> None:
    """The first half of the ring: slice r starts at rank r + 1 and has gathered all contributions at its owner r.

    Every rank sends and receives (p - 1)/p of the message in p - 1 steps, so the time is (p - 1)/p * n / b with the
    slowest rank's bandwidth b, and (p - 1) alpha more with one segment. Without stragglers no schedule needs fewer n/b.

    >>> len(ring_reduce_scatter(n_ranks=4)), str(ring_reduce_scatter(n_ranks=4)[0])
    (12, '0->1 s3 c0 reduce [reduce-scatter]')
    """
    p = program.n_ranks
    with program.stage("reduce-scatter"):
        for parts in slices(program):
            for step in range(p - 1):
                for rank in program.ranks:
                    parts[(rank - 1 - step) % p][0].reduce(src=rank, dst=(rank + 1) % p)


@schedule(
    name="ring-all-gather",
    collective="allgather",
    paper="Patarasuk and Yuan, 'Bandwidth optimal all-reduce algorithms', JPDC 69(2), 2009",
)
def ring_all_gather(program: Program) -> None:
    """The second half of the ring: slice r starts at its owner r and is forwarded until all have it.

    Every rank sends and receives (p - 1)/p of the message in p - 1 steps, so the time is (p - 1)/p * n / b with the
    slowest rank's bandwidth b, and (p - 1) alpha more with one segment. Without stragglers no schedule needs fewer n/b.

    >>> len(ring_all_gather(n_ranks=4)), str(ring_all_gather(n_ranks=4)[0])
    (12, '0->1 s0 c0 copy [all-gather]')
    """
    p = program.n_ranks
    with program.stage("all-gather"):
        for parts in slices(program):
            for step in range(p - 1):
                for rank in program.ranks:
                    parts[(rank - step) % p][0].copy(src=rank, dst=(rank + 1) % p)


@schedule(
    name="chain-broadcast",
    collective="broadcast",
    paper="Watts and van de Geijn, 'A pipelined broadcast for multidimensional meshes', PPL 5(2), 1995",
    configure=fastest_senders_first,
)
def chain_broadcast(program: Program, order: Sequence[int] = ()) -> None:
    """Segment after segment goes down a chain from the root; ranks stand in it in `order`, by number if there is none.

    All ranks but the root receive n, all but the last send it: n / b for many segments, b the slowest of these ports.
    A rank that sends slowly costs nothing at the end of the chain. With k segments and equal rates
    (k + p - 2)/k * n / B + (p - 1) alpha.

    >>> str(chain_broadcast(n_ranks=4, root=2, order=(3, 2, 1, 0))[0])
    '2->3 s0 c0 copy [broadcast]'
    """
    _broadcast(program, Tree.chain(_from_root(program, order)))


@schedule(
    name="chain-reduce",
    collective="reduce",
    paper="Watts and van de Geijn, 'A pipelined broadcast for multidimensional meshes', PPL 5(2), 1995",
    configure=fastest_receivers_first,
)
def chain_reduce(program: Program, order: Sequence[int] = ()) -> None:
    """Segment after segment gathers contributions up a chain to the root, the rank that is last in `order` begins.

    All ranks but the root send n, all but the first receive it: the broadcast reversed, and as fast. A rank that
    receives slowly costs nothing at the far end of the chain. With k segments and equal rates
    (k + p - 2)/k * n / B + (p - 1) alpha.

    >>> str(chain_reduce(n_ranks=4, root=2, order=(3, 2, 1, 0))[0])
    '0->1 s0 c0 reduce [reduce]'
    """
    _reduce(program, Tree.chain(_from_root(program, order)))


@schedule(
    name="tree-broadcast",
    collective="broadcast",
    paper="Sanders, Speck and Träff, 'Two-tree algorithms for full bandwidth broadcast, reduction and scan', 2009",
    configure=fastest_senders_first,
)
def binary_tree_broadcast(program: Program, order: Sequence[int] = ()) -> None:
    """Segment after segment goes down a complete binary tree, level by level in `order`: the last ranks are leaves.

    A rank with two children sends 2n: half the bandwidth of the chain, at depth d = floor(log2 p) instead of p - 1, so
    it suits messages dominated by latency. With k segments and equal rates 2(k + d - 1)/k * n / B + d alpha, less if
    the last level is not full. A rank that sends slowly costs nothing as a leaf.

    >>> [str(each) for each in binary_tree_broadcast(n_ranks=4, root=3)]  # doctest: +NORMALIZE_WHITESPACE
    ['3->0 s0 c0 copy [broadcast]', '3->1 s0 c0 copy [broadcast]', '0->2 s0 c0 copy [broadcast]']
    """
    _broadcast(program, _complete_binary_tree(_from_root(program, order)))


@schedule(
    name="tree-reduce",
    collective="reduce",
    paper="Sanders, Speck and Träff, 'Two-tree algorithms for full bandwidth broadcast, reduction and scan', 2009",
    configure=fastest_receivers_first,
)
def binary_tree_reduce(program: Program, order: Sequence[int] = ()) -> None:
    """Segment after segment gathers contributions up a complete binary tree; the last ranks of `order` are leaves.

    A rank with two children receives 2n: the broadcast reversed, and as fast. With k segments, equal rates and depth
    d = floor(log2 p) 2(k + d - 1)/k * n / B + d alpha, less if the last level is not full. A rank that receives slowly
    costs nothing as a leaf.

    >>> [str(each) for each in binary_tree_reduce(n_ranks=4, root=3)]  # doctest: +NORMALIZE_WHITESPACE
    ['2->0 s0 c0 reduce [reduce]', '1->3 s0 c0 reduce [reduce]', '0->3 s0 c0 reduce [reduce]']
    """
    _reduce(program, _complete_binary_tree(_from_root(program, order)))


def _broadcast(program: Program, tree: Tree) -> None:
    """Segment after segment goes down `tree`."""
    with program.stage("broadcast"):
        for segment in program.pipeline(sections=1):
            segment[0].broadcast_along(tree)


def _reduce(program: Program, tree: Tree) -> None:
    """Segment after segment gathers contributions up `tree`."""
    with program.stage("reduce"):
        for segment in program.pipeline(sections=1):
            segment[0].reduce_along(tree)


def slices(program: Program) -> Iterator[tuple[Segment, ...]]:
    """For each segment of a pipeline, the part of every rank's slice, at the slice's place in the buffer."""
    share = Fraction(1, program.n_ranks)
    return zip(*[program.pipeline(sections=1, share=share) for _ in program.ranks], strict=True)


def _from_root(program: Program, order: Sequence[int]) -> list[int]:
    """The ranks in `order`, by default by number, with the root moved to the front."""
    root = program.collective.root
    return [root, *(rank for rank in order or program.ranks if rank != root)]


def _complete_binary_tree(ranks: Sequence[int]) -> Tree:
    """A complete binary tree, its last level filled from the left; `ranks` lists its levels from the root."""
    return Tree(column(ranks), column([-1, *(ranks[(i - 1) // 2] for i in range(1, len(ranks)))]))
