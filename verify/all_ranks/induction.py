"""Induction over the loops of a symbolic program: what every rank holds of one chunk, for every number of ranks.

Chunks do not meet: a transfer reads and writes one section of one segment. So one chunk is followed, of which only
symbols are known, through the transfers that touch it, in the author's order. Its state is, for every pair of ranks,
whether rank r's value contains rank y's contribution, `has(r, y)`; and for every rank whether its value was made by the
chunk's last reduction, or copied from one that was: the `stamp`. Then

    result      in the end has(r, y) for all r and y, and never did a reduction add what was there already
    agreement   in the end every rank has the stamp: all values are copies of one, so there is one tree of reductions

Before each turn of a loop the state is a formula over r, y, the chunk, the turn and the number of ranks: the loop's
invariant. It is guessed and then proved. The guess comes from running the chunk for a few small numbers of ranks and
fitting a decision tree over comparisons of places (`Learner`): where rank r stands behind the chunk, (r - c) mod p,
against the turn, against 0 and p - 1, and against where y stands. The proof is that the state before the loop is the
invariant at its first turn, and that one turn makes the invariant of the next one; the negation of each such statement
goes to Z3 as a formula of linear whole numbers without quantifiers, and `unsat` is a claim of Z3's.

Lanes of a loop that touch the chunk are not run one by one: the loop over lanes is replaced by the only lane that can
touch it, which is found by solving the section for the lane, and that it is the only one is a lemma (`At`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from optcc.schedule import COPY, REDUCE
from optcc.verify.all_ranks.symbolic import (
    FALSE,
    SEGMENT_TURN,
    TRUE,
    All,
    Along,
    AnyOf,
    Atom,
    Choice,
    Eq,
    Formula,
    Guard,
    Le,
    Loop,
    Mod,
    Move,
    Node,
    Not,
    Reading,
    Require,
    Skip,
    Term,
    Unskip,
    Var,
    both,
    choose,
    code_of,
    either,
    eq,
    holds,
    le,
    lt,
    mod,
    no,
    put,
    quotient,
)
from optcc.verify.all_ranks.symbolic_values import digits
from optcc.verify.smt import Checked, Claim, Limit, Query, Sat, Unknown

LEMMA_S_MAX = 20.0
LEVELS = 3
"""How far the questions of an invariant go, from places that are equal to places that are three apart."""
SIZES_FIRST: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((),),
    ((0,), (1,), (2,), (3,), (4,)),
    ((0, 0), (0, 1), (1, 0), (1, 1), (0, 4), (4, 0), (2, 3)),
)
"""By how much the sizes of the runs before the first guess are above the lowest: of no size, of one, of two."""
RUN_RANKS_MAX = 48
ROUNDS_MAX = 6
PLACES_MAX = 10
ROWS_MAX = 1500
SEED = 1
"""Ranks of a run, runs after the first guess, chunks of a run, and rows of a loop in a run, at most. Which are left out
is drawn with this seed: a guess may be wrong, and is proved or not whatever it was drawn from."""
Rank = tuple[Term, ...]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Lemma:
    """One step of a proof. `answer` is Z3's claim, or `Checked` where no solver was asked; `Unknown`, or `Sat` with
    numbers for which it fails."""

    name: str
    statement: str
    answer: Claim | Checked | Sat | Unknown
    seconds: float

    @property
    def proved(self) -> bool:
        """Whether a solver claims it, or it was checked."""
        return isinstance(self.answer, Claim | Checked)

    @property
    def by(self) -> str:
        """Who says so."""
        if isinstance(self.answer, Checked):
            return "checked"
        return self.answer.solver if isinstance(self.answer, Claim) else ""

    @property
    def verdict(self) -> str:
        """In one word."""
        return "proved" if self.proved else "fails" if isinstance(self.answer, Sat) else "unknown"


class ProofStops(Exception):
    """No proof was found, which says nothing about the schedule."""


# One chunk of a program -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class At:
    """`body` for the one value of a loop's variable for which it touches the chunk: `var` = `only` if that is within
    low, ..., high - 1."""

    var: str
    only: Term
    low: Term
    high: Term
    body: tuple[ChunkNode, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Turns:
    """A loop that touches the chunk turn after turn."""

    var: str
    low: Term
    high: Term
    body: tuple[ChunkNode, ...]
    line: int


@dataclass(frozen=True, slots=True)
class When:
    """`body` where `test` holds."""

    test: Formula
    body: tuple[ChunkNode, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A transfer of this chunk, if `hits`; `last` says when it is the chunk's last reduction."""

    move: Move
    src: Rank
    dst: Rank
    hits: Formula


