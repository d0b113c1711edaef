"""The swarm finds faults that are planted: a handful here, all in the slow set."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.faults.planted import FAULTS, FIXES, FOUND_BY, MUTATIONS, SEEDS, first_seed, likely_seeds

SOON = (
    "a bye is ignored",
    "a chunk goes into the wrong slot",
    "a part that was written is written again",
    "an eager message is not copied",
    "an early message is not copied into its slot",
    "what was out on a lost rail is not sent again",
)


@pytest.mark.parametrize("name", FAULTS)
def test_it_can_still_be_planted(name: str) -> None:
    with FAULTS[name].planted():
        pass


def test_seeds_are_known_of_planted_faults() -> None:
    assert FOUND_BY.keys() <= FAULTS.keys() and all(0 <= seed < SEEDS for seed in FOUND_BY.values())


@pytest.mark.parametrize("name", SOON)
def test_the_swarm_soon_finds(name: str) -> None:
    seed, what = first_seed(name, likely_seeds(name, range(150)))
    assert seed is not None, what


@pytest.mark.slow
@pytest.mark.search
def test_the_swarm_finds_all() -> None:
    assert len(FIXES) >= 8 and len(MUTATIONS) >= 40 and len(FAULTS) == len(FIXES) + len(MUTATIONS)
    with ProcessPoolExecutor(2) as pool:
        found = dict(zip(FAULTS, pool.map(first_seed, FAULTS, map(list, map(likely_seeds, FAULTS))), strict=True))
    print("\n".join(f"{seed!s:>5}  {name}" for name, (seed, _) in found.items()))
    assert [name for name, (seed, _) in found.items() if seed is None] == [], f"not found below seed {SEEDS}"
