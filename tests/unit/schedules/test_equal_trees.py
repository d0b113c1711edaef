"""Trees of one share each on servers whose NICs belong to GPUs: within every port's room, proved, near the bound."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from optcc.collective import Collective
from optcc.compiler import (
    CLOSE,
    FLIGHTS,
    LINK_LANES,
    SLOTS,
    STAGE_LANES,
    compile_schedule,
    find_transfers,
    try_segments,
)
from optcc.errors import SolverUnknown, TopologyError
from optcc.experiments.loss_patterns import pattern
from optcc.passes.lane_assignment import lanes_by_port
from optcc.passes.lower import lower
from optcc.passes.timetable import timetable
from optcc.plan import Plan
from optcc.planner import NEAR_BOUND, NEAR_OF_MANY, build, find_schedule
from optcc.schedules.auto import pooled_bound_s
from optcc.schedules.equal_trees import equal_trees, equal_trees_of
from optcc.schedules.server_trees import LOSS_MAX, Room, ServerNetwork, numbers_of_trees, server_trees
from optcc.simulate import MODELS, simulate
from optcc.timing import Model, Timing
from optcc.topology import Topology
from optcc.tree_shaping import WeightedTree, link_loads
from optcc.verdict import PROVED
from optcc.verify.bounds.certified import least_seconds
from optcc.verify.plan import verify_plan

TEXTS = (
    "2x2@50GB/s+450GB/s",
    "3x4@50GB/s+450GB/s,1=2..3/4",
    "3x4@50GB/s+450GB/s/rails,0=0..1/4,2=2..3/4",
    "4x2@50GB/s:40GB/s+450GB/s/2:2,3=1/2",
)


def over_the_bound(topology: Topology) -> Fraction:
    """What the busiest link takes for its share of the message, over the certified bound."""
    graph = topology.wired
    assert graph is not None
    trees = equal_trees_of(topology)
    both_ways = [WeightedTree(Fraction(1, len(trees)), tree, up) for tree in trees for up in (True, False)]
    taken = max(load / link.rate for load, link in zip(link_loads(both_ways, graph), graph.links, strict=True))
    return taken / least_seconds(topology, 1, Collective("allreduce", topology.n_ranks))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("text", TEXTS)
def test_plans_are_proved_and_no_faster_than_the_bound(text: str, model: Model) -> None:
    topology = Topology.parse(text)
    plan = compile_schedule(equal_trees.build(topology, 8), size_bytes=2**20, topology=topology, ports=model)
    assert verify_plan(plan).verdict == PROVED
    assert simulate(plan, topology, model=model).seconds >= float(least_seconds(topology, 2**20, plan.collective))


@pytest.mark.parametrize(
    ("seed", "kept", "trees"),
    [
        (12, "core 7 7 7 8", 29),
        (16, "rails 8 8 8", 12),
        (15, "pods 8 8 8 8", 16),
        (69, "pods 6 7 8 6 7 4 7 8", 15),
        (33, "rails 8 8 7 8 7", 19),
    ],
)
def test_loads_are_near_the_bound_where_a_packing_has_many_unequal_trees(seed: int, kept: str, trees: int) -> None:
    """The worst patterns of lost NICs for packings under fair ports, 24 to 39 trees: 1.09 to 1.27 of the bound."""
    kind, topology = pattern(seed)
    left = (sum(not nic.failed for nic in server.nics) for server in topology.servers)
    assert f"{kind} {' '.join(map(str, left))}" == kept
    assert len(equal_trees_of(topology)) == trees
    assert 1 <= over_the_bound(topology) < Fraction(102, 100)


def test_one_slow_server_decides_and_half_of_its_nics_take_a_whole_tree_each() -> None:
    topology = Topology.parse("4xdgx-h100,3=4/8")
    trees = equal_trees_of(topology)
    assert len(trees) == 4
    assert over_the_bound(topology) == 1
    plan = compile_schedule(equal_trees.build(topology, 256), size_bytes=2**30, topology=topology, ports="fair")
    least = float(least_seconds(topology, 2**30, plan.collective))
    assert 1 <= simulate(plan, topology, model="fair").seconds / least < 1.04


@pytest.mark.parametrize("seed", range(12))
def test_no_port_has_more_edges_than_room(seed: int) -> None:
    """Of servers with other numbers of GPUs and rates, too, each tree spans all servers once."""
    rng = random.Random(f"server trees {seed}")
    _, drawn = pattern(rng.randrange(1000))
    network = ServerNetwork.of(drawn)
    found = 0
    for trees, seconds in numbers_of_trees(network)[:3]:
        assert network.least <= seconds <= LOSS_MAX * network.least
        room = Room.of(network, trees, seconds)
        made = server_trees(network, room)
        if made is None:
            continue
        found += 1
        left = Room.of(network, trees, seconds)
        assert len(made) == trees
        for tree in made:
            reached = {tree.root}
            for edge in tree.edges:
                assert edge.parent in reached
                assert edge.child not in reached
                reached.add(edge.child)
                rails = []
                for server, gpu in ((edge.child, edge.child_gpu), (edge.parent, edge.parent_gpu)):
                    place = next(at for at, nic in enumerate(network.nics[server]) if nic.gpu == gpu)
                    left.nics[server][place] -= 1
                    rails.append(network.nics[server][place].rail)
                assert rails[0] == rails[1]
                if network.pod_of[edge.child] != network.pod_of[edge.parent]:
                    for server in (edge.child, edge.parent):
                        left.uplinks[network.pod_of[server]] -= 1
            assert reached == set(range(len(network.gpus)))
        assert min(map(min, left.nics)) >= 0
        assert min(left.uplinks, default=0) >= 0
    assert found or drawn.rail_only


@pytest.mark.parametrize(
    ("text", "over"),
    [
        ("2xdgx-h100", 1),
        ("2xdgx-h100/rails", 1),
        ("2x8@50GB/s+100GB/s", 1),
        ("4x8@50GB/s+100GB/s/rails", 1.007),
        ("4x8@50GB/s+100GB/s/2:2,1=6/8", 1.07),
        ("8x8@50GB/s+200GB/s", 1.016),
    ],
)
def test_nics_relieve_fabrics_that_are_what_takes_longest(text: str, over: float) -> None:
    """Without an edge between servers beyond those that join them it is 2 (g - 1) / g over the fabric's rate."""
    topology = Topology.parse(text)
    server = topology.servers[0]
    assert server.fabric is not None
    alone = Fraction(2 * (server.gpus - 1), server.gpus) / server.fabric
    bound = least_seconds(topology, 1, Collective("allreduce", topology.n_ranks))
    assert over_the_bound(topology) <= over < alone / bound
    plan = compile_schedule(equal_trees.build(topology, 4), size_bytes=2**20, topology=topology, ports="fair")
    assert verify_plan(plan).verdict == PROVED


