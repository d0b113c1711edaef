"""What emulated hosts need: the right, the programs, and the parts of the kernel."""

from __future__ import annotations

from collections.abc import Iterator

from optcc.runtime.doctor.finding import NOTE, OK, Finding, Need
from optcc.runtime.doctor.system import System

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
