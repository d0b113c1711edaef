"""The fabric for real: namespaces, rates, failures, MPI across hosts, and what is left when something is killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from optcc.commands.fabric import command
from optcc.errors import DeadlineExceeded, EnvironmentMissing, InputError, RuntimeFault
from optcc.experiments.fabric import (
    RUN_ROOT,
    Fabric,
    FabricSpec,
    NicRates,
    find_mpirun,
    host_namespace,
    lifecycle,
    nic_address,
    processes,
    programs,
    status,
)

pytestmark = pytest.mark.netns

_NUMBERS = itertools.count()
ROOT = Path(__file__).resolve().parents[2]

RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
server.settimeout(10)
print("ready", flush=True)
peer, _ = server.accept()
peer.settimeout(10)
left = int(sys.argv[2])
begin = time.monotonic()
while left:
    left -= len(peer.recv(min(left, 1 << 18)))
print(time.monotonic() - begin, flush=True)
"""
SEND = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[3]))
data = bytes(1 << 18)
for _ in range(int(sys.argv[2]) >> 18):
    peer.sendall(data)
peer.shutdown(socket.SHUT_WR)
peer.recv(1)
"""
ALLREDUCE = """
import os, socket
import numpy as np
from mpi4py import MPI
world = MPI.COMM_WORLD
data = np.full(1 << 18, world.rank + 1, dtype=np.float32)
total = np.empty_like(data)
world.Allreduce(data, total)
assert (total == world.size * (world.size + 1) / 2).all()
names = world.gather(socket.gethostname())
if world.rank == 0:
    print(",".join(names), os.environ["OPTCC_TOPOLOGY"], os.environ["OPTCC_MINE"])
