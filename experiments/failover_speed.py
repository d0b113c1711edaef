"""What the failure of a NIC costs a collective that is under way, on emulated hosts, as a record.

    optcc experiment failover-speed        (a hundred failures, in about five minutes)

Three hosts of two NICs repeat a ring of 8 MiB over the TCP transport. At a random moment of a run one NIC of one host
fails, in one of seven ways; the next run starts with the failed NIC; then it is healed, and runs are repeated until
they are as fast as before. Every result is compared bit by bit.

The *stall* of a run is what its bandwidths do not explain. With H the time of a healthy run and L that of the next one,
both medians, a failure at the time t has left the share 1 - t/H to be done at the pace of L, so

    stall = run - t - (1 - t/H) L

A failure is triggered by a program that is already loaded and waits for its last line of input. `blur_s` is how long it
then takes to return; t is the middle of that interval. The record is a file of its own format,
`optcc-failover-speed/1`. Needs root, for the hosts.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import secrets
import select
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import IO, Any, ClassVar, Final

import click
import msgspec
import numpy as np

import optcc
from optcc.errors import EXIT_DONE, EXIT_REFUTED, OptccError, RuntimeFault
from optcc.experiments.fabric import (
    WIRE_OVERHEAD,
    Fabric,
    FabricSpec,
    NicRates,
    NicTarget,
    blackhole_rules,
    control_address,
    core_namespace,
    core_port,
    exact_rate,
    host_namespace,
    nic_address,
    shaper_line,
)
from optcc.experiments.fabric.programs import system_path
from optcc.experiments.rank_lines import RankLines
from optcc.experiments.record import RECORDS, STEAL_MAX, Check, stolen_jiffies, stolen_share
from optcc.experiments.recorder import IN_TURNS, Measured, RecordForm, head, record_command, run_command
from optcc.plan import Plan
from optcc.planner import build_plan
from optcc.runtime.exact_inputs import make_input, wrong_elements
from optcc.runtime.executor import Executor
from optcc.runtime.nics import HostNic
from optcc.runtime.rendezvous import at_address
from optcc.runtime.transports.tcp import TcpTransport
from optcc.show import Card
from optcc.topology import Topology
from optcc.units import parse_rate, show_size
from optcc.verify.bounds.predictions import ring
from optcc.verify.plan import verify_plan

HOSTS, NICS, NIC_RATE = 3, 2, "200Mbit/s"
SIZE_BYTES, SEGMENTS = 8 * 2**20, 4
FAILURES, SEED = 15, 1
DEGRADED: Final = Fraction(1, 4)
"""What is left of the rate of a NIC that is degraded."""
LEFT: Final[Mapping[str, Fraction]] = {
    "down": Fraction(0),
    "carrier": Fraction(0),
    "blackhole": Fraction(0),
    "blackhole-out": Fraction(0),
    "blackhole-in": Fraction(0),
    "reset": Fraction(1),
    "degraded": DEGRADED,
}
"""For each kind of failure the share of the NIC's rate that is left."""
KINDS: Final = tuple(LEFT)
NOTHING: Final = "nothing"
GOALS: Final[Mapping[str, tuple[float, float]]] = {
    "down": (0.012, 0.050),
    "carrier": (0.012, 0.050),
    "blackhole": (0.150, 0.150),
    "blackhole-out": (0.150, 0.150),
    "blackhole-in": (0.150, 0.150),
}
"""Goals for the stall: median and 99th percentile, seconds."""
MOMENTS: Final = (0.05, 0.9)
"""The moment of a failure, as a share of a healthy run, is drawn between these."""
HEALTHY_RUNS = 5
BACK_SHARE: Final = 1.15
"""The NIC counts as used again once a run takes at most this many times the healthy time."""
BACK_RUNS_MAX = 60
_PORT: Final = 5100
_START_S: Final = 0.03
_IDLE_S: Final = 0.01
_READY_S: Final = 60.0
_RUN_S: Final = 20.0


# --- the record -------------------------------------------------------------------------------------------------------


