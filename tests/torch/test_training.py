"""A small training on emulated hosts: with a NIC that is lost and back every bit is that of the healthy one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from optcc.experiments.fabric import can_make_namespaces
from optcc.experiments.training_failures import TrainingFailures, command

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: make test-torch"),
    pytest.mark.skipif(can_make_namespaces() is not None, reason="needs the right to make network namespaces"),
]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_a_lost_nic_changes_no_bit_of_a_training(wrap: str, tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    words = ["--quick", "--steps", "10", "--event", "4:down:h1.eth0", "--event", "7:back:h1.eth0"]
    said = CliRunner().invoke(
        command,
        [*words, "--wrap", wrap, "--way", "optcc-stay", "--way", "optcc-change", "-o", str(out)],
        standalone_mode=False,
    )
    assert said.return_value == 0, said.output
    found = TrainingFailures.read(out)
    healthy, lost, *changing = found.runs
    assert [(each.plans, len(each.events)) for each in found.runs] == [
        ("stay", 0),
        ("stay", 2),
        ("change", 0),
        ("change", 2),
    ]
    assert found.is_same(lost) and lost.losses[-1] < lost.losses[0]
    assert not any(each.ended for each in changing)
    assert healthy.notes == () and any("eth0 is down" in note for _, _, note in lost.notes)
    if wrap == "ddp":
        assert all(each.buckets >= 1 and each.in_flight >= 1 for each in found.runs)
