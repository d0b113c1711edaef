"""R2CCL's re-ranking on rail-only servers that lost different rails: NCCL's rings, re-ranked ones, ours, the bound.

Its page states +22 % utilisation, of a configuration that is not known to us. Here two servers or more have lost as
many rails each, no two the same one, every second server none; NICs, fabrics, message and ports are those of
`optcc.experiments.lost_nics`, and each schedule has its best number of segments. The same on every machine. The
record is a file of its own format, `optcc-reranking/1`; the one that comes with the package is made by

    optcc experiment reranking
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from optcc.collective import Collective
from optcc.experiments.cells import RecordCells
from optcc.experiments.lost_nics import FABRIC_RATE, NIC_RATE, PORTS, SIZE_BYTES, simulate_segments
from optcc.experiments.made import PLANNED_ROOMS
from optcc.experiments.record import RECORDS, Check, these_versions
from optcc.experiments.recorder import Measured, RecordForm, record_command
from optcc.planner import find_schedule
from optcc.show import Card
from optcc.topology import Nic, Server, Topology
from optcc.verify.bounds.certified import least_seconds

GPUS = 8
CASES = ((4, 2, 1), (4, 2, 2), (4, 2, 3), (6, 3, 1), (6, 3, 2), (8, 2, 1), (8, 2, 2), (8, 4, 1))
"""Servers, how many of them have lost rails, and how many each."""
BEFORE, AFTER, OURS = "nccl-ring", "r2ccl-rails", "equal-trees"
TRANSFERS_MAX = 2**19


class RerankingRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds and segments of the schedules; `degraded` servers have lost `lost` rails each."""

    servers: int
    degraded: int
    lost: int
    bound_s: float
    seconds: dict[str, float]
    segments: dict[str, int]

    @property
    def gain(self) -> float:
        """Bandwidth of the re-ranked rings over that of the others."""
        return self.seconds[BEFORE] / self.seconds[AFTER]


@dataclass(frozen=True, slots=True)
class Reranking(Measured):
    """The rows and the versions."""

    format: ClassVar[str] = "optcc-reranking/1"
    own_path: ClassVar[Path] = RECORDS / "reranking.json"
    rooms: ClassVar[tuple[str, ...]] = PLANNED_ROOMS
    docs_page: ClassVar[str] = "studies.md"

    versions: dict[str, str]
    rows: tuple[RerankingRow, ...]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.rows):
            where = f"rows[{number}]"
            check(f"{where}.bound_s", row.bound_s, row.bound_s > 0, "be above zero")
            named = {BEFORE, AFTER} <= row.seconds.keys() == row.segments.keys()
            check(f"{where}.seconds", sorted(row.seconds), named, f"have {BEFORE} and {AFTER}, as the segments have")
            least = min(row.seconds.values())
            check(f"{where}.seconds", least, least > row.bound_s * (1 - 1e-9), "be no less than the bound")

    def card(self) -> Card:
        def over(row: RerankingRow, name: str) -> str:
            return f"{row.seconds[name] / row.bound_s:.2f}, {row.segments[name]}" if name in row.seconds else "-"

        rows = tuple(
            (
                *(str(row.servers), f"{row.degraded} x {row.lost}", f"{1e3 * row.bound_s:.3f} ms"),
                *(over(row, name) for name in (BEFORE, AFTER, OURS)),
                f"{100 * (row.gain - 1):+z.0f} %",
            )
            for row in self.rows
        )
        heads = ("servers of 8", "rails lost", "T*", BEFORE, AFTER, OURS, "utilisation")
        return Card("1 GiB, rail-only: time over the certified bound, and the number of segments", heads, rows)


def servers_apart(servers: int, degraded: int, lost: int) -> Topology:
    """Every second server, `degraded` of them, has lost `lost` rails that no other has lost.

    >>> [kept[:2] for kept in sorted(servers_apart(4, 2, 1).rails_kept)]
    [(0, 1), (0, 2), (1, 2)]
    """
    made = []
    for at in range(servers):
        turn, healthy = divmod(at, 2)
        gone = () if healthy or turn >= degraded else range(turn * lost, (turn + 1) * lost)
        nics = tuple(Nic(gpu, NIC_RATE, NIC_RATE, gpu in gone, gpu) for gpu in range(GPUS))
        made.append(Server(f"h{at}", GPUS, nics, FABRIC_RATE))
    return Topology(tuple(made), rail_only=True)


def measure(servers: int, degraded: int, lost: int, transfers_max: int = TRANSFERS_MAX) -> RerankingRow:
    """The row of a case."""
    topology = servers_apart(servers, degraded, lost)
    seconds: dict[str, float] = {}
    segments: dict[str, int] = {}
    for name in (BEFORE, AFTER, OURS):
        runs = simulate_segments(find_schedule(name).under(PORTS), topology, transfers_max)
        if runs:
            segments[name] = min(runs, key=lambda each: runs[each][0])
            seconds[name] = runs[segments[name]][0]
    least = least_seconds(topology, SIZE_BYTES, Collective("allreduce", topology.n_ranks))
    return RerankingRow(servers, degraded, lost, float(least), seconds, segments)


def _measure(case: tuple[int, int, int]) -> RerankingRow:
    return measure(*case)


@record_command(Reranking, RecordForm(quick={}, spreads=True))
def command(quick: bool, cells: RecordCells) -> Reranking:
    """Simulate rings before and after re-ranking, and ours; quick: the first two cases."""
    units = {str(case): case for case in (CASES[:2] if quick else CASES)}
    return Reranking(these_versions(), tuple(cells.spread(units, _measure, RerankingRow).values()))
