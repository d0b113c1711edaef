"""The optimal schedule: loads that follow the rates, trees that follow the loads, and times close to the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest

from optcc.compiler import compile_schedule
from optcc.dsl import Definition
from optcc.errors import TopologyError
from optcc.passes.lane_assignment import ALL_PAIRS_MAX
from optcc.schedule import Schedule
from optcc.schedules.fair_optimum import shares
from optcc.schedules.loads import port_loads
from optcc.schedules.optimal import ROWS_SEGMENTS, degree_for, optimal, tree_pairs
from optcc.simulate import simulate
from optcc.timing import MODELS
from optcc.topology import Nic, Server, Topology
from optcc.verdict import PROVED
from optcc.verify.bounds.closed_forms import collective_bound
from optcc.verify.plan import verify_plan

RATE = Fraction(50 * 10**9)
LATENCY_S = Fraction(5, 10**6)
SIZE_BYTES = 2**30


def endpoints(pairs: Sequence[tuple[Fraction, Fraction]]) -> Topology:
    """Servers of one GPU with these rates out and in."""
    return Topology(tuple(Server(f"h{i}", 1, (Nic(0, *pair),)) for i, pair in enumerate(pairs)), LATENCY_S)


def one_straggler(p: int, slower: Fraction, place: int = 1) -> Topology:
    """All at 50 GB/s but one, which is `slower` times slower."""
    return endpoints([(RATE / slower if rank == place else RATE,) * 2 for rank in range(p)])


def random_rates(p: int, seed: int) -> Topology:
    """Each endpoint sends and receives at 10 to 50 GB/s, at different rates."""
    rng = np.random.default_rng((p, seed))
    return endpoints(
        [(Fraction(int(out)), Fraction(int(in_))) for out, in_ in rng.integers(10**10, 5 * 10**10, (p, 2))]
    )


def seconds(topology: Topology, segments: int) -> float:
    """The time of a message of 1 GiB under fifo ports."""
    plan = compile_schedule(optimal.build(topology, segments), size_bytes=SIZE_BYTES, topology=topology, ports="fifo")
    return simulate(plan, topology).seconds


def over_bound(topology: Topology, *segments: int) -> float:
    """The best time over the bound."""
    bound = float(collective_bound(topology, SIZE_BYTES).seconds)
    return min(seconds(topology, each) for each in segments) / bound


@pytest.mark.parametrize("seed", range(20))
def test_loads_follow_the_rates(seed: int) -> None:
    """They add up, nobody has less than one, and those above one have it in proportion; the others would have less."""
    rng = np.random.default_rng(seed)
    p = int(rng.integers(2, 40))
    rates = rng.integers(1, 50, p) / rng.integers(1, 5)
    loads = port_loads(rates, 2 * (p - 1))
    assert loads.sum() == pytest.approx(2 * (p - 1))
    assert loads.min() >= 1
    free = loads > 1
    if free.any():
        level = (loads[free] / rates[free]).mean()
        assert np.allclose(loads[free], level * rates[free])
        assert (level * rates[~free] <= 1 + 1e-9).all()


def test_loads_of_two_endpoints_and_of_equal_ones() -> None:
    """Two have one each, whatever their rates; equal rates have 2(p - 1)/p, which a ring has."""
    assert port_loads(np.array([1.0, 100.0]), 2).tolist() == [1, 1]
    assert np.allclose(port_loads(np.full(5, 3.0), 8), 8 / 5)


@pytest.mark.parametrize("p", [2, 3, 5, 8, 9, 16, 33, 130])
@pytest.mark.parametrize("kind", ["equal", "straggler", "random"])
def test_trees_share_the_root_and_the_loads(p: int, kind: str) -> None:
    """After any number of pairs every server has sent and received its share of them but for the children of a node."""
    rng = np.random.default_rng(p)
    out, in_ = np.ones(p), np.ones(p)
    if kind == "straggler":
        out[p // 2] = in_[p // 2] = 0.5
    elif kind == "random":
        out, in_ = rng.uniform(1, 5, p), rng.uniform(1, 5, p)
    loads = [port_loads(rates, 2.0 * (p - 1)) for rates in (out, in_)]
    sent, received = np.zeros(p), np.zeros(p)
    for n, (up, down) in enumerate(islice(tree_pairs(out, in_, [1] * p), 300), start=1):
        assert up.root == down.root
        assert sorted(up.order.tolist()) == sorted(down.order.tolist()) == list(range(p))
        sent += np.bincount(up.order[1:], minlength=p) + np.bincount(down.parent[1:], minlength=p)
        received += np.bincount(down.order[1:], minlength=p) + np.bincount(up.parent[1:], minlength=p)
        assert np.abs(sent - n * loads[0]).max() <= degree_for(p)
        assert np.abs(received - n * loads[1]).max() <= degree_for(p)


def same_transfers(one: Schedule, other: Schedule) -> bool:
    """The same ranks, in the same order."""
    pairs = ((one.src, other.src), (one.dst, other.dst), (one.op, other.op), (one.segment, other.segment))
    return all(np.array_equal(*pair) for pair in pairs)


@pytest.mark.parametrize("ports", ["fifo", "exclusive"])
def test_many_servers_of_one_rate_stand_in_rows_where_the_network_stores(
    ports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than 64 of them, most alike, and many segments, under fifo; else the trees are those of any rates."""
    monkeypatch.setattr("optcc.schedules.optimal.ROWS_SEGMENTS", 12)
    many = ALL_PAIRS_MAX + 1
    half, halves = (
        Topology.parse(f"{n}@2GB/s" + "".join(f",{server}=1GB/s" for server in range(many // 2)))
        for n in (many, 2 * (many // 2))
    )
    cases = (
        (one_straggler(many, Fraction(2)), ports == "fifo"),
        (one_straggler(many - 1, Fraction(2)), False),
        (random_rates(many, 0), False),
        (half, ports == "fifo"),
        (halves, False),
    )
    for topology, in_rows in cases:
        for segments, rows in ((12, in_rows), (11, False)):
            built = optimal.under(ports).build(topology, segments)
            assert built.name == "optimal"
            assert not built.lane_per_peer
            assert same_transfers(built, (shares if rows else optimal).build(topology, segments))
            assert same_transfers(built, optimal.build(topology, segments)) == (not rows)


def test_rows_under_fifo_ports_are_proved() -> None:
    """And compute the sum."""
    topology = one_straggler(ALL_PAIRS_MAX + 1, Fraction(2))
    built = optimal.under("fifo").build(topology, ROWS_SEGMENTS)
    plan = compile_schedule(built, size_bytes=4 * ROWS_SEGMENTS, topology=topology, ports="fifo")
    assert verify_plan(plan).verdict == PROVED


@pytest.mark.slow
@pytest.mark.parametrize("slower", ["8/7", "4/3", "8/5", "2", "4", "8"])
def test_one_straggler_among_256_is_within_the_goal_under_fifo_ports(slower: str) -> None:
    """1.05 of the bound."""
    topology = one_straggler(256, Fraction(slower))
    built = optimal.under("fifo").build(topology, 2048)
    plan = compile_schedule(built, size_bytes=SIZE_BYTES, topology=topology, ports="fifo")
    assert simulate(plan, topology).seconds <= 1.05 * float(collective_bound(topology, SIZE_BYTES).seconds)


@pytest.mark.slow
def test_rows_are_faster_than_trees_with_many_segments_only() -> None:
    """For 256 servers, one of them at half rate: all ports are busy at the bound."""
    topology = one_straggler(256, Fraction(2))
    for segments, faster in ((128, False), (2048, True)):
        times = []
        for definition in (shares, optimal):
            built = replace(definition.build(topology, segments), lane_per_peer=False)
            plan = compile_schedule(built, size_bytes=SIZE_BYTES, topology=topology, ports="fifo")
            times.append(simulate(plan, topology).seconds)
        assert (times[0] < times[1]) == faster


def test_gpus_of_a_server_take_turns() -> None:
    """Only one of a server's GPUs has to do with other servers, each as often as the others; the rest are leaves."""
    gpus = [2, 3, 1]
    server = np.repeat(np.arange(3), gpus)
    rates = np.array([1.0, 2.0, 3.0])
    speakers: list[tuple[int, ...]] = []
    for pair in islice(tree_pairs(rates, rates, gpus), 12):
        spoke = set()
        for tree in pair:
            assert sorted(tree.order.tolist()) == list(range(6))
            edges = list(zip(tree.order[1:].tolist(), tree.parent[1:].tolist(), strict=True))
            across = [edge for edge in edges if server[edge[0]] != server[edge[1]]]
            assert len(across) == 2
            for rank, parent in edges:
                if server[rank] == server[parent]:
                    assert rank not in tree.parent.tolist()
            spoke.add(tuple(sorted({rank for edge in across for rank in edge})))
        assert len(spoke) == 1, "a pair has one speaker a server, up and down"
        speakers += spoke
    counts = np.bincount([rank for each in speakers for rank in each], minlength=6)
    assert counts.tolist() == [6, 6, 4, 4, 4, 12]


@pytest.mark.parametrize("text", ["1@50GB/s", "2@50GB/s", "5@50GB/s,1=10GB/s:50GB/s", "1x4@50GB/s", "3x4@50GB/s,2=1/4"])
def test_servers_of_any_kind_are_proved(text: str) -> None:
    """One rank, one server, several GPUs, NICs lost: in both orders of the ports."""
    topology = Topology.parse(text)
    for ports in MODELS:
        for segments, size_bytes in ((1, 0), (2, 4), (7, 4 * 97)):
            built = optimal.build(topology, segments)
            plan = compile_schedule(built, size_bytes=size_bytes, topology=topology, ports=ports)
            assert verify_plan(plan).verdict == PROVED


def test_servers_that_keep_different_rails_are_refused_on_a_rail_only_network() -> None:
    """There NICs cannot be pooled; the same rails at different rates can."""

    def rails(*kept: Sequence[int]) -> Topology:
        nics = [tuple(Nic(rail, RATE / (1 + i), RATE) for rail in own) for i, own in enumerate(kept)]
        return Topology(tuple(Server(f"h{i}", 1, own) for i, own in enumerate(nics)), rail_only=True)

    assert isinstance(optimal, Definition)
    with pytest.raises(TopologyError, match="rail"):
        optimal.build(rails((0, 1), (0, 1), (1,)))
    assert len(optimal.build(rails((0, 1), (0, 1), (1, 0)))) == 4


@pytest.mark.parametrize("slower", ["8/7", "2", "8"])
@pytest.mark.parametrize("p", [4, 8, 16])
def test_one_straggler_costs_what_the_bound_says(p: int, slower: str) -> None:
    """Within 2 % of it, the pipeline's fill included, with latency and without."""
    topology = one_straggler(p, Fraction(slower))
    for latency_s in (LATENCY_S, Fraction(0)):
        assert over_bound(topology.with_latency(latency_s), 1024) <= 1.02


@pytest.mark.parametrize("p", [4, 8, 16])
def test_half_of_one_endpoints_rate_costs_little(p: int) -> None:
    """Against the ring without a fault, 2(p - 1)/p n/B: at most 1 + 1/(p - 1), and 2 % for latency and fill."""
    ring_s = 2 * (p - 1) / p * SIZE_BYTES / float(RATE)
    assert seconds(one_straggler(p, Fraction(2)), 1024) / ring_s <= 1 + 1 / (p - 1) + 0.02


@pytest.mark.slow
@pytest.mark.parametrize("slower", ["8/7", "8/5", "2", "8"])
@pytest.mark.parametrize("p", [4, 8, 16, 32, 64])
def test_one_straggler_of_any_rate_costs_what_the_bound_says(p: int, slower: str) -> None:
    """The whole grid; for half a rate also against the ring without a fault."""
    topology = one_straggler(p, Fraction(slower))
    assert over_bound(topology, 1024, 2048) <= 1.02
    if slower == "2":
        ring_s = 2 * (p - 1) / p * SIZE_BYTES / float(RATE)
        assert min(seconds(topology, each) for each in (1024, 2048)) / ring_s <= 1 + 1 / (p - 1) + 0.02


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(15))
def test_random_rates_cost_what_the_bound_says(seed: int) -> None:
    """Out and in apart, up to 64 endpoints: within 3 %."""
    p = int(np.random.default_rng(seed).integers(2, 65))
    assert over_bound(random_rates(p, seed), 512, 1024, 2048) <= 1.03


@pytest.mark.slow
@pytest.mark.parametrize("p", [256, 1024])
def test_many_random_rates_cost_what_the_bound_says(p: int) -> None:
    """Within 5 %, with one thousand segments."""
    assert over_bound(random_rates(p, 0), 1024) <= 1.05
