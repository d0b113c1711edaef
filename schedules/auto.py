"""`auto`: chooses a schedule of the library and its number of segments for a topology and a message size.

Every candidate gets a cheap alpha-beta estimate (latency and bandwidth). The most promising ones are compiled and
simulated within a time budget, and the fastest is chosen; each simulated time corrects the estimates of the same
schedule. Small messages need few steps, large ones need every port busy. Ranks wait while a plan is made, so planning
time is budgeted by a cost model (`COSTS`): 20 ms for 8 ranks, 0.4 s for 64 of which 0.17 s to choose, or the duration
of the message if that is longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, log, log2, sqrt
from typing import NamedTuple

import numpy as np

from optcc.compiler import (
    ROW_LANES,
    SLOTS,
    STAGE_LANES,
    compile_schedule,
    costed_s,
    find_transfers,
    with_some_latency,
)
from optcc.dsl import Definition
from optcc.errors import TopologyError
from optcc.passes.lane_assignment import ALL_PAIRS_MAX
from optcc.plan import Plan
from optcc.schedule import Schedule
from optcc.schedules.fair_optimum import RankShare, divide
from optcc.schedules.optimal import degree_for
from optcc.schedules.registry import SCHEDULES
from optcc.show import Card, Shown
from optcc.simulate import simulate
from optcc.timing import Model, with_overhead
from optcc.topology import Nic, Topology
from optcc.transfers import Transfers
from optcc.units import show_time

CHUNK_BYTES_MIN = 512
IN_FLIGHT_MIN = 16
"""Segments in flight at once that share a latency: at least this many, or two per slot of a receiver."""
TRIES_MAX = 16
"""Limit on the candidates that are compiled."""
VAIN_TRIES, VAIN_GAIN = 5, 0.002
"""After so many tries in a row that together gained less than this share, no other is made."""
TRANSFERS_MAX = 2**20
"""Limit on the transfers of a plan, for any time budget."""
PER_NAME = 5
"""Limit on the untried candidates of one schedule in the list."""
WORTH_A_TRY, WORTH_ANOTHER = 1.25, 1.1
"""Error factors of an estimate, before and after the same schedule was tried with other segments: a candidate is tried
if it may be faster than the best within this error."""
GOOD_ENOUGH = 1.005
"""No other candidate is tried after one that takes at most so many times the bound."""
STEPS_COST = 0.001
"""Share of its time that a ring loses under fair ports to steps that wait for one another, where `direct` has two."""
EVEN_HOSTS, UNEVEN_MORE = 4, 4
UNEVEN = {"direct": 0.04, "shares": 0.04, "rank-order": 0.04, "rabenseifner": 0.01}
"""Share of its time that a schedule among equal hosts loses over real ports for each of the first `UNEVEN_MORE` hosts
above `EVEN_HOSTS`, as TCP divides NICs unevenly among many or changing connections. Measured as `optcc fabric run` runs
`optcc bench --schedule` on `6x2@200Mbit/s` and `8x2@100Mbit/s`, as time over the bound: `direct` took 1.00 to 1.01 with
four hosts, 1.02 to 1.05 with six, and up to 1.33 with eight, `rabenseifner` 1.03 to 1.05 with eight; a ring 1.01 at
most."""
SAME_WAYS = 0.08
"""Measured rates out and in of a server that differ by a smaller share are taken to be equal. Parts of a message that
follow small differences are small and many: with eight hosts of which one seemed to receive 4 % less than it sends,
plans took 1.23 of the bound where 1.03 was predicted, and 1.03 without."""
FEW_RANKS, FEW_RANKS_S = 8, 20e-3
"""Planning budget, choosing and verifying, for up to this many ranks."""
PER_RANK_S, MORE_RANKS_S, PER_RANK_S_MIN = 16e-3, 0.4, 6e-3
"""Planning budget for more ranks: `PER_RANK_S` per rank up to `MORE_RANKS_S`, and at least `PER_RANK_S_MIN` per
rank."""
CHOOSING_S = 0.17
"""Budget for choosing, or half of the planning budget if that is more."""
SPENT = 0.97
"""Share of the budget that is planned for."""
FAIR_PAIRS = {
    (0, 3): (((1.0, 0.0), 0.5), ((0.9, 0.7), 0.37)),
    (0, 2): (((1.0, 0.0), 0.5), ((0.9, 0.7), 0.47)),
    (3, 2): (((2.0, 0.0), 0.38), ((1.6, 1.9), 0.20)),
    (4, 2): (((2.0, 0.0), 0.27), ((2.3, 3.0), 0.18)),
}
"""Those of the compiler's `PEER_LANES` of which one is always near the best, with the parameters of the estimate of
`shares`, for equal and for different out and in rates: fill time a/(k + b) of the bound with k segments, for each (a,
b), and latencies per message of the busiest pair where latency dominates. Fitted to simulations of 2 to 16 ranks."""
DRIFT, DRIFTS_FROM = 0.03, 12
"""Loss as a share of the bound with one lane per pair and different rates, from this number of segments on."""
SHARES, RANK_ORDER = OF_STARS = ("shares", "rank-order")
"""Those that divide the message among the centres of stars."""
ROWS_RATES = 48
"""Simulation cost of rows of servers, as an equivalent number of different rates."""
ROWS_FILL = 30
"""Segments that fill the pipeline of rows, which `shares` uses for many servers."""


class Cost(NamedTuple):
    """CPU seconds of a planning step: fixed, per transfer, and per transfer and rank. For `simulate` with fair ports,
    per transfer and different rate, as simultaneous ends are one event."""

    fixed_s: float
    transfer_s: float
    many_s: float

    def of(self, transfers: int, many: int) -> float:
        """CPU seconds for this many transfers, and ranks or rates."""
        return self.fixed_s + transfers * (self.transfer_s + many * self.many_s)


class Costs(NamedTuple):
    """Planning cost for one port model."""

    compile: Cost
    simulate: Cost
    verify: Cost


COSTS: dict[Model, Costs] = {
    "fifo": Costs(Cost(1.0e-3, 1.9e-6, 38e-9), Cost(0.3e-3, 0.35e-6, 0.6e-9), Cost(0.6e-3, 1.1e-6, 2e-9)),
    "exclusive": Costs(Cost(0.7e-3, 1.4e-6, 3e-9), Cost(0.3e-3, 0.35e-6, 0.6e-9), Cost(0.6e-3, 1.1e-6, 2e-9)),
    "fair": Costs(Cost(0.6e-3, 0.7e-6, 8e-9), Cost(0.3e-3, 0.4e-6, 120e-9), Cost(0.6e-3, 0.9e-6, 2e-9)),
}
"""Measured for 8 to 1024 ranks, one straggler and random rates, as the least CPU time of several runs on one core of a
virtual machine; other machines differ by a common factor."""
START_S = 1e-3
"""CPU seconds of the estimates."""
BUILD_S, STATEMENT_S = 0.3e-3, 5e-6
"""CPU seconds to build a schedule: fixed, and per transfer written as a statement of its own."""
WHOLE_STATEMENT_S, KNOWN_TRANSFER_S = {"shares": 9e-6, "optimal": 18e-6, "ring": 18e-6, "direct": 18e-6}, 0.25e-6
"""CPU seconds per statement that is a whole tree or step of all ranks, and per transfer of it."""


def planning_limit_s(ranks: int, message_s: float) -> float:
    """The planning budget for a message that takes `message_s`."""
    if ranks <= FEW_RANKS:
        return max(FEW_RANKS_S, message_s)
    return max(min(PER_RANK_S * ranks, MORE_RANKS_S), PER_RANK_S_MIN * ranks, message_s)


def transfers_max(ranks: int, limit_s: float, ports: Model) -> int:
    """The most transfers of a plan that can be compiled and verified within `limit_s`."""
    each_s = [cost.of(1, ranks) - cost.fixed_s for cost in (COSTS[ports].compile, COSTS[ports].verify)]
    return min(TRANSFERS_MAX, int(limit_s / (KNOWN_TRANSFER_S + sum(each_s))))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule with a number of segments, its alpha-beta estimate and, once tried, its simulated time; both with
    what messages cost, and what `UNEVEN` says, where hosts were measured.

    `transfers` estimates the transfers of its plan; `peer_lanes` is that of the compiler, for fair ports.
    """

    name: str
    segments: int
    estimate_s: float
    transfers: int = 0
    peer_lanes: tuple[int, int] | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Choice(Shown):
    """The chosen plan, and the candidates that it was compared with, the most promising first.

    They were simulated with `latency_s`, which is the topology's own unless it has none.
    """

    plan: Plan
    schedule: Schedule
    taken: Candidate
    candidates: tuple[Candidate, ...]
    latency_s: Fraction

    def card(self) -> Card:
        fair = any(each.peer_lanes is not None for each in self.candidates)
        rows = tuple(
            (
                each.name,
                str(each.segments),
                *((_lanes(each),) if fair else ()),
                show_time(each.estimate_s),
                show_time(each.seconds) if each.seconds is not None else "-",
                "taken" if each == self.taken else "",
            )
            for each in self.candidates
        )
        lanes = ("lanes of a pair",) if fair else ()
        title = f"auto: {self.taken.name}, of plans with a latency of {show_time(float(self.latency_s))}"
        return Card(title, ("schedule", "segments", *lanes, "estimate", "simulated", ""), rows)


