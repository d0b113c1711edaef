"""The TCP transport on emulated hosts: two NICs each, rates, blackholes, and processes that are killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optcc.experiments.fabric import (
    FAILURES,
    RUN_ROOT,
    Fabric,
    FabricSpec,
    NicRates,
    control_address,
    core_namespace,
    host_namespace,
    nic_address,
)

netns = pytest.mark.netns
_NUMBERS = itertools.count()
ROOT = Path(__file__).resolve().parents[2]
DONE_S = 60.0
PORT = 5100

# Rank i on host i: AllReduces for `for_s` seconds; what it saw as JSON. A gap is a time inside an AllReduce in which no
# chunk came, by the clock that all processes share.
PROGRAM = """
import json, os, sys, time
import numpy as np
from optcc.errors import OptccError
from optcc.runtime.exact_inputs import make_input, wrong_elements
from optcc.runtime.executor import Executor
from optcc.runtime.nics import HostNic
from optcc.runtime.rendezvous import at_address, read_secret
from optcc.runtime.samples import ring
from optcc.runtime.transports.tcp import TcpTransport
from optcc.verify.plan import verify_plan

given = json.loads(sys.argv[1])
rank, n, size = given["rank"], given["n_ranks"], given["size"]
nics = [HostNic(*nic) for nic in given["nics"]]
secret = read_secret(given["secret"])
gaps, mark, last_s = [], 0, 0.0
given_up = [[] for _ in nics]

class Watched(TcpTransport):
    def _turn(self, wait_s):
        global mark, last_s
        super()._turn(wait_s)
        for moments, rail in zip(given_up, self._endpoint.rail_counts):
            moments += [time.monotonic()] * (rail.failures - len(moments))
        came = sum(rail.received_bytes for rail in self._endpoint.rail_counts)
        if came >= mark + 4096:
            mark, now_s = came, time.monotonic()
            if now_s - last_s > 0.002:
                gaps.append([last_s, now_s])
            last_s = now_s