ChunkNode = At | Turns | When | Step


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a family of pipelines, and what touches it in the order of the author.

    `places` are its coordinates with their numbers of values: which pipeline, which section (in two digits where the
    number of sections is a product). `single` are the conditions under which each `At` is right.
    """

    reading: Reading
    family: int
    places: tuple[tuple[str, Term], ...]
    nodes: tuple[ChunkNode, ...]
    single: tuple[tuple[int, tuple[Formula, ...], Formula], ...]

    @property
    def facts(self) -> list[Formula]:
        """What is known of the sizes and the chunk."""
        found = self.reading.case.facts()
        for name, count in self.places:
            found += [le(0, Term.var(name)), lt(Term.var(name), count)]
        return found


def rank_sizes(reading: Reading) -> tuple[Term, ...]:
    """A rank is one number, or server and GPU: how many values each has."""
    case = reading.case
    return (case.ranks,) if case.inner is None else (case.servers, case.inner)


def rank_of(name: str, reading: Reading) -> Rank:
    """A rank of which nothing is known, in variables `name`0 and `name`1."""
    return tuple(Term.var(f"{name}{digit}") for digit in range(len(rank_sizes(reading))))


def is_rank(rank: Rank, reading: Reading) -> Formula:
    """That there is such a rank."""
    return both(*(both(le(0, each), lt(each, count)) for each, count in zip(rank, rank_sizes(reading), strict=True)))


def same(one: Rank, other: Rank) -> Formula:
    """That two ranks are one."""
    return both(*(eq(left, right) for left, right in zip(one, other, strict=True)))


@dataclass(frozen=True, slots=True)
class _Found:
    """A transfer with the loops and conditions around it, outermost first."""

    move: Move
    loops: tuple[Loop, ...]
    tests: tuple[Formula, ...]

    @property
    def ranges(self) -> dict[str, tuple[Term, Term]]:
        return {loop.var: (loop.low, loop.high) for loop in self.loops}

    @property
    def facts(self) -> list[Formula]:
        found = list(self.tests)
        for loop in self.loops:
            found += [le(loop.low, Term.var(loop.var)), lt(Term.var(loop.var), loop.high)]
        return found


def moves_of(nodes: Sequence[Node], loops: tuple[Loop, ...] = (), tests: tuple[Formula, ...] = ()) -> Iterator[_Found]:
    """Every transfer, with what is around it."""
    for node in nodes:
        match node:
            case Loop():
                yield from moves_of(node.body, (*loops, node), tests)
            case Guard(test, body):
                yield from moves_of(body, loops, (*tests, test))
            case Move():
                yield _Found(node, loops, tests)


def requirements_of(
    nodes: Sequence[Node], facts: tuple[Formula, ...] = ()
) -> Iterator[tuple[Require, tuple[Formula, ...]]]:
    """What must hold somewhere, and what is known there."""
    for node in nodes:
        match node:
            case Loop(var, low, high, body):
                yield from requirements_of(body, (*facts, le(low, Term.var(var)), lt(Term.var(var), high)))
            case Guard(test, body):
                yield from requirements_of(body, (*facts, test))
            case Require():
                yield node, facts


def _sections(found: Sequence[_Found], reading: Reading, family: int) -> tuple[Term | None, tuple[Term, ...]]:
    """The factor by which section numbers fall into two digits (None if they are one), and how many values each has."""
    sections = reading.families[family].sections
    if sections.constant == 1:
        return None, ()
    factors = dict.fromkeys(atom for monomial, _ in sections.parts for atom in monomial)
    for atom in factors:
        inner = Term.of(atom)
        outer = quotient(sections, inner)
        if outer is None or outer.constant is not None:
            continue
        if all(digits(each.move.section, inner, each.ranges)[0] is not None for each in found):
            return inner, (outer, inner)
    return None, (sections,)


def chunk_of(reading: Reading, family: int, body: Sequence[Node]) -> Chunk:
    """A chunk of a family of pipelines in one body of its walk.

    Raises ProofStops if a lane cannot be found that is the only one to touch it.
    """
    found = [each for each in moves_of(body) if each.move.family == family]
    for each in found:
        _refuse_turn(each)
    inner, counts = _sections(found, reading, family)
    places: list[tuple[str, Term]] = []
    if reading.families[family].count.constant != 1:
        places.append(("c_pipeline", reading.families[family].count))
    names = ["c_shard", "c_part"] if len(counts) == 2 else ["c"] * len(counts)
    places += zip(names, counts, strict=True)
    solved: dict[int, dict[str, Term]] = {}
    steps: dict[int, Step] = {}
    for each in found:
        known: list[Term] = [each.move.pipeline] if reading.families[family].count.constant != 1 else []
        if len(counts) == 2:
            assert inner is not None
            high, low = digits(each.move.section, inner, each.ranges)
            assert high is not None
            known += [high, low]
        elif counts:
            known.append(each.move.section)
        equations = list(zip(known, (Term.var(name) for name, _ in places), strict=True))
        solved[id(each.move)] = _solve(equations, each)
        hits = both(*(eq(left, right) for left, right in equations))
        src, dst = (_rank(end, each, reading) for end in (each.move.src, each.move.dst))
        steps[id(each.move)] = Step(each.move, src, dst, hits)
    single: list[tuple[int, tuple[Formula, ...], Formula]] = []

    def restrict(nodes: Sequence[Node]) -> tuple[ChunkNode, ...]:
        kept: list[ChunkNode] = []
        for node in nodes:
            match node:
                case Move() if id(node) in steps:
                    kept.append(steps[id(node)])
                case Guard(test, inside):
                    restricted = restrict(inside)
                    kept += [When(test, restricted)] if restricted else []
                case Loop(var, low, high, inside, line):
                    restricted = restrict(inside)
                    if not restricted:
                        continue
                    lanes = [solved[id(each.move)].get(var) for each in moves_of(inside) if each.move.family == family]
                    if all(lane is None for lane in lanes):
                        kept.append(Turns(var, low, high, restricted, line))
                        continue
                    (only,) = lanes[:1]
                    if only is None or any(lane != only for lane in lanes):
                        raise ProofStops(f"line {line}: more than one lane of a step may touch a chunk")
                    kept.append(At(var, only, low, high, restricted, line))
        return tuple(kept)

    nodes = restrict(body)
    for each in found:
        for var, only in solved[id(each.move)].items():
            hits = steps[id(each.move)].hits
            single.append((each.move.line, (*each.facts, hits), eq(Term.var(var), only)))
    return Chunk(reading, family, tuple(places), nodes, tuple(single))


def _refuse_turn(found: _Found) -> None:
    """Raises ProofStops where a transfer depends on the number of the segment, beyond its kind."""
    move = found.move
    terms = [move.src, move.dst, move.section, move.pipeline]
    terms += [end for loop in found.loops for end in (loop.low, loop.high)]
    if any(SEGMENT_TURN in term.names() for term in terms) or any(SEGMENT_TURN in str(test) for test in found.tests):
        raise ProofStops(f"line {move.line}: depends on the number of the segment")


def _rank(end: Term, found: _Found, reading: Reading) -> Rank:
    """A rank in its digits."""
    inner = reading.case.inner
    if inner is None:
        return (end,)
    high, low = digits(end, inner, found.ranges)
    if high is None:
        raise ProofStops(f"line {found.move.line}: rank {end}: not to be read as a server and a GPU")
    return high, low


def _solve(equations: Sequence[tuple[Term, Term]], found: _Found) -> dict[str, Term]:
    """Loop variables that the chunk determines: the innermost one in each coordinate, as a term of the others."""
    solved: dict[str, Term] = {}
    for value, wanted in equations:
        for loop in reversed(found.loops):
            if loop.var in solved or loop.var not in value.names():
                continue
            only = _isolate(value, wanted, loop)
            inside = found.loops[found.loops.index(loop) + 1 :]
            if only is not None and not only.names() & {each.var for each in inside}:
                solved[loop.var] = only
                break
    return solved


def _isolate(value: Term, wanted: Term, loop: Loop) -> Term | None:
    """The `loop.var` for which `value` is `wanted`, where value is plus or minus it, or that modulo a number."""
    atom = value.atom
    inside, by = (atom.value, atom.by) if isinstance(atom, Mod) else (value, None)
    factor = dict(inside.parts).get((Var(loop.var),))
    if factor not in (1, -1):
        return None
    rest = inside - Term.var(loop.var) * factor
    if loop.var in rest.names():
        return None
    only = (wanted - rest) * factor
    if by is None:
        return only
    return mod(only - loop.low, by) + loop.low


# Running a chunk ------------------------------------------------------------------------------------------------------


Snapshot = tuple[dict[str, int], list[int], list[bool]]
"""The turns of loops, what each rank holds as an integer with a bit a rank, and who has the stamp."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A chunk as Python code, to be run with numbers: `code` is made by `_chunk_code`."""

    chunk: Chunk
    collective: str
    code: Any

    @classmethod
    def of(cls, chunk: Chunk, collective: str) -> Runner:
        """The runner of a chunk."""
        names = [name for name, _ in (*chunk.reading.case.sizes, *chunk.places)]
        names += [chunk.reading.case.straggler] if chunk.reading.case.straggler else []
        lines = [f"def run(ranks, stamped, stamp_at, seen, {', '.join(names)}):", "    count = twice = 0"]
        lines += [*_chunk_code(chunk.nodes, (), "    "), "    return count, twice"]
        scope: dict[str, Any] = {}
        exec("\n".join(lines), scope)
        return cls(chunk, collective, scope["run"])

    def run(self, values: Mapping[str, int]) -> dict[str, list[Snapshot]]:
        """What every rank holds before each turn of each loop (by its variable) and after the last."""
        reductions, _ = self._run(values, -1, {})
        seen: dict[str, list[Snapshot]] = {}
        self._run(values, reductions - 1, seen)
        return seen

    def goes_wrong(self, values: Mapping[str, int]) -> bool:
        """Whether, of an allreduce, a reduction adds what is there or a rank misses something with these numbers."""
        return self._run(values, -1, {})[1]

    def _run(self, values: Mapping[str, int], stamp_at: int, seen: dict[str, list[Snapshot]]) -> tuple[int, bool]:
        """How many reductions there were, and whether it went wrong."""
        n_ranks = int(self.chunk.reading.case.ranks.at(values))
        before = [1 << rank for rank in range(n_ranks)]
        if self.collective == "allgather":
            before = [held if rank == values["c_pipeline"] else 0 for rank, held in enumerate(before)]
        count, twice = self.code(before, [False] * n_ranks, stamp_at, seen, **values)
        everyone = (1 << n_ranks) - 1
        missing = any(held != everyone for held in before)
        return int(count), self.collective == "allreduce" and bool(twice or missing)


