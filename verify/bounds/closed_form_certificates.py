"""Certificates of closed forms: explicit cuts, without a solver."""

from __future__ import annotations

from fractions import Fraction

from optcc.collective import Collective
from optcc.errors import SolverError
from optcc.topology import Topology
from optcc.verify.bounds.certificate import Certificate, Cut
from optcc.verify.bounds.closed_forms import Bound
from optcc.verify.bounds.network import BROADCAST, REDUCE, Demand, FlowNetwork, endpoint_gpus
from optcc.verify.bounds.replay import replay


def certify(bound: Bound, topology: Topology, root: int = 0) -> Certificate:
    """The certificate of a closed-form bound (`root`: the rank, for Broadcast and Reduce), replayed first.

    Raises SolverError if no explicit cut certificate proves the bound; use `optcc.verify.bounds.lp.lp_bound` then, with
    `fabric` where fabrics bind.
    """
    demand = Demand.of(Collective(bound.collective, topology.n_ranks, root), endpoint_gpus(topology))
    network = FlowNetwork.from_topology(topology)
    certificate = max(closed_forms(network, demand, bound.size_bytes), key=lambda each: each.seconds)
    if certificate.seconds != bound.seconds:
        raise SolverError(
            f"bound {bound.seconds} s: the best certificate of a closed form gives {certificate.seconds} s"
        )
    replay(certificate, topology)
    return certificate


def closed_forms(network: FlowNetwork, demand: Demand, size_bytes: int) -> list[Certificate]:
    """Explicit certificates: endpoints alone, in and out, the slowest of those with the same share of the roots; all in
    ports together, and all out ports; and the bottleneck cuts.

    in v: the bytes of all others enter {v}, and leave the rest. Together: each endpoint is entered once and left once,
    and the core conserves flow.
    """
    p, nodes = len(network.endpoints), range(network.n_nodes)
    zeros = [Fraction(0)] * len(network.ports)
    if p == 1 or size_bytes == 0:
        return [Certificate.of(network, demand, size_bytes, (), tuple(zeros))]
    found: list[Certificate] = []
    one = Fraction(1)
    for v, into, ports in _slowest_endpoints(network, demand):
        rest = tuple(node for node in nodes if node != v)
        prices = list(zeros)
        for port in ports:
            prices[port] = one
        # links into v enter {v} and leave the rest; links out of v leave {v} and enter the rest
        sides = {BROADCAST: (v,) if into else rest, REDUCE: rest if into else (v,)}
        cuts = tuple(Cut(kind, sides[kind], one) for kind in demand.kinds)
        found.append(Certificate.of(network, demand, size_bytes, cuts, tuple(prices)))
    found += [
        Certificate.of(network, demand, size_bytes, cuts, prices) for cuts, prices in _bottlenecks(network, demand)
    ]
    hubs = all((link.tail < p) != (link.head < p) for link in network.links)
    if hubs:
        cuts = tuple(Cut(kind, (v,), one) for kind in demand.kinds for v in range(p))
        for into in (True, False):
            prices = list(zeros)
            for link in network.links:
                if (link.head < p) == into:
                    prices[link.ports[0]] = one
            # the potential shifts the price from links into a switch to links out of it, or back
            level = {BROADCAST: 0 if into else 1, REDUCE: -1 if into else 0}
            potentials = {kind: (Fraction(level[kind]),) * len(network.switches) for kind in demand.kinds}
            found.append(Certificate.of(network, demand, size_bytes, cuts, tuple(prices), potentials))
    return found


def _slowest_endpoints(network: FlowNetwork, demand: Demand) -> list[tuple[int, bool, set[int]]]:
    """(endpoint, whether its ports in, these ports), those of the least rate for each share of the roots and way."""
    ports: dict[tuple[int, bool], set[int]] = {}
    for link in network.links:
        ports.setdefault((link.head, True), set()).add(link.ports[0])
        ports.setdefault((link.tail, False), set()).add(link.ports[0])
    slowest: dict[tuple[Fraction, bool], tuple[Fraction, int]] = {}
    for v in range(len(network.endpoints)):
        share = Fraction(0) if demand.roots is None else demand.roots[v]
        for into in (True, False):
            rate = sum((network.ports[port].rate for port in ports.get((v, into), ())), Fraction(0))
            slowest[share, into] = min(slowest.get((share, into), (rate, v)), (rate, v))
    chosen = sorted((v, not into) for (_, into), (_, v) in slowest.items())
    return [(v, not out, ports.get((v, not out), set())) for v, out in chosen]


def _bottlenecks(network: FlowNetwork, demand: Demand) -> list[tuple[tuple[Cut, ...], tuple[Fraction, ...]]]:
    """Bottleneck cuts: the nodes that a root reaches, or that reach it, over the fastest links, as many of these as do
    not join all endpoints.

    They give the right unit of time where a group of fast endpoints is connected by slow links.
    """
    p = len(network.endpoints)
    root = 0 if demand.roots is None else next(v for v in range(p) if demand.roots[v])
    lower = {rate: number for number, rate in enumerate(sorted({port.rate for port in network.ports}))}
    order = [lower[port.rate] for port in network.ports]  # that of the rates, and faster to compare
    speed = [min(order[port] for port in link.ports) for link in network.links]

    def sides(above: int) -> list[tuple[bool, set[int]]]:
        """(forward, nodes) for each direction in which links faster than `above` do not join all endpoints."""
        found = []
        for forward in (True, False):
            onward: list[list[int]] = [[] for _ in range(network.n_nodes)]
            for link, rate in zip(network.links, speed, strict=True):
                if rate > above:
                    onward[link.tail if forward else link.head].append(link.head if forward else link.tail)
            seen, todo = {root}, [root]
            while todo:
                for node in onward[todo.pop()]:
                    if node not in seen:
                        seen.add(node)
                        todo.append(node)
            if not seen.issuperset(range(p)):
                found.append((forward, seen))
        return found

    rates = sorted(set(speed))
    low, high = 0, len(rates) - 1  # the least rate such that the links above it do not join all
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sides(rates[middle]) else (middle + 1, high)
    found = []
    for forward, seen in sides(rates[low]) if rates else ():
        here, rest = tuple(sorted(seen)), tuple(node for node in range(network.n_nodes) if node not in seen)
        prices = [Fraction(0)] * len(network.ports)
        for link in network.links:
            if (link.tail in seen, link.head in seen) == (forward, not forward):
                prices[min(link.ports, key=lambda port: order[port])] = Fraction(1)
        into = {BROADCAST: rest if forward else here, REDUCE: here if forward else rest}
        found.append((tuple(Cut(kind, into[kind], Fraction(1)) for kind in demand.kinds), tuple(prices)))
    return found