def _lanes(candidate: Candidate) -> str:
    if candidate.peer_lanes is None:
        return "-"
    lanes, slots = candidate.peer_lanes
    return f"{max(1, lanes)} of {slots} slots"


def choose(
    topology: Topology,
    size_bytes: int,
    *,
    dtype: str = "float32",
    reduction: str = "sum",
    slots: int | None = None,
    ports: Model = "exclusive",
    parts: Sequence[RankShare] = (),
    in_rank_order: bool = False,
) -> Choice:
    """The fastest plan found for an AllReduce of `size_bytes`; a topology without latency is taken to have what
    `optcc.compiler.with_some_latency` says. With `parts`, those of the schedule `shares`, other long messages than its
    are no candidates. With `in_rank_order` those of the schedule `rank-order` are the only ones.

    Raises what compiling a schedule raises, and TopologyError for a topology that `optimal` does not accept.
    """
    timed = with_some_latency(topology)
    if ports == "fair" and topology.overhead_s and not parts:
        timed = _level_ways(timed)
    found = estimates(timed, size_bytes, slots or SLOTS[ports], ports, parts, in_rank_order=in_rank_order)
    uneven = _uneven_hosts(timed)
    ranking = sorted((_costed(each, timed, uneven) for each in found), key=lambda each: each.estimate_s)
    if slots is not None:  # candidates that differ by their slots alone are one
        ranking = list(
            {(each.name, each.segments, (each.peer_lanes or (0,))[0]): each for each in ranking[::-1]}.values()
        )
        ranking.reverse()
    bound_s = pooled_bound_s(timed, size_bytes)
    search = Search(timed, ports, ranking, planning_limit_s(timed.n_ranks, bound_s), GOOD_ENOUGH * bound_s)
    best: tuple[float, Plan, Schedule, Candidate] | None = None
    built: dict[tuple[str, int], tuple[Schedule, Transfers]] = {}
    while (candidate := search.next()) is not None:
        key = candidate.name, candidate.segments
        if key not in built:
            schedule = _build(candidate, timed, ports, parts)
            built[key] = schedule, find_transfers(schedule, size_bytes, dtype, reduction)
        schedule, transfers = built[key]
        plan = compile_schedule(
            schedule,
            transfers=transfers,
            size_bytes=size_bytes,
            dtype=dtype,
            reduction=reduction,
            topology=timed,
            slots=slots,
            ports=ports,
            peer_lanes=candidate.peer_lanes,
        )
        if search.is_last(candidate):
            return Choice(plan, schedule, candidate, search.listed(), timed.latency_s)
        seconds = costed_s(plan, simulate(plan, timed, model=ports).seconds, timed)
        seconds *= _slowdown(candidate, uneven)
        search.took(candidate, seconds)
        if best is None or seconds < best[0]:
            best = seconds, plan, schedule, replace(candidate, seconds=seconds)
    assert best is not None
    return Choice(*best[1:], search.listed(), timed.latency_s)


