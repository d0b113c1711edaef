"""The engine: drives the runs of one rank over its transport. The only place that waits.

    Engine           owns the transport; any number of runs may be under way
    PersistentPlan   a verified plan made ready: agreed on by all ranks, on channels and slots of its own
    Handle           one run: test, wait, cancel
    Executor         one plan, one run at a time, blocking

All ranks make plans ready, and begin the runs of each plan, in the same order. The runs of one plan follow each other;
those of different plans overlap in any way. Progress is made inside `test`, `wait` and `barrier`, for all runs at once:
there is no thread.

A run that fails takes all others with it. Whatever the cause (a deadline, a lost rank, `cancel`, an interrupt), the
engine gives up every run and aborts the transport, so that every other rank's runs end in RankLost; here they end in
the error that was the cause.
"""

from __future__ import annotations

import contextvars
import ctypes
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from heapq import heappop, heappush
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np

from optcc.collective import check_dtype, split
from optcc.errors import Cancelled, DeadlineExceeded, InputError, OptccError, PlanError, RuntimeFault
from optcc.plan import Channel, Plan
from optcc.runtime.input_aliasing import find_first_reads
from optcc.runtime.kernels import Array, Kernels, NumpyKernels
from optcc.runtime.plan_handshake import agree
from optcc.runtime.state import WINDOW, Action, Memory, Place, PostRecv, PostSend, RankMachine, RankProgram
from optcc.runtime.stored_types import is_stored_as, stored_dtype
from optcc.runtime.transport import (
    COLLECTIVE_TIMEOUT_S,
    RECEIVED,
    SENT,
    Bytes,
    Clock,
    Defers,
    Event,
    MonotonicClock,
    Transport,
)
from optcc.verdict import PROVED, Verdict

DEADLINE_S = 60.0
COPIED_BYTES_MAX = 1 << 16
"""Messages up to this length are copied into memory to which the plan is tied already; tying it to other memory costs
about 1 us an instruction."""
_POLL_S_MAX = 1.0
_NEVER_S = float("inf")
_ALIGNMENT = 64
_CONTROL = 0
"""The group of the channels on which the engines themselves speak."""
_DEVICE_POLL_S = 50e-6
TIED_BYTES_MIN = 1 << 14
"""An input of less for each action is copied, too: tying costs more, if the input is elsewhere at every run."""
_FIRST_BLOCK_BYTES = 1 << 18
REMEMBERED_ACTIONS_MAX = 128
REMEMBERED_BYTES_MAX = 1 << 14
"""Of programs up to this size, with no longer messages, the machine's steps are remembered: to compute at once what has
come delays what has come behind it by a few us at most."""
_RECV, _SEND, _REDUCE, _COPY, _REDUCE_SLOT, _COPY_SLOT, _REDUCE_FIRST = range(7)
_Bound = tuple[int, int, Any, Any]
"""An action tied to memory: (_RECV or _SEND, handle, view, None) or (how to compute, instruction, dst, src)."""
P = ParamSpec("P")
T = TypeVar("T")


class Staging(Protocol):
    """The way between device memory and memory that a transport reads and writes.

    `store` and `load` may only queue work, as kernels do, in order with theirs.
    """

    def host(self, n_bytes: int) -> Bytes:
        """New memory for messages."""
        ...

    def device(self, n_bytes: int) -> Any:
        """New device memory: uint8, in an array of one dimension."""
        ...

    def store(self, host: Bytes, device: Any) -> None:
        """host = device."""
        ...

    def load(self, device: Any, host: Bytes) -> None:
        """device = host."""
        ...


