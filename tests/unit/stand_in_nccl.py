"""A stand-in for `cupy.cuda.nccl` among the processes of mpirun, over the stand-in for CuPy.

Written from what NCCL and CuPy document: calls queue work on a stream and return; work of all ranks meets when their
GPUs come to it, which is late (a process that has not come to wait for its stream keeps the others waiting); calls of a
group are one work; a rank whose GPU another one has is an error when communicators are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.unit.stand_in_cupy import StandIn

UNIQUE_ID_BYTES = 128
TYPES = (np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.float16, np.float32, np.float64)
OPERATIONS: tuple[Callable[[Any, Any], Any], ...] = (np.add, np.multiply, np.maximum, np.minimum)


class NcclError(RuntimeError):
    """What CuPy raises for an error of NCCL."""


class Nccl:
    """The module. Without bfloat16, as CuPy's of old."""

    available = True
    NcclError = NcclError
    NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
    NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64 = range(6, 9)
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = range(4)

    def __init__(self, cupy: StandIn, *, is_old: bool = False) -> None:
        self.cupy, self.is_old = cupy, is_old
        # The sends and receives of the group that is open, if one is.
        self.group: list[tuple[Communicator, str, int, int, int, int]] | None = None

    def get_unique_id(self) -> tuple[int, ...] | bytes:
        """Signed numbers of old, bytes since CuPy 14."""
        if self.is_old:
            return tuple(each - 128 for each in range(UNIQUE_ID_BYTES))
        return bytes(255 - each for each in range(UNIQUE_ID_BYTES))

    def NcclCommunicator(self, ndev: int, commId: tuple[int, ...] | bytes, rank: int) -> Communicator:  # noqa: N802
        assert commId == self.get_unique_id()
        return Communicator(self, ndev, rank)

    def groupStart(self) -> None:  # noqa: N802
        self.group = []

    def groupEnd(self) -> None:  # noqa: N802
        assert self.group is not None, "groupEnd without groupStart"
        calls, self.group = self.group, None
        if calls:
            calls[0][0].run_group(calls)


class Communicator:
    """A rank's communicator, on the GPU that was current."""

    def __init__(self, nccl: Nccl, n_ranks: int, rank: int) -> None:
        from mpi4py import MPI

        self.nccl, self.cupy, self.n_ranks, self.rank = nccl, nccl.cupy, n_ranks, rank
        self.device, self.comm = nccl.cupy._device(), MPI.COMM_WORLD.Dup()
        assert (self.comm.Get_size(), self.comm.Get_rank()) == (n_ranks, rank)
        if len(set(self.comm.allgather(self.device))) < n_ranks:
            raise NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage: duplicate GPU")

    def destroy(self) -> None:
        self.comm.Free()

    def _at(self, address: int, count: int, datatype: int) -> Any:
        dtype = np.dtype(TYPES[datatype])
        return self.cupy._bytes(address, count * dtype.itemsize, self.device).view(dtype)

    def _queue(self, stream: int, work: Callable[[], None]) -> None:
        self.cupy._queue(self.cupy._by_pointer(stream, self.device), work)

    def _reduced(self, address: int, count: int, datatype: int, op: int) -> Any:
        everyone = self.comm.allgather(self._at(address, count, datatype).copy())
        total = everyone[0]
        for each in everyone[1:]:
            total = OPERATIONS[op](total, each)
        return total

    def allReduce(self, send: int, recv: int, count: int, datatype: int, op: int, stream: int) -> None:  # noqa: N802
        def work() -> None:
            self._at(recv, count, datatype)[:] = self._reduced(send, count, datatype, op)

        self._queue(stream, work)

    def reduce(self, send: int, recv: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        def work() -> None:
            total = self._reduced(send, count, datatype, op)
            if self.rank == root:
                self._at(recv, count, datatype)[:] = total

        self._queue(stream, work)

    def reduceScatter(self, send: int, recv: int, count: int, datatype: int, op: int, stream: int) -> None:  # noqa: N802
        def work() -> None:
            total = self._reduced(send, count * self.n_ranks, datatype, op)
            self._at(recv, count, datatype)[:] = total[self.rank * count : (self.rank + 1) * count]

        self._queue(stream, work)

    def allGather(self, send: int, recv: int, count: int, datatype: int, stream: int) -> None:  # noqa: N802
        def work() -> None:
            everyone = self.comm.allgather(self._at(send, count, datatype).copy())
            self._at(recv, count * self.n_ranks, datatype)[:] = np.concatenate(everyone)

        self._queue(stream, work)

    def broadcast(self, send: int, recv: int, count: int, datatype: int, root: int, stream: int) -> None:
        def work() -> None:
            given = self._at(send, count, datatype).copy() if self.rank == root else None
            self._at(recv, count, datatype)[:] = self.comm.bcast(given, root)

        self._queue(stream, work)

    def send(self, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        assert self.nccl.group is not None, "a send alone waits for its receive"
        self.nccl.group.append((self, "send", address, count, datatype, peer))
        self.stream = stream

    def recv(self, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        assert self.nccl.group is not None, "a receive alone waits for its send"
        self.nccl.group.append((self, "recv", address, count, datatype, peer))

    def run_group(self, calls: list[tuple[Communicator, str, int, int, int, int]]) -> None:
        def work() -> None:
            sends = {each[5]: self._at(*each[2:5]).copy() for each in calls if each[1] == "send"}
            got = self.comm.alltoall([sends.get(rank) for rank in range(self.n_ranks)])
            for each in calls:
                if each[1] == "recv":
                    self._at(*each[2:5])[:] = got[each[5]]

        self._queue(self.stream, work)
