"""Everything that has to be shown on a GPU, by one command, without a network:

    pip install 'optcc[gpu,ucx]'                    # wheels alone: CuPy, NVRTC, the CUDA run-time's headers, UCX
    optcc experiment gpu-battery [--quick] -o gpu-battery.json

in at most eight minutes on one GPU. Its parts are processes of their own, so that one that crashes or hangs is a line
of the record, and the others go on:

    overlap      copies in, copies out and a reduction at once, against one after the other, by events
    step         what a step costs the host: 1 KiB on a GPU and in the host's memory
    allreduce    2 and 4 ranks on this GPU against the copies that they must make, timed in the same minute
    processes    the same of ranks that are processes, by CUDA IPC
    speed        every kernel on 64 MiB (and 256 MiB), against the device's own copy just before it
    kernels      every kernel, type, reduction, size and alignment against float64
    staged       collectives of 1 to 4 ranks on this GPU, through page-locked memory: every type and reduction, 0 B to
                 1 GiB, every element checked on the GPU, ten thousand times
    ipc          the same of 2 to 4 ranks that are processes on this GPU, by CUDA IPC, a thousand times
    ucx          the same through UCX, from GPU to GPU if it says that it can and the self-test agrees, a thousand times
    sanitizer    some kernels under compute-sanitizer, if that is installed

The first five are timed, one after the other; the others run beside each other, one for each four processors. The
record, `optcc-gpu-battery/1`, says the device, the driver and the versions. Without a GPU nothing is written, and the
command exits with 2, or with 0 if `--allow-missing`. On a stand-in for CuPy, as in the tests, the device is called
`stand-in`, and no time means anything.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import click
import msgspec
import numpy as np

from optcc.collective import DTYPE_BYTES
from optcc.errors import EXIT_DONE, EXIT_REFUTED, EnvironmentMissing
from optcc.experiments import gpu_collectives
from optcc.experiments.bench import Variant
from optcc.experiments.gpu_collectives import (
    BUDGET_S,
    DEVICE,
    BatteryLine,
    BatteryTiming,
    Found,
    benches_of,
    collectives,
    over_loopback,
    over_ucx,
    process_times,
    ring_rate,
    run_bench,
    settings_of,
    time_long,
)
from optcc.experiments.kernel_bench import COUNTS, CudaDevice, KernelTiming, check, measure
from optcc.experiments.record import RECORDS, Check, these_versions, this_machine
from optcc.experiments.recorder import Measured, RecordForm, record_command, run_command
from optcc.runtime.cupy_kernels import load_cupy
from optcc.show import Card
from optcc.units import show_size

COPY_SHARE_MIN = 0.9
"""Of the device's copy bandwidth, a reduction of 64 MiB or more is to reach this share."""
QUICK_BUDGET_S = 90.0
_LINES_MAX = 12
_CUPY_PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy", "libucx-cu12")


@dataclass(frozen=True, slots=True)
class GpuBattery(Measured):
    """The device, the machine, the versions, and what each part has found."""

    format: ClassVar[str] = "optcc-gpu-battery/1"
    own_path: ClassVar[Path] = RECORDS / "gpu-battery.json"
    docs_page: ClassVar[str] = "devices.md"

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

    def markdown(self) -> str:
        """A line for each part that checks, for each time, and for the slowest and the fastest reduction of each
        length."""
        rows = [
            (line.part, f"{line.cases} cases", f"{line.wrong} wrong", line.error or line.text)
            for line in self.lines
            if line.part in CHECKS
        ]
        rows += [
            (each.part, f"{each.what}, {show_size(each.size_bytes)}", f"{1e6 * each.seconds:.0f} us", _compare(each))
            for each in self.timings
        ]
        for size in dict.fromkeys(each.size_bytes for each in self.kernels):
            reducing = [each for each in self.kernels if each.size_bytes == size and each.moved > 2]
            for word, found in (("slowest", min), ("fastest", max)):
                each = found(reducing, key=lambda row: row.copy_share)
                speed = f"{each.moved * each.message_bytes_per_s / 1e9:.0f} GB/s read and written"
                what = f"{word} reduction of {show_size(size)}: {each.dtype} {each.kernel}"
                rows.append(("speed", what, speed, f"{100 * each.copy_share:.0f} % of the device's own copy"))
        name, driver = self.device["name"], self.device["driver"].split("  ")
        head = f"{name}, {next((word for word in driver if word[:1].isdigit()), '')}".rstrip(", ")
        return f"{head}\n\n{Card('', ('part', 'what', 'found', ''), tuple(rows)).markdown()}"

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
    words = [program, "--tool", "memcheck", "--error-exitcode", "9", *_words("kernels", True)]
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

    def across(self) -> None:
        self.streams.copy_across(self._device[0], self._device[1], self.n_bytes)

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
    timings, wrong, path = [], 0, ""
    for n_ranks in (2, 4):
        moves = [each for _ in range(2 * (n_ranks - 1)) for each in (copies.into, copies.out)]
        floor = _median(partial(copies.seconds, *moves), rounds)
        row, here, path = time_long(over_loopback, n_ranks, size, rounds, ring_rate(n_ranks, size, floor))
        wrong += here
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
        rows, _ = run_bench(over_loopback, 2, settings)
        wrong += sum(row.wrong for row in rows)
        assert rows[0].out_of_place is not None
        medians.append(rows[0].out_of_place.median_s)
    timing = BatteryTiming("step", "1 KiB, 2 ranks, on the GPU", 1024, medians[0], "in the host's memory", medians[1])
    return Found(BatteryLine("step", 2 * rounds, wrong, ""), [timing])


