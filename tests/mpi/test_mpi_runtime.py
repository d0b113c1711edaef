"""The run-time under mpirun: the transport's promises, exact results, agreement and deadlines, one process a rank.

The tests launch this file as a program; every rank writes what it saw to a file of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from optcc.collective import DTYPE_BYTES, Collective
from optcc.errors import DeadlineExceeded, MismatchError, RankLost
from optcc.plan import RECV, Channel, Plan
from optcc.runtime.communicator import Communicator
from optcc.runtime.conformance import check_transport
from optcc.runtime.exact_inputs import expected_output, make_input, wrong_elements
from optcc.runtime.executor import Executor
from optcc.runtime.handle import Handle
from optcc.runtime.samples import Draft, exchange, ring
from optcc.runtime.transports.mpi import MpiTransport
from optcc.schedule import COPY
from optcc.verdict import PROPERTIES, PROVED, Verdict, sealed
from optcc.verify.plan import verify_plan

MIX = [
    *(("float32", "sum"), ("float64", "max"), ("int32", "avg"), ("int64", "prod"), ("bfloat16", "sum")),
    *(("float16", "min"), ("uint8", "bxor"), ("float32", "avg"), ("int8", "sum"), ("float32", "min")),
]
LAUNCH_S_MAX = 60


def proved(plan: Plan) -> Verdict:
    return verify_plan(plan)


def count_wrong(transport: MpiTransport) -> dict[str, int]:
    """Wrong elements of several plans, types and reductions, and of repeated runs."""
    n, wrong = transport.n_ranks, {}
    cases = [
        ring(n, 1 << 20, "float32", "sum", segments=4),
        ring(n, 8 * 1001, "int64", "max", segments=3, slots=1),
        exchange(n, 4 * 777, "int32", "avg", parts=2),
        exchange(n, 8 * 50, "float64", "prod"),
        ring(n, 0),
    ]
    for plan in cases:
        transfers = plan.transfers
        for window in (1, 2):
            executor = Executor(plan, transport.rank, transport, proved(plan), window=window, deadline_s=20)
            for turn in range(3):
                count = plan.size_bytes // DTYPE_BYTES[transfers.dtype]
                send = make_input(transport.rank, count, transfers.dtype, transfers.reduction, seed=turn)
                recv = np.zeros_like(send)
                executor.all_reduce(send, recv)
                name = (
                    f"{plan.name} {plan.size_bytes} {transfers.dtype} {transfers.reduction} window {window} turn {turn}"
                )
                wrong[f"{name} window {window} turn {turn}"] = wrong_elements(plan, transport.rank, recv, seed=turn)
    return wrong


def disagree(transport: MpiTransport) -> str:
    plan = ring(transport.n_ranks, 1024 if transport.rank == transport.n_ranks - 1 else 4096)
    try:
        Executor(plan, transport.rank, transport, proved(plan), deadline_s=20)
    except MismatchError as error:
        return str(error)
    return ""


def block(transport: MpiTransport) -> str:
    """Rank 0 waits for a message that rank 1 never sends."""
    draft = Draft(channels=[Channel(1, 0, 1)])
    draft.add(0, 0, RECV, 4, recv=(0, draft.transfer(1, 0, COPY, 0, 0, 4)), dst_offset=0)
    plan = draft.finish("blocked", transport.n_ranks, 4, "int32", "sum")
    mistaken = sealed(Verdict(plan.digest, dict.fromkeys(PROPERTIES, PROVED)))
    executor = Executor(plan, transport.rank, transport, mistaken, deadline_s=0.3)
    try:
        executor.run(np.zeros(4, dtype=np.uint8))
    except DeadlineExceeded as error:
        return str(error)
    return ""


def mix(transport: MpiTransport) -> list[int]:
    """Wrong elements of ten AllReduces at once, of different lengths, types and reductions; twice, then persistent."""
    comm = Communicator(transport, by_hand, deadline_s=20)
    wrong: list[int] = []
    cases = [(1 + 7001 * number % 50_000, *case) for number, case in enumerate(MIX)]
    for seed in range(2):
        handles = [
            comm.start_all_reduce(make_input(comm.rank, *case, seed=seed), case[2], dtype=case[1]) for case in cases
        ]
        wrong += [
            count_unequal(comm, handle, case, seed) for handle, case in reversed([*zip(handles, cases, strict=True)])
        ]
    persistent = [comm.all_reduce_init(make_input(comm.rank, *case), case[2], dtype=case[1]) for case in cases]
    for _ in range(2):
        handles = [each.start() for each in persistent]
        wrong += [count_unequal(comm, handle, case, 0) for handle, case in zip(handles, cases, strict=True)]
    comm.barrier()
    return wrong


def count_unequal(comm: Communicator, handle: Handle, case: tuple[int, str, str], seed: int) -> int:
    total, _ = expected_output(Collective("allreduce", comm.n_ranks), *case, comm.rank, seed=seed)
    return int(np.count_nonzero(handle.result() != total))


def by_hand(collective: Collective, size_bytes: int, dtype: str, reduction: str) -> tuple[Plan, Verdict]:
    plan = (ring if size_bytes % 3 else exchange)(collective.n_ranks, size_bytes, dtype, reduction)
    return plan, proved(plan)


def give_up(transport: MpiTransport) -> str:
    """The last rank cancels what the others wait for."""
    comm = Communicator(transport, by_hand, deadline_s=20)
    init = comm.all_reduce_init(np.ones(1000))
    if comm.rank == comm.n_ranks - 1:
        comm.abort("on purpose")
        return ""
    begin = time.perf_counter()
    try:
        init.start().wait()
    except RankLost as error:
        return str(error) if time.perf_counter() - begin < 10 else "too late"
    return ""


def main(folder: Path, fails: bool) -> int:
    if fails:
        MpiTransport().close()
        return MismatchError.exit_code
    checks = check_transport(MpiTransport)
    transport = MpiTransport()
    report = {
        "checks": checks,
        "wrong": count_wrong(transport),
        "mix": mix(transport),
        "disagreement": disagree(transport),
        "given up": give_up(MpiTransport()),
        "blocked": block(transport),
    }
    (folder / f"{transport.rank}.json").write_text(json.dumps(report))
    transport.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2] == "fails"))

import pytest  # noqa: E402 - a rank under mpirun needs no pytest, and its import takes as long as its work

from tests.mpi.launch import ROOT, rank_command  # noqa: E402

pytestmark = pytest.mark.mpi


def launch(n_ranks: int, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command, environment = rank_command(n_ranks, arguments)
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LAUNCH_S_MAX, check=False, cwd=ROOT
    )


@pytest.mark.parametrize(
    "n_ranks", [*(pytest.param(each, marks=[pytest.mark.slow, pytest.mark.realtime]) for each in (2, 3)), 4]
)
def test_every_rank_keeps_every_promise(n_ranks: int, tmp_path: Path) -> None:
    done = launch(n_ranks, [__file__, str(tmp_path), "ends"])
    assert done.returncode == 0, done.stderr
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(n_ranks)]
    others = ", ".join(map(str, range(n_ranks - 1)))
    explanation = (
        f"rank {n_ranks - 1} differs from rank{'s' if n_ranks > 2 else ''} {others}: size_bytes 1024 instead of 4096"
    )
    for rank, report in enumerate(reports):
        assert len(report["checks"]) == 14
        assert not any(report["wrong"].values()), report["wrong"]
        assert len(report["wrong"]) == 30
        assert report["mix"] == [0] * 40
        assert report["disagreement"] == explanation
        last = n_ranks - 1
        told = f"rank {last} is lost: Cancelled: rank {last}: on purpose"
        assert report["given up"] == ("" if rank == last else told)
        assert ("waits for message 0 of channel 1->0" in report["blocked"]) == (rank == 0)


def test_the_exit_code_of_the_ranks_is_that_of_mpirun(tmp_path: Path) -> None:
    assert launch(2, [__file__, str(tmp_path), "fails"]).returncode == MismatchError.exit_code


def test_the_example_of_the_docs_runs_under_mpirun(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "runtime.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n# under_mpirun\.py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    script = tmp_path / "under_mpirun.py"
    script.write_text(block, encoding="utf-8")
    done = launch(4, [str(script)])
    assert done.returncode == 0, done.stderr
