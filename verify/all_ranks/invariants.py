"""Guessing a loop's invariant: runs of a chunk for small numbers of ranks, and a decision tree that fits them.

The tree asks how places compare (`comparisons`): where rank r stands behind the chunk, (r - c) mod p, against the turn,
against 0 and p - 1, and against where y stands. Nothing here is believed: `optcc.verify.all_ranks.induction` proves the
guess or finds numbers for which it fails.
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
from optcc.verify.all_ranks.symbolic import (
    FALSE,
    TRUE,
    Eq,
    Formula,
    Le,
    Term,
    Unskip,
    choose,
    code_of,
    eq,
    holds,
    le,
    mod,
)

LEVELS = 3
"""How far the questions of an invariant go, from places that are equal to places that are three apart."""
SIZES_FIRST: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((),),
    ((0,), (1,), (2,), (3,), (4,)),
    ((0, 0), (0, 1), (1, 0), (1, 1), (0, 4), (4, 0), (2, 3)),
)
"""By how much the sizes of the runs before the first guess are above the lowest: of no size, of one, of two."""
PLACES_MAX = 10
"""Chunks that are run for one set of sizes."""
ROWS_MAX = 1500
"""Rows of a loop that one run adds to the sample."""
SEED = 1
"""Draws which chunks and rows are kept. A guess may be wrong, and is proved or not whatever it was drawn from."""
Bools = npt.NDArray[np.bool_]


Snapshot = tuple[dict[str, int], list[int], list[bool]]
"""The turns of loops, what each rank holds as an integer with a bit a rank, and who has the stamp."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A chunk as Python code, to be run with numbers: `code` is made by `_chunk_code`."""

    chunk: ChunkProgram
    collective: str
    code: Any

    @classmethod
    def of(cls, chunk: ChunkProgram, collective: str) -> Runner:
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


@dataclass(frozen=True, slots=True)
class Invariant:
    """What holds before each turn of a loop: formulas over ranks r and y, the chunk's places and the loops' variables.

    `has` says that r's value contains y's contribution, `stamp` that it comes from the last reduction.
    """

    has: Formula
    stamp: Formula


def learn(chunk: ChunkProgram, collective: str, sizes: Sequence[Mapping[str, int]]) -> dict[str, Invariant]:
    """An invariant for each loop of the chunk, that fits all runs with these sizes.

    Raises ProofStops if comparisons of places do not tell the cases apart.
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


def _table(
    chunk: ChunkProgram, values: Mapping[str, int], heads: Sequence[Snapshot]
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


def comparisons(chunk: ChunkProgram, turns: Mapping[str, Turns], level: int) -> list[Formula]:
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
