"""NICs that are measured again in a running job: in simulated time, around the classes that TCP runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import pairwise
from math import inf
from statistics import median
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import pytest

from optcc.collective import Collective
from optcc.errors import InputError, RankLost
from optcc.plan import Plan, PlanRequest
from optcc.planner import Planner
from optcc.runtime import communicator, remeasuring
from optcc.runtime.communicator import Communicator
from optcc.runtime.engine import Engine
from optcc.runtime.guesses import Guesses
from optcc.runtime.handle import Handle
from optcc.runtime.persistent_plan import PersistentPlan
from optcc.runtime.probe import MeasuredNics
from optcc.runtime.probe import probe as measure
from optcc.runtime.protocol.agreement import Share, Shares
from optcc.runtime.protocol.epochs import HOPE_PAUSES, PAUSE_S
from optcc.runtime.protocol.rates import DOUBTED_SHARE, Rates
from optcc.runtime.protocol.readmission import Readmissions
from optcc.runtime.remeasuring import LEAST_S, Remeasuring, healed_shares
from optcc.runtime.run_times import KNOWN_RUNS, RunTimes
from optcc.runtime.slow_nics import RemeasuredTransport
from optcc.runtime.transports.loopback import LoopbackNetwork
from optcc.runtime.transports.sim import SimNetwork, SimTransport, run_sim
from optcc.topology import Nic, Server, Topology
from optcc.verify.bounds.certified import certified_bound, explain_if_pooled
from tests.unit.runtime.sim.fault_trial import Plans

RATE = 20_000_000
COUNT = 1 << 18
"""Elements: an AllReduce of 1 MiB takes 35 ms at least between three hosts of two NICs."""
STORM_S = 12.0
Change = tuple[float, int, int, float, float]
"""When a NIC of a rank, by number, carries such shares of its rate, out and in."""


class Job:
    """AllReduces in a row, some time apart, while rates change; and a message that is waited for all the time. NIC 1 of
    rank 1 goes down at `down_s` until `up_s`, and is silent between the two times `silent_s`. Where hosts have several
    GPUs, a rank each, their `n_nics` belong to these.

    By run: when it began, how long it took, and what plans were for; by rank, its epochs.
    """

    def __init__(
        self,
        changes: list[Change],
        n_runs: int,
        *,
        n_hosts: int = 3,
        pause_s: float = 0.0,
        message_bytes: int = 0,
        plan_delay: int = 0,
        down_s: float | None = None,
        up_s: float | None = None,
        gpus: int = 1,
        n_nics: int = 2,
        schedule: str = "shares",
        count: int = COUNT,
        silent_s: tuple[float, float] | None = None,
    ) -> None:
        self.n_hosts, self.n_runs, self.pause_s, self.message_bytes = n_hosts, n_runs, pause_s, message_bytes
        self.count = count
        nics = tuple(Nic(rail, Fraction(RATE), Fraction(RATE)) for rail in range(n_nics))
        servers = tuple(Server(f"h{number}", gpus, nics, fabric=4 * Fraction(RATE)) for number in range(n_hosts))
        topology = Topology(servers, latency_s=Fraction(1, 20_000))
        self.planner = (
            Planner(topology, schedules={"allreduce": "shares"}, segments=8, ports="fair")
            if gpus == 1 and schedule == "shares"
            else Planner(
                topology if gpus == 1 else topology.with_own_nics(),
                schedules={"allreduce": schedule},
                ports="fair",
                by_rail=True,
            )
        )
        self.n_ranks = n_hosts * gpus
        self.network = SimNetwork(self.planner.topology)
        for at_s, rank, nic, out, in_ in changes:
            self.network.network.clock.after(at_s, self._change(rank, nic, out, in_))
        network = self.network.network
        for at_s, is_open in zip(silent_s or (), (False, True), strict=False):
            network.clock.after(at_s, partial(network.set_open, network.nics[1, 1], out=is_open, in_=is_open))
        for down_or_up_s, is_up in ((down_s, False), (up_s, True)):
            if down_or_up_s is not None:
                network.clock.after(down_or_up_s, partial(network.set_link, network.nics[1, 1], is_up))
        self.plans = [Plans(self.planner, plan_delay) for _ in range(self.n_ranks)]
        self.began_s: list[float] = []
        self.took_s: list[float] = []
        self.shares: list[Shares | None] = []
        self.epochs: list[list[int]] = [[] for _ in range(self.n_ranks)]
        run_sim(self.network, self._body)

    def _change(self, rank: int, nic: int, out: float, in_: float) -> Callable[[], None]:
        def change() -> None:
            changed = self.network.network.nics[rank, nic]
            changed.out_rate, changed.in_rate = RATE * out, RATE * in_

        return change

    def _body(self, rank: int, transport: SimTransport) -> None:
        if self.n_ranks > self.n_hosts:
            transport.keep_to_own_nics()
        comm = Communicator(transport, self.plans[rank], clock=transport.clock, deadline_s=300.0, remeasures=True)
        array, out = np.full(self.count, rank, np.float32), np.empty(self.count, np.float32)
        note, page = np.zeros(3), np.zeros(self.message_bytes, np.uint8)
        coming = comm.start_recv(note, source=1) if rank == 2 else None
        for _ in range(self.n_runs):
            began_s = transport.clock.now_s()
            out[:] = -1
            sent = comm.start_send(page, dest=2, tag=1) if rank == 1 and self.message_bytes else None
            came = comm.start_recv(page, source=1, tag=1) if rank == 2 and self.message_bytes else None
            comm.all_reduce(array, out=out)
            for each in (sent, came):
                assert each is None or each.wait(5.0)
            assert np.all(out == sum(range(self.n_ranks)))
            self.epochs[rank].append(comm.epoch)
            if not rank:
                self.began_s.append(began_s)
                self.took_s.append(transport.clock.now_s() - began_s)
                self.shares.append(comm._replanning.shares if comm.epoch else None)
            if self.pause_s:
                transport.clock.sleep_s(self.pause_s)
        if rank == 1:
            comm.send(np.arange(3.0), dest=2)
        if coming is not None:
            assert coming.result().tolist() == [0, 1, 2]
        comm.barrier()


def check_slow_nic(out: float, in_: float) -> None:
    job = Job([(0.45, 1, 1, out, in_)], 26)
    assert all(epochs == job.epochs[0] for epochs in job.epochs)
    shares = job.shares[-1]
    assert shares is not None
    for rank, nics in enumerate(shares):
        for nic, share in enumerate(nics):
            assert share == pytest.approx((out, in_) if (rank, nic) == (1, 1) else (1.0, 1.0), rel=0.04)
    changed = next(number for number, at_s in enumerate(job.began_s) if at_s > 0.45)
    planned = job.epochs[0].index(1)
    # Some slow runs, and those that may begin while the ranks agree; then the NICs are measured. Plans follow.
    assert planned - changed <= 8
    slow_s, planned_s = min(job.took_s[changed : planned - 1] or [inf]), median(job.took_s[planned + 1 :])
    wanted = [[each for each, _ in plans.prepared] for plans in job.plans]
    assert wanted == [[job.shares[-1]]] * job.n_hosts
    assert slow_s > 1.3 * median(job.took_s[1:changed]) and planned_s < 0.9 * slow_s


def note_measuring(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When rank 0 has measured NICs."""
    measured_s: list[float] = []

    def probe(transport: SimTransport, **options: Any) -> MeasuredNics:
        if not transport.rank:
            measured_s.append(transport.clock.now_s())
        return measure(transport, **options)

    monkeypatch.setattr(remeasuring, "probe", probe)
    return measured_s


