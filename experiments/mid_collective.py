"""How much a NIC costs that is lost, or becomes slow, in the middle of one long AllReduce, as a record.

    optcc experiment mid-collective           (about an hour, on a quiet machine)

A job on emulated hosts, whose NICs it measures itself, reduces 256 MiB again and again; somewhere in a run one NIC
goes down, falls to half of its rate, or to a hundredth, or two hosts lose all rails between them. The next run is timed
too. Then all is healed, and runs go on until they are as fast as before, and for twelve seconds more: a NIC that is
slow again earlier is taken to flap. Least is what no schedule can beat: the time until then, and T* with what is left
of the NICs for the share of the bytes that was not done, at the pace of a healthy run. In one arm the AllReduce runs in
slices, as it does unless asked otherwise (`optcc.runtime.slices`); in the other it is one run, whose plan stays what it
was. A trial during which the hypervisor took more than `STEAL_MAX` of the machine is repeated. The record is a file of
its own format, `optcc-mid-collective/2`. Needs root, for the hosts.
"""

from __future__ import annotations

import contextlib
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

from optcc.experiments.bench_jobs import in_state
from optcc.experiments.cells import RecordCells
from optcc.experiments.disturbance import timed
from optcc.experiments.fabric import Fabric, FabricSpec
from optcc.experiments.record import RECORDS, STEAL_MAX, Check, stolen_jiffies, stolen_share
from optcc.experiments.recorder import Measured, RecordForm, check_times, head, record_command
from optcc.experiments.reducing_job import SLICES, WHOLE, ReducingJob
from optcc.experiments.untold import bound_of
from optcc.runtime.protocol.epochs import RATE_CALM_S
from optcc.show import Card
from optcc.units import show_size

HOSTS, SIZE_BYTES, NIC = "4x2@400Mbit/s", 256 << 20, "h1.eth1"
STATES = {"NIC down": "down", "NIC at half": "200Mbit/s", "NIC at 1 %": "4Mbit/s"}
"""What becomes of the NIC."""
APART = "no rail in common"
LOSSES = {**{state: {NIC: what} for state, what in STATES.items()}, APART: {"h0.eth0": "down", "h1.eth1": "down"}}
"""What becomes of which NICs."""
ARMS = {SLICES: "in slices", WHOLE: "one run"}
"""How the AllReduce runs, and what that is called."""
TRIALS, TRIALS_FEW, SEED = 20, 5, 1
"""Of one NIC in slices, and of others at most."""
REPEATS_MAX = 5
"""So many trials of a row are repeated at most, for what the hypervisor took."""
_WARM_UP, _HEALTHY, _RECOVERING_MAX, _RECOVERED = 2, 3, 12, 1.04
_CALM_S = RATE_CALM_S + 2.0


class LossTrial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run in which NICs failed after `at_s`: how long it took, least, and by how many epochs plans changed in it;
    how long the `next_s` took. `wrong` elements are those of both; `steal` is the hypervisor's share of the first."""

    at_s: float
    seconds: float
    least_s: float
    epochs: int
    next_s: float
    wrong: int
    steal: float

    @property
    def ratio(self) -> float:
        """The time over the least."""
        return self.seconds / self.least_s


class MidCollectiveRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The runs of a state in an arm; healthy ones take `healthy_s`, the median; so many were repeated for steal."""

    state: str
    arm: str
    bound_s: float
    bound_left_s: float
    healthy_s: float
    trials: tuple[LossTrial, ...]
    repeated: int = 0


@dataclass(frozen=True, slots=True)
class MidCollective(Measured):
    """The rows, the machine and the versions."""

    format: ClassVar[str] = "optcc-mid-collective/2"
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
            check_times(check, f"rows[{number}].trials.next_s", [each.next_s for each in row.trials])
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
                f"{median(each.next_s for each in row.trials) / row.bound_left_s:.2f}",
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
            "next / T* left",
            "wrong elements",
        )
        return Card(f"NICs of {self.hosts} in the middle of {show_size(self.size_bytes)}", heads, rows)


def measure_row(state: str, arm: str, trials: int, size_bytes: int) -> MidCollectiveRow:
    """One row. Raises RuntimeFault if a rank fails or is wrong while nothing befalls it."""
    rng, found, n_repeated = random.Random(SEED), list[LossTrial](), 0
    with Fabric.up(FabricSpec.parse(HOSTS, name=f"mid-{os.getpid()}")) as fabric:
        bound_s = bound_of(fabric.state(), size_bytes)
        with in_state(fabric, LOSSES[state]):
            left_s = bound_of(fabric.state(), size_bytes)
        job = ReducingJob(fabric, arm, size_bytes)
        try:
            warm = [job.run() for _ in range(_WARM_UP + _HEALTHY)]
            healthy_s = median(warm[_WARM_UP:])
            while len(found) < trials:
                trial = _trial(job, fabric, state, rng.uniform(0.15, 0.5), healthy_s, left_s)
                if trial.steal > STEAL_MAX and n_repeated < REPEATS_MAX:
                    n_repeated += 1
                else:
                    found.append(trial)
                _recover(job, _RECOVERED * healthy_s)
        finally:
            job.close()
    return MidCollectiveRow(state, arm, bound_s, left_s, healthy_s, tuple(found), n_repeated)


def _trial(job: ReducingJob, fabric: Fabric, state: str, at_share: float, healthy_s: float, left_s: float) -> LossTrial:
    """A run of which so much is done when the NICs fail, and another one; they are healed at the end."""
    began_s, stolen = time.monotonic(), stolen_jiffies()
    job.begin()
    time.sleep(at_share * healthy_s)
    with contextlib.ExitStack() as stack:
        at_s = timed(lambda: stack.enter_context(in_state(fabric, LOSSES[state]))) - began_s
        told = job.end_of_run()
        steal = stolen_share(stolen, stolen_jiffies())
        job.begin()
        after = job.end_of_run()
    least_s = at_s + (1 - at_s / healthy_s) * left_s
    wrong = told["wrong"] + after["wrong"]
    return LossTrial(at_s, told["seconds"], least_s, told["epochs"], after["seconds"], wrong, steal)


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
    few = min(trials, TRIALS_FEW)
    units = {
        f"{state}, {arm}": partial(
            measure_row, state, arm, trials if arm == SLICES and state in STATES else few, size_bytes
        )
        for state, arm in product(list(LOSSES)[:1] if quick else LOSSES, ARMS)
    }
    rows = tuple(cells.each(units, MidCollectiveRow))
    return MidCollective(**head(), hosts=HOSTS, size_bytes=size_bytes, rows=rows)
