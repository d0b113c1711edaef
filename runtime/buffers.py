"""The memory of a plan at one rank: staging slots, the buffer that a run is in, and the bytes of each action.

A run is in the user's output itself, if the plan needs no scratch and tying the plan to that array pays, or else in a
buffer of the plan's own, with a copy of the input before it and of the output after it. An action is tied to its bytes
once for as long as runs are in the same memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from optcc.collective import Region, check_dtype
from optcc.errors import InputError
from optcc.plan import Plan
from optcc.runtime.input_aliasing import find_first_reads
from optcc.runtime.kernels import Array
from optcc.runtime.scattered import INPUT, OUTPUT, WORK, MemoryLayout, Place
from optcc.runtime.state import PostRecv, PostSend, RankProgram
from optcc.runtime.stored_types import is_stored_as, stored_dtype
from optcc.runtime.transport import Bytes

COPIED_BYTES_MAX = 1 << 16
"""Messages up to this length are copied into memory to which the plan is tied already; tying it to other memory costs
about 1 us an instruction."""
TIED_BYTES_MIN = 1 << 14
"""An input of less for each action is copied, too: tying costs more, if the input is elsewhere at every run."""
ALIGNMENT = 64
RECV, SEND, REDUCE, COPY, REDUCE_SLOT, COPY_SLOT, REDUCE_FIRST = range(7)
BoundAction = tuple[int, int, Any, Any]
"""An action tied to memory: (RECV, handle, view, None), (SEND, handle, view, instruction) or (how to compute,
instruction, dst, src). Where arrays are on a GPU, what comes from a slot is REDUCE_SLOT or COPY_SLOT."""


class PlanMemory(NamedTuple):
    """Where the memory of a plan is made: how bytes become elements, and what makes `n_bytes` for messages that arrive,
    and for the plan to run in.

    `device_id` is the GPU whose memory the arrays are in, -1 for the host's. `reads_input`: kernels and transport may
    read the input where it is. Messages of the channels `shared` arrive in memory that `shared_slots` makes.
    """

    view: Callable[[Any], Any]
    slots: Callable[[int], Any]
    work: Callable[[int], Any]
    device_id: int
    reads_input: bool
    shared: frozenset[int] = frozenset()
    shared_slots: Callable[[int], Any] | None = None


class Arrays(NamedTuple):
    """The memory of a run: where the plan runs, what is copied (to, from) before and after, and the user's output; and
    where the input stays and is read, with its address, if it is not copied. Where input or output are several parts of
    the message, `pieces_before` and `pieces_after` are copied."""

    buffer: Any
    address: int
    before: tuple[Any, Any] | None
    after: tuple[Any, Any] | None
    output: Any
    source: Any = None
    source_address: int = 0
    pieces_before: tuple[tuple[Any, Any], ...] = ()
    pieces_after: tuple[tuple[Any, Any], ...] = ()


class PlanBuffers:
    """The memory of `plan` at `rank`, whose channels have `handles` at the transport.

    `in_order`: messages go one at a time.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        program: RankProgram,
        handles: Sequence[int],
        memory: PlanMemory,
        *,
        in_order: bool,
    ) -> None:
        self._plan, self._rank, self._program, self._handles = plan, rank, program, handles
        self._view, self._allocate, self._device_id = memory.view, memory.work, memory.device_id
        self._may_read_input, self._in_order = memory.reads_input, in_order
        self._itemsize = check_dtype(plan.transfers.dtype)
        self._stored = stored_dtype(plan.transfers.dtype)
        # Where in the message this rank's input and output stand: first byte and byte after the last; (0, 0) for none.
        # Where one of them is several parts, this counts from the beginning of the array.
        inputs, outputs = _places(plan, rank)
        self._layout = _layout(program, inputs, outputs) if len(inputs) > 1 or len(outputs) > 1 else None
        self.input_bytes, self.output_bytes = _span(inputs), _span(outputs)
        self._slots = _allocate_slots(program, memory.slots, lambda recv: recv.channel not in memory.shared)
        # The same slots, for messages of the channels that take another way.
        self._shared, self._shared_slots = memory.shared, self._slots
        if memory.shared_slots is not None:
            self._shared_slots = _allocate_slots(
                program, memory.shared_slots, lambda recv: recv.channel in memory.shared
            )
        self._work: Any = None
        # The addresses of the buffer and, where it is read there, of the input.
        self.tied_to: tuple[int, int] | None = None
        # The parts of the buffer that are divided at the end of a run, and by what.
        self.averages: list[tuple[Any, int]] = []
        self._first_reads: frozenset[int] | None = None
        self._first_reads_found = False

    def arrange(self, send: Array | None, recv: Array | None) -> Arrays:
        """The memory of a run on these arrays; raises as `PersistentPlan.start`."""
        given, wanted = self.input_bytes, self.output_bytes
        source, at = self._check_array("send", send, given)
        target, address = self._check_array("recv", recv, wanted)
        if recv is not None and not getattr(recv.flags, "writeable", True):
            raise InputError("recv: read-only: must be writable")
        if self._layout is not None:
            return self._arrange_pieces(self._layout, source, at, target, address, recv)
        in_place = False
        if source is not None and target is not None:
            ahead = at - address
            in_place = ahead == given[0] - wanted[0]
            if not in_place and -source.nbytes < ahead < target.nbytes:
                raise InputError("send and recv overlap: must be the same memory or none in common")
        if target is not None and self._runs_in(target, address):
            if source is None or in_place:
                return Arrays(target, address, None, None, recv)
            if self._reads_input_where_it_is(source):
                return Arrays(target, address, None, None, recv, source, at)
            return Arrays(target, address, (target[slice(*given)], source), None, recv)
        work = self._take_work()
        before = None if source is None else (work[slice(*given)], source)
        after = None if target is None else (target, work[slice(*wanted)])
        return Arrays(work, address_of(work), before, after, recv)

    def _arrange_pieces(
        self, layout: MemoryLayout, source: Any, at: int, target: Any, address: int, output: Any
    ) -> Arrays:
        """The memory of a run whose input or output is several parts of the message; in place, the input is copied."""
        if source is not None and target is not None and -source.nbytes < at - address < target.nbytes:
            kept = self._allocate(source.nbytes)
            return self._with_pieces(layout, kept, ((kept, source),), target, address, output)
        return self._with_pieces(layout, source, (), target, address, output)

    def _with_pieces(
        self,
        layout: MemoryLayout,
        source: Any,
        before: tuple[tuple[Any, Any], ...],
        target: Any,
        address: int,
        output: Any,
    ) -> Arrays:
        if layout.work_bytes and self._work is None:
            self._work = self._allocate(layout.work_bytes)
        homes = {OUTPUT: target, INPUT: source, WORK: self._work}
        copies = [(homes[home][at : at + n], source[mine : mine + n]) for home, at, mine, n in layout.before]
        after = [(target[mine : mine + n], homes[home][at : at + n]) for home, at, mine, n in layout.after]
        source_address = 0 if source is None else address_of(source)
        return Arrays(target, address, None, None, output, source, source_address, (*before, *copies), tuple(after))

    def input_in(self, arrays: Arrays) -> Any:
        """The bytes of this rank's input once a run has begun; None if it has none."""
        start, stop = self.input_bytes
        if start == stop:
            return None
        if arrays.source is not None:
            return arrays.source
        return arrays.before[1] if arrays.before is not None else arrays.buffer[start:stop]

    def output_in(self, arrays: Arrays) -> Any:
        """The bytes of this rank's output once a run is over; None if it has none."""
        start, stop = self.output_bytes
        if start == stop:
            return None
        if arrays.after is not None:
            return arrays.after[0]
        return arrays.buffer if arrays.buffer.nbytes == stop - start else arrays.buffer[start:stop]

    def check_buffer(self, buffer: Any) -> int:
        """The address of a buffer that a plan can run in."""
        if self._layout is not None:
            raise InputError(f"plan {self._plan.name}: must run from an array to an array, not in a buffer")
        if buffer.dtype != np.uint8 or buffer.ndim != 1:
            raise InputError(f"buffer: {buffer.dtype} of {buffer.ndim} dimensions: must be uint8 of one dimension")
        if buffer.nbytes != self._plan.buffer_bytes:
            raise InputError(f"buffer: {buffer.nbytes} B: must be the plan's {self._plan.buffer_bytes} B")
        if not (buffer.flags.c_contiguous and getattr(buffer.flags, "writeable", True)):
            raise InputError("buffer: must be contiguous and writable")
        address = address_of(buffer)
        if buffer.nbytes and address % self._itemsize:
            raise InputError(f"buffer: at {address:#x}: must be aligned to {self._plan.transfers.dtype}")
        return address

    def _check_array(self, name: str, array: Any, place: tuple[int, int]) -> tuple[Any, int]:
        """The bytes of `array`, which must fit `place`, and its address; None where there is none to give."""
        dtype, n_bytes = self._plan.transfers.dtype, place[1] - place[0]
        if array is None:
            if n_bytes:
                raise InputError(f"{name}: None: must be an array of {n_bytes} B at rank {self._rank}")
            return None, 0
        if (device := device_of(array)) != self._device_id:
            raise InputError(f"{name}: in {show_place(device)}: must be in {show_place(self._device_id)}")
        if array.dtype != self._stored and not is_stored_as(array, dtype):
            raise InputError(f"{name}: {array.dtype}: must be the plan's {dtype}")
        if array.nbytes != n_bytes:
            raise InputError(f"{name}: {array.nbytes} B: must be the plan's {n_bytes} B")
        address = address_of(array)
        if not array.flags.c_contiguous or (n_bytes and address % self._itemsize):
            raise InputError(f"{name}: must be contiguous (C order) and aligned")
        return array.reshape(-1).view(np.uint8), address

    def tie(self, arrays: Arrays) -> list[BoundAction]:
        """Every action of the program tied to its bytes, for as long as the arrays stay the same."""
        view, given = self._view, arrays.source
        buffer = arrays.buffer if self._layout is None else _Pieces(self._layout, arrays.buffer, given, self._work)
        first_reads = (None if given is None else self._first_reads) or frozenset()
        bound: list[BoundAction] = []
        for action in self._program.actions:
            if isinstance(action, PostRecv):
                slot = self._slots_of(action.channel)[action.lane][action.slot]
                bound.append((RECV, self._handles[action.channel], slot[: action.bytes], None))
                continue
            if isinstance(action, PostSend):
                data = given if action.index in first_reads else buffer
                data = data[action.offset : action.offset + action.bytes]
                bound.append((SEND, self._handles[action.channel], data, action.instruction))
                continue
            target = view(buffer[action.dst_offset : action.dst_offset + action.bytes])
            code = REDUCE if action.reduce else COPY
            source: Any
            if action.slot < 0:
                source = view(buffer[action.src_offset : action.src_offset + action.bytes])
            else:
                channel = self._program.recv_channel[action.instruction - self._program.first]
                source = view(self._slots_of(channel)[action.lane][action.slot][: action.bytes])
                if self._device_id >= 0:
                    code = REDUCE_SLOT if action.reduce else COPY_SLOT
                if action.index in first_reads:
                    code = REDUCE_FIRST
                    source = view(given[action.dst_offset : action.dst_offset + action.bytes]), source
            bound.append((code, action.instruction, target, source))
        self.tied_to = arrays.address, arrays.source_address
        self.averages = [(view(buffer[start:stop]), count) for start, stop, count in self._reduced_bytes()]
        return bound

    def _slots_of(self, channel: int) -> list[list[Any]]:
        return self._shared_slots if channel in self._shared else self._slots

    def _runs_in(self, target: Any, address: int) -> bool:
        """True if the plan runs in the user's memory itself: it is whole, and tying the plan to it pays."""
        if target.nbytes != self._plan.buffer_bytes:
            return False
        return target.nbytes > COPIED_BYTES_MAX or self.tied_to in (None, (address, 0))

    def _reads_input_where_it_is(self, source: Any) -> bool:
        """True if no copy of a whole input is needed, and one would cost more than to tie the plan to it."""
        if not self._may_read_input or source.nbytes != self._plan.buffer_bytes:
            return False
        if source.nbytes <= max(COPIED_BYTES_MAX, TIED_BYTES_MIN * len(self._program.actions)):
            return False
        if not self._first_reads_found:
            self._first_reads_found = True
            self._first_reads = find_first_reads(self._program, self._in_order)
        return self._first_reads is not None

    def _take_work(self) -> Any:
        if self._work is None:
            self._work = self._allocate(self._plan.buffer_bytes)
        return self._work

    def _reduced_bytes(self) -> list[tuple[int, int, int]]:
        """Which bytes of an average are to be divided, and by how many: elements, in the end, that this rank must hold,
        and who contributed to them."""
        collective, itemsize = self._plan.collective, self._itemsize
        if not collective.reduces or self._plan.transfers.reduction != "avg":
            return []
        after = collective.after(self._rank, self._plan.size_bytes // itemsize)
        return [(start * itemsize, stop * itemsize, ranks.bit_count()) for start, stop, ranks in after]


class _Pieces:
    """The message at a rank, for slices of bytes that lie in one array."""

    def __init__(self, layout: MemoryLayout, target: Any, source: Any, work: Any) -> None:
        self._layout, self._homes = layout, {OUTPUT: target, INPUT: source, WORK: work}

    def __getitem__(self, bytes_: slice) -> Any:
        found = self._layout.find(bytes_.start, bytes_.stop)
        assert found is not None, "the layout has each access in one piece"
        home, at = found
        return self._homes[home][at : at + bytes_.stop - bytes_.start]


def _layout(program: RankProgram, inputs: list[Place], outputs: list[Place]) -> MemoryLayout:
    reads: set[Place] = set()
    writes: set[Place] = set()
    for action in program.actions:
        if isinstance(action, PostSend):
            reads.add((action.offset, action.offset + action.bytes))
        elif not isinstance(action, PostRecv):
            writes.add((action.dst_offset, action.dst_offset + action.bytes))
            if action.slot < 0:
                reads.add((action.src_offset, action.src_offset + action.bytes))
    return MemoryLayout(inputs, outputs, reads, writes)


def _places(plan: Plan, rank: int) -> tuple[list[Place], list[Place]]:
    """Which parts of the message are the input of `rank`, and which its output."""
    collective, itemsize = plan.collective, check_dtype(plan.transfers.dtype)
    count = plan.size_bytes // itemsize
    given, got = collective.before(rank, count), collective.after(rank, count)
    return _adjacent(given, itemsize), _adjacent(got, itemsize)


def _adjacent(regions: Sequence[Region], itemsize: int) -> list[Place]:
    """The bytes of regions, neighbours as one."""
    found: list[Place] = []
    for start, stop, _ in regions:
        if found and found[-1][1] == start * itemsize:
            found[-1] = found[-1][0], stop * itemsize
        else:
            found.append((start * itemsize, stop * itemsize))
    return found


def _span(places: Sequence[Place]) -> Place:
    """The one place, or as many bytes from 0 on."""
    if len(places) == 1:
        return places[0]
    return 0, sum(stop - start for start, stop in places)


def _allocate_slots(
    program: RankProgram, allocate: Callable[[int], Bytes], takes: Callable[[PostRecv], bool]
) -> list[list[Bytes]]:
    """The slots of every lane, each as long as the longest message that it takes of those that `takes` says, in one
    block of memory."""
    shapes: list[tuple[int, int]] = []
    for recvs, slots in zip(program.recvs, program.slots, strict=True):
        longest = max((recv.bytes for recv in recvs if takes(recv)), default=0)
        shapes.append((min(slots, len(recvs)), -(-longest // ALIGNMENT) * ALIGNMENT))
    block = allocate(sum(count * size for count, size in shapes))
    lanes: list[list[Bytes]] = []
    at = 0
    for count, size in shapes:
        lanes.append([block[at + k * size : at + (k + 1) * size] for k in range(count)])
        at += count * size
    return lanes


def aligned(n_bytes: int) -> Bytes:
    """`n_bytes` that start at a multiple of the cache line."""
    raw = np.empty(n_bytes + ALIGNMENT, dtype=np.uint8)
    at = -address_of(raw) % ALIGNMENT
    return raw[at : at + n_bytes]


def touched(n_bytes: int) -> Bytes:
    """`aligned`, and every page used once: the first use is slow, and must not fall into a run."""
    made = aligned(n_bytes)
    made[:] = 0
    return made


def nature_of(send: Array, recv: Array) -> tuple[Any, ...]:
    """All that matters of two arrays that are held already, but what they hold.

    Where they are is no part of it: an array's memory does not move while others refer to it.
    """
    return send.nbytes, send.dtype, send.flags.num, recv.nbytes, recv.dtype, recv.flags.num


def address_of(array: Any) -> int:
    """Where the bytes of an array stand, in the memory of the processor or of a GPU."""
    if type(array) is np.ndarray:
        try:
            return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
        except (BufferError, TypeError, ValueError):  # read-only, empty, in pieces, or of a type of another package
            return int(array.ctypes.data)
    interface = getattr(array, "__cuda_array_interface__", None)
    return int(array.ctypes.data if interface is None else interface["data"][0])


def device_of(array: Any) -> int:
    """The GPU in whose memory an array of CuPy is; -1 for one of NumPy."""
    return -1 if isinstance(array, np.ndarray) else int(array.device.id)


def show_place(device_id: int) -> str:
    """
    >>> show_place(-1), show_place(3)
    ("the host's memory", 'the memory of GPU 3')
    """
    return "the host's memory" if device_id < 0 else f"the memory of GPU {device_id}"


def carried_bytes(plan: Plan) -> list[int]:
    """Bytes that each channel carries in a run."""
    sends = plan.out_channel >= 0
    carried = np.bincount(plan.out_channel[sends], plan.bytes[sends], minlength=len(plan.channels))
    return [int(n_bytes) for n_bytes in carried]
