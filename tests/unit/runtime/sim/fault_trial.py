"""Collectives in simulated time while faults befall their NICs: what came out, how long it took, over which NICs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from optcc.collective import Collective
from optcc.plan import Plan, PlanRequest
from optcc.planner import AUTO, Planner
from optcc.runtime.communicator import Communicator
from optcc.runtime.protocol.agreement import Shares
from optcc.runtime.protocol.settings import Counts
from optcc.runtime.replanning import PlanFor
from optcc.runtime.sim.faults import FaultInjector
from optcc.runtime.sim.nic import SimulatedNic
from optcc.runtime.sim.scenario import SwarmFault
from optcc.runtime.sim.stream import Flow
from optcc.runtime.transports.sim import SimNetwork, SimTransport, run_sim
from optcc.topology import Nic, Server, Topology
from optcc.verdict import Verdict
from optcc.verify.bounds.certified import least_seconds

RATE = 50_000_000
_LOOK_S, _LOOK_S_MAX = 1e-4, 1.0
COUNT = 1 << 19
"""Elements of 4 B: an AllReduce of 2 MiB takes 31 ms at least between four hosts of two NICs."""


@dataclass(frozen=True)
class Took:
    """One AllReduce as rank 0 saw it, seconds; `sent` has the bytes that each NIC of each rank sent meanwhile."""

    began_s: float
    seconds: float
    epoch: int
    sent: tuple[tuple[int, ...], ...]

    @property
    def ended_s(self) -> float:
        """When it was over."""
        return self.began_s + self.seconds


class Plans:
    """Those of `Planner`, made at once in this process; `delay` says how often it is asked in vain before."""

    def __init__(self, planner: Planner, delay: int = 0) -> None:
        self.planner, self.delay = planner, delay
        self.prepared: list[tuple[Shares, list[PlanRequest]]] = []

    def __call__(self, collective: Collective, size_bytes: int, dtype: str, reduction: str) -> tuple[Plan, Verdict]:
        return self.planner(collective, size_bytes, dtype, reduction)

    def least_s(self, request: PlanRequest, shares: Shares | None = None) -> float:
        return self.planner.least_s(request, shares)

    def under(self, shares: Shares) -> PlanFor:
        return Plans(self.planner.under(shares))

    def prepare(self, shares: Shares, wanted: Sequence[PlanRequest]) -> Callable[[], bool]:
        self.prepared.append((shares, list(wanted)))
        left = iter(range(self.delay))
        return lambda: next(left, None) is None


class FaultTrial:
    """AllReduces one after the other between `n_hosts` hosts of NICs of these rates, bytes/s, while faults come and go.

    The faults of `once_resent` come so long after some rank has sent a chunk again as they say.

    What a NIC sends takes so much longer than the network's latency as `delays_s` says, by its number.

    The schedule is of 8 segments for fair ports, or "auto" as a communicator plans unless told otherwise.

    `damaging`: a NIC, rank and number, that flips a bit of every segment from this time on, seconds.

    The result of each is compared with the sum, to the bit. Raises what the ranks raise.
    """

    def __init__(
        self,
        faults: Sequence[SwarmFault] = (),
        n_runs: int = 4,
        *,
        once_resent: Sequence[SwarmFault] = (),
        n_hosts: int = 4,
        rates: Sequence[int] = (RATE, RATE),
        delays_s: Sequence[float] = (),
        pause_s: float = 0.0,
        corrupt: float = 0.0,
        damaging: tuple[int, int, float] | None = None,
        remeasures: bool = False,
        schedule: str = "shares",
        **settings: object,
    ) -> None:
        self.n_hosts, self.n_runs, self.pause_s, self.remeasures = n_hosts, n_runs, pause_s, remeasures
        nics = tuple(Nic(rail, Fraction(rate), Fraction(rate)) for rail, rate in enumerate(rates))
        servers = tuple(Server(f"h{number}", 1, nics) for number in range(n_hosts))
        self.topology = Topology(servers, latency_s=Fraction(1, 20_000))
        options: dict[str, Any] = {} if schedule == AUTO else {"segments": 8, "ports": "fair"}
        self.planner = Planner(self.topology, schedules={"allreduce": schedule}, **options)
        self.network = SimNetwork(self.topology, **settings)  # type: ignore[arg-type]
        self.network.network.corrupt = corrupt
        for nic in self.network.network.nics.values():
            nic.delay_s = delays_s[nic.number] if delays_s else 0.0
        if damaging is not None:
            self._damage_all_over(self.network.network.nics[damaging[:2]], damaging[2])
        declared = [[(rate, rate) for rate in rates]] * n_hosts
        self.faults = FaultInjector(self.network.network, self.network.hosts, declared, lambda _: None)
        self.faults.plan(faults)
        if once_resent:
            self.network.network.clock.after(_LOOK_S, lambda: self._watch_resent(once_resent))
        self.runs: list[Took] = []
        run_sim(self.network, self._body)

    def _body(self, rank: int, transport: SimTransport) -> None:
        comm = Communicator(
            *(transport, Plans(self.planner)),
            clock=transport.clock,
            deadline_s=60.0,
            remeasures=self.remeasures,
        )
        array, out = np.full(COUNT, rank + 1, np.float32), np.empty(COUNT, np.float32)
        for _ in range(self.n_runs):
            comm.engine.barrier()
            before, began_s = self._sent(), transport.clock.now_s()
            out[:] = -1
            comm.start_all_reduce(array, out=out).wait()
            assert np.all(out == sum(range(1, self.n_hosts + 1)))
            if not rank:
                moved = tuple(
                    tuple(b - a for a, b in zip(*pair, strict=True)) for pair in zip(before, self._sent(), strict=True)
                )
                self.runs.append(Took(began_s, transport.clock.now_s() - began_s, comm.epoch, moved))
            if self.pause_s:
                transport.clock.sleep_s(self.pause_s)
        comm.engine.barrier()

    def _damage_all_over(self, nic: SimulatedNic, from_s: float) -> None:
        network = self.network.network
        carry = network.carry

        def damage(flow: Flow, start: int, data: bytes, *, is_fin: bool = False) -> None:
            if data and nic in (flow.src, flow.dst) and network.clock.now_s >= from_s:
                data = data[:-1] + bytes((data[-1] ^ 1,))
                network.n_corrupted += 1
            carry(flow, start, data, is_fin=is_fin)

        network.carry = damage  # type: ignore[method-assign]

    def _watch_resent(self, faults: Sequence[SwarmFault]) -> None:
        if any(counts.resent for counts in self.counts):
            self.faults.plan(faults)
        elif self.network.now_s < _LOOK_S_MAX:
            self.network.network.clock.after(_LOOK_S, lambda: self._watch_resent(faults))

    def _sent(self) -> list[list[int]]:
        return [[rail.sent_bytes for rail in host.endpoint.rail_counts] for host in self.network.hosts]

    @property
    def counts(self) -> list[Counts]:
        """By rank."""
        return [host.endpoint.counts for host in self.network.hosts]

    def hit(self, fault: int = 0) -> int:
        """The number of the AllReduce that was under way when this fault began; an error if none was."""
        at_s = self.faults.begun[fault][1]
        return next(number for number, run in enumerate(self.runs) if run.began_s < at_s < run.ended_s)

    def least_s(self, *lost: tuple[int, int], share: Fraction = Fraction(0)) -> float:
        """T* when these NICs, (rank, number), have this share of their rates left."""
        servers = []
        for rank, server in enumerate(self.topology.servers):
            kept = tuple(
                nic if (rank, nic.rail) not in lost else Nic(nic.rail, nic.out * share, nic.in_ * share)
                for nic in server.nics
                if share or (rank, nic.rail) not in lost
            )
            servers.append(Server(server.name, 1, kept))
        return float(least_seconds(Topology(tuple(servers)), 4 * COUNT, Collective("allreduce", self.n_hosts)))
