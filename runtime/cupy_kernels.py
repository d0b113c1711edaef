"""Kernels on a GPU: CuPy compiles and launches what `kernels.cu` says, on one stream.

    source          the CUDA text for one dtype and reduction
    CupyKernels     the same interface as NumpyKernels, on arrays in the GPU's memory
    PinnedStaging   messages through page-locked host memory, for transports that cannot take the GPU's
    DeviceStaging   messages in the GPU's memory, for those that can
    is_cuda_aware   whether an MPI library can

CuPy is imported here and nowhere else, when the first of them is made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from optcc.collective import check_reduction_of
from optcc.errors import EnvironmentMissing, InputError
from optcc.runtime.stored_types import stored_dtype
from optcc.runtime.transport import Bytes

THREADS = 256
BLOCKS_PER_PROCESSOR = 8
"""With 256 threads each, all that a multiprocessor can hold: 2048."""
VECTOR_BYTES = 16
OPERANDS_MAX = 4
"""Sources of one launch of `reduce_many`; more take several."""
SLOT_BYTES = 1 << 22
SLOTS = 2
TABLES_MAX = 256
OPTIONS = ("-std=c++17",)
_NAMES = {"min": "min_", "max": "max_"}
"""What the CUDA text calls a reduction, where that is a name in CUDA itself."""
FILL, EMPTY = 0, 1


@cache
def load_cupy() -> Any:
    """The module `cupy`. Raises EnvironmentMissing if it is not there or finds no GPU."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        raise EnvironmentMissing(f"GPU: {error}: pip install 'optcc[gpu]'") from None
    except Exception as error:  # CuPy has a class for each way in which a driver can be missing
        raise EnvironmentMissing(f"GPU: {error}: needs a GPU and its driver") from None
    if not count:
        raise EnvironmentMissing("GPU: none: must be at least one")
    return cupy


def source(pairs: Iterable[tuple[str, str]]) -> str:
    """CUDA for the kernels of each (dtype, reduction) of `pairs`; their names end in _DTYPE_REDUCTION or in _DTYPE.
    Those of an average are a sum's.

    >>> source([("bfloat16", "max")]).splitlines()[-2:]
    ['OPTCC_TYPE(bfloat16)', 'OPTCC_REDUCTION(bfloat16, max_, bfloat16_max)']

    Raises InputError for a dtype or reduction that does not exist, or that do not go together.
    """
    wanted = dict.fromkeys((dtype, _step(check_reduction_of(reduction, dtype))) for dtype, reduction in pairs)
    lines = [f"OPTCC_TYPE({dtype})" for dtype in dict.fromkeys(dtype for dtype, _ in wanted)]
    lines += [f"OPTCC_REDUCTION({dtype}, {_NAMES.get(step, step)}, {dtype}_{step})" for dtype, step in wanted]
    text = (Path(__file__).parent / "kernels.cu").read_text(encoding="utf-8")
    return "\n".join((text, *lines, ""))


def _step(reduction: str) -> str:
    return "sum" if reduction == "avg" else reduction


