"""The engine: drives the runs of one rank over its transport. The only place that waits.

    Engine           owns the transport; any number of runs may be under way
    PersistentPlan   a verified plan made ready: agreed on by all ranks, on channels and slots of its own
    Handle           one run: test, wait, cancel

One file for the three, as each calls the others at every step. `buffers` has a plan's memory, `plan_actions` what its
actions do there, `state` what follows from an event; `executor` runs one plan and waits.

All ranks make plans ready, and begin the runs of each plan, in the same order. The runs of one plan follow each other;
those of different plans overlap in any way. Progress is made inside `test`, `wait` and `barrier`, for all runs of all
engines of the thread at once: there is no thread of their own.

A run that fails takes all others with it. Whatever the cause (a deadline, a lost rank, `cancel`, an interrupt), the
engine gives up every run and aborts the transport, so that every other rank's runs end in RankLost; here they end in
the error that was the cause. A transport that `Concludes` has all ranks agree first on who is at fault.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, NoReturn, Protocol, TypeVar
from weakref import ref

import numpy as np

from optcc.collective import check_dtype
from optcc.errors import Cancelled, DeadlineExceeded, InputError, MismatchError, OptccError, PlanError, RuntimeFault
from optcc.plan import Channel, Plan
from optcc.runtime.barrier import NEVER, Barrier, Goal
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
from optcc.runtime.concurrent_engines import THREAD_ENGINES, TURN_S
from optcc.runtime.device_actions import DeviceActions, DevicePlace
from optcc.runtime.device_lanes import SharedLanes
from optcc.runtime.device_paths import STAGED, DevicePath, keep_path
from optcc.runtime.device_streams import DeviceStreams, Ready
from optcc.runtime.forks import FORKED, call_in_child, refuse_uses
from optcc.runtime.kernels import Array, Kernels, NumpyKernels
from optcc.runtime.observe.page import IS_DRIVEN, UNKNOWN_S
from optcc.runtime.observe.recorder import MISMATCH, FlightRecorder
from optcc.runtime.plan_actions import PlanActions
from optcc.runtime.plan_handshake import Gathers, agree, refuse
from optcc.runtime.state import WINDOW, Action, Memory, Place, RankMachine, RankProgram
from optcc.runtime.transport import (
    COLLECTIVE_TIMEOUT_S,
    EPOCH_NEWS,
    SENT,
    Clock,
    Concludes,
    Defers,
    Event,
    MonotonicClock,
    Transport,
    WaitsForHosts,
)
from optcc.verdict import Verdict

T = TypeVar("T")
DEADLINE_S = 60.0
_POLL_S_MAX = 1.0
_NEVER_S = float("inf")
_CONTROL = 0
"""The group of the channels on which the engines themselves speak."""
_DEVICE_POLL_S, _DEVICE_LOOKS = 50e-6, 200
"""How often the network and a GPU are looked at in turn without a pause, and how long the pauses are after that."""
REMEMBERED_ACTIONS_MAX = 128
REMEMBERED_BYTES_MAX = 1 << 14
"""Of programs up to this size, with no longer messages, the machine's steps are remembered: to compute at once what has
come delays what has come behind it by a few us at most."""


class Watcher(Protocol):
    """Who is told of an engine's end, and of what is rare."""

    def note(self, kind: str, text: str, ranks: Sequence[int] = ()) -> None:
        """Something rare has happened, for which these ranks are at fault."""
        ...

    def preparing(self, plan: Plan | None) -> None:
        """The ranks are about to agree on a plan, or have agreed on it."""
        ...

    def failing(self, error: RuntimeFault) -> None:
        """The engine is about to give up its runs, which are still as they were; must not raise."""
        ...

    def failed(self, error: RuntimeFault, cause: str) -> None:
        """It has given up: what it raises, and what it has told the other ranks; must not raise."""
        ...

    def closing(self) -> None:
        """The transport is about to be given back."""
        ...


