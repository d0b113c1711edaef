"""`Planner`: proved plans for a `Communicator`, by names of the library, without the command line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import optcc
from optcc import planner
from optcc.collective import ROOTED, Collective
from optcc.errors import InputError, PlanError, TopologyError
from optcc.files import VerdictCache
from optcc.planner import SCHEDULE_OF, Planner, build, find_schedule, prove, smallest_failure
from optcc.runtime.communicator import Communicator
from optcc.runtime.transports.loopback import run_ranks
from optcc.topology import Nic, Server, Topology
from optcc.verdict import PROVED
from optcc.verify.plan import VERSION, verify_plan

FOUR = Topology.parse("4@1GB/s")
LOSES_A_RANK = '''
from optcc.dsl import Program, schedule

@schedule
def wrong(program: Program) -> None:
    """Rank 1's input is lost."""
    for segment in program.pipeline(sections=1):
        segment[0].copy(src=0, dst=1)
'''


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    """The name of a schedule that is refuted."""
    path = tmp_path / "mine.py"
    path.write_text(LOSES_A_RANK, encoding="utf-8")
    return f"{path}:wrong"


@pytest.mark.parametrize("name", SCHEDULE_OF)
def test_every_collective_has_a_proved_plan(name: str) -> None:
    root = 2 if name in ROOTED else 0
    counts = [[1, 2, 3, 4], [0, 0, 0, 0], [1, 1, 1, 1], [5, 4, 3, 6]]
    collective = Collective(name, 4, root) if name != "alltoallv" else Collective.all_to_all_v(counts)
    plan, proof = Planner(FOUR)(collective, 4096, "int32", "max" if name != "broadcast" else "sum")
    assert plan.collective == collective
    assert (proof.digest, proof.verdict) == (plan.digest, PROVED)
    assert (plan.size_bytes, plan.transfers.dtype) == (4096, "int32")


def test_slots_and_ports_reach_the_compiler() -> None:
    plan, _ = Planner(FOUR, schedules={"allreduce": "ring"}, slots=3, ports="fifo")(
        Collective("allreduce", 4), 4096, "float32", "sum"
    )
    assert (plan.ports, {channel.slots for channel in plan.channels}) == ("fifo", {3})


def test_a_refuted_plan_is_not_given_out(wrong: str) -> None:
    planner = Planner(Topology.parse("2@1GB/s"), schedules={"allreduce": wrong})
    with pytest.raises(PlanError, match=r"refuted, so it does not run: .*contribution of rank 1 missing"):
        planner(Collective("allreduce", 2), 8, "float32", "sum")


def test_only_proofs_are_cached(tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = VerdictCache(tmp_path, VERSION)
    plan = build("ring", FOUR, 4096).plan
    assert prove(plan, cache).verdict == PROVED
    monkeypatch.setattr("optcc.planner.verify_plan", lambda plan: pytest.fail("proved again"))
    assert prove(plan, cache).verdict == PROVED
    monkeypatch.undo()
    with pytest.raises(PlanError):
        prove(build(wrong, Topology.parse("2@1GB/s"), 8).plan, cache)
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_the_smallest_failure(wrong: str) -> None:
    topology = Topology.parse("5@1GB/s")
    built = build(wrong, topology, 4000, segments=2)
    smallest = smallest_failure(built, verify_plan(built.plan), topology, 4000)
    assert smallest is not None and smallest.counterexample.property == "result"
    assert (smallest.topology.n_ranks, smallest.segments, smallest.size_bytes) == (2, 1, 8)
    sound = build("ring", topology, 4000)
    assert smallest_failure(sound, verify_plan(sound.plan), topology, 4000) is None


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("nope",), {}, InputError, "schedule 'nope': must be one of ring, "),
        (("/no/file.py:x",), {}, InputError, "no such file"),
        (("ring",), {"ports": "wide"}, InputError, "ports 'wide': must be one of fifo, exclusive, fair"),
        (("auto",), {"segments": 4}, InputError, "segments 4: must be left out with the schedule auto"),
        (("ring",), {"slots": 0}, InputError, "0 slots: must be from 1"),
        (("ring",), {"dtype": "float7"}, InputError, "dtype 'float7': must be one of"),
    ],
)
def test_errors_name_the_argument_and_no_option_of_a_command(
    arguments: tuple[str], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        build(*arguments, FOUR, 4096, **options)
    assert "--" not in str(raised.value)


def test_ranks_and_collectives_must_fit() -> None:
    with pytest.raises(InputError, match="topology of 4 ranks: must have 3"):
        Planner(FOUR)(Collective("allreduce", 3), 12, "float32", "sum")
    with pytest.raises(InputError, match="schedule ring: allreduce: must be for allgather"):
        Planner(FOUR, schedules={"allgather": "ring"})(Collective("allgather", 4), 16, "float32", "sum")
    with pytest.raises(TopologyError, match="schedule bidirectional-ring accepts"):
        build("bidirectional-ring", Topology.parse("2x2@1GB/s"), 16)


def test_a_program_needs_neither_experiments_nor_the_command_line() -> None:
    """From `import optcc` alone to a result, in a process of its own."""
    code = """
import sys
import numpy as np
from optcc import Communicator, Planner, Topology, run_ranks

topology = Topology.parse("2@1GB/s")

def program(rank, transport):
    with Communicator(transport, Planner(topology)) as comm:
        return comm.all_reduce(np.full(4, rank + 1)).tolist()

assert run_ranks(2, program, topology=topology) == [[3] * 4] * 2
print(*(name for name in sys.modules if name.startswith(("click", "optcc.cli", "optcc.commands", "optcc.experiments"))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_exports() -> None:
    """Every name is there, and is the object of the module that defines it."""
    assert sorted(optcc.__all__) == optcc.__all__
    for name in optcc.__all__:
        assert getattr(optcc, name).__module__.startswith("optcc.")
    assert optcc.Planner is Planner
    assert (optcc.Communicator, optcc.run_ranks, optcc.find_schedule) == (Communicator, run_ranks, find_schedule)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = optcc.nothing  # type: ignore[attr-defined, unused-ignore]


def test_plans_for_a_loss_do_without_a_nic_that_has_failed_before() -> None:
    rate = Fraction(10**9)
    whole = Server("h0", 1, (Nic(0, rate, rate), Nic(1, rate, rate)))
    cluster = Topology((whole, Server("h1", 1, (Nic(0, rate, rate), Nic(1, rate, rate, failed=True)))))
    after = Planner(cluster)._after_a_loss(0.5).topology
    assert [int(each) for each in after.out] == [15 * 10**8, 10**9]


def test_auto_counts_messages_where_nics_belong_to_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule of many segments takes less time by its ports, and more with what messages cost."""
    segments = {"equal-trees": 256, "packed": 8}
    made = planner.build

    def with_segments(name: str, topology: Topology, size_bytes: int, **options: Any) -> planner.Built:
        if name not in segments:
            raise TopologyError("left out")
        return made(name, topology, size_bytes, segments=segments[name], ports=options["ports"])

    topology = Topology.parse("3x2@25MB/s+100MB/s")
    costly = replace(topology, overhead_s=Fraction(1, 1000))
    monkeypatch.setattr(planner, "NEAR_BOUND", 0.0)
    monkeypatch.setattr(planner, "build", with_segments)
    chosen = [made("auto", each, 1 << 24, ports="fair").definition.name for each in (topology, costly)]
    assert chosen == ["equal-trees", "packed"]
