"""How many lanes each pair of ranks has, and which of them a transfer takes.

    before  every pair of ranks has one lane      after  a pair that carries twice as much has twice as many

Ports that are shared fairly give every transfer that is on its way the same rate, and each lane has one on its way. So
the lanes of a pair are its weight: with lanes in proportion to the bytes, the pairs that carry much do not fall behind
while the others wait for them.
"""

from __future__ import annotations

import numpy as np

from optcc.arrays import Column, column
from optcc.transfers import Transfers

LANES_MAX = 16
"""Of a pair."""


def spread(transfers: Transfers, lanes_mean: int) -> Column:
    """For each transfer, which of the lanes of its two ranks it takes: they take turns, in the author's order.

    A pair that carries the mean of the pairs that carry anything has `lanes_mean` lanes; with 0 all have one.
    """
    n = transfers.n_ranks
    pair = transfers.src * n + transfers.dst
    between = transfers.src != transfers.dst
    carried = np.bincount(pair, transfers.bytes * between, minlength=n * n)
    if lanes_mean == 0 or not carried.any():
        return column(np.zeros(len(pair)))
    lanes = np.rint(lanes_mean * carried / carried[carried > 0].mean())
    line = np.argsort(pair, kind="stable")
    turn = np.empty(len(pair), dtype=np.int64)
    turn[line] = np.arange(len(pair)) - np.searchsorted(pair[line], pair[line])
    return column(np.where(between, turn % np.clip(lanes, 1, LANES_MAX).astype(np.int64)[pair], 0))
