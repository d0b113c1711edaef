"""Which way a GPU's memory takes: what a library says is tried, and staged messages are the answer to every doubt."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optcc.errors import DeadlineExceeded
from optcc.runtime import device_ipc
from optcc.runtime.device_actions import DevicePlace
from optcc.runtime.device_paths import DIRECT, STAGED, DevicePath, ReachesDevices, choose_path, path_of
from optcc.runtime.transports.loopback import LoopbackTransport, run_ranks
from tests.unit.device_ranks import as_processes
from tests.unit.stand_in_cupy import CUDARuntimeError, StandIn

NO_IPC = "CUDA IPC: no two ranks are processes of one host"
"""Ranks of these tests are threads."""


class Library(LoopbackTransport):
    """A library that says that it reaches the memory of GPUs: `says` why not, `sends` what becomes of the bytes."""

    device_path: DevicePath | None = None
    cupy: StandIn
    says: Callable[[int], str] = staticmethod(lambda rank: "")
    sends: Callable[[Any], Any] = staticmethod(lambda view: view)

    def no_device_memory(self) -> str:
        return type(self).says(self.rank)

    def post_send(self, channel: int, view: Any) -> None:
        super().post_send(channel, type(self).sends(self.cupy.host_bytes(view).copy()))

    def post_recv(self, channel: int, view: Any) -> None:
        super().post_recv(channel, self.cupy.host_bytes(view))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, seed: int) -> StandIn:
    """Two GPUs that are not there."""
    made = StandIn(seed, 2)
    monkeypatch.setitem(sys.modules, "cupy", made)
    return made


def chosen(cupy: StandIn, kind: type[Library], timeout_s: float = 10.0) -> list[DevicePath]:
    """What each of three ranks has chosen, and the transport keeps."""

    def body(rank: int, transport: LoopbackTransport) -> DevicePath:
        library = kind(transport._network, rank)
        library.cupy = cupy
        assert isinstance(library, ReachesDevices) and not path_of(library).direct
        path = choose_path(library, rank % 2, timeout_s=timeout_s)
        assert path_of(library) == path
        return path

    return run_ranks(3, body)


def test_what_a_library_says_is_believed_when_every_byte_is_right(cupy: StandIn) -> None:
    assert chosen(cupy, Library) == [DevicePath(DIRECT, "the library says so, and the self-test agrees")] * 3
    assert str(chosen(cupy, Library)[0]).startswith("direct: the library says so")


def test_a_rank_whose_library_does_not_has_all_ranks_stage(cupy: StandIn) -> None:
    class Partly(Library):
        says = staticmethod(lambda rank: "built without CUDA" if rank == 1 else "")
        sends = staticmethod(lambda view: pytest.fail("device memory was sent"))

    assert chosen(cupy, Partly) == [DevicePath(STAGED, f"rank 1: built without CUDA; {NO_IPC}")] * 3


@pytest.mark.parametrize("place", [0, -1])
def test_a_wrong_byte_has_all_ranks_stage(cupy: StandIn, place: int) -> None:
    def damage(view: Any) -> Any:
        if len(view) > 4097:
            view[place] ^= 1
        return view

    class Damaging(Library):
        sends = staticmethod(damage)

    what = "rank 0: self-test: 1 of 1048707 bytes wrong in a message of 1048579 B from GPU memory"
    assert chosen(cupy, Damaging) == [DevicePath(STAGED, f"{what}; {NO_IPC}")] * 3


def test_a_message_that_does_not_come_is_an_error(cupy: StandIn) -> None:
    class Silent(Library):
        def post_send(self, channel: int, view: Any) -> None:
            if self.rank != 1:
                super().post_send(channel, view)

    # Which rank says so first, and at which message, depends on when its thread runs.
    with pytest.raises(DeadlineExceeded, match=r"rank [012]: self-test of GPU memory: (1|4097|1048579) B: 0\.2 s"):
        chosen(cupy, Silent, timeout_s=0.2)


def test_other_transports_stage(cupy: StandIn) -> None:
    def body(rank: int, transport: LoopbackTransport) -> DevicePath:
        assert not isinstance(transport, ReachesDevices)
        assert choose_path(transport, 0) == path_of(transport)
        # What the transport cannot reach it cannot read either.
        with pytest.raises(TypeError):
            np.copyto(np.zeros(1, np.uint8), cupy.empty(1, np.uint8))
        return path_of(transport)

    assert run_ranks(2, body) == [DevicePath(STAGED, "LoopbackTransport reads and writes the host's memory")] * 2


def test_one_rank_has_nothing_to_try(cupy: StandIn) -> None:
    def body(rank: int, transport: LoopbackTransport) -> DevicePath:
        library = Library(transport._network, rank)
        library.cupy = cupy
        return choose_path(library, 0)

    assert run_ranks(1, body) == [DevicePath(STAGED, f"rank 0: a job of one rank sends nothing; {NO_IPC}")]


class Keeping(LoopbackTransport):
    """A transport of processes, which are threads here."""

    device_path: DevicePath | None = None


def tried(hosts: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch, cupy: StandIn) -> DevicePath:
    """What three ranks on two GPUs have chosen."""
    as_processes(cupy, monkeypatch)
    monkeypatch.setattr(
        device_ipc, "_host_token", lambda: hosts(int(threading.current_thread().name[-1])).ljust(16, b".")
    )

    def body(rank: int, transport: LoopbackTransport) -> DevicePath:
        keeping = Keeping(transport._network, rank)
        path = choose_path(keeping, rank % 2)
        assert path_of(keeping) == path
        return path

    found = run_ranks(3, body)
    assert len(set(found)) == 1
    return found[0]


def test_processes_of_a_host_share_memory(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tried(lambda rank: b"one", monkeypatch, cupy)
    assert (path.kind, path.hosts, path.place(1)) == ("ipc", (0, 0, 0), DevicePlace(1, False, (0, 0, 0)))
    reached = "3 of 3 ranks reach the GPU memory of those of their host, says the self-test"
    assert str(path) == f"ipc: Keeping reads and writes the host's memory; {reached}"
    assert not any(count for _, count in cupy._opened.values())


def test_a_rank_of_another_host_stages(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tried(lambda rank: b"other" if rank == 1 else b"one", monkeypatch, cupy)
    assert (path.kind, path.hosts) == ("ipc", (0, -1, 0))
    path = tried(lambda rank: b"host %d" % rank, monkeypatch, cupy)
    assert str(path).endswith("; CUDA IPC: no two ranks are processes of one host") and path.kind == "staged"


@pytest.mark.parametrize("fault", ["open", "export", "write"])
def test_what_fails_in_the_self_test_has_all_ranks_stage(
    fault: str, cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = cupy.cuda.runtime
    copies = runtime.memcpyAsync

    def refuse(*_: Any) -> Any:
        raise CUDARuntimeError("cudaErrorNotSupported: operation not supported")

    def spill(dst: int, src: int, n_bytes: int, kind: int, stream: int) -> None:
        """One byte of the longest message is lost."""
        copies(dst, src, n_bytes - (n_bytes > 4097 and cupy.process() == "optcc-rank-2"), kind, stream)

    name, stands_in = {
        "open": ("ipcOpenMemHandle", refuse),
        "export": ("ipcGetMemHandle", refuse),
        "write": ("memcpyAsync", spill),
    }[fault]
    monkeypatch.setattr(runtime, name, stands_in)
    path = tried(lambda rank: b"one", monkeypatch, cupy)
    wrong = "rank 0: self-test: 1 of 1053061 bytes wrong from rank 2"
    refused = "rank 0: CUDARuntimeError: cudaErrorNotSupported: operation not supported"
    on_host = "Keeping reads and writes the host's memory"
    assert path == DevicePath(STAGED, f"{on_host}; CUDA IPC: {wrong if fault == 'write' else refused}")


def test_a_process_does_not_open_its_own_handle(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the handle of an array of CuPy's pool open that array."""
    runtime = cupy.cuda.runtime
    memory = device_ipc.take_memory(0, 100)
    with pytest.raises(CUDARuntimeError, match="invalid device context"):
        device_ipc.open_memory(memory.handle)
    pooled = runtime.ipcGetMemHandle(cupy.empty(100, np.uint8).data.ptr)
    with pytest.raises(CUDARuntimeError, match="invalid argument"):
        device_ipc.open_memory(pooled)


def test_a_process_that_is_started_probes_the_gpus(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the doctor: another process, with a stand-in of its own, writes into memory of this one."""
    monkeypatch.setattr(device_ipc, "_free", [])
    root = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", f"{root}:{root}/tests/stand_in")
    assert device_ipc.probe_sharing() == ""
    monkeypatch.setattr(device_ipc, "pattern", lambda rank, n_bytes: np.zeros(n_bytes, np.uint8))
    monkeypatch.setattr(device_ipc, "framed", lambda rank, n_bytes: np.zeros(n_bytes + 128, np.uint8))
    assert "GPU 0 into GPU 0: self-test: " in device_ipc.probe_sharing()
    monkeypatch.setattr(device_ipc, "_WRITE", "raise SystemExit('cudaErrorInvalidValue')")
    assert device_ipc.probe_sharing() == "GPU 0 into GPU 0: cudaErrorInvalidValue"
