"""The overhead of failed NICs: an AllReduce under every pattern of failures, drawn many times, as a record.

How long a case takes is in `failure_times`; thousands of trials give a handful of cases, and each is timed once.

The record has no clock, machine or version in it: the same options give the same bytes, with any number of workers.
Its format is `optcc-failures/1`; the one that comes with the package is made by

    optcc study failures -o experiments/records/failure-study.json
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from optcc.errors import CodecError
from optcc.experiments import failure_model
from optcc.experiments.cells import HERE, RecordCells
from optcc.experiments.failure_model import (
    FLAP_S,
    FLAPS_PER_DAY,
    FLEET_PORTS,
    HPN_LINK,
    LLAMA_NETWORK,
    LLAMA_NIC,
    RATES,
    REPAIRS_S,
    SERVERS_MAX,
    SLOW_PERCENT,
    Cluster,
    Instant,
    Left,
    OneServer,
    Pattern,
    RailSwitch,
    Slow,
    Uniform,
    down_probability,
    flap_probability,
)
from optcc.experiments.failure_times import COLUMNS, LATENCY_S, NIC_RATE, NICS, SEGMENTS, SimulatedRun, finite, fluid
from optcc.experiments.made import PLANNED_ROOMS
from optcc.experiments.record import RECORDS, decode, lines_of, rational, text_of
from optcc.experiments.recorder import Answer
from optcc.experiments.study_units import TRIALS_MAX, check_numbers, command_for
from optcc.experiments.trial_statistics import CONFIDENCE, MEDIAN, P95, Estimate, mean, quantile
from optcc.show import Card
from optcc.units import show_rate, show_size

TITLE = "AllReduce with failed NICs: time over the fault-free ring"
_PATTERN = re.compile(r"(uniform|one server|rail|slow) [1-9][0-9]{0,6}|instant [ -~]{1,60}")


class FailureOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is `left`, in how many `trials`, and for each of `COLUMNS` the fluid time over the fault-free ring."""

    left: str
    trials: int
    over_fault_free: tuple[Fraction, ...]


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every outcome of a pattern on so many servers, in rising order of what is left."""

    pattern: str
    servers: int
    outcomes: tuple[FailureOutcome, ...]

    @property
    def trials(self) -> int:
        """All of them."""
        return sum(outcome.trials for outcome in self.outcomes)

    def values(self, schedule: str) -> list[tuple[Fraction, int]]:
        """Sorted (time over T_ff, trials) of a schedule."""
        column = COLUMNS.index(schedule)
        found: Counter[Fraction] = Counter()
        for outcome in self.outcomes:
            found[outcome.over_fault_free[column]] += outcome.trials
        return sorted(found.items())

    def quantile(self, schedule: str, share: Fraction) -> Estimate:
        """Of the time over T_ff."""
        return quantile(self.values(schedule), share)

    def mean(self, schedule: str) -> Estimate:
        """Of the time over T_ff."""
        return mean(self.values(schedule))

    def worst(self, schedule: str) -> float:
        """The largest time over T_ff of all trials; a further trial is worse with at most about 3/trials (95 %)."""
        return float(self.values(schedule)[-1][0])


class Assumption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number that patterns are drawn with, as text, and where it is from."""

    name: str
    value: str
    source: str


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    title: str
    command: tuple[str, ...]
    trials: int
    seed: int
    nics: int
    nic_rate: Fraction
    latency_s: Fraction
    assumptions: tuple[Assumption, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    runs: tuple[SimulatedRun, ...]


@dataclass(frozen=True)
class FailureStudy(Answer):
    """The record: with which options it was made, on which assumptions, every cell and every simulated case."""

    format: ClassVar[str] = "optcc-failures/1"
    own_path: ClassVar[Path] = RECORDS / "failure-study.json"
    rooms: ClassVar[tuple[str, ...]] = PLANNED_ROOMS
    is_dated: ClassVar[bool] = False

    title: str
    command: tuple[str, ...]
    trials: int
    seed: int
    assumptions: tuple[Assumption, ...]
    cells: tuple[Cell, ...]
    runs: tuple[SimulatedRun, ...]
    nics: int = NICS
    nic_rate: Fraction = NIC_RATE
    latency_s: Fraction = LATENCY_S

    def cell(self, pattern: str, servers: int) -> Cell | None:
        """The cell of a pattern, if it was drawn."""
        return next((each for each in self.cells if (each.pattern, each.servers) == (pattern, servers)), None)

    def uniform(self) -> tuple[tuple[int, Cell], ...]:
        """The cells with so many failed NICs anywhere, by servers and that number."""
        found = [(int(cell.pattern.split()[1]), cell) for cell in self.cells if cell.pattern.startswith("uniform ")]
        return tuple(sorted(found, key=lambda each: (each[1].servers, each[0])))

    def simulated(self, servers: int, size_bytes: int) -> dict[tuple[str, str], SimulatedRun]:
        """The runs of one cluster and size, by what is left and by schedule."""
        return {
            (run.left, run.schedule): run for run in self.runs if (run.servers, run.size_bytes) == (servers, size_bytes)
        }

    def _row(self, cell: Cell) -> tuple[str, ...]:
        def shown(name: str) -> str:
            parts = (cell.quantile(name, MEDIAN).value, cell.quantile(name, P95).value, cell.worst(name))
            return " / ".join(f"{100 * (part - 1):.1f}" for part in parts)

        return (str(cell.servers), cell.pattern, *(shown(name) for name in COLUMNS if name != "ring"))

    def _card(self, title: str, cells: Iterable[Cell]) -> Card:
        columns = ("servers", "failed", *(name for name in COLUMNS if name != "ring"))
        return Card(title, columns, tuple(self._row(cell) for cell in cells))

    def card(self) -> Card:
        """The table of overheads for 1..10 failed NICs; of many sizes, the numbers of failures that fit on a page."""
        cells = self.uniform()
        if len(cells) > len(_FEW) * 8:
            cells = tuple((failed, cell) for failed, cell in cells if failed in _FEW)
        title = f"{self.title}: overhead in %, median / p95 / worst of {self.trials} trials, {self.nics} NICs a server"
        return self._card(title, (cell for _, cell in cells))

    def cards(self) -> tuple[Card, ...]:
        return self.card(), self.one_server(), self.patterns(), self.finite()

    def patterns(self) -> Card:
        """The same for every other pattern."""
        cells = [cell for cell in self.cells if not cell.pattern.startswith(("uniform ", _ONE))]
        return self._card(f"Other patterns: overhead in %, median / p95 / worst of {self.trials} trials", cells)

    def one_server(self) -> Card:
        """The overhead in % if one server has lost so many of its NICs: every trial is alike."""
        names = [name for name in COLUMNS if name != "ring"]
        rows = tuple(
            (
                str(cell.servers),
                cell.pattern.removeprefix(_ONE),
                *(f"{100 * (cell.worst(name) - 1):.2f}" for name in names),
            )
            for cell in self.cells
            if cell.pattern.startswith(_ONE)
        )
        return Card(f"One server: overhead in %, {self.nics} NICs a server", ("servers", "lost", *names), rows)

    def finite(self) -> Card:
        """Mean overheads in % of the simulated cases, weighted by how often each was drawn."""
        names = tuple(SEGMENTS)
        rows = []
        for servers, size_bytes in sorted({(run.servers, run.size_bytes) for run in self.runs}):
            runs = self.simulated(servers, size_bytes)
            for cell in self.cells:
                if cell.servers == servers and all((outcome.left, "ring") in runs for outcome in cell.outcomes):
                    means = []
                    for name in names:
                        times = [(Fraction(runs[o.left, name].over_fault_free), o.trials) for o in cell.outcomes]
                        means.append(f"{100 * (mean(times).value - 1):.1f}")
                    rows.append((str(servers), show_size(size_bytes), cell.pattern, *means))
        title = (
            f"Simulated, {show_rate(self.nics * self.nic_rate)} a server, {float(self.latency_s * 10**6):g} us: mean %"
        )
        return Card(title, ("servers", "size", "failed", *names), tuple(rows))

    def as_json(self) -> dict[str, Any]:
        """Every cell with its estimates and their intervals, and every run."""

        def estimates(cell: Cell, name: str) -> dict[str, Any]:
            found = {
                "median": cell.quantile(name, MEDIAN),
                "p95": cell.quantile(name, P95),
                "mean": cell.mean(name),
            }
            shown: dict[str, Any] = {key: [each.value, each.low, each.high] for key, each in found.items()}
            return {**shown, "worst": cell.worst(name)}

        return {
            "trials": self.trials,
            "seed": self.seed,
            "confidence": float(CONFIDENCE),
            "over_fault_free": [
                {
                    "servers": cell.servers,
                    "pattern": cell.pattern,
                    "outcomes": len(cell.outcomes),
                    **{name: estimates(cell, name) for name in COLUMNS},
                }
                for cell in self.cells
            ],
            "runs": msgspec.to_builtins(self.runs),
        }

    def to_bytes(self) -> bytes:
        """The record as a file, a line for each cell and each run."""
        head = _File(
            self.format,
            self.title,
            self.command,
            self.trials,
            self.seed,
            self.nics,
            self.nic_rate,
            self.latency_s,
            self.assumptions,
            COLUMNS,
            (),
            (),
        )
        built = msgspec.to_builtins(head, enc_hook=text_of)
        lists = {name: msgspec.to_builtins(getattr(self, name), enc_hook=text_of) for name in ("cells", "runs")}
        return lines_of({key: value for key, value in built.items() if key not in lists}, lists)

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "") -> FailureStudy:
        file, check = decode(data, name, _File, cls.format, rational)
        check("columns", file.columns, file.columns == COLUMNS, f"be {list(COLUMNS)}")
        check("nics", file.nics, file.nics == NICS, f"be {NICS}")
        check("trials", file.trials, 1 <= file.trials <= TRIALS_MAX, f"be from 1 to {TRIALS_MAX}")
        check("nic_rate", str(file.nic_rate), file.nic_rate > 0, "be above zero")
        for number, cell in enumerate(file.cells):
            where = f"cells[{number}]"
            check(f"{where}.pattern", cell.pattern, bool(_PATTERN.fullmatch(cell.pattern)), "be the name of a pattern")
            check(f"{where}.servers", cell.servers, 2 <= cell.servers <= SERVERS_MAX, f"be from 2 to {SERVERS_MAX}")
            check(f"{where}.outcomes", cell.trials, cell.trials == file.trials, f"be of {file.trials} trials")
            lefts = [_left(outcome.left, f"record {name!r}: $.{where}") for outcome in cell.outcomes]
            check(where, [str(left) for left in lefts], lefts == sorted(set(lefts)), "rise, every outcome once")
            for place, outcome in enumerate(cell.outcomes):
                over = outcome.over_fault_free
                inside = f"{where}.outcomes[{place}].over_fault_free"
                check(inside, [str(each) for each in over], len(over) == len(COLUMNS), f"be {len(COLUMNS)} numbers")
                check(inside, [str(each) for each in over], 1 <= over[-1] <= min(over), "end with the bound, 1 or more")
                check(f"{where}.outcomes[{place}].trials", outcome.trials, outcome.trials > 0, "be above zero")
        keys = [(cell.pattern, cell.servers) for cell in file.cells]
        check("cells", len(keys), len(set(keys)) == len(keys), "be there once each")
        for number, run in enumerate(file.runs):
            where = f"runs[{number}]"
            _left(run.left, f"record {name!r}: $.{where}.left")
            check(f"{where}.schedule", run.schedule, run.schedule in SEGMENTS, f"be one of {', '.join(SEGMENTS)}")
            check(f"{where}.segments", run.segments, run.segments in run.tried, "be one of those tried")
            possible = run.bound_s * (1 - _ROUNDING) <= run.seconds < math.inf and run.bound_s > 0 < run.fault_free_s
            check(f"{where}.seconds", run.seconds, possible, f"be at least the bound, {run.bound_s!r}")
        made = [(run.servers, run.size_bytes, run.left, run.schedule) for run in file.runs]
        check("runs", len(made), len(set(made)) == len(made), "be there once each")
        return cls(
            file.title,
            file.command,
            file.trials,
            file.seed,
            file.assumptions,
            file.cells,
            file.runs,
            file.nics,
            file.nic_rate,
            file.latency_s,
        )


