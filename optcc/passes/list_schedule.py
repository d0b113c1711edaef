"""List schedules: whenever a port falls free, the first transfer in the author's order that can start takes it.

The inner loops of `optcc.passes.timetable`. Times are ticks. `Jobs` are the transfers; `FifoListState` and
`ExclusiveListState` are the state of a run. How long a fifo port is occupied is `optcc.fifo_port`. The loop is not that
of `optcc.simulate.fifo`: that one serves ports in the order of a plan's lanes, this one makes the order, and looks
past the first transfer of an out port for one whose receiver has a free slot.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column, sort_part
from optcc.compiled import compiled
from optcc.fifo_port import delay_at_in_port, occupy

Flags = npt.NDArray[np.bool_]
NEEDS, FOLLOWS, SPARES = range(3)
"""Why one transfer waits for another: it needs the bytes at its sender; or at its receiver it comes after it into the
same bytes, or must not overwrite what the other still sends."""
_LOOKING, _STUCK, _READY, _COMING, _FINISHED, _EVENTS, _STARTED, _DONE, _FIRST_UNDONE, _NOW = range(10)
"""Indices into the `counts` of a state: lengths of its lists, how many transfers have started and how many are done,
the first that is not done, and the time."""
_BEGUN, _ENDED, _ROOM_UNTIL, _OLDEST, _NEWEST = range(5)
"""Columns of `FifoListState.rank`."""
_COMES, _LEFT, _LANDED, _ARRIVED = range(4)
"""Kinds of events under fifo: event 4t + kind is transfer t's."""


class Jobs(NamedTuple):
    """Columns with an entry for each transfer: its receiver, its channel, its two ports (-1: it stays on its rank) and
    its ticks on them.

    `successors[first[3t + why]:first[3t + why + 1]]` are the transfers that wait for transfer t for that reason.
    """

    receiver: Column
    channel: Column
    out: Column
    in_: Column
    out_ticks: Column
    in_ticks: Column
    first: Column
    successors: Column


class FifoListState(NamedTuple):
    """By transfer: how many it waits for before it may start (`missing`) and before it may be done (`held`); its
    neighbours among the ready transfers of its out port (`ahead`, `behind`); the next `younger` one in flight to its
    receiver, and how many may have begun there once it is the oldest (`room_of`); the next one on its channel.

    By channel: the last that has started. By rank: `_BEGUN` and `_ENDED` transfers to it, how many may have begun
    (`_ROOM_UNTIL`), the `_OLDEST` and the `_NEWEST` in flight. By port: the first ready transfer (`head`), when the in
    port is free, and flags.

    The lists are: out ports that may start something (`looking`); idle out ports whose receivers are all full
    (`stuck`); transfers that became `ready`, come to their in port (`coming`), or are `finished`; and a heap of events.
    `sends` and `receives` are the result.
    """

    missing: Column
    held: Column
    ahead: Column
    behind: Column
    younger: Column
    room_of: Column
    next_on: Column
    has_arrived: Flags
    is_done: Flags
    last_on: Column
    rank: Column
    head: Column
    in_free_at: Column
    is_busy: Flags
    is_looking: Flags
    is_stuck: Flags
    looking: Column
    stuck: Column
    ready: Column
    coming: Column
    finished: Column
    times: Column
    events: Column
    counts: Column
    sends: Column
    receives: Column


