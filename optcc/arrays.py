"""Columns that cannot be changed, and lists of lists packed into two of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int64]


def column(values: Iterable[int] | npt.NDArray[np.integer]) -> Column:
    """`values` as a read-only array of int64."""
    array = np.array(values if isinstance(values, np.ndarray) else list(values), dtype=np.int64)
    array.setflags(write=False)
    return array


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
        np.cumsum([len(each) for each in lists], out=starts[1:])
        return cls(column(starts), column(value for each in lists for value in each))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Column:
        return self.values[self.starts[index] : self.starts[index + 1]]

    def __iter__(self) -> Iterator[list[int]]:
        values, starts = self.values.tolist(), self.starts.tolist()
        return (values[starts[index] : starts[index + 1]] for index in range(len(starts) - 1))
