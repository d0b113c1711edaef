"""Hosts' NICs in simulated time: their rates, what befalls them, and the connections between them.

A NIC serves one segment at a time each way, in order. What can befall it: its link goes down, which its host's kernel
reports; a *blackhole*, one way or both, which nobody reports; loss of segments at random; another rate; another
address, which its host's kernel reports too; a reset of the connections over it. What is on its way over a NIC that
fails is lost.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from optcc.runtime.sim.clock import SimulatedClock
from optcc.runtime.sim.nic import SimulatedNic
from optcc.runtime.sim.stream import SYN_RTO_S, Flow, Stream, nothing

REPORT_S = 1e-3
"""The kernel reports a link within this time."""
_HEADER_BYTES = 66
_SYN_TRIES = 6


class End:
    """One end of a stream, for a host's driver: what it writes to, reads from, and is called for."""

    __slots__ = ("_network", "incoming", "is_closed", "outgoing", "stream")

    def __init__(self, network: SimulatedNetwork, stream: Stream, side: int) -> None:
        self._network, self.stream = network, stream
        self.outgoing, self.incoming = stream.flows[side], stream.flows[1 - side]
        self.is_closed = False

    def watch(self, readable: Callable[[], None], writable: Callable[[], None], reset: Callable[[], None]) -> None:
        """Who is to be called; `reset` if the peer resets the connection."""
        self.incoming.on_readable, self.outgoing.on_writable, self.incoming.on_reset = readable, writable, reset

    def close(self) -> None:
        """As a process closes a socket: what was written is delivered, unless something was not read."""
        if self.is_closed:
            return
        self.is_closed = True
        self.watch(nothing, nothing, nothing)
        if self.incoming.available():
            self._reset()
        else:
            self.incoming.refuses = True
            self.outgoing.close()

    def abandon(self) -> None:
        """As the kernel closes the sockets of a process that was killed."""
        if not self.is_closed:
            self.is_closed = True
            self.watch(nothing, nothing, nothing)
            self._reset()

    def _reset(self) -> None:
        self.outgoing.kill()
        self.incoming.is_gone = True
        self._network.reset(self.outgoing)


class SlowPath:
    """What a path carries, bytes/s, and when what is on it will be through."""

    __slots__ = ("free_s", "rate")

    def __init__(self, rate: float) -> None:
        self.rate, self.free_s = rate, 0.0


