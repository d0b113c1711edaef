"""The record of the executor's cost: cases run, what is damaged is refused, and the docs say what the record says."""

from __future__ import annotations

import pytest

from optcc.errors import CodecError
from optcc.experiments.executor_speed import ALONE, CASES, ExecutorSpeed, measure_alone, measure_job, profile


def test_the_record_has_every_case() -> None:
    record = ExecutorSpeed.read()
    assert [row.case for row in record.rows] == list(CASES)


def test_an_instruction_costs_less_than_the_goal() -> None:
    """15 us, in the record; one plan of many instructions and one of few."""
    rows = {row.case: row for row in ExecutorSpeed.read().rows}
    for case in ALONE:
        assert 0 < rows[case].instruction_us <= 15


@pytest.mark.parametrize("case", ALONE)
def test_a_case_runs_over_the_transport_that_is_done_at_once(case: str) -> None:
    row = measure_alone(case, rounds=2, runs=10)
    assert row.instructions in (6, 480)
    assert len(row.cpu_s) == len(row.wall_s) == 2


def test_the_profile_names_the_machine_and_the_engine() -> None:
    shares = profile(runs=2)
    assert 0 < sum(share.share for share in shares) <= 1
    assert {"engine", "state"} <= {share.function.partition(".")[0] for share in shares}


@pytest.mark.slow
@pytest.mark.mpi
def test_the_job_of_four_ranks_runs() -> None:
    rows = measure_job(rounds=1, runs=10)
    assert [row.case for row in rows] == [case for case in CASES if case not in ALONE]
    assert [row.instructions for row in rows] == [224, 224, 6, 6, 0]


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        (b"optcc-executor-speed/1", b"optcc-executor-speed/2", r"\$\.format"),
        (b'"instructions"', b'"instruction"', r"\$\.rows"),
        (b'"cpu_s": [', b'"cpu_s": [0.0,', r"\$\.rows\[0\]\.cpu_s"),
        (b"{", b"[", r"^record '': "),
    ],
)
def test_a_damaged_record_is_refused(before: bytes, after: bytes, path: str) -> None:
    """With the path to the field."""
    data = ExecutorSpeed.read().to_bytes()
    with pytest.raises(CodecError, match=path):
        ExecutorSpeed.from_bytes(data.replace(before, after, 1))
