"""The TCP transport over loopback addresses: a transport's promises, AllReduces through failures, and who may come in.

The ranks are threads; rail i of rank r is 127.0.(i+1).(r+1). Connections are cut by shutting their sockets down.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pytest

from optcc import failover
from optcc.compiler import compile_schedule
from optcc.errors import (
    AllRailsFailed,
    DeadlineExceeded,
    EnvironmentMissing,
    InputError,
    MismatchError,
    OptccError,
    RankLost,
)
from optcc.plan import Channel, Plan
from optcc.runtime.conformance import check_transport
from optcc.runtime.engine import Engine, Executor, Handle
from optcc.runtime.launch import (
    Interface,
    Meet,
    Meeting,
    Nic,
    at_address,
    choose_nics,
    declare_rates,
    in_file,
    interfaces,
    read_secret,
)
from optcc.runtime.launch import nics_of as nics_from
from optcc.runtime.transport import RECEIVED, SENT, MonotonicClock, Transport
from optcc.runtime.transports import tcp, tcp_rails, tcp_routes
from optcc.runtime.transports.loopback import run_ranks
from optcc.runtime.transports.tcp import TcpTransport
from optcc.runtime.transports.tcp_meters import Meters
from optcc.runtime.transports.tcp_rails import Incoming, Line, Outgoing
from optcc.runtime.transports.tcp_routes import Hub, OutRoute, Settings
from optcc.runtime.transports.tcp_wire import (
    ANSWER_BYTES,
    BYE_FRAME,
    HEADER_BYTES,
    HELLO_BYTES,
    Caller,
    Doorman,
    Hello,
    Stripes,
    WireError,
    bye_header,
    change_header,
    crc32,
    data_header,
    decode,
    state_header,
)
from optcc.schedules.optcc import optcc
from optcc.schedules.other_collectives import chain_broadcast
from optcc.schedules.registry import SCHEDULES
from optcc.topology import Topology
from optcc.verdict import PROVED, Verdict
from optcc.verify.plan import verify_plan
from tests.unit.rank_threads import Room, run_threads

T = TypeVar("T")
Array = npt.NDArray[Any]
DONE_S = 40.0
SMALL: dict[str, Any] = {"chunk_bytes": 8192, "buffer_bytes": 8192, "window": 8}
"""Small chunks and buffers, so that much is on its way, in parts, at any moment."""


def nics_of(rank: int, n_rails: int, rates: Sequence[int] = ()) -> list[Nic]:
    rates = rates or [1] * n_rails
    return [Nic(f"r{i}", f"127.0.{i + 1}.{rank + 1}", rates[i], rates[i]) for i in range(n_rails)]


def run_tcp(
    n_ranks: int,
    function: Callable[[int, TcpTransport], T],
    *,
    n_rails: int = 2,
    rates: Sequence[int] = (),
    kind: type[TcpTransport] = TcpTransport,
    room: Room | None = None,
    **settings: Any,
) -> list[T]:
    """`function` once a rank, in threads; raises the first exception that is not a consequence of another's."""
    made_in = room or Room(n_ranks)

    def make(rank: int) -> TcpTransport:
        return kind(made_in.meet(rank), nics_of(rank, n_rails, rates), **settings)

    return run_threads(n_ranks, make, function)


@cache
def plan_of(name: str, count: int, dtype: str) -> tuple[Plan, Verdict]:
    size_bytes = count * np.dtype(dtype).itemsize
    if name in ("ring", "recursive-doubling"):
        schedule = SCHEDULES[name].build(Topology.parse("4@1GB/s"), 1)
        plan = compile_schedule(schedule, size_bytes=size_bytes, dtype=dtype)
    else:
        topology = Topology.parse("4@1GB/s,3=500MB/s")
        plan = compile_schedule(optcc.build(topology, 2), size_bytes=size_bytes, dtype=dtype, topology=topology)
    verdict = verify_plan(plan)
    assert verdict.verdict == PROVED
    return plan, verdict


def input_of(plan: Plan, rank: int, run: int) -> Array:
    """Numbers whose sum depends on the order of adding, and whose every double or missing addition shows."""
    dtype = np.dtype(plan.transfers.dtype)
    random_ = np.random.default_rng((rank, run))
    count = plan.size_bytes // dtype.itemsize
    if dtype.kind == "f":
        return random_.standard_normal(count).astype(dtype)
    return random_.integers(-(2**31), 2**31, count).astype(dtype)


def reduce_over(transport: Transport, plan: Plan, verdict: Verdict, n_runs: int) -> list[bytes]:
    executor = Executor(plan, transport.rank, transport, verdict, deadline_s=DONE_S / 2)
    results: list[bytes] = []
    for run in range(n_runs):
        recv = np.empty(plan.size_bytes // np.dtype(plan.transfers.dtype).itemsize, plan.transfers.dtype)
        executor.all_reduce(input_of(plan, transport.rank, run), recv)
        results.append(recv.tobytes())
    return results


@cache
def without_faults(name: str, count: int, dtype: str, n_runs: int) -> list[list[bytes]]:
    plan, verdict = plan_of(name, count, dtype)
    return run_ranks(plan.n_ranks, lambda _, transport: reduce_over(transport, plan, verdict, n_runs))


def poll_for_ever(transport: TcpTransport) -> None:
    while True:
        transport.poll(1.0)


def open_files() -> list[str]:
    return sorted(str(path) for path in Path("/proc/self/fd").glob("[0-9]*"))


# --- a transport's promises


@pytest.mark.parametrize("n_rails", [1, 2, 3])
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_keeps_the_promises_of_a_transport(n_ranks: int, n_rails: int) -> None:
    names = run_tcp(n_ranks, lambda _, transport: check_transport(lambda: transport), n_rails=n_rails)
    assert len(names[0]) == 14


@pytest.mark.parametrize("settings", [{"crc": True}, SMALL, {"window": 1}, {"replan": True}], ids=str)
def test_keeps_them_however_it_is_set_up(settings: dict[str, Any]) -> None:
    run_tcp(3, lambda _, transport: check_transport(lambda: transport), rates=(30, 20), **settings)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize(("name", "count"), [("ring", 1), ("ring", 100_003), ("optcc", 7), ("optcc", 262_144)])
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


def test_a_network_that_does_not_come_about_leaves_no_file_open() -> None:
    def refuse(_: bytes) -> Meeting:
        raise DeadlineExceeded("nobody came")

    before = open_files()
    with pytest.raises(DeadlineExceeded, match="nobody came"):
        TcpTransport(refuse, nics_of(0, 3))
    with pytest.raises(OptccError, match=r"cannot listen at 192\.0\.2\.1"):
        TcpTransport(refuse, [*nics_of(0, 2), Nic("far", "192.0.2.1")])
    assert open_files() == before


def test_wrong_numbers_are_rejected() -> None:
    for settings in ({"chunk_bytes": 0}, {"window": 0}, {"silent_s": 0.0}, {"stall_s": -1.0}, {"buffer_bytes": -1}):
        with pytest.raises(InputError):
            TcpTransport(Room(1).meet(0), nics_of(0, 1), **settings)
    for nics in ([], [Nic("a", "127.0.0.1"), Nic("a", "127.0.0.2")]):
        with pytest.raises(InputError, match="NICs"):
            TcpTransport(Room(1).meet(0), nics)
    with pytest.raises(InputError, match="at least 1"):
        Nic("a", "127.0.0.1", 0, 1)


def test_ranks_that_are_set_up_differently_say_who() -> None:
    room = Room(2)
    seen: list[str] = []

    def body(rank: int) -> None:
        with pytest.raises(MismatchError) as caught:
            TcpTransport(room.meet(rank), nics_of(rank, 1), chunk_bytes=4096 * (1 + rank))
        seen.append(str(caught.value))

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DONE_S)
    assert sorted(seen) == [
        "rank 0 differs from rank 1: chunk_bytes 4096 instead of 8192",
        "rank 1 differs from rank 0: chunk_bytes 8192 instead of 4096",
    ]


def test_messages_of_different_lengths_are_a_named_error() -> None:
    def body(rank: int, transport: TcpTransport) -> None:
        (handle,) = transport.open([Channel(0, 1, 1)])
        view = np.zeros(10 + rank, np.uint8)
        (transport.post_send if rank == 0 else transport.post_recv)(handle, view)
        poll_for_ever(transport)

    with pytest.raises(MismatchError, match="channel 0->1: 10 B sent, 11 B expected"):
        run_tcp(2, body)


