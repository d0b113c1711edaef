"""Runs in which NICs fail, by closed forms; `tests/differential` holds random ones to a slow simulator."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from optcc.compiler import compile_schedule
from optcc.errors import InputError, TopologyError
from optcc.faults import FaultPlan
from optcc.plan import Plan
from optcc.schedules.registry import SCHEDULES
from optcc.simulate import MODELS, Jitter, Model, Policy, simulate
from optcc.simulate.jitter import minus_ln
from optcc.simulate.kernels import kernels
from optcc.simulate.ports import PortMap
from optcc.topology import Nic, Server, Topology

both = pytest.mark.parametrize("model", MODELS)
RATE = 10**9
CHUNK = 8000
STEP_S = Fraction(CHUNK, RATE)


def cluster(p: int, nics: int = 8) -> Topology:
    """p servers of one GPU and `nics` NICs, `RATE` together."""
    own = tuple(Nic(rail, Fraction(RATE, nics), Fraction(RATE, nics)) for rail in range(nics))
    return Topology(tuple(Server(f"h{index}", 1, own) for index in range(p)))


def ring(p: int) -> Plan:
    return compile_schedule(SCHEDULES["ring"].build(cluster(p), 1), size_bytes=p * CHUNK, slots=4)


def pipeline(p: int, segments: int) -> Plan:
    topology = cluster(p)
    schedule = SCHEDULES["ring"].build(topology, segments)
    return compile_schedule(schedule, size_bytes=p * segments * CHUNK, topology=topology)


def micros(text: str, *numbers: Fraction) -> FaultPlan:
    """A fault plan from a text with places for seconds, which become nanoseconds."""
    return FaultPlan.parse(text.format(*(f"{int(each * 10**9)}ns" for each in numbers)))


@pytest.mark.parametrize("quarters", [1, 4, 7, 10, 17])
@pytest.mark.parametrize("p", [4, 5, 8])
def test_a_server_that_becomes_slow_in_the_middle_of_a_ring(p: int, quarters: int) -> None:
    # Its port has 2(p - 1) chunks to carry, one after the other: at full rate before, at half of it after.
    steps, at = 2 * (p - 1), quarters * STEP_S / 4
    faults = micros("2/0@{0}=1/2", at)
    wanted = at + 2 * (steps * STEP_S - at)
    assert simulate(ring(p), cluster(p, 1), faults=faults).seconds == pytest.approx(float(wanted), rel=1e-12)


@pytest.mark.parametrize("p", [4, 5, 8])
def test_a_server_that_is_slow_for_a_while(p: int) -> None:
    steps = 2 * (p - 1)
    faults = micros("2/0@{0}..{1}=1/4", 2 * STEP_S, 4 * STEP_S)
    wanted = float((steps + 2 - Fraction(2, 4)) * STEP_S)
    # An in port that was going to take a message late, so as not to pause, cannot make up for it: at most one chunk.
    assert wanted <= simulate(ring(p), cluster(p, 1), faults=faults).seconds <= wanted + float(STEP_S)


@both
@pytest.mark.parametrize("name", ["wait", "migrate"])
def test_a_flap_delays_a_ring_by_its_length(name: str, model: Model) -> None:
    faults = micros("2/0@{0}..{1}", 2 * STEP_S, 5 * STEP_S)
    timing = simulate(
        ring(4),
        cluster(4, 1),
        model=model,
        faults=faults,
        policy=Policy(name, detection_s=Fraction(1)),  # type: ignore[arg-type]
    )
    assert timing.seconds == pytest.approx(float(9 * STEP_S), rel=1e-9)
    assert timing.overhead == pytest.approx(0.5, rel=1e-9)


@pytest.mark.parametrize("model", ["fifo", "exclusive"])
def test_bytes_in_flight_are_sent_again(model: Model) -> None:
    at, until = Fraction(5, 2) * STEP_S, 4 * STEP_S  # half of a chunk has gone
    for lost, again in ((0, 0), (1000, 1000), (10**9, CHUNK // 2)):
        policy = Policy("wait", unacknowledged_bytes=lost)
        timing = simulate(ring(4), cluster(4, 1), model=model, faults=micros("2/0@{0}..{1}", at, until), policy=policy)
        wanted = 6 * STEP_S + until - at + Fraction(again, RATE)
        assert timing.seconds == pytest.approx(float(wanted), rel=1e-12)


@pytest.mark.parametrize("p", [4, 5, 8])
def test_migration_goes_on_with_the_nics_that_are_left(p: int) -> None:
    steps, at = 2 * (p - 1), Fraction(7, 4) * STEP_S
    policy = Policy("migrate", detection_s=STEP_S, migration_s=STEP_S / 2)
    timing = simulate(ring(p), cluster(p), faults=micros("2/3@{0}", at), policy=policy)
    wanted = at + Fraction(3, 2) * STEP_S + (steps * STEP_S - at) * Fraction(8, 7)
    assert timing.seconds == pytest.approx(float(wanted), rel=1e-12)


def test_one_direction_does_not_disturb_the_other() -> None:
    chain = "2/0@0s=1/2:{0}"
    plan, topology = ring(4), cluster(4, 1)
    for way in ("out", "in"):
        timing = simulate(plan, topology, faults=FaultPlan.parse(chain.format(way)))
        assert timing.seconds == pytest.approx(float(12 * STEP_S), rel=1e-12)
    out = simulate(plan, topology, faults=FaultPlan.parse(chain.format("out")))
    own = (plan.transfers.dst == 2) & (plan.transfers.src == 1)
    first = np.flatnonzero(own)[0]
    assert out.end_s[first] == pytest.approx(float(STEP_S))


@both
@pytest.mark.parametrize("name", ["wait", "migrate"])
def test_a_server_without_a_nic_ends_in_words(name: str, model: Model) -> None:
    policy = Policy(name)  # type: ignore[arg-type]
    with pytest.raises(TopologyError, match=r"out h2, in h2: stands still .* transfers are never done: #\d+"):
        simulate(ring(4), cluster(4, 1), model=model, faults=micros("2/0@{0}", STEP_S), policy=policy)


@both
def test_faults_after_the_end_cost_nothing(model: Model) -> None:
    timing = simulate(ring(4), cluster(4, 1), model=model, faults=FaultPlan.parse("2/0@1s"))
    assert timing.recovery is not None
    assert timing.recovery.costs[0].cost_s == 0
    assert timing.overhead == 0


@both
def test_costs_add_up_to_the_overhead(model: Model) -> None:
    faults = micros("2/3@{0}, 1/0@{1}..{2}, 2/4@{3}=1/2", STEP_S, 2 * STEP_S, 3 * STEP_S, 4 * STEP_S)
    policy = Policy("migrate", detection_s=STEP_S / 3, unacknowledged_bytes=1000)
    timing = simulate(pipeline(5, 4), cluster(5), model=model, faults=faults, policy=policy)
    assert timing.recovery is not None
    costs = [each.cost_s for each in timing.recovery.costs]
    assert len(costs) == 3
    assert costs[0] > 0
    assert timing.recovery.fault_free_s + sum(costs) == pytest.approx(timing.seconds, rel=1e-12)
    assert "without faults; policy migrate" in timing.card().title


def new_plan(topology: Topology, size_bytes: int) -> Plan:
    return compile_schedule(SCHEDULES["r2ccl-allreduce"].build(topology, 8), size_bytes=size_bytes, topology=topology)


@pytest.mark.parametrize("model", MODELS)
def test_a_second_plan_takes_over(model: Model) -> None:
    plan, topology = pipeline(5, 32), cluster(5)
    asked: list[tuple[Topology, int]] = []

    def remember(left: Topology, size_bytes: int) -> Plan:
        asked.append((left, size_bytes))
        return new_plan(left, size_bytes)

    faults = micros("2/0@{0}, 2/1@{0}, 2/2@{0}, 2/3@{0}", 20 * STEP_S)
    policy = Policy("replan", detection_s=STEP_S, agreement_s=2 * STEP_S, new_plan=remember)
    timing = simulate(plan, topology, model=model, faults=faults, policy=policy)
    assert timing.recovery is not None
    kept, second = timing.recovery.kept, timing.recovery.second
    assert kept is not None
    assert second is not None
    assert timing.seconds == second.seconds
    left, size_bytes = asked[-1]
    assert left.out[2] == Fraction(RATE, 2)
    # What the first plan still does and what the second does is the whole message.
    assert len(kept) == len(timing.end_s)
    begun = np.unique(plan.transfers.segment[kept])
    assert size_bytes == (32 - len(begun)) * 5 * CHUNK
    assert set(np.flatnonzero(np.isin(plan.transfers.segment, begun))) == set(kept.tolist())
    # No port begins the second plan before it is through with the first.
    ports = PortMap.of(topology)
    following = new_plan(left, size_bytes)
    first_out, first_in = (each[kept] for each in ports.used_by(plan.transfers))
    second_out, second_in = ports.used_by(following.transfers)
    for port in range(0, 10, 2):
        mine = second_out == port
        # Fair ports take transfers at once, and give them nothing before they are open.
        begins = second.start_s[mine] if model != "fair" else second.sent_s[mine] - float(STEP_S / 8)
        assert begins.min() >= timing.sent_s[first_out == port].max() - 1e-12
        assert second.start_s[mine].min() >= float(23 * STEP_S) - 1e-12
        if model == "fifo":
            assert second.taken_s[second_in == port + 1].min() >= timing.end_s[first_in == port + 1].max() - 1e-12
    migrated = simulate(plan, topology, model=model, faults=faults, policy=Policy("migrate", detection_s=STEP_S))
    assert timing.seconds < migrated.seconds


def test_a_run_whose_segments_have_all_begun_does_not_turn() -> None:
    policy = Policy("replan", new_plan=new_plan)
    timing = simulate(ring(4), cluster(4), faults=micros("2/0@{0}", 2 * STEP_S), policy=policy)
    assert timing.recovery is not None
    assert timing.recovery.second is None
    assert timing.seconds == simulate(ring(4), cluster(4), faults=micros("2/0@{0}", 2 * STEP_S)).seconds


@pytest.mark.parametrize("model", MODELS)
def test_a_run_turns_after_each_failure(model: Model) -> None:
    """Each plan is made for what is left, and carries what the one before it had not begun."""
    plan, topology = pipeline(5, 64), cluster(5)
    asked: list[tuple[Topology, int]] = []

    def remember(left: Topology, size_bytes: int) -> Plan:
        asked.append((left, size_bytes))
        return compile_schedule(SCHEDULES["ring"].build(left, 16), size_bytes=size_bytes, topology=left)

    faults = micros("2/0@{0}, 3/0@{1}, 3/1@{1}", 20 * STEP_S, 60 * STEP_S)
    policy = Policy("replan", detection_s=STEP_S, agreement_s=STEP_S, new_plan=remember)
    assert policy.switches(faults) == (22 * STEP_S, 62 * STEP_S)
    timing = simulate(plan, topology, model=model, faults=faults, policy=policy)
    assert timing.recovery is not None
    second = timing.recovery.second
    assert second is not None
    assert second.recovery is not None
    third = second.recovery.second
    assert third is not None
    assert timing.seconds == third.seconds > second.end_s.max()
    (after_one, first_rest), (after_two, second_rest) = asked[-2:]
    full = topology.out[2]
    assert [after_one.out[k] / full for k in (2, 3)] == [Fraction(7, 8), 1]
    assert [after_two.out[k] / full for k in (2, 3)] == [Fraction(7, 8), Fraction(6, 8)]
    assert plan.size_bytes > first_rest > second_rest > 0
    assert third.start_s.min() >= float(62 * STEP_S) - 1e-12
    costs = sum(each.cost_s for each in timing.recovery.costs)
    assert timing.recovery.fault_free_s + costs == pytest.approx(timing.seconds, rel=1e-9)


@pytest.mark.parametrize("model", MODELS)
def test_faults_on_a_rail_hold_up_its_stripes(model: Model) -> None:
    """A rail at half its rate is as slow as all rails at half; one that is down until later is waited for."""
    rails = replace(cluster(4), rail_only=True)
    plan = ring(4)
    whole = simulate(plan, rails, model=model)
    assert whole.seconds == pytest.approx(simulate(plan, cluster(4), model=model).seconds, rel=1e-9)
    slow = simulate(plan, rails, model=model, faults=FaultPlan.parse("2/3@0s=1/2"))
    everything = ", ".join(f"2/{nic}@0s=1/2" for nic in range(len(rails.servers[2].nics)))
    assert slow.seconds == pytest.approx(
        simulate(plan, cluster(4), model=model, faults=FaultPlan.parse(everything)).seconds, rel=1e-9
    )
    down = micros("2/3@{0}..{1}", STEP_S, 3 * STEP_S)
    waited = simulate(plan, rails, model=model, faults=down, policy=Policy("wait"))
    pooled = simulate(plan, cluster(4), model=model, faults=down, policy=Policy("wait"))
    assert waited.seconds == pytest.approx(pooled.seconds, rel=1e-9)
    assert waited.recovery is not None
    assert waited.seconds == pytest.approx(waited.recovery.fault_free_s + float(2 * STEP_S), rel=1e-9)
    with pytest.raises(TopologyError, match="stands still and nothing brings it back"):
        simulate(plan, rails, model=model, faults=micros("2/3@{0}", STEP_S), policy=Policy("wait"))


@pytest.mark.parametrize("seed", range(60))
def test_a_run_with_faults_ends_or_says_why(seed: int) -> None:
    rng = random.Random(seed)
    p, model = rng.randint(2, 5), rng.choice(MODELS)
    topology = cluster(p, rng.choice((1, 2, 4))).with_latency(Fraction(rng.choice((0, 1)), 10**6))
    schedule = SCHEDULES["ring"].build(topology, rng.choice((1, 4, 8)))
    plan = compile_schedule(schedule, size_bytes=p * CHUNK, topology=topology, slots=rng.choice((1, 2, 8)))
    time_s = simulate(plan, topology, model=model).seconds
    nics = len(topology.servers[0].nics)
    faults = FaultPlan.sampled(
        topology, seed, failures_per_s=2 / (time_s * p * nics), repair_s=time_s / 5, horizon_s=time_s
    ).first(6)
    if rng.random() < 0.3 and len(faults):
        faults = FaultPlan((replace(faults.faults[0], until_s=None), *faults.faults[1:]))
    name = rng.choice(("wait", "migrate", "replan"))
    policy = Policy(
        name,  # type: ignore[arg-type]
        detection_s=Fraction(rng.randint(0, 20), 10**6),
        migration_s=Fraction(rng.randint(0, 5), 10**6),
        unacknowledged_bytes=rng.choice((0, 100, 10**6)),
        new_plan=another_ring if name == "replan" else None,
    )
    jitter = rng.choice((None, Jitter(seed, time_s / 100, 0.1)))
    overhead_s = rng.choice((0.0, 1e-6))
    said = ""
    try:
        timing = simulate(
            plan, topology, model=model, overhead_s=overhead_s, faults=faults, policy=policy, jitter=jitter
        )
    except TopologyError as error:
        said = str(error)
    if said:
        assert "stands still and nothing brings it back" in said or "no NIC is left" in said
        return
    assert timing.recovery is not None
    assert np.isfinite(timing.seconds)
    assert (timing.sent_s >= timing.start_s).all()
    assert (timing.end_s >= timing.sent_s * (1 - 1e-12)).all()
    assert timing.end_s[timing.critical[-1]] == timing.end_s.max()
    costs = sum(each.cost_s for each in timing.recovery.costs)
    assert timing.recovery.fault_free_s + costs == pytest.approx(timing.seconds, rel=1e-9)


def another_ring(topology: Topology, size_bytes: int) -> Plan:
    return compile_schedule(SCHEDULES["ring"].build(topology, 2), size_bytes=size_bytes, topology=topology)


def test_refusals() -> None:
    plan, topology, faults = ring(4), cluster(4), FaultPlan.parse("2/0@1us")
    with pytest.raises(InputError, match="policy wait: there are no faults"):
        simulate(plan, topology, policy=Policy("wait"))
    with pytest.raises(InputError, match="policy 'pray': must be one of"):
        Policy("pray")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="detection -1: must not be negative"):
        Policy(detection_s=Fraction(-1))
    with pytest.raises(InputError, match="policy replan: new_plan must be given"):
        Policy("replan")
    with pytest.raises(InputError, match="policy wait: new_plan"):
        Policy("wait", new_plan=new_plan)
    with pytest.raises(TopologyError, match="server 9 must be below 4"):
        simulate(plan, topology, faults=FaultPlan.parse("9/0@1us"))
    with pytest.raises(TopologyError, match="must be wait, since stripes"):
        simulate(plan, replace(topology, rail_only=True), faults=faults)
    replan, slower = Policy("replan", new_plan=new_plan), FaultPlan.parse("2/0@1us=1/2")
    with pytest.raises(TopologyError, match="replan on a rail-only"):
        simulate(plan, replace(topology, rail_only=True), faults=slower, policy=replan)


@pytest.fixture
def fresh_kernels() -> Iterator[None]:
    kernels.cache_clear()
    yield
    kernels.cache_clear()


@both
@pytest.mark.usefixtures("fresh_kernels")
def test_without_numba_faults_and_noise_are_the_same(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = micros("2/3@{0}, 1/0@{1}..{2}", STEP_S, 2 * STEP_S, 3 * STEP_S)
    policy = Policy("migrate", detection_s=STEP_S / 3, unacknowledged_bytes=1000)
    jitter = Jitter(3, latency_s=1e-6, rate_sigma=0.1)
    topology = cluster(5).with_latency(Fraction(1, 10**6))
    compiled = simulate(pipeline(5, 2), topology, model=model, faults=faults, policy=policy, jitter=jitter)
    kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    plain = simulate(pipeline(5, 2), topology, model=model, faults=faults, policy=policy, jitter=jitter)
    assert np.array_equal(plain.end_s, compiled.end_s) or (
        model == "fair" and np.allclose(plain.end_s, compiled.end_s, rtol=1e-12)
    )


def test_noise_is_that_of_its_seed() -> None:
    # Written down once: the same on every machine.
    draws = Jitter(5, latency_s=1e-6).latencies(3)
    assert [each.hex() for each in draws.tolist()] == [
        "0x1.4c6c1dcddc6ecp-22",
        "0x1.1acc10056529ap-21",
        "0x1.a5bfa7e86bb56p-20",
    ]
    factors = Jitter(5, rate_sigma=0.1).rates([Fraction(1)] * 3)
    assert factors == (Fraction(9856591, 8388608), Fraction(9051121, 8388608), Fraction(9742069, 8388608))
    # Draw i does not depend on how many are asked for.
    assert Jitter(5, latency_s=1e-6).latencies(1000)[:3].tolist() == draws.tolist()


def test_noise_has_its_distribution() -> None:
    draws = Jitter(1, latency_s=2.0).latencies(200_000)
    assert draws.mean() == pytest.approx(2.0, rel=0.01)
    assert np.median(draws) == pytest.approx(2 * np.log(2), rel=0.01)
    assert draws.min() >= 0
    logs = np.log([float(each) for each in Jitter(1, rate_sigma=0.3).rates([Fraction(1)] * 4000)])
    assert logs.mean() == pytest.approx(0, abs=0.02)
    assert logs.std() == pytest.approx(0.3, rel=0.04)
    values = np.array([1e-300, 2.0**-53, 0.1, 0.5, 0.7, 0.71, 0.999, 1.0, 3.0])
    assert np.allclose(minus_ln(values), -np.log(values), rtol=4e-16, atol=2e-16)


@both
def test_noise_delays_messages_and_bends_rates(model: Model) -> None:
    plan, topology = ring(4), cluster(4)
    quiet = simulate(plan, topology, model=model)
    assert simulate(plan, topology, model=model, jitter=Jitter(1)).seconds == pytest.approx(quiet.seconds, rel=1e-12)
    noisy = simulate(plan, topology, model=model, jitter=Jitter(1, latency_s=1e-6))
    more = Jitter(1, latency_s=1e-6).latencies(len(plan.transfers))
    first = int(np.argmin(quiet.end_s))
    assert noisy.end_s[first] == pytest.approx(quiet.end_s[first] + more[first], rel=1e-9)
    assert noisy.seconds > quiet.seconds
    assert (
        noisy.end_s.tolist() == simulate(plan, topology, model=model, jitter=Jitter(1, latency_s=1e-6)).end_s.tolist()
    )
    bent = simulate(plan, topology, model=model, jitter=Jitter(1, rate_sigma=0.5))
    slowest = min(Jitter(1, rate_sigma=0.5).rates([Fraction(1)] * 8))
    assert bent.seconds >= quiet.seconds / float(slowest) * (1 - 1e-9)


def test_noise_that_cannot_be() -> None:
    for jitter in (
        {"seed": -1},
        {"seed": 2**64},
        {"seed": 0, "latency_s": -1.0},
        {"seed": 0, "rate_sigma": float("nan")},
    ):
        with pytest.raises(InputError):
            Jitter(**jitter)


@pytest.mark.parametrize("model", ["fifo", "exclusive"])
def test_memory_is_linear_in_the_transfers(model: Model) -> None:
    def peak(p: int) -> float:
        plan, topology = ring(p), cluster(p, 1)
        simulate(plan, topology, model=model)
        tracemalloc.start()
        simulate(plan, topology, model=model)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most / len(plan.transfers)

    assert peak(128) < 250
    assert peak(128) < 1.1 * peak(64)