"""


@pytest.fixture
def open_mpi() -> str:
    """The mpirun of Open MPI 5: the marker `mpi` is content with any MPI."""
    pytest.importorskip("numpy")
    try:
        return find_mpirun()
    except EnvironmentMissing as error:
        pytest.skip(str(error))


@pytest.fixture
def name() -> Iterator[str]:
    """A name that no other fabric has; whatever stands under it goes at the end, and nothing of it may be left."""
    unique = f"live-{os.getpid()}-{next(_NUMBERS)}"
    try:
        yield unique
    finally:
        Fabric(unique).down()
    assert _left(unique) == []


def _left(name: str) -> list[str]:
    """Namespaces and files of a fabric."""
    found = [item for item in status.all_namespaces() if item.startswith(f"optcc-{name}-")]
    return found + [str(path) for path in RUN_ROOT.glob(f"{name}*")]


def _await(holds: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _transfer_s(fabric: Fabric, size_bytes: int, *, nic: int = 0, timeout_s: float = 5.0) -> float | None:
    """Seconds that one TCP flow from h0 to h1 takes, None if it does not come about."""
    argv = [sys.executable, "-c", RECEIVE, nic_address(1, nic), str(size_bytes)]
    receiver = subprocess.Popen(fabric.host_command(1, argv), stdout=subprocess.PIPE, text=True)
    try:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        argv = [sys.executable, "-c", SEND, nic_address(1, nic), str(size_bytes), str(timeout_s)]
        sent = subprocess.run(fabric.host_command(0, argv), capture_output=True, timeout=15, check=False)
        return float(receiver.stdout.readline()) if sent.returncode == 0 else None
    finally:
        receiver.kill()
        receiver.communicate()


# ---- life


def test_up_is_idempotent_and_down_leaves_nothing(name: str) -> None:
    spec = FabricSpec.parse("3x2@200Mbit/s,2=100Mbit/s", name=name)
    assert Fabric.up(spec).action == "made"
    assert Fabric.up(spec).action == "kept"
    status = Fabric(name).status()
    assert status.phase == "up"
    assert status.differences == ()
    assert status.topology == "3@50MB/s,2=25MB/s"
    assert [nic.state for host in status.hosts for nic in host.nics] == ["up"] * 6
    assert not set(status.leftovers) & {host.namespace for host in status.hosts}
    assert len(Fabric(name).down()) == 5
    assert Fabric(name).down() == ()
    assert _left(name) == []


def test_nothing_is_seen_in_the_root_namespace(name: str) -> None:
    before = set(os.listdir("/sys/class/net"))  # noqa: PTH208 - names only
    with Fabric.up(FabricSpec.parse("2@1Mbit/s", name=name)):
        assert set(os.listdir("/sys/class/net")) == before  # noqa: PTH208


def test_another_spec_is_refused_and_replaces_on_demand(name: str) -> None:
    spec = FabricSpec.parse("2@1Mbit/s", name=name)
    other = FabricSpec.parse("1x2@1Mbit/s", name=name)
    Fabric.up(spec)
    with pytest.raises(InputError, match=f"optcc fabric down --name {name}"):
        Fabric.up(other)
    assert Fabric(name).state().spec == spec
    assert Fabric.up(other, replace=True).action == "replaced"
    assert Fabric(name).status().differences == ()


def test_what_is_not_as_declared_is_rebuilt_and_said(name: str) -> None:
    spec = FabricSpec.parse("2@1Mbit/s", name=name)
    Fabric.up(spec)
    subprocess.run(["ip", "-n", host_namespace(name, 1), "link", "del", "eth0"], check=True, timeout=10)
    assert Fabric(name).status().differences == ("h1.eth0 is not on rail 0",)
    again = Fabric.up(spec)
    assert again.action == "rebuilt"
    assert "h1.eth0 is not on rail 0" in again.notes[0]
    assert Fabric(name).status().differences == ()


def test_two_fabrics_do_not_collide(name: str) -> None:
    other = f"{name}-h0"  # also the most confusing name that there is
    spec = FabricSpec.parse("2@1Mbit/s", name=name)
    with Fabric.up(FabricSpec.parse("2@2Mbit/s", name=other)) as second:
        Fabric.up(spec)
        second.fail("h0")
        assert Fabric(name).status().hosts[0].nics[0].state == "up"
        Fabric(name).down()
        assert second.status().differences == ()
    assert _left(name) == []


@pytest.mark.parametrize("nth", [1, 2, 4, 7, 8])
def test_a_failure_in_the_middle_of_up_undoes_all(name: str, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    real = programs.call

    def failing(argv: list[str], text: str = "", *, label: str | None = None) -> str:
        if "unshare" not in argv and "delete" not in text and next(calls) == nth:
            raise KeyboardInterrupt
        return real(argv, text, label=label)

    monkeypatch.setattr(lifecycle, "call", failing)
    with pytest.raises(KeyboardInterrupt):
        Fabric.up(FabricSpec.parse("2@1Mbit/s", name=name))
    assert _left(name) == []


def test_leftover_namespace_is_one_clear_line(name: str) -> None:
    subprocess.run(["ip", "netns", "add", host_namespace(name, 0)], check=True, timeout=10)
    spec = FabricSpec.parse("2@1Mbit/s", name=name)
    assert host_namespace(name, 0) in Fabric(name).status().leftovers
    with pytest.raises(InputError, match=f"left over from a killed run: run `optcc fabric down --name {name}`"):
        Fabric.up(spec)
    assert _left(name) == [host_namespace(name, 0)]
    assert Fabric(name).down() == (host_namespace(name, 0),)
    assert Fabric.up(spec).action == "made"


def test_up_after_a_kill_in_the_middle_starts_over(name: str) -> None:
    code = (
        "import os, signal, sys, optcc.experiments.fabric.lifecycle as f\n"
        "real = f.call\n"
        "def call(argv, text='', **rest):\n"
        "    return os.kill(os.getpid(), signal.SIGKILL) if argv[0] == 'tc' else real(argv, text, **rest)\n"
        "f.call = call\n"
        "f.Fabric.up(f.FabricSpec.parse('2@1Mbit/s', name=sys.argv[1]))\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, name], env=_environment(), timeout=20, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert Fabric(name).status().phase == "building"
    with pytest.raises(InputError, match="killed while it built"):
        Fabric(name).set_rate("h0", NicRates.parse("2Mbit/s"))
    again = Fabric.up(FabricSpec.parse("2@1Mbit/s", name=name))
    assert again.action == "rebuilt"
    assert "was killed" in again.notes[0]


def test_down_ends_processes_inside_even_stubborn_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "TERM_TIMEOUT_S", 0.3)
    fabric = Fabric.up(FabricSpec.parse("1@1Mbit/s", name=name))
    stubborn = ["/bin/sh", "-c", "trap '' TERM; echo; while :; do sleep 0.1; done"]
    with subprocess.Popen(fabric.host_command(0, stubborn), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        fabric.down()
        assert process.wait(5) == -signal.SIGKILL


def test_a_process_that_does_not_end_is_a_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "TERM_TIMEOUT_S", 0.05)
    monkeypatch.setattr(processes, "KILL_TIMEOUT_S", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, "inside", lambda _namespaces: [2**22 + 1])  # above pid_max: nobody is harmed
        with pytest.raises(RuntimeFault, match="does not end"):
            Fabric(name).down()


# ---- rates and failures


def test_one_flow_takes_what_its_rate_says(name: str) -> None:
    size_bytes = 6 * 2**20
    with Fabric.up(FabricSpec.parse("2x2@200Mbit/s", name=name)) as fabric:
        ratio = 0.0
        for attempt in range(3):  # a stolen time slice may spoil one pair
            fabric.heal("h0")
            whole = _transfer_s(fabric, size_bytes)
            fabric.set_rate("h0.eth0", NicRates.parse("100Mbit/s:200Mbit/s"))
            half = _transfer_s(fabric, size_bytes)
            assert whole is not None
            assert half is not None
            ideal_s = size_bytes / 25e6
            print(f"attempt {attempt}: {whole / ideal_s:.4f} and {half / ideal_s:.4f} of {ideal_s:.4f} s")
            ratio = half / whole
            if 1.7 <= ratio <= 2.3:
                break
        assert 1.7 <= ratio <= 2.3
        status = fabric.status()
        assert status.topology == "2@50MB/s,0=37.5MB/s:50MB/s"
        assert status.hosts[0].nics[0].tx_bytes >= 2 * size_bytes
        assert status.hosts[1].nics[0].rx_bytes >= 2 * size_bytes
        assert status.hosts[0].nics[1].tx_bytes == 0
        assert fabric.control_bytes() < 10_000


@pytest.mark.parametrize(
    ("how", "state"),
    [
        ("down", "down"),
        ("carrier", "no-carrier"),
        pytest.param("blackhole", "blackhole", marks=pytest.mark.nft),
        pytest.param("blackhole-out", "blackhole", marks=[pytest.mark.nft, pytest.mark.slow]),
        pytest.param("blackhole-in", "blackhole", marks=[pytest.mark.nft, pytest.mark.slow]),
    ],
)
def test_failed_nic_carries_nothing_until_healed(name: str, how: str, state: str) -> None:
    with Fabric.up(FabricSpec.parse("2x2@100Mbit/s", name=name)) as fabric:
        fabric.set_rate("h1.eth1", NicRates.parse("50Mbit/s"))
        fabric.fail("h1.eth1", how)
        assert fabric.fail("h1.eth1", how) == fabric.state()
        status = fabric.status()
        assert status.hosts[1].nics[1].state == state
        assert status.differences == ()
        assert status.topology == "2@25MB/s,1=12.5MB/s"
        assert Fabric.up(fabric.state().spec).action == "kept"
        assert _connects(fabric, nic=0)
        assert not _connects(fabric, nic=1)
        fabric.heal("h1.eth1")
        assert fabric.status().hosts[1].nics[1].state == "up"
        assert fabric.status().differences == ()
        assert fabric.topology_text() == "2@25MB/s"
        assert _connects(fabric, nic=1)


def _connects(fabric: Fabric, nic: int) -> bool:
    """True if h0 gets an answer from h1 over a rail: a refusal is one."""
    code = "import socket, sys; s = socket.socket(); s.settimeout(0.4); sys.exit(s.connect_ex((sys.argv[1], 9)))"
    argv = fabric.host_command(0, [sys.executable, "-c", code, nic_address(1, nic)])
    return subprocess.run(argv, timeout=10, check=False).returncode == 111  # ECONNREFUSED


@pytest.mark.nft
def test_one_failure_turns_into_another(name: str) -> None:
    with Fabric.up(FabricSpec.parse("2@1Mbit/s", name=name)) as fabric:
        for how, state in [("down", "down"), ("blackhole", "blackhole"), ("carrier", "no-carrier")]:
            fabric.fail("h1", how)
            assert fabric.status().hosts[1].nics[0].state == state
            assert fabric.status().differences == ()
        with pytest.raises(InputError, match="h1: no NIC is left"):
            fabric.run(["true"])


# ---- MPI


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.mpi
@pytest.mark.usefixtures("open_mpi")
def test_open_mpi_runs_across_the_hosts(name: str) -> None:
    with Fabric.up(FabricSpec.parse("4x2@200Mbit/s,3=100Mbit/s", name=name)) as fabric:
        argv = [sys.executable, "-c", ALLREDUCE]
        result = fabric.run(argv, timeout_s=30, env={"OPTCC_MINE": "a b"}, capture=True)
        assert result.exit_code == 0, result.stderr
        assert result.stdout.strip() == "h0,h1,h2,h3 4@50MB/s,3=25MB/s a b"
        status = fabric.status()
        assert all(nic.tx_bytes > 2**19 for host in status.hosts for nic in host.nics)
        assert fabric.control_bytes() < 2**19
        assert [path.name for path in fabric.directory.iterdir()] == ["state.json"]
        assert fabric.run(["/bin/sh", "-c", "exit 7"], n_ranks=2, timeout_s=30, capture=True).exit_code == 7


@pytest.mark.mpi
@pytest.mark.usefixtures("open_mpi")
def test_a_run_that_takes_too_long_is_ended_whole(name: str) -> None:
    with Fabric.up(FabricSpec.parse("2@100Mbit/s", name=name)) as fabric:
        with pytest.raises(DeadlineExceeded, match="not done after 1 s"):
            fabric.run(["sleep", "300"], timeout_s=1, capture=True)
        assert _nobody_in(name)
        assert [path.name for path in fabric.directory.iterdir()] == ["state.json"]


def _nobody_in(name: str) -> bool:
    return processes.inside([host_namespace(name, host) for host in range(2)]) == []


@pytest.mark.battery(41)
@pytest.mark.mpi
@pytest.mark.usefixtures("open_mpi")
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_run_that_is_interrupted_leaves_no_process(name: str, number: signal.Signals) -> None:
    Fabric.up(FabricSpec.parse("2@100Mbit/s", name=name))
    code = (
        "import signal, sys, optcc.commands.fabric as c\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background may inherit it ignored
        "c.command(sys.argv[1:], standalone_mode=False)\n"
    )
    argv = [sys.executable, "-c", code, "run", "--name", name, "--", "/bin/sh", "-c", "echo begun; sleep 300"]
    with subprocess.Popen(
        argv, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            process.send_signal(number)
            assert process.wait(10) != 0
        finally:
            process.kill()
        assert _await(lambda: _nobody_in(name))
    if number != signal.SIGKILL:  # nobody can clean up after itself then; the next run does
        assert [path.name for path in Fabric(name).directory.iterdir()] == ["state.json"]
    else:
        with contextlib.suppress(DeadlineExceeded):
            Fabric(name).run(["true"], timeout_s=10, capture=True)
        assert [path.name for path in Fabric(name).directory.iterdir()] == ["state.json"]


@pytest.mark.mpi
@pytest.mark.usefixtures("open_mpi")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["-n", "3"], "3 ranks: one a host"), (["-n", "0"], "0 ranks"), (["--timeout", "0"], "above zero")],
)
def test_bad_runs_are_refused(name: str, arguments: list[str], says: str) -> None:
    Fabric.up(FabricSpec.parse("2@1Mbit/s", name=name))
    with pytest.raises(InputError, match=says):
        command.main(["run", "--name", name, *arguments, "--", "true"], standalone_mode=False)


# ---- the door


def test_commands_print_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def call(line: str) -> dict[str, object]:
        command.main([*line.split(), "--name", name, "--json"], standalone_mode=False)
        found = json.loads(capsys.readouterr().out)
        assert isinstance(found, dict)
        return found

    assert call("up 2x2@100Mbit/s --host 1=50Mbit/s")["action"] == "made"
    assert call("set h0.eth1 10Mbit/s:20Mbit/s")["topology"] == "2@12.5MB/s,0=13.75MB/s:15MB/s"
    assert call("fail h0.eth1 --how carrier")["topology"] == "2@12.5MB/s"
    assert call("heal h0")["topology"] == "2@25MB/s,1=12.5MB/s"
    assert call("status")["phase"] == "up"
    command.main(["status", "--name", name], standalone_mode=False)
    assert "h1.eth1" in capsys.readouterr().out
    assert call("down")["removed"] != {name: []}
    assert call("down")["removed"] == {name: []}
    assert call("status")["phase"] == "absent"


EXCHANGE = """
import socket, sys, threading, time
server = socket.create_server(("10.98.0.2", 0))
def take():
    peer, _ = server.accept()
    left = int(sys.argv[1])
    while left:
        left -= len(peer.recv(min(left, 1 << 18)))
    peer.sendall(b"!")
