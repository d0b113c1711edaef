"""AllGather and ReduceScatter on ForestColl's topologies and on servers of eight GPUs: its throughput, ours, the bound.

ForestColl's throughput is what its public generator prints for an AllGather on these networks; a ReduceScatter has the
same, backwards. Ours is a plan of 1 GiB in simulation, `fifo` ports, no latency: `star-all-gather` where it takes the
topology, else the packing of the bound's linear program, with as many segments (powers of two) as it takes to come
within `NEAR` of the bound. The same on every machine. The record is a file of its own format,
`optcc-forestcoll-rows/1`; the one that comes with the package is made by

    optcc experiment forestcoll-rows

in three minutes on one core.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import ClassVar

import click
import msgspec

from optcc.collective import Collective
from optcc.compiler import compile_schedule
from optcc.errors import TopologyError
from optcc.experiments.cells import RecordCells
from optcc.experiments.lost_nics import PORTS, SIZE_BYTES
from optcc.experiments.made import PLANNED_ROOMS
from optcc.experiments.record import RECORDS, Check, these_versions
from optcc.experiments.recorder import Measured, RecordForm, record_command
from optcc.planner import find_schedule
from optcc.show import Card
from optcc.simulate import simulate
from optcc.topology import Topology
from optcc.verify.bounds.certified import least_seconds

FORESTCOLL: Mapping[str, float] = {
    "2xdgx-a100": 346.67,
    "4xdgx-a100": 266.67,
    "2xmi250": 354.13,
    "2xdgx-h100": 533.33,
    "4xdgx-h100": 516.13,
    "8xdgx-h100": 457.14,
    "16xdgx-h100": 426.67,
    "4xdgx-h100,3=4/8": 266.67,
    "8xdgx-h100,7=4/8": 228.57,
    "8xdgx-h100/rails": 457.14,
    "8xdgx-h100/rails,6=4..7/8,7=4..7/8": 228.57,
}
"""By topology, GB/s of the message: what its public generator reaches on the same network."""
SCHEDULES_OF: Mapping[str, tuple[str, ...]] = {
    "allgather": ("star-all-gather", "packed-all-gather"),
    "reducescatter": ("star-reduce-scatter", "packed-reduce-scatter"),
}
NEAR = 1.01
SEGMENTS = tuple(2**each for each in range(4, 11))
TRANSFERS_MAX = 2**21


class ForestCollRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A collective of 1 GiB on a topology: the certified bound, and the plan that comes nearest to it."""

    topology: str
    collective: str
    bound_s: float
    schedule: str
    segments: int
    transfers: int
    seconds: float

    @property
    def throughput(self) -> float:
        """GB/s of the message."""
        return SIZE_BYTES / self.seconds / 1e9

    @property
    def ratio(self) -> float:
        """Over the certified bound."""
        return self.seconds / self.bound_s


@dataclass(frozen=True, slots=True)
class ForestCollRows(Measured):
    """The rows and the versions."""

    format: ClassVar[str] = "optcc-forestcoll-rows/1"
    own_path: ClassVar[Path] = RECORDS / "forestcoll-rows.json"
    docs_page: ClassVar[str] = "schedules.md"
    rooms: ClassVar[tuple[str, ...]] = PLANNED_ROOMS

    versions: dict[str, str]
    rows: tuple[ForestCollRow, ...]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.rows):
            where = f"rows[{number}]"
            check(f"{where}.topology", row.topology, row.topology in FORESTCOLL, "be one of those of the table")
            names = SCHEDULES_OF.get(row.collective, ())
            check(f"{where}.schedule", row.schedule, row.schedule in names, "be one for the collective")
            check(f"{where}.bound_s", row.bound_s, row.bound_s > 0, "be above zero")
            check(f"{where}.seconds", row.seconds, row.ratio > 1 - 1e-9, "be no less than the bound")

    def card(self) -> Card:
        def shown(row: ForestCollRow) -> tuple[str, str]:
            return f"{row.throughput:.2f}", f"{row.ratio:.4f}, {row.schedule.partition('-')[0]}, {row.segments}"

        lines = []
        for text in dict.fromkeys(row.topology for row in self.rows):
            found = {row.collective: row for row in self.rows if row.topology == text}
            cells = [cell for name in SCHEDULES_OF for cell in (shown(found[name]) if name in found else ("-", "-"))]
            bound = SIZE_BYTES / min(row.bound_s for row in found.values()) / 1e9
            lines.append((f"`{text}`", f"{FORESTCOLL[text]:.2f}", f"{bound:.2f}", *cells))
        heads = ("GB/s", "ForestColl", "bound", "AllGather", "over T*", "ReduceScatter", "over T*")
        return Card("1 GiB: GB/s of the message, and time over the certified bound", heads, tuple(lines))


def measure(text: str, collective: str, segments: tuple[int, ...] = SEGMENTS) -> ForestCollRow:
    """The row of a collective on a topology: the first plan within `NEAR` of the bound, else the nearest one."""
    topology = Topology.parse(text)
    least = float(least_seconds(topology, SIZE_BYTES, Collective(collective, topology.n_ranks)))
    best: ForestCollRow | None = None
    for name in SCHEDULES_OF[collective]:
        definition = find_schedule(name)
        with suppress(TopologyError):
            for count in segments:
                schedule = definition.build(topology, count)
                if len(schedule) > TRANSFERS_MAX:
                    break
                plan = compile_schedule(schedule, size_bytes=SIZE_BYTES, topology=topology, ports=PORTS)
                timing = simulate(plan, topology, model=PORTS)
                row = ForestCollRow(text, collective, least, name, count, len(plan.transfers), timing.seconds)
                best = row if best is None or row.seconds < best.seconds else best
                if best.ratio <= NEAR:
                    return best
                if max(timing.port_busy_s) > NEAR * least:
                    break
    assert best is not None, "a packing takes every topology"
    return best


def _measure(case: tuple[str, str]) -> ForestCollRow:
    return measure(*case)


@record_command(ForestCollRows, RecordForm(quick={"topologies": tuple(FORESTCOLL)[:1]}, spreads=True))
@click.option("--topology", "topologies", multiple=True, type=click.Choice(tuple(FORESTCOLL)), help="Only these.")
def command(topologies: tuple[str, ...], cells: RecordCells) -> ForestCollRows:
    """Simulate AllGather and ReduceScatter on every topology of the table."""
    units = {f"{text}, {name}": (text, name) for text, name in product(topologies or FORESTCOLL, SCHEDULES_OF)}
    return ForestCollRows(these_versions(), tuple(cells.spread(units, _measure, ForestCollRow).values()))
