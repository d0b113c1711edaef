"""The TCP transport over loopback addresses: a transport's promises, what it costs, and ranks that go away."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from itertools import product
from pathlib import Path
from select import EPOLLIN
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optcc.compiler import compile_schedule
from optcc.errors import (
    AllRailsFailed,
    DeadlineExceeded,
    InputError,
    MismatchError,
    OptccError,
    RankLost,
)
from optcc.plan import Channel
from optcc.runtime.conformance import check_transport
from optcc.runtime.engine import Engine
from optcc.runtime.nics import HostNic
from optcc.runtime.protocol.frames import PROBE_FRAME, crc32
from optcc.runtime.rendezvous import Meeting
from optcc.runtime.transport import RECEIVED, SENT
from optcc.runtime.transports import tcp
from optcc.runtime.transports.tcp import TcpTransport, Wire
from optcc.runtime.transports.tcp_sockets import sample
from optcc.schedules.other_collectives import chain_broadcast
from optcc.verdict import PROVED
from optcc.verify.plan import verify_plan
from tests.sample import sampled
from tests.unit.rank_threads import Room
from tests.unit.runtime.protocol.network import TwoRails
from tests.unit.runtime.transports.tcp_ranks import (
    DONE_S,
    SMALL,
    nics_of,
    plan_of,
    poll_for_ever,
    reduce_over,
    run_tcp,
    without_faults,
)


def open_files() -> list[str]:
    return sorted(str(path) for path in Path("/proc/self/fd").glob("[0-9]*"))


@pytest.mark.parametrize(("n_ranks", "n_rails"), sampled(product(range(1, 5), range(1, 4)), every=5))
def test_keeps_the_promises_of_a_transport(n_ranks: int, n_rails: int) -> None:
    names = run_tcp(n_ranks, lambda _, transport: check_transport(lambda: transport), n_rails=n_rails)
    assert len(names[0]) == 14


@pytest.mark.parametrize(
    "settings",
    [
        *({"crc": True}, {"authenticate": True}, SMALL | {"authenticate": True}),
        pytest.param(SMALL, marks=pytest.mark.slow),
        *({"window": 1}, {"replan": True}),
    ],
    ids=str,
)
def test_keeps_them_however_it_is_set_up(settings: dict[str, Any]) -> None:
    run_tcp(3, lambda _, transport: check_transport(lambda: transport), rates=(30, 20), **settings)


@pytest.mark.parametrize(
    ("name", "count", "dtype"),
    sampled(
        [
            (*case, dtype)
            for case in (("ring", 1), ("ring", 100_003), ("optcc", 7), ("optcc", 262_144))
            for dtype in ("float32", "float64", "int32", "int64")
        ],
        every=3,
    ),
)
def test_reduces_to_the_bits_of_loopback(name: str, count: int, dtype: str) -> None:
    plan, verdict = plan_of(name, count, dtype)
    results = run_tcp(4, lambda _, transport: reduce_over(transport, plan, verdict, 2))
    assert results == without_faults(name, count, dtype, 2)


def test_fifty_networks_leave_no_file_open() -> None:
    def body(rank: int, transport: TcpTransport) -> None:
        transport.barrier()
        transport.open([Channel(0, 1, 1)])

    run_tcp(2, body)
    before = open_files()
    threads = threading.active_count()
    for _ in range(50):
        run_tcp(2, body)
    assert open_files() == before
    assert threading.active_count() == threads


@pytest.mark.battery(25)
def test_a_network_that_does_not_come_about_leaves_no_file_open() -> None:
    def refuse(_: bytes) -> Meeting:
        raise DeadlineExceeded("nobody came")

    before = open_files()
    with pytest.raises(DeadlineExceeded, match="nobody came"):
        TcpTransport(refuse, nics_of(0, 3))
    with pytest.raises(OptccError, match=r"cannot listen at 192\.0\.2\.1"):
        TcpTransport(refuse, [*nics_of(0, 2), HostNic("far", "192.0.2.1")])
    assert open_files() == before


def test_wrong_numbers_are_rejected() -> None:
    for settings in ({"chunk_bytes": 0}, {"window": 0}, {"silent_s": 0.0}, {"stall_s": -1.0}, {"buffer_bytes": -1}):
        with pytest.raises(InputError):
            TcpTransport(Room(1).meet(0), nics_of(0, 1), **settings)
    for nics in ([], [HostNic("a", "127.0.0.1"), HostNic("a", "127.0.0.2")]):
        with pytest.raises(InputError, match="NICs"):
            TcpTransport(Room(1).meet(0), nics)


@pytest.mark.battery(30)
@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("chunk_bytes", 4096, 8192), ("partition_s", 0.0, 30.0), ("partition_s", 60.0, 30.0), ("regroups", False, True)],
)
def test_ranks_that_are_set_up_differently_say_who(name: str, first: float, second: float) -> None:
    room = Room(2)
    seen: list[str] = []

    def body(rank: int) -> None:
        with pytest.raises(MismatchError) as caught:
            TcpTransport(room.meet(rank), nics_of(rank, 1), **{name: (first, second)[rank]})  # type: ignore[arg-type]
        seen.append(str(caught.value))

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DONE_S)
    assert sorted(seen) == [
        f"rank 0 differs from rank 1: {name} {first} instead of {second}",
        f"rank 1 differs from rank 0: {name} {second} instead of {first}",
    ]


def test_messages_of_different_lengths_are_a_named_error() -> None:
    def body(rank: int, transport: TcpTransport) -> None:
        (handle,) = transport.open([Channel(0, 1, 1)])
        view = np.zeros(10 + rank, np.uint8)
        (transport.post_send if rank == 0 else transport.post_recv)(handle, view)
        poll_for_ever(transport)

    with pytest.raises(MismatchError, match="channel 0->1: 10 B sent, 11 B expected"):
        run_tcp(2, body)


def test_no_chunk_is_copied() -> None:
    def body(rank: int, transport: TcpTransport) -> int:
        (handle,) = transport.open([Channel(0, 1, 1)])
        view = np.zeros(32 << 20, np.uint8)
        for _ in range(2):
            transport.barrier()
            tracemalloc.start()
            transport.barrier()
            (transport.post_send if rank == 0 else transport.post_recv)(handle, view)
            while not transport.poll(5.0):
                pass
            transport.barrier()
        return tracemalloc.get_traced_memory()[1]

    try:
        assert max(run_tcp(2, body)) < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_kernel_counts_what_a_connection_carries() -> None:
    def body(rank: int, transport: TcpTransport) -> list[tuple[int, float, float]]:
        (handle,) = transport.open([Channel(0, 1, 2)])
        view = np.zeros(8 << 20, np.uint8)
        transport.barrier()
        seen: list[tuple[int, float, float]] = []
        for _ in range(2):
            (transport.post_send if rank == 0 else transport.post_recv)(handle, view)
            while not transport.poll(5.0):
                pass
            if rank == 0:
                connection = transport._endpoint.outbounds[1].rails[0].connection
                assert connection is not None
                connection.kernel = sample(connection.wire.sock)
                connection.is_silent(0.0, 1.0)
                seen.append(connection.take_carried())
        transport.barrier()
        return seen

    for n_bytes, busy_s, free_s in run_tcp(2, body, n_rails=1)[0]:
        # The last message has been acknowledged, and what was on its way when it began is little.
        assert n_bytes == pytest.approx(8 << 20, rel=0.01)
        # In ticks of the kernel, so that a short time may be none.
        assert 0 <= free_s <= busy_s + 1e-9 < 5


def vanish(transport: TcpTransport) -> None:
    """As a process ends that is killed: nothing is said."""
    transport._give_back()


def test_a_rank_that_is_gone_is_noticed_by_all_within_two_seconds() -> None:
    plan, verdict = plan_of("ring", 60_001, "float32")
    waited: dict[int, float] = {}
    gone_s: list[float] = []

    def body(rank: int, transport: TcpTransport) -> None:
        reduce_over(transport, plan, verdict, 1)
        transport.barrier()
        if rank == 2:
            gone_s.append(time.monotonic())
            vanish(transport)
            return
        with pytest.raises(RankLost, match=r"rank 2 is lost: its process has ended: it refuses connections$"):
            reduce_over(transport, plan, verdict, 1)
        waited[rank] = time.monotonic() - gone_s[0]
        with pytest.raises(RankLost):
            transport.poll(0.0)

    run_tcp(4, body)
    assert sorted(waited) == [0, 1, 3] and max(waited.values()) < 2.0, waited


def test_a_rank_that_leaves_early_is_named() -> None:
    def body(rank: int, transport: TcpTransport) -> None:
        (handle,) = transport.open([Channel(0, 1, 1)])
        transport.barrier()
        if rank == 1:
            return
        transport.post_send(handle, np.zeros(4, np.uint8))
        with pytest.raises(RankLost, match="rank 1 is lost: it has left before it had taken and sent all"):
            poll_for_ever(transport)

    run_tcp(2, body)


def test_a_rank_that_has_left_and_owes_nothing_is_no_error() -> None:
    def body(rank: int, transport: TcpTransport) -> None:
        (handle,) = transport.open([Channel(0, 1, 1)])
        view = np.full(4, 7, np.uint8) if rank == 0 else np.zeros(4, np.uint8)
        (transport.post_send if rank == 0 else transport.post_recv)(handle, view)
        while (events := transport.poll(1.0)) == []:
            pass
        assert events == [(SENT if rank == 0 else RECEIVED, handle)]
        assert view.tolist() == [7] * 4
        if rank == 0:
            assert transport.poll(0.5) == []

    run_tcp(2, body)


def test_the_last_words_of_a_rank_that_has_left_are_read_though_it_was_written_to() -> None:
    """The first write is answered with a reset, and the next one fails; the acknowledgement had come before."""

    def body(rank: int, transport: TcpTransport) -> None:
        (handle,) = transport.open([Channel(0, 1, 1)])
        view = np.zeros(1 << 16, np.uint8)
        if rank == 1:
            transport.post_recv(handle, view)
        transport.barrier()
        assert transport.poll(0.1 if rank == 0 else DONE_S) == ([] if rank == 0 else [(RECEIVED, handle)])
        if rank == 1:
            return
        transport.post_send(handle, view)
        time.sleep(0.5)
        for _ in range(3):
            transport._endpoint.say(1, PROBE_FRAME, 0)
            transport._flush()
            time.sleep(0.05)
        assert transport.poll(DONE_S) == [(SENT, handle)]
        assert transport.poll(0.2) == [] and transport._endpoint.left == {1: False}

    run_tcp(2, body, n_rails=1)


def test_a_rank_that_nobody_reaches_is_a_named_error_within_the_stall() -> None:
    def body(rank: int, transport: TcpTransport) -> float:
        (handle,) = transport.open([Channel(0, 1, 1)])
        transport.barrier()
        if rank == 1:
            time.sleep(1.5)
            return 0.0
        for out in transport._endpoint.outbounds.values():
            for rail in out.direct:
                # No way leads there from a loopback address: nothing answers, and nothing refuses.
                rail.address = ("192.0.2.1", 9)
        for connection in list(transport._endpoint.up):
            connection.wire.sock.shutdown(socket.SHUT_RDWR)
        transport.post_send(handle, np.zeros(4, np.uint8))
        started_s = time.monotonic()
        with pytest.raises(AllRailsFailed, match=r"no rail between rank 0 and rank 1 \(r0, r1\)$"):
            poll_for_ever(transport)
        return time.monotonic() - started_s

    assert run_tcp(2, body, stall_s=0.6)[0] < 1.5


def test_agreement_has_a_deadline() -> None:
    def body(rank: int, transport: TcpTransport) -> None:
        transport.barrier()
        if rank == 1:
            time.sleep(0.6)
            return
        with pytest.raises(DeadlineExceeded, match=r"rank 0: waited 0.2 s in vain"):
            transport.barrier(0.2)

    run_tcp(2, body)


@pytest.mark.battery(33)
def test_a_rank_that_is_busy_elsewhere_is_not_lost() -> None:
    """Longer than every limit: its kernel answers for it."""

    def body(rank: int, transport: TcpTransport) -> None:
        (handle,) = transport.open([Channel(0, 1, 1)])
        if rank == 1:
            time.sleep(1.5)
        view = np.zeros(8 << 20, np.uint8)
        (transport.post_send if rank == 0 else transport.post_recv)(handle, view)
        if rank == 1:
            transport.poll(0.0)
            time.sleep(1.5)
        while not transport.poll(5.0):
            pass
        assert [rail.failures for rail in transport.rails] == [0, 0]

    run_tcp(2, body, silent_s=0.3, stall_s=0.5, hello_s=5.0)


def test_a_run_that_is_over_owes_no_peer_a_report() -> None:
    """The root's short message counts as sent once its slot is told, though nobody who got it calls again."""
    plan = compile_schedule(chain_broadcast(n_ranks=2), size_bytes=64)
    verdict = verify_plan(plan)
    assert verdict.verdict == PROVED
    sent = [threading.Event() for _ in range(20)]

    def body(rank: int, transport: TcpTransport) -> None:
        engine = Engine(transport)
        prepared = engine.prepare(plan, verdict)
        array = np.arange(16, dtype=np.float32)
        for done in sent:
            if rank == 0:
                assert prepared.start(array, array).wait(5.0)
                done.set()
            else:
                transport._endpoint.inbound(0).history.chances = 64
                target = np.zeros_like(array)
                assert prepared.start(None, target).wait(5.0) and target[-1] == 15
                assert done.wait(5.0)
        engine.barrier()

    run_tcp(2, body)


