"""Rail-only networks whose servers kept different rails: every transfer is striped over the rails that both ends share.

The NICs of a server on one rail form a pair of ports. The stripes of a transfer start together and carry bytes in
proportion to the rate of each rail between the two servers (the smaller of the sending and the receiving rate there).
The transfer is sent, or done, when all its stripes are. So a busy rail delays the whole transfer, as it does where a
channel spreads its chunks over rails by fixed weights. If all servers keep the same rails, `simulate` pools their NICs
instead: the same times with fewer events.

Each stripe is modelled as a transfer between ranks of a larger cluster, which has a rank for every rank and rail, and
`slot` 0 for transfers inside a server. A local operation there, which takes no time, marks that all stripes of a
transfer are sent, or done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby, pairwise
from math import floor

import numpy as np

from optcc.arrays import Column, column
from optcc.errors import TopologyError
from optcc.faults import FaultPlan
from optcc.plan import Plan
from optcc.simulate.constraints import DONE_START, SENT_START, Constraints, plan_constraints, transfer_constraints
from optcc.simulate.dependencies import DONE, SENT, START, TAKEN
from optcc.simulate.ports import PortMap
from optcc.simulate.recovery import WAYS, Policy, changes_of
from optcc.simulate.run import (
    DependencyGraph,
    PortNetwork,
    check_finished,
    graph_of_constraints,
    graph_of_plan,
    run_graph,
    timing_of,
)
from optcc.simulate.tick_clock import Change
from optcc.simulate.with_faults import with_costs
from optcc.timing import Model, Timing
from optcc.topology import Server, Topology
from optcc.transfers import Transfers


def keep_different_rails(topology: Topology) -> bool:
    """True if rails need separate ports: servers keep different ones, or each rail has its own uplink. The rails of
    GPUs that are linked are links of a graph."""
    if topology.wired is not None:
        return False
    return topology.rail_only and (len(topology.rails_kept) > 1 or bool(topology.pods))


def run_rails_with_faults(
    plan: Plan | Transfers, topology: Topology, overhead_s: Fraction, model: Model, faults: FaultPlan, policy: Policy
) -> Timing:
    """`run_striped` with `faults`, and the time that each fault adds to those before it.

    Stripes keep their rails and their shares of the bytes: a slower NIC delays the stripes on its rail, and a NIC that
    is down stops them until it is up again.

    Raises TopologyError if a NIC is down and `policy` would have to move its stripes to other rails while they are in
    flight; and what `run_striped` raises.
    """
    for fault in faults:
        if fault.share == 0 and policy.name != "wait":
            raise TopologyError(
                f"fault {fault}: the topology is rail-only and the policy {policy.name}: must be wait, since stripes "
                "that are under way do not move to another rail"
            )
    if policy.name == "replan":
        raise TopologyError("policy replan on a rail-only topology: not modelled: must be wait or migrate")

    def run(some: FaultPlan) -> Timing:
        return run_striped(plan, topology, overhead_s, model, _rail_changes(topology, some, policy))

    return with_costs(run, faults, policy)


def _rail_changes(topology: Topology, faults: FaultPlan, policy: Policy) -> list[Change]:
    """The rate changes of the rails' ports that `faults` cause, in order of time."""
    ports, slots = _rail_ports(topology)
    changes: list[Change] = []
    for server, slot, rail in (
        (s, slot, rail) for s in {each.server for each in faults} for rail, slot in slots.items()
    ):
        numbers = [number for number, nic in enumerate(topology.servers[server].nics) if nic.rail == rail]
        port = int(ports.server_port[server * (len(slots) + 1) + slot])
        for side, way in enumerate(WAYS):
            if port >= 0:
                changes += changes_of(port + side, server, numbers, way, topology, faults, policy)
    return sorted(changes, key=lambda each: (each.at_s, each.port))


