"""Policy `wait` in simulated time: hosts that lose their last rail and have one again within the deadline, or never."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from optcc.errors import AllRailsFailed, DeadlineExceeded, RankLost, RuntimeFault
from optcc.faults import FaultPlan
from optcc.plan import Channel
from optcc.runtime.engine import Engine
from optcc.runtime.executor import Executor
from optcc.runtime.point_to_point import Mail
from optcc.runtime.probe import probe
from optcc.runtime.sim.scenario import INFINITY, SwarmFault, make_scenario
from optcc.runtime.sim.swarm import Swarm
from optcc.runtime.transport import SENT
from optcc.runtime.transports import endpoint_transport
from optcc.runtime.transports.loopback import run_ranks
from optcc.runtime.transports.sim import SimNetwork, SimTransport, run_sim
from optcc.topology import Topology
from tests.unit.runtime.sim.fault_trial import FaultTrial
from tests.unit.runtime.transports.tcp_ranks import input_of, plan_of

SLOW = "4@1MB/s"
"""One NIC a host; a ring of 40 KB takes 60 ms."""
AT_S, BACK_S, STALL_S, DEADLINE_S = 0.04, 1.0, 0.3, 0.5
"""In the middle of it, and when the hosts are back; limits that are over by then."""
CUT, FOR_GOOD = "1/0@40ms..1s", "1/0@40ms"


@dataclass(frozen=True)
class Ended:
    """How an AllReduce ended at a rank: when, with which error or result; whether its input is as it was."""

    at_s: float
    error: RuntimeFault | None
    result: bytes
    is_intact: bool


def reduce_once(faults: str, partition_s: float) -> list[Ended]:
    plan, verdict = plan_of("ring", 10_001, "float32")

    def body(rank: int, transport: SimTransport) -> Ended:
        executor = Executor(plan, rank, transport, verdict, deadline_s=DEADLINE_S, clock=transport.clock)
        given, recv, error = input_of(plan, rank, 0), np.empty(plan.size_bytes // 4, np.float32), None
        try:
            executor.all_reduce(given, recv)
        except RuntimeFault as fault:
            error = fault
        return Ended(transport.clock.now_s(), error, recv.tobytes(), np.array_equal(given, input_of(plan, rank, 0)))

    network = SimNetwork(
        Topology.parse(SLOW), nic_faults=FaultPlan.parse(faults), stall_s=STALL_S, partition_s=partition_s
    )
    return run_sim(network, body)


@cache
def wanted() -> list[bytes]:
    plan, verdict = plan_of("ring", 10_001, "float32")

    def body(rank: int, transport: object) -> bytes:
        recv = np.empty(plan.size_bytes // 4, np.float32)
        Executor(plan, rank, transport, verdict).all_reduce(input_of(plan, rank, 0), recv)  # type: ignore[arg-type]
        return recv.tobytes()

    return run_ranks(4, body)


@cache
def failed() -> list[Ended]:
    """What `fail` makes of the same loss."""
    return reduce_once(FOR_GOOD, 0.0)


@pytest.mark.parametrize(
    "faults",
    [CUT, f"{CUT}:in", f"{CUT}:out", "1/0@40ms..1s, 2/0@45ms..800ms"],
    ids=["down", "hears nothing", "is not heard", "two hosts"],
)
def test_the_collective_stands_still_until_the_host_has_a_rail_and_is_exact(faults: str) -> None:
    ended = reduce_once(faults, 3.0)
    assert [each.error for each in ended] == [None] * 4 and [each.result for each in ended] == wanted()
    assert all(BACK_S < each.at_s < BACK_S + 0.9 and each.is_intact for each in ended)


def test_a_host_that_never_has_a_rail_again_is_the_error_of_fail_at_all_ranks_within_the_deadline() -> None:
    ended = reduce_once(FOR_GOOD, 2.0)
    for each, other in zip(ended, failed(), strict=True):
        assert isinstance(each.error, AllRailsFailed) and isinstance(other.error, AllRailsFailed)
        assert str(each.error) == str(other.error)
        named = each.error.culprits, each.error.nics
        assert named == (other.error.culprits, other.error.nics) == ((1,), ((1, "eth0"),))
        assert 1.0 < each.at_s - AT_S < 2.0 and each.is_intact
        assert STALL_S <= other.at_s - AT_S < STALL_S + 1.0 and other.is_intact


def test_two_hosts_that_never_have_a_rail_again_end_the_job_within_the_deadline() -> None:
    """One that is cut off cannot know of the other one; those that reach each other say the same."""
    ended = reduce_once(f"{FOR_GOOD}, 2/0@45ms", 2.0)
    errors = [each.error for each in ended]
    assert all(isinstance(error, AllRailsFailed) for error in errors)
    assert all(1.0 < each.at_s - AT_S < 2.0 and each.is_intact for each in ended)
    first, last = errors[0], errors[3]
    assert isinstance(first, AllRailsFailed) and isinstance(last, AllRailsFailed)
    assert str(first).removeprefix("rank 0: ") == str(last).removeprefix("rank 3: ") and first.nics == last.nics


def test_plans_change_once_a_host_is_back_that_was_cut_off_while_that_was_agreed_on() -> None:
    faults = [SwarmFault(0.03, "down", 1, 1, 0.9), SwarmFault(0.081, "down", 1, 0, 0.7)]
    agreed: list[tuple[int, bool]] = []

    class Watched(FaultTrial):
        def _body(self, rank: int, transport: SimTransport) -> None:
            agreement = transport.endpoint.epochs.agreement
            if not rank:
                look = lambda: agreed.append((agreement.epoch.number, agreement.may_propose))  # noqa: E731
                self.network.network.clock.after(0.6, look)
            super()._body(rank, transport)

    trial = Watched(faults, n_runs=5, n_hosts=3, stall_s=STALL_S, partition_s=3.0)
    assert agreed == [(0, False)], "the epoch is proposed, and not agreed on while rank 1 is cut off"
    run = trial.runs[trial.hit(1)]
    assert 0.7 < run.seconds < 1.5 and run.epoch == 0 and trial.runs[-1].epoch >= 1


def meet_at_a_barrier(transport: SimTransport) -> None:
    Engine(transport, clock=transport.clock).barrier(STALL_S)


def gather(transport: SimTransport) -> None:
    assert transport.allgather(bytes([transport.rank]), STALL_S) == [b"\0", b"\1", b"\2"]


def send_a_message(transport: SimTransport) -> None:
    engine = Engine(transport, clock=transport.clock)
    mail, view = Mail(engine, range(3), transport.rank, 0), np.full(1 << 15, transport.rank, np.uint8)
    if transport.rank == 0:
        mail.send(view, 1, 5, STALL_S).wait()
    elif transport.rank == 1:
        assert mail.receive(view, 0, 5, STALL_S).wait() and not view.any()


def wait_for_a_goal(transport: SimTransport) -> None:
    engine = Engine(transport, clock=transport.clock)
    mail, view = Mail(engine, range(3), transport.rank, 0), np.full(8, transport.rank, np.uint8)
    if transport.rank < 2:
        (mail.receive if transport.rank else mail.send)(view, 1 - transport.rank, 5, DEADLINE_S)
        # As a rank waits for others' plans, which no deadline of a run ends.
        if not engine.wait_for(_NoMessage(engine), STALL_S):
            raise DeadlineExceeded("a message is under way")


@dataclass(frozen=True)
class _NoMessage:
    engine: Engine

    @property
    def done(self) -> bool:
        return not self.engine._running


@pytest.mark.parametrize("call", [meet_at_a_barrier, gather, send_a_message, wait_for_a_goal])
def test_what_has_a_deadline_of_its_own_waits_for_the_host_too(call: Callable[[SimTransport], None]) -> None:
    def body(rank: int, transport: SimTransport) -> float:
        transport.barrier()
        transport.clock.sleep_s(AT_S + 0.01 - transport.clock.now_s())
        call(transport)
        return transport.clock.now_s()

    def network(partition_s: float) -> SimNetwork:
        return SimNetwork(Topology.parse("3@10MB/s"), nic_faults=FaultPlan.parse(CUT), partition_s=partition_s)

    assert BACK_S < run_sim(network(3.0), body)[1] < BACK_S + 0.9
    with pytest.raises((AllRailsFailed, DeadlineExceeded)):
        run_sim(network(0.0), body)


def test_a_host_that_is_cut_off_while_nics_are_measured_is_waited_for() -> None:
    network = SimNetwork(
        Topology.parse("2@5MB/s"), nic_faults=FaultPlan.parse("1/0@5ms..1s"), stall_s=STALL_S, partition_s=3.0
    )
    measured = run_sim(network, lambda _, transport: probe(transport, clock=transport.clock, deadline_s=0.5))
    assert network.now_s > BACK_S and min(measured[0].rates[0][0]) > 0


@pytest.mark.parametrize("partition_s", [4.0, 0.0])
def test_a_rank_that_leaves_waits_for_a_host_that_may_need_its_last_message(
    partition_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_transport, "LINGER_S", 0.5)

    def body(rank: int, transport: SimTransport) -> tuple[int, float]:
        (handle,) = transport.open([Channel(0, 1, 1)])
        view = np.full(64, 7 * (1 - rank), np.uint8)
        if rank:
            transport.post_recv(handle, view)
        transport.barrier()
        if not rank:
            # Rank 1 hears nothing any more, and no kernel says so: the message counts as sent.
            transport.clock.sleep_s(AT_S + 0.001 - transport.clock.now_s())
            transport.post_send(handle, view)
            assert transport.poll(0.01) == [(SENT, handle)]
            transport.close()
        else:
            while not transport.poll(1.0):
                pass
        return int(view.sum()), transport.clock.now_s()

    network = SimNetwork(
        Topology.parse("2@10MB/s"), nic_faults=FaultPlan.parse("1/0@40ms..2500ms:in"), partition_s=partition_s
    )
    if partition_s:
        (_, left_s), (total, _) = run_sim(network, body)
        assert total == 7 * 64 and left_s > 2.5
    else:
        with pytest.raises(RankLost, match="rank 0 is lost"):
            run_sim(network, body)


CUT_OFF_S = 3.0
"""What a host of the swarm is cut off for, instead of for good: no wait may last 4.8 s there."""
SEEDS = (53, 194)
MORE_SEEDS = (14, 26, 41, 70, 71, 73, 79, 157, 170, 237, 436, 511)


@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MORE_SEEDS)])
def test_no_promise_of_the_swarm_is_broken_where_hosts_are_cut_off_and_come_back(seed: int) -> None:
    """Everything is delivered right, and no rank gives up, though `fail` would have ended the job after a second."""
    scenario = make_scenario(seed)
    assert Swarm(scenario).cut_off
    faults = tuple(replace(each, for_s=min(each.for_s, CUT_OFF_S)) for each in scenario.faults)
    assert max(each.for_s for each in faults) < INFINITY
    settings = replace(scenario.settings, stall_s=1.0, partition_s=8.0)
    swarm = Swarm(replace(scenario, faults=faults, settings=settings))
    swarm.run()
    assert all(program.failure is None for program in swarm.programs)
    assert swarm.outcome().simulated_s > CUT_OFF_S
