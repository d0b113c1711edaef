"""Exact times with uplinks, of pods and between switches: against references that step from event to event in
fractions, against the simulator, against the schedule as written, by hand; and the claims that rest on them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optcc import cli
from optcc.compiler import compile_schedule
from optcc.dsl import Program, schedule
from optcc.errors import PlanError, TopologyError
from optcc.plan import Plan
from optcc.schedules.registry import SCHEDULES
from optcc.simulate import simulate
from optcc.static_order import time_static_order
from optcc.timing import Timing
from optcc.topology import Nic, Pod, Server, Topology
from optcc.transfers import Transfers
from optcc.verify.plan import port_use, timing
from optcc.verify.plan.port_graph import ExactModel
from optcc.verify.plan.port_use import PortUse
from optcc.verify.plan.timing import NOTHING, UPLINK, check_timing, exact_makespan
from tests.differential.test_simulate_reference import (
    Reference,
    in_pods,
    random_plan,
    random_topology,
    random_transfers,
    refer_plan,
    with_own_nics,
)

MODELS: tuple[ExactModel, ...] = ("exclusive", "fifo")
models = pytest.mark.parametrize("model", MODELS)
SEEDS, SEEDS_MORE = range(60), range(60, 1060)
NEVER = Fraction(10**9)


def random_case(seed: int) -> tuple[Plan, Topology]:
    """Servers in pods; of every third seed with NICs of GPUs, whose uplinks are links between switches;
    every plan passes one."""
    rng = random.Random(7000 + seed)
    while True:
        topology = with_own_nics(rng) if seed % 3 == 0 else in_pods(rng, random_topology(rng))
        routes = None if topology.wired is None else topology.wired.routes
        plan = random_plan(rng, random_transfers(rng, topology.n_ranks, routes))
        if (PortUse.of(plan.transfers, topology).ways >= 0).any():
            return plan, topology


# Against what serves whatever comes first -----------------------------------------------------------------------------


def check_against_references(seed: int, model: ExactModel) -> str:
    """What the simulator and its reference say, the latter to the last digit; returns the order."""
    plan, topology = random_case(seed)
    wanted = refer_plan(plan, topology, model, Fraction(0))
    if wanted is None:
        with pytest.raises(PlanError, match=r"waits for itself|never"):
            exact_makespan(plan, topology, model=model)
        return "never"
    makespan = exact_makespan(plan, topology, model=model)
    if makespan.order == "simulated":
        assert makespan.seconds == max(wanted.done.values())
        assert float(makespan.seconds) == pytest.approx(simulate(plan, topology, model=model).seconds, rel=1e-12)
    return makespan.order if makespan.seconds == max(wanted.done.values()) else "other"


@models
def test_random_plans_take_what_both_simulators_say(model: ExactModel) -> None:
    """Where a lane of its own uses each uplink, the lanes fix the order, and mostly it is the simulator's too."""
    found = Counter(check_against_references(seed, model) for seed in SEEDS)
    assert found["simulated"] > 30
    assert found["lanes"] > 5 * found["other"]


@pytest.mark.slow
@models
def test_a_thousand_random_plans_take_what_both_simulators_say(model: ExactModel) -> None:
    for seed in SEEDS_MORE:
        print(f"seed {seed}")
        check_against_references(seed, model)


# Against what serves in a given order ---------------------------------------------------------------------------------


