"""One run of a port model: the times of all transfers of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column, column
from optcc.errors import PlanError, TopologyError
from optcc.plan import Plan
from optcc.simulate.constraints import Constraints, plan_constraints, transfer_constraints
from optcc.simulate.dependencies import (
    DONE,
    DONE_OPENER,
    DONE_WAITS,
    FINISHED,
    LATE,
    SENT,
    START,
    START_OPENER,
    START_WAITS,
    TAKEN,
    blank_rows,
    make_net,
)
from optcc.simulate.event_queue import make_event_queue
from optcc.simulate.exclusive import TURN, make_holders
from optcc.simulate.fair import PortRates, make_ends
from optcc.simulate.fifo import make_fifo_state
from optcc.simulate.kernels import kernels
from optcc.simulate.max_min import make_flows, make_scratch
from optcc.simulate.ports import PortMap, make_pairs, pair_table
from optcc.simulate.tick_clock import Change, at_start, fair_units, make_clock
from optcc.simulate.uplinks import make_uplink_state
from optcc.timing import Model, Timing
from optcc.transfers import Transfers

Small = npt.NDArray[np.int32]
TRANSFERS_MAX = 2**31 // 3 - 1
"""Events are numbered in 32 bits."""
_NAMED_MAX = 4


@dataclass(frozen=True, slots=True)
class PortNetwork:
    """The ports with their rates, how those change, and what a message costs besides its bytes.

    A port of rate 0 stands still until a change. `more_latency_s[t]` is what transfer t has beyond `latency_s`.
    """

    ports: PortMap
    rates: tuple[Fraction, ...]
    latency_s: Fraction
    overhead_s: Fraction
    changes: Sequence[Change] = ()
    more_latency_s: npt.NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DependencyGraph:
    """Transfers as the inner loops see them: ranks, bytes, what they wait for, and their places in receive lanes."""

    src: Column
    dst: Column
    sizes: Column
    rows: Small
    gates: Small
    turn: Small


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The moments of every transfer in seconds (`START`, `SENT`, `TAKEN`, `DONE`), what the ports have carried, which
    of them are down in the end, the transfers that decide the time, how many are done, and the turns of those that pass
    uplinks (`Timing.uplink_turns`).
    """

    seconds: npt.NDArray[np.float64]
    carried: Column
    down: tuple[str, ...]
    critical: tuple[int, ...]
    finished: int
    uplink_turns: Column | None = None


def run_once(plan: Plan | Transfers, network: PortNetwork, model: Model) -> Timing:
    """The times of all transfers of `plan`.

    Raises PlanError if transfers wait for each other in a circle or have no instructions, TopologyError if a port that
    stands still for ever holds some back.
    """
    graph = graph_of_plan(plan)
    if network.ports.graph is not None:
        src, dst = network.ports.ends(plan.transfers if isinstance(plan, Plan) else plan)
        graph = replace(graph, src=src, dst=dst)
    result = run_graph(graph, network, model)
    if result.finished < len(graph.rows):
        check_finished(plan.transfers if isinstance(plan, Plan) else plan, graph.rows, result.down)
    timing = timing_of(result, result.seconds, result.critical, network.ports, model)
    return replace(timing, uplink_turns=result.uplink_turns)


def run_graph(graph: DependencyGraph, network: PortNetwork, model: Model) -> Result:
    """The times of all transfers of `graph`, whose `rows` are used up."""
    n, ports = len(graph.src), network.ports
    if n > TRANSFERS_MAX:
        raise PlanError(f"{n} transfers: must be at most {TRANSFERS_MAX}")
    carried = np.zeros(len(ports.names), dtype=np.int64)
    where = ports.server_of, ports.server_port, ports.gpu_port
    table, ends = pair_table(0 if model == "fifo" else n, len(ports.names))
    n_pairs = kernels().assign(graph.src, graph.dst, graph.sizes, *where, graph.rows, carried, table, ends)
    for uplink in _ways(graph, ports).T if ports.has_pods else ():
        np.add.at(carried, uplink[uplink >= 0], graph.sizes[uplink >= 0])
    turns: Column | None = None
    if model == "fair":
        times, per_s, down, finished = _run_fair(graph, carried.tolist(), network, ends[:n_pairs])
    else:
        times, per_s, down, finished, turns = _run_serial(graph, carried.tolist(), network, model, ends[:n_pairs])
    seconds = np.empty((4, n))
    last = kernels().to_seconds(times, float(per_s), seconds)
    seconds.setflags(write=False)
    names = tuple(name for name, is_down in zip(ports.names, down, strict=True) if is_down)
    return Result(seconds, carried, names, _critical(last, graph.rows), finished, turns)


