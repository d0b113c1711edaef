"""AllReduces over TCP whose connections break, are slow or carry damage: exact all the same, by the proved table.

Connections are cut by shutting their sockets down.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

from optcc import failover
from optcc.plan import Plan
from optcc.runtime.engine import Engine
from optcc.runtime.handle import Handle
from optcc.runtime.protocol import channel, connection, endpoint, inbound, outbound
from optcc.runtime.protocol.frames import data_header
from optcc.runtime.protocol.local import Established
from optcc.runtime.transports.tcp import TcpTransport
from optcc.verdict import Verdict
from tests.unit.runtime.transports.tcp_ranks import (
    DONE_S,
    SMALL,
    input_of,
    plan_of,
    reduce_over,
    run_tcp,
    without_faults,
)


def connections_of(transport: TcpTransport, rail: int) -> list[Established]:
    """The connections that are up on a rail."""
    return [each for each in list(transport._endpoint.up) if each.rail == rail]


def cut(connections: Sequence[Established]) -> None:
    for each in connections:
        with contextlib.suppress(OSError):
            each.wire.sock.shutdown(socket.SHUT_RDWR)


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
            connections = connections_of(self, self._random.randrange(len(self.rails)))
            cut(self._random.choices(connections) if connections else [])
            self._left = self._random.randrange(1, 60)
        else:
            self._unregister(self._listeners[self.for_good])
            self._listeners[self.for_good].close()
            cut(connections_of(self, self.for_good))
        type(self).n_cuts += 1


def reduce_and_calm_down(transport: TcpTransport, plan: Plan, verdict: Verdict, n_runs: int) -> list[bytes]:
    assert isinstance(transport, Cutting)
    results = reduce_over(transport, plan, verdict, n_runs)
    transport.calm_down()
    return results


@pytest.mark.parametrize(
    "n_rails", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_connections_may_break_at_any_moment(n_rails: int) -> None:
    """A smoke test over sockets; the swarm (tests/faults) runs the same protocol through thousands of seeds."""
    n_resent = n_cuts = 0
    for seed in range(8):
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
        for each in list(self._endpoint.up):
            sock = each.wire.sock
            if isinstance(sock, Reluctant) == is_calm:
                each.wire.sock = sock._sock if is_calm else cast(Any, Reluctant(sock, self._random.randrange(1 << 30)))


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


@pytest.mark.parametrize("n_rails", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_short_messages_survive_connections_that_break_at_any_moment(
    n_rails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three plans at once, over sockets that take and give parts of frames, and break; every shortcut is checked."""
    used = hold_to_the_table(monkeypatch)
    n_runs, n_resent, n_cuts = 30, 0, 0
    wanted = [[without_faults(*each, n_runs)[rank] for each in SHORT_PLANS] for rank in range(4)]
    for seed in range(2):

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


@pytest.mark.parametrize("seed", range(4))
def test_a_rail_may_fail_for_good(seed: int) -> None:
    plan, verdict = plan_of("ring", 60_001, "float32")

    class Seeded(Cutting):
        pass

    Seeded.seed, Seeded.for_good = seed, seed % 2
    results = run_tcp(4, lambda _, transport: reduce_and_calm_down(transport, plan, verdict, 3), kind=Seeded, **SMALL)
    assert results == without_faults("ring", 60_001, "float32", 3)
    assert Seeded.n_cuts == 4


