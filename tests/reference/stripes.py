"""How the chunks of a channel fall on rails of unequal rates, in whole turns (UCX, and the simulated transport)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from optcc.errors import InputError
from optcc.failover import RAILS_MAX
from optcc.runtime.protocol.striping import count_turns, interleave

TURN_TOLERANCE = Fraction(1, 10)
PIECE_BYTES_MIN = 1 << 16
"""A message is not cut into pieces below this only to use more rails."""
_CUT_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Stripes:
    """How the chunks of a channel fall on rails of unequal rates.

    The failover table gives chunk n to its rail n mod R. Its rails are the *turns* here: each stands for a real rail, a
    faster one for more turns, so that R turns in a row come within a tenth of the proportion of the rates; `weights`
    are the relative lengths of the pieces of one message that make it exact.

    >>> Stripes.of([200, 100]).turns
    (0, 1, 0)
    >>> Stripes.of([1, 1, 1]).turns
    (0, 1, 2)
    """

    turns: tuple[int, ...]
    weights: tuple[int, ...]

    @classmethod
    def of(cls, rates: Sequence[int]) -> Stripes:
        """The stripes for rails of these rates; raises InputError for none, too many, or a rate that is not above 0."""
        if not 1 <= len(rates) <= RAILS_MAX:
            raise InputError(f"{len(rates)} rails: must be from 1 to {RAILS_MAX}")
        for rate in rates:
            if rate < 1:
                raise InputError(f"rate {rate} B/s: must be at least 1")
        candidates = [count_turns(rates, n_turns) for n_turns in range(len(rates), RAILS_MAX + 1)]
        counts = next((each for each in candidates if _error(rates, each) <= TURN_TOLERANCE), None)
        if counts is None:
            counts = min(candidates, key=lambda each: _error(rates, each))
        common = lcm(*counts)
        turns = interleave(counts)
        return cls(turns, tuple(rates[rail] * (common // counts[rail]) for rail in turns))

    def cut(self, n_bytes: int, first: int, chunk_bytes: int) -> list[tuple[int, int]]:
        """Where the pieces of a message begin and end, the first of which is chunk `first` of its channel.

        A message of no bytes is one piece. Both ends cut alike, from the length that the plan gives.

        >>> Stripes.of([200, 100]).cut(3 << 20, 0, 1 << 20)
        [(0, 1048576), (1048576, 2097152), (2097152, 3145728)]
        >>> Stripes.of([3, 1]).cut(100, 5, 1 << 20)
        [(0, 100)]
        """
        if n_bytes <= chunk_bytes and n_bytes < PIECE_BYTES_MIN:
            return [(0, n_bytes)]
        n_turns = len(self.turns)
        count = -(-n_bytes // chunk_bytes)
        if len(set(self.turns)) > 1:
            count = max(count, min(n_turns, n_bytes // PIECE_BYTES_MIN))
            if count >= n_turns:
                count = -(-count // n_turns) * n_turns
        count = max(1, count)
        if count % n_turns:
            weights = [1] * count
        else:
            weights = [self.weights[(first + i) % n_turns] for i in range(count)]
        total, so_far, at = sum(weights), 0, 0
        pieces: list[tuple[int, int]] = []
        for weight in weights:
            so_far += weight
            end = n_bytes if so_far == total else n_bytes * so_far // total // _CUT_ALIGNMENT * _CUT_ALIGNMENT
            pieces.append((at, max(at, end)))
            at = pieces[-1][1]
        return pieces


def _error(rates: Sequence[int], counts: Sequence[int]) -> Fraction:
    """The largest relative deviation from the proportion of the rates."""
    total, n_turns = sum(rates), sum(counts)
    return max(abs(Fraction(count * total, rate * n_turns) - 1) for rate, count in zip(rates, counts, strict=True))
