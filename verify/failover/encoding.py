"""The relations and invariants of the induction, evaluated on what explorations of the table meet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from optcc.errors import SolverError
from optcc.failover import DOWN, NOWHERE, RECEIVER_ROWS, SEND, SENDER_ROWS, Link
from optcc.verify.failover.configurations import QUICK, Config
from optcc.verify.failover.exploration import STATES_MAX, Explorer
from optcc.verify.failover.induction import (
    FIXED,
    FIXED_FLAGS,
    INVARIANTS,
    MESSAGES,
    Exact,
    row_relation,
    safe,
)
from optcc.verify.failover.observer import ObservedReceiver, ObservedSender, ObservedStep
from optcc.verify.failover.state_space import StateSpace
from optcc.verify.smt import Checked


def check_encoding(
    configs: Sequence[Config] = QUICK, *, walks: Sequence[Config] = (), n_moves: int = 10_000, seed: int = 0
) -> Checked:
    """Every step of the table in these explorations satisfies the relation of its row, for every chunk and message.

    So does every step of a random walk of `n_moves` moves through each configuration of `walks`, which may be larger.

    Raises SolverError, naming the step, if one does not.
    """
    n_steps = n_cases = 0
    for config, walked in (*((each, False) for each in configs), *((each, True) for each in walks)):
        explorer = Explorer(StateSpace(config, SENDER_ROWS, RECEIVER_ROWS))
        if walked:
            explorer.walk(Random(seed), n_moves)
        else:
            explorer.explore(STATES_MAX)
        for step in explorer.space.steps:
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
    explorer = Explorer(StateSpace(config, SENDER_ROWS, RECEIVER_ROWS))
    result = explorer.explore(STATES_MAX)
    space, logic = explorer.space, Exact()
    for state in explorer.states:
        sender, receiver = space.sides(state)
        flying = space.in_flight(state)
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


def _cases(config: Config, step: ObservedStep) -> Iterable[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Before, after and what stays, for each chunk and for each message that is sent, and for none."""
    link, event = Link(config.n_rails, config.window), step.event
    sent = [None, *(action for action in step.actions if action.kind == SEND)]
    for x in range(config.n_chunks + 1):
        for message in sent:
            if isinstance(step.before, ObservedSender):
                assert isinstance(step.after, ObservedSender)
                other = ObservedReceiver(link.receiver())
                v, w = (_values(side, other, x) for side in (step.before, step.after))
            else:
                assert isinstance(step.after, ObservedReceiver)
                v, w = (_values(ObservedSender(link.sender()), side, x) for side in (step.before, step.after))
            k = _fixed(config, x)
            k["event epoch"], k["event number"] = event.epoch, event.number
            if message is not None:
                w[message.message] = True
                k[f"{message.message} epoch"], k[f"{message.message} number"] = message.epoch, message.number
            if isinstance(step.before, ObservedSender):
                state = step.before.state
                rail = state.out[x - state.acked] if state.acked <= x < state.sent else NOWHERE
                k["x on lost rail"] = event.kind == DOWN and rail == event.rail
                k["proposal on lost rail"] = event.kind == DOWN and state.asked == event.rail
            else:
                assert isinstance(step.after, ObservedReceiver)
                k["last"] = step.after.state.delivered - 1
                kept = {key: epoch for key, _, epoch in step.before.kept}
                k["last kept"], k["last kept epoch"] = k["last"] in kept, kept.get(k["last"], 0)
                if not w["kept"]:
                    # Not kept any more, or given at once: which bytes these were.
                    fresh = step.row == "fresh chunk" and x == event.number
                    w["kept epoch"] = event.epoch if fresh else v["kept epoch"]
            yield v, w, k


def _values(sender: ObservedSender, receiver: ObservedReceiver, x: int) -> dict[str, Any]:
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