class RunTaps(Protocol):
    """What takes chunks of one run (`optcc.runtime.taps`)."""

    def begins(self, given: Any) -> None:
        """The input of the rank is there."""
        ...

    def ending(self) -> None:
        """Every instruction is done; what is left is to divide, and to copy the output."""
        ...

    def ends(self, output: Any, number: int) -> None:
        """The run is over."""
        ...

    def sending(self, entry: BoundAction) -> None:
        """A message is about to be handed to the transport."""
        ...

    def computing(self, entry: BoundAction) -> None:
        """What has arrived is about to be reduced or copied."""
        ...

    def computed(self, entry: BoundAction) -> None:
        """It has been."""
        ...

    def wrapped(self, calls: list[Callable[[], Any]], bound: list[BoundAction]) -> list[Callable[[], Any]]:
        """The calls of a plan whose steps are remembered, with what is taken around them."""
        ...


class Taps(Protocol):
    """Who is asked at the start of each run."""

    def open(self, prepared: PersistentPlan, drive: Callable[[float], None] | None) -> RunTaps | None:
        """What takes chunks of this run, if anything does; `drive` goes on with all runs for so many seconds."""
        ...

    def close(self) -> None:
        """No run follows."""
        ...


class Engine:
    """One rank's runs over `transport`, which is the engine's from now on; used by one thread."""

    def __init__(self, transport: Transport, *, clock: Clock | None = None) -> None:
        self.transport = transport
        self.rank, self.n_ranks = transport.rank, transport.n_ranks
        self.failure: RuntimeFault | None = None
        self.clock: Clock = clock or MonotonicClock()
        # By how much deadlines are later, as a host without a rail may be waited for.
        self.patience_s = transport.partition_s if isinstance(transport, WaitsForHosts) else 0.0
        # By the transport's handle: whose channel it is, and its number in the plan.
        self._routes: dict[int, tuple[PersistentPlan, int]] = {}
        self._computes: deque[tuple[PersistentPlan, BoundAction]] = deque()
        # What is queued on GPUs, by their numbers, and how often in vain the loop has looked at them.
        self._devices: dict[int, DeviceStreams] = {}
        self._n_looks = 0
        self._running: dict[Handle, None] = {}
        # As the engines of this thread know it while runs are under way; see `ThreadEngines`.
        self._identity, self._myself = id(self), ref(self)
        self._due_s = _NEVER_S
        self._groups = ChannelGroups(_CONTROL + 1)
        # Teams of some of the ranks that this rank knows of, itself and all ranks included: numbers are below this.
        self.n_teams = 1
        # Who takes the events of channels that are no plan's.
        self._listeners: dict[int, Callable[[Event], None]] = {}
        self._barrier = Barrier(transport, _CONTROL)
        self._look_aside: Callable[[], float] | None = None
        # When the loop has to do anything but follow events, at the latest: no later than `_due_s`.
        self._next_s = 0.0
        # A collective some slices of which are not begun: they are, before anything else is waited for.
        self.in_slices: InSlices | None = None
        # Called with what is over, and how long it took, seconds.
        self.finished: Callable[[Handle, float], None] | None = None
        # What takes note of runs and messages, and who is told of the end, if anybody (`optcc.runtime.observe`).
        self.recorder: FlightRecorder | None = None
        self.watcher: Watcher | None = None
        self.taps: Taps | None = None
        self._settle = transport.defer_reports() if isinstance(transport, Defers) else None
        # Overflows and divisions by zero are the user's; entering a context is cheaper than `np.errstate` each time.
        self._context = contextvars.copy_context()
        self._context.run(np.seterr, all="ignore")
        self._is_within = False
        call_in_child(self, Engine._leave_to_parent)

    def prepare(
        self,
        plan: Plan,
        verdict: Verdict,
        *,
        window: int = WINDOW,
        deadline_s: float = DEADLINE_S,
        kernels: Kernels | None = None,
        device: DevicePlace | None = None,
    ) -> PersistentPlan:
        """Makes `plan` ready to run any number of times; collective, and runs that are under way go on meanwhile.

        `verdict` is the verifier's on this very plan; `window` see `optcc.runtime.state`; each run may take
        `deadline_s` seconds from its beginning. `kernels` are NumPy's unless given; with `device`, the arrays are in
        the memory of that GPU.

        Raises PlanError if the plan has not been proved or is not for the ranks of the transport, MismatchError (at
        every rank) if the ranks differ in what they are about to run, InputError for a window or deadline that cannot
        be, RuntimeFault if a former run failed.
        """
        at = self.rank, range(self.n_ranks)
        return self.prepare_among(self, at, self._groups, plan, verdict, window, deadline_s, kernels, device)

    def allgather(self, payload: bytes, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> list[bytes]:
        """`Transport.allgather`, which waits inside the transport, where runs stand still: first all come to it.

        Always: whether anything is under way at this rank, such as a message, the others do not know.
        """
        self.barrier(timeout_s)
        return self.transport.allgather(payload, timeout_s)

    def prepare_among(
        self,
        ranks: Gathers,
        at: tuple[int, Sequence[int]],
        groups: ChannelGroups,
        plan: Plan,
        verdict: Verdict,
        window: int,
        deadline_s: float,
        kernels: Kernels | None,
        device: DevicePlace | None,
    ) -> PersistentPlan:
        """`prepare` for the `ranks` that agree on the plan; `at` is which of its ranks this one is, and which of the
        transport's they all are. Its channels are the next group of `groups`."""
        if not deadline_s > 0:
            raise InputError(f"deadline {deadline_s} s: must be above zero")
        self.check_alive()
        # An unproved plan is refused only after the exchange, so that the other ranks learn of it and need not wait.
        refusal = refuse(plan, verdict, len(at[1]))
        watcher = self.watcher
        if watcher is not None:
            watcher.preparing(plan)
        try:
            is_shared = device is not None and device.hosts is not None
            agree(ranks, plan, proved=not refusal, group=groups.lowest, shared=is_shared, timeout_s=deadline_s)
        except MismatchError as error:
            if watcher is not None:
                watcher.note(MISMATCH, str(error), [at[1][rank] for rank in error.culprits])
            raise
        if refusal:
            raise PlanError(refusal)
        transfers = plan.transfers
        if device is None:
            kernels = kernels or NumpyKernels(transfers.dtype, transfers.reduction)
        prepared = PersistentPlan(self, plan, groups, window, deadline_s, device or kernels, at)
        if prepared.shared is not None:
            assert device is not None
            why = prepared.shared.connect(ranks, at[1], deadline_s)
            if why:
                # What one rank cannot reach, all stage, here and from now on.
                keep_path(self.transport, DevicePath(STAGED, f"CUDA IPC: plan {plan.name}: {why}"))
                self._release(prepared)
                staged = device._replace(hosts=None)
                prepared = PersistentPlan(self, plan, groups, window, deadline_s, staged, at)
        for channel, handle in enumerate(prepared.handles):
            if handle >= 0:
                self._routes[handle] = prepared, channel
        if self.recorder is not None:
            self.recorder.add_plan(prepared, at[1])
        if watcher is not None:
            watcher.preparing(None)
        return prepared

    def alone(self, body: Callable[[], T], timeout_s: float) -> T:
        """What `body` returns, which uses the transport by itself once no plan runs at any rank; collective.

        Messages may be under way. Raises DeadlineExceeded after `timeout_s`, and what a run or `body` raises.
        """
        if not self.wait_for(_NoPlan(self._running), timeout_s):
            raise self._give_up(DeadlineExceeded(f"rank {self.rank}: plans run after {timeout_s:g} s"))
        self.barrier(timeout_s)
        try:
            return body()
        except BaseException as error:
            self._fail(error)

    def take(self, events: list[Event]) -> None:
        """What follows from events that `body` of `alone` has met with, and that are not its own."""
        self.within(self._follow, events)

    def within(self, function: Callable[..., T], *args: Any) -> T:
        """Calls a function of a run in the context of the runs, also while another one waits in it."""
        if self._is_within:
            return function(*args)
        self._is_within = True
        try:
            return self._context.run(function, *args)
        finally:
            self._is_within = False

    def listen(self, channel: int, take: Callable[[Event], None]) -> None:
        """`take` is called with the events of a channel of no plan."""
        self._listeners[channel] = take

    def enter(self, handle: Handle) -> None:
        """A run begins, or something else that is waited for: its time runs."""
        if not self._running:
            THREAD_ENGINES.running[self._identity] = self._myself
        now_s = self.clock.now_s()
        handle.due_s = due_s = now_s + handle.deadline_s
        self._running[handle] = None
        if due_s < self._due_s:
            self._due_s = due_s
            if due_s < self._next_s:
                self._next_s = due_s
        if self.recorder is not None:
            self.recorder.begin(handle.plan.observed, handle, now_s)

    def leave(self, handle: Handle) -> None:
        """It is done."""
        handle.done = True
        # Who keeps the handle keeps its output alone.
        handle.arrays = None
        if self.recorder is not None:
            self.recorder.end(handle.plan.observed, handle)
        if self.finished is not None:
            self.finished(handle, self.clock.now_s() - (handle.due_s - handle.deadline_s))
        running = self._running
        del running[handle]
        if not running:
            self._due_s = _NEVER_S
            THREAD_ENGINES.running.pop(self._identity, None)
        elif handle.due_s <= self._due_s:
            self._due_s = min(each.due_s for each in running)
        if handle.then is not None:
            handle.then()

    def wait_for(self, goal: Goal, timeout_s: float) -> bool:
        """Goes on with every run until `goal` is done, for `timeout_s` at most; whether it is. Raises as
        `Handle.test`."""
        self.check_alive()
        return self._drive(goal, self.clock.now_s() + timeout_s + self.patience_s)

    def barrier(self, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        """Returns once every rank has called it; runs that are under way go on meanwhile.

        Raises DeadlineExceeded if some rank has not come within `timeout_s`, and what a run raises.
        """
        self.check_alive()
        timeout_s += self.patience_s
        deadline_s = self.clock.now_s() + timeout_s
        for goal in self._barrier.rounds():
            if not self._drive(goal, deadline_s):
                error = DeadlineExceeded(f"rank {self.rank}: waited {timeout_s:g} s in vain for other ranks to come")
                raise self._give_up(error)

    def abort(self, cause: str) -> None:
        """Gives up every run: here they end in Cancelled, at the other ranks in RankLost."""
        if self.failure is None:
            self._give_up(Cancelled(f"rank {self.rank}: {cause}"))

    def close(self) -> None:
        """Gives the transport back; aborts if runs are under way. Ranks should meet at a `barrier` before."""
        if self._running:
            self.abort(f"closed with {len(self._running)} runs under way")
        if self.watcher is not None:
            self.watcher.closing()
        if self.taps is not None:
            self.taps.close()
        if self.failure is None:
            for shared in {prepared.shared for prepared, _ in self._routes.values() if prepared.shared is not None}:
                shared.close()
        self.transport.close()

    def check_alive(self) -> None:
        """Raises RuntimeFault if a former run failed."""
        if self.failure is not None:
            raise RuntimeFault(f"rank {self.rank}: a former run failed, nothing can run any more: {self.failure}")

    @property
    def look_aside(self) -> Callable[[], float] | None:
        """Called when the epochs of the job have changed, and every so often: how soon again, seconds."""
        return self._look_aside

    @look_aside.setter
    def look_aside(self, look: Callable[[], float] | None) -> None:
        self._look_aside, self._next_s = look, 0.0

    def streams_of(self, device_id: int) -> DeviceStreams:
        """This engine's streams of a GPU; raises EnvironmentMissing without CuPy or a GPU."""
        if device_id not in self._devices:
            self._devices[device_id] = DeviceStreams(device_id)
        return self._devices[device_id]

    def _release(self, prepared: PersistentPlan) -> None:
        for handle in prepared.handles:
            self._routes.pop(handle, None)
        if prepared.shared is not None and self.failure is None:
            prepared.shared.close()
        if self.recorder is not None:
            self.recorder.drop_plan(prepared)
        prepared.groups.give_back(prepared.group)

    def _leave_to_parent(self) -> None:
        """In a process that is forked: the runs are the parent's."""
        self.failure = RuntimeFault(FORKED)
        self.recorder = self.watcher = self.taps = None
        self._running.clear()
        THREAD_ENGINES.end(self)
        refuse_uses(self, ["check_alive"])

    def _give_up(self, error: RuntimeFault, cause: str = "") -> RuntimeFault:
        """Every run is over, here and at the other ranks, which learn the cause; what is to be raised here."""
        watcher = self.watcher
        if watcher is not None:
            watcher.failing(error)
        self.failure = error
        self._running.clear()
        THREAD_ENGINES.end(self)
        self._computes.clear()
        # What else goes wrong on the way out must not hide the cause.
        cause = cause or f"{type(error).__name__}: {error}"
        with suppress(OptccError):
            if isinstance(self.transport, Concludes):
                self.failure = self.transport.conclude(error, cause)
        if watcher is not None:
            watcher.failed(self.failure, cause)
        with suppress(OptccError):
            self.transport.abort(cause)
        # The caller may free its arrays now: nothing may be queued any more that touches them.
        for streams in self._devices.values():
            with suppress(Exception):
                streams.settle()
        return self.failure

    def _fail(self, error: BaseException) -> NoReturn:
        """The failure of one run is that of every run; raises it, or what all ranks have agreed on."""
        if self.failure is None and isinstance(error, RuntimeFault):
            agreed = self._give_up(error)
            if agreed is not error:
                raise agreed from error
        elif self.failure is None:
            cause = f"{type(error).__name__}: {error}"
            self._give_up(RuntimeFault(f"rank {self.rank}: {cause}"), cause)
        raise error

    def _drive(self, goal: Goal, deadline_s: float) -> bool:
        """Goes on with every run until `goal` is done, or until `deadline_s` and nothing more can be done."""
        if self.in_slices is not None and goal is not self.in_slices.current:
            THREAD_ENGINES.call(self.in_slices.begin_rest)
        # What is asked for within the loop, such as a barrier for new plans, is driven by it.
        longs = None if self.recorder is None or self._is_within else self.recorder.longs
        if longs is not None:
            longs[IS_DRIVEN] = 1
        try:
            is_over = self.within(self._loop, goal, deadline_s)
        except BaseException as error:
            self._fail(error)
        finally:
            if longs is not None:
                longs[IS_DRIVEN] = 0
        if self._settle is not None:
            self._settle()
        return is_over

    def drive_once(self) -> None:
        """Goes on with every run as far as is possible without waiting; raises as `Handle.test`."""
        if self.failure is None:
            self._drive(NEVER, self.clock.now_s())

    def _loop(self, goal: Goal, deadline_s: float) -> bool:
        """Computations first, and only when none is left a wait for events."""
        poll, now, routes, recorder = self.transport.poll, self.clock.now_s, self._routes, self.recorder
        computes, devices, of_thread = self._computes, self._devices, THREAD_ENGINES.running
        while not goal.done:
            if computes:
                prepared, entry = computes.popleft()
                prepared.compute(entry)
                continue
            waits_for_device = False
            if devices:
                if any(streams.advance() for streams in devices.values()):
                    self._n_looks = 0
                    continue
                waits_for_device = not all(streams.is_idle for streams in devices.values())
            now_s = now()
            until_s = self._next_s
            if now_s >= until_s:
                self._look_aside_at(now_s)
                continue
            wait_s = (deadline_s if deadline_s < until_s else until_s) - now_s
            if waits_for_device:
                # The device does not wake who waits for the network: what it does for a message takes some 10 us.
                self._n_looks += 1
                wait_s = min(wait_s, 0.0 if self._n_looks < _DEVICE_LOOKS else _DEVICE_POLL_S)
            if (len(of_thread) > 1 or not self._running) and THREAD_ENGINES.has_others(self):
                THREAD_ENGINES.drive_others(self)
                wait_s = min(wait_s, TURN_S)
            events = poll(wait_s if wait_s > 0 else 0.0)
            if recorder is not None and recorder.is_clocking:
                recorder.waited_s += now() - now_s
            if not events:
                if now_s >= deadline_s:
                    return goal.done
                continue
            route = routes.get(events[0][1])
            if route is None or route[0].place is None or not route[0].follow(events):
                self._follow(events)
        return True

    def _follow(self, events: list[Event]) -> None:
        """What follows from events, one after another."""
        for event in events:
            kind, handle = event
            route = self._routes.get(handle)
            if route is None:
                take = self._listeners.get(handle)
                if take is not None:
                    take(event)
                elif handle == EPOCH_NEWS:
                    self._next_s = 0.0
                else:
                    self._barrier.take(event)
                continue
            prepared, channel = route
            if prepared.place is not None:
                prepared.follow_one(prepared.place, event, channel)
            elif kind == SENT:
                if prepared.on_device is not None:
                    prepared.on_device.take_back(handle)
                if self.recorder is not None:
                    message = prepared.machine.n_sent(channel)
                    self.recorder.sent(prepared.observed, channel, message, prepared.run)
                prepared.go_on(prepared.machine.sent(channel))
            else:
                if self.recorder is not None:
                    message = prepared.machine.n_arrived(channel)
                    self.recorder.arrived(prepared.observed, channel, message, prepared.run)
                prepared.go_on(prepared.machine.arrived(channel))

    def _look_aside_at(self, now_s: float) -> None:
        """What is due now but messages: the deadline of a run, and a look aside."""
        if now_s >= self._due_s:
            self._miss_deadline(now_s)
        again_s = _POLL_S_MAX if self._look_aside is None else min(self._look_aside(), _POLL_S_MAX)
        self._next_s = min(now_s + again_s, self._due_s)

    def _miss_deadline(self, now_s: float) -> None:
        handle = next(each for each in self._running if each.due_s <= now_s)
        raise DeadlineExceeded(f"not done after {handle.deadline_s:g} s: {handle.plan.report()}")


def _turn(engine: Engine, for_s: float) -> None:
    """Goes on with every run for so long, whatever comes."""
    engine._drive(NEVER, engine.clock.now_s() + for_s)


class _NoPlan:
    """The goal that no plan runs; messages may wait for a rank that comes later."""

    def __init__(self, running: dict[Handle, None]) -> None:
        self._running = running

    @property
    def done(self) -> bool:
        return not any(isinstance(handle.plan, PersistentPlan) for handle in self._running)


class InSlices(Protocol):
    """A collective in slices; see `optcc.runtime.slices`."""

    current: Handle | None

    def begin_rest(self) -> None:
        """Begins all slices that are left."""
        ...


class Driven(Protocol):
    """What an engine drives: a plan, or the mail of a rank; `observed` is its number for the flight recorder."""

    observed: int

    @property
    def engine(self) -> Engine:
        """Whose it is."""
        ...

    def report(self) -> str:
        """What it waits for."""
        ...


class Handle:
    """One run of a `PersistentPlan`, or a message.

    Its arrays belong to it until it is done: what is sent must not change, what is received must not be read. `then` is
    called within the engine once it is done: it must neither wait nor raise.

    With arrays on a GPU, a run is done when all messages are, and what is left is queued on the GPU. The stream on
    which it was started comes behind it then, and so does the one on which it is waited for: the output is used there
    without waiting for the GPU, other streams wait for `event`.
    """

    __slots__ = (
        *("arrays", "deadline_s", "done", "due_s", "mark", "number", "output", "plan", "ready", "stream", "taps"),
        *("then", "waited_from_s"),
    )

    def __init__(self, plan: Driven, arrays: Arrays | None, deadline_s: float) -> None:
        self.plan, self.deadline_s, self.due_s = plan, deadline_s + plan.engine.patience_s, _NEVER_S
        # For the flight recorder.
        self.number, self.waited_from_s = 0, UNKNOWN_S
        self.taps: RunTaps | None = None
        self.done = False
        self.arrays = arrays
        self.output: Any = None if arrays is None else arrays.output
        self.then: Callable[[], None] | None = None
        # Where arrays are on a GPU: the caller's stream, what was queued there when the run was started, and its end.
        self.stream: Any = None
        self.mark: Any = None
        self.ready: Ready | None = None

    @property
    def event(self) -> Any:
        """CuPy's event behind the output, for other streams to wait for, once the run is done; None where arrays are in
        the host's memory."""
        return None if self.ready is None else self.ready.event

    def test(self) -> bool:
        """Goes on with all runs as far as is possible without waiting; True once this one is done.

        Raises DeadlineExceeded with what a run that took too long waited for, RankLost if a rank is gone, Cancelled
        after `cancel`: each ends all runs.
        """
        return self.wait(0.0)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Goes on with all runs until this one is done, or for `timeout_s`; True once it is done. Raises as `test`."""
        engine = self.plan.engine
        if not self.done:
            if engine.failure is not None:
                raise copy(engine.failure)
            until_s = _NEVER_S if timeout_s is None else engine.clock.now_s() + timeout_s
            engine._drive(self, until_s)
        if self.ready is not None and self.done:
            self.ready.order_current(self.stream)
        return self.done

    def result(self) -> Any:
        """Waits until the run is done; the array that was given for its output. Raises as `test`."""
        self.wait()
        return self.output

    def cancel(self, cause: str = "cancelled") -> None:
        """Gives this run up, and with it all runs of the engine, at all ranks: see the head of this module.

        A run that is done stays done; nothing happens then.
        """
        if not self.done:
            self.plan.engine.abort(cause)


class PersistentPlan:
    """A plan that runs again and again; made by `Engine.prepare`.

    It owns the channels of a group, the slots, and memory to run in where the plan needs scratch. Its actions are tied
    to their bytes once for as long as the runs are in the same memory.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        groups: ChannelGroups,
        window: int,
        deadline_s: float,
        place: DevicePlace | Kernels | None,
        at: tuple[int, Sequence[int]],
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
            if place.hosts is not None:
                wires = channels, self.handles, self.group, place.hosts
                self.shared = SharedLanes(transport, engine.listen, streams, *wires)
            made = self.on_device = DeviceActions(
                transport, streams, self.program, window, place, self._local_done, self.shared
            )
            memory = PlanMemory(made.kernels.view, made.slots, made.device, place.device_id, False)
            if self.shared is not None:
                memory = memory._replace(shared=self.shared.channels, shared_slots=self.shared.slots)
        else:
            assert place is not None
            itemsize = check_dtype(plan.transfers.dtype)
            self._kernels = place
            self.actions = PlanActions(engine.transport, place, itemsize)
            memory = PlanMemory(place.view, touched, aligned, -1, True)
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
        if is_small and self.on_device is None:
            self._memory = Memory(self.program, window)

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
                engine._fail(error)
        return handle

    def _tap(self, taps: Taps, handle: Handle) -> None:
        """Reserves the room for what taps take of a run."""
        engine = self.engine
        handle.taps = taps.open(self, None if engine._is_within else lambda for_s: _turn(engine, for_s))

    def close(self) -> None:
        """Waits for the runs of this plan, then gives its channels to a later one; every rank closes the same plans in
        the same order."""
        if self._is_closed:
            return
        self._is_closed = True
        while self._queue and self.engine.failure is None:
            self._queue[-1].wait()
        self.engine._release(self)

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
            routes = self.engine._routes
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
        bound, transport, on_device = self._bound, self.engine.transport, self.on_device
        recorder, taps = self.engine.recorder, self._queue[0].taps
        for action in actions:
            code, where, view, instruction = entry = bound[action.index]
            if code == SEND:
                if taps is not None:
                    taps.sending(entry)
                if recorder is not None:
                    recorder.posted(self.observed, action.index, self.run)
                if on_device is None:
                    transport.post_send(where, view)
                else:
                    on_device.send(where, view, instruction)
            elif code == RECV:
                if on_device is None:
                    transport.post_recv(where, view)
                else:
                    on_device.receive(where, view)
            elif on_device is None:
                self.engine._computes.append((self, entry))
            else:
                if taps is not None:
                    taps.computing(self._tied[action.index])
                on_device.compute(entry)
        if not actions and self.machine.done:
            self._end()
