"""Who may come in over TCP, while AllReduces go on."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from optcc.runtime.executor import Executor
from optcc.runtime.protocol.frames import WireError, data_header, state_header
from optcc.runtime.protocol.hello import HELLO_BYTES, Caller, Hello
from optcc.runtime.transports.tcp import TcpTransport
from tests.unit.callers import call, enter, is_shut_out
from tests.unit.rank_threads import Room
from tests.unit.runtime.transports.tcp_ranks import DONE_S, input_of, plan_of, run_tcp, without_faults


def address_of(room: Room, rank: int, rail: int = 0) -> tuple[str, int]:
    _, address, port, _, _ = msgspec.json.decode(room.records[rank])["nics"][rail]
    return address, port


def with_strangers(visit: Callable[[Room], None], **settings: Any) -> tuple[int, int]:
    """AllReduces go on, exactly, while somebody visits; refused callers and damaged connections of rank 0."""
    room, over = Room(4), threading.Event()
    plan, verdict = plan_of("ring", 60_001, "float32")

    def body(rank: int, transport: TcpTransport) -> tuple[int, int]:
        executor = Executor(plan, rank, transport, verdict, deadline_s=DONE_S / 2)
        recv = np.empty(plan.size_bytes // 4, np.float32)
        stop = b"\0"
        while b"\1" not in transport.allgather(stop):
            executor.all_reduce(input_of(plan, rank, 0), recv)
            assert recv.tobytes() == without_faults("ring", 60_001, "float32", 1)[rank][0]
            stop = b"\1" if rank == 0 and over.is_set() else b"\0"
        return transport.counts.refused, transport.counts.damaged

    visitor_failures: list[BaseException] = []

    def visitor() -> None:
        try:
            while not all(room.records):
                time.sleep(0.01)
            visit(room)
        except BaseException as error:
            visitor_failures.append(error)
        finally:
            over.set()

    without_faults("ring", 60_001, "float32", 1)
    thread = threading.Thread(target=visitor)
    thread.start()
    results = run_tcp(4, body, room=room, **settings)
    thread.join(DONE_S)
    if visitor_failures:
        raise visitor_failures[0]
    return results[0]


@pytest.mark.battery(27, 29)
def test_strangers_are_shut_out_and_the_others_go_on() -> None:
    def visit(room: Room) -> None:
        address = address_of(room, 0)
        hello = Hello(3, 0, 0, room.job)
        for data in (os.urandom(HELLO_BYTES), b"GET / HTTP/1.1\r\n\r\n" * 8, bytes(1 << 16)):
            assert is_shut_out(call(address, data)), "garbage"
        with pytest.raises((WireError, OSError)):
            enter(address, os.urandom(32), hello)
        for wrong in (
            Hello(3, 0, 0, os.urandom(16)),
            Hello(3, 1, 0, room.job),
            Hello(0, 0, 0, room.job),
            Hello(4, 0, 0, room.job),
            Hello(3, 0, 1, room.job),
            Hello(3, 0, 99, room.job),
        ):
            with pytest.raises(ConnectionError):
                enter(address, room.secret, wrong)
        caller = Caller(room.secret, hello, nonce=os.urandom(32))
        unproved = call(address, caller.opening)
        unproved.sendall(bytes(32))
        assert is_shut_out(unproved), "a hello without a proof"
        call(address, b"").close()

    refused, damaged = with_strangers(visit)
    assert refused >= 11 and damaged == 0


@pytest.mark.battery(28)
def test_slow_and_silent_callers_are_shut_out() -> None:
    def visit(room: Room) -> None:
        address = address_of(room, 0)
        silent = [call(address, b"optcc") for _ in range(5)]
        slow, sent = call(address, b""), 0
        started_s = time.monotonic()
        try:
            while time.monotonic() - started_s < 3.0:
                slow.sendall(b"o")
                sent += 1
                time.sleep(0.05)
        except OSError:
            pass
        assert sent < 40, "a byte at a time is not fast enough"
        assert all(is_shut_out(each) for each in [*silent, slow])

    refused, _ = with_strangers(visit, hello_s=0.3)
    assert refused >= 6


@pytest.mark.battery(32)
def test_many_callers_cost_a_bounded_number_of_files() -> None:
    most: list[int] = []

    def visit(room: Room) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        callers: list[socket.socket] = []
        try:
            for _ in range(min(150, soft // 4)):
                callers.append(call(address_of(room, 0), b""))
            time.sleep(0.3)
            most.append(sum(not _is_closed(each) for each in callers))
        finally:
            for each in callers:
                each.close()

    with_strangers(visit)
    assert most[0] <= 2 * 4 * 2 + 16


def _is_closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.battery(31)
def test_a_member_that_announces_nonsense_is_cut_off() -> None:
    """Even who knows the secret gets no memory: lengths and channels are those of the plan."""

    def visit(room: Room) -> None:
        frames: list[Callable[[int], bytes]] = [
            lambda session: data_header(session, 0, 900, 0, 2**32 - 1, None),
            lambda session: data_header(session, 0, 5000, 0, 8, None),
            lambda session: data_header(session, 0, 1 << 31, 2**40, 2**32 - 1, None)[:-1] + b"?",
            lambda session: state_header(session, 0, 1 << 30, 0, 0),
            lambda session: os.urandom(4096),
        ]
        for number, make in enumerate(frames):
            sock, session = enter(address_of(room, 0), room.secret, Hello(2, 0, 0, room.job))
            sock.sendall(make(session))
            if number:
                assert is_shut_out(sock), f"case {number}"
            sock.close()

    with_strangers(visit, chunk_bytes=16384)
