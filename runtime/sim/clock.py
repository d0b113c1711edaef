"""Events in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class Timer:
    """An event that is to come, unless it is cancelled."""

    __slots__ = ("action", "at_s")

    def __init__(self, at_s: float, action: Callable[[], None]) -> None:
        self.at_s = at_s
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """It does not happen."""
        self.action = None


class SimulatedClock:
    """The time, and what happens when; what is planned for one moment happens in the order in which it was planned.

    >>> clock, log = SimulatedClock(), []
    >>> _ = clock.after(2.0, lambda: log.append("later"))
    >>> clock.after(3.0, lambda: log.append("never")).cancel()
    >>> _ = clock.after(1.0, lambda: log.append("sooner"))
    >>> clock.run(10.0), log, clock.now_s
    (3, ['sooner', 'later'], 10.0)
    """

    __slots__ = ("_ends", "_events", "_n_planned", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        # When, in which order, and what: an action, or None and the timer that has it.
        self._events: list[tuple[float, int, Callable[[], None] | None, Timer | None]] = []
        self._n_planned = 0
        self._ends = False

    def after(self, seconds: float, action: Callable[[], None]) -> Timer:
        """Plans an event."""
        at_s = self.now_s + seconds
        timer = Timer(at_s, action)
        self._n_planned += 1
        heappush(self._events, (at_s, self._n_planned, None, timer))
        return timer

    def plan(self, seconds: float, action: Callable[[], None]) -> None:
        """Plans an event that is never cancelled."""
        self._n_planned += 1
        heappush(self._events, (self.now_s + seconds, self._n_planned, action, None))

    def step(self, until_s: float) -> bool:
        """Lets the next event happen, if there is one by then."""
        return self.run(until_s, 1) == 1

    def run(self, until_s: float, n_events_max: int | None = None) -> int:
        """Lets everything happen until then, until `end` is called or until there were too many events; how many."""
        events, n_events, self._ends = self._events, 0, False
        while n_events != n_events_max and not self._ends:
            if not events or events[0][0] > until_s:
                self.now_s = max(self.now_s, until_s)
                break
            self.now_s, _, action, timer = heappop(events)
            if timer is not None:
                action, timer.action = timer.action, None
            if action is not None:
                action()
            n_events += 1
        return n_events

    def end(self) -> None:
        """Ends `run` after this event."""
        self._ends = True
