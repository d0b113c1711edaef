"""A NIC dies in a training run, seen by all that looks inside a job, as a record.

    optcc experiment seen-failure           (about a minute)

Four emulated hosts train a small network with NumPy: each step averages its gradients by one AllReduce. In the middle
of a step a NIC goes down. Beside the job runs what an operator would run: `optcc status` several times a second, a
drain of taps that take the norms of all gradients, and `optcc explain` at the end; two steps, one before and one after,
are traced. The record is a file of its own format, `optcc-seen-failure/1`, and times in it are seconds since the
failure. Needs root, for the hosts.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import click
import msgspec
import numpy as np
import numpy.typing as npt

from optcc.errors import InputError, RuntimeFault
from optcc.experiments.fabric import Fabric, FabricSpec
from optcc.experiments.record import RECORDS, Check
from optcc.experiments.recorder import ONE_JOB, Measured, RecordForm, check_times, head, record_command, run_command
from optcc.job import init
from optcc.observe import CallbackSink, ChunkRecord, JobDrain, Tap, statistics
from optcc.runtime.communicator import Communicator
from optcc.runtime.observe.explain import FailureExplanation, explain
from optcc.runtime.observe.jobs import read_job
from optcc.runtime.observe.snapshot import JobSnapshot, snapshot
from optcc.runtime.observe.trace import read_trace
from optcc.show import Card
from optcc.simulate import simulate
from optcc.topology import Topology

HOSTS, NIC = "4x2@200Mbit/s", "h2.eth1"
STEPS, FAILS_IN, SEED = 60, 20, 1
IN, HIDDEN, OUT, BATCH, RATE = 1000, 1500, 300, 32, 0.03
BEFORE, AFTER = "before", "after"
TOPOLOGIES = {BEFORE: "4@50MB/s", AFTER: "4@50MB/s,2=25MB/s"}
"""What the NICs of each host carry together."""
TAP = "norms points=input,output"
_LOOK_S, _STATUS_S, _JOB_S, _DEADLINE_S = 0.1, 0.6, 240.0, 120.0
_SINCE_S = -4.0
"""What was before is left out of samples and norms."""


class TrainingStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step at rank 0; `epoch` is that of the plans."""

    step: int
    began_s: float
    ended_s: float
    loss: float
    epoch: int


class StatusSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `optcc status` said: of each NIC its state and bytes a second in."""

    at_s: float
    states: tuple[str, ...]
    receiving: tuple[float, ...]


class GradientNorm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The Euclidean norm of what went into an AllReduce at a rank, or came out of it, taken at `at_s`."""

    at_s: float
    rank: int
    point: str
    l2: float


class TracedStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The AllReduce of one step: its transfers, seconds from its beginning, and what is predicted for all of them."""

    when: str
    step: int
    plan: str
    predicted_s: float
    src: tuple[int, ...]
    dst: tuple[int, ...]
    posted_s: tuple[float, ...]
    arrived_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Until the last message has arrived."""
        return max(self.arrived_s)


