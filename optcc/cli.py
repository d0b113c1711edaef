"""The door: a table from command to module, so that `optcc --help` imports none of them.

Also what every command shares: how a topology, a size, a schedule are given, how a noun is shown, and how an error
becomes one line on stderr and an exit code.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from optcc.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, InputError, OptccError
from optcc.units import parse_size, parse_time

if TYPE_CHECKING:
    from optcc.dsl import Definition
    from optcc.plan import Plan
    from optcc.schedule import Schedule
    from optcc.show import Shown
    from optcc.topology import Topology

COMMANDS = {
    "bench": ("optcc.experiments.bench_command", "time schedules under mpirun, with nccl-tests' flags and columns"),
    "bound": ("optcc.verify.bound_command", "say how fast an AllReduce could possibly be, exactly"),
    "compile": ("optcc.schedules.compile_command", "make a plan, transfers, or a file for another tool of a schedule"),
    "demo": ("optcc.experiments.demo_command", "the whole story on emulated hosts: one server lost half its bandwidth"),
    "doctor": ("optcc.experiments.doctor_command", "say what this host has, and what of it is misconfigured"),
    "fabric": ("optcc.experiments.fabric_command", "emulate multi-NIC hosts as network namespaces"),
    "figures": ("optcc.paper_figures.figures_command", "draw every figure from the records"),
    "list": ("optcc.schedules.list_command", "list the schedule library"),
    "replay": ("optcc.verify.replay_command", "check a certificate in exact arithmetic, without a solver"),
    "show": ("optcc.paper_figures.show_command", "print a schedule's timetable, or draw what every port does when"),
    "simulate": ("optcc.experiments.simulate_command", "predict how long a plan takes"),
    "study": ("optcc.experiments.study_command", "draw failures from published rates, and say what they cost"),
    "verify": ("optcc.verify.verify_command", "prove a plan right, or show why it is wrong"),
}
SEGMENTS_MAX = 1_000_000
AUTO = "auto"
"""The schedule that chooses among the others."""


class Door(click.Group):
    """Commands that are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command = import_module(COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, what) for name, (_, what) in sorted(COMMANDS.items())])


@click.group(cls=Door, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="optcc")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def optcc(debug: bool) -> None:
    """AllReduce at the speed that the surviving bandwidth allows: schedules, bounds, proofs, runs."""
    del debug


def main(arguments: Sequence[str] | None = None, command: click.Command | None = None) -> None:
    """Runs the command line, or that of a command of its own, and exits with the code that says how it ended."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(run(words, command))


def run(words: list[str], command: click.Command | None = None) -> int:
    """Runs one command line and returns its exit code; errors are one line on stderr."""
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        if command is None:
            result = optcc.main(words, prog_name="optcc", standalone_mode=False)
        else:
            result = command.main(words, standalone_mode=False)
    except KeyboardInterrupt:
        return _complain("interrupted", EXIT_INTERRUPTED, debug)
    except click.Abort:
        return _complain("interrupted", EXIT_INTERRUPTED, debug)
    except click.ClickException as error:
        return _complain(error.format_message().replace("\n", " "), EXIT_BAD_INPUT, debug)
    except OptccError as error:
        return _complain(str(error), error.exit_code, debug)
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away: nothing is left to say, and nobody to say it to
        return 0
    return result if isinstance(result, int) else 0


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


Command = Callable[..., Any]


def plan_options(function: Command) -> Command:
    """The options that turn a schedule's name into a plan."""
    for option in (
        click.option(
            "--dtype", default="float32", show_default=True, help="float64/32/16, bfloat16, int64/32/8, uint8."
        ),
        click.option(
            "--reduction", default="sum", show_default=True, help="sum, prod, min, max, avg, band, bor, bxor."
        ),
        click.option("--segments", type=SegmentsType(), default="auto", show_default=True, help="A number, or auto."),
        click.option("--slots", type=int, default=None, help="Messages that a rank takes ahead."),
        click.option(
            "--ports",
            default=None,
            help="For which ports: fifo (the network stores), exclusive (it does not) or fair (flows share them).",
        ),
    ):
        function = option(function)
    return function


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
latency_option = click.option("--latency", default=None, help="Latency of a message, such as 5us.")


def find_schedule(name: str) -> Definition:
    """The schedule of the library with that name, or `FILE.py:FUNCTION` of the user's own.

    Raises InputError if there is no such schedule.
    """
    from optcc.dsl import Definition

    path, colon, function = name.rpartition(":")
    if colon:
        found = getattr(_load_file(Path(path)), function, None)
        if not isinstance(found, Definition):
            raise InputError(f"schedule {name!r}: {path} has no function {function} under @schedule")
        return found
    library: dict[str, Definition] = import_module("optcc.schedules.registry").SCHEDULES
    if name not in library:
        raise InputError(f"schedule {name!r}: must be one of {', '.join(library)}, {AUTO}, or FILE.py:FUNCTION")
    return library[name]


def _load_file(path: Path) -> object:
    if not path.is_file():
        raise InputError(f"schedule file {str(path)!r}: no such file")
    spec = importlib.util.spec_from_file_location(f"optcc_user_{path.stem}", path.resolve())
    if spec is None or spec.loader is None:
        raise InputError(f"schedule file {str(path)!r}: must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except OptccError:
        raise
    except Exception as error:
        raise InputError(f"schedule file {str(path)!r}: cannot be imported: {type(error).__name__}: {error}") from error
    return module


def with_latency(topology: Topology, latency: str | None) -> Topology:
    """`topology` with the latency that the user gave, if any."""
    return topology if latency is None else topology.with_latency(parse_time(latency))


class Built(NamedTuple):
    """A plan, the schedule that it was compiled from, and how to make others; `choice` is what `auto` looked at."""

    plan: Plan
    schedule: Schedule
    definition: Definition
    segments: int
    choice: Shown | None = None


def build(
    name: str,
    topology: Topology,
    size_bytes: int,
    *,
    dtype: str = "float32",
    reduction: str = "sum",
    segments: int | str = "auto",
    slots: int | None = None,
    ports: str | None = None,
) -> Built:
    """The schedule called `name`, compiled; raises an OptccError that says what does not fit."""
    from optcc.compiler import choose_segments, compile_schedule
    from optcc.passes.timetable import PORTS

    order: Any = "exclusive" if ports is None else ports
    if order not in PORTS:
        raise InputError(f"--ports {order!r}: must be one of {', '.join(PORTS)}")
    if name == AUTO:
        if segments != "auto":
            raise InputError(f"--segments {segments}: must be left out with the schedule {AUTO}, which chooses them")
        choose = import_module("optcc.schedules.auto").choose
        chosen = choose(topology, size_bytes, dtype=dtype, reduction=reduction, slots=slots, ports=order)
        taken = chosen.taken
        return Built(chosen.plan, chosen.schedule, find_schedule(taken.name), taken.segments, chosen)
    definition = find_schedule(name).under(order)
    if isinstance(segments, str):
        segments = choose_segments(definition, topology, size_bytes=size_bytes, dtype=dtype, slots=slots, ports=order)
    schedule = definition.build(topology, segments)
    plan = compile_schedule(
        schedule,
        size_bytes=size_bytes,
        dtype=dtype,
        reduction=reduction,
        topology=topology,
        slots=slots,
        ports=order,
    )
    return Built(plan, schedule, definition, segments)


def build_plan(name: str, topology: Topology, size_bytes: int, **options: Any) -> Plan:
    """The plan of `build`."""
    return build(name, topology, size_bytes, **options).plan


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
