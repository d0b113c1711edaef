"""A late rank in simulation: StragglAR's formula, what the delay hides, and the record."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from optcc.errors import CodecError
from optcc.experiments.late_rank import (
    DELAYS,
    KEPT,
    LATENCY_S,
    RANKS,
    RATE,
    RING,
    SEGMENTS,
    SIZE_BYTES,
    STRAGGLAR,
    LateRank,
    measure,
)


def formula_s(ranks: int, latency_s: float) -> float:
    """StragglAR from the arrival of the last rank, if the reduce-scatter of the others is over; of a power of two."""
    rounds = ranks + math.log2(ranks) - 2
    return rounds / (ranks - 1) * SIZE_BYTES / RATE + rounds * latency_s


def test_the_record_has_every_case() -> None:
    found = [(row.ranks, row.kept, row.schedule) for row in LateRank.read().rows]
    assert found == [(ranks, float(kept), name) for ranks in RANKS for kept in KEPT for name in SEGMENTS]


@pytest.mark.parametrize("ranks", RANKS)
def test_a_late_rank_costs_what_the_papers_formula_says(ranks: int) -> None:
    record = LateRank.read()
    late = record.row(ranks, 1.0, STRAGGLAR)
    assert formula_s(ranks, 0.0) < late.seconds[-1] < 1.1 * formula_s(ranks, float(LATENCY_S))
    ring = record.row(ranks, 1.0, RING)
    assert max(ring.seconds) == pytest.approx(min(ring.seconds), rel=1e-6), "it waits for the rank from the start"
    assert record.gain(ranks) == max(ring.seconds[at] / late.seconds[at] for at in (2, 3))


def test_of_a_rank_that_is_slow_too_ours_is_the_faster() -> None:
    record = LateRank.read()
    for ranks in RANKS:
        ours = min(min(record.row(ranks, 0.5, name).seconds) for name in ("optcc", "optimal"))
        assert ours < min(record.row(ranks, 0.5, RING).seconds)
    assert min(record.row(8, 0.5, "optimal").seconds) < min(record.row(8, 0.5, STRAGGLAR).seconds)


def test_a_case_gives_what_the_record_says() -> None:
    for name in (RING, STRAGGLAR):
        assert measure(8, Fraction(1), name) == LateRank.read().row(8, 1.0, name)


def test_what_is_no_row_is_refused() -> None:
    data = LateRank.read().to_bytes()
    for find, replacement, said in (
        (b'"kept": 0.5', b'"kept": 1.5', r"\$\.rows\[\d+\]\.kept: 1.5: must be above zero, at most 1"),
        (b'"segments": [', b'"segments": [1, ', r"\$\.rows\[0\]\.seconds: .*one for each delay"),
    ):
        with pytest.raises(CodecError, match=said):
            LateRank.from_bytes(data.replace(find, replacement, 1), "r")
    assert len(DELAYS) == len(LateRank.read().rows[0].seconds)
