"""`Observer`: a rank's own view of itself, in the page that `optcc status` and `optcc explain` read.

It makes the page, has the engine's flight recorder write there, and rewrites the status while the rank is inside the
run-time: every `REFRESH_S`, at the next look (`LOOK_S`) if a collective takes longer than that or there is news of the
NICs, and once more when the engine gives up. Nothing here can fail a job: without a place for the page
it is memory of the process, and what goes wrong later is logged.

A dump is the page as a file. One is written when the run-time gives up, which a passed deadline is, into the folder
OPTCC_DUMP, if that is set; on the signal that OPTCC_DUMP_SIGNAL names, such as USR1, whose former handler is called
too; and by `Observer.dump`. The page of a rank that has failed or was killed stays, so that `optcc explain JOB` needs
no dump.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakSet

import msgspec

from optcc.errors import InputError, OptccError, RuntimeFault
from optcc.plan import Plan
from optcc.runtime.engine import Engine
from optcc.runtime.forks import call_in_child
from optcc.runtime.handle import Handle
from optcc.runtime.observe import log
from optcc.runtime.observe.checks import ReductionCheck
from optcc.runtime.observe.dump import FlightDump, write_dump
from optcc.runtime.observe.jobs import boot_id, own_start_s, page_path, pages_folder, read_rank, remove_stale
from optcc.runtime.observe.page import EVENTS, EVENTS_MIN, STATUS_BYTES_MAX, PageWriter
from optcc.runtime.observe.recorder import FlightRecorder, known_plan, plan_text
from optcc.runtime.observe.status import (
    CLOSED,
    FAILED,
    RUNNING,
    WRONG,
    FailureStatus,
    HasEndpoint,
    Note,
    RailReader,
    RankIdentity,
    RankStatus,
    RunningRun,
    WaitedFor,
    WantedRun,
)
from optcc.runtime.persistent_plan import PersistentPlan
from optcc.runtime.point_to_point import Mail
from optcc.runtime.taps.control import TapControl

VARIABLE, EVENTS_VARIABLE = "OPTCC_STATUS", "OPTCC_EVENTS"
DUMP_VARIABLE, SIGNAL_VARIABLE, CHECK_VARIABLE = "OPTCC_DUMP", "OPTCC_DUMP_SIGNAL", "OPTCC_CHECK"
LOOK_S, REFRESH_S = 0.1, 0.5
_NOTES_MAX, _PLANS_MAX, _RUNS_MAX, _WAITS_MAX = 128, 64, 32, 32
_TEXT_MAX = 300
_EVENTS_MAX = 1 << 20
_OFF = ("0", "off", "no", "false")

logger = logging.getLogger("optcc.events")


class Observer:
    """Observes `engine` from now on; before its first plan is made ready.

    `job` names the job, the same at every rank; `folder` is where the page is, None for memory of this process;
    `dumps` is where dumps are written. With `in_detail` the messages of short plans are recorded too; of `check_every`
    reductions one is done again by NumPy, none if it is 0 (`optcc.runtime.observe.checks`).

    Raises InputError for a job or number of events that cannot be.
    """

    def __init__(
        self,
        engine: Engine,
        job: str,
        folder: Path | None,
        *,
        n_events: int = EVENTS,
        dumps: Path | None = None,
        in_detail: bool = False,
        check_every: int = 0,
    ) -> None:
        self._engine, self._clock, self._dumps = engine, engine.clock, dumps
        transport = engine.transport
        self._rails = RailReader(transport.endpoint) if isinstance(transport, HasEndpoint) else None
        self.identity = RankIdentity(
            *(job, engine.rank, engine.n_ranks, socket.gethostname(), os.getpid(), own_start_s(), boot_id()),
            *(self._clock.now_s(), time.time(), _version(), type(transport).__name__),
        )
        self._page = self._make_page(job, folder, n_events)
        self._recorder = engine.recorder = FlightRecorder(self._page, engine.n_ranks, self._clock.now_s)
        self._recorder.in_detail = in_detail or check_every > 0
        if check_every:
            self._recorder.check = ReductionCheck(check_every, lambda text: self.note(WRONG, text))
        engine.watcher = self
        self._notes: deque[Note] = deque(maxlen=_NOTES_MAX)
        self._moved: dict[int, tuple[int, float]] = {}
        self._running: tuple[RunningRun, ...] = ()
        self._state, self._preparing = RUNNING, ""
        self._wanted: WantedRun | None = None
        self._failure: FailureStatus | None = None
        # The number of the present epoch, and what the NICs carry in it, in words.
        self.epoch_of: Callable[[], tuple[int, str]] = lambda: (0, "")
        self._next_s = 0.0
        if logger.isEnabledFor(logging.DEBUG):
            self._recorder.tell(self._say_run)
        inner = engine.look_aside
        engine.look_aside = self.look if inner is None else lambda: min(inner(), self.look())
        call_in_child(self, Observer._leave_to_parent)
        self.look()

    def _make_page(self, job: str, folder: Path | None, n_events: int) -> PageWriter:
        identity = msgspec.json.encode(self.identity)
        if folder is not None:
            path = page_path(folder, job, self._engine.rank)
            try:
                with suppress(OSError, OptccError):
                    if read_rank(path).process == "gone":
                        path.unlink()
                return PageWriter(path, identity, n_events)
            except OSError as error:
                logger.warning("optcc: rank %d: no page for optcc status: %s", self._engine.rank, error)
        return PageWriter(None, identity, n_events)

    # --- the status

    def look(self) -> float:
        """Rewrites the status if it is time to; seconds until the next look.

        While collectives are short, their delay by all ranks' looks adds up: what is new then is little.
        """
        now_s = self._clock.now_s()
        oldest = next(iter(self._engine._running), None)
        is_long = oldest is not None and now_s - oldest.began_s >= LOOK_S
        if is_long or now_s >= self._next_s or (self._rails is not None and self._rails.has_notes):
            self.refresh()
            self._next_s = now_s + REFRESH_S
        return LOOK_S

    def refresh(self) -> None:
        """Rewrites the status."""
        if self._state == RUNNING:
            self._running = tuple(self._read_run(each) for each in list(self._engine._running)[:_RUNS_MAX])
        self._publish()

    def note(self, kind: str, text: str, ranks: Sequence[int] = ()) -> None:
        """Keeps a rare event; `ranks` are at fault."""
        self._take(Note(self._clock.now_s(), kind, text[:_TEXT_MAX], ranks=tuple(ranks)))

    def preparing(self, plan: Plan | None) -> None:
        """See `optcc.runtime.watching.Watcher`."""
        with _harmless():
            self._preparing, self._wanted = ("", None) if plan is None else (plan_text(plan), self._wanted_run(plan))
            if plan is not None:
                logger.debug("optcc: rank %d: prepares a plan for %s", self._engine.rank, self._preparing)
            self._publish()

    def _wanted_run(self, plan: Plan) -> WantedRun | None:
        """A plan of all ranks; those of some of them have runs of their own."""
        if plan.n_ranks != self.identity.n_ranks:
            return None
        return WantedRun(self._recorder.n_begun + 1, self._clock.now_s(), known_plan(plan, 0, 0, ()))

    def _take(self, note: Note) -> None:
        self._notes.append(note)
        if logger.isEnabledFor(logging.INFO):
            where = f" to rank {note.peer}" if note.peer >= 0 else ""
            where += f" over NIC {note.nic}" if note.nic >= 0 else ""
            logger.info("optcc: rank %d: %s%s: %s", self._engine.rank, note.kind, where, note.text or "-")

    def _read_run(self, handle: Handle) -> RunningRun:
        now_s, plan = self._clock.now_s(), handle.plan
        waits: list[WaitedFor] = []
        done = total = 0
        if isinstance(plan, PersistentPlan):
            # Of the runs of one plan, only the first is under way.
            if plan.run == handle.number:
                machine, ranks = plan.present, plan.ranks
                done, total = machine.n_done, plan.program.n_instructions
                for channel, arrives in machine.awaited()[:_WAITS_MAX]:
                    end = plan.plan.channels[channel]
                    waits.append(WaitedFor(ranks[end.src if arrives else end.dst], arrives))
        elif isinstance(plan, Mail):
            waits = [WaitedFor(*each) for each in plan.awaited()[:_WAITS_MAX]]
        before = self._moved.get(handle.number)
        if before is None or before[0] != done:
            self._moved[handle.number] = before = done, now_s if before else handle.began_s
        if len(self._moved) > 4 * _RUNS_MAX:
            numbers = {each.number for each in self._engine._running}
            self._moved = {number: moved for number, moved in self._moved.items() if number in numbers}
        return RunningRun(
            *(handle.number, plan.observed, handle.began_s, done, total, before[1]),
            tuple(dict.fromkeys(waits)),
        )

    def _publish(self) -> None:
        now_s = self._clock.now_s()
        if self._rails is not None:
            for note in self._rails.take_notes():
                self._take(note)
        status = RankStatus(
            *(self._state, now_s, *self.epoch_of()),
            tuple(self._recorder.plans.values())[-_PLANS_MAX:],
            self._running,
            self._rails.read(now_s) if self._rails is not None else (),
            self._rails.counts if self._rails is not None else {},
            tuple(self._notes),
            self._preparing,
            self._failure,
            self._wanted,
        )
        data = msgspec.json.encode(status)
        if len(data) > STATUS_BYTES_MAX:
            status = msgspec.structs.replace(status, notes=(), plans=status.plans[-4:])
            data = msgspec.json.encode(status)
        if len(data) <= STATUS_BYTES_MAX:
            self._page.publish(data)

    def _say_run(self, is_over: bool, plan: int, run: int) -> None:
        known = self._recorder.plans.get(plan)
        what = "a message" if known is None else known.text
        logger.debug("optcc: rank %d: run %d %s: %s", self._engine.rank, run, "ends" if is_over else "begins", what)

    # --- the end

    def failing(self, error: RuntimeFault) -> None:
        """See `optcc.runtime.watching.Watcher`."""
        del error
        with _harmless():
            self._recorder.failed()
            self.refresh()

    def failed(self, error: RuntimeFault, cause: str) -> None:
        """See `optcc.runtime.watching.Watcher`."""
        with _harmless():
            self._state = FAILED
            self._failure = FailureStatus(
                *(self._clock.now_s(), type(error).__name__, str(error)[:4096], cause[:_TEXT_MAX]),
                tuple(error.culprits),
                tuple(error.nics),
            )
            logger.info("optcc: rank %d: gives up: %s", self._engine.rank, str(error).partition("\n")[0])
            self._publish()
            if self._dumps is not None:
                self.dump(self._dumps)

    def closing(self) -> None:
        """See `optcc.runtime.watching.Watcher`."""
        with _harmless():
            if self._state == RUNNING:
                self._state, self._running = CLOSED, ()
            self._publish()
            if self._state == CLOSED and self._dumps is not None and self._recorder.plans:
                logger.debug("optcc: rank %d: closed after %d runs", self._engine.rank, self._recorder.n_done)
            _on_signal.discard(self)
            self._page.close(keep=self._state == FAILED)

    def contents(self) -> FlightDump:
        """What a reader of the page would see, with the status as it is now."""
        if self._state == RUNNING:
            self.refresh()
        return FlightDump.of(self._page.contents())

    def dump(self, folder: Path | None = None) -> Path:
        """Writes a dump into `folder`, or OPTCC_DUMP, or the current one; returns its path."""
        return write_dump(self.contents(), folder or self._dumps or Path())

    def _leave_to_parent(self) -> None:
        """In a process that is forked: the page is the parent's."""
        self._page = PageWriter(None, b"", EVENTS_MIN)
        _on_signal.discard(self)


