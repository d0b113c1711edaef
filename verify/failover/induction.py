"""The failover protocol for any number of chunks and any window: inductive invariants, and what each row may do.

A state is described by numbers, and by what holds of one chunk `x`, one data message, one acknowledgement and one
proposal: arbitrary ones, the same before and after a step, so what is proved of them is proved of all. The relation of
a row says what the row may do; `optcc.verify.failover.encoding.check_encoding` holds it against the table itself, on
every step that explorations met, and `prove_invariants` asks Z3 whether some step leads from the invariants to a state
that breaks them. Formulas are written once, for Z3's terms and for plain numbers: `Logic` is what they need of either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

from optcc.errors import SolverError
from optcc.failover import ACK, CHANGE, DATA, RECEIVER_ROWS, SENDER_ROWS
from optcc.verdict import PROVED, REFUTED, UNKNOWN
from optcc.verify.smt import DEFAULT_LIMIT, Claim, Limit, Query, Sat, Term, Unknown


class Logic(Protocol):
    """Formulas: of Z3 (`Query`) or of plain numbers (`Exact`)."""

    def all_of(self, terms: Iterable[Term]) -> Term: ...
    def any_of(self, terms: Iterable[Term]) -> Term: ...
    def no(self, term: Term) -> Term: ...
    def implies(self, cause: Term, effect: Term) -> Term: ...
    def either(self, condition: Term, then: Term, otherwise: Term) -> Term: ...


class Exact:
    """The same formulas over truth values and numbers."""

    def all_of(self, terms: Iterable[Term]) -> Term:
        return all(terms)

    def any_of(self, terms: Iterable[Term]) -> Term:
        return any(terms)

    def no(self, term: Term) -> Term:
        return not term

    def implies(self, cause: Term, effect: Term) -> Term:
        return effect or not cause

    def either(self, condition: Term, then: Term, otherwise: Term) -> Term:
        return then if condition else otherwise


_NUMBERS = ("epoch", "start", "offered", "acked", "sent", "freed")
"""Of the sender."""
_NUMBERS_THERE = ("epoch there", "start there", "slots", "delivered", "given", "kept epoch")
"""Of the receiver; `kept epoch` is the plan that chunk x, if it is kept, belongs to."""
_FLAGS = ("changing", "any rail", "asked on rail", "out on rail", "marked")
"""Of the sender: is a change under way, is a rail up, is the proposal out on a rail that is up, is chunk x, is x marked
for sending again because no rail is up or a change is under way?"""
_FLAGS_THERE = ("kept",)
MESSAGES = ("data", "ack", "change")
"""Is the message in flight, on any rail?"""
FIXED = (
    *("window", "x", "data epoch", "data number", "ack epoch", "ack number", "change epoch"),
    *("event epoch", "event number", "last", "last kept epoch"),
)
"""The same before and after a step. `event` is the message that arrives, `last` the last chunk that a step delivers."""
FIXED_FLAGS = ("x on lost rail", "proposal on lost rail", "last kept")
"""Of the step: did chunk x, or the proposal, go out on the rail that is lost? Is chunk `last` kept before it?"""

Values = Mapping[str, Any]
Relation = Callable[[Logic, Values, Values, Values], Term]


def _same(logic: Logic, before: Values, after: Values, names: Iterable[str]) -> Term:
    return logic.all_of(before[name] == after[name] for name in names)


def _between(logic: Logic, low: Term, value: Term, high: Term) -> Term:
    return logic.all_of((low <= value, value <= high))


def _least(logic: Logic, one: Term, other: Term) -> Term:
    return logic.either(one <= other, one, other)


# What the rows do, over numbers. `v` before, `w` after, `k` what stays.


def _receiver_stays(logic: Logic, v: Values, w: Values) -> Term:
    return logic.all_of((_same(logic, v, w, (*_NUMBERS_THERE, *_FLAGS_THERE)), logic.implies(w["ack"], v["ack"])))


def _sender_stays(logic: Logic, v: Values, w: Values) -> Term:
    only_old = (logic.implies(w[message], v[message]) for message in ("data", "change"))
    return logic.all_of((_same(logic, v, w, (*_NUMBERS, *_FLAGS)), *only_old))


def _sender_sends(logic: Logic, v: Values, w: Values, k: Values) -> Term:
    """New messages of any sender's step: chunks that are out, of its epoch, unless changing; proposals, if changing."""
    chunk = logic.all_of(
        (
            *(logic.no(w["changing"]), w["any rail"], k["data epoch"] == w["epoch"]),
            _between(logic, w["acked"], k["data number"], w["sent"] - 1),
        )
    )
    proposal = logic.all_of((w["changing"], w["any rail"], k["change epoch"] == w["epoch"] + 1))
    return logic.all_of(
        (
            logic.implies(w["data"], logic.any_of((v["data"], chunk))),
            logic.implies(w["change"], logic.any_of((v["change"], proposal))),
        )
    )


