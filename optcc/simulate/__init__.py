"""Times a plan on a topology: ports with rates, a latency, and two ways in which transfers share a port.

A transfer between servers goes through the out port of one server and the in port of the other, its surviving NICs
pooled. Inside a server it goes through the fabric ports of two GPUs, or through no port at all if the fabric is never
the bottleneck. A local operation (src = dst) takes no time. On a rail-only network whose servers kept different rails,
a transfer is striped over those that both its servers have (`optcc.simulate.rails`). Where NICs belong to GPUs, or the
topology is a graph, a transfer goes through the links of its route: a GPU's fabric and its NIC work at the same time,
and what leaves through another GPU's NIC goes there first, as a transfer of its own.

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

The order is given by `Constraints` between transfers, derived from a plan's instructions by `plan_constraints` or from
neutral `Transfers` by `transfer_constraints`. Two things happen to a transfer: its last byte leaves (it is *sent*), and
`latency_s` later, or when the receiver is ready for it, it is *done*.

Under fifo and exclusive the clock is an integer. Its tick divides every duration if 64 bits suffice for that, so that a
tie is a tie; else durations are rounded to a tick of 2**-61 of the time that all transfers would take one after the
other. Under fair the clock is a float, in ticks that keep it whole where 53 bits suffice. The inner loops are compiled
by `optcc.compiled`.

    constraints     which transfer waits for which         dependencies   counters of unmet dependencies
    ports           the ports that a transfer uses         tick_clock     ticks, and changes of rates
    event_queue     pending events, earliest first         kernels        all inner loops, compiled together
    fifo, uplinks, exclusive, fair                         the port models
    max_min         rates of fair ports
    run             one run                                with_faults    runs with faults, compared
    recovery        policies                               rails          striping over rails
    jitter          seeded noise
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import isfinite

from optcc.errors import InputError, TopologyError
from optcc.faults import FaultPlan
from optcc.plan import Plan
from optcc.simulate.constraints import (
    DONE_DONE,
    DONE_START,
    SENT_DONE,
    SENT_START,
    Constraints,
    plan_constraints,
    transfer_constraints,
)
from optcc.simulate.jitter import Jitter
from optcc.simulate.ports import PortMap
from optcc.simulate.rails import keep_different_rails, run_rails_with_faults, run_striped
from optcc.simulate.recovery import NewPlan, Policy, PolicyName
from optcc.simulate.run import PortNetwork, run_once
from optcc.simulate.with_faults import run_with_faults
from optcc.timing import MODELS, Model, Timing
from optcc.topology import Topology
from optcc.transfers import Transfers


def simulate(
    plan: Plan | Transfers,
    topology: Topology,
    *,
    model: Model = "fifo",
    overhead_s: float = 0.0,
    faults: FaultPlan | None = None,
    policy: Policy | None = None,
    jitter: Jitter | None = None,
) -> Timing:
    """The predicted time of every transfer of `plan` on `topology`.

    `start_s` is when a transfer takes its out port, `sent_s` when its last byte has left it, `taken_s` when it takes
    its in port, `end_s` when it is done. `overhead_s` is spent by every transfer between two ranks before its first
    byte leaves; unless ports are fair it holds its out port meanwhile. In `critical`, each transfer waited for the one
    before it: for its data, its turn in a lane, a free slot or (unless ports are fair) a port.

    With `faults` the rates of ports change while the plan runs, in the way that `policy` says (`migrate` without any
    cost, if none is given), and the result has a `recovery`. With `jitter` messages and ports are noisy; the run
    without faults, to which the others are compared, is so in the same way.

    Raises InputError for another model or a negative overhead, TopologyError if the topology has another number of
    ranks or a transfer's servers share no rail, if a fault is of a NIC that is not there or would have to move stripes
    from rail to rail, or if a server loses its last NIC and gets none back; PlanError if transfers wait for each other
    in a circle or have no instructions.
    """
    transfers = plan.transfers if isinstance(plan, Plan) else plan
    if model not in MODELS:
        raise InputError(f"model {model!r}: must be one of {', '.join(MODELS)}")
    if not (isfinite(overhead_s) and overhead_s >= 0):
        raise InputError(f"overhead {overhead_s} s: must not be negative")
    if policy is not None and faults is None:
        raise InputError(f"policy {policy.name}: there are no faults to recover from")
    if topology.n_ranks != transfers.n_ranks:
        raise TopologyError(f"topology of {topology.n_ranks} ranks: the plan is for {transfers.n_ranks} ranks")
    if topology.pods and policy is not None and policy.name == "replan":
        raise TopologyError("policy replan and pods: not modelled, both plans would share the uplinks for a while")
    if topology.wired is not None and faults is not None:
        raise TopologyError(f"{topology!r}: faults where NICs belong to GPUs, or of links: not modelled")
    overhead = Fraction(str(overhead_s))
    if keep_different_rails(topology) or (topology.rail_only and faults is not None):
        if jitter is not None:
            raise TopologyError("jitter on a rail-only topology whose rails are apart: not modelled")
        if faults is None:
            return run_striped(plan, topology, overhead, model)
        faults.check(topology)
        return run_rails_with_faults(plan, topology, overhead, model, faults, policy or Policy())
    ports = PortMap.of(topology)
    network = PortNetwork(ports, ports.rates, topology.latency_s, overhead)
    if jitter is not None:
        more = jitter.latencies(len(transfers)) if jitter.latency_s else None
        network = replace(network, rates=jitter.rates(ports.rates), more_latency_s=more)
    if faults is None:
        return run_once(plan, network, model)
    faults.check(topology)
    return run_with_faults(plan, network, topology, model, faults, policy or Policy())


__all__ = [
    "DONE_DONE",
    "DONE_START",
    "MODELS",
    "SENT_DONE",
    "SENT_START",
    "Constraints",
    "Jitter",
    "Model",
    "NewPlan",
    "Policy",
    "PolicyName",
    "plan_constraints",
    "simulate",
    "transfer_constraints",
]
