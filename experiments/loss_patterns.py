"""Random patterns of lost NICs on servers of eight GPUs: our schedules over the certified bound, as a record.

Two to sixteen servers have lost any NICs, at least one is left at each; behind one core, rail-only, or in two pods at
2 : 1. 1 GiB, no latency, the hop to another GPU's NIC charged. Under each port model the best of the schedules in
`TRIED`, in as many chunks as `CHUNKS` says; and what `auto` takes where nothing is lost. The same on every machine. The
record is a file of its own format, `optcc-loss-patterns/2`. The one that comes with the package is made by

    optcc experiment loss-patterns

some five seconds a pattern and port model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import ClassVar

import click
import msgspec

from optcc.collective import Collective
from optcc.errors import TopologyError
from optcc.experiments.cells import RecordCells
from optcc.experiments.made import PLANNED_ROOMS
from optcc.experiments.record import RECORDS, Check, these_versions
from optcc.experiments.recorder import Measured, RecordForm, record_command
from optcc.planner import AUTO, build
from optcc.schedules.equal_trees import equal_trees_of
from optcc.show import Card
from optcc.simulate import simulate
from optcc.timing import Model
from optcc.topology import Nic, Pod, Server, Topology
from optcc.tree_packing import find_pairs
from optcc.verify.bounds.certified import least_seconds

SIZE_BYTES = 2**30
PATTERNS = 200
GPUS = 8
FEW_SERVERS, MANY_SERVERS = (2, 3, 4, 4, 5, 6, 8), (2, 3, 4, 5, 7, 8, 9, 10, 12, 14, 16, 16)
FEW_BELOW = 101
"""Seeds below it draw from `FEW_SERVERS`, the others from `MANY_SERVERS`."""
NIC_RATE = Fraction(50 * 10**9)
FABRIC_RATE = 9 * NIC_RATE
KINDS = ("core", "rails", "pods")
HEALTHY_SERVERS = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16)
HEALTHY = tuple((n, kind) for n in HEALTHY_SERVERS for kind in KINDS if kind != "pods" or n % 2 == 0)
"""Servers that have lost nothing: the seeds -1, -2 and so on."""
THE_PORTS: tuple[Model, ...] = ("fifo", "fair")
CHUNKS: dict[str, int] = {"fifo": 4096, "fair": 8192}
CHUNKS_MIN, TRANSFERS_MAX = 4096, 700_000
"""Fewer chunks, down to the first, where there would be more transfers than the second."""
TIMES_CHUNKS = (1, 4)
"""If nothing comes within `GOAL` in so many times the chunks, more."""
GOAL = 1.05
GOOD = 1.02
"""No further schedule is tried after one that takes at most this."""
TRIED: dict[str, dict[str, Callable[[Topology], Sequence[object]] | None]] = {
    "fifo": {"equal-trees": equal_trees_of, "packed": find_pairs, "nic-trees": None},
    "fair": {"equal-trees": equal_trees_of, "packed": find_pairs},
}
"""The schedules, and what finds their trees; where every segment has its own, nothing does."""


class LossPattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a schedule takes under the loss that `seed` draws, or with a negative one where nothing is lost; `kept` are
    the NICs left at each server, by number, and `trees` those of the schedule, 0 where every segment has its own, or
    where `auto` has chosen it."""

    seed: int
    kind: str
    kept: tuple[int, ...]
    ports: str
    schedule: str
    trees: int
    seconds: float
    bound_s: float

    @property
    def ratio(self) -> float:
        """Over the certified bound."""
        return self.seconds / self.bound_s

    @property
    def name(self) -> str:
        """In words."""
        if self.is_healthy:
            return f"{self.kind}, {len(self.kept)} servers"
        return f"{self.kind}, NICs left {' '.join(map(str, self.kept))} (seed {self.seed})"

    @property
    def is_healthy(self) -> bool:
        """True if it is one of `HEALTHY`, and not drawn."""
        return self.seed < 0


@dataclass(frozen=True, slots=True)
class LossPatterns(Measured):
    """The rows and the versions."""

    format: ClassVar[str] = "optcc-loss-patterns/2"
    own_path: ClassVar[Path] = RECORDS / "loss-patterns.json"
    rooms: ClassVar[tuple[str, ...]] = PLANNED_ROOMS
    docs_page: ClassVar[str] = "schedules.md"

    versions: dict[str, str]
    rows: tuple[LossPattern, ...]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.rows):
            check(f"rows[{number}].kind", row.kind, row.kind in KINDS, f"be one of {', '.join(KINDS)}")
            check(f"rows[{number}].ports", row.ports, row.ports in THE_PORTS, f"be one of {', '.join(THE_PORTS)}")
            check(f"rows[{number}].bound_s", row.bound_s, row.bound_s > 0, "be above zero")
            check(f"rows[{number}].seconds", row.seconds, row.ratio > 1 - 1e-9, "be no less than the bound")

    def under(self, ports: str, *, healthy: bool = False) -> list[LossPattern]:
        """The rows of one port model, the nearest to the bound first: of the patterns, or where nothing is lost."""
        rows = (row for row in self.rows if row.ports == ports and row.is_healthy == healthy)
        return sorted(rows, key=lambda row: row.ratio)

    def card(self) -> Card:
        rows = []
        for healthy, ports in product((False, True), THE_PORTS):
            found = self.under(ports, healthy=healthy)
            if found:
                lost = "nothing" if healthy else "any NICs"
                near = sum(row.ratio <= GOAL for row in found)
                worst = f"{found[-1].ratio:.3f}: {found[-1].name}"
                rows.append((lost, ports, str(len(found)), f"{found[len(found) // 2].ratio:.3f}", str(near), worst))
        heads = ("lost", "ports", "cases", "median", f"≤ {GOAL}", "worst")
        return Card("1 GiB over the certified bound", heads, tuple(rows))


