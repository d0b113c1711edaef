"""Predicted times of schedules from the literature on a topology: exact closed forms, fluid, without latency.

Servers are endpoints with their surviving NICs pooled. Formulas with a straggler are in units of n/B: n bytes through a
healthy endpoint of rate B; the straggler has B/l left, it lost the share X = 1 - 1/l. Where a formula does not apply,
the prediction gives the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from optcc.errors import InputError, TopologyError
from optcc.topology import Topology
from optcc.verify.bounds.closed_forms import TITLES, Bound, allreduce_bound, collective_bound


@dataclass(frozen=True, slots=True)
class Prediction:
    """`seconds` of a schedule, or None and the `reason` why its formula does not apply."""

    schedule: str
    source: str
    seconds: Fraction | None
    reason: str = ""

    def ratio(self, bound: Bound) -> Fraction | None:
        """Its time over the bound; None where either does not exist."""
        return None if self.seconds is None or not bound.seconds else self.seconds / bound.seconds


@dataclass(frozen=True, slots=True)
class Straggler:
    """One endpoint of rate `rate` among others of rate `healthy`; `index` is None where all are equal."""

    n_endpoints: int
    healthy: Fraction
    rate: Fraction
    index: int | None

    @property
    def slowdown(self) -> Fraction:
        """l = B/b, 1 without a straggler."""
        return self.healthy / self.rate

    @property
    def lost(self) -> Fraction:
        """X = 1 - b/B."""
        return 1 - self.rate / self.healthy


def straggler_of(topology: Topology) -> Straggler:
    """The only slow endpoint of a topology of two or more whose others are equal.

    >>> str(straggler_of(Topology.parse("4@50GB/s,3=20GB/s")).slowdown)
    '5/2'

    Raises TopologyError, saying why, if several endpoints are slow, one is faster than the rest, or out and in differ.
    """
    for server in topology.servers:
        if server.out != server.in_:
            raise TopologyError(f"{server.name} sends and receives at different rates")
    rates = topology.out
    # The most common rate is the healthy one; of two equally common ones, the higher.
    healthy = max(Counter(rates).items(), key=lambda each: (each[1], each[0]))[0]
    n_slow = len(rates) - rates.count(healthy)
    if n_slow > 1:
        raise TopologyError(f"{n_slow} endpoints differ from the rest, not one")
    if not n_slow:
        return Straggler(len(rates), healthy, healthy, None)
    rate = next(rate for rate in rates if rate != healthy)
    if rate > healthy:
        raise TopologyError(f"{topology.servers[rates.index(rate)].name} is faster than the rest")
    return Straggler(len(rates), healthy, rate, rates.index(rate))


def ring(topology: Topology, size_bytes: int) -> Fraction:
    """2(p - 1)/p * n / b, b the slowest port of all (Patarasuk and Yuan 2009).

    Reduce-scatter and all-gather have p - 1 steps each, and in every step every port carries n/p bytes; each step
    lasts as long as its slowest port. Without stragglers this is T_ff = 2(p - 1)/p * n/B, and nothing is faster.

    >>> str(ring(Topology.parse("4@50MB/s,3=25MB/s"), 100_000_000))
    '6'
    """
    p = len(topology.servers)
    if p == 1:
        return Fraction(0)
    return Fraction(2 * (p - 1) * size_bytes, p) / min(*topology.out, *topology.in_)


def r2ccl_balance(topology: Topology, size_bytes: int) -> Fraction:
    """The ring again (R2CCL, arXiv 2512.25059): Balance spreads a failed NIC's bytes over the survivors of its server.

    The algorithm is unchanged, so the server that lost the share X limits all: 2(p - 1)/p * n/((1 - X)B).
    """
    return ring(topology, size_bytes)


def r2ccl_allreduce(topology: Topology, size_bytes: int) -> Fraction:
    """max(T1, T2) + T3 with the share Y = X beside the straggler (R2CCL, arXiv 2512.25059).

    A ring over all p carries 1 - Y of the message at the straggler's rate: T1 = 2(p - 1)/p * (1 - Y) l. Meanwhile the
    healthy servers run a second ring on Y in the remaining bandwidth: T2 = 2(p - 2)/(p - 1) * Y/X.
    Then Y is delivered to the straggler: T3 = Y l. With Y = X, T1 = 2(p - 1)/p > T2, so T = 2(p - 1)/p + X l, that is
    1 + p X/(2(p - 1)(1 - X)) times the fault-free ring.

    >>> str(r2ccl_allreduce(Topology.parse("4@50MB/s,3=25MB/s"), 100_000_000))
    '5'

    Raises TopologyError unless there is at most one straggler, and a ring of at least two beside it.
    """
    if len(topology.servers) == 1:
        return Fraction(0)
    s = straggler_of(topology)
    p, lost = s.n_endpoints, s.lost
    if not lost:
        return ring(topology, size_bytes)
    if p < 3:
        raise TopologyError("the healthy endpoints must be at least two")
    beside = lost  # Y
    t1 = Fraction(2 * (p - 1), p) * (1 - beside) * s.slowdown
    t2 = Fraction(2 * (p - 2), p - 1) * beside / lost
    t3 = beside * s.slowdown
    return (max(t1, t2) + t3) * size_bytes / s.healthy


def optcc(topology: Topology, size_bytes: int, segments: int | None = None) -> Fraction:
    """(k + 1)/k * max(l, 2 - 1/(p - 1)) with k segments, its limit without a number of them (OptCC, arXiv 2606.01680).

    The q = p - 1 healthy ranks own a section each. In the reduce-scatter and in the all-gather each of them sends
    (q - 1)/q of the message, and its own section to the straggler: 2 - 1/q in total. The straggler sends and receives
    the message once: l. Half of the segments run the stages 1-2-3-4 and half 3-1-4-2, so that only one segment's worth
    of fill remains: (k + 1)/k.

    >>> str(optcc(Topology.parse("4@50MB/s,3=25MB/s"), 100_000_000))
    '4'

    Raises TopologyError unless there is at most one straggler, InputError unless `segments` is above zero.
    """
    if segments is not None and segments < 1:
        raise InputError(f"{segments} segments: must be at least one")
    if len(topology.servers) == 1:
        return Fraction(0)
    s = straggler_of(topology)
    fluid = max(s.slowdown, 2 - Fraction(1, s.n_endpoints - 1)) * size_bytes / s.healthy
    return fluid if segments is None else fluid * Fraction(segments + 1, segments)


def optimum(topology: Topology, size_bytes: int) -> Fraction:
    """T*, the bound: a mixture of trees attains it in the fluid limit (`optcc.verify.bounds.closed_forms`).

    With one straggler it is `one_straggler_optimum`: at l = 2 an overhead of 1/(p - 1) over the fault-free ring.

    >>> str(optimum(Topology.parse("4@50MB/s,3=40MB/s"), 100_000_000))
    '60/19'
    """
    return allreduce_bound(topology, size_bytes).seconds


def fault_free(topology: Topology, size_bytes: int) -> Fraction:
    """T_ff: the ring if every endpoint had the rate of the fastest.

    >>> str(fault_free(Topology.parse("4@50MB/s,3=25MB/s"), 100_000_000))
    '3'
    """
    return ring(topology.healthy(), size_bytes)


def one_straggler_optimum(n_endpoints: int, slowdown: Fraction) -> Fraction:
    """T* in units of n/B for one straggler: max(l, 2l(p - 1)/(l(p - 1) + 1)).

    The rates add up to B(p - 1 + 1/l), and the straggler alone needs l.

    >>> one_straggler_optimum(8, Fraction(2)) / Fraction(2 * 7, 8) - 1
    Fraction(1, 7)
    """
    p, slow = n_endpoints, slowdown
    return max(slow, 2 * slow * (p - 1) / (slow * (p - 1) + 1))


_Formula = Callable[[Topology, int], Fraction]


def predictions(
    topology: Topology, size_bytes: int, collective: str = "allreduce", root: int = 0, *, segments: int | None = None
) -> tuple[Prediction, ...]:
    """The time of every schedule, or the reason why there is none; with `segments`, OptCC also with that many.

    The ring's formula also covers ReduceScatter and AllGather, each half of its time, if servers own equal shares. The
    other formulas are for AllReduce. The optimum is the bound, where that is known to be tight.

    >>> [(each.schedule, str(each.seconds)) for each in predictions(Topology.parse("4@1B/s,3=1B/s"), 4)]
    ... # doctest: +NORMALIZE_WHITESPACE
    [('ring', '6'), ('r2ccl-balance', '6'), ('r2ccl-allreduce', '6'), ('optcc', '20/3'), ('optimal', '6')]

    Raises what `collective_bound` raises.
    """
    bound = collective_bound(topology, size_bytes, collective, root)
    optcc_paper = "OptCC, arXiv 2606.01680"
    formulas: list[tuple[str, str, _Formula]] = [
        ("ring", "Patarasuk and Yuan 2009", ring),
        ("r2ccl-balance", "R2CCL, arXiv 2512.25059", r2ccl_balance),
        ("r2ccl-allreduce", "R2CCL, arXiv 2512.25059", r2ccl_allreduce),
        ("optcc", optcc_paper, optcc),
    ]
    if segments is not None:
        counted = partial(optcc, segments=segments)
        formulas.append((f"optcc, {segments} segments", optcc_paper, counted))
    found = [_predict(name, source, formula, collective, topology, size_bytes) for name, source, formula in formulas]
    best = Prediction("optimal", "optcc.verify.bounds", bound.seconds)
    if not bound.tight:
        best = Prediction("optimal", "optcc.verify.bounds", None, "the bound is not proved to be reached here")
    return (*found, best)


def _predict(
    name: str, source: str, formula: _Formula, collective: str, topology: Topology, size_bytes: int
) -> Prediction:
    """The formula's value; a refusal becomes the reason."""
    limited = next((each.name for each in topology.servers if each.fabric is not None and each.gpus > 1), None)
    if limited is not None:
        return Prediction(name, source, None, f"the formula has no fabric in it, and {limited} has one of finite rate")
    if collective != "allreduce":
        if formula not in (ring, r2ccl_balance) or collective not in ("reducescatter", "allgather"):
            return Prediction(name, source, None, f"the formula is not for {TITLES[collective]}")
        formula = _half_a_ring
    try:
        return Prediction(name, source, formula(topology, size_bytes))
    except TopologyError as error:
        return Prediction(name, source, None, str(error))


def _half_a_ring(topology: Topology, size_bytes: int) -> Fraction:
    """(p - 1)/p * n / b: one of the two halves."""
    if len({server.gpus for server in topology.servers}) > 1:
        raise TopologyError("servers own unequal shares")
    return ring(topology, size_bytes) / 2
