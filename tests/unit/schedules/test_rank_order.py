"""Sums in the order of the ranks: one expression whatever the rates, ports and segments, at the time of the optimum."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest

from optcc.compiler import compile_schedule
from optcc.dsl import Program, schedule
from optcc.errors import ScheduleError
from optcc.plan import Plan
from optcc.planner import Planner, build
from optcc.runtime.communicator import Communicator
from optcc.runtime.transport import Transport
from optcc.runtime.transports.loopback import run_ranks
from optcc.schedules.auto import pooled_bound_s
from optcc.schedules.fair_optimum import shares
from optcc.schedules.rank_order import rank_order
from optcc.schedules.tree_turns import reduce_in_order
from optcc.simulate import simulate
from optcc.timing import MODELS, Model
from optcc.topology import Topology
from optcc.trees import Tree
from optcc.verify.plan.additions import addition_orders


def in_turn(first: int, stop: int) -> str:
    """`((0 + 1) + 2) + 3`."""
    text = str(first)
    for rank in range(first + 1, stop):
        text = f"{text} + {rank}" if rank == first + 1 else f"({text}) + {rank}"
    return text


def servers_in_turn(n_servers: int, gpus: int) -> str:
    """The sums of the servers, in their order."""
    sums = [in_turn(server * gpus, (server + 1) * gpus) for server in range(n_servers)]
    text = f"({sums[0]})"
    for number, each in enumerate(sums[1:], 1):
        text = f"{text} + ({each})"
        text = f"({text})" if number < n_servers - 1 else text
    return text


def random_topology(seed: int) -> tuple[Topology, str]:
    """A cluster with any rates, out and in apart, and the expression that its sums must have."""
    rng = random.Random(seed)
    n_servers, gpus = rng.randint(2, 6), rng.choice((1, 1, 1, 2, 3))
    slow = [f"{number}={rng.randint(1, 9)}00MB/s:{rng.randint(1, 9)}00MB/s" for number in range(n_servers)]
    slow = [each for each in slow if rng.random() < 0.6]
    count = str(n_servers) if gpus == 1 else f"{n_servers}x{gpus}"
    expression = in_turn(0, n_servers) if gpus == 1 else servers_in_turn(n_servers, gpus)
    return Topology.parse(",".join([f"{count}@1GB/s", *slow])), expression


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 120))])
def test_every_element_has_one_expression_whatever_the_rates(seed: int) -> None:
    topology, expression = random_topology(seed)
    rng = random.Random(seed)
    size, segments = 4 * rng.randint(1, 3000), rng.choice((1, 2, 5, "auto"))
    ports: Model = rng.choice(MODELS)
    for name in ("rank-order", "rank-order-reduce-scatter"):
        plan = build(name, topology, size, ports=ports, segments=segments, by_rail=rng.random() < 0.5).plan
        assert addition_orders(plan) == {expression: size}, (topology, ports, segments)


def test_a_single_server_and_a_single_rank() -> None:
    assert addition_orders(build("rank-order", Topology.parse("1x3@1GB/s"), 36).plan) == {"(0 + 1) + 2": 36}
    assert addition_orders(build("rank-order", Topology.parse("1@1GB/s"), 36).plan) == {"0": 36}


def test_the_bits_are_those_of_adding_one_rank_after_the_other() -> None:
    """And of plans for other rates; `shares` has others there, or the test would hold nothing."""
    inputs = np.random.default_rng(3).standard_normal((5, 4001)).astype(np.float32)
    expected = inputs[0].copy()
    for each in inputs[1:]:
        expected += each

    def results(name: str, rates: str) -> np.ndarray:
        def body(rank: int, transport: Transport) -> np.ndarray:
            planner = Planner(Topology.parse(rates), schedules={"allreduce": name}, ports="fair", by_rail=True)
            return np.asarray(Communicator(transport, planner).all_reduce(inputs[rank].copy()))

        return np.array(run_ranks(5, body))

    for rates in ("5@1GB/s", "5@1GB/s,0=500MB/s", "5@1GB/s,4=250MB/s:700MB/s"):
        assert (results("rank-order", rates).view(np.uint32) == expected.view(np.uint32)).all()
    assert (results("shares", "5@1GB/s,0=500MB/s").view(np.uint32) != expected.view(np.uint32)).any()


@pytest.mark.parametrize(
    "rates", ["4@1GB/s", "4@1GB/s,0=500MB/s", "8@1GB/s,5=500MB/s,6=300MB/s", "6@1GB/s,2=600MB/s:1GB/s"]
)
def test_the_order_costs_no_time(rates: str) -> None:
    """Under fair ports, segment for segment as fast as `shares`, and near the bound."""
    topology = Topology.parse(rates).with_latency(Fraction(5, 10**6))
    times = []
    for each in (rank_order, shares):
        plan = compile_schedule(each.build(topology, 64), size_bytes=2**28, topology=topology, ports="fair")
        times.append(simulate(plan, topology, model="fair").seconds)
    assert times[0] <= 1.005 * times[1]
    assert times[0] <= 1.02 * pooled_bound_s(topology, 2**28)


def test_ports_carry_what_those_of_shares_carry() -> None:
    """Also with servers where the sum of a share starts from another server than the one that adds."""
    topology = Topology.parse("5@1GB/s,0=700MB/s:300MB/s,1=400MB/s:900MB/s,3=200MB/s:500MB/s")

    def carried(plan: Plan) -> np.ndarray:
        transfers = plan.transfers
        remote = transfers.src != transfers.dst
        sides = (np.bincount(side[remote], transfers.bytes[remote], 5) for side in (transfers.src, transfers.dst))
        return np.array(list(sides))

    plans = [
        compile_schedule(each.build(topology, 4), size_bytes=2**20, topology=topology) for each in (rank_order, shares)
    ]
    assert (carried(plans[0]) == carried(plans[1])).all()


def test_other_trees_are_refused() -> None:
    @schedule
    def chain(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=1):
            reduce_in_order(segment, Tree.chain([0, 1, 2, 3]))

    @schedule
    def apart(program: Program) -> None:
        for segment in program.pipeline(sections=1, scratch=1):
            reduce_in_order(segment, Tree.of({0: 2, 1: 2, 3: 2}, root=2), (2, 2))

    with pytest.raises(ScheduleError, match="must be a star over servers around rank 0"):
        chain(n_ranks=4)
    with pytest.raises(ScheduleError, match="ranks 0 to 1 must be around one of them"):
        apart(n_ranks=4)
