"""The battery for a GPU on a stand-in: its parts find what is right and what is wrong, and one that dies is a line."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from optcc.errors import CodecError, EnvironmentMissing
from optcc.experiments import gpu_battery, gpu_collectives
from optcc.experiments.bench import Variant
from optcc.experiments.gpu_battery import PARTS, GpuBattery, command, run_part
from optcc.experiments.gpu_collectives import BatteryLine, BatteryTiming, Found
from optcc.experiments.kernel_bench import KernelTiming
from optcc.runtime.cupy_kernels import CupyKernels
from tests.unit.stand_in_cupy import StandIn

ROOT = Path(__file__).parents[3]


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, seed: int) -> StandIn:
    """A GPU that is not there, and little to do on it."""
    made = StandIn(seed, 1)
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setattr(gpu_collectives, "_variants", lambda quick: [Variant("int8", "sum", 0, (0, 1001))])
    monkeypatch.setattr(gpu_collectives, "_long_sizes", lambda quick: (1 << 12,))
    monkeypatch.setattr(gpu_collectives, "QUICK_MANY", 3)
    return made


@pytest.mark.parametrize("part", ["overlap", "step", "allreduce", pytest.param("staged", marks=pytest.mark.slow)])
def test_a_part_finds_that_all_is_right(part: str, cupy: StandIn) -> None:
    found = PARTS[part](True)
    assert (found.line.part, found.line.wrong, found.line.error) == (part, 0, "")
    assert found.line.cases > 0
    assert bool(found.timings) == (part != "staged")
    assert all(row.seconds > 0 and row.against_seconds > 0 for row in found.timings)
    if part == "staged":
        assert found.line.text == "staged: LoopbackTransport reads and writes the host's memory"
    if part == "overlap":
        (row,) = found.timings
        assert row.ratio < 1, "three streams are one after the other"


def test_a_part_finds_what_is_wrong(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CupyKernels, "batch", lambda *_: None)
    monkeypatch.setattr(CupyKernels, "forward", lambda *_: None)
    assert PARTS["step"](True).line.wrong > 0


def test_a_process_prints_what_its_part_has_found(cupy: StandIn) -> None:
    result = CliRunner().invoke(command, ["--quick", "--part", "overlap"], standalone_mode=False)
    assert result.return_value == 0, result.output
    found = msgspec.json.decode(result.output.splitlines()[-1], type=Found)
    assert found.line.part == "overlap" and found.timings[0].what == "all three at once"


@pytest.mark.slow
def test_a_part_that_dies_is_a_line_of_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Here each process finds no GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    line = run_part("overlap", True, 60.0).line
    assert line.error.startswith("exit 2: optcc: GPU: ")
    record = GpuBattery({"name": "stand-in"}, {}, {}, True, (line,), (), ())
    assert record.exit_code == 1
    assert record.remarks()[-1] == "# Parts that have not ended: overlap FAILED"
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(slow))
    assert run_part("overlap", True, 0.0).line.error == "not done after 1 s"


def test_the_record_comes_back_and_is_checked() -> None:
    line = BatteryLine("staged", 10, 0, "staged: a reason", 1.0)
    timing = BatteryTiming("step", "1 KiB", 1024, 3.0, "the host", 2.0)
    kernel = KernelTiming("int8", "sum", 8, 3, [1.0], [1.0])
    record = GpuBattery({"name": "stand-in"}, {}, {}, False, (line,), (timing,), (kernel,))
    assert GpuBattery.from_bytes(record.to_bytes()) == record
    assert record.exit_code == 0 and "10 cases OK" in record.remarks()[0]
    cells = [cell for row in record.card().rows for cell in row]
    assert "1.50 of the host, 2000000.0 us" in cells and "staged: a reason" in cells
    wrong = msgspec.structs.replace(line, wrong=1)
    assert GpuBattery({"name": "x"}, {}, {}, False, (wrong,), (), ()).exit_code == 1
    data = record.to_bytes().replace(b'"against_seconds": 2.0', b'"against_seconds": 0.0')
    with pytest.raises(CodecError, match=r"timings\[0\]\.seconds"):
        GpuBattery.from_bytes(data)


def test_without_a_gpu_it_says_so_and_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    out = tmp_path / "record.json"
    with pytest.raises(EnvironmentMissing, match="GPU: "):
        CliRunner().invoke(command, ["-o", str(out)], standalone_mode=False, catch_exceptions=False)
    result = CliRunner().invoke(command, ["--allow-missing", "-o", str(out)], standalone_mode=False)
    assert result.return_value == 0 and "# GPU battery: not run: GPU: " in result.output
    assert not out.exists()


def test_a_record_that_comes_with_the_package_is_of_a_gpu() -> None:
    if GpuBattery.own_path.exists():
        assert GpuBattery.read().device["name"] != "stand-in"


@pytest.mark.slow
def test_the_whole_battery_on_the_stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As it is run on a GPU: processes, a record, the exit code."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/tests/stand_in")
    monkeypatch.setitem(sys.modules, "cupy", StandIn())
    monkeypatch.setattr(gpu_battery, "QUICK_BUDGET_S", 400.0)
    out = tmp_path / "record.json"
    result = CliRunner().invoke(command, ["--quick", "-o", str(out)], standalone_mode=False)
    assert result.return_value == 0, result.output
    record = GpuBattery.read(out)
    assert [line.part for line in record.lines] == list(PARTS)
    assert all(not line.error and not line.wrong for line in record.lines)
    assert sum(line.cases for line in record.lines) > 500
    assert record.device["name"] == "stand-in" and record.is_quick
    assert {row.part for row in record.timings} == {"overlap", "step", "allreduce", "processes"}
    assert len(record.kernels) > 10
