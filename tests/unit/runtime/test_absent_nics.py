"""NICs that carry nothing when a job starts, and come back: in simulated time, around the classes that TCP runs."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

from optcc.collective import Collective
from optcc.plan import PlanRequest
from optcc.planner import Planner
from optcc.runtime.communicator import Communicator
from optcc.runtime.probe import probe
from optcc.runtime.transports.sim import SimNetwork, SimTransport, run_sim
from optcc.topology import Nic, Server, Topology
from tests.unit.runtime.sim.fault_trial import Plans

RATE, COUNT = 20_000_000, 1 << 20
REQUEST = PlanRequest(Collective("allreduce", 3), 4 * COUNT, "float32", "sum")
BACK_S, END_S = 2.0, 4.5


class Run(NamedTuple):
    """An AllReduce of 4 MiB: when it began, how long it took, under which epoch; and the share of NIC 1 of rank 1 that
    plans are for, if they have changed."""

    began_s: float
    took_s: float
    epoch: int
    share: tuple[float, float] | None


def nics(count: int) -> tuple[Nic, ...]:
    return tuple(Nic(rail, Fraction(RATE), Fraction(RATE)) for rail in range(count))


def least_s(n_lost: int) -> float:
    """T* of three hosts of two NICs, of which one lacks so many."""
    servers = [Server(f"h{host}", 1, nics(2 - n_lost * (host == 1))) for host in range(3)]
    return Planner(Topology(tuple(servers))).least_s(REQUEST)


def run_job(network: SimNetwork) -> tuple[list[Run], tuple[tuple[int, int], ...]]:
    """AllReduces of three ranks in a row, whose NICs are measured first, as `optcc.init` does; and the rates of NIC 1
    of each, as they were taken to be."""
    runs: list[Run] = []

    def program(rank: int, transport: SimTransport) -> tuple[tuple[int, int], ...]:
        measured = probe(transport, clock=transport.clock)
        transport.set_rates(measured.usable)
        transport.start_from(measured.shares)
        planner = Planner(measured.topology(), schedules={"allreduce": "shares"}, segments=32, ports="fair")
        comm = Communicator(transport, Plans(planner, 0), clock=transport.clock, deadline_s=60.0, remeasures=True)
        array, out, is_over = np.full(COUNT, rank, np.float32), np.empty(COUNT, np.float32), np.zeros(1)
        while not is_over[0]:
            out[:] = -1
            began_s = transport.clock.now_s()
            comm.all_reduce(array, out=out)
            assert np.all(out == 3)
            if not rank:
                share = comm._replanning.shares[1][1] if comm.epoch else None
                runs.append(Run(began_s, transport.clock.now_s() - began_s, comm.epoch, share))
                is_over[0] = transport.clock.now_s() > END_S
            comm.broadcast(is_over, root=0)
        comm.barrier()
        return tuple(nics[1][3:5] for nics in transport.nics)

    return runs, run_sim(network, program)[0]


def absent(cause: str, share: float = 1.0) -> SimNetwork:
    """Three hosts of two NICs; NIC 1 of host 1 comes back at `BACK_S`, if it does, with such a share of its rate."""
    network = SimNetwork(Topology(tuple(Server(f"h{number}", 1, nics(2)) for number in range(3))))
    world = network.network
    nic = world.nics[1, 1]
    nic.out_rate, nic.in_rate = RATE * share, RATE * share
    if cause == "silent":
        world.clock.after(0.0, partial(world.set_open, nic, out=False, in_=False))
        world.clock.after(BACK_S, partial(world.set_open, nic, out=True, in_=True))
    else:
        world.clock.after(0.0, partial(world.set_link, nic, False))
    if cause == "down":
        world.clock.after(BACK_S, partial(world.set_link, nic, True))
    return network


@pytest.mark.parametrize("cause", ["down", pytest.param("silent", marks=pytest.mark.slow)])
def test_a_nic_that_is_absent_at_the_start_is_used_half_a_second_after_it_is_back(cause: str) -> None:
    runs, rates = run_job(absent(cause))
    assert rates[1] == pytest.approx((RATE, RATE), rel=0.05), "as the others of its rail"
    before = [run for run in runs if run.began_s + run.took_s < BACK_S]
    assert len(before) > 4 and {run.epoch for run in before} == {0}, "plans are for what is there from the first run on"
    assert max(run.took_s for run in before) < 1.2 * least_s(1)
    after = [run for run in runs if run.began_s > BACK_S + (0.5 if cause == "down" else 1.0)]
    assert len(after) > 8 and min(run.epoch for run in after) >= 1
    assert np.median([run.took_s for run in after]) < 1.1 * least_s(0)


@pytest.mark.slow
def test_what_is_back_is_measured_before_plans_are_for_it() -> None:
    runs, rates = run_job(absent("down", 0.5))
    assert rates[1] == pytest.approx((RATE, RATE), rel=0.05)
    (share,) = {run.share for run in runs if run.epoch}
    assert share == pytest.approx((0.5, 0.5), rel=0.05)


@pytest.mark.slow
def test_plans_do_not_change_for_a_nic_that_stays_away() -> None:
    runs, _ = run_job(absent("for good"))
    assert {run.epoch for run in runs} == {0}
    assert max(run.took_s for run in runs) < 1.2 * least_s(1)
