"""AllToAll, Gather and Scatter along the flow of the bound: proved, no port overloaded, near the bound, and refused."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import pytest

from optcc.collective import Collective
from optcc.compiler import compile_schedule, with_some_latency
from optcc.errors import ScheduleError, TopologyError
from optcc.export import write_msccl_xml
from optcc.flow_paths import FLOW_OF, find_paths
from optcc.planner import build
from optcc.schedules.auto_collectives import candidates_for
from optcc.schedules.flow import BlockPath, flow_all_to_all, flow_gather
from optcc.simulate import MODELS, simulate
from optcc.timing import Model
from optcc.topology import Topology
from optcc.tree_packing import PACKED_OF
from optcc.verdict import PROVED
from optcc.verify.bounds.certified import least_seconds
from optcc.verify.gpu.msccl import verify_msccl
from optcc.verify.plan import verify_plan

TEXTS = (
    "4@50GB/s,3=25GB/s",
    "torus:5@50GB/s",
    "torus:3@50GB/s:25GB/s",
    "2x2@50GB/s+450GB/s/rails",
    "3x2@50GB/s+90GB/s,1=1/2",
)


def wanted(name: str, n_ranks: int) -> Collective:
    """An AllToAll-v has blocks of none as well."""
    if name == "alltoallv":
        ranks = range(n_ranks)
        return Collective.all_to_all_v([[src * dst % 3 for dst in ranks] for src in ranks])
    return Collective(name, n_ranks, 1 if name in ("gather", "scatter") else 0)


@pytest.mark.parametrize("name", FLOW_OF)
@pytest.mark.parametrize(("text", "model"), [(text, MODELS[at % len(MODELS)]) for at, text in enumerate(TEXTS)])
def test_plans_are_proved_and_no_faster_than_the_bound(text: str, model: Model, name: str) -> None:
    topology = Topology.parse(text)
    collective = wanted(name, topology.n_ranks)
    definition = FLOW_OF[name].of(collective) if collective.cells else FLOW_OF[name]
    schedule = definition.build(topology, 3, root=collective.root)
    least = float(least_seconds(topology, 2**20, collective))
    plan = compile_schedule(schedule, size_bytes=2**20, topology=topology, ports=model)
    assert plan.collective == collective
    assert verify_plan(plan).verdict == PROVED
    assert simulate(plan, topology, model=model).seconds >= least * (1 - 1e-4)  # blocks are whole elements


@pytest.mark.parametrize("name", FLOW_OF)
@pytest.mark.parametrize("text", [text for text in TEXTS if Topology.parse(text).wired is not None])
def test_no_link_carries_more_than_the_bound_allows(text: str, name: str) -> None:
    topology = Topology.parse(text)
    graph, collective = topology.wired, wanted(name, topology.n_ranks)
    assert graph is not None
    loads = [Fraction(0)] * len(graph.links)
    for share, ranks in find_paths(topology, collective):
        for src, dst in pairwise(ranks):
            for link in graph.routes[src][dst]:
                loads[link] += share
    least = least_seconds(topology, 1, collective)
    busy = [load / link.rate for load, link in zip(loads, graph.links, strict=True)]
    assert max(busy) == least


@pytest.mark.parametrize(("text", "segments"), [("torus:3x3@50GB/s", 4), ("torus:6@50GB/s", 4), (TEXTS[3], 4)])
def test_an_all_to_all_takes_five_percent_more_than_the_bound_at_most(text: str, segments: int) -> None:
    topology = Topology.parse(text)
    built = build("flow-all-to-all", topology, 2**30, segments=segments)
    least = float(least_seconds(topology, 2**30, built.plan.collective))
    assert simulate(built.plan, topology, model="exclusive").seconds < 1.05 * least


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alltoall", "gather", "scatter"])
@pytest.mark.parametrize(
    "text",
    [
        *("torus:4x4@50GB/s", "torus:8@50GB/s", "4x4@50GB/s+450GB/s/2:2"),
        *(f"{servers}x4@50GB/s+450GB/s/rails" for servers in (2, 3, 4)),
    ],
)
def test_auto_is_within_five_percent_of_the_bound(text: str, name: str) -> None:
    topology = Topology.parse(text)
    collective = Collective(name, topology.n_ranks)
    built = build("auto", topology, 2**30, collective=collective)
    assert simulate(built.plan, topology, model="exclusive").seconds < 1.05 * float(
        least_seconds(topology, 2**30, collective)
    )


def test_auto_takes_the_flow_where_no_route_is_direct_and_tries_no_other_where_it_is_near_the_bound() -> None:
    for name in ("alltoall", "gather", "scatter"):
        ring = build("auto", Topology.parse("torus:4@50GB/s"), 2**20, collective=Collective(name, 4))
        assert ring.definition is FLOW_OF[name]
    behind_a_core = build(
        "auto", Topology.parse("2x2@50GB/s+450GB/s"), 2**29, collective=Collective("alltoall", 4), ports="fifo"
    )
    assert behind_a_core.choice is not None
    assert [each.name for each in behind_a_core.choice.candidates] == ["flow-all-to-all"]


def check_best_of_the_library(text: str, name: str, size_bytes: int, segments: Sequence[int]) -> None:
    """No schedule with so many segments is faster than what `auto` takes by more than five percent."""
    topology = Topology.parse(text).with_latency(Fraction(5, 10**6))
    collective = Collective(name, topology.n_ranks)
    chosen = build("auto", topology, size_bytes, collective=collective)
    taken_s = simulate(chosen.plan, topology, model="exclusive").seconds
    for definition in candidates_for(collective, topology, more=(*PACKED_OF.values(), *FLOW_OF.values())):
        for number in segments:
            try:
                plan = compile_schedule(definition.build(topology, number), size_bytes=size_bytes, topology=topology)
            except TopologyError:
                continue
            seconds = simulate(plan, topology, model="exclusive").seconds
            assert taken_s <= 1.05 * seconds, (definition.name, number, chosen.choice)


@pytest.mark.parametrize("name", ["reducescatter", "allgather", "broadcast", "reduce", "alltoall"])
def test_auto_is_within_five_percent_of_the_best_of_the_library_where_gpus_are_linked(name: str) -> None:
    check_best_of_the_library("torus:4@50GB/s", name, 2**24, (1, 4, 8))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2**16, 2**20, 2**24])
@pytest.mark.parametrize("text", ["2x2@50GB/s+450GB/s/rails", "torus:3x3@50GB/s"])
def test_auto_is_within_five_percent_of_the_best_of_the_library_at_more_sizes(text: str, size: int) -> None:
    for name in ("reducescatter", "allgather", "broadcast", "alltoall"):
        check_best_of_the_library(text, name, size, (1, 2, 4, 8, 16))


def test_blocks_that_are_forwarded_are_in_the_scratch_space_of_a_file() -> None:
    plan = build("flow-all-to-all", Topology.parse("torus:4@50GB/s"), 2 * 16 * 4 * 4, segments=1).plan
    data = write_msccl_xml(plan)
    assert b'srcbuf="s"' in data and b's_chunks="0"' not in data
    assert verify_msccl(data).verdict == PROVED


def test_servers_that_pool_their_nics_are_refused() -> None:
    with pytest.raises(TopologyError, match="servers pool their NICs"):
        FLOW_OF["alltoall"].build(Topology.parse("2x2@50GB/s"), 4)


THIRD = Fraction(1, 3)


@pytest.mark.parametrize(
    ("paths", "why"),
    [
        ([(THIRD, (0,)), (THIRD, (1, 0))], "paths: of 2/3 of the message: must be the whole"),
        ([(THIRD, (0,)), (THIRD, (2, 0)), (THIRD, (1, 0))], r"along \(2, 0\): must be a part of the block of rank 1"),
        ([(THIRD, (0,)), (2 * THIRD, (1, 0))], "a share of 2/3 along"),
        ([(THIRD, (0,)), (THIRD, (1, 2, 1, 0)), (THIRD, (2, 0))], r"along \(1, 2, 1, 0\): must be a part"),
        ([(THIRD, (0,)), (THIRD, (1, 0)), (THIRD, (2, 0)), (THIRD, (0, 1))], "a path after the last block"),
    ],
)
def test_paths_that_are_not_the_blocks_are_refused(paths: Sequence[tuple[Fraction, tuple[int, ...]]], why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        flow_gather(n_ranks=3, find=lambda collective: [BlockPath(*each) for each in paths])


def test_without_a_planner_there_is_no_flow() -> None:
    with pytest.raises(TopologyError, match="its flow must be found first: use the planner"):
        flow_all_to_all.build(Topology.parse("torus:4@50GB/s"), 1)


def test_fewer_segments_are_tried_where_numbers_were_skipped_on_the_way() -> None:
    """On a ring of eight cables the number is skipped to that would be near the busiest port; a quarter is faster."""
    topology, size_bytes = Topology.parse("torus:8@50GB/s"), 2**26
    choice = build("auto", topology, size_bytes, collective=Collective("allgather", 8))
    packed = PACKED_OF["allgather"]
    assert choice.schedule.name == packed.name
    timed = with_some_latency(topology)

    def seconds(segments: int) -> float:
        plan = compile_schedule(packed.build(timed, segments), size_bytes=size_bytes, topology=timed)
        return simulate(plan, timed).seconds

    assert all(seconds(choice.segments) <= seconds(round(choice.segments * by)) for by in (1 / 2, 2, 4))
