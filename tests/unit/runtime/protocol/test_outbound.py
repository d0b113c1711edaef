"""The sending end of a direction: what is sent when, over which rail, and when it is reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from optcc.runtime.protocol import outbound as module
from optcc.runtime.protocol import rail as rails_module
from optcc.runtime.protocol.channel import TIMEOUT_S
from optcc.runtime.protocol.connection import Broken, SendConnection
from optcc.runtime.protocol.frames import EARLY_CHUNKS_MAX, PROBE_FRAME
from optcc.runtime.transport import RECEIVED, SENT
from tests.unit.runtime.protocol.network import SESSION, Array, Network, TwoRails, write_all


def joined(*channels: tuple[int, int], n_ranks: int = 2, **changes: Any) -> tuple[Network, list[list[int]]]:
    """A network with these channels, every rail of which is up; the handles by rank."""
    network = Network(n_ranks, **changes)
    handles = network.open(*channels)
    network.barrier()
    network.until(network.all_up)
    return network, handles


def test_what_nobody_has_a_slot_for_is_not_sent() -> None:
    """A sender far ahead of its receiver: nothing but the small exchanges goes over the wire, and nothing is kept."""
    network, ((handle,), _) = joined((0, 1))
    views = [np.full(1 << 16, i, np.uint8) for i in range(100)]
    for view in views:
        network.post_send(0, handle, view)
    network.barrier()
    network.run(0.5)
    assert sum(rail.sent_bytes for rail in network.endpoints[0].rail_counts) < 10_000
    into = [np.zeros_like(view) for view in views]
    for view in into:
        network.post_recv(1, handle, view)
    assert network.poll(1) == [(RECEIVED, handle)] * 100 and network.poll(0) == [(SENT, handle)] * 100
    assert all(np.array_equal(*pair) for pair in zip(views, into, strict=True))


def test_what_goes_to_several_ranks_at_once_goes_over_different_rails() -> None:
    """Messages too short to be cut: the first ones of a rank, and those to a rank, do not all meet at one NIC."""
    pairs = [(src, dst) for src in range(4) for dst in range(4) if src != dst]
    network, handles = joined(*pairs, n_ranks=4)
    counts = [rail for endpoint in network.endpoints for rail in endpoint.rail_counts]
    before = [(rail.sent_bytes, rail.received_bytes) for rail in counts]
    data = np.zeros(12_000, np.uint8)
    for number, (_, dst) in enumerate(pairs):
        network.post_recv(dst, handles[dst][number], np.empty_like(data))
    for number, (src, _) in enumerate(pairs):
        network.post_send(src, handles[src][number], data)
    for rank in range(4):
        wanted = {
            (SENT if rank == src else RECEIVED, handles[rank][i])
            for i, (src, dst) in enumerate(pairs)
            if rank in (src, dst)
        }
        assert set(network.poll(rank)) == wanted
    for rail, (sent, received) in zip(counts, before, strict=True):
        assert rail.sent_bytes - sent >= 12_000 and rail.received_bytes - received >= 12_000


@pytest.mark.parametrize("rates", [(300, 100), (100, 90)])
@pytest.mark.parametrize("size", [1 << 14, 1 << 18, 3 << 20])
def test_bytes_go_over_the_rails_in_proportion_to_their_rates(rates: tuple[int, int], size: int) -> None:
    network, ((handle,), _) = joined((0, 1), rates=rates)
    counts = network.endpoints[0].rail_counts
    before = [rail.sent_bytes for rail in counts]
    view = np.zeros(size, np.uint8)
    for _ in range(max(24, (16 << 20) // size)):
        network.post_send(0, handle, view)
        network.post_recv(1, handle, view)
        assert (network.poll(0), network.poll(1)) == ([(SENT, handle)], [(RECEIVED, handle)])
    sent = [rail.sent_bytes - at for rail, at in zip(counts, before, strict=True)]
    assert sent[0] / sum(sent) == pytest.approx(rates[0] / sum(rates), rel=0.1), sent


@pytest.mark.parametrize(("rates", "seconds"), [((2**27, 2**22), [2**-7, 2**-2]), ((2, 1), [0.0, 0.0])])
def test_the_queue_in_the_way_follows_from_the_rates_unless_they_are_proportions(
    rates: tuple[int, int], seconds: list[float]
) -> None:
    network, _ = joined((0, 1), (1, 0), rates=rates)
    for src, dst in ((0, 1), (1, 0)):
        assert [network.outbound(src, dst, rail).queue_s for rail in range(2)] == seconds
        assert [network.inbound(src, dst, rail).queue_s for rail in range(2)] == seconds


@pytest.mark.parametrize("size", [0, 1, 16384])
def test_a_short_message_is_sent_from_a_copy_once_there_is_a_slot(size: int) -> None:
    """The receiver has posted, and does not poll: no acknowledgement can have come."""
    network, ((handle,), _) = joined((0, 1))
    view, into, other = np.full(size, 7, np.uint8), np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    network.post_recv(1, handle, into)
    network.barrier()
    network.post_recv(1, handle, other)
    network.asleep.add(1)
    network.post_send(0, handle, view)
    assert network.poll(0) == [(SENT, handle)], "before the receiver has looked"
    # The second has no slot that this end knows of: it goes out, and is not reported.
    view[:] = 9
    network.post_send(0, handle, view)
    assert network.poll(0) == []
    view[:] = 0
    network.asleep.clear()
    assert network.poll(1) == [(RECEIVED, handle)] * 2
    assert into.tolist() == [7] * size and other.tolist() == [9] * size
    assert network.poll(0) == [(SENT, handle)]


def test_a_long_message_before_a_short_one_is_reported_first() -> None:
    network, ((handle,), _) = joined((0, 1))
    sizes = (4, 3 << 20, 4, 4, 1 << 20, 4)
    views = [np.full(size, 1 + i, np.uint8) for i, size in enumerate(sizes)]
    into = [np.zeros_like(view) for view in views]
    for view in into:
        network.post_recv(1, handle, view)
    network.barrier()
    for view in views:
        network.post_send(0, handle, view)
    assert network.poll(1) == [(RECEIVED, handle)] * 6 and network.poll(0) == [(SENT, handle)] * 6
    assert [int(view[0]) for view in into] == [1, 2, 3, 4, 5, 6]
    assert all(np.array_equal(*pair) for pair in zip(views, into, strict=True))


def test_a_short_message_is_not_reported_before_a_longer_one_in_front_of_it() -> None:
    """The longer one is on its way as a whole, and its receiver has slots for both, but does not look."""
    network, ((handle,), _) = joined((0, 1), n_rails=1)
    for size in (64, 60_000, 64):
        network.post_recv(1, handle, np.zeros(size, np.uint8))
    network.barrier()
    network.post_send(0, handle, np.zeros(64, np.uint8))
    assert network.poll(0) == [(SENT, handle)] and network.poll(1) == [(RECEIVED, handle)]
    network.asleep.add(1)
    for size in (60_000, 64):
        network.post_send(0, handle, np.zeros(size, np.uint8))
    network.run(0.2)
    assert network.poll(0) == []
    network.asleep.clear()
    assert network.poll(1) == [(RECEIVED, handle)] * 2 and network.poll(0) == [(SENT, handle)] * 2


def test_an_eager_message_goes_out_at_once_only_where_nothing_waits() -> None:
    network, ((handle,), _) = joined((0, 1), n_rails=1)
    endpoint, data = network.endpoints[0], np.arange(64, dtype=np.uint8)
    assert endpoint.post_send(handle, data.data) is None, "the peer has told of no slot"
    into = [np.zeros_like(data) for _ in range(4)]
    for each in into:
        network.post_recv(1, handle, each)
    assert network.poll(0) == [(SENT, handle)] and network.poll(1) == [(RECEIVED, handle)]
    connection = endpoint.post_send(handle, data.data)
    assert connection is network.outbound(0, 1, 0)
    assert endpoint.poll_events() == [(SENT, handle)]
    written = b"".join(connection.views())
    assert not connection.written(10)
    assert endpoint.post_send(handle, data.data) is None, "the socket is full"
    connection.wire.put(written[:10])
    network.settle()
    assert endpoint.poll_events() == [(SENT, handle)]
    assert endpoint.post_send(handle, data.data) is connection
    network.settle()
    long = np.zeros((1 << 14) + 1, np.uint8)
    network.post_recv(1, handle, long)
    assert endpoint.post_send(handle, long.data) is None, "it is too long"
    assert network.poll(1) == [(RECEIVED, handle)] * 4 and network.poll(0) == [(SENT, handle)] * 2
    assert [each.tolist() for each in into] == [data.tolist()] * 4


def test_who_gives_a_connection_up_tells_the_other_end() -> None:
    """Nothing is cut here: only a control frame over the other rail can have told."""
    network, _ = joined((0, 1), (1, 0))
    sender, receiver = network.endpoints
    outbound, inbound = sender.outbounds[1], receiver.inbounds[0]
    outbound.lose(network.outbound(0, 1, 1), Broken("a test"))
    # The wire stays, so that the other end gets no end of file; and nothing is dialled until it has heard.
    sender.to_close.clear()
    outbound.rails[1].next_s = float("inf")
    network.settle()
    assert inbound.connections[1] is None and inbound.connections[0] is not None
    assert [rail.failures for rail in sender.rail_counts] == [0, 1]
    network.run(1.0)
    assert outbound.rails[1].connection is None
    outbound.dial_now(mine=1)
    network.until(network.all_up, 0.1)


def test_reports_that_are_lost_with_a_message_of_the_opposite_direction_are_repeated() -> None:
    rails = TwoRails()
    outbound = rails.endpoint.outbound(0)
    channel = outbound.channel(0)
    connection = SendConnection(0, 0, 9, rails.endpoint.rail_counts[0], None)
    outbound.rails[0].connection = connection
    connection.put(channel, 0, 0, memoryview(b"abc"))
    assert connection.can_carry_reports()
    rails.endpoint.reports.release_all()
    rails.written()
    outbound.lose(connection, Broken("a test"))
    states = [list(each.states) for each in rails.connections if each in rails.endpoint.to_report]
    assert [0] in states


def test_what_is_out_on_a_lost_connection_goes_out_over_the_other_one() -> None:
    network, ((handle,), _) = joined((0, 1))
    data = np.random.default_rng(3).integers(0, 256, 4 << 20, np.uint8)
    into = np.zeros_like(data)
    network.post_recv(1, handle, into)
    network.settle()
    network.freeze(network.outbound(0, 1, 1))
    network.post_send(0, handle, data)
    assert network.poll(1) == [] and network.poll(0) == []
    network.cut(network.outbound(0, 1, 1))
    assert network.poll(1) == [(RECEIVED, handle)] and network.poll(0) == [(SENT, handle)]
    assert np.array_equal(data, into) and network.endpoints[0].counts.resent > 0


def test_a_chunk_that_is_lost_without_a_trace_goes_out_again_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that loses bytes is none of TCP's; only the table's timer can notice."""
    monkeypatch.setattr(module, "TIMEOUT_S", 0.3)
    network, ((handle,), _) = joined((0, 1))
    into, data = np.zeros(64, np.uint8), np.arange(64, dtype=np.uint8)
    network.post_recv(1, handle, into)
    network.settle()
    network.run(0.01)
    channel = network.endpoints[0].outbounds[1].channel(0)
    network.asleep.add(1)
    network.post_send(0, handle, data)
    for end in network._ends[1]:
        end.inbox.clear()
    network.asleep.clear()
    assert network.poll(1) == []
    network.run(0.2)
    assert network.poll(1) == [] and channel.sender.out == (0,) and channel.timeout_s == 0.3
    network.run(0.3)
    assert network.poll(1) == [(RECEIVED, handle)] and np.array_equal(into, data)
    assert network.endpoints[0].counts.resent >= 1 and network.endpoints[1].counts.suppressed == 0


