"""GPU memory that processes of one host share by CUDA IPC, and whether they can.

    SharedMemory   an allocation of this process, which others open by its handle
    open_memory    the address of another process's allocation in this one
    try_sharing    which ranks of a host reach each other's memory, found by trying
    probe_sharing  the same with a process that is started for it, for `optcc doctor`

CUDA makes handles of whole allocations of `cudaMalloc`, and CuPy's pool hands out parts of them: shared memory is
allocated outside of the pool, in units of 2 MiB, as CUDA shares the 2 MiB block that an allocation lies in. To free
memory that another process has open is undefined, and there is no call that says whether one has: shared memory is
used again by later plans, and is given back to CUDA with the process.

No process opens a handle of its own. Several processes may be on one GPU; between GPUs, opening a handle enables peer
access, and fails where the hardware has none.
"""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from optcc.runtime.cupy_kernels import address_of, load_cupy
from optcc.runtime.device_self_test import MARGIN_BYTES, POISON, SELF_TEST_BYTES, first_text, framed, pattern
from optcc.runtime.observe.jobs import boot_id
from optcc.runtime.transport import Transport

IPC_UNIT_BYTES = 2 << 20
"""CUDA may share the whole block of this length that an allocation lies in: no other allocation is to lie there."""
HANDLE_BYTES = 64
"""`CUDA_IPC_HANDLE_SIZE`."""
_WHERE = struct.Struct("<16s16s")
_RANDOM = os.urandom(16)
PROBE_S = 10.0
_WRITE = "import sys; from optcc.runtime.device_ipc import write_probe; write_probe(sys.argv[1], int(sys.argv[2]))"


class SharedMemory(NamedTuple):
    """`n_bytes` of the memory of GPU `device_id`, an array of bytes from `address`, allocated by the process with this
    token; `handle` opens it in others."""

    process: bytes
    device_id: int
    array: Any
    address: int
    n_bytes: int
    handle: bytes


_lock = threading.Lock()
_all: list[SharedMemory] = []
"""Keeps what other processes may have open."""
_free: list[SharedMemory] = []


def take_memory(device_id: int, n_bytes: int) -> SharedMemory:
    """Shared memory of at least `n_bytes`, whatever it holds: the shortest that is free, or new. Raises CuPy's error if
    there is none, or no handle."""
    cupy = load_cupy()
    mine = process_token(), device_id
    with _lock:
        fitting = [each for each in _free if each[:2] == mine and each.n_bytes >= n_bytes]
        if fitting:
            found = min(fitting, key=lambda each: each.n_bytes)
            # By identity: arrays of CuPy do not compare as a whole.
            _free[:] = [each for each in _free if each is not found]
            return found
    length = -(-max(n_bytes, 1) // IPC_UNIT_BYTES) * IPC_UNIT_BYTES
    with cupy.cuda.Device(device_id):
        pointer = cupy.cuda.MemoryPointer(cupy.cuda.Memory(length), 0)
        array = cupy.ndarray((length,), dtype=np.uint8, memptr=pointer)
        handle = bytes(cupy.cuda.runtime.ipcGetMemHandle(address_of(array)))
    made = SharedMemory(*mine, array, address_of(array), length, handle)
    with _lock:
        _all.append(made)
    return made


def give_back(memory: SharedMemory) -> None:
    """Later plans may use it: no other process writes into it any more."""
    with _lock:
        _free.append(memory)


def open_memory(handle: bytes) -> int:
    """The address of another process's shared memory for the device that is current. Raises CuPy's error if it cannot
    be reached from there."""
    return int(load_cupy().cuda.runtime.ipcOpenMemHandle(handle))


def close_memory(address: int) -> None:
    """Undoes one `open_memory`; nothing may be queued that uses it."""
    load_cupy().cuda.runtime.ipcCloseMemHandle(address)


def process_token() -> bytes:
    """16 bytes that no other process has: its number may be that of another one in another container."""
    return hashlib.sha256(_RANDOM + str(os.getpid()).encode()).digest()[:16]


def _host_token() -> bytes:
    return hashlib.sha256(boot_id().encode()).digest()[:16]


def group_by_host(wheres: Sequence[tuple[bytes, bytes]]) -> tuple[int, ...]:
    """For each rank, of which (host, process) is given, the first rank of its host; -1 where it is alone there, or two
    ranks of the host are in one process.

    >>> group_by_host([(b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"c", b"1"), (b"c", b"1")])
    (0, -1, 0, -1, -1)
    """
    ranks_of: dict[bytes, list[int]] = {}
    for rank, (host, _) in enumerate(wheres):
        ranks_of.setdefault(host, []).append(rank)
    found = [-1] * len(wheres)
    for ranks in ranks_of.values():
        if len(ranks) > 1 and len({wheres[rank][1] for rank in ranks}) == len(ranks):
            for rank in ranks:
                found[rank] = ranks[0]
    return tuple(found)


def try_sharing(transport: Transport, device_id: int, timeout_s: float) -> tuple[tuple[int, ...], str]:
    """For each rank the first rank of those that reach each other's GPU memory with it, -1 for none, and why; this
    rank's GPU is `device_id`. The same at every rank; collective, before the transport has an engine.

    Each rank copies patterns from its GPU into memory of every other rank of its host, and looks at what it has got.
    """
    told = transport.allgather(_WHERE.pack(_host_token(), process_token()), timeout_s)
    hosts = group_by_host([_WHERE.unpack(each) for each in told])
    none = (-1,) * len(hosts)
    if max(hosts) < 0:
        return none, "no two ranks are processes of one host"
    own = hosts[transport.rank]
    mates = [rank for rank, host in enumerate(hosts) if host == own] if own >= 0 else []
    test = _SelfTest(device_id, transport.rank, mates)
    handles: list[bytes] = []

    def exchange() -> str:
        wrong = first_text(transport, _caught(test.export), timeout_s)
        handles.extend(transport.allgather(test.handle, timeout_s))
        return wrong

    for step in (
        exchange,
        lambda: first_text(transport, _caught(lambda: test.write(handles)), timeout_s),
        lambda: first_text(transport, _caught(test.check), timeout_s),
    ):
        wrong = step()
        if wrong:
            return none, wrong
    test.end()
    n_ranks = sum(host >= 0 for host in hosts)
    return hosts, f"{n_ranks} of {len(hosts)} ranks reach the GPU memory of those of their host, says the self-test"


def probe_sharing() -> str:
    """What is wrong if a process on GPU 0, and one on the last GPU, write into memory of GPU 0, or nothing.

    A look that takes seconds; `try_sharing` tries all pairs. Raises EnvironmentMissing without CuPy or a GPU.
    """
    n_devices = int(load_cupy().cuda.runtime.getDeviceCount())
    for device_id in sorted({0, n_devices - 1}):
        test = _SelfTest(0, 0, (0, 1))
        wrong = _caught(test.export)
        if wrong:
            return wrong
        words = [sys.executable, "-c", _WRITE, test.handle.hex(), str(device_id)]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=PROBE_S, check=False)
        wrong = (ran.stdout.strip() or ran.stderr.strip() or f"exit {ran.returncode}") if ran.returncode else ""
        wrong = wrong.splitlines()[-1] if wrong else _caught(test.check)
        if wrong:
            return f"GPU {device_id} into GPU 0: {wrong}"
        test.end()
    return ""


