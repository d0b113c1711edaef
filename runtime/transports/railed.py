"""Railed: ranks of one process over several rails that fail, and the failover table that carries every byte across.

Each channel is cut into chunks, and its two ends do what `optcc.failover.step` says, and nothing else: this module is
the memory, the wire and the clock of that table. A rail is a plane with one NIC in every rank; an outage takes a NIC,
or the plane, down at a seeded moment and may bring it back. On top of that, packets are lost, corrupted, duplicated,
delayed and so reordered, as often as `PacketFaults` says. The ends of a channel learn of an outage some time later,
each at its own moment; only a sender's timer helps against what nobody is told of.

A packet is a header and a chunk:

    kind u8, epoch u32, channel u32, sequence u64, length u32, crc u32

where crc is CRC-32 (zlib) of the rest. A packet with a wrong one is dropped and counted. CRC-32 finds every burst of up
to 32 bits, and misses about one in 2^32 of other errors; it is no protection against intent.

Time is simulated. The ranks are threads that hand one turn around, so that one runs at a time and each run of a seed is
the same as the last. The small exchanges (`allgather`, `barrier`) do not go over the rails.
"""

from __future__ import annotations

import random
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import TypeVar

import numpy as np

from optcc.errors import AllRailsFailed, DeadlineExceeded, InputError, RankLost
from optcc.failover import (
    ACK,
    CHANGE,
    DATA,
    DELIVER,
    DOWN,
    FORGET,
    FREE,
    KEEP,
    OFFER,
    RECEIVER_ROWS,
    REPLAN,
    SEND,
    SENDER_ROWS,
    TIMEOUT,
    UP,
    Action,
    Event,
    Link,
    Receiver,
    Sender,
    step,
)
from optcc.plan import Channel
from optcc.runtime.transport import COLLECTIVE_TIMEOUT_S, RECEIVED, SENT, Bytes, number_pairs
from optcc.runtime.transport import Event as TransportEvent

N_RAILS = 2
WINDOW = 8
CHUNK_BYTES = 1 << 16
STALL_S = 5.0
RUN_DEADLINE_S = 120.0
"""Seconds of real time that a run of all ranks may take."""
_LATENCY_S = 10e-6
_DETECT_S = 1e-3
_TIMEOUT_S = 5e-3
_TIMEOUT_S_MAX = 0.5
_POLL_S_MIN = 1e-6
_LATE_SHARE = 0.5
"""Of what is in flight on a NIC that fails, how much still arrives."""
_HEADER = struct.Struct("!BIIQI")
_CRC = struct.Struct("!I")
_KINDS = (DATA, CHANGE, ACK)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PacketFaults:
    """How likely it is that a packet is lost, corrupted (one bit), or duplicated, and how long it may be late, seconds.

    Raises InputError for a probability that is not from 0 to below 1, or a negative time.
    """

    drop: float = 0.0
    corrupt: float = 0.0
    duplicate: float = 0.0
    jitter_s: float = _LATENCY_S

    def __post_init__(self) -> None:
        for name in ("drop", "corrupt", "duplicate"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)}: must be from 0 to below 1")
        if self.jitter_s < 0:
            raise InputError(f"jitter {self.jitter_s} s: must not be negative")


@dataclass(frozen=True, slots=True)
class Outage:
    """NIC `rail` of `rank` (None: of all) fails when `after_packets` have arrived, for `for_s` seconds or for good.

    Raises InputError for a negative count or time.
    """

    rail: int
    after_packets: int
    rank: int | None = None
    for_s: float | None = None

    def __post_init__(self) -> None:
        if self.after_packets < 0:
            raise InputError(f"outage after {self.after_packets} packets: must not be negative")
        if self.for_s is not None and not self.for_s > 0:
            raise InputError(f"outage of {self.for_s} s: must be above 0")


@dataclass(slots=True)
class Counts:
    """What has happened to packets; `suppressed` chunks are those that a receiver had, or of a former epoch."""

    sent: int = 0
    arrived: int = 0
    lost: int = 0
    corrupt: int = 0
    suppressed: int = 0
    changes: int = 0


