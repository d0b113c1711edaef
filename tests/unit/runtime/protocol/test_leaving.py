"""How a rank leaves: what it waits for before it closes, and its last words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from optcc.errors import RuntimeFault
from optcc.runtime.protocol.connection import Broken
from optcc.runtime.protocol.endpoint import CLOSE_S, LINGER_S
from optcc.runtime.protocol.frames import BYE_FRAME, HEADER_BYTES, STATE_FRAME, decode
from optcc.runtime.transport import RECEIVED, SENT
from tests.unit.runtime.protocol.network import SESSION, Network, TwoRails


def joined(*channels: tuple[int, int], **changes: Any) -> tuple[Network, list[list[int]]]:
    """Two ranks, and the connections of these channels alone."""
    network = Network(2, **changes)
    handles = network.open(*channels)
    network.until(network.all_up)
    return network, handles


def test_a_rank_may_leave_once_its_eager_messages_are_acknowledged() -> None:
    """A connection that is reset takes with it what was not read, though it counts as sent."""
    network, ((handle,), _) = joined((0, 1))
    view = np.arange(64, dtype=np.uint8)
    network.post_recv(1, handle, into := np.zeros_like(view))
    network.settle()
    network.asleep.add(1)
    assert network.endpoints[0].may_leave()
    network.post_send(0, handle, view)
    assert network.poll(0) == [(SENT, handle)] and not network.endpoints[0].may_leave()
    network.asleep.clear()
    assert network.poll(1) == [(RECEIVED, handle)] and np.array_equal(into, view)
    network.settle()
    network.until(network.endpoints[0].may_leave, 0.1)
    assert network.endpoints[1].may_leave()


def test_a_rank_waits_for_a_full_socket_before_it_leaves() -> None:
    network, ((handle,), _) = joined((0, 1), n_rails=1)
    endpoint = network.endpoints[0]
    network.post_recv(1, handle, np.zeros(64, np.uint8))
    network.settle()
    connection = endpoint.post_send(handle, np.zeros(64, np.uint8).data)
    assert connection is not None
    written = b"".join(connection.views())
    connection.written(10)
    assert connection.blocked and not endpoint.may_leave() and endpoint.bye(connection) == b""
    connection.wire.put(written[:10])
    endpoint.wake(connection)
    assert network.poll(1) == [(RECEIVED, handle)]
    network.until(endpoint.may_leave, 0.1)
    rails = TwoRails()
    rails.connections[0].states[0] = None
    rails.connections[0].views()
    assert rails.endpoint.may_leave()
    rails.connections[0].written(10)
    assert not rails.endpoint.may_leave(), "a report is half written"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_lost_its_peer_waits_for_it_to_be_back(rank: int) -> None:
    """Either end: the last states must reach whoever still waits."""
    network, _ = joined((0, 1), n_rails=1)
    assert network.endpoints[rank].may_leave()
    network.cut(network.outbound(0, 1, 0))
    assert not network.endpoints[rank].may_leave()
    network.until(network.endpoints[rank].may_leave, 0.5)


def test_a_rank_waits_for_nobody_that_has_left_or_was_never_there() -> None:
    network, _ = joined((0, 1), n_rails=1)
    network.endpoints[0].open([])
    network.leave(1)
    network.run(0.1)
    assert network.endpoints[0].left == {1: False} and network.endpoints[0].may_leave()
    alone = Network(2)
    alone.unreachable |= {(1, 0), (1, 1)}
    alone.open((0, 1))
    alone.run(0.1)
    assert alone.endpoints[0].may_leave(), "it never had a connection, and nothing is posted"


def test_the_last_words_are_the_states_of_all_channels_and_then_bye() -> None:
    rails = TwoRails()
    second = rails.inbound.channel(1)
    rails.send(0, rails.frame(bytes(100)))
    for failed in (False, True):
        if failed:
            rails.endpoint.fail(RuntimeFault("a test"))
        words = rails.endpoint.bye(rails.connections[1])
        headers = [decode(words, SESSION, at) for at in range(0, len(words), HEADER_BYTES)]
        assert headers == [
            (STATE_FRAME, 0, 0, rails.channel.k, 1, 1, 0),
            (STATE_FRAME, 0, 0, second.k, 0, 0, 0),
            (BYE_FRAME, int(failed), 0, 0, 0, 0, 0),
        ]


def test_an_acknowledgement_that_was_lost_with_a_rail_comes_with_the_last_words() -> None:
    """Not eager, so the message counts as sent only once it is acknowledged."""
    network, ((handle,), _) = joined((0, 1))
    view = np.zeros(1 << 16, np.uint8)
    network.post_recv(1, handle, view)
    network.settle()
    network.asleep.add(0)
    network.post_send(0, handle, view)
    for rail in range(2):
        network.inbound(0, 1, rail).wire.is_frozen = True
    assert network.poll(1) == [(RECEIVED, handle)]
    for rail in range(2):
        # What rank 1 has written so far never arrives; what it says now does.
        network.inbound(0, 1, rail).wire.on_its_way.clear()
        network.inbound(0, 1, rail).wire.is_frozen = False
    network.leave(1)
    network.asleep.clear()
    assert network.poll(0) == [(SENT, handle)]
    network.run(0.5)
    assert network.poll(0) == [] and network.endpoints[0].failure is None


def sent_to_one_that_computes() -> tuple[Network, int]:
    """Rank 0 has sent a short message to rank 1, which has a slot for it and computes; the channel's handle."""
    network, ((handle,), _) = joined((0, 1))
    network.post_recv(1, handle, np.zeros(64, np.uint8))
    network.settle()
    network.asleep.add(1)
    network.post_send(0, handle, np.zeros(64, np.uint8))
    return network, handle


