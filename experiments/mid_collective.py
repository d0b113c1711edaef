"""How much a NIC costs that is lost, or becomes slow, in the middle of one long AllReduce, as a record.

    optcc experiment mid-collective           (about half an hour, on a quiet machine)

A job on emulated hosts, whose NICs it measures itself, reduces 256 MiB again and again; somewhere in a run one NIC
goes down, falls to half of its rate, or to a hundredth. Afterwards it is healed, and runs go on until they are as fast
as before, and for twelve seconds more: a NIC that is slow again earlier is taken to flap. Least is what no schedule can
beat: the time until then, and T* with what is left of the NICs for the share of the bytes that was not done, at the
pace of a healthy run. In one arm the AllReduce runs in slices, as it does unless asked otherwise
(`optcc.runtime.slices`); in the other it is one run, whose plan stays what it was. The record is a file of its own
format, `optcc-mid-collective/1`. Needs root, for the hosts.
"""

from __future__ import annotations

import os
import random
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
from optcc.experiments.disturbance import timed
from optcc.experiments.fabric import Fabric, FabricSpec, NicRates
from optcc.experiments.record import RECORDS, Check
from optcc.experiments.recorder import Measured, RecordForm, check_times, head, record_command
from optcc.experiments.reducing_job import SLICES, WHOLE, ReducingJob
from optcc.experiments.untold import bound_of
from optcc.runtime.protocol.epochs import RATE_CALM_S
from optcc.show import Card
from optcc.units import show_size

HOSTS, SIZE_BYTES, NIC = "4x2@400Mbit/s", 256 << 20, "h1.eth1"
STATES = {"NIC down": "down", "NIC at half": "200Mbit/s", "NIC at 1 %": "4Mbit/s"}
ARMS = {SLICES: "in slices", WHOLE: "one run"}
"""How the AllReduce runs, and what that is called."""
TRIALS, TRIALS_WHOLE, SEED = 20, 5, 1
"""In slices, and in one run at most."""
_WARM_UP, _HEALTHY, _RECOVERING_MAX, _RECOVERED = 2, 3, 12, 1.04
_CALM_S = RATE_CALM_S + 2.0


class LossTrial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run in which a NIC failed after `at_s`: how long it took, least, and the epoch in which it ended."""

    at_s: float
    seconds: float
    least_s: float
    epochs: int
    wrong: int

    @property
    def ratio(self) -> float:
        """The time over the least."""
        return self.seconds / self.least_s


class MidCollectiveRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The runs of a state in an arm; healthy ones take `healthy_s`, the median."""

    state: str
    arm: str
    bound_s: float
    bound_left_s: float
    healthy_s: float
    trials: tuple[LossTrial, ...]


@dataclass(frozen=True, slots=True)
class MidCollective(Measured):
    """The rows, the machine and the versions."""

    format: ClassVar[str] = "optcc-mid-collective/1"
    own_path: ClassVar = RECORDS / "mid-collective.json"
    docs_page: ClassVar[str] = "failover.md"

    machine: dict[str, Any]
    versions: dict[str, str]
    hosts: str
    size_bytes: int
    rows: tuple[MidCollectiveRow, ...]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.rows):
            check_times(check, f"rows[{number}].trials.seconds", [each.seconds for each in row.trials])
            check_times(check, f"rows[{number}].trials.least_s", [each.least_s for each in row.trials])
            check(f"rows[{number}].arm", row.arm, row.arm in ARMS, f"be one of {', '.join(ARMS)}")

    def card(self) -> Card:
        rows = tuple(
            (
                row.state,
                ARMS[row.arm],
                str(len(row.trials)),
                f"{row.healthy_s / row.bound_s:.3f}",
                f"{row.bound_left_s / row.bound_s:.2f}",
                f"{median(each.ratio for each in row.trials):.2f}",
                f"{min(each.ratio for each in row.trials):.2f}-{max(each.ratio for each in row.trials):.2f}",
                str(sum(each.wrong for each in row.trials)),
            )
            for row in self.rows
        )
        heads = (
            "in the middle",
            "AllReduce",
            "trials",
            "healthy / T*",
            "T* left / T*",
            "time / least",
            "range",
            "wrong elements",
        )
        return Card(f"A NIC of {self.hosts} in the middle of {show_size(self.size_bytes)}", heads, rows)


def heal(fabric: Fabric, what: str) -> None:
    """It is as it was."""
    if what == "down":
        fabric.heal(NIC)
    else:
        fabric.set_rate(NIC, NicRates.parse(HOSTS.partition("@")[2]))


def measure_row(state: str, arm: str, trials: int, size_bytes: int) -> MidCollectiveRow:
    """One row. Raises RuntimeFault if a rank fails or is wrong while nothing befalls it."""
    what, rng = STATES[state], random.Random(SEED)
    with Fabric.up(FabricSpec.parse(HOSTS, name=f"mid-{os.getpid()}")) as fabric:
        bound_s = bound_of(fabric.state(), size_bytes)
        befall(fabric, NIC, what)
        left_s = bound_of(fabric.state(), size_bytes)
        heal(fabric, what)
        job = ReducingJob(fabric, arm, size_bytes)
        try:
            warm = [job.run() for _ in range(_WARM_UP + _HEALTHY)]
            healthy_s = median(warm[_WARM_UP:])
            found: list[LossTrial] = []
            for _ in range(trials):
                began_s = time.monotonic()
                job.begin()
                time.sleep(rng.uniform(0.15, 0.5) * healthy_s)
                at_s = timed(lambda: befall(fabric, NIC, what)) - began_s
                told = job.end_of_run()
                heal(fabric, what)
                least_s = at_s + (1 - at_s / healthy_s) * left_s
                found.append(LossTrial(at_s, told["seconds"], least_s, told["epochs"], told["wrong"]))
                _recover(job, _RECOVERED * healthy_s)
        finally:
            job.close()
    return MidCollectiveRow(state, arm, bound_s, left_s, healthy_s, tuple(found))


def _recover(job: ReducingJob, healthy_s: float) -> None:
    """Runs until one takes no more than `healthy_s`, and then so long that the next loss is not that of a NIC that
    flaps, for which patience grows."""
    for _ in range(_RECOVERING_MAX):
        if job.run() < healthy_s:
            break
    calm_s = time.monotonic() + _CALM_S
    while time.monotonic() < calm_s:
        job.run()


@record_command(MidCollective, RecordForm(quick={"trials": 1}))
@click.option("--trials", type=click.IntRange(min=1), default=TRIALS, show_default=True)
def command(quick: bool, trials: int, cells: RecordCells) -> MidCollective:
    """Time a long AllReduce in the middle of which a NIC fails; quick: in one state, with a quarter of the size."""
    size_bytes = SIZE_BYTES // 4 if quick else SIZE_BYTES
    trials_of = {SLICES: trials, WHOLE: min(trials, TRIALS_WHOLE)}
    units = {
        f"{state}, {arm}": partial(measure_row, state, arm, trials_of[arm], size_bytes)
        for state, arm in product(list(STATES)[:1] if quick else STATES, ARMS)
    }
    rows = tuple(cells.each(units, MidCollectiveRow))
    return MidCollective(**head(), hosts=HOSTS, size_bytes=size_bytes, rows=rows)
