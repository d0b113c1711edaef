"""Engines of one thread make progress together: who waits for one drives the others that have runs under way.

Otherwise two ranks that wait for the runs of two engines in opposite order would stop, each until its deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

TURN_S = 1e-3
"""While others have runs under way an engine waits no longer than this for its own events."""


class Drivable(Protocol):
    """An engine, as far as it is driven by others."""

    def drive_once(self) -> None:
        """Goes on with every run as far as is possible without waiting; raises what `Handle.test` raises."""
        ...


class ThreadEngines(threading.local):
    """The engines of this thread that have runs under way, by their identity, entered by themselves.

    With no call between, as a short run begins and ends within some 100 us.
    """

    def __init__(self) -> None:
        self.running: dict[int, Callable[[], Drivable | None]] = {}
        self._is_driving = False

    def end(self, engine: Drivable) -> None:
        """An engine has no more runs under way, or has failed."""
        self.running.pop(id(engine), None)

    def has_others(self, engine: Drivable) -> bool:
        """True if another engine has runs under way."""
        return not self._is_driving and len(self.running) > (id(engine) in self.running)

    def drive_others(self, engine: Drivable) -> None:
        """Drives every other engine once. One that fails says so when its own runs are waited for."""
        self._is_driving = True
        try:
            for identity, get in list(self.running.items()):
                other = get()
                if other is None:
                    del self.running[identity]
                elif other is not engine:
                    with suppress(Exception):
                        other.drive_once()
        finally:
            self._is_driving = False

    def call(self, body: Callable[[], None]) -> None:
        """Calls what may wait, while another engine drives this one or not: meanwhile all are driven."""
        was_driving, self._is_driving = self._is_driving, False
        try:
            body()
        finally:
            self._is_driving = was_driving


THREAD_ENGINES = ThreadEngines()
