"""Hierarchical AllReduce: proved, every port loaded as the formula says, the ring where there is no hierarchy."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from optcc.compiler import compile_schedule
from optcc.errors import ScheduleError, TopologyError
from optcc.passes.bind import bind
from optcc.passes.depend import depend
from optcc.schedules.hierarchical import hierarchical
from optcc.schedules.ring import ring
from optcc.simulate import simulate
from optcc.topology import Nic, Server, Topology
from optcc.verdict import PROVED
from optcc.verify.bounds.closed_forms import allreduce_bound
from optcc.verify.plan import verify_plan

SHAPES = [(1, 1), (1, 4), (2, 1), (2, 2), (2, 3), (3, 2), (3, 3), (4, 2), (5, 1), (2, 8)]
"""Servers, GPUs a server."""
RATE = Fraction(10**6)


def cluster(n_servers: int, gpus: int, fabric: Fraction | None = None, slow: Fraction = RATE) -> Topology:
    """Servers of `RATE`, the last one of rate `slow`, each GPU with `fabric` inside its server."""
    rates = [RATE] * (n_servers - 1) + [slow]
    return Topology(tuple(Server(f"h{i}", gpus, (Nic(0, rate, rate),), fabric) for i, rate in enumerate(rates)))


def size_of(n_servers: int, gpus: int, segments: int) -> int:
    """Bytes that every chunk divides."""
    return 4 * n_servers * gpus * segments * 60


@pytest.mark.parametrize(("n_servers", "gpus"), SHAPES)
def test_every_size_is_proved(n_servers: int, gpus: int) -> None:
    """Whole and ragged, less than an element a chunk, nothing at all; as written and ordered for the topology."""
    topology = cluster(n_servers, gpus, RATE / 2, RATE / 3)
    for segments, count in ((1, 0), (1, 1), (2, 7), (3, 97), (2, 240)):
        schedule = hierarchical.build(topology, segments)
        for order in (None, topology):
            verdict = verify_plan(compile_schedule(schedule, size_bytes=4 * count, topology=order))
            assert verdict.verdict == PROVED, verdict.counterexample


@pytest.mark.parametrize(("n_servers", "gpus"), SHAPES)
def test_stages_have_the_transfers_of_their_rings(n_servers: int, gpus: int) -> None:
    """Inside, N servers pass g shards of N parts over g - 1 links, twice; across, g rings do their 2N(N - 1)."""
    schedule = hierarchical(n_servers * gpus, 2, gpus=gpus)
    inside = 2 * n_servers * n_servers * gpus * (gpus - 1)
    across = 2 * gpus * n_servers * (n_servers - 1)
    counts = [int((schedule.stage == stage).sum()) for stage in range(len(schedule.stages))]
    assert counts == [inside, across, across, inside]
    for row in schedule:
        same_server = row.src // gpus == row.dst // gpus
        assert same_server == row.stage.endswith("inside")
        assert same_server or row.src % gpus == row.dst % gpus == row.section // n_servers


@pytest.mark.parametrize(("n_servers", "gpus"), SHAPES)
def test_ports_carry_what_the_formula_says(n_servers: int, gpus: int) -> None:
    """2(N - 1)/N of the message each way through every server, 2(g - 1)/g through every GPU, to the byte."""
    segments = 3
    size = size_of(n_servers, gpus, segments)
    topology = cluster(n_servers, gpus, RATE / 4, RATE / 2)
    timing = simulate(compile_schedule(hierarchical.build(topology, segments), size_bytes=size), topology)
    rates = dict.fromkeys(timing.port_names, RATE)
    rates |= {name: RATE / 4 for name in timing.port_names if "gpu" in name}
    rates |= dict.fromkeys((f"out h{n_servers - 1}", f"in h{n_servers - 1}"), RATE / 2)
    for name, busy_s in zip(timing.port_names, timing.port_busy_s, strict=True):
        inside, across = Fraction(2 * (gpus - 1), gpus) * size, Fraction(2 * (n_servers - 1), n_servers) * size
        assert round(busy_s * rates[name], 6) == (inside if "gpu" in name else across)


@pytest.mark.parametrize("p", [1, 2, 5])
@pytest.mark.parametrize("segments", [1, 3])
def test_one_gpu_a_server_is_the_ring(p: int, segments: int) -> None:
    """The same transfers in the same order."""

    def rows(text: str) -> str:
        return text.replace(" across", "")

    own = [rows(str(each)) for each in hierarchical(p, segments, gpus=1)]
    assert own == [str(each) for each in ring(p, segments)]


@pytest.mark.parametrize("gpus", [2, 3, 8])
def test_one_server_is_the_ring_inside_it(gpus: int) -> None:
    """The same transfers, each section one place on: here GPU j ends up with shard j, there with the one after it."""
    own = [(row.src, row.dst, row.op, row.section) for row in hierarchical(gpus, gpus=gpus)]
    assert own == [(row.src, row.dst, row.op, (row.section - 1) % gpus) for row in ring(gpus)]


@pytest.mark.parametrize(("n_servers", "gpus"), [(2, 2), (3, 2), (3, 3), (4, 2), (2, 4)])
@pytest.mark.parametrize("segments", [1, 4])
def test_a_fabric_that_is_no_limit_leaves_the_ring_of_servers(n_servers: int, gpus: int, segments: int) -> None:
    """2(N - 1)/N * n / b with the slowest server's rate b, which without stragglers is the bound."""
    size = size_of(n_servers, gpus, segments)
    across = Fraction(2 * (n_servers - 1), n_servers) * size / RATE
    healthy, slow = cluster(n_servers, gpus), cluster(n_servers, gpus, slow=RATE / 5)
    assert across == allreduce_bound(healthy, size).seconds
    for topology, factor in ((healthy, 1), (slow, 5)):
        plan = compile_schedule(hierarchical.build(topology, segments), size_bytes=size)
        assert simulate(plan, topology).seconds == pytest.approx(float(factor * across))


