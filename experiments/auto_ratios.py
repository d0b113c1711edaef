"""How far `auto` is from the best single schedule of the library, in simulation, as a record.

The best single schedule is the fastest of all that accept the topology, each compiled for the same ports with the power
of two of segments that suits it best, and `shares` under fair ports also with the lanes that do. The sizes go from 1
KiB to 16 MiB; most are no multiple of anything but an element's four bytes. All is the same on every machine. The
record is a file of its own format, `optcc-auto-ratios/1`. The one that comes with the package is made by

    optcc experiment auto-ratios

in about twenty minutes on one core. After a change of `auto` alone, `--again` keeps what the schedules take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import ClassVar

import click
import msgspec

from optcc.compiler import PEER_LANES, compile_schedule
from optcc.dsl import Definition
from optcc.errors import TopologyError
from optcc.experiments.cells import HERE, RecordCells
from optcc.experiments.made import PLANNED_ROOMS
from optcc.experiments.record import RECORDS, Check, these_versions
from optcc.experiments.recorder import Measured, RecordForm, record_command
from optcc.experiments.schedule_cases import random_rates
from optcc.schedule import Schedule
from optcc.schedules.auto import CHUNK_BYTES_MIN, choose
from optcc.schedules.registry import SCHEDULES
from optcc.show import Card
from optcc.simulate import simulate
from optcc.timing import Model
from optcc.topology import Topology

LATENCY_S = Fraction(5, 10**6)
SIZES = (1024, 5124, 16388, 65532, 2**18, 10**6, 2**21 + 4, 3 * 10**6, 2**23 - 4, 2**24)
THE_PORTS: tuple[Model, ...] = ("fifo", "fair")
TOPOLOGIES = (
    *("4@50GB/s", "8@50GB/s", "16@50GB/s"),
    *("6@50GB/s,2=20GB/s", "7@50GB/s,3=10GB/s", "8@50GB/s,3=25GB/s", "9@50GB/s,3=25GB/s"),
    *("13@50GB/s,3=20GB/s", "16@50GB/s,3=25GB/s", "32@50GB/s,3=25GB/s"),
    *("6@50GB/s,1=25GB/s,4=10GB/s", "8@50GB/s,3=25GB/s,5=10GB/s", "12@50GB/s,1=25GB/s,2=20GB/s"),
    *("6@50GB/s,1=25GB/s:50GB/s", "8@50GB/s,1=25GB/s:50GB/s", "16@50GB/s,1=25GB/s:50GB/s"),
    *(f"5, random rates, seed {seed}" for seed in range(4)),
    *(f"{ranks}, random rates, seed {seed}" for ranks in (6, 8, 10, 12) for seed in (0, 1)),
    *("7, random rates, seed 0", "8, random rates, seed 2", "16, random rates, seed 0"),
)
GOAL = 1.05
HOPELESS, ENOUGH = 5.0, 4
"""A schedule that takes `HOPELESS` times what another one takes gets no more segments than `ENOUGH`."""
TRANSFERS_MAX = 60_000
"""Plans of more transfers are not tried with more than one segment."""


class AutoRatio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `auto` and the best single schedule take for one message, in seconds, and what they are."""

    topology: str
    ports: str
    size_bytes: int
    auto: str
    auto_segments: int
    auto_s: float
    best: str
    best_segments: int
    best_s: float

    @property
    def ratio(self) -> float:
        """`auto` over the best; below one where `auto` has lanes that the compiler does not try."""
        return self.auto_s / self.best_s


@dataclass(frozen=True, slots=True)
class AutoRatios(Measured):
    """The rows and the versions."""

    format: ClassVar[str] = "optcc-auto-ratios/1"
    own_path: ClassVar[Path] = RECORDS / "auto-ratios.json"
    rooms: ClassVar[tuple[str, ...]] = PLANNED_ROOMS
    docs_page: ClassVar[str] = "schedules.md"

    versions: dict[str, str]
    rows: tuple[AutoRatio, ...]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.rows):
            for label, value in (("auto_s", row.auto_s), ("best_s", row.best_s)):
                check(f"rows[{number}].{label}", value, value > 0, "be above zero")

    def worst(self, topology: str, ports: str) -> AutoRatio | None:
        """The row with the largest ratio; None if there is none."""
        rows = [row for row in self.rows if (row.topology, row.ports) == (topology, ports)]
        return max(rows, key=lambda row: row.ratio, default=None)

    def card(self) -> Card:
        rows = []
        for topology in dict.fromkeys(row.topology for row in self.rows):
            worst = [self.worst(topology, ports) for ports in THE_PORTS]
            rows.append(
                (
                    topology,
                    *(f"{row.ratio:.3f} at {row.size_bytes:,} B" if row is not None else "-" for row in worst),
                )
            )
        return Card("auto over the best single schedule", ("topology", *THE_PORTS), tuple(rows))

    def markdown(self) -> str:
        """The table, and how many of the cases are beyond the goal, as in docs/schedules.md."""
        return f"{self.card().markdown()}\n{self.remarks()[0]}\n"

    def remarks(self) -> list[str]:
        over = sum(row.ratio > GOAL for row in self.rows)
        return [f"Of {len(self.rows)} cases {over} are above {GOAL}."]