def list_fifo(
    jobs: Jobs, missing: Column, n_ports: int, n_ranks: int, latency: int, slots: int, lookahead: int, lead: int
) -> tuple[Column, Column]:
    """The orders in which the transfers start, and in which they are done, under fifo.

    A transfer is done when what it follows is done and what it spares has left, and what started before it on its
    channel is done: in the order of its receive lane. Slots are granted as in a lane, whatever that order turns out to
    be: while transfer t is on its way, at most so many may have started for its receiver that all but the last `slots`
    of them were done when t started.
    """
    n = len(missing)
    state = FifoListState(
        missing=missing,
        held=np.bincount(jobs.successors[_at_receiver(jobs)], minlength=n),
        ahead=np.empty(n, dtype=np.int64),
        behind=np.empty(n, dtype=np.int64),
        younger=np.full(n, -1),
        room_of=np.zeros(n, dtype=np.int64),
        next_on=np.full(n, -1),
        has_arrived=np.zeros(n, dtype=np.bool_),
        is_done=np.zeros(n, dtype=np.bool_),
        last_on=np.full(n, -1),
        rank=np.tile(np.array([0, 0, slots, -1, -1]), (n_ranks, 1)),
        head=np.full(n_ports, -1),
        in_free_at=np.zeros(n_ports, dtype=np.int64),
        is_busy=np.zeros(n_ports, dtype=np.bool_),
        is_looking=np.zeros(n_ports, dtype=np.bool_),
        is_stuck=np.zeros(n_ports, dtype=np.bool_),
        looking=np.empty(n_ports, dtype=np.int64),
        stuck=np.empty(n_ports, dtype=np.int64),
        ready=np.empty(n, dtype=np.int64),
        coming=np.empty(n_ports, dtype=np.int64),
        finished=np.empty(n, dtype=np.int64),
        times=np.empty(3 * n + 1, dtype=np.int64),
        events=np.empty(3 * n + 1, dtype=np.int64),
        counts=np.zeros(_NOW + 1, dtype=np.int64),
        sends=np.empty(n, dtype=np.int64),
        receives=np.empty(n, dtype=np.int64),
    )
    _kernels().run_fifo(jobs, state, latency, slots, lookahead, lead)
    assert state.counts[_DONE] == n, "transfers wait for each other in a circle"
    return state.sends, state.receives


def _at_receiver(jobs: Jobs) -> Flags:
    """For each entry of `successors`, whether it waits at its receiver: it follows or spares."""
    lengths = np.diff(jobs.first)
    return np.repeat(np.arange(len(lengths)) % 3 != NEEDS, lengths)


class ExclusiveListState(NamedTuple):
    """Of n transfers and q ports: port q + i is in port i, and entry n + t of `ahead` and `behind` is transfer t among
    the ready transfers of its in port. `looking` are ports that may start something.
    """

    missing: Column
    ahead: Column
    behind: Column
    head: Column
    is_busy: Flags
    is_looking: Flags
    looking: Column
    ready: Column
    times: Column
    events: Column
    counts: Column
    sends: Column


def list_exclusive(jobs: Jobs, missing: Column, n_ports: int, latency: int) -> Column:
    """The order in which the transfers start under exclusive ports."""
    n = len(missing)
    state = ExclusiveListState(
        missing=missing,
        ahead=np.empty(2 * n, dtype=np.int64),
        behind=np.empty(2 * n, dtype=np.int64),
        head=np.full(2 * n_ports, -1),
        is_busy=np.zeros(2 * n_ports, dtype=np.bool_),
        is_looking=np.zeros(2 * n_ports, dtype=np.bool_),
        looking=np.empty(2 * n_ports, dtype=np.int64),
        ready=np.empty(n, dtype=np.int64),
        times=np.empty(n + 1, dtype=np.int64),
        events=np.empty(n + 1, dtype=np.int64),
        counts=np.zeros(_NOW + 1, dtype=np.int64),
        sends=np.empty(n, dtype=np.int64),
    )
    _kernels().run_exclusive(jobs, state, n_ports, latency)
    assert state.counts[_STARTED] == n, "transfers wait for each other in a circle"
    return state.sends


@cache
def _kernels() -> Any:
    return compiled(_KERNELS, globals())


def _push(times: Column, events: Column, count: Column, time: int, event: int) -> None:
    """Adds an event to the binary heap; equal times go by the event's number."""
    at = count[_EVENTS]
    count[_EVENTS] += 1
    while at > 0:
        up = (at - 1) >> 1
        if times[up] < time or (times[up] == time and events[up] < event):
            break
        times[at], events[at] = times[up], events[up]
        at = up
    times[at], events[at] = time, event


def _pop(times: Column, events: Column, count: Column) -> int:
    """Takes the first event off the heap and returns it."""
    first = int(events[0])
    count[_EVENTS] -= 1
    size = count[_EVENTS]
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
    return first


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


def _release(jobs: Jobs, missing: Column, ready: Column, count: Column, event: int) -> None:
    """Counts down what waits for `event` to start; transfers that wait for nothing more become ready."""
    for at in range(jobs.first[event], jobs.first[event + 1]):
        successor = jobs.successors[at]
        missing[successor] -= 1
        if missing[successor] == 0:
            ready[count[_READY]] = successor
            count[_READY] += 1


