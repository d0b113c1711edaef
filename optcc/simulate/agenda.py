"""What happens next: the pending events of ports, earliest first.

Ports have few rates and chunks few sizes, so most events lie one of few spans ahead of the moment that makes them, and
events of one span come in the order of time by themselves. So there are queues, each in order, and a heap of the queues
by their first events: with a handful of spans it costs next to nothing, with as many as events what a heap of events
costs. A span has its queue by its bits; where that one ends too late, the next that does not, or is empty.
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


class Agenda(NamedTuple):
    """An item has at most one event, at `time[item]`; `follow[item]` is the next one in its queue.

    `queues[q]` are the `FRONT` and the `REAR` item of queue q, `FRONT` -1: it is empty. In `heap[:size[0]]` are the
    numbers of the queues that are not, each with the time of its front item as its `KEY`.
    """

    time: Column
    follow: Ids
    queues: Ids
    heap: Column
    size: Column


def make_agenda(n_items: int) -> Agenda:
    """No events. There are more queues than items, so that an empty one can always be found."""
    n_queues = 1 << (2 * n_items).bit_length()
    return Agenda(
        np.zeros(n_items, dtype=np.int64),
        np.full(n_items, -1, dtype=np.int32),
        np.full((n_queues, 2), -1, dtype=np.int32),
        np.zeros((n_queues, 2), dtype=np.int64),
        np.zeros(1, dtype=np.int64),
    )


def put(agenda: Agenda, item: int, time: int, now: int) -> None:
    """`item` has its event at `time`, which is not before `now`."""
    span, mask = time - now, len(agenda.queues) - 1
    queue = (span ^ (span >> 9) ^ (span >> 21)) & mask
    while agenda.queues[queue, FRONT] >= 0 and agenda.time[agenda.queues[queue, REAR]] > time:
        queue = (queue + 1) & mask
    agenda.time[item] = time
    agenda.follow[item] = -1
    if agenda.queues[queue, FRONT] >= 0:
        agenda.follow[agenda.queues[queue, REAR]] = item
        agenda.queues[queue, REAR] = item
        return
    agenda.queues[queue, FRONT] = item
    agenda.queues[queue, REAR] = item
    at = agenda.size[0]
    agenda.size[0] += 1
    while at > 0 and agenda.heap[(at - 1) >> 1, KEY] > time:
        agenda.heap[at, KEY] = agenda.heap[(at - 1) >> 1, KEY]
        agenda.heap[at, QUEUE] = agenda.heap[(at - 1) >> 1, QUEUE]
        at = (at - 1) >> 1
    agenda.heap[at, KEY] = time
    agenda.heap[at, QUEUE] = queue


def next_event(agenda: Agenda) -> int:
    """The time of the earliest event; -1: there is none."""
    return agenda.heap[0, KEY] if agenda.size[0] else -1


def take(agenda: Agenda) -> int:
    """Removes the earliest event and returns its item."""
    time, queue = agenda.heap[0, KEY], agenda.heap[0, QUEUE]
    item: int = agenda.queues[queue, FRONT]
    following = agenda.follow[item]
    agenda.queues[queue, FRONT] = following
    if following < 0:
        agenda.size[0] -= 1
        time, queue = agenda.heap[agenda.size[0], KEY], agenda.heap[agenda.size[0], QUEUE]
    elif agenda.time[following] == time:
        return item
    else:
        time = agenda.time[following]
    size = agenda.size[0]
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and agenda.heap[child + 1, KEY] < agenda.heap[child, KEY]:
            child += 1
        if time <= agenda.heap[child, KEY]:
            break
        agenda.heap[at, KEY] = agenda.heap[child, KEY]
        agenda.heap[at, QUEUE] = agenda.heap[child, QUEUE]
        at = child
    agenda.heap[at, KEY] = time
    agenda.heap[at, QUEUE] = queue
    return item


def clear(agenda: Agenda) -> None:
    """Removes all events."""
    for queue in range(len(agenda.queues)):
        agenda.queues[queue, FRONT] = -1
    agenda.size[0] = 0


KERNELS: tuple[Callable[..., Any], ...] = (put, next_event, take, clear)
