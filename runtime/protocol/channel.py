"""The two ends of a channel: an end of the failover table, and the memory of the messages that it carries. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from optcc.failover import Link, Receiver, Sender
from optcc.failover_cache import LinkedReceiver, LinkedSender, ReceiverCache, SenderCache
from optcc.runtime.protocol.connection import RecvConnection
from optcc.runtime.protocol.frames import EAGER_BYTES, EXCHANGE
from optcc.runtime.protocol.striping import Piece, Striping

FIXED = -1
"""As `cut_for`: whatever NICs carry."""
TIMEOUT_S = 5.0
"""Unacknowledged chunks are sent again after this; the time doubles each time, up to `TIMEOUT_S_MAX`."""
TIMEOUT_S_MAX = 60.0


class SendChannel:
    """The sending end of a channel.

    Its state of the failover table is `sender`. While `linked` is not None it stands for that state, in `epoch` and
    with the chunks below `acked` acknowledged. `chunks` are those that the sender keeps, from `acked` on: (view,
    whether its end is to be reported as a sent message, whether it is a copy, rail). `has_copies`: some may be copies
    that are not reported. `cut_for` is the `LocalRank.n_agreed` for which its messages are cut. `posted` counts all
    chunks, `slots` those for which the peer has posted slots, `highest` those that have been sent once. `rails` maps
    each virtual rail of the table to a rail of the pair. `n_whole` counts messages that went over one rail, `n_sent`
    those reported.
    """

    __slots__ = (
        *(
            "_sender",
            "_start",
            "acked",
            "chunks",
            "cut_for",
            "epoch",
            "handle",
            "has_copies",
            "highest",
            "k",
            "linked",
            "n_sent",
        ),
        *("n_whole", "posted", "rails", "since_s", "slots", "striping", "timeout_s"),
    )

    def __init__(self, k: int, link: Link, striping: Striping) -> None:
        self.k, self.handle, self.striping = k, -1, striping
        self.rails = list(striping.turns)
        self.cut_for = 0
        self.linked: LinkedSender | None = None
        self.sender = link.sender()
        self.chunks: deque[tuple[memoryview, bool, bool, int]] = deque()
        self.has_copies = False
        self.posted = self.slots = self.highest = self.n_sent = self.n_whole = 0
        self.since_s, self.timeout_s = 0.0, TIMEOUT_S

    @property
    def sender(self) -> Sender:
        """The state of the table."""
        linked = self.linked
        return self._sender if linked is None else linked.state(self.epoch, self._start, self.acked)

    @sender.setter
    def sender(self, state: Sender) -> None:
        self._sender, self.linked = state, None
        self.epoch, self._start, self.acked = state.epoch, state.start, state.acked

    def link(self, cache: SenderCache) -> LinkedSender | None:
        """`linked`, looked up if need be."""
        if self.linked is None:
            self.linked = cache.find(self._sender)
        return self.linked

    def is_stale(self, number: int, epoch: int) -> bool:
        """See `Owner`."""
        return number < self.acked or epoch != self.epoch

    def has_sent(self, count: int) -> bool:
        """True once `count` messages are reported as sent."""
        return self.n_sent >= count


class RecvChannel:
    """The receiving end of a channel.

    Its state of the failover table is `receiver`; see `SendChannel`, with `delivered` in place of `acked`.
    `slots` are those that are not filled, from `delivered` on: (view, whether it ends a message, whether the
    message is eager). `arriving`: over which connection a chunk is being read into its slot. `early` are eager chunks
    that came before their slots. `posted` counts the slots, `told` those that the sender has been told of, `n_received`
    the messages reported.
    """

    __slots__ = (
        *("_receiver", "_start", "arriving", "delivered", "early", "epoch", "handle", "k", "linked", "n_received"),
        *("n_whole", "posted", "slots", "striping", "told"),
    )

    def __init__(self, k: int, link: Link, striping: Striping) -> None:
        self.k, self.handle, self.striping = k, -1, striping
        self.linked: LinkedReceiver | None = None
        self.receiver = link.receiver()
        self.slots: deque[tuple[memoryview, bool, bool]] = deque()
        self.arriving: dict[int, RecvConnection] = {}
        self.early: dict[int, memoryview] = {}
        self.posted = self.told = self.n_received = self.n_whole = 0

    @property
    def receiver(self) -> Receiver:
        """The state of the table."""
        linked = self.linked
        return self._receiver if linked is None else linked.state(self.epoch, self._start, self.delivered)

    @receiver.setter
    def receiver(self, state: Receiver) -> None:
        self._receiver, self.linked = state, None
        self.epoch, self._start, self.delivered = state.epoch, state.start, state.delivered

    def link(self, cache: ReceiverCache) -> LinkedReceiver:
        """`linked`, looked up if need be."""
        if self.linked is None:
            self.linked = cache.find(self._receiver)
        return self.linked

    def has_received(self, count: int) -> bool:
        """True once `count` messages are reported as received."""
        return self.n_received >= count


def is_eager(channel: SendChannel | RecvChannel, view: memoryview, pieces: Sequence[Piece]) -> bool:
    """True for a message that is sent from a copy; both ends decide alike."""
    return len(view) <= EAGER_BYTES and len(pieces) == 1 and channel.k != EXCHANGE