SMALL = (3, 9, 12, 15, 18, 21, 24, 27, 30, 33, 36, 39, 42, 45, 51, 54, 57, 60, 66, 78, 81, 93, 96, 99)
"""Patterns of at most six servers, on which such trees are found."""


@pytest.mark.parametrize("seed", [87, *(pytest.param(each, marks=pytest.mark.slow) for each in SMALL)])
def test_slow_fabrics_are_relieved_as_far_as_lost_nics_allow(seed: int) -> None:
    rng = random.Random(seed)
    _, drawn = pattern(seed)
    fabric = Fraction(rng.choice((75, 100, 150, 200, 300)) * 10**9)
    topology = replace(drawn, servers=tuple(replace(server, fabric=fabric) for server in drawn.servers))
    assert 1 <= over_the_bound(topology) <= 1.13


@pytest.mark.parametrize("ports", ["fifo", "fair"])
def test_auto_takes_them_and_solves_no_linear_program(ports: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound over pooled servers is near enough to tell that nothing else can be much faster."""
    monkeypatch.setattr("optcc.planner.least_seconds", lambda *_: pytest.fail("a linear program was solved"))
    topology = Topology.parse("3x4@50GB/s+450GB/s,1=2..3/4")
    made = build("auto", topology, 2**28, ports=ports)
    assert made.definition is equal_trees
    assert made.seconds is not None
    assert simulate(made.plan, topology, model=ports).seconds <= made.seconds
    assert made.seconds <= NEAR_BOUND * pooled_bound_s(topology, 2**28)
    assert made.compared is not None
    assert [row[2] for row in made.compared.rows[1:]] == ["not tried: near the bound already"] * 3


def test_many_ranks_get_no_other_schedule_where_a_pipeline_takes_a_few_percent_to_fill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The linear program of a packing would take minutes."""
    topology, size = Topology.parse(TEXTS[1]), 2**24
    few = build("auto", topology, size, ports="fifo")
    monkeypatch.setattr("optcc.planner.MANY_RANKS", topology.n_ranks - 1)
    many = build("auto", topology, size, ports="fifo")
    tried = [[row[2] for row in each.compared.rows] for each in (few, many) if each.compared]
    assert tried[1][1:] == ["not tried: near the bound already"] * 3 != tried[0][1:]
    assert many.seconds is not None
    assert NEAR_BOUND < many.seconds / pooled_bound_s(topology, size) <= NEAR_OF_MANY


def test_auto_takes_the_fastest_where_the_linear_program_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> Fraction:
        raise SolverUnknown("no time left")

    monkeypatch.setattr("optcc.planner.least_seconds", unknown)
    made = build("auto", Topology.parse("3x2@50GB/s+450GB/s"), 2**12, ports="fair")
    assert made.compared is not None
    assert len(made.compared.rows) == 4
    assert made.timing is not None


def test_short_messages_get_few_segments_and_long_ones_no_more_than_bring_them_near() -> None:
    topology = Topology.parse("3x4@50GB/s+450GB/s,1=2..3/4").with_latency(Fraction(5, 10**6))
    for size, most in ((2**12, 2), (2**30, 1024)):
        made = build("equal-trees", topology, size, ports="fair")
        timing = simulate(made.plan, topology, model="fair")
        assert made.segments <= most
        for segments in (1, 4):
            plan = build("equal-trees", topology, size, segments=segments, ports="fair").plan
            assert timing.seconds <= 1.01 * simulate(plan, topology, model="fair").seconds
    assert timing.seconds <= (1 + 2 * CLOSE) * max(timing.port_busy_s)


def test_a_plan_that_is_foreseen_is_the_one_that_timing_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes no longer than is said."""
    monkeypatch.setattr("optcc.compiler.SIMULATED_MAX", 2**16)
    topology, size = Topology.parse(TEXTS[1]).with_latency(Fraction(5, 10**6)), 2**29
    options: dict[str, Any] = {"size_bytes": size, "ports": "fair"}
    segments, timed = try_segments(equal_trees, topology, **options)
    assert timed is not None and timed.timing is not None
    near_s = 1.1 * timed.seconds
    number, foreseen = try_segments(equal_trees, topology, **options, near_s=near_s)
    assert foreseen is not None and foreseen.timing is None
    assert (number, foreseen.plan.digest) == (segments, timed.plan.digest)
    assert timed.seconds <= foreseen.seconds <= near_s
    _, again = try_segments(equal_trees, topology, **options, near_s=foreseen.seconds * 0.999)
    assert again is not None and again.timing is not None
    assert (again.seconds, again.plan.digest) == (timed.seconds, timed.plan.digest)


def test_no_plan_is_timed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all stages carry the same, two of the candidates of fair ports are one plan."""
    timed: list[str] = []

    def counted(plan: Plan, topology: Topology, **options: Any) -> Timing:
        timed.append(plan.digest)
        return simulate(plan, topology, **options)

    monkeypatch.setattr("optcc.compiler.simulate", counted)
    topology = Topology.parse(TEXTS[1]).with_latency(Fraction(5, 10**6))
    schedule = equal_trees.build(topology, 32)
    compile_schedule(schedule, size_bytes=2**24, topology=topology, ports="fair")
    assert len(timed) == len(set(timed)) == len(LINK_LANES) + len(STAGE_LANES)
    timed.clear()
    assert try_segments(equal_trees, topology, size_bytes=2**24, ports="fair")[1] is not None
    assert len(timed) == len(set(timed))


def test_only_one_order_of_the_ports_is_tried_where_stages_carry_the_same() -> None:
    """Under fifo ports lanes for each tree are better than a timetable, which takes far longer to make."""
    topology = Topology.parse("4xdgx-h100")
    schedule = equal_trees.build(topology, 32)
    plan = compile_schedule(schedule, size_bytes=2**30, topology=topology, ports="fifo")
    transfers = find_transfers(schedule, 2**30, "float32", "sum")
    ordered, order = timetable(transfers, topology, SLOTS["fifo"], "fifo", FLIGHTS[1])
    assert topology.wired is not None
    lanes = lanes_by_port(ordered, topology.wired, SLOTS["fifo"])
    other = lower(schedule.name, ordered, order.sends, lanes, order.receives, ports="fifo")
    assert simulate(plan, topology).seconds < simulate(other, topology).seconds


def test_what_is_refused() -> None:
    assert find_schedule("equal-trees") is equal_trees
    for text, rule in (
        ("4x2@50GB/s", "NICs must belong to GPUs"),
        ("torus:3x3@50GB/s", "NICs must belong to GPUs"),
        ("1x4@50GB/s+450GB/s", "several servers"),
        ("4x2@50GB/s+450GB/s/rails/2:2", "must have no pods"),
        ("2x2@50GB/s+450GB/s/rails,0=0..0/2,1=1..1/2", "no few trees"),
    ):
        with pytest.raises(TopologyError, match=rule):
            equal_trees.build(Topology.parse(text), 4)
