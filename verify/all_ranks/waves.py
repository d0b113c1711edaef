"""Trees whose edges go through a pipeline in beats: what a chunk sees of them is one reduction and one broadcast.

A schedule goes through beats, and in each through the edges of some trees (`optcc.trees.TreeEdges`), in any order; an
edge of level l, the level of its child, serves segment s in beat s + c + l, or s + c - l. Proved of one segment: each
edge has a beat; in a reduction an edge is later than those of the next level; in a broadcast it is earlier; and the
reductions are before the broadcasts. Then the transfers of one chunk are those of a tree, in an order in which every
edge comes after those below it, and after that in one in which every edge comes after the one above it: as written by
`reduce_along` and `broadcast_along` for an order of the same tree. So they are read as that (`Along`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optcc.schedule import COPY, REDUCE
from optcc.verify.all_ranks.symbolic import Along, EachEdge, Guard, Move, Node, ReadingLemma
from optcc.verify.all_ranks.symbolic_terms import Formula, Term, Var, both, le, lt

SEGMENTS, SEGMENT, LEVEL, OTHER_LEVEL = (Term.var(name) for name in ("k", "wave_segment", "wave_level", "wave_other"))


class NoWave(Exception):
    """Why the transfers of a loop over beats are not read as those of trees."""


@dataclass(frozen=True, slots=True)
class Wave:
    """The beat of an edge of a level for segment `SEGMENT`: SEGMENT + `shift` + `slope` * level."""

    op: int
    shift: Term
    slope: int
    line: int

    def beat(self, level: Term) -> Term:
        """The beat."""
        return SEGMENT + self.shift + level * self.slope


def wave_of(node: Node, beat: Term) -> Wave:
    """The wave of one loop over edges.

    Raises NoWave unless it is the transfer of each edge for the segment of its beat, if there is one.
    """
    match node:
        case EachEdge(_, tree, child, parent, level, (Guard(test, (Move() as move,)),), line):
            index = move.pipeline
            ends = (child, parent) if move.op == REDUCE else (parent, child)
            if test != both(le(0, index), lt(index, SEGMENTS)) or move.section != tree:
                raise NoWave(f"line {line}: no transfer of the edge's tree in a segment that there is")
            if (move.src, move.dst) != ends or move.op not in (REDUCE, COPY):
                raise NoWave(f"line {line}: no transfer from child to parent, or back")
            rest = index - beat
            slope = dict(rest.parts).get((_atom(level),), 0)
            shift = rest - level * slope
            if slope not in (1, -1) or shift.names() & {
                each for end in (beat, *ends, tree, level) for each in end.names()
            }:
                raise NoWave(f"line {line}: segment {index} is not the beat, more or less, and the level")
            return Wave(move.op, -shift, -slope, move.line)
    raise NoWave("something else than one transfer for each edge")


def _atom(term: Term) -> Var:
    atom = term.atom
    assert isinstance(atom, Var)
    return atom


def read_waves(
    nodes: Sequence[Node], beat: Term, low: Term, high: Term, depth: Term, n_trees: int, family: int
) -> tuple[tuple[Along, ...], tuple[ReadingLemma, ...]]:
    """What a chunk sees of a loop over beats from `low` to `high` - 1, with the lemmas that this rests on; section
    t is that of tree t.

    Raises NoWave for another loop than a reduction and a broadcast.
    """
    if [type(node) for node in nodes] != [EachEdge, EachEdge]:
        raise NoWave("a beat must go through the edges twice")
    up, down = (wave_of(node, beat) for node in nodes)
    (number,) = {node.number for node in nodes if isinstance(node, EachEdge)} or {0}
    if (up.op, down.op) != (REDUCE, COPY):
        raise NoWave("a beat must reduce, and then copy")
    facts = [le(1, depth), le(0, SEGMENT), lt(SEGMENT, SEGMENTS), le(1, LEVEL), le(LEVEL, depth)]
    two = [*facts, le(1, OTHER_LEVEL), le(OTHER_LEVEL, depth)]
    lemmas = [
        *(
            ReadingLemma(
                f"line {wave.line}, beat", "every edge has a beat", tuple(facts), _within(wave.beat(LEVEL), low, high)
            )
            for wave in (up, down)
        ),
        ReadingLemma(
            f"line {up.line}, order",
            "an edge is reduced along after those of the next level",
            (*facts, lt(LEVEL, depth)),
            lt(up.beat(LEVEL + 1), up.beat(LEVEL)),
        ),
        ReadingLemma(
            f"line {down.line}, order",
            "a value goes down an edge before those of the next level",
            (*facts, lt(LEVEL, depth)),
            lt(down.beat(LEVEL), down.beat(LEVEL + 1)),
        ),
        ReadingLemma(
            f"line {down.line}, after",
            "a value goes down in a later part of a beat, or in a later beat, than any goes up",
            tuple(two),
            le(up.beat(LEVEL), down.beat(OTHER_LEVEL)),
        ),
    ]
    found = []
    for tree in range(n_trees):
        root = f"the root of tree {tree} of list {number} of edges"
        for wave in (up, down):
            found.append(Along(wave.op, root, family, Term(()), Term.of(tree), wave.line))
    return tuple(found), tuple(lemmas)


def _within(value: Term, low: Term, high: Term) -> Formula:
    return both(le(low, value), lt(value, high))
