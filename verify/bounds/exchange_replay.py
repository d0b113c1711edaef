"""`replay_exchange`: the certificate of an AllToAll, a Gather, a Scatter or an AllToAll-v, checked without a solver.

The lower bound. Let D(s, d) be the share of the message whose elements have their input at endpoint s and are wanted
at endpoint d. In any schedule of elements that are not mixed, each of them travels at least one path from s to d;
endpoints on the way may keep it and send it on. Every port P has a price pi_P >= 0, and the length of a link is the sum
of the prices of its ports. What a path loads, at these prices, is its length: at least dist(s, d). So

    demand = sum D(s, d) dist(s, d)  <=  sum_P pi_P load_P  <=  T * sum_P pi_P rate_P = T * supply,

T in seconds per byte of the message. Distances are computed again here, and what makes them lower bounds is only that
no link shortens one (`optcc.verify.bounds.exchange.distances`).

A flow that achieves a time is counted node by node: what an endpoint receives less what it sends on is its demand,
switches keep nothing, and no port carries more than its rate in that time. That it is not below the bound follows.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

from optcc.errors import SolverError
from optcc.topology import Topology
from optcc.verify.bounds.exchange import BlockFlow, ExchangeCertificate, least_paid
from optcc.verify.bounds.network import endpoint_gpus
from optcc.verify.bounds.replay import check_network, check_same


def replay_exchange(certificate: ExchangeCertificate, topology: Topology | None = None) -> None:
    """Checks every number of `certificate` and, if given, that its network and its ranks are those of `topology`.

    Raises SolverError for the first number that does not follow from the others; TopologyError if its network does not
    join endpoints that must exchange data.
    """
    network, demand = certificate.network, certificate.demand
    if topology is not None:
        fabric = check_network(network, topology)
        wanted = tuple(endpoint_gpus(topology, fabric=fabric))
        if demand.gpus != wanted:
            raise SolverError(f"certificate: ranks {list(demand.gpus)}: the topology has {list(wanted)}")
    crossing = least_paid(network, demand, certificate.prices)
    check_same("demand", certificate.crossing, crossing)
    supply = sum((p.rate * price for p, price in zip(network.ports, certificate.prices, strict=True)), Fraction(0))
    check_same("supply", certificate.supply, supply)
    check_same("seconds", certificate.seconds, certificate.size_bytes * crossing / supply if supply else Fraction(0))
    if certificate.achieved is not None:
        _check_flow(certificate, certificate.achieved)


def _check_flow(certificate: ExchangeCertificate, achieved: BlockFlow) -> None:
    network, demand = certificate.network, certificate.demand
    carried = [Fraction(0)] * len(network.ports)
    if set(achieved.loads) != set(demand.groups):
        raise SolverError(f"certificate: flows of {sorted(achieved.loads)}: must be of {sorted(demand.groups)}")
    for start, loads in achieved.loads.items():
        kept: dict[int, Fraction] = defaultdict(Fraction)
        for number, load in loads:
            if not 0 <= number < len(network.links) or load < 0:
                raise SolverError(f"certificate: load {load} of link {number}: must be of a link, and not negative")
            link = network.links[number]
            kept[link.head] += load
            kept[link.tail] -= load
            for each in link.ports:
                carried[each] += load
        sign = -1 if demand.to_sinks else 1
        for node in range(network.n_nodes):
            wanted = Fraction(sign * demand.groups[start].get(node, 0), demand.parts)
            if node != start and kept[node] != wanted:
                raise SolverError(
                    f"certificate: {network.nodes[node]} keeps {kept[node]} of the flow of {network.nodes[start]}: "
                    f"must be {wanted}"
                )
    for port, load in zip(network.ports, carried, strict=True):
        if load * certificate.size_bytes > achieved.seconds * port.rate:
            raise SolverError(
                f"certificate: port {port.name} carries {load * certificate.size_bytes} bytes: "
                f"more than {achieved.seconds * port.rate} in the time achieved"
            )
