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
from optcc.fifo_port import delay_at_in_port, occupy
from optcc.simulate.dependencies import (
    IN,
    LEAVING,
    LEFT,
    OUT,
    SENT,
    START,
    TAKEN,
    Net,
    arrive,
    fire_sent,
    leave,
    next_leaving,
    next_moment,
    seed,
    settle,
)
from optcc.simulate.fifo import (
    COMING,
    ENDS,
    FREE,
    HELD,
    IDLE,
    PREVIOUS,
    SERVES,
    FifoState,
    be_through,
    change_fifo,
    make_fifo_state,
    note,
    queue_in,
    queue_out,
    send_next,
    take_next,
)
from optcc.simulate.tick_clock import Changes, Paces, cost

Ids = npt.NDArray[np.int32]
TO_UP, TO_DOWN, TO_IN = range(3)
FIRST_BYTE, LAST_BYTE = range(2)


class UplinkState(NamedTuple):
    """The state of `ports`, in which an in port that is through before everything has passed the uplinks is `HELD`,
    and of what is between them.

    Transfer t goes up `ways[t, 0]` and comes down `ways[t, 1]` (-1: it does not) and is on its way to `where[t]` (-1:
    to nowhere). Its `FIRST_BYTE` is past the uplinks at `passed[t, 0]`, and at `passed[t, 1]` their time for it is
    over. Uplink q is taken up until `taken_until[q]`. `turns[t, side]` is its place among all that uplinks have taken,
    `size[1]` so far.

    `lists[side, :filled[side]]` are the transfers that come to uplinks (`TO_UP`) and downlinks (`TO_DOWN`) at this
    instant. The pending events are a heap, `size[0]` long, of times `when` and of what has them, `what`: a port, or
    the number of ports plus a transfer.
    """

    ports: FifoState
    ways: Ids
    where: Ids
    passed: Column
    turns: Ids
    taken_until: Column
    lists: Ids
    filled: Column
    when: Column
    what: Column
    size: Column


def make_uplink_state(ways: Ids, n_ports: int) -> UplinkState:
    """No transfer is in flight."""
    n = len(ways)
    return UplinkState(
        make_fifo_state(n_ports, n),
        ways,
        np.full(n, -1, dtype=np.int32),
        np.zeros((n, 2), dtype=np.int64),
        np.full((n, 2), -1, dtype=np.int32),
        np.zeros(n_ports, dtype=np.int64),
        np.zeros((2, n), dtype=np.int32),
        np.zeros(2, dtype=np.int64),
        np.zeros(n_ports + n, dtype=np.int64),
        np.zeros(n_ports + n, dtype=np.int64),
        np.zeros(2, dtype=np.int64),
    )


def expect(line: UplinkState, item: int, at: int) -> None:
    """Schedules the only event of `item` at `at`."""
    place = line.size[0]
    line.size[0] += 1
    while place > 0 and line.when[(place - 1) >> 1] > at:
        line.when[place] = line.when[(place - 1) >> 1]
        line.what[place] = line.what[(place - 1) >> 1]
        place = (place - 1) >> 1
    line.when[place] = at
    line.what[place] = item


def first_event(line: UplinkState) -> int:
    """Removes the earliest event and returns its item."""
    found = int(line.what[0])
    line.size[0] -= 1
    size, place = line.size[0], 0
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


def be_there(line: UplinkState, transfer: int) -> None:
    """`transfer` has arrived at its next queue."""
    side = line.where[transfer]
    line.where[transfer] = -1
    if side == TO_IN:
        note(line.ports, COMING, transfer)
    else:
        line.lists[side, line.filled[side]] = transfer
        line.filled[side] += 1


def go(
    net: Net, times: Any, sizes: Column, paces: Paces, line: UplinkState, transfer: int, now: int, overhead: int
) -> None:
    """Schedules the arrival of `transfer` at its next queue, unless the port that it must leave first is down."""
    out, n_ports = net.rows[transfer, OUT], len(line.ports.ids)
    sent = times[transfer, SENT] >= 0
    stuck = paces.down[out] and not sent
    comes = max(times[transfer, START] + overhead, line.passed[transfer, FIRST_BYTE])
    if line.where[transfer] == TO_IN:
        last = times[transfer, SENT] if sent else line.ports.clock[out, ENDS]
        last = max(last, line.passed[transfer, LAST_BYTE])
        comes += delay_at_in_port(last - comes, cost(paces, sizes[transfer], net.rows[transfer, IN]))
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
    for at in range(line.ports.filled[IDLE]):
        out = line.ports.lists[IDLE, at]
        transfer = send_next(net, times, sizes, paces, line.ports, out, now, overhead)
        if transfer < 0:
            continue
        expect(line, out, line.ports.clock[out, ENDS])
        line.where[transfer] = TO_UP if line.ways[transfer, 0] >= 0 else TO_DOWN
        if line.ways[transfer, 0] < 0 and line.ways[transfer, 1] < 0:
            line.where[transfer] = TO_IN
        go(net, times, sizes, paces, line, transfer, now, overhead)
    line.ports.filled[IDLE] = 0


