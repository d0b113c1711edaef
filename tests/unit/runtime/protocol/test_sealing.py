"""Authenticated frames: nothing that was changed, repeated, moved, left out, reflected or cut is read, in any parts."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from optcc.errors import MismatchError
from optcc.runtime.protocol import sealing
from optcc.runtime.protocol.connection import Broken, RecvConnection, SendConnection
from optcc.runtime.protocol.frames import VERSION
from optcc.runtime.protocol.hello import Caller, Hello, Keys, Listener
from optcc.runtime.protocol.local import Established
from optcc.runtime.protocol.sealing import (
    CONTENT_BYTES_MAX,
    SEAL_BYTES,
    START_BYTES,
    TAG_BYTES,
    Opener,
    SealedRecvConnection,
    SealedSendConnection,
    Sealer,
)
from optcc.runtime.sim.stream import Flow
from optcc.runtime.transport import RECEIVED, SENT
from optcc.runtime.transports.sim import SimNetwork, run_sim
from tests.unit.runtime.protocol.network import SECRET, Network
from tests.unit.runtime.transports.tcp_ranks import plan_of, reduce_over, without_faults

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
CONTENTS = [b"first", b"second", b"third!"]


def records() -> list[bytes]:
    sealer = Sealer(KEY)
    return [sealer.seal(content) for content in CONTENTS]


def opened(data: bytes, *, part: int = 1 << 20, key: bytes = KEY) -> tuple[list[bytes], str]:
    """The contents that are given out before the error, and the error, for bytes that come in parts of this size."""
    opener, found = Opener(key), []
    error = Broken("", is_damage=True)
    try:
        for at in range(0, len(data), part):
            piece = data[at : at + part]
            opener.room[: len(piece)] = piece
            for content in opener.filled(len(piece)):
                found.append(bytes(content))
    except Broken as broken:
        error = broken
    assert error.is_damage
    return found, str(error)


@pytest.mark.parametrize("part", [1, 2, 7, 29, 1000])
def test_records_come_out_as_they_went_in_whatever_parts_they_come_in(part: int) -> None:
    assert opened(b"".join(records()), part=part) == (CONTENTS, "")


def test_a_content_of_the_largest_size_and_one_byte() -> None:
    large = random.Random(1).randbytes(CONTENT_BYTES_MAX)
    sealer = Sealer(KEY)
    assert Opener(KEY).give(sealer.seal_all(large + b"x")) == [large, b"x"]


def test_a_bit_that_flips_anywhere_in_a_record_gives_out_nothing_of_it() -> None:
    first, second, _ = records()
    for at in range(len(second)):
        for bit in range(8):
            changed = bytearray(second)
            changed[at] ^= 1 << bit
            found, error = opened(first + changed + bytes(1 << 10))
            assert found == CONTENTS[:1] and error, (at, bit)


def test_who_can_compute_the_crc_of_a_length_gains_nothing() -> None:
    forged = Sealer(OTHER_KEY).seal(CONTENTS[0])
    assert forged[:START_BYTES] == records()[0][:START_BYTES], "these are no secret"
    assert opened(forged) == ([], "record: wrong authentication tag")
    assert opened(forged[:-TAG_BYTES] + bytes(TAG_BYTES)) == ([], "record: wrong authentication tag")


@pytest.mark.parametrize(
    ("order", "n_right"), [((0, 0), 1), ((1, 0), 0), ((0, 2), 1), ((0, 1, 0), 2), ((2,), 0)], ids=str
)
@pytest.mark.parametrize("has_crc", [True, False])
def test_a_record_that_is_repeated_left_out_or_moved_is_refused(
    order: tuple[int, ...], n_right: int, has_crc: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the tag alone: without the crc of its number."""
    if not has_crc:
        monkeypatch.setattr(sealing, "_crc", lambda length, number: 0)
    sealer = Sealer(KEY)
    made = [sealer.seal(bytes([number]) * 50) for number in range(3)]
    found, error = opened(b"".join(made[number] for number in order))
    assert found == [bytes([number]) * 50 for number in order[:n_right]]
    assert error == ("record: damaged, or not the next one" if has_crc else "record: wrong authentication tag")


def test_a_record_that_is_cut_is_waited_for_and_given_out_by_nobody() -> None:
    first, second, _ = records()
    for n_bytes in range(len(second)):
        assert opened(first + second[:n_bytes]) == (CONTENTS[:1], "")


def keys_of(nonce: bytes, answer: bytes, secret: bytes = SECRET) -> Keys:
    caller = Caller(secret, Hello(0, 1, 0, bytes(16), authenticate=True), nonce=nonce)
    listener = Listener(secret, nonce=answer)
    listener.take_proof(caller.take(listener.take_hello(caller.opening)))
    assert caller.keys is not None and caller.keys == listener.keys
    return caller.keys


