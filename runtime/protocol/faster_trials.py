"""Whether a NIC that was measured to be slow carries more again. No I/O, no clock.

Its traffic does not tell. Under plans for a slow NIC it is given no more than that; and bytes over the time in which
some were on their way are too many, as a NIC that is held back by a shaper or a switch lets through at once, after each
pause, what it could have carried meanwhile. So while the job sends, the rank of such a NIC has padding go over it now
and then for a moment, to all peers or from all, beside what goes there anyway. The NIC carries more if that does, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from optcc.runtime.protocol.connection import SendConnection
from optcc.runtime.protocol.liveness import CLOSE_WATCH_S
from optcc.runtime.protocol.local import Established, LocalRank

PADDED, LEAST_MISSING = 0.2, 0.15
"""The padding is such a part of what the NIC should carry, or what it is not known to, if that is less; if that is less
than the second share it is not tried."""
TRIAL_S, FIRST_S = 0.1, 0.03
"""A trial takes so long; after the second time it ends if it is in vain so far."""
ENOUGH, HOPEFUL = 0.4, 0.3
"""So much of the padding must have gone beyond what is known at the end of a trial, and so far."""
AT_ONCE_S = 0.005
"""A NIC that was idle may let through at once what it carries in so long; once in a trial that takes twenty times as
long, so less is allowed for it than in windows of traffic (`optcc.runtime.protocol.rates`)."""
PAUSE_S, PAUSE_S_MAX, GROWTH = 0.4, 8.0, 1.25
"""From when a NIC is known to be slow, or a trial, to the next one: longer each time by the last factor, so it is a
fifth of the time for which the NIC has been slow."""
BUSY_S = 0.05
"""A NIC is tried if it has carried meanwhile what it carries in so long."""


@dataclass(slots=True)
class _Trial:
    """Of a NIC that is known to carry such a share, out or in: when it is tried next, after what pause, and how much it
    had carried, bytes, before; while it is tried, the connections, and since and until when they were padded."""

    is_out: bool
    known: float
    next_s: float
    before: int
    pause_s: float = PAUSE_S
    ends: Sequence[Established] = ()
    began_s: float = 0.0
    padded_s: float = 0.0


class FasterTrials:
    """The NICs of a rank: `slow` has the shares, out and in, of those that were measured to be slow, and `is_faster` is
    told of one that is no longer, and whether out."""

    def __init__(
        self,
        local: LocalRank,
        slow: Callable[[], dict[int, tuple[float, float]]],
        is_faster: Callable[[int, bool], None],
    ) -> None:
        self._local, self._slow, self._is_faster = local, slow, is_faster
        self._trials: dict[int, _Trial] = {}

    def is_tried(self, nic: int) -> bool:
        """Whether what waits on the connections over a NIC may be padding."""
        return nic in self._trials and bool(self._trials[nic].ends)

    def look(self, now_s: float) -> None:
        """At each tick: begins trials, sends padding that is due, and ends them."""
        slow = self._slow()
        for nic in self._trials.keys() - slow.keys():
            del self._trials[nic]
        for nic, shares in slow.items():
            is_out, known = shares[0] <= shares[1], min(shares)
            trial = self._trials.get(nic)
            if trial is None or (trial.is_out, trial.known) != (is_out, known):
                carried = self._carried(nic, is_out)
                self._trials[nic] = _Trial(is_out, known, now_s + PAUSE_S, carried)
            elif trial.ends:
                self._go_on(nic, trial, now_s)
            elif now_s >= trial.next_s and 1 - known >= LEAST_MISSING:
                self._begin(nic, trial, now_s)

    def _rate(self, nic: int, trial: _Trial) -> int:
        rates = self._local.own_nics[nic][3:5]
        return rates[not trial.is_out]

    def _carried(self, nic: int, is_out: bool) -> int:
        """The bytes so far, one way; those out that were acknowledged."""
        if not is_out:
            return self._local.rail_counts[nic].received_bytes
        return sum(each.carried_in_all()[0] for each in self._local.up_over(nic) if isinstance(each, SendConnection))

    def _begin(self, nic: int, trial: _Trial, now_s: float) -> None:
        """Tries a NIC, if it is in use."""
        carried = self._carried(nic, trial.is_out)
        # Less than before where a connection is new.
        trial.before = min(trial.before, carried)
        if carried - trial.before < BUSY_S * trial.known * self._rate(nic, trial):
            return
        ends = [each for each in self._local.up_over(nic) if isinstance(each, SendConnection) == trial.is_out]
        if ends and not any(each.suspect for each in self._local.up_over(nic)):
            trial.ends, trial.before, trial.began_s, trial.padded_s = ends, carried, now_s, now_s
            self._pad(nic, trial, now_s)

    def _go_on(self, nic: int, trial: _Trial, now_s: float) -> None:
        elapsed_s, rate = now_s - trial.began_s, self._rate(nic, trial)
        carried = self._carried(nic, trial.is_out)
        beyond_s = (carried - trial.before) / rate - trial.known * elapsed_s
        padded_s = min(PADDED, 1 - trial.known) * elapsed_s
        is_over = elapsed_s >= TRIAL_S
        has_gone = beyond_s >= (ENOUGH * padded_s + trial.known * AT_ONCE_S if is_over else HOPEFUL * padded_s)
        is_lost = any(each.is_closed for each in trial.ends)
        if is_over or is_lost or (elapsed_s >= FIRST_S and not has_gone):
            trial.ends, trial.before, trial.next_s = (), carried, now_s + trial.pause_s
            trial.pause_s = min(PAUSE_S_MAX, GROWTH * trial.pause_s)
            if has_gone and not is_lost:
                self._is_faster(nic, trial.is_out)
        else:
            self._pad(nic, trial, now_s)

    def _pad(self, nic: int, trial: _Trial, now_s: float) -> None:
        """Has padding go over a NIC that is due until the next tick."""
        until_s = now_s + CLOSE_WATCH_S
        n_bytes = min(PADDED, 1 - trial.known) * self._rate(nic, trial) * (until_s - trial.padded_s)
        trial.padded_s = until_s
        for connection in trial.ends:
            if not connection.blocked:
                self._local.have_padded(connection, round(n_bytes / len(trial.ends)))
        self._local.watch_within(CLOSE_WATCH_S)
