"""Which NICs of a job carry something else than is known: ranks that send to each other in pairs, a few rounds of it.

    first round    half of a group sends to the other half
    second round   and the other way round
    then           each rank that sent or received something else than it should does so with one that did not

In a round a rank either sends or receives, so that its acknowledgements wait behind nothing. A pair over which goes
what should clears both ends. Over another one may go less for the sake of either; so each of its ends meets a cleared
one. If it is as slow with that one as it was with the first, that is its rate.

A *way* is a rank and whether it sends. No I/O, no clock: `optcc.runtime.probe` runs the rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

CHANGED, TWICE, ALIKE = 0.1, 0.08, 0.04
"""Rates that differ by less from what is known are taken to be as known. Of two measurements that differ by less than
the second, with different ranks at the other end, the mean counts. Those that differ by less than the third are alike.
"""

Way = tuple[int, bool]
NicWay = tuple[int, int, bool]
"""A rank, its NIC, and whether it sends."""
Pairs = list[tuple[int, int]]


class Carried(NamedTuple):
    """What went over a NIC, and what should have, bytes/s."""

    rate: float
    should: float

    @property
    def is_known(self) -> bool:
        """Whether it carries about what it should.

        >>> Carried(46.0, 50.0).is_known, Carried(40.0, 50.0).is_known
        (True, False)
        """
        return abs(self.rate - self.should) <= CHANGED * max(self)


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


def later_rounds(group: Sequence[int], cleared: Collection[Way]) -> list[Pairs]:
    """The rounds in which each way of a group that is not `cleared` meets a rank whose other way is. If none is, that
    is the one that was left out before, or in a group of two the other one again.

    >>> later_rounds((0, 1, 2, 3), {(0, True), (2, False), (2, True), (0, False)})
    [[(1, 0), (3, 2)], [(0, 1), (2, 3)]]
    >>> later_rounds((0, 1, 2), []), later_rounds((0, 1), {(0, True), (1, False)})
    ([[(0, 2)], [(1, 2)], [(2, 0)], [(2, 1)]], [[(1, 0)]])
    """
    if len(group) == 2:
        return [[(src, dst)] for src, dst in (group, group[::-1]) if (src, True) not in cleared]
    rounds: list[Pairs] = []
    left_out = group[2 * (len(group) // 2) :]
    for is_out in (True, False):
        left = [rank for rank in group if (rank, is_out) not in cleared]
        partners = [rank for rank in group if (rank, not is_out) in cleared and rank not in left]
        if not partners and left_out:
            partners, left = list(left_out), [rank for rank in left if rank not in left_out]
        while left and partners:
            met = list(zip(left, partners, strict=False))
            rounds.append(met if is_out else [(partner, rank) for rank, partner in met])
            left = left[len(met) :]
    return rounds


def cleared_ways(
    ranks: Collection[int], n_nics: Mapping[int, int], found: Mapping[NicWay, Sequence[Carried]]
) -> set[Way]:
    """The ways that have carried what they should over all NICs.

    >>> sorted(cleared_ways([0, 1], {0: 1, 1: 1}, {(0, 0, True): [Carried(5, 5)], (1, 0, False): [Carried(4, 5)]}))
    [(0, True)]
    """
    return {
        (rank, is_out)
        for rank in ranks
        for is_out in (True, False)
        if all(any(each.is_known for each in found.get((rank, nic, is_out), ())) for nic in range(n_nics[rank]))
    }


def settled_rate(found: Sequence[Carried], known: float) -> float | None:
    """What a NIC carries one way, as measured with one rank and then with a cleared one; None if that is not certain.

    >>> settled_rate([Carried(25, 50), Carried(49, 50)], 50), settled_rate([Carried(25, 50), Carried(24.5, 50)], 50)
    (50, 24.75)
    >>> settled_rate([Carried(25, 50), Carried(40, 50)], 50), settled_rate([Carried(25, 50)], 50)
    (None, None)
    """
    if any(each.is_known for each in found):
        return known
    if len(found) < 2:
        return None
    first, last = found[0].rate, found[-1].rate
    return (first + last) / 2 if last < found[-1].should and abs(first - last) < TWICE * max(first, last) else None
