"""Failures are drawn as stated: a trial is a function of its seed and number, and every choice is equally likely."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from optcc.errors import CodecError, InputError
from optcc.experiments.failure_model import (
    DAY_S,
    FLAPS_PER_DAY,
    HPN_LINK,
    LLAMA_NETWORK,
    LLAMA_NIC,
    NOTHING,
    Cluster,
    Damage,
    Draws,
    Instant,
    Left,
    OneServer,
    Pattern,
    RailSwitch,
    Slow,
    Uniform,
    down_probability,
    draw,
    flap_probability,
)

BIG = Cluster(64, 8)
DEAD = Fraction(0)
EVERY: tuple[Pattern, ...] = (Uniform(10), OneServer(3), RailSwitch(16), Slow(4), Instant("test", Fraction(1, 50)))


def lost(damage: Damage) -> int:
    """How many NICs are degraded."""
    return sum(len(shares) for shares in damage.values())


# Random numbers


def test_the_generator_is_philox_as_published() -> None:
    """The known answer of Philox 4x64-10 for a key and a counter of zeros; numpy counts before it generates."""
    bits = np.random.Philox(key=np.zeros(2, dtype=np.uint64), counter=np.full(4, 2**64 - 1, dtype=np.uint64))
    assert [int(word) for word in bits.random_raw(2)] == [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC]


@pytest.mark.parametrize("pattern", EVERY, ids=str)
def test_a_trial_does_not_depend_on_what_was_drawn_before(pattern: Pattern) -> None:
    """Nor on the order of the trials."""
    forwards = [draw(pattern, BIG, 5, trial) for trial in range(40)]
    backwards = [draw(pattern, BIG, 5, trial) for trial in reversed(range(40))]
    assert forwards == backwards[::-1]


@pytest.mark.parametrize("pattern", EVERY, ids=str)
def test_seeds_trials_and_clusters_give_different_draws(pattern: Pattern) -> None:
    drawn = {
        str([sorted(draw(pattern, cluster, seed, trial).items()) for trial in range(first, first + 20)])
        for cluster in (BIG, Cluster(60, 8))
        for seed in (1, 2)
        for first in (0, 20)
    }
    assert len(drawn) == 8


def test_draws_are_these_for_good() -> None:
    """A change of these numbers changes every record."""
    assert draw(Uniform(3), BIG, 1, 0) == {18: (DEAD,), 21: (DEAD,), 42: (DEAD,)}
    assert draw(Slow(1), BIG, 2**64 - 1, 7) == {31: (Fraction(1, 4),)}


def test_below_is_fair_where_words_do_not_divide() -> None:
    """A bound of 3 * 2**62 rejects a quarter of all words; each third of the range then has a third of the draws."""
    draws = Draws(3, 0, "thirds")
    counts = Counter(draws.below(3 * 2**62) // 2**62 for _ in range(6000))
    assert all(abs(counts[third] - 2000) < 5 * math.sqrt(6000 * 2 / 9) for third in range(3)), counts


def test_things_happen_as_often_as_they_should() -> None:
    """Within five standard deviations; never, and always."""
    assert Draws(1, 0, "never").happen(1000, Fraction(0)) == []
    assert Draws(1, 0, "always").happen(3, Fraction(1)) == [0, 1, 2]
    n, p = 200_000, Fraction(3, 100)
    found = len(Draws(1, 0, "some").happen(n, p))
    assert abs(found - n * p) < 5 * math.sqrt(n * p * (1 - p))


def test_every_choice_of_failed_nics_is_equally_likely() -> None:
    """Two of six NICs, 6000 trials: chi-squared below its 99.99 % quantile for two degrees of freedom."""
    cluster, trials = Cluster(3, 2), 6000
    names = {pair: (pair[0] // 2, pair[1] // 2) for pair in combinations(range(6), 2)}
    # A pair on one server is drawn again, so 12 choices are left; only servers can be seen: 4 each for 3 pairs of them.
    counts = Counter(tuple(sorted(draw(Uniform(2), cluster, 11, trial))) for trial in range(trials))
    assert set(counts) == {servers for servers in names.values() if servers[0] != servers[1]}
    chi = sum((count - trials / 3) ** 2 / (trials / 3) for count in counts.values())
    assert chi < 18.42, counts


# Patterns


def test_patterns_fail_what_they_say() -> None:
    for trial in range(200):
        assert lost(draw(Uniform(10), BIG, 1, trial)) == 10
        ((_, shares),) = draw(OneServer(3), BIG, 1, trial).items()
        assert shares == (DEAD,) * 3
        slow = draw(Slow(4), BIG, 1, trial)
        assert lost(slow) == 4
        assert all(Fraction(1, 4) <= share <= Fraction(9, 10) for shares in slow.values() for share in shares)
        rail = sorted(draw(RailSwitch(24), BIG, 1, trial))
        assert rail in (list(range(24)), list(range(24, 48)), list(range(48, 64)))


def test_no_server_is_ever_cut_off() -> None:
    """Eight of twelve NICs fail, in threes: without drawing again most trials would have a server without any."""
    for trial in range(300):
        damage = draw(Uniform(8), Cluster(4, 3), 1, trial)
        assert lost(damage) == 8
        assert max(len(shares) for shares in damage.values()) == 2


def test_a_random_instant_has_as_many_failures_as_the_rates_say() -> None:
    """16,384 ports, Llama 3's rate, three days of repair: 2.3 are down, two or more for two thirds of the time."""
    down = down_probability(LLAMA_NETWORK, 3 * DAY_S)
    assert float(16_384 * down) == pytest.approx(2.33, rel=0.01)
    assert float(1024 * down) == pytest.approx(0.146, rel=0.01)
    counts = Counter(lost(draw(Instant("x", down), Cluster(2048, 8), 9, trial)) for trial in range(1000))
    exact = 1 - float(1 - down) ** 16_384 - 16_384 * float(down) * float(1 - down) ** 16_383
    assert exact == pytest.approx(0.67, abs=0.01)
    several = sum(count for number, count in counts.items() if number >= 2)
    assert abs(several - 1000 * exact) < 5 * math.sqrt(1000 * exact * (1 - exact))


