"""torch's own suite for distributed backends, with Gloo, with ours, and with ours in Gloo's place, as a record.

The suite is `torch.testing._internal.distributed.distributed_test`, which comes with torch, on the CPU. Many of its
tests are for Gloo alone, by its name; those run once more with our backend wherever Gloo's is asked for. A test is

    passed       passed with our backend, under its own name or in Gloo's place, and failed under its own in no case
    skipped      not run with Gloo either: for GPUs, other backends or more ranks
    unsupported  passed by Gloo, and not by ours for the reason in `UNSUPPORTED`
    failed       any other

The record is a file of its own format, `optcc-torch-suite/1`. The one that comes with the package is made by

    make test-torch && .venv-torch/bin/optcc experiment torch-suite

in about six minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import click
import msgspec

from optcc.errors import EXIT_DONE, EXIT_REFUTED, EnvironmentMissing, InputError
from optcc.experiments.cells import RecordCells
from optcc.experiments.record import RECORDS, Check
from optcc.experiments.recorder import Measured, RecordForm, head, record_command
from optcc.experiments.torch_suite_run import FOR_GLOO, TEST_S
from optcc.show import Card

N_RANKS = 3
SPARE_S = 30.0
"""A process that says nothing for so long after a test had to be over is ended."""
UNSUPPORTED = {
    "test_monitored_barrier_gloo": "torch has monitored_barrier for Gloo alone",
    "test_monitored_barrier_gloo_rank_0_timeout": "torch has monitored_barrier for Gloo alone",
    "test_monitored_barrier_gloo_subgroup": "torch has monitored_barrier for Gloo alone",
}
OUTCOMES = ("passed", "skipped", "failed")
Verdict = Literal["passed", "skipped", "unsupported", "failed"]


class SuiteRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What came of a test with one backend: one of `OUTCOMES`, and why if it has not passed."""

    outcome: str
    reason: str
    seconds: float


class SuiteTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A test of the suite with Gloo, with ours, and with ours in Gloo's place."""

    test: str
    gloo: SuiteRun
    optcc: SuiteRun
    for_gloo: SuiteRun

    @property
    def verdict(self) -> Verdict:
        """See the head of this module."""
        outcomes = self.optcc.outcome, self.for_gloo.outcome
        if self.optcc.outcome != "failed" and "passed" in outcomes:
            return "passed"
        if self.gloo.outcome == "skipped" and "failed" not in outcomes:
            return "skipped"
        return "unsupported" if self.test in UNSUPPORTED and self.optcc.outcome != "failed" else "failed"

    @property
    def reason(self) -> str:
        """Why it has not passed."""
        if self.verdict == "passed":
            return ""
        if self.verdict == "skipped":
            return self.gloo.reason
        own = self.optcc.reason if self.optcc.outcome == "failed" else self.for_gloo.reason
        return UNSUPPORTED.get(self.test, own) if self.verdict == "unsupported" else own


