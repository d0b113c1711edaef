"""`Handle`, one run of a plan, or a message: test, wait, cancel; and what it needs of the engine that drives it."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, Protocol

from optcc.errors import RuntimeFault
from optcc.runtime.barrier import Goal
from optcc.runtime.buffers import Arrays
from optcc.runtime.device_streams import Ready
from optcc.runtime.observe.page import UNKNOWN_S
from optcc.runtime.transport import Clock
from optcc.runtime.watching import RunTaps

NEVER_S = float("inf")


class DrivesRuns(Protocol):
    """The engine, to a handle; see `optcc.runtime.engine.Engine`."""

    failure: RuntimeFault | None
    clock: Clock
    patience_s: float

    def drive(self, goal: Goal, deadline_s: float) -> bool:
        """Goes on with every run until `goal` is done, or until `deadline_s` and nothing more can be done."""
        ...

    def abort(self, cause: str) -> None:
        """Gives up every run."""
        ...


class Driven(Protocol):
    """What an engine drives: a plan, or the mail of a rank; `observed` is its number for the flight recorder."""

    observed: int

    @property
    def engine(self) -> DrivesRuns:
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
        self.plan, self.deadline_s, self.due_s = plan, deadline_s + plan.engine.patience_s, NEVER_S
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
    def began_s(self) -> float:
        """When it was started, by the engine's clock; infinite before."""
        return self.due_s - self.deadline_s

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
            until_s = NEVER_S if timeout_s is None else engine.clock.now_s() + timeout_s
            engine.drive(self, until_s)
        if self.ready is not None and self.done:
            self.ready.order_current(self.stream)
        return self.done

    def result(self) -> Any:
        """Waits until the run is done; the array that was given for its output. Raises as `test`."""
        self.wait()
        return self.output

    def cancel(self, cause: str = "cancelled") -> None:
        """Gives this run up, and with it all runs of the engine, at all ranks: see the head of `optcc.runtime.engine`.

        A run that is done stays done; nothing happens then.
        """
        if not self.done:
            self.plan.engine.abort(cause)


class InSlices(Protocol):
    """A collective in slices; see `optcc.runtime.slices`."""

    current: Handle | None

    def begin_rest(self) -> None:
        """Begins all slices that are left."""
        ...