def observe(engine: Engine, environ: Mapping[str, str], job: str | None = None) -> Observer | None:
    """Observes an engine as the variables say: OPTCC_STATUS=0 is not at all, OPTCC_EVENTS the size of the ring.

    Raises InputError for a variable that says something else than it may.
    """
    log.configure(environ)
    if environ.get(VARIABLE, "1").lower() in _OFF:
        return None
    said = environ.get(EVENTS_VARIABLE, str(EVENTS))
    if not said.isdecimal() or not EVENTS_MIN <= int(said) <= _EVENTS_MAX:
        raise InputError(f"{EVENTS_VARIABLE}={said!r}: must be a number from {EVENTS_MIN} to {_EVENTS_MAX}")
    folder = pages_folder(environ)
    if folder is not None:
        with suppress(OSError):
            remove_stale(folder)
    dumps = environ.get(DUMP_VARIABLE)
    job = job or job_name(engine)
    check = environ.get(CHECK_VARIABLE, "0")
    if not check.isdecimal():
        raise InputError(f"{CHECK_VARIABLE}={check!r}: must be a number: one of so many reductions is checked")
    observer = Observer(
        *(engine, job, folder),
        n_events=int(said),
        dumps=Path(dumps) if dumps else None,
        check_every=int(check),
    )
    if environ.get(SIGNAL_VARIABLE):
        dump_on(environ[SIGNAL_VARIABLE], observer)
    if folder is not None:
        TapControl(engine, job, folder).watch()
    return observer