_ROUNDING = 1e-9
"""Simulated seconds are floats; they may be this share below a bound that they reach."""
_FEW = (1, 2, 3, 5, 10)
_ONE = "one server "


def _left(text: str, where: str) -> Left:
    try:
        return Left.parse(text)
    except CodecError as error:
        raise CodecError(f"{where}: {error}") from None


@dataclass(frozen=True)
class FailurePlan:
    """What to draw and what to simulate: `simulated` are patterns, on which servers, with messages of which size."""

    patterns: tuple[tuple[Pattern, int], ...]
    simulated: tuple[tuple[Pattern, int, int], ...]
    segments: Mapping[str, tuple[int, ...]]


SERVERS = (8, 16, 32, 64, 128, 256, 512, 1024)
FAILED = tuple(range(1, 11))
_OTHERS: tuple[tuple[Pattern, int], ...] = (
    *((OneServer(failed), servers) for servers in SERVERS for failed in (1, 2, 3, 4)),
    *((RailSwitch(group), 64) for group in (4, 16, 32, 64)),
    *((Slow(slow), 64) for slow in (1, 2, 4)),
    *(
        (Instant(f"flaps {flaps}", flap_probability(flaps)), servers)
        for servers in (64, 2048)
        for flaps in FLAPS_PER_DAY
    ),
    *(
        (Instant(f"{rate.name} {repair}", down_probability(rate, REPAIRS_S[repair])), servers)
        for servers in (128, 2048)
        for rate, repair in ((LLAMA_NIC, "4h"), (HPN_LINK, "1d"), (LLAMA_NETWORK, "3d"))
    ),
)
_GIB, _MIB = 2**30, 2**20
FULL = FailurePlan(
    patterns=(*((Uniform(failed), servers) for servers in SERVERS for failed in FAILED), *_OTHERS),
    simulated=(
        *((Uniform(failed), 16, size) for size in (64 * _MIB, _GIB) for failed in FAILED),
        *((OneServer(failed), 32, _GIB) for failed in (1, 2, 3, 4)),
        *((Uniform(failed), 64, _GIB) for failed in (1, 2, 4, 10)),
    ),
    segments=SEGMENTS,
)
QUICK = FailurePlan(
    patterns=(
        *((Uniform(failed), servers) for servers in (8, 64) for failed in (1, 2, 3)),
        (OneServer(2), 8),
        (RailSwitch(4), 8),
        (Slow(1), 8),
        (Instant("llama3-network 3d", down_probability(LLAMA_NETWORK, REPAIRS_S["3d"])), 128),
    ),
    simulated=((Uniform(2), 8, 64 * _MIB),),
    segments={"ring": (1,), "r2ccl-allreduce": (4, 8), "optcc": (8, 16), "optimal": (64, 128)},
)
"""A study of seconds, for tests and for a first look."""


