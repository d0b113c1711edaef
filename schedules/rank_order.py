"""Sums whose additions have one order, that of the ranks, whatever the rates: no change of plans changes a bit.

Sums of floats depend on the order of additions, and other schedules take the order that suits the rates: a plan made
anew after the loss of a NIC gives other last bits. Here every element is

    ((x_0 + x_1) + x_2) + ... + x_(p-1),

as if NumPy added one rank after the other; with several GPUs a server, those of each server are added in their order,
and then the servers in theirs. It depends neither on the size of the message nor on its segments.

Why this costs no bandwidth. Let rank u do the additions for a share of the message: all others send it their elements,
and it adds them in the order of the ranks, those before its own in scratch space. This is a star around u with the
loads of any other star, and `optcc.schedules.fair_optimum` attains the bound T* for any rates with stars alone: the
rates set their shares, not the order of additions. So this is `shares` with the children of each star in order. What it
costs is memory, a scratch chunk for each segment of a centre, and one addition more there.

In a ReduceScatter each rank is the centre of its own slice, and every port carries (p - 1)/p of the message, which no
schedule can avoid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np

from optcc.arrays import column
from optcc.dsl import Program, pure, schedule
from optcc.schedules.fair_optimum import RankShare, divide, in_turns
from optcc.schedules.loads import rates, with_gpus
from optcc.schedules.tree_turns import in_trees, reduce_in_order, together
from optcc.trees import Tree


@schedule(
    name="rank-order",
    accepts="any servers, out and in apart; NICs of a server pooled",
    paper="optcc, docs/bounds.md: the fluid optimum by stars, added in one order",
    configure=rates,
    lane_per_peer=True,
    keeps_order=True,
)
def rank_order(
    program: Program,
    rates: Sequence[tuple[Fraction, Fraction]],
    gpus: Sequence[int] = (),
    parts: Sequence[RankShare] = (),
) -> None:
    """Sums in the order of the ranks, so that no change of plans changes a bit; each rank adds up a share of them.

    Time and shares are those of `shares`: with k segments and one straggler (k + 1)/k times the bound for fair ports,
    and two hops, three if out and in differ. `parts` are other shares than those that follow from the rates.

    >>> schedule = rank_order(n_ranks=4, segments=3, rates=[(2, 2), (2, 2), (2, 2), (1, 1)])
    >>> schedule.stages, len(schedule)
    (('reduce', 'broadcast'), 57)
    """
    weights, turns = centres(rates, gpus, parts)
    for reducing, broadcasting in together(program, weights, turns, 1, scratch=1):
        with program.stage("reduce"):
            for _, segment, up in reducing:
                reduce_in_order(segment, up, gpus)
        with program.stage("broadcast"):
            for _, segment, down in broadcasting:
                segment[0].broadcast_along(down)


@schedule(
    name="rank-order-reduce-scatter",
    collective="reducescatter",
    accepts="any servers; NICs of a server pooled",
    paper="optcc, docs/bounds.md: stars, added in one order",
    configure=rates,
    lane_per_peer=True,
    keeps_order=True,
)
def rank_order_reduce_scatter(
    program: Program, rates: Sequence[tuple[Fraction, Fraction]], gpus: Sequence[int] = ()
) -> None:
    """All send each rank their part of its slice, and it adds them up in the order of the ranks.

    Of p servers of one GPU every one sends and receives (p - 1)/p of the message, in one hop: the bound, if the slowest
    server's port is what limits; the rates change nothing.

    >>> len(rank_order_reduce_scatter(n_ranks=4, rates=[(1, 1)] * 4))
    14
    """
    with program.stage("reduce-scatter"):
        for _, segment, tree in in_trees(program, owners(gpus or [1] * len(rates)), scratch=1):
            reduce_in_order(segment, tree, gpus)


@pure
def centres(
    rates: Sequence[tuple[Fraction, Fraction]], gpus: Sequence[int], parts: Sequence[RankShare]
) -> tuple[Sequence[Fraction], Iterator[Sequence[tuple[Tree, Tree]]]]:
    """The shares of the pipelines, and for turn after turn their trees."""
    parts = parts or divide(*(np.array([float(pair[side]) for pair in rates]) for side in (0, 1)))
    return in_turns(parts, gpus or [1] * len(rates), star)


def star(share: RankShare, turn: int, gpus: Sequence[int]) -> tuple[Tree, Tree]:
    """The trees over the ranks to reduce and to broadcast `share` along: a star around `share.reduced`, from where the
    sum goes to `share.broadcast` and to all others. The order of these rotates with the `turn`.

    >>> star(RankShare(2, 0, Fraction(1)), 0, [1] * 4)
    (Tree(2 <- 0, 2 <- 1, 2 <- 3), Tree(2 <- 0, 0 <- 1, 0 <- 3))
    """
    p, u, v = len(gpus), share.reduced, share.broadcast
    others = [each % p for each in range(v + 1 + turn, v + 1 + turn + p) if each % p not in (u, v)]
    up = _around(u, [each for each in range(p) if each != u])
    down = _around(u, others) if u == v else Tree(column([u, v, *others]), column([-1, u, *[v] * len(others)]))
    return (up, down) if max(gpus) == 1 else (with_gpus(up, gpus, turn), with_gpus(down, gpus, turn))


@pure
def owners(gpus: Sequence[int]) -> Callable[[int], Sequence[tuple[Fraction, Tree]]]:
    """For any root, of every rank's slice its share and its tree: the rank adds up its server, and the servers."""
    n_servers, found = len(gpus), list[tuple[Fraction, Tree]]()
    for server, n_gpus in enumerate(gpus):
        around = _around(server, [other for other in range(n_servers) if other != server])
        found += [(Fraction(1, sum(gpus)), with_gpus(around, gpus, place)) for place in range(n_gpus)]
    return lambda _: found


def _around(centre: int, others: Sequence[int]) -> Tree:
    return Tree(column([centre, *others]), column([-1, *[centre] * len(others)]))
