"""Kernels held to float64 and timed against the memory bandwidth of the same run, on the processor or on a GPU.

    optcc experiment kernels [--device cpu|gpu]

First every dtype x reduction x size x alignment is compared, element by element, with arithmetic in float64 (in
integers of Python's kind for float64 itself, in int64 for integers) that is rounded once, by other means than the
kernels'. Then every dtype x reduction is timed, and a copy before each of them: all cases once in each round, medians
over the rounds. What is reported is the share of the copy's bandwidth, both counted as bytes read and written: a copy
moves 2 bytes for each byte of a message, a reduction 3. On the processor, times are those of the thread, so that
others on the machine do not count; on a GPU they are between two events on the stream, around LAUNCHES launches.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import click
import msgspec
import numpy as np
import numpy.typing as npt

from optcc.cli import SizeType
from optcc.collective import DTYPE_BYTES, FLOATS, check_dtype, reductions_of
from optcc.errors import EXIT_DONE, EXIT_REFUTED, InputError
from optcc.experiments.record import RECORDS, Check, these_versions, this_machine
from optcc.experiments.recorder import IN_TURNS, Measured, RecordForm, record_command
from optcc.runtime.kernels import Array, NumpyKernels
from optcc.runtime.stored_types import stored_dtype
from optcc.show import Card

DEVICES = ("cpu", "gpu")
COUNTS = (0, 1, 15, 16, 17, 1000, 4099)
OFFSETS = ((0, 0), (1, 1), (0, 1), (5, 2))
"""Offsets of destination and sources from an aligned address, in elements."""
ROUNDS = 9
LAUNCHES = 20
"""Launches between two events; enough to hide Python's cost of the first."""
EXACT_COUNT_MAX = 10_000
"""More elements of float64 are compared with NumPy's, which the shorter ones have compared with fractions."""
N_RANKS = 7
_MARGIN_BYTES = 64
_LARGE_BLOCKS = 300
_SMALLEST = {"float16": -24, "bfloat16": -133}
"""The exponent of the smallest number above zero."""
_DIGITS = {"float16": 11, "bfloat16": 8}
_LARGEST = {"float16": 65504.0, "bfloat16": 255.0 * 2.0**120}
_COPY = "copy"
DOCS_DTYPES = ("float32", "float16", "bfloat16", "int32", "int8")
DOCS_KERNELS = ("sum", "max", "prod", "avg, division")


# --- what must come out -----------------------------------------------------------------------------------------------


def open_values(stored: Array, dtype: str) -> Array:
    """Floats as float64 (exactly), integers as they are."""
    if dtype not in FLOATS:
        return stored
    with np.errstate(invalid="ignore"):  # a NaN that signals
        if dtype == "bfloat16":
            return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return stored.astype(np.float64)


