"""An allgather out of messages alone, in ceil(log2 n) rounds (Bruck et al., IEEE TPDS 8(11), 1997).

A rank begins with its own part. In each round it passes what it has to the rank `distance` before it, and gets as much
from the rank as far behind it, the `distance` doubled each time; so it has the parts of the ranks from itself on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optcc.runtime.transport import Bytes


class Round(NamedTuple):
    """To whom `out` goes, and from whom `into` comes."""

    dst: int
    out: Bytes
    src: int
    into: Bytes


class Gathering:
    """One rank's part of an allgather: the `rounds`, whose views are those of its memory, and then the `parts`.

    >>> [(each.dst, len(each.out), each.src, len(each.into)) for each in Gathering(0, 5, b"me").rounds]
    [(4, 2, 1, 2), (3, 4, 2, 4), (1, 2, 4, 2)]
    """

    def __init__(self, rank: int, n_ranks: int, payload: bytes) -> None:
        self._rank, self._n_ranks, self._size = rank, n_ranks, len(payload)
        have = self._have = np.zeros(n_ranks * len(payload), dtype=np.uint8)
        have[: len(payload)] = np.frombuffer(payload, np.uint8)
        self.rounds: list[Round] = []
        distance = 1
        while distance < n_ranks:
            length = min(distance, n_ranks - distance) * len(payload)
            first = distance * len(payload)
            dst, src = (rank - distance) % n_ranks, (rank + distance) % n_ranks
            self.rounds.append(Round(dst, have[:length], src, have[first : first + length]))
            distance *= 2

    @property
    def parts(self) -> list[bytes]:
        """Everybody's, by rank, after the last round."""
        starts = [(rank - self._rank) % self._n_ranks * self._size for rank in range(self._n_ranks)]
        return [self._have[start : start + self._size].tobytes() for start in starts]