def _chunk_code(nodes: Sequence[ChunkNode], turns: tuple[str, ...], indent: str) -> list[str]:
    """Python lines that run the nodes, count reductions in `count` and put what is held into `seen`."""
    lines: list[str] = []
    deeper = indent + "    "
    for node in nodes:
        match node:
            case Turns(var, low, high, body):
                now = (*turns, var)
                known = ", ".join(f"{name!r}: {name}" for name in now)
                lines += [
                    f"{indent}for {var} in range({low}, max({low}, {high}) + 1):",
                    f"{deeper}seen.setdefault({var!r}, []).append(({{{known}}}, list(ranks), list(stamped)))",
                    f"{deeper}if {var} == max({low}, {high}): break",
                    *_chunk_code(body, now, deeper),
                ]
            case At(var, only, low, high, body):
                lines += [f"{indent}{var} = {only}", f"{indent}if {low} <= {var} < {high}:"]
                lines += _chunk_code(body, turns, deeper)
            case When(test, body):
                lines += [f"{indent}if {code_of(test)}:", *_chunk_code(body, turns, deeper)]
            case Step(move, _, _, hits):
                lines += [
                    f"{indent}if {code_of(hits)}:",
                    f"{deeper}src, dst = ({move.src}) % len(ranks), ({move.dst}) % len(ranks)",
                ]
                if move.op == REDUCE:
                    lines += [
                        f"{deeper}twice |= ranks[dst] & ranks[src]",
                        f"{deeper}ranks[dst] |= ranks[src]",
                        f"{deeper}stamped[dst] = count == stamp_at",
                        f"{deeper}count += 1",
                    ]
                else:
                    lines += [f"{deeper}ranks[dst], stamped[dst] = ranks[src], stamped[src]"]
    return lines


