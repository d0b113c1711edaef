"""A long collective in slices: each is a collective of its own on some of the elements, under the plans of its time.

So a NIC that is lost, or becomes slow, costs what is under way then, and not all that is left: before each slice the
ranks may change to the plans of another epoch (`optcc.runtime.replanning`). That all begin a slice under the same epoch
follows from what is proved of collectives (`optcc.runtime.protocol.agreement`), as slices are begun in the same order
at all ranks: before anything else is begun or waited for, every slice of a collective has been begun.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

from optcc.plan import PlanRequest
from optcc.runtime.arguments import Call
from optcc.runtime.buffers import address_of, device_of
from optcc.runtime.engine import Engine
from optcc.runtime.handle import Handle
from optcc.runtime.protocol.agreement import Shares

SLICE_S = 0.0625
"""New plans are made, and agreed on, in about as long."""
GOES_ON_RANKS, GOES_ON_S = 17, 0.5
"""Where rates have changed, fewer ranks wait for their plans, and longer collectives do: to make them takes less."""
ELEMENTWISE = ("allreduce", "broadcast", "reduce")
"""The collectives that are the same on each element, so that any elements are a collective of their own."""
_ALIGNED = 1024
"""Elements: slices are multiples of it, and what is left is one more."""


@runtime_checkable
class Estimates(Protocol):
    """A planner that knows about how long a collective takes."""

    def least_s(self, request: PlanRequest, shares: Shares | None = None) -> float:
        """A lower bound on it, seconds, where NICs carry these shares of their rates, or all; the same at all ranks.

        Raises TopologyError if a server is cut off by it.
        """
        ...


class Slicing(NamedTuple):
    """`n_slices` of `elements` each, and one of the `rest` if there is any."""

    n_slices: int
    elements: int
    rest: int

    def cut(self, call: Call) -> list[Call]:
        """A collective in slices; `may_cut` says whether its arrays can be."""
        sliced = self.n_slices * self.elements
        itemsize = call.request.size_bytes // (sliced + self.rest)
        bounds = [*range(0, sliced + 1, self.elements), *([sliced + self.rest] if self.rest else [])]
        return [_part(call, start, stop, itemsize) for start, stop in pairwise(bounds)]


def _part(call: Call, start: int, stop: int, itemsize: int) -> Call:
    """The collective of some elements."""
    request = call.request._replace(size_bytes=(stop - start) * itemsize)
    send, recv = (None if array is None else array.reshape(-1)[start:stop] for array in (call.send, call.recv))
    return Call(request, send, recv, None)


def may_cut(call: Call) -> bool:
    """True if the arrays are in the host's memory, and every part of them is one that a plan runs on, if the whole is.

    Else the whole is refused, for what is wrong about it.
    """
    arrays = [array for array in (call.send, call.recv) if array is not None]
    if any(device_of(array) >= 0 for array in arrays):
        return False
    size_bytes = call.request.size_bytes
    if not all(array.flags.c_contiguous and array.nbytes == size_bytes for array in arrays):
        return False
    first, last = address_of(arrays[0]), address_of(arrays[-1])
    return first == last or abs(first - last) >= size_bytes


def slicing(request: PlanRequest, itemsize: int, least_s: float, slice_s: float) -> Slicing | None:
    """How a collective of each element that takes `least_s` is to be sliced; None if it is too short.

    >>> from optcc.collective import Collective
    >>> asked = PlanRequest(Collective("allreduce", 4), 1_000_000, "float32", "sum")
    >>> slicing(asked, 4, 1.0, 0.25)
    Slicing(n_slices=4, elements=62464, rest=144)
    >>> slicing(asked, 4, 0.4, 0.25)
    """
    n_elements = request.size_bytes // itemsize
    count = int(min(least_s / slice_s, n_elements / _ALIGNED))
    if count < 2:
        return None
    elements = n_elements // count // _ALIGNED * _ALIGNED
    return Slicing(count, elements, n_elements - count * elements)


class SlicedRun(Handle):
    """The handle of a collective in slices.

    `begin(number, deadline_s)` begins one of the `count` slices. Whoever waits for this begins the next once the last
    is done; before anything else is begun or waited for, `begin_rest` begins those that are left.
    """

    __slots__ = ("_begin", "_count", "_engine", "_n_begun", "_n_left", "current")

    def __init__(
        self, engine: Engine, begin: Callable[[int, float], Handle], count: int, deadline_s: float, output: Any
    ) -> None:
        super().__init__(_Owner(engine), None, deadline_s)
        self._engine = engine
        self.due_s, self.output = engine.clock.now_s() + deadline_s, output
        self._begin, self._count = begin, count
        self._n_begun, self._n_left = 0, count
        self.current: Handle | None = None
        self._begin_next()

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Handle.wait`."""
        clock = self.plan.engine.clock
        until_s = float("inf") if timeout_s is None else clock.now_s() + timeout_s
        while self._n_begun < self._count:
            assert self.current is not None
            if not self.current.wait(None if timeout_s is None else max(0.0, until_s - clock.now_s())):
                return False
            self._begin_next()
        return super().wait(None if timeout_s is None else max(0.0, until_s - clock.now_s()))

    def begin_rest(self) -> None:
        """Begins all slices that are left."""
        while self._n_begun < self._count:
            self._begin_next()

    def _begin_next(self) -> None:
        engine = self._engine
        # Beginning may mean to wait, for other ranks or for what is under way.
        engine.in_slices = None
        now_s = engine.clock.now_s()
        self.current = self._begin(self._n_begun, max(self.due_s - now_s, 1e-3))
        self._n_begun += 1
        if self.current.done:
            self._one_done()
        else:
            self.current.then = self._one_done
        if self._n_begun < self._count:
            engine.in_slices = self

    def _one_done(self) -> None:
        self._n_left -= 1
        if not self._n_left:
            self.done = True
            if self.then is not None:
                self.then()


class _Owner:
    """What an engine drives, for the handle of all slices."""

    observed = 0

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def report(self) -> str:
        """Slices say themselves what they wait for."""
        return "a collective in slices"
