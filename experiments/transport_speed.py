"""What the transports cost, as a record: an AllReduce of a short and of a long message, by ours and by Open MPI.

Four ranks on this machine, over unshaped loopback: our run-time over TCP with one and two rails and with checksums,
over Open MPI's messages, and Open MPI's own AllReduce, over TCP and over shared memory; and, as a floor, a plain loop
over epoll that moves the bytes of a ring from memory to memory and does nothing with them. All but shared memory run in
one job, round by round; jobs with and without shared memory take turns. The record is a file of its own format,
`optcc-transport-speed/1`; the one that comes with the package is made by

    python -m optcc.experiments.transport_speed

in about a minute. CPU time is that of all ranks, with what the kernel does for them, and the reduction.
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
import numpy as np
import numpy.typing as npt

from optcc.cli import echo_card
from optcc.collective import Collective
from optcc.compiler import compile_schedule
from optcc.errors import CodecError, RuntimeFault
from optcc.experiments.fabric import find_mpirun
from optcc.experiments.record import (
    RECORD_BYTES_MAX,
    Samples,
    stolen_jiffies,
    stolen_share,
    these_versions,
    this_machine,
)
from optcc.files import read_file, replace_file
from optcc.runtime.check import expected_output, make_input
from optcc.runtime.engine import Executor
from optcc.runtime.launch import Nic, over_mpi
from optcc.runtime.transport import Transport
from optcc.runtime.transports.mpi import MpiTransport
from optcc.runtime.transports.tcp import TcpTransport
from optcc.runtime.transports.tcp_wire import crc32c_in_hardware
from optcc.schedules.registry import SCHEDULES
from optcc.show import Card, Shown
from optcc.topology import Topology
from optcc.verify.plan import verify_plan

if TYPE_CHECKING:
    from mpi4py import MPI

FORMAT = "optcc-transport-speed/1"
PATH = Path(__file__).parent / "records" / "transport-speed.json"
RANKS = 4
SIZES = {1 << 10: ("recursive-doubling", 10), 64 << 20: ("ring", 1)}
"""For each size, bytes, our schedule and how many runs make one sample."""
JOBS, ROUNDS = 3, 3
JOB_TIMEOUT_S = 300.0
OURS = ("TCP, 1 rail", "TCP, 2 rails", "TCP, 2 rails, crc")
OVER_MPI = "our run-time over Open MPI (TCP)"
PEER = {"tcp": "Open MPI's own (TCP)", "sm": "Open MPI's own (shared memory)"}
RAW = "plain sockets, bytes only"
CASES = (*OURS, OVER_MPI, *PEER.values(), RAW)
_RAW_BYTES = 1 << 20
_ROUTES = {"tcp": ("self,tcp", "--mca", "btl_tcp_if_include", "lo"), "sm": ("self,sm",)}


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One case at one size: a run's seconds (the slowest rank), and CPU seconds of all ranks, sample by sample."""

    case: str
    size_bytes: int
    samples: Samples
    cpu_s: list[float]

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds, median, for each GB that leaves a rank of a ring."""
        return statistics.median(self.cpu_s) / (2 * (RANKS - 1) * self.size_bytes / 1e9)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    machine: dict[str, Any]
    versions: dict[str, str]
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class TransportSpeed(Shown):
    """The rows, the machine and the versions."""

    machine: dict[str, Any]
    versions: dict[str, str]
    rows: tuple[Row, ...]

    def to_bytes(self) -> bytes:
        """The record as a file."""
        file = _File(FORMAT, self.machine, self.versions, list(self.rows))
        return (json.dumps(msgspec.to_builtins(file), indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "") -> TransportSpeed:
        """A record from a file called `name`; raises CodecError, which names the field, if it is none."""
        try:
            file = msgspec.json.decode(data, type=_File)
        except msgspec.DecodeError as error:
            raise CodecError(f"record {name!r}: $: {error}") from None
        if file.format != FORMAT:
            raise CodecError(f"record {name!r}: $.format: {file.format!r}: must be {FORMAT!r}")
        for number, row in enumerate(file.rows):
            seconds = row.samples.seconds
            if not seconds or min(seconds) <= 0 or not len(seconds) == len(row.samples.steal) == len(row.cpu_s):
                rule = "must be one or more, above zero, each with its steal and CPU time"
                raise CodecError(f"record {name!r}: $.rows[{number}].samples: {seconds}: {rule}")
        return cls(file.machine, file.versions, tuple(file.rows))

    @classmethod
    def read(cls, path: Path = PATH) -> TransportSpeed:
        """The record in the file `path`."""
        return cls.from_bytes(read_file(path, RECORD_BYTES_MAX), str(path))

    def card(self) -> Card:
        found = {(row.case, row.size_bytes): row for row in self.rows}
        short, long = SIZES
        rows: list[tuple[str, ...]] = []
        for case in CASES:
            small, large = found.get((case, short)), found.get((case, long))
            rows.append(
                (
                    case,
                    "-" if small is None else f"{1e6 * small.samples.median_s:.0f} µs",
                    "-" if large is None else f"{1e3 * large.samples.median_s:.0f} ms",
                    "-" if large is None else f"{large.cpu_s_per_gb:.2f}",
                )
            )
        title = f"AllReduce of float32, {RANKS} ranks on one machine"
        return Card(title, ("", "1 KiB", "64 MiB", "CPU-s/GB at 64 MiB"), tuple(rows))


# --- one job ----------------------------------------------------------------------------------------------------------

Work = Callable[[], None]


def _work(transport: Transport, size_bytes: int) -> Iterator[Work]:
    """A run of our schedule for this size over a transport; checks the result of the first."""
    name, _ = SIZES[size_bytes]
    topology = Topology.parse(f"{RANKS}@1GB/s")
    plan = compile_schedule(SCHEDULES[name].build(topology, 1), size_bytes=size_bytes)
    executor = Executor(plan, transport.rank, transport, verify_plan(plan))
    send = make_input(transport.rank, size_bytes // 4, "float32", "sum")
    recv = np.empty_like(send)
    yield lambda: executor.all_reduce(send, recv)
    wanted = expected_output(Collective("allreduce", RANKS), size_bytes // 4, "float32", "sum", transport.rank)[0]
    if not np.array_equal(recv, wanted):
        raise RuntimeFault(f"{name} of {size_bytes} B: wrong elements")


def _peer_work(comm: MPI.Intracomm, size_bytes: int) -> Work:
    send = make_input(comm.Get_rank(), size_bytes // 4, "float32", "sum")
    recv = np.empty_like(send)
    return lambda: comm.Allreduce(send, recv)


@contextmanager
def _raw_ring(comm: MPI.Intracomm, n_bytes: int) -> Iterator[Work]:
    """Moves so many bytes from each rank to the next, and does nothing else."""
    rank = comm.Get_rank()
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((f"127.0.1.{rank + 1}", 0)))
        after = (rank + 1) % RANKS
        port = int(_everyones(comm, [listener.getsockname()[1]])[after, 0])
        out = stack.enter_context(socket.create_connection((f"127.0.1.{after + 1}", port)))
        in_ = stack.enter_context(listener.accept()[0])
        for each in (out, in_):
            each.setblocking(False)
        poll = stack.enter_context(select.epoll())
        data, target = np.ones(n_bytes, np.uint8).data, np.ones(n_bytes, np.uint8).data

        def move() -> None:
            sent = received = 0
            poll.register(out, select.EPOLLOUT)
            poll.register(in_, select.EPOLLIN)
            while sent < n_bytes or received < n_bytes:
                for file, _ in poll.poll():
                    if file == in_.fileno():
                        received += in_.recv_into(target[received : received + _RAW_BYTES])
                    else:
                        sent += out.send(data[sent : sent + _RAW_BYTES])
                        if sent == n_bytes:
                            poll.modify(out, 0)
            poll.unregister(out)
            poll.unregister(in_)

        yield move


def _everyones(comm: MPI.Intracomm, own: list[float]) -> npt.NDArray[np.float64]:
    """The values of every rank, a row each."""
    values = np.empty((RANKS, len(own)))
    comm.Allgather(np.array(own, np.float64), values)
    return values


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run_job(route: str) -> list[Row]:
    """This rank's part of one job under mpirun, whose messages go by `route`; the rows, at rank 0."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank = comm.Get_rank()
    rows: list[Row] = []
    with ExitStack() as stack:
        transports: dict[str, Transport] = {}
        if route == "tcp":
            for case, n_rails, crc in zip(OURS, (1, 2, 2), (False, False, True), strict=True):
                nics = [Nic(f"rail{i}", f"127.0.{i + 2}.{rank + 1}") for i in range(n_rails)]
                transports[case] = TcpTransport(over_mpi(comm), nics, crc=crc)
            transports[OVER_MPI] = MpiTransport(comm)
            for transport in transports.values():
                stack.callback(transport.close)
                stack.callback(transport.barrier)
        for size_bytes, (_, n_runs) in SIZES.items():
            checks = [(case, _work(transport, size_bytes)) for case, transport in transports.items()]
            works = {case: next(check) for case, check in checks}
            works[PEER[route]] = _peer_work(comm, size_bytes)
            with _raw_ring(comm, 2 * (RANKS - 1) * size_bytes // RANKS) as move:
                if route == "tcp" and n_runs == 1:
                    works[RAW] = move
                rows += _rounds(comm, works, size_bytes, n_runs)
            for _, check in checks:
                next(check, None)
    return rows if rank == 0 else []


def _rounds(comm: MPI.Intracomm, works: dict[str, Work], size_bytes: int, n_runs: int) -> list[Row]:
    """Each case once a round; the first round does not count."""
    found: dict[str, list[tuple[float, float, float]]] = {case: [] for case in works}
    for round_ in range(1 + ROUNDS):
        for case, work in works.items():
            comm.Barrier()
            before, stolen, started = _cpu_s(), stolen_jiffies(), time.perf_counter()
            for _ in range(n_runs):
                work()
            own = [time.perf_counter() - started, _cpu_s() - before]
            steal = stolen_share(stolen, stolen_jiffies())
            everyone = _everyones(comm, own)
            if round_:
                seconds, cpu_s = everyone[:, 0].max() / n_runs, everyone[:, 1].sum() / n_runs
                found[case].append((float(seconds), steal, float(cpu_s)))
    return [
        Row(case, size_bytes, Samples([a for a, _, _ in its], [b for _, b, _ in its], 0), [c for _, _, c in its])
        for case, its in found.items()
    ]


# --- all of them ------------------------------------------------------------------------------------------------------


def measure(n_jobs: int = JOBS) -> TransportSpeed:
    """Runs the jobs in turns. Raises EnvironmentMissing without mpirun, RuntimeFault if a job fails."""
    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    rows: dict[tuple[str, int], Row] = {}
    for _ in range(n_jobs):
        for route, words in _ROUTES.items():
            command = [find_mpirun(), "-n", str(RANKS), "--mca", "pml", "ob1", "--mca", "btl", *words]
            command += ["--mca", "mpi_yield_when_idle", "1", sys.executable, "-m", "optcc.experiments.transport_speed"]
            done = subprocess.run(
                [*command, "--one", route], env=environment, capture_output=True, timeout=JOB_TIMEOUT_S, check=False
            )
            if done.returncode:
                raise RuntimeFault(f"{' '.join(command)}: {done.stderr.decode(errors='replace').strip()[-500:]}")
            click.echo(f"a job of {route} is done", err=True)
            for row in msgspec.json.decode(done.stdout, type=list[Row]):
                key = (row.case, row.size_bytes)
                rows[key] = _joined(rows[key], row) if key in rows else row
    versions = {"crc32c": metadata.version("crc32c")} if crc32c_in_hardware() is not None else {}
    return TransportSpeed(dict(this_machine()), these_versions() | versions, tuple(rows.values()))


def _joined(first: Row, second: Row) -> Row:
    samples = Samples(
        first.samples.seconds + second.samples.seconds,
        first.samples.steal + second.samples.steal,
        first.samples.wrong + second.samples.wrong,
    )
    return Row(first.case, first.size_bytes, samples, first.cpu_s + second.cpu_s)


@click.command()
@click.option("--one", type=click.Choice(list(_ROUTES)), help="Run one rank's part here; under mpirun.")
@click.option("--jobs", default=JOBS, show_default=True, help="How often each kind of job runs.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), default=PATH, show_default=True)
def command(one: str | None, jobs: int, output: Path) -> None:
    """Measure what the transports cost and write the record."""
    if one is not None:
        rows = run_job(one)
        if rows:
            click.echo(msgspec.json.encode(rows).decode())
        return
    record = measure(jobs)
    replace_file(output, record.to_bytes())
    echo_card(record)


if __name__ == "__main__":
    command()
