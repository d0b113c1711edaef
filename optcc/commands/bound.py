"""`optcc bound`."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import click

from optcc.cli import SecondsType, SizeType, TopologyType, echo_card, echo_json, json_option
from optcc.collective import COLLECTIVES, Collective
from optcc.errors import InputError, SolverError, SolverUnknown, TopologyError
from optcc.files import replace_file
from optcc.topology import Topology
from optcc.verify.bounds.certificate import Certificate
from optcc.verify.bounds.closed_form_certificates import certify
from optcc.verify.bounds.closed_forms import FABRIC, collective_bound, require_pooled
from optcc.verify.bounds.explain import Explanation, exact, explain
from optcc.verify.bounds.lp import BoundUnknown, lp_bound
from optcc.verify.bounds.packing import pack
from optcc.verify.bounds.solvers import DEFAULT_SOLVER, SOLVERS, MakeSolver


@click.command("bound", epilog="Example: optcc bound 4@50MB/s,3=25MB/s --size 64MiB")
@click.argument("topology", type=TopologyType())
@click.option("--size", type=SizeType(), required=True, help="Bytes of the whole buffer, such as 64MiB.")
@click.option("--collective", default="allreduce", show_default=True, help=f"{', '.join(COLLECTIVES)}.")
@click.option("--root", default=0, show_default=True, help="The rank, for broadcast and reduce.")
@click.option("--segments", type=click.IntRange(1), help="Also predict OptCC with that many.")
@click.option("--achievable", is_flag=True, help="Also certify a packing of trees that reaches the bound.")
@click.option("--certificate", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write it to this file.")
@click.option("--solver", "solver_name", help=f"Cross-check by the linear program, solved by {' or '.join(SOLVERS)}.")
@click.option(
    "--time-limit",
    type=SecondsType(),
    default=60.0,
    show_default=True,
    help="Seconds for the linear program, if one is needed.",
)
@json_option
def command(
    topology: Topology,
    size: int,
    collective: str,
    root: int,
    segments: int | None,
    achievable: bool,
    file: Path | None,
    solver_name: str | None,
    time_limit: float,
    as_json: bool,
) -> None:
    """The least time that any schedule can take on TOPOLOGY, why, and what would help.

    Closed forms where there are some, else a linear program over cuts (servers that talk rail by rail and lost
    different rails). Every bound comes with a certificate that is replayed in exact arithmetic before anything is
    printed; `optcc replay` checks it again. With --solver the linear program is solved even where there is a closed
    form, and its certificate must support that bound.
    """
    if solver_name is not None and solver_name not in SOLVERS:
        raise InputError(f"--solver {solver_name!r}: must be one of {', '.join(SOLVERS)}")
    wanted = Collective(collective, topology.n_ranks, root)
    told = _explanation(topology, size, wanted, segments)
    certificate, solved_by = _certified(told, topology, size, wanted, solver_name, time_limit, achievable)
    if achievable:
        certificate = _with_trees(certificate, SOLVERS[solved_by or DEFAULT_SOLVER])
    if file is not None:
        replace_file(file, certificate.to_bytes())
    if as_json:
        echo_json(_as_json(certificate, told, solved_by))
        return
    if told is None:
        echo_card(certificate)
    else:
        echo_card(told.bound)
        click.echo("")
        click.echo("\n".join(told.words))
        for card in (told.gain_card(), told):
            click.echo("")
            echo_card(card)
    by = "" if solver_name is None else f" (linear program solved by {solver_name})"
    click.echo(f"exactly {certificate.seconds} s{by}; certificate replayed{_achieved(certificate)}")


def _explanation(topology: Topology, size: int, wanted: Collective, segments: int | None) -> Explanation | None:
    """What the closed forms have to say; None where servers cannot be treated as pooled endpoints."""
    collective_bound(topology.healthy(), size, wanted.name, wanted.root)  # complains about the size, not the rails
    try:
        require_pooled(topology)
    except TopologyError:
        return None
    return explain(topology, size, wanted.name, wanted.root, segments=segments)


def _certified(
    told: Explanation | None,
    topology: Topology,
    size: int,
    wanted: Collective,
    solver_name: str | None,
    time_limit_s: float,
    achievable: bool,
) -> tuple[Certificate, str | None]:
    """The certified bound, and which solver solved a linear program for it, if one did.

    The closed form has a certificate of its own, except where fabrics decide. A linear program must not certify less
    than the closed form proves.
    """
    if told is not None and not achievable and solver_name is None:
        with suppress(SolverError):
            return certify(told.bound, topology, wanted.root), None
    name = solver_name or DEFAULT_SOLVER
    fabric = told is not None and told.bound.model.startswith(FABRIC)
    try:
        certificate = lp_bound(
            topology,
            wanted,
            size,
            time_limit_s=time_limit_s,
            primal=achievable or told is None,
            fabric=fabric,
            solver=SOLVERS[name],
        ).certificate
    except BoundUnknown as unknown:
        click.echo(f"best certified bound so far: {unknown.best.seconds} s", err=True)
        raise
    if told is not None and (solver_name or not achievable) and certificate.seconds < told.bound.seconds:
        raise SolverError(
            f"linear program: {name} and its certificate say {certificate.seconds} s: "
            f"must not be less than the closed form, {told.bound.seconds} s"
        )
    return certificate, name


def _with_trees(certificate: Certificate, solver: MakeSolver) -> Certificate:
    """The certificate with every tree of its packing, where they can be listed; else with the loads alone."""
    try:
        return pack(certificate, solver=solver)
    except SolverUnknown:
        return certificate


def _as_json(certificate: Certificate, told: Explanation | None, solved_by: str | None) -> dict[str, object]:
    achieved = None if certificate.achieved is None else certificate.achieved.seconds
    return {
        "seconds": float(certificate.seconds),
        "seconds_exact": _ratio(certificate.seconds),
        "binding": list(certificate.binding if told is None else told.bound.binding),
        "achievable_exact": None if achieved is None else _ratio(achieved),
        "gap": None if certificate.gap is None else exact(certificate.gap),
        "solver": solved_by,
        "certificate": certificate.as_json(),
        "explanation": None if told is None else told.as_json(),
    }


def _ratio(number: Fraction) -> str:
    """Always "a/b", also for a whole number."""
    return f"{number.numerator}/{number.denominator}"


def _achieved(certificate: Certificate) -> str:
    """What is known of reaching the bound."""
    if certificate.achieved is None or certificate.gap is None:
        return ""
    return (
        "; reached by a packing of trees" if certificate.gap == 0 else f"; a packing of trees has gap {certificate.gap}"
    )
