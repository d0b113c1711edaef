"""The simulated transport: what every transport promises, and AllReduces through failures, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

from optcc import failover
from optcc.compiler import compile_schedule
from optcc.errors import AllRailsFailed, InputError, OptccError, RankLost, TopologyError
from optcc.failover import DELIVER, KEEP, Action, Actions, Event, Link, Receiver, acknowledge
from optcc.faults import FaultPlan
from optcc.plan import Channel, Plan
from optcc.runtime.conformance import check_transport
from optcc.runtime.executor import Executor
from optcc.runtime.transport import RECEIVED, SENT
from optcc.runtime.transports.loopback import LoopbackTransport, run_ranks
from optcc.schedules.optcc import optcc
from optcc.schedules.ring import ring
from optcc.topology import Nic, Server, Topology
from optcc.verdict import PROVED, Verdict
from optcc.verify.plan import verify_plan
from tests.reference import table_transport as sim
from tests.reference.table_transport import (
    Counts,
    Model,
    Outage,
    PacketFaults,
    SimNetwork,
    SimTransport,
    decode,
    encode,
    run_sim,
)
from tests.sample import sampled

Floats = npt.NDArray[np.float32]
CHUNK_BYTES = 64
STORM = PacketFaults(drop=0.03, corrupt=0.03, duplicate=0.05, jitter_s=100e-6)


@cache
def plan_of(name: str) -> tuple[Plan, Verdict]:
    if name.startswith("ring"):
        n_ranks = int(name[5:] or 4)
        plan = compile_schedule(ring(n_ranks=n_ranks), size_bytes=n_ranks * 160)
    else:
        topology = Topology.parse("4@1GB/s,3=500MB/s")
        plan = compile_schedule(optcc.build(topology, 2), size_bytes=4 * 192, topology=topology)
    verdict = verify_plan(plan)
    assert verdict.verdict == PROVED
    return plan, verdict


def input_of(plan: Plan, rank: int, run: int) -> Floats:
    """Numbers whose sum depends on the order of adding, and whose every double or missing addition shows."""
    return np.random.default_rng((rank, run)).standard_normal(plan.size_bytes // 4).astype(np.float32)


def reduce_over(transport: SimTransport | LoopbackTransport, plan: Plan, verdict: Verdict, n_runs: int) -> list[bytes]:
    clock = transport.clock if isinstance(transport, SimTransport) else None
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
    network = SimNetwork(
        *(plan.n_ranks, n_rails),
        window=window,
        chunk_bytes=CHUNK_BYTES,
        seed=seed,
        faults=faults,
        outages=outages,
        replan=replan,
    )
    results = run_sim(network, lambda _, transport: reduce_over(transport, plan, verdict, n_runs))
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
    network = SimNetwork(n_ranks, 4, faults=faults, outages=outages, replan=replan, seed=7)
    names = run_sim(network, lambda _, transport: check_transport(lambda: transport, clock=transport.clock))
    assert len(names[0]) == 14


@pytest.mark.parametrize("name", ["ring", "optcc"])
def test_calm_rails_carry_each_chunk_once_and_one_ack_may_be_for_several(name: str) -> None:
    plan, _ = plan_of(name)
    counts = with_faults(name, ())
    transfers = plan.transfers
    n_chunks = sum(-(-int(size) // CHUNK_BYTES) for size in transfers.bytes)
    # The ranks meet before they agree on the plan: each sends a message of one chunk in each of two rounds.
    n_chunks += 2 * plan.n_ranks
    assert n_chunks < counts.sent <= 2 * n_chunks and counts.arrived == counts.sent
    assert (counts.lost, counts.corrupt, counts.suppressed) == (0, 0, 0)


@pytest.mark.parametrize(
    ("name", "replan"),
    [
        pytest.param("optcc", False, marks=pytest.mark.slow),
        ("ring", True),
        pytest.param("optcc", True, marks=pytest.mark.slow),
        pytest.param("ring", False, marks=pytest.mark.slow),
    ],
)
def test_a_rail_may_fail_at_every_packet(name: str, replan: bool) -> None:
    n_packets = with_faults(name, ()).arrived
    n_lost = 0
    for after in range(n_packets):
        rank = (None, 0, 1, 2, 3)[after % 5]
        n_lost += with_faults(name, [Outage(after % 2, after, rank)], replan=replan, seed=after).lost
    assert n_lost > 0


def campaign(n_instants: int, seed: int, replans: Sequence[bool] = (False, True)) -> Counts:
    """AllReduces through seeded failures until there have been `n_instants`: no bit may differ from a run without any.

    Each run has a first failure after another packet, so that they come everywhere, and up to seven more, of any rank
    or of a whole plane, which end again.
    """
    rng, total = random.Random(seed), Counts()
    while total.failures < n_instants:
        name = rng.choice(("ring 2", "ring 3", "ring", "optcc"))
        n_rails, window, replan = rng.choice((2, 2, 3)), rng.choice((1, 2, 3)), rng.choice(replans)
        n_packets = with_faults(name, (), n_rails=n_rails, window=window, seed=rng.getrandbits(32)).arrived
        ranks, n_more = (None, *range(plan_of(name)[0].n_ranks)), rng.choice((0, 1, 3, 7))
        for after in range(n_packets):
            outages = [Outage(rng.randrange(n_rails), after, rng.choice(ranks), rng.choice((None, 2e-4, 5e-3)))]
            for _ in range(n_more):
                rail, moment = rng.randrange(n_rails), rng.randrange(n_packets)
                outages.append(Outage(rail, moment, rng.choice(ranks), rng.choice((1e-4, 1e-3, 1e-2))))
            counts = with_faults(name, outages, n_rails=n_rails, window=window, replan=replan, seed=rng.getrandbits(32))
            for field in fields(Counts):
                setattr(total, field.name, getattr(total, field.name) + getattr(counts, field.name))
            if total.failures >= n_instants:
                break
    return total


@pytest.mark.slow
def test_rails_may_fail_at_hundreds_of_seeded_moments(seed: int) -> None:
    for replan in (False, True):
        total = campaign(200, seed, [replan])
        assert total.lost > 0 and total.suppressed > 0 and (total.changes > 0) == replan


@pytest.mark.slow
def test_rails_may_fail_at_ten_thousand_moments(seed: int) -> None:
    total = campaign(10_000, seed)
    print(total)
    assert total.failures >= 10_000
    assert total.lost > 0 and total.suppressed > 0 and total.changes > 0


@pytest.mark.battery(8, 15)
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


@pytest.mark.battery(4)
def test_two_rails_of_three_may_fail_for_good() -> None:
    for after in range(5, 60, 5):
        with_faults("ring", [Outage(0, after), Outage(2, after + 3)], n_rails=3, seed=after)


def test_the_same_seed_is_the_same_run() -> None:
    runs = [with_faults("optcc", [Outage(0, 20, for_s=0.003)], faults=STORM, seed=5) for _ in range(2)]
    assert runs[0] == runs[1]
    assert with_faults("optcc", [Outage(0, 20, for_s=0.003)], faults=STORM, seed=6) != runs[0]


@pytest.mark.battery(6)
def test_all_rails_down_is_a_named_error_and_the_input_is_intact() -> None:
    plan, verdict = plan_of("ring")
    inputs = [input_of(plan, rank, 0) for rank in range(plan.n_ranks)]
    network = SimNetwork(plan.n_ranks, 2, chunk_bytes=CHUNK_BYTES, outages=[Outage(0, 20), Outage(1, 25)])

    def body(rank: int, transport: SimTransport) -> None:
        executor = Executor(plan, rank, transport, verdict, clock=transport.clock)
        executor.all_reduce(inputs[rank], np.empty_like(inputs[rank]))

    with pytest.raises(AllRailsFailed, match=r"rank \d: channel \d->\d: no rail up for 5 s"):
        run_sim(network, body)
    assert network.now_s < 6
    assert all(np.array_equal(each, input_of(plan, rank, 0)) for rank, each in enumerate(inputs))


def test_all_rails_down_for_less_than_the_limit_is_only_a_delay() -> None:
    with_faults("ring", [Outage(0, 20), Outage(1, 25, for_s=4.0)])


def test_one_rail_alone_is_stalled_and_goes_on() -> None:
    with_faults("optcc", [Outage(0, 10, for_s=1.0), Outage(0, 60, rank=2, for_s=1.0)], n_rails=1)


def test_an_idle_channel_without_rails_is_no_error() -> None:
    network = SimNetwork(2, 1, outages=[Outage(0, 2)])

    def body(rank: int, transport: SimTransport) -> None:
        (handle,) = transport.open([Channel(0, 1, 1)])
        view = np.full(4, 7, np.uint8) if rank == 0 else np.zeros(4, np.uint8)
        (transport.post_send if rank == 0 else transport.post_recv)(handle, view)
        assert transport.poll(1.0) == [(SENT if rank == 0 else RECEIVED, handle)]
        assert view.tolist() == [7] * 4
        assert transport.poll(20.0) == []

    run_sim(network, body)


def test_a_rank_that_fails_ends_the_others() -> None:
    def body(rank: int, transport: SimTransport) -> None:
        if rank == 1:
            raise InputError("no more")
        with pytest.raises(RankLost, match="rank 1 is lost: InputError: no more"):
            transport.barrier()
        raise RankLost("seen")

    with pytest.raises(InputError, match="no more"):
        run_sim(SimNetwork(3), body)


@pytest.mark.battery(19)
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
        lambda: SimNetwork(0),
        lambda: SimNetwork(2, 0),
        lambda: SimNetwork(2, chunk_bytes=0),
        lambda: SimNetwork(2, outages=[Outage(2, 0)]),
        lambda: SimNetwork(2, outages=[Outage(0, 0, rank=2)]),
        lambda: Outage(0, -1),
        lambda: Outage(0, 0, for_s=0.0),
        lambda: PacketFaults(drop=1.0),
        lambda: PacketFaults(jitter_s=-1.0),
    ):
        with pytest.raises(OptccError):
            wrong()


@pytest.mark.battery(42)
def test_the_network_executes_the_table_that_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    def storm() -> None:
        for seed in range(20):
            with_faults("ring", (), faults=STORM, seed=seed)

    def again(link: Link, state: Receiver, event: Event) -> tuple[Receiver, Actions]:
        ack = acknowledge(link, state, event.rail)
        return state, (Action(KEEP, number=event.number), Action(DELIVER, number=event.number), *ack)

    rows = tuple(replace(row, effect=again) if row.name == "duplicate" else row for row in failover.RECEIVER_ROWS)
    storm()
    monkeypatch.setattr(sim, "RECEIVER_ROWS", rows)
    with pytest.raises((AssertionError, IndexError)):
        storm()


# --- with rates -------------------------------------------------------------------------------------------------------


def carry(network: SimNetwork, messages: Sequence[tuple[int, int, int]]) -> list[float]:
    """When each message (src, dst, bytes) has been received; all are sent at once."""
    channels = [Channel(src, dst, 1) for src, dst, _ in messages]

    def body(rank: int, transport: SimTransport) -> dict[int, float]:
        handles = transport.open(channels)
        done: dict[int, float] = {}
        waits: dict[tuple[int, int], int] = {}
        for number, ((src, dst, size), handle) in enumerate(zip(messages, handles, strict=True)):
            if rank == src:
                transport.post_send(handle, np.full(size, number, np.uint8))
                waits[SENT, handle] = number
            if rank == dst:
                transport.post_recv(handle, np.empty(size, np.uint8))
                waits[RECEIVED, handle] = number
        while waits:
            for kind, handle in transport.poll(100.0):
                number = waits.pop((kind, handle))
                if kind == RECEIVED:
                    done[number] = network.now_s
        return done

    seen = {number: at_s for done in run_sim(network, body) for number, at_s in done.items()}
    return [seen[number] for number in range(len(messages))]


def nics(*rates: int) -> tuple[Nic, ...]:
    return tuple(Nic(number, Fraction(rate), Fraction(rate)) for number, rate in enumerate(rates))


def servers(*each: tuple[Nic, ...], gpus: int = 1, fabric: int | None = None) -> Topology:
    inside = None if fabric is None else Fraction(fabric)
    return Topology(tuple(Server(f"h{index}", gpus, own, inside) for index, own in enumerate(each)))


MB = 10**6
WHOLE = 1 << 40


@pytest.mark.parametrize("model", ["fifo", "fair"])
@pytest.mark.parametrize("text", ["3@1GB/s", "3@1GB/s,1=300MB/s:2GB/s", "3x1@1GB/s"])
def test_a_network_with_rates_keeps_the_promises_of_a_transport(text: str, model: Model) -> None:
    topology = Topology.parse(text).with_latency(Fraction(1, 10**5))
    network = SimNetwork(3, topology, model=model, seed=1)
    names = run_sim(network, lambda _, transport: check_transport(lambda: transport, clock=transport.clock))
    assert len(names[0]) > 10


@pytest.mark.parametrize("model", ["fifo", "fair"])
def test_a_message_takes_its_bytes_over_the_slower_port_and_the_latencies(model: Model) -> None:
    # One latency until the sender knows of the slot, one for the message itself.
    topology = Topology.parse("2@2MB/s,1=1MB/s").with_latency(Fraction(1, 4))
    (seconds,) = carry(SimNetwork(2, topology, model=model, chunk_bytes=WHOLE), [(0, 1, MB)])
    assert seconds == pytest.approx(1.5)
    (seconds,) = carry(SimNetwork(2, topology, model=model, chunk_bytes=WHOLE, overhead_s=0.5), [(0, 1, MB)])
    assert seconds == pytest.approx(2.0)


def test_messages_to_one_port_come_one_after_the_other_or_share_it() -> None:
    topology, messages = Topology.parse("3@1MB/s"), [(0, 2, MB), (1, 2, MB)]
    assert carry(SimNetwork(3, topology, chunk_bytes=WHOLE), messages) == pytest.approx([1.0, 2.0])
    assert carry(SimNetwork(3, topology, model="fair", chunk_bytes=WHOLE), messages) == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize("model", ["fifo", "fair"])
def test_a_message_is_striped_over_unequal_nics(model: Model) -> None:
    topology = servers(nics(2 * MB, MB), nics(2 * MB, MB))
    (seconds,) = carry(SimNetwork(2, topology, model=model), [(0, 1, 6 * MB)])
    assert seconds == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("model", ["fifo", "fair"])
def test_servers_meet_on_the_rails_that_both_have(model: Model) -> None:
    one, two = nics(MB, MB, MB)[1:], nics(MB, MB, MB)[:2]
    assert carry(SimNetwork(2, servers(one, two), model=model), [(0, 1, 2 * MB)]) == pytest.approx([2.0])
    apart = servers(nics(MB, MB)[:1], nics(MB, MB)[1:])
    assert carry(SimNetwork(2, apart, model=model), [(0, 1, MB)]) == pytest.approx([1.0])
    with pytest.raises(TopologyError, match="ranks 0 and 1: their servers share no rail"):
        carry(SimNetwork(2, replace(apart, rail_only=True), model=model), [(0, 1, MB)])


@pytest.mark.parametrize("model", ["fifo", "fair"])
def test_inside_a_server_a_message_takes_the_fabric_if_that_has_a_rate(model: Model) -> None:
    messages = [(0, 1, 4 * MB), (0, 2, MB)]
    slow = servers(nics(MB), nics(MB), gpus=2, fabric=2 * MB)
    assert carry(SimNetwork(4, slow, model=model), messages) == pytest.approx([2.0, 1.0])
    fast = servers(nics(MB), nics(MB), gpus=2)
    assert carry(SimNetwork(4, fast, model=model), messages) == pytest.approx([0.0, 1.0])


@pytest.mark.parametrize("model", ["fifo", "fair"])
@pytest.mark.parametrize(
    ("faults", "seconds"),
    [
        ("0/0@1s=1/2", 7.0),
        ("1/0@1s=1/2:in", 7.0),
        ("1/0@1s=1/2:out", 4.0),
        ("0/0@1s..2s=1/4", 4.75),
        ("0/0@1s..2s", 5.0),
        ("0/0@1s..3s, 0/0@2s..4s=1/2", 6.5),
    ],
)
def test_a_rate_that_changes_in_the_middle_of_a_message_is_piecewise(faults: str, seconds: float, model: Model) -> None:
    # Four megabytes at one a second; that a NIC stands still is learned too late to matter.
    network = SimNetwork(
        *(2, Topology.parse("2@1MB/s")),
        model=model,
        chunk_bytes=WHOLE,
        nic_faults=FaultPlan.parse(faults),
        detection_s=1e6,
    )
    assert carry(network, [(0, 1, 4 * MB)]) == pytest.approx([seconds])


@pytest.mark.parametrize("model", ["fifo", "fair"])
def test_what_a_dead_nic_had_goes_out_over_the_others_once_its_loss_is_known(model: Model) -> None:
    def seconds(n_nics: int, detection_s: float) -> float:
        topology = servers(nics(*[MB] * n_nics), nics(*[MB] * n_nics))
        network = SimNetwork(
            *(2, topology),
            model=model,
            window=1000,
            chunk_bytes=10_000,
            nic_faults=FaultPlan.parse("0/1@1s"),
            detection_s=detection_s,
        )
        return carry(network, [(0, 1, 2 * n_nics * MB)])[0]

    for n_nics in (2, 3, 4):
        assert seconds(n_nics, 0.0) == pytest.approx(1 + n_nics / (n_nics - 1), rel=0.02)
    late = [seconds(2, detection_s) for detection_s in (0.0, 1.0, 4.0)]
    assert late[0] <= late[1] <= late[2] <= 1 + 4.0 + 1 + 0.1


@pytest.mark.parametrize(("model", "seed"), sampled(product(("fifo", "fair"), range(4)), every=3))
def test_storms_on_nics_with_rates_change_no_bit(seed: int, model: Model) -> None:
    plan, verdict = plan_of("optcc")
    topology = servers(*[nics(MB, MB // 2)] * 4)
    faults = FaultPlan.sampled(topology, seed, failures_per_s=300.0, repair_s=1e-3, horizon_s=0.1)
    network = SimNetwork(
        *(4, topology),
        model=model,
        window=4,
        chunk_bytes=CHUNK_BYTES,
        faults=STORM,
        nic_faults=faults,
        outages=[Outage(0, 30 + seed, for_s=2e-3), Outage(1, 90, rank=2)],
        detection_s=3e-4,
        replan=seed % 2 == 0,
        seed=seed,
    )
    results = run_sim(network, lambda _, transport: reduce_over(transport, plan, verdict, 2))
    assert results == without_faults("optcc", 2)
    assert network.counts.failures > 2 and network.counts.lost > 0


def test_simulated_faults_need_no_rates() -> None:
    plan, verdict = plan_of("ring")
    network = SimNetwork(4, 2, chunk_bytes=CHUNK_BYTES, nic_faults=FaultPlan.parse("1/0@20us..2ms, 2/1@50us"))
    assert run_sim(network, lambda _, transport: reduce_over(transport, plan, verdict, 1)) == without_faults("ring")
    assert network.counts.failures == 4


def test_the_last_nic_lost_for_good_is_a_named_error() -> None:
    network = SimNetwork(2, Topology.parse("2@1MB/s"), nic_faults=FaultPlan.parse("1/0@1s"))
    with pytest.raises(AllRailsFailed, match="no rail up for 5 s"):
        carry(network, [(0, 1, 4 * MB)])


def test_wrong_networks_are_rejected_with_what_is_wrong() -> None:
    pair = Topology.parse("2@1MB/s")
    cases: tuple[tuple[Callable[[], object], type[OptccError], str], ...] = (
        (lambda: SimNetwork(3, pair), InputError, "topology of 2 ranks: must have 3"),
        (lambda: SimNetwork(2, pair, model="lifo"), InputError, "model 'lifo': must be one of fifo, fair"),  # type: ignore[arg-type]
        (lambda: SimNetwork(2, pair, overhead_s=-1.0), InputError, "overhead -1.0 s: must not be negative"),
        (lambda: SimNetwork(2, pair, detection_s=float("nan")), InputError, "detection nan s"),
        (lambda: SimNetwork(2, pair, nic_faults=FaultPlan.parse("2/0@1s")), TopologyError, "server 2 must be below 2"),
        (lambda: SimNetwork(2, pair, outages=[Outage(1, 0)]), InputError, "must be of a NIC that a rank has"),
        (lambda: SimNetwork(2, 2, nic_faults=FaultPlan.parse("0/0@1s=1/2")), InputError, "rails without rates"),
        (lambda: SimNetwork(2, 2, nic_faults=FaultPlan.parse("0/2@1s")), TopologyError, "must be one of 2 rails"),
    )
    for make, error, message in cases:
        with pytest.raises(error, match=message):
            make()


def test_an_outage_of_a_degraded_nic_leaves_it_degraded() -> None:
    faults, outage = FaultPlan.parse("0/0@1s=1/2"), Outage(0, after_packets=1, rank=0, for_s=2.0)
    network = SimNetwork(
        2, Topology.parse("2@1MB/s"), chunk_bytes=2 * MB, nic_faults=faults, outages=[outage], detection_s=1e6
    )
    # Two chunks of two megabytes: 1 s and 2 s for the first, then 2 s of outage, then 4 s for the second.
    assert carry(network, [(0, 1, 4 * MB)]) == pytest.approx([9.0])
