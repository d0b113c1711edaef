"""Runs tests of torch's own suite for distributed backends, one a line on standard input: what came of each, as JSON.

    python -m optcc.experiments.torch_suite_run list
    echo test_all_reduce_sum | python -m optcc.experiments.torch_suite_run optcc

`optcc-for-gloo` runs what the suite has for Gloo alone, with our backend wherever Gloo's is asked for. Ranks are
forked; the suite itself spawns them, which imports torch and all that tests need in each of them, for every test.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

import click

FOR_GLOO = "optcc-for-gloo"
TEST_S = 100
"""A test that takes longer has failed."""
_REASON = re.compile(r"for following reason: (.*)")
_ERROR = re.compile(r"^(?:[\w.]*(?:Error|Exception|Exit|Lost)\b.*|.*exited with .*|.*terminated .*)$", re.MULTILINE)


def prepare(backend: str) -> type[unittest.TestCase]:
    """The suite for one backend, which it finds in the environment."""
    os.environ["BACKEND"] = "gloo" if backend == FOR_GLOO else backend
    os.environ.setdefault("WORLD_SIZE", "3")
    os.environ["TEMP_DIR"] = tempfile.mkdtemp(prefix="optcc-torch-suite-")

    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from torch.testing._internal import common_distributed

    # The tests are chosen by it as they are imported.
    for feature in ("plugin", "ddp"):
        common_distributed.DistTestCases.backend_feature[feature].add("optcc")
    from torch.testing._internal.distributed import distributed_test

    import optcc.torch.process_group  # noqa: F401 - what ranks need is imported before they are forked

    if backend == FOR_GLOO:
        original = distributed_c10d._new_process_group_helper

        def ours(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **options: Any) -> Any:
            is_gloo = str(backend) in ("gloo", "cpu:gloo")
            return original(size, rank, ranks, dist.Backend("optcc") if is_gloo else backend, *args, **options)

        distributed_c10d._new_process_group_helper = ours
    common_distributed.TIMEOUT_OVERRIDE.clear()
    common_distributed.get_timeout = lambda _: TEST_S

    own, tests = distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase

    class TorchSuite(own, tests):  # type: ignore[misc, valid-type] # torch is Any
        """The tests, whose ranks are forked."""

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(common_distributed.torch.multiprocessing.get_context("fork").Process)

    return TorchSuite


def run_one(suite: type[unittest.TestCase], name: str, log: Path) -> dict[str, Any]:
    """What came of a test: passed, skipped or failed, and why."""
    log.write_text("", encoding="utf-8")
    result, began_s = unittest.TestResult(), time.monotonic()
    suite(name).run(result)
    said = log.read_text(encoding="utf-8", errors="replace")
    row = {"test": name, "outcome": "passed", "reason": "", "seconds": round(time.monotonic() - began_s, 2)}
    if result.skipped:
        reasons = _REASON.findall(said)
        row |= {"outcome": "skipped", "reason": reasons[0] if reasons else result.skipped[0][1]}
    for _, text in result.failures + result.errors:
        found = _ERROR.findall(said) or _ERROR.findall(text)
        row |= {"outcome": "failed", "reason": found[0][:300] if found else text.strip().splitlines()[-1][:300]}
    return row


@click.command()
@click.argument("backend")
def command(backend: str) -> None:
    """Run the tests that standard input names with BACKEND, or list them all."""
    suite = prepare("gloo" if backend == "list" else backend)
    if backend == "list":
        print(*unittest.TestLoader().getTestCaseNames(suite), sep="\n")
        return
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What tests print is no answer.
    os.dup2(2, 1)
    log = Path(os.environ["TEMP_DIR"]) / "log"
    logger = logging.getLogger("torch.testing._internal.common_distributed")
    logger.addHandler(logging.FileHandler(log, mode="a", encoding="utf-8"))
    for line in sys.stdin:
        print(json.dumps(run_one(suite, line.strip(), log)), file=answers, flush=True)


if __name__ == "__main__":
    command()
