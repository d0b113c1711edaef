"""Sim: the production run-time in simulated time, over NICs that fail, and the failover table that carries every byte.

Each channel is cut into chunks, and its two ends do what `optcc.failover.step` says, and nothing else: this module is
the memory, the wire and the clock of that table. Two networks:

- *Rails* without rates: a rail is a plane with one NIC in every rank. This is to try the protocol. An outage takes a
  NIC, or the plane, down at a seeded moment and may bring it back; what is in flight on it may be lost.
- A *topology*: NICs have the rates of the topology each way, a chunk occupies the out port of one NIC and the in port
  of another (`tests.reference.table_ports`), and so time is that of `optcc.simulate`. A message is striped over
  the NICs that its two servers have in common as over TCP, and a chunk is sent only when its slot is posted. A NIC that
  fails stands still with what it carries; once the sender knows, those chunks go out on another NIC.

On top of that, packets are lost, corrupted, duplicated, delayed and so reordered, as often as `PacketFaults` says. The
ends of a channel learn of an outage some time later, each at its own moment; only a sender's timer helps against what
nobody is told of.

A packet is a header and a chunk:

    kind u8, epoch u32, channel u32, sequence u64, length u32, crc u32

where crc is CRC-32 (zlib) of the rest. A packet with a wrong one is dropped and counted. CRC-32 finds every burst of up
to 32 bits, and misses about one in 2^32 of other errors; it is no protection against intent. Headers, acknowledgements
and the news that a slot is posted take the latency, and nothing of a port.

Time is simulated. The ranks are threads that hand one turn around, so that one runs at a time and each run of a seed is
the same as the last. The small exchanges (`allgather`, `barrier`) do not go over the network, nor does computing take
time.
"""

from __future__ import annotations

import random
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from heapq import heappop, heappush
from math import isfinite
from typing import Literal, NamedTuple, TypeVar, get_args

import numpy as np

from optcc.errors import AllRailsFailed, DeadlineExceeded, InputError, RankLost, TopologyError
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
from optcc.faults import Direction, FaultPlan
from optcc.plan import Channel
from optcc.runtime.transport import RECEIVED, SENT, Bytes, ChannelNumbers
from optcc.runtime.transport import Event as TransportEvent
from optcc.runtime.transports.rank_end import RankEnd
from optcc.runtime.transports.rank_threads import RUN_DEADLINE_S, run_threads
from optcc.topology import Nic, Server, Topology
from tests.reference.stripes import Stripes
from tests.reference.table_ports import NEVER, FairPorts, FifoPorts, Packet, Ports, Seconds

Model = Literal["fifo", "fair"]
N_RAILS = 2
WINDOW = 8
CHUNK_BYTES = 1 << 16
STALL_S = 5.0
DETECTION_S = 1e-3
_LATENCY_S = 10e-6
_TIMEOUT_S = 5e-3
_TIMEOUT_S_MAX = 0.5
_POLL_S_MIN = 1e-6
_LATE_SHARE = 0.5
"""Of what is in flight on a NIC that fails, how much still arrives, where NICs have no rates."""
_OUT, _IN = 0, 1
_WAYS: tuple[Direction, Direction] = ("out", "in")
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
    """What has happened to packets; `suppressed` chunks are those that a receiver had, or of a former epoch.

    `changes` of epoch have been agreed, and `failures` taken a NIC, or a plane of them, down; `waited` acknowledgements
    and proposals have waited for a NIC to be back.
    """

    sent: int = 0
    arrived: int = 0
    lost: int = 0
    corrupt: int = 0
    suppressed: int = 0
    changes: int = 0
    failures: int = 0
    waited: int = 0


class _Path(NamedTuple):
    """One way from a rank to a rank: two NICs (-1: none, inside a server), and two ports (-1: none)."""

    src_nic: int
    dst_nic: int
    out: int
    in_: int


