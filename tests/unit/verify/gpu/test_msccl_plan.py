"""Algorithms in MSCCL's XML as plans: what they take, that they are the same algorithm, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optcc import cli
from optcc.errors import InputError, OptccError, PlanError
from optcc.export import write_msccl_xml
from optcc.planner import build
from optcc.simulate import simulate
from optcc.topology import Topology
from optcc.verdict import PROVED, REFUTED
from optcc.verify.gpu.msccl import verify_msccl
from optcc.verify.gpu.msccl_plan import plan_of_msccl
from optcc.verify.plan import verify_plan
from tests.unit.verify.gpu.msccl_sample import algo, ring

SIZE = 64 * 5040
LIBRARY = (
    "ring",
    "bidirectional-ring",
    "recursive-doubling",
    "rabenseifner",
    "direct",
    "double-binary-tree",
    "optimal",
)


@pytest.mark.parametrize("p", [2, 3, 8])
@pytest.mark.parametrize("model", ["fifo", "exclusive", "fair"])
def test_a_ring_takes_its_closed_form(p: int, model: str) -> None:
    plan = plan_of_msccl(ring(p), 4000 * p)
    assert verify_plan(plan).verdict == PROVED
    found = simulate(plan, Topology.parse(f"{p}@1GB/s"), model=model).seconds  # type: ignore[arg-type]
    assert found == pytest.approx(2 * (p - 1) * 4e-6)


@pytest.mark.parametrize("name", LIBRARY)
def test_an_exported_plan_comes_back_as_one_that_is_proved(name: str) -> None:
    """By the verifier of plans, which knows nothing of files; its time is that of the plan, or longer."""
    topology = Topology.parse("4@1GB/s")
    for segments in (1, 2):
        plan = build(name, topology, SIZE, segments=segments, slots=2, ports="fifo").plan
        back = plan_of_msccl(write_msccl_xml(plan), SIZE)
        assert verify_plan(back).verdict == PROVED
        moved = [(each.transfers.src != each.transfers.dst) * each.transfers.bytes for each in (plan, back)]
        assert moved[0].sum() == moved[1].sum()
        times = [simulate(each, topology, model="fifo").seconds for each in (plan, back)]
        assert times[0] * (1 - 1e-9) <= times[1] <= 1.3 * times[0]


def test_all_kinds_of_steps_come_back() -> None:
    """A copy, and a chain of reductions, which is an instruction for each."""
    blocks = [
        [(1, 1, 0, "s i0 i0; r i0 i0")],
        [(0, 0, 0, "r s0 s0; cpy i0 s1; re s0 s1; re s0 i0; s i0 i0")],
    ]
    plan = plan_of_msccl(algo(blocks), 400)
    assert len(plan) == 2 + 5 and sorted(plan.transfers.bytes.tolist()) == [400] * 5
    assert simulate(plan, Topology.parse("2@1GB/s"), model="fifo").seconds == pytest.approx(8e-7)


def test_a_wrong_algorithm_is_a_wrong_plan() -> None:
    data = ring(4, ["s", "rrcs", "rcs", "rcs", "rcs", "rcs", "r"])
    assert verify_msccl(data).verdict == REFUTED
    assert verify_plan(plan_of_msccl(data, 1600)).verdict == REFUTED


def test_what_cannot_be_timed_is_refused() -> None:
    for data, size, rule in (
        (ring(4), 1602, "must be a multiple of 16: the file has 4 chunks"),
        (ring(4), 0, "must be a multiple of 16"),
        (algo([[(1, 1, 0, "s i0 i0")], [(0, 0, 0, "r i0 i0")]], coll="custom"), 400, "coll custom"),
    ):
        with pytest.raises(InputError, match=rule):
            plan_of_msccl(data, size)
    with pytest.raises(PlanError, match="wait for each other"):
        plan_of_msccl(algo([[(1, 1, 0, "r i0 i0; s i0 i0")], [(0, 0, 0, "rrc i0 i0; s i0 i0")]]), 400)
    with pytest.raises(OptccError):
        plan_of_msccl(b"<algo/>", 400)


def test_the_commands_take_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ring.xml"
    path.write_bytes(ring(4))
    words = [str(path), "--topology", "4@1GB/s", "--size", "16000"]
    assert cli.run(["simulate", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["seconds"] == pytest.approx(2.4e-5) and told["ratio"] == pytest.approx(1) and told["verdict"] == PROVED
    assert cli.run(["show", *words]) == 0
    assert "messages" in capsys.readouterr().out
    path.write_bytes(ring(4, ["s", "rrcs", "rcs", "rcs", "rcs", "rcs", "r"]))
    assert cli.run(["simulate", *words]) == 1
    assert "ring.xml: refuted; the time is of a file that would not give the result" in capsys.readouterr().err
    for more, rule in ((["--slots", "2"], "must be left out"), (["--size", "16002"], "must be a multiple of 16")):
        assert cli.run(["simulate", *words, *more]) == 2
        assert rule in capsys.readouterr().err
    other = tmp_path / "plan.json"
    other.write_text("{}")
    assert cli.run(["simulate", str(other), "--topology", "4@1GB/s", "--size", "16000"]) == 2
    assert "plan.json" in capsys.readouterr().err
