"""All data from this rank to one peer: the rails, which this rank dials, and the sending ends of the channels. No I/O.

Each channel executes the sender's rows of the failover table (`optcc.failover`). The rails of the table are *virtual*:
with several rails there are `RAILS_MAX` of them, and when a chunk goes out its virtual rail is mapped to the rail that
is to carry it (`SendChannel.rails`). That is how stripes of unequal rails, rates that change and avoided connections
leave the table as it was proved: it only hears which virtual rails are up.

One class, as mapping, dialling and suspicion read and change the same list of rails; one rail's part is in `rail`, the
choice among rails in `striping`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optcc.failover import (
    ACK,
    DATA,
    DOWN,
    FREE,
    NOWHERE,
    OFFER,
    REPLAN,
    SEND,
    SENDER_ROWS,
    TIMEOUT,
    UP,
    Event,
    Link,
    step,
)
from optcc.failover_cache import SenderCache
from optcc.runtime.protocol.arrival import Arrivals, is_uneven
from optcc.runtime.protocol.channel import FIXED, TIMEOUT_S, TIMEOUT_S_MAX, SendChannel, is_eager
from optcc.runtime.protocol.connection import Broken, Owner, SendConnection
from optcc.runtime.protocol.frames import CHANNELS_MAX, EARLY_CHUNKS_MAX, EXCHANGE, GONE_FRAME
from optcc.runtime.protocol.handshake import Dialing
from optcc.runtime.protocol.hello import NONCE_BYTES, RELAY, Caller, Hello
from optcc.runtime.protocol.liveness import CLOSE_WATCH_S, WATCH_S
from optcc.runtime.protocol.local import LocalRank
from optcc.runtime.protocol.rail import CONNECT_S, REDIAL_S_MAX, REDIAL_S_MIN, Opposite, PathFinder, Rail
from optcc.runtime.protocol.reports import Reports
from optcc.runtime.protocol.sealing import SealedSendConnection
from optcc.runtime.protocol.settings import RATE_MIN
from optcc.runtime.protocol.striping import Striping, cut
from optcc.runtime.protocol.suspicion import Suspicion, avoid
from optcc.runtime.transport import SENT

_TIMEOUT_LOOK_S = 0.1
_DIAL_WATCH_SHARE = 0.2
"""Of the time after which a connection that is being opened counts as silent: its samples are so far apart."""
_DETOUR = "detour"
_DETOUR_S, _DETOUR_FIRST_S, _DETOUR_DIAL_S, _ONWARD_S = 0.03, 0.5, 1.0, 0.5
"""A pair without a rail for so long looks for a path through other ranks: a rail that was reset is back sooner, and the
first connections wait for processes that start. The handshakes of a path may take so long; then another one is tried.
A rank that is asked to pass on bytes finds out within `_ONWARD_S` whether the next one's kernel answers."""


