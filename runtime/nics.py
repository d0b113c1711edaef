"""The NICs of this machine: which a rank uses, and at which rates.

`OPTCC_SOCKET_IFNAME` chooses them by name as NCCL_SOCKET_IFNAME does; `OPTCC_NIC_RATES` declares their rates. Linux.
"""

from __future__ import annotations

import fcntl
import hashlib
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from optcc.errors import EnvironmentMissing, InputError
from optcc.units import parse_rate

IFNAME_VARIABLE = "OPTCC_SOCKET_IFNAME"
RATES_VARIABLE = "OPTCC_NIC_RATES"
INSIDE_VARIABLE = "OPTCC_INSIDE_IFNAME"
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "LOCAL_RANK", "SLURM_LOCALID")
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_IFREQ_BYTES = 40
_EQUAL_RATE = 1
_MBIT_BYTES = 125_000


@dataclass(frozen=True, slots=True)
class HostNic:
    """A NIC of this machine: its name, its IPv4 address, and the rates it can send and receive at, bytes/s.

    Only the proportions of the rates matter, among all NICs of the job; above 1 Mbit/s they also say how long a queue
    may be in the way before a connection is in doubt. Raises InputError for a rate below 1.
    """

    name: str
    address: str
    out_rate: int = _EQUAL_RATE
    in_rate: int = _EQUAL_RATE
    is_up: bool = True

    def __post_init__(self) -> None:
        if self.out_rate < 1 or self.in_rate < 1:
            raise InputError(f"NIC {self.name}: {self.out_rate} and {self.in_rate} B/s: must be at least 1")


@dataclass(frozen=True, slots=True)
class Interface:
    """An interface of this machine that has an IPv4 address; `rate` in bytes/s, 0 if it does not say."""

    name: str
    address: str
    is_loopback: bool
    rate: int = 0
    is_up: bool = True


def interfaces(*, may_be_down: bool = False) -> list[Interface]:
    """The interfaces of this machine that have an IPv4 address and are up, or `may_be_down`, in the system's order."""
    found: list[Interface] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_IFREQ_BYTES}s", name.encode()[:15])
            try:
                flags: int = struct.unpack_from("=H", fcntl.ioctl(sock, _SIOCGIFFLAGS, request), 16)[0]
                address = socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24])
            except OSError:
                continue
            if flags & _IFF_UP or may_be_down:
                is_loopback, is_up = bool(flags & _IFF_LOOPBACK), bool(flags & _IFF_UP)
                found.append(Interface(name, address, is_loopback, _speed(name), is_up))
    return found


def _speed(name: str) -> int:
    """What the driver says, bytes/s; 0 if it does not."""
    try:
        return max(0, int(Path("/sys/class/net", name, "speed").read_text(encoding="ascii"))) * _MBIT_BYTES
    except (OSError, ValueError):
        return 0


def choose_nics(wanted: str = "", found: Sequence[Interface] | None = None) -> list[HostNic]:
    """The NICs to use, in the order of their names, by the grammar of NCCL_SOCKET_IFNAME.

    `wanted` is a list of prefixes ("eth,ib"); after `=` of whole names ("=eth0,eth1"); after `^` what to leave out
    ("^docker", "^=eth3"). Empty: everything but loopback and docker's bridges, and loopback if that leaves nothing.
    Rates are taken from the drivers if all NICs that are up have one, else they count as equal. One that is down counts
    as the best of the others.

    Raises InputError if nothing that is up fits, or a list is empty.

    >>> here = [Interface("lo", "127.0.0.1", True), *(Interface(f"eth{i}", f"10.0.{i}.1", False) for i in range(2))]
    >>> [nic.name for nic in choose_nics("", here)], [nic.name for nic in choose_nics("^=eth0,lo", here)]
    (['eth0', 'eth1'], ['eth1'])
    """
    found = interfaces() if found is None else found
    if wanted:
        rule = wanted
        leave_out, rule = rule.startswith("^"), rule.removeprefix("^")
        exact, rule = rule.startswith("="), rule.removeprefix("=")
        names = rule.split(",")
        if not all(names):
            raise InputError(f"{IFNAME_VARIABLE} {wanted!r}: must be names between commas, after ^, = or ^= if wanted")
        fits = (lambda name: name in names) if exact else (lambda name: name.startswith(tuple(names)))
        chosen = [each for each in found if fits(each.name) != leave_out]
        if not any(each.is_up for each in chosen):
            here = ", ".join(each.name for each in found if each.is_up) or "none"
            raise InputError(f"{IFNAME_VARIABLE} {wanted!r}: must leave an interface that is up; there is {here}")
    else:
        chosen = [each for each in found if not each.is_loopback and not each.name.startswith("docker")]
        if not any(each.is_up for each in chosen):
            chosen = [each for each in found if each.is_loopback]
        if not any(each.is_up for each in chosen):
            raise EnvironmentMissing("no network interface is up with an IPv4 address")
    chosen.sort(key=lambda each: each.name)
    rates = [each.rate for each in chosen if each.is_up]
    found_rates = [(each.rate if each.is_up else max(rates)) if all(rates) else _EQUAL_RATE for each in chosen]
    return [
        HostNic(each.name, each.address, rate, rate, each.is_up) for each, rate in zip(chosen, found_rates, strict=True)
    ]


