"""What a solver finds is proved by the verifier; what it refutes is refuted by enumeration or by counting as well.

Every family of constraints is left out once, and must be missed: an encoding that forgets exactly-once, or a port,
answers a pinned question wrongly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from math import ceil
from typing import Literal

import pytest

from optcc.compiler import compile_schedule
from optcc.errors import InputError, SolverError
from optcc.simulate import simulate
from optcc.verdict import PROVED
from optcc.verify.bounds.closed_forms import allreduce_bound
from optcc.verify.plan import verify_plan
from optcc.verify.smt import Checked, Claim, Limit, Query, Sat, Unknown
from tests.differential import fewest_steps, fewest_transfers
from tests.differential.fewest_steps import (
    Instance,
    LeastSteps,
    Memory,
    Send,
    ask_steps,
    count_refutes,
    enumerate_steps,
    least_steps,
    sends_complete,
    steps_query,
    steps_schedule,
)
from tests.differential.fewest_transfers import (
    Move,
    ask_sequence,
    completes,
    enumerate_sequences,
    move,
    own_inputs,
    prove_schedule,
    sequence_query,
    sequence_schedule,
)
from tests.sample import sampled

GENEROUS = Limit(seconds=300)

# One element ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, 3, 4, 5])
def test_fewer_than_two_transfers_a_rank_are_not_enough(p: int) -> None:
    """A claim of the solver, and checked by enumeration, which are told apart."""
    claim = ask_sequence(p, 2 * (p - 1) - 1, GENEROUS)
    checked = enumerate_sequences(p, 2 * (p - 1) - 1)
    assert isinstance(claim, Claim)
    assert isinstance(checked, Checked)
    assert claim.statement == checked.statement == f"no {2 * p - 3} transfers of one element compute AllReduce over " \
        f"{p} ranks"  # fmt: skip
    assert "claimed by z3" in str(claim)
    assert "checked: enumeration" in str(checked)


@pytest.mark.parametrize("p", [2, 3, 4, 5])
@pytest.mark.parametrize("by", ["solver", "enumeration"])
def test_two_transfers_a_rank_but_one_are_enough(p: int, by: str) -> None:
    """The witness, as a schedule of the language, is proved by the verifier."""
    moves = ask_sequence(p, 2 * (p - 1), GENEROUS) if by == "solver" else enumerate_sequences(p, 2 * (p - 1))
    assert isinstance(moves, tuple)
    assert completes(p, moves)
    plan = prove_schedule(sequence_schedule(p, moves))
    assert len(plan.transfers) == 2 * (p - 1)


@pytest.mark.slow
@pytest.mark.parametrize("p", [6, 7])
def test_the_same_for_more_ranks(p: int) -> None:
    assert isinstance(ask_sequence(p, 2 * p - 3, GENEROUS), Claim)
    assert isinstance(ask_sequence(p, 2 * p - 2, GENEROUS), tuple)
    if p == 6:
        assert isinstance(enumerate_sequences(p, 2 * p - 3), Checked)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in (2, 3) for m in range(6)] + [(4, 5), (4, 6)])
def test_symmetry_breaking_loses_nothing(p: int, m: int) -> None:
    with_it, without = (ask_sequence(p, m, GENEROUS, symmetry=each) for each in (True, False))
    enumerated = enumerate_sequences(p, m)
    assert isinstance(with_it, tuple) == isinstance(without, tuple) == isinstance(enumerated, tuple) == (m >= 2 * p - 2)


def test_every_relabelled_and_reordered_solution_has_its_normal_form() -> None:
    """All solutions for three ranks: those that the symmetry constraints keep reach all others."""
    everyone = [
        moves
        for moves in _sequences(3, 4)
        if completes(3, moves)
    ]  # fmt: skip
    kept = [moves for moves in everyone if isinstance(pinned_moves(3, moves, symmetry=True).ask(), Sat)]
    assert 0 < len(kept) < len(everyone)
    assert {_orbit_name(moves) for moves in kept} == {_orbit_name(moves) for moves in everyone}


def _sequences(p: int, m: int) -> Iterable[tuple[Move, ...]]:
    def extend(moves: tuple[Move, ...]) -> Iterable[tuple[Move, ...]]:
        if len(moves) == m:
            yield moves
            return
        held = own_inputs(p)
        for each in moves:
            held = move(held, each)
        for src in range(p):
            for dst in range(p):
                for op in ("reduce", "copy"):
                    step = Move(src, dst, op)
                    if src != dst and move(held, step)[dst] != 0:
                        yield from extend((*moves, step))

    return extend(())


def _orbit_name(moves: tuple[Move, ...]) -> tuple[tuple[int, int, str], ...]:
    """The first of all renamings of three ranks (three ranks leave nothing that commutes)."""
    names = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    return min(tuple((name[each.src], name[each.dst], each.op) for each in moves) for name in names)


def pinned_moves(p: int, moves: tuple[Move, ...], *, symmetry: bool = False) -> Query:
    """The question with every transfer fixed: sat if and only if these transfers compute AllReduce."""
    query = sequence_query(p, len(moves), symmetry=symmetry)
    for t, each in enumerate(moves):
        for r in range(p):
            query.require("pin", query.flag("sends", t, r) == (r == each.src))
            query.require("pin", query.flag("receives", t, r) == (r == each.dst))
        query.require("pin", query.flag("reduces", t) == (each.op == "reduce"))
    return query


@cache
def pinned_sequences() -> list[tuple[tuple[Move, ...], bool]]:
    """Right sequences and such with one thing changed, each with what the rule in Python says."""
    rng = random.Random(5)
    cases: list[tuple[tuple[Move, ...], bool]] = []
    for p in (2, 3, 4):
        right = ask_sequence(p, 2 * p - 2)
        assert isinstance(right, tuple)
        cases.append((right, True))
        for _ in range(8):
            moves = list(right)
            at = rng.randrange(len(moves))
            op: Literal["reduce", "copy"] = "reduce" if moves[at].op == "copy" else "copy"
            other = rng.randrange(p)
            moves[at] = rng.choice([replace(moves[at], op=op), replace(moves[at], src=other)])
            if rng.random() < 0.5:
                moves.insert(rng.randrange(len(moves)), rng.choice(moves))
            legal = all(each.src != each.dst for each in moves)
            cases.append((tuple(moves), legal and completes(p, moves)))
        cases.append(((*right, Move(0, 0, "copy")), False))
    assert {expected for _, expected in cases} == {True, False}
    return cases


@cache
def sequence_questions() -> list[tuple[Query, bool]]:
    """Pinned ones, and whether fewer transfers suffice."""
    pinned = [
        (pinned_moves(1 + max(max(each.src, each.dst) for each in moves), moves), expected)
        for moves, expected in pinned_sequences()
    ]
    return pinned + [(sequence_query(p, 2 * p - 3), False) for p in (2, 3, 4)]


def sequence_disagreements(without: Iterable[str] = ()) -> int:
    """How many questions z3 answers wrongly if families are left out."""
    return sum(isinstance(query.ask(without=without), Sat) != expected for query, expected in sequence_questions())


def test_the_encoding_agrees_with_the_rule_on_pinned_sequences() -> None:
    assert sequence_disagreements() == 0


SEQUENCE_FAMILIES = ["start", "one sender", "one receiver", "two ranks", "carry", "receive", "exactly once",
                     "nobody else", "end", "end once"]  # fmt: skip


def test_the_families_of_a_sequence() -> None:
    assert [*SEQUENCE_FAMILIES, "symmetry"] == sorted(
        sequence_query(3, 4).families, key=[*SEQUENCE_FAMILIES, "symmetry"].index
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", SEQUENCE_FAMILIES)
def test_each_family_of_a_sequence_is_missed(family: str) -> None:
    assert sequence_disagreements(without=[family]) > 0


def test_a_witness_that_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoding forgets exactly-once, so z3 is right and the transfers are wrong: the replay in Python sees it."""

    def forgetful(p: int, m: int, *, symmetry: bool) -> Query:
        query = sequence_query(p, m, symmetry=symmetry)
        query._constraints = [each for each in query._constraints if each[0] not in ("end once", "nobody else")]
        return query

    monkeypatch.setattr(fewest_transfers, "sequence_query", forgetful)
    with pytest.raises(SolverError, match="does not compute AllReduce over 4 ranks"):
        ask_sequence(4, 5)


