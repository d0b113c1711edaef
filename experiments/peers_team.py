"""The ranks of one job on emulated hosts, launched once and given turns over a Unix socket, a line of JSON each."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optcc
from optcc.errors import OptccError, RuntimeFault
from optcc.experiments.fabric import Fabric, find_mpirun
from optcc.experiments.peers_contenders import READY_S, PeerJob
from optcc.experiments.rank_lines import Exited, Hung, RankLines
from optcc.experiments.record import busy_jiffies, stolen_jiffies, stolen_share

END_S = 10.0
TEAM_S = 3600.0
START_S = 0.02


@dataclass(frozen=True)
class Turn:
    """What one run of one contender gave."""

    seconds: float
    steal: float
    cpu_s: float
    busy_s: float
    wrong: int


class Team:
    """The ranks of one job, launched and connected; each `turn` runs one of its cases on all of them."""

    def __init__(self, fabric: Fabric, job: PeerJob, config: Mapping[str, Any], folder: Path, rates: str) -> None:
        self.job = job
        self.n_ranks = fabric.state().spec.hosts
        path = folder / f"{job.name}.sock"
        path.unlink(missing_ok=True)
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(path))
        self._door.listen(self.n_ranks)
        self._lines = RankLines()
        self._said = ""
        environment = {
            "PYTHONPATH": str(Path(optcc.__file__).resolve().parents[1]),
            "OPTCC_SOCKET_IFNAME": "eth",
            "OPTCC_NIC_RATES": rates,
            "VIRTUAL_ENV": "",
            **job.environment,
        }
        self._thread = threading.Thread(
            target=self._run, args=(fabric, str(path), environment), name=job.name, daemon=True
        )
        self._thread.start()
        try:
            self._accept()
            everyone = self._ask({**config, "cases": [case.config for case in job.cases]}, READY_S)
            self._late_s = float(config["late_s"])
            self._limit_s = float(config["deadline_s"]) + self._late_s
        except BaseException:
            self.end()
            raise
        first = next(each for each in everyone if each["rank"] == 0)
        self.made: list[dict[str, str]] = first["cases"]

    def _run(self, fabric: Fabric, path: str, environment: Mapping[str, str]) -> None:
        launcher = "mpiexec" if self.job.launcher == "mpich" else "mpirun"
        beside = Path(self.job.python).with_name(launcher)
        try:
            result = fabric.run(
                [self.job.python, "-m", "optcc.experiments.peers_rank", path],
                mpirun=str(beside) if beside.exists() else find_mpirun(),
                arguments=self.job.arguments,
                mpi_args=self.job.extra,
                timeout_s=TEAM_S,
                env=environment,
                capture=True,
            )
            self._said = (result.stderr or result.stdout).strip()
        except OptccError as error:
            self._said = str(error)

    def _accept(self) -> None:
        deadline_s = time.monotonic() + READY_S
        self._door.settimeout(0.2)
        while len(self._lines) < self.n_ranks:
            try:
                wire = self._door.accept()[0]
            except TimeoutError:
                if not self._thread.is_alive() or time.monotonic() > deadline_s:
                    raise Hung(f"did not start: {last_words(self._said)}") from None
                continue
            self._lines.add(wire)

    def _hear(self, limit_s: float) -> list[dict[str, Any]]:
        """One line from each rank; raises Hung if one does not arrive in time, with the job's output if it exited."""
        try:
            return self._lines.hear(limit_s)
        except Exited:
            self._thread.join(END_S)
            raise Hung(f"ended: {last_words(self._said)}") from None

    def _ask(self, value: Any, limit_s: float) -> list[dict[str, Any]]:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._lines.tell(value)
        return self._hear(limit_s)

    def turn(self, number: int, limit_s: float | None = None, during: Iterator[None] | None = None) -> Turn:
        """Runs case `number` once, timed from when the last rank begins; `during` is advanced once the run has begun.

        Raises Hung if it does not end within `limit_s` (None: the deadline of the job), RuntimeFault with the message
        of a rank that failed.
        """
        limit_s = self._limit_s if limit_s is None else limit_s
        self._ask({"prepare": number}, READY_S)
        stolen, busy = stolen_jiffies(), busy_jiffies()
        start_s = time.perf_counter() + START_S
        self._lines.tell({"turn": number, "start_s": start_s, "deadline_s": limit_s + 1})
        if during is not None:
            next(during, None)
        said = self._hear(limit_s)
        steal = stolen_share(stolen, stolen_jiffies())
        busy_s = (busy_jiffies() - busy) / os.sysconf("SC_CLK_TCK")
        wrong = sum(each["wrong"] for each in self._hear(READY_S))
        failed = [each["error"] for each in said if "error" in each]
        if failed:
            raise RuntimeFault(failed[0])
        seconds = max(each["end_s"] for each in said) - start_s - self._late_s
        return Turn(seconds, steal, sum(each["cpu_s"] for each in said), busy_s, wrong)

    def end(self) -> None:
        """Ends the ranks. A rank that hangs is killed by its watchdog, or when the run is torn down."""
        with contextlib.suppress(OSError):
            self._lines.tell({"end": True})
        self._thread.join(END_S)
        self._lines.close()
        self._door.close()


def last_words(said: str) -> str:
    """The cause in the output of a job: its last line that looks like an error, else its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip(" -")]
    errors = [line for line in lines if re.match(r"(optcc: |[A-Za-z_.]*(Error|Fault|Missing|Exception)\b)", line)]
    return re.sub(r"\s+", " ", next(iter(reversed(errors or lines)), "without a word"))[:200]
