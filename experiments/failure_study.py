"""What failed NICs cost: an AllReduce under every pattern of failures, drawn many times, as a record.

Endpoints are servers with their surviving NICs pooled, so a time depends only on how many servers keep which share
(`Left`), and thousands of trials give a handful of cases. Each case is timed once, in two ways:

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

The record has no clock, machine or version in it: the same options give the same bytes, with any number of workers.
Its format is `optcc-failures/1`; the one that comes with the package is made by

    optcc study failures -o experiments/records/failure-study.json
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from functools import partial as bound_to
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from optcc.compiler import compile_schedule
from optcc.errors import CodecError, InputError
from optcc.experiments import failure_model
from optcc.experiments.failure_model import (
    FLAP_S,
    FLAPS_PER_DAY,
    FLEET_PORTS,
    HPN_LINK,
    LLAMA_NETWORK,
    LLAMA_NIC,
    RATES,
    REPAIRS_S,
    SERVERS_MAX,
    SLOW_PERCENT,
    WORDS,
    Cluster,
    Instant,
    Left,
    OneServer,
    Pattern,
    Rail,
    Slow,
    Uniform,
    down_probability,
    flap_probability,
)
from optcc.experiments.record import RECORD_BYTES_MAX, RECORDS, Recorded, decode, lines_of, rational, text_of
from optcc.files import read_file, replace_file
from optcc.schedule import Schedule
from optcc.schedules.registry import SCHEDULES
from optcc.show import Card, Shown
from optcc.simulate import simulate
from optcc.topology import Nic, Server, Topology
from optcc.units import show_rate, show_size
from optcc.verify.bounds.closed_forms import allreduce_bound

PARTIAL_FORMAT = "optcc-study-partial/1"
TITLE = "AllReduce with failed NICs: time over the fault-free ring"
COLUMNS = ("ring-failover", "ring", "r2ccl-balance", "r2ccl-allreduce", "optcc", "optimal")
NICS = 8
NIC_RATE = Fraction(50 * 10**9)
"""Bytes/s of a NIC each way: 400 Gbit/s."""
LATENCY_S = Fraction(5, 10**6)
CONFIDENCE = Fraction(95, 100)
"""Of every interval: so many of a hundred such intervals cover what they are about."""
_NORMAL = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""
TRIALS_MAX, JOBS_MAX = 10**5, 256
MEDIAN, P95 = Fraction(1, 2), Fraction(95, 100)
SEGMENTS = {
    "ring": (1, 2, 4),
    "r2ccl-allreduce": (1, 2, 4, 8, 16, 32),
    "optcc": (1, 2, 4, 8, 16, 32, 64),
    "optimal": (128, 256, 512, 1024, 2048),
}
"""Tried in the finite case, as far as the plan has at most `TRANSFERS_MAX` transfers; the fastest counts. R2CCL and
OptCC may fall back to the ring, with the ring's segments."""
TRANSFERS_MAX = 400_000
_PATTERN = re.compile(r"(uniform|one server|rail|slow) [1-9][0-9]{0,6}|instant [ -~]{1,60}")

Rates = tuple[tuple[Fraction, int], ...]
"""(share of the healthy rate, how many servers), in rising order."""


# Times of one case, in units of n/B


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
    next lower one; whoever a ring leaves out hands its part of that over and receives the result. Shares beyond a cap
    do not count, for the best cap; the lowest is the plain ring.

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
                # A member sends 2(m - 1)/m of its ring's share, and 1/m of it for everyone whom the ring leaves out.
                carried[group] += share * (Fraction(2 * (members - 1) + p - members, members) if rate >= step else 1)
        times.append(max(load / rate for load, rate in zip(carried, steps, strict=True)))
    return min(times)


def optcc_choice(rates: Rates) -> tuple[Fraction, Fraction | None]:
    """OptCC's time, and the share from which on a server counts as healthy; None: nobody is a straggler, the ring.

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


# One case with a size and a latency: compiled plans


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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

    OptCC with the stragglers that are best by formula, and with everybody a straggler who has lost anything.
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


def finite(schedule: str, left: Left, cluster: Cluster, size_bytes: int, segments: Sequence[int]) -> Run:
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
    return Run(
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


# Statistics of trials


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate from trials, with its interval of `CONFIDENCE`."""

    value: float
    low: float
    high: float


