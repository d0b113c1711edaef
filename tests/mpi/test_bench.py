"""`mpirun optcc bench`, as users start it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from optcc.collective import COLLECTIVES, PERSONALISED
from optcc.planner import SCHEDULE_OF
from tests.declared import ADD_EDGES
from tests.mpi import launch

pytestmark = pytest.mark.mpi

OPTCC = [sys.executable, "-m", "optcc"]
TIMEOUT_S = 120


def mpirun(*words: str, cache: Path, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """mpirun with a cache of its own."""
    return launch.mpirun(*words, more={"XDG_CACHE_HOME": str(cache)}, timeout_s=timeout_s)


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


@pytest.mark.slow
def test_every_collective_is_exact_beside_the_librarys_own(tmp_path: Path) -> None:
    words = ("-r", "2", "-b", "40004", "-n", "2", "-o", "avg", "--json", "--transport", "tcp", "--peer", "mpi")
    benches = [["--collective", each, "--schedule", SCHEDULE_OF[each], *words] for each in COLLECTIVES]
    for collective, told in zip(COLLECTIVES, told_by(tmp_path, 3, benches, timeout_of(3)), strict=True):
        ours, peer = told["results"]
        assert (told["config"]["collective"], peer["schedule"]) == (collective, "mpi")
        assert ours["out_of_place"]["nwrong"] == ours["in_place"]["nwrong"] == peer["out_of_place"]["nwrong"] == 0
        assert (peer["in_place"] is None) == (collective in ("reducescatter", *PERSONALISED))


@pytest.mark.slow
def test_declared_collectives_are_exact(tmp_path: Path) -> None:
    """Over TCP, with a topology for which plans may change."""
    (tmp_path / "own.py").write_text(ADD_EDGES, encoding="utf-8")
    words = ["-b", "40004", "-n", "2", "-o", "max", "--json", "--transport", "tcp"]
    words += ["--topology", "3@1GB/s", "--no-probe"]
    benches = {
        "edges": ("--schedule", f"{tmp_path}/own.py:add_edges"),
        "sendrecv": ("--collective", "sendrecv_perf", "--peer", "mpi", "--schedule", "auto"),
        "alltoallv": ("--collective", "all_to_all_v", "--schedule", "auto", "--schedule", "matched-all-to-all-v"),
    }
    told = told_by(tmp_path, 3, [[*each, *words] for each in benches.values()], timeout_of(3))
    for name, each in zip(benches, told, strict=True):
        assert (each["config"]["collective"], each["out_of_bounds"]) == (name, 0)
        assert all(row["bound_ratio"] > 0 for row in each["results"])


@pytest.mark.slow
def test_a_topology_of_other_ranks_is_bad_input(tmp_path: Path) -> None:
    done = mpirun("-n", "2", *OPTCC, "bench", "-b", "4K", "--topology", "3@1GB/s", cache=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("--topology has 3 ranks but 2 processes started") == 1


@pytest.mark.battery(40)
def test_ranks_that_want_different_things_all_say_who(tmp_path: Path) -> None:
    two = [*OPTCC, "bench", "-b", "4K", "-n", "1"]
    other = [*OPTCC, "bench", "-b", "8K", "-n", "1"]
    done = mpirun("-n", "2", *two, ":", "-n", "1", *other, cache=tmp_path)
    assert done.returncode == 1
    assert "rank 2 differs from ranks 0, 1" in done.stderr
    assert "size" in done.stderr


def timeout_of(ranks: int, size_bytes: int = 0) -> float:
    """Seconds for a start of so many ranks, which are on few cores that may have other work, and for long messages."""
    return 60 + 30 * ranks + 60 * ranks * size_bytes / 2**28


def grid(cache: Path, ranks: int, *words: str) -> list[dict[str, Any]]:
    """The rows of a bench of ring and optimal on that many ranks, none of whose elements is wrong."""
    done = mpirun("-n", str(ranks), *OPTCC, "bench", *BOTH, *words, cache=cache, timeout_s=timeout_of(ranks))
    assert done.returncode == 0, done.stderr
    return rows_of(json.loads(done.stdout))


def grids(cache: Path, ranks: int, benches: Sequence[Sequence[str]], size_bytes: int = 0) -> list[list[dict[str, Any]]]:
    """The same for several benches."""
    all_told = told_by(cache, ranks, [[*BOTH, *bench] for bench in benches], timeout_of(ranks, size_bytes))
    return [rows_of(told) for told in all_told]


def told_by(cache: Path, ranks: int, benches: Sequence[Sequence[str]], limit_s: float) -> list[dict[str, Any]]:
    """What several benches tell, in one start: to start the Pythons takes longer than most of them."""
    words = json.dumps(benches)
    done = mpirun("-n", str(ranks), sys.executable, "-c", ALL_IN_ONE, words, cache=cache, timeout_s=limit_s)
    assert done.returncode == 0, done.stderr
    found = [json.loads(text) for text in done.stdout.split(END)[:-1]]
    assert len(found) == len(benches)
    return found


BOTH = ("--schedule", "ring", "--schedule", "optimal", "--segments", "3", "--json")
END = "# end of a bench"
ALL_IN_ONE = f"""
import json, sys
from mpi4py import MPI
from optcc.commands.bench import command
for words in json.loads(sys.argv[1]):
    code = command.main(words, standalone_mode=False)
    if code:
        sys.exit(code)
    if MPI.COMM_WORLD.Get_rank() == 0:
        print({END!r}, flush=True)
