"""The closed forms against the formulas written out, their limits, and what latency adds."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import pytest

from optcc.collective import COLLECTIVES
from optcc.errors import InputError, TopologyError
from optcc.topology import Nic, Server, Topology
from optcc.verify.bounds.closed_forms import (
    FABRIC,
    POOLED,
    TITLES,
    Bound,
    allreduce_bound,
    collective_bound,
    latency_bound,
    latency_rounds,
)
from optcc.verify.bounds.predictions import ring

Rates = list[tuple[int, int]]


def endpoints(rates: Rates) -> Topology:
    """One server of one NIC for each (out, in)."""
    return Topology(
        tuple(Server(f"h{i}", 1, (Nic(0, Fraction(out), Fraction(in_)),)) for i, (out, in_) in enumerate(rates))
    )


def servers(*shape: tuple[int, int, int | None]) -> Topology:
    """Servers of (GPUs, rate of the NICs both ways, fabric)."""
    return Topology(
        tuple(
            Server(f"h{i}", gpus, (Nic(0, Fraction(rate), Fraction(rate)),), None if f is None else Fraction(f))
            for i, (gpus, rate, f) in enumerate(shape)
        )
    )


def drawn(case: int) -> tuple[int, Rates]:
    """A size and asymmetric rates."""
    rng = random.Random(case)
    p, n = rng.randint(2, 9), rng.randint(1, 10**6)
    return n, [(rng.randint(1, 50), rng.randint(1, 50)) for _ in range(p)]


# AllReduce


@pytest.mark.parametrize("case", range(100))
def test_the_bound_is_the_formula(case: int) -> None:
    """Random asymmetric rates: the maximum of the theorem, in exact arithmetic; binding ports attain it."""
    n, rates = drawn(case)
    p = len(rates)
    wanted = max(
        *(Fraction(n, out) for out, _ in rates),
        *(Fraction(n, in_) for _, in_ in rates),
        Fraction(2 * (p - 1) * n, sum(out for out, _ in rates)),
        Fraction(2 * (p - 1) * n, sum(in_ for _, in_ in rates)),
    )
    bound = allreduce_bound(endpoints(rates), n)
    assert bound.seconds == wanted
    assert bound.tight
    ports = {f"out h{i}" for i, (out, _) in enumerate(rates) if Fraction(n, out) == wanted}
    ports |= {f"in h{i}" for i, (_, in_) in enumerate(rates) if Fraction(n, in_) == wanted}
    assert {port for port in bound.binding if "together" not in port} == ports
    assert bound.binding


@pytest.mark.parametrize("p", range(2, 12))
@pytest.mark.parametrize("slow", [1, 2, 3, 7])
def test_one_straggler(p: int, slow: int) -> None:
    """max(l, 2l(p-1)/(l(p-1)+1)) times n/B, and the ring takes l times its fault-free time."""
    topology = endpoints([(42, 42)] * (p - 1) + [(42 // slow, 42 // slow)])
    unit = Fraction(420, 42)
    assert allreduce_bound(topology, 420).seconds == unit * max(
        Fraction(slow), Fraction(2 * slow * (p - 1), slow * (p - 1) + 1)
    )
    assert ring(topology, 420) == unit * slow * Fraction(2 * (p - 1), p)


@pytest.mark.parametrize("p", range(2, 40))
def test_half_the_bandwidth_of_one_costs_one_in_p_minus_one(p: int) -> None:
    """At l = 2 the overhead over the fault-free ring is 1/(p-1)."""
    slow, healthy = endpoints([(2, 2)] * (p - 1) + [(1, 1)]), endpoints([(2, 2)] * p)
    assert allreduce_bound(slow, 6).seconds / ring(healthy, 6) - 1 == Fraction(1, p - 1)


@pytest.mark.parametrize("p", range(2, 40))
def test_nothing_beats_the_fault_free_ring(p: int) -> None:
    """Equal endpoints: the bound is the ring's own time."""
    topology = endpoints([(7, 7)] * p)
    assert allreduce_bound(topology, 9000).seconds == ring(topology, 9000)


def test_servers_pool_their_nics() -> None:
    """Four servers of eight NICs, one with three left: 8/3 of the message time of a whole server."""
    topology = Topology.parse("4x8@50GB/s,2=3/8")
    assert allreduce_bound(topology, 3 * 10**9).seconds == Fraction(3 * 10**9, 150 * 10**9)


# The other collectives


