"""Ours and peers on the same emulated hosts, interleaved, as one record.

    python -m optcc.experiments.peers_on_fabric [--quick | --long]        (or: make bench)

Every contender runs once in each round: our schedules over TCP and over MPI, Open MPI's ring over TCP, over UCX and
over MPTCP, MPICH over UCX, and Gloo, each over all NICs and with the algorithm that is its fastest here. What a
contender is started with differs, so each kind has a job of its own; all jobs stand at the same time, and ranks that
have no turn sleep on a socket (`optcc.experiments.peers_rank`). A run during which the hypervisor took more than
`STEAL_MAX` of the machine is repeated. A NIC is then lost in the middle of a collective, and the next ones are timed.

Two cores move what all hosts send. So that they are not what is measured, rates are low: `NIC_RATES`. On 8 hosts they
would be busy for three quarters of the time at 200 Mbit/s a NIC, so it is half of that there.

A part of the set, or a state that is not in it, is measured with `--hosts` and `--bed`, and joins a record with
`--join`: its states replace those of the record, and each run says in which session it was measured.

Needs root, for the hosts. MPICH and torch live in environments of their own, named by `--mpich` and `--torch`
(a Python each); what is not installed is not run, and the record says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from types import FrameType
from typing import IO, Any

import click
import numpy as np

import optcc
from optcc.cli import SizeType, echo_card
from optcc.collective import Collective
from optcc.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_REFUTED,
    EnvironmentMissing,
    InputError,
    OptccError,
    RuntimeFault,
)
from optcc.experiments.fabric import (
    WIRE_OVERHEAD,
    Fabric,
    FabricSpec,
    NicRates,
    can_make_namespaces,
    control_address,
    find_mpirun,
    mpirun_arguments,
    nic_address,
)
from optcc.experiments.peers import MPI_RING
from optcc.experiments.peers_rank import plan_of, wires_of
from optcc.experiments.peers_record import (
    AFTER_LOSS,
    HEALTHY,
    OURS,
    PEER,
    Loss,
    Losses,
    PeerComparison,
    Run,
    Session,
    Summary,
    shown_state,
)
from optcc.experiments.record import STEAL_MAX, stolen_jiffies, stolen_share, these_versions, this_machine
from optcc.planner import prove, verdict_cache
from optcc.runtime.check import expected_output, make_input
from optcc.simulate import simulate
from optcc.topology import Topology
from optcc.units import parse_rate, show_rate, show_size
from optcc.verify.bounds.closed_forms import allreduce_bound

PATH = Path("results/peers-on-fabric.json")
HOSTS, HOSTS_MORE, NICS = 4, 8, 2
NIC_RATES: Mapping[int, str] = {HOSTS: "400Mbit/s", HOSTS_MORE: "100Mbit/s"}
"""What a healthy NIC carries each way, by number of hosts, unless told otherwise."""
ROUNDS, ROUNDS_FEW, WARMUP = 5, 3, 1
REPEATS_MAX = 3
"""Times that a run is repeated because of steal; after that it is kept, marked by its steal."""
NEXT_RUNS = 3
DTYPE, REDUCTION = "float32", "sum"
LOST_NIC = "h3.eth1"
LOST_AT = 0.4
"""When the NIC is lost: this share of the contender's own time into the run."""
LOSS_LIMIT_S = 30.0
READY_S = 60.0
DEADLINE_S, RINGS_MAX = 60.0, 4
"""A run may take so long, and the time of so many rings on healthy hosts."""
END_S = 10.0
TEAM_S = 3600.0
MINUTES_MAX = 30.0
_START_S = 0.02
_OVERHEAD = float(Fraction(WIRE_OVERHEAD))
_CONTROL_SHARE_MAX = 0.05

QUICK_BYTES, QUICK_ROUNDS = 8 * 2**20, 2
LONG_BYTES = 256 * 2**20
LOSS = "loss"
SCHEDULES = ("ring", "r2ccl-allreduce", "optcc", "optimal")
OURS_ALL: Mapping[str, tuple[str, ...]] = {"tcp": SCHEDULES, "mpi": SCHEDULES}
OURS_STANDARD: Mapping[str, tuple[str, ...]] = {"tcp": SCHEDULES, "mpi": ("ring", "optimal")}
OURS_FEW: Mapping[str, tuple[str, ...]] = {"tcp": ("ring", "optimal")}
"""Which schedules go over which carrier: with --long, otherwise, and in further states."""

