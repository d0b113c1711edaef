"""`optcc.init` under the variables of every launcher, each rank a process of its own, and what it refuses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from optcc.errors import DeadlineExceeded, EnvironmentMissing, InputError
from optcc.job import agreed_topology, init, knows_nics
from optcc.runtime.communicator import Communicator
from optcc.runtime.launchers import FOLDER_VARIABLE, LAUNCHER_VARIABLE, Launch, check_count, find_launch, meet_of
from optcc.runtime.rendezvous import Meeting, over_store
from optcc.topology import Nic, Server, Topology
from tests.unit.stand_in_cupy import StandIn

PROGRAM = """
import numpy as np, optcc
for _ in range(2):
    with optcc.init() as comm:
        total = comm.all_reduce(np.full(1000, comm.rank + 1.0))
        print(comm.rank, comm.n_ranks, total[0], total.min() == total.max())
"""
DONE_S = 60.0


def clean_environment() -> dict[str, str]:
    """This process's, without what a launcher says, over loopback."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_"))}
    return clean | {"OPTCC_SOCKET_IFNAME": "=lo"}


def run_ranks_with(variables: Mapping[int, Mapping[str, str]], folder: Path) -> list[str]:
    """The program, a process for each rank, whose environment has nothing of another launcher."""
    clean = clean_environment()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=folder,
            env={**clean, **each},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in variables.values()
    ]
    said = []
    for each in ranks:
        try:
            out, errors = each.communicate(timeout=DONE_S)
        finally:
            each.kill()
        assert each.returncode == 0, errors
        said.append(out)
    return said


def torchrun(rank: int, n_ranks: int) -> dict[str, str]:
    """What torchrun says to a worker on one host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(20000 + os.getpid() % 20000),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def slurm(rank: int, n_ranks: int) -> dict[str, str]:
    """What srun says to a task."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(n_ranks),
        "SLURM_NTASKS": str(n_ranks),
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "0",
    }


@pytest.mark.parametrize("launcher", [torchrun, pytest.param(slurm, marks=pytest.mark.slow)])
def test_ranks_find_each_other_again_and_again(launcher: object, tmp_path: Path) -> None:
    assert callable(launcher)
    said = run_ranks_with({rank: launcher(rank, 3) for rank in range(3)}, tmp_path)
    assert said == [f"{rank} 3 6.0 True\n" * 2 for rank in range(3)]
    assert not list(tmp_path.iterdir()), "the file of the meeting is gone"


def test_a_process_without_a_launcher_is_a_job_of_one_rank(tmp_path: Path) -> None:
    assert run_ranks_with({0: {}}, tmp_path) == ["0 1 1.0 True\n" * 2]


def test_a_rank_that_names_its_gpu_has_the_path_of_its_arrays_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    cupy = StandIn(seed, 1)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    caplog.set_level("INFO", "optcc.devices")
    with init(device_id=0, environ={}) as comm:
        (said,) = caplog.messages
        assert said.startswith("optcc: arrays on a GPU: staged: ")
        assert "CUDA IPC: no two ranks are processes of one host" in said, "it was tried"
        total = comm.all_reduce(cupy.asarray(np.full(1000, 3.0, np.float32)))
        assert cupy.asnumpy(total).tolist() == [3.0] * 1000


def test_a_gpu_without_cupy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(EnvironmentMissing, match=r"pip install 'optcc\[gpu\]'"):
        init(device_id=0, environ={})


def test_a_batch_script_of_slurm_is_no_task(tmp_path: Path) -> None:
    """It has the variables of the job, and would wait for tasks that do not exist."""
    variables = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "17"}
    assert find_launch(variables) == Launch("none", 0, 1)


def test_mpi_counts_inside_a_step_of_slurm_whose_tasks_are_hosts() -> None:
    variables = {**slurm(0, 2), "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"}
    assert find_launch(variables) == Launch("mpi", 3, 8, "OMPI_COMM_WORLD_SIZE")
    assert find_launch({**variables, LAUNCHER_VARIABLE: "slurm"}).n_ranks == 2
    assert find_launch({**variables, LAUNCHER_VARIABLE: "none"}).n_ranks == 1


