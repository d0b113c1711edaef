"""The rounds of an allgather, walked through for all ranks at once."""

from __future__ import annotations

import pytest

from optcc.runtime.protocol.bruck import Gathering


@pytest.mark.parametrize("n_ranks", [*range(1, 18), 64])
@pytest.mark.parametrize("size", [0, 1, 5])
def test_after_the_rounds_everybody_has_every_part(n_ranks: int, size: int) -> None:
    payloads = [bytes([rank] * size) for rank in range(n_ranks)]
    ranks = [Gathering(rank, n_ranks, payload) for rank, payload in enumerate(payloads)]
    n_rounds = {len(each.rounds) for each in ranks}
    assert n_rounds == {(n_ranks - 1).bit_length()}
    for number in range(n_rounds.pop()):
        sent = {(rank, each.rounds[number].dst): each.rounds[number].out.copy() for rank, each in enumerate(ranks)}
        for rank, each in enumerate(ranks):
            _, _, src, into = each.rounds[number]
            into[...] = sent.pop((src, rank))
        assert not sent
    assert all(each.parts == payloads for each in ranks)
