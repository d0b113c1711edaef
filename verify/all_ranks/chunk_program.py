"""The slice of a symbolic program that accesses one chunk: its transfers, in the author's order.

Chunks are independent: a transfer reads and writes one section of one segment. So one symbolic chunk stands for all. A
loop over lanes is replaced by the only lane that accesses the chunk, found by solving the section for the lane; that it
is the only one is a lemma (`At`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from optcc.verify.all_ranks.symbolic import SEGMENT_TURN, Family, Guard, Loop, Move, Node, Reading, Require
from optcc.verify.all_ranks.symbolic_terms import Formula, Mod, Term, Var, Xor, both, eq, le, lt, mod, quotient, xor
from optcc.verify.all_ranks.symbolic_values import digits

Rank = tuple[Term, ...]


class ProofStops(Exception):
    """No proof was found; the schedule may be right or wrong."""


@dataclass(frozen=True, slots=True)
class At:
    """`body` for the only value of a loop's variable at which it accesses the chunk: `var` = `only`, if that is within
    low, ..., high - 1."""

    var: str
    only: Term
    low: Term
    high: Term
    body: tuple[ChunkNode, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Turns:
    """A loop of which any iteration may access the chunk."""

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
    """A transfer of this chunk, if `hits`."""

    move: Move
    src: Rank
    dst: Rank
    hits: Formula


ChunkNode = At | Turns | When | Step


@dataclass(frozen=True, slots=True)
class ChunkProgram:
    """A chunk of a family of pipelines, and its transfers in the author's order.

    `places` are its coordinates and their ranges: the pipeline, and the section (in two digits where the number of
    sections is a product). `single` holds the proof obligations of each `At`.
    """

    reading: Reading
    family: int
    places: tuple[tuple[str, Term], ...]
    nodes: tuple[ChunkNode, ...]
    single: tuple[tuple[int, tuple[Formula, ...], Formula], ...]

    @property
    def facts(self) -> list[Formula]:
        """The assumptions about sizes and chunk."""
        found = self.reading.case.facts()
        for name, count in self.places:
            found += [le(0, Term.var(name)), lt(Term.var(name), count)]
        return found


def rank_sizes(reading: Reading) -> tuple[Term, ...]:
    """The ranges of a rank's digits: one number, or server and GPU."""
    case = reading.case
    return (case.ranks,) if case.inner is None else (case.servers, case.inner)


def rank_of(name: str, reading: Reading) -> Rank:
    """A symbolic rank, in variables `name`0 and `name`1."""
    return tuple(Term.var(f"{name}{digit}") for digit in range(len(rank_sizes(reading))))


def is_rank(rank: Rank, reading: Reading) -> Formula:
    """The rank is in range."""
    return both(*(both(le(0, each), lt(each, count)) for each, count in zip(rank, rank_sizes(reading), strict=True)))


def same(one: Rank, other: Rank) -> Formula:
    """The two ranks are equal."""
    return both(*(eq(left, right) for left, right in zip(one, other, strict=True)))


@dataclass(frozen=True, slots=True)
class FoundMove:
    """A transfer with its enclosing loops and conditions, outermost first."""

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


def moves_of(
    nodes: Sequence[Node], loops: tuple[Loop, ...] = (), tests: tuple[Formula, ...] = ()
) -> Iterator[FoundMove]:
    """Every transfer with its enclosing loops and conditions."""
    for node in nodes:
        match node:
            case Loop():
                yield from moves_of(node.body, (*loops, node), tests)
            case Guard(test, body):
                yield from moves_of(body, loops, (*tests, test))
            case Move():
                yield FoundMove(node, loops, tests)


def requirements_of(
    nodes: Sequence[Node], facts: tuple[Formula, ...] = ()
) -> Iterator[tuple[Require, tuple[Formula, ...]]]:
    """Every requirement, with the assumptions at its place."""
    for node in nodes:
        match node:
            case Loop(var, low, high, body):
                yield from requirements_of(body, (*facts, le(low, Term.var(var)), lt(Term.var(var), high)))
            case Guard(test, body):
                yield from requirements_of(body, (*facts, test))
            case Require():
                yield node, facts


def sections_of(found: Sequence[FoundMove], reading: Reading, family: int) -> tuple[Term | None, tuple[Term, ...]]:
    """The factor that splits section numbers into two digits (None for one digit), and the range of each digit."""
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


def chunk_of(reading: Reading, family: int, body: Sequence[Node]) -> ChunkProgram:
    """The program of one chunk of a family of pipelines, for one body of its walk.

    Raises ProofStops if the only lane that accesses it cannot be solved for.
    """
    found = [each for each in moves_of(body) if each.move.family == family]
    for each in found:
        _refuse_turn(each)
    inner, counts = sections_of(found, reading, family)
    places = _places(reading.families[family], counts)
    solved: dict[int, dict[str, Term]] = {}
    steps: dict[int, Step] = {}
    for each in found:
        known = list(pipeline_digits(each, reading))
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
        src, dst = (rank_digits(end, each, reading) for end in (each.move.src, each.move.dst))
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
    return ChunkProgram(reading, family, places, nodes, tuple(single))


