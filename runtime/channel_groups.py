"""Numbers for groups of channels (`Transport.open`)."""

from __future__ import annotations

from heapq import heappop, heappush

PLANS_OF_TEAM_MAX = 1 << 20
"""Groups of one team: those of the team with number n start at n times as many."""


class ChannelGroups:
    """Numbers of groups, each given to one plan at a time, the lowest that is free first; the same at all ranks.

    >>> groups = ChannelGroups(1)
    >>> [groups.take(), groups.take(), groups.give_back(1), groups.lowest]
    [1, 2, None, 1]
    """

    __slots__ = ("_free", "_next", "n_taken")

    def __init__(self, first: int) -> None:
        self._next = first
        # How many were taken so far: numbers the plans of these ranks.
        self.n_taken = 0
        self._free: list[int] = []

    @property
    def lowest(self) -> int:
        """The one that `take` takes."""
        return self._free[0] if self._free else self._next

    def take(self) -> int:
        """The lowest that is free."""
        self.n_taken += 1
        if self._free:
            return heappop(self._free)
        self._next += 1
        return self._next - 1

    def give_back(self, group: int) -> None:
        """Nobody uses this one any more."""
        heappush(self._free, group)
