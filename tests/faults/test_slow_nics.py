"""Slow NICs and paths in simulated time: all ranks find out which it is, and accuse nobody else."""

from __future__ import annotations

import pytest

from tests.faults.planted import METER_FAULTS, PlantedFault
from tests.faults.slow_nics import CASES, run, study

BY_NAME = {case.name: case for case in CASES}
KNOWN_S = 1.6


@pytest.mark.parametrize("name", ["out at half, ring", "in at half, ring", "path at half, ring"])
def test_a_slow_rail_is_laid_to_the_end_that_is_slow(name: str) -> None:
    found = run(BY_NAME[name], 0)
    assert found.known_s is not None and found.known_s < KNOWN_S and found.wrong == []


def test_a_healed_nic_is_known_to_be_so_by_all() -> None:
    found = run(BY_NAME["both at half and healed, ring"], 0)
    assert found.known_s is not None and found.healed_s is not None and found.healed_s < KNOWN_S and found.wrong == []


@pytest.mark.parametrize("name", ["healthy, ring", "healthy, ring, slow processors"])
def test_nobody_is_accused_where_all_are_healthy(name: str) -> None:
    found = run(BY_NAME[name], 1)
    assert found.wrong == [] and found.n_runs > 30


@pytest.mark.parametrize("fault", METER_FAULTS, ids=lambda fault: fault.name)
def test_planted_faults_of_the_meters_are_found(fault: PlantedFault) -> None:
    """By the case of a slow receiver, or that of a slow path."""
    with fault.planted():
        found = [run(BY_NAME[name], 0) for name in ("in at half, ring", "path at half, ring")]
    assert any(each.wrong or each.known_s is None or each.known_s > KNOWN_S for each in found)


@pytest.mark.slow
@pytest.mark.search
def test_of_a_hundred_jobs_few_learn_late_or_what_is_not_so() -> None:
    """The table of `docs/transports.md`."""
    results = study(100)
    for name, found in results.items():
        if name.startswith("healthy"):
            n_runs, n_wrong = sum(each.n_runs for each in found), sum(bool(each.wrong) for each in found)
            assert 1000 * n_wrong <= n_runs, name
