"""What other simulators say of our exports: read from what they print, refused where they do not end."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from optcc.errors import CodecError, EnvironmentMissing, InputError
from optcc.experiments.simulator_exports import (
    ASTRA_SIM,
    CHAKRA_PIECES,
    GOAL_SLOTS,
    LOGGOPSIM,
    SimulatorExports,
    command,
    read_astra_sim,
    read_loggopsim,
    run_loggopsim,
)
from optcc.planner import build
from optcc.topology import Topology

FINISHED = "[workload] sys[{}] finished, {} cycles, exposed communication 0 cycles.\n"


def test_loggopsim_is_read_in_bytes_at_the_rate() -> None:
    said = "PERFORMANCE: Processes: 4\nMaximum finishing time at host 3: 50000000 (0.05 s)\n"
    assert read_loggopsim(said) == 1e-3
    with pytest.raises(InputError, match="no finishing time in 'Error: deadlock'"):
        read_loggopsim("Error: deadlock")


def test_astra_sim_is_read_in_nanoseconds_of_the_last_rank() -> None:
    said = FINISHED.format(0, 1000) + FINISHED.format(1, 4000)
    assert read_astra_sim(said, 2) == pytest.approx(4e-6)
    with pytest.raises(InputError, match="2 of 3 ranks finished"):
        read_astra_sim(said, 3)


def test_a_tool_that_is_not_there_is_named(tmp_path: Path) -> None:
    topology = Topology.parse("2@50GB/s")
    plan = build("ring", topology, 1000, segments=1, slots=1, ports="fifo").plan
    with pytest.raises(EnvironmentMissing, match=r"txt2bin: No such file or directory: docs/exports.md"):
        run_loggopsim(tmp_path / "none", plan, topology, tmp_path)
    refused = CliRunner().invoke(command, [])
    assert isinstance(refused.exception, InputError) and "one of them must be given" in str(refused.exception)


def test_the_record_has_what_the_page_says() -> None:
    record = SimulatorExports.read()
    for slots in GOAL_SLOTS:
        ratios = [row.ratio for row in record.rows if row.tool == LOGGOPSIM and row.slots == slots]
        apart = [ratio for ratio in ratios if abs(ratio - 1) > 0.001]
        assert len(ratios) == 35 and apart == pytest.approx([1.029] if slots == 8 else [], abs=1e-3)
    for pieces, most in zip(CHAKRA_PIECES, (2.0, 1.062), strict=True):
        ratios = [row.ratio for row in record.rows if row.tool == ASTRA_SIM and row.pieces == pieces]
        assert len(ratios) == 30 and max(ratios) == pytest.approx(most, abs=1e-3) and min(ratios) > 0.99
    wrong = msgspec.structs.replace(record.rows[0], took_s=0.0)
    with pytest.raises(CodecError, match=r"rows\[0\].took_s"):
        SimulatorExports.from_bytes(SimulatorExports(record.tools, record.size_bytes, (wrong,)).to_bytes())