def round_values(values: npt.NDArray[np.float64], dtype: str) -> Array:
    """float64 rounded once to `dtype`, to nearest even; a bfloat16 as its bits.

    >>> round_values(np.array([1.0, 1.00390625, 1.01171875]), "bfloat16").tolist() == [0x3F80, 0x3F80, 0x3F82]
    True
    """
    if dtype not in _DIGITS:
        return values.astype(dtype)
    with np.errstate(all="ignore"):
        exponent = np.maximum(np.frexp(values)[1] - _DIGITS[dtype], _SMALLEST[dtype])
        quantum = np.ldexp(1.0, exponent)
        rounded = np.where(np.isfinite(values), np.rint(values / quantum) * quantum, values)
        rounded = np.where(np.abs(rounded) > _LARGEST[dtype], np.copysign(np.inf, rounded), rounded)
        rounded = np.copysign(rounded, values)
        if dtype == "float16":
            return rounded.astype(np.float16)
        return (rounded.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def reference(dtype: str, reduction: str, dst: Array, src: Array) -> Array:
    """dst op src, one step, as docs/kernels.md says it."""
    a, b = open_values(dst, dtype), open_values(src, dtype)
    if reduction in ("min", "max"):
        below = a < b if reduction == "min" else a > b
        chosen = np.where(below, dst, src)
        if dtype not in FLOATS:
            return chosen
        # Of two zeros min takes the one with the sign, max the other.
        chosen = np.where((a == b) & (np.signbit(a) == (reduction == "min")), dst, chosen)
        return np.where(np.isnan(a), dst, chosen)
    if dtype not in FLOATS:
        step = {"sum": np.add, "avg": np.add, "prod": np.multiply}
        step |= {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
        wide: Array = step[reduction](a.astype(np.int64), b.astype(np.int64)).astype(dst.dtype)
        return wide
    with np.errstate(all="ignore"):
        result = a * b if reduction == "prod" else a + b
        if dtype == "float64" and len(result) <= EXACT_COUNT_MAX:
            return _exactly(operator.mul if reduction == "prod" else operator.add, a, b, result)
        return round_values(result, dtype)


def reference_average(dtype: str, total: Array, n_ranks: int) -> Array:
    """The sums divided by `n_ranks`; integers truncate toward zero, 16-bit floats are divided in float32 first."""
    values = open_values(total, dtype)
    if dtype not in FLOATS:
        return np.array([_truncate(int(each), n_ranks) for each in values], dtype=total.dtype)
    with np.errstate(all="ignore"):
        quotient = values / n_ranks
        if dtype == "float64" and len(quotient) <= EXACT_COUNT_MAX:
            return _exactly(lambda x, y: x / y, values, np.full_like(values, n_ranks), quotient)
        if dtype == "float64":
            return quotient
        return round_values(quotient.astype(np.float32).astype(np.float64), dtype)


def _exactly(step: Callable[[Any, Any], Any], a: Array, b: Array, found: Array) -> Array:
    """`found`, with what is finite replaced by the exact result rounded once (Python rounds fractions correctly)."""
    exact = found.copy()
    for place in np.flatnonzero(np.isfinite(a) & np.isfinite(b) & (found != 0)):
        value = step(Fraction(float(a[place])), Fraction(float(b[place])))
        try:
            exact[place] = float(value)
        except OverflowError:
            exact[place] = np.inf if value > 0 else -np.inf
    return exact


def _truncate(value: int, divisor: int) -> int:
    return abs(value) // divisor * (-1 if value < 0 else 1)


def draw_operand(dtype: str, count: int, rng: np.random.Generator) -> Array:
    """`count` elements: a third any bits at all, a third near one another, a third edge cases."""
    size, stored = check_dtype(dtype), stored_dtype(dtype)
    anything = rng.integers(0, 256, count * size, dtype=np.uint8).view(stored)
    if dtype in FLOATS:
        near = round_values(rng.standard_normal(count), dtype)
        largest = _LARGEST.get(dtype) or float(np.finfo(stored).max)
        smallest = 2.0 ** _SMALLEST[dtype] if dtype in _SMALLEST else float(np.finfo(stored).smallest_subnormal)
        edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, largest, -largest, smallest, -smallest]
        corners = round_values(np.array(edges), dtype)
    else:
        limits = np.iinfo(stored)
        near = rng.integers(-3 if limits.min else 0, 4, count).astype(stored)
        corners = np.array([limits.min, limits.max, 0, 1, limits.max // 2], dtype=stored)
    kind = rng.integers(0, 3, count)
    chosen: Array = np.choose(kind, [anything, near, rng.choice(corners, count)])
    return chosen


def count_wrong(found: Array, wanted: Array, dtype: str) -> int:
    """Elements whose bits differ; a NaN is as good as any other."""
    bits = np.dtype(f"u{check_dtype(dtype)}")
    wrong = found.view(bits) != wanted.view(bits)
    if dtype in FLOATS:
        wrong &= ~(np.isnan(open_values(found, dtype)) & np.isnan(open_values(wanted, dtype)))
    return int(np.count_nonzero(wrong))


# --- devices ----------------------------------------------------------------------------------------------------------


class Steps(Protocol):
    """The kernels of a dtype and reduction, on arrays of a device; those of `CupyKernels` besides on a GPU."""

    def reduce(self, dst: Any, src: Any) -> Any:
        """dst = dst op src."""
        ...

    def copy(self, dst: Any, src: Any) -> Any:
        """dst = src."""
        ...

    def finish(self, data: Any, n_ranks: int) -> Any:
        """Divides an average."""
        ...


class CudaSteps:
    """`CupyKernels` on arrays instead of addresses."""

    def __init__(self, kernels: Any, table: Array) -> None:
        self._kernels, self._table = kernels, table

    def reduce(self, dst: Any, src: Any) -> None:
        self._kernels.reduce(dst.data.ptr, src.data.ptr, len(dst))

    def forward(self, dst: Any, src: Any, out: Any) -> None:
        """dst = dst op src, and out too."""
        self._kernels.forward(dst.data.ptr, src.data.ptr, out.data.ptr, len(dst))

    def copy(self, dst: Any, src: Any) -> None:
        self._kernels.copy(dst.data.ptr, src.data.ptr, len(dst))

    def finish(self, data: Any, n_ranks: int) -> None:
        self._kernels.finish(data.data.ptr, n_ranks, len(data))

    def batch(self, rows: Sequence[tuple[Any, Any, Any, bool]]) -> None:
        """Of each row: where, what, where too or None, and whether it is reduced or copied. One batch at a time."""
        from optcc.runtime.cupy_kernels import KernelStep

        steps = [
            KernelStep(dst.data.ptr, src.data.ptr, 0 if out is None else out.data.ptr, len(dst), int(reduces))
            for dst, src, out, reduces in rows
        ]
        self._kernels.batch(self._table, steps)


class Device(Protocol):
    """Where kernels run. `large_bytes` are for many blocks of threads, 0 for a single thread."""

    name: str
    large_bytes: int

    def kernels(self, dtype: str, reduction: str) -> Steps:
        """The kernels of that place."""
        ...

    def put(self, data: Array) -> Any:
        """A copy of `data` there."""
        ...

    def get(self, data: Any) -> Array:
        """A copy of `data` on the host, after all earlier work."""
        ...

    def copy(self, dst: Any, src: Any) -> None:
        """The device's own copy, the reference for bandwidth."""
        ...

    def seconds(self, work: Callable[[], None]) -> float:
        """What `work` takes."""
        ...


class CpuDevice:
    """This one, one thread; `compiled` as in NumpyKernels."""

    def __init__(self, *, compiled: bool = True) -> None:
        self.name, self.large_bytes, self._compiled = "cpu", 0, compiled

    def kernels(self, dtype: str, reduction: str) -> Steps:
        return NumpyKernels(dtype, reduction, compiled=self._compiled)

    def put(self, data: Array) -> Array:
        # As far behind an aligned address as on a GPU.
        room = np.empty(data.nbytes + 256, dtype=np.uint8)
        first = -room.__array_interface__["data"][0] % 256
        copied = room[first : first + data.nbytes].view(data.dtype)
        copied[...] = data
        return copied

    def get(self, data: Array) -> Array:
        return data.copy()

    def copy(self, dst: Array, src: Array) -> None:
        np.copyto(dst, src)

    def seconds(self, work: Callable[[], None]) -> float:
        started = time.thread_time()
        work()
        return time.thread_time() - started


class CudaDevice:
    """The current GPU, on a stream of its own. Raises EnvironmentMissing without CuPy or a GPU."""

    def __init__(self) -> None:
        from optcc.runtime.cupy_kernels import (
            BATCH_ROWS_MAX,
            ROW_WORDS,
            THREADS,
            VECTOR_BYTES,
            load_cupy,
        )

        self.name, self._cupy = "gpu", load_cupy()
        self.device_id = int(self._cupy.cuda.Device().id)
        n_words = ROW_WORDS * BATCH_ROWS_MAX
        self._table = np.frombuffer(self._cupy.cuda.alloc_pinned_memory(8 * n_words), np.uint64, n_words)
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self.large_bytes = _LARGE_BLOCKS * THREADS * VECTOR_BYTES

    def kernels(self, dtype: str, reduction: str) -> Steps:
        from optcc.runtime.cupy_kernels import CupyKernels

        return CudaSteps(CupyKernels(dtype, reduction, self._stream, self.device_id), self._table)

    def put(self, data: Array) -> Any:
        with self._stream:
            copied = self._cupy.asarray(data)
        self._stream.synchronize()
        return copied

    def get(self, data: Any) -> Array:
        self._stream.synchronize()
        fetched: Array = self._cupy.asnumpy(data)
        return fetched

    def copy(self, dst: Any, src: Any) -> None:
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(dst.data.ptr, src.data.ptr, dst.nbytes, runtime.memcpyDeviceToDevice, self._stream.ptr)

    def seconds(self, work: Callable[[], None]) -> float:
        cuda = self._cupy.cuda
        first, last = cuda.Event(), cuda.Event()
        first.record(self._stream)
        for _ in range(LAUNCHES):
            work()
        last.record(self._stream)
        last.synchronize()
        return float(cuda.get_elapsed_time(first, last)) / 1000 / LAUNCHES

    def card(self) -> dict[str, Any]:
        """What the GPU is."""
        properties = self._cupy.cuda.runtime.getDeviceProperties(self._cupy.cuda.Device().id)
        return {"gpu": properties["name"].decode(), "multiprocessors": properties["multiProcessorCount"]}


# --- checks -----------------------------------------------------------------------------------------------------------


class _Operands:
    """Arrays on a device, each inside a larger one whose other bytes must stay as they are."""

    def __init__(self, device: Device, dtype: str) -> None:
        self.device, self.dtype, self.size = device, dtype, check_dtype(dtype)
        self.blocks: list[tuple[Any, Array, int]] = []

    def add(self, values: Array, offset: int) -> Any:
        first = _MARGIN_BYTES + offset * self.size
        block = np.full(first + values.nbytes + _MARGIN_BYTES, 0xA5, dtype=np.uint8)
        block[first : first + values.nbytes] = values.view(np.uint8)
        there = self.device.put(block)
        self.blocks.append((there, block, first))
        return there[first : first + values.nbytes].view(stored_dtype(self.dtype))

    def wrong(self, wanted: Sequence[Array]) -> int:
        """Elements that are not as `wanted` says, and bytes around them that were changed."""
        total = 0
        for (there, block, first), values in zip(self.blocks, wanted, strict=True):
            found, stop = self.device.get(there), first + values.nbytes
            total += count_wrong(found[first:stop].view(values.dtype), values, self.dtype)
            total += int(np.count_nonzero(found[:first] != block[:first]))
            total += int(np.count_nonzero(found[stop:] != block[stop:]))
        return total


def check_case(
    device: Device, dtype: str, reduction: str, count: int, offsets: tuple[int, int], rng: np.random.Generator
) -> int:
    """Wrong elements over every kernel of (dtype, reduction) on operands that stand at `offsets`."""
    kernels = device.kernels(dtype, reduction)
    own, *others = (draw_operand(dtype, count, rng) for _ in range(3))
    wrong = 0
    with np.errstate(all="ignore"):
        wanted = reference(dtype, reduction, own, others[0])
        given = _Operands(device, dtype)
        kernels.reduce(given.add(own, offsets[0]), given.add(others[0], offsets[1]))
        wrong += given.wrong([wanted, others[0]])
        if isinstance(kernels, CudaSteps):
            given = _Operands(device, dtype)
            dst, src, out = (
                given.add(each, offset) for each, offset in zip((own, *others), (*offsets, 0), strict=True)
            )
            kernels.forward(dst, src, out)
            wrong += given.wrong([wanted, others[0], wanted])
            given = _Operands(device, dtype)
            rows = [[given.add(each, offset) for each in (own, *others)] for offset in offsets]
            kernels.batch([(*rows[0], True), (*rows[1], False)])
            wrong += given.wrong([wanted, others[0], wanted, others[0], others[0], others[0]])
        given = _Operands(device, dtype)
        kernels.finish(given.add(own, offsets[0]), N_RANKS)
        wrong += given.wrong([reference_average(dtype, own, N_RANKS) if reduction == "avg" else own])
    return wrong


def check_moves(device: Device, dtype: str, count: int, offsets: tuple[int, int], rng: np.random.Generator) -> int:
    """Wrong elements over a copy."""
    values, others = draw_operand(dtype, count, rng), draw_operand(dtype, count, rng)
    given = _Operands(device, dtype)
    device.kernels(dtype, "sum").copy(given.add(others, offsets[0]), given.add(values, offsets[1]))
    return given.wrong([values, values])


def check(
    device: Device,
    seed: int,
    say: Callable[[str], None] = lambda line: None,
    *,
    dtypes: Sequence[str] | None = None,
    counts: Sequence[int] | None = None,
) -> int:
    """Wrong elements over every dtype x reduction x size x alignment, all of them unless given; on a GPU the last size
    is of many blocks, and a bit."""
    rng, wrong = np.random.default_rng(seed), 0
    counts = COUNTS if counts is None else counts
    for dtype in DTYPE_BYTES if dtypes is None else dtypes:
        large = device.large_bytes // check_dtype(dtype) + 3
        for reduction in (*reductions_of(dtype), _COPY):
            here = 0
            for count in (*counts, large) if device.large_bytes else counts:
                for offsets in OFFSETS if count != large else OFFSETS[1:3]:
                    if reduction == _COPY:
                        here += check_moves(device, dtype, count, offsets, rng)
                    else:
                        here += check_case(device, dtype, reduction, count, offsets, rng)
            say(f"{dtype} {reduction}: {here} wrong")
            wrong += here
    return wrong


# --- times ------------------------------------------------------------------------------------------------------------


class KernelTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kernel on messages of `size_bytes`: what each round took, and the device's copy just before it.

    `moved` is bytes read and written for each byte of the message; the copy's are 2.
    """

    dtype: str
    kernel: str
    size_bytes: int
    moved: int
    seconds: list[float]
    copy_seconds: list[float]

    @property
    def message_bytes_per_s(self) -> float:
        """Bytes of one operand a second, at the median."""
        return self.size_bytes / statistics.median(self.seconds)

    @property
    def copy_share(self) -> float:
        """The bandwidth as a share of the copy's: the median over rounds."""
        pairs = zip(self.seconds, self.copy_seconds, strict=True)
        return statistics.median(self.moved / seconds / (2 / copied) for seconds, copied in pairs)


@dataclass(frozen=True, slots=True)
class KernelSpeed(Measured):
    """The device, the machine, the versions, how many elements were wrong, and the rows."""

    format: ClassVar[str] = "optcc-kernels/1"
    own_path: ClassVar[Path] = RECORDS / "kernels-cpu.json"
    rooms: ClassVar[tuple[str, ...]] = ("optcc", "runtime")
    docs_page: ClassVar[str] = "kernels.md"

    device: str
    machine: dict[str, Any]
    versions: dict[str, str]
    wrong: int
    rows: tuple[KernelTiming, ...]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.rows):
            for field, seconds in (("seconds", row.seconds), ("copy_seconds", row.copy_seconds)):
                good = bool(seconds) and len(seconds) == len(row.seconds) and min(seconds) > 0
                check(f"rows[{number}].{field}", seconds, good, "be one or more, above zero, as many as seconds")

    def card(self) -> Card:
        rows = tuple(
            (
                row.dtype,
                row.kernel,
                f"{row.size_bytes / 2**20:g} MiB",
                f"{row.message_bytes_per_s / 1e9:.1f} GB/s",
                f"{100 * row.copy_share:.0f} %",
            )
            for row in self.rows
        )
        return Card(f"kernels on {self.device}", ("dtype", "kernel", "message", "speed", "of copy bandwidth"), rows)

    def markdown(self) -> str:
        """Of some dtypes and kernels the speed and the share of the copy's bandwidth, a line for each dtype."""
        found = {(row.dtype, row.kernel): row for row in self.rows}
        rows = []
        for dtype in DOCS_DTYPES:
            some = [found[dtype, kernel] for kernel in DOCS_KERNELS]
            cells = (f"{each.message_bytes_per_s / 1e9:.1f} GB/s, {100 * each.copy_share:.0f} %" for each in some)
            rows.append((f"`{dtype}`", *cells))
        return Card("", ("", *DOCS_KERNELS), tuple(rows)).markdown()

    @property
    def target(self) -> Path:
        return RECORDS / f"kernels-{self.device}.json"

    def remarks(self) -> list[str]:
        return [f"# Wrong elements: {self.wrong} {'FAILED' if self.wrong else 'OK'}"]

    @property
    def exit_code(self) -> int:
        return EXIT_REFUTED if self.wrong else EXIT_DONE


def measure(
    device: Device, size_bytes: int, rounds: int, dtypes: Sequence[str] = tuple(DTYPE_BYTES)
) -> list[KernelTiming]:
    """Times every kernel of `dtypes` on messages of `size_bytes`, a copy before each, in `rounds` rounds after one
    that is not counted.

    Raises InputError for fewer than one round, or a size that holds no whole number of elements.
    """
    if rounds < 1 or size_bytes < 8 or size_bytes % 8:
        raise InputError(f"{rounds} rounds of {size_bytes} B: must be at least one, of a multiple of 8 B")
    rng = np.random.default_rng(0)
    rows = []
    for dtype in dtypes:
        count = size_bytes // check_dtype(dtype)
        # Ones: no reduction of them overflows, underflows or gives NaN.
        ones = round_values(np.ones(count), dtype) if dtype in FLOATS else rng.integers(0, 2, count).astype(dtype)
        arrays = [device.put(ones) for _ in range(3)]
        cases = list(_cases(device, dtype, arrays))
        taken: list[list[float]] = [[] for _ in cases]
        copied: list[list[float]] = [[] for _ in cases]
        for number in range(rounds + 1):
            for (_, _, work, restore), times, copies in zip(cases, taken, copied, strict=True):
                restore()
                copy_s = device.seconds(partial(device.copy, arrays[1], arrays[2]))
                with np.errstate(all="ignore"):
                    spent_s = device.seconds(work)
                if number:
                    times.append(spent_s)
                    copies.append(copy_s)
        named = zip(cases, taken, copied, strict=True)
        rows += [
            KernelTiming(dtype, name, size_bytes, moved, times, copies) for (name, moved, _, _), times, copies in named
        ]
    return rows


def _cases(
    device: Device, dtype: str, arrays: list[Any]
) -> Iterator[tuple[str, int, Callable[[], None], Callable[[], None]]]:
    """Name, bytes moved for each byte of the message, the timed work, and how to restore its operands before."""
    dst, *sources = arrays

    def restore() -> None:
        device.copy(dst, sources[0])

    for reduction in reductions_of(dtype):
        kernels = device.kernels(dtype, reduction)
        if reduction == "avg":
            yield "avg, division", 2, partial(kernels.finish, dst, N_RANKS), restore
            continue
        yield reduction, 3, partial(kernels.reduce, dst, sources[0]), restore
        if reduction == "sum":
            if isinstance(kernels, CudaSteps):
                yield "sum, forwarded", 4, partial(kernels.forward, dst, sources[0], sources[1]), restore
            yield _COPY, 2, partial(kernels.copy, dst, sources[0]), restore


@record_command(KernelSpeed, RecordForm(quick={"size": 2**20, "rounds": 3}, one_session=IN_TURNS))
@click.option("--device", "where", type=click.Choice(DEVICES), default="cpu", show_default=True)
@click.option("--size", type=SizeType(), default="64MiB", show_default=True, help="Of a message.")
@click.option("--rounds", type=click.IntRange(1), default=ROUNDS, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the numbers that are checked.")
def command(where: str, size: int, rounds: int, seed: int) -> KernelSpeed:
    """Check every kernel against float64, time it against a copy, and write the record."""
    machine = this_machine()
    device: Device
    if where == "gpu":
        device = gpu = CudaDevice()
        machine |= gpu.card()
    else:
        device = CpuDevice()
    click.echo(f"seed {seed}", err=True)
    wrong = check(device, seed, lambda line: click.echo(line, err=True))
    return KernelSpeed(where, machine, these_versions(), wrong, tuple(measure(device, size, rounds)))
