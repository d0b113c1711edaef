"""`auto` for the collectives other than AllReduce: the schedule of the library that is simulated to be fastest.

There are few for each: every one that accepts the topology is compiled with the number of segments that suits it
(`optcc.compiler.try_segments`), and the fastest is taken. So the choice is the best of the library by simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optcc.collective import Collective
from optcc.compiler import TimedPlan, compile_schedule, costed_s, try_segments, with_some_latency
from optcc.dsl import Definition
from optcc.errors import InputError, TopologyError
from optcc.schedules.auto import Candidate, Choice
from optcc.schedules.registry import SCHEDULES
from optcc.simulate import simulate
from optcc.timing import Model
from optcc.topology import Topology


def candidates_for(
    collective: Collective, topology: Topology, ports: Model = "exclusive", more: Sequence[Definition] = ()
) -> list[Definition]:
    """The schedules of the library, and of `more`, for `collective` that accept the topology.

    >>> [each.name for each in candidates_for(Collective("broadcast", 4), Topology.parse("4@1GB/s"))]
    ['chain-broadcast', 'tree-broadcast']

    Raises InputError if the library has none for the collective, TopologyError if none accepts the topology.
    """
    known = [each.under(ports) for each in (*SCHEDULES.values(), *more) if each.collective == collective.name]
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
        raise TopologyError(f"no schedule for {collective.name}: {refusals[0]}")
    return found


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
) -> Choice:
    """The fastest plan found for `collective` of `size_bytes`; a topology without latency is assumed to have
    what `optcc.compiler.with_some_latency` says, and `more` are candidates besides the library's. Candidates have the
    number of `segments` that suits each, unless it is given; their estimates are what their busiest port takes.

    Raises what `candidates_for` raises, and what compiling a schedule raises.
    """
    timed = with_some_latency(topology)
    tried: list[Candidate] = []
    made: dict[str, TimedPlan] = {}
    for definition in candidates_for(collective, topology, ports, more):
        count, plan = segments or 1, None
        if segments is None:
            count, plan = try_segments(definition, timed, size_bytes=size_bytes, dtype=dtype, slots=slots, ports=ports)
        if plan is None or collective.root:
            schedule = definition.build(timed, count, root=collective.root)
            compiled = compile_schedule(
                schedule, size_bytes=size_bytes, dtype=dtype, topology=timed, slots=slots, ports=ports
            )
            plan = TimedPlan(schedule, compiled, simulate(compiled, timed, model=ports))
        made[definition.name] = plan
        busiest = max(plan.timing.port_busy_s, default=0.0)
        estimate = Candidate(definition.name, count, float(busiest), len(plan.plan.transfers))
        tried.append(replace(estimate, seconds=costed_s(plan.plan, plan.timing.seconds, timed)))
    tried.sort(key=lambda each: each.seconds or 0.0)
    taken = tried[0]
    schedule, plan_of_sum, _ = made[taken.name]
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
    return Choice(result, schedule, taken, tuple(tried))
