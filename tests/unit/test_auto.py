"""`auto`: never much slower than the best schedule of the library, quick, and explained on request."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from optcc.cli import run
from optcc.compiler import choose_segments, compile_schedule
from optcc.errors import TopologyError
from optcc.schedules.auto import choose, estimates
from optcc.schedules.registry import SCHEDULES
from optcc.simulate import simulate
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.plan import verify_plan

LATENCY = Fraction(5, 10**6)


def best_of_the_library(topology: Topology, size_bytes: int) -> float:
    """The fastest single schedule, each with the segments that suit it best."""
    seconds = []
    for definition in SCHEDULES.values():
        if definition.collective != "allreduce":
            continue
        try:
            segments = choose_segments(definition, topology, size_bytes=size_bytes, ports="fifo")
        except TopologyError:
            continue
        built = definition.build(topology, segments)
        plan = compile_schedule(built, size_bytes=size_bytes, topology=topology, ports="fifo")
        seconds.append(simulate(plan, topology).seconds)
    return min(seconds)


@pytest.mark.parametrize("text", ["4@50GB/s", "8@50GB/s,3=25GB/s", "6@50GB/s,2=20GB/s"])
@pytest.mark.parametrize("size_bytes", [2**10, 2**16, 2**19, 2**21, 2**24])
def test_auto_is_within_five_percent_of_the_best_single_schedule(text: str, size_bytes: int) -> None:
    topology = Topology.parse(text).with_latency(LATENCY)
    chosen = choose(topology, size_bytes, ports="fifo")
    assert simulate(chosen.plan, topology).seconds <= 1.05 * best_of_the_library(topology, size_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["8@50GB/s", "16@50GB/s", "13@50GB/s,3=20GB/s", "16@50GB/s,1=25GB/s:50GB/s", "32@50GB/s"]
)
@pytest.mark.parametrize("exponent", range(10, 25))
def test_auto_is_within_five_percent_at_every_size(text: str, exponent: int) -> None:
    topology = Topology.parse(text).with_latency(LATENCY)
    chosen = choose(topology, 2**exponent, ports="fifo")
    assert simulate(chosen.plan, topology).seconds <= 1.05 * best_of_the_library(topology, 2**exponent)


@pytest.mark.parametrize("text", ["1@1GB/s", "2@1GB/s", "2x4@1GB/s,1=3/4", "1x4@1GB/s", "5@1GB/s,2=100MB/s:1GB/s"])
@pytest.mark.parametrize("size_bytes", [0, 4, 388, 2**20])
def test_what_auto_takes_is_proved(text: str, size_bytes: int) -> None:
    for ports in ("fifo", "exclusive"):
        chosen = choose(Topology.parse(text), size_bytes, ports=ports)
        assert verify_plan(chosen.plan).verdict == PROVED


def test_small_messages_take_few_steps_and_large_ones_fill_the_ports() -> None:
    topology = Topology.parse("16@50GB/s,3=25GB/s").with_latency(LATENCY)
    assert choose(topology, 4096, ports="fifo").taken.name == "direct"
    assert choose(topology, 4096, ports="exclusive").taken.name == "recursive-doubling"
    large = choose(topology, 2**30, ports="fifo")
    assert (large.taken.name, large.taken.segments >= 256) == ("optimal", True)


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
