"""What is compared on emulated hosts: states of the hosts, contenders, and the jobs that start them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from optcc.experiments.fabric import WIRE_OVERHEAD, control_address, mpirun_arguments
from optcc.experiments.peers import MPI_RING
from optcc.experiments.peers_record import HEALTHY, OURS, PEER
from optcc.units import parse_rate, show_rate

HOSTS, HOSTS_MORE, NICS = 4, 8, 2
NIC_RATES: Mapping[int, str] = {HOSTS: "400Mbit/s", HOSTS_MORE: "100Mbit/s"}
"""The rate of a healthy NIC each way, by number of hosts, unless `--rate` is given."""
READY_S = 60.0
SCHEDULES = ("ring", "r2ccl-allreduce", "optcc", "optimal")
OURS_ALL: Mapping[str, tuple[str, ...]] = {"tcp": SCHEDULES, "mpi": SCHEDULES}
OURS_STANDARD: Mapping[str, tuple[str, ...]] = {"tcp": SCHEDULES, "mpi": ("ring", "optimal")}
OURS_FEW: Mapping[str, tuple[str, ...]] = {"tcp": ("ring", "optimal")}
OURS_LATE: Mapping[str, tuple[str, ...]] = {"tcp": ("ring", "stragglar", "optcc", "optimal")}
"""Which schedules go over which carrier: with --long, otherwise, in further states, and where a host is late."""
SEGMENT_BYTES = 1 << 19
SEGMENTS_MIN, SEGMENTS_MAX = 32, 512
LATENCY = "1/5000"
_UCX = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": ",".join(f"eth{nic}" for nic in range(NICS))}
_ANY_UCX = ("--mca", "pml_ucx_tls", "any", "--mca", "pml_ucx_devices", "any")
"""Without these Open MPI does not select UCX over TCP."""
_MPTCP_LIBRARIES = ("/usr/lib/x86_64-linux-gnu/mptcpize", "/usr/lib/aarch64-linux-gnu/mptcpize")


@dataclass(frozen=True)
class Bed:
    """A state of the hosts: rates and failures by NIC, set before anything is launched."""

    name: str
    rates: Mapping[str, Fraction] = field(default_factory=dict)
    down: tuple[str, ...] = ()
    late: Fraction = Fraction(0)
    """By how much the last rank begins later: over what a reduce-scatter of the others takes on healthy hosts."""

    def late_s(self, hosts: int, size_bytes: int, rate: str) -> Fraction:
        """The same in seconds, of a message of `size_bytes` on so many hosts with NICs of `rate`.

        >>> late_s = Bed("", late=Fraction(1)).late_s(4, 3 * 10**6, "8Mbit/s")
        >>> late_s / Fraction(WIRE_OVERHEAD)  # 2 MB over two NICs of 1 MB/s
        Fraction(1, 1)
        """
        return self.late * (hosts - 2) / (hosts - 1) * size_bytes * Fraction(WIRE_OVERHEAD) / (NICS * parse_rate(rate))

    def declared(self, rate: str) -> str:
        """The rates as OPTCC_NIC_RATES says them."""
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


def late_beds(hosts: int) -> tuple[Bed, ...]:
    """The last host is late, and late and slow: StragglAR's case (arXiv 2505.23523), and ours."""
    last = f"h{hosts - 1}"
    both = {f"{last}.eth{nic}": HALF for nic in range(NICS)}
    return (Bed("one host late", late=Fraction(1)), Bed("one host late and at half", both, late=Fraction(1)))


@dataclass(frozen=True)
class Contender:
    """One contender: its name, ours or a peer, and the configuration that its ranks get."""

    contender: str
    side: str
    config: Mapping[str, Any]

    @property
    def settings(self) -> str:
        """Its configuration, without what the record has in other fields."""
        left_out = ("schedule", "carrier", "peer", "topology", "wire_overhead", "latency")
        return " ".join(f"{key}={value}" for key, value in self.config.items() if key not in left_out)


