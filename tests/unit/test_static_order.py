"""The sweep against the exact critical path of the plan in the same order, closed forms, and its own rules."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest

from optcc.arrays import column
from optcc.compiler import compile_schedule
from optcc.dsl import Definition, Program, schedule
from optcc.errors import InputError, ScheduleError, TopologyError
from optcc.schedules.registry import SCHEDULES
from optcc.schedules.ring import ring
from optcc.static_order import SerialModel, time_static_order
from optcc.topology import Nic, Server, Topology
from optcc.verify.plan.timing import exact_makespan

EVEN, ONE_SLOW, UNLIKE = "6@50GB/s", "6@50GB/s,5=25GB/s", "6@50GB/s,5=25GB/s,2=30GB/s:50GB/s"
MODELS: tuple[SerialModel, ...] = ("fifo", "exclusive")


def accepted(definition: Definition, text: str) -> Topology | None:
    """The topology, with latency, if the schedule takes it."""
    topology = Topology.parse(text).with_latency(Fraction(5, 10**6))
    try:
        definition.build(topology)
    except TopologyError:
        return None
    return topology


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("text", [EVEN, ONE_SLOW, UNLIKE])
def test_the_exact_time_of_the_plan_as_written(name: str, text: str) -> None:
    """A plan with a slot for every message, its lanes as written: the same moments, computed from its instructions."""
    definition = SCHEDULES[name]
    topology = accepted(definition, text)
    if topology is None:
        assert name in ("optcc", "stragglar", "r2ccl-allreduce", "hierarchical")
        return
    for segments, count in ((1, 1), (3, 100_003)):
        plan = compile_schedule(definition.build(topology, segments), size_bytes=4 * count, slots=2**16, fused=False)
        for model in MODELS:
            swept = time_static_order(definition, topology, size_bytes=4 * count, segments=segments, model=model)
            exact = exact_makespan(plan, topology, model=model).seconds
            assert swept.seconds == pytest.approx(float(exact), rel=1e-12)
            assert swept.transfers == len(plan.transfers)


@pytest.mark.parametrize("model", MODELS)
def test_the_ring_takes_its_formula(model: SerialModel) -> None:
    """2(p - 1) (n / (pB) + alpha). With one slow rank 2(p - 1) n / (pb) + 2 alpha: the first time it waits for data,
    and the last message's latency; all others pass while its port is busy."""
    p, n = 64, 64 * 10**6
    even = Topology.parse(f"{p}@50GB/s").with_latency(Fraction(1, 10**6))
    assert time_static_order(ring, even, size_bytes=n, model=model).seconds == pytest.approx(
        2 * (p - 1) * 21e-6, rel=1e-12
    )
    topology = Topology.parse(f"{p}@50GB/s,7=10GB/s").with_latency(Fraction(1, 10**6))
    result = time_static_order(ring, topology, size_bytes=n, model=model)
    assert result.seconds == pytest.approx(2 * (p - 1) * n / p / 10e9 + 2e-6, rel=1e-12)
    assert result.port_busy_s["out h7"] == pytest.approx(2 * (p - 1) * n / p / 10e9, rel=1e-12)
    assert result.utilisation()["in h7"] < 1
    assert result.transfers == 2 * p * (p - 1)


