"""Simulated times of schedules over the bound, the fault-free ring and their own formulas, as a record.

Cases are made in `schedule_cases`. All but the planning seconds, and what did not fit into memory, is the same on every
machine. The record is a file of its own format, `optcc-schedules/2`; rationals are text, "a/b" in lowest terms. The one
that comes with the package is made by

    optcc experiment schedule-ratios --jobs 2

with the cheap cases first; what is done is kept beside the file, `--resume` goes on with it, and `--resume --finish`
makes a record of it as it is, in which the rest is listed as not run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import click
import msgspec

from optcc.errors import InputError
from optcc.experiments.cells import HERE, RecordCells
from optcc.experiments.made import PLANNED_ROOMS
from optcc.experiments.record import (
    RECORDS,
    decode,
    lines_of,
    rational,
    text_of,
    these_versions,
    this_machine,
)
from optcc.experiments.recorder import Answer, RecordForm, record_command
from optcc.experiments.schedule_cases import (
    FULL,
    LATENCY_S,
    QUICK,
    RATE,
    SIZE_BYTES,
    NotRun,
    SchedulePlan,
    ScheduleRatio,
    UnitResult,
    left_out,
    one_straggler,
    units,
    work_unit,
)
from optcc.show import Card
from optcc.simulate import MODELS
from optcc.topology import RANKS_MAX
from optcc.verify.bounds.closed_forms import collective_bound
from optcc.verify.bounds.predictions import fault_free, predictions

TITLE = "Schedules in simulation against the bound: one straggler, and random rates"
COLUMNS = ("lost", "ring", "r2ccl-allreduce", "optcc", "bound")
"""Of a curve: the share of its rate that the straggler lost, and formulas over the fault-free ring."""
GRID = 64
OPTIMAL = (("optimal", "fifo"), ("shares", "fair"))
"""The schedule and the ports of that."""
FORMULA_GOAL = Fraction(1, 100)
"""OptCC's time is to differ from its own formula by at most this share."""
_ROUNDING = 1e-9
"""Simulated seconds are floats; they may be this share below an exact bound that they reach."""


class FormulaCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Formulas for one straggler of `ranks`: rows of `COLUMNS` in rising order of what is lost."""

    ranks: int
    points: tuple[tuple[Fraction, ...], ...]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    title: str
    command: tuple[str, ...]
    size_bytes: int
    rate: Fraction
    latency_s: Fraction
    machine: dict[str, Any]
    versions: dict[str, str]
    columns: tuple[str, ...]
    curves: tuple[FormulaCurve, ...]
    cases: tuple[ScheduleRatio, ...]
    not_run: tuple[NotRun, ...]


@dataclass(frozen=True)
class ScheduleRatios(Answer):
    """The record: how, where and with what it was made, the formulas' curves, the simulated cases, what was not run."""

    format: ClassVar[str] = "optcc-schedules/2"
    own_path: ClassVar[Path] = RECORDS / "schedule-ratios.json"
    rooms: ClassVar[tuple[str, ...]] = PLANNED_ROOMS
    is_dated: ClassVar[bool] = False

    title: str
    command: tuple[str, ...]
    size_bytes: int
    rate: Fraction
    latency_s: Fraction
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    curves: tuple[FormulaCurve, ...]
    cases: tuple[ScheduleRatio, ...]
    not_run: tuple[NotRun, ...]

    def select(self, schedule: str, model: str = "fifo", *, straggler: bool) -> tuple[ScheduleRatio, ...]:
        """The cases of a schedule under a port model: those with one straggler, or those of random rates."""
        return tuple(
            case
            for case in self.cases
            if case.schedule == schedule and case.model == model and (case.slowdown is not None) == straggler
        )

    def remarks(self) -> tuple[str, ...]:
        return (*map(str, self.not_run), *self.misses())

    def misses(self) -> tuple[str, ...]:
        """Every case in which `optimal` (or, under fair ports, `shares`) is further above the bound, or OptCC further
        from its formula, than its goal, under fifo and under fair ports."""
        found = []
        for case in self.cases:
            if (case.schedule, case.model) in OPTIMAL and case.over_bound > case.goal:
                found.append(f"{case}: {case.over_bound:.4f} of the bound, goal {float(case.goal):.2f}")
            off = case.over_formula if case.schedule == "optcc" and case.model != "exclusive" else None
            if off is not None and abs(off - 1) > FORMULA_GOAL:
                goal = float(FORMULA_GOAL)
                found.append(f"{case}: {off:.4f} of its formula, goal {1 - goal:.2f} to {1 + goal:.2f}")
        return tuple(found)

    def card(self) -> Card:
        rows = tuple(
            (
                case.schedule,
                str(case.ranks),
                f"seed {case.seed}" if case.slowdown is None else str(case.slowdown),
                case.model,
                str(case.segments),
                f"{case.seconds:.6g}",
                f"{case.over_bound:.4f}",
                f"{case.over_fault_free:.4f}",
                "-" if case.over_formula is None else f"{case.over_formula:.4f}",
                f"{case.planning_s:.2g}",
            )
            for case in self.cases
        )
        columns = ("schedule", "p", "l", "ports", "segments", "time (s)", "/ T*", "/ T_ff", "/ formula", "planning (s)")
        return Card(self.title, columns, rows)

    def to_bytes(self) -> bytes:
        """The record as a file, a line for each curve, each case and each plan that was not run."""
        head = {
            "format": self.format,
            "title": self.title,
            "command": self.command,
            "size_bytes": self.size_bytes,
            "rate": self.rate,
            "latency_s": self.latency_s,
            "machine": self.machine,
            "versions": self.versions,
            "columns": COLUMNS,
        }
        lists = {name: getattr(self, name) for name in ("curves", "cases", "not_run")}
        return lines_of(*(msgspec.to_builtins(each, enc_hook=text_of) for each in (head, lists)))

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "") -> ScheduleRatios:
        file, check = decode(data, name, _File, cls.format, rational)
        check("columns", file.columns, file.columns == COLUMNS, f"be {list(COLUMNS)}")
        check("size_bytes", file.size_bytes, file.size_bytes > 0, "be above zero")
        check("rate", str(file.rate), file.rate > 0, "be above zero")
        for number, curve in enumerate(file.curves):
            field = f"curves[{number}]"
            check(f"{field}.ranks", curve.ranks, 3 <= curve.ranks <= RANKS_MAX, f"be from 3 to {RANKS_MAX}")
            check(f"{field}.points", len(curve.points), len(curve.points) > 1, "be at least two")
            for place, point in enumerate(curve.points):
                where, shown = f"{field}.points[{place}]", [str(each) for each in point]
                check(where, shown, len(point) == len(COLUMNS), f"be {len(COLUMNS)} numbers")
                check(where, shown, point[0] < 1, "start with what is lost, below 1")
                check(where, shown, 1 <= point[-1] <= min(point[1:]), "end with the bound: 1 or more, the least")
            rising = all(one[0] < other[0] for one, other in pairwise(curve.points))
            check(f"{field}.points", [str(point[0]) for point in curve.points], rising, "rise")
        sizes = [curve.ranks for curve in file.curves]
        check("curves", sizes, len(set(sizes)) == len(sizes), "be of different ranks")
        keys = set()
        for number, case in enumerate(file.cases):
            field = f"cases[{number}]"
            check(f"{field}.schedule", case.schedule, bool(case.schedule), "be a name")
            check(f"{field}.ranks", case.ranks, 2 <= case.ranks <= RANKS_MAX, f"be from 2 to {RANKS_MAX}")
            one = (case.slowdown is None) != (case.seed is None)
            check(f"{field}.slowdown", str(case.slowdown), one, "be given, or seed, and not both")
            slow = case.slowdown is None or case.slowdown >= 1
            check(f"{field}.slowdown", str(case.slowdown), slow, "be at least 1")
            check(f"{field}.model", case.model, case.model in MODELS, f"be one of {', '.join(MODELS)}")
            check(f"{field}.segments", case.segments, case.segments in case.tried, "be one of those tried")
            check(f"{field}.transfers", case.transfers, case.transfers > 0, "be above zero")
            check(f"{field}.fault_free", str(case.fault_free), case.fault_free > 0, "be above zero")
            check(f"{field}.bound", str(case.bound), case.bound > 0, "be above zero")
            possible = float(case.bound) * (1 - _ROUNDING) <= case.seconds < math.inf
            check(f"{field}.seconds", case.seconds, possible, f"be at least the bound, {float(case.bound)!r}")
            check(f"{field}.planning_s", case.planning_s, 0 <= case.planning_s < math.inf, "not be negative")
            key = (case.schedule, case.ranks, case.slowdown, case.seed, case.model)
            check(field, str(case), key not in keys, "be there once")
            keys.add(key)
        return cls(
            file.title,
            file.command,
            file.size_bytes,
            file.rate,
            file.latency_s,
            file.machine,
            file.versions,
            file.curves,
            file.cases,
            file.not_run,
        )


