"""The NICs of a host: which of them a run would use, and at which rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from optcc.errors import EnvironmentMissing, InputError
from optcc.runtime.doctor.finding import NOTE, OK, WRONG, Finding, Need
from optcc.runtime.doctor.system import System
from optcc.runtime.nics import (
    IFNAME_VARIABLE,
    RATES_VARIABLE,
    HostNic,
    Interface,
    choose_nics,
    declare_rates,
)
from optcc.units import show_rate

RATE_SLACK = Fraction(105, 100)
FAST_BYTES_PER_S = 1_250_000_000
"""From 10 Gbit/s on, frames of 1500 bytes cost processor time that shows."""
_NET = "/sys/class/net"


def check_nics(system: System, _need: Need) -> Iterator[Finding]:
    """Each NIC, then which of them a run would use and at which rates."""
    found = {each.name: each for each in system.interfaces()}
    chosen, refused = chosen_nics(system)
    selected = {nic.name for nic in chosen}
    for name in system.names(_NET):
        if name == "lo" or system.read(f"{_NET}/{name}/flags") is None:
            continue
        yield _nic(system, name, found.get(name), name in selected)
    for name in system.names("/sys/class/infiniband"):
        yield from _adapter(system, name)
    yield refused or _selection(system, chosen)
    if not refused:
        yield from _rates(system, chosen)


def chosen_nics(system: System) -> tuple[list[HostNic], Finding | None]:
    """The NICs that a run would use, or what keeps it from having any."""
    wanted = system.environment.get(IFNAME_VARIABLE, "")
    # As in `nics_of`: where rates are declared, nobody measures a NIC that comes up.
    may_be_down = not system.environment.get(RATES_VARIABLE)
    try:
        return choose_nics(wanted, [each for each in system.interfaces() if each.is_up or may_be_down]), None
    except (InputError, EnvironmentMissing) as error:
        why = "the TCP transport would have no NIC, and refuses to start"
        do = (
            f"unset {IFNAME_VARIABLE}, or name interfaces that are up"
            if wanted
            else "ip link set DEV up, with an address"
        )
        return [], Finding("nics", IFNAME_VARIABLE, str(error), WRONG, why, do)


def _nic(system: System, name: str, interface: Interface | None, selected: bool) -> Finding:
    def said(what: str) -> str | None:
        return system.read(f"{_NET}/{name}/{what}")

    is_up = bool(int(said("flags") or "0", 16) & 1)
    carrier = said("carrier") == "1"
    speed, mtu = said("speed") or "", said("mtu") or "?"
    rate = show_rate(Fraction(int(speed) * 125_000)) if speed.isdecimal() and int(speed) > 0 else ""
    driver = system.link(f"{_NET}/{name}/device/driver")
    node = said("device/numa_node") or "-1"
    parts = [
        interface.address if interface else "no IPv4 address",
        "up" if is_up else "down",
        "carrier" if carrier else "no carrier",
        f"{rate} out and in" if rate else "rate not said",
        f"MTU {mtu}",
        f"driver {driver}" if driver else "virtual",
        *([f"NUMA node {node}"] if node not in ("-1", "") else []),
        *(["half duplex"] if said("duplex") == "half" else []),
    ]
    value = ", ".join(parts)
    why = "a run uses it" if selected else "a run does not use it"
    if selected and not is_up:
        return Finding("nics", name, value, NOTE, "a run uses it once it is up", f"ip link set {name} up")
    if selected and not carrier:
        return Finding(
            "nics", name, value, WRONG, f"{why}, and nothing gets through", "plug the cable, or leave it out"
        )
    if selected and said("duplex") == "half":
        why = f"{why}, and it cannot send and receive at once, as every bound takes for granted"
        return Finding("nics", name, value, WRONG, why, f"ethtool -s {name} duplex full")
    fast = rate and int(speed) * 125_000 >= FAST_BYTES_PER_S
    if selected and fast and driver and mtu.isdecimal() and int(mtu) <= 1500:
        why = f"{why}; headers cost 4.6 % at MTU 1500 and 0.7 % at 9000, and each frame costs processor time"
        return Finding("nics", name, value, NOTE, why, f"ip link set {name} mtu 9000 (switches must carry it)")
    return Finding("nics", name, value, OK, why)


def _adapter(system: System, name: str) -> Iterator[Finding]:
    """The ports of an RDMA adapter."""
    base = f"/sys/class/infiniband/{name}"
    node = system.read(f"{base}/device/numa_node") or "-1"
    where = f", NUMA node {node}" if node != "-1" else ""
    for port in system.names(f"{base}/ports"):
        state = system.read(f"{base}/ports/{port}/state") or "?"
        rate = system.read(f"{base}/ports/{port}/rate") or "rate not said"
        active = "ACTIVE" in state
        why = "UCX can use it" if active else "UCX cannot use it"
        do = "" if active else f"ibv_devinfo -d {name}: look at cable, subnet manager and port"
        yield Finding("nics", f"{name}:{port}", f"{state}, {rate}{where}", OK if active else NOTE, why, do)


def _selection(system: System, chosen: Sequence[HostNic]) -> Finding:
    wanted = system.environment.get(IFNAME_VARIABLE, "")
    value = f"{wanted or 'unset'}: selects {', '.join(nic.name for nic in chosen)}"
    why = "these carry the data of the TCP transport, a connection to each peer over each"
    mtus = {nic.name: system.read(f"{_NET}/{nic.name}/mtu") for nic in chosen}
    if len(set(mtus.values())) > 1:
        each = ", ".join(f"{name} {mtu}" for name, mtu in mtus.items())
        why = f"the NICs of a run have different MTUs ({each}): the wire's overhead differs from rail to rail"
        return Finding("nics", IFNAME_VARIABLE, value, NOTE, why, "ip link set DEV mtu N")
    if len({nic.address for nic in chosen}) < len(chosen):
        return Finding("nics", IFNAME_VARIABLE, value, WRONG, "two NICs have one address", "ip address")
    return Finding("nics", IFNAME_VARIABLE, value, OK, why)


def _rates(system: System, chosen: Sequence[HostNic]) -> Iterator[Finding]:
    """Declared rates against what the drivers say."""
    text = system.environment.get(RATES_VARIABLE, "")
    speeds = {each.name: each.rate for each in system.interfaces()}
    if not text:
        unsaid = [nic.name for nic in chosen if nic.is_up and not speeds.get(nic.name)]
        if unsaid and len(chosen) > 1:
            why = f"no driver says a rate for {', '.join(unsaid)}, so all NICs count as equal: the slowest one decides"
            yield Finding(
                "nics", RATES_VARIABLE, "unset", NOTE, why, f"export {RATES_VARIABLE}=100Gbit/s,eth1=50Gbit/s"
            )
        else:
            yield Finding("nics", RATES_VARIABLE, "unset", OK, "rates are what the drivers say, or there is one NIC")
        return
    try:
        declared = declare_rates(chosen, text, system.host_name)
    except InputError as error:
        yield Finding(
            "nics", RATES_VARIABLE, str(error), WRONG, "the TCP transport refuses to start", "see docs/transports"
        )
        return
    for name in _named(text, system.host_name):
        if name not in {nic.name for nic in chosen}:
            why = "a rate is declared for a NIC that no run here uses: misspelt, or left out"
            yield Finding("nics", RATES_VARIABLE, name, WRONG, why, f"name one of {', '.join(n.name for n in chosen)}")
    for nic in declared:
        speed = speeds.get(nic.name, 0)
        value = f"{nic.name} {show_rate(Fraction(nic.out_rate))} out, {show_rate(Fraction(nic.in_rate))} in"
        if speed and max(nic.out_rate, nic.in_rate) > RATE_SLACK * speed:
            why = f"more than the driver says, {show_rate(Fraction(speed))}: bytes are striped by these rates"
            yield Finding("nics", RATES_VARIABLE, value, WRONG, why, "declare what the NIC can carry")
        else:
            yield Finding("nics", RATES_VARIABLE, value, OK, "bytes are striped over NICs in proportion to these rates")


def _named(text: str, host: str) -> list[str]:
    """The NICs of this host that a declaration names."""
    targets = (part.partition("=")[0] for part in text.split(",")[1:])
    return [target.rpartition(".")[2] for target in targets if target.rpartition(".")[0] in ("", host)]
