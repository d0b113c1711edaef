"""`auto`: which schedule of the library, in how many segments, for this topology and this size.

Every candidate has an estimate from latency and bandwidth (alpha-beta), which is cheap; the most promising ones are
compiled and simulated, and the fastest is taken. Small messages want few steps, large ones want every port busy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, log, log2

from optcc.compiler import LATENCY_S, SLOTS, compile_schedule
from optcc.passes.timetable import Ports
from optcc.plan import Plan
from optcc.schedule import Schedule
from optcc.schedules.optimal import degree_for
from optcc.schedules.registry import SCHEDULES
from optcc.show import Card, Shown
from optcc.simulate import simulate
from optcc.topology import Topology
from optcc.units import show_time

TRANSFERS_MAX, TRANSFERS_PER_RANK = 16_384, 1024
"""Plans with more transfers than the larger of these are not considered: a runtime replans while its ranks wait."""
CHUNK_BYTES_MIN = 512
IN_FLIGHT_MIN = 16
"""So many segments at least, or two for each slot of a receiver, are on their way at once and share a latency."""
TRIES_MAX = 10
"""So many candidates are compiled at most, and no further one when `ENOUGH` transfers times ranks have been."""
ENOUGH = 2**19
PER_NAME = 5
"""So many numbers of segments of one schedule are considered."""
CERTAIN = 256
"""With so many segments one number of them is as good as its neighbours."""
WORTH_A_TRY = 1.6
"""A candidate is tried if its estimate is below this many times the best time found."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule in so many segments, with its alpha-beta estimate and, if it was tried, its simulated time."""

    name: str
    segments: int
    estimate_s: float
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Choice(Shown):
    """The plan that `choose` takes, and what it was compared with: the most promising candidate first."""

    plan: Plan
    schedule: Schedule
    taken: Candidate
    candidates: tuple[Candidate, ...]

    def card(self) -> Card:
        rows = tuple(
            (
                each.name,
                str(each.segments),
                show_time(each.estimate_s),
                show_time(each.seconds) if each.seconds is not None else "-",
                "taken" if each == self.taken else "",
            )
            for each in self.candidates
        )
        return Card(f"auto: {self.taken.name}", ("schedule", "segments", "estimate", "simulated", ""), rows)


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
    promising = [each for each in ranking if each.estimate_s <= WORTH_A_TRY * ranking[0].estimate_s]
    if len({each.name for each in promising}) == 1 and promising[0].segments >= CERTAIN:
        promising = promising[:1]  # bandwidth decides, and nothing else comes near
    best: tuple[float, Plan, Schedule, Candidate] | None = None
    tried: list[Candidate] = []
    spent = 0
    for candidate in promising[:TRIES_MAX]:
        schedule = SCHEDULES[candidate.name].build(timed, candidate.segments)
        plan = compile_schedule(
            schedule,
            size_bytes=size_bytes,
            dtype=dtype,
            reduction=reduction,
            topology=timed,
            slots=slots,
            ports=ports,
        )
        if len(promising) == 1:
            return Choice(plan, schedule, candidate, tuple(ranking))
        seconds = simulate(plan, timed, model=ports).seconds
        spent += len(plan.transfers)
        tried.append(replace(candidate, seconds=seconds))
        if best is None or seconds < best[0]:
            best = seconds, plan, schedule, tried[-1]
        if spent * topology.n_ranks >= ENOUGH:
            break
    assert best is not None
    return Choice(*best[1:], (*tried, *(each for each in ranking if each not in promising[: len(tried)])))


def estimates(topology: Topology, size_bytes: int, slots: int, ports: Ports = "exclusive") -> Iterator[Candidate]:
    """Alpha-beta estimates of the schedules that could be fastest; their formulas are in their docstrings."""
    p, n = topology.n_ranks, float(size_bytes)
    most = max(TRANSFERS_MAX, TRANSFERS_PER_RANK * p)
    alpha = float(topology.latency_s)
    out, in_ = [float(rate) for rate in topology.out], [float(rate) for rate in topology.in_]
    servers = len(out)
    if servers == 1 or p == 1:
        yield Candidate("optimal", 1, 0.0)
        return
    slowest = min(*out, *in_)
    share = 2 * (servers - 1)
    bound = n * max(1 / slowest, share / sum(out), share / sum(in_))
    degree = degree_for(servers)
    hops = max(1.0, log(servers, degree))
    for segments in _segments(most // (2 * (p - 1)), n):
        fill = 1 + degree * hops / (2 * segments)
        way = 2 * hops * alpha
        yield Candidate("optimal", segments, bound * fill + way + segments * way / max(IN_FLIGHT_MIN, 2 * slots))
    if ports != "exclusive" and 2 * p * (p - 1) <= most:
        waits = 0.0 if ports == "fair" else (p - 1) * alpha / slots  # a slot takes one message in a latency
        for segments in _segments(most // (2 * p * (p - 1)), n / p):
            yield Candidate("shares", segments, bound * (1 + 1 / segments) + 2 * alpha + segments * waits)
    if not topology.is_flat:
        return
    steps = ceil(log2(p))
    whole = p & (p - 1) == 0
    pair = n / slowest
    yield Candidate("recursive-doubling", 1, (steps + (0 if whole else 2)) * (alpha + pair))
    once = 2 * (p - 1) / p * pair
    if 2 * p * (p - 1) <= most:
        for segments in (1, 2, 4, 8, 16, 32):  # what follows hides the latency of what went before
            if segments * 2 * p * (p - 1) > most:
                break
            rounds = 2 * (p - 1) * segments / slots  # a slot takes one message in a latency
            yield Candidate("direct", segments, once + rounds * alpha / 2 + 2 * alpha / segments)
            yield Candidate("ring", segments, 2 * (p - 1) * alpha / segments + once + (segments - 1) * alpha / 8)
        yield Candidate("rabenseifner", 1, 2 * steps * alpha + once * (1 if whole else 1.5))
    depth = int(log2(p))
    for segments in _segments(most // (4 * (p - 1)), n):
        yield Candidate("double-binary-tree", segments, (segments + 2 * depth - 1) * (2 * pair / segments + alpha))


def _segments(most: int, size_bytes: float) -> Iterator[int]:
    """Powers of two up to `most`, as long as chunks do not get too small."""
    segments = 1
    while segments == 1 or (segments <= most and size_bytes >= CHUNK_BYTES_MIN * segments):
        yield segments
        segments *= 2
