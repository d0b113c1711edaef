"""UCX: one process a rank, one UCP context and worker per NIC, tagged messages striped over the NICs by their rates.

A message is cut into pieces as the TCP transport cuts it (`optcc.runtime.protocol.striping`), and each piece goes over
its rail as a tagged message of its own. UCP keeps messages of one tag and sender in order, so
the tag is the sender and the channel, and a receive names both. Sends are synchronous: they end once the other end has
matched them, so nobody runs ahead of the slots that the plan's proof counts on.

One context per NIC, because inside one context UCX gives all NICs equal shares. A peer that UCX gives up is lost:
there is no failover here, and UCX notices a NIC that goes silent late or never; a run then ends at its deadline.
Nothing proves who is at the other end, unlike in the TCP transport: use it where the network itself is trusted.
"""

from __future__ import annotations

import contextlib
import os
import selectors
from collections import Counter, deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from optcc.errors import DeadlineExceeded, EnvironmentMissing, InputError, MismatchError, RankLost, RuntimeFault
from optcc.plan import Channel
from optcc.runtime.cupy_kernels import address_of
from optcc.runtime.device_paths import DevicePath
from optcc.runtime.forks import call_in_child, take_no_part
from optcc.runtime.nics import HostNic
from optcc.runtime.protocol.bruck import Gathering
from optcc.runtime.protocol.striping import Striping, cut
from optcc.runtime.rendezvous import Meet
from optcc.runtime.striping import divide_plan
from optcc.runtime.transport import (
    COLLECTIVE_TIMEOUT_S,
    RECEIVED,
    SENT,
    Bytes,
    ChannelNumbers,
    Clock,
    Event,
    MonotonicClock,
)
from optcc.runtime.transports.ucx_library import CANCELED, CUDA_MEMORY, HOST_MEMORY, OK, TRUNCATED, Port, Request, load

CHUNK_BYTES = 4 << 20
VERSION = 2
_EXCHANGE, _ABORT, _LOST = 1 << 31, (1 << 31) + 2, (1 << 31) + 3
_NOTICE_MASK = 0xFFFFFFFE
CHANNELS_MAX = _EXCHANGE
"""Channels of one direction of a pair. The numbers behind them are for the small exchanges, and for notices that the
rank in the tag has given up, or that another rank has lost it; these two differ in one bit."""
_POLLS_BUSY = 50
_WAIT_S_MAX = 0.2
_CLOSE_S = 1.0
_LINGER_S, _LINGER_LOOK_S = 0.2, 0.001
"""How long a rank that has given up still reads what others send, unless all of them are gone before."""
_NOTICE_S, _LEAVE_S = 1.0, 5.0
"""A peer that UCX gives up is lost after so long: the first if something is under way to or from it, as it may have
left because of a rank that has given up, whose notice is then about to come; the other if nothing is. One that has left
after a barrier is gone too, and by then this rank is through that barrier as well."""


