"""Ranks as threads: whose exception is raised, who is told, and what happens to ranks that do not end."""

from __future__ import annotations

import threading

import pytest

from optcc.errors import DeadlineExceeded, RankLost
from optcc.runtime.transports.rank_threads import run_threads


def test_the_cause_is_raised_and_not_what_follows_from_it() -> None:
    aborted = threading.Event()
    causes: list[tuple[int, str]] = []

    def abort(rank: int, cause: str) -> None:
        causes.append((rank, cause))
        aborted.set()

    def body(rank: int) -> None:
        if rank == 1:
            raise ValueError("the cause")
        assert aborted.wait(10)
        raise RankLost(f"rank {rank}: rank 1 is lost")

    with pytest.raises(ValueError, match="the cause"):
        run_threads(3, body, abort)
    assert causes[0] == (1, "ValueError: the cause") and {rank for rank, _ in causes} == {0, 1, 2}


def test_ranks_that_do_not_end_are_named() -> None:
    aborted = threading.Event()
    causes: list[tuple[int, str]] = []

    def abort(rank: int, cause: str) -> None:
        causes.append((rank, cause))
        aborted.set()

    with pytest.raises(DeadlineExceeded, match=r"ranks 1, 2: not done after 0\.05 s"):
        run_threads(3, lambda rank: rank == 0 or aborted.wait(10), abort, deadline_s=0.05)
    assert causes == [(1, "not done after 0.05 s")]


def test_start_is_called_when_all_threads_are_there() -> None:
    begun = [threading.Event() for _ in range(3)]
    go = threading.Event()

    def body(rank: int) -> bool:
        begun[rank].set()
        return go.wait(10)

    def start() -> None:
        assert all(each.wait(10) for each in begun)
        go.set()

    assert run_threads(3, body, abort=lambda *_: None, start=start) == [True] * 3


def test_an_interrupt_ends_the_ranks() -> None:
    aborted = threading.Event()

    def start() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_threads(2, lambda _: aborted.wait(10), abort=lambda *_: aborted.set(), start=start)
    assert aborted.is_set()
