"""The record of `auto` beside the best single schedule: within the goal, made again, and shown in the docs."""

from __future__ import annotations

import pytest

from optcc.errors import CodecError
from optcc.experiments.auto_ratios import GOAL, SIZES, THE_PORTS, TOPOLOGIES, AutoRatios, best_single, cluster, compare
from optcc.timing import Model


def test_the_record_has_every_case() -> None:
    record = AutoRatios.read()
    cases = [(row.topology, row.ports, row.size_bytes) for row in record.rows]
    assert cases == [(text, ports, size) for text in TOPOLOGIES for ports in THE_PORTS for size in SIZES]


def test_auto_is_within_five_percent_but_for_one_case_in_a_hundred() -> None:
    ratios = [row.ratio for row in AutoRatios.read().rows]
    assert sum(ratio > GOAL for ratio in ratios) <= len(ratios) / 100
    assert max(ratios) <= 1.08


@pytest.mark.parametrize(
    ("text", "ports", "size_bytes"),
    [("4@50GB/s", "fifo", 65532), ("5, random rates, seed 0", "fair", 2**18), ("6@50GB/s,2=20GB/s", "fair", 1024)],
)
def test_a_case_gives_what_the_record_says(text: str, ports: Model, size_bytes: int) -> None:
    row = compare(text, size_bytes, ports)
    (said,) = (
        each
        for each in AutoRatios.read().rows
        if (each.topology, each.ports, each.size_bytes) == (text, ports, size_bytes)
    )
    assert row.auto_s == pytest.approx(said.auto_s)
    assert row.best_s == pytest.approx(said.best_s)


def test_the_best_single_schedule_is_the_fastest() -> None:
    """Of 1 KiB for 4 ranks: two latencies and a few bytes, which only few schedules take."""
    seconds, name, _ = best_single(cluster("4@50GB/s"), 1024, "fifo")
    assert name in ("direct", "shares")
    assert 10e-6 < seconds < 11e-6


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        (b"optcc-auto-ratios/1", b"optcc-auto-ratios/2", r"\$\.format"),
        (b'"best_segments"', b'"segments"', r"\$\.rows"),
        (b'"auto_s": ', b'"auto_s": -', r"\$\.rows\[0\]\.auto_s"),
    ],
)
def test_a_damaged_record_is_refused(before: bytes, after: bytes, path: str) -> None:
    """With the path to the field."""
    data = AutoRatios.read().to_bytes()
    with pytest.raises(CodecError, match=path):
        AutoRatios.from_bytes(data.replace(before, after, 1))
