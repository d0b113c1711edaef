"""R2CCL's schedules: proved, the ring where nothing is lost, and every port's bytes as the formulas say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations, product

import numpy as np
import pytest

from optcc.compiler import compile_schedule
from optcc.dsl import Definition
from optcc.errors import ScheduleError, TopologyError
from optcc.schedule import Schedule
from optcc.schedules.r2ccl import peel, r2ccl_allreduce, r2ccl_balance, r2ccl_recursive, rerank
from optcc.schedules.ring import ring
from optcc.simulate import simulate
from optcc.topology import Nic, Server, Topology
from optcc.verdict import PROVED
from optcc.verify.bounds.predictions import r2ccl_allreduce as predicted_allreduce
from optcc.verify.bounds.predictions import r2ccl_balance as predicted_balance
from optcc.verify.plan import verify_plan

DEFINITIONS = (r2ccl_balance, r2ccl_allreduce, r2ccl_recursive)
BYTE = Fraction(1)


def rows(schedule: Schedule) -> list[tuple[object, ...]]:
    """What is sent, without the lines it was written in."""
    return [(each.src, each.dst, each.op, each.segment, each.section, each.stage) for each in schedule]


def loads(schedule: Schedule, size_bytes: int) -> tuple[list[int], list[int]]:
    """Bytes that every rank sends, and that it receives."""
    transfers = compile_schedule(schedule, size_bytes=size_bytes).transfers
    sent, received = (np.zeros(schedule.n_ranks, dtype=np.int64) for _ in range(2))
    np.add.at(sent, transfers.src, transfers.bytes)
    np.add.at(received, transfers.dst, transfers.bytes)
    return sent.tolist(), received.tolist()


def rails(*kept: Sequence[int], gpus: int = 1) -> Topology:
    """A rail-only network whose servers keep these rails, 1 B/s each."""
    servers = [Server(f"h{i}", gpus, tuple(Nic(rail, BYTE, BYTE) for rail in own)) for i, own in enumerate(kept)]
    return Topology(tuple(servers), rail_only=True)


def links(topology: Topology, order: Sequence[int]) -> list[int]:
    """For servers of one GPU and rails of 1 B/s: how many rails neighbours share, the weakest first."""
    kept = [{nic.rail for nic in server.nics if not nic.failed} for server in topology.servers]
    return sorted(len(kept[a] & kept[b]) for a, b in zip(order, [*order[1:], order[0]], strict=True))


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda each: str(each.name))
@pytest.mark.parametrize("p", [*range(1, 10), 12])
def test_every_schedule_is_proved(definition: Definition, p: int) -> None:
    """Any place of the straggler, any size: none, one element, a prime, ragged."""
    for slow, count in product({0, p // 2, p - 1}, (0, 1, 13, 210) if p < 10 else (97,)):
        topology = Topology.parse(f"{p}@50MB/s,{slow}=30MB/s")
        plan = compile_schedule(definition.build(topology, 1 + count % 3), size_bytes=4 * count, topology=topology)
        verdict = verify_plan(plan)
        assert verdict.verdict == PROVED, verdict.counterexample


@pytest.mark.parametrize("p", range(2, 9))
def test_recursion_over_any_rates_is_proved(p: int) -> None:
    """Random rates: several levels, ranks of equal rate, one rank faster than all."""
    for seed in range(4):
        rng = random.Random(100 * p + seed)
        rates = tuple(Fraction(rng.randint(1, 6)) for _ in range(p))
        plan = compile_schedule(r2ccl_recursive(n_ranks=p, segments=2, rates=rates), size_bytes=4 * 211)
        verdict = verify_plan(plan)
        assert verdict.verdict == PROVED, (rates, verdict.counterexample)


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda each: str(each.name))
@pytest.mark.parametrize("p", [1, 2, 5])
def test_with_nothing_lost_all_are_the_ring(definition: Definition, p: int) -> None:
    built = definition.build(Topology.parse(f"{p}@50MB/s"), 3)
    assert rows(built) == rows(ring(n_ranks=p, segments=3))
    assert built.segments == ring(n_ranks=p, segments=3).segments


def test_balance_is_the_ring_whoever_is_slow() -> None:
    topology = Topology.parse("5@50MB/s,1=10MB/s,2=20MB/s")
    assert rows(r2ccl_balance.build(topology, 2)) == rows(ring(n_ranks=5, segments=2))


def test_balance_takes_the_time_of_its_formula() -> None:
    topology = Topology.parse("4@4B/s,2=2B/s")
    plan = compile_schedule(r2ccl_balance.build(topology), size_bytes=1600, topology=topology)
    assert simulate(plan, topology, model="fifo").seconds == pytest.approx(float(predicted_balance(topology, 1600)))


@pytest.mark.parametrize(("p", "rate"), [(3, 1), (4, 2), (5, 3), (8, 3), (2, 1)])
def test_allreduce_loads_every_port_with_the_shares_of_the_formula(p: int, rate: int) -> None:
    """The straggler with T1's and T3's bytes, the healthy with T1's, T2's and their part of the hand-over."""
    lost = 1 - Fraction(rate, 4)
    straggler = p // 2
    topology = Topology.parse(f"{p}@4B/s,{straggler}={rate}B/s")
    assert r2ccl_allreduce.configure(topology) == {"straggler": straggler, "lost": lost}
    size = 4 * 4 * 3 * p * (p - 1)
    sent, received = loads(r2ccl_allreduce.build(topology, 3), size)
    around = Fraction(2 * (p - 1), p) * (1 - lost)
    beside = Fraction(2 * (p - 2), p - 1) * lost
    wanted = [(around + beside + lost / (p - 1)) * size] * p
    wanted[straggler] = (around + lost) * size
    assert sent == received == wanted
    if p > 2:
        assert wanted[straggler] / rate == predicted_allreduce(topology, size)


def test_allreduce_is_about_as_fast_as_its_formula() -> None:
    """Between the bytes of the straggler's port and the ring's time; how ports are shared decides where."""
    topology = Topology.parse("8@4B/s,3=2B/s")
    size = 4 * 2 * 16 * 56
    plan = compile_schedule(r2ccl_allreduce.build(topology, 16), size_bytes=size, topology=topology)
    seconds = simulate(plan, topology, model="fifo").seconds
    predicted = float(predicted_allreduce(topology, size))
    assert predicted <= seconds * (1 + 1e-9)
    assert seconds < 1.4 * predicted


def test_segments_of_both_rings_alternate() -> None:
    built = r2ccl_allreduce(n_ranks=4, segments=3, straggler=0, lost=Fraction(1, 3))
    assert [(shape.share, shape.sections) for shape in built.segments] == [(Fraction(2, 9), 4)] * 3 + [
        (Fraction(1, 9), 3)
    ] * 3
    assert list(dict.fromkeys(each.segment for each in built)) == [0, 3, 1, 4, 2, 5]


def test_the_straggler_seeds_a_chain_and_gets_its_end() -> None:
    """In the healthy ring it sends each section once, first of all, and receives it once, last of all."""
    built = r2ccl_allreduce(n_ranks=5, segments=1, straggler=1, lost=Fraction(1, 2))
    for section in range(4):
        own = [each for each in built if (each.segment, each.section) == (1, section)]
        touching = [(each.src, each.dst, each.op) for each in own if 1 in (each.src, each.dst)]
        assert touching == [(1, own[1].src, "reduce"), (own[-1].src, 1, "copy")]
        assert (own[0].src, own[-1].dst) == (1, 1)


def test_with_one_straggler_recursion_is_allreduce() -> None:
    for p in (3, 4, 7):
        topology = Topology.parse(f"{p}@50MB/s,1=20MB/s")
        one, other = (definition.build(topology, 2) for definition in (r2ccl_allreduce, r2ccl_recursive))
        assert rows(one) == rows(other)
        assert one.segments == other.segments


@pytest.mark.parametrize("rates", [(4, 4, 2, 1), (4, 4, 4, 4, 2, 2), (1, 2, 3, 4, 5), (1, 1, 1, 9), (3, 3, 3)])
def test_recursion_loads_every_port_with_the_shares_of_its_formula(rates: tuple[int, ...]) -> None:
    p = len(rates)
    levels = peel([Fraction(rate) for rate in rates])
    assert sum(share for _, share in levels) == 1
    size = 4 * 60**3
    sent, received = loads(r2ccl_recursive(n_ranks=p, rates=[Fraction(rate) for rate in rates]), size)
    for rank in range(p):
        wanted = Fraction(0)
        for ranks, share in levels:
            m = len(ranks)
            wanted += share * (Fraction(2 * (m - 1) + p - m, m) if rank in ranks else 1)
        assert sent[rank] == received[rank] == wanted * size


def test_recursion_is_never_busier_than_the_ring() -> None:
    """Whatever the rates: the busiest port is done no later than the ring's, earlier with a straggler among equals."""
    rng = random.Random(7)
    for _ in range(50):
        p = rng.randint(2, 9)
        rates = [Fraction(rng.randint(1, 5)) for _ in range(p)]
        sent, _ = loads(r2ccl_recursive(n_ranks=p, rates=rates), 4 * 2520 * 12)
        busiest = max(load / rate for load, rate in zip(sent, rates, strict=True))
        assert busiest <= Fraction(2 * (p - 1), p) * 4 * 2520 * 12 / min(rates) * Fraction(1001, 1000)


