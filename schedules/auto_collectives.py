"""`auto` for the collectives other than AllReduce: the schedule of the library that is simulated to be fastest.

There are few for each: every one that accepts the topology is compiled with the number of segments that suits it
(`optcc.compiler.try_segments`), and the fastest is taken. So the choice is the best of the library by simulation, but
that none is tried after one that takes hardly longer than the slowest server's NICs need in any case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from optcc.collective import Collective
from optcc.compiler import TimedPlan, compile_schedule, costed_s, try_segments, with_some_latency
from optcc.dsl import Definition
from optcc.errors import InputError, OptccError, SolverUnknown, TopologyError
from optcc.plan import Plan
from optcc.schedules.auto import Candidate, Choice
from optcc.schedules.registry import SCHEDULES
from optcc.simulate import simulate
from optcc.timing import Model
from optcc.topology import Topology

CLOSE = 0.008
"""Where GPUs are linked, no more segments are tried after so small an excess over the busiest port: half of what an
AllReduce is allowed, which takes twice as long."""
NEAR_LEAST = 1.01
"""No other schedule is tried after one that takes at most so many times `least_of_servers_s`."""
_FREE = "1000000GB/s"
"""A port that limits nothing."""


def candidates_for(
    collective: Collective, topology: Topology, ports: Model = "exclusive", more: Sequence[Definition] = ()
) -> list[Definition]:
    """The schedules of `more`, and of the library, for `collective` that accept the topology.

    >>> [each.name for each in candidates_for(Collective("broadcast", 4), Topology.parse("4@1GB/s"))]
    ['chain-broadcast', 'tree-broadcast']

    Raises InputError if the library has none for the collective, TopologyError if none accepts the topology.
    """
    known = [each.under(ports) for each in (*more, *SCHEDULES.values()) if each.collective == collective.name]
    if not known:
        raise InputError(f"collective {collective.name!r}: the library has no schedule for it")
    refusals: list[TopologyError] = []
    found: list[Definition] = []
    for definition in known:
        try:
            definition.configure(topology)
        except TopologyError as error:
            refusals.append(error)
        else:
            found.append(definition.of(collective) if collective.cells else definition)
    if not found:
        ways = "" if topology.wired is not None else ", or say how they are linked, as 4x2@50GB/s+450GB/s does"
        raise TopologyError(f"no schedule for {collective.name}: {refusals[0]}{ways}")
    return found


def least_of_servers_s(topology: Topology, collective: Collective, size_bytes: int) -> float:
    """A lower bound in seconds on an AllGather and a ReduceScatter, 0 for others: a server receives, or sends, once
    what the ranks of the others own.

    >>> topology = Topology.parse("4x2@50GB/s+450GB/s,3=1/2")
    >>> least_of_servers_s(topology, Collective("allgather", 8), 2 * 10**9)
    0.03
    """
    rates = {"allgather": topology.in_, "reducescatter": topology.out}.get(collective.name, ())
    ranks = topology.n_ranks
    shares = (
        Fraction(ranks - server.gpus, ranks) / rate for server, rate in zip(topology.servers, rates, strict=bool(rates))
    )
    return size_bytes * float(max(shares, default=Fraction(0)))


def choose_for(
    collective: Collective,
    topology: Topology,
    size_bytes: int,
    *,
    dtype: str = "float32",
    reduction: str = "sum",
    slots: int | None = None,
    ports: Model = "exclusive",
    segments: int | None = None,
    more: Sequence[Definition] = (),
    enough_s: float = 0.0,
) -> Choice:
    """The fastest plan found for `collective` of `size_bytes`; a topology without latency is taken to have
    what `optcc.compiler.with_some_latency` says, and `more` are candidates besides the library's. Candidates have the
    number of `segments` that suits each, unless it is given; their estimates are what their busiest port takes. None is
    tried after one that takes at most `enough_s`, and one that has no route for some transfer is left out.

    Raises what `candidates_for` raises, TopologyError if no candidate has its routes, and what compiling raises.
    """
    timed = with_some_latency(topology)
    tried: list[Candidate] = []
    refusals: list[OptccError] = []
    made: dict[str, TimedPlan] = {}
    options: dict[str, Any] = {"dtype": dtype, "slots": slots, "ports": ports}
    if not topology.memory:
        enough_s = max(enough_s, NEAR_LEAST * least_of_servers_s(topology, collective, size_bytes))
    for definition in candidates_for(collective, topology, ports, more):
        try:
            count, plan = _timed(definition, timed, size_bytes, segments, collective.root, options)
        except (TopologyError, SolverUnknown) as refusal:  # some transfer has no route, or no flow is found
            refusals.append(refusal)
            continue
        made[definition.name] = plan
        assert plan.timing is not None  # it need not be near anything
        busiest = max(plan.timing.port_busy_s, default=0.0)
        estimate = Candidate(definition.name, count, float(busiest), len(plan.plan.transfers))
        in_memory = topology.memory > 0
        seconds = in_memory_s(plan.plan, timed) if in_memory else costed_s(plan.plan, plan.timing.seconds, timed)
        tried.append(replace(estimate, seconds=seconds))
        if seconds <= enough_s:
            break
    if not tried:
        raise refusals[0]
    tried.sort(key=lambda each: each.seconds or 0.0)
    taken = tried[0]
    schedule, plan_of_sum = made[taken.name][:2]
    result = plan_of_sum
    if reduction != "sum":
        result = compile_schedule(
            schedule,
            size_bytes=size_bytes,
            dtype=dtype,
            reduction=reduction,
            topology=timed,
            slots=slots,
            ports=ports,
        )
    return Choice(result, schedule, taken, tuple(tried), timed.latency_s)


def in_memory_s(plan: Plan, topology: Topology) -> float:
    """About the time of a plan on one host, whose ranks have no ports of their own: all bytes through its memory, the
    messages of the busiest rank, and the latencies that follow one another.

    Schedules move the same bytes, in broad terms, so that the one with the fewest steps is fastest: of a Broadcast of
    16 MiB on four ranks the tree, whose root would have to send it twice over a port.
    """
    free = Topology.parse(f"{topology.n_ranks}@{_FREE}").with_latency(topology.latency_s)
    transfers = plan.transfers
    sent = transfers.src != transfers.dst
    ends = np.bincount(np.concatenate((transfers.src[sent], transfers.dst[sent])), minlength=1)
    busiest_s = int(ends.max()) * float(topology.overhead_s)
    through_s = int(transfers.bytes[sent].sum()) / float(topology.memory)
    return through_s + busiest_s + simulate(plan, free, model="fair").seconds


def _timed(
    definition: Definition,
    topology: Topology,
    size_bytes: int,
    segments: int | None,
    root: int,
    options: Mapping[str, Any],
) -> tuple[int, TimedPlan]:
    """The plan of a candidate with so many segments, or None: as many as suit it, and how many they are."""
    count, plan = segments or 1, None
    if segments is None:
        count, plan = try_segments(definition, topology, size_bytes=size_bytes, close=CLOSE, **options)
    if plan is None or root:
        schedule = definition.build(topology, count, root=root)
        compiled = compile_schedule(schedule, size_bytes=size_bytes, topology=topology, **options)
        timing = simulate(compiled, topology, model=options["ports"])
        plan = TimedPlan(schedule, compiled, timing.seconds, timing)
    return count, plan
