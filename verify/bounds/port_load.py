"""`PortLoad`: the certificate of a bound on a collective whose elements each go from one rank to another.

What a server must send or receive is counted again from the declared conditions of the collective, element by element,
and compared with the closed form.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import numpy as np

from optcc.collective import Collective
from optcc.errors import SolverError
from optcc.show import Card, Shown
from optcc.topology import Topology
from optcc.units import show_rate, show_time
from optcc.verify.bounds.closed_forms import Bound, BoundTerm

ELEMENTS_MAX = 2**27
"""Limit of servers times elements that are counted."""


@dataclass(frozen=True, slots=True)
class PortLoad(Shown):
    """The term of `bound` that binds, counted again by `replay`."""

    bound: Bound
    term: BoundTerm | None

    @property
    def seconds(self) -> Fraction:
        """The bound."""
        return self.bound.seconds

    def as_json(self) -> dict[str, object]:
        """The certificate for programs: what must go through which port, at which rate."""
        term = self.term
        return {
            "collective": self.bound.collective,
            "size_bytes": self.bound.size_bytes,
            "port": None if term is None else term.port,
            "bytes": None if term is None else str(term.bytes),
            "rate": None if term is None else str(term.rate),
            "seconds": str(self.seconds),
        }

    def card(self) -> Card:
        term = self.term
        rows = () if term is None else ((term.port, f"{float(term.bytes):.6g}", show_rate(term.rate)),)
        return Card(f"at least {show_time(float(self.seconds))}", ("port", "bytes", "rate"), rows)


def certify_load(bound: Bound, topology: Topology, collective: Collective) -> PortLoad:
    """The certificate of a bound on an AllToAll, a Gather, a Scatter or a declared collective, once it was replayed.

    Raises SolverError if the count contradicts the bound.
    """
    single = [term for term in bound.binding_terms if len(term.ports) == 1]
    term = next(iter(single or bound.binding_terms), None)
    way, _, name = ("", "", "") if term is None else term.port.partition(" ")
    names = [server.name for server in topology.servers]
    if term is not None and way in ("out", "in") and name in names:
        counted = count_load(collective, topology, names.index(name), way)
        if counted is not None and counted * bound.size_bytes != term.bytes:
            raise SolverError(f"{term.port}: the conditions say {counted} of the message, the bound {term.bytes} B")
    return PortLoad(bound, term)


def count_load(collective: Collective, topology: Topology, server: int, way: str) -> Fraction | None:
    """The share of the message that a server must send (`out`) or receive (`in`), by counting elements; None if there
    are too many to count.

    >>> count_load(Collective("alltoall", 4), Topology.parse("2x2@1GB/s"), 0, "in")
    Fraction(1, 4)
    """
    count = lcm(*(share.denominator for share in collective.shares))
    if count > ELEMENTS_MAX:
        return None
    own = sum(1 << rank for rank, at in enumerate(topology.rank_server) if at == server)
    moved = np.zeros(count, dtype=np.bool_)
    for rank, at in enumerate(topology.rank_server):
        for start, stop, contributors in collective.after(rank, count):
            comes_in = way == "in" and at == server and contributors & ~own
            goes_out = way == "out" and at != server and contributors & own
            if comes_in or goes_out:
                moved[start:stop] = True
    return Fraction(int(np.count_nonzero(moved)), count)
