"""Which NICs of a job carry less than is known, as its own traffic says. No I/O, no clock.

A *flow* is what goes from a NIC of one rank to a NIC of another. While a NIC holds up a collective, each flow over it
has bytes on their way nearly all the time; other flows wait for what comes over that NIC, and have for a part of it.
So the busy flows name the NIC. It carried what they did, in no less time than the busiest of them was busy and no more
than all took; if these two differ little, that is its rate. Where all flows are about as busy, or there is only one
over a NIC (whose two ends cannot be told apart), nothing is said.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from itertools import chain, pairwise
from typing import NamedTuple

HOT, GAP = 0.65, 0.1
"""Parts of the time for which the busiest flow has bytes on their way: a flow over a slow NIC has some for the first at
least, and for longer than all others by the second."""
STRAY = 1 / 16
"""Such a part of the flows may be busy for another reason."""
SLOWER = 0.9
"""A NIC that is said to be slow carries less than such a part of what is known."""
SURE, SURE_ALL = 0.8, 0.75
"""It is if it was busy for such a part of the time at least; where the times of its flows differ, if all were for the
second."""
LATE = 0.1
"""So much of what was carried may still have been under way when the last of it was sent."""
MARKS, MARK_S, LEAST_S = 8, 0.05, 0.1
"""So many marks are kept, one such a time after the other at least; traffic of so short a time says nothing."""

Rail = tuple[int, int, int]
"""(NIC of this rank, peer, NIC of the peer)."""
FlowEnds = tuple[int, int, int, int]
"""The sender and its NIC, the receiver and its NIC."""
NicWay = tuple[int, int, bool]
"""A rank, its NIC, and whether it sends."""


class FlowTally(NamedTuple):
    """What a connection has carried so far: which one it is, its bytes, and for how long some were on their way, and
    the receiver had room for them."""

    session: int
    n_bytes: int
    busy_s: float


class NicFlow(NamedTuple):
    """What a flow carried in some time, and for how long it had bytes on their way."""

    n_bytes: float
    busy_s: float


class WayRate(NamedTuple):
    """What a NIC carries one way, bytes/s; the bytes that went over it in some time, and for how long its busiest flow
    had some on their way."""

    rate: float
    n_bytes: float
    busy_s: float


class Traffic(NamedTuple):
    """What a rank's connections carried, and for how many seconds it had something to carry at most."""

    seconds: float
    flows: dict[Rail, NicFlow]