def _seed(missing: Column, ready: Column, count: Column) -> None:
    """Transfers that wait for nothing are ready."""
    for transfer in range(len(missing)):
        if missing[transfer] == 0:
            ready[count[_READY]] = transfer
            count[_READY] += 1


def _look(state: FifoListState, port: int) -> None:
    """Out port `port` may start something, if it is idle."""
    if state.head[port] >= 0 and not state.is_busy[port] and not state.is_looking[port]:
        state.is_looking[port] = True
        state.looking[state.counts[_LOOKING]] = port
        state.counts[_LOOKING] += 1


def _count_down_held(state: FifoListState, transfer: int) -> None:
    """`transfer` waits for one thing fewer before it may be done."""
    state.held[transfer] -= 1
    if state.held[transfer] == 0 and state.has_arrived[transfer]:
        state.finished[state.counts[_FINISHED]] = transfer
        state.counts[_FINISHED] += 1


def _queue_ready(jobs: Jobs, state: FifoListState) -> None:
    """Ready transfers queue at their out ports; local operations start and are done at once."""
    count = state.counts
    while count[_READY] > 0:
        count[_READY] -= 1
        transfer = state.ready[count[_READY]]
        port = jobs.out[transfer]
        if port >= 0:
            _insert(state.ahead, state.behind, state.head, port, transfer)
            _look(state, port)
            continue
        state.sends[count[_STARTED]] = transfer
        state.receives[count[_DONE]] = transfer
        state.is_done[transfer] = True
        count[_STARTED] += 1
        count[_DONE] += 1
        for why in range(3):
            _release(jobs, state.missing, state.ready, count, 3 * transfer + why)
        for at in range(jobs.first[3 * transfer + FOLLOWS], jobs.first[3 * transfer + 3]):
            _count_down_held(state, jobs.successors[at])


def _choose(jobs: Jobs, state: FifoListState, port: int, lookahead: int, lead: int) -> int:
    """The first of the first `lookahead` ready transfers of an out port whose receiver has room; -1: there is none, or
    it is too far ahead."""
    transfer, seen = state.head[port], 0
    while transfer >= 0:
        rank = jobs.receiver[transfer]
        if state.rank[rank, _BEGUN] < state.rank[rank, _ROOM_UNTIL]:
            return int(transfer) if transfer < state.counts[_FIRST_UNDONE] + lead else -1
        if seen == lookahead:
            return -1
        transfer = state.behind[transfer]
        seen += 1
    return -1


def _start(jobs: Jobs, state: FifoListState, transfer: int, slots: int) -> None:
    """The first byte of `transfer` leaves."""
    count, rank, channel = state.counts, jobs.receiver[transfer], jobs.channel[transfer]
    _remove(state.ahead, state.behind, state.head, jobs.out[transfer], transfer)
    state.is_busy[jobs.out[transfer]] = True
    earlier = state.last_on[channel]
    if earlier >= 0 and not state.is_done[earlier]:
        state.next_on[earlier] = transfer
        state.held[transfer] += 1
    state.last_on[channel] = transfer
    state.rank[rank, _BEGUN] += 1
    state.room_of[transfer] = state.rank[rank, _ENDED] + slots
    if state.rank[rank, _OLDEST] < 0:
        state.rank[rank, _OLDEST] = transfer
        state.rank[rank, _ROOM_UNTIL] = state.room_of[transfer]
    else:
        state.younger[state.rank[rank, _NEWEST]] = transfer
    state.rank[rank, _NEWEST] = transfer
    state.sends[count[_STARTED]] = transfer
    count[_STARTED] += 1
    delay = delay_at_in_port(jobs.out_ticks[transfer], jobs.in_ticks[transfer])
    if delay > 0:
        _push(state.times, state.events, count, count[_NOW] + delay, 4 * transfer + _COMES)
    else:
        state.coming[count[_COMING]] = transfer
        count[_COMING] += 1
    _push(state.times, state.events, count, count[_NOW] + jobs.out_ticks[transfer], 4 * transfer + _LEFT)
    _release(jobs, state.missing, state.ready, count, 3 * transfer + FOLLOWS)
    _release(jobs, state.missing, state.ready, count, 3 * transfer + SPARES)