def cluster(text: str) -> Topology:
    """A topology as users write it, or `P, random rates, seed S`."""
    ranks, found, seed = text.partition(", random rates, seed ")
    return random_rates(int(ranks), int(seed)) if found else Topology.parse(text).with_latency(LATENCY_S)


def best_single(topology: Topology, size_bytes: int, ports: Model) -> tuple[float, str, int]:
    """Seconds, name and segments of the fastest single schedule of the library."""
    best = (float("inf"), "", 0)
    for name, definition in SCHEDULES.items():
        built = definition.under(ports)
        if built.collective == "allreduce" and built.name == name:
            for found in _with_segments(built, topology, size_bytes, ports):
                best = min(best, found)
                if found[2] >= ENOUGH and found[0] > HOPELESS * best[0]:
                    break
    return best


def _with_segments(
    definition: Definition, topology: Topology, size_bytes: int, ports: Model
) -> Iterator[tuple[float, str, int]]:
    """What it takes with 1, 2, 4, ... segments, until that gets worse twice; nothing if it is not for the topology."""
    lanes = PEER_LANES if ports == "fair" and definition.lane_per_peer else (None,)
    segments, worse, best_s = 1, 0, float("inf")
    while worse < 2 and (segments == 1 or size_bytes >= segments * CHUNK_BYTES_MIN):
        try:
            schedule = definition.build(topology, segments)
        except TopologyError:
            return
        if segments > 1 and len(schedule) > TRANSFERS_MAX:
            return
        seconds = min(_simulated_s(schedule, topology, size_bytes, ports, each) for each in lanes)
        yield seconds, definition.name, segments
        worse = worse + 1 if seconds >= best_s else 0
        best_s = min(best_s, seconds)
        segments *= 2


def _simulated_s(
    schedule: Schedule, topology: Topology, size_bytes: int, ports: Model, lanes: tuple[int, int] | None
) -> float:
    plan = compile_schedule(schedule, size_bytes=size_bytes, topology=topology, ports=ports, peer_lanes=lanes)
    return simulate(plan, topology, model=ports).seconds


def compare(text: str, size_bytes: int, ports: Model, best: tuple[float, str, int] | None = None) -> AutoRatio:
    """One case; `best` if it is known what the best single schedule takes."""
    topology = cluster(text)
    chosen = choose(topology, size_bytes, ports=ports)
    auto_s = simulate(chosen.plan, topology, model=ports).seconds
    best_s, name, segments = best or best_single(topology, size_bytes, ports)
    taken = chosen.taken
    return AutoRatio(text, ports, size_bytes, taken.name, taken.segments, auto_s, name, segments, best_s)


@dataclass(frozen=True)
class _Case:
    """A cell: where, how much, and what is known of the best single schedule."""

    topology: str
    ports: Model
    size_bytes: int
    best: tuple[float, str, int] | None


def _compare(case: _Case) -> AutoRatio:
    return compare(case.topology, case.size_bytes, case.ports, case.best)


def measure(topologies: Sequence[str], known: AutoRatios | None = None, cells: RecordCells = HERE) -> AutoRatios:
    """The record of these topologies; what is `known` of the best single schedules is kept."""
    rows = {(row.topology, row.ports, row.size_bytes): row for row in known.rows} if known else {}
    units = {}
    for key in product(topologies, THE_PORTS, SIZES):
        row = rows.get(key)
        best = (row.best_s, row.best, row.best_segments) if row is not None else None
        units[f"{key[0]}, {key[1]}, {key[2]} B"] = _Case(*key, best)
    found = cells.spread(units, _compare, AutoRatio)
    return AutoRatios(these_versions(), tuple(found.values()))


@record_command(AutoRatios, RecordForm(quick={"topologies": TOPOLOGIES[:1]}, spreads=True))
@click.option("--again", is_flag=True, help="Keep what the best single schedules take in the record that is there.")
@click.option("--topology", "topologies", multiple=True, help="Only these topologies.")
def command(again: bool, topologies: tuple[str, ...], cells: RecordCells) -> AutoRatios:
    """Hold auto against the best single schedules."""
    known = None
    if again:
        path = click.get_current_context().params["output"] or AutoRatios.own_path
        known = AutoRatios.read(path)
        cells.join(path)
    return measure(topologies or TOPOLOGIES, known, cells)
