"""The exact time of a plan: against the simulator, against a naive evaluator, against formulas; and claims about it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from optcc.arrays import column
from optcc.compiler import compile_schedule, find_transfers
from optcc.errors import InputError, PlanError, TopologyError
from optcc.passes.lane_assignment import lanes_by_port
from optcc.passes.lower import lower
from optcc.passes.timetable import timetable
from optcc.plan import LOCALS, RECEIVES, SENDS, Channel, Plan
from optcc.schedule import Schedule
from optcc.schedules.hierarchical import hierarchical
from optcc.schedules.optcc import optcc
from optcc.schedules.registry import SCHEDULES
from optcc.schedules.ring import ring
from optcc.simulate import simulate
from optcc.timing import Timing
from optcc.topology import Nic, Server, Topology
from optcc.transfers import Transfers
from optcc.verify.bounds.certified import least_seconds
from optcc.verify.bounds.closed_forms import collective_bound
from optcc.verify.plan import port_use
from optcc.verify.plan.parametric import makespan_of
from optcc.verify.plan.port_graph import ExactModel
from optcc.verify.plan.port_use import PortTicks, PortUse
from optcc.verify.plan.timing import (
    BEFORE,
    DATA,
    IN_PORT,
    NOTHING,
    OUT_PORT,
    READ,
    SLOT,
    TRACE_LINES_MAX,
    TURN,
    Makespan,
    check_timing,
    exact_makespan,
    simulated_makespan,
)
from tests.negative.edits import Draft
from tests.property.strategies import Trees

MODELS: tuple[ExactModel, ...] = ("exclusive", "fifo")
models = pytest.mark.parametrize("model", MODELS)
RING = 2 * 3 * 4
"""Bytes that a rank of `ring(4)` of 16 B sends, and seconds that its rate of 1 B/s takes for them."""


@cache
def ring_plan(p: int = 4, slots: int = 2) -> Plan:
    """Chunks of 4 B."""
    return compile_schedule(ring(n_ranks=p), size_bytes=4 * p, slots=slots)


def flat(*rates: Fraction | int, latency_s: Fraction | int = 0) -> Topology:
    """One GPU a server, out as fast as in."""
    servers = (Server(f"h{i}", 1, (Nic(0, Fraction(rate), Fraction(rate)),)) for i, rate in enumerate(rates))
    return Topology(tuple(servers), Fraction(latency_s))


def random_topology(rng: random.Random, n_ranks: int) -> Topology:
    """Out and in differ; a latency that is zero, or as long as a message, or odd."""
    rates = [Fraction(rng.choice((1, 2, 3, 5, 7, 10)), rng.choice((1, 1, 2, 3))) for _ in range(2 * n_ranks)]
    servers = (Server(f"h{i}", 1, (Nic(0, rates[2 * i], rates[2 * i + 1]),)) for i in range(n_ranks))
    return Topology(tuple(servers), rng.choice((Fraction(0), Fraction(1, 2), Fraction(22, 7), Fraction(9))))


def random_plan(rng: random.Random, *, slots: int | None = None, ranks_max: int = 6) -> tuple[Plan, Topology]:
    """Random trees, compiled for a topology or as written."""
    n_ranks = rng.randint(2, ranks_max)
    choice = Trees(
        seed=rng.getrandbits(32),
        n_ranks=n_ranks,
        sections=rng.randint(1, 3),
        segments=rng.randint(1, 3),
        scratch=rng.random() < 0.5,
        mixed=rng.random() < 0.5,
        two_pipelines=rng.random() < 0.3,
    )
    topology = random_topology(rng, n_ranks)
    plan = compile_schedule(
        choice.build(),
        size_bytes=4 * rng.randint(1, 40),
        topology=rng.choice((topology, random_topology(rng, n_ranks), None)),
        slots=slots or rng.randint(1, 3),
        fused=rng.random() < 0.5,
        ports=rng.choice(MODELS),
    )
    return plan, topology


def keeps_the_lanes_order(plan: Plan, timing: Timing) -> bool:
    """True if every port of one lane served it in the order in which it stands, as far as the times tell."""
    for owner, moments in ((plan.send_transfer, timing.start_s), (plan.recv_transfer, timing.taken_s)):
        for lane in plan.lanes:
            served = [
                moments[owner[i]]
                for i in lane
                if owner[i] >= 0 and plan.transfers.src[owner[i]] != plan.transfers.dst[owner[i]]
            ]
            if any(one > other for one, other in pairwise(served)):
                return False
    return True


def same(makespan: Makespan, timing: Timing) -> bool:
    return float(makespan.seconds) == pytest.approx(timing.seconds, rel=1e-12, abs=0)


# Against the simulator ------------------------------------------------------------------------------------------------


@models
def test_one_slot_leaves_a_port_no_choice_and_the_simulator_agrees(model: ExactModel) -> None:
    rng = random.Random(11)
    for case in range(150):
        plan, topology = random_plan(rng, slots=1)
        assert same(exact_makespan(plan, topology, model=model), simulate(plan, topology, model=model)), case


@models
def test_with_more_slots_it_agrees_wherever_the_ports_keep_the_lanes_order(model: ExactModel) -> None:
    rng = random.Random(12)
    kept = other = 0
    for case in range(250):
        plan, topology = random_plan(rng)
        timing = simulate(plan, topology, model=model)
        makespan = exact_makespan(plan, topology, model=model)
        if keeps_the_lanes_order(plan, timing):
            assert same(makespan, timing), case
            kept += 1
        elif not same(makespan, timing):
            other += 1
    assert kept > 100
    assert other > 0, "no plan in which the simulator's order takes another time: the second half was not tested"


@models
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_library_takes_what_the_simulator_says(name: str, model: ExactModel) -> None:
    rng = random.Random(13)
    timed = 0
    for text in ("4@50MB/s", "4@50MB/s,3=25MB/s", "8@50GB/s,7=20GB/s:30GB/s", "5@3GB/s,1=1GB/s", "2x4@50GB/s,1=3/4"):
        topology = Topology.parse(text).with_latency(Fraction(rng.randrange(3), 10**6))
        try:
            schedule = SCHEDULES[name].build(topology, 4)
        except TopologyError:
            continue
        plan = compile_schedule(schedule, size_bytes=4 * 12345, topology=topology, slots=1, ports=model)
        assert same(exact_makespan(plan, topology, model=model), simulate(plan, topology, model=model)), text
        timed += 1
    assert timed


@models
@pytest.mark.parametrize("fabric", [None, Fraction(3), Fraction(100)])
def test_ports_that_lanes_share_are_served_in_the_simulator_s_order(model: ExactModel, fabric: Fraction | None) -> None:
    """GPUs of a server use the same NICs, so no lane says which goes first."""
    servers = tuple(
        Server(f"h{i}", 4, tuple(Nic(rail, Fraction(5, 2), Fraction(2)) for rail in range(2 + i)), fabric)
        for i in range(3)
    )
    topology = Topology(servers, Fraction(1, 3))
    for segments in (1, 2, 5):
        for schedule in (ring(n_ranks=12, segments=segments), hierarchical.build(topology, segments)):
            plan = compile_schedule(schedule, size_bytes=4 * 101, topology=topology)
            makespan = exact_makespan(plan, topology, model=model)
            assert same(makespan, simulate(plan, topology, model=model))
            if schedule.name == "hierarchical":
                assert makespan.order == "simulated"


@models
def test_the_links_of_a_gpu_work_at_the_same_time(model: ExactModel) -> None:
    """A lane for each link, so the lanes' order is each port's; with one slot the simulator has no choice."""
    for text in ("3x2@5GB/s+9GB/s", "3x4@5GB/s+40GB/s,1=7GB/s", "2x4@5GB/s+40GB/s/rails", "torus:3x2@2GB/s:3GB/s"):
        topology = Topology.parse(text).with_latency(Fraction(1, 10**9))
        schedule = (ring if text.startswith("torus:3x2") else hierarchical).build(topology, 3)
        if text.startswith("torus"):  # the ranks of a grid in the order of a ring
            schedule = along(schedule, (0, 1, 3, 5, 4, 2))
        for slots in (1, 4):
            assert topology.wired is not None
            transfers, order = timetable(find_transfers(schedule, 4 * 1001, "float32", "sum"), topology, slots, model)
            lanes = lanes_by_port(transfers, topology.wired, slots)
            plan = lower(schedule.name, transfers, order.sends, lanes, order.receives, ports=model)
            timing, makespan = simulate(plan, topology, model=model), exact_makespan(plan, topology, model=model)
            assert makespan.order == "lanes"
            assert same(makespan, timing) or (slots > 1 and not keeps_the_lanes_order(plan, timing))
            assert makespan.seconds >= least_seconds(topology, 4 * 1001, plan.collective)
        busiest = max(timing.port_busy_s)
        assert check_timing(plan, topology, model=model, promise_s=Fraction(busiest) / 2)[0] is not None


def along(schedule: Schedule, ranks: tuple[int, ...]) -> Schedule:
    """The schedule with rank i's part played by `ranks[i]`."""
    names = np.array(ranks)
    return replace(schedule, src=column(names[schedule.src]), dst=column(names[schedule.dst]))


