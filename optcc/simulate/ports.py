"""Which ports a topology has and which two of them each transfer uses.

A transfer between servers goes through the out port of one server and the in port of the other, its surviving NICs
pooled; if they are in different pods, also up the uplink of one and down that of the other. Inside a server it goes
through the fabric ports of two GPUs, or through none if the fabric is never the bottleneck. A local operation (src =
dst) uses none.

Where GPUs are linked (`Topology.wired`), the first link of a transfer's route is its out port, the last one its in
port; those between two switches are its uplinks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column, column
from optcc.graph import Graph
from optcc.routing import first_and_last
from optcc.simulate.dependencies import IN, LOCAL, NO_PORT, OUT, PAIR
from optcc.topology import Topology
from optcc.transfers import Transfers

Small = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PortMap:
    """Out ports have even numbers; the in port that belongs to one comes next. Rates in bytes/s.

    `server_port[s]` is the out port of server s, `gpu_port[r]` that of rank r inside its server, `pod_port[s]` the
    uplink of the pod of server s, with its way down next; -1: there is none.

    In a graph the ports of a GPU and a switch are the links between them, and those of two GPUs the ends of a cable.
    Its transfers are those between `ends`: link l stands for a sender and `links + l` for a receiver, each a server
    of its own.
    """

    names: tuple[str, ...]
    rates: tuple[Fraction, ...]
    server_of: Column
    server_port: Column
    gpu_port: Column
    pod_port: Column
    graph: Graph | None = None
    leaf: Column | None = None
    between: Column | None = None

    @classmethod
    def of_graph(cls, graph: Graph) -> PortMap:
        """The ports of GPUs and switches that are linked. `leaf` is the switch at the end of a link, and `between` has
        the uplinks from one switch to another; its last line is for no switch."""
        p, n = len(graph.gpus), len(graph.links)
        places: dict[tuple[int, int], int] = {}  # of a pair of links, from node to node and back; a cable by itself
        names: list[str] = []
        rates: list[Fraction] = []
        number = np.zeros(n, dtype=np.int64)
        for at, link in enumerate(graph.links):
            a, b = link.tail, link.head
            cable = a < p and b < p
            key = (a, b) if cable else (min(a, b), max(a, b))
            if key not in places:
                places[key] = len(names)
                names += [f"{graph.nodes[a]}->{graph.nodes[b]}{way}" for way in ("", " in")]
                rates += [link.rate, link.rate]
            # The first of a pair is what leaves a GPU, and what goes to the switch of the higher number.
            number[at] = places[key] + int(not cable and a > b)
            if not cable:
                names[number[at]], rates[number[at]] = graph.name_of(link), link.rate
        leaf = np.array(
            [max(link.head, link.tail) - p if max(link.head, link.tail) >= p else -1 for link in graph.links]
        )
        between = np.full((len(graph.switches) + 1, len(graph.switches) + 1, 2), NO_PORT)
        uplinked = [route for routes in graph.routes for route in routes.values() if len(route) > 2]
        down = {route[2] for route in uplinked if len(route) > 3}
        for route in uplinked:
            for side, middle in enumerate(route[1:-1]):
                between[leaf[route[0]], leaf[route[-1]], 1 if middle in down else side] = number[middle]
        port = np.tile(number // 2 * 2, 2)
        none = np.full(2 * n, -1)
        return cls(tuple(names), tuple(rates), np.arange(2 * n), port, none, none, graph, np.tile(leaf, 2), between)

    def ends(self, transfers: Transfers) -> tuple[Column, Column]:
        """The sender and the receiver of each transfer, as the ports know them.

        Raises TopologyError for a transfer between GPUs of a graph that no route joins.
        """
        if self.graph is None:
            return transfers.src, transfers.dst
        first, last = first_and_last(transfers, self.graph)
        local = first < 0
        return column(np.where(local, 0, first)), column(np.where(local, 0, len(self.graph.links) + last))

    @classmethod
    def of(cls, topology: Topology) -> PortMap:
        """The ports of `topology`."""
        wired = topology.wired
        if wired is not None:
            return cls.of_graph(wired)
        names: list[str] = []
        rates: list[Fraction] = []
        server_port = np.full(len(topology.servers), -1, dtype=np.int64)
        gpu_port = np.full(topology.n_ranks, -1, dtype=np.int64)
        pooled: dict[int, tuple[Fraction, Fraction]] = {}  # servers mostly share one tuple of NICs
        rank = 0
        for index, server in enumerate(topology.servers):
            if len(topology.servers) > 1:
                server_port[index] = len(names)
                names += [f"out {server.name}", f"in {server.name}"]
                if id(server.nics) not in pooled:
                    pooled[id(server.nics)] = server.out, server.in_
                rates += pooled[id(server.nics)]
            for gpu in range(server.gpus):
                if server.fabric is not None:
                    gpu_port[rank] = len(names)
                    names += [f"out {server.name} gpu {gpu}", f"in {server.name} gpu {gpu}"]
                    rates += [server.fabric, server.fabric]
                rank += 1
        up = len(names) + 2 * np.array(topology.server_pod)
        pod_port = np.where(up >= len(names), up, -1)
        for pod in topology.pods:
            names += [f"up {pod.name}", f"down {pod.name}"]
            rates += [pod.up, pod.down]
        return cls(tuple(names), tuple(rates), np.array(topology.rank_server), server_port, gpu_port, pod_port)

    @property
    def has_pods(self) -> bool:
        """True if some transfers may use an uplink."""
        return bool((self.pod_port >= 0).any() or (self.between is not None and (self.between >= 0).any()))

    def used_by(self, transfers: Transfers) -> tuple[Column, Column]:
        """For each transfer its out port and its in port; below zero: it uses none."""
        src, dst = self.ends(transfers)
        from_, to = self.server_of[src], self.server_of[dst]
        out = np.where(from_ != to, self.server_port[from_], self.gpu_port[src])
        in_ = np.where(from_ != to, self.server_port[to], self.gpu_port[dst]) + 1
        used = (src != dst) & (out >= 0)
        return np.where(used, out, NO_PORT), np.where(used, in_, NO_PORT)

    def uplinks(self, transfers: Transfers) -> tuple[Column, Column]:
        """For each transfer the uplink that it goes up and the one that it comes down; below zero: none."""
        src, dst = self.ends(transfers)
        return self.uplinks_between(self.server_of[src], self.server_of[dst])

    def uplinks_between(self, src: Column, dst: Column) -> tuple[Column, Column]:
        """The same for transfers between servers."""
        if self.between is not None and self.leaf is not None:
            ways = self.between[self.leaf[src], self.leaf[dst]]
            return ways[:, 0], ways[:, 1]
        up, down = self.pod_port[src], self.pod_port[dst]
        leaves = up != down
        return np.where(leaves, up, NO_PORT), np.where(leaves & (down >= 0), down + 1, NO_PORT)


def assign(
    src: Column,
    dst: Column,
    sizes: Column,
    server_of: Column,
    server_port: Column,
    gpu_port: Column,
    rows: Small,
    carried: Column,
    table: Small,
    ends: Small,
) -> int:
    """Writes the ports of each transfer into its row, and adds its bytes to what they carry.

    If `table` has any room, numbers the pairs too, and returns how many there are: it is a hash table of them, more
    than half of it empty and its length a power of two.
    """
    n_pairs = 0
    for transfer in range(len(src)):
        a, b = src[transfer], dst[transfer]
        if a == b:
            rows[transfer, OUT] = LOCAL
            continue
        outside = server_of[a] != server_of[b]
        out = server_port[server_of[a]] if outside else gpu_port[a]
        in_ = server_port[server_of[b]] if outside else gpu_port[b]
        if out < 0:
            rows[transfer, OUT] = NO_PORT
            continue
        rows[transfer, OUT] = out
        rows[transfer, IN] = in_ + 1
        carried[out] += sizes[transfer]
        carried[in_ + 1] += sizes[transfer]
        if len(table):
            slot = (out * 40503 + (in_ + 1) * 9973) & (len(table) - 1)
            while table[slot] >= 0 and (ends[table[slot], 0] != out or ends[table[slot], 1] != in_ + 1):
                slot = slot + 1 if slot + 1 < len(table) else 0
            if table[slot] < 0:
                table[slot] = n_pairs
                ends[n_pairs, 0] = out
                ends[n_pairs, 1] = in_ + 1
                n_pairs += 1
            rows[transfer, PAIR] = table[slot]
    return n_pairs


FIRST_PAIR, N_PAIRS = range(2)


class Pairs(NamedTuple):
    """Pairs of an out and an in port, and for each port those of its pairs that are waiting (exclusive) or flowing
    (fair).

    `ends[pair]` are its out port, its in port, where there are pods the two uplinks between them (-1: none), and then
    its places in their lists. That of port q is `members[first:first + count]`, where `lists[q]` are its `FIRST_PAIR`
    and `N_PAIRS`.
    """

    ends: Small
    members: Small
    lists: Small


def pair_table(n_transfers: int, n_ports: int) -> tuple[Small, Small]:
    """Room for `assign` to number the pairs of so many transfers in; of none, none."""
    bound = min(n_ports * n_ports // 4, n_transfers)
    table = np.full(1 << (2 * bound).bit_length() if bound else 0, -1, dtype=np.int32)
    return table, np.zeros((bound, 2), dtype=np.int32)


def make_pairs(ends: Small, ports: PortMap) -> Pairs:
    """The pairs with these two ends each."""
    n_ports = len(ports.names)
    if ports.has_pods:
        server = np.full(n_ports, -1)
        has_port = np.flatnonzero(ports.server_port >= 0)
        server[ports.server_port[has_port]] = has_port
        src = server[ends[:, 0]]
        outside = np.flatnonzero(src >= 0)
        between = np.full_like(ends, -1)
        between[outside] = np.column_stack(ports.uplinks_between(src[outside], server[ends[outside, 1] - 1]))
        ends = np.hstack((ends, between))
    used = ends[ends >= 0].ravel()
    places = np.zeros_like(ends)
    lists = np.zeros((n_ports, 2), dtype=np.int32)
    lists[1:, FIRST_PAIR] = np.cumsum(np.bincount(used, minlength=n_ports))[: max(n_ports - 1, 0)]
    return Pairs(np.hstack((ends, places)).astype(np.int32), np.zeros(len(used), dtype=np.int32), lists)


def link(pairs: Pairs, pair: int) -> None:
    """Adds `pair` to the lists of its ports."""
    sides = pairs.ends.shape[1] >> 1
    for side in range(sides):
        port = pairs.ends[pair, side]
        if port >= 0:
            at = pairs.lists[port, FIRST_PAIR] + pairs.lists[port, N_PAIRS]
            pairs.members[at] = pair
            pairs.ends[pair, sides + side] = at
            pairs.lists[port, N_PAIRS] += 1


def unlink(pairs: Pairs, pair: int) -> None:
    """Takes `pair` out of the lists of its ports."""
    sides = pairs.ends.shape[1] >> 1
    for side in range(sides):
        port = pairs.ends[pair, side]
        if port >= 0:
            pairs.lists[port, N_PAIRS] -= 1
            moved = pairs.members[pairs.lists[port, FIRST_PAIR] + pairs.lists[port, N_PAIRS]]
            at = pairs.ends[pair, sides + side]
            pairs.members[at] = moved
            pairs.ends[moved, sides + side] = at


KERNELS: tuple[Callable[..., Any], ...] = (assign, link, unlink)
