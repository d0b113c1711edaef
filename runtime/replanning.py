"""Plans for what the NICs carry now: the epochs of a job (`optcc.runtime.protocol.agreement`), for whoever runs plans.

`Replanning` tells under which epoch the next collective runs, and makes the plans of the next epoch beside the running
collectives. Only then this rank says that it is ready; so a change costs what it costs to open the new channels.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from optcc.collective import Collective
from optcc.errors import DeadlineExceeded
from optcc.plan import Plan, PlanRequest
from optcc.runtime.engine import Engine
from optcc.runtime.protocol.agreement import AHEAD, Epoch, Shares
from optcc.runtime.remeasuring import Remeasuring
from optcc.runtime.transport import Agrees
from optcc.verdict import Verdict

PlanFor = Callable[[Collective, int, str, str], tuple[Plan, Verdict]]
"""What a `PlanRequest` has to a plan and the verifier's verdict on it; the same at every rank."""
Prepare = Callable[[Shares, PlanRequest | None], Callable[[], bool]]
"""Begins to make plans for these shares; with a request, what it returns tells whether that plan is there."""
_LOOK_S = 2e-3

logger = logging.getLogger("optcc.nics")


@runtime_checkable
class Replans(Protocol):
    """A `PlanFor` that can make plans for what is left of the NICs."""

    def under(self, shares: Shares) -> PlanFor:
        """Plans for NICs that carry these shares, by rank and NIC, of what this one's plans are made for.

        Raises TopologyError if there can be no plan.
        """
        ...

    def prepare(self, shares: Shares, wanted: Sequence[PlanRequest]) -> Callable[[], bool]:
        """Begins to make such plans in the background; returns what tells whether they are there, in which case
        `under(shares)` has them at once."""
        ...


@runtime_checkable
class GetsReady(Protocol):
    """A planner that can have at hand what makes plans in the background."""

    def get_ready(self, request: PlanRequest) -> None:
        """It is called whenever a plan has been made, with what for; returns at once."""
        ...