def count_blocks(n_bytes: int, n_processors: int) -> int:
    """Thread blocks for a pass over `n_bytes` on a GPU of `n_processors` multiprocessors: a thread for each vector of
    16 B, up to as many as run at once; then each takes several.

    >>> count_blocks(1, 132), count_blocks(1 << 20, 132), count_blocks(1 << 30, 132)
    (1, 256, 1056)
    """
    wanted = -(-n_bytes // (VECTOR_BYTES * THREADS))
    return max(1, min(wanted, n_processors * BLOCKS_PER_PROCESSOR))


@cache
def _load_functions(cupy: Any, dtype: str, reduction: str) -> dict[str, Any]:
    module = cupy.RawModule(code=source([(dtype, reduction)]), options=OPTIONS)
    reducing = [*(f"reduce{n}" for n in range(1, OPERANDS_MAX + 1)), "forward"]
    names = {each: f"{each}_{dtype}_{_step(reduction)}" for each in reducing}
    names |= {each: f"{each}_{dtype}" for each in ("copy", "divide", "pack", "unpack")}
    return {short: module.get_function(name) for short, name in names.items()}


class CupyKernels:
    """Kernels on a GPU, on `stream` (by default CuPy's current one), where every call only queues its work.

    Raises InputError as `NumpyKernels`, EnvironmentMissing without CuPy or a GPU.
    """

    __slots__ = ("_average", "_cupy", "_functions", "_n_processors", "_stored", "_tables", "stream")

    def __init__(self, dtype: str, reduction: str, *, stream: Any = None) -> None:
        check_reduction_of(reduction, dtype)
        self._cupy = cupy = load_cupy()
        self._stored = stored_dtype(dtype)
        self._average = reduction == "avg"
        self._functions = _load_functions(cupy, dtype, reduction)
        self._n_processors = int(cupy.cuda.Device().attributes["MultiProcessorCount"])
        self._tables: dict[tuple[tuple[int, int], ...], Any] = {}
        self.stream = cupy.cuda.get_current_stream() if stream is None else stream

    def view(self, data: Any) -> Any:
        """See `Kernels`."""
        return data.view(self._stored)

    def reduce(self, dst: Any, src: Any) -> None:
        """See `Kernels`."""
        self._launch("reduce1", dst, (dst, src, np.uint64(len(dst))))

    def reduce_many(self, dst: Any, sources: Sequence[Any]) -> None:
        """See `Kernels`."""
        for first in range(0, len(sources), OPERANDS_MAX):
            some = sources[first : first + OPERANDS_MAX]
            self._launch(f"reduce{len(some)}", dst, (dst, *some, np.uint64(len(dst))))

    def reduce_forward(self, dst: Any, src: Any, out: Any) -> None:
        """See `Kernels`."""
        self._launch("forward", dst, (dst, src, out, np.uint64(len(dst))))

    def bind_reduce(self, dst: Any, src: Any) -> Callable[[], Any]:
        """See `Kernels`."""
        return partial(self.reduce, dst, src)

    def bind_copy(self, dst: Any, src: Any) -> Callable[[], Any]:
        """See `Kernels`."""
        return partial(self.copy, dst, src)

    def copy(self, dst: Any, src: Any) -> None:
        """See `Kernels`."""
        count = np.uint64(dst.nbytes // self._stored.itemsize)
        if 0 < abs(dst.data.ptr - src.data.ptr) < dst.nbytes:
            with self.stream:
                apart = self._cupy.empty(len(src), dtype=src.dtype)
            self._launch("copy", apart, (apart, src, count))
            src = apart
        self._launch("copy", dst, (dst, src, count))

    def pack(self, out: Any, pieces: Sequence[Any]) -> None:
        """See `Kernels`."""
        self._launch("pack", out, (out, self._table(pieces)), len(pieces))

    def unpack(self, packed: Any, pieces: Sequence[Any]) -> None:
        """See `Kernels`."""
        self._launch("unpack", packed, (packed, self._table(pieces)), len(pieces))

    def finish(self, data: Any, n_ranks: int) -> None:
        """See `Kernels`."""
        if self._average:
            self._launch("divide", data, (data, np.uint64(n_ranks), np.uint64(len(data))))

    def mark(self) -> Any:
        """An event on the stream; see `Kernels`."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return event

    def is_reached(self, mark: Any) -> bool:
        """See `Kernels`."""
        return bool(mark.done)

    def capture(self, work: Callable[[], None]) -> Any:
        """The calls that `work` makes of these kernels, as a CUDA graph that `launch(stream)` repeats: the local part
        of a plan in one launch, on the same memory each time. They are not carried out now.

        Raises InputError on the default stream, which cannot be captured.
        """
        if not self.stream.ptr:
            raise InputError("stream: the default one: must be another, to be captured")
        self._warm()
        with self.stream:
            self.stream.begin_capture()
            try:
                work()
            finally:
                graph = self.stream.end_capture()
        return graph

    def _warm(self) -> None:
        """Runs every kernel on nothing: the driver loads a kernel when it first runs, and cannot while it captures."""
        nothing = np.uint64(0)
        with self.stream:
            table = self._cupy.zeros(3, dtype=np.uint64)
            for name, function in self._functions.items():
                if name in ("pack", "unpack"):
                    arguments: tuple[Any, ...] = (nothing, table)
                else:
                    n_pointers = {"forward": 3, "copy": 2, "divide": 1}.get(name) or 1 + int(name[-1])
                    divisor = (np.uint64(1),) if name == "divide" else ()
                    arguments = (nothing,) * n_pointers + (*divisor, nothing)
                function((1, 1), (1,), arguments)

    def _launch(self, name: str, over: Any, arguments: tuple[Any, ...], n_rows: int = 1) -> None:
        if not len(over) or not n_rows:
            return
        # The rows of a table share the threads, as if they were of one length.
        n_blocks = count_blocks(-(-over.nbytes // n_rows), self._n_processors)
        with self.stream:
            self._functions[name]((n_blocks, n_rows), (THREADS,), arguments)

    def _table(self, pieces: Sequence[Any]) -> Any:
        """Address, place and length of each piece, in the GPU's memory; kept, because a plan has the same again."""
        key = tuple((piece.data.ptr, len(piece)) for piece in pieces)
        table = self._tables.get(key)
        if table is None:
            lengths = np.array([length for _, length in key], dtype=np.uint64)
            rows = np.empty((len(key), 3), dtype=np.uint64)
            rows[:, 0] = [address for address, _ in key]
            rows[:, 1] = np.cumsum(lengths) - lengths
            rows[:, 2] = lengths
            if len(self._tables) == TABLES_MAX:
                self._tables.clear()
            with self.stream:
                table = self._tables[key] = self._cupy.asarray(rows.reshape(-1))
        return table


class PinnedStaging:
    """Messages between the GPU's memory and the host's, on `stream`, in order with the kernels that run on it.

    Page-locked memory (`host`) is read and written by the GPU itself, and calls only queue that. Other memory goes
    through two page-locked slots of `slot_bytes`, and is done with when a call returns: while the GPU works on one
    slot, the processor copies the other.
    """

    __slots__ = ("_cupy", "_events", "_in", "_out", "_pinned", "_slot_bytes", "_slots", "_stream")

    def __init__(self, stream: Any, *, slot_bytes: int = SLOT_BYTES) -> None:
        self._cupy, self._stream, self._slot_bytes = load_cupy(), stream, slot_bytes
        self._pinned: list[Bytes] = []
        self._slots: list[Bytes] = []
        self._events: list[Any] = [None] * SLOTS
        self._in: int = self._cupy.cuda.runtime.memcpyHostToDevice
        self._out: int = self._cupy.cuda.runtime.memcpyDeviceToHost

    def device(self, n_bytes: int) -> Any:
        """`n_bytes` of the GPU's memory."""
        with self._stream:
            return self._cupy.empty(n_bytes, dtype=np.uint8)

    def host(self, n_bytes: int) -> Bytes:
        """`n_bytes` of page-locked memory, which lives as long as the staging."""
        memory = self._cupy.cuda.alloc_pinned_memory(max(n_bytes, 1))
        array = np.frombuffer(memory, dtype=np.uint8, count=n_bytes)
        self._pinned.append(array)
        return array

    def store(self, host: Bytes, device: Any) -> None:
        """host = device."""
        if self._is_pinned(host):
            self._queue(_address(host), device.data.ptr, host.nbytes, self._out)
            return
        pieces = list(self._pieces(host.nbytes))
        for act, chunk in staging_order(len(pieces), SLOTS):
            slot, (start, stop) = chunk % SLOTS, pieces[chunk]
            page = self._slot(slot)[: stop - start]
            if act == FILL:
                self._queue(_address(page), device.data.ptr + start, stop - start, self._out)
                self._note(slot)
            else:
                self._wait(slot)
                np.copyto(host[start:stop], page)

    def load(self, device: Any, host: Bytes) -> None:
        """device = host."""
        if self._is_pinned(host):
            self._queue(device.data.ptr, _address(host), host.nbytes, self._in)
            return
        for chunk, (start, stop) in enumerate(self._pieces(host.nbytes)):
            slot = chunk % SLOTS
            self._wait(slot)
            page = self._slot(slot)[: stop - start]
            np.copyto(page, host[start:stop])
            self._queue(device.data.ptr + start, _address(page), stop - start, self._in)
            self._note(slot)

    def _pieces(self, n_bytes: int) -> Iterator[tuple[int, int]]:
        return ((start, min(start + self._slot_bytes, n_bytes)) for start in range(0, n_bytes, self._slot_bytes))

    def _slot(self, slot: int) -> Bytes:
        while len(self._slots) <= slot:
            self._slots.append(self.host(self._slot_bytes))
        return self._slots[slot]

    def _wait(self, slot: int) -> None:
        """Until the GPU is done with a slot."""
        if self._events[slot] is not None:
            self._events[slot].synchronize()
            self._events[slot] = None

    def _note(self, slot: int) -> None:
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self._stream)
        self._events[slot] = event

    def _queue(self, dst: int, src: int, n_bytes: int, kind: int) -> None:
        self._cupy.cuda.runtime.memcpyAsync(dst, src, n_bytes, kind, self._stream.ptr)

    def _is_pinned(self, host: Bytes) -> bool:
        first = _address(host)
        ends = ((_address(each), _address(each) + each.nbytes) for each in self._pinned)
        return any(start <= first and first + host.nbytes <= stop for start, stop in ends)


class DeviceStaging:
    """Messages that stay in the GPU's memory, for a transport that takes it (`is_cuda_aware`): a copy apart from what
    the kernels work on, on `stream`."""

    __slots__ = ("_cupy", "_stream")

    def __init__(self, stream: Any) -> None:
        self._cupy, self._stream = load_cupy(), stream

    def device(self, n_bytes: int) -> Any:
        """`n_bytes` of the GPU's memory."""
        with self._stream:
            return self._cupy.empty(n_bytes, dtype=np.uint8)

    def host(self, n_bytes: int) -> Any:
        """`n_bytes` of the GPU's memory, for messages."""
        return self.device(n_bytes)

    def store(self, host: Any, device: Any) -> None:
        """host = device."""
        self._copy(host, device)

    def load(self, device: Any, host: Any) -> None:
        """device = host."""
        self._copy(device, host)

    def _copy(self, dst: Any, src: Any) -> None:
        runtime = self._cupy.cuda.runtime
        kind = runtime.memcpyDeviceToDevice
        runtime.memcpyAsync(dst.data.ptr, src.data.ptr, dst.nbytes, kind, self._stream.ptr)


def staging_order(n_chunks: int, n_slots: int) -> Iterator[tuple[int, int]]:
    """In which order chunks go through slots, chunk c through slot c mod `n_slots`: (FILL, c) fills its slot,
    (EMPTY, c) empties it. Fills run ahead by as much as there are slots.

    >>> list(staging_order(3, 2))
    [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2)]
    """
    for chunk in range(min(n_slots, n_chunks)):
        yield FILL, chunk
    for chunk in range(n_chunks):
        yield EMPTY, chunk
        if chunk + n_slots < n_chunks:
            yield FILL, chunk + n_slots


def is_cuda_aware(mpi: Any) -> bool:
    """Whether the MPI library behind the module `mpi` (`mpi4py.MPI`, initialised) takes pointers into a GPU's memory.

    MPI 4.1 says so in the communicator's info `mpi_memory_alloc_kinds`; Open MPI has a function of its own.
    """
    kinds = mpi.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or ""
    if "cuda" in {kind.strip().partition(":")[0] for kind in kinds.split(",")}:
        return True
    # The extension is loaded already; what it is linked with is found through it.
    query = getattr(ctypes.CDLL(mpi.__file__), "MPIX_Query_cuda_support", None)
    return query is not None and bool(query())


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])
