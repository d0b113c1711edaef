"""The ports of the simulated transport: what a NIC carries, and when a packet is through.

A packet occupies the out port of its source and the in port of its destination. Two models, the same as those of
`optcc.simulate` (docs/simulation.md), written a second time from the same rules and sharing no code with it. (The
`Reference` of tests/differential/test_simulate_reference.py needs all transfers beforehand; here packets are put while
time runs.)

    fifo   a port serves one packet at a time at its own rate; the network stores what an in port cannot take yet. An in
           port takes a packet as soon as it can take it without a pause: at once if it is the slower end, else so late
           that both ends are through together. Time is a fraction, so ties are ties.
    fair   the oldest packet of each stream flows, all at once, at max-min fair rates. Time is a fraction here too:
           max-min fair sharing amplifies rounding errors, from 1e-17 s to 4e-7 s within a plan of 480 transfers.

A port of rate 0 stands still, and what it serves with it, until its rate is another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from typing import Protocol

from optcc.runtime.transports.loopback import max_min_rates

Seconds = Fraction | float
"""Fractions with rates, floats where nothing has a rate."""
NEVER = float("inf")
_GRAIN = 2**80
"""Under fair, fractions with a larger denominator are rounded to a multiple of its inverse; else they would grow with
every event where a third is shared by three."""


class Packet:
    """`n_bytes` from port `out` to port `in_`; `through` is called when the last of them has been taken.

    `stream` is the channel and the rail: its packets come in order. `turn` is the packet's place among what its in port
    takes, `tie` decides between packets that are ready at one moment. `is_stale()`: it need not be sent any more.
    """

    __slots__ = ("in_", "is_stale", "n_bytes", "out", "overhead_s", "sent", "stream", "through", "tie", "turn")

    def __init__(
        self,
        n_bytes: int,
        out: int,
        in_: int,
        stream: tuple[int, int],
        turn: int,
        tie: tuple[int, ...],
        overhead_s: Fraction,
        is_stale: Callable[[], bool],
        through: Callable[[], None],
    ) -> None:
        self.n_bytes, self.out, self.in_, self.stream = n_bytes, out, in_, stream
        self.turn, self.tie, self.overhead_s = turn, tie, overhead_s
        self.is_stale, self.through = is_stale, through
        self.sent = False


class Ports(Protocol):
    """A port model. Times are seconds; they never go back from call to call."""

    def put(self, packet: Packet, now_s: Seconds) -> None:
        """A packet wants its out port."""
        ...

    def settle(self, now_s: Seconds) -> None:
        """Everything that happens at this moment has: ports take what waits for them."""
        ...

    def next_s(self) -> Seconds:
        """When something happens next, if nothing is put meanwhile; infinity: never. Right after `settle` only."""
        ...

    def advance(self, now_s: Seconds) -> None:
        """What happens at this moment, none of it later than `next_s`."""
        ...

    def change(self, port: int, rate: Fraction, now_s: Seconds) -> None:
        """`port` carries `rate` bytes/s from now on."""
        ...

    def purge(self, stream: tuple[int, int]) -> None:
        """All packets of a stream are gone, wherever they are."""
        ...

    def holds(self, channel: int) -> bool:
        """True if a packet of `channel` waits for a port, or is being carried by one."""
        ...


class _Port:
    """One direction of a NIC under fifo. It serves `packet` until `ends_s`, or with `rest_s` to go if it is `down`.

    `pace` is seconds for a byte; of a port that is down, the last one. `has_come`: what an out port serves is in the
    queue of its in port. `held`: an in port is through with what has come, before the sender is.
    """

    __slots__ = ("begins_s", "down", "ends_s", "has_come", "held", "pace", "packet", "queue", "rest_s")

    def __init__(self, rate: Fraction) -> None:
        self.pace = 1 / rate
        self.down = self.has_come = self.held = False
        self.packet: Packet | None = None
        self.begins_s = self.ends_s = self.rest_s = Fraction(0)
        self.queue: list[tuple[Seconds, Seconds, tuple[int, ...], int, Packet]] = []


class FifoPorts:
    """Ports that serve one packet at a time; out ports have even numbers, the in port that belongs to one comes next.

    An out port serves in the order in which packets became ready, an in port by `turn`, then as they came.

    >>> ports, log = FifoPorts([Fraction(10)] * 4), []
    >>> through = lambda: log.append("through")
    >>> ports.put(Packet(20, 0, 3, (0, 0), 0, (), Fraction(0), lambda: False, through), Fraction(1))
    >>> ports.settle(Fraction(1))
    >>> ports.next_s()
    Fraction(3, 1)
    >>> ports.advance(Fraction(3))
    >>> log
    ['through']
    """

    def __init__(self, rates: Sequence[Fraction]) -> None:
        self._ports = [_Port(rate) for rate in rates]
        # (when, port), stale if the port has nothing to do then.
        self._agenda: list[tuple[Seconds, int]] = []
        self._idle: set[int] = set()
        self._n_put = 0
        self._n_of_channel: dict[int, int] = {}

    def put(self, packet: Packet, now_s: Seconds) -> None:
        """See `Ports`."""
        self._count(packet, 1)
        self._queue(packet.out, now_s, now_s, packet)

    def settle(self, now_s: Seconds) -> None:
        """See `Ports`: out ports first, then in ports, which may get something from them."""
        for side in (0, 1):
            for port in sorted(each for each in self._idle if each & 1 == side):
                self._idle.discard(port)
                (self._take if side else self._send)(port, Fraction(now_s))

    def next_s(self) -> Seconds:
        """See `Ports`."""
        while self._agenda:
            at_s, number = self._agenda[0]
            if self._is_due(number, at_s):
                return at_s
            heappop(self._agenda)
        return NEVER

    def advance(self, now_s: Seconds) -> None:
        """See `Ports`."""
        while self.next_s() <= now_s:
            _, number = heappop(self._agenda)
            port = self._ports[number]
            packet = port.packet
            assert packet is not None
            if number & 1:
                if packet.sent:
                    self._be_through(number)
                else:
                    port.held = True
                continue
            if not port.has_come:
                self._come(number, now_s)
                if port.ends_s > now_s:
                    heappush(self._agenda, (port.ends_s, number))
                    continue
            packet.sent = True
            port.packet = None
            self._idle.add(number)
            taker = self._ports[packet.in_]
            if taker.packet is packet and taker.held:
                self._be_through(packet.in_)

    def change(self, port: int, rate: Fraction, now_s: Seconds) -> None:
        """See `Ports`: what the port has left to do goes on at the new rate."""
        each = self._ports[port]
        now = Fraction(now_s)
        begins_s = max(now, each.begins_s)
        if each.packet is not None and not each.down:
            each.rest_s = max(Fraction(0), each.ends_s - begins_s)
        each.down = rate == 0
        if rate:
            each.rest_s *= 1 / rate / each.pace
            each.pace = 1 / rate
            each.ends_s = begins_s + each.rest_s
            each.held = each.held and each.rest_s == 0
            self._idle.add(port)
        # What is on its way may now come at another time than was planned.
        self._agenda.clear()
        for number, every in enumerate(self._ports):
            if every.packet is not None and not every.down and not every.held:
                self._plan(number, now)

    def purge(self, stream: tuple[int, int]) -> None:
        """See `Ports`."""
        gone: set[Packet] = set()
        for number, port in enumerate(self._ports):
            kept = [each for each in port.queue if each[-1].stream != stream]
            if len(kept) < len(port.queue):
                gone.update(each[-1] for each in port.queue if each[-1].stream == stream)
                port.queue = kept
                heapify(kept)
            if port.packet is not None and port.packet.stream == stream:
                gone.add(port.packet)
                port.packet, port.held = None, False
                self._idle.add(number)
        for packet in gone:
            self._count(packet, -1)

    def holds(self, channel: int) -> bool:
        """See `Ports`."""
        return self._n_of_channel.get(channel, 0) > 0

    def _count(self, packet: Packet, more: int) -> None:
        channel = packet.stream[0]
        self._n_of_channel[channel] = self._n_of_channel.get(channel, 0) + more

    def _queue(self, number: int, first: Seconds, second: Seconds, packet: Packet) -> None:
        self._n_put += 1
        heappush(self._ports[number].queue, (first, second, packet.tie, self._n_put, packet))
        self._idle.add(number)

    def _send(self, number: int, now: Fraction) -> None:
        """An out port takes what has waited longest."""
        port = self._ports[number]
        while port.packet is None and not port.down and port.queue:
            packet = heappop(port.queue)[-1]
            if packet.is_stale():
                self._count(packet, -1)
                continue
            port.packet, port.has_come = packet, False
            port.begins_s = now + packet.overhead_s
            port.ends_s = port.begins_s + packet.n_bytes * port.pace
            self._plan(number, now)

    def _plan(self, number: int, now: Fraction) -> None:
        """The next event of a port that serves something."""
        port = self._ports[number]
        packet = port.packet
        assert packet is not None
        if number & 1 or port.has_come:
            heappush(self._agenda, (port.ends_s, number))
            return
        comes_s = self._comes_s(port, packet)
        if comes_s > now:
            heappush(self._agenda, (comes_s, number))
            return
        self._come(number, now)
        heappush(self._agenda, (port.ends_s, number))

    def _comes_s(self, port: _Port, packet: Packet) -> Fraction:
        """When the in port can take the packet without a pause."""
        return max(port.begins_s, port.ends_s - packet.n_bytes * self._ports[packet.in_].pace)

    def _is_due(self, number: int, at_s: Seconds) -> bool:
        """True if this is still the next event of the port."""
        port = self._ports[number]
        if port.packet is None or port.down or port.held:
            return False
        if number & 1 or port.has_come:
            return at_s == port.ends_s
        return at_s == self._comes_s(port, port.packet)

    def _come(self, number: int, now_s: Seconds) -> None:
        """What an out port serves comes to its in port."""
        port = self._ports[number]
        assert port.packet is not None
        port.has_come = True
        self._queue(port.packet.in_, port.packet.turn, now_s, port.packet)

    def _take(self, number: int, now: Fraction) -> None:
        """An in port takes the first of what has come."""
        port = self._ports[number]
        if port.packet is None and not port.down and port.queue:
            port.packet = heappop(port.queue)[-1]
            port.begins_s = now
            port.ends_s = now + port.packet.n_bytes * port.pace
            heappush(self._agenda, (port.ends_s, number))

    def _be_through(self, number: int) -> None:
        """An in port is through with what it serves."""
        port = self._ports[number]
        assert port.packet is not None
        packet, port.packet, port.held = port.packet, None, False
        self._idle.add(number)
        self._count(packet, -1)
        packet.through()


class FairPorts:
    """Ports that serve the first packet of each stream, all at once, max-min fair.

    >>> ports, log = FairPorts([Fraction(10)] * 4), []
    >>> for name in "ab":
    ...     through = lambda name=name: log.append(name)
    ...     ports.put(Packet(20, 0, 3, (ord(name), 0), 0, (), Fraction(0), lambda: False, through), Fraction(0))
    >>> ports.settle(Fraction(0))
    >>> ports.next_s()
    Fraction(4, 1)
    >>> ports.advance(Fraction(4))
    >>> log
    ['a', 'b']
    """

    def __init__(self, rates: Sequence[Fraction]) -> None:
        self._capacity = list(rates)
        # Per stream: its packets, oldest first; of the oldest, the bytes to go and when its overhead is over.
        self._streams: dict[tuple[int, int], deque[Packet]] = {}
        self._left: dict[tuple[int, int], Fraction] = {}
        self._opens_s: dict[tuple[int, int], Fraction] = {}
        self._rates: dict[tuple[int, int], Fraction] = {}
        self._now_s = Fraction(0)
        self._changed = False

    def put(self, packet: Packet, now_s: Seconds) -> None:
        """See `Ports`."""
        stream = self._streams.setdefault(packet.stream, deque())
        stream.append(packet)
        if len(stream) == 1:
            self._begin(packet, Fraction(now_s))

    def settle(self, now_s: Seconds) -> None:
        """See `Ports`: rates, if streams have begun or ended."""
        if not self._changed:
            return
        self._drain(Fraction(now_s))
        flowing = [stream for stream, opens_s in self._opens_s.items() if opens_s <= now_s]
        ports = [(self._streams[stream][0].out, self._streams[stream][0].in_) for stream in flowing]
        self._rates = dict(zip(flowing, max_min_rates(ports, self._capacity), strict=True))
        self._changed = False

    def next_s(self) -> Seconds:
        """See `Ports`."""
        lasts = min((self._left[stream] / rate for stream, rate in self._rates.items() if rate), default=None)
        opens = (opens_s for stream, opens_s in self._opens_s.items() if stream not in self._rates)
        ends_s = NEVER if lasts is None else _rounded(self._now_s + max(Fraction(0), lasts))
        return min(ends_s, min(opens, default=NEVER))

    def advance(self, now_s: Seconds) -> None:
        """See `Ports`."""
        now = Fraction(now_s)
        self._drain(now)
        for stream, rate in list(self._rates.items()):
            if rate and self._left[stream] <= (rate + 1) / _GRAIN:
                packet = self._end(stream, now)
                packet.through()
        if any(opens_s <= now and stream not in self._rates for stream, opens_s in self._opens_s.items()):
            self._changed = True

    def change(self, port: int, rate: Fraction, now_s: Seconds) -> None:
        """See `Ports`."""
        self._drain(Fraction(now_s))
        self._capacity[port] = rate
        self._changed = True

    def purge(self, stream: tuple[int, int]) -> None:
        """See `Ports`."""
        if self._streams.pop(stream, None):
            del self._left[stream], self._opens_s[stream]
            self._rates.pop(stream, None)
            self._changed = True

    def holds(self, channel: int) -> bool:
        """See `Ports`."""
        return any(stream[0] == channel for stream in self._streams)

    def _begin(self, packet: Packet, now_s: Fraction) -> None:
        """The packet is the oldest of its stream."""
        self._left[packet.stream] = Fraction(packet.n_bytes)
        self._opens_s[packet.stream] = now_s + packet.overhead_s
        self._changed = True

    def _end(self, stream: tuple[int, int], now_s: Fraction) -> Packet:
        """The oldest packet of a stream is through; the next that is not stale begins."""
        packets = self._streams[stream]
        packet = packets.popleft()
        while packets and packets[0].is_stale():
            packets.popleft()
        self._rates.pop(stream)
        if packets:
            self._begin(packets[0], now_s)
        else:
            del self._streams[stream], self._left[stream], self._opens_s[stream]
            self._changed = True
        return packet

    def _drain(self, now_s: Fraction) -> None:
        """Bytes flow until now."""
        for stream, rate in self._rates.items():
            self._left[stream] = _rounded(self._left[stream] - rate * (now_s - self._now_s))
        self._now_s = now_s


def _rounded(value: Fraction) -> Fraction:
    """`value`, to the nearest grain if it is finer than that."""
    return value if value.denominator <= _GRAIN else Fraction(round(value * _GRAIN), _GRAIN)
