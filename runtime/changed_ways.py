"""Which NICs of a job carry something else than is known: ranks that send to each other in pairs, a few rounds of it.

    first round    half of a group sends to the other half
    second round   and the other way round
    then           each rank that sent or received something else than it should does so with one that did not

In a round a rank either sends or receives, so that its acknowledgements wait behind nothing. A pair over which goes
what should clears both ends. Over another one may go less for the sake of either; so each of its ends meets a cleared
one. If it is as slow with that one as it was with the first, that is its rate; else it meets one again, as a processor
that is busy elsewhere makes any NIC look slow.

A *way* is a rank and whether it sends. No I/O, no clock: `optcc.runtime.probe` runs the rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

from optcc.runtime.protocol.agreement import is_change

TWICE, ALIKE = 0.08, 0.04
"""Of two measurements that differ by less than the first, with different ranks at the other end, the mean counts. Those
that differ by less than the second are alike. Rates for which plans do not change (`is_change`) are as known.
"""

Way = tuple[int, bool]
Pairs = list[tuple[int, int]]


class PairFlow(NamedTuple):
    """What went over a NIC, and what should have, bytes/s."""

    rate: float
    should: float


def are_alike(rate: float, other: float) -> bool:
    """Whether two measurements say the same."""
    return (1 - ALIKE) * rate < other < (1 + ALIKE) * rate


def first_rounds(group: Sequence[int]) -> tuple[Pairs, Pairs]:
    """Who sends to whom in the first two rounds; of an odd number of ranks one is left out.

    >>> first_rounds((0, 1, 2, 3, 4))
    ([(0, 2), (1, 3)], [(2, 0), (3, 1)])
    """
    half = len(group) // 2
    pairs = list(zip(group[:half], group[half : 2 * half], strict=True))
    return pairs, [(dst, src) for src, dst in pairs]


def later_rounds(group: Sequence[int], open_: Collection[Way], cleared: Collection[Way]) -> list[Pairs]:
    """The rounds in which each way of a group that is still `open_` meets a rank whose other way is cleared. If none
    is, that is the one that was left out before, or in a group of two the other one again.

    >>> cleared = {(0, True), (2, False), (2, True), (0, False)}
    >>> later_rounds((0, 1, 2, 3), [(1, True), (3, True), (1, False)], cleared)
    [[(1, 0), (3, 2)], [(0, 1)]]
    >>> later_rounds((0, 1, 2), [(0, True), (1, False)], []), later_rounds((0, 1), [(1, True), (0, False)], [])
    ([[(0, 2)], [(2, 1)]], [[(1, 0)]])
    """
    if len(group) == 2:
        return [[(src, dst)] for src, dst in (group, group[::-1]) if {(src, True), (dst, False)} & set(open_)]
    rounds: list[Pairs] = []
    left_out = group[2 * (len(group) // 2) :]
    for is_out in (True, False):
        left = [rank for rank in group if (rank, is_out) in open_]
        partners = [rank for rank in group if (rank, not is_out) in cleared and rank not in left]
        if not partners and left_out:
            partners, left = list(left_out), [rank for rank in left if rank not in left_out]
        while left and partners:
            met = list(zip(left, partners, strict=False))
            rounds.append(met if is_out else [(partner, rank) for rank, partner in met])
            left = left[len(met) :]
    return rounds


def settled_rate(found: Sequence[PairFlow], known: float) -> float | None:
    """What a NIC carries one way, as measured with one rank and then with others; None if that is not certain.

    >>> settled_rate([PairFlow(25, 50), PairFlow(49, 50)], 50), settled_rate([PairFlow(25, 50), PairFlow(24.5, 50)], 50)
    (50, 24.75)
    >>> settled_rate([PairFlow(25, 50), PairFlow(40, 50)], 50), settled_rate([PairFlow(25, 50)], 50)
    (None, None)
    >>> settled_rate([PairFlow(49, 25), PairFlow(50, 25)], 25), settled_rate([PairFlow(50, 25)], 50)
    (49.5, 50)
    """
    if not all(is_change(each.rate, each.should) and is_change(each.rate, known) for each in found):
        return known
    slower = [each.rate for each in found if 0 < each.rate < each.should]
    faster = [each.rate for each in found if each.rate > known]
    rates = sorted(slower if len(slower) >= len(faster) else faster)
    low, high = min(pairwise(rates), key=lambda pair: pair[1] - pair[0], default=(0.0, 1.0))
    return (low + high) / 2 if high - low < TWICE * high else None