def _definition(name: str, ports: Model) -> Definition:
    """The schedule to build: for fair ports `optimal` itself, as `shares` is a candidate of its own there."""
    return SCHEDULES[name] if ports == "fair" else SCHEDULES[name].under(ports)


def _level_ways(topology: Topology) -> Topology:
    """Where every server sends and receives at nearly one rate, as measured: the topology with their means.

    >>> _level_ways(Topology.parse("3@98MB/s,2=102MB/s:98MB/s"))
    Topology('3@98MB/s,2=100MB/s')
    """
    rates = list(zip(topology.out, topology.in_, strict=True))
    if topology.out == topology.in_ or any(min(pair) < (1 - SAME_WAYS) * max(pair) for pair in rates):
        return topology
    means = [(out + in_) / 2 for out, in_ in rates]
    nics = [(Nic(0, mean, mean),) for mean in means]
    servers = (replace(server, nics=own) for server, own in zip(topology.servers, nics, strict=True))
    return replace(topology, servers=tuple(servers), rail_only=False, text="")


def _build(candidate: Candidate, topology: Topology, ports: Model, parts: Sequence[RankShare]) -> Schedule:
    """The schedule of a candidate; one of stars has these `parts`, if there are any."""
    definition = _definition(candidate.name, ports)
    if not parts or candidate.name not in OF_STARS:
        return definition.build(topology, candidate.segments)
    return definition(topology.n_ranks, candidate.segments, parts=parts, **definition.configure(topology))


