"""Peers: AllReduces of others that run beside ours, in the same processes, on the same buffers.

    mpi    the MPI library's own, by the algorithm that it was started with
    gloo   torch.distributed's backend for CPUs, over every NIC that all ranks have

torch is imported when its peer is made and not before; `optcc[torch]` has it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from optcc.errors import ArgumentError, EnvironmentMissing
from optcc.runtime.kernels import Array, divide
from optcc.runtime.nics import HostNic, nics_of
from optcc.runtime.rendezvous import Meet, over_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

PEERS = ("mpi", "gloo")
MPI_RING = (
    *("--mca", "coll_tuned_use_dynamic_rules", "1"),
    *("--mca", "coll_tuned_allreduce_algorithm", "5"),
    *("--mca", "coll_tuned_allreduce_algorithm_segmentsize", "262144"),
    *("--mca", "coll", "^han"),
)
"""Open MPI's ring with 256 KiB segments: the fastest and steadiest of its algorithms here. With one host at half it
takes 1.52 of the bound each time; the unsegmented ring (algorithm 4) 1.52 to 1.78, from run to run."""


class Peer(Protocol):
    """An AllReduce of another library."""

    name: str

    def all_reduce(self, send: Array, recv: Array) -> None:
        """recv = the reduction of every rank's send; send may be recv."""
        ...

    def close(self) -> None:
        """Releases its resources."""
        ...


def make_peer(name: str, comm: MPI.Intracomm, dtype: str, reduction: str, deadline_s: float) -> Peer:
    """The peer called `name`, one of `PEERS`; collective over `comm`.

    Raises EnvironmentMissing without what it needs, InputError for a dtype or a reduction that it does not have.
    """
    if name == "gloo":
        return GlooPeer(comm, dtype, reduction, deadline_s)
    assert name == "mpi", name
    return MpiPeer(comm, dtype, reduction)


class MpiPeer:
    """The MPI library's own AllReduce, by the algorithm that it was started with."""

    name = "mpi"

    def __init__(self, comm: MPI.Intracomm, dtype: str, reduction: str) -> None:
        from mpi4py import MPI

        if dtype in ("float16", "bfloat16"):
            raise ArgumentError(f"peer mpi: MPI has no {dtype}: leave the peer out, or choose another -d")
        self._comm, self._in_place = comm, MPI.IN_PLACE
        sums = {"sum": MPI.SUM, "avg": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
        self._op = {**sums, "band": MPI.BAND, "bor": MPI.BOR, "bxor": MPI.BXOR}[reduction]
        self._average = reduction == "avg"

    def all_reduce(self, send: Array, recv: Array) -> None:
        """See `Peer`."""
        self._comm.Allreduce(self._in_place if send is recv else send, recv, op=self._op)
        if self._average:
            divide(recv, self._comm.Get_size())

    def close(self) -> None:
        """See `Peer`."""


class GlooPeer:
    """torch.distributed's Gloo, with the message in as many pieces as there are NICs, all under way at once.

    Gloo assigns its NICs round-robin, one to a collective; only several collectives at once (as DDP's buckets) use
    several NICs.
    """

    name = "gloo"

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

    def all_reduce(self, send: Array, recv: Array) -> None:
        """See `Peer`."""
        tensor = self._torch.from_numpy(recv)
        if send is not recv:
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
