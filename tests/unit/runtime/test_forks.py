"""Processes that are forked from a rank: the job goes on without them, and ends at once if the rank itself dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from optcc.runtime.forks import FORKED

PROGRAM = """
import json, os, subprocess, sys, time
from pathlib import Path
import numpy as np
from optcc.errors import OptccError
from optcc.runtime.communicator import Communicator
from optcc.runtime.nics import HostNic
from optcc.runtime.meeting_file import in_file
from optcc.runtime.samples import ring
from optcc.runtime.transports.tcp import TcpTransport
from optcc.verdict import Verdict
from optcc.verify.plan import verify_plan

def by_hand(collective, *what):
    plan = ring(collective.n_ranks, *what)
    return plan, verify_plan(plan)

def attempt(work, *args):
    try:
        return repr(work(*args))
    except OptccError as error:
        return f"{type(error).__name__}: {error}"

rank, folder, mode = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
nics = [HostNic(f"r{i}", f"127.0.{i + 1}.{rank + 1}", 1, 1) for i in range(2)]
transport = TcpTransport(in_file(folder / "met", rank, 2), nics)
comm = Communicator(transport, by_hand, deadline_s=10)
data = np.ones(1 << 18, np.float32)
seen = {"before": float(comm.all_reduce(data).max())}

def use_what_is_inherited(handle):
    child = {
        "collective": attempt(comm.all_reduce, data),
        "barrier": attempt(comm.barrier),
        "handle": attempt(handle.wait),
        "poll": attempt(transport.poll, 0.0),
        "allgather": attempt(transport.allgather, b"x"),
        "abort": attempt(comm.abort, "on purpose"),
        "transport's abort": attempt(transport.abort, "on purpose"),
        "close": attempt(comm.close),
        "transport's close": attempt(transport.close),
    }
    (folder / "child.json").write_text(json.dumps(child))

if mode == "use":
    handle = comm.start_all_reduce(data)
    if rank == 0:
        pid = os.fork()
        if not pid:
            try:
                use_what_is_inherited(handle)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
    seen["during"] = float(handle.result().max())
    seen["after"] = [float(comm.all_reduce(data).max()) for _ in range(3)]
    shown = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, stdin=-3, stderr=-3, stdout=-1, text=True)
    seen["inherited"] = shown.stdout.count("socket:") + shown.stdout.count("eventpoll")
    comm.barrier()
    comm.close()
elif rank == 1:
    pid = os.fork()
    if not pid:
        time.sleep(20)
        os._exit(0)
    (folder / "child").write_text(str(pid))
    time.sleep(0.3)
    os.kill(os.getpid(), 9)
else:
    begin_s = time.perf_counter()
    seen["failure"] = attempt(comm.all_reduce, data)
    seen["seconds"] = time.perf_counter() - begin_s
(folder / f"{rank}.json").write_text(json.dumps(seen))
"""
RUN_S_MAX = 60


def run(folder: Path, mode: str) -> list[int]:
    """The exit codes of both ranks."""
    processes = [subprocess.Popen([sys.executable, "-c", PROGRAM, str(rank), str(folder), mode]) for rank in range(2)]
    try:
        return [process.wait(RUN_S_MAX) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((folder / "child").read_text()), signal.SIGKILL)


def read(folder: Path, name: str) -> dict[str, Any]:
    seen: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return seen


def test_a_child_keeps_no_dead_rank_alive(tmp_path: Path) -> None:
    assert run(tmp_path, "die") == [0, -signal.SIGKILL]
    seen = read(tmp_path, "0")
    assert seen["failure"].startswith("RankLost: ")
    assert seen["seconds"] < 5


def test_a_child_has_no_part_in_the_job(tmp_path: Path) -> None:
    assert run(tmp_path, "use") == [0, 0]
    for rank in ("0", "1"):
        assert read(tmp_path, rank) == {"before": 2.0, "during": 2.0, "after": [2.0] * 3, "inherited": 0}
    refused = f"RuntimeFault: {FORKED}"
    child = read(tmp_path, "child")
    uses = ("collective", "barrier", "handle", "poll", "allgather")
    assert {use: child[use] for use in uses} == dict.fromkeys(uses, refused)
    assert all(told == "None" for use, told in child.items() if use not in uses)
    assert len(child) == 9
