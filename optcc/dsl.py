"""The schedule language: a function over an explicit program writes down who sends which chunk to whom.

    @schedule
    def pair(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            with program.stage("reduce"):
                segment[0].reduce(src=1, dst=0)
            with program.stage("broadcast"):
                segment[0].copy(src=0, dst=1)

`pair(n_ranks=2, segments=4)` is a `Schedule` of eight transfers. The order in which transfers are written is their
meaning; what may run at once follows from the bytes they touch, so the author writes neither dependencies nor time.
A mistake is refused at the line that makes it.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from numbers import Integral, Rational
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np

from optcc.arrays import Column
from optcc.collective import Collective
from optcc.domain import ANY_NUMBER, Domain
from optcc.errors import InputError, OptccError, ScheduleError, TopologyError
from optcc.schedule import COPY, DATA, OPS, REDUCE, Schedule, SegmentShape
from optcc.topology import Topology
from optcc.trees import Edge, Tree, TreeEdges

TRANSFERS_MAX = 50_000_000
SEGMENTS_MAX = 1_000_000
_COLUMNS = ("src", "dst", "op", "segment", "section", "src_slot", "dst_slot", "stage", "line")


Moves = tuple[Column, ...]
"""Transfers written one after the other: `src, dst, op, segment, section, src_slot, dst_slot, stage, line`, each with
an entry for every transfer or, but for `src`, with one that is all of theirs."""
Sink = Callable[[Moves, Sequence[SegmentShape], int], None]
"""Takes transfers as they are written, to be looked at before it returns, and the segments and scratch slots asked for
so far."""
_SINK_ROWS = 2**16


@dataclass(frozen=True, slots=True)
class Chunk:
    """A section of a segment: in the message itself, or in a scratch slot of the same size."""

    program: Program
    segment: int
    section: int
    slot: int

    def reduce(self, src: int, dst: int, *, into: Chunk | None = None) -> None:
        """Adds rank `src`'s chunk to rank `dst`'s (to `into` there, if given), by the collective's reduction.

        Raises ScheduleError if a rank is unknown, nothing would move, or what is read was never written.
        """
        self.program._add(REDUCE, src, dst, self, into or self)

    def copy(self, src: int, dst: int, *, into: Chunk | None = None) -> None:
        """Replaces rank `dst`'s chunk (or `into` there, if given) by rank `src`'s; raises like `reduce`."""
        self.program._add(COPY, src, dst, self, into or self)

    def reduce_along(self, tree: Tree) -> None:
        """Every rank but the root adds its chunk to its parent's, the deepest first: p - 1 transfers to the root.

        Raises ScheduleError if the tree has another number of ranks, or the chunk is scratch space.
        """
        self.program._add_tree(REDUCE, self, tree, tree.order[:0:-1], tree.parent[:0:-1])

    def broadcast_along(self, tree: Tree) -> None:
        """Every rank but the root gets its parent's chunk, the root's children first; raises like `reduce_along`."""
        self.program._add_tree(COPY, self, tree, tree.parent[1:], tree.order[1:])

    def __str__(self) -> str:
        return f"s{self.segment} c{self.section}" + (f" scratch {self.slot}" if self.slot != DATA else "")


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment of the pipeline: `segment[c]` is its section c."""

    program: Program
    index: int
    sections: int
    scratch_slots: int
    _chunks: dict[int, Chunk] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By section, the chunks of the message that were asked for."""

    def __getitem__(self, section: int) -> Chunk:
        if type(section) is not int:
            return self._chunk(section, DATA)
        known = self._chunks.get(section)
        if known is None:
            known = self._chunks[section] = self._chunk(section, DATA)
        return known

    def scratch(self, section: int, slot: int = 0) -> Chunk:
        """A private chunk of every rank, as large as section `section`; it holds nothing until it is written."""
        if not 0 <= slot < self.scratch_slots:
            given = self.scratch_slots
            raise self.program._error(f"scratch {slot}: must be below {given}, the pipeline's scratch")
        return self._chunk(section, slot)

    def reduce(self, section: Column, src: Column, dst: Column) -> None:
        """A whole step at once, for arrays of one length: rank `src[i]` adds its section `section[i]` to `dst[i]`'s.

        Raises ScheduleError like `Chunk.reduce`, for the first that cannot be.
        """
        self.program._add_step(REDUCE, self, section, src, dst)

    def copy(self, section: Column, src: Column, dst: Column) -> None:
        """A whole step at once: `dst[i]` gets section `section[i]` of `src[i]`; raises like `reduce`."""
        self.program._add_step(COPY, self, section, src, dst)

    def _chunk(self, section: int, slot: int) -> Chunk:
        if not isinstance(section, int) or not 0 <= section < self.sections:
            raise self.program._error(f"s{self.index} c{section}: section must be from 0 to {self.sections - 1}")
        return Chunk(self.program, self.index, section, slot)


class RankGroup(NamedTuple):
    """Some ranks, and the others: `order` has every rank once, the first `members` of them are the group's."""

    order: tuple[int, ...]
    members: int


