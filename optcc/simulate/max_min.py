"""Max-min fair rates of the pairs of ports between which transfers flow, found anew after each change.

`share` finds them in one of two ways. Where little has changed, `relax` follows the change from port to port; else
`fill` computes all rates of a connected part by progressive filling. `optcc.simulate.fair` is the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column
from optcc.simulate.ports import FIRST_PAIR, N_PAIRS, Pairs

Floats = npt.NDArray[np.float64]
TOLERANCE = 4e-15
TOUCHED, DIRTY = range(2)
_RELAXED_SHARE = 4
"""If something changed at more than one in so many ports, all rates are found anew."""


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


def mark(scratch: Scratch, port: int) -> None:
    """Something changed at `port`."""
    if not scratch.is_dirty[port]:
        scratch.is_dirty[port] = True
        scratch.dirty[scratch.filled[DIRTY]] = port
        scratch.filled[DIRTY] += 1


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
    return one != other and not abs(one - other) <= TOLERANCE * min(one, other)


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
    n_dirty, end = scratch.filled[DIRTY], -1
    scratch.filled[DIRTY] = 0
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


KERNELS: tuple[Callable[..., Any], ...] = (mark, reach, fill, sift, remove, find_height, differ, queue, relax, share)
