"""`FaultPlan`: which NICs fail while a plan runs, and when; from a list, a text or a seed.

    3/0@1ms               server 3 loses its NIC 0 after a millisecond, for good
    3/0@1ms..4ms          and has it back after four
    3/0@1ms..4ms=1/2      it is not lost, but has half its rate in between
    3/0@1ms=3/4:out       it sends at three quarters of its rate from then on

Several faults stand with commas between them. What a run does about a fault is not said here; it is the run's policy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Literal, cast, get_args

import numpy as np

from optcc.errors import InputError, TopologyError
from optcc.show import Card, Shown
from optcc.topology import Nic, Topology
from optcc.units import parse_time, show_time

Direction = Literal["both", "out", "in"]
FAULTS_MAX = 4096
SEED_MAX = 2**64 - 1
_FAULT = re.compile(r"(\d{1,6})/(\d{1,4})@([^.=:,]+(?:\.\d[^.=:,]*)?)(?:\.\.([^=:,]+))?(?:=([^:,]+))?(?::(out|in))?")
_NANOSECONDS = 10**9


@dataclass(frozen=True, slots=True)
class Fault:
    """From `at_s` until `until_s` (None: for good), NIC number `nic` of server number `server` has `share` of its rate.

    Share 0: it is down. A flap is a NIC that is down for a short while. Seconds, from the start of the run.
    """

    server: int
    nic: int
    at_s: Fraction
    until_s: Fraction | None = None
    share: Fraction = Fraction(0)
    direction: Direction = "both"

    def __post_init__(self) -> None:
        if self.server < 0 or self.nic < 0:
            raise InputError(f"fault {self}: server and NIC must not be negative")
        if self.at_s < 0:
            raise InputError(f"fault {self}: must not begin before 0 s")
        if self.until_s is not None and self.until_s <= self.at_s:
            raise InputError(f"fault {self}: must end after it begins")
        if not 0 <= self.share < 1:
            raise InputError(f"fault {self}: the share {self.share} that is left must be from 0 to below 1")
        if self.direction not in get_args(Direction):
            raise InputError(f"fault direction {self.direction!r}: must be one of {', '.join(get_args(Direction))}")

    @classmethod
    def parse(cls, text: str) -> Fault:
        """A fault from its text form.

        >>> Fault.parse("3/0@1ms..4ms=1/2:out")
        Fault(server=3, nic=0, at_s=Fraction(1, 1000), until_s=Fraction(1, 250), share=Fraction(1, 2), direction='out')
        """
        match = _FAULT.fullmatch(text.strip())
        if match is None:
            raise InputError(f"fault {text!r}: must look like 3/0@1ms, 3/0@1ms..4ms or 3/0@1ms..4ms=1/2:out")
        server, nic, at, until, share, direction = match.groups()
        try:
            left = Fraction(share) if share else Fraction(0)
        except (ValueError, ZeroDivisionError):
            raise InputError(f"fault {text!r}: share {share!r}: must be a number like 1/2") from None
        until_s = parse_time(until) if until else None
        return cls(int(server), int(nic), parse_time(at), until_s, left, cast(Direction, direction or "both"))

    def goes(self, direction: Direction) -> bool:
        """True if it concerns what the NIC sends (`out`) or receives (`in`)."""
        return self.direction in ("both", direction)

    def __str__(self) -> str:
        until = "" if self.until_s is None else f"..{show_time(float(self.until_s))}"
        share = f"={self.share}" if self.share else ""
        direction = "" if self.direction == "both" else f":{self.direction}"
        return f"{self.server}/{self.nic}@{show_time(float(self.at_s))}{until}{share}{direction}"


@dataclass(frozen=True, slots=True)
class FaultPlan(Shown):
    """Faults in order of time. `seed` is what they were drawn from, if they were.

    >>> FaultPlan.parse("3/0@4ms, 1/0@1ms..2ms")
    FaultPlan('1/0@1.000 ms..2.000 ms, 3/0@4.000 ms')
    """

    faults: tuple[Fault, ...]
    seed: int | None = None

    def __post_init__(self) -> None:
        if len(self.faults) > FAULTS_MAX:
            raise InputError(f"{len(self.faults)} faults: must be at most {FAULTS_MAX}")
        object.__setattr__(self, "faults", tuple(sorted(self.faults, key=lambda each: each.at_s)))

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """A plan from its text form; raises InputError."""
        return cls(tuple(Fault.parse(part) for part in text.split(",") if part.strip()))

    @classmethod
    def sampled(
        cls, topology: Topology, seed: int, *, failures_per_s: float, repair_s: float, horizon_s: float
    ) -> FaultPlan:
        """Faults up to `horizon_s`: each NIC works for an exponentially distributed time of mean 1 / `failures_per_s`,
        is down for one of mean `repair_s`, and so on; both rounded to nanoseconds.

        The numbers of a NIC are its own: Philox keyed by the seed and the NIC's number in the topology, logarithms in
        decimal arithmetic. So the same seed gives the same faults on every machine. The rates of real clusters are per
        month; a run is short, so `failures_per_s` is mostly a way to get some faults into it.

        Raises InputError for a seed below zero or above 2**64 - 1, and unless the other numbers are above zero.
        """
        if not 0 <= seed <= SEED_MAX:
            raise InputError(f"seed {seed}: must be from 0 to {SEED_MAX}")
        for label, value in (("failures/s", failures_per_s), ("repair", repair_s), ("horizon", horizon_s)):
            if not 0 < value < float("inf"):
                raise InputError(f"{label} {value}: must be above zero")
        faults: list[Fault] = []
        number = 0
        for index, server in enumerate(topology.servers):
            for nic in range(len(server.nics)):
                drawn = _faults_of(index, nic, waits(seed, number), failures_per_s, repair_s, horizon_s)
                faults += islice(drawn, FAULTS_MAX + 1)
                number += 1
                if len(faults) > FAULTS_MAX:
                    raise InputError(f"more than {FAULTS_MAX} faults: ask for a shorter time or a lower rate")
        return cls(tuple(faults), seed)

    def check(self, topology: Topology) -> None:
        """Raises TopologyError for a fault of a NIC that `topology` does not have or that has failed before."""
        for fault in self.faults:
            if fault.server >= len(topology.servers):
                raise TopologyError(f"fault {fault}: server {fault.server} must be below {len(topology.servers)}")
            server = topology.servers[fault.server]
            if fault.nic >= len(server.nics):
                raise TopologyError(f"fault {fault}: {server.name} has {len(server.nics)} NICs, numbered from 0")
            if server.nics[fault.nic].failed:
                raise TopologyError(f"fault {fault}: that NIC of {server.name} has failed before the run")

    def share(self, server: int, nic: int, direction: Direction, at_s: Fraction) -> Fraction:
        """What is left of a NIC's rate at `at_s`: of several faults at once, the worst counts."""
        shares = (
            fault.share
            for fault in self.faults
            if (fault.server, fault.nic) == (server, nic) and fault.goes(direction) and lasts(fault, at_s)
        )
        return min(shares, default=Fraction(1))

    def left(self, topology: Topology, at_s: Fraction) -> Topology:
        """`topology` as it is at `at_s`. A NIC that only sends or only receives no longer does either.

        Raises TopologyError if a server has no NIC left.
        """
        servers = []
        for index, server in enumerate(topology.servers):
            nics: list[Nic] = []
            for number, nic in enumerate(server.nics):
                out, in_ = (self.share(index, number, way, at_s) for way in get_args(Direction)[1:])
                if nic.failed or out == 0 or in_ == 0:
                    nics.append(replace(nic, failed=True))
                else:
                    nics.append(replace(nic, out=nic.out * out, in_=nic.in_ * in_))
            servers.append(replace(server, nics=tuple(nics)))
        return replace(topology, servers=tuple(servers), text="")

    def first(self, count: int) -> FaultPlan:
        """The first `count` faults."""
        return replace(self, faults=self.faults[:count])

    def __len__(self) -> int:
        return len(self.faults)

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.faults)

    def card(self) -> Card:
        seed = "" if self.seed is None else f", seed {self.seed}"
        return Card(f"{len(self)} faults{seed}", ("fault",), tuple((str(fault),) for fault in self.faults))

    def __repr__(self) -> str:
        return f"FaultPlan({', '.join(map(str, self.faults))!r})"


def lasts(fault: Fault, at_s: Fraction) -> bool:
    """True if the fault is there at `at_s`."""
    return fault.at_s <= at_s and (fault.until_s is None or at_s < fault.until_s)


def waits(seed: int, stream: int) -> Iterator[float]:
    """Exponentially distributed numbers of mean 1: number i of a stream is the same on every machine."""
    bits = np.random.Philox(key=[seed, stream])
    while True:
        uniform = Decimal((int(bits.random_raw()) >> 11) + 1) / 2**53
        yield float(-uniform.ln())


def _faults_of(
    server: int, nic: int, draws: Iterator[float], failures_per_s: float, repair_s: float, horizon_s: float
) -> Iterator[Fault]:
    now = Fraction(0)
    while True:
        now += _nanoseconds(next(draws) / failures_per_s)
        if now > horizon_s:
            return
        until = now + max(_nanoseconds(next(draws) * repair_s), Fraction(1, _NANOSECONDS))
        yield Fault(server, nic, now, until)
        now = until


def _nanoseconds(seconds: float) -> Fraction:
    return Fraction(round(seconds * _NANOSECONDS), _NANOSECONDS)
