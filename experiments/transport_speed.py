"""What the transports cost, as a record: an AllReduce of a short and of a long message, by ours and by Open MPI.

Four ranks on this machine, over unshaped loopback: our run-time over TCP with one and two rails and with checksums,
over Open MPI's messages, and Open MPI's own AllReduce, over TCP and over shared memory. Lower bounds are plain sockets
in one epoll loop, without a transport: an AllReduce by the same algorithm, and one that only moves the bytes of a ring
from memory to memory. All but shared memory run in one job, round by round; jobs with and without shared memory take
turns. Then ours and plain sockets again, round by round, over both NICs of four emulated hosts. The record is a file of
its own format, `optcc-transport-speed/1`; the one that comes with the package is made by

    optcc experiment transport-speed

in about three minutes; as root, for the hosts. CPU time is user and kernel time of all ranks,
including the reduction.
"""

from __future__ import annotations

import os
import select
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click
import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import structs

from optcc.collective import Collective
from optcc.compiler import compile_schedule
from optcc.errors import RuntimeFault
from optcc.experiments.fabric import Fabric, FabricSpec, can_make_namespaces, nic_address, run_local_job
from optcc.experiments.record import (
    RECORDS,
    Check,
    Samples,
    stolen_jiffies,
    stolen_share,
    these_versions,
    this_machine,
)
from optcc.experiments.recorder import IN_TURNS, Measured, RecordForm, record_command, run_command
from optcc.runtime.exact_inputs import expected_output, make_input
from optcc.runtime.executor import Executor
from optcc.runtime.nics import HostNic
from optcc.runtime.rendezvous import over_mpi
from optcc.runtime.transport import Transport
from optcc.runtime.transports.mpi import MpiTransport
from optcc.runtime.transports.tcp import TcpTransport
from optcc.schedules.registry import SCHEDULES
from optcc.show import Card
from optcc.topology import Topology
from optcc.verify.plan import verify_plan

if TYPE_CHECKING:
    from mpi4py import MPI

RANKS = 4
SIZES = {1 << 10: ("recursive-doubling", 100), 64 << 20: ("ring", 1)}
"""For each size, bytes, our schedule and how many runs make one sample."""
JOBS, ROUNDS = 3, 3
JOB_TIMEOUT_S = 300.0
OURS = ("TCP, 1 rail", "TCP, 2 rails", "TCP, 2 rails, crc")
OVER_MPI = "our run-time over Open MPI (TCP)"
PEER = {"tcp": "Open MPI's own (TCP)", "sm": "Open MPI's own (shared memory)"}
PLAIN = "plain sockets, AllReduce"
RAW = "plain sockets, bytes only"
FABRIC = "4x2@200Mbit/s"
ON_FABRIC = {case: f"on the fabric: {case}" for case in ("TCP, 2 rails", PLAIN, RAW)}
CASES = (*OURS, OVER_MPI, *PEER.values(), PLAIN, RAW, *ON_FABRIC.values())
_READ_BYTES = 1 << 20
_ROUTES = {"tcp": ("self,tcp", "--mca", "btl_tcp_if_include", "lo"), "sm": ("self,sm",)}
_FABRIC_ROUTE = "fabric"
_YIELDS = ("--mca", "mpi_yield_when_idle", "1")


class TransportTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One case at one size: a run's seconds (the slowest rank), and CPU seconds of all ranks, sample by sample."""

    case: str
    size_bytes: int
    samples: Samples
    cpu_s: list[float]

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds, median, for each GB that leaves a rank of a ring."""
        return statistics.median(self.cpu_s) / (2 * (RANKS - 1) * self.size_bytes / 1e9)


@dataclass(frozen=True, slots=True)
class TransportSpeed(Measured):
    """The rows, the machine and the versions."""

    format: ClassVar[str] = "optcc-transport-speed/1"
    own_path: ClassVar[Path] = RECORDS / "transport-speed.json"
    rooms: ClassVar[tuple[str, ...]] = ("optcc", "runtime")
    docs_page: ClassVar[str] = "transports.md"

    machine: dict[str, Any]
    versions: dict[str, str]
    rows: tuple[TransportTiming, ...]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.rows):
            seconds = row.samples.seconds
            good = bool(seconds) and min(seconds) > 0 and len(seconds) == len(row.samples.steal) == len(row.cpu_s)
            rule = "be one or more, above zero, each with its steal and CPU time"
            check(f"rows[{number}].samples", seconds, good, rule)

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


def work_over(transport: Transport, size_bytes: int) -> Iterator[Work]:
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


class PlainSockets:
    """Sockets between the ranks and one epoll loop: the least that a transport in Python can cost.

    `address(rank, rail)` is where a rank listens, and from where it connects, for each of `n_rails`.
    """

    def __init__(self, comm: MPI.Intracomm, n_rails: int, address: Callable[[int, int], str], stack: ExitStack) -> None:
        rank = self._rank = comm.Get_rank()
        rails = range(n_rails)
        listeners = [stack.enter_context(socket.create_server((address(rank, rail), 0))) for rail in rails]
        ports = _everyones(comm, [each.getsockname()[1] for each in listeners])
        self._outs: dict[int, list[socket.socket]] = {}
        for peer in _peers(rank):
            for rail in rails:
                place = address(peer, rail), int(ports[peer, rail])
                out = stack.enter_context(socket.create_connection(place, source_address=(address(rank, rail), 0)))
                out.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                out.sendall(bytes([rank]))
                out.setblocking(False)
                self._outs.setdefault(peer, []).append(out)
        self._ins: dict[int, list[socket.socket]] = {}
        for listener in listeners:
            for _ in [other for other in range(RANKS) if rank in _peers(other)]:
                in_ = stack.enter_context(listener.accept()[0])
                self._ins.setdefault(in_.recv(1)[0], []).append(in_)
                in_.setblocking(False)
        self._polls = {peer: stack.enter_context(select.epoll()) for peer in self._ins}
        for peer, poll in self._polls.items():
            for in_ in self._ins[peer]:
                poll.register(in_, 0)

    def exchange(self, to: int, data: npt.NDArray[Any], source: int, target: npt.NDArray[Any]) -> None:
        """Sends `data` to one rank and receives `target` from one, each in equal parts over the rails."""
        poll = self._polls[source]
        outs: dict[int, tuple[socket.socket, memoryview]] = {}
        ins: dict[int, tuple[socket.socket, memoryview]] = {}
        for sock, part in zip(self._outs[to], _parts(data, len(self._outs[to])), strict=True):
            n_bytes = _sent(sock, part)
            if n_bytes < len(part):
                outs[sock.fileno()] = sock, part[n_bytes:]
                poll.register(sock, select.EPOLLOUT)
        for sock, part in zip(self._ins[source], _parts(target, len(self._ins[source])), strict=True):
            ins[sock.fileno()] = sock, part
            poll.modify(sock, select.EPOLLIN)
        while outs or ins:
            for file, _ in poll.poll():
                waiting = ins if file in ins else outs
                sock, part = waiting[file]
                part = part[sock.recv_into(part[:_READ_BYTES]) if waiting is ins else _sent(sock, part) :]
                waiting[file] = sock, part
                if not part:
                    del waiting[file]
                    if waiting is ins:
                        poll.modify(sock, 0)
                    else:
                        poll.unregister(sock)

    def all_reduce(self, send: npt.NDArray[Any], recv: npt.NDArray[Any], slot: npt.NDArray[Any]) -> None:
        """recv = the sum over the ranks; short messages by recursive doubling, long ones by a ring, as ours."""
        rank = self._rank
        np.copyto(recv, send)
        if recv.nbytes == min(SIZES):
            for peer in (rank ^ 1, rank ^ 2):
                self.exchange(peer, recv, peer, slot)
                np.add(recv, slot, out=recv)
            return
        pieces = np.split(recv, RANKS)
        after, before = (rank + 1) % RANKS, (rank - 1) % RANKS
        for step in range(2 * (RANKS - 1)):
            out, in_ = pieces[(rank - step) % RANKS], pieces[(rank - step - 1) % RANKS]
            if step < RANKS - 1:
                self.exchange(after, out, before, slot[: in_.size])
                np.add(in_, slot[: in_.size], out=in_)
            else:
                self.exchange(after, out, before, in_)


def _peers(rank: int) -> list[int]:
    """To whom a rank sends: in a ring, and in recursive doubling."""
    return sorted({(rank + 1) % RANKS, rank ^ 1, rank ^ 2})


def _parts(data: npt.NDArray[Any], count: int) -> list[memoryview]:
    """The bytes of an array in equal parts."""
    view = data.view(np.uint8).data
    return [view[len(view) * i // count : len(view) * (i + 1) // count] for i in range(count)]


def _sent(sock: socket.socket, part: memoryview) -> int:
    """Bytes that the socket accepts now."""
    try:
        return sock.send(part)
    except BlockingIOError:
        return 0


def _plain_work(plain: PlainSockets, rank: int, size_bytes: int) -> Iterator[Work]:
    """An AllReduce over plain sockets; checks the result of the first."""
    send = make_input(rank, size_bytes // 4, "float32", "sum")
    recv, slot = np.empty_like(send), np.zeros_like(send)
    yield lambda: plain.all_reduce(send, recv, slot)
    wanted = expected_output(Collective("allreduce", RANKS), size_bytes // 4, "float32", "sum", rank)[0]
    if not np.array_equal(recv, wanted):
        raise RuntimeFault(f"{PLAIN} of {size_bytes} B: wrong elements")


def _raw_work(plain: PlainSockets, rank: int, size_bytes: int) -> Work:
    """Moves as many bytes from each rank to the next as a ring does, and does nothing else."""
    data = np.ones(2 * (RANKS - 1) * size_bytes // RANKS, np.uint8)
    target = np.ones_like(data)
    return lambda: plain.exchange((rank + 1) % RANKS, data, (rank - 1) % RANKS, target)


def _everyones(comm: MPI.Intracomm, own: list[float]) -> npt.NDArray[np.float64]:
    """The values of every rank, a row each."""
    values = np.empty((RANKS, len(own)))
    comm.Allgather(np.array(own, np.float64), values)
    return values


def run_job(route: str) -> list[TransportTiming]:
    """This rank's part of one job under mpirun, whose messages go by `route`; the rows, at rank 0."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank = comm.Get_rank()
    rows: list[TransportTiming] = []
    with ExitStack() as stack:
        transports: dict[str, Transport] = {}
        plain: PlainSockets | None = None
        if route == "tcp":
            for case, n_rails, crc in zip(OURS, (1, 2, 2), (False, False, True), strict=True):
                nics = [HostNic(f"rail{i}", f"127.0.{i + 2}.{rank + 1}") for i in range(n_rails)]
                transports[case] = TcpTransport(over_mpi(comm), nics, crc=crc)
            transports[OVER_MPI] = MpiTransport(comm)
            plain = PlainSockets(comm, 1, lambda peer, _: f"127.0.1.{peer + 1}", stack)
        elif route == _FABRIC_ROUTE:
            n_rails = FabricSpec.parse(FABRIC).nics
            nics = [HostNic(f"eth{i}", nic_address(rank, i)) for i in range(n_rails)]
            transports["TCP, 2 rails"] = TcpTransport(over_mpi(comm), nics)
            plain = PlainSockets(comm, n_rails, nic_address, stack)
        for transport in transports.values():
            stack.callback(transport.close)
            stack.callback(transport.barrier)
        for size_bytes, (_, n_runs) in SIZES.items():
            is_long = size_bytes == max(SIZES)
            if route == _FABRIC_ROUTE and not is_long:
                continue
            checks = [(case, work_over(transport, size_bytes)) for case, transport in transports.items()]
            if plain is not None:
                checks.append((PLAIN, _plain_work(plain, rank, size_bytes)))
            works = {case: next(check) for case, check in checks}
            if route in PEER:
                works[PEER[route]] = _peer_work(comm, size_bytes)
            if plain is not None and is_long:
                works[RAW] = _raw_work(plain, rank, size_bytes)
            rows += time_in_turns(comm, works, size_bytes, n_runs)
            for _, check in checks:
                next(check, None)
    if route == _FABRIC_ROUTE:
        rows = [structs.replace(row, case=ON_FABRIC[row.case]) for row in rows]
    return rows if rank == 0 else []