def assumptions() -> tuple[Assumption, ...]:
    """The numbers that patterns are drawn with."""
    return (
        *(
            Assumption(f"failures per port and day, {each.name}", text_of(each.per_port_day), each.source)
            for each in RATES
        ),
        *(
            Assumption(f"repair time, {name}", f"{seconds} s", "assumed: the repair time of a NIC is unpublished")
            for name, seconds in REPAIRS_S.items()
        ),
        *(
            Assumption("flaps a day in a fleet", str(flaps), "Alibaba HPN (SIGCOMM 2024, section 2.3)")
            for flaps in FLAPS_PER_DAY
        ),
        Assumption("ports of that fleet", str(FLEET_PORTS), "assumed: the fleet's size is not given"),
        Assumption("duration of a flap", f"{FLAP_S} s", "assumed; MegaScale (NSDI 2024): seconds"),
        Assumption(
            "what a slow NIC carries",
            f"{SLOW_PERCENT[0]} to {SLOW_PERCENT[-1]} %, multiples of {SLOW_PERCENT.step} alike",
            "assumed; SuperBench: 6.04 % of nodes have a host adapter below its specification",
        ),
        Assumption("a server cut off", "drawn again", "no schedule here works without the GPUs of a server"),
    )


@dataclass(frozen=True)
class _Draw:
    """A unit of work: all trials of one cell."""

    pattern: Pattern
    cluster: Cluster
    seed: int
    trials: int


