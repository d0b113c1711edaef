"""NICs and paths that are slower than declared, in simulated time: what every rank finds out from the job's traffic.

    python -m tests.faults.slow_nics [SEEDS]

prints, by case, how long it takes until all ranks know, and what they believe that is not so.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from optcc.plan import Channel
from optcc.runtime.sim.network import SlowPath
from optcc.runtime.transport import RECEIVED, SENT
from optcc.runtime.transports.sim import SimNetwork, SimTransport, run_sim
from optcc.topology import Nic, Server, Topology

RATE = 12_500_000
SEGMENT_BYTES = 1 << 15
MESSAGE_BYTES = 1 << 20
SINCE_S, FOR_S, LAST_S = 0.5, 1.5, 0.3
"""A fault begins so long after the start, and the ranks have so long to find it out; what they believe in the last part
of that must be so."""
Shares = dict[tuple[int, int], tuple[float, float]]


@dataclass(frozen=True)
class Case:
    """`slow`: the shares of NICs from `SINCE_S` on, out and in; `path`: the source, the destination and the share of a
    slow path. It lasts `for_s`, and as long again if it `heals`; or comes and goes every `on_off_s`. Ranks send to the
    next one (`ring`) or to all. `noise`: rates vary by so much every 10 ms; `pauses`: how likely a rank computes then,
    for up to 20 ms; `is_uneven`: some NICs are twice as fast as others.
    """

    name: str
    slow: Shares = field(default_factory=dict)
    path: tuple[tuple[int, int], tuple[int, int], float] | None = None
    n_ranks: int = 4
    n_nics: int = 2
    pattern: str = "ring"
    noise: float = 0.1
    pauses: float = 0.0
    on_off_s: float = 0.0
    is_uneven: bool = False
    heals: bool = False
    for_s: float = FOR_S


@dataclass
class Found:
    """How long after the fault began all ranks knew, None if not all did; the same of the healing; what was believed
    that is not so; how many rounds of messages there were."""

    known_s: float | None
    healed_s: float | None
    wrong: list[str]
    n_runs: int


def run(case: Case, seed: int) -> Found:
    """One job of the case."""
    rng = random.Random(seed)
    rates = {
        (rank, nic): RATE * (rng.choice((1, 2)) if case.is_uneven else 1)
        for rank in range(case.n_ranks)
        for nic in range(case.n_nics)
    }
    servers = tuple(
        Server(
            f"h{rank}",
            1,
            tuple(Nic(nic, Fraction(rates[rank, nic]), Fraction(rates[rank, nic])) for nic in range(case.n_nics)),
        )
        for rank in range(case.n_ranks)
    )
    network = SimNetwork(Topology(servers), seed=seed, chunk_bytes=1 << 17)
    net = network.network
    net.segment_bytes = SEGMENT_BYTES
    clock = net.clock
    begin_s = SINCE_S + 0.05 * rng.random()
    heal_s = begin_s + case.for_s if case.heals else float("inf")
    end_s = (heal_s if case.heals else begin_s) + case.for_s

    def share_of(nic: tuple[int, int]) -> tuple[float, float]:
        is_slow = begin_s <= clock.now_s < heal_s
        if case.on_off_s and int((clock.now_s - begin_s) / case.on_off_s) % 2:
            is_slow = False
        return case.slow.get(nic, (1.0, 1.0)) if is_slow else (1.0, 1.0)

    def vary() -> None:
        for which, nic in net.nics.items():
            out, in_ = share_of(which)
            nic.out_rate = rates[which] * out * rng.uniform(1 - case.noise, 1)
            nic.in_rate = rates[which] * in_ * rng.uniform(1 - case.noise, 1)
        if case.path is not None:
            src, dst, share = case.path
            key = net.nics[src], net.nics[dst]
            if begin_s <= clock.now_s < heal_s and key not in net.slow_paths:
                net.slow_paths[key] = SlowPath(RATE * share)
            elif clock.now_s >= heal_s:
                net.slow_paths.pop(key, None)
        if case.pauses:
            for host in network.hosts:
                if rng.random() < case.pauses:
                    host.compute(rng.uniform(0.0, 0.02))
        clock.after(0.01, vary)

    knew: dict[int, float] = {}
    healed: dict[int, float] = {}
    wrong: set[str] = set()

    def watch() -> None:
        for rank, host in enumerate(network.hosts):
            rates_of = host.endpoint.rates
            is_right, is_healed = True, True
            for which in rates:
                known, true = rates_of.known(*which), case.slow.get(which, (1.0, 1.0))
                is_healed &= min(known) >= 0.9
                for known_share, true_share in zip(known, true, strict=True):
                    is_right &= 0.75 * true_share <= known_share <= min(1.0, 1.3 * true_share)
                    is_blamed = known_share < 0.75 * true_share
                    if is_blamed and (
                        clock.now_s > heal_s or clock.now_s > end_s - LAST_S or not (case.slow or case.path)
                    ):
                        wrong.add(f"{which}: {known} instead of {true}")
            if case.path is not None:
                src, dst, share = case.path
                if rank == src[0]:
                    is_right &= rates_of.path((src[1], *dst)) <= 1.3 * share
                    is_healed &= rates_of.path((src[1], *dst)) >= 0.9
            for rail, share in rates_of._paths.items():
                is_real = case.path is not None and ((rank, rail[0]), rail[1:]) == case.path[:2]
                if share < 0.75 and not is_real and not case.slow:
                    wrong.add(f"path {rank}.{rail}: {share:.2f}")
            if is_right and clock.now_s >= begin_s:
                knew.setdefault(rank, clock.now_s - begin_s)
            if is_healed and clock.now_s > heal_s:
                healed.setdefault(rank, clock.now_s - heal_s)
        clock.after(0.005, watch)

    clock.after(0.0, vary)
    clock.after(0.0, watch)
    n_runs = run_sim(network, lambda rank, transport: _job(case, transport, end_s))[0]
    return Found(
        max(knew.values()) if len(knew) == case.n_ranks else None,
        max(healed.values()) if len(healed) == case.n_ranks else None,
        sorted(wrong),
        n_runs,
    )


def _job(case: Case, transport: SimTransport, end_s: float) -> int:
    """Messages to the next rank, or to all others, again and again; how many times."""
    rank, n = transport.rank, case.n_ranks
    steps = [1] if case.pattern == "ring" else list(range(1, n))
    channels = [Channel(src, (src + step) % n, 0) for src in range(n) for step in steps]
    handles = transport.open(channels, 0, [MESSAGE_BYTES] * len(channels))
    sends = [handle for channel, handle in zip(channels, handles, strict=True) if channel.src == rank]
    receives = [handle for channel, handle in zip(channels, handles, strict=True) if channel.dst == rank]
    data = np.zeros(MESSAGE_BYTES, np.uint8)
    slots = [np.empty(MESSAGE_BYTES, np.uint8) for _ in receives]
    n_runs, is_over = 0, False
    while not is_over:
        for handle, slot in zip(receives, slots, strict=True):
            transport.post_recv(handle, slot)
        for handle in sends:
            transport.post_send(handle, data)
        n_left = len(sends) + len(receives)
        while n_left:
            for kind, _ in transport.poll(1.0):
                n_left -= kind in (SENT, RECEIVED)
        n_runs += 1
        if n_runs % 4 == 0:
            is_over = any(flag == b"\1" for flag in transport.allgather(bytes([transport.clock.now_s() >= end_s])))
    return n_runs


_H = (1, 1)
CASES = (
    Case("out at half, ring", {_H: (0.5, 1.0)}),
    Case("in at half, ring", {_H: (1.0, 0.5)}),
    Case("both at half, ring", {_H: (0.5, 0.5)}),
    Case("path at half, ring", path=((0, 1), (1, 1), 0.5)),
    Case("both at half and healed, ring", {_H: (0.5, 0.5)}, heals=True),
    Case("both at half, ring, hosts unequal", {_H: (0.5, 0.5)}, is_uneven=True),
    Case("both at half, ring, slow processors", {_H: (0.5, 0.5)}, pauses=0.3),
    Case("healthy, ring", for_s=4.0),
    Case("healthy, all to all", pattern="all", for_s=4.0),
    Case("healthy, all to all, hosts unequal", pattern="all", is_uneven=True, for_s=4.0),
    Case("healthy, ring, slow processors", pauses=0.3, for_s=4.0),
    Case("healthy, all to all, slow processors", pattern="all", pauses=0.3, for_s=4.0),
    Case("half for 100 ms of 200, ring", {_H: (0.5, 0.5)}, on_off_s=0.1, for_s=4.0),
)


def _line(case: Case, found: list[Found]) -> str:
    def words(times: list[float | None]) -> str:
        some = sorted(1e3 * each for each in times if each is not None)
        if not some:
            return "never"
        shown = f"{statistics.median(some):4.0f} ms, 95 % {some[int(0.95 * (len(some) - 1))]:4.0f}"
        return shown + (f", not {len(times) - len(some)} of {len(times)}" if len(some) < len(times) else "")

    text = f"{case.name:42}"
    if case.slow or case.path:
        text += f" known {words([each.known_s for each in found]):34}"
    if case.heals:
        text += f" healed {words([each.healed_s for each in found])}"
    wrong = [each for each in found if each.wrong]
    text += f"  {sum(each.n_runs for each in found)} runs, wrong in {len(wrong)} jobs"
    return f"{text}: {wrong[0].wrong[:2]}" if wrong else text


def study(n_seeds: int, tell: Callable[[str], None] = print, wanted: str = "") -> Mapping[str, list[Found]]:
    """All cases with so many seeds each."""
    results: dict[str, list[Found]] = {}
    with ProcessPoolExecutor(2) as pool:
        for case in CASES:
            if wanted in case.name:
                results[case.name] = list(pool.map(run, [case] * n_seeds, range(n_seeds)))
                tell(_line(case, results[case.name]))
    return results


if __name__ == "__main__":
    study(int(sys.argv[1]) if len(sys.argv) > 1 else 4, lambda line: print(line, flush=True), *sys.argv[2:])
