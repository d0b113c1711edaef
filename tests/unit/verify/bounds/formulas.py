"""Formulas that the closed forms are compared with."""

from __future__ import annotations

from fractions import Fraction

from optcc.topology import Topology
from optcc.verify.bounds.predictions import one_straggler_optimum, straggler_of


def two_straggler_optimum(n_endpoints: int, slowdown: Fraction) -> Fraction:
    """T* in units of n/B for two equal stragglers: max(l, 2l(p - 1)/(l(p - 2) + 2)).

    The rates add up to B(p - 2 + 2/l). This formula is found elsewhere as a bound for *one* straggler; there it is no
    bound, since `one_straggler_optimum` is below it and is reached.
    """
    p, slow = n_endpoints, slowdown
    return max(slow, 2 * slow * (p - 1) / (slow * (p - 2) + 2))


def ring_share(topology: Topology) -> Fraction:
    """What share of the message the optimum for one straggler puts on the plain ring, the rest on OptCC's four stages.

    While both are needed, that is l <= 2 - 1/(p - 1), the straggler carries T* b/n = lambda + (1 - lambda) 2(p - 1)/p
    with lambda on the four stages: lambda + (1 - lambda) 2/p = 2 - T* b/n. Beyond that the four stages are optimal.

    Raises TopologyError unless there is at most one straggler.
    """
    s = straggler_of(topology)
    p = s.n_endpoints
    if p < 3:
        return Fraction(int(s.index is None))
    carried = one_straggler_optimum(p, s.slowdown) / s.slowdown
    staged = (2 - carried - Fraction(2, p)) / (1 - Fraction(2, p))
    return 1 - staged
