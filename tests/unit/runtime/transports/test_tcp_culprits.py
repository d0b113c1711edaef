"""Rings over TCP in which one rank dies, stops or raises in the middle of a collective: all others name that one.

Every rank is a process of its own; the fault happens while a rank reduces what has come from its neighbour.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

DONE_S = 60.0
PROGRAM = """
import json, os, signal, sys, time
import numpy as np
from optcc.errors import RuntimeFault
from optcc.runtime.engine import Engine
from optcc.runtime.kernels import NumpyKernels
from optcc.runtime.nics import HostNic
from optcc.runtime.meeting_file import in_file
from optcc.runtime.samples import ring
from optcc.runtime.transports.tcp import TcpTransport
from optcc.verify.plan import verify_plan

given = json.loads(sys.argv[1])
rank, n, at, fault = given["rank"], given["n_ranks"], given["at"], given["fault"]

def raise_(error):
    raise error

FAULTS = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "os._exit": lambda: os._exit(5),
    "sys.exit": lambda: sys.exit(6),
    "ValueError": lambda: raise_(ValueError("3 is\\nodd")),
    "MemoryError": lambda: raise_(MemoryError("no room")),
}

n_calls = 0

class Faulty(NumpyKernels):
    def __init__(self, dtype, reduction):
        super().__init__(dtype, reduction)
        reduce = self.reduce

        def faulty(target, source):
            global n_calls
            n_calls += 1
            if rank == at and n_calls == 4 * (n - 1) + 2 and fault in FAULTS:
                FAULTS[fault]()
            reduce(target, source)

        self.reduce = faulty

nics = [HostNic(f"r{i}", f"127.0.{i + 1}.{rank + 1}") for i in range(2)]
transport = TcpTransport(in_file(given["path"], rank, n, timeout_s=30), nics, chunk_bytes=1 << 16)
engine = Engine(transport)
plan = ring(n, 1 << 20)
prepared = engine.prepare(
    plan,
    verify_plan(plan),
    deadline_s=given["deadline_s"],
    kernels=Faulty("float32", "sum"),
)
data = np.full(1 << 18, rank + 1, np.float32)
recv = np.empty_like(data)
began_s = time.monotonic()
seen = {}
try:
    for turn in range(400):
        if fault == "cancel" and turn == 4 and rank == at:
            (run := prepared.start(data, recv)).cancel("enough")
            run.wait()
        prepared.start(data, recv).wait()
        began_s = time.monotonic()
except (RuntimeFault, ValueError, MemoryError) as error:
    seen = {"type": type(error).__name__, "what": str(error), "culprits": getattr(error, "culprits", ())}
    seen |= {"cause": type(error.__cause__).__name__, "nics": getattr(error, "nics", ())}
seen |= {"seconds": time.monotonic() - began_s, "input": bool((data == rank + 1).all())}
engine.close()
print(json.dumps(seen))
"""


def run(folder: Path, n_ranks: int, at: int, fault: str, *, deadline_s: float = 20.0) -> list[dict[str, Any]]:
    """What each rank but the faulty one saw; also what that one saw, if it lived."""
    given = {"n_ranks": n_ranks, "at": at, "fault": fault, "deadline_s": deadline_s, "path": str(folder / "met")}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps({"rank": rank, **given})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(n_ranks)
    ]
    seen: list[dict[str, Any]] = []
    try:
        until_s = time.monotonic() + DONE_S
        for rank, process in enumerate(ranks):
            if fault == "SIGSTOP" and rank == at:
                seen.append({})
                continue
            out, err = process.communicate(timeout=max(1.0, until_s - time.monotonic()))
            assert out or rank == at, err
            seen.append(json.loads(out) if out else {"code": process.returncode})
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    print(json.dumps(seen, indent=1))
    return seen


def survivors(seen: list[dict[str, Any]], at: int) -> list[dict[str, Any]]:
    others = [each for rank, each in enumerate(seen) if rank != at]
    assert all(each["input"] for each in others), "inputs are as they were"
    return others


@pytest.mark.battery(22)
@pytest.mark.parametrize(
    ("n_ranks", "at"),
    [(3, 2), *(pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.realtime]) for case in ((3, 0), (5, 1)))],
)
def test_all_name_the_rank_that_is_killed(n_ranks: int, at: int, tmp_path: Path) -> None:
    seen = run(tmp_path, n_ranks, at, "SIGKILL")
    assert seen[at] == {"code": -signal.SIGKILL}
    for rank, each in enumerate(seen):
        if rank != at:
            why = "its process has ended: it refuses connections"
            assert (each["type"], each["what"]) == ("RankLost", f"rank {rank}: rank {at} is lost: {why}")
            assert each["culprits"] == [at] and each["seconds"] < 8.0
    assert survivors(seen, at)


@pytest.mark.battery(23)
@pytest.mark.parametrize("n_ranks", [3, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.realtime])])
def test_all_name_the_rank_that_is_stopped_for_ever(n_ranks: int, tmp_path: Path) -> None:
    for each in survivors(run(tmp_path, n_ranks, 1, "SIGSTOP", deadline_s=2.0), 1):
        assert each["type"] in ("DeadlineExceeded", "RankLost"), each
        assert each["what"].endswith("rank 1 is lost: it does not answer") and each["culprits"] == [1]
        assert 1.9 < each["seconds"] < 12.0


@pytest.mark.battery(24)
@pytest.mark.parametrize(
    ("n_ranks", "fault", "cause"),
    [
        (3, "ValueError", "ValueError: 3 is odd"),
        pytest.param(5, "ValueError", "ValueError: 3 is odd", marks=[pytest.mark.slow, pytest.mark.realtime]),
        pytest.param(3, "MemoryError", "MemoryError: no room", marks=[pytest.mark.slow, pytest.mark.realtime]),
    ],
)
def test_all_learn_the_exception_that_ended_the_run(n_ranks: int, fault: str, cause: str, tmp_path: Path) -> None:
    seen = run(tmp_path, n_ranks, 1, fault)
    assert seen[1]["type"] == fault
    for rank, each in enumerate(seen):
        if rank != 1:
            assert (each["type"], each["what"]) == ("RankLost", f"rank {rank}: rank 1 is lost: {cause}")
            assert each["culprits"] == [1] and each["seconds"] < 8.0


def test_all_learn_that_a_run_was_cancelled(tmp_path: Path) -> None:
    seen = run(tmp_path, 3, 2, "cancel")
    assert (seen[2]["type"], seen[2]["what"]) == ("Cancelled", "rank 2: enough")
    for rank, each in enumerate(seen[:2]):
        assert each["what"] == f"rank {rank}: rank 2 is lost: Cancelled: rank 2: enough"


@pytest.mark.parametrize(
    ("fault", "code", "why"),
    [
        ("os._exit", 5, "its process has ended: it refuses connections"),
        ("sys.exit", 6, "SystemExit: 6"),
    ],
)
def test_all_name_the_rank_whose_process_ends(fault: str, code: int, why: str, tmp_path: Path) -> None:
    seen = run(tmp_path, 3, 1, fault)
    assert seen[1] == {"code": code}
    for rank, each in enumerate(seen):
        if rank != 1:
            assert (each["type"], each["what"]) == ("RankLost", f"rank {rank}: rank 1 is lost: {why}")
