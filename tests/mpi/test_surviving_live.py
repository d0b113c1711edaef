"""Policy `without` over TCP on emulated hosts: one loses all NICs, the others go on, and merge what it has."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optcc.experiments.fabric import RUN_ROOT, Fabric, FabricSpec, control_address, nic_address

_NUMBERS = itertools.count()
ROOT = Path(__file__).resolve().parents[2]
DONE_S = 40.0

# AllReduces until one has been merged; of each who was missing, and how many elements were wrong.
PROGRAM = """
import json, sys, time
import numpy as np
from optcc.planner import Planner
from optcc.runtime.nics import HostNic
from optcc.runtime.rendezvous import at_address, read_secret
from optcc.runtime.surviving import SurvivingCommunicator
from optcc.runtime.transports.tcp import TcpTransport
from optcc.topology import Topology

given = json.loads(sys.argv[1])
rank, n = given["rank"], 3
nics = [HostNic(*nic) for nic in given["nics"]]
meet = at_address(tuple(given["at"]), rank, n, read_secret(given["secret"]), timeout_s=20)
transport = TcpTransport(meet, nics, stall_s=0.5, regroups=True)

def data(rank, number):
    return np.random.default_rng((rank, number)).integers(-1000, 1000, 1 << 17)

def wrong(result, number, missing):
    return int((result[1:] != sum(data(each, number)[1:] for each in range(n) if each not in missing)).sum())

seen, n_merged, number = [], 0, 0
with SurvivingCommunicator(transport, Planner(Topology.parse("3@50MB/s")), partition_s=20.0) as comm:
    while True:
        array = data(rank, number)
        array[0] = n_merged
        began_s = time.monotonic()
        total = comm.all_reduce(array)
        seen.append([number, comm.missing, wrong(total, number, comm.missing)])
        took_s = time.monotonic() - began_s
        if comm.missing:
            print(f"rank {rank} had a result after {took_s:.2f} s", file=sys.stderr)
            print("lacking", flush=True)
            comm.merge(total)
            seen.append([number, comm.missing, wrong(total, number, comm.missing)])
            n_merged += 1
        elif not number:
            print("ready", flush=True)
        if total[0]:
            break
        number += 1
print(json.dumps(seen), flush=True)
"""


@pytest.fixture
def name() -> Iterator[str]:
    """A name that no other fabric has; whatever stands under it goes at the end."""
    unique = f"without-{os.getpid()}-{next(_NUMBERS)}"
    try:
        yield unique
    finally:
        Fabric(unique).down()
    assert not list(RUN_ROOT.glob(f"{unique}*"))


@contextlib.contextmanager
def ranks_on(fabric: Fabric, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """A rank on each of three hosts of two NICs."""
    secret = folder / "secret"
    secret.touch(0o600)
    secret.write_bytes(os.urandom(32))
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(3):
            nics = [(f"eth{nic}", nic_address(rank, nic), 1, 1) for nic in range(2)]
            given = {"rank": rank, "nics": nics, "secret": str(secret), "at": (control_address(0), 5100)}
            argv = fabric.host_command(rank, [sys.executable, "-c", PROGRAM, json.dumps(given)])
            pipe, environ = subprocess.PIPE, os.environ | {"PYTHONPATH": str(ROOT)}
            ranks.append(subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env=environ))
        yield ranks
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None and process.stderr is not None
    return process.stdout.readline().strip() or process.stderr.read()


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.netns
@pytest.mark.nft
def test_a_host_without_nics_is_gone_on_without_and_merged_when_it_is_back(name: str, tmp_path: Path) -> None:
    with Fabric.up(FabricSpec.parse("3x2@200Mbit/s", name=name)) as fabric, ranks_on(fabric, tmp_path) as ranks:
        assert [next_line(process) for process in ranks] == ["ready"] * 3
        time.sleep(0.5)
        fabric.fail("h1", how="blackhole")
        assert [next_line(ranks[rank]) for rank in (0, 2)] == ["lacking"] * 2
        time.sleep(1.0)
        fabric.heal("h1")
        seen: list[list[list[Any]]] = []
        for process in ranks:
            out, err = process.communicate(timeout=DONE_S)
            print(err)
            assert process.returncode == 0
            seen.append(json.loads(out.splitlines()[-1]))
    assert all(wrong == 0 for each in seen for _, _, wrong in each)
    lacking = [[number for number, missing, _ in each if missing] for each in seen]
    assert len(lacking[0]) == 1 and lacking[1] == [] and lacking[2] == lacking[0]
    last = [number for number, _, _ in seen[0]][-1]
    assert last == lacking[0][0] + 1 and [each[-1][:2] for each in seen] == [[last, []]] * 3