def test_what_nobody_has_a_slot_for_is_not_sent() -> None:
    """A sender far ahead of its receiver: nothing but the small exchanges goes over the wire, and nothing is kept."""

    def body(rank: int, transport: TcpTransport) -> int:
        (handle,) = transport.open([Channel(0, 1, 1)])
        view = np.zeros(1 << 20, np.uint8)
        for _ in range(100 if rank == 0 else 0):
            transport.post_send(handle, view)
        transport.barrier()
        sent_bytes = sum(rail.sent_bytes for rail in transport.rails)
        transport.barrier()
        for _ in range(100 if rank == 1 else 0):
            transport.post_recv(handle, view)
        n_events = 0
        while n_events < 100:
            n_events += len(transport.poll(5.0))
        return sent_bytes

    assert run_tcp(2, body)[0] < 10_000


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


# --- striping


@pytest.mark.parametrize("rates", [(1,), (1, 1), (2, 1), (10, 7), (1, 1, 1), (100, 100, 50), (25, 24), (1000, 3)])
def test_messages_are_cut_without_gaps_and_in_proportion(rates: tuple[int, ...]) -> None:
    stripes = Stripes.of(rates)
    assert set(stripes.turns) == set(range(len(rates)))
    for n_bytes in (0, 1, 63, 65536, 131_072, 1_000_003, 8 << 20):
        for first in (0, 1, 5, 17):
            pieces = stripes.cut(n_bytes, first, 1 << 20)
            assert pieces[0][0] == 0 and pieces[-1][1] == n_bytes
            assert all(a[1] == b[0] for a, b in pairwise(pieces))
            assert all(start <= end for start, end in pieces)
    totals = [0] * len(rates)
    for i, (start, end) in enumerate(stripes.cut(64 << 20, 3, 1 << 20)):
        totals[stripes.turns[(3 + i) % len(stripes.turns)]] += end - start
    for total, rate in zip(totals, rates, strict=True):
        assert total == pytest.approx((64 << 20) * rate / sum(rates), rel=0.01, abs=64 * len(stripes.turns) * 8)


def test_what_goes_to_several_ranks_at_once_goes_over_different_rails() -> None:
    """Messages too short to be cut: the first ones of a rank, and those to a rank, do not all meet at one NIC."""

    def body(rank: int, transport: TcpTransport) -> list[int]:
        others = [peer for peer in range(4) if peer != rank]
        handles = transport.open([Channel(src, dst, 1) for src in range(4) for dst in range(4) if src != dst])
        wanted = {(SENT, handles[3 * rank + others.index(peer)]) for peer in others}
        into = [handles[3 * peer + [each for each in range(4) if each != peer].index(rank)] for peer in others]
        wanted |= {(RECEIVED, handle) for handle in into}
        transport.barrier()
        before = [(rail.sent_bytes, rail.received_bytes) for rail in transport.rails]
        data = np.zeros(12_000, np.uint8)
        for handle in into:
            transport.post_recv(handle, np.empty(12_000, np.uint8))
        for peer in others:
            transport.post_send(handles[3 * rank + others.index(peer)], data)
        while wanted:
            wanted -= set(transport.poll(5.0))
        transport.barrier()
        sides = [
            (rail.sent_bytes - out, rail.received_bytes - in_)
            for rail, (out, in_) in zip(transport.rails, before, strict=True)
        ]
        return [min(column) for column in zip(*sides, strict=True)]

    assert all(least >= 12_000 for each in run_tcp(4, body) for least in each)


