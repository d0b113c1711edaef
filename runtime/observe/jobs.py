"""The pages of the jobs of this user on this host: where they are, and what has become of their ranks."""

from __future__ import annotations

import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from optcc.errors import CodecError, InputError, OptccError, did_you_mean
from optcc.runtime.observe.dump import ALIVE, GONE, STOPPED, UNKNOWN, FlightDump
from optcc.runtime.observe.page import read_page
from optcc.runtime.observe.status import CLOSED

FOLDER_VARIABLE = "OPTCC_STATUS_DIR"
_SHARED = Path("/dev/shm")
_NAME = re.compile(r"([A-Za-z0-9_-]{1,64})\.(\d{1,6})\.page")
_KEPT_S = 86400.0
"""The page of a rank that has gone, or has failed, is kept for so long."""


def pages_folder(environ: Mapping[str, str]) -> Path | None:
    """Where ranks of this user keep their pages: OPTCC_STATUS_DIR, else a folder in shared memory, else in that for
    temporary files, made with mode 0700. None if it cannot be made, or somebody else could have put files there."""
    given = environ.get(FOLDER_VARIABLE)
    base = _SHARED if os.access(_SHARED, os.W_OK) else Path(tempfile.gettempdir())
    folder = Path(given) if given else base / f"optcc-{os.geteuid()}"
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=bool(given))
        status = folder.lstat()
    except OSError:
        return None
    is_safe = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
    return folder if is_safe else None


def page_path(folder: Path, job: str, rank: int) -> Path:
    """Where a rank of a job keeps its page."""
    name = f"{job}.{rank}.page"
    if not _NAME.fullmatch(name):
        raise InputError(f"job {job!r}: must be 1 to 64 letters, digits, - and _")
    return folder / name


def remove_stale(folder: Path) -> None:
    """Removes pages that nobody will ask for any more: of processes that have gone, a day after they began."""
    for path in folder.iterdir():
        with suppress(OSError, OptccError):
            if time.time() - path.stat().st_mtime > _KEPT_S and read_rank(path).process == GONE:
                path.unlink()


def jobs_in(folder: Path) -> dict[str, list[Path]]:
    """The pages of each job, by rank; the job that began last comes first."""
    found: dict[str, list[tuple[int, Path]]] = {}
    began: dict[str, float] = {}
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match:
            with suppress(OSError):
                began[match[1]] = max(began.get(match[1], 0.0), path.stat().st_ctime)
                found.setdefault(match[1], []).append((int(match[2]), path))
    return {job: [path for _, path in sorted(found[job])] for job in sorted(found, key=began.__getitem__, reverse=True)}


def read_job(folder: Path | None, job: str | None = None) -> list[FlightDump]:
    """Every rank of a job on this host, by rank; of the one that began last unless a name, or its beginning, is given.

    Raises InputError if there is none, or if several begin so.
    """
    jobs = {} if folder is None else jobs_in(folder)
    names = list(jobs)
    if job is not None:
        names = [name for name in jobs if name == job] or [name for name in jobs if name.startswith(job)]
    if not names:
        if job is None:
            raise InputError("job: none of this user is running on this host, or has failed")
        raise InputError(f"job {job!r}: must be one on this host: {', '.join(jobs) or 'none'}{did_you_mean(job, jobs)}")
    if job is not None and len(names) > 1:
        raise InputError(f"job {job!r}: must be one of {', '.join(names)}")
    dumps, begins = [], False
    for path in jobs[names[0]]:
        try:
            dumps.append(read_rank(path))
        except FileNotFoundError:  # it has left meanwhile
            continue
        except CodecError:
            begins = True
    if not dumps:
        raise InputError(f"job {names[0]!r}: its ranks {'have not said anything yet' if begins else 'have left'}")
    return sorted(dumps, key=lambda each: each.rank)


def read_rank(path: Path) -> FlightDump:
    """What a page says, and what has become of its process. Raises as `read_page` and `FlightDump.of`."""
    dump = FlightDump.of(read_page(path))
    process = UNKNOWN if dump.status.state == CLOSED else process_state(dump.identity.pid, dump.identity.started_s)
    return FlightDump(
        *(dump.identity, dump.status, process, dump.begun, dump.done, dump.is_driven, dump.records),
    )


def process_state(pid: int, started_s: float) -> str:
    """What has become of a process of this host that had this number when it began, seconds after the boot."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return GONE
    if fields[0] in "ZX" or abs(_ticks_s(fields[19]) - started_s) > 1:
        return GONE
    return STOPPED if fields[0] in "Tt" else ALIVE


def boot_id() -> str:
    """Which run of the kernel this is: processes with the same one share a monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def own_start_s() -> float:
    """When this process began, seconds after the boot: its number will be another's."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return _ticks_s(fields[19])


def _ticks_s(ticks: str) -> float:
    return int(ticks) / os.sysconf("SC_CLK_TCK")
