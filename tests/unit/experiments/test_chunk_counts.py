"""AllReduce by the number of chunks: the formulas at one chunk, falling times, and the record of this code."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from optcc.errors import CodecError
from optcc.experiments.chunk_counts import ALLREDUCE, BALANCE, CHUNKS, SCHEDULES, ChunkCounts, command
from optcc.experiments.made import unstamped


def test_more_chunks_take_less_time_and_one_loses_to_balance() -> None:
    record = ChunkCounts.read()
    assert {row.schedule for row in record.rows} == set(SCHEDULES)
    times = [row.over_fault_free for row in record.of(ALLREDUCE)]
    assert [row.chunks for row in record.of(ALLREDUCE)] == list(CHUNKS)
    assert times == sorted(times, reverse=True)
    balance = record.of(BALANCE)[0].over_fault_free
    assert balance == pytest.approx(1.5, rel=1e-3), "a host has two thirds of its bandwidth"
    assert times[0] > balance > times[-1]
    assert record.bound == pytest.approx(9 / 8), "2 l (p - 1)/(l (p - 1) + 1) over 2 (p - 1)/p, l = 3/2, p = 3"


def test_the_record_is_that_of_this_code(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    assert CliRunner().invoke(command, ["-o", str(output)], standalone_mode=False).exit_code == 0
    assert unstamped(output.read_bytes()) == unstamped(ChunkCounts.own_path.read_bytes())


def test_a_time_below_the_bound_is_refused() -> None:
    data = ChunkCounts.read().to_bytes().replace(b'"over_fault_free": 1.', b'"over_fault_free": 0.', 1)
    with pytest.raises(CodecError, match=r"rows\[0\]\.over_fault_free: .*no less than the bound"):
        ChunkCounts.from_bytes(data, "r")
