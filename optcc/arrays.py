"""Columns that cannot be changed, and lists of lists packed into two of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int64]


def column(values: Iterable[int] | npt.NDArray[np.integer]) -> Column:
    """`values` as a read-only array of int64."""
    array = np.array(values if isinstance(values, np.ndarray) else list(values), dtype=np.int64)
    array.setflags(write=False)
    return array


def frozen(values: npt.NDArray[np.integer]) -> Column:
    """`values` as an array of int64 that nobody can change: its memory is that of `bytes`, copied unless it already is.

    A read-only array is not enough: whoever owns its memory can make it writable again, or still holds a view of it.

    >>> mine = np.arange(3)
    >>> kept = frozen(mine)
    >>> mine[0] = 7
    >>> kept.tolist(), frozen(kept) is kept
    ([0, 1, 2], True)
    >>> kept.setflags(write=True)
    Traceback (most recent call last):
    ValueError: cannot set WRITEABLE flag to True of this array
    """
    if type(values) is np.ndarray and values.dtype == np.int64 and not values.flags.writeable:
        owner: object = values
        while isinstance(owner, np.ndarray):
            owner = owner.base
        if type(owner) is bytes:
            return cast(Column, values)
    return np.frombuffer(np.asarray(values, dtype=np.int64).tobytes(), dtype=np.int64)


def freeze(parts: object, columns: Sequence[str], lists: Sequence[str]) -> None:
    """Freezes these fields of a frozen dataclass that is being made: columns, and `Lists`."""
    for name in columns:
        object.__setattr__(parts, name, frozen(getattr(parts, name)))
    for name in lists:
        object.__setattr__(parts, name, getattr(parts, name).frozen())


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """`len` lists of integers: list i is `values[starts[i]:starts[i + 1]]`.

    >>> Lists.of([[1, 2], [], [3]])[0].tolist(), len(Lists.of([[1, 2], [], [3]]))
    ([1, 2], 3)
    """

    starts: Column
    values: Column

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Lists:
        """Packs `lists`."""
        starts = np.zeros(len(lists) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, lists), np.int64, len(lists)), out=starts[1:])
        return cls(column(starts), column(np.fromiter(chain.from_iterable(lists), np.int64, starts[-1])))

    @classmethod
    def empty(cls, count: int) -> Lists:
        """`count` lists with nothing in them."""
        return cls(column(np.zeros(count + 1, dtype=np.int64)), column([]))

    def frozen(self) -> Lists:
        """These lists in arrays that nobody can change."""
        starts, values = frozen(self.starts), frozen(self.values)
        return self if starts is self.starts and values is self.values else Lists(starts, values)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Column:
        return self.values[self.starts[index] : self.starts[index + 1]]

    def __iter__(self) -> Iterator[list[int]]:
        values, starts = self.values.tolist(), self.starts.tolist()
        return (values[starts[index] : starts[index + 1]] for index in range(len(starts) - 1))


def sort_part(values: Column, first: int, stop: int) -> None:
    """Sorts `values[first:stop]` in place (Shell sort): for inner loops (`optcc.compiled`), whose parts are short."""
    gap = 1
    while 3 * gap + 1 < stop - first:
        gap = 3 * gap + 1
    while gap:
        for end in range(first + gap, stop):
            value, at = values[end], end
            while at >= first + gap and values[at - gap] > value:
                values[at] = values[at - gap]
                at -= gap
            values[at] = value
        gap //= 3
