"""Linked states of the failover table, for the events of a healthy channel.

A healthy channel takes the same few transitions again and again, at other chunk numbers. A linked state stands for all
states of an end that differ in their epoch and by a shift of the chunk numbers, and links to those that follow: what
`optcc.failover.step` says is asked once for each link and remembered; there are no rules here. Where an event causes
anything else than sending one new chunk, freeing chunks, or delivering one chunk, there is no link, and the owner of
the state asks the table itself.
"""

from __future__ import annotations

from optcc.failover import (
    ACK,
    DATA,
    DELIVER,
    FREE,
    KEEP,
    NOWHERE,
    OFFER,
    RAILS_MAX,
    RECEIVER_ROWS,
    SEND,
    SENDER_ROWS,
    Action,
    Actions,
    Event,
    Link,
    Receiver,
    Sender,
    step,
)

_CACHE_MAX = 1 << 14


class LinkedSender:
    """States of a sender with rails up and no change under way: `n_ahead` chunks are offered and not acknowledged.

    `after_offer` and `after_ack` are the links that are known; `offer` and `acknowledge` ask the table for the others.
    """

    __slots__ = ("_base", "_cache", "after_ack", "after_offer", "n_ahead", "out", "up")

    def __init__(self, cache: SenderCache, up: int, out: tuple[int, ...], n_ahead: int, base: int) -> None:
        self._cache, self._base = cache, base
        self.up, self.out, self.n_ahead = up, out, n_ahead
        self.after_offer: tuple[LinkedSender, int] | None = None
        # By the number of chunks that are freed.
        self.after_ack: dict[int, LinkedSender] = {}

    def state(self, epoch: int, start: int, acked: int) -> Sender:
        """The one of these states in which the chunks below `acked` are acknowledged."""
        return Sender(self.up, epoch, start, acked + self.n_ahead, acked, self.out)

    def offer(self) -> tuple[LinkedSender, int] | None:
        """The state after OFFER and the rail of the new chunk, if sending it on its own rail is the only action."""
        link, number = self._cache.link, self._base + self.n_ahead
        after, actions = step(SENDER_ROWS, link, self.state(0, 0, self._base), Event(OFFER))
        if actions != (Action(SEND, DATA, number % link.n_rails, 0, number),):
            return None
        found = self._cache.find(after)
        assert found is not None
        self.after_offer = found, actions[0].rail
        return self.after_offer

    def acknowledge(self, n_freed: int) -> LinkedSender | None:
        """The state after an ACK of this epoch that frees so many chunks, if that is all that it causes."""
        if n_freed > self.n_ahead:
            return None
        event = Event(ACK, 0, 0, self._base + n_freed)
        after, actions = step(SENDER_ROWS, self._cache.link, self.state(0, 0, self._base), event)
        found = self._cache.find(after)
        if found is None or any(action.kind != FREE for action in actions) or len(actions) != n_freed:
            return None
        self.after_ack[n_freed] = found
        return found


class SenderCache:
    """The linked states of the senders of one pair of ranks.

    The table depends on chunk numbers only through differences and, in `Link.share`, through the number modulo
    n_rails, or n_rails times the number of rails that are up if some are down. `tests/property/test_failover_cache.py`
    holds the links to `step`.

    >>> link = Link(n_rails=2, window=2)
    >>> first = SenderCache(link).find(link.sender())
    >>> state, rail = first.offer()
    >>> state.out, rail
    ((0,), 0)
    >>> state.acknowledge(1).out, state.acknowledge(1) is state.after_ack[1]
    ((), True)
    """

    __slots__ = ("_known", "link")

    def __init__(self, link: Link) -> None:
        self.link = link
        self._known: dict[tuple[int, tuple[int, ...], int, int], LinkedSender] = {}

    def find(self, state: Sender) -> LinkedSender | None:
        """What stands for a state; None if no rail is up, or a change is under way."""
        if state.changing or not state.up:
            return None
        n_rails, n_up = self.link.n_rails, state.up.bit_count()
        base = state.acked % (n_rails if n_up == n_rails else n_rails * n_up)
        key = state.up, state.out, state.offered - state.acked, base
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _CACHE_MAX:
                self._known.clear()
            found = self._known[key] = LinkedSender(self, *key)
        return found


