"""Sim: the protocol of the TCP transport in simulated time, for programs; its ranks are threads that take turns.

Every rank is a `SimulatedHost` (`optcc.runtime.sim`) around the `Endpoint` that TCP runs, joined by NICs of the rates
of a topology, which a `FaultPlan` may slow down or cut. Bytes are real, time is not: it goes on only while every rank
waits, computing takes none of it, and each run of a seed is the same as the last.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import TypeVar

from optcc.errors import InputError, RankLost, TopologyError
from optcc.faults import FaultPlan
from optcc.runtime.protocol.agreement import NICS_MAX
from optcc.runtime.protocol.endpoint import Endpoint
from optcc.runtime.protocol.frames import crc32
from optcc.runtime.protocol.liveness import Connection, KernelReport
from optcc.runtime.protocol.local import Established
from optcc.runtime.protocol.settings import NicEntry, Settings
from optcc.runtime.sim.host import SimulatedHost
from optcc.runtime.sim.network import SimulatedNetwork
from optcc.runtime.sim.nic import SimulatedNic
from optcc.runtime.transports.endpoint_transport import EndpointTransport
from optcc.runtime.transports.rank_threads import RUN_DEADLINE_S, run_threads
from optcc.topology import INSIDE, Topology

N_RAILS = 2
_RATE = 125_000_000
_SEGMENT_BYTES = 8948
_BUFFER_BYTES = 1 << 18
_LATENCY_S = 50e-6
T = TypeVar("T")


class SimNetwork:
    """The network between the ranks of a topology, a GPU each, and their simulated clock; used by `run_sim`. Ranks of
    one server share its NICs, and are joined inside it.

    Instead of a topology, a number of ranks with `N_RAILS` NICs of 1 Gbit/s each. `chunk_bytes`, `window`, `crc`,
    `authenticate`, `replan`, `learn_rates`, `silent_s`, `stall_s`, `partition_s` and `regroups` are those of
    `TcpTransport`; each socket has buffers of `buffer_bytes`; `nic_faults` happen at their simulated times, and NICs
    lose segments with probability `loss`, or damage them with `corrupt` (which wants `crc` or `authenticate`).

    Raises InputError for numbers that cannot be, TopologyError for a fault of a NIC that is not there.
    """

    def __init__(
        self,
        topology: int | Topology,
        *,
        chunk_bytes: int = 1 << 20,
        window: int = 32,
        crc: bool = False,
        authenticate: bool = False,
        replan: bool = False,
        learn_rates: bool = True,
        silent_s: float = 0.1,
        stall_s: float = 5.0,
        partition_s: float = 0.0,
        regroups: bool = False,
        buffer_bytes: int = _BUFFER_BYTES,
        nic_faults: FaultPlan | None = None,
        loss: float = 0.0,
        corrupt: float = 0.0,
        seed: int = 0,
    ) -> None:
        for label, value in (("loss", loss), ("corrupt", corrupt)):
            if not 0 <= value < 1:
                raise InputError(f"{label} {value}: must be from 0 to below 1")
        if buffer_bytes < _SEGMENT_BYTES:
            raise InputError(f"buffers of {buffer_bytes} B: must hold a segment of {_SEGMENT_BYTES} B")
        if corrupt and not (crc or authenticate):
            raise InputError("corrupt: must come with crc or authenticate, or damaged bytes are not noticed")
        rates = _rates_of(topology)
        self.n_ranks = len(rates)
        rng = random.Random(seed)
        latency_s = float(topology.latency_s) if isinstance(topology, Topology) and topology.latency_s else _LATENCY_S
        self.network = SimulatedNetwork(
            rng,
            latency_s=latency_s,
            segment_bytes=_SEGMENT_BYTES,
            buffer_bytes=(buffer_bytes, buffer_bytes),
            in_turn=True,
        )
        self.network.corrupt = corrupt
        firsts = _firsts_of(topology, self.n_ranks)
        book: list[tuple[NicEntry, ...]] = []
        for rank, (first, nics) in enumerate(zip(firsts, rates, strict=True)):
            ports: list[int] = []
            for number, (out, in_) in enumerate(nics):
                if rank == first:
                    nic = self.network.nics[rank, number] = SimulatedNic(rank, number, float(out), float(in_))
                    nic.loss = loss
                    self.network.sharers[nic] = [each for each, its in enumerate(firsts) if its == rank]
                ports.append(number + NICS_MAX * (rank - first))
                nic = self.network.nics[first, number]
                self.network.nics[rank, number] = self.network.nics[first, ports[-1]] = nic
                self.network.listeners[str(first), ports[-1]] = rank
            book.append(
                tuple(
                    (f"eth{number}", str(first), port, *nic)
                    for number, (port, nic) in enumerate(zip(ports, nics, strict=True))
                )
            )
        insides = self._join_insides(topology, firsts, rates) if isinstance(topology, Topology) else []
        waits = silent_s, stall_s, 5.0
        settings = Settings(chunk_bytes, window, crc, replan, learn_rates, *waits, authenticate, partition_s)
        self.regroups = regroups
        secret, job = rng.randbytes(32), rng.randbytes(16)
        self.hosts = [
            SimulatedHost(
                *(self.network, settings, rank, book),
                secret=secret,
                job=job,
                rng=random.Random(seed * 1009 + rank),
                checksum=crc32 if crc else None,
                insides=insides,
            )
            for rank in range(self.n_ranks)
        ]
        for rank, host in enumerate(self.hosts):
            host.wakes = partial(self._look, rank)
        self._plan_faults(nic_faults, rates, firsts)
        # A rank that waits: what for, and until when. One rank at a time runs: from when its gate opens until it waits.
        self._waits: dict[int, tuple[Callable[[], bool], float]] = {}
        self._gates = [threading.Event() for _ in range(self.n_ranks)]
        self._n_left = self.n_ranks
        self._lost: str | None = None

    def _join_insides(
        self, topology: Topology, firsts: Sequence[int], rates: Sequence[Sequence[tuple[int, int]]]
    ) -> list[NicEntry]:
        """What each rank listens at for those of its server; nothing if no server has several."""
        if len(set(firsts)) == len(firsts):
            return []
        insides: list[NicEntry] = []
        for rank, (first, nics) in enumerate(zip(firsts, rates, strict=True)):
            fabric = topology.servers[topology.rank_server[rank]].fabric
            rate = int(INSIDE * max(map(max, nics)) if fabric is None else fabric)
            self.network.nics[rank, len(nics)] = SimulatedNic(rank, len(nics), float(rate), float(rate))
            insides.append((f"inside {first}", str(rank), len(nics), rate, rate))
        return insides

    @property
    def now_s(self) -> float:
        """Simulated seconds since the start."""
        return self.network.clock.now_s

    def _plan_faults(
        self, faults: FaultPlan | None, rates: Sequence[Sequence[tuple[int, int]]], firsts: Sequence[int]
    ) -> None:
        ranks = sorted(set(firsts))
        for fault in faults.faults if faults is not None else ():
            if fault.server >= len(ranks) or fault.nic >= len(rates[ranks[fault.server]]):
                raise TopologyError(f"fault {fault}: NIC {fault.server}/{fault.nic}: must be one that a rank has")
            rank = ranks[fault.server]
            nic, declared = self.network.nics[rank, fault.nic], rates[rank][fault.nic]
            ways = fault.goes("out"), fault.goes("in")
            self.network.clock.after(float(fault.at_s), partial(self._change, nic, fault.share, ways, declared))
            if fault.until_s is not None:
                self.network.clock.after(float(fault.until_s), partial(self._change, nic, Fraction(1), ways, declared))

    def _change(self, nic: SimulatedNic, share: Fraction, ways: tuple[bool, bool], declared: tuple[int, int]) -> None:
        """A NIC has this share of its declared rates; none: its link is down, or one way of it is a blackhole."""
        if share in (0, 1) and all(ways):
            self.network.set_link(nic, share == 1)
        elif share in (0, 1):
            out, in_ = (
                bool(share) if way else is_open for way, is_open in zip(ways, (nic.out_open, nic.in_open), strict=True)
            )
            self.network.set_open(nic, out=out, in_=in_)
        if share:
            nic.out_rate = float(declared[0] * share) if ways[0] else nic.out_rate
            nic.in_rate = float(declared[1] * share) if ways[1] else nic.in_rate

    # --- the turn

    def start(self) -> None:
        """All ranks have begun to wait: one of them goes on."""
        self._pass_on()

    def wait(self, rank: int, holds: Callable[[], bool], seconds: float) -> None:
        """Gives the turn away until `holds()`, or for this long. Raises RankLost if another rank has failed."""
        self._waits[rank] = holds, self.now_s + seconds
        self._pass_on()
        self._gates[rank].wait(RUN_DEADLINE_S)
        self._gates[rank].clear()
        if self._lost is not None:
            raise RankLost(f"rank {rank}: {self._lost}")

    def begin(self, rank: int) -> None:
        """The rank's program may begin once it has the turn."""
        self._gates[rank].wait(RUN_DEADLINE_S)
        self._gates[rank].clear()

    def finish(self, rank: int, failure: str | None) -> None:
        """The rank's program has ended; a failure ends the waits of all others."""
        self._n_left -= 1
        self._waits.pop(rank, None)
        if not self.hosts[rank].is_stopped:
            self.hosts[rank].crash()
        if failure is not None and self._lost is None:
            self._lost = failure
        self._pass_on()

    def _pass_on(self) -> None:
        """Opens the gate of the next rank that need not wait; time goes on until there is one."""
        clock = self.network.clock
        while self._waits:
            for rank, (holds, until_s) in self._waits.items():
                if self._lost is not None or holds() or clock.now_s >= until_s:
                    del self._waits[rank]
                    self._gates[rank].set()
                    return
            clock.run(min(until_s for _, until_s in self._waits.values()))

    def _look(self, rank: int) -> None:
        """A rank's host has looked at its connections: only then may what the rank waits for have come."""
        if rank in self._waits and self._waits[rank][0]():
            self.network.clock.end()


