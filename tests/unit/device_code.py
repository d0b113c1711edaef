"""The CUDA text without a GPU: compiled for real ones by NVRTC, and by the host's C++ compiler to run it here.

`FakeCupy` is the part of CuPy that `optcc.runtime.cupy_kernels` uses. Its kernels are the real text, run on the
processor; what is queued on its streams is carried out only when somebody waits, as late as CUDA allows, so that
whoever does not wait for what he needs gets wrong numbers. What its API is like was read from CuPy 14.2.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from optcc.collective import DTYPE_BYTES, reductions_of
from optcc.runtime.cupy_kernels import OPTIONS

PAIRS = [(dtype, reduction) for dtype in DTYPE_BYTES for reduction in reductions_of(dtype) if reduction != "avg"]
"""All that differ: an average's kernels are a sum's."""

SHIM = """
#include <cstring>
#define __device__
#define __global__
struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct dim { unsigned int x, y, z; };
static thread_local dim threadIdx, blockIdx, blockDim, gridDim;
template <class To, class From> static To same_bits(From from) { To to; memcpy(&to, &from, sizeof to); return to; }
static float __uint_as_float(unsigned int x) { return same_bits<float>(x); }
static unsigned int __float_as_uint(float x) { return same_bits<unsigned int>(x); }
static double __longlong_as_double(long long x) { return same_bits<double>(x); }
static long long __double_as_longlong(double x) { return same_bits<long long>(x); }
"""
LAUNCH = """
// Every parameter is eight bytes and goes into a register, so one that a kernel does not have does no harm.
extern "C" void launch(void (*kernel)(u64, u64, u64, u64, u64, u64), u32 columns, u32 rows, u32 threads, const u64* a) {
    gridDim = {columns, rows, 1};
    blockDim = {threads, 1, 1};
    for (blockIdx.y = 0; blockIdx.y < rows; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < columns; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(a[0], a[1], a[2], a[3], a[4], a[5]);
}
extern "C" u16 narrow(float x) { return float16::close(x); }
extern "C" float widen(u16 x) { return float16::open(x); }
extern "C" u16 narrow_brain(float x) { return bfloat16::close(x); }
"""


def no_compiler() -> str | None:
    """Why the text cannot be run on the processor, or None."""
    return None if shutil.which("g++") else "no C++ compiler: apt install g++"


def no_nvrtc() -> str | None:
    """Why the text cannot be compiled for GPUs, or None."""
    return None if _nvrtc_path() else "no NVRTC: pip install 'optcc[nvrtc]'"


def _nvrtc_path() -> Path | None:
    spec = find_spec("nvidia.cuda_nvrtc") if find_spec("nvidia") else None
    places = [] if spec is None else [Path(each) for each in spec.submodule_search_locations or ()]
    return next((path for place in places for path in sorted(place.glob("lib/libnvrtc.so.*"))), None)


def compile_for_gpu(text: str, architecture: str) -> tuple[str, bytes]:
    """PTX and machine code of `text` for `architecture` ("sm_90"); raises ValueError with the compiler's words."""
    path = _nvrtc_path()
    assert path is not None
    nvrtc = ctypes.CDLL(str(path))
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernels.cu", 0, None, None) == 0
    options = [each.encode() for each in (*OPTIONS, f"--gpu-architecture={architecture}")]
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    said = _fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    if status:
        raise ValueError(said.rstrip(b"\0").decode())
    ptx = _fetch(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0").decode()
    machine_code = _fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx, machine_code


def _fetch(size: Any, fetch: Any, program: ctypes.c_void_p) -> bytes:
    length = ctypes.c_size_t()
    assert size(program, ctypes.byref(length)) == 0
    data = ctypes.create_string_buffer(length.value)
    assert fetch(program, data) == 0
    return data.raw


def build_library(folder: Path, text: str) -> ctypes.CDLL:
    """The kernels of a CUDA text, and `launch`, for the processor."""
    code, library = folder / "kernels.cpp", folder / "kernels.so"
    code.write_text(SHIM + text + LAUNCH, encoding="utf-8")
    # No fused multiply-add, as in the CUDA text, where no sum follows a product; -fwrapv is not asked for.
    options = ["-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-ffp-contract=off", "-fPIC", "-shared"]
    subprocess.run(["g++", *options, "-o", str(library), str(code)], check=True, timeout=300)
    loaded = ctypes.CDLL(str(library))
    loaded.narrow.argtypes, loaded.narrow.restype = [ctypes.c_float], ctypes.c_uint16
    loaded.narrow_brain.argtypes, loaded.narrow_brain.restype = [ctypes.c_float], ctypes.c_uint16
    loaded.widen.argtypes, loaded.widen.restype = [ctypes.c_uint16], ctypes.c_float
    return loaded


def launch(library: ctypes.CDLL, name: str, grid: tuple[int, int], threads: int, arguments: Iterable[int]) -> None:
    """Runs one kernel, thread after thread."""
    values = [*arguments]
    values += [0] * (6 - len(values))
    library.launch(getattr(library, name), grid[0], grid[1], threads, (ctypes.c_uint64 * 6)(*values))


class DeviceArray(np.ndarray[Any, Any]):
    """A NumPy array that passes for CuPy's."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=int(self.__array_interface__["data"][0]))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self.__array_interface__)


def on_device(array: Any) -> Any:
    """`array` itself, as one of the fake GPU's."""
    return np.asarray(array).view(DeviceArray)


class Stream(AbstractContextManager["Stream"]):
    """Work that waits until it must be done; `current` holds the streams that have been entered, the last on top."""

    def __init__(self, ptr: int, current: list[Stream]) -> None:
        self.ptr, self.current = ptr, current
        self.queue: list[Callable[[], None]] = []
        self.n_done = 0
        self.captured: list[Callable[[], None]] | None = None

    def add(self, work: Callable[[], None]) -> None:
        (self.queue if self.captured is None else self.captured).append(work)

    def run_up_to(self, place: int) -> None:
        while self.n_done < place:
            self.n_done += 1
            self.queue[self.n_done - 1]()

    def synchronize(self) -> None:
        assert self.captured is None, "cannot wait while capturing"
        self.run_up_to(len(self.queue))

    def begin_capture(self) -> None:
        assert self.ptr, "the default stream cannot be captured"
        self.captured = []

    def end_capture(self) -> Any:
        assert self.captured is not None
        work, self.captured = self.captured, None
        return SimpleNamespace(launch=lambda stream: [stream.add(each) for each in work])

    def __enter__(self) -> Stream:
        self.current.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.current.pop()


class Event:
    """A place in a stream's queue."""

    def __init__(self, disable_timing: bool = False) -> None:
        self.stream: Stream | None = None
        self.place = 0

    def record(self, stream: Stream) -> None:
        self.stream, self.place = stream, len(stream.queue)

    @property
    def done(self) -> bool:
        return self.stream is None or self.stream.n_done >= self.place

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run_up_to(self.place)


class FakeCupy:
    """What of CuPy our kernels use."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.launches: list[str] = []
        self.kept: list[Any] = []
        self.streams: dict[int, Stream] = {}
        self.current: list[Stream] = []
        self.current.append(self.new_stream())
        self.cuda = SimpleNamespace(
            Device=lambda: SimpleNamespace(id=0, attributes={"MultiProcessorCount": 2}),
            Stream=lambda non_blocking: self.new_stream(),
            get_elapsed_time=lambda first, last: float(last.place - first.place),
            Event=Event,
            get_current_stream=lambda: self.current[-1],
            alloc_pinned_memory=lambda size: bytearray(size),
            runtime=SimpleNamespace(
                **{"memcpyAsync": self._memcpy, "memcpyHostToDevice": 1, "memcpyDeviceToHost": 2},
                memcpyDeviceToDevice=3,
                getDeviceProperties=lambda device: {"name": b"a processor", "multiProcessorCount": 2},
            ),
        )

    def new_stream(self) -> Stream:
        """One more, not the default one, whose address is 0."""
        number = len(self.streams) + 1
        self.streams[number] = Stream(number, self.current)
        return self.streams[number]

    def empty(self, count: int, dtype: Any) -> Any:
        self.kept.append(np.full(count, 0x55, dtype=np.uint8) if dtype is np.uint8 else np.zeros(count, dtype=dtype))
        return on_device(self.kept[-1])

    def zeros(self, count: int, dtype: Any) -> Any:
        return on_device(np.zeros(count, dtype=dtype))

    def asarray(self, array: Any) -> Any:
        """CUDA's memory is aligned to 256 bytes."""
        room = np.empty(array.nbytes + 256, dtype=np.uint8)
        first = -room.__array_interface__["data"][0] % 256
        copied = room[first : first + array.nbytes].view(array.dtype)
        copied[...] = array
        return on_device(copied)

    def asnumpy(self, array: Any) -> Any:
        return np.array(array)

    def RawModule(self, code: str, options: tuple[str, ...]) -> Any:  # noqa: N802
        def get_function(name: str) -> Callable[..., None]:
            assert name.split("_")[0] in code

            def call(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
                values = [int(each) if isinstance(each, np.uint64) else each.data.ptr for each in arguments]
                self.launches.append(name)
                self.kept.append(arguments)
                self.current[-1].add(lambda: launch(self.library, name, (grid[0], grid[1]), block[0], values))

            return call

        return SimpleNamespace(get_function=get_function)

    def _memcpy(self, dst: int, src: int, n_bytes: int, kind: int, stream: int) -> None:
        assert kind in (1, 2, 3)

        def move() -> None:
            ctypes.memmove(dst, src, n_bytes)

        self.streams[stream].add(move)
