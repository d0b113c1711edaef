"""`optcc show`."""

from __future__ import annotations

from pathlib import Path

import click

from optcc.cli import (
    OneOf,
    ScheduleType,
    SizeType,
    TopologyType,
    auto_options,
    echo_card,
    echo_json,
    json_option,
    latency_option,
    plan_options,
    with_latency,
)
from optcc.commands.judged import exit_code, say_unless_proved, wanted_collective
from optcc.commands.verify_file import is_foreign, read_foreign_plan
from optcc.errors import EXIT_DONE, InputError
from optcc.export.perfetto import write_perfetto
from optcc.files import replace_file
from optcc.paper_figures.measured_timeline import timeline_pair
from optcc.paper_figures.style import require_matplotlib
from optcc.paper_figures.timeline import picture_ending, timeline
from optcc.planner import build_plan
from optcc.runtime.observe.trace import read_trace
from optcc.timing import MODELS, Model
from optcc.topology import Topology


@click.command("show", epilog="Example: optcc show optcc --topology 4@50MB/s,3=25MB/s --segments 8 -o optcc.svg")
@click.argument("name", type=ScheduleType(), required=False)
@click.option("--topology", type=TopologyType(), required=True, help="8@50GB/s,3=25GB/s, or a TOML file.")
@click.option("--size", type=SizeType(), default="64MiB", show_default=True, help="Bytes of the message.")
@latency_option
@click.option(
    "--model",
    type=OneOf(MODELS),
    default=None,
    help=f"How ports share: {', '.join(MODELS)}; as for --ports, else fifo.",
)
@plan_options
@auto_options
@click.option("--rows", type=click.IntRange(min=0), default=10, show_default=True, help="Transfers to list.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    metavar="FILE",
    help="Draw the timeline of every port: FILE.svg, FILE.png or FILE.pdf.",
)
@click.option(
    "--measured",
    "trace",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="TRACE",
    help="In the place of NAME: a run that was measured (bench --trace), beside what is predicted of its plan.",
)
@click.option(
    "--perfetto",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the timeline, measured or predicted, for ui.perfetto.dev.",
)
@json_option
def command(
    name: str | None,
    topology: Topology,
    size: int,
    latency: str | None,
    model: Model | None,
    dtype: str,
    reduction: str,
    segments: int | str,
    slots: int | None,
    ports: Model | None,
    collective: str | None,
    root: int | None,
    rows: int,
    output: Path | None,
    trace: Path | None,
    perfetto: Path | None,
    as_json: bool,
) -> int:
    """Show how the schedule NAME is predicted to run.

    NAME is one of the library, FILE.py:FUNCTION, FILE.xml for MSCCL, or FILE.json, an execution plan of MSCCL++.

    With --measured the plan and its size are those of the trace; a picture of the prediction is drawn beside that of
    the run.
    """
    if (name is None) == (trace is None):
        raise InputError("NAME: must be given, or --measured in its place")
    wanted = wanted_collective(name, collective, root, topology)
    if output is not None:
        picture_ending(output)
        require_matplotlib()
    used: Model = model or ports or "fifo"
    topology = with_latency(topology, latency)
    if trace is not None:
        _show_measured(trace, topology, used, rows, output, perfetto, as_json)
        return EXIT_DONE
    assert name is not None
    if is_foreign(name):
        if slots is not None or ports is not None:
            raise InputError(f"show {name}: --slots and --ports: must be left out, the file has its own order")
        plan, verdict = read_foreign_plan(Path(name), size, "the times are of a file that would not give the result")
    else:
        plan = build_plan(
            name,
            topology,
            size,
            dtype=dtype,
            reduction=reduction,
            segments=segments,
            slots=slots,
            ports=ports or used,
            collective=wanted,
        )
        verdict = say_unless_proved(plan, "the times are of a plan that would not give the result")
    shown = timeline(plan, topology, used)
    if output is not None:
        shown.save(output)
    if perfetto is not None:
        replace_file(perfetto, write_perfetto(plan, topology, shown.timing))
    if as_json:
        echo_json(shown.as_json() | {"verdict": verdict})
        return exit_code(verdict)
    echo_card(shown.stage_card())
    if rows:
        click.echo()
        echo_card(shown.transfer_card(rows))
    if output is not None:
        click.echo(f"\ntimeline drawn in {output}")
    return exit_code(verdict)


def _show_measured(
    trace: Path, topology: Topology, model: Model, rows: int, output: Path | None, perfetto: Path | None, as_json: bool
) -> None:
    """A measured run, and what is predicted of its plan."""
    measured = read_trace(trace)
    pair = timeline_pair(measured, topology, model)
    beside = None if output is None else output.with_stem(f"{output.stem}-predicted")
    if output is not None and beside is not None:
        pair.measured.save(output)
        pair.predicted.save(beside)
    if perfetto is not None:
        replace_file(perfetto, write_perfetto(measured.plan, topology, pair.measured.timing))
    if as_json:
        echo_json(pair.as_json() | {"run": measured.run})
        return
    echo_card(pair.stage_card())
    if rows:
        click.echo()
        echo_card(pair.measured.transfer_card(rows))
    if output is not None:
        click.echo(f"\ntimeline drawn in {output}, that of the prediction in {beside}")
