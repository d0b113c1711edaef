"""The routes of the TCP transport: all that goes from one rank to another, and the failover table that carries it.

`OutRoute` and `InRoute` are the two ends of a direction of a pair: its rails, its channels, and for each one end
of the table. They do what `optcc.failover.step` says; a rail of the table is a *turn* of a real one (`Stripes`).

The receiver tells the sender for how many chunks it has posted slots, and a chunk is offered to the table only then:
whatever arrives is read from the socket into the slot that waits for it, and neither end keeps bytes of its own. Only
if a chunk comes over a second rail while it is still coming over a first, it goes beside the slot, for either may break
off; the first that is whole counts, and the rest of the other is thrown away: a filled slot is never written again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from optcc.errors import InputError, MismatchError, RuntimeFault
from optcc.failover import (
    ACK,
    CHANGE,
    DATA,
    DELIVER,
    DOWN,
    FREE,
    OFFER,
    RECEIVER_ROWS,
    REPLAN,
    SEND,
    SENDER_ROWS,
    TIMEOUT,
    UP,
    Event,
    Link,
    Receiver,
    Sender,
    is_fresh,
    step,
)
from optcc.runtime.launch import Meeting, Nic
from optcc.runtime.transport import RECEIVED, SENT, Clock
from optcc.runtime.transport import Event as TransportEvent
from optcc.runtime.transports.tcp_rails import Broken, Dialing, Incoming, Line, Outgoing, RailCount, open_socket
from optcc.runtime.transports.tcp_wire import CHANNELS_MAX, EXCHANGE, Caller, Hello, Stripes, WireError

CHUNK_BYTES_MAX = 1 << 30
NONCE_BYTES = 32
_CONNECT_S = 2.0
_REDIAL_S_MIN = 0.01
_REDIAL_S_MAX = 1.0
_TIMEOUT_S = 5.0
_TIMEOUT_S_MAX = 60.0


NicEntry = tuple[str, str, int, int, int]
"""A NIC as the ranks tell each other: name, address, port, rate out, rate in (bytes/s)."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a rank is set up; see `optcc.runtime.transports.tcp.TcpTransport`."""

    chunk_bytes: int
    window: int
    crc: bool
    replan: bool
    buffer_bytes: int
    silent_s: float
    stall_s: float
    hello_s: float

    def __post_init__(self) -> None:
        if not 1 <= self.chunk_bytes <= CHUNK_BYTES_MAX:
            raise InputError(f"chunks of {self.chunk_bytes} B: must be from 1 B to 1 GiB")
        Link(1, self.window)
        for name in ("silent_s", "stall_s", "hello_s"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} {getattr(self, name)}: must be above 0")
        if self.buffer_bytes < 0:
            raise InputError(f"buffers of {self.buffer_bytes} B: must not be negative")


@dataclass(slots=True)
class Counts:
    """What has happened: chunks sent again, chunks that came twice or too late, damaged connections, refused callers,
    changes of plan."""

    resent: int = 0
    suppressed: int = 0
    damaged: int = 0
    refused: int = 0
    changes: int = 0


