"""`Endpoint`: one rank's end of the protocol, for a driver that owns the wire and the clock. No I/O.

The driver sets `now_s`, calls an entry point, and then

    connects what is in `to_dial`, closes what is in `to_close`, limits the unsent bytes of what is in `to_limit`, reads
    again what is in `to_resume`;
    writes: `next_to_write()`, its `views()`, `written(n)`, until there is none;
    calls `tick` at `next_tick_s`, with fresh samples (`KernelReport`) of what is in `watched()`.

Entry points are `open`, `post_send`, `post_recv`, `poll_events` for the program; `connected`, `dial_failed`,
`accepted`, `received_hello`, `received`, `filled`, `broken` for connections; `nic_changed`, `nic_moved` for NICs;
`tick` for the time. None of them waits. `failure` ends every wait.

One class, as every entry point may set off any of the others' effects; what has a state of its own is in files of their
own (`outbound`, `inbound`, `membership`, `epochs`, `detour`, `reports`), and most methods here pass an event on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from optcc.errors import InputError
from optcc.plan import Channel
from optcc.runtime.protocol.addresses import Addresses
from optcc.runtime.protocol.agreement import Shares
from optcc.runtime.protocol.channel import FIXED, RecvChannel, SendChannel
from optcc.runtime.protocol.connection import Broken, RecvConnection, SendConnection
from optcc.runtime.protocol.detour import Detours
from optcc.runtime.protocol.epochs import Epochs
from optcc.runtime.protocol.frames import (
    ADDRESS_FRAME,
    BACK_FRAME,
    BURST_FRAME,
    CHANNELS_MAX,
    DOUBT_FRAME,
    EPOCH_FRAME,
    GONE_FRAME,
    NEWS_FRAME,
    PADDING_FRAME,
    PROBE_FRAME,
    RATE_FRAME,
    TRIAL_FRAME,
    Checksum,
    WireError,
)
from optcc.runtime.protocol.handshake import Accepting, Dialing
from optcc.runtime.protocol.hello import NONCE_BYTES, RELAY, Hello, Listener
from optcc.runtime.protocol.inbound import Inbound
from optcc.runtime.protocol.leg import Leg
from optcc.runtime.protocol.liveness import WATCH_S, Connection
from optcc.runtime.protocol.local import Established, LocalRank
from optcc.runtime.protocol.membership import Membership
from optcc.runtime.protocol.outbound import Outbound
from optcc.runtime.protocol.rates import Rates
from optcc.runtime.protocol.relay import Onward, Relays
from optcc.runtime.protocol.reports import Reports
from optcc.runtime.protocol.sealing import SealedRecvConnection
from optcc.runtime.protocol.settings import NicEntry, Settings, differs
from optcc.runtime.protocol.striping import Striping
from optcc.runtime.protocol.suspicion import PROBE_S, Suspicion
from optcc.runtime.striping import divide_plan, least_of_hosts
from optcc.runtime.transport import ChannelNumbers
from optcc.runtime.transport import Event as TransportEvent

TICK_S = 0.1
_TICK_SHARE = 0.02
"""Of the time, at most, is spent on samples and ticks."""
_HALF_OPEN_SPARE = 16
CLOSE_S, LINGER_S = 1.0, 30.0
"""A rank that closes waits so long for peers to have all that they need of it: for one that cannot be reached, and for
one that is connected, or whose kernel answers, and that does not read."""
_CONFIRM_S = 1e-3
"""A probe is acknowledged within this time where nothing is wrong."""

Ends = tuple[Outbound, SendChannel] | tuple[Inbound, RecvChannel]


class Endpoint(LocalRank):
    """One rank's end of the network of a job; see `LocalRank` for its arguments.

    `outbounds` and `inbounds` are the directions to and from each peer; `accepting` are connections whose caller is not
    proved.
    """

    def __init__(
        self,
        settings: Settings,
        rank: int,
        book: Sequence[Sequence[NicEntry]],
        *,
        job: bytes,
        secret: bytes,
        draw: Callable[[int], bytes],
        checksum: Checksum | None = None,
        now_s: float = 0.0,
        insides: Sequence[NicEntry] = (),
    ) -> None:
        super().__init__(
            *(settings, rank, book),
            job=job,
            secret=secret,
            draw=draw,
            checksum=checksum,
            now_s=now_s,
            insides=insides,
        )
        self.outbounds: dict[int, Outbound] = {}
        self.inbounds: dict[int, Inbound] = {}
        self.reports = Reports(self, self.inbounds)
        self.suspicion = Suspicion(self)
        self.rates = Rates(self, self.outbounds)
        self.membership = Membership(self, self)
        self.epochs = Epochs(self, self.rates)
        self.detours = Detours(self, self.outbounds, self.rates, self.epochs.agreement)
        self.relays = Relays(self, self.suspicion, self.detours)
        self.addresses_told = Addresses(self, self.outbounds)
        self.accepting: dict[Accepting, None] = {}
        self._ticked_s, self._tick_s, self._probed_s = now_s, WATCH_S, now_s
        self._numbers = ChannelNumbers()
        self._handles: dict[tuple[int, int, int], int] = {}
        # The channels that start here, and those that end here, by handle.
        self._sends: dict[int, tuple[Outbound, SendChannel]] = {}
        self._receives: dict[int, tuple[Inbound, RecvChannel]] = {}
        # Whether ranks that share NICs send over those alone that belong to them.
        self.keeps_to_own = False
        # The NICs out of use at the last tick.
        self._down: set[tuple[int, int]] = set()
        # Whether the program says when it may not call again for long.
        self._is_settled = False
        self.leaving_s = 0.0
        # What the NICs carry in epoch 0.
        self.at_start: Shares = self.epochs.agreement.epoch.shares

    # --- the program

    def open(self, channels: Sequence[Channel], group: int = 0, carried: Sequence[int] = ()) -> list[int]:
        """See `Transport`. Rails to the destinations are dialled at the next tick."""
        handles: list[int] = []
        between: Counter[tuple[int, int]] = Counter()
        for channel, n_bytes in zip(channels, carried, strict=False):
            between[channel.src, channel.dst] += n_bytes
        stripings = self._stripings_for(between)
        n_ranks = len(self.book)
        for src, dst, k in self._numbers.take(channels, group):
            if not (0 <= src < n_ranks and 0 <= dst < n_ranks) or src == dst:
                raise InputError(f"channel {src}->{dst}: must join two ranks below {n_ranks}")
            if k >= CHANNELS_MAX:
                raise InputError(f"channel {src}->{dst} number {k}: must be below {CHANNELS_MAX}")
            if self.rank not in (src, dst):
                handles.append(-1)
                continue
            handle = self._handles.get((src, dst, k))
            if handle is None:
                handle = self._handles[src, dst, k] = len(self._handles)
                if src == self.rank:
                    outbound = self.outbound(dst)
                    self._sends[handle] = outbound, outbound.channel(k)
                else:
                    inbound = self.inbound(src)
                    self._receives[handle] = inbound, inbound.channel(k)
            direction, end = self._end(handle)
            end.handle, end.striping = handle, stripings.get((src, dst)) or direction.striping
            if src == self.rank:
                cut_for = self.n_agreed if (src, dst) in stripings else 0
                self._sends[handle][1].cut_for = FIXED if self.keeps_to_own and end.striping.is_fixed else cut_for
            handles.append(handle)
        return handles

    def open_over(self, channels: Sequence[Channel], rails: Sequence[int], group: int = 0) -> list[int]:
        """`open`, where each channel goes over one rail of its pair alone: the number in `pairs`, for each channel."""
        handles = self.open(channels, group)
        for channel, rail, handle in zip(channels, rails, handles, strict=True):
            if handle >= 0:
                self._end(handle)[1].striping = Striping.only(rail, len(self.pairs(channel.src, channel.dst)))
                if channel.src == self.rank:
                    self._sends[handle][1].cut_for = FIXED
        return handles

    def _end(self, handle: int) -> Ends:
        """This rank's end of a channel."""
        return self._sends[handle] if handle in self._sends else self._receives[handle]

    def set_rates(self, rates: Sequence[Sequence[tuple[int, int]]]) -> None:
        """By rank, what its NICs send and receive, bytes/s, in place of what was declared.

        It counts for channels that are opened from now on; every rank calls this with the same rates, before it opens
        another one. Raises InputError for a rate below 1.
        """
        for rank, (nics, pairs) in enumerate(zip(self.book, rates, strict=True)):
            for (name, *_), pair in zip(nics, pairs, strict=True):
                if min(pair) < 1:
                    raise InputError(f"NIC {name} of rank {rank}: {pair[0]} and {pair[1]} B/s: must be at least 1")
        self.book = [
            [(*nic[:3], *pair) for nic, pair in zip(nics, pairs, strict=True)]
            for nics, pairs in zip(self.book, rates, strict=True)
        ]
        self.own_nics = self.book[self.rank]
        self.rates.forget()

    def start_from(self, shares: Shares) -> None:
        """See `optcc.runtime.transport.KnowsRates`."""
        if min(chain.from_iterable(chain.from_iterable(shares))) > 0:
            return
        self.at_start = shares
        self.rates.start_from(shares)
        self.epochs.start_from(shares)
        self.stripe_for(shares)

    def know_shares(self, shares: Shares, took_s: float, *, is_told: bool) -> None:
        """See `optcc.runtime.transport.KnowsRates`."""
        self.rates.take_measured(shares[self.rank])
        self.epochs.take_measured(shares, took_s, is_told=is_told)

    def stripe_for(self, shares: Shares) -> None:
        """See `optcc.runtime.transport.Agrees`."""
        self.agreed = shares
        self.n_agreed += 1
        self.rates.divide_anew()

    def trust_shares(self, shares: Shares) -> None:
        """See `optcc.runtime.transport.KnowsRates`."""
        self.rates.take_measured(shares[self.rank])
        self.epochs.trust_rates()

    def sending(self, handle: int) -> tuple[Outbound, SendChannel]:
        """The channel that starts here, for a driver that posts on it again and again (`send_on`)."""
        return self._sends[handle]

    def receiving(self, handle: int) -> tuple[Inbound, RecvChannel]:
        """The channel that ends here, for a driver that posts on it again and again (`receive_on`)."""
        return self._receives[handle]

    def post_send(self, handle: int, view: memoryview) -> SendConnection | None:
        """Queues a message; returns a connection that is to be written at once, if there is just one."""
        return self.send_on(*self._sends[handle], view)

    def send_on(self, outbound: Outbound, channel: SendChannel, view: memoryview) -> SendConnection | None:
        """`post_send` on what `sending` has returned."""
        self.n_awaited += 1
        connection = outbound.post_eager(channel, view)
        if connection is None:
            outbound.post(channel, view)
        return connection

    def post_recv(self, handle: int, view: memoryview) -> bool:
        """Posts the slots of a message; True if something is to be written at once."""
        return self.receive_on(*self._receives[handle], view)

    def receive_on(self, inbound: Inbound, channel: RecvChannel, view: memoryview) -> bool:
        """`post_recv` on what `receiving` has returned."""
        self.n_awaited += 1
        if inbound.post_eager(channel, view):
            return False
        inbound.post(channel, view)
        return True

    def poll_events(self) -> list[TransportEvent]:
        """Takes `events`. A program that waits for no more of them may not call again for long, so reports that peers
        may wait for are released then."""
        events, self.events = self.events, []
        self.n_awaited -= len(events)
        if self.reports.is_owed and self.n_awaited <= 0 and not self._is_settled:
            self.reports.release_owed()
        return events

    def settle_later(self) -> None:
        """The program itself says when it may not call again for long; see `optcc.runtime.transport.Defers`."""
        self._is_settled = True

    def bye(self, connection: Established) -> bytes:
        """The last bytes on a connection; empty where they cannot be sent.

        The states of all channels come first, on each connection: those that were sent last may be lost with a rail,
        and nobody can ask again.
        """
        inbound = self.inbounds.get(connection.peer)
        states = b"" if inbound is None else inbound.final_states(connection.session)
        return connection.bye(self.failure is not None, states)

    def begin_leaving(self) -> None:
        """From now on `may_leave` counts how long this rank has waited.

        All connections are probed. One on which nothing was sent for a while may be lost at the other end, and the last
        states with it.
        """
        self.is_leaving = True
        self.epochs.leave()
        for peer in self.epochs.untold():
            self.outbound(peer)
        for connection in self.up if self.failure is None else ():
            connection.say(PROBE_FRAME, 0)
            connection.awaits = True
            self.wake(connection)
        self.look_within(_CONFIRM_S)

    def may_leave(self) -> bool:
        """True if `owes_nothing`, or if more waiting is in vain.

        A peer that computes is waited for up to `LINGER_S`, one that cannot be reached `CLOSE_S`, or `partition_s` if
        that is longer, in time that this rank has watched.
        """
        return not (self.is_needed() and self.leaving_s < LINGER_S) and not any(
            self.leaving_s < (LINGER_S if self._is_reached(peer) else self._absent_s(peer)) and self._owes(peer)
            for peer in self._peers()
        )

    def owes_nothing(self) -> bool:
        """True if nothing is lost when this rank closes its connections.

        Everything is written; the peers have acknowledged all messages, also eager ones, which a connection that is
        reset would take with it; and each peer has a connection on which its kernel has acknowledged everything, so
        that the last states reach it. Nobody needs this rank to pass on bytes.
        """
        return not self.is_needed() and not any(map(self._owes, self._peers()))

    def is_needed(self) -> bool:
        """True if others may need this rank to pass on bytes between them."""
        return self.relays.is_busy() or (bool(self.rates.down) and self.detours.is_needed())

    def _peers(self) -> set[int]:
        """The peers that have not left."""
        return (self.outbounds.keys() | self.inbounds.keys()) - self.left.keys()

    def _is_reached(self, peer: int) -> bool:
        """True if a peer is connected, or its kernel has answered lately: it computes, and will look again."""
        outbound = self.outbounds.get(peer)
        return bool(self.up_to(peer)) or (outbound is not None and outbound.dark_s < CLOSE_S)

    def _absent_s(self, peer: int) -> float:
        """How long a peer is waited for that cannot be reached. One that refuses connections has ended."""
        outbound = self.outbounds.get(peer)
        has_ended = outbound is not None and any(rail.refused for rail in outbound.direct)
        return CLOSE_S if has_ended else max(CLOSE_S, self.settings.partition_s)

    def absent(self) -> set[int]:
        """The peers that this rank waits for, and that no rail has reached for a while (`CLOSE_S`)."""
        inbounds = self.inbounds
        return {
            peer
            for peer, out in self.outbounds.items()
            if out.dark_s >= CLOSE_S
            and peer not in self.left
            and (out.has_work() or (peer in inbounds and inbounds[peer].has_work()))
        }

    def _owes(self, peer: int) -> bool:
        outbound, inbound, connections = self.outbounds.get(peer), self.inbounds.get(peer), self.up_to(peer)
        if any(connection.blocked for connection in connections) or (outbound is not None and outbound.has_work()):
            return True
        if peer in self.epochs.untold() and outbound is not None and not outbound.has_been_refused():
            return True
        was_joined = (outbound is not None and outbound.was_joined) or (inbound is not None and inbound.was_joined)
        return was_joined and all(self.is_leaving and each.awaits for each in connections)

    # --- what the driver is to do

    def has_to_write(self) -> bool:
        """True if `next_to_write` has something."""
        return bool(self.to_send or self.to_report)

    def next_to_write(self) -> Established | Leg | None:
        """The next connection that has something to write. Eager messages carry the reports to their peer."""
        if self.to_send:
            connection, _ = self.to_send.popitem()
            if connection.can_carry_reports():
                state = self.reports.attach(connection, self.now_s)
                if state is not None:
                    connection.report(*state)
            return connection
        return self.to_report.popitem()[0] if self.to_report else None

    def watched(self) -> list[Connection]:
        """The connections of which a tick wants a fresh sample."""
        watched: list[Connection] = []
        for outbound in self.outbounds.values():
            for rail in outbound.rails:
                if rail.connection is not None:
                    if rail.connection.awaits:
                        watched.append(rail.connection)
                elif rail.dialing is not None:
                    watched.append(rail.dialing)
        for inbound in self.inbounds.values():
            for connection in inbound.connections:
                if connection is not None and connection.awaits:
                    watched.append(connection)
        watched += [each for each in self.relays.legs if each.awaits]
        return watched

    def connections(self) -> list[Connection]:
        """All connections, in whatever state."""
        found: list[Connection] = [*self.accepting, *self.up, *self.relays.legs, *self.relays.onwards]
        for outbound in self.outbounds.values():
            found += [dialing for rail in outbound.rails for dialing in rail.dialings]
        return found

    # --- connections

    def connected(self, dialing: Dialing) -> bytes:
        """The transport below is connected: what to send."""
        if isinstance(dialing, Onward):
            dialing.established = True
        else:
            self.outbounds[dialing.peer].connected(dialing)
        return dialing.opening

    def dial_failed(self, dialing: Dialing, *, refused: bool) -> None:
        """A connection could not be opened; `refused` by the peer's kernel, or lost in its handshake."""
        if isinstance(dialing, Onward):
            self.relays.dial_failed(dialing)
        else:
            self.outbounds[dialing.peer].hang_up(dialing, refused=refused)

    def accepted(self, nic: int) -> Accepting:
        """Somebody has connected to a NIC of this rank, and has to say hello in time; the oldest gives way if there are
        too many."""
        if len(self.accepting) >= 2 * len(self.book) * len(self.own_nics) + _HALF_OPEN_SPARE:
            self._refuse(next(iter(self.accepting)))
        listener = Listener(self.secret, nonce=self.draw(NONCE_BYTES))
        accepting = Accepting(nic, listener, self.now_s + self.settings.hello_s)
        self.accepting[accepting] = None
        self.look_within(0.0)
        return accepting

    def received_hello(self, connection: Dialing | Accepting, data: bytes) -> tuple[bytes, Established | Leg | None]:
        """Bytes of a handshake, at most `connection.wanted`: what to send, and the connection that takes its place once
        the handshake is over."""
        if connection.is_closed:
            return b"", None
        try:
            if isinstance(connection, Onward):
                return b"", self.relays.answered(connection, data)
            if isinstance(connection, Dialing):
                reply, is_over = connection.take(data)
                return (b"", self._joined(connection, reply)) if is_over else (reply, None)
            reply, is_over = connection.take(data, lambda hello: self._check_hello(connection.nic, hello))
            if not is_over:
                return reply, None
            return reply, self._pass_on(connection) if connection.onward else self._join(connection)
        except WireError as error:
            self.broken(connection, str(error))
            return b"", None

    def _joined(self, dialing: Dialing, proof: bytes) -> SendConnection:
        """The peer has proved who it is, and the rail is up."""
        peer = dialing.peer
        connection = self.outbounds[peer].joined(dialing, proof)
        if peer in self.inbounds:
            self.inbounds[peer].repeat_gone(connection)
        self._greet(connection)
        return connection

    def _join(self, accepting: Accepting) -> RecvConnection:
        """The caller is a rank of this job, and its rail is up. Raises WireError for one that is set up otherwise."""
        hello = accepting.hello
        assert hello is not None
        ours, theirs = self.settings.authenticate, hello.authenticate
        if theirs != ours:
            # The proof covers what the hello says: it is the caller's, and nobody has changed it on the way.
            error = differs(hello.src, self.rank, "authenticate", theirs, ours)
            self.fail(error)
            raise WireError(str(error))
        del self.accepting[accepting]
        inbound = self.inbound(hello.src)
        count = self.rail_counts[accepting.nic]
        end = hello.src, hello.rail, accepting.session, count, self.checksum, inbound
        keys = accepting.keys
        connection = RecvConnection(*end) if keys is None else SealedRecvConnection(*end, keys)
        connection.wire, connection.nic, connection.kernel = accepting.wire, accepting.nic, accepting.kernel
        inbound.joined(connection)
        self._greet(connection)
        return connection

    def _greet(self, connection: Established) -> None:
        """A connection is up: the peer is told what was said before it was."""
        self.addresses_told.greet(connection)
        self.rates.tell(connection.peer)
        self._use_or_not(connection)
        self.membership.greet(connection)
        self.epochs.joined(connection)

    def _pass_on(self, accepting: Accepting) -> Leg:
        """The caller is a rank of this job, and wants to reach another one through this one. Raises WireError."""
        caller, hello = accepting.hello, Hello.read(accepting.onward)
        if caller is None or (hello.src, hello.job) != (caller.src, caller.job):
            raise WireError("hello to pass on: from somebody else")
        if hello.dst >= len(self.book) or hello.dst in (self.rank, hello.src):
            raise WireError(f"hello to pass on: to rank {hello.dst}")
        leg = self.relays.open(accepting, hello)
        if leg is None:
            raise WireError("hello to pass on: no rail leads there")
        del self.accepting[accepting]
        return leg

    def _check_hello(self, nic: int, hello: Hello) -> None:
        """Raises WireError for a caller that belongs elsewhere."""
        if hello.job != self.job or hello.dst != self.rank or hello.src == self.rank:
            raise WireError("hello: for another job or rank")
        if hello.src >= len(self.book):
            raise WireError(f"hello: from rank {hello.src} of {len(self.book)}")
        pairs = self.pairs(hello.src, self.rank)
        if len(self.book) > 2 and hello.rail in (RELAY, len(pairs)):
            return
        if hello.rail >= len(pairs) or pairs[hello.rail][1] != nic:
            raise WireError(f"hello: rail {hello.rail} does not end here")

    def _refuse(self, accepting: Accepting) -> None:
        self.counts.refused += 1
        self.accepting.pop(accepting, None)
        self.drop(accepting)

    def received(self, connection: SendConnection, data: bytes) -> None:
        """Bytes that were read from a connection to a receiver."""
        if connection.is_closed:
            return
        try:
            self.outbounds[connection.peer].received(connection, data)
        except Broken as error:
            self._note_controls(connection)
            self.outbounds[connection.peer].lose(connection, error)
        else:
            self._note_controls(connection)

    def filled(self, connection: RecvConnection | Leg, n_bytes: int) -> None:
        """So many bytes of `connection.buffers()` were read."""
        try:
            connection.received(n_bytes)
        except Broken as error:
            assert isinstance(connection, RecvConnection), "what is passed on is not read"
            self._note_controls(connection)
            self.inbounds[connection.peer].lose(connection, error)
        else:
            if connection.words or connection.left is not None:
                assert isinstance(connection, RecvConnection), "what is passed on is not read"
                self._note_controls(connection)

    def broken(self, connection: Connection, why: str) -> None:
        """A connection was closed or reset, in whatever state."""
        if connection.is_closed:
            return
        if isinstance(connection, (SendConnection, RecvConnection)):
            self._lose(connection, Broken(why, is_ended=True))
        elif isinstance(connection, Leg):
            self.relays.close(connection)
        elif isinstance(connection, Dialing):
            self.dial_failed(connection, refused=False)
        else:
            assert isinstance(connection, Accepting)
            self._refuse(connection)

    def _note_controls(self, connection: Established) -> None:
        if connection.left is not None:
            self.left[connection.peer] = connection.left
        if connection.words:
            words, connection.words = connection.words, []
            try:
                for kind, number in words:
                    if kind == NEWS_FRAME:
                        self.membership.take_word(connection, number)
                    else:
                        self._hear(connection.peer, kind, number)
            except Broken as error:
                self._lose(connection, error)

    # --- control frames

    def _hear(self, peer: int, kind: int, number: int) -> None:
        """Carries out a peer's control frame. Raises Broken for one that cannot be."""
        if kind == GONE_FRAME:
            self._lose_session(peer, number)
        elif kind == BACK_FRAME and peer in self.outbounds:
            self.outbounds[peer].dial_now(theirs=number)
        elif kind == ADDRESS_FRAME:
            self.addresses_told.hear(peer, number)
        elif kind == RATE_FRAME:
            self.rates.hear(peer, number)
        elif kind == EPOCH_FRAME:
            self.epochs.hear(number)
        elif kind == TRIAL_FRAME and self.rates.is_on:
            self.rates.trials.hear(peer, number)
        elif kind == PADDING_FRAME and self.rates.is_on:
            self.rates.trials.hear_padding(peer, number)
        elif kind == BURST_FRAME:
            self.epochs.readmissions.hear(peer, number)
        elif kind == DOUBT_FRAME:
            for connection in self.of_session(peer, number & 0xFFFFFFFF):
                if self.suspicion.hear(connection, number >> 32):
                    self._direction(connection).update_avoided()

    def _lose_session(self, peer: int, session: int) -> None:
        for connection in self.of_session(peer, session):
            self._lose(connection, Broken("given up at the other end"), is_known=True)
            self.suspicion.suspect_nic(connection.nic)

    def _lose(self, connection: Established, error: Broken, *, is_known: bool = False) -> None:
        if isinstance(connection, SendConnection):
            self.outbounds[connection.peer].lose(connection, error, is_known=is_known)
        else:
            self.inbounds[connection.peer].lose(connection, error, is_known=is_known)

    def _direction(self, connection: Established) -> Outbound | Inbound:
        if isinstance(connection, SendConnection):
            return self.outbounds[connection.peer]
        return self.inbounds[connection.peer]

    # --- NICs

    def _use_or_not(self, connection: Established) -> None:
        """Has a connection avoided as long as the NIC at one of its ends is out of use."""
        src, dst = (self.rank, connection.peer)[:: 1 if isinstance(connection, SendConnection) else -1]
        ends = self.pairs(src, dst)[connection.rail : connection.rail + 1]
        is_in_use = all(self.detours.may_be_up(src, mine, dst, theirs) for mine, theirs in ends)
        if self.suspicion.take_out_of_use(connection, is_out=not is_in_use):
            self._direction(connection).update_avoided()

    def nic_changed(self, nic: int, is_up: bool) -> None:
        """The kernel says that a NIC of this rank has gone down or come back."""
        self.nic_up[nic] = is_up
        self.note("NIC up" if is_up else "NIC down", "the kernel says so", nic=nic)
        for outbound in list(self.outbounds.values()):
            if is_up:
                outbound.dial_now(mine=nic)
            else:
                outbound.lose_nic(nic)
        for peer, inbound in list(self.inbounds.items()):
            if is_up:
                self.say(peer, BACK_FRAME, nic)
            else:
                inbound.lose_nic(nic)
        if not is_up:
            self.relays.lose_nic(nic)
        self.rates.note_nic(nic, is_up)

    def nic_moved(self, nic: int, address: str, port: int) -> None:
        """A NIC of this rank has another address, at which the driver listens, and from which it dials from now on."""
        was_up = self.nic_up[nic]
        if was_up:
            self.nic_changed(nic, False)
        self.addresses_told.move(nic, address, port)
        if was_up:
            self.nic_changed(nic, True)

    # --- time

    def tick(self) -> None:
        """All that depends on time: silent connections, late handshakes, redials, rates, and lost ranks."""
        now_s = self.now_s
        # Time that nobody has watched does not count: outside of the driver's loop, or while the process was stopped.
        elapsed_s = min(now_s - self._ticked_s, TICK_S)
        if self.is_leaving:
            self.leaving_s += elapsed_s
            for peer in self.epochs.untold():
                self.outbound(peer)
        watched_s = min(elapsed_s, 2 * self._tick_s)
        self._ticked_s = now_s
        self.watch_s = WATCH_S if self.accepting else TICK_S
        for accepting in list(self.accepting):
            if now_s >= accepting.deadline_s:
                self._refuse(accepting)
        for outbound in list(self.outbounds.values()):
            outbound.tick(elapsed_s, watched_s)
        for inbound in list(self.inbounds.values()):
            inbound.tick(watched_s)
        self.relays.tick(watched_s)
        if now_s >= self._probed_s + PROBE_S:
            self._probed_s = now_s
            for peer in self.outbounds.keys() | self.inbounds.keys():
                to, from_ = self.outbounds.get(peer), self.inbounds.get(peer)
                if (to is not None and to.has_work()) or (from_ is not None and from_.has_work()):
                    self.suspicion.probe_idle(peer)
        if self.rates.is_on:
            self.rates.look(now_s)
        self.epochs.tick()
        if self.rates.down != self._down:
            self._down = set(self.rates.down)
            for connection in list(self.up):
                self._use_or_not(connection)
        if not self.is_leaving:
            # Else whoever is connected passes on what is awaited, or that a rank is lost.
            for peer in self.awaited if not self.up else ():
                self.inbound(peer)
            self.membership.tick(elapsed_s)

    def ticked(self, spent_s: float) -> None:
        """A tick and its samples took so long: the next one follows accordingly."""
        self._tick_s = min(TICK_S, max(self.watch_s, spent_s / _TICK_SHARE))
        self.next_tick_s = self._ticked_s + self._tick_s

    # --- pairs of ranks

    def outbound(self, peer: int) -> Outbound:
        """The direction to a peer; a new one is dialled at the next tick."""
        if peer not in self.outbounds:
            self.outbounds[peer] = Outbound(self, peer, self.reports, self.suspicion, self.inbounds, self.detours)
            self.rates.divide_anew()
            self.look_within(0.0)
        return self.outbounds[peer]

    def inbound(self, peer: int) -> Inbound:
        """The direction from a peer, which dials it."""
        if peer not in self.inbounds:
            self.inbounds[peer] = Inbound(self, peer, self.reports, self.suspicion, self.outbound)
        return self.inbounds[peer]

    def _agreed_rates(self) -> list[list[tuple[int, int]]]:
        """By rank and NIC, bytes/s out and in: what the book says, in the shares that are agreed on; 0 for what is
        lost. Of a NIC that ranks share, the least that is agreed on for one of them."""
        rates = [[(out, in_) for *_, out, in_ in nics] for nics in self.book]
        for nics, shares in zip(rates, self.agreed, strict=False):
            nics[:] = [
                (max(1, round(out * share[0])), max(1, round(in_ * share[1]))) if min(share) > 0 else (0, 0)
                for (out, in_), share in zip(nics, shares, strict=True)
            ]
        return least_of_hosts(rates, self.hosts)

    def _stripings_for(self, carried: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], Striping]:
        """The stripings for a plan in which pairs carry so many bytes; pairs that keep their own are left out. Channels
        of which nothing is said are of no plan, and what the last one carries stays."""
        if not carried:
            return {}
        self.rates.carried = dict(carried)
        self.rates.divide_anew()
        rates = self._agreed_rates()
        rails = {pair: self._rails_for(pair, rates) for pair in carried if not self.is_inside(*pair)}
        joined = {pair: self.pairs(*pair) for pair in rails}
        able = [[(max(1, out), max(1, in_)) for out, in_ in nics] for nics in rates]
        parts_of = divide_plan(
            carried, {pair: [joined[pair][rail] for rail in each] for pair, each in rails.items()}, able, self.hosts
        )
        stripings: dict[tuple[int, int], Striping] = {}
        for (src, dst), used in rails.items():
            nics = joined[src, dst]
            parts = parts_of.get((src, dst))
            if parts is None:
                if len(used) == len(nics):
                    continue
                parts = tuple(min(able[src][nics[rail][0]][0], able[dst][nics[rail][1]][1]) for rail in used)
            part_of = dict(zip(used, parts, strict=True))
            stripings[src, dst] = Striping.among(
                [part_of.get(rail, 0) for rail in range(len(nics))], self.first_turn(src, dst)
            )
        return stripings

    def _rails_for(self, pair: tuple[int, int], rates: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
        """The rails that carry the messages of a plan: those of which neither NIC is agreed to be lost, and of these
        those of the sender's own NICs where it keeps to them; all that there are where none is left."""
        src, dst = pair
        nics = self.pairs(src, dst)
        left = [rail for rail, (mine, theirs) in enumerate(nics) if min(*rates[src][mine], *rates[dst][theirs]) > 0]
        left = left or list(range(len(nics)))
        owned = self.owned(src) if self.keeps_to_own else set()
        return [rail for rail in left if nics[rail][0] in owned] or left
