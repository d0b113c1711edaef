"""How near `auto` comes to the fastest schedule of the library on real transports, as a record.

For each of six collectives, three sizes and the transports of `TRANSPORTS` a job runs what `auto` chooses and every
schedule of the library that accepts the ranks, interleaved round by round (`optcc bench`). The fastest is found in the
first half of the rounds, by the median, and held against `auto` in the second half: of the same rounds for both, it
would be the one that was lucky there. The ratio is the median of those of the rounds, which a drift of the machine does
not change, and its spread is between their quartiles. Where both have the same plan the ratio is one but for the noise
of the machine, which the record so says of itself.

An emulated NIC that was idle sends at once what it carries in some milliseconds, so that a short message may take less
than the lower bound on the hosts' rates. Which schedule has most of that says nothing of NICs: a row of them counts if
it is more than one part in twenty of the bound. Made by

    optcc experiment auto-measured
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import click
import msgspec

from optcc.collective import Collective
from optcc.errors import RuntimeFault
from optcc.experiments.bench import message_bytes
from optcc.experiments.cells import RecordCells
from optcc.experiments.fabric import WIRE_OVERHEAD, Fabric, FabricSpec, FabricState, run_local_job
from optcc.experiments.fabric.processes import launch
from optcc.experiments.fabric.scripts import BURST_MS
from optcc.experiments.record import RECORDS, BenchTiming, Check, Record
from optcc.experiments.recorder import Measured, RecordForm, check_times, former_of, head, record_command
from optcc.planner import AUTO
from optcc.schedules.auto_collectives import candidates_for
from optcc.show import Card
from optcc.topology import Topology
from optcc.units import show_size
from optcc.verify.bounds.certified import least_seconds

COLLECTIVES = ("allreduce", "reducescatter", "allgather", "broadcast", "reduce", "alltoall")
SIZES = (64 << 10, 1 << 20, 16 << 20)
RANKS, ROUNDS = 4, 16
SHORT_BYTES, SHORT_ROUNDS = 1 << 20, 4
"""Up to so many bytes a processor that does something else for a moment counts, and rounds cost little."""
LOOPBACK = f"{RANKS}@200MB/s"
FABRIC = f"{RANKS}x2@200Mbit/s"
TRANSPORTS = ("loopback", "MPI in shared memory", "MPI over NICs", "TCP over NICs")
GOAL = 1.05
SHORTEST_S = BURST_MS / 1e3 / (GOAL - 1)
"""A message over emulated NICs that takes at least so long is not sent any faster than `GOAL` allows by what a token
bucket has saved up."""
_TIMEOUT_S = 540.0


class MeasuredRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A collective of one size over one transport: the seconds of `auto`, whose choice is `chosen`, and of every
    schedule, round by round; `same` are those that run the plan of `auto`."""

    transport: str
    collective: str
    size_bytes: int
    chosen: str
    segments: int
    seconds: tuple[float, ...]
    schedules: dict[str, tuple[float, ...]]
    same: tuple[str, ...]
    wrong: int

    @property
    def best(self) -> str:
        """The fastest in the first half of the rounds."""
        half = len(self.seconds) // 2
        return min(self.schedules, key=lambda name: statistics.median(self.schedules[name][:half]))

    @property
    def ratios(self) -> tuple[float, float, float]:
        """`auto` over the best in the rounds of the second half: first quartile, median, third quartile."""
        half = len(self.seconds) // 2
        pairs = zip(self.seconds[half:], self.schedules[self.best][half:], strict=True)
        low, middle, high = statistics.quantiles((ours / other for ours, other in pairs), n=4, method="inclusive")
        return low, middle, high

    @property
    def is_over(self) -> bool:
        """Whether the best is another plan than that of `auto`, which takes more than the goal by the median."""
        return self.best not in self.same and self.ratios[1] > GOAL

    @property
    def is_beyond(self) -> bool:
        """Whether it does so by more than the spread."""
        return self.is_over and self.ratios[0] > GOAL


