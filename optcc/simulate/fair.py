"""Fair ports: all transfers flow at once, at max-min fair rates (`optcc.simulate.max_min`). The clock is a float."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

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
from optcc.simulate.max_min import TOLERANCE, TOUCHED, Floats, Flows, Scratch, mark, remove, share, sift
from optcc.simulate.ports import FIRST_PAIR, N_PAIRS, Pairs, link, unlink


class PortRates(NamedTuple):
    """What the ports give, bytes/s, and how that changes: the columns of the changes to come, in order of time."""

    rates: Floats
    at: Floats
    port: Column
    new: Floats
    lost: Floats


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


def touch(scratch: Scratch, pair: int) -> None:
    """A transfer of `pair` began or ended, or changed its rate."""
    if not scratch.is_touched[pair]:
        scratch.is_touched[pair] = True
        scratch.touched[scratch.filled[TOUCHED]] = pair
        scratch.filled[TOUCHED] += 1


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
    for at in range(scratch.filled[TOUCHED]):
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
    for at in range(scratch.filled[TOUCHED]):
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
    scratch.filled[TOUCHED] = 0


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
    while ends.size[0] and ends.key[ends.heap[0]] <= now * (1 + TOLERANCE):
        pair = ends.heap[0]
        touch(scratch, pair)
        flows.served[pair] = flows.target[flows.head[pair]]
        flows.since[pair] = now
        reached = flows.served[pair] * (1 + TOLERANCE)
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


KERNELS: tuple[Callable[..., Any], ...] = (
    insert,
    join,
    lose,
    touch,
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