def _receiver_acks(logic: Logic, v: Values, w: Values, k: Values) -> Term:
    """New messages of any receiver's step: an acknowledgement of what is delivered then."""
    new = logic.all_of((k["ack epoch"] == w["epoch there"], k["ack number"] == w["delivered"]))
    return logic.implies(w["ack"], logic.any_of((v["ack"], new)))


def _fills_window(logic: Logic, v: Values, w: Values, k: Values, first: Term, sent: Term) -> Term:
    """`put_out`, unless changing: what is marked and new chunks from `sent` on go out, if a rail is up."""
    filled = _least(logic, w["acked"] + k["window"], w["offered"])
    stays = _between(logic, first, k["x"], sent - 1)
    new = _between(logic, sent, k["x"], w["sent"] - 1)
    out_already = logic.all_of((stays, logic.any_of((v["out on rail"], v["marked"]))))
    going = logic.all_of(
        (
            w["sent"] == filled,
            w["out on rail"] == logic.any_of((out_already, new)),
            logic.no(w["marked"]),
        )
    )
    standing = logic.all_of(
        (
            w["sent"] == sent,
            w["out on rail"] == logic.all_of((stays, v["out on rail"])),
            w["marked"] == logic.all_of((stays, v["marked"])),
        )
    )
    return logic.either(w["any rail"], going, standing)


def _puts_out(logic: Logic, v: Values, w: Values, k: Values) -> Term:
    """`put_out`: as above, or the proposal."""
    x_stays = (
        w["out on rail"] == logic.all_of((v["out on rail"], w["acked"] <= k["x"])),
        w["marked"] == logic.all_of((v["marked"], w["acked"] <= k["x"])),
    )
    asks = logic.all_of(
        (
            *(w["sent"] == v["sent"], *x_stays),
            w["asked on rail"] == logic.any_of((w["any rail"], v["asked on rail"])),
        )
    )
    fills = _fills_window(logic, v, w, k, w["acked"], v["sent"])
    return logic.either(w["changing"], asks, logic.all_of((fills, w["asked on rail"] == v["asked on rail"])))


def _offer_relation(logic: Logic, v: Values, w: Values, k: Values) -> Term:
    same = _same(logic, v, w, ("epoch", "start", "acked", "freed", "changing", "any rail"))
    return logic.all_of((same, w["offered"] == v["offered"] + 1, _puts_out(logic, v, w, k)))


def _new_ack_relation(logic: Logic, v: Values, w: Values, k: Values) -> Term:
    number = k["event number"]
    guard = (k["event epoch"] == v["epoch"], _between(logic, v["acked"] + 1, number, v["sent"]))
    same = _same(logic, v, w, ("epoch", "start", "offered", "changing", "any rail"))
    frees = (w["acked"] == number, w["freed"] == v["freed"] + (number - v["acked"]))
    return logic.all_of((*guard, same, *frees, _puts_out(logic, v, w, k)))


def _agreement_relation(logic: Logic, v: Values, w: Values, k: Values) -> Term:
    number = k["event number"]
    guard = (v["changing"], k["event epoch"] == v["epoch"] + 1, _between(logic, v["acked"], number, v["sent"]))
    frees = (w["acked"] == number, w["freed"] == v["freed"] + (number - v["acked"]))
    begins = (w["epoch"] == v["epoch"] + 1, w["start"] == number, logic.no(w["changing"]), logic.no(w["asked on rail"]))
    same = _same(logic, v, w, ("offered", "any rail"))
    return logic.all_of((*guard, same, *frees, *begins, _fills_window(logic, v, w, k, number, number)))


