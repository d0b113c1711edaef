"""What schedules take in simulation, held against the bound, the fault-free ring and their own formulas, as a record.

Two kinds of clusters: one straggler, slowed down l times; and rates drawn at random, out and in apart, from a seed.
A plan is compiled for the port model under which it is simulated (`shares` is what `optimal` is where ports are fair),
with the best of a few powers of two of segments; each case says which were tried. What did not fit into memory is
listed as not run, with the reason. All but that and the planning seconds is the same on every machine. The record is a
file of its own format, `optcc-schedules/2`; rationals are text, "a/b" in lowest terms. The one that comes with the
package is made by

    python -m optcc.experiments.schedule_record --jobs 2

with the cheap cases first; what is done is kept beside the file, `--resume` goes on with it, and `--finish` makes a
record of it as it is, in which the rest is listed as not run.
"""

from __future__ import annotations

import hashlib
import math
import random
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import click
import msgspec

from optcc.compiler import compile_schedule
from optcc.errors import CodecError, InputError, OptccError
from optcc.experiments.record import (
    RECORDS,
    Recorded,
    decode,
    lines_of,
    rational,
    text_of,
    these_versions,
    this_machine,
)
from optcc.experiments.study_units import JOBS_MAX, Partial, Report, complete, quiet
from optcc.passes.timetable import Ports
from optcc.schedules.optcc_timetable import ClosedForm
from optcc.schedules.registry import SCHEDULES
from optcc.show import Card, Shown
from optcc.simulate import MODELS, simulate
from optcc.topology import RANKS_MAX, Nic, Server, Topology
from optcc.verify.bounds.closed_forms import collective_bound
from optcc.verify.bounds.predictions import fault_free, predictions

TITLE = "Schedules in simulation against the bound: one straggler, and random rates"
SIZE_BYTES = 2**30
RATE = Fraction(50 * 10**9)
"""Bytes/s of a healthy endpoint each way."""
LATENCY_S = Fraction(5, 10**6)
COLUMNS = ("lost", "ring", "r2ccl-allreduce", "optcc", "bound")
"""Of a curve: the share of its rate that the straggler lost, and formulas over the fault-free ring."""
GRID = 64
GOALS = {"straggler": Fraction(102, 100), "random": Fraction(103, 100), "many ranks": Fraction(105, 100)}
"""Above so many times the bound, `optimal` misses its goal, under fifo ports and, as `shares`, under fair ones."""
OPTIMAL = (("optimal", "fifo"), ("shares", "fair"))
"""The schedule and the ports of that."""
OTHER_PORTS: Mapping[str, tuple[Ports, ...]] = {"optcc": ("exclusive", "fair"), "optimal": ("exclusive",)}
"""Under which ports besides fifo a schedule is simulated with one straggler."""
MANY_RANKS = 256
FORMULA_GOAL = Fraction(1, 100)
"""OptCC's time is to differ from its own formula by at most this share."""
NO_TIME = "the record was finished before"
"""Why a plan was not run that could have been."""
_ROUNDING = 1e-9
"""Simulated seconds are floats; they may be this share below an exact bound that they reach."""


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One schedule on one cluster: `slowdown` of the only straggler, or the `seed` of random rates.

    `seconds` are simulated under the port model `model`; `segments` is the best of `tried`. `formula` is what the
    schedule's closed form says for so many segments, if it has one. `planning_s` are of the processor.
    """

    schedule: str
    ranks: int
    slowdown: Fraction | None
    seed: int | None
    model: str
    tried: tuple[int, ...]
    segments: int
    transfers: int
    seconds: float
    bound: Fraction
    fault_free: Fraction
    formula: Fraction | None
    planning_s: float

    @property
    def over_bound(self) -> float:
        """Simulated time over T*."""
        return self.seconds / float(self.bound)

    @property
    def over_fault_free(self) -> float:
        """Simulated time over T_ff."""
        return self.seconds / float(self.fault_free)

    @property
    def over_formula(self) -> float | None:
        """Simulated time over the schedule's own formula."""
        return None if self.formula is None else self.seconds / float(self.formula)

    @property
    def goal(self) -> Fraction:
        """How many times the bound `optimal` may take here."""
        if self.ranks >= MANY_RANKS:
            return GOALS["many ranks"]
        return GOALS["random" if self.slowdown is None else "straggler"]

    def __str__(self) -> str:
        return f"{_said(self)}, {self.model}, {self.segments} segments"


class NotRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan that was to be simulated and was not, and why; `ports` are those that it is for."""

    schedule: str
    ranks: int
    slowdown: Fraction | None
    seed: int | None
    ports: str
    segments: int
    reason: str

    def __str__(self) -> str:
        return f"{_said(self)}, {self.ports}, {self.segments} segments: not run: {self.reason}"


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    curves: tuple[Curve, ...]
    cases: tuple[Case, ...]
    not_run: tuple[NotRun, ...]


@dataclass(frozen=True)
class ScheduleRatios(Recorded, Shown):
    """The record: how, where and with what it was made, the formulas' curves, the simulated cases, what was not run."""

    format: ClassVar[str] = "optcc-schedules/2"
    own_path: ClassVar[Path] = RECORDS / "schedule-ratios.json"

    title: str
    command: tuple[str, ...]
    size_bytes: int
    rate: Fraction
    latency_s: Fraction
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    curves: tuple[Curve, ...]
    cases: tuple[Case, ...]
    not_run: tuple[NotRun, ...]

    def select(self, schedule: str, model: str = "fifo", *, straggler: bool) -> tuple[Case, ...]:
        """The cases of a schedule under a port model: those with one straggler, or those of random rates."""
        return tuple(
            case
            for case in self.cases
            if case.schedule == schedule and case.model == model and (case.slowdown is not None) == straggler
        )

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


@dataclass(frozen=True)
class Study:
    """Which cases to simulate. `segments` are tried as far as the plan has at most `transfers_max` transfers."""

    ranks: tuple[int, ...]
    slowdowns: tuple[Fraction, ...]
    segments: Mapping[str, tuple[int, ...]]
    transfers_max: int
    exclusive_ranks: tuple[int, ...]
    exclusive_segments: tuple[int, ...]
    random: Mapping[int, int]
    """For how many seeds, by ranks, under fifo and under fair ports."""
    many: Mapping[int, int]
    """Numbers of ranks, with the segments of `optimal` for them, for which one cluster of random rates is enough."""
    many_slowdowns: Mapping[Ports, tuple[Fraction, ...]]
    fair_segments: Mapping[int, tuple[int, ...]]
    """Of `shares`, by ranks."""


FULL = Study(
    ranks=(4, 8, 16, 32, 64),
    slowdowns=tuple(map(Fraction, ("8/7", "4/3", "8/5", "2", "4", "8"))),
    segments={
        "ring": (1, 2, 4),
        "r2ccl-balance": (1, 2, 4),
        "r2ccl-allreduce": (16, 32, 64),
        "optcc": (16, 32, 64, 128, 256),
        "optimal": (1024, 2048),
    },
    transfers_max=2**20,
    exclusive_ranks=(4, 8, 16),
    exclusive_segments=(16, 64, 128, 256, 512, 1024),
    random={4: 60, 8: 60, 16: 40, 32: 30, 64: 10},
    many={256: 2048, 1024: 2048},
    many_slowdowns={"fifo": tuple(map(Fraction, ("8/7", "4/3", "8/5", "2", "4", "8"))), "fair": (Fraction(2),)},
    fair_segments={4: (64, 256), 8: (64, 256), 16: (64, 128, 256), 32: (64,), 64: (64,), 256: (2048,), 1024: (2048,)},
)
QUICK = Study(
    ranks=(4, 8),
    slowdowns=tuple(map(Fraction, ("4/3", "2"))),
    segments={
        "ring": (1, 2),
        "r2ccl-balance": (1, 2),
        "r2ccl-allreduce": (8, 16),
        "optcc": (16, 32),
        "optimal": (128, 256),
    },
    transfers_max=2**14,
    exclusive_ranks=(4,),
    exclusive_segments=(16, 32),
    random={4: 2, 8: 2},
    many={},
    many_slowdowns={},
    fair_segments={4: (64,)},
)


