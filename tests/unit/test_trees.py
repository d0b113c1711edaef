"""Trees: what is refused, what they know of themselves, and chunks that are reduced and broadcast along them."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from optcc.arrays import column
from optcc.compiler import compile_schedule
from optcc.dsl import Program, schedule
from optcc.errors import ScheduleError
from optcc.trees import Tree
from optcc.verdict import PROVED
from optcc.verify.plan import verify_plan
from tests.property.strategies import random_tree

HERE = Path(__file__).name
FORK = Tree.of({1: 0, 2: 0, 3: 1}, root=0)


@pytest.mark.parametrize(
    ("order", "parent", "rule"),
    [
        ([], [], "must name every rank"),
        ([0, 1], [-1], "must name every rank"),
        ([0, 2], [-1, 0], "must name every rank"),
        ([0, -1], [-1, 0], "must name every rank"),
        ([0, 1, 1], [-1, 0, 0], "must name every rank"),
        ([0, 1], [0, 0], "only the root"),
        ([0, 1], [-1, -1], "only the root"),
        ([0, 1], [-1, 2], "only the root"),
        ([0, 1, 2], [-1, 2, 0], "behind its parent"),
        ([0, 1], [-1, 1], "behind its parent"),
    ],
)
def test_what_is_no_tree_is_refused(order: list[int], parent: list[int], rule: str) -> None:
    """Ranks missing or named twice, a second root, a child before its parent."""
    with pytest.raises(ScheduleError, match=rule):
        Tree(column(order), column(parent))


@pytest.mark.parametrize("parents", [{1: 2, 2: 1}, {1: 1}, {0: 1, 1: 0}, {1: 0, 3: 0}, {1: 0, 2: 3, 3: 2}])
def test_parents_that_make_no_tree_are_refused(parents: dict[int, int]) -> None:
    """Circles with the root in them and without, and a rank left out."""
    with pytest.raises(ScheduleError):
        Tree.of(parents, root=0)


def test_a_tree_knows_its_root_its_depth_and_its_edges() -> None:
    """A rank alone, a path, and a fork, whose children stand in the order in which they were named."""
    alone = Tree.of({}, root=0)
    assert (len(alone), alone.root, alone.depth, repr(alone)) == (1, 0, 0, "Tree()")
    chain = Tree.chain([2, 0, 1])
    assert (len(chain), chain.root, chain.depth, repr(chain)) == (3, 2, 2, "Tree(2 <- 0, 0 <- 1)")
    assert (len(FORK), FORK.root, FORK.depth) == (4, 0, 2)
    assert FORK.order.tolist() == [0, 1, 2, 3]
    assert Tree.of({2: 0, 3: 1, 1: 0}, root=0).order.tolist() == [0, 2, 1, 3]


def test_chunks_go_up_the_tree_and_down_again() -> None:
    """The deepest first on the way up, the root's children first on the way down: stage, section and line are kept."""

    @schedule
    def fork(program: Program) -> None:
        for segment in program.pipeline(sections=2):
            with program.stage("up"):
                segment[1].reduce_along(FORK)
                segment[0].copy(src=0, dst=3)
            with program.stage("down"):
                segment[1].broadcast_along(FORK)

    built = fork(n_ranks=4, segments=2)
    one = ["3->1 s0 c1 reduce [up]", "2->0 s0 c1 reduce [up]", "1->0 s0 c1 reduce [up]", "0->3 s0 c0 copy [up]"]
    one += ["0->1 s0 c1 copy [down]", "0->2 s0 c1 copy [down]", "1->3 s0 c1 copy [down]"]
    assert [str(each) for each in built] == one + [text.replace("s0", "s1") for text in one]
    lines, first = inspect.getsourcelines(fork.function)
    words = ("reduce_along", "broadcast_along")
    number = {word: first + i for i, text in enumerate(lines) for word in words if word in text}
    for each in built:
        if each.section == 1:
            assert each.line == number["reduce_along" if each.stage == "up" else "broadcast_along"]


@pytest.mark.parametrize("seed", range(20))
def test_any_two_trees_of_one_root_are_an_allreduce(seed: int) -> None:
    """Up one tree, down another; a transfer for each edge."""
    rng = random.Random(seed)
    p = rng.randint(1, 12)
    ups = random_tree(rng, p)
    root = ups[-1][1] if ups else 0
    up = Tree.of(dict(reversed(ups)), root)
    down = Tree.of(dict(reversed(random_tree(rng, p, root))), root)

    @schedule
    def trees(program: Program) -> None:
        for segment in program.pipeline(sections=1):
            segment[0].reduce_along(up)
            segment[0].broadcast_along(down)

    built = trees(n_ranks=p, segments=3)
    assert len(built) == 3 * 2 * (p - 1)
    assert verify_plan(compile_schedule(built, size_bytes=4 * 31)).verdict == PROVED


def tree_of_other_ranks(program: Program) -> None:
    segment = next(program.pipeline(sections=1))
    segment[0].reduce_along(Tree.chain([0, 1]))  # wrong


def tree_over_scratch(program: Program) -> None:
    segment = next(program.pipeline(sections=1, scratch=1))
    segment.scratch(0).broadcast_along(FORK)  # wrong


@pytest.mark.parametrize("function", [tree_of_other_ranks, tree_over_scratch], ids=lambda each: str(each.__name__))
def test_trees_that_do_not_fit_are_refused_at_their_line(function: Callable[[Program], None]) -> None:
    """Another number of ranks; scratch space, which not every rank has written."""
    lines, first = inspect.getsourcelines(function)
    line = first + next(i for i, text in enumerate(lines) if "# wrong" in text)
    with pytest.raises(ScheduleError) as refusal:
        schedule(function)(n_ranks=4, segments=1)
    assert str(refusal.value).startswith(f"{HERE}:{line}: ")


def test_a_chunk_of_a_finished_program_goes_along_no_tree() -> None:
    """It would get lost."""
    kept: list[Program] = []

    @schedule
    def fork(program: Program) -> None:
        kept.append(program)
        for segment in program.pipeline(sections=1):
            segment[0].reduce_along(FORK)

    fork(n_ranks=4)
    (late,) = kept[0].pipeline(sections=1)
    with pytest.raises(ScheduleError, match="another program"):
        late[0].reduce_along(FORK)
