"""Which end of a slow connection is slow: the sender's NIC, the receiver's, or the path. No I/O, no clock.

A rank that finds that its NIC sends slowly to one peer alone cannot tell. It has a little *padding* go over one end at
a time, to or from a third rank: first from its own NIC, then, asked by the receiver, to the receiver's. Where the slow
connection goes slower meanwhile, that end is what it and the padding share: its NIC is slow. Where it does not, twice,
it is the path. How fast the connection goes is what the kernel counts while it is busy, so pauses of the job do not
matter. Padding is half of what the connection carries, for a third of a second, once a second for each rank. If nothing
is found in six seconds, or there is no third rank, it stays with the sender's NIC, which is blamed until then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from optcc.runtime.protocol.connection import SendConnection
from optcc.runtime.protocol.flows import Rail
from optcc.runtime.protocol.frames import PADDING_FRAME, TRIAL_FRAME, PaddingWord, TrialKind, TrialWord
from optcc.runtime.protocol.liveness import WATCH_S
from optcc.runtime.protocol.local import Established, LocalRank
from optcc.runtime.protocol.nic_meter import LOADED_BYTES

_WINDOW_S, _BUSY_S_MIN, _LOADED_BYTES = 0.06, 0.04, 1 << 17
_PADDING_S, _PADDING_SHARE = 0.35, 0.5
_EVERY_S, _GIVE_UP_S = 1.0, 6.0
_WINDOWS = 2
_SHARED, _ALONE = 0.85, 0.92
"""Below the first share of what it carried, a connection shares what limits it with the padding; above the second it
does not."""
_CAME_SHARE = 0.3
"""A trial counts if so much of the padding came through."""


class KnownRates(Protocol):
    """What is known of rates (`Rates`)."""

    def clear_out(self, rail: Rail, out: float, path: float) -> None:
        """What was laid to this rank's NIC is the receiver's doing, or the path's, which carries such a share."""
        ...

    def know_in(self, nic: int, share: float) -> None:
        """A NIC of this rank takes in such a share of its declared rate."""
        ...


@dataclass(slots=True)
class Padding:
    """Padding that this rank sends, so many bytes/s."""

    connection: Established
    rate: float
    until_s: float
    sent_s: float


@dataclass(slots=True)
class SlowRail:
    """A rail that carries a `share` of what it should, for which this rank's NIC, which sent `out` before, is blamed.

    It carries `before` bytes/s while nothing is tried, `rates` while something is.

    `side` is the end that is tried: 0 this one, 1 the peer's. `mark` is what had been carried when the window began.
    `has_come`: enough padding came through.
    """

    share: float
    out: float
    since_s: float
    next_s: float = 0.0
    side: int = 0
    is_tried: bool = False
    has_come: bool = False
    before: float = 0.0
    rates: list[float] = field(default_factory=list)
    mark: tuple[int, float, float] = (0, 0.0, 0.0)
    marked_s: float = -1.0
    began_s: float = 0.0
    third: Established | None = None
    third_bytes: int = 0

    def rest(self, now_s: float, wait_s: float) -> None:
        """Nothing is tried until then."""
        self.is_tried, self.side, self.before, self.marked_s, self.third = False, 0, 0.0, -1.0, None
        self.rates.clear()
        self.next_s = now_s + wait_s


@dataclass(slots=True)
class _Asked:
    """A peer wants to know whether padding came over a connection since a time."""

    peer: int
    word: TrialWord
    third: Established
    n_padded: int
    began_s: float


