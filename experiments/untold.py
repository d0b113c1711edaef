"""How near to the bound an AllReduce comes of whose hosts nobody says anything, as a record.

    optcc experiment untold           (eight states and twenty random fabrics, in about 35 minutes)

Every row is the user's own command on emulated hosts,

    optcc fabric run -- env -u OPTCC_TOPOLOGY optcc bench --transport tcp --schedule auto

without a topology, rates or a model of ports: the run-time measures the NICs and plans for what it has found. T* is
the certified bound for the rates that the NICs really have, in payload bytes; a NIC reaches only NICs of its own rail,
so that it is not the bound of hosts whose NICs are pooled, where hosts have different rails. Two runs come before
those that count. A job is repeated, as a run of a peer is, while the hypervisor takes more than `STEAL_MAX` of the
machine in most of its runs; the try in which it took least counts. In a random fabric half of the NICs have 15 to
100 % of their rate, out and in by themselves.

In the eight states the peers run next, on the same hosts, each in a job of its own and with its best settings, as in
`peers-on-fabric`: in turns, after one run that does not count. MPICH and torch live in environments of their own, named
by `--mpich` and `--torch`; the record says of a peer that was not run why. Needs root, for the hosts.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import click
import msgspec

from optcc.collective import Collective
from optcc.experiments.bench_jobs import befall, run_bench
from optcc.experiments.cells import RecordCells
from optcc.experiments.fabric import WIRE_OVERHEAD, Fabric, FabricSpec, FabricState
from optcc.experiments.peers_comparison import Comparison, repeat_disturbed
from optcc.experiments.peers_on_fabric import allow_multipath
from optcc.experiments.record import RECORDS, STEAL_MAX, BenchTiming, Check, undisturbed
from optcc.experiments.recorder import Measured, RecordForm, check_times, head, record_command
from optcc.show import Card
from optcc.topology import Nic, Server, Topology
from optcc.units import show_size
from optcc.verify.bounds.certified import certified_bound, explain_if_pooled

WARMUP, RUNS = 2, 5
PEER_RUNS = 3
SIZE_BYTES, RANDOM_SIZE_BYTES = 64 << 20, 16 << 20
RANDOM_FABRICS, SEED, RANDOM = 20, 1, "random"
_RANDOM_MBITS, _LEAST = 200, 0.15
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class UntoldState:
    """Hosts and what befell them: by NIC, as h1.eth0, its rates or "down"."""

    name: str
    fabric: str
    nics: Mapping[str, str] = field(default_factory=dict)
    size_bytes: int = SIZE_BYTES
    with_peers: bool = True


def _random_rates(rng: random.Random, hosts: int, full_mbits: int = 400) -> dict[str, str]:
    """Rates out and in, 15 to 100 % of the full one, for hosts of one NIC."""
    draws = [[round(full_mbits * rng.uniform(_LEAST, 1)) for _ in range(2)] for _ in range(hosts)]
    return {f"h{host}.eth0": f"{out}Mbit/s:{in_}Mbit/s" for host, (out, in_) in enumerate(draws)}


STATES = (
    UntoldState("healthy", "4x2@400Mbit/s"),
    UntoldState("one NIC at half", "4x2@400Mbit/s", {"h3.eth1": "200Mbit/s"}),
    UntoldState("one NIC down", "4x2@400Mbit/s", {"h3.eth1": "down"}),
    UntoldState(
        "three hosts unequal",
        "5x2@400Mbit/s",
        {"h1.eth0": "100Mbit/s", "h2.eth1": "200Mbit/s", "h4.eth0": "300Mbit/s", "h4.eth1": "300Mbit/s"},
    ),
    UntoldState("all rates random", "7x1@400Mbit/s", _random_rates(random.Random(7), 7)),
    UntoldState("8 hosts, healthy", "8x2@100Mbit/s"),
    UntoldState("8 hosts, one NIC at half", "8x2@100Mbit/s", {"h3.eth1": "50Mbit/s"}),
    UntoldState("8 hosts, one NIC down", "8x2@100Mbit/s", {"h3.eth1": "down"}),
)


def random_state(seed: int) -> UntoldState:
    """Three to eight hosts of one to three NICs.

    >>> random_state(1).fabric, random_state(1) == random_state(1)
    ('4x3@200Mbit/s', True)
    """
    rng = random.Random(seed)
    counts = [rng.randint(1, 3) for _ in range(rng.randint(3, 8))]
    nics: dict[str, str] = {}
    for host, count in enumerate(counts):
        for nic in range(max(counts)):
            if nic >= count:
                nics[f"h{host}.eth{nic}"] = "down"
            elif rng.random() < 0.5:
                out, in_ = (round(_RANDOM_MBITS * rng.uniform(_LEAST, 1)) for _ in range(2))
                nics[f"h{host}.eth{nic}"] = f"{out}Mbit/s:{in_}Mbit/s"
    spec = f"{len(counts)}x{max(counts)}@{_RANDOM_MBITS}Mbit/s"
    return UntoldState(f"{RANDOM} {seed}", spec, nics, RANDOM_SIZE_BYTES, with_peers=False)


class UntoldRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A state: its bound, what each undisturbed run took, how the plan was predicted, and which it was.

    `peers_s` is what those of each peer took, `absent` why another was not run; all in seconds. Our job was `repeated`
    so many times because of steal; if the row `is_disturbed`, most runs of the try that counts had too much of it too.
    """

    state: str
    fabric: str
    nics: dict[str, str]
    topology: str
    size_bytes: int
    bound_s: float
    seconds: tuple[float, ...]
    predicted_s: float
    schedule: str
    segments: int
    wrong: int
    peers_s: dict[str, tuple[float, ...]] = {}
    absent: dict[str, str] = {}
    repeated: int = 0
    is_disturbed: bool = False

    @property
    def ratio(self) -> float:
        """The median time over T*."""
        return statistics.median(self.seconds) / self.bound_s

    @property
    def is_random(self) -> bool:
        """Whether it is a random fabric."""
        return self.state.startswith(RANDOM)

    def ratio_of(self, peer: str) -> float:
        """The median time of a peer over T*."""
        return statistics.median(self.peers_s[peer]) / self.bound_s


