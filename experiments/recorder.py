"""How measurements become records: one head, one set of checks, one command, for every kind of them.

A kind of record is one module: a frozen dataclass of `Measured` with a `card`, and a function that measures:

    @record_command(ToolSpeed)
    @click.option(...)
    def command(...) -> ToolSpeed: ...

`optcc.commands.experiment` names it. A module that starts itself as one process of a measurement ends with
`run_command`.

A record that is shown in the docs names their page; `optcc.experiments.docs_tables` writes the table there.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import click

from optcc.cli import echo_card, main
from optcc.errors import EXIT_DONE
from optcc.experiments.record import Check, Plain, these_versions, this_machine
from optcc.show import Shown


class Measured(Plain, Shown):
    """A record of measurements: a subclass is a frozen dataclass, most with `machine` and `versions` among its fields.

    `docs_page` is the page of docs/ that shows it as a table, between comments with the name of its file; empty
    if no page does.
    """

    docs_page: ClassVar[str] = ""

    def markdown(self) -> str:
        """What the docs show."""
        return self.card().markdown()

    @property
    def target(self) -> Path:
        """Where it is written without `-o`."""
        return self.own_path

    def remarks(self) -> Sequence[str]:
        """Lines that the command prints after the card."""
        return ()

    @property
    def exit_code(self) -> int:
        """The exit code of the command that made it."""
        return EXIT_DONE


def head() -> dict[str, Any]:
    """The fields of a record that say where it was made: `machine` and `versions`."""
    return {"machine": this_machine(), "versions": these_versions()}


def check_times(check: Check, where: str, seconds: Sequence[float]) -> None:
    """Raises CodecError, by `check`, unless there are times, all above zero."""
    check(where, seconds, bool(seconds) and min(seconds) > 0, "be one or more, above zero")


Measure = Callable[..., Measured | Iterator[Measured] | None]


def record_command(kind: type[Measured]) -> Callable[[Measure], click.Command]:
    """A command that writes and shows what its function measures, with options `--markdown` and `-o` besides its own.

    The function returns the record; or yields what it has so far, which is written each time; or returns None in a
    process that is only a part of a measurement, and has printed its result.
    """

    def decorate(measure: Measure) -> click.Command:
        @click.option("--markdown", is_flag=True, help="Measure nothing: print the record as in the docs.")
        @click.option(
            "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help=f"{kind.own_path.name} if absent."
        )
        @functools.wraps(measure)
        def run(markdown: bool, output: Path | None, **options: Any) -> int:
            if markdown:
                click.echo(kind.read(output).markdown(), nl=False)
                return EXIT_DONE
            made = measure(**options)
            record = None
            for record in made if isinstance(made, Iterator) else (made,):
                if record is not None:
                    target = output or record.target
                    target.parent.mkdir(parents=True, exist_ok=True)
                    record.write_made(target)
            if record is None:
                return EXIT_DONE
            echo_card(record)
            for line in record.remarks():
                click.echo(line)
            return record.exit_code

        return click.command()(run)

    return decorate


def run_command(command: click.Command) -> None:
    """Runs the command line of a module that its own measurement starts."""
    exit_on_sigterm()
    main(command=command)


def exit_on_sigterm() -> None:
    """SIGTERM raises SystemExit from now on, so that clean-up runs."""
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
