"""AllGather and ReduceScatter in stars: a slice goes from its server straight to each other one, by one NIC of each.

A server must receive what the others own once, and send what it owns to each of them: (N - 1)/N of the message through
its NICs, whatever the schedule, which is what the bound says where NICs are the bottleneck. A star over servers does
just that, in two hops: a NIC of the owner's server sends to a NIC of another server, whose GPU passes the data on to
the others there. What is left to choose is which NICs: each slice takes those of its owner's server and of the other
one that have least to do so far, so NICs that were lost, or are slow, need no linear program. A GPU without a NIC hands
its slice to the GPU of the NIC first, over the fabric (PXN).

The order is that of a round-robin tournament: in phase d every server s exchanges with s + d, so no two senders meet at
one receiver, and all NICs begin at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import product
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from optcc.arrays import Column, column
from optcc.dsl import Program, Segment, pure, schedule
from optcc.errors import TopologyError
from optcc.schedules.other_collectives import slices
from optcc.schedules.server_trees import ServerNetwork
from optcc.topology import Topology

TURNS_MAX = 64
"""Turns that are chosen; later ones repeat them."""


class Edges(NamedTuple):
    """Edges of the star of one slice between two servers, or inside its owner's: data go from `parents[i]` to
    `children[i]`, those that are needed first in front."""

    parents: Column
    children: Column


Star = Sequence[Edges]
"""Of one slice: inside its owner's server, then to the server that is d further on, for d from 1."""


def servers_with_nics(topology: Topology) -> Mapping[str, Any]:
    """The servers and the NICs of their GPUs.

    Raises TopologyError where NICs do not belong to GPUs, for a single server, and for two servers without a common
    rail.
    """
    if topology.graph is not None or topology.wired is None:
        raise TopologyError(f"{topology!r}: NICs must belong to GPUs")
    if len(topology.servers) == 1:
        raise TopologyError(f"{topology!r}: must have several servers")
    network = ServerNetwork.of(topology)
    rails = [{nic.rail for nic in nics} for nics in network.nics]
    for (a, one), (b, other) in product(enumerate(rails), repeat=2):
        if not one & other:
            raise TopologyError(f"{topology!r}: servers {a} and {b} share no rail")
    return {"network": network}


_OF_STARS: Mapping[str, Any] = {
    "accepts": "servers whose NICs belong to GPUs; rail-only: every two of which share a rail",
    "paper": "optcc, docs/schedules.md",
    "configure": servers_with_nics,
    "one_topology": "its stars are made from the NICs and rates of all servers",
}


@schedule(name="star-all-gather", collective="allgather", **_OF_STARS)
def star_all_gather(program: Program, network: ServerNetwork) -> None:
    """Each slice goes to one GPU of every other server, which passes it on to the others there.

    With N servers of g GPUs, NICs of b a server together and fabrics of f a GPU, and k segments of each slice

        n * max((N - 1)/N / b, (g - 1)/g / f)

    and g / (p k) of the message over a fabric at the end; a NIC of rate r must leave its GPU's fabric port room for
    (g - 1) r.

    >>> network = servers_with_nics(Topology.parse("2x2@50GB/s+450GB/s"))["network"]
    >>> print(*list(star_all_gather(n_ranks=4, network=network))[:3], sep="; ")
    0->1 s0 c0 copy [slice 0]; 1->0 s1 c0 copy [slice 1]; 2->3 s2 c0 copy [slice 2]
    """
    for segments, stars in _turns(program, network):
        for phase in range(len(network.gpus)):
            for owner, (segment, star) in enumerate(zip(segments, stars, strict=True)):
                parents, children = star[phase]
                with program.stage(f"slice {owner}"):
                    segment.copy(section=column(np.zeros_like(parents)), src=parents, dst=children)


@schedule(name="star-reduce-scatter", collective="reducescatter", **_OF_STARS)
def star_reduce_scatter(program: Program, network: ServerNetwork) -> None:
    """`star_all_gather` backwards: one GPU of every server adds up what its server has of a slice, and sends it.

    The same time; at the start the fabrics work for g / (p k) of the message before a NIC can send.

    >>> network = servers_with_nics(Topology.parse("2x2@50GB/s+450GB/s"))["network"]
    >>> print(*list(star_reduce_scatter(n_ranks=4, network=network))[:2], sep="; ")
    3->2 s0 c0 reduce [slice 0]; 2->0 s0 c0 reduce [slice 0]
    """
    phases = *range(len(network.gpus) - 1, 0, -1), 0
    for segments, stars in _turns(program, network):
        for phase in phases:
            for owner, (segment, star) in enumerate(zip(segments, stars, strict=True)):
                parents, children = star[phase]
                with program.stage(f"slice {owner}"):
                    segment.reduce(section=column(np.zeros_like(parents)), src=children[::-1], dst=parents[::-1])


