"""Times of an AllReduce with failed NICs: by formula for any cluster, and by simulation of compiled plans.

Endpoints are servers with their surviving NICs pooled, so a time depends only on how many servers keep which share
(`Left`). A case is timed in two ways:

    fluid      exact, by formula, without latency: all schedules, all cluster sizes
    finite     a plan compiled and simulated, for a message of so many bytes and a latency: where it says so

Fluid times are over T_ff = 2(p - 1)/p n/B, the ring with nothing failed. With the shares r of p servers, in units n/B:

    ring-failover      2(p-1)/p * max l   a channel of the ring moves as a whole to a surviving NIC of its server:
                                          the best a library does that cannot split one (`whole_channels`)
    ring               2(p-1)/p / min r   the library's: NICs pooled, so it is the same as
    r2ccl-balance      2(p-1)/p / min r   which spreads what a failed NIC carried over the others
    r2ccl-allreduce    the paper's formula for one degraded server; for several r2ccl-recursive (`r2ccl_time`)
    optcc              the four stages or the plain ring, whichever is faster, for the best choice of who counts as a
                       straggler (`optcc_time`)
    optimal            T*, the bound, which is reached in the fluid limit (`optcc.verify.bounds.closed_forms`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial as bound_to

import msgspec

from optcc.compiler import compile_schedule
from optcc.experiments.failure_model import Cluster, Left
from optcc.schedule import Schedule
from optcc.schedules.registry import SCHEDULES
from optcc.simulate import simulate
from optcc.topology import Nic, Server, Topology
from optcc.verify.bounds.closed_forms import allreduce_bound

COLUMNS = ("ring-failover", "ring", "r2ccl-balance", "r2ccl-allreduce", "optcc", "optimal")
NICS = 8
NIC_RATE = Fraction(50 * 10**9)
"""Bytes/s of a NIC each way: 400 Gbit/s."""
LATENCY_S = Fraction(5, 10**6)
SEGMENTS = {
    "ring": (1, 2, 4),
    "r2ccl-allreduce": (1, 2, 4, 8, 16, 32),
    "optcc": (1, 2, 4, 8, 16, 32, 64),
    "optimal": (128, 256, 512, 1024, 2048),
}
"""Tried in the finite case, as far as the plan has at most `TRANSFERS_MAX` transfers; the fastest counts. R2CCL and
OptCC may fall back to the ring, with the ring's segments."""
TRANSFERS_MAX = 400_000
Rates = tuple[tuple[Fraction, int], ...]
"""(share of the healthy rate, how many servers), in rising order."""


def whole_channels(left: Left, cluster: Cluster) -> Fraction:
    """How much slower the slowest server is if a ring's channels, one for each NIC, stay whole: max over servers of l.

    Each channel goes to the NIC that would be through with it first; for equal channels no assignment is better.

    >>> [str(whole_channels(Left.parse(text), Cluster(4, 8))) for text in ("1[0]", "1[0 0 0 0]", "1[3/4]")]
    ['2', '2', '4/3']
    """
    slowest = Fraction(1)
    for shares, _ in left.groups:
        nics = [*(share for share in shares if share), *[Fraction(1)] * (cluster.nics - len(shares))]
        carried = [0] * len(nics)
        for _ in range(cluster.nics):
            first = min(range(len(nics)), key=lambda nic: ((carried[nic] + 1) / nics[nic], nic))
            carried[first] += 1
        slowest = max(slowest, *(count / rate for count, rate in zip(carried, nics, strict=True)))
    return slowest


def ring_time(rates: Rates) -> Fraction:
    """2(p - 1)/p / min r: the ring, and Balance."""
    p = _count(rates)
    return Fraction(2 * (p - 1), p) / rates[0][0]


def r2ccl_time(rates: Rates) -> Fraction:
    """R2CCL-AllReduce for one degraded server, its recursion for several: `optcc.schedules.r2ccl.peel` in groups.

    A ring for every group of servers that keep at least some share carries the part by which that share exceeds the
    next lower one; a server outside a ring sends its part of that to a member and receives the result. Shares beyond a
    cap do not count, for the best cap; the lowest is the plain ring.

    >>> str(r2ccl_time(((Fraction(1, 2), 1), (Fraction(1), 3))))
    '5/2'
    """
    p = _count(rates)
    steps = [rate for rate, _ in rates]
    times = []
    for number, cap in enumerate(steps):
        carried = [Fraction(0)] * len(rates)
        for below, step in zip([Fraction(0), *steps[:number]], steps[: number + 1], strict=True):
            share = (step - below) / cap
            members = _count(rates, least=step)
            for group, rate in enumerate(steps):
                # A member sends 2(m - 1)/m of its ring's share, and 1/m of it for each server outside the ring.
                carried[group] += share * (Fraction(2 * (members - 1) + p - members, members) if rate >= step else 1)
        times.append(max(load / rate for load, rate in zip(carried, steps, strict=True)))
    return min(times)


def optcc_choice(rates: Rates) -> tuple[Fraction, Fraction | None]:
    """OptCC's time, and the share from which on a server counts as healthy; None: no stragglers, the plain ring.

    With q healthy servers of share t or more and m = p - q stragglers it is max(1/min r, (2(q - 1) + m)/(q t)), see
    `optcc.schedules.optcc`; several stragglers need two healthy servers.
    """
    p = _count(rates)
    best: tuple[Fraction, Fraction | None] = ring_time(rates), None
    for healthy, _ in rates[1:]:
        q = _count(rates, least=healthy)
        m = p - q
        if m == 1 or q >= 2:
            best = min(
                best, (max(1 / rates[0][0], Fraction(2 * (q - 1) + m, q) / healthy), healthy), key=lambda x: x[0]
            )
    return best


