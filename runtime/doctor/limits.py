"""Limits of the kernel, against what a job of some size needs."""

from __future__ import annotations

from collections.abc import Iterator

from optcc.runtime.doctor.finding import NOTE, OK, WRONG, Finding, Need
from optcc.runtime.doctor.nics import chosen_nics
from optcc.runtime.doctor.system import System
from optcc.units import show_size

SOCKET_BYTES_MIN = 2**20
"""A chunk of the TCP transport; a window below it stops the sender after every chunk."""
MEMLOCK_BYTES_MIN = 64 * 2**20
FILES_SPARE = 64
_SYSCTL = "/proc/sys"


def check_limits(system: System, need: Need) -> Iterator[Finding]:
    """What the kernel allows, against what a job of that size wants."""
    rails = max(1, len(chosen_nics(system)[0]))
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
