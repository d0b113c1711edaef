"""All data from one peer to this rank: the connections that it opens, and the receiving ends of the channels. No I/O.

Each channel executes the receiver's rows of the failover table. The receiver tells the sender for how many chunks it
has posted slots, and a chunk is sent only then: it is read from the wire into its slot. There are two exceptions. A few
eager messages may come before their slots. And a chunk that comes over a second rail while it is still coming over a
first goes beside the slot, for either connection may break; the first copy that is complete counts, and what is left of
the other is discarded: a slot that was delivered is never written again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from optcc.errors import MismatchError
from optcc.failover import (
    CHANGE,
    DATA,
    DELIVER,
    DOWN,
    FORGET,
    OFFER,
    RECEIVER_ROWS,
    SEND,
    UP,
    Event,
    Link,
    is_fresh,
    step,
)
from optcc.failover_cache import ReceiverCache
from optcc.runtime.protocol.arrival import is_uneven, one_way_s
from optcc.runtime.protocol.channel import RecvChannel, is_eager
from optcc.runtime.protocol.connection import Broken, RecvConnection
from optcc.runtime.protocol.frames import EAGER_BYTES, EARLY_CHUNKS_MAX, GONE_FRAME, State, state_header
from optcc.runtime.protocol.local import Established, LocalRank
from optcc.runtime.protocol.reports import ReportHistory, Reports
from optcc.runtime.protocol.striping import Striping, cut
from optcc.runtime.protocol.suspicion import Suspicion, avoid
from optcc.runtime.transport import RECEIVED

_DARK_S = 1.0
"""A peer that is waited for, and that should dial, is dialled after this time without a rail."""


class StateReader(Protocol):
    """The opposite direction of a pair (`Outbound`)."""

    def take_state(self, k: int, epoch: int, number: int, slots: int) -> None:
        """The receiver's state of a channel. Raises Broken for one that cannot be."""
        ...