def curve(ranks: int, lost_max: Fraction) -> FormulaCurve:
    """The formulas at multiples of 1/`GRID` of lost bandwidth up to `lost_max`, and where OptCC and the bound bend."""
    shares = {Fraction(step, GRID) for step in range(GRID) if Fraction(step, GRID) <= lost_max}
    bend = 1 - 1 / (2 - Fraction(1, ranks - 1))
    if bend <= lost_max:
        shares.add(bend)
    points = []
    for lost in sorted(shares):
        topology = one_straggler(ranks, 1 / (1 - lost))
        unit = fault_free(topology, SIZE_BYTES)
        formulas = {each.schedule: each.seconds for each in predictions(topology, SIZE_BYTES)}
        formulas["bound"] = collective_bound(topology, SIZE_BYTES).seconds
        values = [formulas[name] for name in COLUMNS[1:]]
        points.append((lost, *(value / unit for value in values if value is not None)))
    return FormulaCurve(ranks, tuple(points))


def make(
    study: SchedulePlan, command: tuple[str, ...], cells: RecordCells = HERE, *, finish: bool = False
) -> ScheduleRatios:
    """Simulates everything in `study`, the cheap units first; `command` is what made the record.

    All workers together, and one more like them, have the machine's memory. With `finish` nothing more is simulated
    than is done, and the rest is listed as not run; raises InputError if nothing is done.
    """
    machine = this_machine()
    wanted = {str(unit): unit for unit in units(study, machine["memory_bytes"] // (cells.workers.count + 1))}
    cheap_first = dict(sorted(wanted.items(), key=lambda each: each[1].effort))
    if finish:
        if not cells.done:
            raise InputError("--finish: must come with --resume, and with an unfinished record beside FILE")
        cells.leaves_partial = True
        cheap_first = {name: unit for name, unit in cheap_first.items() if name in cells.done}
    done = cells.spread(cheap_first, work_unit, UnitResult)
    outcomes = [done[name] if name in done else left_out(unit) for name, unit in wanted.items()]
    lost_max = 1 - 1 / max(study.slowdowns)
    return ScheduleRatios(
        TITLE,
        command,
        SIZE_BYTES,
        RATE,
        LATENCY_S,
        machine,
        these_versions(),
        tuple(curve(ranks, lost_max) for ranks in study.ranks),
        tuple(case for outcome in outcomes for case in outcome.cases),
        tuple(each for outcome in outcomes for each in outcome.not_run),
    )


@record_command(ScheduleRatios, RecordForm(quick={}, spreads=True, beside=("finish",)))
@click.option("--finish", is_flag=True, help="With --resume: a record of what is done, in which the rest is not run.")
def command(quick: bool, finish: bool, cells: RecordCells) -> ScheduleRatios:
    """Simulate the schedules, and list where goals are missed; quick: few cases and few segments."""
    words = ("optcc", "experiment", "schedule-ratios", *(("--quick",) if quick else ()))
    return make(QUICK if quick else FULL, words, cells, finish=finish)
