"""Fair ports: all transfers flow at once, at max-min fair rates. The clock is a float."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column, sort_part
from optcc.compiled import row
from optcc.simulate.dependencies import (
    FINISHED,
    FRESH,
    LEAVING,
    LEFT,
    OUT,
    PAIR,
    START,
    TAKEN,
    Net,
    arrive,
    leave,
    next_arrival,
    next_leaving,
    seed,
    settle,
)
from optcc.simulate.ports import FIRST_PAIR, N_PAIRS, Pairs, link, unlink

Floats = npt.NDArray[np.float64]
_TOLERANCE = 4e-15
_TOUCHED, _DIRTY = range(2)
_RELAXED_SHARE = 4
"""If something changed at more than one in so many ports, all rates are found anew."""


class PortRates(NamedTuple):
    """What the ports give, bytes/s, and how that changes: the columns of the changes to come, in order of time."""

    rates: Floats
    at: Floats
    port: Column
    new: Floats
    lost: Floats


class Flows(NamedTuple):
    """What flows, by pair: transfers of one pair have one rate, so one counter serves them all.

    `served` bytes have gone to each transfer of the pair since it last was idle, as of time `since`; a transfer is sent
    when that reaches its `target`. `head` is the transfer with the least target, then along `behind`; `back` the last.
    `active` transfers flow; the present `rate` is for `counted` of them.
    """

    bytes: Floats
    target: Floats
    behind: Column
    ahead: Column
    head: Column
    back: Column
    active: Column
    counted: Column
    served: Floats
    since: Floats
    rate: Floats


def join(flows: Flows, pairs: Pairs, pair: int, transfer: int, now: float) -> None:
    """`transfer` begins to flow."""
    if flows.active[pair] == 0:
        flows.served[pair] = 0.0
        if flows.counted[pair] == 0:
            link(pairs, pair)
    else:
        flows.served[pair] += flows.rate[pair] * (now - flows.since[pair])
    flows.since[pair] = now
    flows.active[pair] += 1
    flows.target[transfer] = flows.served[pair] + flows.bytes[transfer]
    insert(flows, pair, transfer)


def insert(flows: Flows, pair: int, transfer: int) -> None:
    """Puts `transfer` into the list of its pair. Chunks are mostly of one size, so its place is looked for from the
    back.
    """
    before = flows.back[pair]
    while before >= 0 and flows.target[before] > flows.target[transfer]:
        before = flows.ahead[before]
    after = flows.behind[before] if before >= 0 else flows.head[pair]
    flows.ahead[transfer] = before
    flows.behind[transfer] = after
    if before >= 0:
        flows.behind[before] = transfer
    else:
        flows.head[pair] = transfer
    if after >= 0:
        flows.ahead[after] = transfer
    else:
        flows.back[pair] = transfer


def lose(flows: Flows, pair: int, lost: float, now: float) -> None:
    """Of what `pair` has sent of its first transfer, up to `lost` bytes must be sent again."""
    flows.served[pair] += flows.rate[pair] * (now - flows.since[pair])
    flows.since[pair] = now
    transfer = flows.head[pair]
    sent = flows.bytes[transfer] - (flows.target[transfer] - flows.served[pair])
    again = min(lost, max(sent, 0.0))
    flows.target[transfer] += again
    following = flows.behind[transfer]
    if following >= 0 and again > 0.0:
        flows.head[pair] = following
        flows.ahead[following] = -1
        insert(flows, pair, transfer)


class Scratch(NamedTuple):
    """Working space of the fair model.

    `touched` pairs (marked in `is_touched`) are those in which transfers began or ended, or changed their rate; `dirty`
    ports (marked in `is_dirty`) are those at which anything changed; `filled` are the lengths of these two lists.
    `reached` (marked in `seen`) are the ports that have been looked at for it, `pairs` those that flow through them,
    `level` their new rate. `free` is what a port has left for those `weight` transfers whose rate is not fixed yet.

    `height` is for each port the rate of the transfers that it holds back, infinite where it has rate to spare: a
    transfer has the least of the heights of its ports. `line` are the ports whose height is to be found again, a heap
    with their `rank` in it, the one that was lowest first; `limit` and `number` are for one port the rates that its
    pairs have elsewhere, and their transfers.
    """

    touched: Column
    is_touched: npt.NDArray[np.bool_]
    dirty: Column
    is_dirty: npt.NDArray[np.bool_]
    filled: Column
    reached: Column
    seen: npt.NDArray[np.bool_]
    free: Floats
    weight: Column
    pairs: Column
    level: Floats
    height: Floats
    line: Column
    rank: Column
    order: Floats
    limit: Floats
    number: Column


def mark(scratch: Scratch, port: int) -> None:
    """Something changed at `port`."""
    if not scratch.is_dirty[port]:
        scratch.is_dirty[port] = True
        scratch.dirty[scratch.filled[_DIRTY]] = port
        scratch.filled[_DIRTY] += 1


def touch(scratch: Scratch, pair: int) -> None:
    """A transfer of `pair` began or ended, or changed its rate."""
    if not scratch.is_touched[pair]:
        scratch.is_touched[pair] = True
        scratch.touched[scratch.filled[_TOUCHED]] = pair
        scratch.filled[_TOUCHED] += 1


def reach(flows: Flows, pairs: Pairs, scratch: Scratch, rates: Floats, begin: int, n_pairs: int) -> tuple[int, int]:
    """Adds to `reached` and `pairs` all that shares a port, be it through others, with the port `reached[begin]`."""
    end = begin + 1
    at = begin
    while at < end:
        port = scratch.reached[at]
        at += 1
        scratch.free[port] = rates[port]
        scratch.weight[port] = 0
        scratch.height[port] = np.inf
        for place in range(pairs.lists[port, FIRST_PAIR], pairs.lists[port, FIRST_PAIR] + pairs.lists[port, N_PAIRS]):
            pair = pairs.members[place]
            scratch.weight[port] += flows.active[pair]
            if pairs.ends[pair, 0] == port:
                scratch.pairs[n_pairs] = pair
                scratch.level[pair] = -1.0
                n_pairs += 1
            for side in range(pairs.ends.shape[1] >> 1):
                other = pairs.ends[pair, side]
                if other >= 0 and not scratch.seen[other]:
                    scratch.seen[other] = True
                    scratch.reached[end] = other
                    end += 1
    return end, n_pairs


def fill(flows: Flows, pairs: Pairs, scratch: Scratch, begin: int, end: int, rest: int) -> None:
    """Max-min fair rates of the `rest` pairs at the ports `reached[begin:end]`, by progressive filling.

    The port that can give each of its transfers least is full first; it fixes their rates, and what they take at their
    other ports is no longer free there.
    """
    level = 0.0
    while rest:
        full = -1
        least = 0.0
        at = begin
        while at < end:
            port = scratch.reached[at]
            if scratch.weight[port] > 0:
                at += 1
                # It gives less than the least so far; a division for each port would be most of the time.
                if full < 0 or scratch.free[port] < least * scratch.weight[port]:
                    full, least = port, scratch.free[port] / scratch.weight[port]
            else:  # it has nothing more to give, and goes behind those that have
                end -= 1
                scratch.reached[at] = scratch.reached[end]
                scratch.reached[end] = port
        level = max(level, least)  # it rises from port to port, up to rounding
        scratch.height[full] = level
        for place in range(pairs.lists[full, FIRST_PAIR], pairs.lists[full, FIRST_PAIR] + pairs.lists[full, N_PAIRS]):
            pair = pairs.members[place]
            if scratch.level[pair] < 0:
                scratch.level[pair] = level
                rest -= 1
                for side in range(pairs.ends.shape[1] >> 1):
                    port = pairs.ends[pair, side]
                    if port >= 0:
                        scratch.free[port] -= level * flows.active[pair]
                        scratch.weight[port] -= flows.active[pair]


def sift(heap: Column, position: Column, key: Floats, size: int, at: int) -> None:
    """Moves the entry at `at` to its place in a binary heap of `size`; `position[heap[at]] == at` throughout."""
    item = heap[at]
    while at > 0 and key[item] < key[heap[(at - 1) >> 1]]:
        heap[at] = heap[(at - 1) >> 1]
        position[heap[at]] = at
        at = (at - 1) >> 1
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and key[heap[child + 1]] < key[heap[child]]:
            child += 1
        if key[item] <= key[heap[child]]:
            break
        heap[at] = heap[child]
        position[heap[at]] = at
        at = child
    heap[at] = item
    position[item] = at


def remove(heap: Column, position: Column, key: Floats, size: int, item: int) -> int:
    """Takes `item` out of the heap and returns its new size."""
    at = position[item]
    position[item] = -1
    size -= 1
    if at < size:
        heap[at] = heap[size]
        position[heap[at]] = at
        sift(heap, position, key, size, at)
    return size


def find_height(flows: Flows, pairs: Pairs, scratch: Scratch, rates: Floats, port: int) -> float:
    """What `port` can give each of those of its transfers that no other port holds back further."""
    first, n = pairs.lists[port, FIRST_PAIR], pairs.lists[port, N_PAIRS]
    weight = 0
    for at in range(n):
        pair = pairs.members[first + at]
        limit = np.inf
        for side in range(pairs.ends.shape[1] >> 1):
            other = pairs.ends[pair, side]
            if other >= 0 and other != port and scratch.height[other] < limit:
                limit = scratch.height[other]
        scratch.limit[at] = limit
        scratch.number[at] = flows.active[pair]
        weight += flows.active[pair]
    free = float(rates[port])
    while weight:
        height = float(free / weight)
        left = 0
        for at in range(n):
            if scratch.limit[at] < height:
                free -= scratch.limit[at] * scratch.number[at]
                weight -= scratch.number[at]
            else:
                scratch.limit[left] = scratch.limit[at]
                scratch.number[left] = scratch.number[at]
                left += 1
        if left == n:
            return height
        n = left
    return np.inf


def differ(one: float, other: float) -> bool:
    """Up to rounding."""
    return one != other and not abs(one - other) <= _TOLERANCE * min(one, other)


def queue(scratch: Scratch, size: int, port: int) -> int:
    """Puts `port` into the line, and returns its new length."""
    scratch.order[port] = scratch.height[port]
    scratch.line[size] = port
    scratch.rank[port] = size
    sift(scratch.line, scratch.rank, scratch.order, size + 1, size)
    return size + 1


def relax(flows: Flows, pairs: Pairs, scratch: Scratch, rates: Floats, n_dirty: int) -> int:
    """New heights where they change because of what happened at the dirty ports; below zero: it was given up.

    A port's height follows from those of the ports beyond its pairs that are lower. So a change spreads from lower
    ports to higher ones, and ends at those that have rate to spare. Heights that follow from each other in this way
    are those of max-min fairness: every transfer has a port that is full and gives no other transfer more. Returned
    is the number of `reached` ports, which are those whose pairs may have another rate.
    """
    end, size = n_dirty, 0
    for at in range(n_dirty):
        port = scratch.dirty[at]
        scratch.reached[at] = port
        scratch.seen[port] = True
        size = queue(scratch, size, port)
    tries = len(rates)
    while size:
        port = scratch.line[0]
        size = remove(scratch.line, scratch.rank, scratch.order, size, port)
        before = scratch.height[port]
        height = find_height(flows, pairs, scratch, rates, port)
        if not differ(height, before):
            continue
        if tries == 0:
            while size:
                size = remove(scratch.line, scratch.rank, scratch.order, size, scratch.line[0])
            for at in range(end):
                scratch.seen[scratch.reached[at]] = False
            return -1
        tries -= 1
        scratch.height[port] = height
        if not scratch.seen[port]:
            scratch.seen[port] = True
            scratch.reached[end] = port
            end += 1
        for place in range(pairs.lists[port, FIRST_PAIR], pairs.lists[port, FIRST_PAIR] + pairs.lists[port, N_PAIRS]):
            pair = pairs.members[place]
            for side in range(pairs.ends.shape[1] >> 1):
                other = pairs.ends[pair, side]
                if other >= 0 and other != port and scratch.rank[other] < 0:
                    beyond = scratch.height[other]
                    if differ(min(before, beyond), min(height, beyond)):
                        size = queue(scratch, size, other)
    return end


def share(flows: Flows, pairs: Pairs, scratch: Scratch, rates: Floats) -> int:
    """New rates in `level` for the pairs in `pairs`, whose number is returned; no port is dirty afterwards."""
    n_dirty, end = scratch.filled[_DIRTY], -1
    scratch.filled[_DIRTY] = 0
    n_pairs = 0
    if n_dirty * _RELAXED_SHARE <= len(rates):
        end = relax(flows, pairs, scratch, rates, n_dirty)
        for at in range(end):
            port = scratch.reached[at]
            for place in range(
                pairs.lists[port, FIRST_PAIR], pairs.lists[port, FIRST_PAIR] + pairs.lists[port, N_PAIRS]
            ):
                pair = pairs.members[place]
                level = np.inf
                for side in range(pairs.ends.shape[1] >> 1):
                    other = pairs.ends[pair, side]
                    if other >= 0 and scratch.height[other] < level:
                        level = scratch.height[other]
                if scratch.level[pair] != level:
                    scratch.level[pair] = level
                    scratch.pairs[n_pairs] = pair
                    n_pairs += 1
    for at in range(n_dirty):
        scratch.is_dirty[scratch.dirty[at]] = False
    if end < 0:
        end = 0
        for at in range(n_dirty):
            port = scratch.dirty[at]
            if not scratch.seen[port]:
                begin = end
                before = n_pairs
                scratch.seen[port] = True
                scratch.reached[begin] = port
                end, n_pairs = reach(flows, pairs, scratch, rates, begin, before)
                fill(flows, pairs, scratch, begin, end, n_pairs - before)
    for at in range(end):
        scratch.seen[scratch.reached[at]] = False
    return n_pairs


class Ends(NamedTuple):
    """When the first transfer of each flowing pair is sent, in a heap of pairs: `position[pair]` in it is -1 if none
    flows, `key` is the time."""

    heap: Column
    position: Column
    key: Floats
    size: Column


def make_ends(n_pairs: int) -> Ends:
    """No transfer flows."""
    return Ends(
        np.zeros(n_pairs, dtype=np.int64),
        np.full(n_pairs, -1, dtype=np.int64),
        np.zeros(n_pairs),
        np.zeros(1, dtype=np.int64),
    )


def begin_flow(net: Net, flows: Flows, pairs: Pairs, scratch: Scratch, transfer: int, now: float) -> None:
    """The first byte of `transfer` leaves."""
    pair = net.rows[transfer, PAIR]
    join(flows, pairs, pair, transfer, now)
    touch(scratch, pair)


def start_fresh(net: Net, flows: Flows, pairs: Pairs, scratch: Scratch, now: float, overhead: float) -> None:
    """Ready transfers begin to flow, or their overhead begins."""
    if net.tail[FRESH] > 1:
        sort_part(row(net.queues, FRESH), 0, net.tail[FRESH])
    for at in range(net.tail[FRESH]):
        transfer = net.queues[FRESH, at]
        if overhead > 0:
            net.queues[LEAVING, net.tail[LEAVING]] = transfer
            net.tail[LEAVING] += 1
        else:
            begin_flow(net, flows, pairs, scratch, transfer, now)
    net.tail[FRESH] = 0


def count_flows(flows: Flows, pairs: Pairs, scratch: Scratch) -> None:
    """Marks the ports of touched pairs in which another number of transfers flows; a pair without any is unlinked."""
    for at in range(scratch.filled[_TOUCHED]):
        pair = scratch.touched[at]
        if flows.active[pair] != flows.counted[pair]:
            for side in range(pairs.ends.shape[1] >> 1):
                if pairs.ends[pair, side] >= 0:
                    mark(scratch, pairs.ends[pair, side])
            flows.counted[pair] = flows.active[pair]
            if flows.active[pair] == 0:
                unlink(pairs, pair)
                flows.rate[pair] = 0.0
                scratch.level[pair] = 0.0


def set_rates(flows: Flows, scratch: Scratch, n_changed: int, now: float) -> None:
    """The pairs found by `share` flow at their new rates."""
    for at in range(n_changed):
        pair = scratch.pairs[at]
        if flows.rate[pair] != scratch.level[pair]:
            flows.served[pair] += flows.rate[pair] * (now - flows.since[pair])
            flows.since[pair] = now
            flows.rate[pair] = scratch.level[pair]
            touch(scratch, pair)


def plan_ends(flows: Flows, scratch: Scratch, ends: Ends) -> None:
    """When the first transfer of each touched pair ends; no pair is touched afterwards."""
    size = ends.size[0]
    for at in range(scratch.filled[_TOUCHED]):
        pair = scratch.touched[at]
        scratch.is_touched[pair] = False
        if flows.rate[pair] > 0.0:
            rest = flows.target[flows.head[pair]] - flows.served[pair]
            ends.key[pair] = flows.since[pair] + rest / flows.rate[pair]
            if ends.position[pair] < 0:
                ends.heap[size] = pair
                ends.position[pair] = size
                size += 1
            sift(ends.heap, ends.position, ends.key, size, ends.position[pair])
        elif ends.position[pair] >= 0:
            size = remove(ends.heap, ends.position, ends.key, size, pair)
    ends.size[0] = size
    scratch.filled[_TOUCHED] = 0


def next_fair_moment(
    net: Net, times: Floats, ends: Ends, changes_at: float, now: float, latency: float, overhead: float
) -> float:
    """When something happens next, the next change of rates being at `changes_at`; infinite: nothing does."""
    later = changes_at
    if ends.size[0]:
        later = min(later, max(ends.key[ends.heap[0]], now))
    arrival = next_arrival(net, times, latency)
    if arrival >= 0:
        later = min(later, arrival)
    left = next_leaving(net, times, overhead)
    if left >= 0:
        later = min(later, left)
    return later


def end_overheads(
    net: Net,
    times: Floats,
    flows: Flows,
    pairs: Pairs,
    scratch: Scratch,
    now: float,
    latency: float,
    overhead: float,
    depth: int,
) -> int:
    """Transfers whose overhead is over begin to flow, or have left if they use no port."""
    while net.tail[LEFT] < net.tail[LEAVING] and next_leaving(net, times, overhead) <= now:
        transfer = net.queues[LEAVING, net.tail[LEFT]]
        net.tail[LEFT] += 1
        if net.rows[transfer, OUT] >= 0:
            begin_flow(net, flows, pairs, scratch, transfer, now)
        else:
            times[transfer, TAKEN] = times[transfer, START]
            depth = leave(net, times, transfer, now, latency, depth)
    return depth


def end_flows(
    net: Net, times: Floats, flows: Flows, scratch: Scratch, ends: Ends, now: float, latency: float, depth: int
) -> int:
    """Transfers that have been served are sent."""
    while ends.size[0] and ends.key[ends.heap[0]] <= now * (1 + _TOLERANCE):
        pair = ends.heap[0]
        touch(scratch, pair)
        flows.served[pair] = flows.target[flows.head[pair]]
        flows.since[pair] = now
        reached = flows.served[pair] * (1 + _TOLERANCE)
        while flows.head[pair] >= 0 and flows.target[flows.head[pair]] <= reached:
            transfer = flows.head[pair]
            flows.head[pair] = flows.behind[transfer]
            flows.active[pair] -= 1
            times[transfer, TAKEN] = times[transfer, START]
            depth = leave(net, times, transfer, now, latency, depth)
        if flows.head[pair] < 0:
            flows.back[pair] = -1
        else:
            flows.ahead[flows.head[pair]] = -1
        ends.size[0] = remove(ends.heap, ends.position, ends.key, ends.size[0], pair)
    return depth


def change_fair(flows: Flows, pairs: Pairs, scratch: Scratch, port_rates: PortRates, index: int, now: float) -> None:
    """Change `index` of the rates."""
    port = port_rates.port[index]
    port_rates.rates[port] = port_rates.new[index]
    mark(scratch, port)
    if port_rates.lost[index] > 0:
        first = pairs.lists[port, FIRST_PAIR]
        for place in range(first, first + pairs.lists[port, N_PAIRS]):
            if flows.active[pairs.members[place]] > 0:
                lose(flows, pairs.members[place], port_rates.lost[index], now)
                touch(scratch, pairs.members[place])


def run_fair(
    net: Net,
    times: Floats,
    port_rates: PortRates,
    pairs: Pairs,
    flows: Flows,
    scratch: Scratch,
    ends: Ends,
    latency: float,
    overhead: float,
) -> None:
    """Transfers flow as soon as they are ready, at max-min fair rates, which change when one begins or ends.

    Rates change only in pairs that share a port, possibly through others, with the one that began or ended; and none
    where as many began as ended.
    """
    happened, now = 0, 0.0
    depth = seed(net)
    while True:
        settle(net, times, now, latency, overhead, depth)
        depth = 0
        start_fresh(net, flows, pairs, scratch, now, overhead)
        count_flows(flows, pairs, scratch)
        set_rates(flows, scratch, share(flows, pairs, scratch, port_rates.rates), now)
        plan_ends(flows, scratch, ends)
        changing = happened < len(port_rates.at) and net.tail[FINISHED] < len(times)
        changes_at = port_rates.at[happened] if changing else np.inf
        later = next_fair_moment(net, times, ends, changes_at, now, latency, overhead)
        if later == np.inf:
            return
        now = later
        depth = arrive(net, times, now, latency, depth)
        depth = end_overheads(net, times, flows, pairs, scratch, now, latency, overhead, depth)
        depth = end_flows(net, times, flows, scratch, ends, now, latency, depth)
        while changing and happened < len(port_rates.at) and port_rates.at[happened] <= now:
            change_fair(flows, pairs, scratch, port_rates, happened, now)
            happened += 1


def make_flows(sizes: Floats, n_pairs: int) -> Flows:
    """No transfer flows."""
    n = len(sizes)
    behind, ahead = (np.full(n, -1, dtype=np.int64) for _ in range(2))
    head, back = (np.full(n_pairs, -1, dtype=np.int64) for _ in range(2))
    active, counted = (np.zeros(n_pairs, dtype=np.int64) for _ in range(2))
    served, since, rate = (np.zeros(n_pairs) for _ in range(3))
    return Flows(sizes, np.zeros(n), behind, ahead, head, back, active, counted, served, since, rate)


def make_scratch(n_pairs: int, n_ports: int) -> Scratch:
    """An empty working space."""
    return Scratch(
        np.zeros(n_pairs, dtype=np.int64),
        np.zeros(n_pairs, dtype=np.bool_),
        np.zeros(n_ports, dtype=np.int64),
        np.zeros(n_ports, dtype=np.bool_),
        np.zeros(2, dtype=np.int64),
        np.zeros(n_ports, dtype=np.int64),
        np.zeros(n_ports, dtype=np.bool_),
        np.zeros(n_ports),
        np.zeros(n_ports, dtype=np.int64),
        np.zeros(n_pairs, dtype=np.int64),
        np.zeros(n_pairs),
        np.full(n_ports, np.inf),
        np.zeros(n_ports, dtype=np.int64),
        np.full(n_ports, -1, dtype=np.int64),
        np.zeros(n_ports),
        np.zeros(n_pairs),
        np.zeros(n_pairs, dtype=np.int64),
    )


KERNELS: tuple[Callable[..., Any], ...] = (
    insert,
    join,
    lose,
    mark,
    touch,
    reach,
    fill,
    sift,
    remove,
    find_height,
    differ,
    queue,
    relax,
    share,
    begin_flow,
    start_fresh,
    count_flows,
    set_rates,
    plan_ends,
    next_fair_moment,
    end_overheads,
    end_flows,
    change_fair,
    run_fair,
)