SEGMENT_BYTES = 1 << 19
SEGMENTS_MIN, SEGMENTS_MAX = 32, 512

LATENCY = "1/5000"
_UCX = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": ",".join(f"eth{nic}" for nic in range(NICS))}
_ANY_UCX = ("--mca", "pml_ucx_tls", "any", "--mca", "pml_ucx_devices", "any")
"""Open MPI would not take UCX over TCP otherwise."""
_MPTCP_LIBRARIES = ("/usr/lib/x86_64-linux-gnu/mptcpize", "/usr/lib/aarch64-linux-gnu/mptcpize")


# ---- what is compared


@dataclass(frozen=True)
class Bed:
    """A state of the hosts: rates and failures by NIC, set before anything is launched.

    Of rates that are not declared nobody is told: plans are for healthy hosts, and messages divided as for these.
    """

    name: str
    rates: Mapping[str, Fraction] = field(default_factory=dict)
    down: tuple[str, ...] = ()
    is_declared: bool = True

    def declared(self, rate: str) -> str:
        """The rates as OPTCC_NIC_RATES says them."""
        if not self.is_declared:
            return show_rate(parse_rate(rate))
        parts = [f"{target}={show_rate(parse_rate(rate) * share)}" for target, share in self.rates.items()]
        return ",".join([show_rate(parse_rate(rate)), *parts])


HALF, THREE_QUARTERS = Fraction(1, 2), Fraction(3, 4)
HEALTHY_HOSTS = Bed(HEALTHY)
ONE_NIC = Bed("one NIC at half", {"h3.eth1": HALF})
ONE_HOST = Bed("one host at half", {"h3.eth0": HALF, "h3.eth1": HALF})
BEDS_FEW = (
    ONE_HOST,
    Bed("two stragglers", {**ONE_HOST.rates, "h1.eth0": THREE_QUARTERS, "h1.eth1": THREE_QUARTERS}),
    Bed(
        "three unequal stragglers",
        {"h1.eth0": THREE_QUARTERS, "h2.eth1": HALF, "h3.eth0": HALF, "h3.eth1": THREE_QUARTERS},
    ),
)
"""States in which only ring and optimal are compared with two peers, unless with --long."""
BEDS = (HEALTHY_HOSTS, ONE_NIC, Bed("one NIC down", down=("h3.eth1",)), *BEDS_FEW)
UNDECLARED = Bed("one NIC at half, undeclared", ONE_NIC.rates, is_declared=False)
"""State in which rates have to be learnt; measured if asked for."""


@dataclass(frozen=True)
class Case:
    """One contender: how it is called, whose it is, and what its ranks are told to make."""

    contender: str
    side: str
    told: Mapping[str, Any]

    @property
    def settings(self) -> str:
        """What it was told besides its name."""
        left_out = ("schedule", "carrier", "peer", "topology", "wire_overhead", "latency")
        return " ".join(f"{key}={value}" for key, value in self.told.items() if key not in left_out)


@dataclass(frozen=True)
class Job:
    """Contenders that are started the same way: by which Python, with which launcher, arguments and environment."""

    name: str
    python: str
    launcher: str
    cases: tuple[Case, ...]
    extra: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, **given: Any) -> list[str]:
        """The launcher's arguments before the command; see `mpirun_arguments`."""
        if self.launcher == "mpich":
            return mpiexec_arguments(**given)
        words = mpirun_arguments(**given)
        if "UCX_TLS" in self.environment:  # the other messaging layer: its name twice would be refused
            words[words.index("ob1")] = "ucx"
        return words


def mpiexec_arguments(
    *, agent: str, hostfile: str, nics: int, ranks: int, exported: Sequence[str], extra: Sequence[str] = ()
) -> list[str]:
    """The arguments of MPICH's `mpiexec` before the command, of what `mpirun_arguments` is given."""
    del nics
    # It wants one executable for an agent, and hosts without slots.
    door = Path(agent).with_name("door")
    door.write_text(f'#!/bin/sh\nexec /bin/sh {agent} "$@"\n', encoding="ascii")
    door.chmod(0o700)
    listed = Path(hostfile).with_name("mpich-hosts")
    listed.write_text("".join(f"{control_address(host)}\n" for host in range(ranks)), encoding="ascii")
    start = ["-f", str(listed), "-launcher", "ssh", "-launcher-exec", str(door), "-iface", "ctl"]
    return [*start, "-genvlist", ",".join(exported), *extra, "-n", str(ranks)]


