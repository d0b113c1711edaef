"""`optcc doctor`: a fake system that is fine, one that is wrong in each single way, and this very host.

One file for the whole package: a test hands in a system that is wrong in one way, and expects exactly one finding of
all checks together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from optcc import cli
from optcc.errors import InputError
from optcc.runtime.doctor.examine import examine
from optcc.runtime.doctor.finding import NOTE, OK, WRONG, Finding, Need
from optcc.runtime.doctor.system import Host, Ran, System
from optcc.runtime.nics import Interface

GBIT = 125_000_000
OPEN_MPI = "4.1.2\nOpen MPI v5.0.11, package: Open MPI root@host Distribution"
FILES = {
    "/sys/class/net/lo/flags": "0x9",
    **{
        f"/sys/class/net/eth{nic}/{name}": value
        for nic in range(2)
        for name, value in {
            "flags": "0x1003",
            "carrier": "1",
            "speed": "100000",
            "mtu": "9000",
            "duplex": "full",
            "device/numa_node": "0",
        }.items()
    },
    "/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "/sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
    "/proc/driver/nvidia/version": "NVRM version: 570.1\nmore",
    "/proc/sys/net/ipv4/tcp_rmem": "4096 131072 33554432",
    "/proc/sys/net/ipv4/tcp_wmem": "4096 16384 4194304",
    "/proc/sys/net/core/rmem_max": "4194304",
    "/proc/sys/net/core/wmem_max": "4194304",
    "/proc/sys/net/ipv4/ip_local_port_range": "32768\t60999",
    "/proc/sys/net/core/somaxconn": "4096",
    "/proc/sys/net/ipv4/tcp_congestion_control": "cubic",
    "/proc/stat": "cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1",
    "/sys/devices/system/cpu/smt/active": "0",
    "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc",
    "/sys/devices/system/clocksource/clocksource0/available_clocksource": "tsc hpet",
}


@dataclass(frozen=True)
class Fake:
    """A system made of tables; as it is, nothing of it is wrong."""

    environment: Mapping[str, str] = field(
        default_factory=lambda: {
            "HOME": "/root",
            "OPTCC_SOCKET_IFNAME": "eth",
            "OPTCC_NIC_RATES": "100Gbit/s",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
    )
    python: str = "/venv/bin/python"
    uid: int = 0
    host_name: str = "h0"
    files: Mapping[str, str] = field(default_factory=lambda: FILES)
    links: Mapping[str, str] = field(
        default_factory=lambda: {f"/sys/class/net/eth{nic}/device/driver": "mlx5_core" for nic in range(2)}
    )
    found: tuple[Interface, ...] = (
        Interface("lo", "127.0.0.1", True),
        Interface("eth0", "10.0.0.1", False, 100 * GBIT),
        Interface("eth1", "10.0.1.1", False, 100 * GBIT),
    )
    programs: Mapping[str, Ran] = field(
        default_factory=lambda: {
            "/venv/bin/mpirun": Ran(0, "mpirun (Open MPI) 5.0.11"),
            "ucx_info": Ran(0, "#      Transport: rc_mlx5\n#         Device: mlx5_0:1\n"),
            "ompi_info": Ran(0, "mca:mpi:base:param:mpi_built_with_cuda_support:value:true"),
            "unshare": Ran(0, ""),
            **dict.fromkeys(("ip", "tc", "nft"), Ran(0, "")),
        }
    )
    mpi: Ran | None = Ran(0, OPEN_MPI)  # noqa: RUF009 - frozen
    ucx: Ran | None = Ran(0, "1.22.0")  # noqa: RUF009
    ucx_memory: Ran | None = Ran(0, "3")  # noqa: RUF009
    ipc: Ran | None = Ran(0, "works")  # noqa: RUF009
    segment: Ran | None = Ran(0, str(64 << 30))  # noqa: RUF009
    cupy: Ran | None = Ran(0, "13.4.0 on NVIDIA H100")  # noqa: RUF009
    packages: Mapping[str, str] = field(
        default_factory=lambda: {
            **{"numpy": "2.4.6", "numba": "0.68.1", "isal": "1.9.1"},
            **{"mpi4py": "4.1.2", "cupy-cuda12x": "13.4.0"},
        }
    )
    wanted: tuple[str, ...] = ("numpy>=2.0", "numba>=0.61", 'isal>=1.6; extra == "fast"', 'ruff>=0.8; extra == "dev"')
    limits: Mapping[str, tuple[int, int]] = field(
        default_factory=lambda: {"NOFILE": (4096, 65536), "MEMLOCK": (-1, -1)}
    )
    folder: Path | None = Path("/root/.cache/optcc")
    cores: int = 16

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def names(self, path: str) -> tuple[str, ...]:
        inside = (name[len(path) + 1 :].partition("/")[0] for name in self.files if name.startswith(f"{path}/"))
        return tuple(sorted(set(inside)))

    def link(self, path: str) -> str | None:
        return self.links.get(path)

    def interfaces(self) -> Sequence[Interface]:
        return self.found

    def find(self, program: str) -> str | None:
        if program.startswith("/"):
            path = f"/venv/bin{program}"
            return path if path in self.programs else None
        if program == "mpirun":
            return next((path for path in self.programs if path.endswith("/mpirun")), None)
        return program if program in self.programs else None

    def run(self, *words: str) -> Ran | None:
        return self.programs.get(words[0])

    def ask(self, code: str) -> Ran | None:
        if "probe_sharing" in code:
            return self.ipc
        if "probe_segment" in code:
            return self.segment
        if "memory_types" in code:
            return self.ucx_memory
        return self.mpi if "mpi4py" in code else self.ucx if "ucx" in code else self.cupy

    def version(self, package: str) -> str | None:
        return self.packages.get(package)

    def requirements(self) -> Sequence[str]:
        return self.wanted

    def limit(self, name: str) -> tuple[int, int]:
        return self.limits[name]

    def cache(self) -> Path | None:
        return self.folder

    def affinity(self) -> int:
        return self.cores


FINE = Fake()


def changed(**files: str | None) -> Fake:
    """The fine system with other files; keys are the ends of their paths, with _ for /."""
    found = dict(FILES)
    for end, value in files.items():
        paths = [path for path in FILES if path.replace("/", "_").endswith(end)]
        assert paths, end
        for path in paths:
            if value is None:
                del found[path]
            else:
                found[path] = value
    return replace(FINE, files=found)


def env(**variables: str) -> Fake:
    return replace(FINE, environment={**FINE.environment, **variables})


def without(package: str) -> Fake:
    """The fine system without a package."""
    assert package in FINE.packages
    return replace(FINE, packages={name: each for name, each in FINE.packages.items() if name != package})


def of(system: System, verdict: str, need: Need | None = None) -> list[Finding]:
    """The findings with that verdict."""
    return [each for each in examine(system, need) if each.verdict == verdict]


def test_nothing_is_wrong_with_a_system_that_is_fine() -> None:
    findings = examine(FINE)
    assert {each.verdict for each in findings} == {OK}, [each for each in findings if each.verdict != OK]
    assert {each.area for each in findings} == {
        *("nics", "mpi", "ucx", "gpu", "limits", "memory", "namespaces", "cpu", "packages", "cache"),
    }
    assert all(each.why and not each.do for each in findings)
    (nic,) = (each for each in findings if each.name == "eth0")
    assert nic.value == "10.0.0.1, up, carrier, 12.5GB/s out and in, MTU 9000, driver mlx5_core, NUMA node 0"


OTHER_MPI = {**FINE.programs, "/venv/bin/mpirun": Ran(0, "HYDRA build details:\n    Version: 5.0.2")}
WRONGS: dict[str, tuple[System, str, str, str]] = {
    "no interface fits": (env(OPTCC_SOCKET_IFNAME="ib"), "nics", "OPTCC_SOCKET_IFNAME", "there is lo, eth0, eth1"),
    "no carrier": (changed(eth1_carrier="0"), "nics", "eth1", "no carrier"),
    "half duplex": (changed(eth0_duplex="half"), "nics", "eth0", "half duplex"),
    "one address twice": (
        replace(FINE, found=(*FINE.found[:2], Interface("eth1", "10.0.0.1", False, 100 * GBIT))),
        "nics",
        "OPTCC_SOCKET_IFNAME",
        "selects eth0, eth1",
    ),
    "rates that are none": (env(OPTCC_NIC_RATES="fast"), "nics", "OPTCC_NIC_RATES", "fast"),
    "a rate for no NIC": (env(OPTCC_NIC_RATES="100Gbit/s,eht1=1Gbit/s"), "nics", "OPTCC_NIC_RATES", "eht1"),
    "more than the driver says": (
        env(OPTCC_NIC_RATES="100Gbit/s,h0.eth1=200Gbit/s"),
        "nics",
        "OPTCC_NIC_RATES",
        "eth1",
    ),
    "MPI does not load": (
        replace(FINE, mpi=Ran(1, "Traceback\nRuntimeError: cannot load MPI library")),
        "mpi",
        "library",
        "RuntimeError: cannot load MPI library",
    ),
    "no launcher": (
        replace(FINE, programs={name: ran for name, ran in FINE.programs.items() if "mpirun" not in name}),
        "mpi",
        "mpirun",
        "not found",
    ),
    "the launcher of another library": (replace(FINE, programs=OTHER_MPI), "mpi", "mpirun", "/venv/bin/mpirun: MPICH"),
    "root": (env(OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=""), "mpi", "root", "not set, and this is root"),
    "old UCX": (replace(FINE, ucx=Ran(0, "1.9.0")), "ucx", "library", "1.9.0"),
    "CuPy without a GPU": (
        replace(FINE, cupy=Ran(1, "CUDARuntimeError: cudaErrorInsufficientDriver")),
        "gpu",
        "CuPy",
        "cudaErrorInsufficientDriver",
    ),
    "few files": (replace(FINE, limits={**FINE.limits, "NOFILE": (256, 65536)}), "limits", "open files", "256"),
    "little locked memory": (
        replace(FINE, limits={**FINE.limits, "MEMLOCK": (65536, 65536)}),
        "limits",
        "locked memory",
        "64KiB",
    ),
    "short windows": (changed(tcp_rmem="4096 131072 212992"), "limits", "tcp_rmem", "208KiB"),
    "few ports": (changed(port_range="60000 60100"), "limits", "local ports", "60000 to 60100"),
    "short backlog": (changed(somaxconn="16"), "limits", "somaxconn", "16"),
    "slow clock": (changed(current_clocksource="hpet"), "cpu", "clock source", "hpet"),
    "no numpy": (without("numpy"), "packages", "numpy", "not installed"),
    "no numba": (without("numba"), "packages", "numba", "not installed"),
    "old numba": (replace(FINE, packages={**FINE.packages, "numba": "0.60.0"}), "packages", "numba", "0.60.0"),
    "no cache": (replace(FINE, folder=None), "cache", "folder", "/root/.cache/optcc: not usable"),
}


@pytest.mark.parametrize("name", WRONGS)
def test_one_thing_wrong_is_one_finding_that_says_what_to_do(name: str) -> None:
    system, area, what, value = WRONGS[name]
    (found,) = of(system, WRONG)
    assert (found.area, found.name) == (area, what)
    assert value in found.value
    assert found.why and found.do


NOTES: dict[str, tuple[System, str]] = {
    "no MPI": (without("mpi4py"), "mpi4py"),
    "no UCX": (replace(FINE, ucx=None), "library"),
    "short frames": (changed(eth0_mtu="1500", eth1_mtu="1500"), "eth0"),
    "frames of two lengths": (changed(eth0_mtu="4200"), "OPTCC_SOCKET_IFNAME"),
    "no CuPy": (without("cupy-cuda12x"), "CuPy"),
    "a UCX without CUDA": (replace(FINE, ucx_memory=Ran(0, "1")), "path over ucx"),
    "a port that is not active": (changed(ports_1_state="1: DOWN"), "mlx5_0:1"),
    "bbr": (changed(congestion_control="bbr"), "congestion control"),
    "few cores": (replace(FINE, cores=2), "cores"),
    "stolen time": (changed(proc_stat="cpu  100 0 100 700 0 0 0 100 0 0"), "steal"),
    "a governor that saves": (changed(scaling_governor="powersave"), "governor"),
    "small buffers": (changed(rmem_max="212992"), "rmem_max"),
    "no nft": (replace(FINE, programs={n: r for n, r in FINE.programs.items() if n != "nft"}), "nft"),
    "not root": (replace(FINE, uid=1000), "right"),
    "no namespaces": (
        replace(FINE, programs={**FINE.programs, "unshare": Ran(1, "Operation not permitted")}),
        "namespaces",
    ),
    "little shared memory": (replace(FINE, segment=Ran(0, str(64 << 20))), "/dev/shm"),
    "no shared memory": (replace(FINE, segment=Ran(0, "no segment in /dev/shm: Permission denied")), "/dev/shm"),
    "no isal": (without("isal"), "isal"),
    "silent drivers": (
        replace(env(OPTCC_NIC_RATES=""), found=tuple(replace(each, rate=0) for each in FINE.found)),
        "OPTCC_NIC_RATES",
    ),
}


@pytest.mark.parametrize("name", NOTES)
def test_what_only_some_need_is_a_note_and_nothing_wrong(name: str) -> None:
    system, what = NOTES[name]
    assert of(system, WRONG) == []
    notes = of(system, NOTE)
    assert what in {each.name for each in notes}
    assert all(each.why for each in notes)


def test_a_nic_that_is_down_is_to_be_taken_up_and_makes_nothing_wrong() -> None:
    """Nor does it count that its driver says no rate."""
    unrated = replace(env(OPTCC_NIC_RATES=""), files=changed(eth1_flags="0x1002", eth1_carrier="0").files)
    down = Interface("eth1", "10.0.1.1", False, 0, is_up=False)
    system = replace(unrated, found=(*FINE.found[:2], down))
    assert of(system, WRONG) == []
    (note,) = of(system, NOTE)
    assert (note.name, note.why, note.do) == ("eth1", "a run uses it once it is up", "ip link set eth1 up")
    declared = replace(system, environment={**system.environment, "OPTCC_NIC_RATES": "100Gbit/s"})
    (nic,) = (each for each in examine(declared) if each.name == "eth1")
    assert (nic.verdict, nic.why) == (OK, "a run does not use it"), "rates are declared, and nobody measures it"


def test_limits_are_those_of_the_job() -> None:
    small = replace(FINE, limits={**FINE.limits, "NOFILE": (1024, 1024)})
    assert of(small, WRONG, Need(64, 8)) == []
    (files,) = of(small, WRONG, Need(1024, 8))
    assert "a rank of 1024 over 2 rails opens up to 4156 files" in files.why
    assert "limits.conf to 4156" in files.do
    for ranks, here in ((0, 1), (4, 0), (2, 3)):
        with pytest.raises(InputError, match="must be at"):
            Need(ranks, here)


def test_rates_of_other_hosts_do_not_count() -> None:
    assert of(env(OPTCC_NIC_RATES="100Gbit/s,h7.eth9=900Gbit/s"), WRONG) == []


def test_it_says_which_way_a_gpus_memory_takes_and_why() -> None:
    def paths(system: System) -> dict[str, tuple[str, str]]:
        found = (each for each in examine(system) if each.name.startswith("path over "))
        return {each.name.split()[-1]: (each.value.partition(",")[0], each.why) for each in found}

    assert {name: way for name, (way, _) in paths(FINE).items()} == {
        **{"mpi": "direct", "ucx": "direct"},
        "tcp": "ipc inside a host",
    }
    ran = Ran(0, "mca:mpi:base:param:mpi_built_with_cuda_support:value:false")
    said = "GPU 1 into GPU 0: CUDARuntimeError: cudaErrorPeerAccessUnsupported"
    plain = replace(FINE, ucx_memory=Ran(0, "1"), ipc=Ran(0, said), programs={**FINE.programs, "ompi_info": ran})
    (ipc,) = (each for each in examine(plain) if each.name == "CUDA IPC")
    assert (ipc.value, ipc.verdict) == (said, NOTE)
    assert {way for way, _ in paths(plain).values()} == {"staged"}
    assert "does not say that it takes GPU pointers" in paths(plain)["mpi"][1]
    assert "no CUDA memory" in paths(plain)["ucx"][1]
    assert "ucx" not in paths(replace(FINE, ucx_memory=None))


def test_without_a_driver_nobody_asks_cupy() -> None:
    @dataclass(frozen=True)
    class Strict(Fake):
        def ask(self, code: str) -> Ran | None:
            assert "cupy" not in code
            return super().ask(code)

    files = {path: text for path, text in FILES.items() if "nvidia" not in path}
    (driver,) = (each for each in examine(Strict(files=files)) if each.area == "gpu")
    assert (driver.verdict, driver.value) == (NOTE, "none, although cupy-cuda12x is installed")


def test_this_host_is_examined_without_a_word_of_complaint() -> None:
    findings = examine(Host())
    names = [(each.area, each.name) for each in findings]
    assert len(set(names)) == len(names)
    assert {"nics", "limits", "cpu", "packages", "cache"} <= {each.area for each in findings}
    assert all(each.value and each.why for each in findings)
    assert all(each.do for each in findings if each.verdict == WRONG)
    assert ("packages", "numpy") in names


def test_the_command_says_it_in_json_and_by_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from optcc.commands import doctor as doctor_command

    for system, code in ((FINE, 0), (env(OPTCC_SOCKET_IFNAME="ib"), 1)):
        monkeypatch.setattr(doctor_command, "Host", lambda system=system: system)
        capsys.readouterr()
        assert cli.run(["doctor", "--json"]) == code
        told = json.loads(capsys.readouterr().out)
        assert told["wrong"] == code
        assert set(told["findings"][0]) == {"area", "name", "value", "verdict", "why", "do"}
    assert cli.run(["doctor"]) == 1
    said = capsys.readouterr().out
    assert said.splitlines()[2].startswith("wrong"), "the worst comes first"
    assert f"unset {'OPTCC_SOCKET_IFNAME'}" in said
    assert cli.run(["doctor", "--ranks", "0"]) == 2
    assert "must be at least 1" in capsys.readouterr().err