def test_gpus_that_no_route_joins_have_no_link() -> None:
    topology = Topology.parse("2x2@5GB/s+9GB/s,1=1/2")
    plan = compile_schedule(hierarchical(n_ranks=4, gpus=2), size_bytes=64)
    refuted, makespan = check_timing(plan, topology, model="fifo", promise_s=Fraction(1))
    assert makespan is None
    assert refuted is not None
    assert "no link: only other GPUs join h0 gpu 1 and h1 gpu 1" in refuted.summary
    with pytest.raises(TopologyError, match="no link: only other GPUs"):
        exact_makespan(plan, topology, model="fifo")


def test_one_server_without_a_finite_fabric_takes_its_latencies_only() -> None:
    topology = Topology((Server("h0", 4, ()),), Fraction(3))
    makespan = exact_makespan(ring_plan(), topology, model="exclusive")
    assert makespan.seconds == 2 * 3 * 3
    assert makespan.order == "lanes"


@pytest.mark.parametrize("slots", [1, 2])
def test_the_makespan_over_all_slowdowns_has_these_values(slots: int) -> None:
    rng = random.Random(14)
    for p, segments, at in ((3, 2, 2), (4, 3, 4), (5, 4, 1)):
        plan = compile_schedule(
            optcc(p, segments, stragglers=(p - 1,)),
            size_bytes=4 * (p - 1) * segments * 7,
            topology=flat(*[Fraction(60)] * (p - 1), Fraction(60, at)),
            slots=slots,
        )
        function = makespan_of(plan, p - 1, Fraction(1), Fraction(8))
        for slowdown in [*function.breakpoints, *(Fraction(rng.randint(60, 480), 60) for _ in range(20))]:
            topology = flat(*[Fraction(1)] * (p - 1), 1 / slowdown)
            assert exact_makespan(plan, topology, model="exclusive").seconds == function(slowdown) * plan.size_bytes