def test_a_rail_is_dialled_again_at_growing_intervals() -> None:
    network, _ = joined((0, 1))
    rail = network.endpoints[0].outbounds[1].rails[1]
    network.unreachable.add((1, 1))
    network.cut(network.outbound(0, 1, 1))
    waits = []
    for _ in range(8):
        waits.append(rail.wait_s)
        network.until(lambda: rail.dialing is not None)
        dialing = rail.dialing
        assert dialing is not None
        network.endpoints[0].dial_failed(dialing, refused=False)
    assert waits == [min(rails_module.REDIAL_S_MAX, rails_module.REDIAL_S_MIN * 2 ** (1 + i)) for i in range(8)]
    network.unreachable.clear()
    network.until(network.all_up, 1.0)
    assert rail.wait_s == rails_module.REDIAL_S_MIN and network.outbound(0, 1, 1).session != SESSION


def test_a_connect_that_takes_as_long_as_full_queues_drain_is_waited_for_beside_others() -> None:
    network, _ = joined((0, 1))
    rail = network.endpoints[0].outbounds[1].rails[1]
    network.connect_s, n_dials = 1.3, network.n_dials
    network.cut(network.outbound(0, 1, 1))
    network.until(network.all_up, 1.6)
    assert network.n_dials > n_dials + 3 and rail.dialings == []
    network.run(2.0)
    assert network.all_up(), "those that are answered after it are not used"
    assert [len(endpoint.connections()) for endpoint in network.endpoints] == [4, 4]