class SimClock:
    """The simulated clock, for one rank: a rank that sleeps does not look at its connections."""

    __slots__ = ("_network", "_rank")

    def __init__(self, network: SimNetwork, rank: int) -> None:
        self._network, self._rank = network, rank

    def now_s(self) -> float:
        """See `Clock`."""
        return self._network.now_s

    def sleep_s(self, seconds: float) -> None:
        """See `Clock`."""
        self._network.hosts[self._rank].compute(seconds)
        self._network.wait(self._rank, lambda: False, seconds)


class SimTransport(EndpointTransport):
    """One rank's end of a `SimNetwork`; its `clock` is the simulated one, which an executor must be given."""

    def __init__(self, network: SimNetwork, rank: int) -> None:
        self._network, self._host = network, network.hosts[rank]
        self._endpoint = self._host.endpoint
        self.clock = self._clock = SimClock(network, rank)
        self._regroups = network.regroups

    def _write(self, connection: Established) -> None:
        self._host.write(connection)

    def _flush(self) -> None:
        self._host.flush()

    def _report(self, connection: Connection) -> KernelReport | None:
        return connection.wire.outgoing.report() if connection.wire is not None else None

    def _progress(self, holds: Callable[[], bool] | None, timeout_s: float) -> None:
        endpoint = self._endpoint

        def is_over() -> bool:
            return bool(endpoint.events if holds is None else holds())

        if not is_over():
            self._host.look_at(self._network.now_s)
            self._network.wait(self.rank, lambda: is_over() or endpoint.failure is not None, timeout_s)

    def _hang_up(self) -> None:
        self._host.leave()

    def _renew(self, endpoint: Endpoint) -> None:
        self._host.renew(endpoint)

    def _give_back(self) -> None:
        """Nothing is kept."""


