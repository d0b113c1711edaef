"""TCP: one process a rank, every pair of ranks joined by a connection per rail and direction, and the failover table.

Each channel is cut into chunks, striped over the rails in proportion to their rates. The two ends of a channel do what
`optcc.failover.step` says, and nothing else; this module is the memory, the wires and the clock of that table. A rail
of the table is a *turn* of a real one (`optcc.runtime.transports.tcp_wire.Shares`).

Whatever arrives is read from the socket into the slot that waits for it (`optcc.runtime.transports.tcp_routes`). A send
is reported when its last chunk is acknowledged, which is after the application has it; a short one earlier, see below.

A connection is given up when the other end closes it, when what comes over it is damaged, when the kernel says that its
NIC is down (`optcc.runtime.transports.nic_watch`), or when bytes have been on their way for `silent_s` and the other
kernel acknowledges none of them. Its chunks then go out on the next rail, the other end is told over what is left, and
the sending rank dials anew, again and again at growing intervals, while it keeps the channel. A rank is lost if its
connections are gone and it refuses new ones; a rank that no rail reaches for `stall_s` ends in AllRailsFailed.

A short message is sent from a copy, and is reported once it is on its way to a slot; so its acknowledgement can wait,
and go with the next slot.

Who may connect is settled by a secret of the job (`optcc.runtime.transports.tcp_wire.Caller`); nothing is encrypted.
Progress is made inside `poll`, `allgather` and `barrier`, and each post writes what the sockets take: there is no
thread. `docs/transports.md` has the figures.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from optcc.errors import (
    AllRailsFailed,
    DeadlineExceeded,
    EnvironmentMissing,
    InputError,
    MismatchError,
    RankLost,
    RuntimeFault,
)
from optcc.plan import Channel
from optcc.runtime.launch import Meet, Meeting, Nic
from optcc.runtime.transport import COLLECTIVE_TIMEOUT_S, Bytes, ChannelNumbers, Clock, Event, MonotonicClock
from optcc.runtime.transports.bruck import Gathering
from optcc.runtime.transports.nic_watch import NicWatch
from optcc.runtime.transports.tcp_rails import WATCH_S, Answering, Incoming, Line, Outgoing, RailCount, listen, tune
from optcc.runtime.transports.tcp_routes import (
    NONCE_BYTES,
    Counts,
    Hub,
    InRoute,
    NicEntry,
    OutRoute,
    RecvChannel,
    SendChannel,
    Settings,
)
from optcc.runtime.transports.tcp_wire import (
    CHANNELS_MAX,
    EXCHANGE,
    JOB_BYTES,
    SECRET_BYTES,
    VERSION,
    Doorman,
    Hello,
    WireError,
    crc32,
)

CHUNK_BYTES = 1 << 20
WINDOW = 32
BUFFER_BYTES = 0
SILENT_S = 0.1
STALL_S = 5.0
HELLO_S = 5.0
_REFUSED_S = 1.0
_TICK_S = 0.1
_TICK_SHARE = 0.02
"""Of the time, at most, that is spent on looking at connections."""
_CLOSE_S = 1.0
_BACKLOG = 1024
_ACCEPTS_AT_ONCE = 16
_HALF_OPEN_SPARE = 16


class _Terms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank says of itself when the ranks meet: what all must agree on, and its NICs as (name, address, port,
    rate out, rate in)."""

    version: int
    chunk_bytes: int
    window: int
    crc: bool
    nics: tuple[NicEntry, ...]


