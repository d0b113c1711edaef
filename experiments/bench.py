"""Timing collectives: schedules and peers interleaved in one run, every element checked.

Every case runs once in each round, so that a drift of the machine affects all alike, and each round begins with another
case. A time is from a barrier until a rank is done, the slowest unless another is asked for. Inputs are those of
`optcc.runtime.exact_inputs`: every reduction of them is exact, so a single wrong element is found.
"""

from __future__ import annotations

import gc
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import click
import numpy as np
import numpy.typing as npt

from optcc.collective import DTYPE_BYTES, ROOTED, Collective
from optcc.compiler import SLOTS
from optcc.dsl import Definition
from optcc.errors import InputError, OptccError, TopologyError
from optcc.experiments.bench_messages import CPU, BenchDevice, BenchMessage, device_of_rank, on_device
from optcc.experiments.peers import Peer, make_peer
from optcc.experiments.record import BenchTiming, NicTraffic, Samples, stolen_jiffies, stolen_share
from optcc.files import VerdictCache
from optcc.job import (
    assumed_topology,
    differences,
    knows_nics,
    measure_nics,
    tcp_ports,
    with_insides,
    with_message_cost,
)
from optcc.plan import Plan, PlanRequest
from optcc.planner import AUTO, Planner, build_plan, find_schedule, prove, verdict_cache
from optcc.rail_shares import usable
from optcc.runtime.device_actions import DevicePlace
from optcc.runtime.engine import Engine
from optcc.runtime.handle import Handle
from optcc.runtime.observe.observer import VARIABLE, Observer, observe
from optcc.runtime.observe.trace import gather_dumps, measured_run, write_trace
from optcc.runtime.observe.tracing import EVENTS
from optcc.runtime.persistent_plan import PersistentPlan
from optcc.runtime.protocol.agreement import Shares
from optcc.runtime.remeasuring import Remeasuring
from optcc.runtime.replanning import Replanning
from optcc.runtime.transport import Transport
from optcc.runtime.transports.loopback import run_ranks
from optcc.runtime.transports.tcp import TcpTransport
from optcc.simulate import simulate
from optcc.timing import Model
from optcc.topology import Topology
from optcc.verdict import Verdict
from optcc.verify.bounds.certified import least_seconds
from optcc.verify.bounds.closed_forms import collective_bound

if TYPE_CHECKING:
    from mpi4py import MPI

Array = npt.NDArray[np.generic]
MODES = ("out", "in")
_RUN = struct.Struct("<ddqqqq")
LOOPBACK_SLOTS = 1
"""Loopback ports share fairly among all posted messages, so a second slot slows down the first: OptCC of 64 MiB on four
ranks, one at half rate, takes 1.09 of the bound with one slot, 1.35 with two."""


DEFAULT_SCHEDULES = {
    "allreduce": "ring",
    "reducescatter": "ring-reduce-scatter",
    "allgather": "ring-all-gather",
    "broadcast": "chain-broadcast",
    "reduce": "chain-reduce",
    "alltoall": "direct-all-to-all",
    "alltoallv": "direct-all-to-all-v",
    "gather": "direct-gather",
    "scatter": "direct-scatter",
    "sendrecv": "send-recv",
}
"""Each collective that is timed by its name, and the schedule that is timed unless another is given."""
OF_A_RANK = ("alltoall", "alltoallv", "sendrecv")
"""Their size is that of what one rank gives, as nccl-tests counts it, and not of the whole message."""
AVERAGES = ("rank 0", "mean", "fastest", "slowest")
"""Of which rank a time is, in the order of nccl-tests' `-a`."""


