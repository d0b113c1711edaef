"""The process that a `PlanWorker` starts: `python -m optcc.plan_process` makes plans until its parent ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from typing import IO

from optcc.plan_worker import DONE
from optcc.planner import AUTO, build, make_plans
from optcc.topology import Nic, Server, Topology


def serve(requests: IO[bytes], replies: IO[bytes], do: Callable[[bytes], None]) -> None:
    """Calls `do` with each line until there is no more."""
    for line in requests:
        with suppress(Exception):  # the parent does it itself, and meets the error where it can be reported
            do(line)
        replies.write(DONE)
        replies.flush()


def warm_up() -> None:
    """Makes a small plan, which loads most of what others need."""
    nics = tuple(Nic(rail, Fraction(10**8), Fraction(10**8)) for rail in range(2))
    servers = tuple(Server(f"h{number}", 1, nics[: 2 - (number == 1)]) for number in range(4))
    build(AUTO, Topology(servers, latency_s=Fraction(1, 10**5)), 1 << 22, ports="fair", by_rail=True)


if __name__ == "__main__":
    if "warm" in sys.argv[1:]:
        with suppress(Exception):
            warm_up()
    serve(sys.stdin.buffer, sys.stdout.buffer, make_plans)
