"""The process that a `PlanWorker` starts: `python -m optcc.plan_process` makes plans until its parent ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from optcc.plan_worker import DONE, UNANSWERED
from optcc.planner import make_plans


def serve(requests: IO[bytes], replies: IO[bytes], do: Callable[[bytes], None]) -> None:
    """Calls `do` with each line until there is no more, and replies to those that ask for it."""
    for line in requests:
        with suppress(Exception):  # the parent does it itself, and meets the error where it can be reported
            do(line)
        if not line.startswith(UNANSWERED):
            replies.write(DONE)
            replies.flush()


NICENESS = 10
"""Plans are made beside the traffic of the ranks, which goes first where there are not processors enough."""

if __name__ == "__main__":
    os.nice(NICENESS)
    serve(sys.stdin.buffer, sys.stdout.buffer, make_plans)