class LinkedReceiver:
    """States of a receiver that has `n_slots` slots more than it has delivered chunks.

    `after_slot` and `after_chunk` are the links that are known; `slot` and `chunk` ask the table for the others. Each
    has the state after the event, whether one chunk was delivered, and the rail of its acknowledgement. `reports_on`
    is the rail on which a state is reported unasked, NOWHERE if none is up.
    """

    __slots__ = ("_base", "_cache", "after_chunk", "after_slot", "held", "n_slots", "reports_on", "up")

    def __init__(self, cache: ReceiverCache, up: int, held: int, n_slots: int, base: int) -> None:
        self._cache, self._base = cache, base
        self.up, self.held, self.n_slots = up, held, n_slots
        self.reports_on = cache.link.pick(up, base)
        self.after_slot: tuple[LinkedReceiver, bool, int] | None = None
        # By the rail on which the next chunk comes.
        self.after_chunk: dict[int, tuple[LinkedReceiver, bool, int]] = {}

    def state(self, epoch: int, start: int, delivered: int) -> Receiver:
        """The one of these states in which the chunks below `delivered` are delivered."""
        return Receiver(self.up, epoch, start, delivered + self.n_slots, delivered, self.held)

    def slot(self) -> tuple[LinkedReceiver, bool, int] | None:
        """After OFFER, if it causes nothing or one delivery."""
        # The offset keeps `offered` from being negative where chunks came before their slots.
        base = self._base + RAILS_MAX * self._cache.link.n_rails
        found = self._one_delivery(*step(RECEIVER_ROWS, self._cache.link, self.state(0, 0, base), Event(OFFER)))
        self.after_slot = found
        return found

    def chunk(self, rail: int) -> tuple[LinkedReceiver, bool, int] | None:
        """After the next chunk, in this epoch, on a rail that is up, if it is kept, or kept and delivered, and no more.

        None where chunks are held already.
        """
        if self.held or not self.up >> rail & 1:
            return None
        base = self._base + RAILS_MAX * self._cache.link.n_rails
        event = Event(DATA, rail, 0, base)
        after, actions = step(RECEIVER_ROWS, self._cache.link, self.state(0, 0, base), event)
        if not actions or actions[0] != Action(KEEP, number=base):
            return None
        found = self._one_delivery(after, actions[1:])
        if found is not None:
            self.after_chunk[rail] = found
        return found

    def _one_delivery(self, after: Receiver, actions: Actions) -> tuple[LinkedReceiver, bool, int] | None:
        """The link, if the actions are at most one delivery and its ACK."""
        if [action.kind for action in actions] not in ([], [DELIVER, SEND]):
            return None
        return self._cache.find(after), bool(actions), actions[1].rail if actions else NOWHERE


class ReceiverCache:
    """The linked states of the receivers of one pair of ranks; see `SenderCache`.

    >>> link = Link(n_rails=2, window=2)
    >>> state, is_delivered, rail = ReceiverCache(link).find(link.receiver()).slot()
    >>> state.n_slots, is_delivered, rail
    (1, False, -1)
    >>> state, is_delivered, rail = state.chunk(rail=1)
    >>> state.n_slots, is_delivered, rail
    (0, True, 1)
    """

    __slots__ = ("_known", "link")

    def __init__(self, link: Link) -> None:
        self.link = link
        self._known: dict[tuple[int, int, int, int], LinkedReceiver] = {}

    def find(self, state: Receiver) -> LinkedReceiver:
        """What stands for a state."""
        key = state.up, state.held, state.offered - state.delivered, state.delivered % self.link.n_rails
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _CACHE_MAX:
                self._known.clear()
            found = self._known[key] = LinkedReceiver(self, *key)
        return found
