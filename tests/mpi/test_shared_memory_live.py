"""Ranks that are processes of this host and share memory: every collective and type, and a rank that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optcc.collective import DTYPE_BYTES

ROOT = Path(__file__).resolve().parents[2]
DONE_S = 120.0
PROGRAM = """
import json, os, sys
from pathlib import Path
import numpy as np
from optcc.collective import Collective, check_dtype
from optcc.errors import OptccError
from optcc.experiments.bench_messages import BenchMessage
from optcc.planner import build_plan
from optcc.runtime import host_memory
from optcc.runtime.engine import Engine
from optcc.runtime.nics import HostNic
from optcc.runtime.meeting_file import in_file
from optcc.runtime.transports.tcp import TcpTransport
from optcc.topology import Topology
from optcc.verify.plan import verify_plan

given = json.loads(sys.argv[1])
rank, n, size = given["rank"], given["n_ranks"], given["size"]
host_memory.FOLDER = given["folder"]
nics = [HostNic("r0", "127.0.1.1")]
transport = TcpTransport(in_file(Path(given["meet"]), rank, n, timeout_s=60), nics, inside=HostNic("here", "127.0.0.1"))
path = host_memory.share_memory(transport)
assert path.hosts == (0,) * n, path
engine, wrong, n_shared = Engine(transport), [], 0
try:
    for schedule, name in given["schedules"]:
        for dtype in given["dtypes"]:
            collective = Collective(name, n, 0)
            plan = build_plan(schedule, Topology.parse(f"{n}@1GB/s"), size, dtype=dtype, collective=collective)
            prepared = engine.prepare(plan, verify_plan(plan), deadline_s=60)
            n_shared += prepared.shared is not None
            message = BenchMessage(plan.collective, rank, plan.size_bytes // check_dtype(dtype), dtype, "sum", True)
            runs = 0
            while runs < 2 or given["for_ever"]:
                prepared.start(*message.arrays("out" if runs % 2 else given["mode"])).wait()
                if message.wrong():
                    wrong.append([schedule, dtype, runs])
                if runs == 1:
                    print("running", flush=True)
                runs += 1
            prepared.close()
    error, culprits = "", []
except OptccError as fault:
    error, culprits = f"{type(fault).__name__}: {fault}", list(fault.culprits)
sent = transport.inside.sent_bytes
engine.close()
print(json.dumps({"wrong": wrong, "shared": n_shared, "error": error, "culprits": culprits, "sent": sent}), flush=True)
"""
SCHEDULES = [
    ("ring", "allreduce"),
    ("ring-reduce-scatter", "reducescatter"),
    ("ring-all-gather", "allgather"),
    ("chain-broadcast", "broadcast"),
    ("chain-reduce", "reduce"),
    ("direct-all-to-all", "alltoall"),
    ("direct-gather", "gather"),
    ("direct-scatter", "scatter"),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where segments of a job have their names; when it is over, there is none."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="optcc-test-") as made:
        yield Path(made)
        assert list(Path(made).iterdir()) == []


def start(n_ranks: int, folder: Path, meet: Path, **more: Any) -> list[subprocess.Popen[str]]:
    given = {"n_ranks": n_ranks, "folder": str(folder), "meet": str(meet / "meet"), "for_ever": False, "mode": "out"}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps({**given, **more, "rank": rank})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(n_ranks)
    ]


def results(ranks: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """What each says in the end."""
    try:
        said = [rank.communicate(timeout=DONE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(not rank.returncode for rank in ranks), said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def test_collectives_are_right_and_send_no_data_by_sockets(folder: Path, tmp_path: Path) -> None:
    size = 3 << 18
    for each in results(start(3, folder, tmp_path, size=size, schedules=SCHEDULES, dtypes=["float32"])):
        assert (each["wrong"], each["error"], each["shared"]) == ([], "", len(SCHEDULES))
        assert each["sent"] < size / 4


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["out", "in"])
def test_every_type_is_right_in_every_collective(folder: Path, tmp_path: Path, mode: str) -> None:
    """In a length that leaves odd pieces."""
    given = {"size": (5 << 18) + 5 * 8, "schedules": SCHEDULES, "dtypes": list(DTYPE_BYTES), "mode": mode}
    for each in results(start(5, folder, tmp_path, **given)):
        assert (each["wrong"], each["error"]) == ([], "") and each["shared"] == len(SCHEDULES) * len(DTYPE_BYTES)


def test_a_rank_that_is_killed_is_named_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """In the middle of collectives: the names of segments are gone since the plan was made ready."""
    given = {"size": 3 << 21, "schedules": SCHEDULES[:1], "dtypes": ["float32"], "for_ever": True}
    ranks = start(3, folder, tmp_path, **given)
    try:
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "running\n", rank.stderr
        assert list(folder.iterdir()) == []
        time.sleep(0.1)
        ranks[1].send_signal(signal.SIGKILL)
        ranks[1].wait()
        left = results([ranks[0], ranks[2]])
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    for each in left:
        assert (each["wrong"], each["culprits"]) == ([], [1]) and "rank 1" in each["error"], each
