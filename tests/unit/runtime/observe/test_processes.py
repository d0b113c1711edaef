"""Real processes over TCP: one is stopped, killed, or kept busy, and `optcc status` says who, from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from optcc.errors import InputError
from optcc.runtime.observe.jobs import read_job
from optcc.runtime.observe.snapshot import JobSnapshot, snapshot

N_RANKS, CULPRIT = 3, 1
DONE_S = 40.0
PROGRAM = """
import sys, time
import numpy as np, optcc
with optcc.init(deadline_s=30.0) as comm:
    array = np.ones(20_000, np.float32)
    while True:
        comm.all_reduce(array, out=array)
        array[:] = 1
        if comm.rank == int(sys.argv[1]):
            time.sleep(float(sys.argv[2]))
"""


def watch(
    folder: Path, nap_s: float, act: Callable[[subprocess.Popen[bytes]], None], until: Callable[[JobSnapshot], bool]
) -> JobSnapshot:
    """Starts ranks, does something to one of them once all have begun, and looks until the job is as it must be."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_"))}
    environ |= {"OPTCC_SOCKET_IFNAME": "=lo", "OPTCC_STATUS_DIR": str(folder), "WORLD_SIZE": str(N_RANKS)}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000), "LOCAL_WORLD_SIZE": "3"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(CULPRIT), str(nap_s)],
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(N_RANKS)
    ]
    try:
        _look(folder, lambda job: len(job.ranks) == N_RANKS and min(each.done for each in job.ranks) > 0)
        act(ranks[CULPRIT])
        return _look(folder, until)
    finally:
        for each in ranks:
            each.kill()
            each.wait()


def _look(folder: Path, until: Callable[[JobSnapshot], bool]) -> JobSnapshot:
    end_s = time.monotonic() + DONE_S
    job = None
    while time.monotonic() < end_s:
        time.sleep(0.1)
        # A page is there before its rank has said anything.
        with suppress(InputError):
            job = snapshot(read_job(folder))
            if until(job):
                return job
    raise AssertionError(f"not seen: {job}")


@pytest.mark.slow
@pytest.mark.realtime
def test_a_stopped_process_is_named(tmp_path: Path) -> None:
    job = watch(tmp_path, 0.0, lambda each: each.send_signal(signal.SIGSTOP), lambda job: job.kind == "stopped")
    assert [rank for rank, _ in job.stragglers] == [CULPRIT]
    assert job.state == "ranks are stopped"
    assert f"rank {CULPRIT} is stopped" in job.text


@pytest.mark.slow
@pytest.mark.realtime
def test_a_killed_process_is_named_and_its_page_is_read(tmp_path: Path) -> None:
    def kill(each: subprocess.Popen[bytes]) -> None:
        each.kill()
        each.wait()

    job = watch(tmp_path, 0.0, kill, lambda job: job.kind == "gone")
    dead = next(each for each in job.ranks if each.rank == CULPRIT)
    assert (dead.process, dead.doing, dead.state) == ("gone", "gone", "running")
    assert dead.done > 0
    assert f"rank {CULPRIT} is gone" in job.text


@pytest.mark.slow
@pytest.mark.realtime
def test_a_rank_that_computes_is_named(tmp_path: Path) -> None:
    def is_waited_for(job: JobSnapshot) -> bool:
        return job.state == "stuck" and [rank for rank, _ in job.stragglers] == [CULPRIT]

    job = watch(tmp_path, 3.0, lambda _: None, is_waited_for)
    assert "it is in the program, not in a collective" in dict(job.stragglers)[CULPRIT]
    assert job.kind == "late"
