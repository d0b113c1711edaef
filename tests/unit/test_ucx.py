"""The UCX transport: conformance, several NICs, lengths, and peers that go away. Ranks are threads over loopback."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest

from optcc.compiler import compile_schedule
from optcc.errors import DeadlineExceeded, EnvironmentMissing, InputError, MismatchError, RankLost, RuntimeFault
from optcc.plan import Channel
from optcc.runtime.conformance import check_transport
from optcc.runtime.exact_inputs import make_input, wrong_elements
from optcc.runtime.executor import Executor
from optcc.runtime.nics import HostNic
from optcc.runtime.transports import ucx_library
from optcc.runtime.transports.ucx import UcxTransport
from optcc.runtime.transports.ucx_library import CUDA_MEMORY, HOST_MEMORY, Port, Request, load
from optcc.schedules.optcc import optcc
from optcc.schedules.ring import ring
from optcc.topology import Topology
from optcc.verify.plan import verify_plan
from tests.unit.rank_threads import DONE_S, Room, run_threads
from tests.unit.stand_in_cupy import StandIn

T = TypeVar("T")

try:
    load()
except EnvironmentMissing as missing:
    pytest.skip(f"no UCX: {missing}", allow_module_level=True)


LO = (HostNic("lo", "127.0.0.1"),)


def run_ucx(
    n_ranks: int, function: Callable[[int, UcxTransport], T], nics: Sequence[HostNic] = LO, **settings: Any
) -> list[T]:
    """`function` once a rank, in threads; raises the first exception that is not a consequence of another's."""
    room = Room(n_ranks)
    return run_threads(n_ranks, lambda rank: UcxTransport(room.meet(rank), nics, **settings), function)


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_conformance(n_ranks: int) -> None:
    names = run_ucx(n_ranks, lambda _, transport: check_transport(lambda: transport))
    assert names[0][-1] == "closes twice" and len(names[0]) > 9


@pytest.fixture
def two_rails(monkeypatch: pytest.MonkeyPatch) -> list[HostNic]:
    """Two NICs of rates 2 to 1 where there is one interface."""
    monkeypatch.setattr(
        "optcc.runtime.transports.ucx.Port", lambda device, on_failure: Port("lo" if device else "", on_failure)
    )
    return [HostNic("r0", "127.0.0.1", 2, 2), HostNic("r1", "127.0.0.1", 1, 1)]


def test_conformance_over_two_rails(two_rails: list[HostNic]) -> None:
    run_ucx(3, lambda _, transport: check_transport(lambda: transport), two_rails, chunk_bytes=5000)


@pytest.mark.parametrize("count", [1, 1001, 300_007])
def test_an_allreduce_over_two_unequal_rails_is_exact_on_every_rank(two_rails: list[HostNic], count: int) -> None:
    topology = Topology.parse("4@1GB/s,3=500MB/s")
    plans = [
        compile_schedule(ring(n_ranks=4), size_bytes=count * 4),
        compile_schedule(optcc.build(topology, 2), size_bytes=count * 4, topology=topology),
    ]
    verdicts = [verify_plan(plan) for plan in plans]

    def body(rank: int, transport: UcxTransport) -> list[bytes]:
        results: list[bytes] = []
        for plan, verdict in zip(plans, verdicts, strict=True):
            executor = Executor(plan, rank, transport, verdict)
            for seed in range(3):
                recv = np.empty(count, np.float32)
                executor.all_reduce(make_input(rank, count, "float32", "sum", seed), recv)
                assert wrong_elements(plan, rank, recv, seed) == 0
                results.append(recv.tobytes())
        transport.barrier()
        return results

    results = run_ucx(4, body, two_rails, chunk_bytes=10_000)
    assert all(each == results[0] for each in results)


def send_one(transport: UcxTransport, n_bytes: int) -> None:
    """Rank 0 sends some bytes, rank 1 expects 100."""
    (handle,) = transport.open([Channel(0, 1, 1)])
    if transport.rank == 0:
        transport.post_send(handle, np.zeros(n_bytes, np.uint8))
    else:
        transport.post_recv(handle, np.zeros(100, np.uint8))
    deadline_s = time.monotonic() + 10
    while not transport.poll(0.1) and time.monotonic() < deadline_s:
        pass


@pytest.mark.parametrize("n_bytes", [99, 101])
def test_a_message_of_another_length_than_the_plan_says_is_a_named_error(n_bytes: int) -> None:
    with pytest.raises(MismatchError, match="rank 1: a message from rank 0 has another length than the plan says"):
        run_ucx(2, lambda _, transport: send_one(transport, n_bytes))


