"""One rail of a pair as its source sees it, and what a direction asks of others. No I/O."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from optcc.runtime.protocol.connection import SendConnection
from optcc.runtime.protocol.handshake import Dialing

_DIAL_SILENT_S = 0.5
REDIAL_S_MIN = 0.01
REDIAL_S_MAX = 0.2
CONNECT_S = 2.0
"""A connect that is waited for so long is given up."""


class Rail:
    """One rail of a pair: the NICs at both ends, by number, and the connection that this rank opens over it.

    `next_s` is when it is dialled next, `wait_s` the interval after that, `since_s` when the last dialling began.
    `connected_in_s` is how long the quickest connect took, which waits for no process; before the first, a guess on the
    safe side.

    A connect that was not answered soon is dialled anew, as the kernel repeats a lost SYN only after a second and the
    path may be back before. But where queues are full an answer takes as long as they do to drain: one, `patient`,
    begun at `patient_since_s`, is waited for beside those that follow it.
    """

    __slots__ = (
        *(
            "address",
            "connected_in_s",
            "connection",
            "dialing",
            "mine",
            "name",
            "next_s",
            "patient",
            "patient_since_s",
            "refused",
            "since_s",
            "theirs",
        ),
        "wait_s",
    )

    def __init__(self, name: str, mine: int, theirs: int, address: tuple[str, int]) -> None:
        self.name, self.mine, self.theirs, self.address = name, mine, theirs, address
        self.connection: SendConnection | None = None
        self.dialing: Dialing | None = None
        self.patient: Dialing | None = None
        self.next_s, self.wait_s, self.since_s, self.patient_since_s = 0.0, REDIAL_S_MIN, 0.0, 0.0
        self.connected_in_s = _DIAL_SILENT_S
        self.refused = False

    @property
    def dialings(self) -> list[Dialing]:
        """The connections that are being opened."""
        return [each for each in (self.dialing, self.patient) if each is not None]

    def connected(self, dialing: Dialing, now_s: float) -> Dialing | None:
        """The peer's kernel has answered one of them: the other, if there is one, is of no more use."""
        if dialing is self.patient:
            self.since_s = self.patient_since_s
        useless = next((each for each in self.dialings if each is not dialing), None)
        self.dialing, self.patient = dialing, None
        dialing.established = True
        self.connected_in_s = min(self.connected_in_s, now_s - self.since_s)
        return useless

    def wait_no_longer(self) -> None:
        """Dialled next at once, and at the shortest interval after that."""
        self.next_s, self.wait_s = 0.0, REDIAL_S_MIN

    def wait(self, now_s: float, *, refused: bool, was_silent: bool = False) -> None:
        """After a failure: the next try, at growing intervals.

        One that `was_silent` has taken longer than its interval: another interval would keep a healed path out of use.
        """
        self.refused = refused
        self.next_s = now_s + (REDIAL_S_MIN if was_silent else self.wait_s)
        self.wait_s = min(2 * self.wait_s, REDIAL_S_MAX)


class Detour(NamedTuple):
    """A path to a peer through other ranks, `via`: from which NIC of this rank to which address of the first one."""

    mine: int
    address: tuple[str, int]
    via: tuple[int, ...]


class PathFinder(Protocol):
    """Who knows paths through other ranks (`Detours`)."""

    def find(self, peer: int, *, is_first: bool) -> Detour | None:
        """A path to a peer, another one each time since the first; None if there is none."""
        ...

    def may_come(self, peer: int) -> bool:
        """True if a rank that may pass on bytes has not answered, and its kernel has: it computes."""
        ...


class Opposite(Protocol):
    """The opposite direction of a pair (`Inbound`)."""

    def repeat_states(self) -> None:
        """Some states went over a connection of this direction, and were lost with it."""
        ...

    def has_work(self) -> bool:
        """True if something is posted and has not come."""
        ...
