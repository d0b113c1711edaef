"""AllGather and ReduceScatter in stars over servers: proved, all NICs evenly busy, in phases, and chosen by `auto`."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest

from optcc.collective import Collective
from optcc.compiler import compile_schedule
from optcc.dsl import Definition
from optcc.errors import TopologyError
from optcc.planner import build
from optcc.schedules.server_stars import servers_with_nics, star_all_gather, star_reduce_scatter, stars_in_turn
from optcc.simulate import simulate
from optcc.timing import Model
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.bounds.certified import least_seconds
from optcc.verify.plan import verify_plan

BOTH = (star_all_gather, star_reduce_scatter)
HEALTHY = "3x4@50GB/s+450GB/s"
TEXTS = (
    "2x2@50GB/s+450GB/s",
    "3x4@50GB/s+450GB/s,1=2..3/4",
    "3x4@50GB/s+450GB/s,0=1/4,2=3/4",
    "3x4@50GB/s+450GB/s/rails,0=0..2/4,2=1..3/4",
)


@pytest.mark.parametrize(("text", "model"), [*((text, "fifo") for text in TEXTS), (TEXTS[1], "fair")])
@pytest.mark.parametrize("definition", BOTH, ids=lambda each: each.name)
def test_plans_are_proved_and_no_faster_than_the_bound(definition: Definition, text: str, model: Model) -> None:
    topology = Topology.parse(text)
    schedule = definition.build(topology, 5)
    plan = compile_schedule(schedule, size_bytes=2**20 + 4 * 7, topology=topology, ports=model)
    assert verify_plan(plan).verdict == PROVED
    least = float(least_seconds(topology, 2**20 + 4 * 7, plan.collective))
    assert simulate(plan, topology, model=model).seconds >= least * (1 - 1e-9)


@pytest.mark.parametrize(
    ("text", "uneven"),
    [("4x4@50GB/s+450GB/s,3=3/4", 1e-9), ("4x4@50GB/s+450GB/s/rails,0=0..2/4,3=1..3/4", 0.02)],
)
@pytest.mark.parametrize("definition", BOTH, ids=lambda each: each.name)
def test_the_nics_left_share_what_a_server_must_exchange(definition: Definition, text: str, uneven: float) -> None:
    """Twelve slices from outside for three NICs: evenly behind a core, nearly so where rails must be the same."""
    topology = Topology.parse(text)
    schedule = definition.build(topology, 16)
    plan = compile_schedule(schedule, size_bytes=2**30, topology=topology, ports="fifo")
    timing = simulate(plan, topology, model="fifo")
    least = float(least_seconds(topology, 2**30, plan.collective))
    assert max(timing.port_busy_s) <= (1 + uneven) * least
    assert timing.seconds <= (1.025 + uneven) * least


def test_in_every_phase_each_nic_sends_one_slice_and_receives_one() -> None:
    """Healthy servers need no GPU's NIC but the owner's: the hop inside, for its NIC, is left out."""
    network = servers_with_nics(Topology.parse(HEALTHY))["network"]
    one, other = islice(stars_in_turn(network), 2)
    assert one is other, "turns repeat as soon as all NICs have the same to do"
    for phase in (1, 2):
        hops = [(star[phase].parents[0], star[phase].children[0]) for star in one]
        assert sorted(sender for sender, _ in hops) == sorted(receiver for _, receiver in hops) == list(range(12))
        assert [sender for sender, _ in hops] == list(range(12))
        assert all((receiver // 4 - sender // 4) % 3 == phase for sender, receiver in hops)


def test_a_slow_nic_carries_as_much_as_its_rate_allows() -> None:
    servers = Topology.parse("2x2@50GB/s+450GB/s").servers
    slow = replace(servers[1], nics=(servers[1].nics[0], replace(servers[1].nics[1], out=Fraction(25 * 10**9))))
    network = servers_with_nics(Topology((servers[0], slow)))["network"]
    exits = [int(star[1].parents[0]) for turn in islice(stars_in_turn(network), 3) for star in turn[2:]]
    assert sorted(exits) == [2, 2, 2, 2, 3, 3], "two of three by the NIC of twice the rate"


@pytest.mark.parametrize(("text", "name"), [(HEALTHY, "allgather"), ("3x4@50GB/s+450GB/s,1=2..3/4", "reducescatter")])
def test_auto_takes_them_within_a_percent_of_the_bound(text: str, name: str) -> None:
    topology = Topology.parse(text)
    built = build("auto", topology, 2**30, collective=Collective(name, topology.n_ranks), ports="fifo")
    assert built.definition in BOTH
    assert built.choice is not None
    assert len(built.choice.candidates) == 1, "nothing else is tried so near to the bound"
    least = float(least_seconds(topology, 2**30, built.plan.collective))
    assert simulate(built.plan, topology, model="fifo").seconds <= 1.01 * least


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("2x2@50GB/s", "NICs must belong to GPUs"),
        ("torus:3x3@50GB/s", "NICs must belong to GPUs"),
        ("1x4@50GB/s+450GB/s", "must have several servers"),
        ("3x4@50GB/s+450GB/s/rails,0=0..1/4,2=2..3/4", "servers 0 and 2 share no rail"),
    ],
)
def test_topologies_without_such_stars_are_refused(text: str, rule: str) -> None:
    for definition in BOTH:
        with pytest.raises(TopologyError, match=rule):
            definition.build(Topology.parse(text))


def test_data_enter_a_server_before_they_are_passed_on() -> None:
    network = servers_with_nics(Topology.parse("3x4@50GB/s+450GB/s,0=2/4"))["network"]
    for star in next(stars_in_turn(network)):
        for edges in star:
            there = {int(edges.parents[0])}
            for parent, child in zip(edges.parents.tolist(), edges.children.tolist(), strict=True):
                assert parent in there
                there.add(child)
    assert np.concatenate([edges.children for edges in next(stars_in_turn(network))[0]]).size == 11
