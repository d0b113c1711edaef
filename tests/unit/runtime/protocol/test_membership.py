"""When a rank is lost, when no rail is left, and when neither is the case."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from optcc.errors import AllRailsFailed, DeadlineExceeded, RankLost
from optcc.runtime.protocol.connection import Broken
from optcc.runtime.protocol.failure_agreement import FailureFinding
from optcc.runtime.transport import RECEIVED, SENT
from tests.unit.runtime.protocol.network import Network


def joined(*channels: tuple[int, int], n_ranks: int = 2, **changes: Any) -> tuple[Network, list[list[int]]]:
    network = Network(n_ranks, **changes)
    handles = network.open(*channels)
    network.barrier()
    network.until(network.all_up)
    return network, handles


def test_a_rank_that_leaves_early_is_named() -> None:
    network, ((handle,), _) = joined((0, 1))
    network.leave(1)
    network.post_send(0, handle, np.zeros(4, np.uint8))
    network.run(0.5)
    with pytest.raises(RankLost, match="rank 0: rank 1 is lost: it has left before it had taken and sent all"):
        network.poll(0)


def test_a_rank_that_leaves_while_it_is_waited_for_is_named() -> None:
    network, (_, (handle,)) = joined((0, 1))
    network.post_recv(1, handle, np.zeros(4, np.uint8))
    network.leave(0)
    network.run(0.5)
    with pytest.raises(RankLost, match="rank 1: rank 0 is lost: it has left before it had taken and sent all"):
        network.poll(1)


def test_a_rank_that_has_left_and_owes_nothing_is_no_error() -> None:
    network, ((handle,), _) = joined((0, 1))
    view, into = np.full(4, 7, np.uint8), np.zeros(4, np.uint8)
    network.post_recv(1, handle, into)
    network.post_send(0, handle, view)
    assert network.poll(1) == [(RECEIVED, handle)] and into.tolist() == [7] * 4
    network.leave(1)
    assert network.poll(0) == [(SENT, handle)]
    network.run(2.0)
    assert network.poll(0) == []
    assert network.endpoints[0].left == {1: False} and network.endpoints[0].failure is None
    assert [rail.failures for rail in network.endpoints[0].rail_counts] == [0, 0]
    assert all(rail.dialing is None for rail in network.endpoints[0].outbounds[1].rails), "nobody dials it"


def test_a_rank_that_has_left_after_a_failure_is_lost() -> None:
    network, _ = joined((0, 1), (1, 2), n_ranks=3)
    network.leave(1, failed=True)
    network.run(0.2)
    with pytest.raises(RankLost, match="rank 0: rank 1 is lost: it has left after a failure"):
        network.poll(0)
    with pytest.raises(RankLost, match="rank 2: rank 1 is lost: it has left after a failure"):
        network.poll(2)


def test_a_rank_that_is_gone_without_a_word_refuses_connections() -> None:
    network, ((handle,), _) = joined((0, 1))
    network.post_send(0, handle, np.zeros(1 << 20, np.uint8))
    network.leave(1, silently=True)
    began_s = network.now_s
    network.until(lambda: network.endpoints[0].failure is not None)
    assert network.now_s - began_s < 0.2
    with pytest.raises(RankLost, match="rank 0: rank 1 is lost: its process has ended: it refuses connections"):
        network.poll(0)


def test_a_rank_that_refuses_connections_and_is_not_waited_for_is_no_error() -> None:
    """It may have left in good order, and its bye was lost with the last rail."""
    network, ((handle,), _) = joined((0, 1))
    network.leave(1, silently=True)
    network.run(2.0)
    outbound = network.endpoints[0].outbounds[1]
    assert all(rail.refused for rail in outbound.direct) and network.poll(0) == []
    network.post_send(0, handle, np.zeros(4, np.uint8))
    network.run(0.2)
    with pytest.raises(RankLost, match="rank 0: rank 1 is lost: its process has ended: it refuses connections"):
        network.poll(0)


def test_who_is_held_to_be_cut_off_and_has_left_is_told_of() -> None:
    """Rank 2 hears that rank 0 reaches neither 1 nor 3, and has heard the bye of rank 1: one pair is left."""
    network, _ = joined((0, 1), (1, 2), (0, 2), n_ranks=4)
    network.leave(1)
    network.run(0.1)
    network.endpoints[2].membership.agreement.find([FailureFinding.cut(0, 1), FailureFinding.cut(0, 3)])
    network.until(lambda: network.endpoints[0].failure is not None and network.endpoints[2].failure is not None)
    for rank in (0, 2):
        with pytest.raises(AllRailsFailed, match="no rail between rank 0 and rank 3"):
            network.poll(rank)


def test_a_refusal_does_not_overtake_what_comes_over_connections_of_the_peer() -> None:
    network, ((_, back), _) = joined((0, 1), (1, 0))
    network.post_recv(0, back, np.zeros(4, np.uint8))
    network.gone.add(1)
    for rail in range(2):
        network.cut(network.outbound(0, 1, rail))
    network.run(0.2)
    assert all(rail.refused for rail in network.endpoints[0].outbounds[1].direct) and network.poll(0) == []
    for rail in range(2):
        network.cut(network.inbound(1, 0, rail))
    network.run(0.2)
    with pytest.raises(RankLost, match="rank 0: rank 1 is lost: its process has ended: it refuses connections"):
        network.poll(0)


def test_one_nic_that_refuses_may_be_the_nics_trouble_for_a_second() -> None:
    network, ((handle,), _) = joined((0, 1))
    network.post_send(0, handle, np.zeros(1 << 20, np.uint8))
    network.unreachable.add((1, 1))
    network.leave(1, silently=True)
    began_s = network.now_s
    network.until(lambda: network.endpoints[0].failure is not None)
    assert 0.9 < network.now_s - began_s < 1.3
    assert "it refuses connections" in str(network.endpoints[0].failure)


def test_a_rank_that_nobody_reaches_is_a_named_error_within_the_stall() -> None:
    network, ((handle,), _) = joined((0, 1), stall_s=0.6)
    # No way leads there: nothing answers, and nothing refuses.
    network.unreachable |= {(1, 0), (1, 1)}
    for rail in range(2):
        network.cut(network.outbound(0, 1, rail))
    network.post_send(0, handle, np.zeros(4, np.uint8))
    began_s = network.now_s
    network.until(lambda: network.endpoints[0].failure is not None)
    with pytest.raises(AllRailsFailed, match=r"rank 0: no rail between rank 0 and rank 1 \(r0, r1\)$"):
        network.poll(0)
    assert network.now_s - began_s < 1.5


def test_a_rank_that_nobody_reaches_is_no_error_while_nothing_is_to_be_done() -> None:
    network, _ = joined((0, 1), stall_s=0.6)
    network.unreachable |= {(1, 0), (1, 1)}
    for rail in range(2):
        network.cut(network.outbound(0, 1, rail))
    network.run(2.0)
    assert network.endpoints[0].failure is None and network.endpoints[0].outbounds[1].dark_s >= 0.6


def test_a_rank_whose_data_still_come_is_not_cut_off_though_no_connection_leads_there() -> None:
    """Its ports are so full that no connect gets through, and there is nothing to send it; once there is, it is."""
    network, ((there, back), _) = joined((0, 1), (1, 0), stall_s=0.6)
    network.connect_s = 99.0
    into, data = np.zeros(4, np.uint8), np.arange(4, dtype=np.uint8)
    network.post_recv(1, there, into)
    for rail in range(2):
        network.cut(network.outbound(1, 0, rail))
    network.run(3.0)
    assert network.endpoints[1].failure is None and network.endpoints[1].outbounds[0].dark_s >= 0.6
    network.post_send(0, there, data)
    assert network.poll(1) == [(RECEIVED, there)] and np.array_equal(into, data)
    network.post_send(1, back, data)
    network.until(lambda: network.endpoints[1].failure is not None, 1.5)
    assert isinstance(network.endpoints[1].failure, AllRailsFailed)


def test_a_rank_that_is_busy_elsewhere_is_not_lost() -> None:
    """Longer than every limit: its kernel answers for it."""
    network, ((handle,), _) = joined((0, 1), silent_s=0.3, stall_s=0.5)
    network.asleep.add(1)
    view = np.zeros(8 << 20, np.uint8)
    network.post_recv(1, handle, view)
    network.post_send(0, handle, view)
    network.run(3.0)
    assert network.poll(0) == []
    network.asleep.clear()
    assert network.poll(1) == [(RECEIVED, handle)] and network.poll(0) == [(SENT, handle)]
    assert [rail.failures for endpoint in network.endpoints for rail in endpoint.rail_counts] == [0] * 4


def test_time_that_nobody_has_watched_is_no_stall() -> None:
    """The process was stopped for a minute while no rail was up."""
    network, ((handle,), _) = joined((0, 1), stall_s=0.6)
    network.unreachable |= {(1, 0), (1, 1)}
    for rail in range(2):
        network.cut(network.outbound(0, 1, rail))
    network.post_send(0, handle, np.zeros(4, np.uint8))
    network.run(0.1)
    network.now_s += 60.0
    network.run(0.1)
    assert network.endpoints[0].failure is None
    network.run(0.6)
    assert isinstance(network.endpoints[0].failure, AllRailsFailed)


# --- all ranks name the same one


def culprits(network: Network, *ranks: int) -> list[tuple[int, ...]]:
    found = []
    for rank in ranks:
        failure = network.endpoints[rank].failure
        assert failure is not None, f"rank {rank}"
        found.append(failure.culprits)
    return found


def test_a_rank_that_waits_for_a_healthy_neighbour_learns_who_is_gone() -> None:
    network, handles = joined((0, 1), (1, 2), (2, 3), n_ranks=4)
    network.post_recv(3, handles[3][2], np.zeros(4, np.uint8))
    network.post_send(0, handles[0][0], np.zeros(1 << 20, np.uint8))
    network.leave(1, silently=True)
    network.until(lambda: all(network.endpoints[rank].failure for rank in (0, 2, 3)))
    assert culprits(network, 0, 2, 3) == [(1,)] * 3
    with pytest.raises(RankLost, match="rank 3: rank 1 is lost: its process has ended"):
        network.poll(3)
    assert network.endpoints[0].membership.is_known()


def test_a_rank_that_was_never_connected_is_dialled_and_told() -> None:
    network = Network(3)
    (handle,), _, _ = network.open((0, 1))
    network.until(lambda: bool(network.endpoints[0].up))
    network.post_send(0, handle, np.zeros(1 << 20, np.uint8))
    assert not network.endpoints[2].up
    network.leave(1, silently=True)
    began_s = network.now_s
    network.until(lambda: network.endpoints[2].failure is not None)
    assert culprits(network, 0, 2) == [(1,)] * 2
    assert network.now_s - began_s < 0.2, "rank 0 has not given up on its answer"


def test_the_first_cause_is_that_of_the_rank_that_has_one() -> None:
    """One rank raises; another is found gone at the same time; the error counts."""
    network, ((handle, *_), *_) = joined((0, 1), (1, 2), (2, 0), n_ranks=3)
    network.post_send(0, handle, np.zeros(1 << 20, np.uint8))
    network.endpoints[2].membership.find_error("ValueError: odd", is_late=False)
    network.leave(1, silently=True)
    network.until(lambda: network.endpoints[0].failure is not None)
    with pytest.raises(RankLost, match=r"rank 0: rank 2 is lost: ValueError: odd$"):
        network.poll(0)


def test_a_rank_that_does_not_answer_after_a_deadline_is_named() -> None:
    network, ((handle, *_), *_) = joined((0, 1), (1, 2), (2, 0), n_ranks=3)
    network.post_send(0, handle, np.zeros(4, np.uint8))
    network.asleep.add(1)
    began_s = network.now_s
    network.endpoints[0].membership.find_error("not done after 2 s", is_late=True)
    network.until(lambda: network.endpoints[2].failure is not None)
    assert 0.9 < network.now_s - began_s < 1.6
    assert culprits(network, 0, 2) == [(1,)] * 2
    own = network.endpoints[0].membership.conclude(DeadlineExceeded("not done after 2 s"))
    assert isinstance(own, DeadlineExceeded) and own.culprits == (1,)
    assert str(own) == "not done after 2 s; rank 1 is lost: it does not answer"


def test_a_deadline_that_passes_while_all_answer_is_known_at_once() -> None:
    network, _ = joined((0, 1), (1, 2), (2, 0), n_ranks=3)
    began_s = network.now_s
    network.endpoints[0].membership.find_error("DeadlineExceeded: not done after 2 s", is_late=True)
    network.until(lambda: all(endpoint.failure for endpoint in network.endpoints))
    assert network.now_s - began_s < 0.1
    with pytest.raises(RankLost, match="rank 1: rank 0 is lost: DeadlineExceeded: not done after 2 s"):
        network.poll(1)


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        b"\x93\xc2\x90\x90",
        msgspec.msgpack.encode((False, (7,), ((0, 0, -1, "x"),))),
        msgspec.msgpack.encode((False, (0,), ((0, 7, -1, "x"),))),
        msgspec.msgpack.encode((False, (0,), ((9, 0, -1, "x"),))),
        msgspec.msgpack.encode((False, (0,), ((2, 1, 0, ""),))),
        msgspec.msgpack.encode((False, (0,), ((0, 0, 1, "x"),))),
    ],
)
def test_news_that_cannot_be_cost_the_connection(data: bytes) -> None:
    network, _ = joined((0, 1))
    membership, connection = network.endpoints[1].membership, network.inbound(1, 0, 0)
    padded = len(data).to_bytes(8, "big") + data.ljust(-(-len(data) // 8) * 8, b"\0")
    *words, last = [int.from_bytes(padded[at : at + 8], "big") for at in range(0, len(padded), 8)]
    for word in words:
        membership.take_word(connection, word)
    with pytest.raises(Broken, match="news: ") as broken:
        membership.take_word(connection, last)
    assert broken.value.is_damage and not membership.agreement.findings
    with pytest.raises(Broken, match="news of 65537 B"):
        membership.take_word(connection, (1 << 16) + 1)
