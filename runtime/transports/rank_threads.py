"""The ranks of a job as threads of this process (`loopback`, `sim`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from optcc.errors import DeadlineExceeded, RankLost
from optcc.runtime.transport import MonotonicClock

RUN_DEADLINE_S = 120.0
"""Seconds of real time that a run of all ranks may take."""
_JOIN_GRACE_S = 2.0
T = TypeVar("T")


def run_threads(
    n_ranks: int,
    function: Callable[[int], T],
    abort: Callable[[int, str], None],
    *,
    start: Callable[[], None] | None = None,
    deadline_s: float = RUN_DEADLINE_S,
) -> list[T]:
    """Calls `function(rank)` once per rank, each in a thread of its own; the results by rank.

    `start` is called when all threads are there; `abort(rank, cause)` has to end the waits of all ranks. It is called
    in the thread of each rank that raises. The first exception that is not RankLost is raised here. Raises
    DeadlineExceeded, naming the ranks, if some are not done after `deadline_s` seconds.

    >>> run_threads(3, lambda rank: 10 * rank, abort=print)
    [0, 10, 20]
    """
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            failures.append(error)
            abort(rank, f"{type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"optcc-rank-{rank}", daemon=True) for rank in range(n_ranks)
    ]
    try:
        for thread in threads:
            thread.start()
        if start is not None:
            start()
        late = _join(threads, deadline_s)
        if late:
            abort(late[0], f"not done after {deadline_s:g} s")
            _join(threads, _JOIN_GRACE_S)
    except BaseException as error:
        # An interrupt of the main thread: the ranks must not go on behind its back.
        abort(0, type(error).__name__)
        raise
    if late:
        raise DeadlineExceeded(f"ranks {', '.join(map(str, late))}: not done after {deadline_s:g} s")
    if failures:
        raise next((error for error in failures if not isinstance(error, RankLost)), failures[0])
    return [results[rank] for rank in range(n_ranks)]


def _join(threads: Sequence[threading.Thread], timeout_s: float) -> list[int]:
    """Waits for the threads, together at most `timeout_s`; the indices of those that still run."""
    clock = MonotonicClock()
    deadline_s = clock.now_s() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - clock.now_s()))
    return [index for index, thread in enumerate(threads) if thread.is_alive()]
