"""Inference of loop invariants: concrete runs of a chunk for few ranks, and a decision tree that fits them.

The atoms of the tree are comparisons of positions (`comparisons`): the distance of rank r from the chunk, (r - c) mod
p, against the iteration, against 0 and p - 1, and against that of y. The result is a guess:
`optcc.verify.all_ranks.induction` proves it or finds a counterexample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from optcc.schedule import REDUCE
from optcc.verify.all_ranks.chunk_program import (
    At,
    ChunkNode,
    ChunkProgram,
    ProofStops,
    Step,
    Turns,
    When,
    rank_sizes,
    turns_of,
)
from optcc.verify.all_ranks.symbolic import code_of
from optcc.verify.all_ranks.symbolic_terms import FALSE, TRUE, Eq, Formula, Le, Term, Unskip, choose, eq, holds, le, mod

LEVELS = 3
"""Levels of atoms, from equal positions to positions that differ by up to three."""
SIZES_FIRST: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((),),
    ((0,), (1,), (2,), (3,), (4,)),
    ((0, 0), (0, 1), (1, 0), (1, 1), (0, 4), (4, 0), (2, 3)),
)
"""The sizes of the runs before the first guess, relative to the lowest, for zero, one and two variables."""
PLACES_MAX = 10
"""Limit on the chunks run for one set of sizes."""
ROWS_MAX = 1500
"""Limit on the rows that one run adds to the sample of a loop."""
SEED = 1
"""Seed of the choice of chunks and rows; soundness does not depend on it, as guesses are proved."""
Bools = npt.NDArray[np.bool_]


Snapshot = tuple[dict[str, int], list[int], list[bool]]
"""Loop variables, the value of each rank as a bit mask of contributions, and the stamp of each rank."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A chunk program compiled to Python for concrete numbers; `code` comes from `_chunk_code`."""

    chunk: ChunkProgram
    collective: str
    code: Any

    @classmethod
    def of(cls, chunk: ChunkProgram, collective: str) -> Runner:
        """Compiles a chunk program."""
        names = [name for name, _ in (*chunk.reading.case.sizes, *chunk.places)]
        names += [chunk.reading.case.straggler] if chunk.reading.case.straggler else []
        lines = [f"def run(ranks, stamped, stamp_at, seen, {', '.join(names)}):", "    count = twice = 0"]
        lines += [*_chunk_code(chunk.nodes, (), "    "), "    return count, twice"]
        scope: dict[str, Any] = {}
        exec("\n".join(lines), scope)
        return cls(chunk, collective, scope["run"])

    def run(self, values: Mapping[str, int]) -> dict[str, list[Snapshot]]:
        """The states before each iteration of each loop (by its variable) and after the last."""
        reductions, _ = self._run(values, -1, {})
        seen: dict[str, list[Snapshot]] = {}
        self._run(values, reductions - 1, seen)
        return seen

    def goes_wrong(self, values: Mapping[str, int]) -> bool:
        """True if, for an allreduce of these sizes, a contribution is added twice or missing at the end."""
        return self._run(values, -1, {})[1]

    def _run(self, values: Mapping[str, int], stamp_at: int, seen: dict[str, list[Snapshot]]) -> tuple[int, bool]:
        """The number of reductions, and whether the run is wrong."""
        n_ranks = int(self.chunk.reading.case.ranks.at(values))
        before = [1 << rank for rank in range(n_ranks)]
        if self.collective == "allgather":
            before = [held if rank == values["c_pipeline"] else 0 for rank, held in enumerate(before)]
        count, twice = self.code(before, [False] * n_ranks, stamp_at, seen, **values)
        everyone = (1 << n_ranks) - 1
        missing = any(held != everyone for held in before)
        return int(count), self.collective == "allreduce" and bool(twice or missing)


def _chunk_code(nodes: Sequence[ChunkNode], turns: tuple[str, ...], indent: str) -> list[str]:
    """Python lines that execute the nodes, count reductions in `count` and record states in `seen`."""
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


@dataclass(frozen=True, slots=True)
class Invariant:
    """The state before each iteration of a loop, as formulas over ranks r and y, the chunk and the loop variables.

    `has`: r's value contains y's contribution; `stamp`: it comes from the last reduction.
    """

    has: Formula
    stamp: Formula


def learn(chunk: ChunkProgram, collective: str, sizes: Sequence[Mapping[str, int]]) -> dict[str, Invariant]:
    """An invariant for each loop of the chunk that fits all runs of these sizes.

    Raises ProofStops if no combination of atoms separates the samples.
    """
    rng, runner = np.random.default_rng(SEED), Runner.of(chunk, collective)
    columns: dict[str, list[npt.NDArray[np.int64]]] = {}
    labels: dict[str, tuple[list[Bools], list[Bools]]] = {}
    for each in sizes:
        for values in places_to_run(chunk, each, rng):
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


def places_to_run(chunk: ChunkProgram, sizes: Mapping[str, int], rng: np.random.Generator) -> list[dict[str, int]]:
    """The chunks of these sizes to run, with each straggler if there is one; a random sample where they are many."""
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
    """The tree over the lowest level of atoms that separates the samples."""
    for level, atoms in enumerate(asked):
        try:
            return fit(atoms, rows, wanted, what)
        except ProofStops:
            if level == LEVELS - 1:
                raise
    raise AssertionError("there are levels")


def _table(
    chunk: ChunkProgram, values: Mapping[str, int], heads: Sequence[Snapshot]
) -> tuple[list[str], npt.NDArray[np.int64], Bools, Bools]:
    """The names of variables, their values for every (iteration, r, y), and the labels `has` and `stamp`."""
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


def comparisons(chunk: ChunkProgram, turns: Mapping[str, Turns], level: int) -> list[Formula]:
    """The atoms of an invariant, simple ones first; higher levels have more."""
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
    """The atoms without variables of this letter."""
    kept: list[Formula] = []
    for atom in atoms:
        assert isinstance(atom, Le | Eq)
        if not any(name.startswith(letter) and name[1:].isdigit() for name in atom.term.names()):
            kept.append(atom)
    return kept


def fit(atoms: Sequence[Formula], rows: Mapping[str, npt.NDArray[np.int64]], wanted: Bools, what: str) -> Formula:
    """A decision tree over `atoms` that equals `wanted` in every row.

    Raises ProofStops if two rows with equal atoms have different labels.
    """
    if not atoms or wanted.all() or not wanted.any():
        if wanted.all() or not wanted.any():
            return TRUE if len(wanted) and wanted.all() else FALSE
        raise ProofStops(f"{what}: no question tells the cases apart")
    answers = np.stack([np.broadcast_to(holds(atom, rows), wanted.shape) for atom in atoms])
    weights = np.random.default_rng(SEED).integers(1, 2**63, len(answers) + 1, dtype=np.uint64)
    keys = np.zeros(len(wanted), dtype=np.uint64)
    for weight, answer in zip(weights, (*answers, wanted), strict=True):  # rows with equal answers have equal keys
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
    """The entropy of the labels within one branch, in bits."""
    share = n_true / np.maximum(n, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    return np.asarray(n * np.nan_to_num(bits))
