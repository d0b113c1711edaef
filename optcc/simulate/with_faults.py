"""A run with faults: the same plan with more and more of them, and the turn to a second plan."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np

from optcc.arrays import Column
from optcc.faults import FaultPlan
from optcc.plan import Plan
from optcc.simulate.ports import Ports
from optcc.simulate.rates import Change
from optcc.simulate.recovery import Policy, message_bytes, opening, port_changes, without
from optcc.simulate.run import Model, Network, run_once
from optcc.timing import FaultCost, Recovery, Timing
from optcc.topology import Topology
from optcc.transfers import Transfers


def run_with_faults(
    plan: Plan | Transfers, network: Network, topology: Topology, model: Model, faults: FaultPlan, policy: Policy
) -> Timing:
    """The times with all faults, and what each adds to those before it: as many runs as there are faults, and one."""
    runs = [run_once(plan, network, model)]
    runs += [
        _run_with(plan, network, topology, model, faults.first(count), policy) for count in range(1, len(faults) + 1)
    ]
    costs = tuple(
        FaultCost(str(fault), after.seconds - before.seconds)
        for fault, (before, after) in zip(faults, pairwise(runs), strict=True)
    )
    last = runs[-1].recovery
    kept, second = (None, None) if last is None else (last.kept, last.second)
    return replace(runs[-1], recovery=Recovery(policy.name, runs[0].seconds, costs, kept, second))


def _run_with(
    plan: Plan | Transfers, network: Network, topology: Topology, model: Model, faults: FaultPlan, policy: Policy
) -> Timing:
    changes = _noisy(port_changes(network.ports, topology, faults, policy), network)
    timing = run_once(plan, replace(network, changes=changes), model)
    if policy.new_plan is None:
        return timing
    transfers = plan.transfers if isinstance(plan, Plan) else plan
    switch_s = policy.switch_s(faults)
    begun = np.unique(transfers.segment[timing.start_s <= float(switch_s)])
    is_kept = np.isin(transfers.segment, begun)
    dropped = np.flatnonzero(~is_kept)
    if len(dropped) == 0:
        return timing
    kept = np.flatnonzero(is_kept)
    rest = without(plan, dropped)
    first = run_once(rest, replace(_of(network, kept), changes=changes), model)
    following = policy.new_plan(faults.left(topology, switch_s), message_bytes(transfers, dropped))
    opens = _through(rest, first, network.ports, network.latency_s)
    shifted = [replace(each, at_s=each.at_s - switch_s) for each in changes]
    opens_s = [max(Fraction(0), Fraction(at) - switch_s) for at in opens]
    later = replace(
        network,
        rates=(Fraction(0),) * len(network.rates),
        changes=opening(network.rates, shifted, opens_s),
        more_latency_s=None,
    )
    second = _shift(run_once(following, later, model), float(switch_s))
    return replace(first, recovery=Recovery(policy.name, 0.0, (), kept, second))


def _noisy(changes: tuple[Change, ...], network: Network) -> tuple[Change, ...]:
    """The changes with the noise that the ports have."""
    return tuple(
        replace(each, rate=each.rate * network.rates[each.port] / network.ports.rates[each.port]) for each in changes
    )


def _of(network: Network, kept: Column) -> Network:
    more = network.more_latency_s
    return network if more is None else replace(network, more_latency_s=more[kept])


def _through(plan: Plan | Transfers, timing: Timing, ports: Ports, latency_s: Fraction) -> list[float]:
    """For each port, when it is through with the transfers of `plan`."""
    transfers = plan.transfers if isinstance(plan, Plan) else plan
    opens = np.zeros(len(ports.names))
    out, in_ = ports.used_by(transfers)
    used = out >= 0
    np.maximum.at(opens, out[used], timing.sent_s[used])
    np.maximum.at(opens, in_[used], timing.end_s[used] - float(latency_s))
    return [float(each) for each in opens]


def _shift(timing: Timing, by_s: float) -> Timing:
    columns = {name: getattr(timing, name) + by_s for name in ("start_s", "sent_s", "taken_s", "end_s")}
    for each in columns.values():
        each.setflags(write=False)
    return replace(timing, **columns)
