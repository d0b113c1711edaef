"""What it costs that a job can be seen, as a record: AllReduces with the status and the flight recorder on and off.

Four ranks over TCP, on this machine over unshaped loopback and, as root, over both NICs of four emulated hosts. In one
job the same plan runs in turns: `off`; `on`, which is the page of `optcc.init()`; `checked`, where one of 100
reductions is done again by NumPy as well; `norms`, `on` and taps that take norms and checksums of every chunk that a
rank receives; `tenth`, where they take the bytes of one of ten chunks; and `off again`, which says how far two equal
cases lie apart. A process beside the job drains what was taken into an Arrow stream in `/dev/shm`. The order changes
from round to round. What is compared are differences within a round, whose median is the cost. Rounds are many,
as the machine is noisier than what is measured. The record that comes with the package is made by

    python -m optcc.experiments.observation_cost

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
from optcc.runtime.engine import Engine, PersistentPlan
from optcc.runtime.exact_inputs import make_input
from optcc.runtime.nics import HostNic
from optcc.runtime.observe.checks import ReductionCheck
from optcc.runtime.observe.observer import Observer
from optcc.runtime.rendezvous import over_mpi
from optcc.runtime.taps.attached import TapSet
from optcc.runtime.taps.control import attach_taps
from optcc.runtime.taps.drain import DRAIN_NICENESS, POLL_S, JobDrain
from optcc.runtime.taps.policy import Tap
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
CASES = (OFF, ON, CHECKED, NORMS, TENTH, AGAIN)
TAPS = {NORMS: Tap(("norms", "checksum")), TENTH: Tap(("full",), chunks=10)}
"""What is taken beside, at the point `result`: every chunk that a rank receives."""
SHOWN = {
    CHECKED: "on, 1 of 100 reductions checked",
    NORMS: "on, norms and checksums of all chunks",
    TENTH: "on, 1 of 10 chunks in full",
}
SEGMENTS = {SHORT: 1, LONG: 8}
RING_BYTES = 128 << 20
RANKS = 4
LOOPBACK, FABRIC = "loopback", "4x2@200Mbit/s"
BEDS = (LOOPBACK, FABRIC)
ROUNDS = {(LOOPBACK, SHORT): 150, (LOOPBACK, LONG): 40, (FABRIC, SHORT): 100, (FABRIC, LONG): 16}
RUNS = {SHORT: 100, LONG: 1}
"""Runs that make one sample."""
CHECK_EVERY = 100
JOB_TIMEOUT_S = 560.0


class ObservationTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One case on one bed at one size: a run's seconds, the slowest rank, round by round."""

    bed: str
    size_bytes: int
    case: str
    seconds: list[float]


@dataclass(frozen=True, slots=True)
class ObservationCost(Measured):
    """The rows, the machine and the versions."""

    format: ClassVar[str] = "optcc-observation-cost/1"
    own_path: ClassVar[Path] = RECORDS / "observation-cost.json"
    docs_page: ClassVar[str] = "observing.md"

    machine: dict[str, Any]
    versions: dict[str, str]
    rows: tuple[ObservationTiming, ...]

    def check_fields(self, check: Check) -> None:
        rounds: dict[tuple[str, int], int] = {}
        for number, row in enumerate(self.rows):
            check(f"rows[{number}].case", row.case, row.case in CASES, f"be one of {', '.join(CASES)}")
            check_times(check, f"rows[{number}].seconds", row.seconds)
            n = rounds.setdefault((row.bed, row.size_bytes), len(row.seconds))
            check(f"rows[{number}].seconds", len(row.seconds), len(row.seconds) == n, "be one for each round")

    def cost_s(self, bed: str, size_bytes: int, case: str) -> float:
        """What a case takes more than `off`, seconds: the median of the differences within the rounds."""
        found = {row.case: row.seconds for row in self.rows if (row.bed, row.size_bytes) == (bed, size_bytes)}
        return statistics.median(a - b for a, b in zip(found[case], found[OFF], strict=True))

    def spread_s(self, bed: str, size_bytes: int, case: str) -> float:
        """Half of the distance between the quartiles of these differences, over the root of the rounds."""
        found = {row.case: row.seconds for row in self.rows if (row.bed, row.size_bytes) == (bed, size_bytes)}
        differences = [a - b for a, b in zip(found[case], found[OFF], strict=True)]
        low, _, high = statistics.quantiles(differences, n=4)
        return float((high - low) / 2 / len(differences) ** 0.5)

    def card(self) -> Card:
        rows = []
        # Records of an earlier version have no taps.
        cases = [case for case in CASES[1:] if any(row.case == case for row in self.rows)]
        for bed, size in dict.fromkeys((row.bed, row.size_bytes) for row in self.rows):
            off = next(row for row in self.rows if (row.bed, row.size_bytes, row.case) == (bed, size, OFF))
            off_s = statistics.median(off.seconds)
            cells = [
                f"{1e6 * self.cost_s(bed, size, case):+.1f} ± {1e6 * self.spread_s(bed, size, case):.1f} µs"
                if size == SHORT
                else f"{self.cost_s(bed, size, case) / off_s:+.2%} ± {self.spread_s(bed, size, case) / off_s:.2%}"
                for case in cases
            ]
            shown = f"{1e6 * off_s:.1f} µs" if size == SHORT else f"{1e3 * off_s:.1f} ms"
            rows.append((bed, "1 KiB" if size == SHORT else "64 MiB", str(len(off.seconds)), shown, *cells))
        title = f"AllReduce of float32, {RANKS} ranks over TCP"
        columns = ("bed", "size", "rounds", "off", *(SHOWN.get(case, case) for case in cases))
        return Card(title, columns, tuple(rows))


