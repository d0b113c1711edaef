"""AllReduce by the number of chunks where one host of three lost one of its three NICs: R2CCL's artifact, simulated.

The authors' artifact has three hosts of three NICs of 10 Gbit/s each and varies the chunks of R2CCL-AllReduce's second
phase; our schedule is pipelined as a whole. Each host is an endpoint with its NICs pooled; fifo ports, a latency of
10 us. The same on every machine. The record is a file of its own format, `optcc-chunk-counts/1`; the one that comes
with the package is made by

    optcc experiment chunk-counts
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import ClassVar

import msgspec

from optcc.experiments.made import PLANNED_ROOMS
from optcc.experiments.record import RECORDS, Check, these_versions
from optcc.experiments.recorder import SECONDS, Measured, RecordForm, record_command
from optcc.planner import build
from optcc.show import Card
from optcc.simulate import simulate
from optcc.timing import Model
from optcc.topology import Topology
from optcc.verify.bounds.closed_forms import collective_bound

SIZE_BYTES, LATENCY_S = 256 * 2**20, Fraction(1, 10**5)
PORTS: Model = "fifo"
HEALTHY, DEGRADED = "3@30Gbit/s", "3@30Gbit/s,2=20Gbit/s"
CHUNKS = (1, 2, 4, 8, 16)
BALANCE, ALLREDUCE = "r2ccl-balance", "r2ccl-allreduce"
SCHEDULES = (BALANCE, ALLREDUCE, "optcc", "optimal")


class ChunkCountRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a schedule takes in so many chunks, over the fault-free ring."""

    schedule: str
    chunks: int
    over_fault_free: float


@dataclass(frozen=True, slots=True)
class ChunkCounts(Measured):
    """The rows, the bound over the fault-free ring, and the versions."""

    format: ClassVar[str] = "optcc-chunk-counts/1"
    own_path: ClassVar[Path] = RECORDS / "chunk-counts.json"
    rooms: ClassVar[tuple[str, ...]] = PLANNED_ROOMS
    docs_page: ClassVar[str] = "studies.md"

    versions: dict[str, str]
    bound: float
    rows: tuple[ChunkCountRow, ...]

    def check_fields(self, check: Check) -> None:
        check("bound", self.bound, self.bound >= 1, "be 1 or more")
        for number, row in enumerate(self.rows):
            above = row.over_fault_free > self.bound * (1 - 1e-9)
            check(f"rows[{number}].over_fault_free", row.over_fault_free, above, "be no less than the bound")

    def of(self, schedule: str) -> list[ChunkCountRow]:
        """The rows of a schedule, by rising number of chunks."""
        return sorted((row for row in self.rows if row.schedule == schedule), key=lambda row: row.chunks)

    def card(self) -> Card:
        rows = tuple((name, *(f"{row.over_fault_free:.3f}" for row in self.of(name))) for name in SCHEDULES)
        title = f"One host of three lost one NIC of three: time over the fault-free ring (T*: {self.bound:.3f})"
        return Card(title, ("schedule", *(f"{each} chunks" for each in CHUNKS)), rows)


def seconds_of(name: str, text: str, chunks: int) -> float:
    """The simulated time of a schedule."""
    topology = Topology.parse(text).with_latency(LATENCY_S)
    plan = build(name, topology, SIZE_BYTES, segments=chunks, ports=PORTS).plan
    return simulate(plan, topology, model=PORTS).seconds


@record_command(ChunkCounts, RecordForm(quick=SECONDS, one_session=SECONDS))
def command() -> ChunkCounts:
    """Simulate AllReduce in 1 to 16 chunks on three hosts, one of which lost a NIC of three."""
    unit = min(seconds_of("ring", HEALTHY, chunks) for chunks in CHUNKS)
    rows = [
        ChunkCountRow(name, chunks, seconds_of(name, DEGRADED, chunks) / unit)
        for name, chunks in product(SCHEDULES, CHUNKS)
    ]
    bound = collective_bound(Topology.parse(DEGRADED), SIZE_BYTES).seconds
    free = collective_bound(Topology.parse(HEALTHY), SIZE_BYTES).seconds
    return ChunkCounts(these_versions(), float(bound / free), tuple(rows))
