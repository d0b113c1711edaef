"""The GPU driver and CuPy on it."""

from __future__ import annotations

from collections.abc import Iterator

from optcc.runtime.doctor.finding import NOTE, OK, WRONG, Finding, Need
from optcc.runtime.doctor.system import System

_CUPY_CODE = """
import cupy
runtime = cupy.cuda.runtime
names = [runtime.getDeviceProperties(number)["name"].decode() for number in range(runtime.getDeviceCount())]
print(cupy.__version__, "on", ", ".join(names))
"""
_UCX_CODE = """
from optcc.runtime.transports.ucx_library import Port
port = Port("", lambda peer, status: None)
print(port.memory_types())
port.close()
"""
_IPC_CODE = """
from optcc.runtime.device_ipc import probe_sharing
print(probe_sharing() or "works")
"""
_CUDA = 1
"""`UCS_MEMORY_TYPE_CUDA`."""
_STAGED = "staged, through page-locked memory"
_INSIDE = f"ipc inside a host, if the self-test agrees; else {_STAGED}"
_CUPY_PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy")


def check_gpu(system: System, _need: Need) -> Iterator[Finding]:
    """The driver, CuPy on it, and which way a GPU's memory takes over each transport, and why."""
    driver = system.read("/proc/driver/nvidia/version") or system.read("/sys/module/nvidia/version")
    package = next((name for name in _CUPY_PACKAGES if system.version(name)), None)
    if driver is None:
        value = "none" if package is None else f"none, although {package} is installed"
        yield Finding("gpu", "driver", value, NOTE, "buffers are in host memory; everything else works", "")
        return
    yield Finding("gpu", "driver", driver.splitlines()[0], OK, "buffers can be in GPU memory")
    if package is None:
        why = "kernels for GPU memory need it"
        yield Finding("gpu", "CuPy", "not installed", NOTE, why, "pip install 'optcc[gpu]'")
        return
    asked = system.ask(_CUPY_CODE)
    works = asked is not None and asked.code == 0
    last = asked.text.splitlines()[-1] if asked and asked.text else "no answer"
    do = "" if works else "install the CuPy of this CUDA, and look at nvidia-smi"
    why = "kernels for GPU memory need it" if works else "CuPy is installed and finds no GPU"
    yield Finding("gpu", "CuPy", f"{last} ({package})", OK if works else WRONG, why, do)
    ran = system.run(system.find("/ompi_info") or "ompi_info", "--parsable", "--all")
    aware = ran is not None and "mpi_built_with_cuda_support:value:true" in ran.text
    why = "MPI says that it takes GPU pointers" if aware else "MPI does not say that it takes GPU pointers"
    yield Finding("gpu", "CUDA-aware MPI", "yes" if aware else "no", OK if aware else NOTE, why, "")
    asked = system.ask(_IPC_CODE)
    said = asked.text.strip().splitlines()[-1] if asked and asked.text.strip() else "no answer"
    shares = asked is not None and asked.code == 0 and said == "works"
    why = "processes of this host write into each other's GPU memory" if shares else "processes stage their messages"
    do = "" if shares else "in containers --ipc=host and one PID namespace; nvidia-smi topo -p2p r shows GPU pairs"
    yield Finding("gpu", "CUDA IPC", said, OK if shares else NOTE, why, do)
    yield from _paths(system, aware, _INSIDE if shares else _STAGED)


def _paths(system: System, is_mpi_aware: bool, otherwise: str) -> Iterator[Finding]:
    """Which way a GPU's memory takes over each transport, `otherwise` if its library does not reach it; see
    `optcc.runtime.device_paths`."""
    tries = "choose_path, or optcc bench --device gpu, tries it first"
    if is_mpi_aware:
        yield Finding("gpu", "path over mpi", "direct, if the self-test agrees", OK, f"MPI takes GPU pointers: {tries}")
    else:
        do = "for direct ones, an Open MPI with CUDA (mpi_built_with_cuda_support:value:true)"
        yield Finding(
            "gpu", "path over mpi", otherwise, NOTE, "the library does not say that it takes GPU pointers", do
        )
    asked = system.ask(_UCX_CODE)
    if asked is not None and asked.code == 0 and asked.text.strip().isdecimal():
        if int(asked.text) >> _CUDA & 1:
            why = f"UCX's contexts have CUDA memory: {tries}"
            yield Finding("gpu", "path over ucx", "direct, if the self-test agrees", OK, why)
        else:
            do = "for direct ones, a UCX with CUDA, and UCX_TLS without a list or with cuda_copy in it"
            yield Finding("gpu", "path over ucx", otherwise, NOTE, "UCX's contexts have no CUDA memory", do)
    yield Finding("gpu", "path over tcp", otherwise, OK, "sockets read and write the host's memory")
