"""Ours and peers on the same emulated hosts, interleaved, as one record.

    python -m optcc.experiments.peers_on_fabric [--quick | --long]        (or: make bench)

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

`peers_contenders` says what is compared and how it is started, `peers_team` runs the ranks of one job.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
import numpy as np

from optcc.cli import SizeType, echo_card
from optcc.collective import Collective
from optcc.errors import (
    EXIT_DONE,
    EXIT_REFUTED,
    EnvironmentMissing,
    InputError,
    OptccError,
    RuntimeFault,
)
from optcc.experiments.fabric import WIRE_OVERHEAD, Fabric, FabricSpec, NicRates, can_make_namespaces, nic_address
from optcc.experiments.peers import MPI_RING
from optcc.experiments.peers_contenders import (
    BEDS,
    BEDS_FEW,
    FEW,
    HEALTHY_HOSTS,
    HOSTS,
    HOSTS_MORE,
    LATENCY,
    LEAST,
    LEFT_OUT,
    LEFT_OUT_LEAST,
    LONG,
    NIC_RATES,
    NICS,
    ONE_HOST,
    ONE_NIC,
    OURS_ALL,
    OURS_FEW,
    OURS_STANDARD,
    READY_S,
    STANDARD,
    UNDECLARED,
    Bed,
    Contender,
    PeerJob,
    jobs,
    our_case,
)
from optcc.experiments.peers_rank import plan_of, wires_of
from optcc.experiments.peers_record import (
    AFTER_LOSS,
    Loss,
    PeerComparison,
    PeerRun,
    Session,
    shown_state,
)
from optcc.experiments.peers_team import START_S, Hung, Team, Turn
from optcc.experiments.record import STEAL_MAX, these_versions, this_machine
from optcc.experiments.recorder import run_command
from optcc.planner import prove, verdict_cache
from optcc.runtime.check import expected_output, make_input
from optcc.simulate import simulate
from optcc.topology import Topology
from optcc.units import parse_rate, show_size
from optcc.verify.bounds.closed_forms import allreduce_bound

PATH = Path("results/peers-on-fabric.json")
ROUNDS, ROUNDS_FEW, WARMUP = 5, 3, 1
REPEATS_MAX = 3
"""Times that a run is repeated because of steal; after that it is kept, marked by its steal."""
NEXT_RUNS = 3
DTYPE, REDUCTION = "float32", "sum"
LOST_NIC = "h3.eth1"
LOST_AT = 0.4
"""When the NIC is lost: this share of the contender's own time into the run."""
LOSS_LIMIT_S = 30.0
DEADLINE_S, RINGS_MAX = 60.0, 4
"""A run may take so long, and the time of so many rings on healthy hosts."""
MINUTES_MAX = 30.0
_OVERHEAD = float(Fraction(WIRE_OVERHEAD))
_CONTROL_SHARE_MAX = 0.05
QUICK_BYTES, QUICK_ROUNDS = 8 * 2**20, 2
LONG_BYTES = 256 * 2**20
LOSS = "loss"


