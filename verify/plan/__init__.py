"""The plan verifier: properties 1 to 5 of a compiled plan; each is judged only if those before it hold.

1 matching   every send meets its receive          4 result     every contribution exactly once, everywhere
2 deadlock   no interleaving gets stuck            5 agreement  all ranks apply the same tree of reductions
3 races      conflicting accesses are ordered
"""

from __future__ import annotations

from optcc.arrays import Column
from optcc.plan import Plan
from optcc.verdict import PROPERTIES, PROVED, REFUTED, UNKNOWN, Counterexample, Verdict, sealed
from optcc.verify.plan.byte_partition import CutsUnknown
from optcc.verify.plan.deadlock import check_deadlock
from optcc.verify.plan.explanation import explain
from optcc.verify.plan.matching import check_matching
from optcc.verify.plan.plan_graph import PlanGraph, build_graph
from optcc.verify.plan.races import check_races
from optcc.verify.plan.semantics import check_result
from optcc.verify.plan.source_version import source_version

VERSION = source_version()
"""Of this verifier, in every verdict: a cached one by another version counts for nothing."""


def verify_plan(plan: Plan) -> Verdict:
    """The verdict on `plan`: a counterexample for the first property that fails; later ones stay unknown.

    It is bound to the digest of what the plan holds now, and sealed: a run-time takes it.

    >>> from optcc.compiler import compile_schedule
    >>> from optcc.schedules.ring import ring
    >>> verify_plan(compile_schedule(ring(n_ranks=3), size_bytes=100)).verdict
    'proved'
    """
    digest = plan.compute_digest()
    properties = dict.fromkeys(PROPERTIES, UNKNOWN)

    def refuted(counterexample: Counterexample) -> Verdict:
        judged = properties | {counterexample.property: REFUTED}
        return sealed(Verdict(digest, judged, counterexample, VERSION))

    unmatched = check_matching(plan)
    if unmatched is not None:
        return refuted(unmatched)
    properties["matching"] = PROVED
    graph = build_graph(plan)
    stuck, order = check_deadlock(plan, graph)
    if stuck is not None:
        return refuted(stuck)
    properties["deadlock"] = PROVED
    race = check_races(plan, graph, order)
    if race is not None:
        return refuted(race)
    return sealed(conclude(plan, digest, graph, order, properties | {"races": PROVED}))


def conclude(plan: Plan, digest: str, graph: PlanGraph, order: Column, properties: dict[str, str]) -> Verdict:
    """Judges result and agreement of a plan without deadlocks and races; `properties` are the verdicts so far."""
    try:
        found = check_result(plan, graph, order)
    except CutsUnknown:
        return Verdict(digest, properties, verifier=VERSION)
    if found is None or found.property == "agreement":
        properties = properties | {"result": PROVED}
    if found is None:
        return Verdict(digest, properties | {"agreement": PROVED}, verifier=VERSION)
    return Verdict(digest, properties | {found.property: REFUTED}, explain(plan, order, found), VERSION)