def one_straggler(ranks: int, slowdown: Fraction) -> Topology:
    """`ranks` endpoints of `RATE`, the last of which is `slowdown` times slower.

    >>> one_straggler(4, Fraction(2))
    Topology('4@50GB/s,3=25GB/s')
    """
    rates = [RATE] * (ranks - 1) + [RATE / slowdown]
    return _cluster([(rate, rate) for rate in rates])


def random_rates(ranks: int, seed: int) -> Topology:
    """`ranks` endpoints of 10 to 50 GB/s in steps of 1 MB/s, out and in drawn apart and never equal.

    >>> random_rates(2, 1) == random_rates(2, 1), random_rates(2, 1) == random_rates(2, 2)
    (True, False)
    """
    rng = random.Random(f"{ranks} ranks, seed {seed}")

    def draw() -> Fraction:
        return (10_000 + int(rng.random() * 40_001)) * Fraction(10**6)

    pairs: list[tuple[Fraction, Fraction]] = []
    while len(pairs) < ranks:
        out, in_ = draw(), draw()
        if out != in_:
            pairs.append((out, in_))
    return _cluster(pairs)


def _cluster(rates: Sequence[tuple[Fraction, Fraction]]) -> Topology:
    servers = tuple(Server(f"h{index}", 1, (Nic(0, out, in_),)) for index, (out, in_) in enumerate(rates))
    return Topology(servers, latency_s=LATENCY_S)


def curve(ranks: int, lost_max: Fraction) -> Curve:
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
    return Curve(ranks, tuple(points))


@dataclass(frozen=True)
class Unit:
    """A schedule on a cluster, planned and simulated for `ports`, with each number of `segments`.

    One straggler, `slowdown` times slower, or random rates of a `seed`. Numbers of segments with which the plan has
    more than `transfers_max` transfers are left out; what needs more than `memory_bytes` is not run.
    """

    schedule: str
    ranks: int
    slowdown: Fraction | None
    seed: int | None
    ports: Ports
    segments: tuple[int, ...]
    transfers_max: int = 2**63
    memory_bytes: int | None = None

    def __str__(self) -> str:
        return f"{_said(self)}, {self.ports}"

    @property
    def topology(self) -> Topology:
        """The cluster."""
        if self.slowdown is not None:
            return one_straggler(self.ranks, self.slowdown)
        assert self.seed is not None
        return random_rates(self.ranks, self.seed)

    @property
    def effort(self) -> int:
        """What grows about as its time does: under fair ports all pairs flow at once, at random rates in more lanes."""
        if self.ports != "fair":
            return self.ranks
        return self.ranks**2 * (1 if self.seed is None else 4)


def _said(each: Case | NotRun | Unit) -> str:
    cluster = f"seed {each.seed}" if each.slowdown is None else f"l = {each.slowdown}"
    return f"{each.schedule}, p = {each.ranks}, {cluster}"


def units(study: Study, memory_bytes: int | None = None) -> Iterator[Unit]:
    """What `study` simulates: one straggler, random rates, many ranks; of each what ports are for, side by side."""
    for ranks in study.ranks:
        for slowdown in study.slowdowns:
            for name, fifo_tried in study.segments.items():
                yield Unit(name, ranks, slowdown, None, "fifo", fifo_tried, study.transfers_max, memory_bytes)
                for ports in OTHER_PORTS.get(name, ()) if ranks in study.exclusive_ranks else ():
                    tried = study.exclusive_segments
                    yield Unit(name, ranks, slowdown, None, ports, tried, study.transfers_max, memory_bytes)
            yield from _fair(study, ranks, slowdown, None, memory_bytes)
    for ranks, seeds in study.random.items():
        for seed in range(seeds):
            tried = study.segments["optimal"]
            yield Unit("optimal", ranks, None, seed, "fifo", tried, study.transfers_max, memory_bytes)
            yield from _fair(study, ranks, None, seed, memory_bytes)
    for ranks, segments in study.many.items():
        for slowdown in study.many_slowdowns.get("fifo", ()):
            yield Unit("optimal", ranks, slowdown, None, "fifo", (segments,), 2**63, memory_bytes)
        for slowdown in study.many_slowdowns.get("fair", ()):
            yield from _fair(study, ranks, slowdown, None, memory_bytes)
        yield Unit("optimal", ranks, None, 0, "fifo", (segments,), 2**63, memory_bytes)
        yield from _fair(study, ranks, None, 0, memory_bytes)


