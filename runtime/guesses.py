"""What a NIC carries whose rate comes and goes, found by trying plans for less. No I/O, no clock.

Congestion that is over sooner than a few collectives is known by its average. Plans for that are late half of the time:
while it is there, for the NIC, and else for the others, which carry too much. Plans for the least that the NIC carries
cost little more than ones for all it does, so that is what to plan for. But it cannot be seen: in the time of a run all
NICs look about equally busy. So what runs take over what they should, where nothing else is known to be the cause, says
how much less to plan for; and if that makes runs no quicker, it was wrong.
"""

from __future__ import annotations

from typing import NamedTuple

from optcc.runtime.protocol.agreement import Shares
from optcc.runtime.protocol.rates import LEAST_SHARE

LATE, QUICKER = 0.9, 0.95
"""Runs are late that should take such a part of what they do; plans are better under which they do."""


class Guess(NamedTuple):
    """A NIC may carry such a share of its rate, the same both ways."""

    rank: int
    nic: int
    share: float


class Guesses:
    """What the NIC carries that was found to be slow last.

    >>> guesses, whole = Guesses(), (((1.0, 1.0),), ((1.0, 1.0),))
    >>> mean = ((1.0, 1.0),), ((0.75, 0.75),)
    >>> guesses.take(whole, mean)
    >>> guesses.next(mean, pace=0.8, cost=1.2)
    Guess(rank=1, nic=0, share=0.6)

    Later, where that was in vain:

    >>> guesses.next((((1.0, 1.0),), ((0.6, 0.6),)), pace=0.8, cost=1.2), guesses.next(mean, pace=0.8, cost=1.2)
    (Guess(rank=1, nic=0, share=0.75), None)
    """

    def __init__(self) -> None:
        # The NIC; what it was said to carry before the last guess, and what runs cost then.
        self._nic: tuple[int, int] | None = None
        self._before: tuple[float, float] | None = None

    @property
    def has_seen(self) -> bool:
        """Whether a NIC was slow before."""
        return self._nic is not None

    def take(self, known: Shares, shares: Shares) -> None:
        """What the NICs were known to carry, and what is known now."""
        slower = [
            (rank, nic)
            for rank, both in enumerate(zip(known, shares, strict=True))
            for nic, (old, new) in enumerate(zip(*both, strict=True))
            if 0 < min(new) < min(old)
        ]
        if len(slower) == 1 and slower[0] != self._nic:
            self._nic, self._before = slower[0], None

    def next(self, known: Shares, pace: float, cost: float) -> Guess | None:
        """What to plan for, if anything, where runs that should take `pace` take 1, in all `cost` times the least."""
        if self._nic is None or pace > LATE:
            return None
        rank, nic = self._nic
        out, in_ = known[rank][nic]
        if self._before is not None and cost > QUICKER * self._before[1]:
            (share, _), self._nic, self._before = self._before, None, None
            return Guess(rank, nic, share)
        # Where it was measured while its rate changed, it need not carry more the other way.
        share = pace * out if out == in_ else min(out, in_)
        if share < LEAST_SHARE:
            return None
        self._before = max(out, in_), cost
        return Guess(rank, nic, round(share, 3))
