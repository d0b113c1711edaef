"""`NicLog`: one line for each NIC of this rank that is given up, slower than it was, back, or at another address, and
for each rank that it reaches through others alone, or waits for.

The lines are warnings of the logger `optcc.nics`, which Python prints on stderr unless a program says otherwise. A
state counts once it has lasted `SETTLE_S`, at once if the kernel says that the link is down, and a NIC has at most one
line a `PAUSE_S`, so that one that flaps does not fill the log.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

SETTLE_S, PAUSE_S = 0.25, 1.0
SHARE_STEP = 0.1
"""A measured rate has a line if it differs so much, as a share of the declared one, from what the last line said."""
UP, DOWN, SILENT = "up", "down", "silent"

logger = logging.getLogger("optcc.nics")


class CarryingConnection(Protocol):
    """A connection that is up."""

    nic: int
    is_avoided: bool


@dataclass(slots=True)
class _NicState:
    said: str = UP
    seen: str = UP
    since_s: float = 0.0
    gone_s: float = 0.0
    line_s: float = -PAUSE_S
    has_carried: bool = False
    share: float = 1.0


class NicLog:
    """What was last said of each NIC of a rank."""

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        self._rank, self._names = rank, tuple(names)
        self._nics = [_NicState() for _ in names]
        self._detoured: Set[int] = frozenset()
        # The ranks that are waited for, and since when.
        self._absent: dict[int, float] = {}

    def look(
        self, now_s: float, up: Sequence[bool], connections: Sequence[CarryingConnection], shares: Sequence[float]
    ) -> None:
        """By NIC, whether the kernel says that it is up, and its measured share of its declared rate; and the
        connections of this rank that are up. A NIC without any counts as silent only while another NIC has some:
        otherwise it is the peers that have gone."""
        carrying = [False] * len(self._nics)
        for each in connections:
            carrying[each.nic] |= not each.is_avoided
        for number, state in enumerate(self._nics):
            if carrying[number]:
                seen, state.has_carried = UP, True
            elif not up[number]:
                seen = DOWN
            else:
                seen = SILENT if state.has_carried and any(carrying) else state.seen
            if seen != state.seen:
                state.seen, state.since_s = seen, now_s
            is_settled = seen == DOWN or now_s - state.since_s >= SETTLE_S
            if seen != state.said and is_settled and now_s - state.line_s >= PAUSE_S:
                self._say_state(number, now_s)
            elif seen == UP == state.said and abs(shares[number] - state.share) >= SHARE_STEP:
                self._say_share(number, now_s, shares[number])

    def note_address(self, number: int, former: str, address: str) -> None:
        """A NIC of this rank has another address."""
        name = self._names[number]
        logger.warning("optcc: rank %d: %s has address %s now, not %s", self._rank, name, address, former)

    def note_detours(self, peers: Set[int]) -> None:
        """What goes to these ranks goes through other ranks."""
        if peers == self._detoured:
            return
        for peer in sorted(peers - self._detoured):
            logger.warning(
                "optcc: rank %d: no rail to rank %d is left: what goes there goes through other ranks", self._rank, peer
            )
        self._detoured = peers

    def note_absent(self, now_s: float, peers: Set[int], up_to_s: float) -> None:
        """No rail reaches these ranks, which are waited for, up to `up_to_s`."""
        for peer in sorted(peers - self._absent.keys()):
            self._absent[peer] = now_s
            logger.warning(
                "optcc: rank %d: no rail to rank %d is left: it is waited for, up to %g s", self._rank, peer, up_to_s
            )
        for peer in sorted(self._absent.keys() - peers):
            waited_s = now_s - self._absent.pop(peer)
            logger.warning("optcc: rank %d: rank %d is back after another %.1f s", self._rank, peer, waited_s)

    def _say_state(self, number: int, now_s: float) -> None:
        state = self._nics[number]
        if state.seen == UP:
            logger.warning(
                "optcc: rank %d: %s is back after %.1f s", self._rank, self._names[number], now_s - state.gone_s
            )
        else:
            if state.said == UP:
                state.gone_s = state.since_s
            rest = "messages go over the other NICs" if len(self._nics) > 1 else "there is no other NIC"
            logger.warning("optcc: rank %d: %s is %s: %s", self._rank, self._names[number], state.seen, rest)
        state.said, state.line_s = state.seen, now_s

    def _say_share(self, number: int, now_s: float, share: float) -> None:
        state = self._nics[number]
        if now_s - state.line_s < PAUSE_S:
            return
        logger.warning(
            "optcc: rank %d: %s sends at %d %% of its declared rate",
            self._rank,
            self._names[number],
            round(100 * share),
        )
        state.share, state.line_s = share, now_s
