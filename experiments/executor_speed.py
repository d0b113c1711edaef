"""What the executor costs: processor time per instruction, where it goes, and how long a short AllReduce takes.

Two cases run over a transport that completes messages as soon as they are posted, which leaves the engine, the state
machine, and NumPy on a few bytes. The others run as four processes over loopback, interleaved in each round with Open
MPI's own AllReduce. Processor times are user and kernel time, the mean over the ranks, and include MPI's busy waiting.
The record is a file of its own format, `optcc-executor-speed/1`. The one that comes with the package is made by

    optcc experiment executor-speed

in about half a minute on two cores that nothing else uses.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import click
import msgspec
import numpy as np

from optcc.experiments.fabric import run_local_job
from optcc.experiments.record import RECORDS, Check
from optcc.experiments.recorder import IN_TURNS, Measured, RecordForm, check_times, head, record_command, run_command
from optcc.plan import Channel, Plan
from optcc.planner import build_plan
from optcc.runtime.engine import Engine
from optcc.runtime.mpi_library import load_mpi
from optcc.runtime.nics import nics_of
from optcc.runtime.rendezvous import over_mpi
from optcc.runtime.transport import COLLECTIVE_TIMEOUT_S, RECEIVED, SENT, Bytes, Event, Transport
from optcc.runtime.transports.mpi import MpiTransport
from optcc.runtime.transports.tcp import TcpTransport
from optcc.show import Card
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.plan import verify_plan

N_RANKS = 4
ROUNDS = 9
RUNS = 200
PROFILED_RUNS = 20
PROFILED_FUNCTIONS = 10
JOB_TIMEOUT_S = 300
LONG = ("ring", 8, 32, 8 * 32 * 16 * 4)
"""Schedule, ranks, segments and bytes of a plan of many instructions of 64 B each."""
SHORT = ("recursive-doubling", N_RANKS, 1, 1024)
ALONE = {"at once, ring of 8 ranks, 32 segments": LONG, "at once, 1 KiB on 4 ranks": SHORT}
JOB = (
    *("tcp, ring of 4 ranks, 32 segments", "mpi, ring of 4 ranks, 32 segments"),
    *("tcp, 1 KiB on 4 ranks", "mpi, 1 KiB on 4 ranks", "Open MPI itself, 1 KiB on 4 ranks"),
)
CASES = (*ALONE, *JOB)


class ExecutorTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One case: a rank's instructions in a run (0 for a peer), and seconds a run, of every round."""

    case: str
    instructions: int
    cpu_s: list[float]
    wall_s: list[float]

    @property
    def instruction_us(self) -> float:
        """Processor time of an instruction: the median round's."""
        return statistics.median(self.cpu_s) / self.instructions * 1e6 if self.instructions else 0.0


class ProfileShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which share of a run is spent in a function itself."""

    function: str
    share: float


@dataclass(frozen=True, slots=True)
class ExecutorSpeed(Measured):
    """The rows, the profile of the first case, the machine and the versions."""

    format: ClassVar[str] = "optcc-executor-speed/1"
    own_path: ClassVar[Path] = RECORDS / "executor-speed.json"
    docs_page: ClassVar[str] = "performance.md"

    machine: dict[str, Any]
    versions: dict[str, str]
    rows: tuple[ExecutorTiming, ...]
    profile: tuple[ProfileShare, ...]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.rows):
            check_times(check, f"rows[{number}].cpu_s", row.cpu_s)
            check_times(check, f"rows[{number}].wall_s", row.wall_s)

    def card(self) -> Card:
        rows = tuple(
            (
                row.case,
                f"{row.instructions}" if row.instructions else "-",
                f"{row.instruction_us:.1f} us" if row.instructions else "-",
                f"{statistics.median(row.cpu_s) * 1e6:.0f} us",
                f"{statistics.median(row.wall_s) * 1e6:.0f} us",
            )
            for row in self.rows
        )
        columns = ("case", "instructions a rank", "CPU an instruction", "CPU a run and rank", "time of a run")
        return Card("the executor's cost, medians", columns, rows)

    def markdown(self) -> str:
        """Both tables, as in docs/performance.md."""
        return "\n".join(card.markdown() for card in (self.card(), self.profile_card()))

    def remarks(self) -> list[str]:
        return self.profile_card().markdown().splitlines()

    def profile_card(self) -> Card:
        """The profile as a table."""
        rows = tuple((share.function, f"{100 * share.share:.0f} %") for share in self.profile)
        return Card("where an instruction's time goes", ("function", "share"), rows)


class ImmediateTransport:
    """Rank 0 of a network on which every message completes when it is posted; no bytes are moved."""

    def __init__(self, n_ranks: int) -> None:
        self.rank, self.n_ranks = 0, n_ranks
        self._events: list[Event] = []

    def open(self, channels: Sequence[Channel], group: int = 0, carried: Sequence[int] = ()) -> list[int]:
        """See `Transport`."""
        del carried
        first = group * len(channels)
        return [first + k if 0 in (channel.src, channel.dst) else -1 for k, channel in enumerate(channels)]

    def post_send(self, channel: int, view: Bytes) -> None:  # noqa: ARG002
        """See `Transport`."""
        self._events.append((SENT, channel))

    def post_recv(self, channel: int, view: Bytes) -> None:  # noqa: ARG002
        """See `Transport`."""
        self._events.append((RECEIVED, channel))

    def poll(self, timeout_s: float) -> list[Event]:  # noqa: ARG002
        """See `Transport`."""
        events, self._events = self._events, []
        return events

    def allgather(self, payload: bytes, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> list[bytes]:  # noqa: ARG002
        """See `Transport`; every rank's payload is this one's."""
        return [payload] * self.n_ranks

    def barrier(self, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        """See `Transport`."""

    def abort(self, cause: str) -> None:
        """See `Transport`."""

    def close(self) -> None:
        """See `Transport`."""


def _plan(name: str, ranks: int, segments: int, size_bytes: int) -> Plan:
    return build_plan(name, Topology.parse(f"{ranks}@1GB/s"), size_bytes, segments=segments)


def _ready(transport: Transport, plan: Plan) -> tuple[Callable[[], object], int]:
    """One run of `plan`, of arrays of ones, and how many instructions it is at this rank."""
    verdict = verify_plan(plan)
    assert verdict.verdict == PROVED
    prepared = Engine(transport).prepare(plan, verdict)
    send = np.ones(plan.size_bytes // 4, dtype=np.float32)
    arrays = prepared.arrange(send, np.zeros_like(send))
    return lambda: prepared.start_with(arrays).wait(), prepared.program.n_instructions


def _timed(run: Callable[[], object], runs: int) -> tuple[float, float]:
    """(processor seconds, seconds) a run."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    for _ in range(runs):
        run()
    return (time.process_time() - cpu_s) / runs, (time.perf_counter() - wall_s) / runs


