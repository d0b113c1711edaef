"""The field's schedules on servers of several GPUs of which one has lost NICs, beside ours and the bound, as a record.

Servers behind one core: every GPU has a NIC of 50 GB/s and a fabric port of 450 GB/s, the last server has lost some
NICs. 1 GiB, no latency, `fifo` ports. Every schedule charges the hop to another GPU's NIC (PXN), and counts with its
best number of segments: powers of two, from one up, until it gets slower or a plan would have more than
`TRANSFERS_MAX` transfers. Ours is the better of those that `auto` begins with. ForestColl's value is what an optimal
reduce-scatter and an optimal all-gather with equal shards take, one after the other: twice the certified bound of an
AllGather, which is the throughput of its public generator (tests/differential/test_graph_bounds.py). Behind a core
R2CCL's re-ranking changes nothing (`optcc.experiments.reranking` has rails), and R2CCL-Balance is NCCL's ring on the
NICs that are left.

The same on every machine. The record is a file of its own format, `optcc-lost-nics/1`; the one that comes with the
package is made by

    optcc experiment lost-nics

in about 40 minutes on one core.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import product
from pathlib import Path
from typing import ClassVar

import click
import msgspec

from optcc.collective import Collective
from optcc.compiler import compile_schedule
from optcc.dsl import Definition
from optcc.errors import InputError, TopologyError
from optcc.experiments.cells import RecordCells
from optcc.experiments.made import PLANNED_ROOMS
from optcc.experiments.record import RECORDS, Check, these_versions
from optcc.experiments.recorder import Measured, RecordForm, record_command
from optcc.planner import ON_NICS, find_schedule
from optcc.show import Card
from optcc.simulate import simulate
from optcc.timing import Model
from optcc.topology import Nic, Server, Topology
from optcc.verify.bounds.certified import least_seconds

SIZE_BYTES = 2**30
NIC_RATE = Fraction(50 * 10**9)
FABRIC_RATE = 9 * NIC_RATE
PORTS: Model = "fifo"
TRANSFERS_MAX = 2**20
FIELD = ("nccl-ring", "nccl-tree", "hierarchical-nics", "r2ccl-nics", "optcc-nics")
"""R2CCL and OptCC are for servers of which one is slower, so only where one is."""
OURS = ("equal-trees", "packed")
SERVERS, LOST, GPUS = (4, 8, 16), tuple(range(8)), 8
ON_ONE_GPU = {
    **{definition.name: name for name, definition in ON_NICS.items()},
    "hierarchical-nics": "ring",
    "equal-trees": "optimal",
}
"""What a schedule is on servers of one GPU, which pool their NICs."""
CLAIM_SERVERS, CLAIM_GPUS = (4, 16), (1, 2, 4, 8)
"""On how many servers of how many GPUs OptCC's claim is studied: half of the last server's NICs are lost."""


class LostNics(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """What is given: so many servers of so many GPUs; the last server has lost the rate of so many NICs (0.5: half of
    its only one)."""

    servers: int
    gpus: int
    lost: float

    def __str__(self) -> str:
        return f"{self.servers} x {self.gpus}, {self.lost:g} lost"

    @property
    def topology(self) -> Topology:
        """The servers.

        >>> LostNics(4, 8, 3).topology
        Topology('4@400GB/s,3=250GB/s', NICs of GPUs)
        """
        whole, part = divmod(Fraction(self.lost), 1)
        rates = [NIC_RATE * (1 - part if gpu == whole else 1) for gpu in range(self.gpus)]
        kept = range(self.gpus - int(whole))
        degraded = tuple(Nic(gpu, rate, rate, gpu not in kept, gpu) for gpu, rate in enumerate(reversed(rates)))
        healthy = tuple(Nic(gpu, NIC_RATE, NIC_RATE, gpu=gpu) for gpu in range(self.gpus))
        nics = [healthy] * (self.servers - 1) + [degraded]
        return Topology(tuple(Server(f"h{at}", self.gpus, each, FABRIC_RATE) for at, each in enumerate(nics)))


class LostNicsRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schedule in a case: the best of the numbers of segments `tried`; the bound, ForestColl's value, and the
    formula of the ring with nothing lost, all in seconds."""

    case: LostNics
    schedule: str
    tried: tuple[int, ...]
    segments: int
    transfers: int
    seconds: float
    bound_s: float
    forestcoll_s: float
    fault_free_s: float

    @property
    def ratio(self) -> float:
        """Over the certified bound."""
        return self.seconds / self.bound_s

    @property
    def over_fault_free(self) -> float:
        """Over 2(p - 1)/p of the message through the NICs of a healthy server."""
        return self.seconds / self.fault_free_s


