"""Pre- and postconditions of every collective, element by element, against their definitions."""

from __future__ import annotations

from typing import Any

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
    block = [next(b for b, (i, k) in enumerate(split(count, ranks**2)) if i <= e < k) for e in range(count)]
    for rank in range(ranks):
        own = 1 << rank
        before: list[int | None] = [own] * count
        if name == "allgather" or name == "gather":
            before = [own if owner[e] == rank else None for e in range(count)]
        elif name in ("broadcast", "scatter") and rank != root:
            before = [None] * count
        elif name == "alltoall":
            before = [own if block[e] // ranks == rank else None for e in range(count)]
        after: list[int | None] = {
            "allreduce": [everyone] * count,
            "reducescatter": [everyone if owner[e] == rank else None for e in range(count)],
            "allgather": [1 << owner[e] for e in range(count)],
            "broadcast": [1 << root] * count,
            "reduce": [everyone if rank == root else None] * count,
            "gather": [1 << owner[e] if rank == root else None for e in range(count)],
            "scatter": [1 << root if owner[e] == rank else None for e in range(count)],
            "alltoall": [1 << block[e] // ranks if block[e] % ranks == rank else None for e in range(count)],
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


def test_a_declared_collective_is_a_set_of_ranks_elements_and_contributors() -> None:
    """A halo exchange in a row of three ranks: each owns a part and gets both neighbours' sums; sizes are shares."""
    halo = Collective.declared(
        "halo",
        3,
        before=[(rank, element) for rank in range(3) for element in (rank, rank + 1)],
        after=[
            (rank, element, [r for r in (element - 1, element) if r in range(3)])
            for rank in range(3)
            for element in (rank, rank + 1)
        ],
        sizes=[1, 2, 2, 1],
    )
    assert [halo.before(rank, 12) for rank in range(3)] == [[(0, 6, 1)], [(2, 10, 2)], [(6, 12, 4)]]
    assert halo.after(0, 12) == [(0, 2, 1), (2, 6, 3)]
    assert halo.after(1, 12) == [(2, 6, 3), (6, 10, 6)]
    assert halo.reduces
    assert not Collective.all_to_all_v([[0, 1], [1, 0]]).reduces


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"before": [(0, 0)], "after": [(1, 0, [1])]}, "contributors must be among"),
        ({"before": [(0, 0)], "after": [(1, 0, [])]}, "contributors must be among"),
        ({"before": [(0, 0)], "after": [(1, 0, [0]), (1, 0, [0])]}, "named once"),
        ({"before": [(0, 0)], "after": [(2, 0, [0])]}, "must be below 2"),
        ({"before": [(0, 3)], "after": [], "sizes": [1]}, "elements 3..3: must be from 0 to 0"),
        ({"before": [(0, 0)], "after": [], "sizes": [0]}, "not all zero"),
        ({"before": [], "after": []}, "not all zero"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Collective.declared("mine", 2, **arguments)


def test_only_a_declared_collective_has_cells() -> None:
    cells = Collective.all_to_all_v([[0, 1], [1, 0]]).cells
    with pytest.raises(InputError, match="must have no cells"):
        Collective("allreduce", 2, 0, cells)
    with pytest.raises(InputError, match="must be one of"):
        Collective("mine", 2)
    with pytest.raises(InputError, match="rows of"):
        Collective.all_to_all_v([[1], [1, 2]])
