"""Which lane of its sender and which lane of its receiver each transfer takes.

    before  every rank sends in one lane         after  a pair of ranks that carries twice as much has twice as many
            and receives in one                         lanes of its own

One lane (`one_lane`) serialises a rank's sends: it keeps the order of a timetable. So does a lane for each port of a
rank (`lanes_by_port`), where a rank has several: its link inside the server and its NIC.

Lanes for each pair of ranks, in proportion to the bytes that the pair carries (`lanes_by_pair`), act as weights: ports
that are shared fairly give every transfer in flight the same rate, and each lane has one in flight. So pairs that carry
much do not fall behind.

Lanes for each pair, stage and operation (`lanes_by_stage`): in a shared lane a send that waits for data blocks all
sends behind it, whatever their stage.

Lanes by weight (`lanes_by_weight`): the same in whole proportions, for stages that carry different shares.

A window (`lanes_by_window`): a rank sends its part of a limited number of segments at a time, and receives the results
of as many. With weights that are only approximately right, some pairs run ahead, and a segment is not complete until
its last pair is; a window keeps all pairs of a rank at the same segments, whatever they carry.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optcc.arrays import Column, column
from optcc.graph import Graph
from optcc.routing import lanes_of_ports
from optcc.schedule import REDUCE
from optcc.transfers import Transfers

LANES_MAX = 16
"""Of a pair."""
WEIGHTS_MAX, WEIGHT_ERROR = 4, 0.05
"""`lanes_by_weight` gives what carries least up to so many lanes, to come as near to the proportions."""
ALL_PAIRS_MAX = 64
"""With more servers than this, a schedule for fair ports does not use all pairs at once."""


class LaneAssignment(NamedTuple):
    """Columns with an entry for each transfer: its lane among those in which its sender sends, its lane among those in
    which its receiver receives, and the slots of that lane.

    Transfers between the same two ranks share a channel if they have the same `channel`.
    """

    send: Column
    receive: Column
    channel: Column
    slots: Column

    def equals(self, other: LaneAssignment) -> bool:
        """True if `other` has the same columns."""
        return all(map(np.array_equal, self, other))


def one_lane(transfers: Transfers, slots: int) -> LaneAssignment:
    """Every rank sends in one lane and receives in one."""
    zero = column(np.zeros(len(transfers), dtype=np.int64))
    return LaneAssignment(zero, zero, zero, zero + slots)


def lanes_by_port(transfers: Transfers, graph: Graph, slots: int) -> LaneAssignment:
    """Every rank sends in one lane for each link that leaves it, and receives in one for each that enters it: its links
    work at the same time, each in its order."""
    send, receive = lanes_of_ports(transfers, graph)
    zero = column(np.zeros(len(transfers), dtype=np.int64))
    return LaneAssignment(send, receive, zero, zero + slots)


def lanes_by_pair(transfers: Transfers, lanes_mean: int, slots: int) -> LaneAssignment:
    """Every pair of ranks has lanes of its own, which its transfers take in turns, in the author's order.

    A pair that carries the mean of the pairs that carry anything has `lanes_mean` lanes; with 0 all have one.
    """
    pair = transfers.src * transfers.n_ranks + transfers.dst
    in_order = np.argsort(pair, kind="stable")
    turn = np.empty(len(pair), dtype=np.int64)
    turn[in_order] = np.arange(len(pair)) - np.searchsorted(pair[in_order], pair[in_order])
    lane = np.where(transfers.src != transfers.dst, turn % _in_proportion(transfers, pair, lanes_mean), 0)
    return _within_pairs(transfers, lane, slots)


def lanes_by_stage(transfers: Transfers, lanes_mean: int, slots: int) -> LaneAssignment:
    """Every pair of ranks has lanes of its own for each stage and operation.

    What a pair carries in a stage and operation has as many lanes as it is of the mean of these, times `lanes_mean`,
    and at least one; with 0 it has one. Two consecutive segments take the same lane, the next two the next one: many
    patterns alternate from segment to segment.
    """
    kind = 2 * transfers.stage + transfers.op
    pair = transfers.src * transfers.n_ranks + transfers.dst
    lanes = _in_proportion(transfers, pair * 2 * len(transfers.stages) + kind, lanes_mean)
    return _within_pairs(transfers, kind * int(lanes.max(initial=1)) + transfers.segment // 2 % lanes, slots)


def lanes_by_weight(transfers: Transfers, lanes_max: int, slots: int) -> LaneAssignment:
    """Lanes for each pair of ranks, stage and operation in exact proportion to what they carry, up to `lanes_max`.

    The trees of a packing are stages of their own with few different shares: a sixth and a twelfth of the message get
    two lanes and one. Rounded, as in `lanes_by_stage`, their flows do not keep step.
    """
    kind = 2 * transfers.stage + transfers.op
    key = (transfers.src * transfers.n_ranks + transfers.dst) * 2 * len(transfers.stages) + kind
    used, place = np.unique(key, return_inverse=True)
    carried = np.bincount(place, transfers.bytes * (transfers.src != transfers.dst), minlength=len(used))
    weights = np.ones(len(used))
    if carried.any():
        for least in range(1, WEIGHTS_MAX + 1):
            weights = carried * least / carried[carried > 0].min()
            if (abs(np.rint(weights) - weights) <= WEIGHT_ERROR * weights).all():
                break
    lanes = np.clip(np.rint(weights), 1, lanes_max).astype(np.int64)[place]
    return _within_pairs(transfers, kind * int(lanes.max(initial=1)) + transfers.segment % lanes, slots)


def lanes_by_window(transfers: Transfers, window: int, slots: int) -> LaneAssignment:
    """A rank sends its parts of sums in `window` lanes, in which the segments take turns, and receives copies in as
    many, with `slots`; with a window of 0 as `lanes_by_stage`.

    What a rank receives to reduce, and what it sends to copy, depends on the other ends only: there is one lane for
    each peer, with slots for two windows.
    """
    if window == 0:
        return lanes_by_stage(transfers, 0, slots)
    turn = transfers.segment % window
    reduces = transfers.op == REDUCE
    receive = column(np.where(reduces, turn, window + turn))
    send = column(np.where(reduces, turn, window + transfers.dst))
    return LaneAssignment(send, receive, receive, column(np.where(reduces, 2 * window, slots)))


def _in_proportion(transfers: Transfers, key: Column, lanes_mean: int) -> Column:
    """For each transfer how many lanes there are for its `key`: `lanes_mean` if what they carry between ranks is the
    mean of the keys that carry anything, at least one, and one with 0."""
    carried = np.bincount(key, transfers.bytes * (transfers.src != transfers.dst)) if lanes_mean else np.zeros(1)
    if not carried.any():
        return column(np.ones(len(key), dtype=np.int64))
    lanes = np.rint(lanes_mean * carried / carried[carried > 0].mean())
    return column(np.clip(lanes, 1, LANES_MAX).astype(np.int64)[key])


def _within_pairs(transfers: Transfers, lane: Column, slots: int) -> LaneAssignment:
    """Each pair of ranks has lanes of its own, and `lane` says which of them a transfer takes."""
    width = int(lane.max(initial=0)) + 1
    send, receive = transfers.dst * width + lane, transfers.src * width + lane
    return LaneAssignment(column(send), column(receive), column(lane), column(np.full(len(lane), slots)))