def _rail_lost_relation(logic: Logic, v: Values, w: Values, k: Values) -> Term:
    same = _same(logic, v, w, ("epoch", "start", "offered", "acked", "sent", "freed", "changing"))
    lost, asked_lost = k["x on lost rail"], k["proposal on lost rail"]
    last = logic.all_of(
        (
            logic.implies(v["out on rail"], lost),
            logic.implies(v["asked on rail"], asked_lost),
        )
    )
    return logic.all_of(
        (
            *(same, v["any rail"]),
            *(logic.implies(lost, v["out on rail"]), logic.implies(asked_lost, v["asked on rail"])),
            # The last rail: whatever was out was out on it.
            logic.implies(logic.no(w["any rail"]), last),
            w["out on rail"] == logic.either(lost, w["any rail"], v["out on rail"]),
            w["marked"] == logic.any_of((v["marked"], logic.all_of((lost, logic.no(w["any rail"]))))),
            w["asked on rail"] == logic.either(asked_lost, w["any rail"], v["asked on rail"]),
        )
    )


def _rail_back_relation(logic: Logic, v: Values, w: Values, k: Values) -> Term:
    same = _same(logic, v, w, ("epoch", "start", "offered", "acked", "freed", "changing"))
    return logic.all_of((same, w["any rail"], _puts_out(logic, v, w, k)))


def _timeout_relation(logic: Logic, v: Values, w: Values, k: Values) -> Term:
    out = _between(logic, v["acked"], k["x"], v["sent"] - 1)
    same = _same(logic, v, w, (*_NUMBERS, "changing", "any rail", "asked on rail"))
    again = (
        w["out on rail"] == logic.all_of((out, v["any rail"])),
        w["marked"] == logic.all_of((out, logic.no(v["any rail"]))),
    )
    return logic.all_of((logic.no(v["changing"]), same, *again))


def _proposal_timeout_relation(logic: Logic, v: Values, w: Values, _: Values) -> Term:
    same = _same(logic, v, w, (*_NUMBERS, "changing", "any rail", "out on rail", "marked"))
    return logic.all_of((v["changing"], same, w["asked on rail"] == v["any rail"]))


def _replan_relation(logic: Logic, v: Values, w: Values, k: Values) -> Term:
    out = _between(logic, v["acked"], k["x"], v["sent"] - 1)
    same = _same(logic, v, w, (*_NUMBERS, "any rail"))
    begins = (w["changing"], w["asked on rail"] == v["any rail"], logic.no(w["out on rail"]), w["marked"] == out)
    return logic.all_of((logic.no(v["changing"]), same, *begins))


def _sender_idle(logic: Logic, v: Values, w: Values, _: Values) -> Term:
    return _same(logic, v, w, (*_NUMBERS, *_FLAGS))


def _delivers(logic: Logic, v: Values, w: Values, k: Values, arrived: bool) -> Term:
    """`give`: the chunks from `delivered` on that are kept, or have just arrived, as far as there are slots."""

    def here(kept: Term, number: Term) -> Term:
        return logic.any_of((kept, number == k["event number"])) if arrived else kept

    passes = _between(logic, v["delivered"], k["x"], w["delivered"] - 1)
    held = here(v["kept"], k["x"])
    return logic.all_of(
        (
            *(v["delivered"] <= w["delivered"], w["delivered"] <= w["slots"]),
            w["given"] == v["given"] + (w["delivered"] - v["delivered"]),
            logic.implies(passes, held),
            logic.implies(
                v["delivered"] + 1 <= w["delivered"],
                logic.all_of((k["last"] == w["delivered"] - 1, here(k["last kept"], k["last"]))),
            ),
            w["kept"] == logic.all_of((held, w["delivered"] <= k["x"])),
        )
    )


def _slot_relation(logic: Logic, v: Values, w: Values, k: Values) -> Term:
    same = _same(logic, v, w, ("epoch there", "start there", "kept epoch"))
    return logic.all_of((same, w["slots"] == v["slots"] + 1, _delivers(logic, v, w, k, False)))


def _fresh_relation(logic: Logic, v: Values, w: Values, k: Values) -> Term:
    number = k["event number"]
    guard = (
        k["event epoch"] == v["epoch there"],
        _between(logic, v["delivered"], number, v["delivered"] + k["window"] - 1),
        logic.implies(k["x"] == number, logic.no(v["kept"])),
    )
    same = _same(logic, v, w, ("epoch there", "start there", "slots"))
    bytes_of = w["kept epoch"] == logic.either(k["x"] == number, k["event epoch"], v["kept epoch"])
    return logic.all_of((*guard, same, bytes_of, _delivers(logic, v, w, k, True)))


