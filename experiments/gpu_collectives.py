"""Collectives of ranks on one GPU, every element checked: ranks that are threads, or processes of this machine.

    benches_of         what is run: types, reductions, lengths, numbers of ranks
    collectives        runs it over ranks that are threads, or of which this process is one
    time_long          how long an AllReduce takes, with the plan for what the copies allow
    run_processes      either of the two over ranks that are processes, by CUDA IPC

For `optcc.experiments.gpu_battery`.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from optcc.collective import DTYPE_BYTES, reductions_of
from optcc.errors import RuntimeFault
from optcc.experiments.bench import BenchSettings, Variant, run_cases
from optcc.experiments.bench_messages import device_of_rank
from optcc.experiments.kernel_bench import KernelTiming
from optcc.experiments.record import BenchTiming
from optcc.planner import verdict_cache
from optcc.runtime.cupy_kernels import load_cupy
from optcc.runtime.meeting_file import in_file
from optcc.runtime.nics import HostNic
from optcc.runtime.rendezvous import Meet, Meeting
from optcc.runtime.state import WINDOW
from optcc.runtime.transport import Transport
from optcc.runtime.transports.loopback import run_ranks
from optcc.runtime.transports.rank_threads import run_threads
from optcc.runtime.transports.tcp import TcpTransport
from optcc.runtime.transports.ucx import UcxTransport
from optcc.topology import Topology

DEVICE = "gpu:0"
BUDGET_S = 480.0
QUICK_MANY = 25
_MEET_S = 60.0


class BatteryLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a part has shown: how many cases it has gone through, how many elements were wrong, and what else to know.

    `error` is why it has not come to its end.
    """

    part: str
    cases: int
    wrong: int
    text: str
    seconds: float = 0.0
    error: str = ""


class BatteryTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured time, and the time that it is compared with, which was measured beside it: medians, seconds."""

    part: str
    what: str
    size_bytes: int
    seconds: float
    against: str
    against_seconds: float

    @property
    def ratio(self) -> float:
        """The time over what it is compared with."""
        return self.seconds / self.against_seconds


class Found(msgspec.Struct):
    """What the process of a part prints."""

    line: BatteryLine
    timings: list[BatteryTiming] = []
    kernels: list[KernelTiming] = []


class _Room:
    """Where the threads meet."""

    def __init__(self, n_ranks: int) -> None:
        self._n_ranks, self._job, self._secret = n_ranks, os.urandom(16), os.urandom(32)
        self._records = [b""] * n_ranks
        self._barrier = threading.Barrier(n_ranks)

    def meet(self, rank: int) -> Meet:
        """See `optcc.runtime.rendezvous.Meet`."""

        def meet(record: bytes) -> Meeting:
            self._records[rank] = record
            self._barrier.wait(_MEET_S)
            return Meeting(rank, self._n_ranks, self._job, self._secret, tuple(self._records))

        return meet


Runs = Callable[[int, Callable[[int, Transport], Any]], list[Any]]
"""(number of ranks, what each does with its transport) to what each has returned."""


def over_loopback(n_ranks: int, body: Callable[[int, Transport], Any]) -> list[Any]:
    return run_ranks(n_ranks, body, deadline_s=BUDGET_S)


def over_ucx(n_ranks: int, body: Callable[[int, Transport], Any]) -> list[Any]:
    room = _Room(n_ranks)

    def run(rank: int) -> Any:
        # UCX takes the context of the thread that uses it.
        load_cupy().cuda.Device(int(DEVICE.partition(":")[2])).use()
        transport = UcxTransport(room.meet(rank), [HostNic("lo", "127.0.0.1")])
        try:
            return body(rank, transport)
        finally:
            transport.close()

    return run_threads(n_ranks, run, lambda rank, cause: room._barrier.abort(), deadline_s=BUDGET_S)


def settings_of(
    variants: Sequence[Variant],
    collective: str,
    schedule: str,
    iterations: int,
    device: str = DEVICE,
    topology: Topology | None = None,
) -> BenchSettings:
    """A bench without shaped ports, in which every element of every run is checked; its plans are for `topology`."""
    first = variants[0]
    return BenchSettings(
        (schedule,),
        (),
        topology,
        Fraction(1, 100_000),
        Fraction(1),
        "gpu",
        first.sizes,
        iterations,
        1,
        None,
        first.dtype,
        first.reduction,
        "auto",
        None,
        None,
        WINDOW,
        ("out", "in"),
        120.0,
        True,
        False,
        "loopback",
        collective,
        variants=tuple(variants),
        device=device,
    )


def run_bench(runs: Runs, n_ranks: int, settings: BenchSettings) -> tuple[list[BenchTiming], str]:
    """The rows of a bench of `n_ranks` ranks, and which way their messages took."""
    cache = verdict_cache()

    def body(_rank: int, transport: Transport) -> tuple[list[BenchTiming], str]:
        device = device_of_rank(settings.device, transport, ("",) * n_ranks)
        rows = run_cases(settings, transport, None, cache, device=device)
        return rows, "in the host's memory" if device is None else device.path

    rows: tuple[list[BenchTiming], str] = runs(n_ranks, body)[0]
    return rows


def _variants(quick: bool) -> list[Variant]:
    """Every type and reduction, at a few elements that do not divide evenly."""
    dtypes = ("float32", "bfloat16", "int8") if quick else tuple(DTYPE_BYTES)
    return [
        Variant(dtype, reduction, 0, tuple(count * DTYPE_BYTES[dtype] for count in (0, 1, 1001)))
        for dtype in dtypes
        for reduction in reductions_of(dtype)
    ]


def _long_sizes(quick: bool) -> tuple[int, ...]:
    return (1 << 20,) if quick else (1 << 20, (64 << 20) + 4, 1 << 30)


Bench = tuple[int, BenchSettings]
"""How many ranks, and what they run."""


def benches_of(n_many: int, quick: bool) -> list[Bench]:
    """Every type and reduction over 1 to 4 ranks, then long messages, other collectives, and one `n_many` times."""
    some, all_ = _variants(True), _variants(quick)
    benches = [(2, all_, 1), (3, some, 1)] if quick else [(1, some, 1), (2, all_, 1), (3, some, 1), (4, all_, 1)]
    sizes = _long_sizes(quick)
    benches += [(2, [Variant("float32", "sum", 0, sizes)], 1)]
    benches += [] if quick else [(4, [Variant("float32", "sum", 0, sizes[:-1])], 1)]
    benches += [(2, [Variant("float32", "avg", 0, (4004,))], QUICK_MANY if quick else n_many // 2)]
    named = [(n_ranks, settings_of(each, "allreduce", "ring", times)) for n_ranks, each, times in benches]
    for collective, schedule in (("allgather", "ring-all-gather"), ("alltoall", "direct-all-to-all")):
        one = [Variant("float16", "sum", 0, (6000, 2 * sizes[0]))]
        named.append((3, settings_of(one, collective, schedule, 2)))
    return named


def collectives(runs: Runs, part: str, benches: Sequence[Bench]) -> Found:
    """What was wrong in the benches, and which way their messages took."""
    wrong = cases = 0
    paths: dict[str, None] = {}
    for n_ranks, settings in benches:
        rows, path = run_bench(runs, n_ranks, settings)
        wrong += sum(row.wrong for row in rows)
        cases += len(rows) * len(settings.modes) * (settings.iterations + settings.warmup)
        paths[path] = None
    return Found(BatteryLine(part, cases, wrong, "; ".join(paths)))


def ring_rate(n_ranks: int, n_bytes: int, copies_s: float) -> int:
    """What each rank sends, bytes/s, if a ring's AllReduce of `n_bytes` takes as long as its copies do.

    >>> ring_rate(2, 1000, 0.5)
    2000
    """
    return max(1, round(2 * (n_ranks - 1) * n_bytes / n_ranks / copies_s))


def time_long(runs: Runs, n_ranks: int, n_bytes: int, rounds: int, rate: int) -> tuple[BenchTiming, int, str]:
    """The row of a ring's AllReduce where each rank sends `rate` bytes/s, elements that were wrong in it and in what
    was run before it, and which way its messages took.

    The plan is made as who knows the machine would have it made: for this rate, and for what a message costs, which is
    measured by a short AllReduce of 2 (p - 1) of them, one after the other.
    """
    kind = "float32", "sum", 0
    (short,), _ = run_bench(runs, n_ranks, settings_of([Variant(*kind, (1024,))], "allreduce", "ring", 4 * rounds))
    assert short.out_of_place is not None
    message_s = Fraction(short.out_of_place.median_s).limit_denominator(10**9) / (2 * (n_ranks - 1))
    # At its sender and at its receiver.
    topology = replace(Topology.parse(f"{n_ranks}@{rate}B/s"), overhead_s=message_s / 2)
    settings = settings_of([Variant(*kind, (n_bytes,))], "allreduce", "ring", rounds, topology=topology)
    (row,), path = run_bench(runs, n_ranks, settings)
    return row, row.wrong + short.wrong, path


def _counts(quick: bool) -> tuple[int, ...]:
    """How many ranks the jobs of processes have."""
    return (2,) if quick else (2, 3, 4)


def process_times(quick: bool) -> tuple[tuple[int, ...], int, int]:
    """Of the timed AllReduces of processes: numbers of ranks, bytes, rounds."""
    return ((2,), 1 << 16, 2) if quick else ((2, 4), 64 << 20, 10)


def ipc_rank(quick: bool, rank: int, n_ranks: int, meet: Path, rate: int = 0) -> Found:
    """This process is one of `n_ranks`, which meet in a file, and go by CUDA IPC: rank 0's words count. With a `rate`
    an AllReduce is timed for it, without one everything is checked.

    What the timing is compared with is not measured yet, and 1 s.
    """
    transport = TcpTransport(in_file(meet, rank, n_ranks), [HostNic("lo", "127.0.0.1")])

    def runs(_: int, body: Callable[[int, Transport], Any]) -> list[Any]:
        return [body(rank, transport)]

    try:
        if rate:
            _, n_bytes, rounds = process_times(quick)
            row, wrong, path = time_long(runs, n_ranks, n_bytes, rounds, rate)
            assert row.out_of_place is not None
            what = f"{n_ranks} processes", n_bytes, row.out_of_place.median_s, "its copies", 1.0
            found = Found(BatteryLine("processes", rounds, wrong, path), [BatteryTiming("processes", *what)])
        else:
            found = collectives(runs, "ipc", [each for each in benches_of(1000, quick) if each[0] == n_ranks])
        transport.barrier()
    finally:
        transport.close()
    return found


def check_processes(words: Sequence[str], quick: bool) -> Found:
    """What `ipc_rank` finds in jobs of 2 to 4 processes that these words start; raises RuntimeFault if one failed."""
    return _together("ipc", [run_job(words, n_ranks) for n_ranks in _counts(quick)])


def _together(part: str, found: Sequence[Found]) -> Found:
    wrong, cases = (sum(getattr(each.line, what) for each in found) for what in ("wrong", "cases"))
    text = "; ".join(dict.fromkeys(each.line.text for each in found))
    return Found(BatteryLine(part, cases, wrong, text), [row for each in found for row in each.timings])


def time_processes(words: Sequence[str], quick: bool, copies_s: Callable[[int], float]) -> Found:
    """The same of timed AllReduces, each beside the copies that it must make: `copies_s` measures those of so many."""
    counts, n_bytes, _ = process_times(quick)
    found = []
    for n_ranks in counts:
        floor_s = copies_s(n_ranks)
        job = run_job([*words, "--rate", str(ring_rate(n_ranks, n_bytes, floor_s))], n_ranks)
        job.timings[:] = [msgspec.structs.replace(row, against_seconds=floor_s) for row in job.timings]
        found.append(job)
    return _together("processes", found)


def run_job(words: Sequence[str], n_ranks: int) -> Found:
    """What rank 0 of so many processes has printed; raises RuntimeFault if one of them failed."""
    with TemporaryDirectory(prefix="optcc-battery-") as folder:
        return _run_job(words, n_ranks, Path(folder) / "meet")


def _run_job(words: Sequence[str], n_ranks: int, meet: Path) -> Found:
    told = [[*words, "--rank", str(rank), "--ranks", str(n_ranks), "--meet", str(meet)] for rank in range(n_ranks)]
    started = [subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for each in told]
    try:
        # One that fails ends the waits of the others.
        said = [each.communicate(timeout=BUDGET_S) for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    for rank, (each, (_, errors)) in enumerate(zip(started, said, strict=True)):
        if each.returncode:
            last = (errors.strip() or "no word").splitlines()[-1]
            raise RuntimeFault(f"rank {rank} of {n_ranks}: exit {each.returncode}: {last}")
    return msgspec.json.decode(said[0][0].splitlines()[-1], type=Found)
