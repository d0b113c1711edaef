"""One rank's end of a network that is memory of this process (`loopback`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from optcc.plan import Channel
from optcc.runtime.transport import COLLECTIVE_TIMEOUT_S, Event


class Network(Protocol):
    """What all ranks' ends call, each with its rank; see `Transport`."""

    n_ranks: int

    def open(self, rank: int, channels: Sequence[Channel], group: int) -> list[int]:
        """The handles of channels."""
        ...

    def poll(self, rank: int, timeout_s: float) -> list[Event]:
        """What has happened at `rank`."""
        ...

    def allgather(self, number: int, rank: int, payload: bytes, timeout_s: float) -> list[bytes]:
        """Round `number` of the small exchanges."""
        ...

    def abort(self, rank: int, cause: str) -> None:
        """`rank` gives up."""
        ...


N = TypeVar("N", bound=Network)


class RankEnd(Generic[N]):
    """All of a `Transport` but how messages are posted."""

    __slots__ = ("_n_rounds", "_network", "_rank")

    def __init__(self, network: N, rank: int) -> None:
        self._network, self._rank = network, rank
        self._n_rounds = 0

    @property
    def rank(self) -> int:
        """The rank whose end this is."""
        return self._rank

    @property
    def n_ranks(self) -> int:
        """Ranks on the network."""
        return self._network.n_ranks

    def open(self, channels: Sequence[Channel], group: int = 0, carried: Sequence[int] = ()) -> list[int]:
        """See `Transport`."""
        del carried  # the network divides what it divides by its rates alone
        return self._network.open(self._rank, channels, group)

    def poll(self, timeout_s: float) -> list[Event]:
        """See `Transport`."""
        return self._network.poll(self._rank, timeout_s)

    def allgather(self, payload: bytes, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> list[bytes]:
        """See `Transport`."""
        self._n_rounds += 1
        return self._network.allgather(self._n_rounds, self._rank, payload, timeout_s)

    def barrier(self, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        """See `Transport`."""
        self.allgather(b"", timeout_s)

    def abort(self, cause: str) -> None:
        """See `Transport`."""
        self._network.abort(self._rank, cause)

    def close(self) -> None:
        """See `Transport`; the network is memory and outlives its ends."""
