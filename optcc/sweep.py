"""Times a schedule while it is being written, in one pass and without keeping its transfers.

The order in which a schedule is written is the order of every port: a transfer starts once its data is there and the
ports are through with those written before it. So nothing has to be decided and nothing looked up again, and what is
kept is a few numbers for each rank and chunk: 2 * 10^9 transfers take memory for 16,384 ranks, not for themselves.

The moments of a transfer are those of `optcc.verify.timing`, of which this is the case of as many slots as there are
messages: with `o` and `i` the seconds of its bytes at its out and its in port,

    exclusive  starts when both ports are free, leaves them max(o, i) later, and is done `latency` after that
    fifo       leaves the out port o later; the in port takes it when it is free, not before max(0, o - i) later, and is
               done with it i later; `latency` later it is done

and it is done in its receiver's turn, after what it adds to was written there and what it overwrites was sent on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from optcc.arrays import Column
from optcc.compiled import compiled
from optcc.dsl import Definition
from optcc.errors import InputError, TopologyError
from optcc.schedule import DATA, Layout, SegmentShape
from optcc.show import Card, Shown
from optcc.topology import Topology
from optcc.units import show_time

Model = Literal["fifo", "exclusive"]
Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sweep(Shown):
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


def sweep(
    definition: Definition,
    topology: Topology,
    *,
    size_bytes: int,
    segments: int = 1,
    dtype: str = "float32",
    model: Model = "fifo",
) -> Sweep:
    """The time of `definition` on `topology`, its ports in the order in which it is written.

    >>> from optcc.schedules.ring import ring
    >>> sweep(ring, Topology.parse("4@1GB/s,2=500MB/s"), size_bytes=4_000_000).seconds
    0.012

    Raises InputError for another model, TopologyError for rails that must be told apart, and what building a schedule
    raises.
    """
    if model not in get_args(Model):
        raise InputError(f"model {model!r}: must be one of {', '.join(get_args(Model))}")
    rails = {tuple(sorted(nic.rail for nic in server.nics if not nic.failed)) for server in topology.servers}
    if topology.rail_only and len(rails) > 1:
        raise TopologyError("rail-only topology whose servers keep different rails: not modelled, NICs are pooled")
    clock = _Clock(topology, size_bytes, dtype, model)
    definition.stream(topology, segments, clock.take)
    return clock.result()


class _Clock:
    """The moments that later transfers may have to wait for."""

    def __init__(self, topology: Topology, size_bytes: int, dtype: str, model: Model) -> None:
        self.size_bytes, self.dtype, self.model = size_bytes, dtype, model
        self.latency_s = float(topology.latency_s)
        p = topology.n_ranks
        self.names: list[str] = []
        seconds: list[float] = []
        self.server = np.array(topology.rank_server, dtype=np.int64)
        self.nic = np.full(len(topology.servers), -1, dtype=np.int64)
        self.fabric = np.full(p, -1, dtype=np.int64)
        rank = 0
        for index, server in enumerate(topology.servers):
            if len(topology.servers) > 1:
                self.nic[index] = len(self.names)
                self.names += [f"out {server.name}", f"in {server.name}"]
                seconds += [float(1 / server.out), float(1 / server.in_)]
            for gpu in range(server.gpus):
                if server.fabric is not None:
                    self.fabric[rank] = len(self.names)
                    self.names += [f"out {server.name} gpu {gpu}", f"in {server.name} gpu {gpu}"]
                    seconds += [float(1 / server.fabric)] * 2
                rank += 1
        self.byte_s = np.array(seconds)
        self.port_free = np.zeros(len(self.names))
        self.port_bytes = np.zeros(len(self.names), dtype=np.int64)
        self.begun, self.turn = np.zeros(p), np.zeros(p)
        self.written, self.read = np.zeros((0, 0, p)), np.zeros((0, 0, p))
        self.first_chunk = np.zeros(1, dtype=np.int64)
        self.chunk_bytes = np.zeros(0, dtype=np.int64)
        self.n_shapes = 0
        self.transfers = 0

    def take(self, block: Column, shapes: Sequence[SegmentShape]) -> None:
        """Lets the transfers of `block` happen, one after the other."""
        if len(shapes) > self.n_shapes:
            self._lay_out(shapes)
        self._make_room(int(block[5:7].max(initial=DATA)))
        self.transfers += _kernels().let_happen(
            block,
            self.first_chunk,
            self.chunk_bytes,
            self.server,
            self.nic,
            self.fabric,
            self.byte_s,
            self.port_free,
            self.port_bytes,
            self.begun,
            self.turn,
            self.written,
            self.read,
            self.latency_s,
            self.model == "exclusive",
        )

    def _lay_out(self, shapes: Sequence[SegmentShape]) -> None:
        """The chunks of the segments that are known by now; those known before keep their numbers."""
        self.n_shapes = len(shapes)
        layout = Layout.of(shapes, self.size_bytes, self.dtype)
        lengths = [
            stop - first
            for firsts, stops in zip(layout.first, layout.stop, strict=True)
            for first, stop in zip(firsts, stops, strict=True)
        ]
        self.chunk_bytes = np.array(lengths, dtype=np.int64) * layout.itemsize
        self.first_chunk = np.concatenate(([0], np.cumsum([shape.sections for shape in shapes]))).astype(np.int64)

    def _make_room(self, slot: int) -> None:
        """State for every chunk known, in the message and in scratch slots up to `slot`."""
        slots, chunks, p = self.written.shape
        wanted = max(slots, slot - DATA + 1), max(chunks, len(self.chunk_bytes)), p
        if wanted != (slots, chunks, p):
            for name in ("written", "read"):
                grown = np.zeros(wanted)
                grown[:slots, :chunks] = getattr(self, name)
                setattr(self, name, grown)

    def result(self) -> Sweep:
        """What has come out."""
        busy = {
            name: float(size * each)
            for name, size, each in zip(self.names, self.port_bytes.tolist(), self.byte_s.tolist(), strict=True)
        }
        return Sweep(self.model, float(self.written.max(initial=0)), self.transfers, busy)


@cache
def _kernels() -> Any:
    return compiled((_let_happen,), globals())


def _let_happen(
    block: Column,
    first_chunk: Column,
    chunk_bytes: Column,
    server: Column,
    nic: Column,
    fabric: Column,
    byte_s: Times,
    port_free: Times,
    port_bytes: Column,
    begun: Times,
    turn: Times,
    written: Times,
    read: Times,
    latency_s: float,
    exclusive: bool,
) -> int:
    """Runs the transfers of `block` and returns how many of them carry bytes.

    `written[slot + 1, chunk, rank]` is when what stands there was done, `read[...]` when the last that was sent from
    there had left; `begun[rank]` when its last transfer started, `turn[rank]` when the last that it received was done.
    """
    count = 0
    for t in range(block.shape[1]):
        src, dst = block[0, t], block[1, t]
        chunk = first_chunk[block[3, t]] + block[4, t]
        size = chunk_bytes[chunk]
        if size == 0:
            continue
        count += 1
        from_, to = block[5, t] + 1, block[6, t] + 1
        start = written[from_, chunk, src]
        if src == dst:
            left = done = max(start, max(written[to, chunk, dst], read[to, chunk, dst]))
        else:
            start = max(start, begun[src])
            out, in_ = fabric[src], fabric[dst]
            if server[src] != server[dst]:
                out, in_ = nic[server[src]], nic[server[dst]]
            left = landed = start
            if out >= 0:
                in_ += 1
                leaving, landing = size * byte_s[out], size * byte_s[in_]
                port_bytes[out] += size
                port_bytes[in_] += size
                start = max(start, port_free[out])
                if exclusive:
                    start = max(start, port_free[in_])
                    left = landed = start + max(leaving, landing)
                else:
                    left = start + leaving
                    landed = max(start + max(0.0, leaving - landing), port_free[in_]) + landing
                port_free[out] = left
                port_free[in_] = landed
            begun[src] = start
            done = max(max(landed + latency_s, turn[dst]), max(written[to, chunk, dst], read[to, chunk, dst]))
            turn[dst] = done
        read[from_, chunk, src] = max(read[from_, chunk, src], left)
        written[to, chunk, dst] = done
    return count
