"""`optcc study`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial as bound_to
from pathlib import Path
from typing import TypeVar

import click

from optcc.cli import echo_card, echo_json, json_option
from optcc.errors import InputError
from optcc.experiments import failure_study, training
from optcc.experiments.failure_study import FailureStudy
from optcc.experiments.study_units import Partial, Report, check_numbers, quiet, study_name
from optcc.experiments.training import TrainingStudy
from optcc.show import Card

TRIALS, QUICK_TRIALS, SEED = 10_000, 100, 1


StudyRecord = TypeVar("StudyRecord", FailureStudy, TrainingStudy)


def _options(function: Callable[..., None]) -> Callable[..., None]:
    for option in (
        json_option,
        click.option("--quick", is_flag=True, help=f"A small study of seconds, of {QUICK_TRIALS} trials."),
        click.option("--resume", is_flag=True, help="Go on from FILE.partial, if there is one."),
        click.option(
            "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the record to FILE."
        ),
        click.option(
            "--jobs", type=int, default=1, show_default=True, help="Processes; they do not change the result."
        ),
        click.option("--seed", type=int, default=SEED, show_default=True, help="Another one draws other failures."),
        click.option("--trials", type=int, default=None, help=f"Of every case.  [default: {TRIALS}]"),
    ):
        function = option(function)
    return function


@contextmanager
def _progress(wanted: bool) -> Iterator[Report]:
    """A line on a terminal that says how far it is."""
    if not wanted:
        yield quiet
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")

        def report(done: int, of: int, name: str) -> None:
            progress.update(task, completed=done, total=of, description=name)

        yield report


def _study(
    name: str,
    make: Callable[..., StudyRecord],
    trials: int | None,
    seed: int,
    jobs: int,
    output: Path | None,
    resume: bool,
    quick: bool,
) -> StudyRecord:
    """Makes the record, and writes it if there is a file for it; what is done is beside that file meanwhile."""
    count = (QUICK_TRIALS if quick else TRIALS) if trials is None else trials
    check_numbers(count, seed, jobs)
    if resume and output is None:
        raise InputError("--resume: must come with -o FILE, beside which the unfinished study is")
    partial = None
    if output is not None:
        if output.is_dir() or not output.absolute().parent.is_dir():
            raise InputError(f"-o {str(output)!r}: must be a file in a folder that exists")
        path = output.with_name(f"{output.name}.partial")
        partial = Partial.open(path, study_name(name, count, seed, quick=quick), resume=resume)
    with _progress(sys.stderr.isatty()) as report:
        record = make(trials=count, seed=seed, jobs=jobs, partial=partial, report=report, quick=quick)
    if output is not None and partial is not None:
        record.write_made(output)
        partial.close()
    return record


@click.group("study", no_args_is_help=False)
def command() -> None:
    """Draw failures from published rates, and say what they cost: collectives, training steps, inference.

    \b
    Example:
      optcc study failures --quick
      optcc study training --jobs 8 -o training.json
    """


@command.command("failures", epilog="Example: optcc study failures --jobs 8 -o failures.json")
@_options
def failures(
    trials: int | None, seed: int, jobs: int, output: Path | None, resume: bool, quick: bool, as_json: bool
) -> None:
    """AllReduce with failed NICs under five schedules: over the fault-free ring, for 8 to 1024 servers.

    Failures are drawn --trials times; the same trials and seed give the same bytes of FILE everywhere.
    """
    make = bound_to(failure_study.make, failure_study.QUICK if quick else failure_study.FULL)
    record = _study("failures", make, trials, seed, jobs, output, resume, quick)
    _tell(record, as_json, (record.card(), record.one_server(), record.patterns(), record.finite()))


@command.command("training", epilog="Example: optcc study training --jobs 8 -o training.json")
@_options
def train(
    trials: int | None, seed: int, jobs: int, output: Path | None, resume: bool, quick: bool, as_json: bool
) -> None:
    """Training steps and inference of named models with failed NICs, over the same with nothing failed."""
    make = bound_to(training.make, training.QUICK if quick else training.FULL)
    record = _study("training", make, trials, seed, jobs, output, resume, quick)
    _tell(record, as_json, (record.healthy(), record.card(), record.explained(), record.inference()))


def _tell(record: FailureStudy | TrainingStudy, as_json: bool, cards: tuple[Card, ...]) -> None:
    if as_json:
        echo_json(record.as_json())
        return
    for number, card in enumerate(cards):
        if number:
            click.echo()
        echo_card(card)
