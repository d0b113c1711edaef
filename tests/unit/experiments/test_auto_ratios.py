"""The record of `auto` beside the best single schedule: within the goal, made again, and shown in the docs."""

from __future__ import annotations

import pytest

from optcc.errors import CodecError
from optcc.experiments.auto_ratios import GOAL, SIZES, THE_PORTS, TOPOLOGIES, AutoRatios, best_single, cluster, compare
from optcc.experiments.docs_tables import DOCS
from optcc.timing import Model


def test_the_record_has_every_case() -> None:
    record = AutoRatios.read()
    cases = [(row.topology, row.ports, row.size_bytes) for row in record.rows]
    assert cases == [(text, ports, size) for text in TOPOLOGIES for ports in THE_PORTS for size in SIZES]


@pytest.mark.xfail(strict=True, reason="7 of 620 cases, where 6 may be: docs/schedules.md says which, and why")
def test_auto_is_within_five_percent_but_for_one_case_in_a_hundred() -> None:
    ratios = [row.ratio for row in AutoRatios.read().rows]
    assert sum(ratio > GOAL for ratio in ratios) <= len(ratios) / 100


def test_auto_is_within_eight_percent() -> None:
    assert max(row.ratio for row in AutoRatios.read().rows) <= 1.08


def test_the_docs_say_in_which_cases_the_goal_is_missed() -> None:
    above = [row for row in AutoRatios.read().rows if row.ratio > GOAL]
    direct = [row for row in above if (row.auto, row.auto_segments, row.best) == ("direct", 1, "direct")]
    text = (DOCS / "schedules.md").read_text(encoding="utf-8")
    assert f"In {sum(row.best == 'rank-order' for row in above)} of these cases `rank-order` is the fastest" in text
    assert {row.size_bytes for row in direct} == {16388}
    assert f"in {len(direct)}, all of 16,388 B, `direct` is faster in more segments" in text


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