@cache
def interval_ranks(n: int, share: Fraction) -> tuple[int, int]:
    """Of `n` sorted trials, the two (from 1) between which the quantile `share` lies with `CONFIDENCE`, for any
    distribution: at most half of what is left falls below the one, and above the other, as the binomial distribution
    says. Where there is no such trial it is the first or the last.

    >>> interval_ranks(100, Fraction(1, 2))
    (40, 61)
    """
    tail = (1 - CONFIDENCE) / 2
    p, q = share.numerator, share.denominator - share.numerator
    whole = share.denominator**n
    # P(Binomial <= i), exactly, over the common denominator.
    term, total = q**n, 0
    low, high = 1, n
    for i in range(n):
        total += term
        if total * tail.denominator <= tail.numerator * whole:
            low = i + 1
        if (whole - total) * tail.denominator <= tail.numerator * whole:
            high = i + 1
            break
        term = term * (n - i) * p // ((i + 1) * q)
    return low, high


def quantile(values: Sequence[tuple[Fraction, int]], share: Fraction) -> Estimate:
    """The quantile of sorted (value, how many trials): the least value that `share` of the trials do not exceed."""
    n = sum(count for _, count in values)
    ends = list(accumulate(count for _, count in values))

    def at(rank: int) -> float:
        return float(next(value for (value, _), end in zip(values, ends, strict=True) if rank <= end))

    low, high = interval_ranks(n, share)
    return Estimate(at(math.ceil(share * n)), at(low), at(high))


def mean(values: Sequence[tuple[Fraction, int]]) -> Estimate:
    """The mean of (value, how many trials), with the normal interval; the sums are exact."""
    n = sum(count for _, count in values)
    average = sum((value * count for value, count in values), Fraction(0)) / n
    if n == 1:
        return Estimate(float(average), float(average), float(average))
    variance = sum(((value - average) ** 2 * count for value, count in values), Fraction(0)) / (n - 1)
    half = _NORMAL * math.sqrt(variance / n)
    return Estimate(float(average), float(average) - half, float(average) + half)


# The record


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is `left`, in how many `trials`, and for each of `COLUMNS` the fluid time over the fault-free ring."""

    left: str
    trials: int
    over_fault_free: tuple[Fraction, ...]


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every outcome of a pattern on so many servers, in rising order of what is left."""

    pattern: str
    servers: int
    outcomes: tuple[Outcome, ...]

    @property
    def trials(self) -> int:
        """All of them."""
        return sum(outcome.trials for outcome in self.outcomes)

    def values(self, schedule: str) -> list[tuple[Fraction, int]]:
        """Sorted (time over T_ff, trials) of a schedule."""
        column = COLUMNS.index(schedule)
        found: Counter[Fraction] = Counter()
        for outcome in self.outcomes:
            found[outcome.over_fault_free[column]] += outcome.trials
        return sorted(found.items())

    def quantile(self, schedule: str, share: Fraction) -> Estimate:
        """Of the time over T_ff."""
        return quantile(self.values(schedule), share)

    def mean(self, schedule: str) -> Estimate:
        """Of the time over T_ff."""
        return mean(self.values(schedule))

    def worst(self, schedule: str) -> float:
        """The largest time over T_ff of all trials; a further trial is worse with at most about 3/trials (95 %)."""
        return float(self.values(schedule)[-1][0])


