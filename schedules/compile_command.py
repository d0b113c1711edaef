"""`optcc compile`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from optcc.cli import AUTO, SizeType, TopologyType, build, echo_card, echo_json, json_option, plan_options
from optcc.codec import write_plan, write_transfers
from optcc.compiler import plan_transfers
from optcc.errors import InputError
from optcc.files import replace_file
from optcc.plan import Plan
from optcc.topology import Topology

FORMATS: dict[str, Callable[[Plan], bytes]] = {
    "plan": write_plan,
    "transfers": lambda plan: write_transfers(plan_transfers(plan)),
}


@click.command(
    "compile",
    epilog="Example: optcc compile optcc --topology 4@50MB/s,3=25MB/s --size 64MiB --format transfers -o optcc.jsonl",
)
@click.argument("name")
@click.option("--topology", type=TopologyType(), required=True, help="8@50GB/s,3=25GB/s, or a TOML file.")
@click.option("--size", type=SizeType(), required=True, help="Bytes of the message, such as 64MiB.")
@plan_options
@click.option("--format", "form", default="plan", show_default=True, help=f"{' or '.join(FORMATS)}.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The file.")
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
    ports: str | None,
    form: str,
    output: Path,
    explain: bool,
    as_json: bool,
) -> None:
    """Compile the schedule NAME (of the library, or FILE.py:FUNCTION) and write it to a file."""
    if form not in FORMATS:
        raise InputError(f"--format {form!r}: must be one of {', '.join(FORMATS)}")
    if explain and (name != AUTO or as_json):
        raise InputError(f"--explain with {name}: must be the schedule {AUTO}, without --json")
    built = build(name, topology, size, dtype=dtype, reduction=reduction, segments=segments, slots=slots, ports=ports)
    plan = built.plan
    replace_file(output, FORMATS[form](plan))
    if explain:
        assert built.choice is not None
        echo_card(built.choice)
    if as_json:
        echo_json(
            {
                "file": str(output),
                "format": form,
                "digest": plan.digest,
                "ranks": plan.n_ranks,
                "transfers": len(plan.transfers),
                "instructions": len(plan),
            }
        )
    else:
        echo_card(plan)
