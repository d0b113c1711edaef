"""Plans that change with the NICs: collectives in simulated time, whose NICs fail, collapse and come back."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from statistics import median

import numpy as np
import pytest

from optcc.errors import DeadlineExceeded, TopologyError
from optcc.faults import FaultPlan
from optcc.planner import Planner
from optcc.runtime.communicator import Communicator
from optcc.runtime.protocol.agreement import AHEAD, Shares
from optcc.runtime.replanning import PlanFor
from optcc.runtime.transports.loopback import run_ranks
from optcc.runtime.transports.sim import SimNetwork, SimTransport, run_sim
from optcc.topology import Nic, Server, Topology
from tests.unit.runtime.sim.fault_trial import Plans

RATE = 50_000_000
COUNT = 1 << 19


def cluster(n_hosts: int, n_nics: int = 2) -> Topology:
    nics = tuple(Nic(rail, Fraction(RATE), Fraction(RATE)) for rail in range(n_nics))
    return Topology(tuple(Server(f"h{number}", 1, nics) for number in range(n_hosts)), latency_s=Fraction(1, 20_000))


class Run:
    """AllReduces in a row; by rank the epoch of each, and at rank 0 when it began and how long it took."""

    def __init__(self, n_hosts: int, faults: str, n_runs: int, **settings: object) -> None:
        self.n_hosts, self.n_runs = n_hosts, n_runs
        self.delays = settings.pop("delays", [0] * n_hosts)
        self.is_persistent = settings.pop("is_persistent", False)
        self.epochs: list[list[int]] = [[] for _ in range(n_hosts)]
        self.began_s: list[float] = []
        self.took_s: list[float] = []
        self.names: list[str] = []
        self.shares: list[Shares] = []
        topology = cluster(n_hosts)
        self.schedule = str(settings.pop("schedule", "shares"))
        self.arrays = settings.pop("arrays", [np.full(COUNT, rank, np.float32) for rank in range(n_hosts)])
        self.results: list[list[bytes]] = [[] for _ in range(n_hosts)]
        self.planner = Planner(topology, schedules={"allreduce": self.schedule}, segments=8, ports="fair")
        network = SimNetwork(topology, nic_faults=FaultPlan.parse(faults), **settings)  # type: ignore[arg-type]
        self.plans = run_sim(network, self._body)

    def _body(self, rank: int, transport: SimTransport) -> Plans:
        assert isinstance(self.delays, list)
        plans = Plans(self.planner, self.delays[rank])
        comm = Communicator(transport, plans, clock=transport.clock, deadline_s=30.0)
        assert isinstance(self.arrays, list)
        array = self.arrays[rank]
        out = np.empty_like(array)
        step = comm.all_reduce_init(array, out=out) if self.is_persistent else None
        for _ in range(self.n_runs):
            began_s = transport.clock.now_s()
            out[:] = -1
            (comm.start_all_reduce(array, out=out) if step is None else step.start()).wait()
            self.results[rank].append(hashlib.sha256(out.tobytes()).digest())
            assert np.allclose(out, sum(self.arrays), atol=1e-5)
            self.epochs[rank].append(comm.epoch)
            if not rank:
                self.began_s.append(began_s)
                self.took_s.append(transport.clock.now_s() - began_s)
        comm.engine.barrier()
        return plans


@pytest.mark.parametrize("is_persistent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_plans_follow_a_nic_that_fails_and_comes_back(is_persistent: bool) -> None:
    run = Run(4, "1/1@0.3s..1.2s", 36, is_persistent=is_persistent)
    assert all(epochs == run.epochs[0] for epochs in run.epochs)
    assert run.epochs[0] == sorted(run.epochs[0]) and set(run.epochs[0]) == {0, 1, 2}
    first, last = run.epochs[0].index(1), run.epochs[0].index(2)
    healthy, degraded, healed = (median(run.took_s[at]) for at in (slice(6), slice(first, last), slice(last, None)))
    # Half of one host's rate is gone: a plan for equal hosts takes twice as long, the best one a third longer.
    assert max(run.took_s[first - 3 : first]) > 1.6 * healthy
    assert degraded < 1.45 * healthy and healed < 1.1 * healthy
    # What was under way when it failed, while that settled, and the collectives that hide the agreement.
    assert run.began_s[first] < 0.3 + 0.05 + (AHEAD + 2) * 2 * healthy
    assert run.began_s[last] < 1.2 + 0.5 + (AHEAD + 2) * 2 * healthy
    for plans in run.plans:
        (down, wanted), (whole, _) = plans.prepared
        assert down[1] == ((1.0, 1.0), (0.0, 0.0)) and down[0] == ((1.0, 1.0), (1.0, 1.0))
        assert whole == (((1.0, 1.0), (1.0, 1.0)),) * 4
        assert [each[0].name for each in wanted] == ["allreduce"] and wanted[0][1] == 4 * COUNT


@pytest.mark.slow
def test_sums_in_the_order_of_ranks_keep_their_bits_while_plans_change() -> None:
    """As fast as other plans, and the bits of adding one rank after the other before and after, where others differ."""
    rng = np.random.default_rng(5)
    arrays = list(rng.standard_normal((4, COUNT)).astype(np.float32))
    expected = hashlib.sha256((((arrays[0] + arrays[1]) + arrays[2]) + arrays[3]).tobytes()).digest()
    run = Run(4, "1/1@0.3s", 24, schedule="rank-order", arrays=arrays)
    assert run.results == [[expected] * 24] * 4
    first = run.epochs[0].index(1)
    assert median(run.took_s[first:]) < 1.45 * median(run.took_s[:6])
    other = Run(4, "1/1@0.3s", 24, arrays=arrays)
    assert len(set(other.results[0])) == 2 and other.results == [other.results[0]] * 4


@pytest.mark.battery(8)
def test_a_nic_that_flaps_does_not_make_plans_flap() -> None:
    faults = ", ".join(f"1/1@{at}ms..{at + 60}ms" for at in range(300, 3000, 200))
    run = Run(3, faults, 60)
    assert all(epochs == run.epochs[0] for epochs in run.epochs)
    n_flaps = 14
    assert 1 <= run.epochs[0][-1] < n_flaps


@pytest.mark.slow
def test_a_rank_whose_plans_take_long_delays_the_change_and_stops_nobody() -> None:
    run = Run(4, "1/1@0.3s", 24, delays=[0, 0, 60, 0])
    assert all(epochs == run.epochs[0] for epochs in run.epochs)
    quick = Run(4, "1/1@0.3s", 24)
    assert run.epochs[0][-1] == quick.epochs[0][-1] == 1
    assert run.epochs[0].index(1) >= quick.epochs[0].index(1)
    # It was asked every 5 ms of waiting, and the others began no more than they may.
    assert max(run.took_s) < max(quick.took_s) + 0.35


def test_collectives_in_flight_and_of_several_kinds_change_together() -> None:
    topology = cluster(3)
    planner = Planner(topology, schedules={"allreduce": "shares"}, segments=4, ports="fair")
    network = SimNetwork(topology, nic_faults=FaultPlan.parse("2/0@0.15s..0.6s"))

    def body(rank: int, transport: SimTransport) -> list[int]:
        comm = Communicator(transport, Plans(planner), clock=transport.clock, deadline_s=30.0)
        step = comm.all_reduce_init(np.full(3000, rank, np.int64))
        epochs: list[int] = []
        for turn in range(25):
            started = [
                comm.start_all_reduce(np.full(COUNT // 4, rank + turn, np.float32)),
                step.start(),
                comm.start_broadcast(np.full(5000, rank, np.int32), root=2),
                comm.start_all_reduce(np.full(COUNT // 2, rank, np.float32), "max"),
            ]
            epochs.append(comm.epoch)
            total, fixed, sent, largest = (each.result() for each in started)
            assert np.all(total == 3 + 3 * turn) and np.all(fixed == 3)
            assert np.all(sent == 2) and np.all(largest == 2)
        comm.engine.barrier()
        return epochs

    by_rank = run_sim(network, body)
    assert by_rank[0] == by_rank[1] == by_rank[2] and by_rank[0][-1] >= 1


def test_where_nothing_can_change_the_epoch_is_the_first() -> None:
    """A transport without epochs, and plans of a function that makes no others."""
    planner = Planner(Topology.parse("2@1GB/s"), schedules={"allreduce": "ring"})

    def body(rank: int, transport: object) -> int:
        comm = Communicator(transport, Plans(planner))  # type: ignore[arg-type]
        assert np.all(comm.all_reduce(np.full(10, rank, np.float32)) == 1)
        comm.engine.barrier()
        return comm.epoch

    assert run_ranks(2, body) == [0, 0]
    network = SimNetwork(cluster(2), nic_faults=FaultPlan.parse("1/1@20ms"))

    def fixed(rank: int, transport: SimTransport) -> int:
        comm = Communicator(transport, lambda *wanted: planner(*wanted), clock=transport.clock)
        for _ in range(6):
            assert np.all(comm.all_reduce(np.full(COUNT, rank, np.float32)) == 1)
        comm.engine.barrier()
        return comm.epoch

    assert run_sim(network, fixed) == [0, 0]


class NoPlans(Plans):
    def under(self, shares: Shares) -> PlanFor:
        raise TopologyError("no plan for what is left")


def test_where_there_is_no_plan_for_what_is_left_the_old_one_goes_on() -> None:
    planner = Planner(cluster(3), schedules={"allreduce": "shares"}, segments=4, ports="fair")
    network = SimNetwork(cluster(3), nic_faults=FaultPlan.parse("1/1@50ms"))

    def body(rank: int, transport: SimTransport) -> int:
        comm = Communicator(transport, NoPlans(planner), clock=transport.clock)
        for _ in range(12):
            assert np.all(comm.all_reduce(np.full(COUNT, rank, np.float32)) == 3)
        comm.engine.barrier()
        return comm.epoch

    assert run_sim(network, body) == [1, 1, 1]


@pytest.mark.battery(25)
def test_a_rank_that_never_has_its_plans_ends_the_wait_of_the_others() -> None:
    planner = Planner(cluster(3), schedules={"allreduce": "shares"}, segments=4, ports="fair")
    network = SimNetwork(cluster(3), nic_faults=FaultPlan.parse("1/1@50ms"))

    def body(rank: int, transport: SimTransport) -> None:
        plans = Plans(planner, 10**9 if rank == 1 else 0)
        comm = Communicator(transport, plans, clock=transport.clock, deadline_s=60.0 if rank == 1 else 2.0)
        for _ in range(30):
            comm.all_reduce(np.full(COUNT, rank, np.float32))

    with pytest.raises(DeadlineExceeded, match="in vain for others' plans"):
        run_sim(network, body)