class Assumption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number that patterns are drawn with, as text, and where it is from."""

    name: str
    value: str
    source: str


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    title: str
    command: tuple[str, ...]
    trials: int
    seed: int
    nics: int
    nic_rate: Fraction
    latency_s: Fraction
    assumptions: tuple[Assumption, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class FailureStudy(Recorded, Shown):
    """The record: with which options it was made, on which assumptions, every cell and every simulated case."""

    format: ClassVar[str] = "optcc-failures/1"
    own_path: ClassVar[Path] = RECORDS / "failure-study.json"

    title: str
    command: tuple[str, ...]
    trials: int
    seed: int
    assumptions: tuple[Assumption, ...]
    cells: tuple[Cell, ...]
    runs: tuple[Run, ...]
    nics: int = NICS
    nic_rate: Fraction = NIC_RATE
    latency_s: Fraction = LATENCY_S

    def cell(self, pattern: str, servers: int) -> Cell | None:
        """The cell of a pattern, if it was drawn."""
        return next((each for each in self.cells if (each.pattern, each.servers) == (pattern, servers)), None)

    def uniform(self) -> tuple[tuple[int, Cell], ...]:
        """The cells with so many failed NICs anywhere, by servers and that number."""
        found = [(int(cell.pattern.split()[1]), cell) for cell in self.cells if cell.pattern.startswith("uniform ")]
        return tuple(sorted(found, key=lambda each: (each[1].servers, each[0])))

    def simulated(self, servers: int, size_bytes: int) -> dict[tuple[str, str], Run]:
        """The runs of one cluster and size, by what is left and by schedule."""
        return {
            (run.left, run.schedule): run for run in self.runs if (run.servers, run.size_bytes) == (servers, size_bytes)
        }

    def _row(self, cell: Cell) -> tuple[str, ...]:
        def shown(name: str) -> str:
            parts = (cell.quantile(name, MEDIAN).value, cell.quantile(name, P95).value, cell.worst(name))
            return " / ".join(f"{100 * (part - 1):.1f}" for part in parts)

        return (str(cell.servers), cell.pattern, *(shown(name) for name in COLUMNS if name != "ring"))

    def _card(self, title: str, cells: Iterable[Cell]) -> Card:
        columns = ("servers", "failed", *(name for name in COLUMNS if name != "ring"))
        return Card(title, columns, tuple(self._row(cell) for cell in cells))

    def card(self) -> Card:
        """The table of overheads for 1..10 failed NICs; of many sizes, the numbers of failures that fit on a page."""
        cells = self.uniform()
        if len(cells) > len(_FEW) * 8:
            cells = tuple((failed, cell) for failed, cell in cells if failed in _FEW)
        title = f"{self.title}: overhead in %, median / p95 / worst of {self.trials} trials, {self.nics} NICs a server"
        return self._card(title, (cell for _, cell in cells))

    def patterns(self) -> Card:
        """The same for every other pattern."""
        cells = [cell for cell in self.cells if not cell.pattern.startswith(("uniform ", _ONE))]
        return self._card(f"Other patterns: overhead in %, median / p95 / worst of {self.trials} trials", cells)

    def one_server(self) -> Card:
        """The overhead in % if one server has lost so many of its NICs: every trial is alike."""
        names = [name for name in COLUMNS if name != "ring"]
        rows = tuple(
            (
                str(cell.servers),
                cell.pattern.removeprefix(_ONE),
                *(f"{100 * (cell.worst(name) - 1):.2f}" for name in names),
            )
            for cell in self.cells
            if cell.pattern.startswith(_ONE)
        )
        return Card(f"One server: overhead in %, {self.nics} NICs a server", ("servers", "lost", *names), rows)

    def finite(self) -> Card:
        """What was simulated, weighed by how often it was drawn with so many failed NICs: means of overheads in %."""
        names = tuple(SEGMENTS)
        rows = []
        for servers, size_bytes in sorted({(run.servers, run.size_bytes) for run in self.runs}):
            runs = self.simulated(servers, size_bytes)
            for cell in self.cells:
                if cell.servers == servers and all((outcome.left, "ring") in runs for outcome in cell.outcomes):
                    means = []
                    for name in names:
                        times = [(Fraction(runs[o.left, name].over_fault_free), o.trials) for o in cell.outcomes]
                        means.append(f"{100 * (mean(times).value - 1):.1f}")
                    rows.append((str(servers), show_size(size_bytes), cell.pattern, *means))
        title = (
            f"Simulated, {show_rate(self.nics * self.nic_rate)} a server, {float(self.latency_s * 10**6):g} us: mean %"
        )
        return Card(title, ("servers", "size", "failed", *names), tuple(rows))

    def as_json(self) -> dict[str, Any]:
        """Every cell with its estimates and their intervals, and every run."""

        def estimates(cell: Cell, name: str) -> dict[str, Any]:
            found = {
                "median": cell.quantile(name, MEDIAN),
                "p95": cell.quantile(name, P95),
                "mean": cell.mean(name),
            }
            shown: dict[str, Any] = {key: [each.value, each.low, each.high] for key, each in found.items()}
            return {**shown, "worst": cell.worst(name)}

        return {
            "trials": self.trials,
            "seed": self.seed,
            "confidence": float(CONFIDENCE),
            "over_fault_free": [
                {
                    "servers": cell.servers,
                    "pattern": cell.pattern,
                    "outcomes": len(cell.outcomes),
                    **{name: estimates(cell, name) for name in COLUMNS},
                }
                for cell in self.cells
            ],
            "runs": msgspec.to_builtins(self.runs),
        }

    def to_bytes(self) -> bytes:
        """The record as a file, a line for each cell and each run."""
        head = _File(
            self.format,
            self.title,
            self.command,
            self.trials,
            self.seed,
            self.nics,
            self.nic_rate,
            self.latency_s,
            self.assumptions,
            COLUMNS,
            (),
            (),
        )
        built = msgspec.to_builtins(head, enc_hook=text_of)
        lists = {name: msgspec.to_builtins(getattr(self, name), enc_hook=text_of) for name in ("cells", "runs")}
        return lines_of({key: value for key, value in built.items() if key not in lists}, lists)

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "") -> FailureStudy:
        file, check = decode(data, name, _File, cls.format, rational)
        check("columns", file.columns, file.columns == COLUMNS, f"be {list(COLUMNS)}")
        check("nics", file.nics, file.nics == NICS, f"be {NICS}")
        check("trials", file.trials, 1 <= file.trials <= TRIALS_MAX, f"be from 1 to {TRIALS_MAX}")
        check("nic_rate", str(file.nic_rate), file.nic_rate > 0, "be above zero")
        for number, cell in enumerate(file.cells):
            where = f"cells[{number}]"
            check(f"{where}.pattern", cell.pattern, bool(_PATTERN.fullmatch(cell.pattern)), "be the name of a pattern")
            check(f"{where}.servers", cell.servers, 2 <= cell.servers <= SERVERS_MAX, f"be from 2 to {SERVERS_MAX}")
            check(f"{where}.outcomes", cell.trials, cell.trials == file.trials, f"be of {file.trials} trials")
            lefts = [_left(outcome.left, f"record {name!r}: $.{where}") for outcome in cell.outcomes]
            check(where, [str(left) for left in lefts], lefts == sorted(set(lefts)), "rise, every outcome once")
            for place, outcome in enumerate(cell.outcomes):
                over = outcome.over_fault_free
                inside = f"{where}.outcomes[{place}].over_fault_free"
                check(inside, [str(each) for each in over], len(over) == len(COLUMNS), f"be {len(COLUMNS)} numbers")
                check(inside, [str(each) for each in over], 1 <= over[-1] <= min(over), "end with the bound, 1 or more")
                check(f"{where}.outcomes[{place}].trials", outcome.trials, outcome.trials > 0, "be above zero")
        keys = [(cell.pattern, cell.servers) for cell in file.cells]
        check("cells", len(keys), len(set(keys)) == len(keys), "be there once each")
        for number, run in enumerate(file.runs):
            where = f"runs[{number}]"
            _left(run.left, f"record {name!r}: $.{where}.left")
            check(f"{where}.schedule", run.schedule, run.schedule in SEGMENTS, f"be one of {', '.join(SEGMENTS)}")
            check(f"{where}.segments", run.segments, run.segments in run.tried, "be one of those tried")
            possible = run.bound_s * (1 - _ROUNDING) <= run.seconds < math.inf and run.bound_s > 0 < run.fault_free_s
            check(f"{where}.seconds", run.seconds, possible, f"be at least the bound, {run.bound_s!r}")
        made = [(run.servers, run.size_bytes, run.left, run.schedule) for run in file.runs]
        check("runs", len(made), len(set(made)) == len(made), "be there once each")
        return cls(
            file.title,
            file.command,
            file.trials,
            file.seed,
            file.assumptions,
            file.cells,
            file.runs,
            file.nics,
            file.nic_rate,
            file.latency_s,
        )


_ROUNDING = 1e-9
"""Simulated seconds are floats; they may be this share below a bound that they reach."""
_FEW = (1, 2, 3, 5, 10)
_ONE = "one server "


def _left(text: str, where: str) -> Left:
    try:
        return Left.parse(text)
    except CodecError as error:
        raise CodecError(f"{where}: {error}") from None


# Making it: units of work, on several processes, that a second start need not repeat

Report = Callable[[int, int, str], None]
"""Told after every unit: how many are done, of how many, and which one it was."""


@dataclass
class Partial:
    """Units that are done, in a file that is replaced whole after each of them; `study` names what is being made.

    Raises InputError or CodecError from `open` if the file is not such a file, or one of another study.
    """

    path: Path
    study: str
    done: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, study: str, *, resume: bool) -> Partial:
        """What is done so far: nothing if there is no file."""
        if not path.exists():
            return cls(path, study)
        if not resume:
            raise InputError(f"file {str(path)!r}: an unfinished study: give --resume to go on with it, or delete it")
        data = read_file(path, RECORD_BYTES_MAX)
        try:
            file = msgspec.json.decode(data, type=_PartialFile)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CodecError(f"partial file {str(path)!r}: {error}: delete it to start again") from None
        for name, value, wanted in (
            ("format", file.format, PARTIAL_FORMAT),
            ("study", file.study, study),
            ("sha256", file.sha256, _digest(file.done)),
        ):
            if value != wanted:
                raise CodecError(
                    f"partial file {str(path)!r}: $.{name}: {value!r}: must be {wanted!r}: delete it to start again"
                )
        return cls(path, study, file.done)

    def add(self, name: str, result: Any) -> None:
        """A unit is done."""
        self.done[name] = result
        file = _PartialFile(PARTIAL_FORMAT, self.study, _digest(self.done), self.done)
        replace_file(self.path, msgspec.json.encode(file) + b"\n")

    def close(self) -> None:
        """The record is there: the file is not needed any more."""
        self.path.unlink(missing_ok=True)


class _PartialFile(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    study: str
    sha256: str
    done: dict[str, Any]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def complete(
    units: Mapping[str, Any], work: Callable[[Any], Any], *, jobs: int, partial: Partial | None, report: Report
) -> dict[str, Any]:
    """`work` of every unit, by name and in their order, on `jobs` processes; units that are in `partial` are done.

    `work` is a function of a module, and what it returns is made of JSON's types.
    """
    done = dict(partial.done) if partial is not None else {}
    open_ = [(name, unit) for name, unit in units.items() if name not in done]
    n_before = len(units) - len(open_)

    def take(name: str, result: Any) -> None:
        done[name] = result
        if partial is not None:
            partial.add(name, result)
        report(n_before + len([each for each, _ in open_ if each in done]), len(units), name)

    if jobs == 1 or len(open_) < 2:
        for name, unit in open_:
            take(name, work(unit))
    else:
        # Fresh processes: a fork would copy whatever threads the parent has started.
        context = multiprocessing.get_context("spawn")
        with context.Pool(min(jobs, len(open_)), initializer=_leave_interrupts) as pool:
            for name, result in pool.imap_unordered(bound_to(_named, work), open_):
                take(name, result)
    return {name: done[name] for name in units}


def _leave_interrupts() -> None:
    """Ctrl-C reaches the whole group; only the parent reacts, and ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _named(work: Callable[[Any], Any], unit: tuple[str, Any]) -> tuple[str, Any]:
    return unit[0], work(unit[1])