transport = Watched(at_address(tuple(given["at"]), rank, n, secret, timeout_s=20), nics, **given["settings"])
plan = ring(n, size, segments=2)
executor = Executor(plan, rank, transport, verify_plan(plan), deadline_s=40)
data, recv = make_input(rank, size // 4, "float32", "sum"), np.empty(size // 4, np.float32)
seconds, agreed, sent, wrong, error, culprits, failed_nics = [], [], [], 0, "", (), ()
print("ready", flush=True)
began = time.monotonic()
try:
    stop = 0
    while not stop:
        recv.fill(np.nan)
        at = last_s = time.monotonic()
        executor.all_reduce(data, recv)
        seconds.append(time.monotonic() - at)
        sent.append([rail.sent_bytes for rail in transport.rails])
        if len(seconds) == 1:
            print("idle", flush=True)
            time.sleep(given["idle_s"])
        wrong += wrong_elements(plan, rank, recv)
        over = (time.monotonic() - began >= given["for_s"] or os.path.exists(given["stop"])) and len(seconds) >= 2
        over_at = time.monotonic()
        stop = transport.allgather(bytes([over]))[0][0]
        agreed.append(time.monotonic() - over_at)
except OptccError as fault:
    error, culprits, failed_nics = f"{type(fault).__name__}: {fault}", fault.culprits, fault.nics
failed_s = time.monotonic() - at
lost = sum(rail.failures for rail in transport.rails)
rails = [[rail.name, rail.sent_bytes, rail.failures] for rail in transport.rails]
transport.close()
left = len(os.listdir("/proc/self/fd"))
intact = bool((data == make_input(rank, size // 4, "float32", "sum")).all())
print(json.dumps({"seconds": seconds, "agreed": agreed, "wrong": wrong, "error": error, "failed_s": failed_s,
    "rails": rails, "sent": sent, "resent": transport.counts.resent, "files": left, "gaps": gaps, "lost": lost,
    "given_up": given_up, "culprits": culprits, "nics": failed_nics, "input": intact}), flush=True)
"""


@pytest.fixture
def name() -> Iterator[str]:
    """A name that no other fabric has; whatever stands under it goes at the end."""
    unique = f"tcp-{os.getpid()}-{next(_NUMBERS)}"
    try:
        yield unique
    finally:
        Fabric(unique).down()
    assert not list(RUN_ROOT.glob(f"{unique}*"))


class Job:
    """A rank on every host; `kill`, and `results` by rank once they are over, or the file `stop` is there."""

    def __init__(
        self,
        fabric: Fabric,
        folder: Path,
        *,
        hosts: int,
        size: int,
        for_s: float,
        idle_s: float = 0.0,
        rates: dict[tuple[int, int], int] | None = None,
        **settings: object,
    ) -> None:
        self.done_s, self.stop = DONE_S + for_s, folder / "stop"
        secret = folder / "secret"
        secret.touch(0o600)
        secret.write_bytes(os.urandom(32))
        self.ranks: list[subprocess.Popen[str]] = []
        for rank in range(hosts):
            nics = [(f"eth{nic}", nic_address(rank, nic), *[(rates or {}).get((rank, nic), 1)] * 2) for nic in range(2)]
            given = {
                "rank": rank,
                "n_ranks": hosts,
                "size": size,
                "for_s": for_s,
                "stop": str(self.stop),
                "idle_s": idle_s,
                "nics": nics,
                "secret": str(secret),
                "at": (control_address(0), PORT),
                "settings": settings,
            }
            argv = [sys.executable, "-c", PROGRAM, json.dumps(given)]
            self.ranks.append(
                subprocess.Popen(
                    fabric.host_command(rank, argv),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=os.environ | {"PYTHONPATH": str(ROOT)},
                )
            )
        self.await_line("ready")

    def await_line(self, word: str) -> None:
        """Until each rank has said so."""
        for process in self.ranks:
            assert process.stdout is not None
            line = process.stdout.readline()
            if line != f"{word}\n":
                self.end()
                raise AssertionError(line + (process.stderr.read() if process.stderr else ""))

    def results(self, *, quiet: bool = False) -> list[dict[str, Any]]:
        """What each rank saw; nothing of one that was killed."""
        seen: list[dict[str, Any]] = []
        try:
            for process in self.ranks:
                out, err = process.communicate(timeout=self.done_s)
                assert out or process.returncode < 0, err
                seen.append(json.loads(out.splitlines()[-1]) if process.returncode >= 0 else {})
        finally:
            self.end()
        if not quiet:
            print(
                json.dumps(
                    [{key: value for key, value in each.items() if key not in ("gaps", "given_up")} for each in seen]
                )
            )
        return seen

    def end(self) -> None:
        """Nothing of it goes on."""
        for process in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()


@netns
def test_both_nics_carry_what_they_are_said_to(name: str, tmp_path: Path) -> None:
    with Fabric.up(FabricSpec.parse("3x2@200Mbit/s", name=name)) as fabric:
        rates = {(rank, nic): (2, 1)[nic] for rank in range(3) for nic in range(2)}
        seen = Job(fabric, tmp_path, hosts=3, size=8 << 20, for_s=2.0, rates=rates, learn_rates=False).results()
    for each in seen:
        assert (each["wrong"], each["error"]) == (0, "")
        rails = each["rails"]
        assert isinstance(rails, list)
        assert rails[0][1] / (rails[0][1] + rails[1][1]) == pytest.approx(2 / 3, rel=0.1)
        # Standard streams, what Python has open, and the folder that is being listed.
        assert isinstance(each["files"], int) and each["files"] <= 8


@pytest.mark.slow
@pytest.mark.realtime
@netns
def test_a_nic_at_half_its_rate_gets_half_as_much_though_nobody_has_said_so(name: str, tmp_path: Path) -> None:
    with Fabric.up(FabricSpec.parse("3x2@200Mbit/s", name=name)) as fabric:
        fabric.set_rate("h1.eth1", NicRates.parse("100Mbit/s"))
        seen = Job(fabric, tmp_path, hosts=3, size=16 << 20, for_s=6.0, learn_rates=True).results()
    shares = []
    for each in seen:
        assert (each["wrong"], each["error"]) == (0, "")
        # The first runs stripe equally until the rank has found out, which a host that is busy with others delays.
        first, last = each["sent"][min(1, len(each["sent"]) - 2)], each["sent"][-1]
        shares.append((last[0] - first[0]) / (sum(last) - sum(first)))
    # Rank 2 sends to rank 0, past the slow NIC.
    assert 0.57 < shares[0] < 0.8 and 0.57 < shares[1] < 0.85 and 0.4 < shares[2] < 0.6, shares


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, tuple[float, float]]]:
    """What the ranks of one job saw, in the middle of whose AllReduces a NIC failed in each way, was healed, and in use
    again before it failed in the next one; and between which moments each failure was."""
    moments: dict[str, tuple[float, float]] = {}
    with Fabric.up(FabricSpec.parse("3x2@200Mbit/s", name=f"tcp-{os.getpid()}-failed")) as fabric:
        job = Job(fabric, tmp_path_factory.mktemp("failed"), hosts=3, size=8 << 20, for_s=60.0)
        for how in FAILURES:
            time.sleep(1.0)
            began = time.monotonic()
            fabric.fail("h1.eth1", how=how)
            time.sleep(0.8)
            fabric.heal("h1.eth1")
            moments[how] = (began, time.monotonic())
        time.sleep(0.5)
        job.stop.touch()
        return job.results(), moments


@pytest.mark.battery(1)
@netns
@pytest.mark.nft
@pytest.mark.parametrize("how", FAILURES)
def test_a_nic_that_fails_in_the_middle_costs_no_bit(
    failed: tuple[list[dict[str, Any]], dict[str, tuple[float, float]]], how: str
) -> None:
    seen, moments = failed
    for each in seen:
        assert (each["wrong"], each["error"]) == (0, "")
    began, healed = moments[how]
    fast, slow = seen[1]["given_up"]
    print(f"after {[round(each - began, 3) for each in slow]} s, the other NIC {len(fast)} times")
    assert any(began < each < healed for each in slow), "the NIC's connections were given up"


@netns
@pytest.mark.parametrize("how", ["down", pytest.param("carrier", marks=[pytest.mark.slow, pytest.mark.realtime])])
def test_a_nic_that_fails_while_nothing_is_under_way_is_noticed_by_the_next_collective(
    name: str, how: str, tmp_path: Path
) -> None:
    # Of an interface that is down, the kernel takes bytes and sends none: nothing is ever unacknowledged.
    with Fabric.up(FabricSpec.parse("3x2@200Mbit/s", name=name)) as fabric:
        job = Job(fabric, tmp_path, hosts=3, size=8 << 20, for_s=0.0, idle_s=1.5)
        job.await_line("idle")
        fabric.fail("h1.eth1", how=how)
        seen = job.results()
    for each in seen:
        assert (each["wrong"], each["error"]) == (0, "")
    rails = seen[1]["rails"]
    assert isinstance(rails, list) and rails[1][2] > 0, "the NIC's connections were given up"


@pytest.mark.slow
@pytest.mark.battery(11)
@netns
def test_a_nic_that_gets_another_address_in_the_middle_is_used_again(name: str, tmp_path: Path) -> None:
    """As with a new lease: the address of a NIC goes, and another one comes, while AllReduces go on."""
    with Fabric.up(FabricSpec.parse("3x2@200Mbit/s", name=name)) as fabric:
        job = Job(fabric, tmp_path, hosts=3, size=8 << 20, for_s=60.0)
        time.sleep(1.0)
        former = nic_address(1, 1)
        began = time.monotonic()
        # Several times, as one may come between two AllReduces.
        for last in (77, 78, 79):
            new = f"{former.rpartition('.')[0]}.{last}"
            for words in (f"addr del {former}/24 dev eth1", f"addr add {new}/24 dev eth1"):
                subprocess.run(["ip", "-n", host_namespace(name, 1), *words.split()], check=True)
            former = new
            time.sleep(1.5)
        job.stop.touch()
        seen = job.results()
    for each in seen:
        assert (each["wrong"], each["error"]) == (0, "")
        assert max(each["seconds"]) < 10 * statistics.median(each["seconds"])
    assert sum(each["resent"] for each in seen) > 0, "the address was changed in the middle of an AllReduce"
    print(f"given up after {[round(at - began, 3) for at in seen[1]['given_up'][1]]} s")
    # Rank 1 sends from there, and rank 0 to there.
    for each in seen[:2]:
        first, last = each["sent"][-3], each["sent"][-1]
        fast, slow = (b - a for a, b in zip(first, last, strict=True))
        assert slow > 0.5 * fast, each["sent"]


def stalls_after(seen: list[dict[str, Any]], start: float, end: float) -> tuple[float, float]:
    """The longest time in which nobody got a chunk, and in which one rank got none, of those that lie between `start`
    and a quarter of a second after `end` at least in part; seconds."""
    near = [[(a, b) for a, b in each["gaps"] if b > start and a < end + 0.25] for each in seen]
    together = near[0]
    for gaps in near[1:]:
        together = [(max(a, c), min(b, d)) for a, b in together for c, d in gaps if a < d and c < b]
    alone = [gap for gaps in near for gap in gaps]
    longest = [max((b - a for a, b in gaps if b > start), default=0.0) for gaps in (together, alone)]
    return longest[0], longest[1]


@pytest.mark.slow
@pytest.mark.realtime
@netns
def test_a_hundred_failures_cost_no_bit(name: str, tmp_path: Path) -> None:
    """NICs fail and come back at random moments; what each kind costs is printed."""
    seed = int(os.environ.get("OPTCC_SEED", "1"))
    print(f"seed {seed}")
    draw = random.Random(seed)
    moments: dict[str, list[tuple[float, float]]] = {how: [] for how in FAILURES}
    with Fabric.up(FabricSpec.parse("3x2@200Mbit/s", name=name)) as fabric:
        job = Job(fabric, tmp_path, hosts=3, size=8 << 20, for_s=600.0)
        time.sleep(2.0)
        quiet: list[tuple[float, float]] = []
        for number in range(100):
            how, where = FAILURES[number % len(FAILURES)], f"h{draw.randrange(3)}.eth{draw.randrange(2)}"
            # Long enough for the NIC to be in use again: a second failure at the same time is another matter.
            time.sleep(1.0 + 0.2 * draw.random())
            began = time.monotonic()
            fabric.fail(where, how=how)
            moments[how].append((began, time.monotonic()))
            quiet.append((began - 0.3, began - 0.3))
            time.sleep(0.3 + 0.2 * draw.random())
            fabric.heal(where)
        job.stop.touch()
        seen = job.results(quiet=True)
    for each in seen:
        assert (each["wrong"], each["error"]) == (0, "")
    print("runs", len(seen[0]["seconds"]), "given up", [each["lost"] for each in seen])
    assert min(len(each["seconds"]) for each in seen) >= 100
    for how, its_moments in {**moments, "nothing": quiet}.items():
        for who, number in (("nobody", 0), ("one rank", 1)):
            stalls = sorted(1e3 * stalls_after(seen, *its)[number] for its in its_moments)
            words = f"median {statistics.median(stalls):.1f} ms, 90 % {stalls[len(stalls) * 9 // 10]:.1f} ms"
            print(f"{how}: {who} got anything for {words}, longest {stalls[-1]:.1f} ms ({len(stalls)})")
            assert stalls[-1] < 5000


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.battery(15, 17)
@netns
@pytest.mark.nft
def test_a_cable_that_loses_packets_or_most_of_its_rate_costs_no_bit(name: str, tmp_path: Path) -> None:
    """One packet in a hundred, one in twenty, and three quarters of the rate."""
    command = ["ip", "netns", "exec", core_namespace(name), "nft", "-f", "-"]
    with Fabric.up(FabricSpec.parse("3x2@200Mbit/s", name=name)) as fabric:
        job = Job(fabric, tmp_path, hosts=3, size=8 << 20, for_s=60.0)
        for share in (1, 5):
            time.sleep(0.5)
            rules = f"""add table netdev loss
                add chain netdev loss in {{ type filter hook ingress device "h1e1" priority 0; policy accept; }}
                add rule netdev loss in numgen random mod 100 < {share} drop
            """
            subprocess.run(command, input=rules, text=True, check=True, capture_output=True, timeout=10)
            time.sleep(2.0)
            away = "delete table netdev loss\n"
            subprocess.run(command, input=away, text=True, check=True, capture_output=True, timeout=10)
        fabric.set_rate("h1.eth1", NicRates.parse("50Mbit/s"))
        time.sleep(2.0)
        job.stop.touch()
        seen = job.results()
    for each in seen:
        assert (each["wrong"], each["error"]) == (0, "")
        assert len(each["seconds"]) >= 3
    print("given up", [each["lost"] for each in seen])


@pytest.mark.battery(6)
@netns
@pytest.mark.parametrize(
    ("hosts", "how"),
    [
        pytest.param(3, "blackhole", marks=[pytest.mark.slow, pytest.mark.realtime, pytest.mark.nft]),
        pytest.param(3, "down", marks=[pytest.mark.slow, pytest.mark.realtime]),
        pytest.param(4, "blackhole", marks=pytest.mark.nft),
    ],
)
def test_a_host_without_nics_is_the_same_error_everywhere(hosts: int, how: str, name: str, tmp_path: Path) -> None:
    with Fabric.up(FabricSpec.parse(f"{hosts}x2@200Mbit/s", name=name)) as fabric:
        job = Job(fabric, tmp_path, hosts=hosts, size=8 << 20, for_s=20.0, stall_s=2.0)
        time.sleep(1.0)
        fabric.fail("h1", how=how)
        seen = job.results()
    for rank, each in enumerate(seen):
        assert each["error"] == f"AllRailsFailed: rank {rank}: no rail to rank 1 (eth0, eth1)"
        assert (each["culprits"], each["nics"]) == ([1], [[1, "eth0"], [1, "eth1"]])
        assert each["input"], "inputs are as they were"
        assert isinstance(each["failed_s"], float) and each["failed_s"] < 2.0 + 4.0 + 2.0


@pytest.mark.slow
@pytest.mark.realtime
@netns
@pytest.mark.parametrize("how", ["blackhole", "down"])
def test_a_host_without_nics_is_waited_for_if_the_job_says_so(how: str, name: str, tmp_path: Path) -> None:
    with Fabric.up(FabricSpec.parse("3x2@200Mbit/s", name=name)) as fabric:
        job = Job(fabric, tmp_path, hosts=3, size=1 << 20, for_s=20.0, stall_s=0.5, partition_s=15.0)
        time.sleep(0.5)
        fabric.fail("h1", how=how)
        time.sleep(2.0)
        fabric.heal("h1")
        time.sleep(1.0)
        job.stop.touch()
        seen = job.results()
    for each in seen:
        assert (each["wrong"], each["error"]) == (0, "")
        waits = [*each["seconds"], *each["agreed"]]
        assert 1.0 < max(waits) < 4.0 and sum(wait > 1.0 for wait in waits) == 1


@pytest.mark.battery(22)
@netns
@pytest.mark.parametrize("killed", [pytest.param(2, marks=pytest.mark.slow), 0])
def test_a_rank_that_is_killed_is_named_everywhere(killed: int, name: str, tmp_path: Path) -> None:
    with Fabric.up(FabricSpec.parse("3x2@200Mbit/s", name=name)) as fabric:
        job = Job(fabric, tmp_path, hosts=3, size=8 << 20, for_s=20.0)
        time.sleep(1.0)
        # The launcher becomes the rank: its process is the one to kill.
        job.ranks[killed].kill()
        seen = job.results()
    for rank, each in enumerate(seen):
        if rank != killed:
            assert each["error"].startswith(f"RankLost: rank {rank}: rank {killed} is lost: its process has ended")
            assert each["culprits"] == [killed] and each["input"]
            assert isinstance(each["failed_s"], float) and each["failed_s"] < 4.0


@pytest.mark.slow
@pytest.mark.mpi
def test_bench_over_tcp_is_exact(tmp_path: Path) -> None:
    beside = Path(sys.executable).parent / "mpirun"
    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "XDG_CACHE_HOME": str(tmp_path),
        "OPTCC_SOCKET_IFNAME": "=lo",
    }
    words = ("bench", "--transport", "tcp", "-b", "0", "-e", "4M", "-f", "64", "-n", "2", "-d", "int32", "--json")
    done = subprocess.run(
        [
            *(str(beside) if beside.exists() else "mpirun", "-n", "4", sys.executable, "-m", "optcc", *words),
            *("--schedule", "ring", "--schedule", "optcc", "--peer", "mpi"),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DONE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"]
    assert [row["schedule"] for row in rows] == ["ring", "optcc", "mpi"] * (len(rows) // 3) and len(rows) >= 12
    assert all(row[side]["nwrong"] == 0 for row in rows for side in ("out_of_place", "in_place"))
