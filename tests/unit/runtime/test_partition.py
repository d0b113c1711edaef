"""Which policy for hosts without a rail the arguments and variables of a job ask for, and what they may not say."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import optcc
from optcc.commands import launched
from optcc.errors import EnvironmentMissing, InputError, RuntimeFault
from optcc.runtime.partition import PARTITION_S, partition_s_of
from optcc.runtime.surviving import SurvivingCommunicator
from optcc.runtime.transports import tcp


@pytest.mark.parametrize(
    ("environ", "partition", "partition_s", "wanted"),
    [
        ({"OPTCC_PARTITION": ""}, None, None, 0.0),
        ({"OPTCC_PARTITION": "fail"}, None, None, 0.0),
        ({"OPTCC_PARTITION": "wait"}, None, None, PARTITION_S),
        ({"OPTCC_PARTITION": "fail"}, "wait", 5, 5.0),
        ({"OPTCC_PARTITION": "wait", "OPTCC_PARTITION_S": "20"}, "fail", None, 0.0),
        ({"OPTCC_PARTITION": "wait", "OPTCC_PARTITION_S": "20"}, None, 5.0, 5.0),
        ({"OPTCC_PARTITION_S": "0.5"}, "wait", None, 0.5),
        ({"OPTCC_PARTITION": "wait", "OPTCC_PARTITION_S": "0.5"}, "without", None, 0.5),
        ({}, "without", None, PARTITION_S),
    ],
)
def test_arguments_count_before_variables(
    environ: dict[str, str], partition: str | None, partition_s: float | None, wanted: float
) -> None:
    assert partition_s_of(environ, partition, partition_s) == wanted


@pytest.mark.parametrize(
    ("environ", "partition", "partition_s", "wrong"),
    [
        ({"OPTCC_PARTITION": "waits"}, None, None, "OPTCC_PARTITION 'waits': must be fail or wait"),
        ({"OPTCC_PARTITION": "without"}, None, None, "OPTCC_PARTITION 'without': must be fail or wait"),
        ({}, "waits", None, "partition 'waits': must be fail, wait or without"),
        ({}, "wait", 0.0, "partition_s 0.0: must be a number of seconds above 0"),
        ({}, "wait", float("inf"), "partition_s inf: must be a number of seconds above 0"),
        (
            {"OPTCC_PARTITION": "wait", "OPTCC_PARTITION_S": "soon"},
            *(None, None, "OPTCC_PARTITION_S 'soon': must be a number of seconds above 0"),
        ),
        ({"OPTCC_PARTITION_S": "5"}, None, None, "OPTCC_PARTITION_S '5': must come with OPTCC_PARTITION=wait"),
        ({}, None, 5.0, "partition_s 5.0: must come with partition='wait' or 'without'"),
        ({}, "fail", 5.0, "partition_s 5.0: must come with partition='wait' or 'without'"),
    ],
)
def test_what_cannot_be_is_one_error(
    environ: dict[str, str], partition: str | None, partition_s: float | None, wrong: str
) -> None:
    with pytest.raises(InputError) as caught:
        partition_s_of(environ, partition, partition_s)
    assert str(caught.value) == wrong


def test_commands_over_tcp_read_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def make(*_: object, **settings: object) -> None:
        made.append(settings["partition_s"])
        raise EnvironmentMissing("a test")

    monkeypatch.setattr(tcp, "TcpTransport", make)
    monkeypatch.setattr(launched, "over_mpi", lambda _: None)
    environ = {"OPTCC_SOCKET_IFNAME": "=lo", "OPTCC_PARTITION": "wait", "OPTCC_PARTITION_S": "20"}
    carrier = launched.carried_by(SimpleNamespace(comm=None), "tcp", environ)  # type: ignore[arg-type]
    with pytest.raises(EnvironmentMissing, match="a test"):
        carrier.__enter__()
    assert made == [20.0]


def test_init_has_deadlines_wait_for_hosts_and_refuses_other_policies() -> None:
    environ = {"OPTCC_SOCKET_IFNAME": "=lo", "OPTCC_STATUS": "0"}
    with optcc.init(partition="wait", partition_s=7.0, environ=environ) as comm:
        assert comm.whole_engine.patience_s == 7.0
        handle = comm.start_all_reduce(np.ones(4, np.float32))
        assert handle.deadline_s == comm.deadline_s + 7.0
    with optcc.init(environ=environ) as comm:
        assert comm.whole_engine.patience_s == 0.0
    with pytest.raises(InputError, match=r"^OPTCC_PARTITION 'maybe': must be fail or wait$"):
        optcc.init(environ=environ | {"OPTCC_PARTITION": "maybe"})


def test_init_has_a_communicator_of_its_own_for_jobs_that_go_on_without_hosts() -> None:
    environ = {"OPTCC_SOCKET_IFNAME": "=lo", "OPTCC_STATUS": "0"}
    with optcc.init(partition="without", environ=environ) as comm:
        assert isinstance(comm, SurvivingCommunicator) and (comm.rank, comm.n_ranks, comm.members) == (0, 1, (0,))
        array = np.arange(4.0)
        assert comm.all_reduce(array, out=array) is array and array.tolist() == [0, 1, 2, 3] and comm.missing == ()
        with pytest.raises(InputError, match="must follow the first collective that lacks contributions"):
            comm.merge(array)
        with pytest.raises(InputError, match=r"^broadcast: must be all_reduce, merge or barrier"):
            comm.broadcast(array)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeFault, match="the communicator is closed"):
        comm.all_reduce(array)
