"""`optcc verify`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from optcc.cli import (
    OneOf,
    SizeType,
    TopologyType,
    echo_card,
    echo_json,
    json_option,
    plan_options,
)
from optcc.codec import FILE_BYTES_MAX, TRANSFERS_FORMAT, read_plan, read_transfers
from optcc.errors import EXIT_DONE, EXIT_REFUTED, EXIT_UNKNOWN, InputError, TopologyError
from optcc.files import read_file
from optcc.planner import Built, build, find_schedule, smallest_failure
from optcc.timing import Model
from optcc.topology import Topology
from optcc.units import parse_time
from optcc.verdict import PROPERTIES, PROVED, REFUTED, UNKNOWN
from optcc.verify.plan.limits import TARGETS
from optcc.verify.plan.ratio import judge_ratio, read_number
from optcc.verify.plan.report import Questions, judge
from optcc.verify.plan.slots import least_slots
from optcc.verify.plan.timing import Makespan
from optcc.verify.plan.verify_transfers import verify_transfers

_HEAD_BYTES = 256


@click.command("verify", epilog="Example: optcc verify my_schedule.py:ring --topology 4@1GB/s --size 1MiB")
@click.argument("name", required=False)
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    help="A file with a plan or transfers instead of a schedule.",
)
@click.option("--topology", type=TopologyType(), default=None, help="8@50GB/s,3=25GB/s, or a TOML file.")
@click.option("--size", type=SizeType(), default=None, help="Bytes of the message, such as 64MiB.")
@click.option("--all-ranks", is_flag=True, help="Prove NAME for every number of ranks and segments, by induction.")
@click.option("--failover", is_flag=True, help="Prove the failover protocol: nothing lost, nothing reduced twice.")
@click.option("--thorough", is_flag=True, help="With --failover: millions of states, a minute or two.")
@click.option("--eps", default=None, help="Prove that the time on the topology is at most (1 + EPS) times the bound.")
@click.option("--promise", default=None, help="Prove that the time on the topology is at most this, such as 25ms.")
@click.option("--slowdown", "interval", help="LOW:HIGH, such as 1:8: the slowest endpoint's slowdown, all at once.")
@click.option("--target", type=OneOf(TARGETS), default=None, help=f"Also the resource limits of {', '.join(TARGETS)}.")
@plan_options
@json_option
def command(
    name: str | None,
    plan_file: Path | None,
    topology: Topology | None,
    size: int | None,
    all_ranks: bool,
    failover: bool,
    thorough: bool,
    eps: str | None,
    promise: str | None,
    interval: str | None,
    target: str | None,
    dtype: str,
    reduction: str,
    segments: int | str,
    slots: int | None,
    ports: Model | None,
    as_json: bool,
) -> int:
    """Prove the compiled schedule NAME, or the plan in a file, right; or show the smallest counterexample found.

    With --eps or --promise, also how long it takes on --ports (of a file, if left out, those that the plan names, else
    exclusive ones): exactly on fifo and exclusive ones, simulated and up to
    rounding on fair ones. With --eps and --slowdown, against the bound for every slowdown of the slowest endpoint in
    the interval, on exclusive ports.
    """
    if thorough and not failover:
        raise InputError("--thorough: needs --failover")
    if all_ranks or failover:
        rest = (plan_file, topology, size, eps, promise, interval, target)
        flag, takes = ("--all-ranks", "the NAME of a schedule") if all_ranks else ("--failover", "no NAME")
        if any(each is not None for each in rest) or (all_ranks and failover) or (name is None) == all_ranks:
            raise InputError(f"verify {flag}: takes {takes}, and no other question")
        return _all_ranks(name, as_json) if name is not None else _failover(thorough, as_json)
    if (name is None) == (plan_file is None):
        raise InputError("verify: give either the NAME of a schedule or --plan FILE")
    for flag, value in (("--eps", eps), ("--promise", promise), ("--slowdown", interval)):
        if value is not None and topology is None:
            raise InputError(f"{flag}: needs --topology")
    if interval is not None and ports == "fair":
        raise InputError("--slowdown with --ports fair: must be exclusive, where the ports' order is fixed")
    options: dict[str, Any] = {"dtype": dtype, "reduction": reduction, "slots": slots, "ports": ports or "exclusive"}
    built: Built | None = None
    if plan_file is not None:
        data = read_file(plan_file, FILE_BYTES_MAX)
        if TRANSFERS_FORMAT.encode() in data[:_HEAD_BYTES]:
            if any(each is not None for each in (eps, promise, interval, target)):
                raise InputError(f"--plan {plan_file}: transfers have no plan to ask about time or limits")
            return _transfers(data, as_json)
        plan = read_plan(data)
        if topology is not None and topology.n_ranks != plan.n_ranks:
            raise TopologyError(f"--topology has {topology.n_ranks} ranks: the plan has {plan.n_ranks}")
    else:
        assert name is not None
        if topology is None or size is None:
            raise InputError(f"verify {name}: give --topology and --size")
        built = build(name, topology, size, segments=segments, **options)
        plan = built.plan
    model: Model = ports or plan.ports or "exclusive"
    asked = any(each is not None for each in (eps, promise, interval))
    if asked and plan.ports not in (None, model):
        click.echo(f"optcc: the plan is ordered for {plan.ports} ports, and timed on {model} ones", err=True)
    questions = Questions(
        None if built is None else built.schedule,
        topology,
        model,
        1 + read_number("--eps", eps) if eps is not None and interval is None else None,
        None if promise is None else parse_time(promise),
        target,
    )
    started = time.perf_counter()
    report = judge(plan, questions)
    verdict = report.verdict
    seconds = time.perf_counter() - started
    smallest = None
    if built is not None and topology is not None:
        smallest = smallest_failure(built, verdict, topology, plan.size_bytes, **options)
    proved = verdict.verdict == PROVED
    slots_needed = least_slots(plan) if proved else None
    ratio = judge_ratio(plan, topology, interval, eps) if interval is not None and topology and proved else None
    if as_json:
        shown = verdict.counterexample
        echo_json(
            {
                "verdict": verdict.verdict,
                "properties": verdict.properties,
                "counterexample": None if shown is None else shown.as_json(),
                "smallest": None if smallest is None else smallest.as_json(),
                "seconds": seconds,
                "digest": plan.digest,
                "slots": max((channel.slots for channel in plan.channels), default=0),
                "least_slots": slots_needed,
                "makespan": None if report.makespan is None else _makespan(report.makespan),
                "ratio": None if ratio is None else ratio.as_json(),
            }
        )
    else:
        echo_card(verdict)
        if verdict.counterexample is not None:
            click.echo("")
            click.echo(str(verdict.counterexample) if smallest is None else f"{smallest}\n{smallest.counterexample}")
        if slots_needed is not None:
            click.echo(f"slots: {max((each.slots for each in plan.channels), default=0)}, at least {slots_needed}")
        if report.makespan is not None:
            click.echo(str(report.makespan))
        if ratio is not None:
            click.echo("")
            echo_card(ratio)
    return verdict.exit_code or (EXIT_DONE if ratio is None or ratio.holds else EXIT_REFUTED)


def _makespan(makespan: Makespan) -> dict[str, object]:
    exact = makespan.seconds
    return {
        "seconds": float(exact),
        "seconds_exact": f"{exact.numerator}/{exact.denominator}" if makespan.exact else None,
        "model": makespan.model,
        "path": list(makespan.path),
    }


def _transfers(data: bytes, as_json: bool) -> int:
    started = time.perf_counter()
    verdict = verify_transfers(read_transfers(data))
    if as_json:
        found = verdict.counterexample
        echo_json(
            {
                "verdict": verdict.verdict,
                "properties": verdict.properties,
                "counterexample": None if found is None else found.as_json(),
                "seconds": time.perf_counter() - started,
                "digest": verdict.digest,
            }
        )
    else:
        echo_card(verdict)
        if verdict.counterexample is not None:
            click.echo(f"\n{verdict.counterexample}")
    return verdict.exit_code


def _all_ranks(name: str, as_json: bool) -> int:
    from optcc.verify.all_ranks.proof import prove_all_ranks

    proof = prove_all_ranks(find_schedule(name))
    if as_json:
        wrong = proof.counterexample
        properties = dict.fromkeys(PROPERTIES, PROVED if proof.verdict == PROVED else UNKNOWN)
        if wrong is not None:
            properties[wrong.property] = REFUTED
        echo_json(proof.as_json() | {"properties": properties})
    else:
        echo_card(proof)
        if proof.counterexample is not None:
            click.echo(str(proof.counterexample))
    return proof.exit_code


def _failover(thorough: bool, as_json: bool) -> int:
    from optcc.verify.failover.exploration import FULL, QUICK, check_encoding, check_replay
    from optcc.verify.failover.induction import prove_invariants

    started = time.perf_counter()
    replay = check_replay(FULL if thorough else QUICK)
    lemmas = prove_invariants()
    encoding = check_encoding()
    verdicts = {replay.verdict, *(lemma.verdict for lemma in lemmas)}
    verdict = REFUTED if REFUTED in verdicts else UNKNOWN if UNKNOWN in verdicts else PROVED
    wrong = replay.counterexample
    if as_json:
        echo_json(
            {
                "verdict": verdict,
                "properties": {"replay": replay.verdict},
                "counterexample": None if wrong is None else wrong.as_json(),
                "states": replay.n_states,
                "transitions": replay.n_transitions,
                "lemmas": {lemma.name: lemma.verdict for lemma in lemmas},
                "encoding": str(encoding),
                "seconds": time.perf_counter() - started,
            }
        )
    else:
        echo_card(replay)
        if wrong is not None:
            click.echo(f"\n{wrong}")
        proved = sum(lemma.verdict == PROVED for lemma in lemmas)
        click.echo(f"\nany number of chunks, rails and epochs: {proved} of {len(lemmas)} lemmas proved (z3)")
        for lemma in lemmas:
            if lemma.verdict != PROVED:
                click.echo(f"  {lemma.name}: {lemma.verdict}")
        click.echo(f"the relations of the lemmas against the table: {encoding}")
    return {PROVED: EXIT_DONE, REFUTED: EXIT_REFUTED, UNKNOWN: EXIT_UNKNOWN}[verdict]
