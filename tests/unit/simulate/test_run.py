"""Closed forms, theorems and refusals of the simulator; `tests/differential` holds it to another one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optcc.arrays import Lists, column
from optcc.collective import Collective
from optcc.compiled import Tier
from optcc.errors import InputError, PlanError, TopologyError
from optcc.plan import RECV, RECV_REDUCE_SEND, SEND, Channel, Plan
from optcc.simulate import (
    DONE_DONE,
    DONE_START,
    MODELS,
    SENT_START,
    Model,
    plan_constraints,
    simulate,
    transfer_constraints,
)
from optcc.simulate.kernels import kernels
from optcc.topology import Nic, Server, Topology
from optcc.transfers import Transfers

both = pytest.mark.parametrize("model", MODELS)


def transfers_of(
    n_ranks: int,
    rows: Sequence[tuple[int, int, int]],
    after: dict[int, list[int]] | None = None,
    order: dict[int, list[int]] | None = None,
) -> Transfers:
    """Rows are (src, dst, bytes)."""
    n = len(rows)
    zero = column([0] * n)
    return Transfers(
        *(Collective("allreduce", n_ranks), "sum", "float32", 2**40, 0, ("all",)),
        *(column(src for src, _, _ in rows), column(dst for _, dst, _ in rows)),
        *(zero, zero, zero),
        column(size for _, _, size in rows),
        *(zero, zero, zero),
        Lists.of([(after or {}).get(t, []) for t in range(n)]),
        Lists.of([(order or {}).get(t, []) for t in range(n)]),
    )


def ring(p: int, chunk_bytes: int) -> Transfers:
    """Ring AllReduce of p chunks in one segment; transfer p * step + src."""
    rows = [(src, (src + 1) % p, chunk_bytes) for _ in range(2 * (p - 1)) for src in range(p)]
    return transfers_of(p, rows, {t: [t - p - 1 if t % p else t - 1] for t in range(p, len(rows))})


def ring_plan(p: int, chunk_bytes: int, *, slots: int = 1, fused: bool = False) -> Plan:
    """The same in one lane that sends and one that receives, or in one lane of fused instructions."""
    steps = 2 * (p - 1)
    rows: list[tuple[int, int, int]] = []  # kind, received and sent transfer
    lengths: list[int] = []
    after: list[list[int]] = []
    for rank in range(p):
        received = [p * step + (rank - 1) % p for step in range(steps)]
        sent = [p * step + rank for step in range(steps)]
        base = len(rows)
        if fused:
            rows += [(SEND, -1, sent[0]), (RECV, received[-1], -1)]
            rows[base + 1 : base + 1] = [
                (RECV_REDUCE_SEND, take, give) for take, give in zip(received[:-1], sent[1:], strict=True)
            ]
            lengths += [steps + 1]
            after += [[]] * (steps + 1)
        else:
            rows += [(SEND, -1, give) for give in sent] + [(RECV, take, -1) for take in received]
            lengths += [steps, steps]
            after += [[base + steps + step - 1] if step else [] for step in range(steps)] + [[]] * steps
    starts = np.cumsum([0, *lengths]).tolist()
    kind = [row[0] for row in rows]
    rank_of = [rank for rank in range(p) for _ in range(len(rows) // p)]
    return Plan(
        *("ring", ring(p, chunk_bytes), tuple(Channel(rank, (rank + 1) % p, slots) for rank in range(p))),
        column(rank for rank in range(p) for _ in range(1 if fused else 2)),
        Lists.of([list(range(first, stop)) for first, stop in pairwise(starts)]),
        column(kind),
        column((rank - 1) % p if each != SEND else -1 for rank, each in zip(rank_of, kind, strict=True)),
        column(rank if each != RECV else -1 for rank, each in zip(rank_of, kind, strict=True)),
        column(0 if each == SEND else -1 for each in kind),
        column(0 if each != SEND else -1 for each in kind),
        column([chunk_bytes] * len(rows)),
        column(row[1] for row in rows),
        column(row[2] for row in rows),
        Lists.of(after),
    )


def seconds(plan: Plan | Transfers, topology: str, model: Model, latency_s: str = "0") -> float:
    return simulate(plan, Topology.parse(topology).with_latency(Fraction(latency_s)), model=model).seconds


@both
@pytest.mark.parametrize("p", range(4, 17))
def test_a_healthy_ring_takes_its_closed_form(p: int, model: Model) -> None:
    assert seconds(ring(p, 1000), f"{p}@1GB/s", model) == pytest.approx(2 * (p - 1) * 1000 / 1e9, rel=1e-9)


@both
@pytest.mark.parametrize("p", range(4, 17))
def test_a_ring_pays_the_latency_at_every_step(p: int, model: Model) -> None:
    wanted = 2 * (p - 1) * (5e-6 + 1000 / 1e9)
    assert seconds(ring(p, 1000), f"{p}@1GB/s", model, "5e-6") == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("p", range(4, 17))
def test_one_server_at_half_rate_halves_the_ring(p: int) -> None:
    wanted = 2 * 2 * (p - 1) * 1000 / 1e9
    assert seconds(ring(p, 1000), f"{p}@1GB/s,2=500MB/s", "fifo") == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("p", [4, 5, 8])
def test_a_ring_plan_takes_what_its_transfers_take(p: int, fused: bool) -> None:
    for topology in (f"{p}@1GB/s", f"{p}@1GB/s,2=500MB/s"):
        plan = ring_plan(p, 1000, slots=2, fused=fused)
        assert seconds(plan, topology, "fifo") == pytest.approx(seconds(ring(p, 1000), topology, "fifo"), rel=1e-9)


def test_lanes_keep_fair_ports_as_good_as_fifo() -> None:
    topology = "8@1GB/s,2=500MB/s"
    assert seconds(ring_plan(8, 1000, slots=4), topology, "fair") == pytest.approx(28 * 1000 / 1e9, rel=1e-9)
    assert seconds(ring(8, 1000), topology, "fair") > 1.1 * 28 * 1000 / 1e9


@both
def test_rates_that_have_no_common_tick_are_rounded(model: Model) -> None:
    rates = [10**9 + 7, 10**9 + 9, 10**9 + 21, 10**9 + 33, 10**9 + 87]
    servers = tuple(Server(f"h{i}", 1, (Nic(0, Fraction(rate), Fraction(rate)),)) for i, rate in enumerate(rates))
    rows = [(0, 1, 12348), (1, 2, 12348), (2, 3, 12348), (3, 4, 12348)]
    timing = simulate(transfers_of(5, rows, {1: [0], 2: [1], 3: [2]}), Topology(servers), model=model)
    assert timing.seconds == pytest.approx(sum(12348 / rate for rate in rates[:4]), rel=1e-9)


@both
def test_two_transfers_into_one_port(model: Model) -> None:
    timing = simulate(transfers_of(3, [(0, 2, 300), (1, 2, 300)]), Topology.parse("3@100B/s"), model=model)
    assert timing.end_s.tolist() == ([6.0, 6.0] if model == "fair" else [3.0, 6.0])
    assert timing.start_s.tolist() == ([0.0, 3.0] if model == "exclusive" else [0.0, 0.0])
    assert timing.sent_s.tolist() == {"fifo": [3.0, 3.0], "exclusive": [3.0, 6.0], "fair": [6.0, 6.0]}[model]
    assert timing.taken_s.tolist() == ([0.0, 0.0] if model == "fair" else [0.0, 3.0])
    assert timing.critical == ((0,) if model == "fair" else (0, 1))
    assert timing.utilisation() == {"out h0": 0.5, "in h0": 0, "out h1": 0.5, "in h1": 0, "out h2": 0, "in h2": 1.0}


def test_fair_ports_give_what_others_leave() -> None:
    # h0 sends two, h1 one of them to h2 as well; h3 is slow: 10 B/s for it, so h2 gets 50 from h1 and 50 from h0.
    rows = [(0, 3, 100), (0, 2, 500), (1, 2, 500)]
    timing = simulate(transfers_of(4, rows), Topology.parse("4@100B/s,3=10B/s"), model="fair")
    assert timing.end_s.tolist() == pytest.approx([10.0, 10.0, 10.0], rel=1e-9)


@both
def test_out_and_in_have_their_own_rates(model: Model) -> None:
    topology = "2@100B/s,1=20B/s:50B/s"
    assert seconds(transfers_of(2, [(0, 1, 100)]), topology, model) == 2.0
    assert seconds(transfers_of(2, [(1, 0, 100)]), topology, model) == 5.0


@both
def test_latency_delays_data_and_not_the_port(model: Model) -> None:
    chain = transfers_of(3, [(0, 1, 100), (1, 2, 100)], after={1: [0]})
    assert seconds(chain, "3@100B/s", model, "1/2") == pytest.approx(3.0)
    turn = transfers_of(3, [(0, 1, 100), (0, 1, 100)], order={1: [0]})
    assert seconds(turn, "3@100B/s", model, "1/2") == pytest.approx(2.5)


@both
def test_overhead_comes_before_the_first_byte(model: Model) -> None:
    chain = transfers_of(3, [(0, 1, 100), (1, 2, 100)], after={1: [0]})
    timing = simulate(chain, Topology.parse("3@100B/s"), model=model, overhead_s=0.25)
    assert timing.seconds == pytest.approx(2.5)
    assert timing.port_busy_s == (1.0, 0.0, 1.0, 1.0, 0.0, 1.0)


@both
def test_no_transfers_take_no_time(model: Model) -> None:
    timing = simulate(transfers_of(2, []), Topology.parse("2@1GB/s"), model=model)
    assert (timing.seconds, timing.critical, timing.port_busy_s) == (0.0, (), (0.0, 0.0, 0.0, 0.0))


@both
def test_a_local_operation_takes_no_time(model: Model) -> None:
    chain = transfers_of(2, [(0, 1, 100), (1, 1, 100), (1, 0, 100)], after={1: [0], 2: [1]})
    timing = simulate(chain, Topology.parse("2@100B/s").with_latency(Fraction(1)), model=model)
    assert timing.end_s.tolist() == [2.0, 2.0, 4.0]
    assert timing.critical == (0, 1, 2)


@both
def test_inside_a_server_the_fabric_counts(model: Model) -> None:
    nics = (Nic(0, Fraction(10), Fraction(10)),)
    servers = (Server("a", 2, nics, Fraction(50)), Server("b", 2, nics))
    topology = Topology(servers, latency_s=Fraction(1))
    timing = simulate(transfers_of(4, [(0, 1, 100), (2, 3, 100), (1, 2, 100)]), topology, model=model)
    assert timing.end_s.tolist() == [3.0, 1.0, 11.0]
    assert dict(zip(timing.port_names, timing.port_busy_s, strict=True)) == {
        **{"out a": 10.0, "in a": 0.0, "out b": 0.0, "in b": 10.0},
        **{"out a gpu 0": 2.0, "in a gpu 0": 0.0, "out a gpu 1": 0.0, "in a gpu 1": 2.0},
    }


def test_exclusive_ports_serve_in_order_of_readiness_and_do_not_hold_back_others() -> None:
    # 1 waits for the in port of h2; 2 became ready later, has both ports free and passes it.
    rows = [(1, 2, 300), (0, 2, 100), (3, 3, 4), (0, 3, 100)]
    timing = simulate(transfers_of(4, rows, after={3: [2]}), Topology.parse("4@100B/s"), model="exclusive")
    assert timing.start_s.tolist() == [0.0, 3.0, 0.0, 0.0]
    held = simulate(
        transfers_of(4, rows, after={3: [2]}, order={3: [1]}), Topology.parse("4@100B/s"), model="exclusive"
    )
    assert held.start_s.tolist() == [0.0, 3.0, 0.0, 4.0]
    assert held.critical == (0, 1, 3)


def test_fifo_ports_store_what_a_busy_receiver_cannot_take() -> None:
    timing = simulate(transfers_of(4, [(1, 2, 300), (0, 2, 100), (0, 3, 100)]), Topology.parse("4@100B/s"))
    assert (timing.start_s.tolist(), timing.sent_s.tolist()) == ([0.0, 0.0, 1.0], [3.0, 1.0, 2.0])
    assert (timing.taken_s.tolist(), timing.end_s.tolist()) == ([0.0, 3.0, 1.0], [3.0, 4.0, 2.0])
    assert timing.critical == (0, 1)


def test_a_fifo_port_serves_others_while_a_slow_one_takes_its_time() -> None:
    # 0 is through with its message to the slow rank 2 after 1 s; that one takes it from the first byte on, for 4 s.
    timing = simulate(transfers_of(3, [(0, 2, 100), (0, 1, 100)]), Topology.parse("3@100B/s,2=25B/s"))
    assert (timing.start_s.tolist(), timing.end_s.tolist()) == ([0.0, 1.0], [4.0, 2.0])
    # The other way a message is taken so late that both ports end together, and the fast port is free before.
    timing = simulate(transfers_of(3, [(2, 0, 100), (1, 0, 200)]), Topology.parse("3@100B/s,2=25B/s"))
    assert (timing.taken_s.tolist(), timing.end_s.tolist()) == ([3.0, 0.0], [4.0, 2.0])


def test_the_edges_of_a_plan() -> None:
    plan = ring_plan(2, 8, slots=1)  # transfers 0: 0->1, 1: 1->0, then 2: 0->1, 3: 1->0
    edges = plan_constraints(plan)
    rows = list(zip(edges.before.tolist(), edges.after.tolist(), edges.kind.tolist(), strict=True))
    lanes = [(0, 2, SENT_START), (1, 2, DONE_START), (1, 3, DONE_DONE)]
    lanes += [(1, 3, SENT_START), (0, 3, DONE_START), (0, 2, DONE_DONE)]
    assert rows == [*lanes, (1, 3, DONE_START), (0, 2, DONE_START)]
    assert edges.is_credit.tolist() == [False] * 6 + [True] * 2
    assert list(edges.order) == [[], [], [0, 1], [0, 1]]
    assert list(edges.credit) == [[], [], [0], [1]]


def test_the_edges_of_neutral_transfers() -> None:
    edges = transfer_constraints(
        transfers_of(2, [(0, 1, 4), (0, 1, 4), (0, 1, 4)], after={2: [0]}, order={1: [0], 2: [1]})
    )
    assert (edges.before.tolist(), edges.after.tolist()) == ([0, 0, 1], [2, 1, 2])
    assert edges.kind.tolist() == [DONE_START, SENT_START, SENT_START]
    assert list(edges.order) == [[], [0], [0, 1]]


@both
def test_a_circle_is_refused_with_its_transfers(model: Model) -> None:
    circle = transfers_of(2, [(0, 1, 8), (0, 1, 4), (1, 0, 4)], after={1: [2]}, order={2: [1]})
    with pytest.raises(PlanError, match=r"2 of 3 transfers never start: #1 0->1 .*, #2 1->0 .* must not wait"):
        simulate(circle, Topology.parse("2@1GB/s"), model=model)


def test_refusals() -> None:
    plan, topology = ring(4, 1000), Topology.parse("4@1GB/s")
    with pytest.raises(TopologyError, match="topology of 3 ranks: the plan is for 4 ranks"):
        simulate(plan, Topology.parse("3@1GB/s"))
    with pytest.raises(InputError, match="model 'tcp': must be one of fifo, exclusive, fair"):
        simulate(plan, topology, model="tcp")  # type: ignore[arg-type]
    for overhead_s in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="overhead"):
            simulate(plan, topology, overhead_s=overhead_s)


def rails(*kept: Sequence[int], rate: int = 10) -> Topology:
    """Servers of one GPU, with a NIC on each of two rails, of which those in `kept` survive."""
    servers = tuple(
        Server(f"h{index}", 1, tuple(Nic(rail, Fraction(rate), Fraction(rate), rail not in own) for rail in range(2)))
        for index, own in enumerate(kept)
    )
    return Topology(servers, rail_only=True)


@both
def test_rails_that_servers_share_carry_their_transfers(model: Model) -> None:
    rows = [(0, 1, 100)]
    assert simulate(transfers_of(2, rows), rails((0, 1), (0, 1)), model=model).seconds == 5.0
    assert simulate(transfers_of(2, rows), rails((0, 1), (0,)), model=model).seconds == 10.0
    # 0->1 needs rail 0 and 0->2 rail 1: they do not meet; 0->3 is striped over both.
    topology = rails((0, 1), (0,), (1,), (0, 1))
    apart = simulate(transfers_of(4, [(0, 1, 100), (0, 2, 100)]), topology, model=model)
    assert apart.end_s.tolist() == [10.0, 10.0]
    assert dict(zip(apart.port_names, apart.port_busy_s, strict=True))["out h0 rail 1"] == 10.0
    after = simulate(transfers_of(4, [(0, 1, 100), (0, 3, 100)], after={1: [0]}), topology, model=model)
    assert after.end_s.tolist() == [10.0, 15.0]
    assert after.critical == (0, 1)


def test_stripes_are_sent_and_done_together() -> None:
    # Rail 0 of h0 is busy with 0->1 for 10 s; half of 0->3 waits for it, and what follows 0->3 waits for that half.
    topology = rails((0, 1), (0,), (1,), (0, 1))
    rows = [(0, 1, 100), (0, 3, 100), (3, 0, 100), (0, 2, 100)]
    timing = simulate(transfers_of(4, rows, after={2: [1]}, order={3: [1]}), topology)
    assert timing.start_s.tolist() == [0.0, 0.0, 15.0, 15.0]
    assert timing.sent_s.tolist() == [10.0, 15.0, 20.0, 25.0]
    assert timing.end_s.tolist() == [10.0, 15.0, 20.0, 25.0]


@both
def test_a_ring_on_rails_takes_what_its_weakest_pair_shares(model: Model) -> None:
    topology = rails((0, 1), (0,), (0, 1), (0, 1), rate=10**9)
    for plan in (ring(4, 8000), ring_plan(4, 8000, slots=2)):
        whole = simulate(plan, Topology.parse("4@2GB/s,1=1GB/s"), model="fifo").seconds
        assert simulate(plan, topology, model=model).seconds == pytest.approx(whole, rel=0.4)
    assert simulate(ring(4, 8000), topology).seconds == pytest.approx(6 * 8e-6, rel=1e-9)


def test_servers_that_share_no_rail_cannot_talk() -> None:
    with pytest.raises(TopologyError, match=r"transfer #1 1->0 .*: h1 and h0 share no surviving rail"):
        simulate(transfers_of(3, [(2, 0, 100), (1, 0, 100)]), rails((0,), (1,), (0, 1)))


def test_a_transfer_without_its_instructions_is_refused() -> None:
    plan = ring_plan(2, 8)
    short = transfers_of(2, [(0, 1, 8)] * 5)
    columns = (plan.lane_rank, plan.lanes, plan.kind, plan.in_channel, plan.out_channel, plan.src_offset)
    rest = (plan.dst_offset, plan.bytes, plan.recv_transfer, plan.send_transfer, plan.after)
    with pytest.raises(PlanError, match=r"transfer #4 0->1 .*: 0 sends: must be one"):
        plan_constraints(Plan("short", short, plan.channels, *columns, *rest))


@pytest.fixture
def fresh_kernels() -> Iterator[None]:
    kernels.cache_clear()
    yield
    kernels.cache_clear()


@both
@pytest.mark.usefixtures("fresh_kernels")
def test_without_numba_the_times_are_the_same(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology.parse("6@1GB/s,2=300MB/s").with_latency(Fraction(1, 10**6))
    monkeypatch.setattr("optcc.compiled.tier", Tier(-1, -1))
    compiled = simulate(ring_plan(6, 1000, slots=2), topology, model=model)
    kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    plain = simulate(ring_plan(6, 1000, slots=2), topology, model=model)
    assert plain.start_s.tobytes() == compiled.start_s.tobytes()
    assert plain.end_s.tobytes() == compiled.end_s.tobytes()
    assert plain.critical == compiled.critical


@pytest.mark.usefixtures("fresh_kernels")
def test_without_a_place_for_the_cache_numba_compiles_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")
    asked: list[bool] = []

    def njit(function: object = None, *, cache: bool = False, **_: object) -> object:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return function

    monkeypatch.setattr(numba, "njit", njit)
    monkeypatch.setattr("optcc.compiled.tier", Tier(-1, -1))
    assert simulate(ring(4, 1000), Topology.parse("4@1GB/s")).seconds == pytest.approx(6e-6)
    assert True in asked
    assert False in asked


def test_importing_the_module_does_not_import_numba() -> None:
    code = "import sys, optcc.simulate; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Transfers, Topology]:
    p = draw(st.integers(2, 5))
    rank = st.integers(0, p - 1)
    rows = draw(
        st.lists(st.tuples(rank, rank, st.integers(1, 9).map(lambda elements: 4 * elements)), min_size=1, max_size=25)
    )
    after = {t: draw(st.lists(st.integers(0, t - 1), max_size=2)) for t in range(1, len(rows))}
    rates = [Fraction(draw(st.integers(1, 5))) for _ in range(2 * p)]
    servers = tuple(Server(f"h{i}", 1, (Nic(0, rates[2 * i], rates[2 * i + 1]),)) for i in range(p))
    return transfers_of(p, rows, after), Topology(servers)


@both
@given(case=cases())
def test_no_faster_than_any_port_or_any_chain(model: Model, case: tuple[Transfers, Topology]) -> None:
    transfers, topology = case
    timing = simulate(transfers, topology, model=model)
    assert timing.seconds >= max(timing.port_busy_s) * (1 - 1e-9)
    alone: list[float] = []
    for t, (src, dst, size) in enumerate(zip(transfers.src, transfers.dst, transfers.bytes, strict=True)):
        rate = float(min(topology.out[src], topology.in_[dst]))
        alone.append(max([alone[u] for u in transfers.after[t]], default=0.0) + (size / rate if src != dst else 0.0))
        assert timing.end_s[t] >= alone[t] * (1 - 1e-9)
    assert timing.end_s[timing.critical[-1]] == timing.seconds
    assert timing.start_s[timing.critical[0]] == 0.0
    for first, second in pairwise(timing.critical):
        data, port = (timing.end_s[first], timing.start_s[second]), (timing.sent_s[first], timing.start_s[second])
        waits = (data, port, (timing.end_s[first], timing.taken_s[second]))  # for data, an out port, an in port
        assert any(ends == pytest.approx(begins) for ends, begins in waits)


@both
@given(case=cases(), factor=st.sampled_from([Fraction(2), Fraction(3), Fraction(1, 7)]))
def test_scaling_all_rates_scales_all_times(model: Model, case: tuple[Transfers, Topology], factor: Fraction) -> None:
    transfers, topology = case
    slow = simulate(transfers, topology, model=model)
    fast = simulate(transfers, topology.scaled(factor), model=model)
    assert np.allclose(fast.end_s * float(factor), slow.end_s, rtol=1e-9, atol=0)
