"""The exported files of small plans, byte for byte: read the difference before you accept it with --update-golden.

What the files mean is tested in tests/unit/test_export.py; here a change of their bytes must not go unseen.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from optcc.arrays import column
from optcc.export import write_chakra, write_goal, write_msccl_xml, write_mscclpp_json, write_perfetto
from optcc.plan import Plan
from optcc.planner import build_plan
from optcc.simulate import simulate
from optcc.topology import Topology
from tests.golden.readers import (
    MscclppMachine,
    check_allreduce,
    parse_json,
    read_chakra,
    read_goal,
    run_chakra,
    run_goal,
    run_msccl,
)

FOLDER = Path(__file__).parent / "export"
CASES = {"ring": ("3@1GB/s", 3 * 64), "optcc": ("3@1GB/s,2=500MB/s", 4 * 64)}


def made(name: str) -> dict[str, bytes]:
    """The files of a case by their names."""
    text, size = CASES[name]
    topology = Topology.parse(text)
    plan = _without_lines(build_plan(name, topology, size, segments=2 if name == "optcc" else 1))
    files = {
        f"{name}.goal": write_goal(plan, topology, simulate(plan, topology, model="fifo")),
        f"{name}.perfetto.json": write_perfetto(plan, topology, simulate(plan, topology, model="exclusive")),
        f"{name}.msccl.xml": write_msccl_xml(plan),
        f"{name}.mscclpp.json": write_mscclpp_json(plan),
    }
    return files | {f"{name}.{rank}.et": data for rank, data in enumerate(write_chakra(plan))}


def _without_lines(plan: Plan) -> Plan:
    """The author's lines are out, as they move whenever somebody edits the schedule's file."""
    return replace(plan, transfers=replace(plan.transfers, line=column([0] * len(plan.transfers))))


@pytest.mark.parametrize("name", CASES)
def test_exported_files_are_what_they_were(request: pytest.FixtureRequest, name: str) -> None:
    files = made(name)
    if request.config.getoption("--update-golden"):
        FOLDER.mkdir(exist_ok=True)
        for path in FOLDER.glob(f"{name}.*"):
            path.unlink()
        for file, data in files.items():
            (FOLDER / file).write_bytes(data)
    assert {path.name for path in FOLDER.glob(f"{name}.*")} == set(files)
    for file, data in files.items():
        assert (FOLDER / file).read_bytes() == data, f"{file}: not what it was (--update-golden, if that is meant)"


@pytest.mark.parametrize("name", CASES)
def test_the_golden_files_do_what_they_should(name: str) -> None:
    """Read from the disk, by readers that share nothing with the writers."""

    def read(ending: str) -> bytes:
        return (FOLDER / f"{name}.{ending}").read_bytes()

    n_transfers = {"ring": 12, "optcc": 16}[name]
    assert run_goal(read_goal(read("goal").decode())) > 0
    traces = [read_chakra(read(f"{rank}.et"))[1] for rank in range(3)]
    assert run_chakra(traces) >= 2 * n_transfers
    events = parse_json(read("perfetto.json"))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2 * n_transfers
    check_allreduce(run_msccl(read("msccl.xml")))
    check_allreduce(MscclppMachine(parse_json(read("mscclpp.json")), seed=0, calls=2).run(), 2)
