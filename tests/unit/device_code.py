"""The CUDA text without a GPU: compiled for real ones by NVRTC, and by the host's C++ compiler to run it here.

`run_text` makes it the kernels of a stand-in for CuPy (`tests.unit.stand_in_cupy`).
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from optcc.collective import DTYPE_BYTES, reductions_of
from optcc.runtime.cupy_kernels import OPTIONS
from tests.unit.stand_in_cupy import RunKernel, StandIn

PAIRS = [(dtype, reduction) for dtype in DTYPE_BYTES for reduction in reductions_of(dtype) if reduction != "avg"]
"""All that differ: an average's kernels are a sum's."""

OPTIONS_OF_CUPY = ("-ftz=true",)
"""What CuPy 14 adds to every compilation, behind the caller's own options."""

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
    options = [each.encode() for each in (*OPTIONS, *OPTIONS_OF_CUPY, f"--gpu-architecture={architecture}")]
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


def run_text(library: ctypes.CDLL) -> RunKernel:
    """The kernels of a stand-in for CuPy: the real text, thread after thread."""

    def run(
        cupy: StandIn, device: int, name: str, grid: tuple[int, ...], block: tuple[int, ...], values: list[int]
    ) -> None:
        if name.startswith("batch"):
            table = cupy._bytes(values[0], grid[1] * 40, device).view(np.uint64).copy()
            for place in range(len(table)):
                if place % 5 < 3:
                    table[place] = cupy.host_address(int(table[place]), device)
            values = [table.__array_interface__["data"][0]]
        else:
            values = [cupy.host_address(each, device) for each in values]
        launch(library, name, (grid[0], (*grid, 1)[1]), block[0], values)

    return run
