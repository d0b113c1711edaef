"""Induction over the loops of a symbolic program: the values of one chunk on all ranks, for every number of ranks.

The state of the chunk (`optcc.verify.all_ranks.chunk_program`) is a relation `has(r, y)`, rank r's value contains rank
y's contribution, and a predicate `stamp(r)`, rank r's value is the result of the chunk's last reduction or a copy of
it. Then

    result      at the end has(r, y) for all r and y, and no reduction added a contribution twice
    agreement   at the end stamp(r) for all r: all values are copies of one, so there is one tree of reductions

The invariant of a loop is the state before an iteration, as a formula over r, y, the chunk, the iteration and the
number of ranks. It is guessed (`optcc.verify.all_ranks.invariants`) and then proved: the state before the loop implies
the invariant of the first iteration, and each iteration establishes that of the next. The negation of each lemma goes
to Z3 as a quantifier-free formula of linear integer arithmetic; `unsat` is a claim of Z3's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from optcc.schedule import COPY, REDUCE
from optcc.verify.all_ranks.chunk_program import (
    At,
    ChunkNode,
    ChunkProgram,
    ProofStops,
    Rank,
    Step,
    Turns,
    When,
    is_rank,
    moves_of,
    pipeline_counts,
    pipeline_digits,
    rank_digits,
    rank_of,
    requirements_of,
    same,
    sections_of,
    turns_of,
)
from optcc.verify.all_ranks.encoding import Encoder
from optcc.verify.all_ranks.invariants import SEED, SIZES_FIRST, Invariant, Runner, learn, places_to_run
from optcc.verify.all_ranks.symbolic import OWNER, Along, Move, Reading
from optcc.verify.all_ranks.symbolic_terms import FALSE, TRUE, Formula, Term, both, choose, either, eq, le, lt, no, put
from optcc.verify.all_ranks.symbolic_values import digits
from optcc.verify.smt import Checked, Claim, Limit, Query, Sat, Unknown

LEMMA_S_MAX = 20.0
RUN_RANKS_MAX = 48
"""Limit on the ranks of a concrete run."""
ROUNDS_MAX = 6
"""Limit on further runs after those of the first guess."""


@dataclass(frozen=True, slots=True)
class InductionLemma:
    """One step of a proof. `answer` is Z3's claim, `Checked` without a solver, `Unknown`, or `Sat` with a
    counterexample. What Z3 was asked is `smt_lib`, for another solver; empty if it was not asked."""

    name: str
    statement: str
    answer: Claim | Checked | Sat | Unknown
    seconds: float
    smt_lib: str = field(default="", repr=False)

    @property
    def proved(self) -> bool:
        """True if a solver claims it or it was checked."""
        return isinstance(self.answer, Claim | Checked)

    @property
    def by(self) -> str:
        """The solver, or "checked"."""
        if isinstance(self.answer, Checked):
            return "checked"
        return self.answer.solver if isinstance(self.answer, Claim) else ""

    @property
    def verdict(self) -> str:
        """proved, fails or unknown."""
        return "proved" if self.proved else "fails" if isinstance(self.answer, Sat) else "unknown"


def ask(
    name: str,
    statement: str,
    facts: Sequence[Formula],
    goal: Formula,
    seconds_max: float = LEMMA_S_MAX,
    *,
    relates: bool = False,
) -> InductionLemma:
    """The lemma that `facts` imply `goal` for all values of the variables; `relates` is that of an `Encoder`."""
    started = time.perf_counter()
    query = Query(f"not: {statement}", statement)
    encoder = Encoder(query, relates)
    query.require("assumed", *(encoder.truth(fact) for fact in facts))
    query.require("goal fails", query.no(encoder.truth(goal)))
    encoder.require_facts()
    answer = query.ask(Limit(seconds_max))
    return InductionLemma(name, statement, answer, time.perf_counter() - started, query.as_smt_lib())


def iff(one: Formula, other: Formula) -> Formula:
    """Equivalence."""
    return choose(one, other, no(other))


@dataclass(frozen=True, slots=True)
class State:
    """The state at one place of the program: `has(r, y)` and `stamp(r)`."""

    has: Callable[[Rank, Rank], Formula]
    stamp: Callable[[Rank], Formula]


@dataclass(eq=False)
class Proof:
    """The lemmas of one chunk, their names prefixed by `label`; stops at the first that is not proved."""

    chunk: ChunkProgram
    collective: str
    invariants: Mapping[str, Invariant]
    label: str
    lemmas: list[InductionLemma] = field(default_factory=list)

    def run(self) -> None:
        """Proves the postcondition of the chunk.

        Raises ProofStops at the first lemma that Z3 does not claim.
        """
        chunk, (r, y) = self.chunk, self._ends()
        for number, (line, facts, goal) in enumerate(chunk.single):
            statement = f"in line {line} one lane of a step touches the chunk: {goal}"
            self._lemma(f"one lane {number + 1}, line {line}", statement, [*chunk.facts, *facts], goal)
        last = _last_reduction(chunk.nodes)
        state = self._run(chunk.nodes, self._start(), {}, list(chunk.facts), last)
        ends = [*chunk.facts, is_rank(r, chunk.reading), is_rank(y, chunk.reading)]
        owner = self._owner()
        if self.collective == "allreduce":
            wanted, words = state.has(r, y), "in the end every rank has every contribution"
        elif self.collective == "reducescatter":
            wanted, words = no(both(same(r, owner), no(state.has(r, y)))), "in the end the owner has every contribution"
        else:
            wanted = iff(state.has(r, y), same(y, owner))
            words = "in the end every rank has the owner's contribution, and nothing else"
        self._lemma("result", words, ends, wanted)
        if self.collective == "allreduce":
            statement = "in the end every value is a copy of the last reduction's, so all have one tree"
            self._lemma("agreement", statement, ends, state.stamp(r))

    def _ends(self) -> tuple[Rank, Rank]:
        return rank_of("r", self.chunk.reading), rank_of("y", self.chunk.reading)

    def _owner(self) -> Rank:
        """The rank that owns the chunk, where the collective has slices."""
        if self.collective == "allreduce":
            return ()
        names = [name for name, _ in self.chunk.places]
        if names != ["c_pipeline"] or self.chunk.places[0][1] != self.chunk.reading.case.ranks:
            raise ProofStops("chunks are not the ranks' slices")
        return (Term.var("c_pipeline"),)

    def _start(self) -> State:
        owner = self._owner()
        if self.collective == "allgather":
            return State(lambda r, y: both(same(r, owner), same(y, owner)), lambda r: FALSE)
        return State(same, lambda r: FALSE)

    def _lemma(self, name: str, statement: str, facts: Sequence[Formula], goal: Formula) -> None:
        if goal == TRUE:
            return
        lemma = ask(f"{self.label}{name}", statement, facts, goal)
        self.lemmas.append(lemma)
        if not lemma.proved:
            raise ProofStops(f"lemma {lemma.name!r} ({statement}): {why(lemma)}")

    def _run(
        self,
        nodes: Sequence[ChunkNode],
        state: State,
        values: dict[str, Term],
        facts: list[Formula],
        last: tuple[Move, tuple[str, ...]] | None,
    ) -> State:
        for node in nodes:
            match node:
                case Step():
                    state = self._step(node, state, values, facts, last)
                case When(test, body):
                    test = put(test, values)
                    state = _where(test, self._run(body, state, values, [*facts, test], last), state)
                case At(var, only, low, high, body):
                    lane = only.put(values)
                    test = both(le(low.put(values), lane), lt(lane, high.put(values)))
                    inside = self._run(body, state, {**values, var: lane}, [*facts, test], last)
                    state = _where(test, inside, state)
                case Turns():
                    state = self._turns(node, state, values, facts, last)
        return state

    def _turns(
        self,
        loop: Turns,
        state: State,
        values: dict[str, Term],
        facts: list[Formula],
        last: tuple[Move, tuple[str, ...]] | None,
    ) -> State:
        r, y = self._ends()
        ranks = [is_rank(r, self.chunk.reading), is_rank(y, self.chunk.reading)]
        low, high, turn = loop.low.put(values), loop.high.put(values), Term.var(loop.var)
        if loop.var not in self.invariants:
            raise ProofStops(f"line {loop.line}: a loop that was never reached for small numbers of ranks")
        invariant = self.invariants[loop.var]

        def before(number: Term) -> State:
            return State(
                lambda r, y: put(invariant.has, {**_named("r", r), **_named("y", y), loop.var: number}),
                lambda r: put(invariant.stamp, {**_named("r", r), loop.var: number}),
            )

        name = f"line {loop.line}"
        self._lemma(
            f"{name}, start",
            "before the first turn the invariant holds",
            [*facts, *ranks],
            _alike(state, before(low), r, y),
        )
        inside = [*facts, le(low, turn), lt(turn, high)]
        after = self._run(loop.body, before(turn), {**values, loop.var: turn}, inside, last)
        self._lemma(
            f"{name}, turn",
            f"a turn keeps the invariant: r has y where {invariant.has}",
            [*inside, *ranks],
            _alike(after, before(turn + 1), r, y),
        )
        some = le(low, high)
        return _where(some, before(high), before(low))

    def _step(
        self,
        step: Step,
        state: State,
        values: dict[str, Term],
        facts: list[Formula],
        last: tuple[Move, tuple[str, ...]] | None,
    ) -> State:
        y = rank_of("y", self.chunk.reading)
        src, dst = (tuple(each.put(values) for each in end) for end in (step.src, step.dst))
        hits = put(step.hits, values)
        move = step.move
        here = [*facts, hits, is_rank(y, self.chunk.reading)]
        if move.op == REDUCE:
            twice = both(state.has(src, y), state.has(dst, y))
            self._lemma(
                f"line {move.line}, disjoint", "a reduction adds no contribution that is there", here, no(twice)
            )
        elif self.collective == "allgather":
            self._lemma(f"line {move.line}, written", "what is copied was written", here, state.has(src, self._owner()))
        stamped = FALSE if move.op == REDUCE else state.stamp(src)
        if last is not None and move is last[0]:
            loops = {loop.var: loop for loop in turns_of(self.chunk.nodes)}
            stamped = both(*(eq(Term.var(var), loops[var].high.put(values) - 1) for var in last[1]))

        def has(r: Rank, y: Rank) -> Formula:
            new = state.has(src, y)
            if move.op == REDUCE:
                new = either(new, state.has(dst, y))
            return choose(both(hits, same(r, dst)), new, state.has(r, y))

        return State(has, lambda r: choose(both(hits, same(r, dst)), stamped, state.stamp(r)))


def _alike(one: State, other: State, r: Rank, y: Rank) -> Formula:
    return both(iff(one.has(r, y), other.has(r, y)), iff(one.stamp(r), other.stamp(r)))


def _where(test: Formula, then: State, otherwise: State) -> State:
    if test == TRUE:
        return then
    return State(
        lambda r, y: choose(test, then.has(r, y), otherwise.has(r, y)),
        lambda r: choose(test, then.stamp(r), otherwise.stamp(r)),
    )


def _named(letter: str, rank: Rank) -> dict[str, Term]:
    return {f"{letter}{digit}": each for digit, each in enumerate(rank)}


def _last_reduction(nodes: Sequence[ChunkNode], around: tuple[str, ...] = ()) -> tuple[Move, tuple[str, ...]] | None:
    """The last reduction in program order, and the loops in whose last iterations it is executed last."""
    found = None
    for node in nodes:
        match node:
            case Step(move):
                found = (move, around) if move.op == REDUCE else found
            case Turns(var):
                found = _last_reduction(node.body, (*around, var)) or found
            case At() | When():
                found = _last_reduction(node.body, around) or found
    return found


def why(lemma: InductionLemma) -> str:
    """Why a lemma is not proved, in words."""
    if isinstance(lemma.answer, Sat):
        shown = ", ".join(f"{' '.join(map(str, key))} = {value}" for key, value in lemma.answer.values.items())
        return f"fails for {shown}"
    return str(lemma.answer)


def prove_moves(reading: Reading, label: str = "") -> list[InductionLemma]:
    """Proves that every transfer names two different, existing ranks and an existing section; one lemma per line, its
    name prefixed by `label`.

    Raises ProofStops at the first that Z3 does not claim.
    """
    lemmas: list[InductionLemma] = []

    def prove(name: str, statement: str, facts: Sequence[Formula], goal: Formula) -> None:
        lemmas.append(ask(label + name, statement, [*reading.case.facts(), *facts], goal))
        if not lemmas[-1].proved:
            raise ProofStops(f"lemma {name!r} ({statement}): {why(lemmas[-1])}")

    for walk in reading.walks:
        for residue, body in enumerate(walk.bodies):
            kind = f" {residue + 1}" if len(walk.bodies) > 1 else ""
            for requirement, known in requirements_of(body):
                name = f"line {requirement.line}{kind}, entry"
                prove(name, f"line {requirement.line}: the list has this entry", known, requirement.test)
            for found in moves_of(body):
                move = found.move
                src, dst = (rank_digits(end, found, reading) for end in (move.src, move.dst))
                family = reading.families[move.family]
                inner, counts = sections_of([found], reading, move.family)
                sections: list[Term] = [move.section]
                if len(counts) == 2:
                    assert inner is not None
                    high, low = digits(move.section, inner, found.ranges)
                    assert high is not None
                    sections = [high, low]
                within = [
                    both(le(0, each), lt(each, n)) for each, n in zip(sections, counts or (Term.of(1),), strict=True)
                ]
                pipelines = pipeline_digits(found, reading)
                within += [
                    both(le(0, each), lt(each, n)) for each, n in zip(pipelines, pipeline_counts(family), strict=True)
                ]
                if not pipelines:
                    within.append(eq(move.pipeline, 0))
                apart = no(same(src, dst)) if move.src_slot == move.dst_slot else TRUE
                goal = both(is_rank(src, reading), is_rank(dst, reading), apart, *within)
                statement = f"line {move.line} names two different ranks, and a section, that exist"
                prove(f"line {move.line}{kind}, exists", statement, found.facts, goal)
    return lemmas


def prove_chunk(
    chunk: ChunkProgram, collective: str, label: str, stop_at: float
) -> tuple[list[InductionLemma], dict[str, Invariant]]:
    """The lemmas that prove a chunk right, and its invariants; `stop_at` is a time.monotonic().

    A counterexample to a guessed invariant adds a concrete run of its sizes, and the invariant is guessed again.

    Raises ProofStops if no proof is found.
    """
    names = [name for name, _ in chunk.reading.case.sizes]
    lowest = dict(chunk.reading.case.sizes)
    first = SIZES_FIRST[len(names)]
    tried = [{name: lowest[name] + more for name, more in zip(names, each, strict=True)} for each in first]
    runner = Runner.of(chunk, collective)
    while True:
        for values in (each for sizes in tried for each in places_to_run(chunk, sizes, np.random.default_rng(SEED))):
            if runner.goes_wrong(values):
                shown = ", ".join(f"{name} = {value}" for name, value in values.items())
                raise ProofStops(f"{label}a reduction adds what is there, or contributions are missing, for {shown}")
        proof = Proof(chunk, collective, learn(chunk, collective, tried), label)
        try:
            proof.run()
            return proof.lemmas, dict(proof.invariants)
        except ProofStops as stops:
            failed = proof.lemmas[-1].answer if proof.lemmas else None
            if not isinstance(failed, Sat) or time.monotonic() > stop_at:
                raise
            wider = {name: int(failed.values[name,]) for name in names if (name,) in failed.values}
            wider = {**{name: max(each[name] for each in tried) for name in names if name not in wider}, **wider}
            n_ranks = chunk.reading.case.ranks.at({**wider, chunk.reading.case.straggler or "": 0})
            if wider in tried or n_ranks > RUN_RANKS_MAX:
                wider = {name: max(each[name] for each in tried) + 1 for name in names}
                n_ranks = chunk.reading.case.ranks.at({**wider, chunk.reading.case.straggler or "": 0})
            if n_ranks > RUN_RANKS_MAX or len(tried) > len(first) + ROUNDS_MAX:
                raise ProofStops(f"no invariant was found that holds for all sizes: {stops}") from None
            tried.append(wider)


def prove_tree() -> list[InductionLemma]:
    """Proves reduction and broadcast along any tree, by induction over its order, in which parents precede children.

    Ranks are numbered by position in the order, the root being 0; `up` is the parent of position j, and `holder` the
    position that forwards the contribution of some rank y. Invariant of the reduction before position j, from the last
    one down: the ranks at positions up to j hold exactly what they are to forward. Invariant of the broadcast before
    position j, from 1 up: all positions before it hold the root's value.

    Raises ProofStops if Z3 does not claim a lemma.
    """
    p, j, up, holder, x = (Term.var(name) for name in ("p", "j", "up", "holder", "x"))
    facts = [le(2, p), le(1, j), lt(j, p), le(0, up), lt(up, j)]
    carried = [le(0, holder), le(holder, j)]
    there, here = eq(holder, up), eq(holder, j)  # y's contribution is in the parent's, in the child's value
    after = choose(here, eq(x, up), eq(x, holder))
    gets = choose(eq(x, up), either(there, here), eq(x, holder))
    below = [le(0, x), lt(x, j)]
    lemmas = [
        ask(
            "reduce along, start",
            "before the first transfer every contribution is at its own place, at most p - 1",
            [*facts, eq(holder, x), le(0, x), lt(x, p), eq(j, p - 1)],
            both(le(0, holder), le(holder, j)),
        ),
        ask(
            "reduce along, disjoint",
            "no reduction adds a contribution that is there",
            [*facts, *carried],
            no(both(there, here)),
        ),
        ask(
            "reduce along, turn",
            "a reduction keeps: places before j hold exactly what is carried on there",
            [*facts, *carried, *below],
            iff(gets, after),
        ),
        ask(
            "reduce along, order",
            "after it nothing is carried on at place j or behind",
            [*facts, *carried],
            choose(here, both(le(0, up), lt(up, j)), lt(holder, j)),
        ),
        ask(
            "reduce along, result",
            "once place 1 has sent, the root has every contribution",
            [*facts, *carried, eq(j, 1)],
            choose(here, eq(up, 0), eq(holder, 0)),
        ),
        ask("broadcast along", "place j gets its value from a place before it, which has the root's", facts, lt(up, j)),
    ]
    for lemma in lemmas:
        if not lemma.proved:
            raise ProofStops(f"lemma {lemma.name!r} ({lemma.statement}): {why(lemma)}")
    return lemmas


def check_along(reading: Reading, collective: str) -> str:
    """A description of each segment, if it is the collective as reduction and broadcast along trees.

    Raises ProofStops otherwise.
    """
    for walk in reading.walks:
        for body, family in product(walk.bodies, walk.families):
            shape = reading.families[family]
            if shape.sections.constant is None or shape.count.constant != 1:
                raise ProofStops(f"line {shape.line}: trees over a number of sections that is not known")
            if not all(isinstance(node, Along) for node in body):
                raise ProofStops(f"line {shape.line}: trees and single transfers in one segment")
            of_family = [node for node in body if isinstance(node, Along) and node.family == family]
            sections = range(shape.sections.constant)
            if any(node.section.constant not in sections for node in of_family):
                raise ProofStops(f"line {shape.line}: a section that is not known")
            for section in sections:
                _check_chunk([node for node in of_family if node.section.constant == section], collective, shape.line)
    return (
        "each segment is reduced along a tree"
        if collective not in ("broadcast", "allgather")
        else "each segment is broadcast along a tree"
    )


def _check_chunk(nodes: Sequence[Along], collective: str, line: int) -> None:
    done = (collective, *(node.op for node in nodes))
    roots = {node.root for node in nodes}
    if done == ("allreduce", REDUCE, COPY):
        if len(roots) != 1:
            raise ProofStops(f"line {nodes[1].line}: the trees may have different roots")
    elif done in (("reduce", REDUCE), ("broadcast", COPY)):
        if roots != {Term.var("root")}:
            raise ProofStops(f"line {line}: no {collective} along trees from the collective's root")
    elif done not in (("reducescatter", REDUCE), ("allgather", COPY)) or roots != {OWNER}:
        raise ProofStops(f"line {line}: no {collective} along trees from the rank to which a segment belongs")
