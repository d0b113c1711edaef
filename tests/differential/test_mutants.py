"""Mutants of the library: the verifier and the naive verifier must find the same in them; and the campaign itself."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from optcc.plan import Plan
from optcc.schedules.registry import SCHEDULES
from optcc.verdict import PROPERTIES, PROVED, Counterexample, Verdict
from optcc.verify.plan import verify_plan
from tests.differential import campaign, mutants
from tests.differential.campaign import Tally, judge_seed, main
from tests.differential.mutants import (
    DSL_OPERATORS,
    LEVELS,
    PLAN_OPERATORS,
    STILL_RIGHT,
    TOO_LARGE,
    TRANSFER_OPERATORS,
    draw_mutant,
    judge,
    misleading,
)
from tests.differential.naive_verifier import ITEM_BYTES, TooManyStates, naive_verify

pytestmark = pytest.mark.xdist_group("mutants")
"""One process judges what several tests look at."""
STATES_MAX = 100_000


def judged(seeds: range, states_max: int = STATES_MAX) -> Tally:
    """The tally of these mutants; no verifier may differ from the other."""
    tally = Tally()
    for seed in seeds:
        judge_seed(seed, tally, states_max)
    assert tally.differences == []
    return tally


@pytest.fixture(scope="module")
def some() -> Tally:
    """Fifty mutants, judged."""
    return judged(range(50))


@pytest.mark.battery(36)
def test_mutants_get_the_naive_verdict(some: Tally) -> None:
    """The same verdict, for the same reason and at the same place, as trying every interleaving."""
    check(some, each_min=1, judged_min=33)


@pytest.mark.slow
def test_a_hundred_and_twenty_mutants_get_the_naive_verdict() -> None:
    check(judged(range(120)), each_min=2, judged_min=80)


def check(tally: Tally, *, each_min: int, judged_min: int) -> None:
    """Enough of them are judged, and enough of each outcome."""
    for outcome in ("matching", "deadlock", "races", "result", STILL_RIGHT):
        assert tally.total(outcome) >= each_min, outcome
    assert tally.judged >= judged_min
    assert tally.total(TOO_LARGE) <= 3


@pytest.mark.slow
def test_every_schedule_and_every_mistake_is_drawn() -> None:
    """All schedules, two to four ranks, fused and not, one to three slots, all orders of ports; and all mistakes."""
    seen: dict[str, set[str]] = {}
    for heading, name, _ in judged(range(720)).counts:
        seen.setdefault(heading, set()).add(name)
    assert seen["schedule"] >= set(SCHEDULES)
    assert seen["ranks"] == {"2", "3", "4"}
    assert seen["fused"] == {"False", "True"}
    assert seen["slots"] == {"1", "2", "3"}
    assert seen["ports"] == {"exclusive", "fair", "fifo", "written"}
    operators = [list(DSL_OPERATORS), list(TRANSFER_OPERATORS), list(PLAN_OPERATORS)]
    mistakes = {f"{level}: {name}" for level, names in zip(LEVELS, operators, strict=True) for name in names}
    assert mistakes - seen["mistake"] == set()


@pytest.mark.slow
@pytest.mark.parametrize("batch", [*range(3), *(pytest.param(each, marks=pytest.mark.search) for each in range(3, 10))])
def test_many_mutants_get_the_naive_verdict(batch: int, seed: int) -> None:
    """Five hundred a batch, new ones in each run; over all of them every property is broken by some."""
    start = 10**9 + (seed * 10 + batch) * 500
    tally = judged(range(start, start + 500), 1_000_000)
    assert tally.judged >= 400
    assert {tally.counts["level", level, "result"] > 0 for level in LEVELS} == {True}


@pytest.mark.slow
def test_the_three_ways_of_visiting_states_find_the_same() -> None:
    """Level by level, each state once, and the least states alone: the same problems, in the same places."""
    compared = Counter[str]()
    for seed in range(5000, 5090):
        plan = draw_mutant(seed).plan
        if plan is None:
            continue
        try:
            plainly = naive_verify(plan, limit=4_000, way="levels", contents_max=200)
        except TooManyStates:
            compared["too large"] += 1
            continue
        once = naive_verify(plan, limit=4_000, way="once", contents_max=200)
        least = naive_verify(plan, limit=4_000, way="least")
        assert set(plainly.problems) == set(once.problems) == set(least.problems), seed
        assert plainly.states == once.states, seed
        for each in (once, least):
            assert each.racing == plainly.racing, seed
            assert each.stuck == plainly.stuck, seed
            assert (each.wrong, each.differing) == (plainly.wrong, plainly.differing), seed
        compared[plainly.first] += 1
    assert all(compared[each] for each in ("", "deadlock", "races", "result")), compared
    assert compared["too large"] < 45, compared


def test_a_number_is_all_there_is_to_say_about_a_mutant() -> None:
    """The same seed makes the same mutant, mistakes and plan."""
    for seed in range(20):
        one, other = draw_mutant(seed), draw_mutant(seed)
        assert str(one) == str(other)
        assert (one.plan.digest if one.plan else one.refused) == (other.plan.digest if other.plan else other.refused)


def some_mutant(outcome: str) -> Plan:
    """The plan of the first mutant with this outcome."""
    for seed in range(2000):
        plan = draw_mutant(seed).plan
        if plan is not None and judge(plan, STATES_MAX).outcome == outcome:
            return plan
    raise AssertionError(outcome)


@pytest.mark.parametrize("outcome", ["matching", "deadlock", "races", "result"])
def test_a_verifier_that_proves_everything_is_found_out(outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = some_mutant(outcome)
    monkeypatch.setattr(mutants, "verify_plan", lambda plan: Verdict(plan.digest, dict.fromkeys(PROPERTIES, PROVED)))
    assert "verifier: proved" in judge(plan, STATES_MAX).difference


def test_a_verifier_that_refuses_what_is_right_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = some_mutant(STILL_RIGHT)
    for name in ("deadlock", "result", "agreement"):
        verdict = Verdict(plan.digest, dict.fromkeys(PROPERTIES, PROVED) | {name: "refuted"}, Counterexample(name, "?"))
        monkeypatch.setattr(mutants, "verify_plan", lambda _plan, verdict=verdict: verdict)
        assert judge(plan, STATES_MAX).difference == f"verifier: {name}; naive: proved"


def test_a_counterexample_that_names_the_wrong_place_is_found_out() -> None:
    """Other bytes, another pair of instructions, instructions that are not stuck."""
    result, race, stuck = some_mutant("result"), some_mutant("races"), some_mutant("deadlock")

    def told(plan: Plan, **changes: object) -> str:
        example = verify_plan(plan).counterexample
        assert example is not None
        naive = naive_verify(plan)
        assert misleading(plan, example, naive, STATES_MAX, "once") == ""
        return misleading(plan, replace(example, **changes), naive, STATES_MAX, "once")  # type: ignore[arg-type]

    item = ITEM_BYTES[result.transfers.dtype]
    beyond = result.size_bytes + result.transfers.scratch_bytes
    assert "not wrong" in told(result, first_byte=beyond, last_byte=beyond + item - 1)
    assert "share" in told(race, last_byte=race.buffer_bytes)
    row = next(row for row in race)
    assert "do not race" in told(race, trace=(str(row), str(row)))
    assert "not stuck" in told(stuck, trace=())


@pytest.mark.slow
def test_the_campaign_counts_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "counts.json"
    assert main(["--mutants", "60", "--seed", "3", "--jobs", "1", "--out", str(out)]) == 0
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["judged"] >= 60
    assert record["differences"] == []
    whole = {outcome: count for heading, _, outcome, count in record["counts"] if heading == "all"}
    assert sum(whole.values()) == record["drawn"]
    assert f"{record['judged']} judged of {record['drawn']} drawn" in capsys.readouterr().out


def test_the_campaign_fails_on_a_disagreement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, and the mutant by its number; a crash of a verifier counts as one."""

    def crash(plan: Plan, states_max: int) -> None:
        raise ZeroDivisionError("by a verifier")

    monkeypatch.setattr(campaign, "judge", crash)
    monkeypatch.setattr(campaign, "CHUNK", 5)
    tally = campaign.judge_chunk(100)
    assert len(tally.differences) + tally.total("refused") == 5
    monkeypatch.setattr(campaign, "run", lambda *_: tally)
    assert main(["--mutants", "5"]) == 1
    shown = capsys.readouterr().out
    assert "DISAGREEMENT mutant 10" in shown
    assert "ZeroDivisionError: by a verifier" in shown
