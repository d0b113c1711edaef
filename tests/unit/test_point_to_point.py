"""Send, Recv and split: messages between two ranks, and communicators of some of them, on every transport."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optcc.errors import DeadlineExceeded, InputError, MismatchError, RankLost, RuntimeFault
from optcc.plan import Channel
from optcc.planner import Planner
from optcc.runtime.communicator import Communicator
from optcc.runtime.transport import RESERVED, ChannelNumbers, Transport
from optcc.runtime.transports.loopback import run_ranks
from optcc.runtime.transports.sim import SimNetwork, run_sim
from optcc.topology import Topology
from tests.unit.test_communicator import run_tcp

FOUR = Topology.parse("4@1GB/s")


def exchanges(comm: Communicator) -> None:
    """Messages of many lengths round a ring, two tags crossed, to oneself, and again and again."""
    n, me = comm.n_ranks, comm.rank
    right, left = (me + 1) % n, (me - 1) % n
    for count in (0, 1, 1000, 300_000):
        out = np.zeros(count, dtype=np.float32)
        sent = comm.start_send(np.full(count, me, dtype=np.float32), right)
        assert comm.recv(out, left) is out
        assert sent.wait() and (out == left).all()
    # The second tag is received first.
    first, second = np.zeros(5), np.zeros(7)
    handles = [comm.start_send(np.full(5, 1.0 + me), right, 1), comm.start_send(np.full(7, 2.0 + me), right, 2)]
    assert (comm.recv(second, left, 2) == 2.0 + left).all()
    assert (comm.recv(first, left, 1) == 1.0 + left).all()
    assert all(each.wait() for each in handles)
    own = np.zeros(3)
    waiting = comm.start_recv(own, me, 9)
    comm.send(np.arange(3.0), me, 9)
    assert waiting.result().tolist() == [0.0, 1.0, 2.0]
    value, got = np.zeros(4), np.zeros(4)
    send, receive = comm.send_init(value, right), comm.recv_init(got, left)
    for turn in range(5):
        value[:] = 10 * turn + me
        begun = send.start()
        assert (receive.start().result() == 10 * turn + left).all()
        begun.wait()
    # Between collectives, which they do not disturb.
    handle = comm.start_all_reduce(np.ones(50_000))
    comm.start_send(np.array([me]), right).wait(0.0)
    assert comm.recv(np.zeros(1, dtype=np.int64), left)[0] == left
    assert (handle.result() == n).all()
    comm.barrier()


def halves(comm: Communicator) -> None:
    """Even and odd ranks, in reverse order; pairs across them; collectives of both and of all under way at once."""
    n, me = comm.n_ranks, comm.rank
    parity = comm.split(me % 2, -me)
    pairs = comm.split(me // 2)
    assert parity is not None and pairs is not None
    assert comm.split(None) is None
    evens = [rank for rank in reversed(range(n)) if rank % 2 == me % 2]
    assert (parity.n_ranks, parity.rank) == (len(evens), evens.index(me))
    mine = np.full(2000, float(me))
    handles = [comm.start_all_reduce(mine), parity.start_all_reduce(mine), pairs.start_all_reduce(mine)]
    answers = [handle.result()[0] for handle in reversed(handles)]
    assert answers == [me // 2 * 4 + 1, sum(evens), n * (n - 1) / 2]
    assert parity.all_gather(np.array([me])).ravel().tolist() == evens
    moved = parity.all_to_all(np.array([100 * me + other for other in evens]))
    assert moved.tolist() == [100 * other + me for other in evens]
    partner = 1 - pairs.rank
    handle = pairs.start_send(np.array([me]), partner)
    assert pairs.recv(np.zeros(1, dtype=np.int64), partner)[0] == me // 2 * 2 + partner
    handle.wait()
    with parity:
        step = parity.all_reduce_init(mine, "max")
        for _ in range(3):
            assert (step.start().result() == max(evens)).all()
        nested = parity.split(0, -parity.rank)
        assert nested is not None
        assert nested.broadcast(np.array([me]), 0)[0] == evens[-1]
    assert (comm.all_reduce(mine) == n * (n - 1) / 2).all()
    comm.barrier()


def from_anyone(comm: Communicator) -> None:
    """Every rank sends to rank 0, which asks for two of each tag before they come, and for the others after."""
    n, me = comm.n_ranks, comm.rank
    tags = (3, 5)
    outs = {(tag, k): np.zeros(2) for tag in tags for k in range(n)}
    if me == 0:
        begun = {key: comm.start_recv_any(outs[key], key[0]) for key in outs if key[1] < 2}
        assert {each.source for each in begun.values()} == {-1}
    comm.barrier()
    sent = [comm.start_send(np.array([me, tag], dtype=np.float64), 0, tag) for tag in tags]
    if me == 0:
        for key, each in begun.items():
            each.handle.wait()
            assert outs[key].tolist() == [each.source, key[0]]
        begun |= {key: comm.start_recv_any(outs[key], key[0]) for key in outs if key[1] >= 2}
        for each in begun.values():
            each.handle.wait()
        for tag in tags:
            assert sorted(begun[tag, k].source for k in range(n)) == list(range(n))
            assert all(outs[tag, k].tolist() == [begun[tag, k].source, tag] for k in range(n))
    for handle in sent:
        handle.wait()
    last = np.zeros(1)
    handle = comm.start_send(np.array([float(me)]), (me + 1) % n, 7)
    assert comm.recv(last, (me - 1) % n, 7)[0] == (me - 1) % n
    handle.wait()
    comm.barrier()


def blocks(comm: Communicator) -> None:
    """Blocks of other lengths in each round, some of them empty; only the two ranks of a block know its length."""
    n, me = comm.n_ranks, comm.rank
    for turn in range(4):
        sent = [np.full((me + 3 * dst + turn) % 5 * 1000, 10 * me + dst, dtype=np.int32) for dst in range(n)]
        out = [np.zeros((src + 3 * me + turn) % 5 * 1000, dtype=np.int32) for src in range(n)]
        for handle in comm.start_exchange(sent, out):
            handle.wait()
        for src, block in enumerate(out):
            assert (block == 10 * src + me).all()
    with pytest.raises(InputError, match=f"1 blocks, {n} in out: must be {n} of each"):
        comm.start_exchange(sent[:1], out)
    comm.barrier()


@pytest.mark.parametrize("body", [exchanges, halves, from_anyone, blocks])
class TestEverywhere:
    def test_on_loopback(self, body: Callable[[Communicator], None]) -> None:
        run_ranks(
            4, lambda _, transport: body(Communicator(transport, Planner(FOUR), deadline_s=20.0)), deadline_s=60.0
        )

    def test_on_shaped_ports(self, body: Callable[[Communicator], None]) -> None:
        topology = Topology.parse("4@400MB/s,1=200MB/s")
        run_ranks(4, lambda _, transport: body(Communicator(transport, Planner(topology))), topology=topology)

    def test_in_simulated_time(self, body: Callable[[Communicator], None]) -> None:
        network = SimNetwork(4, seed=3)
        run_sim(network, lambda _, t: body(Communicator(t, Planner(FOUR), clock=t.clock)))

    def test_over_tcp(self, body: Callable[[Communicator], None], tmp_path: Path) -> None:
        run_tcp(4, lambda transport: body(Communicator(transport, Planner(FOUR, ports="fair"))), tmp_path)


def test_what_cannot_be_is_refused() -> None:
    def body(comm: Communicator) -> None:
        array = np.zeros(4)
        fixed = np.zeros(4)
        fixed.flags.writeable = False
        calls: list[tuple[Callable[[], Any], str]] = [
            (lambda: comm.send(3.0, 0), "array: float: must be an array"),
            (lambda: comm.send([3.0], 0), "array: list: must be an array"),
            (lambda: comm.send(array[::2], 0), "array: must be contiguous"),
            (lambda: comm.send(array, 2), "dest 2: must be a rank below 2"),
            (lambda: comm.recv(array, -1), "source -1: must be a rank below 2"),
            (lambda: comm.recv(fixed, 0), "out: must be contiguous .* and writable"),
            (lambda: comm.send(array, 0, -1), "tag -1: must be from 0"),
            (lambda: comm.split(-2), "color -2: must be from 0"),
        ]
        for call, message in calls:
            with pytest.raises(InputError, match=message):
                call()

    run_ranks(2, lambda _, transport: body(Communicator(transport, Planner(Topology.parse("2@1GB/s")))))


def test_a_planner_that_cannot_divide_is_named() -> None:
    def body(transport: Transport) -> None:
        planner = Planner(Topology.parse("1@1GB/s"))
        comm = Communicator(transport, lambda *request: planner(*request))
        with pytest.raises(InputError, match="split: function: must have for_ranks"):
            comm.split(0)

    run_ranks(1, lambda _, transport: body(transport))


def test_a_message_of_another_length_ends_all_runs() -> None:
    def body(comm: Communicator) -> str:
        with pytest.raises((MismatchError, RuntimeFault)) as caught:  # noqa: PT012 - either may end it
            if comm.rank == 0:
                comm.send(np.zeros(3), 1)
                comm.recv(np.zeros(1), 1)
            else:
                comm.recv(np.zeros(2), 0)
        return f"{type(caught.value).__name__}: {caught.value}"

    planner = Planner(Topology.parse("2@1GB/s"))
    first, second = run_ranks(2, lambda _, transport: body(Communicator(transport, planner)))
    assert second == "MismatchError: message with tag 0 from rank 0: 24 B: must be the 16 B that are received"
    assert first.startswith("RankLost: rank 1 is lost")


def test_a_message_that_never_comes_is_a_deadline_that_says_from_whom() -> None:
    def body(comm: Communicator) -> str:
        with pytest.raises((DeadlineExceeded, RankLost)) as caught:
            comm.recv(np.zeros(2), 1 - comm.rank)
        return str(caught.value)

    planner = Planner(Topology.parse("2@1GB/s"))
    told = run_ranks(2, lambda rank, t: body(Communicator(t, planner, deadline_s=0.3 if rank else 20.0)))
    assert "rank 1 waits for a message from rank 0" in told[1]


def test_two_ranks_may_send_before_the_first_collective_of_all() -> None:
    """The two met the others before they agreed on the plan, who did not: a deadlock."""

    def body(comm: Communicator) -> float:
        if comm.rank == 0:
            comm.start_send(np.ones(1), 1)
        elif comm.rank == 1:
            comm.recv(np.zeros(1), 0)
        return float(comm.all_reduce(np.ones(4))[0])

    planner = Planner(Topology.parse("3@1GB/s"))
    assert run_ranks(3, lambda _, t: body(Communicator(t, planner, deadline_s=20.0)), deadline_s=60.0) == [3.0] * 3


def test_a_group_below_zero_has_one_channel_from_a_rank_to_a_rank() -> None:
    """The flows of a measurement once shared such a group, and so one channel."""
    numbers = ChannelNumbers()
    assert numbers.take([Channel(0, 1, 1), Channel(1, 0, 1)], group=-1) == [(0, 1, RESERVED), (1, 0, RESERVED)]
    with pytest.raises(InputError, match="channel 0->1: group -1: must be opened once"):
        numbers.take([Channel(0, 1, 1), Channel(0, 1, 1)], group=-1)
