"""Shares, the optimum for fair ports: loads that follow the rates, plans that are proved, and times at the bound."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from optcc.compiler import compile_schedule
from optcc.errors import TopologyError
from optcc.experiments.schedule_cases import GOALS, LATENCY_S, SIZE_BYTES, one_straggler, random_rates
from optcc.passes.bind import bind
from optcc.passes.depend import depend
from optcc.passes.lane_assignment import LANES_MAX, lanes_by_pair
from optcc.plan import RECEIVES, RECV_COPY_SEND, RECV_REDUCE_SEND, Plan
from optcc.planner import build
from optcc.schedules.fair_optimum import divide, shares, stars
from optcc.schedules.loads import port_loads
from optcc.schedules.optimal import optimal
from optcc.simulate import simulate
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.bounds.closed_forms import collective_bound
from optcc.verify.plan import verify_plan
from tests.sample import sampled

SLOWDOWNS = tuple(map(Fraction, ("8/7", "4/3", "8/5", "2", "4", "8")))


def over_bound(topology: Topology, *segments: int) -> float:
    """The best time under fair ports over the bound."""
    times = []
    for each in segments:
        plan = compile_schedule(shares.build(topology, each), size_bytes=SIZE_BYTES, topology=topology, ports="fair")
        times.append(simulate(plan, topology, model="fair").seconds)
    return min(times) / float(collective_bound(topology, SIZE_BYTES).seconds)


@pytest.mark.parametrize("seed", range(20))
def test_shares_have_the_loads_of_the_rates(seed: int) -> None:
    """They add up to one, and every port carries what its rate is of all rates, but at least the message once."""
    rng = np.random.default_rng(seed)
    p = int(rng.integers(3, 40))
    out, in_ = rng.integers(1, 50, (2, p)) / 7
    parts = divide(out, in_)
    assert sum(part.weight for part in parts) == 1
    assert len(parts) <= 2 * p - 1
    sent, received = np.zeros(p), np.zeros(p)
    for turn, part in enumerate(parts):
        up, down = stars(part, turn, [1] * p)
        assert up.root == down.root == part.broadcast
        for child, parent in zip(up.order[1:], up.parent[1:], strict=True):
            sent[child] += float(part.weight)
            received[parent] += float(part.weight)
        for child, parent in zip(down.order[1:], down.parent[1:], strict=True):
            sent[parent] += float(part.weight)
            received[child] += float(part.weight)
    assert np.allclose(sent, port_loads(out, 2.0 * (p - 1)), atol=1e-4)
    assert np.allclose(received, port_loads(in_, 2.0 * (p - 1)), atol=1e-4)


def test_equal_rates_out_and_in_make_centres_of_one_share_each() -> None:
    """Nobody sends a sum on before it is broadcast; a straggler that carries no more than it must owns nothing."""
    rates = np.array([4.0, 4.0, 4.0, 3.0, 1.0])
    parts = divide(rates, rates)
    assert [(part.reduced, part.broadcast) for part in parts] == [(server, server) for server in range(4)]


@pytest.mark.parametrize("text", ["1@50GB/s", "2@50GB/s", "5@50GB/s,1=10GB/s:50GB/s", "1x4@50GB/s", "3x4@50GB/s,2=1/4"])
@pytest.mark.parametrize("slots", [None, 1, 7])
def test_servers_of_any_kind_are_proved(text: str, slots: int | None) -> None:
    """One rank, one server, several GPUs, NICs lost; messages of nothing and of no multiple of anything."""
    topology = Topology.parse(text)
    for segments, size_bytes in ((1, 0), (2, 4), (7, 4 * 97)):
        built = shares.build(topology, segments)
        plan = compile_schedule(built, size_bytes=size_bytes, topology=topology, ports="fair", slots=slots)
        assert verify_plan(plan).verdict == PROVED


@pytest.mark.parametrize("seed", range(4))
def test_plans_with_several_lanes_for_a_pair_are_proved(seed: int) -> None:
    """Rates for which one lane is not enough."""
    topology = random_rates(4, seed)
    plan = compile_schedule(shares.build(topology, 8), size_bytes=4 * 9973, topology=topology, ports="fair")
    assert verify_plan(plan).verdict == PROVED


def lanes_of_pairs(plan: Plan) -> dict[tuple[int, int], int]:
    """How many channels each pair of ranks has."""
    found: dict[tuple[int, int], int] = {}
    for channel in plan.channels:
        found[channel.src, channel.dst] = found.get((channel.src, channel.dst), 0) + 1
    return found


def test_every_pair_has_a_lane_of_its_own_under_fair_ports_only() -> None:
    """There a straggler needs no more than one; elsewhere a rank has a lane to send and one to receive."""
    topology = one_straggler(4, Fraction(2))
    built = shares.build(topology, 64)
    plan = compile_schedule(built, size_bytes=SIZE_BYTES, topology=topology, ports="fair")
    assert set(lanes_of_pairs(plan).values()) == {1}
    assert np.bincount(plan.lane_rank).tolist() == [6, 6, 6, 6]
    for lane in plan.lanes:
        receives = np.isin(plan.kind[lane], list(RECEIVES))
        assert receives.all() or not receives.any()
    for ports in ("fifo", "exclusive"):
        assert np.bincount(compile_schedule(built, size_bytes=64, topology=topology, ports=ports).lane_rank).max() <= 2


def test_lanes_follow_the_bytes() -> None:
    """Their number, up to a limit, is proportional to what a pair carries; its transfers take turns."""
    topology = random_rates(6, 1)
    transfers = depend(bind(shares.build(topology, 5), 2**20, "float32", "sum"))
    pair = transfers.src * 6 + transfers.dst
    carried = np.bincount(pair, transfers.bytes, minlength=36)
    for lanes_mean in (2, 5, 100):
        assigned = lanes_by_pair(transfers, lanes_mean, 2)
        for each in np.unique(pair):
            wanted = np.rint(lanes_mean * carried[each] / carried[carried > 0].mean())
            lanes = int(np.clip(wanted, 1, LANES_MAX))
            own = assigned.channel[pair == each]
            assert own.tolist() == [turn % lanes for turn in range(len(own))]
    assert not lanes_by_pair(transfers, 0, 2).channel.any()


def test_optimal_under_fair_ports_is_shares() -> None:
    """By the name of the one or of the other the plan is the same; exclusive ports keep their trees."""
    topology = one_straggler(4, Fraction(2))
    assert optimal.under("fair") is shares
    assert optimal.under("exclusive") is optimal
    plans = [build(name, topology, 2**16, segments=4, ports="fair").plan for name in ("optimal", "shares")]
    assert plans[0].digest == plans[1].digest
    assert plans[0].name == "shares"


def test_a_schedule_that_no_lanes_would_help_keeps_one_for_all() -> None:
    """A ring's slowest port never idles, whatever the others do. But under fair ports nothing is fused."""
    topology = Topology.parse("4@50GB/s,3=25GB/s")
    plans = [build("ring", topology, 2**16, segments=4, ports=ports).plan for ports in ("fair", "exclusive")]
    assert plans[0].channels == plans[1].channels
    fused = {RECV_COPY_SEND, RECV_REDUCE_SEND}
    assert [fused & set(plan.kind.tolist()) for plan in plans] == [set(), fused]


