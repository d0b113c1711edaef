"""`mpirun -n P optcc probe`, or under another launcher."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import click

from optcc.cli import echo_card, echo_json, json_option
from optcc.commands.launched import tcp_of_job
from optcc.errors import InputError
from optcc.files import replace_file
from optcc.job import is_one_host
from optcc.runtime.probe import MeasuredNics, probe
from optcc.show import Card
from optcc.topology import Topology
from optcc.units import show_rate

_NAME_BYTES = 64


@click.command("probe", epilog="Example: mpirun -n 4 optcc probe -o cluster.toml")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write a topology file there.")
@json_option
def command(output: Path | None, as_json: bool) -> None:
    """Measure what every NIC of every host sends and receives, and write it as a topology file.

    One process a rank under mpirun, torchrun or srun, over TCP and the NICs that OPTCC_SOCKET_IFNAME leaves; about a
    second for hosts of 400 Mbit/s. Rates are of payload: headers are paid already. The file is for --topology of every
    other command.
    """
    with tcp_of_job(os.environ) as transport:
        if is_one_host(transport):
            raise InputError("probe: all ranks are on one host: must be on two or more, as NICs join hosts")
        started = time.monotonic()
        measured = probe(transport)
        seconds = time.monotonic() - started
        hosts = [each.rstrip(b"\0").decode("utf-8", "replace") for each in transport.allgather(_host_name())]
    if transport.rank == 0:
        topology = measured.topology(_names(hosts, measured))
        if output is not None:
            replace_file(output, topology.to_toml().encode())
        if as_json:
            echo_json(_json(topology, measured, seconds))
        else:
            echo_card(_card(topology, measured, seconds))


def _host_name() -> bytes:
    return socket.gethostname().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")


def _names(hosts: list[str], measured: MeasuredNics) -> list[str]:
    """The host names, or numbers where two hosts have the same one."""
    names = [hosts[rank] for rank in measured.firsts]
    return names if len(set(names)) == len(names) else []


def _json(topology: Topology, measured: MeasuredNics, seconds: float) -> dict[str, object]:
    return {
        "hosts": [
            {
                "name": server.name,
                "ranks": server.gpus,
                "nics": [
                    {
                        "name": name,
                        "rail": nic.rail,
                        "out_bytes_per_s": 0 if nic.failed else int(nic.out),
                        "in_bytes_per_s": 0 if nic.failed else int(nic.in_),
                    }
                    for name, nic in zip(measured.names[rank], server.nics, strict=True)
                ],
            }
            for server, rank in zip(topology.servers, measured.firsts, strict=True)
        ],
        "topology": topology.to_toml(),
        "seconds": seconds,
    }


def _card(topology: Topology, measured: MeasuredNics, seconds: float) -> Card:
    rows = tuple(
        (server.name, name, *(("-", "-") if nic.failed else (show_rate(nic.out), show_rate(nic.in_))))
        for server, rank in zip(topology.servers, measured.firsts, strict=True)
        for name, nic in zip(measured.names[rank], server.nics, strict=True)
    )
    title = f"measured in {seconds:.2f} s: {len(topology.servers)} hosts, {topology.n_ranks} ranks"
    return Card(title, ("host", "NIC", "out", "in"), rows)