def _change_relation(logic: Logic, v: Values, w: Values, k: Values) -> Term:
    same = _same(logic, v, w, ("slots", "delivered", "given", "kept epoch"))
    begins = (w["epoch there"] == v["epoch there"] + 1, w["start there"] == v["delivered"], logic.no(w["kept"]))
    return logic.all_of((k["event epoch"] == v["epoch there"] + 1, same, *begins))


def _receiver_idle(logic: Logic, v: Values, w: Values, _: Values) -> Term:
    return _same(logic, v, w, (*_NUMBERS_THERE, *_FLAGS_THERE))


SENDER_RELATIONS: Mapping[str, Relation] = {
    "offer": _offer_relation,
    "new ack": _new_ack_relation,
    "agreement": _agreement_relation,
    "old ack": _sender_idle,
    "sender's rail lost": _rail_lost_relation,
    "sender's rail known lost": _sender_idle,
    "sender's rail back": _rail_back_relation,
    "sender's rail known back": _sender_idle,
    "timeout": _timeout_relation,
    "timeout of the proposal": _proposal_timeout_relation,
    "replan": _replan_relation,
    "replan again": _sender_idle,
}
"""What each row of the sender may do."""
RECEIVER_RELATIONS: Mapping[str, Relation] = {
    "slot": _slot_relation,
    "fresh chunk": _fresh_relation,
    "duplicate": _receiver_idle,
    "dropped chunk": _receiver_idle,
    "change": _change_relation,
    "change again": _receiver_idle,
    "dropped change": _receiver_idle,
    "receiver's rail lost": _receiver_idle,
    "receiver's rail known lost": _receiver_idle,
    "receiver's rail back": _receiver_idle,
    "receiver's rail known back": _receiver_idle,
}
"""What each row of the receiver may do."""
_EVENT_OF = {row.name: row.event for row in SENDER_ROWS} | {row.name: row.event for row in RECEIVER_ROWS}


def row_relation(logic: Logic, row: str, v: Values, w: Values, k: Values) -> Term:
    """What one step by this row may do to the state, the chunk and the messages; other messages may get lost."""
    if row in SENDER_RELATIONS:
        own = (SENDER_RELATIONS[row](logic, v, w, k), _sender_sends(logic, v, w, k), _receiver_stays(logic, v, w))
    else:
        own = (RECEIVER_RELATIONS[row](logic, v, w, k), _receiver_acks(logic, v, w, k), _sender_stays(logic, v, w))
    return logic.all_of(own)


# The invariants.


def _counters(logic: Logic, v: Values, _: Values) -> Term:
    return logic.all_of(
        (
            *(v["start"] >= 0, v["start"] <= v["acked"], v["acked"] <= v["sent"], v["sent"] <= v["offered"]),
            *(v["start there"] >= 0, v["start there"] <= v["delivered"], v["delivered"] <= v["slots"]),
        )
    )


def _window_invariant(_: Logic, v: Values, k: Values) -> Term:
    return v["sent"] <= v["acked"] + k["window"]


def _books(logic: Logic, v: Values, _: Values) -> Term:
    return logic.all_of((v["freed"] == v["acked"], v["given"] == v["delivered"]))


def _acked_is_delivered(logic: Logic, v: Values, _: Values) -> Term:
    return logic.all_of((v["acked"] <= v["delivered"], v["delivered"] <= v["sent"]))


def _epochs(logic: Logic, v: Values, _: Values) -> Term:
    ahead = logic.all_of((v["changing"], v["epoch there"] == v["epoch"] + 1, v["start there"] == v["delivered"]))
    same = logic.all_of((v["epoch there"] == v["epoch"], v["start there"] == v["start"]))
    return logic.any_of((same, ahead))


def _chunk_kept(logic: Logic, v: Values, k: Values) -> Term:
    return logic.implies(
        v["kept"],
        logic.all_of(
            (
                *(v["epoch there"] == v["epoch"], v["kept epoch"] == v["epoch there"]),
                *(v["start there"] <= k["x"], k["x"] <= v["delivered"] + k["window"] - 1),
                _between(logic, v["delivered"], k["x"], v["sent"] - 1),
            )
        ),
    )


