"""Mutants of plans whose ranks have several ports: the verifier and the naive one must find the same in them."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from functools import cache

import pytest

from optcc.compiler import compile_schedule
from optcc.errors import OptccError
from optcc.plan import Plan
from optcc.planner import find_schedule
from optcc.simulate import MODELS
from optcc.topology import Nic, Server, Topology
from tests.differential.mutants import STILL_RIGHT, TOO_LARGE, judge, spoil_plan

STATES_MAX = 100_000
RATE = Fraction(5 * 10**9)
TWO_AND_ONE = Topology(
    (
        Server("h0", 2, (Nic(0, RATE, RATE, gpu=0), Nic(1, RATE, RATE, gpu=1)), 2 * RATE),
        Server("h1", 1, (Nic(0, RATE, RATE, gpu=0),)),
    )
)
RING, FOUR = Topology.parse("torus:3@2GB/s:1GB/s"), Topology.parse("2x2@5GB/s+9GB/s,1=1/2")
PLANS = (
    *(("packed", topology) for topology in (TWO_AND_ONE, TWO_AND_ONE, RING, RING, FOUR)),
    *(
        (name, topology)
        for name in ("nic-trees", "equal-trees", "nccl-tree")
        for topology in (TWO_AND_ONE, TWO_AND_ONE)
    ),
)


@cache
def base(name: str, topology: Topology, port: int, slots: int, size_bytes: int) -> Plan:
    schedule = find_schedule(name).build(topology, 1)
    return compile_schedule(schedule, size_bytes=size_bytes, topology=topology, slots=slots, ports=MODELS[port])


def judge_some(seeds: range) -> Counter[str]:
    """How the mutants of these seeds come out; the two verifiers must agree on each."""
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(f"ports {seed}")
        name, topology = rng.choice(PLANS)
        plan = base(name, topology, rng.randrange(len(MODELS)), rng.choice((1, 2, 3)), 4 * rng.choice((4, 8)))
        names, make = spoil_plan(rng, plan, rng.choice((1, 1, 2)))
        try:
            mutant = make()
        except OptccError:
            outcomes["refused"] += 1
            continue
        judgement = judge(mutant, STATES_MAX)
        if judgement.outcome == TOO_LARGE:
            judgement = judge(mutant, STATES_MAX, way="least")
        assert not judgement.difference, (
            f"seed {seed}: {' + '.join(names)} in {name} on {topology}: {judgement.difference}"
        )
        outcomes[judgement.outcome] += 1
    return outcomes


@pytest.mark.parametrize(
    ("drawn", "each_min", "large_max"), [(60, 2, 8), pytest.param(150, 5, 20, marks=pytest.mark.slow)]
)
def test_mutants_of_plans_with_several_ports(drawn: int, each_min: int, large_max: int) -> None:
    found = judge_some(range(drawn))
    for outcome in ("matching", "deadlock", "races", "result", STILL_RIGHT):
        assert found[outcome] >= each_min, outcome
    assert found[TOO_LARGE] <= large_max


def test_in_most_of_these_plans_some_rank_sends_or_receives_in_several_lanes() -> None:
    """Else the test above would be that of one port."""
    several = 0
    for name, topology in PLANS:
        plan = base(name, topology, MODELS.index("exclusive"), 2, 32)
        for used in (plan.send_transfer >= 0, plan.recv_transfer >= 0):
            lanes = {int(lane) for lane in plan.instruction_lane[used]}
            several += max(Counter(int(plan.lane_rank[lane]) for lane in lanes).values()) >= 2
    assert several >= len(PLANS), "of twice as many"


@pytest.mark.slow
@pytest.mark.parametrize("batch", [*range(3), *(pytest.param(each, marks=pytest.mark.search) for each in range(3, 10))])
def test_ten_thousand_mutants_of_plans_with_several_ports(batch: int) -> None:
    judge_some(range(1000 + 1000 * batch, 2000 + 1000 * batch))