def _start_sends(jobs: Jobs, state: FifoListState, slots: int, lookahead: int, lead: int) -> None:
    """Every out port that may start something does, if a receiver has room."""
    count = state.counts
    sort_part(state.looking, 0, count[_LOOKING])
    for at in range(count[_LOOKING]):
        port = state.looking[at]
        state.is_looking[port] = False
        transfer = _choose(jobs, state, port, lookahead, lead)
        if transfer >= 0:
            _start(jobs, state, transfer, slots)
        elif state.head[port] >= 0 and not state.is_stuck[port]:
            state.is_stuck[port] = True
            state.stuck[count[_STUCK]] = port
            count[_STUCK] += 1
    count[_LOOKING] = 0


def _take(jobs: Jobs, state: FifoListState) -> None:
    """In ports serve the transfers that come to them, one after the other."""
    sort_part(state.coming, 0, state.counts[_COMING])
    for at in range(state.counts[_COMING]):
        transfer = state.coming[at]
        port = jobs.in_[transfer]
        state.in_free_at[port] = occupy(state.in_free_at[port], state.counts[_NOW], jobs.in_ticks[transfer])
        _push(state.times, state.events, state.counts, state.in_free_at[port], 4 * transfer + _LANDED)
    state.counts[_COMING] = 0


def _happen(jobs: Jobs, state: FifoListState, event: int, latency: int) -> None:
    """An event: a transfer has come far enough for its in port to take it without a pause, its last byte has left, it
    is through its in port, or it has arrived."""
    transfer, kind = event >> 2, event & 3
    if kind == _COMES:
        state.coming[state.counts[_COMING]] = transfer
        state.counts[_COMING] += 1
    elif kind == _LEFT:
        state.is_busy[jobs.out[transfer]] = False
        _look(state, jobs.out[transfer])
        for at in range(jobs.first[3 * transfer + SPARES], jobs.first[3 * transfer + 3]):
            _count_down_held(state, jobs.successors[at])
    elif kind == _LANDED:
        _push(state.times, state.events, state.counts, state.counts[_NOW] + latency, 4 * transfer + _ARRIVED)
    else:
        state.has_arrived[transfer] = True
        if state.held[transfer] == 0:
            state.finished[state.counts[_FINISHED]] = transfer
            state.counts[_FINISHED] += 1


def _finish(jobs: Jobs, state: FifoListState, slots: int) -> None:
    """All finished transfers are done: their receivers have room, and idle out ports may have something to start."""
    count = state.counts
    while count[_FINISHED] > 0:
        count[_FINISHED] -= 1
        transfer = state.finished[count[_FINISHED]]
        state.is_done[transfer] = True
        state.receives[count[_DONE]] = transfer
        count[_DONE] += 1
        rank = jobs.receiver[transfer]
        state.rank[rank, _ENDED] += 1
        _release(jobs, state.missing, state.ready, count, 3 * transfer + NEEDS)
        for at in range(jobs.first[3 * transfer + FOLLOWS], jobs.first[3 * transfer + SPARES]):
            _count_down_held(state, jobs.successors[at])
        if state.next_on[transfer] >= 0:
            _count_down_held(state, state.next_on[transfer])
        oldest = state.rank[rank, _OLDEST]
        while oldest >= 0 and state.is_done[oldest]:
            oldest = state.younger[oldest]
        state.rank[rank, _OLDEST] = oldest
        room_until = state.room_of[oldest] if oldest >= 0 else state.rank[rank, _BEGUN] + slots
        state.rank[rank, _ROOM_UNTIL] = room_until
    for at in range(count[_STUCK]):
        state.is_stuck[state.stuck[at]] = False
        _look(state, state.stuck[at])
    count[_STUCK] = 0


def _run_fifo(jobs: Jobs, state: FifoListState, latency: int, slots: int, lookahead: int, lead: int) -> None:
    """From instant to instant: what can start and be taken, then what ends."""
    count = state.counts
    _seed(state.missing, state.ready, count)
    while True:
        while count[_READY] > 0 or count[_LOOKING] > 0:
            _queue_ready(jobs, state)
            _start_sends(jobs, state, slots, lookahead, lead)
        _take(jobs, state)
        if count[_FINISHED] == 0:
            if count[_EVENTS] == 0:
                return
            count[_NOW] = state.times[0]
            while count[_EVENTS] > 0 and state.times[0] == count[_NOW]:
                _happen(jobs, state, _pop(state.times, state.events, count), latency)
        if count[_FINISHED] > 0:
            _finish(jobs, state, slots)
        while count[_FIRST_UNDONE] < len(state.is_done) and state.is_done[count[_FIRST_UNDONE]]:
            count[_FIRST_UNDONE] += 1


