"""The linked states of the failover table against `step`, over random walks of both ends.

Whenever there is a link, the state behind it is that of the table, and the actions of the table are just those that the
link stands for; whenever the actions are of that form, there is a link. Linked states see chunk numbers only through
differences and remainders, so those of one cache serve walks that begin at 0 and far from it.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from optcc import failover_cache
from optcc.failover import (
    ACK,
    DATA,
    DELIVER,
    DOWN,
    FREE,
    KEEP,
    NOWHERE,
    OFFER,
    RECEIVER_EVENTS,
    RECEIVER_ROWS,
    REPLAN,
    SEND,
    SENDER_EVENTS,
    SENDER_ROWS,
    UP,
    Action,
    Actions,
    Event,
    Link,
    Receiver,
    Sender,
    step,
)
from optcc.failover_cache import LinkedSender, ReceiverCache, SenderCache

STARTS = (0, 1, 29, (1 << 40) + 7, (1 << 63) - 3)
RAILS, WINDOWS = (1, 2, 3, 4, 16), range(1, 9)


def up_masks(rng: random.Random, n_rails: int) -> int:
    """Which rails are up at the beginning of a walk: all, as a rule."""
    full = (1 << n_rails) - 1
    return full if rng.random() < 0.5 else rng.randrange(1, full + 1)


def sender_event(rng: random.Random, link: Link, state: Sender) -> Event:
    """Mostly the events of a healthy channel; else any event, near the numbers of the state."""
    epoch = rng.choice((state.epoch, state.epoch, state.epoch, state.epoch + 1, max(0, state.epoch - 1)))
    number = max(0, rng.choice((state.acked - 1, state.acked, state.acked + 1, state.sent, state.sent + 1)))
    if rng.random() < 0.1:
        kind = rng.choice((*SENDER_EVENTS, DOWN, UP, UP))
        return Event(kind, rng.randrange(link.n_rails), epoch, number)
    wants_more = state.offered < state.acked + link.window + rng.randrange(2)
    answer = Event(ACK, 0, state.epoch + state.changing, number)
    return rng.choice((Event(OFFER) if wants_more else answer, answer))


def receiver_event(rng: random.Random, link: Link, state: Receiver) -> Event:
    """Mostly the events of a healthy channel; else any event, near the numbers of the state."""
    epoch = rng.choice((state.epoch, state.epoch, state.epoch, state.epoch + 1, max(0, state.epoch - 1)))
    rail = rng.randrange(link.n_rails)
    if rng.random() < 0.1:
        kind = rng.choice((*RECEIVER_EVENTS, DOWN, UP, UP))
        return Event(kind, rail, epoch, max(0, state.delivered + rng.randrange(-2, link.window + 2)))
    data = Event(DATA, rail, state.epoch, max(0, state.delivered + rng.choice((-1, 0, 0, 0, 0, 1, 2))))
    return rng.choice((Event(OFFER) if state.offered < state.delivered + 3 else data, data))


def shown(state: LinkedSender, like: Sender, acked: int) -> Sender:
    """The state that a linked state stands for."""
    return state.state(like.epoch, like.start, acked)


def check_offer(link: Link, cache: SenderCache, state: Sender, after: Sender, actions: Actions) -> str:
    """Holds the link for OFFER to what the table says; what kind of answer it was."""
    linked = cache.find(state)
    found = None if linked is None else linked.after_offer or linked.offer()
    own = state.offered % link.n_rails
    if linked is None or found is None:
        assert actions != (Action(SEND, DATA, own, state.epoch, state.offered),), actions
        return "no offer"
    assert shown(linked, state, state.acked) == state
    assert shown(found[0], state, state.acked) == after
    assert actions == (Action(SEND, DATA, found[1], state.epoch, state.offered),)
    assert found[1] == own == link.share(state.up, state.offered)
    return "offer"


def check_ack(cache: SenderCache, state: Sender, event: Event, after: Sender, actions: Actions) -> str:
    """As `check_offer`, for an ACK of this epoch; its number may be an old one."""
    linked, n_freed = cache.find(state), max(0, event.number - state.acked)
    if linked is None or event.epoch != state.epoch:
        assert state.changing or not state.up or event.epoch != state.epoch
        return "no ack"
    found = linked.after_ack.get(n_freed) or linked.acknowledge(n_freed)
    if found is None:
        is_free = len(actions) == n_freed and all(action.kind == FREE for action in actions)
        assert not is_free, actions
        return "no ack"
    assert shown(found, state, state.acked + n_freed) == after
    assert actions == tuple(Action(FREE, number=number) for number in range(state.acked, after.acked))
    if not actions:
        assert found is linked, "the very object: there is nothing new"
        return "old ack"
    return "ack"


def delivery(before: Receiver, is_delivered: bool, rail: int) -> Actions:
    """The actions that a link stands for, but for keeping the chunk."""
    if not is_delivered:
        assert rail == NOWHERE
        return ()
    number = before.delivered
    return Action(DELIVER, number=number), Action(SEND, ACK, rail, before.epoch, number + 1)


def check_slot(cache: ReceiverCache, state: Receiver, after: Receiver, actions: Actions) -> str:
    """As `check_offer`, for the receiver's OFFER."""
    linked = cache.find(state)
    assert linked.state(state.epoch, state.start, state.delivered) == state
    assert linked.reports_on == cache.link.pick(state.up, state.delivered % cache.link.n_rails)
    found = linked.after_slot or linked.slot()
    if found is None:
        assert [action.kind for action in actions] not in ([], [DELIVER, SEND]), actions
        return "no slot"
    assert found[0].state(state.epoch, state.start, state.delivered + found[1]) == after
    assert actions == delivery(state, *found[1:])
    return "kept slot" if actions else "slot"