@pytest.mark.parametrize(("n_servers", "gpus"), [(2, 2), (3, 2), (3, 3), (4, 4)])
@pytest.mark.parametrize("fabric", [Fraction(1, 2), Fraction(1), Fraction(3)])
def test_as_written_it_takes_no_longer_than_both_parts_together(n_servers: int, gpus: int, fabric: Fraction) -> None:
    """Between the larger of what goes across and what goes inside, and their sum."""
    size, topology = size_of(n_servers, gpus, 2), cluster(n_servers, gpus, fabric * RATE)
    across = Fraction(2 * (n_servers - 1), n_servers) * size / RATE
    inside = Fraction(2 * (gpus - 1), gpus) * size / (fabric * RATE)
    for segments in (1, 2):
        plan = compile_schedule(hierarchical.build(topology, segments), size_bytes=size)
        took = simulate(plan, topology).seconds
        assert float(max(across, inside)) <= took * (1 + 1e-9)
        assert took <= float(across + inside) * (1 + 1e-9)


@pytest.mark.parametrize("fabric", [Fraction(1, 2), Fraction(1), Fraction(2)])
@pytest.mark.parametrize(("n_servers", "gpus"), [(2, 2), (3, 2)])
def test_many_segments_overlap_what_is_inside_with_what_is_across(n_servers: int, gpus: int, fabric: Fraction) -> None:
    """A GPU that sends inside and across at once needs hardly more than the larger of the two."""
    size, topology = size_of(n_servers, gpus, 16), cluster(n_servers, gpus, fabric * RATE)
    across = Fraction(2 * (n_servers - 1), n_servers) * size / RATE
    inside = Fraction(2 * (gpus - 1), gpus) * size / (fabric * RATE)
    transfers = depend(bind(hierarchical.build(topology, 16), size, "float32", "sum"))
    assert simulate(transfers, topology).seconds <= 1.06 * float(max(across, inside))


@pytest.mark.parametrize(("n_servers", "gpus"), [(2, 2), (3, 4), (4, 2)])
def test_latency_adds_up_over_the_steps_of_one_segment(n_servers: int, gpus: int) -> None:
    """2(N + g - 2) messages follow one another."""
    topology = cluster(n_servers, gpus)
    size, alpha = size_of(n_servers, gpus, 1), Fraction(1)
    transfers = depend(bind(hierarchical.build(topology), size, "float32", "sum"))
    more = simulate(transfers, topology.with_latency(alpha)).seconds - simulate(transfers, topology).seconds
    assert more == pytest.approx(2 * (n_servers + gpus - 2), rel=0.01)


def test_lost_nics_are_shared_by_all_gpus_of_the_server() -> None:
    """Server 1 keeps one NIC of four: the plan is the same, and all four GPUs go through it, four times as long."""
    healthy, failed = Topology.parse("3x4@1MB/s"), Topology.parse("3x4@1MB/s,1=1/4")
    size = size_of(3, 4, 1)
    plan = compile_schedule(hierarchical.build(failed), size_bytes=size)
    assert plan.digest == compile_schedule(hierarchical.build(healthy), size_bytes=size).digest
    assert simulate(plan, failed).seconds == pytest.approx(4 * simulate(plan, healthy).seconds)


def test_servers_of_unequal_size_are_refused() -> None:
    """The refusal names two that differ."""
    topology = cluster(3, 2)
    unequal = replace(topology, servers=(*topology.servers[:2], replace(topology.servers[2], gpus=4)))
    with pytest.raises(TopologyError, match="h0 has 2 GPUs, h2 4: must be equally many"):
        hierarchical.build(unequal)


@pytest.mark.parametrize("gpus", [-1, 0, 4, 7])
def test_ranks_that_are_no_whole_number_of_servers_are_refused(gpus: int) -> None:
    with pytest.raises(ScheduleError, match=f"{gpus} GPUs a server: must divide the number of ranks, 6"):
        hierarchical(6, gpus=gpus)
