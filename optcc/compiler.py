"""From a schedule to a plan: one pipeline of passes, and for fair ports several candidates that go through it.

    bind              chunks become byte ranges
    depend            byte ranges become dependencies
    timetable         dependencies and bandwidths become an order for every port
    lane_assignment   each transfer gets a lane of its sender and one of its receiver
    lower             transfers become instructions in lanes
    fuse              a receive and the send that passes it on become one instruction, unless ports are fair

Under fifo and exclusive ports there is one candidate: the timetable's order in one lane, or, where GPUs have several
links, in one for each link; those are also timed against lanes for each peer and stage, which alone are tried under
fifo where all stages carry the same. Under fair ports a timetable helps less than lanes that share a port, and how many
of them is hard to predict, so the candidates are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf
from typing import NamedTuple

import numpy as np

from optcc.arrays import Lists
from optcc.dsl import Definition
from optcc.errors import InputError
from optcc.passes.bind import bind
from optcc.passes.depend import depend
from optcc.passes.fuse import fuse
from optcc.passes.lane_assignment import (
    ALL_PAIRS_MAX,
    LaneAssignment,
    lanes_by_pair,
    lanes_by_port,
    lanes_by_stage,
    lanes_by_weight,
    lanes_by_window,
)
from optcc.passes.lower import lower
from optcc.passes.timetable import Order, check_ranks, timetable
from optcc.plan import SLOTS_MAX, Plan
from optcc.schedule import Schedule
from optcc.simulate import plan_constraints, simulate
from optcc.timing import MODELS, Model, Timing, with_overhead
from optcc.topology import Topology
from optcc.transfers import Transfers

SLOTS: dict[Model, int] = {"exclusive": 2, "fifo": 128, "fair": 2}
"""Slots of a receive lane by default. Where the network buffers messages the receiver can take many ahead, and the
order found is kept only if it need not wait for them."""
PEER_LANES = ((0, 2), (2, 1), (4, 1), (3, 1), (6, 1), (4, 2), (8, 1), (3, 2), (0, 3))
"""Candidates of a schedule for fair ports: lanes of a pair that carries the mean (0: one for all), and slots. With one
lane the pairs keep step if fairness happens to give each what it needs, as it does with one straggler."""
ROW_LANES = ((0, 2), (16, 1))
"""Its candidates with more than `ALL_PAIRS_MAX` servers: segments of a window (0: lanes for each peer and stage), and
slots. Lanes for each peer keep step where all ranks of a row carry the same, as with one straggler; a window always."""
STAGE_LANES = ((0, 2), (2, 2), (6, 2), (4, 2), (1, 1))
"""Candidates of other schedules under fair ports, besides the timetable: lanes for each peer, stage and operation that
carries the mean (0: one for all), and slots. So no stage waits for the data of another one."""
FLIGHTS = (3, 5)
"""Where GPUs have several links, how far under fifo ports a rank may be ahead of the others, in segments that are on
their way at a time: the fewer the better the ports serve what others wait for, but links must not run out of data."""
LINK_LANES = (("weights", 32, 4), ("stages", 1, 4))
"""Its first candidates under fair ports, before `STAGE_LANES`: how lanes are assigned, (most) lanes, and slots."""
LINK_SLOTS = 8
"""Slots of the timetable under fair ports there. With two, a rank of many servers waits for the latency of each
message."""
NEAR = 1.017
"""No further candidate is tried after one that takes at most so many times what its busiest port takes."""
SIMULATED_MAX = 2**24
"""Nor when so many transfers times ranks have been simulated and the first is near enough, or a second was tried."""
NEAR_ENOUGH = 1.025
EVEN = 1.01
"""Stages are taken to carry the same if none carries more than so many times what another one does."""
LATENCY_S, LINK_LATENCY_S = Fraction(20, 10**6), Fraction(5, 10**6)
"""What a message is taken to cost where the topology does not say: over sockets, and between GPUs that are linked."""


@dataclass(frozen=True, slots=True)
class SegmentLimits:
    """How far `choose_segments` goes: bytes of a chunk, chunks of the message, and transfers of a plan."""

    chunk_bytes_min: int
    chunk_bytes_max: int
    chunks: int
    transfers: int


LIMITS: dict[Model, SegmentLimits] = {
    "exclusive": SegmentLimits(2**16, 2**20, 512, 60_000),
    "fifo": SegmentLimits(2**12, 2**20, 2**17, 300_000),
    "fair": SegmentLimits(2**12, 2**20, 2**14, 600_000),
}
"""Those of exclusive ports are tuned for MPI. Libraries send short messages before their receive is posted, and then
the receiver no longer decides which comes next: OptCC of 16 MiB over four hosts, one at half rate, takes 1.02 of the
bound with chunks of 85 KiB and 1.33 with chunks of 43 KiB. Chunks above 1 MiB fill the queues between two hosts: a ring
with chunks of 16 MiB over a port at half rate took 1.52 to 1.83 of the bound from run to run, with 1 MiB 1.52."""


CHUNK_OVERHEADS = 8
"""Nor is a chunk longer than what the fastest port carries while a rank takes so many messages, where the topology says
what one costs its processor, unless that is more than the limit: at 1 GB/s and 0.1 ms a message it is 0.8 MB, at
50 GB/s 40 MB, where chunks of 1 MiB would have ranks busy with messages five times as long as with bytes."""


LINKED_TRANSFERS, LINKED_PER_RANK = 600_000, 2_048
"""Transfers of a plan at most, and for each rank of many, where GPUs have several links: a chunk of 8 x 8 GPUs is 126
of them, and its NICs have less to do at its transfers between servers than the pipeline takes to fill."""


CLOSE = 0.016
"""Where GPUs are linked, plans are large: no more segments are tried after so small an excess over the busiest port."""
PROBE = 4
"""There the first plan has a fraction of the segments: what it lacks says how many are enough."""
FORESEEN = 0.005
"""How far an excess may be from what two plans with far fewer segments say of it, as a share of the busiest port."""
SAVING = 0.01
"""Segments of other collectives than AllReduce are doubled as long as that saves such a share: twice the messages have
their price where processors are busy, which no simulation knows."""
HOPELESS = 1.5
"""More segments balance the load of ports, but not as much as this."""


def compile_schedule(
    schedule: Schedule,
    *,
    size_bytes: int,
    dtype: str = "float32",
    reduction: str = "sum",
    topology: Topology | None = None,
    slots: int | None = None,
    fused: bool = True,
    ports: Model = "exclusive",
    peer_lanes: tuple[int, int] | None = None,
    transfers: Transfers | None = None,
) -> Plan:
    """The plan of `schedule` for a message of `size_bytes`, its ports ordered for `topology` (else as written).

    `ports` is the port model of `optcc.simulate` for which they are ordered; it has its own number of `slots`, and the
    plan says which it is, unless its order is the author's. Where ports are fair, a schedule that is written for it
    gets lanes for each peer, in the author's order: as many as are found best by simulation, or those of `peer_lanes`,
    one of `PEER_LANES`. Others get the order of exclusive ports or, if that is faster, lanes for each peer, stage and
    operation, so that no stage waits for another one's data; with `peer_lanes`, one of `STAGE_LANES`, those. Where they
    are known, `transfers` are those of `find_transfers` for this schedule and message.

    Raises InputError for a size, type, reduction or number of slots that cannot be, TopologyError for a topology of
    another number of ranks.
    """
    if transfers is None:
        transfers = find_transfers(schedule, size_bytes, dtype, reduction)
    return _compile(schedule, transfers, topology, slots, fused, ports, peer_lanes)[0]


def _compile(
    schedule: Schedule,
    transfers: Transfers,
    topology: Topology | None,
    slots: int | None,
    fused: bool,
    ports: Model,
    peer_lanes: tuple[int, int] | None = None,
    probing: bool = False,
) -> tuple[Plan, Timing | None]:
    """The plan of these transfers, and its timing on `topology` if candidates were timed to find it.

    With `probing` it need not be the best: where GPUs are linked and all stages carry the same, the first candidate of
    fair ports is near it.
    """
    if ports not in MODELS:
        raise InputError(f"ports {ports!r}: must be one of {', '.join(MODELS)}")
    if slots is not None and not 1 <= slots <= SLOTS_MAX:
        raise InputError(f"{slots} slots: must be from 1 to {SLOTS_MAX}")
    if topology is not None:
        check_ranks(transfers, topology)
    servers = transfers.n_ranks if topology is None else len(topology.servers)
    wired = topology is not None and topology.wired is not None
    even = wired and ports != "exclusive" and _stages_are_even(transfers)
    candidates = _candidates(ports, schedule.lane_per_peer, servers > ALL_PAIRS_MAX, wired, peer_lanes, even)
    first = probing and ports == "fair" and not schedule.lane_per_peer
    if even and (ports == "fifo" or first):
        candidates = candidates[:1] if first else candidates[-1:]

    def lowered(candidate: _Candidate, lanes: LaneAssignment | None) -> Plan:
        return _lowered(schedule, transfers, topology, candidate, lanes, ports, slots, fused)

    assigned = ((each, each.assigned(transfers, slots)) for each in candidates)
    if topology is None or len(candidates) == 1:
        return lowered(*next(assigned)), None
    return _fastest(lowered, assigned, topology, ports)


def find_transfers(schedule: Schedule, size_bytes: int, dtype: str, reduction: str) -> Transfers:
    """The transfers of a schedule for a message, and what each waits for: the passes that know no topology."""
    return depend(bind(schedule, size_bytes, dtype, reduction))


Assign = Callable[[Transfers, int, int], LaneAssignment]
LANE_PASSES: dict[str, tuple[Assign, tuple[tuple[int, int], ...]]] = {
    "pairs": (lanes_by_pair, PEER_LANES),
    "rows": (lanes_by_window, ROW_LANES),
    "stages": (lanes_by_stage, STAGE_LANES),
    "weights": (lanes_by_weight, ()),
}
"""The passes that assign lanes under fair ports, and the settings that are tried."""


class _Candidate(NamedTuple):
    """A lane assignment with its parameters, or (`assign` None) the timetable's order, with its `flights`, in one lane
    (for each link)."""

    assign: Assign | None
    lanes: int
    slots: int
    flights: int = 0

    def assigned(self, transfers: Transfers, slots: int | None) -> LaneAssignment | None:
        """The lanes of `transfers`, with so many slots if they are given; None for the timetable's order."""
        return None if self.assign is None else self.assign(transfers, self.lanes, slots or self.slots)


