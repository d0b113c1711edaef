"""`auto`: never much slower than the best schedule of the library, quick, and explained on request."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from optcc.cli import run
from optcc.compiler import SLOTS, choose_segments, compile_schedule
from optcc.errors import TopologyError
from optcc.experiments.schedule_record import random_rates
from optcc.passes.timetable import PORTS, Ports
from optcc.schedules.auto import choose, estimates, planning_limit_s, transfers_max
from optcc.schedules.registry import SCHEDULES
from optcc.simulate import simulate
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.plan import verify_plan

LATENCY = Fraction(5, 10**6)
FEW = ("4@50GB/s", "8@50GB/s,3=25GB/s", "6@50GB/s,2=20GB/s", "random 5, seed 1")
MANY = ("8@50GB/s", "16@50GB/s", "13@50GB/s,3=20GB/s", "16@50GB/s,1=25GB/s:50GB/s", "32@50GB/s", "random 8, seed 0")
RAGGED = (1024, 5124, 16388, 65532, 2**18, 10**6, 2**21 + 4, 3 * 10**6, 2**23 - 4, 2**24)
"""From 1 KiB to 16 MiB, most of them no multiple of anything but an element's four bytes."""
THE_PORTS: tuple[Ports, ...] = ("fifo", "fair")


def cluster(text: str) -> Topology:
    """A topology as users write it, or `random P, seed S`."""
    if not text.startswith("random"):
        return Topology.parse(text).with_latency(LATENCY)
    ranks, seed = text.removeprefix("random ").split(", seed ")
    return random_rates(int(ranks), int(seed))


def best_of_the_library(topology: Topology, size_bytes: int, ports: Ports) -> float:
    """The fastest single schedule, each with the segments that suit it best."""
    seconds = []
    for definition in SCHEDULES.values():
        if definition.collective != "allreduce":
            continue
        try:
            segments = choose_segments(definition, topology, size_bytes=size_bytes, ports=ports)
        except TopologyError:
            continue
        built = definition.build(topology, segments)
        plan = compile_schedule(built, size_bytes=size_bytes, topology=topology, ports=ports)
        seconds.append(simulate(plan, topology, model=ports).seconds)
    return min(seconds)


def over_the_best(text: str, size_bytes: int, ports: Ports) -> float:
    """What `auto` takes over what the best single schedule takes."""
    topology = cluster(text)
    chosen = choose(topology, size_bytes, ports=ports)
    return simulate(chosen.plan, topology, model=ports).seconds / best_of_the_library(topology, size_bytes, ports)


@pytest.mark.parametrize("text", FEW)
@pytest.mark.parametrize("size_bytes", [2**10, 65532, 2**19, 2**21 + 4])
def test_auto_is_within_five_percent_of_the_best_single_schedule(text: str, size_bytes: int) -> None:
    assert over_the_best(text, size_bytes, "fifo") <= 1.05


@pytest.mark.parametrize("text", FEW[:2])
@pytest.mark.parametrize("size_bytes", [2**10, 65532, 10**6])
def test_auto_is_within_five_percent_where_ports_are_fair(text: str, size_bytes: int) -> None:
    assert over_the_best(text, size_bytes, "fair") <= 1.05


@pytest.mark.slow
@pytest.mark.parametrize("text", [*FEW, *MANY])
@pytest.mark.parametrize("size_bytes", RAGGED)
def test_auto_is_within_five_percent_at_every_size(text: str, size_bytes: int) -> None:
    assert over_the_best(text, size_bytes, "fifo") <= 1.05


@pytest.mark.slow
@pytest.mark.parametrize("text", [*FEW, "8@50GB/s", "random 8, seed 0"])
@pytest.mark.parametrize("size_bytes", RAGGED)
def test_auto_is_within_five_percent_at_every_size_where_ports_are_fair(text: str, size_bytes: int) -> None:
    limit = 1.06 if text.startswith("random") else 1.05  # where few ranks' rates differ, more would have to be tried
    assert over_the_best(text, size_bytes, "fair") <= limit


