"""All questions about one plan, and their answers; each is judged only if those before it hold."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from optcc.errors import InputError
from optcc.plan import Plan
from optcc.schedule import Schedule
from optcc.timing import Model
from optcc.topology import Topology
from optcc.verdict import PROVED, Verdict, sealed
from optcc.verify.plan import verify_plan
from optcc.verify.plan.limits import READERS, check_limits
from optcc.verify.plan.timing import Makespan, check_timing, describe_conditions
from optcc.verify.plan.translation import check_translation


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions beyond properties 1 to 5.

    `schedule`: is the plan a translation of it. `topology` with `within` or `promise_s`: is its time on the topology,
    with ports of `model`, at most `within` times the bound, or at most `promise_s` seconds. `target`: does it fit the
    limits of that run-time or format (`optcc.verify.plan.limits.TARGETS`).
    """

    schedule: Schedule | None = None
    topology: Topology | None = None
    model: Model = "exclusive"
    within: Fraction | None = None
    promise_s: Fraction | None = None
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict, and the makespan if a claim about it was judged (exact except for fair ports)."""

    verdict: Verdict
    makespan: Makespan | None = None


def judge(plan: Plan, questions: Questions) -> Report:
    """Judges all `questions`; those after a failed one are unknown.

    Raises InputError for a target that is not known or a claim about time without a topology, and what `check_timing`
    raises for a topology.
    """
    verdict = verify_plan(plan)
    sound = verdict.verdict == PROVED
    if questions.schedule is not None:
        verdict = verdict.and_also("translation", check_translation(questions.schedule, plan) if sound else None)
    makespan = None
    if questions.within is not None or questions.promise_s is not None:
        if questions.topology is None:
            raise InputError("a claim about time: needs a topology")
        slow = None
        if sound:
            slow, makespan = check_timing(
                plan,
                questions.topology,
                model=questions.model,
                within=questions.within,
                promise_s=questions.promise_s,
            )
        under = "" if makespan is None else describe_conditions(plan, questions.topology, makespan)
        verdict = verdict.and_also("timing", slow, under)
    if questions.target is not None:
        found = check_limits(plan, questions.target)
        verdict = verdict.and_also("limits", found, f"{questions.target}: {READERS[questions.target]}")
    return Report(sealed(verdict), makespan)
