"""`optcc fabric`: emulated multi-NIC hosts from the command line; `optcc.experiments.fabric` does the work."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import click

from optcc.cli import SecondsType
from optcc.errors import InputError
from optcc.experiments.fabric import (
    FAILURES,
    RUN_TIMEOUT_S,
    Fabric,
    FabricSpec,
    FabricState,
    FabricStatus,
    HostStatus,
    NicRates,
    NicState,
    NicTarget,
    fabrics,
)

_Command = Callable[..., None]


def _common(function: _Command) -> _Command:
    """The options that every subcommand has."""
    name = click.option("--name", default="default", show_default=True, help="Which fabric; several may stand.")
    as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    return name(as_json(function))


@click.group(name="fabric", short_help="The emulated multi-NIC hosts (network namespaces).")
def command() -> None:
    """Emulated multi-NIC hosts: network namespaces with shaped NICs on separate rails, and MPI across them.

    Needs Linux, root and iproute2; nftables for blackholes; Open MPI 5 for `run`.

    \b
    Example:
      optcc fabric up 4x2@200Mbit/s
      optcc fabric set h3 100Mbit/s
      optcc fabric run -- python allreduce.py
      optcc fabric down
    """


@command.command()
@click.argument("spec")
@click.option("--host", "overrides", multiple=True, metavar="HOST=RATE", help="Another rate for one host or NIC.")
@click.option("--replace", is_flag=True, help="Take down what stands under this name first.")
@_common
def up(spec: str, overrides: tuple[str, ...], replace: bool, name: str, as_json: bool) -> None:
    """Make the fabric SPEC: HOSTSxNICS@RATE, the rate one NIC's, each way; /Rranks: hosts of R ranks.

    Does nothing where the same fabric stands already, and builds it anew where it does not stand as declared.

    \b
    Example:
      optcc fabric up 4x2@200Mbit/s --host 3=100Mbit/s
      optcc fabric up 8@400Mbit/s,h2=100Mbit/s:400Mbit/s --name asymmetric
      optcc fabric up 4x2@200Mbit/s/2ranks+1Gbit/s --name servers
    """
    fabric = Fabric.up(FabricSpec.parse(spec, name=name, overrides=overrides), replace=replace)
    state = fabric.state()
    for note in fabric.notes:
        click.echo(note, err=True)
    if as_json:
        _print_json({**_state_record(state), "action": fabric.action, "notes": list(fabric.notes)})
    else:
        click.echo(f"fabric {name}: {state.spec.text} {fabric.action}")


@command.command(name="set")
@click.argument("target")
@click.argument("rate")
@_common
def set_command(target: str, rate: str, name: str, as_json: bool) -> None:
    """Give TARGET (h3: each of its NICs; h3.eth1: one) another RATE (or OUT:IN) while it runs.

    \b
    Example:
      optcc fabric set h3 100Mbit/s
      optcc fabric set h3.eth1 50Mbit/s:200Mbit/s
    """
    _changed(Fabric(name).set_rate(target, NicRates.parse(rate)), target, as_json)


@command.command()
@click.argument("target")
@click.option("--how", type=click.Choice(FAILURES), default="down", show_default=True, help="What happens to the NIC.")
@_common
def fail(target: str, how: str, name: str, as_json: bool) -> None:
    """Fail TARGET (h3: each of its NICs; h3.eth1: one).

    down: the host's interface. carrier: the cable, pulled at the far end. blackhole: every packet vanishes silently
    (-out: those that the host sends, -in: those that it should receive).

    \b
    Example:
      optcc fabric fail h3.eth1 --how blackhole
    """
    _changed(Fabric(name).fail(target, how), target, as_json)


@command.command()
@click.argument("target")
@_common
def heal(target: str, name: str, as_json: bool) -> None:
    """Bring TARGET (h3 or h3.eth1) back as first declared: link up, no packet dropped, original rate.

    \b
    Example:
      optcc fabric heal h3
    """
    _changed(Fabric(name).heal(target), target, as_json)


@command.command(context_settings={"allow_interspersed_args": False})
@click.option("-n", "n_ranks", type=int, metavar="P", help="Ranks, from h0 on; those of all hosts if left out.")
@click.option("--timeout", "timeout_s", type=SecondsType(), default=RUN_TIMEOUT_S, show_default=True, help="Seconds.")
@click.option("--mpi-arg", "mpi_args", multiple=True, metavar="ARG", help="One more argument for mpirun; repeatable.")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
@_common
def run(
    n_ranks: int | None,
    timeout_s: float,
    mpi_args: tuple[str, ...],
    argv: tuple[str, ...],
    name: str,
    as_json: bool,
) -> None:
    """Run COMMAND under Open MPI's mpirun across the hosts, as many ranks a host as SPEC says, over the shaped NICs.

    The ranks get OPTCC_TOPOLOGY, the hosts as they are now. Exits with the command's exit code. With --json the
    command's output is in the object.

    \b
    Example:
      optcc fabric run -n 4 -- python -c "from mpi4py import MPI; print(MPI.COMM_WORLD.rank)"
      optcc fabric run --mpi-arg=--mca --mpi-arg=btl_tcp_links --mpi-arg=2 -- optcc bench
    """
    result = Fabric(name).run(argv, n_ranks=n_ranks, timeout_s=timeout_s, mpi_args=mpi_args, capture=as_json)
    if as_json:
        record = {"exit_code": result.exit_code, "seconds": result.seconds}
        _print_json({**record, "stdout": result.stdout, "stderr": result.stderr})
    if result.exit_code != 0:
        raise SystemExit(result.exit_code)


@command.command()
@_common
def status(name: str, as_json: bool) -> None:
    """Show hosts and NICs: declared rates, state, bytes sent and received as the hosts count them.

    Also what is not as declared, and namespaces that a killed run left over.

    \b
    Example:
      optcc fabric status --json
    """
    found = Fabric(name).status()
    for line in (*found.warnings, *_complaints(found)):
        click.echo(line, err=True)
    if as_json:
        _print_json(_status_record(found))
        return
    if found.phase == "absent":
        click.echo(f"fabric {name}: not up")
        return
    topology = found.topology or "none, a host has no NIC left"
    click.echo(f"fabric {name}: {found.spec} {found.phase}, topology {topology}")
    rows = [("NIC", "ADDRESS", "DECLARED", "NOW", "STATE", "SENT", "RECEIVED")]
    for host in found.hosts:
        for nic in host.nics:
            counters = (str(nic.tx_bytes), str(nic.rx_bytes))
            rates = (nic.declared.text, nic.rates.text)
            rows.append((f"{host.name}.{nic.name}", nic.address, *rates, nic.state, *counters))
        control = (str(host.control_tx_bytes), str(host.control_rx_bytes))
        rows.append((f"{host.name}.ctl", host.control_address, "-", "-", "control", *control))
    for line in _columns(rows):
        click.echo(line)


@command.command()
@click.option("--all", "everything", is_flag=True, help="Every fabric of this machine.")
@_common
def down(everything: bool, name: str, as_json: bool) -> None:
    """Take the fabric down, whole or what a killed run left of it, with the processes inside it.

    \b
    Example:
      optcc fabric down
      optcc fabric down --all
    """
    removed: dict[str, list[str]] = {}
    for one in fabrics() if everything else (Fabric(name).name,):
        removed[one] = list(Fabric(one).down())
    if as_json:
        _print_json({"removed": removed})
        return
    for one, things in removed.items():
        click.echo(f"fabric {one}: {'down' if things else 'nothing to do'}")
    if not removed:
        click.echo("no fabric: nothing to do")


# ---- what is printed


def _print_json(record: dict[str, Any]) -> None:
    click.echo(json.dumps(record, ensure_ascii=False))


def _changed(state: FabricState, target: str, as_json: bool) -> None:
    """Says what a NIC or a host is like after a change."""
    if as_json:
        _print_json(_state_record(state))
        return
    for host, nic in NicTarget.parse(target).nics_of(state.spec):
        now = state.nics[host][nic]
        click.echo(f"{NicTarget(host, nic).text}: {now.rates.text} {now.failure or 'up'}")


def _complaints(found: FabricStatus) -> list[str]:
    """What is wrong with a fabric, a line each."""
    lines = [f"not as declared: {difference}" for difference in found.differences]
    if found.phase == "building":
        lines.insert(0, f"process {found.pid} was killed while it built fabric {found.name}: down, or up again")
    if found.leftovers:
        lines.append(f"left over from a killed run: {', '.join(found.leftovers)} (optcc fabric down --all)")
    return lines


def _rates_record(rates: NicRates) -> dict[str, int]:
    return {"out_bits_per_s": rates.bits_out, "in_bits_per_s": rates.bits_in}


def _state_record(state: FabricState) -> dict[str, Any]:
    """What is declared, as JSON; `topology` is null where a host has no NIC left."""
    try:
        topology = state.topology_text()
    except InputError:
        topology = None
    hosts = [
        {"name": f"h{host}", "nics": [_nic_record(nic, now) for nic, now in enumerate(row)]}
        for host, row in enumerate(state.nics)
    ]
    return {"name": state.spec.name, "spec": state.spec.text, "topology": topology, "hosts": hosts}


def _nic_record(nic: int, now: NicState) -> dict[str, Any]:
    return {"name": f"eth{nic}", **_rates_record(now.rates), "failure": now.failure}


def _status_record(found: FabricStatus) -> dict[str, Any]:
    return {
        "name": found.name,
        "phase": found.phase,
        "pid": found.pid,
        "spec": found.spec,
        "topology": found.topology,
        "hosts": [_host_record(host) for host in found.hosts],
        "differences": list(found.differences),
        "leftovers": list(found.leftovers),
        "warnings": list(found.warnings),
    }


def _host_record(host: HostStatus) -> dict[str, Any]:
    nics = [
        {
            "name": nic.name,
            "address": nic.address,
            "declared": _rates_record(nic.declared),
            **_rates_record(nic.rates),
            "failure": nic.failure,
            "state": nic.state,
            "tx_bytes": nic.tx_bytes,
            "rx_bytes": nic.rx_bytes,
        }
        for nic in host.nics
    ]
    control = {"address": host.control_address, "tx_bytes": host.control_tx_bytes, "rx_bytes": host.control_rx_bytes}
    return {"name": host.name, "namespace": host.namespace, "control": control, "nics": nics}


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with their columns aligned, numbers at the right.

    >>> _columns([("NIC", "SENT"), ("h0.eth0", "7")])
    ['NIC      SENT', 'h0.eth0     7']
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if all(row[column].isdigit() for row in rows[1:]) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in rows
    ]
