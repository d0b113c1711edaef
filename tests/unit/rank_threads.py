"""Ranks as threads of one process, for transports that meet once: where they meet, and how they are run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from optcc.errors import RankLost
from optcc.runtime.rendezvous import Meet, Meeting

DONE_S = 60.0


class Closes(Protocol):
    """What is made for a rank."""

    def close(self) -> None:
        """Gives everything back."""


T = TypeVar("T")
Made = TypeVar("Made", bound=Closes)


class Room:
    """Where the threads of one test meet."""

    def __init__(self, n_ranks: int) -> None:
        self.n_ranks, self.job, self.secret = n_ranks, os.urandom(16), os.urandom(32)
        self.records: list[bytes] = [b""] * n_ranks
        self._barrier = threading.Barrier(n_ranks)

    def meet(self, rank: int) -> Meet:
        """See `optcc.runtime.rendezvous.Meet`."""

        def meet(record: bytes) -> Meeting:
            self.records[rank] = record
            self._barrier.wait(DONE_S)
            return Meeting(rank, self.n_ranks, self.job, self.secret, tuple(self.records))

        return meet


def run_threads(n_ranks: int, make: Callable[[int], Made], function: Callable[[int, Made], T]) -> list[T]:
    """`function` once a rank with what `make` makes for it, which is closed; the results by rank.

    Raises the first exception that is not a consequence of another's.
    """
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            made = make(rank)
            try:
                results[rank] = function(rank, made)
            finally:
                made.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(n_ranks)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + DONE_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), f"not done after {DONE_S:g} s"
    if failures:
        raise next((error for error in failures if not isinstance(error, RankLost)), failures[0])
    return [results[rank] for rank in range(n_ranks)]