class Variant(NamedTuple):
    """Of what kind the elements are, how they are reduced, from or to which root, and the sizes in bytes."""

    dtype: str
    reduction: str
    root: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class BenchSettings:
    """What to run: which schedules and peers, on what, over which sizes, how often.

    `check` is in how many runs of each mode, the last ones, every element is checked; None: in all. `operations` follow
    each other in a run, whose time is divided by their number; unless `blocking`, all are begun before the first is
    waited for. `device` is where arrays are: see `optcc.experiments.bench_messages`. `average` is one of `AVERAGES`.
    `shared_memory`: see `optcc.init`. `one_host`: all ranks are on one, as far as is known.
    `variants` are run one after the other, each in the place of `dtype`, `reduction`, `root` and `sizes`; none: only
    those. `trace` is where the timeline of the last run is written, of one schedule and size. `definitions` are
    schedules that declare the collective, if it is a declared one (`collective_of`).
    """

    schedules: tuple[str, ...]
    peers: tuple[str, ...]
    topology: Topology | None
    latency_s: Fraction
    wire_overhead: Fraction
    bed: str
    sizes: tuple[int, ...]
    iterations: int
    warmup: int
    check: int | None
    dtype: str
    reduction: str
    segments: int | str
    slots_given: int | None
    ports_given: Model | None
    window: int
    modes: tuple[str, ...]
    deadline_s: float
    quiet: bool
    probe: bool
    transport: str
    collective: str = "allreduce"
    root: int = 0
    operations: int = 1
    average: str = AVERAGES[3]
    variants: tuple[Variant, ...] = ()
    blocking: bool = True
    device: str = CPU
    trace: Path | None = None
    shared_memory: bool = True
    one_host: bool = False
    definitions: tuple[Definition, ...] = ()

    def wanted(self, n_ranks: int) -> Collective:
        """What is timed on so many ranks; raises InputError if schedules declare different collectives."""
        if not self.definitions:
            return Collective(self.collective, n_ranks, self.root)
        first, *others = self.definitions
        collective = first.computes(n_ranks)
        for other in others:
            if other.computes(n_ranks) != collective:
                raise InputError(
                    f"--schedule {other.name}: {self.collective}: must declare the same elements as {first.name}"
                )
        return collective

    def each(self) -> Iterator[BenchSettings]:
        """The settings of each variant."""
        for dtype, reduction, root, sizes in self.variants or (
            Variant(self.dtype, self.reduction, self.root, self.sizes),
        ):
            yield replace(self, dtype=dtype, reduction=reduction, root=root, sizes=sizes, variants=())

    @property
    def n_cases(self) -> int:
        """How many sizes there are in all variants."""
        return sum(len(each.sizes) for each in self.each())

    @property
    def ports(self) -> Model:
        """Those that were asked for; else over TCP those of `optcc.job.tcp_ports`, fair ones for ranks of one host of
        which nothing is declared, whose messages share its memory, and exclusive ones elsewhere."""
        if self.ports_given:
            return self.ports_given
        if self.transport == "tcp" or (self.topology is None and self.one_host):
            return tcp_ports(self.topology or self.assumed(1))
        return "exclusive"

    @property
    def slots(self) -> int:
        """Slots of a channel: messages that a rank accepts ahead."""
        return self.slots_given or (LOOPBACK_SLOTS if self.transport == "loopback" else SLOTS[self.ports])

    @property
    def replans(self) -> bool:
        """True if plans change with the NICs: it must be known what those carry, and told over the transport."""
        return self.topology is not None and bool(self.schedules) and self.transport == "tcp"

    @property
    def wired(self) -> Topology | None:
        """The topology in payload bytes a second, with the latency: what plans are made and predicted for. TCP measures
        what a message costs a rank's processor; elsewhere it is the latency, unless the topology says it."""
        if self.topology is None:
            return None
        wired = self.topology.scaled(1 / self.wire_overhead).with_latency(self.latency_s)
        return wired if self.transport == "tcp" else with_message_cost(wired)

    def assumed(self, n_ranks: int) -> Topology:
        """What plans are made for where nothing is said and nothing can be measured."""
        return assumed_topology(n_ranks, self.latency_s, one_host=self.one_host)


def measured(settings: BenchSettings, transport: TcpTransport, environ: Mapping[str, str]) -> BenchSettings:
    """The settings for what the NICs carry: the topology that was measured, if none is given or if the hosts carry
    something else, and what a message costs; collective. See `optcc.job.measure_nics`.
    """
    found = measure_nics(transport, environ) if settings.probe else None
    if found is None:
        return settings
    declared, wired = settings.topology, settings.wired
    if declared is not None and wired is not None:
        wrong = differences(wired, found)
        if not wrong and knows_nics(wired, found):
            return replace(settings, topology=replace(declared, overhead_s=found.overhead_s))
        if wrong and transport.rank == 0:
            click.echo(f"optcc: --topology: {'; '.join(wrong)}: plans and bounds are for what was measured", err=True)
        found = with_insides(found, wired)
    return replace(settings, topology=found, wire_overhead=Fraction(1))


Progress = Callable[[int, int], None]
"""Called with (runs done, runs in all)."""
Report = Callable[[Sequence[BenchTiming]], None]
"""Called with the rows of a size."""