@dataclass(frozen=True)
class PeerJob:
    """Contenders that share a launch: interpreter, launcher, arguments and environment."""

    name: str
    python: str
    launcher: str
    cases: tuple[Contender, ...]
    extra: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, **given: Any) -> list[str]:
        """The launcher's arguments before the command; see `mpirun_arguments`."""
        if self.launcher == "mpich":
            return mpiexec_arguments(**given)
        words = mpirun_arguments(**given)
        if "UCX_TLS" in self.environment:  # replaced, not appended: Open MPI refuses two values for pml
            words[words.index("ob1")] = "ucx"
        return words


def mpiexec_arguments(
    *, agent: str, hostfile: str, nics: int, ranks: int, exported: Sequence[str], extra: Sequence[str] = ()
) -> list[str]:
    """MPICH's counterpart of `mpirun_arguments`: the arguments of `mpiexec` before the command."""
    del nics
    # The launcher must be one executable, and its host file has no slots.
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
    "stragglar": {"ports": "fair", "segments": 64, "slots": 2, "window": 4},
}
"""The fastest settings measured on this fabric. Its queues store and forward, so ports are fifo for rings; OptCC has
lanes for each peer and stage. `optimal` is `shares`, a flow for each pair of hosts, with a segment for each half MiB:
fewer segments leave NICs idle on eight hosts, and more cost more processor time than they save. StragglAR has segments
too: in one, as its authors write it, all owners would send to the late host at once, and none would be first."""


def our_case(schedule: str, carrier: str, topology: str, size_bytes: int) -> Contender:
    """One of our schedules for `topology` and messages of `size_bytes`, over `tcp` or over `mpi`."""
    config: dict[str, Any] = {"schedule": schedule, "carrier": carrier, "topology": topology}
    config |= {"wire_overhead": WIRE_OVERHEAD, "latency": LATENCY}
    config |= {"segments": min(SEGMENTS_MAX, max(SEGMENTS_MIN, size_bytes // SEGMENT_BYTES))}
    return Contender(f"{schedule} ({carrier})", OURS, {**config, **OUR_SETTINGS[schedule]})


def _library(contender: str) -> Contender:
    return Contender(contender, PEER, {"peer": "mpi"})


STANDARD, LONG, FEW, LEAST = "standard", "long", "few", "least"
LEFT_OUT = "left out there for the time it takes; --long runs it"
LEFT_OUT_LEAST = "left out there for the time it takes, for Gloo is run; --long runs it"


def jobs(
    ours: Sequence[Contender], mpich: str, torch: str, extent: str = STANDARD
) -> tuple[list[PeerJob], dict[str, str]]:
    """The jobs that can run here, and for each other contender the reason why it cannot."""
    here, mptcp = sys.executable, mptcp_library()
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
    wanted: list[tuple[PeerJob, str | None]] = [
        (PeerJob("open-mpi", here, "openmpi", tuple(ours) if gloo_only else (*ours, over_tcp), MPI_RING), None),
        (PeerJob("open-mpi-ucx", here, "openmpi", (ucx,), (*MPI_RING, *_ANY_UCX), _UCX), few),
        (
            PeerJob("open-mpi-mptcp", here, "openmpi", (_library("Open MPI ring, MPTCP"),), MPI_RING, preload),
            few or no_mptcp,
        ),
        (PeerJob("open-mpi-default", here, "openmpi", (_library("Open MPI default, TCP"),)), rare),
        (
            PeerJob("mpich", mpich, "mpich", (_library("MPICH, UCX"),), (), {"MPIR_CVAR_CH4_NETMOD": "ucx", **_UCX}),
            few or no_mpich,
        ),
        (PeerJob("mpich-ofi", mpich, "mpich", (_library("MPICH, OFI"),), (), netmod), one_nic or no_mpich),
        (PeerJob("gloo", torch, "openmpi", (Contender("Gloo", PEER, {"peer": "gloo"}),)), no_torch),
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


def mptcp_library() -> str:
    """Path of the library that turns TCP sockets into MPTCP sockets; empty if not installed."""
    found = (path for folder in _MPTCP_LIBRARIES for path in Path(folder).glob("libmptcpwrap.so.*"))
    return str(next(found, ""))
