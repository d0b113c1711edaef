"""The record of what authentication costs: every case is there, and what is damaged is refused."""

from __future__ import annotations

import pytest

from optcc.errors import CodecError
from optcc.experiments.authentication_cost import CASES, AuthenticationCost, measure
from optcc.experiments.transport_speed import SIZES


def test_the_record_has_every_case() -> None:
    record = AuthenticationCost.read()
    assert {(row.case, row.size_bytes) for row in record.rows} == {(case, size) for case in CASES for size in SIZES}
    assert all(len(row.samples.seconds) >= 9 for row in record.rows)


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        (b"optcc-authentication-cost/1", b"optcc-authentication-cost/2", r"\$\.format"),
        (b'"seconds": [', b'"seconds": [-1.0,', r"\$\.rows\[0\]\.samples"),
        (b'"load": ', b'"load": -', r"\$\.load"),
        (b'"cpu_s": [', b'"cpu_s": [1.0,', r"\$\.rows\[0\]\.cpu_s"),
    ],
)
def test_a_damaged_record_is_refused(before: bytes, after: bytes, path: str) -> None:
    data = AuthenticationCost.read().to_bytes()
    assert before in data and AuthenticationCost.from_bytes(data) == AuthenticationCost.read()
    with pytest.raises(CodecError, match=path):
        AuthenticationCost.from_bytes(data.replace(before, after, 1))


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.mpi
def test_it_can_be_measured_again() -> None:
    assert {row.case for row in measure(n_jobs=1).rows} == set(CASES)
