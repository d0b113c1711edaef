"""A NIC that fails in the middle of a collective: the record of what it costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from optcc.errors import CodecError
from optcc.experiments.fabric import FabricSpec, NicRates, NicTarget
from optcc.experiments.mid_collective import HOSTS, NIC, STATES, LossTrial, MidCollective, MidCollectiveRow

TRIALS = (LossTrial(1.0, 5.5, 5.0, 1, 0), LossTrial(2.0, 6.0, 5.0, 1, 0), LossTrial(1.5, 7.0, 5.0, 2, 3))
ROW = MidCollectiveRow("NIC down", "slices", 4.0, 5.4, 4.1, TRIALS)
RECORD = MidCollective({"cores": 2}, {"optcc": "0"}, HOSTS, 1 << 28, (ROW,))


def test_every_state_can_be_set_up() -> None:
    spec, target = FabricSpec.parse(HOSTS), NicTarget.parse(NIC)
    assert target.host < spec.hosts and target.nic is not None and target.nic < spec.nics
    for what in STATES.values():
        assert what == "down" or NicRates.parse(what).rate_out > 0


def test_a_record_is_read_as_it_was_written_and_shows_the_median(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    RECORD.write(path)
    assert MidCollective.read(path) == RECORD
    assert RECORD.card().rows == (("NIC down", "in slices", "3", "1.025", "1.35", "1.20", "1.10-1.40", "3"),)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (msgspec.structs.replace(ROW, arm="halves"), r"rows\[0\].arm"),
        (msgspec.structs.replace(ROW, trials=(LossTrial(1.0, 0.0, 5.0, 1, 0),)), r"rows\[0\].trials.seconds"),
        (msgspec.structs.replace(ROW, trials=()), r"rows\[0\].trials.seconds"),
    ],
)
def test_what_cannot_be_is_refused(wrong: MidCollectiveRow, field: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    replace(RECORD, rows=(wrong,)).write(path)
    with pytest.raises(CodecError, match=field):
        MidCollective.read(path)
