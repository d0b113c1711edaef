"""`ProcessGroupOptcc`: the operations of torch.distributed on tensors, over a communicator.

Each group has a communicator of its own over all NICs, and a thread that drives it (`optcc.runtime.progress_thread`):
operations go on while the program computes, collectives begin in the order in which they are called, and messages at
once. torch resolves a class derived from its `ProcessGroup` by names alone, those of several versions, so that some
methods here have two.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from optcc.errors import OptccError
from optcc.runtime.communicator import Communicator
from optcc.runtime.handle import Handle
from optcc.runtime.kernels import Array
from optcc.runtime.point_to_point import AnyReceive
from optcc.runtime.progress_thread import Operation, ProgressThread
from optcc.torch.connect import JobNetwork, Options, connect, meet_in
from optcc.torch.tensors import Reduction, SparseSum, TensorMemory, check, reduction_of, span
from optcc.torch.work import JointWork, Work

Begin = Callable[[Communicator, TensorMemory], Sequence[Handle]]


class _Job:
    """What is known of the network of the default group, as long as there is one."""

    network: JobNetwork | None = None


def create(group: Any, options: Any) -> ProcessGroupOptcc:
    """The process group that torch asks for; collective among its ranks, as each is connected to the others."""
    if options is None:
        options = Options()
    if not isinstance(options, Options):
        raise TypeError(f"optcc: pg_options: {type(options).__name__}: must be optcc.torch.connect.Options")
    rank, n_ranks, timeout = group.group_rank, group.group_size, group.timeout
    ranks = list(group.global_ranks_in_group)
    is_default = not ranks
    meet = meet_in(group.store, rank, n_ranks, timeout)
    found: list[JobNetwork] = []

    def make() -> Communicator:
        comm, network = connect(meet, ranks or range(n_ranks), options, None if is_default else _Job.network)
        found.append(network)
        return comm

    try:
        thread = ProgressThread(make, f"group {group.group_id or 'of all ranks'}")
    except OptccError as error:
        raise dist.DistBackendError(f"optcc: rank {rank} of {n_ranks}: {error}") from error
    if is_default:
        _Job.network = found[0]
    return ProcessGroupOptcc(thread, rank, n_ranks, timeout)


class ProcessGroupOptcc(dist.ProcessGroup):  # type: ignore[misc] # torch is Any
    """The operations of one rank of a group; `timeout` is for those that name none."""

    def __init__(self, thread: ProgressThread, rank: int, n_ranks: int, timeout: timedelta) -> None:
        super().__init__(rank, n_ranks)
        self._thread, self._rank, self._n_ranks, self._timeout = thread, rank, n_ranks, timeout
        self._n_collectives = 0
        self._group_name, self._group_desc = "", "undefined"
        self._coalesced: list[Work] | None = None
        # The thread knows nothing of this group: it ends with it, or with the program.
        self._end = weakref.finalize(self, thread.close, abort=True)

    # --- what torch asks of any group ---------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name of the backend."""
        return "optcc"

    name = _get_backend_name = getBackendName

    # torch keeps the names of a group with its backends, of which a group in Python has none. It has no `_device_types`
    # either: from 2.15 on, torch attaches a flight recorder to groups that have, and fails for one in Python.

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """The name of the group."""
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Torch names the group once it is made."""
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """What the group is for."""
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - torch's name
        """Torch describes the group once it is made."""
        self._group_desc = desc

    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def _get_backend(self, device: Any) -> ProcessGroupOptcc:
        """The group is its own backend."""
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"optcc: no backend for {device}: tensors must be on the CPU")
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def supports_tensor_alloc(self, device: Any) -> bool:
        """No memory is better than any other."""
        del device
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """For operations from now on that name none."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        self._n_collectives = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._n_collectives

    def shutdown(self) -> None:
        """Ends the group once its operations are done."""
        self._thread.close()
        self._end.detach()

    def abort(self) -> None:
        """Ends the group at once; where operations are under way, at all ranks."""
        self._end()

    def _start_coalescing(self, device: Any) -> None:
        del device
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> JointWork:
        del device
        works, self._coalesced = self._coalesced, None
        return JointWork(works or [])

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    # --- reductions ---------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Any], opts: Any = None) -> Work:
        """Every rank's tensor reduced, at every rank."""
        return self.allreduce_coalesced(list(_one("all_reduce", tensors)), opts)

    def allreduce_coalesced(self, tensors: list[Any], opts: Any = None) -> Work:
        """`allreduce` of several tensors."""
        opts = dist.AllreduceOptions() if opts is None else opts
        if len(tensors) == 1 and tensors[0].layout is torch.sparse_coo:
            return self._reduce_sparse(tensors[0], opts)
        check("all_reduce", tensors)
        hows = [reduction_of(opts.reduceOp, each) for each in tensors]

        def begin(comm: Communicator, memory: TensorMemory) -> list[Handle]:
            return [
                comm.start_all_reduce(data, how.op, data, dtype=how.dtype)
                for each, how in zip(tensors, hows, strict=True)
                if (data := memory.elements_of(each, how.dtype, is_written=True)).size
            ]

        return self._begin("all_reduce", begin, tensors, opts, tensors)

    def _reduce_sparse(self, tensor: Any, opts: Any) -> Work:
        """The sum of sparse tensors, at every rank: each gets what the others have, whose number differs."""
        if getattr(opts.reduceOp, "op", opts.reduceOp).name != "SUM" or tensor.device.type != "cpu":
            raise ValueError("optcc all_reduce: of sparse tensors: must be a SUM, on the CPU")
        sum_ = SparseSum(tensor, self._n_ranks)
        work = Work([tensor], "all_reduce")

        def begin(comm: Communicator) -> list[Handle]:
            counts = comm.all_gather(np.array([sum_.n_own], dtype=np.int64)).ravel().tolist()
            own = sum_.own
            return [
                handle
                for data, outs in zip(own, sum_.make_room(counts), strict=True)
                for handle in comm.start_exchange([data] * self._n_ranks, outs)
            ]

        def done(error: BaseException | None) -> None:
            if error is None:
                sum_.finish()
            work.end(error)

        return self._submit(work, Operation(begin, done, self._timeout_of(opts).total_seconds()))

    def reduce(self, tensors: list[Any], opts: Any) -> Work:
        """Every rank's tensor reduced, at the root."""
        (tensor,) = _one("reduce", tensors)
        check("reduce", tensors)
        how = reduction_of(opts.reduceOp, tensor)

        def begin(comm: Communicator, memory: TensorMemory) -> list[Handle]:
            is_root = self._rank == opts.rootRank
            data = memory.elements_of(tensor, how.dtype, is_written=is_root)
            out = data if is_root else None
            return [comm.start_reduce(data, how.op, opts.rootRank, out, dtype=how.dtype)] if data.size else []

        return self._begin("reduce", begin, tensors, opts, tensors)

    def reduce_scatter(self, output_tensors: list[Any], input_tensors: list[list[Any]], opts: Any = None) -> Work:
        """The k-th of every rank's tensors reduced, at rank k."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        (out,), (inputs,) = _one("reduce_scatter", output_tensors), _one("reduce_scatter", input_tensors)
        self._check_count("reduce_scatter", inputs)
        used = [out, *inputs]
        check("reduce_scatter", used)
        how = reduction_of(opts.reduceOp, out)
        if out.numel() != inputs[self._rank].numel():
            raise ValueError(
                f"optcc reduce_scatter: output of {out.numel()} elements, must be {inputs[self._rank].numel()}"
            )
        is_even = len({each.numel() for each in inputs}) == 1

        def begin(comm: Communicator, memory: TensorMemory) -> list[Handle]:
            if is_even:
                whole = memory.scratch(inputs, is_read=True)
                return self._reduce_scatter(comm, memory, out, whole, how)
            recv = memory.elements_of(out, how.dtype, is_read=False, is_written=True)
            return [
                comm.start_reduce(data, how.op, root, recv if root == self._rank else None, dtype=how.dtype)
                for root, each in enumerate(inputs)
                if (data := memory.elements_of(each, how.dtype)).size
            ]

        return self._begin("reduce_scatter", begin, used, opts, output_tensors)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        """The k-th part of every rank's tensor reduced, at rank k."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any = None) -> Work:
        """`reduce_scatter_single` of several tensors."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        pairs = list(zip(outputs, inputs, strict=True))
        check("reduce_scatter", [*outputs, *inputs])
        hows = [reduction_of(opts.reduceOp, out) for out in outputs]
        for out, each in pairs:
            _check_alike("reduce_scatter", out, each, out.numel() * self._n_ranks == each.numel())

        def begin(comm: Communicator, memory: TensorMemory) -> list[Handle]:
            return [
                handle
                for (out, each), how in zip(pairs, hows, strict=True)
                for handle in self._reduce_scatter(comm, memory, out, each, how)
            ]

        return self._begin("reduce_scatter", begin, [*outputs, *inputs], opts, outputs)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(
        self, comm: Communicator, memory: TensorMemory, out: Any, whole: Any, how: Reduction
    ) -> list[Handle]:
        send = memory.elements_of(whole, how.dtype)
        recv = memory.elements_of(out, how.dtype, is_read=False, is_written=True)
        if not send.size:
            return []
        return [comm.start_reduce_scatter(_apart(send, recv), how.op, recv, dtype=how.dtype)]

    # --- copies -------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Any], opts: Any) -> Work:
        """The root's tensor, at every rank."""
        (tensor,) = _one("broadcast", tensors)
        check("broadcast", tensors)

        def begin(comm: Communicator, memory: TensorMemory) -> list[Handle]:
            data = memory.bytes_of(tensor, is_written=self._rank != opts.rootRank)
            return [comm.start_broadcast(data, opts.rootRank)] if data.size else []

        return self._begin("broadcast", begin, tensors, opts, tensors)

    def allgather(self, output_tensors: list[list[Any]], input_tensors: list[Any], opts: Any = None) -> Work:
        """Every rank's tensor, at every rank; they may differ in size."""
        (outs,), (tensor,) = _one("all_gather", output_tensors), _one("all_gather", input_tensors)
        self._check_count("all_gather", outs)
        used = [tensor, *outs]
        check("all_gather", used)
        _check_alike("all_gather", tensor, outs[self._rank], tensor.numel() == outs[self._rank].numel())
        is_even = len({each.numel() for each in outs}) == 1

        def begin(comm: Communicator, memory: TensorMemory) -> list[Handle]:
            if is_even:
                return self._all_gather(comm, memory, memory.scratch(outs, is_written=True), tensor)
            data = memory.bytes_of(tensor)
            takes = [memory.bytes_of(each, is_read=False, is_written=True) for each in outs]
            return comm.start_exchange([data] * self._n_ranks, takes)

        return self._begin("all_gather", begin, used, opts, output_tensors)

    def allgather_coalesced(self, output_lists: list[list[Any]], input_list: list[Any], opts: Any = None) -> Work:
        """`allgather` of several tensors: `output_lists[r]` are those of rank r."""
        columns = [list(each) for each in zip(*output_lists, strict=True)]
        works = [self.allgather([outs], [each], opts) for outs, each in zip(columns, input_list, strict=True)]
        return self._joined("all_gather", works, output_lists)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        """Every rank's tensor, one behind the other, at every rank."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any = None) -> Work:
        """`all_gather_single` of several tensors."""
        pairs = list(zip(outputs, inputs, strict=True))
        check("all_gather", [*outputs, *inputs])
        for out, each in pairs:
            _check_alike("all_gather", each, out, each.numel() * self._n_ranks == out.numel())

        def begin(comm: Communicator, memory: TensorMemory) -> list[Handle]:
            return [handle for out, each in pairs for handle in self._all_gather(comm, memory, out, each)]

        return self._begin("all_gather", begin, [*outputs, *inputs], opts, outputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(self, comm: Communicator, memory: TensorMemory, out: Any, tensor: Any) -> list[Handle]:
        send = memory.bytes_of(tensor)
        recv = memory.bytes_of(out, is_read=False, is_written=True)
        if not send.size:
            return []
        is_own_part = send.ctypes.data == recv.ctypes.data + self._rank * send.nbytes
        return [comm.start_all_gather(send if is_own_part else _apart(send, recv), recv)]

    def gather(self, output_tensors: list[list[Any]], input_tensors: list[Any], opts: Any) -> Work:
        """Every rank's tensor, at the root."""
        (tensor,) = _one("gather", input_tensors)
        is_root = self._rank == opts.rootRank
        outs = _one("gather", output_tensors)[0] if is_root else []
        used = [tensor, *outs]
        check("gather", used)
        if is_root:
            self._check_count("gather", outs)
            for each in outs:
                _check_alike("gather", tensor, each, tensor.numel() == each.numel())

        def begin(comm: Communicator, memory: TensorMemory) -> list[Handle]:
            send = memory.bytes_of(tensor)
            if not send.size:
                return []
            if not is_root:
                return [comm.start_gather(send, opts.rootRank)]
            recv = memory.bytes_of(memory.scratch(outs, is_written=True))
            return [comm.start_gather(_apart(send, recv), opts.rootRank, recv)]

        return self._begin("gather", begin, used, opts, output_tensors)

    def scatter(self, output_tensors: list[Any], input_tensors: list[list[Any]], opts: Any) -> Work:
        """The root's k-th tensor, at rank k."""
        (out,) = _one("scatter", output_tensors)
        is_root = self._rank == opts.rootRank
        inputs = _one("scatter", input_tensors)[0] if is_root else []
        used = [out, *inputs]
        check("scatter", used)
        if is_root:
            self._check_count("scatter", inputs)
            for each in inputs:
                _check_alike("scatter", out, each, out.numel() == each.numel())

        def begin(comm: Communicator, memory: TensorMemory) -> list[Handle]:
            recv = memory.bytes_of(out, is_read=False, is_written=True)
            if not recv.size:
                return []
            if not is_root:
                return [comm.start_scatter(None, opts.rootRank, recv)]
            send = memory.bytes_of(memory.scratch(inputs, is_read=True))
            return [comm.start_scatter(_apart(send, recv), opts.rootRank, recv)]

        return self._begin("scatter", begin, used, opts, output_tensors)

    # --- all to all ---------------------------------------------------------------------------------------------------

    def all_to_all_single(
        self, output: Any, input: Any, output_split_sizes: list[int], input_split_sizes: list[int], opts: Any = None
    ) -> Work:
        """The k-th part of every rank's tensor, at rank k.

        Equal parts, with no sizes given, go by a plan; others as messages, whose sizes only their two ranks know.
        """
        check("all_to_all", [output, input])
        if not output_split_sizes and not input_split_sizes:
            _check_alike("all_to_all", input, output, input.numel() == output.numel())
            if input.numel() and input.shape[0] % self._n_ranks:
                raise ValueError(f"optcc all_to_all: first dimension {input.shape[0]}: must divide by {self._n_ranks}")
        sends = self._bounds("input_split_sizes", input, input_split_sizes)
        takes = self._bounds("output_split_sizes", output, output_split_sizes)

        def begin(comm: Communicator, memory: TensorMemory) -> Sequence[Handle]:
            send = memory.bytes_of(input)
            recv = memory.bytes_of(output, is_read=False, is_written=True)
            if output_split_sizes or input_split_sizes:
                send = _apart(send, recv)
                return comm.start_exchange([send[a:b] for a, b in sends], [recv[a:b] for a, b in takes])
            return [comm.start_all_to_all(_apart(send, recv), recv)] if send.size else []

        return self._begin("all_to_all", begin, [output, input], opts, [output])

    alltoall_base = all_to_all_single

    def alltoall(self, output_tensors: list[Any], input_tensors: list[Any], opts: Any = None) -> Work:
        """The k-th of every rank's tensors, at rank k; they may differ in size."""
        self._check_count("all_to_all", output_tensors)
        self._check_count("all_to_all", input_tensors)
        used = [*output_tensors, *input_tensors]
        check("all_to_all", used)

        def begin(comm: Communicator, memory: TensorMemory) -> list[Handle]:
            takes = [memory.bytes_of(each, is_read=False, is_written=True) for each in output_tensors]
            sends = [memory.bytes_of(each) for each in input_tensors]
            for recv in takes:
                sends = [_apart(send, recv) for send in sends]
            return comm.start_exchange(sends, takes)

        return self._begin("all_to_all", begin, used, opts, output_tensors)

    def _bounds(self, name: str, tensor: Any, sizes: list[int]) -> list[tuple[int, int]]:
        """The first byte of each rank's part, and that after its last."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not sizes:
            sizes = [rows // self._n_ranks] * self._n_ranks
            if rows % self._n_ranks and tensor.numel():
                raise ValueError(f"optcc all_to_all: first dimension {rows}: must divide by {self._n_ranks}")
        elif len(sizes) != self._n_ranks or sum(sizes) != rows:
            raise ValueError(f"optcc all_to_all: {name} {list(sizes)}: must be {self._n_ranks} that add up to {rows}")
        row_bytes = tensor.numel() // max(rows, 1) * tensor.element_size()
        ends = np.cumsum([0, *sizes]) * row_bytes
        return [(int(a), int(b)) for a, b in pairwise(ends)]

    # --- two ranks ----------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Any], dst: int, tag: int) -> Work:
        """Sends a tensor; done once the other rank has begun to receive it."""
        (tensor,) = _one("send", tensors)
        check("send", tensors)
        return self._message("send", lambda comm, memory: [comm.start_send(memory.bytes_of(tensor), dst, tag)], tensors)

    def recv(self, tensors: list[Any], src: int, tag: int) -> Work:
        """Receives the next message of that rank with that tag."""
        (tensor,) = _one("recv", tensors)
        check("recv", tensors)

        def begin(comm: Communicator, memory: TensorMemory) -> list[Handle]:
            return [comm.start_recv(memory.bytes_of(tensor, is_read=False, is_written=True), src, tag)]

        work = self._message("recv", begin, tensors)
        work.source = lambda: src
        return work

    def recv_anysource(self, tensors: list[Any], tag: int) -> Work:
        """Receives the next message with that tag, whichever rank sends it."""
        (tensor,) = _one("recv", tensors)
        check("recv", tensors)
        begun: list[AnyReceive] = []

        def begin(comm: Communicator, memory: TensorMemory) -> list[Handle]:
            begun.append(comm.start_recv_any(memory.bytes_of(tensor, is_read=False, is_written=True), tag))
            return [begun[0].handle]

        work = self._message("recv", begin, tensors)
        work.source = lambda: begun[0].source if begun else -1
        return work

    def barrier(self, opts: Any = None) -> Work:
        """Done once every rank has called it: one byte of each is reduced, which no rank has before."""
        token = np.zeros(1, dtype=np.uint8)
        return self._begin("barrier", lambda comm, _: [comm.start_all_reduce(token, "max", token)], [], opts, [])

    # --- how they begin -----------------------------------------------------------------------------------------------

    def _begin(self, what: str, begin: Begin, used: Sequence[Any], opts: Any, outcome: Any) -> Work:
        """Begins a collective that uses the memory of some tensors."""
        timeout = self._timeout_of(opts)
        return self._submit(*_operation(what, begin, outcome, timeout, [span(each) for each in used]))

    def _timeout_of(self, opts: Any) -> timedelta:
        own: timedelta = self._timeout if opts is None or opts.timeout <= timedelta(0) else opts.timeout
        return own

    def _submit(self, work: Work, operation: Operation, *, is_message: bool = False) -> Work:
        self._n_collectives += not is_message
        self._thread.submit(operation, is_message=is_message)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _message(self, what: str, begin: Begin, tensors: list[Any]) -> Work:
        return self._submit(*_operation(what, begin, tensors, self._timeout, []), is_message=True)

    def _joined(self, what: str, works: Sequence[Work], outcome: Any) -> Work:
        """Done once all of them are: a collective of nothing behind them would be done too early."""
        joint = Work(outcome, what)
        left = [len(works)]

        def one_done(_: Any) -> None:
            left[0] -= 1
            if not left[0]:
                errors = [each.exception() for each in works if each.exception() is not None]
                joint.end(errors[0] if errors else None)

        for work in works:
            work.get_future().add_done_callback(one_done)
        if not works:
            joint.end(None)
        return joint

    def _check_count(self, what: str, tensors: Sequence[Any]) -> None:
        if len(tensors) != self._n_ranks:
            raise ValueError(f"optcc {what}: {len(tensors)} tensors: must be {self._n_ranks}, one for each rank")


def _operation(
    what: str, begin: Begin, outcome: Any, timeout: timedelta, spans: list[tuple[int, int]]
) -> tuple[Work, Operation]:
    work, memory = Work(outcome, what), TensorMemory()

    def start(comm: Communicator) -> Sequence[Handle]:
        return begin(comm, memory)

    def done(error: BaseException | None) -> None:
        if error is None:
            try:
                memory.finish()
            except RuntimeError as failure:
                error = failure
        work.end(error)

    return work, Operation(start, done, timeout.total_seconds(), spans)


def _one(what: str, given: Sequence[Any]) -> Sequence[Any]:
    """What torch passes as a list, of one, as it has one device for a process."""
    if len(given) != 1:
        raise ValueError(f"optcc {what}: {len(given)} tensors or lists: must be one")
    return given


def _check_alike(what: str, first: Any, second: Any, fits: bool) -> None:
    """Raises ValueError for tensors that differ in type, or in size where that is wrong."""
    if first.dtype != second.dtype or not fits:
        raise ValueError(
            f"optcc {what}: {first.numel()} elements of {first.dtype} and {second.numel()} of {second.dtype}: must fit"
        )


def _apart(send: Array, recv: Array) -> Array:
    """What is sent, in memory of its own if the output lies there too, and is not all of it."""
    if send.nbytes == recv.nbytes and send.ctypes.data == recv.ctypes.data:
        return send
    return send.copy() if np.may_share_memory(send, recv) else send
