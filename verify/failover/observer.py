"""One end of the failover protocol with what an observer remembers of it, and the rules that each step must keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optcc.failover import (
    BEGIN,
    DATA,
    DELIVER,
    FORGET,
    FREE,
    KEEP,
    RESUMED,
    SEND,
    STALLED,
    Action,
    Event,
    Link,
    Receiver,
    Sender,
)


@dataclass(frozen=True, slots=True)
class ObservedSender:
    """The sender and what it has done: chunks freed, the first chunk of each plan; `wrong` if that breaks a rule."""

    state: Sender
    freed: int = 0
    begun: tuple[int, ...] = (0,)
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class ObservedReceiver:
    """The receiver and what it has done: chunks given to the application; (key, number, epoch) of those kept."""

    state: Receiver
    given: int = 0
    begun: tuple[int, ...] = (0,)
    kept: tuple[tuple[int, int, int], ...] = ()
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """One step of one end, as an exploration met it."""

    row: str
    before: ObservedSender | ObservedReceiver
    event: Event
    after: ObservedSender | ObservedReceiver
    actions: tuple[Action, ...]


def observe_sender(
    link: Link, n_chunks: int, side: ObservedSender, after: Sender, actions: Sequence[Action]
) -> ObservedSender:
    """What these actions do, judged."""
    freed, begun, wrong = side.freed, side.begun, _outage_report(side.state.up, after.up, actions)
    for action in actions:
        if action.kind == FREE:
            if action.number != freed:
                wrong = f"chunk {action.number} is freed, and the next one to free is {freed}"
            freed += 1
        elif action.kind == BEGIN:
            if action.epoch != len(begun):
                wrong = f"the sender begins plan {action.epoch} after plan {len(begun) - 1}"
            begun = (*begun, action.number)
        elif action.kind == SEND:
            wrong = wrong or _wrong_rail(after.up, action)
            if action.message == DATA:
                if action.number < freed:
                    wrong = f"chunk {action.number} is sent again, and its memory is free"
                elif action.number >= freed + link.window:
                    wrong = f"chunk {action.number} is sent with chunks {freed} .. {action.number - 1} out: too many"
                elif action.number >= min(n_chunks, after.offered):
                    wrong = f"chunk {action.number} is sent, and there is none"
                elif action.epoch != len(begun) - 1 or action.number < begun[-1]:
                    wrong = f"chunk {action.number} is sent for plan {action.epoch}, to which it does not belong"
    return ObservedSender(after, freed, begun, wrong)


def observe_receiver(
    link: Link, side: ObservedReceiver, event: Event, after: Receiver, actions: Sequence[Action]
) -> ObservedReceiver:
    """What these actions do, judged."""
    given, begun, wrong = side.given, side.begun, _outage_report(side.state.up, after.up, actions)
    kept = {key: (number, epoch) for key, number, epoch in side.kept}
    for action in actions:
        if action.kind == KEEP:
            kept[action.number] = (event.number, event.epoch)
            if len(kept) > link.window:
                wrong = f"{len(kept)} chunks are kept: there is room for {link.window}"
        elif action.kind == DELIVER:
            content = kept.pop(action.number, None)
            if action.number != given:
                wrong = f"chunk {action.number} is given to the application, and the next one is {given}"
            elif content is None:
                wrong = f"chunk {action.number} is given to the application, and its bytes are not there"
            elif content != (given, len(begun) - 1):
                number, epoch = content
                wrong = f"chunk {given} of plan {len(begun) - 1} is given the bytes of chunk {number} of plan {epoch}"
            elif given >= after.offered:
                wrong = f"chunk {given} is given to the application, which has no slot for it"
            given += 1
        elif action.kind == FORGET:
            kept.clear()
        elif action.kind == BEGIN:
            if action.epoch != len(begun) or action.number != given:
                wrong = f"the receiver begins plan {action.epoch} at {action.number}, with {given} given"
            begun = (*begun, action.number)
        elif action.kind == SEND:
            wrong = wrong or _wrong_rail(after.up, action)
            if action.number > given:
                wrong = f"{action.number} chunks are acknowledged and {given} given to the application"
    staged = tuple((key, *content) for key, content in sorted(kept.items()))
    return ObservedReceiver(after, given, begun, staged, wrong)


def _outage_report(before: int, after: int, actions: Sequence[Action]) -> str:
    """Whether the loss of the last rail, and the return of the first, is reported."""
    kinds = [action.kind for action in actions]
    if (STALLED in kinds) != bool(before and not after) or (RESUMED in kinds) != bool(after and not before):
        return "an end that has lost its last rail, or got one back, must say so"
    return ""


def _wrong_rail(up: int, action: Action) -> str:
    return "" if up >> action.rail & 1 else f"{action}: the rail is known to be down"
