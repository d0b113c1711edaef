"""`Topology`: servers, their GPUs and NICs, and what each NIC can carry each way.

A rank is a GPU; ranks are numbered through the servers in order. An endpoint is a server with its surviving NICs
pooled: what it can send and receive at once. The core between servers never blocks, unless they are grouped in pods
whose uplinks carry less than their servers together. Rates are exact (`Fraction`, bytes/s).

The text form fits in one argument:

    8@50GB/s                     eight endpoints, 50 GB/s out and in
    8@50GB/s,3=25GB/s,5=10GB/s   endpoints 3 and 5 degraded
    8@50GB/s,3=25GB/s:50GB/s     endpoint 3 sends at 25, receives at 50
    4x8@50GB/s,2=3/8             four servers of eight GPUs and eight NICs; server 2 keeps 3 of its 8 NICs
    16@50GB/s/4:2                pods of four servers; a pod's uplink carries half of what its four send and receive
    4x8@50GB/s+450GB/s           four servers of eight GPUs that exchange 450 GB/s each; every GPU has a NIC of its own
    4x8@50GB/s+450GB/s/rails     the same, rail-only: NIC j reaches only NICs j
    4xdgx-h100,2=4..7/8          presets: dgx-a100, dgx-h100, mi250; server 2 keeps NICs 4 to 7
    torus:4x4@50GB/s             a grid of GPUs, closed to a ring in each dimension
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import inf
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from optcc.collective import RANKS_MAX
from optcc.errors import InputError, TopologyError
from optcc.graph import Graph, GraphLink
from optcc.servers import UNLIMITED, Nic, Pod, Server, bundle, enclose, pooled_graph, wire
from optcc.show import Card, Shown
from optcc.topology_text import is_text, parse_text, read_toml
from optcc.units import parse_rate, show_rate, show_time

if TYPE_CHECKING:
    import networkx as nx

_NicShares = Sequence[tuple[float, float]]
"""Out and in of each NIC, as shares of what is declared."""

__all__ = ["RANKS_MAX", "Nic", "Pod", "Server", "Topology", "endpoint_text"]


INSIDE = 16
"""Times the rate of a server's NICs that its GPUs exchange with each other, where nothing else is known: a plan that
counts on more gains nothing."""


@dataclass(frozen=True, slots=True)
class Topology(Shown):
    """The cluster: servers on a core (or rail by rail), and the latency of a message in seconds.

    `overhead_s` is the processor time of a rank for each message that it sends or receives, LogGP's o. The port models
    know nothing of it; schedules and segments are chosen with it (`optcc.timing.with_overhead`). `memory` is what all
    ranks together exchange, bytes/s, where all are on one host; 0 where nothing of that is known.

    Where NICs belong to GPUs, or `graph` says how GPUs and switches are linked, messages take the routes of `wired`;
    the servers of a graph have all links that leave them as one NIC. Otherwise servers pool their NICs.

    The core is not blocking but for the uplinks of `pods`; a server without a pod is on it directly.

    >>> t = Topology.parse("4x8@50GB/s,2=3/8")
    >>> t.n_ranks, len(t.servers), show_rate(t.servers[2].out)
    (32, 4, '150GB/s')

    Raises TopologyError from the constructor if a server is cut off or in two pods, or a name is used twice.
    """

    servers: tuple[Server, ...]
    latency_s: Fraction = Fraction(0)
    rail_only: bool = False
    pods: tuple[Pod, ...] = ()
    text: str = field(default="", compare=False)
    overhead_s: Fraction = Fraction(0)
    graph: Graph | None = None
    memory: Fraction = Fraction(0)

    def __post_init__(self) -> None:
        if not self.servers:
            raise TopologyError("topology: must have at least one server")
        if self.n_ranks > RANKS_MAX:
            raise TopologyError(f"topology: {self.n_ranks} ranks: must be at most {RANKS_MAX}")
        names = [server.name for server in self.servers]
        for name in {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ():
            raise TopologyError(f"server {name}: the name is used twice")
        if self.latency_s < 0:
            raise TopologyError(f"latency {self.latency_s}: must not be negative")
        if self.overhead_s < 0:
            raise TopologyError(f"overhead {self.overhead_s}: must not be negative")
        if len(self.servers) > 1:
            for server in self.servers:
                if server.out == 0:
                    raise TopologyError(f"server {server.name}: no NIC is left, so it cannot reach any other server")
        if self.pods:
            self._check_pods()
        if self.graph is not None and len(self.graph.gpus) != self.n_ranks:
            raise TopologyError(f"graph of {len(self.graph.gpus)} GPUs: the servers have {self.n_ranks}")
        if self.graph is not None and (self.pods or self.rail_only):
            raise TopologyError("graph: must stand without pods and rails, which are links of it")
        if any(server.has_own_nics for server in self.servers):
            for server in self.servers:
                if server.gpus > 1 and not server.has_own_nics:
                    raise TopologyError(
                        f"server {server.name}: its NICs must belong to its GPUs, as those of others do"
                    )

    def _check_pods(self) -> None:
        seen: dict[int, str] = {}
        for number, pod in enumerate(self.pods):
            if pod.name in {other.name for other in self.pods[:number]}:
                raise TopologyError(f"pod {pod.name}: the name is used twice")
            for server in pod.servers:
                if not 0 <= server < len(self.servers):
                    raise TopologyError(f"pod {pod.name}: server {server}: must be below {len(self.servers)}")
                if server in seen:
                    raise TopologyError(f"pod {pod.name}: server {server} is in {seen[server]}: must be in one pod")
                seen[server] = pod.name

    @property
    def n_ranks(self) -> int:
        """GPUs of all servers."""
        return sum(server.gpus for server in self.servers)

    @property
    def rank_server(self) -> tuple[int, ...]:
        """For each rank, the index of its server."""
        return tuple(index for index, server in enumerate(self.servers) for _ in range(server.gpus))

    @property
    def is_flat(self) -> bool:
        """True if every server is one GPU: rank and endpoint are the same thing."""
        return all(server.gpus == 1 for server in self.servers)

    @property
    def wired(self) -> Graph | None:
        """How GPUs are linked; None where servers pool their NICs.

        >>> wired = Topology.parse("2x2@50GB/s+450GB/s").wired
        >>> [wired.name_of(wired.links[number]) for number in wired.routes[0][3]]
        ['h0 gpu 0->core', 'core->h1 gpu 1']
        """
        if self.graph is not None:
            return self.graph
        if any(server.gpus > 1 and server.has_own_nics for server in self.servers):
            return wire(self.servers, self.pods, self.rail_only)
        return None

    @property
    def widest(self) -> Graph | None:
        """`wired`, or a graph that carries all that this cluster does and more: for lower bounds (`wire`)."""
        wired, servers = self.wired, self.servers
        if wired is None or not self.rail_only or not wired.is_joined:
            return wired
        is_all = bundle(servers) == bundle(servers, widest=True)
        return wired if is_all else wire(servers, self.pods, self.rail_only, widest=True)

    @property
    def out(self) -> tuple[Fraction, ...]:
        """Bytes/s that each endpoint sends at most."""
        return tuple(server.out for server in self.servers)

    @property
    def in_(self) -> tuple[Fraction, ...]:
        """Bytes/s that each endpoint receives at most."""
        return tuple(server.in_ for server in self.servers)

    @property
    def rails_kept(self) -> set[tuple[int, ...]]:
        """The rails that a server has NICs left on, each such set once: several if servers lost different ones."""
        return {tuple(sorted(nic.rail for nic in server.nics if not nic.failed)) for server in self.servers}

    @property
    def server_pod(self) -> tuple[int, ...]:
        """For each server, the index of its pod; -1: it is in none."""
        of = {server: index for index, pod in enumerate(self.pods) for server in pod.servers}
        return tuple(of.get(server, -1) for server in range(len(self.servers)))

    @property
    def pooled_pods(self) -> tuple[Pod, ...]:
        """The pods, and on a rail-only network all uplinks of a pod as one: of the rails that some server keeps."""
        rails = {nic.rail for server in self.servers for nic in server.nics if not nic.failed}
        count = len(rails) if self.rail_only else 1
        return tuple(replace(pod, up=count * pod.up, down=count * pod.down) for pod in self.pods)

    def with_latency(self, latency_s: Fraction) -> Topology:
        """The same cluster with another latency."""
        return replace(self, latency_s=latency_s)

    def healthy(self) -> Topology:
        """The cluster before anything failed: every endpoint at the best rate that any of them has each way.

        The NICs of a server become one, and so do the uplinks of a pod on a rail-only network.
        """
        out, in_ = max(self.out), max(self.in_)
        servers = tuple(
            replace(server, nics=(Nic(0, out, in_),)) if len(self.servers) > 1 else server for server in self.servers
        )
        return replace(self, servers=servers, pods=self.pooled_pods, text="", graph=None)

    def scaled(self, factor: Fraction) -> Topology:
        """The rate of every NIC and uplink times `factor`: how bytes on a wire become payload once headers are paid."""
        servers = tuple(
            replace(server, nics=tuple(replace(nic, out=nic.out * factor, in_=nic.in_ * factor) for nic in server.nics))
            for server in self.servers
        )
        pods = tuple(replace(pod, up=pod.up * factor, down=pod.down * factor) for pod in self.pods)
        graph = self.graph.scaled(factor) if self.graph is not None else None
        return replace(self, servers=servers, pods=pods, graph=graph)

    def under(self, shares: Sequence[Sequence[tuple[float, float]]]) -> Topology:
        """The cluster when the NICs carry these shares, out and in, of what it says; by server and NIC. A NIC without
        one of the two has failed; one that has both is up, even if it had failed. Shares may be by rank: then a NIC
        carries the least that a rank of its server says.

        Where a server's NICs are not those of `shares`, such as one pooled NIC for all, the NICs in `shares` count as
        equal. Raises TopologyError if a server is cut off, or for another number of servers.

        >>> cluster = Topology.parse("2@100MB/s")
        >>> cluster.under([[(1.0, 1.0), (0.0, 0.0)], [(1.0, 0.5), (1.0, 1.0)]])
        Topology('2@50MB/s,1=100MB/s:75MB/s')
        """
        if len(shares) == self.n_ranks:
            shares = [_least(nics) for nics in _by_server(shares, self.rank_server)]
        if len(shares) != len(self.servers):
            raise TopologyError(f"shares of {len(shares)} servers: must be of {len(self.servers)}")
        if self.graph is not None:
            raise TopologyError(f"{self!r}: shares of NICs: a graph has links, and none")
        servers = tuple(
            replace(server, nics=_under(server.nics, nics)) for server, nics in zip(self.servers, shares, strict=True)
        )
        return replace(self, servers=servers, text="")

    def with_own_nics(self) -> Topology:
        """The same cluster where a server's NICs belong to its GPUs in equal parts, in order, and reach only those of
        their own rail. A fabric that is not given has `INSIDE` times the rate of the best server's NICs.

        >>> owned = Topology.parse("2x2@50MB/s").with_own_nics()
        >>> [nic.gpu for nic in owned.servers[0].nics], owned.rail_only, int(owned.servers[0].fabric)
        ([0, 1], True, 1600000000)
        """
        fabric = INSIDE * max(*self.out, *self.in_)
        servers = tuple(
            replace(
                server,
                nics=tuple(
                    replace(nic, gpu=number * server.gpus // len(server.nics)) for number, nic in enumerate(server.nics)
                ),
                fabric=server.fabric or fabric,
            )
            for server in self.servers
        )
        return replace(self, servers=servers, rail_only=True, text="")

    def of_ranks(self, ranks: Sequence[int]) -> Topology:
        """The cluster as some of its ranks have it to themselves, counted from 0 in the order given.

        Servers keep their NICs, pooled, and lose GPUs; pods are left out. Where the order is not that of the servers,
        each rank is a server of its own, with its part of the NICs' rates.

        >>> Topology.parse("2x2@1GB/s").of_ranks([0, 2, 3]).rank_server
        (0, 1, 1)
        >>> Topology.parse("2x2@1GB/s").of_ranks([2, 0, 3]).out
        (Fraction(1000000000, 1), Fraction(2000000000, 1), Fraction(1000000000, 1))

        Raises InputError for a rank that does not exist or is named twice.
        """
        if len(set(ranks)) < len(ranks) or not ranks or not 0 <= min(ranks) <= max(ranks) < self.n_ranks:
            raise InputError(f"ranks {list(ranks)}: must be different ones below {self.n_ranks}")
        if self.graph is not None:
            raise TopologyError(f"{self!r}: some of its ranks: not supported for a graph")
        at = [self.rank_server[rank] for rank in ranks]
        if at == sorted(at):
            kept = [_pooled(self.servers[server], at.count(server)) for server in dict.fromkeys(at)]
        else:
            kept = [
                replace(
                    self.servers[server],
                    name=f"{self.servers[server].name}-{number}",
                    gpus=1,
                    nics=tuple(
                        replace(nic, out=nic.out / at.count(server), in_=nic.in_ / at.count(server), gpu=None)
                        for nic in self.servers[server].nics
                    ),
                )
                for number, server in enumerate(at)
            ]
        return replace(self, servers=tuple(kept), pods=(), text="")

    @classmethod
    def parse(cls, text: str) -> Topology:
        """A topology from its text form, or from the TOML file of that name.

        Raises InputError for a text that is no topology, TopologyError for one that cannot be.
        """
        return cls(*parse_text(text)) if is_text(text) else cls.from_toml(Path(text))

    @classmethod
    def from_toml(cls, path: Path) -> Topology:
        """A topology from a TOML file; the schema is in docs/topology.md."""
        parts = read_toml(path)
        try:
            return cls(*parts)
        except TopologyError as error:
            raise TopologyError(f"topology {str(path)!r}: {error}") from None

    def to_toml(self) -> str:
        """The text of a file for `from_toml`, which makes the same topology of it.

        >>> print(Topology.parse("2@50GB/s").to_toml())
        latency = "0ns"
        overhead = "0ns"
        rail_only = false
        <BLANKLINE>
        [[servers]]
        name = "h0"
        gpus = 1
        nics = [
          { rail = 0, out = "50GB/s", in = "50GB/s" },
        ]
        <BLANKLINE>
        [[servers]]
        name = "h1"
        gpus = 1
        nics = [
          { rail = 0, out = "50GB/s", in = "50GB/s" },
        ]
        <BLANKLINE>
        """
        times = (("latency", self.latency_s), ("overhead", self.overhead_s))
        lines = [f'{name} = "{float(seconds * 10**9):.15g}ns"' for name, seconds in times]
        if self.graph is not None:
            return "\n".join(
                [*lines, "", *_graph_lines(self.graph, [self.servers[at].name for at in self.rank_server])]
            )
        lines += [f"rail_only = {str(self.rail_only).lower()}", ""]
        for pod in self.pods:
            lines += ["[[pods]]", f"name = {json.dumps(pod.name)}"]
            lines += [f'{way} = "{show_rate(rate)}"' for way, rate in (("up", pod.up), ("down", pod.down))]
            lines.append("")
        for server, pod_number in zip(self.servers, self.server_pod, strict=True):
            lines += ["[[servers]]", f"name = {json.dumps(server.name)}", f"gpus = {server.gpus}"]
            lines += [f'fabric = "{show_rate(server.fabric)}"'] if server.fabric is not None else []
            lines += [f"pod = {json.dumps(self.pods[pod_number].name)}"] if pod_number >= 0 else []
            lines.append("nics = [")
            for nic in server.nics:
                failed = ", failed = true" if nic.failed else ""
                rates = f'out = "{show_rate(nic.out)}", in = "{show_rate(nic.in_)}"'
                gpu = f", gpu = {nic.gpu}" if nic.gpu is not None else ""
                lines.append(f"  {{ rail = {nic.rail}{gpu}, {rates}{failed} }},")
            lines += ["]", ""]
        return "\n".join(lines)

    @classmethod
    def from_networkx(cls, graph: nx.DiGraph[Any], latency_s: Fraction = Fraction(0)) -> Topology:
        """The cluster of a directed graph: an edge's `capacity` is its rate, in bytes/s or as a text such as "50GB/s".

        Nodes with a true attribute `switch` only forward, the others are GPUs; GPUs with the same `server` are in one.

        >>> import networkx as nx
        >>> ring = nx.DiGraph()
        >>> ring.add_weighted_edges_from([("a", "b", 5), ("b", "c", 5), ("c", "a", 5)], weight="capacity")
        >>> Topology.from_networkx(ring).out
        (Fraction(5, 1), Fraction(5, 1), Fraction(5, 1))

        Raises InputError with the path to what is wrong, TopologyError for a GPU that cannot send or receive.
        """
        if graph.is_multigraph() or not graph.is_directed():
            raise InputError(f"networkx: {type(graph).__name__}: must be a DiGraph")
        gpus = [node for node, data in graph.nodes(data=True) if not data.get("switch")]
        homes = [str(graph.nodes[node].get("server", node)) for node in gpus]
        first = {home: homes.index(home) for home in homes}
        order = sorted(range(len(gpus)), key=lambda place: (first[homes[place]], place))
        switches = [node for node, data in graph.nodes(data=True) if data.get("switch")]
        number = {node: at for at, node in enumerate([*(gpus[place] for place in order), *switches])}
        links = tuple(
            GraphLink(number[tail], number[head], _capacity(f"networkx: edges[{tail!r}, {head!r}].capacity", data))
            for tail, head, data in graph.edges(data=True)
        )
        made = Graph(tuple(str(gpus[place]) for place in order), tuple(map(str, switches)), links)
        return cls(enclose(made, [homes[place] for place in order]), latency_s, graph=made)

    def to_networkx(self) -> nx.DiGraph[str]:
        """The graph for `from_networkx`, by name, and for the algorithms of networkx: GPUs, switches, links.

        A server that pools its NICs has a switch that it sends through and one that it receives through; without a
        fabric they let its GPUs exchange any rate, and the edges to them have no `capacity`.

        >>> graph = Topology.parse("2@50GB/s,1=25GB/s").to_networkx()
        >>> sorted(graph.edges(data="capacity"))[:2]
        [('core', 'h0', 50000000000), ('core', 'h1', 25000000000)]
        """
        import networkx as nx

        made: nx.DiGraph[str] = nx.DiGraph()
        wired = self.wired or pooled_graph(self.servers, self.pods, self.rail_only)
        for gpu, server in zip(wired.gpus, self.rank_server, strict=True):
            made.add_node(gpu, server=self.servers[server].name)
        made.add_nodes_from(wired.switches, switch=True)
        for link in wired.links:
            ends = wired.nodes[link.tail], wired.nodes[link.head]
            if link.rate == UNLIMITED:
                made.add_edge(*ends)
            else:
                made.add_edge(*ends, capacity=int(link.rate) if link.rate.denominator == 1 else link.rate)
        return made

    def card(self) -> Card:
        rows = tuple(
            (
                server.name,
                str(server.gpus),
                f"{sum(not nic.failed for nic in server.nics)}/{len(server.nics)}",
                show_rate(server.out) if server.out else "-",
                show_rate(server.in_) if server.in_ else "-",
            )
            for server in self.servers
        )
        latency = f", latency {show_time(float(self.latency_s))}" if self.latency_s else ""
        per = "-" if not self.rail_only else "- a rail"
        rows += tuple((pod.name, per, "-", show_rate(pod.up), show_rate(pod.down)) for pod in self.pods)
        pods = f" in {len(self.pods)} pods" if self.pods else ""
        rails = ", rail-only" if self.rail_only else ""
        title = f"{len(self.servers)} servers{pods}, {self.n_ranks} ranks{rails}{latency}"
        return Card(title, ("server or pod" if self.pods else "server", "GPUs", "NICs", "out", "in"), rows)

    def __repr__(self) -> str:
        pods = f", {len(self.pods)} pods" if self.pods and not self.text else ""
        if not self.text and self.wired is not None:
            pods += ", graph" if self.graph is not None else ", NICs of GPUs"
        return f"Topology({self.text or endpoint_text(self.out, self.in_)!r}{pods})"


def endpoint_text(out: Sequence[Fraction], in_: Sequence[Fraction]) -> str:
    """The shortest text form for endpoints of these rates: the commonest pair is the base, the others are named.

    >>> endpoint_text([Fraction(50), Fraction(50), Fraction(25)], [Fraction(50)] * 3)
    '3@50B/s,2=25B/s:50B/s'
    """
    pairs = list(zip(out, in_, strict=True))
    base = max(pairs, key=pairs.count)
    others = [f",{index}={_show_pair(*pair)}" for index, pair in enumerate(pairs) if pair != base]
    return f"{len(pairs)}@{_show_pair(*base)}{''.join(others)}"


def _show_pair(out: Fraction, in_: Fraction) -> str:
    return show_rate(out) if out == in_ else f"{show_rate(out)}:{show_rate(in_)}"


def _pooled(server: Server, gpus: int) -> Server:
    """The server with so many GPUs and its NICs pooled."""
    return replace(server, gpus=gpus, nics=tuple(replace(nic, gpu=None) for nic in server.nics))


def _graph_lines(graph: Graph, homes: Sequence[str]) -> list[str]:
    """The lines of a TOML file about a graph; `homes` are the servers of its GPUs, by name."""
    gpus = (
        f"  {{ name = {json.dumps(name)}, server = {json.dumps(home)} }},"
        for name, home in zip(graph.gpus, homes, strict=True)
    )
    links = (
        f"  {{ from = {json.dumps(graph.nodes[link.tail])}, to = {json.dumps(graph.nodes[link.head])}, "
        f'rate = "{show_rate(link.rate)}", one_way = true }},'
        for link in graph.links
    )
    return [f"switches = {json.dumps(list(graph.switches))}", "gpus = [", *gpus, "]", "links = [", *links, "]", ""]


def _capacity(where: str, data: Mapping[str, Any]) -> Fraction:
    """The rate of an edge of networkx."""
    given = data.get("capacity")
    if isinstance(given, str):
        try:
            return parse_rate(given)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
    if not isinstance(given, int | float | Fraction) or isinstance(given, bool) or not 0 < given < inf:
        raise InputError(f"{where}: {given!r}: must be a rate above zero, in bytes/s or as a text such as '50GB/s'")
    return Fraction(given)


def _by_server(shares: Sequence[_NicShares], rank_server: Sequence[int]) -> list[list[_NicShares]]:
    """The shares of each server's ranks."""
    of: dict[int, list[_NicShares]] = {}
    for server, nics in zip(rank_server, shares, strict=True):
        of.setdefault(server, []).append(nics)
    return list(of.values())


