"""The routes of the TCP transport: all that goes from one rank to another, and the failover table that carries it.

`OutRoute` and `InRoute` are the two ends of a direction of a pair: its rails, its channels, and for each one end
of the table. They do what `optcc.failover.step` says; a rail of the table is a *turn* of a real one (`Shares`).

The receiver tells the sender for how many chunks it has posted slots, and a chunk is offered to the table only then:
whatever arrives is read from the socket into the slot that waits for it, and neither end keeps bytes of its own. There
are two exceptions. A few short messages may come before their slots. And if a chunk comes over a second rail while it
is still coming over a first, it goes beside the slot, for either may break off; the first that is whole counts, and the
rest of the other is thrown away: a filled slot is never written again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from optcc.errors import InputError, MismatchError, RuntimeFault
from optcc.failover import (
    ACK,
    CHANGE,
    DATA,
    DELIVER,
    DOWN,
    FORGET,
    FREE,
    NOWHERE,
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
    acknowledge_at_once,
    is_fresh,
    offer_at_once,
    step,
    take_chunk_at_once,
    take_slot_at_once,
)
from optcc.runtime.launch import RATE_MIN, Meeting, Nic
from optcc.runtime.striping import divide_plan
from optcc.runtime.transport import RECEIVED, SENT, Clock
from optcc.runtime.transport import Event as TransportEvent
from optcc.runtime.transports.tcp_meters import Meters
from optcc.runtime.transports.tcp_rails import (
    CLOSE_WATCH_S,
    WATCH_S,
    Broken,
    Dialing,
    Incoming,
    Line,
    Outgoing,
    Owner,
    RailCount,
    open_socket,
)
from optcc.runtime.transports.tcp_wire import (
    BACK_FRAME,
    CHANNELS_MAX,
    DOUBT_FRAME,
    EAGER_BYTES,
    EARLY_CHUNKS_MAX,
    EXCHANGE,
    GONE_FRAME,
    PROBE_FRAME,
    RATE_FRAME,
    Caller,
    Checksum,
    Hello,
    Piece,
    Shares,
    WireError,
)

CHUNK_BYTES_MAX = 1 << 30
NONCE_BYTES = 32
_CONNECT_S = 2.0
_DIAL_SILENT_S = 0.5
_SUSPICION_S = 1.0
_PATIENCE_S = 0.001
_CHANCES, _CHANCES_MAX, _VAIN = 4, 64, 8
"""Reports wait, for so long, for a short message to the same peer once it could have taken so many along; each wait in
vain counts as much as `_VAIN` of them."""
_DOUBTED_HERE, _DOUBTED_THERE = 1, 2
_QUEUE_BYTES = 1 << 20
"""What a socket may hold here, and in most places."""
_REDIAL_S_MIN = 0.01
_REDIAL_S_MAX = 0.25
_TIMEOUT_S = 5.0
_TIMEOUT_LOOK_S = 0.1
_TIMEOUT_S_MAX = 60.0


_NEVER_S = float("inf")

NicEntry = tuple[str, str, int, int, int]
"""A NIC as the ranks tell each other: name, address, port, rate out, rate in (bytes/s)."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a rank is set up; see `optcc.runtime.transports.tcp.TcpTransport`."""

    chunk_bytes: int
    window: int
    crc: bool
    replan: bool
    learn_rates: bool
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
    `watch_s` is how soon those who were last called at a tick want to be called again. `nic_up` is what the kernel says
    of this rank's NICs. Reports in `late_ins` may wait until this rank waits itself, a little longer, to `late_to_s`,
    if a message is likely to take them along; with `owes_reports` only until it is told of events.
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
        self.late_ins: dict[Incoming, InRoute] = {}
        self.next_tick_s = 0.0
        self.watch_s = _NEVER_S
        self.late_to_s = _NEVER_S
        self.nic_up = [True] * len(self.nics)
        self.meters = Meters(self)
        self._suspect_to_s = [0.0] * len(self.nics)
        self._round_trip_s = [0.0] * len(self.nics)
        self.checksum: Checksum | None = None
        self.short_bytes = min(EAGER_BYTES, settings.chunk_bytes)
        self.owes_reports = False
        self.selector = selectors.DefaultSelector()

    @property
    def rank(self) -> int:
        """This rank."""
        return self.meeting.rank

    def flush(self) -> None:
        """Writes what has been queued; what a broken connection leaves is queued elsewhere, and written too."""
        if not self.dirty_outs and not self.dirty_ins:
            return
        now_s = self.clock.now_s()
        self.next_tick_s = min(self.next_tick_s, now_s + WATCH_S)
        while self.dirty_outs or self.dirty_ins:
            while self.dirty_outs:
                line, out = self.dirty_outs.popitem()
                try:
                    self._hand_over(line, out, now_s)
                    line.flush()
                    if line.blocked != line.is_registered_for_writing:
                        self.watch(line, partial(out.ready, line))
                except Broken as error:
                    out.lose(line, error)
            while self.dirty_ins:
                incoming, in_ = self.dirty_ins.popitem()
                try:
                    incoming.flush()
                    if incoming.blocked != incoming.is_registered_for_writing:
                        self.watch(incoming, partial(in_.ready, incoming))
                except Broken as error:
                    in_.lose(incoming, error)

    def _hand_over(self, line: Outgoing, out: OutRoute, now_s: float) -> None:
        """Lets a short message take along what there is to report to its peer."""
        if line.can_carry_reports():
            self.report_over(line, out.peer, now_s)

    def report_over(self, line: Outgoing, peer: int, now_s: float) -> None:
        """Has a connection report, before what it carries next, what there is to say to its peer and can wait."""
        in_ = self.ins.get(peer)
        if in_ is None:
            return
        if in_.reported_s:
            in_.note_chance(now_s)
        if not self.late_ins:
            return
        for incoming in in_.lines:
            if incoming is not None and self.late_ins.pop(incoming, None) is not None:
                in_.chances, in_.late_to_s = min(in_.chances + 1, _CHANCES_MAX), _NEVER_S
                for k in incoming.take_states():
                    line.report(k, *in_.state_of(k))

    def flush_late(self, now_s: float) -> None:
        """Writes what could wait until this rank waits, but what a message to the same peer is likely to take along."""
        self.late_to_s = _NEVER_S
        if not self.late_ins:
            return
        for incoming, in_ in list(self.late_ins.items()):
            if now_s >= in_.late_to_s:
                in_.chances = max(0, in_.chances - _VAIN)
            elif in_.chances >= _CHANCES:
                in_.late_to_s = min(in_.late_to_s, now_s + _PATIENCE_S)
                self.late_to_s = min(self.late_to_s, in_.late_to_s)
                continue
            in_.reported_s, in_.late_to_s = now_s, _NEVER_S
            self.dirty_ins[incoming] = self.late_ins.pop(incoming)
        self.flush()

    def flush_owed(self) -> None:
        """Writes the reports that its peers wait for, and this rank may have no reason to wait any more."""
        self.owes_reports = False
        for incoming, in_ in list(self.late_ins.items()):
            if in_.owes_report:
                in_.late_to_s = _NEVER_S
                self.dirty_ins[incoming] = self.late_ins.pop(incoming)
        self.flush()

    def flush_all(self) -> None:
        """Writes the reports that could wait, too."""
        self.owes_reports, self.late_to_s = False, _NEVER_S
        for in_ in self.late_ins.values():
            in_.late_to_s = _NEVER_S
        self.dirty_ins.update(self.late_ins)
        self.late_ins.clear()
        self.flush()

    def watch(self, line: Outgoing | Incoming, ready: Callable[[int], None]) -> None:
        """Has the selector say when a full socket takes more, or no longer."""
        line.is_registered_for_writing = line.blocked
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.blocked else 0)
        self.selector.modify(line.sock, mask, ready)

    def drop(self, line: Line) -> None:
        """Closes a connection and forgets it."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(line.sock)
        line.close()

    def say(self, peer: int, kind: int, number: int) -> None:
        """A word to a peer, over every connection that there is: what the peer hears twice does no harm."""
        out, in_ = self.outs.get(peer), self.ins.get(peer)
        for line in [rail.line for rail in out.rails if rail.line is not None] if out is not None else []:
            assert out is not None
            line.say(kind, number)
            self.dirty_outs[line] = out
        for incoming in [line for line in in_.lines if line is not None] if in_ is not None else []:
            assert in_ is not None
            incoming.say(kind, number)
            self.dirty_ins[incoming] = in_

    def hear(self, peer: int, words: list[tuple[int, int]]) -> None:
        """Does what a peer's words ask for."""
        out, in_ = self.outs.get(peer), self.ins.get(peer)
        for kind, number in words:
            if kind == GONE_FRAME:
                error = Broken("given up at the other end")
                for rail in out.rails if out is not None else ():
                    if out is not None and rail.line is not None and rail.line.session == number:
                        out.lose(rail.line, error, is_known=True)
                        self.suspect(rail.mine)
                for line in list(in_.lines) if in_ is not None else ():
                    if in_ is not None and line is not None and line.session == number:
                        in_.lose(line, error, is_known=True)
                        self.suspect(in_.mine[line.rail])
            elif kind == BACK_FRAME and out is not None:
                out.dial_now(theirs=number)
            elif kind == RATE_FRAME:
                self.meters.hear(peer, number)
            elif kind == DOUBT_FRAME:
                count, session = number >> 32, number & 0xFFFFFFFF
                for rail in out.rails if out is not None else ():
                    if out is not None and rail.line is not None and rail.line.session == session:
                        out.hear_doubt(rail.line, count)
                for line in in_.lines if in_ is not None else ():
                    if in_ is not None and line is not None and line.session == session:
                        in_.hear_doubt(line, count)
        words.clear()

    def is_silent(self, line: Outgoing | Incoming, elapsed_s: float, nic: int) -> bool:
        """True if a connection over a NIC of this rank is to be given up; tries the others there while it may be.

        Where one was given up lately, half of the time is enough for the others.
        """
        was_suspect, limit_s, round_trip_s = line.suspect, self.settings.silent_s, self._round_trip_s[nic]
        way_s = round_trip_s if round_trip_s < limit_s else limit_s
        if self._suspect_to_s[nic] and self.clock.now_s() < self._suspect_to_s[nic]:
            limit_s /= 2
        is_silent = line.is_silent(elapsed_s, limit_s, way_s)
        self._round_trip_s[nic] = max(round_trip_s * (1 - elapsed_s), line.round_trip_s)
        if is_silent:
            self.suspect(nic)
        elif line.suspect and not was_suspect:
            self.probe(nic)
        return is_silent

    def tell_doubt(self, line: Outgoing | Incoming, peer: int) -> None:
        """This end has begun or ceased to doubt a connection to a peer: the peer is told.

        A word may overtake another on a faster connection, hence the count: it is odd while there is doubt.
        """
        line.doubts_said += 1
        line.doubt = line.doubt & ~_DOUBTED_HERE | (_DOUBTED_HERE if line.suspect else 0)
        self.say(peer, DOUBT_FRAME, line.doubts_said << 32 | line.session)

    def look_again(self, line: Line) -> None:
        """A connection that still waits for answers is looked at again, and soon if none comes."""
        if line.awaits:
            watch_s = CLOSE_WATCH_S if line.stands else WATCH_S
            self.watch_s = watch_s if watch_s < self.watch_s else self.watch_s

    def suspect(self, nic: int) -> None:
        """A connection over a NIC of this rank was given up: the others there are watched closely for a while."""
        self._suspect_to_s[nic] = self.clock.now_s() + _SUSPICION_S
        self.probe(nic)

    def probe(self, nic: int) -> None:
        """Something may be wrong with a NIC of this rank: what is idle there is tried, so that it is noticed too."""
        for out in self.outs.values():
            for rail in out.rails:
                if rail.mine == nic and rail.line is not None and not rail.line.awaits:
                    rail.line.say(PROBE_FRAME, 0)
                    self.dirty_outs[rail.line] = out
        for in_ in self.ins.values():
            for line in in_.lines:
                if line is not None and in_.mine[line.rail] == nic and not line.awaits:
                    line.say(PROBE_FRAME, 0)
                    self.dirty_ins[line] = in_

    def nic_changed(self, nic: int, is_up: bool) -> None:
        """The kernel says that a NIC of this rank has gone down or come back: nobody need wait to find out."""
        self.nic_up[nic] = is_up
        for out in list(self.outs.values()):
            if is_up:
                out.dial_now(mine=nic)
            else:
                out.lose_nic(nic)
        for peer, in_ in list(self.ins.items()):
            if is_up:
                self.say(peer, BACK_FRAME, nic)
            else:
                in_.lose_nic(nic)
        self.meters.note_nic(nic, is_up)

    def fail(self, failure: RuntimeFault) -> None:
        """Ends every wait of this rank; the first failure counts."""
        if self.failure is None:
            self.failure = failure

    def out(self, peer: int) -> OutRoute:
        """The route to a peer; a new one is dialled at the next look at the time."""
        if peer not in self.outs:
            self.outs[peer] = OutRoute(self, peer)
            self.meters.divide_anew()
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

    def queue_s(self, mine: int, peer: int, theirs: int) -> float:
        """How long a full socket's bytes may take between a NIC of this rank and one of a peer, if their rates say."""
        rate = min(min(self.book[rank][nic][3:]) for rank, nic in ((self.rank, mine), (peer, theirs)))
        return _QUEUE_BYTES / rate if rate >= RATE_MIN else 0.0

    def cut(self, channel: SendChannel | RecvChannel, n_bytes: int) -> Sequence[Piece]:
        """The pieces of the next message of a channel, alike at both ends."""
        shares, chunk_bytes = channel.shares, self.settings.chunk_bytes
        if n_bytes >= shares.cut_bytes_min or n_bytes > chunk_bytes:
            return shares.cut(n_bytes, chunk_bytes)
        rail = shares.turns[channel.n_whole % len(shares.turns)]
        channel.n_whole += 1
        return (Piece(0, n_bytes, rail),)

    def shares(self, src: int, dst: int) -> Shares:
        """How a message from `src` to `dst` is divided: by what the NICs of each rail send and receive at most."""
        pairs = self.pairs(src, dst)
        parts = [min(self.book[src][mine][3], self.book[dst][theirs][4]) for mine, theirs in pairs]
        return Shares.of(parts, self._first_turn(src, dst))

    def _first_turn(self, src: int, dst: int) -> int:
        """What a rank sends at once to all others, or they to it, does not all go over the same NIC."""
        return (dst - src) % len(self.book)

    def shares_for(self, carried: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], Shares]:
        """How the messages of a plan are divided that carries so many bytes from rank to rank; nothing for those that
        are divided as always: where NICs are equal, and where there is one rail."""
        self.meters.carried = dict(carried)
        self.meters.divide_anew()
        parts = divide_plan(
            carried,
            {pair: self.pairs(*pair) for pair in carried},
            [[(out, in_) for *_, out, in_ in nics] for nics in self.book],
        )
        return {pair: Shares.of(each, self._first_turn(*pair)) for pair, each in parts.items()}


