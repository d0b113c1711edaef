"""What schedules take in simulation, held against the bound, the fault-free ring and their own formulas, as a record.

Two kinds of clusters: one straggler, slowed down l times; and rates drawn at random, out and in apart, from a seed.
A plan is compiled for the port model under which it is simulated (for `fair`, the plan for `exclusive`, but for
`shares`, which is what `optimal` is where ports are fair), with the best of a few powers of two of segments; each case
says which were tried. All but the planning seconds is the same on every machine. The record is a file of its own
format, `optcc-schedules/1`; rationals are text, "a/b" in lowest terms. The one that comes with the package is made by

    python -m optcc.experiments.schedule_record
"""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import msgspec

from optcc.compiler import compile_schedule
from optcc.errors import CodecError
from optcc.experiments.record import RECORD_BYTES_MAX, these_versions, this_machine
from optcc.files import read_file, replace_file
from optcc.passes.timetable import Ports
from optcc.schedules.registry import SCHEDULES
from optcc.show import Card, Shown
from optcc.simulate import MODELS, Model, simulate
from optcc.topology import RANKS_MAX, Nic, Server, Topology
from optcc.verify.bounds import collective_bound
from optcc.verify.predictions import fault_free, predictions

FORMAT = "optcc-schedules/1"
TITLE = "Schedules in simulation against the bound: one straggler, and random rates"
PATH = Path(__file__).parent / "records" / "schedule-ratios.json"
SIZE_BYTES = 2**30
RATE = Fraction(50 * 10**9)
"""Bytes/s of a healthy endpoint each way."""
LATENCY_S = Fraction(5, 10**6)
COLUMNS = ("lost", "ring", "r2ccl-allreduce", "optcc", "bound")
"""Of a curve: the share of its rate that the straggler lost, and formulas over the fault-free ring."""
GRID = 64
GOALS = {"straggler": Fraction(102, 100), "random": Fraction(103, 100), "random, many ranks": Fraction(105, 100)}
"""Above so many times the bound, `optimal` misses its goal, under fifo ports and, as `shares`, under fair ones."""
OPTIMAL = (("optimal", "fifo"), ("shares", "fair"))
"""The schedule and the ports of that."""
MANY_RANKS = 256
FORMULA_GOAL = Fraction(1, 100)
"""By more than this share, OptCC is slower than its own formula."""
_RATIONAL = re.compile(r"(0|[1-9][0-9]{0,40})/([1-9][0-9]{0,40})")
_ROUNDING = 1e-9
"""Simulated seconds are floats; they may be this share below an exact bound that they reach."""


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One schedule on one cluster: `slowdown` of the only straggler, or the `seed` of random rates.

    `seconds` are simulated under the port model `model`; `segments` is the best of `tried`. `formula` is what the
    schedule's closed form says for so many segments, if it has one.
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
        if self.slowdown is not None:
            return GOALS["straggler"]
        return GOALS["random, many ranks" if self.ranks >= MANY_RANKS else "random"]

    def __str__(self) -> str:
        cluster = f"seed {self.seed}" if self.slowdown is None else f"l = {self.slowdown}"
        return f"{self.schedule}, p = {self.ranks}, {cluster}, {self.model}, {self.segments} segments"


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


