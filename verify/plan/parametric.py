"""Proofs for an interval of straggler slowdowns: makespan(l) <= (1 + eps) * T*(l), with l symbolic.

The ports of one rank have 1/l of the others' rate. All times are in units of n/B, the message over a healthy port.

**The makespan.** The lanes of a plan fix the order of every port, for sends and for receives. With this order (a port
serves one transfer at a time, in order) a transfer starts when its last predecessor has finished, and takes its bytes,
times l if the straggler sends or receives it. So every time is a longest path through a fixed graph, a maximum of terms
a + b*l with a, b >= 0: convex and piecewise linear, with exact fractions as breakpoints. Latency is not modelled.

**The bound.** T*(l) = max(l, 2lq/(lq + 1)) with q = p - 1: concave up to l = 2 - 1/q, where all ports together bind,
and linear above, where the straggler's port binds.

**Three points suffice.** On either side of 2 - 1/q the makespan is convex and (1 + eps) * T* concave or linear, so
their difference is convex, and not above zero in an interval if it is not above zero at its two ends. So the least eps
of an interval is the largest of makespan/T* - 1 at `low`, at 2 - 1/q if it lies between, and at `high`: an exact
fraction.

As a cross-check Z3 is asked in linear real arithmetic, with l unknown: is there an l at which a timetable that is
linear in l violates a wait of the plan or ends too late? Its answer is reported beside the exact one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from optcc.errors import InputError, PlanError, SolverError
from optcc.plan import Plan
from optcc.show import Card, Shown
from optcc.verify.plan.longest_path import longest_paths
from optcc.verify.plan.port_graph import (
    DONE,
    MOMENTS,
    START,
    Chains,
    Durations,
    build_port_graph,
    chain,
    instructions_of,
)
from optcc.verify.smt import Checked, Claim, Limit, Query, Sat, Term, Unknown

TRANSFERS_MAX = 100_000
"""Limit on the transfers of a proof: its paths may be computed in Python."""
LENGTH_MAX = 2**62
"""Lengths of paths below this are computed in 64 bits."""


@dataclass(frozen=True, slots=True)
class AffinePiece:
    """`intercept + slope * l` for l from `low` to `high`."""

    low: Fraction
    high: Fraction
    intercept: Fraction
    slope: Fraction

    def __str__(self) -> str:
        return f"{self.low} <= l <= {self.high}: {self.intercept} + {self.slope} l"


@dataclass(frozen=True, slots=True)
class PiecewiseAffine(Shown):
    """A continuous, piecewise affine function of l.

    >>> one, two, four = Fraction(1), Fraction(2), Fraction(4)
    >>> function = PiecewiseAffine((AffinePiece(one, two, two, 0 * one), AffinePiece(two, four, 0 * one, one)))
    >>> str(function(one)), str(function(four)), function.breakpoints
    ('2', '4', (Fraction(2, 1),))
    """

    pieces: tuple[AffinePiece, ...]

    def __post_init__(self) -> None:
        assert self.pieces
        for left, right in pairwise(self.pieces):
            meet = left.high
            assert meet == right.low
            assert left.intercept + left.slope * meet == right.intercept + right.slope * meet

    @property
    def low(self) -> Fraction:
        """The least l."""
        return self.pieces[0].low

    @property
    def high(self) -> Fraction:
        """The largest l."""
        return self.pieces[-1].high

    @property
    def breakpoints(self) -> tuple[Fraction, ...]:
        """Where one piece ends and the next begins: where other transfers become critical."""
        return tuple(piece.high for piece in self.pieces[:-1])

    def __call__(self, slowdown: Fraction) -> Fraction:
        """The value at l = `slowdown`; raises InputError outside of the interval."""
        for piece in self.pieces:
            if piece.low <= slowdown <= piece.high:
                return piece.intercept + piece.slope * slowdown
        raise InputError(f"l = {slowdown}: must be from {self.low} to {self.high}")

    def card(self) -> Card:
        rows = tuple((str(piece.low), str(piece.high), f"{piece.intercept} + {piece.slope} l") for piece in self.pieces)
        return Card(f"{len(self.pieces)} pieces", ("from l", "to l", "n/B"), rows)


def bound_at(p: int, slowdown: Fraction) -> Fraction:
    """T*(l) of one straggler among p ranks, in units of n/B.

    >>> str(bound_at(4, Fraction(2)))
    '2'
    """
    q = p - 1
    return max(slowdown, 2 * slowdown * q / (slowdown * q + 1))


def bound_breakpoint(p: int) -> Fraction:
    """The l above which the straggler's own port binds: 2 - 1/(p - 1)."""
    return 2 - Fraction(1, p - 1)