@dataclass
class Comparison:
    """What is compared, and the results so far.

    Each contender is timed `rounds` times in a state, after `warmup` runs that do not count, on NICs of `rate`.
    """

    size_bytes: int
    rounds: int
    mpich: str
    torch: str
    rate: str
    warmup: int = WARMUP
    runs: list[PeerRun] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    predicted_s: dict[tuple[str, str], float] = field(default_factory=dict)

    def job_config(self, folder: Path, n_ranks: int) -> dict[str, Any]:
        """The configuration of all ranks of all jobs; inputs and expected results are files in `folder`."""
        inputs = [folder / f"input-{self.size_bytes}-{rank}.npy" for rank in range(n_ranks)]
        wanted = folder / f"wanted-{self.size_bytes}.npy"
        if not wanted.exists():
            count = self.size_bytes // np.dtype(DTYPE).itemsize
            for rank, path in enumerate(inputs):
                np.save(path, make_input(rank, count, DTYPE, REDUCTION))
            np.save(wanted, expected_output(Collective("allreduce", n_ranks), count, DTYPE, REDUCTION, 0)[0])
        ring_s = 2 * self.size_bytes / float(NICS * parse_rate(self.rate))
        deadline_s = DEADLINE_S + RINGS_MAX * ring_s
        return {
            "size_bytes": self.size_bytes,
            "dtype": DTYPE,
            "inputs": [str(path) for path in inputs],
            "wanted": str(wanted),
            "deadline_s": deadline_s,
            "ready_s": READY_S - 5,
        }

    def compare(self, fabric: Fabric, bed: Bed, folder: Path, extent: str = STANDARD) -> None:
        """All contenders in one state of the hosts, interleaved; the hosts are healed at the end."""
        healthy = fabric.topology_text()
        with _in_state(fabric, bed, self.rate):
            topology = fabric.topology_text()
            known = topology if bed.is_declared else healthy
            carried = {STANDARD: OURS_STANDARD, LONG: OURS_ALL, FEW: OURS_FEW, LEAST: OURS_FEW}[extent]
            where = shown_state((fabric.state().spec.hosts, self.size_bytes, bed.name))
            wanted = [
                our_case(name, carrier, known, self.size_bytes) for carrier, names in carried.items() for name in names
            ]
            ours = [case for case in wanted if self._predict(case, where)]
            started, absent = jobs(ours, self.mpich, self.torch, extent)
            config = self.job_config(folder, fabric.state().spec.hosts)
            for name, why in absent.items():
                in_states = {LEFT_OUT: f"{name}: further states", LEFT_OUT_LEAST: f"{name}: {where}"}
                self.absent.setdefault(in_states.get(why, name), why)
            with contextlib.ExitStack() as stack:
                teams = []
                for job in started:
                    try:
                        team = Team(fabric, job, config, folder, bed.declared(self.rate))
                    except RuntimeFault as fault:
                        self.absent |= {f"{case.contender}: {where}": str(fault) for case in job.cases}
                        continue
                    stack.callback(team.end)
                    teams.append(team)
                self._rounds(fabric, bed, topology, teams)

    def _predict(self, case: Contender, where: str) -> bool:
        """Whether there is a plan for it: compiled and verified here, so that ranks find proofs and kernels cached."""
        try:
            plan = plan_of(case.config, self.size_bytes, DTYPE)
            prove(plan, verdict_cache())
        except OptccError as error:
            self.absent[f"{case.contender}: {where}"] = str(error)
            return False
        predicted_s = simulate(plan, wires_of(case.config), model=case.config["ports"]).seconds
        self.predicted_s[case.contender, case.config["topology"]] = predicted_s
        return True

    def _rounds(self, fabric: Fabric, bed: Bed, topology: str, teams: Sequence[Team]) -> None:
        where = shown_state((fabric.state().spec.hosts, self.size_bytes, bed.name))
        tallies = []
        for team in teams:
            for number, case in enumerate(team.job.cases):
                if "absent" in team.made[number]:
                    self.absent[f"{case.contender}: {where}"] = team.made[number]["absent"]
                else:
                    tallies.append(_Tally(team, number, case))
        for round_ in range(self.warmup + self.rounds):
            for tally in [*tallies[round_ % max(1, len(tallies)) :], *tallies[: round_ % max(1, len(tallies))]]:
                if tally.failed:
                    continue
                before = fabric.control_bytes() if round_ == 0 else 0
                if round_ < self.warmup:
                    tally.warm_up()
                else:
                    tally.run()
                if round_ == 0:
                    tally.check_control(fabric.control_bytes() - before, self.size_bytes)
        for tally in tallies:
            if tally.failed or not tally.turns:
                self.absent[f"{tally.case.contender}: {where}"] = tally.failed
            else:
                self.runs.append(self._made(tally, bed.name, topology, fabric.state().spec))

    def _made(self, tally: _Tally, bed: str, topology: str, spec: FabricSpec) -> PeerRun:
        # A plan for other rates has no prediction for these.
        is_for_these = tally.case.config.get("topology") == topology
        wired = Topology.parse(topology).scaled(1 / Fraction(WIRE_OVERHEAD)).with_latency(Fraction(LATENCY))
        turns = tally.turns
        return PeerRun(
            tally.case.contender,
            tally.case.side,
            bed,
            topology,
            spec.hosts,
            spec.nics,
            self.rate,
            self.size_bytes,
            DTYPE,
            tally.case.settings,
            float(allreduce_bound(wired, self.size_bytes).seconds),
            self.predicted_s.get((tally.case.contender, topology)) if is_for_these else None,
            [turn.seconds for turn in turns],
            [turn.steal for turn in turns],
            [turn.cpu_s for turn in turns],
            [turn.busy_s for turn in turns],
            tally.rejected,
            tally.wrong,
        )

    def lose(self, fabric: Fabric, folder: Path) -> None:
        """Fails a NIC during a run of each contender on healthy hosts, then times the next collectives.

        Ours runs a plan for healthy hosts, then one for the NICs that are left.
        """
        healthy = fabric.topology_text()
        where = shown_state((fabric.state().spec.hosts, self.size_bytes, AFTER_LOSS))
        with _in_state(fabric, Bed("", down=(LOST_NIC,)), self.rate):
            left = fabric.topology_text()
        name = "ring, then optimal (tcp)"
        own = (our_case("ring", "tcp", healthy, self.size_bytes), our_case("optimal", "tcp", left, self.size_bytes))
        for case in own:
            self._predict(replace(case, contender=name), where)
        ours = PeerJob(
            "ours", sys.executable, "openmpi", tuple(replace(case, contender=name) for case in own), MPI_RING
        )
        others, _ = jobs((), self.mpich, self.torch)
        for job in (ours, *others):
            try:
                self._lose(fabric, job, folder, left)
            except RuntimeFault as fault:
                self.absent[f"{job.cases[0].contender}: {where}"] = str(fault)
            fabric.heal(LOST_NIC)

    def _lose(self, fabric: Fabric, job: PeerJob, folder: Path, left: str) -> None:
        config = self.job_config(folder, fabric.state().spec.hosts)
        team = Team(fabric, job, config, folder, Bed("").declared(self.rate))
        case = job.cases[0]
        try:
            before_s = min(team.turn(0).seconds for _ in range(1 + WARMUP))
            after_s = LOST_AT * before_s

            def cut() -> Iterator[None]:
                time.sleep(START_S + after_s)
                fabric.fail(LOST_NIC, "down")
                yield

            tally = _Tally(team, len(job.cases) - 1, job.cases[-1])
            run_s: float | None = None
            try:
                lost = team.turn(0, LOSS_LIMIT_S, cut())
                run_s, outcome = lost.seconds, "went on" if not lost.wrong else f"{lost.wrong} wrong elements"
                tally.wrong += lost.wrong
            except Hung:
                outcome = f"hung for {LOSS_LIMIT_S:g} s, ended"
            except RuntimeFault as fault:
                outcome = str(fault)
            if run_s is not None:
                for _ in range(NEXT_RUNS):
                    tally.run()
                if tally.failed:
                    outcome = f"went on, then {tally.failed}"
            spec = fabric.state().spec
            next_ = self._made(tally, AFTER_LOSS, left, spec) if tally.turns and not tally.failed else None
            self.losses.append(
                Loss(
                    case.contender,
                    case.side,
                    spec.hosts,
                    self.size_bytes,
                    before_s,
                    after_s,
                    LOSS_LIMIT_S,
                    run_s,
                    outcome,
                    next_,
                )
            )
        finally:
            team.end()


