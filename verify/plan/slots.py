"""The least number of slots for which a plan has neither deadlock nor race."""

from __future__ import annotations

from optcc.plan import Plan
from optcc.verify.plan.deadlock import order_events
from optcc.verify.plan.plan_graph import build_graph
from optcc.verify.plan.races import check_races


def least_slots(plan: Plan) -> int:
    """The smallest number of slots, the same for all lanes, with which a proved `plan` has no deadlock and no race.

    Fewer slots only add waits, so deadlock freedom is monotonic and found by bisection. Freedom of races need not be:
    from there on each number is tried until one is free of races, at the latest the plan's own.

    >>> from optcc.compiler import compile_schedule
    >>> from optcc.schedules.ring import ring
    >>> least_slots(compile_schedule(ring(n_ranks=4), size_bytes=64, slots=16))
    1
    """
    low, high = 1, max((channel.slots for channel in plan.channels), default=1)
    while low < high:
        middle = (low + high) // 2
        if len(order_events(build_graph(plan, middle))) == 2 * len(plan):
            high = middle
        else:
            low = middle + 1
    while True:
        graph = build_graph(plan, low)
        if check_races(plan, graph, order_events(graph)) is None:
            return low
        low += 1