@dataclass(frozen=True, slots=True)
class Untold(Measured):
    """The rows, the machine and the versions."""

    format: ClassVar[str] = "optcc-untold/4"
    own_path: ClassVar = RECORDS / "untold.json"
    docs_page: ClassVar[str] = "transports.md"

    machine: dict[str, Any]
    versions: dict[str, str]
    rows: tuple[UntoldRow, ...]

    def check_fields(self, check: Check) -> None:
        for number, row in enumerate(self.rows):
            check(f"rows[{number}].bound_s", row.bound_s, row.bound_s > 0, "be above 0")
            for name, seconds in row.peers_s.items():
                check_times(check, f"rows[{number}].peers_s[{name!r}]", seconds)
            check_times(check, f"rows[{number}].seconds", row.seconds)

    def card(self) -> Card:
        peers = sorted({name for row in self.rows for name in row.peers_s})
        rows = tuple(
            (
                row.state,
                row.fabric,
                show_size(row.size_bytes),
                f"{row.bound_s:.3f} s",
                f"{row.ratio:.3f} ({min(row.seconds) / row.bound_s:.3f} to {max(row.seconds) / row.bound_s:.3f})"
                + (", disturbed" if row.is_disturbed else ""),
                *(f"{row.ratio_of(name):.2f}" if name in row.peers_s else "-" for name in peers),
                f"{row.schedule}, {row.segments}",
                str(row.wrong),
            )
            for row in self.rows
        )
        heads = ("state", "hosts", "size", "T*", "ours / T*", *peers, "our plan, segments", "wrong elements")
        return Card("AllReduce by auto over TCP, nothing declared; median times over T*", heads, rows)