def run_striped(
    plan: Plan | Transfers, topology: Topology, overhead_s: Fraction, model: Model, changes: Sequence[Change] = ()
) -> Timing:
    """The times of all transfers of `plan`, striped over the rails that their servers share, with these rate `changes`.

    Raises TopologyError for a transfer between servers that share no rail, and what `optcc.simulate.run.run_once`
    raises.
    """
    transfers = plan.transfers if isinstance(plan, Plan) else plan
    ports, slots = _rail_ports(topology)
    stripes = _Stripes.of(transfers, topology, slots)
    constraints = plan_constraints(plan) if isinstance(plan, Plan) else transfer_constraints(plan)
    turn = graph_of_plan(plan).turn[stripes.owner]
    graph: DependencyGraph = graph_of_constraints(
        stripes.src, stripes.dst, stripes.sizes, stripes.constraints(constraints), turn
    )
    result = run_graph(graph, PortNetwork(ports, ports.rates, topology.latency_s, overhead_s, changes), model)
    check_finished(transfers, graph.rows[stripes.is_done], result.down)
    seconds = np.empty((4, len(transfers)))
    n_stripes = int(stripes.count.sum())
    for moment, pick in ((START, np.minimum), (SENT, np.maximum), (TAKEN, np.minimum)):
        seconds[moment] = pick.reduceat(result.seconds[moment, :n_stripes], stripes.first) if len(transfers) else 0
    seconds[DONE] = result.seconds[DONE, stripes.is_done]
    seconds.setflags(write=False)
    critical = tuple(owner for owner, _ in groupby(int(stripes.owner[node]) for node in result.critical))
    return timing_of(result, seconds, critical, ports, model)


def _rail_ports(topology: Topology) -> tuple[PortMap, dict[int, int]]:
    """The ports, and for each rail its slot: rank r on that rail is rank `r * (rails + 1) + slot`."""
    rails = sorted({nic.rail for server in topology.servers for nic in server.nics})
    slots = {rail: 1 + index for index, rail in enumerate(rails)}
    width = len(rails) + 1
    names: list[str] = []
    rates: list[Fraction] = []
    server_port = np.full(len(topology.servers) * width, -1, dtype=np.int64)
    gpu_port = np.full(topology.n_ranks * width, -1, dtype=np.int64)
    rank = 0
    for index, server in enumerate(topology.servers):
        for rail, slot in slots.items():
            out, in_ = _on_rail(server, rail)
            if out:
                server_port[index * width + slot] = len(names)
                names += [f"out {server.name} rail {rail}", f"in {server.name} rail {rail}"]
                rates += [out, in_]
        for gpu in range(server.gpus):
            if server.fabric is not None:
                gpu_port[rank * width] = len(names)
                names += [f"out {server.name} gpu {gpu}", f"in {server.name} gpu {gpu}"]
                rates += [server.fabric, server.fabric]
            rank += 1
    pod_port = np.full(len(topology.servers) * width, -1, dtype=np.int64)
    for pod in topology.pods:
        for rail, slot in slots.items():
            pod_port[np.array(pod.servers) * width + slot] = len(names)
            names += [f"up {pod.name} rail {rail}", f"down {pod.name} rail {rail}"]
            rates += [pod.up, pod.down]
    server_of = np.array(topology.rank_server)[:, None] * width + np.arange(width)
    return PortMap(tuple(names), tuple(rates), server_of.ravel(), server_port, gpu_port, pod_port), slots


def _on_rail(server: Server, rail: int) -> tuple[Fraction, Fraction]:
    """The total sending and receiving rate of the surviving NICs of `server` on `rail`, bytes/s."""
    nics = [nic for nic in server.nics if nic.rail == rail and not nic.failed]
    return sum((nic.out for nic in nics), Fraction(0)), sum((nic.in_ for nic in nics), Fraction(0))