def test_a_path_that_is_back_is_found_by_a_later_connect_than_the_one_that_is_waited_for() -> None:
    network, _ = joined((0, 1))
    rail = network.endpoints[0].outbounds[1].rails[1]
    network.unreachable.add((1, 1))
    network.cut(network.outbound(0, 1, 1))
    begun = set()
    for _ in range(25):
        network.run(0.25)
        assert len(rail.dialings) <= 2
        begun.add(rail.patient_since_s)
    assert 2 <= len(begun) <= 4, "one is given up after two seconds, and the next begins"
    network.unreachable.clear()
    network.until(network.all_up, 0.5)
    assert rail.dialings == [] and len(network.endpoints[0].connections()) == 4


def test_nothing_is_dialled_any_more_over_a_nic_that_is_down() -> None:
    network, _ = joined((0, 1))
    rail = network.endpoints[0].outbounds[1].rails[1]
    network.connect_s = 1.3
    network.cut(network.outbound(0, 1, 1))
    network.until(lambda: len(rail.dialings) == 2, 1.0)
    dialings = rail.dialings
    network.endpoints[0].nic_changed(1, False)
    assert rail.dialings == [] and all(each.is_closed for each in dialings)


def test_a_connection_that_had_lasted_is_dialled_again_at_once_where_its_path_carries_packets() -> None:
    network, _ = joined((0, 1))
    rail = network.endpoints[0].outbounds[1].rails[1]
    network.run(rails_module.REDIAL_S_MAX + 0.05)
    network.cut(network.outbound(0, 1, 1))
    network.run(rails_module.REDIAL_S_MIN / 2)
    assert network.all_up() and rail.wait_s == rails_module.REDIAL_S_MIN
    # One that has just begun may break each time: it waits.
    network.cut(network.outbound(0, 1, 1))
    network.run(rails_module.REDIAL_S_MIN / 2)
    assert not network.all_up() and rail.wait_s == 2 * rails_module.REDIAL_S_MIN
    network.until(network.all_up, 2 * rails_module.REDIAL_S_MIN)
    # Silence says that the path carries nothing.
    network.run(rails_module.REDIAL_S_MAX + 0.05)
    network.endpoints[0].outbounds[1].lose(network.outbound(0, 1, 1), Broken("no answer"))
    assert rail.next_s > network.endpoints[0].now_s


