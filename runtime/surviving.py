"""`SurvivingCommunicator`: AllReduces that go on without hosts that are cut off; the policy `without`.

    with optcc.init(partition="without") as comm:
        total = comm.all_reduce(gradient)      # that of the ranks which are not in comm.missing
        if comm.missing:
            comm.merge(total)                  # waits for their hosts, and adds what they have, once

Who goes on, when a result is that of all, and how contributions are merged is `optcc.runtime.protocol.regrouping`. A
group runs its collectives with a communicator of its own, on plans that are made and proved for its members, over
connections of its own, so that nothing of a run that was given up reaches the next one. One collective at a time, each
waited for: that all members hold its result is found out by a barrier after it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from optcc.errors import AllRailsFailed, InputError, RankLost, RuntimeFault
from optcc.runtime import arguments
from optcc.runtime.buffers import device_of
from optcc.runtime.communicator import Communicator, Divides
from optcc.runtime.engine import DEADLINE_S, Engine
from optcc.runtime.kernels import Array, NumpyKernels
from optcc.runtime.partition import PARTITION_S
from optcc.runtime.protocol.regrouping import (
    REQUEST_BYTES,
    GroupProgress,
    Merging,
    Offer,
    Standing,
    SurvivorGroup,
    find_merging,
)
from optcc.runtime.replanning import PlanFor
from optcc.runtime.slices import SLICE_S
from optcc.runtime.state import WINDOW
from optcc.runtime.teams import RankTeam
from optcc.runtime.transport import Bytes, Clock, MonotonicClock, Regroups

_TEAM = 1
"""The number of a group's team, the only one on its connections."""

logger = logging.getLogger("optcc.nics")


@dataclass(frozen=True, slots=True)
class _Result:
    """What a collective was, so many bytes of a type by a reduction, and its result, flat; nothing of a barrier."""

    data: Array
    dtype: str = ""
    op: str = ""

    @property
    def request(self) -> bytes:
        """What it was, as ranks compare it."""
        return f"{self.data.nbytes} {self.dtype} {self.op}".encode().ljust(REQUEST_BYTES, b"\0")


@dataclass(slots=True)
class _Operation:
    """A collective at this rank: its input, None for a barrier; and its result, in memory of its own. A merge has the
    result of the collective before it until contributions are added."""

    send: Array | None
    result: _Result
    is_merge: bool = False

    def run(self, comm: Communicator) -> None:
        """Runs it in a group. Without the lobby there is nobody to merge."""
        if self.send is not None:
            comm.all_reduce(self.send, self.result.op, self.result.data, dtype=self.result.dtype)


