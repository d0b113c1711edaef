"""Fifo ports: each serves one transfer at a time at its own rate; the network between two ports buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column, sort_part
from optcc.compiled import row
from optcc.fifo_port import delay_at_in_port
from optcc.simulate.dependencies import (
    BEHIND,
    FRESH,
    IN,
    LATE,
    LEAVING,
    LEFT,
    OUT,
    SENT,
    START,
    START_OPENER,
    TAKEN,
    Net,
    arrive,
    fire_sent,
    land,
    leave,
    look_ahead,
    next_leaving,
    next_moment,
    seed,
    settle,
)
from optcc.simulate.event_queue import EventQueue, clear, next_event, put, take
from optcc.simulate.tick_clock import Changes, Paces, change_rate, cost, rescale, resent

Ids = npt.NDArray[np.int32]
SERVES, PREVIOUS, HEAD, BACK, HAS_COME, HELD = range(6)
ENDS, REST = range(2)
IDLE, COMING, FREE = range(3)


class FifoState(NamedTuple):
    """Out ports have even numbers, in ports odd ones.

    A port `SERVES` a transfer until it `ENDS`, and served `PREVIOUS` before; from `HEAD` to `BACK` others wait for it.
    Of a port that is down, `REST` is what it had left to do. What an out port serves `HAS_COME` to the queue of its in
    port; an in port that is through before the sender is `HELD` until that is.
    `lists[i, :filled[i]]` are out ports that may start something, transfers that come to an in port, and in ports that
    may take something.
    """

    ids: Ids
    clock: Column
    lists: Ids
    filled: Column


def make_fifo_state(n_ports: int, n_buffered: int = 0) -> FifoState:
    """Idle ports, and `n_buffered` transfers that may come to in ports at one instant after they have left."""
    ids = np.full((n_ports, 6), -1, dtype=np.int32)
    ids[:, [HAS_COME, HELD]] = 0
    lists = np.zeros((3, 4 * n_ports + n_buffered), dtype=np.int32)
    return FifoState(ids, np.zeros((n_ports, 2), dtype=np.int64), lists, np.zeros(3, dtype=np.int64))


def note(ports: FifoState, which: int, item: int) -> None:
    """Adds `item` to one of the lists."""
    ports.lists[which, ports.filled[which]] = item
    ports.filled[which] += 1


def queue_out(net: Net, ports: FifoState) -> None:
    """Ready transfers join the queues of their out ports; ties by index."""
    n_fresh = net.tail[FRESH]
    net.tail[FRESH] = 0
    for at in range(1, n_fresh):
        if net.queues[FRESH, at] < net.queues[FRESH, at - 1]:
            sort_part(row(net.queues, FRESH), 0, n_fresh)
            break
    for at in range(n_fresh):
        transfer = net.queues[FRESH, at]
        out = net.rows[transfer, OUT]
        if ports.ids[out, HEAD] >= 0:
            net.rows[ports.ids[out, BACK], BEHIND] = transfer
        else:
            ports.ids[out, HEAD] = transfer
            if ports.ids[out, SERVES] < 0:
                note(ports, IDLE, out)
        ports.ids[out, BACK] = transfer


def come(
    net: Net,
    times: Any,
    sizes: Column,
    paces: Paces,
    ports: FifoState,
    events: EventQueue,
    transfer: int,
    now: int,
    overhead: int,
) -> None:
    """Schedules the next event of the out port of `transfer`: its arrival at its in port, or its end."""
    out, begins = net.rows[transfer, OUT], times[transfer, START] + overhead
    landing = cost(paces, sizes[transfer], net.rows[transfer, IN])
    comes = begins + delay_at_in_port(ports.clock[out, ENDS] - begins, landing)
    ports.ids[out, HAS_COME] = comes <= now
    if ports.ids[out, HAS_COME]:
        note(ports, COMING, transfer)
        put(events, out, ports.clock[out, ENDS], now)
    else:
        put(events, out, comes, now)


def send_next(
    net: Net, times: Any, sizes: Column, paces: Paces, ports: FifoState, out: int, now: int, overhead: int
) -> int:
    """Out port `out` starts the first transfer of its queue, if it is idle; returns it, or -1."""
    transfer: int = ports.ids[out, HEAD]
    if transfer < 0 or ports.ids[out, SERVES] >= 0 or paces.down[out]:
        return -1
    ports.ids[out, HEAD] = net.rows[transfer, BEHIND]
    ports.ids[out, SERVES] = transfer
    if times[transfer, START] < now and ports.ids[out, PREVIOUS] >= 0:
        net.rows[transfer, START_OPENER] = 2 * ports.ids[out, PREVIOUS]
    times[transfer, START] = now
    look_ahead(net, times, sizes, transfer)
    ports.clock[out, ENDS] = now + overhead + cost(paces, sizes[transfer], out)
    return transfer


def start_sending(
    net: Net,
    times: Any,
    sizes: Column,
    paces: Paces,
    ports: FifoState,
    events: EventQueue,
    now: int,
    overhead: int,
) -> None:
    """Idle out ports start the first transfer of their queue."""
    for at in range(ports.filled[IDLE]):
        transfer = send_next(net, times, sizes, paces, ports, ports.lists[IDLE, at], now, overhead)
        if transfer >= 0:
            come(net, times, sizes, paces, ports, events, transfer, now, overhead)
    ports.filled[IDLE] = 0


def queue_in(net: Net, times: Any, turn: Column, ports: FifoState, now: int) -> None:
    """Transfers that have arrived join the queues of their in ports, by `turn`."""
    n_coming = ports.filled[COMING]
    coming = row(ports.lists, COMING)
    if n_coming > 1:
        sort_part(coming, 0, n_coming)
    for at in range(n_coming):
        transfer = coming[at]
        times[transfer, TAKEN] = now
        in_ = net.rows[transfer, IN]
        before, after = -1, ports.ids[in_, HEAD]
        if after >= 0 and turn[ports.ids[in_, BACK]] <= turn[transfer]:
            before, after = ports.ids[in_, BACK], -1
        while after >= 0 and turn[after] <= turn[transfer]:
            before, after = after, net.rows[after, BEHIND]
        net.rows[transfer, BEHIND] = after
        if before < 0:
            ports.ids[in_, HEAD] = transfer
        else:
            net.rows[before, BEHIND] = transfer
        if after < 0:
            ports.ids[in_, BACK] = transfer
        note(ports, FREE, in_)
    ports.filled[COMING] = 0


def take_next(net: Net, times: Any, sizes: Column, paces: Paces, ports: FifoState, in_: int, now: int) -> bool:
    """In port `in_` takes the first transfer of its queue, if it is idle."""
    transfer = ports.ids[in_, HEAD]
    if transfer < 0 or ports.ids[in_, SERVES] >= 0 or paces.down[in_]:
        return False
    ports.ids[in_, HEAD] = net.rows[transfer, BEHIND]
    ports.ids[in_, SERVES] = transfer
    if times[transfer, TAKEN] < now and ports.ids[in_, PREVIOUS] >= 0:
        net.rows[transfer, LATE] = 2 * len(times) + ports.ids[in_, PREVIOUS]
    times[transfer, TAKEN] = now
    ports.clock[in_, ENDS] = now + cost(paces, sizes[transfer], in_)
    return True


def start_taking(
    net: Net, times: Any, sizes: Column, paces: Paces, ports: FifoState, events: EventQueue, now: int
) -> None:
    """Idle in ports take the first transfer of their queue."""
    for at in range(ports.filled[FREE]):
        in_ = ports.lists[FREE, at]
        if take_next(net, times, sizes, paces, ports, in_, now):
            put(events, in_, ports.clock[in_, ENDS], now)
    ports.filled[FREE] = 0


def be_through(net: Net, times: Any, ports: FifoState, in_: int, now: int, latency: int, depth: int) -> int:
    """In port `in_` has received the whole transfer."""
    transfer = ports.ids[in_, SERVES]
    ports.ids[in_, SERVES] = -1
    ports.ids[in_, HELD] = False
    ports.ids[in_, PREVIOUS] = transfer
    note(ports, FREE, in_)
    return land(net, times, transfer, now, latency, depth)


def change_fifo(
    times: Any,
    sizes: Column,
    paces: Paces,
    changes: Changes,
    ports: FifoState,
    index: int,
    now: int,
    overhead: int,
) -> None:
    """Change `index` of the rates: the port continues at the new rate."""
    port = changes.port[index]
    transfer = ports.ids[port, SERVES]
    old, old_float, was_down = paces.ticks[port], paces.ticks_float[port], paces.down[port]
    change_rate(paces, changes, index)
    if transfer >= 0:
        begins = now if port & 1 else max(now, times[transfer, START] + overhead)
        rest = ports.clock[port, REST] if was_down else max(0, ports.clock[port, ENDS] - begins)
        rest += resent(paces, sizes[transfer], rest, changes.lost[index], old, old_float)
        if not paces.down[port]:
            rest = rescale(rest, old, paces.ticks[port], old_float, paces.ticks_float[port], paces.exact)
        ports.clock[port, REST] = rest
        ports.clock[port, ENDS] = begins + rest
        ports.ids[port, HELD] = ports.ids[port, HELD] and rest == 0
    if not paces.down[port]:
        note(ports, FREE if port & 1 else IDLE, port)


def plan_anew(
    net: Net,
    times: Any,
    sizes: Column,
    paces: Paces,
    ports: FifoState,
    events: EventQueue,
    now: int,
    overhead: int,
) -> None:
    """Reschedules all events of ports after rates have changed."""
    clear(events)
    for port in range(len(ports.ids)):
        transfer = ports.ids[port, SERVES]
        if transfer < 0 or paces.down[port] or ports.ids[port, HELD]:
            continue
        if port & 1 or ports.ids[port, HAS_COME]:
            put(events, port, ports.clock[port, ENDS], now)
        else:
            come(net, times, sizes, paces, ports, events, transfer, now, overhead)


def run_fifo(
    net: Net,
    times: Any,
    sizes: Column,
    turn: Column,
    paces: Paces,
    changes: Changes,
    ports: FifoState,
    events: EventQueue,
    latency: int,
    overhead: int,
) -> None:
    """Each port has a queue and serves it one at a time: an out port what became ready, in that order, an in port what
    has come far enough to be taken at the in port's rate without a pause, by `turn` (ties by time, then index).

    An in port that is slower than the out port takes a message from its first byte on; one that is faster so late that
    both are through with the last byte at the same time. If rates have changed since, the in port may be through with
    all that has come before the sender is: then it waits for it.
    """
    now, happened = 0, 0
    depth = seed(net)
    while True:
        if depth:
            settle(net, times, now, latency, overhead, depth)
        depth = 0
        if net.tail[FRESH]:
            queue_out(net, ports)
        if ports.filled[IDLE]:
            start_sending(net, times, sizes, paces, ports, events, now, overhead)
        if ports.filled[COMING]:
            queue_in(net, times, turn, ports, now)
        if ports.filled[FREE]:
            start_taking(net, times, sizes, paces, ports, events, now)
        now = next_moment(net, times, next_event(events), changes.at, happened, latency, overhead)
        if now < 0:
            return
        depth = arrive(net, times, now, latency, depth)
        while net.tail[LEFT] < net.tail[LEAVING] and next_leaving(net, times, overhead) == now:
            transfer = net.queues[LEAVING, net.tail[LEFT]]
            net.tail[LEFT] += 1
            times[transfer, TAKEN] = now
            depth = leave(net, times, transfer, now, latency, depth)
        while next_event(events) == now:
            port = take(events)
            transfer = ports.ids[port, SERVES]
            if port & 1:
                if times[transfer, SENT] < 0:
                    ports.ids[port, HELD] = True
                else:
                    depth = be_through(net, times, ports, port, now, latency, depth)
                continue
            if not ports.ids[port, HAS_COME]:
                ports.ids[port, HAS_COME] = True
                note(ports, COMING, transfer)
                if ports.clock[port, ENDS] > now:
                    put(events, port, ports.clock[port, ENDS], now)
                    continue
            ports.ids[port, SERVES] = -1
            ports.ids[port, PREVIOUS] = transfer
            note(ports, IDLE, port)
            times[transfer, SENT] = now
            depth = fire_sent(net, transfer, depth)
            in_ = net.rows[transfer, IN]
            if ports.ids[in_, HELD] and ports.ids[in_, SERVES] == transfer:
                depth = be_through(net, times, ports, in_, now, latency, depth)
        changed = happened
        while happened < len(changes.at) and changes.at[happened] <= now:
            change_fifo(times, sizes, paces, changes, ports, happened, now, overhead)
            happened += 1
        if happened > changed:
            plan_anew(net, times, sizes, paces, ports, events, now, overhead)


KERNELS: tuple[Callable[..., Any], ...] = (
    sort_part,
    note,
    queue_out,
    come,
    send_next,
    start_sending,
    queue_in,
    take_next,
    start_taking,
    be_through,
    change_fifo,
    plan_anew,
    run_fifo,
)
