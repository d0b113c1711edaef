"""Every case of the corpus gets the verdict that it must get, for the right reason."""

from __future__ import annotations

from collections import Counter

import pytest

from optcc import errors
from optcc.plan import Plan
from optcc.verdict import PROPERTIES, PROVED, REFUTED, UNKNOWN, Counterexample, Verdict
from tests.differential.naive_verifier import naive_verify
from tests.negative.cases import Case
from tests.negative.corpus import CASES, CLASSES

LINES_MAX = 20


def named(case: Case) -> str:
    """What a case is called in the list of tests."""
    return f"{case.number}-{case.what.replace(' ', '-')}"


def counterexample_of(case: Case) -> Counterexample:
    """What the case is refuted by; its verdict, if it is one, must be consistent."""
    answer = case.check(case.make())
    assert answer is not None, "accepted"
    if isinstance(answer, Counterexample):
        return answer
    assert isinstance(answer, Verdict)
    assert answer.counterexample is not None, "accepted"
    assert answer.verdict == REFUTED
    place = PROPERTIES.index(answer.counterexample.property)
    wanted = [PROVED] * place + [REFUTED] + [UNKNOWN] * (len(PROPERTIES) - place - 1)
    assert [answer.properties[name] for name in PROPERTIES] == wanted
    return answer.counterexample


@pytest.mark.battery(35)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_the_verdict_that_it_must_get(case: Case) -> None:
    """Refuted by the named property, those before it proved, and told where; or refused by the named error."""
    if case.expected[0].isupper():
        with pytest.raises(getattr(errors, case.expected)) as raised:
            case.check(case.make())
        missing = [name for name in case.names if name not in str(raised.value)]
        assert not missing, str(raised.value)
        return
    example = counterexample_of(case)
    assert example.property == case.expected, example
    missing = [name for name in case.names if name not in str(example)]
    assert not missing, str(example)
    assert case.rank in (None, example.rank), str(example)
    assert case.at in (None, (example.first_byte, example.last_byte)), str(example)
    assert len(str(example).splitlines()) <= LINES_MAX, str(example)
    if example.first_byte is not None and example.last_byte is not None:
        assert 0 <= example.first_byte <= example.last_byte, str(example)


@pytest.mark.parametrize("case", [case for case in CASES if case.expected in PROPERTIES], ids=named)
def test_the_naive_verifier_says_the_same(case: Case) -> None:
    """Trying every interleaving, or the least states where these are too many, finds the same property broken."""
    plan = case.make()
    assert isinstance(plan, Plan)
    found = naive_verify(plan, way="least")
    first = "matching" if "provenance" in found.problems else found.first
    assert first == case.expected, found.problems


def test_every_class_has_five_cases_and_every_case_a_name_of_its_own() -> None:
    """At least five a class, 135 together."""
    counts = Counter(case.number for case in CASES)
    assert set(counts) == set(CLASSES)
    assert {number: count for number, count in counts.items() if count < 5} == {}
    assert len({case.what for case in CASES}) == len(CASES) >= 135


def test_every_case_says_what_its_counterexample_names() -> None:
    """A rank, bytes, an instruction or a value: never only that something is wrong."""
    assert [case.what for case in CASES if not case.names and case.rank is None] == []