@pytest.mark.battery(14)
@pytest.mark.parametrize(("name", "count", "n_runs"), [("ring", 200_003, 2), ("recursive-doubling", 256, 200)])
def test_chunks_that_come_twice_are_suppressed(
    name: str, count: int, n_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender's timer rings all the time: every chunk is on its way several times, over several rails."""
    monkeypatch.setattr(channel, "TIMEOUT_S", 1e-4)
    monkeypatch.setattr(outbound, "TIMEOUT_S", 1e-4)
    monkeypatch.setattr(outbound, "TIMEOUT_S_MAX", 1e-3)
    monkeypatch.setattr(outbound, "_TIMEOUT_LOOK_S", 0.0)
    monkeypatch.setattr(endpoint, "TICK_S", 1e-4)
    plan, verdict = plan_of(name, count, "float32")

    def body(_: int, transport: TcpTransport) -> tuple[list[bytes], int]:
        return reduce_over(transport, plan, verdict, n_runs), transport.counts.suppressed

    results = run_tcp(4, body, chunk_bytes=32768, window=16)
    assert [result for result, _ in results] == without_faults(name, count, "float32", n_runs)
    assert sum(suppressed for _, suppressed in results) > 0


@pytest.mark.battery(19, 20)
def test_a_damaged_chunk_or_header_costs_the_connection_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = data_header, [0]

    def damaged(session: int, epoch: int, channel: int, number: int, length: int, crc: int | None) -> bytes:
        calls[0] += 1
        if calls[0] % 50 == 25 and crc is not None:
            return real(session, epoch, channel, number, length, crc ^ 1)
        header = real(session, epoch, channel, number, length, crc)
        return header[:-1] + bytes([header[-1] ^ 4]) if calls[0] % 50 == 49 else header

    monkeypatch.setattr(connection, "data_header", damaged)
    plan, verdict = plan_of("ring", 60_001, "float32")

    def body(_: int, transport: TcpTransport) -> tuple[list[bytes], int]:
        return reduce_over(transport, plan, verdict, 3), transport.counts.damaged

    results = run_tcp(4, body, crc=True, **SMALL)
    assert [result for result, _ in results] == without_faults("ring", 60_001, "float32", 3)
    assert sum(n_damaged for _, n_damaged in results) > 0


def hold_to_the_table(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The rows of the table that the transport uses from now on; steps along links are held to them."""
    used: set[str] = set()
    asked = [0]

    def step(rows: Any, link: Any, state: Any, event: Any) -> Any:
        used.add(failover.find_row(rows, link, state, event).name)
        asked[0] += 1
        return failover.step(rows, link, state, event)

    def compare(link: Any, rows: Any, before: Any, event: failover.Event, after: Any, kinds: list[list[str]]) -> None:
        used.add(f"{failover.find_row(rows, link, before, event).name} at once")
        wanted, actions = failover.step(rows, link, before, event)
        assert after == wanted, (before, event)
        assert [action.kind for action in actions] in kinds, (before, event)

    def watch(kind: type, method: str, end_of: Callable[..., Any], is_taken: Callable[[Any, int], bool]) -> None:
        real = getattr(kind, method)

        def taken(direction: Any, *args: Any) -> Any:
            n_asked, (channel, event) = asked[0], end_of(direction, *args)
            is_sender = kind is outbound.Outbound
            before = channel and (channel.sender if is_sender else channel.receiver)
            result = real(direction, *args)
            if channel is not None and is_taken(result, asked[0] - n_asked):
                after = channel.sender if is_sender else channel.receiver
                freed = ["free"] * (after.acked - before.acked) if is_sender else []
                kinds = {
                    "offer": [["send"]] if is_sender else [[], ["deliver", "send"]],
                    "ack": [freed],
                    "data": [["keep"], ["keep", "deliver", "send"]],
                }
                rows = failover.SENDER_ROWS if is_sender else failover.RECEIVER_ROWS
                compare(direction._link, rows, before, event, after, kinds[event.kind])
            return result

        monkeypatch.setattr(kind, method, taken)

    watch(
        *(outbound.Outbound, "post_eager", lambda _, channel, view: (channel, failover.Event("offer"))),
        lambda result, _: result is not None,
    )
    watch(
        *(outbound.Outbound, "take_state"),
        lambda out, k, epoch, number, _: (out._channels.get(k), failover.Event("ack", 0, epoch, number)),
        lambda _, n_asked: not n_asked,
    )
    watch(
        *(inbound.Inbound, "post_eager", lambda _, channel, view: (channel, failover.Event("offer"))),
        lambda result, _: bool(result),
    )
    watch(
        *(inbound.Inbound, "take_eager"),
        lambda in_, connection, epoch, k, number, _: (
            in_._channels.get(k),
            failover.Event("data", connection.virtual, epoch, number),
        ),
        lambda result, _: bool(result),
    )
    monkeypatch.setattr(outbound, "step", step)
    monkeypatch.setattr(inbound, "step", step)
    return used


SHORTCUTS = {"offer at once", "new ack at once", "slot at once", "fresh chunk at once"}


@pytest.mark.battery(42)
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
