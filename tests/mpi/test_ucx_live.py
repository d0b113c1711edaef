"""The UCX transport on emulated hosts: two NICs each, a context of its own for each NIC."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from optcc.errors import EnvironmentMissing
from optcc.experiments.fabric import Fabric, FabricSpec, control_address, nic_address
from optcc.runtime.transports.ucx_library import load

ROOT = Path(__file__).resolve().parents[2]
DONE_S = 60.0
PORT = 5200

# Rank i on host i: some AllReduces; how many elements were wrong, and the bytes that each NIC has sent.
PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np
from optcc.runtime.exact_inputs import make_input, wrong_elements
from optcc.runtime.executor import Executor
from optcc.runtime.nics import HostNic
from optcc.runtime.rendezvous import at_address, read_secret
from optcc.runtime.samples import ring
from optcc.runtime.transports.ucx import UcxTransport
from optcc.verify.plan import verify_plan

given = json.loads(sys.argv[1])
rank, n, size = given["rank"], given["n_ranks"], given["size"]
secret = read_secret(given["secret"])
meet = at_address(tuple(given["at"]), rank, n, secret, timeout_s=20)
transport = UcxTransport(meet, [HostNic(*nic) for nic in given["nics"]], chunk_bytes=1 << 18)
plan = ring(n, size, segments=2)
executor = Executor(plan, rank, transport, verify_plan(plan), deadline_s=40)
sent = lambda: [int(Path(f"/sys/class/net/{nic[0]}/statistics/tx_bytes").read_text()) for nic in given["nics"]]
before, wrong = sent(), 0
for seed in range(3):
    recv = np.empty(size // 4, np.float32)
    executor.all_reduce(make_input(rank, size // 4, "float32", "sum", seed), recv)
    wrong += wrong_elements(plan, rank, recv, seed)
transport.barrier()
print(json.dumps({"wrong": wrong, "sent": [after - first for after, first in zip(sent(), before)]}))
transport.close()
"""


@pytest.mark.netns
def test_both_nics_carry_what_they_are_said_to(tmp_path: Path) -> None:
    try:
        load()
    except EnvironmentMissing as missing:
        pytest.skip(f"no UCX: {missing}")
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_bytes(os.urandom(32))
    hosts, size = 3, 3 << 20
    ranks: list[subprocess.Popen[str]] = []
    with Fabric.up(FabricSpec.parse(f"{hosts}x2@200Mbit/s", name=f"ucx-{os.getpid()}")) as fabric:
        try:
            for rank in range(hosts):
                given = {
                    "rank": rank,
                    "n_ranks": hosts,
                    "size": size,
                    "nics": [(f"eth{nic}", nic_address(rank, nic), 2 - nic, 2 - nic) for nic in range(2)],
                    "secret": str(secret),
                    "at": (control_address(0), PORT),
                }
                argv = fabric.host_command(rank, [sys.executable, "-c", PROGRAM, json.dumps(given)])
                # Ranks of one machine would otherwise find shared memory.
                environment = os.environ | {"PYTHONPATH": str(ROOT), "UCX_TLS": "tcp,self"}
                ranks.append(
                    subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
                )
            for process in ranks:
                out, err = process.communicate(timeout=DONE_S)
                assert process.returncode == 0, err
                seen = json.loads(out.splitlines()[-1])
                assert seen["wrong"] == 0
                fast, slow = seen["sent"]
                assert fast / (fast + slow) == pytest.approx(2 / 3, rel=0.1)
                assert fast + slow > 3 * 4 / 3 * size, "the bytes went over the NICs"
        finally:
            for process in ranks:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.communicate()
