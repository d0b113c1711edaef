"""`Memory`: what it remembers is what the machine does, for any order in which messages come."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from optcc.compiler import compile_schedule
from optcc.plan import Plan
from optcc.runtime.state import Compute, Memory, Place, PostRecv, PostSend, RankMachine, RankProgram
from optcc.runtime.transport import RECEIVED, SENT
from optcc.schedules.registry import SCHEDULES
from optcc.topology import Topology

EVENT_OF = {PostRecv: RECEIVED, PostSend: SENT}


def plan_of(name: str, topology: str, segments: int) -> Plan:
    parsed = Topology.parse(topology)
    return compile_schedule(SCHEDULES[name].build(parsed, segments), size_bytes=960, topology=parsed)


PLANS = (
    plan_of("recursive-doubling", "4@1GB/s", 1),
    plan_of("ring", "5@1GB/s", 1),
    plan_of("optcc", "4@1GB/s,3=500MB/s", 2),
)


def settled(machine: RankMachine, actions: list[PostRecv | PostSend | Compute]) -> list[int]:
    """The numbers of all actions that follow, with every computation done as soon as it is asked for."""
    for action in actions:
        if isinstance(action, Compute):
            actions += machine.local_done(action.instruction)
    return [action.index for action in actions]


def run_side_by_side(memory: Memory, machine: RankMachine, rng: random.Random) -> int:
    """One run of both, with messages in random order, held to each other; how many steps it took."""
    program, n_steps = machine.program, 0
    indices, place = memory.start
    assert list(indices) == settled(machine, machine.start())
    waiting: Counter[tuple[int, int]] = Counter()
    while True:
        for index in indices:
            action = program.actions[index]
            if not isinstance(action, Compute):
                waiting[EVENT_OF[type(action)], action.channel] += 1
        assert place.done == machine.done and place.machine.report() == machine.report()
        if place.done:
            assert not waiting.total()
            return n_steps
        event = rng.choice(sorted(waiting.elements()))
        waiting[event] -= 1
        n_steps += 1
        kind, channel = event
        indices, place = memory.step(place, event, channel)
        assert list(indices) == settled(machine, machine.sent(channel) if kind == SENT else machine.arrived(channel))


@pytest.mark.parametrize("places_max", [0, 3, 1024])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("number", range(len(PLANS)))
def test_what_is_remembered_is_what_the_machine_does(number: int, window: int, places_max: int) -> None:
    plan = PLANS[number]
    for rank in range(plan.n_ranks):
        program = RankProgram(plan, rank)
        memory, machine = Memory(program, window, places_max), RankMachine(program, window)
        for seed in range(20):
            assert run_side_by_side(memory, machine, random.Random(seed)) > 0


@pytest.mark.parametrize("places_max", [0, 3, 1024])
@pytest.mark.parametrize("number", range(len(PLANS)))
def test_events_that_come_at_once_have_the_effects_of_one_after_another(number: int, places_max: int) -> None:
    """Twice each, so that the second time all is remembered that is; a run's last event has no other behind it."""
    plan, rng = PLANS[number], random.Random(number)
    program = RankProgram(plan, 0)
    memory, single = Memory(program, 2, places_max), Memory(program, 2, places_max)
    n_together = n_over = 0
    for _ in range(20):
        indices, place = memory.start
        _, alone = single.start
        waiting: list[tuple[int, int]] = []
        while not place.done:
            actions = [program.actions[index] for index in indices]
            waiting += [(EVENT_OF[type(each)], each.channel) for each in actions if not isinstance(each, Compute)]
            rng.shuffle(waiting)
            events, waiting = waiting[: (count := rng.randint(1, 3))], waiting[count:]
            n_together += len(events) > 1
            channels = [channel for _, channel in events]
            first, found = memory.steps(place, events, channels), memory.steps(place, events, channels)
            assert first is not None and found is not None and first[0] == found[0]
            too_many = memory.steps(place, [*events, events[0]], [*channels, channels[0]]) if found[1].done else None
            n_over += found[1].done
            assert too_many is None
            wanted: list[int] = []
            for event in events:
                more, alone = single.step(alone, event, event[1])
                wanted += more
            indices, place = found
            assert list(indices) == wanted and place.machine.snapshot() == alone.machine.snapshot()
        assert not waiting
    assert n_over == 20 and n_together >= 20


def n_places(memory: Memory) -> int:
    """States that can be reached by what is remembered."""
    seen: set[int] = set()
    left: list[Place] = [memory.start[1]]
    while left:
        place = left.pop()
        if id(place) not in seen:
            seen.add(id(place))
            left += [after for _, after in place.steps.values()]
    return len(seen)


def test_no_more_states_are_kept_than_were_asked_for() -> None:
    program = RankProgram(PLANS[2], 0)
    counts = []
    for places_max in (2, 20, 1000):
        memory, machine = Memory(program, 1, places_max), RankMachine(program, 1)
        for seed in range(60):
            run_side_by_side(memory, machine, random.Random(seed))
        counts.append(n_places(memory))
    assert counts[0] <= 2 and counts[1] <= 20 < counts[2]


def test_a_second_run_in_the_same_order_asks_the_machine_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    program = RankProgram(PLANS[0], 1)
    memory, machine = Memory(program), RankMachine(program)
    run_side_by_side(memory, machine, random.Random(1))
    monkeypatch.setattr(RankMachine, "copy", lambda _: pytest.fail("asked the machine"))
    run_side_by_side(memory, machine, random.Random(1))
