"""Fault plans: what they say, what they refuse, what a seed makes of them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from optcc.errors import InputError, TopologyError
from optcc.faults import Fault, FaultPlan
from optcc.topology import Nic, Topology

TOPOLOGY = Topology.parse("4x8@50GB/s,2=3/8")


def test_the_text_form() -> None:
    plan = FaultPlan.parse("3/0@2.5ms, 1/7@1ms..4ms, 0/2@0s=1/2:out,0/3@1us..2us=0.25:in")
    assert plan.faults == (
        Fault(0, 2, Fraction(0), None, Fraction(1, 2), "out"),
        Fault(0, 3, Fraction(1, 10**6), Fraction(2, 10**6), Fraction(1, 4), "in"),
        Fault(1, 7, Fraction(1, 1000), Fraction(4, 1000)),
        Fault(3, 0, Fraction(1, 400)),
    )
    assert len(FaultPlan.parse("")) == 0


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("3@1ms", "must look like"),
        ("3/0@1ms..", "must look like"),
        ("3/0@soon", "write a number with s"),
        ("3/0@1ms=half", "must be a number like 1/2"),
        ("3/0@1ms=1/0", "must be a number like 1/2"),
        ("3/0@1ms=3/2", "from 0 to below 1"),
        ("3/0@4ms..4ms", "must end after it begins"),
        ("3/0@4ms:up", "must look like"),
    ],
)
def test_texts_that_say_nothing(text: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        FaultPlan.parse(text)


def test_faults_that_cannot_be() -> None:
    with pytest.raises(InputError, match="must not be negative"):
        Fault(-1, 0, Fraction(0))
    with pytest.raises(InputError, match="before 0 s"):
        Fault(0, 0, Fraction(-1))
    with pytest.raises(InputError, match="must be one of both, out, in"):
        Fault(0, 0, Fraction(0), direction="up")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("4/0@1ms", "server 4 must be below 4"),
        ("0/8@1ms", "h0 has 8 NICs"),
        ("2/3@1ms", "failed before the run"),
    ],
)
def test_faults_of_nics_that_are_not_there(text: str, match: str) -> None:
    with pytest.raises(TopologyError, match=match):
        FaultPlan.parse(text).check(TOPOLOGY)


def test_of_several_faults_of_a_nic_the_worst_counts() -> None:
    plan = FaultPlan.parse("0/0@1ms..4ms=1/2, 0/0@2ms..3ms=1/4:out, 0/0@5ms")
    moments = [Fraction(each, 2000) for each in range(0, 12)]
    shares = [str(plan.share(0, 0, "out", at)) for at in moments]
    assert shares == ["1", "1", "1/2", "1/2", "1/4", "1/4", "1/2", "1/2", "1", "1", "0", "0"]
    assert plan.share(0, 0, "in", Fraction(1, 400)) == Fraction(1, 2)
    assert plan.share(0, 1, "out", Fraction(1, 400)) == 1


def test_what_is_left_of_a_topology() -> None:
    plan = FaultPlan.parse("0/0@1ms, 0/1@1ms:in, 1/0@1ms=1/2:out")
    left = plan.left(TOPOLOGY, Fraction(1, 1000))
    assert [str(each) for each in left.out] == [str(10**9 * each) for each in (300, 375, 150, 400)]
    assert [str(each) for each in left.in_] == [str(10**9 * each) for each in (300, 400, 150, 400)]
    assert plan.left(TOPOLOGY, Fraction(0)) == replace(TOPOLOGY, text="")
    with pytest.raises(TopologyError, match="h2: no NIC is left"):
        FaultPlan.parse("2/0@0s,2/1@0s,2/2@0s").left(TOPOLOGY, Fraction(0))


def test_a_seed_gives_the_same_faults_and_another_seed_others() -> None:
    asked = {"failures_per_s": 20.0, "repair_s": 0.005, "horizon_s": 0.1}
    plan = FaultPlan.sampled(TOPOLOGY, 7, **asked)
    assert plan == FaultPlan.sampled(TOPOLOGY, 7, **asked)
    assert plan.faults != FaultPlan.sampled(TOPOLOGY, 8, **asked).faults
    # Written down once: the same on every machine.
    assert plan.faults[0] == Fault(2, 1, Fraction(332603, 10**9), Fraction(2488051, 10**9))
    assert all(fault.at_s <= Fraction(1, 10) and fault.until_s is not None for fault in plan)
    # Another NIC more does not change what the others draw.
    more = Topology((*TOPOLOGY.servers, replace(TOPOLOGY.servers[0], name="more")))
    assert set(plan) <= set(FaultPlan.sampled(more, 7, **asked))


def test_as_many_faults_are_drawn_as_asked_for() -> None:
    topology = Topology.parse("8x8@50GB/s")
    plan = FaultPlan.sampled(topology, 1, failures_per_s=2.0, repair_s=1e-6, horizon_s=5.0)
    assert 64 * 10 * 0.8 < len(plan) < 64 * 10 * 1.2
    spans = [float(fault.until_s - fault.at_s) for fault in plan if fault.until_s is not None]
    assert sum(spans) / len(spans) == pytest.approx(1e-6, rel=0.2)


def test_draws_that_cannot_be() -> None:
    asked = {"failures_per_s": 1.0, "repair_s": 1.0, "horizon_s": 1.0}
    with pytest.raises(InputError, match="seed -1"):
        FaultPlan.sampled(TOPOLOGY, -1, **asked)
    with pytest.raises(InputError, match="repair 0"):
        FaultPlan.sampled(TOPOLOGY, 1, **(asked | {"repair_s": 0.0}))
    with pytest.raises(InputError, match="more than 4096 faults"):
        FaultPlan.sampled(TOPOLOGY, 1, failures_per_s=1e6, repair_s=1e-6, horizon_s=1.0)


def test_a_nic_keeps_its_place() -> None:
    assert FaultPlan.parse("0/0@0s").left(TOPOLOGY, Fraction(0)).servers[0].nics[0] == Nic(
        0, Fraction(50 * 10**9), Fraction(50 * 10**9), failed=True
    )
