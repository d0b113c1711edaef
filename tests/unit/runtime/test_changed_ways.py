"""Which ranks meet, and what their measurements say: any one host with slower NICs is found in a few rounds."""

from __future__ import annotations

import random

import pytest

from optcc.runtime.changed_ways import PairFlow, Way, first_rounds, later_rounds, settled_rate

KNOWN = 50.0


def find(n_ranks: int, actual: dict[Way, float], seed: int, noise: float) -> tuple[dict[Way, float | None], int]:
    """What is found of one NIC of each rank, and in how many rounds; all but `actual` carry what is known."""
    rng = random.Random(seed)
    ways = [(rank, is_out) for rank in range(n_ranks) for is_out in (True, False)]
    found: dict[Way, list[PairFlow]] = {way: [] for way in ways}
    group = tuple(range(n_ranks))
    rounds, n_rounds = list(first_rounds(group)), 0
    left = ways
    for _ in range(3):
        for pairs in rounds:
            n_rounds += bool(pairs)
            assert len({src for src, _ in pairs} | {dst for _, dst in pairs}) == 2 * len(pairs), "one pair a rank"
            for src, dst in pairs:
                rate = min(actual.get((src, True), KNOWN), actual.get((dst, False), KNOWN))
                went = PairFlow(rate * rng.uniform(1 - noise, 1 + noise), KNOWN)
                for way in ((src, True), (dst, False)):
                    if way in left:
                        found[way].append(went)
        rates = {way: settled_rate(found[way], KNOWN) for way in ways}
        left = [way for way in ways if rates[way] is None]
        if not left:
            break
        rounds = later_rounds(group, left, [way for way in ways if rates[way] == KNOWN])
    return rates, n_rounds


@pytest.mark.parametrize("n_ranks", range(3, 9))
@pytest.mark.parametrize("slow", [{True: 0.5, False: 0.5}, {True: 0.3}, {False: 0.6}, {True: 0.02, False: 0.4}])
def test_one_host_with_a_slow_nic_is_found_and_all_others_are_cleared(n_ranks: int, slow: dict[bool, float]) -> None:
    for rank in range(n_ranks):
        for seed in range(20):
            actual = {(rank, is_out): KNOWN * share for is_out, share in slow.items()}
            rates, n_rounds = find(n_ranks, actual, seed, 0.03)
            for way, rate in rates.items():
                assert rate is not None and rate == pytest.approx(actual.get(way, KNOWN), rel=0.05), (rank, way)
            assert n_rounds <= (4 if n_ranks % 2 == 0 else 8)


def test_two_hosts_that_meet_first_with_slow_nics_are_told_apart() -> None:
    actual = {(0, True): 10.0, (2, False): 20.0}
    rates, _ = find(4, actual, 0, 0.0)
    assert {way: rate for way, rate in rates.items() if rate != KNOWN} == actual


def test_where_nothing_has_changed_two_rounds_are_enough() -> None:
    assert [find(n_ranks, {}, 0, 0.05)[1] for n_ranks in (2, 4, 8)] == [2, 2, 2]


def test_a_measurement_that_is_alone_says_nothing() -> None:
    assert settled_rate([], KNOWN) is None and settled_rate([PairFlow(0.0, KNOWN)] * 2, KNOWN) is None
    # Once as slow for the sake of the other end, then held up by a processor, then as it is.
    found = [PairFlow(25.0, KNOWN), PairFlow(31.0, KNOWN)]
    assert settled_rate(found, KNOWN) is None
    assert settled_rate([*found, PairFlow(25.5, KNOWN)], KNOWN) == pytest.approx(25.25)
    assert settled_rate([*found, PairFlow(48.0, KNOWN)], KNOWN) == KNOWN
