"""How long it takes to plan with `auto`: to choose a plan, and to choose and to verify it, as a record.

Processor time of one process on one core. What numba compiles is compiled before, on the same case (for many ranks on a
case of fewer), and is not counted. The record is a file of its own format, `optcc-planning-speed/1`. The one that
comes with the package is made by

    optcc experiment planning-speed

in less than four minutes on a core that nothing else uses.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import click
import msgspec

from optcc.compiled import compile_always
from optcc.experiments.cells import HERE, RecordCells
from optcc.experiments.record import RECORDS, Check
from optcc.experiments.recorder import Measured, RecordForm, check_times, head, record_command
from optcc.experiments.schedule_cases import random_rates
from optcc.schedules.auto import choose
from optcc.show import Card
from optcc.timing import MODELS, Model
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.plan import verify_plan

REPEATS = {8: 9, 64: 5, 256: 1, 1024: 1}
"""Ranks, and how often a case of so many is repeated."""
SIZES = tuple(2**exponent for exponent in range(12, 27, 2))
"""From 4 KiB to 64 MiB."""
MANY_RANKS, MANY_RANKS_SIZES = 256, (2**12, 2**19, 2**26)
"""With so many ranks, only these sizes."""
RATES = ("one straggler", "random rates")
SEED = 1
LATENCY_S = Fraction(5, 10**6)


class PlanningTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One case: what was chosen, and the processor seconds of choosing, and of choosing and verifying, each time."""

    ranks: int
    rates: str
    ports: str
    size_bytes: int
    schedule: str
    segments: int
    transfers: int
    choose_s: list[float]
    planned_s: list[float]


@dataclass(frozen=True, slots=True)
class PlanningSpeed(Measured):
    """The rows, the machine and the versions."""

    format: ClassVar[str] = "optcc-planning-speed/1"
    own_path: ClassVar[Path] = RECORDS / "planning-speed.json"
    docs_page: ClassVar[str] = "schedules.md"

    machine: dict[str, Any]
    versions: dict[str, str]
    rows: tuple[PlanningTiming, ...]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.rows):
            check_times(check, f"rows[{number}].choose_s", row.choose_s)
            check_times(check, f"rows[{number}].planned_s", row.planned_s)

    def card(self) -> Card:
        rows = []
        for ranks, ports in dict.fromkeys((row.ranks, row.ports) for row in self.rows):
            some = [row for row in self.rows if (row.ranks, row.ports) == (ranks, ports)]
            medians = [[statistics.median(each) for each in (row.choose_s, row.planned_s)] for row in some]
            rows.append(
                (
                    str(ranks),
                    ports,
                    *(_shown(statistics.median(column)) for column in zip(*medians, strict=True)),
                    *(_shown(max(column)) for column in zip(*medians, strict=True)),
                    _shown(max(max(row.planned_s) for row in some)),
                )
            )
        chosen = ("chosen", "and verified")
        columns = ("ranks", "ports", *chosen, *(f"{each}, slowest case" for each in chosen), "slowest time of all")
        return Card("processor time of a plan with auto", columns, tuple(rows))


def _shown(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def cluster(ranks: int, rates: str) -> Topology:
    """The topology of so many ranks with `rates`, one of `RATES`."""
    if rates == RATES[0]:
        return Topology.parse(f"{ranks}@50GB/s,3=25GB/s").with_latency(LATENCY_S)
    return random_rates(ranks, SEED)


def run_case(ranks: int, rates: str, ports: Model, size_bytes: int, repeats: int) -> PlanningTiming:
    """Plans a case `repeats` times in this process."""
    topology = cluster(ranks, rates)
    warm = topology if ranks < MANY_RANKS else cluster(64, rates)
    compile_always()
    verify_plan(choose(warm, size_bytes, ports=ports).plan)
    choose_s, planned_s = [], []
    for _ in range(repeats):
        started = time.process_time()
        chosen = choose(topology, size_bytes, ports=ports)
        choose_s.append(time.process_time() - started)
        assert verify_plan(chosen.plan).verdict == PROVED
        planned_s.append(time.process_time() - started)
    taken, transfers = chosen.taken, len(chosen.plan.transfers)
    return PlanningTiming(ranks, rates, ports, size_bytes, taken.name, taken.segments, transfers, choose_s, planned_s)


def measure(ranks: Sequence[int] = tuple(REPEATS), cells: RecordCells = HERE) -> PlanningSpeed:
    """All cases of so many `ranks`, each one of `REPEATS`."""
    units = {
        f"{p} ranks, {rates}, {ports}, {size_bytes} B": partial(run_case, p, rates, ports, size_bytes, REPEATS[p])
        for p in ranks
        for ports in MODELS
        for rates in RATES
        for size_bytes in (SIZES if p < MANY_RANKS else MANY_RANKS_SIZES)
    }
    return PlanningSpeed(**head(), rows=tuple(cells.each(units, PlanningTiming)))


@record_command(PlanningSpeed, RecordForm(quick={"ranks": (8,)}))
@click.option("--ranks", multiple=True, type=click.Choice(tuple(REPEATS)), help="Only cases of so many ranks.")
def command(ranks: tuple[int, ...], cells: RecordCells) -> PlanningSpeed:
    """Measure how long planning takes, and write the record."""
    return measure(ranks or tuple(REPEATS), cells)
