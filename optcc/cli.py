"""The entry point of the command line: a table of commands, whose modules are imported when one is asked for.

Also what every command shares: the types of options (a topology, a size, one of several names), how a noun is printed,
and how an error becomes one line on stderr and an exit code.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from optcc.errors import (
    EXIT_BAD_INPUT,
    EXIT_INTERRUPTED,
    EXIT_REFUTED,
    ArgumentError,
    InputError,
    OptccError,
    did_you_mean,
    must_be_one_of,
)
from optcc.units import parse_size, parse_time

if TYPE_CHECKING:
    from optcc.show import Shown
    from optcc.topology import Topology

COMMANDS = {
    "bench": "time schedules under mpirun, with nccl-tests' flags and columns",
    "bound": "say how fast an AllReduce could possibly be, exactly",
    "compile": "make a plan, transfers, or a file for another tool of a schedule",
    "demo": "the whole story on emulated hosts: one server lost half its bandwidth",
    "doctor": "say what this host has, and what of it is misconfigured",
    "experiment": "answer a question by a measurement or a study, and keep the record",
    "explain": "say what happened first in a job, and who waited for whom",
    "fabric": "emulate multi-NIC hosts as network namespaces",
    "figures": "draw every figure from the records",
    "list": "list the schedule library",
    "observe": "take chunks of the collectives of a running job, and write them to files",
    "probe": "measure what every NIC of every host sends and receives",
    "replay": "check a certificate in exact arithmetic, without a solver",
    "show": "print a schedule's timetable, or draw what every port does when",
    "simulate": "predict how long a plan takes",
    "status": "show a running job of this host: its ranks, its NICs, and who waits for whom",
    "study": "draw failures from published rates, and say what they cost",
    "verify": "prove a plan right, or show why it is wrong",
}
"""What each command does; its module is that of `optcc.commands` with its name."""
SEGMENTS_MAX = 1_000_000
_FIRST_RANK_S = 2.0


class Door(click.Group):
    """Commands that are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"optcc.commands.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuses a command that there is not with the one that it resembles."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}{did_you_mean(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(cls=Door, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="optcc")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def optcc(debug: bool) -> None:
    """AllReduce at the speed that the surviving bandwidth allows: schedules, bounds, proofs, runs."""
    del debug


def main(arguments: Sequence[str] | None = None, command: click.Command | None = None) -> None:
    """Runs the command line, or that of a command of its own, and exits with the code that says how it ended."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    with _interrupts() as interrupted:
        code = run(words, command)
    if interrupted and code != EXIT_INTERRUPTED:
        code = _complain("interrupted", EXIT_INTERRUPTED, debug=False)
    sys.exit(code)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """The interrupts so far, those included whose KeyboardInterrupt is lost: C code that calls back into Python, such
    as numba's while it compiles, has no way to pass an exception on.
    """
    seen: list[int] = []
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield seen
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run(words: list[str], command: click.Command | None = None) -> int:
    """Runs one command line and returns its exit code; errors are one line on stderr."""
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        if command is None:
            result = optcc.main(words, prog_name="optcc", standalone_mode=False)
        else:
            result = command.main(words, standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _complain("interrupted", EXIT_INTERRUPTED, debug)
    except click.Abort:
        return _complain("interrupted", EXIT_INTERRUPTED, debug)
    except click.ClickException as error:
        _let_first_rank_speak()
        return _complain(error.format_message().replace("\n", " "), EXIT_BAD_INPUT, debug)
    except ArgumentError as error:
        _let_first_rank_speak()
        return _complain(f"--{error}", error.exit_code, debug)
    except OptccError as error:
        if isinstance(error, InputError):
            _let_first_rank_speak()
        return _complain(str(error), error.exit_code, debug)
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away: nothing is left to say, and nobody to say it to
        return 0
    except MemoryError as error:
        return _complain(f"out of memory: {error}", EXIT_BAD_INPUT, debug)
    except OSError as error:
        _discard_stdout()
        where = "output" if error.filename is None else f"file {str(error.filename)!r}"
        return _complain(f"{where}: {error.strerror or error}", EXIT_REFUTED, debug)
    return result if isinstance(result, int) else 0


def _let_first_rank_speak() -> None:
    """An error in what all ranks were given is said once: when rank 0 exits, its launcher ends the others."""
    from optcc.runtime.launchers import find_launch

    with suppress(InputError):
        if find_launch(os.environ).rank > 0:
            time.sleep(_FIRST_RANK_S)


def _discard_stdout() -> None:
    """What could not be written is not to be written again when Python ends."""
    with suppress(OSError, ValueError), Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def _complain(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    click.echo(f"optcc: {message}", err=True)
    return code


class SizeType(click.ParamType[int]):
    """A size option: 64MiB, 1G, 4096."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ARG002
        return value if isinstance(value, int) else parse_size(value)


class TopologyType(click.ParamType["Topology"]):
    """A topology option: the text form, or a TOML file."""

    name = "topology"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Topology:  # noqa: ARG002
        from optcc.topology import Topology

        return value if isinstance(value, Topology) else Topology.parse(value)


class SegmentsType(click.ParamType["int | str"]):
    """A number of segments, or `auto`."""

    name = "segments"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:  # noqa: ARG002
        if value == "auto" or isinstance(value, int):
            return value  # type: ignore[no-any-return]
        if not value.isdecimal() or not 1 <= int(value) <= SEGMENTS_MAX:
            raise InputError(f"--segments {value!r}: must be auto, or a number from 1 to {SEGMENTS_MAX}")
        return int(value)


class SecondsType(click.ParamType[float]):
    """A number of seconds above zero."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ARG002
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise InputError(f"{_option(param)} {value!r}: must be a number of seconds above zero")
        return seconds


class NumberType(click.ParamType[Fraction]):
    """An exact number that is not negative: 2, 1.5 or 8/7."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Fraction:  # noqa: ARG002
        if isinstance(value, Fraction):
            return value
        try:
            number = Fraction(value)
        except (ValueError, ZeroDivisionError):
            raise InputError(f"{_option(param)} {value!r}: must be a number such as 2, 1.5 or 8/7") from None
        if number < 0:
            raise InputError(f"{_option(param)} {value!r}: must not be negative")
        return number


class IntervalType(click.ParamType[tuple[Fraction, Fraction]]):
    """LOW:HIGH, or one number for both."""

    name = "interval"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Fraction, Fraction]:
        if isinstance(value, tuple):
            return value
        low, colon, high = value.partition(":")
        number = NumberType()
        return number.convert(low, param, ctx), number.convert(high if colon else low, param, ctx)


class OneOf(click.ParamType[str]):
    """One of several names."""

    name = "name"

    def __init__(self, allowed: Iterable[str]) -> None:
        self.allowed = tuple(allowed)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ARG002
        if value in self.allowed:
            return value  # type: ignore[no-any-return]
        raise InputError(f"{_option(param)} {value!r}: {must_be_one_of(value, self.allowed)}")

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """The names that begin so."""
        return [CompletionItem(name) for name in self.allowed if name.startswith(incomplete)]


class ScheduleType(click.ParamType[str]):
    """A schedule's name, or FILE.py:FUNCTION, as text: `optcc.planner.find_schedule` knows which there are."""

    name = "schedule"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ARG002
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """The names of the library that begin so, else files."""
        from optcc.planner import AUTO, LIBRARY

        found = [CompletionItem(name) for name in (*LIBRARY, AUTO) if name.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="file")]


