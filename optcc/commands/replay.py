"""`optcc replay`."""

from __future__ import annotations

from pathlib import Path

import click

from optcc.cli import TopologyType, echo_card, echo_json, json_option
from optcc.files import read_file
from optcc.topology import Topology
from optcc.verify.bounds.certificate_file import FILE_BYTES_MAX, read_either
from optcc.verify.bounds.exchange import ExchangeCertificate
from optcc.verify.bounds.exchange_replay import replay_exchange
from optcc.verify.bounds.replay import replay


@click.command("replay", epilog="Example: optcc replay bound.json --topology 4@50MB/s,3=25MB/s")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--topology", type=TopologyType(), default=None, help="Also check that it is about this topology.")
@json_option
def command(file: Path, topology: Topology | None, as_json: bool) -> None:
    """Check the certificate in FILE in exact arithmetic, without any solver."""
    certificate = read_either(read_file(file, FILE_BYTES_MAX))
    if isinstance(certificate, ExchangeCertificate):
        replay_exchange(certificate, topology)
    else:
        replay(certificate, topology)
    achieved, gap = certificate.reached(), certificate.gap
    if as_json:
        echo_json(
            {
                "verdict": "proved",
                "collective": certificate.collective,
                "size_bytes": certificate.size_bytes,
                "seconds": float(certificate.seconds),
                "seconds_exact": f"{certificate.seconds.numerator}/{certificate.seconds.denominator}",
                "achieved_exact": None
                if achieved is None
                else f"{achieved.seconds.numerator}/{achieved.seconds.denominator}",
                "gap": None if gap is None else f"{gap.numerator}/{gap.denominator}",
                "binding": list(certificate.binding),
                "digest": certificate.digest,
            }
        )
        return
    echo_card(certificate)
    said = "nothing is claimed to be achieved" if gap is None else f"gap {gap}"
    click.echo(f"proved: at least {certificate.seconds} s exactly; {said}")
