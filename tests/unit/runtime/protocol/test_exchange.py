"""allgather and barrier over the messages of one channel of each pair."""

from __future__ import annotations

import pytest

from optcc.runtime.protocol.exchange import Exchange
from tests.unit.runtime.protocol.network import Network


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("size", [0, 5, 30_000])
def test_everybody_gets_every_part(n_ranks: int, size: int) -> None:
    network = Network(n_ranks)
    for turn in range(2):
        payloads = [bytes([rank + 10 * turn]) * size for rank in range(n_ranks)]
        exchanges = [Exchange(*each) for each in zip(network.endpoints, payloads, strict=True)]
        network.until(lambda exchanges=exchanges: [each.step() for each in exchanges] == [True] * n_ranks)  # type: ignore[misc]
        assert all(each.parts == payloads for each in exchanges)
    assert all(not endpoint.events for endpoint in network.endpoints), "nothing of it is an event of the program"


def test_nobody_is_done_before_the_last_has_come() -> None:
    network = Network(3)
    exchanges = [Exchange(endpoint, b"a") for endpoint in network.endpoints[:2]]
    network.run(1.0)
    for _ in range(5):
        assert [each.step() for each in exchanges] == [False, False]
        network.run(0.1)
    exchanges.append(Exchange(network.endpoints[2], b"c"))
    network.until(lambda: [each.step() for each in exchanges] == [True] * 3)
    assert exchanges[0].parts == [b"a", b"a", b"c"]


def test_it_is_over_only_when_what_this_rank_sent_is_acknowledged() -> None:
    network = Network(2)
    exchanges = [Exchange(endpoint, b"") for endpoint in network.endpoints]
    network.settle()
    network.run(0.1)
    assert not exchanges[0].step()
    network.settle()
    assert not exchanges[1].step(), "its own message is on its way"
    network.asleep.add(1)
    network.settle()
    assert not exchanges[0].step(), "its message has not been read"
    network.asleep.clear()
    network.settle()
    assert exchanges[0].step() and exchanges[1].step()
