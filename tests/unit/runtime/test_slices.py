"""Long collectives in slices, in simulated time: right to the bit, under new plans before they end, in any order."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from math import inf
from typing import Any

import numpy as np
import pytest

from optcc.errors import Cancelled, DeadlineExceeded, InputError
from optcc.plan import PlanRequest
from optcc.planner import Planner
from optcc.runtime.communicator import Communicator
from optcc.runtime.slices import SlicedRun
from optcc.runtime.transports.loopback import LoopbackNetwork
from optcc.runtime.transports.rank_threads import run_threads
from optcc.runtime.transports.sim import SimNetwork, SimTransport, run_sim
from optcc.topology import Nic, Server, Topology
from tests.unit.runtime.sim.fault_trial import Plans

RATE = 20_000_000
N_RANKS = 3
SLICE_S = 0.005
Body = Callable[[Communicator], object]


class Job:
    """A body at each rank, over simulated TCP; `at` has what happens to the network when, seconds."""

    def __init__(
        self,
        body: Body,
        at: dict[float, Callable[[SimNetwork], None]] | None = None,
        segments: int = 4,
        **settings: Any,
    ) -> None:
        nics = tuple(Nic(rail, Fraction(RATE), Fraction(RATE)) for rail in range(2))
        servers = tuple(Server(f"h{number}", 1, nics) for number in range(N_RANKS))
        topology = Topology(servers, latency_s=Fraction(1, 20_000))
        self.planner = Planner(topology, segments=4, schedules={"allreduce": "shares"}, ports="fair")
        self.network = SimNetwork(topology)
        for at_s, what in (at or {}).items():
            self.network.network.clock.after(at_s, partial(what, self.network))
        self.body, self.settings = body, {"slice_s": SLICE_S, "deadline_s": 30.0, **settings}
        run_sim(self.network, self._run)

    def _run(self, rank: int, transport: SimTransport) -> None:
        comm = Communicator(transport, Plans(self.planner), clock=transport.clock, **self.settings)
        self.body(comm)
        comm.barrier()


def total(count: int, dtype: str = "float32") -> np.ndarray:
    return sum(given(rank, count, dtype) for rank in range(N_RANKS))  # type: ignore[return-value]


def given(rank: int, count: int, dtype: str = "float32") -> np.ndarray:
    return (np.arange(count) % 97 * (rank + 1) - rank).astype(dtype)


def n_slices(comm: Communicator, count: int) -> int:
    """Of an AllReduce of as many float32."""
    handle = comm.start_all_reduce(given(comm.rank, count))
    assert handle.wait()
    return handle._count if isinstance(handle, SlicedRun) else 1


def test_what_is_long_runs_in_slices_and_what_is_short_does_not() -> None:
    def body(comm: Communicator) -> None:
        assert (n_slices(comm, 1 << 12), n_slices(comm, 1 << 18)) == (1, 7)

    Job(body)

    def never(comm: Communicator) -> None:
        assert n_slices(comm, 1 << 18) == 1

    Job(never, slice_s=inf)


@pytest.mark.parametrize("count", [1 << 17, 100_003])
def test_every_collective_of_each_element_is_right(count: int) -> None:
    def body(comm: Communicator) -> None:
        own, wanted = given(comm.rank, count), total(count)
        assert np.array_equal(comm.all_reduce(own), wanted)
        assert np.array_equal(own, given(comm.rank, count))
        shaped = own[: count // 2 * 2].reshape(2, -1).copy()
        assert comm.all_reduce(shaped, out=shaped) is shaped
        assert np.array_equal(shaped.reshape(-1), wanted[: shaped.size])
        reduced = comm.reduce(own, root=1)
        assert (reduced is None) if comm.rank != 1 else np.array_equal(reduced, wanted)
        assert np.array_equal(comm.broadcast(own, root=2), given(2, count))
        average = comm.all_reduce(given(comm.rank, count, "float64"), "avg")
        assert np.array_equal(average, total(count, "float64") / N_RANKS)

    Job(body)


def test_a_persistent_collective_runs_again_and_again() -> None:
    count = 100_003

    def body(comm: Communicator) -> None:
        array, out = np.empty(count, np.float32), np.empty(count, np.float32)
        made = comm.all_reduce_init(array, out=out)
        for factor in (1, 2, 3):
            array[:] = given(comm.rank, count) * factor
            handle = made.start()
            assert isinstance(handle, SlicedRun)
            assert handle.result() is out
            assert np.array_equal(out, total(count) * factor)
        made.close()

    Job(body)


def down(network: SimNetwork) -> None:
    network.network.set_link(network.network.nics[1, 1], False)


def lose_nic(*, is_persistent: bool = False, megabytes: int = 4, lost_s: float = 0.22, **settings: Any) -> int:
    """The epoch after an AllReduce during which a NIC is lost."""
    count, epochs = megabytes << 18, [0] * N_RANKS

    def body(comm: Communicator) -> None:
        array = given(comm.rank, count)
        made = comm.all_reduce_init(array) if is_persistent else None
        # Both arms begin with their plans at hand.
        assert np.array_equal(comm.all_reduce(array), total(count))
        result = made.start().result() if made is not None else comm.all_reduce(array)
        assert np.array_equal(result, total(count))
        epochs[comm.rank] = comm.epoch

    Job(body, {lost_s: down}, **settings)
    assert len(set(epochs)) == 1
    return epochs[0]


@pytest.mark.parametrize("is_persistent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_plans_change_within_a_collective_when_a_nic_is_lost(is_persistent: bool) -> None:
    assert lose_nic(is_persistent=is_persistent) == 1
    assert lose_nic(is_persistent=is_persistent, slice_s=inf) == 0


def test_slices_are_begun_before_anything_else() -> None:
    """Ranks wait for their collectives and messages in different orders."""
    count = 1 << 17

    def body(comm: Communicator) -> None:
        rank = comm.rank
        first, second = given(rank, count), given(rank, count) * 2
        note = np.array([float(rank)])
        long, other = comm.start_all_reduce(first), comm.start_all_reduce(second)
        if rank == 0:
            comm.recv(note, source=1)
        handles = [long, other] if rank else [other, long]
        assert all(handle.wait() for handle in handles)
        if rank == 1:
            comm.send(note, dest=0)
        assert np.array_equal(long.result(), total(count))
        assert np.array_equal(other.result(), total(count) * 2)
        last = comm.start_all_reduce(first)
        comm.barrier()
        assert np.array_equal(last.result(), total(count))

    Job(body)


def test_a_program_that_only_tests_comes_to_the_end() -> None:
    def body(comm: Communicator) -> None:
        handle = comm.start_all_reduce(given(comm.rank, 1 << 17))
        while not handle.test():
            comm.whole_engine.transport.clock.sleep_s(1e-3)  # type: ignore[attr-defined]
        assert np.array_equal(handle.result(), total(1 << 17))

    Job(body)


def test_all_slices_together_have_the_deadline() -> None:
    def body(comm: Communicator) -> None:
        comm.all_reduce(given(comm.rank, 1 << 18))

    with pytest.raises(DeadlineExceeded):
        Job(body, deadline_s=0.03)


def test_cancel_ends_it_at_all_ranks() -> None:
    def body(comm: Communicator) -> None:
        handle = comm.start_all_reduce(given(comm.rank, 1 << 18))
        if comm.rank == 1:
            handle.cancel("enough")
        handle.wait()

    with pytest.raises(Cancelled, match="enough"):
        Job(body)


def test_arrays_that_do_not_fit_are_refused_as_ever() -> None:
    def body(comm: Communicator) -> None:
        array = np.zeros(1 << 18, np.float32)
        with pytest.raises(InputError, match="must"):
            comm.all_reduce(array, out=np.zeros((1 << 18) - 5, np.float32))
        with pytest.raises(InputError, match="overlap"):
            comm.all_reduce(array[: 1 << 17], out=array[1 << 16 : 3 << 16])
        with pytest.raises(InputError, match="contiguous"):
            comm.all_reduce(array[::2])

    Job(body)


def test_slices_of_no_time_are_refused() -> None:
    with pytest.raises(InputError, match=r"slice_s 0: must be above zero"):
        Job(lambda comm: None, slice_s=0)


def test_two_communicators_may_be_waited_for_in_opposite_orders() -> None:
    """Slices of one are begun while the other is waited for, those that need a plan of their own included."""
    count = 100_003
    topology = Topology.parse(f"{N_RANKS}@1GB/s")
    planner = Planner(topology, segments=4, schedules={"allreduce": "shares"})
    with LoopbackNetwork(None, N_RANKS) as one, LoopbackNetwork(None, N_RANKS) as other:

        def body(rank: int) -> None:
            comms = [Communicator(network.transport(rank), planner, deadline_s=20.0) for network in (one, other)]
            for comm in comms:
                # Here plans never change, so that nothing would run in slices.
                comm._slice_s = 2 * count * 4 / 1e9 / 6
            handles = [comm.start_all_reduce(given(rank, count)) for comm in comms]
            assert all(isinstance(each, SlicedRun) for each in handles)
            for each in handles if rank else handles[::-1]:
                assert np.array_equal(each.result(), total(count))
            for comm in comms:
                comm.barrier()

        def abort(rank: int, cause: str) -> None:
            for network in (one, other):
                network.abort(rank, cause)

        run_threads(N_RANKS, body, abort)


def test_a_planner_estimates_the_same_collective_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PlanRequest] = []
    estimate = Plans.least_s

    def least_s(plans: Plans, request: PlanRequest) -> float:
        asked.append(request)
        return estimate(plans, request)

    monkeypatch.setattr(Plans, "least_s", least_s)

    def body(comm: Communicator) -> None:
        for _ in range(3):
            comm.all_reduce(given(comm.rank, 1 << 12))

    Job(body)
    assert len(asked) == N_RANKS
