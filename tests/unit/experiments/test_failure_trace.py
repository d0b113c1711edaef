"""A NIC that fails in a running job and is healed: the record of AllReduces before, meanwhile and after."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from optcc.errors import CodecError, RuntimeFault
from optcc.experiments.failure_trace import CONTENDERS, MPTCP, FailedNic, FailureTrace, TraceRow
from optcc.experiments.mid_collective import HOSTS, NIC
from optcc.experiments.passing_congestion import OURS
from optcc.experiments.reducing_job import TimedRun

RUNS = (
    *(TimedRun(0.0, 1.0, 0, 0), TimedRun(1.0, 1.2, 0, 0)),  # and one in which it fails
    *(TimedRun(2.2, 4.0, 1, 0), TimedRun(6.2, 1.5, 0, 1), TimedRun(7.7, 1.3, 0, 0)),
    *(TimedRun(9.0, 2.0, 2, 0), TimedRun(11.0, 1.1, 0, 0)),  # and one in which it is healed
)
ROW = TraceRow("NIC down", OURS, 1.0, 1.25, 3.0, 10.0, RUNS, has_hung=False)
HUNG = msgspec.structs.replace(ROW, contender=MPTCP, healed_s=-1.0, runs=RUNS[:2], has_hung=True)
RECORD = FailureTrace({"cores": 2}, {"optcc": "0"}, HOSTS, 1 << 24, (ROW, HUNG), {CONTENDERS[1]: "no mpirun"})


def test_runs_in_which_the_nic_changes_belong_to_no_phase() -> None:
    assert [len(ROW.phase(number)) for number in range(3)] == [2, 2, 1]
    assert ROW.ratios() == (1.1, (1.5 + 1.3) / 2 / 1.25, 1.1) and ROW.longest == 4.0
    assert HUNG.ratios() == (1.1, None, None)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    RECORD.write(path)
    assert FailureTrace.read(path) == RECORD
    assert RECORD.card().rows == (
        ("NIC down", OURS, "1.25", "1.10", "1.12", "1.10", "4.0", "3", "1"),
        ("NIC down", MPTCP, "1.25", "1.10", "-", "-", "hung", "-", "0"),
    )
    assert RECORD.remarks() == ("Open MPI ring: not run: no mpirun",)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (msgspec.structs.replace(ROW, contender="nobody"), r"rows\[0\].contender"),
        (msgspec.structs.replace(ROW, state="NIC aflame"), r"rows\[0\].state"),
        (msgspec.structs.replace(ROW, bound_s=0.0), r"rows\[0\].bound_s"),
        (msgspec.structs.replace(ROW, bound_left_s=0.5), r"rows\[0\].bound_left_s"),
        (msgspec.structs.replace(ROW, runs=()), r"rows\[0\].runs.seconds"),
    ],
)
def test_what_cannot_be_is_refused(wrong: TraceRow, field: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    replace(RECORD, rows=(wrong,)).write(path)
    with pytest.raises(CodecError, match=field):
        FailureTrace.read(path)


class Cables:
    """A fabric that notes what befalls it; with `refuses`, it cannot fail a NIC."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.noted: list[tuple[str, float]] = []
        self.refuses = refuses

    def fail(self, nic: str) -> None:
        assert nic == NIC
        if self.refuses:
            raise RuntimeFault("no such NIC")
        self.noted.append(("fail", time.monotonic()))

    def heal(self, nic: str) -> None:
        assert nic == NIC
        self.noted.append(("heal", time.monotonic()))


def test_the_nic_fails_once_is_healed_once_and_is_whole_at_the_end() -> None:
    cables = Cables()
    with FailedNic(cables, "down", 0.01, 0.02) as failure:  # type: ignore[arg-type]
        deadline_s = time.monotonic() + 10
        while failure.span[1] < 0 and time.monotonic() < deadline_s:
            time.sleep(0.005)
    assert [what for what, _ in cables.noted] == ["fail", "heal", "heal"]
    assert failure.span[1] - failure.span[0] >= 0.019
    assert failure.span[0] <= cables.noted[0][1] + 0.01


def test_a_job_that_is_over_before_has_no_nic_fail() -> None:
    cables = Cables()
    with FailedNic(cables, "down", 10.0, 10.0) as failure:  # type: ignore[arg-type]
        pass
    assert failure.span == [-1.0, -1.0] and [what for what, _ in cables.noted] == ["heal"]


def test_a_nic_that_cannot_fail_ends_the_measurement() -> None:
    with pytest.raises(RuntimeFault, match="no such NIC"), FailedNic(Cables(refuses=True), "down", 0.01, 0.01):  # type: ignore[arg-type]
        time.sleep(0.05)
