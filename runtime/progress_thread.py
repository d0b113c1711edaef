"""`ProgressThread`: a communicator that goes on while the program computes, on a thread of its own.

    thread = ProgressThread(make_communicator, "group 0")
    thread.submit(Operation(lambda comm: [comm.start_all_reduce(array)], whenever_done, deadline_s=60.0))
    thread.close()

The thread owns the communicator: it makes it, begins what is submitted, and waits in the engine for the network and for
what is submitted next at once, which wakes it by an eventfd. Waiting holds no lock of the interpreter.

Collectives begin in the order in which they were submitted, and overlap; one whose memory another that is under way
uses begins after that. Messages begin as soon as the thread looks, also while it waits for other ranks to agree on a
plan: a program may send first what another rank receives before its next collective.

An operation that cannot begin fails alone. Any other failure is the communicator's: every operation ends with it, and
those that are submitted afterwards at once.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from optcc.errors import Cancelled, MismatchError, OptccError, RuntimeFault
from optcc.runtime.communicator import Communicator
from optcc.runtime.handle import Handle
from optcc.runtime.transport import WOKEN, Wakes

IDLE_S = 3600.0
"""The thread looks whether it has been forgotten so often at least."""
Start = Callable[[Communicator], Sequence[Handle]]
Done = Callable[[BaseException | None], None]
Span = tuple[int, int]
"""The first byte of some memory, and that after its last."""


class Operation:
    """What is begun by `start`, on the thread, and ends with a call of `done`, there too, with None or why it failed.

    `spans` is the memory that it uses. `done` must neither wait nor raise.
    """

    __slots__ = ("_n_left", "deadline_s", "done", "spans", "start")

    def __init__(self, start: Start, done: Done, deadline_s: float, spans: Sequence[Span] = ()) -> None:
        self.start, self.done, self.deadline_s, self.spans = start, done, deadline_s, spans
        self._n_left = 0

    def overlaps(self, other: Operation) -> bool:
        """Whether the two use the same memory."""
        return any(a < d and c < b for a, b in self.spans for c, d in other.spans)

    def follow(self, handles: Sequence[Handle], over: Callable[[Operation], None]) -> None:
        """Has `over` called once all of `handles` are done."""

        def one_done() -> None:
            self._n_left -= 1
            if not self._n_left:
                over(self)

        # One more until all are looked at, as some may be done already.
        self._n_left = 1 + sum(not handle.done for handle in handles)
        for handle in handles:
            if not handle.done:
                handle.then = one_done
        one_done()


class ProgressThread:
    """Drives the communicator that `make` makes; raises what that raises."""

    def __init__(self, make: Callable[[], Communicator], name: str) -> None:
        self._make, self._name = make, name
        self._lock = threading.Lock()
        self._collectives: deque[Operation] = deque()
        self._messages: deque[Operation] = deque()
        self._running: dict[Operation, None] = {}
        self._failure: BaseException | None = None
        self._is_ending = self._gives_up = False
        self._is_ready = threading.Event()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name=f"optcc {name}", daemon=True)
        self._thread.start()
        self._is_ready.wait()
        if self._failure is not None:
            raise self._failure

    def submit(self, operation: Operation, *, is_message: bool = False) -> None:
        """Has the thread begin it: a collective after those before it, a message at once."""
        with self._lock:
            failure = self._failure
            if failure is None and self._is_ending:
                failure = Cancelled(f"{self._name}: closed, so nothing can begin")
            if failure is None:
                (self._messages if is_message else self._collectives).append(operation)
                os.eventfd_write(self._wake, 1)
        if failure is not None:
            operation.done(failure)

    def close(self, *, abort: bool = False) -> None:
        """Ends the thread once all operations are done, or with `abort` at once, at all ranks, where some are not."""
        with self._lock:
            self._gives_up |= abort
            if not self._is_ending and self._failure is None:
                self._is_ending = True
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- on the thread ------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """As the engine's goal: there is something to begin, or the end has come."""
        return bool(self._collectives or self._messages or (self._is_ending and (self._gives_up or not self._running)))

    def _run(self) -> None:
        comm: Communicator | None = None
        try:
            comm = self._make()
            transport = comm.engine.transport
            assert isinstance(transport, Wakes)
            transport.wake_by(self._wake)
            comm.whole_engine.listen(WOKEN, lambda _: self._begin_messages(comm))
            self._is_ready.set()
            self._go_on(comm)
            if self._running:
                comm.abort("closed with operations under way")
        except BaseException as error:
            self._fail(error)
            if comm is not None:
                with suppress(OptccError):
                    comm.abort(f"{type(error).__name__}: {error}")
        finally:
            self._fail(Cancelled(f"{self._name}: closed"))
            if comm is not None:
                with suppress(OptccError):
                    comm.close()
            with self._lock:
                os.close(self._wake)
                self._wake = -1
            self._is_ready.set()

    def _go_on(self, comm: Communicator) -> None:
        while not (self._is_ending and (self._gives_up or not (self._running or self._collectives or self._messages))):
            self._begin_messages(comm)
            if self._collectives:
                operation = self._collectives.popleft()
                others = [other for other in self._running if other.overlaps(operation)]
                if others:
                    comm.whole_engine.wait_for(_Over(others, self._running), IDLE_S)
                self._begin(comm, operation)
            else:
                comm.whole_engine.wait_for(self, IDLE_S)

    def _begin_messages(self, comm: Communicator) -> None:
        while self._messages:
            self._begin(comm, self._messages.popleft())

    def _begin(self, comm: Communicator, operation: Operation) -> None:
        self._running[operation] = None
        comm.deadline_s = operation.deadline_s
        try:
            handles = operation.start(comm)
        except (OptccError, ValueError, TypeError) as error:
            if comm.whole_engine.failure is not None or (
                isinstance(error, RuntimeFault) and not isinstance(error, MismatchError)
            ):
                raise
            self._over(operation, error)
            return
        operation.follow(handles, self._over)

    def _over(self, operation: Operation, error: BaseException | None = None) -> None:
        del self._running[operation]
        operation.done(error)

    def _fail(self, error: BaseException) -> None:
        """Nothing can begin any more, and all that is under way has failed."""
        with self._lock:
            if self._failure is None:
                self._failure = error
            failed = [*self._running, *self._messages, *self._collectives]
            self._running.clear()
            self._messages.clear()
            self._collectives.clear()
        for operation in failed:
            operation.done(self._failure)


class _Over:
    """The goal that some operations are over."""

    def __init__(self, operations: Sequence[Operation], running: dict[Operation, None]) -> None:
        self._operations, self._running = operations, running

    @property
    def done(self) -> bool:
        """True once none is under way."""
        return not any(operation in self._running for operation in self._operations)
