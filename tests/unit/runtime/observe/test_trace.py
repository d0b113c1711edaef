"""Traces: every transfer's times at every rank, there and back through a file, drawn beside the prediction."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from optcc import cli
from optcc.errors import CodecError, InputError, TopologyError
from optcc.paper_figures.measured_timeline import measured_timing, timeline_pair
from optcc.planner import Planner
from optcc.runtime.communicator import Communicator
from optcc.runtime.observe.trace import MeasuredRun, read_trace
from optcc.runtime.transports.loopback import LoopbackTransport, run_ranks
from optcc.runtime.transports.sim import SimNetwork, SimTransport, run_sim
from optcc.topology import Topology

TEXT = "3@250MB/s"
TOPOLOGY = Topology.parse(TEXT)


def traced(path: Path, schedule: str = "ring", size: int = 30_000, times: int = 2) -> MeasuredRun:
    """The last of some AllReduces in simulated time."""
    planner = Planner(TOPOLOGY, schedules={"allreduce": schedule}).__call__
    found: list[MeasuredRun] = []

    def body(_: int, transport: SimTransport) -> None:
        with Communicator(transport, planner, clock=transport.clock) as comm:
            array = np.ones(size, np.float32)
            comm.all_reduce(array)
            with comm.trace(path) as tracing:
                for _ in range(times):
                    assert (comm.all_reduce(array) == comm.n_ranks).all()
            assert tracing.measured is not None
            found.append(tracing.measured)
            assert (comm.all_reduce(array) == comm.n_ranks).all()

    run_sim(SimNetwork(3), body)
    return found[0]


@pytest.mark.parametrize(("schedule", "size"), [("ring", 30_000), ("ring", 5), ("optcc", 30_000)])
def test_every_transfer_has_its_times(schedule: str, size: int, tmp_path: Path) -> None:
    """In the order of causes: nothing is sent before what it carries has come."""
    run = traced(tmp_path / "trace", schedule, size)
    assert run.run == 2
    assert (run.posted_s >= 0).all()
    assert (run.posted_s <= run.arrived_s).all()
    assert (run.arrived_s <= run.done_s).all()
    assert (run.posted_s <= run.sent_s).all()
    transfers = run.plan.transfers
    for index in range(len(transfers)):
        for before in transfers.after[index].tolist():
            assert run.done_s[before] <= run.posted_s[index] or transfers.src[before] != transfers.src[index]
    kept = read_trace(tmp_path / "trace")
    assert kept.plan.digest == run.plan.digest
    for name in ("posted_s", "sent_s", "arrived_s", "done_s"):
        assert (getattr(kept, name) == getattr(run, name)).all()


def test_simulated_nics_take_as_long_as_is_predicted(tmp_path: Path) -> None:
    """The network of the simulation carries what it says, so that a trace of it lies close to the prediction."""
    run = traced(tmp_path / "trace", size=1_000_000)
    pair = timeline_pair(run, TOPOLOGY, "exclusive")
    assert pair.predicted.seconds < pair.measured.seconds < 1.15 * pair.predicted.seconds
    later = pair.as_json()["later_s"]
    assert isinstance(later, dict)
    assert 0 < later["all-gather"] < 0.15 * pair.predicted.seconds
    busy = measured_timing(run, TOPOLOGY).utilisation()
    assert all(0.8 < share < 1 for share in busy.values())


def test_show_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    traced(tmp_path / "trace")
    words = ["show", "--measured", str(tmp_path / "trace"), "--topology", TEXT]
    assert cli.run([*words, "-o", str(tmp_path / "run.svg"), "--perfetto", str(tmp_path / "perfetto.json")]) == 0
    shown = capsys.readouterr().out
    assert "measured" in shown
    assert "reduce-scatter" in shown
    assert (tmp_path / "run.svg").stat().st_size > 1000
    assert (tmp_path / "run-predicted.svg").stat().st_size > 1000
    slices = [
        each for each in json.loads((tmp_path / "perfetto.json").read_bytes())["traceEvents"] if each["ph"] == "X"
    ]
    assert len(slices) == 2 * 12
    assert cli.run([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["measured"]["seconds"] > 0
    assert set(said["later_s"]) == {"reduce-scatter", "all-gather"}


def test_bench_writes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--transport", "loopback", "--topology", "2@1GB/s", "-b", "64K", "-n", "2", "--quiet"]
    assert cli.run([*words, "--trace", str(tmp_path / "trace")]) == 0
    run = read_trace(tmp_path / "trace")
    assert run.plan.size_bytes == 1 << 16
    assert 64e-6 < run.seconds < 1
    assert cli.run([*words, "-e", "128K", "--trace", str(tmp_path / "trace")]) == 2
    assert "must be with one schedule" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["ring", "--measured", "t"], [], ["--measured", "absent"]], ids=["both", "neither", "absent"]
)
def test_wrong_arguments_of_show(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["show", *arguments, "--topology", TEXT]) == 2
    assert capsys.readouterr().err.startswith("optcc: ")


def test_other_files_are_refused(tmp_path: Path) -> None:
    run = traced(tmp_path / "trace", size=5)
    said = msgspec.json.decode((tmp_path / "trace").read_bytes())
    for change, message in (
        ({"format": "optcc-trace/9"}, "must be 'optcc-trace/1'"),
        ({"posted_s": [0.0]}, f"must be {len(run.plan.transfers)}"),
        ({"more": 1}, r"\$\.more: unknown key"),
    ):
        (tmp_path / "wrong").write_bytes(msgspec.json.encode(said | change))
        with pytest.raises(CodecError, match=message):
            read_trace(tmp_path / "wrong")
    with pytest.raises(TopologyError, match="4 ranks"):
        measured_timing(run, Topology.parse("4@1GB/s"))


def test_a_block_without_a_collective_is_refused(tmp_path: Path) -> None:
    def body(_: int, transport: LoopbackTransport) -> None:
        with Communicator(transport, Planner(TOPOLOGY).__call__) as comm, comm.trace(tmp_path / "trace"):
            pass

    with pytest.raises(InputError, match="no collective within it"):
        run_ranks(3, body)