def _look_exclusive(state: ExclusiveListState, port: int) -> None:
    """`port` may start something."""
    if not state.is_looking[port]:
        state.is_looking[port] = True
        state.looking[state.counts[_LOOKING]] = port
        state.counts[_LOOKING] += 1


def _queue_exclusive(jobs: Jobs, state: ExclusiveListState, n_ports: int) -> None:
    """Ready transfers queue at both of their ports; local operations start and are done at once."""
    n, count = len(state.missing), state.counts
    while count[_READY] > 0:
        count[_READY] -= 1
        transfer = state.ready[count[_READY]]
        if jobs.out[transfer] >= 0:
            _insert(state.ahead, state.behind, state.head, jobs.out[transfer], transfer)
            _insert(state.ahead, state.behind, state.head, n_ports + jobs.in_[transfer], n + transfer)
            _look_exclusive(state, jobs.out[transfer])
        else:
            state.sends[count[_STARTED]] = transfer
            count[_STARTED] += 1
            _release(jobs, state.missing, state.ready, count, 3 * transfer + NEEDS)


def _choose_exclusive(jobs: Jobs, state: ExclusiveListState, n_ports: int) -> int:
    """The first ready transfer of the ports that are looking whose two ports are idle; -1: there is none."""
    n, best, kept = len(state.missing), -1, 0
    for at in range(state.counts[_LOOKING]):
        port = state.looking[at]
        node = -1 if state.is_busy[port] else state.head[port]
        while node >= 0 and (state.is_busy[jobs.out[node % n]] or state.is_busy[n_ports + jobs.in_[node % n]]):
            node = state.behind[node]
        if node < 0:
            state.is_looking[port] = False
            continue
        state.looking[kept] = port
        kept += 1
        if best < 0 or node % n < best:
            best = node % n
    state.counts[_LOOKING] = kept
    return best


def _run_exclusive(jobs: Jobs, state: ExclusiveListState, n_ports: int, latency: int) -> None:
    """Event 2t: transfer t has left; 2t + 1: it is done."""
    n, count = len(state.missing), state.counts
    _seed(state.missing, state.ready, count)
    while True:
        _queue_exclusive(jobs, state, n_ports)
        best = _choose_exclusive(jobs, state, n_ports)
        while best >= 0:
            out, in_ = jobs.out[best], n_ports + jobs.in_[best]
            _remove(state.ahead, state.behind, state.head, out, best)
            _remove(state.ahead, state.behind, state.head, in_, n + best)
            state.is_busy[out] = True
            state.is_busy[in_] = True
            state.sends[count[_STARTED]] = best
            count[_STARTED] += 1
            ticks = max(jobs.out_ticks[best], jobs.in_ticks[best])
            _push(state.times, state.events, count, count[_NOW] + ticks, 2 * best)
            best = _choose_exclusive(jobs, state, n_ports)
        if count[_EVENTS] == 0:
            return
        count[_NOW] = state.times[0]
        while count[_EVENTS] > 0 and state.times[0] == count[_NOW]:
            event = _pop(state.times, state.events, count)
            transfer = event >> 1
            if event & 1:
                _release(jobs, state.missing, state.ready, count, 3 * transfer + NEEDS)
                continue
            _push(state.times, state.events, count, count[_NOW] + latency, event + 1)
            for port in (jobs.out[transfer], n_ports + jobs.in_[transfer]):
                state.is_busy[port] = False
                _look_exclusive(state, port)


_KERNELS = (
    *(delay_at_in_port, occupy, sort_part, _push, _pop, _insert, _remove, _release, _seed),
    *(_look, _count_down_held, _queue_ready, _choose, _start, _start_sends, _take, _happen, _finish, _run_fifo),
    *(_look_exclusive, _queue_exclusive, _choose_exclusive, _run_exclusive),
)
