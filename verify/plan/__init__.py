"""The plan verifier: properties 1 to 5 of a compiled plan; each is judged only if those before it hold.

1 matching   every send meets its receive          4 result     every contribution exactly once, everywhere
2 deadlock   no interleaving gets stuck            5 agreement  all ranks apply the same tree of reductions
3 races      conflicting accesses are ordered
"""

from __future__ import annotations

from optcc.arrays import Column
from optcc.plan import Plan
from optcc.verdict import PROPERTIES, PROVED, REFUTED, UNKNOWN, Counterexample, Verdict
from optcc.verify.plan.byte_partition import CutsUnknown
from optcc.verify.plan.deadlock import check_deadlock
from optcc.verify.plan.matching import check_matching
from optcc.verify.plan.plan_graph import PlanGraph, build_graph
from optcc.verify.plan.races import check_races
from optcc.verify.plan.semantics import check_result

VERSION = "3"
"""Part of the key of cached verdicts: increment it with every change that could alter a verdict."""


def verify_plan(plan: Plan) -> Verdict:
    """The verdict on `plan`: a counterexample for the first property that fails; later ones stay unknown.

    >>> from optcc.compiler import compile_schedule
    >>> from optcc.schedules.ring import ring
    >>> verify_plan(compile_schedule(ring(n_ranks=3), size_bytes=100)).verdict
    'proved'
    """
    properties = dict.fromkeys(PROPERTIES, UNKNOWN)

    def refuted(counterexample: Counterexample) -> Verdict:
        return Verdict(plan.digest, properties | {counterexample.property: REFUTED}, counterexample)

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
    return conclude(plan, graph, order, properties | {"races": PROVED})


def conclude(plan: Plan, graph: PlanGraph, order: Column, properties: dict[str, str]) -> Verdict:
    """Judges result and agreement of a plan without deadlocks and races; `properties` are the verdicts so far."""
    try:
        wrong, disagreement = check_result(plan, graph, order)
    except CutsUnknown:
        return Verdict(plan.digest, properties)
    if wrong is not None:
        return Verdict(plan.digest, properties | {"result": REFUTED}, wrong)
    if disagreement is not None:
        return Verdict(plan.digest, properties | {"result": PROVED, "agreement": REFUTED}, disagreement)
    return Verdict(plan.digest, properties | {"result": PROVED, "agreement": PROVED})