"""


def rows_of(told: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows, none of whose elements is wrong."""
    assert told["out_of_bounds"] == 0
    rows: list[dict[str, Any]] = told["results"]
    for row in rows:
        assert row["out_of_place"]["nwrong"] == row["in_place"]["nwrong"] == 0, row
    optimal = "shares" if told["config"]["ports"] == "fair" else "optimal"
    assert {row["schedule"] for row in rows} == {"ring", optimal}
    return rows


RAGGED = ("-b", "0", "-e", "70003", "-f", "13", "-n", "1", "-w", "0")
"""0 B, one element, and then sizes that no number of ranks or segments divides."""
FEWER = (*RAGGED[:4], "-f", "169", *RAGGED[6:])
"""The same with every other size: eight ranks take turns on few cores."""


@pytest.mark.battery(38)
@pytest.mark.parametrize(
    ("ranks", "transport", "dtype", "op", "words", "sizes"),
    [
        (2, "mpi", "int8", "bxor", RAGGED, [0, 1, 13, 169, 2197, 28561]),
        pytest.param(4, "tcp", "float", "avg", RAGGED, [0, 4, 52, 676, 8788], marks=pytest.mark.slow),
        pytest.param(8, "mpi", "double", "prod", FEWER, [0, 8, 1352], marks=[pytest.mark.slow, pytest.mark.realtime]),
    ],
)
def test_every_size_on_every_number_of_ranks_is_exact(
    tmp_path: Path, ranks: int, transport: str, dtype: str, op: str, words: tuple[str, ...], sizes: list[int]
) -> None:
    rows = grid(tmp_path, ranks, *words, "--transport", transport, "-d", dtype, "-o", op)
    assert [row["size"] for row in rows[::2]] == sizes


TYPES = [("float32", "sum"), ("int64", "max"), ("bfloat16", "sum"), ("uint8", "bor")]
RANKS = pytest.mark.parametrize("ranks", [2, 4, 8])
TRANSPORTS = pytest.mark.parametrize("transport", ["mpi", "tcp"])


@pytest.mark.slow
@pytest.mark.realtime
@TRANSPORTS
@RANKS
def test_the_whole_grid_of_small_sizes_is_exact(tmp_path: Path, ranks: int, transport: str) -> None:
    benches = [(*RAGGED, "--transport", transport, "-d", dtype, "-o", op) for dtype, op in TYPES]
    for (dtype, op), rows in zip(TYPES, grids(tmp_path, ranks, benches), strict=True):
        assert {(row["type"], row["redop"]) for row in rows} == {(dtype, op)}
        assert len(rows) >= 10


