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
    SERVERS,
    SERVERS_PORTS,
    SIZES,
    PlanningSpeed,
    run_case,
    run_servers,
)
from optcc.planner import NEAR_OF_MANY
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
    every = [(text, ports) for text in SERVERS for ports in SERVERS_PORTS]
    there = [(row.topology, row.ports) for row in record.servers]
    assert there == [each for each in every if each in there]
    shown = [[line[:2] for line in card.rows] for card in record.cards()]  # what the command prints
    assert shown[1] == [(f"`{row.topology}`", row.ports) for row in record.servers]
    assert all(row.topology in record.markdown() for row in record.servers)


def test_many_ranks_are_planned_within_the_goals() -> None:
    """In the record: 1024 ranks within 20 s, and verified within 60 s."""
    rows = [row for row in PlanningSpeed.read().rows if row.ranks == 1024]
    assert max(statistics.median(row.choose_s) for row in rows) < 20
    assert max(statistics.median(row.planned_s) for row in rows) < 60


SERVERS_GOALS_S = dict(zip(SERVERS, (2, 5, None, 120), strict=True))


def test_servers_are_planned_within_the_goals() -> None:
    """In the record: the bound, a plan and its proof, for 8 to 128 servers under each kind of ports."""
    rows = {(row.topology, row.ports): row for row in PlanningSpeed.read().servers}
    assert set(rows) == {(text, ports) for text in SERVERS for ports in SERVERS_PORTS}
    for (text, _), row in rows.items():
        goal_s = SERVERS_GOALS_S[text]
        assert goal_s is None or statistics.median(row.proved_s) <= goal_s
        assert row.memory_bytes <= 8e9
        assert row.over_bound <= (1.05 if text in list(SERVERS)[:2] else NEAR_OF_MANY)


def test_servers_are_planned_in_a_process_of_their_own() -> None:
    row = run_servers("2xdgx-h100,1=4/8", "fifo", repeats=1)
    assert 0 < row.bound_s[0] < row.planned_s[0] < row.proved_s[0]
    assert 1 <= row.over_bound < 1.05 and row.transfers > 0 and row.memory_bytes > 2**20


def test_a_case_runs() -> None:
    row = run_case(4, RATES[0], "fifo", 2**16, repeats=2)
    assert len(row.choose_s) == len(row.planned_s) == 2
    assert all(0 < choose_s < planned_s for choose_s, planned_s in zip(row.choose_s, row.planned_s, strict=True))
    assert row.transfers > 0


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        (b"optcc-planning-speed/2", b"optcc-planning-speed/3", r"\$\.format"),
        (b'"transfers"', b'"transfer"', r"\$\.rows"),
        (b'"choose_s": [', b'"choose_s": [0.0,', r"\$\.rows\[0\]\.choose_s"),
        (b'"proved_s": [', b'"proved_s": [0.0,', r"\$\.servers\[0\]\.proved_s"),
        (b"{", b"[", r"^record '': "),
    ],
)
def test_a_damaged_record_is_refused(before: bytes, after: bytes, path: str) -> None:
    """With the path to the field."""
    data = PlanningSpeed.read().to_bytes()
    with pytest.raises(CodecError, match=path):
        PlanningSpeed.from_bytes(data.replace(before, after, 1))
