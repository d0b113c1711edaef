"""AllReduce while congestion comes and goes at one NIC, ours told nothing beside Open MPI's ring, as a record.

    optcc experiment passing-congestion           (about fifteen minutes, on a quiet machine)

A job on emulated hosts reduces 64 MiB again and again. Meanwhile one NIC falls to half of its rate for a while, has its
rate back for as long, and so on. A contender has a job of its own for each length of the congestion, and runs until so
many periods have passed. What no schedule can beat is what the NICs could carry: the time of the runs in each state of
the NICs over the T* of that state is the number of AllReduces that were possible, and the time over the least is that
number over the number of runs. A plan for half of a NIC is worth its making only where the congestion lasts; where it
passes sooner than ranks can measure it, each change of plans is a loss, and the record counts them. The record is a
file of its own format, `optcc-passing-congestion/1`. Needs root, for the hosts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, ClassVar

import click
import msgspec

from optcc.errors import RuntimeFault
from optcc.experiments.cells import RecordCells
from optcc.experiments.disturbance import Disturbance, timed
from optcc.experiments.fabric import Fabric, FabricSpec, NicRates
from optcc.experiments.peers import MPI_RING
from optcc.experiments.record import RECORDS, Check
from optcc.experiments.recorder import Measured, RecordForm, check_times, head, record_command
from optcc.experiments.reducing_job import PEER, SLICES, ReducingJob, TimedRun
from optcc.experiments.untold import bound_of
from optcc.show import Card
from optcc.units import show_size

HOSTS, SIZE_BYTES, NIC = "4x2@400Mbit/s", 64 << 20, "h1.eth1"
FULL, CONGESTED = "400Mbit/s", "200Mbit/s"
LASTING_S = (0.25, 1.0, 4.0, 16.0)
"""How long the congestion lasts, and how long it then stays away, seconds."""
LEAST_PERIODS, LEAST_S = 3, 40.0
"""A job runs for so many periods, and so long, at least."""
OURS, OPEN_MPI = "optcc", "Open MPI ring"
_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class ReducingContender:
    """How the ranks reduce, and arguments of mpirun."""

    way: str
    mpi: tuple[str, ...] = ()


CONTENDERS: Mapping[str, ReducingContender] = {
    OURS: ReducingContender(SLICES),
    OPEN_MPI: ReducingContender(PEER, MPI_RING),
}


class CongestionRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A contender while congestion of `lasting_s` comes and goes: `congested` are its beginnings and ends, on the clock
    of the runs; T* without it and with it; the median of runs before the first one."""

    lasting_s: float
    contender: str
    bound_s: float
    bound_congested_s: float
    healthy_s: float
    congested: tuple[tuple[float, float], ...]
    runs: tuple[TimedRun, ...]

    @property
    def possible(self) -> float:
        """How many AllReduces the NICs could have carried in the time of the runs."""
        return sum(map(self.possible_in, self.runs))

    def possible_in(self, run: TimedRun) -> float:
        """How many they could have carried in the time of one: its time over the least."""
        end_s = run.began_s + run.seconds
        return _possible(run.began_s, end_s, self.congested, self.bound_s, self.bound_congested_s)

    @property
    def ratio(self) -> float:
        """The time over the least."""
        return self.possible / len(self.runs)

    @property
    def changes(self) -> int:
        """Changes of plans."""
        return sum(run.epochs for run in self.runs)


def _possible(
    begin_s: float, end_s: float, congested: Sequence[tuple[float, float]], bound_s: float, bound_congested_s: float
) -> float:
    """AllReduces that could be carried from `begin_s` to `end_s`.

    >>> _possible(0.0, 4.0, [(1.0, 2.0), (3.0, 9.0)], 1.0, 2.0)
    3.0
    """
    slow_s = sum(max(0.0, min(end_s, end) - max(begin_s, begin)) for begin, end in congested)
    return (end_s - begin_s - slow_s) / bound_s + slow_s / bound_congested_s


