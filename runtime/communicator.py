"""`Communicator`: collectives on arrays, for programs.

    with Communicator(transport, Planner(topology)) as comm:
        total = comm.all_reduce(gradient)                  # blocking
        handle = comm.start_all_reduce(other, "max")       # several at once, in any sizes and types
        step = comm.all_reduce_init(weights, out=weights)  # again and again on the same memory
        step.start().wait()
        largest = handle.result()

The second argument chooses the plan of a collective: an `optcc.planner.Planner`, or any function of that type. It is
asked once for each collective, size, type and reduction; the plan is kept.

All ranks call the same collectives in the same order, as in MPI. Collectives that were started and not yet waited for
overlap, unless they are of the same kind, size, type and reduction: those share a plan and run one after the other.
`optcc.runtime.engine` describes how runs fail, at all ranks together.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, cast, runtime_checkable
from weakref import WeakSet

import numpy as np

from optcc.collective import Collective, check_dtype, check_reduction_of
from optcc.errors import InputError, OptccError
from optcc.plan import PlanRequest
from optcc.runtime import arguments
from optcc.runtime.arguments import Call
from optcc.runtime.buffers import device_of
from optcc.runtime.device_messages import IncomingMessage, take_message, take_messages
from optcc.runtime.device_paths import path_of
from optcc.runtime.engine import DEADLINE_S, Engine
from optcc.runtime.handle import Handle
from optcc.runtime.observe.jobs import pages_folder
from optcc.runtime.observe.observer import Observer, job_name, observe
from optcc.runtime.observe.tracing import Tracing
from optcc.runtime.persistent_plan import PersistentPlan
from optcc.runtime.point_to_point import BLOCK_TAG, TAG_MAX, AnyReceive, Mail
from optcc.runtime.protocol.agreement import Shares
from optcc.runtime.remeasuring import Remeasuring
from optcc.runtime.replanning import GetsReady, PlanFor, Replanning, Replans
from optcc.runtime.slices import (
    ELEMENTWISE,
    GOES_ON_RANKS,
    GOES_ON_S,
    SLICE_S,
    Estimates,
    SlicedRun,
    Slicing,
    may_cut,
    slicing,
)
from optcc.runtime.state import WINDOW
from optcc.runtime.taps.attached import TapSet
from optcc.runtime.taps.control import RING_BYTES, attach_taps
from optcc.runtime.taps.policy import Tap
from optcc.runtime.teams import RankTeam
from optcc.runtime.transport import COLLECTIVE_TIMEOUT_S, Clock, Transport

PLANS_MAX = 64
"""So many plans are kept; the one that has not been used for longest gives way."""
WANTED_MAX = 16
"""For so many kinds of collectives at most, plans are made ready before an epoch begins."""


_SPLIT = struct.Struct("<qqq")


@runtime_checkable
class Divides(Protocol):
    """A planner that can plan for some of the ranks."""

    def for_ranks(self, ranks: Sequence[int]) -> PlanFor:
        """Plans for collectives among these ranks, which are counted from 0 in the order given."""
        ...


class Communicator:
    """The collectives of one rank over `transport`, which is the communicator's from now on; used by one thread.

    `window` see `optcc.runtime.state`; a collective that takes longer than `deadline_s` seconds fails. As a context
    manager it waits at the end for all ranks and closes, or after an exception gives up at all ranks.

    Arrays, of NumPy, of CuPy in a GPU's memory, or of any package with `__dlpack__`, are contiguous; their elements are
    of a type in `optcc.collective.DTYPE_BYTES`. `dtype` says what NumPy cannot: that an array of uint16 holds bfloat16.
    What is made for the caller is of the kind that came; scalars and lists are refused.
    Arrays in a GPU's memory go the way that `optcc.runtime.device_paths` has found for the transport: through
    page-locked memory of the host, unless the transport reaches the GPU's. Others go between ranks of one host the way
    that `optcc.runtime.host_memory` has found. The streams of the caller are respected: see `Handle`.
    With `remeasures` the ranks measure their NICs again when the traffic shows that rates have
    changed, before the next collective: the transport must be over NICs (`optcc.runtime.remeasuring`).
    Where plans change with the NICs, an AllReduce, Broadcast or Reduce that takes twice `slice_s` seconds or more runs
    in slices of about that (`optcc.runtime.slices`), so that plans change within it too; infinity: never.
    """

    def __init__(
        self,
        transport: Transport | RankTeam,
        plan_for: PlanFor,
        *,
        window: int = WINDOW,
        deadline_s: float = DEADLINE_S,
        clock: Clock | None = None,
        remeasures: bool = False,
        slice_s: float = SLICE_S,
    ) -> None:
        if not slice_s > 0:
            raise InputError(f"slice_s {slice_s}: must be above zero")
        self.engine = transport if isinstance(transport, RankTeam) else Engine(transport, clock=clock)
        self.rank, self.n_ranks = self.engine.rank, self.engine.n_ranks
        if isinstance(self.engine, RankTeam):
            self._mail = self.engine.mail
        else:
            self._mail = Mail(self.engine, range(self.n_ranks), self.rank, 0)
        self._window = window
        # How long collectives and messages may take that begin from now on, seconds.
        self.deadline_s = deadline_s
        # Last used, last.
        self._plans: dict[tuple[PlanRequest, int], PersistentPlan] = {}
        self._persistent: WeakSet[PersistentCollective] = WeakSet()
        self._base = self._plan_for = plan_for
        # Begins to make the plans that are wanted beside the one that all wait for.
        self._others: Callable[[], object] | None = None
        is_whole = isinstance(self.engine, Engine)
        self._replanning = Replanning(
            self._mail.engine,
            self._prepare if is_whole and isinstance(plan_for, Replans) else None,
            Remeasuring(self._mail.engine, self._least_s) if remeasures else None,
        )
        self._slice_s = slice_s if self._replanning.is_on else inf
        # To add up the rates of all NICs takes as long as much of a short collective.
        self._slicing_of = lru_cache(PLANS_MAX)(self._find_slicing)

    def observe(self, environ: Mapping[str, str] = os.environ, job: str | None = None) -> Observer | None:
        """Lets `optcc status` and `optcc explain` see this rank (`optcc.runtime.observe`); before the first collective.

        `job` names the job, the same at every rank: unless given that of the transport's, or of the launcher's process.
        None if OPTCC_STATUS=0. Raises InputError for a name or variable that cannot be. `optcc.init` calls it.
        """
        observer = observe(self.whole_engine, environ, job)
        if observer is not None:
            observer.epoch_of = self._replanning.describe
        return observer

    def tap(
        self,
        *taps: Tap,
        ring_bytes: int = RING_BYTES,
        environ: Mapping[str, str] = os.environ,
        job: str | None = None,
    ) -> TapSet:
        """Takes chunks of the collectives that begin from now on, in the place of what was taken so far (`Tap`).

        They lie in shared memory of `ring_bytes`, unless there is some already, until another process drains them
        (`optcc observe`); `job` see `observe`. Every rank may have taps of its own. Raises InputError for taps, a ring
        or a name that cannot be.
        """
        engine = self.whole_engine
        return attach_taps(engine, job or job_name(engine), pages_folder(environ), taps, ring_bytes)

    def trace(self, path: Path | str) -> Tracing:
        """`with comm.trace("run.json"): ...` writes the measured timeline of the last collective within it; collective.

        Rank 0 writes the file, which `optcc show --measured` draws. Raises InputError, at the end of the block, if no
        collective of this communicator ran within it, or none that is small enough to be recorded whole.
        """
        return Tracing(self, path)

    @property
    def last_plan(self) -> PersistentPlan | None:
        """That of the last blocking or started collective, if its plan is kept."""
        return next(reversed(self._plans.values()), None)

    def drop_plans(self) -> None:
        """Closes the plans that are kept; collective."""
        for plan in self._plans.values():
            plan.close()
        self._plans.clear()

    @property
    def whole_engine(self) -> Engine:
        """What drives this communicator, and others that were split from the same."""
        return self._mail.engine

    def Get_rank(self) -> int:  # noqa: N802 - mpi4py's name
        """This rank, as mpi4py says it."""
        return self.rank

    def Get_size(self) -> int:  # noqa: N802 - mpi4py's name
        """Number of ranks, as mpi4py says it."""
        return self.n_ranks

    def Barrier(self) -> None:  # noqa: N802 - mpi4py's name
        """`barrier`, as mpi4py says it."""
        self.barrier()

    def Split(self, color: int | None = 0, key: int = 0) -> Communicator | None:  # noqa: N802 - mpi4py's name
        """`split`, as mpi4py says it; the color of ranks that get none is None."""
        return self.split(color, key)

    def Free(self) -> None:  # noqa: N802 - mpi4py's name
        """`close`, as mpi4py says it."""
        self.close()

    # --- blocking -----------------------------------------------------------------------------------------------------

    def all_reduce(self, array: Any, op: str = "sum", out: Any = None, *, dtype: str | None = None) -> Any:
        """The reduction of every rank's `array`, in `out`: a new array unless given; `out=array` reduces in place.

        Raises InputError for arrays or reductions that cannot be, and what `Handle.wait` and `Engine.prepare` raise.
        """
        return self.start_all_reduce(array, op, out, dtype=dtype).result()

    def reduce_scatter(self, array: Any, op: str = "sum", out: Any = None, *, dtype: str | None = None) -> Any:
        """This rank's piece of the reduction of every rank's `array`, flat; raises as `all_reduce`.

        The pieces are those of `optcc.collective.split`: of n elements, rank r gets those from n r // p on.
        """
        return self.start_reduce_scatter(array, op, out, dtype=dtype).result()

    def all_gather(self, array: Any, out: Any = None, *, dtype: str | None = None) -> Any:
        """Every rank's `array`, by rank: of one dimension more than the array; raises as `all_reduce`."""
        return self.start_all_gather(array, out, dtype=dtype).result()

    def broadcast(self, array: Any, root: int = 0, *, dtype: str | None = None) -> Any:
        """`array`, which holds at every rank what it held at rank `root`; raises as `all_reduce`."""
        return self.start_broadcast(array, root, dtype=dtype).result()

    def reduce(self, array: Any, op: str = "sum", root: int = 0, out: Any = None, *, dtype: str | None = None) -> Any:
        """At rank `root` the reduction of every rank's `array`, None elsewhere; raises as `all_reduce`."""
        return self.start_reduce(array, op, root, out, dtype=dtype).result()

    def all_to_all(self, array: Any, out: Any = None, *, dtype: str | None = None) -> Any:
        """Block r of every rank's `array`, which has p equal blocks, goes to rank r, where they stand by rank.

        `out`, of the shape of `array`, is a new array unless given; `out=array` works in place, with a copy. Raises as
        `all_reduce`.
        """
        return self.start_all_to_all(array, out, dtype=dtype).result()

    def all_to_all_v(self, array: Any, counts: Sequence[int], out: Any = None, *, dtype: str | None = None) -> Any:
        """`all_to_all` of unequal blocks: the first `counts[0]` elements of `array` go to rank 0, and so on.

        The result, flat, has what the ranks had for this one, by rank. The ranks tell each other their counts first; a
        plan is made and proved for each table of counts, and kept. Raises as `all_reduce`.
        """
        return self.start_all_to_all_v(array, counts, out, dtype=dtype).result()

    def gather(self, array: Any, root: int = 0, out: Any = None, *, dtype: str | None = None) -> Any:
        """At rank `root` every rank's `array`, by rank; None elsewhere; raises as `all_reduce`."""
        return self.start_gather(array, root, out, dtype=dtype).result()

    def scatter(self, array: Any = None, root: int = 0, out: Any = None, *, dtype: str | None = None) -> Any:
        """Block r of the p equal blocks of rank `root`'s `array`, at rank r; raises as `all_reduce`.

        All ranks but the root leave `array` out, and must give `out`, an array of the length of a block.
        """
        return self.start_scatter(array, root, out, dtype=dtype).result()

    def perform(
        self, collective: Collective, array: Any, op: str = "sum", out: Any = None, *, dtype: str | None = None
    ) -> Any:
        """A collective that was declared (`Collective.declared`), by the schedule that the planner has for its name.

        `array` has the elements at which this rank has an input, in their order, None if there are none; the result,
        flat, those that it must end with. A rank without an input gives `out`. Raises as `all_reduce`.
        """
        return self.start_perform(collective, array, op, out, dtype=dtype).result()

    def send(self, array: Any, dest: int, tag: int = 0) -> None:
        """Sends `array` to rank `dest`, which must receive as many bytes with the same tag.

        Returns once that rank has begun to receive it. Only the two ranks take part, so that it need not stand in the
        order of the collectives. Raises InputError for a rank, tag or array that
        cannot be, and what `Handle.wait` raises.
        """
        self.start_send(array, dest, tag).wait()

    def recv(self, out: Any, source: int, tag: int = 0) -> Any:
        """`out`, which holds the next message with this tag from rank `source`; raises as `send`.

        Messages of one rank and tag come in the order in which they were sent. One of another length than `out` ends
        all runs with MismatchError.
        """
        return self.start_recv(out, source, tag).result()

    def barrier(self, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        """Returns once every rank has called it; see `Engine.barrier`."""
        self.engine.barrier(timeout_s)

    # --- started, not waited for --------------------------------------------------------------------------------------

    def start_all_reduce(self, array: Any, op: str = "sum", out: Any = None, *, dtype: str | None = None) -> Handle:
        """Begins `all_reduce`; its arrays are the handle's until it is done."""
        return self._begin(arguments.all_reduce(self.n_ranks, array, op, out, dtype))

    def start_reduce_scatter(self, array: Any, op: str = "sum", out: Any = None, *, dtype: str | None = None) -> Handle:
        """Begins `reduce_scatter`."""
        return self._begin(arguments.reduce_scatter(self.n_ranks, self.rank, array, op, out, dtype))

    def start_all_gather(self, array: Any, out: Any = None, *, dtype: str | None = None) -> Handle:
        """Begins `all_gather`."""
        return self._begin(arguments.all_gather(self.n_ranks, array, out, dtype))

    def start_broadcast(self, array: Any, root: int = 0, *, dtype: str | None = None) -> Handle:
        """Begins `broadcast`."""
        return self._begin(arguments.broadcast(self.n_ranks, self.rank, array, root, dtype))

    def start_reduce(
        self, array: Any, op: str = "sum", root: int = 0, out: Any = None, *, dtype: str | None = None
    ) -> Handle:
        """Begins `reduce`."""
        return self._begin(arguments.reduce(self.n_ranks, self.rank, array, op, root, out, dtype))

    def start_all_to_all(self, array: Any, out: Any = None, *, dtype: str | None = None) -> Handle:
        """Begins `all_to_all`."""
        return self._begin(arguments.all_to_all(self.n_ranks, array, out, dtype))

    def start_all_to_all_v(
        self, array: Any, counts: Sequence[int], out: Any = None, *, dtype: str | None = None
    ) -> Handle:
        """Begins `all_to_all_v`, once the ranks have told each other their counts."""
        return self._begin(arguments.all_to_all_v(self.rank, self._all_counts(counts), array, out, dtype))

    def start_gather(self, array: Any, root: int = 0, out: Any = None, *, dtype: str | None = None) -> Handle:
        """Begins `gather`."""
        return self._begin(arguments.gather(self.n_ranks, self.rank, array, root, out, dtype))

    def start_scatter(self, array: Any = None, root: int = 0, out: Any = None, *, dtype: str | None = None) -> Handle:
        """Begins `scatter`."""
        return self._begin(arguments.scatter(self.n_ranks, self.rank, array, root, out, dtype))

    def start_perform(
        self, collective: Collective, array: Any, op: str = "sum", out: Any = None, *, dtype: str | None = None
    ) -> Handle:
        """Begins `perform`."""
        return self._begin(arguments.perform(self.rank, collective, array, op, out, dtype))

    def start_send(self, array: Any, dest: int, tag: int = 0) -> Handle:
        """Begins `send`; the array must not change until it is done."""
        view = arguments.message("array", array)
        dest, tag = self._peer("dest", dest, tag)
        taken = take_message(self.whole_engine, view, arguments.stream_of(array, view))
        return self._mail.send(taken, dest, tag, self.deadline_s)

    def start_recv(self, out: Any, source: int, tag: int = 0) -> Handle:
        """Begins `recv`."""
        view = arguments.message("out", out, is_output=True)
        source, tag = self._peer("source", source, tag)
        incoming = IncomingMessage(self.whole_engine, view, arguments.stream_of(out, view))
        handle = self._mail.receive(incoming.host, source, tag, self.deadline_s)
        handle.output = out
        return incoming.follow(handle)

    def start_recv_any(self, out: Any, tag: int = 0) -> AnyReceive:
        """Begins to receive the next message with this tag from whichever rank sends one; see `recv`."""
        view = arguments.message("out", out, is_output=True)
        _, tag = self._peer("source", 0, tag)
        incoming = IncomingMessage(self.whole_engine, view, arguments.stream_of(out, view))
        anyone = self._mail.receive_any(incoming.host, tag, self.deadline_s)
        anyone.handle.output = out
        incoming.follow(anyone.handle)
        return anyone

    def start_exchange(self, blocks: Sequence[Any], out: Sequence[Any]) -> list[Handle]:
        """Begins to send `blocks[r]` to each rank r and to receive `out[r]` from it, as messages, without a plan.

        For blocks whose lengths only their two ranks know, and that change from call to call. All ranks call it in the
        same order; an empty block is no message.
        """
        sends = [arguments.message("blocks", each) for each in blocks]
        takes = [arguments.message("out", each, is_output=True) for each in out]
        if not len(sends) == len(takes) == self.n_ranks:
            raise InputError(f"{len(sends)} blocks, {len(takes)} in out: must be {self.n_ranks} of each")
        mail, tag, limit_s, engine = self._mail, BLOCK_TAG, self.deadline_s, self.whole_engine
        handles = []
        for rank, (given, view) in enumerate(zip(out, takes, strict=True)):
            if view.nbytes:
                incoming = IncomingMessage(engine, view, arguments.stream_of(given, view))
                handles.append(incoming.follow(mail.receive(incoming.host, rank, tag, limit_s)))
        taken = take_messages(engine, sends, [arguments.stream_of(*pair) for pair in zip(blocks, sends, strict=True)])
        # Each rank begins with the one behind it, so that they do not all begin with the same.
        order = [(self.rank + step) % self.n_ranks for step in range(self.n_ranks)]
        return handles + [mail.send(taken[rank], rank, tag, limit_s) for rank in order if taken[rank].nbytes]

    def _peer(self, name: str, rank: int, tag: int) -> tuple[int, int]:
        """The rank of a message's other end and its tag, as ints; raises InputError for what they cannot be."""
        rank, tag = arguments.as_int(name, rank), arguments.as_int("tag", tag)
        if not 0 <= rank < self.n_ranks:
            raise InputError(f"{name} {rank}: must be a rank below {self.n_ranks}")
        if not 0 <= tag < TAG_MAX:
            raise InputError(f"tag {tag}: must be from 0 to {TAG_MAX - 1}")
        return rank, tag

    def _all_counts(self, counts: Sequence[int]) -> list[list[int]]:
        """How many elements every rank has for every rank."""
        if not isinstance(counts, Iterable):
            raise InputError(f"counts: {type(counts).__name__}: must be {self.n_ranks} numbers, none below zero")
        own = np.array([arguments.as_int("counts", each) for each in counts], dtype=np.int64)
        if own.shape != (self.n_ranks,) or own.min() < 0:
            raise InputError(f"counts {list(counts)}: must be {self.n_ranks} numbers, none below zero")
        # An AllToAll of the same for all, which there is a schedule for on any servers.
        told = self.all_to_all(np.tile(own, self.n_ranks))
        return cast("list[list[int]]", told.reshape(self.n_ranks, -1).tolist())

    # --- made ready once, started at will -----------------------------------------------------------------------------

    def all_reduce_init(
        self, array: Any, op: str = "sum", out: Any = None, *, dtype: str | None = None
    ) -> PersistentCollective:
        """An `all_reduce` of `array` into `out` (a new array unless given) that is made ready once; collective.

        It shares nothing with any other, so that it overlaps with all. Raises as `all_reduce`.
        """
        return self._persist(arguments.all_reduce(self.n_ranks, array, op, out, dtype))

    def reduce_scatter_init(
        self, array: Any, op: str = "sum", out: Any = None, *, dtype: str | None = None
    ) -> PersistentCollective:
        """A `reduce_scatter` of `array` into `out` that is made ready once; see `all_reduce_init`."""
        return self._persist(arguments.reduce_scatter(self.n_ranks, self.rank, array, op, out, dtype))

    def all_gather_init(self, array: Any, out: Any = None, *, dtype: str | None = None) -> PersistentCollective:
        """An `all_gather` of `array` into `out` that is made ready once; see `all_reduce_init`."""
        return self._persist(arguments.all_gather(self.n_ranks, array, out, dtype))

    def broadcast_init(self, array: Any, root: int = 0, *, dtype: str | None = None) -> PersistentCollective:
        """A `broadcast` of `array` that is made ready once; see `all_reduce_init`."""
        return self._persist(arguments.broadcast(self.n_ranks, self.rank, array, root, dtype))

    def reduce_init(
        self, array: Any, op: str = "sum", root: int = 0, out: Any = None, *, dtype: str | None = None
    ) -> PersistentCollective:
        """A `reduce` of `array` into `out` at rank `root` that is made ready once; see `all_reduce_init`."""
        return self._persist(arguments.reduce(self.n_ranks, self.rank, array, op, root, out, dtype))

    def all_to_all_init(self, array: Any, out: Any = None, *, dtype: str | None = None) -> PersistentCollective:
        """An `all_to_all` of `array` into `out` that is made ready once; see `all_reduce_init`."""
        return self._persist(arguments.all_to_all(self.n_ranks, array, out, dtype))

    def all_to_all_v_init(
        self, array: Any, counts: Sequence[int], out: Any = None, *, dtype: str | None = None
    ) -> PersistentCollective:
        """An `all_to_all_v` of `array` into `out` that is made ready once; see `all_reduce_init`."""
        return self._persist(arguments.all_to_all_v(self.rank, self._all_counts(counts), array, out, dtype))

    def gather_init(
        self, array: Any, root: int = 0, out: Any = None, *, dtype: str | None = None
    ) -> PersistentCollective:
        """A `gather` of `array` into `out` at rank `root` that is made ready once; see `all_reduce_init`."""
        return self._persist(arguments.gather(self.n_ranks, self.rank, array, root, out, dtype))

    def scatter_init(
        self, array: Any = None, root: int = 0, out: Any = None, *, dtype: str | None = None
    ) -> PersistentCollective:
        """A `scatter` of rank `root`'s `array` into `out` that is made ready once; see `all_reduce_init`."""
        return self._persist(arguments.scatter(self.n_ranks, self.rank, array, root, out, dtype))

    def perform_init(
        self, collective: Collective, array: Any, op: str = "sum", out: Any = None, *, dtype: str | None = None
    ) -> PersistentCollective:
        """A `perform` of `array` into `out` that is made ready once; see `all_reduce_init`."""
        return self._persist(arguments.perform(self.rank, collective, array, op, out, dtype))

    def send_init(self, array: Any, dest: int, tag: int = 0) -> PersistentMessage:
        """A `send` of what `array` holds at each start; nobody else needs to know."""
        return PersistentMessage(lambda: self.start_send(array, dest, tag))

    def recv_init(self, out: Any, source: int, tag: int = 0) -> PersistentMessage:
        """A `recv` into `out` at each start."""
        return PersistentMessage(lambda: self.start_recv(out, source, tag))

    # --- some of the ranks --------------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A communicator of the ranks that give the same `color`, by `key` and then by their rank here; collective.

        None for ranks whose color is None. It has plans of its own, made for the topology of its ranks, and is driven
        together with this one, which must outlive it; a failure ends both. Two ranks that are in several communicators
        call the collectives of these in the same order. Its plans do not change with the NICs: split again.

        Raises InputError for a color or key that cannot be, or a planner that cannot plan for some of the ranks.
        """
        color = None if color is None else arguments.as_int("color", color)
        key = arguments.as_int("key", key)
        if color is not None and not 0 <= color < TAG_MAX:
            raise InputError(f"color {color}: must be from 0 to {TAG_MAX - 1}, or None")
        if not -TAG_MAX < key < TAG_MAX:
            raise InputError(f"key {key}: must be between {-TAG_MAX} and {TAG_MAX}")
        if not isinstance(self._plan_for, Divides):
            raise InputError(f"split: {type(self._plan_for).__name__}: must have for_ranks, as optcc.Planner")
        engine = self._mail.engine
        mine = _SPLIT.pack(-1 if color is None else color, key, engine.n_teams)
        told = [_SPLIT.unpack(each) for each in self.engine.allgather(mine, self.deadline_s)]
        # A number that no rank has seen yet: teams of one number have no rank in common.
        number = max(n_teams for *_, n_teams in told)
        engine.n_teams = number + 1
        if color is None:
            return None
        members = [rank for _, rank in sorted((k, rank) for rank, (c, k, _) in enumerate(told) if c == color)]
        team = RankTeam(engine, [self._mail.ranks[rank] for rank in members], members.index(self.rank), number)
        return Communicator(
            team,
            self._plan_for.for_ranks(members),
            window=self._window,
            deadline_s=self.deadline_s,
        )

    # --- the end ------------------------------------------------------------------------------------------------------

    def abort(self, cause: str) -> None:
        """Gives up every collective that is under way, at all ranks; see `Engine.abort`."""
        self.engine.abort(cause)

    def close(self) -> None:
        """Gives the transport back; see `Engine.close`. A communicator of some of the ranks leaves it to the whole."""
        self.engine.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self.abort(f"{type(error).__name__}: {error}")
            elif self.engine.failure is None:
                self.barrier(self.deadline_s)
        finally:
            self.close()

    # --- plans --------------------------------------------------------------------------------------------------------

    def _begin(self, call: Call) -> Handle:
        """Begins a collective."""
        self.finish_beginning()
        slices = self.slices(call)
        if len(slices) == 1:
            return self._begin_one(call, self.deadline_s)
        return SlicedRun(
            *(self.whole_engine, lambda number, limit_s: self._begin_one(slices[number], limit_s), len(slices)),
            *(self.deadline_s, call.result),
        )

    def _begin_one(self, call: Call, deadline_s: float) -> Handle:
        """Begins a collective, or a slice of one, under the plan that is kept for it, or a new one."""
        self.change_epoch(call.request)
        key = call.request, device_of(call.example)
        plan = self._plans.pop(key, None)
        if plan is None:
            if len(self._plans) >= PLANS_MAX:
                self._plans.pop(next(iter(self._plans))).close()
            plan = self.make(call.request, call.example)
        self._plans[key] = plan
        stream = None if plan.on_device is None else arguments.stream_of(call.given, call.example)
        handle = plan.start(call.send, call.recv, deadline_s=deadline_s, stream=stream)
        handle.output = call.result
        self.has_begun()
        return handle

    def finish_beginning(self) -> None:
        """Begins the slices of a collective that are left, as another one is about to begin."""
        in_slices = self.whole_engine.in_slices
        if in_slices is not None:
            in_slices.begin_rest()

    def slices(self, call: Call) -> list[Call]:
        """The slices in which a collective runs, or the collective itself."""
        found = None if self._slice_s == inf else self._slicing_of(call.request)
        return [call] if found is None or not may_cut(call) else found.cut(call)

    def _find_slicing(self, request: PlanRequest) -> Slicing | None:
        if not isinstance(self._base, Estimates) or request.collective.name not in ELEMENTWISE:
            return None
        return slicing(request, check_dtype(request.dtype), self._base.least_s(request), self._slice_s)

    def _persist(self, call: Call) -> PersistentCollective:
        made = PersistentCollective(self, call)
        self._persistent.add(made)
        return made

    @property
    def epoch(self) -> int:
        """Number of the epoch (`optcc.runtime.protocol.agreement`) under which the last collective has begun."""
        return self._replanning.epoch

    @property
    def plans_since(self) -> int:
        """Number of the epoch for which its plans were made."""
        return self._replanning.plans_since

    def change_epoch(self, request: PlanRequest) -> None:
        """A collective begins: from one on that all ranks have agreed on, plans are new ones."""
        if self._replanning.begin(self.deadline_s, request, lambda: self._may_go_on(request)):
            assert isinstance(self._base, Replans)
            # Where there is no plan for what is left, that of before goes on.
            with suppress(OptccError):
                self._plan_for = self._base.under(self._replanning.shares)
            self.drop_plans()

    def _may_go_on(self, request: PlanRequest) -> bool:
        """Whether to wait for new plans would cost more than this collective and the next ones under the old ones."""
        if self.n_ranks < GOES_ON_RANKS or request.collective.name not in ELEMENTWISE:
            return False
        return isinstance(self._base, Estimates) and self._base.least_s(request) < GOES_ON_S

    def _least_s(self, shares: Shares, request: PlanRequest) -> float:
        """A lower bound on how long a collective takes where NICs carry these shares, seconds; 0.0 if none is known."""
        base = self._base
        if request.collective.name in ELEMENTWISE and isinstance(base, Estimates):
            with suppress(OptccError):
                return base.least_s(request, shares)
        return 0.0

    def _prepare(self, shares: Shares, first: PlanRequest | None) -> Callable[[], bool]:
        """Begins to make the plans that are in use, for NICs that carry these shares; returns what tells whether they
        are there, or the one that is wanted `first`, if any: then the others are made once that runs."""
        base = self._base
        assert isinstance(base, Replans)
        if first is None:
            return base.prepare(shares, self._wanted())
        others = [each for each in self._wanted() if each != first]
        is_there = base.prepare(shares, [first])

        def is_first_there() -> bool:
            if not is_there():
                return False
            self._others = partial(base.prepare, shares, others) if others else None
            return True

        return is_first_there

    def has_begun(self) -> None:
        """A collective has begun under the plans of its epoch."""
        others, self._others = self._others, None
        if others is not None:
            others()

    def _wanted(self) -> list[PlanRequest]:
        """What plans are in use for, those of persistent collectives first, then as they were used last."""
        kept = [request for request, _ in reversed(self._plans)]
        return list(dict.fromkeys([request for each in self._persistent for request in each.requests] + kept))[
            :WANTED_MAX
        ]

    def make(self, request: PlanRequest, array: Any) -> PersistentPlan:
        """A new plan of this epoch for arrays like this one; collective."""
        check_reduction_of(request.reduction, request.dtype)
        plan, verdict = self._plan_for(*request)
        if plan.request != request:
            raise InputError(f"plan {plan.name}: {plan.request}: must be {request}")
        if self._replanning.is_on and isinstance(self._base, GetsReady):
            self._base.get_ready(request)
        number = device_of(array)
        device = None if number < 0 else path_of(self.whole_engine.transport).place(number)
        return self.engine.prepare(plan, verdict, window=self._window, deadline_s=self.deadline_s, device=device)


class PersistentCollective:
    """A collective on the same arrays again and again, made ready; see `Communicator.all_reduce_init`."""

    __slots__ = ("__weakref__", "_arrays", "_call", "_comm", "_plans", "_plans_since", "_slices")

    def __init__(self, comm: Communicator, call: Call) -> None:
        self._comm, self._call = comm, call
        comm.finish_beginning()
        self._slices = comm.slices(call)
        self._prepare()

    @property
    def requests(self) -> list[PlanRequest]:
        """What its plans are for."""
        return list(dict.fromkeys(each.request for each in self._slices))

    def _prepare(self) -> None:
        comm = self._comm
        self._plans_since = comm.plans_since
        self._plans = {request: comm.make(request, self._call.example) for request in self.requests}
        self._arrays = [self._plans[each.request].arrange(each.send, each.recv) for each in self._slices]

    def start(self) -> Handle:
        """Begins with what the array holds now; if a former start is not done, when it is. All ranks start what they
        have in the same order."""
        comm = self._comm
        comm.finish_beginning()
        if len(self._slices) > 1:
            n_slices, limit_s = len(self._slices), comm.deadline_s
            return SlicedRun(comm.whole_engine, self._start_one, n_slices, limit_s, self._call.result)
        handle = self._start_one(0, comm.deadline_s)
        handle.output = self._call.result
        return handle

    def _start_one(self, number: int, deadline_s: float) -> Handle:
        self._comm.change_epoch(self._slices[number].request)
        if self._plans_since != self._comm.plans_since:
            self.close()
            self._prepare()
        plan, call = self._plans[self._slices[number].request], self._call
        stream = None if plan.on_device is None else arguments.stream_of(call.given, call.example)
        handle = plan.start_with(self._arrays[number], deadline_s=deadline_s, stream=stream)
        self._comm.has_begun()
        return handle

    def close(self) -> None:
        """Waits for what was started and gives the channels back; collective."""
        for plan in self._plans.values():
            plan.close()


class PersistentMessage:
    """A message between the same two arrays again and again; see `Communicator.send_init`."""

    __slots__ = ("_start",)

    def __init__(self, start: Callable[[], Handle]) -> None:
        self._start = start

    def start(self) -> Handle:
        """Begins with what the array holds now."""
        return self._start()

    def close(self) -> None:
        """Nothing is to be given back."""
