"""Fifo ports where pods have uplinks: up to two more queues between an out port and an in port.

Out ports and in ports serve as in `optcc.simulate.fifo`. Each message occupies an uplink for its bytes over the
uplink's rate, one message after the other, in the order in which their first bytes arrive (ties by index). The first
byte is forwarded when the uplink takes the message; the last one has passed when the uplink's time for the message is
over and the last byte has arrived. So a fast uplink adds no delay, a slow one spreads the message out, and messages
that arrive while it is occupied are buffered. The first byte of a message reaches the uplink when it leaves its server;
it reaches the downlink when the uplink takes it. The in port takes the message from its first byte on, or so late that
it never pauses: it receives the last byte when that has passed both uplinks, or later.

Rates of uplinks do not change. Bytes that are sent again after a fault do not occupy an uplink again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column, sort_part
from optcc.compiled import row
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
    next_leaving,
    next_moment,
    seed,
    settle,
)
from optcc.simulate.fifo import ENDS, REST, SERVES, change_port
from optcc.simulate.tick_clock import Changes, Paces, cost

Ids = npt.NDArray[np.int32]
ON_PORT, THROUGH_AT, LEFT_TO_DO = SERVES, ENDS, REST
BEFORE, FIRST_WAITING, LAST_WAITING, WAITS_FOR_REST = range(1, 5)
TO_UP, TO_DOWN, TO_IN = range(1, 4)
FIRST_BYTE, LAST_BYTE = range(2)
_OUT_IDLE, _IN_IDLE, _EVENTS = 0, 4, 5


class UplinkState(NamedTuple):
    """The state of ports and of what is between them.

    A port has a transfer `ON_PORT` until `THROUGH_AT` and had `BEFORE`; from `FIRST_WAITING` to `LAST_WAITING` others
    wait for it. Of a port that is down, `LEFT_TO_DO` is what it had left to do. An in port that is through before
    everything has passed `WAITS_FOR_REST`.

    Transfer t goes up `ways[t, 0]` and comes down `ways[t, 1]` (-1: it does not) and is on its way to `where[t]`; 0: to
    nowhere. Its `FIRST_BYTE` is past the uplinks at `passed[t, 0]`, and at `passed[t, 1]` their time for it is over.
    Uplink q is taken up until `taken_until[q]`.

    `lists[i, :filled[i]]` are out ports that may start something, the transfers that come to `TO_UP`, `TO_DOWN` and
    `TO_IN` at this instant, and in ports that may take something. The pending events are a heap of times `when` and of
    what has them, `what`: a port, or the number of ports plus a transfer.
    """

    ids: Ids
    clock: Column
    ways: Ids
    where: Ids
    passed: Column
    taken_until: Column
    lists: Ids
    filled: Column
    when: Column
    what: Column


def make_uplink_state(ways: Ids, n_ports: int) -> UplinkState:
    """No transfer is in flight."""
    n = len(ways)
    ids = np.full((n_ports, 5), -1, dtype=np.int32)
    ids[:, WAITS_FOR_REST] = 0
    return UplinkState(
        ids,
        np.zeros((n_ports, 2), dtype=np.int64),
        ways,
        np.zeros(n, dtype=np.int32),
        np.zeros((n, 2), dtype=np.int64),
        np.zeros(n_ports, dtype=np.int64),
        np.zeros((5, 4 * n_ports + n), dtype=np.int32),
        np.zeros(6, dtype=np.int64),
        np.zeros(n_ports + n, dtype=np.int64),
        np.zeros(n_ports + n, dtype=np.int64),
    )


def expect(line: UplinkState, item: int, at: int) -> None:
    """Schedules the only event of `item` at `at`."""
    place = line.filled[_EVENTS]
    line.filled[_EVENTS] += 1
    while place > 0 and line.when[(place - 1) >> 1] > at:
        line.when[place] = line.when[(place - 1) >> 1]
        line.what[place] = line.what[(place - 1) >> 1]
        place = (place - 1) >> 1
    line.when[place] = at
    line.what[place] = item


def first_event(line: UplinkState) -> int:
    """Removes the earliest event and returns its item."""
    found = int(line.what[0])
    line.filled[_EVENTS] -= 1
    size, place = line.filled[_EVENTS], 0
    at, item = line.when[size], line.what[size]
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and line.when[child + 1] < line.when[child]:
            child += 1
        if at <= line.when[child]:
            break
        line.when[place] = line.when[child]
        line.what[place] = line.what[child]
        place = child
    line.when[place] = at
    line.what[place] = item
    return found


def list_up(line: UplinkState, which: int, item: int) -> None:
    """Adds `item` to one of the lists."""
    line.lists[which, line.filled[which]] = item
    line.filled[which] += 1


def be_there(line: UplinkState, transfer: int) -> None:
    """`transfer` has arrived at its next queue."""
    list_up(line, line.where[transfer], transfer)
    line.where[transfer] = 0


def wait_to_leave(net: Net, line: UplinkState) -> None:
    """Ready transfers join the queues of their out ports; ties by index."""
    n_fresh = net.tail[FRESH]
    net.tail[FRESH] = 0
    if n_fresh > 1:
        sort_part(row(net.queues, FRESH), 0, n_fresh)
    for at in range(n_fresh):
        transfer = net.queues[FRESH, at]
        out = net.rows[transfer, OUT]
        if line.ids[out, FIRST_WAITING] >= 0:
            net.rows[line.ids[out, LAST_WAITING], BEHIND] = transfer
        else:
            line.ids[out, FIRST_WAITING] = transfer
            list_up(line, _OUT_IDLE, out)
        line.ids[out, LAST_WAITING] = transfer


def go(
    net: Net, times: Any, sizes: Column, paces: Paces, line: UplinkState, transfer: int, now: int, overhead: int
) -> None:
    """Schedules the arrival of `transfer` at its next queue, unless the port that it must leave first is down."""
    out, n_ports = net.rows[transfer, OUT], len(line.ids)
    sent = times[transfer, SENT] >= 0
    stuck = paces.down[out] and not sent
    comes = max(times[transfer, START] + overhead, line.passed[transfer, FIRST_BYTE])
    if line.where[transfer] == TO_IN:
        last = times[transfer, SENT] if sent else line.clock[out, THROUGH_AT]
        last = max(last, line.passed[transfer, LAST_BYTE])
        comes = max(comes, last - cost(paces, sizes[transfer], net.rows[transfer, IN]))
    elif line.where[transfer] == TO_DOWN and line.ways[transfer, 0] >= 0:
        stuck = False  # it is between the uplinks
    if stuck:
        return
    if comes <= now:
        be_there(line, transfer)
    else:
        expect(line, n_ports + transfer, comes)


def start_leaving(
    net: Net, times: Any, sizes: Column, paces: Paces, line: UplinkState, now: int, overhead: int
) -> None:
    """Idle out ports start the first transfer of their queue."""
    for at in range(line.filled[_OUT_IDLE]):
        out = line.lists[_OUT_IDLE, at]
        transfer = line.ids[out, FIRST_WAITING]
        if transfer < 0 or line.ids[out, ON_PORT] >= 0 or paces.down[out]:
            continue
        line.ids[out, FIRST_WAITING] = net.rows[transfer, BEHIND]
        line.ids[out, ON_PORT] = transfer
        if times[transfer, START] < now and line.ids[out, BEFORE] >= 0:
            net.rows[transfer, START_OPENER] = 2 * line.ids[out, BEFORE]
        times[transfer, START] = now
        line.clock[out, THROUGH_AT] = now + overhead + cost(paces, sizes[transfer], out)
        expect(line, out, line.clock[out, THROUGH_AT])
        line.where[transfer] = TO_UP if line.ways[transfer, 0] >= 0 else TO_DOWN
        if line.ways[transfer, 0] < 0 and line.ways[transfer, 1] < 0:
            line.where[transfer] = TO_IN
        go(net, times, sizes, paces, line, transfer, now, overhead)
    line.filled[_OUT_IDLE] = 0


def pass_uplinks(
    net: Net, times: Any, sizes: Column, paces: Paces, line: UplinkState, side: int, now: int, overhead: int
) -> None:
    """Transfers that arrive at uplinks (`side` 0) or downlinks (1) occupy them in turn; ties by index."""
    which = TO_UP + side
    n_coming = line.filled[which]
    line.filled[which] = 0
    if n_coming > 1:
        sort_part(row(line.lists, which), 0, n_coming)
    for at in range(n_coming):
        transfer = line.lists[which, at]
        uplink = line.ways[transfer, side]
        begins = max(now, line.taken_until[uplink])
        line.taken_until[uplink] = begins + cost(paces, sizes[transfer], uplink)
        line.passed[transfer, FIRST_BYTE] = begins
        line.passed[transfer, LAST_BYTE] = max(line.passed[transfer, LAST_BYTE], line.taken_until[uplink])
        line.where[transfer] = TO_DOWN if side == 0 and line.ways[transfer, 1] >= 0 else TO_IN
        go(net, times, sizes, paces, line, transfer, now, overhead)


def wait_to_enter(net: Net, times: Any, turn: Column, line: UplinkState, now: int) -> None:
    """Transfers that have arrived join the queues of their in ports, by `turn`; ties by time, then index."""
    n_coming = line.filled[TO_IN]
    line.filled[TO_IN] = 0
    if n_coming > 1:
        sort_part(row(line.lists, TO_IN), 0, n_coming)
    for at in range(n_coming):
        transfer = line.lists[TO_IN, at]
        times[transfer, TAKEN] = now
        in_ = net.rows[transfer, IN]
        before, after = -1, line.ids[in_, FIRST_WAITING]
        while after >= 0 and turn[after] <= turn[transfer]:
            before, after = after, net.rows[after, BEHIND]
        net.rows[transfer, BEHIND] = after
        if before < 0:
            line.ids[in_, FIRST_WAITING] = transfer
        else:
            net.rows[before, BEHIND] = transfer
        list_up(line, _IN_IDLE, in_)


def start_entering(net: Net, times: Any, sizes: Column, paces: Paces, line: UplinkState, now: int) -> None:
    """Idle in ports take the first transfer of their queue."""
    for at in range(line.filled[_IN_IDLE]):
        in_ = line.lists[_IN_IDLE, at]
        transfer = line.ids[in_, FIRST_WAITING]
        if transfer < 0 or line.ids[in_, ON_PORT] >= 0 or paces.down[in_]:
            continue
        line.ids[in_, FIRST_WAITING] = net.rows[transfer, BEHIND]
        line.ids[in_, ON_PORT] = transfer
        if times[transfer, TAKEN] < now and line.ids[in_, BEFORE] >= 0:
            net.rows[transfer, LATE] = 2 * len(times) + line.ids[in_, BEFORE]
        times[transfer, TAKEN] = now
        line.clock[in_, THROUGH_AT] = now + cost(paces, sizes[transfer], in_)
        expect(line, in_, line.clock[in_, THROUGH_AT])
    line.filled[_IN_IDLE] = 0


def have_entered(net: Net, times: Any, line: UplinkState, in_: int, now: int, latency: int, depth: int) -> int:
    """In port `in_` has received its transfer, if the last byte has passed the uplinks; else it waits for that."""
    transfer = line.ids[in_, ON_PORT]
    line.ids[in_, WAITS_FOR_REST] = times[transfer, SENT] < 0 or line.passed[transfer, LAST_BYTE] > now
    if line.ids[in_, WAITS_FOR_REST]:
        if times[transfer, SENT] >= 0:
            expect(line, in_, line.passed[transfer, LAST_BYTE])
        return depth
    line.ids[in_, ON_PORT] = -1
    line.ids[in_, BEFORE] = transfer
    list_up(line, _IN_IDLE, in_)
    return land(net, times, transfer, now, latency, depth)


def have_left(net: Net, times: Any, line: UplinkState, out: int, now: int, latency: int, depth: int) -> int:
    """The last byte of what is on `out` has left."""
    transfer = line.ids[out, ON_PORT]
    line.ids[out, ON_PORT] = -1
    line.ids[out, BEFORE] = transfer
    list_up(line, _OUT_IDLE, out)
    times[transfer, SENT] = now
    depth = fire_sent(net, transfer, depth)
    in_ = net.rows[transfer, IN]
    if line.ids[in_, WAITS_FOR_REST] and line.ids[in_, ON_PORT] == transfer:
        depth = have_entered(net, times, line, in_, now, latency, depth)
    return depth


def change_line(
    times: Any, sizes: Column, paces: Paces, changes: Changes, line: UplinkState, index: int, now: int, overhead: int
) -> None:
    """Change `index` of the rates."""
    change_port(times, sizes, paces, changes, line.ids, line.clock, WAITS_FOR_REST, index, now, overhead)
    port = changes.port[index]
    if not paces.down[port]:
        list_up(line, _IN_IDLE if port & 1 else _OUT_IDLE, port)


def come_anew(times: Any, line: UplinkState, now: int) -> None:
    """Where rates change at the instant of an arrival at an uplink, or of a message that has left at its in port, the
    arrival is computed again with the new rates: no byte reaches an uplink if its out port is down from now on.
    """
    for which in range(TO_UP, TO_IN + 1):
        n_coming = line.filled[which]
        line.filled[which] = 0
        for at in range(n_coming):
            transfer = line.lists[which, at]
            if which == TO_IN and not 0 <= times[transfer, SENT] < now:
                list_up(line, which, transfer)
            else:
                line.where[transfer] = which


def expect_anew(net: Net, times: Any, sizes: Column, paces: Paces, line: UplinkState, now: int, overhead: int) -> None:
    """Reschedules all events after rates have changed."""
    line.filled[_EVENTS] = 0
    for transfer in range(len(times)):
        if line.where[transfer] > 0:
            go(net, times, sizes, paces, line, transfer, now, overhead)
    for port in range(len(line.ids)):
        transfer = line.ids[port, ON_PORT]
        if transfer < 0 or paces.down[port]:
            continue
        if not line.ids[port, WAITS_FOR_REST]:
            expect(line, port, line.clock[port, THROUGH_AT])
        elif times[transfer, SENT] >= 0:
            expect(line, port, line.passed[transfer, LAST_BYTE])


def run_uplinks(
    net: Net,
    times: Any,
    sizes: Column,
    turn: Column,
    paces: Paces,
    changes: Changes,
    line: UplinkState,
    latency: int,
    overhead: int,
) -> None:
    """From event to event: what ends, then what can begin, at out ports first, then uplinks, then in ports."""
    now, happened, n_ports = 0, 0, len(line.ids)
    depth = seed(net)
    while True:
        if depth:
            settle(net, times, now, latency, overhead, depth)
        depth = 0
        wait_to_leave(net, line)
        start_leaving(net, times, sizes, paces, line, now, overhead)
        pass_uplinks(net, times, sizes, paces, line, 0, now, overhead)
        pass_uplinks(net, times, sizes, paces, line, 1, now, overhead)
        wait_to_enter(net, times, turn, line, now)
        start_entering(net, times, sizes, paces, line, now)
        event = line.when[0] if line.filled[_EVENTS] else -1
        now = next_moment(net, times, event, changes.at, happened, latency, overhead)
        if now < 0:
            return
        depth = arrive(net, times, now, latency, depth)
        while net.tail[LEFT] < net.tail[LEAVING] and next_leaving(net, times, overhead) == now:
            transfer = net.queues[LEAVING, net.tail[LEFT]]
            net.tail[LEFT] += 1
            times[transfer, TAKEN] = now
            depth = leave(net, times, transfer, now, latency, depth)
        while line.filled[_EVENTS] and line.when[0] == now:
            item = first_event(line)
            if item >= n_ports:
                be_there(line, item - n_ports)
            elif item & 1:
                depth = have_entered(net, times, line, item, now, latency, depth)
            else:
                depth = have_left(net, times, line, item, now, latency, depth)
        changed = happened
        while happened < len(changes.at) and changes.at[happened] <= now:
            change_line(times, sizes, paces, changes, line, happened, now, overhead)
            happened += 1
        if happened > changed:
            come_anew(times, line, now)
            expect_anew(net, times, sizes, paces, line, now, overhead)


KERNELS: tuple[Callable[..., Any], ...] = (
    expect,
    first_event,
    list_up,
    be_there,
    wait_to_leave,
    go,
    start_leaving,
    pass_uplinks,
    wait_to_enter,
    start_entering,
    have_entered,
    have_left,
    change_line,
    come_anew,
    expect_anew,
    run_uplinks,
)
