"""Which way the bytes of a GPU's memory take over a transport, and why.

    staged   through page-locked memory of the host: over every transport
    direct   the transport's library reads and writes the GPU's memory: MPI that is GPU-aware, UCX with CUDA

A library that says that it reaches a GPU's memory is believed only after `choose_path` has tried: the ranks send each
other messages from and into the memory of their GPUs, short and long, and compare every byte and what lies around them.
Until then, and wherever a library says nothing, messages are staged.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from optcc.errors import DeadlineExceeded
from optcc.plan import Channel
from optcc.runtime.cupy_kernels import load_cupy
from optcc.runtime.transport import COLLECTIVE_TIMEOUT_S, Clock, MonotonicClock, Transport

SELF_TEST_GROUP = 1 << 20
"""Of channels; no plan has it."""
SELF_TEST_BYTES = (1, 4097, (1 << 20) + 3)
"""Lengths that libraries send in different ways."""
_TEXT_BYTES = 256
_MARGIN_BYTES = 64
_POISON = 0x5A


class DevicePath(NamedTuple):
    """Whether the transport reads and writes the GPU's memory itself, and why or why not."""

    direct: bool
    why: str

    def __str__(self) -> str:
        return f"{'direct' if self.direct else 'staged'}: {self.why}"


@runtime_checkable
class ReachesDevices(Protocol):
    """A transport whose library may reach a GPU's memory; views that are posted are then CuPy's arrays of bytes.

    `device_path` is what `choose_path` has found; None before.
    """

    device_path: DevicePath | None

    def no_device_memory(self) -> str:
        """Why the library does not reach a GPU's memory; empty if it says that it does."""
        ...


def path_of(transport: Transport) -> DevicePath:
    """The way of a GPU's memory over `transport`."""
    if not isinstance(transport, ReachesDevices):
        return DevicePath(False, f"{type(transport).__name__} reads and writes the host's memory")
    if transport.device_path is None:
        return DevicePath(False, "not tried: optcc.runtime.device_paths.choose_path tries whether the library can")
    return transport.device_path


def choose_path(
    transport: Transport,
    device_id: int,
    *,
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
    clock: Clock | None = None,
) -> DevicePath:
    """Tries whether messages can go from GPU to GPU, this rank's being `device_id`, and has the transport do so if they
    can; collective, before the transport has an engine. The same at every rank.

    Raises EnvironmentMissing without CuPy or a GPU, DeadlineExceeded if a message does not come within `timeout_s`.
    """
    load_cupy()
    if not isinstance(transport, ReachesDevices):
        return path_of(transport)
    refused = _first(transport, transport.no_device_memory(), timeout_s)
    if refused:
        path = DevicePath(False, refused)
    else:
        wrong = _first(transport, _self_test(transport, device_id, timeout_s, clock or MonotonicClock()), timeout_s)
        path = DevicePath(False, wrong) if wrong else DevicePath(True, "the library says so, and the self-test agrees")
    transport.device_path = path
    return path


def _first(transport: Transport, text: str, timeout_s: float) -> str:
    """The first text that some rank has, with the rank; empty if none has."""
    told = transport.allgather(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES), timeout_s)
    texts = [each.decode(errors="replace").rstrip() for each in told]
    return next((f"rank {rank}: {each}" for rank, each in enumerate(texts) if each), "")


def _pattern(rank: int, n_bytes: int) -> Any:
    """What a rank sends: bytes of which no two places, ranks or lengths have the same for long."""
    return np.random.default_rng((rank, n_bytes)).integers(0, 256, n_bytes, dtype=np.uint8)


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
            sent = cupy.asarray(_pattern(rank, n_bytes))
            room = cupy.empty(n_bytes + 2 * _MARGIN_BYTES, dtype=np.uint8)
            room.fill(_POISON)
            # The library knows of no stream.
            cupy.cuda.get_current_stream().synchronize()
            transport.post_recv(handles[before], room[_MARGIN_BYTES : _MARGIN_BYTES + n_bytes])
            transport.post_send(handles[rank], sent)
            deadline_s, n_left = clock.now_s() + timeout_s, 2
            while n_left:
                left_s = deadline_s - clock.now_s()
                if left_s <= 0:
                    raise DeadlineExceeded(f"rank {rank}: self-test of GPU memory: {n_bytes} B: {timeout_s:g} s")
                n_left -= len(transport.poll(left_s))
            found = cupy.asnumpy(room)
        wanted = np.full(len(found), _POISON, dtype=np.uint8)
        wanted[_MARGIN_BYTES : _MARGIN_BYTES + n_bytes] = _pattern(before, n_bytes)
        wrong = int(np.count_nonzero(found != wanted))
        if wrong:
            return f"self-test: {wrong} of {len(found)} bytes wrong in a message of {n_bytes} B from GPU memory"
    return ""
