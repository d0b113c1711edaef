"""Congestion that comes and goes: the record of what it costs."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from optcc.errors import CodecError, RuntimeFault
from optcc.experiments.fabric import FabricSpec, NicRates, NicTarget
from optcc.experiments.passing_congestion import (
    CONGESTED,
    FULL,
    HOSTS,
    NIC,
    OPEN_MPI,
    OURS,
    Congestion,
    CongestionRow,
    PassingCongestion,
)
from optcc.experiments.reducing_job import TimedRun

RUNS = (TimedRun(0.0, 1.0, 0, 0), TimedRun(1.5, 3.0, 2, 1))
"""One before the congestion; one with 0.5 s, 1 s of congestion, and 1.5 s. Between the two nothing runs."""
ROW = CongestionRow(1.0, OURS, 0.5, 1.0, 0.6, ((2.0, 3.0), (9.0, 9.5)), RUNS)
RECORD = PassingCongestion({"cores": 2}, {"optcc": "0"}, HOSTS, 1 << 26, (ROW,))


class Rates:
    """A fabric that keeps the rates that it is given; the one that is called `refused` it refuses."""

    def __init__(self, refused: str = "") -> None:
        self.given: list[NicRates] = []
        self.refused = refused

    def set_rate(self, nic: str, rates: NicRates) -> None:
        assert nic == NIC
        if self.refused and rates == NicRates.parse(self.refused):
            raise RuntimeFault("no such queue")
        self.given.append(rates)


def test_the_nic_is_one_of_the_hosts() -> None:
    spec, target = FabricSpec.parse(HOSTS), NicTarget.parse(NIC)
    assert target.host < spec.hosts and target.nic is not None and target.nic < spec.nics
    assert HOSTS.endswith(FULL) and NicRates.parse(CONGESTED).rate_out < NicRates.parse(FULL).rate_out


def test_what_was_possible_counts_each_state_of_the_nics_and_no_time_between_runs() -> None:
    assert ROW.possible == (1.0 + 2.0) / 0.5 + 1.0 / 1.0
    assert ROW.ratio == 3.5 and ROW.changes == 2


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    RECORD.write(path)
    assert PassingCongestion.read(path) == RECORD
    assert RECORD.card().rows == (("1 s", OURS, "1.200", "2.00", "3.50", "6.00", "2", "2", "2", "1"),)
    peer = replace(RECORD, rows=(msgspec.structs.replace(ROW, contender=OPEN_MPI),))
    assert peer.card().rows[0][-2] == "-"  # MPI has no plans


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (msgspec.structs.replace(ROW, contender="nobody"), r"rows\[0\].contender"),
        (msgspec.structs.replace(ROW, bound_s=0.0), r"rows\[0\].bound_s"),
        (msgspec.structs.replace(ROW, bound_congested_s=0.4), r"rows\[0\].bound_congested_s"),
        (msgspec.structs.replace(ROW, runs=()), r"rows\[0\].runs.seconds"),
    ],
)
def test_what_cannot_be_is_refused(wrong: CongestionRow, field: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    replace(RECORD, rows=(wrong,)).write(path)
    with pytest.raises(CodecError, match=field):
        PassingCongestion.read(path)


def test_congestion_comes_and_goes_and_the_nic_has_its_rate_at_the_end() -> None:
    rates = Rates()
    with Congestion(rates, 0.01) as congestion:  # type: ignore[arg-type]
        deadline_s = time.monotonic() + 10
        while len(congestion.spans) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert len(congestion.spans) >= 3
    assert rates.given[:4] == [NicRates.parse(CONGESTED), NicRates.parse(FULL)] * 2
    assert rates.given[-1] == NicRates.parse(FULL)
    moments = [each for span in congestion.spans for each in span]
    assert all(one < next_one for one, next_one in pairwise(moments))


def test_a_rate_that_cannot_be_set_ends_the_measurement() -> None:
    rates = Rates(refused=FULL)
    with pytest.raises(RuntimeFault, match="no such queue"), Congestion(rates, 0.01):  # type: ignore[arg-type]
        time.sleep(0.05)
