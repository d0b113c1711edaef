"""`optcc compile`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    plan_options,
)
from optcc.codec import write_plan, write_transfers
from optcc.commands.judged import (
    check_explain,
    exit_code,
    explain_choice,
    say_certificate,
    say_unless_proved,
    wanted_collective,
)
from optcc.compiler import plan_transfers
from optcc.errors import InputError, PlanError
from optcc.export import write_chakra, write_goal, write_msccl_xml, write_mscclpp_json, write_perfetto
from optcc.files import Files, replace_files
from optcc.fitting import find_fitting
from optcc.plan import Plan
from optcc.planner import build
from optcc.simulate import simulate
from optcc.timing import Model
from optcc.topology import Topology
from optcc.verify.plan.limits import LOADERS, WRITERS, check_limits


def _chakra(plan: Plan, pieces: int) -> Files:
    """A file for each rank."""
    return {f".{rank}.et": data for rank, data in enumerate(write_chakra(plan, pieces))}


def _one(write: Callable[[Plan], bytes]) -> Callable[[Plan, Topology, Model], Files]:
    """A format whose single file says nothing of the topology."""
    return lambda plan, topology, ports: {"": write(plan)}


FORMATS: dict[str, Callable[[Plan, Topology, Model], Files]] = {
    "plan": _one(write_plan),
    "transfers": _one(lambda plan: write_transfers(plan_transfers(plan))),
    "goal": lambda plan, topology, ports: {"": write_goal(plan, topology, simulate(plan, topology, model="fifo"))},
    "chakra": lambda plan, topology, ports: _chakra(plan, 1),
    "perfetto": lambda plan, topology, ports: {
        "": write_perfetto(plan, topology, simulate(plan, topology, model=ports))
    },
    "msccl-xml": _one(write_msccl_xml),
    "mscclpp-json": _one(write_mscclpp_json),
}
"""By name, what makes of a plan, its topology and the model of its ports the files that are written."""


@click.command(
    "compile",
    epilog="Example: optcc compile optcc --topology 4@50MB/s,3=25MB/s --size 64MiB --format transfers -o optcc.jsonl",
)
@click.argument("name", type=ScheduleType())
@click.option("--topology", type=TopologyType(), required=True, help="8@50GB/s,3=25GB/s, or a TOML file.")
@click.option("--size", type=SizeType(), required=True, help="Bytes of the message, such as 64MiB.")
@plan_options
@auto_options
@click.option("--format", "form", type=OneOf(FORMATS), default="plan", show_default=True, help=f"{', '.join(FORMATS)}.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="The file; of chakra, which writes one for each rank, the start of NAME.0.et, NAME.1.et, ...",
)
@click.option(
    "--target",
    type=OneOf(LOADERS),
    default=None,
    help=f"With msccl-xml: write only what this run-time takes: {', '.join(LOADERS)}.",
)
@click.option(
    "--pad",
    is_flag=True,
    help="With msccl-xml and mscclpp-json: round the size up to one that fits, with segments that do.",
)
@click.option(
    "--pieces",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="With chakra: write each message as so many, one after the other.",
)
@click.option("--explain", is_flag=True, help="With the schedule auto: what it was chosen from.")
@json_option
def command(
    name: str,
    topology: Topology,
    size: int,
    dtype: str,
    reduction: str,
    segments: int | str,
    slots: int | None,
    ports: Model | None,
    collective: str | None,
    root: int | None,
    form: str,
    output: Path,
    target: str | None,
    pad: bool,
    pieces: int,
    explain: bool,
    as_json: bool,
) -> int:
    """Compile the schedule NAME (of the library, or FILE.py:FUNCTION) and write it to a file."""
    check_explain(explain, name, as_json)
    wanted = wanted_collective(name, collective, root, topology)
    if target is not None and form != "msccl-xml":
        raise InputError(f"--target {target}: needs --format msccl-xml")
    if pieces > 1 and form != "chakra":
        raise InputError(f"--pieces {pieces}: needs --format chakra")
    if pad and wanted is not None:
        raise InputError("--pad with --collective: must be the name of a schedule")
    if pad and form not in WRITERS:
        raise InputError(f"--pad with --format {form}: must be one of {', '.join(WRITERS)}")
    model: Model = ports or "exclusive"
    options: dict[str, Any] = {"dtype": dtype, "reduction": reduction, "slots": slots, "ports": model}
    if pad:
        asked = size
        size, segments = _padded(name, topology, size, target or form, options)
        click.echo(f"optcc: padded from {asked} to {size} B, {segments} segments", err=True)
    built = build(name, topology, size, segments=segments, collective=wanted, **options)
    plan = built.plan
    verdict = say_unless_proved(plan, "the file is of a plan that would not give the result")
    try:
        files = _written(plan, topology, model, form, target, pieces)
        refused = None if target is None else check_limits(plan, target)
        if refused is not None:
            raise PlanError(refused.summary)
    except PlanError as error:
        fitting = (
            find_fitting(name, topology, size, target or form, **options)
            if form in WRITERS and wanted is None
            else None
        )
        hint = "" if fitting is None else f"; --size {fitting[0]} --segments {fitting[1]} would fit"
        raise PlanError(f"{error}{hint}") from None
    replace_files(output, files)
    if explain:
        explain_choice(built)
    if as_json:
        echo_json(
            {
                "file": str(output),
                "format": form,
                "digest": plan.digest,
                "ranks": plan.n_ranks,
                "transfers": len(plan.transfers),
                "instructions": len(plan),
                "ports": model,
                "verdict": verdict,
                "certificate": built.certificate,
            }
        )
    else:
        echo_card(plan)
        click.echo(f"for {model} ports")
        say_certificate(built.certificate)
    return exit_code(verdict)


def _written(plan: Plan, topology: Topology, ports: Model, form: str, target: str | None, pieces: int) -> Files:
    """The files of a format: with `target`, as that run-time spells what run-times spell differently."""
    if target is not None:
        return {"": write_msccl_xml(plan, runtime=target)}
    return _chakra(plan, pieces) if pieces > 1 else FORMATS[form](plan, topology, ports)


def _padded(name: str, topology: Topology, size: int, target: str, options: dict[str, Any]) -> tuple[int, int]:
    """The bytes and the segments that fit."""
    fitting = find_fitting(name, topology, size, target, **options)
    if fitting is None:
        raise PlanError(f"--pad: no size from {size} B on fits {target}, with few segments")
    return fitting