class _Channel:
    """One channel: both ends of the table, and the memory that belongs to them.

    `chunks` are those that the sender keeps, from `sender.acked` on; `slots` those of the application's receives that
    are not filled; with each, whether it is the last one of its message. `kept` are chunks ahead of their turn.
    """

    __slots__ = (
        *("arrived", "chunks", "dst", "handle", "kept", "key", "receiver", "sender", "slots", "src"),
        *("timeout_s", "timer_is_set", "waits_since_s"),
    )

    def __init__(self, handle: int, key: tuple[int, int, int], link: Link) -> None:
        self.handle, self.key, self.src, self.dst = handle, key, key[0], key[1]
        self.sender: Sender = link.sender()
        self.receiver: Receiver = link.receiver()
        self.chunks: deque[tuple[Bytes, bool]] = deque()
        self.slots: deque[tuple[Bytes, bool]] = deque()
        self.kept: dict[int, bytes] = {}
        self.arrived = b""
        self.timer_is_set = False
        self.timeout_s = _TIMEOUT_S
        self.waits_since_s = 0.0

    def __str__(self) -> str:
        return f"{self.src}->{self.dst}"


class RailedNetwork:
    """The rails between `n_ranks` ranks of one process, and their simulated clock; used by `run_railed`.

    `window` chunks of at most `chunk_bytes` are out at once on a channel. With `replan`, the sender changes to the next
    epoch after each failure that it learns of, so that nothing of before is accepted. An end whose rails are all down
    for `stall_s` seconds, with something left to do, ends in AllRailsFailed. All that happens follows from `seed`.

    Raises InputError for numbers that cannot be.
    """

    def __init__(
        self,
        n_ranks: int,
        n_rails: int = N_RAILS,
        *,
        window: int = WINDOW,
        chunk_bytes: int = CHUNK_BYTES,
        faults: PacketFaults | None = None,
        outages: Sequence[Outage] = (),
        replan: bool = False,
        stall_s: float = STALL_S,
        seed: int = 0,
    ) -> None:
        if n_ranks < 1:
            raise InputError(f"{n_ranks} ranks: must be at least one")
        if chunk_bytes < 1:
            raise InputError(f"chunks of {chunk_bytes} B: must be at least one")
        for outage in outages:
            if not 0 <= outage.rail < n_rails or not -1 < (outage.rank or 0) < n_ranks:
                raise InputError(f"{outage}: must be one of {n_rails} rails and {n_ranks} ranks")
        self.n_ranks, self.link, self.counts = n_ranks, Link(n_rails, window), Counts()
        self._chunk_bytes, self._faults, self._replan, self._stall_s = (
            chunk_bytes,
            faults or PacketFaults(),
            replan,
            stall_s,
        )
        self._random = random.Random(seed)
        self._outages = sorted(outages, key=lambda outage: outage.after_packets)
        # Per rank and rail: how many outages hold the NIC down, and how many there have been.
        self._down = [[0] * n_rails for _ in range(n_ranks)]
        self._n_outages = [[0] * n_rails for _ in range(n_ranks)]
        self._channels: list[_Channel] = []
        self._handles: dict[tuple[int, int, int], int] = {}
        self._events: list[list[TransportEvent]] = [[] for _ in range(n_ranks)]
        self._boards: dict[int, list[bytes | None]] = {}
        self._now_s = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._n_planned = 0
        self._lost: str | None = None
        # (handle, 0 for the sender or 1 for the receiver) of the ends without a rail, and since when.
        self._stalled: dict[tuple[int, int], float] = {}
        # The turn: a rank runs from when its gate opens until it waits; `_waits` says for what, and until when.
        self._gates = [threading.Semaphore(0) for _ in range(n_ranks)]
        self._waits: list[tuple[Callable[[], bool], float] | None] = [None] * n_ranks
        self._over = [False] * n_ranks

    @property
    def now_s(self) -> float:
        """Simulated seconds since the start."""
        return self._now_s

    # --- what a transport calls, in its rank's turn -------------------------------------------------------------------

    def open(self, rank: int, channels: Sequence[Channel]) -> list[int]:
        """See `Transport.open`."""
        handles: list[int] = []
        for key in number_pairs(channels):
            src, dst, _ = key
            if not (0 <= src < self.n_ranks and 0 <= dst < self.n_ranks) or src == dst:
                raise InputError(f"channel {src}->{dst}: must join two ranks below {self.n_ranks}")
            if rank not in (src, dst):
                handles.append(-1)
                continue
            if key not in self._handles:
                self._handles[key] = len(self._channels)
                channel = _Channel(len(self._channels), key, self.link)
                self._channels.append(channel)
                self._learn_all(channel)
            handles.append(self._handles[key])
        return handles

    def post_send(self, rank: int, handle: int, view: Bytes) -> None:
        """See `Transport.post_send`."""
        channel = self._channels[handle]
        assert channel.src == rank, f"channel {channel}: rank {rank}"
        for chunk in self._cut(view):
            channel.chunks.append(chunk)
            self._at_sender(channel, Event(OFFER))

    def post_recv(self, rank: int, handle: int, view: Bytes) -> None:
        """See `Transport.post_recv`."""
        channel = self._channels[handle]
        assert channel.dst == rank, f"channel {channel}: rank {rank}"
        for chunk in self._cut(view):
            channel.slots.append(chunk)
            self._at_receiver(channel, Event(OFFER))

    def poll(self, rank: int, timeout_s: float) -> list[TransportEvent]:
        """See `Transport.poll`; takes at least a microsecond, so that time goes on for those who only look."""
        if not self._events[rank]:
            self._wait(rank, lambda: bool(self._events[rank] or self._trouble(rank)), max(timeout_s, _POLL_S_MIN))
        events, self._events[rank] = self._events[rank], []
        if not events:
            if self._lost is not None:
                raise RankLost(self._lost)
            trouble = self._trouble(rank)
            if trouble:
                raise AllRailsFailed(trouble)
        return events

    def allgather(self, number: int, rank: int, payload: bytes, timeout_s: float) -> list[bytes]:
        """Round `number` of the small exchanges; see `Transport.allgather`."""
        board = self._boards.setdefault(number, [None] * self.n_ranks)
        board[rank] = payload
        if None in board:
            self._wait(rank, lambda: None not in board, timeout_s)
        gathered = [each for each in board if each is not None]
        if len(gathered) < self.n_ranks:
            if self._lost is not None:
                raise RankLost(self._lost)
            absent = ", ".join(str(other) for other, got in enumerate(board) if got is None)
            raise DeadlineExceeded(f"rank {rank}: waited {timeout_s:g} s in vain for ranks {absent} to agree")
        lengths = {len(each) for each in gathered}
        assert len(lengths) == 1, f"allgather: payloads of {sorted(lengths)} B: must have one length"
        return gathered

    def sleep(self, rank: int, seconds: float) -> None:
        """Lets simulated time pass for one rank."""
        self._wait(rank, lambda: False, seconds)

    # --- the turn -----------------------------------------------------------------------------------------------------

    def begin(self, rank: int) -> None:
        """Waits for the first turn of a rank's thread."""
        if not self._gates[rank].acquire(timeout=RUN_DEADLINE_S):
            raise DeadlineExceeded(f"rank {rank}: no turn for {RUN_DEADLINE_S:g} s")

    def finish(self, rank: int, failure: str | None) -> None:
        """The rank's function has returned, or raised: the turn goes on."""
        self._over[rank] = True
        if failure is not None and self._lost is None:
            self._lost = f"rank {rank} is lost: {failure}"
        following = self._choose(rank)
        if following is not None:
            self._gates[following].release()

    def start(self) -> None:
        """Gives the first turn to rank 0."""
        self._gates[0].release()

    def _wait(self, rank: int, is_ready: Callable[[], bool], seconds: float) -> None:
        """Gives the turn away until `is_ready()`, until `seconds` have passed, or until a rank is lost."""
        self._waits[rank] = is_ready, self._now_s + seconds
        following = self._choose(rank)
        assert following is not None
        if following != rank:
            self._gates[following].release()
            self.begin(rank)
        self._waits[rank] = None

    def _choose(self, rank: int) -> int | None:
        """The next rank, in turn after `rank`, that has something to do; time passes until there is one."""
        while True:
            deadline_s = float("inf")
            for turn in range(1, self.n_ranks + 1):
                other = (rank + turn) % self.n_ranks
                if self._over[other]:
                    continue
                wait = self._waits[other]
                if wait is None or self._lost is not None or wait[1] <= self._now_s or wait[0]():
                    return other
                deadline_s = min(deadline_s, wait[1])
            if all(self._over):
                return None
            if self._agenda and self._agenda[0][0] <= deadline_s:
                self._now_s, _, happens = heappop(self._agenda)
                happens()
            else:
                self._now_s = deadline_s

    def _plan(self, seconds: float, happens: Callable[[], None]) -> None:
        """`happens()` in `seconds`; what is planned for one instant happens in the order of planning."""
        self._n_planned += 1
        heappush(self._agenda, (self._now_s + seconds, self._n_planned, happens))

    # --- the two ends: what the table says is carried out -------------------------------------------------------------

    def _cut(self, view: Bytes) -> list[tuple[Bytes, bool]]:
        """The chunks of a message, and which one is its last; a message of no bytes is one chunk."""
        starts = range(0, max(1, len(view)), self._chunk_bytes)
        return [(view[at : at + self._chunk_bytes], at == starts[-1]) for at in starts]

    def _at_sender(self, channel: _Channel, event: Event) -> None:
        channel.sender, actions = step(SENDER_ROWS, self.link, channel.sender, event)
        for action in actions:
            if action.kind == FREE:
                _, is_last = channel.chunks.popleft()
                if is_last:
                    self._events[channel.src].append((SENT, channel.handle))
            elif action.kind == SEND:
                at = action.number - channel.sender.acked
                payload = channel.chunks[at][0].tobytes() if action.message == DATA else b""
                self._transmit(channel, channel.dst, action, payload)
        if any(action.kind == FREE for action in actions):
            channel.waits_since_s, channel.timeout_s = self._now_s, _TIMEOUT_S
        self._note_stall(channel, 0, channel.sender.stalled)
        self._set_timer(channel)

    def _at_receiver(self, channel: _Channel, event: Event) -> None:
        channel.receiver, actions = step(RECEIVER_ROWS, self.link, channel.receiver, event)
        for action in actions:
            if action.kind == KEEP:
                channel.kept[action.number] = channel.arrived
            elif action.kind == DELIVER:
                payload, (slot, is_last) = channel.kept.pop(action.number), channel.slots.popleft()
                assert len(payload) == len(slot), f"channel {channel}: {len(payload)} B sent, {len(slot)} B expected"
                slot[:] = np.frombuffer(payload, np.uint8)
                if is_last:
                    self._events[channel.dst].append((RECEIVED, channel.handle))
            elif action.kind == FORGET:
                channel.kept.clear()
                self.counts.changes += 1
            elif action.kind == SEND:
                self._transmit(channel, channel.src, action, b"")
        if event.kind == DATA and not any(action.kind == KEEP for action in actions):
            self.counts.suppressed += 1
        self._note_stall(channel, 1, channel.receiver.stalled)

    def _note_stall(self, channel: _Channel, end: int, is_stalled: bool) -> None:
        """Keeps since when an end has no rail, and sees to it that somebody looks when it is too long."""
        if not is_stalled:
            self._stalled.pop((channel.handle, end), None)
        elif (channel.handle, end) not in self._stalled:
            self._stalled[channel.handle, end] = self._now_s
            self._plan(self._stall_s, lambda: None)

    def _trouble(self, rank: int) -> str:
        """Which channel of this rank has work and has had no rail for too long; empty if none."""
        for (handle, end), since_s in self._stalled.items():
            channel = self._channels[handle]
            owner, work = (channel.dst, channel.slots) if end else (channel.src, channel.chunks)
            if owner == rank and work and self._now_s - since_s >= self._stall_s:
                return f"rank {rank}: channel {channel}: no rail up for {self._now_s - since_s:g} s"
        return ""

    def _set_timer(self, channel: _Channel) -> None:
        """The sender's timer runs while something is out, or proposed, and rings when nothing has come of it."""
        if channel.timer_is_set or not (channel.sender.out or channel.sender.changing):
            return
        channel.timer_is_set = True
        channel.waits_since_s, channel.timeout_s = self._now_s, _TIMEOUT_S
        self._plan(channel.timeout_s, lambda: self._timer_rings(channel))

    def _timer_rings(self, channel: _Channel) -> None:
        if not (channel.sender.out or channel.sender.changing):
            channel.timer_is_set = False
            return
        left_s = channel.waits_since_s + channel.timeout_s - self._now_s
        if left_s <= 0:
            channel.waits_since_s = self._now_s
            left_s = channel.timeout_s = min(2 * channel.timeout_s, _TIMEOUT_S_MAX)
            self._at_sender(channel, Event(TIMEOUT))
        self._plan(left_s, lambda: self._timer_rings(channel))

    # --- the wire -----------------------------------------------------------------------------------------------------

    def _is_up(self, channel: _Channel, rail: int) -> bool:
        return not self._down[channel.src][rail] and not self._down[channel.dst][rail]

    def _age(self, channel: _Channel, rail: int) -> tuple[int, int]:
        """How many outages the two NICs have seen: a packet that sees another number on arrival met one."""
        return self._n_outages[channel.src][rail], self._n_outages[channel.dst][rail]

    def _transmit(self, channel: _Channel, dst: int, action: Action, payload: bytes) -> None:
        """Puts a packet on a rail, with the faults that befall it."""
        packet = encode(action.message, action.epoch, channel.handle, action.number, payload)
        self.counts.sent += 1
        faults, chance, rail = self._faults, self._random.random, action.rail
        if not self._is_up(channel, rail) or chance() < faults.drop:
            self.counts.lost += 1
            return
        if chance() < faults.corrupt:
            damaged = bytearray(packet)
            damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
            packet = bytes(damaged)
        age = self._age(channel, rail)
        for _ in range(1 + (chance() < faults.duplicate)):
            delay_s = _LATENCY_S + chance() * faults.jitter_s
            self._plan(delay_s, lambda: self._arrive(channel, dst, rail, age, packet))

    def _arrive(self, channel: _Channel, dst: int, rail: int, age: tuple[int, int], packet: bytes) -> None:
        """A packet is there, unless it met an outage; then the table sees it, unless it is damaged."""
        if age != self._age(channel, rail) and self._random.random() >= _LATE_SHARE:
            self.counts.lost += 1
            return
        self.counts.arrived += 1
        decoded = decode(packet)
        if decoded is None:
            self.counts.corrupt += 1
        else:
            kind, epoch, handle, number, payload = decoded
            assert handle == channel.handle, f"channel {channel}: a packet of channel {handle}"
            event = Event(kind, rail, epoch, number)
            if dst == channel.src:
                self._at_sender(channel, event)
            else:
                channel.arrived = payload
                self._at_receiver(channel, event)
        while self._outages and self._outages[0].after_packets <= self.counts.arrived:
            self._fail(self._outages.pop(0))

    def _fail(self, outage: Outage) -> None:
        """NICs go down; whoever is concerned learns of it within a while."""
        ranks = range(self.n_ranks) if outage.rank is None else (outage.rank,)
        for rank in ranks:
            self._down[rank][outage.rail] += 1
            self._n_outages[rank][outage.rail] += 1
        self._tell(outage.rail)
        if outage.for_s is not None:
            self._plan(outage.for_s, lambda: self._return(outage))

    def _return(self, outage: Outage) -> None:
        for rank in range(self.n_ranks) if outage.rank is None else (outage.rank,):
            self._down[rank][outage.rail] -= 1
        self._tell(outage.rail)

    def _tell(self, rail: int) -> None:
        """Each end of each channel learns, at a moment of its own, how the rail is at that moment."""
        for channel in self._channels:
            for learns in (self._sender_learns, self._receiver_learns):
                self._plan(self._random.random() * _DETECT_S, partial(learns, channel, rail))

    def _sender_learns(self, channel: _Channel, rail: int) -> None:
        is_up = self._is_up(channel, rail)
        if is_up != bool(channel.sender.up >> rail & 1):
            self._at_sender(channel, Event(UP if is_up else DOWN, rail))
            if self._replan and not is_up:
                self._at_sender(channel, Event(REPLAN))

    def _receiver_learns(self, channel: _Channel, rail: int) -> None:
        is_up = self._is_up(channel, rail)
        if is_up != bool(channel.receiver.up >> rail & 1):
            self._at_receiver(channel, Event(UP if is_up else DOWN, rail))

    def _learn_all(self, channel: _Channel) -> None:
        """A new channel knows which rails are down."""
        for rail in range(self.link.n_rails):
            self._sender_learns(channel, rail)
            self._receiver_learns(channel, rail)


