"""Replay: after any failure of rails, resuming from what is acknowledged loses no byte and reduces nothing twice.

The protocol is the table of `optcc.failover`, and it is this very table that is explored here, against a network that
does the worst it can:

- Each rail carries a set of messages each way, and delivers them in any order; with a budget, more than once.
- With budgets, rails fail and come back, in both directions or in one, and messages are lost or corrupted.
- What is on a failed rail arrives late or never. When it comes back, all of it is still there, or all of it is lost:
  an end does not see what is in flight, so whatever may go wrong with some of it does so with all of it (safety), and
  whatever still works with none of it works with some (liveness).
- Each end learns of failures and repairs at any later moment, or never; it may suspect a rail that is up. The sender's
  timer rings when nothing is under way any more and, with a budget or at any moment, too early.

`explore` goes through every reachable state of a small configuration. In each it checks that the application gets
chunks 0, 1, 2, ... each once, with the bytes of the plan of its epoch; that what is acknowledged has been given to it;
that memory is freed only then; that no more than `window` chunks are out; that both ends begin each plan at the same
chunk; that losing the last rail is reported. And from every state in which a rail is up, the end at which everything
is delivered and acknowledged must be within reach without any further fault.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np

from optcc.errors import InputError, SolverError
from optcc.failover import (
    ACK,
    BEGIN,
    CHANGE,
    DATA,
    DELIVER,
    DOWN,
    FORGET,
    FREE,
    KEEP,
    NOWHERE,
    OFFER,
    RECEIVER_ROWS,
    REPLAN,
    RESUMED,
    SEND,
    SENDER_ROWS,
    STALLED,
    TIMEOUT,
    UP,
    Action,
    Event,
    Link,
    Receiver,
    Row,
    Sender,
    find_row,
)
from optcc.show import Card, Shown
from optcc.verdict import PROVED, REFUTED, UNKNOWN, Counterexample
from optcc.verify.failover.induction import (
    FIXED,
    FIXED_FLAGS,
    INVARIANTS,
    MESSAGES,
    Exact,
    row_relation,
    safe,
)
from optcc.verify.smt import Checked

STATES_MAX = 5_000_000
TRACE_LINES_MAX = 18
_BUDGET_MAX = 7
_SIDE_BITS = 20


@dataclass(frozen=True, slots=True)
class Config:
    """A small configuration: its size, and how often each kind of fault may happen in one run.

    `losses` are messages lost or corrupted on a rail that is up, `suspicions` rails that an end takes for down although
    they are up, `replans` changes of plan, `early` timeouts while messages are under way (None: any number). `one_way`:
    a rail may also fail in one direction. Not `notified`: nobody is told of failures, only the timer helps. Not
    `timer`: it never rings. `stepwise`: chunks and slots are offered one by one, else all at once.

    Raises InputError for numbers that cannot be.
    """

    n_rails: int = 2
    n_chunks: int = 3
    window: int = 2
    failures: int = 1
    repairs: int = 0
    duplications: int = 0
    losses: int = 0
    suspicions: int = 0
    replans: int = 0
    early: int | None = 0
    one_way: bool = False
    notified: bool = True
    timer: bool = True
    stepwise: bool = False

    def __post_init__(self) -> None:
        Link(self.n_rails, self.window)
        if not 1 <= self.n_rails <= 4:
            raise InputError(f"{self.n_rails} rails: an exploration takes from 1 to 4")
        if not 1 <= self.n_chunks <= 64:
            raise InputError(f"{self.n_chunks} chunks: an exploration takes from 1 to 64")
        for name in _BUDGETS:
            if not 0 <= (getattr(self, name) or 0) <= _BUDGET_MAX:
                raise InputError(f"{name} {getattr(self, name)}: must be from 0 to {_BUDGET_MAX}")

    def __str__(self) -> str:
        words = [f"{self.n_rails} rails, {self.n_chunks} chunks, window {self.window}"]
        words += [f"{getattr(self, name)} {name}" for name in _BUDGETS if getattr(self, name)]
        words += ["timeouts at any moment"] if self.early is None else []
        words += ["one-way failures"] if self.one_way else []
        words += ["nobody is told"] if not self.notified else []
        words += ["no timer"] if not self.timer else []
        words += ["offers one by one"] if self.stepwise else []
        return ", ".join(words)


_BUDGETS = ("failures", "repairs", "duplications", "losses", "suspicions", "replans", "early")
_FAILURES, _REPAIRS, _DUPLICATIONS, _LOSSES, _SUSPICIONS, _REPLANS, _EARLY = (3 * i for i in range(len(_BUDGETS)))


@dataclass(frozen=True, slots=True)
class Exploration(Shown):
    """What became of one configuration. `rows` are the rows of the table that some run used.

    `verdict` is `unknown` if there are more states than were allowed.
    """

    config: Config
    n_states: int
    n_transitions: int
    verdict: str
    rows: frozenset[str]
    counterexample: Counterexample | None = None

    def card(self) -> Card:
        rows = (
            ("verdict", self.verdict),
            ("states", f"{self.n_states}"),
            ("transitions", f"{self.n_transitions}"),
            ("rows of the table used", f"{len(self.rows)} of {len(SENDER_ROWS) + len(RECEIVER_ROWS)}"),
        )
        return Card(f"replay: {self.config}", ("what", "value"), rows)


@dataclass(frozen=True, slots=True)
class Replay(Shown):
    """The standard set of configurations, each explored to the end."""

    explorations: tuple[Exploration, ...]

    @property
    def verdict(self) -> str:
        """`proved` if every configuration is, `refuted` if one is, else `unknown`."""
        verdicts = {each.verdict for each in self.explorations}
        return REFUTED if REFUTED in verdicts else UNKNOWN if UNKNOWN in verdicts else PROVED

    @property
    def counterexample(self) -> Counterexample | None:
        """The first one, if the verdict is `refuted`."""
        return next((each.counterexample for each in self.explorations if each.counterexample), None)

    @property
    def n_states(self) -> int:
        """Distinct states of all configurations together."""
        return sum(each.n_states for each in self.explorations)

    @property
    def n_transitions(self) -> int:
        """Transitions of all configurations together."""
        return sum(each.n_transitions for each in self.explorations)

    def card(self) -> Card:
        rows = tuple(
            (str(each.config), str(each.n_states), str(each.n_transitions), each.verdict) for each in self.explorations
        )
        title = f"replay: {self.verdict}, {self.n_states} states, {self.n_transitions} transitions"
        return Card(title, ("configuration", "states", "transitions", "verdict"), rows)


QUICK = (
    Config(n_chunks=3),
    Config(n_chunks=3, window=1, losses=1, duplications=1),
    Config(n_chunks=2, failures=1, suspicions=1),
    Config(n_chunks=2, replans=1),
    Config(n_chunks=2, replans=1, failures=2, timer=False),
    Config(n_chunks=2, failures=1, replans=2, window=1),
    Config(n_chunks=3, one_way=True, notified=False, early=1),
    Config(n_rails=1, n_chunks=3, failures=2, repairs=2),
    Config(n_rails=3, n_chunks=2, failures=2, timer=False),
)
"""Some 10^5 states, seconds; every row of the table that does anything."""
FULL = (
    *QUICK,
    Config(n_chunks=6, window=3),
    Config(n_chunks=5, early=1),
    Config(n_chunks=3, early=None),
    Config(n_chunks=3, failures=2, repairs=1),
    Config(n_chunks=4, losses=1, duplications=1),
    Config(n_chunks=3, suspicions=1, stepwise=True),
    Config(n_chunks=3, failures=2, repairs=1, one_way=True, notified=False),
    Config(n_chunks=3, replans=1),
    Config(n_chunks=2, window=1, failures=2, replans=1),
    Config(n_chunks=2, repairs=1, replans=1),
    Config(n_chunks=2, losses=1, duplications=1, replans=1),
    Config(n_chunks=1, window=1, repairs=1, replans=2),
    Config(n_rails=3, n_chunks=3, window=3, failures=2),
    Config(n_rails=3, n_chunks=2, failures=2, repairs=1),
    Config(n_rails=3, n_chunks=2, window=1, failures=2, replans=1),
    Config(n_rails=3, n_chunks=2, failures=2, replans=1, timer=False),
)
"""Some 8.6 * 10^6 states, a minute or two and 450 MiB."""


def explore(
    config: Config,
    *,
    sender_rows: Sequence[Row[Sender]] = SENDER_ROWS,
    receiver_rows: Sequence[Row[Receiver]] = RECEIVER_ROWS,
    states_max: int = STATES_MAX,
) -> Exploration:
    """Goes through every state of `config` that can be reached; other rows than the protocol's make other protocols.

    >>> explore(Config(n_chunks=2, window=1, failures=1)).verdict
    'proved'
    """
    return _Explorer(config, sender_rows, receiver_rows).explore(states_max)


def check_replay(configs: Sequence[Config] = QUICK, *, states_max: int = STATES_MAX) -> Replay:
    """Explores each of the configurations: QUICK, or FULL, or others."""
    return Replay(tuple(explore(config, states_max=states_max) for config in configs))


# --- one end, with what an observer remembers of it -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SenderSide:
    """The sender and what it has done: chunks freed, the first chunk of each plan; `wrong` if that breaks a rule."""

    state: Sender
    freed: int = 0
    begun: tuple[int, ...] = (0,)
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class _ReceiverSide:
    """The receiver and what it has done: chunks given to the application; (key, number, epoch) of those kept."""

    state: Receiver
    given: int = 0
    begun: tuple[int, ...] = (0,)
    kept: tuple[tuple[int, int, int], ...] = ()
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of one end, as an exploration met it."""

    row: str
    before: _SenderSide | _ReceiverSide
    event: Event
    after: _SenderSide | _ReceiverSide
    actions: tuple[Action, ...]