def test_a_schedule_that_is_not_right_is_refused() -> None:
    """A contribution twice: what a solver says is never enough."""
    wrong = (Move(0, 1, "reduce"), Move(1, 0, "reduce"))
    assert not completes(2, wrong)
    with pytest.raises(SolverError, match="refuted"):
        prove_schedule(sequence_schedule(2, wrong))


def test_out_of_steps_or_states_is_unknown() -> None:
    assert isinstance(ask_sequence(6, 9, Limit(steps=1000)), Unknown)
    stopped = enumerate_sequences(6, 9, states_max=20)
    assert isinstance(stopped, Unknown)
    assert "20 states" in stopped.reason
    assert stopped.reached.startswith("no ")


@pytest.mark.parametrize(("p", "m"), [(1, 1), (17, 3), (3, -1)])
def test_bad_numbers(p: int, m: int) -> None:
    with pytest.raises(InputError):
        sequence_query(p, m)


# Steps ----------------------------------------------------------------------------------------------------------------


def even(p: int, chunks: int, port: int = 1) -> Instance:
    """All ranks alike."""
    return Instance((port,) * p, (port,) * p, chunks)


INSTANCES = [
    *(even(2, chunks) for chunks in (1, 3)),
    *(even(3, chunks) for chunks in (1, 2, 3)),
    *(even(4, chunks) for chunks in (1, 2)),
    *(Instance.one_straggler(3, chunks, 2, 1) for chunks in (1, 2, 3)),
    *(Instance.one_straggler(4, chunks, 2, 1) for chunks in (2, 3)),
    Instance.one_straggler(2, 2, 2, 1),
    Instance((2, 1, 1), (1, 2, 1), 2),
    Instance((3, 1, 1), (1, 2, 2), 2),
]


