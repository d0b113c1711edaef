"""Times a plan on a topology: ports with rates, a latency, and two ways in which transfers share a port.

A transfer between servers goes through the out port of one server and the in port of the other, its surviving NICs
pooled. Inside a server it goes through the fabric ports of two GPUs, or through no port at all if the fabric is never
the bottleneck. A local operation (src = dst) takes no time.

    model      how a port serves the transfers that want it
    fifo       one at a time at the port's own rate; the network between two ports stores what the sender is faster
               with, and cuts through where it is not (LogGP's G at each end). An out port serves in the order in which
               transfers became ready, an in port what has come: in the order of the plan's receive lane, as a receiver
               that pulls, or else first come, first served
    exclusive  one at a time, in the order in which they became ready; a transfer holds both of its ports at the rate of
               the slower one: a rendezvous without a network that stores anything
    fair       all at once, max-min fair: what long-lived TCP flows tend to

Between ports of equal rates fifo and exclusive differ only where a receiver is busy: under fifo the message waits in
the network and its sender goes on. How much the network stores is bounded by the slots of the plan's receive lanes.

What waits for what is a list of `Edges` between transfers, read off a plan's instructions by `plan_edges` or off a
neutral `Transfers` by `transfer_edges`. Two things happen to a transfer: its last byte leaves (it is *sent*), and
`latency_s` later, or when the receiver is ready for it, it is *done*.

Under fifo and exclusive the clock is an integer. Its tick divides every duration if 64 bits suffice for that, so that a
tie is a tie; else durations are rounded to a tick of 2**-61 of the time that all transfers would take one after the
other. Under fair the clock is a float. The inner loops are the functions in `_KERNELS`, compiled by `optcc.compiled`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import isfinite, lcm
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column, Lists, column
from optcc.compiled import compiled
from optcc.errors import InputError, PlanError, TopologyError
from optcc.plan import LOCALS, RECEIVES, SENDS, Plan
from optcc.timing import Timing
from optcc.topology import Topology
from optcc.transfers import Transfers

Model = Literal["fifo", "exclusive", "fair"]
MODELS: tuple[Model, ...] = ("fifo", "exclusive", "fair")

DONE_START, SENT_START, DONE_DONE, SENT_DONE = range(4)
"""Kinds of an edge: what must have happened to `before`, and what it holds back of `after`.

