"""Random faults for ten minutes: what may befall the hosts at once, and the record."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from optcc.errors import EXIT_DONE, EXIT_REFUTED, CodecError
from optcc.experiments.soak import AT_ONCE, KINDS, LOSSES, Soak, SoakFault, SoakRun, draw_fault, keeps_joined

RUNS = (SoakRun(0.0, 0.5, 0, 0, False), SoakRun(0.6, 1.5, 1, 0, False), SoakRun(2.2, 0.6, 1, 0, False))
FAULT = SoakFault("down", 1, 0, (0.0, 0.0), 0.5, 1.0)
RECORD = Soak({"cores": 2}, {"optcc": "0"}, "4x2@400Mbit/s", 1 << 25, 1, 0.5, 0.51, (FAULT,), RUNS, 1.25)


def test_faults_of_every_kind_are_drawn_and_leave_all_hosts_joined() -> None:
    rng, kinds = random.Random(1), set[str]()
    for _ in range(300):
        present: list[SoakFault] = []
        while len(present) < AT_ONCE:
            drawn = draw_fault(rng, 4, 2, present, 0.0)
            if drawn is not None:
                present.append(drawn)
        assert len({(each.host, each.nic) for each in present}) == AT_ONCE
        assert keeps_joined(4, 2, {(each.host, each.nic) for each in present if each.kind in LOSSES})
        kinds |= {each.kind for each in present}
    assert kinds == set(KINDS)


@pytest.mark.parametrize(
    ("lost", "is_joined"),
    [
        ([], True),
        ([(0, 0), (0, 1)], False),
        ([(0, 0), (1, 1)], True),
        ([(0, 0), (1, 1), (2, 0), (3, 1)], False),
        ([(0, 0), (1, 1), (2, 0)], True),
    ],
)
def test_hosts_reach_each_other_over_a_third(lost: list[tuple[int, int]], is_joined: bool) -> None:
    assert keeps_joined(4, 2, lost) == is_joined


def test_a_record_is_read_as_it_was_written_and_shows_what_came_of_it(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    RECORD.write(path)
    assert Soak.read(path) == RECORD and RECORD.exit_code == EXIT_DONE
    names, values = zip(*RECORD.card().rows, strict=True)
    assert names[:3] == ("time", "faults", "AllReduces") and values[1].startswith("1 down, 0 carrier")
    assert values[:1] == ("3 s",) and values[2:] == ("3", "0", "0", "2", "1.020", "1.20", "3.0", "1.2 s")


def test_a_wrong_element_and_ranks_in_different_epochs_are_failures() -> None:
    for change in ({"wrong": 1}, {"is_split": True}):
        assert replace(RECORD, runs=(*RUNS, msgspec.structs.replace(RUNS[0], **change))).exit_code == EXIT_REFUTED


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (replace(RECORD, runs=()), r"runs.seconds"),
        (replace(RECORD, faults=(msgspec.structs.replace(FAULT, kind="tired"),)), r"faults\[0\].kind"),
    ],
)
def test_what_cannot_be_is_refused(wrong: Soak, field: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    wrong.write(path)
    with pytest.raises(CodecError, match=field):
        Soak.read(path)
