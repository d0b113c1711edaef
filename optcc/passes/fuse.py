"""A receive and the send that passes it on become one instruction.

    before  receive-reduce from 0; send to 2        after  receive-reduce-send from 0 to 2

Fusing moves a receive into the send lane, so it may come later than before. That is safe when everything that waits
for it comes later still. Give every instruction a time such that whoever waits has a larger time than what it waits
for: before fusing, a transfer's place in the order will do. Going through the transfers from the last to the first,
each receive gets the latest time that its waiters allow, and is fused if its send's time is below that. The other
receives of its lane join it in the send lane, each at its time. A valid plan stays valid: the times prove that no
instructions wait in a circle.

Only ranks that receive from a single peer are treated: for the others the receive lane is what keeps the in port in
order, and giving that up costs more than an instruction saves.
"""

from __future__ import annotations

from itertools import pairwise

from optcc.arrays import Column, Lists, column
from optcc.plan import RECV, RECV_COPY_SEND, RECV_REDUCE_SEND, SEND, Plan

SENDS_BETWEEN_MAX = 1
"""A receive is not put off past more sends of its rank than this: its slot and its reduction would wait for them."""


def fuse(plan: Plan, order: Column) -> Plan:
    """The same plan with receives fused into the sends that pass on exactly what they wrote.

    `order` is the order in which `lower` placed the transfers; `plan` is what `lower` made.
    """
    partner, time = _partners(plan, order)
    return _merge(plan, partner, time) if partner else plan


def _partners(plan: Plan, order: Column) -> tuple[dict[int, int], dict[int, float]]:
    """For each receive that can be fused, its send; and the time of every instruction."""
    sender, receiver = _instructions_of(plan)
    time: dict[int, float] = {sender[t]: float(place) for place, t in enumerate(order.tolist()) if t in sender}
    waiters: list[list[int]] = [[] for _ in range(len(plan))]
    for instruction, before in enumerate(plan.after):
        for each in before:
            waiters[each].append(instruction)
    following, credited = _lane_waiters(plan)
    sends_before = _sends_before(plan, order, sender, receiver)
    sends_to = {i: position for lane in plan.lanes for position, i in enumerate(lane)}
    ranks = plan.instruction_rank.tolist()
    peers = [0] * plan.n_ranks
    for channel in plan.channels:
        peers[channel.dst] += 1
    epsilon = 1.0 / (4 * len(plan) + 4)
    partner: dict[int, int] = {}
    taken: set[int] = set()
    for t in reversed(order.tolist()):
        receive = receiver[t]
        waiting = [*waiters[receive], *following.get(receive, ()), *credited.get(receive, ())]
        time[receive] = min((time[each] for each in waiting), default=float(len(order))) - epsilon
        if t not in sender:
            continue
        send = _passes_on(plan, receive, waiters[receive], taken) if peers[ranks[receive]] == 1 else None
        if send is None or sends_to[send] - sends_before[t] > SENDS_BETWEEN_MAX:
            continue
        if all(time[send] < time[each] for each in waiting if each != send):
            partner[receive] = send
            taken.add(send)
            time[receive] = time[send]
    return partner, time


def _lane_waiters(plan: Plan) -> tuple[dict[int, tuple[int]], dict[int, tuple[int]]]:
    """For each receive or local operation, the next one of its lane, and the send that waits for its slot."""
    pairs = [pair for sends, receives in plan.channel_ends for pair in zip(receives, sends, strict=True)]
    sent_by = dict(pairs)
    following: dict[int, tuple[int]] = {}
    credited: dict[int, tuple[int]] = {}
    for lane in plan.lanes:
        if plan.kind[lane[0]] != SEND:
            following |= {each: (later,) for each, later in pairwise(lane)}
    for receives, slots in plan.lane_receives:
        credited |= {each: (sent_by[later],) for each, later in zip(receives, receives[slots:], strict=False)}
    return following, credited