CASES = (
    *(LostNics(servers, GPUS, lost) for servers in SERVERS[:-1] for lost in LOST),
    *(LostNics(servers, gpus, gpus / 2) for servers in CLAIM_SERVERS for gpus in CLAIM_GPUS if gpus != GPUS),
    *(LostNics(SERVERS[-1], GPUS, lost) for lost in (4, 0, 2, 1, 7, 3, 6, 5)),
)


@dataclass(frozen=True, slots=True)
class LostNicsRecord(Measured):
    """The rows and the versions."""

    format: ClassVar[str] = "optcc-lost-nics/1"
    own_path: ClassVar[Path] = RECORDS / "lost-nics.json"
    rooms: ClassVar[tuple[str, ...]] = PLANNED_ROOMS
    docs_page: ClassVar[str] = "studies.md"

    versions: dict[str, str]
    rows: tuple[LostNicsRow, ...]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.rows):
            where = f"rows[{number}]"
            check(f"{where}.schedule", row.schedule, row.schedule in (*FIELD, *OURS), "be one of those that are tried")
            check(f"{where}.segments", row.segments, row.segments in row.tried, "be one of those tried")
            check(f"{where}.bound_s", row.bound_s, row.bound_s > 0, "be above zero")
            check(f"{where}.seconds", row.seconds, row.ratio > 1 - 1e-9, "be no less than the bound")
            check(f"{where}.forestcoll_s", row.forestcoll_s, row.forestcoll_s > 0, "be above zero")
            check(f"{where}.fault_free_s", row.fault_free_s, row.fault_free_s > 0, "be above zero")

    @property
    def cases(self) -> tuple[LostNics, ...]:
        """What is there, in rising order."""
        return tuple(sorted({row.case for row in self.rows}))

    def of(self, case: LostNics) -> dict[str, LostNicsRow]:
        """The rows of a case by schedule."""
        return {row.schedule: row for row in self.rows if row.case == case}

    def ours(self, case: LostNics) -> LostNicsRow:
        """The better of our two."""
        found = self.of(case)
        return min((found[name] for name in OURS if name in found), key=lambda row: row.seconds)

    def card(self) -> Card:
        """Over the certified bound; with few GPUs a server over the fault-free ring, in percent."""
        rows = []
        for case in self.cases:
            found, ours = self.of(case), self.ours(case)
            rows.append(
                (
                    f"{case.servers} x {case.gpus}",
                    f"{case.lost:g}",
                    f"{1e3 * ours.bound_s:.3f} ms",
                    *(f"{found[name].ratio:.2f}, {found[name].segments}" if name in found else "-" for name in FIELD),
                    f"{ours.forestcoll_s / ours.bound_s:.2f}",
                    f"{ours.ratio:.3f}, {ours.schedule}",
                )
            )
        heads = ("servers", "lost", "T*", *FIELD, "ForestColl", "ours")
        return Card("1 GiB over the certified bound, and the number of segments", heads, tuple(rows))

    @property
    def claimed(self) -> tuple[LostNics, ...]:
        """The cases of OptCC's claim, in rising order: half of one server's NICs are lost."""
        claimed = {LostNics(servers, gpus, gpus / 2) for servers in CLAIM_SERVERS for gpus in CLAIM_GPUS}
        return tuple(case for case in self.cases if case in claimed)

    def claim(self) -> Card:
        """OptCC's claim by GPUs a server: in percent over the fault-free ring."""

        def shown(over: float) -> str:
            return f"{100 * (over - 1):.1f}"

        rows = []
        for case in self.claimed:
            found, ours = self.of(case), self.ours(case)
            field = (shown(found[name].over_fault_free) if name in found else "-" for name in FIELD)
            bound = shown(ours.bound_s / ours.fault_free_s)
            rows.append((f"{case.servers} x {case.gpus}", *field, shown(ours.over_fault_free), bound))
        title = "By GPUs a server, half of one server's NICs lost: % over the fault-free ring"
        return Card(title, ("servers", *FIELD, "ours", "T*"), tuple(rows))

    def markdown(self) -> str:
        return f"{self.card().markdown()}\n{self.claim().title}:\n\n{self.claim().markdown()}"


