"""Bounds with certificates: a closed form's own, a linear program's where it is needed or asked for, and trees."""

from __future__ import annotations

from fractions import Fraction

import pytest

from optcc.collective import Collective
from optcc.errors import InputError, SolverError
from optcc.topology import Topology
from optcc.verify.bounds import certified
from optcc.verify.bounds.certified import certified_bound, explain_if_pooled
from optcc.verify.bounds.lp import lp_bound
from optcc.verify.bounds.replay import replay

HALF = Topology.parse("4@50MB/s,3=25MB/s")
ALL = Collective("allreduce", 4)
SIZE = 100_000_000


def test_a_closed_form_needs_no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certified, "lp_bound", lambda *_, **__: pytest.fail("solved"))
    told = explain_if_pooled(HALF, SIZE, ALL)
    assert told is not None
    certificate, solved_by = certified_bound(HALF, SIZE, ALL, told)
    assert (certificate.seconds, solved_by) == (Fraction(4), None)
    replay(certificate, HALF)


@pytest.mark.parametrize("name", ["highs", "cbc"])
def test_a_solver_that_is_asked_for_solves(name: str) -> None:
    told = explain_if_pooled(HALF, SIZE, ALL)
    certificate, solved_by = certified_bound(HALF, SIZE, ALL, told, solver_name=name)
    assert (certificate.seconds, solved_by) == (Fraction(4), name)


def test_a_packing_that_reaches_the_bound() -> None:
    certificate, _ = certified_bound(HALF, SIZE, ALL, explain_if_pooled(HALF, SIZE, ALL), achievable=True)
    assert (certificate.seconds, certificate.gap) == (Fraction(4), Fraction(0))


def test_a_contradiction_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    less = lp_bound(HALF, "allreduce", SIZE // 2)
    monkeypatch.setattr(certified, "lp_bound", lambda *_, **__: less)
    with pytest.raises(SolverError, match="must not be less than the closed form, 4 s"):
        certified_bound(HALF, SIZE, ALL, explain_if_pooled(HALF, SIZE, ALL), solver_name="cbc")


def test_a_size_that_cannot_be() -> None:
    with pytest.raises(InputError):
        explain_if_pooled(HALF, -1, ALL)
