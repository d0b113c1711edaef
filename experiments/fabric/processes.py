"""Processes: found by namespace or by run, ended in bounded time, and run to their end; signals meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from optcc.errors import DeadlineExceeded, RuntimeFault
from optcc.experiments.fabric.status import NAMESPACE_DIRECTORY

TERM_TIMEOUT_S: Final = 2.0
KILL_TIMEOUT_S: Final = 5.0
RUN_VARIABLE: Final = "OPTCC_FABRIC_RUN"


@dataclass(frozen=True)
class RunResult:
    """What a run gave: `exit_code` as a shell shows it; the texts are empty unless they were captured."""

    exit_code: int
    seconds: float
    stdout: str
    stderr: str


def _process_ids() -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            yield int(entry.name)


def inside(namespaces: Sequence[str]) -> list[int]:
    """The processes in some namespaces; never this one nor those that it descends from."""
    marks = set()
    for namespace in namespaces:
        with contextlib.suppress(OSError):
            found = (NAMESPACE_DIRECTORY / namespace).stat()
            marks.add((found.st_dev, found.st_ino))
    spared = _ancestors()
    inside = []
    for pid in _process_ids():
        with contextlib.suppress(OSError):
            found = os.stat(f"/proc/{pid}/ns/net")  # noqa: PTH116 - a stat of thousands of links, no Path each
            if (found.st_dev, found.st_ino) in marks and pid not in spared:
                inside.append(pid)
    return inside


def send_signal(number: signal.Signals, namespaces: Sequence[str]) -> None:
    """Sends it to the processes in some namespaces."""
    for pid in inside(namespaces):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _ancestors() -> set[int]:
    """This process and all that it descends from."""
    chain, pid = set(), os.getpid()
    while pid > 0 and pid not in chain:
        chain.add(pid)
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            break
        pid = int(fields[1])
    return chain


def started_by(token: str) -> list[int]:
    """The processes that carry the mark of one run in their environment."""
    mark = f"{RUN_VARIABLE}={token}".encode()
    spared = _ancestors()
    found = []
    for pid in _process_ids():
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") and pid not in spared:
                found.append(pid)
    return found


def end_processes(find: Callable[[], list[int]]) -> None:
    """Ends the processes that `find` returns: SIGTERM first, then SIGKILL; bounded in time.

    Raises RuntimeFault if one does not end.
    """
    begin, asked = time.monotonic(), set[int]()
    while pids := find():
        waited_s = time.monotonic() - begin
        if waited_s > TERM_TIMEOUT_S + KILL_TIMEOUT_S:
            raise RuntimeFault(f"process {pids[0]}: does not end within {waited_s:.0f} s of SIGKILL")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                if waited_s > TERM_TIMEOUT_S:
                    os.kill(pid, signal.SIGKILL)
                elif pid not in asked:
                    os.kill(pid, signal.SIGTERM)
                    asked.add(pid)
        time.sleep(0.02)


@contextlib.contextmanager
def _signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers, *numbers: int) -> Iterator[None]:
    """Replaces the handlers of some signals; does nothing outside the main thread, which Python requires."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def termination_raises() -> contextlib.AbstractContextManager[None]:
    """SIGTERM and SIGHUP raise SystemExit, so that clean-up runs as for Ctrl-C."""
    return _signals(_leave, signal.SIGTERM, signal.SIGHUP)


def undisturbed() -> contextlib.AbstractContextManager[None]:
    """Ignores further signals during clean-up, which is bounded in time instead."""
    return _signals(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(argv: Sequence[str], environment: Mapping[str, str], timeout_s: float, capture: bool) -> RunResult:
    """Runs `argv` to its end, or for `timeout_s`; on any other way out it is ended first.

    In a session of its own: Ctrl-C reaches this process only, which then ends the run in order.
    """
    pipe = subprocess.PIPE if capture else None
    begin = time.monotonic()
    process = subprocess.Popen(
        argv, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end_child(process)
        raise DeadlineExceeded(f"fabric run: not done after {timeout_s:g} s; ended") from None
    except BaseException:
        _end_child(process)
        raise
    code = process.returncode
    return RunResult(code if code >= 0 else 128 - code, time.monotonic() - begin, stdout or "", stderr or "")


def _end_child(process: subprocess.Popen[str]) -> None:
    """Ends a child: SIGTERM first, on which mpirun ends its ranks; SIGKILL after `TERM_TIMEOUT_S`."""
    with undisturbed():
        process.terminate()
        try:
            process.wait(TERM_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(KILL_TIMEOUT_S)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
