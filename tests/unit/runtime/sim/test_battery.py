"""What may befall NICs in the middle of a collective, one case at a time: result, time and bytes of each NIC.

The cases are those of the battery (`tests/battery.py`) for which simulated hosts suffice. A case fails if its fault
misses the collective.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from optcc.errors import AllRailsFailed
from optcc.plan import Channel
from optcc.runtime.sim.faults import FaultInjector
from optcc.runtime.sim.scenario import INFINITY, SwarmFault
from optcc.runtime.transports.sim import SimNetwork, SimTransport, run_sim
from optcc.topology import Nic, Server, Topology
from tests.unit.runtime.sim.fault_trial import RATE, FaultTrial

AT_S = 0.05
"""In the middle of the second AllReduce."""
PATIENCE_S = 0.1
"""How long a silent rail is waited for: `SimNetwork`'s default."""
QUEUE_S = (1 << 18) / RATE + 0.002
"""What a socket's buffer takes to be sent, and a report of a NIC to come."""


def fault(kind: str, rank: int = 1, nic: int = 1, at_s: float = AT_S, for_s: float = INFINITY) -> SwarmFault:
    return SwarmFault(at_s, kind, rank, nic, for_s)


@cache
def healthy_ratio() -> float:
    """What a quiet AllReduce of this size takes, over T*: chunks, headers and latency."""
    trial = FaultTrial(n_runs=3)
    assert not any(counts.resent or counts.changes for counts in trial.counts)
    return trial.runs[-1].seconds / trial.least_s()


@pytest.mark.battery(1)
def test_a_link_that_goes_down_in_mid_run_costs_its_share() -> None:
    trial = FaultTrial([fault("down")], n_runs=9)
    run, usual = trial.hit(), healthy_ratio()
    # At worst nothing that was done counts, and the NIC that is left carries what both did.
    assert trial.runs[run].seconds < 2.2 * trial.runs[0].seconds
    assert trial.runs[-1].seconds < 1.2 * usual * trial.least_s((1, 1)) and trial.runs[-1].epoch == 1
    assert trial.runs[run].sent[1][1] > 0 and all(each.sent[1][1] == 0 for each in trial.runs[run + 2 :])


@pytest.mark.battery(2)
def test_a_link_that_is_down_before_the_first_byte_carries_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="optcc"):
        trial = FaultTrial([fault("down", at_s=0.0)], n_runs=9)
    assert trial.faults.begun and all(run.sent[1][1] == 0 and run.sent[1][0] > 0 for run in trial.runs)
    assert trial.runs[-1].seconds < 1.2 * healthy_ratio() * trial.least_s((1, 1))
    assert "NIC 1 of rank 1 down" in caplog.text


@pytest.mark.battery(3)
@pytest.mark.parametrize("rank", [0, 1])
def test_both_ends_know_of_a_link_within_a_loaded_round_trip(rank: int) -> None:
    """The end whose link it is hears of it from its kernel, the others from it, behind what fills a socket's buffer."""
    known: list[list[int]] = []

    class Watched(FaultTrial):
        def _body(self, rank: int, transport: object) -> None:
            if not rank:
                self.network.network.clock.after(AT_S + QUEUE_S, lambda: known.append(failures(self)))
            super()._body(rank, transport)  # type: ignore[arg-type]

    trial = Watched([fault("down", rank)], n_runs=4)
    trial.hit()
    # Its own end has connections to three peers, each of them one to it.
    assert known == [[3 if each == rank else 1 for each in range(4)]]


def failures(trial: FaultTrial) -> list[int]:
    return [host.endpoint.rail_counts[1].failures for host in trial.network.hosts]


