"""The failover protocol of a channel over several rails, one table: the run-time executes it, the verifier explores it.

A channel carries chunks 0, 1, 2, ... from a sender to a receiver, each over one of its rails. Any rail may fail, and
may come back. The sender keeps a chunk until it is acknowledged; the receiver gives each chunk to the application in
order and exactly once, suppresses duplicates before anybody reduces them, and acknowledges how many it has given.

    message           direction           says
    data  epoch n     sender -> receiver  chunk n of the plan of this epoch
    change epoch      sender -> receiver  let us go on with the plan of this epoch; I send nothing until you answer
    ack   epoch n     receiver -> sender  the application has chunks 0 .. n - 1; in a new epoch: it begins at n

`step(rows, link, state, event)` finds the row of the table that applies, and gives the next state and the actions that
its owner must carry out, in their order. Nothing here does I/O, looks at a clock or draws a number. A message that does
not pass its checksum is no event: to the table it is lost.

A chunk n goes out on rail n mod R or, if that is down, on one of the others, each in turn, so that all share the load
of a rail that is lost. When the timer rings it goes out again, on the next one that is up after the one it was on, so
that no chunk waits for ever for a rail that is dead and does not say so. At most `window` chunks are out and not
acknowledged; the receiver has room for as many. `optcc.verify.failover` is the proof.

    >>> link = Link(n_rails=2, window=2)
    >>> sender, actions = step(SENDER_ROWS, link, link.sender(), Event("offer"))
    >>> [str(action) for action in actions]
    ['send data e0 #0 on rail 0']
    >>> sender, actions = step(SENDER_ROWS, link, sender, Event("down", rail=0))
    >>> [str(action) for action in actions]
    ['send data e0 #0 on rail 1']
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from msgspec.structs import replace

from optcc.errors import InputError
from optcc.show import Card

NOWHERE = -1
"""Instead of a rail: not out, because no rail was up or because a change of plan is under way."""
RAILS_MAX = 16
WINDOW_MAX = 1 << 16

DATA, CHANGE, ACK = "data", "change", "ack"
OFFER, DOWN, UP, TIMEOUT, REPLAN = "offer", "down", "up", "timeout", "replan"
SEND, FREE, KEEP, DELIVER, FORGET = "send", "free", "keep", "deliver", "forget"
BEGIN, STALLED, RESUMED = "begin", "stalled", "resumed"
SENDER_EVENTS = (OFFER, ACK, DOWN, UP, TIMEOUT, REPLAN)
RECEIVER_EVENTS = (OFFER, DATA, CHANGE, DOWN, UP)


class Event(msgspec.Struct, frozen=True, gc=False):
    """What happens at one end.

    offer            the application has one more chunk to send, or one more slot to receive into
    data, change, ack   a message has arrived on `rail`, with its `epoch` and `number`
    down, up         `rail` is reported or suspected down; is back
    timeout          the sender has waited long enough for an acknowledgement
    replan           the sender shall change to the next plan
    """

    kind: str
    rail: int = NOWHERE
    epoch: int = 0
    number: int = 0

    def __str__(self) -> str:
        if self.kind in (DATA, CHANGE, ACK):
            return f"{_message(self)} arrives on rail {self.rail}"
        return f"rail {self.rail} {self.kind}" if self.kind in (DOWN, UP) else self.kind


class Action(msgspec.Struct, frozen=True, gc=False):
    """What an end must do.

    send             put the message `message` with `epoch` and `number` on `rail`
    free             chunk `number` is acknowledged: its memory may be used again
    keep             put the chunk that has just arrived aside as `number`
    deliver          give the chunk kept as `number` to the application
    forget           drop every chunk that is kept: it belongs to the former plan
    begin            the plan of `epoch` begins with chunk `number`
    stalled, resumed no rail is left; one is back
    """

    kind: str
    message: str = ""
    rail: int = NOWHERE
    epoch: int = 0
    number: int = 0

    def __str__(self) -> str:
        if self.kind == SEND:
            return f"send {_message(self)} on rail {self.rail}"
        if self.kind == BEGIN:
            return f"begin e{self.epoch} at #{self.number}"
        return f"{self.kind} #{self.number}" if self.kind in (FREE, KEEP, DELIVER) else self.kind


Actions = tuple[Action, ...]


class Sender(msgspec.Struct, frozen=True, gc=False):
    """The sending end. `out[i]` is the rail on which chunk `acked` + i went out last; `up` has bit r for rail r.

    `start` is the first chunk of the plan of `epoch`. While `changing`, `asked` is the rail of the last proposal.
    """

    up: int
    epoch: int = 0
    start: int = 0
    offered: int = 0
    acked: int = 0
    out: tuple[int, ...] = ()
    changing: bool = False
    asked: int = NOWHERE

    @property
    def sent(self) -> int:
        """Chunks 0 .. sent - 1 have been sent, in this plan or a former one."""
        return self.acked + len(self.out)

    @property
    def stalled(self) -> bool:
        """True if no rail is up."""
        return not self.up


class Receiver(msgspec.Struct, frozen=True, gc=False):
    """The receiving end. `held` has bit i if chunk `delivered` + i is kept; `offered` counts the slots it was given."""

    up: int
    epoch: int = 0
    start: int = 0
    offered: int = 0
    delivered: int = 0
    held: int = 0

    @property
    def stalled(self) -> bool:
        """True if no rail is up."""
        return not self.up


State = TypeVar("State", Sender, Receiver)


@dataclass(frozen=True, slots=True)
class Link:
    """What both ends of a channel know for good: how many rails, and how many chunks may be out at once.

    Raises InputError for numbers that cannot be.
    """

    n_rails: int
    window: int

    def __post_init__(self) -> None:
        if not 1 <= self.n_rails <= RAILS_MAX:
            raise InputError(f"{self.n_rails} rails: must be from 1 to {RAILS_MAX}")
        if not 1 <= self.window <= WINDOW_MAX:
            raise InputError(f"window {self.window}: must be from 1 to {WINDOW_MAX}")

    def sender(self) -> Sender:
        """The sending end at the start, every rail up."""
        return Sender((1 << self.n_rails) - 1)

    def receiver(self) -> Receiver:
        """The receiving end at the start, every rail up."""
        return Receiver((1 << self.n_rails) - 1)

    def pick(self, up: int, first: int) -> int:
        """The first rail of `up` from rail `first` on, around the end; NOWHERE if there is none.

        >>> link = Link(n_rails=3, window=1)
        >>> link.pick(0b101, 1), link.pick(0b011, 2), link.pick(0, 0)
        (2, 0, -1)
        """
        if up >> first & 1:
            return first
        for turn in range(self.n_rails):
            rail = (first + turn) % self.n_rails
            if up >> rail & 1:
                return rail
        return NOWHERE

    def share(self, up: int, number: int) -> int:
        """The rail of `up` for chunk `number`: its own or, if that is down, each of the others in turn; or NOWHERE.

        >>> link = Link(n_rails=3, window=1)
        >>> [link.share(0b101, number) for number in range(6)], link.share(0, 0)
        ([0, 0, 2, 0, 2, 2], -1)
        """
        own = number % self.n_rails
        if not up or up >> own & 1:
            return own if up else NOWHERE
        others = [rail for rail in range(self.n_rails) if up >> rail & 1]
        return others[number // self.n_rails % len(others)]


@dataclass(frozen=True, slots=True)
class Row(Generic[State]):
    """One row of the table: in a state for which `guard` holds, `event` has this `effect`. `when`, `then`: in words."""

    name: str
    event: str
    when: str
    then: str
    guard: Callable[[Link, State, Event], bool]
    effect: Callable[[Link, State, Event], tuple[State, Actions]]


def find_row(rows: Sequence[Row[State]], link: Link, state: State, event: Event) -> Row[State]:
    """The row that applies; the guards of one event exclude each other and leave nothing out."""
    for row in rows:
        if row.event == event.kind and row.guard(link, state, event):
            return row
    raise AssertionError(f"no row of the table for {event} in {state}")


def step(rows: Sequence[Row[State]], link: Link, state: State, event: Event) -> tuple[State, Actions]:
    """The next state and what to do, in this order."""
    return find_row(rows, link, state, event).effect(link, state, event)


# --- the sender -------------------------------------------------------------------------------------------------------


def put_out(link: Link, state: Sender) -> tuple[Sender, Actions]:
    """Sends what is marked for sending again, then new chunks as far as the window goes; a change: its proposal."""
    if not state.up:
        return state, ()
    if state.changing:
        if state.asked != NOWHERE:
            return state, ()
        rail = link.pick(state.up, 0)
        return replace(state, asked=rail), (Action(SEND, CHANGE, rail, state.epoch + 1),)
    n_out = len(state.out)
    new = min(link.window - n_out, state.offered - state.acked - n_out)
    if not new and NOWHERE not in state.out:
        return state, ()
    out = list(state.out)
    actions: list[Action] = []
    out += [NOWHERE] * new
    for i in range(out.index(NOWHERE), len(out)):
        if out[i] == NOWHERE:
            number = state.acked + i
            out[i] = link.share(state.up, number)
            actions.append(Action(SEND, DATA, out[i], state.epoch, number))
    return replace(state, out=tuple(out)), tuple(actions)


def resend(link: Link, state: Sender, numbers: Sequence[int]) -> tuple[Sender, Actions]:
    """Sends these chunks again, each on the next rail that is up after the one it was on."""
    out = list(state.out)
    actions: list[Action] = []
    for number in numbers:
        i = number - state.acked
        out[i] = link.pick(state.up, out[i] + 1)
        if out[i] != NOWHERE:
            actions.append(Action(SEND, DATA, out[i], state.epoch, number))
    return replace(state, out=tuple(out)), tuple(actions)


def ask_again(link: Link, state: Sender) -> tuple[Sender, Actions]:
    """Proposes the change again, on the next rail that is up."""
    rail = link.pick(state.up, state.asked + 1)
    actions = (Action(SEND, CHANGE, rail, state.epoch + 1),) if rail != NOWHERE else ()
    return replace(state, asked=rail), actions


def free_to(state: Sender, number: int) -> tuple[Sender, Actions]:
    """Frees the chunks below `number`."""
    actions = tuple(Action(FREE, number=each) for each in range(state.acked, number))
    return replace(state, acked=number, out=state.out[number - state.acked :]), actions


def _offered(link: Link, state: Sender, _: Event) -> tuple[Sender, Actions]:
    return put_out(link, replace(state, offered=state.offered + 1))


def _acknowledged(link: Link, state: Sender, event: Event) -> tuple[Sender, Actions]:
    state, freed = free_to(state, event.number)
    state, sent = put_out(link, state)
    return state, freed + sent


def _agreed(link: Link, state: Sender, event: Event) -> tuple[Sender, Actions]:
    state, freed = free_to(state, event.number)
    begun = Action(BEGIN, epoch=event.epoch, number=event.number)
    state = replace(state, epoch=event.epoch, start=event.number, out=(), changing=False, asked=NOWHERE)
    state, sent = put_out(link, state)
    return state, (*freed, begun, *sent)


def _sender_lost_rail(link: Link, state: Sender, event: Event) -> tuple[Sender, Actions]:
    out = tuple(NOWHERE if rail == event.rail else rail for rail in state.out)
    state = replace(state, up=state.up & ~(1 << event.rail), out=out)
    actions: Actions = () if state.up else (Action(STALLED),)
    if state.changing and state.asked == event.rail:
        state, sent = ask_again(link, state)
    else:
        state, sent = put_out(link, state)
    return state, actions + sent


def _sender_got_rail(link: Link, state: Sender, event: Event) -> tuple[Sender, Actions]:
    actions: Actions = () if state.up else (Action(RESUMED),)
    state, sent = put_out(link, replace(state, up=state.up | 1 << event.rail))
    return state, actions + sent


def _waited(link: Link, state: Sender, _: Event) -> tuple[Sender, Actions]:
    return resend(link, state, range(state.acked, state.sent))


def _waited_for_agreement(link: Link, state: Sender, _: Event) -> tuple[Sender, Actions]:
    return ask_again(link, state)


def _changes(link: Link, state: Sender, _: Event) -> tuple[Sender, Actions]:
    # Whatever is out may arrive or be dropped: after the agreement everything from its chunk on is sent anew.
    return put_out(link, replace(state, changing=True, asked=NOWHERE, out=(NOWHERE,) * len(state.out)))


def _nothing(_: Link, state: State, __: Event) -> tuple[State, Actions]:
    return state, ()


def is_up(_: Link, state: Sender | Receiver, event: Event) -> bool:
    """Guard: the rail of the event is up."""
    return bool(state.up >> event.rail & 1)


def is_down(link: Link, state: Sender | Receiver, event: Event) -> bool:
    """Guard: the rail of the event is down."""
    return not is_up(link, state, event)


def acks_more(_: Link, state: Sender, event: Event) -> bool:
    """Guard: an acknowledgement of this epoch that says something new."""
    return event.epoch == state.epoch and state.acked < event.number <= state.sent


def agrees(_: Link, state: Sender, event: Event) -> bool:
    """Guard: the answer to the proposal."""
    return state.changing and event.epoch == state.epoch + 1 and state.acked <= event.number <= state.sent


def _always(_: Link, __: State, ___: Event) -> bool:
    return True


SENDER_ROWS: tuple[Row[Sender], ...] = (
    Row("offer", OFFER, "always", "send it if a rail is up and the window allows", _always, _offered),
    Row(
        *("new ack", ACK, "this epoch, acked < n <= sent"),
        "free chunks below n; send more as far as the window allows",
        *(acks_more, _acknowledged),
    ),
    Row(
        *("agreement", ACK, "changing, next epoch, acked <= n <= sent"),
        "free chunks below n; the next plan begins at n: send from n on, in its epoch",
        *(agrees, _agreed),
    ),
    Row(
        *("old ack", ACK, "else", "nothing"),
        lambda link, state, event: not acks_more(link, state, event) and not agrees(link, state, event),
        _nothing,
    ),
    Row(
        *("sender's rail lost", DOWN, "the rail is up"),
        "send what went out on it, chunks or proposal, on the rails that are up; none: stalled",
        *(is_up, _sender_lost_rail),
    ),
    Row("sender's rail known lost", DOWN, "the rail is down", "nothing", is_down, _nothing),
    Row(
        *("sender's rail back", UP, "the rail is down"),
        "resumed if stalled; send what is marked, and more as far as the window allows",
        *(is_down, _sender_got_rail),
    ),
    Row("sender's rail known back", UP, "the rail is up", "nothing", is_up, _nothing),
    Row(
        *("timeout", TIMEOUT, "not changing", "send every chunk that is out again, each on its next rail that is up"),
        *(lambda _, state, __: not state.changing, _waited),
    ),
    Row(
        *("timeout of the proposal", TIMEOUT, "changing", "propose again, on the next rail that is up"),
        *(lambda _, state, __: state.changing, _waited_for_agreement),
    ),
    Row(
        *("replan", REPLAN, "not changing", "propose the next epoch; send no chunk until it is agreed"),
        *(lambda _, state, __: not state.changing, _changes),
    ),
    Row(
        *("replan again", REPLAN, "changing", "nothing: one change at a time"),
        *(lambda _, state, __: state.changing, _nothing),
    ),
)


# --- the receiver -----------------------------------------------------------------------------------------------------


def acknowledge(link: Link, state: Receiver, rail: int) -> Actions:
    """The acknowledgement of all that is delivered, on `rail` or the next one that is up."""
    rail = link.pick(state.up, rail)
    return (Action(SEND, ACK, rail, state.epoch, state.delivered),) if rail != NOWHERE else ()


def give(link: Link, state: Receiver, rail: int) -> tuple[Receiver, Actions]:
    """Delivers what is next and kept, as far as there are slots; acknowledges if that is anything."""
    actions: list[Action] = []
    delivered, held = state.delivered, state.held
    while held & 1 and delivered < state.offered:
        actions.append(Action(DELIVER, number=delivered))
        delivered, held = delivered + 1, held >> 1
    if not actions:
        return state, ()
    state = replace(state, delivered=delivered, held=held)
    return state, (*actions, *acknowledge(link, state, rail))


def _slot_offered(link: Link, state: Receiver, _: Event) -> tuple[Receiver, Actions]:
    return give(link, replace(state, offered=state.offered + 1), state.delivered % link.n_rails)


def _fresh_chunk(link: Link, state: Receiver, event: Event) -> tuple[Receiver, Actions]:
    state = replace(state, held=state.held | 1 << (event.number - state.delivered))
    state, actions = give(link, state, event.rail)
    return state, (Action(KEEP, number=event.number), *actions)


def _repeats_ack(link: Link, state: Receiver, event: Event) -> tuple[Receiver, Actions]:
    return state, acknowledge(link, state, event.rail)


def _switches(link: Link, state: Receiver, event: Event) -> tuple[Receiver, Actions]:
    state = replace(state, epoch=event.epoch, start=state.delivered, held=0)
    begun = Action(BEGIN, epoch=state.epoch, number=state.start)
    return state, (Action(FORGET), begun, *acknowledge(link, state, event.rail))


def _receiver_lost_rail(link: Link, state: Receiver, event: Event) -> tuple[Receiver, Actions]:
    state = replace(state, up=state.up & ~(1 << event.rail))
    return state, acknowledge(link, state, event.rail) if state.up else (Action(STALLED),)


def _receiver_got_rail(link: Link, state: Receiver, event: Event) -> tuple[Receiver, Actions]:
    stalled = state.stalled
    state = replace(state, up=state.up | 1 << event.rail)
    return state, (Action(RESUMED), *acknowledge(link, state, event.rail)) if stalled else ()


def is_known(_: Link, state: Receiver, event: Event) -> bool:
    """Guard: a chunk that is delivered or kept."""
    ahead = event.number - state.delivered
    return ahead < 0 or bool(state.held >> ahead & 1)


def is_fresh(link: Link, state: Receiver, event: Event) -> bool:
    """Guard: a chunk of this epoch that is neither delivered nor kept, and for which there is room."""
    in_epoch = event.epoch == state.epoch
    return in_epoch and not is_known(link, state, event) and event.number < state.delivered + link.window


RECEIVER_ROWS: tuple[Row[Receiver], ...] = (
    Row("slot", OFFER, "always", "deliver what is next and kept; if so, ack", _always, _slot_offered),
    Row(
        *("fresh chunk", DATA, "this epoch, not delivered, not kept, n < delivered + window"),
        "keep it; deliver what is next and kept, as far as there are slots; if so, ack",
        *(is_fresh, _fresh_chunk),
    ),
    Row(
        *("duplicate", DATA, "this epoch, delivered or kept", "suppress it; ack again"),
        lambda link, state, event: event.epoch == state.epoch and is_known(link, state, event),
        _repeats_ack,
    ),
    Row(
        *("dropped chunk", DATA, "another epoch, or n >= delivered + window", "nothing"),
        lambda link, state, event: event.epoch != state.epoch or (event.number >= state.delivered + link.window),
        _nothing,
    ),
    Row(
        *("change", CHANGE, "next epoch"),
        "forget what is kept; the next plan begins at delivered; ack in its epoch",
        *(lambda _, state, event: event.epoch == state.epoch + 1, _switches),
    ),
    Row(
        *("change again", CHANGE, "this epoch", "ack again"),
        *(lambda _, state, event: event.epoch == state.epoch, _repeats_ack),
    ),
    Row(
        *("dropped change", CHANGE, "another epoch", "nothing"),
        *(lambda _, state, event: event.epoch not in (state.epoch, state.epoch + 1), _nothing),
    ),
    Row(
        *("receiver's rail lost", DOWN, "the rail is up", "ack again, on the next rail that is up; none: stalled"),
        *(is_up, _receiver_lost_rail),
    ),
    Row("receiver's rail known lost", DOWN, "the rail is down", "nothing", is_down, _nothing),
    Row(
        *("receiver's rail back", UP, "the rail is down", "if stalled: resumed, ack again"),
        *(is_down, _receiver_got_rail),
    ),
    Row("receiver's rail known back", UP, "the rail is up", "nothing", is_up, _nothing),
)


# --- showing it -------------------------------------------------------------------------------------------------------


def table_card() -> Card:
    """The table for people: at which end, on which event, in which state, what is done."""
    rows = [("sender", row.name, row.event, row.when, row.then) for row in SENDER_ROWS]
    rows += [("receiver", row.name, row.event, row.when, row.then) for row in RECEIVER_ROWS]
    return Card("failover", ("end", "row", "event", "state", "actions"), tuple(rows))


def _message(each: Event | Action) -> str:
    kind = each.message if isinstance(each, Action) else each.kind
    return f"{kind} e{each.epoch}" if kind == CHANGE else f"{kind} e{each.epoch} #{each.number}"
