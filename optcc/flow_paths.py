"""From the certificate of an exchange's bound to a schedule: the flow that achieves it, taken apart into paths.

FLOW_OF["alltoall"].build(topology, segments)      `optcc.schedules.flow`, with the paths of `find_paths`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache, partial
from heapq import heappop, heappush
from math import lcm
from typing import Any

from optcc.collective import Collective
from optcc.dsl import Definition
from optcc.errors import SolverUnknown, TopologyError
from optcc.schedules.flow import (
    BlockPath,
    block_ends,
    flow_all_to_all,
    flow_all_to_all_v,
    flow_gather,
    flow_scatter,
)
from optcc.topology import Topology
from optcc.verify.bounds.exchange import ExchangeCertificate
from optcc.verify.bounds.exchange_bound import exchange_bound
from optcc.verify.bounds.network import FlowNetwork, endpoint_gpus

_SIZE_BYTES = 2**30
_Links = tuple[int, ...]


@lru_cache(maxsize=64)
def find_paths(topology: Topology, collective: Collective) -> tuple[BlockPath, ...]:
    """The paths of a flow that achieves the bound of `collective`, in the order of its blocks.

    >>> paths = find_paths(Topology.parse("torus:4@50GB/s"), Collective("scatter", 4))
    >>> print(*(f"{share} {ranks}" for share, ranks in paths))
    1/4 (0,) 1/4 (0, 1) 1/8 (0, 1, 2) 1/8 (0, 3, 2) 1/4 (0, 3)

    Ranks must be endpoints of their own: one GPU a server, or NICs of GPUs. Raises TopologyError if some cannot reach
    others, and SolverError and SolverUnknown if no flow is found.
    """
    certificate, _ = exchange_bound(topology, collective, _SIZE_BYTES)
    ways = _ways(certificate) if certificate.demand.demands else {}
    found: list[BlockPath] = []
    for share, pair in block_ends(collective):
        if share:
            parts = [(Fraction(1), pair[:1])] if pair[0] == pair[1] else ways[pair]
            found += [BlockPath(share * part, ranks) for part, ranks in parts]
    return tuple(found)


def _ways(certificate: ExchangeCertificate) -> dict[tuple[int, int], list[tuple[Fraction, tuple[int, ...]]]]:
    """For each pair of ranks with a block its paths, each with its part of the block, the largest first."""
    network, demand, flow = certificate.network, certificate.demand, certificate.achieved
    if flow is None:
        raise SolverUnknown(f"bound of {demand.collective}: no flow is known that achieves it")
    scale = lcm(demand.parts, *(load.denominator for loads in flow.loads.values() for _, load in loads))
    found: dict[tuple[int, int], list[tuple[Fraction, tuple[int, ...]]]] = {}
    for start, loads in flow.loads.items():
        left = {link: int(load * scale) for link, load in loads}
        for far, count in demand.groups[start].items():
            whole = wanted = count * (scale // demand.parts)
            parts: dict[tuple[int, ...], int] = {}
            while wanted:
                links = _widest(network, left, start, far, backward=demand.to_sinks)
                carried = min(wanted, *(left[link] for link in links))
                for link in links:
                    left[link] -= carried
                ranks = _ranks_of(network, links)
                parts[ranks] = parts.get(ranks, 0) + carried
                wanted -= carried
            pair = (far, start) if demand.to_sinks else (start, far)
            found[pair] = sorted(
                ((Fraction(carried, whole), ranks) for ranks, carried in parts.items()),
                key=lambda each: (-each[0], each[1]),
            )
    return found


def _ranks_of(network: FlowNetwork, links: _Links) -> tuple[int, ...]:
    """The endpoints on a path of links."""
    nodes = (network.links[links[0]].tail, *(network.links[link].head for link in links))
    return tuple(node for node in nodes if node < len(network.endpoints))


def _widest(network: FlowNetwork, left: Mapping[int, int], start: int, far: int, *, backward: bool) -> _Links:
    """Links from `start` to `far` (`backward`: to `start`) whose least load is greatest; of several the fewest.

    What is left is a flow from `start` to all that still wants some, so there is a path to each of these.
    """
    onward: dict[int, list[tuple[int, int]]] = {}
    for link, load in left.items():
        if load:
            near, head = network.links[link].tail, network.links[link].head
            onward.setdefault(head if backward else near, []).append((link, near if backward else head))
    reached: dict[int, tuple[int, int]] = {}  # by node, the link by which it is reached and the node before
    line: list[tuple[int, int, int, int, int]] = [(-sum(left.values()), 0, start, -1, -1)]
    while line:
        load, hops, node, link, before = heappop(line)
        if node in reached:
            continue
        reached[node] = link, before
        if node == far:
            break
        for out, head in onward.get(node, ()):
            if head not in reached:
                heappush(line, (max(load, -left[out]), hops + 1, head, out, node))
    links = []
    node = far
    while node != start:
        link, node = reached[node]
        links.append(link)
    return tuple(links if backward else reversed(links))


def _configure(topology: Topology) -> Mapping[str, Any]:
    if max(endpoint_gpus(topology, fabric=True)) > 1:
        raise TopologyError(f"{topology!r}: servers pool their NICs: must have one GPU each, or NICs of GPUs")
    return {"find": partial(find_paths, topology), "server": topology.rank_server}


_SCHEDULES: Sequence[Definition] = (flow_all_to_all, flow_all_to_all_v, flow_gather, flow_scatter)
FLOW_OF: Mapping[str, Definition] = {each.collective: replace(each, configure=_configure) for each in _SCHEDULES}
"""By collective, the schedule of its flow."""
