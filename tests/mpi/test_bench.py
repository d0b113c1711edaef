"""`mpirun optcc bench`, as users start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.mpi

OPTCC = [sys.executable, "-m", "optcc"]
TIMEOUT_S = 120
LONG_TIMEOUT_S = 600


def mpirun(*words: str, cache: Path, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
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
        timeout=timeout_s,
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


def grid(cache: Path, ranks: int, *words: str, timeout_s: float = TIMEOUT_S) -> list[dict[str, Any]]:
    """The rows of a bench of ring and optimal on that many ranks, none of whose elements is wrong."""
    both = ("--schedule", "ring", "--schedule", "optimal", "--segments", "3")
    done = mpirun("-n", str(ranks), *OPTCC, "bench", *both, *words, "--json", cache=cache, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["out_of_bounds"] == 0
    rows: list[dict[str, Any]] = told["results"]
    for row in rows:
        assert row["out_of_place"]["nwrong"] == row["in_place"]["nwrong"] == 0, row
    assert {row["schedule"] for row in rows} == {"ring", "optimal"}
    return rows


RAGGED = ("-b", "0", "-e", "70003", "-f", "13", "-n", "1", "-w", "0")
"""0 B, one element, and then sizes that no number of ranks or segments divides."""
FEWER = (*RAGGED[:4], "-f", "169", *RAGGED[6:])
"""The same with every other size: eight ranks take turns on few cores."""


@pytest.mark.parametrize(
    ("ranks", "transport", "dtype", "op", "words", "sizes"),
    [
        (2, "mpi", "int8", "bxor", RAGGED, [0, 1, 13, 169, 2197, 28561]),
        (4, "tcp", "float", "avg", RAGGED, [0, 4, 52, 676, 8788]),
        (8, "mpi", "double", "prod", FEWER, [0, 8, 1352]),
    ],
)
def test_every_size_on_every_number_of_ranks_is_exact(
    tmp_path: Path, ranks: int, transport: str, dtype: str, op: str, words: tuple[str, ...], sizes: list[int]
) -> None:
    rows = grid(tmp_path, ranks, *words, "--transport", transport, "-d", dtype, "-o", op)
    assert [row["size"] for row in rows[::2]] == sizes


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["mpi", "tcp"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("dtype", "op"), [("float", "sum"), ("int64", "max"), ("bfloat16", "sum"), ("uint8", "bor")])
def test_the_whole_grid_of_small_sizes_is_exact(
    tmp_path: Path, ranks: int, transport: str, dtype: str, op: str
) -> None:
    assert len(grid(tmp_path, ranks, *RAGGED, "--transport", transport, "-d", dtype, "-o", op)) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["mpi", "tcp"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_long_messages_are_exact(tmp_path: Path, ranks: int, transport: str) -> None:
    words = ("-b", "16777236", "-e", "268435456", "-f", "15", "-n", "1", "-w", "0", "--transport", transport)
    rows = grid(tmp_path, ranks, *words, timeout_s=LONG_TIMEOUT_S)
    assert [row["size"] for row in rows[::2]] == [16777236, 251658540]
    whole = grid(
        tmp_path, ranks, "-b", "256M", "-n", "1", "-w", "0", "--transport", transport, timeout_s=LONG_TIMEOUT_S
    )
    assert whole[0]["size"] == 2**28
