"""MPI when a rank is late, stopped, or never comes: no hang, and nothing freed that MPI still reads or writes.

The tests launch this file as a program; every rank writes what it saw to a file of its own.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from optcc.collective import Collective
from optcc.commands import launched
from optcc.errors import DeadlineExceeded, RuntimeFault
from optcc.plan import Channel, Plan
from optcc.runtime import mpi_library
from optcc.runtime.communicator import Communicator
from optcc.runtime.forks import FORKED
from optcc.runtime.mpi_library import StartUp, load_mpi
from optcc.runtime.rendezvous import over_mpi
from optcc.runtime.samples import ring
from optcc.runtime.transports.mpi import MpiTransport
from optcc.verdict import Verdict
from optcc.verify.plan import verify_plan

LAUNCH_S_MAX = 60
LATE = 2


def by_hand(collective: Collective, size_bytes: int, dtype: str, reduction: str) -> tuple[Plan, Verdict]:
    plan = ring(collective.n_ranks, size_bytes, dtype, reduction, segments=2)
    return plan, verify_plan(plan)


def fail() -> str:
    """An AllReduce to which one rank comes after the deadline of the others; all of its memory is dropped here."""
    comm = Communicator(MpiTransport(), by_hand, deadline_s=0.7)
    array = np.ones(1 << 21, np.float32)
    init = comm.all_reduce_init(array, out=np.empty_like(array))
    comm.barrier()
    if comm.rank == LATE:
        time.sleep(1.5)
    try:
        init.start().wait()
    except RuntimeFault as error:
        return type(error).__name__
    finally:
        comm.close()
    return ""


def drop_after_failure() -> dict[str, Any]:
    """MPI makes progress with others' messages afterwards, in a transport of its own and at its end."""
    name = fail()
    gc.collect()
    # What was freed is used again, or no longer mapped.
    blocks = [np.full(1 << 18, 7, np.float32) for _ in range(16)]
    time.sleep(1.5)
    again = MpiTransport()
    again.barrier(10)
    again.close()
    return {"failure": name, "blocks": len(blocks)}


def close_under_way() -> dict[str, Any]:
    """Rank 0 closes with a send and a receive under way, and drops their memory; rank 1 takes the message later."""
    side, transport = MpiTransport(), MpiTransport()
    out, in_ = transport.open([Channel(0, 1, 1), Channel(1, 0, 1)])
    seen: dict[str, Any] = {}
    if side.rank == 0:
        sent, received = np.full(1 << 20, 7, np.float32), np.empty(1 << 20, np.float32)
        kept, dropped = weakref.ref(sent), weakref.ref(received)
        transport.post_send(out, sent.view(np.uint8))
        transport.post_recv(in_, received.view(np.uint8))
        transport.close()
        del sent, received, transport
        gc.collect()
        seen |= {"send kept": kept() is not None, "receive kept": dropped() is not None}
        side.barrier(10)
        side.barrier(10)
        MpiTransport().close()
        seen["send kept later"] = kept() is not None
    else:
        side.barrier(10)
        came = np.zeros(1 << 20, np.float32)
        transport.post_recv(out, came.view(np.uint8))
        seen["received"] = len(transport.poll(10))
        seen["right"] = bool((came == 7).all())
        side.barrier(10)
        MpiTransport().close()
        transport.close()
    side.close()
    return seen


def stop_before_start() -> dict[str, Any]:
    return _without_one(lambda: MpiTransport(start_s=1.0))


def stop_in_start() -> dict[str, Any]:
    """The late rank answers once, and is gone before the communicators are made."""
    wait = StartUp.wait

    def wait_late(start: StartUp, request: Any) -> None:
        if load_mpi().COMM_WORLD.Get_rank() == LATE:
            time.sleep(LAUNCH_S_MAX)
        wait(start, request)

    with patch.object(StartUp, "wait", wait_late):
        return _attempt(lambda: MpiTransport(start_s=1.0))


def stop_before_mpi() -> dict[str, Any]:
    """MPI itself cannot start, and what it does cannot be called off."""
    if os.environ["OMPI_COMM_WORLD_RANK"] == str(LATE):
        time.sleep(LAUNCH_S_MAX)
    mpi_library.START_S = 2.0
    load_mpi()
    return {}


def stop_before_command() -> dict[str, Any]:
    """As a command does it: the job ends."""
    with patch.object(launched, "MpiTransport", lambda: MpiTransport(start_s=1.0)):
        return _without_one(lambda: launched.mpi_of("mpi"))


def stop_in_run() -> dict[str, Any]:
    """One rank stops for ever in the middle of a run; the deadline of the last rank is far away."""
    transport = MpiTransport()
    comm = Communicator(transport, by_hand, deadline_s=1.5 if transport.rank < LATE else 60.0)
    array = np.full(1 << 16, comm.rank + 1, np.float32)
    init = comm.all_reduce_init(array, out=np.empty_like(array))
    init.start().wait()
    comm.barrier()
    if comm.rank == LATE:
        os.kill(os.getpid(), signal.SIGSTOP)
    begin_s = time.perf_counter()
    try:
        init.start().wait()
    except RuntimeFault as error:
        seen = {"failure": f"{type(error).__name__}: {error}", "culprits": error.culprits}
        return seen | {"seconds": time.perf_counter() - begin_s, "input": bool((array == comm.rank + 1).all())}
    return {}


