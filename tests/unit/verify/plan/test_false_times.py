"""Claims of a time that a plan does not keep, each by another trick: none is proved, or the condition names the time.

A claim that is proved holds for the simulator too, or its condition says how much longer that takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import pytest

from optcc.compiler import compile_schedule
from optcc.errors import InputError, OptccError
from optcc.plan import Plan
from optcc.planner import build
from optcc.simulate import simulate
from optcc.timing import Model
from optcc.topology import Topology
from optcc.units import parse_time, show_time
from optcc.verdict import PROVED, REFUTED, UNKNOWN
from optcc.verify.bounds.certified import least_seconds
from optcc.verify.plan.report import Questions, Report, judge
from optcc.verify.plan.timing import exact_makespan
from tests.negative.edits import Draft

SIZE = 180_000
EQUAL, SLOW = "6@1GB/s", "6@1GB/s,5=300MB/s"


class Claim(NamedTuple):
    """`plan` takes at most `promise_s`, or `within` times the bound, on `topology`."""

    plan: Plan
    topology: Topology
    promise_s: Fraction | None = None
    within: Fraction | None = None
    model: Model = "exclusive"

    def judge(self) -> Report:
        return judge(self.plan, Questions(None, self.topology, self.model, self.within, self.promise_s))


def made(name: str = "ring", topology: str = EQUAL, *, slots: int = 1, segments: int = 2, size: int = SIZE) -> Plan:
    return build(name, Topology.parse(topology), size, slots=slots, segments=segments, ports="exclusive").plan


def time_of(plan: Plan, topology: Topology | str, model: Model = "exclusive") -> Fraction:
    found = Topology.parse(topology) if isinstance(topology, str) else topology
    assert model != "fair"
    return exact_makespan(plan, found, model=model).seconds


def on(topology: str, latency_s: str = "0s") -> Topology:
    return Topology.parse(topology).with_latency(parse_time(latency_s))


def borrowed(plan: Plan, faster: str | Topology, slower: str | Topology, model: Model = "exclusive") -> Claim:
    """The time on one topology, claimed for another."""
    place = Topology.parse(slower) if isinstance(slower, str) else slower
    return Claim(plan, place, time_of(plan, faster), model=model)


def two_slots(name: str, topology: str, slots: int) -> Claim:
    plan = made(name, topology, slots=slots)
    return Claim(plan, Topology.parse(topology), time_of(plan, topology))


def below(part: Fraction, topology: str = SLOW, name: str = "optcc") -> Claim:
    plan = made(name, topology)
    return Claim(plan, Topology.parse(topology), time_of(plan, topology) * (1 - part))


def factor(part: Fraction, name: str = "ring") -> Claim:
    plan, topology = made(name, SLOW), Topology.parse(SLOW)
    bound = least_seconds(topology, SIZE, plan.collective)
    return Claim(plan, topology, within=time_of(plan, topology) / bound * (1 - part))


def wrong_plan() -> Claim:
    draft = Draft.of(made())
    next(row for lane in draft.lanes for row in lane if "reduce" in row.name).dst_offset += 4
    return Claim(draft.build(), Topology.parse(EQUAL), Fraction(1))


def without_waiting() -> Claim:
    """No instruction waits for another: faster, and a race."""
    plan = made()
    return Claim(replace(plan, after=type(plan.after).empty(len(plan))), Topology.parse(EQUAL), Fraction(1))


ATTACKS: dict[str, Callable[[], Claim]] = {
    "two slots, in the lanes' order": lambda: two_slots("shares", EQUAL, 2),
    "two slots, one rank slow": lambda: two_slots("optimal", SLOW, 2),
    "three slots": lambda: two_slots("shares", SLOW, 3),
    "many slots": lambda: two_slots("direct", EQUAL, 5),
    "the time without latency": lambda: borrowed(made(), EQUAL, on(EQUAL, "5us")),
    "a tenth of the latency": lambda: borrowed(made(), on(EQUAL, "500ns"), on(EQUAL, "5us")),
    "the time without the straggler": lambda: borrowed(made(), EQUAL, SLOW),
    "another straggler": lambda: borrowed(made("optcc", SLOW), SLOW, "6@1GB/s,0=300MB/s"),
    "out for in": lambda: borrowed(made(), "6@1GB/s,2=1GB/s:2GB/s", "6@1GB/s,2=1GB/s:200MB/s"),
    "in for out": lambda: borrowed(made(), "6@1GB/s,2=2GB/s:1GB/s", "6@1GB/s,2=200MB/s:1GB/s"),
    "every GPU with NICs of its own": lambda: borrowed(made(topology="8@1GB/s"), "8@8GB/s", "2x4@1GB/s"),
    "surviving NICs taken for all": lambda: borrowed(made("hierarchical", "2x4@8GB/s"), "2x4@8GB/s", "2x4@8GB/s,1=1/4"),
    "exclusive ports, served first in first out": lambda: borrowed(made("shares"), EQUAL, EQUAL, "fifo"),
    "exclusive ports, shared fairly": lambda: borrowed(made("shares"), EQUAL, EQUAL, "fair"),
    "a promise that is short by 2^-80": lambda: below(Fraction(1, 2**80)),
    "a promise rounded down to a float": lambda: below(Fraction(1, 2**54), "6@3GB/s,1=700MB/s"),
    "a promise short by half": lambda: below(Fraction(1, 2)),
    "a promise of nothing": lambda: below(Fraction(1)),
    "a factor that is short by 2^-80": lambda: factor(Fraction(1, 2**80)),
    "the bound of an AllGather": lambda: Claim(made(), Topology.parse(EQUAL), within=Fraction(1, 2)),
    "times beyond 64 bits": lambda: borrowed(made(size=6 * 2**40, segments=1), "6@1GB/s", "6@1B/s"),
    "rates without a common tick": lambda: borrowed(
        made(), EQUAL, "6@999999937B/s,1=999999929B/s,2=999999893B/s,3=999999883B/s,4=999999797B/s,5=999999761B/s"
    ),
    "ports that lanes share": lambda: borrowed(made("hierarchical", "2x4@1GB/s"), "2x4@2GB/s", "2x4@1GB/s"),
    "a plan that is wrong": wrong_plan,
    "a plan that waits for nothing": without_waiting,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_time_that_is_not_kept_is_not_proved_or_named(name: str) -> None:
    claim = ATTACKS[name]()
    report = claim.judge()
    verdict = report.verdict
    if verdict.properties["agreement"] != PROVED:
        assert verdict.properties["timing"] == UNKNOWN and verdict.exit_code == 1
        return
    needed = simulate(claim.plan, claim.topology, model=claim.model).seconds
    bound = least_seconds(claim.topology, claim.plan.size_bytes, claim.plan.collective)
    claimed = claim.promise_s if claim.within is None else claim.within * bound
    assert claimed is not None
    if verdict.properties["timing"] == REFUTED:
        assert report.makespan is not None and report.makespan.seconds > claimed and verdict.exit_code == 1
        return
    said = dict(verdict.conditions)["timing"]
    slots = max(channel.slots for channel in claim.plan.channels)
    assert said.startswith(f"{claim.model} ports") and f"{slots} slots" in said and repr(claim.topology) in said
    latency = float(claim.topology.latency_s)
    assert (f"{show_time(latency)} latency" if latency else "no latency") in said
    if needed > float(claimed) * (1 + 1e-9):
        assert said.endswith(f"; if ports serve what is ready first (optcc simulate), {show_time(needed)}")


def test_most_are_refuted_and_some_are_named() -> None:
    """So the test above does not pass by never reaching its cases."""
    assert len(ATTACKS) >= 20
    verdicts = {name: attack().judge().verdict.properties["timing"] for name, attack in ATTACKS.items()}
    counts = [list(verdicts.values()).count(each) for each in (REFUTED, PROVED, UNKNOWN)]
    assert counts[0] >= 14 and counts[1] >= 1 and counts[2] == 2, verdicts
    named = [name for name in verdicts if verdicts[name] == PROVED]
    said = {name: dict(ATTACKS[name]().judge().verdict.conditions)["timing"] for name in named}
    assert any("what is ready first" in text for text in said.values()), said


def test_what_has_no_exact_time_is_no_claim() -> None:
    """Uplinks, rails apart, other ranks, and times that are none, are refused in one line."""
    plan = made()
    for topology in ("6@1GB/s/3:200MB/s", "5@1GB/s", "7@1GB/s"):
        with pytest.raises(OptccError):
            Claim(plan, Topology.parse(topology), Fraction(1)).judge()
    with pytest.raises(InputError, match="must not be negative"):
        Claim(plan, Topology.parse(EQUAL), Fraction(-1)).judge()
    for text in ("nan", "-1s", "inf", "1", ""):
        with pytest.raises(InputError):
            parse_time(text)


def test_an_empty_plan_keeps_a_promise_of_nothing() -> None:
    plan = compile_schedule(build("ring", Topology.parse("2@1GB/s"), 8).schedule, size_bytes=0)
    report = Claim(plan, Topology.parse("2@1GB/s"), Fraction(0)).judge()
    assert report.verdict.properties["timing"] == PROVED
