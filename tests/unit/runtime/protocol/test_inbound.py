"""The receiving end of a direction: chunks over two rails, short frames in any parts, chunks before their slots."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from optcc.errors import MismatchError
from optcc.runtime.protocol.frames import (
    EAGER_BYTES,
    EARLY_CHUNKS_MAX,
    HEADER_BYTES,
    STATE_FRAME,
    change_header,
    data_header,
    data_state_header,
    decode,
    state_header,
)
from tests.unit.runtime.protocol.network import SESSION, TwoRails


def test_a_second_copy_that_breaks_off_takes_nothing_from_the_first() -> None:
    rails = TwoRails()
    frame = rails.frame(bytes(range(100)))
    rails.send(0, frame[:70])
    rails.send(1, frame[:50])
    rails.endpoint.broken(rails.connections[1], "closed by the other end")
    assert rails.inbound.connections == [rails.connections[0], None]
    assert rails.channel.receiver.delivered == 0
    rails.send(0, frame[70:])
    assert rails.channel.receiver.delivered == 1 and rails.slot.tolist() == list(range(100))


def test_a_first_copy_that_breaks_off_leaves_the_slot_to_the_second() -> None:
    rails = TwoRails()
    frame = rails.frame(bytes(range(100)))
    rails.send(0, frame[:70])
    rails.send(1, frame[:50])
    rails.endpoint.broken(rails.connections[0], "closed by the other end")
    assert rails.channel.receiver.delivered == 0
    rails.send(1, frame[50:])
    assert rails.channel.receiver.delivered == 1 and rails.slot.tolist() == list(range(100))


def test_a_damaged_chunk_of_a_former_epoch_gives_its_slot_to_the_next_copy() -> None:
    """Over the same connection: the copy of the new epoch goes into the slot, and not beside it."""
    rails, data = TwoRails(crc=True), bytes(range(100))
    frame = rails.frame(data)
    rails.send(0, frame[:70])
    rails.send(1, change_header(SESSION, 1, 0))
    rails.send(0, b"?" * len(frame[70:]))
    assert rails.inbound.connections == rails.connections and not rails.channel.arriving
    rails.send(0, (data_header(SESSION, 1, 0, 0, 100, zlib.crc32(data)) + data)[:90])
    assert list(rails.channel.arriving) == [0]
    rails.send(0, data[90 - HEADER_BYTES :])
    assert rails.channel.receiver.delivered == 1 and rails.slot.tobytes() == data


@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_a_slot_that_was_reported_is_never_written_again(first: int, crc: bool) -> None:
    rails = TwoRails(crc=crc)
    frame = rails.frame(bytes(range(100)))
    rails.send(0, frame[:70])
    rails.send(1, frame[:50])
    rails.send(first, frame[(70, 50)[first] :])
    assert rails.channel.receiver.delivered == 1 and rails.slot.tolist() == list(range(100))
    rails.slot[:] = 0
    # The sender has its bytes back by now, and what still comes of the other copy is something else.
    rails.send(1 - first, b"?" * len(frame[(50, 70)[first] :]))
    assert not rails.slot.any() and rails.inbound.connections == rails.connections
    rails.send(1 - first, frame)
    counts = rails.endpoint.counts
    assert counts.suppressed == 1 and not rails.slot.any() and counts.damaged == 0


def test_a_copy_that_comes_whole_turns_away_one_that_is_coming() -> None:
    rails = TwoRails()
    frame = rails.frame(bytes(range(100)))
    rails.send(0, frame[:70])
    rails.send(1, frame)
    assert rails.channel.receiver.delivered == 1 and rails.slot.tolist() == list(range(100))
    rails.slot[:] = 0
    rails.send(0, b"?" * len(frame[70:]))
    assert not rails.slot.any() and rails.inbound.connections == rails.connections


def test_a_short_chunk_that_is_damaged_is_not_taken() -> None:
    rails = TwoRails(crc=True)
    frame = rails.frame(bytes(range(100)))
    rails.send(0, frame[:-1] + b"?")
    assert rails.inbound.connections == [None, rails.connections[1]] and rails.endpoint.counts.damaged == 1
    assert rails.channel.receiver.delivered == 0
    rails.send(1, frame)
    assert rails.channel.receiver.delivered == 1 and rails.slot.tolist() == list(range(100))


def test_an_early_chunk_that_is_not_next_finds_its_slot() -> None:
    """The second of two short messages comes first, over another rail, before either has a slot but the first."""
    rails = TwoRails()
    first, second = bytes(range(100)), bytes(range(100, 200))
    rails.send(1, rails.frame(second, 1))
    other = np.zeros(100, np.uint8)
    # As the endpoint posts: at once if that is possible.
    assert not rails.inbound.post_eager(rails.channel, other.data)
    rails.inbound.post(rails.channel, other.data)
    rails.send(0, rails.frame(first, 0))
    assert (rails.slot.tobytes(), other.tobytes()) == (first, second)
    assert rails.channel.receiver.delivered == 2 and not rails.channel.early


def test_short_frames_may_come_in_any_parts() -> None:
    """States and chunks, byte by byte, all at once, and with one byte of the next header."""
    for step in (1, 7, 35, 36, 37, 59, 60, 61, 150, 1000):
        rails = TwoRails()
        slots = [rails.slot, *(np.zeros(100, np.uint8) for _ in range(7))]
        for slot in slots[1:]:
            assert rails.inbound.post_eager(rails.channel, slot.data)
        out = rails.endpoint.outbound(0)
        stream = b""
        for n in range(len(slots)):
            if n % 3 == 1:
                stream += data_state_header(SESSION, 0, 0, n, 100, None, (0, 0, 0, n + 1))
            else:
                stream += state_header(SESSION, 0, 0, 0, n + 1) + data_header(SESSION, 0, 0, n, 100, None)
            stream += bytes([n] * 100)
        for at in range(0, len(stream), step):
            rails.send(0, stream[at : at + step])
        assert [slot.tolist() for slot in slots] == [[n] * 100 for n in range(len(slots))], step
        assert out.channel(0).slots == len(slots) and rails.channel.receiver.delivered == len(slots)
        assert rails.endpoint.counts.damaged == 0 and None not in rails.inbound.connections


def test_in_the_middle_of_a_chunk_nobody_is_woken_for_little() -> None:
    rails = TwoRails()
    frame = rails.frame(bytes(range(100)))
    assert rails.connections[0].low_water == 1
    rails.send(0, frame[:70])
    assert rails.connections[0].low_water == len(frame) - 70
    rails.send(0, frame[70:])
    assert rails.connections[0].low_water == 1
    assert rails.slot.tolist() == list(range(100))


def test_a_chunk_that_does_not_fit_its_slot_is_a_named_error() -> None:
    rails = TwoRails()
    rails.send(0, rails.frame(bytes(99)))
    assert isinstance(rails.endpoint.failure, MismatchError)
    assert str(rails.endpoint.failure) == "channel 0->1: 99 B sent, 100 B expected"
    assert rails.inbound.connections == [None, rails.connections[1]]


@pytest.mark.parametrize("is_eager", [False, True])
def test_an_early_chunk_that_does_not_fit_its_slot_is_a_named_error(is_eager: bool) -> None:
    rails = TwoRails()
    rails.send(0, rails.frame(bytes(100), 0) + rails.frame(bytes(7), 1))
    slot = np.zeros(8, np.uint8)
    if is_eager:
        assert not rails.inbound.post_eager(rails.channel, slot.data)
    rails.inbound.post(rails.channel, slot.data)
    assert isinstance(rails.endpoint.failure, MismatchError)
    assert str(rails.endpoint.failure) == "channel 0->1: 7 B sent, 8 B expected"


@pytest.mark.parametrize(
    ("number", "length", "is_taken"),
    [(EARLY_CHUNKS_MAX - 1, 8, True), (EARLY_CHUNKS_MAX + 1, 8, False), (1, EAGER_BYTES + 1, False)],
)
def test_only_a_few_short_chunks_may_come_before_their_slots(number: int, length: int, is_taken: bool) -> None:
    rails = TwoRails()
    rails.send(0, data_header(SESSION, 0, 0, number, length, None) + bytes(8))
    assert (rails.inbound.connections[0] is not None) == is_taken == (number in rails.channel.early)
    assert rails.endpoint.counts.damaged == (not is_taken)


@pytest.mark.parametrize(
    "frame",
    [
        data_header(SESSION, 0, 0, 1, 2**32 - 1, None),
        data_header(SESSION, 0, 5000, 0, 8, None),
        data_header(SESSION, 0, 1 << 31, 2**40, 2**32 - 1, None)[:-1] + b"?",
        state_header(SESSION, 0, 1 << 30, 0, 0),
        data_header(SESSION + 1, 0, 0, 0, 8, None),
        bytes(range(256)),
    ],
    ids=["length", "channel", "damage", "state", "session", "garbage"],
)
def test_a_member_that_announces_nonsense_is_cut_off(frame: bytes) -> None:
    """Even who knows the secret gets no memory: lengths and channels are those of the plan."""
    rails = TwoRails()
    rails.send(0, frame)
    assert rails.inbound.connections == [None, rails.connections[1]] and rails.endpoint.counts.damaged == 1
    assert rails.connections[0] in rails.endpoint.to_close
    assert rails.channel.receiver.delivered == 0 and not rails.channel.early


def test_a_connection_that_replaces_another_is_told_all_states() -> None:
    rails = TwoRails()
    rails.send(0, rails.frame(bytes(100)))
    rails.endpoint.reports.release_all()
    rails.written()
    former = rails.connections[0]
    replacement = type(former)(0, 0, SESSION, rails.endpoint.rail_counts[0], None, rails.inbound)
    rails.inbound.joined(replacement)
    assert rails.inbound.connections == [replacement, rails.connections[1]] and former.is_closed
    written = rails.written()
    headers = [decode(written, SESSION, at) for at in range(0, len(written), HEADER_BYTES)]
    assert (STATE_FRAME, 0, 0, 0, 1, 1, 0) in headers
