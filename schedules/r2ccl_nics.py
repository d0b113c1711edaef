"""R2CCL (arXiv 2512.25059) on servers whose NICs belong to GPUs, every hop to another GPU's NIC charged.

    r2ccl-rails   the ring of each channel visits the servers in another order (`optcc.schedules.r2ccl.server_order`)
                  and changes rails where its neighbours have others: servers that kept all rails are bridges
    r2ccl-nics    R2CCL-AllReduce: the rings of all servers, beside them rings of the healthy ones on the share that the
                  degraded server has lost, whose part goes in before and comes back afterwards

R2CCL-Balance is `nccl-ring`, which divides its channels among the NICs that are left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from optcc.dsl import Program, schedule
from optcc.errors import TopologyError
from optcc.schedules.nccl_ring import (
    Ring,
    along_rings,
    around,
    channels,
    numbered,
    owners_by_rail,
    owners_of_nics,
    pipelines_of,
    ring_of,
)
from optcc.schedules.r2ccl import server_order
from optcc.topology import Topology


def reranked_channels(topology: Topology) -> Mapping[str, Any]:
    """A ring for each rail that the best pair of neighbours shares; others take theirs in turn.

    Raises TopologyError where NICs do not belong to GPUs, or in no order all neighbours share a rail.
    """
    owners_of_nics(topology)
    if not topology.rail_only:
        return channels(topology)
    order = server_order(topology)
    first = [sum(server.gpus for server in topology.servers[:at]) for at in range(len(order))]
    members = [range(first[at], first[at] + topology.servers[at].gpus) for at in order]
    owners = [owners_by_rail(topology.servers[at], first[at]) for at in order]
    shared = [sorted(owners[at].keys() & owners[(at + 1) % len(order)].keys()) for at in range(len(order))]
    rings = []
    for channel in range(max(map(len, shared))):
        rails = [each[channel % len(each)] for each in shared]
        ends = [(owners[at][rails[at - 1]], owners[at][rails[at]]) for at in range(len(order))]
        rings.append(ring_of(members, ends))
    return {"rings": tuple(rings)}


@schedule(
    name="r2ccl-rails",
    accepts="servers whose NICs belong to GPUs, with an order in which all neighbours share a rail",
    paper="R2CCL, arXiv 2512.25059: re-ranking",
    configure=reranked_channels,
)
def r2ccl_rails(program: Program, rings: Sequence[Ring]) -> None:
    """The rings of `nccl-ring` in an order in which neighbours share many rails.

    With c channels, m of them on the busiest NIC of rate b, it takes 2(p - 1)/p * m/c * n / b for many segments.

    >>> ring = Ring((0, 2, 1, 3), (-1,) * 4)
    >>> len(r2ccl_rails(n_ranks=4, rings=[ring]))
    24
    """
    for turn in around(program, rings):
        along_rings(program, turn)


def one_degraded(topology: Topology) -> Mapping[str, Any]:
    """The rings of all servers and of the healthy ones, the ranks of the degraded server, and the share it has lost.

    Raises TopologyError unless servers of one rate but one are behind a core, and all of the others' GPUs have NICs.
    """
    owners = owners_of_nics(topology)
    rates = [min(pair) for pair in zip(topology.out, topology.in_, strict=True)]
    slow = [at for at, rate in enumerate(rates) if rate < max(rates)]
    if topology.rail_only or len(slow) != 1 or len(rates) < 3:
        raise TopologyError(f"{topology!r}: must be three servers or more on one core, and one of them slower")
    (at,) = slow
    first = sum(server.gpus for server in topology.servers[:at])
    gone = range(first, first + topology.servers[at].gpus)
    others = [rank for rank in range(topology.n_ranks) if rank not in gone]
    healthy = Topology(tuple(server for number, server in enumerate(topology.servers) if number != at))
    if sorted(rank for number, each in enumerate(owners) if number != at for rank in set(each)) != others:
        raise TopologyError(f"{topology!r}: every GPU of the healthy servers must have a NIC")
    inner = [Ring(tuple(others[rank] for rank in ring.ranks), ring.through) for ring in channels(healthy)["rings"]]
    return {
        "rings": channels(topology)["rings"],
        "inner": tuple(inner),
        "degraded": tuple(gone),
        "exits": tuple(owners[at]),
        "lost": 1 - rates[at] / max(rates),
    }


@schedule(
    name="r2ccl-nics",
    accepts="servers whose NICs belong to GPUs, on one core, one of them slower",
    paper="R2CCL, arXiv 2512.25059: R2CCL-AllReduce",
    configure=one_degraded,
    one_topology="the rings of the healthy servers, and the chain of the degraded one's ranks, are those of its NICs",
)
def r2ccl_nics(
    program: Program,
    rings: Sequence[Ring],
    inner: Sequence[Ring],
    degraded: Sequence[int],
    exits: Sequence[int],
    lost: Fraction,
) -> None:
    """Rings of all servers on 1 - Y of the message, beside them rings of the healthy ones on Y = `lost`.

    The degraded server adds up its part of Y along a chain that ends at a GPU with a NIC, which seeds the section at
    the rank where the ring begins with it; from the rank where it ends, the result comes back to that GPU and goes down
    the chain. With p GPUs its NICs, of rate (1 - Y) B together, carry 2(p - 1)/p * (1 - Y) + Y of the message: that
    takes 2(p - 1)/p + Y/(1 - Y) in units of n/B if all of them carry as much, and more if channels do not divide by
    them (`nccl-ring`).

    >>> rings, inner = [Ring((0, 1, 2), (-1,) * 3)], [Ring((0, 1), (-1,) * 2)]
    >>> built = r2ccl_nics(n_ranks=3, rings=rings, inner=inner, degraded=[2], exits=[2], lost=Fraction(1, 2))
    >>> [str(each) for each in built if each.src == 2 and each.stage == "hand over"]
    ['2->0 s1 c0 reduce [hand over]', '2->1 s1 c1 reduce [hand over]']
    """
    outer, within = (pipelines_of(program, *each) for each in ((rings, 1 - lost), (inner, lost)))
    both = zip(zip(*outer, strict=True), zip(*within, strict=True), strict=True)
    for turn, (segments, inner_segments) in enumerate(both):
        sections = [
            (
                segment,
                section,
                ring.ranks[section],
                ring.ranks[section - 1],
                _chain(degraded, exits, turn + at + section),
            )
            for at, (segment, ring) in enumerate(zip(inner_segments, inner, strict=True))
            for section in range(len(ring.ranks))
        ]
        with program.stage("hand over"):
            for segment, section, begin, _, chain in sections:
                for src, dst in pairwise((*chain, begin)):
                    segment[section].reduce(src=src, dst=dst)
        along_rings(program, numbered(segments, rings))
        along_rings(program, numbered(inner_segments, inner), "healthy channel")
        with program.stage("deliver"):
            for segment, section, _, end, chain in sections:
                for src, dst in pairwise((end, *chain[::-1])):
                    segment[section].copy(src=src, dst=dst)


def _chain(ranks: Sequence[int], exits: Sequence[int], turn: int) -> tuple[int, ...]:
    """The ranks in an order that ends with one of the exits."""
    at = ranks.index(exits[turn % len(exits)]) + 1
    return (*ranks[at:], *ranks[:at])
