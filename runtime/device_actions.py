"""What the actions of a plan do where its arrays are in a GPU's memory; `plan_actions` is the same for the host's.

    DevicePlace      which GPU, and which way its bytes take
    DeviceActions    one plan at one rank: messages, kernels and copies, queued on the engine's `DeviceStreams`

If the transport does not reach the GPU's memory, messages lie in page-locked memory of the host, which the GPU reads
and writes:

    up to FUSED_BYTES_MAX   one kernel takes what has come from its slot, reduces it into the array, and writes the
                            result into the message that is sent next, if the instruction sends it; all of one turn in
                            one launch
    longer                  copy engines: slot -> landing (INTO), reduce (COMPUTE), array -> message (OUT), each waiting
                            for the other on the GPU, so that the copies of one message overlap the kernel of another

If it does, kernels work on the slots where they are, and messages are sent from the array itself. So they are on
channels between processes of one host that share GPU memory (`shared_lanes`), whatever the others do.

What the host has to know is little: that a slot has been read, before the next message may come into it, and that a
message is complete, before it is posted. What only the GPU has to know is said by events between streams. An
instruction without a message is therefore done, for the state machine, as soon as it is queued: whatever follows from
it is queued behind it. Messages of one channel are posted in the order in which they were asked for, whichever is
complete first.

Nothing is allocated in a run: slots, messages, landings and tables are made with the plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from optcc.runtime.buffers import (
    COPY,
    COPY_SLOT,
    RECV,
    REDUCE,
    REDUCE_SLOT,
    SEND,
    Arrays,
    BoundAction,
)
from optcc.runtime.cupy_kernels import BATCH_ROWS_MAX, ROW_WORDS, CupyKernels, KernelStep, address_of
from optcc.runtime.device_streams import COMPUTE, INTO, OUT, DeviceStreams, Ready
from optcc.runtime.shared_lanes import SharedLanes
from optcc.runtime.state import RankProgram
from optcc.runtime.transport import Bytes, Transport

FUSED_BYTES_MAX = 1 << 18
"""Longer messages go by the copy engines, which leave the processors of the GPU to kernels."""
LANDINGS = 2
TABLES = 8
_ALIGNMENT = 256


class DevicePlace(NamedTuple):
    """Arrays of a plan are in the memory of GPU `device_id`; `direct`: the transport reads and writes it there.

    `hosts`, if messages may go by CUDA IPC: see `optcc.runtime.device_paths.DevicePath`; at every rank or at none.
    """

    device_id: int
    direct: bool = False
    hosts: tuple[int, ...] | None = None


class _Work(NamedTuple):
    """A computation on addresses, see `KernelStep`; `scratch` is where a copy onto itself goes through, else 0."""

    dst: int
    src: int
    n_elements: int
    n_bytes: int
    scratch: int = 0


class _Message:
    """A message that is posted once it is complete."""

    __slots__ = ("is_complete", "view")

    def __init__(self, view: Any) -> None:
        self.view, self.is_complete = view, False


class DeviceActions:
    """The actions of a rank's `program`, on `streams`. `local_done(instruction)` says that a computation is done;
    `shared` has the channels that go by CUDA IPC."""

    def __init__(
        self,
        transport: Transport,
        streams: DeviceStreams,
        program: RankProgram,
        window: int,
        place: DevicePlace,
        local_done: Callable[[int], None],
        shared: SharedLanes | None = None,
    ) -> None:
        transfers = program.plan.transfers
        self._transport, self.streams, self._program = transport, streams, program
        self._direct, self._local_done, self._shared = place.direct, local_done, shared
        self._shared_handles = frozenset[int]() if shared is None else shared.handles
        # The instructions whose message comes in page-locked memory, and those whose message leaves by it.
        self._staged_in, self._staged_out = self._find_staged()
        self._fused_bytes_max = FUSED_BYTES_MAX
        self._cupy = streams.cupy
        self.kernels = CupyKernels(transfers.dtype, transfers.reduction, streams.streams[COMPUTE], streams.device_id)
        self._collected: list[BoundAction] = []
        self._pinned: list[Bytes] = []
        # Messages that are not posted yet, by channel; and, where they lie in host memory, those that are being sent.
        self._outgoing: dict[int, deque[_Message]] = {}
        self._lent: dict[int, deque[tuple[int, Bytes]]] = {}
        self._free: list[list[Bytes]] = self._make_messages(window)
        # What a kernel has written into a message already, by instruction.
        self._forwarded: dict[int, Bytes] = {}
        # The instructions that send what they compute.
        self._forwards = self._find_forwards()
        self._tables = [self.pinned(8 * ROW_WORDS * BATCH_ROWS_MAX).view(np.uint64) for _ in range(TABLES)]
        self._tables_busy = [0] * TABLES
        self._landings: list[tuple[Any, list[int]]] = []
        self._next_landing = 0
        self._make_landings()
        self._scratch: list[Any] = []

    # --- memory -------------------------------------------------------------------------------------------------------

    def device(self, n_bytes: int) -> Any:
        """`n_bytes` of the GPU's memory, whatever they hold."""
        with self.streams.device, self.streams.streams[COMPUTE]:
            return self._cupy.empty(n_bytes, dtype=np.uint8)

    def pinned(self, n_bytes: int) -> Bytes:
        """`n_bytes` of page-locked memory of the host."""
        with self.streams.device:
            memory = self._cupy.cuda.alloc_pinned_memory(max(n_bytes, 1))
        array = np.frombuffer(memory, dtype=np.uint8, count=n_bytes)
        # By the host, now: on a stream it would race with the first message.
        array[:] = 0
        return array

    def slots(self, n_bytes: int) -> Any:
        """Memory in which messages arrive."""
        return self.device(n_bytes) if self._direct else self.pinned(n_bytes)

    def _find_staged(self) -> tuple[frozenset[int], frozenset[int]]:
        program = self._program
        if self._direct:
            return frozenset(), frozenset()
        shared = frozenset[int]() if self._shared is None else self._shared.channels
        first = program.first
        staged_in = (
            first + i for i, channel in enumerate(program.recv_channel) if channel >= 0 and channel not in shared
        )
        staged_out = (
            first + i for i, channel in enumerate(program.send_channel) if channel >= 0 and channel not in shared
        )
        return frozenset(staged_in), frozenset(staged_out)

    def _make_messages(self, window: int) -> list[list[Bytes]]:
        """For each lane as many messages as it can have under way, each as long as its longest."""
        program = self._program
        found: list[list[Bytes]] = []
        for lane in program.lanes:
            staged = [
                send for send in (program.sends[i] for i in lane) if send and send.instruction in self._staged_out
            ]
            sends = [send.bytes for send in staged]
            count, longest = min(window, len(sends)), -(-max(sends, default=0) // _ALIGNMENT) * _ALIGNMENT
            block = self.pinned(count * longest)
            found.append([block[k * longest : (k + 1) * longest] for k in range(count)])
        return found

    def _make_landings(self) -> None:
        longest = max(
            (
                each.bytes
                for each in self._program.computes
                if each and each.reduce and each.instruction in self._staged_in
            ),
            default=0,
        )
        if longest > self._fused_bytes_max:
            self._landings = [(self.device(longest), [0]) for _ in range(LANDINGS)]

    def _find_forwards(self) -> set[int]:
        program = self._program
        return {
            compute.instruction
            for compute, send in zip(program.computes, program.sends, strict=True)
            if compute is not None
            and send is not None
            and send.instruction in self._staged_out
            and (send.offset, send.bytes) == (compute.dst_offset, compute.bytes)
        }

    def bind(self, bound: list[BoundAction]) -> list[BoundAction]:
        """Actions that are tied to arrays, tied to their addresses: a launch then looks nothing up."""
        made: list[BoundAction] = []
        for code, where, target, source in bound:
            if code in (SEND, RECV):
                made.append((code, where, target, source))
                continue
            dst, src, n_bytes = address_of(target), address_of(source), target.nbytes
            count = n_bytes // self.kernels.itemsize
            scratch = 0
            if code == COPY and abs(dst - src) < n_bytes:
                self._scratch.append(self.device(n_bytes))
                scratch = address_of(self._scratch[-1])
            made.append((code, where, _Work(dst, src, count, n_bytes, scratch), None))
        return made

    # --- a run --------------------------------------------------------------------------------------------------------

    def mark_stream(self, stream: Any) -> tuple[Any, Any]:
        """The caller's stream, CuPy's current one unless given, and a mark behind what is queued there."""
        stream = self.streams.current_stream() if stream is None else stream
        return stream, self.streams.mark_stream(stream)

    def begin(self, mark: Any, arrays: Arrays) -> None:
        """A run begins, behind the work of the caller that `mark` stands for: its input is copied, if it must be."""
        streams = self.streams
        with streams.device:
            streams.wait_for_mark(mark)
            for into, source in (*((arrays.before,) if arrays.before else ()), *arrays.pieces_before):
                self._copy(into, source)

    def end(self, stream: Any, arrays: Arrays, averages: list[tuple[Any, int]]) -> Ready:
        """Every instruction is done, or queued: what is left is to divide, and to copy the output to its place."""
        streams = self.streams
        with streams.device:
            for data, n_ranks in averages:
                self.kernels.finish(address_of(data), n_ranks, len(data))
                streams.note(COMPUTE)
            for into, source in (*arrays.pieces_after, *((arrays.after,) if arrays.after else ())):
                self._copy(into, source)
        return streams.end(stream, arrays)

    def _copy(self, into: Any, source: Any) -> None:
        self.kernels.copy(address_of(into), address_of(source), into.nbytes // self.kernels.itemsize)
        self.streams.note(COMPUTE)

    def compute(self, entry: BoundAction) -> None:
        """A computation is due: it is queued at the engine's next turn, together with others."""
        if not self._collected:
            self.streams.collect(self)
        self._collected.append(entry)

    def flush(self) -> None:
        """Queues what was collected."""
        entries, self._collected = self._collected, []
        streams = self.streams
        steps: list[KernelStep] = []
        done_at_once: list[int] = []
        done_after: list[int] = []
        with streams.device:
            for code, instruction, work, _ in entries:
                is_local = code in (REDUCE, COPY)
                if work.n_bytes > self._fused_bytes_max and instruction in self._staged_in:
                    self._take_long(code, instruction, work)
                    continue
                out = 0 if is_local else self._forward_to(instruction)
                step = KernelStep(work.dst, work.src, out, work.n_elements, int(code in (REDUCE, REDUCE_SLOT)))
                if work.scratch:
                    self._launch(KernelStep(work.scratch, work.src, 0, work.n_elements, 0))
                    self._launch(step._replace(src=work.scratch))
                elif work.n_bytes > self._fused_bytes_max:
                    self._launch(step)
                else:
                    steps.append(step)
                (done_at_once if is_local else done_after).append(instruction)
            for first in range(0, len(steps), BATCH_ROWS_MAX):
                self._launch_together(steps[first : first + BATCH_ROWS_MAX])
        for instruction in done_after:
            self.streams.after(COMPUTE, lambda number=instruction: self._local_done(number))  # type: ignore[misc]
        for instruction in done_at_once:
            self._local_done(instruction)

    def _forward_to(self, instruction: int) -> int:
        """The address of the message into which the result of an instruction is written, too; 0 for none."""
        if instruction not in self._forwards:
            return 0
        message = self._free[self._lane(instruction)].pop()
        self._forwarded[instruction] = message
        return address_of(message)

    def _lane(self, instruction: int) -> int:
        return self._program.lane_of[instruction - self._program.first]

    def _take_long(self, code: int, instruction: int, work: _Work) -> None:
        """A long message that has come: by a copy engine, and a kernel if it is reduced."""
        streams = self.streams
        if code == COPY_SLOT:
            streams.order(INTO, COMPUTE)
            streams.copy_into(work.dst, work.src, work.n_bytes)
        else:
            landing, busy = self._landings[self._next_landing]
            self._next_landing = (self._next_landing + 1) % LANDINGS
            if not streams.is_reached(busy[0]):
                streams.order(INTO, COMPUTE)
            streams.copy_into(address_of(landing), work.src, work.n_bytes)
            streams.order(COMPUTE, INTO)
            self.kernels.reduce(work.dst, address_of(landing), work.n_elements)
            streams.note(COMPUTE)
            busy[0] = streams.n_queued
        streams.after(INTO, lambda: self._local_done(instruction))

    def _launch_together(self, steps: list[KernelStep]) -> None:
        """In one launch, if there is a table that the GPU does not read any more."""
        if len(steps) > 1 or (steps[0].out and not steps[0].reduces):
            for number, busy in enumerate(self._tables_busy):
                if self.streams.is_reached(busy):
                    self.kernels.batch(self._tables[number], steps)
                    self.streams.note(COMPUTE)
                    self._tables_busy[number] = self.streams.n_queued
                    return
        for step in steps:
            self._launch(step)

    def _launch(self, step: KernelStep) -> None:
        kernels = self.kernels
        if not step.reduces:
            kernels.copy(step.dst, step.src, step.n_elements)
            if step.out:
                kernels.copy(step.out, step.src, step.n_elements)
                self.streams.note(COMPUTE)
        elif step.out:
            kernels.forward(step.dst, step.src, step.out, step.n_elements)
        else:
            kernels.reduce(step.dst, step.src, step.n_elements)
        self.streams.note(COMPUTE)

    # --- messages -----------------------------------------------------------------------------------------------------

    def receive(self, channel: int, view: Any) -> None:
        """A slot is free for the next message of a channel."""
        if channel in self._shared_handles:
            assert self._shared is not None
            self._shared.post_recv(channel, view)
        else:
            self._transport.post_recv(channel, view)

    def send(self, channel: int, view: Any, instruction: int) -> None:
        """Sends from the GPU's memory: from the array itself, or through host memory."""
        streams = self.streams
        if channel in self._shared_handles:
            assert self._shared is not None
            self._shared.post_send(channel, view)
            return
        if self._direct:
            message, stream = _Message(view), COMPUTE
        else:
            host = self._forwarded.pop(instruction, None)
            stream = OUT if host is None else COMPUTE
            if host is None:
                host = self._free[self._lane(instruction)].pop()
                with streams.device:
                    streams.order(OUT, COMPUTE)
                    streams.copy_out(address_of(host), address_of(view), view.nbytes)
            self._lent.setdefault(channel, deque()).append((self._lane(instruction), host))
            message = _Message(host[: view.nbytes])
        queue = self._outgoing.setdefault(channel, deque())
        queue.append(message)

        def complete() -> None:
            message.is_complete = True
            while queue and queue[0].is_complete:
                self._transport.post_send(channel, queue.popleft().view)

        streams.after(stream, complete)

    def take_back(self, channel: int) -> None:
        """A message has been sent, and its host memory is free for another."""
        if not self._direct and channel not in self._shared_handles:
            lane, host = self._lent[channel].popleft()
            self._free[lane].append(host)
