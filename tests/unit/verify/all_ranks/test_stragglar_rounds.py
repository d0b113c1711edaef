"""StragglAR for every number of ranks and any straggler, and with a fault never."""

from __future__ import annotations

from pathlib import Path

import pytest

from optcc.dsl import Definition, Program, schedule
from optcc.errors import ScheduleError
from optcc.schedules import stragglar as module
from optcc.schedules.registry import SCHEDULES
from optcc.schedules.stragglar import ExchangeRound, ExchangeRounds, stragglar_rounds
from optcc.verdict import PROVED
from optcc.verify.all_ranks.cases import cases_of
from optcc.verify.all_ranks.chunk_program import ProofStops, chunk_of
from optcc.verify.all_ranks.induction import prove_moves
from optcc.verify.all_ranks.proof import prove_all_ranks
from optcc.verify.all_ranks.round_invariants import prove_rounds
from optcc.verify.all_ranks.symbolic import OutsideSubset
from optcc.verify.all_ranks.symbolic_interpreter import read
from tests.unit.verify.all_ranks.test_attacks import made


def test_stragglar_is_proved_for_every_number_of_ranks() -> None:
    judged = prove_all_ranks(SCHEDULES["stragglar"], p_checked=9)
    assert (judged.verdict, judged.reached, judged.cases) == (PROVED, "", ("p >= 2, any straggler",))
    assert any("else `ExchangeRounds` refuses it" in each for each in judged.assumptions)
    assert any("else `in_order` refuses it" in each for each in judged.assumptions)


def prove(definition: Definition) -> None:
    """The proof alone: nothing is run to see whether it is right."""
    reading = read(definition, cases_of(definition)[0].case)
    prove_moves(reading)
    prove_rounds(chunk_of(reading, 0, reading.walks[0].bodies[0]), definition.collective, "")


HEAD = """
from optcc.dsl import Program, pure, schedule
from optcc.errors import ScheduleError
from optcc.schedules.stragglar import ExchangeRounds, one_straggler, stragglar_rounds
"""
TEXT = Path(module.__file__).read_text()
WRITTEN = TEXT[TEXT.index("@schedule(") :].replace("def stragglar(", "def made(")


def faulty(folder: Path, old: str, new: str) -> Definition:
    """The schedule with a fault; what checks its rounds is the library's."""
    assert WRITTEN.count(old) >= 1, old
    return made(folder, HEAD + WRITTEN.replace(old, new, 1))


@pytest.mark.slow
def test_the_lemmas_hold_where_nothing_is_planted(tmp_path: Path) -> None:
    prove(SCHEDULES["stragglar"])
    prove(faulty(tmp_path, "range(q - 1)", "range(q - 1)"))


