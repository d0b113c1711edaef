"""What commands say of a plan whose numbers they show: whether it is right, and why `auto` took its schedule."""

from __future__ import annotations

import click

from optcc.cli import echo_card
from optcc.collective import ROOTED, Collective
from optcc.errors import EXIT_DONE, EXIT_REFUTED, InputError
from optcc.plan import Plan
from optcc.planner import AUTO, Built, look_up, verdict_cache
from optcc.topology import Topology
from optcc.verdict import PROVED, REFUTED


def say_unless_proved(plan: Plan, what: str) -> str:
    """The verdict on `plan`; a line on stderr says so if it is not proved, since then `what` is of a plan that never
    runs."""
    verdict = look_up(plan, verdict_cache())
    if verdict.verdict != PROVED:
        wrong = "" if verdict.counterexample is None else f": {verdict.counterexample.property}: "
        cause = "" if verdict.counterexample is None else verdict.counterexample.summary
        click.echo(f"optcc: {plan.name}: {verdict.verdict}, so it does not run; {what}{wrong}{cause}", err=True)
    return verdict.verdict


def exit_code(verdict: str) -> int:
    """That of a command which has shown numbers of what has this verdict."""
    return EXIT_REFUTED if verdict == REFUTED else EXIT_DONE


def wanted_collective(
    name: str | None, collective: str | None, root: int | None, topology: Topology | None
) -> Collective | None:
    """What `auto` is to choose a schedule for: None for what it takes by itself, an AllReduce.

    Raises InputError with another schedule, which has a collective of its own, and for a root that cannot be.
    """
    if collective is None and root is None:
        return None
    if name != AUTO:
        given = "--root" if collective is None else f"--collective {collective}"
        raise InputError(
            f"{given} with {name or 'a plan'}: must be the schedule {AUTO}, others have a collective of their own"
        )
    if root is not None and collective not in ROOTED:
        raise InputError(f"--root {root}: needs --collective {', '.join(ROOTED[:-1])} or {ROOTED[-1]}")
    # Without a topology the command itself says that it is missing.
    return None if collective is None or topology is None else Collective(collective, topology.n_ranks, root or 0)


def say_certificate(certificate: str | None) -> None:
    """Prints what in a bound's certificate a schedule is made from, if it is."""
    if certificate is not None:
        click.echo(
            f"made from the {certificate} in the certificate of its bound: optcc bound --achievable --certificate FILE"
        )


def check_explain(explain: bool, name: str | None, as_json: bool) -> None:
    """Raises InputError if `--explain` is given where nothing is chosen, or beside `--json`."""
    if explain and (name != AUTO or as_json):
        raise InputError(f"--explain with {name or 'a plan'}: must be the schedule {AUTO}, without --json")


def explain_choice(built: Built) -> None:
    """Prints what `auto` chose the schedule from."""
    told = built.choice or built.compared
    assert told is not None
    echo_card(told)
