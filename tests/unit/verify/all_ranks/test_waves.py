"""Trees whose edges go through a pipeline in beats: proved for any trees, and with a fault never."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from optcc.dsl import Definition, Program, schedule
from optcc.errors import ScheduleError
from optcc.schedules import double_tree
from optcc.schedules.registry import SCHEDULES
from optcc.trees import Edge, Tree, TreeEdges, edges_of
from optcc.verdict import PROVED
from optcc.verify.all_ranks import proof
from optcc.verify.all_ranks.cases import cases_of
from optcc.verify.all_ranks.chunk_program import ProofStops
from optcc.verify.all_ranks.induction import ask, check_along
from optcc.verify.all_ranks.proof import prove_all_ranks
from optcc.verify.all_ranks.symbolic import Along, OutsideSubset
from optcc.verify.all_ranks.symbolic_interpreter import read
from tests.unit.verify.all_ranks.test_all_ranks import planted
from tests.unit.verify.all_ranks.test_attacks import made


def test_the_double_binary_tree_is_proved_for_every_number_of_ranks() -> None:
    judged = prove_all_ranks(SCHEDULES["double-binary-tree"], p_checked=9)
    assert (judged.verdict, judged.reached) == (PROVED, "")
    assert any("named once (else `edges` refuses it)" in each for each in judged.assumptions)
    claims = [lemma.name.rpartition(", ")[2] for lemma in judged.lemmas]
    assert [claims.count(name) for name in ("beat", "order", "after")] == [2, 3, 1]


def test_a_chunk_sees_one_reduction_and_one_broadcast() -> None:
    reading = read(SCHEDULES["double-binary-tree"], cases_of(SCHEDULES["double-binary-tree"])[0].case)
    (walk,) = reading.walks
    nodes = [node for node in walk.bodies[0] if isinstance(node, Along)]
    assert [(node.op, node.section.constant) for node in nodes] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert nodes[0].root == nodes[1].root != nodes[2].root == nodes[3].root


FAULTS = (
    ("range(len(segments) + 2 * depth - 1)", "range(len(segments) + 2 * depth - 2)"),
    ("range(len(segments) + 2 * depth - 1)", "range(len(segments) + depth)"),
    ("range(len(segments) + 2 * depth - 1)", "range(1, len(segments) + 2 * depth - 1)"),
    ("index = beat - (depth - level)", "index = beat - level"),
    ("index = beat - (depth - level)", "index = beat - depth"),
    ("index = beat - (depth - level)", "index = beat - 2 * (depth - level)"),
    ("index = beat - (depth + level - 1)", "index = beat - (depth + level - 3)"),
    ("index = beat - (depth + level - 1)", "index = beat - (2 * depth - level)"),
    ("index = beat - (depth + level - 1)", "index = beat - (depth + level)"),
    ("index = beat - (depth + level - 1)", "index = beat - (level - 1)"),
    ("segments[index][tree].reduce(src=child, dst=parent)", "segments[index][0].reduce(src=child, dst=parent)"),
    ("segments[index][tree].reduce(src=child, dst=parent)", "segments[index][tree].reduce(src=parent, dst=child)"),
    ("segments[index][tree].reduce(src=child, dst=parent)", "segments[index][tree].reduce(src=child, dst=0)"),
    ("segments[index][tree].reduce(src=child, dst=parent)", "segments[index][1 - tree].reduce(src=child, dst=parent)"),
    ("segments[index][tree].copy(src=parent, dst=child)", "segments[index][tree].copy(src=child, dst=parent)"),
    ("segments[index][tree].copy(src=parent, dst=child)", "segments[index][tree].reduce(src=parent, dst=child)"),
    ("segments[index][tree].copy(src=parent, dst=child)", "segments[beat][tree].copy(src=parent, dst=child)"),
    ("if 0 <= index < len(segments):", "if 0 < index < len(segments):"),
    ("if 0 <= index < len(segments):", "if 0 <= index < len(segments) - 1:"),
    ("if 0 <= index < len(segments):", "if 0 <= index < len(segments) and level < 7:"),
    ("if 0 <= index < len(segments):", "if index < len(segments):"),
)


@pytest.mark.parametrize("change", FAULTS)
def test_a_planted_fault_is_not_proved(tmp_path: Path, change: tuple[str, str]) -> None:
    definition = planted(tmp_path, double_tree, "double_binary_tree", change)
    with pytest.raises((OutsideSubset, ProofStops)):
        prove(definition)


def prove(definition: Definition) -> None:
    """The proof alone: nothing is run to see whether it is right."""
    reading = read(definition, cases_of(definition)[0].case)
    for each in reading.lemmas:
        if not ask(each.name, each.statement, [*reading.case.facts(), *each.facts], each.goal).proved:
            raise ProofStops(each.name)
    check_along(reading, "allreduce")


def test_the_lemmas_hold_where_nothing_is_planted() -> None:
    prove(SCHEDULES["double-binary-tree"])


HEAD = "from optcc.dsl import pure, schedule\nfrom optcc.trees import Tree, TreeEdges, edges_of\n"
BEATS = """
@pure
def tree_of(p):
    tree = Tree.chain(range({ranks}))
    return tree, tuple(edges_of(0, tree)){cut}
