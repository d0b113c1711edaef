"""The states of which nobody is told, and their record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from optcc.errors import CodecError
from optcc.experiments.fabric import FabricSpec, NicRates, NicTarget
from optcc.experiments.peers_comparison import REPEATS_MAX, repeat_disturbed
from optcc.experiments.record import STEAL_MAX, BenchTiming, Samples
from optcc.experiments.untold import (
    RANDOM_FABRICS,
    SEED,
    STATES,
    Untold,
    UntoldRow,
    UntoldState,
    random_state,
)

PEERS_S: dict[str, tuple[float, ...]] = {"Gloo": (1.8, 1.9, 2.4)}
TIMES = (1.01, 1.4, 1.02)
ROW = UntoldRow("healthy", "4x2@400Mbit/s", {}, "4@100MB/s", 1 << 26, 1.0, TIMES, 1.01, "shares", 384, 0, PEERS_S)


@pytest.mark.parametrize("state", [*STATES, *map(random_state, range(SEED, SEED + RANDOM_FABRICS))])
def test_every_state_can_be_set_up(state: UntoldState) -> None:
    spec = FabricSpec.parse(state.fabric)
    down = [0] * spec.hosts
    for name, what in state.nics.items():
        target = NicTarget.parse(name)
        assert target.host < spec.hosts and target.nic is not None and target.nic < spec.nics
        if what == "down":
            down[target.host] += 1
        else:
            NicRates.parse(what)
    assert max(down) < spec.nics, "every host keeps a NIC"


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = Untold({"cores": 2}, {"optcc": "0"}, (ROW,))
    path = tmp_path / "untold.json"
    record.write(path)
    assert Untold.read(path) == record
    assert "1.020 (1.010 to 1.400)" in record.markdown()
    assert "1.90" in record.markdown()


@pytest.mark.parametrize(
    ("wrong", "named"), [({"seconds": (1.0, 0.0)}, "seconds"), ({"peers_s": {"Gloo": ()}}, r"peers_s\['Gloo'\]")]
)
def test_a_time_that_cannot_be_is_refused(wrong: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = tmp_path / "untold.json"
    replace(Untold({"cores": 2}, {"optcc": "0"}, (msgspec.structs.replace(ROW, **wrong),))).write(path)
    with pytest.raises(CodecError, match=rf"rows\[0\].{named}"):
        Untold.read(path)


def test_a_job_of_ours_is_repeated_while_most_of_its_runs_are_disturbed() -> None:
    quiet, noisy = STEAL_MAX, 2 * STEAL_MAX

    def tries_of(*steals: tuple[float, ...]) -> int:
        timings = iter(
            BenchTiming(
                *("auto", "healthy", "4", 4, 1 << 20, "float32", "sum", 4, "", None, 1.0),
                out_of_place=Samples([1.0] * len(steal), list(steal), 0),
                in_place=None,
            )
            for steal in steals
        )
        tries = repeat_disturbed(lambda: next(timings), lambda timing: timing.samples.median_steal)
        assert tries[0].samples.median_steal == min(each.samples.median_steal for each in tries)
        return len(tries)

    assert tries_of((quiet, quiet, noisy)) == 1
    assert tries_of((quiet, noisy, noisy), (noisy,) * 3, (quiet,) * 3, (quiet,) * 3) == 3
    assert tries_of(*[(noisy,) * 3] * (REPEATS_MAX + 5)) == REPEATS_MAX + 1


def test_a_row_that_was_disturbed_says_so() -> None:
    record = Untold({"cores": 2}, {"optcc": "0"}, (msgspec.structs.replace(ROW, is_disturbed=True),))
    assert "1.020 (1.010 to 1.400), disturbed" in record.markdown()
