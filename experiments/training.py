"""The overhead of failed NICs for a training step or an answer of a language model: trials of a model, as a record.

`training_model` is the model, `training_jobs` what it is applied to.

Its format is `optcc-training/1`; the record that comes with the package is made by

    optcc study training -o experiments/records/training.json
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from optcc.experiments import failure_model
from optcc.experiments.cells import HERE, RecordCells
from optcc.experiments.failure_model import (
    LLAMA_NETWORK,
    REPAIRS_S,
    Cluster,
    Instant,
    Left,
    OneServer,
    Pattern,
    Uniform,
    down_probability,
)
from optcc.experiments.failure_study import Assumption, assumptions
from optcc.experiments.failure_times import COLUMNS
from optcc.experiments.made import PLANNED_ROOMS
from optcc.experiments.record import RECORDS, decode, lines_of, rational, text_of
from optcc.experiments.recorder import Answer
from optcc.experiments.study_units import TRIALS_MAX, check_numbers, command_for
from optcc.experiments.training_jobs import CLAIMS, JOBS, LOST, SERVINGS, OverheadClaim
from optcc.experiments.training_model import (
    NICS,
    NOTHING_LOST,
    Serving,
    TrainingJob,
    allreduce_s,
    exposed_s,
    fluid_times,
    step_s,
    steps_s,
)
from optcc.experiments.trial_statistics import MEDIAN, P95, mean, quantile
from optcc.show import Card
from optcc.units import show_time

TITLE = "Training steps and inference with failed NICs"
DIGITS = 12
"""Overheads are rounded to so many decimals, so that their sums stay exact and short."""


@dataclass(frozen=True)
class TrainingPlan:
    """Which jobs under which patterns."""

    cells: tuple[tuple[TrainingJob, Pattern], ...]


def _patterns(job: TrainingJob) -> Iterator[Pattern]:
    most = 10 if job.servers >= 64 else 2
    yield from (Uniform(failed) for failed in range(1, most + 1))
    if job.servers >= 64:
        yield Instant(f"{LLAMA_NETWORK.name} 3d", down_probability(LLAMA_NETWORK, REPAIRS_S["3d"]))


FULL = TrainingPlan(tuple((job, pattern) for job in JOBS for pattern in _patterns(job)))
QUICK = TrainingPlan(tuple((job, Uniform(failed)) for job in (JOBS[1], JOBS[4]) for failed in (1, 2)))


class Overhead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a schedule: by what share a step is longer than the fault-free one, over the trials."""

    schedule: str
    mean: float
    mean_low: float
    mean_high: float
    median: float
    p95: float
    worst: float


class TrainingCell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job under a pattern."""

    job: str
    pattern: str
    overheads: tuple[Overhead, ...]

    def of(self, schedule: str) -> Overhead:
        """The overhead of a schedule."""
        return next(each for each in self.overheads if each.schedule == schedule)


class HealthyStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job with nothing failed, in seconds: compute, its AllReduces one after the other, what of them is exposed.

    `assumptions` are the fields of the job.
    """

    job: str
    compute_s: float
    allreduce_s: float
    exposed_s: float
    step_s: float
    assumptions: dict[str, Any]


class ServingCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A served model, one of its servers without `failed` NICs: seconds, and by what share they are longer."""

    serving: str
    schedule: str
    failed: int
    first_token_s: float
    token_s: float
    first_token_overhead: float
    token_overhead: float


class Explained(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The share of a step that `schedule`'s AllReduce must be, with nothing to hide it, for the `claimed` overhead.

    For the mean of the trials to be as claimed, for the 95th percentile, or for the worst. Above 1: it cannot be.
    """

    source: str
    pattern: str
    servers: int
    claimed: float
    schedule: str
    for_mean: float
    for_p95: float
    for_worst: float


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    title: str
    command: tuple[str, ...]
    trials: int
    seed: int
    assumptions: tuple[Assumption, ...]
    columns: tuple[str, ...]
    jobs: tuple[HealthyStep, ...]
    servings: tuple[dict[str, Any], ...]
    cells: tuple[TrainingCell, ...]
    served: tuple[ServingCase, ...]
    claims: tuple[Explained, ...]


_LISTS = ("jobs", "servings", "cells", "served", "claims")