def write_probe(handle: str, device_id: int) -> None:
    """The other process of `probe_sharing`; exits with what is wrong."""
    wrong = _caught(lambda: _SelfTest(device_id, 1, (0, 1)).write([bytes.fromhex(handle), b""]))
    sys.exit(wrong or 0)


def _caught(step: Callable[[], str]) -> str:
    """What is wrong by `step`, or what it has raised."""
    try:
        return step()
    except Exception as error:  # CuPy has a class for each way in which CUDA can refuse
        return f"{type(error).__name__}: {error}"


class _SelfTest:
    """A rank's part in `try_sharing`: `mates` are the ranks of its host, itself included, or none."""

    def __init__(self, device_id: int, rank: int, mates: Sequence[int]) -> None:
        self._device_id, self._rank, self._mates = device_id, rank, mates
        self._memory: SharedMemory | None = None
        self._part_bytes = sum(n_bytes + 2 * MARGIN_BYTES for n_bytes in SELF_TEST_BYTES)
        self.handle = bytes(HANDLE_BYTES)

    def export(self) -> str:
        """Memory for what each of the others writes."""
        if self._mates:
            cupy = load_cupy()
            memory = self._memory = take_memory(self._device_id, self._part_bytes * len(self._mates))
            with cupy.cuda.Device(self._device_id):
                memory.array.fill(POISON)
                cupy.cuda.get_current_stream().synchronize()
            self.handle = memory.handle
        return ""

    def write(self, handles: Sequence[bytes]) -> str:
        """This rank's patterns into its part of the others' memory."""
        cupy = load_cupy()
        runtime = cupy.cuda.runtime
        part = self._mates.index(self._rank) * self._part_bytes if self._mates else 0
        for mate in self._mates:
            if mate == self._rank:
                continue
            with cupy.cuda.Device(self._device_id):
                base = open_memory(handles[mate])
                at, stream = base + part + MARGIN_BYTES, cupy.cuda.get_current_stream()
                for n_bytes in SELF_TEST_BYTES:
                    sent = cupy.asarray(pattern(self._rank, n_bytes))
                    runtime.memcpyAsync(at, address_of(sent), n_bytes, runtime.memcpyDefault, stream.ptr)
                    at += n_bytes + 2 * MARGIN_BYTES
                stream.synchronize()
                close_memory(base)
        return ""

    def check(self) -> str:
        """What is wrong in this rank's memory, once all have written."""
        if self._memory is None:
            return ""
        cupy = load_cupy()
        with cupy.cuda.Device(self._device_id):
            found = cupy.asnumpy(self._memory.array[: self._part_bytes * len(self._mates)])
        for mate, got in zip(self._mates, found.reshape(len(self._mates), -1), strict=True):
            if mate == self._rank:
                continue
            wrong = int(np.count_nonzero(got != np.concatenate([framed(mate, n) for n in SELF_TEST_BYTES])))
            if wrong:
                return f"self-test: {wrong} of {len(got)} bytes wrong from rank {mate}"
        return ""

    def end(self) -> None:
        """All have looked: nobody writes any more."""
        if self._memory is not None:
            give_back(self._memory)
