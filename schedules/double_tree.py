"""Double binary tree: the latency of a binary tree, and the bandwidth that one tree alone leaves unused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from optcc.dsl import Program, pure, schedule
from optcc.errors import ScheduleError
from optcc.trees import Edge, Tree, edges_of


def two_trees(p: int) -> tuple[Tree, Tree]:
    """Two binary trees of depth floor(log2 p) over p ranks, such that no rank has children in both.

    In-order traversal of the first gives the ranks in order; those at even positions, counted from 0, are the leaves.
    The second is its mirror image if p is even; if p is odd, it is the first with the ranks rotated by one position.
    Either way the inner ranks of one tree are leaves of the other.

    >>> two_trees(4)
    (Tree(3 <- 1, 1 <- 0, 1 <- 2), Tree(0 <- 2, 2 <- 3, 2 <- 1))

    Raises ScheduleError unless there is at least one rank.
    """
    if p < 1:
        raise ScheduleError(f"{p} ranks: must be at least one")
    parents: dict[int, int] = {}
    root = 2 ** (p.bit_length() - 1)
    for place in range(1, p + 1):  # the height of a position is the number of times that two divides it
        step = place & -place
        above = place + step if place // step % 4 == 1 and place + step <= p else place - step
        if place != root:
            parents[place] = above

    def with_ranks(rank_at: Callable[[int], int]) -> Tree:
        return Tree.of({rank_at(child): rank_at(parent) for child, parent in parents.items()}, rank_at(root))

    return with_ranks(lambda place: place - 1), with_ranks(lambda place: place % p if p % 2 else p - place)


def two_colours(trees: tuple[Tree, Tree]) -> tuple[list[Edge], list[Edge]]:
    """The edges of both trees in two sets; in neither has a rank two children, or two parents.

    Such a 2-colouring exists if a rank has at most two children in both trees together: conflicting edges form paths
    and cycles of even length. Each set is then a step in which no port is used twice, up the trees or down.

    >>> [[(edge.child, edge.parent) for edge in step] for step in two_colours(two_trees(4))]
    [[(1, 3), (0, 1), (2, 0), (3, 2)], [(2, 1), (1, 2)]]
    """
    edges = [edge for number, tree in enumerate(trees) for edge in edges_of(number, tree)]
    above, below = defaultdict(list), defaultdict(list)
    for edge in edges:
        above[edge.child].append(edge)
        below[edge.parent].append(edge)
    colour: dict[Edge, int] = {}
    for first in edges:
        reached = [(first, 0)]
        while reached:
            edge, wanted = reached.pop()
            if edge not in colour:
                colour[edge] = wanted
                reached += [(other, 1 - wanted) for other in (*above[edge.child], *below[edge.parent])]
    return [edge for edge in edges if not colour[edge]], [edge for edge in edges if colour[edge]]


@schedule(
    name="double-binary-tree",
    paper="Sanders, Speck and Träff, 'Two-tree algorithms for full bandwidth broadcast, reduction and scan', "
    "Parallel Computing 35(12), 2009",
)
def double_binary_tree(program: Program) -> None:
    """Two binary trees, half of the message up and down each; the inner ranks of one are leaves of the other.

    A rank with a parent and two children in one tree is a leaf in the other: it sends and receives four halves, so the
    asymptotic time is 2 n / B. In every beat a segment moves one level up or down, in two steps up and two down, by
    the paper's edge colouring. With k segments and d = floor(log2 p) there are k + 2d - 1 beats, so that in
    the order written and with four slots it takes at most (k + 2d - 1) * (2/k * n / B + alpha): two latencies a level
    for small messages. Transfers are written beat by beat: written segment by segment, a list schedule makes them take
    3 n / B at p = 4 and 2.8 n / B at p = 16 (64 segments).

    >>> [str(transfer) for transfer in double_binary_tree(n_ranks=2)]
    ... # doctest: +NORMALIZE_WHITESPACE
    ['0->1 s0 c0 reduce [reduce]', '1->0 s0 c1 reduce [reduce]',
     '1->0 s0 c0 copy [broadcast]', '0->1 s0 c1 copy [broadcast]']
    """
    first, second, steps = _in_steps(program.n_ranks)
    edges = program.edges((first, second), steps)
    depth = edges.depth
    segments = list(program.pipeline(sections=2))
    for beat in range(len(segments) + 2 * depth - 1):
        with program.stage("reduce"):
            for tree, child, parent, level in edges:
                index = beat - (depth - level)
                if 0 <= index < len(segments):
                    segments[index][tree].reduce(src=child, dst=parent)
        with program.stage("broadcast"):
            for tree, child, parent, level in edges:
                index = beat - (depth + level - 1)
                if 0 <= index < len(segments):
                    segments[index][tree].copy(src=parent, dst=child)


@pure
def _in_steps(p: int) -> tuple[Tree, Tree, tuple[Edge, ...]]:
    """The two trees, and their edges in two steps, one after the other."""
    first, second = two_trees(p)
    return first, second, tuple(edge for step in two_colours((first, second)) for edge in step)