def measure(case: LostNics, name: str, transfers_max: int = TRANSFERS_MAX) -> LostNicsRow | None:
    """The row of a schedule; None if it does not accept these servers."""
    topology = case.topology
    definition = find_schedule(ON_ONE_GPU.get(name, name) if case.gpus == 1 else name).under(PORTS)
    runs = simulate_segments(definition, topology, transfers_max)
    if not runs:
        return None
    best = min(runs, key=lambda each: runs[each][0])
    seconds, transfers = runs[best]
    return LostNicsRow(case, name, tuple(runs), best, transfers, seconds, *_references(case))


def simulate_segments(definition: Definition, topology: Topology, transfers_max: int) -> dict[int, tuple[float, int]]:
    """Seconds and transfers for 1, 2, 4, ... segments, until it gets slower; nothing if the servers are refused."""
    runs: dict[int, tuple[float, int]] = {}
    segments, each = 1, 0
    with suppress(TopologyError):
        while segments * each <= transfers_max:
            schedule = definition.build(topology, segments)
            plan = compile_schedule(schedule, size_bytes=SIZE_BYTES, topology=topology, ports=PORTS)
            runs[segments] = simulate(plan, topology, model=PORTS).seconds, len(plan.transfers)
            if runs[segments][0] > min(seconds for seconds, _ in runs.values()):
                break
            each, segments = len(plan.transfers) // segments, 2 * segments
    return runs


@cache
def _references(case: LostNics) -> tuple[float, float, float]:
    """The bound, ForestColl's value and the formula of the ring with nothing lost, seconds."""
    p = case.servers * case.gpus
    least, gather = (
        least_seconds(case.topology, SIZE_BYTES, Collective(name, p)) for name in ("allreduce", "allgather")
    )
    return float(least), 2 * float(gather), float(2 * Fraction(p - 1, p) * SIZE_BYTES / (case.gpus * NIC_RATE))


def _measure(cell: tuple[LostNics, str]) -> LostNicsRow | None:
    return measure(*cell)


@record_command(LostNicsRecord, RecordForm(quick={"servers": 4}, spreads=True))
@click.option("--servers", type=click.IntRange(2), help="Only cases of so many servers.")
def command(servers: int | None, cells: RecordCells) -> LostNicsRecord:
    """Simulate the field's schedules and ours on servers that lost NICs."""
    cases = [case for case in CASES if servers in (None, case.servers)]
    if not cases:
        raise InputError(f"--servers {servers}: must be one of {sorted({case.servers for case in CASES})}")
    units = {f"{case}, {name}": (case, name) for case, name in product(cases, (*FIELD, *OURS))}
    found = {row for row in cells.spread(units, _measure, LostNicsRow | None).values() if row is not None}
    return LostNicsRecord(these_versions(), tuple(sorted(found, key=lambda row: (row.case, row.schedule))))