def test_another_number_of_ranks_is_refused() -> None:
    """As for other ports."""
    built = shares.build(one_straggler(4, Fraction(2)), 2)
    with pytest.raises(TopologyError, match="has 5 ranks"):
        compile_schedule(built, size_bytes=64, topology=one_straggler(5, Fraction(2)), ports="fair")


@pytest.mark.parametrize("slowdown", SLOWDOWNS)
@pytest.mark.parametrize("p", [4, 8, 16])
def test_one_straggler_takes_the_bound_and_a_segment(p: int, slowdown: Fraction) -> None:
    """At most (k + 1)/k times the bound and three latencies; that is 1.02 for 64 segments."""
    bound = float(collective_bound(one_straggler(p, slowdown), SIZE_BYTES).seconds)
    ratio = over_bound(one_straggler(p, slowdown), 64)
    assert ratio <= 65 / 64 + 3 * float(LATENCY_S) / bound
    assert ratio <= GOALS["straggler"]


@pytest.mark.parametrize(("p", "seed"), sampled(product((4, 8), range(6)), every=5))
def test_random_rates_are_near_the_bound(p: int, seed: int) -> None:
    """Out and in apart."""
    assert over_bound(random_rates(p, seed), 64, 256) <= GOALS["random"]


@pytest.mark.slow
@pytest.mark.parametrize("slowdown", SLOWDOWNS)
@pytest.mark.parametrize("p", [32, 64])
def test_one_straggler_of_many_takes_the_bound_and_a_segment(p: int, slowdown: Fraction) -> None:
    """As for few ranks."""
    assert over_bound(one_straggler(p, slowdown), 64) <= GOALS["straggler"]


@pytest.mark.slow
@pytest.mark.parametrize("p", [4, 8])
@pytest.mark.parametrize("seed", range(20))
def test_many_random_rates_are_near_the_bound(p: int, seed: int) -> None:
    """Out and in apart."""
    assert over_bound(random_rates(p, seed), 64, 256) <= GOALS["random"]


@pytest.mark.slow
@pytest.mark.parametrize(("p", "segments"), [(16, 128), (32, 64)])
@pytest.mark.parametrize("seed", range(3))
def test_random_rates_of_many_are_near_the_bound(p: int, segments: int, seed: int) -> None:
    """With fewer segments: there are more shares."""
    assert over_bound(random_rates(p, seed), segments) <= GOALS["random"]
