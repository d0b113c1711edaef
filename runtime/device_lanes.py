"""Memory for messages between GPUs of one host, by CUDA IPC (`device_ipc`): what `shared_lanes` needs of it.

Copies are the copy engine's (OUT), and a notice is posted once the host has learnt that one is done, a receive once it
has learnt that the GPU has read the slot: so no event has to be shared between processes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from optcc.runtime.cupy_kernels import address_of
from optcc.runtime.device_ipc import (
    HANDLE_BYTES,
    SharedMemory,
    close_memory,
    give_back,
    open_memory,
    take_memory,
)
from optcc.runtime.device_streams import COMPUTE, OUT, DeviceStreams

_RECORD = struct.Struct(f"<{HANDLE_BYTES}sQ")


class DeviceLaneMemory:
    """Slots in the memory of a GPU; see `optcc.runtime.shared_lanes.LaneMemory`."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams, self.error = streams, ""
        self._memory: SharedMemory | None = None
        # Of the ranks that are sent to: where their slots begin here, and how long they are.
        self._opened: dict[int, tuple[int, int]] = {}

    def slots(self, n_bytes: int) -> Any:
        """See `LaneMemory`."""
        self._memory = take_memory(self._streams.device_id, n_bytes)
        return self._memory.array[:n_bytes]

    def record(self) -> bytes:
        """See `LaneMemory`."""
        memory = self._memory
        return _RECORD.pack(*((bytes(HANDLE_BYTES), 0) if memory is None else (memory.handle, memory.n_bytes)))

    def open(self, rank: int, record: bytes) -> None:
        """See `LaneMemory`."""
        handle, n_bytes = _RECORD.unpack(record)
        with self._streams.device:
            self._opened[rank] = open_memory(handle), n_bytes

    def opened(self) -> None:
        """See `LaneMemory`."""

    def offset_of(self, slot: Any) -> int:
        """See `LaneMemory`."""
        assert self._memory is not None
        return address_of(slot) - self._memory.address

    def write(self, rank: int, offset: int, view: Any, then: Callable[[], None]) -> None:
        """See `LaneMemory`."""
        base, n_bytes = self._opened[rank]
        assert offset + view.nbytes <= n_bytes, f"slot of {view.nbytes} B at {offset} of {n_bytes} B"
        streams = self._streams
        with streams.device:
            streams.order(OUT, COMPUTE)
            streams.copy_across(base + offset, address_of(view), view.nbytes)
        streams.after(OUT, then)

    def close(self) -> None:
        """The memory of others is closed, this rank's is free for other plans."""
        with self._streams.device:
            for address, _ in self._opened.values():
                close_memory(address)
        self._opened.clear()
        if self._memory is not None:
            give_back(self._memory)
            self._memory = None