class CollectiveType(OneOf):
    """One of `allowed`, `optcc.collective.COLLECTIVES` unless given; `all_to_all`, `AllToAll` and nccl-tests'
    `alltoall_perf` are one name."""

    def __init__(self, allowed: Iterable[str] | None = None) -> None:
        from optcc.collective import COLLECTIVES

        super().__init__(COLLECTIVES if allowed is None else allowed)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        plain = str(value).removesuffix("_perf").replace("_", "").replace("-", "").lower()
        return super().convert(plain if plain in self.allowed else value, param, ctx)


def _option(param: click.Parameter | None) -> str:
    return "value" if param is None else param.opts[0]


Command = Callable[..., Any]


def plan_options(function: Command) -> Command:
    """The options that turn a schedule's name into a plan."""
    from optcc.collective import DTYPE_BYTES, REDUCTIONS
    from optcc.timing import MODELS

    for option in (
        click.option(
            "--dtype",
            type=OneOf(DTYPE_BYTES),
            default="float32",
            show_default=True,
            help="float64/32/16, bfloat16, int64/32/8, uint8.",
        ),
        click.option(
            "--reduction",
            type=OneOf(REDUCTIONS),
            default="sum",
            show_default=True,
            help="sum, prod, min, max, avg, band, bor, bxor.",
        ),
        click.option("--segments", type=SegmentsType(), default="auto", show_default=True, help="A number, or auto."),
        click.option("--slots", type=int, default=None, help="Messages that a rank takes ahead."),
        click.option(
            "--ports",
            type=OneOf(MODELS),
            default=None,
            help="For which ports: fifo (the network stores), exclusive (it does not) or fair (flows share them).",
        ),
    ):
        function = option(function)
    return function


def auto_options(function: Command) -> Command:
    """Which collective the schedule `auto` is chosen for; `optcc.commands.judged.wanted_collective` judges them."""
    from optcc.collective import COLLECTIVES, ROOTED

    for option in (
        click.option("--root", type=int, default=None, help=f"With --collective: the rank, for {', '.join(ROOTED)}."),
        click.option(
            "--collective",
            type=CollectiveType(),
            default=None,
            help=f"With the schedule auto: {', '.join(COLLECTIVES)}.  [default: allreduce]",
        ),
    ):
        function = option(function)
    return function


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
latency_option = click.option("--latency", default=None, help="Latency of a message, such as 5us.")


def with_latency(topology: Topology, latency: str | None) -> Topology:
    """`topology` with the latency that the user gave, if any."""
    return topology if latency is None else topology.with_latency(parse_time(latency))


def echo_json(value: object) -> None:
    """Prints `value` as JSON."""
    click.echo(json.dumps(value, indent=2))


def echo_card(noun: Shown) -> None:
    """Prints a noun's card: drawn on a terminal, plain columns elsewhere."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(noun)
        return
    card = noun.card()
    rows = (card.columns, *card.shown_rows())
    widths = [max(len(row[column]) for row in rows) for column in range(len(card.columns))]
    click.echo(card.title)
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