class FlowMarks:
    """What the connections of a rank had carried when collectives began, by the number of the collective.

    >>> marks, rail = FlowMarks(), (0, 1, 0)
    >>> marks.note(3, 1.0, {rail: FlowTally(7, 1000, 0.25)})
    >>> marks.since(2, 2.0, {rail: FlowTally(7, 5000, 0.75)})
    Traffic(seconds=1.0, flows={(0, 1, 0): NicFlow(n_bytes=4000, busy_s=0.5)})
    >>> marks.since(4, 2.0, {}), marks.since(3, 2.0, {rail: FlowTally(8, 0, 0.0)})
    (None, None)
    """

    __slots__ = ("_marks", "_noted_s")

    def __init__(self) -> None:
        self._marks: deque[tuple[int, float, Mapping[Rail, FlowTally]]] = deque(maxlen=MARKS)
        self._noted_s = -MARK_S

    def is_due(self, now_s: float) -> bool:
        """Whether the collective that begins now is to be marked."""
        return now_s >= self._noted_s + MARK_S

    def note(self, number: int, now_s: float, carried: Mapping[Rail, FlowTally]) -> None:
        """A collective begins."""
        self._noted_s = now_s
        self._marks.append((number, now_s, carried))

    def first_between(self, begin_s: float, end_s: float) -> int | None:
        """The first collective that was marked between two times."""
        return next((number for number, s, _ in self._marks if begin_s <= s <= end_s), None)

    def between(self, number: int, until: int) -> Traffic | None:
        """What was carried between the beginnings of two collectives, or of the first ones after them that were marked;
        None if those are not, or connections are others.

        >>> marks, rail = FlowMarks(), (0, 1, 0)
        >>> for number in (3, 5):
        ...     marks.note(number, number / 2, {rail: FlowTally(7, 1000 * number, 0.25 * number)})
        >>> marks.between(2, 4), marks.between(3, 6), marks.between(4, 5)
        (Traffic(seconds=1.0, flows={(0, 1, 0): NicFlow(n_bytes=2000, busy_s=0.5)}), None, None)
        """
        begin, end = (self._mark_from(each) for each in (number, until))
        if begin is None or end is None or begin[0] >= end[0] or _sessions(begin[1]) != _sessions(end[1]):
            return None
        return Traffic(end[0] - begin[0], _carried_between(begin[1], end[1]))

    def _mark_from(self, number: int) -> tuple[float, Mapping[Rail, FlowTally]] | None:
        """Of the first collective from a number on: when it was marked, and what connections had carried."""
        return next(((s, carried) for n, s, carried in self._marks if n >= number), None)

    def since(self, number: int, now_s: float, carried: Mapping[Rail, FlowTally]) -> Traffic | None:
        """What was carried since this collective, or the first one after it that was marked, began; None if none was,
        or connections are others."""
        mark = self._mark_from(number)
        if mark is None or _sessions(mark[1]) != _sessions(carried):
            return None
        began_s, before = mark
        flows = _carried_between(before, carried)
        # If little was under way at the last mark, what follows is a wait for others, and for late acknowledgements.
        _, last_s, last = self._marks[-1]
        late = sum(each.n_bytes - last[rail].n_bytes for rail, each in carried.items() if rail in last)
        is_over = last_s > began_s and late <= LATE * sum(flow.n_bytes for flow in flows.values())
        return Traffic((last_s if is_over else now_s) - began_s, flows)


def _carried_between(before: Mapping[Rail, FlowTally], after: Mapping[Rail, FlowTally]) -> dict[Rail, NicFlow]:
    return {
        rail: NicFlow(now.n_bytes - before[rail].n_bytes, now.busy_s - before[rail].busy_s)
        for rail, now in after.items()
    }


def _sessions(carried: Mapping[Rail, FlowTally]) -> dict[Rail, int]:
    return {rail: each.session for rail, each in carried.items()}


def _busy(flows: Mapping[FlowEnds, NicFlow]) -> set[FlowEnds]:
    """The flows that are busy for clearly longer than the others; none if no others are, or none is busy for long."""
    ends = sorted(flows, key=lambda each: flows[each].busy_s, reverse=True)
    busy_s = [flows[each].busy_s for each in ends]
    gaps = [(one - next_, number) for number, (one, next_) in enumerate(pairwise(busy_s), 1) if one > HOT * busy_s[0]]
    gap_s, count = max(gaps, default=(0.0, 0))
    return set(ends[:count]) if gap_s > GAP * max(busy_s, default=0.0) else set()


def slow_ways(
    flows: Mapping[FlowEnds, NicFlow], seconds: float, known: Mapping[NicWay, float]
) -> dict[NicWay, WayRate] | None:
    """The NICs that carry less than is `known`, bytes/s one way, and what they do, by the flows of some `seconds`; None
    if that is not certain.

    Out of NIC 1 of rank 0 at half, to two others, goes all the time; over the other flows for half of it:

    >>> ends = [(src, nic, dst, nic) for src in range(3) for dst in range(3) for nic in range(2) if src != dst]
    >>> flows = {each: NicFlow(100.0, 8.0 if each[:2] == (0, 1) else 4.0) for each in ends}
    >>> known = {(rank, nic, is_out): 50.0 for rank in range(3) for nic in range(2) for is_out in (True, False)}
    >>> slow_ways(flows, 8.0, known), slow_ways(flows, 12.0, known)
    ({(0, 1, True): WayRate(rate=25.0, n_bytes=200.0, busy_s=8.0)}, None)
    >>> slow_ways(dict.fromkeys(ends, NicFlow(100.0, 4.0)), 4.0, known)
    """
    hot = _busy(flows)
    over: dict[NicWay, list[FlowEnds]] = {}
    for ends in flows:
        over.setdefault((*ends[:2], True), []).append(ends)
        over.setdefault((*ends[2:], False), []).append(ends)
    slow = _fullest(_by_gap(hot, over, len(flows))) or _always_busy(flows, seconds, over)
    rates: dict[NicWay, WayRate] = {}
    for way in slow:
        n_bytes, busy_s = _carried(flows, way)
        rates[way] = WayRate(rate_of(seconds, n_bytes, busy_s), n_bytes, busy_s)
        if busy_s < SURE * seconds or rates[way].rate >= SLOWER * known[way]:
            return None
    return rates or None


