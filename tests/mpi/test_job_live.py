"""`optcc.init` under mpirun, on one host and on emulated ones, and commands that are started without it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from optcc.experiments.fabric import Fabric, FabricSpec, run_local_job
from optcc.experiments.record import Record
from tests.mpi.launch import mpirun

pytestmark = pytest.mark.mpi

PROGRAM = """
import numpy as np, optcc
with optcc.init() as comm:
    total = comm.all_reduce(np.full(100_000, comm.rank + 1.0, np.float32))
    print(comm.rank, comm.n_ranks, total.min(), total.max(), flush=True)
"""


def test_the_ranks_of_mpirun_are_those_of_the_job(tmp_path: Path) -> None:
    said = run_local_job([sys.executable, "-c", PROGRAM], 3, timeout_s=60)
    assert sorted(said.split("\n")) == ["", *(f"{rank} 3 6.0 6.0" for rank in range(3))]


@pytest.mark.netns
def test_a_program_on_hosts_of_which_nobody_says_anything(tmp_path: Path) -> None:
    with Fabric.up(FabricSpec.parse("3x2@200Mbit/s", name=f"job-{os.getpid()}")) as fabric:
        fabric.fail("h2.eth1")
        command = ["env", "-u", "OPTCC_TOPOLOGY", sys.executable, "-c", PROGRAM]
        before = fabric.control_bytes()
        done = fabric.run(command, capture=True, timeout_s=60)
        sneaked = fabric.control_bytes() - before
    assert done.exit_code == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", *(f"{rank} 3 6.0 6.0" for rank in range(3))]
    assert sneaked < 400_000, "data go over the NICs"


OPTCC = (sys.executable, "-m", "optcc")


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        pytest.param(("-b", "1x"), "size '1x'", marks=pytest.mark.slow),
        (("--schedule", "none"), "schedule 'none': must be one of"),
    ],
)
def test_an_error_that_every_rank_meets_is_said_once(wrong: tuple[str, str], what: str) -> None:
    done = mpirun("-n", "3", *OPTCC, "bench", *wrong)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("optcc: ")]
    assert len(lines) == 1 and what in lines[0], done.stderr


@pytest.mark.slow
def test_an_error_that_one_rank_alone_meets_is_said_and_ends_the_job() -> None:
    """A host without the NIC; its rank said nothing, and the others waited for it."""
    words = (*OPTCC, "bench", "--transport", "tcp", "-b", "1K", "-n", "1")
    alone = ("-n", "1", "env", "OPTCC_SOCKET_IFNAME=nope", *words)
    done = mpirun("-n", "2", "env", "OPTCC_SOCKET_IFNAME==lo", *words, ":", *alone)
    assert done.returncode == 2
    assert "optcc: rank 2: OPTCC_SOCKET_IFNAME 'nope': must leave an interface that is up" in done.stderr


def test_a_command_refuses_to_be_several_jobs_of_one_rank(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}
    done = subprocess.run(
        [sys.executable, "-m", "optcc", "bench", "-b", "4K", "-n", "1"],
        env={**clean, "RANK": "0", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "WORLD_SIZE says 2 ranks, MPI has started 1" in done.stderr


def test_a_job_of_one_rank_says_one_line_when_it_fails() -> None:
    """Open MPI added eight of its own: that its process was aborted."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}
    words = [*OPTCC, "bench", "-b", "1000000G", "-n", "1"]
    done = subprocess.run(words, env=clean, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "out of memory" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.netns
def test_hosts_that_lose_different_rails_go_on_through_others_and_then_by_plan(tmp_path: Path) -> None:
    """h0 and h1 share no rail any more; what is in flight goes through h2 or h3, and new plans send nothing between
    them."""
    record = tmp_path / "record.json"
    with Fabric.up(FabricSpec.parse("4x2@200Mbit/s", name=f"paths-{os.getpid()}")) as fabric:
        bench = [*OPTCC, "bench", "--transport", "tcp", "--schedule", "auto", "-b", "8M", "-n", "30", "-w", "1"]
        command = ["env", "-u", "OPTCC_TOPOLOGY", *bench, "-J", str(record)]

        def carried() -> int:
            return fabric.status().hosts[0].nics[0].tx_bytes

        before = carried()

        def sever() -> None:
            # The measurement carries less than a second's worth, 25 MB; a run some 8 MB.
            until_s = time.monotonic() + 60
            while carried() < before + (48 << 20) and time.monotonic() < until_s:
                time.sleep(0.05)
            fabric.fail("h0.eth0")
            fabric.fail("h1.eth1")

        failing = threading.Thread(target=sever)
        failing.start()
        done = fabric.run(command, capture=True, timeout_s=100)
        failing.join()
    assert done.exit_code == 0, done.stderr
    assert "# Out of bounds values : 0 OK" in done.stdout
    row = Record.read(record).rows[0]
    print(row.detours, row.plan_changes, row.out_of_place)
    assert row.detours > 0 and f"# Through other hosts  : {row.detours} connections" in done.stdout
    assert row.plan_changes > 0
    assert "no rail to rank 1 is left: what goes there goes through other ranks" in done.stderr