def _costed(candidate: Candidate, topology: Topology, uneven: int) -> Candidate:
    """The candidate, its estimate with what the messages of a rank cost its processor, and for so many `uneven`
    hosts."""
    if not topology.overhead_s:
        return candidate
    messages = 2 * candidate.transfers / topology.n_ranks
    seconds = with_overhead(candidate.estimate_s, messages, topology.overhead_s)
    return replace(candidate, estimate_s=seconds * _slowdown(candidate, uneven))


def _slowdown(candidate: Candidate, uneven: int) -> float:
    """By what factor a candidate takes longer over real ports, with so many `uneven` hosts; see `UNEVEN`."""
    return 1 + uneven * UNEVEN.get(candidate.name, 0.0)


def _uneven_hosts(topology: Topology) -> int:
    """The hosts for which `UNEVEN` counts: those of a cluster that was measured, and whose hosts are equal."""
    if not topology.overhead_s or len({*topology.out, *topology.in_}) > 1:
        return 0
    return min(max(0, topology.n_ranks - EVEN_HOSTS), UNEVEN_MORE)


def pooled_bound_s(topology: Topology, size_bytes: float) -> float:
    """A lower bound in seconds, of servers that pool their NICs on one core: the slowest port carries the message once,
    all ports together carry it 2(p - 1) times."""
    out, in_ = [float(rate) for rate in topology.out], [float(rate) for rate in topology.in_]
    if len(out) == 1:
        return 0.0
    share = 2 * (len(out) - 1)
    return size_bytes * max(1 / min(*out, *in_), share / sum(out), share / sum(in_))


