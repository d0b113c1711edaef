"""Deadlock freedom under every interleaving, for the slots of the plan or for a given smaller number.

Every instruction has two events: `taken` (a receive: its message has left the slot; a send: it is issued) and `done`.
The most conservative run-time that the lane rule allows issues an instruction only when the one before it in the lane
is done. Its wait-for relation is a fixed graph, independent of the interleaving. If the graph is acyclic, every
run-time that follows the rule finishes; a cycle is a set of instructions in deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from optcc.arrays import Column
from optcc.compiled import compiled
from optcc.plan import KINDS, Plan
from optcc.verdict import Counterexample
from optcc.verify.plan.plan_graph import PlanGraph

Event = int
"""2 * instruction for `taken`, 2 * instruction + 1 for `done`."""


def order_events(graph: PlanGraph) -> Column:
    """A topological order of all events; shorter if some are on a cycle or behind one."""
    missing = np.empty(2 * len(graph.met), dtype=np.int64)
    missing[0::2] = (graph.lane_before >= 0) + np.diff(graph.after_first) + (graph.sent_by >= 0)
    missing[1::2] = 1 + (graph.freed_by >= 0)
    order = np.empty(len(missing), dtype=np.int64)
    happened = _kernels().happen(
        graph.lane_next, graph.met, graph.frees, graph.dependents_first, graph.dependents, missing, order
    )
    return order[:happened]


def check_deadlock(plan: Plan, graph: PlanGraph) -> tuple[Counterexample | None, Column]:
    """None and a topological order of all events; or a cycle of waits, and the events that do not depend on it."""
    order = order_events(graph)
    if len(order) == 2 * len(plan):
        return None, order
    stuck = np.ones(2 * len(plan), dtype=np.bool_)
    stuck[order] = False
    cycle = _cycle(graph, stuck)
    first = cycle[0]
    instruction = plan[first // 2]
    trace = tuple(f"{_describe(plan, event)} waits for" for event in cycle)
    summary = f"{len({event // 2 for event in cycle})} instructions wait for each other"
    if (graph.freed_by >= 0).any():
        summary += f" (slots: {min(channel.slots for channel in plan.channels)})"
    return Counterexample("deadlock", summary, rank=instruction.rank, trace=(*trace, "the first of these")), order


@cache
def _kernels() -> Any:
    return compiled((_reach, _happen), globals())


def _reach(event: int, missing: Column, order: Column, count: int) -> int:
    """Decrements the in-degree of `event` and appends it to `order` at zero; returns the new length of `order`."""
    missing[event] -= 1
    if missing[event] == 0:
        order[count] = event
        count += 1
    return count


def _happen(
    lane_next: Column,
    met: Column,
    frees: Column,
    dependents_first: Column,
    dependents: Column,
    missing: Column,
    order: Column,
) -> int:
    """Writes a topological order of the events into `order` and returns its length."""
    count = 0
    for event in range(len(missing)):
        if missing[event] == 0:
            order[count] = event
            count += 1
    here = 0
    while here < count:
        i = order[here] >> 1
        if order[here] & 1 == 0:
            count = _reach(2 * i + 1, missing, order, count)
            if frees[i] >= 0:
                count = _reach(2 * frees[i] + 1, missing, order, count)
        else:
            if lane_next[i] >= 0:
                count = _reach(2 * lane_next[i], missing, order, count)
            if met[i] >= 0:
                count = _reach(2 * met[i], missing, order, count)
            for at in range(dependents_first[i], dependents_first[i + 1]):
                count = _reach(2 * dependents[at], missing, order, count)
        here += 1
    return count


def _waits_for(graph: PlanGraph, event: Event) -> Iterator[Event]:
    """The events that `event` waits for, by the same rules as `_happen`."""
    i, done = divmod(event, 2)
    if done:
        yield 2 * i
        if graph.freed_by[i] >= 0:
            yield 2 * int(graph.freed_by[i])
        return
    yield from (2 * int(each) + 1 for each in graph.after[graph.after_first[i] : graph.after_first[i + 1]])
    for before in (graph.lane_before[i], graph.sent_by[i]):
        if before >= 0:
            yield 2 * int(before) + 1


def _cycle(graph: PlanGraph, stuck: np.ndarray) -> list[Event]:
    """A shortest cycle through one of the events on a cycle, each waiting for the next; the last for the first."""

    def stuck_before(event: Event) -> list[Event]:
        return [each for each in _waits_for(graph, event) if stuck[each]]

    event = int(np.flatnonzero(stuck)[0])
    seen: set[Event] = set()
    while event not in seen:  # every stuck event waits for another stuck one, so this walk revisits one
        seen.add(event)
        event = stuck_before(event)[0]
    parent = {event: event}
    queue = deque([event])
    while queue:
        here = queue.popleft()
        for each in stuck_before(here):
            if each == event:
                path = [here]
                while path[-1] != event:
                    path.append(parent[path[-1]])
                return path[::-1]
            if each not in parent:
                parent[each] = here
                queue.append(each)
    raise AssertionError("a walk that came round lies on a cycle")


def _describe(plan: Plan, event: Event) -> str:
    instruction = plan[event // 2]
    transfer = max(instruction.recv_transfer, instruction.send_transfer)
    line = plan.transfers.line[transfer]
    return f"{instruction}" + (f" (line {line})" if line > 0 else "")


assert len(KINDS) == 7, "a new kind of instruction needs its events here"