class Hub:
    """What the routes of one rank share: how the rank is set up, what has happened, and what is to be written.

    `left` says of each rank that has said bye whether it did so because of a failure; `failure` ends every wait.
    """

    def __init__(self, settings: Settings, nics: Sequence[Nic], clock: Clock) -> None:
        self.settings, self.nics, self.clock = settings, tuple(nics), clock
        self.counts = Counts()
        self.rails = [RailCount(nic.name) for nic in nics]
        self.meeting = Meeting(-1, 0, b"", b"", ())
        self.book: list[Sequence[NicEntry]] = []
        self.outs: dict[int, OutRoute] = {}
        self.ins: dict[int, InRoute] = {}
        self.events: list[TransportEvent] = []
        self.left: dict[int, bool] = {}
        self.failure: RuntimeFault | None = None
        self.dirty_outs: dict[Outgoing, OutRoute] = {}
        self.dirty_ins: dict[Incoming, InRoute] = {}
        self.next_tick_s = 0.0
        self.selector = selectors.DefaultSelector()

    @property
    def rank(self) -> int:
        """This rank."""
        return self.meeting.rank

    def flush(self) -> None:
        """Writes what has been queued; what a broken connection leaves is queued elsewhere, and written too."""
        now_s = self.clock.now_s()
        while self.dirty_outs or self.dirty_ins:
            while self.dirty_outs:
                line, out = self.dirty_outs.popitem()
                try:
                    line.flush(now_s)
                    self.watch(line, partial(out.ready, line))
                except Broken as error:
                    out.lose(line, error)
            while self.dirty_ins:
                incoming, in_ = self.dirty_ins.popitem()
                try:
                    incoming.flush()
                    self.watch(incoming, partial(in_.ready, incoming))
                except Broken as error:
                    in_.lose(incoming, error)

    def watch(self, line: Outgoing | Incoming, ready: Callable[[int], None]) -> None:
        """Has the selector say when a full socket takes more."""
        if line.blocked != line.is_registered_for_writing:
            line.is_registered_for_writing = line.blocked
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.blocked else 0)
            self.selector.modify(line.sock, mask, ready)

    def drop(self, line: Line) -> None:
        """Closes a connection and forgets it."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(line.sock)
        line.close()

    def fail(self, failure: RuntimeFault) -> None:
        """Ends every wait of this rank; the first failure counts."""
        if self.failure is None:
            self.failure = failure

    def out(self, peer: int) -> OutRoute:
        """The route to a peer; a new one is dialled at the next look at the time."""
        if peer not in self.outs:
            self.outs[peer] = OutRoute(self, peer)
            self.next_tick_s = 0.0
        return self.outs[peer]

    def in_(self, peer: int) -> InRoute:
        """The route from a peer, which dials it."""
        if peer not in self.ins:
            self.ins[peer] = InRoute(self, peer)
        return self.ins[peer]

    def pairs(self, src: int, dst: int) -> list[tuple[int, int]]:
        """The NICs of `src` and `dst`, by number, that are joined by a rail: those of one name, or in their order."""
        names = {nic[0]: number for number, nic in enumerate(self.book[dst])}
        pairs = [(number, names[nic[0]]) for number, nic in enumerate(self.book[src]) if nic[0] in names]
        if not pairs:
            pairs = [(number, number) for number in range(min(len(self.book[src]), len(self.book[dst])))]
        return sorted(pairs, key=lambda pair: self.book[min(src, dst)][pair[src > dst]][0])

    def stripes(self, src: int, dst: int, pairs: Sequence[tuple[int, int]]) -> Stripes:
        """How messages from `src` to `dst` are striped: by what the NICs of each rail send and receive at most."""
        return Stripes.of([min(self.book[src][mine][3], self.book[dst][theirs][4]) for mine, theirs in pairs])


class SendChannel:
    """The sending end of a channel. `chunks` are those that the sender keeps, from `sender.acked` on, each with whether
    it is the last of its message; `posted` counts all, `slots` those for which the peer has posted slots."""

    __slots__ = ("chunks", "handle", "highest", "k", "n_sent", "posted", "sender", "since_s", "slots", "timeout_s")

    def __init__(self, k: int, link: Link) -> None:
        self.k, self.handle = k, -1
        self.sender: Sender = link.sender()
        self.chunks: deque[tuple[memoryview, bool]] = deque()
        self.posted = self.slots = self.highest = self.n_sent = 0
        self.since_s, self.timeout_s = 0.0, _TIMEOUT_S

    def is_stale(self, number: int, epoch: int) -> bool:
        """See `Owner`."""
        return number < self.sender.acked or epoch != self.sender.epoch


class RecvChannel:
    """The receiving end of a channel. `slots` are those that are not filled, from `receiver.delivered` on; `arriving`
    says over which connection a chunk is on its way into its slot."""

    __slots__ = ("arriving", "handle", "k", "n_received", "posted", "receiver", "slots")

    def __init__(self, k: int, link: Link) -> None:
        self.k, self.handle = k, -1
        self.receiver: Receiver = link.receiver()
        self.slots: deque[tuple[memoryview, bool]] = deque()
        self.arriving: dict[int, Incoming] = {}
        self.posted = self.n_received = 0

    def has_received(self, count: int) -> bool:
        """True once `count` messages have come in all."""
        return self.n_received >= count


class Rail:
    """One rail of a pair: the NICs at both ends, by number, and the connection that this rank opens over it."""

    __slots__ = ("address", "dialing", "line", "mine", "name", "next_s", "refused", "since_s", "wait_s")

    def __init__(self, name: str, mine: int, address: tuple[str, int]) -> None:
        self.name, self.mine, self.address = name, mine, address
        self.line: Outgoing | None = None
        self.dialing: Dialing | None = None
        self.next_s, self.wait_s, self.since_s = 0.0, _REDIAL_S_MIN, 0.0
        self.refused = False


class OutRoute:
    """All that goes from this rank to a peer: the rails, which it dials, and the sending ends of the channels."""

    def __init__(self, hub: Hub, peer: int) -> None:
        self._hub, self.peer = hub, peer
        me, book = hub.rank, hub.book
        pairs = hub.pairs(me, peer)
        self.rails = [
            Rail(book[me][mine][0], mine, (book[peer][theirs][1], book[peer][theirs][2])) for mine, theirs in pairs
        ]
        self._stripes = hub.stripes(me, peer, pairs)
        self._link = Link(len(self._stripes.turns), hub.settings.window)
        self._channels: dict[int, SendChannel] = {}
        # Watched seconds for which no rail has been joined: time in which nobody called `poll` does not count.
        self.dark_s = 0.0

    def channel(self, k: int) -> SendChannel:
        """The k-th channel to the peer; a new one knows which rails are down."""
        if k not in self._channels:
            channel = self._channels[k] = SendChannel(k, self._link)
            for turn, rail in enumerate(self._stripes.turns):
                if self.rails[rail].line is None:
                    self._at_sender(channel, Event(DOWN, turn))
        return self._channels[k]

    def post(self, channel: SendChannel, view: memoryview) -> None:
        """Queues a message."""
        hub = self._hub
        pieces = self._stripes.cut(len(view), channel.posted, hub.settings.chunk_bytes)
        for i, (start, end) in enumerate(pieces):
            channel.chunks.append((view[start:end], i == len(pieces) - 1))
        channel.posted += len(pieces)
        self._offer(channel)

    def has_work(self) -> bool:
        """True if something is posted and not taken."""
        return any(channel.chunks for channel in self._channels.values())

    def is_joined(self) -> bool:
        """True if the peer's kernel has answered on some rail and has not been given up since."""
        return any(
            rail.line is not None or (rail.dialing is not None and rail.dialing.established) for rail in self.rails
        )

    # --- the table

    def _offer(self, channel: SendChannel) -> None:
        """Offers the table what is posted at both ends."""
        while channel.sender.offered < min(channel.posted, channel.slots):
            self._at_sender(channel, Event(OFFER))

    def _at_sender(self, channel: SendChannel, event: Event) -> None:
        hub = self._hub
        # The timer runs from when something goes out, or is acknowledged.
        restarts = not channel.sender.out
        channel.sender, actions = step(SENDER_ROWS, self._link, channel.sender, event)
        sender = channel.sender
        for action in actions:
            if action.kind == FREE:
                restarts = True
                _, is_last = channel.chunks.popleft()
                if is_last:
                    channel.n_sent += 1
                    if channel.handle >= 0:
                        hub.events.append((SENT, channel.handle))
            elif action.kind == SEND:
                line = self.rails[self._stripes.turns[action.rail]].line
                if line is None:
                    # Another turn of a rail that is gone; the table hears of it next.
                    continue
                if action.message == DATA:
                    line.put(channel, action.number, action.epoch, channel.chunks[action.number - sender.acked][0])
                    if action.number < channel.highest:
                        hub.counts.resent += 1
                    else:
                        channel.highest = action.number + 1
                else:
                    line.put(channel, 0, action.epoch, None)
                hub.dirty_outs[line] = self
        if restarts:
            channel.since_s, channel.timeout_s = hub.clock.now_s(), _TIMEOUT_S

    # --- the rails

    def ready(self, line: Outgoing, mask: int) -> None:
        """The selector says that a connection can be read or written."""
        try:
            if mask & selectors.EVENT_READ:
                for k, epoch, number, slots in line.read():
                    if k != EXCHANGE and k >= CHANNELS_MAX:
                        raise Broken(f"state of channel {k}", is_damage=True)
                    channel = self.channel(k)
                    channel.slots = max(channel.slots, slots)
                    self._at_sender(channel, Event(ACK, line.rail, epoch, number))
                    self._offer(channel)
                if line.left is not None:
                    self._hub.left[self.peer] = line.left
            if mask & selectors.EVENT_WRITE:
                self._hub.dirty_outs[line] = self
        except Broken as error:
            self.lose(line, error)

    def lose(self, line: Outgoing, error: Broken) -> None:
        """A connection is of no more use: what was out on it goes out elsewhere, and the rail is dialled again."""
        hub = self._hub
        rail = self.rails[line.rail]
        hub.dirty_outs.pop(line, None)
        hub.drop(line)
        if rail.line is not line:
            return
        rail.line = None
        hub.counts.damaged += error.is_damage
        hub.rails[rail.mine].failures += self.peer not in hub.left
        self._dial_later(rail, False)
        for channel in list(self._channels.values()):
            self._tell(channel, line.rail, DOWN)
            if hub.settings.replan:
                self._at_sender(channel, Event(REPLAN))

    def _tell(self, channel: SendChannel, rail: int, kind: str) -> None:
        for turn, its_rail in enumerate(self._stripes.turns):
            if its_rail == rail:
                self._at_sender(channel, Event(kind, turn))

    def _dial_later(self, rail: Rail, refused: bool) -> None:
        """After a failure: the next try, at growing intervals."""
        now_s = self._hub.clock.now_s()
        rail.refused = refused
        rail.next_s = now_s + rail.wait_s
        rail.wait_s = min(2 * rail.wait_s, _REDIAL_S_MAX)
        self._hub.next_tick_s = 0.0

    def tick(self, now_s: float, elapsed_s: float) -> bool:
        """Dials, gives up what is silent, and sends again what has waited long; True if it wants to be called soon."""
        hub = self._hub
        is_gone = self.peer in hub.left
        self.dark_s = 0.0 if self.is_joined() else self.dark_s + elapsed_s
        for number, rail in enumerate(self.rails):
            line, dialing = rail.line, rail.dialing
            if line is not None:
                if line.is_silent(elapsed_s, hub.settings.silent_s):
                    self.lose(line, Broken("no answer"))
            elif dialing is not None:
                late = not dialing.established and now_s - rail.since_s > _CONNECT_S
                if late or dialing.is_silent(elapsed_s, hub.settings.silent_s):
                    self._hang_up(rail, dialing, False)
            elif now_s >= rail.next_s and not is_gone:
                self._dial(rail, number, now_s)
        for channel in self._channels.values():
            if (channel.sender.out or channel.sender.changing) and now_s - channel.since_s >= channel.timeout_s:
                channel.since_s = now_s
                # What still waits for a full socket is not lost, and must not be queued twice.
                if not any(rail.line is not None and rail.line.holds(channel) for rail in self.rails):
                    channel.timeout_s = min(2 * channel.timeout_s, _TIMEOUT_S_MAX)
                    self._at_sender(channel, Event(TIMEOUT))
        return not is_gone and any(rail.line is None for rail in self.rails)

    def _dial(self, rail: Rail, number: int, now_s: float) -> None:
        hub = self._hub
        meeting = hub.meeting
        rail.since_s = now_s
        try:
            sock = open_socket(hub.nics[rail.mine].address, hub.settings.buffer_bytes)
        except OSError:
            self._dial_later(rail, False)
            return
        hello = Hello(hub.rank, self.peer, number, meeting.job)
        caller = Caller(meeting.secret, hello, nonce=os.urandom(NONCE_BYTES))
        try:
            rail.dialing = Dialing(sock, rail.address, caller)
        except OSError as error:
            sock.close()
            self._dial_later(rail, error.errno == errno.ECONNREFUSED)
            return
        hub.selector.register(sock, selectors.EVENT_WRITE, partial(self._greet, rail, rail.dialing))

    def _greet(self, rail: Rail, dialing: Dialing, _: int) -> None:
        """The connection is there, or not; then the hello, then the rail is up."""
        hub = self._hub
        if rail.dialing is not dialing:
            return
        try:
            if not dialing.established:
                dialing.greet()
                hub.selector.modify(dialing.sock, selectors.EVENT_READ, partial(self._greet, rail, dialing))
                return
            session = dialing.advance()
        except (OSError, WireError) as error:
            self._hang_up(rail, dialing, isinstance(error, OSError) and error.errno == errno.ECONNREFUSED)
            return
        if session is None:
            return
        number = self.rails.index(rail)
        line = Outgoing(dialing.sock, number, session, hub.rails[rail.mine], hub.settings.crc)
        rail.dialing, rail.line, rail.refused, rail.wait_s = None, line, False, _REDIAL_S_MIN
        hub.selector.modify(line.sock, selectors.EVENT_READ, partial(self.ready, line))
        for channel in list(self._channels.values()):
            self._tell(channel, number, UP)

    def _hang_up(self, rail: Rail, dialing: Dialing, refused: bool) -> None:
        rail.dialing = None
        self._hub.drop(dialing)
        self._dial_later(rail, refused)


