"""How messages are divided between the rails of a pair of ranks whose NICs are shared with other pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from optcc.runtime.striping import PARTS, Pair, divide
from tests.unit.runtime.protocol.network import Network

Rates = list[list[tuple[int, int]]]
WITHIN = 1.02
"""Of the least possible time of the busiest NIC."""


def all_pairs(n_ranks: int) -> list[Pair]:
    return [(src, dst) for src in range(n_ranks) for dst in range(n_ranks) if src != dst]


def busiest_s(carried: dict[Pair, int], shares: dict[Pair, tuple[int, ...]], rates: Rates) -> float:
    """When the last NIC is done, in either direction; rail r joins NICs r."""
    loads = np.zeros((len(rates), len(rates[0]), 2))
    for (src, dst), parts in shares.items():
        for rail, part in enumerate(parts):
            flow = carried[src, dst] * part / sum(parts)
            loads[src, rail, 0] += flow
            loads[dst, rail, 1] += flow
    return float((loads / np.array(rates)).max())


def least_s(carried: dict[Pair, int], rates: Rates) -> float:
    """The linear program: no division has the last NIC done sooner."""
    optimize = pytest.importorskip("scipy.optimize")
    pairs, n_rails = list(carried), len(rates[0])
    n = len(pairs) * n_rails
    limits = np.zeros((len(rates), n_rails, 2, n + 1))
    equal = np.zeros((len(pairs), n + 1))
    for number, (src, dst) in enumerate(pairs):
        for rail in range(n_rails):
            at = number * n_rails + rail
            limits[src, rail, 0, at] = limits[dst, rail, 1, at] = equal[number, at] = 1
    limits[..., n] = -np.array(rates)
    rows = limits.reshape(-1, n + 1)
    found = optimize.linprog(
        np.eye(n + 1)[n], A_ub=rows, b_ub=np.zeros(len(rows)), A_eq=equal, b_eq=[carried[pair] for pair in pairs]
    )
    return float(found.fun)


@pytest.mark.parametrize("seed", range(40))
def test_the_busiest_nic_is_done_nearly_as_soon_as_it_can_be(seed: int) -> None:
    random = np.random.default_rng(seed)
    n_ranks, n_rails = int(random.integers(2, 8)), int(random.integers(2, 5))
    rates: Rates = random.choice([100, 75, 50, 25], (n_ranks, n_rails, 2), p=[0.6, 0.15, 0.15, 0.1]).tolist()
    carried = {pair: int(n_bytes) for pair in all_pairs(n_ranks) if (n_bytes := random.integers(0, 1000))}
    joined = {pair: [(rail, rail) for rail in range(n_rails)] for pair in carried}
    shares = divide(carried, joined, rates)
    assert busiest_s(carried, shares, rates) <= WITHIN * least_s(carried, rates), f"seed {seed}"


def test_peers_of_a_slow_nic_use_the_same_rail_more_among_themselves() -> None:
    """Four hosts, one NIC at half: what `shares` carries. By the rates of each pair alone, rail 0 has 8 % too much."""
    rates: Rates = [[(50, 50), (50, 50)]] * 3 + [[(50, 50), (25, 25)]]
    carried = {pair: 4 if 3 in pair else 6 for pair in all_pairs(4)}
    joined = {pair: [(0, 0), (1, 1)] for pair in carried}
    shares = divide(carried, joined, rates)
    assert busiest_s(carried, shares, rates) == pytest.approx(16 / 100, rel=5e-3)
    alone: dict[Pair, tuple[int, ...]] = {pair: (2, 1) if 3 in pair else (1, 1) for pair in carried}
    assert busiest_s(carried, alone, rates) == pytest.approx(16 / 100 * 13 / 12)


def test_pairs_that_share_fewer_rails_leave_the_others_to_the_rest() -> None:
    """One host has lost a NIC: its peers meet it on rail 0, and each other mostly on rail 1."""
    rates = [[(50, 50), (50, 50)]] * 3 + [[(50, 50)]]
    carried = dict.fromkeys(all_pairs(4), 1)
    joined: dict[Pair, Sequence[tuple[int, int]]] = {
        pair: [(0, 0)] if 3 in pair else [(0, 0), (1, 1)] for pair in carried
    }
    shares = divide(carried, joined, rates)
    assert shares[0, 3] == (PARTS,)
    assert shares[0, 1][0] / PARTS == pytest.approx(1 / 4, abs=0.01)


@pytest.mark.parametrize(("is_known", "share"), [(True, 1 / 2), (False, 7 / 12)])
def test_what_a_plan_carries_decides_how_bytes_fall_on_the_nics(is_known: bool, share: float) -> None:
    """Three ranks, one slow NIC, all to all; each pair by itself gives rail 0 of the others too much."""
    pairs, size_bytes = all_pairs(3), 4 << 20
    network = Network(3, rates=(100, 100), other={(2, 1): 50})
    handles = network.open(*pairs, carried=[size_bytes] * len(pairs) if is_known else ())
    network.barrier()
    network.until(network.all_up)
    before = [[rail.sent_bytes for rail in endpoint.rail_counts] for endpoint in network.endpoints]
    view = np.zeros(size_bytes, np.uint8)
    for number, (src, dst) in enumerate(pairs):
        network.post_recv(dst, handles[dst][number], view.copy())
        network.post_send(src, handles[src][number], view)
    assert [len(network.poll(rank)) for rank in range(3)] == [4] * 3
    shares = []
    for rank, endpoint in enumerate(network.endpoints):
        sent = [rail.sent_bytes - former for rail, former in zip(endpoint.rail_counts, before[rank], strict=True)]
        shares.append(sent[0] / sum(sent))
    assert shares[:2] == pytest.approx([share] * 2, abs=0.02)
    assert shares[2] == pytest.approx(2 / 3, abs=0.02)


def test_what_carries_nothing_has_no_share() -> None:
    assert divide({(0, 1): 0}, {(0, 1): [(0, 0), (1, 1)]}, [[(1, 1), (1, 1)]] * 2) == {}
    assert divide({}, {}, [[(1, 1)]]) == {}


def test_ranks_of_a_host_share_its_nics() -> None:
    """Two ranks of host 0 send to one rank of a host of its own, whose first NIC is slow, and one of them sends to
    another rank as well: what both give to a NIC of their host counts there together."""
    rates = [[(10, 10), (10, 10)]] * 2 + [[(10, 10), (10, 10)], [(10, 10), (1, 1)]]
    joined = {(0, 2): [(0, 0), (1, 1)], (1, 3): [(0, 0)]}
    carried = {(0, 2): 10, (1, 3): 10}
    apart = divide(carried, joined, rates)
    shared = divide(carried, joined, rates, hosts=[0, 0, 2, 3])
    assert [round(part / PARTS, 1) for part in apart[0, 2]] == [0.5, 0.5]
    assert shared[0, 2][1] > 0.95 * PARTS
