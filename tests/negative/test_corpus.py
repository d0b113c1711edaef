"""Every wrong schedule of the corpus gets the verdict that it must get."""

from __future__ import annotations

import pytest

from optcc import errors
from optcc.verdict import PROPERTIES, REFUTED
from optcc.verify.plan import verify_plan
from tests.negative.corpus import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.number}-{case.what}")
def test_the_verdict_that_it_must_get(case: Case) -> None:
    """Refuted by the named property, with earlier ones proved; or refused by the named error."""
    if case.expected not in PROPERTIES:
        with pytest.raises(getattr(errors, case.expected)):
            case.make()
        return
    verdict = verify_plan(case.make())
    assert verdict.counterexample is not None, "accepted"
    assert verdict.verdict == REFUTED
    assert verdict.counterexample.property == case.expected, verdict.counterexample
    assert verdict.counterexample.summary


def test_the_corpus_has_one_name_for_each_case() -> None:
    """No case stands there twice."""
    assert len({case.what for case in CASES}) == len(CASES) >= 30
