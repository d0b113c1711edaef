"""`Certificate`: a lower bound and how nearly it is achieved, as exact numbers that can be checked by addition.

A certificate is self-contained: the network with its exact rates, the cuts with their weights, the ports with their
prices; `optcc.verify.bounds.replay` states what follows from them and checks it. As a file (`optcc-certificate/1`,
JSON) it does not depend on the machine or on the solver that found it; its digest is the SHA-256 of its canonical
content. `optcc.verify.bounds.certificate_file` reads it. Rationals are strings "a/b" in lowest terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd, lcm
from typing import ClassVar

from optcc.errors import SolverError
from optcc.units import SIZE_BYTES_MAX
from optcc.verify.bounds.network import BROADCAST, REDUCE, Demand, FlowNetwork
from optcc.verify.bounds.priced import Priced, network_content, write_ratio

MODEL = "trees on the endpoints of this network, fluid, no latency"
_KINDS = (REDUCE, BROADCAST)


@dataclass(frozen=True, slots=True)
class Cut:
    """A set of nodes that trees of `kind` must enter (broadcast) or leave (reduce), and its weight."""

    kind: str
    nodes: tuple[int, ...]
    weight: Fraction


@dataclass(frozen=True, slots=True)
class PackedTree:
    """An in-tree (reduce) or out-tree (broadcast) for a share `weight` of the message; a path is a list of links."""

    kind: str
    root: int
    weight: Fraction
    paths: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Achieved:
    """A packing: seconds, root distribution, the load of each link by kind (in messages), and its trees if known."""

    seconds: Fraction
    roots: tuple[Fraction, ...]
    loads: Mapping[str, tuple[Fraction, ...]]
    trees: tuple[PackedTree, ...] | None = None


@dataclass(frozen=True, slots=True)
class Certificate(Priced):
    """The bound `seconds` = size_bytes * crossing / supply; see `optcc.verify.bounds.replay` for the inequalities."""

    FORMAT: ClassVar[str] = "optcc-certificate/1"

    network: FlowNetwork
    demand: Demand
    size_bytes: int
    cuts: tuple[Cut, ...]
    prices: tuple[Fraction, ...]
    potentials: Mapping[str, tuple[Fraction, ...]]
    crossing: Fraction
    supply: Fraction
    seconds: Fraction
    achieved: Achieved | None = None

    def __post_init__(self) -> None:
        network = self.network
        if not 0 <= self.size_bytes <= SIZE_BYTES_MAX:
            raise SolverError(f"certificate: size {self.size_bytes}: must be 0 to {SIZE_BYTES_MAX} bytes")
        _check_length("prices", self.prices, len(network.ports))
        if set(self.potentials) != set(_KINDS):
            raise SolverError(f"certificate: potentials of {', '.join(self.potentials)}: must be reduce and broadcast")
        for values in self.potentials.values():
            _check_length("potentials", values, len(network.switches))
        if self.demand.roots is not None:
            _check_length("roots", self.demand.roots, len(network.endpoints))
        for cut in self.cuts:
            if cut.kind not in _KINDS or list(cut.nodes) != sorted({n for n in cut.nodes if 0 <= n < network.n_nodes}):
                raise SolverError(f"certificate: {cut.kind} cut {cut.nodes}: must be nodes of the network in order")
        if self.achieved is not None:
            _check_length("roots", self.achieved.roots, len(network.endpoints))
            if set(self.achieved.loads) != set(_KINDS):
                raise SolverError(
                    f"certificate: loads of {', '.join(self.achieved.loads)}: must be reduce and broadcast"
                )
            for loads in self.achieved.loads.values():
                _check_length("loads", loads, len(network.links))
            for tree in self.achieved.trees or ():
                ends = [link for path in tree.paths for link in path]
                if tree.kind not in _KINDS or not 0 <= tree.root < len(network.endpoints) or not all(tree.paths):
                    raise SolverError(f"certificate: {tree.kind} tree at {tree.root}: must have a root and paths")
                if any(not 0 <= link < len(network.links) for link in ends):
                    raise SolverError(f"certificate: tree at {tree.root}: must use links of the network")

    @classmethod
    def of(
        cls,
        network: FlowNetwork,
        demand: Demand,
        size_bytes: int,
        cuts: tuple[Cut, ...],
        prices: tuple[Fraction, ...],
        potentials: Mapping[str, tuple[Fraction, ...]] | None = None,
    ) -> Certificate:
        """The certificate of these cuts and prices, scaled to the least whole numbers, with all that follows from
        them."""
        potentials = potentials or {}
        zeros = (Fraction(0),) * len(network.switches)
        potentials = {kind: potentials.get(kind, zeros) for kind in _KINDS}
        numbers = [*(cut.weight for cut in cuts), *prices, *(each for kind in _KINDS for each in potentials[kind])]
        scale = Fraction(lcm(*(each.denominator for each in numbers)))
        scale /= gcd(*(int(each * scale) for each in numbers)) or 1
        cuts = tuple(replace(cut, weight=cut.weight * scale) for cut in cuts if cut.weight)
        prices = tuple(price * scale for price in prices)
        crossing = least_crossing(cuts, demand, len(network.endpoints))
        supply = sum((port.rate * price for port, price in zip(network.ports, prices, strict=True)), Fraction(0))
        return cls(
            network,
            demand,
            size_bytes,
            cuts,
            prices,
            {kind: tuple(each * scale for each in potentials[kind]) for kind in _KINDS},
            crossing,
            supply,
            size_bytes * crossing / supply if supply else Fraction(0),
        )

    @property
    def collective(self) -> str:
        return self.demand.collective

    def reached(self) -> Achieved | None:
        return self.achieved

    def _content(self) -> dict[str, object]:
        network, achieved = self.network, self.achieved
        return {
            "model": MODEL,
            "collective": self.demand.collective,
            "roots": None if self.demand.roots is None else [write_ratio(x) for x in self.demand.roots],
            "size_bytes": self.size_bytes,
            "seconds": write_ratio(self.seconds),
            "demand": write_ratio(self.crossing),
            "supply": write_ratio(self.supply),
            **network_content(network),
            "cuts": [{"kind": c.kind, "nodes": list(c.nodes), "weight": write_ratio(c.weight)} for c in self.cuts],
            "prices": [write_ratio(price) for price in self.prices],
            "potentials": {kind: [write_ratio(each) for each in self.potentials[kind]] for kind in _KINDS},
            "achieved": None
            if achieved is None
            else {
                "seconds": write_ratio(achieved.seconds),
                "roots": [write_ratio(x) for x in achieved.roots],
                "loads": {kind: [write_ratio(load) for load in achieved.loads[kind]] for kind in _KINDS},
                "trees": None
                if achieved.trees is None
                else [
                    {
                        "kind": t.kind,
                        "root": t.root,
                        "weight": write_ratio(t.weight),
                        "paths": [list(p) for p in t.paths],
                    }
                    for t in achieved.trees
                ],
            },
        }


def least_crossing(cuts: tuple[Cut, ...], demand: Demand, p: int) -> Fraction:
    """The total that must cross the cuts per message byte, for any roots: the left side of (2) of `replay`.

    Raises SolverError for a cut without endpoints.
    """
    inside: list[Fraction | int] = [0] * p
    total = Fraction(0)
    for cut in cuts:
        endpoints = [node for node in cut.nodes if node < p]
        if not endpoints:
            raise SolverError(f"certificate: cut {cut.nodes}: must hold an endpoint")
        weight = whole_or_fraction(cut.weight)
        total += weight
        for node in endpoints:
            inside[node] += weight
    if demand.roots is None:
        return total - max(inside)
    return total - sum((x * weight for x, weight in zip(demand.roots, inside, strict=True)), Fraction(0))


def whole_or_fraction(number: Fraction) -> Fraction | int:
    """The same number, as an int if it is whole: exact as well, and much faster to add."""
    return number.numerator if number.denominator == 1 else number


def _check_length(what: str, values: tuple[object, ...], length: int) -> None:
    if len(values) != length:
        raise SolverError(f"certificate: {len(values)} {what}: must be {length}")
