"""The record of torch's own suite: what counts as passed, and that nothing in it has failed. The suite itself runs in
tests/torch, where torch is."""

from __future__ import annotations

import sys

import pytest
from click.testing import CliRunner

from optcc.errors import EXIT_DONE, EXIT_REFUTED, CodecError
from optcc.experiments.torch_suite import UNSUPPORTED, SuiteRun, SuiteTest, TorchSuiteRecord, command

MONITORED = "test_monitored_barrier_gloo"
P, S, F = "passed", "skipped", "failed"


def row(name: str, *outcomes: str) -> SuiteTest:
    return SuiteTest(name, *(SuiteRun(each, f"because {number}", 1.0) for number, each in enumerate(outcomes)))


@pytest.mark.parametrize(
    ("name", "outcomes", "verdict", "reason"),
    [
        ("test_a", (P, P, P), "passed", ""),
        ("test_a", (P, S, P), "passed", ""),
        # A test that says "gloo" itself.
        ("test_a", (P, P, F), "passed", ""),
        ("test_a", (S, S, S), "skipped", "because 0"),
        ("test_a", (P, S, S), "failed", "because 2"),
        ("test_a", (P, S, F), "failed", "because 2"),
        ("test_a", (S, F, S), "failed", "because 1"),
        ("test_a", (P, F, P), "failed", "because 1"),
        (MONITORED, (P, S, F), "unsupported", UNSUPPORTED[MONITORED]),
        (MONITORED, (P, F, F), "failed", "because 1"),
    ],
)
def test_verdicts(name: str, outcomes: tuple[str, ...], verdict: str, reason: str) -> None:
    made = row(name, *outcomes)
    assert (made.verdict, made.reason) == (verdict, reason)


def test_nothing_in_the_record_has_failed() -> None:
    record = TorchSuiteRecord.read()
    assert record.exit_code == EXIT_DONE
    assert record.verdicts["failed"] == 0
    assert len(record.tests) > 250
    of_gloo = sum(each.gloo.outcome == "passed" for each in record.tests)
    assert record.verdicts["passed"] + record.verdicts["unsupported"] >= of_gloo > 80
    assert {each.test for each in record.tests if each.verdict == "unsupported"} == set(UNSUPPORTED)


def test_a_record_with_a_failure_says_which() -> None:
    record = TorchSuiteRecord(
        {}, {}, "2.13", 3, (row("test_a", P, F, P), row(MONITORED, P, S, F), row("test_b", P, P, P))
    )
    assert record.exit_code == EXIT_REFUTED
    assert record.remarks() == [
        "test_a: failed: because 1",
        f"{MONITORED}: unsupported: {UNSUPPORTED[MONITORED]}",
    ]
    assert record.card().rows[-1] == ("optcc, both together", "1", "0", "1", "1")


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        (b"optcc-torch-suite/1", b"optcc-torch-suite/0", r"\$\.format"),
        (b'"outcome": "passed"', b'"outcome": "good"', r"\$\.tests\[\d+\]\.\w+\.outcome"),
    ],
)
def test_a_damaged_record_is_refused(before: bytes, after: bytes, path: str) -> None:
    data = TorchSuiteRecord.read().to_bytes()
    assert before in data
    with pytest.raises(CodecError, match=path):
        TorchSuiteRecord.from_bytes(data.replace(before, after, 1))


def test_without_torch_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optcc.experiments.torch_suite.find_spec", lambda _: None)
    said = CliRunner().invoke(command, catch_exceptions=True)
    assert "torch is not installed" in str(said.exception)
    assert "torch" not in sys.modules or said.exit_code != 0
