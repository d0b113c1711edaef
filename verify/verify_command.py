"""`optcc verify`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from optcc.cli import SizeType, TopologyType, build_plan, echo_card, echo_json, json_option, plan_options
from optcc.codec import FILE_BYTES_MAX, read_plan
from optcc.errors import EXIT_DONE, EXIT_REFUTED, InputError, TopologyError
from optcc.files import read_file
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.plan import verify_plan
from optcc.verify.ratio import judge_ratio


@click.command("verify", epilog="Example: optcc verify my_schedule.py:ring --topology 4@1GB/s --size 1MiB")
@click.argument("name", required=False)
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="A plan file instead of a schedule.")
@click.option("--topology", type=TopologyType(), default=None, help="8@50GB/s,3=25GB/s, or a TOML file.")
@click.option("--size", type=SizeType(), default=None, help="Bytes of the message, such as 64MiB.")
@click.option("--slowdown", "interval", help="LOW:HIGH, such as 1:8: the slowest endpoint's slowdown, all at once.")
@click.option("--eps", default=None, help="With --slowdown: prove that the time is at most (1 + EPS) times the bound.")
@plan_options
@json_option
def command(
    name: str | None,
    plan_file: Path | None,
    topology: Topology | None,
    size: int | None,
    interval: str | None,
    eps: str | None,
    dtype: str,
    reduction: str,
    segments: int | str,
    slots: int | None,
    ports: str | None,
    as_json: bool,
) -> int:
    """Prove the compiled schedule NAME, or the plan in a file, right; or show a counterexample.

    With --slowdown, also the fluid time of its order of the ports against the bound, for every slowdown of the slowest
    endpoint in the interval, exactly.
    """
    if eps is not None and interval is None:
        raise InputError("--eps: needs --slowdown LOW:HIGH")
    if (name is None) == (plan_file is None):
        raise InputError("verify: give either the NAME of a schedule or --plan FILE")
    if plan_file is not None:
        plan = read_plan(read_file(plan_file, FILE_BYTES_MAX))
        if topology is not None and topology.n_ranks != plan.n_ranks:
            raise TopologyError(f"--topology has {topology.n_ranks} ranks: the plan has {plan.n_ranks}")
    else:
        assert name is not None
        if topology is None or size is None:
            raise InputError(f"verify {name}: give --topology and --size")
        plan = build_plan(
            name, topology, size, dtype=dtype, reduction=reduction, segments=segments, slots=slots, ports=ports
        )
    started = time.perf_counter()
    verdict = verify_plan(plan)
    seconds = time.perf_counter() - started
    counterexample = verdict.counterexample
    ratio = None
    if interval is not None and verdict.verdict == PROVED:
        if topology is None:
            raise InputError("--slowdown: needs --topology, which says who is slowest")
        ratio = judge_ratio(plan, topology, interval, eps)
    if as_json:
        echo_json(
            {
                "verdict": verdict.verdict,
                "properties": verdict.properties,
                "counterexample": None
                if counterexample is None
                else {
                    "property": counterexample.property,
                    "summary": counterexample.summary,
                    "rank": counterexample.rank,
                    "first_byte": counterexample.first_byte,
                    "last_byte": counterexample.last_byte,
                    "trace": list(counterexample.trace),
                },
                "seconds": seconds,
                "digest": plan.digest,
                "ratio": None if ratio is None else ratio.as_json(),
            }
        )
    else:
        echo_card(verdict)
        if counterexample is not None:
            click.echo(str(counterexample))
        if ratio is not None:
            click.echo("")
            echo_card(ratio)
    return verdict.exit_code or (EXIT_DONE if ratio is None or ratio.holds else EXIT_REFUTED)