@dataclass(frozen=True)
class ScheduleRatios(Shown):
    """The record: how, where and with what it was made, the formulas' curves, and the simulated cases."""

    title: str
    command: tuple[str, ...]
    size_bytes: int
    rate: Fraction
    latency_s: Fraction
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    curves: tuple[Curve, ...]
    cases: tuple[Case, ...]

    def select(self, schedule: str, model: str = "fifo", *, straggler: bool) -> tuple[Case, ...]:
        """The cases of a schedule under a port model: those with one straggler, or those of random rates."""
        return tuple(
            case
            for case in self.cases
            if case.schedule == schedule and case.model == model and (case.slowdown is not None) == straggler
        )

    def misses(self) -> tuple[str, ...]:
        """Every case in which `optimal` (or, under fair ports, `shares`) is further above the bound, or under fifo
        ports OptCC above its formula, than its goal."""
        found = []
        for case in self.cases:
            if (case.schedule, case.model) in OPTIMAL and case.over_bound > case.goal:
                found.append(f"{case}: {case.over_bound:.4f} of the bound, goal {float(case.goal):.2f}")
            off = case.over_formula
            if case.schedule == "optcc" and case.model == "fifo" and off is not None and off > 1 + FORMULA_GOAL:
                found.append(f"{case}: {off:.4f} of its formula, goal {1 + float(FORMULA_GOAL):.2f}")
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
        """The record as a file, a line for each curve and each case."""
        head = {
            "format": FORMAT,
            "title": self.title,
            "command": self.command,
            "size_bytes": self.size_bytes,
            "rate": self.rate,
            "latency_s": self.latency_s,
            "machine": self.machine,
            "versions": self.versions,
            "columns": COLUMNS,
        }
        start = json.dumps(msgspec.to_builtins(head, enc_hook=_text), indent=1)[:-2]
        lists = []
        for name, values in (("curves", self.curves), ("cases", self.cases)):
            lines = ",\n  ".join(json.dumps(msgspec.to_builtins(each, enc_hook=_text)) for each in values)
            lists.append(f' "{name}": [\n  {lines}\n ]')
        return f"{start},\n{lists[0]},\n{lists[1]}\n}}\n".encode()

    def write(self, path: Path) -> None:
        """Replaces the file at `path`; raises InputError if that fails."""
        replace_file(path, self.to_bytes())

    @classmethod
    def read(cls, path: Path) -> ScheduleRatios:
        """The record in a file; raises InputError if it cannot be read, CodecError if it is none."""
        return cls.from_bytes(read_file(path, RECORD_BYTES_MAX), str(path))

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> ScheduleRatios:
        """The record in `data`; raises CodecError, with `name` and the path to the field, if it is none."""
        try:
            file = msgspec.json.decode(data, type=_File, dec_hook=_rational)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CodecError(f"record {name!r}: {error}") from None

        def check(field: str, value: object, holds: bool, rule: str) -> None:
            if not holds:
                raise CodecError(f"record {name!r}: $.{field}: {value!r}: must {rule}")

        check("format", file.format, file.format == FORMAT, f"be {FORMAT!r}")
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
    random_ranks: tuple[int, ...]
    random_each: int
    many: Mapping[int, int]
    """Numbers of ranks, with the segments for them, for which one cluster of random rates is enough."""
    fair_segments: Mapping[int, tuple[int, ...]]
    """Of `shares`, by ranks; one straggler as well where they are among `ranks`."""
    fair_random: Mapping[int, int]
    """For how many seeds, by ranks."""


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
    transfers_max=2**19,
    exclusive_ranks=(4, 8, 16),
    exclusive_segments=(16, 64, 128, 512, 2048),
    random_ranks=(4, 8, 16, 32, 64),
    random_each=8,
    many={256: 1024, 1024: 1024},
    fair_segments={4: (64, 256), 8: (64, 256), 16: (64, 128), 32: (64,), 64: (64,)},
    fair_random={4: 60, 8: 60, 16: 40, 32: 30, 64: 10},
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
    random_ranks=(4, 8),
    random_each=2,
    many={},
    fair_segments={4: (64,)},
    fair_random={4: 2},
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


def cases(study: Study) -> Iterator[Case]:
    """Simulates every case of `study`: one straggler, random rates, many ranks."""
    for ranks in study.ranks:
        for slowdown in study.slowdowns:
            topology = one_straggler(ranks, slowdown)
            for name, tried in study.segments.items():
                yield from _cases(name, topology, tried, study.transfers_max, slowdown=slowdown)
                if name in ("optcc", "optimal") and ranks in study.exclusive_ranks:
                    few = study.exclusive_segments
                    yield from _cases(name, topology, few, study.transfers_max, slowdown=slowdown, ports="exclusive")
            tried = study.fair_segments.get(ranks, ())
            if tried:
                yield from _cases("shares", topology, tried, 2**63, slowdown=slowdown, ports="fair")
    for ranks in study.random_ranks:
        for seed in range(study.random_each):
            topology = random_rates(ranks, seed)
            yield from _cases("optimal", topology, study.segments["optimal"], study.transfers_max, seed=seed)
    for ranks, seeds in study.fair_random.items():
        for seed in range(seeds):
            topology = random_rates(ranks, seed)
            yield from _cases("shares", topology, study.fair_segments[ranks], 2**63, seed=seed, ports="fair")
    for ranks, segments in study.many.items():
        yield from _cases("optimal", random_rates(ranks, 0), (segments,), 2**63, seed=0)


