"""`replay`: a certificate, checked from its own numbers in exact arithmetic; no solver, no search, no float.

The lower bound. Let any schedule of the tree model send c_e bytes per message byte over link e, in time T per byte,
and let its roots be spread as x. For each kind of trees the certificate has cuts (S, weight w_S >= 0) and a potential
phi at each switch (0 at endpoints); each port P has a price pi_P >= 0. Trees enter (broadcast) or leave (reduce) every
S that holds an endpoint but not their root, so the links that cross S carry c(S) >= 1 - x(S); switches pass on what
they take. If for each link e = (a, b) and each kind

    sum of w_S over the cuts S that e crosses  +  phi_b - phi_a  <=  sum of pi_P over the ports P that e uses      (1)

then, multiplied by c_e and summed over links and kinds,

    demand = sum_S w_S (1 - x(S))  <=  sum_P pi_P load_P  <=  T * sum_P pi_P rate_P = T * supply,                  (2)

so T >= demand / supply. Where roots are free, demand is the least over x: sum_S w_S - max_v sum_{S contains v} w_S.

The upper bound is either trees, counted port by port, or link loads that satisfy Edmonds' cut condition (see
`optcc.verify.bounds.flow`), which pack into trees by his theorem.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from math import lcm

from optcc.errors import SolverError
from optcc.topology import Topology
from optcc.verify.bounds.certificate import Achieved, Certificate, Cut, least_crossing, whole_or_fraction
from optcc.verify.bounds.flow import CutFinder
from optcc.verify.bounds.network import BROADCAST, REDUCE, Borders, FlowNetwork, endpoint_gpus


def replay(certificate: Certificate, topology: Topology | None = None) -> None:
    """Checks every number of `certificate` and, if given, that its network is that of `topology`.

    Raises SolverError for the first number that does not follow from the others.
    """
    if topology is not None:
        _check_topology(certificate, topology)
    network, demand = certificate.network, certificate.demand
    _check_signs(certificate)
    for kind in demand.kinds:
        _check_links(certificate, kind)
    for cut in certificate.cuts:
        if cut.kind not in demand.kinds:
            raise SolverError(f"certificate: a {cut.kind} cut: {demand.collective} has no such trees")
    crossing = least_crossing(certificate.cuts, demand, len(network.endpoints))
    check_same("demand", certificate.crossing, crossing)
    supply = sum((p.rate * price for p, price in zip(network.ports, certificate.prices, strict=True)), Fraction(0))
    check_same("supply", certificate.supply, supply)
    if supply == 0 and crossing > 0:
        raise SolverError(f"certificate: demand {crossing} of ports that cost nothing")
    check_same("seconds", certificate.seconds, certificate.size_bytes * crossing / supply if supply else Fraction(0))
    if certificate.seconds < 0:
        raise SolverError(f"certificate: seconds {certificate.seconds}: must not be negative")
    if certificate.achieved is not None:
        _check_achieved(certificate, certificate.achieved)


def check_network(ours: FlowNetwork, topology: Topology) -> bool:
    """True if `ours` is the network of `topology` with its GPUs as endpoints, False if it is that of its servers.

    Raises SolverError if it is neither, naming what differs.
    """
    theirs = FlowNetwork.from_topology(topology)
    fabric = len(ours.endpoints) != len(theirs.endpoints)
    if fabric:
        theirs = FlowNetwork.from_topology(topology, fabric=True)
    if ours.endpoints != theirs.endpoints:
        raise SolverError(f"certificate: endpoints {', '.join(ours.endpoints)}: the topology has {theirs.endpoints}")
    rates = {port.name: port.rate for port in theirs.ports}
    for port in ours.ports:
        if port.name not in rates:
            raise SolverError(f"certificate: port {port.name}: the topology has none of that name")
        check_same(f"rate of port {port.name}", port.rate, rates[port.name], "the topology says")
    if ours != theirs:
        raise SolverError("certificate: its links are not those of the topology")
    return fabric


def _check_topology(certificate: Certificate, topology: Topology) -> None:
    fabric = check_network(certificate.network, topology)
    roots = certificate.demand.roots
    if certificate.demand.collective in ("allgather", "reducescatter"):
        wanted = tuple(Fraction(gpus, topology.n_ranks) for gpus in endpoint_gpus(topology, fabric=fabric))
        if roots != wanted:
            raise SolverError(
                f"certificate: roots {[str(x) for x in roots or ()]}: must follow the GPUs of each server"
            )


def _check_signs(certificate: Certificate) -> None:
    for cut in certificate.cuts:
        if cut.weight < 0:
            raise SolverError(f"certificate: weight {cut.weight} of cut {cut.nodes}: must not be negative")
    for port, price in zip(certificate.network.ports, certificate.prices, strict=True):
        if price < 0:
            raise SolverError(f"certificate: price {price} of port {port.name}: must not be negative")


def _check_links(certificate: Certificate, kind: str) -> None:
    """Checks inequality (1) for every link."""
    network = certificate.network
    worths = worth_of_links(network, certificate.cuts, certificate.potentials[kind], kind)
    prices = [whole_or_fraction(price) for price in certificate.prices]
    for number, (link, worth) in enumerate(zip(network.links, worths, strict=True)):
        price = sum(prices[port] for port in link.ports)
        if worth > price:
            where = f"{network.nodes[link.tail]}->{network.nodes[link.head]}"
            raise SolverError(
                f"certificate: link {number} ({where}): {kind} cuts weigh {worth}, its ports cost {price}"
            )


def worth_of_links(
    network: FlowNetwork, cuts: Sequence[Cut], potentials: Sequence[Fraction], kind: str
) -> list[Fraction | int]:
    """The left side of inequality (1) for every link."""
    borders = Borders(network)
    worth: list[Fraction | int] = [0] * len(network.links)
    for cut in cuts:
        if cut.kind == kind:
            weight = whole_or_fraction(cut.weight)
            for number in borders.crossed(kind, frozenset(cut.nodes)):
                worth[number] += weight
    level = [0] * len(network.endpoints) + [whole_or_fraction(each) for each in potentials]
    if any(level):
        for number, link in enumerate(network.links):
            worth[number] += level[link.head] - level[link.tail]
    return worth


def _check_achieved(certificate: Certificate, achieved: Achieved) -> None:
    network, demand = certificate.network, certificate.demand
    if min(achieved.roots) < 0 or sum(achieved.roots) != 1:
        raise SolverError(f"certificate: roots {[str(x) for x in achieved.roots]}: must be shares of 1")
    if demand.roots is not None and achieved.roots != demand.roots:
        raise SolverError("certificate: the roots achieved are not those of the collective")
    for kind, loads in achieved.loads.items():
        if kind not in demand.kinds and any(loads):
            raise SolverError(f"certificate: {kind} loads: {demand.collective} has no such trees")
        for number, load in enumerate(loads):
            if load.numerator < 0:
                raise SolverError(f"certificate: {kind} load {load} of link {number}: must not be negative")
    carried = carried_by_ports(network, achieved.loads)
    for port, load in zip(network.ports, carried, strict=True):
        if load * certificate.size_bytes > achieved.seconds * port.rate:
            raise SolverError(
                f"certificate: port {port.name} carries {load * certificate.size_bytes} bytes: "
                f"more than {achieved.seconds * port.rate} in the time achieved"
            )
    if achieved.seconds < certificate.seconds:
        raise SolverError(f"certificate: achieved {achieved.seconds} s is less than the bound {certificate.seconds} s")
    for kind in demand.kinds:
        if achieved.trees is None:
            _check_cuts(network, achieved, kind)
        else:
            _check_trees(network, achieved, kind)


def _check_cuts(network: FlowNetwork, achieved: Achieved, kind: str) -> None:
    """Checks that switches conserve flow and that every set of nodes gets (or gives) the whole message."""
    p, loads = len(network.endpoints), achieved.loads[kind]
    unit, whole = in_units(loads)
    kept = [0] * network.n_nodes
    for link, load in zip(network.links, whole, strict=True):
        kept[link.head] += load
        kept[link.tail] -= load
    for node in range(p, network.n_nodes):
        if kept[node]:
            raise SolverError(
                f"certificate: {network.nodes[node]} keeps {Fraction(kept[node], unit)} of the {kind} loads: "
                "must pass on all"
            )
    starved = starved_sets(network, loads, achieved.roots, kind)
    if starved:
        share, nodes = starved[0]
        names = ", ".join(network.nodes[node] for node in sorted(nodes))
        raise SolverError(f"certificate: {kind} loads give {{{names}}} only {share} of the message")


def carried_by_ports(network: FlowNetwork, loads: Mapping[str, Sequence[Fraction]]) -> list[Fraction]:
    """What each port carries, in messages."""
    unit, whole = in_units([load for each in loads.values() for load in each])
    carried = [0] * len(network.ports)
    for number, load in enumerate(whole):
        for port in network.links[number % len(network.links)].ports:
            carried[port] += load
    return [Fraction(load, unit) for load in carried]


def in_units(numbers: Sequence[Fraction]) -> tuple[int, list[int]]:
    """`numbers` as whole multiples of one over the first value: exact as well, and much faster to add."""
    unit = lcm(*{each.denominator for each in numbers})
    return unit, [each.numerator * (unit // each.denominator) for each in numbers]


def starved_sets(
    network: FlowNetwork, loads: Sequence[Fraction], roots: Sequence[Fraction], kind: str
) -> list[tuple[Fraction, frozenset[int]]]:
    """Sets S whose links in (broadcast) or out (reduce) carry less than 1 - x(S), with load plus x(S); exact."""
    return find_starved(cut_finder(network, kind), loads, roots)


def cut_finder(network: FlowNetwork, kind: str) -> CutFinder:
    """Finds the narrow cuts of trees of `kind`."""
    arcs = [(link.tail, link.head) if kind == BROADCAST else (link.head, link.tail) for link in network.links]
    return CutFinder(network.n_nodes, arcs, len(network.endpoints))


def find_starved(
    finder: CutFinder, loads: Sequence[Fraction], roots: Sequence[Fraction], alike: Sequence[int] | None = None
) -> list[tuple[Fraction, frozenset[int]]]:
    """`starved_sets` with a `finder` that is used again, and endpoints `alike`."""
    unit, whole = in_units((*loads, *roots))
    found = finder.find(whole[: len(loads)], whole[len(loads) :], unit, alike=alike)
    return [(Fraction(share, unit), nodes) for share, nodes in found]


def _check_trees(network: FlowNetwork, achieved: Achieved, kind: str) -> None:
    """Checks that trees of this kind span the endpoints, have the claimed roots, and stay within the claimed loads."""
    assert achieved.trees is not None
    p = len(network.endpoints)
    used: dict[int, Fraction] = defaultdict(Fraction)
    rooted = [Fraction(0)] * p
    for number, tree in enumerate(achieved.trees):
        if tree.kind != kind:
            continue
        if tree.weight <= 0:
            raise SolverError(f"certificate: weight {tree.weight} of tree {number}: must be above zero")
        rooted[tree.root] += tree.weight
        parent: dict[int, int] = {}
        for path in tree.paths:
            links = [network.links[link] for link in path]
            tail, head = links[0].tail, links[-1].head
            joined = all(a.head == b.tail and a.head >= p for a, b in pairwise(links))
            if not joined or tail >= p or head >= p:
                raise SolverError(f"certificate: path {path} of tree {number}: must lead from endpoint to endpoint")
            child, above = (tail, head) if kind == REDUCE else (head, tail)
            if child == tree.root or child in parent:
                raise SolverError(f"certificate: tree {number}: {network.nodes[child]} must have one parent")
            parent[child] = above
            for link in path:
                used[link] += tree.weight
        if len(parent) != p - 1 or not _all_lead_to(tree.root, parent):
            raise SolverError(f"certificate: tree {number}: must span all {p} endpoints")
    if tuple(rooted) != achieved.roots:
        raise SolverError(f"certificate: {kind} trees are rooted {[str(x) for x in rooted]}: not as claimed")
    for link, load in used.items():
        if load > achieved.loads[kind][link]:
            raise SolverError(
                f"certificate: {kind} trees load link {link} with {load}: {achieved.loads[kind][link]} claimed"
            )


def _all_lead_to(root: int, parent: dict[int, int]) -> bool:
    """True if the parents of every node lead to `root`."""
    known = {root}
    for start in parent:
        trail: list[int] = []
        node = start
        while node not in known and node in parent and node not in trail:
            trail.append(node)
            node = parent[node]
        if node not in known:
            return False
        known.update(trail)
    return True


def check_same(what: str, claimed: Fraction, follows: Fraction, why: str = "what follows is") -> None:
    """Raises SolverError if a number of a certificate is not the one that follows."""
    if claimed != follows:
        raise SolverError(f"certificate: {what} {claimed}: {why} {follows}")
