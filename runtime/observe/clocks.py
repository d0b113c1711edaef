"""The clocks of ranks on several hosts, aligned by what cannot have come before what.

A message is received after it was posted, and a collective that every rank contributes to ends nowhere before the last
rank has begun it. Each such pair bounds the difference of two clocks. The bounds between rank 0 and each other rank in
both directions are shortest paths; halfway between them every bound holds, because the offsets that keep all bounds are
a convex set and both ends are in it (Lamport's order of events, CACM 21(7), 1978, as difference constraints).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np


class HappenedBefore(NamedTuple):
    """What happened at rank `before`, at that second of its clock, came before what happened at rank `after`."""

    before: int
    before_s: float
    after: int
    after_s: float


class ClockOffset(NamedTuple):
    """What to add to a rank's clock to have that of the reference, within so many seconds; infinite if unknown."""

    offset_s: float
    within_s: float


def align(ranks: Iterable[int], orders: Iterable[HappenedBefore], hosts: Mapping[int, str]) -> dict[int, ClockOffset]:
    """The offsets to the clock of the first of `ranks`; ranks of one host (`hosts`) share a clock.

    Where the bounds contradict each other, as clocks that drift apart over a long time do, those of unequal hosts are
    unknown: their offset is 0 within infinity.

    >>> orders = [HappenedBefore(0, 10.0, 1, 25.5), HappenedBefore(1, 26.0, 0, 11.5)]
    >>> align([0, 1], orders, {0: "a", 1: "b"})[1]
    ClockOffset(offset_s=-15.0, within_s=0.5)
    """
    # Every process imports this module, and few align clocks: SciPy takes as long to import as all of optcc.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import NegativeCycleError, bellman_ford

    order = list(dict.fromkeys(hosts[rank] for rank in ranks))
    index = {host: number for number, host in enumerate(order)}
    n = len(order)
    # slack[i, j]: clock i's offset is at most this much above clock j's.
    slack = np.full((n, n), np.inf)
    for each in orders:
        i, j = index[hosts[each.before]], index[hosts[each.after]]
        if i != j:
            slack[i, j] = min(slack[i, j], each.after_s - each.before_s)
    known = np.isfinite(slack)
    rows, columns = np.nonzero(known)
    graph = csr_array((slack[known], (rows, columns)), shape=(n, n))
    try:
        # The offset of host 0 is 0: along the arcs it bounds others from below, against them from above.
        below = -bellman_ford(graph, indices=0)
        above = bellman_ford(graph.T.tocsr(), indices=0)
    except NegativeCycleError:
        below, above = np.full(n, -np.inf), np.full(n, np.inf)
        below[0] = above[0] = 0.0
    found = {}
    for rank in ranks:
        low, high = float(below[index[hosts[rank]]]), float(above[index[hosts[rank]]])
        if np.isfinite(low) and np.isfinite(high):
            found[rank] = ClockOffset((low + high) / 2, (high - low) / 2)
        else:
            found[rank] = ClockOffset(next((each for each in (low, high) if np.isfinite(each)), 0.0), float("inf"))
    return found
