"""Callers who do not belong to a job, from a host of their own, while its AllReduces go on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median

import pytest

from optcc.experiments.fabric import Fabric, FabricSpec
from optcc.experiments.fabric.processes import RunResult
from optcc.experiments.fabric.spec import nic_address

pytestmark = [pytest.mark.slow, pytest.mark.realtime, pytest.mark.netns, pytest.mark.mpi]

N_RANKS, PHASE_S, N_PHASES, SLOWER_MAX = 4, 3.0, 3, 1.05

KINDS = {
    "scan": 125,
    "wrong secret": 100,
    "huge length": 500,
    "a byte at a time": 100,
    "5,000 connections": 2000,
    "2,500 connects a second": 2500,
}
"""The connects a second that reach a port of the job; a scan tries three others for each of them."""

SINK_PORT = 9999
SINK = """
import select, socket, sys
listeners = [socket.create_server((address, int(sys.argv[1])), backlog=1024) for address in sys.argv[2:]]
while True:
    for each in select.select(listeners, [], [])[0]:
        each.accept()[0].close()
"""
"""Beside the job: what callers at these ports cost it is what this machine takes for them, who share its processors."""

JOB = """
import pathlib, sys, time
import numpy as np, optcc
folder = pathlib.Path(sys.argv[1])
with optcc.init() as comm, open(folder / f"times.{comm.rank}", "w") as file:
    draw = np.random.default_rng(comm.rank)
    own = draw.integers(-1000, 1000, 4 << 20).astype(np.float32)
    expected = sum(np.random.default_rng(rank).integers(-1000, 1000, 4 << 20) for rank in range(comm.n_ranks))
    over = False
    while not over:
        own[0] = comm.rank == 0 and (folder / "over").exists()
        began_s = time.perf_counter()
        total = comm.all_reduce(own)
        ended_s = time.perf_counter()
        over = total[0] > 0
        wrong = np.count_nonzero(total[1:] != expected[1:])
        print(began_s, ended_s, wrong, file=file, flush=True)
"""
"""Each AllReduce of 16 MiB: when it began and ended, and how many elements were wrong."""

CALLERS = """
import contextlib, os, resource, socket, sys, time
from optcc.runtime.protocol.hello import Caller, Hello
kind, a_second = sys.argv[1], int(sys.argv[2])
addresses = [(text.partition(":")[0], int(text.partition(":")[2])) for text in sys.argv[3:]]
resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 14, 1 << 14))
kept, said = {
    "scan": (10, lambda n: b""),
    "wrong secret": (100, lambda n: Caller(os.urandom(32), Hello(3, 0, 0, bytes(16)), nonce=os.urandom(32)).opening),
    "huge length": (100, lambda n: b"optcc-tc" + b"\\xff" * 200),
    "a byte at a time": (200, lambda n: b"o"),
    "5,000 connections": (5000, lambda n: b""),
    "2,500 connects a second": (400, lambda n: b"optcc-tc" + bytes(100) if n % 2 else b""),
}[kind]
if kind == "scan":
    addresses = [each for own in addresses for each in (own, *((own[0], port) for port in (22, 80, 443)))]
    a_second *= 4
held, n, began_s = [], 0, time.monotonic()
print("calling", flush=True)
while time.monotonic() - began_s < 60:
    while n < a_second * (time.monotonic() - began_s):
        address = addresses[n % len(addresses)]
        n += 1
        held.append(socket.socket())
        held[-1].setblocking(False)
        held[-1].connect_ex(address)
        data = said(n)
        if data:
            with contextlib.suppress(OSError):
                held[-1].send(data)
        if len(held) > kept:
            held.pop(0).close()
        if kind == "a byte at a time":
            for each in held:
                with contextlib.suppress(OSError):
                    each.send(b"o")
            break
    time.sleep(0.001)