@dataclass(frozen=True)
class Study:
    """What to draw and what to simulate: `simulated` are patterns, on which servers, with messages of which size."""

    patterns: tuple[tuple[Pattern, int], ...]
    simulated: tuple[tuple[Pattern, int, int], ...]
    segments: Mapping[str, tuple[int, ...]]


SERVERS = (8, 16, 32, 64, 128, 256, 512, 1024)
FAILED = tuple(range(1, 11))
_OTHERS: tuple[tuple[Pattern, int], ...] = (
    *((OneServer(failed), servers) for servers in SERVERS for failed in (1, 2, 3, 4)),
    *((Rail(group), 64) for group in (4, 16, 32, 64)),
    *((Slow(slow), 64) for slow in (1, 2, 4)),
    *(
        (Instant(f"flaps {flaps}", flap_probability(flaps)), servers)
        for servers in (64, 2048)
        for flaps in FLAPS_PER_DAY
    ),
    *(
        (Instant(f"{rate.name} {repair}", down_probability(rate, REPAIRS_S[repair])), servers)
        for servers in (128, 2048)
        for rate, repair in ((LLAMA_NIC, "4h"), (HPN_LINK, "1d"), (LLAMA_NETWORK, "3d"))
    ),
)
_GIB, _MIB = 2**30, 2**20
FULL = Study(
    patterns=(*((Uniform(failed), servers) for servers in SERVERS for failed in FAILED), *_OTHERS),
    simulated=(
        *((Uniform(failed), 16, size) for size in (64 * _MIB, _GIB) for failed in FAILED),
        *((OneServer(failed), 32, _GIB) for failed in (1, 2, 3, 4)),
        *((Uniform(failed), 64, _GIB) for failed in (1, 2, 4, 10)),
    ),
    segments=SEGMENTS,
)
QUICK = Study(
    patterns=(
        *((Uniform(failed), servers) for servers in (8, 64) for failed in (1, 2, 3)),
        (OneServer(2), 8),
        (Rail(4), 8),
        (Slow(1), 8),
        (Instant("llama3-network 3d", down_probability(LLAMA_NETWORK, REPAIRS_S["3d"])), 128),
    ),
    simulated=((Uniform(2), 8, 64 * _MIB),),
    segments={"ring": (1,), "r2ccl-allreduce": (4, 8), "optcc": (8, 16), "optimal": (64, 128)},
)
"""A study of seconds, for tests and for a first look."""


