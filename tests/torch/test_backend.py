"""The backend `optcc` of torch.distributed, between real processes on loopback."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from optcc.experiments.torch_suite import TorchSuiteRecord, run_suite
from optcc.observe import CallbackSink, ChunkRecord, JobDrain, statistics
from optcc.runtime.observe.dump import read_dump
from optcc.runtime.observe.jobs import read_job
from optcc.runtime.observe.torch_dump import write_torch_dumps

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: make test-torch")
PROGRAMS = Path(__file__).with_name("programs.py")
TIMEOUT_S = 150
QUICK_S = 1.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def run(name: str, tmp_path: Path, n_ranks: int, **variables: str) -> list[Any]:
    """What the program of that name returns at each rank; None for a rank that was killed."""
    port = str(free_port())
    base = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(n_ranks), **variables}
    base |= {"OMP_NUM_THREADS": "1", "OPTCC_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    out = tmp_path / name
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAMS, name, out],
            env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(n_ranks)
    ]
    try:
        said = [process.communicate(timeout=TIMEOUT_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, text in zip(ranks, said, strict=True):
        assert process.returncode in (0, -9), text
    return [
        json.loads(Path(f"{out}.{rank}").read_text(encoding="utf-8")) if process.returncode == 0 else None
        for rank, process in enumerate(ranks)
    ]


def torchfrtrace(folder: Path, *options: str, is_refused: bool = False) -> str:
    """What PyTorch's own reader of flight recorders prints of a folder."""
    tool = Path(sys.executable).with_name("torchfrtrace")
    done = subprocess.run([tool, folder, *options], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode != 0) == is_refused, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_readmes_example_runs(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```py\n(# train\.py\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
    program = tmp_path / "train.py"
    program.write_text(block, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(
        command, env=os.environ | {"OPTCC_SOCKET_IFNAME": "lo"}, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.stdout == "mean gradient of 2 ranks: 0.5\n", done.stdout + done.stderr


def test_torchs_own_tests_pass() -> None:
    """Those of its suite that took less than a second when the record was made."""
    runs = {each.test: each.optcc for each in TorchSuiteRecord.read().tests}
    quick = [name for name, each in runs.items() if each.outcome == "passed" and each.seconds < QUICK_S]
    found = dict(run_suite("optcc", quick, os.environ | {"OPTCC_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}))
    assert len(found) == len(quick) > 20
    assert {name: each.reason for name, each in found.items() if each.outcome != "passed"} == {}


def test_every_operation_is_gloos(tmp_path: Path) -> None:
    run("operations", tmp_path, 3)


def test_ddp_trains_alike_at_all_ranks_and_again(tmp_path: Path) -> None:
    losses, *others = run("data_parallel", tmp_path, 2)
    assert others == [losses]
    gloo, *_ = run("data_parallel", tmp_path, 2, OPTCC_TEST_BACKEND="gloo")
    assert losses == pytest.approx(gloo, rel=1e-5)


def test_groups_messages_and_what_is_refused(tmp_path: Path) -> None:
    run("groups_and_messages", tmp_path, 3)


def test_fsdp_zero_and_tensor_parallelism(tmp_path: Path) -> None:
    ours = run("sharded", tmp_path, 4)
    assert all(each == ours[0] for each in ours[1:])
    gloo = run("sharded", tmp_path, 4, OPTCC_TEST_BACKEND="gloo")
    for mine, other in zip(ours[0], gloo[0], strict=True):
        assert mine == pytest.approx(other, rel=1e-4)


def test_a_timeout_ends_its_group_alone(tmp_path: Path) -> None:
    run("timeouts", tmp_path, 2)


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    pages, dumps = tmp_path / "pages", tmp_path / "dumps"
    first, killed, third = run("lost_rank", tmp_path, 3, OPTCC_STATUS_DIR=str(pages), OPTCC_DUMP=str(dumps))
    assert killed is None
    assert "rank 1" in first
    assert "rank 1" in third
    # The page of a rank that was killed can still be read.
    write_torch_dumps(read_job(pages), tmp_path / "all")
    said = torchfrtrace(tmp_path / "all")
    assert "Not all ranks joining collective, sequence number: 5\n" in said
    assert "missing ranks: {1}\n" in said
    # Dumps have the others alone, as on the hosts that are left.
    write_torch_dumps([read_dump(each) for each in sorted(dumps.iterdir())], tmp_path / "left")
    assert "Missing dump files from ranks {1}" in torchfrtrace(tmp_path / "left", is_refused=True)
    said = torchfrtrace(tmp_path / "left", "--allow-incomplete-ranks")
    assert "because we missed FR dumps from ranks ({1})" in said


def test_torchs_own_tool_names_a_rank_that_disagrees(tmp_path: Path) -> None:
    pages, dumps = tmp_path / "pages", tmp_path / "dumps"
    told = run("disagreements", tmp_path, 3, OPTCC_STATUS_DIR=str(pages), OPTCC_DUMP=str(dumps))
    assert all("rank 1 differs from ranks 0, 2" in refused for refused, _ in told), told
    assert any("Timed out" in late for _, late in told), told
    said = torchfrtrace(pages / "refused")
    assert "Collective sequence number: 3 has errors\n" in said
    assert "Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH" in said
    assert "Expected input sizes: '[[2000]]' does not match found input sizes: '[[2001]]'" in said
    found = sorted(dumps.iterdir())
    assert len(found) == 3
    write_torch_dumps([read_dump(each) for each in found], tmp_path / "late")
    said = torchfrtrace(tmp_path / "late")
    assert "Collective sequence number: 4 has errors\n" in said
    assert "Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH" in said


def test_taps_have_the_norms_of_gradients_that_torch_has(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    told = run("gradient_norms", tmp_path, 2, OPTCC_STATUS_DIR=str(pages))
    (job,) = {each.name.partition(".")[0] for each in pages.glob("*.ring")}
    taken: list[ChunkRecord] = []
    drain = JobDrain(pages, job, [CallbackSink(taken.extend)])
    drain.run()
    assert list(pages.glob("*.ring")) == []
    for rank, of_torch in enumerate(told):
        assert sorted(len(rows) for rows in of_torch.values()) == [1, 3, 3, 3]
        for n_bytes, rows in of_torch.items():
            own = [each for each in taken if (each.rank, each.size_bytes) == (rank, int(n_bytes))]
            runs = statistics(each for each in own if each.collective == "allreduce")
            before, after = ([each for each in runs if each.point == point] for point in ("input", "output"))
            assert len(rows) == len(before) == len(after)
            for row, given, got in zip(rows, before, after, strict=True):
                assert row == pytest.approx([given.l2, *given[5:7], got.l2, *got[5:7]], rel=1e-6)
                assert (given.least, given.largest, got.least, got.largest) == (*row[1:3], *row[4:])
                assert given.n == got.n == int(n_bytes) // 4


def test_a_group_may_be_made_again(tmp_path: Path) -> None:
    run("again", tmp_path, 2)
