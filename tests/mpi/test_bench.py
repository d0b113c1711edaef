"""`mpirun optcc bench`, as users start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi

OPTCC = [sys.executable, "-m", "optcc"]
TIMEOUT_S = 60


def mpirun(*words: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Runs Open MPI's mpirun; more ranks than cores are fine."""
    beside = Path(sys.executable).parent / "mpirun"
    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "XDG_CACHE_HOME": str(cache),
    }
    return subprocess.run(
        [str(beside) if beside.exists() else "mpirun", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_ours_and_the_librarys_own_are_exact_side_by_side(tmp_path: Path) -> None:
    words = ("bench", "-b", "0", "-e", "256K", "-f", "64", "-n", "2", "-d", "int32", "-o", "max", "--json")
    done = mpirun(
        "-n", "3", *OPTCC, *words, "--schedule", "ring", "--schedule", "optcc", "--peer", "mpi", cache=tmp_path
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"]
    assert [row["schedule"] for row in rows] == ["ring", "optcc", "mpi"] * 4
    assert all(row[side]["nwrong"] == 0 for row in rows for side in ("out_of_place", "in_place"))
    assert list((tmp_path / "optcc").rglob("*.json")), "proofs are kept for the next run"


def test_a_topology_of_other_ranks_is_bad_input(tmp_path: Path) -> None:
    done = mpirun("-n", "2", *OPTCC, "bench", "-b", "4K", "--topology", "3@1GB/s", cache=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("--topology has 3 ranks but 2 processes started") == 1


def test_ranks_that_want_different_things_all_say_who(tmp_path: Path) -> None:
    two = [*OPTCC, "bench", "-b", "4K", "-n", "1"]
    other = [*OPTCC, "bench", "-b", "8K", "-n", "1"]
    done = mpirun("-n", "2", *two, ":", "-n", "1", *other, cache=tmp_path)
    assert done.returncode == 1
    assert "rank 2 differs from ranks 0, 1" in done.stderr
    assert "size" in done.stderr