def time_in_turns(comm: MPI.Intracomm, works: dict[str, Work], size_bytes: int, n_runs: int) -> list[TransportTiming]:
    """Each case once a round; the first round does not count."""
    found: dict[str, list[tuple[float, float, float]]] = {case: [] for case in works}
    for round_ in range(1 + ROUNDS):
        for case, work in works.items():
            comm.Barrier()
            before, stolen, started = time.process_time(), stolen_jiffies(), time.perf_counter()
            for _ in range(n_runs):
                work()
            own = [time.perf_counter() - started, time.process_time() - before]
            steal = stolen_share(stolen, stolen_jiffies())
            everyone = _everyones(comm, own)
            if round_:
                seconds, cpu_s = everyone[:, 0].max() / n_runs, everyone[:, 1].sum() / n_runs
                found[case].append((float(seconds), steal, float(cpu_s)))
    return [
        TransportTiming(
            case, size_bytes, Samples([a for a, _, _ in its], [b for _, b, _ in its], 0), [c for _, _, c in its]
        )
        for case, its in found.items()
    ]


# --- all of them ------------------------------------------------------------------------------------------------------


def measure(n_jobs: int = JOBS) -> TransportSpeed:
    """Runs the jobs in turns; those on emulated hosts only where this process may make some.

    Raises EnvironmentMissing without mpirun, RuntimeFault if a job fails.
    """
    rows: dict[tuple[str, int], TransportTiming] = {}
    refusal = can_make_namespaces()
    if refusal is not None:
        click.echo(f"nothing on the fabric: {refusal}", err=True)
    for _ in range(n_jobs):
        for route in (*_ROUTES, *((_FABRIC_ROUTE,) if refusal is None else ())):
            output = _run_on_fabric() if route == _FABRIC_ROUTE else _run_here(route)
            click.echo(f"a job of {route} is done", err=True)
            for row in msgspec.json.decode(output, type=list[TransportTiming]):
                key = (row.case, row.size_bytes)
                rows[key] = joined(rows[key], row) if key in rows else row
    versions = {"isal": metadata.version("isal")} if find_spec("isal") is not None else {}
    return TransportSpeed(this_machine(), these_versions() | versions, tuple(rows.values()))