def _by_gap(hot: set[FlowEnds], over: Mapping[NicWay, list[FlowEnds]], n_flows: int) -> dict[NicWay, list[FlowEnds]]:
    """The NICs all whose flows are `hot`, one of them for no other NIC's sake; none if more than a few hot ones are of
    no such NIC."""
    suspects = {way: those for way, those in over.items() if len(those) > 1 and hot.issuperset(those)}
    suspected = Counter(chain.from_iterable(suspects.values()))
    # One whose flows all have another suspect at their other ends need not be slow.
    slow = {way: those for way, those in suspects.items() if any(suspected[ends] == 1 for ends in those)}
    # The acknowledgement of the last bytes may be late, again and again: then a flow seems to be busy.
    n_stray = len(hot - set(chain.from_iterable(slow.values())))
    return {} if n_stray > max(1, STRAY * n_flows) else slow


def _fullest(slow: Mapping[NicWay, list[FlowEnds]]) -> dict[NicWay, list[FlowEnds]]:
    """Of NICs that seem to be slow those that are so both ways, if any are: what hosts send, or take in, that wait for
    such a one may seem to be on its way for just as long, as they are late with all that they do."""
    both = {way: those for way, those in slow.items() if (*way[:2], not way[2]) in slow}
    return both or dict(slow)


def _always_busy(
    flows: Mapping[FlowEnds, NicFlow], seconds: float, over: Mapping[NicWay, list[FlowEnds]]
) -> dict[NicWay, list[FlowEnds]]:
    """The one NIC all whose flows, out or in, are busy nearly all the time, however those differ, as they do where its
    rank has begun to send less over it; none if flows that only other NICs have are busy for about as long."""
    always = {
        way: those
        for way, those in over.items()
        if len(those) > 1 and min(flows[ends].busy_s for ends in those) >= SURE_ALL * seconds
    }
    slow = _fullest(always)
    nics = {way[:2] for way in slow}
    others = (flow.busy_s for ends, flow in flows.items() if nics.isdisjoint((ends[:2], ends[2:])))
    most_s = max((flow.busy_s for flow in flows.values()), default=0.0)
    # One that is busy both ways is hardly so for another one's sake.
    others_most = HOT if len(slow) == 1 else 1 - GAP
    return slow if len(nics) == 1 and max(others, default=0.0) <= others_most * most_s else {}


def rate_of(seconds: float, n_bytes: float, busy_s: float) -> float:
    """What a NIC carries one way, bytes/s, that carries so much in about `seconds` and is busy for nearly all of
    them; 0.0 if it is not busy."""
    return n_bytes / (min(seconds, busy_s) + max(0.0, seconds - busy_s) / 2) if busy_s else 0.0


def most(flows: Mapping[FlowEnds, NicFlow], way: NicWay) -> WayRate:
    """What a NIC that is slow carries at most one way: it has carried no less slowly while a flow was busy."""
    n_bytes, busy_s = _carried(flows, way)
    return WayRate(n_bytes / busy_s if busy_s else 0.0, n_bytes, busy_s)


def _carried(flows: Mapping[FlowEnds, NicFlow], way: NicWay) -> tuple[float, float]:
    """What went over a NIC one way, and for how long the flow was busy that was so for longest."""
    those = [flow for ends, flow in flows.items() if (ends[:2] if way[2] else ends[2:]) == way[:2]]
    return sum(flow.n_bytes for flow in those), max((flow.busy_s for flow in those), default=0.0)
