"""`auto`: which schedule of the library, in how many segments, for this topology and this size.

Every candidate has an estimate from latency and bandwidth (alpha-beta), which is cheap; the most promising ones are
compiled and simulated as far as time allows, and the fastest is taken. Small messages want few steps, large ones want
every port busy. A runtime replans while its ranks wait, so what a candidate costs to plan counts too: 20 ms for 8
ranks, 0.3 s for 64, or as long as the message itself takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, log, log2

from optcc.compiler import LATENCY_S, ROW_LANES, SLOTS, compile_schedule
from optcc.errors import TopologyError
from optcc.passes.spread import ALL_PAIRS_MAX
from optcc.passes.timetable import Ports
from optcc.plan import Plan
from optcc.schedule import Schedule
from optcc.schedules.optimal import degree_for
from optcc.schedules.registry import SCHEDULES
from optcc.show import Card, Shown
from optcc.simulate import simulate
from optcc.topology import Topology
from optcc.units import show_time

CHUNK_BYTES_MIN = 512
IN_FLIGHT_MIN = 16
"""So many segments at least, or two for each slot of a receiver, are on their way at once and share a latency."""
TRIES_MAX = 8
"""So many candidates are compiled at most."""
PER_NAME = 5
"""So many variants of one schedule are considered."""
WORTH_A_TRY = 1.25
"""A candidate is tried if its estimate is below this many times the best."""
PLANNING_S, FEW_RANKS, PLANNING_S_PER_RANK = 20e-3, 8, 5e-3
"""A plan for few ranks may take so long to make and to verify, and so much longer for each further one; no further
candidate is tried behind `TRYING` of that."""
TRYING = 0.6
UNVERIFIED = 0.9
"""What choosing a plan takes, of what it takes with its verification."""
PEER_LANES = ((0, 3), (0, 2), (3, 2), (4, 2))
"""Of the compiler's `PEER_LANES` those of which one is always near the best: few for long messages, many for short."""
ROWS_FILL = 30
"""So many segments fill the rows that `shares` takes with many servers."""


def planning_s(transfers: int, ranks: int, ports: Ports) -> float:
    """About how long it takes to build, compile, simulate and verify a plan. With few ranks building is most of it;
    under fifo ports ordering is, under fair ones simulating: every transfer that begins or ends changes the rates of
    the others."""
    each_s = {"fifo": 3.5e-6, "exclusive": 2.5e-6, "fair": 2.5e-6 + 12e-9 * ranks**2}[ports]
    return transfers * (each_s + 25e-6 / ranks)


def planning_limit_s(ranks: int, message_s: float) -> float:
    """How long planning may take for a message that takes `message_s`."""
    return max(PLANNING_S + PLANNING_S_PER_RANK * max(0, ranks - FEW_RANKS), message_s)