class Engine:
    """One rank's runs over `transport`, which is the engine's from now on; used by one thread."""

    def __init__(self, transport: Transport, *, clock: Clock | None = None) -> None:
        self.transport = transport
        self.rank, self.n_ranks = transport.rank, transport.n_ranks
        self.failure: RuntimeFault | None = None
        self._clock: Clock = clock or MonotonicClock()
        # By the transport's handle: whose channel it is, and its number in the plan.
        self._routes: dict[int, tuple[PersistentPlan, int]] = {}
        self._computes: deque[tuple[PersistentPlan, _Bound]] = deque()
        # What goes on once a device has done what was queued before a mark.
        self._marks: deque[tuple[Kernels, Any, Callable[[], None]]] = deque()
        self._running: dict[Handle, None] = {}
        self._due_s = _NEVER_S
        self._n_groups = _CONTROL + 1
        self._free_groups: list[int] = []
        self._has_begun = False
        self._control: list[tuple[int, int]] | None = None
        self._control_events: dict[Event, int] = {}
        self._settle = transport.defer_reports() if isinstance(transport, Defers) else None
        # Overflows and divisions by zero are the user's; entering a context is cheaper than `np.errstate` each time.
        self._context = contextvars.copy_context()
        self._context.run(np.seterr, all="ignore")

    def prepare(
        self,
        plan: Plan,
        verdict: Verdict,
        *,
        window: int = WINDOW,
        deadline_s: float = DEADLINE_S,
        kernels: Kernels | None = None,
        staging: Staging | None = None,
    ) -> PersistentPlan:
        """Makes `plan` ready to run any number of times; collective, and runs that are under way go on meanwhile.

        `verdict` is the verifier's on this very plan; `window` see `optcc.runtime.state`; each run may take
        `deadline_s` seconds from its beginning. `kernels` are NumPy's unless given; with `staging`, the arrays are in
        device memory, which the transport does not reach.

        Raises PlanError if the plan has not been proved or is not for the ranks of the transport, MismatchError (at
        every rank) if the ranks differ in what they are about to run, InputError for a window or deadline that cannot
        be, RuntimeFault if a former run failed.
        """
        if not deadline_s > 0:
            raise InputError(f"deadline {deadline_s} s: must be above zero")
        self._check_alive()
        if self._has_begun:
            # The exchange below waits inside the transport, where runs stand still: first all must have come to it.
            self.barrier(deadline_s)
        # An unproved plan is refused only after the exchange, so that the other ranks learn of it and need not wait.
        refusal = _refusal(plan, verdict, self.n_ranks)
        group = self._free_groups[0] if self._free_groups else self._n_groups
        agree(self.transport, plan, proved=not refusal, group=group, timeout_s=deadline_s)
        if refusal:
            raise PlanError(refusal)
        if self._free_groups:
            heappop(self._free_groups)
        else:
            self._n_groups += 1
        transfers = plan.transfers
        kernels = kernels or NumpyKernels(transfers.dtype, transfers.reduction)
        prepared = PersistentPlan(self, plan, group, window, deadline_s, kernels, staging)
        for channel, handle in enumerate(prepared.handles):
            if handle >= 0:
                self._routes[handle] = prepared, channel
        return prepared

    def barrier(self, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        """Returns once every rank has called it; runs that are under way go on meanwhile.

        In ceil(log2 n) rounds (Hensgen, Finkel and Manber 1988): in round i each rank tells the rank 2^i after it.
        Raises DeadlineExceeded if some rank has not come within `timeout_s`, and what a run raises.
        """
        self._check_alive()
        if self._control is None:
            self._control = self._open_control()
        deadline_s = self._clock.now_s() + timeout_s
        seen = self._control_events
        byte = np.zeros(2, dtype=np.uint8)
        for out, in_ in self._control:
            wanted = {event: seen.get(event, 0) + 1 for event in ((SENT, out), (RECEIVED, in_))}
            self.transport.post_recv(in_, byte[:1])
            self.transport.post_send(out, byte[1:])
            if not self._drive(partial(_have_come, seen, wanted), deadline_s):
                error = DeadlineExceeded(f"rank {self.rank}: waited {timeout_s:g} s in vain for other ranks to come")
                self._give_up(error)
                raise error

    def abort(self, cause: str) -> None:
        """Gives up every run: here they end in Cancelled, at the other ranks in RankLost."""
        if self.failure is None:
            self._give_up(Cancelled(f"rank {self.rank}: {cause}"))

    def close(self) -> None:
        """Gives the transport back; aborts if runs are under way. Ranks should meet at a `barrier` before."""
        if self._running:
            self.abort(f"closed with {len(self._running)} runs under way")
        self.transport.close()

    def _open_control(self) -> list[tuple[int, int]]:
        """For each round of a barrier, the channels to the rank that is told and from the one that tells."""
        n, me = self.n_ranks, self.rank
        distances = [1 << i for i in range((n - 1).bit_length())]
        channels = [Channel(rank, (rank + distance) % n, 1) for distance in distances for rank in range(n)]
        handles = self.transport.open(channels, _CONTROL)
        return [(handles[i * n + me], handles[i * n + (me - d) % n]) for i, d in enumerate(distances)]

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise RuntimeFault(f"rank {self.rank}: a former run failed, nothing can run any more: {self.failure}")

    def _release(self, prepared: PersistentPlan) -> None:
        for handle in prepared.handles:
            self._routes.pop(handle, None)
        heappush(self._free_groups, prepared.group)

    def _note_begin(self, handle: Handle) -> None:
        self._has_begun = True
        handle.due_s = self._clock.now_s() + handle.deadline_s
        self._running[handle] = None
        if handle.due_s < self._due_s:
            self._due_s = handle.due_s

    def _note_end(self, handle: Handle) -> None:
        del self._running[handle]
        if not self._running:
            self._due_s = _NEVER_S
        elif handle.due_s <= self._due_s:
            self._due_s = min(each.due_s for each in self._running)

    def _give_up(self, error: RuntimeFault) -> None:
        """Every run is over, here and at the other ranks."""
        self.failure = error
        self._running.clear()
        self._computes.clear()
        self._marks.clear()
        # What else goes wrong on the way out must not hide the cause.
        with suppress(OptccError):
            self.transport.abort(f"{type(error).__name__}: {error}")

    def _attempt(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns, whose failure is the failure of every run."""
        try:
            return self._context.run(work, *args, **kwargs)
        except RuntimeFault as error:
            if self.failure is None:
                self._give_up(error)
            raise
        except BaseException as error:
            if self.failure is None:
                self._give_up(RuntimeFault(f"rank {self.rank}: {type(error).__name__}: {error}"))
            raise

    def _drive(self, holds: Callable[[], bool], deadline_s: float) -> bool:
        """Goes on with every run until `holds()`, or until `deadline_s` and nothing more can be done; looks once."""
        is_over = self._attempt(self._loop, holds, deadline_s)
        if self._settle is not None:
            self._settle()
        return is_over

    def _loop(self, holds: Callable[[], bool], deadline_s: float) -> bool:
        """Computations first, and only when none is left a wait for events."""
        poll, now, routes = self.transport.poll, self._clock.now_s, self._routes
        computes, marks = self._computes, self._marks
        while not holds():
            if computes:
                prepared, entry = computes.popleft()
                prepared.compute(entry)
                continue
            if marks and marks[0][0].is_reached(marks[0][1]):
                marks.popleft()[2]()
                continue
            now_s = now()
            if now_s >= self._due_s:
                self._miss_deadline(now_s)
            wait_s = min(deadline_s - now_s, self._due_s - now_s, _DEVICE_POLL_S if marks else _POLL_S_MAX)
            # The device does not wake who waits for the network.
            events = poll(wait_s if wait_s > 0 else 0.0)
            for event in events:
                kind, handle = event
                route = routes.get(handle)
                if route is None:
                    self._control_events[event] = self._control_events.get(event, 0) + 1
                    continue
                prepared, channel = route
                if prepared.place is not None:
                    prepared.follow(prepared.place, event, channel)
                elif kind == SENT:
                    if prepared.lent:
                        prepared.take_back(handle)
                    prepared.go_on(prepared.machine.sent(channel))
                else:
                    prepared.go_on(prepared.machine.arrived(channel))
            if not events and now_s >= deadline_s:
                return holds()
        return True

    def _miss_deadline(self, now_s: float) -> None:
        handle = next(each for each in self._running if each.due_s <= now_s)
        raise DeadlineExceeded(f"not done after {handle.deadline_s:g} s: {handle.plan.report()}")


class Arrays(NamedTuple):
    """The memory of a run: where the plan runs, what is copied (to, from) before and after, and the user's output; and
    where the input stays and is read, with its address, if it is not copied."""

    buffer: Any
    address: int
    before: tuple[Any, Any] | None
    after: tuple[Any, Any] | None
    output: Any
    source: Any = None
    source_address: int = 0


class Handle:
    """One run of a `PersistentPlan`.

    Its arrays belong to it until it is done: what is sent must not change, what is received must not be read.
    """

    __slots__ = ("arrays", "deadline_s", "done", "due_s", "output", "plan")

    def __init__(self, plan: PersistentPlan, arrays: Arrays, deadline_s: float) -> None:
        self.plan, self.deadline_s, self.due_s = plan, deadline_s, _NEVER_S
        self.done = False
        self.arrays: Arrays | None = arrays
        self.output = arrays.output

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
                raise type(engine.failure)(str(engine.failure))
            until_s = _NEVER_S if timeout_s is None else engine._clock.now_s() + timeout_s
            engine._drive(lambda: self.done, until_s)
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
        group: int,
        window: int,
        deadline_s: float,
        kernels: Kernels,
        staging: Staging | None,
    ) -> None:
        self.engine, self.plan, self.deadline_s, self.group = engine, plan, deadline_s, group
        self.program = RankProgram(plan, engine.rank)
        self.machine = RankMachine(self.program, window)
        # Where a run stands, if the steps are remembered.
        self.place: Place | None = None
        self.handles = engine.transport.open(plan.channels, group, _carried(plan))
        self._kernels, self._staging = kernels, staging
        self._reduce, self._copy = kernels.reduce, kernels.copy
        self._is_queued = kernels.mark() is not None
        self._itemsize = check_dtype(plan.transfers.dtype)
        self._stored = stored_dtype(plan.transfers.dtype)
        # Where in the message this rank's input and output stand: first byte and byte after the last; (0, 0) for none.
        self.input_bytes, self.output_bytes = _places(plan, engine.rank)
        self._slots = _allocate_slots(self.program, _aligned if staging is None else staging.host)
        # Of device memory: where a message lands on its way from a slot, what is being sent from each channel, oldest
        # first, and what is free for the next.
        self._longest = max((action.bytes for action in self.program.actions), default=0)
        self._landing = None if staging is None else staging.device(self._longest)
        self.lent: dict[int, deque[Bytes]] = {}
        self._spare: list[Bytes] = []
        self._work: Any = None
        self._bound: list[_Bound] = []
        self._averages: list[Any] = []
        # The addresses of the buffer and, where it is read there, of the input.
        self._tied_to: tuple[int, int] | None = None
        self._in_order = window == 1
        self._first_reads: frozenset[int] | None = None
        self._first_reads_found = False
        self._queue: deque[Handle] = deque()
        self._is_closed = False
        self._memory: Memory | None = None
        # The arrays of the last run, if they are copied: what they were, and how they are.
        self._arranged: tuple[Any, Any, Any, Arrays] | None = None
        self._calls: list[tuple[Callable[[Any, Any], Any], Any, Any]] = []
        is_small = len(self.program.actions) <= REMEMBERED_ACTIONS_MAX and self._longest <= REMEMBERED_BYTES_MAX
        if is_small and staging is None and not self._is_queued:
            self._memory = Memory(self.program, window)

    # --- runs ---------------------------------------------------------------------------------------------------------

    def start_in(self, buffer: Bytes, *, deadline_s: float | None = None) -> Handle:
        """Begins a run in `buffer`, in place: the message in its first `size_bytes`, scratch behind it.

        `buffer` is a writable contiguous uint8 array of `plan.buffer_bytes`, aligned to the dtype. An average is
        divided before the run is done. If a run of this plan is under way, this one begins when that one is over.

        Raises InputError for a wrong buffer, RuntimeFault if a former run failed.
        """
        return self.start_with(Arrays(buffer, self._check_buffer(buffer), None, None, buffer), deadline_s=deadline_s)

    def start(self, send: Array | None, recv: Array | None, *, deadline_s: float | None = None) -> Handle:
        """Begins recv = the collective of every rank's `send`; the two are the same memory or do not overlap.

        `send` has the length of `input_bytes`, `recv` that of `output_bytes`; they are contiguous arrays of the plan's
        dtype, and None where the collective has no input or no output at this rank. Where `send` is a part of the
        output, it may be that part of `recv`. `avg` divides by the number of ranks: floats by one rounded division
        after the sum, integers truncating toward zero.

        Raises InputError for arrays that do not fit the plan, RuntimeFault if a former run failed.
        """
        return self.start_with(self.arrange(send, recv), deadline_s=deadline_s)

    def arrange(self, send: Array | None, recv: Array | None) -> Arrays:
        """What `start` needs to know of its arrays, for many runs on the same ones; raises as `start`."""
        if self._memory is None or not (type(send) is type(recv) is np.ndarray):
            return self._arrange(send, recv)
        # Of a short run, half would be looking at its arrays, which often are those of the last one.
        nature = (_nature(send), _nature(recv))
        known = self._arranged
        if known is not None and known[0] is send and known[1] is recv and known[2] == nature:
            return known[3]
        arrays = self._arrange(send, recv)
        if arrays.after is not None and recv.nbytes <= COPIED_BYTES_MAX:
            self._arranged = send, recv, nature, arrays
        return arrays

    def _arrange(self, send: Array | None, recv: Array | None) -> Arrays:
        given, wanted = self.input_bytes, self.output_bytes
        source, at = self._check_array("send", send, given)
        target, address = self._check_array("recv", recv, wanted)
        if recv is not None and not getattr(recv.flags, "writeable", True):
            raise InputError("recv: read-only: must be writable")
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
        return Arrays(work, _address(work), before, after, recv)

    def start_with(self, arrays: Arrays, *, deadline_s: float | None = None) -> Handle:
        """Begins a run on what `arrange` has returned."""
        if deadline_s is None:
            deadline_s = self.deadline_s
        elif not deadline_s > 0:
            raise InputError(f"deadline {deadline_s} s: must be above zero")
        self.engine._check_alive()
        if self._is_closed:
            raise InputError(f"plan {self.plan.name}: closed: must be prepared again")
        handle = Handle(self, arrays, deadline_s)
        self._queue.append(handle)
        if len(self._queue) == 1:
            self.engine._attempt(self._begin)
        return handle

    def close(self) -> None:
        """Waits for the runs of this plan, then gives its channels to a later one; every rank closes the same plans in
        the same order."""
        if self._is_closed:
            return
        self._is_closed = True
        while self._queue and self.engine.failure is None:
            self._queue[-1].wait()
        self.engine._release(self)

    def _runs_in(self, target: Any, address: int) -> bool:
        """True if the plan runs in the user's memory itself: it is whole, and tying the plan to it pays."""
        if target.nbytes != self.plan.buffer_bytes:
            return False
        return target.nbytes > COPIED_BYTES_MAX or self._tied_to in (None, (address, 0))

    def _reads_input_where_it_is(self, source: Any) -> bool:
        """True if no copy of a whole input is needed, and one would cost more than to tie the plan to it."""
        if self._staging is not None or self._is_queued or source.nbytes != self.plan.buffer_bytes:
            return False
        if source.nbytes <= max(COPIED_BYTES_MAX, TIED_BYTES_MIN * len(self.program.actions)):
            return False
        if not self._first_reads_found:
            self._first_reads_found = True
            self._first_reads = find_first_reads(self.program, self._in_order)
        return self._first_reads is not None

    def _take_work(self) -> Any:
        if self._work is None:
            n_bytes = self.plan.buffer_bytes
            self._work = _aligned(n_bytes) if self._staging is None else self._staging.device(n_bytes)
        return self._work

    def _begin(self) -> None:
        """The oldest run has its turn."""
        handle = self._queue[0]
        arrays = handle.arrays
        assert arrays is not None
        if arrays.before is not None:
            self._copy(*arrays.before)
        if self._tied_to != (arrays.address, arrays.source_address):
            self._tie(arrays)
        self.engine._note_begin(handle)
        if self._memory is not None:
            self._take_step(*self._memory.start)
        else:
            self.go_on(self.machine.start())

    def _end(self) -> None:
        """Every instruction is done: what is left is to divide, and to copy the output to where it was asked for."""
        arrays = self._queue[0].arrays
        assert arrays is not None
        for data in self._averages:
            self._kernels.finish(data, self.plan.n_ranks)
        if arrays.after is not None:
            self._copy(*arrays.after)
        if self._is_queued:
            self._then(self._be_over)
        else:
            self._be_over()

    def _be_over(self) -> None:
        handle = self._queue.popleft()
        handle.done = True
        # Who keeps the handle keeps its output alone.
        handle.arrays = None
        self.engine._note_end(handle)
        if self._queue:
            self._begin()

    # --- what the loop asks for ---------------------------------------------------------------------------------------

    def follow(self, place: Place, event: Event, channel: int) -> None:
        """Does what follows from an event, where the steps are remembered."""
        step = place.steps.get(event)
        if step is None:
            assert self._memory is not None
            step = self._memory.step(place, event, channel)
        self._take_step(*step)

    def _take_step(self, actions: tuple[int, ...], place: Place) -> None:
        self.place = place
        calls = self._calls
        for index in actions:
            call, first, second = calls[index]
            call(first, second)
        if place.done:
            self._end()

    def report(self) -> str:
        """What the run waits for; see `RankMachine.report`."""
        return (self.machine if self.place is None else self.place.machine).report()

    def take_back(self, handle: int) -> None:
        """A message has been sent from host memory, which is free for another."""
        self._spare.append(self.lent[handle].popleft())

    def compute(self, entry: _Bound) -> None:
        """Does a computation that was kept."""
        code, instruction, target, source = entry
        if code == _REDUCE:
            self._reduce(target, source)
        elif code == _COPY:
            self._copy(target, source)
        elif code == _REDUCE_FIRST:
            self._reduce_first(target, source)
        else:
            self._compute_staged(code, target, source)
        if self._is_queued:
            self._then(lambda: self.go_on(self.machine.local_done(instruction)))
        else:
            self.go_on(self.machine.local_done(instruction))

    def go_on(self, actions: list[Action]) -> None:
        """Posts what is to be posted, keeps what is to be computed, ends the run when nothing is left."""
        bound, transport = self._bound, self.engine.transport
        for action in actions:
            code, where, view, _ = entry = bound[action.index]
            if code == _SEND:
                if self._staging is None:
                    transport.post_send(where, view)
                else:
                    self._send_staged(where, view)
            elif code == _RECV:
                transport.post_recv(where, view)
            else:
                self.engine._computes.append((self, entry))
        if not actions and self.machine.done:
            self._end()

    def _then(self, go_on: Callable[[], None]) -> None:
        """`go_on()`, now or once everything is done that has been queued on the device."""
        mark = self._kernels.mark()
        if mark is None:
            go_on()
        else:
            self.engine._marks.append((self._kernels, mark, go_on))

    def _send_staged(self, handle: int, view: Any) -> None:
        """Sends from device memory: through host memory, which is taken back once it is sent."""
        assert self._staging is not None
        host = self._spare.pop() if self._spare else self._staging.host(self._longest)
        self.lent.setdefault(handle, deque()).append(host)
        self._staging.store(host[: view.nbytes], view)
        self._then(lambda: self.engine.transport.post_send(handle, host[: view.nbytes]))

    def _reduce_first(self, target: Any, both: tuple[Any, Any]) -> None:
        """target = first op source, block by block, so that what is copied is still in the cache."""
        first, source = both
        step = _FIRST_BLOCK_BYTES // self._itemsize
        for at in range(0, len(target), step):
            block = slice(at, at + step)
            self._copy(target[block], first[block])
            self._reduce(target[block], source[block])

    def _compute_staged(self, code: int, target: Any, slot: Bytes) -> None:
        """A computation on device memory with what has come into host memory."""
        assert self._staging is not None and self._landing is not None
        landing = self._landing[: slot.nbytes]
        self._staging.load(landing, slot)
        if code == _REDUCE_SLOT:
            self._reduce(target, self._kernels.view(landing))
        else:
            self._copy(target, self._kernels.view(landing))

    # --- memory -------------------------------------------------------------------------------------------------------

    def _tie(self, arrays: Arrays) -> None:
        """Ties every action of the program to its bytes, once for as long as the arrays stay the same."""
        view, buffer, given = self._kernels.view, arrays.buffer, arrays.source
        first_reads = (None if given is None else self._first_reads) or frozenset()
        bound: list[_Bound] = []
        for action in self.program.actions:
            if isinstance(action, PostRecv):
                slot = self._slots[action.lane][action.slot]
                bound.append((_RECV, self.handles[action.channel], slot[: action.bytes], None))
                continue
            if isinstance(action, PostSend):
                data = given if action.index in first_reads else buffer
                data = data[action.offset : action.offset + action.bytes]
                bound.append((_SEND, self.handles[action.channel], data, None))
                continue
            target = view(buffer[action.dst_offset : action.dst_offset + action.bytes])
            code = _REDUCE if action.reduce else _COPY
            source: Any
            if action.slot < 0:
                source = view(buffer[action.src_offset : action.src_offset + action.bytes])
            else:
                source = self._slots[action.lane][action.slot][: action.bytes]
                if self._staging is None:
                    source = view(source)
                else:
                    code = _REDUCE_SLOT if action.reduce else _COPY_SLOT
                if action.index in first_reads:
                    code = _REDUCE_FIRST
                    source = view(given[action.dst_offset : action.dst_offset + action.bytes]), source
            bound.append((code, action.instruction, target, source))
        self._bound, self._tied_to = bound, (arrays.address, arrays.source_address)
        if self._memory is not None:
            self._calls = [self._call_of(entry) for entry in bound]
        self._averages = [view(buffer[start:stop]) for start, stop in self._reduced_bytes()]

    def _call_of(self, entry: _Bound) -> tuple[Callable[[Any, Any], Any], Any, Any]:
        """An action as a function and its two arguments."""
        code, where, first, second = entry
        if code in (_SEND, _RECV):
            transport = self.engine.transport
            post: Callable[[Any, Any], Any] = transport.post_send if code == _SEND else transport.post_recv
            return post, where, first
        compute: dict[int, Callable[[Any, Any], Any]] = {
            _REDUCE: self._reduce,
            _COPY: self._copy,
            _REDUCE_FIRST: self._reduce_first,
        }
        return compute[code], first, second

    def _reduced_bytes(self) -> list[tuple[int, int]]:
        """Which bytes of an average are to be divided: elements, in the end, that this rank must hold and that everyone
        contributed to."""
        collective, itemsize = self.plan.collective, self._itemsize
        if collective.name in ("broadcast", "allgather") or self.plan.transfers.reduction != "avg":
            return []
        after = collective.after(self.engine.rank, self.plan.size_bytes // itemsize)
        return [(start * itemsize, stop * itemsize) for start, stop, ranks in after if ranks == collective.everyone]

    def _check_buffer(self, buffer: Any) -> int:
        """The address of a buffer that a plan can run in."""
        if buffer.dtype != np.uint8 or buffer.ndim != 1:
            raise InputError(f"buffer: {buffer.dtype} of {buffer.ndim} dimensions: must be uint8 of one dimension")
        if buffer.nbytes != self.plan.buffer_bytes:
            raise InputError(f"buffer: {buffer.nbytes} B: must be the plan's {self.plan.buffer_bytes} B")
        if not (buffer.flags.c_contiguous and getattr(buffer.flags, "writeable", True)):
            raise InputError("buffer: must be contiguous and writable")
        address = _address(buffer)
        if buffer.nbytes and address % self._itemsize:
            raise InputError(f"buffer: at {address:#x}: must be aligned to {self.plan.transfers.dtype}")
        return address

    def _check_array(self, name: str, array: Any, place: tuple[int, int]) -> tuple[Any, int]:
        """The bytes of `array`, which must fit `place`, and its address; None where there is none to give."""
        dtype, n_bytes = self.plan.transfers.dtype, place[1] - place[0]
        if array is None:
            if n_bytes:
                raise InputError(f"{name}: None: must be an array of {n_bytes} B at rank {self.engine.rank}")
            return None, 0
        if array.dtype != self._stored and not is_stored_as(array, dtype):
            raise InputError(f"{name}: {array.dtype}: must be the plan's {dtype}")
        if array.nbytes != n_bytes:
            raise InputError(f"{name}: {array.nbytes} B: must be the plan's {n_bytes} B")
        address = _address(array)
        if not array.flags.c_contiguous or (n_bytes and address % self._itemsize):
            raise InputError(f"{name}: must be contiguous (C order) and aligned")
        return array.reshape(-1).view(np.uint8), address


class Executor:
    """One rank's executor of `plan`: one run at a time, each waited for.

    Making one is collective, as `Engine.prepare`, which says what the arguments are and what is raised. After a failed
    run the executor and its transport can only be closed. Executors over one transport take turns, on the same
    channels, and messages are divided between rails as suits the last one made: for several plans take an Engine.
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
        self.plan, self.rank, self.deadline_s = plan, rank, deadline_s
        engine = Engine(transport, clock=clock)
        self._prepared = engine.prepare(plan, verdict, window=window, deadline_s=deadline_s, kernels=kernels)

    def run(self, buffer: Bytes) -> None:
        """Executes the plan once on `buffer`, in place; see `PersistentPlan.start_in` and `Handle.wait`."""
        self._prepared.start_in(buffer).wait()

    def all_reduce(self, send: Array, recv: Array) -> None:
        """recv = the reduction of every rank's `send`; see `PersistentPlan.start` and `Handle.wait`.

        Raises InputError if the plan is no allreduce, and as those.
        """
        if self.plan.collective.name != "allreduce":
            raise InputError(f"plan {self.plan.name}: {self.plan.collective.name}: must be an allreduce")
        self._prepared.start(send, recv).wait()


def _carried(plan: Plan) -> list[int]:
    """Bytes that each channel carries in a run."""
    sends = plan.out_channel >= 0
    carried = np.bincount(plan.out_channel[sends], plan.bytes[sends], minlength=len(plan.channels))
    return [int(n_bytes) for n_bytes in carried]


def _places(plan: Plan, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Which bytes of the message are the input of `rank`, and which its output; (0, 0) for none."""
    collective, itemsize = plan.collective, check_dtype(plan.transfers.dtype)
    whole = given = wanted = 0, plan.size_bytes
    first, stop = list(split(plan.size_bytes // itemsize, plan.n_ranks))[rank]
    if collective.name == "allgather":
        given = first * itemsize, stop * itemsize
    elif collective.name == "reducescatter":
        wanted = first * itemsize, stop * itemsize
    elif collective.name == "broadcast":
        given = whole if rank == collective.root else (0, 0)
    elif collective.name == "reduce":
        wanted = whole if rank == collective.root else (0, 0)
    return given, wanted


def _have_come(seen: dict[Event, int], wanted: dict[Event, int]) -> bool:
    return all(seen.get(event, 0) >= count for event, count in wanted.items())


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


def _allocate_slots(program: RankProgram, allocate: Callable[[int], Bytes]) -> list[list[Bytes]]:
    """The slots of every lane, each as long as the longest message that it takes, in one block of memory."""
    shapes: list[tuple[int, int]] = []
    for recvs, slots in zip(program.recvs, program.slots, strict=True):
        longest = max((recv.bytes for recv in recvs), default=0)
        shapes.append((min(slots, len(recvs)), -(-longest // _ALIGNMENT) * _ALIGNMENT))
    block = allocate(sum(count * size for count, size in shapes))
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


def _nature(array: Array) -> tuple[int, int, np.dtype[Any], bool, bool]:
    """All that matters of an array but what it holds."""
    flags = array.flags
    return _address(array), array.nbytes, array.dtype, flags.c_contiguous, flags.writeable


def _address(array: Any) -> int:
    """Where the bytes of an array stand, in the memory of the processor or of a GPU."""
    if type(array) is np.ndarray:
        try:
            return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
        except (BufferError, TypeError, ValueError):  # read-only, empty, in pieces, or of a type of another package
            return int(array.ctypes.data)
    interface = getattr(array, "__cuda_array_interface__", None)
    return int(array.ctypes.data if interface is None else interface["data"][0])