def test_in_the_middle_of_a_chunk_nobody_is_woken_for_little() -> None:
    """The driver passes on how many bytes are worth a read."""
    rails = TwoRails()
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        connection = rails.connections[0]
        connection.wire = Wire(near)
        driver: Any = SimpleNamespace(_endpoint=rails.endpoint)

        def send(data: bytes) -> int:
            far.sendall(data)
            TcpTransport._recv_ready(driver, connection, EPOLLIN)
            return near.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)

        frame = rails.frame(bytes(range(100)))
        assert send(frame[:70]) == len(frame) - 70
        assert send(frame[70:]) == 1
    assert rails.slot.tolist() == list(range(100))


def test_every_chunk_is_checked_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    n_bytes = [0]

    def counted(view: memoryview, before: int) -> int:
        n_bytes[0] += len(view)
        return crc32(view, before)

    plan, verdict = plan_of("ring", 60_001, "float32")
    monkeypatch.setattr(tcp, "crc32", counted)
    wanted = without_faults("ring", 60_001, "float32", 1)
    assert run_tcp(4, lambda _, each: reduce_over(each, plan, verdict, 1), crc=True) == wanted
    assert n_bytes[0] >= 2 * 6 * plan.size_bytes


# --- real processes

PROGRAM = """
import os, sys, time
import numpy as np
from optcc.errors import RankLost
from optcc.runtime.executor import Executor
from optcc.runtime.nics import HostNic
from optcc.runtime.meeting_file import in_file
from optcc.runtime.samples import ring
from optcc.runtime.exact_inputs import make_input, wrong_elements
from optcc.runtime.transports.tcp import TcpTransport
from optcc.verify.plan import verify_plan

rank, n, path, dies = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "dies"
nics = [HostNic(f"r{i}", f"127.0.{i + 1}.{rank + 1}") for i in range(2)]
transport = TcpTransport(in_file(path, rank, n, timeout_s=20), nics)
plan = ring(n, 1 << 20)
executor = Executor(plan, rank, transport, verify_plan(plan), deadline_s=20)
recv = np.empty(1 << 18, np.float32)
try:
    for turn in range(200 if dies else 3):
        if dies and rank == 1 and turn == 3:
            os.kill(os.getpid(), 9)
        began = time.monotonic()
        executor.all_reduce(make_input(rank, 1 << 18, "float32", "sum"), recv)
        assert wrong_elements(plan, rank, recv) == 0
    transport.barrier()
    print("done")
except RankLost as error:
    print("lost", time.monotonic() - began, error)
transport.close()
"""


def run_processes(n_ranks: int, path: Path, word: str) -> list[subprocess.CompletedProcess[str]]:
    argv = [sys.executable, "-c", PROGRAM]
    ranks = [
        subprocess.Popen(
            [*argv, str(rank), str(n_ranks), str(path), word], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(n_ranks)
    ]
    done: list[subprocess.CompletedProcess[str]] = []
    try:
        for process in ranks:
            out, err = process.communicate(timeout=DONE_S)
            done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    return done


def test_processes_meet_in_a_file_and_reduce(tmp_path: Path) -> None:
    done = run_processes(3, tmp_path / "meeting", "lives")
    assert [each.stdout for each in done] == ["done\n"] * 3, [each.stderr for each in done]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.battery(22)
def test_a_process_that_is_killed_is_noticed_within_two_seconds(tmp_path: Path) -> None:
    done = run_processes(3, tmp_path / "meeting", "dies")
    assert done[1].returncode == -9
    for rank in (0, 2):
        word, waited_s, *rest = done[rank].stdout.split()
        assert word == "lost" and float(waited_s) < 2.0, (done[rank].stdout, done[rank].stderr)
        assert " ".join(rest).startswith(f"rank {rank}: rank 1 is lost: its process has ended")