class Replanning:
    """The epochs of the collectives that `engine` runs.

    `prepare` begins to make plans for NICs that carry some shares, and returns what tells whether they are there, or
    the one that it is told to make first; without it, or where the transport has no epochs, all collectives run under
    epoch 0. With `remeasuring` the ranks measure the NICs once their rates have changed
    (`optcc.runtime.remeasuring`), before the first collective of an epoch; plans for what they find are made then, or
    beside the collectives that follow, for another epoch.
    """

    def __init__(
        self,
        engine: Engine,
        prepare: Prepare | None,
        remeasuring: Remeasuring | None = None,
    ) -> None:
        self._engine, self._remeasuring = engine, remeasuring
        self._coming: tuple[Epoch, Callable[[], bool]] | None = None
        self._shares: dict[int, Shares] = {}
        # While plans are waited for, what tells whether they are there.
        self._made: Callable[[], bool] | None = None
        # The last epoch for which there were to be new plans, and what the NICs carried then.
        self.plans_since, self._planned = 0, None if remeasuring is None else remeasuring.at_start
        transport = engine.transport
        self._prepare = prepare
        self._transport = transport if isinstance(transport, Agrees) and prepare is not None else None
        self.epoch = 0
        if self._transport is not None:
            self._transport.join_epochs(measures=remeasuring is not None)
            engine.look_aside = self._look
            if remeasuring is not None:
                remeasuring.watch()

    @property
    def is_on(self) -> bool:
        """True if plans change at all."""
        return self._transport is not None

    @property
    def shares(self) -> Shares:
        """What the NICs carry in the epoch of the collective that began last, which is not epoch 0."""
        return self._shares[self.epoch]

    def describe(self) -> tuple[int, str]:
        """The number of the present epoch, and what the NICs carry in it, in words."""
        return self.epoch, show_shares(self._shares[self.epoch]) if self.epoch in self._shares else ""

    def begin(self, timeout_s: float, request: PlanRequest, may_go_on: Callable[[], bool] = lambda: False) -> bool:
        """A collective as in `request` begins; waits, if other ranks have yet to agree on its epoch. True if there are
        to be plans for other `shares` than before.

        If the NICs were measured, and it `may_go_on` under the plans of before, those come with the next epoch.

        Raises DeadlineExceeded after `timeout_s`, and what a run raises.
        """
        transport = self._transport
        if transport is None:
            return False
        epoch = transport.begin_collective()
        if epoch is None:
            goal = _Begun(transport)
            if not self._engine.wait_for(goal, timeout_s):
                error = DeadlineExceeded(f"rank {self._engine.rank}: waited {timeout_s:g} s in vain for others' plans")
                self._engine.abort(str(error))
                raise error
            assert goal.epoch is not None
            epoch = goal.epoch
        if epoch == self.epoch:
            return False
        self.epoch = epoch
        for old in [each for each in self._shares if each < epoch]:
            del self._shares[old]
        remeasuring = self._remeasuring
        if remeasuring is not None:
            was_due = remeasuring.is_due(self._shares[epoch])
            self._shares[epoch] = remeasuring.shares_of(self._shares[epoch], timeout_s)
            if self.shares == self._planned:
                return False
            if was_due and may_go_on():
                remeasuring.await_plans()
                return False
            if was_due:
                self._make_plan(request, timeout_s)
        self._planned, self.plans_since = self.shares, epoch
        transport.stripe_for(self.shares)
        if not self._engine.rank:
            logger.warning("optcc: plans are now for %s", show_shares(self.shares))
        return True

    def _make_plan(self, request: PlanRequest, timeout_s: float) -> None:
        """Has plans made for what was measured, and waits for the one that is needed: while nothing is under way that
        takes least."""
        assert self._prepare is not None
        self._made = self._prepare(self.shares, request)
        self._engine.look_within(_LOOK_S)
        self._engine.wait_for(_Made(self._made), timeout_s)
        self._made = None

    def _usable_of(self, shares: Shares) -> Shares:
        return shares if self._remeasuring is None else self._remeasuring.usable_of(shares)

    def _look(self) -> float:
        """What is to be done beside the collectives; seconds until it is to be called again."""
        overdue_s = math.inf if self._remeasuring is None else self._remeasuring.look()
        return min(self._look_at_epochs(), overdue_s)

    def _look_at_epochs(self) -> float:
        """Has plans made if there is an epoch to make them for; seconds until it is to be called again."""
        transport, prepare = self._transport, self._prepare
        assert transport is not None and prepare is not None
        if self._made is not None:
            return _LOOK_S
        epoch = transport.wanted_epoch
        if epoch is None:
            self._coming = None
            return math.inf
        if self._remeasuring is not None and self._remeasuring.is_measuring:
            return _LOOK_S
        measures = self._remeasuring is not None and self._remeasuring.is_due(epoch.shares)
        if self._coming is None or self._coming[0] != epoch:
            self._coming = epoch, (lambda: True) if measures else prepare(self._usable_of(epoch.shares), None)
        if not self._coming[1]():
            return _LOOK_S
        self._shares[epoch.number], self._coming = epoch.shares, None
        # To be measured takes no rank longer than others to be ready for.
        transport.epoch_ready(0 if measures else AHEAD)
        return math.inf


class _Made(NamedTuple):
    """The goal that plans are there."""

    is_there: Callable[[], bool]

    @property
    def done(self) -> bool:
        """True once they are."""
        return self.is_there()


class _Begun:
    """The goal that a collective may begin."""

    def __init__(self, transport: Agrees) -> None:
        self._transport = transport
        self.epoch: int | None = None

    @property
    def done(self) -> bool:
        """True once it has begun."""
        if self.epoch is None:
            self.epoch = self._transport.begin_collective()
        return self.epoch is not None


def show_shares(shares: Shares) -> str:
    """The NICs that carry other than they should, in words.

    >>> show_shares((((1.0, 1.0), (0.0, 0.0)), ((0.5, 1.0),)))
    'NIC 1 of rank 0 down, NIC 0 of rank 1 at 50 % out, 100 % in'
    >>> show_shares((((1.0, 1.0),),))
    'all NICs in full'
    """
    said = [
        f"NIC {nic} of rank {rank} " + (f"at {out:.0%} out, {in_:.0%} in".replace("%", " %") if out and in_ else "down")
        for rank, nics in enumerate(shares)
        for nic, (out, in_) in enumerate(nics)
        if (out, in_) != (1, 1)
    ]
    return ", ".join(said) or "all NICs in full"