class Trial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One failure: its kind and NIC, its moment in the run, and the times of this and the next run; seconds.

    `blur_s` is the uncertainty of the moment, `back_s` the time from healing until the NIC was used again, `steal` the
    hypervisor's share of the machine during the run; `wrong` counts elements over all runs of the trial and all ranks.
    """

    kind: str
    nic: str
    at_s: float
    blur_s: float
    run_s: float
    next_s: float
    back_s: float
    steal: float
    wrong: int


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that the given share of all values does not exceed.

    >>> percentile([3.0, 1.0, 2.0], 0.5), percentile([3.0, 1.0, 2.0], 0.99)
    (2.0, 3.0)
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True)
class FailoverSpeed(Measured):
    """All trials, and the times of healthy runs between them."""

    format: ClassVar[str] = "optcc-failover-speed/1"
    own_path: ClassVar[Path] = RECORDS / "failover-speed.json"
    docs_page: ClassVar[str] = "transports.md"

    hosts: int
    nics: int
    nic_rate: str
    size_bytes: int
    seed: int
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    healthy_s: tuple[float, ...]
    trials: tuple[Trial, ...]

    def check_fields(self, check: Check) -> None:
        good = bool(self.healthy_s) and all(0 < each < math.inf for each in self.healthy_s)
        check("healthy_s", self.healthy_s, good, "be one or more, above zero")
        for number, trial in enumerate(self.trials):
            where = f"trials[{number}]"
            check(f"{where}.kind", trial.kind, trial.kind in KINDS, f"be one of {', '.join(KINDS)}")
            for label in ("at_s", "run_s", "next_s"):
                value = getattr(trial, label)
                check(f"{where}.{label}", value, 0 < value < math.inf, "be above zero")
            check(f"{where}.at_s", trial.at_s, trial.at_s < trial.run_s, f"be within the run of {trial.run_s} s")
            check(f"{where}.wrong", trial.wrong, trial.wrong >= 0, "not be negative")

    @property
    def wrong(self) -> int:
        """Wrong elements over all runs and ranks."""
        return sum(trial.wrong for trial in self.trials)

    def of(self, kind: str) -> tuple[Trial, ...]:
        """The trials of one kind that the hypervisor left alone; all of them if it disturbed all."""
        trials = tuple(trial for trial in self.trials if trial.kind == kind)
        return tuple(trial for trial in trials if trial.steal <= STEAL_MAX) or trials

    def next_s(self, kind: str) -> float:
        """The next run's median."""
        return statistics.median(trial.next_s for trial in self.of(kind))

    def stalls_s(self, kind: str) -> list[float]:
        """The stall of each run of a kind, as the module defines it."""
        healthy_s = statistics.median(self.healthy_s)
        if kind == NOTHING:
            return [each - healthy_s for each in self.healthy_s]
        left_s = self.next_s(kind)
        return [trial.run_s - trial.at_s - max(0.0, 1 - trial.at_s / healthy_s) * left_s for trial in self.of(kind)]

    def by_rates_s(self, kind: str) -> float:
        """The time of a ring at the rates that remain after a failure of this kind, headers included."""
        rate = parse_rate(self.nic_rate)
        left = rate * (self.nics - 1 + LEFT.get(kind, Fraction(1)))
        topology = Topology.parse(f"{self.hosts}@{exact_rate(rate * self.nics)},0={exact_rate(left)}")
        return float(ring(topology, self.size_bytes) * Fraction(WIRE_OVERHEAD))

    def misses(self) -> list[str]:
        """The goals that this record does not reach, a sentence each."""
        found = [f"{self.wrong} wrong elements"] if self.wrong else []
        for kind, goals in GOALS.items():
            if not self.of(kind):
                continue
            stalls_s = self.stalls_s(kind)
            for name, share, goal_s in (("median", 0.5, goals[0]), ("99 %", 0.99, goals[1])):
                value_s = percentile(stalls_s, share)
                if value_s > goal_s:
                    found.append(f"{kind}: stall, {name}: {1e3 * value_s:.0f} ms, above {1e3 * goal_s:.0f} ms")
        return found

    def card(self) -> Card:
        rows = []
        for kind in (NOTHING, *KINDS):
            if kind != NOTHING and not self.of(kind):
                continue
            stalls_s = self.stalls_s(kind)
            next_s = statistics.median(self.healthy_s) if kind == NOTHING else self.next_s(kind)
            back = "-" if kind == NOTHING else _ms(statistics.median(trial.back_s for trial in self.of(kind)))
            rows.append(
                (
                    kind,
                    f"{len(stalls_s)}",
                    _ms(statistics.median(stalls_s)),
                    _ms(percentile(stalls_s, 0.99)),
                    _ms(next_s),
                    _ms(self.by_rates_s(kind)),
                    back,
                )
            )
        title = f"A NIC fails in mid-run: ring of {show_size(self.size_bytes)}, {self.hosts} hosts"
        columns = ("what fails", "n", "stall: median", "99 %", "next run", "by the rates", "healed: in use after")
        return Card(f"{title} of {self.nics} NICs of {self.nic_rate}", columns, tuple(rows))

    def remarks(self) -> list[str]:
        return [f"missed: {miss}" for miss in self.misses()]

    @property
    def exit_code(self) -> int:
        return EXIT_REFUTED if self.wrong else EXIT_DONE


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


