"""What it costs that a job can be seen, as a record: AllReduces with the status and the flight recorder on and off.

Four ranks over TCP, on this machine over unshaped loopback and, as root, over both NICs of four emulated hosts; and two
ranks with short messages over loopback and two hosts, as four take turns on two cores. In one job the same plan runs in
turns, first with nothing beside the job: `off`; `on`, which is the page of `optcc.init()`; `checked`, where one of 100
reductions is done again by NumPy as well; and `off again`, which says how far two equal cases lie apart. Then with a
process beside it that drains what taps take into an Arrow stream in `/dev/shm`: `off`; `norms`, which is `on` and taps
that take norms and checksums of every chunk that a rank receives; `tenth`, where they take the bytes of one of ten
chunks; and `off again`. Before each case everybody waits until the rings are empty, lest one case pay for another; how
long that takes is recorded too. The order changes from round to round. What is compared are differences within a round,
whose median is the cost. Rounds are many, as the machine is noisier than what is measured. The record that comes with
the package is made by

    optcc experiment observation-cost

in about seven minutes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click
import msgspec
import numpy as np
import numpy.typing as npt

from optcc.compiler import compile_schedule
from optcc.errors import RuntimeFault
from optcc.experiments.fabric import Fabric, FabricSpec, can_make_namespaces, nic_address, run_local_job
from optcc.experiments.record import RECORDS, Check, these_versions, this_machine
from optcc.experiments.recorder import Measured, check_times, record_command, run_command
from optcc.runtime.engine import Engine
from optcc.runtime.exact_inputs import make_input
from optcc.runtime.nics import HostNic
from optcc.runtime.observe.checks import ReductionCheck
from optcc.runtime.observe.observer import Observer
from optcc.runtime.persistent_plan import PersistentPlan
from optcc.runtime.rendezvous import over_mpi
from optcc.runtime.taps.attached import TapSet
from optcc.runtime.taps.control import attach_taps
from optcc.runtime.taps.drain import DRAIN_NICENESS, POLL_S, JobDrain
from optcc.runtime.taps.policy import Tap
from optcc.runtime.taps.ring import HEAD, TAIL
from optcc.runtime.taps.sinks import ArrowSink
from optcc.runtime.transports.tcp import TcpTransport
from optcc.schedules.registry import SCHEDULES
from optcc.show import Card
from optcc.topology import Topology
from optcc.verify.plan import verify_plan

if TYPE_CHECKING:
    from mpi4py import MPI

SHORT, LONG = 1 << 10, 64 << 20
SCHEDULE = {SHORT: "recursive-doubling", LONG: "ring"}
OFF, ON, CHECKED, NORMS, TENTH, AGAIN = "off", "on", "checked", "norms", "tenth", "off again"
ALONE, DRAINED = "nothing", "a drain"
CASES = {ALONE: (OFF, ON, CHECKED, AGAIN), DRAINED: (OFF, NORMS, TENTH, AGAIN)}
"""What is measured with what beside the job."""
TAPS = {NORMS: Tap(("norms", "checksum")), TENTH: Tap(("full",), chunks=10)}
"""What is taken beside, at the point `result`: every chunk that a rank receives."""
SHOWN = {
    CHECKED: "on, 1 of 100 reductions checked",
    NORMS: "on, norms and checksums of all chunks",
    TENTH: "on, 1 of 10 chunks in full",
}
SEGMENTS = {SHORT: 1, LONG: 8}
RING_BYTES = 128 << 20
LOOPBACK, FABRIC, LOOPBACK_PAIR, FABRIC_PAIR = "loopback", "4x2@200Mbit/s", "loopback, 2 ranks", "2x2@200Mbit/s"
BEDS = {LOOPBACK: 4, FABRIC: 4, LOOPBACK_PAIR: 2, FABRIC_PAIR: 2}
"""How many ranks."""
ON_FABRIC = (FABRIC, FABRIC_PAIR)
ROUNDS = {
    (ALONE, LOOPBACK_PAIR, SHORT): 400,
    (ALONE, FABRIC_PAIR, SHORT): 400,
    (ALONE, LOOPBACK, SHORT): 400,
    (ALONE, LOOPBACK, LONG): 40,
    (ALONE, FABRIC, SHORT): 400,
    (ALONE, FABRIC, LONG): 10,
    (DRAINED, LOOPBACK, SHORT): 100,
    (DRAINED, LOOPBACK, LONG): 40,
    (DRAINED, FABRIC, SHORT): 60,
    (DRAINED, FABRIC, LONG): 10,
}
RUNS = {SHORT: 50, LONG: 1}
"""Runs that make one sample."""
CHECK_EVERY = 100
JOB_TIMEOUT_S = 560.0
DRAIN_TIMEOUT_S = 20.0


class ObservationTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One case on one bed at one size: a run's seconds, the slowest rank, round by round; `beside` the job there is
    something or nothing; `drain_seconds` is what the drain took after the last run, by run."""

    bed: str
    size_bytes: int
    beside: str
    case: str
    seconds: list[float]
    drain_seconds: list[float]


