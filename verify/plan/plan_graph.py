"""`PlanGraph`: the wait-for relations between the instructions of a plan whose sends and receives match."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optcc.arrays import Column
from optcc.plan import Plan


class PlanGraph(NamedTuple):
    """Columns with one entry per instruction; instructions by number, -1 for none.

    `lane_before` and `lane_next` are the neighbours in the lane, `sent_by` the send that a receive takes its message
    from, and `met` its inverse. `freed_by` is the receive that frees the slot of a send's message, and `frees` its
    inverse. `after` and `dependents` are lists packed like `optcc.arrays.Lists`.
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
    """The instructions with a channel, sorted by channel and then by position in the lane."""
    used = np.flatnonzero(channel >= 0)
    return used[np.argsort(channel[used], kind="stable")]


def build_graph(plan: Plan, slots: int | None = None) -> PlanGraph:
    """The graph of `plan`, whose channels must match; `slots`, if given, replaces the slots of its channels."""
    n = len(plan)
    each = np.arange(n)
    first = np.zeros(n + 1, dtype=np.bool_)  # whether it is the first instruction of its lane
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