@dataclass(frozen=True, slots=True)
class PassingCongestion(Measured):
    """The rows, the machine and the versions."""

    format: ClassVar[str] = "optcc-passing-congestion/1"
    own_path: ClassVar = RECORDS / "passing-congestion.json"
    docs_page: ClassVar[str] = "failover.md"

    machine: dict[str, Any]
    versions: dict[str, str]
    hosts: str
    size_bytes: int
    rows: tuple[CongestionRow, ...]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.rows):
            name = f"rows[{number}]"
            check(f"{name}.contender", row.contender, row.contender in CONTENDERS, f"be of {', '.join(CONTENDERS)}")
            check(f"{name}.bound_s", row.bound_s, row.bound_s > 0, "be above 0")
            in_order = row.bound_congested_s >= row.bound_s
            check(f"{name}.bound_congested_s", row.bound_congested_s, in_order, "be no less than bound_s")
            check_times(check, f"{name}.runs.seconds", [run.seconds for run in row.runs])

    def card(self) -> Card:
        rows = tuple(
            (
                f"{row.lasting_s:g} s",
                row.contender,
                f"{row.healthy_s / row.bound_s:.3f}",
                f"{row.bound_congested_s / row.bound_s:.2f}",
                f"{row.ratio:.2f}",
                f"{max(run.seconds for run in row.runs) / row.bound_s:.2f}",
                str(len(row.runs)),
                str(len(row.congested)),
                str(row.changes) if row.contender == OURS else "-",
                str(sum(run.wrong for run in row.runs)),
            )
            for row in self.rows
        )
        heads = (
            *("lasting", "contender", "healthy / T*", "T* congested / T*", "time / least", "slowest run / T*"),
            *("runs", "congestions", "changes of plans", "wrong elements"),
        )
        return Card(f"AllReduce of {show_size(self.size_bytes)}, {self.hosts}, congestion at one NIC", heads, rows)


class Congestion(Disturbance):
    """One NIC that falls to half of its rate and rises again, in a thread, while the context lasts; afterwards it has
    its full rate.

    A span begins and ends in the middle of the time that the change of the rate takes.
    """

    def __init__(self, fabric: Fabric, lasting_s: float) -> None:
        super().__init__()
        self.spans: list[tuple[float, float]] = []
        self._fabric, self._lasting_s = fabric, lasting_s

    def disturb(self) -> None:
        """Congestion, and none, for as long each."""
        while not self.stopped.wait(self._lasting_s):
            begin_s = self._set(CONGESTED)
            self.stopped.wait(self._lasting_s)
            self.spans.append((begin_s, self._set(FULL)))

    def _set(self, rate: str) -> float:
        return timed(lambda: self._fabric.set_rate(NIC, NicRates.parse(rate)))


def measure_row(lasting_s: float, contender: str, size_bytes: int, least_s: float) -> CongestionRow:
    """One row. Raises RuntimeFault if a rank fails, or is wrong before the first congestion."""
    asked = CONTENDERS[contender]
    with Fabric.up(FabricSpec.parse(HOSTS, name=f"congestion-{os.getpid()}")) as fabric:
        bound_s = bound_of(fabric.state(), size_bytes)
        fabric.set_rate(NIC, NicRates.parse(CONGESTED))
        bound_congested_s = bound_of(fabric.state(), size_bytes)
        fabric.set_rate(NIC, NicRates.parse(FULL))
        job = ReducingJob(fabric, asked.way, size_bytes, asked.mpi)
        runs: list[TimedRun] = []
        try:
            healthy = sorted([job.run() for _ in range(2 * _WARM_UP)][_WARM_UP:])
            with Congestion(fabric, lasting_s) as congestion:
                origin_s = time.monotonic()
                while time.monotonic() - origin_s < max(least_s, 2 * LEAST_PERIODS * lasting_s):
                    runs.append(job.timed(origin_s))
        finally:
            job.close()
    if not congestion.spans:
        raise RuntimeFault(f"no congestion of {lasting_s:g} s ended in the time of the runs")
    spans = tuple((begin - origin_s, end - origin_s) for begin, end in congestion.spans)
    healthy_s = healthy[len(healthy) // 2]
    return CongestionRow(lasting_s, contender, bound_s, bound_congested_s, healthy_s, spans, tuple(runs))


@record_command(PassingCongestion, RecordForm(quick={"lasting": (1.0,), "least_s": 8.0}))
@click.option("--lasting", type=click.FloatRange(0.05, 60), multiple=True, help="Seconds; several by default.")
@click.option("--least", "least_s", type=click.FloatRange(1, 600), default=LEAST_S, show_default=True, help="Of a job.")
def command(quick: bool, lasting: tuple[float, ...], least_s: float, cells: RecordCells) -> PassingCongestion:
    """Time AllReduce while congestion comes and goes; quick: of one length, for a few seconds."""
    size_bytes = SIZE_BYTES // 4 if quick else SIZE_BYTES
    units = {
        f"{each:g} s, {contender}": partial(measure_row, each, contender, size_bytes, least_s)
        for each, contender in product(lasting or LASTING_S, CONTENDERS)
    }
    rows = tuple(cells.each(units, CongestionRow))
    return PassingCongestion(**head(), hosts=HOSTS, size_bytes=size_bytes, rows=rows)
