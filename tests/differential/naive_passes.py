"""The passes `depend`, `lower` and `fuse` once more, over dictionaries and lists: slow and plain."""

from __future__ import annotations

from optcc.arrays import Column, Lists, column
from optcc.plan import (
    LOCAL_COPY,
    LOCAL_REDUCE,
    RECV,
    RECV_COPY_SEND,
    RECV_REDUCE,
    RECV_REDUCE_SEND,
    SEND,
    Channel,
    Plan,
)
from optcc.schedule import COPY, REDUCE
from optcc.transfers import Transfers


def naive_after(transfers: Transfers, unit: int = 4) -> list[list[int]]:
    """What each transfer comes after, from the last writer and the readers of every `unit` bytes."""
    writer: dict[tuple[int, int], int] = {}
    readers: dict[tuple[int, int], list[int]] = {}
    after = []
    columns = (transfers.src, transfers.dst, transfers.src_offset, transfers.dst_offset, transfers.bytes)
    for t, (src, dst, read, write, size) in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
        reads = [(src, read + at) for at in range(0, size, unit)]
        writes = [(dst, write + at) for at in range(0, size, unit)]
        before = {writer[each] for each in reads if each in writer}
        for each in writes:
            before |= set(readers.get(each, ())) or ({writer[each]} if each in writer else set())
        for each in reads:
            readers.setdefault(each, []).append(t)
        for each in writes:
            writer[each], readers[each] = t, []
        after.append(sorted(before))
    return after


def naive_lower(transfers: Transfers, order: Column, slots: int) -> Plan:
    """The plan that performs `transfers` in `order`, its lanes filled one transfer at a time."""
    src, dst = transfers.src.tolist(), transfers.dst.tolist()
    pairs = sorted({(s, d) for s, d in zip(src, dst, strict=True) if s != d})
    lanes: dict[tuple[int, str], list[int]] = {}
    for t in order.tolist():
        if src[t] == dst[t]:
            lanes.setdefault((dst[t], "local"), []).append(t)
        else:
            lanes.setdefault((src[t], "send"), []).append(t)
            lanes.setdefault((dst[t], "receive"), []).append(t)
    rows = [(*key, t) for key in sorted(lanes) for t in lanes[key]]
    number = {row: i for i, row in enumerate(rows)}
    after: list[list[int]] = []
    for rank, lane, t in rows:
        halves = [(rank, other, u) for u in transfers.after[t].tolist() for other in ("local", "receive")]
        if lane != "send":
            halves += [(rank, "send", u) for u in transfers.after[t].tolist()]
        after.append(sorted(number[half] for half in halves if half in number))
    kinds = {
        "send": {REDUCE: SEND, COPY: SEND},
        "receive": {REDUCE: RECV_REDUCE, COPY: RECV},
        "local": {REDUCE: LOCAL_REDUCE, COPY: LOCAL_COPY},
    }
    ends, start = [], 0
    for key in sorted(lanes):
        ends.append(list(range(start, start + len(lanes[key]))))
        start += len(lanes[key])
    return Plan(
        "naive",
        transfers,
        tuple(Channel(s, d, slots) for s, d in pairs),
        lane_rank=column(rank for rank, _ in sorted(lanes)),
        lanes=Lists.of(ends),
        kind=column(kinds[lane][int(transfers.op[t])] for _, lane, t in rows),
        in_channel=column(pairs.index((src[t], dst[t])) if lane == "receive" else -1 for _, lane, t in rows),
        out_channel=column(pairs.index((src[t], dst[t])) if lane == "send" else -1 for _, lane, t in rows),
        src_offset=column(-1 if lane == "receive" else int(transfers.src_offset[t]) for _, lane, t in rows),
        dst_offset=column(-1 if lane == "send" else int(transfers.dst_offset[t]) for _, lane, t in rows),
        bytes=column(int(transfers.bytes[t]) for _, _, t in rows),
        recv_transfer=column(-1 if lane == "send" else t for _, lane, t in rows),
        send_transfer=column(t if lane == "send" else -1 for _, lane, t in rows),
        after=Lists.of(after),
    )


Time = tuple[int, int]
"""A place in the order, and how many instructions earlier than that (not positive): compared one after the other."""


