"""`optcc bound`."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import click

from optcc.cli import CollectiveType, OneOf, SecondsType, SizeType, TopologyType, echo_card, echo_json, json_option
from optcc.collective import COLLECTIVES, PERSONALISED, ROOTED, Collective
from optcc.files import replace_file
from optcc.topology import Topology
from optcc.verify.bounds.certificate import Certificate
from optcc.verify.bounds.certified import certified_bound, certified_exchange, explain_if_pooled
from optcc.verify.bounds.exchange_bound import ExchangeUnknown
from optcc.verify.bounds.explain import Explanation, exact
from optcc.verify.bounds.lp import BoundUnknown
from optcc.verify.bounds.priced import Priced
from optcc.verify.bounds.solvers import SOLVERS

_NAMES = f"{', '.join(COLLECTIVES)}; the message of an alltoall is that of all ranks together."


@click.command("bound", epilog="Example: optcc bound 4@50MB/s,3=25MB/s --size 64MiB")
@click.argument("topology", type=TopologyType())
@click.option("--size", type=SizeType(), required=True, help="Bytes of the whole message, such as 64MiB.")
@click.option("--collective", type=CollectiveType(), default="allreduce", show_default=True, help=_NAMES)
@click.option("--root", default=0, show_default=True, help=f"The rank, for {', '.join(ROOTED)}.")
@click.option("--segments", type=click.IntRange(1), help="Also predict OptCC with that many.")
@click.option("--achievable", is_flag=True, help="Also certify a packing of trees that reaches the bound.")
@click.option("--certificate", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write it to this file.")
@click.option(
    "--solver",
    "solver_name",
    type=OneOf(SOLVERS),
    help=f"Cross-check by the linear program, solved by {' or '.join(SOLVERS)}.",
)
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

    Closed forms where there are some, else a linear program: over cuts (servers that talk rail by rail and lost
    different rails; fabrics behind uplinks of pods), over flows for an alltoall, a gather or a scatter. Every bound
    comes with a certificate that is replayed in exact arithmetic before anything is printed; `optcc replay` checks it
    again. With --solver the linear program is solved even where there is a closed form, and its certificate must
    support that bound.
    """
    wanted = Collective(collective, topology.n_ranks, root)
    if collective in PERSONALISED:
        _tell_exchange(topology, size, wanted, solver_name, time_limit, file, as_json)
        return
    told = explain_if_pooled(topology, size, wanted, segments)
    try:
        certificate, solved_by = certified_bound(
            topology, size, wanted, told, solver_name=solver_name, time_limit_s=time_limit, achievable=achievable
        )
    except BoundUnknown as unknown:
        click.echo(f"best certified bound so far: {unknown.best.seconds} s", err=True)
        raise
    if told is not None and certificate.seconds > told.bound.seconds:
        told = None  # it explains less than the linear program proves
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


def _tell_exchange(
    topology: Topology,
    size: int,
    wanted: Collective,
    solver_name: str | None,
    time_limit: float,
    file: Path | None,
    as_json: bool,
) -> None:
    """Prints the bound of an AllToAll, a Gather or a Scatter; what is achieved is in the certificate in any case."""
    try:
        certificate, told, solved_by = certified_exchange(
            topology, size, wanted, solver_name=solver_name, time_limit_s=time_limit
        )
    except ExchangeUnknown as unknown:
        click.echo(f"best certified bound so far: {unknown.best.seconds} s", err=True)
        raise
    if file is not None:
        replace_file(file, certificate.to_bytes())
    if as_json:
        binding = certificate.binding if told is None else told.binding
        echo_json(_certified_json(certificate, binding, solved_by, None))
        return
    echo_card(certificate if told is None else told)
    by = "" if solver_name is None else f" (linear program solved by {solver_name})"
    click.echo(f"exactly {certificate.seconds} s{by}; certificate replayed{_achieved(certificate, 'flow')}")


def _as_json(certificate: Certificate, told: Explanation | None, solved_by: str | None) -> dict[str, object]:
    binding = certificate.binding if told is None else told.bound.binding
    return _certified_json(certificate, binding, solved_by, None if told is None else told.as_json())


def _certified_json(
    certificate: Priced, binding: tuple[str, ...], solved_by: str | None, explanation: dict[str, object] | None
) -> dict[str, object]:
    reached = certificate.reached()
    return {
        "seconds": float(certificate.seconds),
        "seconds_exact": _ratio(certificate.seconds),
        "binding": list(binding),
        "achievable_exact": None if reached is None else _ratio(reached.seconds),
        "gap": None if certificate.gap is None else exact(certificate.gap),
        "solver": solved_by,
        "certificate": certificate.as_json(),
        "explanation": explanation,
    }


def _ratio(number: Fraction) -> str:
    """Always "a/b", also for a whole number."""
    return f"{number.numerator}/{number.denominator}"


def _achieved(certificate: Priced, what: str = "packing of trees") -> str:
    """What is known of reaching the bound, by a `what`."""
    if certificate.gap is None:
        return ""
    return f"; reached by a {what}" if certificate.gap == 0 else f"; a {what} has gap {certificate.gap}"
