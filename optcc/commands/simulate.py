"""`optcc simulate`."""

from __future__ import annotations

import time
from fractions import Fraction
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
from optcc.codec import FILE_BYTES_MAX, read_plan
from optcc.collective import Collective, check_reduction_of
from optcc.commands.judged import (
    check_explain,
    exit_code,
    explain_choice,
    say_certificate,
    say_unless_proved,
    wanted_collective,
)
from optcc.commands.verify_file import is_foreign, read_foreign_plan
from optcc.errors import EXIT_DONE, InputError
from optcc.faults import FaultPlan
from optcc.files import read_file
from optcc.planner import AUTO, build, find_schedule
from optcc.simulate import Jitter, Policy, PolicyName, simulate
from optcc.static_order import SerialModel, StaticOrderTiming, time_static_order
from optcc.timing import MODELS, Model, Timing
from optcc.topology import Topology
from optcc.units import parse_time
from optcc.verify.bounds.certified import least_seconds

POLICIES = ("migrate", "wait")
JITTER_S = 2e-6
JITTER_SIGMA = 0.02


@click.command("simulate", epilog="Example: optcc simulate optcc --topology 8@50GB/s,3=25GB/s --size 1G --latency 5us")
@click.argument("name", type=ScheduleType(), required=False)
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="A plan file instead of a schedule.")
@click.option("--topology", type=TopologyType(), required=True, help="8@50GB/s,3=25GB/s, or a TOML file.")
@click.option("--size", type=SizeType(), default=None, help="Bytes of the message, such as 64MiB.")
@latency_option
@click.option(
    "--model",
    type=OneOf(MODELS),
    default=None,
    help=f"How ports share: {', '.join(MODELS)}; as for --ports or the plan, else fifo.",
)
@click.option("--as-written", is_flag=True, help="In the order in which NAME is written, in one pass and no plan.")
@click.option("--faults", default=None, help="NICs that fail meanwhile: 3/0@1ms, 3/0@1ms..4ms, 3/0@1ms=1/2:out, ...")
@click.option(
    "--policy",
    type=OneOf(POLICIES),
    default=None,
    help="What happens then: migrate to surviving NICs, or wait for the repair.",
)
@click.option("--detection", default=None, help="With --faults: how long until a dead NIC is noticed, such as 12ms.")
@click.option("--jitter", type=int, default=None, metavar="SEED", help="Noise: of latency and rates.")
@plan_options
@auto_options
@click.option("--explain", is_flag=True, help="With the schedule auto: what it was chosen from.")
@json_option
def command(
    name: str | None,
    plan_file: Path | None,
    topology: Topology,
    size: int | None,
    latency: str | None,
    model: Model | None,
    as_written: bool,
    faults: str | None,
    policy: PolicyName | None,
    detection: str | None,
    jitter: int | None,
    dtype: str,
    reduction: str,
    segments: int | str,
    slots: int | None,
    ports: Model | None,
    collective: str | None,
    root: int | None,
    explain: bool,
    as_json: bool,
) -> int:
    """Predict the time of the schedule NAME, or of the plan in a file, and hold it against the bound.

    NAME may also be FILE.xml, an algorithm for MSCCL, or FILE.json, an execution plan of MSCCL++.

    With --faults also what each of them cost, against the run without. With --as-written for thousands of ranks:
    transfers are timed as they are written, and none is kept.
    """
    if (name is None) == (plan_file is None):
        raise InputError("simulate: give either the NAME of a schedule or --plan FILE")
    check_explain(explain, name, as_json)
    wanted = wanted_collective(name, collective, root, topology)
    filed = None if plan_file is None else read_plan(read_file(plan_file, FILE_BYTES_MAX))
    ordered_for = None if filed is None else filed.ports
    used: Model = model or ports or ordered_for or "fifo"
    if ports is not None and ordered_for not in (None, ports):
        raise InputError(
            f"--ports {ports}: the plan is ordered for {ordered_for}: must be left out, or given as --model"
        )
    topology = with_latency(topology, latency)
    recovery = _policy(faults, policy, detection)
    if as_written and (faults is not None or jitter is not None):
        raise InputError("--as-written: cannot have --faults or --jitter")
    if as_written:
        if name in (None, AUTO) or size is None or used == "fair" or slots is not None or ports is not None:
            raise InputError("--as-written: takes the NAME of a schedule, --size, fifo or exclusive ports, no slots")
        check_reduction_of(reduction, dtype)
        _time_as_written(name, topology, size, 1 if isinstance(segments, str) else segments, dtype, used, as_json)
        return EXIT_DONE
    known: Timing | None = None
    chosen: tuple[str, int, str | None] | None = None
    verdict = ""
    if name is not None and size is None:
        raise InputError(f"simulate {name}: give --size")
    if filed is not None:
        plan = filed
    elif name is not None and size is not None and is_foreign(name):
        if slots is not None or ports is not None:
            raise InputError(f"simulate {name}: --slots and --ports: must be left out, the file has its own order")
        plan, verdict = read_foreign_plan(Path(name), size, "the time is of a file that would not give the result")
    else:
        assert name is not None and size is not None
        built = build(
            name,
            topology,
            size,
            ports=ports or used,
            dtype=dtype,
            reduction=reduction,
            segments=segments,
            slots=slots,
            collective=wanted,
        )
        plan, chosen = built.plan, (built.definition.name, built.segments, built.certificate)
        if explain:
            explain_choice(built)
        # The JSON says how long the simulation took, so there it is done again.
        if ports in (None, used) and faults is None and jitter is None and not as_json:
            known = built.timing
    verdict = verdict or say_unless_proved(plan, "the time is of a plan that would not give the result")
    started = time.perf_counter()
    timing = known or simulate(
        plan,
        topology,
        model=used,
        faults=None if faults is None else FaultPlan.parse(faults),
        policy=recovery,
        jitter=None if jitter is None else Jitter(jitter, latency_s=JITTER_S, rate_sigma=JITTER_SIGMA),
    )
    spent = time.perf_counter() - started
    _tell(timing, plan.collective, topology, plan.size_bytes, len(plan.transfers), spent, as_json, verdict, chosen)
    return exit_code(verdict)


