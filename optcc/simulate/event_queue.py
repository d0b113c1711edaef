"""An event queue: the pending events of ports, earliest first.

Ports have few rates and chunks few sizes, so most events are scheduled one of a few delays ahead, and events with the
same delay are already in order of time. Each delay hashes to a queue, and a heap orders the queues by their first
events: with few delays an operation takes constant time, at worst that of a heap of events. If the last event of a
queue is later than the new one, the next queue that is empty or ends earlier takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column

Ids = npt.NDArray[np.int32]


FRONT, REAR = range(2)
KEY, QUEUE = range(2)


class EventQueue(NamedTuple):
    """An item has at most one event, at `time[item]`; `follow[item]` is the next one in its queue.

    `queues[q]` are the `FRONT` and the `REAR` item of queue q, `FRONT` -1: it is empty. In `heap[:size[0]]` are the
    numbers of the queues that are not, each with the time of its front item as its `KEY`.
    """

    time: Column
    follow: Ids
    queues: Ids
    heap: Column
    size: Column


def make_event_queue(n_items: int) -> EventQueue:
    """No events. There are more queues than items, so that an empty one can always be found."""
    n_queues = 1 << (2 * n_items).bit_length()
    return EventQueue(
        np.zeros(n_items, dtype=np.int64),
        np.full(n_items, -1, dtype=np.int32),
        np.full((n_queues, 2), -1, dtype=np.int32),
        np.zeros((n_queues, 2), dtype=np.int64),
        np.zeros(1, dtype=np.int64),
    )


def put(events: EventQueue, item: int, time: int, now: int) -> None:
    """`item` has its event at `time`, which is not before `now`."""
    span, mask = time - now, len(events.queues) - 1
    queue = (span ^ (span >> 9) ^ (span >> 21)) & mask
    while events.queues[queue, FRONT] >= 0 and events.time[events.queues[queue, REAR]] > time:
        queue = (queue + 1) & mask
    events.time[item] = time
    events.follow[item] = -1
    if events.queues[queue, FRONT] >= 0:
        events.follow[events.queues[queue, REAR]] = item
        events.queues[queue, REAR] = item
        return
    events.queues[queue, FRONT] = item
    events.queues[queue, REAR] = item
    at = events.size[0]
    events.size[0] += 1
    while at > 0 and events.heap[(at - 1) >> 1, KEY] > time:
        events.heap[at, KEY] = events.heap[(at - 1) >> 1, KEY]
        events.heap[at, QUEUE] = events.heap[(at - 1) >> 1, QUEUE]
        at = (at - 1) >> 1
    events.heap[at, KEY] = time
    events.heap[at, QUEUE] = queue


def next_event(events: EventQueue) -> int:
    """The time of the earliest event; -1: there is none."""
    return events.heap[0, KEY] if events.size[0] else -1


def take(events: EventQueue) -> int:
    """Removes the earliest event and returns its item."""
    time, queue = events.heap[0, KEY], events.heap[0, QUEUE]
    item: int = events.queues[queue, FRONT]
    following = events.follow[item]
    events.queues[queue, FRONT] = following
    if following < 0:
        events.size[0] -= 1
        time, queue = events.heap[events.size[0], KEY], events.heap[events.size[0], QUEUE]
    elif events.time[following] == time:
        return item
    else:
        time = events.time[following]
    size = events.size[0]
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and events.heap[child + 1, KEY] < events.heap[child, KEY]:
            child += 1
        if time <= events.heap[child, KEY]:
            break
        events.heap[at, KEY] = events.heap[child, KEY]
        events.heap[at, QUEUE] = events.heap[child, QUEUE]
        at = child
    events.heap[at, KEY] = time
    events.heap[at, QUEUE] = queue
    return item


def clear(events: EventQueue) -> None:
    """Removes all events."""
    for queue in range(len(events.queues)):
        events.queues[queue, FRONT] = -1
    events.size[0] = 0


KERNELS: tuple[Callable[..., Any], ...] = (put, next_event, take, clear)