def test_peeling_goes_from_the_slowest_on() -> None:
    rates = [Fraction(rate) for rate in (8, 4, 8, 8, 2, 8, 8, 8)]
    assert peel(rates) == [
        (tuple(range(8)), Fraction(1, 4)),
        ((0, 1, 2, 3, 5, 6, 7), Fraction(1, 4)),
        ((0, 2, 3, 5, 6, 7), Fraction(1, 2)),
    ]


def test_a_single_fast_rank_among_many_is_not_made_the_hub() -> None:
    assert peel([Fraction(1)] * 9 + [Fraction(2)]) == [(tuple(range(10)), Fraction(1))]


@pytest.mark.parametrize(
    ("kept", "order"),
    [
        (((0, 1), (1,), (0,), (0, 1)), (0, 1, 3, 2)),
        (((0, 1, 2),) * 4, (0, 1, 2, 3)),
        (((0, 1), (1,), (1,), (0, 1)), (0, 1, 2, 3)),
        (((1,), (0,), (0, 1), (0, 1)), (0, 2, 1, 3)),
        (((0, 1),), (0,)),
    ],
)
def test_servers_with_all_rails_bridge_those_that_lost_different_ones(
    kept: tuple[tuple[int, ...], ...], order: tuple[int, ...]
) -> None:
    """And an order that cannot be improved is left alone."""
    assert rerank(rails(*kept)) == order


