"""Observers: pages that outlive their ranks, dumps on failures and signals, and jobs that notice nothing of it."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from optcc import cli
from optcc.errors import DeadlineExceeded, InputError
from optcc.runtime.communicator import Communicator
from optcc.runtime.observe import log
from optcc.runtime.observe.dump import GONE, read_dump
from optcc.runtime.observe.jobs import jobs_in, own_start_s, page_path, pages_folder, process_state, read_job
from optcc.runtime.observe.observer import Observer
from optcc.runtime.observe.page import PageWriter
from optcc.runtime.observe.snapshot import JobSnapshot, RankView, snapshot
from optcc.runtime.observe.status import RailStatus
from optcc.runtime.transports.loopback import LoopbackTransport, run_ranks
from tests.unit.runtime.observe.observed_ranks import planner_of

N_RANKS = 3


def run(
    folder: Path, program: Callable[[Communicator], None], *, deadline_s: float = 20.0, **variables: str
) -> list[Observer | None]:
    """Ranks as threads, whose pages are in a folder."""
    environ = {"OPTCC_STATUS_DIR": str(folder), **variables}

    def body(rank: int, transport: LoopbackTransport) -> Observer | None:
        with Communicator(transport, planner_of(N_RANKS), deadline_s=deadline_s) as comm:
            observer = comm.observe(environ, "job")
            program(comm)
        return observer

    return run_ranks(N_RANKS, body)


def reduce(comm: Communicator, size: int = 1000) -> None:
    assert (comm.all_reduce(np.ones(size, np.float32)) == N_RANKS).all()


def late(comm: Communicator) -> None:
    """Rank 1 does not come."""
    reduce(comm)
    if comm.rank != 1:
        reduce(comm)


def test_pages_are_there_while_a_job_runs(tmp_path: Path) -> None:
    seen = {}

    def program(comm: Communicator) -> None:
        reduce(comm)
        comm.barrier()
        if not comm.rank:
            seen["job"] = read_job(tmp_path)
        comm.barrier()

    run(tmp_path, program)
    assert [(each.rank, each.begun, each.done, each.process) for each in seen["job"]] == [
        (rank, 1, 1, "alive") for rank in range(N_RANKS)
    ]
    assert list(tmp_path.iterdir()) == []
    # It is silent for as long as it was when it was read, not for what a slow reader takes behind that.
    heard_s = max(each.records[-1].at_s for each in seen["job"])
    for later_s, is_silent in ((0.5, False), (10.0, True)):
        shown = snapshot(seen["job"], heard_s + later_s)
        assert ["silent" in each.doing for each in shown.ranks] == [is_silent] * N_RANKS


def test_the_status_is_rewritten_more_often_in_a_long_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While collectives are short it is rewritten at longer intervals, which never end here."""
    calls: dict[str, int] = {}

    def program(comm: Communicator) -> None:
        observer = comm.observe({"OPTCC_STATUS_DIR": str(tmp_path)}, "job")
        assert observer is not None
        if not comm.rank:
            observer._next_s = float("inf")
            monkeypatch.setattr(observer, "refresh", lambda: n.append(1))
        n: list[int] = []
        for _ in range(20):
            reduce(comm)
        if not comm.rank:
            calls["short"] = len(n)
        else:
            time.sleep(0.4)
        reduce(comm)
        if not comm.rank:
            calls["long"] = len(n) - calls["short"]

    run(tmp_path, program)
    assert calls["short"] == 0
    assert calls["long"] >= 2


def test_rates_that_nobody_declared_are_not_shown_as_some() -> None:
    rails = [RailStatus("eth0", "up", rate, rate, 1.0, 1.0, 0.0, 0.0, 0, 0, 1, 0, 0) for rate in (1.0, 25e9)]
    rank = RankView(0, "h", 1, "alive", "running", "", 0.0, 0, "", 0, 0, (), tuple(rails), {}, "")
    card = JobSnapshot("job", 1, "running", (rank,), (), (), (), "nothing", "").rail_card()
    assert [row[3] for row in card.rows] == ["undeclared", "25.0 GB/s : 25.0 GB/s"]


