"""Guesses the invariants of `optcc.verify.all_ranks.rounds` from runs with few ranks.

Soundness does not depend on this file: what it guesses is proved, or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from optcc.schedule import COPY, DATA, REDUCE
from optcc.verify.all_ranks.chunk_program import At, ChunkNode, ChunkProgram, ProofStops, Step, Turns, When
from optcc.verify.all_ranks.induction import InductionLemma
from optcc.verify.all_ranks.invariants import SEED, Bools, fit, places_to_run
from optcc.verify.all_ranks.rounds import NoStep, RoundInvariant, RoundProof, loops_of
from optcc.verify.all_ranks.symbolic import SPREAD, code_of
from optcc.verify.all_ranks.symbolic_terms import (
    FALSE,
    TRUE,
    Eq,
    Formula,
    Le,
    Pow,
    Term,
    Xor,
    eq,
    holds,
    le,
    lt,
    mod,
    put,
    xor,
)

RANKS_FIRST, RANKS_LATER, RANKS_MAX = 9, (11, 13, 16, 17, 19, 21, 24, 32), 32
"""Numbers of ranks in the runs."""
ROWS_MAX = 4000
"""Limit on the rows that one run adds to the sample of a loop."""
Event = tuple[int, int, int, int, int]
"""Operation, slot and rank that are read, slot and rank that are written."""
Head = tuple[str, dict[str, int], int]
"""Before a turn of a loop: its variable, the values of the loops' variables, and how many events were before."""
Rows = dict[str, npt.NDArray[np.int64]]


@dataclass(eq=False)
class _Sample:
    """Rows with a label each, of the same variables."""

    rows: list[Rows] = field(default_factory=list)
    labels: list[Bools] = field(default_factory=list)

    def add(self, rows: Rows, labels: Bools, rng: np.random.Generator) -> None:
        if len(labels) > ROWS_MAX:
            kept = rng.choice(len(labels), ROWS_MAX, replace=False)
            rows, labels = {name: values[kept] for name, values in rows.items()}, labels[kept]
        self.rows.append(rows)
        self.labels.append(labels)

    def fitted(self, atoms: Sequence[Formula], what: str) -> Formula:
        if not self.labels or not sum(map(len, self.labels)):
            return FALSE
        rows = {name: np.concatenate([each[name] for each in self.rows]) for name in self.rows[0]}
        kept = [atom for atom in atoms if _can_be_asked(atom, rows)]
        return fit(kept, rows, np.concatenate(self.labels), what)


def prove_rounds(chunk: ChunkProgram, collective: str, label: str) -> list[InductionLemma]:
    """The lemmas that prove a chunk right.

    Raises ProofStops if no proof is found.
    """
    names = [name for name, _ in chunk.reading.case.sizes]
    lowest = dict(chunk.reading.case.sizes)
    if len(names) != 1:
        raise ProofStops("rounds over several servers")
    sequential: frozenset[str] = frozenset()
    sizes = _sizes(chunk, names[0], lowest[names[0]])
    while True:
        invariants = guess(chunk, collective, sizes, sequential)
        proof = RoundProof(chunk, collective, invariants, label, sequential)
        try:
            proof.run()
        except NoStep as no_step:
            sequential |= {no_step.var}
        else:
            return proof.lemmas


def _sizes(chunk: ChunkProgram, name: str, lowest: int) -> list[dict[str, int]]:
    """The sizes of the runs: those up to `RANKS_FIRST` ranks, and some behind powers of two."""
    found = []
    case = chunk.reading.case
    for value in range(lowest, lowest + RANKS_MAX):
        n_ranks = int(case.ranks.at({name: value}))
        if case.members is not None and n_ranks <= RANKS_FIRST + 3:
            found += [{name: value, case.members: members} for members in range(1, n_ranks + 1)]
        elif n_ranks <= RANKS_FIRST or (n_ranks <= RANKS_MAX and n_ranks in RANKS_LATER and case.members is None):
            found.append({name: value})
    return found


