"""The record of what the transports cost: the docs say what it says, and what is damaged is refused."""

from __future__ import annotations

import pytest

from optcc.errors import CodecError
from optcc.experiments.fabric import can_make_namespaces
from optcc.experiments.transport_speed import CASES, ON_FABRIC, RAW, SIZES, TransportSpeed, measure


def test_the_record_has_every_case() -> None:
    record = TransportSpeed.read()
    short, _ = SIZES
    wanted = {(case, size) for case in CASES for size in SIZES} - {(case, short) for case in (RAW, *ON_FABRIC.values())}
    assert {(row.case, row.size_bytes) for row in record.rows} == wanted
    assert all(len(row.samples.seconds) >= 9 for row in record.rows)


def test_cpu_time_is_by_what_leaves_a_rank() -> None:
    row = next(row for row in TransportSpeed.read().rows if row.case == RAW and row.size_bytes == 64 << 20)
    assert row.cpu_s_per_gb == pytest.approx(sorted(row.cpu_s)[len(row.cpu_s) // 2] / 0.402653184, rel=0.2)


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        (b"optcc-transport-speed/1", b"optcc-transport-speed/2", r"\$\.format"),
        (b'"cpu_s"', b'"cpu"', r"\$\.rows"),
        (b'"seconds": [', b'"seconds": [-1.0,', r"\$\.rows\[0\]\.samples"),
        (b"{", b"[", r"^record '': "),
    ],
)
def test_a_damaged_record_is_refused(before: bytes, after: bytes, path: str) -> None:
    data = TransportSpeed.read().to_bytes()
    assert TransportSpeed.from_bytes(data) == TransportSpeed.read()
    with pytest.raises(CodecError, match=path):
        TransportSpeed.from_bytes(data.replace(before, after, 1))


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.mpi
def test_it_can_be_measured_again() -> None:
    rows = measure(n_jobs=1).rows
    left_out = set() if can_make_namespaces() is None else set(ON_FABRIC.values())
    assert {row.case for row in rows} == set(CASES) - left_out
