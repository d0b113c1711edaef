"""Fuses a receive with the send that forwards the same bytes into one instruction.

    before  receive-reduce from 0; send to 2        after  receive-reduce-send from 0 to 2

Fusing moves a receive into the send lane, where it may execute later than before. That is safe if all its dependents
execute later still. The pass assigns every instruction a time greater than the times of its predecessors; before
fusing, a transfer's position in the order is such a time. It visits the transfers from last to first, gives each
receive the latest time that its dependents allow, and fuses it if the time of its send is smaller. The other receives
of the lane move into the send lane too, each at its time. A valid plan stays valid: the times are a topological order,
so there is no cycle of waits.

Only ranks that receive from a single peer are fused. For other ranks the receive lane keeps the in port in order, and
losing that order costs more than an instruction saves.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column, Lists, column, sort_part
from optcc.compiled import compiled
from optcc.plan import RECV, RECV_COPY_SEND, RECV_REDUCE_SEND, SEND, Plan

SENDS_BETWEEN_MAX = 1
"""Delay a receive past at most this many sends of its rank: it would hold its slot and its reduction for longer."""


def fuse(plan: Plan, order: Column) -> Plan:
    """The same plan with receives fused into the sends that forward exactly the bytes that they wrote.

    `plan` is the result of `lower`, `order` the order in which it placed the transfers.
    """
    peers = np.bincount([channel.dst for channel in plan.channels], minlength=plan.n_ranks)
    if not (peers == 1).any():
        return plan
    view = _View.of(plan, order, peers == 1)
    passes_on = _kernels().find_passing(view)
    if not passes_on.any():
        return plan
    partner, time = np.full(len(plan), -1, dtype=np.int64), np.empty(len(plan), dtype=np.int64)
    _kernels().find_partners(view, passes_on, partner, time)
    return _merge(plan, view, partner, time) if partner.max() >= 0 else plan


class _View(NamedTuple):
    """The columns of a plan that the inner loops use, with an entry for each instruction unless stated otherwise."""

    order: Column
    """Transfers."""
    sender: Column
    """For each transfer, the instruction that sends it; -1 for a local one."""
    receiver: Column
    """For each transfer, the instruction that receives it or performs it locally."""
    sent_by: Column
    """For a receive, the matching send."""
    slots: Column
    """For a receive, the slots of its lane; 0 for other instructions."""
    is_send: npt.NDArray[np.bool_]
    single_peer: npt.NDArray[np.bool_]
    """True where the rank receives from a single peer."""
    rank: Column
    lane: Column
    lane_first: Column
    """For each lane, its first instruction."""
    src_offset: Column
    dst_offset: Column
    bytes: Column
    after_first: Column
    after: Column

    @classmethod
    def of(cls, plan: Plan, order: Column, single_peer: npt.NDArray[np.bool_]) -> _View:
        """`single_peer` is true for the ranks that receive from a single peer."""
        sender, receiver = (np.full(len(plan.transfers), -1, dtype=np.int64) for _ in range(2))
        sends, others = np.flatnonzero(plan.kind == SEND), np.flatnonzero(plan.kind != SEND)
        sender[plan.send_transfer[sends]] = sends
        receiver[plan.recv_transfer[others]] = others
        return cls(
            order,
            sender,
            receiver,
            sender[plan.recv_transfer],
            np.array([*(channel.slots for channel in plan.channels), 0])[plan.in_channel],
            plan.kind == SEND,
            single_peer[plan.instruction_rank],
            plan.instruction_rank,
            plan.instruction_lane,
            plan.lanes.starts,
            plan.src_offset,
            plan.dst_offset,
            plan.bytes,
            plan.after.starts,
            plan.after.values,
        )


def _merge(plan: Plan, view: _View, partner: Column, time: Column) -> Plan:
    """Rewrites the plan: fused receives become part of their sends, the others of their lanes move to the send lane."""
    gone = (partner >= 0) & ~view.is_send
    moved = np.zeros(len(plan.lanes), dtype=np.bool_)
    moved[view.lane[gone]] = True
    kept, stops = np.empty(len(plan) - int(gone.sum()), dtype=np.int64), np.empty(len(plan.lanes), dtype=np.int64)
    _kernels().merge_lanes(view, partner, time, moved, kept, stops)
    fused = partner[kept] >= 0
    received = np.where(fused, partner[kept], kept)
    number = np.empty(len(plan), dtype=np.int64)
    number[kept] = number[received] = np.arange(len(kept))
    after_starts = np.zeros(len(kept) + 1, dtype=np.int64)
    after = _kernels().merge_after(view, kept, received, number, after_starts)
    fused_kind = np.where(plan.kind[received] == RECV, RECV_COPY_SEND, RECV_REDUCE_SEND)
    return Plan(
        plan.name,
        plan.transfers,
        plan.channels,
        lane_rank=column(plan.lane_rank[~moved]),
        lanes=Lists(column(np.concatenate(([0], stops[~moved]))), column(np.arange(len(kept)))),
        kind=column(np.where(fused, fused_kind, plan.kind[kept])),
        in_channel=column(plan.in_channel[received]),
        out_channel=column(plan.out_channel[kept]),
        src_offset=column(np.where(fused, -1, plan.src_offset[kept])),
        dst_offset=column(plan.dst_offset[received]),
        bytes=column(plan.bytes[kept]),
        recv_transfer=column(plan.recv_transfer[received]),
        send_transfer=column(plan.send_transfer[kept]),
        after=Lists(column(after_starts), column(after)),
        ports=plan.ports,
    )


@cache
def _kernels() -> Any:
    """The functions of `_KERNELS` by name, compiled if numba is there."""
    return compiled(_KERNELS, globals())


def _find_passing(view: _View) -> npt.NDArray[np.bool_]:
    """For each entry of `after`, true if it is a receive whose bytes are exactly those that its dependent sends."""
    passes_on = np.zeros(len(view.after), dtype=np.bool_)
    for index in range(len(view.rank)):
        if view.is_send[index] and view.single_peer[index]:
            for at in range(view.after_first[index], view.after_first[index + 1]):
                receive = view.after[at]
                passes_on[at] = (
                    view.slots[receive] > 0
                    and view.dst_offset[receive] == view.src_offset[index]
                    and view.bytes[receive] == view.bytes[index]
                )
    return passes_on


def _waiters(view: _View, passes_on: npt.NDArray[np.bool_]) -> tuple[Column, Column, npt.NDArray[np.bool_]]:
    """For each instruction its dependents, `waiters[first[i]:first[i + 1]]`, ascending; which of them forward it."""
    first = np.zeros(len(view.rank) + 2, dtype=np.int64)
    for earlier in view.after:
        first[earlier + 2] += 1
    for index in range(2, len(first)):
        first[index] += first[index - 1]
    waiters, passing = np.empty(len(view.after), dtype=np.int64), np.empty(len(view.after), dtype=np.bool_)
    for index in range(len(view.rank)):
        for at in range(view.after_first[index], view.after_first[index + 1]):
            place = first[view.after[at] + 1]
            waiters[place], passing[place] = index, passes_on[at]
            first[view.after[at] + 1] = place + 1  # ends up where the next list begins
    return first, waiters, passing


def _find_partners(view: _View, passes_on: npt.NDArray[np.bool_], partner: Column, time: Column) -> None:
    """Sets `partner` of each fused receive to its send and of that send to its receive, and the `time` of every
    instruction.

    The time of a send is its position in the order times `unit`; that of a receive is 1 less than that of its earliest
    dependent.
    """
    unit = len(time) + 1
    sent = np.zeros(view.rank[-1] + 1, dtype=np.int64)
    sent_before = np.empty(len(view.order), dtype=np.int64)  # for each transfer, sends of its receiver's rank
    for place in range(len(view.order)):
        transfer = view.order[place]
        sent_before[transfer] = sent[view.rank[view.receiver[transfer]]]
        if view.sender[transfer] >= 0:
            sent[view.rank[view.sender[transfer]]] += 1
            time[view.sender[transfer]] = place * unit
    first, waiters, passing = _waiters(view, passes_on)
    for place in range(len(view.order) - 1, -1, -1):
        receive = view.receiver[view.order[place]]
        lane_stop = view.lane_first[view.lane[receive] + 1]
        send, latest = -1, len(view.order) * unit  # the first send that forwards it; the earliest other dependent
        for at in range(first[receive], first[receive + 1]):
            if send < 0 and passing[at] and partner[waiters[at]] < 0:
                send = waiters[at]
            else:
                latest = min(latest, time[waiters[at]])
        if receive + 1 < lane_stop:
            latest = min(latest, time[receive + 1])
        if view.slots[receive] > 0 and receive + view.slots[receive] < lane_stop:
            latest = min(latest, time[view.sent_by[receive + view.slots[receive]]])  # waits for the slot
        if send >= 0:
            between = send - view.lane_first[view.lane[send]] - sent_before[view.order[place]]
            if between <= SENDS_BETWEEN_MAX and time[send] < latest:
                partner[receive], partner[send] = send, receive
                time[receive] = time[send]
                continue
            latest = min(latest, time[send])
        time[receive] = latest - 1


def _merge_lanes(
    view: _View, partner: Column, time: Column, moved: npt.NDArray[np.bool_], kept: Column, stops: Column
) -> None:
    """Writes the remaining instructions, lane by lane, into `kept`, and the end of each lane into `stops`.

    The receives of a lane that is moved are merged into the send lane that follows it, by their time.
    """
    used = 0
    for lane in range(len(moved)):
        at, stop = view.lane_first[lane], view.lane_first[lane + 1]
        receive = view.lane_first[lane - 1] if lane and moved[lane - 1] else at  # up to where the send lane begins
        while not moved[lane] and (receive < view.lane_first[lane] or at < stop):
            if receive < view.lane_first[lane] and partner[receive] >= 0:
                receive += 1
            elif receive < view.lane_first[lane] and (at == stop or time[receive] < time[at]):
                kept[used] = receive
                receive, used = receive + 1, used + 1
            else:
                kept[used] = at
                at, used = at + 1, used + 1
        stops[lane] = used


def _merge_after(view: _View, kept: Column, received: Column, number: Column, starts: Column) -> Column:
    """The predecessors of each kept instruction, renumbered, without duplicates; `starts[i + 1]` is the end of i's."""
    after = np.empty(len(view.after), dtype=np.int64)
    used = 0
    for index in range(len(kept)):
        begin = used
        for half in range(1 if received[index] == kept[index] else 2):
            old = kept[index] if half == 0 else received[index]
            for at in range(view.after_first[old], view.after_first[old + 1]):
                if number[view.after[at]] != index:
                    after[used] = number[view.after[at]]
                    used += 1
        sort_part(after, begin, used)
        stop = used
        used = begin
        for at in range(begin, stop):
            if used == begin or after[at] != after[used - 1]:
                after[used] = after[at]
                used += 1
        starts[index + 1] = used
    return after[:used]


_KERNELS = (sort_part, _find_passing, _waiters, _find_partners, _merge_lanes, _merge_after)
