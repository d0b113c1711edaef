"""AllReduces in a row before, while and after a NIC fails, ours told nothing beside Open MPI's ring, as a record.

    optcc experiment failure-trace           (about five minutes, on a quiet machine)

A job on emulated hosts reduces 16 MiB again and again. After some seconds one NIC goes down, falls to half of its rate,
or to a hundredth; some seconds later it is healed. A contender has a job of its own for each of these, so that what it
has learned of one is not known in the next; its runs, each with its beginning and time, are the trace of its
throughput. A contender that does not come to the end of a run within `HUNG_S` has hung, and its row ends there. The
record is a file of its own format, `optcc-failure-trace/1`. Needs root, for the hosts.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any, ClassVar

import click
import msgspec

from optcc.experiments.bench_jobs import befall
from optcc.experiments.cells import RecordCells
from optcc.experiments.disturbance import Disturbance, timed
from optcc.experiments.fabric import Fabric, FabricSpec
from optcc.experiments.mid_collective import HOSTS, NIC, STATES
from optcc.experiments.passing_congestion import OPEN_MPI, OURS
from optcc.experiments.peers import MPI_RING
from optcc.experiments.peers_contenders import mptcp_library
from optcc.experiments.peers_on_fabric import allow_multipath
from optcc.experiments.rank_lines import Hung
from optcc.experiments.record import RECORDS, Check
from optcc.experiments.recorder import Measured, RecordForm, check_times, head, record_command
from optcc.experiments.reducing_job import PEER, SLICES, ReducingJob, TimedRun
from optcc.experiments.untold import bound_of
from optcc.show import Card
from optcc.units import show_size

SIZE_BYTES = 16 << 20
BEFORE_S, FAILED_S, AFTER_S = 4.0, 10.0, 8.0
HUNG_S = 20.0
MPTCP = "Open MPI ring, MPTCP"
CONTENDERS = (OURS, OPEN_MPI, MPTCP)
_WARM_UP = 4


class TraceRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A contender while a state lasted from `failed_s` to `healed_s`, on the clock of the runs, -1 if that was not to
    come before a run hung; T* before and meanwhile."""

    state: str
    contender: str
    bound_s: float
    bound_left_s: float
    failed_s: float
    healed_s: float
    runs: tuple[TimedRun, ...]
    has_hung: bool

    def phase(self, number: int) -> tuple[TimedRun, ...]:
        """The runs wholly before the failure, during it, or after it."""
        inf = float("inf")
        healed_s = self.healed_s if self.healed_s >= 0 else inf
        begin_s, end_s = ((-inf, self.failed_s), (self.failed_s, healed_s), (healed_s, inf))[number]
        return tuple(run for run in self.runs if begin_s <= run.began_s and run.began_s + run.seconds <= end_s)

    def ratios(self) -> tuple[float | None, ...]:
        """The median time over T* of the NICs as they are, before, during and after; None where no run was."""
        bounds = self.bound_s, self.bound_left_s, self.bound_s
        phases = [[run.seconds for run in self.phase(number)] for number in range(3)]
        return tuple(median(taken) / bound if taken else None for taken, bound in zip(phases, bounds, strict=True))

    @property
    def longest(self) -> float:
        """The longest run over T* of healthy NICs."""
        return max(run.seconds for run in self.runs) / self.bound_s


@dataclass(frozen=True, slots=True)
class FailureTrace(Measured):
    """The rows, the machine and the versions; contenders that could not run, and why."""

    format: ClassVar[str] = "optcc-failure-trace/1"
    own_path: ClassVar = RECORDS / "failure-trace.json"
    docs_page: ClassVar[str] = "failover.md"

    machine: dict[str, Any]
    versions: dict[str, str]
    hosts: str
    size_bytes: int
    rows: tuple[TraceRow, ...]
    missing: dict[str, str]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.rows):
            name = f"rows[{number}]"
            check(f"{name}.contender", row.contender, row.contender in CONTENDERS, f"be of {', '.join(CONTENDERS)}")
            check(f"{name}.state", row.state, row.state in STATES, f"be of {', '.join(STATES)}")
            check(f"{name}.bound_s", row.bound_s, row.bound_s > 0, "be above 0")
            in_order = row.bound_left_s >= row.bound_s
            check(f"{name}.bound_left_s", row.bound_left_s, in_order, "be no less than bound_s")
            check_times(check, f"{name}.runs.seconds", [run.seconds for run in row.runs])

    def card(self) -> Card:
        rows = tuple(
            (
                row.state,
                row.contender,
                f"{row.bound_left_s / row.bound_s:.2f}",
                *("-" if ratio is None else f"{ratio:.2f}" for ratio in row.ratios()),
                "hung" if row.has_hung else f"{row.longest:.1f}",
                str(sum(run.epochs for run in row.runs)) if row.contender == OURS else "-",
                str(sum(run.wrong for run in row.runs)),
            )
            for row in self.rows
        )
        heads = (
            *("state", "contender", "T* left / T*", "before / T*", "during / T* left", "after / T*", "longest / T*"),
            *("changes of plans", "wrong elements"),
        )
        return Card(f"AllReduces of {show_size(self.size_bytes)} in a row, {self.hosts}", heads, rows)

    def remarks(self) -> tuple[str, ...]:
        return tuple(f"{name}: not run: {why}" for name, why in self.missing.items())


