"""What a failed NIC costs a training job under published ways to recover: restart, AdapCC, DejaVu, R2CCL; a model.

No code of theirs runs here, and little more than statements about them was available: each number is a parameter of
`RecoveryModel` or `RecoveryJob` with its source, and what nobody states is said in `assumed`. NICs fail independently
at a published rate and are repaired after a time that is assumed, one NIC for each GPU, as in
`optcc.experiments.failure_model`. In the long run a job of G GPUs loses of its throughput

    recovery   G rate recovery_s: each failure stops all GPUs for so long
    degraded   with p the share of time in which a NIC is down: p u if the u GPUs that cannot go on without one leave
               until its repair (expected value, of failures in different units); if all go on,
               (1 - (1 - p)^G) x/(1 + x) for an overhead x of a step with a NIC down
    standing   what the method takes while nothing fails

No draws are needed: the expected values are exact. The record is the same on every machine, `optcc-recovery/1`, made by

    optcc experiment recovery-models
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import msgspec

from optcc.errors import InputError
from optcc.experiments.failure_model import DAY_S, RATES, REPAIRS_S, FailureRate, down_probability
from optcc.experiments.made import PLANNED_ROOMS
from optcc.experiments.record import RECORDS, Check
from optcc.experiments.recorder import SECONDS, Measured, RecordForm, record_command
from optcc.show import Card
from optcc.units import show_time

R2CCL, ADAPCC, DEJAVU, RESTART = "r2ccl", "adapcc", "dejavu", "restart"
_PAGE = "pages about R2CCL"
_SUMMARIES = "summaries of R2CCL's paper"


class RecoveryModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A way to recover: seconds for which a failure stops the job, whether GPUs then leave, and the standing cost."""

    name: str
    recovery_s: float
    gpus_leave: bool
    standing_percent: float
    source: str
    assumed: str


class RecoveryJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A training job of `gpus`; `unit_gpus` cannot go on without one of them; `r2ccl_percent` is the overhead of a
    step with a NIC down that R2CCL states for it."""

    name: str
    gpus: int
    unit_gpus: int
    r2ccl_percent: float
    source: str
    assumed: str


class RecoveryLoss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Percent of its throughput that a job loses in the long run under a model, and in a step while one NIC is down."""

    job: str
    model: str
    rate: str
    repair: str
    recovery_percent: float
    degraded_percent: float
    standing_percent: float
    one_down_percent: float

    @property
    def percent(self) -> float:
        """All of it."""
        return self.recovery_percent + self.degraded_percent + self.standing_percent


MODELS = (
    RecoveryModel(
        *(RESTART, 68 * 60.0, False, 0.0, f"{_SUMMARIES}: a median of 68 minutes"),
        "work since the checkpoint is in the 68 minutes, and another server takes the place of the one with the NIC",
    ),
    RecoveryModel(
        *(DEJAVU, 0.56, False, 2.0, f"{_PAGE}: 560 ms, read as DejaVu's by its ratio; streaming about 2 % (its paper)"),
        "a spare goes on from the replica of the state; made for inference, taken here for a training job",
    ),
    RecoveryModel(
        *(ADAPCC, 0.145, True, 0.0, f"{_PAGE}: 145 ms, read as AdapCC's by its ratio; it acts between collectives"),
        "the GPU of the NIC, and those that cannot go on without it, leave until the repair; no collective is lost",
    ),
    RecoveryModel(
        *(R2CCL, 0.012, False, 0.0, f"{_PAGE}: 12 ms"),
        "the overhead stated for one failed NIC is that of several",
    ),
)
JOBS = (
    RecoveryJob("2.7B, data parallel over 16", 16, 1, 0.71, _SUMMARIES, ""),
    RecoveryJob(
        "Megatron, data parallel over 32",
        32,
        1,
        100 * (752_405 / 750_627 - 1),
        f"{_SUMMARIES}: 752,405 and 750,627/s",
        "",
    ),
    RecoveryJob("512 GPUs, simulated by R2CCL", 512, 8, 1.5, _SUMMARIES, "tensor parallelism within a server of 8"),
)


