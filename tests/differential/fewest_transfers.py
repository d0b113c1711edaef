"""How few transfers an AllReduce of one element can have: the first assumption of the fluid bound.

Transfers happen one after the other; each carries what rank `src` holds of the element to rank `dst`,
which adds it to its own (reduce) or replaces its own by it (copy). Right is what leaves every rank with every
contribution exactly once.

Theorem. AllReduce of one element over p ranks takes at least 2(p - 1) transfers, even if ranks may keep whatever they
ever received and send all of it at once.
Proof. Take the first transfer after which some rank, x, knows all p contributions. Each of the other p - 1 ranks has
sent by then, else its contribution is nowhere else. That is p - 1 transfers, and nobody but x knows everything, as a
transfer teaches only its receiver. Each of the other p - 1 ranks must still receive: p - 1 transfers more.

What a solver finds is replayed here before it is returned (`SolverError` if it does not hold); what it refutes is a
`Claim`. Enumeration and counting give `Checked`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Literal

from optcc.collective import Collective
from optcc.compiler import compile_schedule
from optcc.dsl import Program
from optcc.errors import InputError, SolverError
from optcc.plan import Plan
from optcc.schedule import Schedule
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.plan import verify_plan
from optcc.verify.smt import DEFAULT_LIMIT, Checked, Claim, Limit, Query, Sat, Unknown

RANKS_MAX = 16
CHUNKS_MAX = 64
STATES_MAX = 200_000
"""How many states an enumeration looks at, equal ones counted again, before it gives up; seconds to some minutes."""


Op = Literal["reduce", "copy"]
Held = tuple[int, ...]
"""For each rank the set of contributions that it holds (bit r: rank r's), 0 if one of them is in twice: that can never
be undone, so every spoilt value is as bad as any other."""


@dataclass(frozen=True, slots=True)
class Move:
    """One transfer of the element."""

    src: int
    dst: int
    op: Op

    def __str__(self) -> str:
        return f"{self.src}->{self.dst} {self.op}"


def own_inputs(p: int) -> Held:
    """Every rank holds its own contribution.

    >>> own_inputs(3)
    (1, 2, 4)
    """
    return tuple(1 << rank for rank in range(p))


def move(held: Held, step: Move) -> Held:
    """What is held after one transfer.

    >>> move((1, 2), Move(0, 1, "reduce")), move((1, 3), Move(0, 1, "reduce"))
    ((1, 3), (1, 0))
    """
    carried, own = held[step.src], held[step.dst]
    if step.op == "copy":
        value = carried
    else:
        value = carried | own if carried and own and not carried & own else 0
    return (*held[: step.dst], value, *held[step.dst + 1 :])


def completes(p: int, moves: Iterable[Move]) -> bool:
    """True if these transfers leave every rank with every contribution exactly once."""
    held = own_inputs(p)
    for each in moves:
        held = move(held, each)
    return held == ((1 << p) - 1,) * p


def sequence_query(p: int, m: int, *, symmetry: bool = True) -> Query:
    """Do m transfers of one element, one after the other, compute AllReduce over p ranks?

    Variables: `sends t r`, `receives t r` who, `reduces t` how; `holds t r w`: before transfer t, rank r's value has
    w's contribution, at least once; `spoilt t r`: some contribution is in it twice; `carries t w`, `carries spoilt t`
    the same of what transfer t carries.

    Raises InputError for p or m that cannot be.
    """
    check_ranks(p)
    if m < 0:
        raise InputError(f"{m} transfers: must not be negative")
    query = Query(
        f"{m} transfers of one element compute AllReduce over {p} ranks",
        f"no {m} transfers of one element compute AllReduce over {p} ranks",
    )
    _everyone_starts_with_its_own(query, p)
    for t in range(m):
        _one_sender_one_receiver(query, p, t)
        _carries_what_the_sender_holds(query, p, t)
        _the_receiver_reduces_or_replaces(query, p, t)
        _nobody_else_changes(query, p, t)
    _everyone_ends_with_everything_once(query, p, m)
    if symmetry and m:
        _ranks_are_numbered_by_first_mention(query, p, m)
        _transfers_that_commute_are_sorted(query, p, m)
    return query


def _everyone_starts_with_its_own(query: Query, p: int) -> None:
    for r, w in product(range(p), repeat=2):
        holds = query.flag("holds", 0, r, w)
        query.require("start", holds if r == w else query.no(holds))
    query.require("start", *(query.no(query.flag("spoilt", 0, r)) for r in range(p)))


def _one_sender_one_receiver(query: Query, p: int, t: int) -> None:
    query.require("one sender", query.exactly_one(query.flag("sends", t, r) for r in range(p)))
    query.require("one receiver", query.exactly_one(query.flag("receives", t, r) for r in range(p)))
    for r in range(p):
        query.require("two ranks", query.no(query.all_of((query.flag("sends", t, r), query.flag("receives", t, r)))))


def _carries_what_the_sender_holds(query: Query, p: int, t: int) -> None:
    for r in range(p):
        same = [query.flag("carries", t, w) == query.flag("holds", t, r, w) for w in range(p)]
        same.append(query.flag("carries spoilt", t) == query.flag("spoilt", t, r))
        query.require("carry", query.implies(query.flag("sends", t, r), query.all_of(same)))


def _the_receiver_reduces_or_replaces(query: Query, p: int, t: int) -> None:
    """reduce: the union of both, spoilt if either was or if they overlap; copy: what was carried."""
    reduces, carries_spoilt = query.flag("reduces", t), query.flag("carries spoilt", t)
    for r in range(p):
        receives = query.flag("receives", t, r)
        overlap = query.any_of(
            query.all_of((query.flag("carries", t, w), query.flag("holds", t, r, w))) for w in range(p)
        )
        for w in range(p):
            carried = query.flag("carries", t, w)
            kept = query.all_of((reduces, query.flag("holds", t, r, w)))
            after = query.flag("holds", t + 1, r, w)
            query.require("receive", query.implies(receives, after == query.any_of((carried, kept))))
        own_spoilt = query.all_of((reduces, query.any_of((query.flag("spoilt", t, r), overlap))))
        after_spoilt = query.flag("spoilt", t + 1, r)
        query.require(
            "exactly once", query.implies(receives, after_spoilt == query.any_of((carries_spoilt, own_spoilt)))
        )


def _nobody_else_changes(query: Query, p: int, t: int) -> None:
    for r in range(p):
        same = [query.flag("holds", t + 1, r, w) == query.flag("holds", t, r, w) for w in range(p)]
        same.append(query.flag("spoilt", t + 1, r) == query.flag("spoilt", t, r))
        query.require("nobody else", query.any_of((query.flag("receives", t, r), query.all_of(same))))


def _everyone_ends_with_everything_once(query: Query, p: int, m: int) -> None:
    query.require("end", *(query.flag("holds", m, r, w) for r in range(p) for w in range(p)))
    query.require("end once", *(query.no(query.flag("spoilt", m, r)) for r in range(p)))


def _ranks_are_numbered_by_first_mention(query: Query, p: int, m: int) -> None:
    """Rank r is first mentioned after rank r - 1 (within a transfer the sender is mentioned before the receiver).

    Nothing is lost. Among all solutions that differ by renaming ranks and by exchanging neighbouring transfers that
    share no rank, take the one whose list of (src, dst) comes first in the lexicographic order. If it mentioned r
    before r - 1 had been mentioned, exchanging these two names would leave all before that place as it is and make the
    place smaller: a solution that comes earlier. The same solution satisfies the next family, so both may be required.
    """
    for r, t in product(range(1, p), range(m)):
        before = [query.flag(verb, u, r - 1) for u in range(t) for verb in ("sends", "receives")]
        query.require("symmetry", query.implies(query.flag("sends", t, r), query.any_of(before)))
        before.append(query.flag("sends", t, r - 1))
        query.require("symmetry", query.implies(query.flag("receives", t, r), query.any_of(before)))
    query.require("symmetry", query.flag("sends", 0, 0))


def _transfers_that_commute_are_sorted(query: Query, p: int, m: int) -> None:
    """Of two neighbours without a common rank the one with the smaller (src, dst) stands first: see above."""
    pairs = list(permutations(range(p), 2))
    for t, (first, second) in product(range(m - 1), product(pairs, repeat=2)):
        if first > second and not set(first) & set(second):
            query.require(
                "symmetry",
                query.any_of(
                    query.no(query.flag(verb, u, rank))
                    for u, pair in ((t, first), (t + 1, second))
                    for verb, rank in zip(("sends", "receives"), pair, strict=True)
                ),
            )


def ask_sequence(
    p: int, m: int, limit: Limit = DEFAULT_LIMIT, *, symmetry: bool = True
) -> tuple[Move, ...] | Claim | Unknown:
    """m transfers that compute AllReduce of one element over p ranks; or the claim that there are none.

    Raises SolverError if the solver's transfers do not do what it says.
    """
    answer = sequence_query(p, m, symmetry=symmetry).ask(limit, logic="QF_FD")
    if not isinstance(answer, Sat):
        return answer
    moves = _decode_moves(answer, p, m)
    if not completes(p, moves):
        raise SolverError(f"z3: {', '.join(map(str, moves))}: does not compute AllReduce over {p} ranks")
    return moves


def _decode_moves(answer: Sat, p: int, m: int) -> tuple[Move, ...]:
    def who(verb: str, t: int) -> int:
        return next((r for r in range(p) if answer.values[verb, t, r]), 0)

    return tuple(
        Move(who("sends", t), who("receives", t), "reduce" if answer.values["reduces", t] else "copy") for t in range(m)
    )


def enumerate_sequences(p: int, m: int, *, states_max: int = STATES_MAX) -> tuple[Move, ...] | Checked | Unknown:
    """The same question answered by going through all that m transfers can lead to; no solver.

    States that differ by renaming ranks are one. A state with more incomplete ranks than transfers to come is dropped:
    a transfer changes one rank. Fewer than m transfers are covered, as complete ranks may copy to each other.

    >>> [str(each) for each in enumerate_sequences(2, 2)]
    ['0->1 reduce', '1->0 copy']
    """
    check_ranks(p)
    statement = f"no {m} transfers of one element compute AllReduce over {p} ranks"
    everyone = (1 << p) - 1
    renaming = _Renaming(p)
    first = own_inputs(p)
    level: dict[Held, tuple[Held, tuple[Move, ...]]] = {renaming.least(first): (first, ())}
    seen = set(level)
    looked_at = 1
    steps = [Move(src, dst, op) for src, dst in permutations(range(p), 2) for op in ("reduce", "copy")]
    for done in range(1, m + 1):
        after: dict[Held, tuple[Held, tuple[Move, ...]]] = {}
        for held, moves in level.values():
            for step in steps:
                state = move(held, step)
                looked_at += 1
                if looked_at > states_max:
                    reached = f"no {done - 1} transfers do"
                    return Unknown(statement, f"enumeration stopped after {states_max} states", reached)
                if sum(value != everyone for value in state) > m - done:
                    continue
                if all(value == everyone for value in state):
                    return (*moves, step)
                name = renaming.least(state)
                if name not in seen:
                    seen.add(name)
                    after[name] = (state, (*moves, step))
        level = after
    return Checked(statement, f"enumeration of {looked_at} states, {len(seen)} of them kept")


class _Renaming:
    """The states that differ from a state by renaming ranks, and the least of them."""

    def __init__(self, p: int) -> None:
        self._places: list[tuple[list[int], list[int]]] = []
        for names in permutations(range(p)):  # rank r becomes names[r]
            sets = [sum(1 << names[r] for r in range(p) if ranks >> r & 1) for ranks in range(1 << p)]
            self._places.append(([names.index(r) for r in range(p)], sets))

    def least(self, held: Held) -> Held:
        return min(tuple([sets[held[r]] for r in places]) for places, sets in self._places)


def sequence_schedule(p: int, moves: Sequence[Move]) -> Schedule:
    """The transfers as a schedule of the language: one chunk, in this order."""
    program = Program("fewest_transfers", Collective("allreduce", p))
    for segment in program.pipeline(sections=1):
        with program.stage("transfer"):
            for each in moves:
                transfer = segment[0].reduce if each.op == "reduce" else segment[0].copy
                transfer(src=each.src, dst=each.dst)
    return program.finish()


def prove_schedule(schedule: Schedule, topology: Topology | None = None) -> Plan:
    """The compiled plan of a schedule that came from a solver, proved right by the verifier.

    Raises SolverError if the verifier does not prove all five properties.
    """
    sections = sum(shape.sections for shape in schedule.segments)
    plan = compile_schedule(schedule, size_bytes=4 * sections, topology=topology)
    verdict = verify_plan(plan)
    if verdict.verdict != PROVED:
        raise SolverError(f"schedule {schedule.name} from a solver: {verdict.verdict}: {verdict.counterexample}")
    return plan


def check_ranks(p: int) -> None:
    if not 2 <= p <= RANKS_MAX:
        raise InputError(f"{p} ranks: must be from 2 to {RANKS_MAX}")
