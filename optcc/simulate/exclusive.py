"""Exclusive ports: a transfer holds both of its ports for as long as the slower one needs.

Where pods have uplinks, a transfer goes at the pace of the slowest on its way. It takes up an uplink for its bytes over
the uplink's rate; it begins when what has started before it on both of its uplinks has had its time there, and holds
its ports meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column, sort_part
from optcc.compiled import fetch, row
from optcc.simulate.dependencies import (
    BEHIND,
    FRESH,
    LEAVING,
    LEFT,
    NEXT_SEND,
    PAIR,
    SENT,
    START,
    START_OPENER,
    TAKEN,
    Net,
    arrive,
    leave,
    look_ahead,
    next_leaving,
    next_moment,
    seed,
    settle,
)
from optcc.simulate.event_queue import EventQueue, clear, next_event, put, take
from optcc.simulate.ports import FIRST_PAIR, N_PAIRS, Pairs, link, unlink
from optcc.simulate.tick_clock import Changes, Paces, change_rate, cost, rescale, resent

Ids = npt.NDArray[np.int32]
HOLDER, HELD_BEFORE, STILL = range(3)
PAIR_HEAD, PAIR_BACK, IS_LINKED = range(3)
TICKET, OF_TICKET, TURN = range(3)
PACE, HELD_UNTIL, LEFT_OVER, LOST, BEGINS = range(5)
_WANTED, _FREED, _STARTED = range(3)


class Holders(NamedTuple):
    """A port has its `HOLDER` and had another, `HELD_BEFORE`; from `PAIR_HEAD` to `PAIR_BACK` the transfers of a pair
    wait for theirs. While that is so from one moment to a later one, the pair `IS_LINKED` to its ports.

    The `TICKET` of t numbers the transfers in the order in which they became ready, `OF_TICKET` is the other way round;
    `TURN` in the order in which they start, `filled[2]` so far.
    Of what holds out port q, `PACE` are the ticks for a byte (`pace_float` where they are not whole) and `HELD_UNTIL`
    says when it is through; its bytes flow when it `BEGINS`; while it is `STILL`, `LEFT_OVER` ticks are left. An uplink
    q is `HELD_UNTIL` what has started there has had its time. `LOST` bytes are to be sent again by what
    holds q.
    `lists[i, :filled[i]]` are tickets that may start, and ports that may be held.
    """

    ids: Ids
    queues: Ids
    tickets: Ids
    clock: Column
    pace_float: npt.NDArray[np.float64]
    lists: Ids
    filled: Column


def make_holders(n: int, n_pairs: int, n_ports: int) -> Holders:
    """Idle ports."""
    ids = np.full((n_ports, 3), -1, dtype=np.int32)
    ids[:, STILL] = 0
    return Holders(
        ids,
        np.array([-1, -1, 0], dtype=np.int32) + np.zeros((n_pairs, 1), dtype=np.int32),
        np.empty((n, 3), dtype=np.int32),
        np.zeros((n_ports, 5), dtype=np.int64),
        np.zeros(n_ports),
        np.zeros((2, max(5 * n_pairs, 2 * n_ports)), dtype=np.int32),
        np.zeros(3, dtype=np.int64),
    )


def want(pairs: Pairs, ports: Holders, paces: Paces, pair: int) -> None:
    """The first transfer of `pair` may start if both of its ports are idle."""
    out, in_ = pairs.ends[pair, 0], pairs.ends[pair, 1]
    if ports.ids[out, HOLDER] < 0 and ports.ids[in_, HOLDER] < 0 and not paces.down[out] and not paces.down[in_]:
        ports.lists[_WANTED, ports.filled[_WANTED]] = ports.tickets[ports.queues[pair, PAIR_HEAD], TICKET]
        ports.filled[_WANTED] += 1


def keep_linked(pairs: Pairs, ports: Holders, pair: int) -> None:
    """Transfers of `pair` are left waiting: list it at its ports, to be considered when they become idle."""
    if not ports.queues[pair, IS_LINKED]:
        link(pairs, pair)
        ports.queues[pair, IS_LINKED] = True


def queue_pairs(net: Net, pairs: Pairs, ports: Holders, paces: Paces, tickets: int) -> int:
    """What has become ready queues behind the others of its pair, ties by index; returns how many tickets are out."""
    n_fresh = net.tail[FRESH]
    net.tail[FRESH] = 0
    for at in range(1, n_fresh):
        if net.queues[FRESH, at] < net.queues[FRESH, at - 1]:
            sort_part(row(net.queues, FRESH), 0, n_fresh)
            break
    for at in range(n_fresh):
        transfer = net.queues[FRESH, at]
        pair = net.rows[transfer, PAIR]
        ports.tickets[transfer, TICKET] = tickets
        ports.tickets[tickets, OF_TICKET] = transfer
        tickets += 1
        if ports.queues[pair, PAIR_HEAD] < 0:
            ports.queues[pair, PAIR_HEAD] = transfer
            n_wanted = ports.filled[_WANTED]
            want(pairs, ports, paces, pair)
            if ports.filled[_WANTED] == n_wanted:
                keep_linked(pairs, ports, pair)
        else:
            net.rows[ports.queues[pair, PAIR_BACK], BEHIND] = transfer
        ports.queues[pair, PAIR_BACK] = transfer
    return tickets


def hold(
    net: Net,
    times: Any,
    sizes: Column,
    paces: Paces,
    pairs: Pairs,
    ports: Holders,
    events: EventQueue,
    now: int,
    overhead: int,
) -> None:
    """Starts transfers at ports that became idle, in order of readiness, each if both its ports are still idle."""
    for at in range(ports.filled[_FREED]):
        port = ports.lists[_FREED, at]
        for place in range(pairs.lists[port, FIRST_PAIR], pairs.lists[port, FIRST_PAIR] + pairs.lists[port, N_PAIRS]):
            want(pairs, ports, paces, pairs.members[place])
    ports.filled[_FREED] = 0
    n_wanted = ports.filled[_WANTED]
    ports.filled[_WANTED] = 0
    if n_wanted > 1:
        sort_part(row(ports.lists, _WANTED), 0, n_wanted)
    for at in range(n_wanted):
        transfer = ports.tickets[ports.lists[_WANTED, at], OF_TICKET]
        pair = net.rows[transfer, PAIR]
        out, in_ = pairs.ends[pair, 0], pairs.ends[pair, 1]
        if ports.ids[out, HOLDER] >= 0 or ports.ids[in_, HOLDER] >= 0:
            if ports.queues[pair, PAIR_HEAD] == transfer:  # else it has started already, and was there twice
                keep_linked(pairs, ports, pair)
            continue
        if times[transfer, START] < now:  # it waited for a port, and for the one that became free last
            last = ports.ids[out, HELD_BEFORE]
            if last < 0 or times[last, SENT] != now:
                last = ports.ids[in_, HELD_BEFORE]
            if last >= 0:
                net.rows[transfer, START_OPENER] = 2 * last
        times[transfer, START] = now
        times[transfer, TAKEN] = now
        ports.tickets[transfer, TURN] = ports.filled[_STARTED]
        ports.filled[_STARTED] += 1
        look_ahead(net, times, sizes, transfer)
        fetch(ports.tickets, net.rows[transfer, NEXT_SEND])
        ports.ids[out, HOLDER] = transfer
        ports.ids[in_, HOLDER] = transfer
        ports.queues[pair, PAIR_HEAD] = net.rows[transfer, BEHIND]
        if ports.queues[pair, PAIR_HEAD] >= 0:
            keep_linked(pairs, ports, pair)
        elif ports.queues[pair, IS_LINKED]:
            unlink(pairs, pair)
            ports.queues[pair, IS_LINKED] = False
        set_pace(paces, pairs, ports, pair)
        begins = now + overhead
        for side in range(2, pairs.ends.shape[1] >> 1):
            if pairs.ends[pair, side] >= 0:
                begins = max(begins, ports.clock[pairs.ends[pair, side], HELD_UNTIL])
        for side in range(2, pairs.ends.shape[1] >> 1):
            if pairs.ends[pair, side] >= 0:
                uplink = pairs.ends[pair, side]
                ports.clock[uplink, HELD_UNTIL] = begins + cost(paces, sizes[transfer], uplink)
        ports.clock[out, BEGINS] = begins
        ports.clock[out, HELD_UNTIL] = begins + busy_for(paces, ports, out, sizes[transfer])
        put(events, out, ports.clock[out, HELD_UNTIL], now)


def set_pace(paces: Paces, pairs: Pairs, ports: Holders, pair: int) -> None:
    """The slowest of the ports of `pair`."""
    out = pairs.ends[pair, 0]
    pace, pace_float = paces.ticks[out], paces.ticks_float[out]
    for side in range(1, pairs.ends.shape[1] >> 1):
        port = pairs.ends[pair, side]
        if port >= 0:
            pace, pace_float = max(pace, paces.ticks[port]), max(pace_float, paces.ticks_float[port])
    ports.clock[out, PACE] = pace
    ports.pace_float[out] = pace_float
    ports.ids[out, STILL] = paces.down[out] or paces.down[pairs.ends[pair, 1]]


def busy_for(paces: Paces, ports: Holders, out: int, size: int) -> int:
    """Ticks that `size` bytes take at the pace of `out`."""
    if paces.exact:
        return int(size * ports.clock[out, PACE])
    return max(1, int(np.rint(size * ports.pace_float[out])))


def change_exclusive(
    net: Net,
    sizes: Column,
    paces: Paces,
    changes: Changes,
    pairs: Pairs,
    ports: Holders,
    events: EventQueue,
    first: int,
    stop: int,
    now: int,
) -> None:
    """The changes from `first` to `stop`: transfers continue at the new rates."""
    for index in range(first, stop):
        port = changes.port[index]
        change_rate(paces, changes, index)
        ports.clock[port, LOST] += changes.lost[index]
        ports.lists[_FREED, ports.filled[_FREED]] = port
        ports.filled[_FREED] += 1
    clear(events)
    for out in range(0, len(ports.ids), 2):
        transfer = ports.ids[out, HOLDER]
        if transfer < 0:
            continue
        pair = net.rows[transfer, PAIR]
        in_ = pairs.ends[pair, 1]
        begins = max(now, ports.clock[out, BEGINS])
        old, old_float = ports.clock[out, PACE], ports.pace_float[out]
        rest = ports.clock[out, LEFT_OVER] if ports.ids[out, STILL] else ports.clock[out, HELD_UNTIL] - begins
        set_pace(paces, pairs, ports, pair)
        rest += resent(paces, sizes[transfer], rest, ports.clock[out, LOST] + ports.clock[in_, LOST], old, old_float)
        if ports.ids[out, STILL]:
            # The rest stays in ticks of the pace that it had.
            ports.clock[out, PACE], ports.pace_float[out] = old, old_float
        else:
            rest = rescale(rest, old, ports.clock[out, PACE], old_float, ports.pace_float[out], paces.exact)
            ports.clock[out, HELD_UNTIL] = begins + rest
            put(events, out, ports.clock[out, HELD_UNTIL], now)
        ports.clock[out, LEFT_OVER] = rest
    for index in range(first, stop):
        ports.clock[changes.port[index], LOST] = 0


def run_exclusive(
    net: Net,
    times: Any,
    sizes: Column,
    paces: Paces,
    changes: Changes,
    pairs: Pairs,
    ports: Holders,
    events: EventQueue,
    latency: int,
    overhead: int,
) -> None:
    """Ports serve one transfer at a time. Whenever a port becomes free or a transfer ready, those that wait are looked
    at in the order in which they became ready (ties by index), and each whose two ports are free starts.

    Transfers of one pair queue behind each other, so only the heads of the queues need looking at.
    """
    now, happened, tickets = 0, 0, 0
    depth = seed(net)
    while True:
        if depth:
            settle(net, times, now, latency, overhead, depth)
        depth = 0
        if net.tail[FRESH]:
            tickets = queue_pairs(net, pairs, ports, paces, tickets)
        if ports.filled[_WANTED] or ports.filled[_FREED]:
            hold(net, times, sizes, paces, pairs, ports, events, now, overhead)
        now = next_moment(net, times, next_event(events), changes.at, happened, latency, overhead)
        if now < 0:
            return
        depth = arrive(net, times, now, latency, depth)
        while net.tail[LEFT] < net.tail[LEAVING] and next_leaving(net, times, overhead) == now:
            transfer = net.queues[LEAVING, net.tail[LEFT]]
            net.tail[LEFT] += 1
            times[transfer, TAKEN] = times[transfer, START]
            depth = leave(net, times, transfer, now, latency, depth)
        while next_event(events) == now:
            out = take(events)
            transfer = ports.ids[out, HOLDER]
            for side in range(2):
                port = pairs.ends[net.rows[transfer, PAIR], side]
                ports.ids[port, HOLDER] = -1
                ports.ids[port, HELD_BEFORE] = transfer
                ports.lists[_FREED, ports.filled[_FREED]] = port
                ports.filled[_FREED] += 1
            depth = leave(net, times, transfer, now, latency, depth)
        changed = happened
        while happened < len(changes.at) and changes.at[happened] <= now:
            happened += 1
        if happened > changed:
            change_exclusive(net, sizes, paces, changes, pairs, ports, events, changed, happened, now)


KERNELS: tuple[Callable[..., Any], ...] = (
    want,
    keep_linked,
    queue_pairs,
    set_pace,
    busy_for,
    hold,
    change_exclusive,
    run_exclusive,
)