def guess(
    chunk: ChunkProgram,
    collective: str,
    sizes: Sequence[Mapping[str, int]],
    sequential: frozenset[str] = frozenset(),
) -> dict[str, RoundInvariant]:
    """An invariant for each loop of the chunk that is no step, or in `sequential`, by runs of these sizes.

    Raises ProofStops if no combination of atoms separates the samples.
    """
    loops = {loop.var: loop for loop, _ in loops_of(chunk.nodes, {}, sequential)}
    code = _compiled(chunk, loops)
    rng = np.random.default_rng(SEED)
    samples: dict[tuple[str, str, int, int], _Sample] = {}
    for each in sizes:
        for values in places_to_run(chunk, chunk.reading.case.with_bits(each), rng):
            n_ranks = int(chunk.reading.case.ranks.at(values))
            for found in _states(code, values, n_ranks, collective):
                for key, rows, labels in _labelled(found, values):
                    samples.setdefault((found.var, *key), _Sample()).add(rows, labels, rng)
    invariants = {}
    for var, loop in loops.items():
        atoms = _atoms(chunk, loop, loops)
        of_rank = [atom for atom in atoms if not {"y0"} & _term(atom).names()]
        of_two = [put(atom, {"y0": Term.var("t0")}) for atom in atoms]
        live, has, alike = {}, {}, {}
        for (found_var, kind, one, other), sample in samples.items():
            if found_var != var:
                continue
            what = f"{kind} before line {loop.line}"
            if kind == "live":
                live[one] = sample.fitted(of_rank, what)
            elif kind == "has":
                has[one] = sample.fitted(atoms, what)
            elif one == other == DATA:
                alike[one, other] = sample.fitted(of_two, what)
        live = {slot: where for slot, where in live.items() if where != FALSE}
        invariants[var] = RoundInvariant(live, has, alike)
    return invariants