def encode(kind: str, epoch: int, channel: int, number: int, payload: bytes) -> bytes:
    """A packet: header, CRC-32 of all but itself, chunk.

    >>> decode(encode("data", 1, 2, 3, b"abc"))
    ('data', 1, 2, 3, b'abc')
    """
    header = _HEADER.pack(_KINDS.index(kind), epoch, channel, number, len(payload))
    return header + _CRC.pack(zlib.crc32(payload, zlib.crc32(header))) + payload


def decode(packet: bytes) -> tuple[str, int, int, int, bytes] | None:
    """(kind, epoch, channel, number, chunk) of a packet; None if it is damaged."""
    if len(packet) < _HEADER.size + _CRC.size:
        return None
    header, payload = packet[: _HEADER.size], packet[_HEADER.size + _CRC.size :]
    (crc,) = _CRC.unpack_from(packet, _HEADER.size)
    kind, epoch, channel, number, length = _HEADER.unpack(header)
    if crc != zlib.crc32(payload, zlib.crc32(header)) or length != len(payload) or kind >= len(_KINDS):
        return None
    return _KINDS[kind], epoch, channel, number, payload


class RailedClock:
    """The simulated clock, for one rank: it sleeps in simulated time."""

    __slots__ = ("_network", "_rank")

    def __init__(self, network: RailedNetwork, rank: int) -> None:
        self._network, self._rank = network, rank

    def now_s(self) -> float:
        """See `Clock`."""
        return self._network.now_s

    def sleep_s(self, seconds: float) -> None:
        """See `Clock`."""
        self._network.sleep(self._rank, seconds)


