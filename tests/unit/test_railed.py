"""The railed transport: what every transport promises, and AllReduces through failures, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from optcc import failover
from optcc.compiler import compile_schedule
from optcc.errors import AllRailsFailed, InputError, OptccError, RankLost
from optcc.failover import DELIVER, KEEP, Action, Actions, Event, Link, Receiver, acknowledge
from optcc.plan import Channel, Plan
from optcc.runtime.conformance import check_transport
from optcc.runtime.engine import Executor
from optcc.runtime.transport import RECEIVED, SENT
from optcc.runtime.transports import railed
from optcc.runtime.transports.loopback import LoopbackTransport, run_ranks
from optcc.runtime.transports.railed import (
    Counts,
    Outage,
    PacketFaults,
    RailedNetwork,
    RailedTransport,
    decode,
    encode,
    run_railed,
)
from optcc.schedules.optcc import optcc
from optcc.schedules.ring import ring
from optcc.topology import Topology
from optcc.verdict import PROVED, Verdict
from optcc.verify.plan import verify_plan

Floats = npt.NDArray[np.float32]
CHUNK_BYTES = 64
STORM = PacketFaults(drop=0.03, corrupt=0.03, duplicate=0.05, jitter_s=100e-6)


@cache
def plan_of(name: str) -> tuple[Plan, Verdict]:
    if name == "ring":
        plan = compile_schedule(ring(n_ranks=4), size_bytes=4 * 160)
    else:
        topology = Topology.parse("4@1GB/s,3=500MB/s")
        plan = compile_schedule(optcc.build(topology, 2), size_bytes=4 * 192, topology=topology)
    verdict = verify_plan(plan)
    assert verdict.verdict == PROVED
    return plan, verdict


def input_of(plan: Plan, rank: int, run: int) -> Floats:
    """Numbers whose sum depends on the order of adding, and whose every double or missing addition shows."""
    return np.random.default_rng((rank, run)).standard_normal(plan.size_bytes // 4).astype(np.float32)


def reduce_over(
    transport: RailedTransport | LoopbackTransport, plan: Plan, verdict: Verdict, n_runs: int
) -> list[bytes]:
    clock = transport.clock if isinstance(transport, RailedTransport) else None
    executor = Executor(plan, transport.rank, transport, verdict, clock=clock)
    results: list[bytes] = []
    for run in range(n_runs):
        recv = np.empty(plan.size_bytes // 4, np.float32)
        executor.all_reduce(input_of(plan, transport.rank, run), recv)
        results.append(recv.tobytes())
    return results


@cache
def without_faults(name: str, n_runs: int = 1) -> list[list[bytes]]:
    plan, verdict = plan_of(name)
    return run_ranks(plan.n_ranks, lambda _, transport: reduce_over(transport, plan, verdict, n_runs))


def with_faults(
    name: str,
    outages: Sequence[Outage],
    *,
    n_runs: int = 1,
    n_rails: int = 2,
    faults: PacketFaults | None = None,
    replan: bool = False,
    window: int = 2,
    seed: int = 0,
) -> Counts:
    """Runs the plan, and asserts that the result is that of a run without faults."""
    plan, verdict = plan_of(name)
    network = RailedNetwork(
        *(plan.n_ranks, n_rails),
        window=window,
        chunk_bytes=CHUNK_BYTES,
        seed=seed,
        faults=faults,
        outages=outages,
        replan=replan,
    )
    results = run_railed(network, lambda _, transport: reduce_over(transport, plan, verdict, n_runs))
    assert results == without_faults(name, n_runs), (name, outages, seed)
    return network.counts


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("faults", "outages", "replan"),
    [
        (None, (), False),
        (STORM, (), False),
        (None, (Outage(0, 60), Outage(1, 300, for_s=0.01), Outage(2, 400, rank=0)), False),
        (STORM, (Outage(0, 60, for_s=0.02), Outage(0, 400)), True),
    ],
    ids=["calm", "storm", "outages", "storm and outages"],
)
def test_keeps_the_promises_of_a_transport(
    n_ranks: int, faults: PacketFaults | None, outages: Sequence[Outage], replan: bool
) -> None:
    outages = [outage for outage in outages if (outage.rank or 0) < n_ranks]
    network = RailedNetwork(n_ranks, 4, faults=faults, outages=outages, replan=replan, seed=7)
    names = run_railed(network, lambda _, transport: check_transport(lambda: transport, clock=transport.clock))
    assert len(names[0]) == 11


@pytest.mark.parametrize("name", ["ring", "optcc"])
def test_calm_rails_carry_each_chunk_once_and_one_ack_may_be_for_several(name: str) -> None:
    plan, _ = plan_of(name)
    counts = with_faults(name, ())
    transfers = plan.transfers
    n_chunks = sum(-(-int(size) // CHUNK_BYTES) for size in transfers.bytes)
    assert n_chunks < counts.sent <= 2 * n_chunks and counts.arrived == counts.sent
    assert (counts.lost, counts.corrupt, counts.suppressed) == (0, 0, 0)


@pytest.mark.parametrize("name", ["ring", "optcc"])
@pytest.mark.parametrize("replan", [False, True], ids=["same plan", "replan"])
def test_a_rail_may_fail_at_every_packet(name: str, replan: bool) -> None:
    n_packets = with_faults(name, ()).arrived
    n_lost = 0
    for after in range(n_packets):
        rank = (None, 0, 1, 2, 3)[after % 5]
        n_lost += with_faults(name, [Outage(after % 2, after, rank)], replan=replan, seed=after).lost
    assert n_lost > 0


@pytest.mark.slow
def test_a_rail_may_fail_at_ten_thousand_moments() -> None:
    n_moments, seed, total = 0, 0, Counts()
    while n_moments < 10_000:
        seed += 1
        for name in ("ring", "optcc"):
            n_packets = with_faults(name, (), window=1 + seed % 3, seed=seed).arrived
            for after in range(n_packets):
                rail, rank = (seed + after) % 2, (None, 0, 1, 2, 3)[(seed + after) % 5]
                for_s = (None, 200e-6, 5e-3)[seed % 3]
                counts = with_faults(
                    *(name, [Outage(rail, after, rank, for_s)]), replan=seed % 2 == 0, window=1 + seed % 3, seed=seed
                )
                n_moments += 1
                total.lost += counts.lost
                total.suppressed += counts.suppressed
                total.changes += counts.changes
    print(n_moments, total)
    assert total.lost > 0 and total.suppressed > 0 and total.changes > 0


@pytest.mark.parametrize("seed", range(20))
def test_storms_and_flapping_rails_change_no_bit(seed: int) -> None:
    outages = [Outage(number % 3, 12 * number + seed, (None, 0, 1, 2, 3)[number % 5], 0.004) for number in range(8)]
    counts = with_faults(
        *(("ring", "optcc")[seed % 2], outages),
        n_rails=3,
        n_runs=2,
        seed=seed,
        faults=STORM,
        replan=seed % 4 < 2,
        window=1 + seed % 4,
    )
    assert counts.lost and counts.suppressed


def test_two_rails_of_three_may_fail_for_good() -> None:
    for after in range(5, 60, 5):
        with_faults("ring", [Outage(0, after), Outage(2, after + 3)], n_rails=3, seed=after)


def test_the_same_seed_is_the_same_run() -> None:
    runs = [with_faults("optcc", [Outage(0, 20, for_s=0.003)], faults=STORM, seed=5) for _ in range(2)]
    assert runs[0] == runs[1]
    assert with_faults("optcc", [Outage(0, 20, for_s=0.003)], faults=STORM, seed=6) != runs[0]


def test_all_rails_down_is_a_named_error_and_the_input_is_intact() -> None:
    plan, verdict = plan_of("ring")
    inputs = [input_of(plan, rank, 0) for rank in range(plan.n_ranks)]
    network = RailedNetwork(plan.n_ranks, 2, chunk_bytes=CHUNK_BYTES, outages=[Outage(0, 20), Outage(1, 25)])

    def body(rank: int, transport: RailedTransport) -> None:
        executor = Executor(plan, rank, transport, verdict, clock=transport.clock)
        executor.all_reduce(inputs[rank], np.empty_like(inputs[rank]))

    with pytest.raises(AllRailsFailed, match=r"rank \d: channel \d->\d: no rail up for 5 s"):
        run_railed(network, body)
    assert network.now_s < 6
    assert all(np.array_equal(each, input_of(plan, rank, 0)) for rank, each in enumerate(inputs))


def test_all_rails_down_for_less_than_the_limit_is_only_a_delay() -> None:
    with_faults("ring", [Outage(0, 20), Outage(1, 25, for_s=4.0)])


def test_one_rail_alone_is_stalled_and_goes_on() -> None:
    with_faults("optcc", [Outage(0, 10, for_s=1.0), Outage(0, 60, rank=2, for_s=1.0)], n_rails=1)


def test_an_idle_channel_without_rails_is_no_error() -> None:
    network = RailedNetwork(2, 1, outages=[Outage(0, 2)])

    def body(rank: int, transport: RailedTransport) -> None:
        (handle,) = transport.open([Channel(0, 1, 1)])
        view = np.full(4, 7, np.uint8) if rank == 0 else np.zeros(4, np.uint8)
        (transport.post_send if rank == 0 else transport.post_recv)(handle, view)
        assert transport.poll(1.0) == [(SENT if rank == 0 else RECEIVED, handle)]
        assert view.tolist() == [7] * 4
        assert transport.poll(20.0) == []

    run_railed(network, body)


def test_a_rank_that_fails_ends_the_others() -> None:
    def body(rank: int, transport: RailedTransport) -> None:
        if rank == 1:
            raise InputError("no more")
        with pytest.raises(RankLost, match="rank 1 is lost: InputError: no more"):
            transport.barrier()
        raise RankLost("seen")

    with pytest.raises(InputError, match="no more"):
        run_railed(RailedNetwork(3), body)


def test_a_damaged_packet_is_no_packet() -> None:
    packet = encode("data", 3, 1, 2**40, b"chunk")
    assert decode(packet) == ("data", 3, 1, 2**40, b"chunk")
    for bit in range(8 * len(packet)):
        damaged = bytearray(packet)
        damaged[bit // 8] ^= 1 << bit % 8
        assert decode(bytes(damaged)) is None
    for length in range(len(packet)):
        assert decode(packet[:length]) is None
    assert decode(packet + b"x") is None


def test_wrong_numbers_are_rejected() -> None:
    for wrong in (
        lambda: RailedNetwork(0),
        lambda: RailedNetwork(2, 0),
        lambda: RailedNetwork(2, chunk_bytes=0),
        lambda: RailedNetwork(2, outages=[Outage(2, 0)]),
        lambda: RailedNetwork(2, outages=[Outage(0, 0, rank=2)]),
        lambda: Outage(0, -1),
        lambda: Outage(0, 0, for_s=0.0),
        lambda: PacketFaults(drop=1.0),
        lambda: PacketFaults(jitter_s=-1.0),
    ):
        with pytest.raises(OptccError):
            wrong()


def test_the_network_executes_the_table_that_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    def storm() -> None:
        for seed in range(20):
            with_faults("ring", (), faults=STORM, seed=seed)

    def again(link: Link, state: Receiver, event: Event) -> tuple[Receiver, Actions]:
        ack = acknowledge(link, state, event.rail)
        return state, (Action(KEEP, number=event.number), Action(DELIVER, number=event.number), *ack)

    rows = tuple(replace(row, effect=again) if row.name == "duplicate" else row for row in failover.RECEIVER_ROWS)
    storm()
    monkeypatch.setattr(railed, "RECEIVER_ROWS", rows)
    with pytest.raises((AssertionError, IndexError)):
        storm()
