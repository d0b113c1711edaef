"""What commands say of a plan whose numbers they show: whether it is right."""

from __future__ import annotations

import click

from optcc.plan import Plan
from optcc.planner import look_up, verdict_cache
from optcc.verdict import PROVED


def say_unless_proved(plan: Plan, what: str) -> str:
    """The verdict on `plan`; a line on stderr says so if it is not proved, since then `what` is of a plan that never
    runs."""
    verdict = look_up(plan, verdict_cache())
    if verdict.verdict != PROVED:
        wrong = "" if verdict.counterexample is None else f": {verdict.counterexample.property}: "
        cause = "" if verdict.counterexample is None else verdict.counterexample.summary
        click.echo(f"optcc: {plan.name}: {verdict.verdict}, so it does not run; {what}{wrong}{cause}", err=True)
    return verdict.verdict