class SendChannel:
    """The sending end of a channel. `chunks` are those that the sender keeps, from `sender.acked` on, each with whether
    it is the last of a message that is still to be reported, and whether it is a copy (`has_copies`: some may be);
    `posted` counts all, `slots` those for which the peer has posted slots. `turns` says for which rail of the pair each
    rail of the table stands."""

    __slots__ = (
        *("chunks", "handle", "has_copies", "highest", "k", "n_sent", "n_whole", "posted", "sender", "shares"),
        *("since_s", "slots", "timeout_s", "turns"),
    )

    def __init__(self, k: int, link: Link, shares: Shares) -> None:
        self.k, self.handle, self.shares = k, -1, shares
        self.turns = list(shares.turns)
        self.sender: Sender = link.sender()
        self.chunks: deque[tuple[memoryview, bool, bool, int]] = deque()
        self.has_copies = False
        self.posted = self.slots = self.highest = self.n_sent = self.n_whole = 0
        self.since_s, self.timeout_s = 0.0, _TIMEOUT_S

    def is_stale(self, number: int, epoch: int) -> bool:
        """See `Owner`."""
        return number < self.sender.acked or epoch != self.sender.epoch


class RecvChannel:
    """The receiving end of a channel. `slots` are those that are not filled, from `receiver.delivered` on, each with
    whether it is the last of its message, and whether its sender has a copy; `arriving` says over which connection a
    chunk is on its way into its slot; `early` are chunks that came before their slots. `posted` counts the slots,
    `told` those that the sender has been told of."""

    __slots__ = (
        *("arriving", "early", "handle", "k", "n_received", "n_whole", "posted", "receiver", "shares", "slots"),
        "told",
    )

    def __init__(self, k: int, link: Link, shares: Shares) -> None:
        self.k, self.handle, self.shares = k, -1, shares
        self.receiver: Receiver = link.receiver()
        self.slots: deque[tuple[memoryview, bool, bool]] = deque()
        self.arriving: dict[int, Incoming] = {}
        self.early: dict[int, memoryview] = {}
        self.posted = self.told = self.n_received = self.n_whole = 0

    def has_received(self, count: int) -> bool:
        """True once `count` messages have come in all."""
        return self.n_received >= count