def assumptions() -> tuple[Assumption, ...]:
    """The numbers that patterns are drawn with."""
    return (
        *(
            Assumption(f"failures per port and day, {each.name}", text_of(each.per_port_day), each.source)
            for each in RATES
        ),
        *(
            Assumption(f"repair time, {name}", f"{seconds} s", "assumed: the repair time of a NIC is unpublished")
            for name, seconds in REPAIRS_S.items()
        ),
        *(
            Assumption("flaps a day in a fleet", str(flaps), "Alibaba HPN (SIGCOMM 2024, section 2.3)")
            for flaps in FLAPS_PER_DAY
        ),
        Assumption("ports of that fleet", str(FLEET_PORTS), "assumed: the fleet's size is not given"),
        Assumption("duration of a flap", f"{FLAP_S} s", "assumed; MegaScale (NSDI 2024): seconds"),
        Assumption(
            "what a slow NIC carries",
            f"{SLOW_PERCENT[0]} to {SLOW_PERCENT[-1]} %, multiples of {SLOW_PERCENT.step} alike",
            "assumed; SuperBench: 6.04 % of nodes have a host adapter below its specification",
        ),
        Assumption("a server cut off", "drawn again", "no schedule here works without the GPUs of a server"),
    )


@dataclass(frozen=True)
class _Draw:
    """A unit of work: all trials of one cell."""

    pattern: Pattern
    cluster: Cluster
    seed: int
    trials: int


