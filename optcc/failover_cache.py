"""Memoised transitions of the failover table, for the events of a healthy channel.

A healthy channel takes the same few transitions again and again, at other chunk numbers. Each cache asks
`optcc.failover.step` once for each, with the numbers shifted to the start, and remembers the answer; it has no rules of
its own. Where a transition does anything else, a cache answers None and its owner asks the table itself.
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
    Actions,
    Event,
    Link,
    Receiver,
    Sender,
    step,
)

_CACHE_MAX = 1 << 14


class SenderCache:
    """`step` of a sender for the events of a healthy channel, memoised.

    The table depends on chunk numbers only through differences and, in `Link.share`, through the number modulo
    n_rails, or n_rails times the number of rails that are up if some are down. `tests/property/test_failover_cache.py`
    holds this to `step`.

    >>> link = Link(n_rails=2, window=2)
    >>> cache = SenderCache(link)
    >>> state, rail = cache.offer(link.sender())
    >>> state.out, rail
    ((0,), 0)
    >>> cache.acknowledge(state, 0, 1).acked
    1
    """

    __slots__ = ("_acks", "_all_up", "_link", "_offers")

    def __init__(self, link: Link) -> None:
        self._link, self._all_up = link, (1 << link.n_rails) - 1
        self._offers: dict[tuple[int, tuple[int, ...], int, int], tuple[tuple[int, ...], int] | None] = {}
        self._acks: dict[tuple[int, tuple[int, ...], int, int, int], tuple[int, tuple[int, ...]] | None] = {}

    def offer(self, state: Sender) -> tuple[Sender, int] | None:
        """The state after OFFER and the rail of the new chunk, if sending it is the only action; else None."""
        up, out, acked, offered = state.up, state.out, state.acked, state.offered
        if state.changing or not up:
            return None
        period = self._link.n_rails if up == self._all_up else self._link.n_rails * up.bit_count()
        key = up, out, offered - acked, acked % period
        try:
            found = self._offers[key]
        except KeyError:
            found = self._offers[key] = self._ask_offer(*key)
        if found is None:
            return None
        return Sender(up, state.epoch, state.start, offered + 1, acked, found[0]), found[1]

    def acknowledge(self, state: Sender, epoch: int, number: int) -> Sender | None:
        """The state after an ACK if freeing chunks is all that it causes; else None."""
        up, out, acked, offered = state.up, state.out, state.acked, state.offered
        if state.changing or not up or epoch != state.epoch:
            return None
        if number <= acked:
            number = acked
        elif number > offered:
            return None
        period = self._link.n_rails if up == self._all_up else self._link.n_rails * up.bit_count()
        key = up, out, offered - acked, number - acked, acked % period
        try:
            found = self._acks[key]
        except KeyError:
            found = self._acks[key] = self._ask_ack(*key)
        if found is None:
            return None
        return Sender(up, epoch, state.start, offered, acked + found[0], found[1]) if found[0] else state

    def _ask_offer(self, up: int, out: tuple[int, ...], ahead: int, base: int) -> tuple[tuple[int, ...], int] | None:
        if len(self._offers) >= _CACHE_MAX:
            self._offers.clear()
        state = Sender(up, offered=base + ahead, acked=base, out=out)
        after, actions = step(SENDER_ROWS, self._link, state, Event(OFFER))
        if len(actions) == 1 and actions[0].message == DATA and actions[0].number == base + ahead:
            return after.out, actions[0].rail
        return None

    def _ask_ack(
        self, up: int, out: tuple[int, ...], ahead: int, n_freed: int, base: int
    ) -> tuple[int, tuple[int, ...]] | None:
        if len(self._acks) >= _CACHE_MAX:
            self._acks.clear()
        state = Sender(up, offered=base + ahead, acked=base, out=out)
        after, actions = step(SENDER_ROWS, self._link, state, Event(ACK, 0, 0, base + n_freed))
        return (after.acked - base, after.out) if all(action.kind == FREE for action in actions) else None


class ReceiverCache:
    """`step` of a receiver for the events of a healthy channel, memoised; see `SenderCache`.

    Both methods return the state after the event, which has delivered one chunk or none, and the rail of the
    acknowledgement, or NOWHERE for none; or None if there are other actions.

    >>> link = Link(n_rails=2, window=2)
    >>> cache = ReceiverCache(link)
    >>> state, rail = cache.slot(link.receiver())
    >>> state.offered, rail
    (1, -1)
    >>> state, rail = cache.chunk(state, rail=1, epoch=0, number=0)
    >>> state.delivered, rail
    (1, 1)
    """

    __slots__ = ("_chunks", "_link", "_slots")

    def __init__(self, link: Link) -> None:
        self._link = link
        self._slots: dict[tuple[int, int, int, int], tuple[int, int, int] | None] = {}
        self._chunks: dict[tuple[int, int, int, int, int], tuple[int, int, int] | None] = {}

    def slot(self, state: Receiver) -> tuple[Receiver, int] | None:
        """OFFER: a slot is posted."""
        delivered, offered = state.delivered, state.offered
        key = state.up, state.held, offered - delivered, delivered % self._link.n_rails
        try:
            found = self._slots[key]
        except KeyError:
            found = self._slots[key] = self._ask_slot(*key)
        if found is None:
            return None
        return Receiver(state.up, state.epoch, state.start, offered + 1, delivered + found[0], found[1]), found[2]

    def chunk(self, state: Receiver, rail: int, epoch: int, number: int) -> tuple[Receiver, int] | None:
        """DATA: chunk `number` of `epoch` has arrived on `rail`, and is to be kept."""
        delivered, offered = state.delivered, state.offered
        if epoch != state.epoch or number < delivered:
            return None
        key = state.up, state.held, offered - delivered, number - delivered, rail
        try:
            found = self._chunks[key]
        except KeyError:
            found = self._chunks[key] = self._ask_chunk(*key)
        if found is None:
            return None
        return Receiver(state.up, epoch, state.start, offered, delivered + found[0], found[1]), found[2]

    def _ask_slot(self, up: int, held: int, ahead: int, base: int) -> tuple[int, int, int] | None:
        if len(self._slots) >= _CACHE_MAX:
            self._slots.clear()
        state = Receiver(up, offered=base + ahead, delivered=base, held=held)
        return _one_delivery(base, *step(RECEIVER_ROWS, self._link, state, Event(OFFER)))

    def _ask_chunk(self, up: int, held: int, slots: int, ahead: int, rail: int) -> tuple[int, int, int] | None:
        if len(self._chunks) >= _CACHE_MAX:
            self._chunks.clear()
        # The offset keeps `offered` from being negative where chunks came before their slots.
        base = RAILS_MAX * self._link.n_rails
        state = Receiver(up, offered=base + slots, delivered=base, held=held)
        after, actions = step(RECEIVER_ROWS, self._link, state, Event(DATA, rail, 0, base + ahead))
        if not actions or actions[0].kind != KEEP:
            return None
        return _one_delivery(base, after, actions[1:])


def _one_delivery(base: int, after: Receiver, actions: Actions) -> tuple[int, int, int] | None:
    """(chunks delivered, chunks kept, rail of the ACK) if the actions are at most one delivery and its ACK."""
    if [action.kind for action in actions] not in ([], [DELIVER, SEND]):
        return None
    return after.delivered - base, after.held, actions[1].rail if actions else NOWHERE
