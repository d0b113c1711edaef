"""The process that a `PlanWorker` starts: `python -m optcc.plan_process` makes plans until its parent ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from optcc.plan_worker import DONE
from optcc.planner import make_plans

NICE = 5
"""The ranks of a job come first."""


def serve(requests: IO[bytes], replies: IO[bytes], do: Callable[[bytes], None]) -> None:
    """Calls `do` with each line until there is no more."""
    for line in requests:
        with suppress(Exception):  # the parent does it itself, and meets the error where it can be reported
            do(line)
        replies.write(DONE)
        replies.flush()


if __name__ == "__main__":
    os.nice(NICE)
    serve(sys.stdin.buffer, sys.stdout.buffer, make_plans)
