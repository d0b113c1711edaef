"""The least time of a collective by brute force: a linear program over all spanning trees, its optimum proved exactly.

It shares nothing with the closed forms but the topology. Each element of the message goes up an in-tree, down an
out-tree, or both; the program mixes all there are. What the solver answers is rounded to rationals and believed only if
the mixture and the prices have exactly the same value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from optcc.topology import Topology

Arc = tuple[int, int]
Column = tuple[int, tuple[int, ...]]
"""The group whose share it serves, and how often it uses each port."""
_DENOMINATOR_MAX = 10**5


@cache
def out_trees(p: int, root: int) -> tuple[tuple[Arc, ...], ...]:
    """Every spanning out-tree from `root` on p nodes: a parent for each other node, no cycle."""
    others = [v for v in range(p) if v != root]
    found = []
    for parents in product(range(p), repeat=p - 1):
        parent = dict(zip(others, parents, strict=True))
        if all(_reaches(v, root, parent) for v in others):
            found.append(tuple((parent[v], v) for v in others))
    assert len(found) == (p ** (p - 2) if p > 1 else 1)  # Cayley
    return tuple(found)


def _reaches(v: int, root: int, parent: dict[int, int]) -> bool:
    seen = set()
    while v != root:
        if v in seen:
            return False
        seen.add(v)
        v = parent[v]
    return True


def in_trees(p: int, root: int) -> tuple[tuple[Arc, ...], ...]:
    """Every spanning in-tree to `root`."""
    return tuple(tuple((head, tail) for tail, head in tree) for tree in out_trees(p, root))


def paths(p: int) -> tuple[tuple[Arc, ...], ...]:
    """Every Hamiltonian path, both ways."""
    found = []
    for root in range(p):
        for tree in out_trees(p, root):
            degrees = [sum(v in arc for arc in tree) for v in range(p)]
            if max(degrees) <= 2:
                found.append(tuple(arc for tail, head in tree for arc in ((tail, head), (head, tail))))
    return tuple(found)


class Ports:
    """The ports of a topology, and which of them a transfer between two ranks uses."""

    def __init__(self, topology: Topology) -> None:
        self.rates: list[Fraction] = []
        self.server = topology.rank_server
        self.nic = {}
        for index, server in enumerate(topology.servers):
            if len(topology.servers) > 1:
                self.nic[index] = len(self.rates)
                self.rates += [server.out, server.in_]
        self.fabric = {}
        for rank, index in enumerate(self.server):
            rate = topology.servers[index].fabric
            if rate is not None:
                self.fabric[rank] = len(self.rates)
                self.rates += [rate, rate]

    def used(self, arc: Arc) -> list[int]:
        """The ports that a transfer along `arc` goes through."""
        src, dst = arc
        if self.server[src] != self.server[dst]:
            return [self.nic[self.server[src]], self.nic[self.server[dst]] + 1]
        return [self.fabric[src], self.fabric[dst] + 1] if src in self.fabric else []

    def loads(self, arcs: Sequence[Arc]) -> tuple[int, ...]:
        """How often each port is used."""
        found = [0] * len(self.rates)
        for arc in arcs:
            for port in self.used(arc):
                found[port] += 1
        return tuple(found)


def columns(topology: Topology, collective: str, root: int) -> tuple[list[Column], list[Fraction]]:
    """All ways of an element, without repetition, and the share of the message of each group."""
    ports, p = Ports(topology), topology.n_ranks
    if collective == "allreduce":
        return sorted(set(_pairs(ports, p))), [Fraction(1)]
    trees = in_trees if collective in ("reduce", "reducescatter") else out_trees
    if collective in ("broadcast", "reduce"):
        return sorted({(0, ports.loads(tree)) for tree in trees(p, root)}), [Fraction(1)]
    return sorted({(v, ports.loads(tree)) for v in range(p) for tree in trees(p, v)}), [Fraction(1, p)] * p


def _pairs(ports: Ports, p: int) -> Iterator[Column]:
    """An in-tree and an out-tree with the same root, whichever that is."""
    for root in range(p):
        up = {ports.loads(tree) for tree in in_trees(p, root)}
        down = {ports.loads(tree) for tree in out_trees(p, root)}
        for one, other in product(up, down):
            yield 0, tuple(a + b for a, b in zip(one, other, strict=True))


def least_time(topology: Topology, collective: str = "allreduce", root: int = 0) -> Fraction:
    """The least fluid time for a message of one byte, over mixtures of all trees; exact."""
    return solve(Ports(topology).rates, *columns(topology, collective, root))


def solve(rates: Sequence[Fraction], found: Sequence[Column], shares: Sequence[Fraction]) -> Fraction:
    """min T such that a mixture of columns, `shares` of each group, loads every port by at most rate * T."""
    from scipy.optimize import linprog

    group = np.array([number for number, _ in found])
    load = np.array([loads for _, loads in found], dtype=float).T
    cost = np.zeros(len(found) + 1)
    cost[-1] = 1
    least: Any = linprog(
        cost,
        A_ub=np.hstack([load, -np.array([[float(rate)] for rate in rates])]),
        b_ub=np.zeros(len(rates)),
        A_eq=np.hstack([np.array([group == number for number in range(len(shares))]), np.zeros((len(shares), 1))]),
        b_eq=[float(share) for share in shares],
        method="highs-ds",
    )
    assert least.status == 0, least.message
    weights = [Fraction(float(x)).limit_denominator(_DENOMINATOR_MAX) for x in least.x[:-1]]
    prices = [Fraction(-float(y)).limit_denominator(_DENOMINATOR_MAX) for y in least.ineqlin.marginals]
    above, below = _mixture(rates, found, shares, weights), _priced(rates, found, shares, prices)
    assert above == below, f"the solver's answer is not optimal as rationals: {above} and {below}"
    return above


def _mixture(
    rates: Sequence[Fraction], found: Sequence[Column], shares: Sequence[Fraction], weights: Sequence[Fraction]
) -> Fraction:
    """The time of a mixture: the largest load over rate."""
    assert min(weights) >= 0
    for number, share in enumerate(shares):
        assert sum(weight for weight, (group, _) in zip(weights, found, strict=True) if group == number) == share
    used = [(weight, loads) for weight, (_, loads) in zip(weights, found, strict=True) if weight]
    carried = [sum(weight * loads[port] for weight, loads in used) for port in range(len(rates))]
    return max(Fraction(amount) / rate for amount, rate in zip(carried, rates, strict=True))


def _priced(
    rates: Sequence[Fraction], found: Sequence[Column], shares: Sequence[Fraction], prices: Sequence[Fraction]
) -> Fraction:
    """What the cheapest columns cost if all ports together cost one second: no mixture is faster."""
    assert min(prices) >= 0
    total = sum(price * rate for price, rate in zip(prices, rates, strict=True))
    cheapest: dict[int, Fraction] = {}
    dear = [(port, price) for port, price in enumerate(prices) if price]
    for group, loads in found:
        cost = sum((price * loads[port] for port, price in dear), Fraction(0))
        cheapest[group] = min(cheapest.get(group, cost), cost)
    return sum((share * cheapest[number] for number, share in enumerate(shares)), Fraction(0)) / total