def _candidates(
    ports: Model,
    lane_per_peer: bool,
    in_rows: bool,
    wired: bool,
    asked: tuple[int, int] | None,
    even: bool = False,
) -> tuple[_Candidate, ...]:
    """What is tried for these ports, in this order; with `asked`, only that setting of the lanes. Where stages are
    `even`, most settings are the same lanes, and the timetable comes last."""
    ordered = _Candidate(None, 1, SLOTS[ports])
    if ports != "fair" and not wired:
        return (ordered,)
    if ports != "fair":
        flights = FLIGHTS if ports == "fifo" else (0,)
        in_order = [ordered._replace(flights=each) for each in flights]
        return (*in_order, _Candidate(lanes_by_stage, *STAGE_LANES[0]))
    assign, settings = LANE_PASSES["stages" if not lane_per_peer else "rows" if in_rows else "pairs"]
    if asked is not None:
        return (_Candidate(assign, *asked),)
    if wired and not lane_per_peer:
        by_weight, *first = (_Candidate(LANE_PASSES[name][0], *each) for name, *each in LINK_LANES)
        with_lanes = (*first, *(_Candidate(assign, *each) for each in settings))
        ordered = ordered._replace(slots=LINK_SLOTS)
        return (by_weight, *with_lanes, ordered) if even else (by_weight, ordered, *with_lanes)
    with_lanes = tuple(_Candidate(assign, *each) for each in settings)
    return with_lanes if lane_per_peer else (ordered, *with_lanes)


