"""The states of the failover protocol over a network that does the worst it can, packed, and the moves between them."""

from __future__ import annotations

from collections.abc import Sequence

from optcc.failover import (
    ACK,
    CHANGE,
    DATA,
    DOWN,
    OFFER,
    REPLAN,
    SEND,
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
from optcc.verify.failover.configurations import BUDGETS, Config
from optcc.verify.failover.observer import (
    ObservedReceiver,
    ObservedSender,
    ObservedStep,
    observe_receiver,
    observe_sender,
)

_SIDE_BITS = 20
_SIDE_MASK = (1 << _SIDE_BITS) - 1
SIDES_MASK = (1 << 2 * _SIDE_BITS) - 1
"""Of a packed state: its two sides, on which alone depends whether it breaks a rule."""
_FAILURES, _REPAIRS, _DUPLICATIONS, _LOSSES, _SUSPICIONS, _REPLANS, _EARLY = (3 * i for i in range(len(BUDGETS)))


class StateSpace:
    """The states of one configuration, each found when a move leads to it.

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
        self.steps: list[ObservedStep] = []
        self._name_messages()
        self.sender_sides: list[ObservedSender] = []
        self.receiver_sides: list[ObservedReceiver] = []
        self._sender_ids: dict[ObservedSender, int] = {}
        self._receiver_ids: dict[ObservedReceiver, int] = {}
        self._sender_memo: dict[int, tuple[int, int]] = {}
        self._receiver_memo: dict[int, tuple[int, int]] = {}
        self.violations: dict[int, str] = {}
        """Of the sides of a state: which rule they break."""
        self._alive_masks: dict[int, int] = {}
        self.net_shift = 2 * _SIDE_BITS + 2 * config.n_rails + 3 * len(BUDGETS)
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

    def _sender_id(self, side: ObservedSender) -> int:
        number = self._sender_ids.setdefault(side, len(self.sender_sides))
        if number == len(self.sender_sides):
            assert number < 1 << _SIDE_BITS
            self.sender_sides.append(side)
        return number

    def _receiver_id(self, side: ObservedReceiver) -> int:
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
        watched = observe_sender(self.link, self.config.n_chunks, side, after, actions)
        self.rows.add(row.name)
        self.steps.append(ObservedStep(row.name, side, event, watched, actions))
        result = self._sender_id(watched), self._bits(watched.wrong, actions)
        self._sender_memo[key] = result
        return result

    def _step_receiver(self, key: int) -> tuple[int, int]:
        event, side = self.events[key & 0xFFFFF], self.receiver_sides[key >> 20]
        row = find_row(self.receiver_rows, self.link, side.state, event)
        after, actions = row.effect(self.link, side.state, event)
        watched = observe_receiver(self.link, side, event, after, actions)
        self.rows.add(row.name)
        self.steps.append(ObservedStep(row.name, side, event, watched, actions))
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

    def start(self) -> int:
        """Everything up, nothing in flight; everything offered, unless offers are steps of their own."""
        config = self.config
        sender, receiver = ObservedSender(self.link.sender()), ObservedReceiver(self.link.receiver())
        s, r, net = self._sender_id(sender), self._receiver_id(receiver), 0
        for _ in range(0 if config.stepwise else config.n_chunks):
            r, _none = self._step_receiver(r << 20 | self.offer)
            s, bits = self._step_sender(s << 20 | self.offer)
            net |= bits
        budgets = sum((getattr(config, name) or 0) << 3 * i for i, name in enumerate(BUDGETS))
        actual = (1 << 2 * config.n_rails) - 1
        return net << self.net_shift | budgets << self.budget_shift | actual << 2 * _SIDE_BITS | r << _SIDE_BITS | s

    def successors(self, state: int) -> list[tuple[int, int]]:
        """(next state, move) for each move. A move is 8 * event + 4 at the receiver + 2 if the message stays in flight
        + 1 if no fault is needed; or, behind the events, what the network does (`_network_move`).

        One function, as it runs once for every state: millions of times.
        """
        config, n_rails = self.config, self.config.n_rails
        net_shift, budget_shift = self.net_shift, self.budget_shift
        sender_memo, receiver_memo = self._sender_memo, self._receiver_memo
        s, r = state & _SIDE_MASK, state >> _SIDE_BITS & _SIDE_MASK
        actual = state >> 2 * _SIDE_BITS & (1 << 2 * n_rails) - 1
        budgets = state >> budget_shift & (1 << 3 * len(BUDGETS)) - 1
        net = state >> net_shift
        # What stays when a step changes a side and the messages: the network's own part.
        fixed = state & ((1 << net_shift) - 1) & ~SIDES_MASK
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

    def describe(self, move: int) -> str:
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

    def sides(self, state: int) -> tuple[ObservedSender, ObservedReceiver]:
        """The two ends of a state."""
        return self.sender_sides[state & _SIDE_MASK], self.receiver_sides[state >> _SIDE_BITS & _SIDE_MASK]

    def in_flight(self, state: int) -> list[Event]:
        """The messages that are in flight in a state."""
        net = state >> self.net_shift
        return [each for i, each in enumerate(self.messages) if net >> i & 1]

    def violation(self, state: int) -> str:
        """Which rule this state breaks; empty if none."""
        sides = state & SIDES_MASK
        known = self.violations.get(sides)
        if known is None:
            sender, receiver = self.sides(state)
            known = sender.wrong or receiver.wrong
            if not known and sender.freed > receiver.given:
                known = f"{sender.freed} chunks are freed and {receiver.given} given to the application"
            for epoch, (here, there) in enumerate(zip(sender.begun, receiver.begun, strict=False)):
                if here != there and not known:
                    known = f"plan {epoch} begins at chunk {here} for the sender and at {there} for the receiver"
            self.violations[sides] = known
        return known

    def is_end(self, state: int) -> bool:
        """True if everything is delivered and acknowledged, and no change is under way."""
        sender, receiver = self.sides(state)
        n_chunks = self.config.n_chunks
        return sender.freed == receiver.given == n_chunks and not sender.state.changing

    def has_rail(self, state: int) -> bool:
        """True if some rail works in both directions."""
        actual = state >> 2 * _SIDE_BITS
        return any(actual >> 2 * rail & 3 == 3 for rail in range(self.config.n_rails))

    def describe_stuck(self, state: int) -> str:
        """What a state from which the end is out of reach looks like."""
        here, there = self.sides(state)
        sender, receiver = here.state, there.state
        actual = state >> 2 * _SIDE_BITS
        up = [str(rail) for rail in range(self.config.n_rails) if actual >> 2 * rail & 3 == 3]
        return (
            f"stuck: rails up {', '.join(up)}; acknowledged {sender.acked}, out {len(sender.out)}, "
            f"delivered {receiver.delivered} of {self.config.n_chunks}"
        )
