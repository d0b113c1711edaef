"""The bound on an exchange, with a certificate from below and, where it is known, a flow that achieves it.

    minimise  T
    subject to, for every port P:             sum over groups g and links e that use P of f_ge  <=  rate_P T
                for every group and node:     flow in - flow out  =  the node's demand, 0 for a switch

A group is all elements that start at one endpoint, or that end there if fewer endpoints receive. Any prices of ports
prove a bound (`optcc.verify.bounds.exchange_replay`), and the duals of the ports are the best ones.

Mostly no linear program is needed. Elements that take ways of fewest links, split by the rates of the links, are a
flow; if prices of the ports that it loads most, or of those around an endpoint or a server, prove that nothing is
faster, the two are the answer. On pooled NICs, with or without pods, and on symmetric networks they do.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate

from optcc.collective import Collective
from optcc.errors import SolverError, SolverUnknown
from optcc.topology import Topology
from optcc.verify.bounds.exchange import BlockDemand, BlockFlow, ExchangeCertificate, distances
from optcc.verify.bounds.exchange_replay import replay_exchange
from optcc.verify.bounds.network import FlowNetwork, endpoint_gpus
from optcc.verify.bounds.solvers import (
    AT_MOST,
    EQUAL,
    HighsSolver,
    Infeasible,
    LinearProgram,
    MakeSolver,
    Unsolved,
    exact_vertex,
)

TIME_LIMIT_S = 60.0
VARIABLES_MAX = 40_000
"""Of the linear program: groups times links. Above, the best prices found without it are the bound."""
FLOW_MAX = 2_000_000
"""Groups times links for which a flow is computed."""
_DENOMINATORS = (10, 1000, 10**6, 10**9)
_Loads = dict[int, list[Fraction]]
"""For each group, the load of each link, in messages."""


class ExchangeUnknown(SolverUnknown):
    """The solver gave up, or the linear program is too large; `best` is the best bound certified."""

    def __init__(self, message: str, best: ExchangeCertificate) -> None:
        super().__init__(message)
        self.best = best


def exchange_bound(
    topology: Topology | FlowNetwork,
    collective: Collective | BlockDemand,
    size_bytes: int,
    *,
    time_limit_s: float = TIME_LIMIT_S,
    solver: MakeSolver | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[ExchangeCertificate, bool]:
    """The certified bound on an exchange of `size_bytes`, and whether a linear program was solved for it.

    GPUs behind fabrics of finite rate are endpoints.

    >>> bound, _ = exchange_bound(Topology.parse("4@50MB/s,3=25MB/s"), Collective("alltoall", 4), 400_000_000)
    >>> str(bound.seconds), str(bound.gap), bound.binding
    ('3', '0', ('in h3',))

    With `solver` a linear program is solved in any case. Without, one of more than `VARIABLES_MAX` variables is not:
    the certificate is then the best that is known. Raises TopologyError if an endpoint cannot reach one to which it
    must send, `ExchangeUnknown` at the time limit and for a program that is too large for `solver`, SolverError if the
    solver's claim differs from what its prices prove.
    """
    started = clock()
    if isinstance(topology, FlowNetwork):
        network, gpus = topology, [1] * len(topology.endpoints)
        server: Sequence[int] = range(len(gpus))
    else:
        network = FlowNetwork.from_topology(topology, fabric=True)
        gpus = endpoint_gpus(topology, fabric=True)
        server = _servers(topology, gpus)
    demand = collective if isinstance(collective, BlockDemand) else BlockDemand.of(collective, gpus)
    best = ExchangeCertificate.of(network, demand, size_bytes, [Fraction(0)] * len(network.ports))
    solved = False
    if demand.demands and size_bytes:
        best = _without_solver(best, server)
        if best.gap != 0 or solver is not None:
            columns = len(demand.groups) * len(network.links)
            if columns <= VARIABLES_MAX:
                best = _Program(best).improve(solver or HighsSolver, lambda: time_limit_s - (clock() - started))
                solved = True
            elif solver is not None:
                replay_exchange(best)
                raise ExchangeUnknown(
                    f"bound of {demand.collective}: a linear program of {columns} variables: must be of at most "
                    f"{VARIABLES_MAX}",
                    best,
                )
    replay_exchange(best)
    return best, solved


def _servers(topology: Topology, gpus: Sequence[int]) -> list[int]:
    """The server of each endpoint; endpoints have these numbers of GPUs."""
    at = topology.rank_server
    return [at[past - count] for past, count in zip(accumulate(gpus), gpus, strict=True)]


def _without_solver(empty: ExchangeCertificate, server: Sequence[int]) -> ExchangeCertificate:
    """The best of a few certificates, with the flow over ways of fewest links, if it is not too large."""
    network, demand = empty.network, empty.demand
    achieved, busiest = None, list[int]()
    if len(demand.groups) * len(network.links) <= FLOW_MAX:
        loads = _fewest_links(network, demand)
        achieved = _flow(network, loads, empty.size_bytes)
        busy = _seconds_of_ports(network, loads)
        most = max(busy)
        busiest = [port for port, seconds in enumerate(busy) if seconds == most]
    best = empty
    for ports in _candidates(network, demand, server, busiest):
        prices = [Fraction(int(port in ports)) for port in range(len(network.ports))]
        found = ExchangeCertificate.of(network, demand, empty.size_bytes, prices, achieved)
        best = max(best, found, key=lambda each: each.seconds)
        if best.gap == 0:
            break
    return best


def _candidates(
    network: FlowNetwork, demand: BlockDemand, server: Sequence[int], busiest: Sequence[int]
) -> Iterator[set[int]]:
    """Sets of ports of price 1: the busiest around one endpoint, around one server, those most loaded, and all."""
    alone = list(range(len(network.endpoints)))
    for place in (alone, server) if list(server) != alone else (alone,):
        ports = _busiest_around(network, demand, place)
        if ports:
            yield ports
    if busiest:
        yield {busiest[0]}
        yield set(busiest)
        yield set(range(len(network.ports)))


def _busiest_around(network: FlowNetwork, demand: BlockDemand, place: Sequence[int]) -> set[int]:
    """The ports out of a place, or into it, that take longest for what must pass them; `place[v]` is endpoint v's.

    A switch that only endpoints of one place use is in it. Of a link with several ports the slowest counts.
    """
    passing: dict[tuple[int, bool], int] = defaultdict(int)
    for (source, sink), count in demand.demands.items():
        if place[source] != place[sink]:
            passing[place[source], True] += count
            passing[place[sink], False] += count
    p, nowhere = len(network.endpoints), -1
    users: list[set[int]] = [{place[node]} if node < p else set() for node in range(network.n_nodes)]
    for link in network.links:
        for node, other in ((link.tail, link.head), (link.head, link.tail)):
            if node >= p:
                users[node].add(place[other] if other < p else nowhere)
    at = [next(iter(each)) if len(each) == 1 else nowhere for each in users]
    around: dict[tuple[int, bool], set[int]] = defaultdict(set)
    for link in network.links:
        if at[link.tail] != at[link.head]:
            port = min(link.ports, key=lambda each: network.ports[each].rate)
            around[at[link.tail], True].add(port)
            around[at[link.head], False].add(port)
    slowest, found = Fraction(0), set[int]()
    for side, count in passing.items():
        rate = sum((network.ports[port].rate for port in around[side]), Fraction(0))
        if rate and count / rate > slowest:
            slowest, found = count / rate, around[side]
    return found


def _fewest_links(network: FlowNetwork, demand: BlockDemand) -> _Loads:
    """The load of links when elements take ways of fewest links, split by the links' rates at every node."""
    starts, backward = list(demand.groups), demand.to_sinks
    hops = distances(network, [1] * len(network.links), starts, backward=backward)
    before: list[list[tuple[int, int]]] = [[] for _ in range(network.n_nodes)]  # (link, the node before it)
    for number, link in enumerate(network.links):
        near, far = (link.head, link.tail) if backward else (link.tail, link.head)
        before[far].append((number, near))
    speed = [min(network.ports[port].rate for port in link.ports) for link in network.links]
    found: _Loads = {}
    for column, start in enumerate(starts):
        found[start] = loads = [Fraction(0)] * len(network.links)
        passing: dict[int, Fraction] = defaultdict(Fraction)
        passing |= {node: Fraction(count, demand.parts) for node, count in demand.groups[start].items()}
        away = [int(each) for each in hops[:, column]]
        for node in sorted(range(network.n_nodes), key=lambda each: -away[each]):
            if node == start or not passing[node]:
                continue
            ways = [(number, near) for number, near in before[node] if away[near] + 1 == away[node]]
            total = sum((speed[number] for number, _ in ways), Fraction(0))
            for number, near in ways:
                loads[number] = passing[node] * speed[number] / total
                passing[near] += loads[number]
    return found