def test_a_dialling_without_an_answer_begins_anew_where_somebody_is_lost() -> None:
    """The kernel repeats the SYN after a second; by then all others may have decided who is lost."""
    network, _ = joined((0, 1))
    outbound = network.endpoints[0].outbounds[1]
    up, down = outbound.rails[:2]
    network.unreachable.add((1, 1))
    network.cut(network.outbound(0, 1, 1))
    network.until(lambda: down.dialing is not None)
    first, began_s, connection = down.dialing, network.now_s, up.connection
    assert first is not None
    outbound.dial_anew()
    assert first.is_closed and up.connection is connection
    network.until(lambda: down.dialing is not None)
    assert down.dialing is not first and network.now_s - began_s < 0.05


def test_an_early_message_is_not_reported_when_the_one_before_it_is_acknowledged() -> None:
    """The receiver has a slot for the first of two short messages only."""
    network, ((handle,), _) = joined((0, 1))
    view = np.zeros(64, np.uint8)
    network.post_recv(1, handle, view)
    network.settle()
    network.asleep.add(1)
    for _ in range(2):
        network.post_send(0, handle, view)
    assert network.poll(0) == [(SENT, handle)]
    network.asleep.clear()
    assert network.poll(1) == [(RECEIVED, handle)]
    network.run(0.1)
    assert network.poll(0) == [] and network.endpoints[0].outbounds[1].channel(0).sender.acked == 1
    network.post_recv(1, handle, view)
    assert network.poll(1) == [(RECEIVED, handle)] and network.poll(0) == [(SENT, handle)]


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_few_short_messages_go_out_before_their_slots_and_no_more(is_idle: bool) -> None:
    network, ((handle,), _) = joined((0, 1))
    views = [np.full(64, i, np.uint8) for i in range(12)]
    network.post_recv(1, handle, np.zeros(64, np.uint8))
    network.settle()
    if not is_idle:
        # Then they are not written within `post_send`.
        for rail in range(2):
            network.outbound(0, 1, rail).say(PROBE_FRAME, 0)
    for view in views:
        network.endpoints[0].post_send(handle, view.data)
    for connection in network.endpoints[0].outbounds[1].connections:
        network.endpoints[0].wake(connection)
    assert network.poll(1) == [(RECEIVED, handle)]
    network.run(0.1)
    channel = network.endpoints[1].inbounds[0].channel(0)
    assert sorted(channel.early) == list(range(1, 1 + EARLY_CHUNKS_MAX))
    into = [np.zeros(64, np.uint8) for _ in views[1:]]
    for view in into:
        network.post_recv(1, handle, view)
    network.settle()
    assert network.poll(0) == [(SENT, handle)] * 12
    assert [view.tolist() for view in into] == [view.tolist() for view in views[1:]]
    assert network.endpoints[1].counts.damaged == 0


