"""Pipelines in turns along trees: what is proved of them, what is refused, and what the language itself refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import pytest

from optcc.dsl import Program, pure, schedule
from optcc.errors import ScheduleError
from optcc.planner import find_schedule
from optcc.schedule import COPY, REDUCE
from optcc.schedules.tree_turns import Trees, TreeTurn, in_proportion, in_trees, together
from optcc.topology import Topology
from optcc.trees import Tree
from optcc.verdict import PROVED, REFUTED, UNKNOWN
from optcc.verify.all_ranks.chunk_program import ProofStops
from optcc.verify.all_ranks.induction import _check_chunk
from optcc.verify.all_ranks.proof import AllRanks, prove_all_ranks
from optcc.verify.all_ranks.symbolic import OWNER, Along
from optcc.verify.all_ranks.symbolic_terms import Term

FindTrees = Callable[[int], Sequence[tuple[Fraction, Tree]]]
ROOT = Term.var("root")
HALVES = (Fraction(1, 3), Fraction(2, 3))


def star(p: int, root: int) -> Tree:
    return Tree.of({rank: root for rank in range(p) if rank != root}, root=root)


@pure
def chains_and_stars(p: int, lost: object) -> Iterator[tuple[Trees, Trees]]:
    """For ever: a chain to rank 0 and a star from it, and a star to rank p - 1 and back."""
    while True:
        yield (Tree.chain(range(p)), star(p, 0)), (star(p, p - 1), star(p, p - 1))


def proved(write: Callable[..., None], collective: str = "allreduce") -> AllRanks:
    return prove_all_ranks(
        schedule(collective=collective, configure=lambda topology: {"lost": None})(write), p_checked=6
    )


@pytest.mark.parametrize("name", ["shares", "packed", "nic-trees", "equal-trees", "nccl-tree"])
def test_trees_in_turns_are_proved_for_every_number_of_ranks(name: str) -> None:
    found = prove_all_ranks(find_schedule(name), p_checked=5)
    assert found.verdict == PROVED, found.reached
    assert sum("one root, and each segment has one turn" in each for each in found.assumptions) == 1
    assert any(lemma.name == "reduce along, turn" for lemma in found.lemmas)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_any_lag_is_right_and_written_as_it_is_read(lag: int) -> None:
    def lagging(program: Program, lost: object) -> None:
        turns = chains_and_stars(program.n_ranks, lost)
        for reducing, broadcasting in together(program, HALVES, turns, lag):
            for _, segment, up in reducing:
                segment[0].reduce_along(up)
            for _, segment, down in broadcasting:
                segment[0].broadcast_along(down)

    found = schedule(configure=lambda topology: {"lost": None})(lagging)(4, 3, lost=None)
    assert len(found) == 2 * 3 * 2 * 3


def right(program: Program, lost: object) -> None:
    turns = chains_and_stars(program.n_ranks, lost)
    for reducing, broadcasting in together(program, HALVES, turns):
        for _, segment, up in reducing:
            segment[0].reduce_along(up)
        for _, segment, down in broadcasting:
            segment[0].broadcast_along(down)


def nested(program: Program, lost: object) -> None:
    turns = chains_and_stars(program.n_ranks, lost)
    for reducing, broadcasting in together(program, HALVES, turns):
        for _, segment, _up in reducing:
            for _, _other, down in broadcasting:
                segment[0].reduce_along(down)
        for _, segment, down in broadcasting:
            segment[0].broadcast_along(down)


def right_for_one_pipeline(program: Program, lost: object) -> None:
    turns = chains_and_stars(program.n_ranks, lost)
    for reducing, broadcasting in together(program, (Fraction(1),), ((pair,) for pair, _ in turns)):
        for _, segment, up in reducing:
            for _, _other, _down in broadcasting:
                segment[0].reduce_along(up)
        for _, segment, down in broadcasting:
            segment[0].broadcast_along(down)


def nested_in_a_list(program: Program, lost: object) -> None:
    turns = chains_and_stars(program.n_ranks, lost)
    for reducing, broadcasting in together(program, HALVES, turns):
        for segment, tree in [(s, down) for _, s, _up in reducing for _, _s, down in broadcasting]:
            segment[0].reduce_along(tree)
        for _, segment, down in broadcasting:
            segment[0].broadcast_along(down)


def broadcast_first(program: Program, lost: object) -> None:
    turns = chains_and_stars(program.n_ranks, lost)
    for reducing, broadcasting in together(program, HALVES, turns):
        for _, segment, down in broadcasting:
            segment[0].broadcast_along(down)
        for _, segment, up in reducing:
            segment[0].reduce_along(up)


def reduced_twice(program: Program, lost: object) -> None:
    turns = chains_and_stars(program.n_ranks, lost)
    for reducing, broadcasting in together(program, HALVES, turns):
        for _, segment, up in reducing:
            segment[0].reduce_along(up)
            segment[0].reduce_along(up)
        for _, segment, down in broadcasting:
            segment[0].broadcast_along(down)


def never_broadcast(program: Program, lost: object) -> None:
    turns = chains_and_stars(program.n_ranks, lost)
    for reducing, _broadcasting in together(program, HALVES, turns):
        for _, segment, up in reducing:
            segment[0].reduce_along(up)


def late_in_a_condition(program: Program, lost: object) -> None:
    turns = chains_and_stars(program.n_ranks, lost)
    for reducing, broadcasting in together(program, HALVES, turns):
        for _, segment, up in reducing:
            segment[0].reduce_along(up)
        if program.n_ranks < 71:
            for _, segment, down in broadcasting:
                segment[0].broadcast_along(down)


def the_last_tree_again(program: Program, lost: object) -> None:
    turns = chains_and_stars(program.n_ranks, lost)
    for reducing, broadcasting in together(program, HALVES, turns):
        for _, segment, up in reducing:
            segment[0].reduce_along(up)
        for _, segment, _down in broadcasting:
            segment[0].broadcast_along(up)


def beside_another(program: Program, lost: object) -> None:
    turns = chains_and_stars(program.n_ranks, lost)
    for whole in program.pipeline(sections=1, share=Fraction(0)):
        whole[0].copy(src=0, dst=1)
    for reducing, broadcasting in together(program, HALVES, turns):
        for _, segment, up in reducing:
            segment[0].reduce_along(up)
        for _, segment, down in broadcasting:
            segment[0].broadcast_along(down)


def numbered(program: Program, lost: object) -> None:
    turns = chains_and_stars(program.n_ranks, lost)
    for turn, (reducing, broadcasting) in enumerate(together(program, HALVES, turns)):
        for _, segment, up in reducing[: 2 if turn < 70 else 1]:
            segment[0].reduce_along(up)
        for _, segment, down in broadcasting:
            segment[0].broadcast_along(down)


def test_turns_of_trees_are_proved_for_what_they_are() -> None:
    assert proved(right).verdict == PROVED
    refused = proved(right, "reduce")
    assert refused.verdict != PROVED


@pytest.mark.parametrize(
    "write",
    [
        *(
            nested,
            right_for_one_pipeline,
            nested_in_a_list,
            broadcast_first,
            reduced_twice,
            never_broadcast,
            late_in_a_condition,
        ),
        *(the_last_tree_again, beside_another, numbered),
    ],
)
def test_what_is_done_otherwise_in_turns_is_never_proved(write: Callable[..., None]) -> None:
    assert proved(write).verdict in (REFUTED, UNKNOWN)


@pytest.mark.parametrize("name", ["packed-broadcast", "packed-reduce", "packed-reduce-scatter", "packed-all-gather"])
def test_one_tree_for_a_segment_is_proved_for_every_number_of_ranks(name: str) -> None:
    found = prove_all_ranks(find_schedule(name), p_checked=4)
    assert found.verdict == PROVED, found.reached
    assert sum("each segment has one turn (else `in_trees` refuses it)" in each for each in found.assumptions) == 1


def only_reduced(program: Program, find: FindTrees) -> None:
    for _, segment, tree in in_trees(program, find):
        segment[0].reduce_along(tree)


def only_broadcast(program: Program, find: FindTrees) -> None:
    for _, segment, tree in in_trees(program, find):
        segment[0].broadcast_along(tree)


def reduced_and_broadcast(program: Program, find: FindTrees) -> None:
    for _, segment, tree in in_trees(program, find):
        segment[0].reduce_along(tree)
        segment[0].broadcast_along(tree)


def another_tree(program: Program, find: FindTrees) -> None:
    for _, segment, _tree in in_trees(program, find):
        segment[0].reduce_along(Tree.chain(program.ranks))


def but_for_many_ranks(program: Program, find: FindTrees) -> None:
    for _, segment, tree in in_trees(program, find):
        if program.n_ranks < 71:
            segment[0].reduce_along(tree)


def but_for_one_pipeline(program: Program, find: FindTrees) -> None:
    for number, segment, tree in in_trees(program, find):
        if number != 70:
            segment[0].reduce_along(tree)


@pytest.mark.parametrize(
    ("write", "collective"),
    [
        *((only_broadcast, collective) for collective in ("reduce", "reducescatter")),
        *((only_reduced, collective) for collective in ("broadcast", "allgather", "allreduce")),
        *((reduced_and_broadcast, collective) for collective in ("reduce", "reducescatter", "allgather")),
        *((another_tree, collective) for collective in ("reduce", "reducescatter")),
        *((but_for_many_ranks, collective) for collective in ("reduce", "reducescatter")),
        *((but_for_one_pipeline, collective) for collective in ("reduce", "reducescatter")),
    ],
)
def test_what_is_done_otherwise_in_trees_is_never_proved(write: Callable[..., None], collective: str) -> None:
    def configure(topology: Topology) -> Mapping[str, Any]:
        p = topology.n_ranks
        if collective in ("reduce", "broadcast"):
            return {"find": lambda root: [(Fraction(1), star(p, root))]}
        return {"find": lambda root: [(Fraction(1, p), star(p, owner)) for owner in range(p)]}

    judged = prove_all_ranks(schedule(collective=collective, configure=configure)(write), p_checked=4)
    assert judged.verdict in (REFUTED, UNKNOWN)


@pytest.mark.parametrize(
    ("collective", "trees", "rule"),
    [
        ("reduce", [(Fraction(1), star(3, 1))], "tree with root 1: must be the collective's, 0"),
        ("reduce", [(Fraction(1), star(4, 0))], "must be over 3 ranks"),
        (
            "reducescatter",
            [(Fraction(1), star(3, 0))],
            "root 0 for 0..1 of the message: must be within 0..1/3",
        ),
        ("allgather", [(Fraction(1, 3), star(3, 0)), (Fraction(2, 3), star(3, 1))], "root 1 for 1/3..1 of"),
        ("allgather", [(Fraction(1, 3), star(3, 1))], "root 1 for 0..1/3 of the message: must be within 1/3..2/3"),
        ("allgather", [(Fraction(1, 4), star(3, 0)), (Fraction(1, 3), star(3, 1))], "root 1 for 1/4..7/12"),
    ],
)
def test_in_trees_refuses_other_trees_and_roots(collective: str, trees: list[tuple[Fraction, Tree]], rule: str) -> None:
    write = schedule(collective=collective)(only_reduced if collective.startswith("reduce") else only_broadcast)
    with pytest.raises(ScheduleError, match=rule):
        write(3, find=lambda root: trees)


@pytest.mark.parametrize(
    ("collective", "op", "root"),
    [
        *(("reducescatter", op, root) for op, root in ((REDUCE, ROOT), (COPY, OWNER), (REDUCE, Term.of(0)))),
        *(("allgather", op, root) for op, root in ((COPY, ROOT), (REDUCE, OWNER), (COPY, "another root"))),
        *(("reduce", op, root) for op, root in ((REDUCE, OWNER), (COPY, ROOT))),
        *(("broadcast", op, root) for op, root in ((COPY, OWNER), (REDUCE, ROOT))),
    ],
)
def test_a_segment_along_another_tree_is_another_collective(collective: str, op: int, root: Term | str) -> None:
    right = (
        REDUCE if collective.startswith("reduce") else COPY,
        OWNER if collective in ("reducescatter", "allgather") else ROOT,
    )
    _check_chunk([Along(right[0], right[1], 0, Term(()), Term(()), 1)], collective, 1)
    with pytest.raises(ProofStops, match=f"no {collective} along trees"):
        _check_chunk([Along(op, root, 0, Term(()), Term(()), 1)], collective, 1)


def test_the_language_refuses_other_trees_and_turns() -> None:
    two, three = star(2, 0), star(3, 0)
    whole = (Fraction(1),)
    wrong: list[tuple[Callable[[Program], Iterator[TreeTurn]], str]] = [
        (lambda program: together(program, whole, [[(two, two)]]), "must be over 3 ranks"),
        (lambda program: together(program, whole, [[(three, star(3, 1))]]), "must have one root"),
        (lambda program: together(program, whole, []), "0 turns of trees: must be 1"),
        (lambda program: together(program, whole, [[(three, three)] * 2]), "2 pairs of trees: must be 1"),
        (lambda program: in_proportion(program, [(Fraction(1), two, two)]), "must be over 3 ranks"),
        (lambda program: in_proportion(program, [(Fraction(1), three, star(3, 2))]), "must have one root"),
    ]
    for turns, rule in wrong:

        @schedule
        def write(program: Program, turns: Callable[[Program], Iterator[TreeTurn]]) -> None:
            for _ in turns(program):
                pass

        with pytest.raises(ScheduleError, match=rule):
            write(3, turns=turns)
