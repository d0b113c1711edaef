"""Which transfer goes first on each port: a list schedule on the given bandwidths.

    before  the author's order: segment by segment, stage by stage
    after   an order for every out port and one for every in port, in which segments overlap and no port idles for long

The order of the ports matters as much as the routes: the same OptCC transfers released all at once, under fair
sharing, take 1.4 to 1.5 times the bound. There is an order for each of two port models of `optcc.simulate`:

    fifo       a port serves one transfer at a time at its own rate; the network stores what a sender is faster with, up
               to the slots of the receiver
    exclusive  a transfer holds both of its ports at the rate of the slower one; also the better order where flows
               share ports fairly, as TCP's do: OptCC of 64 MiB over four hosts, one at half rate, reaches 98 % of the
               bound on emulated hosts in this order and 91 % in the other

A schedule that is written for fair ports needs no order (`optcc.passes.lane_assignment`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column, Lists, column
from optcc.compiled import compiled
from optcc.errors import TopologyError
from optcc.schedule import REDUCE
from optcc.timing import Model
from optcc.topology import Topology
from optcc.transfers import Transfers

TICKS = 2**20
"""Times are whole numbers, this many for the longest transfer: the sections of a ragged size differ by an element, and
without rounding the one that is ready a nanosecond earlier would overtake the one that should go first."""
LOOKAHEAD = 32
"""So many ready transfers of an out port are looked at for one whose receiver has room."""
LEAD = 128
"""So many segments a transfer may be ahead of the first one that is not done: a port with time to
spare would fill its receivers with what is not needed for long."""


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Transfer numbers in the order in which their first byte leaves, and in which their in ports take them.

    Both respect the dependencies, and no receiver has more on the way to it than its slots.
    """

    sends: Column
    receives: Column

    def overtakes(self, transfers: Transfers) -> bool:
        """True if some rank receives in another order than in which its messages were sent."""
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
    transfers: Transfers, topology: Topology, slots: int, ports: Model = "exclusive"
) -> tuple[Transfers, Order]:
    """The order in which a list schedule starts the transfers: whenever a port falls free, the first one in the
    author's order that can start. Also the transfers, in which (under fifo) sums of siblings are made as they come.

    Under exclusive ports, and fair ones, that is one whose data are there and whose two ports are free. Under fifo only
    the out port must be free and the receiver must have fewer than `slots` on their way to it; what it must not
    overtake at the receiver need not be done, only ahead of it.

    Raises TopologyError if the topology has another number of ranks.
    """
    check_ranks(transfers, topology)
    n = len(transfers)
    used = _PortTimes.of(transfers, topology)
    longest = float(max(used.out_s.max(initial=0.0), used.in_s.max(initial=0.0)))
    tick = longest / TICKS or 1.0
    out_ticks, in_ticks = (np.rint(each / tick).astype(np.int64) for each in (used.out_s, used.in_s))
    latency = round(float(topology.latency_s) / tick)
    sends, receives = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    if ports == "fifo":
        family = families(transfers)
        waiting = _successors(transfers, family)
        lead = LEAD * -(-n // (int(transfers.segment.max(initial=0)) + 1))
        sizes = (latency, used.count, transfers.n_ranks, slots, LOOKAHEAD, lead)
        channel = np.unique(transfers.src * transfers.n_ranks + transfers.dst, return_inverse=True)[1]
        ends = (transfers.dst, channel.astype(np.int64), used.out, used.in_)
        args = (*ends, out_ticks, in_ticks, *sizes, *waiting, sends, receives)
        done = _kernels().list_fifo(*args)
        assert done == n, "transfers wait for each other in a circle"
        order = Order(column(sends), column(receives))
        arranged = seat(transfers, family, order)
    else:
        waiting = _successors(transfers)
        ticks = np.maximum(out_ticks, in_ticks)
        started = _kernels().list_exclusive(used.out, used.in_, ticks, latency, used.count, *waiting, sends)
        assert started == n, "transfers wait for each other in a circle"
        order, arranged = Order(column(sends), column(sends)), transfers
    return arranged, order


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
            np.where(src == dst, -1, np.where(inside, n_servers + src, server[src])),
            np.where(src == dst, -1, np.where(inside, n_servers + dst, server[dst])),
            transfers.bytes / np.where(free, np.inf, out_rate),
            transfers.bytes / np.where(free, np.inf, in_rate),
        )


