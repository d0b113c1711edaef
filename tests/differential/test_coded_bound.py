"""The bound of docs/bounds.md for linear codes: its proof on random schemes, and exact optima over GF(2)."""

from __future__ import annotations

import random

import pytest

from tests.differential.linear_codes import (
    Space,
    State,
    common,
    fewest_extras,
    is_done,
    joined,
    own,
    reduced,
    sums,
    with_free_transfers,
)

Symbol = tuple[int, int, int]
"""Sender, receiver, and what is sent."""


def random_scheme(p: int, n: int, rng: random.Random) -> list[Symbol]:
    """The symbols of a random scheme that tell their receivers something new, until every rank knows the sums."""
    known, sent = [own(rank, n) for rank in range(p)], []
    direct = rng.random()
    while not is_done(tuple(known), p, n):
        src, dst = rng.sample(range(p), 2)
        within = joined(known[dst], sums(p, n))
        vector = 0
        for each in common(known[src], within, p * n) if rng.random() < direct else known[src]:
            vector ^= each * rng.randrange(2)
        if reduced(vector, known[dst]):
            known[dst] = joined(known[dst], [vector])
            sent.append((src, dst, vector))
    return sent


def ring(p: int) -> list[Symbol]:
    """A ring of p elements: 2(p - 1) symbols for each."""
    held = [[1 << (rank * p + i) for i in range(p)] for rank in range(p)]
    sent = []
    for step in range(2 * p - 2):
        for src in range(p):
            dst, i = (src + 1) % p, (src - step) % p
            sent.append((src, dst, held[src][i]))
            held[dst][i] = held[dst][i] ^ held[src][i] if step < p - 1 else held[src][i]
    return sent


def part(vector: int, rank: int, n: int) -> int:
    """What is in a vector of a rank's own elements: a function of n elements."""
    return vector >> (rank * n) & ((1 << n) - 1)


def all_known(state: State, p: int, n: int) -> Space:
    """The functions whose sums the ranks know, each some of them."""
    found = [each for known in state for each in common(known, sums(p, n), p * n)]
    return joined((), [part(each, 0, n) for each in joined((), found)])


def check_proof(sent: list[Symbol], p: int, n: int) -> None:
    """Every statement of the proof in docs/bounds.md, symbol by symbol."""
    known = [own(rank, n) for rank in range(p)]
    parts: list[Space] = [()] * p
    complete: Space = ()
    direct, extras, completions = [0] * p, [0] * p, [0] * p
    for src, dst, symbol in sent:
        before = [joined(each, complete) for each in parts]
        is_direct = reduced(symbol, joined(known[dst], sums(p, n))) == 0
        grown = len(common(known[dst], sums(p, n), p * n))
        known[dst] = joined(known[dst], [symbol])
        assert len(common(known[dst], sums(p, n), p * n)) == grown + is_direct
        if is_direct:
            direct[dst] += 1
        else:
            extras[src] += 1
            parts[src] = joined(parts[src], [part(symbol, src, n)])
        now = all_known(tuple(known), p, n)
        assert len(now) - len(complete) in ((0, 1) if is_direct else (0,))
        if len(now) > len(complete):
            completions[src] += 1
            completions[dst] += 1
        complete = now
        for rank in range(p):
            after = joined(parts[rank], complete)
            assert len(after) - len(before[rank]) <= (rank == src or (rank == dst and is_direct))
            others = [each for other in range(p) if other != rank for each in known[other]]
            assert not any(reduced(part(each, rank, n), after) for each in others)
    assert is_done(tuple(known), p, n) and len(complete) == n
    assert direct == [n] * p and sum(completions) == 2 * n
    assert all(more >= n - ends for more, ends in zip(extras, completions, strict=True))
    assert len(sent) == sum(direct) + sum(extras) >= 2 * (p - 1) * n


def test_intersections_and_sums_are_those_of_all_vectors() -> None:
    rng = random.Random(3)
    for _ in range(200):
        one, other = (joined((), [rng.randrange(64) for _ in range(rng.randrange(5))]) for _ in range(2))
        spans = [{v for v in range(64) if not reduced(v, space)} for space in (one, other)]
        both = {v for v in range(64) if not reduced(v, common(one, other, 6))}
        assert both == spans[0] & spans[1] and len(spans[0]) == 2 ** len(one)


@pytest.mark.parametrize(("p", "n"), [(2, 3), (3, 3), (4, 2), (4, 3), (5, 2), (6, 2)])
def test_the_proof_holds_of_random_linear_schemes(p: int, n: int, seed: int) -> None:
    rng = random.Random(f"{p} {n} {seed}")
    for _ in range(15):
        check_proof(random_scheme(p, n, rng), p, n)


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6])
def test_a_ring_needs_no_more(p: int) -> None:
    sent = ring(p)
    check_proof(sent, p, p)
    assert len(sent) == 2 * (p - 1) * p


@pytest.mark.parametrize(("p", "n"), [(2, 1), (2, 3), (3, 1), (3, 2), (3, 3), (4, 1)])
def test_few_ranks_need_what_trees_need(p: int, n: int) -> None:
    """By trying every linear scheme over GF(2)."""
    assert fewest_extras(p, n, (p - 2) * n) == (p - 2) * n
    if p > 2:
        assert fewest_extras(p, n, (p - 2) * n - 1) is None


@pytest.mark.slow
def test_four_ranks_with_two_elements_need_twelve_transfers() -> None:
    """By trying every linear scheme over GF(2): three extras are too few."""
    assert fewest_extras(4, 2, 3) is None


def test_trees_need_no_more_extras_than_that() -> None:
    """A star: rank 0 gets everything, and the others the sums."""
    p, n = 4, 2
    state = [own(rank, n) for rank in range(p)]
    state[0] = joined((), [each for rank in range(p - 1) for each in own(rank, n)])
    done = with_free_transfers(tuple(state), p, n)
    assert is_done(done, p, n)
    assert sum(len(known) - n for known in done) == 2 * (p - 1) * n