class Outbound:
    """The data of one direction of a pair, at its source.

    `direct` are the rails of the pair; behind them, `rails` has one that is a path through other ranks (`detour`), used
    while no direct one is. `dark_s` is for how long no rail has been joined, in time that this rank has watched;
    `was_joined`: one has been.
    """

    def __init__(
        self,
        local: LocalRank,
        peer: int,
        reports: Reports,
        suspicion: Suspicion,
        opposites: Mapping[int, Opposite],
        detours: PathFinder,
    ) -> None:
        self._local, self.peer = local, peer
        self._reports, self._suspicion, self._opposites, self._detours = reports, suspicion, opposites, detours
        self.direct = [
            Rail(local.entry(local.rank, mine)[0], mine, theirs, local.address(peer, theirs))
            for mine, theirs in local.pairs(local.rank, peer)
        ]
        self._detour = Rail(_DETOUR, -1, -1, ("", 0))
        self.rails = [*self.direct, self._detour] if len(local.book) > 2 else self.direct
        # For how long no direct rail has been up; whether the next path through other ranks is the first since.
        self._apart_s, self._is_first_detour = 0.0, True
        # The parts of the rails by measured rates; None: as declared, and as the messages are cut.
        self._parts: tuple[float, ...] | None = None
        self._credit = [0.0] * len(self.direct)
        # Whether those are the rates that all ranks have agreed on, for which newer messages are cut.
        self._is_agreed = False
        # When chunks arrive over each rail; None while their latencies are about equal.
        self._arrivals: Arrivals | None = None
        self._link = Link(self.striping.n_turns, local.settings.window)
        self._cache = SenderCache(self._link)
        self._channels: dict[int, SendChannel] = {}
        self.dark_s = self._looked_s = 0.0
        self.was_joined = False

    def channel(self, k: int) -> SendChannel:
        """The k-th channel to the peer; a new one is told which rails are down."""
        if k not in self._channels:
            channel = self._channels[k] = SendChannel(k, self._link, self.striping)
            for virtual, rail in enumerate(channel.rails):
                if not self._is_used(rail):
                    self._at_sender(channel, Event(DOWN, virtual))
            if channel.sender.stalled:
                self._remap(channel)
        return self._channels[k]

    @property
    def connections(self) -> list[SendConnection]:
        """The connections that are up."""
        return [rail.connection for rail in self.rails if rail.connection is not None]

    @property
    def striping(self) -> Striping:
        """How messages are striped by the rates that are declared now; a channel keeps that of its opening."""
        return self._local.striping(self._local.rank, self.peer)

    def has_work(self) -> bool:
        """True if something is posted and not acknowledged."""
        return any(channel.chunks for channel in self._channels.values())

    @property
    def is_direct(self) -> bool:
        """True if a rail of the pair is up."""
        return any(rail.connection is not None for rail in self.direct)

    @property
    def is_detoured(self) -> bool:
        """True if what goes to the peer goes through other ranks."""
        return self._detour.connection is not None

    def is_joined(self) -> bool:
        """True if the peer's kernel has answered on some rail and has not been given up since."""
        return self.is_detoured or any(
            rail.connection is not None or (rail.dialing is not None and rail.dialing.established)
            for rail in self.direct
        )

    def is_answered(self) -> bool:
        """True if no rail is up, and the kernel of the peer, or of a rank on the way to it, has answered alone.

        A rank on the way whose process has answered may be finding out that no rail leads on.
        """
        rail = self._detour
        is_tried = self._local.now_s - rail.since_s < _ONWARD_S and rail.dialing is not None and rail.dialing.n_answers
        dialings = [each.dialing for each in (self.direct if is_tried else self.rails) if each.dialing is not None]
        return not self.is_direct and any(dialing.established for dialing in dialings)

    def has_been_refused(self) -> bool:
        """True if no rail is up, and the peer's kernel has refused all connections that were tried."""
        return not self.is_joined() and all(rail.refused for rail in self.direct)

    # --- messages

    def post(self, channel: SendChannel, view: memoryview) -> None:
        """Queues a message."""
        pieces = cut(channel, len(view), self._local.settings.chunk_bytes)
        if is_eager(channel, view, pieces):
            channel.chunks.append((memoryview(bytes(view)), True, True, pieces[0].rail))
            channel.has_copies = True
        else:
            last = len(pieces) - 1
            for i, (start, end, rail) in enumerate(pieces):
                channel.chunks.append((view[start:end], i == last, False, rail))
        channel.posted += len(pieces)
        self._offer(channel)

    def post_eager(self, channel: SendChannel, view: memoryview) -> SendConnection | None:
        """`post` of an eager message on a channel and a connection where nothing waits.

        Returns the connection to write; or None, and nothing is changed.
        """
        state = channel.linked or channel.link(self._cache)
        if state is None:
            return None
        local, turns, acked = self._local, channel.striping.turns, channel.acked
        number, rail = acked + state.n_ahead, turns[channel.n_whole % len(turns)]
        connection = self.rails[rail].connection
        if connection is None or not connection.is_idle() or number != channel.posted:
            return None
        if self._arrivals is not None or self._divides(channel):
            return None
        has_slot = number < channel.slots
        if len(view) > local.eager_bytes or not (has_slot or (channel.slots and number - acked < EARLY_CHUNKS_MAX)):
            return None
        found = state.after_offer or state.offer()
        if found is None or channel.rails[found[1]] != rail:
            return None
        now_s = local.now_s
        if not state.out:
            channel.since_s, channel.timeout_s = now_s, TIMEOUT_S
        channel.linked = found[0]
        channel.n_whole += 1
        channel.posted = channel.highest = number + 1
        copy, chunks = bytes(view), channel.chunks
        # Messages are reported in order: this one now if all before it are, else after them.
        in_order = not chunks or (chunks[-1][2] and not chunks[-1][1])
        chunks.append((memoryview(copy), not (has_slot and in_order), True, rail))
        if has_slot and in_order:
            self._report(channel)
        else:
            channel.has_copies = True
        if local.next_tick_s > now_s + WATCH_S:
            local.next_tick_s = now_s + WATCH_S
        connection.put_eager(channel.k, number, channel.epoch, copy, self._reports.attach(connection, now_s))
        return connection

    def received(self, connection: SendConnection, data: bytes) -> None:
        """Bytes that have come on a connection. Raises Broken."""
        for k, epoch, number, slots in connection.received(data):
            self.take_state(k, epoch, number, slots)

    def take_state(self, k: int, epoch: int, number: int, slots: int) -> None:
        """The receiver's state of a channel. Raises Broken for one that cannot be."""
        channel = self._channels.get(k)
        if channel is not None and epoch == channel.epoch:
            state = channel.linked or channel.link(self._cache)
            n_freed = number - channel.acked
            if n_freed < 0:
                n_freed = 0
            after = None
            if state is not None and channel.acked + state.n_ahead == channel.posted:
                after = state.after_ack.get(n_freed) or state.acknowledge(n_freed)
            if after is not None:
                if slots > channel.slots:
                    channel.slots = slots
                if n_freed:
                    channel.linked, channel.acked = after, number
                    channel.since_s, channel.timeout_s = self._local.now_s, TIMEOUT_S
                    for _ in range(n_freed):
                        if channel.chunks.popleft()[1]:
                            self._report(channel)
                if channel.has_copies and after.out:
                    self._report_copies(channel)
                return
        if k != EXCHANGE and k >= CHANNELS_MAX:
            raise Broken(f"state of channel {k}", is_damage=True)
        channel = self.channel(k)
        channel.slots = max(channel.slots, slots)
        # The table does not depend on the rail of an acknowledgement.
        self._at_sender(channel, Event(ACK, 0, epoch, number))
        self._offer(channel)

    # --- the table

    def _offer(self, channel: SendChannel) -> None:
        """Offers the table the chunks that have slots, and a few eager ones ahead of their slots."""
        while True:
            sender = channel.sender
            offered, acked = sender.offered, sender.acked
            if offered >= channel.posted:
                return
            if offered >= channel.slots:
                # A peer that has reported slots has opened the channel.
                may_be_early = channel.has_copies and channel.slots and channel.chunks[offered - acked][2]
                if not may_be_early or offered - acked >= min(EARLY_CHUNKS_MAX, self._link.window):
                    return
            if len(self.rails) > 1 and not self._map_rail(channel, channel.chunks[offered - acked][3]):
                return
            self._at_sender(channel, Event(OFFER))

    def _map_rail(self, channel: SendChannel, rail: int) -> bool:
        """Maps the virtual rail of the next chunk to `rail`, or to another one if that is not used.

        False if a chunk, or the proposal of a plan, is out on that virtual rail over another rail: its answer calls
        `_offer` again.
        """
        sender = channel.sender
        virtual = sender.offered % self._link.n_rails
        is_taken = virtual in sender.out or (sender.changing and virtual == sender.asked)
        if self._arrivals is not None:
            rail = self._choose_soonest(channel, rail)
        elif self._divides(channel):
            if is_taken:
                return False
            rail = self._choose(len(channel.chunks[channel.sender.offered - channel.sender.acked][0]))
        if not self._is_used(rail):
            used = self._used()
            rail = used[channel.sender.offered % len(used)] if used else rail
        if channel.rails[virtual] == rail:
            return True
        if is_taken:
            return False
        channel.rails[virtual] = rail
        self._at_sender(channel, Event(UP if self._is_used(rail) else DOWN, virtual))
        return True

    def _at_sender(self, channel: SendChannel, event: Event) -> None:
        """Takes a step of the table and carries out its actions."""
        local = self._local
        # The retransmission timer runs from when something goes out, or is acknowledged.
        before = channel.sender
        restarts = not before.out
        sender, actions = step(SENDER_ROWS, self._link, before, event)
        channel.sender = sender
        for action in actions:
            if action.kind == FREE:
                restarts = True
                if channel.chunks.popleft()[1]:
                    self._report(channel)
            elif action.kind == SEND:
                connection = self.rails[channel.rails[action.rail]].connection
                if connection is None or connection.is_avoided:
                    # Another virtual rail of a lost connection, whose DOWN event comes next.
                    continue
                if action.message == DATA:
                    view = channel.chunks[action.number - sender.acked][0]
                    connection.put(channel, action.number, action.epoch, view)
                    self._count(connection, len(view))
                    if action.number < channel.highest:
                        local.counts.resent += 1
                    else:
                        channel.highest = action.number + 1
                else:
                    connection.put(channel, 0, action.epoch, None)
                local.wake(connection)
        if channel.has_copies:
            self._report_copies(channel)
        if restarts:
            channel.since_s, channel.timeout_s = local.now_s, TIMEOUT_S

    def _report(self, channel: SendChannel) -> None:
        channel.n_sent += 1
        if channel.handle >= 0:
            self._local.events.append((SENT, channel.handle))

    def _report_copies(self, channel: SendChannel) -> None:
        """Reports eager messages as sent, in order, once they have a slot and are out."""
        chunks, acked = channel.chunks, channel.acked
        out = channel.sender.out if channel.linked is None else channel.linked.out
        for i, virtual in enumerate(out):
            chunk, is_last, is_copy, rail = chunks[i]
            if is_last:
                if not is_copy or virtual == NOWHERE or acked + i >= channel.slots:
                    return
                chunks[i] = (chunk, False, True, rail)
                self._report(channel)
        channel.has_copies = len(chunks) > len(out)

    def _tell(self, channel: SendChannel, rail: int, kind: str) -> None:
        """Tells the table of all virtual rails that a rail stands for."""
        for virtual, its_rail in enumerate(channel.rails):
            if its_rail == rail:
                self._at_sender(channel, Event(kind, virtual))
        if channel.sender.stalled:
            self._remap(channel)

    def _remap(self, channel: SendChannel) -> None:
        """Maps the virtual rails of a stalled channel to rails that are used, if there are any.

        All virtual rails of a channel may stand for one rail, after the others were down or slow. When that one is lost
        nothing is out on them, and the chunks that wait would wait for that rail alone.
        """
        used = self._used()
        if used:
            self._map_all(channel, [used[virtual % len(used)] for virtual in range(len(channel.rails))])

    def _shift_rails(self, channel: SendChannel) -> None:
        """Maps each virtual rail to the used rail behind that of the virtual rail before it.

        What the table sends again on its next virtual rail then goes over another rail.
        """
        used = self._used()
        if used:
            before = channel.rails[-1:] + channel.rails[:-1]
            self._map_all(channel, [next((each for each in used if each > rail), used[0]) for rail in before])

    def _map_all(self, channel: SendChannel, rails: list[int]) -> None:
        """Maps the virtual rails, and tells the table which of them are up."""
        channel.rails = rails
        for virtual, rail in enumerate(rails):
            self._at_sender(channel, Event(UP if self._is_used(rail) else DOWN, virtual))

    # --- which rail

    def _is_used(self, rail: int) -> bool:
        """True if new chunks may go over a rail."""
        connection = self.rails[rail].connection
        return connection is not None and not connection.is_avoided

    def _used(self) -> list[int]:
        """The rails over which new chunks may go: the direct ones, if there are any."""
        used = [number for number in range(len(self.rails)) if self._is_used(number)]
        return used[:-1] if len(used) > 1 and self.rails[used[-1]] is self._detour else used

    def update_avoided(self) -> None:
        """Chunks that are out on a suspected connection go out elsewhere too; the second copy that comes is dropped."""
        for connection in avoid(self.connections):
            if connection.is_avoided:
                connection.take_back()
            for channel in list(self._channels.values()):
                self._tell(channel, connection.rail, DOWN if connection.is_avoided else UP)

    def _divides(self, channel: SendChannel) -> bool:
        """Whether chunks of a channel go where the measured rates say, and not as its messages are cut."""
        if self._parts is None or channel.cut_for == FIXED:
            return False
        return not self._is_agreed or channel.cut_for != self._local.n_agreed

    def _choose_soonest(self, channel: SendChannel, rail: int) -> int:
        """The rail over which the next chunk of a channel arrives first, of those that have a part of its messages; or
        `rail` if none of them is used."""
        assert self._arrivals is not None
        parts = channel.striping.parts
        used = [each for each in self._used() if each < len(parts) and parts[each]]
        n_bytes = len(channel.chunks[channel.sender.offered - channel.sender.acked][0])
        return self._arrivals.choose(used, n_bytes, self._local.now_s) if used else rail

    def _look_at_latencies(self) -> None:
        """Chunks are divided by when they arrive from now on, or as before, as the latencies of the rails are."""
        connections = [rail.connection for rail in self.direct]
        if not is_uneven(each for each in connections if each is not None):
            self._arrivals = None
            return
        if self._arrivals is None:
            self._arrivals = Arrivals(len(self.direct))
        local, peer = self._local, self.peer
        declared = [local.rail_rate(local.rank, each.mine, peer, each.theirs) for each in self.direct]
        rates: list[float] = [*declared]
        if self._parts is not None:
            # As parts, but so that none is faster than declared.
            unit = max(part / rate for part, rate in zip(self._parts, declared, strict=True))
            rates = [max(1.0, part / unit) for part in self._parts]
        self._arrivals.take(connections, rates, local.now_s, is_known=min(declared) >= RATE_MIN)

    def _choose(self, n_bytes: int) -> int:
        """The rail for so many bytes: the one over which they arrive first, or that is most behind with its part."""
        used = [each for each in self._used() if each < len(self.direct)]
        if self._arrivals is not None and used:
            return self._arrivals.choose(used, n_bytes, self._local.now_s)
        assert self._parts is not None
        self._credit = [credit + part * n_bytes for credit, part in zip(self._credit, self._parts, strict=True)]
        rail = self._credit.index(max(self._credit))
        self._credit[rail] -= n_bytes
        return rail

    def take_parts(self, parts: Sequence[float] | None, *, is_agreed: bool = False) -> None:
        """From now on the rails carry these parts of the data, or None: those that are declared. If all ranks have
        agreed on these rates, channels that were opened since keep to how their messages are cut.

        Chunks of others that wait for a socket are divided anew at once.
        """
        if parts is None and self._parts is None:
            return
        self._is_agreed = is_agreed
        total = sum(parts or ())
        self._parts = None if parts is None else tuple(part / total for part in parts)
        self._credit = [0.0] * len(self.direct)
        connections = self.connections
        for connection in connections:
            self._hold_little(connection)
        if self._parts is None:
            return
        for connection in connections:
            waiting = connection.take_back()
            self._count(connection, -sum(len(view) for *_, view in waiting if view is not None))
            for owner, number, epoch, view in waiting:
                to = connection
                # A chunk of a former plan decides nothing about the rail of the one that has replaced it.
                if view is not None and not owner.is_stale(number, epoch) and self._may_move(owner):
                    to = self._move(owner, number, connection, self._choose(len(view)))
                to.put(owner, number, epoch, view)
                self._count(to, 0 if view is None else len(view))
                self._local.wake(to)

    def _may_move(self, owner: Owner) -> bool:
        return not isinstance(owner, SendChannel) or self._divides(owner)

    def _count(self, connection: SendConnection, n_bytes: int) -> None:
        """So many bytes more wait on a connection."""
        if self._arrivals is not None:
            self._arrivals.add(connection.rail, n_bytes, self._local.now_s)

    def _hold_little(self, connection: SendConnection) -> None:
        """On slow rails the kernel buffers little, so that chunks can still be moved to another rail."""
        is_direct = connection.rail < len(self.direct)
        parts = None if self._is_agreed else self._parts
        holds_little = parts is not None and is_direct and parts[connection.rail] < max(parts)
        if holds_little != connection.holds_little:
            connection.holds_little = holds_little
            self._local.to_limit.append(connection)

    def _move(self, owner: Owner, number: int, connection: SendConnection, rail: int) -> SendConnection:
        """Where a chunk waits that waits on `connection`: on `rail` if its virtual rail can be mapped there."""
        assert isinstance(owner, SendChannel)
        sender, other = owner.sender, self.rails[rail].connection
        is_out = 0 <= number - sender.acked < len(sender.out)
        if other is None or other is connection or not self._is_used(rail) or not is_out:
            return connection
        virtual = sender.out[number - sender.acked]
        if virtual == NOWHERE or owner.rails[virtual] != connection.rail or sender.out.count(virtual) > 1:
            return connection
        owner.rails[virtual] = rail
        return other

    # --- connections

    def lose(self, connection: SendConnection, error: Broken, *, is_known: bool = False) -> None:
        """A connection is given up: what was out on it goes out elsewhere, and the rail is dialled again.

        The peer is told over the other connections, unless it `is_known` there.
        """
        local = self._local
        rail = self.rails[connection.rail]
        local.drop(connection)
        if rail.connection is not connection:
            return
        rail.connection = None
        local.counts.damaged += error.is_damage
        local.rail_counts[rail.mine].failures += self.peer not in local.left and rail is not self._detour
        local.note("left" if self.peer in local.left else "lost", str(error), self.peer, rail.mine)
        if error.is_ended and local.now_s - rail.since_s > REDIAL_S_MAX:
            # The path carries packets, and the connection had lasted: it may have been the only thing that failed.
            rail.refused = False
            rail.wait_no_longer()
            local.look_within(0.0)
        else:
            self._dial_later(rail, refused=False)
        self.update_avoided()
        for channel in list(self._channels.values()):
            self._tell(channel, connection.rail, DOWN)
            # Before its first slot is known, the peer may not have opened the channel, and nothing was sent.
            if local.settings.replan and channel.sender.offered and self.peer not in local.left:
                self._at_sender(channel, Event(REPLAN))
        opposite = self._opposites.get(self.peer)
        if opposite is not None:
            opposite.repeat_states()
        if not is_known:
            local.say(self.peer, GONE_FRAME, connection.session)

    def lose_nic(self, nic: int) -> None:
        """A NIC of this rank is down, and with it all connections over it."""
        for rail in self.rails:
            if rail.mine == nic and rail.connection is not None:
                self.lose(rail.connection, Broken("its NIC is down"))
            elif rail.mine == nic:
                self._hang_up_all(rail)

    def dial_now(self, *, mine: int | None = None, theirs: int | None = None) -> None:
        """Dials rails that are down, over a NIC of this rank or of the peer that may be up again."""
        for rail in self.rails:
            if rail.connection is None and (rail.mine == mine or rail.theirs == theirs):
                if rail.dialing is not None and not rail.dialing.established:
                    self.hang_up(rail.dialing, refused=False)
                rail.wait_no_longer()
                self._local.look_within(0.0)

    def dial_anew(self) -> None:
        """Dials all rails that are down: the kernel repeats a SYN that was lost after a second or more only."""
        for rail in self.direct:
            self.dial_now(mine=rail.mine)

    def take_address(self, theirs: int, address: tuple[str, int]) -> None:
        """The peer's NIC `theirs` is at another address: what goes to the former one is given up, and it is dialled."""
        for rail in self.direct:
            if rail.theirs != theirs:
                continue
            rail.address = address
            if rail.connection is not None:
                self.lose(rail.connection, Broken("its address has changed"))
            else:
                self._hang_up_all(rail)
        self.dial_now(theirs=theirs)

    def _dial_later(self, rail: Rail, *, refused: bool, was_silent: bool = False) -> None:
        """After a failure: the next try, at growing intervals."""
        local = self._local
        rail.wait(local.now_s, refused=refused, was_silent=was_silent)
        wait_s = max(CLOSE_WATCH_S, rail.next_s - local.now_s)
        local.look_within(wait_s)
        local.watch_within(wait_s)

    def _dial(self, rail: Rail, number: int) -> None:
        local = self._local
        rail.since_s = local.now_s
        rail.dialing = Dialing(self.peer, number, rail.mine, rail.address, [self._caller(self.peer, number)])
        local.to_dial.append(rail.dialing)

    def _caller(self, rank: int, rail: int) -> Caller:
        local = self._local
        hello = Hello(local.rank, rank, rail, local.job, authenticate=local.settings.authenticate)
        return Caller(local.secret, hello, nonce=local.draw(NONCE_BYTES))

    def _dial_detour(self) -> None:
        """Dials the peer through other ranks, if a path is known."""
        rail, found = self._detour, self._detours.find(self.peer, is_first=self._is_first_detour)
        self._is_first_detour = False
        if found is None:
            self._dial_later(rail, refused=False)
            return
        rail.mine, rail.address = found.mine, found.address
        rail.since_s, number = self._local.now_s, len(self.direct)
        callers = [*(self._caller(rank, RELAY) for rank in found.via), self._caller(self.peer, number)]
        rail.dialing = Dialing(self.peer, number, rail.mine, rail.address, callers)
        self._local.to_dial.append(rail.dialing)

    def connected(self, dialing: Dialing) -> None:
        """The peer's kernel has answered."""
        useless = self.rails[dialing.rail].connected(dialing, self._local.now_s)
        if useless is not None:
            self._local.drop(useless)

    def hang_up(self, dialing: Dialing, *, refused: bool, was_silent: bool = False) -> None:
        """A connection that is being opened is given up; `was_silent`: the peer's kernel has not answered in time."""
        rail = self.rails[dialing.rail]
        self._local.drop(dialing)
        if rail.dialing is dialing:
            rail.dialing = None
            self._dial_later(rail, refused=refused, was_silent=was_silent)
        elif rail.patient is dialing:
            rail.patient = None

    def _hang_up_all(self, rail: Rail) -> None:
        for dialing in rail.dialings:
            self.hang_up(dialing, refused=False)

    def _wait_beside(self, rail: Rail) -> None:
        """The connect that was not answered soon is waited for while others follow it."""
        rail.patient, rail.patient_since_s, rail.dialing = rail.dialing, rail.since_s, None
        self._dial_later(rail, refused=False, was_silent=True)

    def joined(self, dialing: Dialing, proof: bytes) -> SendConnection:
        """The handshake is over, but for sending the proof: the rail is up."""
        local, rail = self._local, self.rails[dialing.rail]
        count = local.rail_counts[rail.mine]
        end = self.peer, dialing.rail, dialing.session, count, local.checksum
        keys = dialing.keys
        connection = SendConnection(*end) if keys is None else SealedSendConnection(*end, keys)
        connection.wire, connection.nic, connection.kernel = dialing.wire, rail.mine, dialing.kernel
        local.up[connection] = None
        if rail is not self._detour:
            connection.queue_s = local.queue_s(rail.mine, self.peer, rail.theirs)
        connection.put_frame(proof)
        rail.dialing, rail.connection, rail.refused, rail.wait_s = None, connection, False, REDIAL_S_MIN
        self.was_joined = True
        self._hold_little(connection)
        self._look_at_latencies()
        local.counts.detours += rail is self._detour
        local.note("up", "detour" if rail is self._detour else "", self.peer, rail.mine)
        for channel in list(self._channels.values()):
            # Also remaps a channel all of whose virtual rails stand for others that are lost.
            self._tell(channel, dialing.rail, UP)
        self.update_avoided()
        local.wake(connection)
        if rail is not self._detour:
            self._end_detour()
        return connection

    def _end_detour(self) -> None:
        """A rail of the pair is up again: what was out on the path through other ranks goes there."""
        connection, dialing = self._detour.connection, self._detour.dialing
        if connection is not None:
            self.lose(connection, Broken("a rail of the pair is back"))
        elif dialing is not None:
            self.hang_up(dialing, refused=False)

    # --- time

    def tick(self, elapsed_s: float, watched_s: float) -> None:
        """Dials, gives up what is silent, and sends again what has waited long.

        `elapsed_s` since the last call, `watched_s` of it without a break.
        """
        local = self._local
        is_gone = self.peer in local.left
        is_joined = is_sampled = False
        for number, rail in enumerate(self.direct):
            connection, dialing = rail.connection, rail.dialing
            if rail.patient is not None and local.now_s - rail.patient_since_s > CONNECT_S:
                self.hang_up(rail.patient, refused=False)
            if connection is not None:
                is_joined = True
                if connection.awaits:
                    is_sampled = True
                    self._suspicion.judge(connection, watched_s, self)
            elif dialing is not None:
                # The answer to a hello may never come, though its bytes were acknowledged before the path broke.
                limit_s = local.settings.hello_s if dialing.established else CONNECT_S
                is_late = local.now_s - rail.since_s > limit_s
                limit_s = max(local.settings.silent_s, 2 * rail.connected_in_s, 2 * rail.wait_s)
                is_joined |= dialing.established
                is_silent = is_late or dialing.is_silent(watched_s, limit_s)
                if is_silent and rail.patient is None and not (is_late or dialing.established):
                    self._wait_beside(rail)
                elif is_silent:
                    self.hang_up(dialing, refused=False, was_silent=not dialing.established)
                else:
                    local.watch_within(max(CLOSE_WATCH_S, _DIAL_WATCH_SHARE * limit_s))
            elif not is_gone and local.nic_up[rail.mine]:
                if local.now_s >= rail.next_s:
                    self._dial(rail, number)
                local.watch_within(max(CLOSE_WATCH_S, rail.next_s - local.now_s))
        if len(self.direct) > 1 and (is_sampled or self._arrivals is not None):
            self._look_at_latencies()
        self._apart_s = 0.0 if self.is_direct else self._apart_s + elapsed_s
        self._tick_detour(watched_s, is_gone=is_gone)
        if is_joined or self.is_detoured:
            self.dark_s = 0.0
        elif len(self.rails) == len(self.direct) or local.is_leaving or self._waits_in_vain():
            self.dark_s += elapsed_s
        if local.now_s >= self._looked_s + _TIMEOUT_LOOK_S:
            self._looked_s = local.now_s
            self._send_late_again()

    def _tick_detour(self, watched_s: float, *, is_gone: bool) -> None:
        """Looks for a path through other ranks while something waits and no rail is up."""
        rail, local = self._detour, self._local
        self._is_first_detour |= not self._apart_s
        limit_s = _DETOUR_S if self.was_joined else _DETOUR_FIRST_S
        if rail.connection is not None:
            self._is_first_detour = True
            if rail.connection.awaits:
                self._suspicion.judge(rail.connection, watched_s, self)
        elif rail.dialing is not None:
            if local.now_s - rail.since_s > _DETOUR_DIAL_S:
                self.hang_up(rail.dialing, refused=False)
            else:
                local.watch_within(WATCH_S)
        elif self._apart_s >= limit_s and len(self.rails) > len(self.direct) and self._is_wanted() and not is_gone:
            if local.now_s >= rail.next_s:
                self._dial_detour()
            local.watch_within(max(CLOSE_WATCH_S, rail.next_s - local.now_s))

    def _waits_in_vain(self) -> bool:
        """True if a path through other ranks was looked for, and does not just wait for one that computes."""
        return self._is_wanted() and not self._detours.may_come(self.peer)

    def _is_wanted(self) -> bool:
        """True if this rank waits for the peer."""
        opposite = self._opposites.get(self.peer)
        return self.has_work() or (opposite is not None and opposite.has_work())

    def _send_late_again(self) -> None:
        """Chunks that have waited long for their acknowledgement go out again."""
        now_s = self._local.now_s
        for channel in self._channels.values():
            if now_s - channel.since_s >= channel.timeout_s and (channel.sender.out or channel.sender.changing):
                channel.since_s = now_s
                # A chunk that still waits for a full socket is not lost, and must not be queued twice.
                if not any(connection.holds(channel) for connection in self.connections):
                    channel.timeout_s = min(2 * channel.timeout_s, TIMEOUT_S_MAX)
                    self._shift_rails(channel)
                    self._at_sender(channel, Event(TIMEOUT))
