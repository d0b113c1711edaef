"""`optcc show`."""

from __future__ import annotations

from pathlib import Path

import click

from optcc.cli import (
    OneOf,
    ScheduleType,
    SizeType,
    TopologyType,
    echo_card,
    echo_json,
    json_option,
    latency_option,
    plan_options,
    with_latency,
)
from optcc.commands.judged import say_unless_proved
from optcc.commands.verify_file import is_foreign, read_foreign_plan
from optcc.errors import InputError
from optcc.paper_figures.style import require_matplotlib
from optcc.paper_figures.timeline import picture_ending, timeline
from optcc.planner import build_plan
from optcc.timing import MODELS, Model
from optcc.topology import Topology


@click.command("show", epilog="Example: optcc show optcc --topology 4@50MB/s,3=25MB/s --segments 8 -o optcc.svg")
@click.argument("name", type=ScheduleType())
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
@click.option("--rows", type=click.IntRange(min=0), default=10, show_default=True, help="Transfers to list.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    metavar="FILE",
    help="Draw the timeline of every port: FILE.svg, FILE.png or FILE.pdf.",
)
@json_option
def command(
    name: str,
    topology: Topology,
    size: int,
    latency: str | None,
    model: Model | None,
    dtype: str,
    reduction: str,
    segments: int | str,
    slots: int | None,
    ports: Model | None,
    rows: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Show how the schedule NAME (of the library, FILE.py:FUNCTION, or FILE.xml for MSCCL) is predicted to run."""
    if output is not None:
        picture_ending(output)
        require_matplotlib()
    used: Model = model or ports or "fifo"
    topology = with_latency(topology, latency)
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
        )
        verdict = say_unless_proved(plan, "the times are of a plan that would not give the result")
    shown = timeline(plan, topology, used)
    if output is not None:
        shown.save(output)
    if as_json:
        echo_json(shown.as_json() | {"verdict": verdict})
        return
    echo_card(shown.stage_card())
    if rows:
        click.echo()
        echo_card(shown.transfer_card(rows))
    if output is not None:
        click.echo(f"\ntimeline drawn in {output}")