def _draw(unit: _Draw) -> list[tuple[str, int, list[str]]]:
    """(what is left, in how many trials, fluid times over T_ff) of a cell."""
    drawn = (failure_model.draw(unit.pattern, unit.cluster, unit.seed, trial) for trial in range(unit.trials))
    counts = Counter(Left.of(damage) for damage in drawn)
    return [
        (str(left), count, [text_of(each) for each in fluid(left, unit.cluster)])
        for left, count in sorted(counts.items())
    ]


@dataclass(frozen=True)
class _Simulate:
    """A unit of work: one schedule in one finite case."""

    schedule: str
    left: str
    cluster: Cluster
    size_bytes: int
    segments: tuple[int, ...]


def _simulate(unit: _Simulate) -> Any:
    left = Left.parse(unit.left)
    return msgspec.to_builtins(finite(unit.schedule, left, unit.cluster, unit.size_bytes, unit.segments))


def check_numbers(trials: int, seed: int, jobs: int) -> None:
    """Raises InputError if one of the options of a study cannot be."""
    for name, value, least, most in (("trials", trials, 1, TRIALS_MAX), ("jobs", jobs, 1, JOBS_MAX)):
        if not least <= value <= most:
            raise InputError(f"--{name} {value}: must be from {least} to {most}")
    if not 0 <= seed < WORDS:
        raise InputError(f"--seed {seed}: must be from 0 to 2**64 - 1")