def _instructions_of(plan: Plan) -> tuple[dict[int, int], dict[int, int]]:
    """For each transfer, the instruction that sends it (none for a local one) and the one that receives it."""
    sender = {int(t): i for i, t in enumerate(plan.send_transfer.tolist()) if t >= 0}
    receiver = {int(t): i for i, t in enumerate(plan.recv_transfer.tolist()) if t >= 0}
    return sender, receiver


def _sends_before(plan: Plan, order: Column, sender: dict[int, int], receiver: dict[int, int]) -> dict[int, int]:
    """For each transfer, how many sends of the receiving rank stand before it in the order."""
    ranks = plan.instruction_rank.tolist()
    sent = [0] * plan.n_ranks
    result: dict[int, int] = {}
    for t in order.tolist():
        result[t] = sent[ranks[receiver[t]]]
        if t in sender:
            sent[ranks[sender[t]]] += 1
    return result


def _passes_on(plan: Plan, receive: int, waiters: list[int], taken: set[int]) -> int | None:
    """The first send that reads exactly what `receive` writes and has no partner yet."""
    for waiter in waiters:
        if (
            plan.kind[waiter] == SEND
            and waiter not in taken
            and plan.src_offset[waiter] == plan.dst_offset[receive]
            and plan.bytes[waiter] == plan.bytes[receive]
        ):
            return waiter
    return None


def _merge(plan: Plan, partner: dict[int, int], time: dict[int, float]) -> Plan:
    """Rewrites the plan: fused receives disappear into their sends, the others of their channels join the send lane."""
    fused = {send: receive for receive, send in partner.items()}
    moved = {int(plan.in_channel[receive]) for receive in partner}
    lane_rank: list[int] = []
    old_lanes: list[list[int]] = []
    joining: dict[int, list[int]] = {}
    for rank, lane in zip(plan.lane_rank.tolist(), plan.lanes, strict=True):
        if int(plan.in_channel[lane[0]]) in moved:
            joining.setdefault(rank, []).extend(i for i in lane if i not in partner)
    for rank, lane in zip(plan.lane_rank.tolist(), plan.lanes, strict=True):
        if int(plan.in_channel[lane[0]]) in moved:
            continue
        sends = plan.kind[lane[0]] == SEND
        lane_rank.append(rank)
        old_lanes.append(sorted([*lane, *joining.get(rank, ())], key=lambda i: time[i]) if sends else lane)

    kept = [i for lane in old_lanes for i in lane]
    number = {old: new for new, old in enumerate(kept)}
    number |= {receive: number[send] for receive, send in partner.items()}
    before = list(plan.after)

    def fused_column(values: Column) -> Column:
        return column(int(values[fused.get(i, i)]) for i in kept)

    def fused_kind(i: int) -> int:
        if i not in fused:
            return int(plan.kind[i])
        return RECV_COPY_SEND if plan.kind[fused[i]] == RECV else RECV_REDUCE_SEND

    def fused_after(i: int) -> list[int]:
        both = (*before[i], *(before[fused[i]] if i in fused else ()))
        return sorted({number[j] for j in both} - {number[i]})

    return Plan(
        plan.name,
        plan.transfers,
        plan.channels,
        lane_rank=column(lane_rank),
        lanes=Lists.of([[number[i] for i in lane] for lane in old_lanes]),
        kind=column(fused_kind(i) for i in kept),
        in_channel=fused_column(plan.in_channel),
        out_channel=column(plan.out_channel[kept]),
        src_offset=column(-1 if i in fused else int(plan.src_offset[i]) for i in kept),
        dst_offset=fused_column(plan.dst_offset),
        bytes=column(plan.bytes[kept]),
        recv_transfer=fused_column(plan.recv_transfer),
        send_transfer=column(plan.send_transfer[kept]),
        after=Lists.of([fused_after(i) for i in kept]),
    )