def pipeline_digits(found: FoundMove, reading: Reading) -> tuple[Term, ...]:
    """The number of a transfer's pipeline, in one digit or two; none where there is one pipeline."""
    family, number = reading.families[found.move.family], found.move.pipeline
    if family.count.constant == 1:
        return ()
    if family.inner is None:
        return (number,)
    high, low = digits(number, family.inner, found.ranges)
    if high is None:
        raise ProofStops(f"line {found.move.line}: cell {number}: not to be read as two ranks")
    return high, low


def pipeline_counts(family: Family) -> tuple[Term, ...]:
    """How many values each digit of a pipeline's number has."""
    if family.count.constant == 1:
        return ()
    outer = None if family.inner is None else quotient(family.count, family.inner)
    return (family.count,) if outer is None or family.inner is None else (outer, family.inner)


def _places(family: Family, counts: Sequence[Term]) -> tuple[tuple[str, Term], ...]:
    """The numbers that say which chunk it is, and how many values each has: its pipeline, its section in one or two."""
    names = ["c_shard", "c_part"] if len(counts) == 2 else ["c"] * len(counts)
    pipelines = pipeline_counts(family)
    pipeline_names = ["c_src", "c_dst"] if len(pipelines) == 2 else ["c_pipeline"] * len(pipelines)
    return (*zip(pipeline_names, pipelines, strict=True), *zip(names, counts, strict=True))


def _refuse_turn(found: FoundMove) -> None:
    """Raises ProofStops if a transfer depends on the number of the segment other than by its residue."""
    move = found.move
    terms = [move.src, move.dst, move.section, move.pipeline]
    terms += [end for loop in found.loops for end in (loop.low, loop.high)]
    if any(SEGMENT_TURN in term.names() for term in terms) or any(SEGMENT_TURN in str(test) for test in found.tests):
        raise ProofStops(f"line {move.line}: depends on the number of the segment")


def rank_digits(end: Term, found: FoundMove, reading: Reading) -> Rank:
    """A rank in its digits."""
    inner = reading.case.inner
    if inner is None:
        return (end,)
    high, low = digits(end, inner, found.ranges)
    if high is None:
        raise ProofStops(f"line {found.move.line}: rank {end}: not to be read as a server and a GPU")
    return high, low


def _solve(equations: Sequence[tuple[Term, Term]], found: FoundMove) -> dict[str, Term]:
    """The loop variables that the chunk determines: the innermost of each coordinate, as a term in the others."""
    solved: dict[str, Term] = {}
    for value, wanted in equations:
        for loop in reversed(found.loops):
            if loop.var in solved or loop.var not in value.names():
                continue
            only = isolate(value, wanted, loop)
            inside = found.loops[found.loops.index(loop) + 1 :]
            if only is not None and not only.names() & {each.var for each in inside}:
                solved[loop.var] = only
                break
    return solved


def isolate(value: Term, wanted: Term, loop: Loop) -> Term | None:
    """Solves `value` = `wanted` for `loop.var`, where value is linear in it with factor 1 or -1, perhaps modulo, or an
    exclusive or with such a term. None if it cannot; what it finds has to be proved."""
    atom = value.atom
    if isinstance(atom, Xor):
        parts = [part for part in atom.parts if loop.var in part.names()]
        others = [part for part in atom.parts if part not in parts]
        return isolate(parts[0], xor(wanted, *others), loop) if len(parts) == 1 else None
    if isinstance(atom, Mod):
        atom = Mod(_flat(atom.value, atom.by), atom.by)
    inside, by = (atom.value, atom.by) if isinstance(atom, Mod) else (value, None)
    factor = dict(inside.parts).get((Var(loop.var),))
    if factor is None and by is None:
        return _isolate_inside(value, wanted, loop)
    if factor not in (1, -1):
        return None
    rest = inside - Term.var(loop.var) * factor
    if loop.var in rest.names():
        return None
    only = (wanted - rest) * factor
    if by is None:
        return only
    return mod(only - loop.low, by) + loop.low


def _isolate_inside(value: Term, wanted: Term, loop: Loop) -> Term | None:
    """`isolate` where the variable is in one remainder or exclusive or, and more is added to that."""
    parts = [part for part in value.parts if loop.var in Term((part,)).names()]
    if len(parts) != 1 or len(parts[0][0]) != 1 or parts[0][1] not in (1, -1) or len(value.parts) == 1:
        return None
    ((atom,), factor) = parts[0]
    return isolate(Term.of(atom), (wanted - value + Term.of(atom) * factor) * factor, loop)


def _flat(value: Term, by: Term) -> Term:
    """A term that is equal modulo `by`, without remainders by it inside."""
    flat = Term(())
    for monomial, factor in value.parts:
        one = Term(((monomial, factor),))
        atom = Term(((monomial, 1),)).atom
        is_rest = isinstance(atom, Mod) and atom.by == by
        flat = flat + (_flat(atom.value, by) * factor if is_rest and isinstance(atom, Mod) else one)
    return flat


def turns_of(nodes: Sequence[ChunkNode]) -> Iterator[Turns]:
    """The loops that need an invariant."""
    for node in nodes:
        if isinstance(node, Turns):
            yield node
        if not isinstance(node, Step):
            yield from turns_of(node.body)