def run_job(bed: str, share: float) -> list[ObservationTiming]:
    """This rank's part of a job under mpirun; the rows, at rank 0. `share` of the rounds are run."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank = comm.Get_rank()
    n_rails = FabricSpec.parse(FABRIC).nics if bed == FABRIC else 2
    nics = [HostNic(f"eth{i}", nic_address(rank, i)) for i in range(n_rails)]
    if bed != FABRIC:
        nics = [HostNic(f"rail{i}", f"127.0.{i + 2}.{rank + 1}") for i in range(n_rails)]
    rows: list[ObservationTiming] = []
    with _folder_of_job(comm) as folder:
        transport = TcpTransport(over_mpi(comm), nics)
        engine = Engine(transport)
        observer = Observer(engine, "cost", folder)
        switch = _switch_of(engine, observer, folder)
        for size in (SHORT, LONG):
            plan = compile_schedule(
                SCHEDULES[SCHEDULE[size]].build(Topology.parse(f"{RANKS}@1GB/s"), SEGMENTS[size]), size_bytes=size
            )
            switch(ON)
            prepared = engine.prepare(plan, verify_plan(plan), deadline_s=120.0)
            send = make_input(rank, size // 4, "float32", "sum")
            n_rounds = max(2, round(share * ROUNDS[bed, size]))
            work = partial(_run, prepared, send, np.empty_like(send))
            found = _rounds(comm, switch, work, RUNS[size], n_rounds)
            rows += [ObservationTiming(bed, size, case, seconds) for case, seconds in found.items()]
            prepared.close()
        engine.barrier()
        engine.close()
    return rows if rank == 0 else []


def _run(prepared: PersistentPlan, send: npt.NDArray[Any], recv: npt.NDArray[Any]) -> None:
    prepared.start(send, recv).wait()


@contextmanager
def _folder_of_job(comm: MPI.Intracomm) -> Iterator[Path]:
    """A folder in shared memory for all ranks, which rank 0 makes, and the drain of the rings there."""
    said = np.zeros(256, dtype=np.uint8)
    with ExitStack() as stack:
        if comm.Get_rank() == 0:
            name = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")).encode()
            said[: len(name)] = np.frombuffer(name, dtype=np.uint8)
            stack.enter_context(_draining(Path(name.decode())))
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


def _switch_of(engine: Engine, observer: Observer, folder: Path) -> Callable[[str], None]:
    """Has the engine observed, or not, from the next run on; all ranks do so before the same one."""
    recorder, watcher, aside = engine.recorder, engine.watcher, engine.look_aside
    assert recorder is not None
    check = ReductionCheck(CHECK_EVERY, lambda text: observer.note("wrong result", text))

    taps: dict[str, TapSet] = {}
    for case, tap in TAPS.items():
        engine.taps = None
        taps[case] = attach_taps(engine, case, folder, [tap], RING_BYTES)

    def switch(case: str) -> None:
        is_on = case not in (OFF, AGAIN)
        engine.taps = taps.get(case)
        engine.recorder, engine.watcher = (recorder, watcher) if is_on else (None, None)
        engine.look_aside = aside if is_on else None
        recorder.check = check if case == CHECKED else None

    return switch


def _rounds(
    comm: MPI.Intracomm, switch: Callable[[str], None], work: Callable[[], object], n_runs: int, n_rounds: int
) -> dict[str, list[float]]:
    """Each case once a round, each round begun by another one; the first two rounds do not count."""
    found: dict[str, list[float]] = {case: [] for case in CASES}
    slowest, own = np.empty(1), np.empty(1)
    for round_ in range(-2, n_rounds):
        for turn in range(len(CASES)):
            case = CASES[(round_ + turn) % len(CASES)]
            switch(case)
            comm.Barrier()
            started = time.perf_counter()
            for _ in range(n_runs):
                work()
            own[0] = (time.perf_counter() - started) / n_runs
            from mpi4py import MPI

            comm.Allreduce(own, slowest, MPI.MAX)
            if round_ >= 0:
                found[case].append(float(slowest[0]))
    return found


def measure(share: float = 1.0) -> ObservationCost:
    """Runs a job on each bed; that on emulated hosts only where this process may make some.

    Raises EnvironmentMissing without mpirun, RuntimeFault if a job fails.
    """
    rows: list[ObservationTiming] = []
    refusal = can_make_namespaces()
    if refusal is not None:
        click.echo(f"nothing on the fabric: {refusal}", err=True)
    for bed in BEDS:
        if bed == FABRIC and refusal is not None:
            continue
        command = [sys.executable, "-m", "optcc.experiments.observation_cost", "--one", bed, "--share", str(share)]
        arguments = ("--mca", "mpi_yield_when_idle", "1")
        if bed != FABRIC:
            output = run_local_job(command, RANKS, mpi_args=arguments, timeout_s=JOB_TIMEOUT_S)
        else:
            with Fabric.up(FabricSpec.parse(FABRIC, name=f"cost-{os.getpid()}")) as fabric:
                done = fabric.run(command, mpi_args=arguments, capture=True, timeout_s=JOB_TIMEOUT_S)
            if done.exit_code:
                raise RuntimeFault(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
            output = done.stdout
        rows += msgspec.json.decode(output, type=list[ObservationTiming])
    return ObservationCost(this_machine(), these_versions(), tuple(rows))


@record_command(ObservationCost)
@click.option("--one", type=click.Choice(BEDS), help="Run one rank's part here; under mpirun.")
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
