"""Ours and peers on the same emulated hosts, interleaved, as one record.

    optcc experiment peers-on-fabric [--quick | --long]        (or: make bench)

Every contender runs once in each round: our schedules over TCP and over MPI, Open MPI's ring over TCP, over UCX and
over MPTCP, MPICH over UCX, and Gloo, each over all NICs and with the algorithm that is its fastest here. Contenders
that need different launchers or environments run in jobs of their own; all jobs are up at the same time, and ranks
without a turn block on a socket (`optcc.experiments.peers_rank`). A run during which the hypervisor took more than
`STEAL_MAX` of the machine is repeated. A NIC is then lost in the middle of a collective, and the next ones are timed.

Two cores carry the traffic of all hosts. Rates are low (`NIC_RATES`) so that processors are not the bottleneck: with 8
hosts at 200 Mbit/s a NIC they would be busy for three quarters of the time, so the rate there is half of that.

A part of the set, or a state that is not in it, is measured with `--hosts` and `--bed`, and joins a record with
`--join`: its states replace those of the record, and each run says in which session it was measured.

Needs root, for the hosts. MPICH and torch live in environments of their own, named by `--mpich` and `--torch`
(a Python each); what is not installed is not run, and the record says so.

`peers_contenders` has the contenders and how they are started, `peers_team` the ranks of one job, `peers_comparison`
the comparison in one state of the hosts; this module has the stages and the command.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from optcc.cli import SizeType
from optcc.errors import EnvironmentMissing, InputError, RuntimeFault
from optcc.experiments.cells import RecordCells
from optcc.experiments.fabric import Fabric, FabricSpec, can_make_namespaces, nic_address
from optcc.experiments.peers_comparison import OVERHEAD, WARMUP, Comparison
from optcc.experiments.peers_contenders import (
    BEDS,
    BEDS_FEW,
    FEW,
    HEALTHY_HOSTS,
    HOSTS,
    HOSTS_MORE,
    LEAST,
    LONG,
    NIC_RATES,
    NICS,
    ONE_HOST,
    ONE_NIC,
    STANDARD,
    Bed,
    late_beds,
)
from optcc.experiments.peers_record import PeerComparison, Session, shown_state
from optcc.experiments.record import these_versions, this_machine
from optcc.experiments.recorder import RecordForm, record_command

PATH = Path("results/peers-on-fabric.json")
ROUNDS, ROUNDS_FEW = 5, 3
MINUTES_MAX = 45.0
QUICK_BYTES, QUICK_ROUNDS = 8 * 2**20, 2
LONG_BYTES = 256 * 2**20
LOSS = "loss"


def allow_multipath(fabric: Fabric) -> None:
    """Registers all NICs of every host as MPTCP endpoints; plain TCP sockets are not affected."""
    spec = fabric.state().spec
    for host in range(spec.hosts):
        lines = ["mptcp limits set subflow 8 add_addr_accepted 8"]
        lines += [
            f"mptcp endpoint add {nic_address(host, nic)} dev eth{nic} signal subflow" for nic in range(spec.nics)
        ]
        subprocess.run(
            fabric.host_command(host, ["ip", "-batch", "-"]),
            input="\n".join(lines) + "\n",
            text=True,
            capture_output=True,
            timeout=10,
            check=False,
        )


@dataclass(frozen=True)
class Stage:
    """States of so many hosts that are compared with messages of one size; `extent` says how much is run there."""

    hosts: int
    size_bytes: int
    beds: tuple[Bed, ...]
    extent: str
    loses: bool = False

    @property
    def is_long(self) -> bool:
        """Whether a run takes many seconds: then three rounds do, and the first needs no warm-up."""
        return self.hosts == HOSTS_MORE or self.size_bytes >= LONG_BYTES

    @property
    def warmup(self) -> int:
        """Untimed runs before the rounds."""
        return 0 if self.is_long else WARMUP

    @property
    def rounds(self) -> int:
        """Timed runs of each contender, unless `--rounds` is given."""
        return ROUNDS if self.extent in (STANDARD, LONG) and not self.is_long else ROUNDS_FEW


def stages(size_bytes: int, extent: str) -> tuple[Stage, ...]:
    """The stages without `--bed`: `extent` is `STANDARD` or `LONG`."""
    if extent == LONG:
        return tuple(
            Stage(hosts, each, BEDS, LONG, loses=hosts == HOSTS)
            for each in (size_bytes, LONG_BYTES)
            for hosts in (HOSTS, HOSTS_MORE)
        )
    return (
        Stage(HOSTS, size_bytes, tuple(bed for bed in BEDS if bed not in BEDS_FEW), STANDARD, loses=True),
        Stage(HOSTS, size_bytes, BEDS_FEW, FEW),
        Stage(HOSTS_MORE, size_bytes, (ONE_HOST, ONE_NIC, HEALTHY_HOSTS, *late_beds(HOSTS_MORE)), FEW),
        Stage(HOSTS, LONG_BYTES, (ONE_HOST,), FEW),
        Stage(HOSTS_MORE, LONG_BYTES, (ONE_HOST, HEALTHY_HOSTS), LEAST),
    )


@dataclass(frozen=True)
class PeerOptions:
    """Options of the command line; see `command`."""

    extent: str
    rate: str
    rounds: int | None
    size_bytes: int
    only: tuple[str, ...]
    hosts: int | None
    mpich: str
    torch: str
    minutes: float

    def stages(self, quick: bool) -> tuple[Stage, ...]:
        """What is compared. Raises InputError for a state that does not exist, or `--few`, `--least` without one."""
        hosts = self.hosts or HOSTS
        there = (*BEDS, *late_beds(hosts))
        names = (*(bed.name for bed in there), LOSS)
        for name in self.only:
            if name not in names:
                raise InputError(f"--bed {name!r}: must be one of {'; '.join(names)}")
        if self.extent in (FEW, LEAST) and not self.only:
            raise InputError("--few and --least: go with --bed")
        if self.only:
            beds = tuple(bed for bed in there if bed.name in self.only)
            return (Stage(hosts, self.size_bytes, beds, self.extent, LOSS in self.only),)
        if quick:
            return stages(QUICK_BYTES, STANDARD)[:1]
        found = stages(self.size_bytes, self.extent)
        return tuple(stage for stage in found if self.hosts is None or stage.hosts == self.hosts)


def measure(wanted: Sequence[Stage], options: PeerOptions) -> PeerComparison:
    """Compares every stage of `wanted` that begins before `options.minutes` are over.

    Raises RuntimeFault if nothing could be run.
    """
    began_s = time.monotonic()

    def in_time(asked: Comparison, hosts: int, what: str) -> bool:
        """Reports the next state; False, with a note in the record, if there is no time for it."""
        spent_s = time.monotonic() - began_s
        title = shown_state((hosts, asked.size_bytes, what))
        if spent_s > 60 * options.minutes:
            asked.absent[title] = f"not begun after {spent_s:.0f} s: --minutes {options.minutes:g}"
            return False
        _say(f"{spent_s:4.0f} s  {title}")
        return True

    found = []
    for stage in wanted:
        rounds, rate = options.rounds or stage.rounds, options.rate or NIC_RATES[stage.hosts]
        asked = Comparison(stage.size_bytes, rounds, options.mpich, options.torch, rate, stage.warmup)
        found.append(asked)
        with _hosts(stage.hosts, rate) as (fabric, folder):
            for bed in stage.beds:
                if in_time(asked, stage.hosts, bed.name):
                    asked.compare(fabric, bed, folder, stage.extent)
            if stage.loses and in_time(asked, stage.hosts, "a NIC lost in mid-run"):
                asked.lose(fabric, folder)
    _say(f"Took {time.monotonic() - began_s:.0f} s.")
    others = {**_versions_of(options.mpich, ("mpich",)), **_versions_of(options.torch, ("torch",))}
    record = PeerComparison(
        f"AllReduce on emulated hosts with {NICS} NICs each",
        OVERHEAD,
        (
            Session(
                ["optcc", *sys.argv[1:]],
                time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
                this_machine(),
                these_versions() | others,
            ),
        ),
        {name: each.absent[name] for each in found for name in sorted(each.absent)},
        tuple(run for each in found for run in each.runs),
        tuple(loss for each in found for loss in each.losses),
    )
    if not record.runs and not record.losses:
        raise RuntimeFault(f"nothing could be run: {next(iter(record.absent.values()))}")
    return record


@record_command(
    PeerComparison,
    RecordForm(quick={}, one_session="--join with --bed adds a state to a record", output=PATH),
)
@click.option("--long", "long", is_flag=True, help="Every state on 4 and 8 hosts, also with 256 MiB; weaker peers too.")
@click.option("--rate", default="", help="Rate of a NIC, each way; if absent, 400Mbit/s, on 8 hosts 100Mbit/s.")
@click.option("--rounds", type=click.IntRange(1), help="Timed runs of each; 5, or 3 in further states.")
@click.option("--size", type=SizeType(), default="64MiB", show_default=True, help="Size of the message.")
@click.option("--bed", "only", multiple=True, help="Only this state of the hosts, or loss; may be repeated.")
@click.option("--hosts", type=click.Choice([str(each) for each in NIC_RATES]), help="Only on so many hosts.")
@click.option("--few", is_flag=True, help="With --bed: only our ring and optimal, Open MPI over TCP, and Gloo.")
@click.option("--least", is_flag=True, help="With --bed: only our ring and optimal, and Gloo.")
@click.option("--mpich", default="", envvar="OPTCC_MPICH_PYTHON", help="The Python of an environment with MPICH.")
@click.option("--torch", default="", envvar="OPTCC_TORCH_PYTHON", help="The Python of an environment with torch.")
@click.option("--minutes", default=MINUTES_MAX, show_default=True, help="After these no further state is begun.")
@click.option("--join", is_flag=True, help="Keep what the file has of other states, instead of writing it anew.")
def command(
    quick: bool,
    long: bool,
    rate: str,
    rounds: int | None,
    size: int,
    only: tuple[str, ...],
    hosts: str | None,
    few: bool,
    least: bool,
    mpich: str,
    torch: str,
    minutes: float,
    join: bool,
    cells: RecordCells,
) -> PeerComparison:
    """Compare ours with Open MPI, MPICH and Gloo on emulated hosts; quick: two rounds of 8 MiB, healthy and degraded.

    The exit code is 1 if an element was wrong.
    """
    reason = can_make_namespaces()
    if reason is not None:
        raise EnvironmentMissing(f"emulated hosts: {reason}")
    extent = LEAST if least else FEW if few else LONG if long else STANDARD
    rounds = rounds or (QUICK_ROUNDS if quick and not only else None)
    options = PeerOptions(extent, rate, rounds, size, only, int(hosts) if hosts else None, mpich, torch, minutes)
    wanted = options.stages(quick)
    output = click.get_current_context().params["output"] or PATH
    before = PeerComparison.read(output) if join else None
    if before is not None:
        before.check_overhead(OVERHEAD)
        cells.join(output)
    record = measure(wanted, options)
    return record if before is None else before.with_newer(record)


def _say(text: str) -> None:
    click.echo(text, err=True)


@contextlib.contextmanager
def _hosts(hosts: int, rate: str) -> Iterator[tuple[Fabric, Path]]:
    """Emulated hosts, and a folder for sockets."""
    spec = FabricSpec.parse(f"{hosts}x{NICS}@{rate}", name=f"peers-{os.getpid()}")
    with tempfile.TemporaryDirectory(prefix="optcc-peers-") as scratch, Fabric.up(spec) as fabric:
        allow_multipath(fabric)
        yield fabric, Path(scratch)


def _versions_of(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Versions of packages in another environment."""
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]), sep=chr(10))"
    if not Path(python).is_file():
        return {}
    done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, timeout=30, check=False)
    return dict(zip(packages, done.stdout.split(), strict=False))
