"""How many lanes each pair of ranks has, and which of them a transfer takes.

    before  every pair of ranks has one lane      after  a pair that carries twice as much has twice as many

Ports that are shared fairly give every transfer that is on its way the same rate, and each lane has one on its way. So
the lanes of a pair are its weight: with lanes in proportion to the bytes, the pairs that carry much do not fall behind
while the others wait for them.

Or every stage and operation has lanes of its own (`lanes_by_stage`): in a shared lane a send that waits for data blocks
all sends behind it, whatever their stage.

Or a rank has a window (`lanes_by_window`): it sends its part of a limited number of segments at a time, and receives
the results of as many. With weights that are only approximately right, some pairs still run ahead, and a segment is not
complete until its last pair is; a window keeps all pairs of a rank at the same segments, whatever they carry.
"""

from __future__ import annotations

import numpy as np

from optcc.arrays import Column, column
from optcc.schedule import REDUCE
from optcc.transfers import Transfers

LANES_MAX = 16
"""Of a pair."""
ALL_PAIRS_MAX = 64
"""So many servers at most have lanes for all pairs; a schedule for fair ports and more of them makes do with fewer."""


def lanes_by_pair(transfers: Transfers, lanes_mean: int) -> Column:
    """For each transfer, which of the lanes of its two ranks it takes: they take turns, in the author's order.

    A pair that carries the mean of the pairs that carry anything has `lanes_mean` lanes; with 0 all have one.
    """
    pair = transfers.src * transfers.n_ranks + transfers.dst
    line = np.argsort(pair, kind="stable")
    turn = np.empty(len(pair), dtype=np.int64)
    turn[line] = np.arange(len(pair)) - np.searchsorted(pair[line], pair[line])
    return column(np.where(transfers.src != transfers.dst, turn % _in_proportion(transfers, pair, lanes_mean), 0))


def _in_proportion(transfers: Transfers, key: Column, lanes_mean: int) -> Column:
    """For each transfer how many lanes there are for its `key`: `lanes_mean` if what they carry between ranks is the
    mean of the keys that carry anything, at least one, and one with 0."""
    carried = np.bincount(key, transfers.bytes * (transfers.src != transfers.dst)) if lanes_mean else np.zeros(1)
    if not carried.any():
        return column(np.ones(len(key), dtype=np.int64))
    lanes = np.rint(lanes_mean * carried / carried[carried > 0].mean())
    return column(np.clip(lanes, 1, LANES_MAX).astype(np.int64)[key])


def lanes_by_stage(transfers: Transfers, lanes_mean: int) -> Column:
    """For each transfer, which of the lanes of its two ranks it takes: each stage and operation has its own.

    What a pair carries in a stage and operation has as many lanes as it is of the mean of these, times `lanes_mean`,
    and at least one; with 0 it has one. Two segments one behind the other take the same lane, the next two the next
    one: patterns often take turns segment by segment.
    """
    kind = 2 * transfers.stage + transfers.op
    pair = transfers.src * transfers.n_ranks + transfers.dst
    lanes = _in_proportion(transfers, pair * 2 * len(transfers.stages) + kind, lanes_mean)
    return column(kind * int(lanes.max(initial=1)) + transfers.segment // 2 % lanes)


def lanes_by_window(transfers: Transfers, window: int, slots: int) -> tuple[tuple[Column, Column], Column]:
    """For each transfer the lane of its sender and that of its receiver, and the slots of the latter.

    A rank sends its parts of sums in `window` lanes, in which the segments take turns, and receives copies in as many,
    with `slots`. What it receives to add up, and what it sends to copy, waits for the other ends only: there are slots
    for twice a window, and a lane for each peer.
    """
    turn = transfers.segment % window
    adds = transfers.op == REDUCE
    send = np.where(adds, turn, window + transfers.dst)
    receive = np.where(adds, turn, window + turn)
    return (column(send), column(receive)), column(np.where(adds, 2 * window, slots))
