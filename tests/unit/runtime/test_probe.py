"""The probe: its rounds and arithmetic, and the rates that it finds on random hosts in simulated time."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from optcc.errors import InputError
from optcc.faults import FaultPlan
from optcc.plan import Channel
from optcc.runtime.probe import FlowLoad, MeasuredNics, Rates, level, make_groups, make_rounds, probe, settle, slope
from optcc.runtime.transport import Bytes
from optcc.runtime.transports.sim import SimNetwork, SimTransport, run_sim
from optcc.topology import Nic, Server, Topology
from tests.sample import sampled


def random_hosts(seed: int) -> Topology:
    """2 to 8 hosts of 1 to 3 NICs; half of the NICs have 15 to 100 % of their rate, out and in by themselves."""
    rng = random.Random(seed)

    def rate() -> Fraction:
        return Fraction(int(50e6 * (1 if rng.random() < 0.5 else rng.uniform(0.15, 1))))

    hosts = range(rng.randint(2, 8))
    nics = [tuple(Nic(rail, rate(), rate()) for rail in range(rng.randint(1, 3))) for _ in hosts]
    return Topology(tuple(Server(f"h{host}", 1, nics[host]) for host in hosts))


def measure(network: SimNetwork) -> MeasuredNics:
    """The probe of all ranks of a network, who find the same."""
    found = run_sim(network, lambda _, transport: probe(transport, clock=transport.clock))
    assert all(each.rates == found[0].rates for each in found)
    return found[0]


def expected(topology: Topology, host: int, rail: int) -> tuple[float, float]:
    """What a NIC sends and receives, as far as the NICs on its rail let it show."""
    others = [
        nic
        for number, server in enumerate(topology.servers)
        for nic in server.nics
        if number != host and nic.rail == rail
    ]
    own = topology.servers[host].nics[rail]
    return float(min(own.out, sum(nic.in_ for nic in others))), float(min(own.in_, sum(nic.out for nic in others)))


def check(seed: int) -> None:
    topology = random_hosts(seed)
    network = SimNetwork(topology, seed=seed)
    measured = measure(network)
    for host, server in enumerate(topology.servers):
        for nic in server.nics:
            for found, true in zip(measured.rates[host][nic.rail], expected(topology, host, nic.rail), strict=True):
                assert found == pytest.approx(true, rel=0.05), (seed, host, nic.rail)
    assert network.now_s < 4


FEW = (2, 5)


@pytest.mark.parametrize("seed", FEW)
def test_rates_are_within_five_per_cent_on_random_hosts(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=() if seed < 30 else (pytest.mark.search,)) for seed in sorted({*range(200)} - {*FEW})],
)
def test_rates_are_within_five_per_cent_on_two_hundred_random_hosts(seed: int) -> None:
    check(seed)


@pytest.mark.parametrize(
    ("n_hosts", "rate"),
    [
        (2, 1_250_000),
        (4, 1_250_000),
        *(pytest.param(7, 1_250_000 + more, marks=pytest.mark.slow) for more in (0, 2991, 7)),
    ],
)
def test_slow_nics_are_measured_without_overloading_them(n_hosts: int, rate: int) -> None:
    """What is on its way while nothing is known would be 0.2 s of a NIC of 10 Mbit/s if it were sent at once, and
    connections in its queue would be given up."""
    nics = tuple(Nic(rail, Fraction(rate), Fraction(rate)) for rail in range(2))
    network = SimNetwork(Topology(tuple(Server(f"h{host}", 1, nics) for host in range(n_hosts))))
    for own in measure(network).rates:
        for out, in_ in own:
            assert (out, in_) == pytest.approx((rate, rate), rel=0.03)
    assert not any(rail.failures for host in network.hosts for rail in host.endpoint.rail_counts)


def measure_again(hosts: Topology, changes: dict[tuple[int, int], tuple[float, float]]) -> tuple[SimNetwork, Rates]:
    """What the probe finds when NICs, by host and number, carry such shares of what it is told that all carry."""
    network = SimNetwork(hosts)
    known = tuple(tuple((int(nic.out), int(nic.in_)) for nic in server.nics) for server in hosts.servers)
    for (host, rail), (out, in_) in changes.items():
        nic = network.network.nics[host, rail]
        nic.out_rate, nic.in_rate = known[host][rail][0] * out, known[host][rail][1] * in_
    found = run_sim(network, lambda _, transport: probe(transport, clock=transport.clock, known=known))
    assert all(each.rates == found[0].rates for each in found)
    return network, found[0].rates


@pytest.mark.parametrize(("n_hosts", "n_changed"), sampled([(3, 1), (3, 0), (4, 1), (5, 2), (8, 1), (11, 3)], every=3))
def test_only_hosts_that_carry_something_else_are_measured_again(n_hosts: int, n_changed: int) -> None:
    rng = random.Random(n_hosts)
    hosts = Topology.parse(f"{n_hosts}@50MB/s")
    nics = tuple(Nic(rail, Fraction(50_000_000), Fraction(50_000_000)) for rail in range(2))
    hosts = replace(hosts, servers=tuple(replace(server, nics=nics) for server in hosts.servers), text="")
    changed = rng.sample(range(n_hosts), n_changed)
    changes = {(host, rng.randrange(2)): rng.choice([(0.5, 0.5), (0.3, 1.0), (1.0, 0.6)]) for host in changed}
    network, rates = measure_again(hosts, changes)
    for host in range(n_hosts):
        for rail in range(2):
            share = changes.get((host, rail), (1.0, 1.0))
            assert rates[host][rail] == pytest.approx([50e6 * each for each in share], rel=0.05), (host, rail)
            if n_hosts > 3 and host not in changed:
                assert rates[host][rail] == (50_000_000, 50_000_000)
    full = SimNetwork(hosts)
    measure(full)
    # Two rounds for all, and two for the one that is left out of an odd number; for those that have changed about two.
    assert network.now_s < 0.35 + 0.15 * n_changed if n_changed else network.now_s < 0.75 * full.now_s


def test_a_nic_that_is_faster_than_known_is_measured_again() -> None:
    nics = tuple(Nic(rail, Fraction(50_000_000), Fraction(25_000_000)) for rail in range(2))
    hosts = Topology(tuple(Server(f"h{host}", 1, nics) for host in range(4)))
    _, rates = measure_again(hosts, {(2, 0): (1.0, 2.0)})
    assert rates[2][0] == pytest.approx((50e6, 50e6), rel=0.05) and rates[2][1] == pytest.approx((50e6, 25e6), rel=0.05)


@pytest.mark.slow
def test_the_time_does_not_grow_with_the_number_of_hosts() -> None:
    times = []
    for hosts in (6, 18):
        network = SimNetwork(Topology.parse(f"{hosts}@50MB/s"))
        measure(network)
        times.append(network.now_s)
    assert times[1] < 1.5 * times[0]


def test_a_nic_that_is_down_carries_nothing_and_does_not_disturb_the_others() -> None:
    nics = tuple(Nic(rail, Fraction(50_000_000), Fraction(50_000_000)) for rail in range(2))
    hosts = Topology(tuple(Server(f"h{number}", 1, nics) for number in range(3)))
    measured = measure(SimNetwork(hosts, nic_faults=FaultPlan.parse("1/1@0s")))
    assert measured.rates[1][1] == (0, 0) and measured.usable[1][1] == measured.rates[0][1]
    assert measured.shares == (((1, 1), (1, 1)), ((1, 1), (0, 0)), ((1, 1), (1, 1)))
    topology = measured.topology()
    assert [nic.failed for server in topology.servers for nic in server.nics] == [False] * 3 + [True] + [False] * 2
    for host, nic in ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1)):
        assert measured.rates[host][nic] == pytest.approx((5e7, 5e7), rel=0.05)


def test_what_a_nic_that_carries_nothing_should_carry_is_what_good_ones_of_its_rail_do() -> None:
    fast, slow, none = (40, 40), (20, 10), (0, 0)
    names = (("eth0", "eth1", "eth2"),) * 3
    found = MeasuredNics(names, ((fast, slow, none), (fast, none, none), (fast, (5, 10), none)), (0, 1, 2), 0.0)
    assert found.usable[1] == (fast, slow, fast), "of all, where a rail has none"
    assert found.shares[1] == ((1, 1), (0, 0), (0, 0))


def test_messages_are_divided_by_what_was_measured() -> None:
    """The same exchange before and after `set_rates`: a NIC with a quarter of the rate gets a fifth of the bytes."""
    fast, slow = Fraction(50_000_000), Fraction(12_500_000)
    nics = (Nic(0, fast, fast), Nic(1, slow, slow))
    network = SimNetwork(Topology(tuple(Server(f"h{number}", 1, nics) for number in range(2))), learn_rates=False)

    def sent(transport: SimTransport, group: int) -> float:
        (handle,) = transport.open([Channel(0, 1, 1)], group)
        data: Bytes = bytes_of(8 << 20)
        before = [rail.sent_bytes + rail.received_bytes for rail in transport.rails]
        (transport.post_send if transport.rank == 0 else transport.post_recv)(handle, data)
        while not transport.poll(1.0):
            pass
        parts = [rail.sent_bytes + rail.received_bytes - old for rail, old in zip(transport.rails, before, strict=True)]
        return parts[1] / sum(parts)

    def program(_: int, transport: SimTransport) -> tuple[float, float]:
        transport.set_rates([[(1, 1)] * 2] * 2)
        first = sent(transport, 0)
        transport.set_rates(probe(transport, clock=transport.clock).usable)
        second = sent(transport, 1)
        transport.barrier()
        return first, second

    for first, second in run_sim(network, program):
        assert first == pytest.approx(0.5, abs=0.01)
        assert second == pytest.approx(0.2, abs=0.01)


def bytes_of(count: int) -> Bytes:
    """So many bytes, all different enough."""
    return (np.arange(count) % 251).astype(np.uint8)


def test_rates_below_one_are_refused() -> None:
    def program(_: int, transport: SimTransport) -> None:
        with pytest.raises(InputError, match="NIC eth1 of rank 0: 5 and 0 B/s: must be at least 1"):
            transport.set_rates([[(5, 5), (5, 0)], [(5, 5), (5, 5)]])

    run_sim(SimNetwork(2), program)


def test_every_rank_is_a_hub_once_each_way() -> None:
    groups = make_groups(range(11), 4)
    assert sorted(rank for group in groups for rank in group) == list(range(11))
    rounds = make_rounds(groups, lambda _src, _dst: [(0, 1), (1, 0)])
    assert sorted((hub, each.is_out) for each in rounds for hub in each.hubs) == sorted(
        (rank, is_out) for rank in range(11) for is_out in (False, True)
    )
    for each in rounds:
        members = [set(group) for group in groups if set(group) & set(each.hubs)]
        assert len(members) == len(each.hubs), "one hub a group"
        for flow in each.flows:
            hub, other = (flow.src, flow.dst) if each.is_out else (flow.dst, flow.src)
            assert hub in each.hubs and any({hub, other} <= group for group in members)


def test_only_the_wanted_rounds_are_repeated() -> None:
    rounds = make_rounds([(0, 1, 2)], lambda _src, _dst: [(0, 0)], [(1, False)])
    assert [(each.hubs, each.is_out) for each in rounds] == [((1,), False)]


def test_a_burst_at_the_start_does_not_count() -> None:
    burst = [(0.0, 0), (0.001, 500_000)]
    steady = [(0.001 + 0.002 * step, 500_000 + 10_000 * step) for step in range(1, 40)]
    assert slope([*burst, *steady]) == pytest.approx(5e6, rel=1e-6)


@pytest.mark.parametrize("samples", [[], [(0.0, 7)], [(0.0, 7), (1.0, 7)]])
def test_nothing_arrived(samples: list[tuple[float, int]]) -> None:
    assert slope(samples) == 0.0


def test_few_samples_are_better_than_none() -> None:
    assert slope([(0.0, 0), (0.5, 1000), (1.0, 2000)]) == pytest.approx(2000)


def test_alike_rates_become_one() -> None:
    assert level([]) == []
    assert level([100.0, 97.5, 96.0, 50.0]) == [99, 99, 96, 50]


def test_ranks_that_share_their_nics_are_one_server() -> None:
    rates = (((10, 20),),) * 2 + (((5, 6),),)
    measured = MeasuredNics((("eth0",),) * 3, rates, (0, 0, 2), 1e-4)
    topology = measured.topology(["a", "b"])
    assert [(server.name, server.gpus) for server in topology.servers] == [("a", 2), ("b", 1)]
    assert [int(rate) for rate in (*topology.out, *topology.in_)] == [10, 5, 20, 6]
    assert topology.overhead_s == Fraction(1, 10**4)
    with pytest.raises(InputError, match="must follow one another"):
        MeasuredNics((("eth0",),) * 3, rates, (0, 1, 0), 0.0).topology()


@pytest.mark.parametrize(("rate", "flows"), [(2e6, 2), (6.2e6, 7), (12.4e6, 7), (25e6, 5), (50e6, 3)])
def test_what_is_on_its_way_into_a_nic_queues_for_about_ten_milliseconds(rate: float, flows: int) -> None:
    load = FlowLoad.of(rate, flows)
    assert 0.007 < load.window * load.message_bytes * flows / rate < 0.015


def test_out_and_in_of_a_nic_that_differ_by_less_than_a_measurement_are_equal() -> None:
    fast = Server("h0", 1, (Nic(0, Fraction(50_000_000), Fraction(50_000_000)),))
    slow = Server("h1", 1, (Nic(0, Fraction(20_000_000), Fraction(19_300_000)),))
    (out, in_), *others = measure(SimNetwork(Topology((fast, slow, replace(fast, name="h2"))))).rates[1]
    assert out == in_ == pytest.approx(19_650_000, rel=0.02) and not others


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ([0.0, 0.0], (0.0, True)),
        ([100.0, 98.0], (99.0, True)),
        ([80.0, 100.0], (100.0, False)),
        ([130.0, 101.0], (101.0, False)),
        ([50.0, 60.0], (60.0, False)),
        ([60.0, 50.0, 51.0], (50.5, True)),
        ([130.0, 160.0, 101.0], (101.0, False)),
    ],
)
def test_two_measurements_that_are_alike_count_else_the_most_typical_one(
    rates: list[float], said: tuple[float, bool]
) -> None:
    assert settle(rates, 100.0) == said
