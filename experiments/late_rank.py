"""A rank that is late, slow, or both: StragglAR's AllReduce beside a ring and ours, in simulation, as a record.

One rank joins so many seconds after the others; it is the slow one too, where one is. Counted is the time from its
arrival to the end, since the others have nothing to do before it but what a schedule lets them do. StragglAR's plan is
taken in the order in which its authors write it (the reduce-scatter of the others first) and in ours, whichever is the
faster; so are the others. 1 GiB, fifo ports, 5 us. The same on every machine. The record is a file of its own format,
`optcc-late-rank/1`; the one that comes with the package is made by

    optcc experiment late-rank --jobs 2
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import ClassVar

import msgspec

from optcc.compiler import compile_schedule
from optcc.experiments.cells import RecordCells
from optcc.experiments.made import PLANNED_ROOMS
from optcc.experiments.record import RECORDS, Check, these_versions
from optcc.experiments.recorder import Measured, RecordForm, record_command
from optcc.faults import Fault, FaultPlan
from optcc.plan import Plan
from optcc.schedules.registry import SCHEDULES
from optcc.show import Card
from optcc.simulate import simulate
from optcc.timing import Model
from optcc.topology import Topology

SIZE_BYTES, RATE, LATENCY_S = 2**30, 50 * 10**9, Fraction(5, 10**6)
PORTS: Model = "fifo"
RANKS = (8, 32, 256)
KEPT = (Fraction(1), Fraction(1, 2))
"""The share of its rate that the late rank has."""
DELAYS = (Fraction(0), Fraction(1, 2), Fraction(1), Fraction(2))
"""How late it is, over the time of a reduce-scatter of the others."""
RING, STRAGGLAR, OURS = "ring", "stragglar", ("optcc", "optimal")
SEGMENTS = {RING: (1,), STRAGGLAR: (1, 4), "optcc": (1, 2, 8, 32), "optimal": (16, 128)}
TRANSFERS_MAX = 300_000
"""Schedules of more are not tried: of OptCC on 256 ranks that leaves two segments."""


class LateRankRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a schedule takes from the arrival of a rank that keeps `kept` of its rate, for each of the delays.

    `delays_s` are in seconds; `fault_free_s` is 2(p - 1)/p of the message at the full rate.
    """

    ranks: int
    kept: float
    schedule: str
    delays_s: tuple[float, ...]
    seconds: tuple[float, ...]
    segments: tuple[int, ...]
    fault_free_s: float


@dataclass(frozen=True, slots=True)
class LateRank(Measured):
    """The rows and the versions."""

    format: ClassVar[str] = "optcc-late-rank/1"
    own_path: ClassVar[Path] = RECORDS / "late-rank.json"
    rooms: ClassVar[tuple[str, ...]] = PLANNED_ROOMS
    docs_page: ClassVar[str] = "studies.md"

    versions: dict[str, str]
    rows: tuple[LateRankRow, ...]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.rows):
            where = f"rows[{number}]"
            check(f"{where}.kept", row.kept, 0 < row.kept <= 1, "be above zero, at most 1")
            alike = len(row.delays_s) == len(row.seconds) == len(row.segments) > 0
            check(f"{where}.seconds", row.seconds, alike and min(row.seconds) > 0, "be above zero, one for each delay")

    def row(self, ranks: int, kept: float, schedule: str) -> LateRankRow:
        """The row of a schedule."""
        return next(row for row in self.rows if (row.ranks, row.kept, row.schedule) == (ranks, kept, schedule))

    def gain(self, ranks: int, kept: float = 1.0) -> float:
        """The ring's time over StragglAR's, of a rank late by a reduce-scatter of the others or more; the largest."""
        ring, other = (self.row(ranks, kept, name) for name in (RING, STRAGGLAR))
        late = [at for at, delay in enumerate(DELAYS[: len(ring.delays_s)]) if delay >= 1]
        return max(ring.seconds[at] / other.seconds[at] for at in late)

    def card(self) -> Card:
        rows = tuple(
            (
                str(row.ranks),
                f"{row.kept:g}",
                row.schedule,
                *(f"{time / row.fault_free_s:.3f}, {k}" for time, k in zip(row.seconds, row.segments, strict=True)),
            )
            for row in self.rows
        )
        delays = (f"late by {float(each):g}" for each in DELAYS)
        title = "1 GiB, one rank late: time from its arrival over the fault-free ring, and the number of segments"
        return Card(title, ("ranks", "its rate", "schedule", *delays), rows)


def cluster(ranks: int, kept: Fraction) -> Topology:
    """Equal endpoints, the last of which keeps a share of its rate.

    >>> cluster(4, Fraction(1, 2))
    Topology('4@50GB/s,3=25GB/s')
    """
    slow = f",{ranks - 1}={RATE * kept / 10**9}GB/s" if kept < 1 else ""
    return Topology.parse(f"{ranks}@{RATE // 10**9}GB/s{slow}").with_latency(LATENCY_S)


def seconds_after(plan: Plan, topology: Topology, delay_s: Fraction, ports: Model = PORTS) -> float:
    """From the arrival of the last rank, whose NIC carries nothing before it, to the end."""
    last = topology.n_ranks - 1
    late = FaultPlan((Fault(last, 0, Fraction(0), delay_s),)) if delay_s else None
    return simulate(plan, topology, model=ports, faults=late).seconds - float(delay_s)


def measure(ranks: int, kept: Fraction, name: str) -> LateRankRow:
    """The row of a schedule, each delay with the order and the number of segments that are its fastest."""
    topology = cluster(ranks, kept)
    delays_s = [delay * Fraction(ranks - 2, ranks - 1) * SIZE_BYTES / RATE for delay in DELAYS]
    best: list[tuple[float, int]] = []
    for segments in SEGMENTS[name]:
        schedule = SCHEDULES[name].under(PORTS).build(topology, segments)
        if len(schedule) > TRANSFERS_MAX:
            break
        plans = [
            compile_schedule(schedule, size_bytes=SIZE_BYTES, topology=ordered_for, ports=PORTS)
            for ordered_for in (topology, None)
        ]
        runs = [(min(seconds_after(plan, topology, delay_s) for plan in plans), segments) for delay_s in delays_s]
        best = [min(pair) for pair in zip(best, runs, strict=True)] if best else runs
    fault_free_s = float(2 * Fraction(ranks - 1, ranks) * SIZE_BYTES / RATE)
    seconds, chosen = zip(*best, strict=True)
    return LateRankRow(ranks, float(kept), name, tuple(map(float, delays_s)), seconds, chosen, fault_free_s)


def _measure(case: tuple[int, Fraction, str]) -> LateRankRow:
    return measure(*case)


@record_command(LateRank, RecordForm(quick={}, spreads=True))
def command(quick: bool, cells: RecordCells) -> LateRank:
    """Simulate AllReduce with a rank that is late, slow, or both; quick: of 8 ranks."""
    cases = product(RANKS[:1] if quick else RANKS, KEPT, SEGMENTS)
    units = {f"{ranks} ranks, {kept} kept, {name}": (ranks, kept, name) for ranks, kept, name in cases}
    return LateRank(these_versions(), tuple(cells.spread(units, _measure, LateRankRow).values()))
