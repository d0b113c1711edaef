"""Ours and peers on emulated hosts for real, small: turns, states of the hosts, hangs, and that nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from optcc.experiments import peers_comparison, peers_contenders
from optcc.experiments.fabric import RUN_ROOT, WIRE_OVERHEAD, Fabric, FabricSpec
from optcc.experiments.peers import MPI_RING
from optcc.experiments.peers_comparison import Comparison
from optcc.experiments.peers_contenders import Bed, PeerJob, _library, jobs, our_case
from optcc.experiments.peers_record import OURS, PEER
from optcc.experiments.peers_team import Team
from optcc.experiments.rank_lines import Hung

pytestmark = [pytest.mark.netns, pytest.mark.mpi]
SIZE = 2**20


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    """Three hosts of two NICs; nothing of them is left."""
    name = f"peers-{os.getpid()}"
    with Fabric.up(FabricSpec.parse("3x2@400Mbit/s", name=name), replace=True) as made:
        yield made
    assert not list(RUN_ROOT.glob(f"{name}*"))


def ranks_of(folder: Path) -> list[int]:
    """The processes that were started with a socket in `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def test_ours_and_open_mpi_are_compared_in_a_state_of_the_hosts(
    fabric: Fabric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_comparison, "OURS_FEW", {"tcp": ("ring", "optimal"), "mpi": ("ring",)})
    monkeypatch.setattr(peers_contenders, "OUR_SETTINGS", dict.fromkeys(("ring", "optimal"), SMALL))
    asked = Comparison(SIZE, 2, "", "", "400Mbit/s")
    asked.compare(fabric, Bed("one NIC at half", {"h2.eth1": Fraction(1, 2)}), tmp_path, "few")
    assert [(run.contender, run.side) for run in asked.runs] == [
        *(("ring (tcp)", OURS), ("optimal (tcp)", OURS), ("ring (mpi)", OURS)),
        ("Open MPI ring, TCP", PEER),
    ], asked.absent
    for run in asked.runs:
        assert run.wrong == 0
        assert run.topology == "3@100MB/s,2=75MB/s"
        assert len(run.seconds) == len(run.steal) == len(run.cpu_s) == 2
        assert (run.predicted_s is None) == (run.side == PEER)
        assert 0 < run.bound_s < 10 * run.median_s
        assert min(run.cpu_s) > 0
    assert fabric.topology_text() == "3@100MB/s", "the hosts are healed"
    assert ranks_of(tmp_path) == []


SMALL = {"ports": "fifo", "segments": 2, "slots": 8, "window": 4}


@pytest.mark.slow
def test_the_time_counts_from_when_the_last_host_begins(
    fabric: Fabric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_comparison, "OURS_LATE", {"tcp": ("ring", "stragglar")})
    asked = Comparison(SIZE, 2, "", "", "400Mbit/s")
    bed = Bed("one host late", late=Fraction(100))
    began_s = time.monotonic()
    asked.compare(fabric, bed, tmp_path, "few")
    took_s = time.monotonic() - began_s
    assert [run.contender for run in asked.runs] == ["ring (tcp)", "stragglar (tcp)", "Open MPI ring, TCP"], (
        asked.absent
    )
    late_s = float(bed.late_s(3, SIZE, "400Mbit/s"))
    assert took_s > 9 * late_s, "a run that does not count and two that do of each"
    for run in asked.runs:
        assert run.wrong == 0
        assert run.late_s == late_s
        assert 0 < run.median_s < late_s
        assert run.bound_s == pytest.approx(SIZE * float(Fraction(WIRE_OVERHEAD)) / 10**8)


@pytest.mark.slow
def test_who_hangs_is_said_to_hang_and_is_ended(fabric: Fabric, tmp_path: Path) -> None:
    job = PeerJob("open-mpi", sys.executable, "openmpi", (_library("Open MPI ring, TCP"),), MPI_RING)
    asked = Comparison(SIZE, 1, "", "", "400Mbit/s")
    team = Team(fabric, job, asked.job_config(tmp_path, 3), tmp_path, "50MB/s")
    try:
        assert team.turn(0).wrong == 0
        fabric.fail("h2", "down")
        began = time.monotonic()
        with pytest.raises(Hung, match="no answer within 1 s"):
            team.turn(0, 1.0)
        assert time.monotonic() - began < 20
    finally:
        team.end()
    assert ranks_of(tmp_path) == []


@pytest.mark.slow
def test_what_keeps_a_job_from_starting_is_said(fabric: Fabric, tmp_path: Path) -> None:
    wrong = our_case("ring", "tcp", "3@100MB/s", SIZE)
    job = PeerJob("open-mpi", sys.executable, "openmpi", (wrong,), MPI_RING, {"OPTCC_SOCKET_IFNAME": "ib"})
    team = Team(fabric, job, Comparison(SIZE, 1, "", "", "400Mbit/s").job_config(tmp_path, 3), tmp_path, "50MB/s")
    try:
        assert "OPTCC_SOCKET_IFNAME 'ib'" in team.made[0]["absent"]
    finally:
        team.end()
    assert ranks_of(tmp_path) == []


@pytest.mark.slow
@pytest.mark.realtime
def test_each_peer_that_is_installed_reduces_exactly(fabric: Fabric, tmp_path: Path) -> None:
    """MPICH and torch where OPTCC_MPICH_PYTHON and OPTCC_TORCH_PYTHON name their environments."""
    mpich, torch = (os.environ.get(name, "") for name in ("OPTCC_MPICH_PYTHON", "OPTCC_TORCH_PYTHON"))
    asked = Comparison(SIZE, 1, mpich, torch, "400Mbit/s")
    asked.compare(fabric, Bed("healthy"), tmp_path)
    wanted = {case.contender for job in jobs((), mpich, torch)[0] for case in job.cases}
    assert {run.contender for run in asked.runs if run.side == PEER} == wanted, asked.absent
    assert not any(run.wrong for run in asked.runs)


@pytest.mark.slow
@pytest.mark.realtime
def test_ours_loses_a_nic_in_mid_run_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_comparison, "jobs", lambda *_: ([], {}))
    asked = Comparison(8 * SIZE, 1, "", "", "400Mbit/s")
    name = f"peers-lost-{os.getpid()}"
    with Fabric.up(FabricSpec.parse("4x2@400Mbit/s", name=name)) as fabric:
        asked.lose(fabric, tmp_path)
        assert fabric.topology_text() == "4@100MB/s", "the hosts are healed"
    (loss,) = asked.losses
    assert loss.outcome == "went on"
    assert loss.run_s is not None and loss.after_s < loss.run_s < loss.limit_s
    assert loss.next is not None
    assert loss.next.topology == "4@100MB/s,3=50MB/s"
    assert len(loss.next.seconds) == 3
    assert loss.next.wrong == 0
    assert asked.absent == {}


@pytest.mark.slow
@pytest.mark.realtime
def test_a_comparison_that_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    optcc = [sys.executable, "-m", "optcc"]
    words = [*optcc, "experiment", "peers-on-fabric", "--quick", "-o", str(tmp_path / "peers.json")]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        try:
            deadline_s = time.monotonic() + 60
            while not ranks_of(tmp_path / "optcc-peers-") and time.monotonic() < deadline_s:
                time.sleep(0.1)
            assert ranks_of(tmp_path / "optcc-peers-"), "it has started ranks"
            process.terminate()
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert ranks_of(tmp_path) == []
    assert not list(RUN_ROOT.glob(f"peers-{process.pid}*"))
    assert not (tmp_path / "peers.json").exists()
