"""What an engine goes on for, and the barrier: all ranks have come before one goes on. The engine waits, not this."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from optcc.plan import Channel
from optcc.runtime.transport import RECEIVED, SENT, Event, Transport


class Goal(Protocol):
    """What the engine goes on for."""

    @property
    def done(self) -> bool:
        """True once it need not go on."""
        ...


class _Never:
    """No goal: the engine goes on as long as it may."""

    done = False


NEVER = _Never()


class BarrierRound(NamedTuple):
    """The goal of a round: of each event so many have been seen."""

    seen: dict[Event, int]
    wanted: dict[Event, int]

    @property
    def done(self) -> bool:
        """True once they have."""
        return all(self.seen.get(event, 0) >= count for event, count in self.wanted.items())


class Barrier:
    """Barriers of all ranks of `transport`, on channels of their own in `group`.

    In ceil(log2 n) rounds (Hensgen, Finkel and Manber 1988): in round i each rank tells the rank 2^i after it.
    """

    def __init__(self, transport: Transport, group: int) -> None:
        self._transport, self._group = transport, group
        # For each round, the channels to the rank that is told and from the one that tells.
        self._channels: list[tuple[int, int]] | None = None
        self._seen: dict[Event, int] = {}

    def rounds(self) -> Iterator[BarrierRound]:
        """One barrier: posts the messages of each round; the next one may be taken once the last is done."""
        if self._channels is None:
            self._channels = self._open()
        byte = np.zeros(2, dtype=np.uint8)
        for out, in_ in self._channels:
            wanted = {event: self._seen.get(event, 0) + 1 for event in ((SENT, out), (RECEIVED, in_))}
            self._transport.post_recv(in_, byte[:1])
            self._transport.post_send(out, byte[1:])
            yield BarrierRound(self._seen, wanted)

    def take(self, event: Event) -> None:
        """An event of these channels."""
        self._seen[event] = self._seen.get(event, 0) + 1

    def _open(self) -> list[tuple[int, int]]:
        n, me = self._transport.n_ranks, self._transport.rank
        distances = [1 << i for i in range((n - 1).bit_length())]
        channels = [Channel(rank, (rank + distance) % n, 1) for distance in distances for rank in range(n)]
        handles = self._transport.open(channels, self._group)
        return [(handles[i * n + me], handles[i * n + (me - d) % n]) for i, d in enumerate(distances)]
