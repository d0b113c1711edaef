"""The record of the tools' speed: cases run, what is damaged is refused, and the docs say what the record says."""

from __future__ import annotations

import pytest

from optcc.errors import CodecError, InputError
from optcc.experiments.tool_speed import CASES, ToolSpeed, measure, run_case


def test_the_record_has_every_case() -> None:
    """Every case, in the record's order."""
    record = ToolSpeed.read()
    assert [row.case for row in record.rows] == list(CASES)


def test_a_case_runs_in_a_process_of_its_own() -> None:
    """A quick one: its transfers, three times, some memory."""
    name = "sweep ring with its DSL, 1024 ranks, fifo"
    record = measure([name])
    assert record.rows[0].transfers == 2 * 1024 * 1023
    assert len(record.rows[0].seconds) == 3
    assert record.rows[0].peak_bytes > 2**20
    assert ToolSpeed.from_bytes(record.to_bytes()) == record
    with pytest.raises(InputError, match="'nope'"):
        measure(["nope"])


def test_verifying_counts_the_plan() -> None:
    """In this process: OptCC's plan of the record."""
    row = run_case("compile optimal, 64 ranks, 512 segments")
    assert row.transfers == 512 * 2 * 63


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        (b"optcc-tool-speed/1", b"optcc-tool-speed/2", r"\$\.format"),
        (b'"peak_bytes"', b'"peak"', r"\$\.rows"),
        (b'"seconds": [', b'"seconds": [-1.0,', r"\$\.rows\[0\]\.seconds"),
        (b"{", b"[", r"^record '': "),
    ],
)
def test_a_damaged_record_is_refused(before: bytes, after: bytes, path: str) -> None:
    """With the path to the field."""
    data = ToolSpeed.read().to_bytes()
    with pytest.raises(CodecError, match=path):
        ToolSpeed.from_bytes(data.replace(before, after, 1))