@dataclass(frozen=True)
class TrainingStudy(Answer):
    """The record: options, assumptions, fault-free steps, overheads of training cells, and inference."""

    format: ClassVar[str] = "optcc-training/1"
    own_path: ClassVar[Path] = RECORDS / "training.json"
    rooms: ClassVar[tuple[str, ...]] = PLANNED_ROOMS
    is_dated: ClassVar[bool] = False

    title: str
    command: tuple[str, ...]
    trials: int
    seed: int
    assumptions: tuple[Assumption, ...]
    jobs: tuple[HealthyStep, ...]
    servings: tuple[dict[str, Any], ...]
    cells: tuple[TrainingCell, ...]
    served: tuple[ServingCase, ...]
    claims: tuple[Explained, ...]

    def card(self) -> Card:
        """Mean overheads of training steps."""
        names = [name for name in COLUMNS if name != "ring"]
        rows = []
        for cell in self.cells:
            failed = cell.pattern.removeprefix("uniform ")
            if not failed.isdecimal() or int(failed) in (1, 2, 5, 10):
                shown = (cell.of(name) for name in names)
                rows.append((cell.job, failed, *(f"{100 * each.mean:.3f} / {100 * each.worst:.3f}" for each in shown)))
        title = f"Training step, overhead in %: mean / worst of {self.trials} trials"
        return Card(title, ("job", "failed NICs", *names), tuple(rows))

    def cards(self) -> tuple[Card, ...]:
        return self.healthy(), self.card(), self.explained(), self.inference()

    def healthy(self) -> Card:
        """The fault-free steps."""
        rows = tuple(
            (
                each.job,
                show_time(each.compute_s),
                show_time(each.allreduce_s),
                show_time(each.exposed_s),
                show_time(each.step_s),
            )
            for each in self.jobs
        )
        return Card("Nothing failed", ("job", "compute", "AllReduce", "of it exposed", "step"), rows)

    def inference(self) -> Card:
        """Inference, as times and overheads."""
        rows = tuple(
            (
                each.serving,
                each.schedule,
                str(each.failed),
                f"{show_time(each.first_token_s)} ({100 * each.first_token_overhead:+z.2f} %)",
                f"{show_time(each.token_s)} ({100 * each.token_overhead:+z.2f} %)",
            )
            for each in self.served
        )
        return Card("Inference", ("model", "schedule", "failed NICs", "first token", "each token"), rows)

    def explained(self) -> Card:
        """The share of a step that the AllReduce must be for published overheads."""
        rows = tuple(
            (
                f"{100 * each.claimed:.1f} %",
                each.pattern,
                each.schedule,
                *(f"{100 * share:.1f}" for share in (each.for_mean, each.for_p95, each.for_worst)),
            )
            for each in self.claims
        )
        columns = ("stated", "failed", "schedule", "mean", "95th percentile", "worst")
        return Card("Exposed AllReduce, in % of a step, that would give what is stated", columns, rows)

    def as_json(self) -> dict[str, Any]:
        """Everything, as the file has it."""
        found: dict[str, Any] = json.loads(self.to_bytes())
        return found

    def to_bytes(self) -> bytes:
        """The record as a file, a line for each item of a list."""
        file = _File(
            self.format,
            self.title,
            self.command,
            self.trials,
            self.seed,
            self.assumptions,
            COLUMNS,
            self.jobs,
            self.servings,
            self.cells,
            self.served,
            self.claims,
        )
        built = msgspec.to_builtins(file, enc_hook=text_of)
        lists = {name: built.pop(name) for name in _LISTS}
        return lines_of(built, lists)

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "") -> TrainingStudy:
        file, check = decode(data, name, _File, cls.format, rational)
        check("columns", file.columns, file.columns == COLUMNS, f"be {list(COLUMNS)}")
        check("trials", file.trials, 1 <= file.trials <= TRIALS_MAX, f"be from 1 to {TRIALS_MAX}")
        jobs = {each.job for each in file.jobs}
        for number, each in enumerate(file.jobs):
            check(f"jobs[{number}].step_s", each.step_s, 0 < each.compute_s <= each.step_s < math.inf, "be the longest")
        for number, cell in enumerate(file.cells):
            check(f"cells[{number}].job", cell.job, cell.job in jobs, "be one of $.jobs")
            names = tuple(each.schedule for each in cell.overheads)
            check(f"cells[{number}].overheads", names, names == COLUMNS, f"be {list(COLUMNS)}")
            for place, over in enumerate(cell.overheads):
                rising = 0 <= over.median <= over.p95 <= over.worst < math.inf and over.mean <= over.worst
                check(f"cells[{number}].overheads[{place}]", over.schedule, rising, "have median <= p95 <= worst")
        return cls(
            file.title,
            file.command,
            file.trials,
            file.seed,
            file.assumptions,
            file.jobs,
            file.servings,
            file.cells,
            file.served,
            file.claims,
        )


