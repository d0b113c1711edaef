"""`Planner`: plans for a `Communicator`, from the schedule library, compiled for a topology and verified.

    comm = Communicator(transport, Planner(Topology.parse("4@1GB/s,3=500MB/s")))

Also the steps that it consists of, for those that need one of them alone: `find_schedule` (a name to a definition),
`build` (a definition to a plan), `prove` (a plan to its proof), `smallest_failure` (a refutation to a smaller one).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from optcc.collective import DTYPE_BYTES, Collective
from optcc.compiler import TimedPlan, compile_schedule, try_segments
from optcc.dsl import Definition
from optcc.errors import ArgumentError, InputError, OptccError, PlanError
from optcc.files import VerdictCache, cache_directory
from optcc.plan import Plan
from optcc.rail_shares import shares_by_rail
from optcc.schedule import Schedule
from optcc.schedules.auto import Choice, choose
from optcc.schedules.registry import SCHEDULES
from optcc.timing import MODELS, Model, Timing
from optcc.topology import Topology
from optcc.verdict import PROVED, Verdict
from optcc.verify.plan import VERSION, verify_plan
from optcc.verify.plan.report import Questions, judge
from optcc.verify.plan.shrink import Smallest, shrink

AUTO = "auto"
"""As a schedule's name: the one that chooses among the others; as a number of segments: chosen by simulation."""

SCHEDULE_OF: Mapping[str, str] = {
    "allreduce": AUTO,
    "reducescatter": "ring-reduce-scatter",
    "allgather": "ring-all-gather",
    "broadcast": "chain-broadcast",
    "reduce": "chain-reduce",
}
"""By collective, the schedule that `Planner` takes unless another is given."""


class Planner:
    """Called with (collective, size in bytes, dtype, reduction): the plan and its proof; the same at every rank.

    `schedules` replaces entries of `SCHEDULE_OF`; `slots` and `ports` are those of `optcc.compiler.compile_schedule`,
    and `by_rail` is that of `build`.
    Proofs are kept in the user's cache directory. Raises InputError for an unknown name or a schedule of another
    collective, TopologyError if a schedule does not accept the topology, PlanError, with the counterexample, for a
    refuted plan.

    >>> plan, verdict = Planner(Topology.parse("4@1GB/s"))(Collective("broadcast", 4, root=2), 1024, "int32", "sum")
    >>> plan.name, plan.collective.root, verdict.verdict
    ('chain-broadcast', 2, 'proved')
    """

    def __init__(
        self,
        topology: Topology,
        *,
        schedules: Mapping[str, str] | None = None,
        slots: int | None = None,
        ports: Model = "exclusive",
        by_rail: bool = False,
    ) -> None:
        self.topology = topology
        self._schedules = {**SCHEDULE_OF, **(schedules or {})}
        self._slots, self._ports, self._by_rail = slots, ports, by_rail
        self._cache = verdict_cache()

    def __call__(self, collective: Collective, size_bytes: int, dtype: str, reduction: str) -> tuple[Plan, Verdict]:
        if collective.n_ranks != self.topology.n_ranks:
            raise InputError(f"topology of {self.topology.n_ranks} ranks: must have {collective.n_ranks}")
        plan = build(
            self._schedules[collective.name],
            self.topology,
            size_bytes,
            dtype=dtype,
            reduction=reduction,
            slots=self._slots,
            ports=self._ports,
            root=collective.root,
            by_rail=self._by_rail,
        ).plan
        if plan.collective != collective:
            raise InputError(f"schedule {plan.name}: {plan.collective.name}: must be for {collective.name}")
        return plan, prove(plan, self._cache)


def find_schedule(name: str) -> Definition:
    """The schedule of the library with that name, or `FILE.py:FUNCTION` of the user's own.

    Raises InputError if there is no such schedule.
    """
    path, colon, function = name.rpartition(":")
    if colon:
        found = getattr(_load_file(Path(path)), function, None)
        if not isinstance(found, Definition):
            raise InputError(f"schedule {name!r}: {path} has no function {function} under @schedule")
        return found
    if name not in SCHEDULES:
        raise InputError(f"schedule {name!r}: must be one of {', '.join(SCHEDULES)}, {AUTO}, or FILE.py:FUNCTION")
    return SCHEDULES[name]