@pytest.mark.parametrize("case", range(100))
def test_the_other_collectives(case: int) -> None:
    """Random asymmetric rates: each formula written out, with a root that is not the first."""
    n, rates = drawn(case)
    p, root = len(rates), case % len(rates)
    out, in_ = [out for out, _ in rates], [in_ for _, in_ in rates]
    topology = endpoints(rates)

    def seconds(collective: str, root: int = 0) -> Fraction:
        bound = collective_bound(topology, n, collective, root)
        assert bound.tight
        return bound.seconds

    def broadcast(out: list[int], in_: list[int]) -> Fraction:
        others = [rate for v, rate in enumerate(in_) if v != root]
        return n * max(Fraction(1, out[root]), Fraction(1, min(others)), Fraction(p - 1, sum(out)))

    def allgather(out: list[int], in_: list[int]) -> Fraction:
        return n * max(Fraction(p - 1, p * min(in_)), Fraction(1, p * min(out)), Fraction(p - 1, sum(out)))

    assert seconds("broadcast", root) == broadcast(out, in_)
    assert seconds("reduce", root) == broadcast(in_, out)
    assert seconds("allgather") == allgather(out, in_)
    assert seconds("reducescatter") == allgather(in_, out)
    assert seconds("allreduce") <= seconds("reducescatter") + seconds("allgather")
    assert seconds("allreduce") <= seconds("reduce", root) + seconds("broadcast", root)


def test_all_collectives_have_a_title() -> None:
    """What can be asked can be shown."""
    assert set(TITLES) == {*COLLECTIVES, "alltoallv"}
    for collective in COLLECTIVES:
        assert TITLES[collective] in collective_bound(Topology.parse("3@1B/s"), 9, collective).card().title


def test_servers_own_shares_by_their_gpus() -> None:
    """AllGather between a server of three GPUs and one of one: a quarter goes one way, three the other."""
    bound = collective_bound(servers((3, 1, None), (1, 1, None)), 8, "allgather")
    assert {term.port: term.bytes for term in bound.terms if len(term.ports) == 1} == {
        "out h0": 6,
        "in h0": 2,
        "out h1": 2,
        "in h1": 6,
    }


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_root_is_a_rank(collective: str) -> None:
    """The root of a Broadcast sends from its server; a rank that does not exist is refused."""
    topology = servers((2, 5, None), (2, 1, None), (2, 7, None))
    bound = collective_bound(topology, 10, collective, root=3)
    if collective == "broadcast":
        assert {term.port for term in bound.terms} == {"out h1", "in h0", "in h2", "out of all endpoints together"}
    with pytest.raises(InputError, match="root 6"):
        collective_bound(topology, 10, collective, root=6)


# Fabrics


def test_a_fabric_alone() -> None:
    """One server of g GPUs is g endpoints of the fabric's rate; its NICs do not matter."""
    for gpus in range(2, 9):
        alone = servers((gpus, 1, 7))
        flat = endpoints([(7, 7)] * gpus)
        for collective in COLLECTIVES:
            assert collective_bound(alone, 21, collective).seconds == collective_bound(flat, 21, collective).seconds


def test_a_fast_fabric_is_not_in_the_way() -> None:
    """g f T >= 2(g - 1) n: the bound is that of the NICs, and it is reached."""
    fast, infinite = servers((8, 4, 7), (8, 4, 7), (8, 2, 7)), servers((8, 4, None), (8, 4, None), (8, 2, None))
    one, other = collective_bound(fast, 64), collective_bound(infinite, 64)
    assert one.seconds == other.seconds
    assert one.tight
    assert (one.model, other.model) == (FABRIC, POOLED)
    assert collective_bound(fast, 64, fabric=False) == other


def test_a_slow_fabric_by_hand() -> None:
    """Two servers of two GPUs, NICs of 2, fabrics of 1: 2(4 - 1) transfers through 4 of NICs and 4 of fabrics."""
    bound = collective_bound(servers((2, 2, 1), (2, 2, 1)), 8)
    assert bound.seconds == 8 * Fraction(2 * 3, 2 * 2 + 2 * 2)
    assert "fabric h0, h1 and out of all endpoints" in bound.binding


def test_slower_fabrics_never_help() -> None:
    """Monotone in every rate, and the fabric's terms only add to those of the NICs."""
    rng = random.Random(5)
    for _ in range(200):
        shape = [(rng.randint(1, 5), rng.randint(1, 20), rng.randint(1, 20)) for _ in range(rng.randint(1, 6))]
        slower = [(g, max(1, rate - rng.randint(0, 2)), max(1, f - rng.randint(0, 2))) for g, rate, f in shape]
        for collective in COLLECTIVES:
            bound = collective_bound(servers(*shape), 60, collective)
            assert collective_bound(servers(*slower), 60, collective).seconds >= bound.seconds
            assert bound.seconds >= collective_bound(servers(*shape), 60, collective, fabric=False).seconds


