"""The bound of docs/bounds.md for coded schedules: its lemma on random linear schemes, and exact optima over GF(2)."""

from __future__ import annotations

import random

import pytest

from tests.differential.linear_codes import (
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


def element(number: int, p: int, n: int) -> tuple[int, ...]:
    """Z_u for the element u, a sum of elements by the bits of `number`: what each rank has of it."""
    return joined((), [number << (rank * n) for rank in range(p)])


def lost(state: State, number: int, p: int, n: int) -> int:
    """How many transfers of a scheme that ends in `state` say nothing new once element u is zero everywhere."""
    return sum(len(common(known, element(number, p, n), p * n)) - 1 for known in state)


def random_scheme(p: int, n: int, rng: random.Random) -> tuple[State, int, list[int]]:
    """What ranks know when a random scheme has ended, its transfers, and the first one's element."""
    state, count = [own(rank, n) for rank in range(p)], 0
    first: list[int] = []
    while not is_done(tuple(state), p, n):
        src, dst = rng.sample(range(p), 2)
        wanted = joined(state[dst], sums(p, n))
        useful = common(state[src], wanted, p * n) if rng.random() < 0.7 else state[src]
        vector = 0
        for each in useful:
            vector ^= each * rng.randrange(2)
        if not reduced(vector, state[dst]):
            continue
        if not first:
            first = [vector >> (src * n)]
        state[dst], count = joined(state[dst], [vector]), count + 1
    return tuple(state), count, first


def test_intersections_and_sums_are_those_of_all_vectors() -> None:
    rng = random.Random(3)
    for _ in range(200):
        one, other = (joined((), [rng.randrange(64) for _ in range(rng.randrange(5))]) for _ in range(2))
        spans = [{v for v in range(64) if not reduced(v, space)} for space in (one, other)]
        both = {v for v in range(64) if not reduced(v, common(one, other, 6))}
        assert both == spans[0] & spans[1] and len(spans[0]) == 2 ** len(one)


@pytest.mark.parametrize(("p", "n"), [(2, 2), (3, 2), (3, 3), (4, 2), (5, 2)])
def test_the_lemma_holds_of_random_linear_schemes(p: int, n: int) -> None:
    """The element of the first transfer costs p + 1 transfers, for p of three and more; so the bound follows."""
    rng = random.Random(p * n)
    for _ in range(25):
        state, count, (number,) = random_scheme(p, n, rng)
        assert lost(state, number, p, n) >= (p + 1 if p > 2 else 2)
        assert count == sum(len(known) - n for known in state)
        assert count >= (2 * n if p == 2 else (p + 1) * (n - 1) + 2 * (p - 1))


@pytest.mark.parametrize(("p", "n"), [(2, 1), (2, 3), (3, 1), (3, 2), (3, 3), (4, 1)])
def test_few_ranks_need_what_trees_need(p: int, n: int) -> None:
    """Two and three ranks by the proof, and one element for any number."""
    assert fewest_extras(p, n, (p - 2) * n) == (p - 2) * n
    if p > 2:
        assert fewest_extras(p, n, (p - 2) * n - 1) is None


@pytest.mark.slow
def test_four_ranks_with_two_elements_need_twelve_transfers() -> None:
    """One fewer is not excluded by the proof, but by trying every linear scheme over GF(2)."""
    assert (4 + 1) * (2 - 1) + 2 * (4 - 1) == 11
    assert fewest_extras(4, 2, 3) is None


@pytest.mark.slow
def test_five_ranks_with_two_elements_need_fifteen_transfers() -> None:
    """One more than the proof excludes, and one fewer than trees need: 15 is open over GF(2)."""
    assert (5 + 1) * (2 - 1) + 2 * (5 - 1) == 14
    assert fewest_extras(5, 2, 4) is None


def test_trees_need_no_more_extras_than_that() -> None:
    """A star: rank 0 gets everything, and the others the sums."""
    p, n = 4, 2
    state = [own(rank, n) for rank in range(p)]
    state[0] = joined((), [each for rank in range(p - 1) for each in own(rank, n)])
    done = with_free_transfers(tuple(state), p, n)
    assert is_done(done, p, n)
    assert sum(len(known) - n for known in done) == 2 * (p - 1) * n