def test_variables_that_agree_are_one_launch() -> None:
    """Scripts under mpirun set torch's variables from MPI's."""
    variables = {**torchrun(1, 2), "PMI_RANK": "1", "PMI_SIZE": "2"}
    assert find_launch(variables) == Launch("mpi", 1, 2, "PMI_SIZE")


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({"RANK": "0"}, "RANK is set: WORLD_SIZE must be, too"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "SLURM_PROCID is set: SLURM_STEP_NUM_TASKS must be, too"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set: RANK must be, too"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK 2: must be below WORLD_SIZE 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK '-1': must be a number from 0"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"},
            "OMPI_COMM_WORLD_SIZE says rank 0 of 4, WORLD_SIZE rank 0 of 2: must agree, or OPTCC_LAUNCHER",
        ),
        ({"OPTCC_LAUNCHER": "mpi"}, "OPTCC_LAUNCHER 'mpi': must come with OMPI_COMM_WORLD_RANK or"),
        ({"OPTCC_LAUNCHER": "pbs"}, "OPTCC_LAUNCHER 'pbs': must be one of mpi, torchrun, slurm, none"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(variables: dict[str, str], what: str) -> None:
    with pytest.raises(InputError, match=what):
        init(environ=variables)


def test_pmix_says_the_rank_and_mpi_how_many_there_are() -> None:
    """`prterun` and `srun --mpi=pmix` set no size; a launcher that does counts before it."""
    pmix = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "job"}
    launch = find_launch(pmix)
    assert launch == find_launch({**pmix, LAUNCHER_VARIABLE: "mpi"}) == Launch("mpi", 1, 0, "PMIX_RANK")
    for variables in (torchrun(0, 2), slurm(0, 2)):
        assert find_launch({**pmix, **variables}) == find_launch(variables)
    check_count(launch, 1, 4)
    with pytest.raises(InputError, match="PMIX_RANK says rank 1, MPI rank 0 of 1: must be started with the launcher"):
        check_count(launch, 0, 1)


def test_a_count_that_mpi_has_not_started_is_refused() -> None:
    launch = find_launch({"RANK": "0", "WORLD_SIZE": "2"})
    check_count(launch, 0, 2)
    with pytest.raises(InputError, match="WORLD_SIZE says 2 ranks, MPI has started 1"):
        check_count(launch, 0, 1)
    check_count(find_launch({}), 3, 7)


def test_a_topology_of_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="topology of 4 ranks: must have 1, as the job has"):
        init("4@1GB/s", environ={"OPTCC_SOCKET_IFNAME": "=lo"})


def test_several_hosts_under_torchrun_need_its_store_or_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    variables = {**torchrun(0, 2), "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(EnvironmentMissing, match=r"needs torch .*; or set OPTCC_RENDEZVOUS_DIR"):
        meet_of(find_launch(variables), variables, 0)
    said = run_ranks_with(
        {rank: {**torchrun(rank, 2), "LOCAL_WORLD_SIZE": "1", FOLDER_VARIABLE: str(tmp_path)} for rank in range(2)},
        tmp_path,
    )
    assert said == [f"{rank} 2 3.0 True\n" * 2 for rank in range(2)]


class _Store:
    """A store as torch's: `get` waits for a key, for a while."""

    def __init__(self, timeout_s: float) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._timeout_s = timeout_s

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, self._timeout_s):
                raise RuntimeError(f"wait timeout after {self._timeout_s} s, keys: {key}")
            return self._values[key].encode()


def test_ranks_meet_over_a_store() -> None:
    store, met = _Store(10.0), dict[int, Meeting]()

    def meet(rank: int) -> None:
        met[rank] = over_store(store, rank, 3)(b"record %d" % rank)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DONE_S)
    assert {meeting.records for meeting in met.values()} == {(b"record 0", b"record 1", b"record 2")}
    assert len({(meeting.job, meeting.secret) for meeting in met.values()}) == 1 and len(met) == 3