def _watch_sender(
    link: Link, n_chunks: int, side: _SenderSide, after: Sender, actions: Sequence[Action]
) -> _SenderSide:
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
    return _SenderSide(after, freed, begun, wrong)


def _watch_receiver(
    link: Link, side: _ReceiverSide, event: Event, after: Receiver, actions: Sequence[Action]
) -> _ReceiverSide:
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
    return _ReceiverSide(after, given, begun, staged, wrong)


def _outage_report(before: int, after: int, actions: Sequence[Action]) -> str:
    """Whether the loss of the last rail, and the return of the first, is reported."""
    kinds = [action.kind for action in actions]
    if (STALLED in kinds) != bool(before and not after) or (RESUMED in kinds) != bool(after and not before):
        return "an end that has lost its last rail, or got one back, must say so"
    return ""


def _wrong_rail(up: int, action: Action) -> str:
    return "" if up >> action.rail & 1 else f"{action}: the rail is known to be down"


# --- the exploration --------------------------------------------------------------------------------------------------


class _Explorer:
    """All reachable states of one configuration.

    A state is one integer: the numbers of the two sides, which directions of the rails are up, the budgets left, and
    one bit for each message that is in flight. The steps of the table are looked up once for each side and event.
    """

    def __init__(
        self, config: Config, sender_rows: Sequence[Row[Sender]], receiver_rows: Sequence[Row[Receiver]]
    ) -> None:
        self.config = config
        self.link = Link(config.n_rails, config.window)
        self.sender_rows, self.receiver_rows = sender_rows, receiver_rows
        self.rows: set[str] = set()
        self.steps: list[_Step] = []
        self._name_messages()
        self.sender_sides: list[_SenderSide] = []
        self.receiver_sides: list[_ReceiverSide] = []
        self._sender_ids: dict[_SenderSide, int] = {}
        self._receiver_ids: dict[_ReceiverSide, int] = {}
        self._sender_memo: dict[int, tuple[int, int]] = {}
        self._receiver_memo: dict[int, tuple[int, int]] = {}
        self._cross: dict[int, str] = {}
        self._alive_masks: dict[int, int] = {}
        self.net_shift = 2 * _SIDE_BITS + 2 * config.n_rails + 3 * len(_BUDGETS)
        self.budget_shift = 2 * _SIDE_BITS + 2 * config.n_rails

    def _name_messages(self) -> None:
        """A bit for each message that can be in flight, and an event for everything that can happen to an end."""
        config = self.config
        n, epochs, rails = config.n_chunks, config.replans + 1, range(config.n_rails)
        to_receiver = [
            event
            for rail in rails
            for event in (
                *(Event(DATA, rail, epoch, number) for epoch in range(epochs) for number in range(n)),
                *(Event(CHANGE, rail, epoch) for epoch in range(1, epochs)),
            )
        ]
        to_sender = [
            Event(ACK, rail, epoch, number) for rail in rails for epoch in range(epochs) for number in range(n + 1)
        ]
        self.messages = [*to_receiver, *to_sender]
        self.n_to_receiver = len(to_receiver)
        self.bit_of = {(each.kind, each.rail, each.epoch, each.number): i for i, each in enumerate(self.messages)}
        # The directions: rail r to the receiver is bit 2r of the network, to the sender bit 2r + 1.
        self.direction = [2 * each.rail + (i >= self.n_to_receiver) for i, each in enumerate(self.messages)]
        self.rail_mask = [0] * (2 * config.n_rails)
        for i, direction in enumerate(self.direction):
            self.rail_mask[direction] |= 1 << i
        local = [Event(OFFER), Event(TIMEOUT), Event(REPLAN)]
        local += [Event(kind, rail) for kind in (DOWN, UP) for rail in rails]
        self.events = [*self.messages, *local]
        at = len(self.messages)
        self.offer, self.timeout, self.replan = at, at + 1, at + 2
        self.down, self.up = at + 3, at + 3 + config.n_rails

    # Sides and their steps.

    def _sender_id(self, side: _SenderSide) -> int:
        number = self._sender_ids.setdefault(side, len(self.sender_sides))
        if number == len(self.sender_sides):
            assert number < 1 << _SIDE_BITS
            self.sender_sides.append(side)
        return number

    def _receiver_id(self, side: _ReceiverSide) -> int:
        number = self._receiver_ids.setdefault(side, len(self.receiver_sides))
        if number == len(self.receiver_sides):
            assert number < 1 << _SIDE_BITS
            self.receiver_sides.append(side)
        return number

    def _step_sender(self, key: int) -> tuple[int, int]:
        """(new side, messages sent) for `key`, which is side << 20 | event."""
        event, side = self.events[key & 0xFFFFF], self.sender_sides[key >> 20]
        row = find_row(self.sender_rows, self.link, side.state, event)
        after, actions = row.effect(self.link, side.state, event)
        watched = _watch_sender(self.link, self.config.n_chunks, side, after, actions)
        self.rows.add(row.name)
        self.steps.append(_Step(row.name, side, event, watched, actions))
        result = self._sender_id(watched), self._bits(watched.wrong, actions)
        self._sender_memo[key] = result
        return result

    def _step_receiver(self, key: int) -> tuple[int, int]:
        event, side = self.events[key & 0xFFFFF], self.receiver_sides[key >> 20]
        row = find_row(self.receiver_rows, self.link, side.state, event)
        after, actions = row.effect(self.link, side.state, event)
        watched = _watch_receiver(self.link, side, event, after, actions)
        self.rows.add(row.name)
        self.steps.append(_Step(row.name, side, event, watched, actions))
        result = self._receiver_id(watched), self._bits(watched.wrong, actions)
        self._receiver_memo[key] = result
        return result

    def _bits(self, wrong: str, actions: Sequence[Action]) -> int:
        """The messages that these actions put on the network; none for a step that breaks a rule: the run ends."""
        bits = 0
        for action in () if wrong else actions:
            if action.kind == SEND:
                bits |= 1 << self.bit_of[action.message, action.rail, action.epoch, action.number]
        return bits

    # States.

    def _start(self) -> int:
        """Everything up, nothing in flight; everything offered, unless offers are steps of their own."""
        config = self.config
        sender, receiver = _SenderSide(self.link.sender()), _ReceiverSide(self.link.receiver())
        s, r, net = self._sender_id(sender), self._receiver_id(receiver), 0
        for _ in range(0 if config.stepwise else config.n_chunks):
            r, _none = self._step_receiver(r << 20 | self.offer)
            s, bits = self._step_sender(s << 20 | self.offer)
            net |= bits
        budgets = sum((getattr(config, name) or 0) << 3 * i for i, name in enumerate(_BUDGETS))
        actual = (1 << 2 * config.n_rails) - 1
        return net << self.net_shift | budgets << self.budget_shift | actual << 2 * _SIDE_BITS | r << _SIDE_BITS | s

    def successors(self, state: int) -> list[tuple[int, int]]:
        """(next state, move) for each move. A move is 8 * event + 4 at the receiver + 2 if the message stays in flight
        + 1 if no fault is needed; or, behind the events, what the network does (`_network_move`).
        """
        config, n_rails = self.config, self.config.n_rails
        side_mask = (1 << _SIDE_BITS) - 1
        net_shift, budget_shift = self.net_shift, self.budget_shift
        sender_memo, receiver_memo = self._sender_memo, self._receiver_memo
        s, r = state & side_mask, state >> _SIDE_BITS & side_mask
        actual = state >> 2 * _SIDE_BITS & (1 << 2 * n_rails) - 1
        budgets = state >> budget_shift & (1 << 3 * len(_BUDGETS)) - 1
        net = state >> net_shift
        # What stays when a step changes a side and the messages: the network's own part.
        fixed = state & ((1 << net_shift) - 1) & ~((1 << 2 * _SIDE_BITS) - 1)
        found: list[tuple[int, int]] = []

        def at_sender(event: int, left: int, kept: int, flags: int) -> None:
            key = s << 20 | event
            new, bits = sender_memo.get(key) or self._step_sender(key)
            found.append(((left | bits) << net_shift | kept | r << _SIDE_BITS | new, 8 * event + flags))

        def at_receiver(event: int, left: int, kept: int, flags: int) -> None:
            key = r << 20 | event
            new, bits = receiver_memo.get(key) or self._step_receiver(key)
            found.append(((left | bits) << net_shift | kept | new << _SIDE_BITS | s, 8 * event + 4 + flags))

        sender, receiver = self.sender_sides[s].state, self.receiver_sides[r].state
        # Messages arrive, once or (with a budget) and stay; on a rail that is up, or late on one that is down.
        more = budgets >> _DUPLICATIONS & 7
        left = net
        while left:
            low = left & -left
            left ^= low
            bit = low.bit_length() - 1
            free_of_faults = actual >> self.direction[bit] & 1
            arrive = at_receiver if bit < self.n_to_receiver else at_sender
            arrive(bit, net ^ low, fixed, free_of_faults)
            if more:
                arrive(bit, net, fixed - (1 << budget_shift + _DUPLICATIONS), 2)
            if budgets >> _LOSSES & 7 and free_of_faults:
                lost = fixed - (1 << budget_shift + _LOSSES)
                found.append(((net ^ low) << net_shift | lost | r << _SIDE_BITS | s, self._network_move(0, bit)))
        if not config.timer:
            pass
        elif config.early is None or not net & self._alive(actual):
            at_sender(self.timeout, net, fixed, 1)
        elif budgets >> _EARLY & 7:
            at_sender(self.timeout, net, fixed - (1 << budget_shift + _EARLY), 0)
        if config.stepwise:
            if sender.offered < config.n_chunks:
                at_sender(self.offer, net, fixed, 1)
            if receiver.offered < config.n_chunks:
                at_receiver(self.offer, net, fixed, 1)
        if budgets >> _REPLANS & 7 and not sender.changing:
            at_sender(self.replan, net, fixed - (1 << budget_shift + _REPLANS), 0)
        suspicions = budgets >> _SUSPICIONS & 7
        for rail in range(n_rails):
            rail_is_up = actual >> 2 * rail & 3 == 3
            for knows, at in ((sender.up >> rail & 1, at_sender), (receiver.up >> rail & 1, at_receiver)):
                if knows and not rail_is_up and config.notified:
                    at(self.down + rail, net, fixed, 1)
                elif knows and rail_is_up and suspicions:
                    at(self.down + rail, net, fixed - (1 << budget_shift + _SUSPICIONS), 0)
                elif not knows and rail_is_up:
                    at(self.up + rail, net, fixed, 1)
            self._rail_fails_or_returns(state, rail, found)
        return found

    def _alive(self, actual: int) -> int:
        """The messages that travel in a direction that is up."""
        known = self._alive_masks.get(actual)
        if known is None:
            known = sum(mask for way, mask in enumerate(self.rail_mask) if actual >> way & 1)
            self._alive_masks[actual] = known
        return known

    def _rail_fails_or_returns(self, state: int, rail: int, found: list[tuple[int, int]]) -> None:
        """Faults of the rail itself; nobody is told yet."""
        shift = 2 * _SIDE_BITS + 2 * rail
        ways = state >> shift & 3
        rest = state & ~(3 << shift)
        if ways and state >> self.budget_shift + _FAILURES & 7:
            failed = rest - (1 << self.budget_shift + _FAILURES)
            for left in {0, ways & 1, ways & 2} if self.config.one_way else {0}:
                if left != ways:
                    found.append((failed | left << shift, self._network_move(1 + left, rail)))
        if ways != 3 and state >> self.budget_shift + _REPAIRS & 7:
            repaired = (rest | 3 << shift) - (1 << self.budget_shift + _REPAIRS)
            lost = 0
            for way in (0, 1):
                if not ways >> way & 1:
                    lost |= self.rail_mask[2 * rail + way]
            found.append((repaired, self._network_move(5, rail)))
            found.append((repaired & ~(lost << self.net_shift), self._network_move(6, rail)))

    def _network_move(self, what: int, where: int) -> int:
        return 8 * (len(self.events) + 7 * where + what)

    def _describe(self, move: int) -> str:
        """A move in words."""
        what, at_receiver, twice = move // 8, bool(move & 4), bool(move & 2)
        if what < len(self.events):
            end = "receiver" if at_receiver else "sender"
            return f"{end}: {self.events[what]}" + (", and stays in flight" if twice else "")
        where, what = divmod(what - len(self.events), 7)
        if what == 0:
            return f"network: {str(self.messages[where]).replace('arrives', 'is lost')}"
        ways = ("both ways", "towards the sender", "towards the receiver")
        if what < 5:
            return f"network: rail {where} fails {ways[what - 1]}"
        return f"network: rail {where} comes back, {'nothing' if what == 5 else 'everything'} on it is lost"

    def _violation(self, state: int) -> str:
        """Which rule this state breaks; empty if none."""
        side_mask = (1 << _SIDE_BITS) - 1
        sides = state & (1 << 2 * _SIDE_BITS) - 1
        known = self._cross.get(sides)
        if known is None:
            sender, receiver = self.sender_sides[sides & side_mask], self.receiver_sides[sides >> _SIDE_BITS]
            known = sender.wrong or receiver.wrong
            if not known and sender.freed > receiver.given:
                known = f"{sender.freed} chunks are freed and {receiver.given} given to the application"
            for epoch, (here, there) in enumerate(zip(sender.begun, receiver.begun, strict=False)):
                if here != there and not known:
                    known = f"plan {epoch} begins at chunk {here} for the sender and at {there} for the receiver"
            self._cross[sides] = known
        return known

    def _is_end(self, state: int) -> bool:
        """True if everything is delivered and acknowledged, and no change is under way."""
        sender = self.sender_sides[state & (1 << _SIDE_BITS) - 1]
        receiver = self.receiver_sides[state >> _SIDE_BITS & (1 << _SIDE_BITS) - 1]
        n_chunks = self.config.n_chunks
        return sender.freed == receiver.given == n_chunks and not sender.state.changing

    def _has_rail(self, state: int) -> bool:
        """True if some rail works in both directions."""
        actual = state >> 2 * _SIDE_BITS
        return any(actual >> 2 * rail & 3 == 3 for rail in range(self.config.n_rails))

    def explore(self, states_max: int) -> Exploration:
        """Breadth first, so that the first trace found is a shortest one; then backwards from the end."""
        start = self._start()
        self.states = states = [start]
        number_of = {start: 0}
        self.parents = parents = array("i", [-1])
        sources, targets = array("i"), array("i")
        n_transitions, at = 0, 0
        violation = self._violation(start)
        successors, check, cross = self.successors, self._violation, self._cross
        sides_mask = (1 << 2 * _SIDE_BITS) - 1
        while at < len(states) and not violation and len(states) <= states_max:
            state = states[at]
            for child, move in successors(state):
                if child == state:
                    continue
                n_transitions += 1
                number = number_of.get(child)
                if number is None:
                    number = number_of[child] = len(states)
                    states.append(child)
                    parents.append(at)
                    known = cross.get(child & sides_mask)
                    violation = check(child) if known is None else known
                    if violation:
                        break
                if move & 1:
                    sources.append(at)
                    targets.append(number)
            at += 1
        rows = frozenset(self.rows)
        if violation:
            example = self._counterexample(violation, len(states) - 1)
            return Exploration(self.config, len(states), n_transitions, REFUTED, rows, example)
        if at < len(states):
            return Exploration(self.config, len(states), n_transitions, UNKNOWN, rows)
        stuck = self._first_stuck(np.frombuffer(sources, np.int32), np.frombuffer(targets, np.int32))
        if stuck is not None:
            text = "a rail is up and nothing fails any more, and not all chunks can be delivered and acknowledged"
            example = self._counterexample(text, stuck, self._describe_stuck(self.states[stuck]))
            return Exploration(self.config, len(states), n_transitions, REFUTED, rows, example)
        return Exploration(self.config, len(states), n_transitions, PROVED, rows)

    def walk(self, random: Random, n_moves: int) -> None:
        """A random run, and another one when it is at its end; collects the steps of the table on the way.

        Raises SolverError for a state that breaks a rule: explorations of the same rows should have found it.
        """
        state = self._start()
        for _ in range(n_moves):
            moves = [child for child, _ in self.successors(state) if child != state]
            state = random.choice(moves) if moves else self._start()
            violation = self._violation(state)
            if violation:
                raise SolverError(f"{self.config}: {violation}")

    def _first_stuck(self, sources: Any, targets: Any) -> int | None:
        """The first state with a rail up from which no end can be reached without a fault."""
        good = np.fromiter(map(self._is_end, self.states), bool, len(self.states))
        order = np.argsort(targets, kind="stable")
        sources, sorted_targets = sources[order], targets[order]
        starts = np.searchsorted(sorted_targets, np.arange(len(self.states) + 1))
        frontier = np.flatnonzero(good)
        while len(frontier):
            counts = starts[frontier + 1] - starts[frontier]
            offsets = np.repeat(starts[frontier] - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
            reached = np.unique(sources[np.arange(counts.sum()) + offsets])
            frontier = reached[~good[reached]]
            good[frontier] = True
        return next((int(at) for at in np.flatnonzero(~good) if self._has_rail(self.states[at])), None)

    def _describe_stuck(self, state: int) -> str:
        """What a state from which the end is out of reach looks like."""
        sender = self.sender_sides[state & (1 << _SIDE_BITS) - 1].state
        receiver = self.receiver_sides[state >> _SIDE_BITS & (1 << _SIDE_BITS) - 1].state
        actual = state >> 2 * _SIDE_BITS
        up = [str(rail) for rail in range(self.config.n_rails) if actual >> 2 * rail & 3 == 3]
        return (
            f"stuck: rails up {', '.join(up)}; acknowledged {sender.acked}, out {len(sender.out)}, "
            f"delivered {receiver.delivered} of {self.config.n_chunks}"
        )

    def _counterexample(self, summary: str, last: int, ending: str = "") -> Counterexample:
        """The moves from the start to this state; the middle of a long trace is left out."""
        path = [last]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        lines: list[str] = []
        for before, after in pairwise(reversed(path)):
            target = self.states[after]
            move = next(move for child, move in self.successors(self.states[before]) if child == target)
            lines.append(f"{len(lines) + 1}. {self._describe(move)}")
        if len(lines) > TRACE_LINES_MAX:
            half = TRACE_LINES_MAX // 2
            left_out = len(lines) - 2 * half + 1
            lines = [*lines[: half - 1], f"... {left_out} more", *lines[-half:]]
        lines += [ending] if ending else []
        return Counterexample("replay", f"{summary} ({self.config})", trace=tuple(lines))


# --- the relations and invariants for any number of chunks, held against the table ------------------------------------


def check_encoding(
    configs: Sequence[Config] = QUICK, *, walks: Sequence[Config] = (), n_moves: int = 10_000, seed: int = 0
) -> Checked:
    """Every step of the table in these explorations satisfies the relation of its row, for every chunk and message.

    So does every step of a random walk of `n_moves` moves through each configuration of `walks`, which may be larger.

    Raises SolverError, naming the step, if one does not.
    """
    n_steps = n_cases = 0
    for config, walked in (*((each, False) for each in configs), *((each, True) for each in walks)):
        explorer = _Explorer(config, SENDER_ROWS, RECEIVER_ROWS)
        if walked:
            explorer.walk(Random(seed), n_moves)
        else:
            explorer.explore(STATES_MAX)
        for step in explorer.steps:
            n_steps += 1
            for case in _cases(config, step):
                n_cases += 1
                if not row_relation(Exact(), step.row, *case):
                    raise SolverError(f"{step.row}: {step.event} in {step.before.state}: is not what the relation says")
    statement = "each row of the table does what its relation says"
    return Checked(statement, f"{n_steps} steps of explorations, {n_cases} cases, evaluated exactly")


def check_invariants(config: Config) -> Checked:
    """Every reachable state of the configuration satisfies the invariants, for every chunk and message.

    Raises SolverError, naming the state and the invariant, if one does not.
    """
    explorer = _Explorer(config, SENDER_ROWS, RECEIVER_ROWS)
    result = explorer.explore(STATES_MAX)
    side_mask, logic = (1 << _SIDE_BITS) - 1, Exact()
    for state in explorer.states:
        sender = explorer.sender_sides[state & side_mask]
        receiver = explorer.receiver_sides[state >> _SIDE_BITS & side_mask]
        net = state >> explorer.net_shift
        flying = [each for i, each in enumerate(explorer.messages) if net >> i & 1]
        for x in range(config.n_chunks + 1):
            for message in (None, *flying):
                v, k = _values(sender, receiver, x), _fixed(config, x)
                if message is not None:
                    v[message.kind] = True
                    k[f"{message.kind} epoch"], k[f"{message.kind} number"] = message.epoch, message.number
                for name, each in INVARIANTS.items():
                    if not each(logic, v, k):
                        raise SolverError(f"{name}: does not hold of chunk {x}, {message}, {sender}, {receiver}")
                if not safe(logic, v, k):
                    raise SolverError(f"safety: does not hold of chunk {x}, {message}, {sender}, {receiver}")
    return Checked(f"the invariants hold: {config}", f"{result.n_states} states, evaluated exactly")


def _cases(config: Config, step: _Step) -> Iterable[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Before, after and what stays, for each chunk and for each message that is sent, and for none."""
    link, event = Link(config.n_rails, config.window), step.event
    sent = [None, *(action for action in step.actions if action.kind == SEND)]
    for x in range(config.n_chunks + 1):
        for message in sent:
            if isinstance(step.before, _SenderSide):
                assert isinstance(step.after, _SenderSide)
                other = _ReceiverSide(link.receiver())
                v, w = (_values(side, other, x) for side in (step.before, step.after))
            else:
                assert isinstance(step.after, _ReceiverSide)
                v, w = (_values(_SenderSide(link.sender()), side, x) for side in (step.before, step.after))
            k = _fixed(config, x)
            k["event epoch"], k["event number"] = event.epoch, event.number
            if message is not None:
                w[message.message] = True
                k[f"{message.message} epoch"], k[f"{message.message} number"] = message.epoch, message.number
            if isinstance(step.before, _SenderSide):
                state = step.before.state
                rail = state.out[x - state.acked] if state.acked <= x < state.sent else NOWHERE
                k["x on lost rail"] = event.kind == DOWN and rail == event.rail
                k["proposal on lost rail"] = event.kind == DOWN and state.asked == event.rail
            else:
                assert isinstance(step.after, _ReceiverSide)
                k["last"] = step.after.state.delivered - 1
                kept = {key: epoch for key, _, epoch in step.before.kept}
                k["last kept"], k["last kept epoch"] = k["last"] in kept, kept.get(k["last"], 0)
                if not w["kept"]:
                    # Not kept any more, or given at once: which bytes these were.
                    fresh = step.row == "fresh chunk" and x == event.number
                    w["kept epoch"] = event.epoch if fresh else v["kept epoch"]
            yield v, w, k


def _values(sender: _SenderSide, receiver: _ReceiverSide, x: int) -> dict[str, Any]:
    """The values that describe a state and chunk `x`, no message in flight."""
    here, there = sender.state, receiver.state
    rail = here.out[x - here.acked] if here.acked <= x < here.sent else None
    kept = {key: epoch for key, _, epoch in receiver.kept}
    return {
        **{"epoch": here.epoch, "start": here.start, "offered": here.offered, "acked": here.acked, "sent": here.sent},
        **{"freed": sender.freed, "changing": here.changing, "any rail": bool(here.up)},
        "asked on rail": here.asked != NOWHERE and bool(here.up >> here.asked & 1),
        "out on rail": rail is not None and rail != NOWHERE and bool(here.up >> rail & 1),
        "marked": rail == NOWHERE,
        **{"epoch there": there.epoch, "start there": there.start, "slots": there.offered},
        **{"delivered": there.delivered, "given": receiver.given, "kept": x in kept, "kept epoch": kept.get(x, 0)},
        **dict.fromkeys(MESSAGES, False),
    }


def _fixed(config: Config, x: int) -> dict[str, Any]:
    return {**dict.fromkeys(FIXED, 0), **dict.fromkeys(FIXED_FLAGS, False), "window": config.window, "x": x}
