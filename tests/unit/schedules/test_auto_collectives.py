"""`auto` for the collectives other than AllReduce: near the best of the library, and proved."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from optcc.collective import COLLECTIVES, ROOTED, Collective
from optcc.compiler import compile_schedule
from optcc.errors import InputError, TopologyError
from optcc.job import MEMORY, assumed_topology
from optcc.planner import AUTO, SCHEDULE_OF, Planner, build
from optcc.schedules.auto_collectives import candidates_for, choose_for
from optcc.simulate import simulate
from optcc.timing import Model
from optcc.topology import Topology
from optcc.verdict import PROVED
from tests.sample import sampled

OTHERS = tuple(name for name in COLLECTIVES if name != "allreduce")
CLUSTERS = ("4@1GB/s", "7@1GB/s,3=500MB/s", "6@1GB/s,0=2GB/s:1GB/s,4=500MB/s:250MB/s")
SEGMENTS_MAX = 64


SIZES = ((840, "exclusive"), (840 << 8, "fair"), (840 << 14, "exclusive"))


@pytest.mark.parametrize(
    ("size", "ports", "text", "name"),
    sampled(((*size, *case) for size in SIZES for case in product(CLUSTERS, OTHERS)), every=4),
)
def test_the_choice_is_within_five_percent_of_the_best_of_the_library(
    name: str, text: str, size: int, ports: Model
) -> None:
    topology = Topology.parse(text).with_latency(Fraction(20, 10**6))
    root = 1 if name in ROOTED else 0
    wanted = Collective(name, topology.n_ranks, root)
    choice = choose_for(wanted, topology, size, ports=ports)
    assert choice.plan.collective == wanted
    taken_s = simulate(choice.plan, topology, model=ports).seconds
    best_s = taken_s
    for definition in candidates_for(wanted, topology, ports):
        segments = 1
        while segments <= min(SEGMENTS_MAX, max(1, size // 2**16)):
            schedule = definition.build(topology, segments, root=root)
            plan = compile_schedule(schedule, size_bytes=size, topology=topology, ports=ports)
            best_s = min(best_s, simulate(plan, topology, model=ports).seconds)
            segments *= 2
    assert taken_s <= 1.05 * best_s, (choice.taken, choice.candidates)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("reduction", ["sum", "max"])
def test_planners_choose_by_default(name: str, reduction: str) -> None:
    assert SCHEDULE_OF[name] == AUTO
    wanted = Collective(name, 5, 3 if name in ROOTED else 0)
    plan, verdict = Planner(Topology.parse("5@1GB/s,2=500MB/s"))(wanted, 4 * 5000, "int32", reduction)
    assert (plan.collective, plan.transfers.reduction, verdict.verdict) == (wanted, reduction, PROVED)


def test_small_messages_go_by_few_steps_and_large_ones_by_bandwidth() -> None:
    eight = Topology.parse("8@1GB/s").with_latency(Fraction(20, 10**6))
    for name, small, large in (("allgather", "bruck", None), ("broadcast", "tree-broadcast", "chain-broadcast")):
        wanted = Collective(name, 8)
        assert choose_for(wanted, eight, 1024).taken.name == small
        assert large in (None, choose_for(wanted, eight, 64 << 20).taken.name)


def test_a_table_of_counts_is_planned_for_as_it_is() -> None:
    topology = Topology.parse("3x2@1GB/s")
    wanted = Collective.all_to_all_v([[src * dst for dst in range(6)] for src in range(6)])
    built = build(AUTO, topology, 4 * 225 * 1000, collective=wanted)
    assert built.choice is not None
    assert {each.name for each in built.choice.candidates} == {"direct-all-to-all-v", "matched-all-to-all-v"}
    assert built.plan.collective == wanted
    seconds = [each.seconds for each in built.choice.candidates if each.seconds is not None]
    assert seconds == sorted(seconds) and built.choice.taken == built.choice.candidates[0]


def test_what_nobody_can_do_is_refused() -> None:
    four = Collective("allgather", 4)
    with pytest.raises(TopologyError, match=r"allgather: .*must have one GPU a server, or say how they are linked"):
        choose_for(four, Topology.parse("2x2@1GB/s"), 4096)
    mine = Collective.declared("mine", 2, before=[(0, 0)], after=[(1, 0, [0])])
    with pytest.raises(InputError, match="'mine': the library has no schedule for it"):
        choose_for(mine, Topology.parse("2@1GB/s"), 4096)


def test_ranks_that_share_a_memory_have_the_schedule_with_the_fewest_steps() -> None:
    """A chain sends over every port once, and a tree over the root's twice; in a memory all bytes count alike."""
    ports = assumed_topology(4)
    for name, of_ports, of_memory in (
        ("broadcast", "chain-broadcast", "tree-broadcast"),
        ("reducescatter", "ring-reduce-scatter", "rank-order-reduce-scatter"),
    ):
        chosen = [
            choose_for(Collective(name, 4), topology, 16 << 20, ports="fair").plan.name
            for topology in (ports, replace(ports, memory=MEMORY))
        ]
        assert chosen == [of_ports, of_memory]
