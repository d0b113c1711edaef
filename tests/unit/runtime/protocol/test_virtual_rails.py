"""The sending end of a pair and the virtual rails of its channels: what is posted goes out over any rail that is up.

No time passes and nobody answers but the test: it reads the frames that an `Outbound` writes, and is the receiver.
"""

from __future__ import annotations

import random

import pytest

from optcc.failover import CHANGE, DATA, NOWHERE, OFFER, RECEIVER_ROWS, Event, step
from optcc.runtime.protocol.connection import Broken, SendConnection
from optcc.runtime.protocol.frames import CHANGE_FRAME, DATA_FRAME, HEADER_BYTES, decode
from optcc.runtime.protocol.handshake import Dialing
from optcc.runtime.protocol.hello import Caller, Hello
from tests.unit.runtime.protocol.network import endpoint_of

MESSAGE_BYTES = 1 << 15
WINDOW = 6


class SendingEnd:
    """Channel 0 from rank 0 to rank 1, over rails that the test joins and loses; `receiver` is the other end."""

    def __init__(self, n_rails: int, *, replan: bool = False) -> None:
        self.endpoint = endpoint_of(0, 2, n_rails, window=WINDOW, replan=replan, silent_s=1.0)
        self.endpoint.now_s = 1.0
        self.out = self.endpoint.outbound(1)
        self.link = self.out._link
        self.data: dict[int, bytearray] = {}
        self.session = 0
        for rail in range(n_rails):
            self.join(rail)
        self.channel = self.out.channel(0)
        self.receiver = self.link.receiver()

    def flush(self) -> None:
        """What the endpoint has to write is on its way."""
        while (connection := self.endpoint.next_to_write()) is not None:
            assert isinstance(connection, SendConnection)
            while views := connection.views():
                data = b"".join(map(bytes, views))
                self.data[connection.rail] += data
                connection.written(len(data))

    def connection(self, rail: int) -> SendConnection:
        connection = self.out.rails[rail].connection
        assert connection is not None
        return connection

    def dial(self, rail: int) -> Dialing:
        caller = Caller(bytes(32), Hello(0, 1, rail, bytes(16)), nonce=bytes(32))
        dialing = Dialing(1, rail, self.out.rails[rail].mine, self.out.rails[rail].address, [caller])
        self.out.rails[rail].dialing = dialing
        return dialing

    def join(self, rail: int) -> None:
        """A rail's connection is there."""
        self.data[rail] = bytearray()
        self.session += 1
        dialing = self.dial(rail)
        dialing.established, dialing.session = True, self.session
        self.out.joined(dialing, b"")
        self.flush()

    def connect(self, rail: int) -> None:
        """A rail's connection is there but for the handshake."""
        dialing = self.dial(rail)
        assert self.endpoint.connected(dialing) == dialing.opening and dialing.established

    def lose(self, rail: int) -> None:
        """A rail's connection is given up; what is on it never comes."""
        self.out.lose(self.connection(rail), Broken("a test"))
        self.flush()

    def doubt(self, rail: int) -> None:
        """The other end begins or ceases to suspect a rail's connection."""
        connection = self.connection(rail)
        if self.endpoint.suspicion.hear(connection, connection.doubts_heard + 1):
            self.out.update_avoided()
        self.flush()

    def post(self, n_bytes: int = MESSAGE_BYTES) -> None:
        """One more message, at both ends."""
        self.out.post(self.channel, memoryview(bytearray(n_bytes)))
        while self.receiver.offered < self.channel.posted:
            self.receiver, _ = step(RECEIVER_ROWS, self.link, self.receiver, Event(OFFER))
        self.flush()

    def arrive(self, rail: int, *, vanishes: bool = False) -> int:
        """What is on a rail arrives, or vanishes; how many chunks and proposals that were."""
        data, n_frames = self.data[rail], 0
        while len(data) >= HEADER_BYTES:
            kind, _, epoch, _, number, length, _ = decode(data, self.connection(rail).session)
            n_bytes = HEADER_BYTES + (length if kind == DATA_FRAME else 0)
            assert len(data) >= n_bytes
            del data[:n_bytes]
            if kind not in (DATA_FRAME, CHANGE_FRAME):
                continue
            n_frames += 1
            if not vanishes:
                event = Event(DATA if kind == DATA_FRAME else CHANGE, 0, epoch, number)
                self.receiver, _ = step(RECEIVER_ROWS, self.link, self.receiver, event)
        return n_frames

    def answer(self) -> None:
        """The receiver's state arrives."""
        receiver = self.receiver
        self.out.take_state(0, receiver.epoch, receiver.delivered, receiver.offered)
        self.flush()

    def ring(self) -> None:
        """The retransmission timer fires."""
        self.endpoint.now_s += self.channel.timeout_s
        self.out._send_late_again()
        self.flush()

    def check(self) -> None:
        """The table knows of each virtual rail whether the rail that it stands for is used, and none is missed."""
        sender, rails = self.channel.sender, self.channel.rails
        used = [self.out._is_used(rail) for rail in rails]
        assert [bool(sender.up >> virtual & 1) for virtual in range(len(rails))] == used
        if any(map(self.out._is_used, range(len(self.out.rails)))):
            assert not sender.stalled
            if sender.changing:
                assert sender.asked != NOWHERE
            else:
                assert NOWHERE not in sender.out