def loss_of(model: RecoveryModel, job: RecoveryJob, rate: FailureRate, repair: str) -> RecoveryLoss:
    """What a job loses under a model; `repair` is one of `REPAIRS_S`. Raises InputError for a job of one unit alone.

    >>> restart, *_, ours = MODELS
    >>> [round(loss_of(each, JOBS[0], RATES[0], "1d").percent, 4) for each in (restart, ours)]
    [0.0006, 0.0001]
    """
    if not 0 < job.unit_gpus < job.gpus:
        raise InputError(f"unit_gpus {job.unit_gpus}: must be from 1 to below the {job.gpus} GPUs of the job")
    down = down_probability(rate, REPAIRS_S[repair])
    per_s = job.gpus * rate.per_port_day / DAY_S
    overhead = Fraction(job.r2ccl_percent) / 100
    degraded, one_down = Fraction(0), Fraction(0)
    if model.gpus_leave:
        degraded, one_down = down * job.unit_gpus, Fraction(job.unit_gpus, job.gpus - job.unit_gpus)
    elif model.name == R2CCL:
        degraded, one_down = (1 - (1 - down) ** job.gpus) * overhead / (1 + overhead), overhead
    return RecoveryLoss(
        *(job.name, model.name, rate.name, repair),
        float(100 * per_s * Fraction(model.recovery_s)),
        float(100 * degraded),
        model.standing_percent,
        float(100 * one_down),
    )


@dataclass(frozen=True)
class RecoveryModels(Measured):
    """The models and jobs with their parameters, and what each job loses under each model, rate and repair time."""

    models: tuple[RecoveryModel, ...]
    jobs: tuple[RecoveryJob, ...]
    losses: tuple[RecoveryLoss, ...]

    format: ClassVar[str] = "optcc-recovery/1"
    own_path: ClassVar[Path] = RECORDS / "recovery-models.json"
    rooms: ClassVar[tuple[str, ...]] = PLANNED_ROOMS
    is_dated: ClassVar[bool] = False
    docs_page: ClassVar[str] = "studies.md"

    def check_fields(self, check: Check) -> None:
        names, jobs = {each.name for each in self.models}, {each.name for each in self.jobs}
        check("models", sorted(names), R2CCL in names, f"have {R2CCL}, with which others are compared")
        for number, model in enumerate(self.models):
            where = f"models[{number}].recovery_s"
            check(where, model.recovery_s, 0 < model.recovery_s < float("inf"), "be above zero")
        for number, loss in enumerate(self.losses):
            where = f"losses[{number}]"
            check(f"{where}.model", loss.model, loss.model in names, "be one of the models")
            check(f"{where}.job", loss.job, loss.job in jobs, "be one of the jobs")
            check(f"{where}.recovery_percent", loss.recovery_percent, loss.recovery_percent >= 0, "not be negative")

    def model(self, name: str) -> RecoveryModel:
        """The model of that name; raises StopIteration if there is none."""
        return next(each for each in self.models if each.name == name)

    def over_r2ccl(self, name: str) -> float:
        """For how many times as long as with R2CCL a failure stops the job."""
        return self.model(name).recovery_s / self.model(R2CCL).recovery_s

    def one_down_over_r2ccl(self, name: str) -> list[float]:
        """A step's overhead while one NIC is down, over R2CCL's, of each job that loses no more than one GPU."""
        alone = {job.name for job in self.jobs if job.unit_gpus == 1}
        found: dict[str, dict[str, float]] = {}
        for loss in self.losses:
            if loss.job in alone:
                found.setdefault(loss.job, {})[loss.model] = loss.one_down_percent
        return [each[name] / each[R2CCL] for each in found.values()]

    def card(self) -> Card:
        rows = []
        for job in self.jobs:
            for model in self.models:
                own = [each for each in self.losses if (each.job, each.model) == (job.name, model.name)]
                ends = min(own, key=lambda each: each.percent), max(own, key=lambda each: each.percent)
                rows.append(
                    (
                        *(job.name, model.name, show_time(model.recovery_s)),
                        *(f"{each.percent:.2g} ({each.rate}, {each.repair})" for each in ends),
                        f"{own[0].one_down_percent:.2g}",
                    )
                )
        heads = ("job", "recovery by", "stops for", "loses least, %", "loses most, %", "a step with a NIC down, %")
        return Card("What failing NICs cost a job in the long run, modelled", heads, tuple(rows))


def losses(models: Sequence[RecoveryModel] = MODELS, jobs: Sequence[RecoveryJob] = JOBS) -> tuple[RecoveryLoss, ...]:
    """Of every job under every model, rate and repair time."""
    return tuple(
        loss_of(model, job, rate, repair) for job in jobs for model in models for rate in RATES for repair in REPAIRS_S
    )


@record_command(RecoveryModels, RecordForm(quick=SECONDS, one_session=SECONDS))
def command() -> RecoveryModels:
    """Evaluate the models of recovery for every job, failure rate and repair time, and write the record."""
    return RecoveryModels(MODELS, JOBS, losses())