def nics_of(environment: Mapping[str, str], *, may_be_down: bool = False) -> list[HostNic]:
    """The NICs that OPTCC_SOCKET_IFNAME leaves, with the rates that OPTCC_NIC_RATES declares, if any, for this host.

    Those that are down are among them where they `may_be_down`, unless rates are declared: then nobody measures one
    that is back. See `choose_nics` and `declare_rates`.
    """
    rates = environment.get(RATES_VARIABLE, "")
    nics = choose_nics(environment.get(IFNAME_VARIABLE, ""), interfaces(may_be_down=may_be_down and not rates))
    return declare_rates(nics, rates, socket.gethostname()) if rates else nics


def declare_rates(nics: Sequence[HostNic], rates: str, host: str) -> list[HostNic]:
    """The NICs with declared rates: first that of every NIC, then those of some, out and in if they differ.

    All ranks may be given the same text: what is said of another host does not count. Raises InputError for a text
    that says something else.

    >>> nics = [HostNic("eth0", "10.0.0.1"), HostNic("eth1", "10.0.1.1")]
    >>> [nic.out_rate for nic in declare_rates(nics, "200MB/s,eth1=100MB/s,h3.eth0=1MB/s", "h2")]
    [200000000, 100000000]
    """
    first, *others = rates.split(",")
    everyone = _rate_pair(first)
    declared = {nic.name: everyone for nic in nics}
    for other in others:
        target, equals, rate = other.partition("=")
        where, _, name = target.rpartition(".")
        if not equals or not name:
            raise InputError(f"{RATES_VARIABLE} {other!r}: must be NIC=RATE or HOST.NIC=RATE")
        pair = _rate_pair(rate)
        if where in ("", host) and name in declared:
            declared[name] = pair
    return [HostNic(nic.name, nic.address, *declared[nic.name], nic.is_up) for nic in nics]


def _rate_pair(text: str) -> tuple[int, int]:
    """Rate out and rate in, whole bytes/s."""
    out, colon, in_ = text.partition(":")
    return int(parse_rate(out)), int(parse_rate(in_ if colon else out))


def inside_of(nics: Sequence[HostNic], environment: Mapping[str, str]) -> HostNic | None:
    """What this rank listens at for other ranks of its host: loopback, or the interface that OPTCC_INSIDE_IFNAME names.

    That is a prefix, behind which comes the rank's number on its host. The name is the host's: two ranks have the same
    one if they run on one kernel, in one network namespace, and use the same NICs. None if all NICs are loopback, as
    where ranks of one machine play hosts. Raises InputError for an interface that is not there.
    """
    if all(nic.address.startswith("127.") for nic in nics):
        return None
    name, prefix = f"inside {_host_id(nics)}", environment.get(INSIDE_VARIABLE, "")
    if not prefix:
        return HostNic(name, "127.0.0.1")
    number = next((environment[variable] for variable in _LOCAL_RANKS if variable in environment), "0")
    found = {each.name: each.address for each in interfaces()}
    if prefix + number not in found:
        here = ", ".join(found) or "none"
        raise InputError(f"{INSIDE_VARIABLE} {prefix!r}: must leave {prefix}{number}, which is up; there is {here}")
    return HostNic(name, found[prefix + number])


def _host_id(nics: Sequence[HostNic]) -> str:
    """The same for ranks of one kernel and network namespace that use the same NICs."""
    parts = [nic.address for nic in nics]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
        parts.append(str(Path("/proc/self/ns/net").stat().st_ino))
    except OSError:
        parts.append(socket.gethostname())
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]
