"""Deferred reports: states that can wait for a message to the same peer. No I/O.

The state of a channel after an eager message need not be written at once: the next eager message to that peer carries
it in the same write. A deferred report is released

    when an eager message to the peer is written                       `attach`
    when the rank waits, at once; or after 1 ms if data to that peer usually follows a report    `release_late`
    when the program may not call again for long, if the peer waits for it                       `release_owed`
    before a failure is raised, and at the end                                                   `release_all`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from optcc.runtime.protocol.connection import RecvConnection, SendConnection
from optcc.runtime.protocol.frames import State
from optcc.runtime.protocol.local import NEVER_S, LocalRank

HOLD_S = 0.001
_CHANCES, _CHANCES_MAX, _MISS = 4, 64, 8
"""Data usually follows once it has so many times within `HOLD_S`; holding a report in vain counts as `_MISS` of them.
"""


class ReportHistory:
    """How often data to a peer has followed a report within `HOLD_S`."""

    __slots__ = ("chances", "hold_to_s", "reported_s")

    def __init__(self) -> None:
        self.reported_s, self.hold_to_s = 0.0, NEVER_S
        self.chances = 0

    def note_message(self, now_s: float) -> None:
        """An eager message goes to the peer, and could have carried what was reported just before."""
        if now_s - self.reported_s < HOLD_S:
            self.chances = min(self.chances + 1, _CHANCES_MAX)
        self.reported_s = 0.0

    def note_carried(self) -> None:
        """A deferred report was carried by a message."""
        self.hold_to_s = NEVER_S
        if self.chances < _CHANCES_MAX:
            self.chances += 1


class Reporter(Protocol):
    """The states of the channels from a peer (`Inbound`)."""

    history: ReportHistory

    @property
    def owes_report(self) -> bool:
        """True if a message was delivered whose slot the sender does not know of yet."""
        ...

    @property
    def connections(self) -> Sequence[RecvConnection | None]:
        """By rail."""
        ...

    def state_of(self, k: int) -> State:
        """The state of a channel, to be reported now."""
        ...


class Reports:
    """The deferred reports of a rank.

    `deferred` are the connections whose states may wait. `hold_to_s`: when `release_late` has something to do next.
    `is_owed`: a peer may wait for one.
    """

    def __init__(self, local: LocalRank, inbounds: Mapping[int, Reporter]) -> None:
        self._local, self._inbounds = local, inbounds
        self.deferred: dict[RecvConnection, Reporter] = {}
        self.hold_to_s = NEVER_S
        self.is_owed = False

    def forget(self, connection: RecvConnection) -> None:
        """The connection is lost; its states are reported over another one."""
        self.deferred.pop(connection, None)

    def attach(self, connection: SendConnection, now_s: float) -> State | None:
        """Puts what is deferred for the peer in front of the eager message that is written next; but for the last
        state, which is returned for the message's own header."""
        inbound = self._inbounds.get(connection.peer)
        if inbound is None:
            return None
        history = inbound.history
        if history.reported_s:
            history.note_message(now_s)
        last: State | None = None
        if self.deferred:
            for each in inbound.connections:
                if each is not None and each in self.deferred:
                    del self.deferred[each]
                    history.note_carried()
                    for k in each.states:
                        if last is not None:
                            connection.report(*last)
                        last = inbound.state_of(k)
                    each.states.clear()
        return last

    def release_late(self, now_s: float) -> None:
        """This rank waits: writes what is deferred, except where a message to the peer is likely to follow."""
        self.hold_to_s = NEVER_S
        if not self.deferred:
            return
        for connection, inbound in list(self.deferred.items()):
            history = inbound.history
            if now_s >= history.hold_to_s:
                history.chances = max(0, history.chances - _MISS)
            elif history.chances >= _CHANCES:
                history.hold_to_s = min(history.hold_to_s, now_s + HOLD_S)
                self.hold_to_s = min(self.hold_to_s, history.hold_to_s)
                continue
            history.reported_s, history.hold_to_s = now_s, NEVER_S
            self._release(connection)

    def release_owed(self) -> None:
        """Writes the reports that peers may wait for; this rank may not call again for long."""
        self.is_owed = False
        for connection, inbound in list(self.deferred.items()):
            if inbound.owes_report:
                inbound.history.hold_to_s = NEVER_S
                self._release(connection)

    def release_all(self) -> None:
        """Writes everything that is deferred."""
        self.is_owed, self.hold_to_s = False, NEVER_S
        for connection, inbound in list(self.deferred.items()):
            inbound.history.hold_to_s = NEVER_S
            self._release(connection)

    def _release(self, connection: RecvConnection) -> None:
        del self.deferred[connection]
        self._local.wake(connection)
