"""When deferred reports are written: with a message, after a while, or because the peer waits for them."""

from __future__ import annotations

import numpy as np
import pytest

from optcc.runtime.protocol.frames import DATA_STATE_BYTES, HEADER_BYTES
from optcc.runtime.protocol.leg import Leg
from optcc.runtime.protocol.reports import HOLD_S
from optcc.runtime.transport import RECEIVED, SENT
from tests.unit.runtime.protocol.network import Network, TwoRails, write_all


def test_a_short_message_takes_the_reports_for_its_peer_along() -> None:
    """Two ranks that send each other short messages: one write of a state and a data frame each, and no other."""
    network = Network(2)
    handles = network.open((0, 1), (1, 0))
    network.barrier()
    network.until(network.all_up)
    n_writes, n_bytes = [], []
    for turn in range(20):
        written = [network.n_writes(rank) for rank in range(2)]
        before = [sum(rail.sent_bytes for rail in endpoint.rail_counts) for endpoint in network.endpoints]
        send, into = np.full(64, turn, np.uint8), [np.zeros(64, np.uint8) for _ in range(2)]
        for rank, endpoint in enumerate(network.endpoints):
            network.post_recv(rank, handles[rank][1 - rank], into[rank])
            network.post_send(rank, handles[rank][rank], send)
            assert turn < 5 or not endpoint.reports.deferred, "they have gone with the message"
        for rank in range(2):
            wanted = [(SENT, handles[rank][rank]), (RECEIVED, handles[rank][1 - rank])]
            assert sorted(network.poll(rank)) == sorted(wanted)
            assert into[rank].tolist() == [turn] * 64
        n_writes += [network.n_writes(rank) - written[rank] for rank in range(2)]
        after = [sum(rail.sent_bytes for rail in endpoint.rail_counts) for endpoint in network.endpoints]
        n_bytes += [b - a for a, b in zip(before, after, strict=True)]
    assert n_writes[10:] == [1] * 30
    # The message with a state in its header, and one before it where states wait on both rails.
    assert set(n_bytes[10:]) <= {DATA_STATE_BYTES + 64, HEADER_BYTES + DATA_STATE_BYTES + 64}
    assert all(network.endpoints[rank].inbounds[1 - rank].history.chances >= 15 for rank in range(2))


def test_reports_wait_a_little_for_a_message_that_has_often_come_soon() -> None:
    rails = TwoRails()
    reports, history = rails.endpoint.reports, rails.inbound.history

    def n_reports() -> int:
        """How many have been written."""
        return len(rails.written()) // HEADER_BYTES

    reports.release_late(1.0)
    assert n_reports() == 1, "nothing has gone to the peer yet: a slot is told at once"
    for turn in range(64):
        history.reported_s = 2.0 + turn
        history.note_message(2.0 + turn)
    rails.inbound.post(rails.inbound.channel(0), rails.slot.data)
    reports.release_late(100.0)
    assert n_reports() == 0
    reports.release_late(100.0005)
    assert n_reports() == 0
    assert reports.hold_to_s == pytest.approx(100.0 + HOLD_S) == 100.001
    chances = history.chances
    reports.release_late(100.002)
    assert n_reports() == 1
    assert history.chances < chances, "the wait was in vain"


def test_a_message_that_comes_too_late_is_no_reason_to_wait() -> None:
    rails = TwoRails()
    history = rails.inbound.history
    for turn in range(64):
        history.reported_s = 2.0 + turn
        history.note_message(2.0 + turn + 2 * HOLD_S)
    assert history.chances == 0


def test_who_need_not_wait_any_more_has_told_what_its_peer_waits_for() -> None:
    """A short message counts as sent once its slot is told, even if whoever posted that never calls again."""
    network = Network(2)
    (handle,), _ = network.open((0, 1))
    network.until(network.all_up)
    view = np.zeros(64, np.uint8)
    network.post_recv(1, handle, view)
    network.post_send(0, handle, view)
    assert network.poll(1) == [(RECEIVED, handle)] and network.poll(0) == [(SENT, handle)]
    network.post_send(0, handle, view)
    assert network.poll(0) == [], "the peer has no slot"
    receiver = network.endpoints[1]
    receiver.inbounds[0].history.chances = 64
    network.post_recv(1, handle, view)
    assert receiver.events == [(RECEIVED, handle)] and receiver.reports.is_owed
    assert not receiver.has_to_write(), "the report waits for a message"
    assert receiver.poll_events() == [(RECEIVED, handle)]
    assert receiver.has_to_write() and not receiver.reports.is_owed
    network._write(1)
    network.asleep.add(1)
    assert network.poll(0) == [(SENT, handle)]


def test_a_program_that_says_itself_when_it_goes_away_holds_reports_until_then() -> None:
    network = Network(2)
    (handle,), _ = network.open((0, 1))
    network.until(network.all_up)
    view, receiver = np.zeros(64, np.uint8), network.endpoints[1]
    receiver.settle_later()
    network.post_recv(1, handle, view)
    network.post_send(0, handle, view)
    assert network.poll(1) == [(RECEIVED, handle)]
    network.post_send(0, handle, view)
    network.settle()
    receiver.inbounds[0].history.chances = 64
    network.post_recv(1, handle, view)
    assert receiver.poll_events() == [(RECEIVED, handle)]
    assert receiver.reports.is_owed and not receiver.has_to_write()
    receiver.reports.release_owed()
    assert receiver.has_to_write()


def test_a_report_of_a_connection_that_is_lost_goes_over_another_one() -> None:
    rails = TwoRails()
    deferred = [each for each in rails.connections if each in rails.endpoint.reports.deferred]
    assert len(deferred) == 1
    rails.endpoint.broken(deferred[0], "reset")
    assert deferred[0] not in rails.endpoint.reports.deferred
    rails.endpoint.reports.release_all()
    assert len(rails.written()) % HEADER_BYTES == 0
    assert rails.channel.told == 1


def test_only_what_a_peer_waits_for_is_written_before_the_program_goes_away() -> None:
    """Three ranks: one peer's message has come before its slot, the other's slot is only posted."""
    network = Network(3)
    handles = network.open((0, 2), (1, 2))
    network.until(network.all_up)
    view, receiver = np.zeros(64, np.uint8), network.endpoints[2]
    for src in range(2):
        network.post_recv(2, handles[2][src], view)
        network.post_send(src, handles[src][src], view)
    assert set(network.poll(2)) == {(RECEIVED, handles[2][0]), (RECEIVED, handles[2][1])}
    network.post_send(0, handles[0][0], view)
    network.settle()
    for src in range(2):
        receiver.inbounds[src].history.chances = 64
        network.post_recv(2, handles[2][src], view)
    assert receiver.events == [(RECEIVED, handles[2][0])]
    receiver.reports.release_owed()
    assert {each.peer for each in write_all(receiver) if not isinstance(each, Leg)} == {0}
    assert {connection.peer for connection in receiver.reports.deferred} == {1}
