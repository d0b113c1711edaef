"""`FlowNetwork` and `Demand`: the capacitated graph of a bound, and the trees that every element needs on it.

Endpoints contribute inputs and receive results; switches only forward (they neither copy nor add). A link carries bytes
from one node to another and loads each of its ports: a NIC one way, a spine, a cable. A topology becomes a network of
servers around one core that joins the rails, or around one switch per rail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from optcc.collective import COLLECTIVES, PERSONALISED, Collective
from optcc.errors import TopologyError
from optcc.graph import Graph
from optcc.show import Card, Shown
from optcc.topology import Nic, Server, Topology
from optcc.units import show_rate

REDUCE = "reduce"
BROADCAST = "broadcast"
KINDS_OF = {
    "allreduce": (REDUCE, BROADCAST),
    "reducescatter": (REDUCE,),
    "allgather": (BROADCAST,),
    "broadcast": (BROADCAST,),
    "reduce": (REDUCE,),
}
"""The trees that each element of a collective needs: an in-tree to its root, an out-tree from it."""
assert set(KINDS_OF) == set(COLLECTIVES) - set(PERSONALISED), "a new collective needs its kinds of trees"


@dataclass(frozen=True, slots=True)
class SharedPort:
    """A capacity of `rate` bytes/s that several links may share."""

    name: str
    rate: Fraction

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise TopologyError(f"port {self.name}: rate {self.rate}: must be above zero")


@dataclass(frozen=True, slots=True)
class FlowLink:
    """A directed link from `tail` to `head`; each of its bytes loads every port in `ports`."""

    tail: int
    head: int
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlowNetwork(Shown):
    """Endpoints 0..p-1, then switches; ports; links between nodes.

    Raises TopologyError for a name that is used twice, and for invalid links.
    """

    endpoints: tuple[str, ...]
    switches: tuple[str, ...]
    ports: tuple[SharedPort, ...]
    links: tuple[FlowLink, ...]

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise TopologyError("network: must have at least one endpoint")
        for what, names in (("endpoint", self.endpoints), ("switch", self.switches), ("port", self.port_names)):
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise TopologyError(f"{what} {twice}: the name is used twice")
        n_nodes, n_ports = self.n_nodes, len(self.ports)
        for number, link in enumerate(self.links):
            tail, head, ports = link.tail, link.head, link.ports
            if tail == head or not 0 <= tail < n_nodes or not 0 <= head < n_nodes:
                raise TopologyError(f"link {number}: {tail}->{head}: must join two nodes of {n_nodes}")
            if not ports or (len(ports) > 1 and len(set(ports)) < len(ports)):
                raise TopologyError(f"link {number}: ports {ports}: must name at least one, each once")
            if min(ports) < 0 or max(ports) >= n_ports:
                raise TopologyError(f"link {number}: ports {ports}: must be below {n_ports}")

    @property
    def n_nodes(self) -> int:
        """Endpoints and switches."""
        return len(self.endpoints) + len(self.switches)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of all nodes, endpoints first."""
        return self.endpoints + self.switches

    @property
    def port_names(self) -> tuple[str, ...]:
        """Names of the ports."""
        return tuple(port.name for port in self.ports)

    def card(self) -> Card:
        title = f"{len(self.endpoints)} endpoints, {len(self.switches)} switches, {len(self.links)} links"
        return Card(title, ("port", "rate"), tuple((port.name, show_rate(port.rate)) for port in self.ports))

    @classmethod
    def from_links(
        cls, endpoints: Sequence[str], links: Iterable[tuple[str, str, Fraction | int]], switches: Sequence[str] = ()
    ) -> FlowNetwork:
        """A directed graph: (from, to, bytes/s), each link a port of its own.

        >>> FlowNetwork.from_links("ab", [("a", "s", 2), ("s", "b", 1), ("b", "a", 1)], switches=["s"]).port_names
        ('a->s', 's->b', 'b->a')

        Raises TopologyError for a node that does not exist, a rate that is not above zero, a link that is there twice.
        """
        number = {name: index for index, name in enumerate((*endpoints, *switches))}
        ports: list[SharedPort] = []
        made: list[FlowLink] = []
        for tail, head, rate in links:
            for name in (tail, head):
                if name not in number:
                    raise TopologyError(f"link {tail}->{head}: {name}: no such endpoint or switch")
            made.append(FlowLink(number[tail], number[head], (len(ports),)))
            ports.append(SharedPort(f"{tail}->{head}", Fraction(rate)))
        return cls(tuple(endpoints), tuple(switches), tuple(ports), tuple(made))

    @classmethod
    def from_topology(cls, topology: Topology, *, fabric: bool = False, as_routed: bool = False) -> FlowNetwork:
        """Servers with their surviving NICs: pooled around one core, or, rail-only, one switch for each rail; or GPUs
        and the links between them, where NICs belong to GPUs or the topology is a graph.

        The servers of a pod are around a switch of its own, which its uplink joins to the core or to the rail's.

        A rail with a single server is left out. With `fabric`, a server of several GPUs whose fabric has a finite rate
        is expanded: its GPUs are endpoints that share the NICs, and each has the fabric's rate each way to the others.
        Where GPUs with several NICs have lost different ones, this is more than they carry, and what bounds it bounds
        them; `as_routed`, it is what transfers use, each of which has one route.

        >>> FlowNetwork.from_topology(Topology.parse("2x2@1GB/s,1=1/2")).port_names
        ('out h0', 'in h0', 'out h1', 'in h1')
        """
        wired = topology.wired if as_routed else topology.widest
        return _Builder(topology, fabric).build() if wired is None else _of_graph(wired)