def test_keys_are_of_the_secret_both_nonces_and_the_direction() -> None:
    found = [
        keys_of(b"a" * 32, b"b" * 32),
        keys_of(b"c" * 32, b"b" * 32),
        keys_of(b"a" * 32, b"c" * 32),
        keys_of(b"a" * 32, b"b" * 32, secret=bytes(32)),
    ]
    assert len({key for keys in found for key in keys}) == 8
    assert found[0] == keys_of(b"a" * 32, b"b" * 32)


def test_without_authentication_a_hello_is_what_it_was_and_has_no_keys() -> None:
    caller = Caller(SECRET, Hello(0, 1, 0, bytes(16)), nonce=bytes(32))
    assert caller.opening[8:10] == VERSION.to_bytes(2, "big")
    listener = Listener(SECRET, nonce=bytes(32))
    listener.take_proof(caller.take(listener.take_hello(caller.opening)))
    assert caller.keys is None and listener.keys is None


# --- endpoints --------------------------------------------------------------------------------------------------------


class Pair(Network):
    """Two ranks with a channel from 0 to 1, all rails up, and a message of this size that is to come."""

    def __init__(self, n_bytes: int = 5000) -> None:
        super().__init__(2, authenticate=True)
        (self.send,), (self.receive,) = self.open((0, 1))
        self.barrier()
        self.until(self.all_up)
        self.data = np.random.default_rng(n_bytes).integers(0, 256, n_bytes, np.uint8)
        self.slot = np.zeros(n_bytes, np.uint8)

    def post(self, *, tamper: Callable[[bytearray], None]) -> None:
        """The message is sent; what travels over either rail meanwhile is changed on its way."""
        self.post_recv(1, self.receive, self.slot)
        self.run(0.1)
        ends = [self.outbound(0, 1, rail) for rail in range(2)]
        for end in ends:
            self.freeze(end)
        self.post_send(0, self.send, self.data)
        self.asleep.add(1)
        self.settle()
        travelling = [end for end in ends if end.wire.on_its_way]
        assert travelling
        for end in travelling:
            tamper(end.wire.on_its_way)
        self.asleep.clear()
        for end in ends:
            self.thaw(end)

    @property
    def damaged(self) -> int:
        return sum(endpoint.counts.damaged for endpoint in self.endpoints)


def test_frames_travel_in_records_and_bytes_are_counted() -> None:
    pair = Pair()
    ends: list[Established] = [pair.outbound(0, 1, 0), pair.inbound(0, 1, 0)]
    assert [type(end) for end in ends] == [SealedSendConnection, SealedRecvConnection]
    seen: list[bytes] = []
    before = pair.endpoints[0].rail_counts[0].sent_bytes + pair.endpoints[0].rail_counts[1].sent_bytes
    pair.post(tamper=lambda way: seen.append(bytes(way)))
    counts = pair.endpoints[0].rail_counts
    assert sum(map(len, seen)) <= counts[0].sent_bytes + counts[1].sent_bytes - before
    assert sum(map(len, seen)) >= len(pair.data) + SEAL_BYTES
    assert (RECEIVED, pair.receive) in pair.poll(1) and np.array_equal(pair.slot, pair.data)
    pair.until(lambda: (SENT, pair.send) in pair.poll(0))
    assert not pair.damaged


