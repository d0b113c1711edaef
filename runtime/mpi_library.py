"""The MPI library: loading it, waits with a deadline, and the memory that it may still read or write.

MPI has no deadlines, and a rank that is stopped or late keeps whoever calls a blocking collective for ever. So each is
begun without waiting and asked about; what is given up stays under way, and its buffers stay alive (`UnderWay`).
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from optcc.errors import DeadlineExceeded, EnvironmentMissing
from optcc.runtime.transport import Clock

if TYPE_CHECKING:
    from mpi4py import MPI

START_S = 60.0
"""Seconds that the start of MPI may take, and that ranks may come after each other to a collective of the start-up."""
_RECALL_S = 1.0
_POLLS_YIELD = 200
_SLEEP_S = 50e-6


def load_mpi() -> Any:
    """The module `mpi4py.MPI`; importing it starts MPI. Raises EnvironmentMissing if it is not there.

    MPI starts once all ranks have begun to. That cannot be called off: after `START_S` the process ends, with a
    traceback and the exit code of DeadlineExceeded.
    """
    try:
        import mpi4py
    except ImportError as error:
        raise EnvironmentMissing(f"MPI: {error}: pip install 'optcc[mpi]'") from error
    if "mpi4py.MPI" in sys.modules:
        return sys.modules["mpi4py.MPI"]
    # Threads never share a communicator here, and matched probes are for pickled messages only.
    mpi4py.rc.thread_level = "funneled"
    mpi4py.rc.recv_mprobe = False
    # mpi4py keeps the interpreter's lock meanwhile, so neither a thread of Python nor a signal's handler would run.
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(START_S, exit=True, file=sys.__stderr__)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise EnvironmentMissing(f"MPI: {error}: pip install 'optcc[mpi]'") from error
    finally:
        faulthandler.cancel_dump_traceback_later()
    return MPI


def wait_for(request: MPI.Request, clock: Clock, deadline_s: float, look: Callable[[], None] | None = None) -> bool:
    """Whether `request` is complete by `deadline_s`; `look` is called meanwhile, and may raise."""
    tries = 0
    while not request.Test():
        tries += 1
        if tries <= _POLLS_YIELD:
            os.sched_yield()
            continue
        if look is not None:
            look()
        if clock.now_s() >= deadline_s:
            return False
        clock.sleep_s(_SLEEP_S)
    return True


class Requests:
    """The requests of one direction of a channel, oldest first."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: deque[MPI.Request] = deque()


_EVERYONE: list[UnderWay] = []
# A reference that nobody gives back: MPI ends after the interpreter, whose end must not free the list.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_EVERYONE))


class UnderWay:
    """Requests that are not known to be complete, and by them the buffers that MPI may still read or write.

    mpi4py's requests refer to their buffers, but nothing refers to a request whose transport or caller is gone, and MPI
    makes progress inside any later call, also in `MPI_Finalize`, which comes after the interpreter's end. What is noted
    here is therefore kept until it is complete, `release` is called, or the process ends.
    """

    __slots__ = ("is_abandoned", "others", "recvs", "sends")

    def __init__(self) -> None:
        self.sends: list[Requests] = []
        self.recvs: list[Requests] = []
        self.others: list[MPI.Request] = []
        self.is_abandoned = False
        forget_complete()
        _EVERYONE.append(self)

    def release(self) -> None:
        """Everything is complete."""
        if self in _EVERYONE:
            _EVERYONE.remove(self)

    def abandon(self) -> None:
        """Nobody asks any more: receives that no message has come for are called off, so that none is written later.

        A send cannot be called off.
        """
        if self.is_abandoned:
            return
        self.is_abandoned = True
        for queue in self.recvs:
            for request in queue.waiting:
                request.Cancel()
        forget_complete()

    def _is_complete(self) -> bool:
        for queue in (*self.sends, *self.recvs):
            queue.waiting = deque(request for request in queue.waiting if not request.Test())
        self.others = [request for request in self.others if not request.Test()]
        return not self.others and not any(queue.waiting for queue in (*self.sends, *self.recvs))


def forget_complete() -> None:
    """Gives up the references to what was abandoned and is complete now."""
    for each in [each for each in _EVERYONE if each.is_abandoned]:
        if each._is_complete():
            each.release()


class StartUp:
    """Collectives at the start of a job, when perhaps not all ranks of `comm` have come: each has a deadline.

    Making one is collective: all ranks tell each other that they are here. Raises DeadlineExceeded, which names those
    that have not come, after `timeout_s` seconds; `wait` does so for a rank that stops later.
    """

    def __init__(self, comm: MPI.Intracomm, clock: Clock, timeout_s: float = START_S) -> None:
        self._comm, self._clock, self._timeout_s = comm, clock, timeout_s
        self._under_way = UnderWay()
        absent = self._absent_after(timeout_s)
        if absent:
            self._fail(absent)

    def wait(self, request: MPI.Request) -> None:
        """Waits for a nonblocking collective of all ranks."""
        self._under_way.others.append(request)
        if wait_for(request, self._clock, self._clock.now_s() + self._timeout_s):
            self._under_way.others.pop()
            return
        # The others wait in vain as well, and for as long: whoever does not answer now is the reason.
        try:
            absent = self._absent_after(_RECALL_S)
        except RuntimeError:
            # MPI's own error: some have come one collective further, and take this one for that.
            absent = []
        self._fail(absent)

    def end(self) -> None:
        """All have come to everything."""
        self._under_way.abandon()

    def _absent_after(self, timeout_s: float) -> list[int]:
        """The ranks that have not called this within `timeout_s`."""
        n_ranks = self._comm.Get_size()
        own, came = np.ones(n_ranks, np.uint8), np.zeros(n_ranks, np.uint8)
        one_each = [1] * n_ranks
        # With a number for each rank, the libraries send each its byte directly: what has come before all have come
        # shows who is here. MPI does not promise that, so it serves for the message alone.
        request = self._comm.Ialltoallv([own, one_each, "B"], [came, one_each, "B"])
        self._under_way.others.append(request)
        if wait_for(request, self._clock, self._clock.now_s() + timeout_s):
            self._under_way.others.pop()
            return []
        rank = self._comm.Get_rank()
        return [each for each in range(n_ranks) if not came[each] and each != rank]

    def _fail(self, absent: list[int]) -> None:
        self._under_way.abandon()
        who = ("ranks " if len(absent) > 1 else "rank ") + ", ".join(map(str, absent)) if absent else "other ranks"
        rank = self._comm.Get_rank()
        raise DeadlineExceeded(f"rank {rank}: waited {self._timeout_s:g} s in vain for {who} to start")


def is_cuda_aware(mpi: Any) -> bool:
    """Whether the MPI library behind the module `mpi` (`mpi4py.MPI`, initialised) says that it takes pointers into a
    GPU's memory.

    MPI 4.1 says so in the communicator's info `mpi_memory_alloc_kinds`; Open MPI has a function of its own.
    """
    kinds = mpi.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or ""
    if "cuda" in {kind.strip().partition(":")[0] for kind in kinds.split(",")}:
        return True
    # The extension is loaded already; what it is linked with is found through it.
    query = getattr(ctypes.CDLL(mpi.__file__), "MPIX_Query_cuda_support", None)
    return query is not None and bool(query())