def pattern(seed: int) -> tuple[str, Topology]:
    """The kind of network and the servers of a pattern.

    >>> kind, topology = pattern(0)
    >>> kind in KINDS, {len(server.nics) for server in topology.servers}
    (True, {8})
    """
    rng = random.Random(f"loss pattern {seed}")
    if seed < 0:
        n_servers, kind = HEALTHY[-1 - seed]
    else:
        n_servers, kind = rng.choice(FEW_SERVERS if seed < FEW_BELOW else MANY_SERVERS), rng.choice(KINDS)
    if kind == "pods":
        n_servers += n_servers % 2
    servers: list[Server] = []
    for index in range(n_servers):
        n_gone = rng.choice((0, 0, 1, 2, 4, rng.randint(0, GPUS - 1))) if seed >= 0 else 0
        gone = set(rng.sample(range(GPUS), n_gone))
        nics = tuple(Nic(gpu, NIC_RATE, NIC_RATE, gpu in gone, gpu) for gpu in range(GPUS))
        servers.append(Server(f"h{index}", GPUS, nics, FABRIC_RATE))
    half = n_servers // 2
    pods: tuple[Pod, ...] = ()
    if kind == "pods":
        uplink = half * GPUS * NIC_RATE / 2
        pods = tuple(Pod(f"pod{at}", tuple(range(at * half, (at + 1) * half)), uplink, uplink) for at in (0, 1))
    return kind, Topology(tuple(servers), rail_only=kind == "rails", pods=pods)


def measure(seed: int, ports: Model) -> LossPattern | None:
    """The row of a pattern under these ports; None if its servers cannot all reach each other."""
    kind, topology = pattern(seed)
    try:
        bound_s = float(least_seconds(topology, SIZE_BYTES, Collective("allreduce", topology.n_ranks)))
    except TopologyError:
        return None
    kept = tuple(sum(not nic.failed for nic in server.nics) for server in topology.servers)
    if seed < 0:
        seconds, name = _seconds_of_auto(topology, ports)
        return LossPattern(seed, kind, kept, ports, name, 0, seconds, bound_s)
    chunks = min(CHUNKS[ports], max(CHUNKS_MIN, TRANSFERS_MAX // (2 * topology.n_ranks)))
    found: list[tuple[float, str, int]] = []
    for times, (name, trees_of) in product(TIMES_CHUNKS, TRIED[ports].items()):
        if found and min(found)[0] <= (GOOD if times == TIMES_CHUNKS[0] else GOAL) * bound_s:
            break
        with suppress(TopologyError):  # few equal trees, or a rail that all servers have, need not be there
            trees = len(trees_of(topology)) if trees_of is not None else 0
            found.append((_seconds(name, topology, max(1, times * chunks // max(1, trees)), ports), name, trees))
    seconds, name, trees = min(found)
    return LossPattern(seed, kind, kept, ports, name, trees, seconds, bound_s)


def _seconds(name: str, topology: Topology, segments: int, ports: Model) -> float:
    plan = build(name, topology, SIZE_BYTES, segments=segments, ports=ports).plan
    return simulate(plan, topology, model=ports).seconds


def _seconds_of_auto(topology: Topology, ports: Model) -> tuple[float, str]:
    built = build(AUTO, topology, SIZE_BYTES, ports=ports)
    timing = built.timing or simulate(built.plan, topology, model=ports)
    return timing.seconds, built.definition.name


def _measure(case: tuple[int, Model]) -> LossPattern | None:
    return measure(*case)


def make(patterns: int, cells: RecordCells, healthy: int = len(HEALTHY)) -> LossPatterns:
    """The record of so many patterns: of the first seeds whose servers can all reach each other; and of the first
    `HEALTHY` ones."""
    cases = product(range(-1, -1 - healthy, -1), THE_PORTS)
    nothing_lost = {f"nothing lost {-seed}, {ports}": (seed, ports) for seed, ports in cases}
    rows = [row for row in cells.spread(nothing_lost, _measure, LossPattern | None).values() if row is not None]
    seed = 0
    while (lacking := patterns - len({row.seed for row in rows if not row.is_healthy})) > 0:
        drawn = product(range(seed, seed + lacking), THE_PORTS)
        units = {f"pattern {each}, {ports}": (each, ports) for each, ports in drawn}
        rows += [row for row in cells.spread(units, _measure, LossPattern | None).values() if row is not None]
        seed += lacking
    return LossPatterns(these_versions(), tuple(rows))


@record_command(LossPatterns, RecordForm(quick={"patterns": 3, "healthy": 3}, spreads=True))
@click.option("--patterns", type=click.IntRange(1), default=PATTERNS, show_default=True, help="How many.")
@click.option(
    "--healthy",
    type=click.IntRange(0, len(HEALTHY)),
    default=len(HEALTHY),
    show_default=True,
    help="How many networks on which nothing is lost, the smallest first.",
)
def command(patterns: int, healthy: int, cells: RecordCells) -> LossPatterns:
    """Hold our schedules against the bound on random patterns of lost NICs."""
    return make(patterns, cells, healthy)