class _Terms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank says of itself when the ranks meet: what all must agree on, and of each NIC the name, the rates out
    and in, and the address of its worker."""

    version: int
    chunk_bytes: int
    nics: tuple[tuple[str, int, int, bytes], ...]


class _Lane:
    """One direction of a channel: the messages under way, oldest first, each with its pieces.

    `peer` is the other end; `n_whole` counts messages that went over one rail, `n_done` the messages that are over;
    `pairs` are the NICs at both ends of each rail, and `striping` says how messages fall on the rails.
    """

    __slots__ = ("event", "messages", "n_done", "n_whole", "pairs", "peer", "striping", "tag")

    def __init__(
        self, peer: int, tag: int, event: Event | None, striping: Striping, pairs: Sequence[tuple[int, int]]
    ) -> None:
        self.peer, self.tag, self.event, self.striping, self.pairs = peer, tag, event, striping, pairs
        self.messages: deque[tuple[list[Request], Bytes]] = deque()
        self.n_whole = self.n_done = 0


class UcxTransport:
    """This process's end of a network of `Meeting.n_ranks` ranks; making one is collective.

    `meet` brings the ranks together once (`optcc.runtime.rendezvous`); `nics` are this rank's NICs by the names that
    UCX gives devices ("eth0", "mlx5_0:1"), one of each plane: two ranks are joined over the NICs of one name, or in
    order if they share none. Messages are cut into pieces of about `chunk_bytes`, the same at every rank.

    Raises InputError for numbers that cannot be, MismatchError if ranks differ, EnvironmentMissing without UCX or for
    a NIC that it does not know, and what `meet` raises.
    """

    def __init__(
        self, meet: Meet, nics: Sequence[HostNic], *, chunk_bytes: int = CHUNK_BYTES, clock: Clock | None = None
    ) -> None:
        if not nics or len({nic.name for nic in nics}) < len(nics):
            raise InputError(f"NICs {', '.join(nic.name for nic in nics)}: must be at least one, of different names")
        if chunk_bytes < 1:
            raise InputError(f"chunks of {chunk_bytes} B: must be at least one")
        self._clock: Clock = clock or MonotonicClock()
        self._ports: list[Port] = []
        self._selector = selectors.DefaultSelector()
        self._failure: RuntimeFault | None = None
        # Peers that UCX has given up: why, and when.
        self._gone: dict[int, tuple[int, float]] = {}
        self._stripings: dict[tuple[int, int], tuple[Striping, list[tuple[int, int]]]] = {}
        self._numbers = ChannelNumbers()
        self._handles: dict[tuple[int, int, int], int] = {}
        self._lanes: list[_Lane] = []
        self._exchange: dict[tuple[int, int], _Lane] = {}
        self._active: dict[_Lane, bool] = {}
        self._events: list[Event] = []
        self._closed = False
        self.device_path: DevicePath | None = None
        call_in_child(self, take_no_part)
        try:
            for nic in nics:
                port = Port(nic.name, self._note_gone)
                self._ports.append(port)
                self._selector.register(port.fd, selectors.EVENT_READ)
            own = tuple(
                (nic.name, nic.out_rate, nic.in_rate, port.address())
                for nic, port in zip(nics, self._ports, strict=True)
            )
            terms = _Terms(VERSION, chunk_bytes, own)
            self._meeting = meet(msgspec.msgpack.encode(terms))
            self._notice = self._meeting.rank << 32 | _ABORT
            self._book = [_read_terms(record, rank, terms) for rank, record in enumerate(self._meeting.records)]
            self._chunk_bytes = chunk_bytes
        except BaseException:
            self._give_back()
            raise

    @property
    def rank(self) -> int:
        """The rank whose end this is."""
        return self._meeting.rank

    @property
    def n_ranks(self) -> int:
        """Ranks of the job."""
        return self._meeting.n_ranks

    def no_device_memory(self) -> str:
        """See `optcc.runtime.device_paths.ReachesDevices`."""
        for port in self._ports:
            if not port.memory_types() >> CUDA_MEMORY & 1:
                on = f" on {port.device}" if port.device else ""
                return f"UCX {port.library.version}{on} has no transport for CUDA memory (UCX_TLS, its CUDA modules)"
        return ""

    # --- Transport ----------------------------------------------------------------------------------------------------

    def open(self, channels: Sequence[Channel], group: int = 0, carried: Sequence[int] = ()) -> list[int]:
        """See `Transport`."""
        handles: list[int] = []
        between: Counter[tuple[int, int]] = Counter()
        for channel, n_bytes in zip(channels, carried, strict=False):
            between[channel.src, channel.dst] += n_bytes
        rates = [[(out, in_) for _, out, in_, _ in terms.nics] for terms in self._book]
        parts = divide_plan(between, {pair: _pairs(self._book, *pair) for pair in between}, rates)
        for src, dst, k in self._numbers.take(channels, group):
            if not (0 <= src < self.n_ranks and 0 <= dst < self.n_ranks) or src == dst:
                raise InputError(f"channel {src}->{dst}: must join two ranks below {self.n_ranks}")
            if k >= CHANNELS_MAX:
                raise InputError(f"channel {src}->{dst} number {k}: must be below {CHANNELS_MAX}")
            if self.rank not in (src, dst):
                handles.append(-1)
                continue
            handle = self._handles.get((src, dst, k))
            if handle is None:
                handle = self._handles[src, dst, k] = len(self._lanes)
                self._lanes.append(self._lane(src, dst, k, handle))
            if (src, dst) in parts:
                self._lanes[handle].striping = Striping.of(parts[src, dst])
            handles.append(handle)
        return handles

    def post_send(self, channel: int, view: Bytes) -> None:
        """See `Transport`."""
        self._post(self._lanes[channel], view, True)

    def post_recv(self, channel: int, view: Bytes) -> None:
        """See `Transport`."""
        self._post(self._lanes[channel], view, False)

    def poll(self, timeout_s: float) -> list[Event]:
        """See `Transport`; raises MismatchError too."""
        self._progress(lambda: bool(self._events), timeout_s)
        if not self._events and self._failure is not None:
            raise self._failure
        events, self._events = self._events, []
        return events

    def allgather(self, payload: bytes, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> list[bytes]:
        """See `Transport`; raises MismatchError if the payloads differ in length."""
        if self._failure is not None:
            raise self._failure
        gathering = Gathering(self.rank, self.n_ranks, payload)
        sends: list[tuple[_Lane, int]] = []
        deadline_s = self._clock.now_s() + timeout_s
        for each in gathering.rounds:
            out, in_ = self._exchange_lane(self.rank, each.dst), self._exchange_lane(each.src, self.rank)
            received = in_.n_done + 1
            self._post(in_, each.into, False)
            self._post(out, each.out, True)
            sends.append((out, out.n_done + 1))
            self._await(lambda lane=in_, until=received: lane.n_done >= until, deadline_s, timeout_s)  # type: ignore[misc]
        # Whoever has not got its part from here yet would wait for it in vain if this rank went away now. If a rank was
        # lost since, the next call says so: all parts are here.
        self._await(
            lambda: self._failure is not None or all(lane.n_done >= until for lane, until in sends),
            deadline_s,
            timeout_s,
        )
        return gathering.parts

    def barrier(self, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        """See `Transport`."""
        self.allgather(b"", timeout_s)

    def abort(self, cause: str) -> None:
        """See `Transport`. The notice names the rank that this one has lost or heard of, if there is one."""
        if self._failure is None:
            self._failure = RankLost(f"rank {self.rank}: has given up: {cause}")
        notices: list[Request] = []
        for peer in range(self.n_ranks):
            if peer != self.rank:
                mine, theirs = _pairs(self._book, self.rank, peer)[0]
                # A peer that is gone, perhaps the reason for this, needs no notice.
                with contextlib.suppress(EnvironmentMissing):
                    self._ports[mine].connect(peer, self._book[peer].nics[theirs][3])
                    notices.append(self._ports[mine].notify(peer, self._notice))
        self._drain([*notices, *(port.begin_flush() for port in self._ports)])
        # A connection that is closed with bytes unread loses what was sent over it too, this notice among them.
        until_s = self._clock.now_s() + _LINGER_S
        while self._clock.now_s() < until_s and len(self._gone) < self.n_ranks - 1:
            if not sum([port.progress() for port in self._ports]):
                self._clock.sleep_s(_LINGER_LOOK_S)

    def close(self) -> None:
        """See `Transport`. What is under way to peers that are there still goes out."""
        if self._closed:
            return
        lost = self._failure is not None
        under_way = [request for lane in self._active for requests, _ in lane.messages for request in requests]
        for request in under_way:
            request.cancel()
        if not lost:
            self._drain([port.begin_flush() for port in self._ports])
        self._drain([*under_way, *(each for port in self._ports for each in port.begin_close(force=lost))])
        self._give_back()

    def _drain(self, requests: Sequence[Request]) -> None:
        deadline_s = self._clock.now_s() + _CLOSE_S
        left = list(requests)
        while left and self._clock.now_s() < deadline_s:
            left = [request for request in left if not request.is_over()]
            for port in self._ports:
                port.progress()

    def _give_back(self) -> None:
        self._closed = True
        self._active.clear()
        self._selector.close()
        for port in self._ports:
            port.close()

    # --- messages -----------------------------------------------------------------------------------------------------

    def _lane(self, src: int, dst: int, number: int, handle: int) -> _Lane:
        """A new direction of a channel; the ways to the peer are opened both ways, so that its loss is noticed."""
        peer = dst if src == self.rank else src
        pairs = _pairs(self._book, src, dst)
        if (src, dst) not in self._stripings:
            rates = [min(self._book[src].nics[mine][1], self._book[dst].nics[theirs][2]) for mine, theirs in pairs]
            self._stripings[src, dst] = Striping.of(rates), pairs
        for pair in pairs:
            mine, theirs = pair if src == self.rank else pair[::-1]
            self._ports[mine].connect(peer, self._book[peer].nics[theirs][3])
        event = None if handle < 0 else (SENT if src == self.rank else RECEIVED, handle)
        return _Lane(peer, src << 32 | number, event, *self._stripings[src, dst])

    def _exchange_lane(self, src: int, dst: int) -> _Lane:
        if (src, dst) not in self._exchange:
            self._exchange[src, dst] = self._lane(src, dst, _EXCHANGE, -1)
        return self._exchange[src, dst]

    def _post(self, lane: _Lane, view: Bytes, is_send: bool) -> None:
        pairs = lane.pairs
        address, memory_type = address_of(view), HOST_MEMORY if isinstance(view, np.ndarray) else CUDA_MEMORY
        requests: list[Request] = []
        for start, end, rail in cut(lane, len(view), self._chunk_bytes):
            mine, theirs = pairs[rail]
            port = self._ports[mine if is_send else theirs]
            if is_send:
                requests.append(port.send(lane.peer, address + start, end - start, lane.tag, memory_type))
            else:
                requests.append(port.receive(address + start, end - start, lane.tag, memory_type))
        # The view is kept until the library needs it no more.
        lane.messages.append((requests, view))
        self._active[lane] = is_send

    def _look(self) -> None:
        """Turns what has ended into events."""
        finished: list[_Lane] = []
        for lane in self._active:
            messages = lane.messages
            while messages and all(request.is_over() for request in messages[0][0]):
                failed = [request.status for request in messages[0][0] if request.status not in (OK, CANCELED)]
                if failed:
                    # It stays under way: it never comes to an end.
                    self._fail(lane.peer, failed[0])
                    break
                messages.popleft()
                lane.n_done += 1
                if lane.event is not None and self._failure is None:
                    self._events.append(lane.event)
            if not messages:
                finished.append(lane)
        for lane in finished:
            del self._active[lane]

    def _fail(self, peer: int, status: int) -> None:
        """A message to or from a peer has failed."""
        if status != TRUNCATED:
            self._note_gone(peer, status)
        elif self._failure is None:
            what = f"rank {self.rank}: a message from rank {peer} has another length than the plan says"
            self._failure = MismatchError(what)

    def _note_gone(self, peer: int, status: int) -> None:
        """UCX has given a peer up. What it had sent before may not be known to have come: `_judge_gone` is next."""
        self._gone.setdefault(peer, (status, self._clock.now_s()))

    def _judge_gone(self, notice_s: float) -> None:
        """Peers that were given up are lost if something has been under way to or from them for `notice_s`, or nothing
        for long."""
        needed = {lane.peer for lane in self._active}
        for peer, (status, since_s) in self._gone.items():
            if self._clock.now_s() >= since_s + (notice_s if peer in needed else _LEAVE_S):
                self._lose(peer, f"UCX: {load().text(status)}", _LOST)

    def _listen(self) -> None:
        """Whether a rank has given up, or another one has lost it."""
        for port in self._ports:
            tag = port.probe(_ABORT, _NOTICE_MASK)
            if tag >= 0 and self._failure is None:
                port.receive(0, 0, tag)
                kind = tag & 0xFFFFFFFF
                cause = "it has left after a failure" if kind == _ABORT else "another rank reaches it no more"
                self._lose(tag >> 32, cause, kind)

    def _lose(self, peer: int, cause: str, kind: int) -> None:
        """A peer is lost; the first failure counts."""
        if self._failure is None:
            self._failure = RankLost(f"rank {self.rank}: rank {peer} is lost: {cause}")
            self._notice = peer << 32 | kind

    # --- progress -----------------------------------------------------------------------------------------------------

    def _await(self, holds: Callable[[], bool], deadline_s: float, timeout_s: float) -> None:
        self._progress(holds, deadline_s - self._clock.now_s())
        if holds():
            return
        self._judge_gone(0.0)  # no time is left for a notice
        if self._failure is None:
            what = f"rank {self.rank}: waited {timeout_s:g} s in vain for other ranks to agree"
            self._failure = DeadlineExceeded(what)
        raise self._failure

    def _progress(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Lets UCX work until `holds()`, a failure, or `timeout_s` have passed: spins a little, then sleeps."""
        clock, ports = self._clock, self._ports
        deadline_s = clock.now_s() + timeout_s
        idle = 0
        while True:
            worked = sum([port.progress() for port in ports])
            self._look()
            self._listen()
            if self._gone:
                self._judge_gone(_NOTICE_S)
            if holds() or self._failure is not None:
                return
            idle = 0 if worked else idle + 1
            left_s = deadline_s - clock.now_s()
            if left_s <= 0:
                return
            if idle > _POLLS_BUSY:
                if all(port.arm() for port in ports):
                    self._selector.select(min(left_s, _WAIT_S_MAX))
                idle = 0
            elif idle:
                os.sched_yield()


def _read_terms(record: bytes, rank: int, own: _Terms) -> _Terms:
    """What a rank said of itself; raises MismatchError, naming it, if it is set up differently."""
    try:
        terms = msgspec.msgpack.decode(record, type=_Terms)
    except msgspec.DecodeError as error:
        raise MismatchError(f"rank {rank}: its record is not one: {error}") from error
    for field in ("version", "chunk_bytes"):
        ours, theirs = getattr(own, field), getattr(terms, field)
        if ours != theirs:
            raise MismatchError(f"rank {rank} differs from this one: {field} {theirs} instead of {ours}")
    if not terms.nics:
        raise MismatchError(f"rank {rank} has no NIC")
    return terms


def _pairs(book: Sequence[_Terms], src: int, dst: int) -> list[tuple[int, int]]:
    """The NICs of `src` and `dst`, by number, that are joined by a rail: those of one name, or in their order."""
    names = {nic[0]: number for number, nic in enumerate(book[dst].nics)}
    pairs = [(number, names[nic[0]]) for number, nic in enumerate(book[src].nics) if nic[0] in names]
    return pairs or [(number, number) for number in range(min(len(book[src].nics), len(book[dst].nics)))]