def transfers_max(ranks: int, limit_s: float) -> int:
    """Plans with more transfers are not considered: they take longer than `limit_s` without being simulated."""
    return min(max(2**14, 1024 * ranks), int(limit_s / planning_s(1, ranks, "exclusive")))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule in so many segments, with its alpha-beta estimate and, if it was tried, its simulated time.

    `transfers` is about how many its plan has; `peer_lanes` is the compiler's, where ports are fair.
    """

    name: str
    segments: int
    estimate_s: float
    transfers: int = 0
    peer_lanes: tuple[int, int] | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Choice(Shown):
    """The plan that `choose` takes, and what it was compared with: the most promising candidate first."""

    plan: Plan
    schedule: Schedule
    taken: Candidate
    candidates: tuple[Candidate, ...]

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
        return Card(f"auto: {self.taken.name}", ("schedule", "segments", *lanes, "estimate", "simulated", ""), rows)


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
    ports: Ports = "exclusive",
) -> Choice:
    """The fastest plan found for an AllReduce of `size_bytes`; a topology without latency is taken to have `LATENCY_S`.

    Raises what compiling a schedule raises, and TopologyError for a topology that `optimal` does not accept.
    """
    timed = topology if topology.latency_s else topology.with_latency(LATENCY_S)
    by_name: dict[str, list[Candidate]] = {}
    found = estimates(timed, size_bytes, slots or SLOTS[ports], ports)
    for each in sorted(found, key=lambda each: each.estimate_s):
        by_name.setdefault(each.name, []).append(each)
    ranking = sorted((each for some in by_name.values() for each in some[:PER_NAME]), key=lambda each: each.estimate_s)
    limit_s = planning_limit_s(topology.n_ranks, _bound_s(timed, size_bytes))
    promising = _affordable(ranking, topology.n_ranks, ports, TRYING * limit_s)
    best: tuple[float, Plan, Schedule, Candidate] | None = None
    tried: list[Candidate] = []
    built: dict[tuple[str, int], Schedule] = {}
    for candidate in promising:
        key = candidate.name, candidate.segments
        if key not in built:
            built[key] = SCHEDULES[candidate.name].build(timed, candidate.segments)
        schedule = built[key]
        plan = compile_schedule(
            schedule,
            size_bytes=size_bytes,
            dtype=dtype,
            reduction=reduction,
            topology=timed,
            slots=slots,
            ports=ports,
            peer_lanes=candidate.peer_lanes,
        )
        if len(promising) == 1:
            return Choice(plan, schedule, candidate, tuple(ranking))
        seconds = simulate(plan, timed, model=ports).seconds
        tried.append(replace(candidate, seconds=seconds))
        if best is None or seconds < best[0]:
            best = seconds, plan, schedule, tried[-1]
    assert best is not None
    return Choice(*best[1:], (*tried, *(each for each in ranking if each not in promising)))


def _bound_s(topology: Topology, size_bytes: float) -> float:
    """What no schedule can beat: the slowest port carries the message once, all ports the message 2(p - 1) times."""
    out, in_ = [float(rate) for rate in topology.out], [float(rate) for rate in topology.in_]
    if len(out) == 1:
        return 0.0
    share = 2 * (len(out) - 1)
    return size_bytes * max(1 / min(*out, *in_), share / sum(out), share / sum(in_))


def _affordable(ranking: list[Candidate], ranks: int, ports: Ports, limit_s: float) -> list[Candidate]:
    """The most promising candidates, as many as are planned within `limit_s`; at least one, if need be the one that is
    planned fastest."""
    within = ranking
    if ports == "fifo":  # under fair ports a single one is neither ordered nor simulated
        costs_s = {each: UNVERIFIED * planning_s(each.transfers, ranks, ports) for each in ranking}
        cheapest = min(ranking, key=lambda each: costs_s[each])
        within = [each for each in ranking if costs_s[each] <= limit_s] or [cheapest]
    taken: list[Candidate] = []
    spent_s = 0.0
    for each in within:
        if each.estimate_s > WORTH_A_TRY * within[0].estimate_s or len(taken) == TRIES_MAX:
            break
        again = any((other.name, other.segments) == (each.name, each.segments) for other in taken)
        more_s = planning_s(each.transfers, ranks, ports) / (2 if again else 1)  # the schedule is there already
        if not taken or spent_s + more_s <= limit_s:
            taken.append(each)
            spent_s += more_s
    return taken


def estimates(topology: Topology, size_bytes: int, slots: int, ports: Ports = "exclusive") -> Iterator[Candidate]:
    """Alpha-beta estimates of the schedules that could be fastest; their formulas are in their docstrings."""
    p, n = topology.n_ranks, float(size_bytes)
    servers = len(topology.servers)
    if servers == 1 or p == 1:
        yield Candidate("optimal", 1, 0.0)
        return
    alpha, bound = float(topology.latency_s), _bound_s(topology, n)
    most = transfers_max(p, planning_limit_s(p, bound))
    slowest = float(min(*topology.out, *topology.in_))
    degree = degree_for(servers)
    hops = max(1.0, log(servers, degree))
    each = 2 * (p - 1)
    lost = 1.0
    if ports == "fair" and p > 4:
        lost = 1.25  # its stages share ports as they come
    elif topology.out != topology.in_:
        lost = 1.75 if ports == "exclusive" else 1.03  # a port waits for its other end, which has another rate
    for segments in _segments(most // each, n):
        fill = 1 + degree * hops / (2 * segments)
        way = hops * (1 + ceil(degree / slots)) * alpha
        late = way + segments * way / max(IN_FLIGHT_MIN, 2 * slots)
        yield Candidate(
            "optimal", segments, lost * bound * fill + late, segments * each, (2, 2) if ports == "fair" else None
        )
    if ports != "exclusive":
        yield from _shares(topology, n, bound, most, slots, ports)
    if not topology.is_flat:
        return
    whole = p & (p - 1) == 0
    depth = int(log2(p))
    steps = depth + (0 if whole else 2)
    pair = n / slowest
    for segments in (1, 2):
        time = steps * (alpha + pair / segments) + (segments - 1) * pair / segments
        yield Candidate("recursive-doubling", segments, time, p * steps * segments)
    once = 2 * (p - 1) / p * pair
    for segments in _segments(min(32, most // (p * each)), n / p):  # what follows hides the latency of what went before
        transfers = p * each * segments
        waits = (max(0.0, (p - 1) * segments / slots - 1) + segments / 32) * alpha  # a slot: one message in a latency
        halves = max(2 * alpha + once / 2 * (1 + 1 / segments), alpha + once)
        lanes = None
        if ports == "fair":  # every pair has lanes of its own: one of the compiler's `STAGE_LANES`
            lanes = (0, 2) if segments <= 2 else (2, 2)
            waits = max(0.0, segments / (max(1, lanes[0]) * lanes[1]) - 1) * alpha
        yield Candidate("direct", segments, halves + waits, transfers, lanes)
        step = max(once / each, once / each / segments + alpha, segments * alpha / slots)
        yield Candidate("ring", segments, each * step + alpha, transfers)
    if p * each <= most:
        time = (depth + steps) * alpha + once * (1 if whole else 1.5)
        yield Candidate("rabenseifner", 1, time, p * each)
    if ports == "exclusive":
        halved = max(once / each, once / each / 2 + alpha)
        if 2 * p * each <= most:
            yield Candidate("bidirectional-ring", 1, each * halved + alpha, 2 * p * each)
        yield from _optcc(topology, n, most)
    for segments in _segments(most // (4 * (p - 1)), n):
        time = (segments + 2 * depth - 1) * (2 * pair / segments + alpha)
        yield Candidate("double-binary-tree", segments, time, 4 * (p - 1) * segments)


def _shares(
    topology: Topology, size_bytes: float, bound: float, most: int, slots: int, ports: Ports
) -> Iterator[Candidate]:
    """Of `shares`. Under fair ports a pair of ranks has m lanes, with as many messages on their way as they have slots:
    with few lanes the latency counts, with many it takes more segments to fill them. With equal rates all ports are
    busy in the first segment's reduction already."""
    p, alpha = topology.n_ranks, float(topology.latency_s)
    alike = topology.out == topology.in_
    equal = len({*topology.out, *topology.in_}) == 1
    centres = p if alike else 1.6 * p
    hops = 2 if alike else 3
    if ports == "fair" and len(topology.servers) > ALL_PAIRS_MAX:
        setting = ROW_LANES[0 if alike else 1]
        for segments in _segments(most // (2 * (p - 1)), size_bytes):
            late = 2 * hops * alpha * (1 + segments / IN_FLIGHT_MIN)
            filled = bound * (1 + ROWS_FILL / segments)
            yield Candidate("shares", segments, filled + late, 2 * (p - 1) * segments, setting)
        return
    each = ceil(2 * (p - 1) * centres)
    if ports == "fair" and p > 8:
        most *= 3  # no pass looks for an order of the ports
    counts = list(_segments(most // each, size_bytes / p))
    if ports == "fair" and counts and 2 * counts[-1] > most // each > counts[-1]:
        counts.append(most // each)
    for segments in counts:
        transfers = segments * each
        if ports == "fifo":
            full = centres * segments / slots
            waits = (max(0.0, full - 1) + segments / 32 if alike else full) * alpha  # a slot: one message in a latency
            yield Candidate("shares", segments, bound * (1 + 0.6 / segments) + 2 * alpha + waits, transfers)
            continue
        messages = (2 if alike else 6) * segments  # of the busiest pair
        for lanes, few in PEER_LANES:
            fill = 0 if equal else max(1, lanes / 2) / segments
            filled = bound * (1 + fill) + hops * alpha / (2 if equal and segments > 1 else 1)
            side_by_side = max(1, lanes if alike else min(lanes, 2))
            in_turn = (bound + messages * alpha / side_by_side) / few + (2 * alpha if lanes else 0)
            yield Candidate("shares", segments, max(filled, in_turn), transfers, (lanes, few))


def _optcc(topology: Topology, size_bytes: float, most: int) -> Iterator[Candidate]:
    """Of `optcc`, where it is for this topology."""
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


def _segments(most: int, size_bytes: float) -> Iterator[int]:
    """Powers of two up to `most`, as long as chunks do not get too small."""
    segments = 1
    while segments <= most and (segments == 1 or size_bytes >= CHUNK_BYTES_MIN * segments):
        yield segments
        segments *= 2