@pytest.mark.parametrize("rates", [(300, 100), (100, 90)])
@pytest.mark.parametrize("size", [1 << 14, 1 << 18, 3 << 20])
def test_bytes_go_over_the_rails_in_proportion_to_their_rates(rates: tuple[int, int], size: int) -> None:
    def body(rank: int, transport: TcpTransport) -> list[int]:
        (handle,) = transport.open([Channel(0, 1, 2)])
        view = np.zeros(size, np.uint8)
        post = transport.post_send if rank == 0 else transport.post_recv
        sent: list[list[int]] = []
        for count in (4, max(24, (16 << 20) // size)):
            # What goes out before all rails are joined is not counted.
            transport.barrier()
            sent.append([rail.sent_bytes for rail in transport.rails])
            for _ in range(count):
                post(handle, view)
                while not transport.poll(5.0):
                    pass
        return [rail.sent_bytes - before for rail, before in zip(transport.rails, sent[1], strict=True)]

    sent = run_tcp(2, body, rates=rates)[0]
    share = sent[0] / sum(sent)
    assert share == pytest.approx(rates[0] / sum(rates), rel=0.1), sent


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
                line = transport._hub.outs[1].rails[0].line
                assert line is not None
                line.is_silent(0.0, 1.0)
                seen.append(line.take_carried())
        transport.barrier()
        return seen

    for n_bytes, busy_s, free_s in run_tcp(2, body, n_rails=1)[0]:
        # The last message has been acknowledged, and what was on its way when it began is little.
        assert n_bytes == pytest.approx(8 << 20, rel=0.01)
        # In ticks of the kernel, so that a short time may be none.
        assert 0 <= free_s <= busy_s < 5


# --- failures


def lines_of(transport: TcpTransport, rail: int) -> list[Line]:
    """The connections that are up on a rail."""
    hub = transport._hub
    lines: list[Line | None] = [out.rails[rail].line for out in hub.outs.values()]
    lines += [in_.lines[rail] for in_ in hub.ins.values()]
    return [line for line in lines if line is not None]


def cut(lines: Sequence[Line]) -> None:
    for line in lines:
        with contextlib.suppress(OSError):
            line.sock.shutdown(socket.SHUT_RDWR)


class Cutting(TcpTransport):
    """A transport that cuts its own connections at seeded turns of its loop, until it is told to be calm."""

    seed = 0
    for_good: int | None = None
    n_cuts = 0

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._random = random.Random(self.seed * 1000 + self.rank)
        self._left = self._random.randrange(1, 60)

    def calm_down(self) -> None:
        """All ranks have to do this before they leave: nobody can ask a rank again that has left."""
        self._left = -1
        self.barrier()

    def _turn(self, wait_s: float) -> None:
        super()._turn(wait_s)
        self._left -= 1
        if self._left:
            return
        if self.for_good is None:
            lines = lines_of(self, self._random.randrange(len(self.rails)))
            cut(self._random.choices(lines) if lines else [])
            self._left = self._random.randrange(1, 60)
        else:
            self._hub.selector.unregister(self._listeners[self.for_good])
            self._listeners[self.for_good].close()
            cut(lines_of(self, self.for_good))
        type(self).n_cuts += 1


def reduce_and_calm_down(transport: TcpTransport, plan: Plan, verdict: Verdict, n_runs: int) -> list[bytes]:
    assert isinstance(transport, Cutting)
    results = reduce_over(transport, plan, verdict, n_runs)
    transport.calm_down()
    return results


@pytest.mark.parametrize("start", [pytest.param(0), *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 12))])
@pytest.mark.parametrize("n_rails", [1, 2, 3])
def test_connections_may_break_at_any_moment(n_rails: int, start: int) -> None:
    n_resent = n_cuts = 0
    for seed in range(8 * start, 8 * start + 8):
        name, dtype = ("ring", "optcc")[seed % 2], ("float32", "float64")[seed // 2 % 2]
        plan, verdict = plan_of(name, 60_001, dtype)

        class Seeded(Cutting):
            pass

        Seeded.seed = seed
        settings = SMALL | {"replan": seed % 3 == 0, "crc": seed % 4 == 1}

        def body(_: int, transport: TcpTransport, plan: Plan = plan, verdict: Verdict = verdict) -> tuple[Any, int]:
            return reduce_and_calm_down(transport, plan, verdict, 3), transport.counts.resent

        results = run_tcp(4, body, n_rails=n_rails, kind=Seeded, **settings)
        print(seed, name, Seeded.n_cuts, [resent for _, resent in results])
        assert [result for result, _ in results] == without_faults(name, 60_001, dtype, 3), f"seed {seed}"
        n_cuts += Seeded.n_cuts
        n_resent += sum(resent for _, resent in results)
    assert n_cuts >= 16 and n_resent > 0


class Reluctant:
    """A socket that takes and gives less than it could, at seeded moments."""

    def __init__(self, sock: socket.socket, seed: int) -> None:
        self._sock, self._random = sock, random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def _some(self, n_bytes: int) -> int:
        """How much of it."""
        chance = self._random.random()
        if chance < 0.1:
            raise BlockingIOError
        return n_bytes if chance < 0.7 else self._random.randint(1, n_bytes)

    def send(self, data: Any) -> int:
        return self._sock.send(memoryview(data)[: self._some(len(data))])

    def recv_into(self, view: memoryview) -> int:
        return self._sock.recv_into(view[: self._some(min(len(view), 200))])


class ReluctantlyCutting(Cutting):
    """A transport that cuts its connections, all of which are reluctant."""

    def _turn(self, wait_s: float) -> None:
        super()._turn(wait_s)
        # In the end they are as they are: who sends only a part of its farewell is taken for lost.
        is_calm = self._left < 0
        for rail in range(len(self.rails)):
            for line in lines_of(self, rail):
                if isinstance(line.sock, Reluctant) == is_calm:
                    reluctant = Reluctant(line.sock, self._random.randrange(1 << 30))
                    line.sock = getattr(line.sock, "_sock", line.sock) if is_calm else cast(Any, reluctant)


def reduce_several_at_once(transport: TcpTransport, n_runs: int) -> list[bytes]:
    """AllReduces of three short plans, always three runs under way; the ranks are now and then late."""
    assert isinstance(transport, Cutting)
    engine, rng = Engine(transport), random.Random(transport.seed * 10 + transport.rank)
    plans = [plan_of(*each) for each in SHORT_PLANS]
    prepared = [engine.prepare(plan, verdict, deadline_s=DONE_S / 2) for plan, verdict in plans]
    results: list[bytes] = []
    for run in range(n_runs):
        handles: list[Handle] = []
        for each, (plan, _) in zip(prepared, plans, strict=True):
            send = input_of(plan, transport.rank, run)
            handles.append(each.start(send, np.empty_like(send)))
            if rng.random() < 0.1:
                time.sleep(0.002)
        results += [handle.result().tobytes() for handle in handles]
    transport.calm_down()
    return results


SHORT_PLANS = (("recursive-doubling", 256, "float32"), ("ring", 1000, "int32"), ("recursive-doubling", 1, "float64"))


@pytest.mark.parametrize("start", [pytest.param(0), *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 8))])
@pytest.mark.parametrize("n_rails", [1, 2])
def test_short_messages_survive_connections_that_break_at_any_moment(
    n_rails: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three plans at once, over sockets that take and give parts of frames, and break; every shortcut is checked."""
    used = hold_to_the_table(monkeypatch)
    n_runs, n_resent, n_cuts = 30, 0, 0
    wanted = [[without_faults(*each, n_runs)[rank] for each in SHORT_PLANS] for rank in range(4)]
    for seed in range(2 * start, 2 * start + 2):

        class Seeded(ReluctantlyCutting):
            pass

        Seeded.seed = seed

        def body(_: int, transport: TcpTransport) -> tuple[list[bytes], int]:
            return reduce_several_at_once(transport, n_runs), transport.counts.resent

        results = run_tcp(4, body, n_rails=n_rails, kind=Seeded, replan=seed % 3 == 0, crc=seed % 4 == 1)
        print(seed, Seeded.n_cuts, [resent for _, resent in results])
        for rank, (result, _) in enumerate(results):
            assert [result[k::3] for k in range(3)] == wanted[rank], f"seed {seed}, rank {rank}"
        n_cuts += Seeded.n_cuts
        n_resent += sum(resent for _, resent in results)
    assert n_cuts >= 4 and n_resent > 0
    assert used >= SHORTCUTS | {"offer"}


@pytest.mark.parametrize(
    ("counts_as_sent", "is_copy", "is_lost"), [(True, True, False), (False, True, True), (True, False, True)]
)
def test_who_has_left_in_good_order_owes_no_report_of_what_counts_as_sent(
    counts_as_sent: bool, is_copy: bool, is_lost: bool
) -> None:
    """Its last report of a short message may go with a connection that breaks just before it leaves."""

    def body(rank: int, transport: TcpTransport) -> bool:
        (handle,) = transport.open([Channel(0, 1, 1)])
        transport.barrier()
        if rank == 1:
            return False
        out, channel = transport._ends[handle]
        assert isinstance(out, OutRoute)
        channel.chunks.append((memoryview(b"kept"), not counts_as_sent, is_copy, 0))  # type: ignore[union-attr]
        transport._hub.left[1] = False
        for rail in out.rails:
            for line in (rail.line, rail.dialing):
                if line is not None:
                    transport._hub.drop(line)
            rail.line = rail.dialing = None
        transport._look_for_trouble()
        found, transport._hub.failure = transport._hub.failure, None
        return isinstance(found, RankLost)

    assert run_tcp(2, body, n_rails=1)[0] == is_lost


@pytest.mark.parametrize("seed", range(4))
def test_a_rail_may_fail_for_good(seed: int) -> None:
    plan, verdict = plan_of("ring", 60_001, "float32")

    class Seeded(Cutting):
        pass

    Seeded.seed, Seeded.for_good = seed, seed % 2
    results = run_tcp(4, lambda _, transport: reduce_and_calm_down(transport, plan, verdict, 3), kind=Seeded, **SMALL)
    assert results == without_faults("ring", 60_001, "float32", 3)
    assert Seeded.n_cuts == 4


@pytest.mark.parametrize(("name", "count", "n_runs"), [("ring", 200_003, 2), ("recursive-doubling", 256, 200)])
def test_chunks_that_come_twice_are_suppressed(
    name: str, count: int, n_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender's timer rings all the time: every chunk is on its way several times, over several rails."""
    monkeypatch.setattr(tcp_routes, "_TIMEOUT_S", 1e-4)
    monkeypatch.setattr(tcp_routes, "_TIMEOUT_S_MAX", 1e-3)
    monkeypatch.setattr(tcp_routes, "_TIMEOUT_LOOK_S", 0.0)
    monkeypatch.setattr(tcp, "_TICK_S", 1e-4)
    plan, verdict = plan_of(name, count, "float32")

    def body(_: int, transport: TcpTransport) -> tuple[list[bytes], int]:
        return reduce_over(transport, plan, verdict, n_runs), transport.counts.suppressed

    results = run_tcp(4, body, chunk_bytes=32768, window=16)
    assert [result for result, _ in results] == without_faults(name, count, "float32", n_runs)
    assert sum(suppressed for _, suppressed in results) > 0


class TwoRails:
    """The receiving end of a direction, rank 0 to rank 1, over two socket pairs that a test writes to."""

    def __init__(self, *, crc: bool = False) -> None:
        self._crc = crc
        hub = Hub(Settings(1 << 16, 8, crc, False, False, 0, 1.0, 1.0, 1.0), nics_of(1, 2), MonotonicClock())
        hub.meeting = Meeting(1, 2, bytes(16), bytes(32), ())
        hub.book = [[(nic.name, nic.address, 1, 1, 1) for nic in nics_of(rank, 2)] for rank in range(2)]
        self.hub, self.route = hub, hub.in_(0)
        pairs = [socket.socketpair() for _ in range(2)]
        self.writers = [pair[0] for pair in pairs]
        hub.checksum = zlib.crc32 if crc else None
        self.lines = [
            Incoming(pair[1], rail, 7, hub.rails[rail], hub.checksum, self.route) for rail, pair in enumerate(pairs)
        ]
        for line in self.lines:
            line.sock.setblocking(False)
            self.route.take(line)
        self.slot = np.zeros(100, np.uint8)
        self.channel = self.route.channel(0)
        self.route.post(self.channel, self.slot.data)

    def send(self, rail: int, data: bytes) -> None:
        self.writers[rail].sendall(data)
        self.route.ready(self.lines[rail], selectors.EVENT_READ)

    def frame(self, data: bytes) -> bytes:
        return data_header(7, 0, 0, 0, len(data), zlib.crc32(data) if self._crc else None) + data

    def end(self) -> None:
        for sock in [*self.writers, *(line.sock for line in self.lines)]:
            sock.close()
        self.hub.selector.close()


def test_a_second_copy_that_breaks_off_takes_nothing_from_the_first() -> None:
    rails = TwoRails()
    frame = rails.frame(bytes(range(100)))
    rails.send(0, frame[:70])
    rails.send(1, frame[:50])
    rails.writers[1].close()
    rails.route.ready(rails.lines[1], selectors.EVENT_READ)
    assert rails.route.lines == [rails.lines[0], None]
    assert rails.channel.receiver.delivered == 0
    rails.send(0, frame[70:])
    assert rails.channel.receiver.delivered == 1 and rails.slot.tolist() == list(range(100))
    rails.end()


@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_a_slot_that_was_reported_is_never_written_again(first: int, crc: bool) -> None:
    rails = TwoRails(crc=crc)
    frame = rails.frame(bytes(range(100)))
    rails.send(0, frame[:70])
    rails.send(1, frame[:50])
    rails.send(first, frame[(70, 50)[first] :])
    assert rails.channel.receiver.delivered == 1 and rails.slot.tolist() == list(range(100))
    rails.slot[:] = 0
    # The sender has its bytes back by now, and what still comes of the other copy is something else.
    rails.send(1 - first, b"?" * len(frame[(50, 70)[first] :]))
    assert not rails.slot.any() and rails.route.lines == rails.lines
    rails.send(1 - first, frame)
    assert rails.hub.counts.suppressed == 1 and not rails.slot.any() and rails.hub.counts.damaged == 0
    rails.end()


def test_a_copy_that_comes_whole_turns_away_one_that_is_coming() -> None:
    rails = TwoRails()
    frame = rails.frame(bytes(range(100)))
    rails.send(0, frame[:70])
    rails.send(1, frame)
    assert rails.channel.receiver.delivered == 1 and rails.slot.tolist() == list(range(100))
    rails.slot[:] = 0
    rails.send(0, b"?" * len(frame[70:]))
    assert not rails.slot.any() and rails.route.lines == rails.lines
    rails.end()


def test_a_short_chunk_that_is_damaged_is_not_taken() -> None:
    rails = TwoRails(crc=True)
    frame = rails.frame(bytes(range(100)))
    rails.send(0, frame[:-1] + b"?")
    assert rails.route.lines == [None, rails.lines[1]] and rails.hub.counts.damaged == 1
    assert rails.channel.receiver.delivered == 0
    rails.send(1, frame)
    assert rails.channel.receiver.delivered == 1 and rails.slot.tolist() == list(range(100))
    rails.end()


def test_a_damaged_chunk_or_header_costs_the_connection_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = data_header, [0]

    def damaged(session: int, epoch: int, channel: int, number: int, length: int, crc: int | None) -> bytes:
        calls[0] += 1
        if calls[0] % 50 == 25 and crc is not None:
            return real(session, epoch, channel, number, length, crc ^ 1)
        header = real(session, epoch, channel, number, length, crc)
        return header[:-1] + bytes([header[-1] ^ 4]) if calls[0] % 50 == 49 else header

    monkeypatch.setattr(tcp_rails, "data_header", damaged)
    plan, verdict = plan_of("ring", 60_001, "float32")

    def body(_: int, transport: TcpTransport) -> tuple[list[bytes], int]:
        return reduce_over(transport, plan, verdict, 3), transport.counts.damaged

    results = run_tcp(4, body, crc=True, **SMALL)
    assert [result for result, _ in results] == without_faults("ring", 60_001, "float32", 3)
    assert sum(n_damaged for _, n_damaged in results) > 0


def hold_to_the_table(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The rows of the table that the transport uses from now on; what it does without asking is held to them."""
    used: set[str] = set()

    def step(rows: Any, link: Any, state: Any, event: Any) -> Any:
        used.add(failover.find_row(rows, link, state, event).name)
        return failover.step(rows, link, state, event)

    def watched(
        shortcut: Callable[..., Any], rows: Any, asked: Callable[..., tuple[Any, Any, failover.Event]]
    ) -> Callable[..., Any]:
        def at_once(*args: Any) -> Any:
            result = shortcut(*args)
            if result is not None:
                link, state, event = asked(*args)
                used.add(f"{failover.find_row(rows, link, state, event).name} at once")
                wanted, actions = failover.step(rows, link, state, event)
                assert result == wanted, (state, event)
                kinds = [action.kind for action in actions]
                if rows is failover.RECEIVER_ROWS:
                    assert kinds.count("deliver") == kinds.count("send") == result.delivered - state.delivered
            return result

        return at_once

    # Neither the number of rails nor the window changes what follows from an acknowledgement or the next chunk.
    link = failover.Link(failover.RAILS_MAX, 1 << 16)
    for name, rows, asked in (
        ("offer_at_once", failover.SENDER_ROWS, lambda link, state: (link, state, failover.Event("offer"))),
        (
            *("acknowledge_at_once", failover.SENDER_ROWS),
            lambda state, epoch, number: (link, state, failover.Event("ack", 0, epoch, number)),
        ),
        ("take_slot_at_once", failover.RECEIVER_ROWS, lambda link, state: (link, state, failover.Event("offer"))),
        (
            *("take_chunk_at_once", failover.RECEIVER_ROWS),
            lambda state, rail, epoch, number: (link, state, failover.Event("data", rail, epoch, number)),
        ),
    ):
        monkeypatch.setattr(tcp_routes, name, watched(getattr(failover, name), rows, asked))
    monkeypatch.setattr(tcp_routes, "step", step)
    return used


SHORTCUTS = {"offer at once", "new ack at once", "slot at once", "fresh chunk at once"}


def test_the_transport_executes_the_table_that_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    used = hold_to_the_table(monkeypatch)
    plan, verdict = plan_of("ring", 60_001, "float32")
    assert run_tcp(4, lambda _, transport: reduce_over(transport, plan, verdict, 1), **SMALL) == without_faults(
        "ring", 60_001, "float32", 1
    )
    assert used >= {"offer", "new ack at once", "slot", "fresh chunk", "sender's rail lost", "sender's rail back"}

    class Seeded(Cutting):
        seed = 3

    run_tcp(
        4, lambda _, transport: reduce_and_calm_down(transport, plan, verdict, 4), kind=Seeded, replan=True, **SMALL
    )
    assert used >= {"replan", "agreement", "change", "receiver's rail lost", "receiver's rail back"}


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
        with pytest.raises(RankLost, match=r"rank \d is lost: it (refuses connections|has left after a failure)"):
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


def test_a_rank_that_nobody_reaches_is_a_named_error_within_the_stall() -> None:
    def body(rank: int, transport: TcpTransport) -> float:
        (handle,) = transport.open([Channel(0, 1, 1)])
        transport.barrier()
        if rank == 1:
            time.sleep(1.5)
            return 0.0
        for out in transport._hub.outs.values():
            for rail in out.rails:
                # No way leads there from a loopback address: nothing answers, and nothing refuses.
                rail.address = ("192.0.2.1", 9)
        for rail_number in range(2):
            cut(lines_of(transport, rail_number))
        transport.post_send(handle, np.zeros(4, np.uint8))
        started_s = time.monotonic()
        with pytest.raises(AllRailsFailed, match=r"no rail to rank 1 up for 0\.\d s \(r0, r1\)"):
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


class FakeInfo:
    """A socket that says what TCP_INFO says of it."""

    def __init__(self) -> None:
        self.unacked = self.acked = self.unsent = self.window = self.timeouts = self.rtt = 0
        self.n_bytes = 232

    def getsockopt(self, *_: object) -> bytes:
        fields = {2: ("=B", self.timeouts), 16: ("=I", 1000), 24: ("=I", self.unacked), 68: ("=I", self.rtt)}
        fields |= {120: ("=Q", self.acked)}
        fields |= {144: ("=I", self.unsent), 228: ("=I", self.window)}
        info = bytearray(232)
        for at, (form, value) in fields.items():
            struct.pack_into(form, info, at, value)
        return bytes(info[: self.n_bytes])


@pytest.mark.parametrize(("rates", "seconds"), [((2**27, 2**22), [2**-7, 2**-2]), ((2, 1), [0.0, 0.0])])
def test_the_queue_in_the_way_follows_from_the_rates_unless_they_are_proportions(
    rates: tuple[int, int], seconds: list[float]
) -> None:
    def body(rank: int, transport: TcpTransport) -> list[float]:
        transport.open([Channel(0, 1, 1), Channel(1, 0, 1)])
        transport.barrier()
        (out,) = transport._hub.outs.values()
        return [rail.line.queue_s for rail in out.rails if rail.line is not None]

    assert run_tcp(2, body, rates=rates) == [seconds] * 2


def test_only_unanswered_bytes_make_a_connection_silent() -> None:
    info = FakeInfo()
    line = Line(info)  # type: ignore[arg-type]
    assert not any(line.is_silent(0.1, 0.3) for _ in range(10)), "nothing is on its way"
    info.unacked = 3
    for acked in range(1, 10):
        info.acked = acked
        assert not line.is_silent(0.1, 0.3), "some are acknowledged each time"
    assert [line.is_silent(0.1, 0.3) for _ in range(3)] == [False, False, True]
    info.acked += 1
    assert not line.is_silent(10.0, 0.3)


@pytest.mark.parametrize(
    ("unsent", "window", "is_silent"), [(5000, 0, False), (5000, 999, False), (5000, 1000, True), (10, 10, True)]
)
def test_bytes_that_cannot_leave_are_silent_unless_the_window_is_full(
    unsent: int, window: int, is_silent: bool
) -> None:
    info = FakeInfo()
    info.unsent, info.window = unsent, window
    line = Line(info)  # type: ignore[arg-type]
    assert any(line.is_silent(0.1, 0.3) for _ in range(10)) == is_silent
    info.n_bytes = 144
    line = Line(info)  # type: ignore[arg-type]
    assert not any(line.is_silent(0.1, 0.3) for _ in range(10)), "an old kernel does not tell"


def test_a_connection_is_not_silent_before_its_own_habits_say_so() -> None:
    info = FakeInfo()
    line = Line(info)  # type: ignore[arg-type]
    info.unacked = 1
    for acked in (1, 2):
        info.acked = acked
        assert not any(line.is_silent(0.1, 0.9) for _ in range(5))
    # It has been without an answer for half a second: one and a half times that is allowed, unless a timer has rung.
    info.acked = 3
    assert [line.is_silent(0.1, 0.1) for _ in range(12)].index(True) in (7, 8)
    info.acked, info.timeouts = 4, 1
    assert [line.is_silent(0.1, 0.2) for _ in range(3)] == [False, False, True]
    slow = Line(info)  # type: ignore[arg-type]
    info.timeouts = 0
    assert [slow.is_silent(0.1, 0.1, 0.15) for _ in range(4)] == [False, False, False, True], "a queue at the NIC"
    info.rtt = 200_000
    slow = Line(info)  # type: ignore[arg-type]
    assert [slow.is_silent(0.1, 0.1) for _ in range(5)] == [False] * 4 + [True], "a long way"


def test_a_connection_is_in_no_doubt_while_a_queue_may_be_in_the_way() -> None:
    info = FakeInfo()
    line = Line(info)  # type: ignore[arg-type]
    info.unacked, line.queue_s = 1, 0.25
    found = [(line.is_silent(0.1, 0.4), line.suspect) for _ in range(5)]
    assert [suspect for _, suspect in found] == [False] * 3 + [True] * 2
    assert [silent for silent, _ in found] == [False] * 4 + [True], "it is found silent no later"


def test_half_way_to_silence_a_connection_is_suspect() -> None:
    info = FakeInfo()
    line = Line(info)  # type: ignore[arg-type]
    info.unacked = 1
    line.is_silent(0.1, 0.4)
    suspect = []
    for _ in range(3):
        line.is_silent(0.1, 0.4)
        suspect.append(line.suspect)
    info.acked += 1
    line.is_silent(0.1, 0.4)
    assert suspect == [False, True, True] and not line.suspect and line.awaits
    info.unacked = 0
    line.is_silent(0.1, 0.4)
    assert not line.awaits, "nothing is on its way: nobody need look"


def outgoing_to(transport: TcpTransport, peer: int, rail: int) -> Outgoing:
    line = transport._hub.outs[peer].rails[rail].line
    assert line is not None
    return line


def poll_until(transport: TcpTransport, holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DONE_S / 2
    while not holds():
        transport.poll(0.05)
        assert time.monotonic() < deadline_s


def test_who_gives_a_connection_up_tells_the_other_end() -> None:
    """Nothing is cut here: only a word over the other rail can have told."""

    def body(rank: int, transport: TcpTransport) -> None:
        transport.barrier()
        peer, hub = 1 - rank, transport._hub
        poll_until(transport, lambda: all(rail.line is not None for rail in hub.outs[peer].rails))
        poll_until(transport, lambda: all(line is not None for line in hub.ins[peer].lines))
        transport.barrier()
        if rank == 0:
            line = outgoing_to(transport, 1, 1)
            # The descriptor lives on, so the other end gets no end of file; and nothing is dialled until it has heard.
            with line.sock.dup():
                hub.outs[1].lose(line, tcp_rails.Broken("a test"))
                hub.outs[1].rails[1].next_s = float("inf")
                transport.barrier()
        else:
            poll_until(transport, lambda: hub.ins[0].lines[1] is None)
            transport.barrier()
        hub.outs[peer].dial_now(mine=1)
        poll_until(transport, lambda: hub.outs[peer].rails[1].line is not None)
        transport.barrier()

    run_tcp(2, body)


def test_a_nic_that_the_kernel_calls_down_is_given_up_at_both_ends_and_dialled_when_it_is_back() -> None:
    plan, verdict = plan_of("ring", 60_001, "float32")

    def body(rank: int, transport: TcpTransport) -> list[bytes]:
        hub = transport._hub
        transport.barrier()
        results = reduce_over(transport, plan, verdict, 1)
        poll_until(transport, lambda: all(rail.line is not None for out in hub.outs.values() for rail in out.rails))
        transport.barrier()
        if rank == 1:
            hub.nic_changed(1, False)
            assert not lines_of(transport, 1)
            hub.flush()
        results += reduce_over(transport, plan, verdict, 2)[1:]
        # The others may dial, for this NIC is not really down; but they have heard.
        poll_until(transport, lambda: not (rank == 1 or 1 in hub.outs) or hub.rails[1].failures > 0)
        transport.barrier()
        if rank == 1:
            assert all(out.rails[1].line is None for out in hub.outs.values())
            hub.nic_changed(1, True)
        poll_until(transport, lambda: all(rail.line is not None for out in hub.outs.values() for rail in out.rails))
        transport.barrier()
        return results

    results = run_tcp(4, body)
    wanted = without_faults("ring", 60_001, "float32", 2)
    assert results == wanted


@pytest.mark.parametrize("size", [0, 1, 16384])
def test_a_short_message_is_sent_from_a_copy_once_there_is_a_slot(size: int) -> None:
    """The receiver has posted, and does not poll: no acknowledgement can have come."""
    posted, reported = threading.Event(), threading.Event()

    def body(rank: int, transport: TcpTransport) -> None:
        (handle,) = transport.open([Channel(0, 1, 2)])
        view = np.full(size, 7 * (1 - rank), np.uint8)
        if rank == 1:
            transport.post_recv(handle, view)
            transport.barrier()
            transport.post_recv(handle, other := np.zeros(size, np.uint8))
            assert posted.wait(DONE_S) and reported.wait(DONE_S)
            events: list[Any] = []
            while len(events) < 2:
                events += transport.poll(5.0)
            assert view.tolist() == [7] * size and other.tolist() == [9] * size
        else:
            transport.barrier()
            transport.post_send(handle, view)
            assert transport.poll(5.0) == [(SENT, handle)], "before the receiver has looked"
            posted.set()
            # The second has no slot that this end knows of: it goes out, and is not reported.
            view[:] = 9
            transport.post_send(handle, view)
            assert transport.poll(0.1) == []
            view[:] = 0
            reported.set()
            assert transport.poll(5.0) == [(SENT, handle)]
        transport.barrier()

    run_tcp(2, body)


def test_a_long_message_before_a_short_one_is_reported_first() -> None:
    def body(rank: int, transport: TcpTransport) -> list[int]:
        (handle,) = transport.open([Channel(0, 1, 4)])
        views = [np.full(size, 1 + i, np.uint8) for i, size in enumerate((4, 3 << 20, 4, 4, 1 << 20, 4))]
        if rank == 1:
            for view in views:
                view[:] = 0
                transport.post_recv(handle, view)
        transport.barrier()
        if rank == 0:
            for view in views:
                transport.post_send(handle, view)
        n_events = 0
        while n_events < len(views):
            n_events += len(transport.poll(5.0))
        transport.barrier()
        return [int(view[0]) for view in views]

    assert run_tcp(2, body) == [[1, 2, 3, 4, 5, 6]] * 2


def test_a_short_message_is_not_reported_before_a_longer_one_in_front_of_it() -> None:
    """The longer one is on its way as a whole, and its receiver has slots for both, but does not look."""
    posted, seen = threading.Event(), threading.Event()

    def body(rank: int, transport: TcpTransport) -> None:
        (handle,) = transport.open([Channel(0, 1, 4)])
        sizes = (64, 60_000, 64)
        if rank == 1:
            for size in sizes:
                transport.post_recv(handle, np.zeros(size, np.uint8))
        transport.barrier()
        if rank == 1:
            assert posted.wait(DONE_S)
            assert [transport.poll(5.0)] == [[(RECEIVED, handle)]]
            seen.set()
        else:
            transport.post_send(handle, np.zeros(sizes[0], np.uint8))
            assert transport.poll(5.0) == [(SENT, handle)]
            posted.set()
            assert seen.wait(DONE_S)
            for size in sizes[1:]:
                transport.post_send(handle, np.zeros(size, np.uint8))
            assert transport.poll(0.2) == []
        done.wait(DONE_S)
        n_events = 0
        while n_events < 2:
            n_events += len(transport.poll(5.0))
        transport.barrier()

    done = threading.Barrier(2)
    run_tcp(2, body, n_rails=1)


def test_a_short_message_takes_the_reports_for_its_peer_along() -> None:
    """Two ranks that send each other short messages: one frame of data each, and hardly a write for anything else."""

    sent = run_tcp(2, exchange)
    # A turn: a data frame with its 64 bytes and a state, both of 36 bytes of header; alone they would be two writes.
    assert max(sent) <= 15, sent


def exchange(rank: int, transport: TcpTransport) -> int:
    """Twenty exchanges of short messages; how many reports went out by themselves in the last fifteen."""
    channels = transport.open([Channel(0, 1, 2), Channel(1, 0, 2)])
    out, in_ = channels if rank == 0 else channels[::-1]
    send, recv = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    alone = 0
    for turn in range(20):
        send[:] = turn
        transport.post_recv(in_, recv)
        transport.post_send(out, send)
        alone += turn >= 5 and bool(transport._hub.late_ins)
        n_events = 0
        while n_events < 2:
            n_events += len(transport.poll(5.0))
        assert recv.tolist() == [turn] * 64
    transport.barrier()
    return alone


def test_reports_wait_a_little_for_a_message_that_has_often_come_soon() -> None:
    rails = TwoRails()
    hub, route = rails.hub, rails.route

    def n_reports() -> int:
        """How many have been written, and can be read at the other end."""
        n_bytes = 0
        for writer in rails.writers:
            with contextlib.suppress(BlockingIOError):
                n_bytes += len(writer.recv(1 << 14, socket.MSG_DONTWAIT))
        return n_bytes // HEADER_BYTES

    hub.flush_late(1.0)
    assert n_reports() == 1, "nothing has gone to the peer yet: a slot is told at once"
    for turn in range(64):
        route.reported_s = 2.0 + turn
        route.note_chance(2.0 + turn)
    route.post(route.channel(0), rails.slot.data)
    hub.flush_late(100.0)
    assert n_reports() == 0
    hub.flush_late(100.0005)
    assert n_reports() == 0
    assert hub.late_to_s == pytest.approx(100.001)
    chances = route.chances
    hub.flush_late(100.002)
    assert n_reports() == 1
    assert route.chances < chances, "the wait was in vain"
    rails.end()


def test_who_need_not_wait_any_more_has_told_what_its_peer_waits_for() -> None:
    """A short message counts as sent once its slot is told, even if whoever posted that never calls again."""
    told = threading.Event()

    def body(rank: int, transport: TcpTransport) -> None:
        (handle,) = transport.open([Channel(0, 1, 2)])
        view = np.zeros(64, np.uint8)
        for turn in range(2):
            if rank == 0:
                transport.post_send(handle, view)
                assert transport.poll(5.0) == [(SENT, handle)]
                told.set() if turn else None
                continue
            if turn:
                transport._hub.in_(0).chances = 64
                time.sleep(0.05)
            transport.post_recv(handle, view)
            assert transport.poll(5.0) == [(RECEIVED, handle)]
            assert not turn or told.wait(5.0)
        transport.barrier()

    run_tcp(2, body)


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
                transport._hub.in_(0).chances = 64
                target = np.zeros_like(array)
                assert prepared.start(None, target).wait(5.0) and target[-1] == 15
                assert done.wait(5.0)
        engine.barrier()

    run_tcp(2, body)


def test_an_early_chunk_that_is_not_next_finds_its_slot() -> None:
    """The second of two short messages comes first, over another rail, before either has a slot but the first."""
    rails = TwoRails()
    first, second = bytes(range(100)), bytes(range(100, 200))
    rails.send(1, data_header(7, 0, 0, 1, 100, None) + second)
    other = np.zeros(100, np.uint8)
    # As the transport posts: at once if that is possible.
    assert not rails.route.post_at_once(rails.channel, other.data)
    rails.route.post(rails.channel, other.data)
    rails.send(0, data_header(7, 0, 0, 0, 100, None) + first)
    assert (rails.slot.tobytes(), other.tobytes()) == (first, second)
    assert rails.channel.receiver.delivered == 2 and not rails.channel.early
    rails.end()


def test_short_frames_may_come_in_any_parts() -> None:
    """States and chunks, byte by byte, all at once, and with one byte of the next header."""
    for step in (1, 7, 35, 36, 37, 150, 1000):
        rails = TwoRails()
        slots = [rails.slot, *(np.zeros(100, np.uint8) for _ in range(7))]
        for slot in slots[1:]:
            assert rails.route.post_at_once(rails.channel, slot.data)
        out = rails.hub.out(0)
        stream = b""
        for n in range(len(slots)):
            stream += state_header(7, 0, 0, 0, n + 1) + data_header(7, 0, 0, n, 100, None) + bytes([n] * 100)
        for at in range(0, len(stream), step):
            rails.send(0, stream[at : at + step])
        assert [slot.tolist() for slot in slots] == [[n] * 100 for n in range(len(slots))], step
        assert out.channel(0).slots == len(slots) and rails.channel.receiver.delivered == len(slots)
        assert rails.hub.counts.damaged == 0 and None not in rails.route.lines
        rails.end()


def test_in_the_middle_of_a_chunk_nobody_is_woken_for_little() -> None:
    rails = TwoRails()
    low_water = partial(rails.lines[0].sock.getsockopt, socket.SOL_SOCKET, socket.SO_RCVLOWAT)
    frame = rails.frame(bytes(range(100)))
    rails.send(0, frame[:70])
    assert low_water() == len(frame) - 70
    rails.send(0, frame[70:])
    assert low_water() == 1
    assert rails.slot.tolist() == list(range(100))
    rails.end()


def test_reports_that_are_lost_with_a_message_of_the_opposite_direction_are_repeated() -> None:
    rails = TwoRails()
    out = rails.hub.out(0)
    out.channel(0)
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        line = Outgoing(left, 0, 9, rails.hub.rails[0], None)
        out.rails[0].line = line
        line.put(out.channel(0), 0, 0, memoryview(b"abc"))
        assert line.can_carry_reports()
        rails.hub.dirty_ins.clear()
        out.lose(line, tcp_rails.Broken("a test"))
        states = [list(each._states) for each in rails.hub.dirty_ins]
        assert [0] in states
    rails.end()


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


def test_wide_checksums_are_those_of_zlib() -> None:
    data = np.random.default_rng(5).integers(0, 256, 100_003, np.uint8)
    for n_bytes in (0, 1, 32, 1000, 100_003):
        view = data[:n_bytes].data
        assert crc32(view, 0) == zlib.crc32(view)
        assert crc32(view[n_bytes // 3 :], crc32(view[: n_bytes // 3], 0)) == zlib.crc32(view)


def test_rails_carry_what_their_nics_turn_out_to_be_good_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates are not declared; then a rank finds that its second NIC sends a third of what the first one does, and
    later that it does not: the others hear of it, and what goes out from then on is divided so, or as before."""

    def body(rank: int, transport: TcpTransport) -> list[list[float]]:
        hub = transport._hub
        handles = transport.open([Channel(0, 1, 2), Channel(1, 0, 2)])
        views = [np.zeros(4 << 20, np.uint8) for _ in range(2)]
        seen: list[list[float]] = []
        for share in (1 / 3, 1.0):
            transport.barrier()
            if rank == 0:
                hub.meters.know([1.0, share])
            before = [rail.sent_bytes for rail in transport.rails]
            for _ in range(12):
                transport.post_send(handles[rank], views[0])
                transport.post_recv(handles[1 - rank], views[1])
                done = 0
                while done < 2:
                    done += len(transport.poll(5.0))
            sent = [rail.sent_bytes - at for rail, at in zip(transport.rails, before, strict=True)]
            transport.barrier()
            seen.append([sent[0] / sum(sent), hub.meters.share(0, 1), transport.rails[1].out_share])
        return seen

    monkeypatch.setattr(Meters, "look", lambda *_: None)
    first, second = run_tcp(2, body, learn_rates=True)
    assert [each[0] for each in first] == pytest.approx([0.75, 0.5], abs=0.03), first
    assert [each[0] for each in second] == pytest.approx([0.5, 0.5], abs=0.03), "its own NICs are as declared"
    for rank, seen in enumerate((first, second)):
        assert [each[1] for each in seen] == pytest.approx([1 / 3, 1.0], abs=1e-3), "both know"
        assert [each[2] for each in seen] == ([1 / 3, 1.0] if rank == 0 else [1.0, 1.0])


def test_ranks_learn_that_a_nic_is_down_and_divide_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks that all send to each other: rank 2 has one NIC left, so that the others go round it."""

    def body(rank: int, transport: TcpTransport) -> list[list[float]]:
        hub = transport._hub
        pairs = [(src, dst) for src in range(3) for dst in range(3) if src != dst]
        transport.open([Channel(src, dst, 3) for src, dst in pairs], carried=[1 << 20] * len(pairs))
        seen: list[list[float]] = []
        for is_up in (False, True):
            transport.barrier()
            if rank == 2:
                hub.meters.note_nic(0, is_up)
            transport.barrier()
            seen += [list(hub.outs[peer]._parts or ()) for peer in range(3) if peer != rank]
        return seen

    monkeypatch.setattr(Meters, "look", lambda *_: None)
    parts = run_tcp(3, body, learn_rates=True)
    assert parts[0][0] == pytest.approx([1.0, 0.0], abs=0.05), "to rank 1, past the NIC that is busy with rank 2"
    assert parts[0][1] == parts[1][1] == parts[2][0] == pytest.approx([0.0, 1.0], abs=0.01), "all that rank 2 has left"
    assert parts[0][2:] == parts[1][2:] == parts[2][2:] == [[], []], "as declared"


def test_what_is_out_on_a_connection_in_doubt_goes_out_elsewhere_and_comes_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half way to a verdict both ends leave a connection alone that may have failed, in the middle of a message; it
    stays, and is used again when it answers."""

    def body(rank: int, transport: TcpTransport) -> tuple[list[list[int]], bytes, int]:
        hub = transport._hub
        (handle,) = transport.open([Channel(0, 1, 2)])
        data = np.random.default_rng(7).integers(0, 256, 1 << 20, np.uint8)
        into = np.zeros_like(data)
        sent: list[list[int]] = []

        def turn() -> None:
            (transport.post_send if rank == 0 else transport.post_recv)(handle, data if rank == 0 else into)
            while not transport.poll(5.0):
                pass

        for is_suspect in (False, True, False):
            turn()
            if rank == 0 and len(sent):
                out = hub.outs[1]
                line = out.rails[1].line
                assert line is not None
                line.suspect = is_suspect
                if is_suspect:
                    transport.post_send(handle, data)
                hub.tell_doubt(line, 1)
                out._shun()
                assert line.is_shunned == is_suspect
                if is_suspect:
                    while not transport.poll(5.0):
                        pass
            elif len(sent) == 1:
                turn()
            transport.barrier()
            if rank == 1:
                shunned = hub.ins[0].lines[1]
                assert shunned is not None and shunned.is_shunned == is_suspect
            before = [rail.sent_bytes for rail in transport.rails]
            for _ in range(3):
                turn()
            transport.barrier()
            sent.append([rail.sent_bytes - at for rail, at in zip(transport.rails, before, strict=True)])
        return sent, into.tobytes(), transport.rails[1].failures

    monkeypatch.setattr(tcp_routes.Hub, "is_silent", lambda *_: False)
    (sent, _, failures), (_, received, _) = run_tcp(2, body)
    assert received == np.random.default_rng(7).integers(0, 256, 1 << 20, np.uint8).tobytes() and not failures
    shares = [each[1] / sum(each) for each in sent]
    assert shares[0] > 0.4 and shares[1] < 0.1 and shares[2] > 0.4, shares


def test_a_doubt_that_has_been_overtaken_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int, transport: TcpTransport) -> None:
        hub = transport._hub
        transport.open([Channel(0, 1, 2)])
        transport.barrier()
        if rank == 0:
            out = hub.outs[1]
            line = out.rails[0].line
            assert line is not None
            line.answers = True
            for count, is_shunned in ((1, False), (3, False), (4, False)):
                line.awaits = count < 4
                out.hear_doubt(line, count)
                assert line.is_shunned == is_shunned, "its kernel answers"
            line.answers = False
            for count, is_shunned in ((6, False), (5, False), (7, True), (6, True), (8, False)):
                out.hear_doubt(line, count)
                assert line.is_shunned == is_shunned, count
            other = out.rails[1].line
            assert other is not None
            for each in (line, other):
                out.hear_doubt(each, 9)
            assert not line.is_shunned and not other.is_shunned, "there is no other"
            out.hear_doubt(line, 10)
            assert other.is_shunned
        transport.barrier()

    monkeypatch.setattr(tcp_routes.Hub, "is_silent", lambda *_: False)
    run_tcp(2, body)


# --- the wire, and who may come in


def test_a_damaged_header_is_no_header() -> None:
    headers = (data_header(9, 1, 2, 3, 4, 5), change_header(9, 1, 2), bye_header(9, True), state_header(9, 1, 2, 3, 4))
    for header in headers:
        assert len(header) == HEADER_BYTES
        decode(header, 9)
        with pytest.raises(WireError, match="of another connection"):
            decode(header, 8)
        for bit in range(8 * len(header)):
            damaged = bytearray(header)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(WireError):
                decode(damaged, 9)
    assert decode(headers[2], 9)[:2] == (BYE_FRAME, 1)


def test_the_hello_convinces_only_who_knows_the_secret_of_this_job() -> None:
    secret, other, hello = bytes(32), b"x" * 32, Hello(0, 1, 0, bytes(16))
    for of_caller, of_doorman in ((secret, other), (other, secret)):
        caller, doorman = Caller(of_caller, hello, nonce=b"a" * 32), Doorman(of_doorman, nonce=b"b" * 32)
        with pytest.raises(WireError, match="does not know the secret"):
            caller.take(doorman.take_hello(caller.opening))
        with pytest.raises(WireError, match="does not know the secret"):
            doorman.take_proof(bytes(32))
    caller, doorman = Caller(secret, hello, nonce=b"a" * 32), Doorman(secret, nonce=b"b" * 32)
    answer = doorman.take_hello(caller.opening)
    with pytest.raises(WireError, match="the caller"):
        doorman.take_proof(answer[32:])
    proof = caller.take(answer)
    replayed = Doorman(secret, nonce=b"c" * 32)
    replayed.take_hello(caller.opening)
    with pytest.raises(WireError, match="the caller"):
        replayed.take_proof(proof)
    doorman.take_proof(proof)
    assert doorman.session == caller.session != 0


def address_of(room: Room, rank: int, rail: int = 0) -> tuple[str, int]:
    import msgspec

    _, address, port, _, _ = msgspec.json.decode(room.records[rank])["nics"][rail]
    return address, port


def is_shut_out(sock: socket.socket) -> bool:
    """True once the other end has closed; then so has this one."""
    with sock:
        sock.settimeout(5.0)
        try:
            while sock.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except OSError:
            return True
        return True


def call(address: tuple[str, int], data: bytes) -> socket.socket:
    sock = socket.create_connection(address, timeout=5.0)
    with contextlib.suppress(ConnectionError):
        sock.sendall(data)
    return sock


def enter(address: tuple[str, int], secret: bytes, hello: Hello) -> tuple[socket.socket, int]:
    """Says hello as a rank does; the connection and its session."""
    caller = Caller(secret, hello, nonce=os.urandom(32))
    sock = call(address, caller.opening)
    try:
        answer = b""
        while len(answer) < ANSWER_BYTES:
            data = sock.recv(ANSWER_BYTES - len(answer))
            if not data:
                raise ConnectionResetError("refused")
            answer += data
        sock.sendall(caller.take(answer))
    except BaseException:
        sock.close()
        raise
    return sock, caller.session


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


def test_a_member_that_announces_nonsense_is_cut_off() -> None:
    """Even who knows the secret gets no memory: lengths and channels are those of the plan."""

    def visit(room: Room) -> None:
        frames: list[Callable[[int], bytes]] = [
            lambda session: data_header(session, 0, 0, 0, 2**32 - 1, None),
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


# --- real processes

PROGRAM = """
import os, sys, time
import numpy as np
from optcc.errors import RankLost
from optcc.runtime.engine import Executor
from optcc.runtime.launch import Nic, in_file
from optcc.runtime.samples import ring
from optcc.runtime.check import make_input, wrong_elements
from optcc.runtime.transports.tcp import TcpTransport
from optcc.verdict import PROPERTIES, PROVED, Verdict

rank, n, path, dies = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "dies"
nics = [Nic(f"r{i}", f"127.0.{i + 1}.{rank + 1}") for i in range(2)]
transport = TcpTransport(in_file(path, rank, n, timeout_s=20), nics)
plan = ring(n, 1 << 20)
executor = Executor(plan, rank, transport, Verdict(plan.digest, dict.fromkeys(PROPERTIES, PROVED)), deadline_s=20)
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


def test_a_process_that_is_killed_is_noticed_within_two_seconds(tmp_path: Path) -> None:
    done = run_processes(3, tmp_path / "meeting", "dies")
    assert done[1].returncode == -9
    for rank in (0, 2):
        word, waited_s, *rest = done[rank].stdout.split()
        assert word == "lost" and float(waited_s) < 2.0, (done[rank].stdout, done[rank].stderr)
        assert " ".join(rest).startswith(f"rank {rank}: rank ")


def test_outgoing_and_incoming_are_told_apart() -> None:
    """A frame that belongs to the other direction ends the connection."""
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        outgoing = Outgoing(left, 0, 7, tcp_rails.RailCount("r0"), None)
        right.sendall(data_header(7, 0, 0, 0, 4, None))
        with pytest.raises(tcp_rails.Broken, match="to a sender"):
            outgoing.read()
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        rails = TwoRails()
        incoming = Incoming(left, 0, 7, tcp_rails.RailCount("r0"), None, rails.route)
        right.sendall(state_header(7, 0, 1 << 30, 0, 0))
        with pytest.raises(tcp_rails.Broken, match="state of channel"):
            incoming.read()
        rails.end()


# --- meeting


def interfaces_here() -> list[Interface]:
    names = ("lo", "docker0", "eth1", "eth0", "eth10", "ib0")
    return [Interface(name, f"10.0.0.{i}", name == "lo", rate=100 * i) for i, name in enumerate(names)]


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("", ["eth0", "eth1", "eth10", "ib0"]),
        ("eth", ["eth0", "eth1", "eth10"]),
        ("eth1,ib", ["eth1", "eth10", "ib0"]),
        ("=eth1", ["eth1"]),
        ("=eth1,lo", ["eth1", "lo"]),
        ("^eth,lo", ["docker0", "ib0"]),
        ("^=eth1,lo,docker0", ["eth0", "eth10", "ib0"]),
        ("lo", ["lo"]),
    ],
)
def test_nics_are_chosen_as_nccl_does(wanted: str, chosen: list[str]) -> None:
    assert [nic.name for nic in choose_nics(wanted, interfaces_here())] == chosen


def test_nics_that_cannot_be_chosen_are_bad_input() -> None:
    for wanted in ("wlan", "=eth", "^e,l,d,i", "eth,", "=", "^", ","):
        with pytest.raises(InputError, match="OPTCC_SOCKET_IFNAME"):
            choose_nics(wanted, interfaces_here())
    with pytest.raises(EnvironmentMissing, match="no network interface"):
        choose_nics("", [])


def test_loopback_is_chosen_only_if_there_is_nothing_else() -> None:
    lo, docker, eth = interfaces_here()[:3]
    assert [nic.name for nic in choose_nics("", [lo, docker])] == ["lo"]
    assert [nic.name for nic in choose_nics("", [lo, docker, eth])] == ["eth1"]


def test_rates_are_the_drivers_if_all_say_one() -> None:
    fast, slow, silent = (
        Interface("a", "10.0.0.1", False, 200),
        Interface("b", "10.0.0.2", False, 100),
        Interface("c", "10.0.0.3", False),
    )
    assert [nic.out_rate for nic in choose_nics("", [fast, slow])] == [200, 100]
    assert [nic.out_rate for nic in choose_nics("", [fast, slow, silent])] == [1, 1, 1]


def test_this_machine_has_a_loopback() -> None:
    assert any(each.is_loopback and each.address == "127.0.0.1" for each in interfaces())
    assert [nic.name for nic in nics_from({"OPTCC_SOCKET_IFNAME": "=lo"})] == ["lo"]


def test_rates_are_those_declared_for_this_host() -> None:
    nics = [Nic("eth0", "10.0.0.1"), Nic("eth1", "10.0.1.1")]
    text = "200Mbit/s,eth1=100Mbit/s:50Mbit/s,h3.eth0=80Mbit/s"
    rates = [(nic.out_rate, nic.in_rate) for nic in declare_rates(nics, text, "h3")]
    assert rates == [(10_000_000, 10_000_000), (12_500_000, 6_250_000)]
    assert declare_rates(nics, text, "h2")[0].out_rate == 25_000_000
    given = nics_from({"OPTCC_SOCKET_IFNAME": "=lo", "OPTCC_NIC_RATES": "1GB/s"})
    assert given[0].in_rate == 10**9
    for wrong in ("", "fast", "1GB/s,eth0", "1GB/s,=1GB/s", "1GB/s,eth0=", "1GB/s,h3.=1GB/s", "0B/s"):
        with pytest.raises(InputError):
            declare_rates(nics, wrong, "h3")


def gather(meets: Sequence[Meet], records: Sequence[bytes]) -> list[Meeting | OptccError]:
    """What each rank has once they have met, in threads."""
    results: dict[int, Meeting | OptccError] = {}

    def body(rank: int) -> None:
        try:
            results[rank] = meets[rank](records[rank])
        except OptccError as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(meets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DONE_S)
    return [results[rank] for rank in range(len(meets))]


def check_met(met: Sequence[Meeting | OptccError], records: Sequence[bytes]) -> None:
    meetings = [each for each in met if isinstance(each, Meeting)]
    assert len(meetings) == len(records), met
    for rank, each in enumerate(meetings):
        assert (each.rank, each.n_ranks, each.records) == (rank, len(records), tuple(records))
        assert (each.job, each.secret) == (meetings[0].job, meetings[0].secret)
        assert len(each.job) == 16 and len(each.secret) == 32
        assert each.secret.hex() not in repr(each) and repr(each.secret) not in repr(each)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.parametrize("n_ranks", [1, 5])
def test_ranks_meet_in_a_file_and_remove_it(n_ranks: int, tmp_path: Path) -> None:
    path, records = tmp_path / "job", [bytes([rank]) * (rank * 7) for rank in range(n_ranks)]
    check_met(gather([in_file(path, rank, n_ranks) for rank in range(n_ranks)], records), records)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_this_jobs_alone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job"
    (late,) = gather([in_file(path, 0, 2, timeout_s=0.1)], [b""])
    assert isinstance(late, DeadlineExceeded) and "in vain for ranks 1" in str(late)
    assert path.stat().st_mode & 0o777 == 0o600
    for meet, kind, words in (
        (in_file(path, 0, 2), InputError, "rank 0 is there already"),
        (in_file(path, 1, 3), MismatchError, "for 2 ranks; rank 1 is one of 3"),
    ):
        with pytest.raises(kind, match=words):
            meet(b"")
    path.chmod(0o644)
    with pytest.raises(InputError, match="mode 0600"):
        in_file(path, 1, 2)(b"")
    path.chmod(0o600)
    path.write_text('{"n_ranks": 2, "surprise": 1}')
    with pytest.raises(InputError, match="must be a file of this job alone"):
        in_file(path, 1, 2)(b"")
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(InputError):
        in_file(tmp_path / "link", 1, 2)(b"")
    with pytest.raises(InputError, match="must be at most 4096 B"):
        in_file(tmp_path / "other", 0, 1)(bytes(5000))
    with pytest.raises(InputError, match="rank 2 of 2"):
        in_file(path, 2, 2)


@pytest.mark.parametrize("n_ranks", [1, 4])
def test_ranks_meet_at_rank_0(n_ranks: int) -> None:
    address, secret = ("127.0.0.1", free_port()), os.urandom(32)
    records = [bytes([rank + 1]) * (1 + rank * 7) for rank in range(n_ranks)]
    check_met(gather([at_address(address, rank, n_ranks, secret) for rank in range(n_ranks)], records), records)


def test_strangers_at_the_meeting_are_sent_away_and_the_others_meet() -> None:
    address, secret, records = ("127.0.0.1", free_port()), os.urandom(32), [b"a", b"b", b"c"]
    met: list[Meeting | OptccError] = []
    first = threading.Thread(
        target=lambda: met.extend(gather([at_address(address, rank, 3, secret) for rank in range(2)], records[:2]))
    )
    first.start()
    time.sleep(0.2)
    silent = call(address, b"op")
    assert is_shut_out(call(address, os.urandom(200)))
    with pytest.raises((WireError, ConnectionError)):
        enter(address, os.urandom(32), Hello(2, 3, 0xFFFF, bytes(16)))
    greedy, _ = enter(address, secret, Hello(2, 3, 0xFFFF, bytes(16)))
    greedy.sendall(b"\xff\xff\xff\xff")
    assert is_shut_out(greedy), "a record of 4 GiB"
    (wrong,) = gather([at_address(address, 2, 3, os.urandom(32), timeout_s=0.3)], [b"x"])
    assert isinstance(wrong, DeadlineExceeded) and "does not know the secret" in str(wrong)
    last = at_address(address, 2, 3, secret)(b"c")
    first.join(DONE_S)
    check_met([*met, last], records)
    assert is_shut_out(silent)


def test_a_meeting_that_does_not_come_about_says_who_is_missing() -> None:
    address, secret = ("127.0.0.1", free_port()), os.urandom(32)
    met = gather([at_address(address, rank, 4, secret, timeout_s=0.3) for rank in range(2)], [b"a", b"b"])
    assert "rank 0: waited 0.3 s in vain for ranks 2, 3 to meet" in str(met[0])
    assert isinstance(met[1], DeadlineExceeded)
    with pytest.raises(InputError, match="must be a free port"):
        at_address(("192.0.2.1", 1), 0, 1, secret)(b"")
    with pytest.raises(InputError, match="secret of 3 B"):
        at_address(address, 0, 1, b"abc")


def test_a_secret_is_read_only_from_a_file_of_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(bytes(range(40)))
    path.chmod(0o600)
    assert read_secret(path) == bytes(range(32))
    path.chmod(0o640)
    with pytest.raises(InputError, match="mode 0600"):
        read_secret(path)
    (tmp_path / "short").touch(0o600)
    with pytest.raises(InputError, match="secret of 0 B"):
        read_secret(tmp_path / "short")
    with pytest.raises(InputError, match="must hold the secret"):
        read_secret(tmp_path / "none")