_NEEDS, _FOLLOWS, _SPARES = range(3)
"""Why one transfer waits for another: it needs the bytes at its sender; or at its receiver it comes after it into the
same bytes, or must not overwrite what the other still sends."""


def _waits(transfers: Transfers) -> tuple[Column, Column, Column]:
    """All dependencies: who comes first, who waits for it, and why: _NEEDS, _FOLLOWS or _SPARES."""
    src, dst, after = transfers.src, transfers.dst, transfers.after
    before, owner = after.values, np.repeat(np.arange(len(transfers)), np.diff(after.starts))
    wrote = dst[before] == src[owner]
    writer = np.full(len(transfers), -1, dtype=np.int64)
    np.maximum.at(writer, owner[wrote], before[wrote])
    last = writer[owner]
    exact = (transfers.dst_offset[last] == transfers.src_offset[owner]) & (
        transfers.bytes[last] == transfers.bytes[owner]
    )
    # On the way back along an edge: what is read there has been written again since.
    back = wrote & (src[before] == dst[owner]) & (before != last) & exact
    kind = np.where(dst[before] == dst[owner], _FOLLOWS, _SPARES)
    return before, owner, np.where((wrote & ~back) | (src[owner] == dst[owner]), _NEEDS, kind)


def _successors(transfers: Transfers, family: Column | None = None) -> tuple[Column, Column, Column]:
    """For each transfer how many it waits for; then lists of those that need (3t), follow (3t + 1) or spare (3t + 2)
    transfer t. Without `family` all need what they wait for; with it, siblings do not wait for each other, and who
    waits for the last of them waits for all."""
    n = len(transfers)
    before, owner, kind = _waits(transfers)
    if family is None:
        kind = np.full(len(before), _NEEDS)
    else:
        strangers = family[before] != family[owner]
        before, owner, kind = before[strangers], owner[strangers], kind[strangers]
        by_family = np.argsort(family, kind="stable")
        begin = np.searchsorted(family[by_family], np.arange(n + 1))
        sizes = np.where(kind == _SPARES, 1, np.diff(begin)[family[before]])
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        alone = np.repeat(np.where(kind == _SPARES, before, -1), sizes)
        each = by_family[np.repeat(begin[family[before]], sizes) + within]
        before, owner, kind = np.where(alone >= 0, alone, each), np.repeat(owner, sizes), np.repeat(kind, sizes)
    event = 3 * before + kind
    order = np.argsort(event, kind="stable")
    first = np.concatenate(([0], np.cumsum(np.bincount(event, minlength=3 * n)))).astype(np.int64)
    return np.bincount(owner, minlength=n).astype(np.int64), first, owner[order]


def families(transfers: Transfers) -> Column:
    """For each transfer the last of its siblings, itself if it has none.

    Siblings are reductions into the same bytes of a rank, one behind the other. They may come in any order if each
    rank's part goes in once, along one tree: then all ranks agree on the result whatever the order.
    """
    n = len(transfers)
    family = np.arange(n)
    src = transfers.src
    reduces = (transfers.op == REDUCE) & (src != transfers.dst)
    place = np.sort(src[reduces] * (transfers.size_bytes + transfers.scratch_bytes + 1) + transfers.src_offset[reduces])
    if (place[1:] == place[:-1]).any():
        return family
    before, owner, kind = _waits(transfers)
    n_at_receiver = np.bincount(owner[(kind != _NEEDS) | (src[before] == transfers.dst[owner])], minlength=n)
    n_waiting = np.bincount(before[kind != _SPARES], minlength=n)
    follows = (kind == _FOLLOWS) & reduces[before] & reduces[owner]
    follows &= transfers.dst_offset[before] == transfers.dst_offset[owner]
    follows &= (transfers.bytes[before] == transfers.bytes[owner]) & (n_waiting[before] == 1)
    follows &= n_at_receiver[owner] == 1
    one, next_one = before[follows].tolist(), owner[follows].tolist()
    waits = n_at_receiver > 0
    waits[next_one] = False
    for elder, younger in zip(one, next_one, strict=True):  # the eldest must find its place free, so that any may be it
        waits[younger] = waits[elder]
    for elder, younger in zip(one[::-1], next_one[::-1], strict=True):
        if not waits[younger]:
            family[elder] = family[younger]
    return family


