"""Everything that has to be shown on a GPU, by one command, without a network:

    pip install 'optcc[gpu,ucx]'                    # wheels alone: CuPy, NVRTC, the CUDA run-time's headers, UCX
    optcc experiment gpu-battery [--quick] -o gpu-battery.json

in at most eight minutes on one GPU. Its parts are processes of their own, so that one that crashes or hangs is a line
of the record, and the others go on:

    kernels      every kernel, type, reduction, size and alignment against float64
    overlap      copies in, copies out and a reduction at once, against one after the other, by events
    step         what a step costs the host: 1 KiB on a GPU and in the host's memory
    allreduce    2 and 4 ranks on this GPU against the copies that they must make, timed in the same minute
    speed        every kernel on 64 MiB (and 256 MiB), against the device's own copy just before it
    staged       collectives of 1 to 4 ranks on this GPU, through page-locked memory: every type and reduction, 0 B to
                 1 GiB, every element checked on the GPU, ten thousand times
    ucx          the same through UCX, from GPU to GPU if it says that it can and the self-test agrees
    sanitizer    some kernels under compute-sanitizer, if that is installed

The record, `optcc-gpu-battery/1`, says the device, the driver and the versions. Without a GPU nothing is written, and
the command exits with 2, or with 0 if `--allow-missing`. On a stand-in for CuPy, as in the tests, the device is called
`stand-in`, and no time means anything.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import click
import msgspec
import numpy as np

from optcc.collective import DTYPE_BYTES, reductions_of
from optcc.errors import EXIT_DONE, EXIT_REFUTED, EnvironmentMissing
from optcc.experiments.bench import BenchSettings, Variant, run_cases
from optcc.experiments.bench_messages import device_of_rank
from optcc.experiments.kernel_bench import COUNTS, CudaDevice, KernelTiming, check, measure
from optcc.experiments.record import RECORDS, BenchTiming, Check, these_versions, this_machine
from optcc.experiments.recorder import Measured, record_command, run_command
from optcc.planner import verdict_cache
from optcc.runtime.cupy_kernels import load_cupy
from optcc.runtime.nics import HostNic
from optcc.runtime.rendezvous import Meet, Meeting
from optcc.runtime.state import WINDOW
from optcc.runtime.transport import Transport
from optcc.runtime.transports.loopback import run_ranks
from optcc.runtime.transports.rank_threads import run_threads
from optcc.runtime.transports.ucx import UcxTransport
from optcc.show import Card

DEVICE = "gpu:0"
COPY_SHARE_MIN = 0.9
"""Of the device's copy bandwidth, a reduction of 64 MiB or more is to reach this share."""
BUDGET_S, QUICK_BUDGET_S = 480.0, 90.0
QUICK_MANY = 25
_MEET_S = 60.0
_LINES_MAX = 12
_CUPY_PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy", "libucx-cu12")


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


@dataclass(frozen=True, slots=True)
class GpuBattery(Measured):
    """The device, the machine, the versions, and what each part has found."""

    format: ClassVar[str] = "optcc-gpu-battery/1"
    own_path: ClassVar[Path] = RECORDS / "gpu-battery.json"

    device: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    is_quick: bool
    lines: tuple[BatteryLine, ...]
    timings: tuple[BatteryTiming, ...]
    kernels: tuple[KernelTiming, ...]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.timings):
            good = min(row.seconds, row.against_seconds) > 0
            check(f"timings[{number}].seconds", row.seconds, good, "be above zero, as what it is compared with")
        for number, line in enumerate(self.lines):
            check(f"lines[{number}].wrong", line.wrong, line.wrong >= 0, "be zero or more")

    def card(self) -> Card:
        rows = [
            (line.part, str(line.cases), str(line.wrong), f"{line.seconds:.0f} s", line.error or line.text)
            for line in self.lines
        ]
        rows += [
            (each.part, each.what, f"{each.size_bytes} B", f"{1e6 * each.seconds:.1f} us", _compare(each))
            for each in self.timings
        ]
        rows += [
            (
                "speed",
                f"{each.dtype} {each.kernel}",
                f"{each.size_bytes} B",
                f"{each.message_bytes_per_s / 1e9:.0f} GB/s",
                f"{100 * each.copy_share:.0f} % of the copy's bandwidth",
            )
            for each in self.kernels
        ]
        return Card(f"GPU battery on {self.device['name']}", ("part", "cases", "wrong", "time", ""), tuple(rows))

    def remarks(self) -> list[str]:
        wrong, cases = (sum(getattr(line, what) for line in self.lines) for what in ("wrong", "cases"))
        failed = [line.part for line in self.lines if line.error]
        told = [f"# Wrong elements: {wrong} in {cases} cases {'FAILED' if wrong else 'OK'}"]
        return told + ([f"# Parts that have not ended: {', '.join(failed)} FAILED"] if failed else [])

    @property
    def exit_code(self) -> int:
        return EXIT_REFUTED if any(line.wrong or line.error for line in self.lines) else EXIT_DONE


