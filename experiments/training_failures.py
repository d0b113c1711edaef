"""A small GPT is trained on emulated hosts while a NIC is slow, lost and back, with optcc and with Gloo: a record.

    optcc experiment training-failures            (half an hour; torch: make test-torch)
    optcc experiment training-failures --quick    (six minutes, a smaller model)
    optcc experiment training-long                (an hour: 200 steps, a NIC down from step 50 to 100)

Four hosts of two NICs, one rank each; DDP, whose buckets of gradients are reduced while the backward pass goes on, or
FSDP2. Every backend trains in a job of its own, once on healthy hosts and once with the events, each in the middle of
its step. optcc trains in three ways: "plans change" is what `init_process_group("optcc")` does by itself; with "plans
stay" (`Options(replan=False)`, rates declared) and with "rank order" (`Options(schedules=...)`: plans change, and every
sum is made in the order of the ranks) every loss and parameter must be that of the healthy run to the bit. The exit
code is 1 if it is not, or if a job of ours ends early.

The long training is of the smaller model over NICs that are so slow that a step is their time, even on a machine that
does something else beside. Jobs may be added to a record one at a time: `--join RECORD -o RECORD --way gloo --script
events`. Needs root, for the hosts. There is no MPI beside them: torch from the package index is built without that
backend.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import click
import msgspec

import optcc
from optcc.collective import Collective
from optcc.errors import EXIT_DONE, EXIT_REFUTED, EnvironmentMissing, InputError, OptccError
from optcc.experiments.cells import HERE, RecordCells
from optcc.experiments.fabric import WIRE_OVERHEAD, Fabric, FabricSpec, NicRates, NicTarget, control_address, exact_rate
from optcc.experiments.rank_lines import Hung, RankLines
from optcc.experiments.record import RECORDS, Check, stolen_jiffies, stolen_share
from optcc.experiments.recorder import Measured, RecordForm, head, record_command
from optcc.experiments.training_rank import GptShape, RankSetup
from optcc.show import Card
from optcc.topology import Topology
from optcc.units import parse_rate, show_size
from optcc.verify.bounds.certified import least_seconds

HOSTS, NICS, NIC_RATE, SEED = 4, 2, "200Mbit/s", 1
FULL_GPT: Final = GptShape(384, 6, 6, 64)
QUICK_GPT: Final = GptShape(128, 2, 4, 32)
LEFT_OF_NIC: Final[Mapping[str, Fraction]] = {"half": Fraction(1, 2), "down": Fraction(0), "back": Fraction(1)}
"""For each kind of event the share of the NIC's rate that is left after it."""
SCRIPT: Final = ((0.15, "half"), (0.35, "back"), (0.5, "down"), (0.75, "back"))
"""The events, unless others are given: each as a share of the steps, at the same NIC."""
NIC: Final = "h1.eth0"
WAYS: Final = {
    "optcc-stay": ("optcc", "stay"),
    "optcc-change": ("optcc", "change"),
    "optcc-order": ("optcc", "order"),
    "gloo": ("gloo", ""),
}
"""The backend, and what becomes of its plans."""
SAME_BITS: Final = ("stay", "order")
"""What promises the bits of the healthy run."""
WRAPS: Final = ("ddp", "fsdp")
SCRIPTS: Final = ("healthy", "events")
LONG_RATE, LONG_STEPS, LONG_SCRIPT = "10Mbit/s", 200, ((0.25, "down"), (0.5, "back"))
WARM_STEPS: Final = 3
"""The first steps make plans, connections and buckets; they count in no median."""
_PORT: Final = 29_400
_START_S: Final = 180.0
_STEP_S: Final = 90.0
_TIMEOUT_S: Final = 30.0


# --- the record -------------------------------------------------------------------------------------------------------


class NicEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What happens to a NIC in the middle of a step, from 0 on; `kind` is one of `LEFT_OF_NIC`."""

    step: int
    kind: str
    nic: str

    @classmethod
    def parse(cls, text: str) -> NicEvent:
        """The event of STEP:KIND:NIC.

        >>> NicEvent.parse("50:down:h1.eth0")
        NicEvent(step=50, kind='down', nic='h1.eth0')

        Raises InputError for another text.
        """
        step, _, rest = text.partition(":")
        kind, _, nic = rest.partition(":")
        if not step.isdecimal() or kind not in LEFT_OF_NIC:
            raise InputError(f"event {text!r}: must be STEP:KIND:NIC with a kind of {', '.join(LEFT_OF_NIC)}")
        if NicTarget.parse(nic).nic is None:
            raise InputError(f"event {text!r}: {nic}: must be one NIC, as in h1.eth0")
        return cls(int(step), kind, nic)


class TrainedRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job: its losses, the mean of all ranks by step, and the seconds of each step, of the slowest rank.

    `plans` see `RankSetup`. The digests are SHA-256 over the bits of the losses of all ranks and steps, and over all
    parameters at the end, empty if it was not reached; `ended` says why then, and `ended_s` how long after the last
    step. `gradient_bytes` were reduced in `buckets` a step, `in_flight` of them at once at most. `steal` is the
    hypervisor's share of the machine, `notes` what the run-time has said, with the step and the rank.
    """

    backend: str
    plans: str
    wrap: str
    events: tuple[NicEvent, ...]
    losses: tuple[float, ...]
    step_s: tuple[float, ...]
    losses_sha256: str
    parameters_sha256: str
    ended: str
    ended_s: float
    gradient_bytes: int
    buckets: int
    in_flight: int
    steal: float
    notes: tuple[tuple[int, int, str], ...]

    @property
    def name(self) -> str:
        """As tables and figures have it."""
        how = {"stay": ", plans stay", "change": ", plans change", "order": ", rank order"}.get(self.plans, "")
        return f"{self.backend}{how}{', FSDP2' if self.wrap == 'fsdp' else ''}"

    def phases(self) -> Iterator[tuple[str, range]]:
        """What the NIC's state is, and in which steps: those of an event belong to no phase, nor do the first ones."""
        state, first = "healthy", WARM_STEPS
        for event in self.events:
            yield state, range(first, min(event.step, len(self.step_s)))
            state, first = event.kind, event.step + 1
        yield state, range(first, len(self.step_s))

    def median_s(self, steps: range) -> float | None:
        """The median step of some; None if there are none."""
        return statistics.median(self.step_s[step] for step in steps) if len(steps) else None