@dataclass(frozen=True, slots=True)
class SeenFailure(Measured):
    """What was seen, the machine and the versions; `status` is that of `_STATUS_S` after the failure."""

    format: ClassVar[str] = "optcc-seen-failure/1"
    own_path: ClassVar = RECORDS / "seen-failure.json"
    docs_page: ClassVar[str] = "nic-failure.md"

    machine: dict[str, Any]
    versions: dict[str, str]
    hosts: str
    failed: str
    n_bytes: int
    nics: tuple[str, ...]
    steps: tuple[TrainingStep, ...]
    samples: tuple[StatusSample, ...]
    norms: tuple[GradientNorm, ...]
    traces: tuple[TracedStep, ...]
    status: JobSnapshot
    explained: FailureExplanation

    def check_fields(self, check: Check) -> None:
        check_times(check, "steps", [each.ended_s - each.began_s for each in self.steps])
        check("failed", self.failed, self.failed in self.nics, f"be one of {', '.join(self.nics)}")
        for number, sample in enumerate(self.samples):
            counts = len(sample.states), len(sample.receiving)
            check(f"samples[{number}]", counts, set(counts) == {len(self.nics)}, "have one of each NIC")
        whens = [each.when for each in self.traces]
        check("traces", whens, whens == [BEFORE, AFTER], f"be {BEFORE} and {AFTER}")
        for number, trace in enumerate(self.traces):
            lengths = {len(trace.src), len(trace.dst), len(trace.posted_s), len(trace.arrived_s)}
            check(
                f"traces[{number}]", sorted(lengths), len(lengths) == 1 and lengths != {0}, "have one for each transfer"
            )

    def seconds(self, epoch: int, since_s: float = -1e9) -> float:
        """The median of the steps of an epoch that began at `since_s` or later and were not the first of it."""
        own = [each for each in self.steps if each.epoch == epoch and each.began_s >= since_s][1:]
        return median(each.ended_s - each.began_s for each in own)

    @property
    def first_down_s(self) -> float:
        """When `optcc status` first said of the NIC something else than `up`."""
        nic = self.nics.index(self.failed)
        return next(each.at_s for each in self.samples if each.at_s >= 0 and each.states[nic] != "up")

    @property
    def replanned_s(self) -> float:
        """When the first step under new plans began."""
        first = self.steps[0].epoch
        return next(each.began_s for each in self.steps if each.epoch > first and each.began_s > 0)

    def card(self) -> Card:
        struck = next(each for each in self.steps if each.began_s <= 0 < each.ended_s)
        first, last = self.steps[0].epoch, self.steps[-1].epoch
        before, after = self.traces
        rows = (
            ("a step before", f"{self.seconds(first):.3f} s"),
            ("the step in which the NIC failed", f"{struck.ended_s - struck.began_s:.3f} s"),
            ("status names the NIC", f"{self.first_down_s:.1f} s after"),
            ("the first step under new plans begins", f"{self.replanned_s:.1f} s after"),
            ("a step after that", f"{self.seconds(last):.3f} s"),
            ("AllReduce traced before: measured, predicted", f"{before.seconds:.3f} s, {before.predicted_s:.3f} s"),
            ("AllReduce traced after: measured, predicted", f"{after.seconds:.3f} s, {after.predicted_s:.3f} s"),
            ("loss of the first and the last step", f"{self.steps[0].loss:.4f}, {self.steps[-1].loss:.4f}"),
        )
        return Card(f"{self.failed} of {self.hosts} goes down in a step", ("", ""), rows)

    def markdown(self) -> str:
        said = [self.card().markdown(), f"`optcc status`, {_STATUS_S:g} s after the failure:\n"]
        said += [self.status.rank_card().markdown(), self.status.rail_card().markdown()]
        said += ["`optcc explain`, at the end of the run:\n", f"> {self.explained.text}\n"]
        return "\n".join(said)


# --- a rank -----------------------------------------------------------------------------------------------------------


