"""The cells of a record on the ranks of a real MPI job: the bytes of one process, written by one process."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from optcc.commands.study import command
from tests.mpi.launch import rank_command

pytestmark = pytest.mark.mpi
STUDY = ("training", "--quick", "--trials", "20")


def job(*words: str) -> subprocess.CompletedProcess[str]:
    """Three ranks of `optcc study`."""
    started, environment = rank_command(3, ["-m", "optcc", "study", *words])
    return subprocess.run(started, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_the_ranks_of_a_job_make_the_bytes_that_one_process_makes(tmp_path: Path) -> None:
    done = job(*STUDY, "-o", str(tmp_path / "ranks.json"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mean / worst of 20 trials") == 1
    assert done.stderr == f"record: {tmp_path / 'ranks.json'}\n"
    alone = CliRunner().invoke(command, [*STUDY, "-o", str(tmp_path / "alone.json")], standalone_mode=False)
    assert alone.exit_code == 0, alone.exception
    assert (tmp_path / "ranks.json").read_bytes() == (tmp_path / "alone.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.json", "ranks.json"]


def test_an_error_of_rank_0_ends_the_job(tmp_path: Path) -> None:
    done = job(*STUDY, "-o", str(tmp_path / "no folder" / "r.json"))
    assert done.returncode == 2
    assert done.stderr.count("must be a file in a folder that exists") == 1