class _Builder:
    """`FlowNetwork.from_topology` step by step: hubs, pods and NICs, expanded servers.

    A hub is the core or a rail: a switch that joins at least two servers. `first[s]` is the first endpoint of server s.
    """

    def __init__(self, topology: Topology, fabric: bool) -> None:
        self.topology = topology
        self.inside = [_inside(server, fabric) for server in topology.servers]
        self.endpoints = tuple(name for names in self.inside for name in names)
        self.first = [sum(map(len, self.inside[:server])) for server in range(len(self.inside))]
        self.apart = [server for server, names in enumerate(self.inside) if len(names) > 1]
        self.hubs = self._hubs()
        self.switches = [*self.hubs, *(f"fabric {topology.servers[server].name}" for server in self.apart)]
        self.ports: list[SharedPort] = []
        self.links: list[FlowLink] = []

    def build(self) -> FlowNetwork:
        for number, hub in enumerate(self.hubs, start=len(self.endpoints)):
            self._join(number, hub, self._pods(number, hub))
        for number, server in enumerate(self.apart, start=len(self.endpoints) + len(self.hubs)):
            self._join_gpus(number, server)
        return FlowNetwork(self.endpoints, tuple(self.switches), tuple(self.ports), tuple(self.links))

    def _hubs(self) -> dict[str, dict[int, list[Nic]]]:
        """The surviving NICs of each server at each hub, without rails of a single server."""
        found: dict[str, dict[int, list[Nic]]] = {}
        for server, each in enumerate(self.topology.servers if len(self.inside) > 1 else ()):
            for nic in each.nics:
                if not nic.failed:
                    hub = f"rail {nic.rail}" if self.topology.rail_only else "core"
                    found.setdefault(hub, {}).setdefault(server, []).append(nic)
        joining = {hub: servers for hub, servers in found.items() if len(servers) > 1}
        return {hub: joining[hub] for hub in sorted(joining, key=lambda hub: (len(hub), hub))}

    def _nodes(self, server: int) -> range:
        return range(self.first[server], self.first[server] + len(self.inside[server]))

    def _at(self, name: str, hub: str) -> str:
        return name + (f" {hub}" if self.topology.rail_only else "")

    def _port(self, name: str, rate: Fraction) -> tuple[int, ...]:
        self.ports.append(SharedPort(name, rate))
        return (len(self.ports) - 1,)

    def _switch(self, name: str) -> int:
        self.switches.append(name)
        return len(self.endpoints) + len(self.switches) - 1

    def _pods(self, number: int, hub: str) -> dict[int, int]:
        """A switch for each pod, joined to the hub by its uplink; the switch of each server that is in a pod."""
        leaf: dict[int, int] = {}
        for pod in self.topology.pods:
            members = [server for server in pod.servers if server in self.hubs[hub]]
            if members:
                where = self._at(pod.name, hub)
                switch = self._switch(f"pod {where}")
                leaf |= dict.fromkeys(members, switch)
                self.links.append(FlowLink(switch, number, self._port(f"up {where}", pod.up)))
                self.links.append(FlowLink(number, switch, self._port(f"down {where}", pod.down)))
        return leaf

    def _join(self, number: int, hub: str, leaf: dict[int, int]) -> None:
        """The NICs of all servers at a hub, or at their pod's switch.

        Traffic between the GPUs of an expanded server uses the fabric and must not return from the hub. So they send
        into a switch of their own, with links to everything but their own in port.
        """
        taking: dict[int, tuple[int, ...]] = {}
        leaving: list[tuple[int, int]] = []
        for server, nics in self.hubs[hub].items():
            name = self.topology.servers[server].name
            out = self._port(f"out {self._at(name, hub)}", sum((nic.out for nic in nics), Fraction(0)))
            taking[server] = self._port(f"in {self._at(name, hub)}", sum((nic.in_ for nic in nics), Fraction(0)))
            near = switch = leaf.get(server, number)
            if server in self.apart:
                switch = self._switch(f"{hub} from {name}")
                leaving.append((server, switch))
            self.links.extend(FlowLink(node, switch, out) for node in self._nodes(server))
            self.links.extend(FlowLink(near, node, taking[server]) for node in self._nodes(server))
        for source, switch in leaving:
            near = leaf.get(source, number)
            for server, port in taking.items():
                if server != source and leaf.get(server, number) == near:
                    self.links.extend(FlowLink(switch, node, port) for node in self._nodes(server))
            # Beyond an uplink a byte may return: it loads the NICs both ways, so the bound does not change.
            onward = [link for link in self.links if link.tail == near and link.head >= len(self.endpoints)]
            self.links.extend(replace(link, tail=switch) for link in onward)

    def _join_gpus(self, number: int, server: int) -> None:
        """The GPUs of an expanded server, around its fabric."""
        rate = self.topology.servers[server].fabric
        assert rate is not None
        for node in self._nodes(server):
            name = self.endpoints[node]
            self.links.append(FlowLink(node, number, self._port(f"out fabric {name}", rate)))
            self.links.append(FlowLink(number, node, self._port(f"in fabric {name}", rate)))


