"""What authentication of frames costs, as a record: an AllReduce of a short and of a long message, off and on in turns.

Four ranks on this machine over unshaped loopback, over TCP with two rails: as it is, with checksums (`crc`), and with
an authentication tag on every frame (`authenticate`). The cases take turns within each job, round by round. The record
is a file of its own format, `optcc-authentication-cost/1`; the one that comes with the package is made by

    optcc experiment authentication-cost

in half a minute. CPU time is user and kernel time of all ranks, the reduction included.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import click
import msgspec

from optcc.experiments.fabric import run_local_job
from optcc.experiments.record import RECORDS, Check
from optcc.experiments.recorder import IN_TURNS, Measured, RecordForm, check_times, head, record_command, run_command
from optcc.experiments.transport_speed import (
    JOB_TIMEOUT_S,
    JOBS,
    RANKS,
    SIZES,
    TransportTiming,
    joined,
    time_in_turns,
    work_over,
)
from optcc.runtime.nics import HostNic
from optcc.runtime.rendezvous import over_mpi
from optcc.runtime.transports.tcp import TcpTransport
from optcc.show import Card

N_RAILS = 2
OFF, CRC, ON = "off", "crc", "authenticated"
CASES = {OFF: (False, False), CRC: (True, False), ON: (False, True)}
"""For each case, `crc` and `authenticate`."""
_MPI_ARGUMENTS = ("--mca", "pml", "ob1", "--mca", "btl", "self,sm", "--mca", "mpi_yield_when_idle", "1")


@dataclass(frozen=True, slots=True)
class AuthenticationCost(Measured):
    """The rows, the machine and the versions; `load` are the processes that could run, on average over a minute, and
    `cores` how many there are for them."""

    format: ClassVar[str] = "optcc-authentication-cost/1"
    own_path: ClassVar[Path] = RECORDS / "authentication-cost.json"
    rooms: ClassVar[tuple[str, ...]] = ("optcc", "runtime")
    docs_page: ClassVar[str] = "transports.md"

    machine: dict[str, Any]
    versions: dict[str, str]
    load: float
    cores: int
    rows: tuple[TransportTiming, ...]

    def check_fields(self, check: Check) -> None:
        check("load", self.load, self.load >= 0, "not be negative")
        check("cores", self.cores, self.cores > 0, "be above 0")
        for number, row in enumerate(self.rows):
            check_times(check, f"rows[{number}].samples", row.samples.seconds)
            good = len(row.samples.seconds) == len(row.samples.steal) == len(row.cpu_s)
            check(f"rows[{number}].cpu_s", row.cpu_s, good, "be as many as the samples")

    def card(self) -> Card:
        found = {(row.case, row.size_bytes): row for row in self.rows}
        short, long = SIZES
        rows: list[tuple[str, ...]] = []
        for case in CASES:
            small, large, base = found[case, short], found[case, long], found[OFF, long]
            ratio = large.samples.median_s / base.samples.median_s
            rows.append(
                (
                    case,
                    f"{1e6 * small.samples.median_s:.0f} µs",
                    f"{1e3 * large.samples.median_s:.0f} ms",
                    f"{ratio:.2f}",
                    f"{large.cpu_s_per_gb:.2f}",
                )
            )
        title = f"AllReduce of float32, {RANKS} ranks on {self.cores} cores, load {self.load:.1f} before"
        return Card(title, ("frames", "1 KiB", "64 MiB", "64 MiB / off", "CPU-s/GB at 64 MiB"), tuple(rows))


def run_job() -> list[TransportTiming]:
    """This rank's part of one job under mpirun; the rows, at rank 0."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank = comm.Get_rank()
    rows: list[TransportTiming] = []
    with ExitStack() as stack:
        nics = [HostNic(f"rail{i}", f"127.0.{i + 2}.{rank + 1}") for i in range(N_RAILS)]
        transports = {
            case: TcpTransport(over_mpi(comm), nics, crc=crc, authenticate=authenticate)
            for case, (crc, authenticate) in CASES.items()
        }
        for transport in transports.values():
            stack.callback(transport.close)
            stack.callback(transport.barrier)
        for size_bytes, (_, n_runs) in SIZES.items():
            checks = [(case, work_over(transport, size_bytes)) for case, transport in transports.items()]
            rows += time_in_turns(comm, {case: next(check) for case, check in checks}, size_bytes, n_runs)
            for _, check in checks:
                next(check, None)
    return rows if rank == 0 else []


def measure(n_jobs: int = JOBS) -> AuthenticationCost:
    """Runs the jobs. Raises EnvironmentMissing without mpirun, RuntimeFault if a job fails."""
    rows: dict[tuple[str, int], TransportTiming] = {}
    load = round(os.getloadavg()[0], 2)
    command = [sys.executable, "-m", "optcc.experiments.authentication_cost", "--one"]
    for _ in range(n_jobs):
        output = run_local_job(command, RANKS, mpi_args=_MPI_ARGUMENTS, timeout_s=JOB_TIMEOUT_S)
        for row in msgspec.json.decode(output, type=list[TransportTiming]):
            key = (row.case, row.size_bytes)
            rows[key] = joined(rows[key], row) if key in rows else row
    cores = len(os.sched_getaffinity(0))
    return AuthenticationCost(**head(), load=load, cores=cores, rows=tuple(rows.values()))


@record_command(AuthenticationCost, RecordForm(quick={"jobs": 1}, one_session=IN_TURNS, part="one"))
@click.option("--one", is_flag=True, help="Run one rank's part here; under mpirun.")
@click.option("--jobs", default=JOBS, show_default=True, help="How often the job runs.")
def command(one: bool, jobs: int) -> AuthenticationCost | None:
    """Measure what authentication costs and write the record."""
    if not one:
        return measure(jobs)
    rows = run_job()
    if rows:
        click.echo(msgspec.json.encode(rows).decode())
    return None


if __name__ == "__main__":
    run_command(command)