def _chunk_out(logic: Logic, v: Values, k: Values) -> Term:
    waiting = _between(logic, v["acked"], k["x"], v["sent"] - 1)
    on_its_way = logic.either(v["any rail"], v["out on rail"], v["marked"])
    return logic.implies(logic.all_of((logic.no(v["changing"]), waiting)), on_its_way)


def _proposal_out(logic: Logic, v: Values, _: Values) -> Term:
    return logic.implies(logic.all_of((v["changing"], v["any rail"])), v["asked on rail"])


def _data_in_flight(logic: Logic, v: Values, epoch: Term, number: Term) -> Term:
    of_now = _between(logic, v["start"], number, v["sent"] - 1)
    return logic.all_of((epoch <= v["epoch"], logic.implies(epoch == v["epoch"], of_now)))


def _ack_in_flight(logic: Logic, v: Values, epoch: Term, number: Term) -> Term:
    of_now = logic.implies(epoch == v["epoch there"], v["start there"] <= number)
    return logic.all_of((epoch <= v["epoch there"], number <= v["delivered"], of_now))


def _change_in_flight(logic: Logic, v: Values, epoch: Term) -> Term:
    return logic.all_of((epoch <= v["epoch"] + 1, logic.implies(epoch == v["epoch"] + 1, v["changing"])))


INVARIANTS: Mapping[str, Callable[[Logic, Values, Values], Term]] = {
    "counters": _counters,
    "window": _window_invariant,
    "freed and given": _books,
    "acked <= delivered <= sent": _acked_is_delivered,
    "epochs and their starts": _epochs,
    "a kept chunk": _chunk_kept,
    "an unacknowledged chunk": _chunk_out,
    "a proposal": _proposal_out,
    "data in flight": lambda logic, v, k: logic.implies(
        v["data"], _data_in_flight(logic, v, k["data epoch"], k["data number"])
    ),
    "acks in flight": lambda logic, v, k: logic.implies(
        v["ack"], _ack_in_flight(logic, v, k["ack epoch"], k["ack number"])
    ),
    "changes in flight": lambda logic, v, k: logic.implies(v["change"], _change_in_flight(logic, v, k["change epoch"])),
}
"""What holds in every reachable state, of every chunk and message; each by the name of its family."""


def invariant(logic: Logic, v: Values, k: Values) -> Term:
    """All of `INVARIANTS`."""
    return logic.all_of(each(logic, v, k) for each in INVARIANTS.values())


def _known_of_event(logic: Logic, row: str, v: Values, k: Values) -> Term:
    """The invariants once more: of the message that arrives, and of the last chunk that is delivered."""
    epoch, number = k["event epoch"], k["event number"]
    kind = _EVENT_OF[row]
    known = {
        DATA: lambda: _data_in_flight(logic, v, epoch, number),
        ACK: lambda: _ack_in_flight(logic, v, epoch, number),
        CHANGE: lambda: _change_in_flight(logic, v, epoch),
    }
    of_last = {**v, "kept": k["last kept"], "kept epoch": k["last kept epoch"]}
    terms = [_chunk_kept(logic, of_last, {**k, "x": k["last"]})]
    return logic.all_of([*terms, known[kind]()] if kind in known else terms)


def _safe_step(logic: Logic, row: str, v: Values, w: Values, k: Values) -> Term:
    """What the application sees: each chunk it is given is the next one, with the bytes of the plan in force."""
    if row not in ("slot", "fresh chunk"):
        return w["given"] == v["given"]
    passes = _between(logic, v["delivered"], k["x"], w["delivered"] - 1)
    of_now = logic.all_of((w["kept epoch"] == w["epoch there"], w["start there"] <= k["x"]))
    return logic.all_of((v["given"] == v["delivered"], logic.implies(passes, of_now)))


def safe(logic: Logic, v: Values, k: Values) -> Term:
    """What the invariants are for."""
    data_fits = logic.implies(
        logic.all_of((v["data"], k["data epoch"] == v["epoch there"])),
        k["data number"] <= v["delivered"] + k["window"] - 1,
    )
    return logic.all_of(
        (
            *(v["freed"] <= v["given"], v["sent"] - v["freed"] <= k["window"], data_fits),
            logic.implies(v["epoch"] == v["epoch there"], v["start"] == v["start there"]),
        )
    )