@dataclass(eq=False)
class Program:
    """What a schedule function writes into: the ranks it may name, and the transfers it has written so far."""

    name: str
    collective: Collective
    segments: int = 1
    source: str = ""
    lane_per_peer: bool = False
    keeps_order: bool = False
    _shapes: list[SegmentShape] = field(default_factory=list)
    _stages: list[str] = field(default_factory=list)
    _stage: int = -1
    _scratch_slots: int = 0
    _finished: bool = False
    _written: set[tuple[int, int, int, int]] = field(default_factory=set)
    _rows: list[tuple[int, ...]] = field(default_factory=list)
    _moves: list[Moves] = field(default_factory=list)
    _sink: Sink | None = None
    _n_transfers: int = 0
    _groups: list[RankGroup] = field(default_factory=list)
    _orders: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def n_ranks(self) -> int:
        """Ranks that take part."""
        return self.collective.n_ranks

    @property
    def ranks(self) -> range:
        """Every rank."""
        return range(self.n_ranks)

    @property
    def groups_made(self) -> tuple[RankGroup, ...]:
        """The groups that have a pipeline, in order."""
        return tuple(self._groups)

    def pipeline(
        self, segments: int | None = None, *, sections: int, share: Fraction | int = 1, scratch: int = 0
    ) -> Iterator[Segment]:
        """The segments of a pipeline over `share` of the message, one after the other.

        `segments` defaults to what the user asked for; each is cut into `sections` and has `scratch` scratch slots.
        Stages of different segments overlap as far as the data allows. Several pipelines share the message in the
        order in which they are asked for; their shares must add up to one, and they may be walked side by side (zip).

        Raises ScheduleError for a number of segments, sections or a share that cannot be.
        """
        count = self.segments if segments is None else segments
        for label, value in (("segments", count), ("sections", sections), ("scratch", scratch)):
            if not isinstance(value, Integral):
                raise self._error(f"pipeline({label}={value!r}): must be a whole number")
        if not isinstance(share, Rational):
            raise self._error(f"pipeline(share={share!r}): must be a fraction, so that the shares add up exactly")
        if not 1 <= count <= SEGMENTS_MAX:
            raise self._error(f"pipeline({count}): must have from 1 to {SEGMENTS_MAX} segments")
        if sections < 1:
            raise self._error(f"pipeline(sections={sections}): must have at least one section")
        if not 0 <= Fraction(share) <= 1 or scratch < 0:
            what = f"pipeline(share={share}, scratch={scratch})"
            raise self._error(f"{what}: share must be in 0..1, scratch not negative")
        self._scratch_slots = max(self._scratch_slots, scratch)
        first = len(self._shapes)
        self._shapes += [SegmentShape(Fraction(share) / count, sections)] * (count if share else 0)
        return (Segment(self, index, sections, scratch) for index in range(first, len(self._shapes)))

    def cells(self, segments: int | None = None) -> Iterator[tuple[Chunk | None, ...]]:
        """For each segment of a pipeline over the whole message, the chunk of every cell of the collective, in order.

        The cells are those of a declared collective, the blocks of an AllToAll (rank s's for rank d is number s p + d),
        or the parts of a Gather or Scatter, by rank. None stands for a cell without a share.
        """
        pipelines = [
            self.pipeline(segments, sections=1, share=share) if share else None for share in self.collective.shares
        ]
        for _ in range(self.segments if segments is None else segments):
            yield tuple(next(pipeline)[0] if pipeline is not None else None for pipeline in pipelines)

    def groups(self, given: Iterable[tuple[Sequence[int], Fraction]]) -> Iterator[tuple[Segment, RankGroup]]:
        """Pipelines side by side, one for each group of ranks with a share: segment by segment that of each group, and
        the group. A segment has a section for each member.

        Raises ScheduleError unless a group names at least one rank, and none twice.
        """
        shares = [(tuple(ranks), share) for ranks, share in given if share]
        for ranks, _ in shares:
            if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(self.ranks):
                raise self._error(f"group {ranks}: must name ranks from 0 to {self.n_ranks - 1}, none twice")
            others = tuple(rank for rank in self.ranks if rank not in set(ranks))
            self._groups.append(RankGroup((*ranks, *others), len(ranks)))
        found = self._groups[-len(shares) :]
        pipelines = [self.pipeline(sections=len(ranks), share=share) for ranks, share in shares]
        for segments in zip(*pipelines, strict=True):
            yield from zip(segments, found, strict=True)

    @property
    def orders_made(self) -> tuple[tuple[int, ...], ...]:
        """The orders that `in_order` returned."""
        return tuple(self._orders)

    def in_order(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """`ranks`, if it names every rank once; raises ScheduleError otherwise."""
        order = tuple(ranks)
        if sorted(order) != list(self.ranks):
            raise self._error(f"order {order}: must name every rank from 0 to {self.n_ranks - 1} once")
        self._orders.append(order)
        return order

    def edges(self, trees: Sequence[Tree], edges: Iterable[Edge]) -> TreeEdges:
        """Every edge of these trees over all ranks, in the order of `edges`, to be gone through in beats.

        Raises ScheduleError for a tree over other ranks, and unless every edge is named once, with its level.
        """
        if any(len(tree) != self.n_ranks for tree in trees):
            raise self._error(f"trees over {[len(tree) for tree in trees]} ranks: must be over {self.n_ranks}")
        return TreeEdges(tuple(trees), tuple(edges))

    def pairs(self, order: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """`order`, a sequence of pairs of ranks, if it has every pair of different ranks whose cell has a share once.

        Raises ScheduleError otherwise: some block would not be sent, or be sent twice.
        """
        given, p = tuple(order), self.n_ranks
        cells = [number for number, share in enumerate(self.collective.shares) if share]
        wanted = {divmod(cell, p) for cell in cells if cell // p != cell % p}
        if len(given) != len(wanted) or set(given) != wanted:
            wrong = sorted(wanted ^ set(given)) or [pair for pair in wanted if given.count(pair) > 1]
            raise self._error(f"pairs: must have every pair of ranks with a block once: {wrong[:1]}")
        return given

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Names the transfers written inside; stages do not nest.

        Raises ScheduleError for a stage inside a stage.
        """
        if self._stage >= 0:
            raise self._error(f"stage {name!r}: stage {self._stages[self._stage]!r} has not ended")
        if name not in self._stages:
            self._stages.append(name)
        self._stage = self._stages.index(name)
        try:
            yield
        finally:
            self._stage = -1

    def finish(self) -> Schedule:
        """The schedule written so far.

        Raises ScheduleError if the shares of its pipelines do not add up to one.
        """
        self._finished = True
        self._flush()
        columns = np.empty((len(_COLUMNS), 0 if self._sink else self._n_transfers), dtype=np.int64)
        begin = 0
        for moves in self._moves:
            end = begin + len(moves[0])
            for into, values in zip(columns, moves, strict=True):
                into[begin:end] = values
            begin = end
        columns.setflags(write=False)
        return Schedule(
            self.name,
            self.collective,
            tuple(self._shapes),
            tuple(self._stages) or ("transfer",),
            self._scratch_slots,
            self.source,
            **dict(zip(_COLUMNS, columns, strict=True)),
            lane_per_peer=self.lane_per_peer,
            keeps_order=self.keeps_order,
        )

    def _add(self, op: int, src: int, dst: int, chunk: Chunk, into: Chunk) -> None:
        n_ranks = self.collective.n_ranks
        # Nearly every transfer is such a one, and asks for no more than this.
        is_plain = (
            into is chunk
            and chunk.slot == DATA
            and type(src) is type(dst) is int
            and 0 <= src < n_ranks
            and 0 <= dst < n_ranks
            and src != dst
            and not self._finished
        )
        if not is_plain:
            wrong = self._wrong(op, src, dst, chunk, into)
            if wrong:
                raise self._error(f"{src}->{dst} {chunk}{wrong}")
            if into.slot != DATA:
                self._written.add((dst, into.segment, into.section, into.slot))
        stage = self._stage if self._stage >= 0 else self._current_stage()
        caller = sys._getframe(2)  # mostly the author's, who calls `Chunk.reduce` or `copy`
        line = caller.f_lineno if caller.f_code.co_filename == self.source else self._line()
        self._rows.append((int(src), int(dst), op, chunk.segment, chunk.section, chunk.slot, into.slot, stage, line))
        if self._sink is not None and len(self._rows) == _SINK_ROWS:
            self._flush()
        self._count(1)

    def _wrong(self, op: int, src: int, dst: int, chunk: Chunk, into: Chunk) -> str:
        """What is wrong with a transfer; empty if nothing is."""
        n_ranks = self.collective.n_ranks
        for label, rank in (("src", src), ("dst", dst)):
            # Asking an abstract class costs more than all the rest.
            if not (type(rank) is int or isinstance(rank, Integral)) or not 0 <= rank < n_ranks:
                return f": {label} {rank} must be a rank from 0 to {n_ranks - 1}"
        if src == dst and chunk == into:
            return ": src and dst must differ"
        if self._finished or into.program is not self:
            return ": the chunk belongs to another program"
        if (chunk.segment, chunk.section) != (into.segment, into.section):
            return f" into {into}: both must be the same section of the same segment"
        if self._unwritten(src, chunk):
            return f": rank {src} never wrote {chunk}, so there is nothing to {OPS[op]}"
        if op == REDUCE and self._unwritten(dst, into):
            return f": rank {dst} never wrote {into}, so there is nothing to reduce into: copy first"
        return ""

    def _add_tree(self, op: int, chunk: Chunk, tree: Tree, src: Column, dst: Column) -> None:
        wrong = ""
        if len(tree) != self.n_ranks:
            wrong = f"the tree has {len(tree)} ranks, must have {self.n_ranks}"
        elif chunk.slot != DATA:
            wrong = "must be a chunk of the message, not scratch space"
        elif self._finished:
            wrong = "the chunk belongs to another program"
        if wrong:
            raise self._error(f"{OPS[op]} of {chunk} along {tree!r}: {wrong}")
        self._emit_all(op, chunk.segment, np.array([chunk.section]), src, dst)

    def _add_step(self, op: int, segment: Segment, section: Column, src: Column, dst: Column) -> None:
        given = [np.asarray(each) for each in (src, dst, section)]
        if any(each.ndim != 1 or each.dtype.kind not in "iu" or len(each) != len(given[0]) for each in given):
            raise self._error(f"s{segment.index}: a step must have section, src and dst as whole numbers of one length")
        # What is kept must not be the author's to change.
        src, dst, section = (each.astype(np.int64, copy=self._sink is None) for each in given)
        limits = ((src, self.n_ranks), (dst, self.n_ranks), (section, segment.sections))
        # Taken for an unsigned number, one below zero is too large.
        wrong = any(int(each.view(np.uint64).max(initial=0)) >= limit for each, limit in limits)
        if wrong or self._finished or (src == dst).any():
            for a, b, index in zip(src.tolist(), dst.tolist(), section.tolist(), strict=True):
                self._add(op, a, b, segment[index], segment[index])
        self._emit_all(op, segment.index, section, src, dst)

    def _emit_all(self, op: int, segment: int, section: Column, src: Column, dst: Column) -> None:
        """Transfers of chunks of the message."""
        self._flush()
        same = np.array([op, segment, DATA, DATA, self._current_stage(), self._line()])
        ops, segments, src_slot, dst_slot, stage, line = (same[at : at + 1] for at in range(len(same)))
        self._emit((src, dst, ops, segments, section, src_slot, dst_slot, stage, line))
        self._count(len(src))

    def _flush(self) -> None:
        if self._rows:
            self._emit(tuple(np.array(self._rows, dtype=np.int64).T.copy()))
            self._rows = []

    def _emit(self, moves: Moves) -> None:
        if self._sink is None:
            self._moves.append(moves)
        else:
            self._sink(moves, self._shapes, self._scratch_slots)

    def _count(self, more: int) -> None:
        self._n_transfers += more
        if self._n_transfers > TRANSFERS_MAX and self._sink is None:
            raise self._error(f"more than {TRANSFERS_MAX} transfers: ask for fewer segments")

    def _current_stage(self) -> int:
        if self._stage >= 0:
            return self._stage
        if not self._stages:
            self._stages.append("transfer")
        return len(self._stages) - 1

    def _unwritten(self, rank: int, chunk: Chunk) -> bool:
        return chunk.slot != DATA and (rank, chunk.segment, chunk.section, chunk.slot) not in self._written

    def _line(self) -> int:
        """The line of the author's file that is being executed; 0 if none is."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.source:  # the author may call helpers elsewhere
            if frame.f_back is None:
                return 0
            frame = frame.f_back
        return frame.f_lineno

    def _error(self, message: str) -> ScheduleError:
        line = self._line()
        return ScheduleError(f"{Path(self.source).name}:{line}: {message}" if line else message)


F = TypeVar("F", bound=Callable[..., Any])
Configure = Callable[[Topology], Mapping[str, Any]]


PURE = "__optcc_pure__"


def pure(function: F) -> F:
    """Declares that a helper of schedules changes nothing, and returns the same for the same arguments.

    `optcc verify --all-ranks` need not read such a helper, and says that it has assumed this.
    """
    setattr(function, PURE, True)
    return function


def any_flat(topology: Topology) -> Mapping[str, Any]:
    """Accepts every topology of single-GPU servers; the schedule has no parameters."""
    if not topology.is_flat:
        raise TopologyError(f"{topology!r}: must have one GPU a server")
    return {}


@dataclass(frozen=True, eq=False)
class Definition:
    """A schedule function with what users need to know of it; call it with a number of ranks to get a `Schedule`.

    `configure` turns a topology into the function's parameters, or refuses it with a TopologyError. `lane_per_peer` and
    `keeps_order` are those of its schedules; `fair` and `fifo` are what takes its place under these ports. `declares`
    makes the collective for a number of ranks, if that is a declared one.
    """

    function: Callable[..., None]
    collective: str
    accepts: str
    paper: str
    configure: Configure
    name: str
    """As written on the command line."""
    lane_per_peer: bool = False
    fair: Definition | None = None
    fifo: Definition | None = None
    declares: Callable[[int], Collective] | None = None
    domain: Domain = ANY_NUMBER
    """The numbers of ranks that it is for."""
    one_topology: str = ""
    """What of it is made for one topology, and so for one number of ranks; none where there may be a proof for all."""
    keeps_order: bool = False

    def under(self, ports: str) -> Definition:
        """The definition to build where ports are ordered for `ports`."""
        other = {"fair": self.fair, "fifo": self.fifo}.get(ports)
        return self if other is None else other

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    def of(self, collective: Collective) -> Definition:
        """The same schedule for a declared collective: that of some AllToAll-v, say.

        Raises InputError for a collective of another name.
        """
        if collective.name != self.collective:
            raise InputError(f"schedule {self.name}: {self.collective}: must be for {collective.name}")
        return replace(self, declares=lambda _: collective)

    def computes(self, n_ranks: int, root: int = 0) -> Collective:
        """What the schedule performs on so many ranks; raises InputError if it cannot."""
        made = self.declares(n_ranks) if self.declares else Collective(self.collective, n_ranks, root)
        if (made.name, made.n_ranks) != (self.collective, n_ranks):
            given, wanted = f"{made.name} over {made.n_ranks} ranks", f"{self.collective} over {n_ranks}"
            raise InputError(f"schedule {self.name}: declares {given}: must be {wanted}")
        return made

    def __call__(self, n_ranks: int, segments: int = 1, *, root: int = 0, **parameters: Any) -> Schedule:
        """The schedule for `n_ranks` ranks; `root` matters to broadcast, reduce, gather and scatter.

        Raises ScheduleError for a number outside of the domain, and at the author's line that makes a mistake, whatever
        exception that is.
        """
        return self.write(n_ranks, segments, root=root, **parameters).finish()

    def write(self, n_ranks: int, segments: int = 1, *, root: int = 0, **parameters: Any) -> Program:
        """The program that the schedule has written, before it is finished; raises what a call raises."""
        if n_ranks >= 1 and n_ranks not in self.domain:
            raise ScheduleError(f"schedule {self.name}: {n_ranks} ranks: must be {self.domain.one}")
        program = self._program(n_ranks, segments, root)
        self._write(program, parameters)
        return program

    def build(self, topology: Topology, segments: int = 1, *, root: int = 0) -> Schedule:
        """The schedule for `topology`; `root` as in a call.

        Raises TopologyError if the schedule does not accept it.
        """
        return self(topology.n_ranks, segments, root=root, **self._configured(topology))

    def stream(self, topology: Topology, segments: int, sink: Sink) -> None:
        """Hands the transfers of the schedule for `topology` to `sink` as they are written, and keeps none.

        Raises what `build` raises, once the transfers before it were handed over.
        """
        parameters = self._configured(topology)
        program = self._program(topology.n_ranks, segments, 0)
        program._sink = sink
        self._write(program, parameters)
        program.finish()

    def _program(self, n_ranks: int, segments: int, root: int) -> Program:
        source = self.function.__code__.co_filename
        computed = self.computes(n_ranks, root)
        return Program(self.name, computed, segments, source, self.lane_per_peer, self.keeps_order)

    def _configured(self, topology: Topology) -> Mapping[str, Any]:
        if topology.n_ranks not in self.domain:
            raise TopologyError(f"schedule {self.name}: {topology.n_ranks} ranks: must be {self.domain.one}")
        try:
            return self.configure(topology)
        except TopologyError as error:
            raise TopologyError(f"schedule {self.name} accepts {self.accepts}: {error}") from None
        except OptccError:
            raise
        except (Exception, SystemExit) as error:
            place = _place(error, self.function.__code__.co_filename)
            raise ScheduleError(f"{place}configure: {type(error).__name__}: {error}") from error

    def _write(self, program: Program, parameters: Mapping[str, Any]) -> None:
        try:
            self.function(program, **parameters)
        except OptccError:
            raise
        except (Exception, SystemExit) as error:
            raise ScheduleError(f"{_place(error, program.source)}{type(error).__name__}: {error}") from error


def _place(error: BaseException, source: str) -> str:
    """`my.py:12: ` for the deepest line of the author's file that the error went through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == source]
    return f"{Path(source).name}:{lines[-1]}: " if lines else ""


@overload
def schedule(function: Callable[..., None], /) -> Definition: ...
@overload
def schedule(
    *,
    name: str = ...,
    collective: str | Callable[[int], Collective] = ...,
    accepts: str = ...,
    paper: str = ...,
    configure: Configure = ...,
    lane_per_peer: bool = ...,
    fair: Definition | None = ...,
    fifo: Definition | None = ...,
    domain: Domain = ...,
    one_topology: str = ...,
    keeps_order: bool = ...,
) -> Callable[[Callable[..., None]], Definition]: ...


def schedule(
    function: Callable[..., None] | None = None,
    /,
    *,
    name: str = "",
    collective: str | Callable[[int], Collective] = "allreduce",
    accepts: str = "any endpoints",
    paper: str = "",
    configure: Configure = any_flat,
    lane_per_peer: bool = False,
    fair: Definition | None = None,
    fifo: Definition | None = None,
    domain: Domain = ANY_NUMBER,
    one_topology: str = "",
    keeps_order: bool = False,
) -> Definition | Callable[[Callable[..., None]], Definition]:
    """Makes a function over a `Program` a schedule.

    `name` is what users call it (the function's own if empty), `collective` what it computes: a name, or a function
    from a number of ranks to a declared `Collective` of the function's name; `accepts` says in words
    which topologies it takes, `configure` decides it and gives the function's parameters; `paper` is where it comes
    from; `domain` says which numbers of ranks it is for (`optcc.domain`); `lane_per_peer`, `fair`, `fifo`,
    `one_topology` and `keeps_order` are those of `Definition`.
    """

    def define(function: Callable[..., None]) -> Definition:
        called = name or function.__name__
        computed, declares = (collective, None) if isinstance(collective, str) else (collective.__name__, collective)
        return Definition(
            *(function, computed, accepts, paper, configure, called, lane_per_peer, fair, fifo),
            *(declares, domain, one_topology, keeps_order),
        )

    return define if function is None else define(function)