def test_pages_stay_after_a_failure_and_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DeadlineExceeded):
        run(tmp_path, late, deadline_s=0.5, OPTCC_DUMP=str(tmp_path / "dumps"))
    assert list(jobs_in(tmp_path)) == ["job"]
    for arguments in (["dumps"], ["dumps/flight-job-rank0.json", "dumps/flight-job-rank2.json"]):
        assert cli.run(["explain", *(str(tmp_path / each) for each in arguments), "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["kind"], said["culprits"], said["job"]) == ("late", [1], "job")
    assert "no dump of rank 1" in said["text"]


def test_status_and_explain_read_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPTCC_STATUS_DIR", str(tmp_path))
    with pytest.raises(DeadlineExceeded):
        run(tmp_path, late, deadline_s=0.5)
    assert cli.run(["status", "--list"]) == 0
    assert capsys.readouterr().out == "job  3 ranks\n"
    assert cli.run(["status", "jo", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["state"], said["n_ranks"], said["stragglers"][0][0]) == ("failed", 3, 1)
    assert {(each["rank"], each["on"]) for each in said["waits"]} >= {(2, 1)}
    assert [each["done"] for each in said["ranks"]] == [1, 1, 1]
    assert cli.run(["status"]) == 0
    shown = capsys.readouterr().out
    assert "failed: DeadlineExceeded" in shown
    assert "Rank 1 kept the others waiting" in shown
    assert cli.run(["explain", "--save", str(tmp_path / "kept"), "--torch", str(tmp_path / "torch")]) == 0
    assert "written" in capsys.readouterr().out
    assert [read_dump(path).rank for path in sorted((tmp_path / "kept").iterdir())] == [0, 1, 2]
    assert len(list((tmp_path / "torch").iterdir())) == 3


@pytest.mark.parametrize("arguments", [["status", "absent"], ["explain", "absent"], ["explain", "a", "b"], ["status"]])
def test_absent_jobs_are_refused(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPTCC_STATUS_DIR", str(tmp_path))
    assert cli.run(arguments) == 2
    assert capsys.readouterr().err.startswith("optcc: ")


def test_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    monkeypatch.setenv("OPTCC_STATUS_DIR", str(tmp_path))
    with pytest.raises(DeadlineExceeded):
        run(tmp_path, late, deadline_s=0.5)
    assert cli.run(["status", "--openmetrics", str(tmp_path / "metrics")]) == 0
    families = parser.text_string_to_metric_families((tmp_path / "metrics").read_text(encoding="utf-8"))
    values = {(s.name, s.labels.get("rank")): s.value for family in families for s in family.samples}
    assert values["optcc_job_ranks", None] == 3
    assert values["optcc_collectives_done_total", "2"] == 1
    assert [values["optcc_rank_straggler", str(rank)] for rank in range(3)] == [0, 1, 0]
    assert values["optcc_rank_waiting_seconds", "2"] > 0.2
    assert values["optcc_rank_up", "0"] == 0


def test_metrics_are_served(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from urllib.request import urlopen

    from optcc.runtime.observe.metrics import serve

    said = {}

    def program(comm: Communicator) -> None:
        reduce(comm)
        if not comm.rank:
            import socket

            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            stop = serve(lambda: snapshot(read_job(tmp_path)), port, "127.0.0.1")
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                said["text"] = answer.read().decode()
            stop()
        comm.barrier()

    run(tmp_path, program)
    assert 'optcc_rank_up{job="job",rank="2"} 1.0' in said["text"]


def test_off_means_nothing_is_there(tmp_path: Path) -> None:
    assert run(tmp_path, reduce, OPTCC_STATUS="0") == [None] * N_RANKS


@pytest.mark.parametrize(
    "variables", [{"OPTCC_EVENTS": "0"}, {"OPTCC_EVENTS": "many"}, {"OPTCC_DUMP_SIGNAL": "KILL"}, {"OPTCC_CHECK": "-1"}]
)
def test_wrong_variables_are_refused(variables: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=next(iter(variables))):
        run(tmp_path, reduce, deadline_s=20.0, **variables)


def test_a_page_that_cannot_be_made_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    PageWriter(page_path(tmp_path, "job", 0), b"{}")
    with caplog.at_level(logging.WARNING, "optcc.events"):
        run(tmp_path, reduce)
    assert "no page for optcc status" in caplog.text


def test_a_folder_of_others_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert pages_folder({"OPTCC_STATUS_DIR": str(tmp_path / "open")}) is None
    made = pages_folder({"OPTCC_STATUS_DIR": str(tmp_path / "made")})
    assert made is not None
    assert made.stat().st_mode & 0o777 == 0o700
    with pytest.raises(InputError, match="letters"):
        page_path(made, "../x", 0)


def test_processes_are_told_apart() -> None:
    assert process_state(os.getpid(), own_start_s()) == "alive"
    assert process_state(os.getpid(), own_start_s() - 100) == GONE
    assert process_state(2**22 + 1, 0.0) == GONE


@pytest.fixture
def _as_before() -> Iterator[None]:
    former = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, former)
    from optcc.runtime.observe import observer

    observer._former.clear()


@pytest.mark.usefixtures("_as_before")
def test_a_signal_dumps_and_the_programs_handler_is_called_too(tmp_path: Path) -> None:
    """One rank, in the main thread, which alone can handle signals."""
    called = []

    def handle(number: int, frame: FrameType | None) -> None:
        called.append(number)

    signal.signal(signal.SIGUSR2, handle)
    from optcc.runtime.transports.loopback import LoopbackNetwork

    environ = {"OPTCC_STATUS_DIR": str(tmp_path), "OPTCC_DUMP_SIGNAL": "USR2", "OPTCC_DUMP": str(tmp_path / "dumps")}
    with LoopbackNetwork(None, 1) as network, Communicator(network.transport(0), planner_of(1)) as comm:
        comm.observe(environ, "signalled")
        comm.all_reduce(np.ones(10))
        assert threading.current_thread() is threading.main_thread()
        signal.raise_signal(signal.SIGUSR2)
        assert called == [signal.SIGUSR2]
        assert read_dump(tmp_path / "dumps" / "flight-signalled-rank0.json").done == 1


def test_lines_of_the_log(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.DEBUG, "optcc.events"):
        run(tmp_path, reduce)
    lines = [record.getMessage() for record in caplog.records if "rank 2" in record.getMessage()]
    assert any("prepares a plan for allreduce of 4000B" in line for line in lines)
    assert any("run 1 begins" in line for line in lines)
    assert all("\n" not in line for line in lines)


def test_the_level_of_the_log_must_be_one() -> None:
    logger = logging.getLogger("optcc")
    former = logger.level, logger.propagate, list(logger.handlers)
    try:
        with pytest.raises(InputError, match="OPTCC_LOG"):
            log.configure({"OPTCC_LOG": "loud"})
        log.configure({})
        assert logger.handlers == former[2]
        for _ in range(2):
            log.configure({"OPTCC_LOG": "info"})
        assert len(logger.handlers) == len(former[2]) + 1
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(former[0])
        logger.propagate, logger.handlers[:] = former[1], former[2]