def _of_graph(graph: Graph) -> FlowNetwork:
    """The network of a graph in which a GPU passes a switch only to GPUs to which its route leads through it.

    GPUs of a server exchange data through its fabric, although the core joins their NICs too. So GPUs from which a
    switch does not lead to all GPUs that it is linked to send into a switch of their own beside it.
    """
    p, nodes = len(graph.gpus), graph.nodes
    leads = [graph.led_by_one_switch(gpu) for gpu in range(p)]
    ports = tuple(SharedPort(graph.name_of(link), link.rate) for link in graph.links)
    outof: list[list[int]] = [[] for _ in nodes]
    into: list[list[int]] = [[] for _ in nodes]
    for number, link in enumerate(graph.links):
        outof[link.tail].append(number)
        into[link.head].append(number)
    switches = list(graph.switches)
    links: list[FlowLink] = []
    used: set[int] = set()  # switches that are entered
    onward: dict[int, list[FlowLink]] = {}
    for switch in range(p, len(nodes)):
        to = {graph.links[number].head: number for number in outof[switch] if graph.links[number].head < p}
        beyond = [number for number in outof[switch] if graph.links[number].head >= p]
        groups: dict[frozenset[int], list[int]] = {}
        for number in into[switch]:
            gpu = graph.links[number].tail
            if gpu >= p:
                links.append(FlowLink(gpu, switch, (number,)))
                used.add(switch)
                continue
            led = leads[gpu].get(number, frozenset())
            groups.setdefault(led | {gpu} if led | {gpu} >= to.keys() else led, []).append(number)
        for led, entering in groups.items():
            own = switch
            if not led >= to.keys():
                own = p + len(switches)
                switches.append(f"{nodes[switch]} from {nodes[graph.links[entering[0]].tail]}")
                links += [FlowLink(own, gpu, (to[gpu],)) for gpu in sorted(led)]
                links += [FlowLink(own, graph.links[number].head, (number,)) for number in beyond]
            else:
                used.add(switch)
            links += [FlowLink(graph.links[number].tail, own, (number,)) for number in entering]
        onward[switch] = [FlowLink(switch, gpu, (number,)) for gpu, number in to.items()]
    for switch, leaving in onward.items():
        links += leaving if switch in used else []
    links += [
        FlowLink(link.tail, link.head, (number,))
        for number, link in enumerate(graph.links)
        if link.tail < p and link.head < p
    ]
    return FlowNetwork(graph.gpus, tuple(switches), ports, tuple(links))


def _inside(server: Server, fabric: bool) -> tuple[str, ...]:
    """Endpoints of a server: itself, or its GPUs."""
    if fabric and server.fabric is not None and server.gpus > 1:
        return tuple(f"{server.name} gpu {gpu}" for gpu in range(server.gpus))
    return (server.name,)


def endpoint_gpus(topology: Topology, *, fabric: bool = False) -> list[int]:
    """The number of GPUs of each endpoint of `FlowNetwork.from_topology`."""
    if topology.wired is not None:
        return [1] * topology.n_ranks
    return [
        server.gpus // len(names) for server in topology.servers for names in (_inside(server, fabric),) for _ in names
    ]