def _turns(program: Program, network: ServerNetwork) -> Iterator[tuple[tuple[Segment, ...], Sequence[Star]]]:
    """In each turn a segment of every rank's slice, with its star."""
    return zip(slices(program), stars_in_turn(network), strict=False)


@pure
def stars_in_turn(network: ServerNetwork) -> Iterator[Sequence[Star]]:
    """For turn after turn the star of every slice, by owner; endless.

    The turns repeat as soon as all NICs of each server have the same to do, for their rates.
    """
    work = _Work(network)
    turns: list[Sequence[Star]] = []
    while len(turns) < TURNS_MAX and not (turns and work.is_even):
        turns.append(work.stars())
        yield turns[-1]
    while True:
        yield from turns


class _Work:
    """What NICs have to do so far: `busy[way][s][i]` is how long NIC i of server s is, out (0) and in (1).

    `each[s][i]` is how long a copy of a segment takes it: 1/rate, in the largest unit in which all are whole numbers.
    """

    def __init__(self, network: ServerNetwork) -> None:
        self.network = network
        self.first = [sum(network.gpus[:server]) for server in range(len(network.gpus))]
        slowness = [[1 / nic.rate for nic in nics] for nics in network.nics]
        unit = Fraction(1, lcm(*(each.denominator for nics in slowness for each in nics)))
        self.each = [[int(each / unit) for each in nics] for nics in slowness]
        self.busy = [[[0] * len(nics) for nics in self.each] for _ in range(2)]

    @property
    def is_even(self) -> bool:
        """True if the NICs of each server have the same to do, each way."""
        return all(min(nics) == max(nics) for way in self.busy for nics in way)

    def stars(self) -> list[Star]:
        """The stars of the next turn."""
        gpus, n_servers = self.network.gpus, len(self.network.gpus)
        found: dict[int, list[tuple[int, int, int]]] = {}
        for further, gpu, server in product(range(1, n_servers), range(max(gpus)), range(n_servers)):
            if gpu < gpus[server]:
                other = (server + further) % n_servers
                found.setdefault(self.first[server] + gpu, []).append((other, *self._take(server, gpu, other)))
        return [
            self._star(server, gpu, found[self.first[server] + gpu])
            for server in range(n_servers)
            for gpu in range(gpus[server])
        ]

    def _take(self, server: int, gpu: int, other: int) -> tuple[int, int]:
        """The GPUs of the two NICs that a slice of `gpu` takes to server `other`, which are charged with it."""
        out, in_ = self._least_by_rail(0, server, gpu), self._least_by_rail(1, other, gpu)
        rail = min(out.keys() & in_.keys(), key=lambda rail: (max(out[rail][0], in_[rail][0]), out[rail][1], rail))
        exit_, entry = out[rail][2], in_[rail][2]
        self.busy[0][server][exit_] += self.each[server][exit_]
        self.busy[1][other][entry] += self.each[other][entry]
        return self.network.nics[server][exit_].gpu, self.network.nics[other][entry].gpu

    def _least_by_rail(self, way: int, server: int, gpu: int) -> dict[int, tuple[int, int, int]]:
        """By rail the NIC that is done first with one copy more: when, how far from `gpu`, and its number."""
        best: dict[int, tuple[int, int, int]] = {}
        for number, nic in enumerate(self.network.nics[server]):
            distance = (nic.gpu - gpu) % max(self.network.gpus)
            one = self.busy[way][server][number] + self.each[server][number], distance, number
            best[nic.rail] = min(best.get(nic.rail, one), one)
        return best

    def _star(self, server: int, gpu: int, hops: Sequence[tuple[int, int, int]]) -> Star:
        """The star of a slice: its owner, and for each other server that and the GPUs of both NICs."""
        first, own = self.first[server], self.first[server] + gpu
        exits = dict.fromkeys(exit_ for _, exit_, _ in hops if exit_ != gpu)
        inside = [*exits, *(each for each in self._others(server, gpu) if each not in exits)]
        star = [Edges(column([own] * len(inside)), column([first + each for each in inside]))]
        for other, exit_, entry in hops:
            there = self.first[other]
            others = [there + each for each in self._others(other, entry)]
            parents = [first + exit_, *[there + entry] * len(others)]
            star.append(Edges(column(parents), column([there + entry, *others])))
        return star

    def _others(self, server: int, gpu: int) -> list[int]:
        """The GPUs of a server beside `gpu`, from the next one on."""
        gpus = self.network.gpus[server]
        return [(gpu + step) % gpus for step in range(1, gpus)]
