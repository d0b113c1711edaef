"""How measurements become records: one head, one set of checks, one command, for every kind of them.

A kind of record is one module: a frozen dataclass of `Measured` with a `card`, and a function that measures:

    @record_command(ToolSpeed, RecordForm(quick={"cases": ("verify ring 64",)}))
    @click.option("--case", "cases", multiple=True)
    def command(cases: tuple[str, ...], cells: RecordCells) -> ToolSpeed: ...

`optcc.commands.experiment` names it. Every command has `--quick`, `--resume`, `--json`, `--markdown` and `-o`; what an
experiment does not have it refuses, and says why. A module that starts itself as one process of a measurement ends with
`run_command`.

A record that is shown in the docs names their page; `optcc.experiments.docs_tables` writes the table there.
"""

from __future__ import annotations

import functools
import inspect
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Literal, TypeVar

import click
from click.core import ParameterSource

from optcc.cli import echo_card, echo_json, main
from optcc.errors import EXIT_DONE, InputError
from optcc.experiments.cells import Partial, RecordCells, progress
from optcc.experiments.record import Check, Plain, Recorded, these_versions, this_machine
from optcc.experiments.workers import Workers, open_workers
from optcc.show import Card, Shown


class Answer(Recorded, Shown):
    """A record that an experiment makes.

    `docs_page` is the page of docs/ that shows it as a table, between comments with the name of its file; empty
    if no page does.
    """

    docs_page: ClassVar[str] = ""

    def markdown(self) -> str:
        """What the docs show."""
        return self.card().markdown()

    def cards(self) -> Sequence[Card]:
        """The tables that the command prints."""
        return (self.card(),)

    def as_json(self) -> Any:
        """What the command prints with `--json`."""
        return json.loads(self.to_bytes())

    @property
    def target(self) -> Path:
        """Where it is written without `-o`."""
        return self.own_path

    def remarks(self) -> Sequence[str]:
        """Lines that the command prints after the cards."""
        return ()

    @property
    def exit_code(self) -> int:
        """The exit code of the command that made it."""
        return EXIT_DONE


class Measured(Plain, Answer):
    """A record of measurements: a subclass is a frozen dataclass, most with `machine` and `versions` in its fields."""


def head() -> dict[str, Any]:
    """The fields of a record that say where it was made: `machine` and `versions`."""
    return {"machine": this_machine(), "versions": these_versions()}


def check_times(check: Check, where: str, seconds: Sequence[float]) -> None:
    """Raises CodecError, by `check`, unless there are times, all above zero."""
    check(where, seconds, bool(seconds) and min(seconds) > 0, "be one or more, above zero")


Kind = TypeVar("Kind", bound=Measured)


def former_of(kind: type[Kind], cells: RecordCells) -> Kind | None:
    """The record that the command is to write, as it is: for rows of it that are kept. None if there is none."""
    path = click.get_current_context().params["output"] or kind.own_path
    if not path.exists():
        return None
    cells.join(path)
    return kind.read(path)


Measure = Callable[..., Answer | int | None]
IN_TURNS = "its jobs run in turns, so that all meet the same machine"
ONE_JOB = "it is one job, from its start to its end"
SECONDS = "it takes seconds"
"""Why there is no smaller version of an experiment, or why it cannot be continued."""


