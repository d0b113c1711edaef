"""Records: exact round trips, medians without disturbed samples, nccl-tests' bandwidths."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optcc.errors import CodecError, InputError
from optcc.experiments.record import STEAL_MAX, BenchTiming, Record, Samples, algbw, busbw, stolen_share


def row(**changes: Any) -> BenchTiming:
    """A plausible row."""
    values: dict[str, Any] = {
        "schedule": "ring",
        "bed": "half",
        "topology": "4@50MB/s,3=25MB/s",
        "ranks": 4,
        "size_bytes": 64 * 2**20,
        "dtype": "float32",
        "reduction": "sum",
        "segments": 4,
        "digest": "d1",
        "bound_s": 2.704,
        "predicted_s": 4.057,
        "out_of_place": Samples([4.07, 4.1], [0.0, 0.0], 0),
        "in_place": None,
    }
    return BenchTiming(**(values | changes))


def record(*rows: BenchTiming) -> Record:
    """A record of `rows`."""
    return Record(
        "AllReduce", ("optcc", "bench"), "half", 9014 / 8948, {"cores": 2, "kernel": "6.1"}, {"optcc": "0.1"}, rows
    )


finite = st.floats(allow_nan=False, allow_infinity=False)
seconds = st.one_of(st.none(), finite)
samples = st.builds(Samples, st.lists(finite), st.lists(finite), st.integers(0, 2**62))
rows = st.builds(
    BenchTiming,
    *(st.text() for _ in range(3)),
    *(st.integers(0, 2**62) for _ in range(2)),
    *(st.text() for _ in range(2)),
    st.integers(0, 2**62),
    st.text(),
    seconds,
    seconds,
    st.one_of(st.none(), samples),
    st.one_of(st.none(), samples),
)


@given(st.lists(rows, max_size=3), st.text(), finite)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_round_trip_is_exact(tmp_path: Path, found: list[BenchTiming], text: str, overhead: float) -> None:
    written = Record(text, (text, "x"), text, overhead, {"cores": 2, "name": text}, {"optcc": text}, tuple(found))
    path = tmp_path / "record.json"
    written.write(path)
    assert Record.read(path) == written
    assert path.read_bytes() == Record.read(path).to_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "optcc-record/2"}, r"\$\.format: 'optcc-record/2': must be 'optcc-record/1'"),
        ({"rows": [{}]}, r"\$\.rows\[0\]"),
        ({"rows": None}, r"\$\.rows"),
        ({"wire_overhead": "1"}, r"\$\.wire_overhead"),
        ({"more": 1}, "unknown field `more`"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(json.loads(record(row()).to_bytes()) | change), encoding="utf-8")
    with pytest.raises(CodecError, match=message) as caught:
        Record.read(path)
    assert str(caught.value).startswith(f"record {str(path)!r}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(CodecError, match=r"^record '.*record.json': "):
        Record.read(path)


def test_a_missing_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none.json': cannot be read: No such file"):
        Record.read(tmp_path / "none.json")


def test_median_ignores_disturbed_samples() -> None:
    loud = STEAL_MAX + 1e-9
    assert Samples([1.0, 2.0, 9.0, 3.0], [0.0, STEAL_MAX, loud, 0.0], 0).median_s == 2.0
    assert Samples([1.0, 2.0, 9.0], [0.0, 0.0, loud], 0).median_s == 1.5


def test_median_of_all_if_none_was_undisturbed() -> None:
    assert Samples([1.0, 5.0, 2.0], [1.0, 1.0, 1.0], 0).median_s == 2.0


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 0.1)), min_size=1))
def test_median_property(pairs: list[tuple[float, float]]) -> None:
    quiet = [each for each, steal in pairs if steal <= STEAL_MAX]
    found = Samples([each for each, _ in pairs], [steal for _, steal in pairs], 0).median_s
    assert found == statistics.median(quiet or [each for each, _ in pairs])


def test_a_row_speaks_of_its_out_of_place_runs_first() -> None:
    out, in_ = Samples([2.0], [0.0], 3), Samples([1.0], [0.0], 4)
    assert row(out_of_place=out, in_place=in_).seconds == 2.0
    assert row(out_of_place=None, in_place=in_).seconds == 1.0
    assert row(out_of_place=out, in_place=in_).wrong == 7
    assert row(out_of_place=None, in_place=in_).wrong == 4


def test_bandwidths_as_nccl_tests_counts_them() -> None:
    assert algbw(2_000_000_000, 4.0) == 0.5
    assert busbw(2_000_000_000, 4.0, 4) == 0.5 * 2 * 3 / 4
    assert busbw(2_000_000_000, 4.0, 1) == 0
    assert algbw(1, 0.0) == busbw(1, 0.0, 4) == 0
    one = row(size_bytes=2_000_000_000, out_of_place=Samples([4.0], [0.0], 0))
    assert (one.algbw, one.busbw) == (0.5, 0.75)


def test_percent_of_the_bound() -> None:
    assert row(bound_s=2.0, out_of_place=Samples([4.0], [0.0], 0)).bound_percent == 50
    assert row(bound_s=None).bound_percent is None


def test_card_holds_every_row_against_the_fault_free_ring() -> None:
    quiet = Samples([2.0], [0.0], 0)
    card = record(
        row(bed="healthy", out_of_place=quiet, bound_s=2.0), row(out_of_place=Samples([3.0], [0.0], 5))
    ).card()
    assert [dict(zip(card.columns, each, strict=True))["over fault-free ring"] for each in card.rows] == [
        "+0.0 %",
        "+50.0 %",
    ]
    assert [each[-1] for each in card.rows] == ["0", "5"]
    assert [each[0] for each in card.rows] == ["healthy", "half"]


def test_stolen_share() -> None:
    assert stolen_share((10, 100), (15, 200)) == 0.05
    assert stolen_share((10, 100), (10, 100)) == 0