class TrainedNetwork:
    """tanh(x A) B in float32, which learns what another one of its kind does; its parameters are one array."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.parameters = draw.normal(0, IN**-0.5, IN * HIDDEN + HIDDEN * OUT).astype(np.float32)
        self._teacher = draw.normal(0, 2 * IN**-0.5, (IN, OUT)).astype(np.float32)

    def gradient(self, draw: np.random.Generator) -> tuple[float, npt.NDArray[np.float32]]:
        """The loss of a batch that is drawn, and its gradient."""
        given = draw.normal(size=(BATCH, IN)).astype(np.float32)
        first, second = self._layers()
        hidden = np.tanh(given @ first)
        off = hidden @ second - np.sin(given @ self._teacher)
        back = (off @ second.T) * (1 - hidden**2)
        found = np.concatenate(((given.T @ back).ravel(), (hidden.T @ off).ravel()))
        return float((off**2).mean()), (found / BATCH).astype(np.float32)

    def _layers(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        first, second = np.split(self.parameters, [IN * HIDDEN])
        return first.reshape(IN, HIDDEN), second.reshape(HIDDEN, OUT)


def train(comm: Communicator, folder: Path, steps: int) -> None:
    """Trains; rank 0 writes a line a step into `folder`, and the traces."""
    comm.tap(Tap.parse(TAP))
    network = TrainedNetwork(SEED)
    with (folder / f"steps.{comm.rank}").open("w", encoding="utf-8") as file:
        for step in range(steps):
            began_s = time.perf_counter()
            loss, gradient = network.gradient(np.random.default_rng((SEED, step, comm.rank)))
            when = _traced(steps).get(step)
            if when is None:
                comm.all_reduce(gradient, "avg", out=gradient)
            else:
                with comm.trace(folder / f"{when}.trace"):
                    comm.all_reduce(gradient, "avg", out=gradient)
            network.parameters -= RATE * gradient
            row = TrainingStep(step, began_s, time.perf_counter(), loss, comm.epoch)
            file.write(msgspec.json.encode(row).decode() + "\n")
            file.flush()


def _traced(steps: int) -> dict[int, str]:
    return {FAILS_IN - 5: BEFORE, steps - 6: AFTER}


# --- beside it --------------------------------------------------------------------------------------------------------


class _Watch:
    """What is seen of a job whose pages are in `folder`, until it is over."""

    def __init__(self, folder: Path, fabric: Fabric, steps: int) -> None:
        self._folder, self._fabric, self._n_steps = folder, fabric, steps
        self._drain: JobDrain | None = None
        self._samples: list[StatusSample] = []
        self._records: list[ChunkRecord] = []
        self._failed_s = 0.0
        self._nics: tuple[str, ...] = ()
        self._status: JobSnapshot | None = None
        self._explained: FailureExplanation | None = None

    def look(self) -> None:
        """Once."""
        # Pages come and go.
        with suppress(InputError):
            dumps = read_job(self._folder)
            now_s = time.perf_counter()
            seen = snapshot(dumps)
            if len(seen.ranks) == seen.n_ranks:
                self._take(seen, now_s)
            # Where a rank waits just then, on a busy machine, that is explained first: it is asked again.
            if len(self._steps()) >= self._n_steps - 3 and (self._explained is None or self._explained.waits):
                self._explained = explain(dumps)
            if self._drain is None:
                self._drain = JobDrain(self._folder, seen.job, [CallbackSink(self._records.extend)])
        if self._drain is not None:
            self._drain.take()
        if not self._failed_s and len(self._steps()) >= FAILS_IN:
            time.sleep(_LOOK_S)
            self._failed_s = time.perf_counter()
            self._fabric.fail(NIC)

    def _take(self, seen: JobSnapshot, now_s: float) -> None:
        rails = [(f"h{rank.rank}.{rail.name}", rail) for rank in seen.ranks for rail in rank.rails]
        self._nics = tuple(name for name, _ in rails)
        states = tuple(rail.state for _, rail in rails)
        self._samples.append(StatusSample(now_s, states, tuple(rail.receiving for _, rail in rails)))
        if self._failed_s and self._status is None and now_s >= self._failed_s + _STATUS_S:
            self._status = seen

    def _steps(self) -> list[TrainingStep]:
        path = self._folder / "steps.0"
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        return [msgspec.json.decode(line, type=TrainingStep) for line in lines]

    def record(self, made: dict[str, Any]) -> SeenFailure:
        """What was seen. Raises RuntimeFault if it is not all there."""
        steps = self._steps()
        if len(steps) < self._n_steps or self._status is None or self._explained is None or self._drain is None:
            raise RuntimeFault(f"seen failure: {len(steps)} of {self._n_steps} steps: must be all")
        self._drain.take()
        since_s = self._failed_s

        def moved(struct: Any, *names: str) -> Any:
            return msgspec.structs.replace(struct, **{name: getattr(struct, name) - since_s for name in names})

        samples = [moved(each, "at_s") for each in self._samples]
        norms = [moved(each, "at_s") for each in _norms(self._records)]
        return SeenFailure(
            **made,
            hosts=HOSTS,
            failed=NIC,
            n_bytes=4 * (IN * HIDDEN + HIDDEN * OUT),
            nics=self._nics,
            steps=tuple(moved(each, "began_s", "ended_s") for each in steps),
            samples=tuple(each for each in samples if each.at_s >= _SINCE_S),
            norms=tuple(each for each in norms if each.at_s >= _SINCE_S),
            traces=tuple(self._trace(when, step) for step, when in _traced(self._n_steps).items()),
            status=self._status,
            explained=self._explained,
        )

    def _trace(self, when: str, step: int) -> TracedStep:
        measured = read_trace(self._folder / f"{when}.trace")
        fabric = Topology.parse(TOPOLOGIES[when])
        predicted = simulate(measured.plan, fabric, model="fair")
        transfers = measured.plan.transfers
        return TracedStep(
            *(when, step, measured.plan.name, predicted.seconds),
            *(tuple(transfers.src.tolist()), tuple(transfers.dst.tolist())),
            *(tuple(measured.posted_s.tolist()), tuple(measured.arrived_s.tolist())),
        )


def _norms(records: Sequence[ChunkRecord]) -> list[GradientNorm]:
    """Of each run at each rank and point, by time."""
    at_s: dict[tuple[tuple[int, int], int, str], float] = {}
    for each in records:
        key = (each.plan_number, each.run), each.rank, each.point
        at_s[key] = min(at_s.get(key, each.at_s), each.at_s)
    found = [
        GradientNorm(at_s[each.run, each.rank, each.point], each.rank, each.point, each.l2)
        for each in statistics(records)
    ]
    return sorted(found, key=lambda each: each.at_s)


def measure(steps: int = STEPS) -> SeenFailure:
    """Runs the job and looks at it. Raises EnvironmentMissing without the right to make hosts, RuntimeFault if the job
    fails."""
    made = head()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="optcc-seen-") as name,
        Fabric.up(FabricSpec.parse(HOSTS, name=f"seen-{os.getpid()}")) as fabric,
    ):
        words = ["-m", "optcc.experiments.seen_failure", "--rank", name, "--steps", str(steps)]
        command = ["env", "-u", "OPTCC_TOPOLOGY", "-u", "OPTCC_NIC_RATES", sys.executable, *words]
        environ = {"OPTCC_STATUS_DIR": name, "OPENBLAS_NUM_THREADS": "1"}
        said: list[Any] = []

        def job() -> None:
            said.append(fabric.run(command, capture=True, timeout_s=_JOB_S, env=environ))

        watch, thread = _Watch(Path(name), fabric, steps), threading.Thread(target=job)
        thread.start()
        try:
            while thread.is_alive():
                watch.look()
                thread.join(_LOOK_S)
        finally:
            thread.join()
        if not said or said[0].exit_code:
            raise RuntimeFault(f"{' '.join(command)}: {said[0].stderr.strip()[-500:] if said else 'it did not run'}")
        return watch.record(made)


@record_command(SeenFailure, RecordForm(quick={"steps": FAILS_IN + 10}, one_session=ONE_JOB, part="rank"))
@click.option(
    "--rank", type=click.Path(path_type=Path), help="Be a rank, under mpirun, whose files are in this folder."
)
@click.option("--steps", type=click.IntRange(min=FAILS_IN + 10), default=STEPS, show_default=True)
def command(rank: Path | None, steps: int) -> SeenFailure | None:
    """See a NIC die in a training run by all that looks inside a job."""
    if rank is None:
        return measure(steps)
    # Taps and traces are of runs: a step is one, not several slices.
    with init(deadline_s=_DEADLINE_S, slice_s=math.inf) as comm:
        train(comm, rank, steps)
    return None


if __name__ == "__main__":
    run_command(command)