class SimulatedNetwork:
    """The NICs of all hosts, joined by a core that never limits. All that is drawn comes from `rng`.

    Segments of several senders enter a NIC in the order in which they come, if they go `in_turn`; else in the order in
    which they were sent. The latter takes half of the events, and keeps a NIC idle while a slow sender's segment is on
    its way: enough where the protocol matters and its rates do not.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        latency_s: float,
        segment_bytes: int,
        buffer_bytes: tuple[int, int],
        in_turn: bool = False,
    ) -> None:
        self.clock = SimulatedClock()
        self.rng, self.latency_s, self.segment_bytes = rng, latency_s, segment_bytes
        self._buffer_bytes, self._in_turn = buffer_bytes, in_turn
        self.nics: dict[tuple[int, int], SimulatedNic] = {}
        self._streams: defaultdict[SimulatedNic, dict[Stream, None]] = defaultdict(dict)
        # Called with the first byte of each segment, the kind of a frame if it starts with one, before it leaves a NIC.
        self.triggers: defaultdict[SimulatedNic, list[Callable[[int, Flow | None], None]]] = defaultdict(list)
        # Where a path carries less than the NICs at both ends: its rate, and when it is free again.
        self.slow_paths: dict[tuple[SimulatedNic, SimulatedNic], SlowPath] = {}
        self.corrupt = 0.0
        self.n_corrupted = self.n_lost = 0
        self.accept: dict[int, Callable[[int, End], None]] = {}
        self.told: dict[int, Callable[[int, bool], None]] = {}
        # Who is told of another address of a NIC, by rank; and the NICs by those addresses.
        self.told_address: dict[int, Callable[[int, tuple[str, int]], None]] = {}
        self._moved: dict[tuple[str, int], SimulatedNic] = {}
        # Where ranks share a NIC: all of them, and by address who listens there, unless that is the rank of the NIC.
        self.sharers: dict[SimulatedNic, Sequence[int]] = {}
        self.listeners: dict[tuple[str, int], int] = {}

    def draw_buffer(self) -> int:
        """The size of a send or receive buffer."""
        return self.rng.randint(*self._buffer_bytes)

    # --- connections

    def connect(
        self,
        src: SimulatedNic,
        dst: SimulatedNic,
        name: str,
        connected: Callable[[End], None],
        refused: Callable[[], None],
        to_rank: int | None = None,
    ) -> Callable[[], None]:
        """Opens a connection, to the rank of `dst` unless another one that shares it is named: calls one of the two, or
        neither while nothing gets through. Returns how to give up."""
        given_up, n_moves = [False], dst.n_moves
        rank = dst.rank if to_rank is None else to_rank

        def knock(tries: int) -> None:
            if given_up[0] or dst.n_moves != n_moves:
                return
            if self._passes(src, dst) and self._passes(dst, src):
                self.clock.plan(self.round_trip_s(src, dst), answer)
            elif tries < _SYN_TRIES:
                self.clock.plan(SYN_RTO_S * 2**tries, lambda: knock(tries + 1))

        def answer() -> None:
            if given_up[0] or dst.n_moves != n_moves:
                return
            if not (self._passes(src, dst) and self._passes(dst, src)):
                self.clock.plan(SYN_RTO_S, lambda: knock(1))
            elif dst.refuses or rank not in self.accept:
                refused()
            else:
                stream = Stream(self, src, dst, name)
                self._streams[src][stream] = self._streams[dst][stream] = None
                connected(End(self, stream, 0))
                self.accept[rank](dst.number, End(self, stream, 1))

        def give_up() -> None:
            given_up[0] = True

        self.clock.plan(0.0, lambda: knock(0))
        return give_up

    def reset(self, flow: Flow) -> None:
        """The receiver of a flow finds its connection reset, if that gets through now; else when it sends next.

        The reset comes behind the segments that its NICs have in their queues.
        """
        if self._passes(flow.src, flow.dst):
            queue_s = max(self.clock.now_s, flow.src.out_free_s, flow.dst.in_free_s) - self.clock.now_s
            self.clock.plan(queue_s + (self.latency_s + flow.src.delay_s), lambda: self._come_reset(flow))

    def _come_reset(self, flow: Flow) -> None:
        if self._passes(flow.src, flow.dst):
            flow.kill()
            flow.partner.kill()
            flow.on_reset()

    def break_(self, flow: Flow) -> None:
        """Both ends of one connection find it reset."""
        for each in (flow, flow.partner):
            each.kill()
            self.clock.plan(self.latency_s, each.on_reset)

    def reset_over(self, nic: SimulatedNic) -> None:
        """Both ends of all connections over a NIC find them reset."""
        streams = self._streams[nic]
        for stream in list(streams):
            stream.kill()
            for flow in stream.flows:
                self.clock.plan(self.latency_s, flow.on_reset)
        streams.clear()

    # --- segments

    def carry(self, flow: Flow, start: int, data: bytes, *, is_fin: bool = False) -> None:
        """A segment leaves, and arrives unless something befalls it.

        Not the rule of `optcc.fifo_port`, which times whole messages: here an in port that was idle delivers a segment
        when it has left, and only spaces the following ones. Segments are small, so the sustained rates are the same.
        """
        src, dst, now_s = flow.src, flow.dst, self.clock.now_s
        if self.triggers and data and src in self.triggers:
            for trigger in list(self.triggers[src]):
                trigger(data[0], flow)
        if not (src.is_up and src.out_open):
            return
        size = len(data) + _HEADER_BYTES
        left_s = max(now_s, src.out_free_s) + size / src.out_rate
        src.out_free_s = left_s
        path = self.slow_paths.get((src, dst)) if self.slow_paths else None
        if path is not None:
            left_s = path.free_s = max(left_s, path.free_s + size / path.rate)
        came_s = 0.0 if self._in_turn else _enter(dst, left_s, size)
        if self.rng.random() < src.loss + dst.loss:
            self.n_lost += 1
            return
        if self.corrupt and data and self.rng.random() < self.corrupt:
            damaged = bytearray(data)
            damaged[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            data = bytes(damaged)
            self.n_corrupted += 1
        latency_s = self.latency_s + src.delay_s
        arrives = partial(self._arrive, flow, start, data, is_fin, src.fails + dst.fails)
        if self._in_turn:
            self.clock.plan(left_s - now_s, partial(self._come, dst, left_s, size, latency_s, arrives))
        else:
            self.clock.plan(came_s + latency_s - now_s, arrives)

    def _come(self, dst: SimulatedNic, left_s: float, size: int, latency_s: float, arrives: Callable[[], None]) -> None:
        """A segment enters the NIC at its destination, behind those that are there."""
        self.clock.plan(_enter(dst, left_s, size) + latency_s - left_s, arrives)

    def _arrive(self, flow: Flow, start: int, data: bytes, is_fin: bool, fails: int) -> None:
        """A segment is there, unless a NIC has failed since it left: `fails` counts what befell both before."""
        src, dst = flow.src, flow.dst
        if fails == src.fails + dst.fails and src.is_up and src.out_open and dst.is_up and dst.in_open:
            flow.arrive(start, data, is_fin)
        else:
            self.n_lost += 1

    def acknowledge(self, flow: Flow) -> None:
        """The receiver's kernel says what it has."""
        if self._passes(flow.dst, flow.src):
            self.clock.plan(self.latency_s + flow.dst.delay_s, partial(self._arrive_ack, flow, flow.arrived))

    def _arrive_ack(self, flow: Flow, arrived: int) -> None:
        if self._passes(flow.dst, flow.src):
            flow.take_ack(arrived)

    def round_trip_s(self, src: SimulatedNic, dst: SimulatedNic) -> float:
        """What a segment that takes no time to send, and its answer, take from one NIC to another."""
        return 2 * self.latency_s + (src.delay_s + dst.delay_s)

    def _passes(self, src: SimulatedNic, dst: SimulatedNic) -> bool:
        return src.is_up and src.out_open and dst.is_up and dst.in_open

    # --- faults

    def set_link(self, nic: SimulatedNic, is_up: bool) -> None:
        """The link of a NIC goes down or comes up, and its host is told."""
        if nic.is_up == is_up:
            return
        nic.is_up = is_up
        nic.fails += 1

        def report() -> None:
            for rank in self.sharers.get(nic, (nic.rank,)):
                if nic.is_up == is_up and rank in self.told:
                    self.told[rank](nic.number, is_up)

        self.clock.plan(self.rng.random() * REPORT_S, report)

    def at(self, address: tuple[str, int]) -> SimulatedNic | None:
        """The NIC that has an address: its rank and number, as text and port, unless it has moved; None if none has."""
        if address in self._moved:
            return self._moved[address]
        rank, number = address
        nic = self.nics.get((int(rank), number)) if rank.isdigit() else None
        return None if nic is None or nic.n_moves else nic

    def move(self, nic: SimulatedNic) -> None:
        """A NIC gets another address. Nothing comes any more over connections to or from the one before."""
        self._moved = {address: other for address, other in self._moved.items() if other is not nic}
        nic.n_moves += 1
        nic.fails += 1
        address = f"10.{nic.rank}.{nic.number}.{nic.n_moves}", 1000 + nic.n_moves
        self._moved[address] = nic
        for stream in self._streams.pop(nic, {}):
            stream.kill()

        def report() -> None:
            if self._moved.get(address) is nic and nic.rank in self.told_address:
                self.told_address[nic.rank](nic.number, address)

        self.clock.plan(self.rng.random() * REPORT_S, report)

    def set_open(self, nic: SimulatedNic, *, out: bool, in_: bool) -> None:
        """A blackhole begins or ends; nobody is told."""
        nic.fails += (nic.out_open, nic.in_open) != (out, in_)
        nic.out_open, nic.in_open = out, in_


def _enter(nic: SimulatedNic, came_s: float, size: int) -> float:
    """When a segment that comes then is through a NIC's in port."""
    free_s = nic.in_free_s + size / nic.in_rate
    nic.in_free_s = came_s if came_s > free_s else free_s
    return nic.in_free_s
