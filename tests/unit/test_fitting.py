"""Sizes and segments that fit a format: those found do, and the command names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from optcc.cli import run
from optcc.fitting import find_fitting
from optcc.planner import build
from optcc.topology import Topology
from optcc.verify.plan.limits import check_limits


@pytest.mark.parametrize(
    ("name", "ranks", "target"),
    [("ring", 8, "rccl"), ("optcc", 4, "msccl-xml"), ("ring", 3, "mscclpp-json"), ("recursive-doubling", 4, "msccl")],
)
def test_what_is_found_fits(name: str, ranks: int, target: str) -> None:
    topology = Topology.parse(f"{ranks}@50GB/s,1=25GB/s")
    found = find_fitting(name, topology, 100_003 * 4, target)
    assert found is not None
    size, segments = found
    assert 100_003 * 4 <= size < 110_000 * 4
    assert check_limits(build(name, topology, size, segments=segments).plan, target) is None


def test_what_never_fits_is_not_found() -> None:
    assert find_fitting("ring", Topology.parse("40@50GB/s"), 4096, "mscclpp-json") is None


def test_a_refusal_names_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ring.xml"
    words = ["compile", "ring", "--topology", "8@50GB/s", "--format", "msccl-xml", "--target", "rccl", "-o", str(path)]
    assert run([*words, "--size", "1MiB", "--segments", "16"]) == 2
    out = capsys.readouterr().err
    assert out.startswith("optcc: rccl: ") and out.endswith("; --size 1048576 --segments 4 would fit\n")
    assert not path.exists()
    assert run([*words, "--size", "1MiB", "--segments", "4"]) == 0
    capsys.readouterr()
    assert run(["verify", str(path), "--target", "rccl"]) == 0
    assert run([*words, "--size", "1MiB", "--format", "goal"]) == 2
    assert "needs --format msccl-xml" in capsys.readouterr().err


def test_pad_rounds_the_size_up_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ring.xml"
    words = ["compile", "ring", "--topology", "4@50GB/s", "--size", "1000004", "-o", str(path)]
    assert run([*words, "--format", "msccl-xml", "--pad"]) == 0
    assert capsys.readouterr().err.startswith("optcc: padded from 1000004 to 1000448 B, 8 segments")
    assert b'minBytes="1000448"' in path.read_bytes()
    assert run([*words, "--format", "goal", "--pad"]) == 2
    assert "--pad with --format goal" in capsys.readouterr().err
