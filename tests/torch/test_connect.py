"""How the ranks of a group connect: what was measured for the whole job counts for the groups of some of its ranks."""

from __future__ import annotations

import threading
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed: make test-torch", allow_module_level=True)

import torch.distributed as dist

from optcc.errors import InputError
from optcc.runtime.communicator import Communicator
from optcc.runtime.replanning import Replans
from optcc.topology import Topology
from optcc.torch.connect import JobNetwork, Options, connect, meet_in
from optcc.torch.process_group import create

LO = {"OPTCC_SOCKET_IFNAME": "=lo", "OPTCC_PARTITION": "wait", "OPTCC_PARTITION_S": "20"}
MEET = timedelta(seconds=20)


def connected(ranks: list[int], options: Options, network: JobNetwork | None) -> list[Communicator | Exception]:
    """The communicators of the ranks of a group, in threads of this process; or why there is none."""
    store, made = dist.HashStore(), dict[int, Communicator | Exception]()

    def body(rank: int) -> None:
        try:
            made[rank] = connect(meet_in(store, rank, len(ranks), MEET), ranks, options, network, LO)[0]
        except InputError as error:
            made[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return [made[rank] for rank in range(len(ranks))]


def test_a_group_of_some_ranks_takes_what_was_measured_for_them() -> None:
    topology = Topology.parse("4@40MB/s,3=10MB/s")
    rates = tuple(((1000 * rank + 1, 1000 * rank + 2),) for rank in range(4))
    network = JobNetwork(topology, rates, (((1.0, 1.0),),) * 4)
    for comm in connected([1, 3], Options(), network):
        assert isinstance(comm, Communicator)
        transport: Any = comm.engine.transport
        assert [nic[3:] for nics in transport.nics for nic in nics] == [(1001, 1002), (3001, 3002)]
        assert transport.partition_s == 20.0
        planner: Any = comm._base
        assert [int(rate) for rate in planner.topology.out] == [40_000_000, 10_000_000]
        comm.close()


def test_plans_that_stay_are_never_made_again() -> None:
    for replan in (True, False):
        options = Options(topology="2@40MB/s", measure=False, replan=replan)
        for comm in connected([0, 1], options, None):
            assert isinstance(comm, Communicator)
            assert isinstance(comm._base, Replans) == replan
            comm.close()


def test_a_topology_of_another_size_is_refused() -> None:
    for said in connected([0, 1], Options(topology="3@1GB/s"), None):
        assert isinstance(said, InputError)
        assert "topology of 3 ranks: must have 2, as the group has" in str(said)


def test_options_of_another_kind_are_refused() -> None:
    with pytest.raises(TypeError, match=r"pg_options: dict: must be optcc\.torch\.connect\.Options"):
        create(object(), {})
