"""Six collectives on emulated hosts beside Open MPI with the fastest of its algorithms for each, as a record.

Four hosts of two NICs (`FABRIC`), healthy, with one NIC at half, and with one NIC down. Ours is `auto` over TCP, told
nothing of the hosts; the run-time measures the NICs. Open MPI is over TCP and both NICs, too. Which of its algorithms
(`ALGORITHMS`, of the module `tuned`) suits the collective is found in each state: every one of them has a job there,
and the fastest takes part in the rounds. In each round both have a job of their own with a few runs, of which the
first does not count. T* is the certified bound, rail by rail, in payload bytes. Every element of every run is checked.
Made by

    optcc experiment collectives-on-fabric
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import click
import msgspec

from optcc.collective import Collective
from optcc.experiments.bench import message_bytes
from optcc.experiments.bench_jobs import STATES, in_state, run_bench, times_of
from optcc.experiments.cells import RecordCells
from optcc.experiments.fabric import Fabric, FabricSpec
from optcc.experiments.record import RECORDS, Check, Record
from optcc.experiments.recorder import Measured, RecordForm, check_times, former_of, head, record_command
from optcc.experiments.untold import topology_of
from optcc.show import Card
from optcc.units import show_size
from optcc.verify.bounds.certified import least_seconds

FABRIC = "4x2@200Mbit/s"
SIZE_BYTES, ROUNDS, RUNS = 32 << 20, 2, 5
OURS = ("--transport", "tcp", "--schedule", "auto")
PEER = ("--transport", "mpi", "--peer", "mpi")
DEFAULT = "as Open MPI chooses"
_TIMEOUT_S = 240.0
_OUT_OF_PLACE = ("reducescatter", "alltoall")
"""Collectives that `optcc.experiments.peers.MpiPeer` runs out of place only. The others are run in place."""


def _tuned(call: str, number: int, segment_bytes: int = 0) -> tuple[str, ...]:
    """The arguments of mpirun for one algorithm of the module `tuned`."""
    name = f"coll_tuned_{call}_algorithm"
    chosen = ("--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll", "^han", "--mca", name, str(number))
    return (*chosen, "--mca", f"{name}_segmentsize", str(segment_bytes)) if segment_bytes else chosen


ALGORITHMS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "allreduce": {
        "ring": _tuned("allreduce", 4),
        "ring, 256 KiB": _tuned("allreduce", 5, 1 << 18),
        "ring, 1 MiB": _tuned("allreduce", 5, 1 << 20),
        "Rabenseifner": _tuned("allreduce", 6),
    },
    "reducescatter": {
        "recursive halving": _tuned("reduce_scatter", 2),
        "ring": _tuned("reduce_scatter", 3),
        "butterfly": _tuned("reduce_scatter", 4),
    },
    "allgather": {
        "Bruck": _tuned("allgatherv", 2),
        "ring": _tuned("allgatherv", 3),
        "neighbor exchange": _tuned("allgatherv", 4),
    },
    "broadcast": {
        "chain, 128 KiB": _tuned("bcast", 3, 1 << 17),
        "chain, 256 KiB": _tuned("bcast", 3, 1 << 18),
        "chain, 1 MiB": _tuned("bcast", 3, 1 << 20),
        "scatter and ring": _tuned("bcast", 9),
        "split binary tree, 256 KiB": _tuned("bcast", 4, 1 << 18),
    },
    "reduce": {
        "chain, 128 KiB": _tuned("reduce", 3, 1 << 17),
        "chain, 256 KiB": _tuned("reduce", 3, 1 << 18),
        "chain, 1 MiB": _tuned("reduce", 3, 1 << 20),
        "Rabenseifner": _tuned("reduce", 7),
    },
    "alltoall": {
        "linear": _tuned("alltoall", 1),
        "pairwise": _tuned("alltoall", 2),
        "linear, synchronised": _tuned("alltoall", 4),
    },
}
"""By collective, those of Open MPI's algorithms that are meant for long messages, beside what it chooses itself."""


class CollectivesRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A collective in a state of the hosts: every run's seconds, ours and Open MPI's, and how many elements were wrong.

    `tried` is what each of Open MPI's algorithms took in the trial before, the median in seconds; `algorithm` is the
    one that took part, started with `peer_settings`.
    """

    collective: str
    state: str
    size_bytes: int
    bound_s: float
    schedule: str
    segments: int
    seconds: tuple[float, ...]
    wrong: int
    algorithm: str
    peer_settings: str
    peer_seconds: tuple[float, ...]
    peer_wrong: int
    tried: dict[str, float]

    @property
    def speed(self) -> float:
        """Ours over Open MPI's, by the medians."""
        return statistics.median(self.peer_seconds) / statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class CollectivesOnFabric(Measured):
    """The rows, the fabric, the machine and the versions."""

    format: ClassVar[str] = "optcc-collectives-on-fabric/1"
    own_path: ClassVar[Path] = RECORDS / "collectives-on-fabric.json"
    docs_page: ClassVar[str] = "fabric.md"

    machine: dict[str, Any]
    versions: dict[str, str]
    fabric: str
    rows: tuple[CollectivesRow, ...]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.rows):
            where = f"rows[{number}]"
            known = (("collective", row.collective, ALGORITHMS), ("state", row.state, STATES))
            for name, value, names in known:
                check(f"{where}.{name}", value, value in names, f"be one of {', '.join(names)}")
            check(f"{where}.bound_s", row.bound_s, row.bound_s > 0, "be above 0")
            check_times(check, f"{where}.seconds", row.seconds)
            check_times(check, f"{where}.peer_seconds", row.peer_seconds)

    def card(self) -> Card:
        rows = tuple(
            (
                row.collective,
                row.state,
                f"{row.bound_s:.3f} s",
                _over(row.seconds, row.bound_s),
                _over(row.peer_seconds, row.bound_s),
                f"{row.speed:.3f}",
                f"{row.schedule}, {row.segments}",
                row.algorithm,
                str(row.wrong + row.peer_wrong),
            )
            for row in self.rows
        )
        size = show_size(self.rows[0].size_bytes) if self.rows else ""
        heads = (
            *("collective", "state", "T*", "ours / T*", "Open MPI / T*", "speed over Open MPI's"),
            *("plan, segments", "its algorithm", "wrong elements"),
        )
        return Card(f"Collectives of {size}, {self.fabric}", heads, rows)


