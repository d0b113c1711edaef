"""A job that reduces again and again while random faults befall the NICs and ranks of its hosts, as a record.

    optcc experiment soak                     (eleven minutes)

Ranks on emulated hosts, which are told nothing, reduce 32 MiB as often as they can. Meanwhile NICs go down, lose their
cable, drop all packets silently (both ways, or one), or fall to a part of their rate, and ranks are stopped for a
while: up to three at once, each for up to six seconds, drawn from a seed. What is left of the NICs joins all hosts at
any time, directly or by way of others, so that every AllReduce must end, at all ranks, with the sum to the bit and
under the plans of one epoch. In the end everything is healed, and runs go on until they are as fast as before. The
record is a file of its own format, `optcc-soak/1`. Needs root, for the hosts.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any, ClassVar

import click
import msgspec
import networkx as nx

from optcc.errors import EXIT_DONE, EXIT_REFUTED
from optcc.experiments.disturbance import Disturbance
from optcc.experiments.fabric import Fabric, FabricSpec, NicRates, NicTarget
from optcc.experiments.fabric.processes import send_signal
from optcc.experiments.fabric.spec import host_namespace
from optcc.experiments.record import RECORDS, Check
from optcc.experiments.recorder import ONE_JOB, Measured, RecordForm, check_times, head, record_command
from optcc.experiments.reducing_job import SLICES, ReducingJob
from optcc.experiments.untold import bound_of
from optcc.show import Card
from optcc.units import show_size

HOSTS, SIZE_BYTES = "4x2@400Mbit/s", 32 << 20
SECONDS, SEED = 600.0, 1
LOSSES = ("down", "carrier", "blackhole", "blackhole-out", "blackhole-in")
SLOW, STOPPED = "slow", "stopped"
KINDS = (*LOSSES, SLOW, STOPPED)
AT_ONCE, LASTING_S, PAUSE_S, STOPPED_S = 3, (0.1, 6.0), (0.0, 1.5), (0.05, 1.0)
_WARM_UP, _HEALTHY, _RECOVERED, _RECOVERING_S, _STEP_S = 2, 5, 1.06, 60.0, 0.02

Nic = tuple[int, int]
"""A host and the number of its NIC."""


class SoakFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault: its kind, of which NIC (-1 for a rank that is stopped) of which host; what a slow one sends and
    receives, shares of its rate; when it began, since the first run, and for how long it was to last."""

    kind: str
    host: int
    nic: int
    shares: tuple[float, float]
    began_s: float
    lasting_s: float


class SoakRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One AllReduce: when it began, since the first one; its time; changes of plans; wrong elements; whether ranks were
    in different epochs after it."""

    began_s: float
    seconds: float
    epochs: int
    wrong: int
    is_split: bool


def keeps_joined(n_hosts: int, n_nics: int, lost: Collection[Nic]) -> bool:
    """Whether hosts reach each other over the NICs that are not lost, which reach those of their own number.

    >>> keeps_joined(3, 2, {(0, 0), (1, 1)}), keeps_joined(2, 2, {(0, 0), (1, 1)})
    (True, False)
    """
    graph = nx.Graph()
    graph.add_nodes_from(("host", host) for host in range(n_hosts))
    for host, nic in product(range(n_hosts), range(n_nics)):
        if (host, nic) not in lost:
            graph.add_edge(("host", host), ("rail", nic))
    return bool(nx.is_connected(graph))


def draw_fault(
    rng: random.Random, n_hosts: int, n_nics: int, present: Sequence[SoakFault], at_s: float
) -> SoakFault | None:
    """A fault that may befall the job beside those that are present; None if this draw may not."""
    kind, host, nic = rng.choice(KINDS), rng.randrange(n_hosts), rng.randrange(n_nics)
    shares = (rng.uniform(0.01, 0.9), rng.uniform(0.01, 0.9)) if kind == SLOW else (0.0, 0.0)
    if kind == SLOW and rng.random() < 1 / 2:
        shares = shares[0], shares[0]
    lasting_s = rng.uniform(*(STOPPED_S if kind == STOPPED else LASTING_S))
    nic = -1 if kind == STOPPED else nic
    lost = {(each.host, each.nic) for each in present if each.kind in LOSSES}
    if any((each.host, each.nic) == (host, nic) for each in present):
        return None
    if kind in LOSSES and not keeps_joined(n_hosts, n_nics, {*lost, (host, nic)}):
        return None
    return SoakFault(kind, host, nic, shares, at_s, lasting_s)


class Faults(Disturbance):
    """Faults at random, in a thread, while the context lasts; in the end all are over."""

    def __init__(self, fabric: Fabric, seed: int, origin_s: float) -> None:
        super().__init__()
        self.begun: list[SoakFault] = []
        self._fabric, self._seed, self._origin_s = fabric, seed, origin_s
        self._spec = fabric.state().spec

    def disturb(self) -> None:
        """Begins faults and ends them."""
        rng, present = random.Random(self._seed), list[SoakFault]()
        next_s = 0.0
        try:
            while not self.stopped.wait(_STEP_S):
                now_s = time.monotonic() - self._origin_s
                for fault in [each for each in present if now_s >= each.began_s + each.lasting_s]:
                    present.remove(fault)
                    self._end(fault)
                if now_s < next_s or len(present) >= AT_ONCE:
                    continue
                drawn = draw_fault(rng, self._spec.hosts, self._spec.nics, present, now_s)
                if drawn is not None:
                    self._begin(drawn)
                    present.append(drawn)
                    self.begun.append(drawn)
                    next_s = now_s + rng.uniform(*PAUSE_S)
        finally:
            for fault in present:
                self._end(fault)

    def _begin(self, fault: SoakFault) -> None:
        if fault.kind == STOPPED:
            self._signal(fault.host, signal.SIGSTOP)
        elif fault.kind == SLOW:
            declared = self._spec.rates[fault.host][fault.nic]
            both = zip((declared.bits_out, declared.bits_in), fault.shares, strict=True)
            rates = NicRates(*(Fraction(round(bits * share), 8) for bits, share in both))
            self._fabric.set_rate(NicTarget(fault.host, fault.nic), rates)
        else:
            self._fabric.fail(NicTarget(fault.host, fault.nic), fault.kind)

    def _end(self, fault: SoakFault) -> None:
        if fault.kind == STOPPED:
            self._signal(fault.host, signal.SIGCONT)
        else:
            self._fabric.heal(NicTarget(fault.host, fault.nic))

    def _signal(self, host: int, number: signal.Signals) -> None:
        """Sends it to what runs inside a host."""
        send_signal(number, [host_namespace(self._fabric.name, host)])


@dataclass(frozen=True, slots=True)
class Soak(Measured):
    """The faults and the runs; `recovered_s` after all faults were over runs were as fast as before, -1 if not in a
    minute."""

    format: ClassVar[str] = "optcc-soak/1"
    own_path: ClassVar = RECORDS / "soak.json"
    docs_page: ClassVar[str] = "failover.md"

    machine: dict[str, Any]
    versions: dict[str, str]
    hosts: str
    size_bytes: int
    seed: int
    bound_s: float
    healthy_s: float
    faults: tuple[SoakFault, ...]
    runs: tuple[SoakRun, ...]
    recovered_s: float

    def check_fields(self, check: Check) -> None:
        check_times(check, "runs.seconds", [run.seconds for run in self.runs])
        for number, fault in enumerate(self.faults):
            check(f"faults[{number}].kind", fault.kind, fault.kind in KINDS, f"be one of {', '.join(KINDS)}")

    @property
    def exit_code(self) -> int:
        """1 if an element was wrong, or ranks were in different epochs."""
        return EXIT_REFUTED if self.wrong or self.splits else EXIT_DONE

    @property
    def wrong(self) -> int:
        """Wrong elements of all runs."""
        return sum(run.wrong for run in self.runs)

    @property
    def splits(self) -> int:
        """Runs after which ranks were in different epochs."""
        return sum(run.is_split for run in self.runs)

    def card(self) -> Card:
        counts = Counter(fault.kind for fault in self.faults)
        times = sorted(run.seconds / self.bound_s for run in self.runs)
        last_s = self.runs[-1].began_s + self.runs[-1].seconds
        rows = (
            ("time", f"{last_s:.0f} s"),
            ("faults", ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)),
            ("AllReduces", str(len(self.runs))),
            ("wrong elements", str(self.wrong)),
            ("after which epochs differed", str(self.splits)),
            ("changes of plans", str(sum(run.epochs for run in self.runs))),
            ("healthy / T*", f"{self.healthy_s / self.bound_s:.3f}"),
            ("median / T*", f"{times[len(times) // 2]:.2f}"),
            ("longest / T*", f"{times[-1]:.1f}"),
            ("as fast as before, after", f"{self.recovered_s:.1f} s" if self.recovered_s >= 0 else "not in a minute"),
        )
        title = f"Random faults, AllReduce of {show_size(self.size_bytes)}, {self.hosts}"
        return Card(title, ("", ""), rows)


def soak(size_bytes: int, seconds: float, seed: int) -> Soak:
    """The record. Raises RuntimeFault if a rank fails or hangs, or one is wrong before the first fault."""
    with Fabric.up(FabricSpec.parse(HOSTS, name=f"soak-{os.getpid()}")) as fabric:
        bound_s = bound_of(fabric.state(), size_bytes)
        job = ReducingJob(fabric, SLICES, size_bytes)
        runs: list[SoakRun] = []
        try:
            healthy_s = sorted([job.run() for _ in range(_WARM_UP + _HEALTHY)][_WARM_UP:])[_HEALTHY // 2]
            origin_s = time.monotonic()
            with Faults(fabric, seed, origin_s) as faults:
                _run_until(job, runs, origin_s, lambda: time.monotonic() - origin_s >= seconds)
            healed_s = time.monotonic()
            until_s = healed_s + _RECOVERING_S
            _run_until(
                *(job, runs, origin_s),
                lambda: runs[-1].seconds < _RECOVERED * healthy_s or time.monotonic() >= until_s,
            )
            is_recovered = runs[-1].seconds < _RECOVERED * healthy_s
            recovered_s = origin_s + runs[-1].began_s - healed_s if is_recovered else -1.0
        finally:
            job.close()
    return Soak(
        **head(),
        hosts=HOSTS,
        size_bytes=size_bytes,
        seed=seed,
        bound_s=bound_s,
        healthy_s=healthy_s,
        faults=tuple(faults.begun),
        runs=tuple(runs),
        recovered_s=recovered_s,
    )


def _run_until(job: ReducingJob, runs: list[SoakRun], origin_s: float, is_over: Callable[[], bool]) -> None:
    """Runs one after the other, at least one."""
    while True:
        began_s = time.monotonic() - origin_s
        job.begin()
        told = job.end_of_run()
        runs.append(SoakRun(began_s, told["seconds"], told["epochs"], told["wrong"], told["is_split"]))
        if is_over():
            return


@record_command(Soak, RecordForm(quick={"seconds": 20.0}, one_session=ONE_JOB))
@click.option("--seconds", type=click.FloatRange(1, 700), default=SECONDS, show_default=True, help="Of faults.")
@click.option("--seed", type=int, default=SEED, show_default=True, help="Of the faults.")
def command(seconds: float, seed: int) -> Soak:
    """Reduce while random faults befall the job; quick: for twenty seconds."""
    return soak(SIZE_BYTES, seconds, seed)