def test_servers_pool_their_nics_and_share_a_fabric() -> None:
    """Two GPUs of a server send through one pooled port, one after the other; inside, each has its fabric's rate."""

    @schedule(configure=lambda _: {})
    def shift(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            segment[0].copy(src=0, dst=2)
            segment[0].copy(src=1, dst=3)
            segment[0].copy(src=2, dst=3)

    nics = tuple(Nic(rail, Fraction(500), Fraction(500)) for rail in (0, 1))
    topology = Topology(tuple(Server(f"h{i}", 2, nics, fabric=Fraction(4000)) for i in (0, 1)))
    result = time_static_order(shift, topology, size_bytes=1000)
    assert result.seconds == pytest.approx(2)  # the third is done while the second arrives
    assert result.port_busy_s["out h0"] == pytest.approx(2)
    assert result.port_busy_s["out h1 gpu 0"] == pytest.approx(0.25)


def test_receives_are_done_in_turn() -> None:
    """The second copy waits for what it overwrites, a second long; so the third is not done before it, and what is sent
    on from there leaves only then."""

    @schedule(configure=lambda _: {})
    def held(program: Program) -> None:
        for segment in program.pipeline(sections=2):
            segment[0].copy(src=2, dst=0)
            segment[0].copy(src=1, dst=0)
            segment[1].copy(src=1, dst=0)
            segment[1].copy(src=0, dst=2)

    nic = (Nic(0, Fraction(500), Fraction(500)),)
    topology = Topology(tuple(Server(f"h{i}", 2, nic) for i in (0, 1)))
    plan = compile_schedule(held.build(topology), size_bytes=1000, slots=2**16, fused=False)
    for model in MODELS:
        assert time_static_order(held, topology, size_bytes=1000, model=model).seconds == 2
        assert exact_makespan(plan, topology, model=model).seconds == 2


def test_nothing_takes_no_time() -> None:
    """One rank, and no bytes."""
    assert time_static_order(ring, Topology.parse("1@1GB/s"), size_bytes=100).seconds == 0
    nothing = time_static_order(ring, Topology.parse("4@1GB/s"), size_bytes=0)
    assert (nothing.seconds, nothing.transfers) == (0, 0)


def test_pipelines_asked_for_later_have_room() -> None:
    """Chunks and scratch slots that come up after transfers were taken keep what was known."""

    @schedule
    def late(program: Program) -> None:
        for share in (Fraction(1, 4), Fraction(3, 4)):
            for segment in program.pipeline(sections=1, share=share, scratch=2):
                segment[0].copy(src=0, dst=1, into=segment.scratch(0, int(share * 4) // 3))
                for _ in range(70_000):
                    segment[0].copy(src=0, dst=1)

    topology = Topology.parse("2@1GB/s")
    assert time_static_order(late, topology, size_bytes=16).seconds == pytest.approx(70_001 * 16e-9)


def test_a_step_may_be_written_with_any_arrays_of_whole_numbers() -> None:
    """Read-only, backwards, of 32 bits, or changed by the author afterwards: the same transfers, built and swept."""

    def shifts(program: Program, change: Callable[[Any], Any]) -> None:
        ranks = np.arange(program.n_ranks)
        for segment in program.pipeline(sections=program.n_ranks):
            for shift in (1, 2):
                given = [change(each) for each in ((ranks + shift) % len(ranks), ranks, (ranks + shift) % len(ranks))]
                segment.copy(*given)
                for each in given:
                    if each.flags.writeable:
                        each[:] = 0

    changes: tuple[Callable[[Any], Any], ...] = (
        np.copy,
        column,
        lambda values: np.flip(values).copy()[::-1],
        lambda values: np.repeat(values, 2)[::2],
        lambda values: values.astype(np.int32),
    )
    topology = Topology.parse("5@1GB/s,2=300MB/s").with_latency(Fraction(1, 10**6))
    swept, built = [], []
    for change in changes:
        definition = schedule(configure=partial(lambda change, _: {"change": change}, change))(shifts)
        swept.append(time_static_order(definition, topology, size_bytes=20_000).seconds)
        built.append([str(transfer) for transfer in definition.build(topology)])
    assert len(set(swept)) == 1
    assert len(built[0]) == 10
    assert all(each == built[0] for each in built)


def test_what_cannot_be_is_refused() -> None:
    """A model, rails, a schedule's own mistake after a hundred thousand transfers."""

    @schedule
    def wrong(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            for _ in range(100_000):
                segment[0].copy(src=0, dst=1)
            segment[0].copy(src=0, dst=9)

    topology = Topology.parse("4@1GB/s")
    with pytest.raises(InputError, match="model 'fair'"):
        time_static_order(ring, topology, size_bytes=4, model="fair")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="dst 9"):
        time_static_order(wrong, topology, size_bytes=4)
    rails = tuple(Server(f"h{i}", 1, (Nic(i, Fraction(1), Fraction(1)),)) for i in (0, 1))
    with pytest.raises(TopologyError, match="rails"):
        time_static_order(ring, Topology(rails, rail_only=True), size_bytes=4)
    with pytest.raises(TopologyError, match="NICs of GPUs"):
        time_static_order(ring, Topology.parse("4x2@5GB/s+9GB/s/2:2"), size_bytes=4)