"""


class _Job:
    """The job, in a thread, until it is told to end."""

    def __init__(self, fabric: Fabric, folder: Path) -> None:
        self._fabric, self._folder = fabric, folder
        self.results: list[RunResult] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        command = ["env", "-u", "OPTCC_TOPOLOGY", sys.executable, "-c", JOB, str(self._folder)]
        self.results.append(self._fabric.run(command, n_ranks=N_RANKS, capture=True, timeout_s=240))

    def __enter__(self) -> _Job:
        self._thread.start()
        deadline_s = time.monotonic() + 60
        while len(self.times(0)) < 5:
            assert self._thread.is_alive() and time.monotonic() < deadline_s, self.results
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        (self._folder / "over").touch()
        self._thread.join()

    def times(self, rank: int) -> list[tuple[float, float, int]]:
        path = self._folder / f"times.{rank}"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [(float(began), float(ended), int(wrong)) for began, ended, wrong in map(str.split, lines)]


def _said(fabric: Fabric, host: int, *argv: str) -> list[str]:
    """The lines that a command says inside a host."""
    command = fabric.host_command(host, argv)
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()


def _ports(fabric: Fabric, host: int) -> list[str]:
    """Where the rank of a host listens on its NICs."""
    addresses = [line.split()[3] for line in _said(fabric, host, "ss", "-Hltn")]
    nics = tuple(f"{nic_address(host, nic)}:" for nic in range(2))
    return [each for each in addresses if each.startswith(nics)]


def _accepted(fabric: Fabric, host: int) -> int:
    """How many connections the kernel of a host has accepted on its ports."""
    lines = _said(fabric, host, "cat", "/proc/net/snmp")
    names, counts = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(counts[names.index("PassiveOpens")])


@contextmanager
def _calling(fabric: Fabric, kind: str, addresses: list[str]) -> Iterator[None]:
    command = fabric.host_command(N_RANKS, [sys.executable, "-c", CALLERS, kind, str(KINDS[kind]), *addresses])
    callers = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert callers.stdout is not None and callers.stdout.readline() == "calling\n", callers.communicate()
        yield
        assert callers.poll() is None, callers.communicate()
    finally:
        callers.kill()
        callers.communicate()


@contextmanager
def _sink(fabric: Fabric, host: int) -> Iterator[list[str]]:
    addresses = [nic_address(host, nic) for nic in range(2)]
    sink = subprocess.Popen(fabric.host_command(host, [sys.executable, "-c", SINK, str(SINK_PORT), *addresses]))
    try:
        yield [f"{address}:{SINK_PORT}" for address in addresses]
    finally:
        sink.kill()
        sink.wait()


@pytest.mark.battery(27, 28, 29, 32)
def test_hostile_callers_cost_a_running_job_no_bit_and_little_time(tmp_path: Path) -> None:
    within: dict[tuple[str, str], list[tuple[float, float]]] = {}
    accepted = dict.fromkeys(KINDS, 0)
    with Fabric.up(FabricSpec.parse("5x2@400Mbit/s", name=f"callers-{os.getpid()}")) as fabric:
        with _Job(fabric, tmp_path) as job, _sink(fabric, 0) as sink:
            ports = {"sink": sink, "job": [each for each in _ports(fabric, 0) if each not in sink]}
            assert len(ports["job"]) >= 2
            for _, kind, called in product(range(N_PHASES), KINDS, ports):
                with _calling(fabric, kind, ports[called]):
                    began_s, before = time.perf_counter(), _accepted(fabric, 0)
                    time.sleep(PHASE_S)
                    within.setdefault((kind, called), []).append((began_s, time.perf_counter()))
                    if called == "job":
                        accepted[kind] += _accepted(fabric, 0) - before
        (done,) = job.results
        assert done.exit_code == 0, done.stderr
        times = [job.times(rank) for rank in range(N_RANKS)]
        assert len(set(map(len, times))) == 1
        assert all(wrong == 0 for each in times for _, _, wrong in each)
        took_s = {
            key: [ended - began for began, ended, _ in times[0] if any(a <= began < ended <= b for a, b in phases)]
            for key, phases in within.items()
        }
    assert all(accepted[kind] > 0.5 * a_second * N_PHASES * PHASE_S for kind, a_second in KINDS.items()), accepted
    assert min(map(len, took_s.values())) > 10
    slower = {kind: median(took_s[kind, "job"]) / median(took_s[kind, "sink"]) for kind in KINDS}
    assert max(slower.values()) <= SLOWER_MAX, slower
