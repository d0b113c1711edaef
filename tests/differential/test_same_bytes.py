"""The same seed gives the same bytes on another machine, as far as one machine can show it.

A study is run again in processes that must not use what this processor has: numpy without any of the instruction sets
that it chooses at run time, numba for a generic processor of its kind, or not at all, BLAS for an old one; with another
hash seed, locale, time zone and number of workers. What other processors do differently is which instructions they
have, so this finds what depends on them: sums in another order, fused operations, functions of another library.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

STUDY = """
import hashlib, json, sys
from fractions import Fraction
from pathlib import Path

from optcc.compiler import compile_schedule
from optcc.experiments import failure_study, training
from optcc.experiments.cells import RecordCells
from optcc.experiments.failure_model import OneServer, Uniform
from optcc.experiments.failure_study import FailurePlan
from optcc.experiments.workers import Workers
from optcc.faults import FaultPlan
from optcc.schedules.registry import SCHEDULES
from optcc.simulate import Jitter, Policy, simulate
from optcc.topology import Topology


def main():
    jobs, folder = int(sys.argv[1]), Path(sys.argv[2])
    study = FailurePlan(
        ((Uniform(2), 4), (Uniform(3), 64), (OneServer(2), 4)),
        ((Uniform(2), 4, 2**20), (OneServer(2), 4, 2**20)),
        {"ring": (1, 2), "r2ccl-allreduce": (2,), "optcc": (2, 4), "optimal": (4, 16)},
    )
    cells = RecordCells(workers=Workers(jobs))
    failure_study.make(study, trials=300, seed=5, cells=cells).write(folder / "failures.json")
    training.make(training.QUICK, trials=300, seed=5, cells=cells).write(folder / "training.json")
    cluster = Topology.parse("6@50GB/s/2:3,1=17GB/s,4=23GB/s:41GB/s").with_latency(Fraction(5, 10**6))
    plan = compile_schedule(SCHEDULES["optimal"].build(cluster, 8), size_bytes=2**20, topology=cluster)
    faults = FaultPlan.sampled(cluster, 3, failures_per_s=3000.0, repair_s=1e-5, horizon_s=1e-4)
    moments = hashlib.sha256()
    for model in ("fifo", "exclusive", "fair"):
        noisy = simulate(plan, cluster, model=model, jitter=Jitter(11, 2e-6, 0.05), faults=faults, policy=Policy())
        for column in (noisy.start_s, noisy.sent_s, noisy.taken_s, noisy.end_s):
            moments.update(column.tobytes())
    moments.update(repr([str(fault) for fault in faults]).encode())
    (folder / "moments.txt").write_text(moments.hexdigest())


if __name__ == "__main__":
    main()
"""
"""Failures, a training step, and noisy runs with faults under all port models, uplinks included."""
FILES = ("failures.json", "training.json", "moments.txt")
TIME_S_MAX = 1800


def dispatched() -> str:
    """What numpy may use here beyond what it was built for."""
    numpy = importlib.import_module("numpy._core._multiarray_umath")
    return " ".join(name for name in numpy.__cpu_dispatch__ if numpy.__cpu_features__[name])


def run_study(folder: Path, jobs: int, **environment: str) -> dict[str, str]:
    """The digest of every file that the study writes, in a process of its own."""
    folder.mkdir()
    script = folder / "study.py"
    script.write_text(STUDY, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "NPY_", "OPENBLAS_"))}
    done = subprocess.run(
        [sys.executable, str(script), str(jobs), str(folder)],
        env={**kept, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIME_S_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With everything that this machine has."""
    return run_study(tmp_path_factory.mktemp("same") / "here", 1)


@pytest.mark.slow
def test_the_kernels_of_another_processor_write_the_same_bytes(here: dict[str, str], tmp_path: Path) -> None:
    """Nothing but the least instruction set for numpy, numba and BLAS; compiled anew."""
    features = {"NPY_DISABLE_CPU_FEATURES": dispatched()} if dispatched() else {}
    found = run_study(
        tmp_path / "old",
        1,
        **features,
        NUMBA_CPU_NAME="generic",
        NUMBA_CPU_FEATURES="",
        NUMBA_CACHE_DIR=str(tmp_path / "cache"),
        OPENBLAS_CORETYPE="Prescott",
    )
    assert found == here


@pytest.mark.slow
def test_plain_python_writes_the_same_bytes(here: dict[str, str], tmp_path: Path) -> None:
    assert run_study(tmp_path / "plain", 1, NUMBA_DISABLE_JIT="1") == here


@pytest.mark.slow
def test_workers_hashes_languages_and_clocks_make_no_difference(here: dict[str, str], tmp_path: Path) -> None:
    elsewhere = {"PYTHONHASHSEED": "4711", "LC_ALL": "C", "LANG": "C", "TZ": "Asia/Kathmandu", "OMP_NUM_THREADS": "1"}
    assert run_study(tmp_path / "elsewhere", 2, **elsewhere) == here


@pytest.mark.slow
def test_another_seed_writes_other_bytes(here: dict[str, str], tmp_path: Path) -> None:
    """Else the comparison would show nothing."""
    folder = tmp_path / "other"
    folder.mkdir()
    script = folder / "study.py"
    script.write_text(STUDY.replace("seed=5", "seed=6").replace("Jitter(11", "Jitter(12"), encoding="utf-8")
    subprocess.run([sys.executable, str(script), "1", str(folder)], check=True, timeout=TIME_S_MAX)
    found = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}
    assert all(found[name] != here[name] for name in FILES)
