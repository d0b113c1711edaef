"""Makes plans in a process of its own: planning takes a processor for up to half a second, and in the process of a
rank the data path would wait for the interpreter meanwhile.

`PlanWorker` starts `python -m optcc.plan_process` when it is first needed, or before, and keeps it: what it has loaded
it need not load again. The process reads lines of JSON, says when what a line asks for is in the cache directory, and
ends with its parent.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress

DONE, UNANSWERED = b".", b" "
"""What the process replies once it has done what a line asks for, or has failed to; how a line begins that it does not
reply to."""


class PlanWorker:
    """The process that makes plans for this one; any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def get_ready(self, work: bytes) -> None:
        """Has the process do what a line of JSON asks for, started if there is none, without a reply: so it has loaded
        what such work needs before it is asked for some. Nothing, if it is busy."""
        if not self._lock.acquire(blocking=False):
            return
        with suppress(OSError):
            process = self._process = self._process or _start()
            assert process.stdin is not None
            process.stdin.write(UNANSWERED + work + b"\n")
            process.stdin.flush()
        self._lock.release()

    @property
    def is_there(self) -> bool:
        """True if the process has been started."""
        return self._process is not None

    def make(self, work: bytes) -> bool:
        """Has the process do what a line of JSON asks for; False if it could not."""
        with self._lock:
            try:
                process = self._process
                if process is None or process.poll() is not None:
                    self.close()
                    process = self._process = _start()
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(work + b"\n")
                process.stdin.flush()
                return process.stdout.read(1) == DONE
            except OSError:
                return False

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(OSError):
                process.kill()
            process.communicate()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "optcc.plan_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