def check_chunk(cache: ReceiverCache, state: Receiver, event: Event, after: Receiver, actions: Actions) -> str:
    """As `check_offer`, for the next chunk in this epoch."""
    linked = cache.find(state)
    found = linked.after_chunk.get(event.rail) or linked.chunk(event.rail)
    if found is None:
        is_simple = [action.kind for action in actions] in ([KEEP], [KEEP, DELIVER, SEND])
        assert state.held or not state.up >> event.rail & 1 or not is_simple, actions
        return "no chunk"
    assert found[0].state(state.epoch, state.start, state.delivered + found[1]) == after
    assert actions == (Action(KEEP, number=event.number), *delivery(state, *found[1:]))
    return "chunk" if len(actions) > 1 else "early chunk"


def walk_sender(rng: random.Random, link: Link, cache: SenderCache, start: int, n_steps: int) -> Counter[str]:
    """A sender whose next chunk is `start`, through so many events; how often the cache answered what."""
    seen = Counter[str]()
    state = Sender(up_masks(rng, link.n_rails), rng.randrange(3), start, start, start)
    for _ in range(n_steps):
        event = sender_event(rng, link, state)
        after, actions = step(SENDER_ROWS, link, state, event)
        if event.kind == OFFER:
            seen[check_offer(link, cache, state, after, actions)] += 1
        elif event.kind == ACK:
            seen[check_ack(cache, state, event, after, actions)] += 1
        state = after
    return seen


