"""Seeded noise: messages that take longer to arrive, ports that are faster or slower than they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import isfinite

import numpy as np
import numpy.typing as npt

from optcc.errors import InputError
from optcc.faults import SEED_MAX

Floats = npt.NDArray[np.float64]
_LATENCIES, _RATES = 0, 1
_LN_2 = 0.6931471805599453
_TERMS = 14
_GRAIN = 2**24


@dataclass(frozen=True, slots=True)
class Jitter:
    """Message t arrives later by an exponentially distributed time of mean `latency_s`; the rate of port q is
    multiplied, for the whole run, by exp(`rate_sigma` * z) with z from the standard normal distribution, whose median
    is 1. All draws are independent of each other.

    Draw number i of a seed is the same on every machine, whatever is asked for before: the bits are Philox's, keyed by
    the seed, and what is made of them uses only operations that IEEE 754 or decimal arithmetic fix to the last bit.

    Raises InputError for a seed that is none, or a negative or infinite number.
    """

    seed: int
    latency_s: float = 0.0
    rate_sigma: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= SEED_MAX:
            raise InputError(f"seed {self.seed}: must be from 0 to {SEED_MAX}")
        for label, value in (("latency", self.latency_s), ("sigma of rates", self.rate_sigma)):
            if not (isfinite(value) and value >= 0):
                raise InputError(f"jitter: {label} {value}: must not be negative")

    def latencies(self, count: int) -> Floats:
        """What messages 0 to `count` - 1 have beyond the latency, in seconds."""
        bits = np.random.Philox(key=[self.seed, _LATENCIES]).random_raw(count)
        uniform = ((bits >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53
        return minus_ln(uniform) * self.latency_s

    def rates(self, rates: Sequence[Fraction]) -> tuple[Fraction, ...]:
        """`rates` with their noise; a rate of 0 stays 0. Factors are multiples of 2**-24."""
        if self.rate_sigma == 0:
            return tuple(rates)
        sigma = Decimal(self.rate_sigma)
        factors = ((sigma * _normal(self.seed, port)).exp() for port in range(len(rates)))
        return tuple(
            rate * Fraction(max(1, round(factor * _GRAIN)), _GRAIN) for rate, factor in zip(rates, factors, strict=True)
        )


def minus_ln(values: Floats) -> Floats:
    """-ln of numbers above zero, by additions, multiplications and divisions alone: those of the C library differ in
    the last bit from one machine to another.

    >>> [float(each) for each in minus_ln(np.array([1.0, 0.5, 2.0**-53]))]
    [0.0, 0.6931471805599453, 36.7368005696771]
    """
    mantissa, exponent = np.frexp(values)
    low = mantissa < 0.7071067811865476
    mantissa = np.where(low, mantissa * 2.0, mantissa)
    power = (exponent - low).astype(np.float64)
    z = (mantissa - 1.0) / (mantissa + 1.0)  # ln m = 2 artanh z, and |z| < 0.172
    square = z * z
    series = np.zeros_like(z)
    for term in range(_TERMS, -1, -1):
        series = series * square + 1.0 / (2 * term + 1)
    result: Floats = -(power * _LN_2 + 2.0 * z * series)
    return result + 0.0


def _normal(seed: int, port: int) -> Decimal:
    """A draw from the standard normal distribution (polar method): the port's own stream."""
    bits = np.random.Philox(key=[seed, _RATES + port])
    while True:
        a, b = (Decimal(int(bits.random_raw()) >> 11) / 2**52 - 1 for _ in range(2))
        square = a * a + b * b
        if 0 < square < 1:
            return a * (-2 * square.ln() / square).sqrt()