class _Network:
    """The waits of a plan under exclusive ports: an edge weighs (bytes at the healthy rate, bytes at the straggler's).

    Its longest paths at a given l = up/down are computed in whole numbers, in units of 1/down.
    """

    def __init__(self, plan: Plan, straggler: int) -> None:
        transfers = plan.transfers
        size = np.where(transfers.src != transfers.dst, transfers.bytes, 0)
        slow = (transfers.src == straggler) | (transfers.dst == straggler)
        carried = np.stack((np.where(slow, 0, size), np.where(slow, size, 0)), axis=1)
        self.total_healthy, self.total_slowed = (sum(each) for each in carried.T.tolist())
        durations = Durations.of(carried, carried, np.zeros_like(carried), "exclusive")
        self.graph = build_port_graph(plan, port_order(plan), durations, "exclusive")

    def times(self, slowdown: Fraction) -> list[Fraction]:
        """When each transfer starts at l (entry 2t) and is done (entry 2t + 1), in bytes over a healthy port."""
        lengths = self._longest(slowdown.denominator, slowdown.numerator)
        kept = (node for start in range(0, len(lengths), MOMENTS) for node in (start + START, start + DONE))
        return [Fraction(lengths[node], slowdown.denominator) for node in kept]

    def waits(self) -> Iterator[tuple[int, int, int, int]]:
        """(before, after, healthy, slowed): entry `after` of `times` is at least so many bytes later than `before`."""
        entry = [(0, 0, 1)[node % MOMENTS] + 2 * (node // MOMENTS) for node in range(len(self.graph.first) - 1)]
        columns = self.graph.before.tolist(), self.graph.after.tolist(), self.graph.weight.tolist()
        for before, after, (healthy, slowed) in zip(*columns, strict=True):
            if entry[before] != entry[after]:  # an exclusive port takes a transfer when it starts
                yield entry[before], entry[after], healthy, slowed

    def longest(self, slowdown: Fraction, *, steepest: bool) -> tuple[int, int]:
        """The longest path at l, as (bytes at healthy rate, bytes at the straggler's). Ties go to the steepest path,
        which is critical just above l, or to the least steep, which is critical just below."""
        up, down = slowdown.numerator, slowdown.denominator
        # The bytes at the straggler's rate are the lower digits of a length: they decide between equal times.
        digits = self.total_slowed + 1
        tie = 1 if steepest else -1
        length = max(self._longest(down * digits, up * digits + tie), default=0)
        time = tie * (tie * length // digits)  # rounded down, or up where the lower digits were subtracted
        slowed = tie * (length - time * digits)
        return (time - slowed * up) // down, slowed

    def _longest(self, healthy: int, slowed: int) -> list[int]:
        """The longest path to each node if a byte weighs `healthy`, or `slowed` at the straggler's rate."""
        is_wide = self.total_healthy * healthy + self.total_slowed * slowed >= LENGTH_MAX
        weight = self.graph.weight.astype(object if is_wide else np.int64)
        weights = weight[:, 0] * healthy + weight[:, 1] * slowed
        lengths: list[int] = longest_paths(self.graph.order, self.graph.first, self.graph.after, weights)[0].tolist()
        return lengths


def port_order(plan: Plan) -> Chains:
    """The transfers of each rank's out port and in port, in the order of the plan's lanes.

    Raises PlanError if a rank sends in several lanes, or receives in several: then the plan fixes no order.
    """
    remote = plan.transfers.src != plan.transfers.dst
    chains = []
    for verb, rank, instruction in zip(
        ("sends", "receives"), (plan.transfers.src, plan.transfers.dst), instructions_of(plan), strict=True
    ):
        lanes = np.unique(plan.instruction_lane[instruction[remote & (instruction >= 0)]])
        first: dict[int, int] = {}
        for lane in lanes.tolist():
            owner = int(plan.lane_rank[lane])
            if first.setdefault(owner, lane) != lane:
                raise PlanError(f"rank {owner} {verb} in lanes {first[owner]} and {lane}: its port has no fixed order")
        chains.append(chain(np.where(remote, rank, -1), instruction))
    out, in_ = chains
    return out, in_


def makespan_of(plan: Plan, straggler: int, low: Fraction, high: Fraction) -> PiecewiseAffine:
    """The makespan of `plan` for every slowdown l of rank `straggler` from `low` to `high`, in units of n/B.

    Raises InputError for an invalid rank or interval, or an empty message; PlanError for a plan whose ports
    have no fixed order.
    """
    _check(plan, straggler, low, high)
    return _envelope(_Network(plan, straggler), plan.size_bytes, low, high)


def _envelope(network: _Network, size: int, low: Fraction, high: Fraction) -> PiecewiseAffine:
    """The upper envelope of all paths: two known pieces meet on it, or a path above their intersection is added."""

    def between(
        left: Fraction, first: tuple[int, int], right: Fraction, last: tuple[int, int]
    ) -> list[tuple[Fraction, tuple[int, int]]]:
        """Where each piece from `first` at `left` to `last` at `right` begins."""
        if first == last:
            return [(left, first)]
        meet = Fraction(first[0] - last[0], last[1] - first[1])
        below, above = network.longest(meet, steepest=False), network.longest(meet, steepest=True)
        if above[0] + above[1] * meet == first[0] + first[1] * meet:
            return [(left, first), (meet, last)]
        after = between(meet, above, right, last)
        return between(left, first, meet, below) + after[above == below :]  # one piece may pass through `meet`

    first = network.longest(low, steepest=True)
    begins = between(low, first, high, network.longest(high, steepest=False)) if low < high else [(low, first)]
    stops = [*(begin for begin, _ in begins[1:]), high]
    return PiecewiseAffine(
        tuple(
            AffinePiece(begin, stop, Fraction(healthy, size), Fraction(slowed, size))
            for (begin, (healthy, slowed)), stop in zip(begins, stops, strict=True)
        )
    )


@dataclass(frozen=True, slots=True)
class IntervalPart:
    """This plan is used from l = `low` to `high`."""

    plan: Plan
    low: Fraction
    high: Fraction


@dataclass(frozen=True, slots=True)
class RatioPoint:
    """A slowdown with the makespan and the bound there, in units of n/B."""

    slowdown: Fraction
    makespan: Fraction
    bound: Fraction

    @property
    def eps(self) -> Fraction:
        """Relative excess over the bound: makespan / bound - 1."""
        return self.makespan / self.bound - 1

    def __str__(self) -> str:
        return f"l = {self.slowdown}: {self.makespan} against {self.bound} ({float(self.eps):+.2%})"


@dataclass(frozen=True, slots=True)
class RatioStudy:
    """The makespan and the bound on an interval; `points` are those that determine `least_eps`.

    `order` says whether one order of the ports holds throughout or each part has its own.
    """

    order: str
    makespans: tuple[PiecewiseAffine, ...]
    bound_breakpoint: Fraction
    points: tuple[RatioPoint, ...]

    @property
    def worst(self) -> RatioPoint:
        """The slowdown with the largest relative excess."""
        return max(self.points, key=lambda point: point.eps)

    @property
    def least_eps(self) -> Fraction:
        """The least eps for which makespan <= (1 + eps) * T* on all of the interval."""
        return self.worst.eps


@dataclass(frozen=True, slots=True)
class RatioProof:
    """makespan(l) <= (1 + eps) * T*(l) for every l of the interval, checked exactly; with z3's answer."""

    eps: Fraction
    study: RatioStudy
    checked: Checked
    solver: Claim | Unknown | None


@dataclass(frozen=True, slots=True)
class Refutation:
    """At `at` the makespan is more than (1 + eps) times the bound; with z3's answer."""

    eps: Fraction
    study: RatioStudy
    at: RatioPoint
    solver: Sat | Unknown | None


def study_ratio(parts: Sequence[IntervalPart], straggler: int) -> RatioStudy:
    """The exact makespan of these plans on consecutive parts of the interval, against the bound.

    Raises InputError for parts that are not consecutive or are for different numbers of ranks, and what
    `makespan_of` raises.
    """
    if not parts:
        raise InputError("no part: must have at least one")
    for left, right in pairwise(parts):
        if left.high != right.low or left.plan.n_ranks != right.plan.n_ranks:
            raise InputError(
                f"parts up to l = {left.high} over {left.plan.n_ranks} ranks, from l = {right.low} over "
                f"{right.plan.n_ranks}: must follow each other"
            )
    p = parts[0].plan.n_ranks
    makespans, points = [], []
    for part in parts:
        makespan = makespan_of(part.plan, straggler, part.low, part.high)
        makespans.append(makespan)
        points += [RatioPoint(at, makespan(at), bound_at(p, at)) for at in _deciding(p, part.low, part.high)]
    order = "one order of the ports throughout" if len(parts) == 1 else f"{len(parts)} orders, one for each part"
    return RatioStudy(order, tuple(makespans), bound_breakpoint(p), tuple(points))


def prove_ratio(
    plan: Plan | Sequence[IntervalPart],
    straggler: int,
    low: Fraction,
    high: Fraction,
    eps: Fraction,
    *,
    solver: Limit | None = None,
) -> RatioProof | Refutation | Unknown:
    """Is the makespan at most (1 + eps) times the bound, for every slowdown of `straggler` from `low` to `high`?

    The order of the ports is one plan's throughout, or that of each part. Decided by exact evaluation at the points
    that suffice; with a limit for `solver`, z3 is asked as well.

    Raises SolverError if z3 contradicts what was checked, and what `study_ratio` raises.
    """
    parts = [IntervalPart(plan, low, high)] if isinstance(plan, Plan) else list(plan)
    if not parts or (parts[0].low, parts[-1].high) != (low, high):
        raise InputError(f"parts must reach from l = {low} to {high}")
    statement = f"makespan <= (1 + {eps}) T* for {low} <= l <= {high}"
    transfers = max(len(part.plan.transfers) for part in parts)
    if transfers > TRANSFERS_MAX:
        return Unknown(statement, f"a plan of {transfers} transfers, more than {TRANSFERS_MAX}")
    study = study_ratio(parts, straggler)
    holds = study.least_eps <= eps
    answer = None if solver is None else ask_ratio(parts, straggler, eps, solver)
    if isinstance(answer, Claim) != holds and isinstance(answer, Claim | Sat):
        raise SolverError(f"z3 says: {answer}: exact evaluation at {study.worst} says otherwise")
    if not holds:
        assert not isinstance(answer, Claim)
        return Refutation(eps, study, study.worst, answer)
    assert not isinstance(answer, Sat)
    how = f"exact at {', '.join(f'l = {point.slowdown}' for point in study.points)}; convex minus concave in between"
    return RatioProof(eps, study, Checked(statement, how), answer)


def best_parts(plans: Sequence[Plan], straggler: int, low: Fraction, high: Fraction) -> tuple[IntervalPart, ...]:
    """The fastest plan for each l: parts that end exactly where another plan becomes faster.

    Raises what `makespan_of` raises, InputError without a plan.
    """
    if not plans:
        raise InputError("no plan: must have at least one")
    functions = [makespan_of(plan, straggler, low, high) for plan in plans]
    cuts = sorted({low, high, *(cut for function in functions for cut in function.breakpoints)})
    meets = set(cuts)
    for left, right in pairwise(cuts):  # every function is linear between cuts
        lines = [(function(left), function(right)) for function in functions]
        for first in range(len(lines)):
            for second in range(first):
                at_left, at_right = (lines[first][end] - lines[second][end] for end in (0, 1))
                if at_left * at_right < 0:
                    meets.add(left + (right - left) * at_left / (at_left - at_right))
    parts: list[IntervalPart] = []
    for left, right in pairwise(sorted(meets)):
        middle = (left + right) / 2
        plan = plans[min(range(len(plans)), key=lambda index: functions[index](middle))]
        if parts and parts[-1].plan is plan:
            left = parts.pop().low
        parts.append(IntervalPart(plan, left, right))
    return tuple(parts) or (IntervalPart(plans[0], low, high),)


# Z3 -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timetable:
    """The times of all nodes at l = `low` and at l = `high`, in bytes over a healthy port; linear in between.

    Entry 2t: transfer t starts; entry 2t + 1: it is done. The plan's times are the least that satisfy all
    waits, so its makespan is at most that of any timetable that does.
    """

    low: Fraction
    high: Fraction
    at_low: tuple[Fraction, ...]
    at_high: tuple[Fraction, ...]


def timetable_of(plan: Plan, straggler: int, low: Fraction, high: Fraction) -> Timetable:
    """The plan's own times at both ends; raises what `makespan_of` raises."""
    _check(plan, straggler, low, high)
    network = _Network(plan, straggler)
    return Timetable(low, high, tuple(network.times(low)), tuple(network.times(high)))


def ratio_query(plan: Plan, straggler: int, timetable: Timetable, eps: Fraction) -> Query:
    """Is there an l at which the timetable violates a wait, or ends too late?

    The only unknown is l; every time is linear in it. The bound is replaced by its chord, which is T* itself where T*
    is linear and below it where it is concave.

    Raises InputError if the bound bends inside the interval: there a chord would lie above it.
    """
    p, size, low, high = plan.n_ranks, plan.size_bytes, timetable.low, timetable.high
    if low < bound_breakpoint(p) < high:
        raise InputError(f"l from {low} to {high}: must end at {bound_breakpoint(p)}, where the bound bends")
    query = Query(
        f"makespan > (1 + {eps}) T* for some l from {low} to {high}",
        f"makespan <= (1 + {eps}) T* for {low} <= l <= {high}",
    )
    slowdown = query.real("l")

    def between(at_low: Fraction, at_high: Fraction) -> Term:
        slope = (at_high - at_low) / (high - low) if high > low else Fraction(0)
        return query.number(at_low - slope * low) + query.number(slope) * slowdown

    def time(node: int) -> Term:
        return between(timetable.at_low[node], timetable.at_high[node])

    network = _Network(plan, straggler)
    n_times = 2 * len(plan.transfers)
    too_early = [time(node) < query.number(0) for node in range(n_times)]
    too_early += [
        time(after) < time(before) + query.number(healthy) + query.number(slowed) * slowdown
        for before, after, healthy, slowed in network.waits()
    ]
    allowed = between((1 + eps) * bound_at(p, low) * size, (1 + eps) * bound_at(p, high) * size)
    too_late = [time(node) > allowed for node in range(1, n_times, 2)]
    query.require("interval", slowdown >= query.number(low), slowdown <= query.number(high))
    query.require("too early or too late", query.any_of((*too_early, *too_late)))
    return query


def ask_ratio(parts: Sequence[IntervalPart], straggler: int, eps: Fraction, limit: Limit) -> Sat | Claim | Unknown:
    """z3's answers for all parts, split where the bound bends, combined: an l that ends too late, or a claim.

    A `Sat` says that the ratio is exceeded at an end of the interval in question: a maximum of linear functions that
    is above a chord somewhere is above it at an end, where timetable and chord are the plan's times and T*.
    """
    low, high = parts[0].low, parts[-1].high
    reached, solver = "", ""
    for part in parts:
        ends = _deciding(part.plan.n_ranks, part.low, part.high)
        for left, right in pairwise(ends if len(ends) > 1 else ends * 2):
            timetable = timetable_of(part.plan, straggler, left, right)
            answer = ratio_query(part.plan, straggler, timetable, eps).ask(limit)
            if isinstance(answer, Unknown):
                return Unknown(answer.statement, answer.reason, reached)
            if isinstance(answer, Sat):
                return answer
            reached, solver = f"claimed up to l = {right}", answer.solver
    return Claim(f"makespan <= (1 + {eps}) T* for {low} <= l <= {high}", solver)


def _deciding(p: int, low: Fraction, high: Fraction) -> list[Fraction]:
    """The ends of the interval, and where the bound bends if that lies between."""
    return sorted({low, high} | ({bound_breakpoint(p)} if low < bound_breakpoint(p) < high else set()))


def _check(plan: Plan, straggler: int, low: Fraction, high: Fraction) -> None:
    if not 0 <= straggler < plan.n_ranks:
        raise InputError(f"straggler {straggler}: must be a rank below {plan.n_ranks}")
    if plan.n_ranks < 2 or plan.size_bytes == 0:
        raise InputError(f"{plan!r}: must have two ranks and a byte, or nothing is sent")
    if not 1 <= low <= high:
        raise InputError(f"l from {low} to {high}: must begin at 1 or above and not end below that")