# Guessing invariants --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Invariant:
    """What holds before each turn of a loop: formulas over ranks r and y, the chunk's places and the loops' variables.

    `has` says that r's value contains y's contribution, `stamp` that it comes from the last reduction.
    """

    has: Formula
    stamp: Formula


def learn(chunk: Chunk, collective: str, sizes: Sequence[Mapping[str, int]]) -> dict[str, Invariant]:
    """An invariant for each loop of the chunk, that fits all runs with these sizes.

    Raises ProofStops if comparisons of places do not tell the cases apart.
    """
    rng, runner = np.random.default_rng(SEED), Runner.of(chunk, collective)
    columns: dict[str, list[npt.NDArray[np.int64]]] = {}
    labels: dict[str, tuple[list[Bools], list[Bools]]] = {}
    for each in sizes:
        for values in _places(chunk, each, rng):
            for var, heads in runner.run(values).items():
                names, table, has, stamp = _table(chunk, values, heads)
                if len(has) > ROWS_MAX:
                    kept = rng.choice(len(has), ROWS_MAX, replace=False)
                    table, has, stamp = table[:, kept], has[kept], stamp[kept]
                columns.setdefault(var + "|" + "|".join(names), []).append(table)
                known = labels.setdefault(var, ([], []))
                known[0].append(has)
                known[1].append(stamp)
    found: dict[str, Invariant] = {}
    for key, tables in columns.items():
        var, *names = key.split("|")
        rows = dict(zip(names, np.concatenate(tables, axis=1), strict=True))
        turns = {loop.var: loop for loop in turns_of(chunk.nodes) if loop.var in rows}
        has, stamp = (np.concatenate(each) for each in labels[var])
        asked = [comparisons(chunk, turns, level) for level in range(LEVELS)]
        found[var] = Invariant(
            _simplest(asked, rows, has, f"what is held before line {turns[var].line}"),
            _simplest([_without(each, "y") for each in asked], rows, stamp, f"the stamp before line {turns[var].line}"),
        )
    return found


