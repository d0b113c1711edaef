"""The engine: drives the runs of one rank over its transport. The only place that waits.

    Engine           owns the transport; any number of runs may be under way
    PersistentPlan   a verified plan made ready: agreed on by all ranks, on channels and slots of its own
    Handle           one run: test, wait, cancel

The latter two are in `persistent_plan` and `handle`, with what they ask of the engine. `buffers` has a plan's memory,
`plan_actions` what its actions do there, `state` what follows from an event; `executor` runs one plan and waits.

All ranks make plans ready, and begin the runs of each plan, in the same order. The runs of one plan follow each other;
those of different plans overlap in any way. Progress is made inside `test`, `wait` and `barrier`, for all runs of all
engines of the thread at once: there is no thread of their own.

A run that fails takes all others with it. Whatever the cause (a deadline, a lost rank, `cancel`, an interrupt), the
engine gives up every run and aborts the transport, so that every other rank's runs end in RankLost; here they end in
the error that was the cause. A transport that `Concludes` has all ranks agree first on who is at fault.
"""

from __future__ import annotations

import contextvars
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeVar
from weakref import ref

import numpy as np

from optcc.errors import Cancelled, DeadlineExceeded, InputError, MismatchError, OptccError, PlanError, RuntimeFault
from optcc.plan import Plan
from optcc.runtime import host_memory
from optcc.runtime.barrier import NEVER, Barrier, Goal
from optcc.runtime.buffers import BoundAction
from optcc.runtime.channel_groups import ChannelGroups
from optcc.runtime.concurrent_engines import THREAD_ENGINES, TURN_S
from optcc.runtime.device_actions import DevicePlace
from optcc.runtime.device_paths import STAGED, DevicePath, keep_path
from optcc.runtime.device_streams import DeviceStreams
from optcc.runtime.forks import FORKED, call_in_child, refuse_uses
from optcc.runtime.handle import NEVER_S, Handle, InSlices
from optcc.runtime.kernels import Kernels, NumpyKernels
from optcc.runtime.observe.page import IS_DRIVEN
from optcc.runtime.observe.recorder import MISMATCH, FlightRecorder
from optcc.runtime.persistent_plan import PersistentPlan, Taps
from optcc.runtime.plan_handshake import Gathers, agree, refuse
from optcc.runtime.state import WINDOW
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
from optcc.runtime.watching import Watcher
from optcc.verdict import Verdict

logger = logging.getLogger("optcc.hosts")

