"""A second solver, cvc5, judges what Z3 claims of schedules for all ranks: the lemmas as `--smt-lib` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optcc import cli
from optcc.planner import LIBRARY, find_schedule
from optcc.verdict import PROVED
from optcc.verify.all_ranks.proof import AllRanks, prove_all_ranks

cvc5: Any = pytest.importorskip("cvc5", reason="no cvc5: pip install cvc5")
QUICK = "direct"
TOO_HARD = {"recursive-doubling": 1}
"""Lemmas that cvc5 gives up on: a turn with an exclusive or at both ends of a transfer."""
SCHEDULES_PROVED = sorted(name for name, each in LIBRARY.items() if not each.one_topology and name != QUICK)


def decide(text: str, seconds: float = 20) -> str:
    """What cvc5 says: sat, unsat, or unknown and why."""
    solver = cvc5.Solver(cvc5.TermManager())
    solver.setOption("tlimit-per", str(int(1000 * seconds)))
    parser = cvc5.InputParser(solver)
    parser.setStringInput(cvc5.InputLanguage.SMT_LIB_2_6, text, "lemma")
    said = ""
    while not (command := parser.nextCommand()).isNull():
        said += str(command.invoke(solver, parser.getSymbolManager()))
    return said.strip()


def undecided(proof: AllRanks) -> list[str]:
    """The lemmas of a proof that cvc5 gives up on; asserts that it finds the others unsat."""
    left = []
    for file, text in proof.as_smt_lib().items():
        answer = decide(text)
        if answer.startswith("unknown"):
            left.append(text.splitlines()[0])
        else:
            assert answer == "unsat", f"{file}: {text.splitlines()[:2]}"
    return left


def test_the_lemmas_of_a_schedule_are_unsat_for_both_solvers() -> None:
    proof = prove_all_ranks(find_schedule(QUICK), p_checked=3)
    assert len(proof.as_smt_lib()) > 5
    assert undecided(proof) == []


def test_a_lemma_without_what_it_needs_is_sat() -> None:
    """So the texts say something: what is assumed has a model, and does not imply everything."""
    text = list(prove_all_ranks(find_schedule(QUICK), p_checked=3).as_smt_lib().values())[-1]
    head, *assertions = text.removesuffix("(check-sat)\n").split("(assert")
    assert decide("(assert".join([head, *assertions]) + "(check-sat)\n") == "unsat"
    answers = [
        decide("(assert".join([head, *assertions[:left_out], *assertions[left_out + 1 :]]) + "(check-sat)\n", 0.5)
        for left_out in range(len(assertions))
    ]
    assert "sat" in answers


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES_PROVED)
def test_all_lemmas_of_the_library_are_unsat_for_both_solvers(name: str) -> None:
    proof = prove_all_ranks(find_schedule(name), p_checked=6)
    assert proof.verdict == PROVED, proof.reached
    left = undecided(proof)
    assert len(left) <= TOO_HARD.get(name, 0), left


def test_the_command_writes_each_lemma_and_its_statement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify", "ring-all-gather", "--all-ranks", "--smt-lib", str(tmp_path / "lemmas")]) == 0
    assert "lemmas in" in capsys.readouterr().err
    files = sorted((tmp_path / "lemmas").iterdir())
    assert [file.name for file in files] == [f"{number:03}.smt2" for number in range(1, len(files) + 1)]
    for file in files:
        text = file.read_text()
        assert text.startswith("; ring-all-gather, p >= 2: ") and text.rstrip().endswith("(check-sat)")
    assert cli.run(["verify", "ring", "--smt-lib", str(tmp_path)]) == 2
    assert "--smt-lib: needs --all-ranks" in capsys.readouterr().err
