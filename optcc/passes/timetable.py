"""Which transfer goes first on each port: a list schedule on the given bandwidths.

    before  the author's order: segment by segment, stage by stage
    after   an order for every out port and one for every in port, in which segments overlap and no port idles for long

The order of the ports matters as much as the routes: the same OptCC transfers released all at once, under fair
sharing, take 1.4 to 1.5 times the bound. There is an order for each of two port models of `optcc.simulate`:

    fifo       a port serves one transfer at a time at its own rate (`optcc.fifo_port`); the network buffers up to the
               slots of the receiver
    exclusive  a transfer holds both of its ports at the rate of the slower one. This order is also the better one where
               flows share ports fairly, as with TCP: OptCC of 64 MiB over four emulated hosts, one at half rate,
               reaches 98 % of the bound in this order and 91 % in the other

A schedule that is written for fair ports needs no order (`optcc.passes.lane_assignment`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column, Lists, column
from optcc.errors import TopologyError
from optcc.graph import Graph
from optcc.passes.list_schedule import FOLLOWS, NEEDS, SPARES, Jobs, list_exclusive, list_fifo
from optcc.routing import first_and_last
from optcc.schedule import REDUCE
from optcc.timing import Model
from optcc.topology import Topology
from optcc.transfers import Transfers

TICKS = 2**20
"""Ticks of the longest transfer. Durations are rounded to ticks because the sections of a ragged size differ by an
element: without rounding, a section that is ready a nanosecond earlier would overtake its predecessor."""
LOOKAHEAD = 32
"""Search this many ready transfers of an out port for one whose receiver has a free slot."""
LEAD = 128
"""Start a transfer at most this many segments ahead of the first unfinished one: an underused port would otherwise fill
the slots of its receivers with data that is not needed for long."""
SAMPLE = 64
"""Segments of which the first transfers are looked at to see how long a segment is on its way."""


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Transfer numbers in the order in which their first bytes leave, and in which they are done.

    Both respect the dependencies, and no receiver has more transfers in flight to it than its slots.
    """

    sends: Column
    receives: Column

    def overtakes(self, transfers: Transfers) -> bool:
        """True if some rank receives its messages in another order than they were sent in."""
        place = np.empty(len(self.sends), dtype=np.int64)
        place[self.sends] = np.arange(len(self.sends))
        by_rank = self.receives[np.argsort(transfers.dst[self.receives], kind="stable")]
        same = transfers.dst[by_rank[1:]] == transfers.dst[by_rank[:-1]]
        return bool((same & (place[by_rank[1:]] < place[by_rank[:-1]])).any())

    @classmethod
    def as_written(cls, transfers: Transfers) -> Order:
        """The author's order, for senders and receivers."""
        written = column(np.arange(len(transfers)))
        return cls(written, written)


