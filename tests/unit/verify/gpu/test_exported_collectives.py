"""Exported files of every collective: proved as that one by the verifiers of foreign files, or refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from optcc.cli import run
from optcc.errors import InputError, PlanError
from optcc.export import write_msccl_xml, write_mscclpp_json
from optcc.plan import Plan
from optcc.planner import build
from optcc.schedules.registry import SCHEDULES
from optcc.simulate import simulate
from optcc.topology import Topology
from optcc.verdict import PROVED, Verdict
from optcc.verify.gpu.msccl import verify_msccl
from optcc.verify.gpu.msccl_plan import plan_of_msccl
from optcc.verify.gpu.mscclpp import verify_mscclpp
from optcc.verify.gpu.mscclpp_plan import plan_of_mscclpp

HALVES = ("reducescatter", "allgather", "broadcast", "reduce", "alltoall")
NAMES = [name for name, each in SCHEDULES.items() if each.collective in HALVES]
ONE_OF_EACH = ("ring-reduce-scatter", "bruck", "tree-broadcast", "chain-reduce", "direct-all-to-all")


def plan_of(name: str, n_ranks: int, segments: int = 1, **options: object) -> Plan:
    """A plan whose chunks are of 16 B at least."""
    size = 16 * segments * n_ranks**2
    return build(name, Topology.parse(f"{n_ranks}@50GB/s"), size, segments=segments, **options).plan  # type: ignore[arg-type]


def check_proved(verdict: Verdict, plan: Plan) -> None:
    assert verdict.verdict == PROVED, f"{plan.name} of {plan.n_ranks}: {verdict.counterexample}"
    root = f"root {plan.collective.root}" if plan.collective.name in ("broadcast", "reduce") else None
    assert dict(verdict.conditions).get("result") == root


@pytest.mark.parametrize("name", NAMES)
def test_msccl_files_are_proved_as_their_collective(name: str) -> None:
    for n_ranks in range(2, 9):
        plan = plan_of(name, n_ranks)
        data = write_msccl_xml(plan)
        check_proved(verify_msccl(data, target="msccl"), plan)
        # A call is counted as the run-times count it: all ranks' parts, and in an AllToAll a rank's blocks.
        call = plan.size_bytes // (n_ranks if plan.collective.name == "alltoall" else 1)
        assert f'minBytes="{call}" maxBytes="{call}"'.encode() in data


def test_the_later_run_times_spell_a_reducescatter_otherwise() -> None:
    plan = plan_of("ring-reduce-scatter", 3)
    spelled = {each: write_msccl_xml(plan, runtime=each) for each in ("msccl", "rccl", "msccl-executor")}
    for runtime, data in spelled.items():
        check_proved(verify_msccl(data, target=runtime), plan)
    assert verify_msccl(spelled["msccl"], target="rccl").exit_code == 1


@pytest.mark.parametrize("name", NAMES)
def test_mscclpp_files_are_proved_as_their_collective(name: str) -> None:
    for n_ranks in (2, 3):
        plan = plan_of(name, n_ranks)
        check_proved(verify_mscclpp(write_mscclpp_json(plan)), plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_mscclpp_files_of_more_ranks_are_proved_as_their_collective(name: str) -> None:
    for n_ranks in range(4, 9):
        plan = plan_of(name, n_ranks)
        check_proved(verify_mscclpp(write_mscclpp_json(plan)), plan)


def test_the_root_of_a_file_is_the_plans() -> None:
    for name in ("tree-broadcast", "chain-reduce"):
        plan = plan_of(name, 4, root=2)
        check_proved(verify_msccl(write_msccl_xml(plan)), plan)
        check_proved(verify_mscclpp(write_mscclpp_json(plan)), plan)


def _edited(data: bytes, pattern: str, by: str) -> bytes:
    edited, count = re.subn(pattern, by, data.decode(), count=1)
    assert count == 1
    return edited.encode()


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_message_from_another_chunk_is_refuted(name: str) -> None:
    plan = plan_of(name, 3, segments=2)

    def moved(found: re.Match[str]) -> str:
        return f"{found[1]}{int(found[2]) ^ 1}"

    for data, pattern, verify in (
        (write_msccl_xml(plan), r'(type="s" srcbuf="\w" srcoff=")(\d+)', verify_msccl),
        (write_mscclpp_json(plan), r'("put", "src_buff": \[\{"type": "\w", "index": )(\d+)', verify_mscclpp),
    ):
        edited, count = re.subn(pattern, moved, data.decode(), count=1)
        found = verify(edited.encode()).counterexample
        assert count == 1 and found is not None
        assert found.property == "result", found


def test_the_block_of_a_rank_for_itself_is_copied() -> None:
    plan = plan_of("direct-all-to-all", 3)
    for data, pattern, by, verify in (
        (write_msccl_xml(plan), r'<step s="0" type="cpy" [^>]*>\n', "", verify_msccl),
        (write_mscclpp_json(plan), r'\{"name": "copy", "src_buff": \[\{"type": "i"[^\n]*\n', "", verify_mscclpp),
    ):
        found = verify(_edited(data, pattern, by)).counterexample
        assert found is not None and "o[0] of the output is never written" in str(found)


@pytest.mark.parametrize("write", [write_msccl_xml, write_mscclpp_json])
def test_what_the_formats_cannot_say_is_refused_by_name(write: object) -> None:
    assert callable(write)
    for name, why in (
        ("direct-gather", "collective gather: must be one of allreduce, .*: the format is read without it"),
        ("direct-scatter", "collective scatter: must be one of"),
        ("direct-all-to-all-v", "collective alltoallv: .*: the format has no counts of its own for each pair"),
    ):
        with pytest.raises(InputError, match=why):
            write(plan_of(name, 3))
    for name, size in (("ring-all-gather", 40), ("direct-all-to-all", 3 * 16)):
        uneven = build(name, Topology.parse("3@50GB/s"), size, segments=1).plan
        with pytest.raises(PlanError, match=f"{uneven.collective.name} of {size} B: must be [39] equal parts of whole"):
            write(uneven)


def test_compile_writes_what_verify_proves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "file.xml")
    words = ["ring-reduce-scatter", "--topology", "4@50GB/s", "--size", "1000", "--format", "msccl-xml", "--pad"]
    assert run(["compile", *words, "--target", "rccl", "-o", path]) == 0
    assert run(["verify", path, "--target", "rccl"]) == 0
    assert run(["verify", path, "--target", "msccl"]) == 1
    assert "coll reducescatter: must be one of" in capsys.readouterr().out


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("form", ["xml", "json"])
def test_a_file_takes_what_its_plan_takes(name: str, form: str) -> None:
    """For the same message: that of an AllToAll has the blocks of all ranks, a call those of one."""
    topology = Topology.parse("3@1GB/s")
    plan = build(name, topology, 9 * 2**20, segments=1, ports="fifo").plan
    if form == "xml":
        back = plan_of_msccl(write_msccl_xml(plan), plan.size_bytes)
    else:
        back = plan_of_mscclpp(write_mscclpp_json(plan), plan.size_bytes)
    assert (back.size_bytes, back.collective.name) == (plan.size_bytes, plan.collective.name)
    times = [simulate(each, topology, model="fifo").seconds for each in (plan, back)]
    assert times[1] == pytest.approx(times[0], rel=1e-3)