class InOrder(Reference):
    """Its ports and its uplinks serve in the order of `served`, a run of the same plan with other rates."""

    def __init__(self, served: Timing, transfers: Transfers, *rest: Any) -> None:
        super().__init__(transfers, *rest)
        self.queues: dict[str, list[int]] = {}
        by_out = np.lexsort((served.sent_s, served.start_s)).tolist()
        by_in = np.lexsort((served.end_s, served.taken_s)).tolist()
        for side, order in enumerate((by_out, by_in)):
            for t in order:
                if self.ports[t]:
                    self.queues.setdefault(self.ports[t][side], []).append(t)
        assert served.uplink_turns is not None
        turns = [
            (turn, uplink, t)
            for t, row in enumerate(served.uplink_turns.tolist())
            for turn, uplink in zip((turn for turn in row if turn >= 0), self.ways[t], strict=True)
        ]
        for _, uplink, t in sorted(turns):
            self.queues.setdefault(uplink, []).append(t)

    def is_next(self, t: int, port: str, have_been: Any) -> bool:
        return t == next(other for other in self.queues[port] if other not in have_been)

    def have_passed(self, uplink: str) -> list[int]:
        return [t for t, each in enumerate(self.passed) if uplink in each]

    def until(self, uplink: str) -> Fraction:
        return max((self.passed[t][uplink][1] for t in self.have_passed(uplink)), default=Fraction(0))

    def begin(self, now: Fraction) -> None:
        before = -1
        while before != len(self.start) + len(self.taken) + sum(map(len, self.passed)):
            before = len(self.start) + len(self.taken) + sum(map(len, self.passed))
            held = {port for t in self.serving(0) for port in self.ports[t][:2]}
            ends = 2 if self.model == "exclusive" else 1
            for t in sorted(self.ready.keys() - self.start.keys()):
                own = self.ports[t][:ends]
                if not held & set(own) and all(self.is_next(t, port, self.start) for port in own):
                    self.start[t] = now
                    held |= set(own)
                    if self.model == "exclusive" and self.ways[t]:
                        self.waits[t] = NEVER
            self.pass_uplinks(now)
            if self.model == "fifo":
                self.take(now)

    def take(self, now: Fraction) -> None:
        for t in self.coming():
            comes = self.comes(t, now)
            if comes is not None and comes <= now:
                self.come[t] = now
        for t in sorted(self.come.keys() - self.taken.keys()):
            in_ = self.ports[t][1]
            if self.is_next(t, in_, self.taken) and in_ not in {self.ports[other][1] for other in self.serving(1)}:
                self.taken[t] = now

    def pass_uplinks(self, now: Fraction) -> None:
        for t in sorted(self.start):
            left = [uplink for uplink in self.ways[t] if uplink not in self.passed[t]]
            if self.model == "fifo":
                left = [uplink for uplink in left[:1] if self.reaches(t) <= now]
            if not left or not all(self.is_next(t, uplink, self.have_passed(uplink)) for uplink in left):
                continue
            begins = max([now, *(self.until(uplink) for uplink in left)])
            self.passed[t] |= {uplink: (begins, begins + self.size(t) / self.rates[uplink]) for uplink in left}
            if self.model == "exclusive":
                self.waits[t] = begins


def with_other_rates(rng: random.Random, topology: Topology) -> Topology:
    """The same servers and pods."""

    def rate() -> Fraction:
        return Fraction(rng.randint(1, 9))

    servers = tuple(
        replace(server, nics=tuple(replace(nic, out=rate(), in_=rate()) for nic in server.nics))
        for server in topology.servers
    )
    return replace(
        topology, servers=servers, pods=tuple(Pod(pod.name, pod.servers, rate(), rate()) for pod in topology.pods)
    )


def check_in_another_order(seed: int, model: ExactModel) -> bool | None:
    """The order of a run with other rates. True if it takes another time; None if the lanes fix all orders."""
    plan, topology = random_case(seed)
    other = with_other_rates(random.Random(8000 + seed), topology)
    if refer_plan(plan, other, model, Fraction(0)) is None:
        return None
    mine = exact_makespan(plan, topology, model=model)
    if mine.order == "lanes":
        return None
    served = simulate(plan, other, model=model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "simulate", lambda *_, **__: served)
        makespan = exact_makespan(plan, topology, model=model)
    wanted = refer_plan(plan, topology, model, Fraction(0), made=partial(InOrder, served))
    assert wanted is not None
    assert makespan.seconds == max(wanted.done.values()) < NEVER
    return makespan.seconds != mine.seconds


