"""Kernels on a GPU: CuPy compiles and launches what `kernels.cu` says, on one stream of one device.

    source          the CUDA text for some dtypes and reductions
    CupyKernels     what the engine asks for on a GPU: reduce, forward, copy, batch, divide
    load_cupy       the module, which is imported here and nowhere else, when the first of them is made

Operands are addresses: a kernel reads and writes its device's memory, and page-locked memory of the host, which has one
address for both (CUDA's unified virtual addressing).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from optcc.collective import check_dtype, check_reduction_of
from optcc.errors import EnvironmentMissing
from optcc.runtime.stored_types import stored_dtype

THREADS = 256
BLOCKS_MAX = 2**31 - 1
"""Of a grid's first side, which CUDA says."""
VECTOR_BYTES = 16
BATCH_ROWS_MAX = 64
ROW_WORDS = 5
OPTIONS = ("-std=c++17",)
_NAMES = {"min": "min_", "max": "max_"}
"""What the CUDA text calls a reduction, where that is a name in CUDA itself."""


class KernelStep(NamedTuple):
    """One step of a batch, as `kernels.cu` reads it: addresses to write, to read and to write too (0: none), the number
    of elements, and 1 to reduce, 0 to copy."""

    dst: int
    src: int
    out: int
    n_elements: int
    reduces: int


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


def count_blocks(n_bytes: int) -> int:
    """Thread blocks for a pass over `n_bytes`: a thread for each vector of 16 B. As many threads as run at once, each
    with several vectors, are slower on an H200 for long messages.

    >>> count_blocks(1), count_blocks(1 << 20), count_blocks(1 << 30)
    (1, 256, 262144)
    """
    return max(1, min(-(-n_bytes // (VECTOR_BYTES * THREADS)), BLOCKS_MAX))


class _Loaded(NamedTuple):
    """The kernels of a dtype and reduction on a device."""

    cupy: Any
    functions: dict[str, Any]


_loaded: dict[tuple[int, str, str], _Loaded] = {}
"""By device, dtype and reduction."""


def _load_functions(cupy: Any, device_id: int, dtype: str, reduction: str) -> _Loaded:
    """Compiled for the device, and run on nothing: CUDA loads a kernel when it first runs, which may wait for the
    device and take memory, and must not fall into a run."""
    key = device_id, dtype, _step(reduction)
    known = _loaded.get(key)
    if known is not None and known.cupy is cupy:
        return known
    device = cupy.cuda.Device(device_id)
    with device:
        module = cupy.RawModule(code=source([(dtype, reduction)]), options=OPTIONS)
        names = {each: f"{each}_{dtype}_{_step(reduction)}" for each in ("reduce", "forward", "batch")}
        names |= {each: f"{each}_{dtype}" for each in ("copy", "divide")}
        functions = {short: module.get_function(name) for short, name in names.items()}
        nothing, stream = np.uint64(0), cupy.cuda.Stream(non_blocking=True)
        table = np.frombuffer(cupy.cuda.alloc_pinned_memory(8 * ROW_WORDS), np.uint64, ROW_WORDS)
        table[:] = 0
        with stream:
            for name, n_arguments in (("reduce", 3), ("forward", 4), ("copy", 3)):
                functions[name]((1, 1), (1,), (nothing,) * n_arguments)
            functions["divide"]((1, 1), (1,), (nothing, np.uint64(1), nothing))
            functions["batch"]((1, 1), (1,), (np.uint64(address_of(table)),))
        stream.synchronize()
        made = _Loaded(cupy, functions)
    _loaded[key] = made
    return made


def address_of(array: Any) -> int:
    """Where the bytes of an array begin: of NumPy, or of CuPy."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array.data.ptr)


class CupyKernels:
    """Kernels of a dtype and reduction on `stream`, a stream of CuPy that belongs to `device_id`; every call only
    queues its work. The device must be the current one.

    Raises InputError as `NumpyKernels`, EnvironmentMissing without CuPy or a GPU.
    """

    __slots__ = ("_average", "_functions", "_stored", "itemsize", "stream")

    def __init__(self, dtype: str, reduction: str, stream: Any, device_id: int) -> None:
        check_reduction_of(reduction, dtype)
        self._functions = _load_functions(load_cupy(), device_id, dtype, reduction).functions
        self._stored, self.itemsize = stored_dtype(dtype), check_dtype(dtype)
        self._average = reduction == "avg"
        self.stream = stream

    def view(self, data: Any) -> Any:
        """`data`, bytes, as elements; no copy."""
        return data.view(self._stored)

    def reduce(self, dst: int, src: int, count: int) -> None:
        """dst = dst op src, `count` elements."""
        self._launch("reduce", count, dst, src, count)

    def forward(self, dst: int, src: int, out: int, count: int) -> None:
        """dst = dst op src, and the same into `out`: what is received is reduced and handed on in one pass."""
        self._launch("forward", count, dst, src, out, count)

    def copy(self, dst: int, src: int, count: int) -> None:
        """dst = src; the two do not overlap."""
        self._launch("copy", count, dst, src, count)

    def batch(self, table: Any, steps: Sequence[KernelStep]) -> None:
        """Several steps, none of which touches what another writes, in one launch.

        `table`, page-locked memory of uint64 with room for them, belongs to the GPU until the launch is done.
        """
        n_words = ROW_WORDS * len(steps)
        table[:n_words] = np.array(steps, dtype=np.uint64).reshape(-1)
        longest = max(step.n_elements for step in steps)
        # The rows share the threads, as if they were of one length.
        self._launch("batch", longest, address_of(table), n_rows=len(steps))

    def finish(self, data: int, n_ranks: int, count: int) -> None:
        """What is left to do once every contribution is in: `avg` divides, the others do nothing."""
        if self._average:
            self._launch("divide", count, data, n_ranks, count)

    def _launch(self, name: str, count: int, *arguments: int, n_rows: int = 1) -> None:
        if not count:
            return
        n_blocks = count_blocks(count * self.itemsize)
        with self.stream:
            self._functions[name]((n_blocks, n_rows), (THREADS,), tuple(map(np.uint64, arguments)))