def _compare(row: BatteryTiming) -> str:
    return f"{row.ratio:.2f} of {row.against}, {1e6 * row.against_seconds:.1f} us"


# --- collectives of ranks that are threads of this process ------------------------------------------------------------


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


def _over_loopback(n_ranks: int, body: Callable[[int, Transport], Any]) -> list[Any]:
    return run_ranks(n_ranks, body, deadline_s=BUDGET_S)


def _over_ucx(n_ranks: int, body: Callable[[int, Transport], Any]) -> list[Any]:
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
    variants: Sequence[Variant], collective: str, schedule: str, iterations: int, device: str = DEVICE
) -> BenchSettings:
    """A bench without shaped ports, in which every element of every run is checked."""
    first = variants[0]
    return BenchSettings(
        (schedule,),
        (),
        None,
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


def collectives(runs: Runs, part: str, n_many: int, quick: bool) -> Found:
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
    wrong = cases = 0
    paths: dict[str, None] = {}
    for n_ranks, settings in named:
        rows, path = run_bench(runs, n_ranks, settings)
        wrong += sum(row.wrong for row in rows)
        cases += len(rows) * len(settings.modes) * (settings.iterations + settings.warmup)
        paths[path] = None
    return Found(BatteryLine(part, cases, wrong, "; ".join(paths)))


# --- parts ------------------------------------------------------------------------------------------------------------


def kernels_part(quick: bool) -> Found:
    """Every kernel against float64."""
    dtypes = ("float32", "bfloat16", "int8") if quick else tuple(DTYPE_BYTES)
    counts = (0, 1, 17) if quick else COUNTS
    said: list[str] = []
    wrong = check(CudaDevice(), 0, said.append, dtypes=dtypes, counts=counts)
    bad = [line for line in said if not line.endswith(" 0 wrong")]
    return Found(BatteryLine("kernels", len(said), wrong, "; ".join(bad[:_LINES_MAX])))


def sanitizer_part(quick: bool) -> Found:
    """Some kernels and a collective under compute-sanitizer."""
    del quick
    program = shutil.which("compute-sanitizer")
    if program is None:
        return Found(BatteryLine("sanitizer", 0, 0, "not run: no compute-sanitizer on PATH"))
    words = [program, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m"]
    words += ["optcc.experiments.gpu_battery", "--quick", "--part", "kernels"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=QUICK_BUDGET_S, check=False)
    found = next((line for line in reversed(ran.stdout.splitlines()) if "ERROR SUMMARY" in line), "no summary")
    return Found(BatteryLine("sanitizer", 1, int(ran.returncode != 0), found.strip("= ")))


def speed_part(quick: bool) -> Found:
    """Every kernel against the device's own copy."""
    dtypes = ("float32", "bfloat16") if quick else ("float32", "float64", "float16", "bfloat16", "int32", "int8")
    sizes = (1 << 16,) if quick else (64 << 20, 256 << 20)
    rows = [row for size in sizes for row in measure(CudaDevice(), size, 3 if quick else 9, dtypes)]
    least = min((row for row in rows if row.moved == 3), key=lambda row: row.copy_share)
    verdict = "at least" if least.copy_share >= COPY_SHARE_MIN else "below"
    what = f"{least.dtype} {least.kernel}: {100 * least.copy_share:.0f} % of the copy's bandwidth"
    return Found(BatteryLine("speed", len(rows), 0, f"{what}, {verdict} {100 * COPY_SHARE_MIN:.0f} %"), [], rows)


class _Copies:
    """Page-locked memory and the GPU's, `n_bytes` each, on the three streams of an engine."""

    def __init__(self, n_bytes: int) -> None:
        from optcc.runtime.cupy_kernels import CupyKernels, address_of
        from optcc.runtime.device_streams import COMPUTE, DeviceStreams

        self.n_bytes = n_bytes
        self.streams = DeviceStreams(int(DEVICE.partition(":")[2]))
        cupy = self._cupy = self.streams.cupy
        with self.streams.device:
            self._arrays = [cupy.zeros(n_bytes // 4, np.float32) for _ in range(4)]
            cupy.cuda.get_current_stream().synchronize()
            self._pages = [cupy.cuda.alloc_pinned_memory(n_bytes) for _ in range(2)]
            self._kernels = CupyKernels("float32", "sum", self.streams.streams[COMPUTE], self.streams.device_id)
        self._device = [address_of(each) for each in self._arrays]
        self._host = [address_of(np.frombuffer(each, np.uint8, n_bytes)) for each in self._pages]

    def into(self, n_bytes: int = 0) -> None:
        self.streams.copy_into(self._device[0], self._host[0], n_bytes or self.n_bytes)

    def out(self, n_bytes: int = 0) -> None:
        self.streams.copy_out(self._host[1], self._device[1], n_bytes or self.n_bytes)

    def reduce(self) -> None:
        self._kernels.reduce(self._device[2], self._device[3], self.n_bytes // 4)

    def seconds(self, *works: Callable[[], None]) -> float:
        """From the first to the last of what `works` queue, by events: of each stream one before and one after."""
        cuda, streams = self._cupy.cuda, self.streams.streams
        with self.streams.device:
            for stream in streams:
                stream.synchronize()
            start = cuda.Event()
            start.record(streams[0])
            for stream in streams[1:]:
                stream.wait_event(start)
            for work in works:
                work()
            ends = [cuda.Event() for _ in streams]
            for end, stream in zip(ends, streams, strict=True):
                end.record(stream)
            for end in ends:
                end.synchronize()
            return max(float(cuda.get_elapsed_time(start, end)) for end in ends) / 1000


def _median(take: Callable[[], float], rounds: int) -> float:
    take()
    return statistics.median(take() for _ in range(rounds))


def allreduce_part(quick: bool) -> Found:
    """2 and 4 ranks on one GPU; each byte of a ring leaves and enters the GPU 2 (p - 1) times in all."""
    size, rounds = (1 << 16, 2) if quick else (64 << 20, 10)
    copies = _Copies(size)
    timings, wrong = [], 0
    for n_ranks in (2, 4):
        rows, path = run_bench(
            _over_loopback, n_ranks, settings_of([Variant("float32", "sum", 0, (size,))], "allreduce", "ring", rounds)
        )
        wrong += sum(row.wrong for row in rows)
        moves = [each for _ in range(2 * (n_ranks - 1)) for each in (copies.into, copies.out)]
        floor = _median(partial(copies.seconds, *moves), rounds)
        (row,) = rows
        for side, samples in (("out of place", row.out_of_place), ("in place", row.in_place)):
            assert samples is not None
            what = f"{n_ranks} ranks, {side}"
            timings.append(BatteryTiming("allreduce", what, size, samples.median_s, "its copies", floor))
    return Found(BatteryLine("allreduce", len(timings), wrong, path), timings)


def overlap_part(quick: bool) -> Found:
    """The two copies and a reduction at once, and one after the other."""
    size, rounds = (1 << 16, 3) if quick else (64 << 20, 15)
    copies = _Copies(size)
    works = {"copy in": copies.into, "copy out": copies.out, "reduction": copies.reduce}
    alone = {name: _median(partial(copies.seconds, work), rounds) for name, work in works.items()}
    together = _median(partial(copies.seconds, *works.values()), rounds)
    line = ", ".join(f"{name} {1e6 * seconds:.0f} us" for name, seconds in alone.items())
    timing = BatteryTiming("overlap", "all three at once", size, together, "one after the other", sum(alone.values()))
    return Found(BatteryLine("overlap", 1, 0, f"alone: {line}"), [timing])


def step_part(quick: bool) -> Found:
    """A short AllReduce of two ranks, on the GPU and in the host's memory."""
    rounds = 5 if quick else 300
    medians, wrong = [], 0
    for device in (DEVICE, "cpu"):
        settings = settings_of([Variant("float32", "sum", 0, (1024,))], "allreduce", "ring", rounds, device)
        rows, _ = run_bench(_over_loopback, 2, settings)
        wrong += sum(row.wrong for row in rows)
        assert rows[0].out_of_place is not None
        medians.append(rows[0].out_of_place.median_s)
    timing = BatteryTiming("step", "1 KiB, 2 ranks, on the GPU", 1024, medians[0], "in the host's memory", medians[1])
    return Found(BatteryLine("step", 2 * rounds, wrong, ""), [timing])


PARTS: dict[str, Callable[[bool], Found]] = {
    "kernels": kernels_part,
    "overlap": overlap_part,
    "step": step_part,
    "allreduce": allreduce_part,
    "speed": speed_part,
    "staged": partial(collectives, _over_loopback, "staged", 10_000),
    "ucx": partial(collectives, _over_ucx, "ucx", 1000),
    "sanitizer": sanitizer_part,
}
"""In the order in which they run: if the time does not suffice, it is the last that are missing."""


def run_part(name: str, quick: bool, timeout_s: float) -> Found:
    """A part in a process of its own; a crash or a time-out is its line's error."""
    words = [sys.executable, "-m", "optcc.experiments.gpu_battery", "--part", name, *(["--quick"] if quick else [])]
    started, timeout_s = time.monotonic(), max(timeout_s, 1.0)
    error = ""
    try:
        ran = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)
        if ran.returncode == 0:
            with suppress(IndexError, msgspec.MsgspecError):
                found = msgspec.json.decode(ran.stdout.splitlines()[-1], type=Found)
                line = msgspec.structs.replace(found.line, seconds=time.monotonic() - started)
                return Found(line, found.timings, found.kernels)
        said = (ran.stderr.strip() or ran.stdout.strip() or "no word").splitlines()
        error = f"exit {ran.returncode}: {said[-1]}"
    except subprocess.TimeoutExpired:
        error = f"not done after {timeout_s:.0f} s"
    return Found(BatteryLine(name, 0, 0, "", time.monotonic() - started, error))


def describe_device() -> dict[str, Any]:
    """The GPU, its memory, and the driver. Raises EnvironmentMissing without CuPy or a GPU."""
    runtime = load_cupy().cuda.runtime
    properties = runtime.getDeviceProperties(int(DEVICE.partition(":")[2]))
    driver = Path("/proc/driver/nvidia/version")
    return {
        "name": properties["name"].decode(),
        "multiprocessors": properties["multiProcessorCount"],
        "memory_bytes": int(runtime.memGetInfo()[1]),
        "devices": int(runtime.getDeviceCount()),
        "cuda_of_driver": int(runtime.driverGetVersion()),
        "cuda_of_runtime": int(runtime.runtimeGetVersion()),
        "driver": driver.read_text(encoding="utf-8").splitlines()[0] if driver.exists() else "",
    }


def gpu_versions() -> dict[str, str]:
    """The versions that count here: of CuPy too, and of UCX."""
    found = these_versions()
    for package in _CUPY_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


@record_command(GpuBattery)
@click.option("--quick", is_flag=True, help="Fewer types and shorter messages, for a look: a minute and a half.")
@click.option("--allow-missing", is_flag=True, help="Without a GPU, say so and exit with 0.")
@click.option("--part", type=click.Choice(tuple(PARTS)), help="This part alone, in this process; prints JSON.")
def command(quick: bool, allow_missing: bool, part: str | None) -> GpuBattery | None:
    """Show on this machine's GPU that kernels and collectives are right, and how fast they are."""
    try:
        device = describe_device()
    except EnvironmentMissing as error:
        if not allow_missing:
            raise
        click.echo(f"# GPU battery: not run: {error}")
        return None
    if part is not None:
        click.echo(msgspec.json.encode(PARTS[part](quick)).decode())
        return None
    ends_s = time.monotonic() + (QUICK_BUDGET_S if quick else BUDGET_S)
    found = []
    for name in PARTS:
        found.append(run_part(name, quick, ends_s - time.monotonic()))
        line = found[-1].line
        click.echo(f"# {name}: {line.error or f'{line.wrong} wrong in {line.cases} cases'}", err=True)
    return GpuBattery(
        device,
        this_machine(),
        gpu_versions(),
        quick,
        tuple(each.line for each in found),
        tuple(row for each in found for row in each.timings),
        tuple(row for each in found for row in each.kernels),
    )


if __name__ == "__main__":
    run_command(command)