def timetable(
    transfers: Transfers,
    topology: Topology,
    slots: int,
    ports: Model = "exclusive",
    flights: int = 0,
    *,
    keeps_order: bool = False,
) -> tuple[Transfers, Order]:
    """The order in which a list schedule starts the transfers: whenever a port becomes free, the first one in the
    author's order that can start. Also the transfers, in which (under fifo) siblings are added in order of arrival,
    unless the schedule `keeps_order`.

    Under exclusive ports, and fair ones, a transfer can start when its data have arrived and both its ports are free.
    Under fifo its out port must be free and fewer than `slots` transfers in flight to its receiver; the transfers that
    it must not overtake at the receiver need only have started. With `flights`, a transfer starts at most so many times
    as many segments ahead of the first unfinished one as are on their way at a time (`in_flight`), else `LEAD`.

    Raises TopologyError if the topology has another number of ranks.
    """
    check_ranks(transfers, topology)
    n = len(transfers)
    used = _PortTimes.of(transfers, topology)
    longest = float(max(used.out_s.max(initial=0.0), used.in_s.max(initial=0.0)))
    tick = longest / TICKS or 1.0
    out_ticks, in_ticks = (np.rint(each / tick).astype(np.int64) for each in (used.out_s, used.in_s))
    latency = round(float(topology.latency_s) / tick)
    family = None
    if ports == "fifo":
        family = column(np.arange(n)) if keeps_order else families(transfers)
    missing, first, successors = _successors(transfers, family)
    channel = np.unique(transfers.src * transfers.n_ranks + transfers.dst, return_inverse=True)[1].astype(np.int64)
    jobs = Jobs(transfers.dst, channel, used.out, used.in_, out_ticks, in_ticks, first, successors)
    if family is None:
        starts = column(list_exclusive(jobs, missing, used.count, latency))
        return transfers, Order(starts, starts)
    segments = flights * in_flight(transfers, used, float(topology.latency_s)) if flights else LEAD
    lead = int(segments * -(-n // (int(transfers.segment.max(initial=0)) + 1)))
    counts = used.count, transfers.n_ranks
    sends, receives = list_fifo(jobs, missing, *counts, latency, slots, LOOKAHEAD, lead)
    order = Order(column(sends), column(receives))
    return seat(transfers, family, order), order


def check_ranks(transfers: Transfers, topology: Topology) -> None:
    """Raises TopologyError if the topology has another number of ranks."""
    if topology.n_ranks != transfers.n_ranks:
        raise TopologyError(f"{topology!r} has {topology.n_ranks} ranks: the schedule has {transfers.n_ranks}")


@dataclass(frozen=True, slots=True, eq=False)
class _PortTimes:
    """For each transfer its out port and its in port (-1: it stays on its rank) and its seconds on them.

    Ports 0..s-1 are the servers' (all surviving NICs pooled), the next ones the GPUs' to their server's fabric.
    """

    count: int
    out: Column
    in_: Column
    out_s: npt.NDArray[np.float64]
    in_s: npt.NDArray[np.float64]

    @classmethod
    def of(cls, transfers: Transfers, topology: Topology) -> _PortTimes:
        if topology.wired is not None:
            return cls._of_graph(transfers, topology.wired)
        server = np.array(topology.rank_server, dtype=np.int64)
        n_servers = len(topology.servers)
        src, dst = transfers.src, transfers.dst
        inside = server[src] == server[dst]
        fabric = np.array([float(each.fabric or Fraction(0)) for each in topology.servers])[server[src]]
        free = inside & (fabric == 0)
        out_rate = np.where(inside, fabric, np.array([float(rate) for rate in topology.out])[server[src]])
        in_rate = np.where(inside, fabric, np.array([float(rate) for rate in topology.in_])[server[dst]])
        return cls(
            n_servers + topology.n_ranks,
            # Read-only as those of a graph: kernels are compiled anew for arrays that can be written.
            column(np.where(src == dst, -1, np.where(inside, n_servers + src, server[src]))),
            column(np.where(src == dst, -1, np.where(inside, n_servers + dst, server[dst]))),
            transfers.bytes / np.where(free, np.inf, out_rate),
            transfers.bytes / np.where(free, np.inf, in_rate),
        )

    @classmethod
    def _of_graph(cls, transfers: Transfers, graph: Graph) -> _PortTimes:
        """The ports are links."""
        first, last = first_and_last(transfers, graph)
        rate = np.array([float(link.rate) for link in graph.links])
        out_s, in_s = (np.where(side < 0, 0.0, transfers.bytes / rate[side]) for side in (first, last))
        return cls(len(graph.links), first, last, out_s, in_s)


def in_flight(transfers: Transfers, used: _PortTimes, latency_s: float) -> float:
    """How many segments are on their way at a time in a pipeline that keeps its busiest port busy (Little's law): how
    long one takes by itself, over the time after which the next one ends."""
    n_segments = int(transfers.segment.max(initial=0)) + 1
    sampled = min(len(transfers), SAMPLE * -(-len(transfers) // n_segments))
    lasts = np.maximum(used.out_s[:sampled], used.in_s[:sampled]) + latency_s
    starts, before = transfers.after.starts[: sampled + 1].tolist(), transfers.after.values.tolist()
    ends: list[float] = []
    for begin, end, needed_s in zip(starts, starts[1:], lasts.tolist(), strict=False):
        ends.append(max((ends[each] for each in before[begin:end]), default=0.0) + needed_s)
    busiest_s = max(
        np.bincount(port[port >= 0], needed_s[port >= 0], minlength=1).max()
        for port, needed_s in ((used.out, used.out_s), (used.in_, used.in_s))
    )
    return max(ends, default=0.0) * n_segments / busiest_s if busiest_s else float(n_segments)


def _waits(transfers: Transfers) -> tuple[Column, Column, Column]:
    """All dependencies: the predecessor, the transfer that waits for it, and why: NEEDS, FOLLOWS or SPARES."""
    src, dst, after = transfers.src, transfers.dst, transfers.after
    before, owner = after.values, np.repeat(np.arange(len(transfers)), np.diff(after.starts))
    wrote = dst[before] == src[owner]
    writer = np.full(len(transfers), -1, dtype=np.int64)
    np.maximum.at(writer, owner[wrote], before[wrote])
    last = writer[owner]
    exact = (transfers.dst_offset[last] == transfers.src_offset[owner]) & (
        transfers.bytes[last] == transfers.bytes[owner]
    )
    # An edge in the reverse direction: the bytes read there have been written again since.
    back = wrote & (src[before] == dst[owner]) & (before != last) & exact
    kind = np.where(dst[before] == dst[owner], FOLLOWS, SPARES)
    return before, owner, np.where((wrote & ~back) | (src[owner] == dst[owner]), NEEDS, kind)


def _successors(transfers: Transfers, family: Column | None = None) -> tuple[Column, Column, Column]:
    """For each transfer its number of predecessors; then lists of those that need (3t), follow (3t + 1) or spare
    (3t + 2) transfer t. Without `family` every wait is a need; with it, siblings do not wait for each other, and a
    transfer that waits for the last sibling waits for all of them."""
    n = len(transfers)
    before, owner, kind = _waits(transfers)
    if family is None:
        kind = np.full(len(before), NEEDS)
    else:
        strangers = family[before] != family[owner]
        before, owner, kind = before[strangers], owner[strangers], kind[strangers]
        by_family = np.argsort(family, kind="stable")
        begin = np.searchsorted(family[by_family], np.arange(n + 1))
        sizes = np.where(kind == SPARES, 1, np.diff(begin)[family[before]])
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        alone = np.repeat(np.where(kind == SPARES, before, -1), sizes)
        each = by_family[np.repeat(begin[family[before]], sizes) + within]
        before, owner, kind = np.where(alone >= 0, alone, each), np.repeat(owner, sizes), np.repeat(kind, sizes)
    event = 3 * before + kind
    order = np.argsort(event, kind="stable")
    first = np.concatenate(([0], np.cumsum(np.bincount(event, minlength=3 * n)))).astype(np.int64)
    return np.bincount(owner, minlength=n).astype(np.int64), first, owner[order]


def families(transfers: Transfers) -> Column:
    """For each transfer the last of its siblings; itself if it has none.

    Siblings are consecutive reductions into the same bytes of a rank. Their order is free if each rank's contribution
    is added once, along one tree: then all ranks get the same result whatever the order.
    """
    n = len(transfers)
    family = np.arange(n)
    src = transfers.src
    reduces = (transfers.op == REDUCE) & (src != transfers.dst)
    place = np.sort(src[reduces] * (transfers.size_bytes + transfers.scratch_bytes + 1) + transfers.src_offset[reduces])
    if (place[1:] == place[:-1]).any():
        return family
    before, owner, kind = _waits(transfers)
    n_at_receiver = np.bincount(owner[(kind != NEEDS) | (src[before] == transfers.dst[owner])], minlength=n)
    n_waiting = np.bincount(before[kind != SPARES], minlength=n)
    follows = (kind == FOLLOWS) & reduces[before] & reduces[owner]
    follows &= transfers.dst_offset[before] == transfers.dst_offset[owner]
    follows &= (transfers.bytes[before] == transfers.bytes[owner]) & (n_waiting[before] == 1)
    follows &= n_at_receiver[owner] == 1
    one, next_one = before[follows].tolist(), owner[follows].tolist()
    waits = n_at_receiver > 0
    waits[next_one] = False
    for elder, younger in zip(one, next_one, strict=True):  # any sibling may come first, so none may wait for its place
        waits[younger] = waits[elder]
    for elder, younger in zip(one[::-1], next_one[::-1], strict=True):
        if not waits[younger]:
            family[elder] = family[younger]
    return family


def seat(transfers: Transfers, family: Column, order: Order) -> Transfers:
    """The same transfers with siblings chained in the order in which `order` receives them, which is the order of the
    additions."""
    n = len(transfers)
    before, owner, kind = _waits(transfers)
    kept = family[before] != family[owner]
    before, owner, kind = before[kept], owner[kept], kind[kept]
    received = np.empty(n, dtype=np.int64)
    received[order.receives] = np.arange(n)
    line = np.lexsort((received, family))
    last = np.empty(n, dtype=np.int64)
    last[family[line]] = line  # of repeated indices the last one counts
    same = family[line[1:]] == family[line[:-1]]
    others = kind != SPARES
    own = ~others | (transfers.src[before] == transfers.dst[owner])  # a write after a read of the same bytes
    before = np.concatenate((before[own], last[family[before[others]]], line[:-1][same]))
    owner = np.concatenate((owner[own], owner[others], line[1:][same]))
    pair = np.sort(owner * n + before)
    pair = pair[np.append(True, pair[1:] != pair[:-1])] if len(pair) else pair
    starts = np.concatenate(([0], np.cumsum(np.bincount(pair // n, minlength=n))))
    return replace(transfers, after=Lists(column(starts), column(pair % n)))