def topology_of(standing: FabricState) -> Topology:
    """What emulated hosts carry, rail by rail, in payload bytes: without the headers."""
    servers = tuple(
        Server(
            f"h{host}",
            1,
            tuple(
                Nic(rail, nic.rates.rate_out, nic.rates.rate_in, failed=nic.failure is not None)
                for rail, nic in enumerate(nics)
            ),
        )
        for host, nics in enumerate(standing.nics)
    )
    return Topology(servers, rail_only=True).scaled(1 / Fraction(WIRE_OVERHEAD))


def bound_of(standing: FabricState, size_bytes: int) -> float:
    """T* of an AllReduce on emulated hosts, seconds: certified, rail by rail, without the headers."""
    topology = topology_of(standing)
    wanted = Collective("allreduce", len(topology.servers))
    certificate, _ = certified_bound(topology, size_bytes, wanted, explain_if_pooled(topology, size_bytes, wanted))
    return float(certificate.seconds)


@dataclass(frozen=True)
class PeerPythons:
    """The Pythons of environments with MPICH and with torch, empty where there is none."""

    mpich: str = ""
    torch: str = ""


def measure_state(state: UntoldState, pythons: PeerPythons) -> UntoldRow:
    """One row. Raises RuntimeFault if the command fails."""
    words = ["--transport", "tcp", "--schedule", "auto", "--mode", "out"]
    words += ["-b", str(state.size_bytes), "-n", str(RUNS), "-w", str(WARMUP)]
    rate = state.fabric.partition("@")[2]
    peers = Comparison(state.size_bytes, PEER_RUNS, pythons.mpich, pythons.torch, rate)

    def run_job() -> BenchTiming:
        (row,) = run_bench(fabric, state.name, words, _TIMEOUT_S).rows
        return row

    with Fabric.up(FabricSpec.parse(state.fabric, name=f"untold-{os.getpid()}")) as fabric:
        allow_multipath(fabric)
        for nic, what in state.nics.items():
            befall(fabric, nic, what)
        standing = fabric.state()
        tries = repeat_disturbed(run_job, lambda timing: timing.samples.median_steal)
        if state.with_peers:
            with tempfile.TemporaryDirectory(prefix="optcc-untold-") as folder:
                peers.compare_peers(fabric, state.name, Path(folder))
    row = tries[0]
    assert row.predicted_s is not None
    return UntoldRow(
        *(state.name, state.fabric, dict(state.nics), standing.topology_text(), state.size_bytes),
        bound_s=bound_of(standing, state.size_bytes),
        seconds=tuple(row.samples.undisturbed_s),
        predicted_s=row.predicted_s,
        schedule=row.schedule,
        segments=row.segments,
        wrong=sum(each.wrong for each in tries) + sum(run.wrong for run in peers.runs),
        peers_s={run.contender: tuple(undisturbed(run.seconds, run.steal)) for run in peers.runs},
        absent=peers.absent,
        repeated=len(tries) - 1,
        is_disturbed=row.samples.median_steal > STEAL_MAX,
    )


@record_command(Untold, RecordForm(quick={}))
@click.option("--mpich", default="", envvar="OPTCC_MPICH_PYTHON", help="The Python of an environment with MPICH.")
@click.option("--torch", default="", envvar="OPTCC_TORCH_PYTHON", help="The Python of an environment with torch.")
def command(quick: bool, mpich: str, torch: str, cells: RecordCells) -> Untold:
    """Time AllReduce where nobody declares anything, in a few states and on random hosts; quick: in one, and on one."""
    pythons = PeerPythons(mpich, torch)
    states = [*STATES, *(random_state(SEED + number) for number in range(RANDOM_FABRICS))]
    chosen = [STATES[1], states[-1]] if quick else states
    rows = cells.each({state.name: partial(measure_state, state, pythons) for state in chosen}, UntoldRow)
    return Untold(**head(), rows=tuple(rows))
