"""Loopback: the ranks are threads of one process, their network is memory, and its ports can have real rates.

Without a topology a message is copied at once. With one, the copy is reported when the message would have crossed the
network: the active messages share the out- and in-ports of their endpoints max-min fairly, as long flows of TCP do.
The ranks of a server share its ports; inside a server a rank is limited by the server's fabric, if by anything. The
messages of one channel cross one after another. A message is sent when its last byte has left, and received the
topology's `latency_s` later; it begins to cross when both sides have posted it.

The network keeps its own account of time. Completions happen at the instants that the rates imply, and what they set
free is shared again from those instants, however late a thread wakes up to see it: delays do not add up on a busy
port, only along a chain of messages that wait for each other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from heapq import heappop, heappush
from types import TracebackType
from typing import TypeVar

from optcc.errors import DeadlineExceeded, InputError, RankLost, TopologyError
from optcc.plan import Channel
from optcc.runtime.transport import RECEIVED, SENT, Bytes, ChannelNumbers, Clock, Event, MonotonicClock
from optcc.runtime.transports.rank_end import RankEnd
from optcc.runtime.transports.rank_threads import RUN_DEADLINE_S, run_threads
from optcc.topology import Topology

_JOIN_GRACE_S = 2.0
_WAIT_S_MAX = 1.0
T = TypeVar("T")
R = TypeVar("R", float, Fraction)


class _Message:
    """A send that has met its receive: whether its bytes are copied, have left, and have arrived on the network."""

    __slots__ = ("arrived", "copied", "left", "remaining_bytes")

    def __init__(self, n_bytes: int) -> None:
        self.remaining_bytes = float(n_bytes)
        self.copied = False
        self.left = False
        self.arrived = False


class _Channel:
    """One FIFO: posted sends and receives that have not met, and the messages of those that have, oldest first.

    `crossing` waits for the ports, `sending` to be reported to the sender, `arriving` to the receiver.
    """

    __slots__ = (
        "arriving",
        "crossing",
        "dst",
        "handle",
        "matching",
        "ports",
        "rate",
        "recvs",
        "sending",
        "sends",
        "src",
    )

    def __init__(self, handle: int, src: int, dst: int, ports: tuple[int, ...]) -> None:
        self.handle, self.src, self.dst, self.ports = handle, src, dst, ports
        self.sends: deque[Bytes] = deque()
        self.recvs: deque[Bytes] = deque()
        self.crossing: deque[_Message] = deque()
        self.sending: deque[_Message] = deque()
        self.arriving: deque[_Message] = deque()
        self.rate = 0.0
        self.matching = False


class LoopbackNetwork:
    """The network of `n_ranks` threads; `transport(rank)` is one thread's end of it.

    `topology` None: messages are copied at once. Use it as a context manager, or call `close`.

    Raises InputError if the topology has another number of ranks, TopologyError for a rail-only one, whose rails a
    pooled port cannot stand for.
    """

    def __init__(self, topology: Topology | None, n_ranks: int, *, clock: Clock | None = None) -> None:
        if n_ranks < 1:
            raise InputError(f"{n_ranks} ranks: must be at least one")
        if topology is not None and topology.n_ranks != n_ranks:
            raise InputError(f"topology of {topology.n_ranks} ranks: must have {n_ranks}")
        if topology is not None and topology.rail_only:
            raise TopologyError("rail-only topology: the loopback pools the NICs of a server; must not be rail-only")
        if topology is not None and topology.pods:
            raise TopologyError("topology with pods: the loopback has no uplinks; must be without pods")
        self.n_ranks = n_ranks
        self.topology = topology
        self._clock: Clock = clock or MonotonicClock()
        self._lock = threading.Lock()
        self._wakes = [threading.Condition(self._lock) for _ in range(n_ranks)]
        self._events: list[list[Event]] = [[] for _ in range(n_ranks)]
        self._channels: list[_Channel] = []
        self._numbers = ChannelNumbers()
        self._handles: dict[tuple[int, int, int], int] = {}
        self._rounds: dict[int, list[bytes | None]] = {}
        self._round_readers: dict[int, int] = {}
        self._lost: str | None = None
        self._closed = False
        self._network = _Ports(topology, self._clock.now_s()) if topology is not None else None
        self._timer_wake = threading.Condition(self._lock)
        self._timer: threading.Thread | None = None

    def transport(self, rank: int) -> LoopbackTransport:
        """The end of `rank`; raises InputError for a rank that is not there."""
        if not 0 <= rank < self.n_ranks:
            raise InputError(f"rank {rank}: must be below {self.n_ranks}")
        return LoopbackTransport(self, rank)

    def abort(self, rank: int, cause: str) -> None:
        """Declares `rank` lost: every other rank's next or present wait ends in RankLost."""
        with self._lock:
            if self._lost is None:
                self._lost = f"rank {rank} is lost: {cause}"
            for wake in self._wakes:
                wake.notify_all()

    def close(self) -> None:
        """Stops the timer thread; further calls do nothing."""
        with self._lock:
            self._closed = True
            self._timer_wake.notify_all()
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.join(_JOIN_GRACE_S)

    def __enter__(self) -> LoopbackNetwork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What a transport calls.

    def open(self, rank: int, channels: Sequence[Channel], group: int) -> list[int]:
        """Handles for `rank`, see `Transport.open`."""
        with self._lock:
            handles: list[int] = []
            for key in self._numbers.take(channels, group):
                src, dst, _ = key
                if not (0 <= src < self.n_ranks and 0 <= dst < self.n_ranks) or src == dst:
                    raise InputError(f"channel {src}->{dst}: must join two ranks below {self.n_ranks}")
                if rank not in (src, dst):
                    handles.append(-1)
                    continue
                handle = self._handles.get(key)
                if handle is None:
                    handle = self._handles[key] = len(self._channels)
                    ports = self._network.ports_of(src, dst) if self._network is not None else ()
                    self._channels.append(_Channel(handle, src, dst, ports))
                handles.append(handle)
            if self._network is not None and self._timer is None and not self._closed:
                self._timer = threading.Thread(target=self._keep_time, name="optcc-loopback-timer", daemon=True)
                self._timer.start()
            return handles

    def post(self, rank: int, handle: int, view: Bytes, is_send: bool) -> None:
        """One side of a message is there; if it is the second, the message starts."""
        channel = self._channels[handle]
        assert (channel.src if is_send else channel.dst) == rank, f"channel {channel.src}->{channel.dst}: rank {rank}"
        with self._lock:
            (channel.sends if is_send else channel.recvs).append(view)
            # One thread at a time copies for a channel, so that its messages are over in their order.
            if channel.matching or not (channel.sends and channel.recvs):
                return
            channel.matching = True
        while True:
            with self._lock:
                if not (channel.sends and channel.recvs):
                    channel.matching = False
                    return
                source, target = channel.sends.popleft(), channel.recvs.popleft()
                assert source.nbytes == target.nbytes, (
                    f"channel {channel.src}->{channel.dst}: {source.nbytes} B sent, {target.nbytes} B expected"
                )
                message = _Message(source.nbytes)
                channel.sending.append(message)
                channel.arriving.append(message)
                if self._network is None:
                    message.left = message.arrived = True
                else:
                    self._settle(self._clock.now_s())
                    self._network.add(channel, message)
                    self._timer_wake.notify()
            target[:] = source
            with self._lock:
                message.copied = True
                self._deliver(channel)

    def poll(self, rank: int, timeout_s: float) -> list[Event]:
        """See `Transport.poll`."""
        with self._lock:
            if not self._events[rank] and timeout_s > 0:
                self._check_lost()
                self._wakes[rank].wait(timeout_s)
            events = self._events[rank]
            if not events:
                self._check_lost()
            # Always another list: what is returned must not grow when a thread reports the next event.
            self._events[rank] = []
            return events

    def allgather(self, number: int, rank: int, payload: bytes, timeout_s: float) -> list[bytes]:
        """Round `number` of the small exchanges; see `Transport.allgather`."""
        with self._lock:
            board = self._rounds.setdefault(number, [None] * self.n_ranks)
            board[rank] = payload
            if None not in board:
                for wake in self._wakes:
                    wake.notify_all()
            deadline = self._clock.now_s() + timeout_s
            # A full board counts even if a rank has failed since: all ranks then draw the same conclusion from it.
            while None in board:
                self._check_lost()
                left_s = deadline - self._clock.now_s()
                if left_s <= 0:
                    absent = ", ".join(str(other) for other, got in enumerate(board) if got is None)
                    raise DeadlineExceeded(f"rank {rank}: waited {timeout_s:g} s in vain for ranks {absent} to agree")
                self._wakes[rank].wait(min(left_s, _WAIT_S_MAX))
            gathered = [each for each in board if each is not None]
            readers = self._round_readers[number] = self._round_readers.get(number, 0) + 1
            if readers == self.n_ranks:
                del self._rounds[number], self._round_readers[number]
        lengths = {len(each) for each in gathered}
        assert len(lengths) == 1, f"allgather: payloads of {sorted(lengths)} B: must have one length"
        return gathered

    # Under the lock.

    def _check_lost(self) -> None:
        if self._lost is not None:
            raise RankLost(self._lost)

    def _deliver(self, channel: _Channel) -> None:
        """Reports the messages of a channel that are sent and those that are received, oldest first."""
        sending, arriving = channel.sending, channel.arriving
        if sending and sending[0].copied and sending[0].left:
            while sending and sending[0].copied and sending[0].left:
                sending.popleft()
                self._events[channel.src].append((SENT, channel.handle))
            self._wakes[channel.src].notify_all()
        if arriving and arriving[0].copied and arriving[0].arrived:
            while arriving and arriving[0].copied and arriving[0].arrived:
                arriving.popleft()
                self._events[channel.dst].append((RECEIVED, channel.handle))
            self._wakes[channel.dst].notify_all()

    def _settle(self, now_s: float) -> None:
        """Reports everything that has happened on the network up to now."""
        assert self._network is not None
        for channel in self._network.advance(now_s):
            self._deliver(channel)

    def _keep_time(self) -> None:
        """The timer thread: sees to it that completions are noticed when they are due."""
        assert self._network is not None
        with self._lock:
            while not self._closed:
                self._settle(self._clock.now_s())
                wait_s = self._network.next_s() - self._clock.now_s()
                if wait_s > 0:
                    self._timer_wake.wait(min(wait_s, _WAIT_S_MAX))


