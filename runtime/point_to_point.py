"""Send and Recv: messages from one rank to another.

A message is two on the channel from its sender: a header with its tag and length, then its bytes. A receiver asks for
the next header while receives of it wait for this sender; a message whose tag none of them has is kept until one comes.
So messages of one sender and tag are received in the order in which they were sent. There is no plan, as nothing is
reduced and nothing passes a third rank.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from optcc.errors import MismatchError
from optcc.plan import Channel
from optcc.runtime.buffers import Arrays
from optcc.runtime.engine import Engine
from optcc.runtime.handle import Handle
from optcc.runtime.transport import SENT, Bytes, Event

TAG_MAX = 2**62
BLOCK_TAG = -2
"""The tag of `Communicator.start_exchange`; those of programs are not below zero."""
_HEADER = struct.Struct("<qQ")


class WaitingReceive(NamedTuple):
    """A receive that waits for its message."""

    handle: Handle
    tag: int
    view: Bytes
    # Called with the sender once its message is the one, if others might have sent it.
    chosen: Callable[[int], None] | None = None


class AnyReceive:
    """A receive from any rank: `source` is whose message it took, -1 until then."""

    def __init__(self, handle: Handle) -> None:
        self.handle, self.source = handle, -1

    def take(self, wanted: WaitingReceive, src: int, boxes: Iterable[_Inbound]) -> None:
        """A message from `src` is about to fill it: the others wait for it no longer."""
        self.source = src
        for box in boxes:
            box.forget(wanted)


class Mail:
    """The messages of one rank of a team: `ranks` are the transport's ranks of its members, `number` is the team's.

    All its calls are local: only the two ranks of a message take part.
    """

    observed = 0

    def __init__(self, engine: Engine, ranks: Sequence[int], rank: int, number: int) -> None:
        self.engine, self.ranks, self.rank, self.number = engine, ranks, rank, number
        self._outbound: dict[int, _Outbound] = {}
        self._inbound: dict[int, _Inbound] = {}

    def send(self, view: Bytes, dst: int, tag: int, deadline_s: float) -> Handle:
        """Begins to send a message to member `dst`; done once that rank has begun to receive it."""
        handle = self._enter(view, deadline_s)
        if dst == self.rank:
            self._from(dst).deliver(tag, view.copy())
            self.engine.leave(handle)
        else:
            self._to(dst).send(handle, tag, view)
        return handle

    def receive(self, view: Bytes, src: int, tag: int, deadline_s: float) -> Handle:
        """Begins to receive the next message with this tag from member `src`."""
        handle = self._enter(view, deadline_s)
        self._from(src).receive(WaitingReceive(handle, tag, view))
        return handle

    def receive_any(self, view: Bytes, tag: int, deadline_s: float) -> AnyReceive:
        """Begins to receive the next message with this tag from any member."""
        handle = self._enter(view, deadline_s)
        anyone = AnyReceive(handle)
        boxes = [self._from(src) for src in range(len(self.ranks))]
        wanted = WaitingReceive(handle, tag, view, lambda src: anyone.take(wanted, src, boxes))
        for box in boxes:
            if anyone.source < 0:
                box.receive(wanted)
        return anyone

    def report(self) -> str:
        """What is waited for, for a deadline that has passed."""
        waiting = [f"a message from rank {src}" for src, box in self._inbound.items() if box.is_waiting]
        waiting += [f"rank {dst} to receive" for dst, box in self._outbound.items() if box.is_waiting]
        return f"rank {self.rank} waits for {', '.join(waiting) or 'nothing'}"

    def awaited(self) -> list[tuple[int, bool]]:
        """Whom messages wait for: (rank of the transport, whether it is to send)."""
        found = [(self.ranks[src], True) for src, box in self._inbound.items() if box.is_waiting]
        return found + [(self.ranks[dst], False) for dst, box in self._outbound.items() if box.is_waiting]

    def _enter(self, view: Bytes, deadline_s: float) -> Handle:
        self.engine.check_alive()
        handle = Handle(self, Arrays(view, 0, None, None, view), deadline_s)
        self.engine.enter(handle)
        return handle

    def _to(self, dst: int) -> _Outbound:
        if dst not in self._outbound:
            channel = Channel(self.ranks[self.rank], self.ranks[dst], 1)
            (handle,) = self.engine.transport.open([channel], -1 - self.number)
            self._outbound[dst] = box = _Outbound(self.engine, handle)
            self.engine.listen(handle, box.follow)
        return self._outbound[dst]

    def _from(self, src: int) -> _Inbound:
        if src not in self._inbound:
            handle = -1
            if src != self.rank:
                channel = Channel(self.ranks[src], self.ranks[self.rank], 1)
                (handle,) = self.engine.transport.open([channel], -1 - self.number)
            self._inbound[src] = box = _Inbound(self.engine, handle, src)
            if src != self.rank:
                self.engine.listen(handle, box.follow)
        return self._inbound[src]


class _Outbound:
    """Messages to one rank: of each, the events that are still to come."""

    def __init__(self, engine: Engine, channel: int) -> None:
        self._engine, self._channel = engine, channel
        self._queue: deque[Handle | None] = deque()
        # What the transport reads from until it has been sent.
        self._headers: deque[Bytes] = deque()

    @property
    def is_waiting(self) -> bool:
        return bool(self._queue)

    def send(self, handle: Handle, tag: int, view: Bytes) -> None:
        header = np.frombuffer(_HEADER.pack(tag, view.nbytes), dtype=np.uint8).copy()
        self._headers.append(header)
        # With a message of nothing, the header is all there is.
        self._queue += [None, handle] if view.nbytes else [handle]
        post = self._engine.transport.post_send
        post(self._channel, header)
        if view.nbytes:
            post(self._channel, view)

    def follow(self, event: Event) -> None:
        assert event[0] == SENT
        handle = self._queue.popleft()
        if handle is not None:
            self._headers.popleft()
            self._engine.leave(handle)


class _Inbound:
    """Messages from one rank."""

    def __init__(self, engine: Engine, channel: int, src: int) -> None:
        self._engine, self._channel, self._src = engine, channel, src
        self._waiting: deque[WaitingReceive] = deque()
        self._kept: deque[tuple[int, Bytes]] = deque()
        self._header = np.zeros(_HEADER.size, dtype=np.uint8)
        # What comes next: nothing was asked for, a header, or the bytes of a message, for whom and where to.
        self._is_header_asked = False
        self._coming: tuple[WaitingReceive | None, int, Bytes] | None = None

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting) or self._coming is not None

    def receive(self, wanted: WaitingReceive) -> None:
        for index, (tag, data) in enumerate(self._kept):
            if tag == wanted.tag:
                del self._kept[index]
                if wanted.chosen is not None:
                    wanted.chosen(self._src)
                self._check(wanted, data.nbytes)
                wanted.view[:] = data
                self._engine.leave(wanted.handle)
                return
        self._waiting.append(wanted)
        self._ask()

    def deliver(self, tag: int, data: Bytes) -> None:
        """A message of this rank to itself, or one that is whole and was not asked for when it began."""
        wanted = self._take(tag)
        if wanted is None:
            self._kept.append((tag, data))
            return
        self._check(wanted, data.nbytes)
        wanted.view[:] = data
        self._engine.leave(wanted.handle)

    def follow(self, event: Event) -> None:
        del event
        if self._is_header_asked:
            self._is_header_asked = False
            tag, n_bytes = _HEADER.unpack(self._header.tobytes())
            wanted = self._take(tag)
            if wanted is not None:
                self._check(wanted, n_bytes)
            view = np.empty(n_bytes, dtype=np.uint8) if wanted is None else wanted.view
            self._coming = wanted, tag, view
            if n_bytes:
                self._engine.transport.post_recv(self._channel, view)
                return
        assert self._coming is not None
        wanted, tag, view = self._coming
        self._coming = None
        if wanted is None:
            self.deliver(tag, view)
        else:
            self._engine.leave(wanted.handle)
        self._ask()

    def _ask(self) -> None:
        """Asks for the next header, if anything waits and nothing is under way."""
        if self._waiting and not self._is_header_asked and self._coming is None and self._channel >= 0:
            self._is_header_asked = True
            self._engine.transport.post_recv(self._channel, self._header)

    def forget(self, wanted: WaitingReceive) -> None:
        """Another rank's message has been taken for it."""
        for index, each in enumerate(self._waiting):
            if each is wanted:
                del self._waiting[index]
                return

    def _take(self, tag: int) -> WaitingReceive | None:
        for index, wanted in enumerate(self._waiting):
            if wanted.tag == tag:
                del self._waiting[index]
                if wanted.chosen is not None:
                    wanted.chosen(self._src)
                return wanted
        return None

    def _check(self, wanted: WaitingReceive, n_bytes: int) -> None:
        if n_bytes != wanted.view.nbytes:
            what = f"message with tag {wanted.tag} from rank {self._src}"
            raise MismatchError(
                f"{what}: {n_bytes} B: must be the {wanted.view.nbytes} B that are received",
                culprits=(self._src, self._engine.rank),
            )
