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

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from optcc.errors import InputError, PlanError, SolverError
from optcc.plan import RECEIVES, SENDS, Plan
from optcc.show import Card, Shown
from optcc.simulate import DONE_DONE, plan_constraints
from optcc.verify.plan.topological_order import pack_edges, topological_order
from optcc.verify.smt import Checked, Claim, Limit, Query, Sat, Term, Unknown

TRANSFERS_MAX = 100_000
"""Limit on the transfers of a proof: its paths are computed in Python."""


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


@dataclass(frozen=True, slots=True)
class _Wait:
    """Node `after` is at least `healthy + slowed * l` later than node `before`."""

    before: int
    after: int
    healthy: int
    slowed: int


class _Network:
    """Node 2t: transfer t starts; node 2t + 1: it is done. The waits between nodes, and a topological order."""

    def __init__(self, plan: Plan, straggler: int) -> None:
        self.plan = plan
        transfers = plan.transfers
        slow = ((transfers.src == straggler) | (transfers.dst == straggler)).tolist()
        crosses = (transfers.src != transfers.dst).tolist()
        size = transfers.bytes.tolist()
        self.healthy = [size[t] if crosses[t] and not slow[t] else 0 for t in range(len(transfers))]
        self.slowed = [size[t] if crosses[t] and slow[t] else 0 for t in range(len(transfers))]
        self.waits = [self._after_sending(t, 2 * t + 1) for t in range(len(transfers))]
        edges = plan_constraints(plan)
        for before, after, kind in zip(edges.before.tolist(), edges.after.tolist(), edges.kind.tolist(), strict=True):
            gate = 2 * after + (1 if kind >= DONE_DONE else 0)
            sent_is_enough = kind & 1
            self.waits.append(
                self._after_sending(before, gate) if sent_is_enough else _Wait(2 * before + 1, gate, 0, 0)
            )
        for before, after in port_order(plan):
            self.waits.append(self._after_sending(before, 2 * after))
        self.into: list[list[_Wait]] = [[] for _ in range(2 * len(transfers))]
        for wait in self.waits:
            self.into[wait.after].append(wait)
        self.order = self._topological()

    def _after_sending(self, transfer: int, gate: int) -> _Wait:
        return _Wait(2 * transfer, gate, self.healthy[transfer], self.slowed[transfer])

    def _topological(self) -> list[int]:
        ends = np.array([(wait.before, wait.after) for wait in self.waits], dtype=np.int64).reshape(-1, 2)
        order: list[int] = topological_order(*pack_edges(len(self.into), ends[:, 0], ends[:, 1])).tolist()
        if len(order) < len(self.into):
            stuck = min(set(range(len(self.into))).difference(order)) // 2
            raise PlanError(f"{self.plan.transfers.describe(stuck)}: waits for itself once its ports keep their order")
        return order

    def times(self, slowdown: Fraction) -> list[Fraction]:
        """The earliest time of each node at l, in bytes over a healthy port."""
        times = [Fraction(0)] * len(self.into)
        for node in self.order:
            for wait in self.into[node]:
                times[node] = max(times[node], times[wait.before] + wait.healthy + wait.slowed * slowdown)
        return times

    def longest(self, slowdown: Fraction, *, steepest: bool) -> tuple[int, int]:
        """The longest path at l, as (bytes at healthy rate, bytes at the straggler's). Ties go to the steepest path,
        which is critical just above l, or to the least steep, which is critical just below."""
        up, down = slowdown.numerator, slowdown.denominator
        tie = 1 if steepest else -1
        best: list[tuple[int, int, int]] = [(0, 0, 0)] * len(self.into)  # (time * down, tie * slowed bytes, healthy)
        for node in self.order:
            reached = best[node]
            for wait in self.into[node]:
                time, slowed, healthy = best[wait.before]
                candidate = (
                    time + wait.healthy * down + wait.slowed * up,
                    slowed + tie * wait.slowed,
                    healthy + wait.healthy,
                )
                reached = max(reached, candidate)
            best[node] = reached
        _, slowed, healthy = max(best, default=(0, 0, 0))
        return healthy, tie * slowed


def port_order(plan: Plan) -> list[tuple[int, int]]:
    """Pairs of consecutive transfers of each port, in the order of the plan's lanes.

    Raises PlanError if a rank sends in several lanes, or receives in several: then the plan fixes no order.
    """
    pairs: list[tuple[int, int]] = []
    for verb, kinds, owner in (("sends", SENDS, plan.send_transfer), ("receives", RECEIVES, plan.recv_transfer)):
        owned = owner.tolist()
        kind = plan.kind.tolist()
        lane_of: dict[int, int] = {}
        for lane, (rank, instructions) in enumerate(zip(plan.lane_rank.tolist(), plan.lanes, strict=True)):
            here = [owned[i] for i in instructions if kind[i] in kinds]
            if here and lane_of.setdefault(rank, lane) != lane:
                raise PlanError(f"rank {rank} {verb} in lanes {lane_of[rank]} and {lane}: its port has no fixed order")
            pairs += pairwise(here)
    return pairs


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
    too_early = [time(node) < query.number(0) for node in range(len(network.into))]
    too_early += [
        time(wait.after) < time(wait.before) + query.number(wait.healthy) + query.number(wait.slowed) * slowdown
        for wait in network.waits
    ]
    allowed = between((1 + eps) * bound_at(p, low) * size, (1 + eps) * bound_at(p, high) * size)
    too_late = [time(node) > allowed for node in range(1, len(network.into), 2)]
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
