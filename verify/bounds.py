"""How fast an AllReduce could possibly be: closed forms, exact.

Theorem (one endpoint a server, non-blocking core, every element reduced along an in-tree to one root and broadcast
along an out-tree from it). With n bytes on p endpoints that send at most out_v and receive at most in_v bytes/s,

    T* = n * max( max_v 1/out_v, max_v 1/in_v, 2(p - 1)/sum_v out_v, 2(p - 1)/sum_v in_v ).

Proof. Nobody can leave out v's contribution, and v must learn the result, so v sends and receives at least n bytes: the
first two terms. An in-tree and an out-tree have p - 1 edges each, so each element crosses the network 2(p - 1) times,
and all sends together, like all receives together, carry 2(p - 1) n bytes: the last two.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from optcc.errors import InputError, TopologyError
from optcc.show import Card, Shown
from optcc.topology import Topology
from optcc.units import show_rate, show_size, show_time


@dataclass(frozen=True, slots=True)
class Term:
    """One reason why it cannot be faster: `port` must carry `bytes` at `rate` bytes/s."""

    port: str
    bytes: Fraction
    rate: Fraction

    @property
    def seconds(self) -> Fraction:
        """Bytes over rate."""
        return self.bytes / self.rate


@dataclass(frozen=True, slots=True)
class Bound(Shown):
    """A lower bound in exact seconds, with every term it is the maximum of."""

    model: str
    size_bytes: int
    terms: tuple[Term, ...]

    @property
    def seconds(self) -> Fraction:
        """The bound: the largest term, zero if nothing has to cross the network."""
        return max((term.seconds for term in self.terms), default=Fraction(0))

    @property
    def binding(self) -> tuple[str, ...]:
        """The ports whose term is the bound."""
        return tuple(term.port for term in self.terms if term.seconds == self.seconds)

    def card(self) -> Card:
        slowest_first = sorted(self.terms, key=lambda term: -term.seconds)
        rows = tuple(
            (
                term.port,
                f"{float(term.bytes):.6g}",
                show_rate(term.rate),
                show_time(float(term.seconds)),
                "binds" if term.seconds == self.seconds else "",
            )
            for term in slowest_first
        )
        title = f"no AllReduce of {show_size(self.size_bytes)} is faster than {show_time(float(self.seconds))}"
        return Card(title, ("port", "bytes", "rate", "time", ""), rows)


def allreduce_bound(topology: Topology, size_bytes: int) -> Bound:
    """The bound of the theorem for AllReduce of `size_bytes`, servers as endpoints with their surviving NICs pooled.

    Every binding port is named, with the bytes it must carry. Latency is not in it, so it holds with any.

    >>> str(allreduce_bound(Topology.parse("4@50MB/s,3=25MB/s"), 100_000_000).seconds)
    '4'

    Raises InputError for a negative size, TopologyError for servers that talk rail by rail and lost different rails.
    """
    if size_bytes < 0:
        raise InputError(f"size {size_bytes}: must not be negative")
    require_pooled(topology)
    p = len(topology.servers)
    if p == 1 or size_bytes == 0:
        return Bound("pooled endpoints, non-blocking core", size_bytes, ())
    n, total = Fraction(size_bytes), Fraction(2 * (p - 1) * size_bytes)
    names = [server.name for server in topology.servers]
    terms = (
        *(Term(f"out {name}", n, rate) for name, rate in zip(names, topology.out, strict=True)),
        *(Term(f"in {name}", n, rate) for name, rate in zip(names, topology.in_, strict=True)),
        Term("out of all endpoints together", total, sum(topology.out, Fraction(0))),
        Term("in of all endpoints together", total, sum(topology.in_, Fraction(0))),
    )
    return Bound("pooled endpoints, non-blocking core", size_bytes, terms)


def require_pooled(topology: Topology) -> None:
    """Raises TopologyError where NICs cannot be pooled: a rail-only core on which servers lost different rails."""
    if not topology.rail_only:
        return
    rails = [
        sorted((nic.rail, nic.out, nic.in_) for nic in server.nics if not nic.failed) for server in topology.servers
    ]
    if any(each != rails[0] for each in rails):
        raise TopologyError(f"{topology!r}: servers differ rail by rail: this bound needs a core that joins the rails")


def ring_seconds(topology: Topology, size_bytes: int) -> Fraction:
    """What a ring over all endpoints takes: 2(p - 1)/p of the message through the slowest port.

    >>> str(ring_seconds(Topology.parse("4@50MB/s,3=25MB/s"), 100_000_000))
    '6'
    """
    p = len(topology.servers)
    if p == 1:
        return Fraction(0)
    return Fraction(2 * (p - 1) * size_bytes, p) / min(*topology.out, *topology.in_)
