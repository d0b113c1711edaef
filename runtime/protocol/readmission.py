"""Whether a NIC that was taken out of use carries enough to be measured, and used, again. No I/O, no clock.

The connections over a NIC that has collapsed are lost, since what is on its way there is not acknowledged; new ones are
soon up, since a handshake is short. To measure such a NIC takes seconds in which nothing else is under way. So its rank
has some padding go over it first, beside whatever runs: out on one connection, and in on another, for which it asks the
peer. The NIC is readmitted once all of it has come in good time; else it is tried again later. What a trial costs goes
over the NIC that is not used.
"""

from __future__ import annotations

from dataclasses import dataclass

from optcc.runtime.protocol.connection import RecvConnection, SendConnection
from optcc.runtime.protocol.frames import BURST_BYTES_MAX, BurstWord
from optcc.runtime.protocol.liveness import CLOSE_WATCH_S
from optcc.runtime.protocol.local import LocalRank
from optcc.runtime.protocol.rates import LEAST_SHARE

LIMIT_S, ROUND_TRIPS = 0.06, 8
"""A part may take so long, or what it takes at `LEAST_SHARE` of the rate if that is longer, and so many round trips, in
which a connection that was idle gains speed."""
PARTS, PART_BYTES_MIN, PART_BYTES_MAX = 5, 1 << 16, BURST_BYTES_MAX
"""A trial has so many parts out and in, in turn, so that acknowledgements wait behind nothing: each is what the NIC
carries at `LEAST_SHARE` of its rate in `LIMIT_S`, within these limits. With smaller ones a
NIC at 1 % of its rate could pass: a token bucket lets a burst through, and fills again while the other way is
tried."""
PAUSE_S, PAUSE_S_MAX = 0.25, 1.0
"""From one trial to the next: twice as long each time."""


@dataclass(slots=True)
class _Trial:
    """When a NIC is tried next, and the pause after that. While it is tried: the connections out and in, how many parts
    are left, and how many bytes are to have been acknowledged, or to have come, by when."""

    next_s: float
    pause_s: float = PAUSE_S
    ends: tuple[SendConnection, RecvConnection] | None = None
    n_left: int = 0
    goal_bytes: int = 0
    until_s: float = 0.0


class Readmissions:
    """The NICs of a rank that are to be tried before they are used again."""

    def __init__(self, local: LocalRank) -> None:
        self._local = local
        self._trials: dict[int, _Trial] = {}

    def await_trial(self, nic: int, wait_s: float = 0.0) -> None:
        """A NIC is out of use: it is not tried for so long."""
        self._trials[nic] = _Trial(self._local.now_s + wait_s)

    def rests(self, nic: int) -> bool:
        """Whether a NIC that is out of use waits for longer than from one trial to the next."""
        trial = self._trials[nic]
        return trial.next_s > self._local.now_s + trial.pause_s

    def hasten(self, nic: int) -> None:
        """A NIC that is out of use is tried at once, unless it has just been."""
        if self.rests(nic):
            self._trials[nic].next_s = self._local.now_s

    def is_over(self, nic: int) -> bool:
        """Whether a NIC that is out of use has carried enough; to be called at each tick while it has connections."""
        local, trial = self._local, self._trials[nic]
        if trial.ends is None:
            if local.now_s >= trial.next_s:
                self._begin(nic, trial)
        elif self._carried(nic, trial, trial.ends) >= trial.goal_bytes:
            if not trial.n_left:
                del self._trials[nic]
                return True
            self._send(nic, trial, trial.ends)
        elif local.now_s >= trial.until_s or any(each.is_closed for each in trial.ends):
            trial.ends, trial.next_s = None, local.now_s + trial.pause_s
            trial.pause_s = min(PAUSE_S_MAX, 2 * trial.pause_s)
        if trial.ends is not None:
            local.watch_within(CLOSE_WATCH_S)
        return False

    def _begin(self, nic: int, trial: _Trial) -> None:
        """Tries a NIC, if it has connections both ways."""
        free = [each for each in self._local.up_over(nic) if not each.blocked and not each.suspect]
        out = next((each for each in free if isinstance(each, SendConnection)), None)
        in_ = next((each for each in free if isinstance(each, RecvConnection)), None)
        if out is not None and in_ is not None:
            trial.ends, trial.n_left = (out, in_), 2 * PARTS
            self._send(nic, trial, trial.ends)

    def _carried(self, nic: int, trial: _Trial, ends: tuple[SendConnection, RecvConnection]) -> int:
        """The bytes so far, the way that the present part goes."""
        return self._local.rail_counts[nic].received_bytes if trial.n_left % 2 else ends[0].carried_in_all()[0]

    def _send(self, nic: int, trial: _Trial, ends: tuple[SendConnection, RecvConnection]) -> None:
        """Has the next part go over a NIC."""
        local, (out, in_) = self._local, ends
        is_in = trial.n_left % 2 == 0
        trial.n_left -= 1
        rate, connection = (local.own_nics[nic][4], in_) if is_in else (local.own_nics[nic][3], out)
        n_bytes = min(PART_BYTES_MAX, max(PART_BYTES_MIN, round(rate * LEAST_SHARE * LIMIT_S)))
        local.have_padded(connection, n_bytes)
        trial.goal_bytes = self._carried(nic, trial, ends) + n_bytes
        least_s = connection.kernel.least_round_trip_s if connection.kernel else 0.0
        trial.until_s = local.now_s + max(LIMIT_S, n_bytes / rate / LEAST_SHARE) + ROUND_TRIPS * least_s

    def hear(self, peer: int, number: int) -> None:
        """A peer tries its NIC: padding goes to it over the connection that it names."""
        word = BurstWord.read(number)
        for connection in self._local.of_session(peer, word.session):
            if not connection.blocked:
                connection.pad(min(BURST_BYTES_MAX, word.n_bytes))
                self._local.wake(connection)
