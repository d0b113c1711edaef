"""Peers: collectives of others that run beside ours, in the same processes, on the same buffers.

    mpi    the MPI library's own, by the algorithm that it was started with
    gloo   torch.distributed's backend for CPUs, over every NIC that all ranks have
    nccl   NVIDIA's, on the GPUs of the ranks (`nccl_peer`)

torch is imported when its peer is made and not before; `optcc[torch]` has it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from optcc.collective import COLLECTIVES, Collective, split
from optcc.errors import ArgumentError, EnvironmentMissing
from optcc.experiments.nccl_peer import NcclPeer
from optcc.runtime.kernels import Array, divide
from optcc.runtime.nics import HostNic, nics_of
from optcc.runtime.rendezvous import Meet, over_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

PEERS = ("mpi", "gloo", "nccl")
MPI_COLLECTIVES = (*COLLECTIVES, "sendrecv")
MPI_RING = (
    *("--mca", "coll_tuned_use_dynamic_rules", "1"),
    *("--mca", "coll_tuned_allreduce_algorithm", "5"),
    *("--mca", "coll_tuned_allreduce_algorithm_segmentsize", "262144"),
    *("--mca", "coll", "^han"),
)
"""Open MPI's ring with 256 KiB segments: the fastest and steadiest of its algorithms here. With one host at half it
takes 1.52 of the bound each time; the unsegmented ring (algorithm 4) 1.52 to 1.78, from run to run."""


class Peer(Protocol):
    """A collective of another library; `modes`: whether it runs out of place, in place, or both."""

    name: str
    modes: tuple[str, ...]

    def run(self, send: Array | None, recv: Array | None) -> None:
        """From what this rank gives to what it gets, None for nothing; in place both are parts of one message."""
        ...

    def close(self) -> None:
        """Releases its resources."""
        ...


def make_peer(
    name: str,
    comm: MPI.Intracomm,
    dtype: str,
    reduction: str,
    deadline_s: float,
    collective: Collective | None = None,
    device_id: int | None = None,
) -> Peer:
    """The peer called `name`, one of `PEERS`, for an AllReduce unless another collective is given, on arrays in the
    host's memory or on GPU `device_id`; collective.

    Raises EnvironmentMissing without what it needs, InputError for a dtype, reduction or collective that it lacks.
    """
    collective = collective or Collective("allreduce", comm.Get_size())
    if name == "gloo":
        if collective.name != "allreduce":
            raise ArgumentError(f"peer gloo: {collective.name}: must be an allreduce")
        return GlooPeer(comm, dtype, reduction, deadline_s)
    if name == "nccl":
        return NcclPeer(over_mpi(comm), dtype, reduction, collective, device_id)
    assert name == "mpi", name
    return MpiPeer(comm, dtype, reduction, collective)


class MpiPeer:
    """The MPI library's own collective, by the algorithm that it was started with.

    In place its ReduceScatter leaves the result at the beginning of the message and not where the rank's piece is, so
    it runs out of place only.
    """

    name = "mpi"

    def __init__(self, comm: MPI.Intracomm, dtype: str, reduction: str, collective: Collective) -> None:
        from mpi4py import MPI

        if dtype in ("float16", "bfloat16"):
            raise ArgumentError(f"peer mpi: MPI has no {dtype}: leave the peer out, or choose another -d")
        if collective.name not in MPI_COLLECTIVES:
            raise ArgumentError(f"peer mpi: {collective.name}: must be one of {', '.join(MPI_COLLECTIVES)}")
        self._comm, self._in_place = comm, MPI.IN_PLACE
        sums = {"sum": MPI.SUM, "avg": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
        self._op = {**sums, "band": MPI.BAND, "bor": MPI.BOR, "bxor": MPI.BXOR}[reduction]
        self._average = reduction == "avg"
        self._collective = collective
        out_only = ("reducescatter", "alltoall", "gather", "scatter", "sendrecv")
        self.modes: tuple[str, ...] = ("out",) if collective.name in out_only else ("out", "in")

    def run(self, send: Array | None, recv: Array | None) -> None:
        """See `Peer`."""
        name, root, comm = self._collective.name, self._collective.root, self._comm
        is_in_place = send is not None and recv is not None and np.may_share_memory(send, recv)
        given: Any = self._in_place if is_in_place else send
        if name == "allreduce":
            comm.Allreduce(given, recv, op=self._op)
        elif name == "reducescatter":
            assert send is not None
            comm.Reduce_scatter(send, recv, self._counts(send.size), op=self._op)
        elif name == "allgather":
            assert recv is not None
            comm.Allgatherv(given, [recv, self._counts(recv.size)])
        elif name == "alltoall":
            comm.Alltoall(send, recv)
        elif name == "sendrecv":
            rank, p = comm.Get_rank(), comm.Get_size()
            comm.Sendrecv(send, (rank + 1) % p, recvbuf=recv, source=(rank - 1) % p)
        elif name == "gather":
            comm.Gatherv(send, None if recv is None else [recv, self._counts(recv.size)], root=root)
        elif name == "scatter":
            comm.Scatterv(None if send is None else [send, self._counts(send.size)], recv, root=root)
        elif name == "reduce":
            comm.Reduce(given, recv, op=self._op, root=root)
        else:
            assert recv is not None
            if send is not None and not is_in_place:
                np.copyto(recv, send)
            comm.Bcast(recv, root)
        if self._average and recv is not None and self._collective.reduces:
            divide(recv, comm.Get_size())

    def _counts(self, count: int) -> list[int]:
        return [stop - start for start, stop in split(count, self._collective.n_ranks)]

    def close(self) -> None:
        """See `Peer`."""


class GlooPeer:
    """torch.distributed's Gloo, with the message in as many pieces as there are NICs, all under way at once.

    Gloo assigns its NICs round-robin, one to a collective; only several collectives at once (as DDP's buckets) use
    several NICs.
    """

    name = "gloo"
    modes: tuple[str, ...] = ("out", "in")

    def __init__(self, comm: MPI.Intracomm, dtype: str, reduction: str, deadline_s: float) -> None:
        try:
            import torch
            import torch.distributed as group
        except ImportError as error:
            raise EnvironmentMissing(f"gloo: {error}: pip install 'optcc[torch]'") from None
        ops = group.ReduceOp
        known = {"sum": ops.SUM, "avg": ops.SUM, "prod": ops.PRODUCT, "min": ops.MIN, "max": ops.MAX}
        if dtype == "bfloat16" or reduction not in known:
            what = dtype if reduction in known else reduction
            raise ArgumentError(f"peer gloo: it has no {what}: leave the peer out, or choose another -d or -o")
        self._op, self._average = known[reduction], reduction == "avg"
        self._torch, self._group, self._size = torch, group, comm.Get_size()
        meet = over_mpi(comm)
        names, address = common_nics(nics_of(os.environ), meet)
        self._pieces = len(names)
        os.environ["GLOO_SOCKET_IFNAME"] = ",".join(names)
        limit = timedelta(seconds=deadline_s)
        store: Any = None
        if comm.Get_rank() == 0:
            store = group.TCPStore(address, 0, self._size, True, limit, wait_for_workers=False)
        port = int(meet(b"" if store is None else str(store.port).encode()).records[0])
        if store is None:
            store = group.TCPStore(address, port, self._size, False, limit)
        group.init_process_group("gloo", store=store, rank=comm.Get_rank(), world_size=self._size, timeout=limit)

    def run(self, send: Array | None, recv: Array | None) -> None:
        """See `Peer`."""
        assert send is not None and recv is not None
        tensor = self._torch.from_numpy(recv)
        if not np.may_share_memory(send, recv):
            tensor.copy_(self._torch.from_numpy(send))
        pieces = tensor.tensor_split(self._pieces)
        under_way = [self._group.all_reduce(piece, self._op, async_op=True) for piece in pieces if piece.numel()]
        for work in under_way:
            work.wait()
        if self._average:
            divide(recv, self._size)

    def close(self) -> None:
        """See `Peer`."""
        if self._group.is_initialized():
            self._group.destroy_process_group()


def common_nics(nics: Sequence[HostNic], meet: Meet) -> tuple[list[str], str]:
    """The names of this rank's NICs that every rank has, or of its first one; and the address of rank 0's first."""
    mine = msgspec.json.encode([(nic.name, nic.address) for nic in nics])
    everyone = [msgspec.json.decode(record, type=list[tuple[str, str]]) for record in meet(mine).records]
    shared = set.intersection(*({name for name, _ in row} for row in everyone))
    names = [nic.name for nic in nics if nic.name in shared] or [nics[0].name]
    first = next((address for name, address in everyone[0] if name in shared), everyone[0][0][1])
    return names, first