class InRoute:
    """All that comes from a peer: the connections that it has opened, and the receiving ends of the channels."""

    def __init__(self, hub: Hub, peer: int) -> None:
        self._hub, self.peer = hub, peer
        pairs = hub.pairs(peer, hub.rank)
        self.lines: list[Incoming | None] = [None] * len(pairs)
        self._stripes = hub.stripes(peer, hub.rank, pairs)
        self._link = Link(len(self._stripes.turns), hub.settings.window)
        self._channels: dict[int, RecvChannel] = {}

    def channel(self, k: int) -> RecvChannel:
        """The k-th channel from the peer; a new one knows which rails are down."""
        if k not in self._channels:
            channel = self._channels[k] = RecvChannel(k, self._link)
            for turn, rail in enumerate(self._stripes.turns):
                if self.lines[rail] is None:
                    self._at_receiver(channel, Event(DOWN, turn))
        return self._channels[k]

    def post(self, channel: RecvChannel, view: memoryview) -> None:
        """Queues the slots of a message, and tells the sender of them."""
        pieces = self._stripes.cut(len(view), channel.posted, self._hub.settings.chunk_bytes)
        for i, (start, end) in enumerate(pieces):
            channel.slots.append((view[start:end], i == len(pieces) - 1))
            self._at_receiver(channel, Event(OFFER))
        channel.posted += len(pieces)
        self._tell_slots(channel)

    def has_work(self) -> bool:
        """True if something is posted and has not come."""
        return any(channel.slots for channel in self._channels.values())

    def is_joined(self) -> bool:
        """True if a connection is there."""
        return any(line is not None for line in self.lines)

    def _tell_slots(self, channel: RecvChannel) -> None:
        """Over the rail whose turn it is, or the next that is up."""
        turns = self._stripes.turns
        turn = self._link.pick(channel.receiver.up, channel.receiver.delivered % len(turns))
        if turn >= 0:
            self._say(turn, channel)

    def _say(self, turn: int, channel: RecvChannel) -> None:
        line = self.lines[self._stripes.turns[turn]]
        if line is not None:
            line.tell(channel.k)
            self._hub.dirty_ins[line] = self

    # --- the table

    def _at_receiver(self, channel: RecvChannel, event: Event) -> None:
        hub = self._hub
        epoch = channel.receiver.epoch
        channel.receiver, actions = step(RECEIVER_ROWS, self._link, channel.receiver, event)
        for action in actions:
            # A chunk that is to be kept is in its slot already, and one that is to be forgotten may stay there.
            if action.kind == DELIVER:
                _, is_last = channel.slots.popleft()
                if is_last:
                    channel.n_received += 1
                    if channel.handle >= 0:
                        hub.events.append((RECEIVED, channel.handle))
            elif action.kind == SEND:
                self._say(action.rail, channel)
        hub.counts.changes += channel.receiver.epoch - epoch

    # --- Reader

    def begin(self, line: Incoming, epoch: int, channel: int, number: int, length: int) -> memoryview | None:
        """See `Reader`."""
        end = self._end(channel)
        event = Event(DATA, self._turn_of(line), epoch, number)
        if not is_fresh(self._link, end.receiver, event):
            self._hub.counts.suppressed += 1
            self._at_receiver(end, event)
            return None
        ahead = number - end.receiver.delivered
        if ahead >= len(end.slots):
            raise Broken(f"chunk {number} without a slot", is_damage=True)
        slot = end.slots[ahead][0]
        if len(slot) != length:
            what = f"channel {self.peer}->{self._hub.rank}: {length} B sent, {len(slot)} B expected"
            self._hub.fail(MismatchError(what))
            raise Broken(what, is_damage=True)
        if number in end.arriving:
            # It is also coming elsewhere, and either may break off: this one goes beside the slot.
            return memoryview(bytearray(length))
        end.arriving[number] = line
        return slot

    def wants(self, epoch: int, channel: int, number: int) -> bool:
        """See `Reader`."""
        return is_fresh(self._link, self._channels[channel].receiver, Event(DATA, 0, epoch, number))

    def complete(self, line: Incoming, epoch: int, channel: int, number: int, chunk: memoryview) -> None:
        """See `Reader`."""
        end = self._channels[channel]
        event = Event(DATA, self._turn_of(line), epoch, number)
        if end.arriving.get(number) is line:
            del end.arriving[number]
        elif is_fresh(self._link, end.receiver, event):
            other = end.arriving.pop(number, None)
            if other is not None:
                other.turn_away()
            end.slots[number - end.receiver.delivered][0][:] = chunk
        self._at_receiver(end, event)

    def change(self, line: Incoming, epoch: int, channel: int) -> None:
        """See `Reader`."""
        self._at_receiver(self._end(channel), Event(CHANGE, self._turn_of(line), epoch))

    def state_of(self, channel: int) -> tuple[int, int, int]:
        """See `Reader`."""
        end = self._channels[channel]
        return end.receiver.epoch, end.receiver.delivered, end.posted

    def _end(self, k: int) -> RecvChannel:
        if k not in self._channels:
            raise Broken(f"channel {k} is not open", is_damage=True)
        return self._channels[k]

    def _turn_of(self, line: Incoming) -> int:
        return self._stripes.turns.index(line.rail)

    # --- the rails

    def take(self, line: Incoming) -> None:
        """A rail is up: a new connection, which takes the place of a former one that this end still holds."""
        former = self.lines[line.rail]
        if former is not None:
            self.lose(former, Broken("replaced"))
        self.lines[line.rail] = line
        for channel in list(self._channels.values()):
            for turn, rail in enumerate(self._stripes.turns):
                if rail == line.rail:
                    self._at_receiver(channel, Event(UP, turn))
            if channel.posted:
                self._say(self._turn_of(line), channel)

    def ready(self, line: Incoming, mask: int) -> None:
        """The selector says that a connection can be read or written."""
        try:
            if mask & selectors.EVENT_READ:
                line.read()
            if mask & selectors.EVENT_WRITE:
                self._hub.dirty_ins[line] = self
            if line.left is not None:
                self._hub.left[self.peer] = line.left
        except Broken as error:
            if line.left is not None:
                self._hub.left[self.peer] = line.left
            self.lose(line, error)

    def lose(self, line: Incoming, error: Broken) -> None:
        """A connection is of no more use. The peer dials again if it is there; if no rail is left, this end looks."""
        hub = self._hub
        hub.dirty_ins.pop(line, None)
        hub.drop(line)
        if self.lines[line.rail] is not line:
            return
        self.lines[line.rail] = None
        hub.counts.damaged += error.is_damage
        for channel in list(self._channels.values()):
            for number in [number for number, its_line in channel.arriving.items() if its_line is line]:
                del channel.arriving[number]
            for turn, rail in enumerate(self._stripes.turns):
                if rail == line.rail:
                    self._at_receiver(channel, Event(DOWN, turn))
            self._tell_slots(channel)
        if not self.is_joined():
            hub.out(self.peer)
        hub.next_tick_s = 0.0

    def tick(self, elapsed_s: float) -> None:
        """Gives up what is silent."""
        for line in self.lines:
            if line is not None and line.is_silent(elapsed_s, self._hub.settings.silent_s):
                self.lose(line, Broken("no answer"))
