"""`optcc study`."""

from __future__ import annotations

import click

from optcc.experiments import failure_study, training
from optcc.experiments.cells import RecordCells
from optcc.experiments.failure_study import FailureStudy
from optcc.experiments.recorder import Measure, RecordForm, record_command
from optcc.experiments.training import TrainingStudy

TRIALS, QUICK_TRIALS, SEED = 10_000, 100, 1
FORM = RecordForm(quick={"trials": QUICK_TRIALS}, spreads=True, output="nowhere")


def _options(function: Measure) -> Measure:
    for option in (
        click.option("--seed", type=int, default=SEED, show_default=True, help="Another one draws other failures."),
        click.option("--trials", type=int, default=TRIALS, show_default=True, help="Of every case."),
    ):
        function = option(function)
    return function


@click.group("study", no_args_is_help=False)
def command() -> None:
    """Draw failures from published rates, and say what they cost: collectives, training steps, inference.

    \b
    Example:
      optcc study failures --quick
      optcc study training --jobs 8 -o training.json
      mpirun -n 65 optcc study failures -o failures.json
    """


@record_command(FailureStudy, FORM)
@_options
def failures(trials: int, seed: int, quick: bool, cells: RecordCells) -> FailureStudy:
    """AllReduce with failed NICs under five schedules: over the fault-free ring, for 8 to 1024 servers.

    Failures are drawn --trials times; the same trials and seed give the same bytes of FILE everywhere.
    """
    plan = failure_study.QUICK if quick else failure_study.FULL
    return failure_study.make(plan, trials=trials, seed=seed, cells=cells, quick=quick)


@record_command(TrainingStudy, FORM)
@_options
def train(trials: int, seed: int, quick: bool, cells: RecordCells) -> TrainingStudy:
    """Training steps and inference of named models with failed NICs, over the same with nothing failed."""
    plan = training.QUICK if quick else training.FULL
    return training.make(plan, trials=trials, seed=seed, cells=cells, quick=quick)


command.add_command(failures, "failures")
command.add_command(train, "training")