def walk_receiver(rng: random.Random, link: Link, cache: ReceiverCache, start: int, n_steps: int) -> Counter[str]:
    """A receiver whose next chunk is `start`, as `walk_sender`."""
    seen = Counter[str]()
    state = Receiver(up_masks(rng, link.n_rails), rng.randrange(3), start, start, start)
    for _ in range(n_steps):
        event = receiver_event(rng, link, state)
        after, actions = step(RECEIVER_ROWS, link, state, event)
        if event.kind == OFFER:
            seen[check_slot(cache, state, after, actions)] += 1
        elif event.kind == DATA and event.epoch == state.epoch and event.number == state.delivered:
            seen[check_chunk(cache, state, event, after, actions)] += 1
        state = after
    return seen


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("n_rails", RAILS)
def test_an_answer_of_the_senders_cache_is_that_of_the_table(n_rails: int, window: int, seed: int) -> None:
    link, rng = Link(n_rails, window), random.Random(seed)
    cache, seen = SenderCache(link), Counter[str]()
    for start in STARTS * 2:
        seen += walk_sender(rng, link, cache, start, 200)
    assert min(seen[kind] for kind in ("offer", "no offer", "ack", "old ack", "no ack")) > 10, seen


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("n_rails", RAILS)
def test_an_answer_of_the_receivers_cache_is_that_of_the_table(n_rails: int, window: int, seed: int) -> None:
    link, rng = Link(n_rails, window), random.Random(seed)
    cache, seen = ReceiverCache(link), Counter[str]()
    for start in STARTS * 2:
        seen += walk_receiver(rng, link, cache, start, 200)
    assert min(seen[kind] for kind in ("slot", "kept slot", "chunk", "early chunk", "no chunk")) > 10, seen


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("n_rails", RAILS)
@pytest.mark.parametrize("start", STARTS)
def test_a_healthy_channel_asks_the_table_a_bounded_number_of_times(
    n_rails: int, window: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step of a channel on which all goes well is answered, and after a period of the numbers from memory."""
    asked = [0]

    def counted(*args: Any) -> Any:
        asked[0] += 1
        return step(*args)

    monkeypatch.setattr(failover_cache, "step", counted)
    link = Link(n_rails, window)
    senders, receivers = SenderCache(link), ReceiverCache(link)
    full = (1 << n_rails) - 1
    sender = senders.find(Sender(full, 0, start, start, start))
    receiver = receivers.find(Receiver(full, 0, start, start, start))
    assert sender is not None
    period = n_rails * n_rails
    for turn in range(2 * period):
        if turn == period:
            asked[0] = 0
        slot, offered = receiver.after_slot or receiver.slot(), sender.after_offer or sender.offer()
        assert slot is not None and offered is not None
        assert (slot[1:], offered[1]) == ((False, NOWHERE), (start + turn) % n_rails)
        chunk = slot[0].after_chunk.get(offered[1]) or slot[0].chunk(offered[1])
        acked = offered[0].after_ack.get(1) or offered[0].acknowledge(1)
        assert chunk is not None and acked is not None
        assert chunk[1:] == (True, offered[1]), "acknowledged on the rail on which it came"
        sender, receiver = acked, chunk[0]
    number = start + 2 * period
    assert sender.state(0, start, number) == Sender(full, 0, start, number, number)
    assert receiver.state(0, start, number) == Receiver(full, 0, start, number, number)
    assert asked[0] == 0


def after_ack(cache: SenderCache, state: Sender, n_freed: int) -> LinkedSender | None:
    linked = cache.find(state)
    assert linked is not None
    return linked.acknowledge(n_freed)


@pytest.mark.parametrize("n_rails", RAILS)
def test_what_is_not_healthy_is_left_to_the_table(n_rails: int) -> None:
    link, all_up = Link(n_rails, 2), (1 << n_rails) - 1
    senders, receivers = SenderCache(link), ReceiverCache(link)
    full = Sender(all_up, offered=2, out=(0, 1 % n_rails))
    linked = senders.find(full)
    assert linked is not None and linked.offer() is None, "the window is full"
    waits, _ = step(SENDER_ROWS, link, full, Event(OFFER))
    assert after_ack(senders, waits, 1) is None, "it lets another chunk go"
    assert after_ack(senders, waits, 3) is None, "offered, and not sent"
    assert after_ack(senders, full, 3) is None, "more than was offered"
    changing, _ = step(SENDER_ROWS, link, full, Event(REPLAN))
    assert senders.find(changing) is None and senders.find(Sender(0)) is None
    if n_rails > 1:
        other = senders.find(Sender(all_up - 1))
        assert other is not None and other.offer() is None, "its own rail is down"
    assert receivers.find(Receiver(all_up, offered=2, held=0b10)).chunk(0) is None, "two are delivered"
    assert receivers.find(Receiver(0, offered=1)).chunk(0) is None, "no rail for the acknowledgement"
    assert receivers.find(Receiver(0, held=1)).slot() is None, "nor here"


@pytest.mark.parametrize("n_rails", RAILS)
def test_a_cache_that_is_full_begins_anew(n_rails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover_cache, "_CACHE_MAX", 2)
    link, rng = Link(n_rails, 3), random.Random(n_rails)
    senders, receivers = SenderCache(link), ReceiverCache(link)
    walk_sender(rng, link, senders, 5, 500)
    walk_receiver(rng, link, receivers, 5, 500)
    for cache in (senders, receivers):
        assert 1 <= len(cache._known) <= 2