class Trials:
    """The slow rails from one rank, and the padding that it sends for itself and for others."""

    def __init__(self, local: LocalRank, rates: KnownRates, connections: Callable[[], Mapping[Rail, SendConnection]]):
        self._local, self._rates, self._connections = local, rates, connections
        self._trials: dict[Rail, SlowRail] = {}
        self._paddings: list[Padding] = []
        self._asked: list[_Asked] = []
        self._padded_s = self._asked_s = -_EVERY_S
        self._turn = 0
        self._heard: dict[tuple[Rail, TrialKind], int] = {}

    def suspect(self, rail: Rail, share: float, out: float) -> None:
        """A rail carries such a share of what it should: this rank's NIC, which sent `out` before, is blamed for it."""
        self._trials[rail] = SlowRail(share, out, self._local.now_s)

    def drop(self, nic: int) -> None:
        """Something else is known of a NIC of this rank."""
        self._trials = {rail: each for rail, each in self._trials.items() if rail[0] != nic}

    def is_padded(self, connection: Established) -> bool:
        """True if what waits on a connection may be padding."""
        return any(each.connection is connection for each in self._paddings)

    def look(self, now_s: float) -> None:
        """At each tick: sends padding that is due, and measures."""
        if not (self._trials or self._paddings or self._asked):
            return
        self._pad(now_s)
        for asked in [each for each in self._asked if now_s - each.began_s >= _PADDING_S]:
            self._asked.remove(asked)
            self._answer(now_s, asked)
        connections = self._connections()
        self._trials = {
            rail: each for rail, each in self._trials.items() if each.is_tried or now_s - each.since_s < _GIVE_UP_S
        }
        trying = next((rail for rail, each in self._trials.items() if each.marked_s >= 0), None)
        for rail, trial in list(self._trials.items()):
            connection = connections.get(rail)
            if connection is None or connection.suspect:
                trial.rest(now_s, _EVERY_S)
            elif trying in (None, rail) and now_s >= trial.next_s:
                trying = rail
                self._measure(now_s, rail, trial, connection)
        if self._paddings or self._asked or trying is not None:
            self._local.watch_within(WATCH_S)

    # --- the rank that suspects

    def _measure(self, now_s: float, rail: Rail, trial: SlowRail, connection: SendConnection) -> None:
        """A window of a slow rail, if it is over: before something is tried, or meanwhile."""
        if trial.marked_s < 0:
            trial.mark, trial.marked_s = connection.carried_in_all(), now_s
            return
        n_bytes, _, open_s = (new - old for new, old in zip(connection.carried_in_all(), trial.mark, strict=True))
        if trial.is_tried and now_s - trial.began_s > 2 * _PADDING_S:
            trial.rest(now_s, _EVERY_S)
            return
        is_loaded = connection.waiting_bytes >= LOADED_BYTES or n_bytes >= _LOADED_BYTES
        if now_s - trial.marked_s < _WINDOW_S or open_s < _BUSY_S_MIN or not is_loaded:
            return
        trial.mark, trial.marked_s = connection.carried_in_all(), now_s
        if not trial.is_tried:
            trial.before = n_bytes / open_s
            self._begin(now_s, rail, trial)
        elif now_s - trial.began_s < _PADDING_S + _WINDOW_S and now_s - trial.began_s > _WINDOW_S:
            trial.rates.append(n_bytes / open_s)
        if trial.is_tried and not trial.side and trial.third is not None:
            came = trial.third.carried_in_all()[0] - trial.third_bytes
            trial.has_come = came >= _CAME_SHARE * _PADDING_SHARE * trial.before * (now_s - trial.began_s)
        if len(trial.rates) >= _WINDOWS and trial.has_come:
            self._conclude(now_s, rail, trial)

    def _begin(self, now_s: float, rail: Rail, trial: SlowRail) -> None:
        """Has padding go over one end of the rail."""
        trial.has_come, trial.began_s = False, now_s
        trial.rates.clear()
        rate = _PADDING_SHARE * trial.before
        if trial.side:
            trial.is_tried = True
            self._say(rail, TrialKind.ASKS, trial.share, rate)
            return
        third = self._third(rail[0], rail[1])
        if third is None or now_s - self._padded_s < _EVERY_S:
            trial.rest(now_s, _EVERY_S / 4)
            return
        trial.is_tried, trial.third, trial.third_bytes = True, third, third.carried_in_all()[0]
        self._send(third, rate)

    def _conclude(self, now_s: float, rail: Rail, trial: SlowRail) -> None:
        share = sum(trial.rates) / len(trial.rates) / max(trial.before, 1.0)
        for padding in self._paddings:
            if padding.connection is trial.third:
                padding.until_s = now_s
        if _SHARED < share < _ALONE:
            trial.rest(now_s, _EVERY_S)
        elif share >= _ALONE and not trial.side:
            trial.rest(now_s, 0.0)
            trial.side = 1
        else:
            del self._trials[rail]
            if trial.side:
                is_theirs = share <= _SHARED
                if is_theirs:
                    local, (mine, peer, theirs) = self._local, rail
                    should = local.book[local.rank][mine][3] / local.book[peer][theirs][4]
                    self._say(rail, TrialKind.BLAMES, min(1.0, trial.share * should), 0.0)
                self._rates.clear_out(rail, trial.out, 1.0 if is_theirs else trial.share / trial.out)

    def _third(self, nic: int, but: int) -> Established | None:
        """A connection over a NIC to another rank than `but`, the idlest one."""
        free = [each for each in self._local.up_over(nic) if each.peer != but and not each.blocked and not each.suspect]
        return min(free, key=lambda each: each.waiting_bytes if each.awaits else 0, default=None)

    # --- its peers

    def hear(self, peer: int, number: int) -> None:
        """What a peer asks or says of a rail between it and this rank."""
        word, local = TrialWord.read(number), self._local
        if word.theirs >= len(local.own_nics) or word.mine >= len(local.book[peer]):
            return
        rail = word.theirs, peer, word.mine
        before = self._heard.get((rail, word.kind))
        if before is not None and not word.is_after(before):
            return
        self._heard[rail, word.kind] = word.turn
        if word.kind is TrialKind.ASKS:
            third = self._third(word.theirs, peer)
            if third is not None and local.now_s - self._asked_s >= _EVERY_S / 2:
                self._asked_s = local.now_s
                local.say(third.peer, PADDING_FRAME, PaddingWord(third.session, word.rate).number)
                self._asked.append(_Asked(peer, word, third, third.n_padded, local.now_s))
        elif word.kind is TrialKind.CAME:
            trial = self._trials.get(rail)
            if trial is not None and trial.side and trial.is_tried:
                trial.has_come = True
                if len(trial.rates) >= _WINDOWS:
                    self._conclude(local.now_s, rail, trial)
        else:
            self._rates.know_in(word.theirs, word.share)

    def healed(self, rail: Rail, share: float) -> None:
        """The peer's NIC takes in more than it is known to."""
        self._say(rail, TrialKind.CLEARS, share, 0.0)

    def hear_padding(self, peer: int, number: int) -> None:
        """A peer has this rank send padding over a connection."""
        word, now_s = PaddingWord.read(number), self._local.now_s
        for connection in self._local.of_session(peer, word.session):
            if now_s - self._padded_s >= _EVERY_S / 2:
                self._send(connection, word.rate)

    def _answer(self, now_s: float, asked: _Asked) -> None:
        """Tells a peer if the padding has come."""
        came = asked.third.n_padded - asked.n_padded
        if came >= _CAME_SHARE * asked.word.rate * (now_s - asked.began_s):
            self._say((asked.word.theirs, asked.peer, asked.word.mine), TrialKind.CAME, 1.0, 0.0)

    def _say(self, rail: Rail, kind: TrialKind, share: float, rate: float) -> None:
        mine, peer, theirs = rail
        self._turn += 1
        self._local.say(peer, TRIAL_FRAME, TrialWord(self._turn, mine, theirs, kind, share, rate).number)

    def _send(self, connection: Established, rate: float) -> None:
        now_s = self._padded_s = self._local.now_s
        self._paddings.append(Padding(connection, rate, now_s + _PADDING_S, now_s))
        self._local.look_within(0.0)

    def _pad(self, now_s: float) -> None:
        """Sends what is due, in small parts: what else goes there waits behind it."""
        for padding in self._paddings:
            n_bytes = int(padding.rate * (min(now_s, padding.until_s) - padding.sent_s))
            connection = padding.connection
            if n_bytes > 0 and not connection.is_closed and not connection.blocked:
                connection.pad(n_bytes)
                self._local.wake(connection)
                padding.sent_s = now_s
        # What is under way of it when it ends is still padding.
        self._paddings = [
            each for each in self._paddings if now_s < each.until_s + _PADDING_S and not each.connection.is_closed
        ]
