"""Transfers become instructions in lanes.

before  #0 0->1 reduce           after  rank 0, send lane: send        on channel 0->1
        #1 1->2 reduce after #0         rank 1, receive lane: receive-reduce
                                        rank 1, send lane: send on channel 1->2 after the receive-reduce
"""

from __future__ import annotations

from optcc.arrays import Column, Lists, column
from optcc.plan import (
    LOCAL_COPY,
    LOCAL_REDUCE,
    RECV,
    RECV_REDUCE,
    SEND,
    Channel,
    Plan,
)
from optcc.schedule import REDUCE
from optcc.transfers import Transfers


def lower(name: str, transfers: Transfers, order: Column, slots: int) -> Plan:
    """The plan that performs `transfers` in `order` on every port, with `slots` slots on each receive lane.

    Each rank has one lane that sends, one that receives, and one for local operations; within a lane the instructions
    stand in `order`. All conflicts between transfers are conflicts on one rank's bytes, so `after` turns into
    dependencies between instructions of one rank. Nothing waits for what comes later in `order`: no deadlock.
    """
    src, dst, op = transfers.src.tolist(), transfers.dst.tolist(), transfers.op.tolist()
    pairs = sorted({(s, d) for s, d in zip(src, dst, strict=True) if s != d})
    channel_of = {pair: number for number, pair in enumerate(pairs)}
    lane_of: dict[tuple[int, str], list[tuple[int, bool]]] = {}
    for t in order.tolist():
        if src[t] == dst[t]:
            lane_of.setdefault((src[t], "local"), []).append((t, False))
        else:
            lane_of.setdefault((src[t], "send"), []).append((t, True))
            lane_of.setdefault((dst[t], "receive"), []).append((t, False))

    keys = sorted(lane_of)
    sender, receiver = [-1] * len(transfers), [-1] * len(transfers)
    rows: list[tuple[int, bool]] = []
    lanes: list[list[int]] = []
    for key in keys:
        lanes.append(list(range(len(rows), len(rows) + len(lane_of[key]))))
        for t, sends in lane_of[key]:
            (sender if sends else receiver)[t] = len(rows)
            rows.append((t, sends))

    kind, in_channel, out_channel, after = [], [], [], []
    dependencies = list(transfers.after)
    for t, sends in rows:
        local = src[t] == dst[t]
        rank = src[t] if sends else dst[t]
        reduces = op[t] == REDUCE
        kind.append(
            SEND if sends else (LOCAL_REDUCE if reduces else LOCAL_COPY) if local else RECV_REDUCE if reduces else RECV
        )
        out_channel.append(channel_of[src[t], dst[t]] if sends else -1)
        in_channel.append(-1 if sends or local else channel_of[src[t], dst[t]])
        before = {receiver[u] for u in dependencies[t] if dst[u] == rank}
        if not sends:
            before |= {sender[u] for u in dependencies[t] if src[u] == rank and sender[u] >= 0}
        after.append(sorted(before))
    which = [t for t, _ in rows]
    reads = [sends or src[t] == dst[t] for t, sends in rows]
    return Plan(
        name,
        transfers,
        tuple(Channel(s, d, slots) for s, d in pairs),
        lane_rank=column(rank for rank, _ in keys),
        lanes=Lists.of(lanes),
        kind=column(kind),
        in_channel=column(in_channel),
        out_channel=column(out_channel),
        src_offset=column(int(transfers.src_offset[t]) if read else -1 for t, read in zip(which, reads, strict=True)),
        dst_offset=column(-1 if sends else int(transfers.dst_offset[t]) for t, sends in rows),
        bytes=column(transfers.bytes[which] if which else []),
        recv_transfer=column(-1 if sends else t for t, sends in rows),
        send_transfer=column(t if sends else -1 for t, sends in rows),
        after=Lists.of(after),
    )
