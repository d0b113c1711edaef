"""The memoised transitions of the failover table against `step`, over random walks of both ends.

Whenever a cache answers, its state is that of the table, and the actions of the table are just those that the answer
stands for; whenever the actions are of that form, it answers. The caches see chunk numbers only through differences and
remainders, so each of them serves walks that begin at 0 and far from it.
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
from optcc.failover_cache import ReceiverCache, SenderCache

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


def check_offer(link: Link, cache: SenderCache, state: Sender, after: Sender, actions: Actions) -> str:
    """Holds the answer to OFFER to what the table says; what kind of answer it was."""
    found = cache.offer(state)
    if found is None:
        assert [action.message for action in actions] != [DATA] or actions[0].number != state.offered, actions
        return "no offer"
    assert found[0] == after
    assert actions == (Action(SEND, DATA, found[1], state.epoch, state.offered),)
    assert found[1] == link.share(state.up, state.offered)
    return "offer"


def check_ack(cache: SenderCache, state: Sender, event: Event, after: Sender, actions: Actions) -> str:
    """As `check_offer`, for ACK."""
    found = cache.acknowledge(state, event.epoch, event.number)
    if found is None:
        is_usual = event.epoch == state.epoch and not state.changing and state.up and event.number <= state.offered
        assert not is_usual or any(action.kind != FREE for action in actions), actions
        return "no ack"
    assert found == after
    assert actions == tuple(Action(FREE, number=number) for number in range(state.acked, after.acked))
    if not actions:
        assert found is state, "the very object: there is nothing new"
        return "old ack"
    return "ack"


def delivery(before: Receiver, after: Receiver, rail: int) -> Actions:
    """The actions that a cache's answer stands for, but for keeping the chunk."""
    if rail == NOWHERE:
        assert after.delivered == before.delivered
        return ()
    assert after.delivered == before.delivered + 1
    number = before.delivered
    return Action(DELIVER, number=number), Action(SEND, ACK, rail, after.epoch, number + 1)


def check_slot(cache: ReceiverCache, state: Receiver, after: Receiver, actions: Actions) -> str:
    """As `check_offer`, for the receiver's OFFER."""
    found = cache.slot(state)
    if found is None:
        assert [action.kind for action in actions] not in ([], [DELIVER, SEND]), actions
        return "no slot"
    assert found[0] == after
    assert actions == delivery(state, *found)
    return "kept slot" if actions else "slot"


def check_chunk(cache: ReceiverCache, state: Receiver, event: Event, after: Receiver, actions: Actions) -> str:
    """As `check_offer`, for DATA."""
    found = cache.chunk(state, event.rail, event.epoch, event.number)
    if found is None:
        assert [action.kind for action in actions] not in ([KEEP], [KEEP, DELIVER, SEND]), actions
        return "no chunk"
    assert found[0] == after
    assert actions == (Action(KEEP, number=event.number), *delivery(state, *found))
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
        elif event.kind == DATA:
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
    sender, receiver = Sender(full, 0, start, start, start), Receiver(full, 0, start, start, start)
    period = n_rails * n_rails
    for turn in range(2 * period):
        if turn == period:
            asked[0] = 0
        number = start + turn
        slot, offered = receivers.slot(receiver), senders.offer(sender)
        assert slot is not None and offered is not None
        assert (slot[1], offered[1]) == (NOWHERE, number % n_rails)
        chunk = receivers.chunk(slot[0], offered[1], 0, number)
        acked = senders.acknowledge(offered[0], 0, number + 1)
        assert chunk is not None and acked is not None
        assert chunk[1] == offered[1], "acknowledged on the rail on which it came"
        sender, receiver = acked, chunk[0]
    assert (sender.acked, receiver.delivered) == (start + 2 * period, start + 2 * period)
    assert asked[0] == 0


@pytest.mark.parametrize("n_rails", RAILS)
def test_what_is_not_healthy_is_left_to_the_table(n_rails: int) -> None:
    link = Link(n_rails, 2)
    senders, receivers = SenderCache(link), ReceiverCache(link)
    full = Sender((1 << n_rails) - 1, offered=2, out=(0, 1 % n_rails))
    assert senders.offer(full) is None, "the window is full"
    waits, _ = step(SENDER_ROWS, link, full, Event(OFFER))
    assert senders.acknowledge(waits, 0, 1) is None, "it lets another chunk go"
    assert senders.acknowledge(full, 0, 3) is None, "more than was offered"
    assert senders.acknowledge(full, 1, 1) is None, "of another epoch"
    changing, _ = step(SENDER_ROWS, link, full, Event(REPLAN))
    assert senders.offer(changing) is None and senders.acknowledge(changing, 0, 1) is None
    assert senders.acknowledge(changing, 1, 1) is None, "the agreement"
    dark = Sender(0)
    assert senders.offer(dark) is None and senders.acknowledge(dark, 0, 0) is None
    receiver = Receiver((1 << n_rails) - 1, epoch=1, offered=3, delivered=2)
    assert receivers.chunk(receiver, 0, 1, 1) is None, "delivered before"
    assert receivers.chunk(receiver, 0, 0, 2) is None, "of another epoch"
    assert receivers.chunk(receiver, 0, 1, 4) is None, "beyond the window"
    kept = Receiver((1 << n_rails) - 1, offered=2, held=0b10)
    assert receivers.chunk(kept, 0, 0, 0) is None, "two are delivered"
    assert receivers.chunk(kept, 0, 0, 1) is None, "kept already"
    assert receivers.chunk(Receiver(0, offered=1), 0, 0, 0) is None, "no rail for the acknowledgement"
    assert receivers.slot(Receiver(0, held=1)) is None, "nor here"


@pytest.mark.parametrize("n_rails", RAILS)
def test_a_cache_that_is_full_begins_anew(n_rails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover_cache, "_CACHE_MAX", 2)
    link, rng = Link(n_rails, 3), random.Random(n_rails)
    senders, receivers = SenderCache(link), ReceiverCache(link)
    walk_sender(rng, link, senders, 5, 500)
    walk_receiver(rng, link, receivers, 5, 500)
    for cache in (senders._offers, senders._acks, receivers._slots, receivers._chunks):
        assert 1 <= len(cache) <= 2
