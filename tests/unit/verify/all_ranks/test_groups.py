"""Rings of some of the ranks, side by side: proved for any groups, and with a fault never."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest

from optcc.dsl import Definition, Program, schedule
from optcc.errors import ScheduleError
from optcc.schedules import r2ccl
from optcc.schedules.registry import SCHEDULES
from optcc.verdict import PROVED, UNKNOWN
from optcc.verify.all_ranks.cases import cases_of
from optcc.verify.all_ranks.chunk_program import ProofStops, chunk_of
from optcc.verify.all_ranks.induction import prove_moves
from optcc.verify.all_ranks.proof import prove_all_ranks
from optcc.verify.all_ranks.round_invariants import prove_rounds
from optcc.verify.all_ranks.symbolic import OutsideSubset
from optcc.verify.all_ranks.symbolic_interpreter import read
from tests.sample import sampled
from tests.unit.verify.all_ranks.test_all_ranks import planted
from tests.unit.verify.all_ranks.test_attacks import made


@pytest.mark.slow
@pytest.mark.parametrize("name", ["r2ccl-allreduce", "r2ccl-recursive"])
def test_rings_side_by_side_are_proved_for_every_number_of_ranks(name: str) -> None:
    judged = prove_all_ranks(SCHEDULES[name], p_checked=7)
    assert (judged.verdict, judged.reached) == (PROVED, "")
    assert any("no group of ranks names one twice (else `groups` refuses it)" in each for each in judged.assumptions)
    assert sum("disjoint" in lemma.name for lemma in judged.lemmas) == 2


INNER = " " * 16 + "for i in range(members):\n" + " " * 20
FAULTS = (
    ("dst=order[(section + i - members) % members]", "dst=order[(section + i - members) % p]"),
    ("dst=order[(section + i - members) % members]", "dst=order[(section + i - members - 1) % members]"),
    (
        "for i in range(members, p):\n                    segment[section].reduce",
        "for i in range(members + 1, p):\n                    segment[section].reduce",
    ),
    ("segment[section].reduce(src=order[i]", "segment[section].copy(src=order[i]"),
    ("segment[section].reduce(src=order[i]", "segment[0].reduce(src=order[i]"),
    (
        "for step in range(members - 1):\n" + INNER + "segment[(i - step)",
        "for step in range(members - 2):\n" + INNER + "segment[(i - step)",
    ),
    ("segment[(i - step) % members].reduce", "segment[(i + step) % members].reduce"),
    ("segment[(i - step) % members].reduce", "segment[(i - step - 1) % members].reduce"),
    ("segment[(i + 1 - step) % members].copy", "segment[(i - step) % members].copy"),
    (
        "for step in range(members - 1):\n" + INNER + "segment[(i + 1",
        "for step in range(members - 2):\n" + INNER + "segment[(i + 1",
    ),
    (
        "segment[section].copy(src=order[(section + i - members - 1) % members], dst=order[i])",
        "segment[section].copy(src=order[i], dst=order[(section + i - members - 1) % members])",
    ),
    (
        "for i in range(members, p):\n                    segment[section].copy",
        "for i in range(members, p - 1):\n                    segment[section].copy",
    ),
)


def prove(definition: Definition) -> None:
    """The proof alone: nothing is run to see whether it is right."""
    reading = read(definition, cases_of(definition)[0].case)
    prove_moves(reading)
    prove_rounds(chunk_of(reading, 0, reading.walks[0].bodies[0]), definition.collective, "")


@pytest.mark.slow
@pytest.mark.parametrize("change", FAULTS)
def test_the_lemmas_fail_for_a_planted_fault(tmp_path: Path, change: tuple[str, str]) -> None:
    text = Path(r2ccl.__file__).read_text()
    behind = text.index("def _side_by_side")
    assert text[behind:].count(change[0]) == 1, change[0]
    context = text[behind : behind + text[behind:].index(change[0])]
    definition = planted(tmp_path, r2ccl, "r2ccl_recursive", (context + change[0], context + change[1]))
    with pytest.raises((OutsideSubset, ProofStops)):
        prove(definition)


@pytest.mark.slow
def test_the_lemmas_hold_where_nothing_is_planted() -> None:
    prove(SCHEDULES["r2ccl-recursive"])


HEAD = "from fractions import Fraction\nfrom optcc.dsl import pure, schedule\n"
GROUPED = """
@pure
def levels(p, rates):
    half = tuple(range(p // 2 + 1))
    return [(tuple(range(p)), Fraction(1, 2)), (half, Fraction(1, 2))]
@schedule(configure=lambda topology: {{'rates': tuple(topology.out)}})
def made(program, rates=()):
    p = program.n_ranks
    {before}
    for segment, group in program.groups(levels(p, rates)):
        order, members = group
        for section in range(members):
            for i in range(members, {end}):
                segment[section].reduce(src=order[i], dst=order[0])
            for i in range(1, {middle}):
                segment[section].reduce(src=order[i], dst={root})
            for i in range(1, {last}):
                segment[section].copy(src={source}, dst=order[i])
"""
RIGHT = {"before": "pass", "end": "p", "middle": "members", "root": "order[0]", "last": "p", "source": "order[0]"}
LATE = {
    "at most 70 others": {"end": "min(p, 70)"},
    "at most 70 members": {"middle": "min(members, 70)"},
    "70 get it": {"last": "min(p, 70)"},
    "a rank by its number": {"root": "0"},
    "another root": {"source": "order[max(p, 71) - 71]"},
    "beside another pipeline": {"before": "list(program.pipeline(sections=1, share=Fraction(0)))"},
}


def test_groups_without_a_fault_are_proved(tmp_path: Path) -> None:
    judged = prove_all_ranks(made(tmp_path, HEAD + GROUPED.format(**RIGHT)), p_checked=5)
    assert judged.verdict == PROVED, judged.reached


@pytest.mark.parametrize("name", sampled(LATE, every=3))
def test_groups_that_are_wrong_for_many_ranks_are_never_proved(tmp_path: Path, name: str) -> None:
    definition = made(tmp_path, HEAD + GROUPED.format(**{**RIGHT, **LATE[name]}))
    judged = prove_all_ranks(definition, p_checked=5)
    assert judged.verdict == UNKNOWN and judged.reached


HALVES = """
from optcc.domain import multiples_of
@pure
def levels(p, rates):
    return [(tuple(range(p // 2 if p < 71 else p)), Fraction(1))]
@schedule(configure=lambda topology: {'rates': tuple(topology.out)}, domain=multiples_of(2))
def made(program, rates=()):
    p = program.n_ranks
    for segment, group in program.groups(levels(p, rates)):
        order, members = group
        for section in range(members):
            for i in range(1, p):
                segment[section].reduce(src=order[i], dst=order[0])
            for i in range(1, members * 2):
                segment[section].copy(src=order[0], dst=order[i])
"""


def test_the_members_of_a_group_are_no_size_of_the_domain(tmp_path: Path) -> None:
    """Right for groups of half the ranks alone, of p = 2 m; a group has any number of members."""
    judged = prove_all_ranks(made(tmp_path, HEAD + HALVES), p_checked=6)
    assert judged.verdict == UNKNOWN and "the list has this entry" in judged.reached


@schedule
def of_groups(program: Program, given: Sequence[tuple[Sequence[int], Fraction]]) -> None:
    """A ring for each group, as it is given."""
    for segment, group in program.groups(given):
        for i in range(1, program.n_ranks):
            segment[0].reduce(src=group.order[i], dst=group.order[0])


@pytest.mark.parametrize("ranks", [(), (0, 0), (0, 3), (-1,), (2, 1, 2)])
def test_groups_name_ranks_that_exist_once(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match="must name ranks from 0 to 2, none twice"):
        of_groups(3, given=[(ranks, Fraction(1))])


def test_the_others_of_a_group_follow_its_members() -> None:
    program = of_groups.write(4, 2, given=[((2, 0), Fraction(1, 3)), ((1,), Fraction(0)), ((3, 2, 1), Fraction(2, 3))])
    assert [(group.order, group.members) for group in program.groups_made] == [((2, 0, 1, 3), 2), ((3, 2, 1, 0), 3)]
    written = program.finish()
    assert [shape.sections for shape in written.segments] == [2, 2, 3, 3]