@pytest.mark.battery(4)
@pytest.mark.parametrize("gap_s", [0.0, *(pytest.param(gap_s, marks=pytest.mark.slow) for gap_s in (0.002, 0.1, 0.5))])
def test_two_of_three_rails_go_down_one_after_the_other(gap_s: float) -> None:
    faults = [fault("down", nic=2, at_s=0.03), fault("hole", nic=1, at_s=0.03 + gap_s)]
    trial = FaultTrial(faults, n_runs=14, rates=(RATE // 2,) * 3)
    assert trial.hit(0) <= trial.hit(1)
    last = trial.runs[-1]
    assert last.sent[1][1:] == (0, 0) and last.seconds < 1.25 * healthy_ratio() * trial.least_s((1, 1), (1, 2))


@pytest.mark.battery(5)
@pytest.mark.parametrize("gap_s", [0.0, pytest.param(0.0005, marks=pytest.mark.slow), 0.002])
def test_a_rail_that_fails_while_chunks_are_sent_again_adds_nothing_twice(gap_s: float) -> None:
    second = fault("down", nic=0, at_s=gap_s)
    trial = FaultTrial([fault("hole", nic=2, at_s=0.03)], n_runs=3, rates=(RATE // 2,) * 3, once_resent=[second])
    assert trial.hit(0) == trial.hit(1), "chunks of the first rail are sent again while the second one fails"
    assert sum(counts.resent for counts in trial.counts) > 4


@pytest.mark.battery(7)
def test_the_only_nic_of_a_host_is_waited_for_and_then_named() -> None:
    flap = FaultTrial([fault("down", nic=0, for_s=0.5)], n_runs=3, rates=(RATE,))
    run = flap.runs[flap.hit()]
    assert (
        0.5 < run.seconds < 0.5 + 0.5 + 2 * flap.runs[0].seconds and flap.runs[-1].seconds < 1.1 * flap.runs[0].seconds
    )
    with pytest.raises(AllRailsFailed, match=r"no rail to rank 1 \(eth0\)"):
        FaultTrial([fault("down", nic=0)], n_runs=3, rates=(RATE,), stall_s=2.0)


@pytest.mark.battery(8)
@pytest.mark.slow
@pytest.mark.parametrize("period_s", [0.05, 0.5, 5.0])
def test_a_nic_that_flaps_ten_times_does_not_make_plans_flap(period_s: float) -> None:
    faults = [fault("down", at_s=AT_S + number * period_s, for_s=period_s / 2) for number in range(10)]
    n_runs = int(10 * period_s / 0.045) + 10 if period_s < 1 else 60
    trial = FaultTrial(faults, n_runs=n_runs, pause_s=0.0 if period_s < 1 else 0.9)
    assert len(trial.faults.begun) == 10
    # Each time it is back it is waited for longer; without that, twenty changes.
    assert trial.runs[-1].epoch <= 10
    assert sorted(run.seconds for run in trial.runs)[len(trial.runs) // 2] < 2.2 * trial.runs[0].seconds


@pytest.mark.battery(9)
def test_a_rail_that_returns_after_an_hour_is_used_again() -> None:
    trial = FaultTrial([fault("down", at_s=0.02, for_s=3600.0)], n_runs=16, pause_s=300.0)
    trial.hit()
    back = [run for run in trial.runs if run.began_s > 3600 + 2 * 300]
    assert len(back) > 1 and back[-1].sent[1][1] > 0.8 * back[-1].sent[1][0]
    assert back[-1].seconds < 1.2 * trial.runs[0].seconds


@pytest.mark.slow
@pytest.mark.battery(10)
def test_peers_that_see_a_rail_return_ten_seconds_apart_agree() -> None:
    """Rank 1 sends again after a second; what comes to it is lost for ten more."""
    faults = [fault("down", at_s=0.02, for_s=1.0), fault("hole-in", at_s=0.9, for_s=10.1)]
    trial = FaultTrial(faults, n_runs=24, pause_s=0.7)
    trial.hit()
    assert min(run.sent[1][1] for run in trial.runs[3:12]) == 0
    assert trial.runs[-1].sent[1][1] > 0.8 * trial.runs[-1].sent[1][0]


@pytest.mark.battery(11)
@pytest.mark.parametrize("authenticate", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_nic_that_comes_back_with_another_address_is_used_again(authenticate: bool) -> None:
    """Both ways: ranks 0 and 2 dial rank 1 there, and it dials them from there."""
    down_s = 0.05
    move = fault("move", at_s=0.2, for_s=down_s)
    trial = FaultTrial([move], n_runs=8, n_hosts=3, pause_s=0.15, authenticate=authenticate)
    run, usual = trial.hit(), trial.runs[0]
    nic = trial.network.network.nics[1, 1]
    assert nic.n_moves == 1 and trial.network.network.at(("1", 1)) is None, "nobody answers at the former address"
    for rank, host in enumerate(trial.network.hosts):
        assert host.endpoint.addresses == {(1, 1): ("10.1.1.1", 1001)}, f"rank {rank}"
    assert trial.runs[run].seconds < 2.2 * usual.seconds + down_s
    last = trial.runs[-1]
    assert last.seconds < 1.2 * usual.seconds
    assert min(last.sent[1][1] / last.sent[1][0], last.sent[0][1] / last.sent[0][0]) > 0.8


@pytest.mark.battery(12, 13)
@pytest.mark.parametrize("kind", ["hole", "hole-out", pytest.param("hole-in", marks=pytest.mark.slow)])
def test_a_blackhole_both_ways_or_one_way_costs_its_patience(kind: str) -> None:
    trial = FaultTrial([fault(kind)], n_runs=4)
    run = trial.runs[trial.hit()]
    # Two rounds of patience at most: what went over the rail, and the answer to it.
    assert run.seconds < 2.2 * trial.runs[0].seconds + 2 * PATIENCE_S
    assert trial.runs[-1].sent[1][1] == 0 and sum(counts.resent for counts in trial.counts) > 0


@pytest.mark.battery(12)
@pytest.mark.parametrize("for_s", [2.0, 2.7])
def test_a_blackhole_that_has_healed_is_in_use_again_within_a_patience(for_s: float) -> None:
    """At both ends: a dialling that began just before is waited for (0.4 s), and the next follows at once."""
    network, healed_s, back_s = SimNetwork(2), AT_S + for_s, dict[int, float]()
    clock = network.network.clock
    rates = [[(RATE, RATE)] * 2] * 2
    FaultInjector(network.network, network.hosts, rates, lambda _: None).plan([fault("hole", for_s=for_s)])

    def look() -> None:
        for host in network.hosts:
            if host.rank not in back_s and len(host.endpoint.up_over(1)) == 2:
                back_s[host.rank] = clock.now_s - healed_s
        if len(back_s) < 2:
            clock.after(0.005, look)

    def body(_: int, transport: SimTransport) -> None:
        while transport.clock.now_s() < AT_S + 0.25:
            transport.barrier()
            transport.poll(0.02)
        assert not transport.endpoint.up_over(1), "the fault is noticed"
        transport.poll(healed_s + 1.0 - transport.clock.now_s())

    clock.after(healed_s, look)
    run_sim(network, body)
    assert 0 < max(back_s.values()) < 0.5 and back_s.keys() == {0, 1}


@pytest.mark.slow
@pytest.mark.battery(15)
def test_lost_segments_change_no_bit() -> None:
    trial = FaultTrial([fault("loss", rank, nic, at_s=0.0) for rank in range(4) for nic in (0, 1)], n_runs=2)
    assert trial.network.network.n_lost > 50


@pytest.mark.battery(16)
@pytest.mark.parametrize(
    ("schedule", "rates", "share"),
    [
        ("shares", (30_000_000, 10_000_000), 3.0),
        ("auto", (30_000_000, 10_000_000), 3.0),
        # Messages of eight segments of a slice are too short here to go over two NICs each.
        pytest.param("auto", (10_000_000, 1_000_000), 10.0, marks=pytest.mark.slow),
    ],
)
def test_unequal_nics_carry_what_their_rates_say(schedule: str, rates: tuple[int, int], share: float) -> None:
    trial = FaultTrial(n_runs=3, rates=rates, schedule=schedule)
    run = trial.runs[-1]
    assert run.seconds < (1.1 if schedule == "auto" else healthy_ratio() / 0.9) * trial.least_s()
    for fast, slow in run.sent:
        assert 0.8 * share < fast / slow < 1.25 * share


@pytest.mark.battery(17)
def test_a_rate_that_collapses_in_mid_run_is_measured_and_avoided() -> None:
    """To an eighth; a plan that keeps the shares takes eight times as long, one without the NIC twice."""
    trial = FaultTrial([fault("slow")], n_runs=10)
    run, usual = trial.hit(), trial.runs[0]
    assert trial.runs[run + 1].seconds < 6 * usual.seconds
    assert max(each.seconds for each in trial.runs[run + 3 :]) < 2.6 * usual.seconds
    assert all(each.sent[1][1] < 0.4 * usual.sent[1][1] for each in trial.runs[run + 3 :])
    assert sum(counts.resent for counts in trial.counts) == 0, "it is slow, and not lost"


@pytest.mark.battery(19)
def test_flipped_bits_are_noticed_and_sent_again() -> None:
    trial = FaultTrial(n_runs=2, crc=True, corrupt=0.001)
    assert sum(counts.damaged for counts in trial.counts) > 0 < sum(counts.resent for counts in trial.counts)


@pytest.mark.battery(21)
def test_a_nic_that_damages_everything_is_left_alone() -> None:
    trial = FaultTrial(n_runs=12, crc=True, damaging=(1, 1, AT_S))
    last = trial.runs[-1]
    assert trial.network.network.n_corrupted > 10 and sum(counts.damaged for counts in trial.counts) > 0
    assert last.sent[1][1] < 0.01 * last.sent[1][0]
    assert last.seconds < 1.2 * healthy_ratio() * trial.least_s((1, 1))


@pytest.mark.battery(23)
def test_a_process_that_stands_still_for_a_while_delays_the_others_and_nothing_else() -> None:
    trial = FaultTrial([fault("busy", nic=-1, for_s=1.0)], n_runs=4)
    run = trial.runs[trial.hit()]
    assert 0.9 < run.seconds < 1.0 + 3 * trial.runs[0].seconds
    assert trial.runs[-1].seconds < 1.1 * trial.runs[0].seconds


NEAR_S, FAR_S = 0.001, 0.05
"""Latencies of two rails, one way."""
FAST_RATE, CHUNK_BYTES, ROOM_BYTES = 125_000_000, 1 << 20, 16 << 20
"""A window of less than 12.5 MB would be what a rail of 50 ms carries in a round trip of 100 ms."""


def message_seconds(sizes: Sequence[int], rates: tuple[int, int], delays_s: Sequence[float]) -> list[float]:
    """What a message of each size takes to be delivered over two rails, from when it is posted."""
    nics = tuple(Nic(rail, Fraction(rate), Fraction(rate)) for rail, rate in enumerate(rates))
    servers = tuple(Server(f"h{rank}", 1, nics) for rank in range(2))
    topology = Topology(servers, latency_s=Fraction(NEAR_S))
    network = SimNetwork(topology, chunk_bytes=CHUNK_BYTES, buffer_bytes=ROOM_BYTES)
    for nic in network.network.nics.values():
        nic.delay_s = delays_s[nic.number]
    moments: list[float] = []

    def body(rank: int, transport: SimTransport) -> None:
        (handle,) = transport.open([Channel(0, 1, 1)])
        for _ in range(4):
            # Each time the far rail comes a step further in its handshake.
            transport.barrier()
            transport.clock.sleep_s(3 * FAR_S)
        for size in sizes:
            data = np.arange(size, dtype=np.uint32).view(np.uint8)[:size]
            array = np.zeros(size, np.uint8) if rank else data
            if rank:
                transport.post_recv(handle, array)
            transport.barrier()
            if not rank:
                moments.append(transport.clock.now_s())
                transport.post_send(handle, array)
            while not transport.poll(5.0):
                pass
            if rank:
                moments.append(transport.clock.now_s())
                assert np.array_equal(array, data)
            transport.barrier()

    run_sim(network, body)
    return [ended - began for began, ended in zip(moments[::2], moments[1::2], strict=True)]


def best_split_s(size: int, rate: float) -> float:
    """The least time for a message over rails of one rate and of the two latencies: the last bytes arrive together, or
    all go over the near rail."""
    near = min(size, (size + rate * (FAR_S - NEAR_S)) / 2)
    return max(near / rate + NEAR_S, (size - near) / rate + FAR_S if near < size else 0.0)


@pytest.mark.battery(18)
@pytest.mark.parametrize(
    ("rate", "far"),
    [
        (FAST_RATE, 1),
        pytest.param(FAST_RATE, 0, marks=pytest.mark.slow),
        pytest.param(20_000_000, 1, marks=pytest.mark.slow),
    ],
)
def test_a_message_over_rails_of_unequal_latency_takes_the_best_split(rate: int, far: int) -> None:
    sizes = (1 << 16, 1 << 18, 1 << 20, 8 << 20)
    delays_s = [(FAR_S - NEAR_S) * (nic == far) for nic in range(2)]
    for size, seconds in zip(sizes, message_seconds(sizes, (rate, rate), delays_s), strict=True):
        # Headers; and where both rails have a part, a chunk cannot be divided.
        is_split = size > rate * (FAR_S - NEAR_S)
        assert seconds < 1.02 * best_split_s(size, rate) + (CHUNK_BYTES / rate / 2 if is_split else 5e-4)


@pytest.mark.battery(18)
def test_a_far_rail_does_not_hold_up_a_collective() -> None:
    """Which takes what it does over the near rail alone; with the stripes of equal rails two to four times that."""
    trial = FaultTrial(n_runs=2, delays_s=(NEAR_S, FAR_S))
    near_s = trial.least_s(*((rank, 1) for rank in range(4)))
    # Some steps of a latency each, and the plan is for both.
    assert trial.runs[-1].seconds < 1.7 * near_s
    assert not any(note.kind == "suspected" for host in trial.network.hosts for note in host.endpoint.notes)


@pytest.mark.slow
@pytest.mark.battery(18)
@pytest.mark.parametrize("nic", [0, 1])
def test_either_of_two_rails_of_unequal_latency_may_fail(nic: int) -> None:
    trial = FaultTrial([fault("down", nic=nic, at_s=0.15)], n_runs=4, delays_s=(NEAR_S, FAR_S))
    run = trial.runs[trial.hit()]
    assert run.seconds < trial.runs[0].seconds + (2.0 if nic == 0 else 0.1)
    assert all(bool(sent[nic]) == (nic == 0 and rank != 1) for rank, sent in enumerate(trial.runs[-1].sent))
