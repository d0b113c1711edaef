"""Transfers become instructions in lanes.

before  #0 0->1 reduce           after  rank 0, send lane: send        on channel 0->1
        #1 1->2 reduce after #0         rank 1, receive lane: receive-reduce
                                        rank 1, send lane: send on channel 1->2 after the receive-reduce
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column, Lists, column, sort_part
from optcc.compiled import compiled
from optcc.passes.lane_assignment import LaneAssignment, one_lane
from optcc.plan import (
    LOCAL_COPY,
    LOCAL_REDUCE,
    RECV,
    RECV_REDUCE,
    SEND,
    Channel,
    Plan,
)
from optcc.schedule import COPY, REDUCE
from optcc.timing import Model
from optcc.transfers import Transfers

_LOCAL, _RECEIVE, _SEND = range(3)
"""What the lanes of a rank do, in the order in which they stand."""


def lower(
    name: str,
    transfers: Transfers,
    order: Column,
    lanes: LaneAssignment | int,
    receives: Column | None = None,
    *,
    ports: Model | None = None,
) -> Plan:
    """The plan that performs `transfers` in `order` in every lane of `lanes`.

    A number instead of `lanes` stands for one lane that sends and one that receives, with so many slots. Each rank also
    has a lane for local operations; empty lanes are left out. `ports` is the port model that `order` was made for. All
    conflicts between transfers are conflicts on one rank's bytes, so `after` becomes dependencies between instructions
    of one rank. No instruction depends on a later one in `order`, so the plan is free of deadlock.

    Where messages overtake each other on their way, `receives` is the order in which they arrive at their receive
    lanes; it must be that of a run in which no receiver had more than its slots on the way: that run then proves the
    plan free of deadlock.
    """
    src, dst = transfers.src, transfers.dst
    if isinstance(lanes, int):
        lanes = one_lane(transfers, lanes)
    # `peers` lanes of a rank receive, and as many send; there are up to `width` channels between two ranks.
    to, from_, width = lanes.send, lanes.receive, int(lanes.channel.max(initial=0)) + 1
    peers = max(int(to.max(initial=0)), int(from_.max(initial=0))) + 1
    lanes_each = 1 + 2 * peers  # of a rank: local, then receiving, then sending
    n_lanes = lanes_each * transfers.n_ranks
    local = src == dst
    last = lanes_each * dst + np.where(local, 0, 1 + from_)  # the lane in which a transfer ends
    first = np.where(local, -1, lanes_each * src + 1 + peers + to)  # the lane in which it starts
    counts = np.bincount(last, minlength=n_lanes) + np.bincount(first[~local], minlength=n_lanes)
    starts = np.concatenate(([0], np.cumsum(counts)))
    transfer = np.empty(starts[-1], dtype=np.int64)
    sender, receiver = np.full(len(src), -1, dtype=np.int64), np.empty(len(src), dtype=np.int64)
    free = starts[:-1].copy()
    _kernels().place(order, first, free, transfer, sender)
    _kernels().place(order if receives is None else receives, last, free, transfer, receiver)

    used = np.flatnonzero(counts)
    side = np.repeat((used % lanes_each + peers - 1) // peers, counts[used])
    is_send, is_receive = side == _SEND, side == _RECEIVE
    channel, ends = np.full(len(src), -1, dtype=np.int64), np.empty((int(is_send.sum()), 2), dtype=np.int64)
    end = dst * width + lanes.channel
    n_channels = _kernels().number_channels(transfer[is_send], src, end, transfers.n_ranks * width, channel, ends)
    slots_of = np.empty(n_channels, dtype=np.int64)
    slots_of[channel[~local]] = lanes.slots[~local]
    after_starts = np.zeros(len(transfer) + 1, dtype=np.int64)
    waits = transfers.after
    after = _kernels().wait_on_rank(
        transfer, is_send, waits.starts, waits.values, src, dst, sender, receiver, after_starts
    )
    kind = np.empty((3, 2), dtype=np.int64)
    kind[_LOCAL, REDUCE], kind[_LOCAL, COPY] = LOCAL_REDUCE, LOCAL_COPY
    kind[_RECEIVE, REDUCE], kind[_RECEIVE, COPY] = RECV_REDUCE, RECV
    kind[_SEND] = SEND
    return Plan(
        name,
        transfers,
        tuple(
            Channel(s, d // width, n) for (s, d), n in zip(ends[:n_channels].tolist(), slots_of.tolist(), strict=True)
        ),
        lane_rank=column(used // lanes_each),
        lanes=Lists(column(np.concatenate(([0], np.cumsum(counts[used])))), column(np.arange(len(transfer)))),
        kind=column(kind[side, transfers.op[transfer]]),
        in_channel=column(np.where(is_receive, channel[transfer], -1)),
        out_channel=column(np.where(is_send, channel[transfer], -1)),
        src_offset=column(np.where(is_receive, -1, transfers.src_offset[transfer])),
        dst_offset=column(np.where(is_send, -1, transfers.dst_offset[transfer])),
        bytes=column(transfers.bytes[transfer]),
        recv_transfer=column(np.where(is_send, -1, transfer)),
        send_transfer=column(np.where(is_send, transfer, -1)),
        after=Lists(column(after_starts), column(after)),
        ports=ports,
    )


@cache
def _kernels() -> Any:
    """The functions of `_KERNELS` by name, compiled if numba is there."""
    return compiled(_KERNELS, globals())


def _place(order: Column, lane: Column, free: Column, transfer: Column, instruction: Column) -> None:
    """Puts every transfer of `order` that has a `lane` into it: `free[l]` is the next free instruction of lane l.

    `transfer` is for each instruction the transfer that it is about, `instruction` the way back.
    """
    for index in order:
        if lane[index] >= 0:
            instruction[index] = free[lane[index]]
            transfer[instruction[index]] = index
            free[lane[index]] += 1


def _number_channels(sent: Column, src: Column, dst: Column, n_ranks: int, channel: Column, ends: Column) -> int:
    """Numbers the channels by sender, then receiver, and returns how many there are; `sent` is sorted by sender.

    `channel` is for each transfer its channel, `ends` for each channel its two ranks.
    """
    number = np.full(n_ranks, -1, dtype=np.int64)  # the number of the channel to each rank
    peers = np.empty(n_ranks, dtype=np.int64)
    count = begin = 0
    while begin < len(sent):
        rank = src[sent[begin]]
        n_peers = 0
        stop = begin
        while stop < len(sent) and src[sent[stop]] == rank:
            if number[dst[sent[stop]]] < count:
                number[dst[sent[stop]]] = count
                peers[n_peers] = dst[sent[stop]]
                n_peers += 1
            stop += 1
        sort_part(peers, 0, n_peers)
        for place in range(n_peers):
            number[peers[place]] = count + place
            ends[count + place, 0], ends[count + place, 1] = rank, peers[place]
        for at in range(begin, stop):
            channel[sent[at]] = number[dst[sent[at]]]
        count += n_peers
        begin = stop
    return count


def _wait_on_rank(
    transfer: Column,
    is_send: npt.NDArray[np.bool_],
    after_starts: Column,
    after: Column,
    src: Column,
    dst: Column,
    sender: Column,
    receiver: Column,
    starts: Column,
) -> Column:
    """What each instruction waits for on its rank, list behind list, ascending; `starts[i + 1]` becomes the end of i's.

    A send reads, so it waits for what was written; what writes waits for what was read as well.
    """
    room = 0
    for index in range(len(transfer)):
        room += (1 if is_send[index] else 2) * (after_starts[transfer[index] + 1] - after_starts[transfer[index]])
    found = np.empty(room, dtype=np.int64)
    used = 0
    for index in range(len(transfer)):
        begin = used
        rank = src[transfer[index]] if is_send[index] else dst[transfer[index]]
        for at in range(after_starts[transfer[index]], after_starts[transfer[index] + 1]):
            earlier = after[at]
            if dst[earlier] == rank:
                found[used] = receiver[earlier]
                used += 1
            if not is_send[index] and src[earlier] == rank and sender[earlier] >= 0:
                found[used] = sender[earlier]
                used += 1
        sort_part(found, begin, used)
        starts[index + 1] = used
    return found[:used]


_KERNELS = (sort_part, _place, _number_channels, _wait_on_rank)