def _fair(
    study: Study, ranks: int, slowdown: Fraction | None, seed: int | None, memory_bytes: int | None
) -> Iterator[Unit]:
    if ranks in study.fair_segments:
        yield Unit("shares", ranks, slowdown, seed, "fair", study.fair_segments[ranks], memory_bytes=memory_bytes)


class Outcome(msgspec.Struct, frozen=True):
    """What became of a unit."""

    cases: tuple[Case, ...]
    not_run: tuple[NotRun, ...]


@dataclass(frozen=True)
class _Run:
    segments: int
    transfers: int
    seconds: float
    planning_s: float


def run_unit(unit: Unit) -> Outcome:
    """Simulates `unit`: a case, unless nothing fitted into memory."""
    name, topology = unit.schedule, unit.topology
    definition = SCHEDULES[name].under(unit.ports)
    each = len(definition.build(topology, 1))
    runs = []
    not_run = []
    for k in unit.segments:
        if k * each > unit.transfers_max:
            continue
        try:
            with _memory_limited(unit.memory_bytes):
                began = time.process_time()
                schedule = definition.build(topology, k)
                plan = compile_schedule(schedule, size_bytes=SIZE_BYTES, topology=topology, ports=unit.ports)
                planning_s = round(time.process_time() - began, 4)
                seconds = simulate(plan, topology, model=unit.ports).seconds
                runs.append(_Run(k, len(plan.transfers), seconds, planning_s))
        except (MemoryError, OptccError) as error:
            limit = "" if unit.memory_bytes is None else f" of {unit.memory_bytes / 2**30:.1f} GiB"
            why = f"memory{limit}: {error}" if isinstance(error, MemoryError) else str(error)
            not_run.append(NotRun(name, unit.ranks, unit.slowdown, unit.seed, unit.ports, k, why))
    if not runs:
        return Outcome((), tuple(not_run))
    best = min(runs, key=lambda run: run.seconds)
    case = Case(
        name,
        unit.ranks,
        unit.slowdown,
        unit.seed,
        unit.ports,
        tuple(run.segments for run in runs),
        best.segments,
        best.transfers,
        best.seconds,
        collective_bound(topology, SIZE_BYTES).seconds,
        fault_free(topology, SIZE_BYTES),
        formula_of(name, topology, best.segments, unit.ports),
        best.planning_s,
    )
    return Outcome((case,), tuple(not_run))


def _left_out(unit: Unit) -> Outcome:
    """Nothing of it is simulated."""
    where = unit.schedule, unit.ranks, unit.slowdown, unit.seed, unit.ports
    return Outcome((), tuple(NotRun(*where, segments, NO_TIME) for segments in unit.segments))


@contextmanager
def _memory_limited(memory_bytes: int | None) -> Iterator[None]:
    """Inside, what would need more address space than that raises MemoryError."""
    if memory_bytes is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _work(unit: Unit) -> Any:
    """`run_unit` as JSON's types."""
    _warm()
    return msgspec.to_builtins(run_unit(unit), enc_hook=text_of)


@cache
def _warm() -> None:
    """Compiles the kernels, once a process: that is no part of planning."""
    few = Study((4,), (Fraction(2),), {"optimal": (1,)}, 64, (4,), (1,), {}, {}, {}, {4: (1,)})
    for unit in units(few):
        run_unit(unit)