@dataclass(frozen=True)
class TrainingRecord(Measured):
    """The jobs, what was trained, and on which hosts."""

    docs_page: ClassVar[str] = "pytorch.md"

    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    torch: str
    hosts: int
    nics: int
    nic_rate: str
    gpt: GptShape
    parameters: int
    steps: int
    sequences: int
    bucket_bytes: int
    seed: int
    timeout_s: float
    runs: tuple[TrainedRun, ...]

    def check_fields(self, check: Check) -> None:
        check("runs", len(self.runs), len(self.runs) > 0, "be one or more")
        for number, run in enumerate(self.runs):
            where = f"runs[{number}]"
            check(f"{where}.plans", run.plans, (run.backend, run.plans) in WAYS.values(), "fit the backend")
            check(f"{where}.wrap", run.wrap, run.wrap in WRAPS, f"be one of {', '.join(WRAPS)}")
            same = len(run.losses) == len(run.step_s) <= self.steps
            check(f"{where}.losses", len(run.losses), same, f"be as many as step_s, at most {self.steps}")
            check(f"{where}.step_s", min(run.step_s, default=1.0), min(run.step_s, default=1.0) > 0, "be above zero")
            whole = (len(run.losses) == self.steps) == (not run.ended)
            check(f"{where}.ended", run.ended, whole, f"say why there are fewer than {self.steps} steps, and no more")
            steps = [event.step for event in run.events]
            check(f"{where}.events", steps, steps == sorted(set(steps)), "be in the order of their steps")

    def healthy(self, run: TrainedRun) -> TrainedRun | None:
        """The job without events that is like `run` otherwise."""
        wanted = run.backend, run.plans, run.wrap, ()
        return next((each for each in self.runs if (each.backend, each.plans, each.wrap, each.events) == wanted), None)

    def is_same(self, run: TrainedRun) -> bool:
        """Whether every loss of every rank and every parameter is that of its healthy run, to the bit."""
        other = self.healthy(run)
        return (
            other is not None
            and bool(run.parameters_sha256)
            and (run.losses_sha256, run.parameters_sha256) == (other.losses_sha256, other.parameters_sha256)
        )

    def bound_s(self, run: TrainedRun, state: str) -> float:
        """The shortest time in which the hosts can reduce the gradients of a step, headers included."""
        rate = parse_rate(self.nic_rate)
        left = rate * (self.nics - 1 + LEFT_OF_NIC.get(state, Fraction(1)))
        topology = Topology.parse(f"{self.hosts}@{exact_rate(rate * self.nics)},0={exact_rate(left)}")
        everything = run.gradient_bytes or 4 * self.parameters
        return float(least_seconds(topology, everything, Collective("allreduce", self.hosts)) * Fraction(WIRE_OVERHEAD))

    def faults(self) -> list[str]:
        """What must not be, a sentence each."""
        found = []
        for run in self.runs:
            if run.backend != "optcc":
                continue
            if run.ended:
                found.append(f"{run.name}: {run.ended}")
            elif run.events and run.plans in SAME_BITS and self.healthy(run) and not self.is_same(run):
                found.append(f"{run.name}: the bits are not those of the healthy run")
        return found

    def beyond_bound(self, run: TrainedRun, state: str) -> float | None:
        """By how much a median step in `state` is longer than before the events, less what T* explains: as a share of
        the step before. None for FSDP2, whose traffic is not that of T*, and where there are no such steps."""
        found = {name: run.median_s(steps) for name, steps in reversed([*run.phases()])}
        before_s, then_s = found.get("healthy"), found.get(state)
        if run.wrap == "fsdp" or before_s is None or then_s is None:
            return None
        explained_s = self.bound_s(run, state) - self.bound_s(run, "healthy")
        return (then_s - before_s - explained_s) / before_s

    def card(self) -> Card:
        events = max((run.events for run in self.runs), key=len)
        states = ["healthy", *(event.kind for event in events)]
        bounds = (f"{self.bound_s(self.runs[0], state):.2f} s" for state in states)
        rows = [("T* of the gradients alone", f"{self.bound_s(self.runs[0], 'healthy'):.2f} s", *bounds, "", "", "")]
        for run in self.runs:
            if run.events != events:
                continue
            healthy = self.healthy(run)
            medians = [None if healthy is None else healthy.median_s(range(WARM_STEPS, len(healthy.step_s)))]
            medians += [run.median_s(steps) for _, steps in run.phases()]
            shown = ("-" if each is None else f"{each:.2f} s" for each in medians)
            beyond = self.beyond_bound(run, "down")
            rows.append((run.name, *shown, "-" if beyond is None else f"{beyond:+z.0%}", *self._end(run)))
        size = f"{self.parameters / 1e6:.1f} M parameters"
        hosts = f"{self.hosts} hosts of {self.nics} NICs of {self.nic_rate}"
        title = f"Median step of a GPT of {size}, {hosts}, {self.sequences} sequences a rank"
        steps = ("before", *(f"{event.kind}, from step {event.step}" for event in events))
        ends = ("down, beyond T*", "the job", "bits of the healthy job")
        return Card(title, ("", "healthy job", *steps, *ends), tuple(rows))

    def _end(self, run: TrainedRun) -> tuple[str, str]:
        """What became of a job, and whether it has the bits of its healthy job."""
        if run.ended:
            return f"ended in step {len(run.losses)}", "-"
        return "trained on", "-" if self.healthy(run) is None else "yes" if self.is_same(run) else "no"

    def remarks(self) -> list[str]:
        lines = [f"{run.name}: {run.ended} ({run.ended_s:.1f} s later)" for run in self.runs if run.ended]
        lines += [
            f"{run.name}: {run.buckets} buckets of {show_size(run.gradient_bytes)} a step, {run.in_flight} at once"
            for run in self.runs
            if run.buckets
        ]
        return lines + [f"wrong: {fault}" for fault in self.faults()]

    @property
    def exit_code(self) -> int:
        return EXIT_REFUTED if self.faults() else EXIT_DONE


@dataclass(frozen=True)
class TrainingFailures(TrainingRecord):
    """A GPT of ten million parameters: a NIC is at half, back, down and back."""

    format: ClassVar[str] = "optcc-training-failures/1"
    own_path: ClassVar[Path] = RECORDS / "training-failures.json"