class _Tally:
    """The turns of one contender in one state of the hosts."""

    def __init__(self, team: Team, number: int, case: Contender) -> None:
        self.team, self.number, self.case = team, number, case
        self.turns: list[Turn] = []
        self.rejected = self.wrong = 0
        self.failed = ""

    def warm_up(self) -> None:
        """An untimed run."""
        turn = self._turn()
        if turn is not None:
            self.wrong += turn.wrong

    def check_control(self, sneaked: int, size_bytes: int) -> None:
        """Rejects a contender whose data went over the control network: `sneaked` bytes in its first run."""
        if not self.failed and sneaked > _CONTROL_SHARE_MAX * size_bytes:
            self.failed = f"{show_size(sneaked)} went over the control network"

    def run(self) -> None:
        """A timed run, repeated up to `REPEATS_MAX` times while steal is too high; keeps the try with the least."""
        tries: list[Turn] = []
        while len(tries) <= REPEATS_MAX:
            turn = self._turn()
            if turn is None:
                return
            self.wrong += turn.wrong
            tries.append(turn)
            if turn.steal <= STEAL_MAX:
                break
        self.rejected += len(tries) - 1
        self.turns.append(min(tries, key=lambda turn: turn.steal))

    def _turn(self) -> Turn | None:
        try:
            return self.team.turn(self.number)
        except RuntimeFault as fault:
            self.failed = str(fault)
            return None