def _rank_command(route: str) -> list[str]:
    return [sys.executable, "-m", "optcc.experiments.transport_speed", "--one", route]


def _run_here(route: str) -> str:
    """A job on this machine; what its rank 0 prints."""
    arguments = ("--mca", "pml", "ob1", "--mca", "btl", *_ROUTES[route], *_YIELDS)
    return run_local_job(_rank_command(route), RANKS, mpi_args=arguments, timeout_s=JOB_TIMEOUT_S)


def _run_on_fabric() -> str:
    """A job on emulated hosts that are set up for it; what its rank 0 prints."""
    command = _rank_command(_FABRIC_ROUTE)
    with Fabric.up(FabricSpec.parse(FABRIC, name=f"speed-{os.getpid()}")) as fabric:
        done = fabric.run(command, mpi_args=_YIELDS, capture=True, timeout_s=JOB_TIMEOUT_S)
    if done.exit_code:
        raise RuntimeFault(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
    return done.stdout


def joined(first: TransportTiming, second: TransportTiming) -> TransportTiming:
    samples = Samples(
        first.samples.seconds + second.samples.seconds,
        first.samples.steal + second.samples.steal,
        first.samples.wrong + second.samples.wrong,
    )
    return TransportTiming(first.case, first.size_bytes, samples, first.cpu_s + second.cpu_s)


@record_command(TransportSpeed, RecordForm(quick={"jobs": 1}, one_session=IN_TURNS, part="one"))
@click.option("--one", type=click.Choice([*_ROUTES, _FABRIC_ROUTE]), help="Run one rank's part here; under mpirun.")
@click.option("--jobs", default=JOBS, show_default=True, help="How often each kind of job runs.")
def command(one: str | None, jobs: int) -> TransportSpeed | None:
    """Measure what the transports cost and write the record."""
    if one is None:
        return measure(jobs)
    rows = run_job(one)
    if rows:
        click.echo(msgspec.json.encode(rows).decode())
    return None


if __name__ == "__main__":
    run_command(command)
