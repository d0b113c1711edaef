"""LogGOPSim and ASTRA-sim on our exports, beside `optcc simulate`: what the tools themselves say, as a record.

Neither tool is part of this package: docs/exports.md says how they are built. With their programs

    optcc experiment simulator-exports --loggopsim FOLDER --astra-sim PROGRAM --version ...

compiles plans, writes GOAL and Chakra, runs the tools, and writes the record. Nothing random is in it, and no time of
this machine.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import click
import msgspec

from optcc.errors import EnvironmentMissing, InputError
from optcc.experiments.made import PLANNED_ROOMS
from optcc.experiments.record import RECORDS, Check
from optcc.experiments.recorder import Measured, record_command
from optcc.export import write_chakra, write_goal
from optcc.export.chakra import all_reduce_workload
from optcc.plan import Plan
from optcc.planner import build
from optcc.show import Card
from optcc.simulate import simulate
from optcc.topology import Topology

LOGGOPSIM, ASTRA_SIM = "LogGOPSim", "ASTRA-sim"
RATE = 50 * 10**9
SIZE_BYTES = 24_000_000
SHAPES = ((4, 1), (4, 4), (8, 2), (8, 8), (16, 4))
"""Ranks and segments."""
GOAL_SCHEDULES = (
    "ring",
    "bidirectional-ring",
    "recursive-doubling",
    "double-binary-tree",
    "optcc",
    "optimal",
    "packed",
)
GOAL_SLOTS = (1, 2, 3, 8)
CHAKRA_SCHEDULES = ("ring", "bidirectional-ring", "recursive-doubling", "rabenseifner", "direct", "shares")
"""Schedules that more slots than they ask for do not change: Chakra has no slots."""
CHAKRA_SLOTS = 64
CHAKRA_PIECES = (1, 16)
_GOAL_OPTIONS = ["-L", "0", "-o", "0", "-g", "0", "-O", "0", "-G", "1", "-S", "2000000000", "-b"]
_SYSTEM = {
    "scheduling-policy": "FIFO",
    "endpoint-delay": 0,
    "active-chunks-per-dimension": 1,
    "preferred-dataset-splits": 1,
    "all-reduce-implementation-custom": ["trace"],
    "collective-optimization": "localBWAware",
    "local-mem-bw": 50,
    "boost-mode": 0,
}
_TIMEOUT_S = 120


class ExportTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a tool says of one export, of messages in `pieces`: `took_s` beside `simulated_s`, of the plan with this
    digest."""

    tool: str
    schedule: str
    ranks: int
    segments: int
    slots: int
    pieces: int
    digest: str
    took_s: float
    simulated_s: float

    @property
    def ratio(self) -> float:
        """The tool's time over ours."""
        return self.took_s / self.simulated_s


@dataclass(frozen=True, slots=True)
class SimulatorExports(Measured):
    """The rows, by tool and schedule; `tools` are the versions of the tools, by name."""

    format: ClassVar[str] = "optcc-simulator-exports/2"
    own_path: ClassVar[Path] = RECORDS / "simulator-exports.json"
    rooms: ClassVar[tuple[str, ...]] = PLANNED_ROOMS
    docs_page: ClassVar[str] = "exports.md"

    tools: dict[str, str]
    size_bytes: int
    rows: tuple[ExportTime, ...]

    def check_fields(self, check: Check) -> None:
        check("rows", len(self.rows), bool(self.rows), "be one or more")
        check("size_bytes", self.size_bytes, self.size_bytes > 0, "be above zero")
        for number, row in enumerate(self.rows):
            at = f"rows[{number}]"
            check(f"{at}.tool", row.tool, row.tool in self.tools, "have a version in tools")
            check(f"{at}.took_s", row.took_s, row.took_s > 0, "be above zero")
            check(f"{at}.simulated_s", row.simulated_s, row.simulated_s > 0, "be above zero")

    def card(self) -> Card:
        by_kind: dict[tuple[str, str, int, int], list[float]] = {}
        for row in self.rows:
            by_kind.setdefault((row.tool, row.schedule, row.slots, row.pieces), []).append(row.ratio)
        rows = tuple(
            (tool, schedule, str(slots), str(pieces), *(f"{ratio:.3f}" for ratio in ratios))
            for (tool, schedule, slots, pieces), ratios in by_kind.items()
        )
        title = "time of the tool over `optcc simulate --ports fifo`: " + ", ".join(
            f"{tool} {version}" for tool, version in self.tools.items()
        )
        return Card(title, ("tool", "schedule", "slots", "pieces", *(f"p = {p}, k = {k}" for p, k in SHAPES)), rows)


def plans(names: tuple[str, ...], slots: int) -> Iterator[tuple[str, int, int, Plan, Topology, float]]:
    """Schedule, ranks, segments, plan, topology, and the seconds that it takes with fifo ports."""
    for name in names:
        for ranks, segments in SHAPES:
            topology = Topology.parse(f"{ranks}@{RATE // 10**9}GB/s")
            plan = build(name, topology, SIZE_BYTES, segments=segments, slots=slots, ports="fifo").plan
            yield name, ranks, segments, plan, topology, simulate(plan, topology, model="fifo").seconds