Spot = tuple[str, int, str]
"""Bed, bytes, and what is beside the job."""


@dataclass(frozen=True, slots=True)
class ObservationCost(Measured):
    """The rows, the machine and the versions."""

    format: ClassVar[str] = "optcc-observation-cost/2"
    own_path: ClassVar[Path] = RECORDS / "observation-cost.json"
    docs_page: ClassVar[str] = "observing.md"

    machine: dict[str, Any]
    versions: dict[str, str]
    rows: tuple[ObservationTiming, ...]

    def check_fields(self, check: Check) -> None:
        rounds: dict[Spot, int] = {}
        for number, row in enumerate(self.rows):
            check(f"rows[{number}].beside", row.beside, row.beside in CASES, f"be one of {', '.join(CASES)}")
            cases = CASES[row.beside]
            check(f"rows[{number}].case", row.case, row.case in cases, f"be one of {', '.join(cases)}")
            check_times(check, f"rows[{number}].seconds", row.seconds)
            n = rounds.setdefault((row.bed, row.size_bytes, row.beside), len(row.seconds))
            check(f"rows[{number}].seconds", len(row.seconds), len(row.seconds) == n, "be one for each round")
            waits = row.drain_seconds
            check(f"rows[{number}].drain_seconds", waits, len(waits) == n and min(waits) >= 0, "be one for each round")

    def row(self, spot: Spot, case: str) -> ObservationTiming:
        """What was measured of a case."""
        return next(row for row in self.rows if (row.bed, row.size_bytes, row.beside, row.case) == (*spot, case))

    def cost_s(self, spot: Spot, case: str) -> float:
        """What a case takes more than `off`, seconds: the median of the differences within the rounds."""
        return statistics.median(self._differences(spot, case))

    def spread_s(self, spot: Spot, case: str) -> float:
        """Half of the distance between the quartiles of these differences, over the root of the rounds."""
        differences = self._differences(spot, case)
        low, _, high = statistics.quantiles(differences, n=4)
        return float((high - low) / 2 / len(differences) ** 0.5)

    def _differences(self, spot: Spot, case: str) -> list[float]:
        return [a - b for a, b in zip(self.row(spot, case).seconds, self.row(spot, OFF).seconds, strict=True)]

    def card(self) -> Card:
        rows = []
        cases = (ON, CHECKED, NORMS, TENTH, AGAIN)
        for spot in dict.fromkeys((row.bed, row.size_bytes, row.beside) for row in self.rows):
            bed, size, beside = spot
            off_s = statistics.median(self.row(spot, OFF).seconds)
            cells = [self._cell(spot, case, off_s) if case in CASES[beside] else "" for case in cases]
            shown = f"{1e6 * off_s:.1f} µs" if size == SHORT else f"{1e3 * off_s:.1f} ms"
            n_rounds = str(len(self.row(spot, OFF).seconds))
            rows.append((bed, "1 KiB" if size == SHORT else "64 MiB", beside, n_rounds, shown, *cells))
        title = "AllReduce of float32 over TCP"
        columns = ("bed", "size", "beside", "rounds", "off", *(SHOWN.get(case, case) for case in cases))
        return Card(title, columns, tuple(rows))

    def _cell(self, spot: Spot, case: str, off_s: float) -> str:
        """The cost, and what the drain had left to do, if anything."""
        cost_s, spread_s = self.cost_s(spot, case), self.spread_s(spot, case)
        left_s = statistics.median(self.row(spot, case).drain_seconds) if case in TAPS else 0.0
        if spot[1] == SHORT:
            left = f", drain {1e6 * left_s:.1f} µs" if left_s else ""
            return f"{1e6 * cost_s:+z.1f} ± {1e6 * spread_s:.1f} µs{left}"
        left = f", drain {left_s / off_s:.2%}" if left_s else ""
        return f"{cost_s / off_s:+z.2%} ± {spread_s / off_s:.2%}{left}"


