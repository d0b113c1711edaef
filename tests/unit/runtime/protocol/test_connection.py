"""The two ends of an established connection: what goes out in which order, and what belongs to the other direction."""

from __future__ import annotations

import random

import pytest

from optcc.runtime.protocol.connection import Broken, RecvConnection, SendConnection
from optcc.runtime.protocol.frames import (
    BYE_FRAME,
    EAGER_BYTES,
    FAILED,
    HEADER_BYTES,
    PROBE_FRAME,
    bye_header,
    change_header,
    control_header,
    data_header,
    data_state_header,
    decode,
    state_header,
)
from optcc.runtime.protocol.settings import RailCount
from tests.unit.runtime.protocol.network import SESSION, TwoRails, fill


class Channel:
    """The sending end of a channel that has chunks up to `stale` acknowledged."""

    def __init__(self, k: int, stale: int = 0) -> None:
        self.k, self.stale = k, stale

    def is_stale(self, number: int, epoch: int) -> bool:
        return number < self.stale or epoch != 0


def send_connection() -> SendConnection:
    return SendConnection(0, 0, SESSION, RailCount("r0"), None)


def test_a_frame_that_belongs_to_the_other_direction_ends_the_connection() -> None:
    connection = send_connection()
    with pytest.raises(Broken, match="to a sender"):
        connection.received(data_header(SESSION, 0, 0, 0, 4, None))
    rails = TwoRails()
    receiving = rails.connections[0]
    frame = state_header(SESSION, 0, 1 << 30, 0, 0)
    receiving.buffers()[0][: len(frame)] = frame
    with pytest.raises(Broken, match="state of channel"):
        receiving.received(len(frame))


def test_states_come_in_any_parts_and_control_frames_are_collected() -> None:
    stream = state_header(SESSION, 1, 2, 3, 4) + control_header(SESSION, PROBE_FRAME, 5) + bye_header(SESSION, True)
    for step in (1, 35, 36, 37, len(stream)):
        connection = send_connection()
        states = [state for at in range(0, len(stream), step) for state in connection.received(stream[at : at + step])]
        assert states == [(2, 1, 3, 4)] and connection.words == [(PROBE_FRAME, 5)] and connection.left is True


@pytest.mark.parametrize("seed", range(8))
def test_what_is_queued_goes_out_in_order_in_whatever_parts_the_socket_takes(seed: int) -> None:
    rng = random.Random(seed)
    connection, wanted = send_connection(), b"proof"
    connection.put_frame(b"proof")
    connection.say(PROBE_FRAME, 9)
    wanted += control_header(SESSION, PROBE_FRAME, 9)
    for number in range(40):
        channel, view = Channel(number % 3), rng.randbytes(rng.choice((0, 1, 100, EAGER_BYTES, EAGER_BYTES + 1)))
        connection.put(channel, number, 0, memoryview(view))
        wanted += data_header(SESSION, 0, channel.k, number, len(view), None) + view
    connection.put(Channel(1, stale=7), 6, 0, memoryview(b"acknowledged"))
    connection.put(Channel(1), 6, 1, memoryview(b"of another epoch"))
    connection.put(Channel(5), 0, 3, None)
    wanted += change_header(SESSION, 3, 5)
    got, n_bytes = b"", 0
    while views := connection.views():
        data = b"".join(views)
        taken = rng.choice((0, 1, rng.randrange(len(data) + 1), len(data)))
        got += data[:taken]
        goes_on, is_blocked = connection.written(taken), taken < len(data)
        assert connection.blocked == is_blocked
        assert goes_on == (not is_blocked and not connection.is_idle())
        assert connection.bye(False) == (b"" if connection.blocked else bye_header(SESSION, False))
        n_bytes += taken
    assert got == wanted and connection._count.sent_bytes == n_bytes == len(wanted)
    assert connection.is_idle() and connection.awaits


def test_what_is_not_begun_can_be_taken_back() -> None:
    connection, channels = send_connection(), [Channel(0), Channel(1)]
    view = memoryview(bytes(1 << 19))
    for number in range(4):
        connection.put(channels[number % 2], number, 0, view)
    connection.views()
    connection.written(10)
    assert all(connection.holds(channel) for channel in channels)
    waiting = connection.take_back()
    assert [number for _, number, _, _ in waiting] == [1, 2, 3] and not connection.holds(channels[0])
    assert sum(map(len, connection.views())) == HEADER_BYTES + len(view) - 10, "the first one is on its way"


def test_only_eager_messages_carry_reports() -> None:
    connection = send_connection()
    assert not connection.can_carry_reports(), "nothing goes out"
    connection.put(Channel(0), 0, 0, memoryview(bytes(EAGER_BYTES)))
    assert connection.can_carry_reports()
    connection.put(Channel(0), 1, 0, memoryview(bytes(EAGER_BYTES + 1)))
    assert not connection.can_carry_reports()
    connection.take_back()
    connection.report(3, 0, 1, 2)
    connection.put_eager(4, 0, 0, b"abc", None)
    written = state_header(SESSION, 0, 3, 1, 2) + data_header(SESSION, 0, 4, 0, 3, None) + b"abc"
    assert b"".join(connection.views()) == written
    connection.written(len(written))
    connection.report(3, 0, 1, 2)
    connection.put_eager(4, 1, 0, b"abc", (5, 0, 7, 8))
    assert b"".join(connection.views()) == (
        state_header(SESSION, 0, 3, 1, 2) + data_state_header(SESSION, 0, 4, 1, 3, None, (5, 0, 7, 8)) + b"abc"
    )


def test_a_state_is_written_as_it_is_when_it_goes_out_and_a_half_written_one_is_finished() -> None:
    rails = TwoRails()
    connection: RecvConnection = rails.connections[0]
    connection.states[0] = None
    rails.channel.posted = 5
    assert connection.views() == (state_header(SESSION, 0, 0, 0, 5),) and rails.channel.told == 5
    assert not connection.written(10) and connection.blocked and connection.bye(True) == b""
    connection.states[0] = None
    rails.channel.posted = 6
    assert connection.views() == (state_header(SESSION, 0, 0, 0, 5)[10:],)
    assert connection.written(HEADER_BYTES - 10)
    assert connection.views() == (state_header(SESSION, 0, 0, 0, 6),)
    assert not connection.written(HEADER_BYTES) and not connection.views() and not connection.blocked
    assert decode(connection.bye(True), SESSION)[:2] == (BYE_FRAME, FAILED)


def test_after_bye_the_endpoint_knows_who_has_left_and_why() -> None:
    for failed in (False, True):
        rails = TwoRails()
        fill(rails.endpoint, rails.connections[1], bye_header(SESSION, failed))
        assert rails.endpoint.left == {0: failed}
