"""The record of how long planning takes: a case runs, what is damaged is refused, and the docs say what it says."""

from __future__ import annotations

import statistics

import pytest

from optcc.errors import CodecError
from optcc.experiments.planning_speed import (
    MANY_RANKS,
    MANY_RANKS_SIZES,
    RATES,
    REPEATS,
    SIZES,
    PlanningSpeed,
    run_case,
)
from optcc.timing import MODELS


def test_the_record_has_every_case() -> None:
    record = PlanningSpeed.read()
    assert [(row.ranks, row.ports, row.rates, row.size_bytes) for row in record.rows] == [
        (ranks, ports, rates, size_bytes)
        for ranks in REPEATS
        for ports in MODELS
        for rates in RATES
        for size_bytes in (SIZES if ranks < MANY_RANKS else MANY_RANKS_SIZES)
    ]


def test_many_ranks_are_planned_within_the_goals() -> None:
    """In the record: 1024 ranks within 20 s, and verified within 60 s."""
    rows = [row for row in PlanningSpeed.read().rows if row.ranks == 1024]
    assert max(statistics.median(row.choose_s) for row in rows) < 20
    assert max(statistics.median(row.planned_s) for row in rows) < 60


def test_a_case_runs() -> None:
    row = run_case(4, RATES[0], "fifo", 2**16, repeats=2)
    assert len(row.choose_s) == len(row.planned_s) == 2
    assert all(0 < choose_s < planned_s for choose_s, planned_s in zip(row.choose_s, row.planned_s, strict=True))
    assert row.transfers > 0


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        (b"optcc-planning-speed/1", b"optcc-planning-speed/2", r"\$\.format"),
        (b'"transfers"', b'"transfer"', r"\$\.rows"),
        (b'"choose_s": [', b'"choose_s": [0.0,', r"\$\.rows\[0\]\.choose_s"),
        (b"{", b"[", r"^record '': "),
    ],
)
def test_a_damaged_record_is_refused(before: bytes, after: bytes, path: str) -> None:
    """With the path to the field."""
    data = PlanningSpeed.read().to_bytes()
    with pytest.raises(CodecError, match=path):
        PlanningSpeed.from_bytes(data.replace(before, after, 1))
