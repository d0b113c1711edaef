"""Measures what every NIC of a job sends and receives, over the connections that the job uses afterwards.

    measured = probe(transport)                       # collective
    transport.set_rates(measured.usable)              # messages are striped by them
    transport.start_from(measured.shares)             # a NIC that carries nothing may be repaired
    planner = Planner(measured.topology(), ports="fair", by_rail=True)    # plans are made for them

In a round one rank of each group, the *hub*, sends over all its NICs to the other ranks of its group, or receives from
them: its NICs carry what they can while those of the others are far from busy. The hub measures: messages that were
acknowledged if it sends, bytes that have arrived if it receives, for each of its NICs; the slope of that over time is
the rate. The first part of a round does not count: token buckets and queues let it through faster than the NIC is. A
hub's NIC whose rate is not the typical one of the job is measured again, for a processor that was busy elsewhere looks
like a slow NIC, and while it catches up like a fast one.

Where rates are known, and some may have changed, ranks send to each other in pairs before (`changed_ways`): hubs are
then those alone of whose NICs that does not say what they carry.

How long a sender goes on is its own decision: a message says that it is the last one of its slot of the window, so both
ends agree on the number of messages, and no slot is left behind. Groups have at most `GROUP_MAX` ranks and take their
rounds at the same time, so that the time does not grow with the job. Ranks that share NICs count as one.
"""

from __future__ import annotations

import hashlib
import os
import socket
import statistics
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, zip_longest
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np

from optcc.errors import DeadlineExceeded, InputError
from optcc.plan import Channel
from optcc.runtime.changed_ways import (
    ALIKE,
    PairFlow,
    Pairs,
    Way,
    are_alike,
    first_rounds,
    later_rounds,
    settled_rate,
)
from optcc.runtime.protocol.agreement import Shares
from optcc.runtime.protocol.flows import NicWay
from optcc.runtime.protocol.settings import NicEntry, RailCount
from optcc.runtime.transport import RECEIVED, SENT, Bytes, Clock, Event, MonotonicClock, Transport, WaitsForHosts
from optcc.topology import Nic, Server, Topology

GROUP_MAX = 8
SEND_S, SKIP_S, SKIP_BYTES = 0.055, 0.025, 192 << 10
"""A sender begins messages for so long; what arrives in the first part, and the first bytes, do not count."""
MESSAGE_BYTES, MESSAGE_BYTES_MIN = 24 << 10, 8 << 10
IN_FLIGHT_BYTES, IN_FLIGHT_BYTES_MAX, QUEUE_S = 1 << 18, 1 << 20, 0.01
"""What is on its way over a hub's NIC: what it carries in `QUEUE_S`, at most `IN_FLIGHT_BYTES_MAX`; `IN_FLIGHT_BYTES`
while nothing is known of its rate. In a shorter queue a NIC idles while a rank waits for the processor. A longer one
delays acknowledgements beyond TCP's estimates: with 27 ms, of seven flows to one NIC of 100 Mbit/s, tail loss probes
sent every flow's last packet again, 6 % of what the NIC carried."""
FIRST_MESSAGES, LONG_S = 2, 0.05
"""So many messages are on their way over a NIC at first, and one more for each that is acknowledged sooner than that:
all at once would be, for a NIC that is slower than anybody knows, a queue in which connections are taken for silent."""
AGAIN_BELOW, AGAIN_ABOVE, AGAIN_MAX, GOOD = 0.93, 1.04, 2, 0.8
"""Rates below or above these shares of the typical one are measured again, and, until two measurements are alike, again
up to so many times. Typical is the median of the good ones, those that have at least the last share of the best."""
LEVEL = 0.03
"""Rates that differ by less count as one."""
LEAST_LOAD = 0.25
"""A rank that sends to a second one sends for what went over its NICs the first time, but for this share of what is
known at least."""
DEADLINE_S = 30.0
_LOOK_S, _CONNECT_S = 0.002, 0.1
_GROUP = 1 << 62
"""No plan has this group of channels."""
_MORE, _LAST = 1, 0
_WINDOW_MAX = ceil(IN_FLIGHT_BYTES_MAX / MESSAGE_BYTES)
_COST = struct.Struct("<d16sI")
_USELESS = 1e-3
"""A NIC that carries less than this share of the best carries nothing."""

Rates = tuple[tuple[tuple[int, int], ...], ...]
"""By rank and NIC, bytes/s out and in."""
Beside = Callable[[list[Event]], None]
"""Takes the events of channels that the probe has not opened."""
RailPairs = Callable[[int, int], Sequence[tuple[int, int]]]
"""The rails that join two ranks: the numbers of their NICs at both ends."""


