"""A run with faults: the same plan with more and more of them, and the turn to other plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np

from optcc.arrays import Column
from optcc.faults import FaultPlan
from optcc.plan import Plan
from optcc.simulate.ports import PortMap
from optcc.simulate.recovery import Policy, message_bytes, opening, port_changes, without
from optcc.simulate.run import PortNetwork, run_once
from optcc.simulate.tick_clock import Change
from optcc.timing import FaultCost, Model, Recovery, Timing
from optcc.topology import Topology
from optcc.transfers import Transfers


def run_with_faults(
    plan: Plan | Transfers, network: PortNetwork, topology: Topology, model: Model, faults: FaultPlan, policy: Policy
) -> Timing:
    """The times with all faults, and what each adds to those before it: as many runs as there are faults, and one."""

    def run(some: FaultPlan) -> Timing:
        if len(some) == 0:
            return run_once(plan, network, model)
        return _FaultyRun(network, topology, model, some, policy).follow(plan, None, Fraction(0), policy.switches(some))

    return with_costs(run, faults, policy)


def with_costs(run: Callable[[FaultPlan], Timing], faults: FaultPlan, policy: Policy) -> Timing:
    """`run` with all `faults`, and what each of them costs: run with none of them, the first, the first two, ..."""
    runs = [run(faults.first(count)) for count in range(len(faults) + 1)]
    costs = tuple(
        FaultCost(str(fault), after.seconds - before.seconds)
        for fault, (before, after) in zip(faults, pairwise(runs), strict=True)
    )
    last = runs[-1].recovery
    kept, second = (None, None) if last is None else (last.kept, last.second)
    return replace(runs[-1], recovery=Recovery(policy.name, runs[0].seconds, costs, kept, second))


class _FaultyRun:
    """One run with faults: a plan, and those that follow it."""

    def __init__(
        self, network: PortNetwork, topology: Topology, model: Model, faults: FaultPlan, policy: Policy
    ) -> None:
        self.network, self.topology, self.model = network, topology, model
        self.faults, self.policy = faults, policy
        self.changes = _noisy(port_changes(network.ports, topology, faults, policy), network)

    def follow(
        self, plan: Plan | Transfers, opens_s: Sequence[Fraction] | None, from_s: Fraction, switches: Sequence[Fraction]
    ) -> Timing:
        """The times of `plan`, whose ports open at `opens_s` (None: at once), and of what the run turns to after it.

        It begins at `from_s`, and at the first of `switches` the run turns to another plan for the segments that have
        not begun.
        """
        network = self._from(opens_s, from_s)
        timing = _shift(run_once(plan, network, self.model), float(from_s))
        if not switches:
            return timing
        transfers = plan.transfers if isinstance(plan, Plan) else plan
        switch_s = switches[0]
        is_kept = np.isin(transfers.segment, np.unique(transfers.segment[timing.start_s <= float(switch_s)]))
        dropped = np.flatnonzero(~is_kept)
        if len(dropped) == 0:
            return timing
        kept = np.flatnonzero(is_kept)
        rest = without(plan, dropped)
        first = _shift(run_once(rest, _of(network, kept), self.model), float(from_s))
        through = _through(rest, first, network.ports, network.latency_s)
        before = opens_s or (Fraction(0),) * len(through)
        opens = [max(switch_s, own, Fraction(at)) for own, at in zip(before, through, strict=True)]
        assert self.policy.new_plan is not None
        following = self.policy.new_plan(self.faults.left(self.topology, switch_s), message_bytes(transfers, dropped))
        second = self.follow(following, opens, switch_s, switches[1:])
        return replace(first, recovery=Recovery(self.policy.name, 0.0, (), kept, second))

    def _from(self, opens_s: Sequence[Fraction] | None, from_s: Fraction) -> PortNetwork:
        """The network of a plan that begins at `from_s`, on a clock of its own."""
        if opens_s is None:
            return replace(self.network, changes=self.changes)
        shifted = [replace(each, at_s=each.at_s - from_s) for each in self.changes]
        opens = [at - from_s for at in opens_s]
        return replace(
            self.network,
            rates=(Fraction(0),) * len(self.network.rates),
            changes=opening(self.network.rates, shifted, opens),
            more_latency_s=None,
        )


def _noisy(changes: tuple[Change, ...], network: PortNetwork) -> tuple[Change, ...]:
    """The changes with the noise that the ports have."""
    return tuple(
        replace(each, rate=each.rate * network.rates[each.port] / network.ports.rates[each.port]) for each in changes
    )


def _of(network: PortNetwork, kept: Column) -> PortNetwork:
    """The network for the transfers `kept`."""
    more = network.more_latency_s
    return network if more is None else replace(network, more_latency_s=more[kept])


def _through(plan: Plan | Transfers, timing: Timing, ports: PortMap, latency_s: Fraction) -> list[float]:
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
