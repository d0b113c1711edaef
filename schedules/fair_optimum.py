"""The exact optimum where ports are shared fairly: every rank is the centre of a share of the message.

Rank i owns a share w_i of the message: all send i their part of it, and i sends the sum back to all. Then rank i sends
its parts of the others' shares, 1 - w_i of the message, and its own share to p - 1 others: together 1 + w_i (p - 2)
times the message, and it receives as much. The shares add up to one, so the loads add up to 2(p - 1), and any loads of
at least 1 with that sum are the loads of such shares. Loads in proportion to the rates attain the bound T*.

Out and in apart: a share is reduced at u and broadcast from v, and u sends the sum to v. Then u's in port and v's out
port have the additional load of p - 2, and all others carry the share once. So the shares of the centres of the
reductions follow from the in rates, those of the broadcasts from the out rates, and any coupling of the two is valid;
the one used has u = v for as much as possible, and at most 2p - 1 pairs (u, v).

Fair ports serve all flows at once, so every rank sends to all others concurrently: while a message to one rank waits
for a slot or for its data, the messages to the others use the port. Slots and lane order limit how far one pair can run
ahead of the others, so with few slots the pairs stay in step. With equal rates, and with one straggler, the max-min
fair rates are those that the pairs need, and no port idles. With other rates they are not;
`optcc.passes.lane_assignment` then gives a pair that carries more several lanes, in proportion, which act as the
weight of the pair.

With more than `ALL_PAIRS_MAX` servers only pairs within rows exchange directly: see `optcc.schedules.grid_trees`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import cycle
from math import lcm
from typing import NamedTuple

import numpy as np

from optcc.arrays import column
from optcc.dsl import Program, pure, schedule
from optcc.passes.lane_assignment import ALL_PAIRS_MAX
from optcc.schedules.grid_trees import row_trees
from optcc.schedules.loads import Loads, port_loads, rates, with_gpus
from optcc.schedules.tree_turns import together
from optcc.trees import Tree

PARTS = 2**24
"""Shares are rounded to multiples of 1/PARTS."""


class RankShare(NamedTuple):
    """The part `weight` of the message is reduced at server `reduced` and broadcast from server `broadcast`."""

    reduced: int
    broadcast: int
    weight: Fraction


@schedule(
    accepts="any servers, out and in apart; NICs of a server pooled",
    paper="optcc, docs/bounds.md: the fluid optimum by stars",
    configure=rates,
    lane_per_peer=True,
)
def shares(
    program: Program,
    rates: Sequence[tuple[Fraction, Fraction]],
    gpus: Sequence[int] = (),
    parts: Sequence[RankShare] = (),
) -> None:
    """Everyone is the centre of a share that follows from its rates; for ports that all transfers share fairly.

    With k segments and one straggler (k + 1)/k times n * max(1/out_v, 1/in_v, 2(p-1)/sum out, 2(p-1)/sum in), and two
    hops, three if out and in differ. A segment of all shares has 2(p - 1) transfers for each. While a segment is
    reduced the one before it is broadcast. GPUs of a server form a star around each in turn. With more than 64
    servers a segment is one tree up and one down, of 2(p - 1) transfers; it takes some 1000 of them. `parts` are other
    shares than those that follow from the rates.

    >>> schedule = shares(n_ranks=4, segments=3, rates=[(2, 2), (2, 2), (2, 2), (1, 1)])
    >>> schedule.stages, len(schedule)
    (('reduce', 'broadcast'), 54)
    """
    weights, turns, lag = centres(rates, gpus, parts)
    for reducing, broadcasting in together(program, weights, turns, lag):
        with program.stage("reduce"):
            for _, segment, up in reducing:
                segment[0].reduce_along(up)
        with program.stage("broadcast"):
            for _, segment, down in broadcasting:
                segment[0].broadcast_along(down)


@pure
def centres(
    rates: Sequence[tuple[Fraction, Fraction]], gpus: Sequence[int], parts: Sequence[RankShare]
) -> tuple[Sequence[Fraction], Iterator[Sequence[tuple[Tree, Tree]]], int]:
    """The shares of the pipelines, for turn after turn their trees, and how many turns later a share is broadcast."""
    out, in_ = (np.array([float(pair[side]) for pair in rates]) for side in (0, 1))
    each = gpus or [1] * len(rates)
    if len(rates) > ALL_PAIRS_MAX:
        return (Fraction(1),), ([pair] for pair in row_trees(out, in_, each)), 0
    return *in_turns(parts or divide(out, in_), each, stars), 1


def in_turns(
    parts: Sequence[RankShare], gpus: Sequence[int], find: Callable[[RankShare, int, Sequence[int]], tuple[Tree, Tree]]
) -> tuple[Sequence[Fraction], Iterator[Sequence[tuple[Tree, Tree]]]]:
    """The shares of the pipelines, and for turn after turn their trees, which `find` makes of a share, a turn and the
    number of ranks of each server."""
    turns = cycle([find(part, turn, gpus) for part in parts] for turn in range(lcm(len(gpus), *gpus)))
    return [part.weight for part in parts], turns


def divide(out: Loads, in_: Loads) -> tuple[RankShare, ...]:
    """The shares for servers of these rates; they add up to one.

    >>> rates = np.array([2.0, 2.0, 2.0, 1.0])
    >>> [(share.reduced, share.broadcast, round(float(share.weight), 3)) for share in divide(rates, rates)]
    [(0, 0, 0.333), (1, 1, 0.333), (2, 2, 0.333)]
    """
    p = len(out)
    if p == 1:
        return (RankShare(0, 0, Fraction(1)),)
    if p == 2:
        return tuple(RankShare(server, server, Fraction(1, 2)) for server in range(2))
    up, down = ((port_loads(rates, 2.0 * (p - 1)) - 1) / (p - 2) for rates in (in_, out))
    both = np.minimum(up, down)
    found = [(server, server, weight) for server, weight in enumerate(both)]
    up, down = up - both, down - both
    u = v = 0
    while u < p and v < p:
        weight = min(up[u], down[v])
        found.append((u, v, weight))
        up[u] -= weight
        down[v] -= weight
        u, v = (u + 1, v) if up[u] <= down[v] else (u, v + 1)
    whole = [round(weight * PARTS) for _, _, weight in found]
    whole[int(np.argmax(whole))] += PARTS - sum(whole)
    return tuple(RankShare(u, v, Fraction(n, PARTS)) for (u, v, _), n in zip(found, whole, strict=True) if n)


def stars(share: RankShare, turn: int, gpus: Sequence[int]) -> tuple[Tree, Tree]:
    """The trees over the ranks to reduce and to broadcast `share` along; the first ends and the second starts at the
    same rank. The order of children rotates with the `turn`."""
    p = len(gpus)
    others = [rank % p for rank in range(share.broadcast + 1 + turn, share.broadcast + 1 + turn + p)]
    others.remove(share.broadcast)
    down = Tree(column([share.broadcast, *others]), column([-1, *[share.broadcast] * (p - 1)]))
    up = down
    if share.reduced != share.broadcast:
        others.remove(share.reduced)
        above = [-1, share.broadcast, *[share.reduced] * (p - 2)]
        up = Tree(column([share.broadcast, share.reduced, *others]), column(above))
    return (up, down) if max(gpus) == 1 else (with_gpus(up, gpus, turn), with_gpus(down, gpus, turn))