# Runs -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    """The state before one turn of the loop `var`: by slot and rank what is live, which contributions are there as a
    bit mask, and the number of the tree."""

    var: str
    turns: Mapping[str, int]
    n_ranks: int
    live: Mapping[tuple[int, int], bool]
    held: Mapping[tuple[int, int], int]
    tree: Mapping[tuple[int, int], int]


def _compiled(chunk: ChunkProgram, loops: Mapping[str, Turns]) -> Any:
    case = chunk.reading.case
    names = [*case.variables, *(name for name, _ in (*case.bits, *chunk.places))]
    lines = [
        f"def run(events, heads, n_ranks, {', '.join(names)}):",
        *_code(chunk.nodes, (), loops, "    "),
        "    return",
    ]
    scope: dict[str, Any] = {}
    exec("\n".join(lines), scope)
    return scope["run"]


def _code(nodes: Sequence[ChunkNode], turns: tuple[str, ...], loops: Mapping[str, Turns], indent: str) -> list[str]:
    lines: list[str] = []
    deeper = indent + "    "
    for node in nodes:
        match node:
            case Turns(var, low, high, body):
                now = (*turns, var)
                lines.append(f"{indent}for {var} in range({low}, max({low}, {high}) + 1):")
                if var in loops:
                    known = ", ".join(f"{name!r}: {name}" for name in now)
                    lines.append(f"{deeper}heads.append(({var!r}, {{{known}}}, len(events)))")
                lines += [f"{deeper}if {var} == max({low}, {high}): break", *_code(body, now, loops, deeper)]
            case At(var, only, low, high, body):
                lines += [f"{indent}{var} = {only}", f"{indent}if {low} <= {var} < {high}:"]
                lines += _code(body, turns, loops, deeper)
            case When(test, body):
                lines += [f"{indent}if {code_of(test)}:", *_code(body, turns, loops, deeper)]
            case Step(move, _, _, hits):
                event = f"({move.op}, {move.src_slot}, {move.src}, {move.dst_slot}, {move.dst})"
                if move.op == SPREAD:
                    lines += [f"{indent}if {code_of(hits)}:", f"{deeper}for other in range(n_ranks):"]
                    lines += [f"{deeper}    if other not in ({move.src}, {move.dst}):"]
                    lines += [f"{deeper}        events.append(({COPY}, {DATA}, {move.src}, {DATA}, other))"]
                    continue
                lines += [f"{indent}if {code_of(hits)}:", f"{deeper}events.append({event})"]
    return lines


def _states(code: Any, values: Mapping[str, int], n_ranks: int, collective: str) -> Iterator[_Found]:
    owner_name = {"scatter": "root", "alltoall": "c_src", "alltoallv": "c_src"}.get(collective, "c_pipeline")
    events: list[Event] = []
    heads: list[Head] = []
    code(events, heads, n_ranks, **values)
    live = _lives(events, n_ranks)
    held = {(DATA, rank): 1 << rank for rank in range(n_ranks)}
    if collective != "allreduce":
        owner = values[owner_name]
        held = {(DATA, owner): 1 << owner}
    tree = {place: number for number, place in enumerate(held)}
    numbers: dict[tuple[int, ...], int] = {}
    at = 0
    for number in range(len(events) + 1):
        while at < len(heads) and heads[at][2] == number:
            var, turns, _ = heads[at]
            yield _Found(var, turns, n_ranks, live[number], dict(held), dict(tree))
            at += 1
        if number < len(events):
            op, src_slot, src, dst_slot, dst = events[number]
            read, written = (src_slot, src), (dst_slot, dst)
            if op == REDUCE:
                held[written] = held.get(written, 0) | held.get(read, 0)
                key = tuple(sorted((tree.get(written, -1), tree.get(read, -1))))
                tree[written] = numbers.setdefault(key, 10**6 + len(numbers))
            else:
                held[written], tree[written] = held.get(read, 0), tree.get(read, -1)


def _lives(events: Sequence[Event], n_ranks: int) -> list[dict[tuple[int, int], bool]]:
    """Before each event and after the last, the places whose value is read before it is overwritten, or at the end."""
    live = {(DATA, rank): True for rank in range(n_ranks)}
    found = [dict(live)]
    for op, src_slot, src, dst_slot, dst in reversed(events):
        used = live.get((dst_slot, dst), False)
        if op != REDUCE:
            live[dst_slot, dst] = False
        if used:
            live[src_slot, src] = True
        found.append(dict(live))
    return found[::-1]


def _labelled(found: _Found, values: Mapping[str, int]) -> Iterator[tuple[tuple[str, int, int], Rows, Bools]]:
    """Rows of a state: what is live by rank, what is there by rank and contribution, what is alike by two ranks."""
    n = found.n_ranks
    ranks = np.arange(n)
    for slot in sorted({slot for slot, _ in found.live}):
        live = np.array([found.live.get((slot, rank), False) for rank in range(n)])
        yield ("live", slot, slot), _rows(found, values, r0=ranks), live
        here = ranks[live]
        if not len(here):
            continue
        pairs = _rows(found, values, r0=np.repeat(here, n), y0=np.tile(ranks, len(here)))
        has = np.array([found.held.get((slot, int(rank)), 0) >> y & 1 == 1 for rank in here for y in range(n)])
        yield ("has", slot, slot), pairs, has
        pairs = _rows(found, values, r0=np.repeat(here, len(here)), t0=np.tile(here, len(here)))
        trees = np.array([found.tree.get((slot, int(rank)), -1) for rank in here])
        yield ("alike", slot, slot), pairs, (trees[:, None] == trees[None, :]).ravel()


def _rows(found: _Found, values: Mapping[str, int], **ranks: npt.NDArray[Any]) -> Rows:
    rows = {name: each.astype(np.int64) for name, each in ranks.items()}
    count = len(next(iter(rows.values())))
    return rows | {name: np.full(count, value) for name, value in {**values, **found.turns}.items()}


# Atoms ----------------------------------------------------------------------------------------------------------------


def _term(atom: Formula) -> Term:
    assert isinstance(atom, Le | Eq)
    return atom.term


def _can_be_asked(atom: Formula, rows: Rows) -> bool:
    try:
        holds(atom, rows)
    except (ValueError, ZeroDivisionError, KeyError):  # two to a negative power; a variable of another loop
        return False
    return True


def _atoms(chunk: ChunkProgram, loop: Turns, loops: Mapping[str, Turns]) -> list[Formula]:
    """What an invariant of the loop may ask of a rank r0 and a contribution y0."""
    powers = [*dict.fromkeys(_powers(loop.body, loops))]
    steady = [*dict.fromkeys(_steady(chunk))]
    folds = [Term(()), *steady]
    atoms = _atoms_of_turns(chunk, [Term.var(loop.var)])
    for end in ("r0", "y0"):
        atoms += [lt(Term.var(end), each) for each in steady]
    if _round_of(chunk) is not None:
        return [each for each in dict.fromkeys(atoms) if each not in (TRUE, FALSE)]
    for back in folds:
        for forth in folds:
            for r, y in zip(_places(chunk, "r0", back), _places(chunk, "y0", forth), strict=True):
                atoms += [eq(r, y), eq(r, 0), eq(y, 0)]
                for each in powers:
                    atoms += [lt(r, each), lt(y, each)]
                    atoms += [
                        eq(mod(r, each), mod(y, each)),
                        eq(r, mod(y, each)),
                        eq(r - mod(r, each), y - mod(y, each)),
                    ]
    return [each for each in dict.fromkeys(atoms) if each not in (TRUE, FALSE)]


def _round_of(chunk: ChunkProgram) -> Term | None:
    """How many ranks a ring within the ranks has: a group's members, or all but one; None without such a ring."""
    case = chunk.reading.case
    if case.members is not None:
        return Term.var(case.members)
    return next((count for _, count in chunk.places if count == case.ranks - 1), None)