class _Nics:
    """The NICs of all servers, numbered, and which of them join two ranks.

    Without rates, every rank is a server with one NIC on every rail. NIC n has the ports 2n and 2n + 1, out and in.
    """

    def __init__(self, rails: int | Topology, n_ranks: int) -> None:
        self.rails = rails
        self.server_of: Sequence[int]
        if isinstance(rails, Topology):
            self.server_of = rails.rank_server
            counts = [len(server.nics) for server in rails.servers]
        else:
            self.server_of = range(n_ranks)
            counts = [rails] * n_ranks
        self.of_server: list[range] = []
        for count in counts:
            begin = self.of_server[-1].stop if self.of_server else 0
            self.of_server.append(range(begin, begin + count))
        self.rates: list[Fraction] = []
        self._gpu_port = [-1] * n_ranks
        if isinstance(rails, Topology):
            self.rates = [rate for server in rails.servers for nic in server.nics for rate in (nic.out, nic.in_)]
            for rank, fabric in enumerate(rails.servers[server].fabric for server in self.server_of):
                if fabric is not None:
                    self._gpu_port[rank] = len(self.rates)
                    self.rates += [fabric, fabric]

    def paths(self, src: int, dst: int) -> tuple[list[_Path], Stripes | None]:
        """The paths from a rank to a rank, and how a message is striped over them.

        Raises TopologyError if the servers have no rail in common on a rail-only network.
        """
        here, there = self.server_of[src], self.server_of[dst]
        if not isinstance(self.rails, Topology):
            pairs = zip(self.of_server[here], self.of_server[there], strict=True)
            return [_Path(mine, theirs, -1, -1) for mine, theirs in pairs], None
        if here == there:
            out = self._gpu_port[src]
            return [_Path(-1, -1, out, self._gpu_port[dst] + 1 if out >= 0 else -1)], Stripes.of([1])
        servers = self.rails.servers
        numbers = _common(servers[here], servers[there])
        if not numbers and not self.rails.rail_only:
            mine, theirs = (_living(servers[each]) for each in (here, there))
            numbers = [(a, b) for (a, _), (b, _) in zip(mine, theirs, strict=False)]
        if not numbers:
            raise TopologyError(f"ranks {src} and {dst}: their servers share no rail: must share one to talk")
        paths = [(self.of_server[here][a], self.of_server[there][b]) for a, b in numbers]
        rates = [min(self.rates[2 * a], self.rates[2 * b + 1]) for a, b in paths]
        return [_Path(a, b, 2 * a, 2 * b + 1) for a, b in paths], Stripes.of([max(1, int(rate)) for rate in rates])


def _living(server: Server) -> list[tuple[int, Nic]]:
    return [(number, nic) for number, nic in enumerate(server.nics) if not nic.failed]


def _common(here: Server, there: Server) -> list[tuple[int, int]]:
    """The NICs of two servers that are on one rail: of each rail the first with the first, and so on."""
    pairs: list[tuple[int, int]] = []
    theirs = _living(there)
    for number, nic in _living(here):
        partner = next((each for each in theirs if each[1].rail == nic.rail), None)
        if partner is not None:
            theirs.remove(partner)
            pairs.append((number, partner[0]))
    return pairs


class _Chunk(NamedTuple):
    """A piece of a message, and whether it is the first and the last one."""

    view: Bytes
    is_first: bool
    is_last: bool


class _Channel:
    """One channel: both ends of the table, and the memory that belongs to them.

    Rail r of the table is `paths[turns[r]]`. `chunks` are those that the sender keeps, from `sender.acked` on; `slots`
    those of the application's receives that are not filled. `kept` are chunks ahead of their turn. With rates, chunk n
    is the `takes[n]`-th that its receiver takes, and the sender knows of slots for `granted` chunks.
    """

    __slots__ = (
        *("arrived", "chunks", "dst", "granted", "handle", "kept", "key", "link", "n_received", "n_sent", "paths"),
        *("receiver", "sender", "slots", "src", "stripes", "takes", "timeout_s", "timer_is_set", "turns"),
        "waits_since_s",
    )

    def __init__(
        self, handle: int, key: tuple[int, int, int], paths: list[_Path], stripes: Stripes | None, window: int
    ) -> None:
        self.handle, self.key, self.src, self.dst = handle, key, key[0], key[1]
        self.paths, self.stripes = paths, stripes
        self.turns: Sequence[int] = range(len(paths)) if stripes is None else stripes.turns
        self.link = Link(len(self.turns), window)
        self.sender: Sender = self.link.sender()
        self.receiver: Receiver = self.link.receiver()
        self.chunks: deque[_Chunk] = deque()
        self.slots: deque[_Chunk] = deque()
        self.n_sent = self.n_received = self.granted = 0
        self.takes: dict[int, int] = {}
        self.kept: dict[int, bytes] = {}
        self.arrived = b""
        self.timer_is_set = False
        self.timeout_s = _TIMEOUT_S
        self.waits_since_s: Seconds = 0.0

    def __str__(self) -> str:
        return f"{self.src}->{self.dst}"

    def path(self, rail: int) -> _Path:
        """Of a rail of the table."""
        return self.paths[self.turns[rail]]

    def rails_over(self, nic: int) -> list[int]:
        """The rails of the table that use a NIC."""
        return [rail for rail in range(len(self.turns)) if nic in self.path(rail)[:2]]