class _Ports:
    """The fluid network: which channels are crossing, at which rates, and when the next message has left or arrived.

    Ports are numbered: out and in of each server, then out and in of each rank inside its server; where GPUs are
    linked, they are the links. Bytes and bytes/s.
    """

    def __init__(self, topology: Topology, now_s: float) -> None:
        self._server_of = topology.rank_server
        self._fabric = [server.fabric for server in topology.servers]
        self._n_servers = len(topology.servers)
        self._capacity: list[float] = [float(rate) for rate in (*topology.out, *topology.in_)]
        for server in self._server_of:
            fabric = self._fabric[server]
            self._capacity += [float(fabric) if fabric is not None else 0.0] * 2
        self._graph = topology.wired
        if self._graph is not None:
            self._capacity = [float(link.rate) for link in self._graph.links]
        self._latency_s = float(topology.latency_s)
        self._now_s = now_s
        self._active: dict[_Channel, None] = {}
        self._ends_s = float("inf")
        # (when, number, channel, message): bytes that have left and are not yet there; the number keeps their order.
        self._flying: list[tuple[float, int, _Channel, _Message]] = []
        self._n_flown = 0

    def ports_of(self, src: int, dst: int) -> tuple[int, ...]:
        """The ports that a message takes; none if nothing limits it."""
        if self._graph is not None:
            if src == dst:
                return ()
            if dst not in self._graph.routes[src]:
                names = self._graph.gpus
                raise TopologyError(f"{src}->{dst}: no route from {names[src]} to {names[dst]} but through GPUs")
            return self._graph.routes[src][dst]
        here, there = self._server_of[src], self._server_of[dst]
        if here != there:
            return here, self._n_servers + there
        if self._fabric[here] is None:
            return ()
        return 2 * self._n_servers + 2 * src, 2 * self._n_servers + 2 * dst + 1

    def add(self, channel: _Channel, message: _Message) -> None:
        """A message begins to cross at the time of the last `advance`, or waits for those before it."""
        if not channel.ports:
            self._fly(channel, message)
            return
        channel.crossing.append(message)
        if len(channel.crossing) == 1:
            self._active[channel] = None
            self._share()

    def advance(self, now_s: float) -> list[_Channel]:
        """Lets time pass until `now_s`; the channels on which messages have left or arrived meanwhile."""
        changed_channels: dict[_Channel, None] = {}
        while self._ends_s <= now_s:
            self._drain(self._ends_s)
            idle = False
            for channel in list(self._active):
                # Within a nanosecond of its end a message is over: floats cannot tell better.
                if channel.crossing[0].remaining_bytes <= channel.rate * 1e-9:
                    self._fly(channel, channel.crossing.popleft())
                    changed_channels[channel] = None
                    if not channel.crossing:
                        del self._active[channel]
                        idle = True
            if idle:
                self._share()
            else:
                self._set_end()
        self._drain(now_s)
        while self._flying and self._flying[0][0] <= now_s:
            _, _, channel, message = heappop(self._flying)
            message.arrived = True
            changed_channels[channel] = None
        return list(changed_channels)

    def next_s(self) -> float:
        """When `advance` has something to do."""
        return min(self._ends_s, self._flying[0][0] if self._flying else float("inf"))

    def _fly(self, channel: _Channel, message: _Message) -> None:
        message.left = True
        self._n_flown += 1
        heappush(self._flying, (self._now_s + self._latency_s, self._n_flown, channel, message))

    def _drain(self, now_s: float) -> None:
        elapsed_s = max(0.0, now_s - self._now_s)
        for channel in self._active:
            channel.crossing[0].remaining_bytes -= channel.rate * elapsed_s
        self._now_s = max(self._now_s, now_s)

    def _set_end(self) -> None:
        left_s = min((c.crossing[0].remaining_bytes / c.rate for c in self._active), default=float("inf"))
        self._ends_s = self._now_s + max(0.0, left_s)

    def _share(self) -> None:
        """Max-min fair rates by progressive filling: the tightest port fixes its channels, then the rest goes on."""
        rates = max_min_rates([channel.ports for channel in self._active], self._capacity)
        for channel, rate in zip(self._active, rates, strict=True):
            channel.rate = rate
        self._set_end()


