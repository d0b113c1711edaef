"""`Executor`: runs one rank of a verified plan. The only place that waits, and never longer than its deadline."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from optcc.collective import check_dtype
from optcc.errors import DeadlineExceeded, InputError, PlanError, RuntimeFault
from optcc.plan import Plan
from optcc.runtime.agree import agree
from optcc.runtime.kernels import Array, Kernels, NumpyKernels
from optcc.runtime.state import WINDOW, Action, PostRecv, PostSend, RankMachine, RankProgram
from optcc.runtime.transport import SENT, Bytes, Clock, MonotonicClock, Transport
from optcc.verdict import PROVED, Verdict

DEADLINE_S = 60.0
_POLL_S_MAX = 1.0
_ALIGNMENT = 64
_RECV, _SEND, _REDUCE, _COPY = range(4)
_Bound = tuple[int, int, Any, Any]
"""An action tied to memory: (_RECV or _SEND, handle, view, None) or (_REDUCE or _COPY, instruction, dst, src)."""


class Executor:
    """One rank's executor of `plan`, for any number of runs.

    Making one is collective: every rank of `transport` makes it at the same time, and all agree on the plan before
    anyone gets one. `verdict` is the verifier's on this very plan; `window` see `optcc.runtime.state`; a run that
    takes longer than `deadline_s` seconds ends in DeadlineExceeded. After a failed run the executor and its transport
    can only be closed.

    Raises PlanError if the plan has not been proved or is not for the ranks of the transport, MismatchError (at every
    rank) if the ranks differ in what they are about to run, InputError for a rank, window or deadline that cannot be.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        transport: Transport,
        verdict: Verdict,
        *,
        window: int = WINDOW,
        deadline_s: float = DEADLINE_S,
        kernels: Kernels | None = None,
        clock: Clock | None = None,
    ) -> None:
        if rank != transport.rank:
            raise InputError(f"rank {rank}: must be the transport's, {transport.rank}")
        if not deadline_s > 0:
            raise InputError(f"deadline {deadline_s} s: must be above zero")
        self.plan, self.rank, self.deadline_s = plan, rank, deadline_s
        self._transport = transport
        self._clock: Clock = clock or MonotonicClock()
        transfers = plan.transfers
        self._kernels: Kernels = kernels or NumpyKernels(transfers.dtype, transfers.reduction)
        # An unproved plan is refused only after the exchange, so that the other ranks learn of it and need not wait.
        refusal = _refusal(plan, verdict, transport.n_ranks)
        agree(transport, plan, proved=not refusal, timeout_s=deadline_s)
        if refusal:
            raise PlanError(refusal)
        self._program = RankProgram(plan, rank)
        self._machine = RankMachine(self._program, window)
        self._handles = transport.open(plan.channels)
        self._channel_of = {handle: channel for channel, handle in enumerate(self._handles) if handle >= 0}
        self._slots = _allocate_slots(self._program)
        self._work: Bytes | None = None
        self._bound: list[_Bound] = []
        self._bound_to: Bytes | None = None
        self._failed = False

    def run(self, buffer: Bytes) -> None:
        """Executes the plan once on `buffer`, in place: the message in its first `size_bytes`, scratch behind it.

        `buffer` is a writable contiguous uint8 array of `plan.buffer_bytes`, aligned to the dtype. An average is
        divided before the run returns. Running again with the same buffer is cheaper than with another.

        Raises InputError for a wrong buffer, DeadlineExceeded with what it waited for, RankLost if a rank is gone.
        """
        self._check_buffer(buffer)
        if self._failed:
            raise RuntimeFault(f"rank {self.rank}: a former run failed; this executor cannot run again")
        if self._bound_to is None or _address(self._bound_to) != _address(buffer):
            self._bind(buffer)
        self._failed = True
        with np.errstate(all="ignore"):
            self._execute()
            self._finish(buffer)
        self._failed = False

    def all_reduce(self, send: Array, recv: Array) -> None:
        """recv = the reduction of every rank's `send`; the two are the same memory or do not overlap.

        Both are contiguous arrays of the plan's dtype and size. `avg` divides by the number of ranks: floats by one
        rounded division after the sum, integers truncating toward zero.

        Raises InputError for arrays that do not fit the plan or if the plan is no allreduce, and as `run`.
        """
        if self.plan.collective.name != "allreduce":
            raise InputError(f"plan {self.plan.name}: {self.plan.collective.name}: must be an allreduce")
        self._check_array("send", send)
        self._check_array("recv", recv)
        if not recv.flags.writeable:
            raise InputError("recv: read-only: must be writable")
        in_place = _address(send) == _address(recv)
        if not in_place and np.may_share_memory(send, recv):
            raise InputError("send and recv overlap: must be the same memory or none in common")
        target = recv.reshape(-1).view(np.uint8)
        if self.plan.buffer_bytes == self.plan.size_bytes:
            if not in_place:
                np.copyto(recv.reshape(-1), send.reshape(-1))
            self.run(target)
            return
        if self._work is None:
            self._work = _aligned(self.plan.buffer_bytes)
        self._work[: self.plan.size_bytes] = send.reshape(-1).view(np.uint8)
        self.run(self._work)
        target[:] = self._work[: self.plan.size_bytes]

    def _execute(self) -> None:
        """The loop: posts, then computations, and only when neither is left a wait for events."""
        machine, transport, clock, bound = self._machine, self._transport, self._clock, self._bound
        channel_of, reduce, copy = self._channel_of, self._kernels.reduce, self._kernels.copy
        deadline = clock.now_s() + self.deadline_s
        computes: deque[_Bound] = deque()
        actions: list[Action] = machine.start()
        while True:
            for action in actions:
                code, where, view, source = entry = bound[action.index]
                if code == _SEND:
                    transport.post_send(where, view)
                elif code == _RECV:
                    transport.post_recv(where, view)
                else:
                    computes.append(entry)
            if computes:
                code, where, view, source = computes.popleft()
                if code == _REDUCE:
                    reduce(view, source)
                else:
                    copy(view, source)
                actions = machine.local_done(where)
                continue
            if machine.done:
                return
            actions = []
            wait_s = deadline - clock.now_s()
            if wait_s <= 0:
                raise DeadlineExceeded(f"not done after {self.deadline_s:g} s: {machine.report()}")
            for kind, handle in transport.poll(min(wait_s, _POLL_S_MAX)):
                channel = channel_of[handle]
                actions += machine.sent(channel) if kind == SENT else machine.arrived(channel)

    def _bind(self, buffer: Bytes) -> None:
        """Ties every action of the program to its bytes, once for as long as the buffer stays the same."""
        view = self._kernels.view
        bound: list[_Bound] = []
        for action in self._program.actions:
            if isinstance(action, PostRecv):
                slot = self._slots[action.lane][action.slot]
                bound.append((_RECV, self._handles[action.channel], slot[: action.bytes], None))
            elif isinstance(action, PostSend):
                data = buffer[action.offset : action.offset + action.bytes]
                bound.append((_SEND, self._handles[action.channel], data, None))
            else:
                if action.slot >= 0:
                    source = self._slots[action.lane][action.slot][: action.bytes]
                else:
                    source = buffer[action.src_offset : action.src_offset + action.bytes]
                target = buffer[action.dst_offset : action.dst_offset + action.bytes]
                code = _REDUCE if action.reduce else _COPY
                bound.append((code, action.instruction, view(target), view(source)))
        self._bound, self._bound_to = bound, buffer

    def _finish(self, buffer: Bytes) -> None:
        """Divides an average, in those elements that this rank must hold and that everyone contributed to."""
        collective, itemsize = self.plan.collective, check_dtype(self.plan.transfers.dtype)
        if collective.name in ("broadcast", "allgather"):
            return
        for start, stop, contributors in collective.after(self.rank, self.plan.size_bytes // itemsize):
            if contributors == collective.everyone:
                data = self._kernels.view(buffer[start * itemsize : stop * itemsize])
                self._kernels.finish(data, self.plan.n_ranks)

    def _check_buffer(self, buffer: Bytes) -> None:
        if buffer.dtype != np.uint8 or buffer.ndim != 1:
            raise InputError(f"buffer: {buffer.dtype} of {buffer.ndim} dimensions: must be uint8 of one dimension")
        if buffer.nbytes != self.plan.buffer_bytes:
            raise InputError(f"buffer: {buffer.nbytes} B: must be the plan's {self.plan.buffer_bytes} B")
        if not (buffer.flags.c_contiguous and buffer.flags.writeable):
            raise InputError("buffer: must be contiguous and writable")
        if buffer.nbytes and _address(buffer) % check_dtype(self.plan.transfers.dtype):
            raise InputError(f"buffer: at {_address(buffer):#x}: must be aligned to {self.plan.transfers.dtype}")

    def _check_array(self, name: str, array: Array) -> None:
        transfers = self.plan.transfers
        if array.dtype != np.dtype(transfers.dtype):
            raise InputError(f"{name}: {array.dtype}: must be the plan's {transfers.dtype}")
        if array.nbytes != transfers.size_bytes:
            raise InputError(f"{name}: {array.nbytes} B: must be the plan's {transfers.size_bytes} B")
        if not (array.flags.c_contiguous and array.flags.aligned):
            raise InputError(f"{name}: must be contiguous (C order) and aligned")


def _refusal(plan: Plan, verdict: Verdict, n_ranks: int) -> str:
    """Why this plan must not run here; empty if it may."""
    if verdict.digest != plan.digest:
        return f"plan {plan.digest[:12]}: the verdict is of {verdict.digest[:12]}: must be of the plan that runs"
    if verdict.verdict != PROVED:
        return f"plan {plan.digest[:12]}: {verdict.verdict}: must be proved before it runs"
    if plan.n_ranks != n_ranks:
        return f"plan {plan.digest[:12]}: {plan.n_ranks} ranks on a network of {n_ranks}: must be equal"
    itemsize = check_dtype(plan.transfers.dtype)
    for label, offsets in (("src_offset", plan.src_offset), ("dst_offset", plan.dst_offset), ("bytes", plan.bytes)):
        wrong = np.flatnonzero((offsets >= 0) & (offsets % itemsize != 0))
        if len(wrong):
            return f"instruction {wrong[0]}: {label} {offsets[wrong[0]]}: must be a multiple of {itemsize} B"
    return ""


def _allocate_slots(program: RankProgram) -> list[list[Bytes]]:
    """The staging slots of every lane, each as long as the longest message that it takes, in one block of memory."""
    shapes: list[tuple[int, int]] = []
    for recvs, slots in zip(program.recvs, program.slots, strict=True):
        longest = max((recv.bytes for recv in recvs), default=0)
        shapes.append((min(slots, len(recvs)), -(-longest // _ALIGNMENT) * _ALIGNMENT))
    block = _aligned(sum(count * size for count, size in shapes))
    # Touched once here: the first use of a page is slow, and must not fall into a run.
    block[:] = 0
    lanes: list[list[Bytes]] = []
    at = 0
    for count, size in shapes:
        lanes.append([block[at + k * size : at + (k + 1) * size] for k in range(count)])
        at += count * size
    return lanes


def _aligned(n_bytes: int) -> Bytes:
    """`n_bytes` that start at a multiple of the cache line."""
    raw = np.empty(n_bytes + _ALIGNMENT, dtype=np.uint8)
    at = -_address(raw) % _ALIGNMENT
    return raw[at : at + n_bytes]


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