def _atoms_of_turns(chunk: ChunkProgram, turns: Sequence[Term]) -> list[Formula]:
    """What is asked of groups: whether a rank is a member, where it is as seen from the chunk, and how that compares
    with the turn. Another rank is where its remainder by the members is."""
    members = _round_of(chunk)
    if members is None:
        return []
    atoms = [eq(Term.var("r0"), Term.var("y0"))]
    seen: dict[str, list[Term]] = {}
    for end in ("r0", "y0"):
        rank = Term.var(end)
        atoms += [lt(rank, members), *(compare(rank, turn) for turn in turns for compare in (lt, eq))]
        counted = [Term.var(name) for name, count in chunk.places if count == members]
        places = [mod(rank - place - shift, members) for place in counted for shift in (0, 1)]
        seen[end] = [*places, mod(rank - members, members)]
        for place in seen[end]:
            atoms += [eq(place, members - 1), eq(place, 0)]
            atoms += [compare(place, turn + more) for turn in turns for more in (0, -1) for compare in (lt, eq)]
    for r in seen["r0"]:
        for y in seen["y0"]:
            atoms += [eq(r, y), le(r, y)]
    return atoms


def _places(chunk: ChunkProgram, end: str, back: Term) -> list[Term]:
    """A rank, and where it is as seen from the chunk; `back` is subtracted before."""
    rank = Term.var(end) - back
    found = [rank]
    for name, count in chunk.places:
        place = Term.var(name)
        found += [xor(rank, place)] if _has_xor(chunk) else []
        if count == chunk.reading.case.ranks:
            found += [mod(rank - place, count), mod(place - rank, count)]
    return found


def _powers(nodes: Sequence[ChunkNode], loops: Mapping[str, Turns]) -> Iterator[Term]:
    """Powers of two whose exponent follows the turns: before a turn those that come next."""
    for atom in _atoms_of(nodes):
        if not isinstance(atom, Pow):
            continue
        factors = [dict(atom.exponent.parts).get(_var(var), 0) for var in loops]
        if any(factors):
            yield Term.of(Pow(atom.exponent + 1 if min(factors) < 0 else atom.exponent))


def _var(name: str) -> Any:
    ((monomial, _),) = Term.var(name).parts
    return monomial


def _steady(chunk: ChunkProgram) -> Iterator[Term]:
    """The powers of two in the program that no loop changes."""
    names = {name for name, _ in (*chunk.reading.case.sizes, *chunk.reading.case.bits)}
    for atom in _atoms_of(chunk.nodes):
        if isinstance(atom, Pow) and atom.exponent.names() <= names:
            yield Term.of(atom)


def _has_xor(chunk: ChunkProgram) -> bool:
    return any(isinstance(atom, Xor) for atom in _atoms_of(chunk.nodes))


def _atoms_of(nodes: Sequence[ChunkNode]) -> Iterator[Any]:
    for node in nodes:
        match node:
            case Turns(_, low, high, body):
                yield from (*low.atoms(), *high.atoms(), *_atoms_of(body))
            case At(_, only, low, high, body):
                yield from (*only.atoms(), *low.atoms(), *high.atoms(), *_atoms_of(body))
            case When(_, body):
                yield from _atoms_of(body)
            case Step(_, src, dst, _):
                yield from (atom for end in (*src, *dst) for atom in end.atoms())