def optcc_time(rates: Rates) -> Fraction:
    """max(l, 2 - 1/(p - 1)) for one straggler; for several see `optcc_choice`.

    >>> str(optcc_time(((Fraction(1, 2), 1), (Fraction(1), 3))))
    '2'
    """
    return optcc_choice(rates)[0]


def optimal_time(rates: Rates) -> Fraction:
    """T* of the bound."""
    return allreduce_bound(endpoints(rates, Fraction(1), Fraction(0)), 1).seconds


def fluid(left: Left, cluster: Cluster) -> tuple[Fraction, ...]:
    """What each of `COLUMNS` takes over the fault-free ring, exactly.

    >>> [f"{float(each):.3f}" for each in fluid(Left.parse("1[0]"), Cluster(64, 8))]
    ['2.000', '1.143', '1.143', '1.073', '1.008', '1.002']
    """
    rates, p = left.rates(cluster), cluster.servers
    fault_free = Fraction(2 * (p - 1), p)
    balanced = ring_time(rates)
    times = (
        fault_free * whole_channels(left, cluster),
        balanced,
        balanced,
        r2ccl_time(rates),
        optcc_time(rates),
        optimal_time(rates),
    )
    return tuple(time / fault_free for time in times)


def _count(rates: Rates, least: Fraction = Fraction(0)) -> int:
    """Servers that keep at least `least`."""
    return sum(count for rate, count in rates if rate >= least)


def endpoints(rates: Rates, rate: Fraction, latency_s: Fraction) -> Topology:
    """One endpoint for each server, healthy ones of `rate` bytes/s first, the most degraded last."""
    shares = [share for share, count in reversed(rates) for _ in range(count)]
    servers = (Server(f"h{index}", 1, (Nic(0, share * rate, share * rate),)) for index, share in enumerate(shares))
    return Topology(tuple(servers), latency_s=latency_s)


class SimulatedRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`schedule` on what is `left` of `servers`: the fastest plan, of `built` with so many of the `tried` segments.

    `seconds` are simulated under fifo ports; `bound_s` is T*, `fault_free_s` T_ff, both without latency.
    """

    servers: int
    size_bytes: int
    left: str
    schedule: str
    built: str
    tried: tuple[int, ...]
    segments: int
    transfers: int
    seconds: float
    bound_s: float
    fault_free_s: float

    @property
    def over_fault_free(self) -> float:
        """Simulated time over T_ff."""
        return self.seconds / self.fault_free_s

    @property
    def over_bound(self) -> float:
        """Simulated time over T*."""
        return self.seconds / self.bound_s


def builds(schedule: str, rates: Rates) -> Iterator[tuple[str, Callable[[int], Schedule]]]:
    """What to try for a column of the record: a name, and how to build the schedule with so many segments.

    OptCC with the stragglers that are best by formula, and with every degraded server as a straggler.
    """
    topology = endpoints(rates, NICS * NIC_RATE, LATENCY_S)
    p = len(topology.servers)
    best = rates[-1][0]
    degraded = _count(rates) - _count(rates, least=best)
    if schedule == "r2ccl-allreduce":
        name = schedule if degraded == 1 else "r2ccl-recursive"
        yield name, bound_to(SCHEDULES[name].build, topology)
    elif schedule == "optcc":
        for healthy in dict.fromkeys((optcc_choice(rates)[1], best)):
            q = _count(rates, least=healthy) if healthy is not None else p
            if p - q == 1 or (q < p and q >= 2):
                yield f"optcc, {p - q} stragglers", bound_to(_optcc, p, tuple(range(q, p)))
    else:
        yield schedule, bound_to(SCHEDULES[schedule].build, topology)
    if schedule in ("r2ccl-allreduce", "optcc"):
        yield "ring", bound_to(SCHEDULES["ring"].build, topology)


def _optcc(p: int, stragglers: tuple[int, ...], segments: int) -> Schedule:
    return SCHEDULES["optcc"](p, segments, stragglers=stragglers)


def finite(schedule: str, left: Left, cluster: Cluster, size_bytes: int, segments: Sequence[int]) -> SimulatedRun:
    """Compiles and simulates `schedule` with every number of segments that fits, and keeps the fastest."""
    rates = left.rates(cluster)
    topology = endpoints(rates, NICS * NIC_RATE, LATENCY_S)
    healthy = NICS * NIC_RATE
    found: list[tuple[float, int, int, str]] = []
    tried: set[int] = set()
    for built, build in builds(schedule, rates):
        numbers = SEGMENTS["ring"] if built == "ring" else segments
        each = len(build(1))
        for count in numbers:
            # The smallest number counts even if the plan is too large: every schedule gets a time.
            if count * each <= TRANSFERS_MAX or count == min(numbers):
                plan = compile_schedule(build(count), size_bytes=size_bytes, topology=topology, ports="fifo")
                found.append((simulate(plan, topology).seconds, count, len(plan.transfers), built))
                tried.add(count)
    seconds, best, transfers, built = min(found)
    p = cluster.servers
    return SimulatedRun(
        p,
        size_bytes,
        str(left),
        schedule,
        built,
        tuple(sorted(tried)),
        best,
        transfers,
        seconds,
        float(optimal_time(rates) * size_bytes / healthy),
        float(Fraction(2 * (p - 1), p) * size_bytes / healthy),
    )