def flip(way: bytearray) -> None:
    way[len(way) // 2] ^= 1


def repeat(way: bytearray) -> None:
    way += bytes(way)


def cut(way: bytearray) -> None:
    del way[len(way) // 2 : len(way) // 2 + 100]


@pytest.mark.parametrize("n_bytes", [5000, 300_000])
@pytest.mark.parametrize("tamper", [flip, repeat, cut], ids=lambda each: each.__name__)
def test_what_is_changed_on_its_way_breaks_the_connection_and_is_sent_again(
    n_bytes: int, tamper: Callable[[bytearray], None]
) -> None:
    pair = Pair(n_bytes)
    pair.post(tamper=tamper)
    assert tamper is repeat or not np.any(pair.slot), "nothing was read before"
    found: list[tuple[object, int]] = []

    def has_come() -> bool:
        found.extend(pair.poll(1))
        return (RECEIVED, pair.receive) in found

    pair.until(has_come)
    pair.run(0.5)
    assert np.array_equal(pair.slot, pair.data) and found.count((RECEIVED, pair.receive)) == 1
    assert pair.damaged > 0 and pair.endpoints[0].failure is None and pair.endpoints[1].failure is None


def test_what_a_rank_has_sent_is_not_taken_when_it_is_reflected() -> None:
    pair = Pair()
    connection = pair.outbound(0, 1, 0)
    pair.freeze(connection)
    connection.say(7, 0)
    pair.endpoints[0].wake(connection)
    pair.asleep.add(1)
    pair.settle()
    sent = bytes(connection.wire.on_its_way)
    assert sent
    pair.endpoints[0].received(connection, sent)
    assert connection.is_closed and pair.endpoints[0].counts.damaged == 1 and not connection.words


def test_ranks_that_are_set_up_differently_are_one_named_error_and_no_downgrade() -> None:
    network = Network(2)
    network.endpoints[1] = Network(2, authenticate=True).endpoints[1]
    network.open((0, 1), (1, 0))
    network.run(0.5)
    for rank, peer, theirs in ((0, 1, True), (1, 0, False)):
        error = network.endpoints[rank].failure
        assert isinstance(error, MismatchError)
        assert str(error) == f"rank {peer} differs from rank {rank}: authenticate {theirs} instead of {not theirs}"
    assert not any(isinstance(each, RecvConnection) for endpoint in network.endpoints for each in endpoint.up)


@pytest.mark.parametrize("authenticate", [False, True])
def test_who_flips_the_bit_of_a_hello_convinces_neither_end(authenticate: bool) -> None:
    network = Network(2, authenticate=authenticate)
    caller, listener = network.endpoints
    caller.outbound(1)
    caller.tick()
    dialing = caller.outbounds[1].rails[0].dialing
    assert dialing is not None
    opening = bytearray(caller.connected(dialing))
    opening[8] ^= 0x80
    accepting = listener.accepted(0)
    answer, _ = listener.received_hello(accepting, bytes(opening))
    proof, connection = caller.received_hello(dialing, answer)
    assert dialing.is_closed and not proof and connection is None
    assert listener.failure is None, "an unproved hello fails nobody"


def test_a_bye_and_the_last_states_are_read_from_records() -> None:
    pair = Pair()
    pair.post(tamper=lambda _: None)
    pair.poll(1)
    pair.leave(1)
    pair.until(lambda: (SENT, pair.send) in pair.poll(0))
    assert pair.endpoints[0].left == {1: False} and not pair.damaged


def test_without_authentication_connections_are_those_that_they_were() -> None:
    network = Network(2)
    network.open((0, 1))
    network.barrier()
    network.until(network.all_up)
    assert type(network.outbound(0, 1, 0)) is SendConnection and type(network.inbound(0, 1, 0)) is RecvConnection


# --- the simulated network --------------------------------------------------------------------------------------------


class Tampered(SimNetwork):
    """Of the segments with more than a few frames one of twenty is changed on its way, until `n_left` were."""

    n_left = 40

    def __init__(self, tamper: str, seed: int) -> None:
        super().__init__(4, authenticate=True, chunk_bytes=8192, seed=seed)
        rng, kept, carry = random.Random(seed), list[bytes](), self.network.carry

        def carried(flow: Flow, start: int, data: bytes, *, is_fin: bool = False) -> None:
            same = [each for each in kept if len(each) == len(data) and each != data]
            if len(data) > 200 and self.n_left and rng.random() < 0.05:
                changed = {
                    "repeated": lambda: same[-1] if same else data,
                    "reordered": lambda: data[len(data) // 2 :] + data[: len(data) // 2],
                    "forged": lambda: data[:-20] + rng.randbytes(20),
                }[tamper]()
                self.n_left -= changed != data
                data = changed
            elif len(data) > 200:
                kept.append(data)
            carry(flow, start, data, is_fin=is_fin)

        self.network.carry = carried  # type: ignore[method-assign]


@pytest.mark.parametrize("tamper", ["repeated", "reordered", "forged"])
@pytest.mark.parametrize("seed", [1, 2])
def test_bytes_that_are_replayed_reordered_or_forged_in_the_network_change_no_bit(tamper: str, seed: int) -> None:
    plan, verdict = plan_of("ring", 60_001, "float32")
    network = Tampered(tamper, seed)
    got = run_sim(network, lambda _, transport: reduce_over(transport, plan, verdict, 3))
    assert got == without_faults("ring", 60_001, "float32", 3)
    assert network.n_left < 40 and sum(host.endpoint.counts.damaged for host in network.hosts) > 0


@pytest.mark.parametrize("seed", range(5))
def test_flipped_bits_in_the_network_change_no_bit(seed: int) -> None:
    plan, verdict = plan_of("ring", 60_001, "float32")
    network = SimNetwork(4, authenticate=True, corrupt=0.01, loss=0.01, chunk_bytes=8192, seed=seed)
    got = run_sim(network, lambda _, transport: reduce_over(transport, plan, verdict, 3))
    assert got == without_faults("ring", 60_001, "float32", 3)
    assert network.network.n_corrupted > 0
    assert sum(host.endpoint.counts.damaged for host in network.hosts) > 0
