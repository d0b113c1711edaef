"""Which transfer goes first on each port: a list schedule on the given bandwidths.

    before  the author's order: segment by segment, stage by stage
    after   a linear order in which segments overlap and no port is asked for two transfers at once

The order of the ports matters as much as the routes: the same OptCC transfers released all at once, under fair
sharing, take 1.4 to 1.5 times the bound, and 1.03 to 1.06 times in the order found here (4 ranks, l = 2, 32 to 64
segments).
"""

from __future__ import annotations

import heapq
from bisect import insort
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column, column
from optcc.errors import TopologyError
from optcc.topology import Topology
from optcc.transfers import Transfers

TRANSFERS_MAX = 400_000
"""Above this many transfers the author's order is kept: a list schedule would take minutes."""
TICKS = 4096
"""Times are whole numbers, this many for the longest transfer: the sections of a ragged size differ by an element, and
without rounding the one that is ready a nanosecond earlier would overtake the one that should go first."""


def timetable(transfers: Transfers, topology: Topology) -> Column:
    """Transfer numbers in the order in which a list schedule with exclusive ports starts them.

    Whenever ports fall free, the startable transfer of the earliest segment goes first, in the author's order within
    it. The result respects `after`.

    Raises TopologyError if the topology has another number of ranks.
    """
    if topology.n_ranks != transfers.n_ranks:
        raise TopologyError(f"{topology!r} has {topology.n_ranks} ranks: the schedule has {transfers.n_ranks}")
    n = len(transfers)
    if n > TRANSFERS_MAX:
        return column(np.arange(n))
    out_port, in_port, seconds = _ports(transfers, topology)
    tick = float(seconds.max(initial=0.0)) / TICKS or 1.0
    duration = np.rint(seconds / tick).astype(np.int64).tolist()
    latency = round(float(topology.latency_s) / tick)
    priority = _ranking(transfers)
    waiting_for, successors = _dependents(transfers)

    n_ports = max([*out_port, *in_port], default=0) + 1
    out_free, in_free = [True] * n_ports, [True] * n_ports
    ready: list[list[tuple[int, int]]] = [[] for _ in range(n_ports)]  # by out port, best first
    wanting: list[set[int]] = [set() for _ in range(n_ports)]  # by in port: out ports with a ready transfer to it
    events: list[tuple[int, int, int]] = []
    started: list[int] = []

    def make_ready(index: int) -> int:
        insort(ready[out_port[index]], (priority[index], index))
        wanting[in_port[index]].add(out_port[index])
        return out_port[index]

    fresh = {make_ready(index) for index in range(n) if not waiting_for[index]}
    now = 0
    while True:
        _start(fresh, ready, out_free, in_free, in_port, started, events, now, duration)
        if not events:
            break
        now = events[0][0]
        fresh = set()
        while events and events[0][0] == now:
            _, freed, index = heapq.heappop(events)
            if freed:
                out_free[out_port[index]] = in_free[in_port[index]] = True
                fresh.add(out_port[index])
                fresh |= wanting[in_port[index]]
                heapq.heappush(events, (now + latency, 0, index))
            else:
                for successor in successors[index]:
                    waiting_for[successor] -= 1
                    if not waiting_for[successor]:
                        fresh.add(make_ready(successor))
    assert len(started) == n, "dependencies form a cycle"
    return column(started)


def _start(
    fresh: set[int],
    ready: list[list[tuple[int, int]]],
    out_free: list[bool],
    in_free: list[bool],
    in_port: list[int],
    started: list[int],
    events: list[tuple[int, int, int]],
    now: int,
    duration: list[int],
) -> None:
    """Starts, best first, every transfer of the out ports `fresh` that finds both its ports free."""
    while True:
        best: tuple[tuple[int, int], int] | None = None
        for port in sorted(fresh):
            if not out_free[port]:
                continue
            for entry in ready[port]:
                if in_free[in_port[entry[1]]]:
                    best = (entry, port) if best is None or entry < best[0] else best
                    break
        if best is None:
            return
        entry, port = best
        index = entry[1]
        ready[port].remove(entry)
        out_free[port] = in_free[in_port[index]] = False
        started.append(index)
        heapq.heappush(events, (now + duration[index], 1, index))


def _ports(transfers: Transfers, topology: Topology) -> tuple[list[int], list[int], npt.NDArray[np.float64]]:
    """For each transfer its out port, its in port and its seconds on them.

    Ports 0..s-1 are the servers' (all surviving NICs pooled), the next ones the GPUs' to their server's fabric.
    """
    server = np.array(topology.rank_server, dtype=np.int64)
    n_servers = len(topology.servers)
    src, dst = transfers.src, transfers.dst
    inside = server[src] == server[dst]
    out_port = np.where(inside, n_servers + src, server[src])
    in_port = np.where(inside, n_servers + dst, server[dst])
    out = np.array([float(rate) for rate in topology.out])[server[src]]
    in_ = np.array([float(rate) for rate in topology.in_])[server[dst]]
    fabric = np.array([float(each.fabric or Fraction(0)) for each in topology.servers])[server[src]]
    rate = np.where(inside, np.where((fabric > 0) & (src != dst), fabric, np.inf), np.minimum(out, in_))
    return out_port.tolist(), in_port.tolist(), transfers.bytes / rate


def _ranking(transfers: Transfers) -> list[int]:
    """Each transfer's place when sorted by segment, then by the author's order."""
    place = np.empty(len(transfers), dtype=np.int64)
    place[np.lexsort((np.arange(len(transfers)), transfers.segment))] = np.arange(len(transfers))
    return [int(each) for each in place]


def _dependents(transfers: Transfers) -> tuple[list[int], list[list[int]]]:
    """For each transfer, how many it waits for, and who waits for it."""
    counts: list[int] = []
    successors: list[list[int]] = [[] for _ in range(len(transfers))]
    for index, before in enumerate(transfers.after):
        counts.append(len(before))
        for each in before:
            successors[each].append(index)
    return counts, successors