class RailedTransport:
    """One rank's end of a `RailedNetwork`; its `clock` is the simulated one, which an executor must be given."""

    __slots__ = ("_n_rounds", "_network", "_rank", "clock")

    def __init__(self, network: RailedNetwork, rank: int) -> None:
        self._network, self._rank = network, rank
        self._n_rounds = 0
        self.clock = RailedClock(network, rank)

    @property
    def rank(self) -> int:
        """The rank whose end this is."""
        return self._rank

    @property
    def n_ranks(self) -> int:
        """Ranks on the network."""
        return self._network.n_ranks

    def open(self, channels: Sequence[Channel]) -> list[int]:
        """See `Transport`."""
        return self._network.open(self._rank, channels)

    def post_send(self, channel: int, view: Bytes) -> None:
        """See `Transport`."""
        self._network.post_send(self._rank, channel, view)

    def post_recv(self, channel: int, view: Bytes) -> None:
        """See `Transport`."""
        self._network.post_recv(self._rank, channel, view)

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        """See `Transport`; raises AllRailsFailed too."""
        return self._network.poll(self._rank, timeout_s)

    def allgather(self, payload: bytes, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> list[bytes]:
        """See `Transport`."""
        self._n_rounds += 1
        return self._network.allgather(self._n_rounds, self._rank, payload, timeout_s)

    def barrier(self, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        """See `Transport`."""
        self.allgather(b"", timeout_s)

    def close(self) -> None:
        """See `Transport`; the network is memory, and there is nothing to give back."""


def run_railed(network: RailedNetwork, function: Callable[[int, RailedTransport], T]) -> list[T]:
    """Calls `function(rank, transport)` once per rank of a network that nobody has used yet; the results by rank.

    The first exception of a rank ends the waits of all others and is raised here. Raises DeadlineExceeded if the ranks
    are not done after `RUN_DEADLINE_S` seconds of real time.

    >>> run_railed(RailedNetwork(2), lambda rank, transport: transport.allgather(bytes([rank])))[1]
    [b'\\x00', b'\\x01']
    """
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def body(rank: int) -> None:
        failure: str | None = None
        try:
            network.begin(rank)
            results[rank] = function(rank, RailedTransport(network, rank))
        except BaseException as error:
            failures.append(error)
            failure = f"{type(error).__name__}: {error}"
        network.finish(rank, failure)

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"optcc-railed-{rank}", daemon=True)
        for rank in range(network.n_ranks)
    ]
    for thread in threads:
        thread.start()
    network.start()
    for thread in threads:
        thread.join(RUN_DEADLINE_S)
    if failures:
        raise next((error for error in failures if not isinstance(error, RankLost)), failures[0])
    if any(thread.is_alive() for thread in threads):
        raise DeadlineExceeded(f"ranks not done after {RUN_DEADLINE_S:g} s")
    return [results[rank] for rank in range(network.n_ranks)]
