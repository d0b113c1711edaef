"""`Server`, `Nic` and `Pod`: what a `Topology` consists of, and the graph of GPUs whose NICs belong to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations

from optcc.errors import TopologyError
from optcc.graph import Graph, GraphLink

UNLIMITED = Fraction(2**62)
"""The rate of a link that is never the bottleneck, bytes/s."""


@dataclass(frozen=True, slots=True)
class Nic:
    """One NIC on one rail. `out` and `in_` are bytes/s; a failed NIC keeps its place and carries nothing.

    `gpu` is the GPU of its server that it belongs to; None: the server pools its NICs.
    """

    rail: int
    out: Fraction
    in_: Fraction
    failed: bool = False
    gpu: int | None = None

    def __post_init__(self) -> None:
        if self.rail < 0:
            raise TopologyError(f"rail {self.rail}: must not be negative")
        if self.out <= 0 or self.in_ <= 0:
            raise TopologyError(
                f"NIC on rail {self.rail}: rates {self.out} out, {self.in_} in: must be above zero (or failed)"
            )


@dataclass(frozen=True, slots=True)
class Server:
    """GPUs and NICs behind one intra-server fabric.

    `fabric` is what one GPU sends and receives inside the server, bytes/s; None: never the bottleneck.
    """

    name: str
    gpus: int
    nics: tuple[Nic, ...]
    fabric: Fraction | None = None

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise TopologyError(f"server {self.name}: {self.gpus} GPUs: must have at least one")
        if self.fabric is not None and self.fabric <= 0:
            raise TopologyError(f"server {self.name}: fabric rate {self.fabric}: must be above zero")
        owners = {nic.gpu for nic in self.nics}
        for gpu in owners - {None}:
            if gpu is not None and not 0 <= gpu < self.gpus:
                raise TopologyError(f"server {self.name}: NIC of GPU {gpu}: must be below {self.gpus}")
            if None in owners:
                raise TopologyError(f"server {self.name}: NICs of GPUs and NICs of none: must be one or the other")
            if self.fabric is None and self.gpus > 1:
                raise TopologyError(f"server {self.name}: NICs of GPUs: must have a fabric with a rate between them")

    @property
    def out(self) -> Fraction:
        """Bytes/s that the surviving NICs send together."""
        return sum((nic.out for nic in self.nics if not nic.failed), Fraction(0))

    @property
    def has_own_nics(self) -> bool:
        """True if each NIC belongs to a GPU."""
        return bool(self.nics) and self.nics[0].gpu is not None

    @property
    def in_(self) -> Fraction:
        """Bytes/s that the surviving NICs receive together."""
        return sum((nic.in_ for nic in self.nics if not nic.failed), Fraction(0))


@dataclass(frozen=True, slots=True)
class Pod:
    """Servers, by number, behind one leaf switch: what they send to others goes up its uplink, what they receive from
    others comes down, `up` and `down` bytes/s at most. What they send each other does not use it.

    On a rail-only network a pod has a leaf switch, and an uplink of these rates, for every rail.
    """

    name: str
    servers: tuple[int, ...]
    up: Fraction
    down: Fraction

    def __post_init__(self) -> None:
        if not self.servers:
            raise TopologyError(f"pod {self.name}: must have at least one server")
        if self.up <= 0 or self.down <= 0:
            raise TopologyError(f"pod {self.name}: uplink {self.up} up, {self.down} down: must be above zero")


@lru_cache(maxsize=64)
def wire(servers: tuple[Server, ...], pods: tuple[Pod, ...], rail_only: bool, *, widest: bool = False) -> Graph:
    """The graph of servers whose NICs belong to GPUs.

    A GPU is linked to the switch of its server's fabric and, by the NICs that it has left, to the core or, rail-only,
    to the switch of each of their rails. In a pod these are leaf switches, which its uplinks join to the core or rail.
    Rails whose NICs belong to the same GPU at every server are one (`bundle`): a message between two of these GPUs goes
    over all of them, in parts. With `widest` they are one even where two GPUs have none of them left in common: that
    is more than the NICs carry, so what bounds it bounds them.
    """
    several = [server for server in servers if server.gpus > 1]
    gpus = tuple(
        server.name if server.gpus == 1 else f"{server.name} gpu {gpu}"
        for server in servers
        for gpu in range(server.gpus)
    )
    number = {f"fabric {server.name}": len(gpus) + place for place, server in enumerate(several)}
    pod_of = {server: pod for pod in pods for server in pod.servers}
    bundles = bundle(servers, widest=widest) if rail_only else {}
    links: dict[tuple[int, int], Fraction] = {}

    def join(tail: int, head: int, rate: Fraction) -> None:
        links[tail, head] = links.get((tail, head), Fraction(0)) + rate

    first = 0
    for index, server in enumerate(servers):
        for gpu in range(first, first + server.gpus):
            if server.gpus > 1 and server.fabric is not None:
                join(gpu, number[f"fabric {server.name}"], server.fabric)
                join(number[f"fabric {server.name}"], gpu, server.fabric)
        for nic in server.nics if len(servers) > 1 else ():
            if nic.failed:
                continue
            rails = bundles.get(nic.rail, ())
            hub = f"rail {'+'.join(map(str, rails))}" if rail_only else "core"
            top = number.setdefault(hub, len(gpus) + len(number))
            leaf = top
            if index in pod_of:
                pod, count = pod_of[index], max(1, len(rails))
                leaf = number.setdefault(f"{pod.name} {hub}", len(gpus) + len(number))
                links[leaf, top], links[top, leaf] = count * pod.up, count * pod.down
            join(first + (nic.gpu or 0), leaf, nic.out)
            join(leaf, first + (nic.gpu or 0), nic.in_)
        first += server.gpus
    return Graph(gpus, tuple(number), tuple(GraphLink(tail, head, rate) for (tail, head), rate in links.items()))


def bundle(servers: Sequence[Server], *, widest: bool = False) -> dict[int, tuple[int, ...]]:
    """For each rail of servers whose NICs belong to GPUs, the rails of its bundle: those whose NICs belong to the same
    GPU as its own at every server. Unless `widest`, a rail is alone if two of these GPUs have no rail of the bundle
    left in common.

    >>> rate = Fraction(1)
    >>> def two_gpus(*lost: int) -> Server:
    ...     nics = tuple(Nic(rail, rate, rate, failed=rail in lost, gpu=rail // 2) for rail in range(4))
    ...     return Server("h", 2, nics, fabric=rate)
    >>> bundle([two_gpus(), two_gpus(1)])
    {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    >>> bundle([two_gpus(0), two_gpus(1)])
    {0: (0,), 1: (1,), 2: (2, 3), 3: (2, 3)}
    >>> bundle([two_gpus(0), two_gpus(1)], widest=True)[0]
    (0, 1)
    """
    owners: dict[int, list[tuple[int, int]]] = {}
    for number, server in enumerate(servers):
        for nic in server.nics:
            owners.setdefault(nic.rail, []).append((number, nic.gpu or 0))
    alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rail, owner in owners.items():
        alike.setdefault(tuple(sorted(owner)), []).append(rail)
    found: dict[int, tuple[int, ...]] = {}
    for rails in alike.values():
        left = [{nic.rail for nic in server.nics if nic.rail in rails and not nic.failed} for server in servers]
        reach = [each for each in left if each]
        joined = widest or all(one & other for one, other in combinations({frozenset(each) for each in reach}, 2))
        found |= {rail: tuple(sorted(rails)) if joined else (rail,) for rail in rails}
    return found


def pooled_graph(servers: tuple[Server, ...], pods: tuple[Pod, ...], rail_only: bool) -> Graph:
    """A graph of servers that pool their NICs: their GPUs send through one switch and receive through another one."""
    gpus = tuple(
        server.name if server.gpus == 1 else f"{server.name} gpu {gpu}"
        for server in servers
        for gpu in range(server.gpus)
    )
    number: dict[str, int] = {}
    links: dict[tuple[int, int], Fraction] = {}
    pod_of = {server: pod for pod in pods for server in pod.servers}

    def switch(name: str) -> int:
        return number.setdefault(name, len(gpus) + len(number))

    first = 0
    for index, server in enumerate(servers):
        out = in_ = first
        if server.gpus > 1:
            out, in_ = switch(f"out {server.name}"), switch(f"in {server.name}")
            for gpu in range(first, first + server.gpus):
                links[gpu, out] = links[in_, gpu] = UNLIMITED
                if server.fabric is not None:
                    inside = switch(f"fabric {server.name}")
                    links[gpu, inside] = links[inside, gpu] = server.fabric
            if server.fabric is None:
                links[out, in_] = UNLIMITED
        for nic in server.nics if len(servers) > 1 else ():
            if nic.failed:
                continue
            hub = f"rail {nic.rail}" if rail_only else "core"
            top = leaf = switch(hub)
            if index in pod_of:
                leaf = switch(f"{pod_of[index].name} {hub}")
                links[leaf, top], links[top, leaf] = pod_of[index].up, pod_of[index].down
            links[out, leaf] = links.get((out, leaf), Fraction(0)) + nic.out
            links[leaf, in_] = links.get((leaf, in_), Fraction(0)) + nic.in_
        first += server.gpus
    return Graph(gpus, tuple(number), tuple(GraphLink(tail, head, rate) for (tail, head), rate in links.items()))


def enclose(graph: Graph, homes: Sequence[str]) -> tuple[Server, ...]:
    """The servers of a graph's GPUs, `homes[gpu]` by name, consecutive for each; all links that leave one are one NIC.

    A server without a link to another one has no NIC.
    """
    members: dict[str, list[int]] = {}
    for gpu, home in enumerate(homes):
        members.setdefault(home, []).append(gpu)
    servers = []
    for home, gpus in members.items():
        inside = set(gpus)
        out = sum((link.rate for link in graph.links if link.tail in inside and link.head not in inside), Fraction(0))
        in_ = sum((link.rate for link in graph.links if link.head in inside and link.tail not in inside), Fraction(0))
        servers.append(Server(home, len(gpus), (Nic(0, out, in_),) if out and in_ and len(members) > 1 else ()))
    return tuple(servers)