@dataclass(frozen=True, slots=True, eq=False)
class _Stripes:
    """The stripes of all transfers, in order of the transfers, then two local operations for each transfer with several
    stripes: one marks that all are sent, one that all are done.

    The stripes of transfer t are nodes `first[t]` up to `first[t] + count[t]`; `is_sent[t]` and `is_done[t]` are those
    operations, or the stripe itself if there is only one.
    """

    src: Column
    dst: Column
    sizes: Column
    owner: Column
    first: Column
    count: Column
    is_sent: Column
    is_done: Column

    @classmethod
    def of(cls, transfers: Transfers, topology: Topology, slots: dict[int, int]) -> _Stripes:
        width = len(slots) + 1
        weights: dict[tuple[int, int], dict[int, Fraction]] = {}
        server_of = topology.rank_server
        rows: list[tuple[int, int, int, int]] = []
        first: list[int] = []
        for t, (src, dst, size) in enumerate(
            zip(transfers.src.tolist(), transfers.dst.tolist(), transfers.bytes.tolist(), strict=True)
        ):
            first.append(len(rows))
            a, b = server_of[src], server_of[dst]
            if a == b:
                rows.append((src * width, dst * width, size, t))
                continue
            if (a, b) not in weights:
                weights[a, b] = _weights(topology.servers[a], topology.servers[b], slots)
            if not weights[a, b]:
                names = f"{topology.servers[a].name} and {topology.servers[b].name}"
                raise TopologyError(f"transfer {transfers.describe(t)}: {names} share no surviving rail")
            parts = divide(size, list(weights[a, b].values()))
            for slot, part in zip(weights[a, b], parts, strict=True):
                if part:
                    rows.append((src * width + slot, dst * width + slot, part, t))
        begins = np.array(first, dtype=np.int64)
        count = np.diff(np.append(begins, len(rows)))
        split = np.flatnonzero(count > 1)
        is_sent, is_done = begins.copy(), begins.copy()
        is_sent[split] = len(rows) + 2 * np.arange(len(split))
        is_done[split] = is_sent[split] + 1
        local = transfers.src[split] * width
        rows += [(rank, rank, 1, int(t)) for rank, t in zip(local.tolist(), split.tolist(), strict=True) for _ in "sd"]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        return cls(*(column(each) for each in (*columns, begins, count, is_sent, is_done)))

    def constraints(self, constraints: Constraints) -> Constraints:
        """`constraints` between transfers, as constraints between their stripes."""
        split = self.count > 1
        before_sent, holds_done = (constraints.kind & 1) == 1, constraints.kind >= 2
        before = np.where(before_sent, self.is_sent[constraints.before], self.is_done[constraints.before])
        # The operation that marks all stripes as sent, or done, is local: its event is that it is done.
        kind = (
            constraints.kind - (before_sent & split[constraints.before]) - 2 * (holds_done & split[constraints.after])
        )
        to_all = ~holds_done & split[constraints.after]
        after = np.where(holds_done, self.is_done[constraints.after], self.first[constraints.after])
        copies = np.where(to_all, self.count[constraints.after], 1)
        place = np.arange(int(copies.sum())) - np.repeat(np.cumsum(copies) - copies, copies)
        own = np.flatnonzero(split[self.owner] & (np.arange(len(self.owner)) < int(self.count.sum())))
        owner = self.owner[own]
        kinds = np.repeat([SENT_START, DONE_START], len(own))
        return Constraints(
            len(self.owner),
            column(np.concatenate((np.repeat(before, copies), own, own))),
            column(np.concatenate((np.repeat(after, copies) + place, self.is_sent[owner], self.is_done[owner]))),
            column(np.concatenate((np.repeat(kind, copies), kinds))),
            np.concatenate((np.repeat(constraints.is_credit, copies), np.zeros(len(kinds), dtype=np.bool_))),
        )


def _weights(src: Server, dst: Server, slots: dict[int, int]) -> dict[int, Fraction]:
    """For each slot whose rail both servers keep, the highest rate from `src` to `dst` there, bytes/s."""
    rates = {slot: min(_on_rail(src, rail)[0], _on_rail(dst, rail)[1]) for rail, slot in slots.items()}
    return {slot: rate for slot, rate in rates.items() if rate}


def divide(size: int, weights: list[Fraction]) -> list[int]:
    """`size` bytes in proportion to `weights`, rounded so that the sum is exact and each part within a byte.

    >>> divide(10, [Fraction(1), Fraction(1), Fraction(2)])
    [2, 3, 5]
    """
    total, done = sum(weights, Fraction(0)), Fraction(0)
    ends = [0]
    for weight in weights:
        done += weight
        ends.append(floor(size * done / total))
    return [end - begin for begin, end in pairwise(ends)]
