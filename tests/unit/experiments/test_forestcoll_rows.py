"""The record beside ForestColl's throughput: rows within a percent, the bound its value, a row made again equal."""

from __future__ import annotations

import pytest

from optcc.errors import CodecError
from optcc.experiments.forestcoll_rows import FORESTCOLL, NEAR, SCHEDULES_OF, ForestCollRows, measure
from optcc.experiments.lost_nics import SIZE_BYTES


def test_every_row_reaches_the_throughput_within_a_percent() -> None:
    record = ForestCollRows.read()
    assert [(row.topology, row.collective) for row in record.rows] == [
        (text, name) for text in FORESTCOLL for name in SCHEDULES_OF
    ]
    for row in record.rows:
        assert pytest.approx(FORESTCOLL[row.topology], rel=1e-4) == SIZE_BYTES / row.bound_s / 1e9
        assert row.ratio <= NEAR
        assert f"{row.throughput:.2f}" in record.markdown()


def test_a_row_made_again_is_equal() -> None:
    text, name = "4xdgx-h100", "reducescatter"
    said = next(row for row in ForestCollRows.read().rows if (row.topology, row.collective) == (text, name))
    assert measure(text, name, (said.segments,)) == said


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        (b"optcc-forestcoll-rows/1", b"optcc-forestcoll-rows/2", r"\$\.format"),
        (b'"bound_s": 0.', b'"bound_s": -0.', r"\$\.rows\[0\]\.bound_s"),
        (b'"seconds": 0.', b'"seconds": 0.000', r"\$\.rows\[0\]\.seconds"),
        (b'"2xdgx-a100"', b'"3xdgx-a100"', r"\$\.rows\[0\]\.topology"),
        (b'"packed-all-gather"', b'"packed-reduce"', r"\$\.rows\[0\]\.schedule"),
    ],
)
def test_a_damaged_record_is_refused(before: bytes, after: bytes, path: str) -> None:
    data = ForestCollRows.read().to_bytes()
    assert before in data
    with pytest.raises(CodecError, match=path):
        ForestCollRows.from_bytes(data.replace(before, after, 1))