def pass_uplinks(
    net: Net, times: Any, sizes: Column, paces: Paces, line: UplinkState, side: int, now: int, overhead: int
) -> None:
    """Transfers that arrive at uplinks (`side` 0) or downlinks (1) occupy them in turn; ties by index."""
    n_coming = line.filled[side]
    line.filled[side] = 0
    if n_coming > 1:
        sort_part(row(line.lists, side), 0, n_coming)
    for at in range(n_coming):
        transfer = line.lists[side, at]
        uplink = line.ways[transfer, side]
        lasts = cost(paces, sizes[transfer], uplink)
        line.taken_until[uplink] = occupy(line.taken_until[uplink], now, lasts)
        line.passed[transfer, FIRST_BYTE] = line.taken_until[uplink] - lasts
        line.passed[transfer, LAST_BYTE] = max(line.passed[transfer, LAST_BYTE], line.taken_until[uplink])
        line.turns[transfer, side] = line.size[1]
        line.size[1] += 1
        line.where[transfer] = TO_DOWN if side == 0 and line.ways[transfer, 1] >= 0 else TO_IN
        go(net, times, sizes, paces, line, transfer, now, overhead)


def start_entering(net: Net, times: Any, sizes: Column, paces: Paces, line: UplinkState, now: int) -> None:
    """Idle in ports take the first transfer of their queue."""
    for at in range(line.ports.filled[FREE]):
        in_ = line.ports.lists[FREE, at]
        if take_next(net, times, sizes, paces, line.ports, in_, now):
            expect(line, in_, line.ports.clock[in_, ENDS])
    line.ports.filled[FREE] = 0


def have_entered(net: Net, times: Any, line: UplinkState, in_: int, now: int, latency: int, depth: int) -> int:
    """In port `in_` has received its transfer, if the last byte has passed the uplinks; else it waits for that."""
    transfer = line.ports.ids[in_, SERVES]
    if times[transfer, SENT] >= 0 and line.passed[transfer, LAST_BYTE] <= now:
        return be_through(net, times, line.ports, in_, now, latency, depth)
    line.ports.ids[in_, HELD] = True
    if times[transfer, SENT] >= 0:
        expect(line, in_, line.passed[transfer, LAST_BYTE])
    return depth


def have_left(net: Net, times: Any, line: UplinkState, out: int, now: int, latency: int, depth: int) -> int:
    """The last byte of what `out` serves has left."""
    transfer = line.ports.ids[out, SERVES]
    line.ports.ids[out, SERVES] = -1
    line.ports.ids[out, PREVIOUS] = transfer
    note(line.ports, IDLE, out)
    times[transfer, SENT] = now
    depth = fire_sent(net, transfer, depth)
    in_ = net.rows[transfer, IN]
    if line.ports.ids[in_, HELD] and line.ports.ids[in_, SERVES] == transfer:
        depth = have_entered(net, times, line, in_, now, latency, depth)
    return depth


def come_anew(times: Any, line: UplinkState, now: int) -> None:
    """Where rates change at the instant of an arrival at an uplink, or of a message that has left at its in port, the
    arrival is computed again with the new rates: no byte reaches an uplink if its out port is down from now on.
    """
    for side in range(2):
        for at in range(line.filled[side]):
            line.where[line.lists[side, at]] = side
        line.filled[side] = 0
    n_coming = line.ports.filled[COMING]
    line.ports.filled[COMING] = 0
    for at in range(n_coming):
        transfer = line.ports.lists[COMING, at]
        if 0 <= times[transfer, SENT] < now:
            line.where[transfer] = TO_IN
        else:
            note(line.ports, COMING, transfer)


def expect_anew(net: Net, times: Any, sizes: Column, paces: Paces, line: UplinkState, now: int, overhead: int) -> None:
    """Reschedules all events after rates have changed."""
    line.size[0] = 0
    for transfer in range(len(times)):
        if line.where[transfer] >= 0:
            go(net, times, sizes, paces, line, transfer, now, overhead)
    for port in range(len(line.ports.ids)):
        transfer = line.ports.ids[port, SERVES]
        if transfer < 0 or paces.down[port]:
            continue
        if not line.ports.ids[port, HELD]:
            expect(line, port, line.ports.clock[port, ENDS])
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
    now, happened, n_ports = 0, 0, len(line.ports.ids)
    depth = seed(net)
    while True:
        if depth:
            settle(net, times, now, latency, overhead, depth)
        depth = 0
        queue_out(net, line.ports)
        start_leaving(net, times, sizes, paces, line, now, overhead)
        pass_uplinks(net, times, sizes, paces, line, 0, now, overhead)
        pass_uplinks(net, times, sizes, paces, line, 1, now, overhead)
        queue_in(net, times, turn, line.ports, now)
        start_entering(net, times, sizes, paces, line, now)
        event = line.when[0] if line.size[0] else -1
        now = next_moment(net, times, event, changes.at, happened, latency, overhead)
        if now < 0:
            return
        depth = arrive(net, times, now, latency, depth)
        while net.tail[LEFT] < net.tail[LEAVING] and next_leaving(net, times, overhead) == now:
            transfer = net.queues[LEAVING, net.tail[LEFT]]
            net.tail[LEFT] += 1
            times[transfer, TAKEN] = now
            depth = leave(net, times, transfer, now, latency, depth)
        while line.size[0] and line.when[0] == now:
            item = first_event(line)
            if item >= n_ports:
                be_there(line, item - n_ports)
            elif item & 1:
                depth = have_entered(net, times, line, item, now, latency, depth)
            else:
                depth = have_left(net, times, line, item, now, latency, depth)
        changed = happened
        while happened < len(changes.at) and changes.at[happened] <= now:
            change_fifo(times, sizes, paces, changes, line.ports, happened, now, overhead)
            happened += 1
        if happened > changed:
            come_anew(times, line, now)
            expect_anew(net, times, sizes, paces, line, now, overhead)


KERNELS: tuple[Callable[..., Any], ...] = (
    expect,
    first_event,
    be_there,
    go,
    start_leaving,
    pass_uplinks,
    start_entering,
    have_entered,
    have_left,
    come_anew,
    expect_anew,
    run_uplinks,
)