@contextlib.contextmanager
def _in_state(fabric: Fabric, bed: Bed, rate: str) -> Iterator[None]:
    """Sets the hosts to `bed`; heals them at the end."""
    spec = fabric.state().spec
    try:
        for target, share in bed.rates.items():
            each = parse_rate(rate) * share
            fabric.set_rate(target, NicRates(each, each))
        for target in bed.down:
            fabric.fail(target, "down")
        yield
    finally:
        for host in range(spec.hosts):
            fabric.heal(f"h{host}")


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
        Stage(HOSTS_MORE, size_bytes, (ONE_HOST, ONE_NIC, HEALTHY_HOSTS), FEW),
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
        known = (*BEDS, UNDECLARED)
        names = (*(bed.name for bed in known), LOSS)
        for name in self.only:
            if name not in names:
                raise InputError(f"--bed {name!r}: must be one of {'; '.join(names)}")
        if self.extent in (FEW, LEAST) and not self.only:
            raise InputError("--few and --least: go with --bed")
        if self.only:
            beds = tuple(bed for bed in known if bed.name in self.only)
            return (Stage(self.hosts or HOSTS, self.size_bytes, beds, self.extent, LOSS in self.only),)
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
        _OVERHEAD,
        (
            Session(
                ["python", "-m", "optcc.experiments.peers_on_fabric", *sys.argv[1:]],
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


def _show(record: PeerComparison) -> None:
    """All tables of a record, and what was not run."""
    for part in (*record.parts(), record.summary(), *((record.losses_card(),) if record.losses else ())):
        echo_card(part)
        click.echo()
    click.echo(f"T* and predictions have {WIRE_OVERHEAD} bytes on the wire for each byte of payload")
    for name, reason in record.absent.items():
        click.echo(f"not run: {name}: {reason}")
    for past in record.sessions:
        click.echo(f"measured until {past.finished}: {' '.join(past.command)}")


@click.command()
@click.option("--quick", is_flag=True, help="Two rounds of 8 MiB on healthy and degraded hosts, for a smoke test.")
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
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), default=PATH, show_default=True)
@click.option("--join", is_flag=True, help="Keep what the file has of other states, instead of writing it anew.")
@click.option("--json", "as_json", is_flag=True, help="Print the record.")
@click.option("--markdown", is_flag=True, help="Only print the package's record as in docs/fabric.md.")
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
    output: Path,
    join: bool,
    as_json: bool,
    markdown: bool,
) -> int:
    """Compare ours with Open MPI, MPICH and Gloo on emulated hosts, and keep the record."""
    if markdown:
        click.echo(PeerComparison.read().markdown(), nl=False)
        return EXIT_DONE
    reason = can_make_namespaces()
    if reason is not None:
        raise EnvironmentMissing(f"emulated hosts: {reason}")
    extent = LEAST if least else FEW if few else LONG if long else STANDARD
    rounds = rounds or (QUICK_ROUNDS if quick and not only else None)
    options = PeerOptions(extent, rate, rounds, size, only, int(hosts) if hosts else None, mpich, torch, minutes)
    wanted = options.stages(quick)
    before = PeerComparison.read(output) if join else None
    if before is not None:
        before.check_overhead(_OVERHEAD)
    record = measure(wanted, options)
    wrong = record.wrong
    if before is not None:
        record = before.with_newer(record)
    output.parent.mkdir(parents=True, exist_ok=True)
    record.write(output)
    if as_json:
        click.echo(record.to_bytes().decode(), nl=False)
    else:
        _show(record)
    _say(f"Record: {output}")
    return EXIT_REFUTED if wrong else EXIT_DONE


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


if __name__ == "__main__":
    run_command(command)
