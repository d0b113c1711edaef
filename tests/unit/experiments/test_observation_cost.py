"""The record of what observation costs: it has every case, keeps to the budget, and what is damaged is refused."""

from __future__ import annotations

import pytest

from optcc.errors import CodecError
from optcc.experiments.observation_cost import (
    AGAIN,
    BEDS,
    CASES,
    LONG,
    LOOPBACK,
    ON,
    SHORT,
    ObservationCost,
    ObservationTiming,
    measure,
)


def test_the_record_has_every_case() -> None:
    rows = {(row.bed, row.size_bytes, row.case): len(row.seconds) for row in ObservationCost.read().rows}
    assert set(rows) == {(bed, size, case) for bed in BEDS for size in (SHORT, LONG) for case in CASES}
    # 64 MiB on the fabric, which are within 0.02 % of each other, were measured less often.
    assert min(rows.values()) >= 10


def test_differences_are_taken_within_rounds() -> None:
    seconds = {"off": [1.0, 5.0, 9.0], ON: [1.5, 5.25, 9.5], "checked": [1.0, 5.0, 9.0], AGAIN: [1.0, 5.0, 9.5]}
    rows = tuple(ObservationTiming(LOOPBACK, LONG, case, its) for case, its in seconds.items())
    made = ObservationCost({}, {}, rows)
    assert made.cost_s(LOOPBACK, LONG, ON) == 0.5
    assert made.cost_s(LOOPBACK, LONG, AGAIN) == 0.0
    assert "+10.00%" in made.markdown()


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        (b"optcc-observation-cost/1", b"optcc-observation-cost/2", r"\$\.format"),
        (b'"seconds": [', b'"seconds": [-1.0,', r"\$\.rows\[0\]\.seconds"),
        (b'"case": "on"', b'"case": "half on"', r"\$\.rows\[1\]\.case"),
    ],
)
def test_a_damaged_record_is_refused(before: bytes, after: bytes, path: str) -> None:
    data = ObservationCost.read().to_bytes()
    assert ObservationCost.from_bytes(data) == ObservationCost.read()
    assert before in data
    with pytest.raises(CodecError, match=path):
        ObservationCost.from_bytes(data.replace(before, after, 1))


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.mpi
def test_it_can_be_measured_again() -> None:
    assert {row.case for row in measure(0.01).rows} == set(CASES)
