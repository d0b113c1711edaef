"""`LocalRank`: what all parts of one rank's protocol share, and what they ask of the driver. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from optcc.errors import RuntimeFault
from optcc.runtime.protocol.agreement import Shares
from optcc.runtime.protocol.connection import RecvConnection, SendConnection
from optcc.runtime.protocol.frames import BURST_BYTES_MAX, BURST_FRAME, EAGER_BYTES, BurstWord, Checksum
from optcc.runtime.protocol.handshake import Dialing
from optcc.runtime.protocol.leg import Leg
from optcc.runtime.protocol.liveness import Connection
from optcc.runtime.protocol.settings import RATE_MIN, Counts, NicEntry, RailCount, Settings
from optcc.runtime.protocol.striping import Striping
from optcc.runtime.transport import Event

NEVER_S = float("inf")
_NOTES_MAX = 256
_QUEUE_BYTES = 1 << 20
"""What a full socket's buffers hold."""

Established = SendConnection | RecvConnection


class ProtocolNote(NamedTuple):
    """Something rare that happened: of which kind, in words, and to which peer and NIC of this rank, -1 for none."""

    at_s: float
    kind: str
    text: str
    peer: int
    nic: int


class LocalRank:
    """One rank of a job: who it is, its connections, and what is to be done.

    `book` has every rank's NICs, by rank, and `insides` what each listens at for ranks of its own host, if that is
    known: ranks with the same name there are on one host, and are joined by nothing else. Behind the numbers of a
    rank's NICs there is one more for it. `mates` are, by rank, the ranks of its host in order, itself too. `job` and
    `secret` are those of the handshake, `draw(n)` n random bytes. `events` are those of the transport that have not
    been polled, `n_awaited` counts the posts without one. `up` has the connections that are established. `left` has the
    ranks that said bye, and whether because of a failure; `awaited` those whose word this rank waits for. `nic_up` is
    what the kernel says of this rank's NICs. `addresses` are those, with ports, of NICs that are not where the book
    says, by rank and number. `notes` are the last rare events, for whoever observes the job.

    `agreed` is what plans that are opened from now on are for, as shares of what the book says, the same at all ranks;
    empty before they have agreed on some. It is the `n_agreed`-th.
    """

    # More attributes than instances of one class share the names of: without slots each is a search.
    __slots__ = (
        *("__dict__", "__weakref__", "addresses", "agreed", "book", "checksum", "counts", "draw", "eager_bytes"),
        *("events", "failure", "hosts", "mates"),
        *("insides", "is_leaving", "job", "left", "next_tick_s", "nic_up", "now_s", "own_nics", "rail_counts", "rank"),
        *("secret", "settings", "to_close", "to_dial", "to_limit", "to_report", "to_resume", "to_send", "up"),
        "watch_s",
    )

    def __init__(
        self,
        settings: Settings,
        rank: int,
        book: Sequence[Sequence[NicEntry]],
        *,
        job: bytes,
        secret: bytes,
        draw: Callable[[int], bytes],
        checksum: Checksum | None = None,
        now_s: float = 0.0,
        insides: Sequence[NicEntry] = (),
    ) -> None:
        self.settings, self.rank, self.book, self.insides = settings, rank, book, tuple(insides)
        names = [inside[0] for inside in insides]
        self.hosts = tuple(names.index(name) for name in names) if names else tuple(range(len(book)))
        of_host: dict[int, list[int]] = {}
        for each, host in enumerate(self.hosts):
            of_host.setdefault(host, []).append(each)
        self.mates = [of_host[host] for host in self.hosts]
        self.job, self.secret, self.draw, self.checksum = job, secret, draw, checksum
        self.now_s = now_s
        self.own_nics = book[rank]
        self.addresses: dict[tuple[int, int], tuple[str, int]] = {}
        self.agreed: Shares = ()
        self.n_agreed = 0
        self.counts = Counts()
        own = [*self.own_nics, *self.insides[rank : rank + 1]]
        self.rail_counts = [RailCount(nic[0]) for nic in own]
        self.events: list[Event] = []
        self.n_awaited = 0
        self.up: dict[Established, None] = {}
        self.left: dict[int, bool] = {}
        self.awaited: set[int] = set()
        self.failure: RuntimeFault | None = None
        self.is_leaving = False
        self.nic_up = [True] * len(own)
        self.notes: deque[ProtocolNote] = deque(maxlen=_NOTES_MAX)
        self.eager_bytes = min(EAGER_BYTES, settings.chunk_bytes)
        self.to_dial: list[Dialing] = []
        self.to_close: list[Connection] = []
        self.to_limit: list[SendConnection] = []
        self.to_resume: list[Leg] = []
        self.to_send: dict[SendConnection, None] = {}
        self.to_report: dict[RecvConnection | Leg, None] = {}
        self.next_tick_s = 0.0
        self.watch_s = NEVER_S

    def fail(self, failure: RuntimeFault) -> None:
        """Ends every wait of this rank; the first failure counts. One that is found while it leaves is not its own."""
        if self.failure is None and not self.is_leaving:
            self.failure = failure

    def note(self, kind: str, text: str, peer: int = -1, nic: int = -1) -> None:
        """Keeps a rare event, the last of which can be read in `notes`. What happens inside a host is of no NIC."""
        self.notes.append(ProtocolNote(self.now_s, kind, text, peer, nic if nic < len(self.own_nics) else -1))

    def tell_news(self, event: Event) -> None:
        """Reports an event that is none of a post."""
        self.n_awaited += 1
        self.events.append(event)

    # --- connections

    def wake(self, connection: Established | Leg) -> None:
        """Something waits on a connection to be written."""
        if isinstance(connection, SendConnection):
            self.to_send[connection] = None
        else:
            self.to_report[connection] = None

    def drop(self, connection: Connection) -> None:
        """A connection is of no more use, in whatever state."""
        if connection.is_closed:
            return
        connection.is_closed = True
        if isinstance(connection, SendConnection):
            self.up.pop(connection, None)
            self.to_send.pop(connection, None)
        elif isinstance(connection, RecvConnection):
            self.up.pop(connection, None)
            self.to_report.pop(connection, None)
        elif isinstance(connection, Leg):
            self.to_report.pop(connection, None)
        self.to_close.append(connection)

    def up_to(self, peer: int) -> list[Established]:
        """The connections that are up between this rank and a peer, both directions."""
        return [connection for connection in self.up if connection.peer == peer]

    def of_session(self, peer: int, session: int) -> list[Established]:
        """The connection of that session, if it is up, between this rank and a peer."""
        return [connection for connection in self.up_to(peer) if connection.session == session]

    def up_over(self, nic: int) -> list[Established]:
        """The connections that are up over a NIC of this rank."""
        return [connection for connection in self.up if connection.nic == nic]

    def say(self, peer: int, kind: int, *numbers: int) -> None:
        """Sends control frames over every connection to a peer: receiving them twice does no harm."""
        for connection in self.up_to(peer) if numbers else ():
            for number in numbers:
                connection.say(kind, number)
            self.wake(connection)

    def have_padded(self, connection: Established, n_bytes: int) -> None:
        """Has padding go over a connection the way that its data does: the receiver asks the sender for it."""
        if isinstance(connection, SendConnection):
            connection.pad(n_bytes)
        else:
            for sent_bytes in range(0, n_bytes, BURST_BYTES_MAX):
                word = BurstWord(connection.session, min(BURST_BYTES_MAX, n_bytes - sent_bytes))
                connection.say(BURST_FRAME, word.number)
        self.wake(connection)

    def say_to_all(self, kind: int, numbers: Sequence[int], but: int = -1) -> None:
        """Sends control frames to all peers but one that are connected; see `say`."""
        by_peer: dict[int, list[Established]] = {}
        for connection in self.up:
            by_peer.setdefault(connection.peer, []).append(connection)
        by_peer.pop(but, None)
        for connection in chain.from_iterable(by_peer.values()):
            for number in numbers:
                connection.say(kind, number)
            self.wake(connection)

    # --- time

    def look_within(self, seconds: float) -> None:
        """The next tick is due within this time."""
        at_s = self.now_s + seconds
        if at_s < self.next_tick_s:
            self.next_tick_s = at_s

    def watch_within(self, seconds: float) -> None:
        """During a tick: the next sample is due within this time."""
        if seconds < self.watch_s:
            self.watch_s = seconds

    # --- pairs of ranks

    def pairs(self, src: int, dst: int) -> list[tuple[int, int]]:
        """The NICs of `src` and `dst`, by number, that are joined by a rail: those of one name, or in their order. Two
        ranks of one host are joined inside it."""
        if self.is_inside(src, dst):
            return [(len(self.book[src]), len(self.book[dst]))]
        names = {nic[0]: number for number, nic in enumerate(self.book[dst])}
        pairs = [(number, names[nic[0]]) for number, nic in enumerate(self.book[src]) if nic[0] in names]
        if not pairs:
            pairs = [(number, number) for number in range(min(len(self.book[src]), len(self.book[dst])))]
        return sorted(pairs, key=lambda pair: self.book[min(src, dst)][pair[src > dst]][0])

    def is_inside(self, src: int, dst: int) -> bool:
        """True if two ranks are known to be on one host."""
        return self.hosts[src] == self.hosts[dst]

    def owned(self, rank: int) -> set[int]:
        """The NICs that belong to a rank: those of a host are its ranks' in equal parts, in order."""
        mates, count = self.mates[rank], len(self.book[rank])
        return {nic for nic in range(count) if mates[nic * len(mates) // count] == rank}

    def entry(self, rank: int, nic: int) -> NicEntry:
        """The NIC of this number, or what the rank listens at for those of its own host."""
        return self.book[rank][nic] if nic < len(self.book[rank]) else self.insides[rank]

    def address(self, rank: int, nic: int) -> tuple[str, int]:
        """Where a NIC listens now: address and port."""
        return self.addresses.get((rank, nic)) or self.entry(rank, nic)[1:3]

    def rail_rate(self, src: int, mine: int, dst: int, theirs: int) -> int:
        """What a rail carries from `src` to `dst` at most, as declared, bytes/s."""
        return min(self.entry(src, mine)[3], self.entry(dst, theirs)[4])

    def queue_s(self, mine: int, peer: int, theirs: int) -> float:
        """Seconds that a full socket's bytes take between a NIC of this rank and a peer's; 0 if rates are unknown."""
        rate = min(min(self.entry(rank, nic)[3:]) for rank, nic in ((self.rank, mine), (peer, theirs)))
        return _QUEUE_BYTES / rate if rate >= RATE_MIN else 0.0

    def striping(self, src: int, dst: int) -> Striping:
        """How messages from `src` to `dst` are striped: by what the NICs of each rail send and receive at most."""
        parts = [self.rail_rate(src, mine, dst, theirs) for mine, theirs in self.pairs(src, dst)]
        return Striping.of(parts, self.first_turn(src, dst))

    def first_turn(self, src: int, dst: int) -> int:
        """Staggers the first rails: what a rank sends to all others at once does not all start on the same NIC."""
        return (dst - src) % len(self.book)