# --- a rank -----------------------------------------------------------------------------------------------------------


def _plan(n_ranks: int, size_bytes: int) -> Plan:
    return build_plan("ring", Topology.parse(f"{n_ranks}@1GB/s"), size_bytes, segments=SEGMENTS)


def _rank(wire: socket.socket, channel: IO[str]) -> None:
    """One rank: for each line (a start time) runs once and answers with its end and the number of wrong elements.

    The first line is its configuration.
    """
    config = json.loads(channel.readline())
    rank, n_ranks, size_bytes = int(config["rank"]), int(config["hosts"]), int(config["size_bytes"])
    nics = [HostNic(f"eth{nic}", nic_address(rank, nic)) for nic in range(int(config["nics"]))]
    meet = at_address((control_address(0), _PORT), rank, n_ranks, bytes.fromhex(config["secret"]), timeout_s=_READY_S)
    transport = TcpTransport(meet, nics)
    plan = _plan(n_ranks, size_bytes)
    executor = Executor(plan, rank, transport, verify_plan(plan), deadline_s=_RUN_S)
    send, recv = make_input(rank, size_bytes // 4, "float32", "sum"), np.empty(size_bytes // 4, np.float32)

    def say(value: Mapping[str, Any]) -> None:
        channel.write(json.dumps(value) + "\n")
        channel.flush()

    say({})
    for line in _lines(wire, channel, transport):
        recv.fill(np.nan)
        time.sleep(max(0.0, float(line) - time.monotonic()))
        try:
            executor.all_reduce(send, recv)
        except OptccError as error:
            say({"error": f"{type(error).__name__}: {error}"})
            break
        say({"end_s": time.monotonic(), "wrong": wrong_elements(plan, rank, recv)})
    transport.close()


def _lines(wire: socket.socket, channel: IO[str], transport: TcpTransport) -> Iterator[str]:
    """The lines of the channel. Polls the transport while waiting: if a NIC fails just as this rank finishes, a peer
    may still need an acknowledgement that was lost with it."""
    while True:
        while not select.select([wire], [], [], _IDLE_S)[0]:
            # A fault is reported by the next run; after the last run peers may already have left.
            with contextlib.suppress(OptccError):
                transport.poll(0.0)
        line = channel.readline()
        if not line:
            return
        yield line


class _Job:
    """A rank on every host, each connected by a socket pair. Raises RuntimeFault if one does not start, or fails."""

    def __init__(self, fabric: Fabric, size_bytes: int) -> None:
        spec = fabric.state().spec
        self.wrong = 0
        self._stack = contextlib.ExitStack()
        self._lines = RankLines()
        self._stack.callback(self._lines.close)
        secret = secrets.token_hex(32)
        try:
            for rank in range(spec.hosts):
                config = {"rank": rank, "hosts": spec.hosts, "nics": spec.nics, "size_bytes": size_bytes}
                self._start(fabric, rank, config, secret)
            self._lines.hear(_READY_S)
        except BaseException:
            self.end()
            raise

    def _start(self, fabric: Fabric, rank: int, config: Mapping[str, Any], secret: str) -> None:
        own, its = socket.socketpair()
        self._lines.add(own)
        with its:
            argv = [sys.executable, "-m", "optcc.experiments.failover_speed", "--rank"]
            process = subprocess.Popen(
                fabric.host_command(rank, argv),
                stdin=its.fileno(),
                stdout=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": str(Path(optcc.__file__).resolve().parents[1])},
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        # Over the socket: a command line is visible to every user of the machine.
        own.sendall(json.dumps({**config, "secret": secret}).encode() + b"\n")

    def run(self, during: Callable[[float], object] | None = None) -> float:
        """Seconds of one run, of the slowest rank; `during` is called with the moment at which it begins."""
        start_s = time.monotonic() + _START_S
        self._lines.tell(start_s)
        if during is not None:
            during(start_s)
        said = self._lines.hear(_RUN_S + 5)
        failed = [each["error"] for each in said if "error" in each]
        if failed:
            raise RuntimeFault(failed[0])
        self.wrong += sum(int(each["wrong"]) for each in said)
        return float(max(each["end_s"] for each in said)) - start_s

    def end(self) -> None:
        """Kills the ranks and closes the sockets."""
        self._stack.close()


# --- failures ---------------------------------------------------------------------------------------------------------


def triggers(fabric: Fabric, kind: str, target: NicTarget) -> list[tuple[list[str], str]]:
    """The programs that make a NIC fail, each with the input that triggers it.

    A reset is local to the host: it kills every established connection of the NIC and keeps the listeners.
    """
    assert target.nic is not None
    host, core = host_namespace(fabric.name, target.host), core_namespace(fabric.name)
    nic, port = f"eth{target.nic}", core_port(target.host, target.nic)
    if kind == "down":
        return [(["ip", "-n", host, "-batch", "-"], f"link set {nic} down\n")]
    if kind == "carrier":
        return [(["ip", "-n", core, "-batch", "-"], f"link set {port} down\n")]
    if kind == "reset":
        kill = f"read -r _; exec ss -K -t state established src {nic_address(target.host, target.nic)}"
        return [(["ip", "netns", "exec", host, "/bin/sh", "-c", kill], "\n")]
    if kind == "degraded":
        rates = fabric.state().spec.rates[target.host][target.nic]
        less = NicRates(rates.rate_out * DEGRADED, rates.rate_in * DEGRADED)
        return [
            (["tc", "-n", host, "-batch", "-"], shaper_line(nic, less.bits_out) + "\n"),
            (["tc", "-n", core, "-batch", "-"], shaper_line(port, less.bits_in) + "\n"),
        ]
    rules = blackhole_rules(target.host, target.nic, kind)
    return [(["ip", "netns", "exec", core, "nft", "-f", "-"], rules)]


@contextlib.contextmanager
def _armed(commands: Sequence[tuple[list[str], str]]) -> Iterator[Callable[[float], tuple[float, float]]]:
    """Starts the programs; the result triggers them at a moment and returns (when it happened, its uncertainty)."""
    environment = os.environ | {"PATH": system_path(), "LC_ALL": "C"}
    with contextlib.ExitStack() as stack:
        waiting = []
        for argv, _ in commands:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            waiting.append(process)

        def fire(moment_s: float) -> tuple[float, float]:
            time.sleep(max(0.0, moment_s - time.monotonic()))
            began_s = time.monotonic()
            for process, (_, text) in zip(waiting, commands, strict=True):
                assert process.stdin is not None
                process.stdin.write(text.encode())
                process.stdin.close()
            for process, (argv, _) in zip(waiting, commands, strict=True):
                if process.wait(_RUN_S):
                    assert process.stderr is not None
                    said = process.stderr.read().decode(errors="replace").strip()
                    raise RuntimeFault(f"{shlex.join(argv)}: {said}")
            ended_s = time.monotonic()
            return (began_s + ended_s) / 2, ended_s - began_s

        yield fire


def _failed_run(
    fabric: Fabric, job: _Job, kind: str, target: NicTarget, moment_s: float
) -> tuple[float, float, float, float]:
    """A run in which a NIC fails: the moment, its uncertainty, the run's seconds, and the stolen share."""
    fired: list[tuple[float, float]] = []

    with _armed(triggers(fabric, kind, target)) as fire:
        stolen = stolen_jiffies()

        def fail(start_s: float) -> None:
            at_s, blur_s = fire(start_s + moment_s)
            fired.append((at_s - start_s, blur_s))

        run_s = job.run(fail)
        return *fired[0], run_s, stolen_share(stolen, stolen_jiffies())


def _trial(fabric: Fabric, job: _Job, kind: str, target: NicTarget, share: float, healthy_s: float) -> Trial:
    """One failure: the run in which it happens, the next run, and the recovery after healing."""
    job.wrong = 0
    for earlier in (1, 2, 4):
        at_s, blur_s, run_s, steal = _failed_run(fabric, job, kind, target, share / earlier * healthy_s)
        if at_s < run_s:
            break
        fabric.heal(target)  # the run ended before the failure: repeat, with an earlier moment
    else:
        raise RuntimeFault(f"{kind}: {target.text}: came after the end of its run, of {run_s:.3f} s, three times")
    next_s = job.run()
    fabric.heal(target)
    healed_s = time.monotonic()
    for _ in range(BACK_RUNS_MAX):
        again_s = job.run()
        if again_s <= BACK_SHARE * healthy_s:
            break
    else:
        raise RuntimeFault(f"{kind}: {target.text}: not back after {BACK_RUNS_MAX} runs, the last of {again_s:.3f} s")
    back_s = time.monotonic() - healed_s - again_s
    return Trial(kind, target.text, at_s, blur_s, run_s, next_s, back_s, steal, job.wrong)


def measure(
    failures: int = FAILURES,
    seed: int = SEED,
    kinds: Sequence[str] = KINDS,
    rate: str = NIC_RATE,
    size_bytes: int = SIZE_BYTES,
) -> FailoverSpeed:
    """Makes so many failures of each kind, the kinds in turns, at moments and NICs drawn from `seed`.

    Raises EnvironmentMissing without the right to make hosts, RuntimeFault if a run fails or a NIC does not come back.
    """
    draw = random.Random(seed)
    trials, healthy_s = [], []
    # Fills the caches of compiled kernels for the ranks.
    verify_plan(_plan(HOSTS, size_bytes))
    name = f"failover-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        fabric = stack.enter_context(Fabric.up(FabricSpec.parse(f"{HOSTS}x{NICS}@{rate}", name=name)))
        job = _Job(fabric, size_bytes)
        stack.callback(job.end)
        job.run()
        healthy_s = [job.run() for _ in range(HEALTHY_RUNS)]
        for _ in range(failures):
            for kind in kinds:
                target, share = NicTarget(draw.randrange(HOSTS), draw.randrange(NICS)), draw.uniform(*MOMENTS)
                trials.append(_trial(fabric, job, kind, target, share, statistics.median(healthy_s)))
                healthy_s.append(job.run())
    return FailoverSpeed(
        hosts=HOSTS,
        nics=NICS,
        nic_rate=rate,
        size_bytes=size_bytes,
        seed=seed,
        **head(),
        healthy_s=tuple(healthy_s),
        trials=tuple(trials),
    )


@record_command(FailoverSpeed, RecordForm(quick={"failures": 1}, one_session=IN_TURNS, part="rank"))
@click.option("--rank", is_flag=True, hidden=True, help="Be a rank; what it needs to know comes by standard input.")
@click.option("--failures", type=click.IntRange(1), default=FAILURES, show_default=True, help="Of each kind.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), help="Only failures of this kind.")
@click.option("--seed", default=SEED, show_default=True, help="Of the moments and the NICs.")
@click.option("--rate", default=NIC_RATE, show_default=True, help="Rate of a NIC, each way.")
def command(rank: bool, failures: int, kinds: tuple[str, ...], seed: int, rate: str) -> FailoverSpeed | None:
    """Measure what the failure of a NIC costs, and write the record. The exit code is 1 if an element was wrong."""
    if not rank:
        return measure(failures, seed, kinds or KINDS, rate)
    with socket.socket(fileno=os.dup(0)) as wire, wire.makefile("rw", encoding="utf-8") as channel:
        _rank(wire, channel)
    return None


if __name__ == "__main__":
    run_command(command)