def test_a_peer_that_has_left_is_a_named_error_and_no_hang() -> None:
    def body(rank: int, transport: UcxTransport) -> str:
        send_one(transport, 100)
        if rank == 1:
            return ""
        (handle,) = transport.open([Channel(0, 1, 1)])
        transport.post_send(handle, np.zeros(1 << 20, np.uint8))
        try:
            transport.barrier(5.0)
        except RuntimeFault as fault:
            return str(fault)
        return "no error"

    said = run_ucx(2, body)[0]
    assert said.startswith(("rank 0: rank 1 is lost: UCX: ", "rank 0: waited 5 s in vain")), said


def leave_one_waiting(sends: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Rank 1 leaves after a barrier while rank 2 waits for a message of rank 0, which it `sends` once rank 1 is gone,
    or never; what rank 2 is told."""
    monkeypatch.setattr("optcc.runtime.transports.ucx._CLOSE_S", 0.2)

    def body(rank: int, transport: UcxTransport) -> str:
        (handle,) = transport.open([Channel(0, 2, 1)])
        transport.barrier()
        if rank == 0:
            told.wait(1.0 if sends else 10.0)
            if sends:
                transport.post_send(handle, np.zeros(100, np.uint8))
                assert transport.poll(10.0)
        elif rank == 2:
            transport.post_recv(handle, np.zeros(100, np.uint8))
            try:
                return f"{len(transport.poll(10.0))} has come"
            except RuntimeFault as fault:
                return str(fault)
            finally:
                told.set()
        return ""

    told = threading.Event()
    return run_ucx(3, body)


def test_a_rank_that_has_left_fails_nobody_who_needs_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert leave_one_waiting(True, monkeypatch)[2] == "1 has come"


def test_a_rank_that_is_gone_is_named_if_nothing_else_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optcc.runtime.transports.ucx._LEAVE_S", 0.3)
    assert leave_one_waiting(False, monkeypatch)[2].startswith("rank 2: rank 1 is lost: UCX: ")


def test_who_waits_for_a_rank_that_does_not_come_is_told_so() -> None:
    def body(rank: int, transport: UcxTransport) -> None:
        transport.barrier()
        if rank == 0:
            with pytest.raises(DeadlineExceeded, match=r"rank 0: waited 0\.2 s in vain for other ranks to agree"):
                transport.allgather(b"x", 0.2)
        else:
            time.sleep(0.5)

    run_ucx(2, body)


def test_ranks_that_are_set_up_differently_are_told_who_differs() -> None:
    room = Room(2)
    said: list[str] = []

    def body(rank: int) -> None:
        try:
            UcxTransport(room.meet(rank), LO, chunk_bytes=100 + rank).close()
        except MismatchError as error:
            said.append(str(error))

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DONE_S)
    assert sorted(said) == [
        "rank 0 differs from this one: chunk_bytes 100 instead of 101",
        "rank 1 differs from this one: chunk_bytes 101 instead of 100",
    ]


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(EnvironmentMissing, match="device eth77"):
        UcxTransport(Room(1).meet(0), [HostNic("eth77", "10.0.0.1")])


@pytest.mark.parametrize(
    ("nics", "chunk_bytes", "what"), [((), 1, "at least one"), (LO * 2, 1, "different names"), (LO, 0, "at least one")]
)
def test_settings_that_cannot_be_are_refused(nics: Sequence[HostNic], chunk_bytes: int, what: str) -> None:
    with pytest.raises(InputError, match=what):
        UcxTransport(Room(1).meet(0), nics, chunk_bytes=chunk_bytes)


def test_who_gives_up_ends_the_waits_of_all_others() -> None:
    def body(rank: int, transport: UcxTransport) -> str:
        try:
            transport.barrier()
            if rank == 1:
                transport.abort("no more")
            # Word of the end may be there before the last word of the first barrier.
            transport.barrier(20.0)
        except RankLost as lost:
            return str(lost)
        return "no error"

    assert run_ucx(3, body) == [
        "rank 0: rank 1 is lost: it has left after a failure",
        "rank 1: has given up: no more",
        "rank 2: rank 1 is lost: it has left after a failure",
    ]


def test_a_peer_that_leaves_because_of_another_is_not_taken_for_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 sees rank 0 leave before it hears that rank 1 has given up."""
    left = threading.Event()

    class Late(Port):
        def notify(self, peer: int, tag: int) -> Request:
            if peer == 2 and not left.is_set():
                assert left.wait(10.0)
                time.sleep(0.3)
            return super().notify(peer, tag)

    monkeypatch.setattr("optcc.runtime.transports.ucx.Port", Late)

    def body(rank: int, transport: UcxTransport) -> str:
        try:
            transport.barrier()
            if rank == 1:
                transport.abort("no more")
            transport.barrier(20.0)
        except RankLost as lost:
            if rank == 0:
                transport.close()
                left.set()
            return str(lost)
        return "no error"

    assert run_ucx(3, body) == [
        "rank 0: rank 1 is lost: it has left after a failure",
        "rank 1: has given up: no more",
        "rank 2: rank 1 is lost: it has left after a failure",
    ]


@pytest.mark.parametrize(
    ("aborts", "causes"),
    [
        (True, ("it has left after a failure", "it has left after a failure")),
        (False, ("UCX: ", "another rank reaches it no more")),
    ],
)
def test_who_gives_up_because_of_another_names_that_one(
    monkeypatch: pytest.MonkeyPatch, aborts: bool, causes: tuple[str, str]
) -> None:
    """Rank 2 hears of rank 1 by rank 0 alone."""
    monkeypatch.setattr("optcc.runtime.transports.ucx._NOTICE_S", 20.0)
    monkeypatch.setattr("optcc.runtime.transports.ucx._LEAVE_S", 20.0)
    heard = threading.Event()

    def barriers(transport: UcxTransport, timeout_s: float) -> None:
        """The notice may be there before the last message of the first one."""
        transport.barrier()
        transport.barrier(timeout_s)

    class Deaf(Port):
        def notify(self, peer: int, tag: int) -> Request:
            first = aborts and peer == 2 and not heard.is_set()
            return Request(self, None, -1) if first else super().notify(peer, tag)

    monkeypatch.setattr("optcc.runtime.transports.ucx.Port", Deaf)

    def body(rank: int, transport: UcxTransport) -> str:
        if rank == 1:
            transport.barrier()
            if aborts:
                transport.abort("no more")
                transport.close()
            return ""
        with pytest.raises(RankLost) as lost:
            barriers(transport, 2.0 if rank == 0 else 15.0)
        if rank == 0:
            heard.set()
            transport.abort("because of rank 1")
        return str(lost.value)

    found = run_ucx(3, body)
    assert found[0].startswith(f"rank 0: rank 1 is lost: {causes[0]}")
    assert found[2] == f"rank 2: rank 1 is lost: {causes[1]}"


def test_the_notice_of_a_rank_that_gives_up_arrives_though_it_has_bytes_unread() -> None:
    """Its connection is reset when it closes with bytes unread, and what it has sent before was lost with that."""
    sent, closed = threading.Event(), threading.Event()

    def body(rank: int, transport: UcxTransport) -> str:
        (handle,) = transport.open([Channel(1, 0, 1)])
        transport.barrier()
        if rank == 0:
            assert sent.wait(10.0)
            transport.abort("no more")
            transport.close()
            closed.set()
            return ""
        for _ in range(400):
            transport.post_send(handle, np.zeros(4000, np.uint8))
        transport.poll(0.2)
        sent.set()
        assert closed.wait(10.0)
        with pytest.raises(RankLost) as lost:
            transport.barrier(10.0)
        return str(lost.value)

    assert run_ucx(2, body)[1] == "rank 1: rank 0 is lost: it has left after a failure"


def test_a_gpus_memory_is_sent_by_its_address_as_cuda_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was looked for in an interface that CuPy's arrays do not have."""
    cupy = StandIn()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    posted: list[tuple[str, int, int, int]] = []

    class Seeing(Port):
        def send(self, peer: int, address: int, n_bytes: int, tag: int, memory_type: int = HOST_MEMORY) -> Request:
            if memory_type == HOST_MEMORY:
                return super().send(peer, address, n_bytes, tag)
            posted.append(("send", address, n_bytes, memory_type))
            return Request(self, None, -1)

        def receive(self, address: int, n_bytes: int, tag: int, memory_type: int = HOST_MEMORY) -> Request:
            if memory_type == HOST_MEMORY:
                return super().receive(address, n_bytes, tag)
            posted.append(("receive", address, n_bytes, memory_type))
            return Request(self, None, -1)

    monkeypatch.setattr("optcc.runtime.transports.ucx.Port", Seeing)
    arrays = [cupy.empty(100, np.uint8) for _ in range(2)]

    def body(rank: int, transport: UcxTransport) -> str:
        (handle,) = transport.open([Channel(0, 1, 1)])
        (transport.post_send if rank == 0 else transport.post_recv)(handle, arrays[rank])  # type: ignore[arg-type]
        transport.barrier()
        return transport.no_device_memory()

    reasons = run_ucx(2, body)
    wanted = [("send", arrays[0].data.ptr), ("receive", arrays[1].data.ptr)]
    assert sorted(posted) == sorted((*each, 100, CUDA_MEMORY) for each in wanted)
    assert all(not each or "has no transport for CUDA memory" in each for each in reasons)


def test_the_layouts_are_those_of_the_header() -> None:
    """`ucp_request_param_t` and `ucp_context_attr_t` of ucp.h, on 64 bits."""
    assert ucx_library._RequestParams.memory_type.offset == 48
    assert ucx_library._ContextAttributes.memory_types.offset == 24
    port = Port("lo", lambda peer, status: None)
    try:
        assert port.memory_types() & 1 << HOST_MEMORY
    finally:
        port.close()
