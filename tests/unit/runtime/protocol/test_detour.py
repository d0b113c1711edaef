"""Paths through other ranks: how they are found, what goes over them, and when they end; and who passes bytes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from optcc.errors import AllRailsFailed
from optcc.runtime.protocol.endpoint import LINGER_S, Endpoint
from optcc.runtime.protocol.frames import WireError
from optcc.runtime.protocol.handshake import Accepting
from optcc.runtime.protocol.hello import HELLO_BYTES, RELAY, Caller, Hello
from optcc.runtime.protocol.leg import QUEUE_BYTES, READ_BYTES, Leg
from optcc.runtime.protocol.liveness import KernelReport
from optcc.runtime.transport import RECEIVED, SENT
from tests.unit.runtime.protocol.network import JOB, SECRET, Network, endpoint_of, fill, write_all


def ring(n_ranks: int, **changes: Any) -> tuple[Network, list[list[int]]]:
    """Ranks that are all joined, with a channel from each to each: the handles by rank, in the order of the pairs."""
    network = Network(n_ranks, **changes)
    handles = network.open(*((src, dst) for src in range(n_ranks) for dst in range(n_ranks) if src != dst))
    network.until(network.all_up)
    return network, handles


def lose(network: Network, rank: int, nic: int) -> None:
    """The link of a NIC goes down; its kernel says so, and nobody reaches it."""
    network.unreachable.add((rank, nic))
    network.endpoints[rank].now_s = network.now_s
    network.endpoints[rank].nic_changed(nic, False)


def heal(network: Network, rank: int, nic: int) -> None:
    network.unreachable.discard((rank, nic))
    network.endpoints[rank].now_s = network.now_s
    network.endpoints[rank].nic_changed(nic, True)


def carry(network: Network, handles: list[list[int]], src: int, dst: int, n_bytes: int) -> None:
    """One message arrives as it was, and counts as sent."""
    message = np.random.default_rng(0).integers(0, 256, n_bytes, dtype=np.uint8)
    channel = src * (len(handles) - 1) + dst - (dst > src)
    sends, receives = handles[src][channel], handles[dst][channel]
    network.post_recv(dst, receives, into := np.zeros_like(message))
    network.post_send(src, sends, message)
    events: dict[int, list[tuple[Any, int]]] = {src: [], dst: []}

    def is_over() -> bool:
        for rank, got in events.items():
            got += network.poll(rank)
        return (SENT, sends) in events[src] and (RECEIVED, receives) in events[dst]

    network.until(is_over, 3.0)
    assert np.array_equal(into, message)


@pytest.mark.parametrize("n_bytes", [5, 300_000])
def test_two_ranks_that_share_no_rail_reach_each_other_through_a_third(n_bytes: int) -> None:
    network, handles = ring(3)
    lose(network, 0, 0)
    lose(network, 1, 1)
    carry(network, handles, 0, 1, n_bytes)
    carry(network, handles, 1, 0, n_bytes)
    counts = [endpoint.counts for endpoint in network.endpoints]
    assert [each.detours for each in counts] == [1, 1, 0] and counts[2].relays == 2
    relayed = sum(rail.received_bytes for rail in network.endpoints[2].rail_counts)
    assert relayed > 2 * n_bytes, "it has gone through rank 2"


def test_a_path_ends_when_a_rail_of_the_pair_is_back() -> None:
    network, handles = ring(3)
    lose(network, 0, 0)
    lose(network, 1, 1)
    carry(network, handles, 0, 1, 1000)
    outbound, inbound = network.endpoints[0].outbounds[1], network.endpoints[1].inbounds[0]
    assert outbound.rails[-1].connection is not None and not outbound.is_direct
    assert set(inbound._rails) == {2}, "the receiver reports over the path"
    heal(network, 1, 1)
    network.until(lambda: outbound.is_direct and outbound.rails[-1].connection is None, 1.0)
    network.settle()
    assert not network.endpoints[2].relays.legs and set(inbound._rails) == {0, 1}
    carry(network, handles, 0, 1, 100_000)
    assert network.endpoints[0].counts.detours == 1


def test_a_path_may_go_through_two_ranks() -> None:
    """Rank 0 shares a rail with rank 1 alone, that with rank 2, that with rank 3."""
    network, handles = ring(4, n_rails=3)
    for rank, nics in enumerate([(1, 2), (2,), (0,), (0, 1)]):
        for nic in nics:
            lose(network, rank, nic)
    carry(network, handles, 0, 3, 50_000)
    carry(network, handles, 3, 0, 50_000)
    assert network.endpoints[0].counts.detours == 1
    assert all(network.endpoints[rank].counts.relays for rank in (1, 2))


def test_what_is_known_may_be_wrong_and_other_paths_are_tried() -> None:
    """Nobody says that ranks 2 and 1 do not reach each other; rank 3 reaches both."""
    network, handles = ring(4)
    for rank, nic in ((0, 0), (1, 1)):
        lose(network, rank, nic)
    former = network._dial

    def dial(rank: int, dialing: Any) -> None:
        if {rank, network._nics[dialing.address[0]][0]} != {1, 2}:
            former(rank, dialing)

    network._dial = dial  # type: ignore[method-assign]
    for connection in [each for each in network.endpoints[2].up if each.peer == 1]:
        network.cut(connection)
    carry(network, handles, 0, 1, 1000)
    assert network.endpoints[3].counts.relays and not network.endpoints[2].counts.relays


def test_a_rank_that_nobody_reaches_is_named() -> None:
    network, handles = ring(3)
    lose(network, 1, 0)
    lose(network, 1, 1)
    network.post_send(0, handles[0][0], np.zeros(10, np.uint8))
    network.run(8.0)
    for rank in (0, 2):
        with pytest.raises(AllRailsFailed, match="no rail to rank 1"):
            network.poll(rank)


def test_time_in_which_the_rank_between_computes_is_not_counted() -> None:
    network, handles = ring(3)
    lose(network, 0, 0)
    lose(network, 1, 1)
    network.asleep.add(2)
    message = np.arange(100, dtype=np.uint8)
    network.post_recv(1, handles[1][0], into := np.zeros_like(message))
    network.post_send(0, handles[0][0], message)
    network.run(9.0)
    assert all(endpoint.failure is None for endpoint in network.endpoints)
    network.asleep.clear()
    network.until(lambda: np.array_equal(into, message), 3.0)


def test_the_rank_between_does_not_leave_while_the_others_may_need_it() -> None:
    network, handles = ring(3)
    lose(network, 0, 0)
    lose(network, 1, 1)
    network.run(0.2)
    between = network.endpoints[2]
    between.begin_leaving()
    network.run(3.0)
    assert not between.may_leave() and not between.owes_nothing()
    carry(network, handles, 0, 1, 1000)
    network.endpoints[0].begin_leaving()
    network.run(2.0)
    assert not between.may_leave(), "rank 1 may still wait"
    network.endpoints[1].begin_leaving()
    network.until(between.may_leave, 3.0)


def test_the_rank_between_does_not_wait_for_ever() -> None:
    network, _ = ring(3)
    lose(network, 0, 0)
    lose(network, 1, 1)
    network.run(0.2)
    network.endpoints[2].begin_leaving()
    network.run(LINGER_S + 1.0)
    assert network.endpoints[2].may_leave()


# --- passing on


def caller_of(src: int, dst: int, rail: int = RELAY, job: bytes = JOB) -> Caller:
    return Caller(SECRET, Hello(src, dst, rail, job), nonce=bytes(32))


def greet(endpoint: Endpoint, onward: bytes) -> tuple[Accepting, Leg | None]:
    """Rank 0 asks `endpoint` to pass on a hello."""
    accepting, caller = endpoint.accepted(0), caller_of(0, endpoint.rank)
    answer, _ = endpoint.received_hello(accepting, caller.opening)
    endpoint.received_hello(accepting, caller.take(answer))
    assert accepting.wanted == HELLO_BYTES
    _, leg = endpoint.received_hello(accepting, onward)
    assert leg is None or isinstance(leg, Leg)
    return accepting, leg


@pytest.mark.parametrize(
    "onward",
    [
        caller_of(1, 3).opening,
        caller_of(0, 2).opening,
        caller_of(0, 0).opening,
        caller_of(0, 4).opening,
        caller_of(0, 3, job=bytes(range(16))).opening,
        bytes(HELLO_BYTES),
    ],
    ids=["of another caller", "to itself", "to the caller", "to nobody", "of another job", "none"],
)
def test_only_a_hello_of_the_caller_to_another_rank_is_passed_on(onward: bytes) -> None:
    endpoint = endpoint_of(2, 4)
    accepting, leg = greet(endpoint, onward)
    assert leg is None and accepting.is_closed and endpoint.counts.refused == 1
    assert not endpoint.to_dial and not endpoint.relays.legs


def test_a_hello_is_passed_on_after_the_proof_alone() -> None:
    """Who does not know the secret of the job makes nobody dial."""
    endpoint = endpoint_of(2, 4)
    accepting, caller = endpoint.accepted(0), caller_of(0, 2)
    endpoint.received_hello(accepting, caller.opening)
    endpoint.received_hello(accepting, bytes(32))
    assert accepting.is_closed and endpoint.counts.refused == 1 and not endpoint.to_dial
    with pytest.raises(WireError):
        Hello.read(bytes(HELLO_BYTES))


def relayed() -> tuple[Endpoint, Leg, Leg]:
    """A rank and both legs of a relay, over which a byte has gone back."""
    endpoint = endpoint_of(2, 4)
    _, near = greet(endpoint, onward := caller_of(0, 3).opening)
    (dialing,) = endpoint.to_dial
    assert endpoint.connected(dialing) == onward and near is not None and not near.wants_read
    _, far = endpoint.received_hello(dialing, b"!")
    assert isinstance(far, Leg) and endpoint.to_resume == [near] and write_all(endpoint) == {near: b"!"}
    return endpoint, near, far


def test_a_relay_reads_no_more_than_it_can_pass_on() -> None:
    endpoint, near, far = relayed()
    sent = bytes(range(256)) * (QUEUE_BYTES // 256)
    for at in range(0, len(sent), READ_BYTES):
        assert near.wants_read
        fill(endpoint, near, sent[at : at + READ_BYTES])
    assert not near.wants_read and far.wants_read and far.n_waiting_bytes == QUEUE_BYTES
    endpoint.to_resume.clear()
    written = write_all(endpoint, lambda _, n_bytes: n_bytes // 2)[far]
    assert far.blocked and near.wants_read and endpoint.to_resume == [near]
    endpoint.wake(far)
    assert written + write_all(endpoint)[far] == sent and not far.blocked


@pytest.mark.parametrize("is_waiting", [False, True])
def test_what_has_come_is_passed_on_before_a_relay_ends(is_waiting: bool) -> None:
    endpoint, near, far = relayed()
    if is_waiting:
        fill(endpoint, near, b"last words")
    endpoint.broken(near, "closed by the other end")
    assert near.is_closed and far.is_closed == (not is_waiting)
    if is_waiting:
        assert write_all(endpoint) == {far: b"last words"}
    assert far.is_closed and not endpoint.relays.legs and set(endpoint.to_close) >= {near, far}


def test_a_relay_over_a_nic_that_is_lost_ends() -> None:
    endpoint, near, far = relayed()
    endpoint.nic_changed(far.nic, False)
    assert near.is_closed and far.is_closed


def test_if_one_rail_does_not_lead_to_the_next_rank_another_is_tried() -> None:
    endpoint = endpoint_of(2, 4)
    _, near = greet(endpoint, caller_of(0, 3).opening)
    assert near is not None
    first = endpoint.to_dial.pop()
    endpoint.dial_failed(first, refused=True)
    (second,) = endpoint.to_dial
    assert {first.nic, second.nic} == {0, 1} and not near.is_closed
    endpoint.dial_failed(second, refused=False)
    assert near.is_closed and not endpoint.relays.onwards


def test_a_relay_whose_next_rank_is_silent_ends() -> None:
    """The caller's kernel has its bytes acknowledged by this one, and would never find out."""
    endpoint, near, far = relayed()
    fill(endpoint, near, bytes(1000))
    write_all(endpoint)
    assert far in endpoint.watched()
    for tick in range(40):
        for leg, in_flight in ((near, 0), (far, 1000)):
            leg.kernel = KernelReport(0, in_flight, 0, 1000, 1 << 20, 1, 1e-4)
        endpoint.now_s = 0.01 * tick
        endpoint.tick()
        endpoint.ticked(0.0)
    assert far.is_closed and near.is_closed
