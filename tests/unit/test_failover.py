"""The failover table: what each end does on each event, one row for each, and the page that shows it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from optcc.errors import InputError
from optcc.failover import (
    ACK,
    CHANGE,
    DATA,
    DOWN,
    OFFER,
    RECEIVER_EVENTS,
    RECEIVER_ROWS,
    REPLAN,
    SENDER_EVENTS,
    SENDER_ROWS,
    UP,
    Actions,
    Event,
    Link,
    Receiver,
    Sender,
    step,
    table_card,
)


def run_sender(link: Link, *events: Event) -> tuple[Sender, list[str]]:
    """The sender after these events, and what it did on the last one."""
    state = link.sender()
    actions: Actions = ()
    for event in events:
        state, actions = step(SENDER_ROWS, link, state, event)
    return state, [str(action) for action in actions]


def run_receiver(link: Link, *events: Event) -> tuple[Receiver, list[str]]:
    state = link.receiver()
    actions: Actions = ()
    for event in events:
        state, actions = step(RECEIVER_ROWS, link, state, event)
    return state, [str(action) for action in actions]


def test_a_sender_fills_its_window_over_the_rails_in_turn() -> None:
    state, done = run_sender(Link(3, 2), Event(OFFER), Event(OFFER), Event(OFFER))
    assert (state.out, state.sent, done) == ((0, 1), 2, [])
    state, done = run_sender(Link(3, 2), Event(OFFER), Event(OFFER), Event(OFFER), Event(ACK, 0, 0, 1))
    assert done == ["free #0", "send data e0 #2 on rail 2"]


def test_what_went_out_on_a_lost_rail_goes_out_again_on_the_next() -> None:
    events = (Event(OFFER), Event(OFFER), Event(OFFER))
    _, done = run_sender(Link(2, 3), *events, Event(DOWN, 0))
    assert done == ["send data e0 #0 on rail 1", "send data e0 #2 on rail 1"]


def test_the_rails_that_are_left_share_the_load_of_a_lost_one() -> None:
    events = [Event(OFFER)] * 12
    state, done = run_sender(Link(3, 12), *events, Event(DOWN, 1))
    assert done == [f"send data e0 #{n} on rail {rail}" for n, rail in ((1, 0), (4, 2), (7, 0), (10, 2))]
    assert [state.out.count(rail) for rail in range(3)] == [6, 0, 6]
    state, _ = run_sender(Link(3, 12), Event(DOWN, 1), *events)
    assert [state.out.count(rail) for rail in range(3)] == [6, 0, 6]


def test_the_last_rail_lost_is_reported_and_its_return_resumes_everything() -> None:
    events = (Event(OFFER), Event(DOWN, 0), Event(DOWN, 1))
    state, done = run_sender(Link(2, 2), *events)
    assert state.stalled and done == ["stalled"]
    _, done = run_sender(Link(2, 2), *events, Event(OFFER), Event(UP, 1))
    assert done == ["resumed", "send data e0 #0 on rail 1", "send data e0 #1 on rail 1"]


def test_a_receiver_delivers_in_order_and_suppresses_duplicates() -> None:
    slots = (Event(OFFER), Event(OFFER))
    _, done = run_receiver(Link(2, 2), *slots, Event(DATA, 1, 0, 1))
    assert done == ["keep #1"]
    _, done = run_receiver(Link(2, 2), *slots, Event(DATA, 1, 0, 1), Event(DATA, 0, 0, 0))
    assert done == ["keep #0", "deliver #0", "deliver #1", "send ack e0 #2 on rail 0"]
    _, done = run_receiver(Link(2, 2), *slots, Event(DATA, 0, 0, 0), Event(DATA, 1, 0, 0))
    assert done == ["send ack e0 #1 on rail 1"]


def test_both_ends_begin_the_next_plan_at_what_the_receiver_has_delivered() -> None:
    receiver, done = run_receiver(Link(2, 2), Event(OFFER), Event(DATA, 0, 0, 0), Event(CHANGE, 1, 1))
    assert receiver.start == 1 and done == ["forget", "begin e1 at #1", "send ack e1 #1 on rail 1"]
    offers = (Event(OFFER), Event(OFFER), Event(OFFER))
    sender, done = run_sender(Link(2, 2), *offers, Event(REPLAN), Event(ACK, 1, 1, 1))
    assert sender.start == 1
    assert done == ["free #0", "begin e1 at #1", "send data e1 #1 on rail 1", "send data e1 #2 on rail 0"]


def test_a_lost_rail_during_the_agreement_sends_the_proposal_again() -> None:
    _, done = run_sender(Link(2, 2), Event(OFFER), Event(REPLAN), Event(DOWN, 0))
    assert done == ["send change e1 on rail 1"]
    sender, done = run_sender(Link(2, 2), Event(OFFER), Event(REPLAN), Event(REPLAN))
    assert sender.changing and done == []


def test_messages_of_other_epochs_are_dropped() -> None:
    receiver, done = run_receiver(Link(2, 2), Event(OFFER), Event(CHANGE, 0, 1), Event(DATA, 0, 0, 0))
    assert (receiver.delivered, done) == (0, [])
    _, done = run_receiver(Link(2, 2), Event(CHANGE, 0, 1), Event(CHANGE, 0, 2), Event(CHANGE, 0, 1))
    assert done == []


def test_a_link_that_cannot_be_is_rejected() -> None:
    with pytest.raises(InputError, match="0 rails: must be from 1"):
        Link(0, 1)
    with pytest.raises(InputError, match="window 0: must be from 1"):
        Link(1, 0)


def random_event(rng: random.Random, kinds: Sequence[str], n_rails: int) -> Event:
    return Event(rng.choice(kinds), rng.randrange(n_rails), rng.randrange(4), rng.randrange(12))


@pytest.mark.parametrize("seed", range(20))
def test_exactly_one_row_applies_to_every_event_in_every_state(seed: int) -> None:
    rng, link = random.Random(seed), Link(1 + seed % 4, 1 + seed % 3)
    sender, receiver = link.sender(), link.receiver()
    for _ in range(400):
        event = random_event(rng, SENDER_EVENTS, link.n_rails)
        rows = [row for row in SENDER_ROWS if row.event == event.kind and row.guard(link, sender, event)]
        assert len(rows) == 1, (seed, sender, event, [row.name for row in rows])
        sender, _ = step(SENDER_ROWS, link, sender, event)
        event = random_event(rng, RECEIVER_EVENTS, link.n_rails)
        found = [row for row in RECEIVER_ROWS if row.event == event.kind and row.guard(link, receiver, event)]
        assert len(found) == 1, (seed, receiver, event, [row.name for row in found])
        receiver, _ = step(RECEIVER_ROWS, link, receiver, event)


def test_the_table_shows_every_row() -> None:
    rows = table_card().rows
    assert len(rows) == len(SENDER_ROWS) + len(RECEIVER_ROWS) == len({row[1] for row in rows})
    assert {row[2] for row in rows} == set(SENDER_EVENTS) | set(RECEIVER_EVENTS)


def test_the_documentation_shows_this_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "failover.md").read_text(encoding="utf-8")
    card = table_card()
    for row in (card.columns, *card.rows):
        assert f"| {' | '.join(row)} |\n" in page, row
