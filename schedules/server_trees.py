"""Trees of one share each over servers whose NICs belong to GPUs: how many, and which NIC carries which edge.

M trees carry a part 1/M of the message each, up and down the same edges. In the time T a NIC of rate r carries so many
whole edges, floor(M T r), and no fraction of one. What is left to choose is combinatorial, with no linear program:

    degrees    each server gets as many edges, of all trees together, as its NICs carry: any whole numbers d with
               d >= M and sum 2 M (N - 1) will do
    trees      each tree takes its N - 2 further edges from as few servers as possible, so most trees are stars, or two
               or three joined to each other: hops cost time to fill. Where the uplinks of pods need it, some trees
               (`frugal`) are such trees in each pod, joined by one edge between pods
    NICs       each edge takes the NIC that has most left at either end; rail-only, two NICs of one rail, and an
               earlier edge may change to another rail
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from heapq import heapify, heappop, heapreplace
from itertools import accumulate
from typing import NamedTuple

from optcc.topology import Topology

TREES_MAX = 64
LOSS_MAX = Fraction(11, 10)
"""No number of trees is tried that takes longer than so many times what whatever number takes."""
FILL = Fraction(1, 5000)
"""What a hop of one tree more costs, of the time: each hop of a chunk shares its port with those of the other trees, so
a pipeline of some 5,000 chunks takes so much longer to fill."""
HOPS_MIN = 3
"""Of trees over several GPUs a server."""
TRIES_MAX = 12


class NicPort(NamedTuple):
    """What GPU `gpu` of a server can send and receive at once on a rail (0: the core joins them), bytes/s."""

    gpu: int
    rail: int
    rate: Fraction


class NicEdge(NamedTuple):
    """An edge of a tree over servers, and the GPUs at its ends, numbered in their servers."""

    child: int
    parent: int
    child_gpu: int
    parent_gpu: int


class ServerTree(NamedTuple):
    """A tree over servers, its edges from the root on."""

    root: int
    edges: tuple[NicEdge, ...]


@dataclass(frozen=True, slots=True)
class ServerNetwork:
    """Servers with the NICs that they have left; `pod_of[s]` is the pod of server s, or -1, `uplinks` are by pod."""

    gpus: tuple[int, ...]
    fabric: tuple[Fraction | None, ...]
    nics: tuple[tuple[NicPort, ...], ...]
    pod_of: tuple[int, ...]
    uplinks: tuple[Fraction, ...]
    rates: tuple[Fraction, ...] = field(init=False)
    """All that ports carry, the least first."""
    rate_of_nics: tuple[tuple[int, ...], ...] = field(init=False)
    """For each NIC which of `rates` it has: fractions are slow to hash."""
    rate_of_fabric: tuple[int | None, ...] = field(init=False)

    def __post_init__(self) -> None:
        found = {nic.rate for nics in self.nics for nic in nics} | set(self.uplinks)
        rates = tuple(sorted(found | {rate for rate in self.fabric if rate is not None}))
        number = {rate: at for at, rate in enumerate(rates)}
        object.__setattr__(self, "rates", rates)
        object.__setattr__(self, "rate_of_nics", tuple(tuple(number[nic.rate] for nic in nics) for nics in self.nics))
        fabric = tuple(None if rate is None else number[rate] for rate in self.fabric)
        object.__setattr__(self, "rate_of_fabric", fabric)

    @classmethod
    def of(cls, topology: Topology) -> ServerNetwork:
        """Of a topology without a graph, whose NICs belong to GPUs; each way at the smaller of both rates."""
        nics = []
        for server in topology.servers:
            rates: dict[tuple[int, int], tuple[Fraction, Fraction]] = {}
            for nic in server.nics:
                if not nic.failed:
                    place = nic.gpu or 0, nic.rail if topology.rail_only else 0
                    out, in_ = rates.get(place, (Fraction(0), Fraction(0)))
                    rates[place] = out + nic.out, in_ + nic.in_
            nics.append(tuple(NicPort(gpu, rail, min(both)) for (gpu, rail), both in sorted(rates.items())))
        pod_of = [-1] * len(topology.servers)
        for number, pod in enumerate(topology.pods):
            for server_number in pod.servers:
                pod_of[server_number] = number
        return cls(
            tuple(server.gpus for server in topology.servers),
            tuple(server.fabric for server in topology.servers),
            tuple(nics),
            tuple(pod_of),
            tuple(min(pod.up, pod.down) for pod in topology.pods),
        )

    @property
    def first(self) -> tuple[int, ...]:
        """The rank of the first GPU of each server, and the number of all ranks."""
        return (0, *accumulate(self.gpus))

    @property
    def least(self) -> Fraction:
        """Seconds for each byte that any number of such trees takes at least."""
        pooled = [sum((nic.rate for nic in nics), Fraction(0)) for nics in self.nics]
        inside = [Fraction(0)]
        if None not in self.fabric:
            # Both ends of each of a tree's edges are at a fabric port or a NIC.
            fabrics = sum((gpus * (rate or 0) for gpus, rate in zip(self.gpus, self.fabric, strict=True)), Fraction(0))
            inside.append(2 * (sum(self.gpus) - 1) / (fabrics + sum(pooled, Fraction(0))))
        across = [1 / rate for rate in self.uplinks]
        return max(1 / min(pooled), 2 * (len(pooled) - 1) / sum(pooled, Fraction(0)), *inside, *across)


@dataclass(slots=True)
class Room:
    """How many edges of M trees each port has left in a time: by server and NIC, by server for each of its GPUs (None:
    any number), and by pod."""

    trees: int
    seconds: Fraction
    nics: list[list[int]]
    fabric: list[int | None]
    uplinks: list[int]

    @classmethod
    def of(cls, network: ServerNetwork, trees: int, seconds: Fraction) -> Room:
        """Of `trees` in `seconds` for each byte."""
        edges = [int(trees * seconds * rate) for rate in network.rates]
        return cls(
            trees,
            seconds,
            [[edges[rate] for rate in nics] for nics in network.rate_of_nics],
            [None if rate is None else edges[rate] for rate in network.rate_of_fabric],
            [int(trees * seconds * rate) for rate in network.uplinks],
        )

    def suffices(self, network: ServerNetwork) -> bool:
        """False if it is certain that so many trees do not fit."""
        n, m = len(self.nics), self.trees
        servers = [sum(nics) for nics in self.nics]
        if min(servers) < m or sum(servers) < 2 * m * (n - 1) or any(room < m for room in self.uplinks):
            return False
        inside = [
            (gpus, room) for gpus, room in zip(network.gpus, self.fabric, strict=True) if room is not None and gpus > 1
        ]
        if any(room < m for _, room in inside):
            return False
        # What a fabric has no room for, NICs must have: an edge into a server in place of one inside.
        lacking = sum(max(0, 2 * (gpus - 1) * m - gpus * room) for gpus, room in inside)
        if lacking > sum(servers) - 2 * m * (n - 1):
            return False
        by_rail: dict[int, list[int]] = {}
        for server in range(n):
            on_rail: dict[int, int] = {}
            for nic, room in zip(network.nics[server], self.nics[server], strict=True):
                on_rail[nic.rail] = on_rail.get(nic.rail, 0) + room
            for rail, room in on_rail.items():
                by_rail.setdefault(rail, []).append(room)
        edges = sum(min(sum(rooms) // 2, sum(rooms) - max(rooms), m * (len(rooms) - 1)) for rooms in by_rail.values())
        return edges >= m * (n - 1)


def numbers_of_trees(network: ServerNetwork) -> list[tuple[int, Fraction]]:
    """How many trees to try and in what time, the most promising first (if they are shallow)."""
    found: list[tuple[Fraction, int, Fraction]] = []
    least, rates = network.least, network.rates
    for trees in range(1, TREES_MAX + 1):
        times = set()
        for rate in rates:
            first = -int(-trees * least * rate // 1)
            times |= {Fraction(edges) / (trees * rate) for edges in range(first, int(first * LOSS_MAX) + 2)}
        feasible = (
            each
            for each in sorted(times)
            if least <= each <= least * LOSS_MAX and Room.of(network, trees, each).suffices(network)
        )
        found += [(filled(each, trees, HOPS_MIN), trees, each) for each, _ in zip(feasible, range(3), strict=False)]
    return [(trees, seconds) for _, trees, seconds in sorted(found)[:TRIES_MAX]]


def filled(seconds: Fraction, trees: int, hops: int) -> Fraction:
    """The time with what fills trees of this depth."""
    return seconds * (1 + trees * hops * FILL)


def server_trees(network: ServerNetwork, room: Room) -> list[ServerTree] | None:
    """As many trees as `room` is for; None if they are not found."""
    degrees = _degrees(room)
    for quarters in range(5 if network.uplinks and -1 not in network.pod_of else 1):
        frugal = -(-room.trees * quarters // 4)
        spread = _shared_out(network, degrees, room.trees, frugal)
        if spread is None:
            continue
        growing = _Growing(network, [list(nics) for nics in room.nics], list(room.uplinks))
        if all(growing.add(each, near=number < frugal) for number, each in enumerate(spread)):
            return growing.trees()
    return None


def _degrees(room: Room) -> list[int]:
    """The degree of each server, of all trees together: in proportion to its NICs, and at least one in each tree."""
    n, m = len(room.nics), room.trees
    total = [min(sum(nics), m * (n - 1)) for nics in room.nics]
    line = [
        (-Fraction(each, sum(nics)), server)
        for server, (each, nics) in enumerate(zip(total, room.nics, strict=True))
        if each > m
    ]
    heapify(line)
    for _ in range(sum(total) - 2 * m * (n - 1)):
        server = line[0][1]
        total[server] -= 1
        if total[server] > m:
            heapreplace(line, (-Fraction(total[server], sum(room.nics[server])), server))
        else:
            heappop(line)
    return total


def _shared_out(network: ServerNetwork, degrees: Sequence[int], m: int, frugal: int) -> list[list[int]] | None:
    """The degrees for each of m trees: one each, and N - 2 further ones from as few servers as possible.

    The first `frugal` trees take so many from each pod that one edge leads from it to another one, more from the pod
    that has most left. No server has many more edges than NICs in a tree. None if the numbers do not come out even.
    """
    n = len(degrees)
    further = [each - m for each in degrees]
    widest = [max(2, len(nics) - 1) for nics in network.nics]
    found: list[list[int]] = []
    for trees_left in range(m, 0, -1):
        taken = [max(0, each - wide * (trees_left - 1)) for each, wide in zip(further, widest, strict=True)]
        for members, wanted in _quotas(network, further) if len(found) < frugal else [(list(range(n)), n - 2)]:
            need = wanted - sum(taken[server] for server in members)
            for server in sorted(members, key=lambda one: (-Fraction(further[one], widest[one]), one)):
                more = min(need, further[server] - taken[server], widest[server] - taken[server])
                taken[server] += more
                need -= more
            if need:
                return None
        further = [each - used for each, used in zip(further, taken, strict=True)]
        found.append([1 + each for each in taken])
    return None if any(further) else found


def _quotas(network: ServerNetwork, further: Sequence[int]) -> list[tuple[list[int], int]]:
    """The servers of each pod, and the further edges of a tree in it: of a tree over each pod, all joined to one."""
    pods = [
        [server for server, pod in enumerate(network.pod_of) if pod == number] for number in range(len(network.uplinks))
    ]
    hub = max(pods, key=lambda members: sum(further[server] for server in members) / len(members))
    return [(members, len(members) - 2 + (len(pods) - 1 if members is hub else 1)) for members in pods]


@dataclass(slots=True)
class _Placed:
    """An edge, and the places of its NICs among those of its servers, child first."""

    servers: tuple[int, int]
    places: tuple[int, int]


class _Growing:
    """Trees that grow within the room of NICs (`nics`) and `uplinks`, which they use up."""

    def __init__(self, network: ServerNetwork, nics: list[list[int]], uplinks: list[int]) -> None:
        self.network = network
        self.nics = nics
        self.uplinks = uplinks
        self.grown: list[tuple[int, list[_Placed]]] = []  # root and edges
        self.at: dict[tuple[int, int], list[_Placed]] = {}  # by server and place

    def trees(self) -> list[ServerTree]:
        """What has grown."""
        gpus = [[nic.gpu for nic in nics] for nics in self.network.nics]
        return [
            ServerTree(
                root,
                tuple(
                    NicEdge(
                        *each.servers,
                        *(gpus[server][place] for server, place in zip(each.servers, each.places, strict=True)),
                    )
                    for each in edges
                ),
            )
            for root, edges in self.grown
        ]

    def add(self, degrees: Sequence[int], *, near: bool) -> bool:
        """Adds a tree with these degrees, if it fits.

        Each server, those with most edges first, hangs below the server nearest to the root that has an edge left, or
        (`near`) below one in its own pod if there is one.
        """
        pods = self.network.pod_of
        line = sorted(range(len(degrees)), key=lambda server: (-degrees[server], server))
        level, open_ends = {line[0]: 0}, {line[0]: degrees[line[0]]}
        edges: list[_Placed] = []
        used: dict[tuple[int, int], int] = {}
        for child in line[1:]:
            parents = sorted(
                (parent for parent, ends in open_ends.items() if ends),
                key=lambda one: (near and pods[one] != pods[child], level[one], pods[one] != pods[child]),
            )
            placed = self._place(child, parents, used)
            if placed is None:
                return False
            edges.append(placed)
            parent = placed.servers[1]
            level[child], open_ends[child] = level[parent] + 1, degrees[child] - 1
            open_ends[parent] -= 1
        edges.sort(key=lambda each: level[each.servers[0]])
        self.grown.append((line[0], edges))
        return True

    def _place(self, child: int, parents: Sequence[int], used: dict[tuple[int, int], int]) -> _Placed | None:
        """An edge from `child` to the first of `parents` for which there is room; `used` is by this tree."""
        pods = self.network.pod_of
        for moving in (False, True):
            for parent in parents:
                apart = {pods[child], pods[parent]} - {-1} if pods[child] != pods[parent] else set()
                if any(self.uplinks[pod] == 0 for pod in apart):
                    continue
                places = self._move(child, parent) if moving else self._places((child, parent), used)
                if places is None:
                    continue
                for pod in apart:
                    self.uplinks[pod] -= 1
                placed = _Placed((child, parent), places)
                self._take(placed, 1)
                for end in zip(placed.servers, places, strict=True):
                    used[end] = used.get(end, 0) + 1
                return placed
        return None

    def _take(self, edge: _Placed, count: int) -> None:
        """Takes the room of an edge, or with -1 gives it back."""
        for server, place in zip(edge.servers, edge.places, strict=True):
            self.nics[server][place] -= count
            if count > 0:
                self.at.setdefault((server, place), []).append(edge)
            else:
                self.at[server, place].remove(edge)

    def _places(self, ends: tuple[int, int], used: Mapping[tuple[int, int], int]) -> tuple[int, int] | None:
        """Two NICs of one rail, those that this tree uses least and that have most left."""
        best: tuple[tuple[int, int], tuple[int, int]] | None = None
        others = self._best_by_rail(ends[1], used)
        for rail, (key, place) in self._best_by_rail(ends[0], used).items():
            if rail in others:
                other_key, other = others[rail]
                both = key[0] + other_key[0], max(key[1], other_key[1])
                if best is None or both < best[0]:
                    best = both, (place, other)
        return None if best is None else best[1]

    def _best_by_rail(
        self, server: int, used: Mapping[tuple[int, int], int]
    ) -> Mapping[int, tuple[tuple[int, int], int]]:
        found: dict[int, tuple[tuple[int, int], int]] = {}
        for place, (nic, left) in enumerate(zip(self.network.nics[server], self.nics[server], strict=True)):
            if left:
                key = (used.get((server, place), 0), -left), place
                found[nic.rail] = min(found.get(nic.rail, key), key)
        return found

    def _move(self, child: int, parent: int) -> tuple[int, int] | None:
        """Two NICs of one rail of which one is full, after an earlier edge there has changed to another rail."""
        for free, full in ((child, parent), (parent, child)):
            for rail, (_, place) in sorted(self._best_by_rail(free, {}).items()):
                for full_place, nic in enumerate(self.network.nics[full]):
                    if nic.rail != rail:
                        continue
                    for edge in self.at.get((full, full_place), ()):
                        moved = self._elsewhere(edge, rail)
                        if moved is not None:
                            self._take(edge, -1)
                            edge.places = moved
                            self._take(edge, 1)
                            return (place, full_place) if free == child else (full_place, place)
        return None

    def _elsewhere(self, edge: _Placed, rail: int) -> tuple[int, int] | None:
        """Two NICs of another rail that have room for an edge."""
        a, b = (self._best_by_rail(server, {}) for server in edge.servers)
        both = sorted((a.keys() & b.keys()) - {rail}, key=lambda one: (max(a[one][0], b[one][0]), one))
        return (a[both[0]][1], b[both[0]][1]) if both else None