@dataclass(frozen=True)
class RecordForm:
    """How an experiment can be run.

    `quick` are the values that options have with `--quick` unless they are given, or why there is no smaller version;
    `one_session` why an interrupted run cannot be continued, empty if it can. With `spreads` cells are measured on
    `--jobs` processes or the ranks of an MPI job. `part` is the option of a process that makes no record: it is a part
    of a measurement, and prints its result; its function may return an exit code. Options of `beside` change no cell.
    Without `-o` the record is written to `target` of the record, or to `output`, or not at all.
    """

    quick: Mapping[str, Any] | str
    one_session: str = ""
    spreads: bool = False
    jobs: int = 1
    part: str = ""
    output: Path | Literal["target", "nowhere"] = "target"
    beside: tuple[str, ...] = ()

    def check(self, *, quick: bool, resume: bool) -> None:
        """Raises InputError for what there is not."""
        if quick and isinstance(self.quick, str):
            raise InputError(f"--quick: there is no smaller version: {self.quick}")
        if resume and self.one_session:
            raise InputError(f"--resume: an interrupted run cannot be continued: {self.one_session}")

    def smaller(self, context: click.Context, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with those of `quick` that the user has not given."""
        assert not isinstance(self.quick, str)
        given = {name for name in options if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
        return {**options, **{name: value for name, value in self.quick.items() if name not in given}}


_JOBS = "workers_here"
WHOLE = RecordForm(quick="its own options make it smaller", one_session="it is measured in one session")


@dataclass(frozen=True)
class _Run:
    """One run of the command: its options, beside those of the experiment itself."""

    kind: type[Answer]
    form: RecordForm
    measure: Measure
    output: Path | None
    quick: bool
    resume: bool

    def make(self, workers: Workers, options: Mapping[str, Any]) -> Answer | None:
        """Measures, with what is finished beside the file meanwhile, and writes the record."""
        if self.output is not None and not self.output.absolute().parent.is_dir():
            raise InputError(f"-o {str(self.output)!r}: must be a file in a folder that exists")
        planned = None if self.quick and self.output is None else self._planned()
        if self.resume and planned is None:
            raise InputError("--resume: must come with -o FILE, beside which the unfinished record is")
        partial = None
        if planned is not None and not self.form.one_session:
            path = planned.with_name(f"{planned.name}.partial")
            partial = Partial.open(path, self._settings(options), resume=self.resume)
        with progress() as report:
            cells = RecordCells(partial, workers, report)
            record = call_with(self.measure, options, cells=cells, quick=self.quick)
        if not isinstance(record, Answer):
            return None
        if planned is None:
            click.echo("no record is written without -o FILE", err=True)
            return record
        target = planned if self.output is not None or self.form.output != "target" else record.target
        made = self.kind.made_now(quick=self.quick)
        for former in cells.joined:
            made = made.joined_to(former)
        target.parent.mkdir(parents=True, exist_ok=True)
        record.write_made(target, made)
        click.echo(f"record: {target}", err=True)
        if partial is not None and not cells.leaves_partial:
            partial.close()
        return record

    def _planned(self) -> Path | None:
        if self.output is not None:
            return self.output
        if self.form.output == "nowhere":
            return None
        return self.kind.own_path if self.form.output == "target" else self.form.output

    def _settings(self, options: Mapping[str, Any]) -> str:
        """What the cells of a record have in common: the options, the code, and the machine if it is what counts."""
        said = [f"{name} {value}" for name, value in sorted(options.items()) if name not in self.form.beside]
        said += [f"{room} {digest}" for room, digest in self.kind.made_now().rooms.items()]
        if self.kind.is_dated and is_dataclass(self.kind) and "machine" in {field.name for field in fields(self.kind)}:
            machine = this_machine()
            said.append(f"{machine['cores']} cores of {machine['processor']}")
        return ", ".join((self.kind.format, *(("quick",) if self.quick else ()), *said))


def call_with(measure: Measure, options: Mapping[str, Any], **further: Any) -> Answer | int | None:
    """Calls the function of an experiment with its options, and with those of `further` that it takes."""
    taken = inspect.signature(measure).parameters
    return measure(**options, **{name: value for name, value in further.items() if name in taken})


def record_command(kind: type[Answer], form: RecordForm = WHOLE) -> Callable[[Measure], click.Command]:
    """A command that writes and shows what its function measures, with the options that all experiments have.

    The function returns the record; or None in a process that is only a part of a measurement, and has printed its
    result. It may take `cells`, by which it measures what can be kept and counted, and `quick`.
    """

    def decorate(measure: Measure) -> click.Command:
        @_options(kind, form)
        @functools.wraps(measure)
        def run(markdown: bool, as_json: bool, output: Path | None, quick: bool, resume: bool, **options: Any) -> int:
            if markdown:
                click.echo(kind.read(output).markdown(), nl=False)
                return EXIT_DONE
            form.check(quick=quick, resume=resume)
            jobs = options.pop(_JOBS, 1)
            if quick:
                options = form.smaller(click.get_current_context(), options)
            if form.part and options[form.part] is not None and options[form.part] is not False:
                ended = call_with(measure, options, cells=RecordCells(), quick=quick)
                return ended if isinstance(ended, int) else EXIT_DONE
            with open_workers(jobs) if form.spreads else nullcontext(Workers()) as workers:
                if workers is None:
                    return EXIT_DONE
                record = _Run(kind, form, measure, output, quick, resume).make(workers, options)
            return EXIT_DONE if record is None else _show(record, as_json)

        return click.command()(run)

    return decorate


def _show(record: Answer, as_json: bool) -> int:
    if as_json:
        echo_json(record.as_json())
        return record.exit_code
    for number, card in enumerate(record.cards()):
        if number:
            click.echo()
        echo_card(card)
    for line in record.remarks():
        click.echo(line)
    return record.exit_code


def _options(kind: type[Answer], form: RecordForm) -> Callable[[Callable[..., int]], Callable[..., int]]:
    where = f"{kind.own_path.name} of the package" if form.output == "target" else str(form.output)
    small = f"There is none: {form.quick}." if isinstance(form.quick, str) else "A smaller version; its record says so."
    resumed = f"Not possible: {form.one_session}." if form.one_session else "Go on from FILE.partial, if there is one."
    options = [
        click.option("--quick", is_flag=True, help=small),
        click.option("--resume", is_flag=True, help=resumed),
        click.option("--json", "as_json", is_flag=True, help="Print the record as JSON."),
        click.option("--markdown", is_flag=True, help="Measure nothing: print the record as in the docs."),
        click.option(
            "-o",
            "--output",
            metavar="FILE",
            type=click.Path(path_type=Path, dir_okay=False),
            help=f"Write the record there.  [default: {where}; nowhere with --quick]",
        ),
    ]
    if form.spreads:
        said = "Processes; under mpirun, the ranks of the job instead. They do not change the record."
        options.append(click.option("--jobs", _JOBS, type=int, default=form.jobs, show_default=True, help=said))

    def add(function: Callable[..., int]) -> Callable[..., int]:
        for option in options:
            function = option(function)
        return function

    return add


def run_command(command: click.Command) -> None:
    """Runs the command line of a module that its own measurement starts."""
    exit_on_sigterm()
    main(command=command)


def exit_on_sigterm() -> None:
    """SIGTERM raises SystemExit from now on, so that clean-up runs."""
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