threading.Thread(target=take).start()
with socket.create_connection(server.getsockname(), timeout=10, source_address=("10.98.0.1", 0)) as peer:
    begin = time.monotonic()
    peer.sendall(bytes(int(sys.argv[1])))
    peer.recv(1)
    print(time.monotonic() - begin)
"""


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.usefixtures("open_mpi")
def test_ranks_of_a_host_exchange_what_is_declared_and_share_its_nics(name: str) -> None:
    with Fabric.up(FabricSpec.parse("2x2@200Mbit/s/2ranks+100Mbit/s", name=name)) as fabric:
        assert fabric.status().differences == ()
        size = 4 << 20
        argv = [sys.executable, "-c", EXCHANGE, str(size)]
        exchanged = subprocess.run(fabric.host_command(0, argv), capture_output=True, text=True, timeout=30, check=True)
        assert float(exchanged.stdout) == pytest.approx(1.0074 * size / 12.5e6, rel=0.2)
        bench = [sys.executable, "-P", "-m", "optcc", "bench", "--transport", "tcp", "--schedule", "auto", "--json"]
        given = ["-b", "4M", "-n", "1", "--mode", "out"]
        done = fabric.run([*bench, *given], timeout_s=120, capture=True)
        assert done.exit_code == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["out_of_bounds"] == 0
        assert said["results"][0]["schedule"] in ("equal-trees", "packed", "nic-trees")  # those for NICs of ranks
        call = ["tc", "-n", host_namespace(name, 0), "-p", "qdisc", "del", "dev", "in1", "root"]
        subprocess.run(call, check=True, timeout=10)
        assert fabric.status().differences == ("h0.in1 is not shaped to 12.5MB/s",)
