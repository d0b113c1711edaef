"""`optcc simulate`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from optcc.cli import (
    SizeType,
    TopologyType,
    build_plan,
    echo_card,
    echo_json,
    json_option,
    latency_option,
    plan_options,
    with_latency,
)
from optcc.codec import FILE_BYTES_MAX, read_plan
from optcc.errors import InputError
from optcc.files import read_file
from optcc.simulate import MODELS, simulate
from optcc.topology import Topology
from optcc.verify.bounds import collective_bound


@click.command("simulate", epilog="Example: optcc simulate optcc --topology 8@50GB/s,3=25GB/s --size 1G --latency 5us")
@click.argument("name", required=False)
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="A plan file instead of a schedule.")
@click.option("--topology", type=TopologyType(), required=True, help="8@50GB/s,3=25GB/s, or a TOML file.")
@click.option("--size", type=SizeType(), default=None, help="Bytes of the message, such as 64MiB.")
@latency_option
@click.option("--model", default="fifo", show_default=True, help=f"How ports share: {' or '.join(MODELS)}.")
@plan_options
@json_option
def command(
    name: str | None,
    plan_file: Path | None,
    topology: Topology,
    size: int | None,
    latency: str | None,
    model: str,
    dtype: str,
    reduction: str,
    segments: int | str,
    slots: int | None,
    ports: str | None,
    as_json: bool,
) -> None:
    """Predict the time of the schedule NAME, or of the plan in a file, and hold it against the bound."""
    if (name is None) == (plan_file is None):
        raise InputError("simulate: give either the NAME of a schedule or --plan FILE")
    if model not in MODELS:
        raise InputError(f"--model {model!r}: must be {' or '.join(MODELS)}")
    topology = with_latency(topology, latency)
    if plan_file is not None:
        plan = read_plan(read_file(plan_file, FILE_BYTES_MAX))
    else:
        assert name is not None
        if size is None:
            raise InputError(f"simulate {name}: give --size")
        plan = build_plan(
            name,
            topology,
            size,
            ports=ports or ("fifo" if model == "fifo" else "exclusive"),
            dtype=dtype,
            reduction=reduction,
            segments=segments,
            slots=slots,
        )
    started = time.perf_counter()
    timing = simulate(plan, topology, model=model)
    spent = time.perf_counter() - started
    made = plan.collective
    bound = float(collective_bound(topology, plan.size_bytes, made.name, made.root, fabric=False).seconds)
    if not as_json:
        echo_card(timing)
        click.echo(f"bound {bound:.6g} s, ratio {timing.seconds / bound if bound else 1:.4f}")
        return
    echo_json(
        {
            "seconds": timing.seconds,
            "bound_seconds": bound,
            "ratio": timing.seconds / bound if bound else 1.0,
            "transfers": len(plan.transfers),
            "transfers_per_second": len(plan.transfers) / spent,
            "model": timing.model,
            "utilisation": timing.utilisation(),
        }
    )