def timing_of(
    result: Result, seconds: npt.NDArray[np.float64], critical: tuple[int, ...], ports: PortMap, model: Model
) -> Timing:
    """`result` with these times and critical transfers."""
    busy_s = tuple(
        size * rate.denominator / rate.numerator
        for size, rate in zip(result.carried.tolist(), ports.rates, strict=True)
    )
    return Timing(model, seconds[START], seconds[SENT], seconds[TAKEN], seconds[DONE], critical, ports.names, busy_s)


def graph_of_plan(plan: Plan | Transfers) -> DependencyGraph:
    """What a run of `plan` works on; raises PlanError for a transfer without its instructions."""
    if not isinstance(plan, Plan):
        turn = np.zeros(len(plan), dtype=np.int32)
        return graph_of_constraints(plan.src, plan.dst, plan.bytes, transfer_constraints(plan), turn)
    transfers, n = plan.transfers, len(plan.transfers)
    rows, turn = blank_rows(n), np.zeros(n, dtype=np.int32)
    slots = np.array([channel.slots for channel in plan.channels], dtype=np.int64)
    lanes = plan.lanes.starts, plan.after.starts, plan.after.values
    does = plan.send_transfer, plan.recv_transfer, plan.in_channel
    kernels().index_lanes(*lanes, *does, slots, rows, turn)
    if kernels().odd_one(transfers.src, transfers.dst, rows) >= 0:
        plan_constraints(plan)
        raise AssertionError("plan_constraints refuses what is not sent and received once")
    gates = np.empty(kernels().make_room(rows), dtype=np.int32)
    if len(gates):
        kernels().list_lanes(*lanes, *does, rows, gates)
    return DependencyGraph(transfers.src, transfers.dst, transfers.bytes, rows, gates, turn)


def graph_of_constraints(
    src: Column, dst: Column, sizes: Column, constraints: Constraints, turn: Small
) -> DependencyGraph:
    """What a run of transfers with these constraints works on."""
    rows = blank_rows(len(src))
    columns = constraints.before, constraints.after, constraints.kind
    kernels().count_constraints(*columns, rows)
    gates = np.empty(kernels().make_room(rows), dtype=np.int32)
    kernels().list_constraints(*columns, rows, gates)
    return DependencyGraph(src, dst, sizes, rows, gates, turn)


def _rates(graph: DependencyGraph, network: PortNetwork) -> tuple[list[Fraction], list[bool], list[Change]]:
    """`at_start`, with no more bytes lost than a transfer has."""
    largest = int(graph.sizes.max(initial=0))
    changes = [replace(each, lost_bytes=min(each.lost_bytes, largest)) for each in network.changes]
    return at_start(network.rates, changes)


def _run_serial(
    graph: DependencyGraph, carried: list[int], network: PortNetwork, model: Model, ends: Small
) -> tuple[Any, int, Any, int, Column | None]:
    """The times in ticks, how many of them are a second, which ports are down in the end, how many are done, and the
    turns of those that pass uplinks."""
    n, n_ports = len(graph.rows), len(network.ports.names)
    more = network.more_latency_s
    slack_s = None if more is None else Fraction(float(more.sum()))
    rates, down, changes = _rates(graph, network)
    clock = make_clock(rates, down, carried, n, network.latency_s, network.overhead_s, changes, slack_s)
    due = np.empty(0, dtype=np.int64) if more is None else np.rint(more * float(clock.per_s)).astype(np.int64)
    net = make_net(graph.rows, graph.gates, due)
    times = np.full((n, 4), -1, dtype=np.int64)
    events = make_event_queue(n_ports)
    costs = clock.latency, clock.overhead
    ways = _ways(graph, network.ports) if network.ports.has_pods else None
    turns: Column | None = None
    if model == "fifo" and ways is not None:
        line = make_uplink_state(ways, n_ports)
        kernels().run_uplinks(net, times, graph.sizes, graph.turn, clock.paces, clock.changes, line, *costs)
        turns = column(line.turns)
    elif model == "fifo":
        state = make_fifo_state(n_ports)
        kernels().run_fifo(net, times, graph.sizes, graph.turn, clock.paces, clock.changes, state, events, *costs)
    else:
        pairs = make_pairs(ends, network.ports)
        holders = make_holders(n, len(pairs.ends), n_ports)
        kernels().run_exclusive(net, times, graph.sizes, clock.paces, clock.changes, pairs, holders, events, *costs)
        if ways is not None:
            turns = column(np.where(ways >= 0, holders.tickets[:, [TURN]], -1))
    return times, clock.per_s, clock.paces.down, int(net.tail[FINISHED]), turns