def run_loggopsim(folder: Path, plan: Plan, topology: Topology, work: Path) -> float:
    """Seconds that LogGOPSim says."""
    (work / "plan.goal").write_bytes(write_goal(plan, topology, simulate(plan, topology, model="fifo")))
    _run([folder / "txt2bin", "-i", "plan.goal", "-o", "plan.bin"], work)
    return read_loggopsim(_run([folder / "LogGOPSim", "-f", "plan.bin", *_GOAL_OPTIONS], work))


def read_loggopsim(output: str) -> float:
    """Seconds in what LogGOPSim prints, of which a tick is a byte at `RATE`.

    Raises InputError without a time: a deadlock ends with exit code 0 as well.
    """
    found = re.search(r"Maximum finishing time at host \d+: (\d+)", output)
    if found is None:
        raise InputError(f"LogGOPSim: no finishing time in {output[-200:]!r}")
    return int(found[1]) / RATE


def run_astra_sim(program: Path, plan: Plan, pieces: int, work: Path) -> float:
    """Seconds that ASTRA-sim says, of a custom AllReduce on one switch."""
    for rank, trace in enumerate(write_chakra(plan, pieces)):
        (work / f"trace.{rank}.et").write_bytes(trace)
        (work / f"workload.{rank}.et").write_bytes(all_reduce_workload(SIZE_BYTES))
    (work / "network.yml").write_text(
        f"topology: [ Switch ]\nnpus_count: [ {plan.n_ranks} ]\nbandwidth: [ {RATE / 2**30:.6f} ]\nlatency: [ 0 ]\n",
        encoding="ascii",
    )
    (work / "system.json").write_text(json.dumps(_SYSTEM), encoding="ascii")
    (work / "memory.json").write_text('{"memory-type": "NO_MEMORY_EXPANSION"}', encoding="ascii")
    options = (
        "--workload-configuration=workload",
        "--system-configuration=system.json",
        "--network-configuration=network.yml",
        "--remote-memory-configuration=memory.json",
    )
    return read_astra_sim(_run([program.resolve(), *options], work), plan.n_ranks)


def read_astra_sim(output: str, ranks: int) -> float:
    """Seconds in what ASTRA-sim prints, in cycles of a nanosecond: those of the last rank.

    Raises InputError unless all ranks have finished.
    """
    found = [int(cycles) for cycles in re.findall(r"finished, (\d+) cycles", output)]
    if len(found) != ranks:
        raise InputError(f"ASTRA-sim: {len(found)} of {ranks} ranks finished: {output[-200:]!r}")
    return max(found) * 1e-9


def _run(command: list[Path | str], work: Path) -> str:
    try:
        ended = subprocess.run(
            list(map(str, command)), cwd=work, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise EnvironmentMissing(f"{command[0]}: {error.strerror}: docs/exports.md says how it is built") from None
    return ended.stdout + ended.stderr


@record_command(SimulatorExports)
@click.option("--loggopsim", type=click.Path(path_type=Path, file_okay=False), help="The folder of LogGOPSim, txt2bin.")
@click.option("--loggopsim-version", default="unknown", show_default=True)
@click.option("--astra-sim", type=click.Path(path_type=Path, dir_okay=False), help="Its analytical program.")
@click.option("--astra-sim-version", default="unknown", show_default=True)
def command(
    loggopsim: Path | None, loggopsim_version: str, astra_sim: Path | None, astra_sim_version: str
) -> SimulatorExports:
    """Run LogGOPSim and ASTRA-sim on exports of the library's schedules."""
    if loggopsim is None and astra_sim is None:
        raise InputError("--loggopsim, --astra-sim: one of them must be given")
    rows: list[ExportTime] = []
    tools: dict[str, str] = {}
    with TemporaryDirectory() as folder:
        work = Path(folder)
        if loggopsim is not None:
            tools[LOGGOPSIM] = loggopsim_version
            for slots in GOAL_SLOTS:
                for name, ranks, segments, plan, topology, seconds in plans(GOAL_SCHEDULES, slots):
                    took = run_loggopsim(loggopsim.resolve(), plan, topology, work)
                    rows.append(ExportTime(LOGGOPSIM, name, ranks, segments, slots, 1, plan.digest, took, seconds))
        if astra_sim is not None:
            tools[ASTRA_SIM] = astra_sim_version
            for name, ranks, segments, plan, _, seconds in plans(CHAKRA_SCHEDULES, CHAKRA_SLOTS):
                for pieces in CHAKRA_PIECES:
                    took = run_astra_sim(astra_sim, plan, pieces, work)
                    made = (ASTRA_SIM, name, ranks, segments, CHAKRA_SLOTS, pieces, plan.digest)
                    rows.append(ExportTime(*made, took, seconds))
    return SimulatorExports(tools, SIZE_BYTES, tuple(rows))