def test_a_peer_that_computes_is_waited_for_longer_than_one_that_cannot_be_reached() -> None:
    network, handle = sent_to_one_that_computes()
    endpoint = network.endpoints[0]
    assert network.poll(0) == [(SENT, handle)], "the program may close"
    endpoint.begin_leaving()
    network.run(CLOSE_S + 1)
    assert not endpoint.may_leave() and not endpoint.owes_nothing()
    network.unreachable |= {(1, 0), (1, 1)}
    for connection in list(endpoint.up):
        endpoint.broken(connection, "reset")
    network.run(CLOSE_S / 2)
    assert not endpoint.may_leave(), "it may be back"
    network.run(CLOSE_S)
    assert endpoint.may_leave() and not endpoint.owes_nothing()


def test_a_peer_that_computes_and_has_lost_its_connections_is_waited_for() -> None:
    """It would find that this rank refuses connections, and has not read what it acknowledged last."""
    network, _ = sent_to_one_that_computes()
    for rail in range(2):
        network.cut(network.outbound(0, 1, rail))
    endpoint = network.endpoints[0]
    endpoint.begin_leaving()
    network.run(CLOSE_S + 1)
    assert not endpoint.up and not endpoint.may_leave(), "its kernel has answered"
    network.asleep.clear()
    network.until(endpoint.may_leave, 0.5)
    assert endpoint.owes_nothing()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_connection_that_is_lost_at_the_other_end_does_not_count(rank: int) -> None:
    network, _ = joined((0, 1), n_rails=1)
    network.run(0.5)
    endpoint = network.endpoints[rank]
    network.freeze(network.outbound(0, 1, 0))
    assert endpoint.may_leave(), "nothing was sent that would show it"
    endpoint.begin_leaving()
    lost = list(endpoint.up)
    assert not endpoint.may_leave()
    network.until(endpoint.may_leave, 0.5)
    assert all(each.is_closed for each in lost) and endpoint.owes_nothing() and endpoint.up


def test_time_for_which_this_rank_was_stopped_is_no_waiting() -> None:
    network, _ = sent_to_one_that_computes()
    endpoint = network.endpoints[0]
    for connection in list(endpoint.up):
        endpoint.broken(connection, "reset")
    endpoint.begin_leaving()
    network.asleep.add(0)
    network.run(5 * CLOSE_S)
    network.asleep.remove(0)
    network.run(0.05)
    assert not endpoint.may_leave() and endpoint.leaving_s < CLOSE_S


