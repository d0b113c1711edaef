"""`least_slots`: the number below which a plan deadlocks, found for plans of which it is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from optcc.compiler import compile_schedule
from optcc.dsl import Program, schedule
from optcc.plan import Plan
from optcc.schedules.registry import SCHEDULES
from optcc.topology import Topology
from optcc.verdict import PROVED, REFUTED
from optcc.verify.plan import verify_plan
from optcc.verify.plan.slots import least_slots
from tests.negative.cases import hand
from tests.negative.edits import Draft


def with_slots(plan: Plan, slots: int) -> Plan:
    """The same instructions, other slots."""
    return replace(plan, channels=tuple(replace(channel, slots=slots) for channel in plan.channels))


def burst(messages: int) -> Plan:
    """Two ranks; each sends all its messages and receives nothing before the last of them is done."""

    @schedule
    def exchange(program: Program) -> None:
        segments = list(program.pipeline(messages, sections=2))
        for segment in segments:
            segment[0].reduce(src=0, dst=1)
            segment[1].reduce(src=1, dst=0)
        for segment in segments:
            segment[0].copy(src=1, dst=0)
            segment[1].copy(src=0, dst=1)

    made = Draft.of(compile_schedule(exchange(n_ranks=2), size_bytes=8 * messages, slots=messages, fused=False))
    for rank in (0, 1):
        made.find(rank, "receive-reduce").after.append(made.find(rank, "send", messages - 1))
    return made.build()


@pytest.mark.parametrize("messages", [1, 2, 5, 16])
def test_a_burst_needs_a_slot_for_each_message_but_the_last(messages: int) -> None:
    """The first receive waits for the last send, which is done once it has a slot: all of them at once."""
    plan = burst(messages)
    assert verify_plan(plan).verdict == PROVED
    assert least_slots(plan) == messages


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_one_slot_less_is_refuted(name: str) -> None:
    """For every schedule of the library: proved with the least number of slots, and not below."""
    topology = Topology.parse("6@50MB/s,5=25MB/s") if name != "hierarchical" else Topology.parse("3x2@50MB/s,1=1/2")
    for ports in ("exclusive", "fifo"):
        plan = compile_schedule(
            SCHEDULES[name].build(topology, 4), size_bytes=4 * 6 * 64, topology=topology, slots=64, ports=ports
        )
        least = least_slots(plan)
        assert verify_plan(with_slots(plan, least)).verdict == PROVED
        if least > 1:
            assert verify_plan(with_slots(plan, least - 1)).verdict == REFUTED


def test_a_race_that_more_slots_prevent_counts() -> None:
    """One slot deadlocks; with two nothing orders the local copy after what transfer 0 writes; with three the message
    of transfer 3 comes only once that is taken."""
    plan = hand(
        5,
        """
        1>0 copy 0:1@4
        1>0 copy 0:1@5
        1>0 copy 0:1@6
        2>0 copy 0:1@7
        2>3 copy 0:1@4
        3>0 copy 4:5@8
        0>0 copy 8:9@4
        1>4 copy 0:1@4
        4>0 copy 4:5@9
        """,
        {
            0: "r0<r8 r1 r2 r3 | r5 | r8 | l6<r5",
            1: "s0 s1 s2 | s7<s1",
            2: "s3 | s4<s3",
            3: "r4 | s5<r4",
            4: "r7 | s8<r7",
        },
        elements=4,
        scratch=6,
        slots=4,
    )
    wrong = [verify_plan(with_slots(plan, slots)).counterexample for slots in (1, 2, 3)]
    assert [each.property for each in wrong if each is not None] == ["deadlock", "races", "result"]
    assert least_slots(with_slots(plan, 3)) == 3