@schedule
def made(program):
    tree, listed = tree_of(program.n_ranks)
    edges = {edges}
    depth = edges.depth
    segments = list(program.pipeline(sections={sections}))
    {before}
    for beat in range(len(segments) + 2 * depth):
        for t, child, parent, level in edges:
            index = beat - (depth - level)
            if 0 <= index < len(segments):
                segments[index][t].reduce(src=child, dst=parent)
        for t, child, parent, level in edges:
            index = beat - (depth + level - 1)
            if 0 <= index < len(segments):
                segments[index][t].copy(src=parent, dst=child)
        {after}
"""
RIGHT = {
    "ranks": "p",
    "cut": "",
    "edges": "program.edges((tree,), listed)",
    "sections": "1",
    "before": "pass",
    "after": "pass",
}
LATE = {
    "edges that nobody checks": {"edges": "TreeEdges((tree,), listed)", "ranks": "min(p, 70)"},
    "a list that nobody checks": {"edges": "listed", "cut": "[:69]"},
    "a second section": {"sections": "1 + program.n_ranks // 71"},
    "another section than trees": {"sections": "2"},
    "a transfer before": {"before": "segments[0][0].copy(src=0, dst=1)"},
    "a transfer in every beat": {"after": "segments[0][0].copy(src=0, dst=1)"},
    "a transfer in a late beat": {"after": "_ = [segments[0][0].copy(src=0, dst=1) for _ in range(beat // 200)]"},
    "a chunk that is not there": {"after": "segments[70 - beat // 71][0]"},
}


def test_beats_without_a_fault_are_proved(tmp_path: Path) -> None:
    judged = prove_all_ranks(made(tmp_path, HEAD + BEATS.format(**RIGHT)), p_checked=5)
    assert judged.verdict == PROVED, judged.reached


@pytest.mark.parametrize("name", LATE)
def test_beats_that_are_wrong_for_many_ranks_are_never_proved(tmp_path: Path, name: str) -> None:
    definition = made(tmp_path, HEAD + BEATS.format(**{**RIGHT, **LATE[name]}))
    assert prove_all_ranks(definition, p_checked=5).verdict != PROVED
    with pytest.raises((OutsideSubset, ProofStops, proof._Refuted)):
        proof._prove_case(definition, cases_of(definition)[0], 5, 1e12)


@pytest.mark.parametrize("changes", [{"ranks": "min(p, 4)"}, {"cut": "[:3]"}])
def test_edges_that_do_not_fit_make_no_schedule(tmp_path: Path, changes: dict[str, str]) -> None:
    definition = made(tmp_path, HEAD + BEATS.format(**{**RIGHT, **changes}))
    assert len(definition(4)) == 6
    with pytest.raises(ScheduleError, match="must be"):
        definition(6)


TREE = Tree.of({1: 0, 2: 0, 3: 1}, root=0)


@pytest.mark.parametrize(
    "edges",
    [
        [],
        [*edges_of(0, TREE)][:-1],
        [*edges_of(0, TREE), Edge(0, 3, 1, 2)],
        [*[*edges_of(0, TREE)][:-1], Edge(0, 3, 1, 1)],
        [*[*edges_of(0, TREE)][:-1], Edge(0, 3, 2, 2)],
        [*edges_of(1, TREE)],
    ],
)
def test_edges_are_every_edge_once(edges: Sequence[Edge]) -> None:
    with pytest.raises(ScheduleError, match="every edge once"):
        TreeEdges((TREE,), tuple(edges))
    right = TreeEdges((TREE,), tuple(edges_of(0, TREE)))
    assert (right.depth, len(list(right))) == (2, 3)


@schedule
def over_another_number(program: Program) -> None:
    """Trees over other ranks than the program's."""
    program.edges((TREE,), edges_of(0, TREE))


def test_trees_are_over_all_ranks() -> None:
    with pytest.raises(ScheduleError, match=r"trees over \[4\] ranks: must be over 5"):
        over_another_number(5)
    assert prove_all_ranks(over_another_number, p_checked=3).verdict != PROVED
