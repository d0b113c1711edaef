"""Records leave their ring for another process, which may be killed at any time; policies change meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optcc.cli import run
from optcc.codec import read_plan
from optcc.errors import CodecError, InputError
from optcc.planner import Planner
from optcc.runtime.communicator import Communicator
from optcc.runtime.taps.control import ask_for, ring_path
from optcc.runtime.taps.drain import JobDrain, RankDrain
from optcc.runtime.taps.findings import check_stages
from optcc.runtime.taps.policy import POINTS, Tap
from optcc.runtime.taps.records import ChunkRecord
from optcc.runtime.taps.ring import RingReader, RingWriter
from optcc.runtime.taps.sinks import CallbackSink, read_records, sink_for
from optcc.runtime.transports.loopback import LoopbackTransport, run_ranks
from optcc.topology import Topology

JOB = "tapped"
SIZE = 1000
FULL = Tap(("full",), points=POINTS)
KILLED_TURNS = 12
KILLED_BEFORE = 100


def run_job(
    folder: Path, *taps: Tap, n_runs: int = 3, ring_bytes: int = 1 << 20, between: Callable[[int], Any] | None = None
) -> list[dict[str, int]]:
    """AllReduces of three ranks; `between` is called at rank 0 before each of them. The counters, by rank."""
    environ = {"OPTCC_STATUS_DIR": str(folder)}

    def body(rank: int, transport: LoopbackTransport) -> dict[str, int]:
        with Communicator(transport, Planner(Topology.parse("3@1GB/s"), schedules={"allreduce": "ring"})) as comm:
            observer = comm.observe(environ, JOB)
            assert observer is not None
            set_ = comm.tap(*taps, ring_bytes=ring_bytes, environ=environ, job=JOB)
            for number in range(n_runs):
                if between is not None and rank == 0:
                    between(number)
                assert comm.all_reduce(np.full(SIZE, rank + 1.0, np.float32))[7] == 6.0
            comm.barrier()
            return set_.counters

    return run_ranks(3, body)


def drained(folder: Path) -> list[ChunkRecord]:
    found: list[ChunkRecord] = []
    JobDrain(folder, JOB, [CallbackSink(found.extend)]).run(poll_s=0.001)
    return found


@pytest.mark.parametrize("suffix", [".npz", ".parquet", ".arrow", ".arrows"])
def test_files_have_every_record(suffix: str, tmp_path: Path) -> None:
    if suffix != ".npz":
        pytest.importorskip("pyarrow")
    folder, path = tmp_path / "pages", tmp_path / f"records{suffix}"
    counters = run_job(folder, FULL, Tap(("norms", "guard")))
    (plan_file,) = folder.glob("*.plan")
    plan = read_plan(plan_file.read_bytes())
    found: list[ChunkRecord] = []
    JobDrain(folder, JOB, [sink_for(path), CallbackSink(found.extend)]).run()
    assert len(found) == sum(each["records"] for each in counters) > 0
    assert read_records(path) == found
    checks = check_stages(plan, found)
    assert [check.run for check in checks] == [(1, 1), (1, 2), (1, 3)]
    assert all(not check.wrong for check in checks)
    # Nothing is left: the job is over, and all of it was taken.
    assert list(folder.iterdir()) == []


def both(first: Callable[..., None], then: Callable[..., None]) -> Callable[..., None]:
    """Calls one and then the other; the first only once."""
    calls = [first]

    def call(*arguments: Any) -> None:
        if calls:
            calls.pop()(*arguments)
        then(*arguments)

    return call


def test_the_command_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPTCC_STATUS_DIR", str(tmp_path))
    monkeypatch.setattr(os, "nice", lambda by: by)
    run_job(tmp_path, FULL, n_runs=1)
    path = tmp_path / "out.npz"
    assert run(["observe", JOB[:3], "-o", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == len(read_records(path)) > 0

    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    # An interrupt within a batch ends the drain behind it: what the file has is what is told.
    run_job(tmp_path, FULL, n_runs=1)
    monkeypatch.setattr(RingReader, "take", both(interrupt, RingReader.take))
    assert run(["observe", JOB[:3], "-o", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == len(read_records(path)) > 0
    assert run(["observe", "other", "-o", str(path)]) == 2
    assert "job 'other': must be one on this host" in capsys.readouterr().err


@pytest.mark.slow
def test_an_operator_changes_what_is_taken_while_the_job_runs(tmp_path: Path) -> None:
    """What the file says is done by ranks that have no taps of their own; nothing any more when it says so."""
    seen: list[int] = []

    def between(number: int) -> None:
        if number == 0:
            ask_for(tmp_path, JOB, [Tap(("checksum",))], 1 << 16)
        if number == 100:
            ask_for(tmp_path, JOB, [])
        if number in (100, 200):
            time.sleep(0.25)
        seen.append(number)

    environ = {"OPTCC_STATUS_DIR": str(tmp_path)}

    def body(rank: int, transport: LoopbackTransport) -> None:
        with Communicator(transport, Planner(Topology.parse("3@1GB/s"), schedules={"allreduce": "ring"})) as comm:
            comm.observe(environ, JOB)
            for number in range(300):
                if rank == 0:
                    between(number)
                comm.all_reduce(np.ones(SIZE, np.float32))
                if number < 100 and rank == 0:
                    time.sleep(0.003)

    run_ranks(3, body)
    records = drained(tmp_path)
    runs = {record.run for record in records if record.rank == 1}
    assert {record.what for record in records} == {"checksum"}
    assert runs
    assert max(runs) < 250


def test_a_ring_has_one_drain(tmp_path: Path) -> None:
    run_job(tmp_path, FULL, n_runs=1)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    drain = RankDrain(ring_path(tmp_path, JOB, 0))
    drain.reader.words[18] = other.pid
    drain.reader.words[19] = _start_ms(other.pid)
    with pytest.raises(InputError, match=f"rank 0: process {other.pid} drains it"):
        RankDrain(ring_path(tmp_path, JOB, 0))
    other.kill()
    other.communicate()
    assert RankDrain(ring_path(tmp_path, JOB, 0)).take([]) > 0


def _start_ms(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(int(fields[19]) / os.sysconf("SC_CLK_TCK") * 1000)


def test_what_a_sink_refuses_stays_in_the_ring(tmp_path: Path) -> None:
    run_job(tmp_path, FULL, n_runs=1)

    def refuse(records: Any) -> None:
        raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        JobDrain(tmp_path, JOB, [CallbackSink(refuse)]).run()
    assert drained(tmp_path)


@pytest.mark.parametrize("word", range(3))
def test_a_torn_ring_is_refused(word: int, tmp_path: Path) -> None:
    run_job(tmp_path, FULL, n_runs=1)
    path = ring_path(tmp_path, JOB, 0)
    data = bytearray(path.read_bytes())
    data[8192 + 8 * word : 8200 + 8 * word] = b"\xff" * 8
    path.write_bytes(data)
    with pytest.raises(CodecError, match="ring: block at 0"):
        drained(tmp_path)


def test_a_block_never_crosses_the_end() -> None:
    """A block that fits the ring finds room sooner or later, wherever the last one ended."""
    ring = RingWriter(None, b"{}", 1 << 12)
    words = ring.words
    for n_bytes in (64, 4096, 2048, 3072, 4096, 128, 4032):
        for _ in range(3):
            begin = ring.reserve(n_bytes, 1, 1, 1, 1, 0.0)
            words[1] = words[0]
            if begin is not None:
                break
        assert begin is not None
        assert begin >= 8192
        assert begin + n_bytes <= 8192 + ring.capacity


_DRAIN = """
import sys
from pathlib import Path
from optcc.runtime.taps.drain import JobDrain
from optcc.runtime.taps.sinks import CallbackSink
print("ready", flush=True)
JobDrain(Path(sys.argv[1]), sys.argv[2], [CallbackSink(lambda records: None)]).run(poll_s=0.001)
"""


@pytest.mark.slow
@pytest.mark.parametrize("when_full", ["drop", "sample", "block"])
def test_a_killed_drain_costs_the_job_nothing(when_full: str, tmp_path: Path) -> None:
    """The job goes on, nobody waits for the drain, and what it did not take is in the ring or counted."""
    command = [sys.executable, "-c", _DRAIN, str(tmp_path), JOB]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as drain:
        assert drain.stdout is not None
        drain.stdout.readline()
        killed_at: list[float] = []

        def between(number: int) -> None:
            if number == 200:
                drain.send_signal(signal.SIGKILL)
                drain.wait()
                killed_at.append(time.monotonic())

        tap = Tap(("full",), points=POINTS, when_full=when_full, block_s=30.0)  # type: ignore[arg-type]
        n_runs = 600
        counters = run_job(tmp_path, tap, n_runs=n_runs, ring_bytes=1 << 18, between=between)
    assert time.monotonic() - killed_at[0] < 15.0
    per_run = 2 + 3 * 4
    for each in counters:
        assert each["records"] + each["full_records"] == n_runs * per_run
        assert each["full_records"] > 0
    left = drained(tmp_path)
    assert left
    for rank in range(3):
        assert max(record.run for record in left if record.rank == rank) <= n_runs


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.parametrize("when_full", ["drop", "sample", "block"])
def test_runs_take_no_longer_once_the_drain_is_killed(when_full: str, tmp_path: Path) -> None:
    """The median run since the drain was killed takes what one does in a job that never had a drain (with one that
    polls, processors do not sleep, so runs beside it may be shorter than either); and no run waits, also where the tap
    says that it may wait for half a minute. The medians of equal jobs differ by half, as threads meet differently in
    each of them, and few are quick: longer are all if the quickest job of a kind is, and the median one."""
    tap = Tap(("full",), points=POINTS, when_full=when_full, block_s=30.0)  # type: ignore[arg-type]
    # Without a drain nothing makes room: a run that blocks would wait for it.
    alone = Tap(("full",), points=POINTS, when_full="drop")
    never_s, last_s = list[float](), list[float]()  # the median run of each job
    for turn in range(KILLED_TURNS):  # in turns, as the machine is faster at one time than at another
        took_s, _ = timed(tmp_path / f"alone{turn}", alone, 4 * KILLED_BEFORE, lambda number: None)
        never_s.append(float(np.median(took_s[2 * KILLED_BEFORE :])))
        after_s, counters = timed_with_a_killed_drain(tmp_path / f"{turn}", tap)
        last_s.append(float(np.median(after_s[KILLED_BEFORE:])))  # the ring has filled up by then
        assert after_s.max() < 1.0
        assert all(each["full_records"] > 0 for each in counters)
    longer = [of_jobs(last_s) > 1.25 * of_jobs(never_s) for of_jobs in (min, np.median)]
    assert not all(longer), (never_s, last_s)


def timed_with_a_killed_drain(
    folder: Path, tap: Tap
) -> tuple[np.ndarray[Any, np.dtype[np.float64]], list[dict[str, int]]]:
    """What the runs take once the drain of the job has been killed, and the counters."""
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", _DRAIN, str(folder), JOB], stdout=subprocess.PIPE) as drain:
        assert drain.stdout is not None
        drain.stdout.readline()

        def between(number: int) -> None:
            if number == KILLED_BEFORE:
                drain.send_signal(signal.SIGKILL)
                drain.wait()

        took_s, counters = timed(folder, tap, 4 * KILLED_BEFORE, between)
    return took_s[KILLED_BEFORE:], counters


def timed(
    folder: Path, tap: Tap, n_runs: int, between: Callable[[int], Any]
) -> tuple[np.ndarray[Any, np.dtype[np.float64]], list[dict[str, int]]]:
    """Seconds of each run but the last; `between` comes before a run and does not count. The counters, by rank."""
    began_s, ended_s = list[float](), list[float]()

    def tick(number: int) -> None:
        ended_s.append(time.perf_counter())
        between(number)
        began_s.append(time.perf_counter())

    counters = run_job(folder, tap, n_runs=n_runs, ring_bytes=1 << 18, between=tick)
    return np.array(ended_s[1:]) - np.array(began_s[:-1]), counters


@pytest.mark.slow
def test_another_process_never_sees_half_a_block(tmp_path: Path) -> None:
    """Many short runs, drained as fast as another process can: it would end with an error."""
    with subprocess.Popen([sys.executable, "-c", _DRAIN, str(tmp_path), JOB], stdout=subprocess.PIPE) as drain:
        assert drain.stdout is not None
        drain.stdout.readline()
        run_job(tmp_path, Tap(("checksum",)), n_runs=5000, ring_bytes=1 << 16)
        assert drain.wait(60) == 0
