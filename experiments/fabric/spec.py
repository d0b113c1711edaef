"""What a fabric is to be: its name, addresses, rates, and the text that users write for it."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from optcc.errors import InputError
from optcc.units import parse_rate, show_rate

TOTAL_BITS_PER_S_MAX: Final = 8 * 10**9  # beyond it two cores cannot keep the shapers exact
RATE_BITS_PER_S_MIN: Final = 10**5
RATE_BITS_PER_S_MAX: Final = 2 * 10**10
HOSTS_MAX: Final = 64
NICS_MAX: Final = 16
RANKS_MAX: Final = 16
NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,22}[a-z0-9])?")
_NAMESPACE = re.compile(r"optcc-(.+)-(?:h\d+|core)")
_TARGET = re.compile(r"h?(\d{1,3})(?:\.eth(\d{1,3}))?")
_SPEC = re.compile(r"(\d{1,4})(?:x(\d{1,4}))?@([^,+]+?)(?:/(\d{1,4})ranks(?:\+([^,+]+))?)?((?:,[^,]+)*)")


def check_name(name: str) -> str:
    """`name` if it may name a fabric.

    >>> check_name("trial-2")
    'trial-2'

    Raises InputError otherwise.
    """
    if not NAME.fullmatch(name):
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
    return match[1] if match and NAME.fullmatch(match[1]) else None


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


def inside_address(host: int, rank: int) -> str:
    """The address of a rank for others of its host, where the inside is shaped.

    >>> inside_address(3, 1)
    '10.98.3.2'
    """
    return f"10.98.{host}.{rank + 1}"


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
class NicTarget:
    """One host, or one NIC of it, as commands name it: `h3`, `3`, `h3.eth1`.

    >>> NicTarget.parse("h3.eth1")
    NicTarget(host=3, nic=1)
    >>> NicTarget.parse("3").text
    'h3'
    """

    host: int
    nic: int | None = None

    @classmethod
    def parse(cls, text: str) -> NicTarget:
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

    Every host has so many `ranks`, each of which sends and receives `inside` within its host; None: no limit.

    Raises InputError if the name, a count or the shape of `rates` breaks a rule.
    """

    name: str
    rates: tuple[tuple[NicRates, ...], ...]
    ranks: int = 1
    inside: NicRates | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        if not 1 <= self.hosts <= HOSTS_MAX:
            raise InputError(f"{self.hosts} hosts: a fabric has 1 to {HOSTS_MAX}")
        if not 1 <= self.nics <= NICS_MAX:
            raise InputError(f"{self.nics} NICs a host: a fabric has 1 to {NICS_MAX}")
        if not 1 <= self.ranks <= RANKS_MAX:
            raise InputError(f"{self.ranks} ranks a host: a fabric has 1 to {RANKS_MAX}")
        if self.inside is not None and (self.ranks == 1 or self.inside.rate_out != self.inside.rate_in):
            raise InputError(f"+{self.inside.text}: must be one rate, for hosts of several ranks")
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

        `/Rranks` after the rate: R ranks a host; `+RATE` after that: what each exchanges with others of its host.
        `overrides` are further `TARGET=RATE`; the last one that names a NIC holds.

        >>> FabricSpec.parse("4x2@200Mbit/s,3=100Mbit/s,h0.eth1=25MB/s:5MB/s").text
        '4x2@25MB/s,h0.eth1=25MB/s:5MB/s,h3=12.5MB/s'
        >>> FabricSpec.parse("4x2@200Mbit/s/2ranks+1Gbit/s,3=100Mbit/s").text
        '4x2@25MB/s/2ranks+125MB/s,h3=12.5MB/s'

        Raises InputError that names the part and its rule.
        """
        match = _SPEC.fullmatch(text.strip())
        if match is None:
            raise InputError(f"fabric {text!r}: write HOSTSxNICS@RATE, for example 4x2@200Mbit/s, then ,3=100Mbit/s")
        spec = cls.uniform(int(match[1]), int(match[2] or 1), NicRates.parse(match[3]), name=name)
        inside = None if match[5] is None else NicRates.parse(match[5])
        spec = dataclasses.replace(spec, ranks=int(match[4] or 1), inside=inside)
        for override in [*match[6].split(",")[1:], *overrides]:
            target, equals, rates = override.partition("=")
            if not equals:
                raise InputError(f"{override!r}: write HOST=RATE, for example 3=100Mbit/s or h3.eth1=100Mbit/s")
            spec = spec.with_rates(NicTarget.parse(target), NicRates.parse(rates))
        return spec

    def with_rates(self, target: NicTarget, rates: NicRates) -> FabricSpec:
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
        ranks = f"/{self.ranks}ranks" if self.ranks > 1 else ""
        inside = f"+{self.inside.text}" if self.inside is not None else ""
        parts = [f"{self.hosts}x{self.nics}@{usual.text}{ranks}{inside}"]
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
