"""What `ip`, `tc`, `nft` and a shell are told: pure functions that give text, so that tests can read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from optcc.experiments.fabric.spec import (
    FabricSpec,
    control_address,
    core_namespace,
    host_namespace,
    inside_address,
    nic_address,
)

MTU_BYTES: Final = 9000
WIRE_OVERHEAD: Final = f"{MTU_BYTES + 14}/{MTU_BYTES - 52}"
"""Ethernet's 14 bytes on top of a frame, and 52 of IP, TCP and time stamps inside it."""
BURST_BYTES_MIN: Final = 128 * 1024  # below the 64 KiB of a GSO packet the kernel would segment in software
BURST_MS: Final = 8  # what a bucket may bank: long enough to catch up after a stolen time slice
QUEUE_BYTES_MAX: Final = 8 * 2**20
SOCKET_BYTES_MAX: Final = 2**20


def core_port(host: int, nic: int) -> str:
    """The fabric's end of a NIC's cable.

    >>> core_port(3, 1)
    'h3e1'
    """
    return f"h{host}e{nic}"


def inside_port(host: int, rank: int) -> str:
    """The fabric's end of what joins a rank to the others of its host.

    >>> inside_port(3, 1)
    'h3r1'
    """
    return f"h{host}r{rank}"


def namespaces_of(spec: FabricSpec) -> tuple[str, ...]:
    """All namespaces of a fabric, the core first."""
    return (core_namespace(spec.name), *(host_namespace(spec.name, host) for host in range(spec.hosts)))


def core_batch(spec: FabricSpec) -> str:
    """`ip -batch` text for the core: bridges, cables into the hosts, ports up."""
    bridge = "type bridge forward_delay 0 stp_state 0 mcast_snooping 0"
    bridges = ["ctl", *(f"rail{nic}" for nic in range(spec.nics))]
    lines = ["link set lo up", *(f"link add name {name} mtu {MTU_BYTES} {bridge}" for name in bridges)]
    for host in range(spec.hosts):
        ports = [(f"h{host}c", "ctl", "ctl")]
        ports += [(core_port(host, nic), f"eth{nic}", f"rail{nic}") for nic in range(spec.nics)]
        for port, far, master in ports:
            peer = f"peer name {far} mtu {MTU_BYTES} netns {host_namespace(spec.name, host)}"
            lines.append(f"link add name {port} mtu {MTU_BYTES} type veth {peer}")
            lines.append(f"link set {port} master {master} up")
        if spec.inside is not None:
            lines.append(f"link add name h{host}in mtu {MTU_BYTES} {bridge}")
            for rank in range(spec.ranks):
                port, peer = inside_port(host, rank), f"peer name in{rank} mtu {MTU_BYTES}"
                lines.append(
                    f"link add name {port} mtu {MTU_BYTES} type veth {peer} netns {host_namespace(spec.name, host)}"
                )
                lines.append(f"link set {port} master h{host}in up")
            lines.append(f"link set h{host}in up")
    lines += [f"link set {name} up" for name in bridges]
    return "\n".join(lines) + "\n"


def host_batch(spec: FabricSpec, host: int) -> str:
    """`ip -batch` text for one host: addresses, links up."""
    lines = ["link set lo up", f"address add {control_address(host)}/24 dev ctl", "link set ctl up"]
    for nic in range(spec.nics):
        lines += [f"address add {nic_address(host, nic)}/24 dev eth{nic}", f"link set eth{nic} up"]
        # Ask for a neighbour ten times a second, for 3 s in all as ever: a healed NIC is found again at once.
        lines.append(f"ntable change name arp_cache dev eth{nic} retrans 100 mcast_probes 30 ucast_probes 30")
    return "\n".join([*lines, *_inside_lines(spec, host)]) + "\n"


def _inside_lines(spec: FabricSpec, host: int) -> list[str]:
    """`ip -batch` lines that join the ranks of a host over shaped cables: what one of them sends to another leaves by
    its own and comes back by the other's, though both addresses are of one namespace. To that end the table of local
    addresses comes after the routes by source, but for what has arrived."""
    if spec.inside is None:
        return []
    lines = []
    for rank in range(spec.ranks):
        name, address = f"in{rank}", inside_address(host, rank)
        network = inside_address(host, -1) + "/24"
        lines += [f"address add {address}/24 dev {name}", f"link set {name} up"]
        lines.append(f"route add {network} dev {name} table {100 + rank}")
        lines.append(f"rule add iif {name} lookup local pref 1")
        lines.append(f"rule add from {address} to {network} lookup {100 + rank} pref 10")
    return [*lines, "rule add lookup local pref 20", "rule delete pref 0"]