@cache
def found(instance: Instance) -> LeastSteps:
    return least_steps(instance, GENEROUS)


LARGE = (even(4, 2), Instance.one_straggler(4, 3, 2, 1))
EVERY = [
    pytest.param(each, marks=pytest.mark.slow) if each in LARGE or number % 3 else each
    for number, each in enumerate(INSTANCES)
]


@pytest.mark.parametrize("instance", EVERY, ids=str)
def test_the_bound_in_steps_is_never_beaten(instance: Instance) -> None:
    """Fewer steps are refuted with any memory and in place; the witness is proved; T* is the closed form's."""
    result = found(instance)
    seconds = allreduce_bound(instance.topology, instance.chunks).seconds
    assert result.bound == instance.bound == ceil(seconds)
    assert result.any_memory.open is None
    assert result.in_place.open is None
    assert result.any_memory.steps is not None
    assert result.in_place.steps is not None
    assert result.bound <= result.any_memory.steps <= result.in_place.steps
    assert {each.steps for each in result.any_memory.refuted} == set(range(result.bound - 1, result.any_memory.steps))
    assert result.in_place.steps - 1 in {each.steps for each in result.in_place.refuted}
    assert result.plan is not None
    assert verify_plan(result.plan).verdict == PROVED


@pytest.mark.parametrize("instance", EVERY, ids=str)
def test_below_the_bound_a_count_suffices(instance: Instance) -> None:
    """The solver's claim is accompanied by a count that anybody can check."""
    for each in found(instance).any_memory.refuted:
        assert isinstance(each.solver, Claim)
        if each.steps < instance.bound:
            assert isinstance(each.checked, Checked)


