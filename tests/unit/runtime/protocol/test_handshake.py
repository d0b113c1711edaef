"""Who may come in: the handshake of a connection at both ends, byte by byte, and those who are shut out."""

from __future__ import annotations

import os
import random

import pytest

from optcc.runtime.protocol.connection import RecvConnection, SendConnection
from optcc.runtime.protocol.endpoint import Endpoint
from optcc.runtime.protocol.handshake import Accepting, Dialing
from optcc.runtime.protocol.hello import ANSWER_BYTES, HELLO_BYTES, PROOF_BYTES, Caller, Hello
from tests.unit.runtime.protocol.network import JOB, SECRET, endpoint_of


def give(endpoint: Endpoint, connection: Dialing | Accepting, data: bytes) -> tuple[bytes, object]:
    """Bytes as they come; what is sent, and what takes the connection's place."""
    sent, successor = b"", None
    while data and successor is None and not connection.is_closed:
        part, data = data[: connection.wanted], data[connection.wanted :]
        reply, successor = endpoint.received_hello(connection, part)
        sent += reply
    return sent, successor


def dialing_of(endpoint: Endpoint, peer: int, rail: int = 0) -> Dialing:
    """What the endpoint dials first on this rail."""
    endpoint.outbound(peer)
    endpoint.tick()
    dialing = endpoint.outbounds[peer].rails[rail].dialing
    assert dialing is not None and dialing in endpoint.to_dial
    return dialing


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_both_ends_are_up_after_a_handshake_in_any_parts(step: int) -> None:
    caller, listener = endpoint_of(0, 2), endpoint_of(1, 2)
    dialing = dialing_of(caller, 1, 1)
    assert (dialing.address, dialing.nic) == (("127.0.2.2", 9), 1)
    accepting = listener.accepted(1)
    opening = caller.connected(dialing)
    assert dialing.established and len(opening) == HELLO_BYTES and not caller.outbounds[1].connections
    answer = b""
    for at in range(0, HELLO_BYTES, step):
        reply, successor = give(listener, accepting, opening[at : at + step])
        answer += reply
        assert successor is None
    assert len(answer) == ANSWER_BYTES
    near = None
    for at in range(0, ANSWER_BYTES, step):
        reply, near = give(caller, dialing, answer[at : at + step])
        assert reply == b""
    assert isinstance(near, SendConnection) and caller.outbounds[1].rails[1].connection is near
    proof = b"".join(near.views())
    assert len(proof) == PROOF_BYTES
    far = None
    for at in range(0, PROOF_BYTES, step):
        _, far = give(listener, accepting, proof[at : at + step])
    assert isinstance(far, RecvConnection) and listener.inbounds[0].connections == [None, far]
    assert (near.session, near.rail, far.rail, far.peer) == (far.session, 1, 1, 0) and near.session
    assert not listener.accepting and listener.counts.refused == 0


def knock(listener: Endpoint, hello: Hello, *, secret: bytes = SECRET, nic: int = 0) -> tuple[Accepting, bytes]:
    """A caller who says this; its connection, and what it is answered."""
    accepting = listener.accepted(nic)
    answer, successor = give(listener, accepting, Caller(secret, hello, nonce=os.urandom(32)).opening)
    assert successor is None
    return accepting, answer


@pytest.mark.parametrize(
    "wrong",
    [
        Hello(3, 0, 0, os.urandom(16)),
        Hello(3, 1, 0, JOB),
        Hello(0, 0, 0, JOB),
        Hello(4, 0, 0, JOB),
        Hello(3, 0, 1, JOB),
        Hello(3, 0, 99, JOB),
    ],
    ids=["job", "destination", "itself", "source", "NIC", "rail"],
)
def test_a_caller_who_belongs_elsewhere_gets_no_answer(wrong: Hello) -> None:
    listener = endpoint_of(0, 4)
    accepting, answer = knock(listener, wrong)
    assert answer == b"" and accepting.is_closed and listener.to_close == [accepting]
    assert listener.counts.refused == 1 and not listener.accepting and not listener.inbounds


@pytest.mark.parametrize(
    "data",
    [random.Random(1).randbytes(HELLO_BYTES), b"GET / HTTP/1.1\r\n\r\n" * 8, bytes(1 << 16)],
    ids=["random", "HTTP", "zeros"],
)
def test_garbage_is_no_hello(data: bytes) -> None:
    listener = endpoint_of(0, 4)
    accepting = listener.accepted(0)
    assert give(listener, accepting, data) == (b"", None)
    assert accepting.is_closed and listener.counts.refused == 1 and listener.counts.damaged == 0


def test_a_hello_without_a_proof_is_no_connection() -> None:
    listener = endpoint_of(0, 4)
    accepting, answer = knock(listener, Hello(3, 0, 0, JOB))
    assert len(answer) == ANSWER_BYTES and not accepting.is_closed
    assert give(listener, accepting, bytes(PROOF_BYTES)) == (b"", None)
    assert accepting.is_closed and listener.counts.refused == 1 and not listener.inbounds


def test_a_listener_who_does_not_know_the_secret_is_no_peer() -> None:
    caller, listener = endpoint_of(0, 2), endpoint_of(1, 2, secret=bytes(32))
    dialing = dialing_of(caller, 1)
    accepting = listener.accepted(0)
    answer, _ = give(listener, accepting, caller.connected(dialing))
    assert len(answer) == ANSWER_BYTES
    assert give(caller, dialing, answer) == (b"", None)
    rail = caller.outbounds[1].rails[0]
    assert dialing.is_closed and rail.dialing is None and rail.connection is None
    assert not rail.refused, "only a kernel that refuses says that a rank is gone"
    assert rail.next_s > caller.now_s, "it is dialled again later"


def test_slow_and_silent_callers_are_shut_out() -> None:
    listener = endpoint_of(0, 4, hello_s=0.3)
    silent, slow = [listener.accepted(0) for _ in range(5)], listener.accepted(1)
    for tenth in range(4):
        listener.now_s = tenth / 10
        listener.received_hello(slow, b"o")
        listener.tick()
        assert slow.is_closed == (tenth == 3), "a byte at a time is not fast enough"
    assert all(each.is_closed for each in silent) and listener.counts.refused == 6 and not listener.accepting
    assert listener.received_hello(slow, b"o") == (b"", None), "and is not heard any more"


def test_many_callers_cost_a_bounded_number_of_connections() -> None:
    listener = endpoint_of(0, 4)
    callers = [listener.accepted(number % 2) for number in range(150)]
    bound = 2 * 4 * 2 + 16
    assert len(listener.accepting) == bound == sum(not each.is_closed for each in callers)
    assert listener.counts.refused == 150 - bound
    assert not any(each.is_closed for each in callers[-bound:]), "the oldest give way"


def test_a_caller_who_hangs_up_is_forgotten() -> None:
    listener = endpoint_of(0, 4)
    accepting = listener.accepted(0)
    listener.broken(accepting, "closed")
    listener.broken(accepting, "closed")
    assert listener.counts.refused == 1 and not listener.accepting and listener.to_close == [accepting]