class SimNetwork:
    """The network between `n_ranks` ranks of one process, and their simulated clock; used by `run_sim`.

    `rails` is how many rails without rates there are, or a topology; then `model` says how ports serve packets, and the
    first chunk of each message costs `overhead_s` more. `window` chunks of at most `chunk_bytes` are out at once on a
    channel. `nic_faults` happen at their simulated times, `outages` when so many packets have arrived; the ends of a
    channel learn of either within `detection_s`. With `replan`, the sender changes to the next epoch after each failure
    that it learns of, so that nothing of before is accepted. An end whose rails are all down for `stall_s` seconds,
    with something left to do, ends in AllRailsFailed. All that happens follows from `seed`.

    Raises InputError for numbers that cannot be, TopologyError for a fault of a NIC that is not there.
    """

    def __init__(
        self,
        n_ranks: int,
        rails: int | Topology = N_RAILS,
        *,
        model: Model = "fifo",
        overhead_s: float = 0.0,
        window: int = WINDOW,
        chunk_bytes: int = CHUNK_BYTES,
        faults: PacketFaults | None = None,
        outages: Sequence[Outage] = (),
        nic_faults: FaultPlan | None = None,
        detection_s: float = DETECTION_S,
        replan: bool = False,
        stall_s: float = STALL_S,
        seed: int = 0,
    ) -> None:
        _check_numbers(n_ranks, rails, model, overhead_s, chunk_bytes, detection_s)
        self.n_ranks, self.counts = n_ranks, Counts()
        self._nics = _Nics(rails, n_ranks)
        self._ports: Ports | None = None
        self._latency_s: Seconds = _LATENCY_S
        self._is_exact = False
        if isinstance(rails, Topology):
            self._ports = FifoPorts(self._nics.rates) if model == "fifo" else FairPorts(self._nics.rates)
            self._latency_s, self._is_exact = rails.latency_s, True
            faults = faults or PacketFaults(jitter_s=0.0)
        else:
            Link(rails, window)
        self._faults = faults or PacketFaults()
        self._overhead_s = Fraction(str(overhead_s))
        self._window, self._chunk_bytes, self._replan = window, chunk_bytes, replan
        self._detection_s, self._stall_s = detection_s, stall_s
        self._timeout_s = max(_TIMEOUT_S, 4 * float(self._latency_s))
        self._random = random.Random(seed)
        n_nics = self._nics.of_server[-1].stop
        # Per NIC and way: how many faults hold it down, what share of its rate others leave; how many it has seen.
        self._down = [[0, 0] for _ in range(n_nics)]
        self._shares = [[Fraction(1), Fraction(1)] for _ in range(n_nics)]
        self._n_outages = [0] * n_nics
        # With rates: acknowledgements and proposals that wait for a NIC to be back, with their paths and ways.
        self._waiting: list[tuple[_Path, int, Callable[[], None]]] = []
        self._channels: list[_Channel] = []
        self._numbers = ChannelNumbers()
        self._handles: dict[tuple[int, int, int], int] = {}
        self._n_taken = [0] * n_ranks
        self._events: list[list[TransportEvent]] = [[] for _ in range(n_ranks)]
        self._boards: dict[int, list[bytes | None]] = {}
        self._now_s: Seconds = Fraction(0) if self._is_exact else 0.0
        self._agenda: list[tuple[Seconds, int, Callable[[], None]]] = []
        self._n_planned = 0
        self._lost: str | None = None
        # (handle, 0 for the sender or 1 for the receiver) of the ends without a rail, and since when.
        self._stalled: dict[tuple[int, int], Seconds] = {}
        # The turn: a rank runs from when its gate opens until it waits, for something to wake it or a deadline.
        self._gates = [threading.Lock() for _ in range(n_ranks)]
        for gate in self._gates:
            gate.acquire()
        self._awake = [True] * n_ranks
        self._deadlines: list[Seconds] = [NEVER] * n_ranks
        self._over = [False] * n_ranks
        self._outages = sorted(outages, key=lambda outage: outage.after_packets)
        self._check_outages()
        self._plan_faults(nic_faults or FaultPlan(()))

    @property
    def now_s(self) -> float:
        """Simulated seconds since the start."""
        return float(self._now_s)

    def _check_outages(self) -> None:
        for outage in self._outages:
            ranks = range(self.n_ranks) if outage.rank is None else (outage.rank,)
            for rank in ranks:
                if not 0 <= rank < self.n_ranks or not 0 <= outage.rail < len(self._nics_of(rank)):
                    raise InputError(f"{outage}: must be of a NIC that a rank has")

    def _nics_of(self, rank: int) -> range:
        return self._nics.of_server[self._nics.server_of[rank]]

    def _plan_faults(self, plan: FaultPlan) -> None:
        """Each moment at which a fault begins or ends, for the NIC and the way that it concerns."""
        topology = self._nics.rails
        if isinstance(topology, Topology):
            plan.check(topology)
        moments: set[tuple[Fraction, int, int, int]] = set()
        for fault in plan:
            if not isinstance(topology, Topology):
                if fault.share:
                    raise InputError(f"fault {fault}: rails without rates have none to lose a share of")
                if fault.server >= self.n_ranks or fault.nic >= topology:
                    raise TopologyError(f"fault {fault}: must be one of {topology} rails and {self.n_ranks} ranks")
            ways = [way for way in (_OUT, _IN) if fault.goes(_WAYS[way])]
            moments |= {
                (at, fault.server, fault.nic, way)
                for at in (fault.at_s, fault.until_s)
                for way in ways
                if at is not None
            }
        for at_s, server, number, way in sorted(moments):
            nic, share = self._nics.of_server[server][number], plan.share(server, number, _WAYS[way], at_s)
            self._plan(at_s, partial(self._change_nic, nic, way, share))

    # --- what a transport calls, in its rank's turn -------------------------------------------------------------------

    def open(self, rank: int, channels: Sequence[Channel], group: int) -> list[int]:
        """See `Transport.open`."""
        handles: list[int] = []
        for key in self._numbers.take(channels, group):
            src, dst, _ = key
            if not (0 <= src < self.n_ranks and 0 <= dst < self.n_ranks) or src == dst:
                raise InputError(f"channel {src}->{dst}: must join two ranks below {self.n_ranks}")
            if rank not in (src, dst):
                handles.append(-1)
                continue
            if key not in self._handles:
                self._handles[key] = len(self._channels)
                channel = _Channel(len(self._channels), key, *self._nics.paths(src, dst), self._window)
                self._channels.append(channel)
                self._sender_learns(channel, range(channel.link.n_rails))
                self._receiver_learns(channel, range(channel.link.n_rails))
            handles.append(self._handles[key])
        return handles

    def post_send(self, rank: int, handle: int, view: Bytes) -> None:
        """See `Transport.post_send`."""
        channel = self._channels[handle]
        assert channel.src == rank, f"channel {channel}: rank {rank}"
        chunks = self._cut(channel, channel.n_sent, view)
        channel.n_sent += len(chunks)
        channel.chunks.extend(chunks)
        if self._ports is not None:
            self._offer(channel)
            return
        for _ in chunks:
            self._at_sender(channel, Event(OFFER))

    def post_recv(self, rank: int, handle: int, view: Bytes) -> None:
        """See `Transport.post_recv`."""
        channel = self._channels[handle]
        assert channel.dst == rank, f"channel {channel}: rank {rank}"
        self._n_taken[rank] += 1
        for chunk in self._cut(channel, channel.n_received, view):
            channel.takes[channel.n_received] = self._n_taken[rank]
            channel.n_received += 1
            channel.slots.append(chunk)
            self._at_receiver(channel, Event(OFFER))
        if self._ports is not None:
            self._plan(self._latency_s, partial(self._grant, channel, channel.n_received))

    def _grant(self, channel: _Channel, n_chunks: int) -> None:
        """The sender learns that slots are posted for the first `n_chunks` chunks."""
        channel.granted = n_chunks
        self._offer(channel)

    def _offer(self, channel: _Channel) -> None:
        """With rates, the table is offered chunks that have a slot."""
        while channel.sender.offered < min(channel.n_sent, channel.granted):
            self._at_sender(channel, Event(OFFER))

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
        else:
            self._awake[:] = [True] * self.n_ranks
        gathered = [each for each in board if each is not None]
        if len(gathered) < self.n_ranks:
            if self._lost is not None:
                raise RankLost(self._lost)
            absent = ", ".join(str(other) for other, got in enumerate(board) if got is None)
            raise DeadlineExceeded(f"rank {rank}: waited {timeout_s:g} s in vain for ranks {absent} to agree")
        lengths = {len(each) for each in gathered}
        assert len(lengths) == 1, f"allgather: payloads of {sorted(lengths)} B: must have one length"
        return gathered

    def abort(self, rank: int, cause: str) -> None:
        """See `Transport.abort`."""
        if self._lost is None:
            self._lost = f"rank {rank} is lost: {cause}"
            self._awake[:] = [True] * self.n_ranks

    def sleep(self, rank: int, seconds: float) -> None:
        """Lets simulated time pass for one rank."""
        self._wait(rank, lambda: False, seconds)

    # --- the turn -----------------------------------------------------------------------------------------------------

    def begin(self, rank: int) -> None:
        """Waits for the next turn of a rank's thread."""
        if not self._gates[rank].acquire(timeout=RUN_DEADLINE_S):
            raise DeadlineExceeded(f"rank {rank}: no turn for {RUN_DEADLINE_S:g} s")

    def finish(self, rank: int, failure: str | None) -> None:
        """The rank's function has returned, or raised: the turn goes on."""
        self._over[rank] = True
        if failure is not None:
            self.abort(rank, failure)
        following = self._choose(rank)
        if following is not None:
            self._gates[following].release()

    def start(self) -> None:
        """Gives the first turn to rank 0."""
        self._gates[0].release()

    def _wait(self, rank: int, is_ready: Callable[[], bool], seconds: float) -> None:
        """Gives the turn away until `is_ready()`, until `seconds` have passed, or until a rank is lost."""
        deadline_s = self._deadlines[rank] = self._now_s + self._exactly(seconds)
        while self._lost is None and self._now_s < deadline_s:
            self._awake[rank] = False
            following = self._choose(rank)
            assert following is not None
            if following != rank:
                self._gates[following].release()
                self.begin(rank)
            if is_ready():
                break
        self._deadlines[rank] = NEVER

    def _choose(self, rank: int) -> int | None:
        """The next rank, in turn after `rank`, that has something to do; time passes until there is one."""
        awake, over = self._awake, self._over
        order: list[int] = [*range(rank + 1, self.n_ranks), *range(rank + 1)]
        while True:
            for other in order:
                if awake[other] and not over[other]:
                    return other
            if all(over):
                return None
            self._pass_time()

    def _pass_time(self) -> None:
        """The next thing happens. At one moment messages come first, then ports take what waits for them."""
        agenda, ports = self._agenda, self._ports
        if agenda and agenda[0][0] <= self._now_s:
            heappop(agenda)[2]()
            return
        next_s = agenda[0][0] if agenda else NEVER
        if ports is not None:
            ports.settle(self._now_s)
            next_s = min(next_s, ports.next_s())
        deadline_s = min(self._deadlines)
        if deadline_s < next_s:
            self._now_s = deadline_s
            for rank, each in enumerate(self._deadlines):
                self._awake[rank] |= each <= deadline_s
            return
        assert next_s < NEVER, "nobody waits and nothing happens"
        self._now_s = next_s
        if ports is not None:
            ports.advance(next_s)

    def _exactly(self, seconds: Seconds) -> Seconds:
        """With rates time is a fraction."""
        return Fraction(seconds) if self._is_exact else seconds

    def _plan(self, seconds: Seconds, happens: Callable[[], None]) -> None:
        """`happens()` in `seconds`; what is planned for one instant happens in the order of planning."""
        self._n_planned += 1
        heappush(self._agenda, (self._now_s + self._exactly(seconds), self._n_planned, happens))

    def _report(self, rank: int, event: TransportEvent) -> None:
        self._events[rank].append(event)
        self._awake[rank] = True

    # --- the two ends: what the table says is carried out -------------------------------------------------------------

    def _cut(self, channel: _Channel, first: int, view: Bytes) -> list[_Chunk]:
        """The chunks of a message, the first of which is chunk `first`; a message of no bytes is one chunk."""
        if channel.stripes is None:
            ends = [
                (at, min(at + self._chunk_bytes, len(view))) for at in range(0, max(1, len(view)), self._chunk_bytes)
            ]
        else:
            ends = channel.stripes.cut(len(view), first, self._chunk_bytes)
        last = len(ends) - 1
        return [_Chunk(view[begin:end], i == 0, i == last) for i, (begin, end) in enumerate(ends)]

    def _at_sender(self, channel: _Channel, event: Event) -> None:
        channel.sender, actions = step(SENDER_ROWS, channel.link, channel.sender, event)
        freed = False
        for action in actions:
            if action.kind == FREE:
                freed = True
                channel.takes.pop(action.number, None)
                if channel.chunks.popleft().is_last:
                    self._report(channel.src, (SENT, channel.handle))
            elif action.kind == SEND:
                chunk = channel.chunks[action.number - channel.sender.acked] if action.message == DATA else None
                self._transmit(channel, channel.dst, action, chunk)
        if freed:
            channel.waits_since_s, channel.timeout_s = self._now_s, self._timeout_s
        self._note_stall(channel, 0, channel.sender.stalled)
        self._set_timer(channel)

    def _at_receiver(self, channel: _Channel, event: Event) -> None:
        channel.receiver, actions = step(RECEIVER_ROWS, channel.link, channel.receiver, event)
        is_kept = False
        for action in actions:
            if action.kind == KEEP:
                is_kept = True
                channel.kept[action.number] = channel.arrived
            elif action.kind == DELIVER:
                payload, slot = channel.kept.pop(action.number), channel.slots.popleft()
                view = slot.view
                assert len(payload) == len(view), f"channel {channel}: {len(payload)} B sent, {len(view)} B expected"
                view[:] = np.frombuffer(payload, np.uint8)
                if slot.is_last:
                    self._report(channel.dst, (RECEIVED, channel.handle))
            elif action.kind == FORGET:
                channel.kept.clear()
                self.counts.changes += 1
            elif action.kind == SEND:
                self._transmit(channel, channel.src, action, None)
        if event.kind == DATA and not is_kept:
            self.counts.suppressed += 1
        self._note_stall(channel, 1, channel.receiver.stalled)

    def _note_stall(self, channel: _Channel, end: int, is_stalled: bool) -> None:
        """Keeps since when an end has no rail, and sees to it that somebody looks when it is too long."""
        if not is_stalled:
            self._stalled.pop((channel.handle, end), None)
        elif (channel.handle, end) not in self._stalled:
            self._stalled[channel.handle, end] = self._now_s
            self._plan(self._stall_s, partial(self._wake, channel.dst if end else channel.src))

    def _wake(self, rank: int) -> None:
        self._awake[rank] = True

    def _trouble(self, rank: int) -> str:
        """Which channel of this rank has work and has had no rail for too long; empty if none."""
        for (handle, end), since_s in self._stalled.items():
            channel = self._channels[handle]
            owner, work = (channel.dst, channel.slots) if end else (channel.src, channel.chunks)
            if owner == rank and work and self._now_s - since_s >= self._stall_s:
                return f"rank {rank}: channel {channel}: no rail up for {float(self._now_s - since_s):g} s"
        return ""

    def _set_timer(self, channel: _Channel) -> None:
        """The sender's timer runs while something is out, or proposed, and rings when nothing has come of it."""
        if channel.timer_is_set or not (channel.sender.out or channel.sender.changing):
            return
        channel.timer_is_set = True
        channel.waits_since_s, channel.timeout_s = self._now_s, self._timeout_s
        self._plan(channel.timeout_s, partial(self._timer_rings, channel))

    def _timer_rings(self, channel: _Channel) -> None:
        if not (channel.sender.out or channel.sender.changing):
            channel.timer_is_set = False
            return
        # What a port carries is slow, not lost.
        if self._ports is not None and self._ports.holds(channel.handle):
            channel.waits_since_s, channel.timeout_s = self._now_s, self._timeout_s
        left_s = channel.waits_since_s + self._exactly(channel.timeout_s) - self._now_s
        if left_s <= 0:
            channel.waits_since_s = self._now_s
            left_s = channel.timeout_s = min(2 * channel.timeout_s, max(_TIMEOUT_S_MAX, self._timeout_s))
            self._at_sender(channel, Event(TIMEOUT))
        self._plan(left_s, partial(self._timer_rings, channel))

    # --- the wire -----------------------------------------------------------------------------------------------------

    def _carries(self, path: _Path, way: int) -> bool:
        """True if nothing is down that the path needs, there (`_OUT`) or back (`_IN`)."""
        if path.src_nic < 0:
            return True
        return not self._down[path.src_nic][way] and not self._down[path.dst_nic][1 - way]

    def _age(self, path: _Path) -> int:
        """How many outages the two NICs have seen: a packet that sees another number on arrival met one."""
        return self._n_outages[path.src_nic] + self._n_outages[path.dst_nic] if path.src_nic >= 0 else 0

    def _transmit(self, channel: _Channel, dst: int, action: Action, chunk: _Chunk | None) -> None:
        """Puts a packet on a rail."""
        payload = chunk.view.tobytes() if chunk is not None else b""
        encoded = encode(action.message, action.epoch, channel.handle, action.number, payload)
        self.counts.sent += 1
        path = channel.path(action.rail)
        flies = partial(self._fly, channel, dst, action.rail, encoded)
        if chunk is not None and self._ports is not None and path.out >= 0:
            number, epoch = action.number, action.epoch
            overhead_s = self._overhead_s if chunk.is_first else Fraction(0)
            packet = Packet(
                *(len(payload), path.out, path.in_, (channel.handle, channel.turns[action.rail])),
                *(channel.takes[number], (*channel.key, number), overhead_s),
                lambda: number < channel.sender.acked or epoch != channel.sender.epoch,
                flies,
            )
            self._ports.put(packet, self._now_s)
        elif self._carries(path, way := _OUT if dst == channel.dst else _IN):
            flies()
        elif self._ports is None:
            self.counts.lost += 1
        else:
            self.counts.waited += 1
            self._waiting.append((path, way, flies))

    def _fly(self, channel: _Channel, dst: int, rail: int, encoded: bytes) -> None:
        """A packet is under way, with the faults that befall it."""
        faults, chance = self._faults, self._random.random
        if dst == channel.dst and self._ports is not None:
            channel.waits_since_s, channel.timeout_s = self._now_s, self._timeout_s
        if chance() < faults.drop:
            self.counts.lost += 1
            return
        if chance() < faults.corrupt:
            damaged = bytearray(encoded)
            damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
            encoded = bytes(damaged)
        age = self._age(channel.path(rail))
        for _ in range(1 + (chance() < faults.duplicate)):
            late_s = self._exactly(chance() * faults.jitter_s)
            self._plan(self._latency_s + late_s, partial(self._arrive, channel, dst, rail, age, encoded))

    def _arrive(self, channel: _Channel, dst: int, rail: int, age: int, encoded: bytes) -> None:
        """A packet is there, unless it met an outage; then the table sees it, unless it is damaged."""
        if self._ports is None and age != self._age(channel.path(rail)) and self._random.random() >= _LATE_SHARE:
            self.counts.lost += 1
            return
        self.counts.arrived += 1
        decoded = decode(encoded)
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
        """NICs go down, both ways, and may come back."""
        ranks = range(self.n_ranks) if outage.rank is None else (outage.rank,)
        nics = sorted({self._nics_of(rank)[outage.rail] for rank in ranks})
        self.counts.failures += 1
        for nic in nics:
            self._n_outages[nic] += 1
            for way in (_OUT, _IN):
                self._hold(nic, way, 1)
        self._tell(nics)
        if outage.for_s is not None:
            self._plan(outage.for_s, partial(self._return, nics))

    def _return(self, nics: Sequence[int]) -> None:
        for nic in nics:
            for way in (_OUT, _IN):
                self._hold(nic, way, -1)
        self._tell(nics)

    def _change_nic(self, nic: int, way: int, share: Fraction) -> None:
        """A fault of the plan begins or ends: the NIC has another share of its rate."""
        before = self._shares[nic][way]
        self._shares[nic][way] = share
        if before and not share:
            self._n_outages[nic] += 1
            self.counts.failures += 1
        self._hold(nic, way, (not share) - (not before))
        if bool(before) != bool(share):
            self._tell([nic])

    def _hold(self, nic: int, way: int, more: int) -> None:
        """More or fewer faults hold a NIC down; its port goes at the rate that is left."""
        self._down[nic][way] += more
        if self._ports is not None:
            port = 2 * nic + way
            rate = Fraction(0) if self._down[nic][way] else self._nics.rates[port] * self._shares[nic][way]
            self._ports.change(port, rate, self._now_s)

    def _tell(self, nics: Sequence[int]) -> None:
        """Each end of each channel learns, at a moment of its own, how its rails are at that moment."""
        waiting, self._waiting = self._waiting, []
        for path, way, flies in waiting:
            if self._carries(path, way):
                flies()
            else:
                self._waiting.append((path, way, flies))
        for channel in self._channels:
            rails = sorted({rail for nic in nics for rail in channel.rails_over(nic)})
            if rails:
                for learns in (self._sender_learns, self._receiver_learns):
                    self._plan(self._random.random() * self._detection_s, partial(learns, channel, rails))

    def _is_up(self, channel: _Channel, rail: int) -> bool:
        """A rail is up if both its ways are: without acknowledgements data is of no use."""
        path = channel.path(rail)
        return self._carries(path, _OUT) and self._carries(path, _IN)

    def _sender_learns(self, channel: _Channel, rails: Sequence[int]) -> None:
        is_lost = False
        for rail in rails:
            is_up = self._is_up(channel, rail)
            if is_up != bool(channel.sender.up >> rail & 1):
                self._at_sender(channel, Event(UP if is_up else DOWN, rail))
                if not is_up:
                    is_lost = True
                    if self._ports is not None:
                        self._ports.purge((channel.handle, channel.turns[rail]))
        if is_lost and self._replan:
            self._at_sender(channel, Event(REPLAN))

    def _receiver_learns(self, channel: _Channel, rails: Sequence[int]) -> None:
        for rail in rails:
            is_up = self._is_up(channel, rail)
            if is_up != bool(channel.receiver.up >> rail & 1):
                self._at_receiver(channel, Event(UP if is_up else DOWN, rail))


