"""What a newcomer waits for: commands on a fresh environment, and again, as a record.

Each case starts in copies of the package without bytecode and without numba's cache: the first run of a command in a
copy is cold, those after it are warm. In one more copy the inner loops are compiled first, by `optcc.compile_kernels`:
runs there are compiled. Bytecode of other packages is there, since pip writes it, and all files are in the system's
cache. Recorded are wall time and processor time, which other work on the machine disturbs less. The record is a file of
its own format, `optcc-first-use/2`. The one that comes with the package is made by

    optcc experiment first-use

in about three minutes.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import click
import msgspec

import optcc
from optcc.errors import RuntimeFault
from optcc.experiments.cells import RecordCells
from optcc.experiments.record import RECORDS, Check
from optcc.experiments.recorder import Measured, RecordForm, check_times, head, record_command
from optcc.show import Card

SMALL = ("--topology", "8@1GB/s,3=500MB/s", "--size", "1MiB")
LARGE = ("--topology", "8@50GB/s,3=25GB/s", "--size", "64MiB", "--latency", "5us")
CASES: dict[str, tuple[str, ...]] = {
    "verify ring, 1 MiB": ("verify", "ring", *SMALL),
    "simulate ring, 1 MiB": ("simulate", "ring", *SMALL),
    "simulate ring, 1 MiB, fair": ("simulate", "ring", *SMALL, "--model", "fair"),
    "bound, 1 MiB": ("bound", SMALL[1], "--size", "1MiB"),
    "verify optcc, 64 MiB": ("verify", "optcc", *LARGE[:4]),
    "simulate optcc, 64 MiB": ("simulate", "optcc", *LARGE),
}
"""Commands, all for 8 ranks with one straggler."""
COPIES, WARM_RUNS = 3, 3
RUN_TIMEOUT_S = 300


class FirstUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command: seconds, and processor seconds, of each cold run, each warm one, and each with compiled loops."""

    case: str
    cold_s: list[float]
    cold_cpu_s: list[float]
    warm_s: list[float]
    warm_cpu_s: list[float]
    compiled_s: list[float]
    compiled_cpu_s: list[float]


@dataclass(frozen=True, slots=True)
class FirstUseRecord(Measured):
    """The rows, the machine and the versions."""

    format: ClassVar[str] = "optcc-first-use/2"
    own_path: ClassVar[Path] = RECORDS / "first-use.json"
    docs_page: ClassVar[str] = "performance.md"

    machine: dict[str, Any]
    versions: dict[str, str]
    rows: tuple[FirstUse, ...]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.rows):
            for name in FirstUse.__struct_fields__[1:]:
                check_times(check, f"rows[{number}].{name}", getattr(row, name))

    def card(self) -> Card:
        rows = tuple((row.case, *(f"{statistics.median(each):.2f} s" for each in _columns(row))) for row in self.rows)
        heads = ("cold", "warm", "compiled", "cold, CPU", "warm, CPU", "compiled, CPU")
        return Card("first use, 8 ranks", ("command", *heads), rows)


def _columns(row: FirstUse) -> tuple[list[float], ...]:
    return row.cold_s, row.warm_s, row.compiled_s, row.cold_cpu_s, row.warm_cpu_s, row.compiled_cpu_s


def _copy(folder: Path) -> None:
    """The package, as real files, with nothing that a run leaves behind."""
    leave = shutil.ignore_patterns("__pycache__", "records")
    shutil.copytree(Path(optcc.__file__).parent, folder / "optcc", ignore=leave)


def _run(folder: Path, words: tuple[str, ...], module: str = "optcc") -> tuple[float, float]:
    """Seconds and processor seconds of a command on the copy in `folder`; raises RuntimeFault if it fails."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "PYTHON"))}
    environment = {**kept, "PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    took_s = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeFault(f"{' '.join((module, *words))}: exit code {done.returncode}: {done.stderr.strip()}")
    return took_s, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@contextmanager
def compiled_copy() -> Iterator[Path]:
    """A copy of the package whose inner loops are compiled."""
    with tempfile.TemporaryDirectory(prefix="optcc-first-use-") as folder:
        _copy(Path(folder))
        _run(Path(folder), (), "optcc.compile_kernels")
        yield Path(folder)


def run_case(name: str, compiled: Path, copies: int = COPIES, warm_runs: int = WARM_RUNS) -> FirstUse:
    """Runs one case of `CASES`, `1 + warm_runs` times in each of so many copies of the package, and as often as there,
    but for the first time, in the copy `compiled`."""
    cold, warm = [], []
    for _ in range(copies):
        with tempfile.TemporaryDirectory(prefix="optcc-first-use-") as folder:
            _copy(Path(folder))
            cold.append(_run(Path(folder), CASES[name]))
            warm += [_run(Path(folder), CASES[name]) for _ in range(warm_runs)]
    _run(compiled, CASES[name])
    runs = cold, warm, [_run(compiled, CASES[name]) for _ in warm]
    return FirstUse(name, *(list(column) for each in runs for column in zip(*each, strict=True)))


@record_command(FirstUseRecord, RecordForm(quick={"cases": tuple(CASES)[:1]}))
@click.option("--case", "cases", type=click.Choice(tuple(CASES)), multiple=True, help="Only these cases.")
def command(cases: tuple[str, ...], cells: RecordCells) -> FirstUseRecord:
    """Measure how long commands take on a fresh environment, and again, and write the record."""
    with compiled_copy() as compiled:
        units = {name: partial(run_case, name, compiled) for name in cases or tuple(CASES)}
        return FirstUseRecord(**head(), rows=tuple(cells.each(units, FirstUse)))
