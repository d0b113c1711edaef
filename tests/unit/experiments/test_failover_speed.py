"""The record of what a NIC's failure costs: its arithmetic, the docs that show it, and a failure of each kind."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from optcc.errors import CodecError
from optcc.experiments import failover_speed
from optcc.experiments.fabric import RUN_ROOT, Fabric, NicTarget
from optcc.experiments.failover_speed import (
    GOALS,
    KINDS,
    LEFT,
    NOTHING,
    FailoverSpeed,
    Trial,
    command,
    measure,
    percentile,
    triggers,
)
from optcc.experiments.record import STEAL_MAX


def trial(kind: str = "down", **changes: object) -> Trial:
    """A failure in the middle of a run of 0.2 s. What is left takes 0.4 s, so without a stall the run takes 0.3 s."""
    return msgspec.structs.replace(Trial(kind, "h1.eth1", 0.1, 0.001, 0.31, 0.4, 0.1, 0.0, 0), **changes)


def record(*trials: Trial) -> FailoverSpeed:
    """Of healthy runs of 0.2 s."""
    return FailoverSpeed(3, 2, "200Mbit/s", 8 << 20, 1, {"cores": 2}, {"optcc": "0.1"}, (0.2, 0.19, 0.23), trials)


def test_the_record_has_every_case() -> None:
    shown = FailoverSpeed.read()
    assert {each.kind for each in shown.trials} == set(KINDS) and shown.wrong == 0


def test_a_stall_is_what_the_bandwidths_do_not_explain() -> None:
    found = record(trial(), trial(run_s=0.32), trial(at_s=0.15, run_s=0.25), trial("reset", next_s=0.2, run_s=0.2))
    assert found.stalls_s("down") == pytest.approx([0.01, 0.02, 0.0])
    assert found.stalls_s("reset") == pytest.approx([0.0])
    assert found.stalls_s(NOTHING) == pytest.approx([0.0, -0.01, 0.03])
    # It was over before the failure could matter: no share is left.
    assert record(trial(at_s=0.25, run_s=0.26)).stalls_s("down") == pytest.approx([0.01])


def test_the_next_run_is_held_against_the_rates_that_are_left() -> None:
    """A ring of three sends and receives 4/3 of the message; headers are 0.74 %."""
    whole_s = 4 / 3 * (8 << 20) / 50e6 * 9014 / 8948
    for kind, share in ((NOTHING, 1), *LEFT.items()):
        assert record().by_rates_s(kind) == pytest.approx(whole_s * 2 / (1 + float(share)))


def test_trials_that_the_hypervisor_disturbed_do_not_count_unless_all_are() -> None:
    loud = trial(run_s=3.0, next_s=2.0, steal=2 * STEAL_MAX)
    assert record(trial(), loud).stalls_s("down") == pytest.approx([0.01])
    assert record(loud).next_s("down") == 2.0


def test_goals_that_are_missed_are_named() -> None:
    many = [trial()] * 99
    assert record(*many, trial(run_s=0.34)).misses() == []
    assert record(*many[:50], *[trial(run_s=0.36)] * 50).misses() == ["down: stall, 99 %: 60 ms, above 50 ms"]
    missed = record(trial("blackhole", run_s=0.46), trial("carrier", wrong=3)).misses()
    assert missed[0] == "3 wrong elements"
    assert [line.partition(":")[0] for line in missed[1:]] == ["blackhole", "blackhole"]
    assert {"down", "carrier", "blackhole", "blackhole-in", "blackhole-out"} == set(GOALS)


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1)) == (50, 99, 100)


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        (b"optcc-failover-speed/1", b"optcc-failover-speed/2", r"\$\.format"),
        (b'"next_s"', b'"next"', r"\$\.trials"),
        (b'"kind": "down"', b'"kind": "fire"', r"\$\.trials\[0\]\.kind: 'fire': must be one of down, carrier"),
        (b'"run_s": 0.31', b'"run_s": 0.05', r"\$\.trials\[0\]\.at_s: 0.1: must be within the run of 0.05 s"),
        (b'"next_s": 0.4', b'"next_s": 0.0', r"\$\.trials\[0\]\.next_s"),
        (b'"healthy_s": [', b'"healthy_s": [0.0,', r"\$\.healthy_s"),
        (b"{", b"[", r"^record 'x.json': "),
    ],
)
def test_a_damaged_record_is_refused(before: bytes, after: bytes, path: str) -> None:
    data = record(trial()).to_bytes()
    assert FailoverSpeed.from_bytes(data) == record(trial())
    assert before in data
    with pytest.raises(CodecError, match=path):
        FailoverSpeed.from_bytes(data.replace(before, after, 1), "x.json")


def test_the_command_says_what_is_missed_and_fails_for_wrong_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "record.json"
    for wrong in (0, 2):
        made = record(trial(run_s=0.5, wrong=wrong))
        monkeypatch.setattr(failover_speed, "measure", lambda *given, made=made: made)
        said = CliRunner().invoke(command, ["-o", str(out)], standalone_mode=False)
        assert said.return_value == (1 if wrong else 0)
        assert FailoverSpeed.read(out) == made
        assert "missed: down: stall, median: 200 ms, above 12 ms" in said.output
    said = CliRunner().invoke(command, ["-o", str(out), "--markdown"], standalone_mode=False)
    assert said.output == made.markdown()


@pytest.mark.netns
@pytest.mark.parametrize(
    "kinds",
    [
        ("down", "reset", "degraded"),
        pytest.param(KINDS, marks=[pytest.mark.slow, pytest.mark.realtime, pytest.mark.nft]),
    ],
)
def test_a_nic_fails_and_every_bit_is_right(kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Short messages: how long it takes is not looked at, nor whether runs are as fast as before."""
    monkeypatch.setattr(failover_speed, "BACK_SHARE", 1e9)
    found = measure(failures=1, seed=7, kinds=kinds, rate="100Mbit/s", size_bytes=1 << 20)
    assert [each.kind for each in found.trials] == list(kinds)
    assert found.wrong == 0
    assert len(found.healthy_s) == failover_speed.HEALTHY_RUNS + len(kinds)
    assert FailoverSpeed.from_bytes(found.to_bytes()) == found
    for each in found.trials:
        assert 0 < each.at_s < each.run_s
        assert each.back_s >= 0
    assert not list(RUN_ROOT.glob(f"failover-{os.getpid()}*"))


@pytest.mark.nft
def test_each_failure_is_a_line_that_a_program_waits_for() -> None:
    fabric = Fabric("trial")
    assert triggers(fabric, "down", NicTarget(1, 0)) == [
        (["ip", "-n", "optcc-trial-h1", "-batch", "-"], "link set eth0 down\n")
    ]
    assert triggers(fabric, "carrier", NicTarget(2, 1))[0][1] == "link set h2e1 down\n"
    ((argv, rules),) = triggers(fabric, "blackhole-in", NicTarget(0, 1))
    assert argv[:4] == ["ip", "netns", "exec", "optcc-trial-core"] and "egress" in rules and "ingress" not in rules
    ((argv, _),) = triggers(fabric, "reset", NicTarget(0, 1))
    assert argv[3] == "optcc-trial-h0" and argv[-1].endswith("src 10.101.0.1")
