"""`Tracing`: collectives within a `with` block are recorded message by message, and the last one becomes a trace."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Protocol

from optcc.errors import InputError
from optcc.runtime.engine import Engine
from optcc.runtime.observe.observer import Observer
from optcc.runtime.observe.trace import GathersDumps, MeasuredRun, gather_dumps, measured_run, write_trace
from optcc.runtime.persistent_plan import PersistentPlan

EVENTS = 1 << 18
"""Records of a traced run at most: 14 MiB."""


class TracedCommunicator(Protocol):
    """The communicator of all ranks."""

    rank: int

    @property
    def engine(self) -> GathersDumps:
        """Its ranks."""
        ...

    @property
    def whole_engine(self) -> Engine:
        """What drives it."""
        ...

    def drop_plans(self) -> None:
        """Closes the plans that are kept."""
        ...

    @property
    def last_plan(self) -> PersistentPlan | None:
        """That of the last collective."""
        ...


class Tracing:
    """See `Communicator.trace`. `measured` is the last collective, at every rank, once the block is over.

    Plans are made ready anew within it and behind it: those that remember their steps have no messages to record.
    """

    def __init__(self, comm: TracedCommunicator, path: Path | str) -> None:
        self._comm, self._path = comm, Path(path)
        self.measured: MeasuredRun | None = None

    def __enter__(self) -> Tracing:
        engine = self._comm.whole_engine
        self._before = engine.recorder, engine.watcher, engine.look_aside
        self._comm.drop_plans()
        self._observer = Observer(engine, "trace", None, n_events=EVENTS, in_detail=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        comm, engine = self._comm, self._comm.whole_engine
        if error is None and engine.failure is None:
            prepared = comm.last_plan
            if prepared is None:
                raise InputError("trace: no collective within it: must be at least one")
            dumps = gather_dumps(comm.engine, self._observer.contents())
            self.measured = measured_run(prepared.plan, dumps)
            if not comm.rank:
                write_trace(self.measured, self._path)
            comm.drop_plans()
        engine.recorder, engine.watcher, engine.look_aside = self._before