def max_min_rates(flows: Sequence[tuple[int, ...]], capacity: Sequence[R]) -> list[R]:
    """The max-min fair rate of each flow, given the ports it takes and what each port carries.

    >>> max_min_rates([(0, 2), (0, 3), (1, 3)], [10.0, 10.0, 2.0, 10.0])
    [2.0, 5.0, 5.0]
    """
    if not flows:
        return []
    nothing = 0 * capacity[0]
    rates = [nothing] * len(flows)
    left = {port: capacity[port] for ports in flows for port in ports}
    users: dict[int, set[int]] = {port: set() for port in left}
    for flow, ports in enumerate(flows):
        for port in ports:
            users[port].add(flow)
    while any(users.values()):
        tightest = min((port for port in users if users[port]), key=lambda port: left[port] / len(users[port]))
        rate = left[tightest] / len(users[tightest])
        for flow in sorted(users[tightest]):
            rates[flow] = rate
            for port in flows[flow]:
                users[port].discard(flow)
                left[port] = max(nothing, left[port] - rate)
    return rates


class LoopbackTransport(RankEnd[LoopbackNetwork]):
    """One rank's end of a `LoopbackNetwork`; used by one thread. The network lives on until its own `close`."""

    __slots__ = ()

    def post_send(self, channel: int, view: Bytes) -> None:
        """See `Transport`."""
        self._network.post(self._rank, channel, view, True)

    def post_recv(self, channel: int, view: Bytes) -> None:
        """See `Transport`."""
        self._network.post(self._rank, channel, view, False)


def run_ranks(
    n_ranks: int,
    function: Callable[[int, LoopbackTransport], T],
    *,
    topology: Topology | None = None,
    deadline_s: float = RUN_DEADLINE_S,
) -> list[T]:
    """Calls `function(rank, transport)` once per rank, each in a thread of its own; the results by rank.

    The first exception of a rank ends the waits of all others and is raised here. Raises DeadlineExceeded, naming the
    ranks, if some are not done after `deadline_s` seconds.

    >>> run_ranks(3, lambda rank, transport: transport.allgather(bytes([rank])))[1]
    [b'\\x00', b'\\x01', b'\\x02']
    """
    with LoopbackNetwork(topology, n_ranks) as network:
        return run_threads(
            n_ranks, lambda rank: function(rank, network.transport(rank)), network.abort, deadline_s=deadline_s
        )
