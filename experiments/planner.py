"""`Planner`: plans for a `Communicator`, from the schedule library, compiled for a topology and verified.

comm = Communicator(transport, Planner(Topology.parse("4@1GB/s,3=500MB/s")))
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from optcc.cli import build, find_schedule
from optcc.collective import Collective
from optcc.compiler import choose_segments, compile_schedule
from optcc.errors import InputError, PlanError
from optcc.files import VerdictCache, cache_directory
from optcc.plan import Plan
from optcc.topology import Topology
from optcc.verdict import PROVED, Verdict
from optcc.verify.plan import VERSION, verify_plan

SCHEDULES: Mapping[str, str] = {
    "allreduce": "auto",
    "reducescatter": "ring-reduce-scatter",
    "allgather": "ring-all-gather",
    "broadcast": "chain-broadcast",
    "reduce": "chain-reduce",
}
"""The schedule for each collective, unless another is given."""


class Planner:
    """Called with (collective, size in bytes, dtype, reduction), the plan and its proof; the same at every rank.

    `schedules` names other schedules than those of `SCHEDULES`; `options` are those of the compiler (`slots`, `ports`).
    Proofs are kept in the user's cache. What it raises: InputError for a name that is none or of another collective,
    TopologyError if a schedule does not accept the topology, PlanError, with the counterexample, for a refuted plan.

    >>> plan, verdict = Planner(Topology.parse("4@1GB/s"))(Collective("broadcast", 4, root=2), 1024, "int32", "sum")
    >>> plan.name, plan.collective.root, verdict.verdict
    ('chain-broadcast', 2, 'proved')
    """

    def __init__(self, topology: Topology, *, schedules: Mapping[str, str] | None = None, **options: Any) -> None:
        self.topology = topology
        self._schedules = {**SCHEDULES, **(schedules or {})}
        self._options = options
        self._cache = VerdictCache(cache_directory(os.environ), VERSION)

    def __call__(self, collective: Collective, size_bytes: int, dtype: str, reduction: str) -> tuple[Plan, Verdict]:
        if collective.n_ranks != self.topology.n_ranks:
            raise InputError(f"topology of {self.topology.n_ranks} ranks: must have {collective.n_ranks}")
        plan = self._compile(self._schedules[collective.name], collective, size_bytes, dtype, reduction)
        if plan.collective != collective:
            raise InputError(f"schedule {plan.name}: {plan.collective.name}: must be for {collective.name}")
        verdict = self._cache.get(plan.digest)
        if verdict is None:
            verdict = verify_plan(plan)
            self._cache.put(verdict)
        if verdict.verdict != PROVED:
            raise PlanError(f"{plan.name}: {verdict.verdict}, so it does not run: {verdict.counterexample}")
        return plan, verdict

    def _compile(self, name: str, collective: Collective, size_bytes: int, dtype: str, reduction: str) -> Plan:
        topology, options = self.topology, self._options
        if collective.name not in ("broadcast", "reduce"):
            return build(name, topology, size_bytes, dtype=dtype, reduction=reduction, **options).plan
        definition = find_schedule(name)
        segments = choose_segments(definition, topology, size_bytes=size_bytes, dtype=dtype, **options)
        schedule = definition(collective.n_ranks, segments, root=collective.root, **definition.configure(topology))
        return compile_schedule(
            schedule, size_bytes=size_bytes, dtype=dtype, reduction=reduction, topology=topology, **options
        )
