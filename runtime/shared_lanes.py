"""Messages of a plan between ranks of one host, through memory that they share.

    rank a, the sender                                   rank b, the receiver
                                     credit              slot k is free: a receive is posted for the notice,
    array ── copy ──────────────►    <──────             and the credit says where in b's shared memory the slot is
         │                      └─────────────────────►  slot k
         the copy is done            notice, 1 B
                                     ──────>             the message has arrived; reductions read the slot where it is

The slots of such channels of a plan lie in one piece of memory of the receiver, which the senders of its host open when
the plan is made ready. A message is then three steps: credit, copy, notice. The plan's own channel carries the notice,
so that its events mean what they mean for any message, also when connections fail; the credit takes a channel of its
own in the other direction. What the memory is, a `LaneMemory` says: a GPU's by CUDA IPC (`device_lanes`), or a segment
in `/dev/shm` (`host_lanes`).

Invariants. A slot is written between its credit and its notice, and not else: the engine posts a receive only once the
slot has been read, and the notice is posted only once the copy is done. The i-th credit, copy and notice of a channel
are those of its i-th message: all three are in order. At the end of a run every credit has been taken, as there is one
for each message.

After a failure a copy may be under way into memory of a rank that has given up: that memory is not used again.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from optcc.plan import Channel
from optcc.runtime.device_self_test import first_text
from optcc.runtime.plan_handshake import Gathers
from optcc.runtime.transport import RECEIVED, Bytes, Event, Transport

CREDIT_GROUPS = 1 << 40
"""Channels of credits are in the group of the plan's channels and so many more, in which no plan's are."""
_CREDIT = struct.Struct("<Q")
_NOTICE = np.zeros(1, dtype=np.uint8)


class LaneMemory(Protocol):
    """The memory of this rank's slots, and that of the ranks that it sends to."""

    error: str
    """Why there is none for this rank's slots; empty if there is, or none was asked for."""

    def slots(self, n_bytes: int) -> Any:
        """Memory for the slots of this rank, above 0 bytes; called once at most."""
        ...

    def record(self) -> bytes:
        """What others need to open it, or that there is none; of one length at all ranks."""
        ...

    def open(self, rank: int, record: bytes) -> None:
        """Opens the memory of a rank; raises some error if it cannot."""
        ...

    def opened(self) -> None:
        """All ranks have opened what they could, or will not."""
        ...

    def offset_of(self, slot: Any) -> int:
        """Where in this rank's memory a slot is."""
        ...

    def write(self, rank: int, offset: int, view: Any, then: Callable[[], None]) -> None:
        """Copies `view` into the memory of a rank; `then` is called once it is there."""
        ...

    def close(self) -> None:
        """No run follows."""
        ...


def lanes_within(channels: Sequence[Channel], hosts: Sequence[int]) -> list[int]:
    """The numbers of those channels whose ranks share memory; `hosts` says for each rank which it shares it with.

    >>> lanes_within([Channel(0, 1, 2), Channel(1, 2, 2), Channel(2, 3, 2)], (0, 0, -1, -1))
    [0]
    """
    return [number for number, each in enumerate(channels) if hosts[each.src] == hosts[each.dst] >= 0]


class SharedLanes:
    """The `chosen` ones of the `channels` of a plan, here of ranks of `transport` with `handles` there.

    `listen` has the events of a channel given to a function. Messages of other channels are the transport's.
    """

    def __init__(
        self,
        transport: Transport,
        listen: Callable[[int, Callable[[Event], None]], None],
        memory: LaneMemory,
        channels: Sequence[Channel],
        handles: Sequence[int],
        group: int,
        chosen: Collection[int],
    ) -> None:
        self._transport, self._listen, self._memory = transport, listen, memory
        found = sorted(chosen)
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
        return self._memory.slots(n_bytes) if n_bytes else np.empty(0, dtype=np.uint8)

    def connect(self, ranks: Gathers, members: Sequence[int], timeout_s: float) -> str:
        """Opens the memory of those that are sent to; why some rank could not, empty if all could: then no rank uses
        its own. Collective among `ranks`, who are these of the transport."""
        memory = self._memory
        try:
            told = dict(zip(members, ranks.allgather(memory.record(), timeout_s), strict=True))
            error = memory.error
            try:
                for rank in dict.fromkeys(self._receivers.values()) if not error else ():
                    memory.open(rank, told[rank])
            except Exception as caught:  # CuPy has a class for each way in which CUDA can refuse
                error = f"{type(caught).__name__}: {caught}"
            return first_text(ranks, error, timeout_s)
        finally:
            memory.opened()

    def close(self) -> None:
        """No run follows: the memory of others is closed, this rank's is free."""
        self._memory.close()
        for credit in self._credits.values():
            # That the last credits were sent may still be reported.
            self._listen(credit, _ignore)

    # --- messages -----------------------------------------------------------------------------------------------------

    def post_recv(self, channel: int, slot: Any) -> None:
        """A slot is free for the next message of a channel."""
        credit = self._credits.get(channel)
        if credit is None:
            self._transport.post_recv(channel, slot)
            return
        offset = self._memory.offset_of(slot)
        known = self._posts.get(offset)
        if known is None:
            told = np.frombuffer(_CREDIT.pack(offset), dtype=np.uint8)
            known = self._posts[offset] = told, np.zeros(1, dtype=np.uint8)
        told, notice = known
        self._transport.post_recv(channel, notice)
        self._transport.post_send(credit, told)

    def post_send(self, channel: int, view: Any) -> None:
        """Sends `view` as the next message of a channel, once there is a credit."""
        credit = self._credits.get(channel)
        if credit is None:
            self._transport.post_send(channel, view)
            return
        self._queues[channel].append(view)
        room = self._spare.pop() if self._spare else np.empty(_CREDIT.size, dtype=np.uint8)
        self._coming[channel].append(room)
        self._transport.post_recv(credit, room)

    def _follow(self, channel: int, event: Event) -> None:
        """A credit has come: the message is copied to where it says. That one was sent says nothing."""
        if event[0] != RECEIVED:
            return
        room, view = self._coming[channel].popleft(), self._queues[channel].popleft()
        (offset,) = _CREDIT.unpack(room.tobytes())
        self._spare.append(room)
        then = partial(self._transport.post_send, channel, _NOTICE)
        self._memory.write(self._receivers[channel], offset, view, then)


def _ignore(_: Event) -> None:
    pass
