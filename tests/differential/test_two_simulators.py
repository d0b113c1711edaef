"""Two simulators, one truth: the production run-time in simulated time takes as long as `optcc.simulate` predicts.

`ran` runs a plan: RankMachine, engine, failover table, chunks, acknowledgements, real bytes. `predicted` is
`optcc.simulate` on the plan. Between them stands `spelled_out`: optcc.simulate's port models, but on what the run-time
really waits for, every chunk, acknowledgement and granted slot a transfer of its own. `ran` is `spelled_out` to 1e-9,
also while NICs lose rate, stand still and return. So `predicted` differs from `ran` by what a prediction leaves out,
and by nothing else (docs/simulation.md); where it leaves nothing out, the two are equal to 1e-9 as well.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from itertools import groupby
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest

from optcc.arrays import column
from optcc.compiler import compile_schedule
from optcc.faults import Direction, Fault, FaultPlan
from optcc.plan import RECV_COPY_SEND, RECV_REDUCE_SEND, Plan
from optcc.runtime.engine import Engine
from optcc.runtime.executor import Executor
from optcc.schedules.registry import SCHEDULES
from optcc.simulate import DONE_START, SENT_START, Constraints, Policy, simulate
from optcc.simulate.dependencies import DONE
from optcc.simulate.ports import PortMap
from optcc.simulate.recovery import port_changes
from optcc.simulate.run import PortNetwork, graph_of_constraints, run_graph
from optcc.topology import Nic, Server, Topology
from optcc.verdict import PROVED
from optcc.verify.plan import verify_plan
from tests.property.strategies import Trees
from tests.reference.stripes import Stripes
from tests.reference.table_transport import Counts, Model, SimNetwork, SimTransport, run_sim
from tests.sample import sampled

EXACT = 1e-9
WHOLE = 1 << 40
"""Chunks longer than any message."""
MODELS: tuple[Model, ...] = ("fifo", "fair")
WAYS: tuple[Direction, ...] = ("both", "out", "in")


class Ran(NamedTuple):
    """Simulated seconds that the run-time took, and what happened to packets."""

    seconds: float
    counts: Counts


def ran(
    plan: Plan,
    topology: Topology,
    model: Model,
    *,
    chunk_bytes: int = WHOLE,
    window: int = 1 << 14,
    overhead_s: float = 0.0,
    faults: FaultPlan | None = None,
    detection_s: float = 0.0,
    seed: int = 0,
) -> Ran:
    """Runs `plan`, and checks its result."""
    verdict = verify_plan(plan)
    assert verdict.verdict == PROVED, verdict
    n_elements = plan.size_bytes // 4
    inputs = [np.random.default_rng((seed, rank)).integers(0, 99, n_elements) for rank in range(plan.n_ranks)]
    wanted = np.sum(inputs, axis=0).astype(np.float32)
    network = SimNetwork(
        *(plan.n_ranks, topology),
        model=model,
        overhead_s=overhead_s,
        window=window,
        chunk_bytes=chunk_bytes,
        nic_faults=faults,
        detection_s=detection_s,
        stall_s=1e6,
        seed=seed,
    )

    def body(rank: int, transport: SimTransport) -> float:
        executor = Executor(plan, rank, transport, verdict, clock=transport.clock, deadline_s=1e6)
        recv = np.empty(n_elements, np.float32)
        executor.all_reduce(inputs[rank].astype(np.float32), recv)
        assert np.array_equal(recv, wanted)
        return network.now_s

    # The plan alone is timed, which `SimNetwork.allgather` lets begin at the same moment everywhere: not the barrier
    # before ranks agree on it.
    with patch.object(Engine, "barrier", lambda *_: None):
        return Ran(max(run_sim(network, body)), network.counts)


def predicted(plan: Plan, topology: Topology, model: Model, overhead_s: float = 0.0) -> float:
    return simulate(plan, topology, model=model, overhead_s=overhead_s).seconds


@dataclass
class Graph:
    """Nodes that take ports or a latency or no time, and what each waits for."""

    src: list[int] = field(default_factory=list)
    dst: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    edges: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, src: int, dst: int, size: int, turn: int = 0) -> int:
        self.src.append(src)
        self.dst.append(dst)
        self.sizes.append(size)
        self.turn.append(turn)
        return len(self.src) - 1

    def wait(self, after: int, *befores: int | None) -> None:
        self.edges += [(before, after, DONE_START) for before in befores if before is not None]

    def follow(self, after: int, before: int) -> None:
        self.edges.append((before, after, SENT_START))

    def seconds(self, topology: Topology, model: Model, faults: FaultPlan) -> float:
        before, after, kind = (column(np.array(each, dtype=np.int64)) for each in zip(*self.edges, strict=True))
        edges = Constraints(len(self.src), before, after, kind, np.zeros(len(before), dtype=np.bool_))
        src, dst, sizes = (column(np.array(each, dtype=np.int64)) for each in (self.src, self.dst, self.sizes))
        work = graph_of_constraints(src, dst, sizes, edges, np.array(self.turn, dtype=np.int32))
        ports = PortMap.of(topology)
        changes = port_changes(ports, topology, faults, Policy("wait"))
        result = run_graph(work, PortNetwork(ports, ports.rates, topology.latency_s, Fraction(0), changes), model)
        assert (result.seconds[DONE] >= 0).all()
        return float(result.seconds[DONE].max())


def apart(topology: Topology) -> Topology:
    """Every NIC as a server of its own with all ranks of its server, and one more server where messages only wait."""
    servers = [
        Server(f"{server.name}n{number}", server.gpus, (nic,))
        for server in topology.servers
        for number, nic in enumerate(server.nics)
    ]
    waiting = Server("w", 2, (Nic(0, Fraction(1), Fraction(1)),))
    return Topology((*servers, waiting), topology.latency_s)


def spelled_out(
    plan: Plan, topology: Topology, model: Model, chunk_bytes: int = WHOLE, faults: FaultPlan | None = None
) -> float:
    """The makespan of what the run-time does: one instruction a lane at a time, a send over when it is acknowledged.

    For servers of one GPU that all have the same number of NICs, and `faults` of which nobody learns.
    """
    n_nics = len(topology.servers[0].nics)
    here, there = n_nics * plan.n_ranks, n_nics * plan.n_ranks + 1
    graph, transfers = Graph(), plan.transfers
    # Messages of a channel, by channel, then in its order; their chunks in order. This is the order of ties.
    sends = np.flatnonzero(plan.out_channel >= 0)
    by_channel = sorted(
        sends.tolist(),
        key=lambda i: (
            plan.channels[plan.out_channel[i]].src,
            plan.channels[plan.out_channel[i]].dst,
            plan.out_channel[i],
            i,
        ),
    )
    turn_of = {}
    for lane in range(len(plan.lanes)):
        receives = [i for i in plan.lanes[lane].tolist() if plan.in_channel[i] >= 0]
        turn_of.update({int(plan.recv_transfer[i]): turn for turn, i in enumerate(receives)})
    chunks: dict[int, list[int]] = {}
    channel_last: dict[int, int] = {}
    previous_message: dict[int, int | None] = {}
    for channel, messages in groupby(by_channel, key=lambda i: int(plan.out_channel[i])):
        src, dst = plan.channels[channel].src, plan.channels[channel].dst
        rates = [min(a.out, b.in_) for a, b in zip(topology.servers[src].nics, topology.servers[dst].nics, strict=True)]
        stripes, number = Stripes.of([int(rate) for rate in rates]), 0
        last: dict[int, int] = {}
        for i in messages:
            t = int(plan.send_transfer[i])
            pieces = stripes.cut(int(transfers.bytes[t]), number, chunk_bytes)
            chunks[t] = []
            for begin, end in pieces:
                nic = stripes.turns[number % len(stripes.turns)]
                chunks[t].append(graph.add(n_nics * src + nic, n_nics * dst + nic, end - begin, turn_of[t]))
                if model == "fair" and nic in last:
                    # The chunks of one channel on one rail are a stream: they flow one after another.
                    graph.follow(chunks[t][-1], last[nic])
                last[nic] = chunks[t][-1]
                number += 1
            previous_message[t] = channel_last.get(channel)
            channel_last[channel] = t
    arrived = {t: graph.add(0, 0, 1) for t in chunks}
    acknowledged = {t: graph.add(there, here, 1) for t in chunks}
    granted = {t: graph.add(there, here, 1) for t in chunks}
    taken = {t: graph.add(0, 0, 1) for t in chunks}
    computed = {i: graph.add(0, 0, 1) for i in range(len(plan)) if plan.in_channel[i] < 0 and plan.out_channel[i] < 0}
    for t, own in chunks.items():
        before = previous_message[t]
        graph.wait(arrived[t], *own, arrived[before] if before is not None else None)
        graph.wait(acknowledged[t], arrived[t])
        for chunk in own:
            graph.wait(chunk, granted[t])

    def complete(i: int) -> int:
        if plan.out_channel[i] >= 0:
            return acknowledged[int(plan.send_transfer[i])]
        return taken[int(plan.recv_transfer[i])] if plan.in_channel[i] >= 0 else computed[i]

    for lane in range(len(plan.lanes)):
        order = plan.lanes[lane].tolist()
        receives = [i for i in order if plan.in_channel[i] >= 0]
        for turn, i in enumerate(receives):
            slots = plan.channels[plan.in_channel[i]].slots
            if turn >= slots:
                graph.wait(granted[int(plan.recv_transfer[i])], taken[int(plan.recv_transfer[receives[turn - slots]])])
        for position, i in enumerate(order):
            gates = [complete(j) for j in plan.after[i].tolist()]
            if position:
                gates.append(complete(order[position - 1]))
            if plan.in_channel[i] >= 0:
                t = int(plan.recv_transfer[i])
                graph.wait(taken[t], arrived[t], *gates)
                gates = [taken[t]]
            elif plan.out_channel[i] < 0:
                graph.wait(computed[i], *gates)
            if plan.out_channel[i] >= 0:
                for chunk in chunks[int(plan.send_transfer[i])]:
                    graph.wait(chunk, *gates)
    moved = [replace(each, server=n_nics * each.server + each.nic, nic=0) for each in faults or ()]
    return graph.seconds(apart(topology), model, FaultPlan(tuple(moved)))


# --- plans ------------------------------------------------------------------------------------------------------------

CASES = [
    ("ring", "4@1MB/s", 4),
    ("ring", "5@1MB/s,2=300kB/s:700kB/s,1=600kB/s", 2),
    ("bidirectional-ring", "5@1MB/s,2=400kB/s", 2),
    ("double-binary-tree", "6@1MB/s,5=700kB/s", 4),
    ("rabenseifner", "4@1MB/s,1=250kB/s", 2),
    ("optcc", "4@1MB/s,3=500kB/s", 8),
    ("r2ccl-allreduce", "4@1MB/s,3=500kB/s", 4),
    ("stragglar", "4@1MB/s,3=500kB/s", 4),
    ("optimal", "5@1MB/s,2=300kB/s:700kB/s,1=600kB/s", 4),
]


@cache
def library_plan(name: str, text: str, segments: int, size_bytes: int) -> tuple[Plan, Topology]:
    topology = Topology.parse(text)
    schedule = SCHEDULES[name].build(topology, segments)
    return compile_schedule(schedule, size_bytes=size_bytes, topology=topology), topology


@dataclass(frozen=True)
class Instance:
    """A random plan, and a topology of one GPU and `n_nics` NICs a server."""

    plan: Plan
    topology: Topology
    chunk_bytes: int


def draw(
    seed: int, latencies_us: Sequence[int] = (0, 0, 1, 50, 1000), tenths: Sequence[int] = range(1, 11)
) -> Instance:
    """Rates are `tenths` of 1 MB/s: with numbers that have a small common multiple, optcc.simulate rounds nothing, and
    ties are ties in both simulators."""
    rng = random.Random(seed)
    n_ranks, n_nics = rng.randint(2, 6), rng.randint(1, 3)
    mixed = rng.random() < 0.6

    def rate() -> Fraction:
        return Fraction(10**5 * rng.choice(tenths) if mixed else 10**6)

    servers = tuple(
        Server(f"h{index}", 1, tuple(Nic(number, rate(), rate()) for number in range(n_nics)))
        for index in range(n_ranks)
    )
    topology = Topology(servers, Fraction(rng.choice(latencies_us), 10**6))
    trees = Trees(
        *(rng.getrandbits(32), n_ranks, rng.randint(1, 4), rng.randint(1, 4)),
        *(rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.5),
    )
    name = rng.choice(("trees", "trees", "ring", "bidirectional-ring", "direct", "double-binary-tree", "optimal"))
    schedule = trees.build() if name == "trees" else SCHEDULES[name].build(topology, rng.choice((1, 2, 4)))
    plan = compile_schedule(
        schedule,
        size_bytes=4 * n_nics * rng.randint(100, 50_000),
        topology=rng.choice((topology, None)),
        slots=rng.choice((1, 2, 3, 128)),
        fused=rng.random() < 0.6,
        ports=rng.choice(("exclusive", "fifo")),
    )
    return Instance(plan, topology, rng.choice((WHOLE, WHOLE, 1000, 1 << 14)))


def leaves_nothing_out(instance: Instance) -> bool:
    """True if `predicted` says all that the run-time waits for under fair ports.

    A fused instruction keeps its lane, and the slot of the next one, until it has sent; a prediction only its sends.
    """
    is_fused = np.isin(instance.plan.kind, (RECV_REDUCE_SEND, RECV_COPY_SEND)).any()
    return not is_fused and instance.topology.latency_s == 0 and len(instance.topology.servers[0].nics) == 1


def check_exact(instance: Instance, model: Model) -> None:
    plan, topology, chunk_bytes = instance.plan, instance.topology, instance.chunk_bytes
    seconds = ran(plan, topology, model, chunk_bytes=chunk_bytes).seconds
    assert seconds == pytest.approx(spelled_out(plan, topology, model, chunk_bytes), rel=EXACT)
    if model == "fair" and leaves_nothing_out(instance):
        assert seconds == pytest.approx(predicted(plan, topology, model), rel=EXACT)


# --- without faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "segments", "model"), sampled([(*case, model) for case in CASES for model in MODELS], every=5)
)
def test_a_plan_of_the_library_takes_exactly_what_it_waits_for(
    name: str, text: str, segments: int, model: Model
) -> None:
    for size_bytes, latency_us in ((1920, 20), (400_000, 0), (400_000, 50)):
        plan, topology = library_plan(name, text, segments, size_bytes)
        timed = topology.with_latency(Fraction(latency_us, 10**6))
        check_exact(Instance(plan, timed, WHOLE), model)


def test_random_plans_take_exactly_what_they_wait_for(seed: int) -> None:
    for number in range(12):
        for model in MODELS:
            check_exact(draw(seed + number), model)


@pytest.mark.slow
def test_hundreds_of_random_plans_take_exactly_what_they_wait_for(seed: int) -> None:
    for number in range(40):
        for model in MODELS:
            check_exact(draw(seed + 1000 + number), model)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("overhead_s", [0.0, 0.003])
def test_nothing_is_left_out_of_a_prediction_for_a_ring_of_equals_without_latency(
    model: Model, overhead_s: float
) -> None:
    for n_ranks in (2, 3, 4, 7):
        plan, topology = library_plan("ring", f"{n_ranks}@1MB/s", 4, 4 * 60 * n_ranks * 28)
        seconds = ran(plan, topology, model, overhead_s=overhead_s).seconds
        assert seconds == pytest.approx(predicted(plan, topology, model, overhead_s), rel=EXACT)


@pytest.mark.parametrize("name", ["optcc", "double-binary-tree"])
def test_a_fifo_prediction_leaves_out_that_a_send_ends_when_it_is_taken(name: str) -> None:
    # A port that has sent a message goes on in the prediction; the run-time's lane first hears that it has arrived.
    topology = Topology.parse("4@1MB/s")
    schedule = SCHEDULES[name].build(topology, 8)
    plan = compile_schedule(schedule, size_bytes=4 * 840 * 40, topology=topology, ports="fifo")
    seconds, promised = ran(plan, topology, "fifo").seconds, predicted(plan, topology, "fifo")
    assert 1.1 * promised < seconds < 1.3 * promised


@pytest.mark.parametrize(("name", "text", "segments"), CASES)
def test_a_fair_prediction_leaves_out_two_latencies_a_message(name: str, text: str, segments: int) -> None:
    # The acknowledgement's, before the next message of a lane leaves: as an overhead they make up for it.
    plan, topology = library_plan(name, text, segments, 400_000)
    timed = topology.with_latency(Fraction(100, 10**6))
    seconds = ran(plan, timed, "fair").seconds
    assert seconds > predicted(plan, timed, "fair") * (1 + EXACT)
    assert seconds == pytest.approx(predicted(plan, timed, "fair", overhead_s=200e-6), rel=0.005)


def test_rounding_does_not_part_what_happens_at_one_instant() -> None:
    """Every moment of this run is a whole number of microseconds. A start that is 1e-17 s late moves its end by 4e-7 s:
    max-min fairness amplifies, so a clock whose ticks are not whole is off by 2e-7 of the time."""
    instance = draw(76_311_438)
    assert spelled_out(instance.plan, instance.topology, "fair", instance.chunk_bytes) == 0.08195
    check_exact(instance, "fair")


def test_nor_does_it_while_nics_stand_still() -> None:
    check_exact_with_faults(76_311_438, down=True)


# --- with faults ------------------------------------------------------------------------------------------------------


def draw_faults(seed: int, instance: Instance, *, down: bool) -> FaultPlan:
    """Up to four NICs that lose a share of their rate, or stand still for a while."""
    rng = random.Random(f"{seed} {down}")
    span_s = predicted(instance.plan, instance.topology, "fair")
    faults: list[Fault] = []
    for _ in range(rng.randint(1, 4)):
        server = rng.randrange(len(instance.topology.servers))
        nic = rng.randrange(len(instance.topology.servers[server].nics))
        at_s = Fraction(int(rng.random() * span_s * 1e6), 10**6)
        until_s = at_s + Fraction(rng.randint(1, int(span_s * 1e6) + 1), 10**6)
        if down:
            faults.append(Fault(server, nic, at_s, until_s))
        else:
            share, way = Fraction(rng.choice((1, 2)), 4), rng.choice(WAYS)
            faults.append(Fault(server, nic, at_s, rng.choice((None, until_s)), share, way))
    return FaultPlan(tuple(faults))


def check_exact_with_faults(seed: int, *, down: bool) -> int:
    """1 if times were compared: acknowledgements that wait for a NIC are not in `spelled_out`."""
    instance = draw(seed, latencies_us=(0, 0, 50), tenths=(5, 10, 20, 40))
    plan, topology, chunk_bytes = instance.plan, instance.topology, instance.chunk_bytes
    faults, compared = draw_faults(seed, instance, down=down), 0
    for model in MODELS:
        # Nobody learns of a NIC that stands still: it goes on where it was.
        detection_s = 1e9 if down else 0.0
        run = ran(plan, topology, model, chunk_bytes=chunk_bytes, faults=faults, detection_s=detection_s)
        if run.counts.waited == 0:
            compared += 1
            assert run.seconds == pytest.approx(spelled_out(plan, topology, model, chunk_bytes, faults), rel=EXACT)
        if model == "fair" and leaves_nothing_out(instance):
            promised = simulate(plan, topology, model=model, faults=faults, policy=Policy("wait")).seconds
            assert run.seconds == pytest.approx(promised, rel=EXACT)
    return compared


@pytest.mark.slow
@pytest.mark.parametrize("down", [False, True], ids=["degraded", "standing still"])
def test_nics_that_lose_rate_and_get_it_back_cost_exactly_what_is_predicted(seed: int, down: bool) -> None:
    compared = sum(check_exact_with_faults(seed + number, down=down) for number in range(10))
    assert compared > 10


@pytest.mark.slow
@pytest.mark.parametrize("down", [False, True], ids=["degraded", "standing still"])
def test_hundreds_of_faults_cost_exactly_what_is_predicted(seed: int, down: bool) -> None:
    compared = sum(check_exact_with_faults(seed + 1000 + number, down=down) for number in range(25))
    assert compared > 25


def servers_with(n_nics: int, n_ranks: int = 4) -> Topology:
    nics = tuple(Nic(number, Fraction(10**6), Fraction(10**6)) for number in range(n_nics))
    return Topology(tuple(Server(f"h{index}", 1, nics) for index in range(n_ranks)))


@pytest.mark.parametrize("n_nics", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 4))])
@pytest.mark.parametrize(
    ("name", "model", "tolerance"),
    [("ring", "fifo", 0.05), ("ring", "fair", 0.05), ("optimal", "fifo", 0.06), ("optcc", "fair", 0.06)],
)
def test_the_nics_that_are_left_share_the_load_as_predicted(
    name: str, model: Model, tolerance: float, n_nics: int
) -> None:
    # The chunk in service is sent again, and chunks are shared out whole; the prediction pools what is left to a byte.
    topology = servers_with(n_nics)
    schedule = SCHEDULES[name].build(topology, 4)
    plan = compile_schedule(schedule, size_bytes=4 * 840 * 40 * n_nics, topology=topology, ports="fifo")
    without_s = predicted(plan, topology, model)
    faults = FaultPlan((Fault(2, 1, Fraction(round(without_s / 3 * 10**6), 10**6)),))
    promised = simulate(plan, topology, model=model, faults=faults, policy=Policy("migrate")).seconds
    seconds = ran(plan, topology, model, chunk_bytes=1 << 10, faults=faults).seconds
    assert promised > 1.03 * without_s
    assert seconds == pytest.approx(promised, rel=tolerance)


@pytest.mark.parametrize("model", MODELS)
def test_the_only_nic_lost_and_repaired_costs_its_absence_and_what_is_sent_again(model: Model) -> None:
    topology = servers_with(1)
    plan = compile_schedule(SCHEDULES["ring"].build(topology, 4), size_bytes=4 * 840 * 40, topology=topology)
    message_s = int(plan.transfers.bytes.max()) / 10**6
    for at_ms in range(5, 195, 23):
        faults = FaultPlan((Fault(2, 0, Fraction(at_ms, 1000), Fraction(at_ms + 60, 1000)),))
        policy = Policy("migrate", unacknowledged_bytes=plan.size_bytes)
        promised = simulate(plan, topology, model=model, faults=faults, policy=policy).seconds
        seconds = ran(plan, topology, model, faults=faults).seconds
        # Both ends of both its channels send anew: at most one message later than if only its own port did.
        assert promised - EXACT <= seconds <= promised + message_s + EXACT