@runtime_checkable
class ProbedTransport(Transport, Protocol):
    """A transport over NICs whose messages can be sent over a chosen rail: TCP, and its simulation."""

    @property
    def nics(self) -> tuple[tuple[NicEntry, ...], ...]:
        """The NICs of every rank, by rank."""
        ...

    @property
    def rails(self) -> tuple[RailCount, ...]:
        """The traffic of each NIC of this rank so far."""
        ...

    def pairs(self, src: int, dst: int) -> list[tuple[int, int]]:
        """The rails that join two ranks: the numbers of their NICs at both ends."""
        ...

    def joined(self, src: int, dst: int) -> list[bool]:
        """For each rail of a pair, whether a connection to `dst` is up; all are if this rank is not `src`."""
        ...

    def open_over(self, channels: Sequence[Channel], rails: Sequence[int], group: int = 0) -> list[int]:
        """`open`, where each channel goes over one rail of its pair alone."""
        ...


@dataclass(frozen=True, slots=True)
class MeasuredNics:
    """What the NICs of each rank carry: `names` and `rates` by rank and NIC; 0 where nothing got through.

    `hosts` has for each rank the first rank of its host: ranks that share their NICs are on one. `overhead_s` is the
    processor time of a message at either end, times how many ranks share a processor.
    """

    names: tuple[tuple[str, ...], ...]
    rates: Rates
    hosts: tuple[int, ...]
    overhead_s: float

    @property
    def firsts(self) -> list[int]:
        """The first rank of each host."""
        return sorted(set(self.hosts))

    @property
    def usable(self) -> Rates:
        """The rates, and of a NIC that carries nothing what good ones of its rail do, or of all if none is: what it is
        to carry once it is repaired."""
        return tuple(
            tuple(
                (rate[0] or self._good_of(name, 0), rate[1] or self._good_of(name, 1))
                for name, rate in zip(names, nics, strict=True)
            )
            for names, nics in zip(self.names, self.rates, strict=True)
        )

    @property
    def shares(self) -> Shares:
        """Which parts of these rates the NICs carry: nothing, or all."""
        return tuple(tuple((1.0, 1.0) if min(rate) > 0 else (0.0, 0.0) for rate in nics) for nics in self.rates)

    def _good_of(self, name: str, way: int) -> int:
        """What a good NIC of a rail carries, out (0) or in (1), bytes/s."""
        found = [
            (each, rate[way])
            for names, nics in zip(self.names, self.rates, strict=True)
            for each, rate in zip(names, nics, strict=True)
        ]
        of_rail = [rate for each, rate in found if each == name]
        return max(1, round(_typical(of_rail) or _typical([rate for _, rate in found])))

    def topology(self, names: Sequence[str] = ()) -> Topology:
        """The hosts as a topology, in the order of their first ranks; `names` are theirs, h0, h1, ... unless given.

        Where hosts have several ranks their NICs belong to these in equal parts, and reach those of their own rail
        (`Topology.with_own_nics`).

        Raises InputError if the ranks of a host do not follow one another, TopologyError if a host is cut off.
        """
        if list(self.hosts) != sorted(self.hosts):
            raise InputError("ranks of one host: must follow one another")
        rails = sorted({name for nics in self.names for name in nics})
        usable, shares = self.usable, self.shares
        servers = tuple(
            Server(
                names[number] if names else f"h{number}",
                self.hosts.count(rank),
                tuple(
                    Nic(rails.index(name), Fraction(pair[0]), Fraction(pair[1]), failed=min(share) <= 0)
                    for name, pair, share in zip(self.names[rank], usable[rank], shares[rank], strict=True)
                ),
            )
            for number, rank in enumerate(self.firsts)
        )
        topology = Topology(servers, overhead_s=Fraction(round(self.overhead_s * 1e9), 10**9))
        return topology.with_own_nics() if len(self.firsts) < len(self.hosts) else topology


class ProbeFlow(NamedTuple):
    """Messages from a rank to a rank over one rail of the pair; `mine` and `theirs` are its NICs there."""

    src: int
    dst: int
    rail: int
    mine: int
    theirs: int


class FlowLoad(NamedTuple):
    """How many messages of a flow are on their way, and how long they are."""

    window: int
    message_bytes: int

    @classmethod
    def of(cls, rate: float | None, flows: int) -> FlowLoad:
        """For a hub's NIC of that rate, None if it is not known, and so many flows.

        >>> FlowLoad.of(50e6, 3), FlowLoad.of(6.2e6, 7)
        (FlowLoad(window=7, message_bytes=24576), FlowLoad(window=1, message_bytes=8857))
        """
        bytes_ = IN_FLIGHT_BYTES if rate is None else min(IN_FLIGHT_BYTES_MAX, rate * QUEUE_S)
        message_bytes = min(MESSAGE_BYTES, max(MESSAGE_BYTES_MIN, int(bytes_ / flows)))
        return cls(max(1, round(bytes_ / (message_bytes * flows))), message_bytes)