def test_a_rank_that_does_not_come_to_the_store_is_named() -> None:
    with pytest.raises(DeadlineExceeded, match="rank 1 has not come to the store of the job"):
        over_store(_Store(0.05), 0, 2)(b"record")


def test_a_topology_that_is_not_what_was_measured_is_told(caplog: pytest.LogCaptureFixture) -> None:
    declared, measured = Topology.parse("2@50MB/s"), Topology.parse("2@50MB/s,1=25MB/s:49MB/s")
    assert agreed_topology(declared, measured) is measured
    assert agreed_topology(declared, measured, rank=1) is measured
    assert caplog.messages == ["optcc: topology: h1 sends 25MB/s, not 50MB/s: plans are for what was measured"]


def test_where_a_nic_is_absent_a_topology_of_other_nics_says_too_little() -> None:
    """Its hosts have what is left: what comes back would be a part of that, and what is lost too large a part."""
    rate = Fraction(25_000_000)
    absent = Server("h0", 1, (Nic(0, rate, rate), Nic(1, rate, rate, failed=True)))
    measured = Topology((absent, Server("h1", 1, (Nic(0, rate, rate), Nic(1, rate, rate)))))
    pooled, others = Topology.parse("2@50MB/s,0=25MB/s"), Topology.parse("1x2@50MB/s")
    assert agreed_topology(pooled, measured) == measured and agreed_topology(measured, measured) == measured
    assert not knows_nics(others, measured) and knows_nics(others, pooled)
    back = measured.under([[(1.0, 1.0)] * 2] * 2)
    assert agreed_topology(Topology.parse("2@50MB/s"), back) == Topology.parse("2@50MB/s")


def test_a_communicator_has_what_users_of_mpi4py_look_for() -> None:
    with init(environ={"OPTCC_SOCKET_IFNAME": "=lo"}) as comm:
        assert isinstance(comm, Communicator)
        assert (comm.Get_rank(), comm.Get_size()) == (0, 1)
        comm.Barrier()
        part = comm.Split(0, key=1)
        assert part is not None and part.Get_size() == 1
        part.Free()
        assert comm.Split(None) is None
        assert np.array_equal(comm.all_reduce(np.arange(4.0)), np.arange(4.0))
        for wrong in ([1.0, 2.0], 3.0, np.float32(3.0)):
            with pytest.raises(InputError, match="must be an array"):
                comm.all_reduce(wrong)


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("nodes", [1, 2])
def test_torchruns_workers_meet_on_one_node_and_over_its_store_on_two(nodes: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    # Workers of an agent share its output: a line is written at once.
    at_once = PROGRAM.replace("print(", "import os; os.write(1, b'%d %d %g %d\\n' % (").replace(".max())", ".max()))")
    program.write_text(at_once, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = ["--nnodes", str(nodes), "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words, "--node-rank", str(node), str(program)],
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(nodes)
    ]
    said = ""
    for agent in agents:
        try:
            out, errors = agent.communicate(timeout=DONE_S)
        finally:
            agent.kill()
        assert agent.returncode == 0, errors
        said += out
    n_ranks = 2 * nodes
    lines = [f"{rank} {n_ranks} {n_ranks * (n_ranks + 1) // 2} 1" for rank in range(n_ranks)]
    assert sorted(said.splitlines()) == sorted(2 * lines)


def test_probe_runs_under_any_launcher_and_refuses_a_single_host(tmp_path: Path) -> None:
    """Both ranks have met over TCP, without MPI, when they are refused; the first alone says why."""
    command = [sys.executable, "-m", "optcc", "probe"]
    processes = [
        subprocess.Popen(command, env={**os.environ, **torchrun(rank, 2)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=DONE_S)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert said[0] == "optcc: probe: all ranks are on one host: must be on two or more, as NICs join hosts\n"