@dataclass(frozen=True, slots=True)
class Lemma:
    """One step of the induction, and Z3's answer. A `Sat` has been replayed in exact arithmetic: the lemma is false."""

    name: str
    answer: Sat | Claim | Unknown

    @property
    def verdict(self) -> str:
        """`proved` if Z3 claims it, `refuted` if it is false, else `unknown`."""
        return PROVED if isinstance(self.answer, Claim) else REFUTED if isinstance(self.answer, Sat) else UNKNOWN


def prove_invariants(*, limit: Limit = DEFAULT_LIMIT) -> tuple[Lemma, ...]:
    """The induction, for all numbers of chunks, rails and epochs and all windows: a lemma for the start, one for each
    row of the table, one for the network, one for safety.

    Raises EnvironmentMissing without z3, SolverError if Z3 shows a counterexample that is none.
    """
    lemmas = [
        _ask("start", limit, lambda logic, v, w, k: (_starts(logic, v, k), invariant(logic, v, k))),
        _ask("safety", limit, lambda logic, v, w, k: (invariant(logic, v, k), safe(logic, v, k))),
        _ask(
            "network",
            limit,
            lambda logic, v, w, k: (
                logic.all_of((_network_relation(logic, v, w), invariant(logic, v, k))),
                invariant(logic, w, k),
            ),
        ),
    ]
    for row in (*SENDER_RELATIONS, *RECEIVER_RELATIONS):

        def formulas(logic: Logic, v: Values, w: Values, k: Values, row: str = row) -> tuple[Term, Term]:
            assumed = (
                *(invariant(logic, v, k), _known_of_event(logic, row, v, k)),
                row_relation(logic, row, v, w, k),
            )
            return logic.all_of(assumed), logic.all_of((invariant(logic, w, k), _safe_step(logic, row, v, w, k)))

        lemmas.append(_ask(row, limit, formulas))
    return tuple(lemmas)


def _starts(logic: Logic, v: Values, k: Values) -> Term:
    zero = (v[name] == 0 for name in (*_NUMBERS, *_NUMBERS_THERE))
    flags = (*(name for name in _FLAGS if name != "any rail"), *_FLAGS_THERE, *MESSAGES)
    return logic.all_of((*zero, *(logic.no(v[name]) for name in flags), v["any rail"], k["window"] >= 1))


def _network_relation(logic: Logic, v: Values, w: Values) -> Term:
    """The network loses, duplicates, delays: messages may vanish, none appears that is not in flight."""
    return logic.all_of((_sender_stays(logic, v, w), _receiver_stays(logic, v, w)))


def _ask(name: str, limit: Limit, formulas: Callable[[Logic, Values, Values, Values], tuple[Term, Term]]) -> Lemma:
    """Is there a case in which what is assumed holds, and what is claimed does not?"""
    query = Query(f"{name}: the invariants can be broken", f"{name}: the invariants hold after it if they do before")
    numbers, flags = (*_NUMBERS, *_NUMBERS_THERE), (*_FLAGS, *_FLAGS_THERE, *MESSAGES)

    def values(when: str, number: Callable[..., Any], flag: Callable[..., Any]) -> dict[str, Any]:
        if when == "always":
            return {each: number(each) for each in FIXED} | {each: flag(each) for each in FIXED_FLAGS}
        return {each: number(when, each) for each in numbers} | {each: flag(when, each) for each in flags}

    v, w, k = (values(when, query.real, query.flag) for when in ("before", "after", "always"))
    assumed, claimed = formulas(query, v, w, k)
    query.require("a window", k["window"] >= 1)
    # Of two whole numbers, one is at least the other or at most one less. Said of those pairs that need it, this leaves
    # linear arithmetic over reals, which Z3 decides at once; of whole numbers proper it had no answer after a minute.
    whole = [v["sent"], w["sent"], v["acked"], w["acked"], v["delivered"], w["delivered"]]
    pairs = [(k["x"], each) for each in whole] + [(v["sent"], w["sent"]), (v["delivered"], w["delivered"])]
    query.require("whole numbers", *(query.any_of((one <= other - 1, one >= other)) for one, other in pairs))
    query.require("assumed", assumed)
    query.require("broken", query.no(claimed))
    answer = query.ask(limit)
    if isinstance(answer, Sat):
        found = answer.values

        def value(*meaning: str) -> bool | Fraction:
            return found[meaning]

        assumed, claimed = formulas(Exact(), *(values(when, value, value) for when in ("before", "after", "always")))
        if not assumed or claimed:
            raise SolverError(f"{name}: z3 shows a counterexample that is none")
    return Lemma(name, answer)
