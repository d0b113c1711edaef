"""`PlanGraph`: who waits for whom in a plan whose sends and receives match, one entry an instruction."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optcc.arrays import Column
from optcc.plan import Plan


class PlanGraph(NamedTuple):
    """Instructions by number, -1 where there is none.

    `lane_before` and `lane_next` are the neighbours in the lane, `sent_by` the send that a receive takes its message
    from and `met` the other way round. `freed_by` is the receive that frees the slot which a send's message lands in,
    and `frees` the other way round. `after` and `dependents` are lists packed like `optcc.arrays.Lists`.
    """

    lane_before: Column
    lane_next: Column
    sent_by: Column
    met: Column
    freed_by: Column
    frees: Column
    after_first: Column
    after: Column
    dependents_first: Column
    dependents: Column


def by_channel(channel: Column) -> Column:
    """The instructions that have a channel, channel by channel, in the order of their lanes."""
    used = np.flatnonzero(channel >= 0)
    return used[np.argsort(channel[used], kind="stable")]


def build_graph(plan: Plan, slots: int | None = None) -> PlanGraph:
    """The graph of `plan`, whose channels must match; `slots` instead of those of its channels if given."""
    n = len(plan)
    each = np.arange(n)
    first = np.zeros(n + 1, dtype=np.bool_)  # of a lane
    first[plan.lanes.starts] = True
    lane_before = np.where(first[:-1], -1, each - 1)
    lane_next = np.where(first[1:], -1, each + 1)
    lane_next[-1:] = -1
    sent_by, met, freed_by, frees = (np.full(n, -1, dtype=np.int64) for _ in range(4))
    sends, receives = by_channel(plan.out_channel), by_channel(plan.in_channel)
    sent_by[receives], met[sends] = sends, receives
    receiving = np.flatnonzero(plan.in_channel >= 0)
    offered = np.array([channel.slots for channel in plan.channels], dtype=np.int64)[plan.in_channel[receiving]]
    earlier = np.arange(len(receiving)) - (offered if slots is None else slots)
    lane = plan.instruction_lane[receiving]
    waits = np.flatnonzero((earlier >= 0) & (lane[np.maximum(earlier, 0)] == lane))
    held, freeing = sent_by[receiving[waits]], receiving[earlier[waits]]
    freed_by[held], frees[freeing] = freeing, held
    owner = np.repeat(each, np.diff(plan.after.starts))
    order = np.argsort(plan.after.values, kind="stable")
    dependents_first = np.zeros(n + 1, dtype=np.int64)
    np.cumsum(np.bincount(plan.after.values, minlength=n), out=dependents_first[1:])
    return PlanGraph(
        lane_before,
        lane_next,
        sent_by,
        met,
        freed_by,
        frees,
        plan.after.starts,
        plan.after.values,
        dependents_first,
        owner[order],
    )
