"""Every schedule of the library for 2 to 33 ranks, ragged sizes and up to three stragglers: proved, and it runs."""

from __future__ import annotations

import random
from itertools import product

import pytest

from optcc.compiler import compile_schedule
from optcc.dsl import Definition
from optcc.errors import TopologyError
from optcc.schedule import Schedule
from optcc.schedules.registry import SCHEDULES
from optcc.simulate import MODELS, simulate
from optcc.timing import Model
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.plan import verify_plan
from tests.sample import sampled

RANKS = range(2, 34)
STRAGGLERS = (1, 2, 3)
RATES = ("1MB/s", "25MB/s", "49MB/s", "50MB/s:10MB/s", "20MB/s:50MB/s")


def accepted(
    definition: Definition, p: int, stragglers: int, segments: int, rng: random.Random
) -> tuple[Schedule, str]:
    """The schedule and the topology for so many stragglers anywhere; for a single one if it accepts no more."""
    for slow in (min(stragglers, p - 1), 1):
        text = f"{p}@50MB/s" + "".join(f",{rank}={rng.choice(RATES)}" for rank in rng.sample(range(p), slow))
        try:
            return definition.build(Topology.parse(text), segments), text
        except TopologyError:
            continue
    raise AssertionError(f"{definition.name} accepts no straggler among {p} ranks")


def check(definition: Definition, p: int, stragglers: int, ports: Model, rng: random.Random) -> None:
    """Proved and timed for a size that no number of chunks divides, and for one that leaves most chunks empty."""
    segments = rng.randint(1, 3)
    built, text = accepted(definition, p, stragglers, segments, rng)
    for count in (rng.randint(1, p), segments * p * (p - 1) + rng.randint(1, p)):
        slots = rng.choice((1, 2, 5, None))
        topology = Topology.parse(text)
        plan = compile_schedule(built, size_bytes=4 * count, topology=topology, slots=slots, ports=ports)
        verdict = verify_plan(plan)
        case = f"{definition.name} on {text}: {segments} segments, {count} elements, {slots} slots, {ports}"
        assert verdict.verdict == PROVED, (case, verdict.counterexample)
        # So few elements may all be where they are wanted.
        is_still = definition.collective in ("alltoall", "alltoallv") and count < p * p
        assert simulate(plan, topology, model=ports).seconds > 0 or is_still, case


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_sample_of_the_library_is_proved(name: str, seed: int) -> None:
    """Drawn anew in every run; small numbers of ranks more often, for they have the odd cases."""
    rng = random.Random(f"{name} {seed}")
    for ports in MODELS:
        for p in (rng.choice(RANKS[:8]), rng.choice(RANKS[:16]), rng.choice(RANKS)):
            check(SCHEDULES[name], p, rng.choice(STRAGGLERS), ports, rng)


@pytest.mark.slow
@pytest.mark.parametrize("ports", MODELS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_whole_library_is_proved(name: str, ports: Model, seed: int) -> None:
    """Over the port models every number of ranks, and with each model every number of stragglers."""
    rng = random.Random(f"{name} {ports} {seed}")
    for number, p in enumerate(RANKS[MODELS.index(ports) :: len(MODELS)]):
        check(SCHEDULES[name], p, STRAGGLERS[number % len(STRAGGLERS)], ports, rng)


@pytest.mark.parametrize(("name", "ports"), sampled(product(SCHEDULES, MODELS), every=10))
def test_one_rank_has_nothing_to_do(name: str, ports: Model) -> None:
    """Any number of segments, any size: no time passes, and the result is proved."""
    topology = Topology.parse("1@50MB/s")
    for segments, size_bytes in product((1, 3), (0, 4, 52)):
        built = SCHEDULES[name].build(topology, segments)
        plan = compile_schedule(built, size_bytes=size_bytes, topology=topology, ports=ports)
        assert verify_plan(plan).verdict == PROVED
        for model in MODELS:
            assert simulate(plan, topology, model=model).seconds == 0
