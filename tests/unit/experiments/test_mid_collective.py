"""A NIC that fails in the middle of a collective: the record of what it costs."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from optcc.errors import CodecError
from optcc.experiments import mid_collective
from optcc.experiments.fabric import Fabric, FabricSpec, NicRates, NicTarget
from optcc.experiments.mid_collective import (
    APART,
    HOSTS,
    LOSSES,
    REPEATS_MAX,
    LossTrial,
    MidCollective,
    MidCollectiveRow,
)

TRIALS = (
    LossTrial(1.0, 5.5, 5.0, 1, 5.5, 0, 0.0),
    LossTrial(2.0, 6.0, 5.0, 1, 5.6, 0, 0.01),
    LossTrial(1.5, 7.0, 5.0, 2, 5.67, 3, 0.0),
)
ROW = MidCollectiveRow("NIC down", "slices", 4.0, 5.4, 4.1, TRIALS)
RECORD = MidCollective({"cores": 2}, {"optcc": "0"}, HOSTS, 1 << 28, (ROW,))


def test_every_state_can_be_set_up() -> None:
    spec = FabricSpec.parse(HOSTS)
    for nics in LOSSES.values():
        for name, what in nics.items():
            target = NicTarget.parse(name)
            assert target.host < spec.hosts and target.nic is not None and target.nic < spec.nics
            assert what == "down" or NicRates.parse(what).rate_out > 0


def test_two_hosts_apart_have_a_nic_each_and_no_rail_in_common() -> None:
    lost = [NicTarget.parse(name) for name in LOSSES[APART]]
    hosts, nics = zip(*((each.host, each.nic) for each in lost), strict=True)
    assert len(set(hosts)) == 2 and set(nics) == set(range(FabricSpec.parse(HOSTS).nics))


def test_a_record_is_read_as_it_was_written_and_shows_the_median(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    RECORD.write(path)
    assert MidCollective.read(path) == RECORD
    assert RECORD.card().rows == (("NIC down", "in slices", "3", "1.025", "1.35", "1.20", "1.10-1.40", "1.04", "3"),)


class Job:
    """A job all of whose runs take four seconds."""

    def run(self) -> float:
        return 4.0

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("steals", "kept", "repeated"),
    [
        ([0.0, 0.0], [0.0, 0.0], 0),
        ([0.5, 0.0, 0.4, 0.01], [0.0, 0.01], 2),
        ([0.5] * (REPEATS_MAX + 2), [0.5, 0.5], REPEATS_MAX),
    ],
)
def test_trials_that_the_hypervisor_disturbed_are_repeated(
    steals: list[float], kept: list[float], repeated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = iter(steals)
    hosts = SimpleNamespace(state=lambda: None)
    monkeypatch.setattr(Fabric, "up", lambda _: contextlib.nullcontext(hosts))
    monkeypatch.setattr(mid_collective, "in_state", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(mid_collective, "bound_of", lambda *_: 4.0)
    monkeypatch.setattr(mid_collective, "ReducingJob", lambda *_: Job())
    monkeypatch.setattr(mid_collective, "_recover", lambda *_: None)
    monkeypatch.setattr(mid_collective, "_trial", lambda *_: LossTrial(1.0, 5.0, 5.0, 1, 5.0, 0, next(drawn)))
    row = mid_collective.measure_row("NIC down", "slices", 2, 1 << 28)
    assert [each.steal for each in row.trials] == kept and row.repeated == repeated
    assert not list(drawn)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (msgspec.structs.replace(ROW, arm="halves"), r"rows\[0\].arm"),
        (msgspec.structs.replace(ROW, trials=(LossTrial(1.0, 0.0, 5.0, 1, 5.5, 0, 0.0),)), r"rows\[0\].trials.seconds"),
        (msgspec.structs.replace(ROW, trials=(LossTrial(1.0, 5.5, 5.0, 1, 0.0, 0, 0.0),)), r"rows\[0\].trials.next_s"),
        (msgspec.structs.replace(ROW, trials=()), r"rows\[0\].trials.seconds"),
    ],
)
def test_what_cannot_be_is_refused(wrong: MidCollectiveRow, field: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    replace(RECORD, rows=(wrong,)).write(path)
    with pytest.raises(CodecError, match=field):
        MidCollective.read(path)
