"""How fast the tools themselves are: verifying, simulating and sweeping large schedules, as a record.

Every case runs in a process of its own, so that its peak memory is its own; what numba compiles is compiled before, on
a small case, and is not counted. The record is a file of its own format, `optcc-tool-speed/1`. The one that comes with
the package is made by

    optcc experiment tool-speed

in about three minutes on one core. What others take is in docs/performance.md.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, get_args

import click
import msgspec

from optcc.compiled import compile_always
from optcc.compiler import compile_schedule
from optcc.dsl import Moves
from optcc.errors import InputError
from optcc.experiments.cells import HERE, RecordCells
from optcc.experiments.made import PLANNED_ROOMS
from optcc.experiments.record import RECORDS, Check
from optcc.experiments.recorder import Measured, RecordForm, check_times, head, record_command, run_command
from optcc.plan import Plan
from optcc.schedule import SegmentShape
from optcc.schedules.registry import SCHEDULES
from optcc.show import Card
from optcc.simulate import simulate
from optcc.static_order import SerialModel, StaticOrderClock, time_static_order
from optcc.topology import Topology
from optcc.verify.plan.report import Questions, judge

REPEATS = 3
CASE_TIMEOUT_S = 600


class ToolTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One case: what it works on, what it took in each repetition, and the peak memory of its process."""

    case: str
    transfers: int
    seconds: list[float]
    peak_bytes: int

    @property
    def median_s(self) -> float:
        """The median of the repetitions."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class ToolSpeed(Measured):
    """The rows, the machine and the versions."""

    format: ClassVar[str] = "optcc-tool-speed/1"
    own_path: ClassVar[Path] = RECORDS / "tool-speed.json"
    rooms: ClassVar[tuple[str, ...]] = PLANNED_ROOMS
    docs_page: ClassVar[str] = "performance.md"

    machine: dict[str, Any]
    versions: dict[str, str]
    rows: tuple[ToolTiming, ...]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.rows):
            check_times(check, f"rows[{number}].seconds", row.seconds)

    def card(self) -> Card:
        rows = tuple(
            (
                row.case,
                f"{row.transfers:,}",
                f"{row.median_s:.2f} s",
                f"{row.transfers / row.median_s / 1e6:.1f} M/s",
                f"{row.peak_bytes / 2**20:.0f} MiB",
            )
            for row in self.rows
        )
        return Card("the tools' speed, one core", ("case", "transfers", "median", "transfers", "peak memory"), rows)


def _slow_one(ranks: int) -> Topology:
    return Topology.parse(f"{ranks}@50GB/s,3=25GB/s").with_latency(Fraction(5, 10**6))


def _plan(name: str, ranks: int, segments: int, timetable: bool = True) -> Plan:
    topology = _slow_one(ranks)
    return compile_schedule(
        SCHEDULES[name].build(topology, segments), size_bytes=2**30, topology=topology if timetable else None
    )


Work = Callable[[], int]


def _verifying(name: str, ranks: int, segments: int) -> Work:
    plan = _plan(name, ranks, segments, timetable=ranks <= 256)
    questions = Questions(SCHEDULES[name].build(_slow_one(ranks), segments))

    def work() -> int:
        assert judge(plan, questions).verdict.exit_code == 0
        return len(plan.transfers)

    return work


def _simulating(ranks: int, model: Any) -> Work:
    plan = _plan("ring", ranks, 1, timetable=False)

    def work() -> int:
        simulate(plan, _slow_one(ranks), model=model)
        return len(plan.transfers)

    return work


def _sweeping(ranks: int, model: SerialModel) -> Work:
    return lambda: time_static_order(SCHEDULES["ring"], _slow_one(ranks), size_bytes=2**30, model=model).transfers


def _sweeping_alone(ranks: int, model: SerialModel) -> Work:
    topology = _slow_one(ranks)
    written: list[tuple[Moves, Sequence[SegmentShape], int]] = []
    SCHEDULES["ring"].stream(topology, 1, lambda *given: written.append(given))

    def work() -> int:
        clock = StaticOrderClock(topology, 2**30, "float32", model)
        for given in written:
            clock.take(*given)
        return clock.result().transfers

    return work


def _compiling(name: str, ranks: int, segments: int) -> Work:
    return lambda: len(_plan(name, ranks, segments).transfers)


CASES: dict[str, tuple[Callable[..., Work], tuple[Any, ...], tuple[Any, ...]]] = {
    "verify ring, 256 ranks": (_verifying, ("ring", 256, 1), ("ring", 4, 1)),
    "verify OptCC, 64 ranks, 16 segments": (_verifying, ("optcc", 64, 16), ("optcc", 4, 2)),
    "verify optimal, 64 ranks, 512 segments": (_verifying, ("optimal", 64, 512), ("optimal", 4, 2)),
    "verify ring, 1024 ranks": (_verifying, ("ring", 1024, 1), ("ring", 4, 1)),
    "compile ring, 256 ranks": (_compiling, ("ring", 256, 1), ("ring", 4, 1)),
    "compile optimal, 64 ranks, 512 segments": (_compiling, ("optimal", 64, 512), ("optimal", 4, 2)),
    **{
        f"simulate ring, 1024 ranks, {model}": (_simulating, (1024, model), (4, model))
        for model in ("fifo", "exclusive")
    },
    "simulate ring, 256 ranks, fair": (_simulating, (256, "fair"), (4, "fair")),
    **{
        f"sweep ring with its DSL, {ranks} ranks, {model}": (_sweeping, (ranks, model), (4, model))
        for ranks in (1024, 4096)
        for model in get_args(SerialModel)
    },
    "sweep ring with its DSL, 16384 ranks, fifo": (_sweeping, (16384, "fifo"), (4, "fifo")),
    **{
        f"sweep ring written before, {ranks} ranks, {model}": (_sweeping_alone, (ranks, model), (4, model))
        for ranks in (1024, 4096)
        for model in get_args(SerialModel)
    },
}
"""For each case: the function that prepares its work, its arguments, and arguments of a small case that compiles all
kernels."""


def run_case(name: str) -> ToolTiming:
    """Runs one case in this process."""
    make, arguments, small = CASES[name]
    compile_always()
    make(*small)()
    work = make(*arguments)
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        transfers = work()
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return ToolTiming(name, transfers, seconds, peak)


def measure(names: list[str], cells: RecordCells = HERE) -> ToolSpeed:
    """Runs the cases, each in a process of its own.

    Raises InputError for a case that does not exist, CodecError if one did not print its row.
    """
    for name in names:
        if name not in CASES:
            raise InputError(f"case {name!r}: must be one of {', '.join(CASES)}")
    rows = cells.each({name: partial(_measure, name) for name in names}, ToolTiming)
    return ToolSpeed(**head(), rows=tuple(rows))


def _measure(name: str) -> ToolTiming:
    command = [sys.executable, "-m", "optcc.experiments.tool_speed", "--one", name]
    done = subprocess.run(command, check=True, capture_output=True, timeout=CASE_TIMEOUT_S)
    return msgspec.json.decode(done.stdout, type=ToolTiming)


@record_command(ToolSpeed, RecordForm(quick={"names": tuple(CASES)[:1]}, part="one"))
@click.option("--one", help="Run this case here and print its row.")
@click.option("--case", "names", multiple=True, help="Only these cases.")
def command(one: str | None, names: tuple[str, ...], cells: RecordCells) -> ToolSpeed | None:
    """Measure the tools' speed and write the record."""
    if one is not None:
        click.echo(msgspec.json.encode(run_case(one)).decode())
        return None
    return measure(list(names) or list(CASES), cells)


if __name__ == "__main__":
    run_command(command)