def run_job(bed: str, share: float) -> list[ObservationTiming]:
    """This rank's part of a job under mpirun; the rows, at rank 0. `share` of the rounds are run."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank = comm.Get_rank()
    n_rails = FabricSpec.parse(bed).nics if bed in ON_FABRIC else 2
    nics = [HostNic(f"eth{i}", nic_address(rank, i)) for i in range(n_rails)]
    if bed not in ON_FABRIC:
        nics = [HostNic(f"rail{i}", f"127.0.{i + 2}.{rank + 1}") for i in range(n_rails)]
    rows: list[ObservationTiming] = []
    with _folder_of_job(comm) as folder:
        transport = TcpTransport(over_mpi(comm), nics)
        engine = Engine(transport)
        switch = _Switch(engine, Observer(engine, "cost", folder))
        for beside in [each for each in CASES if (each, bed, SHORT) in ROUNDS]:
            with ExitStack() as stack:
                if beside == DRAINED:
                    switch.attach(folder)
                    if rank == 0:
                        stack.enter_context(_draining(folder))
                for size in (SHORT, LONG):
                    if (beside, bed, size) not in ROUNDS:
                        continue
                    plan = compile_schedule(
                        SCHEDULES[SCHEDULE[size]].build(Topology.parse(f"{comm.Get_size()}@1GB/s"), SEGMENTS[size]),
                        size_bytes=size,
                    )
                    switch.to(ON)
                    prepared = engine.prepare(plan, verify_plan(plan), deadline_s=120.0)
                    send = make_input(rank, size // 4, "float32", "sum")
                    n_rounds = max(2, round(share * ROUNDS[beside, bed, size]))
                    work = partial(_run, prepared, send, np.empty_like(send))
                    rows += _rounds(comm, switch, work, (bed, size, beside), n_rounds)
                    prepared.close()
        engine.barrier()
        engine.close()
    return rows if rank == 0 else []


def _run(prepared: PersistentPlan, send: npt.NDArray[Any], recv: npt.NDArray[Any]) -> None:
    prepared.start(send, recv).wait()


@contextmanager
def _folder_of_job(comm: MPI.Intracomm) -> Iterator[Path]:
    """A folder in shared memory for all ranks, which rank 0 makes."""
    said = np.zeros(256, dtype=np.uint8)
    with ExitStack() as stack:
        if comm.Get_rank() == 0:
            name = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")).encode()
            said[: len(name)] = np.frombuffer(name, dtype=np.uint8)
        comm.Bcast(said)
        yield Path(said.tobytes().rstrip(b"\0").decode())
        comm.Barrier()


@contextmanager
def _draining(folder: Path) -> Iterator[None]:
    """Another process drains the rings in a folder into Arrow streams, until the block is over."""
    code = "from optcc.experiments.observation_cost import drain_until_over as d; import sys; d(sys.argv[1])"
    with subprocess.Popen([sys.executable, "-c", code, str(folder)]) as process:
        yield
        (folder / "over").touch()
        if process.wait(60):
            raise RuntimeFault(f"the drain has ended with {process.returncode}")


def drain_until_over(folder: str) -> None:
    """Drains both jobs' rings until there is a file `over`."""
    os.nice(DRAIN_NICENESS)
    drains = [JobDrain(Path(folder), case, [ArrowSink(Path(folder) / f"{case}.arrows")]) for case in TAPS]
    while not (Path(folder) / "over").exists():
        if not sum(drain.take() for drain in drains):
            time.sleep(POLL_S)
        for case in TAPS:
            # What was written is thrown away, lest the memory fill: the stream goes on behind.
            os.truncate(Path(folder) / f"{case}.arrows", 0)
    for drain in drains:
        drain.close()


