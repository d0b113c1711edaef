"""Old against new: the arithmetic, the record, the turns, and what becomes of a part that fails."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optcc.errors import CodecError, InputError, RuntimeFault
from optcc.experiments import compare_versions
from optcc.experiments.compare_versions import (
    KINDS,
    LOOPBACK_CASES,
    STATES,
    Checkout,
    ComparedCase,
    Effort,
    Measurements,
    Version,
    VersionComparison,
    measure,
    quartiles,
)
from optcc.experiments.failover_speed import NOTHING

ONE, TWO = Version("a" * 40, False, {"numpy": "2.3.1"}), Version("b" * 40, True, {})
CASE = ComparedCase("1 KiB", [[2e-4, 4e-4], [3e-4]], [[1e-4, 2e-4], [6e-4]])


def record(*cases: ComparedCase) -> VersionComparison:
    return VersionComparison(("python",), {"cores": 2}, ONE, TWO, cases, ("fabric, round 1, new: no",))


def test_ratios_are_new_over_old() -> None:
    assert CASE.ratio == pytest.approx(2e-4 / 3e-4)
    assert CASE.round_ratios == pytest.approx([0.5, 2.0])


def test_a_stall_of_nothing_has_no_ratio() -> None:
    none = ComparedCase("stall", [[0.0]], [[0.004]])
    assert none.ratio is None and none.round_ratios == []
    assert record(none).card().rows[0] == ("stall", "1 + 1", "0 µs [0, 0]", "4 ms [4, 4]", "+4 ms", "-", "-")
    assert ComparedCase("stall", [[0.004], [0.002]], [[-0.001], [0.001]]).round_ratios == [0.5]


def test_quartiles_lie_between_values() -> None:
    assert quartiles([4.0, 1.0, 2.0, 3.0]) == pytest.approx((1.75, 2.5, 3.25))
    assert quartiles([2.0, 1.0]) == pytest.approx((1.25, 1.5, 1.75))


def test_the_card() -> None:
    row = ("1 KiB", "3 + 3", "300 µs [250, 350]", "200 µs [150, 400]", "-0.1 ms", "0.667", "0.875 to 1.625")
    assert record(CASE).card().rows == (row,)


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        (b"optcc-version-comparison/1", b"optcc-version-comparison/2", r"\$\.format"),
        (b'"commit"', b'"hash"', r"\$\.old"),
        (b'"old_s": [\n', b'"old_s": [[],\n', r"\$\.cases\[0\]\.old_s"),
    ],
)
def test_a_damaged_record_is_refused(before: bytes, after: bytes, path: str) -> None:
    data = record(CASE).to_bytes()
    assert VersionComparison.from_bytes(data) == record(CASE)
    assert before in data
    with pytest.raises(CodecError, match=path):
        VersionComparison.from_bytes(data.replace(before, after, 1))


class FakeCheckout:
    """Notes what is asked of it; says one time for everything."""

    def __init__(self, side: str, log: list[str], seconds: float, broken: str = "") -> None:
        self.side, self.log, self.seconds, self.broken = side, log, seconds, broken

    def _enter(self, part: str) -> None:
        self.log.append(f"{self.side} {part}")
        if part == self.broken:
            raise RuntimeFault(f"{part}: no")

    def loopback(self) -> dict[tuple[str, int], list[float]]:
        self._enter("loopback")
        return {(case, size): [self.seconds] for case in LOOPBACK_CASES for size in (1 << 10, 64 << 20)}

    def fabric(self, name: str, size_bytes: int, runs: int) -> Iterator[tuple[str, list[float]]]:
        self._enter("fabric")
        for state in STATES:
            yield state, [self.seconds] * runs

    def stalls(self, failures: int, seed: int) -> dict[str, list[float]]:
        self._enter(f"stalls {seed}")
        return {kind: [self.seconds] * failures for kind in (NOTHING, *KINDS)}


def measured(
    monkeypatch: pytest.MonkeyPatch, log: list[str], broken: str = "", refusal: str | None = None
) -> Measurements:
    monkeypatch.setattr(compare_versions, "can_make_namespaces", lambda: refusal)
    sides: dict[str, Any] = {"old": FakeCheckout("old", log, 2.0), "new": FakeCheckout("new", log, 1.0, broken)}
    return measure(sides, Effort(2, 1, 1 << 20, 3, 2, 5), lambda line: None)


def test_versions_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    tally = measured(monkeypatch, log)
    parts = ["loopback", "loopback", "fabric", "stalls 1", "stalls 2"]
    assert log == [f"{side} {part}" for part in parts for side in ("old", "new")]
    cases = {case.case: case for case in tally.cases()}
    assert len(cases) == 2 * len(LOOPBACK_CASES) + len(STATES) + 1 + len(KINDS)
    assert {case.ratio for case in cases.values()} == {0.5} and tally.failed == []
    assert cases["stall: reset"].new_s == [[1.0] * 5] * 2
    assert cases["fabric 4x2@400Mbit/s, 1 MiB: one NIC down"].old_s == [[2.0] * 3]


def test_a_part_that_fails_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    tally = measured(monkeypatch, log, broken="fabric")
    assert tally.failed == ["fabric, round 1, new: fabric: no"]
    assert log[-1] == "new stalls 2"
    assert not [case for case in tally.cases() if case.case.startswith("fabric")]


def test_without_the_right_to_make_hosts_only_loopback_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    tally = measured(monkeypatch, log, refusal="not root")
    assert tally.failed == ["nothing on the fabric: not root"]
    assert set(log) == {"old loopback", "new loopback"}


def test_a_checkout_runs_its_own_code(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="make setup"):
        Checkout(tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    said = '{"file": "/elsewhere/optcc/__init__.py", "versions": {}}'
    python.write_text(f"#!/bin/sh\necho {shlex.quote(said)}\n")
    python.chmod(0o700)
    with pytest.raises(InputError, match=r"imports optcc from /elsewhere/optcc/__init__\.py"):
        Checkout(tmp_path)