@dataclass(frozen=True, slots=True)
class AutoMeasured(Measured):
    """The rows, on which topologies, the machine and the versions."""

    format: ClassVar[str] = "optcc-auto-measured/1"
    own_path: ClassVar[Path] = RECORDS / "auto-measured.json"
    docs_page: ClassVar[str] = "schedules.md"

    machine: dict[str, Any]
    versions: dict[str, str]
    loopback: str
    fabric: str
    rows: tuple[MeasuredRow, ...]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.rows):
            where = f"rows[{number}]"
            known = (("transport", row.transport, TRANSPORTS), ("collective", row.collective, COLLECTIVES))
            for name, value, names in known:
                check(f"{where}.{name}", value, value in names, f"be one of {', '.join(names)}")
            check_times(check, f"{where}.seconds", row.seconds)
            check(f"{where}.schedules", list(row.schedules), bool(row.schedules), "be one or more")
            for name, seconds in row.schedules.items():
                check_times(check, f"{where}.schedules[{name}]", seconds)
                same = 4 <= len(seconds) == len(row.seconds)
                check(f"{where}.schedules[{name}]", len(seconds), same, "be of as many rounds as auto, four or more")
            check(f"{where}.same", row.same, set(row.same) <= set(row.schedules), "be schedules of this row")

    def card(self) -> Card:
        rows = []
        for row in self.rows:
            low, middle, high = row.ratios
            rows.append(
                (
                    *(row.transport, row.collective, show_size(row.size_bytes)),
                    f"{row.chosen}, {row.segments}",
                    f"{statistics.median(row.seconds) * 1e3:.3g} ms",
                    row.best + (" (the same plan)" if row.best in row.same else ""),
                    f"{middle:.3f} ({low:.3f} to {high:.3f})",
                    str(row.wrong),
                )
            )
        heads = (
            *("transport", "collective", "size", "auto, segments", "auto takes", "the best schedule"),
            *("auto / the best", "wrong elements"),
        )
        return Card("auto over the best schedule, measured", heads, tuple(rows))

    def markdown(self) -> str:
        """The table, and in how many cases another plan is faster, as in docs/schedules.md."""
        return f"{self.card().markdown()}\n{self.remarks()[0]}\n"

    def remarks(self) -> list[str]:
        rated: list[MeasuredRow] = []
        others: list[MeasuredRow] = []
        for row in self.rows:
            (rated if self.is_by_rates(row) else others).append(row)
        over, beyond = sum(row.is_over for row in rated), sum(row.is_beyond for row in rated)
        more = sum(row.is_over for row in others)
        told = (
            f" So it does in {more} of the {len(others)} over NICs whose lower bound is below {1e3 * SHORTEST_S:g} ms, "
            f"which do not count: an emulated NIC that was idle sends at once what it carries in {BURST_MS} ms."
        )
        return [
            f"In {over} of {len(rated)} cases auto takes more than {GOAL} of another plan by the median, "
            f"in {beyond} in three quarters of the rounds or more.{told if others else ''}"
        ]

    def is_by_rates(self, row: MeasuredRow) -> bool:
        """Whether what a row takes is by the rates of its NICs, if it has any."""
        if not row.transport.endswith("NICs"):
            return True
        hosts = FabricState.fresh(FabricSpec.parse(self.fabric), "up", 1).topology()
        wanted = Collective(row.collective, hosts.n_ranks)
        return float(least_seconds(hosts, message_bytes(wanted, row.size_bytes), wanted)) >= SHORTEST_S


def schedules_of(collective: str, topology: Topology) -> tuple[str, ...]:
    """The names of the library's schedules that are for this many ranks."""
    return tuple(each.name for each in candidates_for(Collective(collective, topology.n_ranks), topology))


def rounds_of(size_bytes: int, rounds: int) -> int:
    """Short messages run `SHORT_ROUNDS` times as often as long ones.

    >>> rounds_of(64 << 10, 16), rounds_of(16 << 20, 16)
    (64, 16)
    """
    return rounds * (SHORT_ROUNDS if size_bytes <= SHORT_BYTES else 1)


def bench_words(transport: str, collective: str, size_bytes: int, rounds: int) -> list[str]:
    """The arguments of `optcc bench`, `auto` first."""
    carrier = transport.partition(" ")[0].lower()
    words = ["bench", "--transport", carrier, "--collective", collective, "--mode", "out", "--quiet"]
    if carrier == "loopback":
        words += ["--topology", LOOPBACK]
    elif carrier == "mpi" and transport.endswith("NICs"):
        words += ["--wire-overhead", WIRE_OVERHEAD]
    words += ["-b", str(size_bytes), "-e", str(size_bytes), "-n", str(rounds), "-w", "2"]
    for name in (AUTO, *schedules_of(collective, Topology.parse(LOOPBACK))):
        words += ["--schedule", name]
    return words


