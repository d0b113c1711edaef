"""How long it takes to plan with `auto`: to choose a plan, and to choose and to verify it, as a record.

Processor time of one process on one core. What numba compiles is compiled before, on the same case (for many ranks on a
case of fewer), and is not counted. For servers of eight GPUs whose NICs belong to GPUs the certified bound counts as
well; each repetition is a process of its own, since what is found for a topology is kept. The record is a file of its
own format, `optcc-planning-speed/2`. The one that comes with the package is made by

    optcc experiment planning-speed

The cases by ranks take less than four minutes on a core that nothing else uses.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import click
import msgspec

from optcc.collective import Collective
from optcc.compiled import compile_always
from optcc.experiments.cells import HERE, RecordCells
from optcc.experiments.record import RECORDS, Check
from optcc.experiments.recorder import Measured, RecordForm, check_times, head, record_command
from optcc.experiments.schedule_cases import random_rates
from optcc.planner import AUTO, build
from optcc.schedules.auto import choose
from optcc.show import Card
from optcc.simulate import simulate
from optcc.timing import MODELS, Model
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.bounds.certified import certified_bound, explain_if_pooled
from optcc.verify.plan import verify_plan

REPEATS = {8: 9, 64: 5, 256: 1, 1024: 1}
"""Ranks, and how often a case of so many is repeated."""
SIZES = tuple(2**exponent for exponent in range(12, 27, 2))
"""From 4 KiB to 64 MiB."""
MANY_RANKS, MANY_RANKS_SIZES = 256, (2**12, 2**19, 2**26)
"""With so many ranks, only these sizes."""
RATES = ("one straggler", "random rates")
SEED = 1
LATENCY_S = Fraction(5, 10**6)
SERVERS = {"8xdgx-h100,7=4/8": 3, "16xdgx-h100,15=4/8": 3, "64xdgx-h100,63=4/8": 1, "128xdgx-h100,127=4/8": 1}
"""Servers of eight GPUs of which the last has lost half of its NICs, and how often planning for them is repeated."""
SERVERS_BEFORE = "4xdgx-h100,3=4/8"
"""Planned before, to compile."""
SERVERS_SIZE = 2**30
SERVERS_PORTS: tuple[Model, ...] = ("fifo", "fair")
BOUND_LIMIT_S = 600.0
"""By the clock, for the linear program: far more than it takes, also where other processes are busy."""


class PlanningTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One case: what was chosen, and the processor seconds of choosing, and of choosing and verifying, each time."""

    ranks: int
    rates: str
    ports: str
    size_bytes: int
    schedule: str
    segments: int
    transfers: int
    choose_s: list[float]
    planned_s: list[float]


class ServersTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Servers whose NICs belong to GPUs: what was chosen, and what it takes in simulation over the certified bound; for
    each repetition the processor seconds of the bound with its certificate, of both and the plan, and of these and its
    proof; and the most memory that a repetition took."""

    topology: str
    ports: str
    size_bytes: int
    schedule: str
    segments: int
    transfers: int
    over_bound: float
    bound_s: list[float]
    planned_s: list[float]
    proved_s: list[float]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class PlanningSpeed(Measured):
    """The rows by ranks and by servers, the machine and the versions."""

    format: ClassVar[str] = "optcc-planning-speed/2"
    own_path: ClassVar[Path] = RECORDS / "planning-speed.json"
    docs_page: ClassVar[str] = "schedules.md"

    machine: dict[str, Any]
    versions: dict[str, str]
    rows: tuple[PlanningTiming, ...]
    servers: tuple[ServersTiming, ...]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.rows):
            check_times(check, f"rows[{number}].choose_s", row.choose_s)
            check_times(check, f"rows[{number}].planned_s", row.planned_s)
        for number, each in enumerate(self.servers):
            where = f"servers[{number}]"
            check_times(check, f"{where}.bound_s", each.bound_s)
            check_times(check, f"{where}.proved_s", each.proved_s)
            check(f"{where}.over_bound", each.over_bound, each.over_bound > 1 - 1e-9, "be no less than the bound")

    def card(self) -> Card:
        rows = []
        for ranks, ports in dict.fromkeys((row.ranks, row.ports) for row in self.rows):
            some = [row for row in self.rows if (row.ranks, row.ports) == (ranks, ports)]
            medians = [[statistics.median(each) for each in (row.choose_s, row.planned_s)] for row in some]
            rows.append(
                (
                    str(ranks),
                    ports,
                    *(_shown(statistics.median(column)) for column in zip(*medians, strict=True)),
                    *(_shown(max(column)) for column in zip(*medians, strict=True)),
                    _shown(max(max(row.planned_s) for row in some)),
                )
            )
        chosen = ("chosen", "and verified")
        columns = ("ranks", "ports", *chosen, *(f"{each}, slowest case" for each in chosen), "slowest time of all")
        return Card("processor time of a plan with auto", columns, tuple(rows))

    def by_servers(self) -> Card:
        """Servers whose NICs belong to GPUs: medians, and the slowest repetition."""
        rows = tuple(
            (
                f"`{each.topology}`",
                each.ports,
                f"{each.schedule}, {each.segments}",
                f"{each.over_bound:.3f}",
                *(_shown(statistics.median(times)) for times in (each.bound_s, each.planned_s, each.proved_s)),
                _shown(max(each.proved_s)),
                f"{each.memory_bytes / 2**30:.1f} GiB",
            )
            for each in self.servers
        )
        columns = ("servers", "ports", "chosen", "over T*", "bound", "and plan", "and proof", "slowest", "memory")
        return Card("processor time of the bound, a plan with auto and its proof, 8 GPUs a server", columns, rows)

    def cards(self) -> tuple[Card, ...]:
        """Those that have rows."""
        return tuple(each for each in (self.card(), self.by_servers()) if each.rows)

    def markdown(self) -> str:
        return f"{self.card().markdown()}\nServers of eight GPUs:\n\n{self.by_servers().markdown()}"


def _shown(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def cluster(ranks: int, rates: str) -> Topology:
    """The topology of so many ranks with `rates`, one of `RATES`."""
    if rates == RATES[0]:
        return Topology.parse(f"{ranks}@50GB/s,3=25GB/s").with_latency(LATENCY_S)
    return random_rates(ranks, SEED)


def run_case(ranks: int, rates: str, ports: Model, size_bytes: int, repeats: int) -> PlanningTiming:
    """Plans a case `repeats` times in this process."""
    topology = cluster(ranks, rates)
    warm = topology if ranks < MANY_RANKS else cluster(64, rates)
    compile_always()
    verify_plan(choose(warm, size_bytes, ports=ports).plan)
    choose_s, planned_s = [], []
    for _ in range(repeats):
        started = time.process_time()
        chosen = choose(topology, size_bytes, ports=ports)
        choose_s.append(time.process_time() - started)
        assert verify_plan(chosen.plan).verdict == PROVED
        planned_s.append(time.process_time() - started)
    taken, transfers = chosen.taken, len(chosen.plan.transfers)
    return PlanningTiming(ranks, rates, ports, size_bytes, taken.name, taken.segments, transfers, choose_s, planned_s)


def run_servers(text: str, ports: Model, repeats: int) -> ServersTiming:
    """Plans for these servers `repeats` times, each time in a new process, where nothing is known of them yet."""
    found: list[ServersTiming] = []
    context = multiprocessing.get_context("spawn")
    for _ in range(repeats):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            found.append(pool.submit(_plan_servers, text, ports).result())
    times = {name: [getattr(each, name)[0] for each in found] for name in ("bound_s", "planned_s", "proved_s")}
    return msgspec.structs.replace(found[0], **times, memory_bytes=max(each.memory_bytes for each in found))


def _plan_servers(text: str, ports: Model) -> ServersTiming:
    """One repetition, in this process."""
    compile_always()
    before = build(AUTO, Topology.parse(SERVERS_BEFORE), SERVERS_SIZE, ports=ports)
    verify_plan(before.plan)
    topology = Topology.parse(text)
    wanted = Collective("allreduce", topology.n_ranks)
    started = time.process_time()
    told = explain_if_pooled(topology, SERVERS_SIZE, wanted)
    least = certified_bound(topology, SERVERS_SIZE, wanted, told, time_limit_s=BOUND_LIMIT_S)[0].seconds
    bound_s = time.process_time() - started
    built = build(AUTO, topology, SERVERS_SIZE, ports=ports)
    planned_s = time.process_time() - started
    assert verify_plan(built.plan).verdict == PROVED
    proved_s = time.process_time() - started
    timing = built.timing or simulate(built.plan, topology, model=ports)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return ServersTiming(
        *(text, ports, SERVERS_SIZE, built.definition.name, built.segments, len(built.plan.transfers)),
        over_bound=timing.seconds / float(least),
        bound_s=[bound_s],
        planned_s=[planned_s],
        proved_s=[proved_s],
        memory_bytes=peak,
    )


def measure(
    ranks: Sequence[int] = tuple(REPEATS), servers: Sequence[str] = tuple(SERVERS), cells: RecordCells = HERE
) -> PlanningSpeed:
    """All cases of so many `ranks`, each one of `REPEATS`, and of these `servers`, each one of `SERVERS`."""
    of_servers = {
        f"{text}, {ports}": partial(run_servers, text, ports, SERVERS[text])
        for text in servers
        for ports in SERVERS_PORTS
    }
    units = {
        f"{p} ranks, {rates}, {ports}, {size_bytes} B": partial(run_case, p, rates, ports, size_bytes, REPEATS[p])
        for p in ranks
        for ports in MODELS
        for rates in RATES
        for size_bytes in (SIZES if p < MANY_RANKS else MANY_RANKS_SIZES)
    }
    by_servers = tuple(cells.each(of_servers, ServersTiming))
    return PlanningSpeed(**head(), rows=tuple(cells.each(units, PlanningTiming)), servers=by_servers)


@record_command(PlanningSpeed, RecordForm(quick={"ranks": (8,)}))
@click.option("--ranks", multiple=True, type=click.Choice(tuple(REPEATS)), help="Only cases of so many ranks.")
@click.option("--servers", multiple=True, type=click.Choice(tuple(SERVERS)), help="Only cases of these servers.")
def command(ranks: tuple[int, ...], servers: tuple[str, ...], cells: RecordCells) -> PlanningSpeed:
    """Measure how long planning takes, and write the record: all cases unless some are named."""
    if ranks or servers:
        return measure(ranks, servers, cells)
    return measure(cells=cells)
