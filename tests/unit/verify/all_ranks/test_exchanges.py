"""AllToAll, Gather and Scatter for every number of ranks: what is proved, and what must not be."""

from __future__ import annotations

from pathlib import Path

import pytest

from optcc.collective import Collective
from optcc.dsl import Definition, Program, schedule
from optcc.errors import ScheduleError
from optcc.schedules import all_to_all
from optcc.schedules.registry import SCHEDULES
from optcc.verdict import PROVED, UNKNOWN
from optcc.verify.all_ranks import proof
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

PLAIN = ("direct-all-to-all", "direct-gather", "direct-scatter")
OF_ANY_SIZES = ("direct-all-to-all-v", "matched-all-to-all-v")
MATCHED = ("matched-all-to-all", "matched-all-to-all-v")


@pytest.mark.parametrize("name", [*PLAIN, *OF_ANY_SIZES, "matched-all-to-all"])
def test_an_exchange_is_proved_for_every_number_of_ranks(name: str) -> None:
    judged = prove_all_ranks(SCHEDULES[name], p_checked=7)
    assert (judged.verdict, judged.reached) == (PROVED, "")
    assert any("AllToAll-v, of any sizes" in each for each in judged.assumptions) == (name in OF_ANY_SIZES)
    assert any("else `pairs` refuses it" in each for each in judged.assumptions) == (name in MATCHED)
    assert ("any root" in judged.cases[0]) == (name in ("direct-gather", "direct-scatter"))


FAULTS = (
    ("direct_all_to_all", ("for step in range(1, p)", "for step in range(2, p)")),
    ("direct_all_to_all", ("for step in range(1, p)", "for step in range(1, p - 1)")),
    ("direct_all_to_all", ("_send(blocks, p, rank, (rank + step) % p)", "_send(blocks, p, rank, (rank + 1) % p)")),
    ("direct_all_to_all", ("blocks[src * p + dst]", "blocks[dst * p + src]")),
    ("direct_all_to_all", ("blocks[src * p + dst]", "blocks[src * p + (dst + 1) % p]")),
    ("direct_all_to_all", ("block.copy(src=src, dst=dst)", "block.copy(src=dst, dst=src)")),
    ("direct_all_to_all_v", ("for rank in program.ranks:", "for rank in range(p - 1):")),
    ("direct_gather", ("part.copy(src=rank, dst=root)", "part.copy(src=(rank + 1) % program.n_ranks, dst=root)")),
    ("direct_gather", ("part.copy(src=rank, dst=root)", "part.copy(src=rank, dst=0)")),
    ("direct_gather", ("part.copy(src=rank, dst=root)", "part.reduce(src=rank, dst=root)")),
    ("direct_gather", ("if rank != root and part", "if rank != 0 and part")),
    ("direct_scatter", ("part.copy(src=root, dst=rank)", "part.copy(src=rank, dst=root)")),
    ("direct_scatter", ("part.copy(src=root, dst=rank)", "part.copy(src=0, dst=rank)")),
    ("matched_all_to_all", ("_send(blocks, p, src, dst)", "_send(blocks, p, dst, dst)")),
    ("matched_all_to_all", ("_send(blocks, p, src, dst)", "_send(blocks, p, src, (dst + 1) % p)")),
)


@pytest.mark.parametrize(("name", "change"), sampled(FAULTS, every=4))
def test_the_lemmas_fail_for_a_planted_fault(tmp_path: Path, name: str, change: tuple[str, str]) -> None:
    definition = planted(tmp_path, all_to_all, name, change)
    with pytest.raises((OutsideSubset, ProofStops)):
        prove(definition)


def prove(definition: Definition) -> None:
    """The proof alone: nothing is run to see whether it is right."""
    reading = read(definition, cases_of(definition)[0].case)
    prove_moves(reading)
    prove_rounds(chunk_of(reading, 0, reading.walks[0].bodies[0]), definition.collective, "")


def test_the_lemmas_hold_where_nothing_is_planted() -> None:
    for name in (*PLAIN, *OF_ANY_SIZES, *MATCHED):
        prove(SCHEDULES[name])


