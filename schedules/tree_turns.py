"""Pipelines in turns, each segment reduced along one tree and broadcast along another: `together`, `in_proportion`.

Whatever the trees are, a segment is in one turn, its two trees are over all ranks and have one root, and it is
broadcast in its own turn or in a later one. Other trees are refused here, so a proof for all ranks need not read how
trees are found (`optcc.verify.all_ranks`). `in_trees` is for the collectives in which a segment has one tree;
`reduce_in_order` reduces along a tree with one order of additions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from optcc.dsl import Program, Segment
from optcc.errors import ScheduleError
from optcc.trees import Tree

Along = tuple[int, Segment, Tree]
"""The number of a pipeline, a segment of it, and the tree along which that goes."""
Trees = tuple[Tree, Tree]
"""To reduce along, and to broadcast along."""


class TreeTurn(NamedTuple):
    """The segments that are reduced in a turn, and those that are broadcast in it."""

    reducing: tuple[Along, ...]
    broadcasting: tuple[Along, ...]


def together(
    program: Program,
    shares: Sequence[Fraction],
    turns: Iterable[Sequence[Trees]],
    lag: int = 0,
    *,
    scratch: int = 0,
) -> Iterator[TreeTurn]:
    """A turn is a segment of every pipeline, with the trees of that turn; it is broadcast `lag` turns later.

    `shares` are those of the pipelines, and each turn of `turns`, which may be endless, has a pair of trees for each.
    `scratch`: 1 if segments are reduced by `reduce_in_order`.

    >>> from optcc.dsl import schedule
    >>> star = Tree.of({1: 0, 2: 0}, root=0)
    >>> @schedule
    ... def stars(program):
    ...     for reducing, broadcasting in together(program, [Fraction(1)], [[(star, star)]]):
    ...         for _, segment, up in reducing:
    ...             segment[0].reduce_along(up)
    ...         for _, segment, down in broadcasting:
    ...             segment[0].broadcast_along(down)
    >>> len(stars(n_ranks=3))
    4

    Raises ScheduleError for trees over other ranks, two of one segment with different roots, and too few turns.
    """
    pipelines = [program.pipeline(sections=1, share=share, scratch=scratch) for share in shares]
    waiting: deque[tuple[Along, ...]] = deque()
    n_turns = 0
    for segments, pairs in zip(zip(*pipelines, strict=True), turns, strict=False):
        if len(pairs) != len(segments):
            raise ScheduleError(f"a turn with {len(pairs)} pairs of trees: must be {len(segments)}, one for each share")
        for pair in pairs:
            _check(program, *pair)
        numbered = range(len(segments))
        waiting.append(tuple((at, segments[at], pairs[at][1]) for at in numbered))
        reducing = tuple((at, segments[at], pairs[at][0]) for at in numbered)
        n_turns += 1
        yield TreeTurn(reducing, waiting.popleft() if len(waiting) > lag else ())
    if n_turns != program.segments:
        raise ScheduleError(f"{n_turns} turns of trees: must be {program.segments}, a turn for each segment")
    while waiting:
        yield TreeTurn((), waiting.popleft())


def in_proportion(program: Program, pairs: Sequence[tuple[Fraction, Tree, Tree]]) -> Iterator[TreeTurn]:
    """A turn is one segment, reduced and broadcast; pipelines take turns in proportion to their shares.

    Each of `pairs` is a pipeline: its share, and its trees. With k segments asked for it has k on average.

    Raises ScheduleError for trees over other ranks, or two of a pair with different roots.
    """
    for _, up, down in pairs:
        _check(program, up, down)
    for number, segment in segments_in_proportion(program, [pair[0] for pair in pairs]):
        yield TreeTurn(((number, segment, pairs[number][1]),), ((number, segment, pairs[number][2]),))


def along_pairs(program: Program, pairs: Sequence[tuple[Fraction, Tree, Tree]]) -> None:
    """Reduces and broadcasts each segment of `in_proportion`; every tree is a stage of its own, so that a chunk that
    waits for its data in one tree holds up no other one."""
    for reducing, broadcasting in in_proportion(program, pairs):
        for number, segment, up in reducing:
            with program.stage(f"reduce along tree {number}"):
                segment[0].reduce_along(up)
        for number, segment, down in broadcasting:
            with program.stage(f"broadcast along tree {number}"):
                segment[0].broadcast_along(down)


def reduce_in_order(segment: Segment, tree: Tree, gpus: Sequence[int] = ()) -> None:
    """Every rank but the root adds its chunk to its parent's, as along the tree, and each sum has the order of ranks.

    The tree is a star over servers of `gpus` ranks each, of one if there are none, with the other ranks of a server
    around the one that is in it. Where some stand before the rank that adds, they are added in scratch space: the
    segment has one scratch slot.

    >>> from optcc.dsl import schedule
    >>> @schedule
    ... def first(program):
    ...     for segment in program.pipeline(sections=1, scratch=1):
    ...         reduce_in_order(segment, Tree.of({0: 2, 1: 2, 3: 2}, root=2))
    >>> for each in first(n_ranks=4):
    ...     print(each)
    0->2 s0 c0 copy [transfer]
    1->2 s0 c0 reduce [transfer]
    2->2 s0 c0 reduce [transfer]
    3->2 s0 c0 reduce [transfer]

    Raises ScheduleError for another tree, and for a segment without scratch space.
    """
    above = dict(zip(tree.order.tolist(), tree.parent.tolist(), strict=True))
    first, speakers = 0, list[int]()
    for n_gpus in gpus or [1] * len(tree):
        ranks = range(first, first + n_gpus)
        speaker = next(rank for rank in ranks if above[rank] not in ranks)
        if any(above[rank] != speaker for rank in ranks if rank != speaker):
            raise ScheduleError(f"{tree}: ranks {ranks.start} to {ranks.stop - 1} must be around one of them")
        _add_in_order(segment, ranks, speaker)
        speakers.append(speaker)
        first += n_gpus
    if any(above[rank] != tree.root for rank in speakers if rank != tree.root):
        raise ScheduleError(f"{tree}: must be a star over servers around rank {tree.root}")
    _add_in_order(segment, speakers, tree.root)


def _add_in_order(segment: Segment, ranks: Sequence[int], centre: int) -> None:
    """Adds the chunks of `ranks`, in this order, at one of them."""
    chunk, before = segment[0], ranks.index(centre)
    if before > 1:
        scratch = segment.scratch(0)
        chunk.copy(src=ranks[0], dst=centre, into=scratch)
        for rank in ranks[1:before]:
            chunk.reduce(src=rank, dst=centre, into=scratch)
        scratch.reduce(src=centre, dst=centre, into=chunk)
    elif before == 1:
        chunk.reduce(src=ranks[0], dst=centre)
    for rank in ranks[before + 1 :]:
        chunk.reduce(src=rank, dst=centre)


def in_trees(
    program: Program, find: Callable[[int], Sequence[tuple[Fraction, Tree]]], *, scratch: int = 0
) -> Iterator[Along]:
    """A turn is one segment with its tree; pipelines take turns in proportion to their shares.

    `find` gives a share and a tree for each pipeline, for the root of the collective; `scratch` is that of `together`.
    The tree's root is that of the
    collective, or for ReduceScatter and AllGather the rank to which this part of the message belongs.

    Raises ScheduleError for trees over other ranks, or with another root.
    """
    trees = [(Fraction(share), tree) for share, tree in find(program.collective.root)]
    p, before = program.n_ranks, Fraction(0)
    for share, tree in trees:
        _check_ranks(program, tree)
        if program.collective.name in ("reducescatter", "allgather"):
            if not tree.root <= before * p <= (before + share) * p <= tree.root + 1:
                raise ScheduleError(
                    f"tree with root {tree.root} for {before}..{before + share} of the message: must be within "
                    f"{Fraction(tree.root, p)}..{Fraction(tree.root + 1, p)}, the root's part"
                )
        elif tree.root != program.collective.root:
            raise ScheduleError(f"tree with root {tree.root}: must be the collective's, {program.collective.root}")
        before += share
    for number, segment in segments_in_proportion(program, [share for share, _ in trees], scratch=scratch):
        yield number, segment, trees[number][1]


def segments_in_proportion(
    program: Program, shares: Sequence[Fraction], *, scratch: int = 0
) -> Iterator[tuple[int, Segment]]:
    """The segments of a pipeline for each share, in proportion to it: `program.segments` each on average."""
    chunks = program.segments * len(shares)
    counts = [max(1, round(chunks * share)) for share in shares]
    pipelines = [
        program.pipeline(each, sections=1, share=share, scratch=scratch)
        for each, share in zip(counts, shares, strict=True)
    ]
    whole = lcm(*counts)  # moments in whole numbers: comparing thousands of fractions takes a tenth of a second
    turns = sorted(
        ((2 * turn + 1) * (whole // count), number) for number, count in enumerate(counts) for turn in range(count)
    )
    for _, number in turns:
        yield number, next(pipelines[number])


def _check(program: Program, up: Tree, down: Tree) -> None:
    for tree in (up, down):
        _check_ranks(program, tree)
    if up.root != down.root:
        raise ScheduleError(f"trees with roots {up.root} and {down.root}: must have one root")


def _check_ranks(program: Program, tree: Tree) -> None:
    if len(tree) != program.n_ranks:
        raise ScheduleError(f"{tree}: must be over {program.n_ranks} ranks")
