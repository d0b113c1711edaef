"""Dependencies between transfers as counters, in the form that the inner loops of all port models use.

Transfer t has two events: it is sent (event 2t) and it is done (event 2t + 1). It has two gates: it may start (gate
2t), and it may be done (gate 2t + 1). A gate counts the events that it depends on and opens with the last of them.

Each transfer is a row of integers in one cache line: the gates that its events decrement, the counters of its own
gates, and its ports. Most events decrement a gate of the next transfer in a lane; these have columns of their own, the
others are in a list.

Times: `START`, `SENT`, `TAKEN` and `DONE` are columns of `times`. Before an event its entry holds the time of the
previous step: `START` when the transfer became ready, `TAKEN` when it arrived at its in port, `DONE` when its in port
had finished.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column
from optcc.compiled import fetch

Small = npt.NDArray[np.int32]
Times = npt.NDArray[Any]

START, SENT, TAKEN, DONE = range(4)
(
    NEXT_SEND,  # may start when this one is sent
    NEXT_RECEIVE,  # may be done when this one is done
    PASSED_ON,  # may start when this one is done: it sends what this one has brought
    FREED,  # may start when this one is done and has freed its slot
    FIRST,  # where the list of the other gates begins: first those of its event 2t, then those of 2t + 1; or `ALONE`
    AT_SENT,  # how many gates of the list wait for event 2t
    AT_DONE,  # and together with those for event 2t + 1
    START_WAITS,  # how many events gate 2t still waits for
    START_OPENER,  # the last of them; -1: none
    DONE_WAITS,  # the same of gate 2t + 1
    DONE_OPENER,
    OUT,  # its out port; NO_PORT or LOCAL
    IN,  # its in port
    PAIR,  # the pair of the two ports, where a model asks for it
    BEHIND,  # the next in a queue
    LATE,  # the event without which it would have been through its in port earlier: 2t, or 2n + u if u held the port
) = range(16)
COLUMNS = 16
ALONE = -2
"""A list of one gate is kept in the row: `FIRST` is `ALONE` - gate."""
NO_PORT, LOCAL = -1, -2
"""Inside a server whose fabric never is the bottleneck; a local operation, which has no latency either."""
FRESH, ARRIVING, LEAVING, ARRIVED, LEFT, FINISHED = range(6)
"""The first three are queues; `Net.tail` says where they end, how far the last two have been worked off, and how many
transfers are done."""
LANDED = 2
"""Event 2n + t: transfer t is through its in port. It has no gates; it is a link of the critical path."""


class Net(NamedTuple):
    """All transfers, and the queues of those with an event at a known time.

    `rows[t, column]` as above; `gates` are the lists. `due` is empty, or the additional latency of transfer t, and
    once it is in flight its time of arrival.
    """

    rows: Small
    gates: Small
    stack: Small
    queues: Small
    due: Times
    tail: Column


def make_net(rows: Small, gates: Small, due: Times) -> Net:
    """Empty queues for the transfers of `rows`."""
    stack, queues = np.empty(2 * len(rows), dtype=np.int32), np.empty((3, len(rows)), dtype=np.int32)
    return Net(rows, gates, stack, queues, due, np.zeros(6, dtype=np.int64))


def blank_rows(n: int) -> Small:
    """Transfers without dependencies."""
    rows = np.empty((n, COLUMNS), dtype=np.int32)
    rows[:] = [-1, -1, -1, -1, -1, 0, 0, 0, -1, 1, -1, NO_PORT, NO_PORT, -1, -1, -1]
    return rows


def index_lanes(
    lane_first: Column,
    after_first: Column,
    after: Column,
    send: Column,
    receive: Column,
    in_channel: Column,
    slots: Column,
    rows: Small,
    turn: Small,
) -> None:
    """The constraints of a plan's lanes, except for the lists, of which it counts the lengths: `AT_SENT`, `AT_DONE`.

    The same constraints as in `plan_constraints`, without those that others imply: a fused instruction sends when its
    receive is done, and that has already waited for everything that the instruction is after.
    `turn[t]` is the place of t in its receive lane. For `odd_one`, `BEHIND` and `PAIR` count, from -1 on, the
    instructions that send and receive t.
    """
    for lane in range(len(lane_first) - 1):
        begin = lane_first[lane]
        last_send, last_receive, last_local = -1, -1, -1
        oldest, ahead = begin, 0  # the first receive whose slot is not offered again yet, and those from there on
        since_send, since_receive, since_local = begin, begin, begin
        for index in range(begin, lane_first[lane + 1]):
            take, give = receive[index], send[index]
            until = after_first[index + 1]
            if take >= 0 and in_channel[index] >= 0:
                rows[take, PAIR] += 1
                if last_receive >= 0:
                    rows[last_receive, NEXT_RECEIVE] = take
                    rows[take, DONE_WAITS] += 1
                last_receive = take
                turn[take] = index - begin
                if ahead == slots[in_channel[index]]:
                    while in_channel[oldest] < 0:
                        oldest += 1
                    rows[receive[oldest], FREED] = take
                    rows[take, START_WAITS] += 1
                    oldest += 1
                else:
                    ahead += 1
                for at in range(after_first[since_receive], until):
                    count_gate(rows, send[after[at]], receive[after[at]], take, DONE_WAITS)
                since_receive = index + 1
            elif take >= 0:
                if last_local >= 0:
                    rows[last_local, PASSED_ON] = take
                    rows[take, START_WAITS] += 1
                last_local = take
                for at in range(after_first[since_local], until):
                    count_gate(rows, send[after[at]], receive[after[at]], take, START_WAITS)
                since_local = index + 1
            if give >= 0:
                rows[give, BEHIND] += 1
                if last_send >= 0:
                    rows[last_send, NEXT_SEND] = give
                    rows[give, START_WAITS] += 1
                last_send = give
                if take >= 0:
                    rows[take, PASSED_ON] = give
                    rows[give, START_WAITS] += 1
                else:
                    for at in range(after_first[since_send], until):
                        count_gate(rows, send[after[at]], receive[after[at]], give, START_WAITS)
                since_send = index + 1


def list_lanes(
    lane_first: Column,
    after_first: Column,
    after: Column,
    send: Column,
    receive: Column,
    in_channel: Column,
    rows: Small,
    gates: Small,
) -> None:
    """Fills the lists whose lengths `index_lanes` has counted."""
    for lane in range(len(lane_first) - 1):
        since_send, since_receive, since_local = lane_first[lane], lane_first[lane], lane_first[lane]
        for index in range(lane_first[lane], lane_first[lane + 1]):
            take, give = receive[index], send[index]
            until = after_first[index + 1]
            if take >= 0 and in_channel[index] >= 0:
                for at in range(after_first[since_receive], until):
                    list_gate(rows, gates, send[after[at]], receive[after[at]], 2 * take + 1)
                since_receive = index + 1
            elif take >= 0:
                for at in range(after_first[since_local], until):
                    list_gate(rows, gates, send[after[at]], receive[after[at]], 2 * take)
                since_local = index + 1
            if give >= 0:
                if take < 0:
                    for at in range(after_first[since_send], until):
                        list_gate(rows, gates, send[after[at]], receive[after[at]], 2 * give)
                since_send = index + 1


def count_gate(rows: Small, sends: int, receives: int, transfer: int, waits: int) -> None:
    """A gate of `transfer` depends on one more event: that of an instruction which `sends` and `receives`.

    An instruction that sends is complete when its bytes have left: it has received before.
    """
    before = sends if sends >= 0 else receives
    rows[before, AT_SENT if sends >= 0 else AT_DONE] += 1
    rows[before, FIRST] = ALONE - 2 * transfer - (waits == DONE_WAITS)
    rows[transfer, waits] += 1


def list_gate(rows: Small, gates: Small, sends: int, receives: int, gate: int) -> None:
    """Puts `gate` into the list of that event; `AT_SENT` and `AT_DONE` count up to what they were."""
    before = sends if sends >= 0 else receives
    which = AT_SENT if sends >= 0 else AT_DONE
    if rows[before, FIRST] >= 0:
        gates[rows[before, FIRST] + rows[before, which]] = gate
        rows[before, which] += 1


def make_room(rows: Small) -> int:
    """`FIRST` from the counts, and the length of all lists together.

    Where there is a list the counts become 0 and the length of the first part, from where `list_gate` and
    `list_constraints` count up.
    """
    total = 0
    for transfer in range(len(rows)):
        sent, done = rows[transfer, AT_SENT], rows[transfer, AT_DONE]
        if sent + done > 1:
            rows[transfer, FIRST] = total
            rows[transfer, AT_SENT] = 0
            rows[transfer, AT_DONE] = sent
            total += sent + done
        else:
            rows[transfer, AT_DONE] = sent + done
    return total


def count_constraints(before: Column, after: Column, kind: Column, rows: Small) -> None:
    """Counts what the constraints (`optcc.simulate.constraints`) put into the lists."""
    for edge in range(len(kind)):
        rows[before[edge], AT_SENT if kind[edge] & 1 else AT_DONE] += 1
        rows[before[edge], FIRST] = ALONE - 2 * after[edge] - (kind[edge] >> 1)
        rows[after[edge], DONE_WAITS if kind[edge] & 2 else START_WAITS] += 1


def list_constraints(before: Column, after: Column, kind: Column, rows: Small, gates: Small) -> None:
    """Fills the lists whose lengths `count_constraints` has counted."""
    for edge in range(len(kind)):
        which = AT_SENT if kind[edge] & 1 else AT_DONE
        if rows[before[edge], FIRST] >= 0:
            gates[rows[before[edge], FIRST] + rows[before[edge], which]] = 2 * after[edge] + (kind[edge] >> 1)
            rows[before[edge], which] += 1


def odd_one(src: Column, dst: Column, rows: Small) -> int:
    """The first transfer between two ranks that is not sent once and received once; -1: there is none.

    `BEHIND` and `PAIR`, which count that, are blank afterwards.
    """
    odd = -1
    for transfer in range(len(src)):
        if (rows[transfer, BEHIND] != 0 or rows[transfer, PAIR] != 0) and src[transfer] != dst[transfer] and odd < 0:
            odd = transfer
        rows[transfer, BEHIND] = -1
        rows[transfer, PAIR] = -1
    return odd


def to_seconds(times: Times, per_s: float, seconds: npt.NDArray[np.float64]) -> int:
    """`seconds[moment, t]` from `times[t, moment]`; returns the first of those that are done last."""
    last = 0
    for transfer in range(len(times)):
        if times[transfer, DONE] > times[last, DONE]:
            last = transfer
        for moment in range(4):
            seconds[moment, transfer] = times[transfer, moment] / per_s
    return last


def open_gate(net: Net, gate: int, event: int, depth: int) -> int:
    """Decrements the counter of `gate`; an open gate is pushed on the stack, whose new depth is returned."""
    at = START_WAITS + 2 * (gate & 1)
    net.rows[gate >> 1, at] -= 1
    net.rows[gate >> 1, at + 1] = event
    if net.rows[gate >> 1, at] == 0:
        net.stack[depth] = gate
        depth += 1
    return depth


def fire_sent(net: Net, transfer: int, depth: int) -> int:
    """Decrements every gate that depends on the last byte of `transfer` leaving."""
    following = net.rows[transfer, NEXT_SEND]
    if following >= 0:
        depth = open_gate(net, 2 * following, 2 * transfer, depth)
    first, n_sent = net.rows[transfer, FIRST], net.rows[transfer, AT_SENT]
    if n_sent and first <= ALONE:
        return open_gate(net, ALONE - first, 2 * transfer, depth)
    for at in range(first, first + n_sent):
        depth = open_gate(net, net.gates[at], 2 * transfer, depth)
    return depth


def fire_done(net: Net, transfer: int, depth: int) -> int:
    """Decrements every gate that depends on `transfer` being done."""
    event = 2 * transfer + 1
    following = net.rows[transfer, NEXT_RECEIVE]
    if following >= 0:
        depth = open_gate(net, 2 * following + 1, event, depth)
    following = net.rows[transfer, PASSED_ON]
    if following >= 0:
        depth = open_gate(net, 2 * following, event, depth)
    following = net.rows[transfer, FREED]
    if following >= 0:
        depth = open_gate(net, 2 * following, event, depth)
    first, n_sent, n_both = net.rows[transfer, FIRST], net.rows[transfer, AT_SENT], net.rows[transfer, AT_DONE]
    if n_both > n_sent and first <= ALONE:
        return open_gate(net, ALONE - first, event, depth)
    for at in range(first + n_sent, first + n_both):
        depth = open_gate(net, net.gates[at], event, depth)
    return depth


def land(net: Net, times: Times, transfer: int, now: Any, latency: Any, depth: int) -> int:
    """The in port has received the last byte of `transfer`."""
    times[transfer, DONE] = now
    more = 0 * now
    if len(net.due) and net.rows[transfer, OUT] != LOCAL:
        more = net.due[transfer]
    if latency + more == 0 or net.rows[transfer, OUT] == LOCAL:
        return open_gate(net, 2 * transfer + 1, LANDED * len(net.rows) + transfer, depth)
    if len(net.due) == 0:
        net.queues[ARRIVING, net.tail[ARRIVING]] = transfer
        net.tail[ARRIVING] += 1
        return depth
    net.due[transfer] = now + latency + more
    at = net.tail[ARRIVING]
    net.tail[ARRIVING] += 1
    while at > 0 and net.due[net.queues[ARRIVING, (at - 1) >> 1]] > net.due[transfer]:
        net.queues[ARRIVING, at] = net.queues[ARRIVING, (at - 1) >> 1]
        at = (at - 1) >> 1
    net.queues[ARRIVING, at] = transfer
    return depth


def look_ahead(net: Net, times: Times, sizes: Column, transfer: int) -> None:
    """Prefetches the rows that `transfer` will decrement, and that of the next one in its lane, when it starts.

    An index of -1 fetches a row that is not needed.
    """
    freed, following = net.rows[transfer, FREED], net.rows[transfer, NEXT_SEND]
    fetch(net.rows, freed)
    fetch(times, freed)
    fetch(sizes, following)
    fetch(net.gates, net.rows[following, FIRST])
    first = net.rows[transfer, FIRST]
    if first <= ALONE:
        fetch(net.rows, (ALONE - first) >> 1)
    else:
        for at in range(first, first + net.rows[transfer, AT_DONE]):
            fetch(net.rows, net.gates[at] >> 1)


def next_arrival(net: Net, times: Times, latency: Any) -> Any:
    """When the next transfer in flight arrives; negative: there is none."""
    if len(net.due):
        return net.due[net.queues[ARRIVING, 0]] if net.tail[ARRIVING] else latency - latency - 1
    if net.tail[ARRIVED] < net.tail[ARRIVING]:
        return times[net.queues[ARRIVING, net.tail[ARRIVED]], DONE] + latency
    return latency - latency - 1


def arrive(net: Net, times: Times, now: Any, latency: Any, depth: int) -> int:
    """Transfers that have arrived by `now` may be done."""
    landed = LANDED * len(net.rows)
    if len(net.due) == 0:
        while net.tail[ARRIVED] < net.tail[ARRIVING]:
            transfer = net.queues[ARRIVING, net.tail[ARRIVED]]
            if times[transfer, DONE] + latency > now:
                break
            net.tail[ARRIVED] += 1
            depth = open_gate(net, 2 * transfer + 1, landed + transfer, depth)
        return depth
    while net.tail[ARRIVING] and net.due[net.queues[ARRIVING, 0]] <= now:
        depth = open_gate(net, 2 * net.queues[ARRIVING, 0] + 1, landed + net.queues[ARRIVING, 0], depth)
        net.tail[ARRIVING] -= 1
        size = net.tail[ARRIVING]
        moved, at = net.queues[ARRIVING, size], 0
        while 2 * at + 1 < size:
            child = 2 * at + 1
            if child + 1 < size and net.due[net.queues[ARRIVING, child + 1]] < net.due[net.queues[ARRIVING, child]]:
                child += 1
            if net.due[moved] <= net.due[net.queues[ARRIVING, child]]:
                break
            net.queues[ARRIVING, at] = net.queues[ARRIVING, child]
            at = child
        net.queues[ARRIVING, at] = moved
    return depth


def leave(net: Net, times: Times, transfer: int, now: Any, latency: Any, depth: int) -> int:
    """The last byte of `transfer` has left, and its in port has received it at the same time."""
    times[transfer, SENT] = now
    depth = fire_sent(net, transfer, depth)
    return land(net, times, transfer, now, latency, depth)


def settle(net: Net, times: Times, now: Any, latency: Any, overhead: Any, depth: int) -> None:
    """All consequences at `now` of the open gates on the stack; transfers that use ports are left in `FRESH`."""
    while depth:
        depth -= 1
        gate = net.stack[depth]
        transfer = gate >> 1
        if gate & 1:
            times[transfer, DONE] = now
            net.tail[FINISHED] += 1
            depth = fire_done(net, transfer, depth)
            continue
        times[transfer, START] = now
        if net.rows[transfer, OUT] >= 0:
            net.queues[FRESH, net.tail[FRESH]] = transfer
            net.tail[FRESH] += 1
        elif overhead == 0 or net.rows[transfer, OUT] == LOCAL:
            times[transfer, TAKEN] = now
            depth = leave(net, times, transfer, now, latency, depth)
        else:
            net.queues[LEAVING, net.tail[LEAVING]] = transfer
            net.tail[LEAVING] += 1


def next_leaving(net: Net, times: Times, overhead: Any) -> Any:
    """When the overhead of the next transfer without a port is over; negative: there is none."""
    if net.tail[LEFT] < net.tail[LEAVING]:
        return times[net.queues[LEAVING, net.tail[LEFT]], START] + overhead
    return overhead - overhead - 1


def next_moment(
    net: Net, times: Times, event: int, changes_at: Column, happened: int, latency: int, overhead: int
) -> int:
    """The time of the next event, that of ports being at `event`; negative: there is none.

    Rates change as long as transfers are left.
    """
    later: int = next_arrival(net, times, latency)
    if event >= 0 and (later < 0 or event < later):
        later = event
    left = next_leaving(net, times, overhead)
    if left >= 0 and (later < 0 or left < later):
        later = left
    changing = happened < len(changes_at) and net.tail[FINISHED] < len(times)
    if changing and (later < 0 or changes_at[happened] < later):
        later = changes_at[happened]
    return later


def seed(net: Net) -> int:
    """Pushes the gates of transfers without dependencies on the stack."""
    depth = 0
    for transfer in range(len(net.rows)):
        if net.rows[transfer, START_WAITS] == 0:
            net.stack[depth] = 2 * transfer
            depth += 1
    return depth


KERNELS: tuple[Callable[..., Any], ...] = (
    count_gate,
    list_gate,
    index_lanes,
    list_lanes,
    make_room,
    count_constraints,
    list_constraints,
    odd_one,
    to_seconds,
    open_gate,
    fire_sent,
    fire_done,
    land,
    look_ahead,
    next_arrival,
    arrive,
    leave,
    settle,
    next_leaving,
    next_moment,
    seed,
)