def _least(ranks: Sequence[_NicShares]) -> _NicShares:
    """By NIC, the least out and in that any of a server's ranks says; of NICs that not all of them have, those of the
    first."""
    if len({len(nics) for nics in ranks}) > 1:
        return ranks[0]
    return [(min(out for out, _ in same), min(in_ for _, in_ in same)) for same in zip(*ranks, strict=True)]


def _fit(shares: Sequence[tuple[float, float]], n_nics: int) -> list[tuple[float, float]]:
    """The shares of `n_nics` NICs: these, or their mean for each."""
    if len(shares) == n_nics:
        return list(shares)
    alive = [share if min(share) > 0 else (0.0, 0.0) for share in shares]
    return [(fmean(out for out, _ in alive), fmean(in_ for _, in_ in alive))] * n_nics


def _under(nics: Sequence[Nic], shares: Sequence[tuple[float, float]]) -> tuple[Nic, ...]:
    is_told = len(shares) == len(nics)
    return tuple(
        replace(nic, out=nic.out * Fraction(out), in_=nic.in_ * Fraction(in_), failed=nic.failed and not is_told)
        if min(out, in_) > 0
        else replace(nic, failed=True)
        for nic, (out, in_) in zip(nics, _fit(shares, len(nics)), strict=True)
    )