def _seconds_of_ports(network: FlowNetwork, loads: _Loads) -> list[Fraction]:
    """For each port, seconds per byte of the message that these loads take."""
    carried = [Fraction(0)] * len(network.ports)
    for group in loads.values():
        for link, load in zip(network.links, group, strict=True):
            if load:
                for port in link.ports:
                    carried[port] += load
    return [load / port.rate for load, port in zip(carried, network.ports, strict=True)]


def _flow(network: FlowNetwork, loads: _Loads, size_bytes: int) -> BlockFlow:
    """The noun for these loads."""
    seconds = size_bytes * max(_seconds_of_ports(network, loads))
    return BlockFlow(
        seconds,
        {start: tuple((number, load) for number, load in enumerate(each) if load) for start, each in loads.items()},
    )


class _Program:
    """The linear program of `best`'s network and demand; T in units of its bound, flows in parts of the message."""

    def __init__(self, best: ExchangeCertificate) -> None:
        self.best, network, demand = best, best.network, best.demand
        self.parts = demand.parts
        self.unit_s = best.seconds / best.size_bytes
        self.program = LinearProgram()
        self.time = self.program.variable("T", cost=1)
        names = [
            f"{network.nodes[link.tail]} to {network.nodes[link.head]} {n}" for n, link in enumerate(network.links)
        ]
        self.load = {
            start: [self.program.variable(f"flow {network.nodes[start]}: {name}") for name in names]
            for start in demand.groups
        }
        self.ports = [self._port(number) for number in range(len(network.ports))]
        for start in demand.groups:
            for node in range(network.n_nodes):
                if node != start:
                    self._keeps(start, node)

    def _port(self, number: int) -> int:
        """The constraint that port `number` carries its load in the time T."""
        port = self.best.network.ports[number]
        users = [each for each, link in enumerate(self.best.network.links) if number in link.ports]
        room = (self.time, -port.rate * self.unit_s * self.parts)
        entries = (*((columns[each], Fraction(1)) for columns in self.load.values() for each in users), room)
        return self.program.constraint(f"port {port.name}", entries, AT_MOST, Fraction(0))

    def _keeps(self, start: int, node: int) -> None:
        """The constraint on what a node keeps of the flow of `start`."""
        demand, links = self.best.demand, self.best.network.links
        sign = -1 if demand.to_sinks else 1
        entries = tuple(
            (self.load[start][number], Fraction(sign if link.head == node else -sign))
            for number, link in enumerate(links)
            if node in (link.tail, link.head)
        )
        name = f"flow {self.best.network.nodes[start]} at {self.best.network.nodes[node]}"
        self.program.constraint(name, entries, EQUAL, Fraction(demand.groups[start].get(node, 0)))

    def improve(self, solver: MakeSolver, seconds_left: Callable[[], float]) -> ExchangeCertificate:
        """The certificate of the optimum, with its flow where it is exact; raises as `exchange_bound` does."""
        outcome = solver(self.program).solve(seconds_left())
        if isinstance(outcome, Infeasible):
            raise SolverError("solver: infeasible: where endpoints reach each other there is a flow")
        if isinstance(outcome, Unsolved):
            replay_exchange(self.best)
            raise ExchangeUnknown(f"bound of {self.best.collective}: {outcome.reason}", self.best)
        vertex = exact_vertex(self.program, outcome)
        best = self.best
        if vertex is not None:
            best = max(best, self._certified(vertex[1]), key=lambda each: each.seconds)
        claim = self.unit_s * best.size_bytes * Fraction(outcome.objective)
        if best.seconds < claim:
            for most in _DENOMINATORS:
                rounded = self._certified(Fraction(dual).limit_denominator(most) for dual in outcome.duals)
                best = max(best, rounded, key=lambda each: each.seconds)
        if not abs(claim - best.seconds) <= Fraction(1, 10**6) * best.seconds:
            raise SolverError(f"solver: claims {float(claim)} s: its numbers support {float(best.seconds)} s")
        flow = self._achieved(vertex[0]) if vertex is not None and min(vertex[0]) >= 0 else None
        known = [each for each in (flow, self.best.achieved) if each is not None]
        achieved = min(known, key=lambda each: each.seconds, default=None)
        return ExchangeCertificate.of(best.network, best.demand, best.size_bytes, best.prices, achieved)

    def _certified(self, duals: Iterable[Fraction]) -> ExchangeCertificate:
        """What the duals of the ports prove; negative ones count as zero."""
        priced = list(duals)
        prices = [max(Fraction(0), -priced[row]) for row in self.ports]
        return ExchangeCertificate.of(self.best.network, self.best.demand, self.best.size_bytes, prices)

    def _achieved(self, values: Sequence[Fraction]) -> BlockFlow:
        """The flow of exact values that are not negative."""
        loads = {start: [values[each] / self.parts for each in columns] for start, columns in self.load.items()}
        return _flow(self.best.network, loads, self.best.size_bytes)
