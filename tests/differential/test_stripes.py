"""How the chunks of a channel fall on rails of unequal rates, in whole turns."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.reference.stripes import Stripes


@pytest.mark.parametrize("rates", [(1,), (1, 1), (2, 1), (10, 7), (1, 1, 1), (100, 100, 50), (25, 24), (1000, 3)])
def test_messages_are_cut_without_gaps_and_in_proportion(rates: tuple[int, ...]) -> None:
    stripes = Stripes.of(rates)
    assert set(stripes.turns) == set(range(len(rates)))
    for n_bytes in (0, 1, 63, 65536, 131_072, 1_000_003, 8 << 20):
        for first in (0, 1, 5, 17):
            pieces = stripes.cut(n_bytes, first, 1 << 20)
            assert pieces[0][0] == 0 and pieces[-1][1] == n_bytes
            assert all(a[1] == b[0] for a, b in pairwise(pieces))
            assert all(start <= end for start, end in pieces)
    totals = [0] * len(rates)
    for i, (start, end) in enumerate(stripes.cut(64 << 20, 3, 1 << 20)):
        totals[stripes.turns[(3 + i) % len(stripes.turns)]] += end - start
    for total, rate in zip(totals, rates, strict=True):
        assert total == pytest.approx((64 << 20) * rate / sum(rates), rel=0.01, abs=64 * len(stripes.turns) * 8)
