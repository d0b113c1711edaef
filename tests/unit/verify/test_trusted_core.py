"""docs/verification.md names the code that a verdict rests on: all of it, and as long as it is."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

from optcc.verdict import REFUTED, Counterexample, Verdict
from optcc.verify.plan import explanation
from tests.negative.corpus import CASES
from tests.test_house import ROOT, imports_between, modules

Told = tuple[Counterexample | None, Counterexample | None]
ROW = re.compile(
    r"^\| (?P<what>[^|]*)\| (?P<rests>[^|]*`(?:verify|optcc)/[^|]*) \| (?P<lines>[\d,]+) \|$", re.MULTILINE
)
FILES = re.compile(r"`((?:verify|optcc)/[\w/]*?)(?:\{([\w,]+)\}|(\*)|(\w+))\.py`")


def table() -> list[tuple[str, set[Path], int]]:
    """(what a verdict is on, the files named, their lines as stated) of each row."""
    text = (ROOT / "docs" / "verification.md").read_text(encoding="utf-8")
    return [
        (
            row["what"].strip(),
            set().union(*map(named, FILES.finditer(row["rests"]))),
            int(row["lines"].replace(",", "")),
        )
        for row in ROW.finditer(text)
    ]


def named(match: re.Match[str]) -> set[Path]:
    folder, several, everything, one = match.groups()
    if everything:
        return set((ROOT / folder).glob("*.py"))
    return {ROOT / f"{folder}{name}.py" for name in (several or one).split(",")}


SAYS_WHY = "optcc.verify.plan.explanation"
"""Is asked when the verdict stands: see `test_what_is_said_of_a_wrong_plan_changes_no_verdict`."""


@cache
def imports() -> nx.DiGraph:
    """What each module imports; `optcc` itself only re-exports."""
    left_out = ("optcc", SAYS_WHY)
    return imports_between(
        {name: path.read_text(encoding="utf-8") for name, path in modules().items() if name not in left_out}
    )


def rests_on(*names: str) -> set[Path]:
    """The files of these modules and of all that they import."""
    paths, graph = modules(), imports()
    return {paths[each] for name in names for each in (name, *nx.descendants(graph, name))}


def test_line_counts_are_those_of_the_files() -> None:
    rows = table()
    assert len(rows) == 10
    for what, files, stated in rows:
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        assert 0.9 <= lines / stated <= 1.1, f"{what or 'nouns'}: {lines} lines, {stated} stated"


def test_the_core_is_all_that_a_verdict_on_a_plan_imports() -> None:
    rows = [files for _, files, _ in table()]
    assert rows[0] | rows[1] | rows[2] == rests_on("optcc.verify.plan")
    assert rows[3] == rests_on("optcc.verify.plan.translation") - rests_on("optcc.verify.plan")
    assert rows[4] == rests_on("optcc.verify.plan.verify_transfers") - rests_on("optcc.verify.plan")
    assert rows[5] == rests_on("optcc.codec") - rests_on("optcc.verify.plan")
    assert rows[6] == rests_on("optcc.verify.gpu.msccl") - rests_on("optcc.verify.plan")
    assert not {each.name for row in rows[:8] for each in row} & {"explanation.py"}
    assert rows[7] == rests_on("optcc.verify.gpu.mscclpp") - rests_on("optcc.verify.plan")


def test_the_core_of_a_bound_is_all_that_replay_imports() -> None:
    core = table()[9][1]
    found = rests_on(*(f"optcc.verify.bounds.{name}" for name in ("replay", "exchange_replay", "certificate_file")))
    assert core == {file for file in found if file.parent.name == "bounds"}


WRONG = [case for case in CASES if case.expected in ("result", "agreement")]


@pytest.mark.parametrize("said", [(None, None), (Counterexample("races", "another"), None)], ids=["nothing", "another"])
def test_what_is_said_of_a_wrong_plan_changes_no_verdict(monkeypatch: pytest.MonkeyPatch, said: Told) -> None:
    """An explanation that finds nothing, or breaks another property, leaves the property and the place."""
    assert len(WRONG) > 50
    monkeypatch.setattr(explanation._SecondRun, "tell", lambda run: said)
    for case in WRONG:
        verdict = case.check(case.make())
        assert isinstance(verdict, Verdict) and verdict.counterexample is not None, case.what
        assert verdict.properties[case.expected] == REFUTED == verdict.verdict, case.what
        told = verdict.counterexample
        assert told.property == case.expected and told.summary.startswith(f"rank {told.rank} bytes "), case.what
        if case.expected == "result":
            assert told.first_byte is not None and told.last_byte is not None
            low, high = case.at or (told.first_byte, told.last_byte)
            assert case.rank in (None, told.rank) and told.first_byte <= low <= high <= told.last_byte, case.what
