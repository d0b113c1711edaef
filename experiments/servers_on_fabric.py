"""AllReduce on emulated hosts of several ranks that share their NICs: ours beside Open MPI's best, as a record.

Four hosts of two ranks and two NICs; what a rank exchanges inside its host is limited (`FABRICS`). Ours is `auto`
over TCP, told nothing of the hosts; Open MPI's ring, the fastest of its algorithms here, runs in jobs of
its own, inside a host over shared memory, which no limit holds (HAN, its collectives for hosts of several ranks, took
2.8 of T* in a trial). In each round every contender has a job with a few runs, of which the first does not count. T*
is that of the hosts, rail by rail, whichever rank uses a NIC. Made by

    optcc experiment servers-on-fabric
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import click
import msgspec

from optcc.experiments.bench_jobs import STATES, in_state, run_bench, times_of
from optcc.experiments.cells import RecordCells
from optcc.experiments.fabric import WIRE_OVERHEAD, Fabric, FabricSpec
from optcc.experiments.peers import MPI_RING
from optcc.experiments.record import RECORDS, Check, Record
from optcc.experiments.recorder import Measured, RecordForm, check_times, former_of, head, record_command
from optcc.experiments.untold import bound_of
from optcc.show import Card
from optcc.units import show_size

FABRIC = "4x2@200Mbit/s/2ranks+800Mbit/s"
SIZE_BYTES, ROUNDS, RUNS = 64 << 20, 2, 5
_TIMEOUT_S = 120.0
OURS = "optcc, auto"


@dataclass(frozen=True, slots=True)
class JobOfServers:
    """Arguments of `optcc bench`, and of mpirun."""

    bench: tuple[str, ...]
    mpi: tuple[str, ...] = ()


CONTENDERS: Mapping[str, JobOfServers] = {
    OURS: JobOfServers(("--transport", "tcp", "--schedule", "auto")),
    "Open MPI ring": JobOfServers(("--transport", "mpi", "--peer", "mpi"), MPI_RING),
}


class ServersRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A contender in a state of the hosts: every run's seconds, and how many elements were wrong."""

    state: str
    contender: str
    settings: str
    schedule: str
    segments: int
    size_bytes: int
    bound_s: float
    seconds: tuple[float, ...]
    wrong: int

    @property
    def ratio(self) -> float:
        """The median over T*."""
        return statistics.median(self.seconds) / self.bound_s


@dataclass(frozen=True, slots=True)
class ServersOnFabric(Measured):
    """The rows, the fabric, the machine and the versions."""

    format: ClassVar[str] = "optcc-servers-on-fabric/1"
    own_path: ClassVar[Path] = RECORDS / "servers-on-fabric.json"
    docs_page: ClassVar[str] = "fabric.md"

    machine: dict[str, Any]
    versions: dict[str, str]
    fabric: str
    rows: tuple[ServersRow, ...]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.rows):
            check(f"rows[{number}].state", row.state, row.state in STATES, f"be one of {', '.join(STATES)}")
            check(f"rows[{number}].bound_s", row.bound_s, row.bound_s > 0, "be above 0")
            check_times(check, f"rows[{number}].seconds", row.seconds)

    def card(self) -> Card:
        rows = tuple(
            (
                row.state,
                row.contender,
                f"{row.bound_s:.3f} s",
                f"{row.ratio:.3f}",
                f"{min(row.seconds) / row.bound_s:.3f} to {max(row.seconds) / row.bound_s:.3f}",
                f"{row.schedule}, {row.segments}" if row.segments else "-",
                str(row.wrong),
            )
            for row in self.rows
        )
        size = show_size(self.rows[0].size_bytes) if self.rows else ""
        heads = ("state", "contender", "T*", "median / T*", "all runs", "plan, segments", "wrong elements")
        return Card(f"AllReduce of {size}, {self.fabric}", heads, rows)


def run_job(fabric: Fabric, contender: str, size_bytes: int) -> Record:
    """The record of one job. Raises RuntimeFault if it fails."""
    job = CONTENDERS[contender]
    words = [*job.bench, "--mode", "in", "-b", str(size_bytes), "-n", str(RUNS), "-w", "1"]
    words += ["--wire-overhead", WIRE_OVERHEAD]
    return run_bench(fabric, contender, words, _TIMEOUT_S, mpi=job.mpi)


def measure_state(fabric: Fabric, state: str, size_bytes: int, rounds: int) -> list[ServersRow]:
    """A row for each contender; the hosts are healed at the end."""
    with in_state(fabric, STATES[state]):
        bound_s = bound_of(fabric.state(), size_bytes)
        records: dict[str, list[Record]] = {contender: [] for contender in CONTENDERS}
        for _ in range(rounds):
            for contender, made in records.items():
                made.append(run_job(fabric, contender, size_bytes))
    rows: list[ServersRow] = []
    for contender, made in records.items():
        plan = made[0].rows[0]
        seconds, wrong = times_of(made)
        job = CONTENDERS[contender]
        rows.append(
            ServersRow(
                *(state, contender, " ".join((*job.bench, *job.mpi))),
                schedule=plan.schedule,
                segments=plan.segments,
                size_bytes=size_bytes,
                bound_s=bound_s,
                seconds=seconds,
                wrong=wrong,
            )
        )
    return rows


@record_command(ServersOnFabric, RecordForm(quick={"states": tuple(STATES)[:1], "size_mib": 4, "rounds": 1}))
@click.option("--state", "states", type=click.Choice(list(STATES)), multiple=True, help="Only this; the others stay.")
@click.option("--size", "size_mib", type=click.IntRange(1), default=SIZE_BYTES >> 20, show_default=True, help="MiB.")
@click.option("--rounds", type=click.IntRange(1), default=ROUNDS, show_default=True, help="Jobs of each contender.")
def command(states: tuple[str, ...], size_mib: int, rounds: int, quick: bool, cells: RecordCells) -> ServersOnFabric:
    """Time AllReduce on hosts of several ranks, ours and Open MPI's."""
    with Fabric.up(FabricSpec.parse(FABRIC, name=f"servers-{os.getpid()}")) as fabric:
        units = {state: partial(measure_state, fabric, state, size_mib << 20, rounds) for state in states or STATES}
        rows = [row for state in cells.each(units, list[ServersRow]) for row in state]
    former = former_of(ServersOnFabric, cells) if states and not quick else None
    if former is not None:
        rows += [row for row in former.rows if row.state not in states]
    in_order = sorted(rows, key=lambda row: (list(STATES).index(row.state), list(CONTENDERS).index(row.contender)))
    return ServersOnFabric(**head(), fabric=FABRIC, rows=tuple(in_order))
