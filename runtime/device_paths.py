"""Which way the bytes of a GPU's memory take over a transport, and why.

    direct   the transport's library reads and writes the GPU's memory: MPI that is GPU-aware, UCX with CUDA
    ipc      between processes of one host from GPU to GPU by CUDA IPC (`device_ipc`), to other hosts as staged
    staged   through page-locked memory of the host: over every transport

A library that says that it reaches a GPU's memory is believed only after `choose_path` has tried: the ranks send each
other messages from and into the memory of their GPUs, short and long, and compare every byte and what lies around them.
So is CUDA IPC. Until then, and wherever a library says nothing, messages are staged.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from optcc.errors import DeadlineExceeded
from optcc.plan import Channel
from optcc.runtime.cupy_kernels import load_cupy
from optcc.runtime.device_actions import DevicePlace
from optcc.runtime.device_ipc import try_sharing
from optcc.runtime.device_self_test import MARGIN_BYTES, POISON, SELF_TEST_BYTES, first_text, framed, pattern
from optcc.runtime.transport import COLLECTIVE_TIMEOUT_S, Clock, MonotonicClock, Transport

DIRECT, IPC, STAGED = PATHS = ("direct", "ipc", "staged")
SELF_TEST_GROUP = 1 << 20
"""Of channels; no plan has it."""


class DevicePath(NamedTuple):
    """One of `PATHS`, and why it is that one. `hosts`, for IPC: for each rank the first of those that share GPU memory
    with it, -1 for none."""

    kind: str
    why: str
    hosts: tuple[int, ...] = ()

    @property
    def direct(self) -> bool:
        """Whether the transport reads and writes the GPU's memory itself."""
        return self.kind == DIRECT

    def place(self, device_id: int) -> DevicePlace:
        """Arrays on this GPU, whose bytes take this way."""
        return DevicePlace(device_id, self.direct, self.hosts if self.kind == IPC else None)

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}"


@runtime_checkable
class KeepsPath(Protocol):
    """A transport that keeps what `choose_path` has found; None before."""

    device_path: DevicePath | None


@runtime_checkable
class ReachesDevices(KeepsPath, Protocol):
    """A transport whose library may reach a GPU's memory; views that are posted are then CuPy's arrays of bytes."""

    def no_device_memory(self) -> str:
        """Why the library does not reach a GPU's memory; empty if it says that it does."""
        ...


def path_of(transport: Transport) -> DevicePath:
    """The way of a GPU's memory over `transport`."""
    if isinstance(transport, KeepsPath) and transport.device_path is not None:
        return transport.device_path
    if not isinstance(transport, ReachesDevices):
        return DevicePath(STAGED, _on_host(transport))
    return DevicePath(STAGED, "not tried: optcc.runtime.device_paths.choose_path tries whether the library can")


def _on_host(transport: Transport) -> str:
    return f"{type(transport).__name__} reads and writes the host's memory"


def choose_path(
    transport: Transport,
    device_id: int,
    *,
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
    clock: Clock | None = None,
    paths: Collection[str] = PATHS,
) -> DevicePath:
    """Tries whether messages can go from GPU to GPU, this rank's being `device_id`, by the library or else by CUDA IPC
    inside a host, and has them do so if they can; collective, before the transport has an engine. The same at every
    rank. `paths` are those that may be taken; the same at every rank, and messages are staged if none of them can.

    Raises EnvironmentMissing without CuPy or a GPU, DeadlineExceeded if a message does not come within `timeout_s`.
    """
    load_cupy()
    refused = [] if {DIRECT, IPC} & set(paths) else ["nothing else was asked for"]
    path = None
    if DIRECT in paths:
        wrong = _try_library(transport, device_id, timeout_s, clock or MonotonicClock())
        path = None if wrong else DevicePath(DIRECT, "the library says so, and the self-test agrees")
        refused.append(wrong)
    if path is None and IPC in paths and isinstance(transport, KeepsPath):
        hosts, why = try_sharing(transport, device_id, timeout_s)
        path = DevicePath(IPC, "; ".join((*refused, why)), hosts) if max(hosts) >= 0 else None
        refused.append(f"CUDA IPC: {why}")
    path = path or DevicePath(STAGED, "; ".join(refused))
    keep_path(transport, path)
    return path


def keep_path(transport: Transport, path: DevicePath) -> None:
    """From now on plans for arrays on a GPU are made for this path, where the transport keeps it."""
    if isinstance(transport, KeepsPath):
        transport.device_path = path


def _try_library(transport: Transport, device_id: int, timeout_s: float, clock: Clock) -> str:
    """Why the transport's library does not read and write a GPU's memory; empty if it does."""
    if not isinstance(transport, ReachesDevices):
        return _on_host(transport)
    refused = first_text(transport, transport.no_device_memory(), timeout_s)
    return refused or first_text(transport, _self_test(transport, device_id, timeout_s, clock), timeout_s)


def _self_test(transport: Transport, device_id: int, timeout_s: float, clock: Clock) -> str:
    """Sends to the next rank and receives from the one before; what was wrong, or nothing."""
    cupy, rank, n_ranks = load_cupy(), transport.rank, transport.n_ranks
    if n_ranks == 1:
        return "a job of one rank sends nothing"
    ring = [Channel(each, (each + 1) % n_ranks, 1) for each in range(n_ranks)]
    handles = transport.open(ring, SELF_TEST_GROUP)
    before = (rank - 1) % n_ranks
    for n_bytes in SELF_TEST_BYTES:
        with cupy.cuda.Device(device_id):
            sent = cupy.asarray(pattern(rank, n_bytes))
            room = cupy.empty(n_bytes + 2 * MARGIN_BYTES, dtype=np.uint8)
            room.fill(POISON)
            # The library knows of no stream.
            cupy.cuda.get_current_stream().synchronize()
            transport.post_recv(handles[before], room[MARGIN_BYTES : MARGIN_BYTES + n_bytes])
            transport.post_send(handles[rank], sent)
            deadline_s, n_left = clock.now_s() + timeout_s, 2
            while n_left:
                left_s = deadline_s - clock.now_s()
                if left_s <= 0:
                    raise DeadlineExceeded(f"rank {rank}: self-test of GPU memory: {n_bytes} B: {timeout_s:g} s")
                n_left -= len(transport.poll(left_s))
            found = cupy.asnumpy(room)
        wrong = int(np.count_nonzero(found != framed(before, n_bytes)))
        if wrong:
            return f"self-test: {wrong} of {len(found)} bytes wrong in a message of {n_bytes} B from GPU memory"
    return ""