def test_no_set_of_servers_binds_more_than_those_that_are_tried() -> None:
    """All 2^N sets S of servers for "out and fabrics", against the chain."""
    rng = random.Random(6)
    for _ in range(100):
        shape = [(rng.randint(1, 5), rng.randint(1, 9), rng.randint(1, 9)) for _ in range(rng.randint(2, 6))]
        bound = collective_bound(servers(*shape), 1).seconds
        for chosen in range(2 ** len(shape)):
            inside = [server for i, server in enumerate(shape) if chosen >> i & 1 and server[0] > 1]
            crossings = 2 * (len(shape) - 1 + sum(g - 1 for g, _, _ in inside))
            rate = sum(nic for _, nic, _ in shape) + sum(g * f for g, _, f in inside)
            assert bound >= Fraction(crossings, rate)


def test_asymmetric_rates_behind_a_slow_fabric_are_not_called_tight() -> None:
    """There the bound is only a bound."""
    slow = Topology((Server("a", 2, (Nic(0, Fraction(2), Fraction(9)),), Fraction(1)), *servers((2, 4, 1)).servers))
    assert not collective_bound(slow, 10).tight
    assert collective_bound(slow, 10, "broadcast").tight
    assert allreduce_bound(slow, 10).tight


# Latency


def test_rounds() -> None:
    """2^rounds is the first power of two that is not below p."""
    for p in range(1, 2000):
        assert 2 ** latency_rounds(p) >= p
        assert p == 1 or 2 ** (latency_rounds(p) - 1) < p


def test_latency_is_a_maximum() -> None:
    """Short messages: the rounds; long ones: the fluid time and one message's latency."""
    topology = Topology.parse("8@1GB/s").with_latency(Fraction(1, 1000))
    short, long = latency_bound(topology, 8), latency_bound(topology, 10**9)
    assert (short.seconds, short.binding) == (Fraction(3, 1000), ("latency",))
    assert long.seconds == Fraction(7, 4) + Fraction(1, 1000)
    assert long.binding == long.fluid.binding
    shared = latency_bound(topology, 8, exclusive=False)
    assert shared.seconds == shared.fluid.seconds + Fraction(1, 1000)
    assert "3 messages in a row" in str(short.card().rows)


def test_no_latency_and_nothing_to_do() -> None:
    """Without latency it is the fluid bound; without bytes or partners it is zero."""
    assert latency_bound(Topology.parse("8@1GB/s"), 10**9).seconds == Fraction(7, 4)
    assert latency_bound(Topology.parse("8@1GB/s").with_latency(Fraction(1)), 0).seconds == 0
    assert latency_bound(Topology.parse("1@1GB/s").with_latency(Fraction(1)), 8).seconds == 0


# Limits


def test_nothing_to_send_takes_no_time() -> None:
    """One endpoint, or no bytes."""
    for text, size in (("1@1GB/s", 10**6), ("4@1GB/s", 0)):
        for collective in COLLECTIVES:
            bound = collective_bound(Topology.parse(text), size, collective)
            assert bound.seconds == 0
            assert not bound.binding


def test_refusals() -> None:
    """Negative sizes, unknown collectives, and rail-only servers that lost different rails."""
    with pytest.raises(InputError, match="-4"):
        allreduce_bound(Topology.parse("2@1GB/s"), -4)
    with pytest.raises(InputError, match="alltosome"):
        collective_bound(Topology.parse("2@1GB/s"), 4, "alltosome")
    with pytest.raises(TopologyError, match="rail"):
        allreduce_bound(replace(Topology.parse("2x2@1GB/s,1=1/2"), rail_only=True), 4)
    assert allreduce_bound(replace(Topology.parse("2x2@1GB/s"), rail_only=True), 4).seconds > 0


def test_rates_twelve_orders_apart() -> None:
    """Exact as ever."""
    assert allreduce_bound(Topology.parse("3@1TB/s,1=1B/s"), 7).seconds == 7


def test_terms_name_the_ports_whose_rates_they_sum() -> None:
    """Every rate is the sum over `ports`, for all collectives and with fabrics."""
    topology = servers((2, 5, 3), (1, 1, None), (3, 7, 2))
    for collective in COLLECTIVES:
        for term in collective_bound(topology, 10, collective, root=3).terms:
            rates = {f"{way} h{i}": Fraction(rate) for i, rate in enumerate((5, 1, 7)) for way in ("out", "in")}
            rates |= {
                "fabric h0": Fraction(6),
                "fabric h2": Fraction(4 if collective in ("broadcast", "reduce") else 6),
            }
            assert term.rate == sum(rates[port] for port in term.ports), (collective, term)


def test_the_card_is_slowest_first() -> None:
    """What binds stands on top."""
    bound: Bound = allreduce_bound(Topology.parse("4@50MB/s,3=25MB/s"), 10**8)
    rows = bound.card().rows
    assert [row[-1] for row in rows[:3]] == ["binds", "binds", ""]
    assert "AllReduce" in bound.card().title