class Paused(Job):
    """Long after NICs were measured in vain, they are not to be measured again."""

    def _body(self, rank: int, transport: SimTransport) -> None:
        transport._endpoint.epochs._paused_to_s = 100.0
        super()._body(rank, transport)


@pytest.mark.slow
def test_the_traffic_is_asked_though_nics_were_measured_in_vain_before(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_s = note_measuring(monkeypatch)
    job = Paused([(1.75, 1, 1, 0.5, 0.5)], 14, n_hosts=4, count=1 << 20, schedule="auto")
    shares = job.shares[-1]
    assert shares is not None and shares[1][1] == pytest.approx((0.5, 0.5), rel=0.08) and not measured_s


def test_a_run_that_waited_for_a_late_rank_has_no_nic_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_s, n_calls, reduce = note_measuring(monkeypatch), [0], Communicator.all_reduce

    def reduce_late(comm: Communicator, *arguments: Any, **options: Any) -> Any:
        n_calls[0] += comm.rank == 1
        if comm.rank == 1 and n_calls[0] == 9:
            comm.whole_engine.clock.sleep_s(0.3)
        return reduce(comm, *arguments, **options)

    monkeypatch.setattr(Communicator, "all_reduce", reduce_late)
    job = Job([], 14, n_hosts=4, count=1 << 20, schedule="auto")
    assert [seconds > 0.4 for seconds in job.took_s] == [number == 8 for number in range(14)]
    assert all(epochs == job.epochs[0] for epochs in job.epochs) and job.epochs[0][-1] == 1 and not measured_s


@pytest.mark.parametrize(
    "falls_s", [(1.68,), pytest.param((1.62, 1.75), marks=pytest.mark.slow)], ids=["in a run", "in other runs"]
)
def test_a_nic_that_its_traffic_names_is_planned_for_without_a_pause(falls_s: tuple[float, ...]) -> None:
    """Whenever in a run it falls: that one tells enough, or the next one, which need not be over. Where traffic is not
    clear, all wait."""
    n_paused = 0
    for at_s in falls_s:
        job = Job([(at_s, 1, 1, 0.5, 0.5)], 16, n_hosts=4, count=1 << 20, schedule="auto")
        shares = job.shares[-1]
        assert shares is not None and all(epochs == job.epochs[0] for epochs in job.epochs)
        assert shares[1][1] == pytest.approx((0.5, 0.5), rel=0.08)
        assert shares == (((1.0, 1.0),) * 2, ((1.0, 1.0), shares[1][1]), *[((1.0, 1.0),) * 2] * 2)
        fell = max(number for number, began_s in enumerate(job.began_s) if began_s < at_s)
        planned, after_s = job.epochs[0].index(1), median(job.took_s[-3:])
        # Under the plans of before a run would take twice as long as when all was well.
        assert fell + 1 <= planned <= fell + 2 and after_s < 1.5 * median(job.took_s[1:fell])
        n_paused += job.took_s[planned] > 1.15 * after_s
    assert n_paused <= len(falls_s) // 2


def test_plans_are_for_the_rates_that_a_nic_has_since_it_became_slow() -> None:
    check_slow_nic(0.5, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("out", "in_"), [(0.5, 1.0), (1.0, 0.5), (0.2, 0.3)])
def test_plans_are_for_the_rates_out_and_in(out: float, in_: float) -> None:
    check_slow_nic(out, in_)


@pytest.mark.slow
def test_a_nic_a_little_slower_than_declared_is_not_measured_again_and_again() -> None:
    """It is measured with another one, which is at half: the traffic does not take it for as fast as declared then."""
    job = Job([(2.5, 1, 1, 0.5, 0.5), (2.5, 2, 0, 0.86, 0.86)], 60, pause_s=0.2)
    assert all(epochs == job.epochs[0] for epochs in job.epochs)
    assert job.epochs[0][-1] == 1 and job.shares[-1] is not None
    assert job.shares[-1][2][0] == pytest.approx((0.86, 0.86), rel=0.04)


@pytest.mark.slow
def test_many_ranks_do_not_wait_for_plans_for_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank asks some hundred times whether they are there, and runs go on under the plans of before."""
    monkeypatch.setattr(communicator, "GOES_ON_RANKS", 3)
    quick, slow = (Job([(0.45, 1, 1, 0.5, 0.5)], 60, plan_delay=delay) for delay in (0, 250))
    first, planned = (slow.epochs[0].index(epoch) for epoch in (1, 2))
    assert slow.epochs[0][-1] == 2 and slow.shares[-1] == quick.shares[-1]
    assert planned - first > 3 + quick.epochs[0].index(2) - quick.epochs[0].index(1)
    # But for the one in which it was measured.
    assert max(slow.took_s[first + 1 : planned + 1]) < 1.2 * median(quick.took_s[:8]) / 0.5
    assert median(slow.took_s[planned + 1 :]) == pytest.approx(
        median(quick.took_s[quick.epochs[0].index(2) + 1 :]), rel=0.1
    )


def test_messages_that_arrive_while_nics_are_measured_are_not_lost() -> None:
    job = Job([(0.45, 1, 1, 0.5, 0.5)], 26, message_bytes=1 << 19)
    assert job.epochs[0][-1] >= 1


@pytest.mark.slow
@pytest.mark.parametrize(("out", "in_"), [(0.01, 0.01), (0.01, 1.0), (1.0, 0.01)])
def test_a_nic_that_collapses_costs_no_more_than_one_that_is_down(out: float, in_: float) -> None:
    """It is silent, heard again, tried again and again beside the runs, and left alone."""
    collapsed, down = (Job([(0.45, 1, 1, out, in_)], 80, schedule="auto", down_s=at_s) for at_s in (None, 0.45))
    assert all(epochs == collapsed.epochs[0] for epochs in collapsed.epochs) and collapsed.epochs[0][-1] <= 2
    whole = ((1.0, 1.0),) * 2
    assert collapsed.shares[-1] == down.shares[-1] == (whole, ((1.0, 1.0), (0.0, 0.0)), whole)
    assert median(collapsed.took_s[-60:]) < 1.02 * median(down.took_s[-60:])
    # In the run in which it falls, what is on its way there must come, or be found to be lost.
    fell = max(number for number, began_s in enumerate(collapsed.began_s) if began_s < 0.45)
    all_s, least_s = (sum(job.took_s) - job.took_s[fell] for job in (collapsed, down))
    assert all_s < 1.1 * least_s


@pytest.mark.slow
def test_a_nic_of_which_a_trial_finds_too_much_is_measured_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """It carries less than a twelfth, and more than a trial tells from that."""
    measured_s = note_measuring(monkeypatch)
    job = Job([(0.45, 1, 1, 0.06, 0.06), (30.0, 1, 1, 1.0, 1.0)], 50, schedule="auto", pause_s=1.0)
    lost = [shares is not None and shares[1][1] == (0.0, 0.0) for shares in job.shares]
    assert all(is_lost for is_lost, at_s in zip(lost, job.began_s, strict=True) if 8.0 < at_s < 30.0)
    pauses = [later - sooner for sooner, later in pairwise(measured_s)]
    assert pauses and all(each > HOPE_PAUSES * PAUSE_S * 2**number for number, each in enumerate(pauses))
    assert job.shares[-1] == (((1.0, 1.0),) * 2,) * 3


def storm(seed: int, *, only_losses: bool) -> list[Change]:
    """Until `STORM_S` NIC 1 of each of three ranks collapses to a hundredth again and again, or falls to a part unless
    there are `only_losses`; then all are healed."""
    rng, changes = random.Random(seed), list[Change]()
    for rank in range(3):
        at_s = rng.uniform(0.3, 1.5)
        while at_s < STORM_S:
            lasting_s = rng.uniform(0.2, 1.5)
            share = 0.01 if only_losses or rng.random() < 0.5 else rng.uniform(0.2, 0.7)
            changes += [(at_s, rank, 1, share, share), (min(STORM_S, at_s + lasting_s), rank, 1, 1.0, 1.0)]
            at_s += lasting_s + rng.uniform(0.3, 2.5)
    return changes


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "only_losses"), [(1, True), (4, True), (2, False)])
def test_runs_are_soon_as_fast_as_before_once_a_storm_of_losses_is_over(seed: int, only_losses: bool) -> None:
    """What NICs of several ranks have done before has each of them believed, and tried, late; less so while that costs
    half of the time. With the first seed it takes too long if patience does not count that, with the second if the
    pause before a trial does not, with the third if a NIC of two rates is not believed for a digit that was rounded."""
    job = Job(storm(seed, only_losses=only_losses), 260)
    ends = [began_s + took_s for began_s, took_s in zip(job.began_s, job.took_s, strict=True)]
    usual_s = median(job.took_s[2:7])
    quick = [at_s for at_s, took_s in zip(ends, job.took_s, strict=True) if at_s > STORM_S and took_s < 1.06 * usual_s]
    assert STORM_S < quick[0] < STORM_S + 4.5
    assert len(quick) > 0.9 * sum(at_s >= quick[0] for at_s in ends)


@pytest.mark.slow
def test_a_nic_that_is_out_of_use_is_not_measured_with_the_others() -> None:
    """It has connections, and what is sent there would take long."""
    job = Job([(0.45, 1, 1, 0.01, 0.01), (3.0, 2, 0, 0.5, 0.5)], 80, schedule="auto")
    shares = job.shares[-1]
    assert shares is not None and shares[1][1] == (0.0, 0.0) and shares[2][0] == pytest.approx((0.5, 0.5), rel=0.08)
    assert max(seconds for seconds, at_s in zip(job.took_s, job.began_s, strict=True) if at_s > 2.0) < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("out", [0.01, 1.0])
def test_a_nic_that_had_collapsed_is_soon_used_again(out: float) -> None:
    """It is tried once a second, measured, and counts once that has been so for its patience."""
    job = Job([(0.45, 1, 1, out, 0.01), (4.0, 1, 1, 1.0, 1.0)], 110, schedule="auto")
    used = next(number for number, shares in enumerate(job.shares) if number > 20 and shares and shares[1][1] == (1, 1))
    assert 4.0 < job.began_s[used] < 6.0 and job.epochs[0][-1] <= 3
    assert median(job.took_s[used + 1 :]) < 1.05 * median(job.took_s[:8])


def test_a_nic_that_was_silent_is_tried_and_measured_before_it_is_used_again() -> None:
    job = Job([], 90, pause_s=0.02, silent_s=(0.45, 1.6))
    silent = [shares is not None and shares[1][1] == (0.0, 0.0) for shares in job.shares]
    assert any(silent) and not silent[-1]
    # The connections, the trial, and the patience.
    assert next(at_s for at_s, is_silent in zip(job.began_s, silent, strict=True) if at_s > 1.6 and not is_silent) < 2.7
    assert job.shares[-1] == (((1.0, 1.0),) * 2,) * 3
    assert median(job.took_s[-8:]) < 1.05 * median(job.took_s[1:6])


WHOLE, HALF, DOUBTED = (1.0, 1.0), (0.5, 0.5), (DOUBTED_SHARE, DOUBTED_SHARE)


@pytest.mark.parametrize(
    ("known", "said", "is_healed"),
    [
        (HALF, (1.0, 0.5), True),
        (HALF, (0.5, 1.0), True),
        (HALF, (1.0, 0.52), True),
        (HALF, WHOLE, True),
        (HALF, HALF, False),
        (HALF, (0.9, 0.5), False),
        (HALF, (1.0, 0.4), False),
        ((0.5, 1.0), WHOLE, False),
        ((0.04, 0.04), (1.0, 0.04), False),
        ((0.0, 0.0), WHOLE, False),
        (HALF, DOUBTED, False),
        (WHOLE, WHOLE, False),
    ],
)
def test_a_nic_that_carries_one_way_what_it_did_is_taken_for_healed(known: Share, said: Share, is_healed: bool) -> None:
    """If it was slow both ways, and nothing else is new."""
    lost = (0.0, 0.0)
    found = healed_shares(((WHOLE, said), (WHOLE, lost)), ((WHOLE, known), (WHOLE, WHOLE)))
    assert found == (((WHOLE, WHOLE), (WHOLE, lost)) if is_healed else None)
    assert healed_shares(((WHOLE, said), ((0.5, 1.0), WHOLE)), ((WHOLE, known), (WHOLE, WHOLE))) is None


@pytest.mark.slow
@pytest.mark.parametrize("have_meters", [True, False])
def test_a_nic_that_has_its_rate_again_is_used_again(have_meters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without meters a NIC that is slow shows in the runs, and one that is so no more is looked after now and then."""
    if not have_meters:
        monkeypatch.setattr(Rates, "look", lambda *_: None)
    job = Job([(2.5, 1, 1, 0.5, 0.5), (8.0, 1, 1, 1.0, 1.0)], 90, pause_s=0.3)
    assert any(shares is not None and shares[1][1] == pytest.approx((0.5, 0.5), rel=0.04) for shares in job.shares)
    assert job.shares[-1] == (((1.0, 1.0), (1.0, 1.0)),) * 3
    assert median(job.took_s[-8:]) < 1.05 * median(job.took_s[1:6])


@pytest.mark.slow
def test_runs_that_are_slow_for_another_reason_have_nics_measured_ever_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host is slow for a second out of two: whenever its NICs are measured, it may be over. That the ranks ask the
    traffic more often costs next to nothing."""
    measured_s = note_measuring(monkeypatch)
    changes = [
        (at_s + after_s, 1, nic, share, share)
        for at_s in range(2, 42, 2)
        for nic in (0, 1)
        for after_s, share in ((0.0, 0.6), (0.9, 1.0))
    ]
    job = Job(changes, 300, pause_s=0.05)
    assert all(epochs == job.epochs[0] for epochs in job.epochs)
    assert 1 <= len(measured_s) <= 8
    assert all(later - sooner > 0.9 * PAUSE_S for sooner, later in pairwise(measured_s))
    assert job.epochs[0][-1] <= 40


def test_a_rank_that_is_lost_while_nics_are_measured_ends_the_job_at_all() -> None:
    with pytest.raises(RankLost):
        LostWhileMeasuring([(0.45, 1, 1, 0.5, 0.5)], 26)


class LostWhileMeasuring(Job):
    """Rank 2 is killed soon after the first run that takes as long as measuring does has begun."""

    def _body(self, rank: int, transport: SimTransport) -> None:
        if self.n_ranks > self.n_hosts:
            transport.keep_to_own_nics()
        clock = self.network.network.clock

        def look() -> None:
            if transport._endpoint.epochs.agreement.epoch.number:
                clock.after(0.2, self.network.hosts[2].crash)
            else:
                clock.after(0.01, look)

        if rank == 2:
            look()
        super()._body(rank, transport)


def test_what_has_no_nics_cannot_be_measured() -> None:
    planner = Planner(Topology.parse("2@1GB/s"))
    with LoopbackNetwork(None, 2) as network, pytest.raises(InputError, match="remeasures: LoopbackTransport"):
        Communicator(network.transport(0), planner, remeasures=True)


def bound_s(share: float, n_hosts: int, n_nics: int) -> float:
    """T* of an AllReduce of `COUNT` elements where one NIC carries that share, rail by rail, whichever rank uses it."""
    nics = [[Nic(rail, Fraction(RATE), Fraction(RATE)) for rail in range(n_nics)] for _ in range(n_hosts)]
    rate = Fraction(share) * RATE or Fraction(1)
    nics[0][1] = Nic(1, rate, rate, failed=not share)
    topology = Topology(tuple(Server(f"h{at}", 1, tuple(each)) for at, each in enumerate(nics)), rail_only=True)
    wanted, n_bytes = Collective("allreduce", n_hosts), 4 * COUNT
    certificate, _ = certified_bound(topology, n_bytes, wanted, explain_if_pooled(topology, n_bytes, wanted))
    return float(certificate.seconds)


@pytest.mark.slow
def test_hosts_of_several_ranks_cut_messages_for_a_nic_at_half() -> None:
    """Each rank has two NICs of its own, and one rank three quarters of its rate since, which is what a plan takes that
    asks the same of all."""
    job = Job([(0.2, 1, 1, 0.5, 0.5)], 14, gpus=2, n_nics=4, schedule="auto", count=1 << 20)
    assert all(epochs == job.epochs[0] for epochs in job.epochs) and job.epochs[0][-1] == 1
    shares = job.shares[-1]
    assert shares is not None
    for rank, nics in enumerate(shares):
        for nic, share in enumerate(nics):
            is_slow = rank < 2 and nic == 1
            assert share == pytest.approx((0.5, 0.5) if is_slow else (1.0, 1.0), rel=0.04)
    assert median(job.took_s[-3:]) < 1.08 * 4 / 3 * job.took_s[1]


@pytest.mark.slow
def test_hosts_of_several_ranks_change_plans_once_for_a_nic_that_is_lost_and_once_when_it_is_back() -> None:
    """Both ranks of the host are told of it."""
    job = Job([], 50, gpus=2, schedule="equal-trees", down_s=0.4, up_s=1.2)
    assert all(epochs == job.epochs[0] for epochs in job.epochs) and job.epochs[0][-1] == 2
    whole, lost = ((1.0, 1.0),) * 2, ((1.0, 1.0), (0.0, 0.0))
    first, last = job.epochs[0].index(1), job.epochs[0].index(2)
    assert job.shares[first] == (lost, lost, whole, whole, whole, whole) and job.shares[last] == (whole,) * 6
    before = median(job.took_s[1:6]) / bound_s(1.0, 3, 2)
    assert median(job.took_s[first + 1 : last]) / bound_s(0.0, 3, 2) < 1.03 * before
    assert median(job.took_s[last + 1 :]) / bound_s(1.0, 3, 2) < 1.03 * before


@pytest.mark.slow
def test_a_rail_that_no_rank_has_used_is_used_again_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank tries its NIC at another time, and it can be measured with those of the others only."""
    await_trial = Readmissions.await_trial
    monkeypatch.setattr(
        *(Readmissions, "await_trial"),
        lambda trials, nic, _=0.0: await_trial(trials, nic, 0.5 + 20 * trials._local.rank),
    )
    collapsed = [(0.45, rank, 1, 0.004, 0.004) for rank in range(3)]
    job = Job([*collapsed, *((3.0, rank, 1, 1.0, 1.0) for rank in range(3))], 120, pause_s=0.02)
    lost = [number for number, shares in enumerate(job.shares) if shares and all(min(nics[1]) <= 0 for nics in shares)]
    assert lost and 3.0 < job.began_s[lost[-1]] < 7.0 < job.began_s[-1]
    assert job.shares[-1] == (((1.0, 1.0),) * 2,) * 3


def test_plans_that_all_wait_for_are_looked_for_again_and_again() -> None:
    """Each look that is in vain costs some milliseconds."""
    at_once, later = (Job([(0.45, 1, 1, 0.5, 0.5)], 24, plan_delay=delay) for delay in (0, 10))
    assert at_once.epochs == later.epochs and later.epochs[0][-1] == 1
    assert 0 < max(later.took_s) - max(at_once.took_s) < 0.1


def bare_remeasuring() -> Remeasuring:
    """Of a rank that has no engine: for what is only counted."""
    found = object.__new__(Remeasuring)
    found._engine = cast("Engine", SimpleNamespace(clock=SimpleNamespace(now_s=lambda: 0.0)))
    found._planned, found._paces = ((WHOLE,),), {}
    return found


def test_where_a_nic_was_lost_meanwhile_others_carry_what_they_did_unless_they_are_out_of_use() -> None:
    found, lost = bare_remeasuring(), (0.0, 0.0)
    found._known = (WHOLE, HALF), (WHOLE, WHOLE)
    agreed = (WHOLE, WHOLE), (WHOLE, lost)
    assert found._without_lost(((lost, WHOLE), (WHOLE, WHOLE)), agreed) == ((DOUBTED, HALF), (WHOLE, lost))
    assert found._without_lost(((HALF, WHOLE), (WHOLE, lost)), agreed) == ((HALF, WHOLE), (WHOLE, lost))


def test_a_single_slow_run_says_something_only_where_a_nic_was_slow_before() -> None:
    """And no guess is made for it."""
    found, request = bare_remeasuring(), PlanRequest(Collective("allreduce", 3), 1 << 20, "float32", "sum")
    found._last_times, found._last_request, found._guesses = RunTimes(), request, Guesses()
    found._known, found._least_s = ((WHOLE,), (HALF,)), lambda *_: 0.1
    found._transport = cast("RemeasuredTransport", SimpleNamespace(at_start=((WHOLE,), (WHOLE,))))
    for number in range(KNOWN_RUNS):
        found._last_times.take(0.1, number / 10)
    found._last_times.take(0.2, 2.0)
    found._last_times.take(0.1, 2.1)
    assert found._slow_span_s() == (inf, inf)
    found._guesses.take(((WHOLE,), (WHOLE,)), found._known)
    assert found._slow_span_s() == pytest.approx((1.8, 2.0)) and found._guess() is None
    # Where slow runs are no exception, there is one.
    for number in range(20):
        found._last_times.take(0.1 if number % 2 else 0.14, 3.0 + number)
    assert found._last_times.is_drifting and found._guess() is not None
    assert found._slow_span_s() == pytest.approx((20.86, 21.0))


def make_plan() -> PersistentPlan:
    """Of a request, and nothing else."""
    plan = object.__new__(PersistentPlan)
    plan.plan = cast("Plan", SimpleNamespace(request=PlanRequest(Collective("allreduce", 3), 64, "float32", "sum")))
    return plan


def test_collectives_that_could_be_very_short_say_nothing_of_nics() -> None:
    found, plan = bare_remeasuring(), make_plan()
    for least_s, is_timed in ((LEAST_S / 2, False), (0.0, True), (2 * LEAST_S, True)):
        found._times = WeakKeyDictionary()
        found._least_s = lambda *_, least_s=least_s: least_s
        assert (found._times_of(plan) is not None) == is_timed


def test_it_is_counted_for_how_long_runs_are_under_way() -> None:
    """Once where two are at the same time, and not while none is, or a message is waited for."""
    now_s = 0.0
    found, clock = bare_remeasuring(), SimpleNamespace(now_s=lambda: now_s)
    first, second = (SimpleNamespace(plan=make_plan(), began_s=began_s) for began_s in (1.0, 2.0))
    message, later = SimpleNamespace(plan=None, began_s=0.0), SimpleNamespace(plan=first.plan, began_s=8.0)
    engine = SimpleNamespace(clock=clock, running=[message], rank=1)
    found._engine, found._last_request = cast("Engine", engine), None
    found._ran_before_s, found._counted_s = 0.0, -inf
    counted: list[float] = []
    for now_s, running, finished in (
        *((0.5, [], None), (1.5, [first], None), (2.5, [first, second], None), (3.0, [first], second)),
        *((3.5, [first], None), (4.0, [], first), (7.0, [], None), (9.0, [later], None)),
    ):
        engine.running = [message, *running]
        if finished is not None:
            found._note_finished(cast("Handle", finished), now_s - finished.began_s)
        counted.append(found._ran_s())
    assert counted == [0.0, 0.5, 1.5, 2.0, 2.5, 3.0, 3.0, 4.0]
    assert found._last_request == first.plan.plan.request


def test_plans_for_rates_that_there_have_been_before_should_be_as_good_as_then() -> None:
    """Though there were others meanwhile, under which nothing ran."""
    found, request = bare_remeasuring(), PlanRequest(Collective("allreduce", 3), 1 << 20, "float32", "sum")
    found._least_s = lambda shares, _: 1.0 / shares[0][0][0]
    found._note_pace(request, 1.2)
    # No change: they are still the present ones.
    found._plan_for(((WHOLE,),))
    assert found._expected_s(request) == inf
    for share in (HALF, WHOLE):
        found._plan_for(((share,),))
        assert found._expected_s(request) == pytest.approx(1.2 / share[0])


@pytest.mark.parametrize(("usual_s", "expected_s"), [(1.2, 2.4), (0.7, 2.0)])
def test_runs_should_be_as_near_to_the_least_as_before_and_no_plan_beats_that(
    usual_s: float, expected_s: float
) -> None:
    """Runs under plans for a NIC that is slow no more may."""
    found, request = bare_remeasuring(), PlanRequest(Collective("allreduce", 3), 1 << 20, "float32", "sum")
    found._least_s = lambda shares, _: 1.0 / shares[0][0][0]
    assert found._expected_s(request) == inf
    for seconds in (0.5, usual_s, 0.6):
        # Of several collectives at once one may be slower than another: that is no news.
        found._note_pace(request, seconds)
        assert found._expected_s(request) == inf
    found._plan_for(((HALF,),))
    assert found._expected_s(request) == pytest.approx(expected_s)
    found._note_pace(request, 4.0)
    assert found._expected_s(request) == pytest.approx(expected_s)
    found._plan_for(((HALF,),))
    assert found._expected_s(request) == pytest.approx(expected_s)
    found._plan_for(((WHOLE,),))
    assert found._expected_s(request) == pytest.approx(expected_s / 2)