class TcpTransport:
    """This process's end of a network of `Meeting.n_ranks` ranks; making one is collective.

    `meet` brings the ranks together once (see `optcc.runtime.launch`); `nics` are this rank's NICs, one of each plane:
    two ranks are joined over the NICs that have the same name, or in order if none have. Chunks are of about
    `chunk_bytes`, at most `window` are out at once on a channel, with `crc` each has a checksum: these must be the same
    at every rank. With `replan`, the sender changes to the next epoch after each failure that it learns of. With
    `learn_rates`, NICs that turn out to be slower than others of their host, measured by what is declared, get less.
    `buffer_bytes` sizes the sockets' buffers, 0 leaves them to the system. For `silent_s` and `stall_s` see above.

    Raises InputError for numbers that cannot be, MismatchError if ranks differ, and what `meet` raises.
    """

    def __init__(
        self,
        meet: Meet,
        nics: Sequence[Nic],
        *,
        chunk_bytes: int = CHUNK_BYTES,
        window: int = WINDOW,
        crc: bool = False,
        replan: bool = False,
        learn_rates: bool = True,
        buffer_bytes: int = BUFFER_BYTES,
        silent_s: float = SILENT_S,
        stall_s: float = STALL_S,
        hello_s: float = HELLO_S,
        clock: Clock | None = None,
    ) -> None:
        if not nics or len({nic.name for nic in nics}) < len(nics):
            raise InputError(f"NICs {', '.join(nic.name for nic in nics)}: must be at least one, of different names")
        settings = Settings(chunk_bytes, window, crc, replan, learn_rates, buffer_bytes, silent_s, stall_s, hello_s)
        self._hub = Hub(settings, nics, clock or MonotonicClock())
        self._numbers = ChannelNumbers()
        self._handles: dict[tuple[int, int, int], int] = {}
        self._ends: list[tuple[OutRoute, SendChannel] | tuple[InRoute, RecvChannel]] = []
        self._answering: dict[Answering, None] = {}
        self._listeners: list[socket.socket] = []
        self._watch: NicWatch | None = None
        self._ticked_s, self._tick_s = 0.0, WATCH_S
        self._closed = False
        # Posts whose events have not been told.
        self._n_awaited = 0
        self._is_settled = False
        try:
            for nic in nics:
                self._listeners.append(_listen_on(nic, buffer_bytes))
            ports = [listener.getsockname()[1] for listener in self._listeners]
            own = tuple(
                (nic.name, nic.address, port, nic.out_rate, nic.in_rate) for nic, port in zip(nics, ports, strict=True)
            )
            terms = _Terms(VERSION, chunk_bytes, window, crc, own)
            self._hub.meeting = meet(msgspec.json.encode(terms))
            everyone = _read_book(self._hub.meeting, terms)
            self._hub.book = [each.nics for each in everyone]
            if crc:
                self._hub.checksum = crc32
            self._watch_nics()
            for number, listener in enumerate(self._listeners):
                self._hub.selector.register(listener, selectors.EVENT_READ, partial(self._accept, number))
        except BaseException:
            self._give_back()
            raise

    @property
    def rank(self) -> int:
        """The rank whose end this is."""
        return self._hub.meeting.rank

    @property
    def n_ranks(self) -> int:
        """Ranks of the job."""
        return self._hub.meeting.n_ranks

    @property
    def rails(self) -> tuple[RailCount, ...]:
        """What has gone over each NIC of this rank so far, in the order in which they were given."""
        return tuple(replace(rail) for rail in self._hub.rails)

    @property
    def counts(self) -> Counts:
        """What has happened so far."""
        return replace(self._hub.counts)

    # --- Transport ----------------------------------------------------------------------------------------------------

    def open(self, channels: Sequence[Channel], group: int = 0, carried: Sequence[int] = ()) -> list[int]:
        """See `Transport`. Connections to the destinations are begun, not waited for."""
        handles: list[int] = []
        between: Counter[tuple[int, int]] = Counter()
        for channel, n_bytes in zip(channels, carried, strict=False):
            between[channel.src, channel.dst] += n_bytes
        shares = self._hub.shares_for(between)
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
                handle = self._handles[src, dst, k] = len(self._ends)
                if src == self.rank:
                    out = self._hub.out(dst)
                    self._ends.append((out, out.channel(k)))
                else:
                    in_ = self._hub.in_(src)
                    self._ends.append((in_, in_.channel(k)))
                self._ends[-1][1].handle = handle
            if (src, dst) in shares:
                self._ends[handle][1].shares = shares[src, dst]
            handles.append(handle)
        return handles

    def post_send(self, channel: int, view: Bytes) -> None:
        """See `Transport`."""
        route, end = self._ends[channel]
        assert isinstance(route, OutRoute) and isinstance(end, SendChannel), f"channel {channel}: ends here"
        self._n_awaited += 1
        data = view.data
        if not route.send_at_once(end, data):
            route.post(end, data)
            self._hub.flush()

    def post_recv(self, channel: int, view: Bytes) -> None:
        """See `Transport`."""
        route, end = self._ends[channel]
        assert isinstance(route, InRoute) and isinstance(end, RecvChannel), f"channel {channel}: starts here"
        self._n_awaited += 1
        data = view.data
        # The slots of long messages are told at once; those of short ones together, when this rank waits next.
        if not route.post_at_once(end, data):
            route.post(end, data)
            self._hub.flush()

    def poll(self, timeout_s: float) -> list[Event]:
        """See `Transport`; raises AllRailsFailed and MismatchError too."""
        hub = self._hub
        if not hub.events:
            self._progress(lambda: bool(hub.events), timeout_s)
        if not hub.events:
            hub.flush_all()
            if hub.failure is not None:
                raise hub.failure
        events, hub.events = hub.events, []
        self._n_awaited -= len(events)
        # Whoever still waits for an event comes again; else this may be the last call for long.
        if hub.owes_reports and self._n_awaited <= 0 and not self._is_settled:
            hub.flush_owed()
        return events

    def defer_reports(self) -> Callable[[], None]:
        """See `optcc.runtime.transport.Defers`."""
        self._is_settled = True
        return self._settle

    def _settle(self) -> None:
        if self._hub.owes_reports and not self._closed:
            self._hub.flush_owed()

    def allgather(self, payload: bytes, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> list[bytes]:
        """See `Transport`; raises AllRailsFailed too, and MismatchError if the payloads differ in length."""
        gathering = Gathering(self.rank, self.n_ranks, payload)
        ways: list[tuple[OutRoute, SendChannel, int, RecvChannel, int]] = []
        for each in gathering.rounds:
            out, in_ = self._hub.out(each.dst), self._hub.in_(each.src)
            sends, recvs = out.channel(EXCHANGE), in_.channel(EXCHANGE)
            ways.append((out, sends, sends.n_sent + 1, recvs, recvs.n_received + 1))
            in_.post(recvs, each.into.data)
        self._hub.flush()
        deadline_s = self._hub.clock.now_s() + timeout_s
        for each, (out, sends, _, recvs, received) in zip(gathering.rounds, ways, strict=True):
            out.post(sends, each.out.data)
            self._hub.flush()
            self._await(partial(recvs.has_received, received), deadline_s, timeout_s)
        # Whoever has not got its part from here yet would wait for it in vain if this rank went away now.
        self._await(lambda: all(sends.n_sent >= sent for _, sends, sent, _, _ in ways), deadline_s, timeout_s)
        return gathering.parts

    def barrier(self, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        """See `Transport`."""
        self.allgather(b"", timeout_s)

    def abort(self, cause: str) -> None:
        """See `Transport`. The peers learn that this rank has failed, and not why."""
        self._hub.fail(RuntimeFault(f"rank {self.rank}: {cause}"))
        self.close()

    def close(self) -> None:
        """See `Transport`. Peers that still wait for this rank learn that it has left."""
        if self._closed:
            return
        failed = self._hub.failure is not None
        if self._hub.selector.get_map():
            self._hub.flush_all()
            self._progress(self._has_written_all, 0.0 if failed else _CLOSE_S)
            for line in self._lines():
                if isinstance(line, (Outgoing, Incoming)):
                    line.say_bye(failed)
        self._give_back()

    def _give_back(self) -> None:
        self._closed = True
        for line in self._lines():
            line.close()
        for listener in self._listeners:
            listener.close()
        if self._watch is not None:
            self._watch.close()
        self._hub.selector.close()

    def _lines(self) -> list[Line]:
        """Every connection, in whatever state."""
        lines: list[Line] = list(self._answering)
        for out in self._hub.outs.values():
            lines += [line for rail in out.rails for line in (rail.line, rail.dialing) if line is not None]
        for in_ in self._hub.ins.values():
            lines += [line for line in in_.lines if line is not None]
        return lines

    # --- progress -----------------------------------------------------------------------------------------------------

    def _await(self, holds: Callable[[], bool], deadline_s: float, timeout_s: float) -> None:
        self._progress(holds, deadline_s - self._hub.clock.now_s())
        if holds():
            return
        if self._hub.failure is not None:
            raise self._hub.failure
        self._hub.failure = DeadlineExceeded(
            f"rank {self.rank}: waited {timeout_s:g} s in vain for other ranks to agree"
        )
        raise self._hub.failure

    def _progress(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Reads and writes until `holds()`, a failure, or `timeout_s` have passed; looks at least once if it must."""
        hub = self._hub
        now_s = hub.clock.now_s()
        deadline_s = now_s + timeout_s
        while not holds():
            hub.flush_late(now_s)
            self._turn(max(0.0, min(deadline_s, hub.next_tick_s, hub.late_to_s) - now_s))
            if holds():
                return
            now_s = hub.clock.now_s()
            if hub.failure is not None or now_s >= deadline_s:
                return

    def _turn(self, wait_s: float) -> None:
        for key, mask in self._hub.selector.select(wait_s):
            key.data(mask)
        hub = self._hub
        if hub.dirty_outs or hub.dirty_ins:
            hub.flush()
        now_s = hub.clock.now_s()
        if now_s >= hub.next_tick_s:
            self._tick(now_s)
            self._hub.flush()

    def _tick(self, now_s: float) -> None:
        """All that depends on time: silent connections, late hellos, redials, and what has been dark for too long."""
        # What nobody has watched does not count: neither the time outside, nor that in which this process did not run.
        elapsed_s = min(now_s - self._ticked_s, _TICK_S)
        watched_s = min(elapsed_s, 2 * self._tick_s)
        self._ticked_s = now_s
        hub = self._hub
        hub.watch_s = WATCH_S if self._answering else _TICK_S
        for answering in [each for each in self._answering if now_s >= each.deadline_s]:
            self._refuse(answering)
        for out in list(hub.outs.values()):
            out.tick(now_s, elapsed_s, watched_s)
        for in_ in list(hub.ins.values()):
            in_.tick(watched_s)
        if hub.meters.is_on:
            hub.meters.look(now_s, elapsed_s)
        self._look_for_trouble()
        self._tick_s = min(_TICK_S, max(min(hub.watch_s, WATCH_S), (hub.clock.now_s() - now_s) / _TICK_SHARE))
        hub.next_tick_s = now_s + (self._tick_s if hub.watch_s < _TICK_S else _TICK_S)

    def _look_for_trouble(self) -> None:
        """Names the failure that makes further waiting useless."""
        for peer, failed in self._hub.left.items():
            if failed:
                self._hub.fail(RankLost(f"rank {self.rank}: rank {peer} is lost: it has left after a failure"))
            to, from_ = self._hub.outs.get(peer), self._hub.ins.get(peer)
            misses = to is not None and to.is_waited_for() and not to.is_joined()
            if misses or (from_ is not None and from_.has_work() and not from_.is_joined()):
                how = "before it had taken and sent all"
                self._hub.fail(RankLost(f"rank {self.rank}: rank {peer} is lost: it has left {how}"))
        for peer, out in self._hub.outs.items():
            if not out.dark_s or peer in self._hub.left or out.is_joined():
                continue
            in_ = self._hub.ins.get(peer)
            # Its listeners live as long as it does: where all refuse, it is gone. One alone may be a NIC's trouble.
            refusals = [rail.refused for rail in out.rails]
            if all(refusals) or (any(refusals) and out.dark_s >= _REFUSED_S):
                self._hub.fail(RankLost(f"rank {self.rank}: rank {peer} is lost: it refuses connections"))
            elif out.dark_s >= self._hub.settings.stall_s and (out.has_work() or (in_ and in_.has_work())):
                names = ", ".join(rail.name for rail in out.rails)
                self._hub.fail(
                    AllRailsFailed(f"rank {self.rank}: no rail to rank {peer} up for {out.dark_s:.1f} s ({names})")
                )

    def _has_written_all(self) -> bool:
        """True if no connection holds back what its socket did not take."""
        return not any(isinstance(line, (Outgoing, Incoming)) and line.blocked for line in self._lines())

    def _watch_nics(self) -> None:
        """Has the kernel tell of this rank's NICs, where it can."""
        with contextlib.suppress(OSError):
            self._watch = NicWatch([nic.address for nic in self._hub.nics])
            self._hub.nic_up = list(self._watch.is_up)
            self._hub.selector.register(self._watch, selectors.EVENT_READ, self._hear_of_nics)

    def _hear_of_nics(self, _: int) -> None:
        assert self._watch is not None
        for nic, is_up in self._watch.read():
            self._hub.nic_changed(nic, is_up)

    # --- connections --------------------------------------------------------------------------------------------------

    def _accept(self, nic: int, _: int) -> None:
        """Somebody calls. Whoever is not heard in time, or is one too many, is shut out."""
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, _address = self._listeners[nic].accept()
            except OSError:
                return
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                tune(sock, self._hub.settings.buffer_bytes)
            if len(self._answering) >= 2 * self.n_ranks * len(self._hub.nics) + _HALF_OPEN_SPARE:
                self._refuse(next(iter(self._answering)))
            doorman = Doorman(self._hub.meeting.secret, nonce=os.urandom(NONCE_BYTES))
            answering = Answering(sock, nic, doorman, self._hub.clock.now_s() + self._hub.settings.hello_s)
            self._answering[answering] = None
            self._hub.selector.register(sock, selectors.EVENT_READ, partial(self._answer, answering))
            self._hub.next_tick_s = 0.0

    def _answer(self, answering: Answering, _: int) -> None:
        if answering not in self._answering:
            return
        try:
            session = answering.advance(partial(self._check_hello, answering.nic))
        except (OSError, WireError):
            self._refuse(answering)
            return
        if session is None:
            return
        hello = answering.hello
        assert hello is not None
        del self._answering[answering]
        in_ = self._hub.in_(hello.src)
        count = self._hub.rails[answering.nic]
        line = Incoming(answering.sock, hello.rail, session, count, self._hub.checksum, in_)
        self._hub.selector.modify(line.sock, selectors.EVENT_READ, partial(in_.ready, line))
        in_.take(line)

    def _check_hello(self, nic: int, hello: Hello) -> None:
        """Raises WireError for a caller that belongs elsewhere."""
        if hello.job != self._hub.meeting.job or hello.dst != self.rank or hello.src == self.rank:
            raise WireError("hello: for another job or rank")
        if hello.src >= self.n_ranks:
            raise WireError(f"hello: from rank {hello.src} of {self.n_ranks}")
        pairs = self._hub.pairs(hello.src, self.rank)
        if hello.rail >= len(pairs) or pairs[hello.rail][1] != nic:
            raise WireError(f"hello: rail {hello.rail} does not end here")

    def _refuse(self, answering: Answering) -> None:
        self._hub.counts.refused += 1
        self._answering.pop(answering, None)
        self._hub.drop(answering)


def _listen_on(nic: Nic, buffer_bytes: int) -> socket.socket:
    try:
        return listen(nic.address, _BACKLOG, buffer_bytes)
    except OSError as error:
        raise EnvironmentMissing(f"NIC {nic.name}: cannot listen at {nic.address}: {error.strerror}") from error


def _read_book(meeting: Meeting, own: _Terms) -> list[_Terms]:
    """What every rank says of itself; raises MismatchError, naming who, if ranks are set up differently."""
    if len(meeting.secret) != SECRET_BYTES or len(meeting.job) != JOB_BYTES:
        raise InputError(f"secret of {len(meeting.secret)} B: must be {SECRET_BYTES} B, and the job {JOB_BYTES} B")
    book: list[_Terms] = []
    for rank, record in enumerate(meeting.records):
        try:
            terms = msgspec.json.decode(record, type=_Terms)
        except msgspec.DecodeError as error:
            raise MismatchError(f"rank {rank}: its record is not one: {error}") from error
        for field in ("version", "chunk_bytes", "window", "crc"):
            ours, theirs = getattr(own, field), getattr(terms, field)
            if ours != theirs:
                raise MismatchError(f"rank {rank} differs from rank {meeting.rank}: {field} {theirs} instead of {ours}")
        if not terms.nics:
            raise MismatchError(f"rank {rank} has no NIC")
        book.append(terms)
    return book
