"""The record of first use: a case runs on a fresh copy and again, the record is whole, what is damaged is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from optcc.errors import CodecError, RuntimeFault
from optcc.experiments import first_use
from optcc.experiments.first_use import CASES, FirstUseRecord, _copy, run_case


def test_the_record_has_every_case() -> None:
    assert [row.case for row in FirstUseRecord.read().rows] == list(CASES)


def test_first_use_is_quick() -> None:
    """The goals of the record, for a plan of a few hundred transfers on 8 ranks: 3 s at first, 0.5 s later."""
    rows = {row.case: row for row in FirstUseRecord.read().rows}
    for name in ("verify ring, 1 MiB", "simulate ring, 1 MiB", "simulate ring, 1 MiB, fair"):
        assert max(rows[name].cold_cpu_s) <= 3
        assert min(rows[name].warm_cpu_s) <= 0.5


def test_a_case_runs_on_copies_of_the_package(tmp_path: Path) -> None:
    _copy(tmp_path)
    row = run_case("bound, 1 MiB", tmp_path, copies=2, warm_runs=1)
    assert [len(getattr(row, name)) for name in row.__struct_fields__[1:]] == [2] * 6
    assert min(row.warm_cpu_s) > 0.01


def test_a_command_that_fails_is_no_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(first_use.CASES, "wrong", ("verify", "nope", *first_use.SMALL))
    with pytest.raises(RuntimeFault, match="exit code 2: optcc: schedule 'nope'"):
        run_case("wrong", tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        (b"optcc-first-use/2", b"optcc-first-use/1", r"\$\.format"),
        (b'"warm_s"', b'"warm"', r"\$\.rows"),
        (b'"cold_s": [', b'"cold_s": [-1.0,', r"\$\.rows\[0\]\.cold_s"),
    ],
)
def test_a_damaged_record_is_refused(before: bytes, after: bytes, path: str) -> None:
    data = FirstUseRecord.read().to_bytes()
    with pytest.raises(CodecError, match=path):
        FirstUseRecord.from_bytes(data.replace(before, after, 1))