def _check_numbers(
    n_ranks: int, rails: int | Topology, model: str, overhead_s: float, chunk_bytes: int, detection_s: float
) -> None:
    if n_ranks < 1:
        raise InputError(f"{n_ranks} ranks: must be at least one")
    if isinstance(rails, Topology) and rails.n_ranks != n_ranks:
        raise InputError(f"topology of {rails.n_ranks} ranks: must have {n_ranks}")
    if model not in get_args(Model):
        raise InputError(f"model {model!r}: must be one of {', '.join(get_args(Model))}")
    if chunk_bytes < 1:
        raise InputError(f"chunks of {chunk_bytes} B: must be at least one")
    for label, value in (("overhead", overhead_s), ("detection", detection_s)):
        if not (isfinite(value) and value >= 0):
            raise InputError(f"{label} {value} s: must not be negative")


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


class SimClock:
    """The simulated clock, for one rank: it sleeps in simulated time."""

    __slots__ = ("_network", "_rank")

    def __init__(self, network: SimNetwork, rank: int) -> None:
        self._network, self._rank = network, rank

    def now_s(self) -> float:
        """See `Clock`."""
        return self._network.now_s

    def sleep_s(self, seconds: float) -> None:
        """See `Clock`."""
        self._network.sleep(self._rank, seconds)


