"""Messages of a plan between ranks of one host, from GPU memory into GPU memory by CUDA IPC (`device_ipc`).

    rank a, the sender                                   rank b, the receiver
                                     credit              slot k is free: a receive is posted for the notice,
    array ── copy engine (OUT) ──►   <──────             and the credit says where in b's shared memory the slot is
         │                      └─────────────────────►  slot k
         the GPU has copied          notice, 1 B
         it, knows the host          ──────>             the message has arrived; kernels read the slot where it is

The slots of a plan lie in one allocation of the receiver, whose handle the senders of its host open when the plan is
made ready. A message is then three steps: credit, copy, notice. The plan's own channel carries the notice, so that its
events mean what they mean for any message; the credit takes a channel of its own in the other direction.

Invariants. A slot is written between its credit and its notice, and not else: the engine posts a receive only once the
host has learnt that the GPU has read the slot, and the notice is posted only once the host has learnt that the copy is
done. So no event has to be shared between processes. The i-th credit, copy and notice of a channel are those of its
i-th message: all three are in order. At the end of a run every credit has been taken, as there is one for each message.

After a failure a copy may be under way into memory of a rank that has given up: that memory is not used again.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from optcc.plan import Channel
from optcc.runtime.cupy_kernels import address_of
from optcc.runtime.device_ipc import (
    HANDLE_BYTES,
    SharedMemory,
    close_memory,
    give_back,
    open_memory,
    take_memory,
)
from optcc.runtime.device_self_test import first_text
from optcc.runtime.device_streams import COMPUTE, OUT, DeviceStreams
from optcc.runtime.plan_handshake import Gathers
from optcc.runtime.transport import RECEIVED, Bytes, Event, Transport

CREDIT_GROUPS = 1 << 40
"""Channels of credits are in the group of the plan's channels and so many more, in which no plan's are."""
_CREDIT = struct.Struct("<Q")
_RECORD = struct.Struct(f"<{HANDLE_BYTES}sQ")
_NOTICE = np.zeros(1, dtype=np.uint8)


class SharedLanes:
    """The channels of a plan, here of ranks of `transport` with `handles` there, that take this way: `hosts` says for
    each rank which ranks share GPU memory with it (`optcc.runtime.device_paths.DevicePath`).

    `listen` has the events of a channel given to a function.
    """

    def __init__(
        self,
        transport: Transport,
        listen: Callable[[int, Callable[[Event], None]], None],
        streams: DeviceStreams,
        channels: Sequence[Channel],
        handles: Sequence[int],
        group: int,
        hosts: Sequence[int],
    ) -> None:
        self._transport, self._streams = transport, streams
        found = [i for i, each in enumerate(channels) if hosts[each.src] == hosts[each.dst] >= 0]
        self.channels = frozenset(found)
        back = [Channel(channels[i].dst, channels[i].src, channels[i].slots) for i in found]
        credits = transport.open(back, CREDIT_GROUPS + group) if back else []
        # By the plan's channel, as the transport knows it: that of its credits; of those that start here, what is to be
        # sent, and the rank that has the slots.
        self._credits: dict[int, int] = {}
        self._queues: dict[int, deque[Any]] = {}
        self._receivers: dict[int, int] = {}
        for i, credit in zip(found, credits, strict=True):
            handle = handles[i]
            if handle < 0:
                continue
            self._credits[handle] = credit
            if channels[i].src == transport.rank:
                self._queues[handle], self._receivers[handle] = deque(), channels[i].dst
            listen(credit, partial(self._follow, handle))
        self._memory: SharedMemory | None = None
        # Of the ranks that are sent to: where their slots begin here, and how long they are.
        self._opened: dict[int, tuple[int, int]] = {}
        # By the address of a slot: its credit, and where the notice lands.
        self._posts: dict[int, tuple[Bytes, Bytes]] = {}
        # Credits on their way, by channel, and room for others.
        self._coming: dict[int, deque[Bytes]] = {handle: deque() for handle in self._queues}
        self._spare: list[Bytes] = []

    @property
    def handles(self) -> frozenset[int]:
        """The channels that start or end here, as the transport knows them."""
        return frozenset(self._credits)

    # --- memory -------------------------------------------------------------------------------------------------------

    def slots(self, n_bytes: int) -> Any:
        """Memory for the slots of this rank."""
        if not n_bytes:
            return np.empty(0, dtype=np.uint8)
        self._memory = take_memory(self._streams.device_id, n_bytes)
        return self._memory.array[:n_bytes]

    def connect(self, ranks: Gathers, members: Sequence[int], timeout_s: float) -> str:
        """Opens the memory of those that are sent to; why some rank could not, empty if all could: then no rank uses
        its own. Collective among `ranks`, who are these of the transport."""
        memory = self._memory
        mine = _RECORD.pack(*((bytes(HANDLE_BYTES), 0) if memory is None else (memory.handle, memory.n_bytes)))
        told = dict(zip(members, map(_RECORD.unpack, ranks.allgather(mine, timeout_s)), strict=True))
        error = ""
        try:
            with self._streams.device:
                for rank in dict.fromkeys(self._receivers.values()):
                    handle, n_bytes = told[rank]
                    self._opened[rank] = open_memory(handle), n_bytes
        except Exception as caught:  # CuPy has a class for each way in which CUDA can refuse
            error = f"{type(caught).__name__}: {caught}"
        return first_text(ranks, error, timeout_s)

    def close(self) -> None:
        """No run follows: the memory of others is closed, this rank's is free for other plans."""
        with self._streams.device:
            for address, _ in self._opened.values():
                close_memory(address)
        self._opened.clear()
        if self._memory is not None:
            give_back(self._memory)
            self._memory = None

    # --- messages -----------------------------------------------------------------------------------------------------

    def receive(self, channel: int, slot: Any) -> None:
        """A slot is free for the next message of a channel."""
        address = address_of(slot)
        known = self._posts.get(address)
        if known is None:
            assert self._memory is not None
            credit = np.frombuffer(_CREDIT.pack(address - self._memory.address), dtype=np.uint8)
            known = self._posts[address] = credit, np.zeros(1, dtype=np.uint8)
        credit, notice = known
        self._transport.post_recv(channel, notice)
        self._transport.post_send(self._credits[channel], credit)

    def send(self, channel: int, view: Any) -> None:
        """Sends `view` as the next message of a channel, once there is a credit."""
        self._queues[channel].append(view)
        room = self._spare.pop() if self._spare else np.empty(_CREDIT.size, dtype=np.uint8)
        self._coming[channel].append(room)
        self._transport.post_recv(self._credits[channel], room)

    def _follow(self, channel: int, event: Event) -> None:
        """A credit has come: the message is copied to where it says. That one was sent says nothing."""
        if event[0] != RECEIVED:
            return
        room, view, streams = self._coming[channel].popleft(), self._queues[channel].popleft(), self._streams
        (offset,) = _CREDIT.unpack(room.tobytes())
        self._spare.append(room)
        base, n_bytes = self._opened[self._receivers[channel]]
        assert offset + view.nbytes <= n_bytes, f"slot of {view.nbytes} B at {offset} of {n_bytes} B"
        with streams.device:
            streams.order(OUT, COMPUTE)
            streams.copy_across(base + offset, address_of(view), view.nbytes)
        streams.after(OUT, lambda: self._transport.post_send(channel, _NOTICE))
