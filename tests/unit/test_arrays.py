"""Columns, packed lists, and the sort for inner loops."""

from __future__ import annotations

import random

import numpy as np
import pytest

from optcc.arrays import Lists, column, sort_part


def test_columns_are_copies_that_cannot_be_written() -> None:
    """From arrays, lists and generators; what they were made of may change afterwards."""
    source = np.array([3, 1], dtype=np.int32)
    made = column(source)
    source[0] = 9
    assert made.tolist() == [3, 1] and made.dtype == np.int64
    assert column(each for each in (1, 2)).tolist() == column([1, 2]).tolist()
    with pytest.raises(ValueError, match="read-only"):
        made[0] = 1


def test_lists_are_packed_and_unpacked() -> None:
    """Lists of lists, of arrays, of nothing; iteration gives back Python integers."""
    given = [[1, 2], [], [3], []]
    lists = Lists.of(given)
    assert (list(lists), len(lists), lists.starts.tolist()) == (given, 4, [0, 2, 2, 3, 3])
    assert list(Lists.of([(1, 2), range(0), [3], ()])) == given
    assert all(type(value) is int for each in lists for value in each)
    for lists in (Lists.of([]), Lists.empty(0)):
        assert (len(lists), list(lists)) == (0, [])
    empty = Lists.empty(3)
    assert list(empty) == [[], [], []] and empty.values.dtype == np.int64
    for each in (lists, empty):
        assert not each.starts.flags.writeable and not each.values.flags.writeable


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 14, 200])
def test_sorting_a_part_leaves_the_rest(length: int) -> None:
    """Sorted between first and stop, equal values included; untouched around them."""
    rng = random.Random(length)
    for _ in range(20):
        values = [rng.randrange(50) for _ in range(length + 6)]
        array = np.array(values)
        sort_part(array, 2, 2 + length)
        assert array.tolist() == [*values[:2], *sorted(values[2 : 2 + length]), *values[2 + length :]]