@models
def test_any_order_that_is_given_takes_what_stepping_through_it_takes(model: ExactModel) -> None:
    found = Counter(check_in_another_order(seed, model) for seed in SEEDS if seed % 3)
    assert found[True] > 5
    assert found[False] > 5


@pytest.mark.slow
@models
def test_a_thousand_other_orders(model: ExactModel) -> None:
    for seed in SEEDS_MORE:
        if seed % 3:
            print(f"seed {seed}")
            check_in_another_order(seed, model)


@models
def test_the_order_as_written(model: ExactModel) -> None:
    """`time_static_order` serves ports and uplinks in the order written: the exact time of the plan in that order."""
    orders = Counter[str]()
    for seed in range(24):
        rng = random.Random(9000 + seed)
        servers = tuple(
            Server(f"h{index}", 1, (Nic(0, Fraction(rng.randint(1, 4)), Fraction(rng.randint(1, 4))),))
            for index in range(rng.choice((4, 5, 8)))
        )
        topology = in_pods(rng, Topology(servers, latency_s=Fraction(1, 3)))
        definition = SCHEDULES[("ring", "direct", "optimal")[seed % 3]]
        plan = compile_schedule(definition.build(topology, 2), size_bytes=4 * 1001, slots=2**10, fused=False)
        ports, turn = PortUse.of(plan.transfers, topology), np.arange(len(plan.transfers))
        written = SimpleNamespace(start_s=turn, sent_s=turn, taken_s=turn, end_s=turn)
        written.uplink_turns = np.where(ports.ways >= 0, turn[:, None], -1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(timing, "simulate", lambda *_, written=written, **__: written)
            makespan = exact_makespan(plan, topology, model=model)
        swept = time_static_order(definition, topology, size_bytes=4 * 1001, segments=2, model=model)
        assert swept.seconds == pytest.approx(float(makespan.seconds), rel=1e-12), seed
        assert swept.port_busy_s == pytest.approx(
            {
                name: float(carried / rate)
                for name, carried, rate in zip(ports.names, ports.carried(plan.transfers), ports.rates, strict=True)
            }
        )
        orders[makespan.order] += 1
    assert min(orders["lanes"], orders["simulated"]) >= 3, orders


# By hand, and claims --------------------------------------------------------------------------------------------------


@schedule(configure=lambda _: {})
def crossing(program: Program) -> None:
    """0 and 1 send over the same uplinks; then 1 sends to 0, inside their pod."""
    for segment in program.pipeline(sections=1):
        segment[0].copy(src=0, dst=2)
        segment[0].copy(src=1, dst=3)
        segment[0].copy(src=1, dst=0)


def two_pods() -> Topology:
    """12 B take 4 s out of a server, 3 s in, 6 s up, 4 s down."""
    servers = tuple(Server(f"h{index}", 1, (Nic(0, Fraction(3), Fraction(4)),)) for index in range(4))
    pods = tuple(Pod(name, own, Fraction(2), Fraction(3)) for name, own in (("a", (0, 1)), ("b", (2, 3))))
    return Topology(servers, Fraction(1), pods=pods)


def test_two_messages_over_one_uplink_by_hand() -> None:
    """fifo: the second message is at the uplink at 0, passes it at 6 and until 12, is through there, at 12, and done at
    13, while its out port is free at 4. exclusive: it holds its port until 12, and the third takes 4 and 1."""
    plan = compile_schedule(crossing.build(two_pods()), size_bytes=12)
    fifo, exclusive = (exact_makespan(plan, two_pods(), model=model) for model in ("fifo", "exclusive"))
    assert fifo.seconds == 13
    assert (fifo.path, fifo.waits) == ((0, 1), (NOTHING, UPLINK))
    assert fifo.begins_s == (Fraction(0), Fraction(6))
    assert exclusive.seconds == 17
    assert exclusive.path == (0, 1, 2)
    assert exclusive.begins_s == (Fraction(0), Fraction(6), Fraction(12))
    assert exclusive.waits[1] == UPLINK
    assert "in the simulator's order" in str(fifo)
    alone = replace(two_pods(), pods=())
    assert exact_makespan(plan, alone, model="fifo").seconds == 9
    assert exact_makespan(plan, alone, model="exclusive").seconds == 9


@models
def test_a_promise_on_pods_is_kept_exactly_or_refuted(model: ExactModel) -> None:
    plan = compile_schedule(crossing.build(two_pods()), size_bytes=12)
    makespan = exact_makespan(plan, two_pods(), model=model)
    assert check_timing(plan, two_pods(), model=model, promise_s=makespan.seconds) == (None, makespan)
    wrong, _ = check_timing(plan, two_pods(), model=model, promise_s=makespan.seconds - Fraction(1, 10**30))
    assert wrong is not None
    assert wrong.summary.startswith(f"takes {makespan.seconds}.000 s")
    assert any("waited for an uplink" in line for line in wrong.trace)
    wrong, _ = check_timing(plan, two_pods(), model=model, promise_s=Fraction(11))
    assert wrong is not None
    assert wrong.summary.startswith("port up a must carry 24 B at 2B/s, which takes 12.000 s")
    assert wrong.trace == (f"[transfer] 2 transfers, 24 B; the first is {plan.transfers.describe(0)}",)


@models
def test_wide_integers_give_what_64_bits_give_on_uplinks(model: ExactModel, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in map(random_case, range(20)) if refer_plan(*case, model, Fraction(0)) is not None]
    narrow = [exact_makespan(*case, model=model) for case in cases]
    monkeypatch.setattr(port_use, "TICKS_MAX", 1)
    assert [exact_makespan(*case, model=model) for case in cases] == narrow


@models
def test_a_lane_of_its_own_on_every_uplink_fixes_the_order(model: ExactModel) -> None:
    """A ring crosses each uplink with one flow; oversubscribed 1 : 8 all ports wait for it, half as fast as a NIC."""
    topology = Topology.parse("8@1GB/s/4:8")
    plan = compile_schedule(SCHEDULES["ring"].build(topology, 1), size_bytes=8_000_000, topology=topology)
    makespan = exact_makespan(plan, topology, model=model)
    assert (makespan.order, makespan.seconds) == ("lanes", Fraction(2 * 7 * 1_000_000, 500_000_000))


def test_the_command_line_judges_times_on_pods(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", "direct", "--topology", "8@1GB/s/4:8", "--size", "8000000", "--segments", "1"]
    for ports in MODELS:
        assert cli.run([*words, "--ports", ports, "--promise", "70ms", "--eps", "4"]) == 0
        assert f"with {ports} ports in the simulator's order" in capsys.readouterr().out
        assert cli.run([*words, "--ports", ports, "--promise", "60ms"]) == 1
        assert "port up pod0 must carry 32000000 B at 500MB/s" in capsys.readouterr().out
    wired = ["verify", "hierarchical", "--topology", "4x2@5GB/s+9GB/s/2:2", "--size", "1MiB", "--segments", "2"]
    assert cli.run([*wired, "--promise", "1ms"]) == 0
    assert "exactly" in capsys.readouterr().out


def test_an_uplink_for_each_rail_of_pooled_nics_is_refused_with_what_works() -> None:
    servers = tuple(
        Server(f"h{index}", 1, tuple(Nic(rail, Fraction(1), Fraction(1)) for rail in (0, 1))) for index in range(4)
    )
    pods = tuple(Pod(name, own, Fraction(2), Fraction(3)) for name, own in (("a", (0, 1)), ("b", (2, 3))))
    topology = Topology(servers, rail_only=True, pods=pods)
    plan = compile_schedule(crossing.build(topology), size_bytes=12)
    with pytest.raises(TopologyError, match=r"an uplink for each rail of a pod: not supported.*fair ports"):
        exact_makespan(plan, topology, model="fifo")
    with pytest.raises(TopologyError, match="an uplink for each rail"):
        time_static_order(crossing, topology, size_bytes=12)
    assert check_timing(plan, topology, model="fair", promise_s=Fraction(13))[0] is None