def inside_settings(spec: FabricSpec) -> dict[str, str]:
    """Kernel settings of a host whose inside is shaped: packets from its own addresses may arrive, each address is
    found at its own cable."""
    if spec.inside is None:
        return {}
    settings = {"net/ipv4/conf/all/rp_filter": "0"}
    for rank in range(spec.ranks):
        own = {"accept_local": "1", "rp_filter": "0", "arp_ignore": "1", "arp_announce": "2"}
        settings |= {f"net/ipv4/conf/in{rank}/{name}": value for name, value in own.items()}
    return settings


def shaper_line(interface: str, bits_per_s: int) -> str:
    """One `tc -batch` line: a token bucket on `interface`, made anew or changed while it runs.

    >>> shaper_line("eth0", 200_000_000)
    'qdisc replace dev eth0 root handle 1: tbf rate 200000000bit burst 200000 limit 8388608'
    """
    burst_bytes = max(BURST_BYTES_MIN, bits_per_s * BURST_MS // 8000)
    shape = f"rate {bits_per_s}bit burst {burst_bytes} limit {QUEUE_BYTES_MAX}"
    return f"qdisc replace dev {interface} root handle 1: tbf {shape}"


def host_shapers(spec: FabricSpec, host: int) -> str:
    """`tc -batch` text for one host: what its NICs may send."""
    lines = [shaper_line(f"eth{nic}", rates.bits_out) for nic, rates in enumerate(spec.rates[host])]
    if spec.inside is not None:
        lines += [shaper_line(f"in{rank}", spec.inside.bits_out) for rank in range(spec.ranks)]
    return "\n".join(lines) + "\n"


def core_shapers(spec: FabricSpec) -> str:
    """`tc -batch` text for the core: what every NIC may receive."""
    ports = ((host, nic) for host in range(spec.hosts) for nic in range(spec.nics))
    lines = [shaper_line(core_port(host, nic), spec.rates[host][nic].bits_in) for host, nic in ports]
    if spec.inside is not None:
        insides = [inside_port(host, rank) for host in range(spec.hosts) for rank in range(spec.ranks)]
        lines += [shaper_line(port, spec.inside.bits_in) for port in insides]
    return "\n".join(lines) + "\n"


def blackhole_rules(host: int, nic: int, how: str) -> str:
    """`nft -f` text that drops silently what a NIC sends (`-out`), receives (`-in`) or both; the carrier stays."""
    port = core_port(host, nic)
    hooks = [hook for hook, other in (("ingress", "blackhole-in"), ("egress", "blackhole-out")) if how != other]
    lines = [f"add table netdev optcc_{port}"]
    for hook in hooks:
        rule = f'type filter hook {hook} device "{port}" priority 0; policy drop;'
        lines.append(f"add chain netdev optcc_{port} {hook} {{ {rule} }}")
    return no_blackhole_rules(host, nic) + "\n".join(lines) + "\n"


def no_blackhole_rules(host: int, nic: int) -> str:
    """`nft -f` text that removes the rules of a NIC, whether there are any or not."""
    table = f"netdev optcc_{core_port(host, nic)}"
    return f"add table {table}\ndelete table {table}\n"


def namespace_settings() -> dict[str, str]:
    """Kernel settings of every namespace, by path below /proc/sys; `?` marks those a kernel may lack."""
    buffers = f"4096 {SOCKET_BYTES_MAX} {4 * SOCKET_BYTES_MAX}"
    return {
        "net/ipv4/tcp_congestion_control": "cubic",  # bbr estimates a rate, and is off by some per cent
        "net/ipv4/tcp_rmem": buffers,
        "net/ipv4/tcp_wmem": buffers,
        "?net/ipv4/tcp_no_metrics_save": "1",  # a flow starts as if it were the first one to its peer
        "?net/ipv6/conf/all/disable_ipv6": "1",  # neighbour discovery would show in the byte counters
        "?net/ipv6/conf/default/disable_ipv6": "1",
    }


def settings_script(settings: Mapping[str, str]) -> str:
    """A shell script that writes kernel settings.

    >>> settings_script({"net/a": "1", "?net/b": "2"})
    'set -e; echo 1 > /proc/sys/net/a; if [ -e /proc/sys/net/b ]; then echo 2 > /proc/sys/net/b; fi'
    """
    lines = ["set -e"]
    for path, value in settings.items():
        file = f"/proc/sys/{path.removeprefix('?')}"
        write = f"echo {value} > {file}"
        lines.append(f"if [ -e {file} ]; then {write}; fi" if path.startswith("?") else write)
    return "; ".join(lines)