class Contestant(Protocol):
    """Something that carries out the collective: a schedule on our run-time, or a peer.

    `modes` are those of `MODES` that it has.
    """

    name: str
    modes: tuple[str, ...]

    def run(self, send: Array | None, recv: Array | None) -> None:
        """From what this rank gives to what it gets, None for nothing; in place both are parts of one message."""
        ...


class Ours:
    """A schedule on our run-time. All schedules of a job share an engine; each has its own channels and striping.

    `plan` is the one at the start, `plan_changes` counts those that followed it.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        verdict: Verdict,
        window: int,
        deadline_s: float,
        place: DevicePlace | None = None,
    ) -> None:
        self.name, self._place = plan.name, place
        self.modes: tuple[str, ...] = MODES
        self.plan, self.plan_changes = plan, 0
        self._engine, self._window, self._deadline_s = engine, window, deadline_s
        self._prepared = self._prepare(plan, verdict)

    def run(self, send: Array | None, recv: Array | None) -> None:
        """See `Contestant`."""
        self.start(send, recv).wait()

    def start(self, send: Array | None, recv: Array | None) -> Handle:
        """Begins what `run` does; several follow each other."""
        return self._prepared.start(send, recv)

    def _prepare(self, plan: Plan, verdict: Verdict) -> PersistentPlan:
        return self._engine.prepare(plan, verdict, window=self._window, deadline_s=self._deadline_s, device=self._place)

    @property
    def present_plan(self) -> Plan:
        """The plan that ran last."""
        return self._prepared.plan

    def close(self) -> None:
        """Returns the channels for reuse; every rank closes the same schedules in the same order."""
        self._prepared.close()


class Replanned(Ours):
    """A schedule whose plan changes with what the NICs carry, at all ranks before the same run."""

    def __init__(
        self,
        plan: Plan,
        verdict: Verdict,
        settings: BenchSettings,
        engine: Engine,
        replanning: Replanning,
        planner: Planner,
        place: DevicePlace | None = None,
    ) -> None:
        super().__init__(plan, engine, verdict, settings.window, settings.deadline_s, place)
        self.planner = planner
        self._replanning, self._plans_since = replanning, 0

    def start(self, send: Array | None, recv: Array | None) -> Handle:
        """See `Ours`."""
        self._replanning.begin(self._deadline_s, self.plan.request)
        if self._plans_since != self._replanning.plans_since:
            self._change()
        return super().start(send, recv)

    def _change(self) -> None:
        """The NICs carry something else than the plan is for; where there is no plan for that, this one goes on."""
        self._plans_since = self._replanning.plans_since
        try:
            planned = self.planner.under(self._replanning.shares)(*self.plan.request)
        except OptccError:
            return
        self._prepared.close()
        self._prepared = self._prepare(*planned)
        self.plan_changes += 1


@dataclass
class Tally:
    """The timings of one case in one mode so far."""

    seconds: list[float] = field(default_factory=list)
    steal: list[float] = field(default_factory=list)
    wrong: int = 0
    resent: int = 0
    lost: int = 0
    detours: int = 0

    def samples(self) -> Samples:
        """The tally, frozen."""
        return Samples(self.seconds, self.steal, self.wrong)


def run_on_loopback(
    settings: BenchSettings, progress_of: Callable[[int], Progress], report_of: Callable[[int], Report]
) -> list[BenchTiming]:
    """`run_cases` with all ranks as threads on ports shaped to the topology, which must be given; no peers.

    `progress_of` makes the `progress` of a rank, `report_of` its `report`.
    """
    wired = settings.wired
    assert wired is not None and not settings.peers
    cache = verdict_cache()
    n_ranks = wired.n_ranks
    runs = 2 * (settings.iterations + settings.warmup) * settings.operations
    timeout_s = settings.deadline_s * settings.n_cases * runs

    def body(rank: int, transport: Transport) -> list[BenchTiming]:
        device = device_of_rank(settings.device, transport, ("",) * n_ranks)
        return run_cases(settings, transport, None, cache, progress_of(rank), report_of(rank), device)

    return run_ranks(
        n_ranks,
        body,
        topology=wired.with_latency(Fraction(0)),
        deadline_s=max(timeout_s * max(1, len(settings.schedules)), 60.0),
    )[0]


def run_cases(
    settings: BenchSettings,
    transport: Transport,
    comm: MPI.Intracomm | None,
    cache: VerdictCache,
    progress: Progress = lambda done, total: None,
    report: Report = lambda rows: None,
    device: BenchDevice | None = None,
) -> list[BenchTiming]:
    """The rows of every variant, size and case, the same at every rank; peers need `comm`. Arrays are on `device`.

    `progress` is that of `measure`; `report` is called with the rows of each size as soon as they are there.
    """
    rows: list[BenchTiming] = []
    engine, replanned = Engine(transport), list[Replanned]()

    def prepare(shares: Shares, _: PlanRequest | None) -> Callable[[], bool]:
        are_there = [each.planner.prepare(shares, [each.plan.request]) for each in replanned]
        return lambda: all(is_there() for is_there in are_there)

    remeasuring = Remeasuring(engine) if settings.replans and settings.probe else None
    replanning = Replanning(engine, prepare if settings.replans else None, remeasuring)
    if os.environ.get(VARIABLE) and not settings.trace:
        # Times are of what is not observed, unless that is asked for.
        observe(engine, os.environ)
    traced = settings.trace and Observer(engine, "bench", None, n_events=EVENTS, in_detail=True)
    for each in settings.each():
        collective = each.wanted(transport.n_ranks)
        peers: list[Peer] = []
        if comm is not None:
            number = None if device is None else device.place.device_id
            given = each.dtype, each.reduction, each.deadline_s, collective, number
            peers = [make_peer(name, comm, *given) for name in each.peers]
        for asked in each.sizes:
            size = asked
            if collective.name == "alltoall":  # in equal blocks, as nccl-tests
                size -= size % (transport.n_ranks * DTYPE_BYTES[each.dtype])
            total = message_bytes(collective, size)
            place = None if device is None else device.place
            ours = [_ours(each, name, total, engine, replanning, cache, place) for name in each.schedules]
            replanned[:] = [case for case in ours if isinstance(case, Replanned)]
            for changing in replanned:
                changing.planner.get_ready(changing.plan.request)
            cases: list[Contestant] = [*ours, *peers]
            how = _how(each, total)
            with _no_collection(), on_device(device):
                tallies = measure(transport, cases, collective=collective, progress=progress, device=device, **how)
            found = [_row(each, collective, size, case, tally) for case, tally in zip(cases, tallies, strict=True)]
            report(found)
            rows += found
            if settings.trace and traced:
                run = measured_run(ours[0].present_plan, gather_dumps(engine, traced.contents()))
                if not transport.rank:
                    write_trace(run, settings.trace)
            for case in ours:
                case.close()
        for peer in peers:
            peer.close()
    return rows


def _how(settings: BenchSettings, size: int) -> dict[str, Any]:
    """The arguments of `measure` for a message of `size` bytes."""
    return {
        "count": size // DTYPE_BYTES[settings.dtype],
        "dtype": settings.dtype,
        "reduction": settings.reduction,
        "iterations": settings.iterations,
        "warmup": settings.warmup,
        "check": settings.check,
        "modes": settings.modes,
        "operations": settings.operations,
        "average": settings.average,
        "blocking": settings.blocking,
    }


def _ours(
    settings: BenchSettings,
    name: str,
    size: int,
    engine: Engine,
    replanning: Replanning,
    cache: VerdictCache,
    place: DevicePlace | None,
) -> Ours:
    """A schedule made ready; its plan changes with the NICs if it is known what they carry."""
    plan = _plan(settings, name, engine.n_ranks, size)
    verdict = prove(plan, cache)
    if settings.wired is None or not settings.replans:
        return Ours(plan, engine, verdict, settings.window, settings.deadline_s, place)
    planner = Planner(
        settings.wired,
        schedules={settings.collective: name},
        segments=settings.segments,
        slots=settings.slots,
        ports=settings.ports,
        by_rail=True,
    )
    return Replanned(plan, verdict, settings, engine, replanning, planner, place)


def _plan(settings: BenchSettings, name: str, n_ranks: int, size: int) -> Plan:
    topology = settings.wired or settings.assumed(n_ranks)
    return build_plan(
        name,
        topology,
        size,
        dtype=settings.dtype,
        reduction=settings.reduction,
        segments=settings.segments,
        slots=settings.slots,
        ports=settings.ports,
        root=settings.root,
        collective=settings.wanted(n_ranks),
        by_rail=settings.transport == "tcp",
    )


def collective_of(schedules: Sequence[str], name: str | None = None) -> tuple[str, tuple[Definition, ...]]:
    """The collective called `name`, by default that of the schedules, else an AllReduce; and which of them declare it,
    or if none does, the one of `DEFAULT_SCHEDULES`.

    >>> collective_of(["auto", "ring-all-gather", "bruck"]), collective_of(["auto"])
    (('allgather', ()), ('allreduce', ()))
    >>> [each.name for each in collective_of(["auto"], "alltoallv")[1]]
    ['direct-all-to-all-v']

    Raises InputError for a schedule of another collective, and what `find_schedule` raises.
    """
    found = {each: find_schedule(each) for each in schedules if each != AUTO}
    first = next(iter(found), "")
    rule = f", as --schedule {first}" if name is None else ""
    wanted = name or (found[first].collective if found else "allreduce")
    for each, definition in found.items():
        if definition.collective != wanted:
            raise InputError(f"--schedule {each}: {definition.collective}: must be for {wanted}{rule}")
    known = found.values() or (find_schedule(DEFAULT_SCHEDULES[wanted]),)
    return wanted, tuple(each for each in known if each.declares)


def message_bytes(collective: Collective, size_bytes: int) -> int:
    """The whole message of a collective that nccl-tests says is of `size_bytes`: see `OF_A_RANK`.

    >>> message_bytes(Collective("alltoall", 4), 100), message_bytes(Collective("allgather", 4), 100)
    (400, 100)
    """
    return size_bytes * collective.n_ranks if collective.name in OF_A_RANK else size_bytes


def _row(
    settings: BenchSettings, collective: Collective, size: int, case: Contestant, tallies: dict[str, Tally]
) -> BenchTiming:
    plan = case.plan if isinstance(case, Ours) else None
    bound = predicted = None
    wired = settings.wired
    if wired is not None:
        bound = _bound_s(wired, message_bytes(collective, size), collective)
        reached = usable(wired) if settings.transport == "tcp" else wired
        predicted = simulate(plan, reached, model=settings.ports).seconds if plan is not None else None
    samples = {mode: tally.samples() for mode, tally in tallies.items()}
    return BenchTiming(
        case.name,
        settings.bed,
        repr(settings.topology)[len("Topology(") :].strip("')") if settings.topology is not None else "",
        collective.n_ranks,
        size,
        settings.dtype,
        settings.reduction,
        len(set(plan.transfers.segment.tolist())) if plan is not None else 0,
        plan.digest if plan is not None else "",
        bound,
        predicted,
        samples.get("out"),
        samples.get("in"),
        sum(tally.resent for tally in tallies.values()),
        sum(tally.lost for tally in tallies.values()),
        settings.collective,
        settings.root if settings.collective in ROOTED else -1,
        case.plan_changes if isinstance(case, Ours) else 0,
        sum(tally.detours for tally in tallies.values()),
        bus_share(collective),
    )


def _bound_s(topology: Topology, size_bytes: int, collective: Collective) -> float | None:
    """`least_seconds`; None where a declared collective has no bound on the topology."""
    try:
        return float(least_seconds(topology, size_bytes, collective))
    except TopologyError:
        if not collective.cells:
            raise
        return None


def bus_share(collective: Collective) -> float | None:
    """What the busiest port of equal ranks must carry of a declared collective, a byte of its size; None for others.

    >>> bus_share(Collective.all_to_all_v([[1] * 4] * 4)), bus_share(Collective("alltoall", 4))
    (0.75, None)
    """
    if not collective.cells:
        return None
    equal = Topology.parse(f"{collective.n_ranks}@1B/s")
    return float(collective_bound(equal, message_bytes(collective, 1), collective).seconds)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection inside timed runs."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(
    transport: Transport,
    cases: Sequence[Contestant],
    *,
    count: int,
    dtype: str,
    reduction: str,
    iterations: int,
    warmup: int,
    check: int | None,
    modes: Sequence[str] = MODES,
    progress: Progress = lambda done, total: None,
    collective: Collective | None = None,
    operations: int = 1,
    average: str = AVERAGES[3],
    blocking: bool = True,
    device: BenchDevice | None = None,
) -> list[dict[str, Tally]]:
    """For each case, its tally by mode ("out" of place, "in" place); collective over the transport's ranks.

    `progress` is called with (runs done, runs in all); the other arguments see `BenchSettings`.
    """
    collective = collective or Collective("allreduce", transport.n_ranks)
    message = BenchMessage(collective, transport.rank, count, dtype, reduction, check != 0, device)
    first_checked = 0 if check is None else max(0, warmup + iterations - check)
    tallies = [{mode: Tally() for mode in modes if mode in case.modes} for case in cases]
    turns = [turn for turn in _turns(len(cases), modes, warmup, iterations) if turn[1] in tallies[turn[0]]]
    losses = _Losses(transport)
    for position, (number, mode, round_) in enumerate(turns):
        how = operations if blocking else -operations, average
        run = _run(transport, cases[number], mode, message, losses, *how, is_checked=round_ >= first_checked)
        tally = tallies[number][mode]
        tally.wrong += run.wrong
        tally.resent += run.resent
        tally.lost += run.lost
        tally.detours += run.detours
        if round_ >= warmup:
            tally.seconds.append(run.seconds)
            tally.steal.append(run.steal)
        progress(position + 1, len(turns))
    return tallies


def _turns(n_cases: int, modes: Sequence[str], warmup: int, iterations: int) -> Iterator[tuple[int, str, int]]:
    """Case, mode and round, in the order of running: round by round, each of which another case begins.

    >>> [number for number, _, _ in _turns(3, ["in"], 0, 2)]
    [0, 1, 2, 1, 2, 0]
    """
    for round_ in range(warmup + iterations):
        for mode in modes:
            for place in range(n_cases):
                yield (place + round_) % n_cases, mode, round_


class _Run(NamedTuple):
    """Seconds of an operation, the largest stolen share; and over all ranks wrong elements, and since the run before
    this one chunks that were sent again, connections that were lost, and paths through other hosts that were taken."""

    seconds: float
    steal: float
    wrong: int
    resent: int
    lost: int
    detours: int


def _run(
    transport: Transport,
    case: Contestant,
    mode: str,
    message: BenchMessage,
    losses: _Losses,
    operations: int,
    average: str,
    *,
    is_checked: bool,
) -> _Run:
    """`operations` of a case, below zero those that are all begun before the first is waited for."""
    send, recv = message.arrays(mode)
    message.settle()
    stolen = stolen_jiffies()
    transport.barrier()
    started = time.perf_counter()
    if operations < 0 and isinstance(case, Ours):
        for handle in [case.start(send, recv) for _ in range(-operations)]:
            handle.wait()
    else:
        for _ in range(abs(operations)):
            case.run(send, recv)
    message.settle()
    operations = abs(operations)
    own = (time.perf_counter() - started) / operations
    steal = stolen_share(stolen, stolen_jiffies())
    if is_checked and operations > 1 and mode == "in":
        # Each of them has reduced what the one before it left: one more, of what was given.
        case.run(*message.arrays(mode))
        message.settle()
    wrong = message.wrong() if is_checked else 0
    row = _RUN.pack(own, steal, wrong, *losses.take())
    seconds, stolen_shares, *counts = zip(*map(_RUN.unpack, transport.allgather(row)), strict=True)
    of_ranks = {"rank 0": seconds[0], "mean": fmean(seconds), "fastest": min(seconds), "slowest": max(seconds)}
    return _Run(of_ranks[average], max(stolen_shares), *map(sum, counts))


class _Losses:
    """Chunks that this rank has sent again, connections that it has lost, and paths through other hosts that it has
    taken; 0 where they are not counted. A NIC may fail between two runs, so none is left out."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._before = self._so_far()

    def take(self) -> tuple[int, ...]:
        """How many since the last call, the first time since the beginning."""
        before, self._before = self._before, self._so_far()
        return tuple(now - then for then, now in zip(before, self._before, strict=True))

    def _so_far(self) -> tuple[int, int, int]:
        transport = self._transport
        if not isinstance(transport, TcpTransport):
            return 0, 0, 0
        counts = transport.counts
        return counts.resent, sum(count.failures for count in transport.rails), counts.detours


def nic_traffic(transport: TcpTransport) -> tuple[NicTraffic, ...]:
    """What every NIC of every rank has carried so far; collective."""
    own = [(each.sent_bytes, each.received_bytes, each.failures, each.out_share) for each in transport.rails]
    rows = np.zeros((max(map(len, transport.nics)), 4))
    rows[: len(own)] = own
    everyone = [np.frombuffer(each).reshape(rows.shape) for each in transport.allgather(rows.tobytes())]
    return tuple(
        NicTraffic(rank, nic[0], int(counts[0]), int(counts[1]), int(counts[2]), float(counts[3]))
        for rank, (nics, found) in enumerate(zip(transport.nics, everyone, strict=True))
        for nic, counts in zip(nics, found, strict=False)
    )