def formula_of(name: str, topology: Topology, segments: int, ports: Ports) -> Fraction | None:
    """The schedule's closed form; OptCC's is the least that its ports need for so many segments, with fill and drain,
    and the latency of filling the pipeline.

    A section of OptCC makes p - 2 steps in each of stages 1 and 4 and one in each of 2 and 3, so the first one is done
    2(p - 1) latencies later than its bytes take.
    """
    found = {each.schedule: each.seconds for each in predictions(topology, SIZE_BYTES)}
    seconds = found.get("optimal" if name == "shares" else name)
    if name == "optcc" and seconds is not None:
        healthy = max(*topology.out, *topology.in_)
        slowdown = healthy / min(*topology.out, *topology.in_)
        form = ClosedForm(topology.n_ranks, slowdown, segments, "exclusive" if ports == "exclusive" else "fifo")
        slot_s = SIZE_BYTES / (healthy * (topology.n_ranks - 1) * segments)
        return form.least * slot_s + 2 * (topology.n_ranks - 1) * topology.latency_s
    return seconds


def make(
    study: Study,
    command: tuple[str, ...],
    *,
    jobs: int = 1,
    partial: Partial | None = None,
    report: Report = quiet,
    finish: bool = False,
) -> ScheduleRatios:
    """Simulates everything in `study` on `jobs` processes, the cheap units first; `command` is what made the record.

    All processes together, and one more like them, have the machine's memory. With `finish` nothing more is simulated
    than what is in `partial`, and the rest is listed as not run. Raises CodecError if `partial` holds what this study
    did not write.
    """
    machine = this_machine()
    wanted = {str(unit): unit for unit in units(study, machine["memory_bytes"] // (jobs + 1))}
    cheap_first = dict(sorted(wanted.items(), key=lambda each: each[1].effort))
    if finish:
        done = {} if partial is None else partial.done
    else:
        done = complete(cheap_first, _work, jobs=jobs, partial=partial, report=report)
    try:
        outcomes = [
            msgspec.convert(done[name], Outcome, dec_hook=rational) if name in done else _left_out(unit)
            for name, unit in wanted.items()
        ]
    except msgspec.ValidationError as error:
        raise CodecError(f"unfinished record: {error}: delete it to start again") from None
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


@click.command()
@click.option("--quick", is_flag=True, help="Few cases and few segments; without FILE, nothing is written.")
@click.option("--jobs", default=1, show_default=True, help="Processes.")
@click.option("--resume", is_flag=True, help="Go on with what an interrupted run left beside FILE.")
@click.option("--finish", is_flag=True, help="Write the record of what such a run has done, and keep what it left.")
@click.argument("file", type=click.Path(path_type=Path), required=False)
def command(quick: bool, jobs: int, resume: bool, finish: bool, file: Path | None) -> None:
    """Simulate the schedules, write the record to FILE (the package's own), and list where goals are missed."""
    from optcc.cli import echo_card

    study = QUICK if quick else FULL
    target = file or (None if quick else ScheduleRatios.own_path)
    if not 1 <= jobs <= JOBS_MAX:
        raise InputError(f"--jobs {jobs}: must be from 1 to {JOBS_MAX}")
    if (resume or finish) and target is None:
        raise InputError("--resume and --finish: must come with FILE, beside which the unfinished record is")
    partial = None
    if target is not None:
        said = f"schedules, {hashlib.sha256(repr(study).encode()).hexdigest()[:16]}"
        partial = Partial.open(target.with_name(f"{target.name}.partial"), said, resume=resume or finish)
    words = ("python", "-m", "optcc.experiments.schedule_record", *(("--quick",) if quick else ()))
    record = make(study, words, jobs=jobs, partial=partial, report=_tell, finish=finish)
    if target is not None and partial is not None:
        record.write(target)
        if not finish:
            partial.close()
    echo_card(record)
    for line in (*record.not_run, *record.misses()):
        click.echo(str(line))


def _tell(done: int, of: int, name: str) -> None:
    click.echo(f"{done} of {of}: {name}", err=True)


if __name__ == "__main__":
    command()