def _over(seconds: Sequence[float], bound_s: float) -> str:
    """Median, least and most over the bound."""
    middle, least, most = (value / bound_s for value in (statistics.median(seconds), min(seconds), max(seconds)))
    return f"{middle:.3f} ({least:.3f} to {most:.3f})"


def run_job(fabric: Fabric, collective: str, size_bytes: int, words: Sequence[str], mpi: Sequence[str] = ()) -> Record:
    """The record of one job of `optcc bench`, which is told nothing of the hosts. Raises RuntimeFault if it fails."""
    mode = "out" if collective in _OUT_OF_PLACE else "in"
    asked = [*words, "--collective", collective, "--mode", mode, "-b", str(size_bytes), "-n", str(RUNS), "-w", "1"]
    return run_bench(fabric, f"{collective}, {' '.join((*words, *mpi))}", asked, _TIMEOUT_S, mpi=mpi)


def measure(fabric: Fabric, collective: str, state: str, size_bytes: int, rounds: int) -> CollectivesRow:
    """One row; the hosts are healed at the end."""
    wanted = Collective(collective, fabric.state().spec.hosts)
    with in_state(fabric, STATES[state]):
        bound_s = float(least_seconds(topology_of(fabric.state()), message_bytes(wanted, size_bytes), wanted))
        job = partial(run_job, fabric, collective, size_bytes)
        known = {DEFAULT: (), **ALGORITHMS[collective]}
        tried = {name: statistics.median(times_of([job(PEER, mpi)])[0]) for name, mpi in known.items()}
        algorithm = min(tried, key=lambda name: tried[name])
        ours: list[Record] = []
        peers: list[Record] = []
        for _ in range(rounds):
            ours.append(job(OURS))
            peers.append(job(PEER, known[algorithm]))
    plan = ours[0].rows[0]
    seconds, wrong = times_of(ours)
    peer_seconds, peer_wrong = times_of(peers)
    return CollectivesRow(
        *(collective, state, size_bytes, bound_s, plan.schedule, plan.segments, seconds, wrong, algorithm),
        peer_settings=" ".join((*PEER, *known[algorithm])),
        peer_seconds=peer_seconds,
        peer_wrong=peer_wrong,
        tried=tried,
    )


_QUICK = {"collectives": ("broadcast",), "states": ("healthy",), "size_mib": 4, "rounds": 1}


@record_command(CollectivesOnFabric, RecordForm(quick=_QUICK))
@click.option(
    *("--collective", "collectives"),
    type=click.Choice(list(ALGORITHMS)),
    multiple=True,
    help="Only this; the others stay.",
)
@click.option("--state", "states", type=click.Choice(list(STATES)), multiple=True, help="Only this; the others stay.")
@click.option("--size", "size_mib", type=click.IntRange(1), default=SIZE_BYTES >> 20, show_default=True, help="MiB.")
@click.option("--rounds", type=click.IntRange(1), default=ROUNDS, show_default=True, help="Jobs of each contender.")
def command(
    collectives: tuple[str, ...],
    states: tuple[str, ...],
    size_mib: int,
    rounds: int,
    quick: bool,
    cells: RecordCells,
) -> CollectivesOnFabric:
    """Time six collectives on hosts of two NICs, ours and Open MPI's."""
    asked = list(product(collectives or ALGORITHMS, states or STATES))
    with Fabric.up(FabricSpec.parse(FABRIC, name=f"collectives-{os.getpid()}")) as fabric:
        units = {
            f"{collective}, {state}": partial(measure, fabric, collective, state, size_mib << 20, rounds)
            for collective, state in asked
        }
        rows = list(cells.each(units, CollectivesRow))
    former = former_of(CollectivesOnFabric, cells) if (collectives or states) and not quick else None
    if former is not None:
        rows += [row for row in former.rows if (row.collective, row.state) not in asked]
    order = [*product(ALGORITHMS, STATES)]
    in_order = sorted(rows, key=lambda row: order.index((row.collective, row.state)))
    return CollectivesOnFabric(**head(), fabric=FABRIC, rows=tuple(in_order))
