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

from optcc.dsl import Chunk, Program, Segment, schedule
from optcc.errors import ScheduleError, TopologyError
from optcc.topology import Nic, Server, Topology


class Ring(NamedTuple):
    """The ranks in their order, and for each the rank that forwards what it sends to the next one (-1: none)."""

    ranks: tuple[int, ...]
    through: tuple[int, ...]


RingTurn = tuple[tuple[int, Segment, Ring], ...]
"""For each ring its number, a segment, and the ring."""


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
    0->1 s0 c0 reduce [reduce-scatter of channel 0] 1->0 s0 c1 copy [reduce-scatter of channel 0] \
0->2 s0 c1 reduce [reduce-scatter of channel 0]
    """
    for turn in around(program, rings):
        along_rings(program, turn)


def pipelines_of(program: Program, rings: Sequence[Ring], share: Fraction) -> list[Iterator[Segment]]:
    """A pipeline for each ring, which have equal parts of this share of the message."""
    scratch = int(any(max(ring.through, default=-1) >= 0 for ring in rings))
    return [program.pipeline(sections=len(ring.ranks), share=share / len(rings), scratch=scratch) for ring in rings]


def around(program: Program, rings: Sequence[Ring]) -> Iterator[RingTurn]:
    """A turn is a segment of every ring; the rings have equal parts of the message.

    A proof for all ranks need not read how rings are found, nor what goes through other ranks
    (`optcc.verify.all_ranks`): a ring has every rank once, else this raises ScheduleError, and `reduce_next` and
    `copy_next` write into no chunk but the next rank's and scratch space, which nothing else here reads.
    """
    for ring in rings:
        program.in_order(ring.ranks)
        if len(ring.through) != len(ring.ranks):
            raise ScheduleError(f"{len(ring.through)} ranks to go through: must be {len(ring.ranks)}, -1 for none")
    for segments in zip(*pipelines_of(program, rings, Fraction(1)), strict=True):
        yield numbered(segments, rings)


def numbered(segments: Sequence[Segment], rings: Sequence[Ring]) -> RingTurn:
    """A turn of these segments."""
    return tuple((number, segment, rings[number]) for number, segment in enumerate(segments))


def along_rings(program: Program, turn: RingTurn, called: str = "channel") -> None:
    """A segment of each ring, reduce-scatter and all-gather, in stages that have this name."""
    for number, segment, ring in turn:
        with program.stage(f"reduce-scatter of {called} {number}"):
            for step in range(len(ring.ranks) - 1):
                for place in range(len(ring.ranks)):
                    reduce_next(segment, ring, place, (place - step) % len(ring.ranks))
    for number, segment, ring in turn:
        with program.stage(f"all-gather of {called} {number}"):
            for step in range(len(ring.ranks) - 1):
                for place in range(len(ring.ranks)):
                    copy_next(segment, ring, place, (place + 1 - step) % len(ring.ranks))


def reduce_next(segment: Segment, ring: Ring, place: int, section: int) -> None:
    """The rank at this place passes a section to the next one, perhaps through another rank, which adds it up."""
    chunk, src, dst = _through(segment, ring, place, section)
    chunk.reduce(src=src, dst=dst, into=segment[section])


def copy_next(segment: Segment, ring: Ring, place: int, section: int) -> None:
    """`reduce_next`, but the next rank stores it in place of its own."""
    chunk, src, dst = _through(segment, ring, place, section)
    chunk.copy(src=src, dst=dst, into=segment[section])


def _through(segment: Segment, ring: Ring, place: int, section: int) -> tuple[Chunk, int, int]:
    """The chunk that goes to the next rank, the rank that sends it, and the next one."""
    src, through, dst = ring.ranks[place], ring.through[place], ring.ranks[(place + 1) % len(ring.ranks)]
    if through < 0:
        return segment[section], src, dst
    segment[section].copy(src=src, dst=through, into=segment.scratch(section))
    return segment.scratch(section), through, dst