@pytest.mark.parametrize("is_back", [False, True])
def test_a_rail_that_is_back_carries_what_was_out_on_the_one_that_stood_in_for_it(is_back: bool) -> None:
    """While rail 0 is gone all virtual rails stand for rail 1; then that fails too, before or after 0 is back."""
    end = SendingEnd(2)
    end.lose(0)
    for _ in range(end.link.n_rails):
        end.post()
        end.answer()
        end.arrive(1)
        end.answer()
    assert set(end.channel.rails) == {1} and not end.channel.chunks
    end.post()
    end.answer()
    assert len(end.channel.sender.out) == 2
    if is_back:
        end.join(0)
    end.lose(1)
    if not is_back:
        assert end.channel.sender.stalled
        end.join(0)
    assert end.arrive(0) == 2
    end.answer()
    assert not end.channel.chunks


@pytest.mark.parametrize("rails", [[1] * 16, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 0, 1, 2, 2]])
def test_what_has_waited_long_goes_out_over_one_rail_after_the_other(rails: list[int]) -> None:
    """Also where the table's next rail stands for the same one."""
    end = SendingEnd(3)
    end.channel.rails = list(rails)
    end.post(1 << 14)
    end.answer()
    (virtual,) = end.channel.sender.out
    first = end.channel.rails[virtual]
    assert [end.arrive(rail) for rail in range(3)] == [rail == first for rail in range(3)]
    for later in (1, 2, 3, 4):
        end.ring()
        assert [end.arrive(rail) for rail in range(3)] == [rail == (first + later) % 3 for rail in range(3)]
        end.check()


def test_a_proposal_goes_out_again_if_its_rail_is_lost() -> None:
    """Though a chunk that comes later would go over another rail by the proposal's virtual rail."""
    end = SendingEnd(2, replan=True)
    for _ in range(end.link.n_rails):
        end.post(1 << 14)
        end.answer()
        assert end.arrive(0) + end.arrive(1) == 1
        end.answer()
    end.lose(1)
    end.join(1)
    sender = end.channel.sender
    assert sender.changing and end.channel.rails[sender.asked] == 0
    end.post()
    end.answer()
    end.lose(0)
    assert end.arrive(1) == 1 and end.receiver.epoch == 1
    end.check()


def test_how_long_a_connect_takes_is_measured_without_the_handshake() -> None:
    """The other kernel answers the one, its rank the other, which may be busy; and the least counts."""
    end = SendingEnd(1)
    rail = end.out.rails[0]
    for connect_s, least_s in ((0.25, 0.25), (0.125, 0.125), (0.4, 0.125)):
        end.lose(0)
        rail.since_s = end.endpoint.now_s
        end.endpoint.now_s += connect_s
        end.connect(0)
        end.endpoint.now_s += 1.0
        end.join(0)
        assert rail.connected_in_s == pytest.approx(least_s)


def exercise(seed: int) -> set[str]:
    """Random events at the sending end, the table checked after each; then one rail carries the rest: the others are
    gone, or what goes there vanishes, and the timer rings. Which events happened.
    """
    draw = random.Random(seed)
    n_rails = draw.randrange(2, 5)
    end = SendingEnd(n_rails, replan=seed % 3 == 0)
    done: set[str] = set()
    weights = {"post": 3, "lose": draw.choice((0.2, 1)), "join": draw.choice((0.1, 0.5)), "doubt": 0.5, "arrive": 4}
    weights |= {"answer": 4, "ring": 0.2, "parts": 0.1}
    for _ in range(200):
        (what,) = draw.choices(list(weights), list(weights.values()))
        joined = [rail for rail in range(n_rails) if end.out.rails[rail].connection is not None]
        missing = [rail for rail in range(n_rails) if rail not in joined]
        if what == "post" and len(end.channel.chunks) < 40:
            end.post()
        elif what in ("lose", "doubt", "arrive") and joined:
            getattr(end, what)(draw.choice(joined))
        elif what == "join" and missing:
            end.join(draw.choice(missing))
        elif what == "parts":
            end.out.take_parts(draw.choice((None, [draw.random() + 0.01 for _ in range(n_rails)])))
            end.flush()
        elif what in ("answer", "ring"):
            getattr(end, what)()
        else:
            continue
        done.add(what)
        end.check()
    last, is_noticed = draw.randrange(n_rails), seed % 2 == 0
    if end.out.rails[last].connection is None:
        end.join(last)
    if end.connection(last).doubt:
        end.doubt(last)
    others = [rail for rail in range(n_rails) if rail != last and end.out.rails[rail].connection is not None]
    for rail in others if is_noticed else ():
        end.lose(rail)
    for _ in range(400):
        if not end.channel.chunks:
            break
        end.answer()
        n_frames = end.arrive(last)
        for rail in others if not is_noticed else ():
            n_frames += end.arrive(rail, vanishes=True)
        if not is_noticed and not n_frames:
            end.ring()
        end.check()
    assert not end.channel.chunks, f"seed {seed}: {end.channel.sender}, rails {end.channel.rails}"
    assert end.receiver.delivered == end.channel.posted
    return done


@pytest.mark.parametrize("start", range(0, 400, 100))
def test_whatever_happens_the_last_rail_carries_the_rest(start: int) -> None:
    done = [exercise(seed) for seed in range(start, start + 100)]
    assert set().union(*done) == {"post", "lose", "join", "doubt", "arrive", "answer", "ring", "parts"}
