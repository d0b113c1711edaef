"""What the kernel says of a fabric, and where that is not what is declared."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from optcc.errors import RuntimeFault
from optcc.experiments.fabric.programs import call, program_path, which
from optcc.experiments.fabric.scripts import core_port, inside_port
from optcc.experiments.fabric.spec import NicRates, NicTarget, core_namespace, host_namespace
from optcc.experiments.fabric.state import FabricState

NAMESPACE_DIRECTORY: Final = Path("/run/netns")


@dataclass(frozen=True)
class NicStatus:
    """One NIC: declared and current rates, how it was failed, what the kernel says, bytes since it was made.

    `state` is "up", "down", "no-carrier", "blackhole" or "missing".
    """

    name: str
    address: str
    declared: NicRates
    rates: NicRates
    failure: str | None
    state: str
    tx_bytes: int
    rx_bytes: int


@dataclass(frozen=True)
class HostStatus:
    """One host with its NICs, and what went over its control interface."""

    name: str
    namespace: str
    control_address: str
    control_tx_bytes: int
    control_rx_bytes: int
    nics: tuple[NicStatus, ...]


@dataclass(frozen=True)
class FabricStatus:
    """A fabric as it is: `phase` "absent", "building" (its maker was killed) or "up".

    `differences` says where the kernel is not as declared; `leftovers` are namespaces in our style that no state file
    of any fabric declares; `topology` is None where a host has no NIC left.
    """

    name: str
    phase: str
    pid: int | None
    spec: str | None
    topology: str | None
    hosts: tuple[HostStatus, ...]
    differences: tuple[str, ...]
    leftovers: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class LinkStatus:
    """An interface as the kernel shows it."""

    admin_up: bool
    carrier: bool
    master: str | None
    tx_bytes: int
    rx_bytes: int
    rate_bytes_per_s: int | None


def all_namespaces() -> tuple[str, ...]:
    """All named network namespaces of the machine."""
    try:
        return tuple(sorted(entry.name for entry in NAMESPACE_DIRECTORY.iterdir()))
    except FileNotFoundError:
        return ()


def observe(namespace: str) -> dict[str, LinkStatus]:
    """The interfaces in a namespace with their shapers; empty if it is no namespace."""
    try:
        links = json.loads(call(["ip", "-n", namespace, "-j", "-s", "link", "show"]) or "[]")
        shapers = json.loads(call(["tc", "-n", namespace, "-j", "qdisc", "show"]) or "[]")
    except RuntimeFault:
        return {}
    rates = {item["dev"]: int(item["options"]["rate"]) for item in shapers if item.get("kind") == "tbf"}
    return {
        link["ifname"]: LinkStatus(
            admin_up="UP" in link["flags"],
            carrier="LOWER_UP" in link["flags"],
            master=link.get("master"),
            tx_bytes=link["stats64"]["tx"]["bytes"],
            rx_bytes=link["stats64"]["rx"]["bytes"],
            rate_bytes_per_s=rates.get(link["ifname"]),
        )
        for link in links
    }


def blackholes(name: str) -> frozenset[str]:
    """The ports of a fabric that have nft rules of ours."""
    if which("nft") is None:
        return frozenset()
    try:
        tables = call(["ip", "netns", "exec", core_namespace(name), program_path("nft", "nftables"), "list", "tables"])
    except RuntimeFault:
        return frozenset()
    return frozenset(re.findall(r"^table netdev optcc_(h\d+e\d+)$", tables, re.MULTILINE))


def condition(link: LinkStatus | None, dropped: bool) -> str:
    """What the kernel says of a NIC, in a word."""
    if link is None:
        return "missing"
    if not link.admin_up:
        return "down"
    if not link.carrier:
        return "no-carrier"
    return "blackhole" if dropped else "up"


def differences_of(
    state: FabricState, seen: Mapping[str, Mapping[str, LinkStatus]], holes: frozenset[str]
) -> tuple[str, ...]:
    """Where the kernel is not as declared, one phrase each."""
    name = state.spec.name
    found = [f"namespace {namespace} is missing" for namespace, links in seen.items() if not links]
    if found:
        return tuple(found)
    core = seen[core_namespace(name)]
    for host, row in enumerate(state.nics):
        links = seen[host_namespace(name, host)]
        control = links.get("ctl")
        if control is None or not control.carrier or _master(core, f"h{host}c") != "ctl":
            found.append(f"h{host}.ctl is not connected")
        if state.spec.inside is not None:
            for rank in range(state.spec.ranks):
                ends = links.get(f"in{rank}"), core.get(inside_port(host, rank))
                rates = [int(state.spec.inside.rate_out)] * 2
                if [None if end is None else end.rate_bytes_per_s for end in ends] != rates:
                    found.append(f"h{host}.in{rank} is not shaped to {state.spec.inside.text}")
        for nic, now in enumerate(row):
            where, port = NicTarget(host, nic).text, core_port(host, nic)
            near, far = links.get(f"eth{nic}"), core.get(port)
            if near is None or far is None or far.master != f"rail{nic}":
                found.append(f"{where} is not on rail {nic}")
                continue
            if near.rate_bytes_per_s != int(now.rates.rate_out) or far.rate_bytes_per_s != int(now.rates.rate_in):
                found.append(f"{where} is not shaped to {now.rates.text}")
            if near.admin_up != (now.failure != "down") or far.admin_up != (now.failure != "carrier"):
                found.append(f"{where} is {condition(near, False)}")
            if (port in holes) != (now.failure or "").startswith("blackhole"):
                found.append(f"{where} drops {'packets' if port in holes else 'nothing'}")
    return tuple(found)


def _master(links: Mapping[str, LinkStatus], interface: str) -> str | None:
    link = links.get(interface)
    return link.master if link else None
