"""The record of R2CCL's re-ranking: every case, ours near the bound, and a case made again is equal."""

from __future__ import annotations

from itertools import combinations

import pytest

from optcc.errors import CodecError
from optcc.experiments.reranking import AFTER, BEFORE, CASES, OURS, Reranking, measure, servers_apart


def test_the_record_has_every_case() -> None:
    record = Reranking.read()
    assert tuple((row.servers, row.degraded, row.lost) for row in record.rows) == CASES
    for row in record.rows:
        assert row.seconds.get(OURS, row.bound_s) <= 1.05 * row.bound_s
        assert f"{100 * (row.gain - 1):+.0f} %" in record.markdown()
    gains = {case: row.gain for case, row in zip(CASES, record.rows, strict=True)}
    assert 1.1 < gains[4, 2, 1] < 1.22 < gains[6, 3, 1], "what R2CCL states is between these"
    assert gains[8, 2, 1] < 1, "of 8 neighbours' rails some NICs carry two channels"


@pytest.mark.parametrize("case", CASES)
def test_no_two_servers_have_lost_the_same_rail(case: tuple[int, int, int]) -> None:
    servers, degraded, lost = case
    topology = servers_apart(*case)
    gone = [{nic.rail for nic in server.nics if nic.failed} for server in topology.servers]
    assert sorted(map(len, gone)) == [0] * (servers - degraded) + [lost] * degraded
    assert not any(one & other for one, other in combinations(gone, 2))


@pytest.mark.slow
def test_a_case_gives_what_the_record_says() -> None:
    said = Reranking.read().rows[0]
    row = measure(*CASES[0], transfers_max=60_000)
    assert row.bound_s == said.bound_s
    for name in (BEFORE, AFTER):
        assert said.seconds[name] <= row.seconds[name] < 1.1 * said.seconds[name]


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        (b"optcc-reranking/1", b"optcc-reranking/2", r"\$\.format"),
        (b'"bound_s": 0.', b'"bound_s": -0.', r"\$\.rows\[0\]\.bound_s"),
        (b'"nccl-ring": 0.', b'"nccl-ring": 0.0000', r"\$\.rows\[0\]\.seconds"),
    ],
)
def test_a_damaged_record_is_refused(before: bytes, after: bytes, path: str) -> None:
    data = Reranking.read().to_bytes()
    with pytest.raises(CodecError, match=path):
        Reranking.from_bytes(data.replace(before, after, 1))
