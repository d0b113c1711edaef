"""Memory for messages between ranks of one host (`host_memory`): what `shared_lanes` needs of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from optcc.plan import Channel, Plan
from optcc.runtime.buffers import address_of, touched
from optcc.runtime.host_memory import RECORD_BYTES, SharedSegment, open_segment
from optcc.runtime.shared_lanes import lanes_within
from optcc.runtime.transport import Bytes

SHARED_BYTES_MIN = 1 << 14
"""Channels none of whose messages is longer are the transport's: these go without waiting for a slot."""


def long_lanes_within(plan: Plan, channels: Sequence[Channel], hosts: Sequence[int]) -> list[int]:
    """`lanes_within` of the channels of a plan, which are `channels` between ranks of a transport, that carry a message
    longer than `SHARED_BYTES_MIN`."""
    sends = plan.out_channel >= 0
    longest = np.zeros(len(channels), dtype=np.int64)
    np.maximum.at(longest, plan.out_channel[sends], plan.bytes[sends])
    return [number for number in lanes_within(channels, hosts) if longest[number] > SHARED_BYTES_MIN]


class HostLaneMemory:
    """Slots in a segment; see `optcc.runtime.shared_lanes.LaneMemory`."""

    def __init__(self) -> None:
        self._segment: SharedSegment | None = None
        self._address = 0
        self.error = ""
        self._opened: dict[int, Bytes] = {}

    def slots(self, n_bytes: int) -> Bytes:
        """See `LaneMemory`; memory of this process alone if there is no room, see `error`."""
        try:
            self._segment = SharedSegment(n_bytes)
        except OSError as error:
            self.error = str(error)
            return touched(n_bytes)
        self._address = address_of(self._segment.array)
        return self._segment.array

    def record(self) -> bytes:
        """See `LaneMemory`."""
        return bytes(RECORD_BYTES) if self._segment is None else self._segment.record

    def open(self, rank: int, record: bytes) -> None:
        """See `LaneMemory`."""
        self._opened[rank] = open_segment(record)

    def opened(self) -> None:
        """See `LaneMemory`."""
        if self._segment is not None:
            self._segment.forget()

    def offset_of(self, slot: Bytes) -> int:
        """See `LaneMemory`."""
        return address_of(slot) - self._address

    def write(self, rank: int, offset: int, view: Any, then: Callable[[], None]) -> None:
        """See `LaneMemory`."""
        self._opened[rank][offset : offset + view.nbytes] = view
        then()

    def close(self) -> None:
        """See `LaneMemory`."""
        self._opened.clear()
        if self._segment is not None:
            self._segment.free()
            self._segment = None
