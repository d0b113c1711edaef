"""MPI: one process a rank, mpi4py's buffer calls only, nothing that blocks inside the library.

A channel is a (source, destination, tag), the tag counting the channels of the pair; MPI keeps the messages of such a
triple in order. Sends are synchronous (`Issend`): they complete only once the peer has posted the receive, that is, has
a slot; a plain send of a short message would complete at once, and the sender could run ahead of what the plan's
proof of race freedom counts on. Waits spin a little and then sleep, because ranks may
outnumber cores.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from optcc.errors import DeadlineExceeded, InputError, RankLost, RuntimeFault
from optcc.plan import Channel
from optcc.runtime.device_paths import DevicePath
from optcc.runtime.forks import call_in_child, take_no_part
from optcc.runtime.mpi_library import START_S, Requests, StartUp, UnderWay, is_cuda_aware, load_mpi, wait_for
from optcc.runtime.transport import (
    COLLECTIVE_TIMEOUT_S,
    RECEIVED,
    SENT,
    Bytes,
    ChannelNumbers,
    Clock,
    Event,
    MonotonicClock,
)

if TYPE_CHECKING:
    from mpi4py import MPI

MESSAGE_BYTES_MAX = 2**31 - 1
_POLLS_BUSY = 20
_POLLS_YIELD = 200
_NOTICE_BYTES = 512
_GIVES_UP, _ASKS, _ANSWERS = range(3)
"""Tags of notices: a rank gives up, and says who is at fault; asks all others whether they still answer; answers."""
_CULPRITS_MAX = 20
_SILENT_S, _ASK_LOOK_S = 1.0, 0.001
"""A rank that has not answered after this time is silent; while it is waited for, how often this rank looks."""
_SLEEP_S_MIN = 50e-6
_SLEEP_S_MAX = 200e-6


class _Queue(Requests):
    """The requests of one direction of a channel; only the oldest is asked about."""

    __slots__ = ("event",)

    def __init__(self, event: Event) -> None:
        super().__init__()
        self.event = event


class MpiTransport:
    """This process's end of a communicator (`MPI.COMM_WORLD` if none is given), of which it makes its own copy.

    Making one is collective. Raises EnvironmentMissing without mpi4py or an MPI library, DeadlineExceeded if some rank
    has not come to it after `start_s` seconds; the job can then only be aborted, as leaving MPI waits for all ranks.
    """

    def __init__(
        self, comm: MPI.Intracomm | None = None, *, clock: Clock | None = None, start_s: float = START_S
    ) -> None:
        self._mpi = load_mpi()
        self._clock: Clock = clock or MonotonicClock()
        parent: MPI.Intracomm = self._mpi.COMM_WORLD if comm is None else comm
        start = StartUp(parent, self._clock, start_s)
        # On the second, whoever gives up says so to everyone; apart, so that a receive from anyone slows no message.
        self._comm, self._notices = (_duplicate(parent, start) for _ in range(2))
        start.end()
        self._rank, self._n_ranks = self._comm.Get_rank(), self._comm.Get_size()
        self._under_way = UnderWay()
        self._notice = np.zeros(_NOTICE_BYTES, dtype=np.uint8)
        self._notice_comes = self._notices.Irecv((self._notice, self._mpi.BYTE), self._mpi.ANY_SOURCE)
        self._under_way.others.append(self._notice_comes)
        self._status = self._mpi.Status()
        # Who has answered, and who is at fault instead of this rank, if it gives up.
        self._answered: set[int] = set()
        self._silent: tuple[int, ...] = ()
        self._tag_max: int = self._comm.Get_attr(self._mpi.TAG_UB) or 32767
        self._numbers = ChannelNumbers()
        self._handles: dict[tuple[int, int, int], int] = {}
        self._peers: list[tuple[int, int]] = []
        self._sends: list[_Queue] = []
        self._recvs: list[_Queue] = []
        # The requests that are asked about, the oldest of each queue, and the queue of each.
        self._oldest: list[MPI.Request] = []
        self._owner: list[_Queue] = []
        self._events: list[Event] = []
        self._lost, self._culprits = "", tuple[int, ...]()
        self._broken = self._has_given_up = False
        self._closed = False
        self.device_path: DevicePath | None = None
        call_in_child(self, take_no_part)

    @property
    def rank(self) -> int:
        """The rank whose end this is."""
        return self._rank

    @property
    def n_ranks(self) -> int:
        """Ranks of the communicator."""
        return self._n_ranks

    @property
    def comm(self) -> MPI.Intracomm:
        """The transport's own communicator; for `Abort` when a run has failed."""
        return self._comm

    def no_device_memory(self) -> str:
        """See `optcc.runtime.device_paths.ReachesDevices`."""
        return "" if is_cuda_aware(self._mpi) else "the MPI library does not say that it takes a GPU's memory"

    def open(self, channels: Sequence[Channel], group: int = 0, carried: Sequence[int] = ()) -> list[int]:
        """See `Transport`. Raises InputError for a rank or a number of channels that MPI does not have."""
        del carried  # the library has its own way
        handles: list[int] = []
        for src, dst, k in self._numbers.take(channels, group):
            if not (0 <= src < self._n_ranks and 0 <= dst < self._n_ranks) or src == dst:
                raise InputError(f"channel {src}->{dst}: must join two ranks below {self._n_ranks}")
            if k > self._tag_max:
                raise InputError(f"channel {src}->{dst} number {k}: must be at most {self._tag_max}, MPI's largest tag")
            if self._rank not in (src, dst):
                handles.append(-1)
                continue
            handle = self._handles.get((src, dst, k))
            if handle is None:
                handle = self._handles[src, dst, k] = len(self._peers)
                self._peers.append((dst if src == self._rank else src, k))
                self._sends.append(_Queue((SENT, handle)))
                self._recvs.append(_Queue((RECEIVED, handle)))
                self._under_way.sends.append(self._sends[-1])
                self._under_way.recvs.append(self._recvs[-1])
            handles.append(handle)
        return handles

    def post_send(self, channel: int, view: Bytes) -> None:
        """See `Transport`."""
        self._check_view(view)
        peer, tag = self._peers[channel]
        self._queue(self._sends[channel], self._comm.Issend((view, self._mpi.BYTE), peer, tag))

    def post_recv(self, channel: int, view: Bytes) -> None:
        """See `Transport`."""
        self._check_view(view)
        peer, tag = self._peers[channel]
        self._queue(self._recvs[channel], self._comm.Irecv((view, self._mpi.BYTE), peer, tag))

    def _check_view(self, view: Bytes) -> None:
        if view.nbytes > MESSAGE_BYTES_MAX:
            raise InputError(f"message of {view.nbytes} B: must be below 2 GiB")
        # mpi4py would pass the address of a GPU's memory on to any library.
        if type(view) is not np.ndarray and not isinstance(view, np.ndarray) and self.no_device_memory():
            raise InputError(f"message in GPU memory: {self.no_device_memory()}: must be in the host's memory")

    def _queue(self, queue: _Queue, request: MPI.Request) -> None:
        queue.waiting.append(request)
        if len(queue.waiting) == 1:
            self._oldest.append(request)
            self._owner.append(queue)

    def poll(self, timeout_s: float) -> list[Event]:
        """See `Transport`."""
        clock = self._clock
        deadline = 0.0
        sleep_s = _SLEEP_S_MIN
        tries = 0
        while True:
            events = self._test()
            if events:
                return events
            tries += 1
            if tries == 1:
                deadline = clock.now_s() + timeout_s
            elif tries <= _POLLS_BUSY:
                continue
            self._check_lost()
            if clock.now_s() >= deadline:
                return events
            if tries <= _POLLS_YIELD:
                os.sched_yield()
            else:
                clock.sleep_s(sleep_s)
                sleep_s = min(_SLEEP_S_MAX, sleep_s * 1.25)

    def _test(self) -> list[Event]:
        """One look at the oldest request of every queue, and again at those that come next."""
        oldest, owner = self._oldest, self._owner
        events: list[Event] = []
        while oldest:
            done = self._mpi.Request.Testsome(oldest)
            if not done:
                break
            again = False
            # From the back, so that filling a hole with the last entry does not move one that is still to be seen.
            for index in sorted(done, reverse=True):
                queue = owner[index]
                events.append(queue.event)
                queue.waiting.popleft()
                if queue.waiting:
                    oldest[index] = queue.waiting[0]
                    again = True
                else:
                    last_request, last_owner = oldest.pop(), owner.pop()
                    if index < len(oldest):
                        oldest[index], owner[index] = last_request, last_owner
            if not again:
                break
        return events

    def allgather(self, payload: bytes, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> list[bytes]:
        """See `Transport`."""
        send = np.frombuffer(payload or b"\0", dtype=np.uint8)
        recv = np.empty((self._n_ranks, len(send)), dtype=np.uint8)
        request = self._comm.Iallgather((send, self._mpi.BYTE), (recv, self._mpi.BYTE))
        self._wait(request, timeout_s, "to agree")
        return [row.tobytes() if payload else b"" for row in recv]

    def barrier(self, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        """See `Transport`."""
        self._wait(self._comm.Ibarrier(), timeout_s, "at a barrier")

    def _wait(self, request: MPI.Request, timeout_s: float, purpose: str) -> None:
        self._under_way.others.append(request)
        if not wait_for(request, self._clock, self._clock.now_s() + timeout_s, self._check_lost):
            self._broken = True
            raise DeadlineExceeded(f"rank {self._rank}: waited {timeout_s:g} s in vain for other ranks {purpose}")
        self._under_way.others.pop()

    def abort(self, cause: str) -> None:
        """See `Transport`."""
        # Whoever has told this rank that it gives up has told all others too.
        if self._closed or self._has_given_up or self._lost:
            return
        self._has_given_up = True
        self._break()
        culprits = self._silent or (self._rank,)
        lost = _say_silent(self._silent) if self._silent else f"rank {self._rank} is lost: {cause}"
        text = f"{' '.join(map(str, culprits[:_CULPRITS_MAX]))}\n{lost}"
        self._notify(_GIVES_UP, text.encode()[:_NOTICE_BYTES], self._others())

    def conclude(self, error: RuntimeFault, cause: str = "") -> RuntimeFault:
        """See `optcc.runtime.transport.Concludes`. Where a deadline has passed, a rank that does not answer is named.

        The cause of any other error is told by `abort`, to all at once.
        """
        del cause
        if not isinstance(error, DeadlineExceeded) or self._closed or self._has_given_up or self._lost:
            return error
        self._notify(_ASKS, b"", self._others())
        until_s = self._clock.now_s() + _SILENT_S
        while not self._lost and self._clock.now_s() < until_s and self._answered < set(self._others()):
            self._take_notices()
            self._clock.sleep_s(_ASK_LOOK_S)
        if self._lost:
            # Another rank has met its deadline too, and has asked before.
            silent = self._culprits if _say_silent(self._culprits) == self._lost else ()
        else:
            silent = self._silent = tuple(rank for rank in self._others() if rank not in self._answered)
        return DeadlineExceeded(f"{error}; {_say_silent(silent)}", culprits=silent) if silent else error

    def _others(self) -> list[int]:
        return [rank for rank in range(self._n_ranks) if rank != self._rank]

    def _notify(self, tag: int, data: bytes, ranks: Sequence[int]) -> None:
        notice = np.frombuffer(data.ljust(_NOTICE_BYTES, b"\0"), np.uint8)
        self._under_way.others += [self._notices.Isend((notice, self._mpi.BYTE), rank, tag) for rank in ranks]

    def _break(self) -> None:
        """Nothing more is sent or received; what cannot be called off is kept for MPI."""
        self._broken = True
        self._oldest.clear()
        self._owner.clear()
        self._under_way.abandon()

    def _check_lost(self) -> None:
        """Raises RankLost once another rank has said that it gives up."""
        self._take_notices()
        if self._lost:
            raise RankLost(self._lost, culprits=self._culprits)

    def _take_notices(self) -> None:
        """Takes what others have said, and answers."""
        while not self._lost and not self._has_given_up and self._notice_comes.Test(self._status):
            tag, rank = self._status.Get_tag(), self._status.Get_source()
            if tag == _GIVES_UP:
                text = self._notice.tobytes().rstrip(b"\0").decode(errors="replace")
                culprits, _, self._lost = text.partition("\n")
                self._culprits = tuple(map(int, culprits.split()))
                self._break()
                return
            if tag == _ASKS:
                self._notify(_ANSWERS, b"", [rank])
            else:
                self._answered.add(rank)
            others = self._under_way.others
            others[:] = [each for each in others if each is not self._notice_comes]
            self._notice_comes = self._notices.Irecv((self._notice, self._mpi.BYTE), self._mpi.ANY_SOURCE)
            others.append(self._notice_comes)

    def close(self) -> None:
        """Gives the communicators back; collective. After a failed run it keeps them: the others may be gone."""
        if self._closed:
            return
        self._closed = True
        if self._mpi.Is_finalized():
            return
        if self._oldest or self._broken:
            self._break()
            return
        self._notice_comes.Cancel()
        self._notice_comes.Wait()
        self._under_way.release()
        self._notices.Free()
        self._comm.Free()


def _duplicate(comm: MPI.Intracomm, start: StartUp) -> MPI.Intracomm:
    copy, request = comm.Idup()
    start.wait(request)
    return copy


def _say_silent(ranks: Sequence[int]) -> str:
    return "; ".join(f"rank {rank} is lost: it does not answer" for rank in ranks)
