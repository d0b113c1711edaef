"""The failover protocol: its table, its exhaustive exploration, mutants that must be refuted, and the induction."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace as change
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from optcc.errors import InputError, SolverError
from optcc.failover import (
    ACK,
    BEGIN,
    CHANGE,
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
    STALLED,
    TIMEOUT,
    UP,
    Action,
    Actions,
    Event,
    Link,
    Receiver,
    Row,
    Sender,
    acknowledge,
    ask_again,
    give,
    put_out,
    resend,
    step,
    table_card,
)
from optcc.verdict import PROVED, REFUTED, UNKNOWN
from optcc.verify.failover.exploration import (
    FULL,
    QUICK,
    Config,
    Exploration,
    check_encoding,
    check_invariants,
    check_replay,
    explore,
)
from optcc.verify.failover.induction import RECEIVER_RELATIONS, SENDER_RELATIONS, prove_invariants

State = TypeVar("State", Sender, Receiver)
NO_EFFECT = {
    "sender's rail known lost",
    "sender's rail known back",
    "receiver's rail known lost",
    "receiver's rail known back",
    "replan again",
}
"""Rows for events that an exploration leaves out, as they change nothing."""

WILD = Config(
    *(4, 40, 7),
    *(7, 7, 7, 7, 7, 3),
    early=None,
    one_way=True,
    stepwise=True,
)
"""Too large to explore: for random walks."""


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


# --- the table --------------------------------------------------------------------------------------------------------


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


# --- the exploration --------------------------------------------------------------------------------------------------


def test_the_protocol_is_proved_in_every_small_configuration() -> None:
    result = check_replay(QUICK)
    assert result.verdict == PROVED, str(result.counterexample)
    assert 100_000 < result.n_states < 300_000
    names = {row.name for row in SENDER_ROWS} | {row.name for row in RECEIVER_ROWS}
    assert names - frozenset().union(*(each.rows for each in result.explorations)) == NO_EFFECT
    assert result.card().rows[0][-1] == PROVED


@pytest.mark.slow
def test_the_protocol_is_proved_in_more_than_a_million_states() -> None:
    result = check_replay(FULL)
    assert result.verdict == PROVED, str(result.counterexample)
    assert result.n_states > 5_000_000


def test_too_many_states_are_unknown() -> None:
    assert explore(Config(), states_max=100).verdict == UNKNOWN


def test_configurations_that_cannot_be_are_rejected() -> None:
    with pytest.raises(InputError, match="failures 8: must be from 0 to 7"):
        Config(failures=8)
    with pytest.raises(InputError, match="5 rails: an exploration takes from 1 to 4"):
        Config(n_rails=5)
    with pytest.raises(InputError, match="0 chunks"):
        Config(n_chunks=0)


def test_without_a_timer_a_silent_loss_is_for_ever() -> None:
    result = explore(Config(n_chunks=1, window=1, failures=0, losses=1, timer=False))
    assert result.verdict == REFUTED and result.counterexample is not None
    assert result.counterexample.trace == (
        "1. network: data e0 #0 is lost on rail 0",
        "stuck: rails up 0, 1; acknowledged 0, out 1, delivered 0 of 1",
    )


def naive_exploration(config: Config) -> tuple[int, int]:
    """States and transitions of a configuration, found again with plain sets and no packing, no lookup of steps.

    Only failures, losses, duplications and at most one change of plan; everything is offered at the start.
    """
    link, rails = Link(config.n_rails, config.window), range(config.n_rails)
    sender, receiver = link.sender(), link.receiver()
    net: frozenset[tuple[str, Event]] = frozenset()

    def put(net: frozenset[tuple[str, Event]], actions: Actions) -> frozenset[tuple[str, Event]]:
        sent = (each for each in actions if each.kind == SEND)
        return net | {
            ("sender" if each.message == ACK else "receiver", Event(each.message, each.rail, each.epoch, each.number))
            for each in sent
        }

    for _ in range(config.n_chunks):
        receiver, _actions = step(RECEIVER_ROWS, link, receiver, Event(OFFER))
        sender, actions = step(SENDER_ROWS, link, sender, Event(OFFER))
        net = put(net, actions)
    start = (
        sender,
        receiver,
        net,
        frozenset(rails),
        config.failures,
        config.losses,
        config.duplications,
        config.replans,
    )
    seen, frontier, n_transitions = {start}, [start], 0
    while frontier:
        state = frontier.pop()
        sender, receiver, net, up, failures, losses, duplications, replans = state
        found: list[Any] = []

        def at(end: str, event: Event, net: Any, *rest: Any, found: list[Any] = found, state: Any = state) -> None:
            if end == "sender":
                after, actions = step(SENDER_ROWS, link, state[0], event)
                found.append((after, state[1], put(net, actions), *rest))
            else:
                there, actions = step(RECEIVER_ROWS, link, state[1], event)
                found.append((state[0], there, put(net, actions), *rest))

        for end, message in net:
            at(end, message, net - {(end, message)}, up, failures, losses, duplications, replans)
            if duplications:
                at(end, message, net, up, failures, losses, duplications - 1, replans)
            if losses and message.rail in up:
                rest = (up, failures, losses - 1, duplications, replans)
                found.append((sender, receiver, net - {(end, message)}, *rest))
        if not any(message.rail in up for _, message in net):
            at("sender", Event(TIMEOUT), net, up, failures, losses, duplications, replans)
        if replans and not sender.changing:
            at("sender", Event(REPLAN), net, up, failures, losses, duplications, replans - 1)
        for rail in rails:
            if rail not in up:
                if sender.up >> rail & 1:
                    at("sender", Event(DOWN, rail), net, up, failures, losses, duplications, replans)
                if receiver.up >> rail & 1:
                    at("receiver", Event(DOWN, rail), net, up, failures, losses, duplications, replans)
            elif failures:
                found.append((sender, receiver, net, up - {rail}, failures - 1, losses, duplications, replans))
        for child in found:
            if child != state:
                n_transitions += 1
                if child not in seen:
                    seen.add(child)
                    frontier.append(child)
    return len(seen), n_transitions


@pytest.mark.parametrize(
    "config",
    [
        Config(n_chunks=3),
        Config(n_chunks=2, window=1, failures=2),
        Config(n_chunks=2, window=1, failures=1, losses=1, duplications=1),
        Config(n_chunks=1, window=1, failures=1, replans=1),
        Config(n_rails=3, n_chunks=2, window=1, failures=1),
    ],
    ids=str,
)
def test_a_second_explorer_without_tricks_finds_as_many_states_and_transitions(config: Config) -> None:
    result = explore(config)
    assert (result.n_states, result.n_transitions) == naive_exploration(config)


# --- mutants: the same table but for one row, each refuted ------------------------------------------------------------

Effect = Callable[[Link, Any, Event], tuple[Any, Actions]]


def mutated(rows: Sequence[Row[State]], name: str, **changes: Any) -> tuple[Row[State], ...]:
    assert name in {row.name for row in rows}
    return tuple(change(row, **changes) if row.name == name else row for row in rows)


def sender_with(config: Config, **effects: Effect) -> Exploration:
    rows = SENDER_ROWS
    for name, effect in effects.items():
        rows = mutated(rows, name.replace("_", " "), effect=effect)
    return explore(config, sender_rows=rows)


def receiver_with(config: Config, name: str, **changes: Any) -> Exploration:
    return explore(config, receiver_rows=mutated(RECEIVER_ROWS, name, **changes))


def effect_of(rows: Sequence[Row[State]], name: str) -> Callable[[Link, State, Event], tuple[State, Actions]]:
    return next(row.effect for row in rows if row.name == name)


def no_suppression() -> Exploration:
    def again(link: Link, state: Receiver, event: Event) -> tuple[Receiver, Actions]:
        ack = acknowledge(link, state, event.rail)
        return state, (Action(KEEP, number=event.number), Action(DELIVER, number=event.number), *ack)

    return receiver_with(Config(n_chunks=2), "duplicate", effect=again)


def ack_before_delivery() -> Exploration:
    def early(link: Link, state: Receiver, event: Event) -> tuple[Receiver, Actions]:
        after, actions = effect_of(RECEIVER_ROWS, "fresh chunk")(link, state, event)
        return after, (*actions, Action(SEND, ACK, event.rail, state.epoch, event.number + 1))

    return receiver_with(Config(n_chunks=2, stepwise=True), "fresh chunk", effect=early)


def ack_the_arrived_chunk() -> Exploration:
    def single(link: Link, state: Receiver, event: Event) -> tuple[Receiver, Actions]:
        after, actions = effect_of(RECEIVER_ROWS, "fresh chunk")(link, state, event)
        kept = tuple(action for action in actions if action.kind != SEND)
        return after, (*kept, Action(SEND, ACK, event.rail, state.epoch, event.number + 1))

    return receiver_with(Config(n_chunks=2), "fresh chunk", effect=single)


def resend_only_the_last() -> Exploration:
    def last(link: Link, state: Sender, event: Event) -> tuple[Sender, Actions]:
        return resend(link, state, range(state.acked, state.sent)[-1:])

    return sender_with(Config(n_chunks=2, failures=0, losses=1), timeout=last)


def forget_the_second_failure() -> Exploration:
    def once(link: Link, state: Sender, event: Event) -> tuple[Sender, Actions]:
        if state.up == link.sender().up:
            return effect_of(SENDER_ROWS, "sender's rail lost")(link, state, event)
        up = state.up & ~(1 << event.rail)
        return replace(state, up=up), () if up else (Action(STALLED),)

    rows = mutated(SENDER_ROWS, "sender's rail lost", effect=once)
    return explore(Config(n_rails=3, n_chunks=2, failures=2, timer=False), sender_rows=rows)


def accept_old_epochs() -> Exploration:
    def any_epoch(link: Link, state: Receiver, event: Event) -> bool:
        ahead = event.number - state.delivered
        return 0 <= ahead < link.window and not state.held >> ahead & 1

    return receiver_with(Config(n_chunks=2, replans=1), "fresh chunk", guard=any_epoch)


def free_at_send() -> Exploration:
    def freeing(link: Link, state: Sender, event: Event) -> tuple[Sender, Actions]:
        state, actions = effect_of(SENDER_ROWS, "offer")(link, state, event)
        return state, (*actions, *(Action(FREE, number=each.number) for each in actions))

    return sender_with(Config(n_chunks=2), offer=freeing)


def window_off_by_one() -> Exploration:
    def wider(link: Link, state: Sender, event: Event) -> tuple[Sender, Actions]:
        return effect_of(SENDER_ROWS, "offer")(Link(link.n_rails, link.window + 1), state, event)

    return sender_with(Config(n_chunks=3), offer=wider)


def resend_on_the_dead_rail() -> Exploration:
    def same_rail(link: Link, state: Sender, event: Event) -> tuple[Sender, Actions]:
        up = state.up & ~(1 << event.rail)
        lost = [state.acked + i for i, rail in enumerate(state.out) if rail == event.rail]
        sent = tuple(Action(SEND, DATA, event.rail, state.epoch, number) for number in lost)
        return replace(state, up=up), (() if up else (Action(STALLED),)) + sent

    return explore(Config(n_chunks=2), sender_rows=mutated(SENDER_ROWS, "sender's rail lost", effect=same_rail))


def boundary_of_its_own() -> Exploration:
    def own(link: Link, state: Sender, event: Event) -> tuple[Sender, Actions]:
        return effect_of(SENDER_ROWS, "agreement")(link, state, replace(event, number=state.acked))

    return sender_with(Config(n_chunks=2, replans=1), agreement=own)


def change_without_agreement() -> Exploration:
    def at_once(link: Link, state: Sender, event: Event) -> tuple[Sender, Actions]:
        begun = Action(BEGIN, epoch=state.epoch + 1, number=state.acked)
        state, sent = put_out(link, replace(state, epoch=state.epoch + 1, start=state.acked, out=()))
        return state, (begun, *sent)

    return sender_with(Config(n_chunks=2, replans=1), replan=at_once)


def agreement_by_any_ack() -> Exploration:
    def any_ack(link: Link, state: Sender, event: Event) -> tuple[Sender, Actions]:
        name = "agreement" if state.changing else "new ack"
        return effect_of(SENDER_ROWS, name)(link, state, replace(event, epoch=state.epoch + state.changing))

    return sender_with(Config(n_chunks=2, replans=1), new_ack=any_ack)


def kept_over_a_change() -> Exploration:
    def keeping(link: Link, state: Receiver, event: Event) -> tuple[Receiver, Actions]:
        held = state.held
        state, actions = effect_of(RECEIVER_ROWS, "change")(link, state, event)
        return replace(state, held=held), actions[1:]

    return receiver_with(Config(n_chunks=2, replans=1), "change", effect=keeping)


def back_to_an_old_plan() -> Exploration:
    def any_other(_: Link, state: Receiver, event: Event) -> bool:
        return event.epoch != state.epoch

    return receiver_with(Config(n_chunks=1, window=1, replans=2, duplications=1), "change", guard=any_other)


def duplicates_not_acknowledged() -> Exploration:
    return receiver_with(Config(n_chunks=1, failures=0, losses=1), "duplicate", effect=lambda _, state, __: (state, ()))


def proposal_answered_once() -> Exploration:
    config = Config(n_chunks=1, window=1, failures=0, losses=1, replans=1)
    return receiver_with(config, "change again", effect=lambda _, state, __: (state, ()))


def proposal_not_repeated() -> Exploration:
    rows = mutated(SENDER_ROWS, "timeout of the proposal", effect=lambda _, state, __: (state, ()))
    return explore(Config(n_chunks=1, window=1, failures=0, losses=1, replans=1), sender_rows=rows)


def proposal_not_moved() -> Exploration:
    def chunks_only(link: Link, state: Sender, event: Event) -> tuple[Sender, Actions]:
        after, actions = effect_of(SENDER_ROWS, "sender's rail lost")(link, state, event)
        return replace(after, asked=state.asked), tuple(each for each in actions if each.message != CHANGE)

    rows = mutated(SENDER_ROWS, "sender's rail lost", effect=chunks_only)
    return explore(Config(n_chunks=1, window=1, replans=1, timer=False), sender_rows=rows)


def ack_not_moved() -> Exploration:
    def silent(link: Link, state: Receiver, event: Event) -> tuple[Receiver, Actions]:
        up = state.up & ~(1 << event.rail)
        return replace(state, up=up), () if up else (Action(STALLED),)

    return receiver_with(
        Config(n_rails=3, n_chunks=1, window=1, suspicions=1, timer=False), "receiver's rail lost", effect=silent
    )


def stalls_in_silence() -> Exploration:
    def silent(link: Link, state: Sender, event: Event) -> tuple[Sender, Actions]:
        after, actions = effect_of(SENDER_ROWS, "sender's rail lost")(link, state, event)
        return after, tuple(action for action in actions if action.kind != STALLED)

    rows = mutated(SENDER_ROWS, "sender's rail lost", effect=silent)
    return explore(Config(n_chunks=1, failures=2), sender_rows=rows)


def never_takes_a_rail_back() -> Exploration:
    rows = mutated(SENDER_ROWS, "sender's rail back", effect=lambda _, state, __: (state, ()))
    return explore(Config(n_chunks=1, failures=2, repairs=1), sender_rows=rows)


def delivers_out_of_order() -> Exploration:
    def at_once(link: Link, state: Receiver, event: Event) -> tuple[Receiver, Actions]:
        after, actions = give(link, replace(state, held=state.held | 1), event.rail)
        return after, (Action(KEEP, number=state.delivered), *actions)

    return receiver_with(Config(n_chunks=2), "fresh chunk", effect=at_once)


def stays_on_a_silent_rail() -> Exploration:
    def same_rail(link: Link, state: Sender, event: Event) -> tuple[Sender, Actions]:
        sent = [Action(SEND, DATA, rail, state.epoch, state.acked + i) for i, rail in enumerate(state.out)]
        return state, tuple(action for action in sent if action.rail != NOWHERE)

    return sender_with(Config(n_chunks=1, one_way=True, notified=False), timeout=same_rail)


def asks_on_a_silent_rail() -> Exploration:
    def same_rail(link: Link, state: Sender, event: Event) -> tuple[Sender, Actions]:
        return ask_again(link, replace(state, asked=state.asked - 1))

    rows = mutated(SENDER_ROWS, "timeout of the proposal", effect=same_rail)
    return explore(Config(n_chunks=1, window=1, replans=1, notified=False), sender_rows=rows)


MUTANTS: dict[Callable[[], Exploration], str] = {
    no_suppression: "chunk 0 is given to the application, and the next one is 1",
    ack_before_delivery: "1 chunks are acknowledged and 0 given to the application",
    ack_the_arrived_chunk: "2 chunks are acknowledged and 0 given to the application",
    resend_only_the_last: "not all chunks can be delivered",
    forget_the_second_failure: "not all chunks can be delivered",
    accept_old_epochs: "chunk 0 of plan 1 is given the bytes of chunk 0 of plan 0",
    free_at_send: "chunks are freed and 0 given to the application",
    window_off_by_one: "chunk 2 is sent with chunks 0 .. 1 out: too many",
    resend_on_the_dead_rail: "the rail is known to be down",
    boundary_of_its_own: "plan 1 begins at chunk 0 for the sender and at 1 for the receiver",
    change_without_agreement: "not all chunks can be delivered",
    agreement_by_any_ack: "plan 1",
    kept_over_a_change: "is given the bytes of",
    back_to_an_old_plan: "the receiver begins plan 1 at 0",
    duplicates_not_acknowledged: "not all chunks can be delivered",
    proposal_answered_once: "not all chunks can be delivered",
    proposal_not_repeated: "not all chunks can be delivered",
    proposal_not_moved: "not all chunks can be delivered",
    ack_not_moved: "not all chunks can be delivered",
    stalls_in_silence: "must say so",
    never_takes_a_rail_back: "not all chunks can be delivered",
    delivers_out_of_order: "is given the bytes of chunk 1 of plan 0",
    stays_on_a_silent_rail: "not all chunks can be delivered",
    asks_on_a_silent_rail: "not all chunks can be delivered",
}


@pytest.mark.parametrize(("mutant", "words"), MUTANTS.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_a_mutant_is_refuted_with_a_short_trace(mutant: Callable[[], Exploration], words: str) -> None:
    result = mutant()
    assert result.verdict == REFUTED
    example = result.counterexample
    assert example is not None and example.property == "replay"
    assert words in example.summary, str(example)
    assert len(str(example).splitlines()) <= 20
    assert explore(result.config).verdict == PROVED


# --- the induction ----------------------------------------------------------------------------------------------------


def test_every_row_keeps_the_invariants_for_any_number_of_chunks_and_any_window() -> None:
    pytest.importorskip("z3")
    lemmas = prove_invariants()
    assert {lemma.name for lemma in lemmas} == {
        *("start", "safety", "network"),
        *(row.name for row in SENDER_ROWS),
        *(row.name for row in RECEIVER_ROWS),
    }
    assert {lemma.name: lemma.verdict for lemma in lemmas} == dict.fromkeys((each.name for each in lemmas), PROVED)


def test_the_relations_are_those_of_the_table() -> None:
    assert set(SENDER_RELATIONS) == {row.name for row in SENDER_ROWS}
    assert set(RECEIVER_RELATIONS) == {row.name for row in RECEIVER_ROWS}
    checked = check_encoding(QUICK[3:5], walks=[change(WILD, n_rails=3, n_chunks=12, window=5)], n_moves=600, seed=3)
    assert int(checked.how.split()[0]) > 1000


@pytest.mark.slow
def test_the_relations_are_those_of_the_table_in_long_walks() -> None:
    for seed in range(5):
        print(check_encoding(QUICK if seed == 0 else (), walks=[WILD], n_moves=5000, seed=seed))


def test_the_invariants_hold_in_every_explored_state() -> None:
    for config in (Config(n_chunks=2, window=2), Config(n_chunks=1, window=1, replans=1)):
        assert "states, evaluated exactly" in check_invariants(config).how


@pytest.mark.parametrize(
    ("row", "relation", "lemma"),
    [
        ("fresh chunk", "accepts any epoch", "fresh chunk"),
        ("new ack", "frees one too many", "new ack"),
        ("change", "begins one later", "change"),
        ("sender's rail lost", "resends nothing", "sender's rail lost"),
    ],
)
def test_a_wrong_relation_fails_its_lemma_and_the_comparison_with_the_table(
    row: str, relation: str, lemma: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("z3")
    table: Any = SENDER_RELATIONS if row in SENDER_RELATIONS else RECEIVER_RELATIONS
    right = table[row]

    def wrong(logic: Any, v: Any, w: Any, k: Any) -> Any:
        if relation == "accepts any epoch":
            return right(logic, v, w, {**k, "event epoch": v["epoch there"]})
        if relation == "frees one too many":
            return right(logic, v, {**w, "acked": w["acked"] - 1, "freed": w["freed"] - 1}, k)
        if relation == "begins one later":
            return right(logic, v, {**w, "start there": w["start there"] - 1}, k)
        return _resends_nothing(right, logic, v, w, k)

    monkeypatch.setitem(table, row, wrong)
    verdicts = {each.name: each.verdict for each in prove_invariants()}
    assert verdicts[lemma] == REFUTED
    if relation != "accepts any epoch":
        with pytest.raises(SolverError, match="is not what the relation says"):
            check_encoding(QUICK[3:4])


def _resends_nothing(right: Callable[..., Any], logic: Any, v: Any, w: Any, k: Any) -> Any:
    """The relation of a rail that is lost, with what was out on it not sent again although another rail is up."""
    lost = k["x on lost rail"]
    shown = {**w, "out on rail": logic.any_of((w["out on rail"], logic.all_of((lost, w["any rail"]))))}
    return logic.all_of((right(logic, v, shown, k), logic.implies(lost, logic.no(w["out on rail"]))))
