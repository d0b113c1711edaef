"""Deadlock freedom under every interleaving, with the slots that the plan has.

Every instruction has two events: `taken` (its message has left the slot; for a send: its turn has come) and `done`.
The most patient run-time that the lane rule allows waits for an instruction to be done before it issues the next of
the lane. Its waiting relation is a fixed graph, whatever the interleaving: if it has no cycle, every run-time that
follows the rule finishes; a cycle is a set of instructions that wait for each other.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from optcc.plan import KINDS, Plan
from optcc.verdict import Counterexample

Event = int
"""2 * instruction for `taken`, 2 * instruction + 1 for `done`."""


def waiting_graph(plan: Plan) -> list[list[Event]]:
    """For each event, the events that wait for it."""
    waiters: list[list[Event]] = [[2 * instruction + 1] for instruction in range(len(plan)) for _ in (0, 1)]
    for done in range(1, len(waiters), 2):
        waiters[done] = []
    for lane in plan.lanes:
        for before, behind in pairwise(lane):
            waiters[2 * before + 1].append(2 * behind)
    for instruction, earlier in enumerate(plan.after):
        for each in earlier:
            waiters[2 * each + 1].append(2 * instruction)
    sent_by: dict[int, int] = {}
    for sends, receives in plan.channel_ends:
        for send, receive in zip(sends, receives, strict=True):
            sent_by[receive] = send
            waiters[2 * send + 1].append(2 * receive)
    for receives, slots in plan.lane_receives:
        for receive, later in zip(receives, receives[slots:], strict=False):
            waiters[2 * receive].append(2 * sent_by[later] + 1)
    return waiters


def check_deadlock(plan: Plan) -> tuple[Counterexample | None, list[Event]]:
    """None and all events in an order in which they can happen; or a cycle of waits and the events that do happen."""
    waiters = waiting_graph(plan)
    missing = [0] * len(waiters)
    for each in waiters:
        for waiter in each:
            missing[waiter] += 1
    ready = deque(event for event, count in enumerate(missing) if not count)
    order: list[Event] = []
    while ready:
        event = ready.popleft()
        order.append(event)
        for waiter in waiters[event]:
            missing[waiter] -= 1
            if not missing[waiter]:
                ready.append(waiter)
    if len(order) == len(waiters):
        return None, order
    cycle = _cycle(waiters, {event for event, count in enumerate(missing) if count})
    first = cycle[0]
    instruction = plan[first // 2]
    trace = tuple(f"{_describe(plan, event)} waits for" for event in reversed(cycle))
    summary = f"{len({event // 2 for event in cycle})} instructions wait for each other"
    if any(len(receives) > slots for receives, slots in plan.lane_receives):
        summary += f" (slots: {min(channel.slots for channel in plan.channels)})"
    return Counterexample("deadlock", summary, rank=instruction.rank, trace=(*trace, "the first of these")), order


def _cycle(waiters: list[list[Event]], stuck: set[Event]) -> list[Event]:
    """A shortest cycle through one of the events on a cycle; every stuck event waits for a stuck one."""
    waits_for: dict[Event, Event] = {}
    for event in stuck:
        for waiter in waiters[event]:
            if waiter in stuck:
                waits_for.setdefault(waiter, event)
    event = next(iter(sorted(stuck)))
    seen: set[Event] = set()
    while event not in seen:  # walking backwards must come round: every stuck event waits for a stuck one
        seen.add(event)
        event = waits_for[event]
    parent = {event: event}
    queue = deque([event])
    while queue:
        here = queue.popleft()
        for waiter in waiters[here]:
            if waiter == event:
                path = [here]
                while path[-1] != event:
                    path.append(parent[path[-1]])
                return path[::-1]
            if waiter in stuck and waiter not in parent:
                parent[waiter] = here
                queue.append(waiter)
    raise AssertionError("a walk that came round lies on a cycle")


def _describe(plan: Plan, event: Event) -> str:
    instruction = plan[event // 2]
    transfer = max(instruction.recv_transfer, instruction.send_transfer)
    line = plan.transfers.line[transfer]
    return f"{instruction}" + (f" (line {line})" if line > 0 else "")


assert len(KINDS) == 7, "a new kind of instruction needs its events here"