@dataclass(frozen=True)
class _Unit:
    """A unit of work: all trials of a job under a pattern."""

    job: TrainingJob
    pattern: Pattern
    seed: int
    trials: int


def _work(unit: _Unit) -> list[dict[str, Any]]:
    """The overheads of all schedules, as JSON has them."""
    job = unit.job
    cluster = Cluster(job.servers, NICS)
    fault_free = step_s(job, {}, "optimal")
    found: dict[str, Counter[Fraction]] = {name: Counter() for name in COLUMNS}
    for trial in range(unit.trials):
        damage = failure_model.draw(unit.pattern, cluster, unit.seed, trial)
        for name, time in zip(COLUMNS, steps_s(job, damage), strict=True):
            found[name][time] += 1
    overheads = []
    for name, times in found.items():
        values = sorted((round(time / fault_free - 1, DIGITS), count) for time, count in times.items())
        average = mean(values)
        overheads.append(
            Overhead(
                name,
                average.value,
                average.low,
                average.high,
                quantile(values, MEDIAN).value,
                quantile(values, P95).value,
                float(values[-1][0]),
            )
        )
    built: list[dict[str, Any]] = msgspec.to_builtins(overheads)
    return built


def healthy_step(job: TrainingJob) -> HealthyStep:
    """The fault-free step."""
    all_s = sum((allreduce_s(job, size, NOTHING_LOST, "optimal") for size in job.buckets_bytes), Fraction(0))
    return HealthyStep(
        job.name,
        float(job.compute_s),
        float(all_s),
        float(exposed_s(job, NOTHING_LOST, "optimal")),
        float(step_s(job, {}, "optimal")),
        msgspec.to_builtins(job, enc_hook=text_of),
    )


def serve(serving: Serving) -> Iterator[ServingCase]:
    """A served model while one of its servers lacks none, one, ... of its NICs."""
    cluster = Cluster(serving.servers, NICS)
    for failed in (0, *LOST):
        left = Left.of(failure_model.draw(OneServer(failed), cluster, 0, 0)) if failed else NOTHING_LOST
        for name in COLUMNS if failed else ("optimal",):
            first, token = serving.first_token_s(left, name), serving.token_s(left, name)
            before = serving.first_token_s(NOTHING_LOST, name), serving.token_s(NOTHING_LOST, name)
            over = [float(now / then - 1) for now, then in zip((first, token), before, strict=True)]
            yield ServingCase(serving.name, name, failed, float(first), float(token), *over)


def explain(claim: OverheadClaim, seed: int, trials: int) -> Iterator[Explained]:
    """The share of the AllReduce with which each schedule would have the overhead of `claim`."""
    cluster = Cluster(claim.servers, NICS)
    lefts = Counter(Left.of(failure_model.draw(claim.pattern, cluster, seed, trial)) for trial in range(trials))
    for place, name in enumerate(COLUMNS):
        found: Counter[Fraction] = Counter()
        for left, count in lefts.items():
            found[fluid_times(left, cluster)[place] - 1] += count
        values = sorted(found.items())
        overheads = (mean(values).value, quantile(values, P95).value, float(values[-1][0]))
        shares = (float(claim.overhead) / each for each in overheads)
        yield Explained(claim.source, str(claim.pattern), claim.servers, float(claim.overhead), name, *shares)


def make(
    plan: TrainingPlan,
    *,
    trials: int,
    seed: int,
    cells: RecordCells = HERE,
    quick: bool = False,
) -> TrainingStudy:
    """Draws every cell of `plan`; the result depends on `trials` and `seed`, and on nothing else.

    Raises InputError for options out of range.
    """
    check_numbers(trials, seed)
    units = {f"{job.name}, {pattern}": _Unit(job, pattern, seed, trials) for job, pattern in plan.cells}
    done = cells.spread(units, _work, tuple[Overhead, ...])
    found = tuple(TrainingCell(unit.job.name, str(unit.pattern), done[name]) for name, unit in units.items())
    return TrainingStudy(
        TITLE,
        command_for("training", trials, seed, quick=quick),
        trials,
        seed,
        assumptions(),
        tuple(healthy_step(job) for job in dict.fromkeys(job for job, _ in plan.cells)),
        tuple(msgspec.to_builtins(serving, enc_hook=text_of) for serving in SERVINGS),
        found,
        tuple(case for serving in SERVINGS for case in serve(serving)),
        tuple(each for claim in CLAIMS for each in explain(claim, seed, trials)),
    )
