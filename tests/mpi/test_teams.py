"""Send, Recv, AllToAll and split under mpirun: over MPI, and over TCP as `optcc.init` makes it; one process a rank."""

from __future__ import annotations

import sys
from subprocess import run

import numpy as np
import pytest

import optcc
from optcc.planner import Planner
from optcc.runtime.communicator import Communicator
from optcc.runtime.transports.mpi import MpiTransport
from optcc.topology import Topology
from tests.mpi.launch import ROOT, rank_command
from tests.unit.test_point_to_point import exchanges, halves

pytestmark = pytest.mark.mpi
LAUNCH_S_MAX = 120


def trade(comm: Communicator) -> None:
    """AllToAll of equal and of unequal blocks."""
    n, me = comm.n_ranks, comm.rank
    assert comm.all_to_all(np.arange(n) + n * me).tolist() == [n * src + me for src in range(n)]
    counts = [me + dst for dst in range(n)]
    got = comm.all_to_all_v(np.full(sum(counts), me), counts)
    assert got.tolist() == [src for src in range(n) for _ in range(src + me)]


def main(transport: str) -> None:
    with optcc.init(deadline_s=30.0) if transport == "tcp" else _over_mpi() as comm:
        for body in (exchanges, halves, trade):
            body(comm)
        if comm.rank == 0:
            sys.stdout.write("all is well\n")


def _over_mpi() -> Communicator:
    transport = MpiTransport()
    return Communicator(transport, Planner(Topology.parse(f"{transport.n_ranks}@1GB/s")), deadline_s=30.0)


@pytest.mark.slow
@pytest.mark.parametrize("transport", [pytest.param("mpi", marks=pytest.mark.realtime), "tcp"])
def test_four_processes(transport: str) -> None:
    command, environment = rank_command(4, ["-m", "tests.mpi.test_teams", transport])
    done = run(command, env=environment, capture_output=True, text=True, timeout=LAUNCH_S_MAX, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all is well") == 1


if __name__ == "__main__":
    main(sys.argv[1])