class Rail:
    """One rail of a pair: the NICs at both ends, by number, and the connection that this rank opens over it."""

    __slots__ = (
        *("address", "dialing", "joined_in_s", "line", "mine", "name", "next_s", "refused", "since_s", "theirs"),
        "wait_s",
    )

    def __init__(self, name: str, mine: int, theirs: int, address: tuple[str, int]) -> None:
        self.name, self.mine, self.theirs, self.address = name, mine, theirs, address
        self.line: Outgoing | None = None
        self.dialing: Dialing | None = None
        self.next_s, self.wait_s, self.since_s = 0.0, _REDIAL_S_MIN, 0.0
        # How long the quickest hello took; before the first, a guess on the safe side.
        self.joined_in_s = _DIAL_SILENT_S
        self.refused = False


class OutRoute:
    """All that goes from this rank to a peer: the rails, which it dials, and the sending ends of the channels."""

    def __init__(self, hub: Hub, peer: int) -> None:
        self._hub, self.peer = hub, peer
        me, book = hub.rank, hub.book
        pairs = hub.pairs(me, peer)
        self.rails = [
            Rail(book[me][mine][0], mine, theirs, (book[peer][theirs][1], book[peer][theirs][2]))
            for mine, theirs in pairs
        ]
        self._shares = hub.shares(me, peer)
        # In which parts the rails carry what the NICs turn out to be good for; None: as declared.
        self._parts: tuple[float, ...] | None = None
        self._credit = [0.0] * len(self.rails)
        self._link = Link(self._shares.n_turns, hub.settings.window)
        self._channels: dict[int, SendChannel] = {}
        # Watched seconds for which no rail has been joined: time in which nobody called `poll` does not count.
        self.dark_s = self._looked_s = 0.0

    def channel(self, k: int) -> SendChannel:
        """The k-th channel to the peer; a new one knows which rails are down."""
        if k not in self._channels:
            channel = self._channels[k] = SendChannel(k, self._link, self._shares)
            for turn, rail in enumerate(channel.turns):
                if not self._is_used(rail):
                    self._at_sender(channel, Event(DOWN, turn))
        return self._channels[k]

    def post(self, channel: SendChannel, view: memoryview) -> None:
        """Queues a message."""
        pieces = self._hub.cut(channel, len(view))
        if is_eager(channel, view, pieces):
            channel.chunks.append((memoryview(bytes(view)), True, True, pieces[0].rail))
            channel.has_copies = True
        else:
            last = len(pieces) - 1
            for i, (start, end, rail) in enumerate(pieces):
                channel.chunks.append((view[start:end], i == last, False, rail))
        channel.posted += len(pieces)
        self._offer(channel)

    def send_at_once(self, channel: SendChannel, view: memoryview) -> bool:
        """Sends a short message if nothing stands in its way, as `post` and a flush would; else False, and nothing is
        changed."""
        sender, hub = channel.sender, self._hub
        number, n_bytes, turns = sender.offered, len(view), channel.shares.turns
        rail = turns[channel.n_whole % len(turns)]
        line = self.rails[rail].line
        if n_bytes > hub.short_bytes or line is None or not line.is_idle() or channel.k == EXCHANGE:
            return False
        if channel.turns[number % len(turns)] != rail or self._parts is not None:
            return False
        if number != channel.posted or number < channel.highest:
            return False
        has_slot = number < channel.slots
        if not (has_slot or (channel.slots and number - sender.acked < EARLY_CHUNKS_MAX)):
            return False
        after = offer_at_once(self._link, sender)
        if after is None:
            return False
        now_s = hub.clock.now_s()
        if not sender.out:
            channel.since_s, channel.timeout_s = now_s, _TIMEOUT_S
        channel.sender, channel.has_copies = after, True
        channel.n_whole += 1
        channel.posted = channel.highest = number + 1
        copy, chunks = bytes(view), channel.chunks
        # Reported in their order: where all before this one are, it is; else it waits for them.
        in_order = not chunks or (chunks[-1][2] and not chunks[-1][1])
        chunks.append((memoryview(copy), not (has_slot and in_order), True, rail))
        if has_slot and in_order:
            self._report(channel)
        hub.report_over(line, self.peer, now_s)
        if hub.next_tick_s > now_s + WATCH_S:
            hub.next_tick_s = now_s + WATCH_S
        try:
            line.send_at_once(channel.k, number, after.epoch, copy)
            if line.blocked:
                hub.watch(line, partial(self.ready, line))
        except Broken as error:
            self.lose(line, error)
            hub.flush()
        return True

    def has_work(self) -> bool:
        """True if something is posted and not taken."""
        return any(channel.chunks for channel in self._channels.values())

    def is_waited_for(self) -> bool:
        """True if something is posted that does not count as sent. What does, and is only not acknowledged, a peer that
        has left in good order has taken: its report went with a connection that broke."""
        return any(
            is_last or not is_copy for channel in self._channels.values() for _, is_last, is_copy, _ in channel.chunks
        )

    def is_joined(self) -> bool:
        """True if the peer's kernel has answered on some rail and has not been given up since."""
        return any(
            rail.line is not None or (rail.dialing is not None and rail.dialing.established) for rail in self.rails
        )

    # --- the table

    def _offer(self, channel: SendChannel) -> None:
        """Offers the table what is posted at both ends, and a few copies ahead of that."""
        while True:
            offered, acked = channel.sender.offered, channel.sender.acked
            if offered >= channel.posted:
                return
            if offered >= channel.slots:
                # A peer that has told of slots has opened the channel.
                can_wait = channel.has_copies and channel.slots and channel.chunks[offered - acked][2]
                if not can_wait or offered - acked >= min(EARLY_CHUNKS_MAX, self._link.window):
                    return
            if len(self.rails) > 1 and not self._take_turn(channel, channel.chunks[offered - acked][3]):
                return
            self._at_sender(channel, Event(OFFER))

    def _take_turn(self, channel: SendChannel, rail: int) -> bool:
        """Has the rail of the table that the next chunk goes to stand for `rail`, or for another one if that is down;
        False if something is out on it that went elsewhere: its acknowledgement will come."""
        turn = channel.sender.offered % self._link.n_rails
        is_taken = turn in channel.sender.out
        if self._parts is not None:
            if is_taken:
                return False
            rail = self._choose(len(channel.chunks[channel.sender.offered - channel.sender.acked][0]))
        if not self._is_used(rail):
            alive = [number for number in range(len(self.rails)) if self._is_used(number)]
            rail = alive[channel.sender.offered % len(alive)] if alive else rail
        if channel.turns[turn] == rail:
            return True
        if is_taken:
            return False
        channel.turns[turn] = rail
        self._at_sender(channel, Event(UP if self._is_used(rail) else DOWN, turn))
        return True

    def _at_sender(self, channel: SendChannel, event: Event) -> None:
        hub = self._hub
        # The timer runs from when something goes out, or is acknowledged.
        restarts = not channel.sender.out
        channel.sender, actions = step(SENDER_ROWS, self._link, channel.sender, event)
        sender = channel.sender
        for action in actions:
            if action.kind == FREE:
                restarts = True
                if channel.chunks.popleft()[1]:
                    self._report(channel)
            elif action.kind == SEND:
                line = self.rails[channel.turns[action.rail]].line
                if line is None or line.is_shunned:
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
        if channel.has_copies:
            self._report_copies(channel)
        if restarts:
            channel.since_s, channel.timeout_s = hub.clock.now_s(), _TIMEOUT_S

    def _report(self, channel: SendChannel) -> None:
        channel.n_sent += 1
        if channel.handle >= 0:
            self._hub.events.append((SENT, channel.handle))

    def _report_copies(self, channel: SendChannel) -> None:
        """Messages of which this end has a copy count as sent, in their order, once they have a slot and are out."""
        chunks, acked = channel.chunks, channel.sender.acked
        for i, turn in enumerate(channel.sender.out):
            chunk, is_last, is_copy, rail = chunks[i]
            if is_last:
                if not is_copy or turn == NOWHERE or acked + i >= channel.slots:
                    return
                chunks[i] = (chunk, False, True, rail)
                self._report(channel)

    # --- the rails

    def ready(self, line: Outgoing, mask: int) -> None:
        """The selector says that a connection can be read or written."""
        try:
            if mask & selectors.EVENT_READ:
                for k, epoch, number, slots in line.read():
                    self.take_state(k, epoch, number, slots)
                if line.left is not None:
                    self._hub.left[self.peer] = line.left
                if line.words:
                    self._hub.hear(self.peer, line.words)
            if mask & selectors.EVENT_WRITE:
                self._hub.dirty_outs[line] = self
        except Broken as error:
            self.lose(line, error)

    def take_state(self, k: int, epoch: int, number: int, slots: int) -> None:
        """What the receiver says of a channel. Raises Broken for one that cannot be."""
        channel = self._channels.get(k)
        if channel is not None and channel.sender.offered == channel.posted:
            after = acknowledge_at_once(channel.sender, epoch, number)
            if after is not None:
                self._take_acknowledgement(channel, after, slots)
                return
        if k != EXCHANGE and k >= CHANNELS_MAX:
            raise Broken(f"state of channel {k}", is_damage=True)
        channel = self.channel(k)
        channel.slots = max(channel.slots, slots)
        # The table does not ask over which rail an acknowledgement has come.
        self._at_sender(channel, Event(ACK, 0, epoch, number))
        self._offer(channel)

    def _take_acknowledgement(self, channel: SendChannel, after: Sender, slots: int) -> None:
        """A state of a channel on which nothing waits, which leads to `after`."""
        if slots > channel.slots:
            channel.slots = slots
        n_freed = after.acked - channel.sender.acked
        if n_freed:
            channel.sender = after
            channel.since_s, channel.timeout_s = self._hub.clock.now_s(), _TIMEOUT_S
            for _ in range(n_freed):
                if channel.chunks.popleft()[1]:
                    self._report(channel)
        if after.out and channel.has_copies:
            self._report_copies(channel)

    def lose_nic(self, nic: int) -> None:
        """A NIC of this rank is down, and with it all that goes over it."""
        for rail in self.rails:
            if rail.mine == nic and rail.line is not None:
                self.lose(rail.line, Broken("its NIC is down"))
            elif rail.mine == nic and rail.dialing is not None:
                self._hang_up(rail, rail.dialing, False)

    def dial_now(self, *, mine: int | None = None, theirs: int | None = None) -> None:
        """Rails of a NIC of this rank, or of the peer, that are down and may be up again are dialled at once."""
        for rail in self.rails:
            if rail.line is None and (rail.mine == mine or rail.theirs == theirs):
                if rail.dialing is not None and not rail.dialing.established:
                    self._hang_up(rail, rail.dialing, False)
                rail.next_s, rail.wait_s = 0.0, _REDIAL_S_MIN
                self._hub.next_tick_s = 0.0

    def lose(self, line: Outgoing, error: Broken, *, is_known: bool = False) -> None:
        """A connection is of no more use: what was out on it goes out elsewhere, and the rail is dialled again.

        The peer is told over what is left, unless it `is_known` there: it may not see it for itself.
        """
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
        self._shun()
        for channel in list(self._channels.values()):
            self._tell(channel, line.rail, DOWN)
            if hub.settings.replan:
                self._at_sender(channel, Event(REPLAN))
        in_ = hub.ins.get(self.peer)
        if in_ is not None:
            in_.repeat_states()
        if not is_known:
            hub.say(self.peer, GONE_FRAME, line.session)

    def hear_doubt(self, line: Outgoing, count: int) -> None:
        """The peer has begun or ceased to doubt a connection; what has been overtaken says nothing.

        Nor does a doubt while the peer's kernel answers what goes there: only its answers to reports are late.
        """
        if count > line.doubts_heard:
            line.doubts_heard = count
            is_doubted = count & 1 and not (line.awaits and line.answers)
            line.doubt = line.doubt & ~_DOUBTED_THERE | (_DOUBTED_THERE if is_doubted else 0)
            self._shun()

    def _is_used(self, rail: int) -> bool:
        """True if new chunks may go over a rail."""
        line = self.rails[rail].line
        return line is not None and not line.is_shunned

    def _shun(self) -> None:
        """What is out on a connection in doubt goes out elsewhere too, and nothing new goes there, unless there is no
        other: if it was slow only, both copies come, and the second is thrown away."""
        for line in shun([rail.line for rail in self.rails if rail.line is not None]):
            if line.is_shunned:
                line.take_back()
            for channel in list(self._channels.values()):
                self._tell(channel, line.rail, DOWN if line.is_shunned else UP)

    def _tell(self, channel: SendChannel, rail: int, kind: str) -> None:
        for turn, its_rail in enumerate(channel.turns):
            if its_rail == rail:
                self._at_sender(channel, Event(kind, turn))

    def _choose(self, n_bytes: int) -> int:
        """The rail for so many bytes: the one that is most behind with its part."""
        assert self._parts is not None
        self._credit = [credit + part * n_bytes for credit, part in zip(self._credit, self._parts, strict=True)]
        rail = self._credit.index(max(self._credit))
        self._credit[rail] -= n_bytes
        return rail

    def take_parts(self, parts: Sequence[float] | None) -> None:
        """From now on the rails carry these parts of what goes to the peer, or again what is declared; what waits for a
        socket is divided anew at once."""
        if parts is None and self._parts is None:
            return
        total = sum(parts or ())
        self._parts = None if parts is None else tuple(part / total for part in parts)
        self._credit = [0.0] * len(self.rails)
        lines = [rail.line for rail in self.rails if rail.line is not None]
        for line in lines:
            line.hold_little(self._is_slow(line.rail))
        if self._parts is None:
            return
        for line in lines:
            for owner, number, epoch, view in line.take_back():
                to = line if view is None else self._move(owner, number, line, self._choose(len(view)))
                to.put(owner, number, epoch, view)
                self._hub.dirty_outs[to] = self

    def _is_slow(self, rail: int) -> bool:
        return self._parts is not None and self._parts[rail] < max(self._parts)

    def _move(self, owner: Owner, number: int, line: Outgoing, rail: int) -> Outgoing:
        """Where a chunk is to wait that waits on `line`: at `rail`, if its turn can stand for that, or where it is."""
        assert isinstance(owner, SendChannel)
        sender, other = owner.sender, self.rails[rail].line
        if (
            other is None
            or other is line
            or not self._is_used(rail)
            or not 0 <= number - sender.acked < len(sender.out)
        ):
            return line
        turn = sender.out[number - sender.acked]
        if turn == NOWHERE or owner.turns[turn] != line.rail or sender.out.count(turn) > 1:
            return line
        owner.turns[turn] = rail
        return other

    def _dial_later(self, rail: Rail, refused: bool) -> None:
        """After a failure: the next try, at growing intervals."""
        now_s = self._hub.clock.now_s()
        rail.refused = refused
        rail.next_s = now_s + rail.wait_s
        rail.wait_s = min(2 * rail.wait_s, _REDIAL_S_MAX)
        self._hub.next_tick_s = 0.0

    def tick(self, now_s: float, elapsed_s: float, watched_s: float) -> None:
        """Dials, gives up what is silent, and sends again what has waited long.

        `elapsed_s` since the last call, `watched_s` of it without a break.
        """
        hub = self._hub
        is_gone = self.peer in hub.left
        is_joined = False
        for number, rail in enumerate(self.rails):
            line, dialing = rail.line, rail.dialing
            if line is not None:
                is_joined = True
                if not line.awaits:
                    continue
                if hub.is_silent(line, watched_s, rail.mine):
                    self.lose(line, Broken("no answer"))
                elif line.suspect != line.doubts_said & 1:
                    hub.tell_doubt(line, self.peer)
                    self._shun()
                hub.look_again(line)
            elif dialing is not None:
                late = not dialing.established and now_s - rail.since_s > _CONNECT_S
                limit_s = max(hub.settings.silent_s, 2 * rail.joined_in_s, 2 * rail.wait_s)
                is_joined |= dialing.established
                if late or dialing.is_silent(watched_s, limit_s):
                    self._hang_up(rail, dialing, False)
                hub.watch_s = CLOSE_WATCH_S
            elif not is_gone and hub.nic_up[rail.mine]:
                if now_s >= rail.next_s:
                    self._dial(rail, number, now_s)
                hub.watch_s = CLOSE_WATCH_S
        self.dark_s = 0.0 if is_joined else self.dark_s + elapsed_s
        if now_s >= self._looked_s + _TIMEOUT_LOOK_S:
            self._looked_s = now_s
            self._send_late_again(now_s)

    def _send_late_again(self, now_s: float) -> None:
        """What has waited long for its acknowledgement goes out again."""
        for channel in self._channels.values():
            if (channel.sender.out or channel.sender.changing) and now_s - channel.since_s >= channel.timeout_s:
                channel.since_s = now_s
                # What still waits for a full socket is not lost, and must not be queued twice.
                if not any(rail.line is not None and rail.line.holds(channel) for rail in self.rails):
                    channel.timeout_s = min(2 * channel.timeout_s, _TIMEOUT_S_MAX)
                    self._at_sender(channel, Event(TIMEOUT))

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
        line = Outgoing(dialing.sock, number, session, hub.rails[rail.mine], hub.checksum)
        line.queue_s = hub.queue_s(rail.mine, self.peer, rail.theirs)
        rail.dialing, rail.line, rail.refused, rail.wait_s = None, line, False, _REDIAL_S_MIN
        rail.joined_in_s = min(rail.joined_in_s, hub.clock.now_s() - rail.since_s)
        hub.selector.modify(line.sock, selectors.EVENT_READ, partial(self.ready, line))
        if self._is_slow(number):
            line.hold_little(True)
        for channel in list(self._channels.values()):
            self._tell(channel, number, UP)
        self._shun()
        hub.meters.tell(self.peer)

    def _hang_up(self, rail: Rail, dialing: Dialing, refused: bool) -> None:
        rail.dialing = None
        self._hub.drop(dialing)
        self._dial_later(rail, refused)