def test_ranks_of_a_server_stay_together() -> None:
    order = rerank(rails((1,), (0,), (0, 1), (0, 1), gpus=2))
    assert order == (0, 1, 4, 5, 2, 3, 6, 7)


def test_only_rail_only_networks_are_reranked() -> None:
    topology = rails((1,), (0,), (0, 1), (0, 1))
    assert rerank(Topology(topology.servers)) == (0, 1, 2, 3)
    assert rerank(topology) != (0, 1, 2, 3)


def test_the_order_is_the_best_of_all_for_few_servers() -> None:
    rng = random.Random(3)
    for _ in range(25):
        n = rng.randint(2, 6)
        topology = rails(*(sorted(rng.sample(range(4), rng.randint(3, 4))) for _ in range(n)))
        best = max(links(topology, (0, *rest)) for rest in permutations(range(1, n)))
        assert links(topology, rerank(topology)) == best


def test_many_servers_are_bridged_too() -> None:
    """Sixteen servers with eight rails, every second of the first eight without one, the others without another."""
    lost = [i % 2 if i < 8 else None for i in range(16)]
    topology = rails(*([rail for rail in range(8) if rail != gone] for gone in lost))
    order = rerank(topology)
    assert sorted(order) == list(range(16))
    assert links(topology, range(16))[0] == 6
    assert links(topology, order)[0] == 7


@pytest.mark.parametrize("kept", [((0,), (1,)), ((0,), (1,), (2,), (0, 1, 2))])
def test_neighbours_without_a_common_rail_are_refused(kept: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(TopologyError, match="neighbours share a surviving rail"):
        r2ccl_balance.build(rails(*kept))


def test_balance_goes_around_in_the_new_order_and_is_proved() -> None:
    built = r2ccl_balance.build(rails((1,), (0,), (0, 1), (0, 1)), 2)
    assert {(each.src, each.dst) for each in built} == {(0, 2), (2, 1), (1, 3), (3, 0)}
    assert verify_plan(compile_schedule(built, size_bytes=4 * 37)).verdict == PROVED


@pytest.mark.parametrize("text", ["4@50MB/s,1=25MB/s,2=10MB/s", "2x2@50MB/s"])
def test_allreduce_refuses_several_stragglers_and_several_gpus(text: str) -> None:
    with pytest.raises(TopologyError, match="schedule r2ccl-allreduce accepts endpoints of one rate"):
        r2ccl_allreduce.build(Topology.parse(text))


@pytest.mark.parametrize("definition", [r2ccl_balance, r2ccl_recursive], ids=lambda each: str(each.name))
def test_servers_of_several_gpus_are_refused(definition: Definition) -> None:
    with pytest.raises(TopologyError, match="must have one GPU a server"):
        definition.build(Topology.parse("2x2@50MB/s"))


def test_mistaken_parameters_are_refused() -> None:
    """The message says the value and the rule."""
    with pytest.raises(ScheduleError, match=r"order \(0, 0, 1\): must name every rank from 0 to 2 once"):
        r2ccl_balance(n_ranks=3, order=(0, 0, 1))
    with pytest.raises(ScheduleError, match="straggler 4: must be a rank from 0 to 3"):
        r2ccl_allreduce(n_ranks=4, straggler=4, lost=Fraction(1, 2))
    with pytest.raises(ScheduleError, match=r"share=2.*must be in 0\.\.1"):
        r2ccl_allreduce(n_ranks=4, straggler=3, lost=Fraction(-1))
    for rates in ((BYTE,), (BYTE, Fraction(0))):
        with pytest.raises(ScheduleError, match="must be 2, one for each rank, and above zero"):
            r2ccl_recursive(n_ranks=2, rates=rates)
