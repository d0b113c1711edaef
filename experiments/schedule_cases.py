"""Schedules simulated one by one: which clusters, which segments, and what a case takes.

Two kinds of clusters: one straggler, slowed down l times; and rates drawn at random, out and in apart, from a seed.
A plan is compiled for the port model under which it is simulated (`shares` is what `optimal` is where ports are fair),
with the best of a few powers of two of segments; each case says which were tried. What did not fit into memory is
listed as not run, with the reason.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import msgspec

from optcc.compiler import compile_schedule
from optcc.errors import OptccError
from optcc.experiments.record import text_of
from optcc.schedules.optcc_timetable import ClosedForm
from optcc.schedules.registry import SCHEDULES
from optcc.simulate import simulate
from optcc.timing import Model
from optcc.topology import Nic, Server, Topology
from optcc.verify.bounds.closed_forms import collective_bound
from optcc.verify.bounds.predictions import fault_free, predictions

SIZE_BYTES = 2**30
RATE = Fraction(50 * 10**9)
"""Bytes/s of a healthy endpoint each way."""
LATENCY_S = Fraction(5, 10**6)
GOALS = {"straggler": Fraction(102, 100), "random": Fraction(103, 100), "many ranks": Fraction(105, 100)}
"""Above so many times the bound, `optimal` misses its goal, under fifo ports and, as `shares`, under fair ones."""
OTHER_PORTS: Mapping[str, tuple[Model, ...]] = {"optcc": ("exclusive", "fair"), "optimal": ("exclusive",)}
"""Under which ports besides fifo a schedule is simulated with one straggler."""
MANY_RANKS = 256
NO_TIME = "the record was finished before"
"""The reason for plans that `--finish` left out."""


class ScheduleRatio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One schedule on one cluster: `slowdown` of the only straggler, or the `seed` of random rates.

    `seconds` are simulated under the port model `model`; `segments` is the best of `tried`. `formula` is what the
    schedule's closed form says for so many segments, if it has one. `planning_s` are of the processor.
    """

    schedule: str
    ranks: int
    slowdown: Fraction | None
    seed: int | None
    model: str
    tried: tuple[int, ...]
    segments: int
    transfers: int
    seconds: float
    bound: Fraction
    fault_free: Fraction
    formula: Fraction | None
    planning_s: float

    @property
    def over_bound(self) -> float:
        """Simulated time over T*."""
        return self.seconds / float(self.bound)

    @property
    def over_fault_free(self) -> float:
        """Simulated time over T_ff."""
        return self.seconds / float(self.fault_free)

    @property
    def over_formula(self) -> float | None:
        """Simulated time over the schedule's own formula."""
        return None if self.formula is None else self.seconds / float(self.formula)

    @property
    def goal(self) -> Fraction:
        """How many times the bound `optimal` may take here."""
        if self.ranks >= MANY_RANKS:
            return GOALS["many ranks"]
        return GOALS["random" if self.slowdown is None else "straggler"]

    def __str__(self) -> str:
        return f"{case_text(self)}, {self.model}, {self.segments} segments"


class NotRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan that was to be simulated and was not, and why; `ports` are those that it is for."""

    schedule: str
    ranks: int
    slowdown: Fraction | None
    seed: int | None
    ports: str
    segments: int
    reason: str

    def __str__(self) -> str:
        return f"{case_text(self)}, {self.ports}, {self.segments} segments: not run: {self.reason}"


@dataclass(frozen=True)
class SchedulePlan:
    """Which cases to simulate. `segments` are tried as far as the plan has at most `transfers_max` transfers."""

    ranks: tuple[int, ...]
    slowdowns: tuple[Fraction, ...]
    segments: Mapping[str, tuple[int, ...]]
    transfers_max: int
    exclusive_ranks: tuple[int, ...]
    exclusive_segments: tuple[int, ...]
    random: Mapping[int, int]
    """For how many seeds, by ranks, under fifo and under fair ports."""
    many: Mapping[int, int]
    """Numbers of ranks, with the segments of `optimal` for them, for which one cluster of random rates is enough."""
    many_slowdowns: Mapping[Model, tuple[Fraction, ...]]
    fair_segments: Mapping[int, tuple[int, ...]]
    """Of `shares`, by ranks."""


FULL = SchedulePlan(
    ranks=(4, 8, 16, 32, 64),
    slowdowns=tuple(map(Fraction, ("8/7", "4/3", "8/5", "2", "4", "8"))),
    segments={
        "ring": (1, 2, 4),
        "r2ccl-balance": (1, 2, 4),
        "r2ccl-allreduce": (16, 32, 64),
        "optcc": (16, 32, 64, 128, 256),
        "optimal": (1024, 2048),
    },
    transfers_max=2**20,
    exclusive_ranks=(4, 8, 16),
    exclusive_segments=(16, 64, 128, 256, 512, 1024),
    random={4: 60, 8: 60, 16: 40, 32: 30, 64: 10},
    many={256: 2048, 1024: 2048},
    many_slowdowns={"fifo": tuple(map(Fraction, ("8/7", "4/3", "8/5", "2", "4", "8"))), "fair": (Fraction(2),)},
    fair_segments={4: (64, 256), 8: (64, 256), 16: (64, 128, 256), 32: (64,), 64: (64,), 256: (2048,), 1024: (2048,)},
)
QUICK = SchedulePlan(
    ranks=(4, 8),
    slowdowns=tuple(map(Fraction, ("4/3", "2"))),
    segments={
        "ring": (1, 2),
        "r2ccl-balance": (1, 2),
        "r2ccl-allreduce": (8, 16),
        "optcc": (16, 32),
        "optimal": (128, 256),
    },
    transfers_max=2**14,
    exclusive_ranks=(4,),
    exclusive_segments=(16, 32),
    random={4: 2, 8: 2},
    many={},
    many_slowdowns={},
    fair_segments={4: (64,)},
)


def one_straggler(ranks: int, slowdown: Fraction) -> Topology:
    """`ranks` endpoints of `RATE`, the last of which is `slowdown` times slower.

    >>> one_straggler(4, Fraction(2))
    Topology('4@50GB/s,3=25GB/s')
    """
    rates = [RATE] * (ranks - 1) + [RATE / slowdown]
    return _cluster([(rate, rate) for rate in rates])


def random_rates(ranks: int, seed: int) -> Topology:
    """`ranks` endpoints of 10 to 50 GB/s in steps of 1 MB/s, out and in drawn apart and never equal.

    >>> random_rates(2, 1) == random_rates(2, 1), random_rates(2, 1) == random_rates(2, 2)
    (True, False)
    """
    rng = random.Random(f"{ranks} ranks, seed {seed}")

    def draw() -> Fraction:
        return (10_000 + int(rng.random() * 40_001)) * Fraction(10**6)

    pairs: list[tuple[Fraction, Fraction]] = []
    while len(pairs) < ranks:
        out, in_ = draw(), draw()
        if out != in_:
            pairs.append((out, in_))
    return _cluster(pairs)


def _cluster(rates: Sequence[tuple[Fraction, Fraction]]) -> Topology:
    servers = tuple(Server(f"h{index}", 1, (Nic(0, out, in_),)) for index, (out, in_) in enumerate(rates))
    return Topology(servers, latency_s=LATENCY_S)


@dataclass(frozen=True)
class Unit:
    """A schedule on a cluster, planned and simulated for `ports`, with each number of `segments`.

    One straggler, `slowdown` times slower, or random rates of a `seed`. Numbers of segments with which the plan has
    more than `transfers_max` transfers are left out; what needs more than `memory_bytes` is not run.
    """

    schedule: str
    ranks: int
    slowdown: Fraction | None
    seed: int | None
    ports: Model
    segments: tuple[int, ...]
    transfers_max: int = 2**63
    memory_bytes: int | None = None

    def __str__(self) -> str:
        return f"{case_text(self)}, {self.ports}"

    @property
    def topology(self) -> Topology:
        """The cluster."""
        if self.slowdown is not None:
            return one_straggler(self.ranks, self.slowdown)
        assert self.seed is not None
        return random_rates(self.ranks, self.seed)

    @property
    def effort(self) -> int:
        """Grows about as its run time: under fair ports all pairs flow at once, at random rates in more lanes."""
        if self.ports != "fair":
            return self.ranks
        return self.ranks**2 * (1 if self.seed is None else 4)


def case_text(each: ScheduleRatio | NotRun | Unit) -> str:
    cluster = f"seed {each.seed}" if each.slowdown is None else f"l = {each.slowdown}"
    return f"{each.schedule}, p = {each.ranks}, {cluster}"


def units(study: SchedulePlan, memory_bytes: int | None = None) -> Iterator[Unit]:
    """What `study` simulates: one straggler, random rates, many ranks; of each what ports are for, side by side."""
    for ranks in study.ranks:
        for slowdown in study.slowdowns:
            for name, fifo_tried in study.segments.items():
                yield Unit(name, ranks, slowdown, None, "fifo", fifo_tried, study.transfers_max, memory_bytes)
                for ports in OTHER_PORTS.get(name, ()) if ranks in study.exclusive_ranks else ():
                    tried = study.exclusive_segments
                    yield Unit(name, ranks, slowdown, None, ports, tried, study.transfers_max, memory_bytes)
            yield from _fair(study, ranks, slowdown, None, memory_bytes)
    for ranks, seeds in study.random.items():
        for seed in range(seeds):
            tried = study.segments["optimal"]
            yield Unit("optimal", ranks, None, seed, "fifo", tried, study.transfers_max, memory_bytes)
            yield from _fair(study, ranks, None, seed, memory_bytes)
    for ranks, segments in study.many.items():
        for slowdown in study.many_slowdowns.get("fifo", ()):
            yield Unit("optimal", ranks, slowdown, None, "fifo", (segments,), 2**63, memory_bytes)
        for slowdown in study.many_slowdowns.get("fair", ()):
            yield from _fair(study, ranks, slowdown, None, memory_bytes)
        yield Unit("optimal", ranks, None, 0, "fifo", (segments,), 2**63, memory_bytes)
        yield from _fair(study, ranks, None, 0, memory_bytes)


def _fair(
    study: SchedulePlan, ranks: int, slowdown: Fraction | None, seed: int | None, memory_bytes: int | None
) -> Iterator[Unit]:
    if ranks in study.fair_segments:
        yield Unit("shares", ranks, slowdown, seed, "fair", study.fair_segments[ranks], memory_bytes=memory_bytes)


class UnitResult(msgspec.Struct, frozen=True):
    """The results of a unit."""

    cases: tuple[ScheduleRatio, ...]
    not_run: tuple[NotRun, ...]


@dataclass(frozen=True)
class _Run:
    segments: int
    transfers: int
    seconds: float
    planning_s: float


def run_unit(unit: Unit) -> UnitResult:
    """Simulates `unit`: a case, unless nothing fitted into memory."""
    name, topology = unit.schedule, unit.topology
    definition = SCHEDULES[name].under(unit.ports)
    each = len(definition.build(topology, 1))
    runs = []
    not_run = []
    for k in unit.segments:
        if k * each > unit.transfers_max:
            continue
        try:
            with _memory_limited(unit.memory_bytes):
                began = time.process_time()
                schedule = definition.build(topology, k)
                plan = compile_schedule(schedule, size_bytes=SIZE_BYTES, topology=topology, ports=unit.ports)
                planning_s = round(time.process_time() - began, 4)
                seconds = simulate(plan, topology, model=unit.ports).seconds
                runs.append(_Run(k, len(plan.transfers), seconds, planning_s))
        except (MemoryError, OptccError) as error:
            limit = "" if unit.memory_bytes is None else f" of {unit.memory_bytes / 2**30:.1f} GiB"
            why = f"memory{limit}: {error}" if isinstance(error, MemoryError) else str(error)
            not_run.append(NotRun(name, unit.ranks, unit.slowdown, unit.seed, unit.ports, k, why))
    if not runs:
        return UnitResult((), tuple(not_run))
    best = min(runs, key=lambda run: run.seconds)
    case = ScheduleRatio(
        name,
        unit.ranks,
        unit.slowdown,
        unit.seed,
        unit.ports,
        tuple(run.segments for run in runs),
        best.segments,
        best.transfers,
        best.seconds,
        collective_bound(topology, SIZE_BYTES).seconds,
        fault_free(topology, SIZE_BYTES),
        formula_of(name, topology, best.segments, unit.ports),
        best.planning_s,
    )
    return UnitResult((case,), tuple(not_run))


def left_out(unit: Unit) -> UnitResult:
    """Nothing of it is simulated."""
    where = unit.schedule, unit.ranks, unit.slowdown, unit.seed, unit.ports
    return UnitResult((), tuple(NotRun(*where, segments, NO_TIME) for segments in unit.segments))


@contextmanager
def _memory_limited(memory_bytes: int | None) -> Iterator[None]:
    """Inside, what would need more address space than that raises MemoryError."""
    if memory_bytes is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def work_unit(unit: Unit) -> Any:
    """`run_unit` as JSON's types."""
    _warm()
    return msgspec.to_builtins(run_unit(unit), enc_hook=text_of)