class InRoute:
    """All that comes from a peer: the connections that it has opened, and the receiving ends of the channels."""

    def __init__(self, hub: Hub, peer: int) -> None:
        self._hub, self.peer = hub, peer
        pairs = hub.pairs(peer, hub.rank)
        self.mine = [mine for _, mine in pairs]
        self._queue_s = [hub.queue_s(mine, peer, theirs) for theirs, mine in pairs]
        self.lines: list[Incoming | None] = [None] * len(pairs)
        self._shares = hub.shares(peer, hub.rank)
        self._link = Link(self._shares.n_turns, hub.settings.window)
        self._turns = self._shares.turns
        self._channels: dict[int, RecvChannel] = {}
        # When reports were last written on their own, and how often a short message to the peer then followed soon.
        self.reported_s, self.chances = 0.0, 0
        self.late_to_s, self.owes_report = _NEVER_S, False

    def channel(self, k: int) -> RecvChannel:
        """The k-th channel from the peer; a new one knows which rails are down."""
        if k not in self._channels:
            channel = self._channels[k] = RecvChannel(k, self._link, self._shares)
            for turn, rail in enumerate(self._turns):
                line = self.lines[rail]
                if line is None or line.is_shunned:
                    self._at_receiver(channel, Event(DOWN, turn))
        return self._channels[k]

    def post(self, channel: RecvChannel, view: memoryview) -> None:
        """Queues the slots of a message, and tells the sender of them."""
        pieces = self._hub.cut(channel, len(view))
        eager = is_eager(channel, view, pieces)
        for i, (start, end, _) in enumerate(pieces):
            number = channel.receiver.delivered + len(channel.slots)
            channel.slots.append((view[start:end], i == len(pieces) - 1, eager))
            if number in channel.early:
                chunk = channel.early.pop(number)
                if len(chunk) != end - start:
                    self._hub.fail(self._mismatch(len(chunk), end - start))
                    return
                view[start:end] = chunk
            self._at_receiver(channel, Event(OFFER))
        channel.posted += len(pieces)
        self._tell_slots(channel, can_wait=eager)

    def post_at_once(self, channel: RecvChannel, view: memoryview) -> bool:
        """`post` of a short message, which may have come; else False, and nothing is changed."""
        n_bytes, before = len(view), channel.receiver
        if n_bytes > self._hub.short_bytes or channel.k == EXCHANGE:
            return False
        receiver = take_slot_at_once(self._link, before)
        if receiver is None:
            return False
        number = before.delivered
        is_here = receiver.delivered > number
        # An early chunk that is not next may be the one for this slot.
        if len(channel.early[number]) != n_bytes if is_here else channel.early:
            return False
        channel.receiver = receiver
        channel.n_whole += 1
        channel.posted += 1
        if not is_here:
            channel.slots.append((view, True, True))
            self._tell_slots(channel, can_wait=True)
            return True
        view[:] = channel.early.pop(number)
        self._note_delivery(channel, True)
        # What acknowledges the chunk tells of the slot too.
        self._say(number % len(self._turns), channel, can_wait=True)
        return True

    def _note_delivery(self, channel: RecvChannel, is_last: bool) -> None:
        """A chunk has been delivered; with the last one of a message, the message has."""
        if is_last:
            channel.n_received += 1
            if channel.handle >= 0:
                self._hub.events.append((RECEIVED, channel.handle))
        if channel.receiver.delivered > channel.told:
            # It counts as sent once its slot is told.
            self.owes_report = self._hub.owes_reports = True

    def repeat_states(self) -> None:
        """Tells all states again: some went with messages of the opposite direction, and may be lost with them."""
        for channel in self._channels.values():
            self._tell_slots(channel)

    def _mismatch(self, sent_bytes: int, expected_bytes: int) -> MismatchError:
        pair = f"{self.peer}->{self._hub.rank}"
        return MismatchError(f"channel {pair}: {sent_bytes} B sent, {expected_bytes} B expected")

    def has_work(self) -> bool:
        """True if something is posted and has not come."""
        return any(channel.slots for channel in self._channels.values())

    def is_joined(self) -> bool:
        """True if a connection is there."""
        return any(line is not None for line in self.lines)

    def _tell_slots(self, channel: RecvChannel, *, can_wait: bool = False) -> None:
        """Over the rail whose turn it is, or the next that is up."""
        turns = self._turns
        turn = self._link.pick(channel.receiver.up, channel.receiver.delivered % len(turns))
        if turn >= 0:
            self._say(turn, channel, can_wait=can_wait)

    def _say(self, turn: int, channel: RecvChannel, *, can_wait: bool = False) -> None:
        """Tells the state of a channel; if it `can_wait`, when this rank waits next, with what there is to say then."""
        line = self.lines[self._turns[turn]]
        if line is not None:
            line.tell(channel.k)
            (self._hub.late_ins if can_wait else self._hub.dirty_ins)[line] = self

    # --- the table

    def _at_receiver(self, channel: RecvChannel, event: Event) -> None:
        hub = self._hub
        epoch, can_wait = channel.receiver.epoch, False
        channel.receiver, actions = step(RECEIVER_ROWS, self._link, channel.receiver, event)
        for action in actions:
            # A chunk that is to be kept is in its slot already, and one that is to be forgotten may stay there.
            if action.kind == DELIVER:
                _, is_last, can_wait = channel.slots.popleft()
                self._note_delivery(channel, is_last)
            elif action.kind == FORGET:
                channel.early.clear()
            elif action.kind == SEND:
                self._say(action.rail, channel, can_wait=can_wait)
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
            if length > EAGER_BYTES or ahead >= EARLY_CHUNKS_MAX:
                raise Broken(f"chunk {number} without a slot", is_damage=True)
            return memoryview(bytearray(length))
        slot = end.slots[ahead][0]
        if len(slot) != length:
            error = self._mismatch(length, len(slot))
            self._hub.fail(error)
            raise Broken(str(error), is_damage=True)
        if number in end.arriving:
            # It is also coming elsewhere, and either may break off: this one goes beside the slot.
            return memoryview(bytearray(length))
        end.arriving[number] = line
        return slot

    def take_at_once(self, line: Incoming, epoch: int, channel: int, number: int, chunk: memoryview) -> bool:
        """See `Reader`."""
        end = self._channels.get(channel)
        if end is None or end.arriving or len(chunk) > EAGER_BYTES:
            return False
        turn = self._turn_of(line)
        receiver = take_chunk_at_once(end.receiver, turn, epoch, number)
        if receiver is None:
            return False
        if receiver.delivered == number:
            end.receiver = receiver
            end.early[number] = memoryview(bytes(chunk))
            return True
        view, is_last, can_wait = end.slots[0]
        if len(view) != len(chunk):
            return False
        view[:] = chunk
        end.receiver = receiver
        end.slots.popleft()
        self._note_delivery(end, is_last)
        self._say(turn, end, can_wait=can_wait)
        return True

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
            ahead = number - end.receiver.delivered
            if ahead >= len(end.slots):
                end.early[number] = chunk
            elif len(chunk) != len(end.slots[ahead][0]):
                self._hub.fail(self._mismatch(len(chunk), len(end.slots[ahead][0])))
                return
            else:
                end.slots[ahead][0][:] = chunk
        self._at_receiver(end, event)

    def change(self, line: Incoming, epoch: int, channel: int) -> None:
        """See `Reader`."""
        self._at_receiver(self._end(channel), Event(CHANGE, self._turn_of(line), epoch))

    def state_of(self, channel: int) -> tuple[int, int, int]:
        """See `Reader`."""
        end = self._channels[channel]
        end.told, self.owes_report = end.posted, False
        return end.receiver.epoch, end.receiver.delivered, end.posted

    def note_chance(self, now_s: float) -> None:
        """A short message goes to the peer, and could have taken along what was reported just before."""
        if now_s - self.reported_s < _PATIENCE_S:
            self.chances = min(self.chances + 1, _CHANCES_MAX)
        self.reported_s = 0.0

    def report(self, epoch: int, channel: int, number: int, slots: int) -> None:
        """See `Reader`."""
        out = self._hub.outs.get(self.peer) or self._hub.out(self.peer)
        out.take_state(channel, epoch, number, slots)

    def _end(self, k: int) -> RecvChannel:
        if k not in self._channels:
            raise Broken(f"channel {k} is not open", is_damage=True)
        return self._channels[k]

    def _turn_of(self, line: Incoming) -> int:
        return self._turns.index(line.rail)

    # --- the rails

    def take(self, line: Incoming) -> None:
        """A rail is up: a new connection, which takes the place of a former one that this end still holds."""
        former = self.lines[line.rail]
        if former is not None:
            self.lose(former, Broken("replaced"))
        self.lines[line.rail] = line
        line.queue_s = self._queue_s[line.rail]
        for channel in list(self._channels.values()):
            self._tell(channel, line.rail, UP)
            if channel.posted:
                self._say(self._turn_of(line), channel)
        self._shun()

    def _tell(self, channel: RecvChannel, rail: int, kind: str) -> None:
        for turn, its_rail in enumerate(self._turns):
            if its_rail == rail:
                self._at_receiver(channel, Event(kind, turn))

    def hear_doubt(self, line: Incoming, count: int) -> None:
        """See `OutRoute.hear_doubt`."""
        if count > line.doubts_heard:
            line.doubts_heard = count
            line.doubt = line.doubt & ~_DOUBTED_THERE | (_DOUBTED_THERE if count & 1 else 0)
            self._shun()

    def _shun(self) -> None:
        """What was last told over a connection in doubt is told again elsewhere, and nothing new there, unless there is
        no other."""
        for line in shun([line for line in self.lines if line is not None]):
            for channel in list(self._channels.values()):
                self._tell(channel, line.rail, DOWN if line.is_shunned else UP)
                self._tell_slots(channel)

    def ready(self, line: Incoming, mask: int) -> None:
        """The selector says that a connection can be read or written."""
        try:
            if mask & selectors.EVENT_READ:
                line.read()
            if mask & selectors.EVENT_WRITE:
                self._hub.dirty_ins[line] = self
            if line.left is not None:
                self._hub.left[self.peer] = line.left
            if line.words:
                self._hub.hear(self.peer, line.words)
        except Broken as error:
            if line.left is not None:
                self._hub.left[self.peer] = line.left
            self.lose(line, error)

    def lose_nic(self, nic: int) -> None:
        """A NIC of this rank is down, and with it all that comes over it."""
        for line in list(self.lines):
            if line is not None and self.mine[line.rail] == nic:
                self.lose(line, Broken("its NIC is down"))

    def lose(self, line: Incoming, error: Broken, *, is_known: bool = False) -> None:
        """A connection is of no more use. The peer dials again if it is there; if no rail is left, this end looks.

        The peer is told over what is left, unless it `is_known` there.
        """
        hub = self._hub
        hub.dirty_ins.pop(line, None)
        hub.late_ins.pop(line, None)
        hub.drop(line)
        if self.lines[line.rail] is not line:
            return
        self.lines[line.rail] = None
        hub.counts.damaged += error.is_damage
        self._shun()
        for channel in list(self._channels.values()):
            for number in [number for number, its_line in channel.arriving.items() if its_line is line]:
                del channel.arriving[number]
            self._tell(channel, line.rail, DOWN)
            self._tell_slots(channel)
        if not self.is_joined():
            hub.out(self.peer)
        if not is_known:
            hub.say(self.peer, GONE_FRAME, line.session)
        hub.next_tick_s = 0.0

    def tick(self, elapsed_s: float) -> None:
        """Gives up what is silent."""
        for rail, line in enumerate(self.lines):
            if line is None or not line.awaits:
                continue
            if self._hub.is_silent(line, elapsed_s, self.mine[rail]):
                self.lose(line, Broken("no answer"))
            elif line.suspect != line.doubts_said & 1:
                self._hub.tell_doubt(line, self.peer)
                self._shun()
            self._hub.look_again(line)


L = TypeVar("L", bound=Line)


def shun(lines: Sequence[L]) -> Iterator[L]:
    """Of the connections of a route, those that are shunned from now on, or no longer: who is in doubt is, unless all
    are. First comes what is used again, so that the table never has nothing."""
    is_needed = all(line.doubt for line in lines)
    for line in sorted(lines, key=lambda each: bool(each.doubt)):
        shunned = bool(line.doubt) and not is_needed
        if shunned != line.is_shunned:
            line.is_shunned = shunned
            yield line


def is_eager(channel: SendChannel | RecvChannel, view: memoryview, pieces: Sequence[Piece]) -> bool:
    """True for a message that is sent from a copy; both ends must say the same."""
    return len(view) <= EAGER_BYTES and len(pieces) == 1 and channel.k != EXCHANGE
