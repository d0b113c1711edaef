"""Connections that may have failed: avoided by both ends, probed, used again or given up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from optcc.runtime.protocol.connection import SendConnection
from optcc.runtime.protocol.frames import DOUBT_FRAME, control_header
from optcc.runtime.protocol.liveness import KernelReport
from optcc.runtime.transport import RECEIVED, SENT
from tests.unit.runtime.protocol.network import Network


def joined(*channels: tuple[int, int], n_ranks: int = 2, **changes: Any) -> tuple[Network, list[list[int]]]:
    network = Network(n_ranks, **changes)
    handles = network.open(*channels)
    network.barrier()
    network.until(network.all_up)
    return network, handles


def test_what_is_out_on_a_suspected_connection_goes_out_elsewhere_and_comes_once() -> None:
    """Half way to a verdict both ends leave a connection alone that may have failed, in the middle of a message; it
    stays, and is used again when it answers."""
    network, ((handle,), _) = joined((0, 1), silent_s=1.0)
    rails = network.endpoints[0].rail_counts
    data = np.random.default_rng(7).integers(0, 256, 1 << 20, np.uint8)
    into = np.zeros_like(data)
    sent: list[list[int]] = []

    def turn(*, freezes: bool = False) -> None:
        network.post_recv(1, handle, into)
        network.settle()
        if freezes:
            network.freeze(near)
        network.post_send(0, handle, data)
        network.until(lambda: bool(network.endpoints[1].events))
        assert (network.poll(1), network.poll(0)) == ([(RECEIVED, handle)], [(SENT, handle)])
        assert np.array_equal(into, data)
        into[:] = 0

    near, far = network.outbound(0, 1, 1), network.inbound(0, 1, 1)
    turn()
    for is_suspect in (False, True, False):
        if is_suspect:
            began_s = network.now_s
            turn(freezes=True)
            assert 0.4 < network.now_s - began_s < 0.7, "half of the limit"
        elif sent:
            network.thaw(near)
            network.run(0.1)
        assert near.is_avoided == far.is_avoided == is_suspect == near.suspect
        before = [rail.sent_bytes for rail in rails]
        for _ in range(3):
            turn()
        sent.append([rail.sent_bytes - at for rail, at in zip(rails, before, strict=True)])
    shares = [each[1] / sum(each) for each in sent]
    assert shares[0] > 0.4 and shares[1] < 0.1 and shares[2] > 0.4, shares
    assert [rail.failures for rail in rails] == [0, 0]
    assert network.endpoints[0].counts.resent > 0 and network.endpoints[1].counts.suppressed > 0
    assert network.outbound(0, 1, 1) is near, "it was never given up"


def test_a_silent_connection_is_given_up_at_both_ends_and_dialled_again() -> None:
    network, ((handle,), _) = joined((0, 1))
    near = network.outbound(0, 1, 1)
    network.freeze(near)
    data = np.zeros(1 << 20, np.uint8)
    network.post_recv(1, handle, data)
    network.post_send(0, handle, data.copy())
    began_s = network.now_s
    network.until(lambda: near.is_closed)
    assert 0.09 < network.now_s - began_s < 0.2
    network.until(network.all_up, 0.5)
    assert network.endpoints[0].rail_counts[1].failures == 1
    assert network.poll(1) == [(RECEIVED, handle)]


def test_a_suspicion_that_has_been_overtaken_says_nothing() -> None:
    network, _ = joined((0, 1))
    endpoint = network.endpoints[0]
    connection, other = (network.outbound(0, 1, rail) for rail in range(2))

    def hear(each: SendConnection, count: int) -> None:
        # It comes over the connection in doubt, or over the other one: the session in it says which is meant.
        frame = control_header(other.session, DOUBT_FRAME, count << 32 | each.session)
        endpoint.received(other, frame)

    connection.answers = True
    for count in (1, 3, 4):
        connection.awaits = count < 4
        hear(connection, count)
        assert not connection.is_avoided, "its kernel answers"
    connection.answers = False
    for count, is_avoided in ((6, False), (5, False), (7, True), (6, True), (8, False)):
        hear(connection, count)
        assert connection.is_avoided == is_avoided, count
    for each in (connection, other):
        hear(each, 9)
    assert not connection.is_avoided and not other.is_avoided, "there is no other"
    hear(connection, 10)
    assert other.is_avoided and not connection.is_avoided


def test_a_receiver_takes_the_senders_word_though_its_own_reports_are_answered() -> None:
    network, _ = joined((0, 1))
    receiver, connection = network.endpoints[1], network.inbound(0, 1, 0)
    connection.awaits = connection.answers = True
    from_peer = network.outbound(0, 1, 1)
    for count, is_avoided in ((1, True), (2, False)):
        from_peer.say(DOUBT_FRAME, count << 32 | connection.session)
        network.endpoints[0].wake(from_peer)
        network.settle()
        assert connection.is_avoided == is_avoided
    assert receiver.inbounds[0].is_joined()


def test_who_suspects_one_connection_over_a_nic_probes_the_idle_ones() -> None:
    """Three ranks: what is in flight from rank 0 to rank 1 makes rank 0 try its connections to rank 2 as well."""
    network, handles = joined((0, 1), (0, 2), n_ranks=3, silent_s=1.0)
    network.run(1.0)
    idle = [each for each in network.connections(0, 1) if each.peer == 2]
    assert idle and not any(each.awaits for each in idle)
    before = [each.wire.n_writes for each in idle]
    suspected = network.outbound(0, 1, 1)
    network.post_recv(1, handles[1][0], np.zeros(1 << 20, np.uint8))
    network.settle()
    network.freeze(suspected)
    network.post_send(0, handles[0][0], np.zeros(1 << 20, np.uint8))
    network.until(lambda: suspected.suspect)
    network.settle()
    assert all(each.wire.n_writes > n for each, n in zip(idle, before, strict=True))
    assert not any(each.wire.n_writes > 5 for each in network.connections(0, 0) if each.peer == 2), "over that NIC only"


@pytest.mark.parametrize("other_fails_too", [False, True])
def test_after_one_connection_of_a_nic_is_given_up_half_the_time_is_enough_for_the_others(
    other_fails_too: bool,
) -> None:
    network, handles = joined((0, 1), (0, 2), n_ranks=3, silent_s=0.2)
    first, second = network.outbound(0, 1, 1), network.outbound(0, 2, 1)
    network.freeze(first)
    network.unreachable |= {(1, 1), (2, 1)}
    for k, rank in enumerate((1, 2)):
        network.post_recv(rank, handles[rank][k], np.zeros(1 << 20, np.uint8))
    network.post_send(0, handles[0][0], np.zeros(1 << 20, np.uint8))
    network.until(lambda: first.is_closed)
    began_s = network.now_s
    if other_fails_too:
        network.freeze(second)
    network.post_send(0, handles[0][1], np.zeros(1 << 20, np.uint8))
    if other_fails_too:
        network.until(lambda: second.is_closed)
        assert 0.09 < network.now_s - began_s < 0.16
    else:
        network.run(0.5)
        assert not second.is_closed


@pytest.mark.parametrize(("in_flight_bytes", "waits_s"), [(1000, 0.05), (2000, 0.083)])
def test_a_queue_at_a_nic_is_known_from_connections_that_fill_it(in_flight_bytes: int, waits_s: float) -> None:
    """A report alone in flight is acknowledged late by a kernel that waits for more, whatever the queue."""
    network, _ = joined((0, 1), (0, 2), n_ranks=3, silent_s=0.1)
    other, connection = network.outbound(0, 1, 1), network.outbound(0, 2, 1)
    report = KernelReport(0, in_flight_bytes, 0, 1000, 0, 0, 0.09)
    suspicion = network.endpoints[0].suspicion
    other.kernel, connection.kernel = report, report._replace(in_flight_bytes=9000, round_trip_s=0.0)
    suspicion.is_silent(other, 0.0, other.nic)
    suspicion.is_silent(connection, 0.0, connection.nic)
    watched_s = 0.0
    while not connection.suspect:
        suspicion.is_silent(connection, 1e-3, connection.nic)
        watched_s += 1e-3
    assert abs(watched_s - waits_s) < 0.004


def test_what_is_out_over_a_nic_that_is_taken_out_of_use_goes_out_elsewhere() -> None:
    """Whichever end's it is, as soon as that is known, though all its connections answer; and it is used again."""
    network, ((handle,), _) = joined((0, 1), silent_s=1.0, learn_rates=True)
    near, far = network.outbound(0, 1, 1), network.inbound(0, 1, 1)
    for rank in (0, 1):
        data, into = np.ones(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
        network.freeze(near)
        network.post_recv(1, handle, into)
        network.post_send(0, handle, data)
        network.settle()
        assert not np.array_equal(into, data) and not network.poll(0)
        began_s = network.now_s
        network.endpoints[rank].rates.note_nic(1, is_up=False)
        network.until(lambda: bool(network.endpoints[1].events))
        assert network.now_s - began_s < 0.1
        assert (network.poll(1), network.poll(0)) == ([(RECEIVED, handle)], [(SENT, handle)])
        assert np.array_equal(into, data) and near.is_avoided and far.is_avoided and not near.suspect
        network.thaw(near)
        network.endpoints[rank].rates.note_nic(1, is_up=True)
        network.until(lambda: not (near.is_avoided or far.is_avoided), 0.2)
    assert network.outbound(0, 1, 1) is near, "it was never given up"