def _stages_are_even(transfers: Transfers) -> bool:
    """True if each of several stages carries the same: trees, or rings, of one share, which lanes of their own keep in
    step without a timetable."""
    carried = np.bincount(transfers.stage, transfers.bytes, minlength=len(transfers.stages))
    return len(carried) > 2 and bool(carried.max() <= EVEN * carried.min())


def _lowered(
    schedule: Schedule,
    transfers: Transfers,
    topology: Topology | None,
    candidate: _Candidate,
    lanes: LaneAssignment | None,
    ports: Model,
    slots: int | None,
    fused: bool,
) -> Plan:
    """The plan of a candidate with these lanes; without a topology it has the author's order."""
    name, n_slots = schedule.name, slots or candidate.slots
    if lanes is not None:
        return lower(name, transfers, Order.as_written(transfers).sends, lanes, ports=ports)
    if topology is None:
        order, made_for = Order.as_written(transfers), None
    else:
        transfers, order = timetable(
            transfers, topology, n_slots, ports, candidate.flights, keeps_order=schedule.keeps_order
        )
        made_for = ports
    if topology is not None and topology.wired is not None:
        lanes = lanes_by_port(transfers, topology.wired, n_slots)
        return lower(name, transfers, order.sends, lanes, order.receives, ports=made_for)
    plan = lower(name, transfers, order.sends, n_slots, order.receives, ports=made_for)
    # A fused receive holds its slot until its send begins. Where flows share ports, messages do not keep to the
    # timetable, and a sender stalls if one of two slots is held.
    return fuse(plan, order.sends) if fused and made_for != "fair" and not order.overtakes(transfers) else plan