def _ways(graph: DependencyGraph, ports: PortMap) -> Small:
    """For each transfer the uplinks that it goes up and comes down; below zero: none."""
    ways = ports.uplinks_between(ports.server_of[graph.src], ports.server_of[graph.dst])
    return np.column_stack(ways).astype(np.int32)


def _run_fair(
    graph: DependencyGraph, carried: list[int], network: PortNetwork, ends: Small
) -> tuple[Any, int, Any, int]:
    """The times in ticks, how many of them are a second, which ports are down in the end, and how many are done."""
    n, n_ports = len(graph.rows), len(network.ports.names)
    more = network.more_latency_s
    pairs = make_pairs(ends, network.ports)
    n_pairs = len(pairs.ends)
    rates, down, changes = _rates(graph, network)
    costs_s = network.latency_s, network.overhead_s
    used = [rate for rate, size in zip(rates, carried, strict=True) if size]
    busiest_s = max((size / rate for rate, size in zip(rates, carried, strict=True) if size), default=Fraction(0))
    moments = *costs_s, *(each.at_s for each in changes)
    new = [each.rate for each in changes if carried[each.port]]
    per_s, per_byte = fair_units([*used, *new], moments, 16 * busiest_s + sum(costs_s))
    per_tick = per_byte / per_s
    due = np.empty(0) if more is None else more * float(per_s)
    net = make_net(graph.rows, graph.gates, due)
    times = np.full((n, 4), -1.0)
    port_rates = PortRates(
        np.array([0.0 if is_down else float(rate * per_tick) for rate, is_down in zip(rates, down, strict=True)]),
        np.array([float(each.at_s * per_s) for each in changes]),
        np.array([each.port for each in changes], dtype=np.int64),
        np.array([float(each.rate * per_tick) for each in changes]),
        np.array([float(each.lost_bytes * per_byte) for each in changes]),
    )
    flows, scratch = (
        make_flows(graph.sizes.astype(np.float64) * float(per_byte), n_pairs),
        make_scratch(n_pairs, n_ports),
    )
    kernels().run_fair(
        net, times, port_rates, pairs, flows, scratch, make_ends(n_pairs), *(float(each * per_s) for each in costs_s)
    )
    return times, per_s, port_rates.rates == 0, int(net.tail[FINISHED])


def _critical(last: int, rows: Any) -> tuple[int, ...]:
    """From the completion of transfer `last` back through what opened each gate, then in order of time."""
    n = len(rows)
    if n == 0:
        return ()
    event = 2 * last + 1
    chain: list[int] = []
    while event >= 0:
        transfer = event - 2 * n if event >= 2 * n else event >> 1
        if not chain or chain[-1] != transfer:
            chain.append(transfer)
        if event >= 2 * n:
            event = int(rows[transfer, LATE])
            event = 2 * transfer if event < 0 else event
        else:
            event = int(rows[transfer, DONE_OPENER if event & 1 else START_OPENER])
    return tuple(reversed(chain))


def check_finished(transfers: Transfers, rows: Any, down: Sequence[str]) -> None:
    """Raises PlanError for transfers that wait for each other in a circle, TopologyError for those that wait for a
    port in `down`.
    """
    unfinished = np.flatnonzero(rows[:, DONE_WAITS] > 0)
    if len(unfinished) == 0:
        return
    if down:
        names = _names(transfers, unfinished)
        raise TopologyError(
            f"{', '.join(down)}: stands still and nothing brings it back: {len(unfinished)} of {len(transfers)} "
            f"transfers are never done: {names}"
        )
    never, verb = np.flatnonzero(rows[:, START_WAITS] > 0), "start"
    if len(never) == 0:
        never, verb = unfinished, "are done"
    names = _names(transfers, never)
    raise PlanError(
        f"{len(never)} of {len(transfers)} transfers never {verb}: {names}: they must not wait for each other"
    )


def _names(transfers: Transfers, indices: Column) -> str:
    """The first few of them in words."""
    shown = ", ".join(transfers.describe(int(index)) for index in indices[:_NAMED_MAX])
    return shown + (", ..." if len(indices) > _NAMED_MAX else "")
