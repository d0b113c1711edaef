"""The files of a job's taps, beside the pages of its ranks, and the taps that an operator asks for.

JOB.taps           what the operator wants, `optcc-taps/1`; ranks look at it ten times a second
JOB.RANK.ring      the ring of a rank
JOB.RANK.layouts   the layouts of the blocks in it, a line each
JOB.DIGEST.plan    the plans that were tapped, `optcc-plan/1`
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from optcc.codec import write_plan
from optcc.errors import InputError, OptccError
from optcc.files import read_file, replace_file
from optcc.plan import Plan
from optcc.runtime.engine import Engine
from optcc.runtime.observe.dump import ALIVE, GONE
from optcc.runtime.observe.jobs import own_start_s, page_path, process_state
from optcc.runtime.observe.shared_file import UNFINISHED
from optcc.runtime.taps.attached import TapSet
from optcc.runtime.taps.policy import Tap, decode_taps, encode_taps
from optcc.runtime.taps.ring import DRAIN_TICKS, RingReader, RingWriter

RING_BYTES = 64 << 20
"""The length of a ring unless told otherwise."""
LOOK_S = 0.1
_FILE_BYTES_MAX = 1 << 20
_KEPT_S = 86400.0
_MS = 1000

logger = logging.getLogger("optcc.events")


class RingIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose ring it is; the process by its number and its beginning, seconds after the boot."""

    job: str
    rank: int
    n_ranks: int
    host: str
    pid: int
    started_s: float


def ring_path(folder: Path, job: str, rank: int) -> Path:
    """Where a rank of a job keeps its ring; raises InputError for a name of a job that cannot be."""
    return page_path(folder, job, rank).with_suffix(".ring")


def layouts_path(ring: Path) -> Path:
    """Where the layouts of a ring are."""
    return ring.with_suffix(".layouts")


def plan_path(folder: Path, job: str, digest: str) -> Path:
    """Where a plan of a job is."""
    return folder / f"{job}.{digest[:12]}.plan"


def taps_path(folder: Path, job: str) -> Path:
    """Where an operator says what is to be taken of a job."""
    return page_path(folder, job, 0).with_name(f"{job}.taps")


def ask_for(folder: Path, job: str, taps: Sequence[Tap], ring_bytes: int = RING_BYTES) -> None:
    """Has the ranks of a job on this host take this from now on, with rings of `ring_bytes` where they have none; no
    taps: nothing. Raises InputError if the file cannot be written."""
    replace_file(taps_path(folder, job), encode_taps([each.check() for each in taps], ring_bytes))


def process_of_ring(identity: RingIdentity) -> str:
    """What has become of the process whose ring it is."""
    return process_state(identity.pid, identity.started_s)


def attach_taps(
    engine: Engine, job: str, folder: Path | None, taps: Sequence[Tap], ring_bytes: int = RING_BYTES
) -> TapSet:
    """Taps on every run that `engine` begins from now on; in memory of this process if there is no folder.

    Raises InputError for taps or a ring that cannot be, or that has no room in shared memory.
    """
    if isinstance(engine.taps, TapSet):
        engine.taps.set(*taps)
        return engine.taps
    identity = RingIdentity(job, engine.rank, engine.n_ranks, socket.gethostname(), os.getpid(), own_start_s())
    keeper = _Keeper(None if folder is None else ring_path(folder, job, engine.rank), folder, job)
    keeper.clear()
    try:
        ring = RingWriter(keeper.path, msgspec.json.encode(identity), ring_bytes)
    except OSError as error:
        raise InputError(f"ring of {ring_bytes} B in {folder}: {error.strerror or error}") from None

    gone: tuple[int, int] | None = None

    def drain_is_alive(pid: int) -> bool:
        nonlocal gone
        drain = pid, ring.words[DRAIN_TICKS]
        if pid <= 0 or drain == gone:
            return False
        # Asked in every run for which there is no room: a process that has gone does not come back.
        state = process_state(pid, drain[1] / _MS)
        if state == GONE:
            gone = drain
        return state == ALIVE

    made = TapSet(ring, engine.clock.now_s, keeper.keep, drain_is_alive)
    made.layouts, made.plans = keeper.lines, keeper.plans
    made.set(*taps)
    engine.taps = made
    return made


class _Keeper:
    """Writes down what the blocks of a ring are."""

    def __init__(self, path: Path | None, folder: Path | None, job: str) -> None:
        self.path, self._folder, self._job = path, folder, job
        self.lines: list[bytes] = []
        self.plans: dict[str, Plan] = {}

    def clear(self) -> None:
        """Removes what a process that has gone has left, of this name or for longer than a day."""
        if self._folder is None or self.path is None:
            return
        remove_stale_rings(self._folder)
        with suppress(OSError, OptccError, msgspec.DecodeError):
            identity = msgspec.json.decode(RingReader.open(self.path).identity, type=RingIdentity)
            if process_of_ring(identity) != ALIVE:
                self.path.unlink()
        with suppress(OSError):
            layouts_path(self.path).unlink()

    def keep(self, line: bytes, plan: Plan) -> None:
        if self.path is None or self._folder is None:
            self.lines.append(line)
            self.plans[plan.digest] = plan
            return
        try:
            with layouts_path(self.path).open("ab") as file:
                file.write(line)
            path = plan_path(self._folder, self._job, plan.digest)
            if not path.exists():
                replace_file(path, write_plan(plan))
        except (OSError, InputError) as error:
            logger.warning("optcc: taps: %s: records of %s cannot be read", error, plan.name)


def remove_stale_rings(folder: Path) -> None:
    """Removes files of taps that have not been touched for a day, if the process that made them has gone."""
    for path in folder.iterdir():
        with suppress(OSError, OptccError, msgspec.DecodeError):
            if path.suffix not in (".ring", ".layouts", ".plan", ".taps", UNFINISHED):
                continue
            if time.time() - path.stat().st_mtime < _KEPT_S:
                continue
            if path.suffix == ".ring":
                identity = msgspec.json.decode(RingReader.open(path).identity, type=RingIdentity)
                if process_of_ring(identity) == ALIVE:
                    continue
            path.unlink()


class TapControl:
    """Does at one rank what the operator's file says, from the moment at which `look` sees it."""

    def __init__(self, engine: Engine, job: str, folder: Path) -> None:
        self._engine, self._job, self._folder = engine, job, folder
        self._path = taps_path(folder, job)
        self._seen: tuple[int, int] | None = None
        self._next_s = 0.0

    def watch(self) -> None:
        """Looks every `LOOK_S` seconds while the rank is inside the run-time."""
        inner = self._engine.look_aside
        self._engine.look_aside = self.look if inner is None else lambda: min(inner(), self.look())

    def look(self) -> float:
        """Reads the file if it is another one; seconds until it is to be looked at again."""
        now_s = self._engine.clock.now_s()
        if now_s < self._next_s:
            return self._next_s - now_s
        self._next_s = now_s + LOOK_S
        try:
            status = os.stat(self._path)  # noqa: PTH116 - half the time of Path.stat, ten times a second
        except OSError:
            return LOOK_S
        seen = status.st_mtime_ns, status.st_ino
        if seen != self._seen:
            self._seen = seen
            try:
                taps, ring_bytes = decode_taps(read_file(self._path, _FILE_BYTES_MAX), f"file {str(self._path)!r}: $")
                if taps or self._engine.taps is not None:
                    attach_taps(self._engine, self._job, self._folder, taps, ring_bytes)
            except OptccError as error:
                logger.warning("optcc: rank %d: taps: %s", self._engine.rank, error)
        return LOOK_S