T = TypeVar("T")
DEADLINE_S = 60.0
_POLL_S_MAX = 1.0
_CONTROL = 0
"""The group of the channels on which the engines themselves speak."""
_DEVICE_POLL_S, _DEVICE_LOOKS = 50e-6, 200
"""How often the network and a GPU are looked at in turn without a pause, and how long the pauses are after that."""


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
        self.routes: dict[int, tuple[PersistentPlan, int]] = {}
        self.computes: deque[tuple[PersistentPlan, BoundAction]] = deque()
        # What is queued on GPUs, by their numbers, and how often in vain the loop has looked at them.
        self._devices: dict[int, DeviceStreams] = {}
        self._n_looks = 0
        self._running: dict[Handle, None] = {}
        # As the engines of this thread know it while runs are under way; see `ThreadEngines`.
        self._identity, self._myself = id(self), ref(self)
        self._due_s = NEVER_S
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
        self.is_within = False
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
        hosts = host_memory.path_of(self.transport).hosts if device is None else device.hosts or ()
        made = self, plan, groups, window, deadline_s, device or kernels, at
        prepared = PersistentPlan(*made, hosts)
        why = "" if prepared.shared is None else prepared.shared.connect(ranks, at[1], deadline_s)
        if why:
            # What one rank cannot reach, or has no room for, no rank uses: on GPUs from now on, else in this plan.
            if device is None and not at[0]:
                logger.warning("optcc: plan %s: no shared memory inside hosts: %s", plan.name, why)
            elif device is not None:
                keep_path(self.transport, DevicePath(STAGED, f"CUDA IPC: plan {plan.name}: {why}"))
            self.release(prepared)
            prepared = PersistentPlan(*made)
        for channel, handle in enumerate(prepared.handles):
            if handle >= 0:
                self.routes[handle] = prepared, channel
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
            self.fail(error)

    def take(self, events: list[Event]) -> None:
        """What follows from events that `body` of `alone` has met with, and that are not its own."""
        self.within(self._follow, events)

    def within(self, function: Callable[..., T], *args: Any) -> T:
        """Calls a function of a run in the context of the runs, also while another one waits in it."""
        if self.is_within:
            return function(*args)
        self.is_within = True
        try:
            return self._context.run(function, *args)
        finally:
            self.is_within = False

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
            self.finished(handle, self.clock.now_s() - handle.began_s)
        running = self._running
        del running[handle]
        if not running:
            self._due_s = NEVER_S
            THREAD_ENGINES.running.pop(self._identity, None)
        elif handle.due_s <= self._due_s:
            self._due_s = min(each.due_s for each in running)
        if handle.then is not None:
            handle.then()

    def wait_for(self, goal: Goal, timeout_s: float) -> bool:
        """Goes on with every run until `goal` is done, for `timeout_s` at most; whether it is. Raises as
        `Handle.test`."""
        self.check_alive()
        return self.drive(goal, self.clock.now_s() + timeout_s + self.patience_s)

    def barrier(self, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        """Returns once every rank has called it; runs that are under way go on meanwhile.

        Raises DeadlineExceeded if some rank has not come within `timeout_s`, and what a run raises.
        """
        self.check_alive()
        timeout_s += self.patience_s
        deadline_s = self.clock.now_s() + timeout_s
        for goal in self._barrier.rounds():
            if not self.drive(goal, deadline_s):
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
            for shared in {prepared.shared for prepared, _ in self.routes.values() if prepared.shared is not None}:
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

    def look_within(self, seconds: float) -> None:
        """Has `look_aside` called so soon at the latest, while something is waited for."""
        self._next_s = min(self._next_s, self.clock.now_s() + seconds)

    @property
    def running(self) -> Iterable[Handle]:
        """What is under way."""
        return self._running

    def streams_of(self, device_id: int) -> DeviceStreams:
        """This engine's streams of a GPU; raises EnvironmentMissing without CuPy or a GPU."""
        if device_id not in self._devices:
            self._devices[device_id] = DeviceStreams(device_id)
        return self._devices[device_id]

    def release(self, prepared: PersistentPlan) -> None:
        for handle in prepared.handles:
            self.routes.pop(handle, None)
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
        self.computes.clear()
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

    def fail(self, error: BaseException) -> NoReturn:
        """The failure of one run is that of every run; raises it, or what all ranks have agreed on."""
        if self.failure is None and isinstance(error, RuntimeFault):
            agreed = self._give_up(error)
            if agreed is not error:
                raise agreed from error
        elif self.failure is None:
            cause = f"{type(error).__name__}: {error}"
            self._give_up(RuntimeFault(f"rank {self.rank}: {cause}"), cause)
        raise error

    def drive(self, goal: Goal, deadline_s: float) -> bool:
        """Goes on with every run until `goal` is done, or until `deadline_s` and nothing more can be done."""
        if self.in_slices is not None and goal is not self.in_slices.current:
            THREAD_ENGINES.call(self.in_slices.begin_rest)
        # What is asked for within the loop, such as a barrier for new plans, is driven by it.
        longs = None if self.recorder is None or self.is_within else self.recorder.longs
        if longs is not None:
            longs[IS_DRIVEN] = 1
        try:
            is_over = self.within(self._loop, goal, deadline_s)
        except BaseException as error:
            self.fail(error)
        finally:
            if longs is not None:
                longs[IS_DRIVEN] = 0
        if self._settle is not None:
            self._settle()
        return is_over

    def drive_once(self) -> None:
        """Goes on with every run as far as is possible without waiting; raises as `Handle.test`."""
        if self.failure is None:
            self.drive(NEVER, self.clock.now_s())

    def _loop(self, goal: Goal, deadline_s: float) -> bool:
        """Computations first, and only when none is left a wait for events."""
        poll, now, routes, recorder = self.transport.poll, self.clock.now_s, self.routes, self.recorder
        computes, devices, of_thread = self.computes, self._devices, THREAD_ENGINES.running
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
            route = self.routes.get(handle)
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


class _NoPlan:
    """The goal that no plan runs; messages may wait for a rank that comes later."""

    def __init__(self, running: dict[Handle, None]) -> None:
        self._running = running

    @property
    def done(self) -> bool:
        return not any(isinstance(handle.plan, PersistentPlan) for handle in self._running)
