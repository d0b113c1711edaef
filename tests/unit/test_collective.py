"""Pre- and postconditions of every collective, element by element, against their definitions."""

from __future__ import annotations

import pytest

from optcc.collective import COLLECTIVES, Collective, Region, check_count, check_dtype, check_reduction, split
from optcc.errors import InputError


def held(regions: list[Region], count: int) -> list[int | None]:
    """For each element the contributors, None where nothing is said; regions must not overlap."""
    result: list[int | None] = [None] * count
    for first, stop, ranks in regions:
        for element in range(first, stop):
            assert result[element] is None
            result[element] = ranks
    return result


@pytest.mark.parametrize("count", [0, 1, 5, 7, 12])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_conditions_are_the_definitions(name: str, ranks: int, count: int) -> None:
    """Who holds what before, and must hold what after, for the last rank as root."""
    root = ranks - 1
    collective = Collective(name, ranks, root)
    everyone = 2**ranks - 1
    owner = [next(r for r, (a, b) in enumerate(split(count, ranks)) if a <= e < b) for e in range(count)]
    for rank in range(ranks):
        own = 1 << rank
        before: list[int | None] = [own] * count
        if name == "allgather":
            before = [own if owner[e] == rank else None for e in range(count)]
        elif name == "broadcast" and rank != root:
            before = [None] * count
        after: list[int | None] = {
            "allreduce": [everyone] * count,
            "reducescatter": [everyone if owner[e] == rank else None for e in range(count)],
            "allgather": [1 << owner[e] for e in range(count)],
            "broadcast": [1 << root] * count,
            "reduce": [everyone if rank == root else None] * count,
        }[name]
        assert held(collective.before(rank, count), count) == before
        assert held(collective.after(rank, count), count) == after


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 11])
@pytest.mark.parametrize("count", [0, 1, 7, 10, 97])
def test_split_cuts_evenly_and_completely(count: int, parts: int) -> None:
    """Adjacent ranges from 0 to count whose lengths differ by at most one."""
    ranges = list(split(count, parts))
    assert [first for first, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == count
    lengths = [stop - first for first, stop in ranges]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("name", "ranks", "root"), [("gossip", 2, 0), ("allreduce", 0, 0), ("reduce", 2, 2), ("reduce", 2, -1)]
)
def test_collectives_that_cannot_be(name: str, ranks: int, root: int) -> None:
    """Unknown names, no ranks, a root that is no rank."""
    with pytest.raises(InputError):
        Collective(name, ranks, root)


@pytest.mark.parametrize(
    ("size", "dtype"), [(-4, "float32"), (6, "float32"), (12, "float64"), (3, "bfloat16"), (4, "half")]
)
def test_sizes_that_are_no_elements(size: int, dtype: str) -> None:
    """A message is a whole number of elements of a known type."""
    with pytest.raises(InputError):
        check_count(size, dtype)


def test_known_types_and_reductions() -> None:
    """What is known passes; what is not is refused with the list."""
    assert check_dtype("float64") == 8
    assert check_reduction("avg") == "avg"
    with pytest.raises(InputError, match="float32, float64"):
        check_dtype("half")
    with pytest.raises(InputError, match="sum, prod"):
        check_reduction("xor")
