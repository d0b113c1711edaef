"""`Certificate`: why nothing can be faster, in numbers that anybody can add up.

It names ports, how many bytes must leave through them together, and the seconds that follow. `replay` recomputes all
three from the topology alone, in exact arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from optcc.errors import SolverError
from optcc.topology import Topology
from optcc.verify.bounds import Bound


@dataclass(frozen=True, slots=True)
class Certificate:
    """`ports` ("out h3") must carry `bytes` together; at their rates that takes `seconds`."""

    model: str
    size_bytes: int
    ports: tuple[str, ...]
    bytes: Fraction
    seconds: Fraction

    def as_json(self) -> dict[str, object]:
        """The certificate as plain values; fractions as "a/b"."""
        return {
            "model": self.model,
            "size_bytes": self.size_bytes,
            "ports": list(self.ports),
            "bytes": str(self.bytes),
            "seconds": str(self.seconds),
        }


def certify(bound: Bound, topology: Topology) -> Certificate:
    """The certificate of a bound's first binding term, replayed before it is returned."""
    if not bound.terms:
        certificate = Certificate(bound.model, bound.size_bytes, (), Fraction(0), Fraction(0))
    else:
        term = next(term for term in bound.terms if term.seconds == bound.seconds)
        direction, _, which = term.port.partition(" ")
        names = [server.name for server in topology.servers] if which == "of all endpoints together" else [which]
        certificate = Certificate(
            bound.model, bound.size_bytes, tuple(f"{direction} {name}" for name in names), term.bytes, term.seconds
        )
    replay(certificate, topology)
    return certificate


def replay(certificate: Certificate, topology: Topology) -> None:
    """Checks a certificate against a topology.

    Raises SolverError naming the number that does not follow.
    """
    p = len(topology.servers)
    if not certificate.ports:
        if certificate.seconds != 0 or (p > 1 and certificate.size_bytes):
            raise SolverError(f"certificate: no port is named, so {certificate.seconds} s does not follow")
        return
    rates = {f"out {server.name}": server.out for server in topology.servers}
    rates |= {f"in {server.name}": server.in_ for server in topology.servers}
    directions = {port.partition(" ")[0] for port in certificate.ports}
    if (
        len(directions) != 1
        or len(set(certificate.ports)) != len(certificate.ports)
        or not set(certificate.ports) <= set(rates)
    ):
        raise SolverError(f"certificate: ports {certificate.ports} are not ports of one direction, each named once")
    n = len(certificate.ports)
    if n not in (1, p):
        raise SolverError(f"certificate: {n} ports: must be one, or all {p} of a direction")
    demand = Fraction(certificate.size_bytes) if n == 1 else Fraction(2 * (p - 1) * certificate.size_bytes)
    if certificate.bytes != demand:
        raise SolverError(f"certificate: {certificate.bytes} bytes: these ports must carry {demand}")
    seconds = demand / sum((rates[port] for port in certificate.ports), Fraction(0))
    if certificate.seconds != seconds:
        raise SolverError(f"certificate: {certificate.seconds} s: these ports take {seconds} s")
