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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np

from optcc.errors import SolverError
from optcc.failover import RECEIVER_ROWS, SENDER_ROWS, Receiver, Row, Sender
from optcc.show import Card, Shown
from optcc.verdict import PROVED, REFUTED, UNKNOWN, Counterexample
from optcc.verify.failover.configurations import QUICK, Config
from optcc.verify.failover.state_space import SIDES_MASK, StateSpace

STATES_MAX = 5_000_000
TRACE_LINES_MAX = 18


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
    return Explorer(StateSpace(config, sender_rows, receiver_rows)).explore(states_max)


def check_replay(configs: Sequence[Config] = QUICK, *, states_max: int = STATES_MAX) -> Replay:
    """Explores each of the configurations: QUICK, or FULL, or others."""
    return Replay(tuple(explore(config, states_max=states_max) for config in configs))


class Explorer:
    """A search through all reachable states of one configuration."""

    def __init__(self, space: StateSpace) -> None:
        self.space, self.config = space, space.config
        self.states: list[int] = []
        # By the number of a state: that of the one from which it was reached first.
        self.parents = array("i")

    def explore(self, states_max: int) -> Exploration:
        """Breadth first, so that the first trace found is a shortest one; then backwards from the end."""
        space = self.space
        start = space.start()
        self.states = states = [start]
        number_of = {start: 0}
        self.parents = parents = array("i", [-1])
        sources, targets = array("i"), array("i")
        n_transitions, at = 0, 0
        violation = space.violation(start)
        successors, check, violations = space.successors, space.violation, space.violations
        sides_mask = SIDES_MASK
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
                    known = violations.get(child & sides_mask)
                    violation = check(child) if known is None else known
                    if violation:
                        break
                if move & 1:
                    sources.append(at)
                    targets.append(number)
            at += 1
        rows = frozenset(space.rows)
        if violation:
            example = self._counterexample(violation, len(states) - 1)
            return Exploration(self.config, len(states), n_transitions, REFUTED, rows, example)
        if at < len(states):
            return Exploration(self.config, len(states), n_transitions, UNKNOWN, rows)
        stuck = self._first_stuck(np.frombuffer(sources, np.int32), np.frombuffer(targets, np.int32))
        if stuck is not None:
            text = "a rail is up and nothing fails any more, and not all chunks can be delivered and acknowledged"
            example = self._counterexample(text, stuck, space.describe_stuck(self.states[stuck]))
            return Exploration(self.config, len(states), n_transitions, REFUTED, rows, example)
        return Exploration(self.config, len(states), n_transitions, PROVED, rows)

    def walk(self, random: Random, n_moves: int) -> None:
        """A random run, and another one when it is at its end; collects the steps of the table on the way.

        Raises SolverError for a state that breaks a rule: explorations of the same rows should have found it.
        """
        space = self.space
        state = space.start()
        for _ in range(n_moves):
            moves = [child for child, _ in space.successors(state) if child != state]
            state = random.choice(moves) if moves else space.start()
            violation = space.violation(state)
            if violation:
                raise SolverError(f"{self.config}: {violation}")

    def _first_stuck(self, sources: Any, targets: Any) -> int | None:
        """The first state with a rail up from which no end can be reached without a fault."""
        good = np.fromiter(map(self.space.is_end, self.states), bool, len(self.states))
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
        return next((int(at) for at in np.flatnonzero(~good) if self.space.has_rail(self.states[at])), None)

    def _counterexample(self, summary: str, last: int, ending: str = "") -> Counterexample:
        """The moves from the start to this state; the middle of a long trace is left out."""
        path = [last]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        lines: list[str] = []
        for before, after in pairwise(reversed(path)):
            target = self.states[after]
            move = next(move for child, move in self.space.successors(self.states[before]) if child == target)
            lines.append(f"{len(lines) + 1}. {self.space.describe(move)}")
        if len(lines) > TRACE_LINES_MAX:
            half = TRACE_LINES_MAX // 2
            left_out = len(lines) - 2 * half + 1
            lines = [*lines[: half - 1], f"... {left_out} more", *lines[-half:]]
        lines += [ending] if ending else []
        return Counterexample("replay", f"{summary} ({self.config})", trace=tuple(lines))
