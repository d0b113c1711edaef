"""When the plans of a job change: what rank 0 makes of what all ranks say of their NICs (`rates`). No I/O.

A NIC that carries less than before, or nothing, costs every collective until plans are made for what is left; so that
is proposed as soon as what is said has settled. A NIC that carries more again costs nothing if it is noticed late, and
may fail again: rank 0 waits, and longer each time it has waited too short.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain

from optcc.runtime.protocol.agreement import Agreement, Share, Shares, is_change, rounded
from optcc.runtime.protocol.frames import EPOCH_FRAME
from optcc.runtime.protocol.local import NEVER_S, Established, LocalRank
from optcc.runtime.protocol.patience import PATIENCE_S, Patience
from optcc.runtime.protocol.rates import DOUBTED_SHARE, LEAST_SHARE, Rates, usable
from optcc.runtime.protocol.readmission import PAUSE_S as TRIAL_PAUSE_S
from optcc.runtime.protocol.readmission import Readmissions
from optcc.runtime.transport import EPOCH_NEWS, RECEIVED

SETTLE_S, RATE_SETTLE_S = 0.05, 2.0
"""What is known changes with each word of a failure, and a connection that was reset is soon back. A NIC that is lost,
or carries all it should again, counts once what is known has been the same for the first time; a rate, once it has for
the second since the last epoch began. Rates that are measured under a plan for NICs of which one is lost say little, as
others wait for that host, and the meters take a second to forgive."""
QUICK_S = 0.15
"""Where an epoch for other rates has the NICs measured, a rate counts sooner: what is wrong is found then, and costs no
more than that. Not within `RATE_SETTLE_S` after a NIC was lost or came back."""
SLOW_RUNS = 3
"""So many slow runs have the NICs measured, though nothing is known to have changed; one, if some rate is lower."""
PAUSE_S, PAUSE_S_MAX, IN_VAIN = 4.0, 600.0, 1 / 500
"""After NICs were measured, no rate counts for so long: twice as long each time nothing new was found, until to measure
takes less than the last share of the time."""
CHECK_S, CHECK_S_MAX = 0.2, 4.0
"""Whether the traffic tells of a slow NIC is asked no sooner after it did not; twice as long each time, while runs are
slow. That costs a few milliseconds, so it does not wait for the end of such a pause."""
HOPE_PAUSES = 3
"""After so many more times as long a NIC that was slow is measured again, though nothing says that it has changed."""
SETTLE_TIMES = 5
"""What does not settle counts after so many times as long."""
PATIENCE_S_MAX, CALM_S = 8.0, 10.0
"""Until a NIC that was lost is believed to be back, and how long it must then be."""
RATE_PATIENCE_S_MAX, RATE_CALM_S, RATE_GROWTH = 64.0, 10.0, 4.0
"""The same of one that was slow, and how much longer it takes each time: plans for less than it carries cost little,
and congestion may come and go."""
WORTH_S = 1.0
"""A NIC is believed, or tried, again once runs under plans for less have taken so much longer, in all, than under plans
for it: that is about what a change too many costs, with the measuring and the loss that may follow."""
SAVINGS_MAX = 8
"""Of so many pairs of shares it is kept what plans for one of them save."""


class Epochs:
    """One rank's part in the epochs of a job; see `agreement`. Nothing is proposed before a program sets `is_on`."""

    def __init__(self, local: LocalRank, rates: Rates) -> None:
        self._local, self._rates = local, rates
        self.agreement = Agreement(local.rank, [len(nics) for nics in local.book])
        self.is_on = self.measures = False
        self._was_joined, self._is_silent = [False] * len(local.own_nics), [False] * len(local.own_nics)
        # Of silent NICs, whether their links were up all the time, and what `ran_s` was before.
        self._was_linked, self._silent_ran_s = [True] * len(local.own_nics), [0.0] * len(local.own_nics)
        self.readmissions = Readmissions(local)
        # The NICs that were tried and have yet to be measured; how often such a one carried next to nothing, in a row.
        self._tried: set[int] = set()
        self._in_vain = [0] * len(local.own_nics)
        # Of NICs whose rate is another one than plans are for: which, and since when; in which epoch.
        self._coming: dict[tuple[int, int], tuple[Share, float]] = {}
        self._version = self._rates_in = 0
        # What was measured last, and until when rates do not count; the NICs that carry nothing, and since when.
        self._measured: Shares = self.agreement.epoch.shares
        self._pause_s, self._paused_to_s = PAUSE_S, 0.0
        self._check_s, self._checked_to_s = CHECK_S, 0.0
        self._down: set[tuple[int, int]] = set()
        self._calm_s = 0.0
        # The last epoch of whose rates this rank knows what was made: until then they are those of before.
        self._settled = 0
        # How many of the last runs were slow, as far as known; when one was last.
        self._n_slow = 1
        self._slow_s = 0.0
        self._seen: Shares = self.agreement.epoch.shares
        # When that changed last; since when it has been other than plans are for, and what `ran_s` was then.
        self._changed_s, self._wanted_s, self._wanted_ran_s = 0.0, NEVER_S, 0.0
        # With NICs that were lost, and that were slow.
        self._patience_lost = Patience(PATIENCE_S_MAX, CALM_S)
        self._patience_slow = Patience(RATE_PATIENCE_S_MAX, RATE_CALM_S, RATE_GROWTH)
        # See `optcc.runtime.transport.KnowsRates.weigh_by`.
        self.least_s: Callable[[Shares], float] = lambda _: 0.0
        self.ran_s: Callable[[], float] = lambda: 0.0
        self._savings: dict[tuple[Shares, Shares], float] = {}

    # --- words

    def hear(self, word: int) -> None:
        """A word of a peer."""
        agreement = self.agreement
        before = agreement.epoch.number, agreement.wanted is not None
        if not agreement.hear(word):
            return
        self.spread()
        if self.is_on and before != (agreement.epoch.number, agreement.wanted is not None):
            self._local.tell_news((RECEIVED, EPOCH_NEWS))

    def spread(self) -> None:
        """Says to all peers what this rank has to say, and passes on what it has heard."""
        if self.agreement.to_say:
            words, self.agreement.to_say = self.agreement.to_say, []
            self._local.say_to_all(EPOCH_FRAME, words)

    def joined(self, connection: Established) -> None:
        """A connection is new: what was said before it was there is said on it."""
        for word in self.agreement.words():
            connection.say(EPOCH_FRAME, word)
            self._local.wake(connection)

    def leave(self) -> None:
        """This rank begins no more collectives."""
        self.agreement.leave()
        self.spread()

    def untold(self) -> set[int]:
        """Ranks that may not learn that this one leaves, and may wait for its word: nobody is left to pass it on."""
        local = self._local
        if not self.is_on or local.failure is not None or any(each.peer not in local.left for each in local.up):
            return set()
        return set(range(len(local.book))) - {local.rank} - local.left.keys() - self.agreement.leaving

    def start_from(self, shares: Shares) -> None:
        """Some NICs carry nothing in epoch 0. Those whose links are up are tried before they are used."""
        self.agreement.correct(shares)
        self._measured = self._seen = shares
        for nic, share in enumerate(shares[self._local.rank]):
            if min(share) <= 0 and self._local.nic_up[nic]:
                self._was_joined[nic] = self._is_silent[nic] = True
                self.readmissions.await_trial(nic)

    # --- time

    def tick(self) -> None:
        """Tells of NICs of this rank that are silent; at rank 0, proposes an epoch if it is time for one."""
        self._note_silent()
        if self.is_on and not self._local.rank:
            self._propose()
        self.spread()
        self._local.awaited = self.agreement.awaited

    def _note_silent(self) -> None:
        """A NIC that has lost all its connections while others have some is as good as down, and so is one that carried
        next to nothing when it was measured. If its link was up all the time it is tried before it is used again."""
        used = {connection.nic for connection in self._local.up}.intersection(range(len(self._was_joined)))
        for nic, is_up in enumerate(self._local.nic_up[: len(self._was_joined)]):
            self._was_linked[nic] &= is_up
            self._was_joined[nic] |= nic in used
            is_heard = nic in used or not used or not self._was_joined[nic]
            if self._is_silent[nic]:
                if is_heard and self._is_back(nic, nic in used):
                    self._is_silent[nic] = False
                    self._rates.note_nic(nic, is_up)
            elif not is_heard or (self.measures and is_up and nic in self._rates.worthless):
                self._is_silent[nic], self._was_linked[nic] = True, is_up
                self._silent_ran_s[nic] = self.ran_s()
                self._tried.discard(nic)
                self.readmissions.await_trial(nic, self._wait_s(nic) if is_heard else 0.0)
                self._rates.note_nic(nic, False)

    def _wait_s(self, nic: int) -> float:
        """How long a NIC that carries next to nothing is not tried: longer each time that a trial did not find that."""
        count = self._in_vain[nic]
        return min(PAUSE_S_MAX, HOPE_PAUSES * PAUSE_S * 2 ** (count - 1)) if count else TRIAL_PAUSE_S

    def _is_back(self, nic: int, is_joined: bool) -> bool:
        """Whether a NIC that was silent is to be used, or measured, again."""
        if not self.measures or not self._was_linked[nic]:
            return True
        if is_joined:
            if self.readmissions.rests(nic) and (self._is_awaited(nic) or self._is_worth_it(nic)):
                self.readmissions.hasten(nic)
            if not self.readmissions.is_over(nic):
                return False
        self._tried.add(nic)
        self._rates.doubt(nic)
        return True

    def _is_awaited(self, nic: int) -> bool:
        """Whether NICs that one of this rank is joined with are to be measured, and can be with this one only."""
        shares = [self._rates.known(*each) for each in self._partners(nic) if each not in self._rates.down]
        return bool(shares) and all(max(share) < LEAST_SHARE for share in shares)

    def _is_worth_it(self, nic: int) -> bool:
        """Whether plans for what NICs carry have cost so much since this one was silent that it is tried again: more
        each time that a trial did not find that it carries next to nothing."""
        planned = self.agreement.epoch.shares
        part = self._saved(planned, tuple(((1.0, 1.0),) * len(nics) for nics in planned))
        return part * (self.ran_s() - self._silent_ran_s[nic]) >= WORTH_S * max(1, self._in_vain[nic])

    def _partners(self, nic: int) -> list[tuple[int, int]]:
        """The NICs that one of this rank is joined with: their ranks and numbers."""
        local = self._local
        others = (rank for rank in range(len(local.book)) if not local.is_inside(local.rank, rank))
        return [(rank, theirs) for rank in others for mine, theirs in local.pairs(local.rank, rank) if mine == nic]

    def _known(self, now_s: float) -> Shares:
        """What all NICs carry, as far as it is known for long enough; else what plans are for."""
        epoch = self.agreement.epoch
        if epoch.number != self._rates_in:
            self._rates_in = epoch.number
            self._coming.clear()
        if self._rates.down != self._down:
            self._down, self._calm_s = set(self._rates.down), now_s + RATE_SETTLE_S
        return tuple(
            tuple(self._share(rank, nic, planned, now_s) for nic, planned in enumerate(nics))
            for rank, nics in enumerate(epoch.shares)
        )

    def _share(self, rank: int, nic: int, planned: Share, now_s: float) -> Share:
        new = rounded(self._rates.shared(rank, nic))
        if min(new) <= 0 or min(planned) <= 0:
            return new
        changes = [now > was for now, was in zip(new, planned, strict=True) if is_change(now, was)]
        if not changes or (self.measures and not any(changes) and not self._n_slow):
            self._coming.pop((rank, nic), None)
            return planned
        is_whole = self.measures and _is_whole(new, planned)
        if is_whole and not is_change(*planned):
            # It was slow both ways: it is taken to be healed so.
            new = 1.0, 1.0
        before, since_s = self._coming.setdefault((rank, nic), (new, now_s))
        settle_s = SETTLE_S if is_whole else self._settle_s(now_s)
        if any(map(is_change, new, before)):
            self._coming[rank, nic] = new, now_s
        elif now_s >= since_s + settle_s and (is_whole or now_s >= self._paused_to_s):
            return new
        return planned

    def _settle_s(self, now_s: float) -> float:
        """How long a rate must have been the same."""
        return QUICK_S if self.measures and now_s >= self._calm_s else RATE_SETTLE_S

    def take_measured(self, shares: Shares, took_s: float, *, is_told: bool) -> None:
        """The NICs were measured before the first collective of the last epoch that has begun, which took so long, and
        carry this; or the traffic was asked, if it `is_told`."""
        pairs, now_s = rate_pairs(shares, self._measured), self._local.now_s
        is_news = any(new > 0 < old and is_change(new, old) for new, old in pairs)
        self._checked_to_s = now_s + self._check_s
        self._check_s = CHECK_S if is_news else min(CHECK_S_MAX, 2 * self._check_s)
        if is_news or not is_told:
            longest_s = min(PAUSE_S_MAX, max(PAUSE_S, took_s / IN_VAIN))
            self._pause_s = PAUSE_S if is_news else min(longest_s, 2 * self._pause_s)
            self._paused_to_s = now_s + self._pause_s
        self._measured = shares
        slow = [pair for pair in pairs if self._patience_of(*pair) is self._patience_slow and is_change(*pair)]
        if any(new < old for new, old in slow):
            self._patience_slow.note_worse(now_s)
        elif slow:
            self._patience_slow.believe(now_s)
        for nic, share in enumerate(usable(shares[self._local.rank])):
            if min(share) > 0:
                self._in_vain[nic] = 0
            elif nic in self._tried:
                # Where no NIC that it is joined with was in use, it could not be measured.
                was_met = any(min(usable(shares[rank])[each]) > 0 for rank, each in self._partners(nic))
                self._in_vain[nic] = self._in_vain[nic] + 1 if was_met else 0
        self._tried.clear()
        self._settled = self.agreement.epoch.number
        self.agreement.correct(shares)

    def trust_rates(self) -> None:
        """What the traffic has said of rates is over; see `Rates.take_measured`."""
        self._coming.clear()
        self._settled = self.agreement.epoch.number

    @property
    def may_measure(self) -> bool:
        """Whether NICs may be measured again, though nothing is known to have changed."""
        return self._local.now_s >= self._paused_to_s

    def want_plans(self) -> None:
        """See `optcc.runtime.transport.KnowsRates`."""
        if self.is_on and self.agreement.may_propose:
            self._propose_now(self.agreement.epoch.shares)

    def note_slow_runs(self, count: int) -> None:
        """So many of this rank's last runs took longer than they did. After some of them, or after long with a NIC that
        is slow, rank 0 proposes an epoch in which nothing is known to have changed."""
        self._n_slow = count
        agreement = self.agreement
        now_s = self._local.now_s
        if count:
            self._slow_s = now_s
        elif now_s >= self._slow_s + self._check_s:
            self._check_s = CHECK_S
        # One that carries next to nothing is tried beside the traffic.
        is_degraded = any(0 < min(share) < 1 for nics in self._measured for share in usable(nics))
        hope_s = min(PAUSE_S_MAX, HOPE_PAUSES * self._pause_s * self._patience_slow.seconds / PATIENCE_S)
        may_be_back = is_degraded and now_s >= self._paused_to_s + hope_s
        # What takes long after a NIC was lost, or came back, does so for that.
        is_due = now_s >= max(self._checked_to_s, self._calm_s) and (count >= SLOW_RUNS or may_be_back)
        if is_due and self.is_on and agreement.may_propose and self._is_settled():
            self._propose_now(agreement.epoch.shares)

    def _is_settled(self) -> bool:
        """True if the last epoch has begun, and the NICs were measured then if they were to be."""
        return self.agreement.has_begun and self._settled == self.agreement.epoch.number

    def _propose(self) -> None:
        """Proposes what is known, once that has been the same for long enough."""
        local, now_s = self._local, self._local.now_s
        if self._rates.version != self._version or self._coming:
            self._version, known = self._rates.version, self._known(now_s)
            if known != self._seen:
                self._seen, self._changed_s = known, now_s
        planned = self.agreement.epoch.shares
        pairs = rate_pairs(self._seen, planned) if self._seen != planned else []
        if not any(is_change(*pair) for pair in pairs):
            self._wanted_s = NEVER_S
            return
        if self._wanted_s > now_s:
            self._wanted_s, self._wanted_ran_s = now_s, self.ran_s()
        # A host that cannot be reached ends the job: there is no plan for the others.
        if not self.agreement.may_propose or _leaves_nothing(self._seen):
            return
        if self.measures and not self._is_settled():
            return
        # With those of which some carry less; and with those of which some carry more, and none less.
        less = {self._patience_of(*pair) for pair in pairs if is_change(*pair) and pair[0] < pair[1]}
        more = {self._patience_of(*pair) for pair in pairs if is_change(*pair)} - less
        settle_s = SETTLE_S if less else self._patience_s(more, planned)
        wait_s = min(self._changed_s + settle_s, self._wanted_s + SETTLE_TIMES * settle_s) - now_s
        if wait_s > 0:
            local.watch_within(wait_s)
            return
        for patience in less:
            patience.note_worse(now_s)
        for patience in more:
            patience.believe(now_s)
        self._wanted_s = NEVER_S
        self._propose_now(self._seen)

    def _patience_of(self, new: float, old: float) -> Patience:
        """The patience with a NIC that carries this, and did that; one that was silent, and has yet to be measured, was
        lost."""
        return self._patience_lost if min(new, old) <= DOUBTED_SHARE else self._patience_slow

    def _patience_s(self, patiences: Collection[Patience], planned: Shares) -> float:
        """How long what is seen must have been so: the longest of these, but no longer than is worth it."""
        longest_s = max(patience.seconds for patience in patiences)
        if longest_s <= PATIENCE_S:
            return longest_s
        # A NIC that has yet to be measured may carry all.
        doubted = DOUBTED_SHARE, DOUBTED_SHARE
        hoped = tuple(tuple((1.0, 1.0) if share == doubted else share for share in nics) for nics in self._seen)
        elapsed_s = self._local.now_s - self._wanted_s
        part = self._saved(planned, hoped) * (self.ran_s() - self._wanted_ran_s) / elapsed_s if elapsed_s else 0.0
        return min(longest_s, max(PATIENCE_S, WORTH_S / part)) if part > 0 else longest_s

    def _saved(self, planned: Shares, others: Shares) -> float:
        """The part of a run under the present plans that plans for other shares save: all of it where those that are
        agreed on leave a host nothing, for which there is no plan."""
        if _leaves_nothing(planned):
            return 1.0
        key = planned, others
        if key not in self._savings:
            present_s = self.least_s(planned)
            if not present_s:
                return 0.0
            if len(self._savings) >= SAVINGS_MAX:
                self._savings.clear()
            self._savings[key] = 1 - self.least_s(others) / present_s
        return self._savings[key]

    def _propose_now(self, shares: Shares) -> None:
        self.agreement.propose(shares)
        self._local.tell_news((RECEIVED, EPOCH_NEWS))
        self.spread()


def _leaves_nothing(shares: Shares) -> bool:
    """True if a host has no NIC that carries something."""
    return any(all(min(share) <= 0 for share in nics) for nics in shares)


def _is_whole(new: Share, old: Share) -> bool:
    """True if a NIC carries less neither way, and all it should one way in which it did not: its rank has tried that
    (`optcc.runtime.protocol.faster_trials`), and mostly it is not measured (`optcc.runtime.remeasuring.healed_shares`),
    so no pause is needed."""
    pairs = list(zip(new, old, strict=True))
    is_less = any(is_ < was and is_change(is_, was) for is_, was in pairs)
    return not is_less and any(is_ >= 1 > was for is_, was in pairs)


def rate_pairs(news: Shares, olds: Shares) -> list[tuple[float, float]]:
    """Each rate of each NIC, as it is and as it was."""
    both = zip(chain.from_iterable(news), chain.from_iterable(olds), strict=True)
    return [pair for new, old in both for pair in zip(new, old, strict=True)]
