"""`optcc verify`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import click

from optcc.cli import (
    IntervalType,
    NumberType,
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
from optcc.codec import FILE_BYTES_MAX, TRANSFERS_FORMAT, read_plan, read_transfers
from optcc.commands.judged import wanted_collective
from optcc.commands.verify_file import is_foreign, verify_foreign
from optcc.errors import EXIT_DONE, EXIT_REFUTED, EXIT_UNKNOWN, InputError, TopologyError
from optcc.files import read_file, replace_file
from optcc.plan import Plan
from optcc.planner import AUTO, Built, build, find_schedule, smallest_failure
from optcc.schedule import Schedule
from optcc.timing import Model
from optcc.topology import Topology
from optcc.units import parse_time, show_size
from optcc.verdict import PROPERTIES, PROVED, REFUTED, UNKNOWN
from optcc.verify.plan.additions import addition_orders
from optcc.verify.plan.limits import TARGETS
from optcc.verify.plan.ratio import Ratio, judge_ratio
from optcc.verify.plan.report import Questions, Report, judge
from optcc.verify.plan.shrink import Smallest
from optcc.verify.plan.slots import least_slots
from optcc.verify.plan.timing import Makespan
from optcc.verify.plan.verify_transfers import verify_transfers

_HEAD_BYTES = 256


@click.command("verify", epilog="Example: optcc verify my_schedule.py:ring --topology 4@1GB/s --size 1MiB")
@click.argument("name", type=ScheduleType(), required=False)
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    help="A file with a plan or transfers instead of a schedule.",
)
@click.option("--topology", type=TopologyType(), default=None, help="8@50GB/s,3=25GB/s, or a TOML file.")
@click.option("--size", type=SizeType(), default=None, help="Bytes of the message, such as 64MiB.")
@click.option("--all-ranks", is_flag=True, help="Prove NAME for every number of ranks and segments, by induction.")
@click.option(
    "--smt-lib",
    type=click.Path(path_type=Path, file_okay=False),
    help="With --all-ranks: write the lemmas into this folder, for another SMT solver.",
)
@click.option("--failover", is_flag=True, help="Prove the failover protocol: nothing lost, nothing reduced twice.")
@click.option("--thorough", is_flag=True, help="With --failover: millions of states, a minute or two.")
@click.option(
    "--eps",
    type=NumberType(),
    default=None,
    help="Prove that the time on the topology is at most (1 + EPS) times the bound.",
)
@click.option("--promise", default=None, help="Prove that the time on the topology is at most this, such as 25ms.")
@click.option(
    "--slowdown",
    "interval",
    type=IntervalType(),
    help="LOW:HIGH, such as 1:8: the slowest endpoint's slowdown, all at once.",
)
@click.option("--additions", is_flag=True, help="Also the order in which the inputs of the ranks are added up.")
@click.option("--target", type=OneOf(TARGETS), default=None, help=f"Also the resource limits of {', '.join(TARGETS)}.")
@plan_options
@auto_options
@json_option
def command(
    name: str | None,
    plan_file: Path | None,
    topology: Topology | None,
    size: int | None,
    all_ranks: bool,
    smt_lib: Path | None,
    failover: bool,
    thorough: bool,
    eps: Fraction | None,
    promise: str | None,
    interval: tuple[Fraction, Fraction] | None,
    additions: bool,
    target: str | None,
    dtype: str,
    reduction: str,
    segments: int | str,
    slots: int | None,
    ports: Model | None,
    collective: str | None,
    root: int | None,
    as_json: bool,
) -> int:
    """Prove the compiled schedule NAME, or the plan in a file, right; or show the smallest counterexample found.

    NAME may also be FILE.xml, an algorithm for MSCCL, or FILE.json, an execution plan of MSCCL++: of these the steps
    are judged, and whether run-times take them.

    With --eps or --promise, also prove its time with --ports (by default those that a plan file names, else exclusive):
    exact for fifo and exclusive ports, simulated up to rounding for fair ones. With --eps and --slowdown, prove the
    ratio to the bound for every slowdown of the slowest endpoint in the interval, with exclusive ports.

    With --additions, also tell how much of the result is made by which order of additions: plans of one order give the
    same bits.
    """
    if thorough and not failover:
        raise InputError("--thorough: needs --failover")
    if smt_lib is not None and not all_ranks:
        raise InputError("--smt-lib: needs --all-ranks")
    wanted = wanted_collective(name, collective, root, topology)
    claims = _Claims(eps, promise, interval, target, additions)
    if all_ranks or failover:
        flag, takes = ("--all-ranks", "the NAME of a schedule") if all_ranks else ("--failover", "no NAME")
        others = plan_file is not None or topology is not None or size is not None or claims.given
        if others or (all_ranks and failover) or (name is None) == all_ranks:
            raise InputError(f"verify {flag}: takes {takes}, and no other question")
        return _all_ranks(name, smt_lib, as_json) if name is not None else _failover(thorough, as_json)
    if name is not None and is_foreign(name):
        if plan_file is not None or topology is not None or size is not None or claims.timed or additions:
            raise InputError(f"verify {name}: takes --target and no other question")
        return verify_foreign(Path(name), target, as_json)
    if (name is None) == (plan_file is None):
        raise InputError("verify: give either the NAME of a schedule or --plan FILE")
    claims.check(topology, ports)
    if name is None:
        assert plan_file is not None
        data = read_file(plan_file, FILE_BYTES_MAX)
        if TRANSFERS_FORMAT.encode() in data[:_HEAD_BYTES]:
            if claims.given:
                raise InputError(f"--plan {plan_file}: transfers have no plan to ask about time, limits or additions")
            return _transfers(data, as_json)
        plan = read_plan(data)
        if topology is not None and topology.n_ranks != plan.n_ranks:
            raise TopologyError(f"--topology has {topology.n_ranks} ranks: the plan has {plan.n_ranks}")
        answer = _answer(plan, None, topology, claims, ports, {})
    else:
        if topology is None or size is None:
            raise InputError(f"verify {name}: give --topology and --size")
        options: dict[str, Any] = {"dtype": dtype, "reduction": reduction, "slots": slots}
        options["ports"] = ports or "exclusive"
        built = build(name, topology, size, segments=segments, collective=wanted, **options)
        answer = _answer(built.plan, built, topology, claims, ports, options)
    if as_json:
        echo_json(answer.as_json())
    else:
        answer.echo()
    return answer.exit_code


@dataclass(frozen=True, slots=True)
class _Claims:
    """What is asked beyond the properties, as given on the command line."""

    eps: Fraction | None
    promise: str | None
    interval: tuple[Fraction, Fraction] | None
    target: str | None
    additions: bool

    @property
    def given(self) -> bool:
        return self.timed or self.target is not None or self.additions

    @property
    def timed(self) -> bool:
        return any(each is not None for each in (self.eps, self.promise, self.interval))

    def check(self, topology: Topology | None, ports: Model | None) -> None:
        """Raises InputError for a claim without what it needs."""
        for flag, value in (("--eps", self.eps), ("--promise", self.promise), ("--slowdown", self.interval)):
            if value is not None and topology is None:
                raise InputError(f"{flag}: needs --topology")
        if self.interval is not None and ports == "fair":
            raise InputError("--slowdown with --ports fair: must be exclusive, where the ports' order is fixed")

    def questions(self, schedule: Schedule | None, topology: Topology | None, model: Model) -> Questions:
        within = 1 + self.eps if self.eps is not None and self.interval is None else None
        promise_s = None if self.promise is None else parse_time(self.promise)
        return Questions(schedule, topology, model, within, promise_s, self.target)


@dataclass(frozen=True, slots=True)
class _Answer:
    """All that the command says of one plan."""

    plan: Plan
    report: Report
    seconds: float
    smallest: Smallest | None
    least_slots: int | None
    ratio: Ratio | None
    additions: dict[str, int] | None

    @property
    def slots(self) -> int:
        """The most that a channel has."""
        return max((channel.slots for channel in self.plan.channels), default=0)

    @property
    def exit_code(self) -> int:
        failed = self.ratio is not None and not self.ratio.holds
        return self.report.verdict.exit_code or (EXIT_REFUTED if failed else EXIT_DONE)

    def as_json(self) -> dict[str, object]:
        verdict, makespan = self.report.verdict, self.report.makespan
        shown = verdict.counterexample
        return {
            "verdict": verdict.verdict,
            "properties": verdict.properties,
            "conditions": dict(verdict.conditions),
            "counterexample": None if shown is None else shown.as_json(),
            "smallest": None if self.smallest is None else self.smallest.as_json(),
            "seconds": self.seconds,
            "digest": self.plan.digest,
            "slots": self.slots,
            "least_slots": self.least_slots,
            "makespan": None if makespan is None else _makespan(makespan),
            "ratio": None if self.ratio is None else self.ratio.as_json(),
            **({} if self.additions is None else {"additions": self.additions}),
        }

    def echo(self) -> None:
        verdict, smallest = self.report.verdict, self.smallest
        echo_card(verdict)
        if verdict.counterexample is not None:
            click.echo("")
            click.echo(str(verdict.counterexample) if smallest is None else f"{smallest}\n{smallest.counterexample}")
        if self.least_slots is not None:
            click.echo(f"slots: {self.slots}, at least {self.least_slots}")
        if self.report.makespan is not None:
            click.echo(str(self.report.makespan))
        for name, condition in verdict.conditions:
            click.echo(f"{name} holds for {condition}")
        for expression, n_bytes in (self.additions or {}).items():
            click.echo(f"{show_size(n_bytes)} are {expression}, of the inputs of these ranks")
        if self.ratio is not None:
            click.echo("")
            echo_card(self.ratio)


def _answer(
    plan: Plan,
    built: Built | None,
    topology: Topology | None,
    claims: _Claims,
    ports: Model | None,
    options: dict[str, Any],
) -> _Answer:
    """The judged plan; `built` with its `options` if it comes from a schedule, which is then shrunk if it is wrong."""
    model: Model = ports or plan.ports or "exclusive"
    if claims.timed and plan.ports not in (None, model):
        click.echo(f"optcc: the plan is ordered for {plan.ports} ports, and timed on {model} ones", err=True)
    questions = claims.questions(None if built is None else built.schedule, topology, model)
    started = time.perf_counter()
    report = judge(plan, questions)
    seconds = time.perf_counter() - started
    smallest = ratio = None
    if built is not None and topology is not None:
        smallest = smallest_failure(built, report.verdict, topology, plan.size_bytes, **options)
    proved = report.verdict.verdict == PROVED
    if claims.interval is not None and topology is not None and proved:
        ratio = judge_ratio(plan, topology, *claims.interval, claims.eps)
    additions = addition_orders(plan) if claims.additions and proved else None
    return _Answer(plan, report, seconds, smallest, least_slots(plan) if proved else None, ratio, additions)


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


def _all_ranks(name: str, smt_lib: Path | None, as_json: bool) -> int:
    from optcc.verify.all_ranks.proof import prove_all_ranks

    if name == AUTO:
        rule = "must be a schedule: auto chooses one for each topology and size, whose plan is judged"
        raise InputError(f"--all-ranks: {name}: {rule}")
    proof = prove_all_ranks(find_schedule(name))
    if smt_lib is not None:
        questions = proof.as_smt_lib()
        smt_lib.mkdir(parents=True, exist_ok=True)
        for file, text in questions.items():
            replace_file(smt_lib / file, text.encode())
        click.echo(f"optcc: {len(questions)} lemmas in {smt_lib}: each must be unsat", err=True)
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
    from optcc.verify.failover.configurations import FULL, QUICK
    from optcc.verify.failover.encoding import check_encoding
    from optcc.verify.failover.exploration import check_replay
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