def _words(part: str, quick: bool) -> list[str]:
    """What starts the process of a part, or of one of its ranks."""
    return [sys.executable, "-m", "optcc.experiments.gpu_battery", "--part", part, *(["--quick"] if quick else [])]


def ipc_part(quick: bool) -> Found:
    """Ranks that are processes on one GPU."""
    return gpu_collectives.check_processes(_words("ipc", quick), quick)


def processes_part(quick: bool) -> Found:
    """The same, timed; each byte of a ring is copied 2 (p - 1) times in all."""
    _, n_bytes, rounds = process_times(quick)

    def copies_s(n_ranks: int) -> float:
        copies = _Copies(n_bytes)
        return _median(partial(copies.seconds, *[copies.across] * (2 * (n_ranks - 1))), rounds)

    return gpu_collectives.time_processes(_words("processes", quick), quick, copies_s)


TIMED: dict[str, Callable[[bool], Found]] = {
    "overlap": overlap_part,
    "step": step_part,
    "allreduce": allreduce_part,
    "processes": processes_part,
    "speed": speed_part,
}
"""Alone on the machine, one after the other."""
CHECKS: dict[str, Callable[[bool], Found]] = {
    "kernels": kernels_part,
    "staged": lambda quick: collectives(over_loopback, "staged", benches_of(10_000, quick)),
    "ipc": ipc_part,
    "ucx": lambda quick: collectives(over_ucx, "ucx", benches_of(1000, quick)),
    "sanitizer": sanitizer_part,
}
"""Begun in this order: if the time does not suffice, it is the last that are missing."""
PARTS = TIMED | CHECKS
_PROCESSORS_PER_PART = 4
"""That a part keeps busy: its ranks wait by running."""


def run_part(name: str, quick: bool, timeout_s: float) -> Found:
    """A part in a process of its own; a crash or a time-out is its line's error."""
    words, started, timeout_s = _words(name, quick), time.monotonic(), max(timeout_s, 1.0)
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


def _run_parts(quick: bool, ends_s: float) -> list[Found]:
    """All parts, in the order of `PARTS`."""

    def run(name: str) -> Found:
        found = run_part(name, quick, ends_s - time.monotonic())
        line = found.line
        click.echo(f"# {name}: {line.error or f'{line.wrong} wrong in {line.cases} cases'}", err=True)
        return found

    timed = [run(name) for name in TIMED]
    at_once = max(1, len(os.sched_getaffinity(0)) // _PROCESSORS_PER_PART)
    with ThreadPoolExecutor(at_once) as pool:
        return [*timed, *pool.map(run, CHECKS)]


@record_command(GpuBattery, RecordForm(quick={}, one_session="all parts share one limit of time", part="part"))
@click.option("--allow-missing", is_flag=True, help="Without a GPU, say so and exit with 0.")
@click.option("--limit", type=click.FloatRange(1), help="Seconds for all parts: 480, or 90 if it is quick.")
@click.option("--part", type=click.Choice(tuple(PARTS)), help="This part alone, in this process; prints JSON.")
@click.option("--rank", type=int, hidden=True, help="Of the processes of a part: which one this is.")
@click.option("--ranks", type=int, hidden=True, help="How many there are.")
@click.option("--meet", type=click.Path(path_type=Path), hidden=True, help="The file in which they meet.")
@click.option("--rate", type=click.IntRange(1), hidden=True, help="Bytes/s that each sends, if it is timed.")
def command(
    quick: bool,
    allow_missing: bool,
    limit: float | None,
    part: str | None,
    rank: int | None,
    ranks: int | None,
    meet: Path | None,
    rate: int | None,
) -> GpuBattery | None:
    """Show on this machine's GPU that kernels and collectives are right, and how fast they are."""
    try:
        device = describe_device()
    except EnvironmentMissing as error:
        if not allow_missing:
            raise
        click.echo(f"# GPU battery: not run: {error}")
        return None
    if part is not None:
        if rank is None or ranks is None or meet is None:
            found_here = PARTS[part](quick)
        else:
            found_here = gpu_collectives.ipc_rank(quick, rank, ranks, meet, rate or 0)
        click.echo(msgspec.json.encode(found_here).decode())
        return None
    found = _run_parts(quick, time.monotonic() + (limit or (QUICK_BUDGET_S if quick else BUDGET_S)))
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
