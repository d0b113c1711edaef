"""One of the two connections of a relay: what comes on one is written to the other (`relay`). No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from optcc.runtime.protocol.liveness import Connection
from optcc.runtime.protocol.settings import RailCount

QUEUE_BYTES = 1 << 18
READ_BYTES = 1 << 16
_nothing: list[tuple[int, int]] = []


class Passing(Protocol):
    """What a leg tells (`Relays`)."""

    def pass_on(self, leg: Leg, data: bytes) -> None:
        """Bytes have come."""
        ...

    def note_written(self, leg: Leg, *, was_full: bool) -> None:
        """Some of what waits was written; `was_full`: the other leg was not to be read before."""
        ...


class Leg(Connection):
    """One of the two connections of a relay, at NIC `nic` of this rank: what comes goes to the `other` one.

    `is_last`: it is closed once what waits is written. The rest is what drivers know of a `RecvConnection`.
    """

    __slots__ = ("_count", "_relays", "_stage", "_waiting", "blocked", "is_last", "n_waiting_bytes", "nic", "other")

    words, left, low_water = _nothing, None, 1
    offered_bytes = READ_BYTES

    def __init__(self, relays: Passing, nic: int, count: RailCount) -> None:
        super().__init__()
        self._relays, self.nic, self._count = relays, nic, count
        self._stage = memoryview(bytearray(READ_BYTES))
        self._waiting: deque[memoryview] = deque()
        self.n_waiting_bytes = 0
        self.blocked = self.is_last = False
        self.other: Leg | None = None
        self.wants_read = False

    def put(self, data: bytes | memoryview) -> None:
        """Queues what has come at the other leg."""
        self._waiting.append(memoryview(data))
        self.n_waiting_bytes += len(data)

    def buffers(self) -> list[memoryview]:
        """Where the next bytes go."""
        return [self._stage]

    def received(self, n_bytes: int) -> None:
        """So many bytes of `buffers` were filled."""
        self._count.received_bytes += n_bytes
        self._relays.pass_on(self, bytes(self._stage[:n_bytes]))

    def views(self) -> Sequence[memoryview]:
        """What to write next; empty if nothing waits."""
        if not self._waiting:
            self.blocked = False
        return (self._waiting[0],) if self._waiting else ()

    def written(self, n_bytes: int) -> bool:
        """So many bytes of `views` were written; True if that was all of them and more waits."""
        first = self._waiting[0]
        self._count.sent_bytes += n_bytes
        self.awaits = True
        was_full = self.n_waiting_bytes >= QUEUE_BYTES
        self.n_waiting_bytes -= n_bytes
        self.blocked = n_bytes < len(first)
        if self.blocked:
            self._waiting[0] = first[n_bytes:]
        else:
            self._waiting.popleft()
        self._relays.note_written(self, was_full=was_full)
        return bool(self._waiting) and not self.blocked