def measure_alone(case: str, rounds: int = ROUNDS, runs: int = RUNS) -> ExecutorTiming:
    """A case over `ImmediateTransport`."""
    plan = _plan(*ALONE[case])
    run, instructions = _ready(ImmediateTransport(plan.n_ranks), plan)
    run()
    times = [_timed(run, max(1, runs // 10) if instructions > 50 else runs) for _ in range(rounds)]
    return ExecutorTiming(case, instructions, [cpu_s for cpu_s, _ in times], [wall_s for _, wall_s in times])


def profile(runs: int = PROFILED_RUNS) -> list[ProfileShare]:
    """Where the time of the first case goes, by function, the largest first."""
    plan = _plan(*LONG)
    run, _ = _ready(ImmediateTransport(plan.n_ranks), plan)
    run()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(runs):
        run()
    profiler.disable()
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    total_s = sum(own_s for _, _, own_s, _, _ in stats.values())
    rows = [(own_s / total_s, _label(*where)) for where, (_, _, own_s, _, _) in stats.items()]
    return [ProfileShare(label, share) for share, label in sorted(rows, reverse=True)[:PROFILED_FUNCTIONS]]


def _label(path: str, _line: int, name: str) -> str:
    """`engine.poll`; the name alone for built-in functions."""
    return f"{Path(path).stem}.{name}" if path.endswith(".py") else name


def _rank(rounds: int, runs: int) -> list[ExecutorTiming]:
    """The cases of the job, at one of its ranks: times are the mean over the ranks, and the slowest one's."""
    mpi = MpiTransport()
    tcp = TcpTransport(over_mpi(mpi.comm), nics_of({"OPTCC_SOCKET_IFNAME": "=lo"}))
    long, short = _plan("ring", N_RANKS, 32, N_RANKS * 32 * 16 * 4), _plan(*SHORT)
    comm, sum_ = mpi.comm, load_mpi().SUM
    send = np.ones(short.size_bytes // 4, dtype=np.float32)
    recv = np.zeros_like(send)
    ways: tuple[Transport, ...] = (tcp, mpi, tcp, mpi, mpi)
    cases = [_ready(way, plan) for way, plan in zip(ways[:-1], (long, long, short, short), strict=True)]
    cases.append((lambda: comm.Allreduce(send, recv, op=sum_), 0))
    rows = [ExecutorTiming(name, instructions, [], []) for name, (_, instructions) in zip(JOB, cases, strict=True)]
    for round_ in range(rounds + 1):
        for row, way, (run, instructions) in zip(rows, ways, cases, strict=True):
            way.barrier()
            cpu_s, wall_s = _timed(run, max(1, runs // 10) if instructions > 50 else runs)
            way.barrier()
            times = [struct.unpack("<dd", each) for each in mpi.allgather(struct.pack("<dd", cpu_s, wall_s))]
            if round_:
                row.cpu_s.append(statistics.mean(each for each, _ in times))
                row.wall_s.append(max(each for _, each in times))
    tcp.barrier()
    tcp.close()
    mpi.close()
    return rows


def measure_job(rounds: int = ROUNDS, runs: int = RUNS) -> list[ExecutorTiming]:
    """The cases of four processes, in one job. Raises EnvironmentMissing without Open MPI, RuntimeFault if it fails."""
    command = [sys.executable, "-m", "optcc.experiments.executor_speed", "--rank"]
    said = run_local_job([*command, "--rounds", str(rounds), "--runs", str(runs)], N_RANKS, timeout_s=JOB_TIMEOUT_S)
    return msgspec.json.decode(said, type=list[ExecutorTiming])


def measure(rounds: int = ROUNDS, runs: int = RUNS) -> ExecutorSpeed:
    """Everything; raises as `measure_job`."""
    rows = [measure_alone(case, rounds, runs) for case in ALONE] + measure_job(rounds, runs)
    return ExecutorSpeed(**head(), rows=tuple(rows), profile=tuple(profile()))


@record_command(ExecutorSpeed, RecordForm(quick={"rounds": 1, "runs": 20}, one_session=IN_TURNS, part="rank"))
@click.option("--rank", is_flag=True, hidden=True, help="Be a rank of the job, and print its rows.")
@click.option("--rounds", type=click.IntRange(1), default=ROUNDS, show_default=True)
@click.option("--runs", type=click.IntRange(1), default=RUNS, show_default=True, help="Runs in each round.")
def command(rank: bool, rounds: int, runs: int) -> ExecutorSpeed | None:
    """Measure the executor's cost and write the record."""
    if not rank:
        return measure(rounds, runs)
    rows = _rank(rounds, runs)
    if load_mpi().COMM_WORLD.Get_rank() == 0:
        click.echo(msgspec.json.encode(rows).decode())
    return None


if __name__ == "__main__":
    run_command(command)
