"""The exact makespan of a plan, and claims about it: makespan <= within * T*, makespan <= promise.

**The model.** A plan fixes an order for every port: a port serves the transfers of a lane in the lane's order, each
after the last byte of the one before. Given the order, every time is a longest path through a fixed graph
(`optcc.verify.plan.port_graph`), over rationals. Which ports and uplinks a transfer uses is in
`optcc.verify.plan.port_use`; a local operation has no latency.

**Relation to the simulator.** `optcc.simulate` schedules dynamically: an exclusive port serves in order of readiness,
and a fifo in port does not idle for a transfer that has not arrived. Where it serves the ports in the lanes' order,
both times agree; with one slot per lane always, as a lane's next message then starts only after the previous one is
done. With several slots it may serve messages of several senders in another order, and be faster or slower. The order
used here is the one that the plan's author (or the timetable) specified.

**Shared ports and uplinks.** GPUs of one server share its NICs, servers of a pod its uplinks, and a rank may send in
several lanes: then no lane fixes the order of that port or uplink. In that case all ports and uplinks keep the order in
which `optcc.simulate` serves them, and `Makespan.order` says so.
The simulator is not trusted for the time: its order is a witness, one valid execution, whose time is computed here.

**Fair ports** have no order: concurrent flows share them, and rates change with every start and end, so the time is no
longest path. `check_timing` then uses the simulator's result. It is a computation in floats and no proof: within 1e-9
of an exact evaluator in tests, and marked `rounded` in every output.

Times are integers in units of a tick that divides every duration: 64 bits wide where they fit, else Python's. Floats
occur only in the order of shared ports, for fair ports, and in text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import get_args

import numpy as np

from optcc.arrays import Column
from optcc.errors import InputError, TopologyError
from optcc.plan import Plan
from optcc.simulate import simulate
from optcc.timing import MODELS, Model, Timing
from optcc.topology import Topology
from optcc.transfers import Transfers
from optcc.units import show_rate, show_time
from optcc.verdict import Counterexample
from optcc.verify.bounds.certified import least_seconds
from optcc.verify.plan.longest_path import longest_paths
from optcc.verify.plan.port_graph import (
    BY_IN_PORT,
    BY_INSTRUCTION,
    BY_OUT_PORT,
    BY_SLOT,
    BY_UPLINK,
    DONE,
    MOMENTS,
    Chains,
    Durations,
    ExactModel,
    Passages,
    PortGraph,
    build_port_graph,
    chain,
    instructions_of,
)
from optcc.verify.plan.port_use import PortTicks, PortUse

NOTHING, DATA, READ, TURN, SLOT, OUT_PORT, IN_PORT, UPLINK, BEFORE = (
    "nothing",
    "its data",
    "bytes that were still being sent",
    "its turn in a lane",
    "a free slot",
    "its out port",
    "its in port",
    "an uplink",
    "the one before",
)
"""What a transfer of a critical path waited for; `BEFORE` for fair ports, where the cause is unknown."""
TRACE_LINES_MAX = 15
_STAGES_MAX = 4
_KEPT = {"lanes": " in the lanes' order", "simulated": " in the simulator's order", "rounded": ""}


@dataclass(frozen=True, slots=True)
class Makespan:
    """The makespan of a plan on a topology, with a critical path.

    `path` are transfers, each of which waited for the one before it; `waits[k]` is what `path[k]` waited for, one of
    the constants above, and `begins_s[k]` when that wait ended. `order` is `lanes`, or `simulated` where lanes share a
    port or an uplink; both are exact. With fair ports it is `rounded`: the times are the simulator's floats.
    """

    model: Model
    order: str
    seconds: Fraction
    path: tuple[int, ...]
    waits: tuple[str, ...]
    begins_s: tuple[Fraction, ...]

    @property
    def exact(self) -> bool:
        """False for a float, correct up to rounding."""
        return self.order != "rounded"

    def __str__(self) -> str:
        return f"{self.said}, {len(self.path)} transfers on the path"

    @property
    def said(self) -> str:
        """The time and how it was computed."""
        time = _exact(self.seconds) if self.exact else f"{show_time(float(self.seconds))} (simulated in floats)"
        return f"{time} with {self.model} ports{_KEPT[self.order]}"


def exact_makespan(plan: Plan, topology: Topology, *, model: ExactModel) -> Makespan:
    """When the last transfer of `plan` is done on `topology`.

    >>> from optcc.compiler import compile_schedule
    >>> from optcc.schedules.ring import ring
    >>> plan = compile_schedule(ring(n_ranks=3), size_bytes=12)
    >>> str(exact_makespan(plan, Topology.parse("3@4B/s,2=1B/s"), model="exclusive").seconds)
    '16'

    Raises InputError for another model; TopologyError for a topology of another number of ranks, a transfer between
    servers that share no rail, or rails that must be told apart; PlanError for a plan that `plan_constraints` refuses
    or whose transfers wait for each other once the ports keep their order.
    """
    if model not in get_args(ExactModel):
        raise InputError(f"model {model!r}: must be one of {', '.join(get_args(ExactModel))}")
    _check_topology(plan, topology)
    cut = _missing_link(plan.transfers, topology)
    if cut is not None:
        raise TopologyError(f"{plan.transfers.describe(cut)}: {_no_rail(plan.transfers, topology, cut)}")
    _check_rails(topology)
    ports = PortUse.of(plan.transfers, topology)
    ticks = PortTicks.of(plan.transfers, ports, topology.latency_s)
    order, chains, passages = _port_order(plan, topology, ports, ticks, model)
    local = plan.transfers.src == plan.transfers.dst
    latency = (~local).astype(ticks.out.dtype) * ticks.latency
    durations = Durations.of(ticks.out, ticks.in_, latency, model).beside(ticks.ways, model)
    graph = build_port_graph(plan, chains, durations, model, passages)
    return _makespan(plan, graph, model, order, ticks.per_s)


def simulated_makespan(plan: Plan, topology: Topology) -> Makespan:
    """When the last transfer of `plan` is done on `topology` if ports are shared fairly, up to rounding.

    >>> from optcc.compiler import compile_schedule
    >>> from optcc.schedules.ring import ring
    >>> plan = compile_schedule(ring(n_ranks=3), size_bytes=12, ports="fair")
    >>> str(simulated_makespan(plan, Topology.parse("3@4B/s,2=1B/s")))
    '16.000 s (simulated in floats) with fair ports, 4 transfers on the path'

    Raises what `optcc.simulate.simulate` raises.
    """
    timing = simulate(plan, topology, model="fair")
    path = timing.critical
    waits = (NOTHING, *(BEFORE for _ in path[1:])) if path else ()
    begins = tuple(Fraction(float(timing.start_s[transfer])) for transfer in path)
    return Makespan("fair", "rounded", Fraction(timing.seconds), path, waits, begins)


def check_timing(
    plan: Plan,
    topology: Topology,
    *,
    model: Model,
    within: Fraction | None = None,
    promise_s: Fraction | None = None,
) -> tuple[Counterexample | None, Makespan | None]:
    """None and the makespan if it is at most `within` times the bound T* and at most `promise_s`, where given.

    A refuted claim is explained by a port that alone violates it (its bytes over its rate), else by a critical path.
    There is no makespan if a transfer has no link: between servers whose surviving NICs share no rail of a rail-only
    network. This refutes every claim. (`Topology` rejects ports of rate zero.)

    T* is that of `least_seconds` for the plan's collective, fabrics included. With `fair` ports the time is the
    simulator's: correct up to rounding, and no proof.

    Raises InputError for an unknown model or a negative claim, and what `exact_makespan`, `simulated_makespan` and
    `least_seconds` raise.
    """
    if model not in MODELS:
        raise InputError(f"model {model!r}: must be one of {', '.join(MODELS)}")
    for label, value in (("within", within), ("promise", promise_s)):
        if value is not None and value < 0:
            raise InputError(f"{label} {value}: must not be negative")
    _check_topology(plan, topology)
    transfers = plan.transfers
    cut = _missing_link(transfers, topology)
    if cut is not None:
        return _cut_off(transfers, topology, cut), None
    if model == "fair":
        makespan = simulated_makespan(plan, topology)
    else:
        makespan = exact_makespan(plan, topology, model=model)
    collective = plan.collective
    claims: list[tuple[Fraction, str]] = []
    if promise_s is not None:
        claims.append((promise_s, f"{_exact(promise_s)} promised"))
    if within is not None:
        bound = least_seconds(topology, plan.size_bytes, collective)
        claims.append((within * bound, f"{within} T* = {_exact(within * bound)} promised"))
    broken = [claim for claim in claims if makespan.seconds > claim[0]]
    if not broken:
        return None, makespan
    allowed_s, claim_text = min(broken)
    slow = _slowest_port(transfers, topology)
    if slow is not None and slow.seconds > allowed_s:
        return _overloaded(transfers, topology, slow, claim_text), makespan
    return _too_long(transfers, makespan, claim_text), makespan


def describe_conditions(plan: Plan, topology: Topology, makespan: Makespan) -> str:
    """What a claim about `makespan` holds under: ports, their order, slots, rates, fabrics, latency.

    With several slots a port that serves whatever is ready first, as `optcc.simulate` has it, may take another time,
    which is then given too.
    """
    slots = max((channel.slots for channel in plan.channels), default=0)
    latency = f"{show_time(float(topology.latency_s))} latency" if topology.latency_s else "no latency"
    rounded = "" if makespan.exact else " in floats"
    said = f"{makespan.model} ports{_KEPT[makespan.order]}{rounded}, {slots} slots, {latency}, on {topology!r}"
    fabrics = sorted({server.fabric for server in topology.servers if server.fabric is not None})
    if fabrics:
        said += f" with fabrics of {', '.join(map(show_rate, fabrics))}"
    if makespan.order != "lanes" or slots < 2 or makespan.model == "fair":
        return said
    ready = simulate(plan, topology, model=makespan.model).seconds
    if abs(ready - float(makespan.seconds)) <= 1e-9 * ready:
        return said
    return f"{said}; if ports serve what is ready first (optcc simulate), {show_time(ready)}"


def _check_topology(plan: Plan, topology: Topology) -> None:
    if topology.n_ranks != plan.n_ranks:
        raise TopologyError(f"topology of {topology.n_ranks} ranks: the plan is for {plan.n_ranks} ranks")


def _check_rails(topology: Topology) -> None:
    if topology.wired is not None or not topology.rail_only:
        return
    if len(topology.rails_kept) > 1:
        raise TopologyError("rail-only topology whose servers keep different rails: not supported, NICs are pooled")
    if topology.pods:
        raise TopologyError(
            f"{topology!r}: an uplink for each rail of a pod: not supported, NICs are pooled; with the NICs given to "
            "GPUs, or under fair ports, it is"
        )


def _missing_link(transfers: Transfers, topology: Topology) -> int | None:
    """The first transfer between servers that share no rail of a rail-only network, or GPUs that no route joins."""
    wired = topology.wired
    if wired is not None:
        pairs = zip(transfers.src.tolist(), transfers.dst.tolist(), strict=True)
        joined = {(src, dst) for src, routes in enumerate(wired.routes) for dst in (src, *routes)}
        return next((at for at, pair in enumerate(pairs) if pair not in joined), None)
    if not topology.rail_only:
        return None
    rails = [{nic.rail for nic in server.nics if not nic.failed} for server in topology.servers]
    server_of = np.array(topology.rank_server)
    pair = server_of[transfers.src] * len(rails) + server_of[transfers.dst]
    seen, first = np.unique(pair, return_index=True)
    cut = [
        at
        for code, at in zip(seen.tolist(), first.tolist(), strict=True)
        if code // len(rails) != code % len(rails) and rails[code // len(rails)].isdisjoint(rails[code % len(rails)])
    ]
    return min(cut, default=None)


def _no_rail(transfers: Transfers, topology: Topology, transfer: int) -> str:
    if topology.wired is not None:
        names = [topology.wired.gpus[int(ranks[transfer])] for ranks in (transfers.src, transfers.dst)]
        return f"no link: only other GPUs join {' and '.join(names)}"
    src, dst = (topology.rank_server[int(ranks[transfer])] for ranks in (transfers.src, transfers.dst))
    kept = [
        f"{server.name} keeps {', '.join(str(nic.rail) for nic in server.nics if not nic.failed) or 'none'}"
        for server in (topology.servers[src], topology.servers[dst])
    ]
    return f"no link, the servers share no rail ({'; '.join(kept)})"


def _port_order(
    plan: Plan, topology: Topology, ports: PortUse, ticks: PortTicks, model: ExactModel
) -> tuple[str, Chains, Passages | None]:
    """The order of the ports and the uplinks, and its name: `lanes` or `simulated`."""
    sender, receiver = instructions_of(plan)
    transfer, way = np.nonzero(ports.ways >= 0)
    uplink, lasts = ports.ways[transfer, way], ticks.ways[transfer, way]
    users = ((ports.out, sender), (ports.in_, receiver), (uplink, sender[transfer]))
    if not any(_shared(port, plan.instruction_lane, by) for port, by in users):
        name, chains = "lanes", (chain(ports.out, sender), chain(ports.in_, receiver))
        turn = sender[transfer]
    else:
        timing = simulate(plan, topology, model=model)
        name, chains = (
            "simulated",
            (
                chain(ports.out, timing.start_s, timing.sent_s),
                chain(ports.in_, timing.taken_s, timing.end_s),
            ),
        )
        turn = _turns(timing, transfer)
    return name, chains, Passages(transfer, lasts, *chain(uplink, turn)) if len(uplink) else None


def _turns(timing: Timing, transfer: Column) -> Column:
    """For each passage of an uplink, by transfer and along its way, its place in the order that `timing` has served."""
    if timing.uplink_turns is None:
        return np.zeros(0, dtype=np.int64)
    by, way = np.nonzero(timing.uplink_turns >= 0)
    assert np.array_equal(by, transfer), "the simulator has transfers pass other uplinks"
    return timing.uplink_turns[by, way]


def _shared(port: Column, lane: Column, instruction: Column) -> bool:
    """True if several lanes use one port."""
    used = np.flatnonzero(port >= 0)
    if (instruction[used] < 0).any():
        return False  # `plan_constraints` rejects such a plan
    lane_of = np.full(int(port.max(initial=-1)) + 1, -1, dtype=np.int64)
    lane_of[port[used]] = lane[instruction[used]]
    return bool((lane_of[port[used]] != lane[instruction[used]]).any())


def _makespan(plan: Plan, graph: PortGraph, model: ExactModel, order: str, per_s: int) -> Makespan:
    """Follows the critical path back from the end."""
    time, cause = longest_paths(graph.order, graph.first, graph.after, graph.weight)
    if len(time) == 0:
        return Makespan(model, order, Fraction(0), (), (), ())
    done = time[DONE : MOMENTS * len(plan.transfers) : MOMENTS]
    node = MOMENTS * int(np.argmax(done)) + DONE
    end = int(time[node])
    path, waits, begins = [int(graph.transfer_of[node])], [], []
    while cause[node] >= 0:
        edge = int(cause[node])
        before = int(graph.before[edge])
        transfer = int(graph.transfer_of[before])
        if transfer != path[-1]:
            waits.append(_waited_for(plan.transfers, transfer, path[-1], int(graph.reason[edge])))
            path.append(transfer)
            begins.append(Fraction(int(time[node]), per_s))
        node = before
    waits.append(NOTHING)
    begins.append(Fraction(int(time[node]), per_s))
    return Makespan(model, order, Fraction(end, per_s), tuple(path[::-1]), tuple(waits[::-1]), tuple(begins[::-1]))


def _waited_for(transfers: Transfers, before: int, after: int, reason: int) -> str:
    if reason != BY_INSTRUCTION:
        return {BY_SLOT: SLOT, BY_OUT_PORT: OUT_PORT, BY_IN_PORT: IN_PORT, BY_UPLINK: UPLINK}[reason]
    t = transfers
    if t.dst[before] == t.src[after] and _overlap(t, before, t.dst_offset, after, t.src_offset):
        return DATA
    if t.dst[before] == t.dst[after] and _overlap(t, before, t.dst_offset, after, t.dst_offset):
        return DATA
    if t.src[before] == t.dst[after] and _overlap(t, before, t.src_offset, after, t.dst_offset):
        return READ
    return TURN


def _overlap(transfers: Transfers, one: int, offsets: Column, other: int, other_offsets: Column) -> bool:
    low = max(offsets[one], other_offsets[other])
    return bool(low < min(offsets[one] + transfers.bytes[one], other_offsets[other] + transfers.bytes[other]))


# Counterexamples of refuted claims ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Load:
    """The load of a port."""

    port: int
    name: str
    rank: int | None
    bytes: int
    rate: Fraction

    @property
    def seconds(self) -> Fraction:
        return self.bytes / self.rate


def _slowest_port(transfers: Transfers, topology: Topology) -> _Load | None:
    ports = PortUse.of(transfers, topology)
    rows = zip(range(len(ports.names)), ports.names, ports.ranks, ports.carried(transfers), ports.rates, strict=True)
    return max((_Load(*row) for row in rows), key=lambda load: load.seconds, default=None)


def _overloaded(transfers: Transfers, topology: Topology, slow: _Load, claim: str) -> Counterexample:
    ports = PortUse.of(transfers, topology)
    through = np.flatnonzero(np.any([port == slow.port for port in ports.columns], axis=0))
    lines = []
    for stage in _stages_of(transfers, through):
        own = through[transfers.stage[through] == stage]
        carried, first = int(transfers.bytes[own].sum()), transfers.describe(int(own[0]))
        lines.append(f"[{transfers.stages[stage]}] {len(own)} transfers, {carried} B; the first is {first}")
    more = len(lines) - _STAGES_MAX
    if more > 0:
        lines[_STAGES_MAX:] = [f"... and {more} more stages"]
    summary = (
        f"port {slow.name} must carry {slow.bytes} B at {show_rate(slow.rate)}, which takes {_exact(slow.seconds)}: "
        f"{claim}"
    )
    return Counterexample("timing", summary, rank=slow.rank, trace=tuple(lines))


def _too_long(transfers: Transfers, makespan: Makespan, claim: str) -> Counterexample:
    path = np.array(makespan.path)
    ends = (*makespan.begins_s[1:], makespan.seconds)
    shown = _exact if makespan.exact else _rounded
    lasted = [end - begin for begin, end in zip(makespan.begins_s, ends, strict=True)]
    lines = []
    for stage in _stages_of(transfers, path):
        own = np.flatnonzero(transfers.stage[path] == stage)
        total = sum((lasted[at] for at in own.tolist()), Fraction(0))
        lines.append(f"[{transfers.stages[stage]}] {len(own)} transfers of the path, {shown(total)}")
    if len(lines) > _STAGES_MAX:
        lines[_STAGES_MAX:] = [f"... and {len(lines) - _STAGES_MAX} more stages"]
    steps = list(_steps(transfers, makespan))
    room = TRACE_LINES_MAX - len(lines)
    if len(steps) > room:
        head = (room - 1) // 2
        tail = room - 1 - head
        steps[head:-tail] = [f"... {len(steps) - head - tail} more"]
    return Counterexample("timing", f"takes {makespan.said}: {claim}", trace=(*lines, *steps))


def _steps(transfers: Transfers, makespan: Makespan) -> Iterator[str]:
    for transfer, wait, begin in zip(makespan.path, makespan.waits, makespan.begins_s, strict=True):
        waited = "" if wait == NOTHING else f", waited for {wait}"
        yield f"at {show_time(float(begin))} {transfers.describe(transfer)}{waited}"


def _stages_of(transfers: Transfers, which: Column) -> list[int]:
    """The stages of these transfers, in order of first appearance."""
    return list(dict.fromkeys(transfers.stage[which].tolist()))


def _cut_off(transfers: Transfers, topology: Topology, transfer: int) -> Counterexample:
    first = int(transfers.dst_offset[transfer])
    summary = f"{transfers.src[transfer]}->{transfers.dst[transfer]}: {_no_rail(transfers, topology, transfer)}"
    return Counterexample(
        "timing",
        summary,
        int(transfers.src[transfer]),
        first,
        first + int(transfers.bytes[transfer]) - 1,
        (transfers.describe(transfer),),
    )


def _rounded(seconds: Fraction) -> str:
    return show_time(float(seconds))


def _exact(seconds: Fraction) -> str:
    """Rounded, followed by the exact value if it is short."""
    text = str(seconds)
    return _rounded(seconds) + (f" (exactly {text} s)" if len(text) <= 24 else "")
