"""What the schedules of the literature would take: the published formulas, where they meet, where they do not apply."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from optcc.errors import InputError, TopologyError
from optcc.topology import Topology
from optcc.verify.bounds.closed_forms import allreduce_bound
from optcc.verify.bounds.predictions import (
    fault_free,
    one_straggler_optimum,
    optcc,
    optimum,
    predictions,
    r2ccl_allreduce,
    r2ccl_balance,
    ring,
    straggler_of,
)
from tests.unit.verify.bounds.formulas import ring_share, two_straggler_optimum

SLOWDOWNS = [Fraction(k, 8) for k in range(8, 41)]


def stragglers(p: int, slowdown: Fraction, count: int = 1) -> Topology:
    """p endpoints of 1 TB/s, the last `count` slower; built from numbers so that any slowdown is exact."""
    base = Topology.parse(f"{p}@1TB/s")
    slow = Topology.parse("1@1TB/s").scaled(1 / slowdown).servers[0]
    named = tuple(type(slow)(f"slow{i}", 1, slow.nics) for i in range(count))
    return Topology((*base.servers[: p - count], *named))


N = 10**12
"""Bytes in units of which a formula's n/B is one second."""


@pytest.mark.parametrize("p", [2, 3, 4, 8, 64, 1024])
def test_the_optimum_of_one_and_of_two_stragglers(p: int) -> None:
    """The two formulas are T* of exactly these topologies."""
    for slow in SLOWDOWNS[::3]:
        assert optimum(stragglers(p, slow), N) == one_straggler_optimum(p, slow)
        if p > 2:
            assert optimum(stragglers(p, slow, 2), N) == two_straggler_optimum(p, slow)


@pytest.mark.parametrize("p", [3, 4, 8, 64])
def test_the_two_straggler_formula_is_no_bound_for_one(p: int) -> None:
    """It exceeds what is reached for 1 < l < 2 and agrees at l = 1 and from l = 2 on."""
    for slow in SLOWDOWNS:
        if 1 < slow < 2:
            assert two_straggler_optimum(p, slow) > one_straggler_optimum(p, slow)
        else:
            assert two_straggler_optimum(p, slow) == one_straggler_optimum(p, slow)
    assert two_straggler_optimum(3, Fraction(3, 2)) == Fraction(12, 7)
    assert one_straggler_optimum(3, Fraction(3, 2)) == Fraction(3, 2)


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8, 32, 256])
def test_optcc_is_optimal_from_its_kink_on(p: int) -> None:
    """l >= 2 - 1/(p - 1); below, it is above the optimum by at most (2 - 1/(p - 1)) / (2(p - 1)/p)."""
    kink = 2 - Fraction(1, p - 1)
    for slow in [*SLOWDOWNS, kink]:
        time, least = optcc(stragglers(p, slow), N), optimum(stragglers(p, slow), N)
        assert time == max(slow, kink)
        assert (time == least) == (slow >= kink)
        assert least <= time <= least * kink / Fraction(2 * (p - 1), p)
    assert optcc(stragglers(p, Fraction(2)), N, segments=16) == 2 * Fraction(17, 16)


@pytest.mark.parametrize("p", [3, 4, 5, 8, 32])
def test_the_optimum_mixes_four_stages_and_the_ring(p: int) -> None:
    """lambda + (1 - lambda) 2/p = 2 - T* b/n, and then every port carries exactly what T* allows."""
    for slow in SLOWDOWNS:
        share = ring_share(stragglers(p, slow))
        staged, least = 1 - share, one_straggler_optimum(p, slow)
        assert 0 <= share <= 1
        assert staged + share * Fraction(2, p) == 2 - least / slow
        around = Fraction(2 * (p - 1), p)
        assert staged + share * around == least / slow  # the straggler, in messages
        healthy = staged * (2 - Fraction(1, p - 1)) + share * around
        assert healthy <= least
        assert (healthy == least) == (slow <= 2 - Fraction(1, p - 1))
    assert ring_share(stragglers(p, Fraction(1))) == 1
    assert ring_share(Topology.parse("2@2B/s,1=1B/s")) == 0


@pytest.mark.parametrize("p", [3, 4, 8, 32, 128])
def test_r2ccl_allreduce(p: int) -> None:
    """1 + pX/(2(p - 1)(1 - X)) times the fault-free ring, never better than the optimum nor worse than Balance."""
    for slow in SLOWDOWNS:
        topology = stragglers(p, slow)
        lost = 1 - 1 / slow
        time = r2ccl_allreduce(topology, N)
        assert time == fault_free(topology, N) * (1 + p * lost / (2 * (p - 1) * (1 - lost)))
        assert optimum(topology, N) <= time <= r2ccl_balance(topology, N)
        assert (optimum(topology, N) < time < r2ccl_balance(topology, N)) == (lost > 0)
        assert r2ccl_balance(topology, N) == ring(topology, N) == fault_free(topology, N) * slow