class Search:
    """Selects the candidates to try within `limit_s` of planning; `ranking` is sorted by estimate. One that takes
    `enough_s` is the last one.

    The ratio of simulated time to estimate corrects the estimates of the same schedule. Time is accounted by `COSTS`
    and not by a clock, so that all ranks choose alike.
    """

    def __init__(
        self, topology: Topology, ports: Model, ranking: Sequence[Candidate], limit_s: float, enough_s: float = 0.0
    ) -> None:
        self._ports, self._ranks = ports, topology.n_ranks
        self._rates = self._ranks
        if ports == "fair" and len(topology.servers) > ALL_PAIRS_MAX:
            self._rates = ROWS_RATES
        elif ports == "fair" and topology.out == topology.in_:
            self._rates = len(set(topology.out))
        self._enough_s = enough_s
        self._limit_s, self._choosing_s = SPENT * limit_s, SPENT * max(CHOOSING_S, limit_s / 2)
        self._spent_s, self._verify_s = START_S, 0.0
        self._ranking = ranking
        self._tried: dict[Candidate, float] = {}
        self._untried = [each for each in ranking if self._fits(each, self._compile_s(each))]
        self._untried = self._untried or [min(ranking, key=lambda each: each.transfers)]

    def next(self) -> Candidate | None:
        """The next candidate to compile; None if no other is promising or within budget."""
        if self._tried and min(self._tried.values()) <= self._enough_s:
            return None
        if self._tried:
            self._untried = [each for each in self._untried if self._fits(each, self._try_s(each))]
        if not self._untried or len(self._tried) == TRIES_MAX or self._is_vain():
            return None
        found = min(self._untried, key=self._promises_s)
        if self._tried and self._promises_s(found) > min(self._tried.values()):
            return None
        self._untried.remove(found)
        return found

    def is_last(self, candidate: Candidate) -> bool:
        """True if the budget allows no other candidate beside this first one, so it need not be simulated."""
        both_s = self._try_s(candidate)
        return not self._tried and not any(
            self._fits(larger, both_s + self._try_s(each))
            for each in self._untried
            for larger in [max(candidate, each, key=lambda one: one.transfers)]
        )

    def _is_vain(self) -> bool:
        """Whether the last tries have gained next to nothing."""
        tried = list(self._tried.values())
        before = tried[:-VAIN_TRIES]
        return bool(before) and min(tried) > (1 - VAIN_GAIN) * min(before)

    def took(self, candidate: Candidate, seconds: float) -> None:
        """Records the simulated time of a candidate."""
        self._spent_s += self._try_s(candidate)
        self._verify_s = max(self._verify_s, self._verifying_s(candidate))
        self._tried[candidate] = seconds

    def listed(self) -> tuple[Candidate, ...]:
        """The tried candidates, then the most promising others, at most `PER_NAME` per schedule."""
        count = Counter[str]()
        others = []
        for each in self._ranking:
            count[each.name] += 1
            if count[each.name] <= PER_NAME and each not in self._tried:
                others.append(each)
        return (*(replace(each, seconds=seconds) for each, seconds in self._tried.items()), *others)

    def _promises_s(self, candidate: Candidate) -> float:
        """An optimistic time: the estimate, corrected by the nearest try of the same schedule (for those of stars, with
        the same lanes), divided by its error factor."""
        alike = [each for each in self._tried if each.name == candidate.name]
        same = [each for each in alike if each.peer_lanes == candidate.peer_lanes or each.name not in OF_STARS]
        if same:
            nearest = min(same, key=lambda each: float(abs(log(each.segments / candidate.segments))))
            return candidate.estimate_s * self._tried[nearest] / nearest.estimate_s / WORTH_ANOTHER
        over = min((self._tried[each] / each.estimate_s for each in alike), default=1.0)
        return candidate.estimate_s * sqrt(over) / WORTH_A_TRY

    def _fits(self, candidate: Candidate, more_s: float) -> bool:
        """True if the budget covers `more_s` of choosing and then verifying any tried plan or `candidate`."""
        choose_s = self._spent_s + more_s
        verify_s = max(self._verify_s, self._verifying_s(candidate))
        return choose_s <= self._choosing_s and choose_s + verify_s <= self._limit_s

    def _compile_s(self, candidate: Candidate) -> float:
        """CPU seconds to compile it, and to build it unless it was built with this number of segments."""
        transfers = candidate.transfers
        compile_s = COSTS[self._ports].compile.of(transfers, self._ranks)
        if self._ports == "fair" and candidate.peer_lanes is None:
            simulate_s = COSTS[self._ports].simulate.of(transfers, self._rates)
            compile_s += len(STAGE_LANES) * (compile_s + simulate_s)  # the compiler tries each
        if any((each.name, each.segments) == (candidate.name, candidate.segments) for each in self._tried):
            return compile_s
        statement_s = WHOLE_STATEMENT_S.get(candidate.name)
        each_s = STATEMENT_S if statement_s is None else statement_s / self._ranks + KNOWN_TRANSFER_S
        return BUILD_S + transfers * each_s + compile_s

    def _try_s(self, candidate: Candidate) -> float:
        return self._compile_s(candidate) + COSTS[self._ports].simulate.of(candidate.transfers, self._rates)

    def _verifying_s(self, candidate: Candidate) -> float:
        return COSTS[self._ports].verify.of(candidate.transfers, self._ranks)