def run_job(fabric: Fabric | None, transport: str, words: Sequence[str]) -> Record:
    """The record of one job. Raises RuntimeFault if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        command = [sys.executable, "-P", "-m", "optcc", *words, "-J", str(path)]
        if transport == TRANSPORTS[1]:
            run_local_job(command, RANKS, timeout_s=_TIMEOUT_S)
            return Record.read(path)
        if transport == "loopback":
            done = launch(command, os.environ, _TIMEOUT_S, capture=True)
        else:
            assert fabric is not None
            told = ["env", "-u", "OPTCC_TOPOLOGY"] if transport.startswith("TCP") else []
            done = fabric.run([*told, *command], capture=True, timeout_s=_TIMEOUT_S)
        if done.exit_code:
            raise RuntimeFault(f"{transport}, {' '.join(words[3:5])}: {done.stderr.strip()[-500:]}")
        return Record.read(path)


def row_of(transport: str, record: Record) -> MeasuredRow:
    """The row of a job's only size, of whose record the first row is that of `auto`."""
    auto, *others = record.rows
    return MeasuredRow(
        *(transport, auto.collective, auto.size_bytes, auto.schedule, auto.segments, _seconds(auto)),
        schedules={each.schedule: _seconds(each) for each in others},
        same=tuple(each.schedule for each in others if each.digest == auto.digest),
        wrong=sum(each.wrong for each in (auto, *others)),
    )


def _seconds(row: BenchTiming) -> tuple[float, ...]:
    """All of them: they are of the rounds of the others."""
    assert row.out_of_place is not None
    return tuple(row.out_of_place.seconds)


def measure(
    fabric: Fabric | None, transport: str, collective: str, sizes: Sequence[int], rounds: int
) -> list[MeasuredRow]:
    """A row for each size, in a job of its own."""
    words = (bench_words(transport, collective, size, rounds_of(size, rounds)) for size in sizes)
    return [row_of(transport, run_job(fabric, transport, each)) for each in words]


_QUICK: Mapping[str, Any] = {
    "transports": ("loopback",),
    "collectives": ("broadcast",),
    "sizes_kib": (64,),
    "rounds": 4,
}


@record_command(AutoMeasured, RecordForm(quick=_QUICK))
@click.option(
    *("--transport", "transports"), type=click.Choice(TRANSPORTS), multiple=True, help="Only this; the others stay."
)
@click.option(
    *("--collective", "collectives"), type=click.Choice(COLLECTIVES), multiple=True, help="Only this; the others stay."
)
@click.option(
    *("--size", "sizes_kib"),
    type=click.IntRange(1),
    multiple=True,
    default=[size >> 10 for size in SIZES],
    show_default=True,
    help="KiB.",
)
@click.option(
    "--rounds",
    type=click.IntRange(4),
    default=ROUNDS,
    show_default=True,
    help="Of each schedule, 4 times as many up to 1 MiB.",
)
def command(
    transports: tuple[str, ...],
    collectives: tuple[str, ...],
    sizes_kib: tuple[int, ...],
    rounds: int,
    quick: bool,
    cells: RecordCells,
) -> AutoMeasured:
    """Hold auto against every schedule of the library, on real transports."""
    asked = list(product(transports or TRANSPORTS, collectives or COLLECTIVES))
    sizes = [each << 10 for each in sizes_kib]
    needs_hosts = any(transport.endswith("NICs") for transport, _ in asked)
    fabric = Fabric.up(FabricSpec.parse(FABRIC, name=f"auto-{os.getpid()}")) if needs_hosts else None
    try:
        units = {
            f"{collective}, {transport}": partial(measure, fabric, transport, collective, sizes, rounds)
            for transport, collective in asked
        }
        rows = [row for cell in cells.each(units, list[MeasuredRow]) for row in cell]
    finally:
        if fabric is not None:
            fabric.down()
    former = former_of(AutoMeasured, cells) if (transports or collectives) and not quick else None
    if former is not None:
        rows += [row for row in former.rows if (row.transport, row.collective) not in asked]
    order = [*product(TRANSPORTS, COLLECTIVES)]
    rows.sort(key=lambda row: (order.index((row.transport, row.collective)), row.size_bytes))
    return AutoMeasured(**head(), loopback=LOOPBACK, fabric=FABRIC, rows=tuple(rows))