def _policy(faults: str | None, policy: PolicyName | None, detection: str | None) -> Policy | None:
    """What happens when a NIC fails; None without --faults."""
    if faults is None:
        if policy is not None or detection is not None:
            raise InputError("--policy and --detection: need --faults")
        return None
    return Policy(policy or "migrate", detection_s=Fraction(0) if detection is None else parse_time(detection))


def _time_as_written(
    name: str, topology: Topology, size: int, segments: int, dtype: str, model: SerialModel, as_json: bool
) -> None:
    """Times the transfers of a schedule in the order in which it is written, and prints the result."""
    definition = find_schedule(name)
    started = time.perf_counter()
    swept = time_static_order(definition, topology, size_bytes=size, segments=segments, dtype=dtype, model=model)
    spent = time.perf_counter() - started
    made = definition.computes(topology.n_ranks)
    _tell(swept, made, topology, size, swept.transfers, spent, as_json, None, (definition.name, segments, None))


def _tell(
    result: Timing | StaticOrderTiming,
    made: Collective,
    topology: Topology,
    size_bytes: int,
    transfers: int,
    spent: float,
    as_json: bool,
    verdict: str | None,
    chosen: tuple[str, int, str | None] | None,
) -> None:
    """Prints `result` beside the bound; `spent` is how long it took to find, in seconds; no `verdict` if there is no
    plan to judge; `chosen` are the schedule, its segments and its certificate, unless they come from a file."""
    bound = float(least_seconds(topology, size_bytes, made))
    ratio = result.seconds / bound if bound else 1.0
    if not as_json:
        echo_card(result)
        if chosen is not None:
            click.echo(f"{chosen[0]}, segments: {chosen[1]}")
            say_certificate(chosen[2])
        click.echo(f"bound {bound:.6g} s, ratio {ratio:.4f}")
        if verdict is None:
            click.echo("timed as it is written, and not judged")
        return
    echo_json(
        {
            "seconds": result.seconds,
            "bound_seconds": bound,
            "ratio": ratio,
            "verdict": verdict,
            **({} if chosen is None else dict(zip(("schedule", "segments", "certificate"), chosen, strict=True))),
            "transfers": transfers,
            "transfers_per_second": transfers / spent,
            "model": result.model,
            "utilisation": result.utilisation(),
            **(_recovery(result) if isinstance(result, Timing) and result.recovery is not None else {}),
        }
    )


def _recovery(timing: Timing) -> dict[str, object]:
    assert timing.recovery is not None
    return {
        "fault_free_seconds": timing.recovery.fault_free_s,
        "overhead": timing.overhead,
        "costs": [{"fault": each.fault, "seconds": each.cost_s} for each in timing.recovery.costs],
    }