def stop_before_meeting() -> dict[str, Any]:
    comm = MpiTransport().comm
    return _without_one(lambda: over_mpi(comm, timeout_s=1.0)(b"record"))


def _without_one(make: Callable[[], object]) -> dict[str, Any]:
    if load_mpi().COMM_WORLD.Get_rank() == LATE:
        time.sleep(LAUNCH_S_MAX)
        return {}
    return _attempt(make)


def _attempt(make: Callable[[], object]) -> dict[str, Any]:
    begin_s = time.perf_counter()
    try:
        make()
    except DeadlineExceeded as error:
        return {"failure": str(error), "seconds": time.perf_counter() - begin_s}
    return {}


def fork() -> dict[str, Any]:
    """A child of rank 0 uses and closes what it has inherited."""
    comm = Communicator(MpiTransport(), by_hand, deadline_s=20)
    data = np.ones(1 << 16, np.float32)
    before = float(comm.all_reduce(data).max())
    refused = ""
    if comm.rank == 0:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                comm.all_reduce(data)
            except RuntimeFault as error:
                comm.close()
                os.write(write_end, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        os.close(write_end)
        refused = os.read(read_end, 1000).decode()
    after = float(comm.all_reduce(data).max())
    comm.barrier()
    comm.close()
    return {"before": before, "after": after, "refused": refused}


CASES = (
    *(drop_after_failure, close_under_way, stop_before_start, stop_in_start, stop_before_meeting),
    *(stop_before_mpi, stop_before_command, stop_in_run, fork),
)


def main(folder: Path, case: str) -> None:
    seen = {each.__name__: each for each in CASES}[case]()
    rank = load_mpi().COMM_WORLD.Get_rank()
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    if case.startswith("stop_"):
        # MPI's own end would wait for the rank that does not come. The others have written within a second.
        time.sleep(1)
        load_mpi().COMM_WORLD.Abort(DeadlineExceeded.exit_code)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    sys.exit()

import pytest  # noqa: E402 - a rank under mpirun needs no pytest, and its import takes as long as its work

from tests.mpi.launch import ROOT, rank_command  # noqa: E402

pytestmark = pytest.mark.mpi


def launch(n_ranks: int, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    line, environment = rank_command(n_ranks, arguments)
    return subprocess.run(
        line, env=environment, capture_output=True, text=True, timeout=LAUNCH_S_MAX, check=False, cwd=ROOT
    )


def reports(ranks: Sequence[int], n_ranks: int, case: str, folder: Path, code: int = 0) -> list[dict[str, Any]]:
    done = launch(n_ranks, [__file__, str(folder), case])
    assert done.returncode == code, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in ranks]


def test_nothing_is_freed_that_mpi_still_reads_or_writes(tmp_path: Path) -> None:
    failures = [each["failure"] for each in reports(range(3), 3, "drop_after_failure", tmp_path)]
    assert failures[LATE] == "RankLost"
    assert "DeadlineExceeded" in failures and "" not in failures


def test_buffers_are_kept_until_their_message_is_complete(tmp_path: Path) -> None:
    first, second = reports(range(2), 2, "close_under_way", tmp_path)
    assert first == {"send kept": True, "receive kept": False, "send kept later": False}
    assert second == {"received": 1, "right": True}


@pytest.mark.parametrize(
    "case",
    [
        "stop_in_start",
        *(
            pytest.param(each, marks=[pytest.mark.slow, pytest.mark.realtime])
            for each in ("stop_before_start", "stop_before_meeting")
        ),
    ],
)
def test_a_rank_that_does_not_come_is_named_after_the_deadline(case: str, tmp_path: Path) -> None:
    ranks = [0, 1, 3]
    seen = reports(ranks, 4, case, tmp_path, DeadlineExceeded.exit_code)
    for rank, each in zip(ranks, seen, strict=True):
        assert each["failure"] == f"rank {rank}: waited 1 s in vain for rank {LATE} to start"
        assert each["seconds"] < 10


def test_all_name_the_rank_that_is_stopped_in_a_run(tmp_path: Path) -> None:
    seen = reports((0, 1, 3), 4, "stop_in_run", tmp_path, DeadlineExceeded.exit_code)
    for each in seen:
        assert each["failure"].endswith(f"rank {LATE} is lost: it does not answer")
        assert each["culprits"] == [LATE] and each["input"] and each["seconds"] < 6.0
    assert [each["failure"].split(":")[0] for each in seen] == ["DeadlineExceeded", "DeadlineExceeded", "RankLost"]


def test_a_rank_that_does_not_come_to_mpi_ends_the_job(tmp_path: Path) -> None:
    done = launch(3, [__file__, str(tmp_path), "stop_before_mpi"])
    assert done.returncode == DeadlineExceeded.exit_code
    assert "Timeout (0:00:02)!" in done.stderr and "in load_mpi" in done.stderr


@pytest.mark.slow
def test_a_command_ends_the_job_if_a_rank_does_not_come(tmp_path: Path) -> None:
    done = launch(3, [__file__, str(tmp_path), "stop_before_command"])
    assert done.returncode == DeadlineExceeded.exit_code
    assert f"waited 1 s in vain for rank {LATE} to start" in done.stderr


def test_a_forked_child_has_no_part_in_the_job(tmp_path: Path) -> None:
    first, second = reports(range(2), 2, "fork", tmp_path)
    assert first == {"before": 2.0, "after": 2.0, "refused": FORKED}
    assert second == {"before": 2.0, "after": 2.0, "refused": ""}