def job_name(engine: Engine) -> str:
    """What the job of an engine is called, the same at every rank: by its transport, else by the launcher's process."""
    transport = engine.transport
    return transport.endpoint.job.hex()[:8] if isinstance(transport, HasEndpoint) else f"pid{os.getppid()}"


# --- dumps on a signal

_on_signal: WeakSet[Observer] = WeakSet()
_former: dict[int, Any] = {}


def dump_on(name: str, observer: Observer) -> None:
    """From now on the signal of this name, such as USR1, has the observer dump; whoever handled it before still does.

    Python lets the main thread alone set handlers; in another one nothing is done, and that is logged. Raises
    InputError for a name that is no signal's, or whose default ends a process without asking it.
    """
    number = getattr(signal, f"SIG{name.upper().removeprefix('SIG')}", None)
    if not isinstance(number, signal.Signals) or number in (signal.SIGKILL, signal.SIGSTOP):
        raise InputError(f"{SIGNAL_VARIABLE}={name!r}: must be a signal that can be handled, such as USR1")
    _on_signal.add(observer)
    if number in _former:
        return
    if threading.current_thread() is not threading.main_thread():
        logger.warning("optcc: %s: only the main thread can handle signals: no dump on %s", SIGNAL_VARIABLE, name)
        return
    _former[number] = signal.signal(number, _dump_all)


def _dump_all(number: int, frame: FrameType | None) -> None:
    for observer in list(_on_signal):
        with _harmless():
            observer.refresh()
            logger.warning("optcc: rank %d: dumped to %s", observer.identity.rank, observer.dump())
    former = _former.get(number)
    if callable(former):
        former(number, frame)


class _harmless:  # noqa: N801 - reads as a statement
    """What goes wrong within is logged: observing a job must not end it."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        logger.warning("optcc: observation: %s: %s", type(error).__name__, error)
        return True


def _version() -> str:
    try:
        return version("optcc")
    except PackageNotFoundError:
        return ""