OUR_SETTINGS: dict[str, dict[str, Any]] = {
    "ring": {"ports": "fifo", "segments": 8, "slots": 128, "window": 4},
    "r2ccl-allreduce": {"ports": "fifo", "segments": 64, "slots": 128, "window": 4},
    "optcc": {"ports": "fair", "segments": 64, "slots": 2, "window": 4},
    "optimal": {"ports": "fair", "slots": 2, "window": 4},
}
"""The fastest here: the network stores, so ports are fifo; OptCC has lanes for each peer and stage, and `optimal` is
`shares`, a flow for each pair of hosts, with a segment for each half MiB; fewer leave NICs idle on eight hosts, and
more cost more processor time than they save."""


def our_case(schedule: str, carrier: str, topology: str, size_bytes: int) -> Case:
    """One of our schedules for `topology` and messages of `size_bytes`, over `tcp` or over `mpi`."""
    told: dict[str, Any] = {"schedule": schedule, "carrier": carrier, "topology": topology}
    told |= {"wire_overhead": WIRE_OVERHEAD, "latency": LATENCY}
    told |= {"segments": min(SEGMENTS_MAX, max(SEGMENTS_MIN, size_bytes // SEGMENT_BYTES))}
    return Case(f"{schedule} ({carrier})", OURS, {**told, **OUR_SETTINGS[schedule]})


def _library(contender: str) -> Case:
    return Case(contender, PEER, {"peer": "mpi"})


STANDARD, LONG, FEW, LEAST = "standard", "long", "few", "least"
LEFT_OUT = "left out there for the time it takes; --long runs it"
LEFT_OUT_LEAST = "left out there for the time it takes, for Gloo is run; --long runs it"


def jobs(ours: Sequence[Case], mpich: str, torch: str, extent: str = STANDARD) -> tuple[list[Job], dict[str, str]]:
    """Every job that can be run here, and for the others the reason why not."""
    here, mptcp = sys.executable, _mptcp_library()
    over_tcp, ucx = _library("Open MPI ring, TCP"), _library("Open MPI ring, UCX")
    no_mpich = _lacks(mpich, "mpi4py", "a venv with mpich and mpi4py, and --mpich its python")
    no_torch = _lacks(torch, "torch", "a venv with optcc[torch,mpi], and --torch its python")
    no_mptcp = None if mptcp else "no libmptcpwrap: apt-get install mptcpize"
    few = LEFT_OUT if extent in (FEW, LEAST) else None
    gloo_only = extent == LEAST and no_torch is None
    rare = None if extent == LONG else "slower than its ring, which is run; --long runs it"
    one_nic = None if extent == LONG else "its TCP provider uses one NIC, and UCX, which is run, two; --long runs it"
    netmod = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0"}
    preload = {"LD_PRELOAD": mptcp}
    wanted: list[tuple[Job, str | None]] = [
        (Job("open-mpi", here, "openmpi", tuple(ours) if gloo_only else (*ours, over_tcp), MPI_RING), None),
        (Job("open-mpi-ucx", here, "openmpi", (ucx,), (*MPI_RING, *_ANY_UCX), _UCX), few),
        (
            Job("open-mpi-mptcp", here, "openmpi", (_library("Open MPI ring, MPTCP"),), MPI_RING, preload),
            few or no_mptcp,
        ),
        (Job("open-mpi-default", here, "openmpi", (_library("Open MPI default, TCP"),)), rare),
        (
            Job("mpich", mpich, "mpich", (_library("MPICH, UCX"),), (), {"MPIR_CVAR_CH4_NETMOD": "ucx", **_UCX}),
            few or no_mpich,
        ),
        (Job("mpich-ofi", mpich, "mpich", (_library("MPICH, OFI"),), (), netmod), one_nic or no_mpich),
        (Job("gloo", torch, "openmpi", (Case("Gloo", PEER, {"peer": "gloo"}),)), no_torch),
    ]
    absent = {case.contender: reason for job, reason in wanted if reason is not None for case in job.cases}
    if gloo_only:
        absent[over_tcp.contender] = LEFT_OUT_LEAST
    absent |= {"Intel MPI": "proprietary, left out", "NCCL, RCCL": "need a GPU on every host"}
    return [job for job, reason in wanted if reason is None], absent


def _lacks(python: str, package: str, how: str) -> str | None:
    """Why a peer cannot be run by that Python, or None."""
    if not python:
        return f"not installed: {how}"
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        done = subprocess.run([python, "-c", code], timeout=READY_S, check=False, capture_output=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python}: {error}"
    return f"{python} has no {package}" if done.returncode else None


def _mptcp_library() -> str:
    """The library that makes TCP sockets multipath ones, or nothing."""
    found = (path for folder in _MPTCP_LIBRARIES for path in Path(folder).glob("libmptcpwrap.so.*"))
    return str(next(found, ""))


# ---- a job and its turns


@dataclass(frozen=True)
class Turn:
    """What one run of one contender gave."""

    seconds: float
    steal: float
    cpu_s: float
    busy_s: float
    wrong: int


class Hung(RuntimeFault):
    """A contender that did not end within its time, or whose process ended."""


class Team:
    """The ranks of one job, launched, connected and made; each `turn` runs one of its cases at all of them."""

    def __init__(self, fabric: Fabric, job: Job, told: Mapping[str, Any], folder: Path, rates: str) -> None:
        self.job = job
        self.n_ranks = fabric.state().spec.hosts
        path = folder / f"{job.name}.sock"
        path.unlink(missing_ok=True)
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(path))
        self._door.listen(self.n_ranks)
        self._wires: list[socket.socket] = []
        self._files: list[IO[str]] = []
        self._said = ""
        environment = {
            "PYTHONPATH": str(Path(optcc.__file__).resolve().parents[1]),
            "OPTCC_SOCKET_IFNAME": "eth",
            "OPTCC_NIC_RATES": rates,
            "VIRTUAL_ENV": "",
            **job.environment,
        }
        self._thread = threading.Thread(
            target=self._run, args=(fabric, str(path), environment), name=job.name, daemon=True
        )
        self._thread.start()
        try:
            self._accept()
            everyone = self._ask(json.dumps({**told, "cases": [case.told for case in job.cases]}), READY_S)
            self._limit_s = float(told["deadline_s"])
        except BaseException:
            self.end()
            raise
        first = next(each for each in everyone if each["rank"] == 0)
        self.made: list[dict[str, str]] = first["cases"]

    def _run(self, fabric: Fabric, path: str, environment: Mapping[str, str]) -> None:
        launcher = "mpiexec" if self.job.launcher == "mpich" else "mpirun"
        beside = Path(self.job.python).with_name(launcher)
        try:
            result = fabric.run(
                [self.job.python, "-m", "optcc.experiments.peers_rank", path],
                mpirun=str(beside) if beside.exists() else find_mpirun(),
                arguments=self.job.arguments,
                mpi_args=self.job.extra,
                timeout_s=TEAM_S,
                env=environment,
                capture=True,
            )
            self._said = (result.stderr or result.stdout).strip()
        except OptccError as error:
            self._said = str(error)

    def _accept(self) -> None:
        deadline_s = time.monotonic() + READY_S
        self._door.settimeout(0.2)
        while len(self._wires) < self.n_ranks:
            try:
                wire = self._door.accept()[0]
            except TimeoutError:
                if not self._thread.is_alive() or time.monotonic() > deadline_s:
                    raise Hung(f"did not start: {_last_words(self._said)}") from None
                continue
            wire.setblocking(True)
            self._wires.append(wire)
            self._files.append(wire.makefile("r", encoding="utf-8"))

    def _tell(self, line: str) -> None:
        for wire in self._wires:
            wire.sendall(line.encode() + b"\n")

    def _hear(self, limit_s: float) -> list[dict[str, Any]]:
        """One line of each rank; raises Hung if one is not there in time."""
        deadline_s = time.monotonic() + limit_s
        heard = []
        for wire, file in zip(self._wires, self._files, strict=True):
            wire.settimeout(max(0.01, deadline_s - time.monotonic()))
            try:
                line = file.readline()
            except TimeoutError:
                raise Hung(f"no answer within {limit_s:g} s") from None
            except OSError:
                line = ""
            if not line:
                self._thread.join(END_S)
                raise Hung(f"ended: {_last_words(self._said)}")
            heard.append(json.loads(line))
        return heard

    def _ask(self, line: str, limit_s: float) -> list[dict[str, Any]]:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._tell(line)
        return self._hear(limit_s)

    def turn(self, number: int, limit_s: float | None = None, during: Iterator[None] | None = None) -> Turn:
        """Runs case `number` once; `during` is advanced once the run has begun.

        Raises Hung if it does not end within `limit_s` (None: the deadline that all were told), RuntimeFault with what
        a rank said if it failed.
        """
        limit_s = self._limit_s if limit_s is None else limit_s
        self._ask(json.dumps({"prepare": number}), READY_S)
        stolen, busy = stolen_jiffies(), busy_jiffies()
        start_s = time.perf_counter() + _START_S
        self._tell(json.dumps({"turn": number, "start_s": start_s, "deadline_s": limit_s + 1}))
        if during is not None:
            next(during, None)
        said = self._hear(limit_s)
        steal = stolen_share(stolen, stolen_jiffies())
        busy_s = (busy_jiffies() - busy) / os.sysconf("SC_CLK_TCK")
        wrong = sum(each["wrong"] for each in self._hear(READY_S))
        failed = [each["error"] for each in said if "error" in each]
        if failed:
            raise RuntimeFault(failed[0])
        seconds = max(each["end_s"] for each in said) - start_s
        return Turn(seconds, steal, sum(each["cpu_s"] for each in said), busy_s, wrong)

    def end(self) -> None:
        """The ranks end; one that hangs is ended by its own watchdog, or with the run's."""
        with contextlib.suppress(OSError):
            self._tell(json.dumps({"end": True}))
        self._thread.join(END_S)
        for file in self._files:
            file.close()
        for wire in self._wires:
            wire.close()
        self._door.close()


def _last_words(said: str) -> str:
    """What names the cause in what a job has said: the last line that is an error, or the last one."""
    lines = [line.strip() for line in said.splitlines() if line.strip(" -")]
    errors = [line for line in lines if re.match(r"(optcc: |[A-Za-z_.]*(Error|Fault|Missing|Exception)\b)", line)]
    return re.sub(r"\s+", " ", next(iter(reversed(errors or lines)), "without a word"))[:200]


def busy_jiffies() -> int:
    """Processor time of this machine so far that was neither idle nor stolen."""
    fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:8]
    user, nice, system, _, _, irq, softirq = (int(field) for field in fields)
    return user + nice + system + irq + softirq


# ---- a comparison


@dataclass
class Comparison:
    """What has been asked for, and what it has given so far.

    Each contender is timed `rounds` times in a state, after `warmup` runs that do not count, on NICs of `rate`.
    """

    size_bytes: int
    rounds: int
    mpich: str
    torch: str
    rate: str
    warmup: int = WARMUP
    runs: list[Run] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    predicted_s: dict[tuple[str, str], float] = field(default_factory=dict)

    def told(self, folder: Path, n_ranks: int) -> dict[str, Any]:
        """What all ranks of all jobs are told; inputs and what they must end with are in files in `folder`."""
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
            told = self.told(folder, fabric.state().spec.hosts)
            for name, why in absent.items():
                in_states = {LEFT_OUT: f"{name}: further states", LEFT_OUT_LEAST: f"{name}: {where}"}
                self.absent.setdefault(in_states.get(why, name), why)
            with contextlib.ExitStack() as stack:
                teams = []
                for job in started:
                    try:
                        team = Team(fabric, job, told, folder, bed.declared(self.rate))
                    except RuntimeFault as fault:
                        self.absent |= {f"{case.contender}: {where}": str(fault) for case in job.cases}
                        continue
                    stack.callback(team.end)
                    teams.append(team)
                self._rounds(fabric, bed, topology, teams)

    def _predict(self, case: Case, where: str) -> bool:
        """Whether there is a plan for it. Proofs and compiled loops are kept for the ranks, which all need them."""
        try:
            plan = plan_of(case.told, self.size_bytes, DTYPE)
            prove(plan, verdict_cache())
        except OptccError as error:
            self.absent[f"{case.contender}: {where}"] = str(error)
            return False
        predicted_s = simulate(plan, wires_of(case.told), model=case.told["ports"]).seconds
        self.predicted_s[case.contender, case.told["topology"]] = predicted_s
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

    def _made(self, tally: _Tally, bed: str, topology: str, spec: FabricSpec) -> Run:
        # A plan for other rates has no prediction for these.
        is_for_these = tally.case.told.get("topology") == topology
        wired = Topology.parse(topology).scaled(1 / Fraction(WIRE_OVERHEAD)).with_latency(Fraction(LATENCY))
        turns = tally.turns
        return Run(
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
        """Each contender on healthy hosts loses a NIC in mid-run; then the next collectives, on what is left.

        Ours runs a plan for healthy hosts, and after it one for those that are left.
        """
        healthy = fabric.topology_text()
        where = shown_state((fabric.state().spec.hosts, self.size_bytes, AFTER_LOSS))
        with _in_state(fabric, Bed("", down=(LOST_NIC,)), self.rate):
            left = fabric.topology_text()
        name = "ring, then optimal (tcp)"
        own = (our_case("ring", "tcp", healthy, self.size_bytes), our_case("optimal", "tcp", left, self.size_bytes))
        for case in own:
            self._predict(replace(case, contender=name), where)
        ours = Job("ours", sys.executable, "openmpi", tuple(replace(case, contender=name) for case in own), MPI_RING)
        others, _ = jobs((), self.mpich, self.torch)
        for job in (ours, *others):
            try:
                self._lose(fabric, job, folder, left)
            except RuntimeFault as fault:
                self.absent[f"{job.cases[0].contender}: {where}"] = str(fault)
            fabric.heal(LOST_NIC)

    def _lose(self, fabric: Fabric, job: Job, folder: Path, left: str) -> None:
        told = self.told(folder, fabric.state().spec.hosts)
        team = Team(fabric, job, told, folder, Bed("").declared(self.rate))
        case = job.cases[0]
        try:
            before_s = min(team.turn(0).seconds for _ in range(1 + WARMUP))
            after_s = LOST_AT * before_s

            def cut() -> Iterator[None]:
                time.sleep(_START_S + after_s)
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

    def __init__(self, team: Team, number: int, case: Case) -> None:
        self.team, self.number, self.case = team, number, case
        self.turns: list[Turn] = []
        self.rejected = self.wrong = 0
        self.failed = ""

    def warm_up(self) -> None:
        """A run that does not count."""
        turn = self._turn()
        if turn is not None:
            self.wrong += turn.wrong

    def check_control(self, sneaked: int, size_bytes: int) -> None:
        """Data must not sneak through the control network, which has carried `sneaked` bytes meanwhile."""
        if not self.failed and sneaked > _CONTROL_SHARE_MAX * size_bytes:
            self.failed = f"{show_size(sneaked)} went over the control network"

    def run(self) -> None:
        """A run that counts, repeated while the hypervisor disturbs it, the least disturbed one kept."""
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
    """The hosts as `bed` says, for a while."""
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
    """Every host may use all its NICs in one multipath connection; other sockets do not notice."""
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
        """Whether a run takes many seconds: then three do, and what only the first one has to do is little of it."""
        return self.hosts == HOSTS_MORE or self.size_bytes >= LONG_BYTES

    @property
    def warmup(self) -> int:
        """How many runs do not count."""
        return 0 if self.is_long else WARMUP

    @property
    def rounds(self) -> int:
        """How often each contender is timed, unless told otherwise."""
        return ROUNDS if self.extent in (STANDARD, LONG) and not self.is_long else ROUNDS_FEW


def stages(size_bytes: int, extent: str) -> tuple[Stage, ...]:
    """What is compared unless told otherwise: `extent` is `STANDARD` or `LONG`."""
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
    known = (*BEDS, UNDECLARED)
    names = (*(bed.name for bed in known), LOSS)
    for name in only:
        if name not in names:
            raise InputError(f"--bed {name!r}: must be one of {'; '.join(names)}")
    if (few or least) and not only:
        raise InputError("--few and --least: go with --bed")
    before = PeerComparison.read(output) if join else None
    if before is not None:
        before.check_overhead(_OVERHEAD)
    if only:
        extent = LEAST if least else FEW if few else LONG if long else STANDARD
        beds = tuple(bed for bed in known if bed.name in only)
        wanted: tuple[Stage, ...] = (Stage(int(hosts or HOSTS), size, beds, extent, LOSS in only),)
    elif quick:
        wanted, rounds = stages(QUICK_BYTES, STANDARD)[:1], rounds or QUICK_ROUNDS
    else:
        wanted = stages(size, LONG if long else STANDARD)
        wanted = tuple(each for each in wanted if hosts is None or each.hosts == int(hosts))
    sets = [
        Comparison(
            each.size_bytes,
            rounds or each.rounds,
            mpich,
            torch,
            rate or NIC_RATES[each.hosts],
            each.warmup,
        )
        for each in wanted
    ]
    began = time.monotonic()

    def in_time(asked: Comparison, hosts: int, what: str) -> bool:
        """Says what is next, or in the record that there was no time for it."""
        spent_s = time.monotonic() - began
        title = shown_state((hosts, asked.size_bytes, what))
        if spent_s > 60 * minutes:
            asked.absent[title] = f"not begun after {spent_s:.0f} s: --minutes {minutes:g}"
            return False
        _say(f"{spent_s:4.0f} s  {title}")
        return True

    for each, asked in zip(wanted, sets, strict=True):
        with _hosts(each.hosts, asked.rate) as (fabric, folder):
            for bed in each.beds:
                if in_time(asked, each.hosts, bed.name):
                    asked.compare(fabric, bed, folder, each.extent)
            if each.loses and in_time(asked, each.hosts, "a NIC lost in mid-run"):
                asked.lose(fabric, folder)
    session = Session(
        ["python", "-m", "optcc.experiments.peers_on_fabric", *sys.argv[1:]],
        time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        this_machine(),
        {**these_versions(), **_versions_of(mpich, ("mpich",)), **_versions_of(torch, ("torch",))},
    )
    record = PeerComparison(
        f"AllReduce on emulated hosts with {NICS} NICs each",
        _OVERHEAD,
        (session,),
        {name: each.absent[name] for each in sets for name in sorted(each.absent)},
        tuple(run for each in sets for run in each.runs),
        tuple(loss for each in sets for loss in each.losses),
    )
    if not record.runs and not record.losses:
        raise RuntimeFault(f"nothing could be run: {next(iter(record.absent.values()))}")
    wrong = record.wrong
    if before is not None:
        record = before.with_newer(record)
    output.parent.mkdir(parents=True, exist_ok=True)
    record.write(output)
    if as_json:
        click.echo(record.to_bytes().decode(), nl=False)
    else:
        for part in record.parts():
            echo_card(part)
            click.echo()
        echo_card(Summary(record))
        click.echo()
        if record.losses:
            echo_card(Losses(record.losses))
            click.echo()
        click.echo(f"T* and predictions have {WIRE_OVERHEAD} bytes on the wire for each byte of payload")
        for name, reason in record.absent.items():
            click.echo(f"not run: {name}: {reason}")
        for past in record.sessions:
            click.echo(f"measured until {past.finished}: {' '.join(past.command)}")
    _say(f"Took {time.monotonic() - began:.0f} s. Record: {output}")
    return EXIT_REFUTED if wrong else EXIT_DONE


def _say(text: str) -> None:
    click.echo(text, err=True)


@contextlib.contextmanager
def _hosts(hosts: int, rate: str) -> Iterator[tuple[Fabric, Path]]:
    """Hosts for a while, and a folder for sockets."""
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


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    """The command line; an error is one line, and an exit code. Told to end, it takes the hosts down first."""
    signal.signal(signal.SIGTERM, _leave)
    try:
        code = command(standalone_mode=False)
    except (OptccError, click.ClickException) as error:
        said = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(f"optcc: {said}", err=True)
        code = getattr(error, "exit_code", EXIT_BAD_INPUT)
    except (KeyboardInterrupt, click.Abort):
        click.echo("optcc: interrupted", err=True)
        code = EXIT_INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    main()