@pytest.mark.parametrize(
    "instance",
    [
        *(each for each in INSTANCES if each.p < 4 or each == even(4, 1)),
        pytest.param(even(4, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_enumeration_agrees_about_any_memory(instance: Instance) -> None:
    """The same least number of steps without a solver."""
    least = found(instance).any_memory.steps
    assert least is not None
    assert isinstance(enumerate_steps(instance, least - 1), Checked)
    assert enumerate_steps(instance, least) is True


@pytest.mark.parametrize(
    ("p", "chunks"), [(3, 1), (3, 2), (3, 3), (3, 4), (4, 2), pytest.param(4, 3, marks=pytest.mark.slow)]
)
def test_a_straggler_costs_one_step_more_than_the_bound(p: int, chunks: int) -> None:
    """Its last contribution leaves in step `chunks`, and must then be passed on: the (k + 1)/k of the pipeline."""
    instance = Instance.one_straggler(p, chunks, 2, 1)
    assert instance.bound == chunks
    checked = count_refutes(instance, chunks)
    assert checked is not None
    assert f"rank {p - 1} sends 1 chunks first in the last step" in checked.how
    assert isinstance(ask_steps(instance, chunks, "any memory", GENEROUS), Claim)
    assert isinstance(ask_steps(instance, chunks + 1, "in place", GENEROUS, agreement=True), tuple)


@pytest.mark.slow
@pytest.mark.parametrize(
    "instance", [Instance.one_straggler(4, 6, 2, 1), even(4, 4), Instance.one_straggler(4, 4, 4, 1)], ids=str
)
def test_larger_instances(instance: Instance) -> None:
    result = found(instance)
    assert result.plan is not None
    assert result.any_memory.steps == result.in_place.steps


@pytest.mark.parametrize("case", sampled(range(10), every=3))
def test_counting_and_symmetry_on_random_ports(case: int) -> None:
    """Where counting refutes, so does z3; with and without symmetry breaking it answers the same."""
    rng = random.Random(case)
    p = rng.choice((2, 3, 3, 4))
    ports = [tuple(rng.randint(1, 3) for _ in range(p)) for _ in range(2)]
    instance = Instance(ports[0], ports[1], rng.randint(1, 3))
    memory: Memory = rng.choice(("any memory", "in place"))
    for steps in range(max(instance.bound - 1, 0), instance.bound + 3):
        with_it, without = (ask_steps(instance, steps, memory, GENEROUS, symmetry=each) for each in (True, False))
        assert isinstance(with_it, tuple) == isinstance(without, tuple)
        if count_refutes(instance, steps) is not None:
            assert isinstance(with_it, Claim)
        if isinstance(with_it, tuple):
            assert steps >= instance.bound
            break


@pytest.mark.parametrize("instance", [even(3, 3), even(4, 2), Instance.one_straggler(3, 3, 2, 1)], ids=str)
def test_the_witness_is_not_faster_than_time_allows(instance: Instance) -> None:
    """Compiled and simulated, with a chunk of four bytes, it takes at least T*."""
    sends = found(instance).in_place.sends
    schedule = steps_schedule(instance, sends)
    plan = compile_schedule(schedule, size_bytes=4 * instance.chunks, topology=instance.topology)
    bound = allreduce_bound(instance.topology, 4 * instance.chunks).seconds
    assert simulate(plan, instance.topology, model="exclusive").seconds >= float(bound) - 1e-9


def pinned_sends(
    instance: Instance, steps: int, sends: Iterable[Send], memory: Memory, *, agreement: bool = False
) -> Query:
    """The question with every send fixed."""
    query = steps_query(instance, steps, memory, agreement=agreement, symmetry=False)
    wanted = {(each.op, each.step, each.src, each.dst, each.chunk) for each in sends}
    for s in range(steps):
        for u, v in instance.pairs:
            for c in range(instance.chunks):
                query.require("pin", query.flag("reduces", s, u, v, c) == (("reduce", s, u, v, c) in wanted))
                if memory == "in place":
                    query.require("pin", query.flag("copies", s, u, v, c) == (("copy", s, u, v, c) in wanted))
    return query


@cache
def pinned_cases(memory: Memory) -> list[tuple[Instance, int, tuple[Send, ...], bool]]:
    """Right sends and such with one thing changed, each with what the rule in Python says."""
    rng = random.Random(7)
    cases: list[tuple[Instance, int, tuple[Send, ...], bool]] = []

    def add(instance: Instance, steps: int, sends: tuple[Send, ...]) -> None:
        cases.append((instance, steps, sends, sends_complete(instance, sends, steps, memory)))

    for instance in (Instance.one_straggler(3, 2, 2, 1), even(3, 2), Instance((2, 1, 1), (1, 2, 1), 2)):
        result = found(instance)
        least = result.any_memory if memory == "any memory" else result.in_place
        assert least.steps is not None
        add(instance, least.steps, least.sends)
        for v in range(instance.p):  # the same sends through narrower ports
            for ports in ("out", "in"):
                out = tuple(max(1, port - (u == v and ports == "out")) for u, port in enumerate(instance.out))
                in_ = tuple(max(1, port - (u == v and ports == "in")) for u, port in enumerate(instance.in_))
                add(Instance(out, in_, instance.chunks), least.steps, least.sends)
        for _ in range(8):
            sends = list(least.sends)
            at = rng.randrange(len(sends))
            src, dst = rng.choice(instance.pairs)
            changed = [replace(sends[at], src=src, dst=dst), replace(sends[at], chunk=rng.randrange(instance.chunks))]
            if memory == "in place":
                changed.append(replace(sends[at], op="copy" if sends[at].op == "reduce" else "reduce"))
            if rng.random() < 0.5:
                sends.append(rng.choice(changed))  # beside the old one
            else:
                sends[at] = rng.choice(changed)
            add(instance, least.steps, tuple(dict.fromkeys(sends)))
    assert {expected for *_, expected in cases} == {True, False}
    return cases


@cache
def step_questions(memory: Memory) -> list[tuple[Query, bool]]:
    """The pinned ones."""
    return [
        (pinned_sends(instance, steps, sends, memory), expected)
        for instance, steps, sends, expected in pinned_cases(memory)
    ]


def step_disagreements(memory: Memory, without: Iterable[str] = ()) -> int:
    """How many of them z3 answers wrongly if families are left out."""
    return sum(isinstance(query.ask(without=without), Sat) != expected for query, expected in step_questions(memory))


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["any memory", "in place"])
def test_the_encoding_agrees_with_the_rule_on_pinned_sends(memory: Memory) -> None:
    assert step_disagreements(memory) == 0


STEP_FAMILIES: list[tuple[Memory, str]] = [
    *(("any memory", family) for family in ("start", "out ports", "in ports", "holds", "end")),
    *(("in place", family) for family in ("start", "out ports", "in ports", "one copy", "copy or reduce", "holds",
                                          "exactly once", "end")),
]  # fmt: skip


@pytest.mark.parametrize("memory", ["any memory", "in place"])
def test_the_families_of_a_question_in_steps(memory: Memory) -> None:
    families = {family for each, family in STEP_FAMILIES if each == memory}
    assert set(steps_query(even(3, 2), 2, memory).families) == families | {"symmetry"}
    more = {"symmetry", "agreement", "one message of a chunk"}
    assert set(steps_query(even(3, 2), 2, memory, agreement=True).families) == families | more


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "family"), STEP_FAMILIES)
def test_each_family_of_a_question_in_steps_is_missed(memory: Memory, family: str) -> None:
    if family in TWO_AT_ONCE:
        instance = even(3, 1, port=2)
        assert sends_complete(instance, RIGHT, 2, memory)
        wrong = (*RIGHT, *TWO_AT_ONCE[family])
        assert not sends_complete(instance, wrong, 2, memory)
        query = pinned_sends(instance, 2, wrong, memory)
        assert isinstance(query.ask(), Claim)
        assert isinstance(query.ask(without=[family]), Sat)
        return
    assert step_disagreements(memory, without=[family]) > 0


RIGHT = (
    *(Send(0, 0, 1, 0, "reduce"), Send(0, 2, 1, 0, "reduce")),
    *(Send(1, 1, 0, 0, "copy"), Send(1, 1, 2, 0, "copy")),
)
TWO_AT_ONCE = {
    "one copy": (Send(0, 0, 2, 0, "copy"), Send(0, 1, 2, 0, "copy")),
    "copy or reduce": (Send(0, 0, 2, 0, "copy"), Send(0, 1, 2, 0, "reduce")),
}
"""What rank 2 gets on top in the first step; it is replaced in the second, so only doing both at once is wrong."""


def test_trees_that_differ_are_told_apart() -> None:
    """(0 + 1) + (2 + 3) at ranks 1 and 2, (0 + 3) + (1 + 2) at ranks 0 and 3: complete, but not bit by bit."""
    instance = even(4, 1)
    sends = [Send(0, u, (u + 1) % 4, 0, "reduce") for u in range(4)]
    sends += [Send(1, 3, 1, 0, "reduce"), Send(1, 2, 0, 0, "reduce")]
    sends += [Send(2, 1, 2, 0, "copy"), Send(2, 0, 3, 0, "copy")]
    assert sends_complete(instance, sends, 3, "in place")
    assert isinstance(pinned_sends(instance, 3, sends, "in place").ask(), Sat)
    agreeing = pinned_sends(instance, 3, sends, "in place", agreement=True)
    assert isinstance(agreeing.ask(), Claim)
    assert isinstance(agreeing.ask(without=["agreement"]), Sat)
    with pytest.raises(SolverError, match="agreement"):
        prove_schedule(steps_schedule(instance, sends))


def test_one_message_of_a_chunk_at_a_time() -> None:
    """Everyone to everyone in one step: three messages at once are added in an order that no two ranks share."""
    instance = even(4, 1, port=3)
    sends = [Send(0, u, v, 0, "reduce") for u, v in instance.pairs]
    assert isinstance(pinned_sends(instance, 1, sends, "in place").ask(), Sat)
    query = pinned_sends(instance, 1, sends, "in place", agreement=True)
    assert isinstance(query.ask(), Claim)
    assert isinstance(query.ask(without=["one message of a chunk"]), Sat)
    with pytest.raises(SolverError, match="agreement"):
        prove_schedule(steps_schedule(instance, sends))


def test_sends_that_do_not_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoding forgets a port: the replay in Python sees it."""

    def forgetful(*arguments: object, **options: object) -> Query:
        query: Query = original(*arguments, **options)
        query._constraints = [each for each in query._constraints if each[0] != "out ports"]
        return query

    original: Callable[..., Query] = steps_query
    monkeypatch.setattr(fewest_steps, "steps_query", forgetful)
    with pytest.raises(SolverError, match="do not do it"):
        ask_steps(Instance((1, 1, 1), (2, 2, 2), 2), 2, "any memory")


def test_an_open_question_says_how_far_it_came() -> None:
    """Steps of the solver run out: no exception, no number of steps, no plan."""
    result = least_steps(even(4, 3), Limit(steps=1000))
    assert result.any_memory.steps is None
    assert result.plan is None
    assert isinstance(result.any_memory.open, Unknown)
    stopped = enumerate_steps(even(4, 3), 4, states_max=5)
    assert isinstance(stopped, Unknown)
    assert stopped.reached.startswith("impossible in ")


@pytest.mark.parametrize(
    ("out", "in_", "chunks"), [((1,), (1,), 1), ((1, 1), (1,), 1), ((0, 1), (1, 1), 1), ((1, 1), (1, 1), 0)]
)
def test_bad_instances(out: tuple[int, ...], in_: tuple[int, ...], chunks: int) -> None:
    with pytest.raises(InputError):
        Instance(out, in_, chunks)


def test_a_negative_number_of_steps() -> None:
    with pytest.raises(InputError, match="must not be negative"):
        steps_query(even(2, 1), -1, "in place")