def test_a_peer_that_does_not_read_is_not_waited_for_without_end() -> None:
    network, _ = sent_to_one_that_computes()
    network.endpoints[0].begin_leaving()
    network.run(LINGER_S - 1)
    assert not network.endpoints[0].may_leave()
    network.run(2)
    assert network.endpoints[0].may_leave()


def test_what_was_given_up_while_nothing_else_was_up_is_told_once_a_rail_is_back() -> None:
    """The receiver gives up both connections of a sender that has nothing to send: no bytes of its own tell it."""
    network, _ = joined((0, 1))
    receiver = network.endpoints[1]
    lost = [network.outbound(0, 1, rail) for rail in range(2)]
    for rail in range(2):
        inbound = network.inbound(0, 1, rail)
        network.freeze(inbound)
        receiver.inbounds[0].lose(inbound, Broken("a test"))
        # The wires stay, as over a NIC that swallows the end of file.
    receiver.to_close.clear()
    network.settle()
    assert not any(each.is_closed for each in lost), "nothing is up that could tell it"
    network.until(lambda: all(each.is_closed for each in lost), 0.1)
    assert receiver.outbounds[0].connections, "the receiver has dialled"
    network.until(network.all_up, 0.5)
    assert not receiver.inbounds[0]._gone, "all rails are replaced"


def neighbours() -> Network:
    """Ranks 0, 1 and 2 in a row, of which the first and the last are not connected; epochs are on."""
    network = Network(3)
    network.open((0, 1), (1, 2))
    network.until(network.all_up)
    for endpoint in network.endpoints:
        endpoint.epochs.is_on = True
    return network


def test_a_rank_with_nobody_left_to_pass_on_its_last_word_says_it_to_the_others() -> None:
    network = neighbours()
    first, middle, last = network.endpoints
    middle.begin_leaving()
    network.until(middle.may_leave)
    network.leave(1)
    network.until(lambda: 1 in first.left and 1 in last.left)
    last.begin_leaving()
    assert not last.may_leave(), "rank 0 may wait for its word"
    network.until(last.may_leave)
    assert 2 in first.epochs.agreement.leaving


def test_a_neighbour_passes_on_the_last_word() -> None:
    network = neighbours()
    first, _, last = network.endpoints
    last.begin_leaving()
    network.until(last.may_leave)
    assert 2 in first.epochs.agreement.leaving and 0 not in last.outbounds


def test_ranks_that_have_gone_are_not_waited_for_with_the_last_word() -> None:
    network = neighbours()
    last = network.endpoints[2]
    network.leave(0)
    network.leave(1)
    network.until(lambda: 1 in last.left)
    last.begin_leaving()
    network.until(last.may_leave, 0.1)


def test_a_rank_of_which_only_a_word_is_awaited_is_dialled_if_nobody_else_is_there() -> None:
    network = neighbours()
    first, _, last = network.endpoints
    network.leave(1)
    network.until(lambda: 1 in first.left)
    first.epochs.agreement.propose(first.epochs.agreement.epoch.shares)
    first.epochs.agreement.ready()
    network.until(lambda: bool(first.up_to(2)), 3.0)
    assert last.epochs.agreement.wanted is not None


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_without_a_rail_is_waited_for_as_long_as_its_policy_says_unless_it_has_ended(
    rank: int, has_ended: bool
) -> None:
    """Also by a receiver, which has no reason to dial a source that it waits for no more."""
    network, _ = joined((0, 1), partition_s=4 * CLOSE_S)
    endpoint, peer = network.endpoints[rank], 1 - rank
    if has_ended:
        network.leave(peer, silently=True)
    else:
        network.unreachable |= {(0, 0), (0, 1), (1, 0), (1, 1)}
        for connection in list(endpoint.up):
            endpoint.broken(connection, "reset")
    endpoint.begin_leaving()
    network.run(CLOSE_S / 2)
    assert not endpoint.may_leave()
    network.run(2 * CLOSE_S)
    assert endpoint.may_leave() == has_ended
    network.run(2 * CLOSE_S)
    assert endpoint.may_leave()
