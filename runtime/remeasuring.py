"""Measures the NICs of a running job again, once the traffic has shown that their rates have changed.

The meters of `optcc.runtime.protocol.nic_meter` know a rate to within a third, and only of NICs that hold up others of
their host; plans that come near to the bound need every rate to a few percent. So the ranks, which change to the plans
of an epoch before the same collective, look then whether their traffic together says which NIC it is, and what that
carries (`optcc.runtime.slow_nics`). If it does not, they measure with nothing else under way, as at the start
(`optcc.runtime.probe`), but only the hosts whose NICs carry something else than before. What has them do it is a rate
that the meters have found while runs of a plan take longer than those before, or a few such runs; the second of these
need not be over. If nothing new is found, that counts less and less often (`optcc.runtime.protocol.epochs`).

Runs under new plans should be as near to the lower bound as those before. If some are not, and the traffic does not say
why, the rate of the NIC that became slow last may come and go (`optcc.runtime.guesses`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

from optcc.errors import InputError
from optcc.plan import PlanRequest
from optcc.runtime.changed_ways import ALIKE
from optcc.runtime.engine import Engine
from optcc.runtime.guesses import Guess, Guesses
from optcc.runtime.handle import Handle
from optcc.runtime.persistent_plan import PersistentPlan
from optcc.runtime.probe import Rates, probe
from optcc.runtime.protocol.agreement import Share, Shares, is_change, rounded
from optcc.runtime.protocol.epochs import SLOW_RUNS, rate_pairs
from optcc.runtime.protocol.rates import DOUBTED_SHARE, LEAST_SHARE, usable
from optcc.runtime.run_times import RunTimes
from optcc.runtime.slow_nics import RemeasuredTransport, slow_nics
from optcc.runtime.transport import COLLECTIVE_TIMEOUT_S

LEAST_S = 5e-3
"""Shorter runs, and those of collectives that could be shorter, say more of the processor than of NICs."""
IN_A_ROW = 2
"""NICs are not measured for fewer runs in a row that are slow."""
REQUESTS_MAX = 64
"""Of so many collectives, those that were called last, it is known what they took under other plans."""


class _Pace(NamedTuple):
    """What a collective took over the least that it can take: now, by the slowest of the plans that are in use for it;
    and before, under those for other shares under which that was least."""

    now: float = 0.0
    before: float = math.inf

    def under_others(self) -> _Pace:
        """The same once there are plans for other shares."""
        return _Pace(0.0, min(self.before, self.now or math.inf))


class Remeasuring:
    """What the NICs of a job were last measured to carry; `engine` is that of all its ranks.

    Raises InputError if its transport is not over NICs.
    """

    def __init__(self, engine: Engine, least_s: Callable[[Shares, PlanRequest], float] | None = None) -> None:
        transport = engine.transport
        if not isinstance(transport, RemeasuredTransport):
            raise InputError(f"remeasures: {type(transport).__name__}: must be a transport over NICs")
        self._engine, self._transport = engine, transport
        self._known = transport.at_start
        # The shares of the last epoch.
        self._last = self._known
        # Whether the next epoch is the one in which there are plans for what was measured last.
        self._is_planning = False
        self.is_measuring = False
        self._planned_s = -math.inf
        self._note: Callable[[int], None] = lambda _: None
        self._times: WeakKeyDictionary[PersistentPlan, RunTimes | None] = WeakKeyDictionary()
        self._least_s, self._paces = least_s, dict[PlanRequest, _Pace]()
        self._last_request: PlanRequest | None = None
        self._planned = self._known
        # For how long collectives were under way before the last of them was over, and when that was.
        self._ran_before_s, self._counted_s = 0.0, -math.inf
        self._guesses = Guesses()
        # At rank 0: those of the run that was over last, and the run that was found to be slow before its end.
        self._last_times = RunTimes()
        self._overdue: Handle | None = None
        # Whether runs were slow for long enough since NICs were last measured, or the traffic asked.
        self._was_slow = False

    @property
    def at_start(self) -> Shares:
        """What the NICs carry in epoch 0."""
        return self._transport.at_start

    def watch(self) -> None:
        """From now on rank 0 looks whether runs take longer than they did, and all know what plans cost them."""
        self._transport.weigh_by(self._least_of_last, self._ran_s)
        self._engine.finished = self._note_finished
        if not self._engine.rank:
            self._note = self._transport.note_slow_runs

    def _note_finished(self, handle: Handle, seconds: float) -> None:
        if not isinstance(handle.plan, PersistentPlan):
            return
        self._ran_before_s = self._ran_s(handle)
        self._counted_s = self._engine.clock.now_s()
        if seconds >= LEAST_S:
            self._last_request = handle.plan.plan.request
        if not self._engine.rank:
            self._note_run(handle, seconds)

    def _ran_s(self, *others: Handle) -> float:
        """For how long collectives, and these, have been under way so far."""
        running = [each for each in (*self._engine.running, *others) if isinstance(each.plan, PersistentPlan)]
        since_s = max(self._counted_s, min((each.began_s for each in running), default=math.inf))
        return self._ran_before_s + max(0.0, self._engine.clock.now_s() - since_s)

    def _least_of_last(self, shares: Shares) -> float:
        """The least that the collective that was over last takes where NICs carry such shares, seconds, or 0.0."""
        if self._least_s is None or self._last_request is None:
            return 0.0
        return self._least_s(tuple(map(usable, shares)), self._last_request)

    def _note_run(self, handle: Handle, seconds: float) -> None:
        plan = handle.plan
        now_s = self._engine.clock.now_s()
        # A run that began before the present plans says nothing of them.
        if seconds >= LEAST_S and isinstance(plan, PersistentPlan) and now_s - seconds >= self._planned_s:
            times = self._times_of(plan)
            if times is None:
                return
            was_known, count = times.is_known, times.take(seconds, now_s)
            if times.is_known and not was_known:
                self._note_pace(plan.plan.request, times.usual_s)
            self._last_times, self._last_request = times, plan.plan.request
            self._was_slow |= count >= SLOW_RUNS
            self._note(count)
            if count:
                self._engine.look_within(times.overdue_s)

    def _times_of(self, plan: PersistentPlan) -> RunTimes | None:
        """Those of its runs; None if what NICs carry is a small part of them."""
        if plan not in self._times:
            request = plan.plan.request
            least_s = self._least_s(self._planned, request) if self._least_s is not None else 0.0
            self._times[plan] = None if 0 < least_s < LEAST_S else RunTimes(self._expected_s(request))
        return self._times[plan]

    def _expected_s(self, request: PlanRequest) -> float:
        """What a collective should take under the present plans, if they are as good as those of before."""
        if self._least_s is None or request not in self._paces:
            return math.inf
        return self._paces[request].before * self._least_s(self._planned, request) or math.inf

    def _note_pace(self, request: PlanRequest, usual_s: float) -> None:
        """The runs of one of the present plans usually take so long."""
        least_s = self._least_s(self._planned, request) if self._least_s is not None else 0.0
        if least_s:
            pace = self._paces.pop(request, _Pace())
            # Less than the least is for a NIC that is not known to be back.
            self._paces[request] = pace._replace(now=max(1.0, pace.now, usual_s / least_s))
            if len(self._paces) > REQUESTS_MAX:
                self._paces.pop(next(iter(self._paces)))

    def look(self) -> float:
        """Notes a run after a slow one that takes much longer than usual already; seconds until it is to be called
        again."""
        now_s, soonest_s = self._engine.clock.now_s(), math.inf
        for handle in self._engine.running:
            times = self._times.get(handle.plan) if isinstance(handle.plan, PersistentPlan) else None
            if times is None or not times.n_in_a_row or self._overdue is handle or handle.began_s < self._planned_s:
                continue
            left_s = handle.began_s + times.overdue_s - now_s
            if left_s > 0:
                soonest_s = min(soonest_s, left_s)
            else:
                self._overdue, self._was_slow = handle, True
                self._last_times = times
                self._note(SLOW_RUNS)
        return soonest_s

    def shares_of(self, agreed: Shares, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> Shares:
        """What the NICs carry in an epoch of which all ranks know that they carry about `agreed`; collective.

        They are measured if some rate is another one than when they were measured last, or if nothing is known to have
        changed, in which case runs have become slow. A NIC that is lost, or back, is known to be without, unless it was
        silent. One that is worth nothing (`LEAST_SHARE`) counts as nothing.

        Raises DeadlineExceeded after `timeout_s` seconds, and what a run raises.
        """
        is_due = self.is_due(agreed)
        self._is_planning = False
        if is_due:
            self.is_measuring = True
            try:
                self._known = agreed = self._engine.alone(partial(self._measure, agreed), timeout_s)
            finally:
                self.is_measuring = False
        self._last = agreed
        shares = self.usable_of(agreed)
        if not is_due:
            self._transport.trust_shares(shares)
        self._plan_for(shares)
        return shares

    def _plan_for(self, shares: Shares) -> None:
        """From now on plans are for these."""
        self._planned_s = self._engine.clock.now_s()
        if shares != self._planned:
            self._planned = shares
            self._paces = {request: pace.under_others() for request, pace in self._paces.items()}

    def usable_of(self, agreed: Shares) -> Shares:
        """What `shares_of` says if it does not measure."""
        found = iter([rate if min(*share, *rate) > 0 else share for share, rate in self._beside(agreed)])
        return tuple(usable([next(found) for _ in nics]) for nics in agreed)

    def is_due(self, agreed: Shares) -> bool:
        """Whether `shares_of` measures."""
        if agreed == self._last:
            return not self._is_planning
        return any(_is_other(*pair) for pair in self._beside(agreed))

    def await_plans(self) -> None:
        """There are to be plans for what was measured in the next epoch, which begins once all ranks have them."""
        self._is_planning = True
        self._transport.want_plans()

    def _beside(self, agreed: Shares) -> list[tuple[Share, Share]]:
        """By NIC, the share that is agreed on, and that which was measured last."""
        known = self._known
        return [pair for both in zip(agreed, known, strict=True) for pair in zip(*both, strict=True)]

    def _as_before(self, shares: Shares) -> Shares:
        """Where no NIC carries something else than before, what was measured then: for that there are plans."""
        pairs = rate_pairs(shares, self._known)
        alike = all(abs(now - before) <= ALIKE * max(now, before) for now, before in pairs)
        return self._known if alike else shares

    def _measure(self, agreed: Shares) -> Shares:
        clock, transport = self._engine.clock, self._transport
        began_s = clock.now_s()
        healed = healed_shares(agreed, self._known)
        if healed is not None:
            self._was_slow = False
            transport.know_shares(healed, 0.0, is_told=True)
            return healed
        is_known = not any(_is_other(*pair) or _is_back(*pair) for pair in self._beside(agreed))
        # A single run that is slow may have waited for a rank that was late.
        is_single = self._was_slow and self._last_times.n_in_a_row < IN_A_ROW
        self._was_slow = False
        may_measure = not is_known or (transport.may_measure and not is_single)
        times, guess = self._last_times, self._guess() if is_known else None
        # Of runs some of which are quick the others tell more.
        pace = 1.0 if times.n_in_a_row else times.pace
        may_measure = may_measure and guess is None
        found, may_measure = slow_nics(transport, self._slow_span_s(), self._known, may_measure, pace, guess)
        told = None if found is None and may_measure else self._with_slow(agreed, found or {})
        shares = self._probed(agreed) if told is None else told
        self._guesses.take(self._known, shares)
        transport.know_shares(shares, clock.now_s() - began_s, is_told=told is not None)
        return shares

    def _slow_span_s(self) -> tuple[float, float]:
        """At rank 0: of which time the traffic is asked."""
        span_s = self._last_times.slow_span_s
        # A single slow run tells enough where a NIC has been slow before.
        return self._last_times.slowest_span_s if span_s[0] == math.inf and self._guesses.has_seen else span_s

    def _guess(self) -> Guess | None:
        """At rank 0: what a NIC may carry whose rate comes and goes."""
        times, request = self._last_times, self._last_request
        # One that was slow by itself may have waited for something else.
        if times.n_in_a_row or not times.is_drifting:
            return None
        least_s = self._least_s(self.at_start, request) if self._least_s is not None and request is not None else 0.0
        return self._guesses.next(self._known, times.pace, times.recent_s / least_s) if least_s else None

    def _with_slow(self, agreed: Shares, found: Mapping[tuple[int, int], float]) -> Shares | None:
        """What the NICs carry if these are slow; None if others are too, or faster, or back: then they must be
        measured."""
        shares: list[tuple[Share, ...]] = []
        for rank, both in enumerate(zip(agreed, self._known, strict=True)):
            nics: list[Share] = []
            for nic, (said, known) in enumerate(zip(*both, strict=True)):
                if (rank, nic) in found:
                    known = rounded((found[rank, nic],) * 2)
                elif _is_other(said, known) or _is_back(said, known):
                    return None
                nics.append(known if min(said) > 0 else said)
            shares.append(tuple(nics))
        return tuple(shares)

    def _probed(self, agreed: Shares) -> Shares:
        """What the NICs carry as measured with nothing else under way."""
        engine, transport = self._engine, self._transport
        declared: Rates = tuple(tuple((nic[3], nic[4]) for nic in nics) for nics in transport.nics)
        known = tuple(
            tuple((round(share[0] * nic[0]), round(share[1] * nic[1])) for share, nic in zip(*both, strict=True))
            for both in zip(self._expected(agreed), declared, strict=True)
        )
        measured = probe(transport, clock=engine.clock, beside=engine.take, known=known)
        shares = tuple(
            tuple(rounded(_share(*pair)) for pair in zip(*both, strict=True))
            for both in zip(measured.rates, declared, strict=True)
        )
        return self._as_before(self._without_lost(shares, agreed))

    def _expected(self, agreed: Shares) -> Shares:
        """What was measured last, but of a NIC that is said to carry next to nothing, that: more than it carries would
        be long on its way."""
        found = iter([said if min(said) < LEAST_SHARE else known for said, known in self._beside(agreed)])
        return tuple(tuple(next(found) for _ in nics) for nics in agreed)

    def _without_lost(self, shares: Shares, agreed: Shares) -> Shares:
        """What was measured, unless a NIC fell silent meanwhile: what it had to carry was then sent by others, of which
        nothing new is known therefore. It is one that carries next to nothing."""
        known = self._known
        beside = [list(zip(*each, strict=True)) for each in zip(shares, agreed, known, strict=True)]
        if all(min(new) > 0 or min(share) <= 0 for nics in beside for new, share, _ in nics):
            return shares
        doubted = DOUBTED_SHARE, DOUBTED_SHARE
        return tuple(
            tuple(share if min(share) <= 0 else doubted if min(new) <= 0 else before for new, share, before in nics)
            for nics in beside
        )


def healed_shares(agreed: Shares, known: Shares) -> Shares | None:
    """What the NICs carry if all that is new of them is that some, known to be slow, carry one way as much as at the
    start: they are taken to do so both ways. That is mostly true, and costs nothing; if it is not, runs are slow again.
    None if something else is new, or nothing.

    >>> whole = (1.0, 1.0)
    >>> healed_shares(((whole, (1.0, 0.5)),), ((whole, (0.5, 0.5)),))
    (((1.0, 1.0), (1.0, 1.0)),)
    >>> healed_shares(((whole, (0.8, 0.5)),), ((whole, (0.5, 0.5)),))
    >>> healed_shares(((whole, (1.0, 0.5)), (whole, (0.4, 1.0))), ((whole, (0.5, 0.5)), (whole, whole)))
    """
    is_new = False
    shares: list[tuple[Share, ...]] = []
    for said_of, known_of in zip(agreed, known, strict=True):
        nics: list[Share] = []
        for said, was in zip(said_of, known_of, strict=True):
            share = was
            if _is_other(said, was):
                is_higher = all(new > old for new, old in zip(said, was, strict=True) if is_change(new, old))
                if max(said) < 1 or not is_higher or is_change(*was) or min(was) < LEAST_SHARE:
                    return None
                is_new, share = True, (1.0, 1.0)
            elif _is_back(said, was):
                return None
            nics.append(share if min(said) > 0 else said)
        shares.append(tuple(nics))
    return tuple(shares) if is_new else None


def _share(rate: tuple[int, int], declared: tuple[int, int]) -> Share:
    """No more than 1: the words by which ranks tell each other of rates know no more."""
    out, in_ = (is_ / was for is_, was in zip(rate, declared, strict=True))
    return 1.0 if out > 1 - ALIKE else out, 1.0 if in_ > 1 - ALIKE else in_


def _is_back(share: Share, known: Share) -> bool:
    """True if a NIC that carried nothing when that was last known is said to carry something."""
    return min(share) > 0 >= min(known)


def _is_other(share: Share, known: Share) -> bool:
    """True if a NIC that carries something carries something else than it did when that was last known, or if nobody
    knows what."""
    return share == (DOUBTED_SHARE,) * 2 or (min(share) > 0 < min(known) and any(map(is_change, share, known)))