class SimTransport(RankEnd[SimNetwork]):
    """One rank's end of a `SimNetwork`; its `clock` is the simulated one, which an executor must be given.

    `poll` raises AllRailsFailed too.
    """

    __slots__ = ("clock",)

    def __init__(self, network: SimNetwork, rank: int) -> None:
        super().__init__(network, rank)
        self.clock = SimClock(network, rank)

    def post_send(self, channel: int, view: Bytes) -> None:
        """See `Transport`."""
        self._network.post_send(self._rank, channel, view)

    def post_recv(self, channel: int, view: Bytes) -> None:
        """See `Transport`."""
        self._network.post_recv(self._rank, channel, view)


def run_sim(network: SimNetwork, function: Callable[[int, SimTransport], T]) -> list[T]:
    """Calls `function(rank, transport)` once per rank of a network that nobody has used yet; the results by rank.

    The first exception of a rank ends the waits of all others and is raised here. Raises DeadlineExceeded if the ranks
    are not done after `RUN_DEADLINE_S` seconds of real time.

    >>> run_sim(SimNetwork(2), lambda rank, transport: transport.allgather(bytes([rank])))[1]
    [b'\\x00', b'\\x01']
    """

    def body(rank: int) -> T:
        network.begin(rank)
        result = function(rank, SimTransport(network, rank))
        network.finish(rank, None)
        return result

    return run_threads(network.n_ranks, body, network.finish, start=network.start)