# Against another evaluator --------------------------------------------------------------------------------------------


class Naive:
    """The same moments from the instructions, by recursion over fractions; ports in the order of the lanes, flat."""

    def __init__(self, plan: Plan, topology: Topology, model: ExactModel) -> None:
        self.plan, self.topology, self.exclusive = plan, topology, model == "exclusive"
        self.sent_at = {int(t): i for i, t in enumerate(plan.send_transfer) if t >= 0}
        self.kinds = plan.kind.tolist()
        self.lane = [next(lane for lane in plan.lanes if i in lane) for i in range(len(plan))]
        self.known: dict[tuple[str, int], Fraction] = {}

    def at(self, what: str, i: int) -> Fraction:
        if (what, i) not in self.known:
            moment: Fraction = getattr(self, what)(i)
            self.known[what, i] = moment
        return self.known[what, i]

    def earlier(self, i: int, kinds: frozenset[int], back: int = 1) -> int | None:
        """The instruction of one of `kinds` that stands `back` before i in its lane."""
        own = [j for j in self.lane[i] if self.kinds[j] in kinds]
        return own[own.index(i) - back] if own.index(i) >= back else None

    def seconds(self, i: int) -> tuple[Fraction, Fraction]:
        t, size = int(self.plan.send_transfer[i]), int(self.plan.bytes[i])
        out = size / self.topology.out[self.plan.transfers.src[t]]
        into = size / self.topology.in_[self.plan.transfers.dst[t]]
        return (max(out, into), max(out, into)) if self.exclusive else (out, into)

    def receive_of(self, i: int) -> int:
        (found,) = np.flatnonzero((self.plan.in_channel >= 0) & (self.plan.recv_transfer == self.plan.send_transfer[i]))
        return int(found)

    def gate(self, i: int) -> Fraction:
        """Everything that i and those before it in its lane are `after` of has happened."""
        place = self.lane[i].index(i)
        before = [self.at("gate", self.lane[i][place - 1])] if place else []
        return max([Fraction(0), *before, *(self.at("happened", j) for j in self.plan.after[i].tolist())])

    def happened(self, i: int) -> Fraction:
        return self.at("left", i) if self.kinds[i] in SENDS else self.at("done", i)

    def start(self, i: int) -> Fraction:
        """Of a send."""
        moments = [self.at("gate", i)]
        if self.kinds[i] in RECEIVES:
            moments.append(self.at("done", i))
        if (before := self.earlier(i, SENDS)) is not None:
            moments.append(self.at("left", before))
        receive = self.receive_of(i)
        slots = self.plan.channels[self.plan.in_channel[receive]].slots
        if (freed := self.earlier(receive, RECEIVES, slots)) is not None:
            moments.append(self.at("done", freed))
        if self.exclusive and (before := self.earlier(receive, RECEIVES)) is not None:
            moments.append(self.at("left", self.sent_at[int(self.plan.recv_transfer[before])]))
        return max(moments)

    def left(self, i: int) -> Fraction:
        return self.at("start", i) + self.seconds(i)[0]

    def landed(self, i: int) -> Fraction:
        """Of a send: its last byte is through the in port."""
        out, into = self.seconds(i)
        if self.exclusive:
            return self.at("left", i)
        moments = [self.at("start", i) + max(Fraction(0), out - into)]
        if (before := self.earlier(self.receive_of(i), RECEIVES)) is not None:
            moments.append(self.at("landed", self.sent_at[int(self.plan.recv_transfer[before])]))
        return max(moments) + into

    def done(self, i: int) -> Fraction:
        """Of a receive or a local operation."""
        kinds = LOCALS if self.kinds[i] in LOCALS else RECEIVES
        moments = [self.at("gate", i)]
        if (before := self.earlier(i, kinds)) is not None:
            moments.append(self.at("done", before))
        if kinds is RECEIVES:
            moments.append(self.at("landed", self.sent_at[int(self.plan.recv_transfer[i])]) + self.topology.latency_s)
        return max(moments)

    def makespan(self) -> Fraction:
        return max(
            (self.at("done", i) for i in range(len(self.plan)) if self.plan.recv_transfer[i] >= 0), default=Fraction(0)
        )