def test_rates_are_those_of_their_sources() -> None:
    """Per port and day: 4.75e-5 and 1.9e-5, NICs alone 8e-6; and the share of time that flaps take."""
    assert float(LLAMA_NETWORK.per_port_day) == pytest.approx(4.75e-5, rel=0.001)
    assert float(HPN_LINK.per_port_day) == pytest.approx(1.9e-5, rel=0.01)
    assert float(LLAMA_NIC.per_port_day) == pytest.approx(8e-6, rel=0.02)
    assert [float(flap_probability(flaps)) for flaps in FLAPS_PER_DAY] == pytest.approx([2.9e-6, 3.5e-5], rel=0.01)


@pytest.mark.parametrize(
    ("pattern", "cluster", "said"),
    [
        (Uniform(0), BIG, "0 failed NICs"),
        (Uniform(15), Cluster(2, 8), "15 failed NICs of 2x8: must be from 1 to 14"),
        (Uniform(7 * 16), Cluster(16, 8), "1000 draws in a row"),
        (OneServer(8), BIG, "8 failed NICs of one server: must be from 1 to 7"),
        (RailSwitch(65), BIG, "a switch for 65 of 64 servers"),
        (RailSwitch(2), Cluster(4, 1), "must have another NIC"),
        (Slow(513), BIG, "513 slow NICs"),
        (Instant("x", Fraction(1)), BIG, "probability 1"),
    ],
)
def test_what_cannot_happen_is_refused(pattern: Pattern, cluster: Cluster, said: str) -> None:
    with pytest.raises(InputError, match=said):
        draw(pattern, cluster, 1, 0)


@pytest.mark.parametrize(("seed", "trial"), [(-1, 0), (2**64, 0), (0, -1), (0, 2**64)])
def test_seeds_and_trials_are_words(seed: int, trial: int) -> None:
    with pytest.raises(InputError, match="must be from 0 to"):
        draw(Uniform(1), BIG, seed, trial)


@pytest.mark.parametrize(("servers", "nics"), [(1, 8), (65_537, 8), (4, 0), (4, 1025)])
def test_clusters_have_sensible_sizes(servers: int, nics: int) -> None:
    with pytest.raises(InputError, match="must be from"):
        Cluster(servers, nics)


# What is left


@pytest.mark.parametrize("pattern", EVERY, ids=str)
def test_what_is_left_is_read_as_it_was_written(pattern: Pattern) -> None:
    for trial in range(50):
        left = Left.of(draw(pattern, BIG, 2, trial))
        assert Left.parse(str(left)) == left
    assert Left.parse(NOTHING) == Left(())


def test_servers_that_are_alike_are_one_case() -> None:
    """Whatever their numbers, and whichever of their NICs it was."""
    half = Fraction(1, 2)
    assert Left.of({3: (DEAD, half), 9: (DEAD,)}) == Left.of({0: (DEAD,), 63: (half, DEAD)})
    left = Left.of({3: (DEAD, half), 9: (DEAD,)})
    assert left.rates(BIG) == ((Fraction(13, 16), 1), (Fraction(7, 8), 1), (Fraction(1), 62))
    assert left.degraded == 2


def test_equal_shares_of_different_damage_are_added() -> None:
    """Two NICs at half are as good as one dead and one whole."""
    half = Fraction(1, 2)
    assert Left.of({0: (half, half), 1: (DEAD,)}).rates(Cluster(2, 8)) == ((Fraction(7, 8), 2),)


@pytest.mark.parametrize(
    "text", ["", "0[0]", "1[]", "1[0", "1[1]", "1[2/4]", "1[3/2]", "2[0] 1[0]", "1[0 0] 1[0]", "x"]
)
def test_texts_that_nobody_writes_are_refused(text: str) -> None:
    with pytest.raises(CodecError, match=r"must|shares"):
        Left.parse(text)


@pytest.mark.parametrize("text", ["5[0]", "1[0 0 0 0 0 0 0 0]", "1[0 0 0 0 0 0 0 0 0]"])
def test_more_than_there_is_cannot_be_lost(text: str) -> None:
    with pytest.raises(InputError, match="must"):
        Left.parse(text).rates(Cluster(4, 8))