@dataclass(frozen=True)
class LongTraining(TrainingRecord):
    """200 steps of a smaller one: a NIC is down from step 50 to step 100."""

    format: ClassVar[str] = "optcc-training-long/1"
    own_path: ClassVar[Path] = RECORDS / "training-long.json"


# --- a job ------------------------------------------------------------------------------------------------------------


class _Ended(Exception):
    """A job that ended early, and why."""


class _Job:
    """A rank on every host, each connected by a socket pair."""

    def __init__(self, fabric: Fabric, setup: RankSetup) -> None:
        self.losses: list[list[float]] = []
        self.step_s: list[float] = []
        self.notes: list[tuple[int, int, str]] = []
        self.most = {"buckets": 0, "in_flight": 0, "bytes": 0}
        self._stack = contextlib.ExitStack()
        self._lines = RankLines()
        self._stack.callback(self._lines.close)
        try:
            for rank in range(setup.ranks):
                self._start(fabric, msgspec.structs.replace(setup, rank=rank))
        except BaseException:
            self.end()
            raise

    def _start(self, fabric: Fabric, setup: RankSetup) -> None:
        own, its = socket.socketpair()
        self._lines.add(own)
        nics = ",".join(f"eth{nic}" for nic in range(setup.nics))
        environ = os.environ | {
            "PYTHONPATH": str(Path(optcc.__file__).resolve().parents[1]),
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "OPTCC_SOCKET_IFNAME": "eth",
            "GLOO_SOCKET_IFNAME": nics,
        }
        if setup.plans == "stay":
            environ["OPTCC_NIC_RATES"] = setup.nic_rate
        with its:
            argv = [sys.executable, "-m", "optcc.experiments.training_rank"]
            process = subprocess.Popen(
                fabric.host_command(setup.rank, argv), stdin=its.fileno(), stdout=subprocess.DEVNULL, env=environ
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        own.sendall(msgspec.json.encode(setup) + b"\n")

    def hear(self, limit_s: float) -> list[dict[str, Any]]:
        """A line of every rank; raises _Ended if one has failed, or says nothing for so long."""
        try:
            rows = self._lines.hear(limit_s)
        except Hung as error:
            raise _Ended(str(error)) from None
        for rank, row in enumerate(rows):
            self.notes += [(len(self.losses), rank, note) for note in row["notes"]]
        failed = [f"rank {rank}: {row['error']}" for rank, row in enumerate(rows) if "error" in row]
        if failed:
            raise _Ended(failed[0])
        return rows

    def step(self) -> None:
        """One step of all ranks."""
        rows = self.hear(_STEP_S if self.losses else _START_S)
        self.losses.append([float(row["loss"]) for row in rows])
        self.step_s.append(max(float(row["seconds"]) for row in rows))
        for what, most in self.most.items():
            self.most[what] = max(most, *(int(row[what]) for row in rows)) if len(self.losses) > 1 else 0

    def end(self) -> None:
        """Kills the ranks and closes the sockets."""
        self._stack.close()


def cause(fabric: Fabric, event: NicEvent) -> None:
    """Makes an event happen."""
    if event.kind == "down":
        fabric.fail(event.nic)
    elif event.kind == "back":
        fabric.heal(event.nic)
    else:
        target = NicTarget.parse(event.nic)
        assert target.nic is not None
        whole = fabric.state().spec.rates[target.host][target.nic]
        share = LEFT_OF_NIC[event.kind]
        fabric.set_rate(target, NicRates(whole.rate_out * share, whole.rate_in * share))


def run_job(setup: RankSetup, events: Sequence[NicEvent]) -> tuple[TrainedRun, int]:
    """Trains on hosts of its own; the run, and the number of parameters.

    An event of step k happens half a median step after step k has begun. Raises EnvironmentMissing without the right to
    make hosts, OptccError if the ranks do not start.
    """
    spec = FabricSpec.parse(f"{setup.ranks}x{setup.nics}@{setup.nic_rate}", name=f"training-{os.getpid()}")
    coming, ended, digest, heard_s = list(events), "", "", 0.0
    with contextlib.ExitStack() as stack:
        fabric = stack.enter_context(Fabric.up(spec))
        job = _Job(fabric, setup)
        stack.callback(job.end)
        stolen = stolen_jiffies()
        try:
            parameters = int(job.hear(_START_S)[0]["parameters"])
            heard_s = time.monotonic()
            for step in range(setup.steps):
                if coming and coming[0].step == step:
                    time.sleep(statistics.median(job.step_s[WARM_STEPS:] or job.step_s or [0.0]) / 2)
                    cause(fabric, coming.pop(0))
                job.step()
                heard_s = time.monotonic()
            parts = [str(row["parameters_sha256"]) for row in job.hear(_STEP_S)]
            digest = hashlib.sha256("".join(parts).encode()).hexdigest()
        except _Ended as error:
            if not job.losses:
                raise OptccError(f"{setup.backend}: no step was made: {error}") from None
            ended = str(error)
        ended_s = time.monotonic() - heard_s
        steal = stolen_share(stolen, stolen_jiffies())
    bits = struct.pack(f"<{len(job.losses) * setup.ranks}d", *(loss for row in job.losses for loss in row))
    run = TrainedRun(
        setup.backend,
        setup.plans,
        setup.wrap,
        tuple(events),
        tuple(statistics.fmean(row) for row in job.losses),
        tuple(round(each, 4) for each in job.step_s),
        hashlib.sha256(bits).hexdigest(),
        digest,
        ended,
        round(ended_s, 2) if ended else 0.0,
        job.most["bytes"],
        job.most["buckets"],
        job.most["in_flight"],
        round(steal, 4),
        tuple(job.notes),
    )
    return run, parameters


def events_of(texts: Sequence[str], steps: int, script: Sequence[tuple[float, str]] = SCRIPT) -> tuple[NicEvent, ...]:
    """The events that options give, or those of `script`, by step. Raises InputError for two in one step, or too late.

    >>> [event.step for event in events_of((), 200)]
    [30, 70, 100, 150]
    """
    found = [NicEvent.parse(text) for text in texts] or [NicEvent(int(s * steps), kind, NIC) for s, kind in script]
    found.sort(key=lambda event: event.step)
    places = [event.step for event in found]
    if len(set(places)) < len(places) or not 0 < places[0] <= places[-1] < steps:
        raise InputError(f"events in steps {places}: must be in different steps, from 1 to {steps - 1}")
    return tuple(found)


Kind = TypeVar("Kind", bound=TrainingRecord)


def measure(
    kind: type[Kind],
    setup: RankSetup,
    events: tuple[NicEvent, ...],
    chosen: Sequence[tuple[str, str, str]],
    joined: TrainingRecord | None = None,
    cells: RecordCells = HERE,
) -> Kind:
    """Trains as `chosen`, each a wrap, a way and a script; the record of this kind.

    Other jobs of `joined` are kept. Raises InputError if they have trained something else.
    """
    made: dict[str, Any] = {
        "torch": metadata.version("torch"),
        "hosts": setup.ranks,
        "nics": setup.nics,
        "nic_rate": setup.nic_rate,
        "gpt": setup.gpt,
        "steps": setup.steps,
        "sequences": setup.sequences,
        "bucket_bytes": setup.bucket_bytes,
        "seed": setup.seed,
        "timeout_s": setup.timeout_s,
    }
    for what, value in made.items() if joined is not None else ():
        if getattr(joined, what) != value:
            raise InputError(f"--join: {what} {getattr(joined, what)}: must be {value}")
    jobs = {}
    for wrap, way, script in chosen:
        backend, plans = WAYS[way]
        job = msgspec.structs.replace(setup, wrap=wrap, backend=backend, plans=plans)
        jobs[f"{wrap}, {way}, {script}"] = partial(run_job, job, events if script == "events" else ())
    found = list(cells.each(jobs, tuple[TrainedRun, int]))
    runs = {_place(run): run for run in (*(() if joined is None else joined.runs), *(run for run, _ in found))}
    return kind(**head(), **made, parameters=found[-1][1], runs=tuple(runs[place] for place in sorted(runs)))


def _joined(kind: type[Kind], path: Path | None, cells: RecordCells) -> Kind | None:
    """The record whose other jobs are kept."""
    if path is None:
        return None
    cells.join(path)
    return kind.read(path)


def _place(run: TrainedRun) -> tuple[int, int, bool]:
    """Where a job is in the record, which has one of each."""
    return WRAPS.index(run.wrap), list(WAYS.values()).index((run.backend, run.plans)), bool(run.events)


def _setup(gpt: GptShape, steps: int, sequences: int, bucket_mib: int, seed: int, rate: str) -> RankSetup:
    """What all jobs of a record have in common; raises EnvironmentMissing without torch."""
    if find_spec("torch") is None:
        raise EnvironmentMissing("torch is not installed: make test-torch, then .venv-torch/bin/python -m ...")
    return RankSetup(
        rank=0,
        ranks=HOSTS,
        store=f"tcp://{control_address(0)}:{_PORT}",
        backend="",
        plans="",
        wrap="",
        gpt=gpt,
        steps=steps,
        sequences=sequences,
        bucket_bytes=bucket_mib << 20,
        seed=seed,
        timeout_s=_TIMEOUT_S,
        nics=NICS,
        nic_rate=rate,
    )


def _choose(wraps: Sequence[str], ways: Sequence[str], scripts: Sequence[str]) -> list[tuple[str, str, str]]:
    """The jobs, in the order of a record: of what is not named, all."""
    chosen = set(itertools.product(wraps or WRAPS, ways or WAYS, scripts or SCRIPTS))
    return [each for each in itertools.product(WRAPS, WAYS, SCRIPTS) if each in chosen]


_WRAP = click.option("--wrap", "wraps", multiple=True, type=click.Choice(WRAPS), help="[default: both]")
_WAY = click.option("--way", "ways", multiple=True, type=click.Choice(tuple(WAYS)), help="[default: all]")
_SCRIPT = click.option("--script", "scripts", multiple=True, type=click.Choice(SCRIPTS), help="[default: both]")
_JOIN = click.option("--join", type=click.Path(path_type=Path, dir_okay=False), help="Keep other jobs of this record.")


@record_command(TrainingFailures, RecordForm(quick={}))
@click.option("--steps", type=click.IntRange(8), help="Number of steps.  [default: 40; 20 with --quick]")
@click.option("--event", "texts", multiple=True, help="STEP:KIND:NIC, as 50:down:h1.eth0; may be repeated.")
@_WRAP
@_WAY
@_SCRIPT
@_JOIN
@click.option("--rate", default=NIC_RATE, show_default=True, help="Rate of a NIC, each way.")
@click.option("--sequences", type=click.IntRange(1), default=2, show_default=True, help="Of a rank, in a step.")
@click.option("--bucket", "bucket_mib", type=click.IntRange(1), default=4, show_default=True, help="MiB, of DDP.")
@click.option("--seed", default=SEED, show_default=True, help="Of the text, the model and the batches.")
def command(
    quick: bool,
    steps: int | None,
    texts: tuple[str, ...],
    wraps: tuple[str, ...],
    ways: tuple[str, ...],
    scripts: tuple[str, ...],
    join: Path | None,
    rate: str,
    sequences: int,
    bucket_mib: int,
    seed: int,
    cells: RecordCells,
) -> TrainingFailures:
    """Train with optcc and with Gloo, healthy and with a NIC that is slow, lost and back; quick: a smaller model, half
    of the steps."""
    steps = steps or (20 if quick else 40)
    setup = _setup(QUICK_GPT if quick else FULL_GPT, steps, sequences, bucket_mib, seed, rate)
    joined = _joined(TrainingFailures, join, cells)
    return measure(TrainingFailures, setup, events_of(texts, steps), _choose(wraps, ways, scripts), joined, cells)


@record_command(LongTraining, RecordForm(quick={"steps": 20}))
@click.option("--steps", type=click.IntRange(8), default=LONG_STEPS, show_default=True, help="Number of steps.")
@_WRAP
@_WAY
@_SCRIPT
@_JOIN
def long_command(
    steps: int,
    wraps: tuple[str, ...],
    ways: tuple[str, ...],
    scripts: tuple[str, ...],
    join: Path | None,
    cells: RecordCells,
) -> LongTraining:
    """Train a smaller model for longer, a NIC down in a quarter of the steps, and write the record."""
    setup = _setup(QUICK_GPT, steps, 2, 4, SEED, LONG_RATE)
    joined = _joined(LongTraining, join, cells)
    return measure(LongTraining, setup, events_of((), steps, LONG_SCRIPT), _choose(wraps, ways, scripts), joined, cells)