class Inbound:
    """The data of one direction of a pair, at its destination.

    `connections` are those that are up, by rail. `was_joined`: a rail has been up.
    """

    def __init__(
        self,
        local: LocalRank,
        peer: int,
        reports: Reports,
        suspicion: Suspicion,
        opposite: Callable[[int], StateReader],
    ) -> None:
        self._local, self.peer = local, peer
        self._reports, self._suspicion, self._opposite = reports, suspicion, opposite
        # See `Reader`; each short message brings a report.
        self.report: Callable[[int, int, int, int], None] = self._find_outbound
        pairs = local.pairs(peer, local.rank)
        self._queue_s = [local.queue_s(mine, peer, theirs) for theirs, mine in pairs]
        # Behind those over the rails of the pair, the one that comes through other ranks (`detour`).
        self.connections: list[RecvConnection | None] = [None] * (len(pairs) + (len(local.book) > 2))
        striping = self.striping
        # Virtual rails stand for the same rail as long as one of the pair is up: the sender's mapping does not matter
        # here.
        self._rails = self._turns = striping.turns
        self._link = Link(striping.n_turns, local.settings.window)
        self._cache = ReceiverCache(self._link)
        self._channels: dict[int, RecvChannel] = {}
        self.history = ReportHistory()
        # The nearest connection, over which states are reported, if their latencies differ.
        self._nearest: RecvConnection | None = None
        # By rail, the session of a connection that was given up here and not replaced since.
        self._gone: dict[int, int] = {}
        self.was_joined = False
        # Seconds for which no rail has been joined, in time that this rank has watched.
        self._dark_s = 0.0

    def channel(self, k: int) -> RecvChannel:
        """The k-th channel from the peer; a new one is told which rails are down."""
        if k not in self._channels:
            channel = self._channels[k] = RecvChannel(k, self._link, self.striping)
            for virtual, rail in enumerate(self._rails):
                connection = self.connections[rail]
                if connection is None or connection.is_avoided:
                    self._at_receiver(channel, Event(DOWN, virtual))
        return self._channels[k]

    @property
    def striping(self) -> Striping:
        """How messages are striped by the rates that are declared now; a channel keeps that of its opening."""
        return self._local.striping(self.peer, self._local.rank)

    def has_work(self) -> bool:
        """True if something is posted and has not come, or a word about epochs has not."""
        return any(channel.slots for channel in self._channels.values()) or self.peer in self._local.awaited

    def is_joined(self) -> bool:
        """True if a connection is up."""
        return any(self.connections)

    # --- messages

    def post(self, channel: RecvChannel, view: memoryview) -> None:
        """Posts the slots of a message, and reports them to the sender."""
        pieces = cut(channel, len(view), self._local.settings.chunk_bytes)
        eager = is_eager(channel, view, pieces)
        for i, (start, end, _) in enumerate(pieces):
            number = channel.delivered + len(channel.slots)
            channel.slots.append((view[start:end], i == len(pieces) - 1, eager))
            if number in channel.early:
                chunk = channel.early.pop(number)
                if len(chunk) != end - start:
                    self._local.fail(self._mismatch(len(chunk), end - start))
                    return
                view[start:end] = chunk
            self._at_receiver(channel, Event(OFFER))
        channel.posted += len(pieces)
        self._tell_slots(channel, can_wait=eager)

    def post_eager(self, channel: RecvChannel, view: memoryview) -> bool:
        """`post` of an eager message, which may have come already; or False, and nothing is changed."""
        state = channel.linked or channel.link(self._cache)
        found = state.after_slot or state.slot()
        n_bytes = len(view)
        if found is None or n_bytes > self._local.eager_bytes:
            return False
        after, is_here, virtual = found
        number = channel.delivered
        # An early chunk that is not the next one may be the one for this slot.
        if state.n_slots if is_here else channel.early:
            return False
        if is_here and len(channel.early[number]) != n_bytes:
            return False
        channel.linked = after
        channel.n_whole += 1
        channel.posted += 1
        if not is_here:
            channel.slots.append((view, True, True))
            connection = self._to_report(after.reports_on)
            if connection is not None:
                connection.states[channel.k] = None
                self._reports.deferred[connection] = self
            return True
        channel.delivered = number + 1
        view[:] = channel.early.pop(number)
        self._note_delivery(channel, True)
        # The acknowledgement of the chunk reports the slot as well.
        self._say(virtual, channel, can_wait=True)
        return True

    def _note_delivery(self, channel: RecvChannel, is_last: bool) -> None:
        """A chunk was delivered; with the last one of a message, the message was."""
        if is_last:
            channel.n_received += 1
            if channel.handle >= 0:
                self._local.events.append((RECEIVED, channel.handle))
        if channel.delivered > channel.told:
            # It counts as sent once its slot is reported.
            self._reports.is_owed = True

    def _mismatch(self, sent_bytes: int, expected_bytes: int) -> MismatchError:
        pair = f"{self.peer}->{self._local.rank}"
        return MismatchError(f"channel {pair}: {sent_bytes} B sent, {expected_bytes} B expected")

    # --- reports

    @property
    def owes_report(self) -> bool:
        """True if a message was delivered whose slot the sender does not know of: there it does not count as sent."""
        return any(channel.delivered > channel.told for channel in self._channels.values())

    def repeat_states(self) -> None:
        """Reports all states again: some went over a connection of the opposite direction, and were lost with it."""
        for channel in self._channels.values():
            self._tell_slots(channel)

    def state_of(self, k: int) -> State:
        """The state of a channel, to be reported now."""
        channel = self._channels[k]
        channel.told = channel.posted
        return k, channel.epoch, channel.delivered, channel.posted

    def final_states(self, session: int) -> bytes:
        """The states of all channels, encoded for a connection."""
        return b"".join(
            state_header(session, channel.epoch, k, channel.delivered, channel.posted)
            for k, channel in self._channels.items()
        )

    def _tell_slots(self, channel: RecvChannel, *, can_wait: bool = False) -> None:
        """Reports a state over the rail whose turn it is, or the next that is up."""
        self._say(channel.link(self._cache).reports_on, channel, can_wait=can_wait)

    def _say(self, virtual: int, channel: RecvChannel, *, can_wait: bool = False) -> None:
        """Reports the state of a channel over the connection of a virtual rail, if there is one.

        If it `can_wait`, with a message to the peer or when this rank waits.
        """
        connection = self._to_report(virtual)
        if connection is not None:
            connection.states[channel.k] = None
            if can_wait:
                self._reports.deferred[connection] = self
            else:
                self._local.wake(connection)

    def _to_report(self, virtual: int) -> RecvConnection | None:
        """The connection that reports what the table has reported over a virtual rail.

        Any may: whichever is lost or avoided, all states are reported again.
        """
        if virtual < 0:
            return None
        return self._nearest or self.connections[self._rails[virtual]]

    def _look_at_latencies(self) -> None:
        """Which connection is the nearest, of those over the rails of the pair that are used."""
        direct = self.connections[: len(self._queue_s)]
        used = [each for each in direct if each is not None and not each.is_avoided]
        if not is_uneven(used):
            self._nearest = None
            return
        known = {each: latency_s for each in used if (latency_s := one_way_s(each)) is not None}
        self._nearest = min(known, key=known.__getitem__)

    # --- the table

    def _at_receiver(self, channel: RecvChannel, event: Event) -> None:
        """Takes a step of the table and carries out its actions."""
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
        self._local.counts.changes += channel.receiver.epoch - epoch

    def _tell(self, channel: RecvChannel, rail: int, kind: str) -> None:
        for virtual, its_rail in enumerate(self._rails):
            if its_rail == rail:
                self._at_receiver(channel, Event(kind, virtual))

    def _end(self, k: int) -> RecvChannel:
        if k not in self._channels:
            raise Broken(f"channel {k} is not open", is_damage=True)
        return self._channels[k]

    # --- Reader

    def begin(
        self, connection: RecvConnection, epoch: int, channel: int, number: int, length: int
    ) -> memoryview | None:
        """See `Reader`."""
        end = self._end(channel)
        event = Event(DATA, connection.virtual, epoch, number)
        if not is_fresh(self._link, end.receiver, event):
            self._local.counts.suppressed += 1
            self._at_receiver(end, event)
            return None
        ahead = number - end.delivered
        if ahead >= len(end.slots):
            if length > EAGER_BYTES or ahead >= EARLY_CHUNKS_MAX:
                raise Broken(f"chunk {number} without a slot", is_damage=True)
            return memoryview(bytearray(length))
        slot = end.slots[ahead][0]
        if len(slot) != length:
            error = self._mismatch(length, len(slot))
            self._local.fail(error)
            raise Broken(str(error), is_damage=True)
        if number in end.arriving:
            # It is also coming elsewhere, and either connection may break: this copy goes beside the slot.
            return memoryview(bytearray(length))
        end.arriving[number] = connection
        return slot

    def take_eager(self, connection: RecvConnection, epoch: int, channel: int, number: int, chunk: memoryview) -> bool:
        """See `Reader`."""
        end = self._channels.get(channel)
        if end is None or number != end.delivered or epoch != end.epoch or end.arriving or len(chunk) > EAGER_BYTES:
            return False
        state, rail = end.linked or end.link(self._cache), connection.virtual
        found = state.after_chunk.get(rail) or state.chunk(rail)
        if found is None:
            return False
        after, is_delivered, virtual = found
        if not is_delivered:
            end.linked = after
            end.early[number] = memoryview(bytes(chunk))
            return True
        view, is_last, can_wait = end.slots[0]
        if len(view) != len(chunk):
            return False
        view[:] = chunk
        end.linked, end.delivered = after, number + 1
        end.slots.popleft()
        self._note_delivery(end, is_last)
        if can_wait and virtual == rail and self._nearest is None:
            connection.states[channel] = None
            self._reports.deferred[connection] = self
        else:
            self._say(virtual, end, can_wait=can_wait)
        return True

    def wants(self, epoch: int, channel: int, number: int) -> bool:
        """See `Reader`."""
        return is_fresh(self._link, self._channels[channel].receiver, Event(DATA, 0, epoch, number))

    def discard(self, connection: RecvConnection, channel: int, number: int) -> None:
        """See `Reader`. A copy of a later epoch may come over the same connection, beside the slot."""
        end = self._channels[channel]
        if end.arriving.get(number) is connection:
            del end.arriving[number]

    def complete(self, connection: RecvConnection, epoch: int, channel: int, number: int, chunk: memoryview) -> None:
        """See `Reader`."""
        end = self._channels[channel]
        event = Event(DATA, connection.virtual, epoch, number)
        if end.arriving.get(number) is connection:
            del end.arriving[number]
        elif is_fresh(self._link, end.receiver, event):
            other = end.arriving.pop(number, None)
            if other is not None:
                other.turn_away()
            ahead = number - end.delivered
            if ahead >= len(end.slots):
                end.early[number] = chunk
            elif len(chunk) != len(end.slots[ahead][0]):
                self._local.fail(self._mismatch(len(chunk), len(end.slots[ahead][0])))
                return
            else:
                end.slots[ahead][0][:] = chunk
        self._at_receiver(end, event)

    def change(self, connection: RecvConnection, epoch: int, channel: int) -> None:
        """See `Reader`."""
        self._at_receiver(self._end(channel), Event(CHANGE, connection.virtual, epoch))

    def _find_outbound(self, channel: int, epoch: int, number: int, slots: int) -> None:
        """See `Reader.report`, which from now on is the opposite direction's."""
        self.report = self._opposite(self.peer).take_state
        self.report(channel, epoch, number, slots)

    # --- connections

    def joined(self, connection: RecvConnection) -> None:
        """A rail is up: a new connection, which replaces one that this end may still hold."""
        former = self.connections[connection.rail]
        if former is not None:
            self.lose(former, Broken("replaced"))
        self.connections[connection.rail] = connection
        if connection.rail < len(self._queue_s):
            connection.virtual = self._turns.index(connection.rail)
            connection.queue_s = self._queue_s[connection.rail]
        self._local.up[connection] = None
        self.was_joined = True
        self._look_at_latencies()
        self._gone.pop(connection.rail, None)
        self.repeat_gone(connection)
        self._map_rails()
        for channel in list(self._channels.values()):
            # If no other rail was up, the table repeats the state of the channel.
            self._tell(channel, connection.rail, UP)
        self.update_avoided()

    def _map_rails(self) -> None:
        """All virtual rails stand for the path through other ranks while nothing else is up, or it is suspected."""
        n_direct = len(self._queue_s)
        is_used = [each is not None and not each.is_avoided for each in self.connections]
        is_apart = any(is_used[n_direct:]) and not any(is_used[:n_direct])
        rails = (n_direct,) * len(self._turns) if is_apart else self._turns
        if rails == self._rails:
            return
        self._rails = rails
        for channel in list(self._channels.values()):
            for virtual, rail in enumerate(rails):
                self._at_receiver(channel, Event(UP if is_used[rail] else DOWN, virtual))

    def update_avoided(self) -> None:
        """States that were last reported over a suspected connection are reported again elsewhere."""
        has_changed = False
        for connection in avoid([each for each in self.connections if each is not None]):
            has_changed = True
            self._look_at_latencies()
            for channel in list(self._channels.values()):
                self._tell(channel, connection.rail, DOWN if connection.is_avoided else UP)
        if has_changed:
            self._map_rails()
            self.repeat_states()

    def lose_nic(self, nic: int) -> None:
        """A NIC of this rank is down, and with it all connections over it."""
        for connection in list(self.connections):
            if connection is not None and connection.nic == nic:
                self.lose(connection, Broken("its NIC is down"))

    def lose(self, connection: RecvConnection, error: Broken, *, is_known: bool = False) -> None:
        """A connection is given up. The peer dials again if it is there; if no rail is left, this rank dials the peer.

        The peer is told over the other connections, unless it `is_known` there.
        """
        local = self._local
        local.drop(connection)
        self._reports.forget(connection)
        if self.connections[connection.rail] is not connection:
            return
        self.connections[connection.rail] = None
        self._look_at_latencies()
        local.counts.damaged += error.is_damage
        local.note("left" if self.peer in local.left else "lost", str(error), self.peer, connection.nic)
        self.update_avoided()
        for channel in list(self._channels.values()):
            for number in [number for number, each in channel.arriving.items() if each is connection]:
                del channel.arriving[number]
            self._tell(channel, connection.rail, DOWN)
            self._tell_slots(channel)
        self._map_rails()
        if not self.is_joined():
            self._opposite(self.peer)
        if not is_known:
            self._gone[connection.rail] = connection.session
            local.say(self.peer, GONE_FRAME, connection.session)
        local.look_within(0.0)

    def repeat_gone(self, connection: Established) -> None:
        """Tells the peer, over a new connection, which ones were given up here.

        If there was no other connection at that time, and the peer has nothing left to send on the lost one, nothing
        else tells it: its bytes were acknowledged by this rank's kernel before the connection was closed.
        """
        for session in self._gone.values():
            connection.say(GONE_FRAME, session)
            self._local.wake(connection)

    def tick(self, watched_s: float) -> None:
        """Gives up what is silent; dials a peer that is waited for and has not done so for long.

        Else nobody would find out that no rail reaches it.
        """
        self._dark_s = 0.0 if self.is_joined() else self._dark_s + watched_s
        if self._dark_s >= _DARK_S and self.has_work() and self.peer not in self._local.left:
            self._opposite(self.peer)
        is_sampled = False
        for connection in self.connections:
            if connection is not None and connection.awaits:
                is_sampled = True
                self._suspicion.judge(connection, watched_s, self)
        if is_sampled and len(self._queue_s) > 1:
            self._look_at_latencies()