@pytest.mark.parametrize(
    ("p", "lost", "best", "r2ccl", "balance"),
    [
        (4, Fraction(1, 8), 1.032, 1.095, 1.143),
        (8, Fraction(1, 8), 1.016, 1.082, 1.143),
        (8, Fraction(1, 2), 1.143, 1.571, 2.000),
        (32, Fraction(1, 2), 1.032, 1.516, 2.000),
    ],
)
def test_numbers_of_the_notes(p: int, lost: Fraction, best: float, r2ccl: float, balance: float) -> None:
    """Ratios to the fault-free ring, three digits."""
    topology = stragglers(p, 1 / (1 - lost))
    unit = fault_free(topology, N)
    found = [optimum(topology, N), r2ccl_allreduce(topology, N), r2ccl_balance(topology, N)]
    assert [round(float(each / unit), 3) for each in found] == [best, r2ccl, balance]


def test_stragglers_are_found_or_named() -> None:
    """One slow endpoint among equals; everything else says why not."""
    assert straggler_of(Topology.parse("4@50GB/s")).index is None
    assert straggler_of(Topology.parse("4@50GB/s,2=10GB/s")).index == 2
    assert straggler_of(Topology.parse("2@50GB/s,0=10GB/s")).index == 0
    for text, why in (
        ("4@50GB/s,2=10GB/s,3=10GB/s", "2 endpoints differ"),
        ("4@50GB/s,2=10GB/s,3=20GB/s", "2 endpoints differ"),
        ("4@50GB/s,2=10GB/s:50GB/s", "h2 sends and receives at different rates"),
        ("4@50GB/s,2=80GB/s", "h2 is faster than the rest"),
    ):
        with pytest.raises(TopologyError, match=why):
            straggler_of(Topology.parse(text))


def test_where_formulas_do_not_apply_predictions_say_why() -> None:
    """A reason instead of a number; what applies is there all the same."""
    several = {each.schedule: each for each in predictions(Topology.parse("5@50GB/s,2=10GB/s,3=20GB/s"), 10**9)}
    assert [name for name, each in several.items() if each.seconds is None] == ["r2ccl-allreduce", "optcc"]
    assert "2 endpoints differ" in several["optcc"].reason
    two = {each.schedule: each for each in predictions(Topology.parse("2@50GB/s,1=10GB/s"), 10**9)}
    assert "at least two" in two["r2ccl-allreduce"].reason
    assert two["optcc"].seconds == Fraction(1, 10)


def test_predictions_for_other_collectives() -> None:
    """The ring does its halves; the rest is for AllReduce."""
    topology = Topology.parse("4@50GB/s,3=25GB/s")
    for collective in ("allgather", "reducescatter"):
        found = {each.schedule: each.seconds for each in predictions(topology, 10**9, collective)}
        assert found["ring"] == ring(topology, 10**9) / 2
        assert found["optcc"] is None
    broadcast = predictions(topology, 10**9, "broadcast", 1)
    assert [each.schedule for each in broadcast if each.seconds is not None] == ["optimal"]
    assert "Broadcast" in broadcast[0].reason


def test_predictions_count_segments_and_ratios() -> None:
    """(k + 1)/k over the bound; no ratio to a bound of zero."""
    topology = Topology.parse("4@50GB/s,3=25GB/s")
    bound = allreduce_bound(topology, 10**9)
    ratios = {each.schedule: each.ratio(bound) for each in predictions(topology, 10**9, segments=32)}
    assert ratios["optcc, 32 segments"] == Fraction(33, 32)
    assert ratios["optimal"] == 1
    assert predictions(topology, 0)[0].ratio(allreduce_bound(topology, 0)) is None
    with pytest.raises(InputError, match="0 segments"):
        predictions(topology, 10**9, segments=0)


def test_one_server() -> None:
    """Nothing crosses a network."""
    assert {each.seconds for each in predictions(Topology.parse("1x8@50GB/s"), 10**9)} == {Fraction(0)}


def test_fabrics_are_in_no_formula() -> None:
    """A finite fabric makes the published formulas silent, and the optimum the bound with fabrics."""
    topology = Topology.parse("4x8@50GB/s,2=3/8")
    slow = replace(topology, servers=tuple(replace(each, fabric=Fraction(10**9)) for each in topology.servers))
    found = predictions(slow, 10**9)
    assert [each.schedule for each in found if each.seconds is not None] == ["optimal"]
    assert "fabric" in found[0].reason
