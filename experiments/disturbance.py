"""What befalls emulated hosts in a thread, while runs on them are measured in another."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

Kind = TypeVar("Kind", bound="Disturbance")


def timed(change: Callable[[], object]) -> float:
    """Makes a change; the middle of the time that it took, on the clock."""
    asked_s = time.monotonic()
    change()
    return (asked_s + time.monotonic()) / 2


class Disturbance(ABC):
    """A context: `disturb` runs in a thread of its own, and is to return once `stopped` is set, at the end of it."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="disturbance")

    @abstractmethod
    def disturb(self) -> None:
        """Changes the hosts; the last change leaves them as they were."""

    def __enter__(self: Kind) -> Kind:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Raises what `disturb` raised."""
        self.stopped.set()
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        try:
            self.disturb()
        except BaseException as error:  # raised in the thread that measures
            self._failed = error
