"""The ring as NCCL runs it on servers of several GPUs: a channel, that is a ring of its own, for each NIC.

A channel visits the GPUs of a server one after the other through the fabric and leaves for the next server over a NIC.
The order inside differs from channel to channel, so that together they use all NICs.

    behind one core    in at the GPU of one NIC, out from the GPU of another one
    rail-only          in and out over the same rail: the last GPU gives its data to the GPU with the NIC, which sends
                       them on (NCCL calls it PXN); so does the last GPU of a server with one NIC left

Where NICs are lost the channels are divided among those that are left, as R2CCL-Balance does: a server with half of its
NICs has two channels on each, and all rings are as slow as those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from optcc.dsl import Program, Segment, schedule
from optcc.errors import TopologyError
from optcc.topology import Nic, Server, Topology


class Ring(NamedTuple):
    """The ranks in their order, and for each the rank that forwards what it sends to the next one (-1: none)."""

    ranks: tuple[int, ...]
    through: tuple[int, ...]


def channels(topology: Topology) -> Mapping[str, Any]:
    """A ring for each NIC of the server that has most, or rail-only for each rail that all servers have."""
    members, heads = heads_of_channels(topology)
    if topology.rail_only:
        return {"rings": tuple(ring_of(members, [(rank, rank) for rank in each]) for each in heads)}
    before = owners_of_nics(topology)
    ends = [
        [(head, owners[(channel - 1) % len(owners)]) for head, owners in zip(each, before, strict=True)]
        for channel, each in enumerate(heads)
    ]
    return {"rings": tuple(ring_of(members, each) for each in ends)}


def heads_of_channels(topology: Topology) -> tuple[list[range], list[list[int]]]:
    """The ranks of each server; and for each channel the rank in each server by whose NIC it enters.

    There is a channel for each NIC of the server that has most, others take their NICs in turn; rail-only for each rail
    that all servers have. Raises TopologyError where NICs do not belong to GPUs, or no rail is left at all servers.
    """
    owners = owners_of_nics(topology)
    members, first = [], 0
    for server in topology.servers:
        members.append(range(first, first + server.gpus))
        first += server.gpus
    if not topology.rail_only:
        count = max(len(each) for each in owners)
        return members, [[each[channel % len(each)] for each in owners] for channel in range(count)]
    rails = sorted(set.intersection(*(set(kept) for kept in topology.rails_kept)))
    if not rails:
        raise TopologyError(f"{topology!r}: rail-only, and no rail is left at all servers")
    by_rail = [owners_by_rail(server, gpus.start) for server, gpus in zip(topology.servers, members, strict=True)]
    return members, [[each[rail] for each in by_rail] for rail in rails]


def owners_of_nics(topology: Topology) -> list[list[int]]:
    """For each server the ranks to which the NICs belong that it has left, by rail.

    Raises TopologyError where NICs do not belong to GPUs, and for a single server.
    """
    if topology.graph is not None or topology.wired is None:
        raise TopologyError(f"{topology!r}: NICs must belong to GPUs")
    if len(topology.servers) == 1:
        raise TopologyError(f"{topology!r}: must have several servers")
    first, found = 0, []
    for server in topology.servers:
        found.append([first + (nic.gpu or 0) for nic in sorted(server.nics, key=_place) if not nic.failed])
        first += server.gpus
    return found


def _place(nic: Nic) -> tuple[int, int]:
    return nic.rail, nic.gpu or 0


def owners_by_rail(server: Server, first: int) -> dict[int, int]:
    """The rank whose NIC is left on each rail, if the ranks of the server begin with `first`."""
    return {nic.rail: first + (nic.gpu or 0) for nic in sorted(server.nics, key=_place) if not nic.failed}


def ring_of(members: Sequence[range], ends: Sequence[tuple[int, int]]) -> Ring:
    """The ring through servers with these ranks, which enters and leaves each at these two."""
    ranks: list[int] = []
    through: list[int] = []
    for gpus, (entry, exit_) in zip(members, ends, strict=True):
        turned = [*range(entry, gpus.stop), *range(gpus.start, entry)]
        line = [rank for rank in turned if rank == entry or rank != exit_]
        line += [exit_] if exit_ != entry else []
        ranks += line
        through += [-1] * (len(line) - 1) + [exit_ if line[-1] != exit_ else -1]
    return Ring(tuple(ranks), tuple(through))


@schedule(
    name="nccl-ring",
    accepts="servers whose NICs belong to GPUs; rail-only: of which some rail is left at all",
    paper="NCCL: rings, PXN; R2CCL-Balance, arXiv 2512.25059, where NICs are lost",
    configure=channels,
)
def nccl_ring(program: Program, rings: Sequence[Ring]) -> None:
    """Reduce-scatter and all-gather around a ring for each channel, which has an equal part of the message.

    With c channels, m of them on the busiest NIC of rate b, it takes 2(p - 1)/p * m/c * n / b for many segments, as
    long as the fabrics are faster: a GPU carries 2(p - 1)/p of the message there, a little less without forwarding.

    >>> ring = Ring((0, 1, 2, 3), (-1, 0, -1, 2))
    >>> print(*list(nccl_ring(n_ranks=4, rings=[ring]))[:3])
    0->1 s0 c0 reduce [reduce-scatter of channel 0] 1->0 s0 c3 copy [reduce-scatter of channel 0] \
0->2 s0 c3 reduce [reduce-scatter of channel 0]
    """
    for segments in zip(*pipelines_of(program, rings, Fraction(1)), strict=True):
        along_rings(program, rings, segments)


def pipelines_of(program: Program, rings: Sequence[Ring], share: Fraction) -> list[Iterator[Segment]]:
    """A pipeline for each ring, which have equal parts of this share of the message."""
    scratch = int(any(max(ring.through, default=-1) >= 0 for ring in rings))
    return [program.pipeline(sections=len(ring.ranks), share=share / len(rings), scratch=scratch) for ring in rings]


def along_rings(program: Program, rings: Sequence[Ring], segments: Sequence[Segment], called: str = "channel") -> None:
    """A segment of each ring, reduce-scatter and all-gather, in stages that have this name."""
    for number, (segment, ring) in enumerate(zip(segments, rings, strict=True)):
        with program.stage(f"reduce-scatter of {called} {number}"):
            for step in range(len(ring.ranks) - 1):
                _step(segment, ring, -step, reduces=True)
    for number, (segment, ring) in enumerate(zip(segments, rings, strict=True)):
        with program.stage(f"all-gather of {called} {number}"):
            for step in range(len(ring.ranks) - 1):
                _step(segment, ring, 1 - step, reduces=False)


def _step(segment: Segment, ring: Ring, ahead: int, *, reduces: bool) -> None:
    """Each rank passes section `ahead` places further than its own to the next one."""
    p = len(ring.ranks)
    for place, (src, through) in enumerate(zip(ring.ranks, ring.through, strict=True)):
        section, dst = (place + ahead) % p, ring.ranks[(place + 1) % p]
        chunk = segment[section]
        if through >= 0:
            chunk.copy(src=src, dst=through, into=segment.scratch(section))
            chunk, src = segment.scratch(section), through
        if reduces:
            chunk.reduce(src=src, dst=dst, into=segment[section])
        else:
            chunk.copy(src=src, dst=dst, into=segment[section])