@pytest.mark.battery(38)
@pytest.mark.slow
@pytest.mark.realtime
@TRANSPORTS
@RANKS
def test_long_messages_are_exact(tmp_path: Path, ranks: int, transport: str) -> None:
    """Up to 256 MiB, ragged ones too."""
    once = ("-n", "1", "-w", "0", "--transport", transport)
    benches = [("-b", "16777236", "-e", "268435456", "-f", "15", *once), ("-b", "256M", *once)]
    ragged, whole = grids(tmp_path, ranks, benches, 2**28)
    assert [row["size"] for row in ragged[::2]] == [16777236, 251658540]
    assert {row["size"] for row in whole} == {2**28}


SIZES = (0, 20008, 40016)


def on_stand_in(cache: Path) -> dict[str, str]:
    """The environment of ranks that import a stand-in for CuPy."""
    root = Path(__file__).parents[2]
    return {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": f"{root}:{root}/tests/stand_in"}


REACHED = "3 of 3 ranks reach the GPU memory of those of their host, says the self-test"


@pytest.mark.parametrize(
    ("transport", "path"),
    [
        ("mpi", "ipc"),
        pytest.param("mpi", "staged", marks=pytest.mark.slow),
        pytest.param("tcp", "ipc", marks=pytest.mark.slow),
        pytest.param("tcp", "staged", marks=pytest.mark.slow),
    ],
)
def test_arrays_on_a_gpu_go_by_cuda_ipc_or_are_staged(transport: str, path: str, tmp_path: Path) -> None:
    """On a stand-in for CuPy, whose addresses no library could follow."""
    more = on_stand_in(tmp_path)
    words = ("-b", "40004", "-n", "2", "-o", "avg", "--json", "--transport", transport, "--device", "gpu")
    words = (*words, *(("--device-path", path) if path == "staged" else ()))
    done = launch.mpirun("-n", "3", *OPTCC, "bench", *words, "--schedule", "ring", more=more, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["out_of_bounds"] == 0
    why = {
        "mpi": "rank 0: the MPI library does not say that it takes a GPU's memory",
        "tcp": "TcpTransport reads and writes the host's memory",
    }[transport]
    why = f"ipc: {why}; {REACHED}" if path == "ipc" else "staged: nothing else was asked for"
    assert told["config"]["devices"] == [f"gpu:{number} stand-in, {why}" for number in (0, 1, 0)]


@pytest.mark.parametrize(
    ("collective", "reduction"),
    [
        ("allreduce", "avg"),
        *(
            pytest.param(name, op, marks=pytest.mark.slow)
            for name, op in (
                *(("reducescatter", "max"), ("allgather", "sum"), ("broadcast", "sum"), ("reduce", "prod")),
                *(("alltoall", "sum"), ("allreduce", "min")),
            )
        ),
    ],
)
def test_nccl_is_a_peer_on_gpus(collective: str, reduction: str, tmp_path: Path) -> None:
    """In a job of its own, on stand-ins for CuPy and NCCL; every element is checked on the GPU."""
    more = {**on_stand_in(tmp_path), "STAND_IN_NCCL": "1"}
    words = ["-b", "0", "-e", "40016", "-i", "20008", "-n", "2", "-d", "int32" if reduction == "prod" else "float"]
    words += ["-o", reduction, "--collective", collective, "--json", "--device", "gpu", "--peer", "nccl"]
    done = launch.mpirun("-n", "2", *OPTCC, "bench", *words, more=more, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["out_of_bounds"] == 0
    assert [(row["schedule"], row["size"]) for row in told["results"]] == [("nccl", size) for size in SIZES]
    assert all(row["out_of_place"]["time"] > 0 for row in told["results"])


@pytest.mark.slow
def test_nccl_that_is_not_there_is_said_once(tmp_path: Path) -> None:
    words = ("bench", "-b", "1K", "--device", "gpu", "--peer", "nccl")
    done = launch.mpirun("-n", "2", *OPTCC, *words, more=on_stand_in(tmp_path), timeout_s=TIMEOUT_S)
    assert done.returncode == 2
    assert done.stderr.count("optcc: rank 0: peer nccl: CuPy finds no NCCL: pip install nvidia-nccl-cu12") == 1