class FailedNic(Disturbance):
    """A NIC that fails after `before_s`, and is healed after `failed_s` more, in a thread, while the context lasts.

    `span` is when that was, on the clock, in the middle of the time that each took; -1 for what was not.
    """

    def __init__(self, fabric: Fabric, what: str, before_s: float, failed_s: float) -> None:
        super().__init__()
        self.span = [-1.0, -1.0]
        self._fabric, self._what, self._waits_s = fabric, what, (before_s, failed_s)

    def disturb(self) -> None:
        """Fails, and is healed."""
        try:
            if not self.stopped.wait(self._waits_s[0]):
                self.span[0] = timed(lambda: befall(self._fabric, NIC, self._what))
                if not self.stopped.wait(self._waits_s[1]):
                    self.span[1] = timed(lambda: self._fabric.heal(NIC))
        finally:
            self._fabric.heal(NIC)


def measure_row(state: str, contender: str, size_bytes: int, scale: float) -> TraceRow:
    """One row; `scale` times as long as usual. Raises RuntimeFault if a rank fails, or is wrong, before the failure."""
    what = STATES[state]
    with Fabric.up(FabricSpec.parse(HOSTS, name=f"trace-{os.getpid()}")) as fabric:
        bound_s = bound_of(fabric.state(), size_bytes)
        befall(fabric, NIC, what)
        left_s = bound_of(fabric.state(), size_bytes)
        fabric.heal(NIC)
        if contender == MPTCP:
            allow_multipath(fabric)
        preload = {"LD_PRELOAD": mptcp_library()} if contender == MPTCP else {}
        ways = (SLICES, ()) if contender == OURS else (PEER, MPI_RING)
        job = ReducingJob(fabric, ways[0], size_bytes, ways[1], preload)
        runs: list[TimedRun] = []
        has_hung = False
        try:
            for _ in range(_WARM_UP):
                job.run()
            with FailedNic(fabric, what, scale * BEFORE_S, scale * FAILED_S) as failure:
                origin_s = time.monotonic()
                while not has_hung and time.monotonic() - origin_s < scale * (BEFORE_S + FAILED_S + AFTER_S):
                    try:
                        runs.append(job.timed(origin_s, HUNG_S))
                    except Hung:
                        if failure.span[0] < 0:
                            raise
                        has_hung = True
        finally:
            if has_hung:
                job.kill()
            job.close()
    failed_s, healed_s = (at_s - origin_s if at_s >= 0 else -1.0 for at_s in failure.span)
    return TraceRow(state, contender, bound_s, left_s, failed_s, healed_s, tuple(runs), has_hung)


@record_command(FailureTrace, RecordForm(quick={"scale": 0.25}))
@click.option("--scale", type=click.FloatRange(0.1, 20), default=1.0, show_default=True, help="Times as long.")
def command(quick: bool, scale: float, cells: RecordCells) -> FailureTrace:
    """Time AllReduces in a row before, while and after a NIC fails; quick: in one state, for a few seconds."""
    missing = {} if mptcp_library() else {MPTCP: "no libmptcpwrap: apt-get install mptcpize"}
    states = list(STATES)[:1] if quick else list(STATES)
    units = {
        f"{state}, {contender}": partial(measure_row, state, contender, SIZE_BYTES, scale)
        for state, contender in product(states, CONTENDERS)
        if contender not in missing
    }
    rows = tuple(cells.each(units, TraceRow))
    return FailureTrace(**head(), hosts=HOSTS, size_bytes=SIZE_BYTES, rows=rows, missing=missing)
