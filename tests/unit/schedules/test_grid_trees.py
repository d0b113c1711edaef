"""Rows of servers, what `shares` is for many of them: loads that follow the rates, proved plans, times at the bound."""

from __future__ import annotations

from fractions import Fraction
from itertools import islice

import numpy as np
import pytest

from optcc.compiler import ROW_LANES, compile_schedule
from optcc.experiments.schedule_cases import SIZE_BYTES, one_straggler, random_rates
from optcc.passes.bind import bind
from optcc.passes.depend import depend
from optcc.passes.lane_assignment import ALL_PAIRS_MAX, lanes_by_window
from optcc.schedule import REDUCE
from optcc.schedules.fair_optimum import shares
from optcc.schedules.grid_trees import ROW, Account, balance, row_trees
from optcc.schedules.loads import port_loads
from optcc.schedules.optimal import optimal
from optcc.simulate import simulate
from optcc.topology import Topology
from optcc.verdict import PROVED
from optcc.verify.bounds.closed_forms import collective_bound
from optcc.verify.plan import verify_plan

MANY = ALL_PAIRS_MAX + 8


def over_bound(topology: Topology, segments: int) -> float:
    """The time under fair ports over the bound."""
    built = optimal.under("fair").build(topology, segments)
    plan = compile_schedule(built, size_bytes=SIZE_BYTES, topology=topology, ports="fair")
    return simulate(plan, topology, model="fair").seconds / float(collective_bound(topology, SIZE_BYTES).seconds)


@pytest.mark.parametrize("seed", range(6))
def test_trees_have_the_loads_of_the_rates(seed: int) -> None:
    """In the mean over many trees every port carries what its rate is of all rates, but at least the message once."""
    rng = np.random.default_rng(seed)
    p = int(rng.integers(ROW, 100))
    out, in_ = rng.integers(10, 50, (2, p)) / 7
    sent, received = np.zeros(p), np.zeros(p)
    n_trees = 400
    for up, down in islice(row_trees(out, in_, [1] * p), n_trees):
        assert up.root == down.root
        sent[up.order[1:]] += 1
        np.add.at(received, up.parent[1:], 1)
        np.add.at(sent, down.parent[1:], 1)
        received[down.order[1:]] += 1
    for carried, rates in ((sent, out), (received, in_)):
        wanted = port_loads(rates, 2.0 * (p - 1))
        assert (carried / n_trees <= wanted * 1.02 + 0.03).all(), f"seed {seed}"


def test_a_straggler_that_carries_no_more_than_it_must_is_a_leaf() -> None:
    """In every tree, so that its ports carry the message just once."""
    rates = np.full(MANY, 2.0)
    rates[5] = 1.0
    for up, down in islice(row_trees(rates, rates, [1] * MANY), 200):
        assert 5 not in up.parent
        assert 5 not in down.parent


@pytest.mark.parametrize("seed", range(10))
def test_rows_are_balanced(seed: int) -> None:
    """Of nearly one length, and with children enough, and not too many, for the star of the row."""
    rng = np.random.default_rng(seed)
    p = int(rng.integers(64, 300))
    children = port_loads(rng.uniform(10, 50, p), 2.0 * (p - 1)) - 1
    row = balance(children, p // ROW)
    sizes = np.bincount(row)
    assert sizes.max() - sizes.min() <= 1, f"seed {seed}"
    sums = np.bincount(row, children) - (sizes - 1)
    assert np.abs(sums - sums.mean()).max() < 0.75, f"seed {seed}"


def test_a_row_of_equals_takes_turns() -> None:
    """Each is the centre of its row once in as many trees as the row has servers."""
    account = Account.of(np.ones(2 * ROW), 2)
    centres = []
    for _ in range(ROW):
        account.earn()
        tree = account.grow(int(account.owed.argmax()))
        centres += np.unique(tree.parent[1:]).tolist()
    assert sorted(centres) == list(range(2 * ROW))


@pytest.mark.parametrize("setting", [None, *ROW_LANES, (3, 2)])
@pytest.mark.parametrize("text", [f"{MANY}@50GB/s,1=10GB/s:50GB/s", f"{MANY}x2@50GB/s,2=1/2"])
def test_plans_are_proved(text: str, setting: tuple[int, int] | None) -> None:
    """With lanes for each peer, with windows, and with what is found best; also several GPUs a server."""
    topology = Topology.parse(text)
    built = shares.build(topology, 9)
    for size_bytes in (0, 4 * 97):
        plan = compile_schedule(built, size_bytes=size_bytes, topology=topology, ports="fair", peer_lanes=setting)
        assert verify_plan(plan).verdict == PROVED


def test_a_segment_is_two_trees_only_where_there_are_many() -> None:
    """With as many servers as may have lanes for all pairs, everyone is still the centre of a share."""
    few, many = (shares.build(Topology.parse(f"{p}@50GB/s"), 3) for p in (ALL_PAIRS_MAX, MANY))
    assert len(few) == 3 * 2 * ALL_PAIRS_MAX * (ALL_PAIRS_MAX - 1)
    assert len(many) == 3 * 2 * (MANY - 1)


@pytest.mark.parametrize("window", [1, 5])
def test_a_window_holds_so_many_segments_of_a_rank(window: int) -> None:
    """Sums leave in its lanes and copies come in its lanes, each segment in the one whose turn it is."""
    topology = random_rates(MANY, 1)
    transfers = depend(bind(shares.build(topology, 12), 2**20, "float32", "sum"))
    send, receive, _, slots = lanes_by_window(transfers, window, 2)
    adds = transfers.op == REDUCE
    assert (send[adds] == transfers.segment[adds] % window).all()
    assert (receive[~adds] == window + transfers.segment[~adds] % window).all()
    assert set(slots[adds].tolist()) == {2 * window}
    assert set(slots[~adds].tolist()) == {2}
    for side, lane in ((transfers.src, send), (transfers.dst, receive)):
        key = side * (2 * MANY + window) + lane
        for mine in (adds, ~adds):
            assert not np.intersect1d(key[mine], key[~mine]).size


@pytest.mark.parametrize(
    "make",
    [lambda: one_straggler(MANY, Fraction(2)), pytest.param(lambda: random_rates(MANY, 0), marks=pytest.mark.slow)],
)
def test_many_are_near_the_bound(make: object) -> None:
    """Already with few segments."""
    assert callable(make)
    assert over_bound(make(), 512) <= 1.12


@pytest.mark.slow
@pytest.mark.parametrize("slowdown", [Fraction(8, 7), Fraction(2)])
def test_one_straggler_among_256_takes_hardly_more_than_the_bound(slowdown: Fraction) -> None:
    """The goal for many endpoints."""
    assert over_bound(one_straggler(256, slowdown), 2048) <= 1.05


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_256_random_rates_take_hardly_more_than_the_bound(seed: int) -> None:
    """The goal for many endpoints, out and in apart."""
    assert over_bound(random_rates(256, seed), 2048) <= 1.05