HEAD = "from optcc.collective import Collective\nfrom optcc.dsl import pure, schedule\n"
EXCHANGE = """
{module}
def alltoallv(p):
    return Collective.all_to_all_v([[({sizes}) for dst in range(p)] for src in range(p)])
@schedule(collective={collective})
def made(program{parameters}):
    p = program.n_ranks
    {prelude}
    for blocks in program.cells():
        for step in range(1, {steps}):
            for rank in program.ranks:
                block = blocks[rank * p + (rank + step) % p]
                if {test}:
                    {body}
"""
RIGHT = {
    "module": "",
    "sizes": "1",
    "collective": "'alltoall'",
    "parameters": "",
    "prelude": "pass",
    "steps": "p",
    "test": "block is not None",
    "body": "block.copy(src=rank, dst=(rank + step) % p)",
}
LATE = {
    "at most 70 steps": {"steps": "min(p, 70)"},
    "the last ranks are left out": {"test": "rank < 70 and block is not None"},
    "another receiver": {"body": "block.copy(src=rank, dst=(rank + min(step, 69)) % p)"},
    "what is missing counts": {
        "collective": "alltoallv",
        "sizes": "src + dst if p > 70 else 1",
        "test": "rank >= 0",
        "body": "(block.copy(src=rank, dst=(rank + step) % p) if block is not None else blocks[1].copy(src=1, dst=0))",
    },
    "another block as well": {
        "collective": "alltoallv",
        "sizes": "(0 if src == dst == 1 and p > 70 else 1)",
        "body": "block.copy(src=rank, dst=(rank + step) % p); blocks[p + 1].copy(src=1, dst=0)",
    },
    "not asked whether it is there": {
        "collective": "alltoallv",
        "sizes": "(0 if src == 1 and dst == 0 and p > 70 else 1)",
        "test": "True",
    },
    "a branch for what is missing": {
        "collective": "alltoallv",
        "test": "block is not None or rank > 70",
    },
}


def test_the_exchange_without_a_fault_is_proved(tmp_path: Path) -> None:
    for changes in ({}, {"collective": "alltoallv"}):
        judged = prove_all_ranks(made(tmp_path, HEAD + EXCHANGE.format(**{**RIGHT, **changes})), p_checked=5)
        assert judged.verdict == PROVED, judged.reached


@pytest.mark.parametrize("name", LATE)
def test_an_exchange_that_is_wrong_for_many_ranks_is_never_proved(tmp_path: Path, name: str) -> None:
    judged = prove_all_ranks(made(tmp_path, HEAD + EXCHANGE.format(**{**RIGHT, **LATE[name]})), p_checked=5)
    assert judged.verdict == UNKNOWN and judged.reached


PAIRS = """
@pure
def some(rates, p):
    return [(src, dst) for src in range(p) for dst in range(p) if src != dst]
@schedule(collective='alltoall', configure=lambda topology: {{'rates': tuple(topology.out)}})
def made(program, rates=()):
    p = program.n_ranks
    order = {order}
    for blocks in program.cells():
        for src, dst in order:
            {body}
"""
OF_PAIRS = {
    "not checked": {"order": "some(rates, p)"},
    "checked, then cut": {"order": "program.pairs(some(rates, p))[:4970]"},
    "of another's cell": {"body": "blocks[src * p + dst].copy(src=src, dst=dst); blocks[1].copy(src=src, dst=dst)"},
    "of a sum": {"body": "blocks[src * p + dst].reduce(src=src, dst=dst)"},
    "by a rank between": {"body": "blocks[src * p + dst].copy(src=(src + 1) % p, dst=dst)"},
    "of the first": {"body": "blocks[src * p + dst].copy(src=0, dst=dst)"},
}


def with_pairs(folder: Path, **changes: str) -> Definition:
    right = {"order": "program.pairs(some(rates, p))", "body": "blocks[src * p + dst].copy(src=src, dst=dst)"}
    return made(folder, HEAD + PAIRS.format(**{**right, **changes}))


def test_checked_pairs_are_proved(tmp_path: Path) -> None:
    judged = prove_all_ranks(with_pairs(tmp_path), p_checked=5)
    assert judged.verdict == PROVED, judged.reached
    assert any("some changes nothing" in each for each in judged.assumptions)


@pytest.mark.parametrize("name", OF_PAIRS)
def test_pairs_that_nobody_checks_are_not_proved(tmp_path: Path, name: str) -> None:
    definition = with_pairs(tmp_path, **OF_PAIRS[name])
    assert prove_all_ranks(definition, p_checked=4).verdict != PROVED
    with pytest.raises((OutsideSubset, ProofStops, proof._Refuted)):
        proof._prove_case(definition, cases_of(definition)[0], 4, 1e12)


@schedule(collective="alltoall")
def by_pairs(program: Program, order: tuple[tuple[int, int], ...]) -> None:
    """The pairs of `order`, which is checked."""
    checked = program.pairs(order)
    for blocks in program.cells():
        for src, dst in checked:
            block = blocks[src * program.n_ranks + dst]
            assert block is not None
            block.copy(src=src, dst=dst)


@pytest.mark.parametrize(
    "order",
    [
        ((0, 1),),
        ((0, 1), (0, 1)),
        ((0, 1), (1, 0), (0, 1)),
        ((0, 1), (1, 0), (0, 0)),
        ((0, 1), (1, 2)),
        (),
    ],
)
def test_pairs_must_be_every_pair_once(order: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ScheduleError, match="every pair of ranks with a block once"):
        by_pairs(2, order=order)
    assert len(by_pairs(2, order=((1, 0), (0, 1)))) == 2


def test_pairs_without_a_block_are_no_pairs() -> None:
    of_v = SCHEDULES["matched-all-to-all-v"].of(Collective.all_to_all_v([[1, 0], [2, 0]]))
    assert [(each.src, each.dst) for each in of_v(2)] == [(1, 0)]
