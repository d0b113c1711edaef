"""Jobs under mpirun on this machine, for the tests of this folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from optcc.experiments.fabric.mpi import LOCAL_JOB

ROOT = Path(__file__).parents[2]


def find_mpirun() -> str | None:
    """Open MPI's mpirun beside the interpreter, or that of the system."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def mpirun(
    *words: str, more: Mapping[str, str] | None = None, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """Runs mpirun with these words, `more` in its environment; more ranks than cores are fine."""
    return subprocess.run(
        [find_mpirun() or "mpirun", *words],
        env={**os.environ, **LOCAL_JOB, **(more or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def rank_command(n_ranks: int, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of ranks that run a file of the tests; skips where MPI is missing."""
    program = find_mpirun()
    if program is None or find_spec("mpi4py") is None:
        pytest.skip("no mpirun or no mpi4py on this machine")
    environment = {
        **os.environ,
        **LOCAL_JOB,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    return [program, "-n", str(n_ranks), sys.executable, *arguments], environment