def _rates_of(topology: int | Topology) -> list[list[tuple[int, int]]]:
    """The rates of each rank's NICs, out and in, bytes/s."""
    if isinstance(topology, int):
        if topology < 1:
            raise InputError(f"{topology} ranks: must be at least one")
        return [[(_RATE, _RATE)] * N_RAILS for _ in range(topology)]
    return [
        [(max(1, int(nic.out)), max(1, int(nic.in_))) for nic in topology.servers[server].nics if not nic.failed]
        for server in topology.rank_server
    ]


def _firsts_of(topology: int | Topology, n_ranks: int) -> list[int]:
    """For each rank the first one of its server."""
    servers = list(range(n_ranks)) if isinstance(topology, int) else topology.rank_server
    return [servers.index(server) for server in servers]


def run_sim(network: SimNetwork, function: Callable[[int, SimTransport], T]) -> list[T]:
    """Calls `function(rank, transport)` once per rank of a network that nobody has used yet; the results by rank.

    The first exception of a rank ends the waits of all others and is raised here. Raises DeadlineExceeded if the ranks
    are not done after `RUN_DEADLINE_S` seconds of real time.

    >>> run_sim(SimNetwork(2), lambda rank, transport: transport.allgather(bytes([rank])))[1]
    [b'\\x00', b'\\x01']
    """

    def body(rank: int) -> T:
        network.begin(rank)
        transport = SimTransport(network, rank)
        try:
            result = function(rank, transport)
        finally:
            if network._lost is None:
                transport.close()
        network.finish(rank, None)
        return result

    for rank in range(network.n_ranks):
        network._waits[rank] = lambda: True, 0.0
    return run_threads(network.n_ranks, body, network.finish, start=network.start)
