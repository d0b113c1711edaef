"""Quantiles and means of trials, with their intervals of confidence; exact until the last step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import accumulate

CONFIDENCE = Fraction(95, 100)
"""The confidence level of every interval."""
_NORMAL = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""
MEDIAN, P95 = Fraction(1, 2), Fraction(95, 100)


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate from trials, with its interval of `CONFIDENCE`."""

    value: float
    low: float
    high: float


@cache
def interval_ranks(n: int, share: Fraction) -> tuple[int, int]:
    """Of `n` sorted trials, the two (from 1) between which the quantile `share` lies with `CONFIDENCE`, for any
    distribution: at most half of what is left falls below the one, and above the other, as the binomial distribution
    says. Where there is no such trial it is the first or the last.

    >>> interval_ranks(100, Fraction(1, 2))
    (40, 61)
    """
    tail = (1 - CONFIDENCE) / 2
    p, q = share.numerator, share.denominator - share.numerator
    whole = share.denominator**n
    # P(Binomial <= i), exactly, over the common denominator.
    term, total = q**n, 0
    low, high = 1, n
    for i in range(n):
        total += term
        if total * tail.denominator <= tail.numerator * whole:
            low = i + 1
        if (whole - total) * tail.denominator <= tail.numerator * whole:
            high = i + 1
            break
        term = term * (n - i) * p // ((i + 1) * q)
    return low, high


def quantile(values: Sequence[tuple[Fraction, int]], share: Fraction) -> Estimate:
    """The quantile of sorted (value, how many trials): the least value that `share` of the trials do not exceed."""
    n = sum(count for _, count in values)
    ends = list(accumulate(count for _, count in values))

    def at(rank: int) -> float:
        return float(next(value for (value, _), end in zip(values, ends, strict=True) if rank <= end))

    low, high = interval_ranks(n, share)
    return Estimate(at(math.ceil(share * n)), at(low), at(high))


def mean(values: Sequence[tuple[Fraction, int]]) -> Estimate:
    """The mean of (value, how many trials), with the normal interval; the sums are exact."""
    n = sum(count for _, count in values)
    average = sum((value * count for value, count in values), Fraction(0)) / n
    if n == 1:
        return Estimate(float(average), float(average), float(average))
    variance = sum(((value - average) ** 2 * count for value, count in values), Fraction(0)) / (n - 1)
    half = _NORMAL * math.sqrt(variance / n)
    return Estimate(float(average), float(average) - half, float(average) + half)
