"""A job on emulated hosts that reduces the same bytes again and again, each time it is told to.

The ranks are processes of `optcc.experiments.reducing_rank`, launched once; rank 0 takes a line over a Unix socket for
each run, and answers with its time.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from optcc.errors import RuntimeFault
from optcc.experiments.fabric import Fabric, host_namespace
from optcc.experiments.fabric.processes import send_signal
from optcc.experiments.rank_lines import RankLines

SLICES, WHOLE, PEER = "slices", "whole", "mpi"
"""How the ranks reduce: with optcc, in slices or in one run; with MPI's own AllReduce."""
_START_S, _RUN_S, _JOB_S = 120.0, 120.0, 1800.0


class TimedRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of a row: when it began, since the first one, and its time, seconds; changes of plans; wrong elements."""

    began_s: float
    seconds: float
    epochs: int
    wrong: int


class ReducingJob:
    """The ranks, with `variables` of the environment of their own.

    Raises TimeoutError if rank 0 does not come within two minutes.
    """

    def __init__(
        self,
        fabric: Fabric,
        way: str,
        size_bytes: int,
        mpi_args: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._fabric = fabric
        self._stack = contextlib.ExitStack()
        self._lines = RankLines()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="optcc-reducing-"))
        path = Path(folder, "rank0")
        server = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(path))
        server.listen()
        server.settimeout(_START_S)
        words = ["-m", "optcc.experiments.reducing_rank", str(path), str(size_bytes), way]
        own = [f"{name}={value}" for name, value in (variables or {}).items()]
        command = ["env", "-u", "OPTCC_TOPOLOGY", "-u", "OPTCC_NIC_RATES", *own, sys.executable, *words]
        options = {"capture": True, "timeout_s": _JOB_S, "mpi_args": tuple(mpi_args)}
        self._thread = threading.Thread(target=fabric.run, args=(command,), kwargs=options)
        self._thread.start()
        wire, _ = server.accept()
        self._lines.add(wire)

    def begin(self) -> None:
        """Has the ranks begin a run."""
        self._lines.tell({"run": True})

    def end_of_run(self, limit_s: float = _RUN_S) -> dict[str, Any]:
        """The answer of rank 0: `seconds`, the `wrong` elements of all ranks, by how much the `epochs` rose since the
        end of the last run, and whether the run `is_split`: ranks were in different epochs at its end.

        Raises Hung if it takes longer.
        """
        return self._lines.hear(limit_s)[0]

    def timed(self, origin_s: float, limit_s: float = _RUN_S) -> TimedRun:
        """A run of a row whose first one began at `origin_s` on the clock. Raises Hung if it takes longer."""
        began_s = time.monotonic() - origin_s
        self.begin()
        told = self.end_of_run(limit_s)
        return TimedRun(began_s, told["seconds"], told["epochs"], told["wrong"])

    def run(self) -> float:
        """A run; its time in seconds. Raises RuntimeFault if an element was wrong."""
        self.begin()
        told = self.end_of_run()
        if told["wrong"]:
            raise RuntimeFault(f"{told['wrong']} wrong elements")
        return float(told["seconds"])

    def kill(self) -> None:
        """Ends ranks that do not end by themselves; see `close`."""
        hosts = range(self._fabric.state().spec.hosts)
        send_signal(signal.SIGKILL, [host_namespace(self._fabric.name, host) for host in hosts])

    def close(self) -> None:
        """The ranks end."""
        with contextlib.suppress(OSError):
            self._lines.tell({"run": False})
        self._thread.join()
        self._lines.close()
        self._stack.close()