class ProbeRound(NamedTuple):
    """A round: its flows, and per group the hub; `is_out` if the hubs send."""

    hubs: tuple[int, ...]
    is_out: bool
    flows: tuple[ProbeFlow, ...]


def hosts_of(nics: Sequence[Sequence[NicEntry]]) -> tuple[int, ...]:
    """For each rank the first rank with the same addresses: ranks that share their NICs are on one host."""
    first_of: dict[tuple[str, ...], int] = {}
    return tuple(first_of.setdefault(tuple(nic[1] for nic in own), rank) for rank, own in enumerate(nics))


def make_groups(ranks: Sequence[int], group_max: int = GROUP_MAX) -> list[tuple[int, ...]]:
    """Groups of nearly equal size, of at most `group_max` ranks.

    >>> make_groups(range(9), 8)
    [(0, 2, 4, 6, 8), (1, 3, 5, 7)]
    """
    count = -(-len(ranks) // group_max)
    return [tuple(ranks[number::count]) for number in range(count)]


def make_rounds(
    groups: Sequence[Sequence[int]], pairs: RailPairs, wanted: Sequence[tuple[int, bool]] = ()
) -> list[ProbeRound]:
    """The rounds in which each rank of each group is the hub once each way; only the `wanted` (hub, is_out) if given.

    >>> [(each.hubs, each.is_out, len(each.flows)) for each in make_rounds([(0, 1, 2)], lambda src, dst: [(0, 0)])][:2]
    [((0,), True, 2), ((0,), False, 2)]
    """
    rounds: list[ProbeRound] = []
    waiting = [
        deque((hub, is_out) for hub in group for is_out in (True, False) if not wanted or (hub, is_out) in wanted)
        for group in groups
    ]
    while any(waiting):
        for is_out in (True, False):
            hubs = [each.popleft()[0] for each in waiting if each and each[0][1] == is_out]
            flows = [
                flow for group in groups for hub in hubs if hub in group for flow in _flows(hub, group, is_out, pairs)
            ]
            if hubs:
                rounds.append(ProbeRound(tuple(hubs), is_out, tuple(flows)))
    return rounds


def _side_by_side(rounds_of: Sequence[Sequence[Pairs]]) -> list[Pairs]:
    """The rounds of several groups at the same time."""
    return [[pair for pairs in each for pair in pairs] for each in zip_longest(*rounds_of, fillvalue=[])]


def _flows(hub: int, group: Sequence[int], is_out: bool, pairs: RailPairs) -> Iterator[ProbeFlow]:
    for other in group:
        if other != hub:
            src, dst = (hub, other) if is_out else (other, hub)
            for rail, (mine, theirs) in enumerate(pairs(src, dst)):
                yield ProbeFlow(src, dst, rail, mine, theirs)


def slope(samples: Sequence[tuple[float, int]], skip_s: float = SKIP_S) -> float:
    """Bytes/s from samples of (time, bytes so far), by least squares, without the first `skip_s` after the first bytes
    and the first `SKIP_BYTES`, or two fifths if that is less; 0 if nothing arrived.

    >>> round(slope([(0.0, 0), (0.01, 500), (0.03, 600), (0.04, 700), (0.05, 800)], 0.02))
    10000
    """
    if len(samples) < 2 or samples[-1][1] == samples[0][1]:
        return 0.0
    began_s = next(at for at, count in samples if count > samples[0][1])
    first, last = samples[0][1], samples[-1][1]
    skip_bytes = first + min(SKIP_BYTES, 2 * (last - first) // 5)
    late = [each for each in samples if each[0] >= began_s + skip_s and each[1] >= skip_bytes]
    if len(late) < 3:
        late = [each for each in samples if each[0] >= began_s]
        if len(late) < 2:
            late = list(samples)
    times, counts = np.array(late, float).T
    times, counts = times - times.mean(), counts - counts.mean()
    spread = float(times @ times)
    return max(0.0, float(times @ counts) / spread) if spread else 0.0


def level(rates: Sequence[float], share: float = LEVEL) -> list[int]:
    """The rates in whole bytes/s, where those that differ by less than `share` are one: the median of such a set.

    >>> level([100.0, 98.0, 50.0, 99.0, 0.0])
    [99, 99, 50, 99, 0]
    """
    levels: dict[int, int] = {}
    order = sorted((rate, number) for number, rate in enumerate(rates))
    while order:
        most = order[-1][0]
        alike = [each for each in order if each[0] >= (1 - share) * most]
        middle = round(statistics.median(rate for rate, _ in alike))
        levels.update((number, middle) for _, number in alike)
        order = order[: len(order) - len(alike)]
    return [levels[number] for number in range(len(rates))]


def settle(rates: Sequence[float], typical: float) -> tuple[float, bool]:
    """What measurements of a NIC say, and whether two of them are alike: then their mean, else the most typical one. A
    processor that is busy elsewhere makes a NIC look slow, and, while it catches up, fast.

    >>> settle([100, 98], 100), settle([125, 101], 100), settle([125, 40, 41], 100)
    ((99.0, True), (101, False), (40.5, True))
    """
    ordered = sorted(rates)
    gap, low = min(((high - low) / high if high else 0.0, low) for low, high in pairwise(ordered))
    if gap < ALIKE:
        return (low + ordered[ordered.index(low) + 1]) / 2, True
    return min(rates, key=lambda each: abs(each - typical)), False


def _typical(rates: Collection[float]) -> float:
    """The median of the good ones: the best itself may be a measurement that went wrong."""
    best = max(rates, default=0.0)
    return statistics.median([rate for rate in rates if rate >= GOOD * best] or [0.0])


def _is_slow(rate: float) -> bool:
    """Whether a NIC that sends something takes longer for what is sent at once than a sender goes on."""
    return 0 < rate * SEND_S < IN_FLIGHT_BYTES


class _Counter:
    """Bytes of each NIC of a hub over time, until a flow over it may have ended."""

    def __init__(self, n_nics: int) -> None:
        self.samples: list[list[tuple[float, int]]] = [[] for _ in range(n_nics)]
        self.counts = [0] * n_nics
        self._has_ended = [False] * n_nics

    def add(self, now_s: float, messages: Sequence[tuple[int, int]]) -> None:
        """Messages, each of a NIC and so many bytes, were acknowledged."""
        for nic, n_bytes in messages:
            self.counts[nic] += n_bytes
        self.look(now_s, self.counts)

    def look(self, now_s: float, counts: Sequence[int]) -> None:
        """Takes a sample of all that is not over."""
        for nic, count in enumerate(counts):
            samples = self.samples[nic]
            if not self._has_ended[nic] and (not samples or count != samples[-1][1]):
                samples.append((now_s, count))

    def end(self, nic: int) -> None:
        """What comes from now on does not count."""
        self._has_ended[nic] = True


class _RoundPart:
    """What one rank sends and receives in a round, and, if it is a hub, the counter of its NICs."""

    def __init__(
        self,
        transport: ProbedTransport,
        clock: Clock,
        round_: ProbeRound,
        handles: Mapping[tuple[int, int, int], int],
        loads: Mapping[tuple[int, int, int], FlowLoad],
        beside: Beside,
    ) -> None:
        self._transport, self._now, self._is_out, self._beside = transport, clock.now_s, round_.is_out, beside
        self._nic_of: dict[int, int] = {}
        self._messages: dict[int, tuple[Bytes, Bytes]] = {}
        # By handle, the slots that are posted; what the messages that are on their way say, and when they were posted;
        # and how many slots have had no message yet.
        self._slots: dict[int, deque[Bytes]] = {}
        self._sent: dict[int, deque[tuple[int, float]]] = {}
        self._unused: dict[int, int] = {}
        # By NIC that sends: how many messages may be on their way over it.
        self._room: dict[int, int] = {}
        for flow in round_.flows:
            handle, load = handles[flow[:3]], loads[flow[:3]]
            if flow.dst == transport.rank:
                self._nic_of[handle] = flow.theirs
                self._slots[handle] = deque(np.empty(load.message_bytes, np.uint8) for _ in range(load.window))
            elif flow.src == transport.rank:
                self._nic_of[handle] = flow.mine
                self._sent[handle], self._unused[handle] = deque(), load.window
                self._room[flow.mine] = FIRST_MESSAGES
                last, more = (np.full(load.message_bytes, flag, np.uint8) for flag in (_LAST, _MORE))
                self._messages[handle] = last, more
        self._until_s = 0.0
        self.counter = _Counter(len(transport.rails)) if transport.rank in round_.hubs else None
        self.n_open = len(self._nic_of)
        self.n_messages = 0

    def start(self) -> None:
        """Posts all slots and the first messages."""
        for handle, slots in self._slots.items():
            for slot in slots:
                self._transport.post_recv(handle, slot)
        for nic in self._room:
            self._use_slots(nic)

    def _use_slots(self, nic: int) -> None:
        """Posts messages into slots that have had none, the flows over a NIC in turn, as long as there is room."""
        handles = [handle for handle in self._sent if self._nic_of[handle] == nic]
        on_way = sum(len(self._sent[handle]) for handle in handles)
        while on_way < self._room[nic] and (unused := [handle for handle in handles if self._unused[handle]]):
            handle = max(unused, key=self._unused.__getitem__)
            self._unused[handle] -= 1
            self._post(handle)
            on_way += 1

    def _post(self, handle: int) -> None:
        """Posts a message, the last one of its slot if this sender has gone on for long enough."""
        now_s = self._now()
        flag = _MORE if not self._until_s or now_s < self._until_s else _LAST
        self._sent[handle].append((flag, now_s))
        self._transport.post_send(handle, self._messages[handle][flag])

    def step(self) -> None:
        """Takes a sample, and what has happened since the last one."""
        counter = self.counter
        if counter is not None and not self._is_out:
            counter.look(self._now(), [count.received_bytes for count in self._transport.rails])
        events = self._transport.poll(_LOOK_S)
        sent = [handle for kind, handle in events if kind == SENT and handle in self._sent]
        if counter is not None and self._is_out:
            counter.add(self._now(), [(self._nic_of[handle], len(self._messages[handle][0])) for handle in sent])
        self.n_messages += len(events)
        self._beside([event for event in events if event[1] not in self._nic_of])
        for handle in sent:
            self._send_next(handle)
        for kind, handle in events:
            if kind == RECEIVED and handle in self._slots:
                self._take(handle)

    def _send_next(self, handle: int) -> None:
        """A message was acknowledged. The time begins with the first one: others may still be in the round before.

        If that did not take long, one more may be on its way over the NIC.
        """
        now_s, nic = self._now(), self._nic_of[handle]
        self._until_s = self._until_s or now_s + SEND_S
        flag, posted_s = self._sent[handle].popleft()
        self._room[nic] += now_s - posted_s < LONG_S
        if flag == _MORE:
            self._post(handle)
        elif self.counter is not None:
            self.counter.end(nic)
        self._use_slots(nic)
        self.n_open -= not (self._sent[handle] or self._unused[handle])

    def _take(self, handle: int) -> None:
        """A message has arrived; its slot is posted again unless that was the last one in it."""
        slots = self._slots[handle]
        slot = slots.popleft()
        if slot[0] == _MORE:
            slots.append(slot)
            self._transport.post_recv(handle, slot)
            return
        if self.counter is not None and not self._is_out:
            self.counter.end(self._nic_of[handle])
        self.n_open -= not slots


def probe(
    transport: ProbedTransport,
    *,
    clock: Clock | None = None,
    deadline_s: float = DEADLINE_S,
    beside: Beside = lambda _: None,
    known: Rates = (),
) -> MeasuredNics:
    """The rates of all NICs of the job; collective, the same at every rank, with nothing else under way.

    `beside` is called with the events of channels that others have opened. With `known` rates, the same at every rank,
    only those of hosts with a NIC that carries something else are measured.

    Raises DeadlineExceeded if it is not done within `deadline_s` seconds, and what the transport raises.
    """
    return _Probe(transport, clock or MonotonicClock(), deadline_s, beside, known).run()


class _Probe:
    """One rank's part of a probe."""

    def __init__(
        self, transport: ProbedTransport, clock: Clock, deadline_s: float, beside: Beside, known: Rates
    ) -> None:
        self._transport, self._clock, self._beside = transport, clock, beside
        if isinstance(transport, WaitsForHosts):
            deadline_s += transport.partition_s
        self._deadline_s, self._due_s = deadline_s, clock.now_s() + deadline_s
        self._rank, self._nics = transport.rank, transport.nics
        self._hosts = hosts_of(self._nics)
        self._groups = make_groups(sorted(set(self._hosts)))
        self._handles: dict[tuple[int, int, int], int] = {}
        # By rank, NIC and way, what was measured, and what that says; unsettled is what should be measured again.
        self._found: dict[tuple[int, int, bool], list[float]] = {}
        self._best: dict[tuple[int, int, bool], float] = {}
        self._unsettled: set[tuple[int, int, bool]] = set()
        # Of NICs too slow for what was sent at once, while nothing was known of them: what they send, roughly.
        self._guessed: dict[tuple[int, int, bool], float] = {}
        # What was known, and the hubs and their ways; all, if there is none.
        self._known = known
        self._hubs: list[tuple[int, bool]] = []
        # Of this rank as a hub: processor time, and messages sent and received.
        self._busy_s, self._n_messages = 0.0, 0

    def run(self) -> MeasuredNics:
        self._open()
        up = self._find_rails()
        if self._known:
            # What is known to carry nothing is out of use, though it may have connections.
            up = {each for each in up if self._is_in_use(*each)}
            self._hubs = [] if self._lacks_some(up) else self._find_changed(up)
            if not self._hubs:
                return self._result()
        rounds = self._rounds(up, self._hubs)
        # What NICs send tells how much to send to them.
        self._measure([each for each in rounds if each.is_out])
        slow = [] if self._known else self._find_slow()
        if slow:
            self._measure(self._rounds(up, slow))
        self._measure([each for each in rounds if not each.is_out])
        for _ in range(AGAIN_MAX):
            again = {(rank, is_out) for rank, _, is_out in self._unsettled}
            if again:
                self._measure(self._rounds(up, sorted(again)))
        return self._result()

    def _find_slow(self) -> list[tuple[int, bool]]:
        """The hubs with a NIC that takes longer for what was sent at once than senders go on, or all if most NICs do:
        few and long messages say little of a rate. It is a guess from now on, for messages that are short enough."""
        found = {key: rates[-1] for key, rates in self._found.items()}
        middle = statistics.median([rate for rate in found.values() if rate] or [0.0])
        if _is_slow(middle):
            self._guessed = {key: min(rate or middle, middle) for key, rate in found.items()}
        else:
            hubs = {hub for (hub, _, _), rate in found.items() if _is_slow(rate)}
            self._guessed = {key: rate for key, rate in found.items() if key[0] in hubs}
        for key in self._guessed:
            del self._found[key]
        return [(hub, True) for hub in sorted({hub for hub, _, _ in self._guessed})]

    def _measure(self, rounds: Sequence[ProbeRound]) -> None:
        self._note(rounds, [self._run_round(each) for each in rounds])

    def _find_changed(self, up: Collection[tuple[int, int, int]]) -> list[Way]:
        """Has pairs of ranks send to each other, takes what that says of what their NICs carry, and returns the ways of
        which it does not."""
        found: dict[NicWay, list[PairFlow]] = {}
        ways = [(rank, is_out) for rank in sorted(set(self._hosts)) for is_out in (True, False)]
        rates = self._pair_off([list(first_rounds(group)) for group in self._groups], up, self._known, found, ways)
        for _ in range(1 + AGAIN_MAX):
            left = [way for way in ways if None in rates[way]]
            if not left:
                break
            # With a rank that lacks a NIC others cannot try theirs.
            cleared = [way for way in ways if rates[way] == self._known_of(way) and all(self._known_of(way))]
            rounds = [later_rounds(group, left, cleared) for group in self._groups]
            rates |= self._pair_off(rounds, up, self._lowered(found), found, left)
        for rank, is_out in ways:
            keys = [(rank, nic, is_out) for nic in range(len(self._known[rank]))]
            if None not in rates[rank, is_out]:
                self._best.update(zip(keys, cast("list[float]", rates[rank, is_out]), strict=True))
            else:
                # Where it is found to carry the same as a hub, it need not be measured again.
                last = {key: found[key][-1].rate for key in keys if key in found}
                self._found.update({key: [rate] for key, rate in last.items() if rate})
        return [way for way in ways if None in rates[way]]

    def _lacks_some(self, up: Collection[tuple[int, int, int]]) -> bool:
        """Whether some NIC has lost most of its connections since it was decided to measure: it carries next to
        nothing, and what it had to carry would go over others. Then nothing new is known but that."""
        should, joined = (
            Counter(
                end for src, dst, rail in rails for end in zip((src, dst), self._nics_of(src, dst, rail), strict=True)
            )
            for rails in (self._handles, up)
        )
        known = {(rank, nic): self._known[rank][nic] for rank, nic in should}
        lost = {end for end, rates in known.items() if min(rates) > 0 and 2 * joined[end] < should[end]}
        for end, rates in known.items() if lost else ():
            for is_out, rate in zip((True, False), rates, strict=True):
                self._best[*end, is_out] = 0.0 if end in lost else float(rate)
        return bool(lost)

    def _is_in_use(self, src: int, dst: int, rail: int) -> bool:
        """Whether the NICs at both ends of a rail are known to carry something."""
        mine, theirs = self._nics_of(src, dst, rail)
        return min(*self._known[src][mine], *self._known[dst][theirs]) > 0

    def _nics_of(self, src: int, dst: int, rail: int) -> tuple[int, int]:
        """The NICs at both ends of a rail."""
        return self._transport.pairs(src, dst)[rail]

    def _known_of(self, way: Way) -> list[float | None]:
        """What is known of the NICs of a rank, one way."""
        rank, is_out = way
        return [float(pair[not is_out]) for pair in self._known[rank]]

    def _lowered(self, found: Mapping[NicWay, Sequence[PairFlow]]) -> Rates:
        """What is known, but of NICs over which less went, that."""
        return tuple(
            tuple(
                (round(max(LEAST_LOAD * out, min(out, said[-1].rate or out))) if said else out, in_)
                for nic, (out, in_) in enumerate(nics)
                for said in [found.get((rank, nic, True))]
            )
            for rank, nics in enumerate(self._known)
        )

    def _pair_off(
        self,
        rounds_of: Sequence[Sequence[Pairs]],
        up: Collection[tuple[int, int, int]],
        loads: Rates,
        found: dict[NicWay, list[PairFlow]],
        ways: Collection[Way],
    ) -> dict[Way, list[float | None]]:
        """Runs the rounds of pairs of each group, and adds to `found` what went over the NICs of these ways; for each
        of these, what its NICs carry, None if that is not certain."""
        made = [
            ProbeRound(
                tuple(src for src, _ in pairs),
                True,
                tuple(
                    ProbeFlow(src, dst, rail, *nics)
                    for src, dst in pairs
                    for rail, nics in enumerate(self._transport.pairs(src, dst))
                    if (src, dst, rail) in up
                ),
            )
            for pairs in _side_by_side(rounds_of)
        ]
        rates = self._exchange([self._run_round(each, loads) for each in made])
        for number, round_ in enumerate(made):
            flows_of: dict[tuple[int, int], list[ProbeFlow]] = {}
            for flow in round_.flows:
                flows_of.setdefault((flow.src, flow.mine), []).append(flow)
            for (src, mine), flows in flows_of.items():
                takes = sum(self._known[flow.dst][flow.theirs][1] for flow in flows)
                went = PairFlow(float(rates[src][number, mine]), min(self._known[src][mine][0], takes))
                ends = [(src, mine, True), *((flow.dst, flow.theirs, False) for flow in flows[: len(flows) == 1])]
                for rank, nic, is_out in ends:
                    if (rank, is_out) in ways:
                        found.setdefault((rank, nic, is_out), []).append(went)
        return {
            (rank, is_out): [
                settled_rate(found.get((rank, nic, is_out), []), float(pair[not is_out])) if min(pair) > 0 else 0.0
                for nic, pair in enumerate(self._known[rank])
            ]
            for rank, is_out in ways
        }

    def _loads(self, round_: ProbeRound, known: Rates) -> dict[tuple[int, int, int], FlowLoad]:
        """By flow; into a hub's NIC for what it was measured to receive, or else for what a good NIC sends; out of one
        for what is `known`, or for anything."""
        nics = {flow[:3]: (flow.src, flow.mine) if round_.is_out else (flow.dst, flow.theirs) for flow in round_.flows}
        n_flows = Counter(nics.values())
        typical = _typical(self._best.values()) or None
        rates: dict[tuple[int, int], float | None] = {}
        for rank, nic in n_flows:
            found = self._found.get((rank, nic, round_.is_out))
            if known:
                rates[rank, nic] = known[rank][nic][0]
            elif self._known and found:
                # As it went while all sent at once: more would take one that has collapsed long.
                rates[rank, nic] = found[-1]
            elif round_.is_out:
                rates[rank, nic] = self._guessed.get((rank, nic, True))
            else:
                rates[rank, nic] = self._best.get((rank, nic, False)) or typical
        return {flow: FlowLoad.of(rates[nic], n_flows[nic]) for flow, nic in nics.items()}

    def _rounds(
        self, up: Collection[tuple[int, int, int]], wanted: Sequence[tuple[int, bool]] = ()
    ) -> list[ProbeRound]:
        """The rounds, without the flows over rails that are not up: their messages would go over other rails."""
        rounds = make_rounds(self._groups, self._transport.pairs, wanted)
        return [each._replace(flows=tuple(flow for flow in each.flows if flow[:3] in up)) for each in rounds]

    def _find_rails(self) -> set[tuple[int, int, int]]:
        """Waits for connections; the rails (src, dst, number) that have some, as their sources see it."""
        transport, now = self._transport, self._clock.now_s
        transport.barrier(max(0.1, self._due_s - now()))
        until_s = now() + _CONNECT_S
        while now() < until_s and not all(all(transport.joined(src, dst)) for src, dst, _ in self._handles):
            self._beside(transport.poll(_LOOK_S))
        pairs = sorted({(src, dst) for src, dst, _ in self._handles})
        words = [_bits(transport.joined(*pair)) if pair[0] == self._rank else 0 for pair in pairs]
        everyone = [np.frombuffer(row, "<u8") for row in transport.allgather(np.array(words, "<u8").tobytes())]
        return {
            (src, dst, rail)
            for number, (src, dst) in enumerate(pairs)
            for rail in range(len(transport.pairs(src, dst)))
            if int(everyone[src][number]) >> rail & 1
        }

    def _open(self) -> None:
        """Opens a channel for every flow that a round may have."""
        flows = [flow for each in make_rounds(self._groups, self._transport.pairs) for flow in each.flows]
        flows = list(dict.fromkeys(flows))
        channels = [Channel(flow.src, flow.dst, _WINDOW_MAX) for flow in flows]
        handles = self._transport.open_over(channels, [flow.rail for flow in flows], _GROUP)
        self._handles = {flow[:3]: handle for flow, handle in zip(flows, handles, strict=True)}

    # --- one round

    def _run_round(self, round_: ProbeRound, known: Rates = ()) -> list[float]:
        """Sends and receives what the round asks of this rank; if it is a hub, the rate of each of its NICs."""
        transport, now = self._transport, self._clock.now_s
        transport.barrier(max(0.1, self._due_s - now()))
        before, busy_s = transport.rails, time.process_time()
        part = _RoundPart(transport, self._clock, round_, self._handles, self._loads(round_, known), self._beside)
        part.start()
        while part.n_open:
            if now() >= self._due_s:
                raise DeadlineExceeded(f"rank {self._rank}: the NICs were not measured within {self._deadline_s:g} s")
            part.step()
        counter = part.counter
        if counter is None:
            return [0.0] * len(before)
        self._busy_s += time.process_time() - busy_s
        self._n_messages += part.n_messages
        rates = [slope(samples) for samples in counter.samples]
        if round_.is_out:
            # What went out over other NICs, since this one is down, is not this one's.
            for nic, (old, new) in enumerate(zip(before, transport.rails, strict=True)):
                if new.sent_bytes - old.sent_bytes < counter.counts[nic] / 2:
                    rates[nic] = 0.0
        return rates

    # --- what all ranks found

    def _exchange(self, own: Sequence[Sequence[float]]) -> list[Any]:
        """By rank, an array of what it has found: by round and NIC."""
        n_nics = max(map(len, self._nics))
        rows = np.zeros((len(own), n_nics), "<f8")
        for row, rates in zip(rows, own, strict=True):
            row[: len(rates)] = rates
        everyone = self._transport.allgather(rows.tobytes(), max(0.1, self._due_s - self._clock.now_s()))
        return [np.frombuffer(each, "<f8").reshape(rows.shape) for each in everyone]

    def _note(self, rounds: Sequence[ProbeRound], own: Sequence[Sequence[float]]) -> None:
        """Exchanges what the hubs have measured in these rounds, and settles what that says."""
        everyone = self._exchange(own)
        for number, round_ in enumerate(rounds):
            ends = [(flow.src, flow.mine) if round_.is_out else (flow.dst, flow.theirs) for flow in round_.flows]
            for hub, nic in dict.fromkeys(ends):
                key = hub, nic, round_.is_out
                self._found.setdefault(key, []).append(float(everyone[hub][number, nic]))
        known = [rate for key, rate in self._best.items() if key not in self._found]
        typical = _typical([found[0] for found in self._found.values()] + known)
        self._unsettled.clear()
        for key, found in self._found.items():
            self._best[key], is_settled = settle(found, typical) if len(found) > 1 else (found[0], False)
            if not is_settled and (len(found) > 1 or not AGAIN_BELOW * typical <= found[0] <= AGAIN_ABOVE * typical):
                self._unsettled.add(key)

    def _agree_overhead(self) -> float:
        """The median over the ranks of what a message costs, times the ranks that share a processor."""
        own = _COST.pack(self._busy_s / max(1, self._n_messages), _machine(), os.cpu_count() or 1)
        everyone = [_COST.unpack(each) for each in self._transport.allgather(own)]
        machines = [machine for _, machine, _ in everyone]
        crowded = max(1.0, max(machines.count(machine) / cores for _, machine, cores in everyone))
        costs = [cost for cost, *_ in everyone if cost]
        return crowded * statistics.median(costs) if costs else 0.0

    def _result(self) -> MeasuredNics:
        for host, nic in {key[:2] for key in self._best}:
            ways = [(host, nic, is_out) for is_out in (True, False)]
            out, in_ = (self._best.get(way, 0.0) for way in ways)
            # Plans for equal rates are shorter.
            if are_alike(out, in_):
                self._best.update(dict.fromkeys(ways, (out + in_) / 2))
        keys = sorted(self._best)
        best = max(self._best.values(), default=0.0)
        levels = dict(zip(keys, level([self._best[key] for key in keys]), strict=True))
        for key in keys:
            if self._best[key] < _USELESS * best:
                levels[key] = 0
        rates = tuple(
            tuple((levels.get((host, nic, True), 0), levels.get((host, nic, False), 0)) for nic in range(len(nics)))
            for host, nics in zip(self._hosts, self._nics, strict=True)
        )
        names = tuple(tuple(nic[0] for nic in nics) for nics in self._nics)
        return MeasuredNics(names, rates, self._hosts, self._agree_overhead())


def _machine() -> bytes:
    """What tells this machine from others, whatever the name of the host: ranks in containers may share it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        boot = socket.gethostname().encode()
    return hashlib.sha256(boot).digest()[:16]


def _bits(flags: Sequence[bool]) -> int:
    return sum(1 << number for number, flag in enumerate(flags) if flag)
