"""`PersistentPlan`: a plan made ready, which runs again and again; and what it needs of the engine that drives it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from optcc.collective import check_dtype
from optcc.errors import InputError
from optcc.plan import Channel, Plan
from optcc.runtime.barrier import NEVER
from optcc.runtime.buffers import (
    COPIED_BYTES_MAX,
    RECV,
    SEND,
    Arrays,
    BoundAction,
    PlanBuffers,
    PlanMemory,
    aligned,
    carried_bytes,
    nature_of,
    touched,
)
from optcc.runtime.channel_groups import ChannelGroups
from optcc.runtime.device_actions import DeviceActions, DevicePlace
from optcc.runtime.device_lanes import DeviceLaneMemory
from optcc.runtime.device_streams import DeviceStreams
from optcc.runtime.handle import DrivesRuns, Handle
from optcc.runtime.host_lanes import HostLaneMemory, long_lanes_within
from optcc.runtime.kernels import Array, Kernels
from optcc.runtime.observe.recorder import FlightRecorder
from optcc.runtime.plan_actions import PlanActions
from optcc.runtime.shared_lanes import LaneMemory, SharedLanes, lanes_within
from optcc.runtime.state import Action, Memory, Place, RankMachine, RankProgram
from optcc.runtime.transport import Event, Transport
from optcc.runtime.watching import RunTaps

REMEMBERED_ACTIONS_MAX = 128
REMEMBERED_BYTES_MAX = 1 << 14
"""Of programs up to this size, with no longer messages, the machine's steps are remembered: to compute at once what has
come delays what has come behind it by a few us at most."""


class Taps(Protocol):
    """Who is asked at the start of each run."""

    def open(self, prepared: PersistentPlan, drive: Callable[[float], None] | None) -> RunTaps | None:
        """What takes chunks of this run, if anything does; `drive` goes on with all runs for so many seconds."""
        ...

    def close(self) -> None:
        """No run follows."""
        ...


class DrivesPlans(DrivesRuns, Protocol):
    """The engine, to its plans; see `optcc.runtime.engine.Engine`."""

    transport: Transport
    recorder: FlightRecorder | None
    taps: Taps | None
    routes: dict[int, tuple[PersistentPlan, int]]
    """By the transport's handle: whose channel it is, and its number in the plan."""
    computes: deque[tuple[PersistentPlan, BoundAction]]
    """Computations that are kept until no event is left."""
    is_within: bool
    """Whether a function of a run is being called."""

    def within(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function of a run in the context of the runs."""
        ...

    def enter(self, handle: Handle) -> None:
        """A run begins."""
        ...

    def leave(self, handle: Handle) -> None:
        """A run is done."""
        ...

    def fail(self, error: BaseException) -> NoReturn:
        """The failure of one run is that of every run."""
        ...

    def release(self, prepared: PersistentPlan) -> None:
        """Gives back the channels of a plan."""
        ...

    def check_alive(self) -> None:
        """Raises RuntimeFault if a former run failed."""
        ...

    def listen(self, channel: int, take: Callable[[Event], None]) -> None:
        """`take` is called with the events of a channel of no plan."""
        ...

    def streams_of(self, device_id: int) -> DeviceStreams:
        """The streams of a GPU."""
        ...


class PersistentPlan:
    """A plan that runs again and again; made by `Engine.prepare`.

    It owns the channels of a group, the slots, and memory to run in where the plan needs scratch. Its actions are tied
    to their bytes once for as long as the runs are in the same memory. `hosts`, if ranks of the transport share memory:
    for each the first of those, -1 for none.
    """

    def __init__(
        self,
        engine: DrivesPlans,
        plan: Plan,
        groups: ChannelGroups,
        window: int,
        deadline_s: float,
        place: DevicePlace | Kernels | None,
        at: tuple[int, Sequence[int]],
        hosts: Sequence[int] = (),
    ) -> None:
        self.engine, self.plan, self.deadline_s, self.groups, self.group = (
            engine,
            plan,
            deadline_s,
            groups,
            groups.take(),
        )
        rank, ranks = at
        self.observed, self.ranks = 0, ranks
        # Its number among the plans of these ranks, and how often it was started: for taps, the same at all of them.
        self.serial, self.n_runs = groups.n_taken, 0
        self.program = RankProgram(plan, rank)
        self.machine = RankMachine(self.program, window)
        # Where a run stands, if the steps are remembered.
        self.place: Place | None = None
        channels = [Channel(ranks[channel.src], ranks[channel.dst], channel.slots) for channel in plan.channels]
        self.handles = engine.transport.open(channels, self.group, carried_bytes(plan))
        longest = max((action.bytes for action in self.program.actions), default=0)
        self.actions: PlanActions | None = None
        # In the place of `actions`, for arrays on a GPU.
        self.on_device: DeviceActions | None = None
        self.shared: SharedLanes | None = None
        if isinstance(place, DevicePlace):
            transport, streams = engine.transport, engine.streams_of(place.device_id)
            if hosts:
                self.shared = self._share(DeviceLaneMemory(streams), channels, lanes_within(channels, hosts))
            made = self.on_device = DeviceActions(
                transport, streams, self.program, window, place, self._local_done, self.shared
            )
            memory = PlanMemory(made.kernels.view, made.slots, made.device, place.device_id, False)
        else:
            assert place is not None
            itemsize = check_dtype(plan.transfers.dtype)
            self._kernels = place
            self.actions = PlanActions(engine.transport, place, itemsize)
            memory = PlanMemory(place.view, touched, aligned, -1, True)
            if hosts and (chosen := long_lanes_within(plan, channels, hosts)):
                self.shared = self._share(HostLaneMemory(), channels, chosen)
        if self.shared is not None:
            memory = memory._replace(shared=self.shared.channels, shared_slots=self.shared.slots)
        # What messages are given to.
        self._messages = self.shared if self.shared is not None and self.shared.handles else engine.transport
        self._buffers = PlanBuffers(plan, rank, self.program, self.handles, memory, in_order=window == 1)
        self.input_bytes, self.output_bytes = self._buffers.input_bytes, self._buffers.output_bytes
        self._bound: list[BoundAction] = []
        # The same with arrays, where `_bound` has addresses on a GPU; and, for taps, by instruction.
        self._tied: list[BoundAction] = []
        self._entries: dict[int, BoundAction] = {}
        self._queue: deque[Handle] = deque()
        self._is_closed = False
        self._memory: Memory | None = None
        # The arrays of the last run, if they are copied: what they were, and how they are.
        self._arranged: tuple[Any, Any, Any, Arrays] | None = None
        self._calls: list[Callable[[], Any]] = []
        self._plain_calls = self._calls
        is_small = len(self.program.actions) <= REMEMBERED_ACTIONS_MAX and longest <= REMEMBERED_BYTES_MAX
        if engine.recorder is not None and engine.recorder.in_detail:
            is_small = False
        if is_small and self.on_device is None and self._messages is engine.transport:
            self._memory = Memory(self.program, window)

    def _share(self, memory: LaneMemory, channels: Sequence[Channel], chosen: Sequence[int]) -> SharedLanes:
        engine = self.engine
        return SharedLanes(engine.transport, engine.listen, memory, channels, self.handles, self.group, chosen)

    # --- runs ---------------------------------------------------------------------------------------------------------

    def start_in(self, buffer: Any, *, deadline_s: float | None = None) -> Handle:
        """Begins a run in `buffer`, in place: the message in its first `size_bytes`, scratch behind it.

        `buffer` is a writable contiguous uint8 array of `plan.buffer_bytes`, aligned to the dtype. An average is
        divided before the run is done. If a run of this plan is under way, this one begins when that one is over.

        Raises InputError for a wrong buffer, RuntimeFault if a former run failed.
        """
        address = self._buffers.check_buffer(buffer)
        return self.start_with(Arrays(buffer, address, None, None, buffer), deadline_s=deadline_s)

    def start(self, send: Any, recv: Any, *, deadline_s: float | None = None, stream: Any = None) -> Handle:
        """Begins recv = the collective of every rank's `send`; the two are the same memory or do not overlap.

        `send` has the length of `input_bytes`, `recv` that of `output_bytes`; they are contiguous arrays of the plan's
        dtype, and None where the collective has no input or no output at this rank. Where `send` is a part of the
        output, it may be that part of `recv`. `avg` divides by the number of ranks: floats by one rounded division
        after the sum, integers truncating toward zero. On a GPU the run comes behind what was queued on `stream`, by
        default CuPy's current one.

        Raises InputError for arrays that do not fit the plan, RuntimeFault if a former run failed.
        """
        return self.start_with(self.arrange(send, recv), deadline_s=deadline_s, stream=stream)

    def arrange(self, send: Array | None, recv: Array | None) -> Arrays:
        """What `start` needs to know of its arrays, for many runs on the same ones; raises as `start`."""
        if self._memory is None or not (type(send) is type(recv) is np.ndarray):
            return self._buffers.arrange(send, recv)
        # Of a short run, half would be looking at its arrays, which often are those of the last one.
        nature = nature_of(send, recv)
        known = self._arranged
        if known is not None and known[0] is send and known[1] is recv and known[2] == nature:
            return known[3]
        arrays = self._buffers.arrange(send, recv)
        if arrays.after is not None and recv.nbytes <= COPIED_BYTES_MAX:
            self._arranged = send, recv, nature, arrays
        return arrays

    def start_with(self, arrays: Arrays, *, deadline_s: float | None = None, stream: Any = None) -> Handle:
        """Begins a run on what `arrange` has returned; `stream` see `start`."""
        if deadline_s is None:
            deadline_s = self.deadline_s
        elif not deadline_s > 0:
            raise InputError(f"deadline {deadline_s} s: must be above zero")
        engine = self.engine
        if engine.failure is not None:
            engine.check_alive()
        if self._is_closed:
            raise InputError(f"plan {self.plan.name}: closed: must be prepared again")
        handle = Handle(self, arrays, deadline_s)
        if self.on_device is not None:
            handle.stream, handle.mark = self.on_device.mark_stream(stream)
        self.n_runs += 1
        if engine.taps is not None:
            self._tap(engine.taps, handle)
        self._queue.append(handle)
        if len(self._queue) == 1:
            try:
                engine.within(self._begin)
            except BaseException as error:
                engine.fail(error)
        return handle

    def _tap(self, taps: Taps, handle: Handle) -> None:
        """Reserves the room for what taps take of a run."""
        handle.taps = taps.open(self, None if self.engine.is_within else self._drive_for)

    def _drive_for(self, seconds: float) -> None:
        """Goes on with every run for so long, whatever comes."""
        engine = self.engine
        engine.drive(NEVER, engine.clock.now_s() + seconds)

    def close(self) -> None:
        """Waits for the runs of this plan, then gives its channels to a later one; every rank closes the same plans in
        the same order."""
        if self._is_closed:
            return
        self._is_closed = True
        while self._queue and self.engine.failure is None:
            self._queue[-1].wait()
        self.engine.release(self)

    def _begin(self) -> None:
        """The oldest run has its turn."""
        handle, memory, buffers, on_device = self._queue[0], self._memory, self._buffers, self.on_device
        arrays = handle.arrays
        assert arrays is not None
        if on_device is not None:
            on_device.begin(handle.mark, arrays)
        else:
            if arrays.before is not None:
                into, source = arrays.before
                # NumPy's own: half the time of its copyto.
                into[...] = source
            for into, source in arrays.pieces_before:
                into[...] = source
        tied_to = buffers.tied_to
        if tied_to is None or tied_to[0] != arrays.address or tied_to[1] != arrays.source_address:
            self._bound = self._tied = buffers.tie(arrays)
            if on_device is not None:
                self._bound = on_device.bind(self._bound)
            elif memory is not None:
                assert self.actions is not None
                self._calls = self._plain_calls = [self.actions.as_call(entry) for entry in self._bound]
        if handle.taps is not None:
            self._entries = {entry[1]: entry for entry in self._tied if entry[0] not in (SEND, RECV)}
            handle.taps.begins(buffers.input_in(arrays))
        if memory is not None and (handle.taps is not None or self._calls is not self._plain_calls):
            plain = self._plain_calls
            self._calls = plain if handle.taps is None else handle.taps.wrapped(plain, self._bound)
        self.engine.enter(handle)
        if memory is not None:
            self._take_step(*memory.start)
        else:
            self.go_on(self.machine.start())

    def _end(self) -> None:
        """Every instruction is done: what is left is to divide, and to copy the output to where it was asked for."""
        handle = self._queue[0]
        arrays = handle.arrays
        assert arrays is not None
        if self.on_device is not None:
            self._end_on_device(self.on_device, handle, arrays)
        else:
            for data, count in self._buffers.averages:
                self._kernels.finish(data, count)
            for into, source in (*arrays.pieces_after, *((arrays.after,) if arrays.after is not None else ())):
                into[...] = source
            if handle.taps is not None:
                handle.taps.ends(self._buffers.output_in(arrays), handle.number)
        self._be_over()

    def _end_on_device(self, on_device: DeviceActions, handle: Handle, arrays: Arrays) -> None:
        taps = handle.taps
        if taps is not None:
            taps.ending()
        handle.ready = on_device.end(handle.stream, arrays, self._buffers.averages)
        if taps is not None:
            taps.ends(self._buffers.output_in(arrays), handle.number)
            # What the caller does with its arrays comes behind what is copied from them.
            handle.ready = on_device.streams.end(handle.stream, arrays)

    def _be_over(self) -> None:
        self.engine.leave(self._queue.popleft())
        if self._queue:
            self._begin()

    # --- what the loop asks for ---------------------------------------------------------------------------------------

    def follow(self, events: list[Event]) -> bool:
        """Does what follows from events that came at once, if that is remembered; else False, and nothing is done."""
        place = self.place
        assert place is not None and self._memory is not None
        step = place.steps.get(events[0] if len(events) == 1 else tuple(events))
        if step is None:
            routes = self.engine.routes
            channels = [routes[handle][1] for _, handle in events if handle in routes and routes[handle][0] is self]
            if len(channels) < len(events):
                return False
            step = self._memory.steps(place, events, channels)
            if step is None:
                return False
        self._take_step(*step)
        return True

    def follow_one(self, place: Place, event: Event, channel: int) -> None:
        """Does what follows from an event, where the steps are remembered."""
        assert self._memory is not None
        self._take_step(*self._memory.step(place, event, channel))

    def _take_step(self, actions: tuple[int, ...], place: Place) -> None:
        self.place = place
        calls = self._calls
        for index in actions:
            calls[index]()
        if place.done:
            self._end()

    @property
    def is_remembered(self) -> bool:
        """Whether it is so short that its steps are remembered."""
        return self._memory is not None

    def report(self) -> str:
        """What the run waits for; see `RankMachine.report`."""
        return self.present.report()

    @property
    def present(self) -> RankMachine:
        """Where the run stands."""
        return self.machine if self.place is None else self.place.machine

    @property
    def run(self) -> int:
        """The number of the run that is under way."""
        return self._queue[0].number

    def compute(self, entry: BoundAction) -> None:
        """Does a computation that was kept."""
        assert self.actions is not None
        recorder, taps = self.engine.recorder, self._queue[0].taps
        if taps is not None:
            taps.computing(entry)
        if recorder is None:
            self.actions.compute(entry)
        else:
            self._compute_recorded(self.actions, entry, recorder)
        if taps is not None:
            taps.computed(entry)
        self.go_on(self.machine.local_done(entry[1]))

    def _local_done(self, instruction: int) -> None:
        """A computation on a GPU is done, as far as the next step is concerned."""
        taps = self._queue[0].taps
        if taps is not None:
            taps.computed(self._entries[instruction])
        self.go_on(self.machine.local_done(instruction))

    def _compute_recorded(self, actions: PlanActions, entry: BoundAction, recorder: FlightRecorder) -> None:
        check, transfers = recorder.check, self.plan.transfers
        wanted = None if check is None else check.begin(entry, transfers.dtype, transfers.reduction)
        since_s = self.engine.clock.now_s()
        actions.compute(entry)
        recorder.computed(self.observed, entry[1], self.run, since_s)
        if check is not None and wanted is not None:
            check.end(entry, wanted, f"plan {self.plan.name} in run {self.run}")

    def go_on(self, actions: list[Action]) -> None:
        """Posts what is to be posted, keeps what is to be computed, ends the run when nothing is left."""
        bound, messages, on_device = self._bound, self._messages, self.on_device
        recorder, taps = self.engine.recorder, self._queue[0].taps
        for action in actions:
            code, where, view, instruction = entry = bound[action.index]
            if code == SEND:
                if taps is not None:
                    taps.sending(entry)
                if recorder is not None:
                    recorder.posted(self.observed, action.index, self.run)
                if on_device is None:
                    messages.post_send(where, view)
                else:
                    on_device.send(where, view, instruction)
            elif code == RECV:
                if on_device is None:
                    messages.post_recv(where, view)
                else:
                    on_device.receive(where, view)
            elif on_device is None:
                self.engine.computes.append((self, entry))
            else:
                if taps is not None:
                    taps.computing(self._tied[action.index])
                on_device.compute(entry)
        if not actions and self.machine.done:
            self._end()
