"""A communicator on a thread of its own, over TCP: what it begins when, and how its operations fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optcc.errors import Cancelled, DeadlineExceeded, InputError, RankLost
from optcc.planner import Planner
from optcc.runtime.communicator import Communicator
from optcc.runtime.handle import Handle
from optcc.runtime.meeting_file import in_file
from optcc.runtime.nics import nics_of
from optcc.runtime.progress_thread import Operation, ProgressThread
from optcc.runtime.transports.tcp import TcpTransport
from optcc.topology import Topology

DONE_S = 60.0


class Pending:
    """An operation that was submitted: it is over once `wait` returns, with its error or None."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self.error: BaseException | None = None

    def end(self, error: BaseException | None) -> None:
        self.error = error
        self._over.set()

    def wait(self) -> BaseException | None:
        assert self._over.wait(DONE_S)
        return self.error

    @property
    def is_over(self) -> bool:
        return self._over.is_set()


def submit(
    thread: ProgressThread,
    start: Callable[[Communicator], Sequence[Handle]],
    *,
    deadline_s: float = 20.0,
    spans: Sequence[tuple[int, int]] = (),
    is_message: bool = False,
) -> Pending:
    pending = Pending()
    thread.submit(Operation(start, pending.end, deadline_s, spans), is_message=is_message)
    return pending


def pair(folder: Path) -> list[ProgressThread]:
    """Two ranks over loopback."""
    found: dict[int, ProgressThread] = {}

    def make(rank: int) -> Communicator:
        transport = TcpTransport(in_file(folder / "meeting", rank, 2), nics_of({"OPTCC_SOCKET_IFNAME": "=lo"}))
        return Communicator(transport, Planner(Topology.parse("2@1GB/s")))

    def begin(rank: int) -> None:
        found[rank] = ProgressThread(lambda: make(rank), f"rank {rank}")

    starters = [threading.Thread(target=begin, args=(rank,)) for rank in range(2)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join(DONE_S)
    return [found[rank] for rank in range(2)]


def all_reduce(array: Any) -> Callable[[Communicator], list[Handle]]:
    return lambda comm: [comm.start_all_reduce(array, "sum", array)]


def span(array: Any) -> tuple[int, int]:
    return array.ctypes.data, array.ctypes.data + array.nbytes


def test_operations_go_on_without_the_program(tmp_path: Path) -> None:
    threads = pair(tmp_path)
    arrays = [[np.full(count, rank + 1.0) for count in (1, 5000, 200_000)] for rank in range(2)]
    pending = [submit(threads[rank], all_reduce(each)) for rank in range(2) for each in arrays[rank]]
    assert [each.wait() for each in pending] == [None] * 6
    assert all((each == 3.0).all() for mine in arrays for each in mine)
    for thread in threads:
        thread.close()
    late = submit(threads[0], all_reduce(arrays[0][0]))
    assert isinstance(late.wait(), Cancelled)


def test_an_operation_on_memory_in_use_begins_after_that(tmp_path: Path) -> None:
    """The sum, its doubling by another sum, and the other rank's last part of the result: in this order at both."""
    threads = pair(tmp_path)
    arrays = [np.full(100_000, rank + 1.0) for rank in range(2)]
    pending = []
    for rank, array in enumerate(arrays):
        half = array[:50_000]
        pending += [submit(threads[rank], all_reduce(each), spans=[span(each)]) for each in (array, half, array)]
    assert [each.wait() for each in pending] == [None] * 6
    assert all((each[:50_000] == 12.0).all() and (each[50_000:] == 6.0).all() for each in arrays)
    for thread in threads:
        thread.close()


def test_a_message_begins_while_a_collective_waits_for_the_other_rank(tmp_path: Path) -> None:
    """Rank 1 calls its collective once it has a message that rank 0 sends after having called its own."""
    threads = pair(tmp_path)
    arrays, got = [np.full(3000, rank + 1.0) for rank in range(2)], np.zeros(1)
    first = submit(threads[0], all_reduce(arrays[0]))
    time.sleep(0.2)
    sent = submit(threads[0], lambda comm: [comm.start_send(np.array([7.0]), 1)], is_message=True)
    assert submit(threads[1], lambda comm: [comm.start_recv(got, 0)], is_message=True).wait() is None
    assert got[0] == 7.0 and not first.is_over
    second = submit(threads[1], all_reduce(arrays[1]))
    assert [first.wait(), second.wait(), sent.wait()] == [None, None, None]
    for thread in threads:
        thread.close()


def test_an_operation_that_cannot_begin_fails_alone(tmp_path: Path) -> None:
    threads = pair(tmp_path)
    wrong = submit(threads[0], lambda comm: [comm.start_send(np.zeros(1), 5)])
    assert isinstance(wrong.wait(), InputError)
    arrays = [np.full(10, rank + 1.0) for rank in range(2)]
    assert [submit(threads[rank], all_reduce(arrays[rank])).error for rank in range(2)] == [None, None]
    for thread in threads:
        thread.close()
    assert all((each == 3.0).all() for each in arrays)


@pytest.mark.parametrize("ends_by", ["deadline", "abort"])
def test_a_failure_ends_all_operations_at_both_ranks(tmp_path: Path, ends_by: str) -> None:
    threads = pair(tmp_path)
    arrays = [np.full(10, rank + 1.0) for rank in range(2)]
    for done in [submit(threads[rank], all_reduce(arrays[rank])) for rank in range(2)]:
        assert done.wait() is None
    waiting = submit(threads[0], all_reduce(arrays[0]), deadline_s=0.3 if ends_by == "deadline" else 20.0)
    message = submit(threads[1], lambda comm: [comm.start_recv(np.zeros(1), 0)], is_message=True)
    if ends_by == "abort":
        time.sleep(0.1)
        threads[0].close(abort=True)
    own, other = waiting.wait(), message.wait()
    assert isinstance(own, DeadlineExceeded if ends_by == "deadline" else Cancelled), own
    assert isinstance(other, RankLost), other
    late = submit(threads[1], all_reduce(arrays[1]))
    assert isinstance(late.wait(), RankLost)
    for thread in threads:
        thread.close()


def test_a_communicator_that_cannot_be_made_is_an_error_at_once() -> None:
    def make() -> Communicator:
        raise InputError("no such NIC")

    with pytest.raises(InputError, match="no such NIC"):
        ProgressThread(make, "rank 0")