def full(network: Network, rail: int, handle: int, data: Array) -> SendConnection:
    """Rank 0's connection to rank 1 on a rail, whose socket is full, with chunks of this message that wait for it."""
    network.post_recv(1, handle, np.zeros_like(data))
    network.settle()
    endpoint, connection = network.endpoints[0], network.outbound(0, 1, rail)
    assert endpoint.post_send(handle, data.data) is None
    for each, written in write_all(endpoint, lambda each, n_bytes: 100 if each is connection else n_bytes).items():
        each.wire.put(written)
    assert connection.blocked and connection.holds(endpoint.outbounds[1].channel(0))
    return connection


def test_what_waits_for_the_socket_of_a_suspected_connection_goes_elsewhere_alone() -> None:
    network, ((handle,), _) = joined((0, 1), chunk_bytes=1 << 16)
    connection = full(network, 1, handle, np.zeros(4 << 20, np.uint8))
    connection.doubt = 1
    network.endpoints[0].outbounds[1].update_avoided()
    assert connection.is_avoided and not connection.holds(network.endpoints[0].outbounds[1].channel(0))
    assert network.outbound(0, 1, 0).holds(network.endpoints[0].outbounds[1].channel(0))


def test_what_waits_for_a_full_socket_is_not_lost_and_not_queued_twice() -> None:
    network, ((handle,), _) = joined((0, 1), chunk_bytes=1 << 16)
    connection, endpoint = full(network, 1, handle, np.zeros(4 << 20, np.uint8)), network.endpoints[0]
    n_waiting = len(connection._queue)
    endpoint.now_s += 2 * TIMEOUT_S
    endpoint.tick()
    assert len(connection._queue) == n_waiting and endpoint.counts.resent == 0
    assert endpoint.outbounds[1].channel(0).timeout_s == TIMEOUT_S