@dataclass(frozen=True, slots=True)
class Demand:
    """What a collective demands: trees of `kinds` for each element; `roots` is their distribution, None if free."""

    collective: str
    roots: tuple[Fraction, ...] | None

    def __post_init__(self) -> None:
        if self.collective not in KINDS_OF:
            raise TopologyError(f"collective {self.collective!r}: must be one of {', '.join(KINDS_OF)}")
        if (self.roots is None) != (self.collective == "allreduce"):
            raise TopologyError(f"{self.collective}: roots are free for allreduce, and fixed for everything else")
        if self.roots is not None and (min(self.roots) < 0 or sum(self.roots) != 1):
            raise TopologyError(f"{self.collective}: roots {[str(x) for x in self.roots]}: must be shares of 1")
        if self.collective in ("broadcast", "reduce") and self.roots is not None and max(self.roots) != 1:
            raise TopologyError(f"{self.collective}: must have one root")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Reduce, broadcast, or both."""
        return KINDS_OF[self.collective]

    @classmethod
    def of(cls, collective: Collective, gpus: Sequence[int]) -> Demand:
        """The demand of `collective` on servers with these numbers of GPUs, whose ranks are numbered in order.

        >>> Demand.of(Collective("allgather", 4), [1, 3]).roots
        (Fraction(1, 4), Fraction(3, 4))
        """
        if sum(gpus) != collective.n_ranks:
            raise TopologyError(f"collective over {collective.n_ranks} ranks: the topology has {sum(gpus)}")
        if collective.name not in KINDS_OF:
            return cls(collective.name, ())  # refused
        if collective.name == "allreduce":
            return cls(collective.name, None)
        if collective.name in ("allgather", "reducescatter"):
            return cls(collective.name, tuple(Fraction(count, sum(gpus)) for count in gpus))
        first = [sum(gpus[:server]) for server in range(len(gpus) + 1)]
        held = [first[server] <= collective.root < first[server + 1] for server in range(len(gpus))]
        return cls(collective.name, tuple(Fraction(int(each)) for each in held))


class Borders:
    """The links over the border of a set of nodes, found from its smaller side."""

    def __init__(self, network: FlowNetwork) -> None:
        self.network = network
        self.into: list[list[int]] = [[] for _ in range(network.n_nodes)]
        self.outof: list[list[int]] = [[] for _ in range(network.n_nodes)]
        for number, link in enumerate(network.links):
            self.outof[link.tail].append(number)
            self.into[link.head].append(number)

    def crossed(self, kind: str, nodes: frozenset[int]) -> list[int]:
        """The links into `nodes` (broadcast) or out of them (reduce), by their node inside and their number."""
        near, far = ("head", "tail") if kind == BROADCAST else ("tail", "head")
        here, there = (self.into, self.outof) if kind == BROADCAST else (self.outof, self.into)
        links, n_nodes = self.network.links, self.network.n_nodes
        if 2 * len(nodes) <= n_nodes:
            return [each for node in sorted(nodes) for each in here[node] if getattr(links[each], far) not in nodes]
        others = (node for node in range(n_nodes) if node not in nodes)
        found = ((getattr(links[each], near), each) for node in others for each in there[node])
        return [each for node, each in sorted(found) if node in nodes]


def require_connected(network: FlowNetwork, demand: Demand) -> None:
    """Raises TopologyError naming the endpoints that cannot reach others though `demand` requires it."""
    p = len(network.endpoints)
    onward: list[list[int]] = [[] for _ in range(network.n_nodes)]
    back: list[list[int]] = [[] for _ in range(network.n_nodes)]
    for link in network.links:
        onward[link.tail].append(link.head)
        back[link.head].append(link.tail)
    every = set(range(p))
    if every <= _reached(0, onward) and every <= _reached(0, back):
        return
    roots = [v for v in range(p) if demand.roots is None or demand.roots[v]]
    senders = every if REDUCE in demand.kinds else set(roots)
    missing: dict[tuple[str, ...], list[str]] = {}
    for start in sorted(senders):
        seen = _reached(start, onward)
        wanted = range(p) if BROADCAST in demand.kinds and (start in roots or demand.roots is None) else roots
        lost = tuple(network.endpoints[v] for v in wanted if v not in seen)
        if lost:
            missing.setdefault(lost, []).append(network.endpoints[start])
    if missing:
        said = "; ".join(f"{', '.join(who)} cannot reach {', '.join(whom)}" for whom, who in missing.items())
        raise TopologyError(f"network: {said}: {demand.collective} needs a way")


def _reached(start: int, onward: Sequence[Sequence[int]]) -> set[int]:
    """The nodes to which `onward` leads from `start`."""
    seen, todo = {start}, [start]
    while todo:
        for node in onward[todo.pop()]:
            if node not in seen:
                seen.add(node)
                todo.append(node)
    return seen
