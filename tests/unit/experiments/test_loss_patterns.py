"""The record of random lost NICs: no time below the bound, its worst case named, and a case made again."""

from __future__ import annotations

import pytest

from optcc.errors import CodecError
from optcc.experiments.loss_patterns import GOAL, GPUS, HEALTHY, PATTERNS, THE_PORTS, LossPatterns, measure, pattern


def test_the_record_is_near_the_bound() -> None:
    """Every pattern is within the goal, under both kinds of ports, and where nothing is lost `auto` is within 3 %."""
    record = LossPatterns.read()
    for ports in THE_PORTS:
        rows = record.under(ports)
        assert len({row.seed for row in rows}) == len(rows) >= PATTERNS
        assert min(row.ratio for row in rows) >= 1 - 1e-9
        assert rows[-1].ratio <= GOAL
        assert rows[len(rows) // 2].ratio < 1.02
        assert rows[-1].name in record.markdown()
        drawn = [row.ratio for row in rows if min(row.kept) == GPUS]
        assert drawn and max(drawn) <= 1.03
        healthy = record.under(ports, healthy=True)
        assert {(len(row.kept), row.kind) for row in healthy} == set(HEALTHY)
        assert healthy[0].ratio >= 1 - 1e-9
        assert healthy[-1].ratio <= 1.03
        assert {min(row.kept) for row in healthy} == {GPUS}


def test_every_pattern_is_what_its_seed_draws() -> None:
    for row in LossPatterns.read().rows:
        kind, topology = pattern(row.seed)
        assert row.kind == kind
        assert row.kept == tuple(sum(not nic.failed for nic in server.nics) for server in topology.servers)
        assert 1 <= min(row.kept) <= max(row.kept) <= GPUS


@pytest.mark.parametrize("healthy", [False, True])
def test_a_case_gives_what_the_record_says(*, healthy: bool) -> None:
    rows = LossPatterns.read().under("fair", healthy=healthy)
    said = next(row for row in rows if len(row.kept) == 2)
    row = measure(said.seed, "fair")
    assert row is not None
    assert (row.schedule, row.trees) == (said.schedule, said.trees)
    assert row.seconds == pytest.approx(said.seconds)


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        (b"optcc-loss-patterns/2", b"optcc-loss-patterns/3", r"\$\.format"),
        (b'"kind": "', b'"kind": "some', r"\$\.rows\[0\]\.kind"),
        (b'"seconds": 0.', b'"seconds": 0.0000', r"\$\.rows\[0\]\.seconds"),
    ],
)
def test_a_damaged_record_is_refused(before: bytes, after: bytes, path: str) -> None:
    """With the path to the field."""
    data = LossPatterns.read().to_bytes()
    with pytest.raises(CodecError, match=path):
        LossPatterns.from_bytes(data.replace(before, after, 1))