def _places(chunk: Chunk, sizes: Mapping[str, int], rng: np.random.Generator) -> list[dict[str, int]]:
    """Chunks of these sizes to run, each with a straggler if there is one: all of them, or some where they are many."""
    names, ranges = [name for name, _ in chunk.places], [range(int(count.at(sizes))) for _, count in chunk.places]
    case = chunk.reading.case
    if case.straggler is not None:
        names, ranges = [*names, case.straggler], [*ranges, range(int(case.servers.at(sizes)))]
    found = [{**sizes, **dict(zip(names, each, strict=True))} for each in product(*ranges)]
    if len(found) <= PLACES_MAX:
        return found
    return [found[int(at)] for at in rng.choice(len(found), PLACES_MAX, replace=False)]


def _simplest(
    asked: Sequence[Sequence[Formula]], rows: Mapping[str, npt.NDArray[np.int64]], wanted: Bools, what: str
) -> Formula:
    """The tree of the lowest level of questions that tells the cases apart."""
    for level, atoms in enumerate(asked):
        try:
            return fit(atoms, rows, wanted, what)
        except ProofStops:
            if level == LEVELS - 1:
                raise
    raise AssertionError("there are levels")


def turns_of(nodes: Sequence[ChunkNode]) -> Iterator[Turns]:
    """The loops that an invariant is needed for."""
    for node in nodes:
        if isinstance(node, Turns):
            yield node
        if not isinstance(node, Step):
            yield from turns_of(node.body)


