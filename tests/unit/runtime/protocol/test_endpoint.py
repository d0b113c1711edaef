"""One rank's end of the protocol as a driver sees it: channels, failures of NICs, control frames, and the time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from optcc.errors import InputError, MismatchError, RankLost
from optcc.plan import Channel
from optcc.runtime.protocol import endpoint as module
from optcc.runtime.protocol.endpoint import TICK_S
from optcc.runtime.protocol.liveness import CLOSE_WATCH_S, WATCH_S
from optcc.runtime.transport import RECEIVED, SENT
from tests.unit.runtime.protocol.network import Network, endpoint_of


def test_messages_of_different_lengths_are_a_named_error() -> None:
    network = Network(2)
    (handle,), _ = network.open((0, 1))
    network.until(network.all_up)
    network.post_recv(1, handle, np.zeros(11, np.uint8))
    network.post_send(0, handle, np.zeros(10, np.uint8))
    network.run(0.1)
    with pytest.raises(MismatchError, match="channel 0->1: 10 B sent, 11 B expected"):
        network.poll(1)


def test_the_first_failure_counts() -> None:
    endpoint = endpoint_of(0, 2)
    first = RankLost("the first")
    endpoint.fail(first)
    endpoint.fail(MismatchError("the second"))
    assert endpoint.failure is first


def test_channels_that_cannot_be_are_refused_and_those_of_others_have_no_handle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint = endpoint_of(1, 3)
    channels = [Channel(0, 1, 1), Channel(1, 2, 1), Channel(0, 2, 1), Channel(1, 2, 2)]
    assert endpoint.open(channels) == [0, 1, -1, 2]
    assert endpoint.outbounds.keys() == {2} and endpoint.inbounds.keys() == {0}
    for src, dst in ((0, 3), (-1, 1), (1, 1)):
        with pytest.raises(InputError, match="must join two ranks below 3"):
            endpoint.open([Channel(src, dst, 1)])
    monkeypatch.setattr(module, "CHANNELS_MAX", 2)
    with pytest.raises(InputError, match="channel 1->2 number 2: must be below 2"):
        endpoint.open([Channel(1, 2, 3)] * 3)


def test_channels_of_no_plan_leave_what_the_last_plan_carries() -> None:
    """Those of messages, of the probe and of the exchange are opened while a plan is in use."""
    endpoint = endpoint_of(0, 3)
    endpoint.open([Channel(0, 1, 1), Channel(0, 2, 1), Channel(1, 2, 1)], carried=[100, 50, 7])
    carried = {(0, 1): 100, (0, 2): 50, (1, 2): 7}
    assert endpoint.rates.carried == carried
    endpoint.open_over([Channel(0, 1, 1), Channel(2, 0, 1)], [0, 0], 5)
    endpoint.open([Channel(0, 2, 1)], 6)
    assert endpoint.rates.carried == carried
    endpoint.open([Channel(0, 2, 1)], 7, carried=[3])
    assert endpoint.rates.carried == {(0, 2): 3}


def test_a_nic_that_the_kernel_calls_down_is_given_up_at_both_ends_and_dialled_when_it_is_back() -> None:
    pairs = [(rank, (rank + 1) % 4) for rank in range(4)]
    network = Network(4)
    handles = network.open(*pairs)
    network.barrier()
    network.until(network.all_up)
    rng = np.random.default_rng(2)

    def exchange() -> None:
        """A message from each rank to the next one."""
        sent = [rng.integers(0, 256, 1 << 18, np.uint8) for _ in range(4)]
        into = [np.zeros(1 << 18, np.uint8) for _ in range(4)]
        for number, (src, dst) in enumerate(pairs):
            network.post_recv(dst, handles[dst][number], into[src])
            network.post_send(src, handles[src][number], sent[src])
        for rank in range(4):
            wanted = {(SENT, handles[rank][rank]), (RECEIVED, handles[rank][rank - 1])}
            assert set(network.poll(rank)) == wanted
        assert all(np.array_equal(*pair) for pair in zip(sent, into, strict=True))

    exchange()
    down = network.endpoints[1]
    network.unreachable.add((1, 1))
    down.nic_changed(1, False)
    assert not network.connections(1, 1) and down.nic_up == [True, False]
    exchange()
    for rank, endpoint in enumerate(network.endpoints):
        lost = [
            outbound.rails[1].connection is None
            for outbound in endpoint.outbounds.values()
            if 1 in (rank, outbound.peer)
        ]
        assert all(lost), "at both ends"
        assert (endpoint.rail_counts[1].failures > 0) == (rank == 1 or 1 in endpoint.outbounds)
    network.run(1.0)
    assert all(rail.dialing is None for outbound in down.outbounds.values() for rail in outbound.rails), "nobody tries"
    network.unreachable.clear()
    down.nic_changed(1, True)
    # The others are told, and dial at once: their own waits have grown to a quarter of a second.
    network.until(network.all_up, 0.02)
    exchange()


def test_a_dialling_over_a_nic_that_goes_down_is_hung_up() -> None:
    endpoint = endpoint_of(0, 2)
    endpoint.outbound(1)
    endpoint.tick()
    (first, second) = (rail.dialing for rail in endpoint.outbounds[1].rails)
    assert first is not None and second is not None
    endpoint.nic_changed(1, False)
    assert second.is_closed and not first.is_closed and endpoint.to_close == [second]


def test_connections_are_sampled_often_only_while_something_is_unanswered() -> None:
    network = Network(2)
    (handle,), _ = network.open((0, 1))
    network.until(network.all_up)
    network.run(1.0)
    endpoint = network.endpoints[0]
    assert not endpoint.watched() and endpoint._tick_s == TICK_S
    assert endpoint.next_tick_s - endpoint._ticked_s == pytest.approx(TICK_S)
    network.post_recv(1, handle, np.zeros(1 << 20, np.uint8))
    network.settle()
    network.freeze(network.outbound(0, 1, 0))
    network.post_send(0, handle, np.zeros(1 << 20, np.uint8))
    assert endpoint.next_tick_s <= network.now_s + WATCH_S, "soon after a write"
    assert network.outbound(0, 1, 0) in endpoint.watched()
    network.run(0.03)
    assert endpoint.next_tick_s <= network.now_s + CLOSE_WATCH_S


@pytest.mark.parametrize(("spent_s", "tick_s"), [(0.0, WATCH_S), (0.0003, WATCH_S), (0.001, 0.05), (1.0, TICK_S)])
def test_ticks_cost_two_per_cent_of_the_time_at_most(spent_s: float, tick_s: float) -> None:
    endpoint = endpoint_of(0, 2)
    endpoint.accepted(0)
    endpoint.now_s = 1.0
    endpoint.tick()
    endpoint.ticked(spent_s)
    assert endpoint.next_tick_s == pytest.approx(1.0 + tick_s)
    endpoint.look_within(0.005)
    assert endpoint.next_tick_s == pytest.approx(1.005)


def test_time_that_nobody_has_watched_makes_no_connection_silent() -> None:
    """The process was stopped for a minute while bytes were on their way."""
    network = Network(2)
    (handle,), _ = network.open((0, 1))
    network.until(network.all_up)
    network.post_recv(1, handle, np.zeros(1 << 20, np.uint8))
    network.settle()
    connection = network.outbound(0, 1, 0)
    network.freeze(connection)
    network.post_send(0, handle, np.zeros(1 << 20, np.uint8))
    network.run(0.02)
    network.now_s += 60.0
    network.run(0.001)
    assert not connection.is_closed
    network.run(0.1)
    assert connection.is_closed


def test_rails_join_nics_of_one_name_or_in_their_order() -> None:
    endpoint = endpoint_of(0, 2)
    named = [("b", "", 0, 1, 1), ("a", "", 0, 1, 1), ("c", "", 0, 1, 1)]
    endpoint.book = [named, [("a", "", 0, 1, 1), ("x", "", 0, 1, 1), ("b", "", 0, 1, 1)]]
    assert endpoint.pairs(0, 1) == [(1, 0), (0, 2)] and endpoint.pairs(1, 0) == [(0, 1), (2, 0)]
    endpoint.book = [named, [("x", "", 0, 1, 1), ("y", "", 0, 1, 1)]]
    for src, dst in ((0, 1), (1, 0)):
        pairs = endpoint.pairs(src, dst)
        assert sorted(pairs) == [(0, 0), (1, 1)]
    assert endpoint.pairs(0, 1) == endpoint.pairs(1, 0), "both number the rails alike"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"chunk_bytes": 0}, "chunks of 0 B"),
        ({"chunk_bytes": (1 << 30) + 1}, "from 1 B to 1 GiB"),
        ({"window": 0}, "window 0"),
        ({"silent_s": 0.0}, "silent_s 0.0: must be above 0"),
        ({"stall_s": -1.0}, "stall_s -1.0: must be above 0"),
        ({"hello_s": 0.0}, "hello_s 0.0: must be above 0"),
        ({"partition_s": -1.0}, "partition_s -1.0: must be a number of seconds above 0, or 0"),
        ({"partition_s": float("inf")}, "partition_s inf: must be a number of seconds above 0, or 0"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        endpoint_of(0, 2, **changes)
