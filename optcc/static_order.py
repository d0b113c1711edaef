"""Times a schedule while its program runs, in one pass and without storing its transfers.

Every port serves in the order in which the schedule is written: a transfer starts when its data has arrived and its
ports have finished the transfers written before it. There are no scheduling decisions and no second look at a transfer,
so the state is a few numbers for each rank and chunk: 2 * 10^9 transfers over 16,384 ranks need memory for the ranks.

The times are those of `optcc.verify.plan.timing` for a plan with a slot for every message:

    exclusive  a transfer starts when both ports are free and holds both for the time of the slower one
    fifo       it occupies its two ports as `optcc.fifo_port` says

Between pods it also passes their uplinks, each of which serves one transfer at a time, as long as its bytes take there:

    exclusive  when it has started and all its uplinks are free; from then on its bytes flow at the slowest of all rates
    fifo       the first uplink at its start or later, the next one when it passes that or later; its in port receives
               the last byte when each uplink is through with it or later

It is done `latency` after it has left its in port, in the order of its receiver's lane, after the chunk that it adds to
was written and the chunk that it overwrites was sent. The simulator (`optcc.simulate.fifo`) cannot replace this loop:
it needs all transfers in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column
from optcc.compiled import compiled_at_once
from optcc.dsl import Definition, Moves
from optcc.errors import InputError, TopologyError
from optcc.fifo_port import delay_at_in_port, occupy
from optcc.schedule import Layout, SegmentShape
from optcc.show import Card, Shown
from optcc.simulate.ports import PortMap
from optcc.topology import Topology
from optcc.units import show_time

SerialModel = Literal["fifo", "exclusive"]
Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StaticOrderTiming(Shown):
    """When the last transfer of a schedule is done, and how long each port was busy."""

    model: str
    seconds: float
    transfers: int
    port_busy_s: dict[str, float]

    def utilisation(self) -> dict[str, float]:
        """For each port, the share of the makespan in which it carried bytes."""
        return {name: busy / self.seconds if self.seconds else 0.0 for name, busy in self.port_busy_s.items()}

    def card(self) -> Card:
        rows = tuple((name, f"{100 * share:.1f} %") for name, share in self.utilisation().items())
        title = f"{show_time(self.seconds)} ({self.model} ports, {self.transfers} transfers in the order written)"
        return Card(title, ("port", "busy"), rows)


def time_static_order(
    definition: Definition,
    topology: Topology,
    *,
    size_bytes: int,
    segments: int = 1,
    dtype: str = "float32",
    model: SerialModel = "fifo",
) -> StaticOrderTiming:
    """The time of `definition` on `topology`, its ports in the order in which it is written.

    >>> from optcc.schedules.ring import ring
    >>> time_static_order(ring, Topology.parse("4@1GB/s,2=500MB/s"), size_bytes=4_000_000).seconds
    0.012

    Raises InputError for another model, TopologyError for rails that must be told apart, and what building a schedule
    raises.
    """
    if model not in get_args(SerialModel):
        raise InputError(f"model {model!r}: must be one of {', '.join(get_args(SerialModel))}")
    if topology.wired is not None:
        raise TopologyError(f"{topology!r}: NICs of GPUs, or links: not modelled in the order as written")
    if topology.rail_only and len(topology.rails_kept) > 1:
        raise TopologyError("rail-only topology whose servers keep different rails: not modelled, NICs are pooled")
    if topology.rail_only and topology.pods:
        raise TopologyError(f"{topology!r}: an uplink for each rail of a pod: not modelled, NICs are pooled")
    clock = StaticOrderClock(topology, size_bytes, dtype, model)
    definition.stream(topology, segments, clock.take)
    return clock.result()


BYTE_S, THROUGH = range(2)
"""Of a port: seconds per byte, and when it has finished the last transfer."""
WRITTEN, FREE = range(2)
"""Of a place: when its content was written, and when the last transfer sent from it had left."""
BEGUN, TURN = range(2)
"""Of a rank: when its last transfer started, and when the last that it received was done."""


class _Places(NamedTuple):
    """For each segment its number of sections and its first chunk; the bytes of each chunk.

    A segment has a place for each section of each rank, in rows of sections: section c of rank r is in row r - c modulo
    the ranks. So a step around a ring accesses memory in order, and so does one along ranks if there is one section.
    """

    sections: Column
    first_chunk: Column
    chunk_bytes: Column


class _Ranks(NamedTuple):
    """For each rank its server, its out port to other servers, the one inside and the uplink of its pod (-1: none), and
    its `moments`."""

    server: Column
    nic: Column
    gpu_port: Column
    uplink: Column
    moments: Times


class StaticOrderClock:
    """The moments that later transfers may have to wait for; `take` is the callback of `Definition.stream`."""

    def __init__(self, topology: Topology, size_bytes: int, dtype: str, model: SerialModel) -> None:
        self.size_bytes, self.dtype, self.model = size_bytes, dtype, model
        self.latency_s = float(topology.latency_s)
        ports = PortMap.of(topology)
        self.names = ports.names
        server = ports.server_of
        ways = ports.server_port[server], ports.gpu_port, ports.pod_port[server]
        self.ranks = _Ranks(server, *ways, np.zeros((len(server), 2)))
        byte_s = {rate: float(1 / rate) for rate in set(ports.rates)}
        self.lines = np.zeros((len(ports.names), 2))
        self.lines[:, BYTE_S] = [byte_s[rate] for rate in ports.rates]
        self.carried = np.zeros(len(ports.names), dtype=np.int64)
        self.places = _Places(*(np.zeros(0, dtype=np.int64) for _ in range(3)))
        self.moments = np.zeros((0, 0, 2))
        self.transfers, self.end_s = 0, 0.0

    def take(self, moves: Moves, shapes: Sequence[SegmentShape], scratch_slots: int) -> None:
        """Times the transfers of `moves`, one after the other."""
        if len(shapes) > len(self.places.sections):
            self._lay_out(shapes)
        room = scratch_slots + 1, len(self.places.chunk_bytes) * len(self.ranks.server), 2
        if room != self.moments.shape:
            self._make_room(room)
        src, dst, _, segment, section, src_slot, dst_slot, *_ = moves
        columns = src, dst, segment, section, src_slot, dst_slot
        transfers, end_s = _kernels().let_happen(
            # The inner loop is compiled for arrays that may be written to.
            *(each if each.flags.writeable and each.flags.c_contiguous else each.copy() for each in columns),
            self.places,
            self.ranks,
            self.lines,
            self.carried,
            self.moments,
            self.latency_s,
            self.model == "exclusive",
        )
        self.transfers += transfers
        self.end_s = max(self.end_s, end_s)

    def _lay_out(self, shapes: Sequence[SegmentShape]) -> None:
        """Numbers the chunks of the segments known so far; chunks known before keep their numbers."""
        layout = Layout.of(shapes, self.size_bytes, self.dtype)
        lengths = [
            stop - first
            for firsts, stops in zip(layout.first, layout.stop, strict=True)
            for first, stop in zip(firsts, stops, strict=True)
        ]
        sections = np.array([shape.sections for shape in shapes], dtype=np.int64)
        first = np.concatenate(([0], np.cumsum(sections)))
        self.places = _Places(sections, first[:-1], np.array(lengths, dtype=np.int64) * layout.itemsize)

    def _make_room(self, room: tuple[int, int, int]) -> None:
        """Allocates moments for every known chunk, in the message and in scratch slots."""
        grown = np.zeros(room)
        grown[: self.moments.shape[0], : self.moments.shape[1]] = self.moments
        self.moments = grown

    def result(self) -> StaticOrderTiming:
        """The timing of the transfers taken so far."""
        busy = (self.carried * self.lines[:, BYTE_S]).tolist()
        return StaticOrderTiming(self.model, self.end_s, self.transfers, dict(zip(self.names, busy, strict=True)))


@cache
def _kernels() -> Any:
    return compiled_at_once((delay_at_in_port, occupy, _flow, _forward, _move, _let_happen), globals())


def _move(
    a: int,
    b: int,
    size: int,
    there: Times,
    here: Times,
    ranks: _Ranks,
    lines: Times,
    carried: Column,
    latency_s: float,
    exclusive: bool,
) -> float:
    """Times a transfer of `size` bytes from rank `a` to `b` and returns when it is done.

    `there` are the moments of the place that it reads, `here` those of the place that it writes.
    """
    start = there[WRITTEN]
    if a == b:
        left = done = max(start, here[FREE])
    else:
        start = max(start, ranks.moments[a, BEGUN])
        outside = ranks.server[a] != ranks.server[b]
        out = ranks.nic[a] if outside else ranks.gpu_port[a]
        left = landed = start
        if out >= 0:
            in_ = (ranks.nic[b] if outside else ranks.gpu_port[b]) + 1
            out_s, in_s = size * lines[out, BYTE_S], size * lines[in_, BYTE_S]
            carried[out] += size
            carried[in_] += size
            start = max(start, lines[out, THROUGH])
            up, down = -1, -1
            if outside and ranks.uplink[a] != ranks.uplink[b]:
                up, down = ranks.uplink[a], ranks.uplink[b]
                down += down >= 0
            if exclusive:
                start = max(start, lines[in_, THROUGH])
                left = landed = _flow(start, max(out_s, in_s), size, up, down, lines, carried)
            else:
                left = start + out_s
                first, still_s = _forward(start, out_s, size, up, down, lines, carried)
                landed = occupy(lines[in_, THROUGH], first + delay_at_in_port(still_s, in_s), in_s)
            lines[out, THROUGH] = left
            lines[in_, THROUGH] = landed
        ranks.moments[a, BEGUN] = start
        done = max(max(landed + latency_s, ranks.moments[b, TURN]), here[FREE])
        ranks.moments[b, TURN] = done
    there[FREE] = max(there[FREE], left)
    here[WRITTEN] = done
    here[FREE] = done
    return float(done)


def _flow(start: float, ports_s: float, size: int, up: int, down: int, lines: Times, carried: Column) -> float:
    """When a transfer that may start at `start`, and that its ports carry in `ports_s`, has left, if it passes the
    uplinks `up` and `down` (-1: none) all at once."""
    for uplink in (up, down):
        if uplink >= 0:
            start = max(start, lines[uplink, THROUGH])
            ports_s = max(ports_s, size * lines[uplink, BYTE_S])
    for uplink in (up, down):
        if uplink >= 0:
            lines[uplink, THROUGH] = start + size * lines[uplink, BYTE_S]
            carried[uplink] += size
    return start + ports_s


def _forward(
    start: float, out_s: float, size: int, up: int, down: int, lines: Times, carried: Column
) -> tuple[float, float]:
    """When the first byte is past the uplinks `up` and `down` (-1: none), and how much later the last one is, of a
    transfer that leaves its out port from `start` on, for `out_s`."""
    first, still_s = start, out_s
    for uplink in (up, down):
        if uplink >= 0:
            lasts = size * lines[uplink, BYTE_S]
            passes = max(first, lines[uplink, THROUGH])
            lines[uplink, THROUGH] = passes + lasts
            carried[uplink] += size
            still_s = max(still_s - (passes - first), lasts)
            first = passes
    return first, still_s


def _let_happen(
    src: Column,
    dst: Column,
    segment: Column,
    section: Column,
    src_slot: Column,
    dst_slot: Column,
    places: _Places,
    ranks: _Ranks,
    lines: Times,
    carried: Column,
    moments: Times,
    latency_s: float,
    exclusive: bool,
) -> tuple[int, float]:
    """Times these transfers and returns how many of them carry bytes, and when the last is done.

    `carried` are the bytes of each port. The moments of a place in a slot are in `moments[slot + 1, place]`.
    """
    p = len(ranks.server)
    last, count = 0.0, 0
    varies = len(segment) > 1 or len(src_slot) > 1 or len(dst_slot) > 1
    part, from_, to = segment[0], src_slot[0] + 1, dst_slot[0] + 1
    chunks, sections = places.first_chunk[part], places.sections[part]
    for t in range(len(src)):
        if varies:
            part = segment[t if len(segment) > 1 else 0]
            chunks, sections = places.first_chunk[part], places.sections[part]
            from_ = src_slot[t if len(src_slot) > 1 else 0] + 1
            to = dst_slot[t if len(dst_slot) > 1 else 0] + 1
        a, b = src[t], dst[t]
        mine = section[t if len(section) > 1 else 0]
        size = places.chunk_bytes[chunks + mine]
        if size == 0:
            continue
        count += 1
        first = p * chunks + mine
        turned = mine if mine < p else mine % p
        there = first + sections * (a - turned if a >= turned else a - turned + p)
        here = first + sections * (b - turned if b >= turned else b - turned + p)
        done = _move(a, b, size, moments[from_, there], moments[to, here], ranks, lines, carried, latency_s, exclusive)
        last = max(last, done)
    return count, last