def _fastest(
    lowered: Callable[[_Candidate, LaneAssignment | None], Plan],
    assigned: Iterable[tuple[_Candidate, LaneAssignment | None]],
    topology: Topology,
    ports: Model,
) -> tuple[Plan, Timing | None]:
    """The plan that takes least under these ports, and its timing; `NEAR` and `SIMULATED_MAX` say how many are tried.

    Candidates with the same lanes as one before are one plan: where all stages carry the same, several are.
    """
    best: tuple[Plan, Timing] | None = None
    before: list[LaneAssignment] = []
    for tried, (candidate, lanes) in enumerate(assigned, 1):
        if lanes is None or not any(lanes.equals(each) for each in before):
            plan = lowered(candidate, lanes)
            if len(plan.transfers) == 0:
                return plan, None
            timing = simulate(plan, topology, model=ports)
            if best is None or timing.seconds < best[1].seconds:
                best = plan, timing
            if lanes is not None:
                before.append(lanes)
        assert best is not None
        size, seconds = len(best[0].transfers) * best[0].transfers.n_ranks, best[1].seconds
        busiest = max(best[1].port_busy_s, default=0.0)
        enough = tried * size > SIMULATED_MAX and (tried > 1 or seconds <= NEAR_ENOUGH * busiest)
        if enough or seconds <= NEAR * busiest:
            break
    assert best is not None
    return best


def plan_transfers(plan: Plan) -> Transfers:
    """The plan's transfers with `order` filled: what its lanes and its slots enforce beyond the dependencies."""
    constraints = plan_constraints(plan)
    order = [
        sorted({*lane, *credit} - set(after))
        for lane, credit, after in zip(constraints.order, constraints.credit, plan.transfers.after, strict=True)
    ]
    return replace(plan.transfers, order=Lists.of(order))


def choose_segments(
    definition: Definition,
    topology: Topology,
    *,
    size_bytes: int,
    dtype: str = "float32",
    slots: int | None = None,
    ports: Model = "exclusive",
) -> int:
    """The power of two of segments whose plan is predicted to be fastest: more segments fill and drain the pipeline
    faster, fewer of them pay the latency less often. The topology's latency decides, or what `LATENCY_S` says.

    Raises what building and compiling the schedule raises.
    """
    return try_segments(definition, topology, size_bytes=size_bytes, dtype=dtype, slots=slots, ports=ports)[0]


class TimedPlan(NamedTuple):
    """A schedule, its plan, and how long that is predicted to take: without a `timing`, at most about `seconds`."""

    schedule: Schedule
    plan: Plan
    seconds: float
    timing: Timing | None


def with_some_latency(topology: Topology) -> Topology:
    """The topology with the latency that it is taken to have: its own, `LATENCY_S`, or `LINK_LATENCY_S` where GPUs are
    linked."""
    if topology.latency_s:
        return topology
    return topology.with_latency(LATENCY_S if topology.wired is None else LINK_LATENCY_S)


def costed_s(plan: Plan, seconds: float, topology: Topology) -> float:
    """The predicted time of a plan with what its messages cost the processor of the busiest rank."""
    if not topology.overhead_s:
        return seconds
    return with_overhead(seconds, plan.transfers.busiest_messages, topology.overhead_s)


def _fill(fewer: int, more: float, segments: int, excess: float) -> float:
    """With k segments an excess is a + b/k, fill and drain of the pipeline and what does not depend on their number, as
    latency: b, where it is `more` with `fewer` segments."""
    return (more - excess) / (1 / fewer - 1 / segments)