@pytest.fixture
def deep() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    yield
    sys.setrecursionlimit(limit)


@models
def test_a_naive_evaluator_agrees_exactly(model: ExactModel, deep: None) -> None:
    rng = random.Random(15)
    for case in range(200):
        plan, topology = random_plan(rng, ranks_max=5)
        assert exact_makespan(plan, topology, model=model).seconds == Naive(plan, topology, model).makespan(), case


@models
def test_wide_integers_give_what_64_bits_give(model: ExactModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(16)
    cases = [random_plan(rng) for _ in range(30)]
    narrow = [exact_makespan(plan, topology, model=model) for plan, topology in cases]
    monkeypatch.setattr(port_use, "TICKS_MAX", 1)
    assert [exact_makespan(plan, topology, model=model) for plan, topology in cases] == narrow


def test_rates_without_a_common_tick_below_64_bits_stay_exact(deep: None) -> None:
    """Eight primes near 10^9: the common tick has more than 200 bits."""
    rates = [999999937, 999999929, 999999893, 999999883, 999999797, 999999761, 999999757, 999999751]
    topology = flat(*rates, latency_s=Fraction(1, 10**9 + 7))
    transfers = ring_plan(8).transfers
    assert PortTicks.of(transfers, PortUse.of(transfers, topology), Fraction(0)).wide
    for model in MODELS:
        makespan = exact_makespan(ring_plan(8), topology, model=model)
        assert makespan.seconds == Naive(ring_plan(8), topology, model).makespan()
        assert same(makespan, simulate(ring_plan(8), topology, model=model))


# Formulas and paths ---------------------------------------------------------------------------------------------------


@models
@pytest.mark.parametrize("p", [2, 3, 8])
def test_a_ring_takes_its_closed_form(model: ExactModel, p: int) -> None:
    chunk, latency = Fraction(4), Fraction(1, 7)
    makespan = exact_makespan(ring_plan(p), flat(*[3] * p, latency_s=latency), model=model)
    assert makespan.seconds == 2 * (p - 1) * (chunk / 3 + latency)
    assert len(makespan.path) == 2 * (p - 1)
    assert makespan.waits == (NOTHING, *[DATA] * (2 * p - 3))
    assert str(makespan).endswith(f"with {model} ports in the lanes' order, {2 * (p - 1)} transfers on the path")


@models
def test_a_path_begins_at_zero_and_every_wait_is_named(model: ExactModel) -> None:
    rng = random.Random(17)
    seen = set()
    for case in range(200):
        plan, topology = random_plan(rng)
        if case % 4 == 0:  # no ports: lanes alone hold things up
            topology = Topology((Server("h0", plan.n_ranks, ()),), Fraction(3))
        makespan = exact_makespan(plan, topology, model=model)
        assert len(makespan.path) == len(makespan.waits) == len(makespan.begins_s)
        assert len(set(makespan.path)) == len(makespan.path)
        seen |= set(makespan.waits)
        if makespan.path:
            assert (makespan.waits[0], makespan.begins_s[0]) == (NOTHING, Fraction(0))
            assert NOTHING not in makespan.waits[1:]
            assert all(one <= other for one, other in pairwise((*makespan.begins_s, makespan.seconds)))
    assert seen == {NOTHING, DATA, READ, TURN, SLOT, OUT_PORT, IN_PORT}


def test_an_empty_plan_takes_no_time() -> None:
    plan = compile_schedule(ring(n_ranks=1), size_bytes=16)
    assert exact_makespan(plan, flat(1), model="fifo") == Makespan("fifo", "lanes", Fraction(0), (), (), ())
    assert check_timing(plan, flat(1), model="fifo", within=Fraction(1), promise_s=Fraction(0))[0] is None


# Claims ---------------------------------------------------------------------------------------------------------------


@models
def test_a_promise_that_is_kept_exactly_is_kept_and_one_below_it_is_not(model: ExactModel) -> None:
    topology = flat(1, 1, 1, 1, latency_s=1)
    makespan = exact_makespan(ring_plan(), topology, model=model)
    assert makespan.seconds == RING + 6
    assert check_timing(ring_plan(), topology, model=model, promise_s=makespan.seconds) == (None, makespan)
    wrong, same_makespan = check_timing(
        ring_plan(), topology, model=model, promise_s=makespan.seconds - Fraction(1, 10**30)
    )
    assert wrong is not None
    assert same_makespan == makespan
    assert wrong.property == "timing"
    assert wrong.summary.startswith("takes 30.000 s (exactly 30 s)")
    assert "line 43" in str(wrong)
    assert "[all-gather] 3 transfers of the path" in str(wrong)


@models
def test_a_factor_of_the_bound_is_kept_exactly_or_refuted(model: ExactModel) -> None:
    topology = flat(1, 1, 1, Fraction(2, 3))
    makespan = exact_makespan(ring_plan(), topology, model=model)
    bound = collective_bound(topology, 16).seconds
    ratio = makespan.seconds / bound
    assert ratio > 1
    assert check_timing(ring_plan(), topology, model=model, within=ratio)[0] is None
    wrong, _ = check_timing(ring_plan(), topology, model=model, within=ratio * (1 - Fraction(1, 10**12)))
    assert wrong is not None
    assert "T* =" in wrong.summary


def test_of_two_claims_the_broken_one_is_named() -> None:
    topology = flat(1, 1, 1, 1, latency_s=1)
    wrong, _ = check_timing(ring_plan(), topology, model="fifo", within=Fraction(100), promise_s=Fraction(29))
    assert wrong is not None
    assert "29.000 s (exactly 29 s) promised" in wrong.summary
    wrong, _ = check_timing(ring_plan(), topology, model="fifo", within=Fraction(1), promise_s=Fraction(100))
    assert wrong is not None
    assert "1 T* = 24.000 s" in wrong.summary
    wrong, _ = check_timing(ring_plan(), topology, model="fifo", within=Fraction(1), promise_s=Fraction(29))
    assert wrong is not None
    assert "1 T* = " in wrong.summary, "the tighter one of two broken claims"


def test_a_promise_that_one_port_cannot_keep_names_the_port() -> None:
    """A rate that assumes the message once, while 1.5 times the message goes through the slow port."""
    topology = flat(10, 10, 1, 10)
    for promise in (Fraction(16), Fraction(RING) - Fraction(1, 10**9)):
        wrong, _ = check_timing(ring_plan(), topology, model="exclusive", promise_s=promise)
        assert wrong is not None
        assert wrong.summary.startswith("port out h2 must carry 24 B at 1B/s, which takes 24.000 s (exactly 24 s): ")
        assert wrong.rank == 2
        assert [line.split(" (line")[0] for line in wrong.trace] == [
            "[reduce-scatter] 3 transfers, 12 B; the first is #2 2->3 reduce bytes 8..11 [reduce-scatter]",
            "[all-gather] 3 transfers, 12 B; the first is #14 2->3 copy bytes 12..15 [all-gather]",
        ]
    wrong, _ = check_timing(
        ring_plan(), replace(topology, latency_s=Fraction(1)), model="exclusive", promise_s=Fraction(24)
    )
    assert wrong is not None
    assert wrong.summary.startswith("takes ")


def test_no_claim_is_never_refuted() -> None:
    assert check_timing(ring_plan(), flat(1, 1, 1, 1), model="fifo")[0] is None


@models
def test_a_counterexample_stays_short(model: ExactModel) -> None:
    topology = flat(*[50] * 7, 25)
    plan = compile_schedule(optcc(8, 32, stragglers=(7,)), size_bytes=4 * 7 * 320, topology=topology)
    bound = collective_bound(topology, plan.size_bytes).seconds
    for promise in (bound / 2, bound):
        wrong, makespan = check_timing(plan, topology, model=model, promise_s=promise)
        assert wrong is not None
        assert makespan is not None
        assert len(makespan.path) > 100
        assert len(wrong.trace) <= TRACE_LINES_MAX
        assert len(str(wrong).splitlines()) <= 20
        assert "(line " in str(wrong)


def railed(*rails: tuple[int, ...]) -> Topology:
    """Rail-only servers of two GPUs with NICs on these rails left."""
    servers = tuple(
        Server(f"h{i}", 1, tuple(Nic(rail, Fraction(1), Fraction(1)) for rail in kept)) for i, kept in enumerate(rails)
    )
    return Topology(servers, rail_only=True)


def test_servers_that_share_no_rail_have_no_link() -> None:
    topology = railed((0, 1), (0,), (1,), (0, 1))
    wrong, makespan = check_timing(ring_plan(), topology, model="fifo", promise_s=Fraction(10**9))
    assert wrong is not None
    assert makespan is None
    assert wrong.summary == "1->2: no link, the servers share no rail (h1 keeps 0; h2 keeps 1)"
    assert (wrong.rank, wrong.first_byte, wrong.last_byte) == (1, 4, 7)
    assert wrong.trace == (ring_plan().transfers.describe(1),)
    with pytest.raises(TopologyError, match="share no rail"):
        exact_makespan(ring_plan(), topology, model="fifo")


def test_a_link_that_no_transfer_uses_may_be_missing() -> None:
    """0 and 2 share no rail, and a ring of four never goes from 0 to 2; but then rails would have to be told apart."""
    with pytest.raises(TopologyError, match="not supported"):
        check_timing(ring_plan(), railed((0,), (0, 1), (1,), (0, 1)), model="fifo", promise_s=Fraction(1))


def test_equal_rails_are_pooled() -> None:
    assert exact_makespan(ring_plan(), railed(*[(1, 2)] * 4), model="fifo").seconds == Fraction(RING, 2)


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(TopologyError, match="topology of 3 ranks"):
        exact_makespan(ring_plan(), flat(1, 1, 1), model="fifo")
    with pytest.raises(TopologyError, match="topology of 3 ranks"):
        check_timing(ring_plan(), flat(1, 1, 1), model="fifo")
    with pytest.raises(InputError, match="model 'fair'"):
        exact_makespan(ring_plan(), flat(1, 1, 1, 1), model="fair")  # type: ignore[arg-type]
    for claim in ({"within": Fraction(-1)}, {"promise_s": Fraction(-1)}):
        with pytest.raises(InputError, match="must not be negative"):
            check_timing(ring_plan(), flat(1, 1, 1, 1), model="fifo", **claim)


def test_lanes_that_contradict_each_other_are_refused() -> None:
    """Two messages of one pair on two channels, sent in one order and received in the other; no deadlock, two slots."""
    draft = Draft.of(compile_schedule(ring(n_ranks=2), size_bytes=8, slots=2, fused=False))
    draft.channels = [Channel(0, 1, 2), Channel(1, 0, 2), Channel(0, 1, 2)]
    sends = [row for row in draft.rows if row.name == "send" and row.out_channel == 0]
    receives = [row for row in draft.rows if row.in_channel == 0]
    sends[0].out_channel = receives[0].in_channel = 2
    for row in draft.rows:
        row.after = []
    draft.lane_of(receives[0]).reverse()
    plan = draft.build()
    with pytest.raises(PlanError, match="waits for itself once the ports keep their order"):
        exact_makespan(plan, flat(1, 1), model="exclusive")


def test_a_transfer_without_an_instruction_is_refused() -> None:
    draft = Draft.of(ring_plan())
    draft.remove(draft.find(0, "send"))
    with pytest.raises(PlanError, match="0 sends"):
        exact_makespan(draft.build(), flat(1, 1, 1, 1), model="fifo")


def test_bytes_beyond_64_bits_in_sum_are_added_exactly() -> None:
    transfers = ring_plan(2).transfers
    huge = replace(
        transfers, size_bytes=2**62, bytes=column([2**61] * 4), src_offset=column([0] * 4), dst_offset=column([0] * 4)
    )
    assert isinstance(huge, Transfers)
    topology = flat(1, 1)
    ports = PortUse.of(huge, topology)
    assert ports.carried(huge) == [2**62] * 4


# Fair ports -----------------------------------------------------------------------------------------------------------


def test_fair_ports_are_judged_by_simulation_and_called_rounded() -> None:
    """The claim holds at the simulated time and not below; the path is the simulator's, and no time is called exact."""
    topology = Topology.parse("4@50MB/s,3=25MB/s")
    plan = compile_schedule(SCHEDULES["shares"].build(topology, 8), size_bytes=2**20, topology=topology, ports="fair")
    timing = simulate(plan, topology, model="fair")
    makespan = simulated_makespan(plan, topology)
    assert (makespan.model, makespan.order, makespan.exact) == ("fair", "rounded", False)
    assert (float(makespan.seconds), makespan.path) == (timing.seconds, timing.critical)
    assert makespan.waits == (NOTHING, *[BEFORE] * (len(makespan.path) - 1))
    assert all(one <= other for one, other in pairwise((*makespan.begins_s, makespan.seconds)))
    assert "exactly" not in str(makespan) and "simulated in floats" in str(makespan)
    found, again = check_timing(plan, topology, model="fair", promise_s=makespan.seconds)
    assert (found, again) == (None, makespan)
    found, _ = check_timing(plan, topology, model="fair", promise_s=makespan.seconds * Fraction(999, 1000))
    assert found is not None
    assert "simulated in floats) with fair ports: " in found.summary
    assert "exactly" not in "".join(found.trace)


def test_a_plan_for_fair_ports_keeps_its_promise_there_and_not_under_exclusive_ones() -> None:
    """Shares with a lane for each pair: (k + 1)/k of the bound where ports are fair."""
    topology = Topology.parse("4@50MB/s,3=25MB/s")
    plan = compile_schedule(SCHEDULES["shares"].build(topology, 64), size_bytes=2**20, topology=topology, ports="fair")
    within = Fraction(102, 100)
    assert check_timing(plan, topology, model="fair", within=within)[0] is None
    found, makespan = check_timing(plan, topology, model="exclusive", within=within)
    assert found is not None and makespan is not None and makespan.exact


def test_another_model_is_refused() -> None:
    """With its name and the rule."""
    with pytest.raises(InputError, match="model 'open': must be one of fifo, exclusive, fair"):
        check_timing(ring_plan(), Topology.parse("4@1B/s"), model="open")  # type: ignore[arg-type]
