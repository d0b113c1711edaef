"""NICs whose addresses change: who is told, who is believed, and what is dialled."""

from __future__ import annotations

import os

import numpy as np
import pytest

from optcc.runtime.protocol.frames import ADDRESS_FRAME, AddressWord, control_header
from optcc.runtime.protocol.hello import Caller, Hello
from optcc.runtime.transport import RECEIVED
from tests.unit.runtime.protocol.network import JOB, Network, endpoint_of, fill

FORMER, NEW, NEWER = ("127.0.2.2", 9), "127.0.2.77", "127.0.2.78"


def word(turn: int, address: str = NEW, *, nic: int = 1, port: int = 9) -> int:
    return AddressWord(turn, nic, address, port).number


@pytest.mark.parametrize("mover", [0, 1])
@pytest.mark.parametrize("authenticate", [False, True])
def test_a_rail_is_joined_again_at_the_new_address_of_either_end(mover: int, authenticate: bool) -> None:
    """Rank 0 dials. Within 20 ms, as nobody waits for what is silent."""
    network = Network(2, authenticate=authenticate)
    handles = network.open((0, 1))
    network.until(network.all_up)
    before = network.outbound(0, 1, 1)
    network.move(mover, 1, NEW)
    network.until(network.all_up, 0.02)
    assert before.is_closed and network.outbound(0, 1, 1) is not before
    assert network.endpoints[0].address(1, 1) == ((NEW, 9) if mover else FORMER)
    assert network.endpoints[1 - mover].address(mover, 1) == (NEW, 9)
    network.post_recv(1, handles[1][0], into := np.zeros(300_000, np.uint8))
    network.post_send(0, handles[0][0], message := np.arange(300_000, dtype=np.uint8))
    network.until(lambda: (RECEIVED, handles[1][0]) in network.poll(1))
    assert np.array_equal(into, message)
    network.move(mover, 1, NEWER)
    network.until(network.all_up, 0.02)
    assert network.endpoints[1 - mover].address(mover, 1) == (NEWER, 9)


def test_a_host_of_one_nic_dials_who_dialled_it() -> None:
    network = Network(2, n_rails=1)
    network.open((0, 1))
    network.until(network.all_up)
    network.move(1, 0, NEW)
    network.until(network.all_up, 1.0)
    assert network.endpoints[0].outbounds[1].direct[0].address == (NEW, 9)


def test_who_has_never_been_told_finds_the_host_through_another_rank() -> None:
    network = Network(3, n_rails=1)
    network.open((0, 1), (1, 2))
    network.until(network.all_up)
    network.move(2, 0, NEW)
    network.until(network.all_up, 1.0)
    handles = network.open((0, 2))
    network.post_recv(2, handles[2][0], np.zeros(9, np.uint8))
    network.post_send(0, handles[0][0], np.ones(9, np.uint8))
    network.until(network.all_up, 3.0)
    assert network.endpoints[0].counts.detours == 1 and network.endpoints[0].address(2, 0) == (NEW, 9)


def test_a_word_that_is_overtaken_changes_nothing() -> None:
    network = Network(2)
    network.open((0, 1))
    network.until(network.all_up)
    endpoint, first, second = network.endpoints[0], network.outbound(0, 1, 0), network.outbound(0, 1, 1)
    for turn, address in ((2, NEWER), (1, NEW), (2, NEWER)):
        endpoint.received(first, control_header(first.session, ADDRESS_FRAME, word(turn, address)))
        assert endpoint.address(1, 1) == (NEWER, 9)
    assert second.is_closed and not first.is_closed
    # Turns are counted modulo 256.
    for turn in (100, 200, 40):
        endpoint.received(first, control_header(first.session, ADDRESS_FRAME, word(turn, NEW)))
        assert endpoint.address(1, 1) == (NEW, 9)
        endpoint.received(first, control_header(first.session, ADDRESS_FRAME, word(turn - 1, NEWER)))
    assert endpoint.address(1, 1) == (NEW, 9)


@pytest.mark.parametrize(
    "number", [word(1, nic=2), word(1, port=0), word(1, "0.0.0.0"), word(1, "224.0.0.1"), word(1, "255.255.255.255")]
)
def test_an_address_that_cannot_be_costs_the_connection(number: int) -> None:
    network = Network(2)
    network.open((0, 1))
    network.until(network.all_up)
    endpoint, connection = network.endpoints[0], network.outbound(0, 1, 0)
    endpoint.received(connection, control_header(connection.session, ADDRESS_FRAME, number))
    assert connection.is_closed and endpoint.counts.damaged == 1 and not endpoint.addresses


@pytest.mark.battery(11)
def test_a_stranger_who_claims_an_address_is_refused() -> None:
    """Rank 0's NIC is said to have moved by who does not know the secret: before its proof, after a wrong one, and with
    its proof and this claim at once."""
    secret = os.urandom(32)
    claim = control_header(0, ADDRESS_FRAME, word(1))
    for number, its_secret in enumerate((b"", secret, secret)):
        endpoint = endpoint_of(1, 2)
        endpoint.inbound(0)
        endpoint.outbound(0)
        accepting = endpoint.accepted(1)
        caller = Caller(its_secret, Hello(0, 1, 1, JOB), nonce=os.urandom(32))
        answer, successor = endpoint.received_hello(accepting, caller.opening)
        assert answer and successor is None
        # What the handshake wants is what is read: a claim in place of the proof is taken for it.
        data = [claim[: accepting.wanted], bytes(32), bytes(32)][number]
        _, successor = endpoint.received_hello(accepting, data)
        assert successor is None and accepting.is_closed and endpoint.counts.refused == 1
        assert not endpoint.addresses and endpoint.outbounds[0].direct[1].address == ("127.0.2.1", 9)


@pytest.mark.battery(11)
def test_a_claim_that_is_put_into_an_authenticated_connection_costs_it() -> None:
    network = Network(2, authenticate=True)
    network.open((0, 1))
    network.until(network.all_up)
    endpoint, connection = network.endpoints[1], network.inbound(0, 1, 0)
    fill(endpoint, connection, control_header(connection.session, ADDRESS_FRAME, word(1)))
    assert connection.is_closed and endpoint.counts.damaged == 1 and not endpoint.addresses
