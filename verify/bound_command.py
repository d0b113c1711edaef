"""`optcc bound`."""

from __future__ import annotations

import click

from optcc.cli import SizeType, TopologyType, echo_card, echo_json, json_option
from optcc.topology import Topology
from optcc.verify.bounds import allreduce_bound
from optcc.verify.certificate import certify


@click.command("bound", epilog="Example: optcc bound 4@50MB/s,3=25MB/s --size 64MiB")
@click.argument("topology", type=TopologyType())
@click.option("--size", type=SizeType(), required=True, help="Bytes of the message, such as 64MiB.")
@json_option
def command(topology: Topology, size: int, as_json: bool) -> None:
    """The least time that any AllReduce of this size can take on TOPOLOGY, and the ports that decide it."""
    bound = allreduce_bound(topology, size)
    certificate = certify(bound, topology)
    if not as_json:
        echo_card(bound)
        click.echo(f"exactly {bound.seconds} s; certificate replayed")
        return
    echo_json(
        {
            "seconds": float(bound.seconds),
            "seconds_exact": str(bound.seconds.numerator) + "/" + str(bound.seconds.denominator),
            "binding": list(bound.binding),
            "certificate": certificate.as_json(),
        }
    )