def _draw(unit: _Draw) -> list[tuple[str, int, list[str]]]:
    """(what is left, in how many trials, fluid times over T_ff) of a cell."""
    drawn = (failure_model.draw(unit.pattern, unit.cluster, unit.seed, trial) for trial in range(unit.trials))
    counts = Counter(Left.of(damage) for damage in drawn)
    return [
        (str(left), count, [text_of(each) for each in fluid(left, unit.cluster)])
        for left, count in sorted(counts.items())
    ]


@dataclass(frozen=True)
class _Simulate:
    """A unit of work: one schedule in one finite case."""

    schedule: str
    left: str
    cluster: Cluster
    size_bytes: int
    segments: tuple[int, ...]


def _simulate(unit: _Simulate) -> SimulatedRun:
    left = Left.parse(unit.left)
    return finite(unit.schedule, left, unit.cluster, unit.size_bytes, unit.segments)


def make(
    study: FailurePlan,
    *,
    trials: int,
    seed: int,
    cells: RecordCells = HERE,
    quick: bool = False,
) -> FailureStudy:
    """Draws and simulates everything in `study`; the result depends on `trials` and `seed`, and on nothing else.

    Raises InputError for options out of range.
    """
    check_numbers(trials, seed)
    draws = {
        f"draw {pattern}, {servers} servers": _Draw(pattern, Cluster(servers, NICS), seed, trials)
        for pattern, servers in study.patterns
    }
    drawn = cells.spread(draws, _draw, Any)
    outcomes = tuple(
        Cell(
            str(pattern),
            servers,
            tuple(
                FailureOutcome(left, count, tuple(Fraction(each) for each in over))
                for left, count, over in drawn[f"draw {pattern}, {servers} servers"]
            ),
        )
        for pattern, servers in study.patterns
    )
    by_key = {(cell.pattern, cell.servers): cell for cell in outcomes}
    cases = dict.fromkeys(
        (servers, size_bytes, outcome.left)
        for pattern, servers, size_bytes in study.simulated
        for outcome in by_key[str(pattern), servers].outcomes
    )
    units = {
        f"simulate {name} on {servers} servers, {size_bytes} B, {left}": _Simulate(
            name, left, Cluster(servers, NICS), size_bytes, segments
        )
        for servers, size_bytes, left in cases
        for name, segments in study.segments.items()
    }
    # Largest first, so that no single worker is left with a long unit at the end.
    first = dict(sorted(units.items(), key=lambda each: (-each[1].cluster.servers, each[0])))
    simulated = cells.spread(first, _simulate, SimulatedRun)
    runs = tuple(simulated[name] for name in units)
    command = command_for("failures", trials, seed, quick=quick)
    return FailureStudy(TITLE, command, trials, seed, assumptions(), outcomes, runs)