IF = "            if owner is not None:\n"
SPREAD = '            with program.stage("3 spread"):\n'
COPIES = "                for section, src, dst in copies:\n"
FAULTS = (
    ("for step in range(q - 1):", "for step in range(q - 2):"),
    ("for step in range(q - 1):", "for step in range(min(q - 1, 69)):"),
    ("segment[(i - step - 1) % q].reduce", "segment[(i - step) % q].reduce"),
    ("segment[(i - step - 1) % q].reduce", "segment[(i - step - 1) % q].copy"),
    ("dst=ranks[(i + 1) % q])", "dst=ranks[(i + 2) % q])"),
    ("own.copy(src=ranks[owner], dst=ranks[q], into=other)", "own.copy(src=ranks[q], dst=ranks[owner], into=other)"),
    ("own.copy(src=ranks[owner], dst=ranks[q], into=other)", "own.copy(src=ranks[owner], dst=ranks[q])"),
    ("for rank in (ranks[owner], ranks[q]):", "for rank in (ranks[owner], ranks[owner]):"),
    ("for rank in (ranks[owner], ranks[q]):", "for rank in (ranks[owner],):"),
    ("own, other = segment[owner], segment.scratch(owner)", "own, other = segment[0], segment.scratch(0)"),
    ("segment[section].copy(src=ranks[src], dst=ranks[dst])", "segment[0].copy(src=ranks[src], dst=ranks[dst])"),
    ("segment[section].copy(src=ranks[src], dst=ranks[dst])", "segment[section].copy(src=ranks[dst], dst=ranks[src])"),
    ("segment[section].copy(src=ranks[src], dst=ranks[dst])", "segment[section].copy(src=src, dst=dst)"),
    (
        "segment[section].copy(src=ranks[src], dst=ranks[dst])",
        "segment[section].reduce(src=ranks[src], dst=ranks[dst])",
    ),
    ("ranks = program.in_order(_late_last(p, straggler))", "ranks = _late_last(p, straggler)"),
    ("rounds = ExchangeRounds(p, stragglar_rounds(p))", "rounds = stragglar_rounds(p)"),
    ("rounds = ExchangeRounds(p, stragglar_rounds(p))", "rounds = ExchangeRounds(p - 1, stragglar_rounds(p - 1))"),
    (IF, "            if owner is None:\n"),
    (IF, "            if owner is not None and p < 71:\n"),
    (IF, "            if owner is not None or p < 71:\n"),
    (IF, "            if owner != 70:\n"),
    (SPREAD, "            if p < 71:\n"),
    (SPREAD, "            if owner is not None:\n"),
    (SPREAD, "            for _ in range(p // 71):\n"),
    (COPIES, "                for section, src, dst in copies[:70]:\n"),
    (COPIES, COPIES + "                    if section < 70:\n                        pass\n"),
    (COPIES, "                segment[0].copy(src=ranks[0], dst=ranks[1])\n" + COPIES),
)


@pytest.mark.slow
@pytest.mark.parametrize("change", FAULTS)
def test_a_planted_fault_is_not_proved(tmp_path: Path, change: tuple[str, str]) -> None:
    definition = faulty(tmp_path, *change)
    with pytest.raises((OutsideSubset, ProofStops)):
        prove(definition)


def test_a_condition_around_the_exchange_is_not_dropped(tmp_path: Path) -> None:
    block = WRITTEN[WRITTEN.index(IF) : WRITTEN.index(SPREAD)]
    inside = "            if p < 71:\n" + "".join(f"    {line}\n" for line in block.splitlines())
    definition = faulty(tmp_path, block, inside)
    with pytest.raises(OutsideSubset, match="once in a round"):
        prove(definition)


RIGHT = stragglar_rounds(5)


@pytest.mark.parametrize(
    "rounds",
    [
        (),
        RIGHT[:-1],
        RIGHT[1:],
        (*RIGHT, ExchangeRound(0, ())),
        (ExchangeRound(4, ()), *RIGHT),
        (ExchangeRound(None, ((0, 0, 1),)), *RIGHT),
        (ExchangeRound(0, ((0, 0, 1),)), *RIGHT[1:]),
        (*RIGHT, ExchangeRound(None, ((0, 0, 5),))),
        (*RIGHT, ExchangeRound(None, ((0, 1, 1),))),
        (*RIGHT, ExchangeRound(None, ((7, 0, 1),))),
    ],
)
def test_rounds_exchange_each_section_once_and_spread_it(rounds: tuple[ExchangeRound, ...]) -> None:
    with pytest.raises(ScheduleError, match="must"):
        ExchangeRounds(5, rounds)
    assert list(ExchangeRounds(5, RIGHT)) == list(RIGHT)


@schedule
def in_some_order(program: Program, order: tuple[int, ...]) -> None:
    """A star around the first of an order that is checked."""
    ranks = program.in_order(order)
    for segment in program.pipeline(sections=1):
        for i in range(1, program.n_ranks):
            segment[0].reduce(src=ranks[i], dst=ranks[0])


def test_an_order_names_every_rank_once() -> None:
    assert in_some_order.write(3, order=(2, 0, 1)).orders_made == ((2, 0, 1),)
    for wrong in ((0, 1), (0, 1, 1), (0, 1, 3), ()):
        with pytest.raises(ScheduleError, match="must name every rank from 0 to 2 once"):
            in_some_order(3, order=wrong)
