"""Which NICs of a cluster have failed: patterns, drawn at random from stated rates, trial by trial.

The result of a trial depends on the seed, the trial and the pattern alone: its random numbers are a Philox stream of
its own (a counter-based generator, Salmon et al. 2011) with the key (seed, trial) and a first counter derived from the
pattern's name. The number of workers, the order of the trials and the machine do not matter. Only raw 64-bit words are
taken from numpy, whose distributions may change between versions.

    pattern          what has failed                                          in the literature
    Uniform(k)       k different NICs of all                                  R2CCL: k = 1..10; k = 1 is one NIC of 8
    OneServer(j)     j NICs of one server                                     R2CCL: 12.5 to 50 % of a server
    RailSwitch(m)    the NICs of one rail at m servers: their switch failed   HPN: 0.051 % of ToR switches a month
    Slow(j)          j NICs are alive and carry 25 to 90 % of their rate      SuperBench: 6.04 % of nodes below spec
    Instant(q)       every NIC is down with probability q                     failures and repairs, or flaps, see there

No schedule here handles a server whose last NIC fails, since its GPUs are cut off: such a draw is repeated.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
import numpy.typing as npt

from optcc.errors import CodecError, InputError

WORDS = 2**64
"""A random word is below this, and the seed and the trial are."""
SERVERS_MAX, NICS_MAX = 65_536, 1024
_DRAWS_MAX = 1000
DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class FailureRate:
    """How often a NIC with its link fails, in failures per port and day, and where that number comes from."""

    name: str
    per_port_day: Fraction
    source: str


LLAMA_NIC = FailureRate(
    "llama3-nic",
    Fraction(7, 54 * 16_384),
    "Llama 3 (arXiv 2407.21783, Table 5): 7 job interruptions by NICs in 54 days on 16,384 GPUs, one port each",
)
HPN_LINK = FailureRate(
    "hpn-link",
    Fraction(57, 100_000) / 30,
    "Alibaba HPN (SIGCOMM 2024, section 2.3): 0.057 % of the links between NIC and ToR fail in a month",
)
LLAMA_NETWORK = FailureRate(
    "llama3-network",
    Fraction(42, 54 * 16_384),
    "Llama 3 (same table): 42 interruptions by NICs, switches and cables; faults that stopped no job are not in it",
)
RATES = (LLAMA_NIC, HPN_LINK, LLAMA_NETWORK)
REPAIRS_S = {"4h": 4 * 3600, "1d": DAY_S, "3d": 3 * DAY_S}
"""Seconds until a NIC is repaired. Assumed: repair times of single NICs are unpublished."""
FLAPS_PER_DAY = (5_000, 60_000)
"""Alibaba HPN (section 2.3): link flaps a day, least and most, in a fleet whose size is not given."""
FLEET_PORTS = 100_000
"""Ports of that fleet. Assumed."""
FLAP_S = 5
"""Seconds that a flap lasts. Assumed; MegaScale (NSDI 2024) says seconds."""
SLOW_PERCENT = range(25, 91, 5)
"""What a NIC that is slow and not dead still carries, in percent of its rate, all of these equally likely. Assumed."""


def down_probability(rate: FailureRate, repair_s: int) -> Fraction:
    """The share of time in which a NIC is down, if it fails at `rate` while it is up and is repaired in `repair_s`.

    >>> float(round(100 * down_probability(LLAMA_NETWORK, 3 * DAY_S), 4))
    0.0142
    """
    failing = rate.per_port_day * Fraction(repair_s, DAY_S)
    return failing / (1 + failing)


def flap_probability(flaps_per_day: int) -> Fraction:
    """The share of time in which a NIC is down by a flap, from the flaps a day of a whole fleet."""
    return Fraction(flaps_per_day, FLEET_PORTS) * Fraction(FLAP_S, DAY_S)


@dataclass(frozen=True, slots=True)
class Cluster:
    """`servers` of `nics` equal NICs each, on a core that never is the bottleneck.

    Raises InputError for a number that cannot be.
    """

    servers: int
    nics: int

    def __post_init__(self) -> None:
        if not 2 <= self.servers <= SERVERS_MAX:
            raise InputError(f"{self.servers} servers: must be from 2 to {SERVERS_MAX}")
        if not 1 <= self.nics <= NICS_MAX:
            raise InputError(f"{self.nics} NICs a server: must be from 1 to {NICS_MAX}")

    def __str__(self) -> str:
        return f"{self.servers}x{self.nics}"


Shares = tuple[Fraction, ...]
"""Of one server: what each degraded NIC still carries, as a share of its rate, in rising order; 0 is a dead one."""
Damage = Mapping[int, Shares]
"""The degraded servers by number."""
_GROUP = re.compile(r"([1-9][0-9]{0,5})\[([0-9/ ]+)\]")
_SHARE = re.compile(r"0|([1-9][0-9]{0,5})/([1-9][0-9]{0,5})")
NOTHING = "nothing"


@dataclass(frozen=True, slots=True, order=True)
class Left:
    """What is left of a cluster up to permutation of servers: how many are degraded in which way.

    Servers behind pooled NICs and a non-blocking core are interchangeable, so this is all that a time depends on; many
    trials give the same. The text form names servers[shares of their degraded NICs]:

    >>> left = Left.of({4: (Fraction(0),), 9: (Fraction(0),), 2: (Fraction(0), Fraction(1, 2))})
    >>> str(left), Left.parse(str(left)) == left
    ('2[0] 1[0 1/2]', True)
    """

    groups: tuple[tuple[Shares, int], ...]

    @classmethod
    def of(cls, damage: Damage) -> Left:
        """What `damage` leaves."""
        return cls(tuple(sorted(Counter(tuple(sorted(shares)) for shares in damage.values()).items())))

    @classmethod
    def parse(cls, text: str) -> Left:
        """What `str` wrote; raises CodecError for anything else."""
        groups = []
        for word in re.sub(r" (?=[0-9]+\[)", "\n", text).split("\n") if text != NOTHING else []:
            match = _GROUP.fullmatch(word)
            shares = match[2].split(" ") if match is not None else []
            if match is None or not all(_SHARE.fullmatch(share) for share in shares):
                raise CodecError(f"{text!r}: must look like '2[0] 1[0 1/2]', or be {NOTHING!r}")
            groups.append((tuple(Fraction(share) for share in shares), int(match[1])))
        left = cls(tuple(groups))
        if str(left) != text or list(groups) != sorted(dict(groups).items()):
            raise CodecError(f"{text!r}: must be in lowest terms and in rising order, every kind of server once")
        if any(not 0 <= share < 1 for shares, _ in groups for share in shares):
            raise CodecError(f"{text!r}: shares must be below 1")
        return left

    def __str__(self) -> str:
        return " ".join(f"{count}[{' '.join(map(str, shares))}]" for shares, count in self.groups) or NOTHING

    @property
    def degraded(self) -> int:
        """The number of degraded servers."""
        return sum(count for _, count in self.groups)

    def rates(self, cluster: Cluster) -> tuple[tuple[Fraction, int], ...]:
        """(share of its rate that a server keeps, its NICs pooled; how many servers), in rising order, healthy last.

        Raises InputError if more is lost than the cluster has, or a server is cut off.
        """
        found: Counter[Fraction] = Counter()
        for shares, count in self.groups:
            if len(shares) > cluster.nics or sum(shares) + cluster.nics - len(shares) == 0:
                raise InputError(f"{self}: a server of {cluster.nics} NICs must keep a part of one")
            found[1 - sum((1 - share for share in shares), Fraction(0)) / cluster.nics] += count
        healthy = cluster.servers - self.degraded
        if healthy < 0:
            raise InputError(f"{self}: must be at most {cluster.servers} servers")
        if healthy:
            found[Fraction(1)] += healthy
        return tuple(sorted(found.items()))


class Draws:
    """The random numbers of one trial for one purpose, `name`."""

    def __init__(self, seed: int, trial: int, name: str) -> None:
        for what, value in (("seed", seed), ("trial", trial)):
            if not 0 <= value < WORDS:
                raise InputError(f"{what} {value}: must be from 0 to 2**64 - 1")
        start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        # Names set a high word of the counter and draws advance low ones, so streams of one key are disjoint.
        counter = np.array([0, 0, start, 0], dtype=np.uint64)
        self._bits = np.random.Philox(key=np.array([seed, trial], dtype=np.uint64), counter=counter)

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """The next `count` words of 64 random bits."""
        return self._bits.random_raw(count)

    def below(self, bound: int) -> int:
        """A number from 0 to `bound` - 1, every one of them exactly as likely as the others.

        >>> Draws(1, 0, "dice").below(6) == Draws(1, 0, "dice").below(6)
        True
        """
        fair = WORDS - WORDS % bound
        while True:
            word = int(self._bits.random_raw())
            if word < fair:
                return word % bound

    def different(self, count: int, bound: int) -> list[int]:
        """`count` different numbers below `bound`, in rising order; every choice is exactly as likely."""
        found: set[int] = set()
        while len(found) < count:
            found.add(self.below(bound))
        return sorted(found)

    def happen(self, count: int, probability: Fraction) -> list[int]:
        """Which of `count` things happen, each with `probability` (rounded down to a multiple of 2**-64)."""
        least = int(probability * WORDS)
        if least >= WORDS:
            return list(range(count))
        return [int(each) for each in np.flatnonzero(self.words(count) < np.uint64(least))]


class Pattern(Protocol):
    """A way in which NICs fail. `str` names it, and with the seed and the trial decides what is drawn."""

    def check(self, cluster: Cluster) -> None:
        """Raises InputError if that cannot happen to `cluster`."""

    def fail(self, cluster: Cluster, draws: Draws) -> Damage:
        """The failed NICs. If a server has none left, the draw is repeated."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """`failed` different NICs of the whole cluster are dead."""

    failed: int

    def __str__(self) -> str:
        return f"uniform {self.failed}"

    def check(self, cluster: Cluster) -> None:
        most = cluster.servers * (cluster.nics - 1)
        if not 1 <= self.failed <= most:
            raise InputError(f"{self.failed} failed NICs of {cluster}: must be from 1 to {most}, so that all keep one")

    def fail(self, cluster: Cluster, draws: Draws) -> Damage:
        dead = Counter(each // cluster.nics for each in draws.different(self.failed, cluster.servers * cluster.nics))
        return {server: (Fraction(0),) * count for server, count in dead.items()}


@dataclass(frozen=True, slots=True)
class OneServer:
    """`failed` NICs of a server are dead, and nothing else."""

    failed: int

    def __str__(self) -> str:
        return f"one server {self.failed}"

    def check(self, cluster: Cluster) -> None:
        if not 1 <= self.failed < cluster.nics:
            raise InputError(f"{self.failed} failed NICs of one server: must be from 1 to {cluster.nics - 1}")

    def fail(self, cluster: Cluster, draws: Draws) -> Damage:
        return {draws.below(cluster.servers): (Fraction(0),) * self.failed}


@dataclass(frozen=True, slots=True)
class RailSwitch:
    """The switch of a rail failed: `servers` neighbours that hang on it lose a NIC each.

    A leaf switch of rail j connects NIC j of a group of servers; the groups are `servers` in a row, the last one may be
    smaller. Other rails, and the NICs of that rail elsewhere, go on.
    """

    servers: int

    def __str__(self) -> str:
        return f"rail {self.servers}"

    def check(self, cluster: Cluster) -> None:
        if not 1 <= self.servers <= cluster.servers:
            raise InputError(f"a switch for {self.servers} of {cluster.servers} servers: must be from 1 to all of them")
        if cluster.nics < 2:
            raise InputError(f"a failed rail of {cluster}: servers must have another NIC")

    def fail(self, cluster: Cluster, draws: Draws) -> Damage:
        first = draws.below(-(-cluster.servers // self.servers)) * self.servers
        return {server: (Fraction(0),) for server in range(first, min(first + self.servers, cluster.servers))}


@dataclass(frozen=True, slots=True)
class Slow:
    """`slow` different NICs of the whole cluster carry less than they should: one of `SLOW_PERCENT`."""

    slow: int

    def __str__(self) -> str:
        return f"slow {self.slow}"

    def check(self, cluster: Cluster) -> None:
        most = cluster.servers * cluster.nics
        if not 1 <= self.slow <= most:
            raise InputError(f"{self.slow} slow NICs of {cluster}: must be from 1 to {most}")

    def fail(self, cluster: Cluster, draws: Draws) -> Damage:
        damage: dict[int, Shares] = {}
        for nic in draws.different(self.slow, cluster.servers * cluster.nics):
            share = Fraction(SLOW_PERCENT[draws.below(len(SLOW_PERCENT))], 100)
            server = nic // cluster.nics
            damage[server] = tuple(sorted((*damage.get(server, ()), share)))
        return damage


@dataclass(frozen=True, slots=True)
class Instant:
    """The cluster at a random instant: every NIC is dead with probability `down`, independently.

    With `down_probability` these are failures that wait for their repair, with `flap_probability` flaps.
    """

    reason: str
    down: Fraction

    def __str__(self) -> str:
        return f"instant {self.reason}"

    def check(self, cluster: Cluster) -> None:  # noqa: ARG002 - the protocol's signature
        if not 0 <= self.down < 1:
            raise InputError(f"{self}: probability {self.down}: must be from 0 to below 1")

    def fail(self, cluster: Cluster, draws: Draws) -> Damage:
        dead = Counter(each // cluster.nics for each in draws.happen(cluster.servers * cluster.nics, self.down))
        return {server: (Fraction(0),) * count for server, count in dead.items()}


def draw(pattern: Pattern, cluster: Cluster, seed: int, trial: int) -> Damage:
    """What is broken in `trial`: the first of its draws in which every server keeps a NIC.

    >>> draw(Uniform(2), Cluster(64, 8), seed=1, trial=7) == draw(Uniform(2), Cluster(64, 8), seed=1, trial=7)
    True

    Raises InputError if the pattern cannot happen to the cluster, or hardly ever leaves every server a NIC.
    """
    pattern.check(cluster)
    draws = Draws(seed, trial, f"{pattern}, {cluster}")
    for _ in range(_DRAWS_MAX):
        damage = pattern.fail(cluster, draws)
        if all(len(shares) < cluster.nics or sum(shares) for shares in damage.values()):
            return damage
    raise InputError(f"{pattern} of {cluster}: {_DRAWS_MAX} draws in a row cut a server off: must fail less")
