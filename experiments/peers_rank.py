"""One rank of a comparison with peers: runs cases when it is given a turn, and blocks on a socket between them.

    python -m optcc.experiments.peers_rank SOCKET      (under mpirun)

Contenders that are launched in different ways cannot share a process, so each has its own job. All jobs are up at the
same time, and `optcc.experiments.peers_on_fabric` gives them turns over a Unix socket, a line of JSON each. The ranks
of all jobs are on one machine and read one clock: a turn starts at a moment that is announced beforehand, for the last
rank perhaps later than for the others, and ends with the rank that needs longest. A watchdog kills a rank that hangs in
a library at the turn's deadline.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from fractions import Fraction
from typing import IO, Any

import click
import numpy as np

from optcc.cli import main
from optcc.errors import OptccError
from optcc.experiments.bench import Array, Contestant, Ours
from optcc.experiments.peers import Peer, make_peer
from optcc.plan import Plan
from optcc.planner import build_plan, prove, verdict_cache
from optcc.runtime.engine import Engine
from optcc.runtime.nics import inside_of, nics_of
from optcc.runtime.rendezvous import over_mpi
from optcc.runtime.transport import Transport
from optcc.runtime.transports.mpi import MpiTransport
from optcc.runtime.transports.tcp import TcpTransport
from optcc.topology import Topology

CONNECT_S = 30.0
_GRACE_S = 2.0


class Rank:
    """The cases that this rank runs, and its buffers."""

    def __init__(self, assignment: Mapping[str, Any]) -> None:
        self.mpi = MpiTransport()
        self.rank, self.n_ranks = self.mpi.rank, self.mpi.n_ranks
        self._tcp: TcpTransport | None = None
        self._engines: dict[str, Engine] = {}
        self._peers: dict[str, Peer] = {}
        self._given = assignment
        self.dtype = str(assignment["dtype"])
        self._late_s = float(assignment["late_s"]) if self.rank == self.n_ranks - 1 else 0.0
        # Mapped files, shared by the ranks of all jobs: copies would take memory and start-up time for each rank.
        self.source: Array = np.load(assignment["inputs"][self.rank], mmap_mode="r")
        self.wanted: Array = np.load(assignment["wanted"], mmap_mode="r")
        self.target = np.zeros(self.source.shape, self.source.dtype)
        self.cases: list[Contestant | None] = []

    def make(self, case: Mapping[str, Any]) -> dict[str, str]:
        """Prepares one case; the answer has the reason if it cannot be run."""
        try:
            self.cases.append(self._peer(case["peer"]) if "peer" in case else self._ours(case))
        except OptccError as error:
            self.cases.append(None)
            return {"absent": str(error)}
        return {}

    def _peer(self, name: str) -> Peer:
        if name not in self._peers:
            deadline_s = float(self._given["deadline_s"])
            self._peers[name] = make_peer(name, self.mpi.comm, self.dtype, "sum", deadline_s)
        return self._peers[name]

    def _ours(self, case: Mapping[str, Any]) -> Ours:
        plan = plan_of(case, int(self._given["size_bytes"]), self.dtype)
        verdict = prove(plan, verdict_cache())
        deadline_s = float(self._given["deadline_s"])
        return Ours(plan, self._engine(case["carrier"]), verdict, int(case["window"]), deadline_s)

    def _engine(self, carrier: str) -> Engine:
        if carrier not in self._engines:
            transport: Transport = self.mpi
            if carrier != "mpi":
                nics = nics_of(os.environ)
                transport = self._tcp = TcpTransport(over_mpi(self.mpi.comm), nics, inside=inside_of(nics, os.environ))
            self._engines[carrier] = Engine(transport)
        return self._engines[carrier]

    def prepare(self) -> None:
        """The input is in the buffer that is reduced in place."""
        np.copyto(self.target, self.source)

    def run(self, number: int, start_s: float) -> dict[str, Any]:
        """One turn: when this rank finished, and its processor time."""
        case = self.cases[number]
        assert case is not None, f"case {number} cannot be run"
        send: Array = self.target
        used = time.process_time()
        time.sleep(max(0.0, start_s + self._late_s - time.perf_counter()))
        try:
            case.run(send, self.target)
        except (OptccError, RuntimeError) as error:  # Gloo's own are RuntimeErrors, and so are MPI's
            return {"error": f"{type(error).__name__}: {error}"[:200]}
        return {"end_s": time.perf_counter(), "cpu_s": time.process_time() - used}

    def close(self) -> None:
        """Gives everything back; collective."""
        for peer in self._peers.values():
            peer.close()
        if self._tcp is not None:
            self._tcp.close()
        self.mpi.close()


def wires_of(case: Mapping[str, Any]) -> Topology:
    """The hosts of a case of ours, in payload bytes a second and with its latency."""
    wired = Topology.parse(case["topology"]).scaled(1 / Fraction(case["wire_overhead"]))
    return wired.with_latency(Fraction(case["latency"]))


def plan_of(case: Mapping[str, Any], size_bytes: int, dtype: str) -> Plan:
    """The plan that a case of ours asks for; raises an OptccError if there is none."""
    options = {name: case[name] for name in ("segments", "slots", "ports")}
    return build_plan(case["schedule"], wires_of(case), size_bytes, dtype=dtype, **options)


def serve(channel: IO[str], say: IO[str]) -> None:
    """Serves turns until the end is announced or the connection closes."""

    def answer(value: Mapping[str, Any]) -> None:
        say.write(json.dumps(value) + "\n")
        say.flush()

    assignment = json.loads(channel.readline())
    _watch(float(assignment["ready_s"]))
    rank = Rank(assignment)
    answer({"rank": rank.rank, "cases": [rank.make(case) for case in assignment["cases"]]})
    _watch(0)
    for line in channel:
        turn = json.loads(line)
        if "prepare" in turn:
            rank.prepare()
            answer({"prepared": turn["prepare"]})
            continue
        if "turn" not in turn:
            break
        _watch(float(turn["deadline_s"]))
        said = rank.run(int(turn["turn"]), float(turn["start_s"]))
        _watch(0)
        answer(said)
        answer({"wrong": 0 if "error" in said else int(np.count_nonzero(rank.target != rank.wanted))})
    _watch(_GRACE_S)
    rank.close()


def _watch(seconds: float) -> None:
    """Kills this process after `seconds` unless set again before; 0 clears the limit."""
    faulthandler.cancel_dump_traceback_later()
    if seconds > 0:
        faulthandler.dump_traceback_later(seconds, exit=True)


@click.command()
@click.argument("path", metavar="SOCKET", type=click.Path(exists=True))
def command(path: str) -> None:
    """One rank of a comparison, which is told over the Unix socket SOCKET what to do."""
    with socket.socket(socket.AF_UNIX) as wire:
        wire.settimeout(CONNECT_S)
        wire.connect(path)
        wire.settimeout(None)
        with wire.makefile("r", encoding="utf-8") as channel, wire.makefile("w", encoding="utf-8") as say:
            try:
                serve(channel, say)
            except BaseException:
                # Without _exit MPI's finalizer waits for the other ranks, which wait for this one.
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)


if __name__ == "__main__":
    main(command=command)
