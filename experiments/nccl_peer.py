"""The peer `nccl`: NVIDIA's collectives on the GPUs of the ranks, through CuPy (`cupy.cuda.nccl`), one rank a GPU.

What NCCL has no call for is a group of its sends and receives. An average is NCCL's sum and our division, so that its
elements are those that the bench checks. A peer's calls are queued on the stream on which the arrays are made.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from importlib import import_module
from socket import gethostname
from typing import Any

import msgspec

from optcc.collective import Collective, check_dtype
from optcc.errors import ArgumentError, EnvironmentMissing
from optcc.runtime.cupy_kernels import CupyKernels, load_cupy
from optcc.runtime.rendezvous import Meet

COLLECTIVES = ("allreduce", "reducescatter", "allgather", "broadcast", "reduce", "alltoall")
_DTYPES = {
    **{name: f"NCCL_{name.upper()}" for name in ("int8", "uint8", "int32", "int64", "uint64")},
    **{name: f"NCCL_{name.upper()}" for name in ("float16", "float32", "float64", "bfloat16")},
}
"""What CuPy calls the types of NCCL; the last one is there since NCCL 2.10."""
_UNIQUE = struct.Struct("128h")
"""`ncclUniqueId`: numbers of old, which are signed, and bytes since CuPy 14."""
_OPS = {"sum": "NCCL_SUM", "avg": "NCCL_SUM", "prod": "NCCL_PROD", "min": "NCCL_MIN", "max": "NCCL_MAX"}


def load_nccl() -> Any:
    """CuPy's binding. Raises EnvironmentMissing without CuPy, a GPU or NCCL."""
    nccl = getattr(load_cupy().cuda, "nccl", None)
    if nccl is None:
        with suppress(ImportError):
            # CuPy 14 no longer imports it with itself.
            nccl = import_module("cupy.cuda.nccl")
    if not getattr(nccl, "available", False):
        raise EnvironmentMissing("peer nccl: CuPy finds no NCCL: pip install nvidia-nccl-cu12, as the CUDA of CuPy is")
    return nccl


class NcclPeer:
    """NCCL's own collective of the ranks that `meet`, this one's on GPU `device_id`; collective.

    Raises, at every rank, EnvironmentMissing if one has no NCCL or two ranks have the same GPU, and ArgumentError for a
    dtype, reduction or collective that it lacks.
    """

    name = "nccl"

    def __init__(self, meet: Meet, dtype: str, reduction: str, collective: Collective, device_id: int | None) -> None:
        self._collective, self._n_ranks = collective, collective.n_ranks
        nccl = self._nccl = _at_every_rank(meet, device_id)
        assert device_id is not None
        self._dtype, self._op = _constant(nccl, dtype, _DTYPES), _constant(nccl, reduction, _OPS)
        if collective.name not in COLLECTIVES:
            raise ArgumentError(f"peer nccl: {collective.name}: must be one of {', '.join(COLLECTIVES)}")
        # In place, the input of an AllToAll would be overwritten while it is sent.
        self.modes: tuple[str, ...] = ("out",) if collective.name == "alltoall" else ("out", "in")
        cupy = load_cupy()
        with cupy.cuda.Device(device_id):
            self._stream = cupy.cuda.get_current_stream()
            self._kernels = CupyKernels(dtype, reduction, self._stream, device_id)
            # That of rank 0 counts.
            own = nccl.get_unique_id()
            meeting = meet(_UNIQUE.pack(*own))
            unique = type(own)(_UNIQUE.unpack(meeting.records[0]))
            self._comm = nccl.NcclCommunicator(self._n_ranks, unique, meeting.rank)
        self._item_bytes = check_dtype(dtype)

    def run(self, send: Any, recv: Any) -> None:
        """See `optcc.experiments.peers.Peer`; queued, not waited for. Raises ArgumentError for pieces that differ in
        length, and NCCL's error."""
        name, root, n, stream = self._collective.name, self._collective.root, self._n_ranks, self._stream.ptr
        given, got = (0 if each is None else each.data.ptr for each in (send, recv))
        kind, op, communicator = self._dtype, self._op, self._comm
        if name == "allreduce":
            communicator.allReduce(given, got, send.size, kind, op, stream)
        elif name == "reducescatter":
            self._check_even(send.size, recv.size)
            communicator.reduceScatter(given, got, recv.size, kind, op, stream)
        elif name == "allgather":
            self._check_even(recv.size, send.size)
            communicator.allGather(given, got, send.size, kind, stream)
        elif name == "broadcast":
            communicator.broadcast(given or got, got, recv.size, kind, root, stream)
        elif name == "reduce":
            communicator.reduce(given, got, send.size, kind, op, root, stream)
        else:
            self._check_even(send.size, send.size // n)
            self._all_to_all(given, got, send.size // n)
        if recv is not None and self._collective.reduces:
            self._kernels.finish(got, n, recv.size)

    def _all_to_all(self, given: int, got: int, count: int) -> None:
        block_bytes, stream = count * self._item_bytes, self._stream.ptr
        self._nccl.groupStart()
        for rank in range(self._n_ranks):
            self._comm.send(given + rank * block_bytes, count, self._dtype, rank, stream)
            self._comm.recv(got + rank * block_bytes, count, self._dtype, rank, stream)
        self._nccl.groupEnd()

    def _check_even(self, whole: int, piece: int) -> None:
        if piece * self._n_ranks != whole:
            what = f"{whole} elements of {self._n_ranks} ranks"
            raise ArgumentError(f"peer nccl: {self._collective.name}: {what}: must be equal pieces, choose another -b")

    def close(self) -> None:
        """See `optcc.experiments.peers.Peer`; what is queued is waited for."""
        self._stream.synchronize()
        self._comm.destroy()


def _at_every_rank(meet: Meet, device_id: int | None) -> Any:
    """CuPy's binding, if every rank has it and a GPU of its own: NCCL would wait for a rank that does not come."""
    nccl, missing, bus = None, "", ""
    try:
        if device_id is None:
            raise EnvironmentMissing("peer nccl: arrays are in the host's memory: give --device gpu")
        nccl = load_nccl()
        bus = str(load_cupy().cuda.runtime.deviceGetPCIBusId(device_id))
    except EnvironmentMissing as error:
        missing = str(error)
    records = meet(msgspec.json.encode((missing, gethostname(), bus))).records
    told = [msgspec.json.decode(each, type=tuple[str, str, str]) for each in records]
    for rank, (text, host, number) in enumerate(told):
        if text:
            raise EnvironmentMissing(f"rank {rank}: {text}")
        first = told.index(("", host, number))
        if first != rank:
            what = f"ranks {first} and {rank} are on the GPU {number} of {host}"
            raise EnvironmentMissing(
                f"peer nccl: {what}: NCCL takes one rank a GPU: start fewer, or leave the peer out"
            )
    return nccl


def _constant(nccl: Any, name: str, names: dict[str, str]) -> int:
    """NCCL's number of a type or reduction."""
    number = getattr(nccl, names.get(name, ""), None)
    if number is None:
        raise ArgumentError(f"peer nccl: it has no {name}: leave the peer out, or choose another -d or -o")
    return int(number)