def _suffices(excesses: Mapping[int, float], segments: int, excess: float, close: float) -> bool:
    """True if these `segments` are enough, by what fewer exceeded: the excess is small, or `NEAR_ENOUGH` and twice as
    many are expected to save less than half of `close`.

    >>> [_suffices({64: more}, 512, excess, 0.016) for more, excess in ((0.12, 0.023), (0.2, 0.024), (0.2, 0.016))]
    [True, False, True]
    """
    if excess <= close or not excesses or excess > NEAR_ENOUGH - 1:
        return excess <= close
    return _fill(*max(excesses.items()), segments, excess) / (2 * segments) < close / 2


def _limits_on_links(limits: SegmentLimits, definition: Definition, topology: Topology) -> SegmentLimits:
    """The limits for this schedule: where GPUs are linked and it is no AllReduce, whose plans are the largest, shorter
    chunks, in proportion to the latency there, and more of them. Of the blocks of an AllToAll a rank has p of p * p."""
    if topology.wired is None or definition.collective == "allreduce":
        return limits
    shorter = int(LATENCY_S / LINK_LATENCY_S)
    more = topology.n_ranks if definition.collective.startswith("alltoall") else shorter
    return replace(
        limits,
        chunk_bytes_min=min(limits.chunk_bytes_min, max(2**12, limits.chunk_bytes_min // shorter)),
        chunks=limits.chunks * more,
    )


def _segment_numbers(definition: Definition, topology: Topology, size_bytes: int, ports: Model) -> list[int]:
    """The powers of two that `try_segments` may try, the least first."""
    single = definition.build(topology, 1)
    sections = sum(shape.sections for shape in single.segments) or 1
    limits = _limits_on_links(LIMITS[ports], definition, topology)
    meanwhile = CHUNK_OVERHEADS * topology.overhead_s * max(*topology.out, *topology.in_)
    longest = max(limits.chunk_bytes_max, int(meanwhile))
    linked = max(LINKED_TRANSFERS, LINKED_PER_RANK * topology.n_ranks) if topology.wired is not None else 0
    most = max(limits.transfers, linked) // max(1, len(single))
    segments = 1
    while size_bytes > longest * sections * segments and 2 * segments <= most:
        segments *= 2
    candidates = [segments]
    while (
        2 * segments <= min(most, max(1, limits.chunks // sections))
        and size_bytes >= limits.chunk_bytes_min * sections * 2 * segments
    ):
        segments *= 2
        candidates.append(segments)
    return candidates


def try_segments(
    definition: Definition,
    topology: Topology,
    *,
    size_bytes: int,
    dtype: str = "float32",
    slots: int | None = None,
    ports: Model = "exclusive",
    best_s: float = inf,
    near_s: float = 0.0,
    close: float = CLOSE,
) -> tuple[int, TimedPlan | None]:
    """`choose_segments`, with the plan (a sum's) for `topology` and its timing, if they were made to choose.

    No further number is tried where a port is busy for `HOPELESS` times `best_s`, which another schedule takes, nor,
    where GPUs are linked, after one that exceeds what its busiest port takes by a share of at most `close`, or is
    `NEAR_ENOUGH` and twice as many promise to save less than half of that; where messages cost processors something,
    fewer are tried then. There a plan that is sure to take at most `near_s` need not be timed: not without the latency
    that `topology` is taken to have if it takes no more with it, and not at all under fair ports if plans with fewer
    segments say so.
    """
    timed = with_some_latency(topology)
    search = _SegmentSearch(definition, topology, timed, size_bytes, dtype, slots, ports, close, near_s)
    candidates = _segment_numbers(definition, topology, size_bytes, ports)
    if len(candidates) == 1:
        return candidates[0], None
    chosen, best = search.run(candidates, best_s)
    if best.timing is not None and timed is topology:
        return chosen, best
    if topology.wired is None:
        return chosen, None
    if best.seconds <= near_s:
        return chosen, best._replace(timing=None)
    timing = simulate(best.plan, topology, model=ports)
    return chosen, best._replace(timing=timing, seconds=timing.seconds)


@dataclass(frozen=True, slots=True)
class _SegmentSearch:
    """What `try_segments` is given; `timed` is the topology with some latency."""

    definition: Definition
    topology: Topology
    timed: Topology
    size_bytes: int
    dtype: str
    slots: int | None
    ports: Model
    close: float
    near_s: float

    def run(self, candidates: list[int], best_s: float) -> tuple[int, TimedPlan]:
        """The number of segments, and its plan."""
        least, jumps = candidates[0], self.topology.wired is not None
        probe = least // PROBE if jumps and least >= PROBE else 0
        left = [probe, *candidates] if probe else candidates
        chosen, best, left = left[0], self.attempt(left[0], probing=probe > 0), left[1:]
        excesses: dict[int, float] = {}
        below: list[int] = []  # numbers that were skipped on the way to the best one
        while left:
            busiest_s = _busiest_s(best)
            if busiest_s >= HOPELESS * best_s:
                break
            skipped = 0
            if jumps and best.seconds < 2 * busiest_s:
                excess = best.seconds / busiest_s - 1
                if chosen >= least and _suffices(excesses, chosen, excess, self.close):
                    if not self.topology.overhead_s:
                        below = []
                    break
                excesses[chosen] = excess
                # Twice the segments take half the excess.
                enough = chosen * excess / self.close
                skipped = next((at for at, each in enumerate(left) if each >= enough), len(left) - 1)
                foreseen = self.foresee(best, chosen, left[skipped:]) if chosen == probe else None
                if foreseen is not None:
                    return left[skipped], foreseen
            tried = self.attempt(left[skipped])
            if self.costs_s(tried) < (1 - self.saving) * self.costs_s(best):
                is_quick = self.definition.collective == "allreduce" and not self.topology.overhead_s
                below = [] if is_quick else left[:skipped]
                chosen, best, left = left[skipped], tried, left[skipped + 1 :]
            else:
                left, jumps = left[:skipped], False
        while below:
            tried = self.attempt(below[-1])
            if self.costs_s(tried) >= self.costs_s(best):
                break
            chosen, best = below.pop(), tried
        return chosen, self.attempt(chosen) if chosen == probe and self.ports == "fair" else best

    @property
    def saving(self) -> float:
        """The share that more segments must save: `SAVING`, but none in an AllReduce, or where GPUs are linked."""
        return 0.0 if self.definition.collective == "allreduce" or self.topology.wired is not None else SAVING

    def costs_s(self, tried: TimedPlan) -> float:
        """`costed_s` on this topology."""
        return costed_s(tried.plan, tried.seconds, self.topology)

    def attempt(self, segments: int, *, probing: bool = False) -> TimedPlan:
        """The plan with so many segments, timed; with `probing` another that takes about as long."""
        schedule, transfers = self.written(segments)
        plan, timing = _compile(schedule, transfers, self.timed, self.slots, True, self.ports, probing=probing)
        timing = timing or simulate(plan, self.timed, model=self.ports)
        return TimedPlan(schedule, plan, timing.seconds, timing)

    def written(self, segments: int) -> tuple[Schedule, Transfers]:
        """The schedule with so many segments, and its transfers."""
        schedule = self.definition.build(self.topology, segments)
        return schedule, find_transfers(schedule, self.size_bytes, self.dtype, "sum")

    def foresee(self, probe: TimedPlan, few: int, numbers: list[int]) -> TimedPlan | None:
        """The plan with the first of these `numbers` of segments, not timed, if it is certain enough that this number
        would be chosen, and this plan of the candidates: by the `probe` with `few` and another with half of them."""
        segments, transfers = numbers[0], probe.plan.transfers
        if self.ports != "fair" or not self.near_s or few < 2 or self.topology.overhead_s:
            return None
        candidates = _candidates("fair", probe.schedule.lane_per_peer, False, True, None, even=True)
        first, second = (each.assigned(transfers, self.slots) for each in candidates[:2])
        if first is None or second is None or not first.equals(second) or not _stages_are_even(transfers):
            return None
        if 2 * len(transfers) * transfers.n_ranks * segments // few <= SIMULATED_MAX:
            return None
        busiest_s = _busiest_s(probe)
        excess = probe.seconds / busiest_s - 1
        more = self.attempt(few // 2, probing=True).seconds / busiest_s - 1
        foreseen = excess - _fill(few // 2, more, few, excess) * (1 / few - 1 / segments)
        within = foreseen - FORESEEN, foreseen + FORESEEN
        if len(numbers) > 1 and not all(_suffices({few: excess}, segments, each, self.close) for each in within):
            return None
        schedule, written = self.written(segments)
        plan, _ = _compile(schedule, written, self.timed, self.slots, True, self.ports, probing=True)
        return TimedPlan(schedule, plan, (1 + foreseen + FORESEEN) * busiest_s, None)


def _busiest_s(tried: TimedPlan) -> float:
    """What the busiest port of a plan takes."""
    assert tried.timing is not None
    return max(tried.timing.port_busy_s, default=0.0)