class _Switch:
    """Has the engine observed, or not, from the next run on; all ranks do so before the same one."""

    def __init__(self, engine: Engine, observer: Observer) -> None:
        self._engine, self._taps = engine, dict[str, TapSet]()
        self._recorder, self._watcher, self._aside = engine.recorder, engine.watcher, engine.look_aside
        self._check = ReductionCheck(CHECK_EVERY, lambda text: observer.note("wrong result", text))

    def attach(self, folder: Path) -> None:
        """Makes the rings of the taps."""
        for case, tap in TAPS.items():
            self._engine.taps = None
            self._taps[case] = attach_taps(self._engine, case, folder, [tap], RING_BYTES)

    def to(self, case: str) -> None:
        """The next runs are of this case."""
        engine, is_on = self._engine, case not in (OFF, AGAIN)
        engine.taps = self._taps.get(case)
        engine.recorder, engine.watcher = (self._recorder, self._watcher) if is_on else (None, None)
        engine.look_aside = self._aside if is_on else None
        assert self._recorder is not None
        self._recorder.check = self._check if case == CHECKED else None

    def drained(self) -> None:
        """Waits until nothing is left in this rank's rings; raises RuntimeFault after `DRAIN_TIMEOUT_S`."""
        until_s = time.monotonic() + DRAIN_TIMEOUT_S
        for taps in self._taps.values():
            while taps.ring.words[TAIL] != taps.ring.words[HEAD]:
                if time.monotonic() > until_s:
                    raise RuntimeFault(f"the drain has left something for {DRAIN_TIMEOUT_S:g} s")
                time.sleep(POLL_S / 10)


def _rounds(
    comm: MPI.Intracomm, switch: _Switch, work: Callable[[], object], spot: Spot, n_rounds: int
) -> list[ObservationTiming]:
    """Each case once a round, each round begun by another one; the first two rounds do not count."""
    from mpi4py import MPI

    n_runs, cases = RUNS[spot[1]], CASES[spot[2]]
    found = {case: ObservationTiming(*spot, case, [], []) for case in cases}
    slowest, own = np.empty(2), np.empty(2)
    for round_ in range(-2, n_rounds):
        for turn in range(len(cases)):
            case = cases[(round_ + turn) % len(cases)]
            switch.to(case)
            comm.Barrier()
            started_s = time.perf_counter()
            for _ in range(n_runs):
                work()
            done_s = time.perf_counter()
            if case in TAPS:
                switch.drained()
            own[:] = (done_s - started_s) / n_runs, (time.perf_counter() - done_s) / n_runs if case in TAPS else 0.0
            comm.Allreduce(own, slowest, MPI.MAX)
            if round_ >= 0:
                found[case].seconds.append(float(slowest[0]))
                found[case].drain_seconds.append(float(slowest[1]))
    return list(found.values())


def measure(share: float = 1.0) -> ObservationCost:
    """Runs a job on each bed; that on emulated hosts only where this process may make some.

    Raises EnvironmentMissing without mpirun, RuntimeFault if a job fails.
    """
    rows: list[ObservationTiming] = []
    refusal = can_make_namespaces()
    if refusal is not None:
        click.echo(f"nothing on the fabric: {refusal}", err=True)
    for bed in BEDS:
        if bed in ON_FABRIC and refusal is not None:
            continue
        command = [sys.executable, "-m", "optcc.experiments.observation_cost", "--one", bed, "--share", str(share)]
        arguments = ("--mca", "mpi_yield_when_idle", "1")
        if bed not in ON_FABRIC:
            output = run_local_job(command, BEDS[bed], mpi_args=arguments, timeout_s=JOB_TIMEOUT_S)
        else:
            with Fabric.up(FabricSpec.parse(bed, name=f"cost-{os.getpid()}")) as fabric:
                done = fabric.run(command, mpi_args=arguments, capture=True, timeout_s=JOB_TIMEOUT_S)
            if done.exit_code:
                raise RuntimeFault(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
            output = done.stdout
        rows += msgspec.json.decode(output, type=list[ObservationTiming])
    return ObservationCost(this_machine(), these_versions(), tuple(rows))


@record_command(ObservationCost)
@click.option("--one", type=click.Choice(list(BEDS)), help="Run one rank's part here; under mpirun.")
@click.option("--share", default=1.0, show_default=True, help="Of the rounds.")
def command(one: str | None, share: float) -> ObservationCost | None:
    """Measure what it costs to observe a job and write the record."""
    if one is None:
        return measure(share)
    rows = run_job(one, share)
    if rows:
        click.echo(msgspec.json.encode(rows).decode())
    return None


if __name__ == "__main__":
    run_command(command)