def _table(
    chunk: Chunk, values: Mapping[str, int], heads: Sequence[Snapshot]
) -> tuple[list[str], npt.NDArray[np.int64], Bools, Bools]:
    """Names of variables, a column for every (turn, r, y), and for each what is held and what is stamped."""
    n = len(heads[0][1])
    n_digits = len(rank_sizes(chunk.reading))
    inner = 1 if n_digits == 1 else int(rank_sizes(chunk.reading)[1].at(values))
    ranks = np.arange(n)
    parts = [ranks] if n_digits == 1 else [ranks // inner, ranks % inner]
    held = np.array([[[mask >> y & 1 for y in range(n)] for mask in masks] for _, masks, _ in heads], dtype=np.bool_)
    stamps = np.array([stamped for _, _, stamped in heads], dtype=np.bool_)
    shape = held.shape
    rows: dict[str, Any] = {name: np.full(shape, value) for name, value in values.items()}
    for name in heads[0][0]:
        rows[name] = np.broadcast_to(np.array([turns[name] for turns, _, _ in heads])[:, None, None], shape)
    for digit, part in enumerate(parts):
        rows[f"r{digit}"] = np.broadcast_to(part[None, :, None], shape)
        rows[f"y{digit}"] = np.broadcast_to(part[None, None, :], shape)
    names = sorted(rows)
    table = np.stack([rows[name].ravel() for name in names]).astype(np.int64)
    return names, table, held.ravel(), np.broadcast_to(stamps[:, :, None], shape).ravel()


def comparisons(chunk: Chunk, turns: Mapping[str, Turns], level: int) -> list[Formula]:
    """What an invariant may ask, simple questions first; the higher the level, the more."""
    shifts = ((0, -1), (0, -1, 1), (0, -1, 1, -2, 2, -3, 3))[level]
    case = chunk.reading.case
    straggler = None if case.straggler is None else Term.var(case.straggler)
    sizes = rank_sizes(chunk.reading)
    asked: list[Formula] = []
    groups: list[tuple[Term, list[Term]]] = []
    for digit, size in enumerate(sizes):
        r, y = Term.var(f"r{digit}"), Term.var(f"y{digit}")
        asked.append(eq(r, y))
        related = False
        if digit == 0 and straggler is not None:
            asked += [eq(r, straggler), eq(y, straggler)]
        for name, count in chunk.places:
            c = Term.var(name)
            if count == size:
                groups.append((size, [mod(r - c, size), mod(y - c, size)]))
                related = True
            elif digit == 0 and straggler is not None and count == size - 1:
                ends = [mod(Term.of(Unskip(end, straggler)) - c, count) for end in (r, y)]
                groups.append((count, ends))
                related = True
        if not related or any(loop.high == size and loop.low.constant == 0 for loop in turns.values()):
            groups.append((size, [r, y]))
    for size, (r, y) in groups:
        asked += [eq(r, y), le(r, y)]
        loops = [Term.var(var) for var, loop in turns.items() if loop.high.names() & size.names()]
        for end in (r, y):
            for near in range((1, 2, 4)[level]):
                asked += [eq(end, near), eq(end, size - 1 - near), le(end, near), le(size - 1 - near, end)]
        if level == LEVELS - 1:
            asked += [le(size, few) for few in (2, 3, 4)]
        for turn, end in product(loops, (r, y)):
            for shift in shifts:
                asked += [le(end, turn + shift), eq(end, turn + shift)]
                asked += [le(end + turn, size + shift), eq(end + turn, size + shift)]
                if level == LEVELS - 1:
                    asked += [le(end + turn, shift), eq(end + turn, shift)]
                    asked += [le(end + size, turn + shift), le(turn + size, end + shift)]
        for turn in loops:
            for near in range((1, 2, 4)[level]):
                asked += [le(turn, near), le(size - 1 - near, turn)]
    return [each for each in dict.fromkeys(asked) if each not in (TRUE, FALSE)]


def _without(atoms: Sequence[Formula], letter: str) -> list[Formula]:
    """The questions that no variable of this letter occurs in."""
    kept: list[Formula] = []
    for atom in atoms:
        assert isinstance(atom, Le | Eq)
        if not any(name.startswith(letter) and name[1:].isdigit() for name in atom.term.names()):
            kept.append(atom)
    return kept


def fit(atoms: Sequence[Formula], rows: Mapping[str, npt.NDArray[np.int64]], wanted: Bools, what: str) -> Formula:
    """A decision tree over `atoms` that is `wanted` in every row.

    Raises ProofStops if two rows that answer all questions alike are wanted apart.
    """
    if not atoms or wanted.all() or not wanted.any():
        if wanted.all() or not wanted.any():
            return TRUE if len(wanted) and wanted.all() else FALSE
        raise ProofStops(f"{what}: no question tells the cases apart")
    answers = np.stack([np.broadcast_to(holds(atom, rows), wanted.shape) for atom in atoms])
    weights = np.random.default_rng(SEED).integers(1, 2**63, len(answers) + 1, dtype=np.uint64)
    keys = np.zeros(len(wanted), dtype=np.uint64)
    for weight, answer in zip(weights, (*answers, wanted), strict=True):  # equal answers have equal sums
        keys += weight * answer
    _, first = np.unique(keys, return_index=True)
    return _tree(atoms, answers[:, first], wanted[first], what)


def _tree(atoms: Sequence[Formula], answers: Bools, wanted: Bools, what: str) -> Formula:
    if wanted.all() or not wanted.any():
        return TRUE if wanted.all() else FALSE
    n, n_true = len(wanted), int(wanted.sum())
    yes = answers.sum(axis=1)
    yes_true = (answers & wanted).sum(axis=1)
    disorder = _disorder(yes_true, yes) + _disorder(n_true - yes_true, n - yes)
    disorder[(yes == 0) | (yes == n)] = np.inf
    best = int(np.argmin(disorder.round(6)))
    if not np.isfinite(disorder[best]):
        raise ProofStops(f"{what}: no comparison of places tells the cases apart")
    side = answers[best]
    return choose(
        atoms[best],
        _tree(atoms, answers[:, side], wanted[side], what),
        _tree(atoms, answers[:, ~side], wanted[~side], what),
    )


def _disorder(n_true: npt.NDArray[np.int64], n: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Bits that are needed to tell apart what one answer leaves together."""
    share = n_true / np.maximum(n, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    return np.asarray(n * np.nan_to_num(bits))


# Proving them ---------------------------------------------------------------------------------------------------------


def encode(query: Query, formula: Formula) -> Any:
    """A formula over whole numbers for Z3. A `mod` becomes a case for each number of turns from -2 to 2; beyond them,
    a number of which only its range is known."""
    z3_terms: dict[Atom, Any] = {}

    def atom_of(atom: Atom) -> Any:
        if atom in z3_terms:
            return z3_terms[atom]
        match atom:
            case Var(name):
                made = query.integer(name)
            case Mod(value, by):
                a, n = term_of(value), term_of(by)
                made = query.integer("beyond", str(atom))
                query.require("mod", query.implies(n > 0, query.all_of((made >= 0, made < n))))
                for turns in (-2, 2, -1, 1, 0):
                    made = query.either(query.all_of((turns * n <= a, a < (turns + 1) * n)), a - turns * n, made)
            case Skip(value, gap):
                a = term_of(value)
                made = query.either(a >= term_of(gap), a + 1, a)
            case Unskip(value, gap):
                a = term_of(value)
                made = query.either(a > term_of(gap), a - 1, a)
        z3_terms[atom] = made
        return made

    def term_of(term: Term) -> Any:
        total = query.whole(0)
        for monomial, factor in term.parts:
            made = query.whole(factor)
            for atom in monomial:
                made = made * atom_of(atom)
            total = total + made
        return total

    def truth_of(formula: Formula) -> Any:
        match formula:
            case Le(term):
                return term_of(term) <= 0
            case Eq(term):
                return term_of(term) == 0
            case All(parts):
                return query.all_of(map(truth_of, parts))
            case AnyOf(parts):
                return query.any_of(map(truth_of, parts))
            case Not(part):
                return query.no(truth_of(part))
            case Choice(test, then, otherwise):
                return query.either(truth_of(test), truth_of(then), truth_of(otherwise))

    return truth_of(formula)


def ask(name: str, statement: str, facts: Sequence[Formula], goal: Formula, seconds_max: float = LEMMA_S_MAX) -> Lemma:
    """The lemma that `goal` follows from `facts`, for all values of the variables."""
    started = time.perf_counter()
    query = Query(f"not: {statement}", statement)
    query.require("facts", *(encode(query, fact) for fact in facts))
    query.require("goal fails", query.no(encode(query, goal)))
    answer = query.ask(Limit(seconds_max))
    return Lemma(name, statement, answer, time.perf_counter() - started)


def iff(one: Formula, other: Formula) -> Formula:
    """Both hold or neither does."""
    return choose(one, other, no(other))


@dataclass(frozen=True, slots=True)
class State:
    """What is held at one place of the program: `has(r, y)`, and `stamp(r)`."""

    has: Callable[[Rank, Rank], Formula]
    stamp: Callable[[Rank], Formula]


@dataclass(eq=False)
class Proof:
    """The lemmas of one chunk. `label` goes before their names; stops at the first that is not proved."""

    chunk: Chunk
    collective: str
    invariants: Mapping[str, Invariant]
    label: str
    lemmas: list[Lemma] = field(default_factory=list)

    def run(self) -> None:
        """Proves the chunk right from start to end.

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
        """The rank whose slice the chunk is a part of, where the collective has slices."""
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
            raise ProofStops(f"lemma {lemma.name!r} ({statement}): {_why(lemma)}")

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
    """The last reduction in the text, and the loops in whose last turns it is the last one of all."""
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


def _why(lemma: Lemma) -> str:
    if isinstance(lemma.answer, Sat):
        shown = ", ".join(f"{' '.join(map(str, key))} = {value}" for key, value in lemma.answer.values.items())
        return f"fails for {shown}"
    return str(lemma.answer)


def prove_moves(reading: Reading, label: str = "") -> list[Lemma]:
    """That every transfer names ranks and a section that exist, and two different ranks; one lemma for each line,
    its name behind `label`.

    Raises ProofStops at the first that Z3 does not claim.
    """
    lemmas: list[Lemma] = []

    def prove(name: str, statement: str, facts: Sequence[Formula], goal: Formula) -> None:
        lemmas.append(ask(label + name, statement, [*reading.case.facts(), *facts], goal))
        if not lemmas[-1].proved:
            raise ProofStops(f"lemma {name!r} ({statement}): {_why(lemmas[-1])}")

    for walk in reading.walks:
        for residue, body in enumerate(walk.bodies):
            kind = f" {residue + 1}" if len(walk.bodies) > 1 else ""
            for requirement, known in requirements_of(body):
                name = f"line {requirement.line}{kind}, entry"
                prove(name, f"line {requirement.line}: the list has this entry", known, requirement.test)
            for found in moves_of(body):
                move = found.move
                src, dst = (_rank(end, found, reading) for end in (move.src, move.dst))
                family = reading.families[move.family]
                inner, counts = _sections([found], reading, move.family)
                sections: list[Term] = [move.section]
                if len(counts) == 2:
                    assert inner is not None
                    high, low = digits(move.section, inner, found.ranges)
                    assert high is not None
                    sections = [high, low]
                within = [
                    both(le(0, each), lt(each, n)) for each, n in zip(sections, counts or (Term.of(1),), strict=True)
                ]
                within.append(both(le(0, move.pipeline), lt(move.pipeline, family.count)))
                goal = both(is_rank(src, reading), is_rank(dst, reading), no(same(src, dst)), *within)
                statement = f"line {move.line} names two different ranks, and a section, that exist"
                prove(f"line {move.line}{kind}, exists", statement, found.facts, goal)
    return lemmas


def prove_chunk(chunk: Chunk, collective: str, label: str, stop_at: float) -> tuple[list[Lemma], dict[str, Invariant]]:
    """The lemmas that prove a chunk right, and the invariants that they found; `stop_at` is a time.monotonic().

    Where Z3 finds numbers for which a guess is no invariant, the chunk is run with numbers as large and guessed anew.

    Raises ProofStops if that does not end in a proof.
    """
    names = [name for name, _ in chunk.reading.case.sizes]
    lowest = dict(chunk.reading.case.sizes)
    first = SIZES_FIRST[len(names)]
    tried = [{name: lowest[name] + more for name, more in zip(names, each, strict=True)} for each in first]
    runner = Runner.of(chunk, collective)
    while True:
        for values in (each for sizes in tried for each in _places(chunk, sizes, np.random.default_rng(SEED))):
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


def prove_tree() -> list[Lemma]:
    """Reduction and broadcast along any tree are right: induction over its order, in which parents come first.

    Ranks are named by their places in the order, the root 0; `up` is the place of the parent of the one at place j, and
    `holder` is where the contribution of some rank y is carried on. Before the reduction comes to place j, from the
    last one down, the ranks at places up to j hold exactly what is carried on there. Before the broadcast comes to
    place j, from 1 up, all before it hold the root's value.

    Raises ProofStops if Z3 does not claim a lemma.
    """
    p, j, up, holder, x = (Term.var(name) for name in ("p", "j", "up", "holder", "x"))
    facts = [le(2, p), le(1, j), lt(j, p), le(0, up), lt(up, j)]
    carried = [le(0, holder), le(holder, j)]
    there, here = eq(holder, up), eq(holder, j)  # y's contribution is in the parent's value, in the child's
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
            raise ProofStops(f"lemma {lemma.name!r} ({lemma.statement}): {_why(lemma)}")
    return lemmas


def check_along(reading: Reading, collective: str) -> str:
    """Words for what each segment does, if it is a reduction and a broadcast along trees that do the collective.

    Raises ProofStops if it is something else.
    """
    root = Term.var("root")
    for walk in reading.walks:
        for body, family in product(walk.bodies, walk.families):
            shape = reading.families[family]
            if shape.sections.constant != 1 or shape.count.constant != 1:
                raise ProofStops(f"line {shape.line}: trees over more than one section")
            if not all(isinstance(node, Along) for node in body):
                raise ProofStops(f"line {shape.line}: trees and single transfers in one segment")
            nodes = [node for node in body if isinstance(node, Along) and node.family == family]
            if any(node.section.constant != 0 for node in nodes):
                raise ProofStops(f"line {shape.line}: a section that is not the only one")
            done = (collective, *(node.op for node in nodes))
            roots = {node.root for node in nodes}
            if done == ("allreduce", REDUCE, COPY):
                if len(roots) != 1:
                    raise ProofStops(f"line {nodes[1].line}: the trees may have different roots")
            elif done not in (("reduce", REDUCE), ("broadcast", COPY)) or roots != {root}:
                raise ProofStops(f"line {shape.line}: no {collective} along trees from the collective's root")
    return (
        "each segment is reduced along a tree"
        if collective != "broadcast"
        else "each segment is broadcast along a tree"
    )