def naive_partners(plan: Plan, order: Column, most_between: int = 1) -> tuple[dict[int, int], dict[int, Time]]:
    """For each receive that `fuse` fuses its send, and the time that it gives to every instruction."""
    sender = {int(t): i for i, t in enumerate(plan.send_transfer) if t >= 0}
    receiver = {int(t): i for i, t in enumerate(plan.recv_transfer) if t >= 0}
    place = {t: at for at, t in enumerate(order.tolist())}
    time: dict[int, Time] = {i: (place[t], 0) for t, i in sender.items()}
    waiters: dict[int, list[int]] = {i: [] for i in range(len(plan))}
    for i, before in enumerate(plan.after):
        for each in before:
            waiters[each].append(i)
    partner: dict[int, int] = {}
    for t in reversed(order.tolist()):
        receive = receiver[t]
        rank = int(plan.instruction_rank[receive])
        lane = plan.lanes[int(plan.instruction_lane[receive])].tolist()
        behind = lane[lane.index(receive) + 1 :]
        waiting = [*waiters[receive], *behind[:1]]
        if t in sender:
            slots = plan.channels[int(plan.in_channel[receive])].slots
            waiting += [sender[int(plan.recv_transfer[each])] for each in behind[slots - 1 : slots]]
        first = min((time[each] for each in waiting), default=(len(order), 0))
        time[receive] = (first[0], first[1] - 1)
        passing = [
            i
            for i in waiters[receive]
            if plan.kind[i] == SEND
            and i not in partner.values()
            and (plan.src_offset[i], plan.bytes[i]) == (plan.dst_offset[receive], plan.bytes[receive])
        ]
        if t not in sender or not passing or sum(channel.dst == rank for channel in plan.channels) != 1:
            continue
        send = passing[0]
        sends = plan.lanes[int(plan.instruction_lane[send])].tolist()
        between = sum(time[each] < (place[t], 0) for each in sends)
        if sends.index(send) - between <= most_between and all(time[send] < time[i] for i in waiting if i != send):
            partner[receive], time[receive] = send, time[send]
    return partner, time


def naive_fuse(plan: Plan, order: Column) -> Plan:
    """`plan` with the pairs of `naive_partners` made one instruction each."""
    partner, time = naive_partners(plan, order)
    receive_of = {send: receive for receive, send in partner.items()}
    moved = {int(plan.instruction_lane[receive]) for receive in partner}
    lane_rank, lanes = [], []
    for lane, members in enumerate(plan.lanes):
        if lane in moved:
            continue
        rank = plan.lane_rank[lane]
        if plan.kind[members[0]] == SEND:
            joining = [i for other in moved if plan.lane_rank[other] == rank for i in plan.lanes[other].tolist()]
            members = sorted([*members, *(i for i in joining if i not in partner)], key=lambda i: time[i])
        lane_rank.append(int(rank))
        lanes.append(members)
    kept = [i for lane in lanes for i in lane]
    number = {i: new for new, i in enumerate(kept)}
    number |= {receive: number[send] for receive, send in partner.items()}
    received = [receive_of.get(i, i) for i in kept]
    after = [
        sorted({number[int(j)] for half in {i, r} for j in plan.after[half]} - {number[i]})
        for i, r in zip(kept, received, strict=True)
    ]
    fused = {RECV: RECV_COPY_SEND, RECV_REDUCE: RECV_REDUCE_SEND}
    return Plan(
        plan.name,
        plan.transfers,
        plan.channels,
        lane_rank=column(lane_rank),
        lanes=Lists.of([[number[i] for i in lane] for lane in lanes]),
        kind=column(
            int(plan.kind[i]) if i == r else fused[int(plan.kind[r])] for i, r in zip(kept, received, strict=True)
        ),
        in_channel=column(plan.in_channel[received]),
        out_channel=column(plan.out_channel[kept]),
        src_offset=column(int(plan.src_offset[i]) if i == r else -1 for i, r in zip(kept, received, strict=True)),
        dst_offset=column(plan.dst_offset[received]),
        bytes=column(plan.bytes[kept]),
        recv_transfer=column(plan.recv_transfer[received]),
        send_transfer=column(plan.send_transfer[kept]),
        after=Lists.of(after),
    )