def said(study: str, trials: int, seed: int, *, quick: bool) -> str:
    """A name for a study with its options, under which its unfinished part is kept."""
    return f"{study}, {trials} trials, seed {seed}{', quick' if quick else ''}"


def command_for(study: str, trials: int, seed: int, *, quick: bool) -> tuple[str, ...]:
    """The command that makes the record."""
    options = ("--trials", str(trials), "--seed", str(seed), *(("--quick",) if quick else ()))
    return ("optcc", "study", study, *options)


def quiet(done: int, of: int, name: str) -> None:
    """Reports nothing."""


def make(
    study: Study,
    *,
    trials: int,
    seed: int,
    jobs: int = 1,
    partial: Partial | None = None,
    report: Report = quiet,
    quick: bool = False,
) -> FailureStudy:
    """Draws and simulates everything in `study`; the result depends on `trials` and `seed`, and on nothing else.

    Raises InputError for options that cannot be, CodecError if `partial` holds what this study did not write.
    """
    check_numbers(trials, seed, jobs)
    draws = {
        f"draw {pattern}, {servers} servers": _Draw(pattern, Cluster(servers, NICS), seed, trials)
        for pattern, servers in study.patterns
    }
    drawn = complete(draws, _draw, jobs=jobs, partial=partial, report=report)
    cells = tuple(
        Cell(
            str(pattern),
            servers,
            tuple(
                Outcome(left, count, tuple(Fraction(each) for each in over))
                for left, count, over in drawn[f"draw {pattern}, {servers} servers"]
            ),
        )
        for pattern, servers in study.patterns
    )
    by_key = {(cell.pattern, cell.servers): cell for cell in cells}
    cases = dict.fromkeys(
        (servers, size_bytes, outcome.left)
        for pattern, servers, size_bytes in study.simulated
        for outcome in by_key[str(pattern), servers].outcomes
    )
    units = {
        f"simulate {name} on {servers} servers, {size_bytes} B, {left}": _Simulate(
            name, left, Cluster(servers, NICS), size_bytes, segments
        )
        for servers, size_bytes, left in cases
        for name, segments in study.segments.items()
    }
    # The largest first, so that no worker is left alone with one at the end.
    first = dict(sorted(units.items(), key=lambda each: (-each[1].cluster.servers, each[0])))
    simulated = complete(first, _simulate, jobs=jobs, partial=partial, report=report)
    runs = tuple(msgspec.convert(simulated[name], Run) for name in units)
    command = command_for("failures", trials, seed, quick=quick)
    return FailureStudy(TITLE, command, trials, seed, assumptions(), cells, runs)