@dataclass(frozen=True)
class _Run:
    segments: int
    transfers: int
    seconds: float
    planning_s: float


def _cases(
    name: str,
    topology: Topology,
    segments: Sequence[int],
    transfers_max: int,
    *,
    slowdown: Fraction | None = None,
    seed: int | None = None,
    ports: Ports = "fifo",
) -> Iterator[Case]:
    """One schedule on one cluster under every model that its plan is for."""
    models: tuple[Model, ...] = ("exclusive", "fair") if ports == "exclusive" else (ports,)
    definition = SCHEDULES[name]
    each = len(definition.build(topology, 1))
    tried = tuple(k for k in segments if k * each <= transfers_max)
    runs: dict[Model, list[_Run]] = {model: [] for model in models}
    for k in tried:
        began = time.perf_counter()
        plan = compile_schedule(definition.build(topology, k), size_bytes=SIZE_BYTES, topology=topology, ports=ports)
        planning_s = time.perf_counter() - began
        for model in models:
            seconds = simulate(plan, topology, model=model).seconds
            runs[model].append(_Run(k, len(plan.transfers), seconds, round(planning_s, 4)))
    for model in models:
        best = min(runs[model], key=lambda run: run.seconds)
        yield Case(
            name,
            topology.n_ranks,
            slowdown,
            seed,
            model,
            tried,
            best.segments,
            best.transfers,
            best.seconds,
            collective_bound(topology, SIZE_BYTES).seconds,
            fault_free(topology, SIZE_BYTES),
            _formula(name, topology, best.segments),
            best.planning_s,
        )


def _formula(name: str, topology: Topology, segments: int) -> Fraction | None:
    """The schedule's closed form; OptCC's counts the segments, and the latency of filling the pipeline.

    A section of OptCC makes p - 2 steps in each of stages 1 and 4 and one in each of 2 and 3, so the first one is done
    2(p - 1) latencies later than its bytes take.
    """
    sought = {"optcc": f"optcc, {segments} segments", "shares": "optimal"}.get(name, name)
    found = {each.schedule: each.seconds for each in predictions(topology, SIZE_BYTES, segments=segments)}
    seconds = found.get(sought)
    if name == "optcc" and seconds is not None:
        return seconds + 2 * (topology.n_ranks - 1) * topology.latency_s
    return seconds


def make(*, quick: bool = False) -> ScheduleRatios:
    """Simulates everything, on one core."""
    study = QUICK if quick else FULL
    for _ in cases(Study((4,), (Fraction(2),), {"optimal": (1,)}, 64, (4,), (1,), (), 0, {}, {4: (1,)}, {})):
        pass  # compiles the kernels, which is no part of planning
    command = ("python", "-m", "optcc.experiments.schedule_record", *(("--quick",) if quick else ()))
    lost_max = 1 - 1 / max(study.slowdowns)
    return ScheduleRatios(
        TITLE,
        command,
        SIZE_BYTES,
        RATE,
        LATENCY_S,
        this_machine(),
        these_versions(),
        tuple(curve(ranks, lost_max) for ranks in study.ranks),
        tuple(cases(study)),
    )


def _text(number: object) -> str:
    assert isinstance(number, Fraction)
    return f"{number.numerator}/{number.denominator}"


def _rational(kind: type, value: object) -> Fraction:
    """A number as `_text` writes it; msgspec adds the path to what is raised here."""
    assert kind is Fraction
    if not isinstance(value, str) or _RATIONAL.fullmatch(value) is None or value != _text(Fraction(value)):
        raise ValueError(f"{value!r}: must be a/b in lowest terms")
    return Fraction(value)


@click.command()
@click.option("--quick", is_flag=True, help="Few cases and few segments; without FILE, nothing is written.")
@click.argument("file", type=click.Path(path_type=Path), required=False)
def command(quick: bool, file: Path | None) -> None:
    """Simulate the schedules, write the record to FILE (the package's own), and list where goals are missed."""
    from optcc.cli import echo_card

    record = make(quick=quick)
    if file is not None or not quick:
        record.write(file or PATH)
    echo_card(record)
    for line in record.misses():
        click.echo(line)


if __name__ == "__main__":
    command()