@cache
def _warm() -> None:
    """Compiles the kernels, once a process: that is no part of planning."""
    few = SchedulePlan((4,), (Fraction(2),), {"optimal": (1,)}, 64, (4,), (1,), {}, {}, {}, {4: (1,)})
    for unit in units(few):
        run_unit(unit)


def formula_of(name: str, topology: Topology, segments: int, ports: Model) -> Fraction | None:
    """The schedule's closed form; OptCC's is the least that its ports need for so many segments, with fill and drain,
    and the latency of filling the pipeline.

    A section of OptCC makes p - 2 steps in each of stages 1 and 4 and one in each of 2 and 3, so the first one is done
    2(p - 1) latencies later than its bytes take.
    """
    found = {each.schedule: each.seconds for each in predictions(topology, SIZE_BYTES)}
    seconds = found.get("optimal" if name == "shares" else name)
    if name == "optcc" and seconds is not None:
        healthy = max(*topology.out, *topology.in_)
        slowdown = healthy / min(*topology.out, *topology.in_)
        form = ClosedForm(topology.n_ranks, slowdown, segments, "exclusive" if ports == "exclusive" else "fifo")
        slot_s = SIZE_BYTES / (healthy * (topology.n_ranks - 1) * segments)
        return form.least * slot_s + 2 * (topology.n_ranks - 1) * topology.latency_s
    return seconds
