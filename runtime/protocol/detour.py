"""Paths through other ranks, for two that share no rail any more. No I/O.

A rank that no rail of a pair joins to its peer opens a connection to a third rank, which passes on what comes
(`relay`), if need be to a fourth. Bytes on it are those of a connection between the two: the handshake with the peer
follows one with each rank on the path. Such a *detour* is one more rail of the pair, which is used only while no other
is, and closed when one is back. It carries what is in flight when the last rail is lost; plans made since then send
nothing between the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set
from itertools import pairwise

from optcc.runtime.protocol.agreement import Agreement
from optcc.runtime.protocol.local import LocalRank
from optcc.runtime.protocol.outbound import Outbound
from optcc.runtime.protocol.rail import Detour
from optcc.runtime.protocol.rates import Rates

_UNREACHED_S = 2.0


class Detours:
    """The paths from one rank."""

    def __init__(self, local: LocalRank, outbounds: Mapping[int, Outbound], rates: Rates, agreement: Agreement) -> None:
        self._local, self._outbounds, self._rates, self._agreement = local, outbounds, rates, agreement
        # By peer, the pairs of ranks on paths that were tried.
        self._tried: dict[int, set[tuple[int, int]]] = {}

    def find(self, peer: int, *, is_first: bool) -> Detour | None:
        """A shortest path to a peer by what is known, and by what was tried since the first one; None if there is none.

        What is known may be late, so that a path need not work.
        """
        local, tried = self._local, self._tried.setdefault(peer, set())
        if is_first:
            tried.clear()
        ranks = set(range(len(local.book))) - local.left.keys() - {local.rank, peer}
        via: tuple[int, ...] = ()
        first: dict[int, tuple[int, int]] = {}
        # A NIC counts as down also if it has lost all its connections: one that was never opened may get through.
        for is_hopeful, is_anew in ((False, False), (True, False), (False, True)):
            if is_anew:
                tried.clear()
            first = {rank: nics for rank in ranks if (nics := self._way_to(rank, is_hopeful)) is not None}
            via = self._shortest(peer, first.keys(), is_hopeful)
            if via:
                break
        else:
            return None
        tried.update(pairwise((*via, peer)))
        mine, theirs = first[via[0]]
        return Detour(mine, local.address(via[0], theirs), via)

    def may_come(self, peer: int) -> bool:
        """See `PathFinder`."""
        return any(
            out.is_answered() for rank, out in self._outbounds.items() if rank not in self._local.left or rank == peer
        )

    def is_needed(self) -> bool:
        """True if two ranks that share no rail may still wait for each other: whoever is between must not leave.

        It is not between others and a rank that it has not reached for long itself, by whatever path.
        """
        local = self._local
        unreached = {peer for peer, out in self._outbounds.items() if out.dark_s >= _UNREACHED_S}
        done, leaving = local.left.keys() | {local.rank} | unreached, self._agreement.leaving
        return any(
            not {one, other} <= leaving and not self.has_rail(one, other)
            for one in {rank for rank, _ in self._rates.down} - done
            for other in range(len(local.book))
            if other != one and other not in done
        )

    def _way_to(self, rank: int, is_hopeful: bool) -> tuple[int, int] | None:
        """The NICs of a rail to a rank that is up, or that may be if none was tried; None if there is none.

        If `is_hopeful`, what is said of the other end counts for nothing.
        """
        local = self._local
        pairs = local.pairs(local.rank, rank)
        up = [pairs[connection.rail] for connection in local.up_to(rank) if connection.rail < len(pairs)]
        if not up and rank not in self._outbounds:
            up = [pair for pair in pairs if self.may_be_up(local.rank, pair[0], rank, pair[1])]
            if not up and is_hopeful:
                # Its own NICs a rank knows best.
                up = [pair for pair in pairs if (local.rank, pair[0]) not in self._rates.down]
        return up[0] if up else None

    def _shortest(self, peer: int, first: Set[int], is_hopeful: bool) -> tuple[int, ...]:
        """The ranks on a shortest path whose first rank is one of these; none if there is no path."""
        tried = self._tried[peer]

        def may_pass(src: int, dst: int) -> bool:
            return (src, dst) not in tried and (is_hopeful or self.has_rail(src, dst))

        # How many ranks from the peer each one is.
        steps, waiting = {peer: 0}, deque([peer])
        while waiting:
            dst = waiting.popleft()
            for rank in range(len(self._local.book)):
                is_new = rank not in steps and rank != self._local.rank and rank not in self._local.left
                if is_new and may_pass(rank, dst):
                    steps[rank] = steps[dst] + 1
                    waiting.append(rank)
        reached = first & steps.keys()
        if not reached:
            return ()
        via: tuple[int, ...] = (min(reached, key=lambda rank: (steps[rank], rank)),)
        while steps[via[-1]] > 1:
            nearer = (rank for rank in steps if steps[rank] == steps[via[-1]] - 1)
            via += (min(rank for rank in nearer if may_pass(via[-1], rank)),)
        return via

    def has_rail(self, src: int, dst: int) -> bool:
        """True if NICs of both that are not known to be down form a rail."""
        return any(self.may_be_up(src, mine, dst, theirs) for mine, theirs in self._local.pairs(src, dst))

    def may_be_up(self, src: int, mine: int, dst: int, theirs: int) -> bool:
        """True if neither of two NICs is known to be down."""
        return not self._rates.down & {(src, mine), (dst, theirs)}
