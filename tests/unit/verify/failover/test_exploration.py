"""The exploration of the failover table: the protocol is proved, and mutants of it are refuted.

`observer` and `state_space` have no test files of their own: a rule or a move that is missing leaves a mutant unrefuted
or makes the number of states differ from that of a second, naive explorer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as change
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

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
    RECEIVER_ROWS,
    REPLAN,
    SEND,
    SENDER_ROWS,
    STALLED,
    TIMEOUT,
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
)
from optcc.verdict import PROVED, REFUTED, UNKNOWN
from optcc.verify.failover.configurations import FULL, QUICK, Config
from optcc.verify.failover.exploration import Exploration, check_replay, explore
from tests.sample import sampled

State = TypeVar("State", Sender, Receiver)
NO_EFFECT = {
    "sender's rail known lost",
    "sender's rail known back",
    "receiver's rail known lost",
    "receiver's rail known back",
    "replan again",
}
"""Rows for events that an exploration leaves out, as they change nothing."""


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


@pytest.mark.parametrize(
    ("mutant", "words"), sampled(MUTANTS.items(), every=3), ids=lambda each: getattr(each, "__name__", "")
)
def test_a_mutant_is_refuted_with_a_short_trace(mutant: Callable[[], Exploration], words: str) -> None:
    result = mutant()
    assert result.verdict == REFUTED
    example = result.counterexample
    assert example is not None and example.property == "replay"
    assert words in example.summary, str(example)
    assert len(str(example).splitlines()) <= 20
    assert explore(result.config).verdict == PROVED