@dataclass(frozen=True, slots=True)
class TorchSuiteRecord(Measured):
    """The tests, the number of ranks, torch's version, the machine and the versions."""

    format: ClassVar[str] = "optcc-torch-suite/1"
    own_path: ClassVar[Path] = RECORDS / "torch-suite.json"
    docs_page: ClassVar[str] = "pytorch.md"

    machine: dict[str, Any]
    versions: dict[str, str]
    torch: str
    n_ranks: int
    tests: tuple[SuiteTest, ...]

    def check_fields(self, check: Check) -> None:
        names = [each.test for each in self.tests]
        check("tests", len(names), len(names) > 0 and len(set(names)) == len(names), "be one or more, each once")
        for number, each in enumerate(self.tests):
            for column in ("gloo", "optcc", "for_gloo"):
                outcome = getattr(each, column).outcome
                check(f"tests[{number}].{column}.outcome", outcome, outcome in OUTCOMES, f"be one of {OUTCOMES}")

    @property
    def verdicts(self) -> Counter[str]:
        """How many tests have each verdict."""
        return Counter(each.verdict for each in self.tests)

    @property
    def exit_code(self) -> int:
        return EXIT_REFUTED if self.verdicts["failed"] else EXIT_DONE

    def remarks(self) -> list[str]:
        return [f"{each.test}: {each.verdict}: {each.reason}" for each in self.tests if each.verdict in _NOT_GOOD]

    def card(self) -> Card:
        columns: tuple[tuple[str, Callable[[SuiteTest], str]], ...] = (
            ("gloo", lambda each: each.gloo.outcome),
            ("optcc", lambda each: each.optcc.outcome),
            ("optcc in Gloo's place", lambda each: each.for_gloo.outcome),
            ("optcc, both together", lambda each: each.verdict),
        )
        rows = []
        for name, outcome_of in columns:
            count = Counter(outcome_of(each) for each in self.tests)
            rows.append((name, *(str(count[verdict]) for verdict in ("passed", "skipped", "unsupported", "failed"))))
        title = f"torch {self.torch}, {len(self.tests)} tests, {self.n_ranks} ranks"
        return Card(title, ("backend", "passed", "skipped by torch", "not supported", "failed"), tuple(rows))


_NOT_GOOD = ("unsupported", "failed")


def run_suite(backend: str, tests: Sequence[str], environ: dict[str, str]) -> Iterator[tuple[str, SuiteRun]]:
    """Each test with one backend, in a process that is ended, and begun again, if a test does not end."""
    left = list(tests)
    while left:
        began = len(left)
        for row in _answers(backend, left, environ):
            name = row.pop("test")
            left.remove(name)
            yield name, msgspec.convert(row, SuiteRun)
        if left:
            lost = left.pop(0)
            yield lost, SuiteRun("failed", f"did not end within {TEST_S + SPARE_S:g} s, or ended the suite", 0.0)
        assert len(left) < began


def _answers(backend: str, tests: Sequence[str], environ: dict[str, str]) -> Iterator[dict[str, Any]]:
    """What a process says of the tests that it runs, until it says nothing for too long."""
    with subprocess.Popen(
        [sys.executable, "-m", "optcc.experiments.torch_suite_run", backend],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environ,
        # A line that waits in a buffer would look like silence.
        bufsize=0,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write("".join(f"{name}\n" for name in tests).encode())
                process.stdin.close()
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                while selector.select(TEST_S + SPARE_S) and (line := process.stdout.readline()):
                    yield json.loads(line)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


def _suite(backend: str, tests: Sequence[str], environ: dict[str, str]) -> dict[str, SuiteRun]:
    return dict(run_suite(backend, tests, environ))


def list_tests(environ: dict[str, str]) -> list[str]:
    """The names of all tests."""
    command = [sys.executable, "-m", "optcc.experiments.torch_suite_run", "list"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise EnvironmentMissing(f"torch's suite cannot be imported: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.split()


@record_command(TorchSuiteRecord, RecordForm(quick={"pattern": "broadcast"}))
@click.option("-k", "pattern", default="", help="Only tests with this in their name.")
@click.option("--ranks", default=N_RANKS, show_default=True, help="Number of ranks.")
def command(pattern: str, ranks: int, cells: RecordCells) -> TorchSuiteRecord:
    """Run torch's own suite with Gloo and with the backend optcc, and write the record."""
    if find_spec("torch") is None:
        raise EnvironmentMissing("torch is not installed: make test-torch, then .venv-torch/bin/python -m ...")
    environ = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "OPTCC_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    tests = [name for name in list_tests(environ) if pattern in name]
    if not tests:
        raise InputError(f"tests {pattern!r}: must be in the name of one")
    suites = {each: partial(_suite, each, tests, environ) for each in ("gloo", "optcc", FOR_GLOO)}
    found = list(cells.each(suites, dict[str, SuiteRun]))
    rows = tuple(SuiteTest(name, *(each[name] for each in found)) for name in tests)
    return TorchSuiteRecord(**head(), torch=metadata.version("torch"), n_ranks=ranks, tests=rows)