def estimates(
    topology: Topology,
    size_bytes: int,
    slots: int,
    ports: Model = "exclusive",
    parts: Sequence[RankShare] = (),
    *,
    in_rank_order: bool = False,
) -> Iterator[Candidate]:
    """Alpha-beta estimates of the schedules that could be fastest; their formulas are in their docstrings.

    With `parts`, only `shares` with these, and `recursive-doubling`, whose time is latency where it is fast; with
    `in_rank_order`, only `rank-order`.
    """
    p, n = topology.n_ranks, float(size_bytes)
    servers = len(topology.servers)
    if servers == 1 or p == 1:
        yield Candidate(RANK_ORDER if in_rank_order else "optimal", 1, 0.0)
        return
    alpha, bound = float(topology.latency_s), pooled_bound_s(topology, n)
    most = transfers_max(p, planning_limit_s(p, bound), ports)
    degree = degree_for(servers)
    hops = max(1.0, log(servers, degree))
    each = 2 * (p - 1)
    lost, alike = 1.0, topology.out == topology.in_
    if in_rank_order:
        yield from _shares(topology, n, bound, most, slots, ports, parts, RANK_ORDER)
        return
    if parts:
        yield from _shares(topology, n, bound, most, slots, ports, parts)
        yield from _doubling(topology, n)
        return
    if ports == "fair" and p > 4:
        lost = 1.25  # its stages share ports in order of arrival
    elif not alike:
        lost = 1.75 if ports == "exclusive" else 1.03  # a port waits for its peer, which has another rate
    for segments in _segments(most // each, n):
        fill = 1 + degree * hops / (2 * segments)
        way = hops * (1 + ceil(degree / slots)) * alpha
        late = way + segments * way / max(IN_FLIGHT_MIN, 2 * slots)
        yield Candidate(
            "optimal", segments, lost * bound * fill + late, segments * each, (2, 2) if ports == "fair" else None
        )
    if ports == "fair" or (ports == "fifo" and servers <= ALL_PAIRS_MAX):
        yield from _shares(topology, n, bound, most, slots, ports, ())
    if topology.is_flat:
        yield from _flat_estimates(topology, n, most, slots, ports)


def _flat_estimates(topology: Topology, n: float, most: int, slots: int, ports: Model) -> Iterator[Candidate]:
    """Those of the schedules that take every rank for a server of its own."""
    p, alpha = topology.n_ranks, float(topology.latency_s)
    slowest = float(min(*topology.out, *topology.in_))
    each, alike = 2 * (p - 1), topology.out == topology.in_
    equal = len({*topology.out, *topology.in_}) == 1
    whole = p & (p - 1) == 0
    depth = int(log2(p))
    steps = depth + (0 if whole else 2)
    pair = n / slowest
    yield from _doubling(topology, n)
    once = 2 * (p - 1) / p * pair
    for segments in _segments(min(32, most // (p * each)), n / p):  # later messages hide the latency of earlier ones
        transfers = p * each * segments
        waits = (max(0.0, (p - 1) * segments / slots - 1) + segments / 32) * alpha  # one message per slot and latency
        apart = min(1.0, (2 if ports == "fifo" else 1) / segments)  # the share of one half during which the other waits
        halves = max((2 if alike else 1) * alpha + once / 2 * (1 + apart), alpha + once)
        lanes = None
        if ports == "fair":  # every pair has its own lanes: one of the compiler's `STAGE_LANES`
            lanes = (0, 2) if segments <= 2 else (2, 2)
            waits = max(0.0, segments / (max(1, lanes[0]) * lanes[1]) - 1) * alpha
        # Ordering many independent messages takes too long. Of equal rates, two in turn over the lanes of a pair wait
        # for each other on emulated NICs, which the simulation does not show.
        if (p <= ALL_PAIRS_MAX or ports != "fifo") and not (lanes and segments == 2 and equal):
            yield Candidate("direct", segments, halves + waits, transfers, lanes)
        step = max(once / each, once / each / segments + alpha, segments * alpha / slots)
        waits = STEPS_COST * once if ports == "fair" else 0.0
        yield Candidate("ring", segments, each * step + alpha + waits, transfers)
    if p * each <= most:
        time = (depth + steps) * alpha + once * (1 if whole else 1.5)
        yield Candidate("rabenseifner", 1, time, p * each)
    if ports != "fair":
        for segments in _segments(min(32, most // (2 * p * each)), n / p):
            halved = max(once / each, once / each / (2 * segments) + alpha, 2 * segments * alpha / slots)
            yield Candidate("bidirectional-ring", segments, each * halved + alpha, 2 * p * each * segments)
    if ports == "exclusive":
        yield from _optcc(topology, n, most)
    for segments in _segments(most // (4 * (p - 1)), n):
        time = (segments + 2 * depth - 1) * (2 * pair / segments + alpha)
        yield Candidate("double-binary-tree", segments, time, 4 * (p - 1) * segments)


def _doubling(topology: Topology, n: float) -> Iterator[Candidate]:
    """The candidates of `recursive-doubling`."""
    p, alpha = topology.n_ranks, float(topology.latency_s)
    steps = int(log2(p)) + (0 if p & (p - 1) == 0 else 2)
    pair = n / float(min(*topology.out, *topology.in_))
    for segments in (1, 2) if topology.is_flat else ():
        time = steps * (alpha + pair / segments) + (segments - 1) * pair / segments
        yield Candidate("recursive-doubling", segments, time, p * steps * segments)


def _shares(
    topology: Topology,
    size_bytes: float,
    bound: float,
    most: int,
    slots: int,
    ports: Model,
    parts: Sequence[RankShare],
    name: str = SHARES,
) -> Iterator[Candidate]:
    """The candidates of `shares`, or of `rank-order`, which is never in rows of servers.

    For fair ports a pair of ranks has m lanes, with as many messages in flight as slots: few lanes expose the latency,
    many need more segments to fill. With equal rates all ports are busy from the reduction of the first segment on.
    """
    p, alpha = topology.n_ranks, float(topology.latency_s)
    alike = topology.out == topology.in_
    equal = len({*topology.out, *topology.in_}) == 1
    if ports == "fair" and name == SHARES and len(topology.servers) > ALL_PAIRS_MAX:
        setting = ROW_LANES[0 if alike else 1]
        for segments in _segments(most // (2 * (p - 1)), size_bytes):
            late = (4 if alike else 6) * alpha * (1 + segments / IN_FLIGHT_MIN)
            filled = bound * (1 + ROWS_FILL / segments)
            yield Candidate(name, segments, filled + late, 2 * (p - 1) * segments, setting)
        return
    parts = parts or divide(*(np.array([float(rate) for rate in side]) for side in (topology.out, topology.in_)))
    messages = sum(max(Counter(ends).values()) for ends in zip(*(part[:2] for part in parts), strict=True))
    each = 2 * (p - 1) * len(parts)
    for segments in _segments(most // each, size_bytes / p, halfway=True):
        transfers = segments * each
        if ports != "fair":
            full = len(parts) * segments / slots
            waits = (max(0.0, full - 1) / 2 + segments / 32 if alike else full) * alpha  # half of them wait
            yield Candidate(name, segments, bound * (1 + 0.6 / segments) + 2 * alpha + waits, transfers)
            continue
        for setting, fitted in FAIR_PAIRS.items():
            (filling, more), turns = fitted[not alike]
            fill = 0.0 if equal else min(1.0, filling / (segments + more))
            if not alike and setting[0] == 0 and segments >= DRIFTS_FROM:
                fill += DRIFT
            hops = 2 if alike else 3 if setting[0] or segments > 1 else 4
            filled = bound * (1 + fill) + hops * alpha / (2 if equal and segments > 1 else 1)
            in_turn = bound / setting[1] + (turns * messages * segments + (2 if setting[0] else 0)) * alpha
            yield Candidate(name, segments, (filled**8 + in_turn**8) ** (1 / 8), transfers, setting)


def _optcc(topology: Topology, size_bytes: float, most: int) -> Iterator[Candidate]:
    """The candidates of `optcc`, if it accepts this topology."""
    try:
        slow = SCHEDULES["optcc"].configure(topology)["stragglers"]
    except TopologyError:
        return
    p, alpha = topology.n_ranks, float(topology.latency_s)
    healthy = p - len(slow)
    if healthy < 2 or len(set(topology.out)) == 1:
        return
    fastest = max(min(pair) for pair in zip(topology.out, topology.in_, strict=True))
    slowest = min(*topology.out, *topology.in_)
    fluid = size_bytes * max(1 / float(slowest), (2 * (healthy - 1) + len(slow)) / healthy / float(fastest))
    each = 2 * healthy * (p - 1)
    for segments in _segments(most // each, size_bytes / p):
        chunk_s = size_bytes / (segments * healthy) * (1 / float(fastest) + 1 / float(slowest)) / 2
        in_turn = (p - 1) * (2 * alpha + segments * (alpha + chunk_s))
        yield Candidate("optcc", segments, max(fluid * (1 + 1 / segments) + 2 * alpha, in_turn), each * segments)


def _segments(most: int, size_bytes: float, *, halfway: bool = False) -> Iterator[int]:
    """Powers of two up to `most` while chunks have at least `CHUNK_BYTES_MIN`; with `halfway` also 3, 6, 12, ..."""
    segments = 1
    while segments <= most and (segments == 1 or size_bytes >= CHUNK_BYTES_MIN * segments):
        yield segments
        if halfway and segments > 1 and 3 * segments // 2 <= most:
            yield 3 * segments // 2
        segments *= 2