@pytest.mark.parametrize("text", ["1@1GB/s", "2@1GB/s", "2x4@1GB/s,1=3/4", "1x4@1GB/s", "5@1GB/s,2=100MB/s:1GB/s"])
@pytest.mark.parametrize("size_bytes", [0, 4, 388, 2**20])
def test_what_auto_takes_is_proved(text: str, size_bytes: int) -> None:
    for ports in PORTS:
        chosen = choose(Topology.parse(text), size_bytes, ports=ports)
        assert verify_plan(chosen.plan).verdict == PROVED


def test_small_messages_take_few_steps_and_large_ones_fill_the_ports() -> None:
    topology = Topology.parse("16@50GB/s,3=25GB/s").with_latency(LATENCY)
    assert choose(topology, 4096, ports="fifo").taken.name in ("direct", "shares")
    assert choose(topology, 4096, ports="exclusive").taken.name == "recursive-doubling"
    assert choose(topology, 4096, ports="fair").taken.name in ("direct", "shares")
    large = choose(topology, 2**30, ports="fifo")
    assert (large.taken.name, large.taken.segments >= 256) == ("optimal", True)


@pytest.mark.parametrize("ports", PORTS)
@pytest.mark.parametrize("ranks", [2, 8, 64, 1024])
@pytest.mark.parametrize("exponent", [10, 20, 30])
def test_a_plan_that_is_tried_costs_no_more_than_planning_may(ports: Ports, ranks: int, exponent: int) -> None:
    """By the estimates of the candidates: of one no more than the limit, of all tried about half of it."""
    topology = Topology.parse(f"{ranks}@50GB/s,1=25GB/s").with_latency(LATENCY)
    limit_s = planning_limit_s(ranks, 2**exponent / 25e9)
    found = list(estimates(topology, 2**exponent, SLOTS[ports], ports))
    assert found
    more = 3 if ports == "fair" else 1  # no pass looks for an order of the ports
    assert max(each.transfers for each in found) <= more * max(4 * ranks, transfers_max(ranks, limit_s))
    assert planning_limit_s(8, 0) == 0.02


def test_a_long_message_may_be_planned_for_as_long_as_it_takes() -> None:
    """At 1 GB/s the same message gets more segments than at 50 GB/s."""
    segments = [
        choose(
            Topology.parse(f"4@{rate}GB/s,3={rate * 500}MB/s").with_latency(LATENCY), 2**26, ports="fifo"
        ).taken.segments
        for rate in (50, 1)
    ]
    assert segments[0] < segments[1]


def test_the_estimates_grow_with_the_size_and_name_schedules_that_exist() -> None:
    topology = Topology.parse("8@50GB/s,3=25GB/s").with_latency(LATENCY)
    small, large = (
        {(c.name, c.segments): c.estimate_s for c in estimates(topology, size, 64)} for size in (2**20, 2**21)
    )
    assert {name for name, _ in small} <= SCHEDULES.keys()
    assert all(large[each] > seconds for each, seconds in small.items())


def test_the_choice_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compile", "auto", "--topology", "4@1GB/s,1=500MB/s", "--size", "1MiB", "-o", str(tmp_path / "plan.json")]
    assert run([*words, "--explain"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("auto: ")
    assert "taken" in shown
    assert "simulated" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["simulate", "auto", "--topology", "4@1GB/s", "--size", "1MiB", "--segments", "4"],
            "--segments 4: must be left",
        ),
        (["compile", "ring", "--topology", "4@1GB/s", "--size", "8", "-o", "x", "--explain"], "--explain with ring"),
        (
            ["compile", "ring", "--topology", "4@1GB/s", "--size", "8", "-o", "x", "--ports", "x"],
            "--ports 'x': must be",
        ),
    ],
)
def test_bad_input_is_one_error(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    assert message in capsys.readouterr().err
