"""Which ports and uplinks each transfer uses, and for how many ticks.

Ports are assigned as in `optcc.simulate`: the ports of the two servers, their surviving NICs pooled; inside a server
the fabric ports of two GPUs, or none; for a local operation none. From one pod to another also the uplink of the one
and the way down to the other; a server without a pod is on the core, and uses none of its own. Where GPUs are linked
(`Topology.wired`), the first link of a transfer's route is its out port, the last one its in port, and the links
between switches are its uplinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column
from optcc.graph import Graph
from optcc.topology import Topology
from optcc.transfers import Transfers

TICKS_MAX = 2**62
"""Times below this are computed in 64 bits."""


@dataclass(frozen=True, slots=True)
class PortUse:
    """The ports of a topology, uplinks among them, and which of them each transfer uses (-1: none).

    `out` and `in_` are the ports at its ends; row t of `ways` has the uplinks that transfer t passes, first to last.
    """

    names: tuple[str, ...]
    rates: tuple[Fraction, ...]
    ranks: tuple[int | None, ...]
    out: Column
    in_: Column
    ways: Column

    @classmethod
    def of(cls, transfers: Transfers, topology: Topology) -> PortUse:
        """Those of `topology`, on which every transfer has a link."""
        if topology.wired is not None:
            return cls._of_links(transfers, topology.wired)
        rows: list[tuple[str, Fraction, int | None]] = []
        nic_port, gpu_port, rank = [], [], 0
        for server in topology.servers:
            nic_port.append(len(rows) if len(topology.servers) > 1 else -1)
            if len(topology.servers) > 1:
                only = rank if server.gpus == 1 else None
                rows += [(f"out {server.name}", server.out, only), (f"in {server.name}", server.in_, only)]
            for gpu in range(server.gpus):
                gpu_port.append(-1 if server.fabric is None else len(rows))
                if server.fabric is not None:
                    rows += [(f"{way} {server.name} gpu {gpu}", server.fabric, rank) for way in ("out", "in")]
                rank += 1
        src, dst, server_of = transfers.src, transfers.dst, np.array(topology.rank_server)
        between = server_of[src] != server_of[dst]
        nics, gpus = np.array(nic_port), np.array(gpu_port)
        out = np.where(between, nics[server_of[src]], gpus[src])
        into = np.where(between, nics[server_of[dst]], gpus[dst])
        used = (src != dst) & (out >= 0)
        pod_of, first = np.array(topology.server_pod), len(rows)
        pods = [pod_of[server_of[src]], pod_of[server_of[dst]]] if topology.pods else []
        ways = np.full((len(transfers), len(pods)), -1)
        for side, pod in enumerate(pods):
            ways[:, side] = np.where((pod >= 0) & (pods[0] != pods[1]), first + 2 * pod + side, -1)
        for each in topology.pooled_pods:
            rows += [(f"up {each.name}", each.up, None), (f"down {each.name}", each.down, None)]
        names, rates, ranks = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(names, rates, ranks, np.where(used, out, -1), np.where(used, into + 1, -1), ways)

    @classmethod
    def _of_links(cls, transfers: Transfers, graph: Graph) -> PortUse:
        """A link that leaves a GPU is an out port, one that enters a GPU an in port; from GPU to GPU it is both."""
        p, port_of = len(graph.gpus), dict[tuple[int, int], int]()
        rows: list[tuple[str, Fraction, int | None]] = []
        for number, link in enumerate(graph.links):
            name = graph.name_of(link)
            for side, (node, way) in enumerate(((link.tail, "out"), (link.head, "in"))):
                if node < p:
                    port_of[number, side] = len(rows)
                    rows.append((f"{way} {name}", link.rate, node))
            if min(link.tail, link.head) >= p:
                port_of[number, 0] = len(rows)
                rows.append((name, link.rate, None))
        longest = max((len(route) for routes in graph.routes for route in routes.values()), default=0)
        used, place = np.unique(transfers.src * p + transfers.dst, return_inverse=True)
        ends, ways = np.full((len(used), 2), -1), np.full((len(used), max(longest - 2, 0)), -1)
        for at, code in enumerate(used.tolist()):
            route = graph.routes[code // p].get(code % p, ())
            if route:
                ends[at] = port_of[route[0], 0], port_of[route[-1], 1]
                ways[at, : len(route) - 2] = [port_of[link, 0] for link in route[1:-1]]
        names, rates, ranks = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(names, rates, ranks, ends[place, 0], ends[place, 1], ways[place])

    @property
    def columns(self) -> tuple[Column, ...]:
        """`out`, `in_` and the columns of `ways`."""
        return self.out, self.in_, *self.ways.T

    def carried(self, transfers: Transfers) -> list[int]:
        """The bytes that each port carries."""
        sums = np.zeros(len(self.names), dtype=np.int64)
        if transfers.bytes.max(initial=0) > TICKS_MAX // max(len(transfers), 1):
            sums = sums.astype(object)
        for ports in self.columns:
            used = np.flatnonzero(ports >= 0)
            np.add.at(sums, ports[used], transfers.bytes[used].astype(sums.dtype))
        return [int(each) for each in sums.tolist()]


@dataclass(frozen=True, slots=True)
class PortTicks:
    """For how many ticks each transfer occupies its ports: int64 if `wide` is false, else Python's integers.

    `per_s` ticks are a second; `ways` is as in `PortUse`, 0 where there is no uplink.
    """

    per_s: int
    latency: int
    out: npt.NDArray[Any]
    in_: npt.NDArray[Any]
    ways: npt.NDArray[Any]
    wide: bool

    @classmethod
    def of(cls, transfers: Transfers, ports: PortUse, latency_s: Fraction) -> PortTicks:
        """In a tick that divides every duration."""
        carried = ports.carried(transfers)
        busy = [rate.numerator for size, rate in zip(carried, ports.rates, strict=True) if size]
        per_s = lcm(latency_s.denominator, *busy)
        per_byte = [
            per_s // rate.numerator * rate.denominator if size else 0
            for size, rate in zip(carried, ports.rates, strict=True)
        ]
        latency = per_s // latency_s.denominator * latency_s.numerator
        # Upper bound on any path: all transfers in sequence.
        horizon = len(transfers) * latency + sum(size * each for size, each in zip(carried, per_byte, strict=True))
        wide = horizon >= TICKS_MAX
        dtype = object if wide else np.int64
        each_byte = np.array([*per_byte, 0], dtype=dtype)  # the last entry is for index -1, no port
        size = transfers.bytes.astype(dtype)
        ways = size[:, None] * each_byte[ports.ways]
        return cls(per_s, latency, size * each_byte[ports.out], size * each_byte[ports.in_], ways, wide)