Bit 0: only the last byte of `before` must have left. Bit 1: only the completion of `after` is held back, not its bytes.
"""

Times = npt.NDArray[Any]
_TICKS_MAX = 2**62
_FRESH, _ARRIVING, _LEAVING, _FINISHED = range(4)
_TOLERANCE = 4e-15
_NAMED_MAX = 4


@dataclass(frozen=True, slots=True, eq=False)
class Edges:
    """Constraints between transfers, in columns: `before[i]` holds back `after[i]` in the way `kind[i]` says.

    `is_credit[i]` tells those that stand for a free slot of a lane.
    """

    n_transfers: int
    before: Column
    after: Column
    kind: Column
    is_credit: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def order(self) -> Lists:
        """For each transfer, those that hold back its start for another reason than a free slot; each once."""
        return self._starts(~self.is_credit)

    @property
    def credit(self) -> Lists:
        """For each transfer, the one that must free its slot, if any."""
        return self._starts(self.is_credit)

    def _starts(self, which: npt.NDArray[np.bool_]) -> Lists:
        chosen = which & (self.kind < DONE_DONE)
        code = np.unique(self.after[chosen] * self.n_transfers + self.before[chosen])
        counts = np.bincount(code // max(self.n_transfers, 1), minlength=self.n_transfers)
        return Lists(column(np.concatenate(([0], np.cumsum(counts)))), column(code % max(self.n_transfers, 1)))


def simulate(plan: Plan | Transfers, topology: Topology, *, model: Model = "fifo", overhead_s: float = 0.0) -> Timing:
    """The predicted time of every transfer of `plan` on `topology`.

    `start_s` is when a transfer takes its out port, `sent_s` when its last byte has left it, `taken_s` when it takes
    its in port, `end_s` when it is done. `overhead_s` is spent by every transfer between two ranks before its first
    byte leaves; unless ports are fair it holds its out port meanwhile. In `critical`, each transfer waited for the one
    before it: for its data, its turn in a lane, a free slot or (unless ports are fair) a port.

    Raises InputError for another model or a negative overhead, TopologyError if the topology has another number of
    ranks or needs rails told apart, PlanError if transfers wait for each other in a circle or have no instructions.
    """
    transfers = plan.transfers if isinstance(plan, Plan) else plan
    if model not in MODELS:
        raise InputError(f"model {model!r}: must be one of {', '.join(MODELS)}")
    if not (isfinite(overhead_s) and overhead_s >= 0):
        raise InputError(f"overhead {overhead_s} s: must not be negative")
    if topology.n_ranks != transfers.n_ranks:
        raise TopologyError(f"topology of {topology.n_ranks} ranks: the plan is for {transfers.n_ranks} ranks")
    rails = {tuple(sorted(nic.rail for nic in server.nics if not nic.failed)) for server in topology.servers}
    if topology.rail_only and len(rails) > 1:
        raise TopologyError("rail-only topology whose servers keep different rails: not modelled yet, NICs are pooled")
    edges = plan_edges(plan) if isinstance(plan, Plan) else transfer_edges(plan)
    ports = _Ports.of(transfers, topology)
    net = _net(transfers, edges, ports)
    n = len(transfers)
    landed_after = 2 * np.arange(n)
    if model == "fair":
        start, sent, done = (np.full(n, -1.0) for _ in range(3))
        taken = start
        rates = np.array([float(rate) for rate in ports.rates])
        sizes = transfers.bytes.astype(np.float64)
        _kernels().run_fair(net, ports.lists, sizes, rates, float(topology.latency_s), overhead_s, start, sent, done)
        per_s = 1
    else:
        clock = _Clock.of(transfers, ports, topology.latency_s, Fraction(str(overhead_s)))
        start, sent, taken, done = (np.full(n, -1, dtype=np.int64) for _ in range(4))
        if model == "fifo":
            out, in_ = clock.out_duration, clock.in_duration
            times = start, sent, taken, done, landed_after
            turn = _turns(plan) if isinstance(plan, Plan) else np.zeros(n, dtype=np.int64)
            _kernels().run_fifo(net, ports.lists, out, in_, clock.latency, clock.overhead, *times, turn)
        else:
            held = np.maximum(clock.out_duration, clock.in_duration + clock.overhead * (ports.pair >= 0))
            _kernels().run_exclusive(net, ports.lists, held, clock.latency, clock.overhead, start, sent, done)
            taken = start
        per_s = clock.ticks_per_s
    if net.tail[_FINISHED] < n:
        _refuse(transfers, start, done)
    return Timing(
        model,
        _seconds(start, per_s),
        _seconds(sent, per_s),
        _seconds(taken, per_s),
        _seconds(done, per_s),
        _critical(done, net.opened_by, landed_after),
        ports.names,
        tuple(ports.busy_s(transfers)),
    )


def transfer_edges(transfers: Transfers) -> Edges:
    """The edges of the neutral form: `after` waits until a transfer is done, `order` until its last byte has left."""
    n = np.arange(len(transfers))
    after, order = transfers.after, transfers.order
    return Edges(
        len(transfers),
        column(np.concatenate((after.values, order.values))),
        column(np.concatenate((np.repeat(n, np.diff(after.starts)), np.repeat(n, np.diff(order.starts))))),
        column(np.repeat([DONE_START, SENT_START], [len(after.values), len(order.values)])),
        np.zeros(len(after.values) + len(order.values), dtype=np.bool_),
    )


def plan_edges(plan: Plan) -> Edges:
    """The edges that the instructions of `plan` put between its transfers.

    An instruction has happened when all that it does has: its receive is done, its send has left. Then:

    - what an instruction is `after` of has happened before its send starts, or before its receive is done: bytes may
      flow into a slot before the receiver wants them;
    - as a lane issues in order, what an instruction waits for also holds back the later ones of its lane;
    - a lane sends one transfer at a time, and receives are done in the lane's order;
    - a fused instruction sends what it has received, so the receive is done before the send starts;
    - what a lane receives (i + slots)-th starts when its i-th receive is done and has freed its slot.

    Raises PlanError if a transfer between two ranks does not have one instruction that sends and one that receives.
    """
    n = len(plan.transfers)
    receives = np.isin(plan.kind, list(RECEIVES))
    for verb, owners in (
        ("send", plan.send_transfer[plan.send_transfer >= 0]),
        ("receive", plan.recv_transfer[receives]),
    ):
        counts = np.bincount(owners, minlength=n)
        wrong = np.flatnonzero((counts != 1) & (plan.transfers.src != plan.transfers.dst))
        if len(wrong):
            index = int(wrong[0])
            raise PlanError(f"transfer {plan.transfers.describe(index)}: {counts[index]} {verb}s: must be one")
    sends = np.isin(plan.kind, list(SENDS))
    local = np.isin(plan.kind, list(LOCALS))
    room = 3 * len(plan.after.values) + 4 * len(plan)
    before, after, kind = (np.empty(room, dtype=np.int64) for _ in range(3))
    used = _kernels().lane_edges(
        plan.lanes.starts,
        plan.after.starts,
        plan.after.values,
        np.where(sends, plan.send_transfer, -1),
        np.where(receives, plan.recv_transfer, -1),
        np.where(local, plan.recv_transfer, -1),
        before,
        after,
        kind,
    )
    receiving = np.flatnonzero(receives)
    lane = plan.instruction_lane[receiving]
    slots = np.array([each.slots for each in plan.channels], dtype=np.int64)[plan.in_channel[receiving]]
    freed = np.arange(len(receiving)) - slots
    waits = np.flatnonzero((freed >= 0) & (lane[np.maximum(freed, 0)] == lane))
    return Edges(
        n,
        column(np.concatenate((before[:used], plan.recv_transfer[receiving[freed[waits]]]))),
        column(np.concatenate((after[:used], plan.recv_transfer[receiving[waits]]))),
        column(np.concatenate((kind[:used], np.full(len(waits), DONE_START)))),
        np.arange(used + len(waits)) >= used,
    )


class _Lists(NamedTuple):
    """For each port, those pairs on it that are waiting (fifo) or flowing (fair); a pair is an out and an in port.

    `ends[2 * pair]` is its out port, `ends[2 * pair + 1]` its in port. The list of port q is
    `members[first[q]:first[q] + filled[q]]`; `place[2 * pair + side]` says where the pair stands in it.
    """

    ends: Column
    first: Column
    members: Column
    filled: Column
    place: Column


@dataclass(frozen=True, slots=True)
class _Ports:
    """The ports of a topology, and which pair of them each transfer uses (-1: none)."""

    names: tuple[str, ...]
    rates: tuple[Fraction, ...]
    pair: Column
    lists: _Lists

    @classmethod
    def of(cls, transfers: Transfers, topology: Topology) -> _Ports:
        names: list[str] = []
        rates: list[Fraction] = []
        server_port = np.full(len(topology.servers), -1, dtype=np.int64)
        gpu_port = np.full(topology.n_ranks, -1, dtype=np.int64)
        rank = 0
        for index, server in enumerate(topology.servers):
            if len(topology.servers) > 1:
                server_port[index] = len(names)
                names += [f"out {server.name}", f"in {server.name}"]
                rates += [server.out, server.in_]
            for gpu in range(server.gpus):
                if server.fabric is not None:
                    gpu_port[rank] = len(names)
                    names += [f"out {server.name} gpu {gpu}", f"in {server.name} gpu {gpu}"]
                    rates += [server.fabric, server.fabric]
                rank += 1
        src, dst = transfers.src, transfers.dst
        server_of = np.array(topology.rank_server)
        outside = server_of[src] != server_of[dst]
        out = np.where(outside, server_port[server_of[src]], gpu_port[src])
        in_ = np.where(outside, server_port[server_of[dst]], gpu_port[dst]) + 1
        used = (src != dst) & (out >= 0)
        width = max(len(names), 1)
        code = np.where(used, out * width + in_, width * width)
        seen, pair = _compact(code, width * width + 1)
        if len(seen) and seen[-1] == width * width:
            seen = seen[:-1]
            pair = np.where(used, pair, -1)
        ends = np.stack((seen // width, seen % width), axis=1).ravel()
        first = np.concatenate(([0], np.cumsum(np.bincount(ends, minlength=len(names)))))
        blank = np.zeros(len(ends), dtype=np.int64)
        lists = _Lists(ends, first, blank, np.zeros(len(names), dtype=np.int64), blank.copy())
        return cls(tuple(names), tuple(rates), pair, lists)

    def pair_rate(self) -> list[Fraction]:
        """For each pair, what it carries at most, bytes/s."""
        ends = self.lists.ends.tolist()
        return [min(self.rates[ends[at]], self.rates[ends[at + 1]]) for at in range(0, len(ends), 2)]

    def busy_s(self, transfers: Transfers) -> list[float]:
        """For each port, the bytes that it carries over its rate."""
        used = self.pair >= 0
        pairs = len(self.lists.ends) // 2
        sums = np.zeros(pairs, dtype=np.int64)
        np.add.at(sums, self.pair[used], transfers.bytes[used])
        carried = np.zeros(len(self.names), dtype=np.int64)
        np.add.at(carried, self.lists.ends, np.repeat(sums, 2))
        return [float(size / rate) for size, rate in zip(carried.tolist(), self.rates, strict=True)]


def _compact(code: Column, bound: int) -> tuple[Column, Column]:
    """The sorted distinct values of `code`, all below `bound`, and for each entry the position of its value."""
    if bound > 4 * len(code) + 2**16:
        seen, position = np.unique(code, return_inverse=True)
        return seen, position.astype(np.int64)
    there = np.zeros(bound, dtype=np.int64)
    there[code] = 1
    seen = np.flatnonzero(there)
    there[seen] = np.arange(len(seen))
    return seen, there[code]


@dataclass(frozen=True, slots=True)
class _Clock:
    """Durations in ticks."""

    ticks_per_s: int
    latency: int
    overhead: int
    out_duration: Column
    in_duration: Column

    @classmethod
    def of(cls, transfers: Transfers, ports: _Ports, latency_s: Fraction, overhead_s: Fraction) -> _Clock:
        """The tick that divides every duration, or else a small one."""
        used = ports.pair >= 0
        ends = ports.lists.ends[2 * ports.pair[used, None] + [0, 1]]
        carried = np.zeros(len(ports.rates), dtype=np.int64)
        np.add.at(carried, ends, transfers.bytes[used, None])
        horizon = len(transfers) * (latency_s + overhead_s) + sum(
            (size / rate for size, rate in zip(carried.tolist(), ports.rates, strict=True)), Fraction(0)
        )
        busy = [rate for size, rate in zip(carried.tolist(), ports.rates, strict=True) if size]
        per_s = lcm(latency_s.denominator, overhead_s.denominator, *{rate.numerator for rate in busy})
        exact = horizon * per_s < _TICKS_MAX
        if not exact:
            per_s = int(_TICKS_MAX / 2 / horizon)
        duration = np.zeros((len(transfers), 2), dtype=np.int64)
        if exact:
            per_byte = np.array(
                [int(per_s / rate) if size else 0 for size, rate in zip(carried, ports.rates, strict=True)]
            )
            duration[used] = transfers.bytes[used, None] * per_byte[ends]
        else:
            per_byte_float = np.array([float(per_s / rate) for rate in ports.rates])
            duration[used] = np.rint(transfers.bytes[used, None] * per_byte_float[ends]).astype(np.int64)
        duration[used] = np.maximum(duration[used], 1)
        overhead = round(overhead_s * per_s)
        duration[used, 0] += overhead
        out_duration, in_duration = duration.T.copy()
        return cls(per_s, round(latency_s * per_s), overhead, out_duration, in_duration)


class _Net(NamedTuple):
    """The constraints, and the queues of those transfers that wait for the clock.

    Event 2t: transfer t is sent; event 2t + 1: it is done. Gate 2t: it may start; gate 2t + 1: it may be done.
    `gates[first[e]:first[e + 1]]` are the gates that wait for event e, `missing[g]` counts the events that gate g still
    waits for, `opened_by[g]` is the last of them. `tail` holds the ends of the queues and how many transfers are done.
    """

    first: Column
    gates: Column
    missing: Column
    opened_by: Column
    pair: Column
    local: npt.NDArray[np.bool_]
    stack: Column
    fresh: Column
    arriving: Column
    leaving: Column
    tail: Column


def _net(transfers: Transfers, edges: Edges, ports: _Ports) -> _Net:
    n = len(transfers)
    missing = np.zeros(2 * n, dtype=np.int64)
    missing[1::2] = 1  # its own bytes
    first = np.zeros(2 * n + 1, dtype=np.int64)
    gates = np.empty(len(edges), dtype=np.int64)
    _kernels().index_edges(edges.before, edges.after, edges.kind, first, gates, missing)
    return _Net(
        first,
        gates,
        missing,
        np.full(2 * n, -1, dtype=np.int64),
        ports.pair,
        transfers.src == transfers.dst,
        np.empty(2 * n, dtype=np.int64),
        np.empty(n, dtype=np.int64),
        np.empty(n, dtype=np.int64),
        np.empty(n, dtype=np.int64),
        np.zeros(4, dtype=np.int64),
    )


def _seconds(times: Times, per_s: int) -> npt.NDArray[np.float64]:
    seconds: npt.NDArray[np.float64] = times / float(per_s)
    seconds.setflags(write=False)
    return seconds


def _turns(plan: Plan) -> Column:
    """For each transfer its place in its receive lane."""
    turn = np.zeros(len(plan.transfers), dtype=np.int64)
    receives = np.flatnonzero(plan.in_channel >= 0)
    turn[plan.recv_transfer[receives]] = receives - plan.lanes.starts[plan.instruction_lane[receives]]
    return turn


def _critical(done: Times, opened_by: Column, landed_after: Column) -> tuple[int, ...]:
    """From the last event back through what opened each gate, then in order of time."""
    n = len(done)
    if n == 0:
        return ()
    event = 2 * int(done.argmax()) + 1
    chain: list[int] = []
    while event >= 0:
        transfer = event - 2 * n if event >= 2 * n else event >> 1
        if not chain or chain[-1] != transfer:
            chain.append(transfer)
        event = int(landed_after[transfer] if event >= 2 * n else opened_by[event])
    return tuple(reversed(chain))


def _refuse(transfers: Transfers, start: Times, done: Times) -> None:
    """Raises PlanError for transfers that wait for each other in a circle."""
    never, verb = np.flatnonzero(start < 0), "start"
    if len(never) == 0:
        never, verb = np.flatnonzero(done < 0), "are done"
    names = ", ".join(transfers.describe(int(index)) for index in never[:_NAMED_MAX])
    more = ", ..." if len(never) > _NAMED_MAX else ""
    raise PlanError(
        f"{len(never)} of {len(transfers)} transfers never {verb}: {names}{more}: they must not wait for each other"
    )


@cache
def _kernels() -> Any:
    """The functions of `_KERNELS` by name, compiled if numba is there."""
    return compiled(_KERNELS, globals())


def _index_edges(before: Column, after: Column, kind: Column, first: Column, gates: Column, missing: Column) -> None:
    """Sorts the edges by event, and counts what each gate waits for."""
    for edge in range(len(kind)):
        first[2 * before[edge] + 1 - (kind[edge] & 1) + 1] += 1
    for event in range(len(first) - 1):
        first[event + 1] += first[event]
    for edge in range(len(kind) - 1, -1, -1):
        event = 2 * before[edge] + 1 - (kind[edge] & 1)
        gate = 2 * after[edge] + (kind[edge] >> 1)
        # From the back: `first[event + 1]` walks down to where the event begins, and is put right below.
        first[event + 1] -= 1
        gates[first[event + 1]] = gate
        missing[gate] += 1
    for event in range(len(first) - 1):
        first[event] = first[event + 1]
    first[len(first) - 1] = len(kind)


def _lane_edges(
    lane_first: Column,
    after_first: Column,
    after: Column,
    send: Column,
    recv: Column,
    local: Column,
    edge_before: Column,
    edge_after: Column,
    edge_kind: Column,
) -> int:
    """Writes the edges of all lanes and returns their number.

    `send`, `recv` and `local` are for each instruction the transfer that it sends, receives or does by itself, or -1.
    In a lane, the sends are a chain, the receives are one and the local operations are one. What instruction i waits
    for is therefore needed once in each chain: at the first member from i on.
    """
    used = 0
    for lane in range(len(lane_first) - 1):
        begin = lane_first[lane]
        for chain in range(3):
            last = -1  # the previous transfer of this chain
            since = begin  # the first instruction whose `after` this chain has not seen
            for index in range(begin, lane_first[lane + 1]):
                transfer = send[index] if chain == 0 else recv[index] if chain == 1 else local[index]
                if transfer < 0:
                    continue
                held = 2 if chain == 1 else 0  # DONE_DONE or DONE_START; bit 0 says that leaving is enough
                if last >= 0:
                    edge_before[used], edge_after[used] = last, transfer
                    edge_kind[used] = held + (1 if chain == 0 else 0)
                    used += 1
                for at in range(after_first[since], after_first[index + 1]):
                    other = after[at]
                    if send[other] >= 0:
                        edge_before[used], edge_kind[used] = send[other], held + 1
                    else:
                        edge_before[used], edge_kind[used] = max(recv[other], local[other]), held
                    edge_after[used] = transfer
                    used += 1
                if chain == 0 and recv[index] >= 0:
                    edge_before[used], edge_after[used], edge_kind[used] = recv[index], transfer, 0
                    used += 1
                last = transfer
                since = index + 1
    return used


def _open_gate(net: _Net, gate: int, event: int, depth: int) -> int:
    """One event fewer that `gate` waits for; an open gate goes on the stack, whose new depth is returned."""
    net.missing[gate] -= 1
    net.opened_by[gate] = event
    if net.missing[gate] == 0:
        net.stack[depth] = gate
        depth += 1
    return depth


def _fire(net: _Net, event: int, depth: int) -> int:
    """Tells every gate that waits for `event`."""
    for at in range(net.first[event], net.first[event + 1]):
        depth = _open_gate(net, net.gates[at], event, depth)
    return depth


def _leave(net: _Net, transfer: int, now: Any, latency: Any, sent: Times, depth: int) -> int:
    """The last byte of `transfer` has left."""
    sent[transfer] = now
    depth = _fire(net, 2 * transfer, depth)
    if latency == 0 or net.local[transfer]:
        return _open_gate(net, 2 * transfer + 1, 2 * transfer, depth)
    net.arriving[net.tail[_ARRIVING]] = transfer
    net.tail[_ARRIVING] += 1
    return depth


def _land(net: _Net, transfer: int, now: int, latency: int, landed: Column, depth: int) -> int:
    """The last byte of `transfer` is through its in port."""
    landed[transfer] = now
    if latency == 0:
        return _open_gate(net, 2 * transfer + 1, 2 * len(landed) + transfer, depth)
    net.arriving[net.tail[_ARRIVING]] = transfer
    net.tail[_ARRIVING] += 1
    return depth


def _settle(
    net: _Net, depth: int, now: Any, latency: Any, overhead: Any, start: Times, sent: Times, done: Times
) -> None:
    """All that follows at `now` from the open gates on the stack; transfers that want ports are left in `fresh`."""
    while depth:
        depth -= 1
        gate = net.stack[depth]
        transfer = gate >> 1
        if gate & 1:
            done[transfer] = now
            net.tail[_FINISHED] += 1
            depth = _fire(net, gate, depth)
        elif net.pair[transfer] >= 0:
            net.fresh[net.tail[_FRESH]] = transfer
            net.tail[_FRESH] += 1
        else:
            start[transfer] = now
            if overhead == 0 or net.local[transfer]:
                depth = _leave(net, transfer, now, latency, sent, depth)
            else:
                net.leaving[net.tail[_LEAVING]] = transfer
                net.tail[_LEAVING] += 1


def _seed(net: _Net) -> int:
    """Puts on the stack what waits for nothing."""
    depth = 0
    for transfer in range(len(net.pair)):
        if net.missing[2 * transfer] == 0:
            net.stack[depth] = 2 * transfer
            depth += 1
    return depth


def _link(lists: _Lists, pair: int) -> None:
    """Adds `pair` to the lists of its two ports."""
    for side in range(2):
        port = lists.ends[2 * pair + side]
        at = lists.first[port] + lists.filled[port]
        lists.members[at] = pair
        lists.place[2 * pair + side] = at
        lists.filled[port] += 1


def _unlink(lists: _Lists, pair: int) -> None:
    """Takes `pair` out of the lists of its two ports."""
    for side in range(2):
        port = lists.ends[2 * pair + side]
        lists.filled[port] -= 1
        moved = lists.members[lists.first[port] + lists.filled[port]]
        at = lists.place[2 * pair + side]
        lists.members[at] = moved
        lists.place[2 * moved + side] = at


def _sift(heap: Column, position: Column, key: Times, size: int, at: int) -> None:
    """Moves the entry at `at` to its place in a binary heap of `size`; `position[heap[at]] == at` throughout."""
    item = heap[at]
    while at > 0 and key[item] < key[heap[(at - 1) >> 1]]:
        heap[at] = heap[(at - 1) >> 1]
        position[heap[at]] = at
        at = (at - 1) >> 1
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and key[heap[child + 1]] < key[heap[child]]:
            child += 1
        if key[item] <= key[heap[child]]:
            break
        heap[at] = heap[child]
        position[heap[at]] = at
        at = child
    heap[at] = item
    position[item] = at


def _remove(heap: Column, position: Column, key: Times, size: int, item: int) -> int:
    """Takes `item` out of the heap and returns its new size."""
    at = position[item]
    position[item] = -1
    size -= 1
    if at < size:
        heap[at] = heap[size]
        position[heap[at]] = at
        _sift(heap, position, key, size, at)
    return size


def _run_exclusive(
    net: _Net,
    lists: _Lists,
    duration: Column,
    latency: int,
    overhead: int,
    start: Column,
    sent: Column,
    done: Column,
) -> None:
    """Ports serve one transfer at a time. Whenever a port becomes free or a transfer ready, those that wait are looked
    at in the order in which they became ready (ties by index), and each whose two ports are free starts.

    Transfers of one pair queue behind each other, so only the heads of the queues need looking at.
    """
    n, pairs, n_ports = len(start), len(lists.ends) // 2, len(lists.filled)
    head, back = np.full(pairs, -1, dtype=np.int64), np.full(pairs, -1, dtype=np.int64)
    behind, ready = np.full(n, -1, dtype=np.int64), np.zeros(n, dtype=np.int64)
    ticket, holder_of = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    holder, previous = np.full(n_ports, -1, dtype=np.int64), np.full(n_ports, -1, dtype=np.int64)
    freed, n_freed = np.zeros(n_ports, dtype=np.int64), 0
    wanted = np.zeros(3 * pairs, dtype=np.int64)
    heap, position, key = np.zeros(pairs, dtype=np.int64), np.full(pairs, -1, dtype=np.int64), np.zeros(pairs, np.int64)
    size, tickets, arrived, left, now = 0, 0, 0, 0, 0
    depth = _seed(net)
    while True:
        _settle(net, depth, now, latency, overhead, start, sent, done)
        depth = 0
        n_wanted = 0
        n_fresh = net.tail[_FRESH]
        net.tail[_FRESH] = 0
        if n_fresh > 1:
            net.fresh[:n_fresh].sort()
        for at in range(n_fresh):
            transfer = net.fresh[at]
            pair = net.pair[transfer]
            ready[transfer] = now
            ticket[transfer] = tickets
            holder_of[tickets] = transfer
            tickets += 1
            if head[pair] < 0:
                head[pair] = transfer
                _link(lists, pair)
                if holder[lists.ends[2 * pair]] < 0 and holder[lists.ends[2 * pair + 1]] < 0:
                    wanted[n_wanted] = ticket[transfer]
                    n_wanted += 1
            else:
                behind[back[pair]] = transfer
            back[pair] = transfer
        for at in range(n_freed):
            port = freed[at]
            for place in range(lists.first[port], lists.first[port] + lists.filled[port]):
                pair = lists.members[place]
                if holder[lists.ends[2 * pair]] < 0 and holder[lists.ends[2 * pair + 1]] < 0:
                    wanted[n_wanted] = ticket[head[pair]]
                    n_wanted += 1
        n_freed = 0
        if n_wanted > 1:
            wanted[:n_wanted].sort()
        for at in range(n_wanted):
            transfer = holder_of[wanted[at]]
            pair = net.pair[transfer]
            out, in_ = lists.ends[2 * pair], lists.ends[2 * pair + 1]
            if holder[out] >= 0 or holder[in_] >= 0:
                continue
            start[transfer] = now
            if ready[transfer] < now:  # it waited for a port, and for the one that became free last
                last = previous[out]
                if last < 0 or sent[last] != now:
                    last = previous[in_]
                net.opened_by[2 * transfer] = 2 * last
            holder[out] = transfer
            holder[in_] = transfer
            head[pair] = behind[transfer]
            if head[pair] < 0:
                _unlink(lists, pair)
            heap[size] = pair
            key[pair] = now + duration[transfer]
            size += 1
            _sift(heap, position, key, size, size - 1)
        later = -1
        if size:
            later = key[heap[0]]
        if arrived < net.tail[_ARRIVING] and (later < 0 or sent[net.arriving[arrived]] + latency < later):
            later = sent[net.arriving[arrived]] + latency
        if left < net.tail[_LEAVING] and (later < 0 or start[net.leaving[left]] + overhead < later):
            later = start[net.leaving[left]] + overhead
        if later < 0:
            return
        now = later
        while arrived < net.tail[_ARRIVING] and sent[net.arriving[arrived]] + latency == now:
            transfer = net.arriving[arrived]
            arrived += 1
            depth = _open_gate(net, 2 * transfer + 1, 2 * transfer, depth)
        while left < net.tail[_LEAVING] and start[net.leaving[left]] + overhead == now:
            depth = _leave(net, net.leaving[left], now, latency, sent, depth)
            left += 1
        while size and key[heap[0]] == now:
            pair = heap[0]
            size = _remove(heap, position, key, size, pair)
            transfer = holder[lists.ends[2 * pair]]
            for side in range(2):
                port = lists.ends[2 * pair + side]
                holder[port] = -1
                previous[port] = transfer
                freed[n_freed] = port
                n_freed += 1
            depth = _leave(net, transfer, now, latency, sent, depth)


def _rise(heap: Column, position: Column, key: Times, size: int, port: int, time: int) -> int:
    """`port` has its next event at `time`; the new size of the heap."""
    key[port] = time
    heap[size] = port
    _sift(heap, position, key, size + 1, size)
    return size + 1


def _run_fifo(
    net: _Net,
    lists: _Lists,
    out_duration: Column,
    in_duration: Column,
    latency: int,
    overhead: int,
    start: Column,
    sent: Column,
    taken: Column,
    done: Column,
    landed_after: Column,
    turn: Column,
) -> None:
    """Each port has a queue and serves it one at a time: an out port what became ready, in that order, an in port what
    has come far enough to be taken at the in port's rate without a pause, by `turn` (ties by time, then index).

    An in port that is slower than the out port takes a message from its first byte on; one that is faster so late that
    both are through with the last byte at the same time. `landed_after[t]` is the event without which transfer t would
    have been through its in port earlier: 2t, or 2n + u if transfer u held the port.
    """
    n, n_ports = len(start), len(lists.filled)
    serves, head, back = np.full(n_ports, -1, np.int64), np.full(n_ports, -1, np.int64), np.full(n_ports, -1, np.int64)
    previous = np.full(n_ports, -1, dtype=np.int64)
    behind, ready, landed = np.full(n, -1, dtype=np.int64), np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    has_come = np.zeros(n_ports, dtype=np.bool_)  # what an out port serves is in its in port's queue
    idle, n_idle = np.zeros(2 * n_ports, dtype=np.int64), 0  # out ports that may start something
    coming, n_coming, came = np.zeros(n_ports, dtype=np.int64), 0, np.zeros(n, dtype=np.int64)
    free, n_free = np.zeros(2 * n_ports, dtype=np.int64), 0  # in ports that may take something
    heap, position, key = np.zeros(n_ports, np.int64), np.full(n_ports, -1, np.int64), np.zeros(n_ports, np.int64)
    size, arrived, known, left, now = 0, 0, 0, 0, 0
    depth = _seed(net)
    while True:
        _settle(net, depth, now, latency, overhead, start, sent, done)
        depth = 0
        for at in range(known, net.tail[_ARRIVING]):  # through no port
            landed[net.arriving[at]] = now
            taken[net.arriving[at]] = now
        n_fresh = net.tail[_FRESH]
        net.tail[_FRESH] = 0
        if n_fresh > 1:
            net.fresh[:n_fresh].sort()
        for at in range(n_fresh):
            transfer = net.fresh[at]
            ready[transfer] = now
            out = lists.ends[2 * net.pair[transfer]]
            if head[out] >= 0:
                behind[back[out]] = transfer
            else:
                head[out] = transfer
                if serves[out] < 0:
                    idle[n_idle] = out
                    n_idle += 1
            back[out] = transfer
        for at in range(n_idle):
            out = idle[at]
            transfer = head[out]
            if transfer < 0 or serves[out] >= 0:
                continue
            head[out] = behind[transfer]
            serves[out] = transfer
            start[transfer] = now
            if ready[transfer] < now:
                net.opened_by[2 * transfer] = 2 * previous[out]
            ends = now + out_duration[transfer]
            comes = max(now + overhead, ends - in_duration[transfer])
            has_come[out] = comes == now
            if has_come[out]:
                coming[n_coming] = transfer
                n_coming += 1
            size = _rise(heap, position, key, size, out, ends if has_come[out] else comes)
        n_idle = 0
        if n_coming > 1:
            coming[:n_coming].sort()
        for at in range(n_coming):
            transfer = coming[at]
            came[transfer] = now
            in_ = lists.ends[2 * net.pair[transfer] + 1]
            before, after = -1, head[in_]
            while after >= 0 and turn[after] <= turn[transfer]:
                before, after = after, behind[after]
            behind[transfer] = after
            if before < 0:
                head[in_] = transfer
            else:
                behind[before] = transfer
            free[n_free] = in_
            n_free += 1
        for at in range(n_free):
            in_ = free[at]
            transfer = head[in_]
            if transfer < 0 or serves[in_] >= 0:
                continue
            head[in_] = behind[transfer]
            serves[in_] = transfer
            taken[transfer] = now
            if came[transfer] < now:
                landed_after[transfer] = 2 * n + previous[in_]
            size = _rise(heap, position, key, size, in_, now + in_duration[transfer])
        n_free = 0
        n_coming = 0
        later = -1
        if size:
            later = key[heap[0]]
        if arrived < net.tail[_ARRIVING] and (later < 0 or landed[net.arriving[arrived]] + latency < later):
            later = landed[net.arriving[arrived]] + latency
        if left < net.tail[_LEAVING] and (later < 0 or start[net.leaving[left]] + overhead < later):
            later = start[net.leaving[left]] + overhead
        if later < 0:
            return
        now = later
        while arrived < net.tail[_ARRIVING] and landed[net.arriving[arrived]] + latency == now:
            transfer = net.arriving[arrived]
            arrived += 1
            depth = _open_gate(net, 2 * transfer + 1, 2 * n + transfer, depth)
        while left < net.tail[_LEAVING] and start[net.leaving[left]] + overhead == now:
            transfer = net.leaving[left]
            left += 1
            taken[transfer] = now
            sent[transfer] = now
            depth = _fire(net, 2 * transfer, depth)
            depth = _land(net, transfer, now, latency, landed, depth)
        while size and key[heap[0]] == now:
            port = heap[0]
            size = _remove(heap, position, key, size, port)
            transfer = serves[port]
            if lists.ends[2 * net.pair[transfer]] != port:
                serves[port] = -1
                previous[port] = transfer
                free[n_free] = port
                n_free += 1
                depth = _land(net, transfer, now, latency, landed, depth)
                continue
            ends = start[transfer] + out_duration[transfer]
            if not has_come[port]:
                has_come[port] = True
                coming[n_coming] = transfer
                n_coming += 1
                if ends > now:
                    size = _rise(heap, position, key, size, port, ends)
                    continue
            serves[port] = -1
            previous[port] = transfer
            idle[n_idle] = port
            n_idle += 1
            sent[transfer] = now
            depth = _fire(net, 2 * transfer, depth)
        known = net.tail[_ARRIVING]


class _Flows(NamedTuple):
    """What flows, by pair: transfers of one pair have one rate, so one counter serves them all.

    `served` bytes have gone to each transfer of the pair since it last was idle, as of time `since`; a transfer is sent
    when that reaches its `target`. `head` is the transfer with the least target, then along `behind`; `back` the last.
    """

    bytes: npt.NDArray[np.float64]
    target: npt.NDArray[np.float64]
    behind: Column
    ahead: Column
    head: Column
    back: Column
    active: Column
    served: npt.NDArray[np.float64]
    since: npt.NDArray[np.float64]
    rate: npt.NDArray[np.float64]


def _join(flows: _Flows, lists: _Lists, pair: int, transfer: int, now: float) -> None:
    """`transfer` begins to flow. Chunks are mostly of one size, so its place is looked for from the back."""
    if flows.active[pair] == 0:
        flows.served[pair] = 0.0
        flows.rate[pair] = 0.0
        _link(lists, pair)
    else:
        flows.served[pair] += flows.rate[pair] * (now - flows.since[pair])
    flows.since[pair] = now
    flows.active[pair] += 1
    flows.target[transfer] = flows.served[pair] + flows.bytes[transfer]
    before = flows.back[pair]
    while before >= 0 and flows.target[before] > flows.target[transfer]:
        before = flows.ahead[before]
    after = flows.behind[before] if before >= 0 else flows.head[pair]
    flows.ahead[transfer] = before
    flows.behind[transfer] = after
    if before >= 0:
        flows.behind[before] = transfer
    else:
        flows.head[pair] = transfer
    if after >= 0:
        flows.ahead[after] = transfer
    else:
        flows.back[pair] = transfer


class _Scratch(NamedTuple):
    """Working space of the fair model.

    At `dirty` ports (marked in `is_dirty`) something changed. `reached` (marked in `seen`) are the ports that have
    been looked at for it, `pairs` what flows through them, `level` its new rate. `free` is what a port has left for
    those `weight` transfers whose rate is not fixed yet.
    """

    dirty: Column
    is_dirty: npt.NDArray[np.bool_]
    reached: Column
    seen: npt.NDArray[np.bool_]
    free: npt.NDArray[np.float64]
    weight: Column
    pairs: Column
    level: npt.NDArray[np.float64]


def _mark(lists: _Lists, scratch: _Scratch, n_dirty: int, pair: int) -> int:
    """Something changed at the two ports of `pair`."""
    for side in range(2):
        port = lists.ends[2 * pair + side]
        if not scratch.is_dirty[port]:
            scratch.is_dirty[port] = True
            scratch.dirty[n_dirty] = port
            n_dirty += 1
    return n_dirty


def _reach(
    flows: _Flows, lists: _Lists, scratch: _Scratch, rates: npt.NDArray[np.float64], begin: int, n_pairs: int
) -> tuple[int, int]:
    """Adds to `reached` and `pairs` all that shares a port, be it through others, with the port `reached[begin]`."""
    end = begin + 1
    at = begin
    while at < end:
        port = scratch.reached[at]
        at += 1
        scratch.free[port] = rates[port]
        scratch.weight[port] = 0
        for place in range(lists.first[port], lists.first[port] + lists.filled[port]):
            pair = lists.members[place]
            scratch.weight[port] += flows.active[pair]
            if lists.ends[2 * pair] == port:
                scratch.pairs[n_pairs] = pair
                scratch.level[pair] = -1.0
                n_pairs += 1
            for side in range(2):
                other = lists.ends[2 * pair + side]
                if not scratch.seen[other]:
                    scratch.seen[other] = True
                    scratch.reached[end] = other
                    end += 1
    return end, n_pairs


def _fill(flows: _Flows, lists: _Lists, scratch: _Scratch, begin: int, end: int, rest: int) -> None:
    """Max-min fair rates of the `rest` pairs at the ports `reached[begin:end]`, by progressive filling.

    The port that can give each of its transfers least is full first; it fixes their rates, and what they take at their
    other port is no longer free there.
    """
    level = 0.0
    while rest:
        full = -1
        least = 0.0
        for at in range(begin, end):
            port = scratch.reached[at]
            if scratch.weight[port] > 0:
                each = scratch.free[port] / scratch.weight[port]
                if full < 0 or each < least:
                    full, least = port, each
        level = max(level, least)  # it rises from port to port, up to rounding
        for place in range(lists.first[full], lists.first[full] + lists.filled[full]):
            pair = lists.members[place]
            if scratch.level[pair] < 0:
                scratch.level[pair] = level
                rest -= 1
                for side in range(2):
                    port = lists.ends[2 * pair + side]
                    scratch.free[port] -= level * flows.active[pair]
                    scratch.weight[port] -= flows.active[pair]


def _share(flows: _Flows, lists: _Lists, scratch: _Scratch, rates: npt.NDArray[np.float64], n_dirty: int) -> int:
    """New rates in `level` for the pairs in `pairs`, whose number is returned."""
    end = 0
    n_pairs = 0
    for at in range(n_dirty):
        port = scratch.dirty[at]
        scratch.is_dirty[port] = False
        if not scratch.seen[port]:
            begin = end
            before = n_pairs
            scratch.seen[port] = True
            scratch.reached[begin] = port
            end, n_pairs = _reach(flows, lists, scratch, rates, begin, before)
            _fill(flows, lists, scratch, begin, end, n_pairs - before)
    for at in range(end):
        scratch.seen[scratch.reached[at]] = False
    return n_pairs


def _run_fair(
    net: _Net,
    lists: _Lists,
    sizes: npt.NDArray[np.float64],
    rates: npt.NDArray[np.float64],
    latency: float,
    overhead: float,
    start: npt.NDArray[np.float64],
    sent: npt.NDArray[np.float64],
    done: npt.NDArray[np.float64],
) -> None:
    """Transfers flow as soon as they are ready, at max-min fair rates, which change when one begins or ends.

    Only the rates of those pairs change that share a port, be it through others, with the one that began or ended.
    """
    n, pairs, n_ports = len(start), len(lists.ends) // 2, len(lists.filled)
    flows = _Flows(
        sizes,
        np.zeros(n),
        np.full(n, -1, dtype=np.int64),
        np.full(n, -1, dtype=np.int64),
        np.full(pairs, -1, dtype=np.int64),
        np.full(pairs, -1, dtype=np.int64),
        np.zeros(pairs, dtype=np.int64),
        np.zeros(pairs),
        np.zeros(pairs),
        np.zeros(pairs),
    )
    scratch = _Scratch(
        np.zeros(n_ports, dtype=np.int64),
        np.zeros(n_ports, dtype=np.bool_),
        np.zeros(n_ports, dtype=np.int64),
        np.zeros(n_ports, dtype=np.bool_),
        np.zeros(n_ports),
        np.zeros(n_ports, dtype=np.int64),
        np.zeros(pairs, dtype=np.int64),
        np.zeros(pairs),
    )
    heap, position, key = np.zeros(pairs, dtype=np.int64), np.full(pairs, -1, dtype=np.int64), np.zeros(pairs)
    size, arrived, left, now = 0, 0, 0, 0.0
    n_dirty = 0
    depth = _seed(net)
    while True:
        _settle(net, depth, now, latency, overhead, start, sent, done)
        depth = 0
        for at in range(net.tail[_FRESH]):
            transfer = net.fresh[at]
            start[transfer] = now
            if overhead > 0:
                net.leaving[net.tail[_LEAVING]] = transfer
                net.tail[_LEAVING] += 1
            else:
                _join(flows, lists, net.pair[transfer], transfer, now)
                n_dirty = _mark(lists, scratch, n_dirty, net.pair[transfer])
        net.tail[_FRESH] = 0
        n_changed = _share(flows, lists, scratch, rates, n_dirty)
        n_dirty = 0
        for at in range(n_changed):
            pair = scratch.pairs[at]
            if flows.rate[pair] != scratch.level[pair]:
                flows.served[pair] += flows.rate[pair] * (now - flows.since[pair])
                flows.since[pair] = now
                flows.rate[pair] = scratch.level[pair]
            rest = flows.target[flows.head[pair]] - flows.served[pair]
            key[pair] = flows.since[pair] + rest / flows.rate[pair]
            if position[pair] < 0:
                heap[size] = pair
                position[pair] = size
                size += 1
            _sift(heap, position, key, size, position[pair])
        later = np.inf
        if size:
            later = max(key[heap[0]], now)
        if arrived < net.tail[_ARRIVING]:
            later = min(later, sent[net.arriving[arrived]] + latency)
        if left < net.tail[_LEAVING]:
            later = min(later, start[net.leaving[left]] + overhead)
        if later == np.inf:
            return
        now = later
        while arrived < net.tail[_ARRIVING] and sent[net.arriving[arrived]] + latency <= now:
            transfer = net.arriving[arrived]
            arrived += 1
            depth = _open_gate(net, 2 * transfer + 1, 2 * transfer, depth)
        while left < net.tail[_LEAVING] and start[net.leaving[left]] + overhead <= now:
            transfer = net.leaving[left]
            left += 1
            if net.pair[transfer] >= 0:
                _join(flows, lists, net.pair[transfer], transfer, now)
                n_dirty = _mark(lists, scratch, n_dirty, net.pair[transfer])
            else:
                depth = _leave(net, transfer, now, latency, sent, depth)
        while size and key[heap[0]] <= now * (1 + _TOLERANCE):
            pair = heap[0]
            n_dirty = _mark(lists, scratch, n_dirty, pair)
            flows.served[pair] = flows.target[flows.head[pair]]
            flows.since[pair] = now
            reach = flows.served[pair] * (1 + _TOLERANCE)
            while flows.head[pair] >= 0 and flows.target[flows.head[pair]] <= reach:
                transfer = flows.head[pair]
                flows.head[pair] = flows.behind[transfer]
                flows.active[pair] -= 1
                depth = _leave(net, transfer, now, latency, sent, depth)
            if flows.head[pair] < 0:
                flows.back[pair] = -1
                _unlink(lists, pair)
                size = _remove(heap, position, key, size, pair)
            else:
                flows.ahead[flows.head[pair]] = -1
                key[pair] = now + (flows.target[flows.head[pair]] - flows.served[pair]) / flows.rate[pair]
                _sift(heap, position, key, size, 0)


_KERNELS: tuple[Callable[..., Any], ...] = (
    _index_edges,
    _lane_edges,
    _open_gate,
    _fire,
    _leave,
    _land,
    _settle,
    _seed,
    _link,
    _unlink,
    _sift,
    _remove,
    _rise,
    _run_exclusive,
    _run_fifo,
    _join,
    _mark,
    _reach,
    _fill,
    _share,
    _run_fair,
)