def _load_file(path: Path) -> object:
    if not path.is_file():
        raise InputError(f"schedule file {str(path)!r}: no such file")
    spec = importlib.util.spec_from_file_location(f"optcc_user_{path.stem}", path.resolve())
    if spec is None or spec.loader is None:
        raise InputError(f"schedule file {str(path)!r}: must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except OptccError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"schedule file {str(path)!r}: cannot be imported: {type(error).__name__}: {error}") from error
    return module


class Built(NamedTuple):
    """A plan, the schedule that it was compiled from, and how to make others; `choice` if `auto` chose it, `timing`
    under the ports that it is ordered for if its segments were chosen by it."""

    plan: Plan
    schedule: Schedule
    definition: Definition
    segments: int
    choice: Choice | None = None
    timing: Timing | None = None


def build(
    name: str,
    topology: Topology,
    size_bytes: int,
    *,
    dtype: str = "float32",
    reduction: str = "sum",
    segments: int | str = AUTO,
    slots: int | None = None,
    ports: Model = "exclusive",
    root: int = 0,
    by_rail: bool = False,
) -> Built:
    """The schedule called `name`, compiled; the number of segments is chosen by simulation unless given.

    With `by_rail` and fair ports `auto` takes NICs to reach those of their own rail alone, as they do over TCP.

    Raises InputError for a name, a model of ports or segments that cannot be, and what building and compiling raise.
    """
    if ports not in MODELS:
        raise ArgumentError(f"ports {ports!r}: must be one of {', '.join(MODELS)}")
    if name == AUTO:
        if segments != AUTO:
            raise ArgumentError(f"segments {segments}: must be left out with the schedule {AUTO}, which chooses them")
        rails = shares_by_rail(topology) if by_rail and ports == "fair" else None
        chosen = choose(
            topology if rails is None else rails.usable,
            size_bytes,
            dtype=dtype,
            reduction=reduction,
            slots=slots,
            ports=ports,
            parts=() if rails is None else rails.shares,
        )
        taken = chosen.taken
        return Built(chosen.plan, chosen.schedule, find_schedule(taken.name), taken.segments, chosen)
    definition = find_schedule(name).under(ports)
    made: TimedPlan | None = None
    if isinstance(segments, str):
        segments, made = try_segments(
            definition, topology, size_bytes=size_bytes, dtype=dtype, slots=slots, ports=ports
        )
    if made is not None and reduction == "sum" and root == 0:
        return Built(made.plan, made.schedule, definition, segments, timing=made.timing)
    schedule = definition.build(topology, segments, root=root)
    plan = compile_schedule(
        schedule,
        size_bytes=size_bytes,
        dtype=dtype,
        reduction=reduction,
        topology=topology,
        slots=slots,
        ports=ports,
    )
    return Built(plan, schedule, definition, segments)


def build_plan(name: str, topology: Topology, size_bytes: int, **options: Any) -> Plan:
    """The plan of `build`."""
    return build(name, topology, size_bytes, **options).plan


def verdict_cache() -> VerdictCache:
    """The user's cache of proofs by this version of the verifier."""
    return VerdictCache(cache_directory(os.environ), VERSION)


def prove(plan: Plan, cache: VerdictCache) -> Verdict:
    """The proof of `plan`, from `cache` or made now.

    Raises PlanError with the counterexample if the plan is refuted.
    """
    verdict = cache.get(plan.digest)
    if verdict is None:
        verdict = verify_plan(plan)
        cache.put(verdict)
    if verdict.verdict != PROVED:
        raise PlanError(f"{plan.name}: {verdict.verdict}, so it does not run: {verdict.counterexample}")
    return verdict


def smallest_failure(
    built: Built, verdict: Verdict, topology: Topology, size_bytes: int, **options: Any
) -> Smallest | None:
    """The smallest case that `verdict`'s property refutes, compiled with the same `options` as `built`.

    None if the plan was not refuted, or by a property of this size or topology alone (`timing`, `limits`).
    """
    if verdict.counterexample is None or verdict.counterexample.property in ("timing", "limits"):
        return None
    compiling = {key: value for key, value in options.items() if value is not None}

    def make(smaller: Topology, segments: int, size: int) -> tuple[Plan, Verdict]:
        schedule = built.definition.build(smaller, segments)
        plan = compile_schedule(schedule, size_bytes=size, topology=smaller, **compiling)
        return plan, judge(plan, Questions(schedule)).verdict

    itemsize = DTYPE_BYTES[built.plan.transfers.dtype]
    return shrink(make, verdict.counterexample, topology, built.segments, size_bytes, itemsize)