class SurvivingCommunicator:
    """The AllReduces of one rank over `transport`, which is this communicator's from now on; used by one thread.

    If hosts are cut off, the ranks on the others go on without them, as long as they are on more than half of the hosts
    of the job: an AllReduce that is under way is run again from the inputs, which are as they were, unless all of them
    have its result. `missing` are the ranks whose contributions the last result lacks, the same at all ranks that go
    on; `members` those that still take part. All raise AllRailsFailed if no side has more than half of the hosts; any
    other failure ends the job too. A rank that is cut off waits in its collective for `merge` of the others, which
    waits for it: either for `partition_s` seconds at most, and then that rank raises AllRailsFailed.

    `plan_for` must be able to plan for some of the ranks, as `optcc.planner.Planner`; the other arguments are those of
    `Communicator`. Plans change with the NICs until a host is cut off, and no more then.

    Raises InputError for a transport that was not made to regroup, for another planner, and for seconds that
    are not above 0.
    """

    def __init__(
        self,
        transport: Regroups,
        plan_for: PlanFor,
        *,
        window: int = WINDOW,
        deadline_s: float = DEADLINE_S,
        clock: Clock | None = None,
        remeasures: bool = False,
        slice_s: float = SLICE_S,
        partition_s: float = PARTITION_S,
    ) -> None:
        if not (isinstance(transport, Regroups) and transport.regroups):
            raise InputError(f"{type(transport).__name__}: must be one of NICs that was made with regroups")
        divides: object = plan_for
        if not isinstance(divides, Divides):
            raise InputError(f"{type(plan_for).__name__}: must have for_ranks, as optcc.Planner")
        if not partition_s > 0:
            raise InputError(f"partition_s {partition_s}: must be above 0")
        self.rank, self.n_ranks, self.deadline_s = transport.rank, transport.n_ranks, deadline_s
        # The ranks whose contributions the last result lacks.
        self.missing: tuple[int, ...] = ()
        self._transport, self._divides, self._window = transport, divides, window
        self._clock = clock or MonotonicClock()
        self._progress = GroupProgress(SurvivorGroup(transport.job, tuple(range(self.n_ranks))))
        self._comm: Communicator | None = Communicator(
            transport,
            plan_for,
            window=window,
            deadline_s=deadline_s,
            clock=self._clock,
            remeasures=remeasures,
            slice_s=slice_s,
        )
        self._failure: RuntimeFault | None = None
        self._partition_s = partition_s
        # The last result, and the one before.
        self._last = _Result(np.empty(0, np.uint8))
        self._previous = self._last
        # While this rank is in one: the lobby, and who was not a member before; whether all have merged there.
        self._lobby: SurvivorGroup | None = None
        self._absent: frozenset[int] = frozenset()
        self._is_merged = False

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part in the next collective, as far as this one knows."""
        return self._progress.group.members

    def Get_rank(self) -> int:  # noqa: N802 - mpi4py's name
        """This rank, as mpi4py says it."""
        return self.rank

    def Get_size(self) -> int:  # noqa: N802 - mpi4py's name
        """Number of ranks of the job, as mpi4py says it."""
        return self.n_ranks

    def all_reduce(self, array: Any, op: str = "sum", out: Any = None, *, dtype: str | None = None) -> Any:
        """The reduction of every member's `array`, in `out`: a new array unless given; `out=array` reduces in place.

        An average is that of the ranks that are not `missing`. Raises InputError for arrays or reductions that cannot
        be, and arrays on a GPU; AllRailsFailed at a rank that cannot go on; and as `Communicator.all_reduce`.
        """
        call = arguments.all_reduce(self.n_ranks, array, op, out, dtype)
        _check(call.send, call.recv)
        result = _Result(np.empty(call.send.size, call.send.dtype), call.request.dtype, op)
        self._perform(_Operation(call.send.reshape(-1), result))
        self._copy_last(call.recv)
        return call.result

    def merge(self, out: Any = None) -> Any:
        """Waits for the hosts of the `missing` ranks, and adds what these have to the last result; collective.

        `out`, unless it is left out, holds the complete result then, at all ranks the same, and nobody is `missing`;
        what comes back at the others from their AllReduce is the same too. If a host does not come within
        `partition_s`, nothing is added, it stays missing, and it cannot be merged later.

        Must follow the first collective that lacks contributions, before the next one begins, which the others could
        not make up for. Raises InputError if it does not, for an average, which has been divided, and for an array that
        does not fit; else as `all_reduce`.
        """
        progress, last = self._progress, self._last
        if not progress.may_merge or not self.missing:
            raise InputError("merge: must follow the first collective that lacks contributions, before the next one")
        if last.op == "avg":
            raise InputError("merge: an average has been divided: must be another reduction, such as sum")
        view = None if out is None else arguments.as_array("out", out)
        if view is not None:
            _check(last.data, view)
        self._absent = frozenset(range(self.n_ranks)) - frozenset(self.members)
        self._check_alive()
        self._enter_lobby()
        self._perform(_Operation(None, last, is_merge=True))
        if view is not None:
            self._copy_last(view)
        return out

    def barrier(self) -> None:
        """Returns once every member has called it; raises as `all_reduce`."""
        self._perform(_Operation(None, _Result(np.empty(0, np.uint8))))

    def abort(self, cause: str) -> None:
        """Gives up what is under way, at all members, and closes."""
        if self._failure is None and self._comm is not None:
            self._comm.abort(cause)
        self.close()

    def close(self) -> None:
        """Gives the transport back. Members should meet at a `barrier` before."""
        if self._failure is None:
            self._failure = RuntimeFault(f"rank {self.rank}: the communicator is closed")
            if self._comm is not None:
                self._comm.close()
        self._transport.release()

    def __enter__(self) -> SurvivingCommunicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self.abort(f"{type(error).__name__}: {error}")
            elif self._failure is None:
                self.barrier()
        finally:
            self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """What a `Communicator` has besides is refused by name."""
            if not name.startswith("_") and hasattr(Communicator, name):
                raise InputError(f"{name}: must be all_reduce, merge or barrier with partition='without'")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- groups -------------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RuntimeFault(f"rank {self.rank}: a former run failed, nothing can run any more: {self._failure}")

    def _copy_last(self, out: Any) -> None:
        """Copies the last result to where it was asked for."""
        out[...] = self._last.data.reshape(out.shape)

    def _perform(self, operation: _Operation) -> None:
        """Runs a collective in one group after another until it is delivered."""
        self._check_alive()
        progress = self._progress
        try:
            while not self._try(operation):
                pass
            self.missing = tuple(sorted(set(range(self.n_ranks)) - set(progress.deliver().members)))
            if not operation.is_merge:
                self._previous = self._last
            self._last = operation.result
            if self._is_merged:
                self._become_whole()
        except RuntimeFault as error:
            self._failure = error
            self._transport.release()
            raise

    def _try(self, operation: _Operation) -> bool:
        """Runs a collective in the present group, or joins that; True if what is held is to be delivered."""
        progress = self._progress
        try:
            if self._comm is None and self._join():
                return True
            if operation.is_merge and self._lobby is None:
                # What was merged in the lobby, not all hold.
                operation.result = self._last
            comm = self._comm
            assert comm is not None
            if self._lobby is not None:
                return self._meet(comm, operation)
            if progress.held is None:
                operation.run(comm)
                progress.hold()
            comm.barrier(self.deadline_s)
        except AllRailsFailed as error:
            return self._leave(error, operation)
        except RankLost as error:
            # One that was waited for in vain has given up, or its process has ended.
            if self._lobby is None or not operation.is_merge or not self._absent.issuperset(error.culprits):
                raise
            return self._leave(error, operation)
        return True

    def _move(self, group: SurvivorGroup, partition_s: float = 0.0) -> None:
        """Leaves the present group for another one, which is joined when the next collective begins."""
        self._comm, self._progress.group = None, group
        self._transport.regroup(group.members, group.job, partition_s)

    def _join(self) -> bool:
        """Meets the other members of a new group; whether what is held is to be delivered."""
        progress, members = self._progress, self.members
        engine = Engine(self._transport, clock=self._clock)
        team = RankTeam(engine, members, members.index(self.rank), _TEAM)
        is_done = False
        if self._lobby is None:
            told = team.allgather(progress.standing.pack(), self.deadline_s)
            is_done = progress.settle([Standing.unpack(each) for each in told])
        plan_for = self._divides.for_ranks(members)
        self._comm = Communicator(team, plan_for, window=self._window, deadline_s=self.deadline_s)
        return is_done

    def _leave(self, error: RuntimeFault, operation: _Operation) -> bool:
        """Members are cut off; moves to the group of the others, or waits for them. Raises the error if neither can be.

        True if what is held is to be delivered all the same.
        """
        progress, transport, lost = self._progress, self._transport, set(error.culprits)
        if progress.held is not None and not transport.departed.isdisjoint(self.members):
            # A member has closed, or has gone on: it has delivered this collective, and is not to be met again.
            self._failure = error
            return True
        if self.rank in lost and progress.lacking is None and self._lobby is None:
            # What the others make of it, they say in the lobby.
            progress.held = None
            self._enter_lobby()
            return False
        if self._lobby is not None and not operation.is_merge:
            raise error
        gone = lost | self._absent if self._lobby is not None and lost else lost
        group = progress.group.without(gone, transport.hosts)
        if group is None or self.rank not in group.members:
            raise error
        if self.rank == group.members[0]:
            ranks = ", ".join(f"rank {rank}" for rank in range(self.n_ranks) if rank not in group.members)
            logger.warning("optcc: no rail to %s is left: the job goes on without", ranks)
        self._lobby = None
        self._move(group)
        return False

    # --- the lobby ----------------------------------------------------------------------------------------------------

    def _enter_lobby(self) -> None:
        """Goes where ranks meet again after some were cut off."""
        self._lobby = self._progress.whole.lobby(self.n_ranks)
        self._move(self._lobby, self._partition_s)

    def _meet(self, comm: Communicator, operation: _Operation) -> bool:
        """Merges with all ranks; True if what is held then is to be delivered."""
        progress, result = self._progress, operation.result
        mine = Offer(progress.next, operation.is_merge, result.request, self._previous.request)
        told = comm.engine.allgather(mine.pack(), self.deadline_s)
        offers = [Offer.unpack(each) for each in told]
        merging = find_merging(offers)
        source = offers[merging.source]
        if merging.behind:
            given = self._give(comm, merging.source, self._previous.data, source.previous)
            if self.rank in merging.behind:
                operation.result = replace(result, data=given.view(result.data.dtype))
                progress.hold()
            return self.rank in merging.behind
        total, is_added = self._add_up(comm, merging, operation.send, source.request), self.rank in merging.adds
        if operation.is_merge or is_added:
            operation.result = replace(result, data=total.view(result.data.dtype))
        progress.hold()
        comm.barrier(self.deadline_s)
        if not operation.is_merge and not is_added:
            # It had the result of the last collective: what it asks for is run by all.
            progress.deliver()
            self._become_whole()
            return False
        self._is_merged = True
        # A rank that has returned delivers its own collective together with the merge.
        progress.next += is_added
        return True

    def _add_up(self, comm: Communicator, merging: Merging, own: Array | None, request: bytes) -> Bytes:
        """The last result with what the returned ranks have, added in their order: the same bits at all ranks."""
        total = self._give(comm, merging.source, self._last.data, request)
        for rank in merging.adds:
            added = self._give(comm, rank, self._last.data if own is None else own, request)
            if added.nbytes:
                _, dtype, op = request.rstrip(b"\0").decode().split(" ")
                kernels = NumpyKernels(dtype, op)
                kernels.reduce(kernels.view(total), kernels.view(added))
        return total

    def _give(self, comm: Communicator, source: int, data: Array, request: bytes) -> Bytes:
        """A copy of the bytes that rank `source` has for `request`, at all ranks."""
        size_bytes = int(request.split(b" ")[0])
        given = data.view(np.uint8).copy() if self.rank == source else np.empty(size_bytes, np.uint8)
        return comm.broadcast(given, source) if size_bytes else given

    def _become_whole(self) -> None:
        """All ranks have merged, and go on as one group."""
        progress = self._progress
        self._is_merged, self._lobby, self._absent = False, None, frozenset()
        progress.become_whole()
        self._move(progress.group)


def _check(send: Any, recv: Any) -> None:
    """Raises InputError unless a result of these bytes can be kept, and fits."""
    if device_of(send) >= 0 or device_of(recv) >= 0:
        raise InputError("array: must be in the host's memory with partition='without'")
    if (recv.nbytes, recv.dtype) != (send.nbytes, send.dtype):
        raise InputError(f"out of {recv.nbytes} B of {recv.dtype}: must be {send.nbytes} B of {send.dtype}")
    if not (recv.flags.c_contiguous and recv.flags.writeable):
        raise InputError("out: must be contiguous and writeable")