def seat(transfers: Transfers, family: Column, order: Order) -> Transfers:
    """The same transfers with siblings one behind the other as `order` receives them: that is the order in which their
    parts are added."""
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
    others = kind != _SPARES
    own = ~others | (transfers.src[before] == transfers.dst[owner])  # it overwrites what that one sends
    before = np.concatenate((before[own], last[family[before[others]]], line[:-1][same]))
    owner = np.concatenate((owner[own], owner[others], line[1:][same]))
    pair = np.sort(owner * n + before)
    pair = pair[np.append(True, pair[1:] != pair[:-1])] if len(pair) else pair
    starts = np.concatenate(([0], np.cumsum(np.bincount(pair // n, minlength=n))))
    return replace(transfers, after=Lists(column(starts), column(pair % n)))


@cache
def _kernels() -> Any:
    return compiled((_push, _pop, _insert, _remove, _release, _list_fifo, _list_exclusive), globals())


def _push(times: Column, events: Column, size: int, time: int, event: int) -> int:
    """Adds an event to a binary heap of `size`, whose new size is returned; equal times go by the event's number."""
    at = size
    while at > 0:
        up = (at - 1) >> 1
        if times[up] < time or (times[up] == time and events[up] < event):
            break
        times[at], events[at] = times[up], events[up]
        at = up
    times[at], events[at] = time, event
    return size + 1


def _pop(times: Column, events: Column, size: int) -> int:
    """Takes the first event off the heap; the new size."""
    size -= 1
    time, event = times[size], events[size]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        other = child + 1
        if other < size and (
            times[other] < times[child] or (times[other] == times[child] and events[other] < events[child])
        ):
            child = other
        if time < times[child] or (time == times[child] and event < events[child]):
            break
        times[at], events[at] = times[child], events[child]
        at = child
    times[at], events[at] = time, event
    return size


def _insert(ahead: Column, behind: Column, head: Column, port: int, transfer: int) -> None:
    """Puts a ready transfer into a port's list, which is in the author's order."""
    before, after = -1, head[port]
    while 0 <= after < transfer:
        before, after = after, behind[after]
    ahead[transfer], behind[transfer] = before, after
    if before < 0:
        head[port] = transfer
    else:
        behind[before] = transfer
    if after >= 0:
        ahead[after] = transfer


def _remove(ahead: Column, behind: Column, head: Column, port: int, transfer: int) -> None:
    """Takes a transfer out of its port's list."""
    before, after = ahead[transfer], behind[transfer]
    if before < 0:
        head[port] = after
    else:
        behind[before] = after
    if after >= 0:
        ahead[after] = before


def _release(event: int, missing: Column, first: Column, successors: Column, ready: Column, n_ready: int) -> int:
    """Tells those that wait for `event`; the ones that wait for nothing more are added to `ready`."""
    for at in range(first[event], first[event + 1]):
        missing[successors[at]] -= 1
        if missing[successors[at]] == 0:
            ready[n_ready] = successors[at]
            n_ready += 1
    return n_ready


def _list_fifo(
    dst: Column,
    channel: Column,
    out_port: Column,
    in_port: Column,
    out_ticks: Column,
    in_ticks: Column,
    latency: int,
    n_ports: int,
    n_ranks: int,
    slots: int,
    lookahead: int,
    lead: int,
    missing: Column,
    first: Column,
    successors: Column,
    sends: Column,
    receives: Column,
) -> int:
    """Writes both orders and returns how many transfers are done.

    Event 4t: transfer t has come far enough for its in port to take it without a pause; 4t + 1: its last byte has left;
    4t + 2: it is through its in port; 4t + 3: it has arrived. It is done when what it follows is done and what it
    spares has left, and what started before it on its channel is done: in the order of its receive lane.

    Slots are given out as in a lane, whatever that order turns out to be: while transfer t is on its way, at most so
    many may have started for its receiver that all but the last `slots` of them were done when t started.
    """
    n = len(dst)
    ahead, behind = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    head = np.full(n_ports, -1, dtype=np.int64)
    out_busy = np.zeros(n_ports, dtype=np.bool_)
    in_free_at = np.zeros(n_ports, dtype=np.int64)
    n_begun, n_ended = np.zeros(n_ranks, dtype=np.int64), np.zeros(n_ranks, dtype=np.int64)  # by receiver
    room_until = np.full(n_ranks, slots, dtype=np.int64)  # so many may have begun
    oldest, newest = np.full(n_ranks, -1, dtype=np.int64), np.full(n_ranks, -1, dtype=np.int64)  # on the way
    younger, room_of = np.full(n, -1, dtype=np.int64), np.zeros(n, dtype=np.int64)
    held = np.zeros(n, dtype=np.int64)  # what it must come after at its receiver, not yet done with
    last_on, next_on = np.full(n, -1, dtype=np.int64), np.full(n, -1, dtype=np.int64)  # by channel; by transfer
    has_arrived, is_done = np.zeros(n, dtype=np.bool_), np.zeros(n, dtype=np.bool_)
    looks, n_looks = np.empty(2 * n_ports, dtype=np.int64), 0  # out ports that may start something
    will_look = np.zeros(n_ports, dtype=np.bool_)
    stuck, n_stuck = np.empty(n_ports, dtype=np.int64), 0  # idle out ports with nothing but full receivers
    is_stuck = np.zeros(n_ports, dtype=np.bool_)
    ready, n_ready = np.empty(n, dtype=np.int64), 0
    coming, n_coming = np.empty(n_ports, dtype=np.int64), 0
    finished, n_finished = np.empty(n, dtype=np.int64), 0
    times, events, size = np.empty(3 * n + 1, dtype=np.int64), np.empty(3 * n + 1, dtype=np.int64), 0
    n_started, n_done, now, first_undone = 0, 0, 0, 0
    for transfer in range(n):
        for at in range(first[3 * transfer + _FOLLOWS], first[3 * transfer + 3]):
            held[successors[at]] += 1
        if missing[transfer] == 0:
            ready[n_ready] = transfer
            n_ready += 1
    while True:
        while n_ready > 0 or n_looks > 0:
            while n_ready > 0:
                n_ready -= 1
                transfer = ready[n_ready]
                port = out_port[transfer]
                if port >= 0:
                    _insert(ahead, behind, head, port, transfer)
                    if not out_busy[port] and not will_look[port]:
                        will_look[port] = True
                        looks[n_looks] = port
                        n_looks += 1
                else:  # on one rank: it starts and is done at once
                    sends[n_started], receives[n_done] = transfer, transfer
                    is_done[transfer] = True
                    n_started += 1
                    n_done += 1
                    for why in (_NEEDS, _FOLLOWS, _SPARES):
                        n_ready = _release(3 * transfer + why, missing, first, successors, ready, n_ready)
                    for at in range(first[3 * transfer + _FOLLOWS], first[3 * transfer + 3]):
                        held[successors[at]] -= 1
                        if held[successors[at]] == 0 and has_arrived[successors[at]]:
                            finished[n_finished] = successors[at]
                            n_finished += 1
            looks[:n_looks].sort()
            for at in range(n_looks):
                port = looks[at]
                will_look[port] = False
                transfer = head[port]
                seen = 0
                while transfer >= 0 and n_begun[dst[transfer]] >= room_until[dst[transfer]] and seen < lookahead:
                    transfer = behind[transfer]
                    seen += 1
                full = transfer < 0 or n_begun[dst[transfer]] >= room_until[dst[transfer]]
                if full or transfer >= first_undone + lead:
                    if head[port] >= 0 and not is_stuck[port]:
                        is_stuck[port] = True
                        stuck[n_stuck] = port
                        n_stuck += 1
                    continue
                _remove(ahead, behind, head, port, transfer)
                out_busy[port] = True
                rank = dst[transfer]
                earlier = last_on[channel[transfer]]
                if earlier >= 0 and not is_done[earlier]:
                    next_on[earlier] = transfer
                    held[transfer] += 1
                last_on[channel[transfer]] = transfer
                n_begun[rank] += 1
                room_of[transfer] = n_ended[rank] + slots
                if oldest[rank] < 0:
                    oldest[rank] = transfer
                    room_until[rank] = room_of[transfer]
                else:
                    younger[newest[rank]] = transfer
                newest[rank] = transfer
                sends[n_started] = transfer
                n_started += 1
                ends = now + out_ticks[transfer]
                if out_ticks[transfer] > in_ticks[transfer]:
                    size = _push(times, events, size, ends - in_ticks[transfer], 4 * transfer)
                else:
                    coming[n_coming] = transfer
                    n_coming += 1
                size = _push(times, events, size, ends, 4 * transfer + 1)
                n_ready = _release(3 * transfer + _FOLLOWS, missing, first, successors, ready, n_ready)
                n_ready = _release(3 * transfer + _SPARES, missing, first, successors, ready, n_ready)
            n_looks = 0
        coming[:n_coming].sort()
        for at in range(n_coming):
            port = in_port[coming[at]]
            in_free_at[port] = max(now, in_free_at[port]) + in_ticks[coming[at]]
            size = _push(times, events, size, in_free_at[port], 4 * coming[at] + 2)
        n_coming = 0
        if n_finished == 0:
            if size == 0:
                return n_done
            now = times[0]
            while size > 0 and times[0] == now:
                event = events[0]
                size = _pop(times, events, size)
                transfer = event >> 2
                what = event & 3
                if what == 0:
                    coming[n_coming] = transfer
                    n_coming += 1
                elif what == 1:
                    port = out_port[transfer]
                    out_busy[port] = False
                    if head[port] >= 0 and not will_look[port]:
                        will_look[port] = True
                        looks[n_looks] = port
                        n_looks += 1
                    for at in range(first[3 * transfer + _SPARES], first[3 * transfer + 3]):
                        held[successors[at]] -= 1
                        if held[successors[at]] == 0 and has_arrived[successors[at]]:
                            finished[n_finished] = successors[at]
                            n_finished += 1
                elif what == 2:
                    size = _push(times, events, size, now + latency, 4 * transfer + 3)
                else:
                    has_arrived[transfer] = True
                    if held[transfer] == 0:
                        finished[n_finished] = transfer
                        n_finished += 1
        any_finished = n_finished > 0
        while n_finished > 0:
            n_finished -= 1
            transfer = finished[n_finished]
            is_done[transfer] = True
            receives[n_done] = transfer
            n_done += 1
            n_ended[dst[transfer]] += 1
            n_ready = _release(3 * transfer + _NEEDS, missing, first, successors, ready, n_ready)
            for at in range(first[3 * transfer + _FOLLOWS], first[3 * transfer + _SPARES]):
                held[successors[at]] -= 1
                if held[successors[at]] == 0 and has_arrived[successors[at]]:
                    finished[n_finished] = successors[at]
                    n_finished += 1
            later = next_on[transfer]
            if later >= 0:
                held[later] -= 1
                if held[later] == 0 and has_arrived[later]:
                    finished[n_finished] = later
                    n_finished += 1
            rank = dst[transfer]
            while oldest[rank] >= 0 and is_done[oldest[rank]]:
                oldest[rank] = younger[oldest[rank]]
            room_until[rank] = room_of[oldest[rank]] if oldest[rank] >= 0 else n_begun[rank] + slots
        while first_undone < n and is_done[first_undone]:
            first_undone += 1
        if any_finished:
            for at in range(n_stuck):
                port = stuck[at]
                is_stuck[port] = False
                if not out_busy[port] and not will_look[port]:
                    will_look[port] = True
                    looks[n_looks] = port
                    n_looks += 1
            n_stuck = 0


def _list_exclusive(
    out_port: Column,
    in_port: Column,
    ticks: Column,
    latency: int,
    n_ports: int,
    missing: Column,
    first: Column,
    successors: Column,
    sends: Column,
) -> int:
    """Writes the order of the starts and returns their number. Event 2t: transfer t has left; 2t + 1: it is done."""
    n = len(ticks)
    ahead, behind = np.empty((2, n), dtype=np.int64), np.empty((2, n), dtype=np.int64)
    head = np.full((2, n_ports), -1, dtype=np.int64)  # ready transfers by out port, and by in port
    busy = np.zeros((2, n_ports), dtype=np.bool_)
    looks, n_looks = np.empty(2 * n_ports, dtype=np.int64), 0
    will_look = np.zeros(2 * n_ports, dtype=np.bool_)
    ready, n_ready = np.empty(n, dtype=np.int64), 0
    times, events, size = np.empty(n + 1, dtype=np.int64), np.empty(n + 1, dtype=np.int64), 0
    n_started, now = 0, 0
    for transfer in range(n):
        if missing[transfer] == 0:
            ready[n_ready] = transfer
            n_ready += 1
    while True:
        while n_ready > 0:
            n_ready -= 1
            transfer = ready[n_ready]
            if out_port[transfer] >= 0:
                _insert(ahead[0], behind[0], head[0], out_port[transfer], transfer)
                _insert(ahead[1], behind[1], head[1], in_port[transfer], transfer)
                if not will_look[out_port[transfer]]:
                    will_look[out_port[transfer]] = True
                    looks[n_looks] = out_port[transfer]
                    n_looks += 1
            else:
                sends[n_started] = transfer
                n_started += 1
                n_ready = _release(3 * transfer + _NEEDS, missing, first, successors, ready, n_ready)
        while True:
            best, kept = -1, 0
            for at in range(n_looks):
                side, port = looks[at] // n_ports, looks[at] % n_ports
                transfer = -1 if busy[side, port] else head[side, port]
                while transfer >= 0 and (busy[0, out_port[transfer]] or busy[1, in_port[transfer]]):
                    transfer = behind[side, transfer]
                if transfer < 0:
                    will_look[looks[at]] = False
                    continue
                looks[kept] = looks[at]
                kept += 1
                if best < 0 or transfer < best:
                    best = transfer
            n_looks = kept
            if best < 0:
                break
            _remove(ahead[0], behind[0], head[0], out_port[best], best)
            _remove(ahead[1], behind[1], head[1], in_port[best], best)
            busy[0, out_port[best]], busy[1, in_port[best]] = True, True
            sends[n_started] = best
            n_started += 1
            size = _push(times, events, size, now + ticks[best], 2 * best)
        if size == 0:
            return n_started
        now = times[0]
        while size > 0 and times[0] == now:
            transfer, is_done = events[0] >> 1, events[0] & 1
            size = _pop(times, events, size)
            if is_done:
                n_ready = _release(3 * transfer + _NEEDS, missing, first, successors, ready, n_ready)
                continue
            size = _push(times, events, size, now + latency, 2 * transfer + 1)
            busy[0, out_port[transfer]], busy[1, in_port[transfer]] = False, False
            for look in (out_port[transfer], n_ports + in_port[transfer]):
                if not will_look[look]:
                    will_look[look] = True
                    looks[n_looks] = look
                    n_looks += 1
